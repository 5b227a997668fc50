"""One small module for each kind of checkpoint, and which of them a folder is, by looking at it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from everystep.consolidate.source import Found, Opened
from everystep.consolidate.sources import accelerate, automodel, huggingface, own
from everystep.consolidate.sources.folders import names_in, own_name
from everystep.errors import ConfigError, CorruptionError, NotFoundError

__all__ = ["found", "opened"]

_DEPTH = 3
_DCP = re.compile(r"\.metadata|__\d{1,9}\.metadata|.*\.distcp")
_TITAN = re.compile(r"step-\d{1,18}")
_SAVED = re.compile(r"(?:checkpoint|step|global_step)[-_]?\d{1,18}")
_OURS = ("exports", "consolidated")
_LOOKS = (
    "a run of everystep (run.json), .metadata with *.distcp, safetensors shards, epoch_*_step_*/model of NeMo AutoModel, "
    "or pytorch_model_fsdp_0 of Accelerate"
)


def opened(path: str, *, step: int | str | None, group: str | None) -> Opened:
    """See ``open_source``."""
    run = own.run_of(path)
    if run is not None:
        return own.open_own(run[0], step=run[1] or step, group=group)
    path = _outer(path)
    if not os.path.isdir(path):
        raise NotFoundError(f"there is no folder {path!r}", key=path, kind="no-folder", hint=f"name a folder with {_LOOKS}")
    if _kind(path) is not None:
        return _open(path, group)
    return _open(_one_of(path, "latest" if step is None else step), group)


def found(root: str) -> list[Found]:
    """See ``find_checkpoints``."""
    run = own.run_of(root)
    if run is not None:
        return own.found_in(run[0])
    return sorted(_below(root, _DEPTH), key=lambda one: (one.step, one.saved_at, one.path))


def _outer(path: str) -> str:
    """The checkpoint whose folder of the model this is; else the folder itself."""
    outer = os.path.dirname(os.path.abspath(path))
    inside = {"model": automodel.KIND, accelerate.MODEL_FOLDER: "accelerate"}.get(os.path.basename(os.path.normpath(path)))
    return outer if inside is not None and _kind(outer) == inside else path


def _kind(path: str) -> str | None:
    """Whose checkpoint a folder is; None where it is none."""
    names = names_in(path)
    if "everystep.json" in names or ".reserving-" in os.path.basename(path):  # an export; a name that NeMo AutoModel reserves
        return None
    if automodel.is_one(path, names):
        return automodel.KIND
    if accelerate.MODEL_FOLDER in names:
        return "accelerate"
    if any(map(_DCP.fullmatch, names)):
        name = own_name(path)
        return "lightning" if "meta.pt" in names or name.endswith(".ckpt") else "torchtitan" if _TITAN.fullmatch(name) else "dcp"
    if any(_SAVED.fullmatch(name) and _kind(os.path.join(path, name)) for name in names):
        return None  # a model that was saved at the end, beside the checkpoints
    if accelerate.is_one(path, names):
        return "accelerate"
    if huggingface.is_one(names) or huggingface.home_of(path) != path:
        return "safetensors"
    return None


def _open(path: str, group: str | None) -> Opened:
    kind = _kind(path)
    if kind == automodel.KIND:
        return automodel.open_automodel(path, group)
    if kind == "accelerate":
        return accelerate.open_accelerate(path, group)
    if kind == "safetensors":
        return huggingface.open_safetensors(path, group)
    if kind == "lightning":
        from everystep.consolidate.sources import lightning  # torch is imported for those who need it

        return lightning.open_lightning(path, group)
    from everystep.consolidate.sources import dcp

    return dcp.open_dcp(path, group, kind=kind or "dcp")


def _looked_at(path: str, kind: str) -> Found:
    if kind == automodel.KIND:
        return automodel.found_at(path)
    if kind == "accelerate":
        return accelerate.found_at(path)
    if kind == "safetensors":
        return huggingface.found_at(path)
    if kind == "lightning":
        from everystep.consolidate.sources import lightning

        return lightning.found_at(path)
    from everystep.consolidate.sources import dcp

    return dcp.found_at(path, kind=kind)


def _below(folder: str, depth: int) -> list[Found]:
    kind = _kind(folder)
    if kind is not None:
        return [_looked_at(folder, kind)]
    inner = [os.path.join(folder, name) for name in names_in(folder) if not name.startswith(".") and name not in _OURS] if depth else []
    return [one for path in inner if os.path.isdir(path) and not os.path.islink(path) for one in _below(path, depth - 1)]


def _one_of(root: str, step: int | str) -> str:
    """The checkpoint of several below a folder that is meant."""
    every = found(root)
    good = [one for one in every if one.complete]
    if isinstance(step, str) and step in {"latest", "best"}:
        path = automodel.linked(root, step)
        # The links are moved before a checkpoint is complete.
        if path is not None and any(one.path == path for one in good):
            return path
    if not every:
        raise NotFoundError(f"{root!r} holds no checkpoint that is known here", key=root, kind="no-checkpoint", hint=f"looked for {_LOOKS}")
    if isinstance(step, str) and step.partition(":")[0] == "best":
        best: str = own.best_of({one.path: one.metrics for one in good}, step, where=root)
        return best
    if step == "latest":
        return _newest(good or every)
    wanted = int(step) if isinstance(step, int) or step.isdigit() else None
    fitting = [one for one in every if (one.step == wanted if wanted is not None else one.key == step)]
    if not fitting:
        known = ", ".join(str(one.step) for one in every[-10:])
        if wanted is None:
            raise ConfigError(
                f"{step!r} is no step of {root!r}", key=root, kind="step", hint=f"give latest, best, or one of the steps {known}"
            )
        raise NotFoundError(
            f"no checkpoint of step {step} in {root!r}", step=wanted, key=root, kind="no-checkpoint", hint=f"there are steps {known}"
        )
    return _newest(fitting)


def _newest(several: Sequence[Found]) -> str:
    last = max(several, key=lambda one: (one.step, one.saved_at))
    if not last.complete:
        raise CorruptionError(f"{last.path!r} is not complete: {last.why}", step=last.step, key=last.path, kind="incomplete",
                              hint="take another step, or wait")  # fmt: skip
    return last.path
