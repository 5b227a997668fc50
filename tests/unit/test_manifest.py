"""Records and their digests, merging of parts, coverage."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
import xxhash

from everystep.errors import ConfigError, CorruptionError
from everystep.manifest import (
    BLOCK_NBYTES,
    Manifest,
    Part,
    Shard,
    StoredObject,
    TensorSpec,
    block_digests,
    decode,
    digest,
    encode,
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
        "values": msgspec.Raw(b'{"lr":0.1}'), "metrics": {"loss": 1.5},
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
    "other values": ([part(0, 2), part(1, 2, values=msgspec.Raw(b"{}"))], "different plain values"),
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
