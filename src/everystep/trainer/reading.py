"""Fill tensors from a manifest's bytes, verified block by block, from memory or from a store."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from everystep import values
from everystep.agent.client import TakenSnapshot
from everystep.errors import CorruptionError, NotFoundError
from everystep.manifest import Manifest, TensorSpec, digest, document_of_rank
from everystep.plan import Copy, Fetch, Piece, place, plan_restore
from everystep.region import Region, whole
from everystep.repository import Repository
from everystep.trainer.restoring import Wanted
from everystep.trainer.sharding import box
from everystep.transfer import Buffers, Transfer

FETCH_NBYTES = 8 << 20
BUDGET_NBYTES = 64 << 20
_VERIFY = "everystep verify RUN shows what is damaged"
_DIRECT_NBYTES = 1 << 20
"""Smaller pieces are fetched many at a time."""


class Source(Protocol):
    """Where a manifest's bytes are."""

    direct: bool
    """Whether ``read_into`` may as well go straight into a tensor's memory, without a buffer in between."""

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on of ``objects[number]``."""
        ...

    def bytes_of(self, fetch: Fetch, *, shared: bool = False) -> memoryview:
        """The bytes of one fetch in a buffer; given back with ``release``. ``shared``: other ranks of this node want them too."""
        ...

    def release(self, view: memoryview) -> None:
        """The bytes are no longer looked at."""
        ...


class MemorySource:
    """A snapshot in the agent's memory."""

    direct = True

    def __init__(self, taken: TakenSnapshot, buffers: Buffers) -> None:
        self._taken = taken
        self._buffers = buffers

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        """Copy out of the slab."""
        self._taken.read_into(self._taken.file_offsets[number] + offset, view)

    def bytes_of(self, fetch: Fetch, *, shared: bool = False) -> memoryview:
        """Copy the range into a reused buffer."""
        view = self._buffers.take(fetch.nbytes)
        self.read_into(fetch.object, fetch.offset, view)
        return view

    def release(self, view: memoryview) -> None:
        """Give the buffer back."""
        self._buffers.give_back(view)


class StoreSource:
    """A committed checkpoint's objects, read into reused buffers."""

    direct = False  # reading past the page cache wants whole pages, which tensors are not

    def __init__(self, repository: Repository, manifest: Manifest, buffers: Buffers) -> None:
        self._store = repository.store
        self._manifest = manifest
        self._buffers = buffers

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        """Read the range."""
        self._store.read_into(self._manifest.objects[number].key, offset, view)

    def bytes_of(self, fetch: Fetch, *, shared: bool = False) -> memoryview:
        """Read the range; the view begins at the range's first byte."""
        return self._buffers.read(self._store, self._manifest.objects[fetch.object].key, fetch.offset, fetch.nbytes, shared=shared)

    def release(self, view: memoryview) -> None:
        """Give the buffer back."""
        self._buffers.give_back(view)


