# ruff: noqa: SLF001 (where a module keeps its tensors has no public name that is fast enough)
"""Modules: what their tensors are called without wrappers, and where each one is, so that a second look is cheap."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from everystep.errors import StateError
from everystep.trainer.sharding import as_dtensor, local_of
from everystep.trainer.tensors import Found

_STATE_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_EXTRA = "_extra_state"


def unwrap(module: nn.Module) -> tuple[nn.Module, str]:
    """The module inside wrappers that only add a prefix to names, and that prefix.

    These are data parallel, torch.compile and activation checkpointing.
    """
    prefix = ""
    while True:
        name = _wrapped_name(module)
        if name is None:
            return module, prefix
        inner = module._modules[name]
        if inner is None:
            return module, prefix
        module, prefix = inner, f"{prefix}{name}."


def _wrapped_name(module: nn.Module) -> str | None:
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    # Where these were not imported, no instance of them can exist.
    for home, cls, name in (
        ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
    ):
        kind = getattr(sys.modules.get(home), cls, None)
        if kind is not None and isinstance(module, kind):
            return name
    return None


_plain_classes: dict[type[nn.Module], bool] = {}


def _is_plain(module: nn.Module) -> bool:
    """Whether its tensors are those in its dictionaries: nothing that makes or takes its state dict is overridden or hooked.

    torch's own overrides (batch norm's counter of old versions and the like) change nothing about the present names and tensors.
    """
    cls = type(module)
    plain = _plain_classes.get(cls)
    if plain is None:
        methods = [getattr(cls, name) for name in _STATE_METHODS]
        plain = _plain_classes[cls] = all(
            method is getattr(nn.Module, name) or method.__module__.startswith("torch.nn.modules.")
            for name, method in zip(_STATE_METHODS, methods, strict=True)
        ) and not cls.__module__.startswith("torch.ao.")
    own = module.__dict__
    hooked = any(not _of_fsdp(hook) for hooks in _HOOKS if own.get(hooks) for hook in own[hooks].values())
    return plain and not hooked and not any(name in own for name in _STATE_METHODS)


def _of_fsdp(hook: object) -> bool:
    """FSDP2's own hooks only put the sharded parameters back, which ``ModuleEntries`` finds by itself."""
    home = getattr(getattr(hook, "hook", hook), "__module__", None) or ""
    return home.startswith(("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp"))


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that were sharded with this module."""
    get = getattr(type(module), "_get_fsdp_state", None)
    if get is None:
        return []
    state = get(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


class ModuleEntries:
    """One module of the state: its tensors by name and where they are.

    ``static`` are the tensors found in the modules' dictionaries. Modules that make their own state dict have none there: theirs are asked
    for anew each time (``by_method``). ``extras`` are the ``_extra_state`` of modules.

    Under FSDP2 a module has gathered parameters in its dictionaries from its forward on, a root until its next backward. What counts are
    the sharded ones: they are found without a change to the module.
    """

    def __init__(self, module: nn.Module, keys: tuple[object, ...], path: str) -> None:
        self.given = module
        self.root, _ = unwrap(module)
        self.keys = keys
        self.path = path
        self.static: list[Found] = []
        self.extras: list[tuple[str, nn.Module]] = []
        self.by_method = False
        self._groups: list[Any] = []
        self._sharded: dict[int, torch.Tensor] = {}
        self._prefixes: list[tuple[str, str]] = []
        self._visited: list[nn.Module] = []
        self._walk(module, "", "")
        if self.by_method:
            self.static, self.extras = [], []
        self._sharded.clear()
        dicts: list[dict[str, Any]] = []
        for one in self._visited:
            dicts += (one._parameters, one._buffers, one._modules)
        self._dicts = dicts
        self._filled = [one for one in dicts if one]
        self._seen = self._look()

    def _walk(self, module: nn.Module, raw: str, clean: str) -> None:
        inner, wrapping = unwrap(module)
        at = module
        while at is not inner:
            self._visited.append(at)
            at = at._modules[_wrapped_name(at) or ""]  # type: ignore[assignment]
        if wrapping:
            self._prefixes.append((raw + wrapping, clean))
            raw += wrapping
        self._visited.append(inner)
        cls = type(inner)
        if any(base.__name__ == "FullyShardedDataParallel" for base in cls.__mro__):
            raise StateError(
                f"module {clean or self.path!r} is sharded by the first version of FSDP, whose flat parameters have no names of their own",
                key=self.path,
                kind="sharded",
                hint="shard it with torch.distributed.fsdp.fully_shard (FSDP2)",
            )
        groups = _fsdp_groups(inner)
        self._groups += groups
        self._sharded.update(_gathered(groups))
        if not _is_plain(inner):
            self.by_method = True
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                self.static.append(self._found(clean + name, self._sharded.get(id(parameter), parameter), late=True))
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                self.static.append(self._found(clean + name, buffer, late=False))
        if cls.get_extra_state is not nn.Module.get_extra_state:
            self.extras.append((clean + _EXTRA, inner))
        for name, child in inner._modules.items():
            if child is not None:
                self._walk(child, f"{raw}{name}.", f"{clean}{name}.")

    def _found(self, name: str, tensor: torch.Tensor, *, late: bool) -> Found:
        return Found(f"{self.path}.{name}", tensor, late, (*self.keys, name))

    def _look(self) -> tuple[list[int], list[int], list[str]]:
        filled = self._filled
        ids = list(map(id, chain.from_iterable(map(dict.values, filled))))
        gathered = {key: id(sharded) for key, sharded in _gathered(self._groups).items()} if self._groups else {}
        if gathered:
            ids = [gathered.get(key, key) for key in ids]
        return ids, list(map(len, self._dicts)), list(chain.from_iterable(filled))

    def reshard(self) -> None:
        """Put FSDP2's sharded parameters back where gathered ones are, as torch does before ``load_state_dict``."""
        for group in self._groups:
            if not group.is_sharded:
                group._to_sharded()

    def unchanged(self) -> bool:
        """Whether every parameter, buffer and submodule is the object it was, under the name it had."""
        return self._look() == self._seen

    def called(self, raw: str) -> str:
        """The name without wrappers of a key of ``root.state_dict()``."""
        outer = unwrap(self.given)[1]
        best, clean = "", ""
        for prefix, replacement in self._prefixes:
            prefix = prefix.removeprefix(outer)  # noqa: PLW2901 (the root's own wrappers are not in its keys)
            if raw.startswith(prefix) and len(prefix) > len(best):
                best, clean = prefix, replacement
        return clean + raw[len(best) :]

    def state(self) -> dict[str, tuple[str, Any]]:
        """For a module that makes its own: name without wrappers -> (its key in ``root.state_dict``, value)."""
        with torch.no_grad():
            given: Mapping[str, Any] = self.root.state_dict(keep_vars=True)
        named: dict[str, tuple[str, Any]] = {}
        for key, value in given.items():
            name = self.called(key)
            if name in named:
                raise StateError(
                    f"module {self.path!r}: entries {named[name][0]!r} and {key!r} of its state_dict have the same name",
                    key=self.path,
                    kind="names",
                    hint="rename one of them",
                )
            named[name] = key, value
        return named

    def dynamic(self) -> tuple[list[Found], list[tuple[str, object]]]:
        """What has to be asked for each time: tensors, and named values (extra states and other entries that are no tensors)."""
        if not self.by_method:
            return self._split((name, owner.get_extra_state()) for name, owner in self.extras)
        self.reshard()
        parameters = set(map(id, self.root.parameters()))
        return self._split(((name, value) for name, (_, value) in self.state().items()), lambda tensor: id(tensor) in parameters)

    def _split(
        self, entries: Iterator[tuple[str, Any]], is_late: Callable[[torch.Tensor], bool] = lambda _: False
    ) -> tuple[list[Found], list[tuple[str, object]]]:
        tensors: list[Found] = []
        values: list[tuple[str, object]] = []
        for name, value in entries:
            if isinstance(value, torch.Tensor):
                tensors.append(self._found(name, value, late=is_late(value)))
            else:
                values.append((name, value))
        return tensors, values

    def owned(self) -> Sequence[torch.Tensor]:
        """All parameters and buffers."""
        self.reshard()
        return [*self.root.parameters(), *self.root.buffers()]


