"""Shipped tools to test stores and what is built on them.

Each is loaded when it is used: the contract needs pytest, ``everystep.testing.strategies`` needs Hypothesis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everystep.testing.contract import StoreContract
    from everystep.testing.crashing import CrashingStore
    from everystep.testing.mounted import Mount
    from everystep.testing.simdisk import FaultPlan, PowerCut, SimDisk, Survival

__all__ = ["CrashingStore", "FaultPlan", "Mount", "PowerCut", "SimDisk", "StoreContract", "Survival"]

_HOME = {
    "CrashingStore": "crashing",
    "FaultPlan": "simdisk",
    "Mount": "mounted",
    "PowerCut": "simdisk",
    "SimDisk": "simdisk",
    "StoreContract": "contract",
    "Survival": "simdisk",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
