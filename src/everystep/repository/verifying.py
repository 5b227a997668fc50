"""Reading a checkpoint back and comparing every digest."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Generator, Iterator, Sequence

import msgspec

from everystep.errors import CheckpointError, CorruptionError, NotFoundError, TransientStoreError
from everystep.manifest import Manifest, Part, Shard, decode, digest, document_of_rank, encode, merge
from everystep.repository.records import UNREADABLE
from everystep.store import Store
from everystep.transfer import Buffers, Transfer

_READ_NBYTES = 8 << 20

Verdict = tuple[str, int, str]
"""(object key, nbytes found, "" or what is wrong)."""


def verify_parts(store: Store, names: Sequence[str], manifest_bytes: bytes) -> Iterator[Verdict]:
    """Read the parts, one name a node; together they must make exactly the manifest."""
    parts, sizes = [], {}
    for name in names:
        try:
            data = store.get(name)
            sizes[name] = len(data)
            parts.append(decode("part", data, Part, key=name))
        except NotFoundError:
            yield name, 0, "it is missing"
        except (*UNREADABLE, TransientStoreError) as error:
            yield name, sizes.pop(name, 0), error.message
    wrong = ""
    if len(parts) == len(names):
        try:
            wrong = "" if encode("manifest", merge(parts)) == manifest_bytes else "it does not agree with the manifest"
        except CorruptionError as error:
            wrong = error.message
    for name, nbytes in sizes.items():
        yield name, nbytes, wrong


def verify_own_parts(store: Store, names: Sequence[str], manifest: Manifest, folder: str) -> Generator[Verdict, None, set[str]]:
    """Read the parts of the nodes whose store this is; each must say what the manifest says. Returns the keys of their data files."""
    if not names:
        yield folder, 0, "no node's part is here"
    objects: set[str] = set()
    for name in names:
        nbytes = 0
        try:
            data = store.get(name)
            nbytes = len(data)
            part = decode("part", data, Part, key=name)
        except NotFoundError:
            yield name, 0, "it is missing"
        except (*UNREADABLE, TransientStoreError) as error:
            yield name, nbytes, error.message
        else:
            objects |= {stored.key for stored in part.objects}
            try:
                wrong = "" if _agrees(part, manifest) else "it does not agree with the manifest"
            except (CheckpointError, IndexError) as error:
                wrong = f"it does not agree with the manifest: {error}"
            yield name, nbytes, wrong
    return objects & {stored.key for stored in manifest.objects}


def _agrees(part: Part, manifest: Manifest) -> bool:
    """Whether the manifest can have been merged from this part and others."""
    told = [(record.step, record.attempt, record.nodes, record.world, record.shared) for record in (part, manifest)]
    if told[0] != told[1] or not {*part.tensors} <= {*manifest.tensors} or not {*part.objects} <= {*manifest.objects}:
        return False
    if not part.aliases.items() <= manifest.aliases.items() or not part.metrics.items() <= manifest.metrics.items():
        return False
    # Of a region that several nodes stored the manifest has one copy.
    known = {(manifest.tensors[shard.tensor].name, shard.region, shard.block, shard.digests) for shard in manifest.shards}
    if any((part.tensors[shard.tensor].name, shard.region, shard.block, shard.digests) not in known for shard in part.shards):
        return False
    return all(_document(part, rank) == _document(manifest, rank) for rank in part.ranks)


def _document(record: Part | Manifest, rank: int) -> object:
    return msgspec.json.decode(document_of_rank(record, rank))


def verify_objects(store: Store, manifest: Manifest, *, threads: int, only: Container[str] | None = None) -> Iterator[Verdict]:
    """Read every data file (or ``only`` these): its size, its header, each block of each shard."""
    shards: dict[int, list[Shard]] = {}
    for shard in manifest.shards:
        shards.setdefault(shard.object, []).append(shard)
    with Transfer(threads=threads) as transfer, Buffers(_READ_NBYTES) as buffers:
        for number, stored in enumerate(manifest.objects):
            if only is not None and stored.key not in only:
                continue
            found = 0
            try:
                found = store.size(stored.key)
                wrong = _wrong_size(found, stored.nbytes)
                wrong = wrong or _wrong_bytes(store, manifest, number, shards.get(number, []), transfer, buffers)
            except NotFoundError:
                wrong = "it is missing"
            except (CorruptionError, TransientStoreError) as error:
                wrong = error.message
            yield stored.key, found, wrong


def _wrong_size(found: int, expected: int) -> str:
    if found > expected:
        return f"{found - expected} unexpected bytes at its end"
    return f"{expected - found} of {expected} bytes are missing at its end" if found < expected else ""


def _wrong_bytes(
    store: Store, manifest: Manifest, number: int, shards: Sequence[Shard], transfer: Transfer, buffers: Buffers
) -> str:
    """What is wrong with a data file of the right size: the first of its header and blocks, in the file's order."""
    stored = manifest.objects[number]
    pieces = [(0, stored.header_nbytes, stored.header_digest, "its header")]
    for shard in shards:
        what = f"tensor {manifest.tensors[shard.tensor].name!r}"
        pieces += [(shard.offset + begin, nbytes, expected, what) for begin, nbytes, expected in shard.blocks()]
    pieces.sort(key=lambda piece: piece[:2])

    def job(run: Sequence[tuple[int, int, str, str]]) -> str:
        begin, end = run[0][0], max(offset + nbytes for offset, nbytes, _, _ in run)
        view = buffers.read(store, stored.key, begin, end - begin)
        try:
            for offset, nbytes, expected, what in run:
                with view[offset - begin : offset - begin + nbytes] as block:
                    if digest(block) != expected:
                        return f"{what} has wrong bytes in {offset}:{offset + nbytes}"
        finally:
            buffers.give_back(view)
        return ""

    jobs = ((run[-1][0] + run[-1][1] - run[0][0], functools.partial(job, run)) for run in _runs(pieces))
    with contextlib.closing(transfer.results(jobs)) as results:
        return next((wrong for wrong in results if wrong), "")


def _runs(pieces: Sequence[tuple[int, int, str, str]]) -> Iterator[Sequence[tuple[int, int, str, str]]]:
    """Neighbouring pieces (sorted by offset) joined into reads of about ``_READ_NBYTES``."""
    run: list[tuple[int, int, str, str]] = []
    for piece in pieces:
        if run and piece[0] + piece[1] - run[0][0] > _READ_NBYTES:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