def _gathered(groups: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Identity of each gathered parameter that is in a module now -> the sharded one whose place it has."""
    found: dict[int, torch.Tensor] = {}
    for group in groups:
        if not group.is_sharded:
            for one in group.fsdp_params:
                for gathered in (getattr(one, "_unsharded_param", None), getattr(one, "_sharded_post_forward_param", None)):
                    if gathered is not None:
                        found[id(gathered)] = one.sharded_param
    return found


_BLOCK = 512
_local = operator.attrgetter("_local_tensor")
_pointer = torch.Tensor.data_ptr
_nbytes = operator.attrgetter("nbytes")
_dtype = operator.attrgetter("dtype")
_stride = torch.Tensor.stride


class Storages:
    """Where the memory of tensors is, to notice ``.data = other``.

    That is addresses, and of modules' tensors the sizes, dtypes and (from two dimensions on) the strides, which with the sizes give the
    shapes. Looked at without torch's dispatch to subclasses, which makes this two times as fast for parameters: of DTensors their local
    tensors are looked at (and whether they are still the same ones), all others are plain.
    """

    def __init__(self, in_modules: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        self.tensors = list(map(local_of, (*in_modules, *others)))
        self._sharded = [one for one in (*in_modules, *others) if as_dtensor(one) is not None]
        self._locals = list(map(_local, self._sharded))
        # In blocks: what the first look brings into the processor's cache is there for the second and third.
        self._blocks = []
        for begin in range(0, len(self.tensors), _BLOCK):
            block = self.tensors[begin : begin + _BLOCK]
            of_modules = block[: max(0, len(in_modules) - begin)]
            self._blocks.append((block, of_modules, [one for one in of_modules if one.dim() > 1]))
        self._seen = self._look()

    def _look(self) -> list[tuple[list[int], list[int], list[torch.dtype], list[Any]]]:
        with torch._C.DisableTorchFunctionSubclass():
            return [
                (list(map(_pointer, block)), list(map(_nbytes, sized)), list(map(_dtype, sized)), list(map(_stride, shaped)))
                for block, sized, shaped in self._blocks
            ]

    def unchanged(self) -> bool:
        """Whether every tensor has the memory it had."""
        return all(map(operator.is_, map(_local, self._sharded), self._locals)) and self._look() == self._seen

    def moved(self) -> set[int]:
        """Identities of the tensors that have not; of DTensors the local ones'."""
        moved: set[int] = set()
        for block, now, seen in zip(self._blocks, self._look(), self._seen, strict=True):
            whole, sized, shaped = block
            looked: list[tuple[Sequence[torch.Tensor], Sequence[Any], Sequence[Any]]]
            looked = list(zip((whole, sized, sized, shaped), now, seen, strict=True))
            for tensors, after, before in looked:
                moved.update(id(tensor) for tensor, a, b in zip(tensors, after, before, strict=True) if a != b)
        return moved
