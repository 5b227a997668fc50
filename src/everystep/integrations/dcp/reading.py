"""Fill tensors from the files of others: only the wanted regions, every byte range checked, in parallel within a byte budget."""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from everystep.errors import CorruptionError, LayoutError
from everystep.foreign.archive import BROKEN, FileView, Record, record_of
from everystep.foreign.dtypes import DTYPES
from everystep.foreign.stored import Stored, StoredChunk, StoredPlain, StoredTensor
from everystep.region import Region, boxes, is_run, missing, overlap, span
from everystep.transfer import Buffers, Transfer

_PIECE_NBYTES = 8 << 20
_BUDGET_NBYTES = 64 << 20
_GAP_NBYTES = 64 << 10
_SMALL_NBYTES = 64 << 10
_LISTED = 5
_HINT = "take another copy or an older checkpoint"


class Want(NamedTuple):
    """A tensor to fill with a region of a stored one (of the region's sizes)."""

    stored: StoredTensor
    tensor: torch.Tensor
    region: Region


class _Target(NamedTuple):
    tensor: torch.Tensor
    region: Region


_Task: TypeAlias = "tuple[StoredChunk, StoredTensor, list[_Target]]"


class StoredReader:
    """Reads the tensors and plain values of a checkpoint that others wrote."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._sizes: dict[str, int | None] = {}
        self.nbytes = 0

    # -- tensors -----------------------------------------------------------------------------------------------------------------

    def read(self, wanted: Sequence[Want]) -> None:
        """Fill all of them. What is missing is found before the first byte is written.

        Raises:
            CorruptionError: Regions that no file holds (named), or bytes that are not what they must be.
        """
        jobs: dict[int, _Task] = {}
        lost: list[str] = []
        for want in wanted:
            for chunk in self._cover(want, lost):
                jobs.setdefault(id(chunk), (chunk, want.stored, []))[2].append(_Target(want.tensor.detach(), want.region))
        if lost:
            raise self._lost(lost)
        order = sorted(jobs.values(), key=lambda job: (job[0].path, job[0].place.offset if job[0].place else 0))
        with Buffers(nbytes=_PIECE_NBYTES) as buffers, Transfer(threads=_threads(), budget_nbytes=_BUDGET_NBYTES) as transfer:
            transfer.run((nbytes, self._job(batch, buffers)) for nbytes, batch in _batches(order))
        for want in wanted:
            # Raw writes bypass torch's version counter; autograd has to notice them all the same.
            if not want.tensor.is_inference():
                torch.autograd.graph.increment_version(want.tensor)

    def _cover(self, want: Want, lost: list[str]) -> list[StoredChunk]:
        """The chunks that together hold the region; what none holds is added to ``lost``."""
        name, numel = want.stored.name, want.region.numel
        if not numel:
            return []
        by_region: dict[Region, StoredChunk] = {}
        gone: dict[str, str] = {}
        for chunk in want.stored.chunks:
            if want.region.intersect(chunk.region) is None:
                continue
            why = self._unreadable(chunk)
            if why is None:
                by_region.setdefault(chunk.region, chunk)  # a region that several ranks wrote is read once
            else:
                gone[f"{want.region.intersect(chunk.region)} of {name!r} ({why})"] = why
        parts = [common for region in by_region if (common := want.region.intersect(region)) is not None]
        pair = overlap(parts)
        if pair:
            raise CorruptionError(f"the checkpoint holds region {pair[0]} of {name!r} more than once, differently cut: {pair[1]}", key=name,
                                  kind="overlap", hint=_HINT)  # fmt: skip
        if sum(part.numel for part in parts) != numel:
            if gone:
                lost += gone
            else:
                holes = missing(want.region.sizes, [part.relative_to(want.region.offsets) for part in parts])
                lost += [f"{hole.moved_by(want.region.offsets)} of {name!r} (no file holds it)" for hole in holes]
        return list(by_region.values())

    def _unreadable(self, chunk: StoredChunk) -> str | None:
        if chunk.place is None:
            return "no file holds it"
        nbytes = self._size(chunk.path)
        if nbytes is None:
            return f"{chunk.path!r} is not there"
        if chunk.place.offset + chunk.place.nbytes > nbytes:
            return f"{chunk.path!r} ends at byte {nbytes:,}, before byte {chunk.place.offset + chunk.place.nbytes:,}"
        return None

    def _size(self, path: str) -> int | None:
        if path not in self._sizes:
            try:
                self._sizes[path] = os.stat(path).st_size
            except OSError:
                self._sizes[path] = None
        return self._sizes[path]

    def _lost(self, lost: Sequence[str]) -> CorruptionError:
        told = ", ".join(lost[:_LISTED]) + (f" and {len(lost) - _LISTED} more" if len(lost) > _LISTED else "")
        files = f"; by their numbers these files are missing: {self._stored.absent[:_LISTED]!r}" if self._stored.absent else ""
        return CorruptionError(
            f"checkpoint {self._stored.folders[0]!r} lacks {told}{files}", key=self._stored.folders[0], kind="missing", hint=_HINT
        )

    def _job(self, batch: Sequence[_Task], buffers: Buffers) -> Callable[[], None]:
        def run() -> None:
            with _opened(batch[0][0].path) as descriptor:
                for chunk, stored, targets in batch:
                    _Filling(descriptor, chunk, stored, buffers).fill(targets)

        return run

    # -- plain values --------------------------------------------------------------------------------------------------------------

    def value(self, name: str, stored: StoredPlain) -> Any:
        """What ``torch.save`` wrote under a name, as far as torch loads it without running anything.

        Raises:
            LayoutError: It holds objects that only unpickling brings back.
            CorruptionError: It is missing or broken.
        """
        place = stored.place
        why = self._unreadable(StoredChunk(Region((), ()), stored.path, place, zipped=True))
        if why is not None or place is None:
            raise CorruptionError(f"value {name!r} is lost: {why}", key=name, kind="missing", hint=_HINT)
        with _opened(stored.path) as descriptor:
            return loaded(FileView(descriptor, place.offset, place.nbytes), name, stored.path)


class _Opened:
    """A file descriptor for reading, closed at the end."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> int:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptionError(f"cannot read {self._path!r}: {error.strerror}", key=self._path, kind="unreadable", hint=_HINT) from None
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


