"""Headers, manifests and values made to break a reader: each ends in an error that says so, none in a crash or a wrong read."""

from __future__ import annotations

import contextlib
import json
import sys
import types

import msgspec
import pytest
import safetensors
from hypothesis import example, given
from hypothesis import strategies as st

from everystep import values
from everystep.errors import CheckpointError, CorruptionError, LayoutError
from everystep.manifest import BLOCK_NBYTES, Manifest, Shard, StoredObject, TensorSpec, check
from everystep.region import Region
from everystep.safetensors import data_start, parse


def framed(body, payload=b""):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return len(body).to_bytes(8, "little") + body + payload


def one(**changes):
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


BAD_HEADERS = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "only a length": (0).to_bytes(8, "little"),
    "length beyond the file": (100).to_bytes(8, "little") + b"{}",
    "length of 2**63": (1 << 63).to_bytes(8, "little") + b"{}",
    "length of all ones": b"\xff" * 8 + b"{}",
    "no JSON": framed(b"{hello}"),
    "a list": framed(b"[]"),
    "a space first": framed(b" {}"),
    "cut off": framed(b'{"w":{"dtype":"F32"'),
    "two objects": framed(b"{}{}"),
    "NULs for padding": framed(b"{}\0\0"),
    "no UTF-8": framed(b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"),
    "UTF-16": framed("{}".encode("utf-16")),
    "a lone surrogate": framed(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"),
    "nested deeply": framed(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "an integer of a million digits": framed(b'{"w":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,1]}}', b"1"),
    "NaN for a size": framed(b'{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"1"),
    "an entry that is a list": framed(b'{"w":[]}'),
    "no dtype": framed({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "an unknown dtype": framed(one(dtype="F33"), bytes(8)),
    "a dtype that is a number": framed(one(dtype=7), bytes(8)),
    "a shape that is text": framed(one(shape="2"), bytes(8)),
    "a negative dimension": framed(one(shape=[-2]), bytes(8)),
    "two negative dimensions": framed(one(shape=[-1, -2]), bytes(8)),
    "a fractional dimension": framed(one(shape=[2.0]), bytes(8)),
    "a true dimension": framed(one(shape=[2, True]), bytes(8)),
    "a dimension of 2**63 beside a zero": framed(one(shape=[1 << 63, 0], data_offsets=[0, 0])),
    "one offset": framed(one(data_offsets=[8]), bytes(8)),
    "negative offsets": framed(one(data_offsets=[-8, 0]), bytes(8)),
    "offsets the wrong way": framed(one(data_offsets=[8, 0]), bytes(8)),
    "too small for the shape": framed(one(data_offsets=[0, 4]), bytes(4)),
    "too large for the shape": framed(one(data_offsets=[0, 12]), bytes(12)),
    "beyond the file": framed(one(), bytes(7)),
    "trailing bytes": framed(one(), bytes(9)),
    "a gap at the start": framed(one(data_offsets=[1, 9]), bytes(9)),
    "a gap between": framed(one() | {"v": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]}}, bytes(10)),
    "an overlap": framed(one() | {"v": {"dtype": "U8", "shape": [2], "data_offsets": [7, 9]}}, bytes(9)),
    "the same bytes twice": framed(one() | {"v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "a name twice": framed(b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "a field twice": framed(b'{"w":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "metadata twice": framed(b'{"__metadata__":{},"__metadata__":{"a":"b"}}'),
    "metadata of numbers": framed({"__metadata__": {"a": 1}}),
    "metadata that is a list": framed({"__metadata__": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers_are_corruption(name):
    """F7: every way we know to make a header wrong ends in a CorruptionError."""
    data = BAD_HEADERS[name]
    with pytest.raises(CorruptionError):
        parse(data, len(data))


def test_a_header_past_the_readers_limit_is_refused_before_it_is_read():
    """A length of more than 100 MB is refused from the first eight bytes, whatever the file's size."""
    with pytest.raises(CorruptionError, match="100,000,001"):
        data_start((100_000_001).to_bytes(8, "little"), 1 << 40)
    assert data_start((100_000_000).to_bytes(8, "little"), 1 << 40) == 100_000_008


SOUND = framed({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
                "b": {"dtype": "U8", "shape": [], "data_offsets": [8, 9]}}, b"123456789")  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 10), st.integers(0, 255)), min_size=1, max_size=4))
@example([(0, 0)])
def test_a_damaged_header_is_an_error_or_read_as_the_package_reads_it(changes):
    """F7: a header with some bytes replaced never reads as anything but what the safetensors package reads in it."""
    data = bytearray(SOUND)
    for at, byte in changes:
        data[at] = byte
    try:
        found = parse(bytes(data), len(data))
    except (CorruptionError, LayoutError):
        return
    theirs = dict(safetensors.deserialize(bytes(data)))
    assert {entry.name for entry in found.entries} == set(theirs)
    for entry in found.entries:
        assert bytes(theirs[entry.name]["data"]) == bytes(data[found.data_start + entry.begin : found.data_start + entry.end])
        assert theirs[entry.name]["dtype"] == entry.dtype


@given(st.binary(max_size=200))
def test_noise_is_no_header(data):
    """Arbitrary bytes end in a CorruptionError or are a sound file."""
    try:
        found = parse(data, len(data))
    except CorruptionError:
        return
    assert len(safetensors.deserialize(data)) == len(found.entries)


# -- manifests ----------------------------------------------------------------------------------------------------------

DIGEST = "0" * 32


def manifest(**changes):
    """A sound manifest: "g.a" of 2x3 float32 in two shards, and "g.b" of 9 MiB bytes."""
    nbytes = 9 << 20
    sound = {
        "step": 1, "attempt": 1, "nodes": 1, "saved_at": 0.0,
        "tensors": (TensorSpec("g.a", "F32", (2, 3), "g"), TensorSpec("g.b", "U8", (nbytes,), "g")),
        "objects": (StoredObject("data/x/g-1.safetensors", 4096 + 24 + nbytes, 4096, DIGEST),),
        "shards": (
            Shard(0, Region((0, 0), (1, 3)), 0, 4096, 12, (DIGEST,)), Shard(0, Region((1, 0), (1, 3)), 0, 4108, 12, (DIGEST,)),
            Shard(1, Region((0,), (nbytes,)), 0, 4120, nbytes, (DIGEST,) * 3),
        ),
        "aliases": {"g.tied": "g.a"}, "values": msgspec.Raw(b"{}"),
    }  # fmt: skip
    return Manifest(**{**sound, **changes})


def with_shard(index, **changes):
    shards = list(manifest().shards)
    shards[index] = msgspec.structs.replace(shards[index], **changes)
    return manifest(shards=tuple(shards))


def with_object(**changes):
    return manifest(objects=(msgspec.structs.replace(manifest().objects[0], **changes),))


A, B = manifest().tensors
BAD_MANIFESTS = {
    "negative step": manifest(step=-1),
    "negative attempt": manifest(attempt=-1),
    "no nodes": manifest(nodes=0),
    "no time": manifest(saved_at=float("nan")),
    "unknown dtype": manifest(tensors=(msgspec.structs.replace(A, dtype="F31"), B)),
    "negative shape": manifest(tensors=(msgspec.structs.replace(A, shape=(-2, -3)), B)),
    "name twice": manifest(tensors=(A, msgspec.structs.replace(B, name="g.a"))),
    "no name": manifest(tensors=(A, msgspec.structs.replace(B, name=""))),
    "alias of nobody": manifest(aliases={"g.tied": "g.c"}),
    "alias of an alias": manifest(aliases={"g.t": "g.a", "g.u": "g.t"}),
    "alias of itself": manifest(aliases={"g.t": "g.t"}),
    "alias that is a tensor": manifest(aliases={"g.b": "g.a"}),
    "tensor out of the list": with_shard(0, tensor=2),
    "negative tensor": with_shard(0, tensor=-1),
    "object out of the list": with_shard(0, object=1),
    "negative object": with_shard(0, object=-1),
    "offset in the header": with_shard(0, offset=4095),
    "negative offset": with_shard(0, offset=-12),
    "beyond the object": with_shard(2, offset=4121),
    "wrong size": with_shard(0, nbytes=11),
    "negative size": with_shard(0, nbytes=-12, region=Region((0, 0), (-1, 3))),
    "region out of the shape": with_shard(0, region=Region((2, 0), (1, 3))),
    "region of other dimensions": with_shard(0, region=Region((0,), (3,))),
    "region with negative offset": with_shard(0, region=Region((-1, 0), (1, 3))),
    "overlap": with_shard(1, region=Region((0, 0), (1, 3))),
    "a missing shard": manifest(shards=manifest().shards[1:]),
    "no shards of a tensor": manifest(shards=manifest().shards[:2]),
    "no digest": with_shard(0, digests=()),
    "a digest too few": with_shard(2, digests=(DIGEST,) * 2),
    "a digest too many": with_shard(0, digests=(DIGEST,) * 2),
    "half a digest": with_shard(0, digests=("0" * 16,)),
    "digest blocks of no size": with_shard(2, block=-1),
    "digest blocks larger than a reader's buffer": with_shard(2, block=9 << 20, digests=(DIGEST,)),
    "digest blocks that cut elements": with_shard(0, block=6, digests=(DIGEST,) * 2),
    "a digest too few for its blocks": with_shard(2, block=3 << 20, digests=(DIGEST,) * 2),
    "header beyond the object": with_object(header_nbytes=1 << 40),
    "negative header": with_object(header_nbytes=-1),
    "object twice": manifest(objects=manifest().objects * 2),
    **{f"key {key!r}": with_object(key=key) for key in ("/etc/passwd", "../x", "data/../../x", "data//x", "", ".", "data/.", "data/x/", "a\\..\\b", "a\0b")},
}  # fmt: skip


def test_the_manifest_the_bad_ones_are_made_of_is_sound():
    """The table below changes one thing each; unchanged, the manifest is sound."""
    check(manifest())
    check(with_shard(2, block=3 << 20))
    check(with_shard(0, block=4, digests=(DIGEST,) * 3))
    assert BLOCK_NBYTES == 4 << 20


@pytest.mark.parametrize("name", BAD_MANIFESTS)
def test_bad_manifests_are_corruption(name):
    """F6: an index, range, size, key, alias or region out of bounds, missing or doubled is a CorruptionError."""
    with pytest.raises(CorruptionError):
        check(BAD_MANIFESTS[name])


def test_missing_regions_are_named():
    """F6: the message names the tensor and exactly what is missing."""
    with pytest.raises(CorruptionError, match=r"'g\.a'.*\[0:1, 0:3\]"):
        check(BAD_MANIFESTS["a missing shard"])


# -- plain values -------------------------------------------------------------------------------------------------------

BAD_VALUES = [
    "", "{", "nul", "[1,]", '{"$":1}', '{"$":[]}', '{"$":["int"]}', '{"$":["int",5]}', '{"$":["int","12"]}', '{"$":["int","0x"]}', '{"$":["int","0x1_0"]}',
    '{"$":["float",1]}', '{"$":["float","1e3"]}', '{"$":["complex",[1.0]]}', '{"$":["complex",1.0]}', '{"$":["complex",[1,2]]}', '{"$":["bytes",1]}', '{"$":["bytes","a"]}',
    '{"$":["bytes","a*=="]}', '{"$":["text","/w=="]}', '{"$":["tuple",1]}', '{"$":["set",[[1]]]}', '{"$":["set",[1,1]]}', '{"$":["frozenset",{}]}', '{"$":["deque",[1]]}',
    '{"$":["deque",[1,[1,2]]]}', '{"$":["deque",[-1,[]]]}', '{"$":["deque",[true,[]]]}', '{"$":["dict",[1]]}', '{"$":["dict",[[1,2,3]]]}', '{"$":["dict",[[[],1]]]}',
    '{"$":["dict",[[1,2],[1,3]]]}', '{"$":["dict",{}]}', '{"$":["defaultdict",[]]}', '{"$":["defaultdict",["eval",[]]]}', '{"$":["defaultdict",[[],[]]]}',
    '{"$":["path",["path",1]]}', '{"$":["path",["soft",""]]}', '{"$":["path",[[],"x"]]}', '{"$":["enum",1]}', '{"$":["enum",["os",1,"x"]]}', '{"$":["enum",["re","RegexFlag",1]]}',
    '{"$":["flag",["re","RegexFlag","x"]]}', '{"$":["namedtuple",["sys","x"]]}', '{"$":["numpy",["O",""]]}', '{"$":["numpy",["|O8","AAAAAAAAAAA="]]}', '{"$":["numpy",["<f4","AA=="]]}',
    '{"$":["numpy",["<f3","AAAA"]]}', '{"$":["numpy",["<f4,<f4","AAAAAAAAAAA="]]}', '{"$":["numpy",["U","/w=="]]}', '{"$":["numpy",["<M8[zz]","AAAAAAAAAAA="]]}', '{"$":["ref",["tensor"]]}',
    '{"$":["ref",[1,2]]}', '{"$":["tagged",["x"]]}', '{"$":["tagged",[1,2]]}', '{"$":["pickle","gASVAAAAAAAAAC4="]}', '{"$":["tuple",[]],"x":1}', '{"$x":1}', "\xff",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_VALUES)
def test_bad_values_are_corruption(text):
    """F7: JSON that ``encode`` would not have written is a CorruptionError."""
    with pytest.raises(CorruptionError):
        values.decode(text.encode("latin-1"))


@pytest.mark.parametrize("data", [b"[" * 200_000 + b"]" * 200_000, b'{"$":["tuple",[' * 100_000 + b"]]}" * 100_000, b'[{"a":' * 100_000 + b"1" + b"}]" * 100_000])
def test_deep_values_do_not_crash(data):
    """A hundred thousand levels of nesting are a CorruptionError, for both readers."""
    with pytest.raises(CorruptionError):
        values.decode(data)
    with pytest.raises(CorruptionError):
        values.refs(data)


@pytest.mark.parametrize(
    ("module", "qualname"),
    [("os", "system"), ("builtins", "eval"), ("builtins", "object"), ("os", "environ"), ("os", "path.join"), ("sys", "modules"), ("collections", "OrderedDict"), ("re", ""),
     ("everystep.values", "Ref.__class__"), ("enum", "Enum.__init__.__globals__")],
)  # fmt: skip
@pytest.mark.parametrize("tag", ["enum", "flag", "namedtuple"])
def test_names_of_other_things_are_not_followed(tag, module, qualname):
    """A tag may name only an enum or named tuple; any other name is refused, and nothing is called."""
    with pytest.raises(LayoutError, match=r"no such class|has"):
        values.decode(msgspec.json.encode({"$": [tag, [module, qualname, [] if tag == "namedtuple" else 0 if tag == "flag" else "x"]]}))


@pytest.mark.parametrize("tag", ["enum", "flag", "namedtuple"])
def test_nothing_is_imported(tag):
    """A module that is not loaded stays so: the error says what to import."""
    module = "this"  # importing it prints a poem
    assert module not in sys.modules
    with pytest.raises(LayoutError, match="import this"):
        values.decode(msgspec.json.encode({"$": [tag, [module, "s", []]]}))
    assert module not in sys.modules


@pytest.mark.parametrize("tag", ["enum", "namedtuple"])
def test_lazy_modules_are_not_woken(tag, monkeypatch):
    """A module's ``__getattr__``, which may import or run anything, is not called for a name from a file."""
    module = types.ModuleType("lazy_one")
    woken = []
    module.__getattr__ = woken.append
    monkeypatch.setitem(sys.modules, "lazy_one", module)
    with pytest.raises(LayoutError):
        values.decode(msgspec.json.encode({"$": [tag, ["lazy_one", "Thing", [] if tag == "namedtuple" else "A"]]}))
    assert woken == []


def test_what_stands_for_a_module_is_not_asked(monkeypatch):
    """Something in ``sys.modules`` that is no module holds no classes for us."""
    monkeypatch.setitem(sys.modules, "odd_one", object())
    with pytest.raises(LayoutError, match="no such class"):
        values.decode(b'{"$":["enum",["odd_one","Thing","A"]]}')


json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(sorted(values._READERS)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["$", "$x", "a", "b"]), inner, max_size=2)
    | st.tuples(st.sampled_from(sorted(values._READERS)), inner).map(lambda pair: {"$": list(pair)}),
    max_leaves=12,
)  # fmt: skip


@given(json_trees)
def test_any_json_is_an_error_of_ours_or_values(tree):
    """Whatever JSON is put in, decoding ends in a value or an error of everystep's tree, never in another exception."""
    with contextlib.suppress(CheckpointError):
        values.decode(json.dumps(tree).encode())
