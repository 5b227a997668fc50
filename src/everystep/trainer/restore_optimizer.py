"""An optimizer of the state against the checkpoint's, by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from everystep import values
from everystep.errors import CorruptionError
from everystep.foreign.dtypes import DTYPES
from everystep.trainer.nodes import OptimizerNode
from everystep.trainer.optimizers import HOW, innermost, parameter_names, positions
from everystep.trainer.restoring import Phase, Restore, as_refs, told_refs
from everystep.trainer.tensors import device_of, ref_kind


class SavedOptimizer:
    """An optimizer's part of the document (see ``optimizers``)."""

    def __init__(self, body: Mapping[str, Any], path: str, job: Restore) -> None:
        self.path = path
        self.job = job
        self.flat: dict[str, dict[str, Any]] = {}
        """Parameter -> key -> a number, or a ``Ref``."""
        try:
            self.groups: list[tuple[Any, list[str]]] = [
                (group["values"], [values.decode(_bytes(name)) for name in group["params"]]) for group in body["groups"]
            ]
            order = list(dict.fromkeys(name for _, names in self.groups for name in names))
            for form in body["flat"]:
                columns = {key: as_refs(column) for key, column in form["columns"].items()}
                for row, position in enumerate(positions(form["params"])):
                    name = order[position]
                    self.flat[name] = {
                        key: values.Ref(f"{path}.state.{name}.{key}", "tensor" if device == "cpu" else f"tensor@{device}")
                        if device
                        else columns[key][row]
                        for key, device in form["keys"]
                    }
            self.loose: dict[str, Any] = {as_refs(name): told for name, told in body["loose"]}
            self.others: list[tuple[Any, Any]] = [(as_refs(key), told) for key, told in body["others"]]
            self.extra: Any = body["extra"]
            self.kind: str | None = body.get("class")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptionError(f"the checkpoint's values of optimizer {path!r} cannot be read ({error!r})", key=path, kind="values",
                                  hint="take another copy or an older step") from None  # fmt: skip
        self.order = order

    def tensors_of(self, name: str) -> list[str]:
        """Full names of the tensors of one parameter's state."""
        if name in self.loose:
            return told_refs(self.loose[name])
        return [value.name for value in self.flat.get(name, {}).values() if isinstance(value, values.Ref)]

    def wants_state(self, name: str) -> bool:
        """Whether ``include`` asks for one parameter's state: as a whole, or any tensor of it."""
        return self.job.wants_whole(f"{self.path}.state.{name}") or any(map(self.job.wants, self.tensors_of(name)))

    def wants_rest(self, *inner: object) -> bool:
        """Whether it asks for something else of the optimizer."""
        paths = [self.path, *(f"{self.path}.{'.'.join(map(str, inner[:end]))}" for end in range(1, len(inner) + 1))]
        # Each is asked, so that no pattern that matches something counts as idle.
        return any([self.job.wants_whole(path) for path in paths])  # noqa: C419

    def plain(self) -> dict[str, Any]:
        """As nested mappings of fresh tensors and values, by names."""
        job = self.job
        names = list(dict.fromkeys([*self.order, *self.loose]))
        state: dict[Any, Any] = {}
        for name in names:
            if self.wants_state(name):
                if name in self.loose:
                    state[name] = job.decode(self.loose[name])
                elif name in self.flat:
                    state[name] = job.materialise(self.flat[name])
        if self.wants_rest("state"):
            state.update((key, job.decode(told)) for key, told in self.others)
        groups = [
            {**job.decode(told), "params": list(params)}
            for number, (told, params) in enumerate(self.groups)
            if self.wants_rest("param_groups", number)
        ]
        if not state and not groups:
            return {}
        extra = job.decode(self.extra) if self.wants_rest() else {}
        return {"state": state, "param_groups": groups, **extra}


def _bytes(told: object) -> bytes:

    return msgspec.json.encode(told)


