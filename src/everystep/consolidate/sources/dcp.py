"""PyTorch DCP's ``.distcp`` files with their ``.metadata``.

Each tensor's chunk is a zip that ``torch.save`` wrote, somewhere in a file. Where in it the tensor's bytes are, its own records tell: they
are read once, when the source is opened; of the tensor's bytes nothing is read.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from everystep.consolidate.source import Chunk, Found, Opened, SourceTensor
from everystep.consolidate.sources.folders import Files, changed_at, identity_of, names_in, newest_of, own_name, safe, step_in
from everystep.consolidate.sources.modules import module_names
from everystep.errors import CorruptionError, LayoutError
from everystep.foreign.archive import BROKEN, FileView, Record, record_of
from everystep.foreign.dtypes import DTYPES
from everystep.foreign.stored import Stored, StoredChunk, StoredTensor
from everystep.region import Region
from everystep.store import open_store

METADATA = ".metadata"
_RANKED = re.compile(r"__\d{1,9}\.metadata")
_SMALL_NBYTES = 64 << 10
_HEAD_NBYTES = 4096
_HINT = "take another copy or an older checkpoint"


def is_one(names: Sequence[str]) -> bool:
    """Whether a folder with these names in it is DCP's, whole or not."""
    return any(name == METADATA or name.endswith(".distcp") or _RANKED.fullmatch(name) for name in names)


def why_incomplete(folder: str) -> str:
    """Why a folder of DCP's is not complete; "" when it is, as far as its names tell: the metadata is written last."""
    metadata = _metadata(names_in(folder))
    return "" if metadata else f"{METADATA} is not there (yet): it is written last"


def found_at(path: str, *, kind: str = "dcp", folder: str = "", metrics: Mapping[str, float] | None = None) -> Found:
    """The checkpoint at ``path``, whose model is DCP's in ``folder`` (below it)."""
    home = os.path.join(path, folder) if folder else path
    why, name = why_incomplete(home), own_name(path)
    return Found(
        path, kind, step_in(name), not why, why, changed_at(home, _metadata(names_in(home)) or names_in(home)), metrics or {}, safe(name)
    )


def open_dcp(
    path: str, group: str | None, *, kind: str = "dcp", folder: str = "", metrics: Mapping[str, float] | None = None,
    assets: str | None = None, step: int | None = None, unwrap: bool = False,
) -> Opened:  # fmt: skip
    """The module in the ``.distcp`` files of ``folder`` (below ``path``). Errors as in ``open_source``."""
    home = os.path.join(path, folder) if folder else path
    metadata = _metadata(names_in(home))
    if not metadata:
        raise CorruptionError(f"{home!r} has no {METADATA}, which DCP writes last: its save was not finished", key=home, kind="incomplete",
                              hint="take an older checkpoint, or wait")  # fmt: skip
    stored = Stored.open([home])
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items()} | dict.fromkeys(stored.unread, (1,))
    names = module_names(shapes, stored.paths, group, where=home, unwrap=unwrap)
    files = Files(home)
    tensors = _resolved([stored.tensors[name] for name in names if name in stored.tensors], files)
    exported = {own: SourceTensor(own, tensor.dtype, tensor.shape, tensors[name]) for name, own in names.items()
                if (tensor := stored.tensors.get(name)) is not None}  # fmt: skip
    exported |= {names[name]: SourceTensor(names[name], _unread_dtype(why), (), ()) for name, why in stored.unread.items() if name in names}
    ident = [*(file.key for file in files.files), *metadata]
    now = functools.partial(identity_of, home, ident, more=group or "")
    return Opened(
        kind=kind, where=path, key=safe(own_name(path)), step=step_in(own_name(path)) if step is None else step,
        saved_at=changed_at(home, metadata), identity=now(), identity_now=now, store=open_store(home),
        files=files.files, tensors=exported, metrics=metrics or {}, assets=assets,
        lost=[*files.newer(newest_of(home, metadata)), *files.torn()],
    )  # fmt: skip


def _metadata(names: Sequence[str]) -> list[str]:
    return [METADATA] if METADATA in names else [name for name in names if _RANKED.fullmatch(name)]


def _unread_dtype(why: str) -> str:
    found = re.search(r"torch\.(\w+)", why)
    return found[1] if found else "unknown"


