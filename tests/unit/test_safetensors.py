"""Headers against the real ``safetensors`` package, which is the judge of what a file is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from everystep.errors import CorruptionError, LayoutError
from everystep.region import Region
from everystep.safetensors import DTYPES, Entry, Stored, data_start, header, our_entries, our_metadata, parse

TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32,
    "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def raw(tensor):
    """The bytes of a tensor, whatever its dtype."""
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def file_of(tensors, metadata=None):
    """A file of (name, dtype word, shape, bytes), laid out by the code under test."""
    entries, at = [], 0
    for name, dtype, shape, data in tensors:
        entries.append(Entry(name, dtype, shape, at, at + len(data)))
        at += len(data)
    return header(entries, metadata or {}) + b"".join(data for *_, data in tensors)


def test_the_package_takes_every_dtype_we_list():
    """F22: the package's own core reads a file with one tensor of each dtype, at the size we say."""
    data = file_of([(word, word, (3,), bytes(range(3 * nbytes))) for word, nbytes in DTYPES.items()])
    found = dict(safetensors.deserialize(data))
    assert set(found) == set(DTYPES)
    for word, nbytes in DTYPES.items():
        assert found[word]["dtype"] == word
        assert found[word]["shape"] == [3]
        assert bytes(found[word]["data"]) == bytes(range(3 * nbytes))


def test_torch_reads_our_file():
    """F4, F22: torch gets from our file the bytes that were put in, empty and 0-dim tensors included; item sizes are torch's."""
    made = {}
    for word, dtype in TORCH.items():
        assert DTYPES[word] == dtype.itemsize
        if word == "F8_E8M0":
            continue  # the package's torch loader has no word for it; the test above reads it
        made[word] = torch.arange(24, dtype=torch.uint8).remainder(2).view(torch.bool if word == "BOOL" else dtype).reshape(-1, 1)
    made["scalar"] = torch.tensor(3.5)
    made["empty"] = torch.empty(0, 7)
    words = {dtype: word for word, dtype in TORCH.items()}
    data = file_of([(name, words[t.dtype], tuple(t.shape), raw(t)) for name, t in made.items()], {"format": "pt"})
    found = safetensors.torch.load(data)
    assert set(found) == set(made)
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert raw(found[name]) == raw(tensor)
    assert found["scalar"].item() == 3.5


def test_numpy_reads_our_file_and_its_metadata(tmp_path):
    """The numpy loader reads it too, and the metadata comes back word for word."""
    a = np.arange(6, dtype=np.float64).reshape(2, 3)
    b = np.array([1, 2, 3], np.int16)
    metadata = our_metadata(group="model", entries={}, aliases={"model.head": "model.a"})
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of([("a", "F64", (2, 3), a.tobytes()), ("b", "I16", (3,), b.tobytes())], metadata))
    found = safetensors.numpy.load_file(path)
    assert np.array_equal(found["a"], a)
    assert np.array_equal(found["b"], b)
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == metadata
        assert opened.metadata()["format"] == "pt"


def test_data_starts_on_a_page():
    """Whatever the names are, the data starts at a multiple of 4,096 bytes, and an empty file is one header."""
    for count in (0, 1, 40, 41, 42, 500):
        data = header([Entry(f"n{'x' * i}", "U8", (0,), 0, 0) for i in range(count)], {})
        assert len(data) % 4096 == 0
        assert data_start(data, len(data)) == len(data)
        assert len(safetensors.deserialize(data)) == count


def test_we_read_what_the_package_writes():
    """A file that the package wrote parses to its names, dtypes, shapes and bytes, metadata included."""
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(2, dtype=torch.int64), "é\n\"'": torch.ones(2, dtype=torch.bfloat16)}
    data = safetensors.torch.save(tensors, {"format": "pt", "who": "Änne"})
    found = parse(data, len(data))
    assert found.metadata == {"format": "pt", "who": "Änne"}
    assert {entry.name for entry in found.entries} == set(tensors)
    for entry in found.entries:
        assert TORCH[entry.dtype] == tensors[entry.name].dtype
        assert entry.shape == tuple(tensors[entry.name].shape)
        assert data[found.data_start + entry.begin : found.data_start + entry.end] == raw(tensors[entry.name])
    assert our_entries(found) is None


