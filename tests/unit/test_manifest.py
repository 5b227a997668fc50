"""Records and their digests, merging of parts, coverage."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
import xxhash

from everystep.errors import ConfigError, CorruptionError, LayoutError
from everystep.manifest import (
    BLOCK_NBYTES,
    Manifest,
    Part,
    Shard,
    StoredObject,
    TensorSpec,
    block_digests,
    check,
    decode,
    digest,
    document_of_rank,
    encode,
    join_documents,
    join_metrics,
    merge,
    split_metrics,
)
from everystep.region import Region, whole

D = "0123456789abcdef" * 2


def part(node=0, nodes=1, *, rows=(0, 4), digests=(D,), **changes):
    """One node's share of "m.w" (4 x 2 float32): some of its rows; and of "m.b", which the first node has."""
    begin, end = rows
    tensors = [TensorSpec("m.w", "F32", (4, 2), "m")]
    shards = [Shard(0, Region((begin, 0), (end - begin, 2)), 0, 4096, 8 * (end - begin), digests)]
    nbytes = 4096 + 8 * (end - begin)
    if node == 0:
        tensors.insert(0, TensorSpec("m.b", "U8", (), "m"))
        shards = [msgspec.structs.replace(shards[0], tensor=1), Shard(0, whole(()), 0, nbytes, 1, (D,))]
        nbytes += 1
    made = {
        "step": 7, "attempt": 2, "node": node, "nodes": nodes, "saved_at": 100.0 + node, "tensors": tuple(tensors),
        "objects": (StoredObject(f"data/x/m-{node}.safetensors", nbytes, 4096, D),), "shards": tuple(shards), "aliases": {"m.tied": "m.w"},
        "values": msgspec.Raw(b'{"lr":0.1}'), "metrics": {"loss": 1.5}, "world": nodes, "ranks": (node,),
    }  # fmt: skip
    return Part(**{**made, **changes})


# -- digests ------------------------------------------------------------------------------------------------------------


def test_digest_is_xxh3_128():
    """The digest is XXH3-128 in hex, as the xxhash package computes it, of any bytes-like."""
    assert digest(b"hello") == xxhash.xxh3_128(b"hello").hexdigest()
    assert digest(memoryview(bytearray(b"hello"))) == digest(b"hello")
    assert len(digest(b"")) == 32


