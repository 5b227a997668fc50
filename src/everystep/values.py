"""Plain values <-> typed JSON. Tensors stand in it as references; what cannot be told in JSON without loss is refused, by its path.

Text, 64-bit integers, floats, booleans, None, lists and mappings with text keys are plain JSON. Everything else is an object with the
one key ``"$"``: ``{"$": [tag, payload]}``. A mapping whose keys are not text, or begin with ``$``, is such a tag itself, so
that nothing a user stores can be taken for a tag. Nothing is ever executed or imported for what the bytes say: enum members and named
tuples are looked up only in modules that the program has imported already.

Writing and reading stand in one module so that each tag's two ends are seen together.
"""

from __future__ import annotations

import base64
import binascii
import collections
import contextlib
import enum
import math
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from everystep.errors import CorruptionError, LayoutError, StateError

MAX_DEPTH = 100
"""Containers inside containers. Far below Python's own recursion limit, wherever in a program ``save`` is called."""

MAX_ITEMS = 20_000_000
"""Items of all containers together: a list that holds one list many times over, which holds ..., ends here and not with the memory."""

_MARK = "$"


class Ref(msgspec.Struct, frozen=True):
    """A tensor in the place of a value: the name it is stored under, and what it was (``"tensor"``, ``"numpy"``, the collector's words)."""

    name: str
    kind: str = "tensor"


class Tagged(msgspec.Struct, frozen=True):
    """A value of a type this module does not know: ``tag`` (``"torch.dtype"``) and a payload of plain values."""

    tag: str
    payload: object


_INT64 = 1 << 63
_FACTORIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        list,
        dict,
        set,
        frozenset,
        tuple,
        int,
        float,
        complex,
        str,
        bytes,
        bool,
        collections.OrderedDict,
        collections.Counter,
        collections.deque,
    )
}
_PATHS: dict[type, str] = {
    pathlib.PosixPath: "path", pathlib.WindowsPath: "windows-path",
    pathlib.PurePosixPath: "pure-posix-path", pathlib.PureWindowsPath: "pure-windows-path",
}  # fmt: skip
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcMm][0-9]{1,2}(\[[0-9a-zA-Z]{1,16}\])?|[US]")


# -- encoding -----------------------------------------------------------------------------------------------------------


def encode(tree: object, *, path: str = "", convert: Callable[[object, str], object | None] | None = None) -> bytes:
    """The tree as typed JSON; equal trees are equal bytes.

    Args:
        tree: Nested plain values.
        path: What the paths in messages begin with.
        convert: Called with (value, path) for each value whose type is none of the builtin ones here; returns a ``Ref``, a ``Tagged``
            or another value to store in its place, or None to leave it as it is.

    Raises:
        StateError: A value that cannot be stored without loss, a cycle, or nesting deeper than ``MAX_DEPTH``; ``key`` is the value's path.
    """
    encoder = _Encoder(path, convert)
    try:
        told = encoder.tell(tree)
        return msgspec.json.encode(told)
    except RecursionError:
        raise encoder.refuse("is nested too deeply here: Python's recursion limit was reached", "store a flatter value") from None


