"""Plain values: what comes back as it was, and what is refused by its path."""

from __future__ import annotations

import collections
import enum
import json
import math
import pathlib
import random
import sys
import types
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from everystep.errors import LayoutError, StateError
from everystep.values import MAX_DEPTH, Ref, Tagged, decode, encode, refs


class Color(enum.Enum):
    RED = 1
    GREEN = "g"
    CRIMSON = 1  # noqa: PIE796 - an alias, on purpose


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):
    A = "a"


class Bits(enum.Flag):
    X = 1
    Y = 2


class Outer:
    class Inner(enum.Enum):  # noqa: D106
        A = 1


class Point(collections.namedtuple("Point", "x y")):  # noqa: PYI024 - both ways to make one are tested
    """With a constructor that must not run when it is read."""

    __slots__ = ()

    def __new__(cls, x, y):
        assert x is not None
        return super().__new__(cls, x, y)


class Pair(NamedTuple):
    first: object
    second: object


class Stuck(Pair):
    """Instances can have attributes beside their fields."""


@pytest.fixture(autouse=True)
def _findable(monkeypatch):
    """Tests are imported by path; classes are found by the name of their module."""
    module = types.ModuleType(__name__)
    vars(module).update(globals())
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, module))


def same(a, b):
    """Equal in value and in type, all the way down; NaN equals NaN and -0.0 is not 0.0."""
    assert type(a) is type(b)
    if isinstance(a, float):
        assert math.isnan(a) == math.isnan(b)
        assert math.isnan(a) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    elif isinstance(a, complex):
        same(a.real, b.real)
        same(a.imag, b.imag)
    elif isinstance(a, dict):
        same(list(a.items()), list(b.items()))
    elif isinstance(a, list | tuple | collections.deque):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


