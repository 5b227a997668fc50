"""Which bytes of the source an output file's windows are made of: pieces and fetches. Pure: no I/O, no arrays.

Theory of operation. An output file is cut into windows of equal size, which begin at multiples of 4,096 bytes, so that each can be written
past the page cache by whoever has it ready. A window is a contiguous range of elements of each tensor in it. A chunk that is stored
row-major numbers its elements in the same order as the tensor does (leaving out those that it lacks), so what a window needs of a chunk
is one contiguous run of the chunk's bytes, whatever the cut: by rows, by columns, by both. That run is what is read; only placing it has
to know of rows. Where a chunk has other strides there is no such run; it is taken box by box.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from everystep.consolidate.plan import OutputFile
from everystep.manifest import BLOCK_NBYTES
from everystep.region import Region, boxes, is_run, span
from everystep.safetensors import ALIGN, DTYPES

if TYPE_CHECKING:
    from everystep.consolidate.source import Chunk, Source

_GAP_NBYTES = 64 << 10
"""Reads that are no further apart than this become one."""
_COVERS = 4096
"""So many covers are remembered."""
_SPARSE = 4
"""Of a chunk with strides of its own, at most so many times the wanted bytes are read at once."""


class Window(NamedTuple):
    """Bytes ``begin:end`` of output file ``file``."""

    file: int
    begin: int
    end: int


class Piece(NamedTuple):
    """Bytes ``begin:end`` of a chunk (row-major; else of its span) that one fetch holds."""

    entry: int
    """Which of the output file's entries."""
    chunk: int
    """Which of the tensor's chunks."""
    begin: int
    end: int
    box: Region | None = None
    """Of a chunk with strides of its own: the box, counted in the chunk, whose elements lie there."""


class Fetch(NamedTuple):
    """One read: a contiguous range of a source's file, and what it is."""

    file: int
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


class Cover:
    """How the chunks of one tensor lie in it: computed once for all windows."""

    __slots__ = ("chunks", "first", "itemsize", "others", "runs", "shape", "starts", "strides")

    def __init__(self, chunks: Sequence[Chunk], shape: tuple[int, ...], itemsize: int) -> None:
        self.chunks = chunks
        self.shape = shape
        self.itemsize = itemsize
        """Bytes of an item in the source."""
        strides = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
        self.strides = tuple(strides)
        """Of the whole tensor, in items."""
        self.first: dict[int, int] = {}
        """Chunk -> the element it begins with, of those whose elements follow each other in the tensor."""
        self.runs: list[tuple[int, int, int]] = []
        """(first element, past the last, chunk) of those, in order."""
        self.others: list[int] = []
        for number, chunk in enumerate(chunks):
            if 0 in chunk.region.sizes:
                continue
            if chunk.strides is None and (len(chunks) == 1 or is_run(shape, chunk.region)):
                begin, end = span(shape, chunk.region)
                self.runs.append((begin, end, number))
                self.first[number] = begin
            else:
                self.others.append(number)
        self.runs.sort()
        self.starts = [begin for begin, _, _ in self.runs]

    def needs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(chunk, first element in the chunk, past its last) of what elements ``begin:end`` of the tensor are made of."""
        for position in range(max(bisect.bisect_right(self.starts, begin) - 1, 0), len(self.runs)):
            first, past, number = self.runs[position]
            if first >= end:
                break
            if past > begin:
                yield number, max(begin, first) - first, min(end, past) - first
        if self.others:
            parts = [box for box, _ in boxes(self.shape, begin, end)]
            for number in self.others:
                region = self.chunks[number].region
                found = []
                for part in parts:
                    common = part.intersect(region)
                    if common is not None:
                        found.append(span(region.sizes, common.relative_to(region.offsets)))
                if found:
                    yield number, min(found)[0], max(past for _, past in found)

    def targets(self, number: int, begin: int, end: int) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        """Where elements ``begin:end`` of a chunk go: (offset among them, first element in the tensor, sizes, strides in items)."""
        if number in self.first:
            yield 0, self.first[number] + begin, (end - begin,), (1,)
            return
        region = self.chunks[number].region
        for box, flat in boxes(region.sizes, begin, end):
            yield flat - begin, self.position(number, box), box.sizes, self.strides

    def position(self, number: int, box: Region) -> int:
        """The tensor's element that a box, counted in a chunk, begins with."""
        offsets = self.chunks[number].region.offsets
        return sum((a + o) * stride for a, o, stride in zip(box.offsets, offsets, self.strides, strict=True))


