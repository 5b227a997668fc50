"""Restore modules and optimizers from checkpoints that others wrote: DCP folders, and sharded Hugging Face safetensors.

Theory of operation. What others wrote is shown to everystep's own restore as if everystep had written it. A module's tensors bear the same
names in both. An optimizer's state goes by the names of parameters in DCP's files too, but without the module's own place in the state, or
by number (a plain ``optimizer.state_dict()``); its hyperparameters come group by group, or once for each parameter. So for each entry of
the caller's state the part of the document is built that a save of that state would have written, from the names that are there.
Plain values were written by ``torch.save``: they are loaded as data only, and only those that the state wants.
"""

from __future__ import annotations

import bisect
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from everystep import values
from everystep.errors import CorruptionError, LayoutError
from everystep.foreign.dtypes import DTYPES, WORDS
from everystep.foreign.stored import Stored, StoredTensor
from everystep.integrations.dcp.naming import Names
from everystep.integrations.dcp.reading import StoredReader, Want
from everystep.integrations.dcp.runs import Run, through
from everystep.integrations.dcp.saved import SavedReader, stored_of
from everystep.manifest import TensorSpec
from everystep.region import whole
from everystep.trainer.arguments import outside_inference
from everystep.trainer.checkpointer import Checkpointer
from everystep.trainer.modules import ModuleEntries
from everystep.trainer.nodes import BranchNode, DataNode, ModuleNode, Node, OptimizerNode, StatefulNode, leaves_of, scan
from everystep.trainer.optimizers import innermost, parameter_names
from everystep.trainer.restoring import TensorReader, Wanted
from everystep.trainer.sharding import box
from everystep.trainer.state import RestoreReport, restore_into
from everystep.trainer.tensors import dotted, identity, tell

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_HINT = "take another copy or an older checkpoint"


def restore(
    state: Mapping[str, Any],
    path: str | os.PathLike[str] | Checkpointer | Sequence[str | os.PathLike[str]],
    *,
    step: int | None = None,
    strict: bool = True,
    include: Sequence[str] | None = None,
    cast: bool = False,
) -> RestoreReport:
    """Fill a state in place from a checkpoint that PyTorch's DCP wrote, or from sharded Hugging Face safetensors.

    Any world may have written it, and any world may read it: each rank reads the regions that its tensors hold, with no collective.
    Names are those that DCP's ``get_state_dict`` writes (``model.<fqn>``, ``optim.state.<fqn>.exp_avg``, ``optim.param_groups.<fqn>.lr``
    or ``optim.param_groups.0.lr``), or ``optimizer.state_dict()``'s numbers; the first part is the key in ``state``, and may be missing in
    the checkpoint. Nothing that the files contain is run: see ``docs/dcp.md``.

    Args:
        state: As for ``Checkpointer.save``: modules, optimizers (with their modules), objects with ``state_dict``, tensors, plain values.
        path: The folder with ``.metadata``, or with ``*.safetensors`` (and ``model.safetensors.index.json``). Several are taken as one,
            for those who keep the model and the optimizer apart. Or an everystep run, by its folder or its ``Checkpointer``: what torch's
            ``save`` wrote there through ``Writer`` is restored into modules and optimizers.
        step: Which checkpoint of a run; None: the newest that verifies.
        strict: Names that only one side has, and values that cannot be loaded as plain data, are an error; else they are reported.
        include: Patterns as in ``fnmatch`` over the state's full names (``"model.*"``); the rest is not touched.
        cast: Convert dtypes that differ.

    Raises:
        NotFoundError: There is no such folder or no checkpoint in it.
        CorruptionError: The metadata is not DCP's (a class that it names is told), or regions are missing or broken (named).
        LayoutError: It does not fit the state.
    """
    folders = [path] if isinstance(path, (str, os.PathLike, Checkpointer)) else list(path)
    if not folders:
        raise LayoutError("no folder to restore from", kind="path", hint="name the checkpoint's folder")
    rank = torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    patterns = None if include is None else [include] if isinstance(include, str) else list(include)

    def filled(view: ForeignView) -> RestoreReport:
        view.translate(scan(state))
        view.check(strict=strict)
        return restore_into(state, view, strict=strict, include=patterns, cast=cast)

    def from_run(reader: TensorReader) -> RestoreReport:
        names = Names(reader)
        view = ForeignView(stored_of(names), SavedReader(reader, names), patterns)
        view.beyond, view.by_rank = reader.beyond, reader.by_rank
        return filled(view)

    if isinstance(folders[0], Checkpointer) or os.path.exists(os.path.join(folders[0], "run.json")):
        if len(folders) > 1:
            raise LayoutError("a run is a checkpoint by itself", kind="path", hint="restore from one run at a time")
        return through(Run(folders[0], {}).checkpointer(), from_run, step=step, continues=True)
    with outside_inference():
        stored = Stored.open([folder for folder in folders if not isinstance(folder, Checkpointer)], rank=rank)
        return filled(ForeignView(stored, StoredReader(stored), patterns))


