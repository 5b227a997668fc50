"""Write an export's files: links where the source has them already, the rest put together window by window.

Theory of operation. A few threads take the windows of all files in order (``windows.py``). For each one a thread reads what it is made of
in long runs past the page cache, has it checked against the source's digests while it passes (``checking.py``), places it in the window's
buffer and casts it (``placing.py``), adds the window to the file's digest when it is its turn, and writes it past the page cache. So memory
is a few windows and reads, whatever the tensors' sizes and cuts, and one file is the work of all threads.

A file is ``<name>.part`` until all its windows are written, every digest was right, and it is durable; then it is renamed. So a file under
its name is whole, and whoever comes after a kill keeps it and begins the others anew. Several processes can fill the same parts, each its
share of the bytes. A share that ends inside a digest block reads that block to its end, so that each one checks all that it uses; it
leaves a mark, and ``finish_export`` publishes once all marks are there.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from everystep import safetensors
from everystep.consolidate import linking
from everystep.consolidate.checking import Checks, InOrder, Loose, Place, StoppedError, combined
from everystep.consolidate.partfile import SUFFIX, PartFile, sync_folder, translated, unlink
from everystep.consolidate.placing import gather, place
from everystep.consolidate.plan import ExportPlan, OutputFile
from everystep.consolidate.windows import Fetch, FileCover, Piece, Window, block_nbytes, cut
from everystep.errors import CheckpointError, ConflictError, CorruptionError, LayoutError, NotFoundError
from everystep.manifest import digest
from everystep.safetensors import ALIGN, DTYPES
from everystep.store import open_store
from everystep.store.disk import Disk, RealDisk
from everystep.store.local import LocalStore
from everystep.transfer import Buffers, Transfer

if TYPE_CHECKING:
    from everystep.consolidate.source import Chunk, Source

__all__ = ["Written", "finish_export", "write_export"]

BUDGET_NBYTES = 256 << 20
_WINDOW_NBYTES = 16 << 20
_READ_NBYTES = 8 << 20
_SMALLEST_NBYTES = 64 << 10
_LARGE_PAGE = 2 << 20
_STRAIGHT_NBYTES = 1 << 20
"""From this size on a run that lies in file and window alike is read to where it belongs."""
_RECORD = ".written.json"
_HINT = "take another copy or an older checkpoint"

Pace = Callable[[int], None]
_Read = TypeVar("_Read", bound=msgspec.Struct)


class Written(msgspec.Struct, frozen=True):
    """What was done."""

    nbytes: int
    """Of all files of the plan (of a share: of those that it wrote bytes of)."""
    linked: int
    """Bytes of it that did not pass through the process: hard links, reflinks, copies inside the system."""
    digests: dict[str, str]
    """File name -> XXH3-128 of the whole file; "" where nobody read it whole: links, and files of several processes."""
    seconds: float


class _Loose(msgspec.Struct, frozen=True):
    """Parts of a chunk's CRC that one share knows."""

    tensor: str
    chunk: int
    key: str
    offset: int
    nbytes: int
    crc: int
    parts: list[Loose]


class _Mark(msgspec.Struct, frozen=True):
    """What a share leaves when its bytes are durable."""

    plan: str
    digests: dict[str, str]
    linked: int
    loose: list[_Loose]


class _Record(msgspec.Struct, frozen=True):
    """Digests of the files that are whole, for whoever resumes."""

    plan: str
    digests: dict[str, str]


def write_export(
    source: Source, plan: ExportPlan, folder: str, *, threads: int | None = None, budget_nbytes: int = BUDGET_NBYTES,
    pace: Pace | None = None, only: tuple[int, int] = (0, 1), disk: Disk | None = None,
) -> Written:  # fmt: skip
    """Fill ``folder`` with the files of ``plan``; what is there whole already, from an earlier try, is kept.

    Args:
        source: What ``plan`` was made of.
        plan: What to write.
        folder: Exists, and is nobody else's but other shares' of the same plan.
        threads: How many windows are worked on at the same time; by default as many as there are cores, 4 to 8.
        budget_nbytes: Bound on the memory for windows and reads.
        pace: Called by several threads with the bytes about to be moved; may wait.
        only: This is share ``only[0]`` of ``only[1]``, which other processes may write at the same time. With more than one, the files that
            are put together keep their temporary names until ``finish_export``.
        disk: The system calls for what is written; the machine's own by default.

    Raises:
        CorruptionError: The source's bytes are missing or are not what was recorded; names tensor, file and byte. Nothing wrong has a name.
        CapacityError: No space; other errors of writing are StoreErrors.
        LayoutError: A file to link holds something else than planned.
    """
    if not 0 <= only[0] < only[1]:
        raise ValueError(f"share {only[0]} of {only[1]} is none")
    return _Writing(source, plan, folder, threads, budget_nbytes, pace, only, RealDisk() if disk is None else disk).run()