VALUES = {
    "plain": {"a": 1, "b": [True, None, "é", 2.5], "c": {"d": {}, "e": []}},
    "top": 5,
    "none": None,
    "bools and ints": [True, 1, False, 0],
    "ints": [2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, 2**20_000, -(2**20_000)],
    "floats": [0.0, -0.0, 0.1, 1e308, 5e-324, 1e22, 1.0, math.nan, math.inf, -math.inf, 123456789.123456789],
    "complex": [complex(1, -0.0), complex(math.nan, math.inf)],
    "text": ["", "$", "\0", "\ud800 alone", "𝄞", '"\\'],
    "tuples": [(), (1,), (1, (2, [3])), [()]],
    "sets": [set(), {1, "a", (2, 3)}, frozenset({1.5, None})],
    "bytes": [b"", b"\0\xff", bytearray(b"x")],
    "keys": {1: "int", (1, "a"): "tuple", None: 0, False: 1, 2.5: 2, b"k": 3},
    "dollars": {"$": 1, "$ref": ["ref", 2], "a": {"$": ["int", "0x1"]}},
    "one dollar": {"$": ["ref", ["tensor", "x"]]},
    "surrogate key": {"\udc80": 1},
    "ordered": collections.OrderedDict([("b", 1), ("a", {})]),
    "counter": collections.Counter("hello"),
    "deque": [collections.deque([1, (2,)], maxlen=5), collections.deque(), collections.deque(maxlen=0)],
    "paths": [pathlib.Path("/a/b c"), pathlib.PurePosixPath("x"), pathlib.PureWindowsPath("c:\\x")],
    "enums": [Color.RED, Color.GREEN, Level.LOW, Word.A, Outer.Inner.A, Bits.X, Bits.X | Bits.Y, Bits(0), {Color.RED: Level.LOW}],
    "named tuples": [Point(1, [2]), Pair(first=(), second=Point(1, 2))],
    "numpy": [np.float32(0.1), np.float64(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.float16(2), np.complex64(1 + 2j), np.datetime64("2024-05-06", "s"),
              np.timedelta64(5, "ms"), np.str_("ä\0"), np.bytes_(b"x\0"), np.str_("")],
    "python's rng": random.Random(3).getstate(),
    "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([torch.zeros(1)], 0.1), 10).state_dict(),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_comes_back_as_it_was(name):
    """F23: the value comes back equal and of the same types all the way down, from bytes that are plain JSON."""
    data = encode(VALUES[name])
    same(decode(data), VALUES[name])
    json.loads(data, parse_constant=pytest.fail)
    assert encode(decode(data)) == data


def test_plain_values_are_plain_json():
    """What JSON can tell is told in JSON's own words, so that people and other programs can read it."""
    value = {"lr": 0.1, "betas": [0.9, 0.95], "name": "é", "on": True, "none": None, "n": 3, "in": {}}
    assert json.loads(encode(value)) == value


def test_defaultdicts_keep_their_factory():
    """A defaultdict with a builtin factory, or none, makes defaults again."""
    for factory in (list, dict, int, set, collections.OrderedDict, None):
        found = decode(encode(collections.defaultdict(factory, {(1, 2): "x"})))
        assert type(found) is collections.defaultdict
        assert found.default_factory is factory
        assert found == {(1, 2): "x"}


def test_a_deque_keeps_its_bound():
    """The maximum length of a deque comes back."""
    assert decode(encode(collections.deque([1], 7))).maxlen == 7


def test_nan_members_and_keys():
    """NaN as a key comes back as a NaN key."""
    (key,) = decode(encode({math.nan: 1}))
    assert math.isnan(key)


def test_equal_sets_are_equal_bytes():
    """Sets have no order: however they were built, the bytes are the same."""
    names = [f"n{i}" for i in range(50)]
    assert encode(set(names)) == encode(set(names[25:] + names[:25]))


def test_torch_size_comes_back_as_a_tuple():
    """A shape from torch is stored as the tuple it is."""
    same(decode(encode({"shape": torch.Size([2, 3])})), {"shape": (2, 3)})


def test_a_state_dicts_metadata_is_left_to_the_collector():
    """The ``_metadata`` that torch hangs on state dicts does not make them unstorable; other attributes do."""
    state = collections.OrderedDict(a=1)
    state._metadata = {"": {"version": 1}}
    assert decode(encode(state)) == {"a": 1}
    state.other = 1
    with pytest.raises(StateError, match="attributes"):
        encode(state)


# -- refusals -----------------------------------------------------------------------------------------------------------


class MyInt(int):
    pass


class MyDict(dict):
    pass


class MyList(list):
    pass


def local_enum():
    class Local(enum.Enum):
        A = 1

    return Local.A


UNSTORABLE = {
    "lambda": lambda: None,
    "function": local_enum,
    "class": Outer,
    "instance": Outer(),
    "module": sys,
    "generator": (i for i in ()),
    "object": object(),
    "int subclass": MyInt(3),
    "dict subclass": MyDict(),
    "list subclass": MyList(),
    "str subclass": type("MyStr", (str,), {})("x"),
    "float subclass": type("MyFloat", (float,), {})(1.0),
    "bytes subclass": type("MyBytes", (bytes,), {})(b"x"),
    "set subclass": type("MySet", (set,), {})(),
    "tuple subclass": type("MyTuple", (tuple,), {})(),
    "struct sequence": torch.ones(2).max(0),
    "a named tuple with attributes": Stuck(1, 2),
    "a class inside a function": local_enum(),
    "a class of no module": type("Gone", (), {"__module__": "nowhere"})(),
    "an enum of no module": enum.Enum("Gone", "A", module="nowhere").A,
    "a factory that is a function": collections.defaultdict(lambda: 1),
    "a factory called list": collections.defaultdict(type("list", (), {})),
    "numpy array": np.zeros(3),
    "numpy record": np.zeros(1, [("a", int)])[0],
    "numpy object": np.array([{}], object),
    "tensor": torch.zeros(2),
    "dtype": torch.float32,
    "slice": slice(1),
    "ellipsis": ...,
    "exception": ValueError(),
}
if hasattr(UNSTORABLE["a named tuple with attributes"], "__dict__"):
    UNSTORABLE["a named tuple with attributes"].extra = 1


@pytest.mark.parametrize("name", UNSTORABLE)
def test_what_cannot_be_stored_is_named_by_its_path(name):
    """F23: the error names the path of the value, and is about that value only."""
    with pytest.raises(StateError) as caught:
        encode({"note": {"callbacks": [1, {}, UNSTORABLE[name]]}, "fine": 1})
    assert caught.value.key == "note.callbacks[2]"
    assert str(caught.value).startswith("note.callbacks[2] is a ")


def test_an_open_file_is_refused(tmp_path):
    """F23: an open file cannot be stored."""
    with (tmp_path / "x").open("w") as file, pytest.raises(StateError, match=r"log is a _io\.TextIOWrapper"):
        encode({"log": file})


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": {"b c": [0, object()]}}, "a['b c'][1]"), ({"a": {3: object()}}, "a[3]"), ({"a": {(1, "x"): object()}}, "a[(1, 'x')]"),
        ([(object(),)], "[0][0]"), ({"a": collections.deque([1, object()])}, "a[1]"), (object(), "(the value itself)"), ({"a.b": object()}, "['a.b']"),
        ({"o": collections.OrderedDict(k=object())}, "o.k"), ({"p": Pair(1, object())}, "p[1]"),
    ],
)  # fmt: skip
def test_paths_read_like_python(tree, path):
    """The path in a message reads like the expression that reaches the value."""
    with pytest.raises(StateError) as caught:
        encode(tree)
    assert caught.value.key == path