@pytest.mark.parametrize(("nbytes", "count"), [(0, 1), (1, 1), (BLOCK_NBYTES, 1), (BLOCK_NBYTES + 1, 2), (2 * BLOCK_NBYTES, 2), (2 * BLOCK_NBYTES + 5, 3)])
def test_block_digests(nbytes, count):
    """One digest for each begun block, one for an empty shard, each of that block's bytes alone."""
    data = bytes(i % 251 for i in range(1000)) * (nbytes // 1000 + 1)
    found = block_digests(memoryview(data)[:nbytes])
    assert len(found) == count
    for index, word in enumerate(found):
        assert word == xxhash.xxh3_128_hexdigest(data[:nbytes][index * BLOCK_NBYTES : (index + 1) * BLOCK_NBYTES])


def test_block_digests_of_typed_memory():
    """A view of other items than bytes is digested by its bytes."""
    data = bytes(range(256)) * (BLOCK_NBYTES // 256) + b"12345678"
    assert block_digests(memoryview(data).cast("d")) == block_digests(memoryview(data))


# -- records ------------------------------------------------------------------------------------------------------------


def test_a_record_is_readable_json():
    """Anybody can read a record with a JSON parser and recompute its digest."""
    data = encode("manifest", merge([part()]))
    told = json.loads(data)
    assert list(told) == ["format", "kind", "digest", "body"]
    assert told["format"] == 1
    assert told["kind"] == "manifest"
    body = data[data.index(b'"body":') + 7 : -1]
    assert told["digest"] == xxhash.xxh3_128_hexdigest(b"1 manifest " + body)
    assert told["body"]["values"] == {"lr": 0.1}


def test_round_trip():
    """Parts, manifests and plain bodies come back equal, and equal records are equal bytes."""
    manifest = merge([part()])
    assert decode("manifest", encode("manifest", manifest), Manifest, key="k") == manifest
    assert decode("part", encode("part", part()), Part, key="k") == part()
    assert decode("run", memoryview(encode("run", {"id": "é"})), dict[str, str], key="k") == {"id": "é"}
    assert encode("manifest", manifest) == encode("manifest", decode("manifest", encode("manifest", manifest), Manifest, key="k"))


def test_metrics_that_json_cannot_hold():
    """A loss that is NaN or infinite comes back as it was, and does not make the record unreadable."""
    record = part(metrics={"z": math.inf, "loss": math.nan, "a": 1.0, "m": -math.inf})
    found = decode("part", encode("part", record), Part, key="k").metrics
    assert list(found) == ["a", "loss", "m", "z"]
    assert math.isnan(found["loss"])
    assert (found["a"], found["m"], found["z"]) == (1.0, -math.inf, math.inf)
    json.loads(encode("part", record), parse_constant=pytest.fail)
    assert join_metrics(*split_metrics({"a": 2.0, "b": math.inf})) == {"a": 2.0, "b": math.inf}
    with pytest.raises(CorruptionError, match="no number"):
        join_metrics({}, {"a": "1"})


def test_values_do_not_keep_the_record_alive():
    """A decoded manifest does not hold on to the bytes it was read from (a million tensors are 120 MB of them)."""
    data = bytearray(encode("manifest", merge([part()])))
    found = decode("manifest", memoryview(data), Manifest, key="k")
    data.clear()  # BufferError while anybody looks at it
    assert bytes(found.values) == b'{"lr":0.1}'


def test_a_newer_format_says_to_upgrade():
    """A record of a newer format is a ConfigError with the command to run, whatever else is in it."""
    for data in (b'{"format":2,"kind":"manifest","digest":"x","body":{}}', b'{ "format": 17, "shape": "new" }', b'{"format":3}'):
        with pytest.raises(ConfigError, match="pip install -U everystep"):
            decode("manifest", data, Manifest, key="manifests/x.json")


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"\0" * 500, b'{"format":0}', b'{"format":-1}', b'{"format":"2"}', b'{"kind":"manifest","format":2}', b"[" * 100_000])
def test_what_is_no_record_is_corruption(data):
    """F38: an empty file, zeros and other JSON are a CorruptionError that names the key."""
    with pytest.raises(CorruptionError, match=r"manifests/x\.json"):
        decode("manifest", data, Manifest, key="manifests/x.json")


def test_another_kind_of_record_is_named():
    """A sound record of another kind is refused by its name, even where its fields would do."""
    with pytest.raises(CorruptionError, match="it is a part, not a manifest"):
        decode("manifest", encode("part", part()), Manifest, key="k")


def test_a_sound_record_with_other_fields_is_corruption():
    """A right digest over a body that lacks fields or has other types is refused all the same."""
    for body in ({}, {"step": "7"}, [], {"step": 7, "attempt": 1, "nodes": 1, "saved_at": 0.0, "tensors": [[1]]}):
        with pytest.raises(CorruptionError):
            decode("manifest", encode("manifest", body), Manifest, key="k")


def test_cut_off_records_are_corruption():
    """F38: a record cut off anywhere is a CorruptionError."""
    data = encode("part", part())
    for end in range(len(data)):
        with pytest.raises(CorruptionError):
            decode("part", data[:end], Part, key="k")
    with pytest.raises(CorruptionError):
        decode("part", data + b"\n", Part, key="k")


def test_a_kind_is_a_word():
    """A kind that could break the frame is a mistake of the caller."""
    with pytest.raises(ValueError, match="no word"):
        encode('x","y":"', {})


# -- merging ------------------------------------------------------------------------------------------------------------


def test_merge_is_the_same_whatever_the_order():
    """Equal parts give equal bytes in any order, and the manifest has every node's shards under sorted names and keys."""
    parts = [part(0, 3, rows=(0, 1)), part(1, 3, rows=(1, 3)), part(2, 3, rows=(3, 4))]
    manifest = merge(parts)
    assert [spec.name for spec in manifest.tensors] == ["m.b", "m.w"]
    assert [stored.key for stored in manifest.objects] == sorted(stored.key for stored in manifest.objects)
    assert [(shard.tensor, shard.object, shard.region.offsets) for shard in manifest.shards] == [(0, 0, ()), (1, 0, (0, 0)), (1, 1, (1, 0)), (1, 2, (3, 0))]
    assert manifest.saved_at == 102.0
    assert encode("manifest", merge(parts[::-1])) == encode("manifest", manifest)
    assert encode("manifest", merge([parts[1], parts[0], parts[2]])) == encode("manifest", manifest)


