"""What a checkpoint holds and where: tensors, shards, parts, manifests, and their JSON with a digest over it.

Every record on a store is one JSON object ``{"format": 1, "kind": "manifest", "digest": "<xxh3-128 hex>", "body": {...}}`` without
blanks. The digest is over ``"<format> <kind> "`` and the body's bytes, and what surrounds the body is compared byte by byte, so that one
flipped bit anywhere is found. Equal records are equal bytes: fields are written in a fixed order, lists and maps sorted by ``merge``.

Each rank has a document of its own: the structure and plain values of its state. A record holds the lowest rank's whole, and of the
others the top-level entries that differ (``join_documents``, ``document_of_rank``): usually none, or random states and data loaders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias, TypeVar

import msgspec
import xxhash

from everystep.errors import ConfigError, CorruptionError, LayoutError
from everystep.region import Region, missing, overlap, whole
from everystep.safetensors import DTYPES

FORMAT = 1
BLOCK_NBYTES = 4 << 20
"""A shard has one digest for each block of at most this many bytes, counted from its start."""

DIGEST_LEN = 32


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A whole tensor: full name (``group.inner``), safetensors dtype word (``"F32"``), shape, group (top-level entry of the state)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: str


class StoredObject(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A data file: key below the run, exact size, and its header's size (data start) and digest."""

    key: str
    nbytes: int
    header_nbytes: int
    header_digest: str