def test_paths_begin_where_the_caller_says():
    """``path`` is put before the path in messages."""
    with pytest.raises(StateError, match=r"^optim\.groups\[0\] is"):
        encode({"groups": [object()]}, path="optim")


def cyclic(kind):
    inner = {"d": {}}
    made = {"list": [inner], "dict": inner, "deque": collections.deque([inner]), "tuple": (inner,), "ordered": collections.OrderedDict(a=inner)}[kind]
    inner["d"]["again"] = made
    return made


@pytest.mark.parametrize("kind", ["list", "dict", "deque", "tuple", "ordered"])
def test_cycles_are_refused(kind):
    """F23: a value that contains itself is a StateError."""
    with pytest.raises(StateError, match="contains itself"):
        encode({"x": cyclic(kind)})


def test_the_same_value_twice_is_no_cycle():
    """A list that is referred to twice is stored twice."""
    shared = [1]
    assert decode(encode([shared, shared, {"a": shared}])) == [[1], [1], {"a": [1]}]


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}, lambda x: (x,), lambda x: {1: x}, lambda x: collections.deque([x]), lambda x: Pair(x, 1), lambda x: frozenset([x])])
def test_deep_nesting_is_refused_not_fatal(wrap):
    """F23: five thousand levels are a StateError, and as many as are allowed come back."""
    tree = 1
    for _ in range(MAX_DEPTH):
        tree = wrap(tree)
    assert decode(encode(tree)) == tree
    for _ in range(5000 - MAX_DEPTH):
        tree = wrap(tree) if not isinstance(tree, frozenset) else (tree,)
    with pytest.raises(StateError, match="nested"):
        encode({"deep": tree})


def test_deep_calls_are_no_crash():
    """Called near the end of the interpreter's own stack, the error is a StateError too."""

    def dig(levels):
        return dig(levels - 1) if levels else encode([[[[[[[[[[1]]]]]]]]]])

    depth, outcome = sys.getrecursionlimit(), None
    while outcome is None:
        depth -= 10
        try:
            outcome = dig(depth)
        except StateError as error:
            outcome = error
        except RecursionError:
            continue
    assert isinstance(outcome, StateError)


def test_a_small_value_that_unfolds_to_a_huge_one_is_refused(monkeypatch):
    """Sixty lists, each holding the one before twice, end in a StateError long before memory does."""
    monkeypatch.setattr("everystep.values.MAX_ITEMS", 10_000)
    tree = [1]
    for _ in range(60):
        tree = [tree, tree]
    with pytest.raises(StateError, match="10,000 items"):
        encode(tree)


# -- references ---------------------------------------------------------------------------------------------------------