_opened = _Opened


def loaded(view: FileView, name: str, path: str) -> Any:
    """The object in an archive, by torch's own loader of data without code. Errors as in ``StoredReader.value``."""
    try:
        return torch.load(view, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except pickle.UnpicklingError as error:
        # torch's own advice, to load it without the check, is none of ours.
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise LayoutError(
            f"{name!r} in {path!r} is no plain data{f': it needs {named[1]}' if named else ''}", key=name, kind="pickle",
            hint="leave it out with include=[...] or strict=False; torch.serialization.add_safe_globals allows a class you trust",
        ) from None  # fmt: skip
    except (RuntimeError, OSError, *BROKEN) as error:
        raise CorruptionError(
            f"{name!r} in {path!r} is no archive of torch.save: {error!s:.200}", key=name, kind="archive", hint=_HINT
        ) from None


class _Filling:
    """One chunk's bytes into the tensors that want some of them."""

    def __init__(self, descriptor: int, chunk: StoredChunk, stored: StoredTensor, buffers: Buffers) -> None:
        self.descriptor = descriptor
        self.chunk = chunk
        self.stored = stored
        self.buffers = buffers
        self.dtype = DTYPES[stored.dtype]
        if chunk.place is None:
            raise ValueError("a chunk that lies nowhere cannot be read")
        self.place = chunk.place

    def fill(self, targets: Sequence[_Target]) -> None:
        begin, crc = self.place.offset, 0
        if self.chunk.zipped:
            record = self._record()
            if record is None or not record.is_row_major():
                self._fill_loaded(record, targets)
                return
            begin, crc = begin + record.offset, record.crc
        elif self.place.nbytes != self.chunk.region.numel * self.dtype.itemsize:
            raise self._corrupt(f"{self.place.nbytes} bytes are not its size")
        self._fill_row_major(begin, crc, targets)

    def _record(self) -> Record | None:
        view: Any = FileView(self.descriptor, self.place.offset, self.place.nbytes)
        if self.place.nbytes <= _SMALL_NBYTES:
            view = io.BytesIO(view.read(self.place.nbytes) or b"")
        try:
            record = record_of(view, self.place.nbytes)
        except BROKEN as error:
            raise self._corrupt(f"it is no archive of torch.save ({error!s:.200})") from None
        except OSError as error:
            raise self._corrupt(f"it cannot be read ({error.strerror})") from None
        if record is not None and (record.dtype, record.shape) != (self.dtype, self.chunk.region.sizes):
            raise self._corrupt(f"it holds {record.dtype} {list(record.shape)}, not {self.dtype} {list(self.chunk.region.sizes)}")
        return record

    def _corrupt(self, why: str) -> CorruptionError:
        where = f"{self.chunk.path!r} at byte {self.place.offset:,}"
        message = f"region {self.chunk.region} of tensor {self.stored.name!r} is corrupt in {where}: {why}"
        return CorruptionError(message, key=self.stored.name, kind="corrupt", hint=_HINT)

    # -- row by row ------------------------------------------------------------------------------------------------------------------

    def _fill_row_major(self, begin: int, crc: int, targets: Sequence[_Target]) -> None:
        """Read the ranges that hold something wanted. The sum in the archive is checked where all of it is read."""
        itemsize = self.dtype.itemsize
        numel = self.chunk.region.numel
        ranges = _merged([one for target in targets for one in _ranges(self.chunk.region, target.region, itemsize)])
        check = crc if ranges == [(0, numel)] else 0
        window = self._window(targets) if ranges == [(0, numel)] else None
        found = 0
        most = max(1, _PIECE_NBYTES // itemsize)
        for first, last in ranges:
            for at in range(first, last, most):
                until = min(at + most, last)
                nbytes = (until - at) * itemsize
                view = window[at * itemsize : until * itemsize] if window is not None else self.buffers.take(nbytes)
                try:
                    self._read_into(begin + at * itemsize, view)
                    if check:
                        found = zlib.crc32(view, found)
                    if window is None:
                        flat = torch.frombuffer(view, dtype=torch.uint8).view(self.dtype) if nbytes else torch.empty(0, dtype=self.dtype)
                        for target in targets:
                            _place(flat, at, self.chunk.region, target)
                finally:
                    if window is None:
                        self.buffers.give_back(view)
        if check and found != check:
            raise self._corrupt("its bytes do not match the sum in the archive")

    def _window(self, targets: Sequence[_Target]) -> memoryview | None:
        """The memory of the one tensor that takes all of the chunk just as it is stored."""
        if len(targets) != 1:
            return None
        tensor, region = targets[0]
        common = self.chunk.region
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or region.intersect(common) != common:
            return None
        inside = common.relative_to(region.offsets)
        if not is_run(region.sizes, inside):
            return None
        first, last = span(region.sizes, inside)
        flat = tensor.view(-1)[first:last]
        return flat.view(torch.uint8).numpy().data if flat.numel() else None

    def _read_into(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise self._corrupt(f"it cannot be read ({error.strerror})") from None
            if not count:
                raise self._corrupt(f"the file ends at byte {offset + done:,}")
            done += count

    # -- what torch has to load ------------------------------------------------------------------------------------------------------

    def _fill_loaded(self, record: Record | None, targets: Sequence[_Target]) -> None:
        """A tensor that lies in its archive in another order than row by row, or that only torch can read."""
        tensor = loaded(FileView(self.descriptor, self.place.offset, self.place.nbytes), self.stored.name, self.chunk.path)
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (self.dtype, self.chunk.region.sizes):
            raise self._corrupt(f"it holds a {type(tensor).__name__} that is not {self.dtype} {list(self.chunk.region.sizes)}")
        for target in targets:
            common = target.region.intersect(self.chunk.region)
            if common is not None:
                with torch.no_grad():
                    source = tensor[_slices(common.relative_to(self.chunk.region.offsets))]
                    target.tensor[_slices(common.relative_to(target.region.offsets))].copy_(source)


def _place(flat: torch.Tensor, at: int, region: Region, target: _Target) -> None:
    """Items from ``at`` on of the row-major box ``region`` go where the target wants them."""
    with torch.no_grad():
        for box, first in boxes(region.sizes, at, at + flat.numel()):
            here = box.moved_by(region.offsets)
            common = target.region.intersect(here)
            if common is not None:
                source = flat[first - at : first - at + box.numel].view(box.sizes)[_slices(common.relative_to(here.offsets))]
                target.tensor[_slices(common.relative_to(target.region.offsets))].copy_(source)


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(region.offsets, region.sizes, strict=True))


def _ranges(stored: Region, wanted: Region, itemsize: int) -> Iterator[tuple[int, int]]:
    """Items ``first:last`` of a row-major box that hold its common elements with ``wanted``; small gaps are read over."""
    common = stored.intersect(wanted)
    if common is None:
        return
    inner = common.relative_to(stored.offsets)
    first, count, stride, dim = 0, 1, 1, len(inner.sizes) - 1
    while dim >= 0:
        size = inner.sizes[dim]
        if size > 1 and (stride - count) * itemsize > _GAP_NBYTES:
            break
        first, count = first + inner.offsets[dim] * stride, count + (size - 1) * stride
        stride *= stored.sizes[dim]
        dim -= 1
    outer = [range(offset, offset + size) for offset, size in zip(inner.offsets[: dim + 1], inner.sizes[: dim + 1], strict=True)]
    strides = [math.prod(stored.sizes[at + 1 :]) for at in range(dim + 1)]
    for index in itertools.product(*outer):
        begin = first + sum(i * s for i, s in zip(index, strides, strict=True))
        yield begin, begin + count


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _batches(tasks: Iterable[_Task]) -> Iterator[tuple[int, list[_Task]]]:
    """Tasks of one file together, as long as they are small: a thread for each of thousands would cost more than reading them."""
    batch: list[_Task] = []
    nbytes = 0
    for task in tasks:
        size = task[0].place.nbytes if task[0].place else 0
        if batch and (task[0].path != batch[0][0].path or nbytes + size > _PIECE_NBYTES):
            yield min(nbytes, _PIECE_NBYTES), batch
            batch, nbytes = [], 0
        batch.append(task)
        nbytes += size
    if batch:
        yield min(nbytes, _PIECE_NBYTES), batch


def _threads() -> int:
    return min(4, max(2, len(os.sched_getaffinity(0))))
