"""One flipped bit anywhere in any record is found."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import ConfigError, CorruptionError
from everystep.manifest import Part, Shard, StoredObject, TensorSpec, decode, digest, encode
from everystep.region import whole

words = st.text(min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def parts(draw):
    names = draw(st.lists(words, max_size=3, unique=True))
    specs = tuple(TensorSpec(name, "U8", draw(shapes), "g") for name in names)
    ranks = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))))
    pairs = st.lists(st.tuples(words, st.none() | st.dictionaries(words, st.integers(0, 9), max_size=2)), max_size=2).map(msgspec.json.encode).map(msgspec.Raw)
    return Part(
        step=draw(st.integers(0, 10**12)), attempt=draw(st.integers(0, 99)), node=0, nodes=1, saved_at=draw(st.floats(0, 1e10)), tensors=specs,
        objects=(StoredObject("data/a.safetensors", 4096 + 729 * 3, 4096, digest(b"h")),),
        shards=tuple(Shard(i, whole(spec.shape), 0, 4096, whole(spec.shape).numel, (digest(bytes([i])),)) for i, spec in enumerate(specs)),
        aliases=draw(st.dictionaries(words, words, max_size=2)),
        values=msgspec.Raw(msgspec.json.encode(draw(st.dictionaries(words, st.integers(0, 9), max_size=3)))),
        metrics=draw(st.dictionaries(words, st.floats(allow_nan=False), max_size=2)), world=draw(st.integers(1, 10)), ranks=ranks, shared=draw(st.booleans()),
        by_rank=draw(st.dictionaries(st.sampled_from(ranks), pairs, max_size=2)),
    )  # fmt: skip


@given(parts())
def test_round_trip(part):
    """Every part comes back equal, and encodes to the same bytes again."""
    data = encode("part", part)
    again = decode("part", data, Part, key="k")
    assert again == part
    assert encode("part", again) == data


@given(parts(), st.data())
def test_a_flipped_bit_is_found(part, data):
    """F7: one flipped bit anywhere is a CorruptionError, or a ConfigError where it made a newer format of it; never another record."""
    record = bytearray(encode("part", part))
    record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((CorruptionError, ConfigError)):
        decode("part", bytes(record), Part, key="k")


def test_every_bit_of_a_small_record():
    """F7: in a small record each bit is flipped in turn, and each is found."""
    record = encode("pin", {"reason": "a word", "at": 1.5})
    for at in range(len(record)):
        for bit in range(8):
            damaged = bytearray(record)
            damaged[at] ^= 1 << bit
            with pytest.raises((CorruptionError, ConfigError)):
                decode("pin", bytes(damaged), dict, key="k")


@given(parts(), st.data())
def test_a_changed_stretch_is_found(part, data):
    """F7: a stretch replaced by other bytes of any length is found too."""
    record = encode("part", part)
    begin = data.draw(st.integers(0, len(record)))
    end = data.draw(st.integers(begin, len(record)))
    changed = record[:begin] + data.draw(st.binary(max_size=20)) + record[end:]
    if changed != record:
        with pytest.raises((CorruptionError, ConfigError)):
            decode("part", changed, Part, key="k")