def document(**entries):
    return json.dumps({"state": {"dict": [[name, {"value": value}] for name, value in entries.items()]}}, separators=(",", ":")).encode()


def test_documents_are_joined():
    """F16: the lowest rank's document stands whole, of the others what differs: another child, one it lacks (null), one that only it has."""
    documents = {5: document(epoch=3, rng=5, extra=[1]), 2: document(epoch=3, rng=2), 3: document(epoch=3, rng=2), 4: document(rng=4)}
    values, by_rank = join_documents(documents)
    assert values == documents[2]
    assert {rank: json.loads(bytes(pairs)) for rank, pairs in by_rank.items()} == {
        4: [["epoch", None], ["rng", {"value": 4}]], 5: [["rng", {"value": 5}], ["extra", {"value": [1]}]],
    }  # fmt: skip
    record = part(world=6, ranks=(2, 3, 4, 5), values=msgspec.Raw(values), by_rank=by_rank)
    assert {rank: document_of_rank(record, rank) for rank in documents} == documents
    assert document_of_rank(record, 6 + 5) == documents[5]
    with pytest.raises(LayoutError, match=r"no plain values of rank 1: node 0 has the ranks \(2, 3, 4, 5\)"):
        document_of_rank(record, 1)
    with pytest.raises(ValueError, match="no documents"):
        join_documents({})