class _Encoder:
    """One walk over a tree; ``steps`` is the way to the value at hand."""

    def __init__(self, root: str, convert: Callable[[object, str], object | None] | None) -> None:
        self.root = root
        self.convert = convert
        self.steps: list[object] = []
        self.open: set[int] = set()
        self.items = 0

    def path(self) -> str:
        text = self.root
        for step in self.steps:
            if isinstance(step, _Key):
                name = step.key
                if isinstance(name, str) and re.fullmatch(r"[\w-]+", name):
                    text += f".{name}" if text else name
                else:
                    text += f"[{name!r:.80}]"
            else:
                text += f"[{step}]"
        return text or "(the value itself)"

    def refuse(self, why: str, hint: str = "") -> StateError:
        path = self.path()
        return StateError(
            f"{path} {why}", key=path, kind="value", hint=hint or "leave it out of the state, or store what is needed to make it again"
        )

    def tell(self, value: Any) -> object:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return value if _is_text(value) else _tag("text", _base64(value.encode("utf-8", "surrogatepass")))
        if kind is int:
            return value if -_INT64 <= value < _INT64 else _tag("int", hex(value))
        if kind is float:
            return value if math.isfinite(value) else _tag("float", str(value))
        tell = _CONTAINERS.get(kind)
        if tell is not None:
            with self.inside(value, len(value)):
                return tell(self, value)
        if kind is bytes or kind is bytearray:
            return _tag(kind.__name__, _base64(value))
        if kind is complex:
            return _tag("complex", [self.tell(value.real), self.tell(value.imag)])
        return self.tell_other(value)

    def tell_other(self, value: Any) -> object:
        """Types that are no exact builtin."""
        if self.convert is not None:
            other = self.convert(value, self.path())
            if isinstance(other, Ref):
                return _tag("ref", [other.kind, other.name])
            if isinstance(other, Tagged):
                return _tag("tagged", [other.tag, self.tell(other.payload)])
            if other is not None and other is not value:
                with self.inside(value, 1):
                    return self.tell(other)
        kind = type(value)
        if isinstance(value, enum.Enum):
            return self.tell_enum(value)
        if kind in _PATHS:
            return _tag("path", [_PATHS[kind], self.tell(str(value))])
        if isinstance(value, tuple):
            return self.tell_tuple(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            dtype = value.dtype.str
            if isinstance(value, numpy.str_):  # neither an empty text nor NULs at its end survive an array of one
                return _tag("numpy", ["U", _base64(value.encode("utf-8", "surrogatepass"))])
            if isinstance(value, numpy.bytes_):
                return _tag("numpy", ["S", _base64(value[:])])
            if not _NUMPY_DTYPE.fullmatch(dtype):
                raise self.refuse(f"is a numpy scalar of dtype {value.dtype!r}, which cannot be stored")
            return _tag("numpy", [dtype, _base64(value.tobytes())])
        if isinstance(value, (bool, int, float, str, bytes, list, dict, set, frozenset)):
            raise self.refuse(
                f"is a {_name_of(kind)}, a subclass of a builtin type that would come back as something else",
                "convert it to the builtin type",
            )
        raise self.refuse(f"is a {_name_of(kind)}, which cannot be stored")

    # -- containers ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self, value: object, count: int) -> Iterator[None]:
        """Guards against cycles, depth and size while the contents of ``value`` are told. After an error the way to it stays known."""
        if id(value) in self.open:
            raise self.refuse("contains itself", "break the cycle")
        if len(self.open) >= MAX_DEPTH:
            raise self.refuse(f"is nested more than {MAX_DEPTH} levels deep", "store a flatter value")
        self.items += count
        if self.items > MAX_ITEMS:
            raise self.refuse(f"brings the plain values to more than {MAX_ITEMS:,} items", "store large data as tensors")
        self.open.add(id(value))
        yield
        self.open.discard(id(value))

    def items_of(self, values: Any) -> list[object]:
        told = []
        for index, value in enumerate(values):
            self.steps.append(index)
            told.append(self.tell(value))
            self.steps.pop()
        return told

    def pairs_of(self, mapping: Mapping[Any, Any]) -> list[object]:
        told: list[object] = []
        for key, value in mapping.items():
            self.steps.append(_Key(key))
            told.append([self.tell(key), self.tell(value)])
            self.steps.pop()
        return told

    def tell_list(self, value: list[object]) -> object:
        return self.items_of(value)

    def tell_tuple(self, value: tuple[object, ...]) -> object:
        kind = type(value)
        if kind is tuple or (kind.__module__, kind.__qualname__) == ("torch", "Size"):
            if kind is tuple:
                return _tag("tuple", self.items_of(value))
            with self.inside(value, len(value)):
                return _tag("tuple", self.items_of(value))
        if _fields_of(kind) is None or getattr(value, "__dict__", None):
            raise self.refuse(f"is a {_name_of(kind)}, a tuple that would come back as something else", "convert it to a plain tuple")
        with self.inside(value, len(value)):
            return _tag("namedtuple", [*self.address(kind), self.items_of(value)])

    def tell_dict(self, value: dict[object, object]) -> object:
        if all(type(key) is str and key[:1] != _MARK and _is_text(key) for key in value):
            told: dict[object, object] = {}
            for key, item in value.items():
                self.steps.append(_Key(key))
                told[key] = self.tell(item)
                self.steps.pop()
            return told
        return _tag("dict", self.pairs_of(value))

    def tell_set(self, value: set[object] | frozenset[object]) -> object:
        # A set has no order: sorted by their bytes, equal sets are equal bytes.
        return _tag(type(value).__name__, sorted(self.items_of(value), key=msgspec.json.encode))

    def tell_ordered(self, value: collections.OrderedDict[object, object]) -> object:
        # torch hangs its ``_metadata`` on state dicts; it is the collector's business.
        if set(vars(value)) - {"_metadata"}:
            raise self.refuse("is an OrderedDict with attributes, which would be lost")
        return _tag("OrderedDict", self.pairs_of(value))

    def tell_counter(self, value: collections.Counter[object]) -> object:
        return _tag("Counter", self.pairs_of(value))

    def tell_defaultdict(self, value: collections.defaultdict[object, object]) -> object:
        factory = value.default_factory
        if factory is not None and (not isinstance(factory, type) or _FACTORIES.get(factory.__name__) is not factory):
            raise self.refuse("is a defaultdict whose factory cannot be stored", "store dict(it)")
        return _tag("defaultdict", [None if factory is None else factory.__name__, self.pairs_of(value)])

    def tell_deque(self, value: collections.deque[object]) -> object:
        return _tag("deque", [value.maxlen, self.items_of(value)])

    def tell_enum(self, value: enum.Enum) -> object:
        kind = type(value)
        address = self.address(kind)
        if kind.__members__.get(value.name or "") is value:
            return _tag("enum", [*address, value.name])
        if isinstance(value, enum.Flag) and type(value.value) is int:
            return _tag("flag", [*address, self.tell(value.value)])
        raise self.refuse(f"is a member of {_name_of(kind)} that its class does not list")

    def address(self, kind: type) -> tuple[str, str]:
        """Module and qualified name, when the class can be found again by them."""
        if _look_up(kind.__module__, kind.__qualname__) is not kind:
            raise self.refuse(
                f"is a {_name_of(kind)}, whose class cannot be found again by its name", "define the class at the top of a module"
            )
        return kind.__module__, kind.__qualname__


class _Key(msgspec.Struct):
    """A step by key, as opposed to one by index."""

    key: object


_CONTAINERS: dict[type, Callable[[_Encoder, Any], object]] = {
    list: _Encoder.tell_list, dict: _Encoder.tell_dict, tuple: _Encoder.tell_tuple, set: _Encoder.tell_set, frozenset: _Encoder.tell_set,
    collections.OrderedDict: _Encoder.tell_ordered, collections.Counter: _Encoder.tell_counter,
    collections.defaultdict: _Encoder.tell_defaultdict, collections.deque: _Encoder.tell_deque,
}  # fmt: skip


def _tag(tag: str, payload: object) -> dict[str, object]:
    return {_MARK: [tag, payload]}


def _is_text(value: str) -> bool:
    """Whether UTF-8 can hold it: no lone surrogates."""
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _look_up(module: str, qualname: str) -> object | None:
    """What a module that is imported already has under a name. Reads dictionaries only: no import, ``__getattr__`` or descriptor runs."""
    found: object = sys.modules.get(module)
    # By ``type(found)``: isinstance would ask ``found.__class__``, which may be code.
    if not issubclass(type(found), types.ModuleType):
        return None
    for depth, word in enumerate(qualname.split(".")):
        if depth and not issubclass(type(found), type):
            return None
        found = vars(found).get(word)
    return found


def _fields_of(kind: type) -> tuple[str, ...] | None:
    """The fields of a class made by ``namedtuple`` or ``NamedTuple``, or of a subclass without a constructor of its own."""
    fields = getattr(kind, "_fields", None)
    if not issubclass(kind, tuple) or not isinstance(fields, tuple) or not hasattr(kind, "_make"):
        return None
    return fields


# -- decoding -----------------------------------------------------------------------------------------------------------


def decode(
    data: bytes | memoryview | msgspec.Raw,
    *,
    resolve: Callable[[Ref], object] | None = None,
    tagged: Callable[[str, object], object] | None = None,
) -> Any:
    """The tree in ``data``.

    Args:
        data: What ``encode`` returned.
        resolve: Makes of each ``Ref`` what it stands for; without it the ``Ref`` itself is put there.
        tagged: The same for each ``Tagged`` (its tag and decoded payload).

    Raises:
        CorruptionError: Not such JSON.
        LayoutError: An enum or named tuple whose class this program has not imported (the message names it).
    """
    decoder = _Decoder(resolve, tagged)
    tree = _load(data)
    try:
        return decoder.read(tree)
    except RecursionError:
        raise _corrupt("they are nested too deeply") from None


def refs(data: bytes | memoryview | msgspec.Raw) -> list[Ref]:
    """Every ``Ref`` in encoded values, in their order, without decoding them. CorruptionError as in ``decode``."""
    found = []
    stack = [_load(data)]
    while stack:
        told = stack.pop()
        if isinstance(told, list):
            stack += reversed(told)
        elif isinstance(told, dict):
            if _MARK in told:
                tag, payload = _untag(told)
                if tag == "ref":
                    found.append(_ref(payload))
                else:
                    stack.append(payload)
            else:
                stack += reversed(told.values())
    return found


def _load(data: bytes | memoryview | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"no JSON ({error})") from None


def _corrupt(why: str) -> CorruptionError:
    return CorruptionError(f"the stored plain values cannot be read: {why}", kind="values", hint="take another copy or an older step")


def _expect(good: object, tag: str) -> None:
    if not good:
        raise _corrupt(f"tag {tag!r:.40} with a payload that does not fit it")


def _untag(told: dict[str, Any]) -> tuple[str, Any]:
    pair = told[_MARK]
    if len(told) != 1 or not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise _corrupt(f"a {_MARK!r} that is no tag")
    return pair[0], pair[1]


def _ref(payload: Any) -> Ref:
    _expect(isinstance(payload, list) and len(payload) == 2 and all(isinstance(word, str) for word in payload), "ref")
    return Ref(payload[1], payload[0])


def _bytes(payload: Any, tag: str) -> bytes:
    _expect(isinstance(payload, str), tag)
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise _corrupt(f"tag {tag!r} does not hold base64") from None


class _Decoder:
    def __init__(self, resolve: Callable[[Ref], object] | None, tagged: Callable[[str, object], object] | None) -> None:
        self.resolve = resolve
        self.tagged = tagged

    def read(self, told: Any) -> Any:
        if isinstance(told, list):
            return [self.read(item) for item in told]
        if not isinstance(told, dict):
            return told
        if _MARK not in told:
            if any(key[:1] == _MARK for key in told):
                raise _corrupt(f"a key that begins with {_MARK!r} outside a tag")
            return {key: self.read(item) for key, item in told.items()}
        tag, payload = _untag(told)
        read = _READERS.get(tag)
        if read is None:
            raise _corrupt(f"unknown tag {tag!r:.40}")
        return read(self, tag, payload)

    def read_ref(self, tag: str, payload: Any) -> object:
        ref = _ref(payload)
        return ref if self.resolve is None else self.resolve(ref)

    def read_tagged(self, tag: str, payload: Any) -> object:
        _expect(isinstance(payload, list) and len(payload) == 2 and isinstance(payload[0], str), tag)
        value = self.read(payload[1])
        return Tagged(payload[0], value) if self.tagged is None else self.tagged(payload[0], value)

    def read_number(self, tag: str, payload: Any) -> object:
        if tag == "complex":
            parts = [self.read(part) for part in payload] if isinstance(payload, list) else []
            _expect(len(parts) == 2 and all(type(part) is float for part in parts), tag)
            return complex(parts[0], parts[1])
        _expect(isinstance(payload, str) and re.fullmatch(r"-?0x[0-9a-f]+" if tag == "int" else r"nan|-?inf", payload), tag)
        return int(payload, 16) if tag == "int" else float(payload)

    def read_bytes(self, tag: str, payload: Any) -> object:
        data = _bytes(payload, tag)
        if tag == "bytearray":
            return bytearray(data)
        if tag == "bytes":
            return data
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise _corrupt("a text that is none") from None

    def read_sequence(self, tag: str, payload: Any) -> object:
        _expect(isinstance(payload, list), tag)
        values = [self.read(item) for item in payload]
        if tag == "tuple":
            return tuple(values)
        try:
            found = set(values)
        except TypeError:
            raise _corrupt(f"a {tag} with members that cannot be in one") from None
        _expect(len(found) == len(values), tag)
        return found if tag == "set" else frozenset(found)

    def read_deque(self, tag: str, payload: Any) -> object:
        _expect(isinstance(payload, list) and len(payload) == 2 and isinstance(payload[1], list), tag)
        maxlen, items = payload
        _expect(maxlen is None or (type(maxlen) is int and len(items) <= maxlen <= sys.maxsize), tag)
        return collections.deque((self.read(item) for item in items), maxlen)

    def read_mapping(self, tag: str, payload: Any) -> object:
        made: dict[object, object] = {}
        if tag == "OrderedDict":
            made = collections.OrderedDict()
        elif tag == "Counter":
            made = collections.Counter()  # type: ignore[assignment]
        elif tag == "defaultdict":
            _expect(isinstance(payload, list) and len(payload) == 2, tag)
            name, payload = payload
            _expect(name is None or (isinstance(name, str) and name in _FACTORIES), tag)
            made = collections.defaultdict(None if name is None else _FACTORIES[name])
        _expect(isinstance(payload, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in payload), tag)
        for pair in payload:
            key, value = self.read(pair[0]), self.read(pair[1])
            try:
                made[key] = value
            except TypeError:
                raise _corrupt(f"a {tag} with a key that cannot be one") from None
        _expect(len(made) == len(payload), tag)
        return made

    def read_path(self, tag: str, payload: Any) -> object:
        _expect(isinstance(payload, list) and len(payload) == 2, tag)
        kind, text = payload[0], self.read(payload[1])
        _expect(isinstance(text, str) and isinstance(kind, str) and kind in _PATHS.values(), tag)
        if kind == _PATHS.get(type(pathlib.Path())):
            return pathlib.Path(text)
        # The other system's paths cannot be made here; their pure form can.
        return pathlib.PureWindowsPath(text) if "windows" in kind else pathlib.PurePosixPath(text)

    def read_class(self, tag: str, payload: Any, parent: type) -> Any:
        """The class that a tag names, never imported for it."""
        _expect(isinstance(payload, list) and len(payload) == 3 and isinstance(payload[0], str) and isinstance(payload[1], str), tag)
        module, qualname, _ = payload
        if module not in sys.modules:
            raise LayoutError(
                f"a stored {tag} is of {module}.{qualname}",
                key=f"{module}.{qualname}",
                kind="import",
                hint=f"import {module} before restoring",
            )
        found = _look_up(module, qualname)
        if not issubclass(type(found), type) or not issubclass(cast("type", found), parent):
            raise LayoutError(
                f"a stored {tag} is of {module}.{qualname}, and there is no such class now",
                key=f"{module}.{qualname}",
                kind="import",
                hint=f"put {qualname} back into {module}",
            )
        return found

    def read_enum(self, tag: str, payload: Any) -> object:
        cls: Any = self.read_class(tag, payload, enum.Flag if tag == "flag" else enum.Enum)
        if tag == "flag":
            value = self.read(payload[2])
            _expect(type(value) is int, tag)
            try:
                return cls(value)
            except ValueError:
                pass
        else:
            value = payload[2]
            _expect(isinstance(value, str), tag)
            if value in cls.__members__:
                return cls.__members__[value]
        raise LayoutError(
            f"a stored {tag} is {payload[1]} {value!r:.80}, which that class does not have now",
            key=f"{payload[0]}.{payload[1]}",
            kind="import",
            hint=f"put the member back into {payload[0]}.{payload[1]}",
        )

    def read_namedtuple(self, tag: str, payload: Any) -> object:
        cls = self.read_class(tag, payload, tuple)
        fields = _fields_of(cls)
        _expect(isinstance(payload[2], list), tag)
        values: Sequence[object] = [self.read(item) for item in payload[2]]
        if fields is None or len(fields) != len(values):
            raise LayoutError(
                f"a stored named tuple of {payload[0]}.{payload[1]} has {len(values)} fields, that class now has {fields!r:.100}",
                key=f"{payload[0]}.{payload[1]}",
                kind="import",
            )
        # Not through the class: a constructor of its own must not run on stored data.
        return tuple.__new__(cls, values)

    def read_numpy(self, tag: str, payload: Any) -> object:
        _expect(isinstance(payload, list) and len(payload) == 2 and isinstance(payload[0], str) and _NUMPY_DTYPE.fullmatch(payload[0]), tag)
        import numpy as np  # deferred: most states hold no numpy scalar, and the agent and the command line none at all

        data = _bytes(payload[1], tag)
        try:
            if payload[0] in ("U", "S"):
                return np.str_(data.decode("utf-8", "surrogatepass")) if payload[0] == "U" else np.bytes_(data)
            dtype = np.dtype(payload[0])
            _expect(dtype.itemsize == len(data), tag)
            return np.ndarray((), dtype, data)[()]
        except (TypeError, ValueError) as error:
            raise _corrupt(f"a numpy scalar of dtype {payload[0]!r}: {error}") from None


_READERS: dict[str, Callable[[_Decoder, str, Any], object]] = {
    "ref": _Decoder.read_ref, "tagged": _Decoder.read_tagged,
    "int": _Decoder.read_number, "float": _Decoder.read_number, "complex": _Decoder.read_number,
    "text": _Decoder.read_bytes, "bytes": _Decoder.read_bytes, "bytearray": _Decoder.read_bytes,
    "tuple": _Decoder.read_sequence, "set": _Decoder.read_sequence, "frozenset": _Decoder.read_sequence, "deque": _Decoder.read_deque,
    "dict": _Decoder.read_mapping, "OrderedDict": _Decoder.read_mapping,
    "Counter": _Decoder.read_mapping, "defaultdict": _Decoder.read_mapping,
    "path": _Decoder.read_path, "enum": _Decoder.read_enum, "flag": _Decoder.read_enum, "namedtuple": _Decoder.read_namedtuple,
    "numpy": _Decoder.read_numpy,
}  # fmt: skip
