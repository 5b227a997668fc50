"""What NeMo AutoModel writes: ``epoch_E_step_S`` folders under one root, with the model in ``model/``.

A checkpoint is whole when its ``.incomplete`` is gone; the links LATEST and LOWEST_VAL are moved before that. The shards tell no whole
shapes, but other files of the checkpoint and of those beside it do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickletools
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence

from everystep.consolidate.source import Found, Opened
from everystep.consolidate.sources import huggingface
from everystep.consolidate.sources.folders import changed_at, names_in, numbers_of, own_name, read_json, safe
from everystep.errors import CheckpointError, CorruptionError, NotFoundError

KIND = "automodel"
INCOMPLETE = ".incomplete"
_NAME = re.compile(r"epoch_\d+_step_(\d{1,18})")
_RNG = re.compile(r"rng_global_rank_(\d{1,9})\.pt")
_ADAPTER = "adapter_model.safetensors"
_MOMENTS = re.compile(r"(?:^|\.)state\.(.+)\.(?:exp_avg|exp_avg_sq|momentum_buffer)")
_SMALL = 1 << 16
_LINKS = {"latest": "LATEST", "best": "LOWEST_VAL"}


def is_one(path: str, names: Sequence[str]) -> bool:
    """Whether a folder is a checkpoint of NeMo AutoModel."""
    if "model" not in names:
        return _NAME.fullmatch(own_name(path)) is not None and INCOMPLETE in names
    return _NAME.fullmatch(own_name(path)) is not None or ".hf_metadata" in names_in(os.path.join(path, "model"))


def found_at(path: str) -> Found:
    """The checkpoint, whole or not."""
    name, names = own_name(path), names_in(path)
    match = _NAME.fullmatch(name)
    step = _steps_done(path, int(match[1]) if match else 0)
    metrics = numbers_of(read_json(os.path.join(path, "losses.json")))
    saved_at = changed_at(path, [*names, *(f"model/{inner}" for inner in names_in(os.path.join(path, "model")))])
    why = f"{INCOMPLETE!r} is there: it is being written, or its writer died" if INCOMPLETE in names else ""
    if not why:
        inner = _model_found(path)
        why = inner.why
    return Found(path, KIND, step, not why, why, saved_at, metrics, safe(name))


def _steps_done(path: str, number: int) -> int:
    """How many steps were done. NeMo 0.7 counts them from 0: the folder after a hundred steps is ``epoch_0_step_99``; others count from 1.
    The step scheduler's state (a pickled dict of numbers, looked at and not run) says which; where it does not, the folder does."""
    try:
        with zipfile.ZipFile(os.path.join(path, "step_scheduler.pt")) as archive:
            entry = next((one for one in archive.infolist() if one.filename.endswith("/data.pkl") and one.file_size < _SMALL), None)
            words = [word for _, word, _ in pickletools.genops(archive.read(entry)) if word is not None] if entry else []
    except (OSError, ValueError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile):
        return number
    # What lies between a key and its value are numbers of the pickle's memo.
    said = next((words[at + 2] for at, word in enumerate(words[:-2]) if word == "step"), None)
    return number + 1 if said == number + 1 else number


def linked(root: str, word: str) -> str | None:
    """The checkpoint that a root's LATEST or LOWEST_VAL (a link, or a ``.txt`` with its path) leads to; None where nothing does."""
    link = _LINKS.get(word)
    if link is None:
        return None
    path = os.path.join(root, link)
    if os.path.isdir(path):
        return os.path.join(root, own_name(path))
    try:
        with open(path + ".txt", encoding="utf-8") as file:
            told = os.path.join(root, os.path.basename(file.read(4096).strip().rstrip("/")))
    except (OSError, UnicodeDecodeError):
        return None
    return told if os.path.isdir(told) else None


