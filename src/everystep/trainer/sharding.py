# ruff: noqa: SLF001 (a DTensor's local tensor, and FSDP's parameters, have no public names that cost nothing)
"""DTensors: which region of the whole tensor lies where in a rank's local tensor.

Theory of operation. A DTensor is cut along a tensor dimension by one mesh dimension after the other, as ``torch.chunk`` cuts: the first
pieces have ``ceil(size / ranks)`` elements, the last may be smaller or empty. The order is that of the mesh dimensions, but for
``_StridedShard``: FSDP2 shards what tensor parallelism left, although its mesh dimension comes first, and says so by a split factor.
Along each dimension what a rank holds is then a list of intervals: one, or several where a strided shard stands alone (then what comes
first in the local tensor is not all that precedes the rest). torch's own ``compute_local_shape_and_global_offset`` and
``__create_chunk_list__`` apply a strided shard from left to right and know the first offset only: right for even sizes, wrong for uneven
ones with tensor parallelism (9 rows on 4 x 2 ranks) and for strided shards that stand alone. So the intervals are computed here, and
compared with the sizes of the local tensor; what does not agree is refused.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from everystep.errors import StateError
from everystep.region import Region, whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Interval: TypeAlias = "tuple[int, int]"
"""Indices ``begin:end`` of a dimension of the whole tensor."""


class Chunk(NamedTuple):
    """A region of the whole tensor, and where it lies in the local one (equal sizes)."""

    region: Region
    local: Region


class Cut(NamedTuple):
    """One mesh dimension's cut of a tensor dimension. ``split_factor`` is None for a plain shard."""

    dim: int
    size: int
    """Number of pieces: the mesh dimension's size."""
    position: int
    """Which one this rank holds."""
    split_factor: int | None = None


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """The tensor itself if it is a DTensor, else None."""
    if type(tensor) in _PLAIN:
        return None
    # Where it was never imported there is none.
    home = sys.modules.get("torch.distributed.tensor")
    kind = getattr(home, "DTensor", None)
    return tensor if kind is not None and isinstance(tensor, kind) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds this rank's part; a plain tensor itself. No copy."""
    sharded = as_dtensor(tensor)
    if sharded is None:
        return tensor
    local: Any = sharded._local_tensor
    if type(local) not in _PLAIN and type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()  # what a collective still fills
    plain: torch.Tensor = local
    return plain


def unwrapped(tensor: torch.Tensor, name: str = "") -> tuple[torch.Tensor, tuple[Chunk, ...] | None]:
    """What this rank holds of a tensor.

    Args:
        tensor: A DTensor or any other tensor.
        name: What the state calls it, for messages.

    Returns:
        For a DTensor its local tensor (no copy), and the chunks in it, which cover it; none where the local shard is empty or the rank is
        outside the mesh. For any other tensor the tensor itself and None.

    Raises:
        StateError: Partial placements, or a local tensor of another size than the placements say; names the tensor.
    """
    sharded = as_dtensor(tensor)
    if sharded is None:
        return tensor, None
    local = local_of(sharded)
    mesh, placements, shape = sharded.device_mesh, sharded.placements, tuple(sharded.shape)
    coordinate = mesh.get_coordinate()
    cuts = _cuts(tuple(mesh.shape), None if coordinate is None else tuple(coordinate), placements)
    if isinstance(cuts, str):
        raise StateError(
            f"tensor {name!r} is a DTensor with {cuts}: {_told(placements)}",
            key=name,
            kind="tensor",
            hint="redistribute it to Replicate() or Shard(...) first",
        )
    if cuts is None:
        return local, ()
    chunks = chunks_of(shape, cuts, tuple(local.shape))
    if chunks is None:
        raise StateError(
            f"tensor {name!r} is a DTensor of shape {list(shape)} with placements {_told(placements)} on a mesh of {tuple(mesh.shape)}, "
            f"but this rank, {coordinate} in the mesh, holds {list(local.shape)} of it, which is not what these placements give it",
            key=name,
            kind="tensor",
            hint="shard it with distribute_tensor or fully_shard",
        )
    return local, chunks


@functools.lru_cache(maxsize=1024)
def _cuts(mesh: tuple[int, ...], coordinate: tuple[int, ...] | None, placements: tuple[Any, ...]) -> tuple[Cut, ...] | str | None:
    """The cuts that placements stand for; None outside the mesh, and words for those that cannot be stored. A model has few of them."""
    if any(placement.is_partial() for placement in placements):
        return "partial placements, of which no rank holds the values"
    if coordinate is None:
        return None
    cuts = []
    for placement, size, position in zip(placements, mesh, coordinate, strict=True):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            return "a placement of unknown kind"
        cuts.append(Cut(dim, size, position, getattr(placement, "split_factor", None)))
    return tuple(cuts)


def _told(placements: Sequence[object]) -> str:
    return "(" + ", ".join(map(str, placements)) + ")"


