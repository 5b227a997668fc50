"""A checkpoint -> the state's objects, in place; everything is checked before the first byte changes.

Theory of operation. The state is walked as for a save; each node says which stored tensors it wants where (``fill``) and what is to be
done once they are there (``later``: in the order modules, optimizers, plain data, stateful objects, random number generators). Names that
nobody claims are unexpected, wanted ones that are not stored are missing. Only when all nodes have been asked and nothing speaks against
it are bytes read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from everystep.errors import LayoutError
from everystep.foreign.dtypes import DTYPES, WORDS
from everystep.trainer.collect import names_of
from everystep.trainer.modules import ModuleEntries
from everystep.trainer.nodes import BranchNode, DataNode, ModuleNode, Node, OptimizerNode, StatefulNode, has_tensors, leaves_of, scan
from everystep.trainer.optimizers import innermost
from everystep.trainer.restore_data import SAME, DataTarget, is_same
from everystep.trainer.restore_optimizer import OptimizerTarget, SavedOptimizer
from everystep.trainer.restoring import Phase, Restore, RestoreReport, TensorReader, as_refs, document_of, kind_of, told_refs
from everystep.trainer.tensors import dotted, identity

_log = logging.getLogger("everystep")

_WORDS = {
    "module": "a module",
    "optimizer": "an optimizer",
    "stateful": "an object with a state_dict",
    "value": "plain data",
    "dict": "a mapping of objects",
    "list": "a list of objects",
    "tuple": "a tuple of objects",
}


# -- restoring into a state -------------------------------------------------------------------------------------------------


def restore_into(
    state: Mapping[str, Any], reader: TensorReader, *, strict: bool = True, include: Sequence[str] | None = None, cast: bool = False
) -> RestoreReport:
    """Fill the state's objects in place from a checkpoint. Everything is checked (names, shapes, dtypes) before the first byte is changed.

    Tensors are filled in place: parameters, buffers, an optimizer's state, tensors in plain data. Objects get their state by
    ``load_state_dict``: modules' extra state first, then optimizers, plain data, other objects, and random number generators last. Plain
    values and arrays take the saved ones' places in the mapping that holds them (an array of the same shape and dtype is filled in place;
    a mapping without tensors gets the saved keys, no others). Hyperparameters that a scheduler's ``load_state_dict`` sets are put back to
    the optimizer's saved ones.

    An optimizer's state goes by the names of its parameters, whatever their order and grouping; a group takes the hyperparameters of the
    saved group with the same names, or, where the grouping changed, of the one that shares most names with it. ``foreach``, ``fused``,
    ``capturable`` and ``differentiable`` stay as they are.

    DTensors take their region of what is stored, whatever layout it was saved in; state that an optimizer lacks for a DTensor parameter
    is made as a DTensor of the same mesh and placements. A rank that was not among those that saved (``reader.beyond``) takes the plain
    values of another, but its random number generators stay as they are.

    Args:
        state: As for a save.
        reader: The checkpoint.
        strict: Names that only one side has are an error; else they are reported.
        include: Patterns as in ``fnmatch`` over full names of tensors and paths of values and objects; the rest is not touched.
        cast: Convert dtypes that differ.

    Raises:
        LayoutError: strict and names differ (lists both sides), shapes differ, or dtypes differ without ``cast``.
        StateError: The state itself cannot be taken (see ``StateCollector.collect``).
    """
    root = scan(state)
    job = Restore(reader, strict=strict, include=include, cast=cast)
    targets = _Targets(job, root)
    targets.visit(root, document_of(reader))
    job.check()
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    job.later(Phase.OPTIMIZERS, lambda: saved.extend((group, dict(group)) for group in targets.groups()))
    job.later(Phase.STATEFUL, lambda: _put_back(saved))
    job.run()
    if job.kept or (reader.beyond and reader.by_rank):
        kept = f"; random number generators stay as they are: {', '.join(job.kept)}" if job.kept else ""
        _log.warning("step %d was saved by fewer ranks: this one takes plain values and data loaders of another%s", reader.step, kept)
    return job.report()


def _put_back(groups: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Undo what loading schedulers did to optimizers' hyperparameters."""
    for group, saved in groups:
        for key, value in saved.items():
            if key != "params":
                group[key] = value


