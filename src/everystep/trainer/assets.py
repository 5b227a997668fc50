"""What a transformers model in the state says of itself, written beside its exports where the user names no folder with it.

transformers is never imported here: a state that holds one of its models has imported it.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["config_files", "folder_name", "write_assets"]

_log = logging.getLogger("everystep")


def config_files(state: Mapping[str, Any], group: str | None) -> dict[str, bytes]:
    """``config.json`` and ``generation_config.json`` of the model in the state; empty when it is none of transformers' or one of several.

    Args:
        state: As for ``save``.
        group: Which entry of it is consolidated; None: the only model there is.
    """
    library = sys.modules.get("transformers")
    kind = getattr(library, "PreTrainedModel", None)
    if not isinstance(kind, type):
        return {}
    found = [bare for name, value in state.items() if group in (None, name) and isinstance(bare := _unwrapped(value), kind)]
    if len(found) != 1:
        return {}
    model: Any = found[0]
    files = {}
    config = copy.deepcopy(model.config)
    config.architectures = [_architecture(model)]
    files["config.json"] = config.to_json_string().encode()
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        files["generation_config.json"] = generation.to_json_string().encode()
    return files


def _unwrapped(value: object) -> object:
    """The model inside of DDP and ``torch.compile``."""
    while True:
        inner = getattr(value, "_orig_mod", None)
        if inner is None and type(value).__name__ in {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}:
            inner = getattr(value, "module", None)
        if inner is None:
            return value
        value = inner


def _architecture(model: object) -> str:
    """The class's own name: ``fully_shard`` puts one of its own before it."""
    classes = [cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.")]
    plain = [cls for cls in classes if not any(base.__name__ == "FSDPModule" for base in cls.__mro__)]
    return (plain or classes)[0].__name__


def folder_name(files: Mapping[str, bytes]) -> str:
    """Names the files by what is in them: another model's are another folder."""
    state = xxhash.xxh3_128()
    for name, data in sorted(files.items()):
        state.update(f"{name}\0{len(data)}\0".encode())
        state.update(data)
    return f".assets-{state.hexdigest()[:16]}"


def write_assets(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the folder whole, unless it is there. OSError."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    try:
        making.chmod(0o755)
        for name, data in files.items():
            (making / name).write_bytes(data)
        os.rename(making, folder)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
        if not folder.is_dir():  # else another rank has made it meanwhile
            raise