@pytest.mark.parametrize("shift", range(0, 512, 37))
def test_any_alignment_reads_right(shift):
    """F10: a header padded so that data starts anywhere modulo 512 reads right."""
    body = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    nbytes = len(body) + (shift - len(body) - 8) % 512
    payload = np.array([1.5, -2.5], np.float32).tobytes()
    data = nbytes.to_bytes(8, "little") + body.ljust(nbytes) + payload
    found = parse(data, len(data))
    assert found.data_start % 512 == shift
    assert data[found.data_start :] == payload
    assert np.array_equal(safetensors.numpy.load(data)["w"], np.array([1.5, -2.5], np.float32))


def test_only_the_header_is_needed():
    """``data_start`` needs eight bytes and ``parse`` the header: the data need not be read."""
    data = file_of([("w", "U8", (100,), bytes(100))])
    start = data_start(data[:8], len(data))
    assert parse(data[:start], len(data)) == parse(data, len(data))
    with pytest.raises(CorruptionError, match="too few"):
        parse(data[: start - 1], len(data))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([Entry("a", "U8", (1,), 0, 1), Entry("a", "U8", (1,), 1, 2)], "twice"),
        ([Entry("__metadata__", "U8", (1,), 0, 1)], "reserved"),
        ([Entry("a", "U8", (1,), 1, 2)], "do not follow"),
        ([Entry("a", "U8", (2,), 0, 1)], "do not follow"),
        ([Entry("a", "C128", (1,), 0, 16)], "C128"),
        ([Entry("n" * 100_000_000, "U8", (1,), 0, 1)], "longer than"),
    ],
    ids=["twice", "reserved", "gap", "size", "dtype", "length"],
)
def test_what_readers_would_refuse_is_not_written(entries, why):
    """A header that no reader would take is an error when it is made."""
    with pytest.raises(LayoutError, match=why):
        header(entries, {})


def test_our_note_tells_names_regions_and_aliases():
    """Full names, regions and tied names come back from the file alone."""
    shard = Stored("model.w", (8, 3), Region((2, 0), (4, 3)))
    metadata = our_metadata(group="model", entries={"w@2,0": shard}, aliases={"model.head": "model.b"})
    data = file_of([("w@2,0", "U8", (4, 3), bytes(12)), ("b", "U8", (2,), bytes(2))], metadata)
    stored, aliases = our_entries(parse(data, len(data)))
    assert stored == {"w@2,0": shard, "b": Stored("model.b", (2,), Region((0,), (2,)))}
    assert aliases == {"model.head": "model.b"}
    assert all(isinstance(value, str) for value in metadata.values())


@pytest.mark.parametrize(
    "note",
    ["", "[]", "{}", '{"group":1}', '{"group":"g","aliases":{"x":"nobody"}}', '{"group":"g","aliases":{"g.b":"g.b"}}',
     '{"group":"g","entries":{"b":["g.b",[9],[[8],[2]]]}}', '{"group":"g","entries":{"b":["g.b",[9],[[0],[1]]]}}'],
)  # fmt: skip
def test_a_note_that_lies_is_corruption(note):
    """Our own note is checked like everything else: unreadable, or at odds with the entries, it is an error."""
    data = file_of([("b", "U8", (2,), bytes(2))], {"everystep": note})
    with pytest.raises(CorruptionError):
        our_entries(parse(data, len(data)))


def test_types_below_a_byte_are_named():
    """A sound file with a four-bit type is no corruption: the error says that everystep does not read it."""
    body = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    data = len(body).to_bytes(8, "little") + body + b"ab"
    safetensors.deserialize(data)
    with pytest.raises(LayoutError, match="F4"):
        parse(data, len(data))
