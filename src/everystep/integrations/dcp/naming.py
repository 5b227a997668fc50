"""An everystep checkpoint under the names that DCP would give the same state, and the other way round.

DCP flattens a state dict: keys joined with dots, every tensor an entry, every other leaf an entry of bytes. Everystep's names of tensors
are made in the same way, except that an optimizer's state bears the full names of the parameters
(``optim.state.model.0.weight.exp_avg``), where ``get_state_dict`` leaves the module's own key out. Plain values are in everystep's
document, not under names; here they get DCP's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from everystep import values
from everystep.errors import CorruptionError
from everystep.foreign.dtypes import DTYPES
from everystep.trainer.restore_optimizer import SavedOptimizer
from everystep.trainer.restoring import Restore, TensorReader, document_of, kind_of, told_refs
from everystep.trainer.tensors import dotted, untell

Path = tuple["str | int", ...]


class Array:
    """Stands for a numpy array of the checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name


class Named(NamedTuple):
    """One entry under DCP's name: the name of a stored tensor, or a plain value (in which tensors are stand-ins)."""

    tensor: str | None
    value: Any
    path: Path


class Names:
    """All entries of a checkpoint under DCP's names."""

    def __init__(self, reader: TensorReader) -> None:
        self.reader = reader
        self.entries: dict[str, Named] = {}
        self._job = Restore(reader, strict=False, include=None, cast=False)
        self._stand_ins: dict[int, tuple[torch.Tensor, str]] = {}
        document = document_of(reader)
        self._modules = sorted(_modules((), document), key=len, reverse=True)
        groups: list[tuple[tuple[object, ...], list[tuple[Any, list[str]]]]] = []
        tree = self._node((), document, groups)
        flat, paths = flatten_state_dict(tree)
        for name, value in flat.items():
            self.entries[name] = Named(self._name_of(value), value, tuple(paths[name]))
        for keys, saved in groups:
            self._each(keys, saved)

    def materialised(self, value: Any, made: Callable[[str, str], Any]) -> Any:
        """A plain value with what ``made`` gives for each name and kind (``tensor`` or ``numpy``) in the place of the stand-ins."""
        name = self._name_of(value)
        if name is not None:
            return made(name, "tensor")
        if isinstance(value, Array):
            return made(value.name, "numpy")
        if isinstance(value, dict):
            inner = {key: self.materialised(item, made) for key, item in value.items()}
            return inner if any(inner[key] is not value[key] for key in inner) else value
        if isinstance(value, (list, tuple)):
            items = [self.materialised(item, made) for item in value]
            if all(item is before for item, before in zip(items, value, strict=True)):
                return value
            return items if isinstance(value, list) else tuple.__new__(type(value), items)
        return value

    def refers(self, value: Any) -> list[str]:
        """Stored names of the tensors and arrays inside a plain value."""
        found: list[str] = []

        self.materialised(value, lambda name, _: found.append(name))
        return found

    def _name_of(self, value: Any) -> str | None:
        known = self._stand_ins.get(id(value))
        return None if known is None else known[1]

    def _stand_in(self, name: str) -> torch.Tensor:
        spec = self.reader.tensors.get(name)
        if spec is None:
            raise CorruptionError(f"the checkpoint's values refer to tensor {name!r}, which it does not hold", key=name, kind="values",
                                  hint="take another copy or an older step")  # fmt: skip
        made = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
        self._stand_ins[id(made)] = made, name
        return made

    def _resolve(self, ref: values.Ref) -> object:
        return Array(ref.name) if ref.kind == "numpy" else self._stand_in(ref.name)

    def _decode(self, told: object) -> Any:
        return values.decode(msgspec.json.encode(told), resolve=self._resolve, tagged=untell)

    # -- the document ------------------------------------------------------------------------------------------------------------

    def _node(self, keys: tuple[object, ...], told: Mapping[str, Any], groups: list[Any]) -> Any:
        kind, body = kind_of(told)
        if kind == "module":
            return self._module(dotted(keys), body)
        if kind == "optimizer":
            saved = SavedOptimizer(body, dotted(keys), self._job)
            groups.append((keys, [(self._decode(group), names) for group, names in saved.groups]))
            return self._optimizer(saved)
        if kind in {"value", "stateful"}:
            return self._decode(body)
        if kind == "dict":
            pairs = [(self._job.decode(key), child) for key, child in body]
            return {key: self._node((*keys, key), child, groups) for key, child in pairs if child is not None}
        if kind in {"list", "tuple"}:
            # DCP makes lists of both: a tuple would be one entry of bytes.
            return [self._node((*keys, index), child, groups) for index, child in enumerate(body)]
        raise CorruptionError(f"a checkpoint's values hold an entry of unknown kind {kind!r:.40}", kind="values",
                              hint="written by a newer version? upgrade everystep")  # fmt: skip

    def _module(self, path: str, plain: Mapping[str, Any]) -> dict[str, Any]:
        prefix = f"{path}."
        inner = {name for told in plain.values() for name in told_refs(told)}
        made: dict[str, Any] = {
            name.removeprefix(prefix): self._stand_in(name) for name in self.reader.tensors if name.startswith(prefix) and name not in inner
        }
        made.update((name, self._decode(told)) for name, told in plain.items())
        return made

    def _optimizer(self, saved: SavedOptimizer) -> dict[str, Any]:
        state: dict[Any, Any] = {}
        for name, entry in saved.flat.items():
            state[self._fqn(name)] = {key: self._resolve(value) if isinstance(value, values.Ref) else value for key, value in entry.items()}
        state.update((self._fqn(name), self._decode(told)) for name, told in saved.loose.items())
        state.update((key, self._decode(told)) for key, told in saved.others)
        groups = [{**self._decode(told), "params": [self._fqn(name) for name in names]} for told, names in saved.groups]
        return {"state": state, "param_groups": groups, **self._decode(saved.extra)}

    def _each(self, keys: tuple[object, ...], groups: Sequence[tuple[Any, Sequence[str]]]) -> None:
        """Hyperparameters once for each parameter, as ``flatten_optimizer_state_dict`` has them."""
        outer = tuple(key if type(key) is int else str(key) for key in keys)
        for hyper, names in groups:
            for name in names:
                for key, value in hyper.items():
                    inner = f"param_groups.{self._fqn(name)}.{key}"
                    self.entries.setdefault(dotted((*keys, inner)), Named(self._name_of(value), value, (*outer, inner)))

    def _fqn(self, name: str) -> str:
        """A parameter's name without its module's place in the state."""
        return next((name.removeprefix(path + ".") for path in self._modules if name.startswith(path + ".")), name)


def _modules(keys: tuple[object, ...], told: Mapping[str, Any]) -> list[str]:
    kind, body = kind_of(told)
    if kind == "module":
        return [dotted(keys)]
    if kind == "dict":
        return [
            path for key, child in body if child is not None for path in _modules((*keys, values.decode(msgspec.json.encode(key))), child)
        ]
    if kind in {"list", "tuple"}:
        return [path for index, child in enumerate(body) for path in _modules((*keys, index), child)]
    return []


def nested(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """The state that a planner flattened: mappings by text, lists by number. A name without a way stays a key of its own."""
    root = _Node()
    for name, value in flat.items():
        path = paths.get(name) or (name,)
        into = root
        for part in path[:-1]:
            into = into.setdefault(part, _Node())
        into[path[-1]] = value
    return {key: _plain(value) for key, value in root.items()}


class _Node(dict[Any, Any]):
    """A container of the state, as opposed to a value that is a mapping."""


def _plain(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    made = {key: _plain(item) for key, item in value.items()}
    if made and all(type(key) is int for key in made):
        return [made.get(at) for at in range(max(made) + 1)]
    return made