class ForeignView:
    """A checkpoint of others under the names of one state (``state.TensorReader``)."""

    def __init__(self, stored: Stored, reader: StoredReader | SavedReader, include: Sequence[str] | None) -> None:
        self.stored = stored
        self.step = stored.step
        self.beyond = self.by_rank = False
        self._tensors: dict[str, TensorSpec] = {}
        self.tensors: Mapping[str, TensorSpec] = self._tensors
        self.values = b'{"state":{"dict":[]}}'
        self._reader = reader
        self._include = include
        self._by_name: dict[str, StoredTensor] = {}
        self._loose: dict[str, torch.Tensor] = {}
        """Tensors that were inside plain values: loaded already."""
        self._used: set[str] = set()
        self._refused: dict[str, LayoutError] = {}
        self._sorted = sorted([*stored.tensors, *stored.plain])
        self._cleaned: dict[str, str] = {}
        for name in self._sorted:
            self._cleaned.setdefault(_clean(name), name)
        self._modules: list[tuple[str, str, ModuleEntries, list[tuple[str, torch.Tensor]]]] = []
        """(path, prefix of the stored names, entries, own tensors by their names in the module)."""
        self._beginnings: dict[str, dict[str, str]] = {}
        in_order = dict.fromkeys([*stored.paths, *stored.tensors, *stored.plain])
        self._rank = {name: at for at, name in enumerate(in_order)}

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill each tensor with its region; see ``StoredReader.read``."""
        regions = [whole(tuple(one.tensor.shape)) if one.region is None else one.region for one in wanted]
        self._reader.read(
            [
                Want(self._by_name[one.name], one.tensor, region)
                for one, region in zip(wanted, regions, strict=True)
                if one.name in self._by_name
            ]
        )
        for one, region in zip(wanted, regions, strict=True):
            if one.name in self._loose:
                with torch.no_grad():
                    one.tensor.copy_(box(self._loose[one.name], region))

    def check(self, *, strict: bool) -> None:
        """Raise for what the state wants and cannot have: files that are gone, dtypes and pickles that are not read."""
        if strict and self._refused:
            raise next(iter(self._refused.values()))

    # -- names -------------------------------------------------------------------------------------------------------------------

    def _wanted(self, name: str) -> bool:
        return self._include is None or any(fnmatch.fnmatchcase(one, pattern) for pattern in self._include for one in (name, name + "."))

    def _under(self, prefix: str) -> Iterator[str]:
        """Stored names that begin with a prefix."""
        at = bisect.bisect_left(self._sorted, prefix)
        while at < len(self._sorted) and self._sorted[at].startswith(prefix):
            yield self._sorted[at]
            at += 1

    def _has_under(self, prefix: str) -> bool:
        return next(self._under(prefix), None) is not None

    def _is_stored(self, name: str) -> bool:
        return name in self.stored.tensors or name in self.stored.plain

    def _find(self, name: str) -> str | None:
        """The stored name, also where one side has wrappers in it."""
        if self._is_stored(name):
            return name
        other = self._cleaned.get(_clean(name))
        return other if other is not None and self._is_stored(other) else None

    def _take(self, name: str, stored: StoredTensor, group: str, *, shape: tuple[int, ...] | None = None) -> TensorSpec:
        """Show a stored tensor under the state's name for it."""
        if stored.at_least and shape is not None and len(shape) == len(stored.shape):
            # The shards tell only where they begin: what is lost at the end shows against the state alone.
            stored.shape = tuple(map(max, stored.shape, shape))
        spec = TensorSpec(name, stored.dtype, stored.shape, group)
        self._tensors[name] = spec
        self._by_name[name] = stored
        self._used.add(stored.name)
        return spec

    def _value(self, stored: str, wanted: str) -> Any:
        """A plain value, or ``_ABSENT`` where nobody wants it or it cannot be had."""
        self._used.add(stored)
        if not self._wanted(wanted):
            return _ABSENT
        try:
            return self._reader.value(stored, self.stored.plain[stored])
        except LayoutError as error:
            self._refused[wanted] = error
            return _ABSENT

    def _told(self, tree: Any, path: str) -> Any:
        """A tree as it stands in a document; tensors that were pickled inside values get names of their own."""

        def convert(value: object, where: str) -> object | None:
            if isinstance(value, torch.Tensor):
                word = WORDS.get(value.dtype)
                name = f"{where}@{len(self._loose)}"
                if word is None or value.layout is not torch.strided:
                    return None
                self._loose[name] = value
                self._tensors[name] = TensorSpec(name, word, tuple(value.shape), path.partition(".")[0])
                return values.Ref(name)
            if isinstance(value, values.Ref):
                if value.name not in self._tensors and isinstance(self._reader, SavedReader):
                    inner = self._by_name[value.name] = self._reader.inner(value.name)
                    self._tensors[value.name] = TensorSpec(value.name, inner.dtype, inner.shape, path.partition(".")[0])
                return value
            return tell(value)

        return msgspec.json.decode(values.encode(tree, path=path, convert=convert))

    # -- the document ---------------------------------------------------------------------------------------------------------------

    def translate(self, root: BranchNode) -> None:
        """Build the document for a state."""
        nodes = list(leaves_of(root))
        for node in nodes:
            if isinstance(node, ModuleNode):
                self._add_module(node)
        document = self._node(root)
        assert document is not None
        for name, stored in self.stored.tensors.items():
            if name not in self._used and name not in self._tensors:
                self._tensors[name] = TensorSpec(name, stored.dtype, stored.shape, name.partition(".")[0])
                self._by_name[name] = stored
        for name in self.stored.plain:
            if name not in self._used:  # told of as unexpected
                document["dict"].append([msgspec.json.decode(values.encode(name)), {"value": None}])
        self.values = msgspec.json.encode({"state": document})

    def _node(self, node: Node) -> dict[str, Any] | None:
        if isinstance(node, BranchNode):
            children = [(key, self._node(child)) for key, child in node.children]
            if node.kind != "dict":
                return {node.kind: [told or {"dict": []} for _, told in children]}
            return {"dict": [[msgspec.json.decode(values.encode(key)), told] for key, told in children if told is not None]}
        if isinstance(node, ModuleNode):
            return self._module(node)
        if isinstance(node, OptimizerNode):
            return self._optimizer(node)
        path = dotted(node.keys)
        like = node.owner.state_dict() if isinstance(node, StatefulNode) else node.value
        tree = self._tree(path, path, like)
        if tree is _ABSENT and isinstance(like, Mapping):  # the checkpoint may lack the top-level key
            inner = {key: self._tree(str(key), f"{path}.{key}", value) for key, value in like.items()}
            tree = {key: value for key, value in inner.items() if value is not _ABSENT} or _ABSENT
        if tree is _ABSENT:
            return None
        return {"value" if isinstance(node, DataNode) else "stateful": self._told(tree, path)}

    # -- modules ---------------------------------------------------------------------------------------------------------------------

    def _add_module(self, node: ModuleNode) -> None:
        path = dotted(node.keys)
        entries = ModuleEntries(node.module, node.keys, path)
        if entries.by_method:
            own = [(name, value) for name, (_, value) in entries.state().items() if isinstance(value, torch.Tensor)]
        else:
            own = [(one.name.removeprefix(path + "."), one.tensor) for one in entries.static]
        names = [name for name, _ in own] or [name for name, _ in entries.extras]
        prefixed = sum(self._find(f"{path}.{name}") is not None for name in names)
        plain = sum(self._find(name) is not None for name in names)
        self._modules.append((path, f"{path}." if prefixed >= plain else "", entries, own))

    def _module(self, node: ModuleNode) -> dict[str, Any]:
        path, prefix, entries, own = next(one for one in self._modules if one[0] == dotted(node.keys))
        tied: dict[object, TensorSpec] = {}
        for name, tensor in own:
            stored = self._find(prefix + name)
            if stored is None:
                self._gone(prefix + name, f"{path}.{name}", tuple(tensor.shape))
                continue
            if stored not in self.stored.tensors:
                continue  # plain: below
            key = identity(tensor)
            if key in tied:  # the state has one tensor: of what was written for each name, the first is taken
                self._used.add(stored)
                self._tensors[f"{path}.{name}"] = tied[key]
                self._by_name[f"{path}.{name}"] = self._by_name[tied[key].name]
            else:
                tied[key] = self._take(f"{path}.{name}", self.stored.tensors[stored], str(node.keys[0]), shape=tuple(tensor.shape))
        plain: dict[str, Any] = {}
        extras = list(entries.state()) if entries.by_method else [name for name, _ in entries.extras]
        for name in extras:
            full = f"{path}.{name}"
            if full not in self._tensors:
                value = self._tree(self._find(prefix + name) or prefix + name, full, None, group=str(node.keys[0]))
                if value is not _ABSENT and not (isinstance(value, values.Ref) and value.name == full):
                    plain[name] = self._told(value, full)
        return {"module": plain}

    def _gone(self, stored: str, name: str, shape: tuple[int, ...]) -> None:
        """A tensor that is not there: whether files are missing, or everystep does not read it."""
        if not self._wanted(name):
            return
        why = self.stored.unread.get(stored)
        if why is not None and stored not in self.stored.tensors:
            kind = CorruptionError if "is not there" in why else LayoutError
            raise kind(
                f"tensor {name!r} of shape {list(shape)} cannot be read: {why}",
                key=name,
                kind="missing" if kind is CorruptionError else "dtype",
                hint=_HINT,
            )
        if self.stored.absent:
            region = "[" + ", ".join(f"0:{size}" for size in shape) + "]"
            raise CorruptionError(
                f"checkpoint {self.stored.folders[0]!r} lacks {region} of {name!r}; by their numbers these files are missing: "
                f"{self.stored.absent[:5]!r}", key=name, kind="missing", hint=_HINT,
            )  # fmt: skip

    # -- optimizers ------------------------------------------------------------------------------------------------------------------

    def _optimizer(self, node: OptimizerNode) -> dict[str, Any] | None:
        path, group = dotted(node.keys), str(node.keys[0])
        prefix = f"{path}." if self._has_under(f"{path}.state.") or self._has_under(f"{path}.param_groups.") else ""
        if not self._has_under(f"{prefix}state.") and not self._has_under(f"{prefix}param_groups."):
            return None
        optimizer = innermost(node.optimizer)
        known = {id(tensor): f"{place}.{name}" for place, _, _, own in reversed(self._modules) for name, tensor in own}
        own_groups = parameter_names(optimizer, path, known)
        ordered = list(dict.fromkeys(name for names in own_groups for name in names))
        groups = self._groups(prefix, path, own_groups)
        flat: dict[tuple[tuple[str, str], ...], list[tuple[str, dict[str, Any]]]] = {}
        loose: list[list[Any]] = []
        listed = list(dict.fromkeys(name for _, names in groups for name in names))
        for name in ordered:
            stored = self._state_of(f"{prefix}state.", name, ordered)
            if stored is None:
                continue
            entry = self._tree(stored, f"{path}.state.{name}", None, group=group)
            if entry is _ABSENT:
                continue
            if name not in listed:
                groups.append(({}, [name]))
                listed.append(name)
            if _is_flat(entry):
                form = tuple((key, "cpu" if isinstance(value, values.Ref) else "") for key, value in entry.items())
                flat.setdefault(form, []).append((name, entry))
            else:
                loose.append([msgspec.json.decode(values.encode(name)), self._told(entry, f"{path}.state.{name}")])
        place = {name: index for index, name in enumerate(listed)}
        forms = []
        for form, members in flat.items():
            runs = [[place[name], place[name] + 1] for name, _ in members]
            columns = {key: self._told([entry[key] for _, entry in members], path) for key, device in form if not device}
            forms.append({"keys": [list(pair) for pair in form], "params": runs, "columns": columns})
        self._used.update(self._under(f"{prefix}param_groups."))
        told = [
            {
                "values": self._told(hyper, f"{path}.param_groups.{index}"),
                "params": [msgspec.json.decode(values.encode(name)) for name in names],
            }
            for index, (hyper, names) in enumerate(groups)
        ]
        return {"optimizer": {"class": None, "groups": told, "flat": forms, "loose": loose, "others": [], "extra": {}}}

    def _fqns(self, name: str, ordered: Sequence[str]) -> list[str]:
        """What a parameter may be called in the optimizer's part: without its module's place in the state, as it is, or by number."""
        inside = [name.removeprefix(place + ".") for place, _, _, _ in self._modules if name.startswith(place + ".")]
        return [*sorted(inside, key=len), name, str(ordered.index(name))]

    def _state_of(self, prefix: str, name: str, ordered: Sequence[str]) -> str | None:
        known = self._beginnings.get(prefix)
        if known is None:
            known = {}
            for stored in self._under(prefix):
                # All beginnings: a parameter's name has dots of its own.
                at = stored.find(".", len(prefix))
                while at >= 0:
                    known.setdefault(_clean(stored[len(prefix) : at]), stored[len(prefix) : at])
                    at = stored.find(".", at + 1)
            self._beginnings[prefix] = known
        for fqn in self._fqns(name, ordered):
            found = known.get(_clean(fqn))
            if found is not None:
                return prefix + found
        return None

    def _groups(self, prefix: str, path: str, own: Sequence[Sequence[str]]) -> list[tuple[dict[str, Any], list[str]]]:
        """The saved groups: hyperparameters, and the parameters by the state's names."""
        root = f"{prefix}param_groups."
        if not self._has_under(root):
            return [({}, list(names)) for names in own]
        ordered = list(dict.fromkeys(name for names in own for name in names))
        groups: list[tuple[dict[str, Any], list[str]]] = []
        if self._is_stored(f"{root}0.params"):
            by_fqn = {_clean(fqn): name for name in reversed(ordered) for fqn in reversed(self._fqns(name, ordered)[:-1])}
            number = 0
            while self._has_under(f"{root}{number}."):
                hyper = self._tree(f"{root}{number}", f"{path}.param_groups.{number}", None, group=path.partition(".")[0])
                hyper = hyper if isinstance(hyper, dict) else {}
                listed = hyper.pop("params", None)
                if not isinstance(listed, (list, tuple)):
                    names = list(own[number]) if number < len(own) else []
                else:
                    names = [
                        ordered[one] if type(one) is int and 0 <= one < len(ordered) else by_fqn.get(_clean(str(one)), str(one))
                        for one in listed
                    ]
                hyper.pop("param_names", None)
                groups.append((hyper, names))
                number += 1
            return groups
        by_values: dict[bytes, tuple[dict[str, Any], list[str]]] = {}
        for index, name in enumerate(ordered):
            stored = self._state_of(root, name, ordered)
            if stored is None:
                continue
            hyper = self._tree(stored, f"{path}.param_groups.{index}", None, group=path.partition(".")[0])
            hyper = hyper if isinstance(hyper, dict) else {}
            key = values.encode(hyper, convert=lambda value, _: self._alike(value))
            by_values.setdefault(key, (hyper, []))[1].append(name)
        return list(by_values.values())

    def _alike(self, value: object) -> object | None:
        """Tensors among hyperparameters (learning rates): equal for all parameters of a group, whatever their names."""
        if isinstance(value, values.Ref):
            stored = self._by_name.get(value.name)
            if stored is None or stored.shape:
                return value
            number = torch.empty((), dtype=DTYPES[stored.dtype])
            self._reader.read([Want(stored, number, whole(()))])
            return [repr(number.item())]
        return tell(value)

    # -- plain data ------------------------------------------------------------------------------------------------------------------

    def _tree(self, stored: str, path: str, like: Any, *, group: str | None = None) -> Any:
        """What lies under a stored name, as a tree with ``Ref`` for tensors; ``_ABSENT`` when there is nothing."""
        group = path.partition(".")[0] if group is None else group
        whole_ = self._leaf(stored, path, group, like)
        if whole_ is not _ABSENT:
            return whole_
        root: dict[Any, Any] = {}
        for name in self._ordered(stored + "."):
            parts = self._parts(name, stored, like)
            into = root
            leaf_like = like
            for part in parts:
                leaf_like = _step(leaf_like, part)
            value = self._leaf(name, path + "." + ".".join(map(str, parts)), group, leaf_like)
            if value is _ABSENT:
                continue
            for part in parts[:-1]:
                into = into.setdefault(part, {})
                if not isinstance(into, dict):
                    raise CorruptionError(
                        f"the checkpoint holds both a value and entries under {name!r}", key=name, kind="names", hint=_HINT
                    )
            into[parts[-1]] = value
        return _lists(root, like) if root else _ABSENT

    def _ordered(self, prefix: str) -> list[str]:
        """Names under a prefix in the order in which they were saved."""
        return sorted(self._under(prefix), key=lambda name: self._rank[name])

    def _leaf(self, stored: str, path: str, group: str, like: Any) -> Any:
        if stored in self.stored.tensors:
            shape = tuple(like.shape) if isinstance(like, torch.Tensor) else None
            if path in self._tensors:
                raise LayoutError(
                    f"two entries of the checkpoint are {path!r} in the state", key=path, kind="names", hint="restore them apart"
                )
            self._take(path, self.stored.tensors[stored], group, shape=shape)
            return values.Ref(path)
        if stored in self.stored.plain:
            return self._value(stored, path)
        return _ABSENT

    def _parts(self, name: str, stored: str, like: Any) -> list[str | int]:
        """The way from a stored name to one under it: as the planner told it, else by the keys of what the state has there."""
        told = self.stored.paths.get(name)
        if told is not None:
            at = 0
            for count in range(1, len(told)):
                at = len(".".join(map(str, told[:count])))
                if at == len(stored) and name.startswith(stored):
                    return [_own_key(like, part) if depth == 0 else part for depth, part in enumerate(told[count:])]
        rest: str = name[len(stored) + 1 :]
        parts: list[str | int] = []
        while rest:
            keys = list(like) if isinstance(like, Mapping) else []
            fitting = [key for key in keys if rest == str(key) or rest.startswith(f"{key}.")]
            if fitting:
                key = max(fitting, key=lambda one: len(str(one)))
                word = str(key)
            else:
                word = rest.partition(".")[0]
                key = int(word) if isinstance(like, (list, tuple)) and word.isdecimal() else word
            parts.append(key)
            like = _step(like, key)
            rest = rest[len(word) + 1 :]
        return parts


