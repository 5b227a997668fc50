"""Checkpoint every training step without slowing training; keep what matters; hand over deployable weights.

The public names are imported when they are first used, so that ``import everystep``, the agent and the command line start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everystep.errors import AgentError as AgentError
    from everystep.errors import CapacityError as CapacityError
    from everystep.errors import CheckpointError as CheckpointError
    from everystep.errors import ConfigError as ConfigError
    from everystep.errors import ConflictError as ConflictError
    from everystep.errors import CorruptionError as CorruptionError
    from everystep.errors import LayoutError as LayoutError
    from everystep.errors import NotFoundError as NotFoundError
    from everystep.errors import PermanentStoreError as PermanentStoreError
    from everystep.errors import StateError as StateError
    from everystep.errors import StoreError as StoreError
    from everystep.errors import TornSnapshotError as TornSnapshotError
    from everystep.errors import TransientStoreError as TransientStoreError
    from everystep.policy import Cadence as Cadence
    from everystep.policy import Keep as Keep
    from everystep.schedule import Consolidate as Consolidate
    from everystep.trainer.checkpointer import Checkpointer as Checkpointer
    from everystep.trainer.finding import RestoredFrom as RestoredFrom
    from everystep.trainer.load import load as load
    from everystep.trainer.pending import Pending as Pending
    from everystep.trainer.pending import PendingExport as PendingExport
    from everystep.trainer.pending import Report as Report
    from everystep.trainer.preemption import Preemption as Preemption
    from everystep.trainer.preemption import PreemptionReport as PreemptionReport
    from everystep.trainer.state import RNG as RNG
    from everystep.trainer.state import RestoreReport as RestoreReport

__version__ = "0.1.0"

_HOMES = {
    "AgentError": "everystep.errors",
    "Cadence": "everystep.policy",
    "CapacityError": "everystep.errors",
    "CheckpointError": "everystep.errors",
    "Checkpointer": "everystep.trainer.checkpointer",
    "ConfigError": "everystep.errors",
    "ConflictError": "everystep.errors",
    "Consolidate": "everystep.schedule",
    "CorruptionError": "everystep.errors",
    "Keep": "everystep.policy",
    "LayoutError": "everystep.errors",
    "NotFoundError": "everystep.errors",
    "Pending": "everystep.trainer.pending",
    "PendingExport": "everystep.trainer.pending",
    "PermanentStoreError": "everystep.errors",
    "Preemption": "everystep.trainer.preemption",
    "PreemptionReport": "everystep.trainer.preemption",
    "RNG": "everystep.trainer.state",
    "Report": "everystep.trainer.pending",
    "RestoreReport": "everystep.trainer.state",
    "RestoredFrom": "everystep.trainer.finding",
    "StateError": "everystep.errors",
    "StoreError": "everystep.errors",
    "TornSnapshotError": "everystep.errors",
    "TransientStoreError": "everystep.errors",
    "load": "everystep.trainer.load",
}

__all__ = [
    "RNG",
    "AgentError",
    "Cadence",
    "CapacityError",
    "CheckpointError",
    "Checkpointer",
    "ConfigError",
    "ConflictError",
    "Consolidate",
    "CorruptionError",
    "Keep",
    "LayoutError",
    "NotFoundError",
    "Pending",
    "PendingExport",
    "PermanentStoreError",
    "Preemption",
    "PreemptionReport",
    "Report",
    "RestoreReport",
    "RestoredFrom",
    "StateError",
    "StoreError",
    "TornSnapshotError",
    "TransientStoreError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> object:
    """Import a public name at its first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'everystep' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted({*globals(), *__all__})
