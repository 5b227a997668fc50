"""Optimizers: their state by the names of their parameters, in order of nothing but what is there.

An optimizer's part of the values is ``{"class": its name, "groups": [{"values": hyperparameters, "params": [name, ...]}],
"flat": [...], "loose": [...], "others": [...], "extra": {...}}``. ``flat`` describes the usual case, a dictionary of tensors and numbers
for each parameter, for all parameters of one form at once: the form's keys, the parameters (as runs of positions in the groups' names),
the numbers in columns. The tensors are called ``<optimizer>.state.<parameter>.<key>``. ``loose`` are states with lists or dictionaries in
them (LBFGS), ``others`` states kept under something that is no parameter, ``extra`` what a subclass adds in a ``state_dict`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch

from everystep import values
from everystep.errors import StateError
from everystep.trainer.sharding import as_dtensor, local_of
from everystep.trainer.tensors import Found

_NUMBERS = (type(None), bool, int, float, str)

_DICT = frozenset({dict})

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that say how to compute, not what: a restored optimizer keeps its own."""

Tell = Callable[[object, tuple[object, ...], Callable[[str, torch.Tensor], bool]], bytes]
"""Encodes a tree with tensors: (tree, way to it, which tensors are late) -> typed JSON. The collector's."""


def is_optimizer(value: object) -> bool:
    """A torch optimizer, or an object that looks like one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, (type, torch.nn.Module)):
        return False
    return callable(getattr(value, "step", None)) and hasattr(value, "param_groups") and callable(getattr(value, "state_dict", None))


def innermost(optimizer: Any) -> Any:
    """The optimizer that holds the state: wrappers keep it as ``.optimizer``."""
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer or not is_optimizer(inner):
            return optimizer
        optimizer = inner


def is_fenced(optimizer: object) -> bool:
    """Whether its ``step`` runs torch's step hooks."""
    return isinstance(optimizer, torch.optim.Optimizer) and bool(getattr(type(optimizer).step, "hooked", False))


def parameter_names(optimizer: Any, path: str, names: Mapping[int, str]) -> list[list[str]]:
    """For each group the full names of its parameters: from the state, else those the optimizer was given.

    Raises:
        StateError: A parameter without a name, or two of one name.
    """
    found: dict[str, int] = {}
    groups: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        named = []
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter)) or (given[index] if given else None)
            if name is None:
                raise StateError(
                    f"optimizer {path!r}: parameter {index} of group {number}, of shape {tuple(parameter.shape)}, "
                    "is in no module of the state, so it has no name",
                    key=path,
                    kind="unnamed-parameter",
                    hint="put the module that owns it into the state too",
                )
            if found.setdefault(name, id(parameter)) != id(parameter):
                raise StateError(
                    f"optimizer {path!r} has two parameters called {name!r}",
                    key=path,
                    kind="names",
                    hint="put the modules that own them into the state",
                )
            named.append(name)
        groups.append(named)
    return groups


def is_flat(entry: object) -> TypeGuard[dict[str, Any]]:
    """Whether one parameter's state is a dictionary of tensors and numbers."""
    return type(entry) is dict and all(type(key) is str and isinstance(value, (torch.Tensor, *_NUMBERS)) for key, value in entry.items())


def is_late(key: str, tensor: torch.Tensor) -> bool:
    """Whether only ``step`` changes it, and it is worth copying late: scalars are copied at once."""
    return key != "step" and tensor.numel() > 1


def _runs(positions: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1][1] += 1
        else:
            runs.append([position, position + 1])
    return runs


def positions(runs: Sequence[Sequence[int]]) -> Iterator[int]:
    """The positions in runs of ``[begin, end)``, one by one: a damaged run may claim any number. ValueError where one begins below 0."""
    for begin, end in runs:
        if begin < 0:
            raise ValueError(f"a run of parameters begins at {begin}")
        yield from range(begin, end)