_ABSENT = object()
_PLAIN = (type(None), bool, int, float, str)


def _is_flat(entry: Any) -> bool:
    """Whether one parameter's state is a mapping of tensors and numbers."""
    return isinstance(entry, dict) and all(
        isinstance(key, str) and isinstance(value, (values.Ref, *_PLAIN)) for key, value in entry.items()
    )


def _clean(name: str) -> str:
    if not any(word in name for word in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _own_key(like: Any, part: str | int) -> Any:
    """DCP makes text of all keys: the state's own key that reads the same."""
    if isinstance(like, Mapping) and part not in like:
        return next((key for key in like if str(key) == part), part)
    return part


def _step(like: Any, key: Any) -> Any:
    if isinstance(like, Mapping):
        return like.get(key)
    if isinstance(like, (list, tuple)) and type(key) is int and key < len(like):
        return like[key]
    return None


def _lists(tree: Any, like: Any) -> Any:
    """Mappings whose keys are the numbers from 0 on were lists, where the state does not say otherwise."""
    if not isinstance(tree, dict):
        return tree
    made = {_own_key(like, key): _lists(value, _step(like, _own_key(like, key))) for key, value in tree.items()}
    if made and not isinstance(like, Mapping) and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        items = [made[at] for at in range(len(made))]
        return tuple(items) if isinstance(like, tuple) else items
    return made
