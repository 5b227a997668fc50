"""The walk over a state: which of its entries are modules, optimizers, stateful objects and data."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from everystep import values
from everystep.errors import StateError
from everystep.trainer.optimizers import is_optimizer
from everystep.trainer.rng import Stateful, generator
from everystep.trainer.tensors import Found, array_tensor, dotted, is_text, ref_kind, refused, tell, way

_SCALARS = frozenset({type(None), bool, int, float, str, bytes, complex})
_NOTHING = object()
_SEQUENCES = (list, tuple, collections.deque)


@dataclasses.dataclass(frozen=True)
class ModuleNode:
    """A ``torch.nn.Module``."""

    keys: tuple[object, ...]
    module: torch.nn.Module


@dataclasses.dataclass(frozen=True)
class OptimizerNode:
    """An optimizer, or a wrapper around one."""

    keys: tuple[object, ...]
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class StatefulNode:
    """An object with ``state_dict`` and ``load_state_dict``; ``is_rng``: restored after all others."""

    keys: tuple[object, ...]
    owner: Stateful
    is_rng: bool


@dataclasses.dataclass(frozen=True)
class DataNode:
    """Tensors, arrays and plain values, nested, with no object in them."""

    keys: tuple[object, ...]
    value: Any


@dataclasses.dataclass(frozen=True)
class BranchNode:
    """A mapping, list or tuple with objects somewhere in it. ``kind`` is ``dict``, ``list`` or ``tuple``."""

    keys: tuple[object, ...]
    kind: str
    container: Any
    children: Sequence[tuple[object, Node]]


Node: TypeAlias = "ModuleNode | OptimizerNode | StatefulNode | DataNode | BranchNode"


def scan(state: Mapping[str, Any]) -> BranchNode:
    """The state's nodes.

    Raises:
        StateError: Not a mapping, or a top-level key that is empty or no text.
    """
    if not isinstance(state, Mapping):
        raise StateError(
            f"the state is a {type(state).__qualname__}, not a mapping of names to objects", kind="state", hint='pass {"model": model, ...}'
        )
    for key in state:
        if not isinstance(key, str) or not key or not is_text(key):
            raise StateError(
                f"top-level key {key!r} of the state is not a name", key=str(key), kind="names", hint="use non-empty text keys"
            )
    return BranchNode((), "dict", state, [(key, _node(value, (key,))) for key, value in state.items()])


def leaves_of(node: Node) -> Iterator[Node]:
    """The nodes that are no branches, in order."""
    if isinstance(node, BranchNode):
        for _, child in node.children:
            yield from leaves_of(child)
    else:
        yield node


def _object(value: object, keys: tuple[object, ...]) -> Node | None:
    """A node for a value that is an object with a life of its own."""
    if type(value) in _SCALARS or isinstance(value, (torch.Tensor, np.ndarray, type)):
        return None
    if isinstance(value, torch.nn.Module):
        return ModuleNode(keys, value)
    if is_optimizer(value):
        return OptimizerNode(keys, value)
    rng = generator(value)
    if rng is not None:
        return StatefulNode(keys, rng, is_rng=True)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        stateful: Any = value
        return StatefulNode(keys, stateful, is_rng=False)
    return None


def _node(value: Any, keys: tuple[object, ...]) -> Node:
    node = _object(value, keys)
    if node is not None:
        return node
    if isinstance(value, (Mapping, list, tuple)) and _has_objects(value, set()):
        if isinstance(value, Mapping):
            return BranchNode(keys, "dict", value, [(key, _node(item, (*keys, key))) for key, item in value.items()])
        kind = "list" if isinstance(value, list) else "tuple"
        return BranchNode(keys, kind, value, [(index, _node(item, (*keys, index))) for index, item in enumerate(value)])
    return DataNode(keys, value)


def _has_objects(container: Any, open_: set[int]) -> bool:
    if id(container) in open_:  # a cycle: the encoder refuses it, with its path
        return False
    items = container.values() if isinstance(container, Mapping) else container
    if _SCALARS.issuperset(map(type, items)):
        return False
    open_.add(id(container))
    found = any(
        _has_objects(item, open_)
        if isinstance(item, (Mapping, list, tuple)) and _object(item, ()) is None
        else _object(item, ()) is not None
        for item in items
    )
    open_.discard(id(container))
    return found


def has_tensors(value: Any, open_: set[int] | None = None) -> bool:
    """Whether there is a tensor (no array) in plain data."""
    open_ = set() if open_ is None else open_
    if isinstance(value, torch.Tensor):
        return True
    if not isinstance(value, (Mapping, *_SEQUENCES)) or id(value) in open_:
        return False
    items: Any = value.values() if isinstance(value, Mapping) else value
    if _SCALARS.issuperset(map(type, items)):
        return False
    open_.add(id(value))
    found = any(has_tensors(item, open_) for item in items)
    open_.discard(id(value))
    return found


# -- data with tensors in it -----------------------------------------------------------------------------------------


def _tensors_in(value: Any, keys: tuple[object, ...], open_: set[int]) -> Iterator[tuple[Any, tuple[object, ...]]]:
    """Tensors and arrays in the order in which the encoder meets them, each with the way to it."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield value, keys
        return
    if not isinstance(value, (Mapping, *_SEQUENCES)) or id(value) in open_ or len(open_) > values.MAX_DEPTH:
        return
    items: Any = value.values() if isinstance(value, Mapping) else value
    if _SCALARS.issuperset(map(type, items)):
        return
    open_.add(id(value))
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _tensors_in(item, (*keys, key), open_)
    open_.discard(id(value))


def encode_data(
    value: Any,
    keys: tuple[object, ...],
    into: list[Found],
    is_late: Callable[[str, torch.Tensor], bool] | None = None,
    called: Callable[[str, torch.Tensor], str] | None = None,
) -> bytes:
    """Typed JSON of plain data; its tensors are appended to ``into`` and stand in it by name (``called`` may give them another)."""
    waiting = _tensors_in(value, keys, set())

    def convert(item: object, path: str) -> object | None:
        if not isinstance(item, (torch.Tensor, np.ndarray)):
            return tell(item)
        expected, at = next(waiting, (_NOTHING, ()))
        if expected is not item:
            raise refused(path, "is where tensors have no stable name (in a set, or as a key)", "keep tensors in mappings, lists or tuples")
        name = dotted(at)
        if not all(map(str, at)):
            raise StateError(f"{way(at)} has an empty key, so its tensor has no name", key=name, kind="names", hint="use non-empty keys")
        tensor: torch.Tensor = array_tensor(item, name) if isinstance(item, np.ndarray) else item
        if called is not None:
            name = called(name, tensor)
        into.append(Found(name, tensor, bool(is_late and is_late(str(at[-1]), tensor)), at))
        return values.Ref(name, ref_kind(item))

    return values.encode(value, path=dotted(keys), convert=convert)
