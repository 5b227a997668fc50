"""What Accelerate and the Transformers Trainer write: a folder with ``pytorch_model_fsdp_0/`` (DCP's) in it, or with safetensors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from everystep.consolidate.source import Found, Opened
from everystep.consolidate.sources import huggingface
from everystep.consolidate.sources.folders import names_in, numbers_of, own_name, read_json, step_in

MODEL_FOLDER = "pytorch_model_fsdp_0"
_STATE = "trainer_state.json"
_RANK = re.compile(r"(?:rng_state_(\d{1,9})\.pth|random_states_(\d{1,9})\.pkl)")


def is_one(path: str, names: Sequence[str]) -> bool:
    """Whether a folder is a checkpoint of Accelerate's FSDP or of the Trainer's."""
    if MODEL_FOLDER in names:
        return True
    marked = _STATE in names or any(map(_RANK.fullmatch, names)) or ("config.json" in names and any(map(_is_part, names)))
    return huggingface.is_one(names) and marked


def kind_of(names: Sequence[str]) -> str:
    """``"transformers"`` where its Trainer or ``save_pretrained`` wrote, else ``"accelerate"``."""
    return "transformers" if {_STATE, "config.json"} & set(names) or _is_trainers(names) else "accelerate"


def found_at(path: str) -> Found:
    """The checkpoint, whole or not. The Trainer writes its state last; its model is whole when DCP says so."""
    names = names_in(path)
    kind = kind_of(names)
    if MODEL_FOLDER in names:
        from everystep.consolidate.sources import dcp

        found = dcp.found_at(path, kind=kind, folder=MODEL_FOLDER, metrics=_metrics(path))
    else:
        found = huggingface.found_at(path, kind=kind, metrics=_metrics(path))
    if found.complete and _STATE not in names and _is_trainers(names):
        return found._replace(complete=False, why=f"{_STATE!r} is not there (yet): it is written last")
    return found._replace(step=_step(path))


def open_accelerate(path: str, group: str | None) -> Opened:
    """The model of the checkpoint at ``path``. Errors as in ``open_source``."""
    names = names_in(path)
    kind, assets = kind_of(names), path if "config.json" in names else None
    if MODEL_FOLDER in names:
        from everystep.consolidate.sources import dcp

        return dcp.open_dcp(path, group, kind=kind, folder=MODEL_FOLDER, metrics=_metrics(path), assets=assets, step=_step(path))
    world = sum(_RANK.fullmatch(name) is not None for name in names)
    expected = huggingface.Expected(world=world)
    return huggingface.open_safetensors(path, group, kind=kind, metrics=_metrics(path), assets=assets, step=_step(path), expected=expected)


def _is_trainers(names: Sequence[str]) -> bool:
    return bool({"training_args.bin", "scheduler.pt", "optimizer.pt"} & set(names)) or any(name.startswith("rng_state") for name in names)


def _is_part(name: str) -> bool:
    return name.startswith("shard-") and name.endswith(huggingface.SUFFIX)


def _step(path: str) -> int:
    told = read_json(os.path.join(path, _STATE))
    step = told.get("global_step") if isinstance(told, dict) else None
    return step if type(step) is int and step >= 0 else step_in(own_name(path))


def _metrics(path: str) -> dict[str, float]:
    """What the Trainer logged at the step of its last save."""
    told = read_json(os.path.join(path, _STATE))
    if not isinstance(told, dict) or not isinstance(told.get("log_history"), list):
        return {}
    found: dict[str, float] = {}
    for entry in told["log_history"]:
        if isinstance(entry, dict) and entry.get("step") == told.get("global_step"):
            found.update(numbers_of(entry, besides=("step", "epoch")))
    return found
