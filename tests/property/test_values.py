"""Any tree of plain values comes back as it was."""

from __future__ import annotations

import collections
import math

from hypothesis import given
from hypothesis import strategies as st

from everystep.values import Ref, decode, encode, refs

scalars = st.none() | st.booleans() | st.integers() | st.integers(-(2**100), 2**100) | st.floats() | st.text() | st.binary() | st.complex_numbers()
keys = st.text(max_size=4) | st.sampled_from(["$", "$x", "__metadata__"]) | st.integers() | st.booleans() | st.tuples(st.integers(), st.text(max_size=2))
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    | st.lists(inner, max_size=3).map(collections.deque) | st.frozensets(scalars, max_size=4) | st.sets(keys, max_size=4)
    | st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
    max_leaves=20,
)  # fmt: skip


def shown(value):
    """A form that tells all that must be kept: types, order, NaN and the sign of zero."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, repr(value)
    if isinstance(value, complex):
        return kind, shown(value.real), shown(value.imag)
    if isinstance(value, dict):
        return kind, [(shown(k), shown(v)) for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(shown, value)))
    if isinstance(value, list | tuple | collections.deque):
        return kind, [shown(item) for item in value]
    return kind, repr(value)


@given(trees)
def test_round_trip(tree):
    """F23: values, types and order come back, and the same tree gives the same bytes."""
    data = encode(tree)
    assert shown(decode(data)) == shown(tree)
    assert encode(tree) == data


class Tensor:
    def __init__(self, number):
        self.number = number


with_tensors = st.recursive(
    scalars | st.integers(0, 99).map(Tensor),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=20,
)


def numbers(tree):
    """The tensors of a tree in order, found by plain recursion."""
    if isinstance(tree, Tensor):
        return [tree.number]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [number for item in items for number in numbers(item)]


@given(with_tensors)
def test_every_reference_is_listed_and_resolved_in_order(tree):
    """``refs`` and ``resolve`` see each tensor of the tree, in the tree's order, and nothing else."""
    data = encode(tree, convert=lambda value, path: Ref(str(value.number)) if isinstance(value, Tensor) else None)
    expected = numbers(tree)
    assert [int(ref.name) for ref in refs(data)] == expected
    seen = []
    decode(data, resolve=lambda ref: seen.append(int(ref.name)))
    assert seen == expected


@given(st.floats(), st.integers())
def test_numbers_keep_their_type(a, b):
    """A float that is whole stays a float, an integer an integer, beside each other."""
    x, y = decode(encode([a, b]))
    assert type(x) is float
    assert type(y) is int
    assert y == b
    assert x == a or math.isnan(a)