@functools.lru_cache(maxsize=16384)
def chunks_of(shape: tuple[int, ...], cuts: tuple[Cut, ...], local_shape: tuple[int, ...]) -> tuple[Chunk, ...] | None:
    """The chunks that a rank holds of a tensor of ``shape``, cut by ``cuts`` (in the order of mesh dimensions).

    None when the cuts do not give ``local_shape``. An empty shard has no chunks, whatever shape it has.
    """
    for order in _orders(cuts):
        chunks = _chunks(shape, order, local_shape)
        if chunks is not None:
            return chunks
    return None


def _orders(cuts: Sequence[Cut]) -> Iterator[Sequence[Cut]]:
    """The orders in which the cuts may have been made: FSDP's over tensor parallelism first, then that of the placements."""
    if any(cut.split_factor not in (None, 1) for cut in cuts):
        order = _nested(cuts)
        if order is not None:
            yield order
    yield cuts


def _nested(cuts: Sequence[Cut]) -> list[Cut] | None:
    """The cuts as plain ones, each strided one moved behind those further right whose sizes multiply to its split factor.

    None when there are no such: it stands alone.
    """
    by_dim: dict[int, list[Cut]] = {}
    for cut in reversed(cuts):
        order = by_dim.setdefault(cut.dim, [])
        product, at = 1, 0
        while product != (cut.split_factor or 1):
            if at == len(order):
                return None
            product *= order[at].size
            at += 1
        order.insert(at, cut._replace(split_factor=None))
    return [cut for order in by_dim.values() for cut in order]


def _chunks(shape: tuple[int, ...], order: Sequence[Cut], local_shape: tuple[int, ...]) -> tuple[Chunk, ...] | None:
    held: list[list[Interval]] = [[(0, size)] if size else [] for size in shape]
    for cut in order:
        if not 0 <= cut.dim < len(shape):
            return None
        held[cut.dim] = _cut(held[cut.dim], cut)
    sizes = tuple(sum(end - begin for begin, end in intervals) for intervals in held)
    if not math.prod(sizes):
        return () if not math.prod(local_shape) else None
    if sizes != local_shape:
        return None
    if all(len(intervals) == 1 for intervals in held):
        return (Chunk(Region(tuple(intervals[0][0] for intervals in held), sizes), whole(sizes)),)
    starts = [list(itertools.accumulate((end - begin for begin, end in intervals), initial=0)) for intervals in held]
    found = []
    for indices in itertools.product(*(range(len(intervals)) for intervals in held)):
        picked = [intervals[index] for intervals, index in zip(held, indices, strict=True)]
        extent = tuple(end - begin for begin, end in picked)
        at = tuple(start[index] for start, index in zip(starts, indices, strict=True))
        found.append(Chunk(Region(tuple(begin for begin, _ in picked), extent), Region(at, extent)))
    return tuple(found)


def _cut(intervals: list[Interval], cut: Cut) -> list[Interval]:
    """The piece of what the intervals hold that falls to this rank."""
    length = sum(end - begin for begin, end in intervals)
    if cut.split_factor in (None, 1):
        return _taken(intervals, *_piece(0, length, cut.size, cut.position))
    pieces: list[Interval] = []
    assert cut.split_factor is not None
    for number in range(cut.split_factor):
        outer = _piece(0, length, cut.split_factor, number)
        pieces += _taken(intervals, *_piece(*outer, cut.size, cut.position))
    return _joined(pieces)


def _piece(begin: int, end: int, size: int, index: int) -> Interval:
    """Piece ``index`` of ``begin:end`` cut into ``size``, as ``torch.chunk`` does."""
    full = -(-(end - begin) // size)
    return min(begin + index * full, end), min(begin + (index + 1) * full, end)


def _taken(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """Positions ``begin:end`` of what the intervals hold one after the other."""
    found = []
    at = 0
    for first, last in intervals:
        a, b = max(begin - at, 0), min(end - at, last - first)
        if a < b:
            found.append((first + a, first + b))
        at += last - first
    return found


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for begin, end in intervals:
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def box(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The part of a plain tensor that lies in a region of it: a view."""
    if region.sizes == tuple(tensor.shape):
        return tensor
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(region.offsets, region.sizes, strict=True))]


def like(sharded: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new, unfilled DTensor of ``shape``: laid out as ``sharded`` (a DTensor) where the shapes are equal, else whole on each rank."""
    from torch.distributed.tensor import DTensor, Replicate

    given = as_dtensor(sharded)
    assert given is not None
    mesh = given.device_mesh
    if tuple(given.shape) == shape:
        local = torch.empty_like(given._local_tensor, dtype=dtype, device=device, requires_grad=False)
        placements: Sequence[Any] = given.placements
        stride = given.stride()
    else:
        local = torch.empty(shape, dtype=dtype, device=device)
        placements = [Replicate()] * mesh.ndim
        stride = local.stride()
    with torch.no_grad():
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
