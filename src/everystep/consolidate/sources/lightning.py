"""What Lightning's sharded strategies write: DCP's files and ``meta.pt``, the module's state under ``state_dict`` or ``model``."""

from __future__ import annotations

import os
import pickle  # for the name of torch's error alone

from everystep.consolidate.source import Found, Opened
from everystep.consolidate.sources import dcp
from everystep.consolidate.sources.folders import metrics_in, names_in, own_name, step_in

META = "meta.pt"


def found_at(path: str) -> Found:
    """The checkpoint, whole or not: ``meta.pt`` is written last. Metrics are those that its name tells."""
    found = dcp.found_at(path, kind="lightning", metrics=metrics_in(own_name(path)))
    if found.complete and META not in names_in(path):
        return found._replace(complete=False, why=f"{META!r} is not there (yet): it is written last")
    return found


def open_lightning(path: str, group: str | None) -> Opened:
    """The module of the checkpoint at ``path``; what a LightningModule trains (``self.model``) under its own names.

    Errors as in ``open_source``.
    """
    step = step_in(own_name(path)) or _told_step(path)
    return dcp.open_dcp(path, group, kind="lightning", metrics=metrics_in(own_name(path)), step=step, unwrap=True)


def _told_step(path: str) -> int:
    """The step that ``meta.pt`` tells, where torch loads it without running anything."""
    import torch

    try:
        told = torch.load(os.path.join(path, META), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError):
        return 0
    step = told.get("global_step") if isinstance(told, dict) else None
    return step if type(step) is int and step >= 0 else 0
