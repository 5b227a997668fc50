"""Fill tensors from a manifest's bytes, verified block by block, from memory or from a store."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from everystep.errors import CorruptionError
from everystep.manifest import BLOCK_NBYTES, Manifest, TensorSpec, digest
from everystep.plan import Fetch, Piece, plan_restore
from everystep.region import Region, boxes, whole
from everystep.repository import Repository
from everystep.transfer import Buffers, Transfer

FETCH_NBYTES = 8 << 20
BUDGET_NBYTES = 64 << 20


class Source(Protocol):
    """Where a manifest's bytes are."""

    def bytes_of(self, fetch: Fetch) -> memoryview:
        """The bytes of one fetch; given back with ``release``."""
        ...

    def release(self, view: memoryview) -> None:
        """The bytes are no longer looked at."""
        ...


class MemorySource:
    """A snapshot in the agent's memory, mapped here."""

    def __init__(self, view: memoryview, file_offsets: Sequence[int]) -> None:
        self._view = view
        self._offsets = file_offsets

    def bytes_of(self, fetch: Fetch) -> memoryview:
        """A window into the slab; nothing is copied."""
        begin = self._offsets[fetch.object] + fetch.offset
        if begin < 0 or begin + fetch.nbytes > len(self._view):
            message = f"the snapshot's file {fetch.object} reaches beyond its slab"
            raise CorruptionError(message, kind="bounds", hint="restore an older step from disk")
        return self._view[begin : begin + fetch.nbytes]

    def release(self, view: memoryview) -> None:
        """Nothing to give back."""
        view.release()


class StoreSource:
    """A committed checkpoint's objects, read into reused buffers."""

    def __init__(self, repository: Repository, manifest: Manifest, buffers: Buffers) -> None:
        self._store = repository.store
        self._manifest = manifest
        self._buffers = buffers

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

    def read(self, wanted: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill each tensor with the verified bytes of its name; parallel, within a byte budget."""
        plan = plan_restore(self._manifest, [(name, whole(tuple(tensor.shape))) for name, tensor in wanted], fetch_nbytes=FETCH_NBYTES)
        targets = [_Target(tensor) for _, tensor in wanted]
        with Transfer(threads=self._threads, budget_nbytes=BUDGET_NBYTES) as transfer:
            transfer.run((fetch.nbytes, self._job(fetch, targets)) for fetch in plan.fetches)
        for _, tensor in wanted:
            # Raw writes bypass torch's version counter; autograd has to notice them all the same.
            torch.autograd.graph.increment_version(tensor)
        self.nbytes += plan.nbytes

    def _job(self, fetch: Fetch, targets: Sequence[_Target]) -> Callable[[], None]:
        def run() -> None:
            view = self._source.bytes_of(fetch)
            try:
                for piece in fetch.pieces:
                    self._take(piece, view, targets)
            finally:
                self._source.release(view)

        return run

    def _take(self, piece: Piece, view: memoryview, targets: Sequence[_Target]) -> None:
        shard = self._manifest.shards[piece.shard]
        data = view[piece.at : piece.at + piece.end - piece.begin]
        first = piece.begin // BLOCK_NBYTES
        for number, at in enumerate(range(0, max(len(data), 1), BLOCK_NBYTES)):
            if digest(data[at : at + BLOCK_NBYTES]) != shard.digests[first + number]:
                spec, stored = self._manifest.tensors[shard.tensor], self._manifest.objects[shard.object]
                where = f"{stored.key!r} at byte {shard.offset + piece.begin + at}"
                message = f"tensor {spec.name!r} of step {self.step} is corrupt in {where}"
                hint = "everystep verify RUN shows what is damaged"
                raise CorruptionError(message, step=self.step, key=stored.key, kind="digest", hint=hint)
        for which in piece.targets:
            targets[which].place(shard.region, piece.begin, data)
        data.release()


class _Target:
    """A tensor to fill from runs of bytes of its shards."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.whole = whole(tuple(tensor.shape))
        self.raw = self.tensor.device.type == "cpu" and self.tensor.is_contiguous()
        self.pointer = self.tensor.data_ptr()
        self.itemsize = self.tensor.element_size()

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
