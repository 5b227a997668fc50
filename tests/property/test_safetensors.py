"""Any set of tensors, laid out by us and read by the package, and the other way round."""

from __future__ import annotations

import math

import numpy as np
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from everystep.safetensors import DTYPES, METADATA, Entry, header, parse

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != METADATA)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=6)
metadata = st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=3)


@given(tensors, metadata, st.randoms())
def test_the_package_reads_what_we_lay_out(specs, words, rng):
    """Names, dtypes, shapes and bytes come back from the package as they went in, and our own parser agrees."""
    entries, payload = [], b""
    for name, (dtype, shape) in specs.items():
        data = rng.randbytes(DTYPES[dtype] * math.prod(shape))
        entries.append(Entry(name, dtype, shape, len(payload), len(payload) + len(data)))
        payload += data
    data = header(entries, words) + payload
    found = dict(safetensors.deserialize(data))
    assert set(found) == set(specs)
    for entry in entries:
        assert found[entry.name]["dtype"] == entry.dtype
        assert tuple(found[entry.name]["shape"]) == entry.shape
        assert bytes(found[entry.name]["data"]) == payload[entry.begin : entry.end]
    again = parse(data, len(data))
    assert sorted(again.entries, key=lambda entry: entry.name) == sorted(entries, key=lambda entry: entry.name)
    assert again.metadata == words
    assert again.data_start == len(data) - len(payload)


numpy_dtypes = [np.float64, np.float32, np.float16, np.int64, np.uint32, np.int16, np.uint8, np.bool_]


@given(st.dictionaries(names, st.tuples(st.sampled_from(numpy_dtypes), shapes), max_size=5), metadata, st.integers(0, 99))
def test_we_read_what_the_package_lays_out(specs, words, seed):
    """A file that the package wrote has, by our parser, the arrays that were given to it."""
    rng = np.random.default_rng(seed)
    arrays = {name: np.asarray(rng.random(shape) * 9).astype(dtype) for name, (dtype, shape) in specs.items()}
    data = safetensors.numpy.save(arrays, words or None)
    found = parse(data, len(data))
    assert found.metadata == words
    assert {entry.name for entry in found.entries} == set(arrays)
    for entry in found.entries:
        assert entry.shape == arrays[entry.name].shape
        assert data[found.data_start + entry.begin : found.data_start + entry.end] == arrays[entry.name].tobytes()