def open_automodel(path: str, group: str | None) -> Opened:
    """The model of the checkpoint at ``path``. Errors as in ``open_source``."""
    found = found_at(path)
    if INCOMPLETE in names_in(path):
        raise CorruptionError(f"{path!r} is not complete: {found.why}", step=found.step, key=path, kind="incomplete",
                              hint="take an older checkpoint, or wait")  # fmt: skip
    model = os.path.join(path, "model")
    names = names_in(model)
    hidden = os.path.join(model, ".hf_metadata")
    assets = hidden if os.path.isdir(hidden) else model if "adapter_config.json" in names else None
    if _is_dcp(names):
        from everystep.consolidate.sources import dcp

        opened = dcp.open_dcp(path, group, kind=KIND, folder="model", metrics=found.metrics, assets=assets, step=found.step)
    else:
        expected = None if _ADAPTER in names else _expected(path, hidden)
        opened = huggingface.open_safetensors(path, group, kind=KIND, folder="model", metrics=found.metrics, assets=assets, step=found.step,
                                              expected=expected)  # fmt: skip
    return _held(opened, found)


def _held(opened: Opened, found: Found) -> Opened:
    @contextlib.contextmanager
    def holding() -> Iterator[None]:
        from everystep.consolidate.protecting import Protection

        path = os.path.realpath(found.path)
        with contextlib.closing(Protection(os.path.dirname(path))) as protection:
            try:
                protection.protect(found._replace(path=path))
            except FileNotFoundError:
                raise NotFoundError(f"{path!r} was deleted just now", step=found.step, key=path, kind="no-checkpoint",
                                    hint="take a newer checkpoint") from None  # fmt: skip
            yield

    return dataclasses.replace(opened, saved_at=found.saved_at, holding=holding)


def _is_dcp(names: Sequence[str]) -> bool:
    return ".metadata" in names or any(name.endswith(".distcp") for name in names)


def _model_found(path: str) -> Found:
    names = names_in(os.path.join(path, "model"))
    if _is_dcp(names):
        why = "" if ".metadata" in names else "'model/.metadata' is not there: it is written last"
        return Found(path, KIND, 0, not why, why, 0.0, {})
    return huggingface.found_at(path, kind=KIND, folder="model")


def _expected(path: str, hidden: str) -> huggingface.Expected:
    """What the checkpoint's other files tell of its tensors."""
    mapping = read_json(os.path.join(hidden, "fqn_to_file_index_mapping.json"))
    names = frozenset(mapping) if isinstance(mapping, Mapping) else frozenset()
    world = sum(_RNG.fullmatch(name) is not None for name in names_in(os.path.join(path, "rng")))
    shapes = _moments(os.path.join(path, "optim"))
    says = "the optimizer's state"
    if not shapes:
        beside = _beside(path)
        shapes, says = (
            (huggingface.header_shapes(os.path.join(beside, "model")), f"{own_name(beside)!r} beside it") if beside else ({}, says)
        )
        own = huggingface.header_shapes(os.path.join(path, "model"))
        # Another model altogether, or one that was cut off itself, says nothing.
        shapes = {name: shape for name, shape in shapes.items() if name in own and _is_larger(shape, own[name])}
    return huggingface.Expected(names, shapes, world, f"{says} or the checkpoint's other files")


def _is_larger(shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    return shape != own and len(shape) == len(own) and all(size >= there for size, there in zip(shape, own, strict=True))


def _moments(folder: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that an optimizer's state (DCP's) was kept for."""
    if ".metadata" not in names_in(folder):
        return {}
    from everystep.foreign.stored import Stored

    try:
        stored = Stored.open([folder])
    except CheckpointError:
        return {}  # the optimizer's own trouble
    return {match[1]: tensor.shape for name, tensor in stored.tensors.items() if (match := _MOMENTS.search(name)) and tensor.shape}


def _beside(path: str) -> str | None:
    """Another complete checkpoint of the same root: the next older one, else the next newer."""
    root, step = os.path.dirname(os.path.realpath(path)), _step(own_name(path))
    others = [(_step(name), os.path.join(root, name)) for name in names_in(root) if _NAME.fullmatch(name) and name != own_name(path)]
    whole = [(at, other) for at, other in others if not os.path.islink(other) and INCOMPLETE not in names_in(other)]
    older = [one for one in whole if one[0] < step]
    return max(older)[1] if older else min(whole)[1] if whole else None


def _step(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0