class OptimizerEntries:
    """One optimizer of the state, with what need not be looked up again while it does not change."""

    def __init__(self, given: Any, keys: tuple[object, ...], path: str, names: Mapping[int, str]) -> None:
        self.given = given
        self.keys = keys
        self.path = path
        self.optimizer = innermost(given)
        if not hasattr(self.optimizer, "state") or not isinstance(self.optimizer.state, Mapping):
            raise StateError(
                f"{path!r} is a {type(given).__qualname__}, an optimizer that does not show its state by parameter",
                key=path,
                kind="optimizer",
                hint="put the torch optimizer inside it into the state",
            )
        self.groups = parameter_names(self.optimizer, path, names)
        self.encoded_groups = [values.encode(group) for group in self.groups]
        ids = (id(parameter) for group in self.optimizer.param_groups for parameter in group["params"])
        self.named = dict(zip(ids, chain.from_iterable(self.groups), strict=True))
        """Identity of each parameter -> its name."""
        self.by_data: dict[int, str] = {}
        """Those that no module named: the collector looks whether they are still called so."""
        place = {name: index for index, name in enumerate(dict.fromkeys(chain.from_iterable(self.groups)))}
        self.static: list[Found] = []
        self.loose: list[tuple[str, Any]] = []
        self.others: list[tuple[object, Any]] = []
        self._forms: dict[tuple[tuple[str, str], ...], list[tuple[int, dict[str, Any]]]] = {}
        scalars: set[int] = set()
        at = 0
        for parameter, entry in self.optimizer.state.items():
            size = len(entry) if isinstance(entry, dict) else 1
            if not isinstance(parameter, torch.Tensor):
                self.others.append((parameter, entry))
                scalars.update(range(at, at + size))
                at += size
                continue
            name = self.named.get(id(parameter)) or names.get(id(parameter))
            if name is None:
                raise StateError(
                    f"optimizer {path!r} holds state of a tensor of shape {tuple(parameter.shape)} "
                    "that is in none of its groups and not in the state",
                    key=path,
                    kind="unnamed-parameter",
                    hint="put the module that owns it into the state too",
                )
            if name not in place or not is_flat(entry):
                self.loose.append((name, entry))
                scalars.update(range(at, at + size))
                at += size
                continue
            form = []
            local = local_of(parameter).shape
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    if value.shape == local != parameter.shape and as_dtensor(value) is None:
                        raise StateError(
                            f"optimizer {path!r} keeps {key!r} of {name!r} as a plain tensor of its local shape {list(local)}; "
                            f"the parameter is a DTensor of shape {list(parameter.shape)}, and only DTensors tell which part they are",
                            key=f"{path}.state.{name}.{key}",
                            kind="sharded",
                            hint="let the optimizer make it with zeros_like(parameter)",
                        )
                    form.append((key, value.device.type))
                    self.static.append(Found(f"{path}.state.{name}.{key}", value, is_late(key, value), (*keys, "state", name, key)))
                else:
                    form.append((key, ""))
                    scalars.add(at)
                at += 1
            self._forms.setdefault(tuple(form), []).append((place[name], entry))
        self._scalars = scalars
        self._encoded_forms = [
            (values.encode({"keys": [list(pair) for pair in form], "params": _runs([index for index, _ in members])})[:-1], form, members)
            for form, members in self._forms.items()
        ]
        self._seen = self._look()

    def _look(self) -> tuple[list[int], list[int], list[int], list[Any], list[int]]:
        groups, state = self.optimizer.param_groups, self.optimizer.state
        entries = list(state.values())
        if not _DICT.issuperset(map(type, entries)):
            entries = [entry if isinstance(entry, dict) else {"": entry} for entry in entries]
        return (
            list(map(id, chain.from_iterable(group["params"] for group in groups))),
            [len(group["params"]) for group in groups],
            [*map(id, state), *map(id, state.values())],
            [*map(len, entries), *chain.from_iterable(entries)],
            list(map(id, chain.from_iterable(map(dict.values, entries)))),
        )

    def unchanged(self) -> bool:
        """Whether groups, states and tensors are the objects they were; plain numbers in them may have changed."""
        seen, now = self._seen, self._look()
        if seen == now:
            return True
        if seen[:4] != now[:4]:
            return False
        changed = {index for index, (before, after) in enumerate(zip(seen[4], now[4], strict=True)) if before != after}
        if not changed <= self._scalars:
            return False
        if any(
            not isinstance(entry[key], _NUMBERS)
            for _, form, members in self._encoded_forms
            for key, device in form
            if not device
            for _, entry in members
        ):
            return False
        self._seen = now
        return True

    def encode(self, tell: Tell) -> bytes:
        """The optimizer's part of the values; tensors outside the flat states go through ``tell``."""
        keys = self.keys
        groups = []
        for number, (group, names) in enumerate(zip(self.optimizer.param_groups, self.encoded_groups, strict=True)):
            hyper = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
            groups.append(b'{"values":%b,"params":%b}' % (tell(hyper, (*keys, "param_groups", number), _never), names))
        flat = []
        for encoded, form, members in self._encoded_forms:
            columns = {key: [entry[key] for _, entry in members] for key, device in form if not device}
            flat.append(b'%b,"columns":%b}' % (encoded, values.encode(columns)))
        loose = [b"[%b,%b]" % (values.encode(name), tell(entry, (*keys, "state", name), is_late)) for name, entry in self.loose]
        others = [b"[%b,%b]" % (values.encode(key), tell(entry, (*keys, "state", key), is_late)) for key, entry in self.others]
        extra = tell(extra_state(self.optimizer), keys, _never)
        body = b'{"class":%b,"groups":[%b],"flat":[%b],"loose":[%b],"others":[%b],"extra":%b}'
        name = values.encode(type(self.optimizer).__qualname__)
        return body % (name, b",".join(groups), b",".join(flat), b",".join(loose), b",".join(others), extra)


def _never(key: str, tensor: torch.Tensor) -> bool:
    return False


def extra_state(optimizer: Any) -> dict[str, Any]:
    """What a subclass with a ``state_dict`` of its own keeps beside ``state`` and ``param_groups``."""
    if isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in {"state", "param_groups"}}
