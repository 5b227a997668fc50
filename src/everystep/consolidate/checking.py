"""Digests and checksums of what is read, checked while it passes by, in pieces of any size.

Theory of operation. A digest is for a block of a chunk. A piece that holds whole blocks is checked at once. A block that the edge of a
window cuts is checked by its parts in order: the digest's state waits for the next part, whichever thread brings it. That cannot lock up:
windows are begun in order, so the oldest one at work waits for nobody. CRCs need no order, since those of parts can be combined.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from everystep.consolidate.windows import block_nbytes
from everystep.errors import CorruptionError
from everystep.manifest import digest

if TYPE_CHECKING:
    from everystep.consolidate.source import Chunk, Source

Bytes = memoryview
Place = tuple[str, int]
"""A tensor's name in the source and which of its chunks."""
_POLYNOMIAL = 0xEDB88320


class StoppedError(Exception):
    """Another thread failed; never seen outside."""


class _Open:
    """A digest block of which the first bytes have passed."""

    __slots__ = ("at", "state")

    def __init__(self) -> None:
        self.at = 0
        self.state = xxhash.xxh3_128()


class Loose(NamedTuple):
    """Part of a chunk's CRC, for whoever has the rest."""

    begin: int
    nbytes: int
    crc: int


class Checks:
    """What is known and still awaited of the digests of one export's chunks. Thread-safe."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Condition()
        self._open: dict[tuple[Place, int], _Open] = {}
        self._loose: dict[Place, list[Loose]] = {}
        self._stopped = False

    def stop(self) -> None:
        """Let nobody wait any more: a thread failed."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def piece(self, place: Place, chunk: Chunk, begin: int, data: Bytes) -> None:
        """Check bytes from ``begin`` on of a chunk.

        Raises:
            CorruptionError: They differ from what was recorded; names the tensor, file and byte.
            StoppedError: Waiting for the bytes before them ended because another thread failed.
        """
        if chunk.digests:
            self._blocks(place, chunk, begin, data)
        if chunk.crc is not None and chunk.strides is None:
            self._crc(place, chunk, Loose(begin, len(data), zlib.crc32(data)))

    def _blocks(self, place: Place, chunk: Chunk, begin: int, data: Bytes) -> None:
        size = block_nbytes(chunk)
        end = begin + len(data)
        at = begin
        while at < end:
            number, into = divmod(at, size)
            past = min((number + 1) * size, chunk.nbytes)
            part = data[at - begin : min(past, end) - begin]
            if into == 0 and past <= end:
                found: str | None = digest(part)
            else:
                found = self._part(place, number, into, part, last=past <= end)
            if found is not None and found != chunk.digests[number]:
                raise self._corrupt(place, chunk, number * size)
            at += len(part)

    def _part(self, place: Place, number: int, into: int, part: Bytes, *, last: bool) -> str | None:
        """Add a part of a block to its digest, when it is its turn; the digest when it is the last."""
        with self._lock:
            state = self._open.setdefault((place, number), _Open())
            while state.at != into:
                if self._stopped:
                    raise StoppedError
                self._lock.wait()
        state.state.update(part)
        with self._lock:
            state.at += len(part)
            if last:
                del self._open[place, number]
            self._lock.notify_all()
        return state.state.hexdigest() if last else None

    def _crc(self, place: Place, chunk: Chunk, part: Loose) -> None:
        with self._lock:
            parts = self._loose.setdefault(place, [])
            parts.append(part)
            if sum(one.nbytes for one in parts) < chunk.nbytes:
                return
            del self._loose[place]
        if combined(parts) != chunk.crc:
            raise self._corrupt(place, chunk, 0)

    def half_read(self) -> list[tuple[Place, int, int]]:
        """(chunk, block, bytes that have passed) of the blocks that were not read to their end."""
        with self._lock:
            return [(place, number, state.at) for (place, number), state in self._open.items()]

    def loose(self) -> Mapping[Place, Sequence[Loose]]:
        """The parts of CRCs of which the rest is not known here."""
        with self._lock:
            return dict(self._loose)

    def _corrupt(self, place: Place, chunk: Chunk, at: int) -> CorruptionError:
        return corrupt(self._source, place, chunk, at)


def corrupt(source: Source, place: Place, chunk: Chunk, at: int) -> CorruptionError:
    """The error for a chunk whose bytes from ``at`` on are not what was recorded."""
    key = source.files[chunk.file].key
    return CorruptionError(
        f"tensor {place[0]!r} of {source.where!r} is corrupt in {key!r} at byte {chunk.offset + at:,}",
        step=source.step, key=key, kind="digest", hint="take another copy or an older checkpoint",
    )  # fmt: skip


class InOrder:
    """The digest of a file whose parts come from several threads, each when it is its turn."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._at = 0
        self._state = xxhash.xxh3_128()
        self._stopped = False

    def add(self, begin: int, part: Bytes) -> None:
        """Add the bytes from ``begin`` on; waits for those before them. StoppedError when they will not come."""
        with self._lock:
            while self._at != begin:
                if self._stopped:
                    raise StoppedError
                self._lock.wait()
        self._state.update(part)
        with self._lock:
            self._at += len(part)
            self._lock.notify_all()

    def stop(self) -> None:
        """Let nobody wait any more."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def hexdigest(self) -> str:
        """XXH3-128 of all that was added."""
        return self._state.hexdigest()


# -- CRC-32 of parts ----------------------------------------------------------------------------------------------------


def combined(parts: Sequence[Loose]) -> int:
    """The CRC-32 of a whole from those of its parts, which come in any order."""
    crc = 0
    for part in sorted(parts):
        crc = _times(_power(part.nbytes), crc) ^ part.crc
    return crc


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), bits reversed, modulo CRC-32's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """What appending so many zero bytes multiplies a CRC with: x to the power of eight times their number."""
    result, square = 1 << 31, 1 << 30
    for _ in range(3):
        square = _times(square, square)
    while nbytes:
        if nbytes & 1:
            result = _times(square, result)
        square = _times(square, square)
        nbytes >>= 1
    return result