class ManifestReader:
    """A checkpoint being read (``state.TensorReader``), as rank ``rank`` sees it.

    A rank beyond the saved world gets the plain values of ``rank % world``. Tensors that only other ranks' values refer to (kept by rank)
    are not among ``tensors``. ``neighbours``: how many ranks of this node read the same checkpoint at the same time.
    """

    def __init__(self, manifest: Manifest, source: Source, *, threads: int, rank: int = 0, neighbours: int = 0) -> None:
        self._manifest = manifest
        self._source = source
        self._threads = threads
        self._neighbours = neighbours
        self._shared = False
        self.step = manifest.step
        self.beyond = rank >= manifest.world
        self.by_rank = bool(manifest.by_rank)
        self.values = document_of_rank(manifest, rank)
        foreign = _of_other_ranks(manifest, rank % manifest.world, self.values)
        specs = {spec.name: spec for spec in manifest.tensors if spec.name not in foreign}
        aliases = {alias: specs[name] for alias, name in manifest.aliases.items() if name in specs and alias not in foreign}
        self.tensors: Mapping[str, TensorSpec] = {**specs, **aliases}
        self.nbytes = 0
        self.touched = False
        """Whether any tensor may have been written."""

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill each tensor with the verified bytes of its region; parallel, within a byte budget."""
        targets = [_Target(one, self.tensors[one.name].shape) for one in wanted]
        regions = [(one.name, target.region) for one, target in zip(wanted, targets, strict=True)]
        plan = plan_restore(self._manifest, regions, fetch_nbytes=FETCH_NBYTES)
        self.touched = True
        self._shared = bool(self._neighbours) and _are_shared(plan.nbytes, targets)
        with Transfer(threads=self._threads, budget_nbytes=BUDGET_NBYTES) as transfer:
            transfer.run((fetch.nbytes, self._job(fetch, targets, regions)) for fetch in plan.fetches)
        for one in wanted:
            # Raw writes bypass torch's version counter; autograd has to notice them all the same.
            if not one.tensor.is_inference():
                torch.autograd.graph.increment_version(one.tensor)
        self.nbytes += plan.nbytes

    def _job(self, fetch: Fetch, targets: Sequence[_Target], regions: Sequence[tuple[str, Region]]) -> Callable[[], None]:
        windows = [self._window(piece, targets, regions) for piece in fetch.pieces] if self._source.direct else []

        def straight() -> None:
            for piece, window in zip(fetch.pieces, windows, strict=True):
                if window is not None:
                    shard = self._manifest.shards[piece.shard]
                    for at in range(0, len(window), shard.block_nbytes):
                        block = window[at : at + shard.block_nbytes]
                        self._source.read_into(shard.object, shard.offset + piece.begin + at, block)
                        self._check(piece, block, at)

        def buffered() -> None:
            view = self._bytes_of(fetch)
            try:
                for piece in fetch.pieces:
                    data = view[piece.at : piece.at + piece.end - piece.begin]
                    size = self._manifest.shards[piece.shard].block_nbytes
                    for at in range(0, max(len(data), 1), size):
                        self._check(piece, data[at : at + size], at)
                    self._place(piece, data, targets, regions)
                    data.release()
            finally:
                self._source.release(view)

        return straight if windows and all(window is not None for window in windows) else buffered

    def _bytes_of(self, fetch: Fetch) -> memoryview:
        try:
            return self._source.bytes_of(fetch, shared=self._shared)
        except (NotFoundError, CorruptionError) as error:
            stored = self._manifest.objects[fetch.object]
            lost = [self._manifest.tensors[shard.tensor].name for shard in self._manifest.shards if shard.object == fetch.object]
            names = ", ".join(repr(name) for name in lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            what = "is missing" if isinstance(error, NotFoundError) else "is damaged"
            message = f"{stored.key!r} of step {self.step} {what}, and with it tensors {names}: {error.message}"
            raise CorruptionError(message, step=self.step, key=stored.key, kind=error.kind, hint=_VERIFY) from error

    def _place(self, piece: Piece, data: memoryview, targets: Sequence[_Target], regions: Sequence[tuple[str, Region]]) -> None:
        shard = self._manifest.shards[piece.shard]
        if len(piece.targets) == 1 and targets[piece.targets[0]].take(shard.region, piece.begin, data):
            return  # the usual case, of which there may be a million
        if len(data):
            for copy in place(self._manifest, piece, regions):
                targets[copy.target].place(copy, data)

    def _window(self, piece: Piece, targets: Sequence[_Target], regions: Sequence[tuple[str, Region]]) -> memoryview | None:
        """The memory of the one tensor that takes this large piece just as it is stored; None when it has to go through a buffer."""
        nbytes = piece.end - piece.begin
        if len(piece.targets) != 1 or nbytes < _DIRECT_NBYTES or not targets[piece.targets[0]].raw:
            return None
        copies = list(itertools.islice(place(self._manifest, piece, regions), 2))
        if len(copies) != 1 or copies[0].flat is None or (copies[0].run_offset, copies[0].run_nbytes) != (0, nbytes):
            return None
        return targets[piece.targets[0]].window(copies[0].flat, nbytes)

    def _check(self, piece: Piece, block: memoryview, at: int) -> None:
        shard = self._manifest.shards[piece.shard]
        if digest(block) != shard.digests[(piece.begin + at) // shard.block_nbytes]:
            spec, stored = self._manifest.tensors[shard.tensor], self._manifest.objects[shard.object]
            where = f"{stored.key!r} at byte {shard.offset + piece.begin + at}"
            message = f"tensor {spec.name!r} of step {self.step} is corrupt in {where}"
            raise CorruptionError(message, step=self.step, key=stored.key, kind="digest", hint=_VERIFY)


class _Target:
    """A tensor to fill from runs of bytes of the shards."""

    def __init__(self, wanted: Wanted, shape: tuple[int, ...]) -> None:
        self.tensor = wanted.tensor.detach()
        self.nbytes = self.tensor.nbytes
        self.whole = wanted.region is None
        self.region = whole(shape) if wanted.region is None else wanted.region
        self.raw = self.tensor.device.type == "cpu" and self.tensor.is_contiguous()
        self.pointer = self.tensor.data_ptr()

    def window(self, begin: int, nbytes: int) -> memoryview:
        """The tensor's own memory from byte ``begin`` on."""
        return self.tensor.view(-1).view(torch.uint8).numpy().data[begin : begin + nbytes]

    def take(self, region: Region, begin: int, data: memoryview) -> bool:
        """Copy ``data``, the bytes from ``begin`` on of a shard that holds just what is wanted; False where it is not so."""
        if not self.raw or region != self.region:
            return False
        if len(data):
            ctypes.memmove(self.pointer + begin, _address(data), len(data))
        return True

    def place(self, copy: Copy, data: memoryview) -> None:
        """Copy what a piece holds for this target."""
        if self.raw and copy.flat is not None:
            ctypes.memmove(self.pointer + copy.flat, _address(data) + copy.offset + copy.run_offset, copy.run_nbytes)
            return
        stored = torch.frombuffer(data, dtype=torch.uint8)[copy.offset : copy.offset + copy.nbytes].view(self.tensor.dtype).view(copy.sizes)
        with torch.no_grad():
            box(self.tensor, copy.destination).copy_(box(stored, copy.source))


def _are_shared(nbytes: int, targets: Sequence[_Target]) -> bool:
    """Whether other ranks of this node are about to read much of the same ``nbytes``: replicas, and the digest blocks at shares' ends.

    Up to a third more than its own share a rank reads faster past the page cache.
    """
    alone = sum(target.nbytes for target in targets if not target.whole)
    return nbytes > 4 / 3 * alone


def _of_other_ranks(manifest: Manifest, rank: int, values_of_rank: bytes) -> set[str]:
    """Names of tensors that only other ranks' values refer to."""
    if not manifest.by_rank:
        return set()
    others = {ref.name for document in (manifest.values, *manifest.by_rank.values()) for ref in values.refs(bytes(document))}
    return others - {ref.name for ref in values.refs(values_of_rank)}


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
