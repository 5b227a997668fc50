"""Fill tensors from a manifest's bytes, verified block by block, from memory or from a store."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from everystep.agent.client import TakenSnapshot
from everystep.errors import CorruptionError, NotFoundError
from everystep.manifest import BLOCK_NBYTES, Manifest, TensorSpec, digest
from everystep.plan import Fetch, Piece, plan_restore
from everystep.region import Region, boxes, whole
from everystep.repository import Repository
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

    def bytes_of(self, fetch: Fetch) -> memoryview:
        """The bytes of one fetch in a buffer; given back with ``release``."""
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

    def bytes_of(self, fetch: Fetch) -> memoryview:
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

    def bytes_of(self, fetch: Fetch) -> memoryview:
        """Read the range; the view begins at the range's first byte."""
        return self._buffers.read(self._store, self._manifest.objects[fetch.object].key, fetch.offset, fetch.nbytes)

    def release(self, view: memoryview) -> None:
        """Give the buffer back."""
        self._buffers.give_back(view)


class ManifestReader:
    """A checkpoint being read (``state.TensorReader``)."""

    def __init__(self, manifest: Manifest, source: Source, *, threads: int) -> None:
        self._manifest = manifest
        self._source = source
        self._threads = threads
        self.step = manifest.step
        self.values = bytes(manifest.values)
        specs = {spec.name: spec for spec in manifest.tensors}
        self.tensors: Mapping[str, TensorSpec] = {**specs, **{alias: specs[name] for alias, name in manifest.aliases.items()}}
        self.nbytes = 0
        self.touched = False
        """Whether any tensor may have been written."""

    def read(self, wanted: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill each tensor with the verified bytes of its name; parallel, within a byte budget."""
        plan = plan_restore(self._manifest, [(name, whole(tuple(tensor.shape))) for name, tensor in wanted], fetch_nbytes=FETCH_NBYTES)
        targets = [_Target(tensor) for _, tensor in wanted]
        self.touched = True
        with Transfer(threads=self._threads, budget_nbytes=BUDGET_NBYTES) as transfer:
            transfer.run((fetch.nbytes, self._job(fetch, targets)) for fetch in plan.fetches)
        for _, tensor in wanted:
            # Raw writes bypass torch's version counter; autograd has to notice them all the same.
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        self.nbytes += plan.nbytes

    def _job(self, fetch: Fetch, targets: Sequence[_Target]) -> Callable[[], None]:
        windows = [self._window(piece, targets) for piece in fetch.pieces] if self._source.direct else []

        def straight() -> None:
            for piece, window in zip(fetch.pieces, windows, strict=True):
                if window is not None:
                    shard = self._manifest.shards[piece.shard]
                    for at in range(0, len(window), BLOCK_NBYTES):
                        block = window[at : at + BLOCK_NBYTES]
                        self._source.read_into(shard.object, shard.offset + piece.begin + at, block)
                        self._check(piece, block, at)

        def buffered() -> None:
            view = self._bytes_of(fetch)
            try:
                for piece in fetch.pieces:
                    shard = self._manifest.shards[piece.shard]
                    data = view[piece.at : piece.at + piece.end - piece.begin]
                    for at in range(0, max(len(data), 1), BLOCK_NBYTES):
                        self._check(piece, data[at : at + BLOCK_NBYTES], at)
                    for which in piece.targets:
                        targets[which].place(shard.region, piece.begin, data)
                    data.release()
            finally:
                self._source.release(view)

        return straight if windows and all(window is not None for window in windows) else buffered

    def _bytes_of(self, fetch: Fetch) -> memoryview:
        try:
            return self._source.bytes_of(fetch)
        except (NotFoundError, CorruptionError) as error:
            stored = self._manifest.objects[fetch.object]
            lost = [self._manifest.tensors[shard.tensor].name for shard in self._manifest.shards if shard.object == fetch.object]
            names = ", ".join(repr(name) for name in lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            what = "is missing" if isinstance(error, NotFoundError) else "is damaged"
            message = f"{stored.key!r} of step {self.step} {what}, and with it tensors {names}: {error.message}"
            raise CorruptionError(message, step=self.step, key=stored.key, kind=error.kind, hint=_VERIFY) from error

    def _window(self, piece: Piece, targets: Sequence[_Target]) -> memoryview | None:
        """The memory of the one tensor that takes this large piece just as it is stored; None when it has to go through a buffer."""
        if len(piece.targets) != 1 or piece.end - piece.begin < _DIRECT_NBYTES:
            return None
        return targets[piece.targets[0]].window(self._manifest.shards[piece.shard].region, piece.begin, piece.end)

    def _check(self, piece: Piece, block: memoryview, at: int) -> None:
        shard = self._manifest.shards[piece.shard]
        if digest(block) != shard.digests[(piece.begin + at) // BLOCK_NBYTES]:
            spec, stored = self._manifest.tensors[shard.tensor], self._manifest.objects[shard.object]
            where = f"{stored.key!r} at byte {shard.offset + piece.begin + at}"
            message = f"tensor {spec.name!r} of step {self.step} is corrupt in {where}"
            raise CorruptionError(message, step=self.step, key=stored.key, kind="digest", hint=_VERIFY)


class _Target:
    """A tensor to fill from runs of bytes of its shards."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.whole = whole(tuple(tensor.shape))
        self.raw = self.tensor.device.type == "cpu" and self.tensor.is_contiguous()
        self.pointer = self.tensor.data_ptr()
        self.itemsize = self.tensor.element_size()

    def window(self, region: Region, begin: int, end: int) -> memoryview | None:
        """Bytes ``begin:end`` of the tensor's own memory, if the shard that holds ``region`` is laid out like it."""
        if not self.raw or region != self.whole:
            return None
        return self.tensor.view(-1).view(torch.uint8).numpy().data[begin:end]

    def place(self, region: Region, begin: int, data: memoryview) -> None:
        """Copy ``data``, the bytes from ``begin`` on of the shard that holds ``region``, to where they belong."""
        if not len(data):
            return
        if self.raw and region == self.whole:
            ctypes.memmove(self.pointer + begin, _address(data), len(data))
            return
        flat = torch.frombuffer(data, dtype=torch.uint8).view(self.tensor.dtype)
        with torch.no_grad():
            if region == self.whole and self.tensor.is_contiguous():
                first = begin // self.itemsize
                self.tensor.view(-1)[first : first + flat.numel()].copy_(flat)
                return
            start = begin // self.itemsize
            for box, at in boxes(region.sizes, start, start + flat.numel()):
                source = flat[at - start : at - start + box.numel].view(box.sizes)
                where = tuple(
                    slice(outer + inner, outer + inner + size)
                    for outer, inner, size in zip(region.offsets, box.offsets, box.sizes, strict=True)
                )
                self.tensor[where].copy_(source)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