class FileCover:
    """The covers of an output file's entries, and the fetches of its windows."""

    def __init__(self, source: Source, file: OutputFile) -> None:
        self.file = file
        self.data_start = len(file.header)
        self.ends = [entry.end for entry in file.entries]
        self._source = source
        self._covers: dict[int, Cover] = {}

    def cover(self, number: int) -> Cover:
        """The cover of an entry; kept while its tensor is being written, which threads may do at the same time."""
        found = self._covers.get(number)
        if found is None:
            tensor = self._source.tensors[self.file.tensors[number]]
            found = Cover(tensor.chunks, tensor.shape, DTYPES[tensor.dtype])
            if len(self._covers) >= _COVERS:
                self._covers.clear()
            self._covers[number] = found
        return found

    def elements(self, window: Window) -> Iterator[tuple[int, int, int]]:
        """(entry, first element, past its last) of what lies in a window."""
        begin, end = window.begin - self.data_start, window.end - self.data_start
        for number in range(bisect.bisect_right(self.ends, max(begin, 0)), len(self.ends)):
            entry = self.file.entries[number]
            if entry.begin >= end:
                return
            itemsize = DTYPES[entry.dtype]
            low = (max(entry.begin, begin) - entry.begin) // itemsize
            high = (min(entry.end, end) - entry.begin) // itemsize
            if high > low:
                yield number, low, high

    def fetches(self, window: Window, limit: int) -> list[Fetch]:
        """The reads that a window needs, sorted, each of at most ``limit`` bytes."""
        ranges: list[tuple[int, int, int, Piece]] = []
        for number, low, high in self.elements(window):
            cover = self.cover(number)
            for chunk_number, begin, end in cover.needs(low, high):
                chunk = cover.chunks[chunk_number]
                if chunk.strides is None:
                    for at, until in _split(chunk, begin * cover.itemsize, end * cover.itemsize, limit, cover.itemsize):
                        ranges.append((chunk.file, chunk.offset + at, until - at, Piece(number, chunk_number, at, until)))
                    continue
                for box, _ in boxes(chunk.region.sizes, begin, end):
                    for part, at, until in _sparse(box, chunk.strides, cover.itemsize, limit):
                        ranges.append((chunk.file, chunk.offset + at, until - at, Piece(number, chunk_number, at, until, part)))
        ranges.sort(key=lambda one: one[:3])
        return list(_coalesce(ranges, limit))


def _split(chunk: Chunk, begin: int, end: int, limit: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cut a run of a chunk to at most ``limit`` bytes, at digest blocks where possible: a block that is read whole is checked at once."""
    limit = max(limit - limit % itemsize, itemsize)
    block = block_nbytes(chunk) if chunk.digests else limit
    while begin < end:
        until = min(begin + limit, end)
        if until < end:
            aligned = until - until % block
            until = aligned if aligned > begin and aligned % itemsize == 0 else until
        yield begin, until
        begin = until


def _sparse(box: Region, strides: tuple[int, ...], itemsize: int, limit: int) -> Iterator[tuple[Region, int, int]]:
    """Cut a box of a chunk with these strides into boxes whose bytes lie near each other: (box, first byte, past the last)."""
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True)) * itemsize
    past = first + (sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True)) + 1) * itemsize
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not dims or (past - first <= limit and past - first <= max(_SPARSE * box.numel * itemsize, _GAP_NBYTES)):
        yield box, first, past
        return
    dim = max(dims, key=lambda one: strides[one])
    size = box.sizes[dim]
    for begin, count in ((0, size // 2), (size // 2, size - size // 2)):
        offsets = (*box.offsets[:dim], box.offsets[dim] + begin, *box.offsets[dim + 1 :])
        yield from _sparse(Region(offsets, (*box.sizes[:dim], count, *box.sizes[dim + 1 :])), strides, itemsize, limit)


def _coalesce(ranges: Sequence[tuple[int, int, int, Piece]], limit: int) -> Iterator[Fetch]:
    pieces: list[Piece] = []
    file = start = stop = -1
    for of, offset, nbytes, piece in ranges:
        if pieces and (of != file or offset - stop > _GAP_NBYTES or max(offset + nbytes, stop) - start > limit):
            yield Fetch(file, start, stop - start, tuple(pieces))
            pieces = []
        if not pieces:
            file, start, stop = of, offset, offset
        pieces.append(piece)
        stop = max(stop, offset + nbytes)
    if pieces:
        yield Fetch(file, start, stop - start, tuple(pieces))


def block_nbytes(chunk: Chunk) -> int:
    """How many bytes each digest of a chunk is for."""
    return chunk.block or BLOCK_NBYTES


def cut(files: Sequence[OutputFile], wanted: Sequence[int], *, nbytes: int, only: tuple[int, int]) -> list[Window]:
    """The windows of the ``wanted`` files (indices), of ``nbytes`` each, that fall to share ``only[0]`` of ``only[1]``.

    Where shares end depends on nothing but the files, so that processes with other budgets cut alike.
    """
    padded = [-(-files[index].nbytes // ALIGN) * ALIGN for index in wanted]
    total = sum(padded)
    low, high = (total * number // only[1] // ALIGN * ALIGN if number < only[1] else total for number in (only[0], only[0] + 1))
    windows = []
    at = 0
    for index, size in zip(wanted, padded, strict=True):
        begin, end = max(low - at, 0), min(high - at, size)
        start = len(files[index].header)
        while begin < end:
            past = begin + nbytes if begin < start else begin + nbytes - (begin - start) % nbytes
            until = min(past, end, start) if begin < start else min(past, end)
            windows.append(Window(index, begin, min(until, files[index].nbytes)))
            begin = until
        at += size
    return [window for window in windows if window.end > window.begin]