class _Targets:
    """The state's nodes against the checkpoint's document."""

    def __init__(self, job: Restore, root: BranchNode) -> None:
        self.job = job
        self.modules = {
            node.keys: ModuleEntries(node.module, node.keys, dotted(node.keys)) for node in leaves_of(root) if isinstance(node, ModuleNode)
        }
        self.optimizers = [node for node in leaves_of(root) if isinstance(node, OptimizerNode)]
        self.names = self._names(root)

    def _names(self, root: BranchNode) -> dict[int, list[str]]:
        """All full names of each tensor object in the state; tied tensors have each other's names too."""
        names: dict[int, list[str]] = {}
        tied: dict[object, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}

        def note(tensor: torch.Tensor, name: str) -> None:
            several = tied.setdefault(identity(tensor), [])
            several.append(name)
            names[id(tensor)] = several
            tensors[id(tensor)] = tensor

        for node in leaves_of(root):
            if isinstance(node, ModuleNode):
                entries = self.modules[node.keys]
                for one in entries.static:
                    note(one.tensor, one.name)
                if entries.by_method:
                    owned = {id(tensor) for tensor in entries.owned()}
                    for one in entries.dynamic()[0]:
                        if id(one.tensor) in owned:
                            note(one.tensor, one.name)
            elif isinstance(node, DataNode):
                for tensor, keys in _tensors(node.value, node.keys):
                    note(tensor, dotted(keys))
        for key, name in names_of(self.modules.values())[1].items():
            names.setdefault(key, [name])
        return names

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of every optimizer."""
        return [group for node in self.optimizers for group in innermost(node.optimizer).param_groups]

    def visit(self, node: Node, told: Mapping[str, Any]) -> Any:
        """Plan one node from its part of the document; returns what takes the place of plain data, or ``SAME``."""
        kind, body = kind_of(told)
        if isinstance(node, BranchNode):
            self._branch(node, kind, body)
        elif isinstance(node, ModuleNode):
            self._module(node, body if kind == "module" else {})
            if kind != "module":
                self._mismatch(node.keys, kind, "module")
        elif isinstance(node, OptimizerNode):
            if kind == "optimizer":
                OptimizerTarget(self.job, node, dotted(node.keys), self.names).plan(SavedOptimizer(body, dotted(node.keys), self.job))
            else:
                self._mismatch(node.keys, kind, "optimizer")
        elif isinstance(node, StatefulNode):
            if kind in {"stateful", "value"}:
                self._stateful(node, body)
            else:
                self._mismatch(node.keys, kind, "stateful")
        elif kind in {"value", "stateful"}:
            return DataTarget(self.job).fit(node.value, as_refs(body), node.keys)
        else:
            self._mismatch(node.keys, kind, "value")
        return SAME

    def _mismatch(self, keys: tuple[object, ...], stored: str, wanted: str) -> None:
        path = dotted(keys)
        if self.job.wants_whole(path):
            self.job.refuse(f"{path!r} is {_WORDS.get(stored, stored)} in the checkpoint, {_WORDS[wanted]} in the state")

    def absent(self, node: Node) -> None:
        """The checkpoint has nothing for a node."""
        if isinstance(node, BranchNode):
            for _, child in node.children:
                self.absent(child)
        elif isinstance(node, ModuleNode):
            entries = self.modules[node.keys]
            tensors, plain = entries.dynamic()
            names = [one.name for one in (*entries.static, *tensors)] + [f"{entries.path}.{name}" for name, _ in plain]
            self.job.missing += [name for name in names if self.job.wants(name)]
        elif self.job.wants_whole(dotted(node.keys)):
            self.job.missing.append(dotted(node.keys))

    def superfluous(self, keys: tuple[object, ...], told: Mapping[str, Any]) -> None:
        """The state has nothing for a part of the document.

        Its tensors stay unclaimed, and so are told of; what has none is told of here.
        """
        kind, body = kind_of(told)
        path = dotted(keys)
        if (kind in {"stateful", "value"} and not told_refs(body)) or (
            kind == "optimizer" and not any(name.startswith(path + ".") for name in self.job.reader.tensors)
        ):
            self.job.unexpected.append(path)
        elif kind in {"dict", "list", "tuple"}:
            for key, child in self._children(kind, body).items():
                self.superfluous((*keys, key), child)

    def _children(self, kind: str, body: Any) -> dict[object, Mapping[str, Any]]:
        if kind == "dict":
            return {self.job.decode(key): child for key, child in body}
        return dict(enumerate(body))

    def _branch(self, node: BranchNode, kind: str, body: Any) -> None:
        if kind not in {"dict", "list", "tuple"}:
            self._mismatch(node.keys, kind, node.kind)
            self.absent(node)
            return
        saved = self._children(kind, body)
        for key, child in node.children:
            told = saved.pop(key, None)
            if told is None:
                self.absent(child)
            else:
                replacement = self.visit(child, told)
                if replacement is not SAME and not is_same(replacement, node.container[key]):
                    self._replace(node.container, key, child, replacement)
        for key, told in saved.items():
            self.superfluous((*node.keys, key), told)

    def _replace(self, container: Any, key: Any, child: Node, value: object) -> None:
        """Plain data that could not be filled in place takes the old one's place."""
        if isinstance(container, (MutableMapping, list)):
            self.job.later(Phase.DATA, lambda: container.__setitem__(key, value))
        else:
            self.job.refuse(
                f"{dotted(child.keys)!r} is a plain value in a {type(container).__qualname__}, "
                "where it cannot be replaced; put it into a dict"
            )

    def _module(self, node: ModuleNode, plain: Mapping[str, Any]) -> None:
        entries, job = self.modules[node.keys], self.job
        job.first(entries.reshard)
        if entries.by_method:
            self._module_by_method(entries, plain)
            return
        self._tensors_of(entries)
        for name, owner in entries.extras:
            full = f"{entries.path}.{name}"
            if not job.wants(full):
                continue
            value = self._extra(full, name, plain, owner.get_extra_state)
            if value is not _ABSENT:
                job.later(Phase.MODULES, lambda owner=owner, value=value: owner.set_extra_state(value))  # type: ignore[misc]
        self._leftover(entries, plain, {name for name, _ in entries.extras})

    def _leftover(self, entries: ModuleEntries, plain: Mapping[str, Any], known: set[str]) -> None:
        for name, told in plain.items():
            if name not in known and not told_refs(told):
                self.job.unexpected.append(f"{entries.path}.{name}")

    def _tensors_of(self, entries: ModuleEntries) -> None:
        """A module's parameters and buffers. Of a tied tensor one stored name is enough."""
        job = self.job
        for one in entries.static:
            if not job.wants(one.name):
                continue
            if one.name in job.reader.tensors:
                job.fill(one.name, one.tensor)
            elif not any(other in job.reader.tensors and job.wants(other) for other in self.names[id(one.tensor)]):
                job.missing.append(one.name)

    def _extra(self, full: str, name: str, plain: Mapping[str, Any], now: Callable[[], Any]) -> Any:
        """The saved extra state; a tensor of another size only where the caller relaxed the check."""
        job = self.job
        spec = job.reader.tensors.get(full)
        if spec is not None:
            current = now()
            differs = isinstance(current, torch.Tensor) and (tuple(current.shape), WORDS.get(current.dtype)) != (spec.shape, spec.dtype)
            if differs and job.strict and not job.cast:
                job.refuse(
                    f"extra state {full!r} is {spec.dtype} {list(spec.shape)} in the checkpoint, "
                    f"{WORDS.get(current.dtype)} {list(current.shape)} in the state"
                    " (cast=True or strict=False replaces it)"
                )
                job.claimed.add(full)
                return _ABSENT
            device = current.device if isinstance(current, torch.Tensor) else torch.device("cpu")
            return job.make(full, None, device, DTYPES[spec.dtype])
        if name in plain:
            job.restored.append(full)
            return job.decode(plain[name])
        job.missing.append(full)
        return _ABSENT

    def _module_by_method(self, entries: ModuleEntries, plain: Mapping[str, Any]) -> None:
        """A module that makes or takes its state dict in its own way.

        It gets a whole one, made of what it has where nothing is to be restored.
        """
        job = self.job
        owned = {id(tensor) for tensor in entries.owned()}
        given: dict[str, Any] = {}
        for name, (key, value) in entries.state().items():
            full = f"{entries.path}.{name}"
            given[key] = value
            spec = job.reader.tensors.get(full)
            if not job.wants(full):
                continue
            if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
                extra = self._extra(full, name, plain, lambda value=value: value)  # type: ignore[misc]
                given[key] = value if extra is _ABSENT else extra
            elif spec is None:
                job.missing.append(full)
            elif id(value) in owned:
                job.fill(full, value)
            else:
                with torch.no_grad():
                    given[key] = torch.empty_like(value, requires_grad=False)
                job.fill(full, given[key])
        self._leftover(entries, plain, set(entries.state()))

        def load() -> None:
            try:
                with torch.no_grad():
                    entries.root.load_state_dict(given)
            except RuntimeError as error:
                raise LayoutError(
                    f"module {entries.path!r} refused its state: {error}", key=entries.path, kind="load_state_dict"
                ) from error

        job.later(Phase.MODULES, load)

    def _stateful(self, node: StatefulNode, told: Any) -> None:
        path = dotted(node.keys)
        names = told_refs(told)
        if not self.job.wants_whole(path) and not any(map(self.job.wants, names)):
            if not names:
                self.job.unexpected.append(path)
            return
        if node.is_rng and self.job.reader.beyond:
            # Two ranks with one random state would draw the same numbers.
            self.job.claimed.update(names)
            self.job.kept.append(path)
            return
        value = self.job.decode(told)
        self.job.restored.append(path)
        self.job.later(Phase.RNG if node.is_rng else Phase.STATEFUL, lambda: node.owner.load_state_dict(value))


_ABSENT = object()


def _tensors(value: Any, keys: tuple[object, ...]) -> Iterator[tuple[torch.Tensor, tuple[object, ...]]]:
    if isinstance(value, torch.Tensor):
        yield value, keys
    elif has_tensors(value):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, (*keys, key))