class Shard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Region of tensor ``tensors[tensor]``, stored at ``offset`` (from the file's start) of ``objects[object]``."""

    tensor: int
    region: Region
    object: int
    offset: int
    nbytes: int
    digests: tuple[str, ...]
    block: int = 0
    """Bytes of a digest block where they are not ``BLOCK_NBYTES``: so that blocks end where the ranks' shares do."""

    @property
    def block_nbytes(self) -> int:
        """How many bytes each digest is for; the last one may be for fewer."""
        return self.block or BLOCK_NBYTES

    def blocks(self) -> Iterator[tuple[int, int, str]]:
        """(begin in the shard, length, digest) of each block."""
        size = self.block or BLOCK_NBYTES
        for number, word in enumerate(self.digests):
            yield number * size, min(size, self.nbytes - number * size), word


ALONE = (0,)


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node's share of a manifest."""

    step: int
    attempt: int
    node: int
    """0 <= node < nodes."""
    nodes: int
    saved_at: float
    """Wall time of the seal, seconds since the epoch."""
    tensors: tuple[TensorSpec, ...]
    objects: tuple[StoredObject, ...]
    shards: tuple[Shard, ...]
    aliases: dict[str, str]
    """Tied name -> the name it is stored under."""
    values: msgspec.Raw
    """The state's structure and plain values as typed JSON (``values.py``), tensors as references by name: of the lowest of ``ranks``."""
    metrics: dict[str, float] = {}
    nonfinite: dict[str, str] = {}
    """Only in the encoded record: metrics that JSON has no number for, as words; ``decode`` puts them back into ``metrics``."""
    world: int = 1
    """How many ranks saved, on all nodes."""
    ranks: tuple[int, ...] = ALONE
    """This node's ranks, rising."""
    shared: bool = True
    """Whether all nodes write into one store; False: each node's store holds its own files only."""
    by_rank: dict[int, msgspec.Raw] = {}
    """Where a rank's document differs from ``values``: ``[[key, child], ...]``, top-level entries; ``[key, null]``: it lacks the entry."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A committed checkpoint: the parts merged. Same fields as a part, without the node; ``values`` is rank 0's document."""

    step: int
    attempt: int
    nodes: int
    saved_at: float
    tensors: tuple[TensorSpec, ...]
    objects: tuple[StoredObject, ...]
    shards: tuple[Shard, ...]
    aliases: dict[str, str]
    values: msgspec.Raw
    metrics: dict[str, float] = {}
    nonfinite: dict[str, str] = {}
    """Only in the encoded record, as in ``Part``."""
    world: int = 1
    shared: bool = True
    by_rank: dict[int, msgspec.Raw] = {}
    reduced: int = 0
    """How often the checkpoint was reduced: the third number of its key. 0: it holds all that was saved."""
    dropped: tuple[str, ...] = ()
    """Groups that are no longer in it, sorted; their files, as far as nothing else needs them, are gone."""


Record = TypeVar("Record")


def digest(data: bytes | bytearray | memoryview) -> str:
    """XXH3-128 of ``data`` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_count(nbytes: int, block: int = 0) -> int:
    """How many digests a shard of ``nbytes`` has: one for each begun block (``Shard.block``), at least one."""
    return max(1, -(-nbytes // (block or BLOCK_NBYTES)))


def block_digests(data: memoryview, block: int = 0) -> tuple[str, ...]:
    """Digest of each block (``Shard.block``) of a shard (one digest, also for an empty shard, up to one block)."""
    size = block or BLOCK_NBYTES
    if data.nbytes <= size:
        return (digest(data),)
    flat = data.cast("B") if data.format != "B" or data.ndim != 1 else data
    return tuple(digest(flat[at : at + size]) for at in range(0, flat.nbytes, size))


# -- records ------------------------------------------------------------------------------------------------------------


def split_metrics(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Metrics that JSON has numbers for, and words for the rest (``nan``, ``inf``, ``-inf``); both sorted by name."""
    finite = {}
    words = {}
    for name, value in sorted(metrics.items()):
        if math.isfinite(value):
            finite[name] = float(value)
        else:
            words[name] = str(float(value))
    return finite, words


def join_metrics(finite: Mapping[str, float], words: Mapping[str, str]) -> dict[str, float]:
    """Undo ``split_metrics``. CorruptionError for an unknown word."""
    joined = dict(finite)
    for name, word in words.items():
        if word not in ("nan", "inf", "-inf") or name in joined:
            raise CorruptionError(f"metric {name!r} is {word!r:.40}, which is no number", key=name, kind="record")
        joined[name] = float(word)
    return dict(sorted(joined.items()))


def _frame(kind: str) -> tuple[bytes, bytes]:
    """What stands before the digest and between it and the body."""
    return b'{"format":%d,"kind":"%s","digest":"' % (FORMAT, kind.encode("ascii")), b'","body":'


def _digest_body(kind: str, body: memoryview) -> bytes:
    state = xxhash.xxh3_128(b"%d %s " % (FORMAT, kind.encode("ascii")))
    state.update(body)
    return state.hexdigest().encode("ascii")


def encode(kind: str, body: object) -> bytes:
    """The record's bytes. ``kind`` is a word such as ``"manifest"``; ``body`` a Struct or plain JSON value.

    Plain bodies must not hold NaN or infinities, for which JSON has no number (they would become null): see ``split_metrics``.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", kind):
        raise ValueError(f"{kind!r} is no word for a kind of record")
    if isinstance(body, Part | Manifest):
        finite, words = split_metrics(body.metrics)
        body = msgspec.structs.replace(body, metrics=finite, nonfinite=words)
        if isinstance(body, Part) and body.ranks == ALONE:
            body = msgspec.structs.replace(body, ranks=ALONE)  # this very object is left out of the record
    before, between = _frame(kind)
    record = bytearray(before + b"0" * DIGEST_LEN + between)
    start = len(record)
    # Straight behind its frame: a large manifest is not copied to be wrapped.
    _ENCODER.encode_into(body, record, start)
    with memoryview(record) as view:
        found = _digest_body(kind, view[start:])
    record[len(before) : len(before) + DIGEST_LEN] = found
    record += b"}"
    return bytes(record)


_ENCODER = msgspec.json.Encoder()
_FORMAT_OF = re.compile(rb'\s*\{\s*"format"\s*:\s*([0-9]{1,9})\s*[,}]')
_KIND_OF = re.compile(rb'\{"format":%d,"kind":"([a-z0-9-]{1,40})","digest":"' % FORMAT)


def decode(kind: str, data: bytes | memoryview, into: type[Record], *, key: str) -> Record:
    """The record in ``data``.

    Raises:
        CorruptionError: Not such a record, or the digest differs (names ``key``).
        ConfigError: Written by a newer format than ``FORMAT``: says to upgrade.
    """
    before, between = _frame(kind)
    start = len(before) + DIGEST_LEN + len(between)
    view = memoryview(data)
    if view[: len(before)] != before:
        raise _foreign(kind, bytes(view[:200]), key=key)
    if len(view) <= start or view[len(before) + DIGEST_LEN : start] != between or bytes(view[-1:]) != b"}":
        raise _corrupt_record(key, f"it is cut off or not a {kind}")
    body = view[start:-1]
    if view[len(before) : len(before) + DIGEST_LEN] != _digest_body(kind, body):
        raise _corrupt_record(key, "its bytes do not match its digest")
    try:
        record = msgspec.json.decode(body, type=into)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors; UnicodeDecodeError is one
        raise _corrupt_record(key, f"a {kind} it is not: {error}") from None
    if isinstance(record, Part | Manifest):
        # ``Raw`` would keep all of ``data`` alive.
        metrics = join_metrics(record.metrics, record.nonfinite)
        by_rank = {rank: entries.copy() for rank, entries in record.by_rank.items()}
        record = msgspec.structs.replace(record, values=record.values.copy(), by_rank=by_rank, metrics=metrics, nonfinite={})
    return record


def _foreign(kind: str, first_bytes: bytes, *, key: str) -> CorruptionError | ConfigError:
    """Why a record does not begin as one of this format and kind does."""
    told = _FORMAT_OF.match(first_bytes)
    if told and int(told[1]) > FORMAT:
        return ConfigError(
            f"{key!r} is written in format {int(told[1])}, this version reads up to {FORMAT}",
            key=key,
            kind="format",
            hint="upgrade: pip install -U everystep",
        )
    other = _KIND_OF.match(first_bytes)
    return _corrupt_record(key, f"it is a {other[1].decode()}, not a {kind}" if other else f"it does not begin as a {kind} does")


def _corrupt_record(key: str, why: str) -> CorruptionError:
    return CorruptionError(f"{key!r} cannot be trusted: {why}", key=key, kind="record", hint="take another copy or an older step")


# -- the documents of many ranks ----------------------------------------------------------------------------------------

_Entries: TypeAlias = dict[bytes, bytes]
"""A document's top-level entries as they stand: key -> child."""

_NULL = b"null"


class _Branch(msgspec.Struct, gc=False):
    dict: list[tuple[msgspec.Raw, msgspec.Raw]]


class _Document(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    state: _Branch


_DOCUMENT = msgspec.json.Decoder(_Document)
_PAIRS = msgspec.json.Decoder(list[tuple[msgspec.Raw, msgspec.Raw]])


def join_documents(documents: Mapping[int, bytes]) -> tuple[bytes, dict[int, msgspec.Raw]]:
    """The lowest rank's document, and by rank where the others differ from it: ``values`` and ``by_rank`` of a record.

    Raises:
        CorruptionError: Documents differ that are not ``{"state":{"dict":[[key,child],...]}}``.
        ValueError: There are no documents.
    """
    if not documents:
        raise ValueError("no documents to join")
    base = min(documents)
    values = bytes(documents[base])
    parsed: _Entries | None = None
    same: dict[bytes, msgspec.Raw | None] = {values: None}  # many ranks, few documents
    by_rank = {}
    for rank in sorted(documents):
        document = bytes(documents[rank])
        if document not in same:
            if parsed is None:
                parsed = _entries(values, base)
            same[document] = _told(parsed, _entries(document, rank))
        differing = same[document]
        if differing is not None:
            by_rank[rank] = differing
    return values, by_rank


def document_of_rank(record: Part | Manifest, rank: int) -> bytes:
    """The complete document of a rank; one beyond the saved world gets that of ``rank % world``. Entries stand in the order of ``values``.

    Raises:
        LayoutError: The rank is negative, or a part is of a node that does not have it.
        CorruptionError: What the record tells of the rank cannot be read.
    """
    known = rank % record.world
    if rank < 0 or (isinstance(record, Part) and known not in record.ranks):
        where = f"node {record.node} has the ranks {record.ranks!r:.80}" if isinstance(record, Part) else f"the world is {record.world}"
        raise LayoutError(f"step {record.step} has no plain values of rank {rank}: {where}", step=record.step, rank=rank, kind="rank")
    differing = record.by_rank.get(known)
    if differing is None:
        return bytes(record.values)
    entries = _altered(_entries(record.values, known), _pairs(differing, known))
    return b'{"state":{"dict":[%b]}}' % b",".join(b"[%b,%b]" % pair for pair in entries.items())


def document_entries(record: Part | Manifest) -> dict[int, dict[bytes, bytes]]:
    """Top-level entries as they stand, key to child: by -1 those of ``values``, by rank what ``by_rank`` tells (``null``: it has none).

    Raises:
        CorruptionError: They cannot be read.
    """
    found = {-1: _entries(record.values, 0)}
    return found | {rank: _pairs(differing, rank) for rank, differing in record.by_rank.items()}


def _entries(document: bytes | msgspec.Raw, rank: int) -> _Entries:
    try:
        pairs = _DOCUMENT.decode(document).state.dict
    except (ValueError, RecursionError) as error:
        raise _no_document(rank, f"they are no mapping of names to objects: {error}") from None
    entries = {bytes(key): bytes(child) for key, child in pairs}
    if len(entries) != len(pairs) or _NULL in entries.values():
        raise _no_document(rank, "they name an entry twice, or one without anything")
    return entries


def _pairs(differing: msgspec.Raw, rank: int) -> _Entries:
    try:
        pairs = _PAIRS.decode(differing)
    except (ValueError, RecursionError) as error:
        raise _no_document(rank, f"they are no list of pairs: {error}") from None
    return {bytes(key): bytes(child) for key, child in pairs}


def _altered(base: _Entries, differing: _Entries) -> _Entries:
    return {key: child for key, child in {**base, **differing}.items() if child != _NULL}


def _told(base: _Entries, entries: _Entries) -> msgspec.Raw | None:
    """Where ``entries`` differ from ``base``, in the order of ``base``, then what only they have, by key; None where they do not."""
    pairs = [(key, entries.get(key, _NULL)) for key, child in base.items() if entries.get(key, _NULL) != child]
    pairs += sorted((key, child) for key, child in entries.items() if key not in base)
    return msgspec.Raw(b"[%b]" % b",".join(b"[%b,%b]" % pair for pair in pairs)) if pairs else None


def _no_document(rank: int, why: str) -> CorruptionError:
    return CorruptionError(
        f"the plain values of rank {rank} cannot be used: {why}"[:500], rank=rank, kind="values", hint="take an older step"
    )


def _join_values(parts: list[Part]) -> tuple[msgspec.Raw, dict[int, msgspec.Raw]]:
    """The manifest's ``values`` and ``by_rank`` from those of the parts: as ``join_documents``, without making every rank's document."""
    first = min(parts, key=lambda part: part.ranks)
    values = bytes(first.values)
    base: _Entries | None = None
    by_rank = dict(first.by_rank)
    for part in parts:
        if part is first:
            continue
        if bytes(part.values) == values:
            by_rank.update(part.by_rank)
            continue
        if base is None:
            base = _entries(values, first.ranks[0])
        own = _entries(part.values, part.ranks[0])
        alike = _told(base, own)
        for rank in part.ranks:
            differing = part.by_rank.get(rank)
            found = alike if differing is None else _told(base, _altered(own, _pairs(differing, rank)))
            if found is not None:
                by_rank[rank] = found
    return first.values, dict(sorted(by_rank.items()))


# -- merging and checking -----------------------------------------------------------------------------------------------


def merge(parts: list[Part]) -> Manifest:
    """The manifest of one step from all nodes' parts, whatever their order; equal parts give equal bytes.

    Where several nodes stored the same region with the same digests, one copy is taken. Plain values may differ: each rank keeps its own.

    Raises:
        CorruptionError: Parts of different steps, attempts or worlds, a node or rank missing or twice, specs that contradict each other,
            regions missing or overlapping (named).
    """
    ordered = _complete(parts)
    first = ordered[0]
    specs: dict[str, TensorSpec] = {}
    objects: dict[str, StoredObject] = {}
    aliases: dict[str, str] = {}
    metrics: dict[str, float] = {}
    for part in ordered:
        _unite(specs, ((spec.name, spec) for spec in part.tensors), part, "tensor")
        _unite(objects, ((stored.key, stored) for stored in part.objects), part, "file")
        _unite(aliases, part.aliases.items(), part, "alias")
        metrics = {**part.metrics, **metrics}
    values, by_rank = _join_values(ordered)
    names = sorted(specs)
    keys = sorted(objects)
    tensor_of = {name: index for index, name in enumerate(names)}
    object_of = {key: index for index, key in enumerate(keys)}
    shards = []
    for part in ordered:
        to_tensor = [tensor_of[spec.name] for spec in part.tensors]
        to_object = [object_of[stored.key] for stored in part.objects]
        for shard in part.shards:
            if not (0 <= shard.tensor < len(to_tensor) and 0 <= shard.object < len(to_object)):
                raise _contradiction(part, f"node {part.node} has a shard of a tensor or file that it does not list")
            shards.append(msgspec.structs.replace(shard, tensor=to_tensor[shard.tensor], object=to_object[shard.object]))
    shards.sort(key=_shard_order)
    manifest = Manifest(
        step=first.step, attempt=first.attempt, nodes=first.nodes, saved_at=max(part.saved_at for part in ordered),
        tensors=tuple(specs[name] for name in names), objects=tuple(objects[key] for key in keys), shards=tuple(_one_copy(shards)),
        aliases=dict(sorted(aliases.items())), values=values, metrics=dict(sorted(metrics.items())), world=first.world, shared=first.shared,
        by_rank=by_rank,
    )  # fmt: skip
    check(manifest)
    return manifest


def _shard_order(shard: Shard) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int]:
    return shard.tensor, shard.region.offsets, shard.region.sizes, shard.object, shard.offset


def _complete(parts: list[Part]) -> list[Part]:
    """The parts by node, when they are one step's and all there."""
    if not parts:
        raise CorruptionError("no parts: nothing was saved", kind="parts")
    ordered = sorted(parts, key=lambda part: part.node)
    first = ordered[0]
    for part in ordered:
        if (part.step, part.attempt, part.nodes) != (first.step, first.attempt, first.nodes):
            raise _contradiction(
                first,
                f"nodes {first.node} and {part.node} have parts of different saves: step {first.step} attempt {first.attempt} "
                f"of {first.nodes} nodes, and step {part.step} attempt {part.attempt} of {part.nodes}",
            )
    nodes = [part.node for part in ordered]
    if nodes != list(range(first.nodes)):
        absent = sorted(set(range(first.nodes)) - set(nodes))
        why = f"parts of nodes {absent!r:.80} are missing" if absent else f"parts of nodes {nodes!r:.80} are not one each of {first.nodes}"
        raise _contradiction(first, why)
    _check_ranks(ordered)
    return ordered


def _check_ranks(parts: list[Part]) -> None:
    """The nodes' ranks are together those of one world."""
    first = parts[0]
    node_of: dict[int, int] = {}
    for part in parts:
        if (part.world, part.shared) != (first.world, first.shared):
            stores = {True: "one store for all", False: "a store for each node"}
            raise _contradiction(
                first,
                f"nodes {first.node} and {part.node} disagree: {first.world} ranks and {stores[first.shared]}, "
                f"{part.world} ranks and {stores[part.shared]}",
            )
        if not part.ranks or list(part.ranks) != sorted(set(part.ranks)):
            raise _contradiction(part, f"the ranks of node {part.node} are {part.ranks!r:.80}: none, or not rising")
        for rank in part.ranks:
            if node_of.setdefault(rank, part.node) != part.node:
                raise _contradiction(part, f"rank {rank} is on nodes {node_of[rank]} and {part.node}")
        strangers = sorted(set(part.by_rank) - set(part.ranks))
        if strangers:
            raise _contradiction(part, f"node {part.node} tells of ranks {strangers!r:.80}, which are not its own")
    if node_of.keys() != set(range(first.world)):
        absent = sorted(set(range(first.world)) - node_of.keys())
        why = f"ranks {absent!r:.80} are on no node" if absent else f"rank {max(node_of)} is beyond the world of {first.world}"
        raise _contradiction(first, why)


_Value = TypeVar("_Value")


def _unite(into: dict[str, _Value], pairs: Iterable[tuple[str, _Value]], part: Part, what: str) -> None:
    for name, value in pairs:
        known = into.setdefault(name, value)
        if known is not value and known != value:
            raise _contradiction(
                part, f"node {part.node} has another {what} {name!r} than the nodes before it: {value!r:.200} and {known!r:.200}", key=name
            )


def _one_copy(shards: list[Shard]) -> list[Shard]:
    """Sorted shards without the further copies of the same region with the same digests. Others stay, for ``check`` to find."""
    kept: list[Shard] = []
    for shard in shards:
        if kept:
            last = kept[-1]
            if last.tensor == shard.tensor and last.region == shard.region and (last.block, last.digests) == (shard.block, shard.digests):
                continue
        kept.append(shard)
    return kept


def _contradiction(part: Part, why: str, *, key: str | None = None) -> CorruptionError:
    return CorruptionError(
        f"the parts of step {part.step} do not make a checkpoint: {why}", step=part.step, key=key, kind="parts", hint="take an older step"
    )


def check(manifest: Manifest) -> None:
    """Raise CorruptionError unless every tensor is fully covered without overlap, indices and byte ranges are in bounds, sizes match
    dtypes, and the number of digests is right. Messages name the tensor and the missing regions."""
    if manifest.step < 0 or manifest.attempt < 0 or manifest.nodes < 1 or not math.isfinite(manifest.saved_at):
        raise _unsound(manifest, f"attempt {manifest.attempt}, {manifest.nodes} nodes or time {manifest.saved_at} cannot be")
    if manifest.world < manifest.nodes or not all(0 < rank < manifest.world for rank in manifest.by_rank):
        raise _unsound(
            manifest, f"{manifest.world} ranks on {manifest.nodes} nodes, with values of {sorted(manifest.by_rank)!r:.80}, cannot be"
        )
    if manifest.reduced < 0 or bool(manifest.reduced) != bool(manifest.dropped):
        raise _unsound(manifest, f"reduction {manifest.reduced} without {manifest.dropped!r:.80} cannot be")
    _check_objects(manifest)
    names = _check_tensors(manifest)
    for alias, name in manifest.aliases.items():
        if name not in names or alias in names or not alias:
            raise _unsound(manifest, f"{alias!r} cannot be an alias of {name!r}", key=alias)
    _check_cover(manifest, _check_shards(manifest))


def _check_objects(manifest: Manifest) -> None:
    keys = set()
    for stored in manifest.objects:
        steps = stored.key.split("/")
        if "\\" in stored.key or "\0" in stored.key or any(step in ("", ".", "..") for step in steps):
            raise _unsound(manifest, f"file key {stored.key!r:.200} leads out of the run", key=stored.key)
        if stored.key in keys:
            raise _unsound(manifest, f"file {stored.key!r} is listed twice", key=stored.key)
        keys.add(stored.key)
        if not 0 <= stored.header_nbytes <= stored.nbytes or len(stored.header_digest) != DIGEST_LEN:
            raise _unsound(
                manifest, f"file {stored.key!r} of {stored.nbytes} bytes cannot have a header of {stored.header_nbytes}", key=stored.key
            )


def _check_tensors(manifest: Manifest) -> set[str]:
    names: set[str] = set()
    for spec in manifest.tensors:
        if spec.dtype not in DTYPES:
            raise _unsound(manifest, f"tensor {spec.name!r} has the unknown dtype {spec.dtype!r:.40}", key=spec.name)
        if spec.shape and min(spec.shape) < 0:
            raise _unsound(manifest, f"tensor {spec.name!r} cannot have the shape {spec.shape!r:.100}", key=spec.name)
        names.add(spec.name)
    if len(names) != len(manifest.tensors) or "" in names:
        seen: set[str] = set()
        twice = next((spec.name for spec in manifest.tensors if spec.name in seen or seen.add(spec.name)), "")  # type: ignore[func-returns-value]
        raise _unsound(manifest, f"tensor {twice!r} is listed twice or has no name", key=twice)
    return names


def _check_shards(manifest: Manifest) -> list[Region | list[Region] | None]:
    """Check each shard by itself; returns each tensor's regions (a single one without its list: there may be a million)."""
    tensors, objects = manifest.tensors, manifest.objects
    regions: list[Region | list[Region] | None] = [None] * len(tensors)
    for shard in manifest.shards:
        if not (0 <= shard.tensor < len(tensors) and 0 <= shard.object < len(objects)):
            raise _unsound(
                manifest, f"a shard belongs to tensor {shard.tensor} of {len(tensors)} and file {shard.object} of {len(objects)}"
            )
        spec, stored, region = tensors[shard.tensor], objects[shard.object], shard.region
        if not region.fits(spec.shape):
            raise _unsound(manifest, f"a shard of {spec.name!r} is region {region}, out of the shape {spec.shape!r}", key=spec.name)
        if shard.nbytes != region.numel * DTYPES[spec.dtype]:
            raise _unsound(
                manifest, f"{shard.nbytes} bytes are not the size of region {region} of {spec.name!r} ({spec.dtype})", key=spec.name
            )
        if shard.offset < stored.header_nbytes or shard.offset + shard.nbytes > stored.nbytes:
            raise _unsound(
                manifest,
                f"bytes {shard.offset}:{shard.offset + shard.nbytes} of {spec.name!r} are not in the data "
                f"of {stored.key!r} ({stored.header_nbytes}:{stored.nbytes})",
                key=spec.name,
            )
        if shard.block and (not 0 < shard.block <= BLOCK_NBYTES or shard.block % DTYPES[spec.dtype]):
            raise _unsound(manifest, f"region {region} of {spec.name!r} has digest blocks of {shard.block} bytes", key=spec.name)
        if len(shard.digests) != digest_count(shard.nbytes, shard.block) or any(len(word) != DIGEST_LEN for word in shard.digests):
            raise _unsound(
                manifest, f"region {region} of {spec.name!r} has {len(shard.digests)} digests for {shard.nbytes} bytes", key=spec.name
            )
        known = regions[shard.tensor]
        if known is None:
            regions[shard.tensor] = region
        elif isinstance(known, list):
            known.append(region)
        else:
            regions[shard.tensor] = [known, region]
    return regions


def _check_cover(manifest: Manifest, regions: list[Region | list[Region] | None]) -> None:
    for spec, found in zip(manifest.tensors, regions, strict=True):
        if isinstance(found, Region):
            if found.sizes == spec.shape:
                continue
            several = [found]
        else:
            several = found or []
        pair = overlap(several)
        if pair:
            raise _unsound(manifest, f"regions {pair[0]} and {pair[1]} of {spec.name!r} overlap", key=spec.name)
        everything = whole(spec.shape)
        # Without overlaps the count of elements decides. A tensor without elements needs a shard as well: that says it was saved.
        if not several or sum(region.numel for region in several) != everything.numel:
            gaps = missing(spec.shape, several) or [everything]
            named = ", ".join(map(str, gaps[:5])) + (f" and {len(gaps) - 5} more" if len(gaps) > 5 else "")
            raise _unsound(manifest, f"tensor {spec.name!r} of shape {spec.shape!r} lacks {named}", key=spec.name)


def _unsound(manifest: Manifest, why: str, *, key: str | None = None) -> CorruptionError:
    return CorruptionError(
        f"the manifest of step {manifest.step} is not sound: {why}", step=manifest.step, key=key, kind="manifest", hint="take an older step"
    )
