"""A box in a tensor's index space: intersect, cover, and what a run of bytes of a box is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Region(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box: ``offsets[i] <= index[i] < offsets[i] + sizes[i]``. A 0-dim tensor is ``Region((), ())`` with one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None when no element is common.

        Raises:
            ValueError: The boxes differ in their number of dimensions.
        """
        offsets = []
        sizes = []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            begin = max(a, b)
            size = min(a + n, b + m) - begin
            if size <= 0:
                return None
            offsets.append(begin)
            sizes.append(size)
        return Region(tuple(offsets), tuple(sizes))

    def relative_to(self, origin: Sequence[int]) -> Region:
        """The same box with its offsets counted from ``origin``."""
        return Region(tuple(a - o for a, o in zip(self.offsets, origin, strict=True)), self.sizes)

    def moved_by(self, origin: Sequence[int]) -> Region:
        """The same box with ``origin`` added to its offsets: undoes ``relative_to``."""
        return Region(tuple(a + o for a, o in zip(self.offsets, origin, strict=True)), self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box is well formed and lies inside a tensor of ``shape``."""
        if self.sizes == shape and not any(self.offsets) and len(self.offsets) == len(shape):
            return not shape or min(shape) >= 0
        return (
            len(self.offsets) == len(self.sizes) == len(shape)
            and all(a >= 0 and n >= 0 and a + n <= size for a, n, size in zip(self.offsets, self.sizes, shape, strict=True))
        )  # fmt: skip

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offsets, self.sizes, strict=False)) + "]"


def whole(shape: tuple[int, ...]) -> Region:
    """The region that is all of a tensor of ``shape``."""
    return Region((0,) * len(shape), shape)


def _subtract(box: Region, hole: Region) -> list[Region]:
    """What is left of ``box`` without ``hole``: at most two boxes for each dimension."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    left = []
    offsets = list(box.offsets)
    sizes = list(box.sizes)
    for dim, (begin, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        before = begin - offsets[dim]
        after = offsets[dim] + sizes[dim] - begin - size
        if before:
            left.append(Region(tuple(offsets), (*sizes[:dim], before, *sizes[dim + 1 :])))
        if after:
            left.append(Region((*offsets[:dim], begin + size, *offsets[dim + 1 :]), (*sizes[:dim], after, *sizes[dim + 1 :])))
        offsets[dim] = begin
        sizes[dim] = size
    return left


def missing(shape: tuple[int, ...], regions: list[Region]) -> list[Region]:
    """Boxes of ``shape`` that no region covers (empty list: full coverage)."""
    everything = whole(shape)
    if everything.numel == 0:
        return []
    left = [everything]
    # Sorted, a tensor cut by rows leaves one box at a time.
    for region in sorted(regions, key=_corner):
        if not left:
            break
        left = [rest for box in left for rest in _subtract(box, region)]
    return left


def _corner(region: Region) -> tuple[int, ...]:
    return region.offsets


def _is_grid(regions: Sequence[Region], ndim: int) -> bool:
    """Whether they are different cells of one grid, and so without common elements: the usual layout, seen without comparing pairs."""
    if len(set(regions)) != len(regions):
        return False
    for dim in range(ndim):
        end = -1
        for begin, size in sorted({(region.offsets[dim], region.sizes[dim]) for region in regions}):
            if begin < end:
                return False
            end = begin + size
    return True


def overlap(regions: list[Region]) -> tuple[Region, Region] | None:
    """A pair of regions with a common element, or None. Sorts; not quadratic in the usual case."""
    boxes_ = [region for region in regions if region.numel]
    if len(boxes_) < 2:
        return None
    ndim = len(boxes_[0].offsets)
    if ndim == 0:
        return boxes_[0], boxes_[1]
    if _is_grid(boxes_, ndim):
        return None
    # Sweep along the dimension that is cut most: there the fewest boxes are open at a time.
    dim = max(range(ndim), key=lambda d: len({region.offsets[d] for region in boxes_}))
    boxes_.sort(key=lambda region: region.offsets[dim])
    open_: list[Region] = []
    for region in boxes_:
        begin = region.offsets[dim]
        open_ = [other for other in open_ if other.offsets[dim] + other.sizes[dim] > begin]
        for other in open_:
            if region.intersect(other) is not None:
                return other, region
        open_.append(region)
    return None


def boxes(sizes: tuple[int, ...], begin: int, end: int) -> list[tuple[Region, int]]:
    """Split elements ``begin:end`` of a row-major box of ``sizes`` into boxes.

    Returns (box relative to the box of ``sizes``, index of its first element in the flat order), at most ``2 * ndim - 1`` of them.

    Raises:
        ValueError: ``begin:end`` is not a range of the box's elements.
    """
    if not 0 <= begin <= end <= math.prod(sizes):
        raise ValueError(f"elements {begin}:{end} are not in a box of sizes {sizes!r}")
    if begin == end:
        return []
    return _boxes((), sizes, begin, end, 0)


def _boxes(prefix: tuple[int, ...], sizes: tuple[int, ...], begin: int, end: int, flat: int) -> list[tuple[Region, int]]:
    """``prefix`` is the index chosen in the outer dimensions, ``flat`` the flat index of this row's first element."""
    ones = (1,) * len(prefix)
    if not sizes:
        return [(Region(prefix, ones), flat)]
    inner = sizes[1:]
    stride = math.prod(inner)
    zeros = (0,) * len(inner)
    first, head = divmod(begin, stride)
    last, tail = divmod(end, stride)
    if begin == 0 and last == sizes[0]:
        return [(Region((*prefix, *(0,) * len(sizes)), (*ones, *sizes)), flat)]
    if head and first == last:
        return _boxes((*prefix, first), inner, head, tail, flat + first * stride)
    found = []
    if head:
        found += _boxes((*prefix, first), inner, head, stride, flat + first * stride)
        first += 1
    if last > first:
        found.append((Region((*prefix, first, *zeros), (*ones, last - first, *inner)), flat + first * stride))
    if tail:
        found += _boxes((*prefix, last), inner, 0, tail, flat + last * stride)
    return found


def span(sizes: tuple[int, ...], region: Region) -> tuple[int, int]:
    """Flat indices, in a row-major box of ``sizes``, of ``region``'s first element and past its last; (0, 0) when it is empty."""
    if region.numel == 0:
        return 0, 0
    first = 0
    last = 0
    for offset, size, of in zip(region.offsets, region.sizes, sizes, strict=True):
        first = first * of + offset
        last = last * of + offset + size - 1
    return first, last + 1


def is_run(sizes: tuple[int, ...], region: Region) -> bool:
    """Whether the elements of ``region`` follow each other without gaps in a row-major box of ``sizes``."""
    begin, end = span(sizes, region)
    return end - begin == region.numel
