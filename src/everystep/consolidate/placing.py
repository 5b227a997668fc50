"""Put runs of a chunk's elements where they belong in a window of an output file, and cast them on the way.

Rows go as single items of their width (``V4096`` and the like), so that numpy copies each with one memcpy and without the GIL. Casts are
torch's, bit for bit; it is imported when the first one is asked for.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from everystep.safetensors import DTYPES

_MACHINE_WIDTHS = (1, 2, 4, 8)


def place(
    out: memoryview, at: int, data: memoryview, sizes: Sequence[int], strides: Sequence[int], *, stored: str, dtype: str
) -> None:
    """Copy a box of items that follow each other in ``data`` to ``out``.

    Args:
        out: The window; it begins at an address that is a multiple of any item's size.
        at: Byte of the box's first item there: a multiple of the item's size.
        data: The items, row-major; more may follow them.
        sizes: Of the box.
        strides: Of the box in ``out``, in items.
        stored: Dtype word of what is in ``data``.
        dtype: Dtype word of what ``out`` gets.
    """
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    if stored != dtype:
        _cast(out, at, data, dims, stored, dtype)
        return
    width = DTYPES[dtype]
    itemsize = width
    while dims and dims[-1][1] * itemsize == width:
        width *= dims.pop()[0]
    if not dims:
        np.copyto(np.frombuffer(out, np.uint8, width, at), np.frombuffer(data, np.uint8, width))
        return
    item = np.dtype(f"u{width}" if width in _MACHINE_WIDTHS else f"V{width}")
    shape = [size for size, _ in dims]
    target = np.ndarray(shape, item, out, at, [stride * itemsize for _, stride in dims])
    np.copyto(target, np.ndarray(shape, item, data))


def gather(data: memoryview, sizes: Sequence[int], strides: Sequence[int], *, itemsize: int) -> memoryview:
    """The items of a box that lie in ``data`` with ``strides`` (in items), made to follow each other."""
    found = np.ndarray(sizes, f"u{itemsize}", data, 0, [stride * itemsize for stride in strides])
    return np.array(found, order="C", copy=True).reshape(-1).view(np.uint8).data


def _cast(out: memoryview, at: int, data: memoryview, dims: Sequence[tuple[int, int]], stored: str, dtype: str) -> None:
    torch = _torch()
    shape = [size for size, _ in dims]
    items = np.frombuffer(data, np.uint8, math.prod(shape) * DTYPES[stored])
    if items.ctypes.data % DTYPES[stored]:
        items = items.copy()  # torch wants items at multiples of their size; memory of its own begins at one
    source = torch.from_numpy(items).view(_dtypes()[stored])
    target = torch.frombuffer(out, dtype=_dtypes()[dtype], offset=at)
    torch.as_strided(target, shape, [stride for _, stride in dims]).copy_(source.view(shape))


@functools.cache
def _torch() -> ModuleType:
    alone = "torch" not in sys.modules
    import torch

    if alone:  # this process needs it for nothing else, and windows are cast in threads already
        torch.set_num_threads(1)
    return torch


@functools.cache
def _dtypes() -> dict[str, Any]:
    from everystep.foreign.dtypes import DTYPES as TORCH_DTYPES

    return dict(TORCH_DTYPES)