def _resolved(tensors: Sequence[StoredTensor], files: Files) -> dict[str, tuple[Chunk, ...]]:
    """Where the tensors' own bytes are. A region that several ranks wrote is taken once, from a file that is there."""
    chosen: dict[str, dict[Region, StoredChunk]] = {}
    for tensor in tensors:
        regions = chosen.setdefault(tensor.name, {})
        for chunk in tensor.chunks:
            if chunk.region not in regions or not _is_there(regions[chunk.region], files):
                regions[chunk.region] = chunk
    jobs: dict[str, list[tuple[StoredTensor, StoredChunk]]] = {}
    for tensor in tensors:
        for chunk in chosen[tensor.name].values():
            if chunk.place is not None and _is_there(chunk, files):
                jobs.setdefault(chunk.path, []).append((tensor, chunk))
    with ThreadPoolExecutor(max_workers=min(16, max(1, len(jobs)))) as pool:
        records = {at: found for found_here in pool.map(_records, jobs.items()) for at, found in found_here.items()}
    return {
        tensor.name: tuple(_chunk(chunk, records.get((tensor.name, chunk.region)), files) for chunk in chosen[tensor.name].values())
        for tensor in tensors
    }


def _is_there(chunk: StoredChunk, files: Files) -> bool:
    return chunk.place is not None and chunk.place.offset + chunk.place.nbytes <= files.nbytes(chunk.place.file)


def _records(job: tuple[str, list[tuple[StoredTensor, StoredChunk]]]) -> dict[tuple[str, Region], Record]:
    path, chunks = job
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptionError(f"cannot read {path!r}: {error.strerror}", key=path, kind="unreadable", hint=_HINT) from None
    try:
        return {(tensor.name, chunk.region): _record(descriptor, tensor, chunk) for tensor, chunk in chunks}
    finally:
        os.close(descriptor)


def _record(descriptor: int, tensor: StoredTensor, chunk: StoredChunk) -> Record:
    if chunk.place is None:
        raise ValueError("a chunk that lies nowhere has no record")
    where = f"region {chunk.region} of {tensor.name!r} in {chunk.path!r} at byte {chunk.place.offset:,}"
    view: io.BufferedIOBase
    raw = FileView(descriptor, chunk.place.offset, chunk.place.nbytes)
    view = io.BytesIO(raw.read(chunk.place.nbytes) or b"") if chunk.place.nbytes <= _SMALL_NBYTES else io.BufferedReader(raw, _HEAD_NBYTES)
    try:
        record = record_of(view, chunk.place.nbytes)
    except (*BROKEN, OSError) as error:
        raise CorruptionError(f"{where} is corrupt: it is no archive of torch.save ({error!s:.200}); it is damaged, or another save's",
                              key=tensor.name, kind="corrupt", hint=_HINT) from None  # fmt: skip
    if record is None:
        raise LayoutError(f"{where} is compressed, a subclass of Tensor, or not in this machine's byte order: only torch can read it",
                          key=tensor.name, kind="archive", hint="load it with torch and save plain tensors")  # fmt: skip
    if (record.dtype, record.shape) != (DTYPES[tensor.dtype], chunk.region.sizes):
        raise CorruptionError(
            f"{where} is corrupt: the file holds {record.dtype} {list(record.shape)} there, the metadata says {DTYPES[tensor.dtype]} "
            f"{list(chunk.region.sizes)}; they are of two saves", key=tensor.name, kind="corrupt", hint=_HINT,
        )  # fmt: skip
    return record


def _chunk(chunk: StoredChunk, record: Record | None, files: Files) -> Chunk:
    """``record`` is None for what is not there; ``check_cover`` says so."""
    if chunk.place is None:
        return Chunk(chunk.region, -1, 0, 0)
    file = files.number(chunk.place.file)
    if record is None:
        return Chunk(chunk.region, file, chunk.place.offset, chunk.place.nbytes)
    itemsize = record.dtype.itemsize
    begin = chunk.place.offset + record.offset
    if record.is_row_major():
        return Chunk(chunk.region, file, begin, record.nbytes, crc=record.crc or None)
    begin += record.first * itemsize
    if not chunk.region.numel:
        return Chunk(chunk.region, file, begin, 0)
    last = sum((size - 1) * stride for size, stride in zip(record.shape, record.strides, strict=True))
    strides = None if _is_dense(record) else record.strides
    return Chunk(chunk.region, file, begin, (last + 1) * itemsize, strides=strides)


def _is_dense(record: Record) -> bool:
    """Whether the items lie row by row, as a part of a larger storage."""
    return record._replace(first=0, nbytes=Region((0,) * len(record.shape), record.shape).numel * record.dtype.itemsize).is_row_major()