def finish_export(plan: ExportPlan, folder: str, *, disk: Disk | None = None) -> Written:
    """Give the files that several shares wrote their names, after the last share has returned.

    Raises:
        ConflictError: A share is missing or belongs to another plan: says which.
        CorruptionError: A checksum of which several shares had parts is wrong.
    """
    began = time.perf_counter()
    disk = RealDisk() if disk is None else disk
    marks = _marks(plan, folder)
    parts: dict[tuple[str, int], list[Loose]] = {}
    for mark in marks:
        for loose in mark.loose:
            parts.setdefault((loose.tensor, loose.chunk), []).extend(loose.parts)
    for mark in marks:
        for loose in mark.loose:
            of_chunk = parts[loose.tensor, loose.chunk]
            if sum(part.nbytes for part in of_chunk) != loose.nbytes or combined(of_chunk) != loose.crc:
                raise CorruptionError(f"tensor {loose.tensor!r} is corrupt in {loose.key!r} at byte {loose.offset:,}", key=loose.key,
                                      kind="digest", hint=_HINT)  # fmt: skip
    digests = {}
    for file in plan.files:
        path = f"{folder}/{file.name}"
        if not _is_there(disk, path, file.nbytes):
            size = _size(disk, path + SUFFIX)
            if size < file.nbytes:
                raise ConflictError(f"{path + SUFFIX!r} has {max(size, 0):,} bytes of {file.nbytes:,}", key=path, kind="share",
                                    hint="write the shares again")  # fmt: skip
            PartFile(disk, path, file.nbytes, fresh=False).publish()
        digests[file.name] = next((mark.digests[file.name] for mark in marks if mark.digests.get(file.name)), "")
    _tidy(disk, folder)
    return Written(plan.nbytes, sum(mark.linked for mark in marks), digests, time.perf_counter() - began)


class _Copy(NamedTuple):
    """A file of the source that goes through this process as it is: where its tensors begin is not for us to choose."""

    key: str
    header: bytes
    """Checked; its bytes are taken from here."""
    chunks: list[tuple[int, Chunk, Place]]
    """(offset, chunk, its place), by offset."""