def convert(value, path):
    """As a trainer does it."""
    if isinstance(value, torch.Tensor):
        return Ref(f"t:{path}", "tensor")
    if isinstance(value, np.ndarray):
        return Ref(f"n:{path}", "numpy")
    if isinstance(value, torch.dtype):
        return Tagged("torch.dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Tagged("torch.device", {"type": value.type, "index": value.index, "wide": (1,)})
    return None


TREE = {
    "w": torch.zeros(2), "rng": np.random.RandomState(0).get_state(), "dtype": [torch.float32], "device": torch.device("cpu"), "s": {3: torch.ones(1)}, "c": Color.RED, "$": [torch.ones(3)],
}  # fmt: skip


def test_refs_and_tags():
    """F23: tensors become references that ``resolve`` turns back, other types tags; both see the path and come back in place."""
    data = encode(TREE, path="top", convert=convert)
    seen = []

    def tagged(tag, payload):
        seen.append((tag, payload))
        return getattr(torch, payload) if tag == "torch.dtype" else torch.device(payload["type"])

    found = decode(data, resolve=lambda ref: (ref.kind, ref.name), tagged=tagged)
    assert found["w"] == ("tensor", "t:top.w")
    assert found["rng"][0] == "MT19937"
    assert found["rng"][1] == ("numpy", "n:top.rng[1]")
    assert found["dtype"] == [torch.float32]
    assert found["device"] == torch.device("cpu")
    assert found["s"] == {3: ("tensor", "t:top.s[3]")}
    assert found["c"] is Color.RED
    assert seen == [("torch.dtype", "float32"), ("torch.device", {"type": "cpu", "index": None, "wide": (1,)})]


def test_refs_are_listed_without_decoding():
    """``refs`` lists every reference in order, also behind tags and in odd mappings, and takes no text for one."""
    data = encode({**TREE, "text": '{"$":["ref",["tensor","no"]]}', "list": ["ref", ["tensor", "no"]]}, convert=convert)
    assert refs(data) == [Ref("t:w"), Ref("n:rng[1]", "numpy"), Ref("t:s[3]"), Ref("t:['$'][0]")]
    assert refs(msgspec.Raw(data)) == refs(memoryview(data)) == refs(data)


def test_without_callbacks_refs_and_tags_stay():
    """A program without torch can read the values: references and tags stay what they are."""
    found = decode(encode(TREE, convert=convert))
    assert found["w"] == Ref("t:w", "tensor")
    assert found["dtype"] == [Tagged("torch.dtype", "float32")]
    same(decode(encode({"a": Ref("x")}, convert=lambda value, path: value))["a"], Ref("x"))


def test_convert_may_return_another_value():
    """What ``convert`` returns in a value's place is stored; one that never ends is refused."""
    assert decode(encode([{1, 2}, Outer()], convert=lambda value, path: (1, 2))) == [{1, 2}, (1, 2)]
    with pytest.raises(StateError, match="nested"):
        encode(Outer(), convert=lambda value, path: Outer())


def test_errors_of_callbacks_pass_through():
    """An error that ``resolve`` raises, a missing tensor say, reaches the caller as it is."""

    def resolve(ref):
        raise LayoutError(f"{ref.name!r} is not there")

    with pytest.raises(LayoutError, match="'x' is not there"):
        decode(b'{"$":["ref",["tensor","x"]]}', resolve=resolve)


# -- classes that changed since --------------------------------------------------------------------------------------------


def test_a_class_that_is_gone_is_named(monkeypatch):
    """An enum or named tuple whose class, member or fields are gone is a LayoutError that says what to put back."""
    data = {value: encode(value) for value in (Color.RED, Bits.X | Bits.Y, Pair(1, 2))}
    module = types.ModuleType(__name__)
    monkeypatch.setitem(sys.modules, __name__, module)
    for encoded in data.values():
        with pytest.raises(LayoutError, match="no such class"):
            decode(encoded)
    module.Color = enum.Enum("Color", "BLUE")
    module.Bits = enum.Flag("Bits", "X")
    module.Pair = collections.namedtuple("Pair", "first second third")  # noqa: PYI024
    for encoded, why in zip(data.values(), ("'RED'", "Bits 3", "2 fields"), strict=True):
        with pytest.raises(LayoutError, match=why):
            decode(encoded)


def test_a_named_tuples_constructor_does_not_run():
    """Stored data does not run a class's own constructor."""
    data = encode(Point(1, 2)).replace(b"[1,2]", b"[null,2]")
    assert tuple(decode(data)) == (None, 2)