def test_values_of_ranks_are_merged_by_rank():
    """F16: nodes whose ranks have values of their own make one manifest: rank 0's whole, of each other rank what differs from it, wherever it was."""
    documents = {rank: document(epoch=3, rng=rank % 3, node=rank // 2) for rank in range(6)}
    parts = []
    for node, (ranks, some_rows) in enumerate([((1, 4), (0, 1)), ((0, 5), (1, 2)), ((2, 3), (2, 4))]):
        values, by_rank = join_documents({rank: documents[rank] for rank in ranks})
        parts.append(part(node, 3, rows=some_rows, world=6, ranks=ranks, values=msgspec.Raw(values), by_rank=by_rank))
    manifest = merge(parts)
    assert manifest.world == 6
    assert bytes(manifest.values) == documents[0]
    assert list(manifest.by_rank) == [1, 2, 3, 4, 5]
    assert json.loads(bytes(manifest.by_rank[3])) == [["node", {"value": 1}]]
    again = decode("manifest", encode("manifest", merge(parts[::-1])), Manifest, key="k")
    assert again == manifest
    assert {rank: document_of_rank(again, rank) for rank in range(6)} == documents
    assert document_of_rank(again, 8) == documents[2]


def test_a_record_of_one_rank_says_nothing_of_ranks():
    """A record of one process bears no field that only worlds of several ranks need; a part of rank 0 alone comes back with its defaults."""
    record = part()
    assert {"world", "ranks", "shared", "by_rank", "nonfinite"}.isdisjoint(json.loads(encode("part", record))["body"])
    assert {"world", "shared", "by_rank", "nonfinite"}.isdisjoint(json.loads(encode("manifest", merge([record])))["body"])
    data = encode("part", msgspec.structs.replace(record, ranks=tuple(range(1))))
    assert data == encode("part", record) == encode("part", decode("part", data, Part, key="k"))
    told = json.loads(encode("part", part(1, 2, shared=False)))["body"]
    assert (told["world"], told["ranks"], told["shared"]) == (2, [1], False)


@pytest.mark.parametrize("pairs", [b"{}", b"[1]", b'[["a"]]', b'[["a",1,2]]', b"null", b'"x"'])
def test_values_of_a_rank_that_cannot_be_read(pairs):
    """F38: a rank's values that are no list of pairs, or lie beside a document of another form, are a CorruptionError that names the rank."""
    with pytest.raises(CorruptionError, match="plain values of rank 1"):
        document_of_rank(part(world=2, ranks=(0, 1), values=msgspec.Raw(document(a=1)), by_rank={1: msgspec.Raw(pairs)}), 1)
    with pytest.raises(CorruptionError, match="plain values of rank 1"):
        document_of_rank(part(world=2, ranks=(0, 1), values=msgspec.Raw(pairs), by_rank={1: msgspec.Raw(b"[]")}), 1)


def test_a_manifest_with_values_of_strange_ranks_is_corruption():
    """Values of rank 0 twice, or of a rank beyond the world, and more nodes than ranks are no sound manifest."""
    manifest = merge([part()])
    for changes in ({"by_rank": {0: msgspec.Raw(b"[]")}}, {"by_rank": {1: msgspec.Raw(b"[]")}}, {"world": 0}, {"nodes": 2}):
        with pytest.raises(CorruptionError, match="cannot be"):
            check(msgspec.structs.replace(manifest, **changes))


def test_replicas_of_a_region_become_one_copy():
    """F18: two nodes that stored the same region with the same bytes give one shard, the first file's, in either order."""
    parts = [part(0, 2), part(1, 2, rows=(0, 4))]
    manifest = merge(parts)
    assert [(shard.tensor, shard.object) for shard in manifest.shards] == [(0, 0), (1, 0)]
    assert merge(parts[::-1]) == manifest


BAD_PARTS = {
    "none": ([], "nothing was saved"),
    "another step": ([part(0, 2), part(1, 2, step=8)], "different saves"),
    "another attempt": ([part(0, 2), part(1, 2, attempt=3)], "different saves"),
    "another count of nodes": ([part(0, 2), part(1, 3)], "different saves"),
    "a node missing": ([part(0, 2, rows=(0, 2))], r"nodes \[1\] are missing"),
    "a node twice": ([part(0, 2), part(0, 2), part(1, 2)], "one each"),
    "a node too many": ([part(0, 1), part(1, 1)], "one each"),
    "another shape": ([part(0, 2), part(1, 2, tensors=(TensorSpec("m.w", "F32", (4, 3), "m"),))], "another tensor 'm.w'"),
    "another alias": ([part(0, 2), part(1, 2, aliases={"m.tied": "m.b"})], "another alias"),
    "another size of a file": ([part(0, 2), part(1, 2, objects=(StoredObject("data/x/m-0.safetensors", 9999, 4096, D),))], "another file"),
    "values that cannot be joined": ([part(0, 2, rows=(0, 2)), part(1, 2, rows=(2, 4), values=msgspec.Raw(b"{}"))], "plain values of rank"),
    "another world": ([part(0, 2), part(1, 2, world=3)], "2 ranks and one store for all, 3 ranks"),
    "a store of its own": ([part(0, 2), part(1, 2, shared=False)], "2 ranks and a store for each node"),
    "a rank twice": ([part(0, 2), part(1, 2, ranks=(0, 1))], "rank 0 is on nodes 0 and 1"),
    "a rank missing": ([part(0, 2, world=4), part(1, 2, world=4, ranks=(1, 3))], r"ranks \[2\] are on no node"),
    "a rank too many": ([part(0, 2), part(1, 2, ranks=(1, 2))], "rank 2 is beyond the world of 2"),
    "ranks out of order": ([part(0, 2), part(1, 2, ranks=(2, 1))], "not rising"),
    "a node without ranks": ([part(0, 2), part(1, 2, ranks=())], "none, or not rising"),
    "another node's values": ([part(0, 2), part(1, 2, by_rank={0: msgspec.Raw(b"[]")})], r"tells of ranks \[0\]"),
    "a gap": ([part(0, 2, rows=(0, 1)), part(1, 2, rows=(2, 4))], r"'m\.w'.*\[1:2, 0:2\]"),
    "an overlap": ([part(0, 2, rows=(0, 3)), part(1, 2, rows=(2, 4))], "overlap"),
    "replicas that differ": ([part(0, 2), part(1, 2, digests=(D[::-1],))], "overlap"),
    "a shard of nothing": ([part(shards=(Shard(5, whole(()), 0, 4096, 1, (D,)),))], "does not list"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PARTS)
def test_parts_that_do_not_fit_are_corruption(name):
    """F5, F6: parts of different saves, missing or doubled nodes, contradictions, gaps and overlaps are named, in either order."""
    parts, why = BAD_PARTS[name]
    for ordered in (parts, parts[::-1]):
        with pytest.raises(CorruptionError, match=why):
            merge(ordered)