class OptimizerTarget:
    """Plans the restore of one optimizer."""

    def __init__(self, job: Restore, node: OptimizerNode, path: str, names: Mapping[int, Sequence[str]]) -> None:
        self.job = job
        self.path = path
        self.optimizer = innermost(node.optimizer)
        self.own = parameter_names(self.optimizer, path, {key: several[0] for key, several in names.items()})
        self.names = names

    def plan(self, saved: SavedOptimizer) -> None:
        """Say what is to be filled, made and set."""
        kind = type(self.optimizer).__qualname__
        if self.job.strict and saved.kind not in (None, kind) and saved.wants_rest():
            self.job.refuse(f"optimizer {self.path!r} was saved by {saved.kind} and is {kind} now, whose state has other entries")
        matched = self._match(saved)
        used = set()
        for group, own, found in zip(self.optimizer.param_groups, self.own, matched, strict=True):
            for parameter, name, stored in zip(group["params"], own, found, strict=True):
                if stored is None:
                    if self.job.wants_whole(f"{self.path}.state.{name}"):
                        self.job.missing.append(f"{self.path}.state.{name}")
                    continue
                used.add(stored)
                if saved.wants_state(stored):
                    self._state(saved, parameter, stored, group)
        for name in saved.order:
            # State tensors that nobody claims are told of by themselves.
            if name not in used and not saved.tensors_of(name):
                self.job.unexpected.append(f"{self.path}.state.{name}")
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self._reorder(saved, matched[0])
        for number, group in enumerate(self.optimizer.param_groups):
            if saved.wants_rest("param_groups", number):
                self._group(saved, number, group, [name for name in matched[number] if name is not None])
        if saved.wants_rest("param_groups"):
            for told, _ in saved.groups:
                self.job.claimed.update(told_refs(told))
        if saved.wants_rest("state"):
            for key, told in saved.others:
                entry = self.job.decode(told)
                self.job.later(Phase.OPTIMIZERS, lambda key=key, entry=entry: self.optimizer.state.__setitem__(key, entry))  # type: ignore[misc]
        if saved.wants_rest() and saved.extra:
            extra = self.job.decode(saved.extra)
            self.job.later(Phase.OPTIMIZERS, lambda: self.optimizer.load_state_dict({**self.optimizer.state_dict(), **extra}))

    def _match(self, saved: SavedOptimizer) -> list[list[str | None]]:
        """For each parameter the name under which the checkpoint has it: its own, or one that is tied to it on either side."""
        tensors = self.job.reader.tensors
        there = set(saved.order)
        by_stored = {tensors[name].name if name in tensors else name: name for name in reversed(saved.order)}

        def find(parameter: torch.Tensor, own: str) -> str | None:
            candidates = [own, *self.names.get(id(parameter), ())]
            for name in candidates:
                if name in there:
                    return name
            for name in candidates:
                if name in tensors and tensors[name].name in by_stored:
                    return by_stored[tensors[name].name]
            return None

        return [
            [find(parameter, name) for parameter, name in zip(group["params"], own, strict=True)]
            for group, own in zip(self.optimizer.param_groups, self.own, strict=True)
        ]

    # -- one parameter's state ------------------------------------------------------------------------------------------

    def _state(self, saved: SavedOptimizer, parameter: torch.Tensor, name: str, group: Mapping[str, Any]) -> None:
        state = self.optimizer.state
        if name in saved.loose:
            entry = self.job.decode(saved.loose[name], make=lambda ref: self._loose_tensor(ref, parameter))
        elif name in saved.flat:
            spec = self.job.reader.tensors.get(name)
            if spec is not None and spec.shape != tuple(parameter.shape):
                self.job.refuse(
                    f"{name!r}, a parameter of optimizer {self.path!r}, "
                    f"has shape {list(spec.shape)} in the checkpoint, {list(parameter.shape)} in the state"
                )
                self.job.claimed.update(saved.tensors_of(name))
                return
            before = state.get(parameter)
            entry = {
                key: self._tensor(value, key, parameter, name, group, before.get(key) if isinstance(before, dict) else None)
                if isinstance(value, values.Ref) else value
                for key, value in saved.flat[name].items()
            }  # fmt: skip
        else:
            self.job.later(Phase.OPTIMIZERS, lambda: state.pop(parameter, None))
            return
        self.job.later(Phase.OPTIMIZERS, lambda: _put(state, parameter, entry))

    def _loose_tensor(self, ref: values.Ref, parameter: torch.Tensor) -> torch.Tensor:
        spec = self._spec(ref)
        return self.job.make(ref.name, None, parameter.device if spec.shape else device_of(ref.kind), DTYPES[spec.dtype])

    def _spec(self, ref: values.Ref) -> Any:
        spec = self.job.reader.tensors.get(ref.name)
        if spec is None:
            raise CorruptionError(
                f"the checkpoint's values refer to tensor {ref.name!r}, which it does not hold",
                key=ref.name,
                kind="values",
                hint="take another copy or an older step",
            )
        return spec

    def _tensor(
        self, ref: values.Ref, key: str, parameter: torch.Tensor, name: str, group: Mapping[str, Any], before: object
    ) -> torch.Tensor:
        """Where one tensor of a state goes: into the one that is there, else into a new one as torch would have made it."""
        spec = self._spec(ref)
        on_device = bool(group.get("capturable") or group.get("fused"))
        dtype = DTYPES[spec.dtype]
        if key == "step" and on_device:
            dtype = torch.float32  # torch's kernels for these want it so
        elif self.job.cast and key != "step" and name in self.job.reader.tensors and self.job.reader.tensors[name].dtype == spec.dtype:
            dtype = parameter.dtype
        # torch keeps scalars on the host unless its kernels read them on the device.
        device = parameter.device if spec.shape or on_device or ref.kind != ref_kind(torch.empty(0, device="cpu")) else torch.device("cpu")
        if isinstance(before, torch.Tensor) and tuple(before.shape) == spec.shape:
            if key != "step":
                self.job.fill(ref.name, before)
                return before
            if (before.dtype, before.device) == (DTYPES[spec.dtype], device):
                self.job.fill(ref.name, before)
                return before
        return self.job.make(ref.name, parameter.detach(), device, dtype)

    def _reorder(self, saved: SavedOptimizer, matched: Sequence[str | None]) -> None:
        """LBFGS keeps flat vectors over all parameters in their order: it takes over the saved order."""
        if not all(map(saved.wants_state, saved.order)):
            return
        parameters = self.optimizer.param_groups[0]["params"]
        if set(matched) != set(saved.order):
            if saved.loose or saved.flat:
                self.job.refuse(
                    f"optimizer {self.path!r} is an LBFGS over other parameters than the saved one: its state covers all of them at once"
                )
            return
        by_name = dict(zip(matched, parameters, strict=True))
        ordered = [by_name[name] for name in saved.order]
        self.job.later(Phase.OPTIMIZERS, lambda: parameters.__setitem__(slice(None), ordered))

    # -- hyperparameters --------------------------------------------------------------------------------------------------

    def _group(self, saved: SavedOptimizer, number: int, group: dict[str, Any], names: Sequence[str]) -> None:
        common: list[int] = [len(set(names) & set(params)) for _, params in saved.groups]
        if names and any(common):
            told = saved.groups[common.index(max(common))][0]
        elif not group["params"] and number < len(saved.groups) and not saved.groups[number][1]:
            told = saved.groups[number][0]
        else:
            return
        for key, value in as_refs(told).items():
            if key not in HOW or key not in group:
                self._hyperparameter(group, key, value, f"{self.path}.param_groups.{number}.{key}")

    def _hyperparameter(self, group: dict[str, Any], key: str, value: Any, path: str) -> None:
        now = group.get(key)
        if isinstance(value, values.Ref):
            if isinstance(now, torch.Tensor):
                self.job.fill(value.name, now, into=path)
                return
            made = self.job.materialise(value)
            if isinstance(now, (bool, int, float)) and made.numel() == 1:
                self.job.later(Phase.OPTIMIZERS, lambda: group.__setitem__(key, made.item()))
            else:
                self.job.later(Phase.OPTIMIZERS, lambda: group.__setitem__(key, made))
            return
        if isinstance(now, torch.Tensor) and isinstance(value, (bool, int, float)):
            self.job.later(Phase.OPTIMIZERS, lambda: _fill(now, value))
            return
        new = self.job.materialise(value)
        self.job.later(Phase.OPTIMIZERS, lambda: group.__setitem__(key, new))


def _put(state: Any, parameter: torch.Tensor, entry: Any) -> None:
    now = state.get(parameter)
    if type(now) is dict and type(entry) is dict:
        now.clear()
        now.update(entry)
    else:
        state[parameter] = entry


def _fill(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.fill_(value)
