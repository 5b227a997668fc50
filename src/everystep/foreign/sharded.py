"""Headers of safetensors files, and of those that hold parts of tensors (DCP's Hugging Face writer) which parts: read without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from everystep import safetensors
from everystep.errors import CorruptionError, LayoutError
from everystep.region import Region

_HINT = "take another copy or an older checkpoint"


def read_header(path: str) -> safetensors.Header:
    """A file's header, every bound checked against the file's size.

    Raises:
        CorruptionError: It is cut off, not there, or no safetensors file; names the path.
        LayoutError: It holds types of less than a byte.
    """
    try:
        with open(path, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            first = file.read(8)
            start = safetensors.data_start(first, nbytes)
            return safetensors.parse(first + file.read(start - 8), nbytes)
    except OSError as error:
        raise CorruptionError(f"cannot read {path!r}: {error.strerror}", key=path, kind="unreadable", hint=_HINT) from None
    except (CorruptionError, LayoutError) as error:
        raise type(error)(f"{path!r}: {error.message}", key=path, kind=error.kind, hint=error.hint) from None


def regions_of(path: str, header: safetensors.Header) -> dict[str, tuple[Region, tuple[int, ...]]]:
    """Entry -> its region, and a shape that the whole tensor has at least; for files whose entries are parts of tensors."""
    text = header.metadata.get("DCP_SHARDING_INFO")
    if text is None:
        return {}
    try:
        told: Any = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    found = {}
    for entry in header.entries:
        offsets: Any = told.get(entry.name, {}).get("saved_offsets") if _is_map(told) and _is_map(told.get(entry.name)) else None
        good = isinstance(offsets, list) and len(offsets) == len(entry.shape)
        if not good or not all(type(number) is int and 0 <= number < 1 << 62 for number in offsets):
            raise CorruptionError(f"{path!r}: DCP_SHARDING_INFO does not say where {entry.name!r} belongs: {offsets!r:.100}", key=path,
                                  kind="safetensors", hint=_HINT)  # fmt: skip
        region = Region(tuple(offsets), entry.shape)
        # An empty shard says nothing about the size of the whole.
        shape = tuple(offset + size for offset, size in zip(offsets, entry.shape, strict=True)) if region.numel else entry.shape
        found[entry.name] = region, shape
    return found


def _is_map(told: object) -> bool:
    return isinstance(told, Mapping)