class _Writing:
    """One call of ``write_export``."""

    def __init__(
        self, source: Source, plan: ExportPlan, folder: str, threads: int | None, budget_nbytes: int, pace: Pace | None,
        only: tuple[int, int], disk: Disk,
    ) -> None:  # fmt: skip
        self._source = source
        self._plan = plan
        self._folder = os.path.abspath(folder)
        self._pace = pace
        self._only = only
        self._disk = disk
        self._threads, self._window_nbytes, self._read_nbytes = _sizes(threads, budget_nbytes)
        self._checks = Checks(source)
        self._files = list(plan.files)
        self._covers: dict[int, FileCover] = {}
        self._parts: dict[int, PartFile] = {}
        self._orders: dict[int, InOrder] = {}
        self._copies: dict[int, _Copy] = {}
        """File -> the source's file that it is, where that has to be read after all."""
        self._waiting: dict[int, int] = {}
        """File -> windows that are not written yet."""
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._digests: dict[str, str] = {}
        self._linked = 0
        self._failures: list[BaseException] = []

    def run(self) -> Written:
        """All of it."""
        began = time.perf_counter()
        share, shares = self._only
        mark = f"{self._folder}/{_mark_name(self._plan, self._only)}"
        if shares > 1:
            self._forget_other_tries()
            unlink(self._disk, mark)
        self._outs = Buffers(self._window_nbytes)
        self._reads = Buffers(self._read_nbytes)
        with self._outs, self._reads:
            kept = self._keep()
            put_together = [index for index, file in enumerate(self._files) if file.link is None and index not in kept]
            mine, common = (put_together, []) if shares == 1 else ([], put_together)
            for index, file in enumerate(self._plan.files):
                if file.link is not None and index not in kept and index % shares == share and not self._link(index):
                    mine.append(index)
            windows = self._cut(sorted(mine), (0, 1), whole=True) + self._cut(common, self._only, whole=False)
            self._stream(windows)
        if shares > 1:
            self._leave(mark)
        else:
            _tidy(self._disk, self._folder)
        nbytes = self._plan.nbytes if shares == 1 else sum(window.end - window.begin for window in windows) + self._linked
        return Written(nbytes, self._linked, dict(sorted(self._digests.items())), time.perf_counter() - began)

    def _forget_other_tries(self) -> None:
        """Marks of an earlier try by another number of shares say nothing of what is written now."""
        for name in os.listdir(self._folder):
            if name.startswith(".share-") and not name.endswith(f"-of-{self._only[1]}-{self._plan.id[:8]}.json"):
                unlink(self._disk, f"{self._folder}/{name}")

    # -- what is there -----------------------------------------------------------------------------------------------
    def _keep(self) -> set[int]:
        """The files that are whole already, of which the digests become known."""
        record = _read(f"{self._folder}/{_RECORD}", _Record)
        known = record.digests if record is not None and record.plan == self._plan.id else {}
        kept = set()
        for index, file in enumerate(self._files):
            if not _is_there(self._disk, f"{self._folder}/{file.name}", file.nbytes):
                continue
            kept.add(index)
            if self._only[1] > 1 and index % self._only[1] != self._only[0]:
                continue
            if file.link is not None:
                self._digests[file.name] = known.get(file.name, "")
                self._linked += file.nbytes
            else:
                self._digests[file.name] = known.get(file.name) or self._digest_of(file.name, file.nbytes)
        return kept

    def _digest_of(self, name: str, nbytes: int, look: Callable[[int, memoryview], None] = lambda *_: None) -> str:
        """Digest of a whole file of the export; ``look`` sees all its bytes in order."""
        store, order = open_store(self._folder), InOrder()
        for at in range(0, nbytes, self._read_nbytes):
            view = self._reads.read(store, name, at, min(self._read_nbytes, nbytes - at))
            try:
                order.add(at, view)
                look(at, view)
            finally:
                self._reads.give_back(view)
        return order.hexdigest()

    def _note(self, name: str, found: str) -> None:
        """Remember a whole file's digest, for this call and for the next one after a kill."""
        with self._noting:
            self._digests[name] = found
            if self._only[1] == 1:
                self._put(_RECORD, _Record(self._plan.id, self._digests))

    def _put(self, name: str, record: msgspec.Struct) -> None:
        path = f"{self._folder}/{name}"
        try:
            unlink(self._disk, path + SUFFIX)
            fd = self._disk.open(path + SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                data = memoryview(msgspec.json.encode(record))
                done = 0
                while done < len(data):
                    done += self._disk.pwrite(fd, data[done:], done)
                self._disk.fsync(fd)
            finally:
                self._disk.close(fd)
            self._disk.rename(path + SUFFIX, path)
        except OSError as error:
            raise translated(self._disk, error, path, 4096) from error

    # -- links -------------------------------------------------------------------------------------------------------
    def _link(self, index: int) -> bool:
        """Make a file that the source has: False when its bytes have to be read after all (then it is noted as such)."""
        file = self._files[index]
        assert file.link is not None
        header = self._check_header(file, file.link)
        path = f"{self._folder}/{file.name}"
        if isinstance(self._source.store, LocalStore):
            original = f"{self._source.store.path}/{self._source.files[file.link].key}"
            # Others' files may be written anew under the same name and inode: of those an export has to be a copy.
            immutable = self._source.kind == "everystep"
            try:
                if immutable and linking.hard_link(original, path):
                    self._linked += file.nbytes
                    self._note(file.name, "")
                    return True
                unlink(self._disk, path + SUFFIX)
                if linking.clone(original, path + SUFFIX, file.nbytes, pace=self._pace):
                    found = self._check_copy(file)
                    self._disk.rename(path + SUFFIX, path)
                    self._linked += file.nbytes
                    self._note(file.name, found)
                    return True
            except OSError as error:
                raise translated(self._disk, error, path, file.nbytes) from error
        self._files[index] = msgspec.structs.replace(file, link=None)
        self._copies[index] = _Copy(self._source.files[file.link].key, header, self._chunks_of(file))
        return False

    def _chunks_of(self, file: OutputFile) -> list[tuple[int, Chunk, Place]]:
        """What lies in a file that the source has, in the order of its bytes."""
        chunks = [(chunk.offset, chunk, (name, 0)) for name in file.tensors for chunk in self._source.tensors[name].chunks if chunk.nbytes]
        return sorted(chunks, key=lambda one: one[0])

    def _check_header(self, file: OutputFile, link: int) -> bytes:
        """The header of a file of the source, which has to be just what was planned."""
        key = self._source.files[link].key
        length = int.from_bytes(self._header_bytes(file, key, 8), "little")
        header = self._header_bytes(file, key, min(8 + length, file.nbytes))
        recorded = self._source.headers.get(link)
        if recorded is not None and (len(header), digest(header)) != recorded:
            raise CorruptionError(f"the header of {key!r} of {self._source.where!r} is corrupt", step=self._source.step, key=key,
                                  kind="digest", hint=_HINT)  # fmt: skip
        found = safetensors.parse(header, file.nbytes)
        if {entry.name: entry for entry in found.entries} != {entry.name: entry for entry in file.entries}:
            raise LayoutError(f"{key!r} of {self._source.where!r} does not hold what was planned from it", key=key, kind="header",
                              hint="give a max_shard_size: then its tensors are read and put together anew")  # fmt: skip
        return header

    def _header_bytes(self, file: OutputFile, key: str, nbytes: int) -> bytes:
        view = memoryview(bytearray(nbytes))
        self._read_into(key, 0, view, file.tensors)
        return bytes(view)

    def _check_copy(self, file: OutputFile) -> str:
        """Compare a copy with the digests of its chunks; its own digest, or "" when there was nothing to compare."""
        chunks = self._chunks_of(file)
        if not any(chunk.digests or chunk.crc is not None for _, chunk, _ in chunks):
            return ""
        following = 0

        def look(at: int, view: memoryview) -> None:
            nonlocal following
            end = at + len(view)
            for number in range(following, len(chunks)):
                offset, chunk, of = chunks[number]
                if offset >= end:
                    return
                low, high = max(offset, at), min(offset + chunk.nbytes, end)
                self._checks.piece(of, chunk, low - offset, view[low - at : high - at])
                following = number + (offset + chunk.nbytes <= end)

        return self._digest_of(file.name + SUFFIX, file.nbytes, look)

    # -- windows -----------------------------------------------------------------------------------------------------
    def _cut(self, indices: Sequence[int], only: tuple[int, int], *, whole: bool) -> list[Window]:
        """The windows of some files; of those of which this process writes all, it also makes the digest and gives the name."""
        windows = cut(self._files, indices, nbytes=self._window_nbytes, only=only)
        covered: dict[int, int] = {}
        for window in windows:
            covered[window.file] = covered.get(window.file, 0) + window.end - window.begin
            self._waiting[window.file] = self._waiting.get(window.file, 0) + 1
        for index in indices if whole else covered:
            file = self._files[index]
            self._covers[index] = FileCover(self._source, file)
            self._parts[index] = PartFile(self._disk, f"{self._folder}/{file.name}", file.nbytes, fresh=whole)
            if covered.get(index) == file.nbytes:
                self._orders[index] = InOrder()
        if not whole:
            for window in windows[:1]:
                self._begin_inside(window)
        return windows

    def _stream(self, windows: Sequence[Window]) -> None:
        if not windows:
            return
        try:
            with Transfer(threads=self._threads, budget_nbytes=self._threads * self._window_nbytes) as transfer:
                transfer.run((window.end - window.begin, functools.partial(self._guarded, window)) for window in windows)
            self._end_inside()
        except StoppedError:
            raise self._failures[0] from None
        except BaseException as error:
            if self._failures and error is not self._failures[0] and not isinstance(error, KeyboardInterrupt):
                raise self._failures[0] from None
            raise
        finally:
            for part in self._parts.values():
                with contextlib.suppress(OSError):  # what matters of it was durable before
                    part.close()

    def _guarded(self, window: Window) -> None:
        """A failure ends the others' waiting, and is the one to be told."""
        try:
            self._window(window)
        except BaseException as error:
            if not isinstance(error, StoppedError):
                self._failures.append(error)
            self._checks.stop()
            for order in self._orders.values():
                order.stop()
            raise

    def _window(self, window: Window) -> None:
        file, cover, nbytes = self._files[window.file], self._covers[window.file], window.end - window.begin
        if self._pace is not None:
            self._pace(nbytes)
        padded = -(-nbytes // ALIGN) * ALIGN
        out = self._outs.take(padded)
        try:
            out[nbytes:] = bytes(padded - nbytes)
            copy = self._copies.get(window.file)
            if copy is not None:
                self._copy(window, copy, file, out[:nbytes])
            else:
                self._put_together(window, file, cover, out)
            order = self._orders.get(window.file)
            if order is not None:
                order.add(window.begin, out[:nbytes])
            self._parts[window.file].write(out, window.begin)
        finally:
            self._outs.give_back(out)
        self._done(window.file)

    def _put_together(self, window: Window, file: OutputFile, cover: FileCover, out: memoryview) -> None:
        """Header and elements of a window."""
        of_header = max(min(window.end, cover.data_start) - window.begin, 0)
        out[:of_header] = file.header[window.begin : window.begin + of_header]
        wanted = 0
        for number, low, high in cover.elements(window):
            wanted += high - low
            if low == 0:
                self._check_apart(file, cover, number)
        for fetch in cover.fetches(window, self._read_nbytes):
            wanted -= self._fetch(window, cover, fetch, out)
        if wanted:
            raise self._not_whole(window, cover)

    def _copy(self, window: Window, copy: _Copy, file: OutputFile, out: memoryview) -> None:
        """A window of a file that is the source's own."""
        self._read_into(copy.key, window.begin, out, file.tensors)
        of_header = max(min(window.end, len(copy.header)) - window.begin, 0)
        out[:of_header] = copy.header[window.begin : window.begin + of_header]
        first = max(bisect.bisect_right(copy.chunks, window.begin, key=lambda one: one[0]) - 1, 0)
        for offset, chunk, place_of in copy.chunks[first:]:
            if offset >= window.end:
                break
            low, high = max(offset, window.begin), min(offset + chunk.nbytes, window.end)
            if low < high:
                self._checks.piece(place_of, chunk, low - offset, out[low - window.begin : high - window.begin])

    def _done(self, index: int) -> None:
        """A window is written; with the last one the file is whole."""
        with self._lock:
            self._waiting[index] -= 1
            if self._waiting[index]:
                return
        order, part, name = self._orders.get(index), self._parts[index], self._files[index].name
        if self._only[1] == 1 or self._plan.files[index].link is not None:
            part.publish()
            self._note(name, order.hexdigest() if order is not None else "")
        else:
            part.sync()
            if order is not None:
                self._note(name, order.hexdigest())

    # -- reading -----------------------------------------------------------------------------------------------------
    def _fetch(self, window: Window, cover: FileCover, fetch: Fetch, out: memoryview) -> int:
        """Read a range, check it and place it in the window; returns how many elements it held."""
        names = [cover.file.tensors[piece.entry] for piece in fetch.pieces]
        if fetch.file < 0:
            raise self._not_whole(window, cover)
        key = self._source.files[fetch.file].key
        at = self._straight(window, cover, fetch)
        if at is not None:
            view = out[at : at + fetch.nbytes]
            self._read_into(key, fetch.offset, view, names)
            return self._check(cover, fetch.pieces[0], view)
        view = self._read(key, fetch.offset, fetch.nbytes, names)
        placed = 0
        try:
            for piece in fetch.pieces:
                chunk = cover.cover(piece.entry).chunks[piece.chunk]
                begin = chunk.offset + piece.begin - fetch.offset
                data = view[begin : begin + piece.end - piece.begin]
                placed += self._check(cover, piece, data)
                self._place(window, cover, piece, data, out)
        finally:
            self._reads.give_back(view)
        return placed

    def _straight(self, window: Window, cover: FileCover, fetch: Fetch) -> int | None:
        """Where in the window a range can be read to at once: one run that stays as it is, at the same place in a page."""
        piece = fetch.pieces[0]
        if len(fetch.pieces) > 1 or piece.box is not None or fetch.nbytes < _STRAIGHT_NBYTES:
            return None
        entry, of = cover.file.entries[piece.entry], cover.cover(piece.entry)
        if piece.chunk not in of.first or entry.dtype != self._source.tensors[cover.file.tensors[piece.entry]].dtype:
            return None
        at = cover.data_start + entry.begin + of.first[piece.chunk] * of.itemsize + piece.begin - window.begin
        return at if (at - fetch.offset) % ALIGN == 0 else None

    def _check(self, cover: FileCover, piece: Piece, data: memoryview) -> int:
        """Compare what a piece holds with its digests; returns its elements."""
        of = cover.cover(piece.entry)
        if piece.box is not None:
            return piece.box.numel
        chunk = of.chunks[piece.chunk]
        if chunk.digests or chunk.crc is not None:
            self._checks.piece((cover.file.tensors[piece.entry], piece.chunk), chunk, piece.begin, data)
        return len(data) // of.itemsize

    def _check_apart(self, file: OutputFile, cover: FileCover, number: int) -> None:
        """Read chunks with strides of their own once to check them: what windows read of them is in no order."""
        for chunk_number, chunk in enumerate(cover.cover(number).chunks):
            if chunk.strides is not None and chunk.nbytes and (chunk.digests or chunk.crc is not None):
                row_major = chunk._replace(strides=None)
                for at in range(0, chunk.nbytes, self._read_nbytes):
                    self._pass(file.tensors[number], chunk_number, row_major, at, min(at + self._read_nbytes, chunk.nbytes))

    def _pass(self, name: str, number: int, chunk: Chunk, begin: int, end: int) -> None:
        """Read bytes of a chunk only to check them."""
        for at in range(begin, end, self._read_nbytes):
            until = min(at + self._read_nbytes, end)
            view = self._read(self._source.files[chunk.file].key, chunk.offset + at, until - at, [name])
            try:
                self._checks.piece((name, number), chunk, at, view)
            finally:
                self._reads.give_back(view)

    def _place(self, window: Window, cover: FileCover, piece: Piece, data: memoryview, out: memoryview) -> None:
        entry, of = cover.file.entries[piece.entry], cover.cover(piece.entry)
        stored = self._source.tensors[cover.file.tensors[piece.entry]].dtype
        start = cover.data_start + entry.begin - window.begin
        itemsize = DTYPES[entry.dtype]
        if piece.box is not None:
            strides = of.chunks[piece.chunk].strides
            assert strides is not None
            items = gather(data, piece.box.sizes, strides, itemsize=of.itemsize)
            first = of.position(piece.chunk, piece.box)
            place(out, start + first * itemsize, items, piece.box.sizes, of.strides, stored=stored, dtype=entry.dtype)
            return
        for at, first, sizes, strides in of.targets(piece.chunk, piece.begin // of.itemsize, piece.end // of.itemsize):
            place(out, start + first * itemsize, data[at * of.itemsize :], sizes, strides, stored=stored, dtype=entry.dtype)

    def _read(self, key: str, offset: int, nbytes: int, names: Sequence[str]) -> memoryview:
        try:
            return self._reads.read(self._source.store, key, offset, nbytes)
        except (NotFoundError, CorruptionError) as error:
            raise self._lost(key, names, error) from error

    def _read_into(self, key: str, offset: int, view: memoryview, names: Sequence[str]) -> None:
        try:
            self._source.store.read_into(key, offset, view)
        except (NotFoundError, CorruptionError) as error:
            raise self._lost(key, names, error) from error

    def _lost(self, key: str, names: Iterable[str], error: CheckpointError) -> CorruptionError:
        known = list(dict.fromkeys(names))
        told = ", ".join(repr(name) for name in known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
        what = "is missing" if isinstance(error, NotFoundError) else "is damaged"
        return CorruptionError(f"{key!r} of {self._source.where!r} {what}, and with it tensors {told}: {error.message}",
                               step=self._source.step, key=key, kind=error.kind, hint=_HINT)  # fmt: skip

    def _not_whole(self, window: Window, cover: FileCover) -> CorruptionError:
        names = [cover.file.tensors[number] for number, _, _ in cover.elements(window)]
        told = ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return CorruptionError(f"checkpoint {self._source.where!r} lacks regions of {told}", step=self._source.step, key=self._source.where,
                               kind="missing", hint=_HINT)  # fmt: skip

    # -- shares ------------------------------------------------------------------------------------------------------
    def _begin_inside(self, window: Window) -> None:
        """What lies before the share in a digest block that it begins in is read, to be able to check the block."""
        cover = self._covers[window.file]
        for number, low, _ in cover.elements(window):
            if not low:
                continue
            of, name = cover.cover(number), cover.file.tensors[number]
            for chunk_number, _, end in of.needs(0, low):
                chunk, before = of.chunks[chunk_number], end * of.itemsize
                if chunk.strides is None and chunk.digests and before < chunk.nbytes:
                    self._pass(name, chunk_number, chunk._replace(crc=None), before - before % block_nbytes(chunk), before)

    def _end_inside(self) -> None:
        """What lies behind the share in the digest blocks that it ends in is read."""
        for (name, chunk_number), block, at in self._checks.half_read():
            chunk = self._source.tensors[name].chunks[chunk_number]
            size = block_nbytes(chunk)
            self._pass(name, chunk_number, chunk._replace(crc=None), block * size + at, min((block + 1) * size, chunk.nbytes))

    def _leave(self, path: str) -> None:
        """This share is durable: say so."""
        loose = []
        for (name, number), parts in self._checks.loose().items():
            chunk = self._source.tensors[name].chunks[number]
            assert chunk.crc is not None
            key = self._source.files[chunk.file].key
            loose.append(_Loose(name, number, key, chunk.offset, chunk.nbytes, chunk.crc, list(parts)))
        self._put(os.path.basename(path), _Mark(self._plan.id, self._digests, self._linked, loose))


# -- small things -------------------------------------------------------------------------------------------------------


def _sizes(threads: int | None, budget_nbytes: int) -> tuple[int, int, int]:
    """How many threads, and the sizes of windows and reads: together within the budget, large pages and all."""
    # More than cores: each one reads, then works, then writes, and the others' reads and writes go on meanwhile.
    wanted = max(4, min(len(os.sched_getaffinity(0)), 8)) if threads is None else threads
    if wanted < 1:
        raise ValueError(f"an export needs at least one thread, not {wanted}")
    for count in range(wanted, 0, -1):
        window, read = _WINDOW_NBYTES, _READ_NBYTES
        while window > _SMALLEST_NBYTES:
            if count * (window + 2 * read + (3 * _LARGE_PAGE if window > _LARGE_PAGE else 0)) <= budget_nbytes:
                if window >= _WINDOW_NBYTES // 4 or count == 1:
                    return count, window, read
                break
            window //= 2
            read = max(read // 2, _SMALLEST_NBYTES)
    return 1, _SMALLEST_NBYTES, _SMALLEST_NBYTES


def _mark_name(plan: ExportPlan, only: tuple[int, int]) -> str:
    return f".share-{only[0] + 1}-of-{only[1]}-{plan.id[:8]}.json"


def _marks(plan: ExportPlan, folder: str) -> list[_Mark]:
    """The marks of all shares, in order."""
    counts = set()
    for name in os.listdir(folder):
        words = name.split("-")
        if name.startswith(".share-") and name.endswith(f"-{plan.id[:8]}.json") and len(words) == 5:
            counts.add(int(words[3]))
    lacking = ""
    for count in sorted(counts):
        marks = [_read(f"{folder}/{_mark_name(plan, (number, count))}", _Mark) for number in range(count)]
        whole = [mark for mark in marks if mark is not None and mark.plan == plan.id]
        if len(whole) == count:
            return whole
        lacking = ", ".join(str(number + 1) for number, mark in enumerate(marks) if mark is None) + f" of {count}"
    raise ConflictError(f"the export in {folder!r} lacks its share {lacking or '1 of all'}", key=folder, kind="share",
                        hint="write the missing shares, then finish it")  # fmt: skip


def _read(path: str, into: type[_Read]) -> _Read | None:
    """A small record; None when it is not there or was not written whole."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=into)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _size(disk: Disk, path: str) -> int:
    try:
        return disk.stat(path).nbytes
    except FileNotFoundError:
        return -1


def _is_there(disk: Disk, path: str, nbytes: int) -> bool:
    return _size(disk, path) == nbytes


def _tidy(disk: Disk, folder: str) -> None:
    """Only the export's files stay, and their names are durable."""
    try:
        for entry in disk.scandir(folder):
            if entry.name == _RECORD or entry.name.startswith(".share-") or (entry.is_file and entry.name.endswith(SUFFIX)):
                unlink(disk, f"{folder}/{entry.name}")
        sync_folder(disk, folder)
    except OSError as error:
        raise translated(disk, error, folder, 0) from error
