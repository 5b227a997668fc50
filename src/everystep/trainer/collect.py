"""A state -> its tensors and plain values, quickly when it is the same state again.

Theory of operation. What is in modules and optimizers is *static*: remembered with the dictionaries it came from, and taken again when
these hold the same objects under the same keys (compared by identity, in a few passes that run in C) and no tensor's storage has moved.
Everything else is *dynamic*: asked for each time (objects' ``state_dict``, plain data, hyperparameters), and compared with last time's.
While nothing changed the very same list of leaves is returned, so that whoever holds views or addresses of them need not make them again.
Objects that hand out new small tensors each time (random number generators) have them copied into a tensor of ours, whose leaf stays.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import xxhash

from everystep import values
from everystep.errors import StateError
from everystep.manifest import TensorSpec
from everystep.trainer.modules import ModuleEntries, Storages
from everystep.trainer.nodes import BranchNode, DataNode, ModuleNode, Node, OptimizerNode, StatefulNode, encode_data, leaves_of, scan
from everystep.trainer.optimizers import OptimizerEntries, innermost, is_fenced
from everystep.trainer.sharding import Chunk, as_dtensor, local_of, unwrapped
from everystep.trainer.tensors import Found, dotted, identity, is_text, spec_of, way

_OWNED_NBYTES = 1 << 20
_NOTHING: list[Found] = []


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of the state. ``late``: only an optimizer step changes it, so it may be copied after ``save`` has returned."""

    spec: TensorSpec
    """Of the whole tensor: its shape is the global one."""
    tensor: torch.Tensor
    """What this rank holds of it: a plain tensor."""
    late: bool
    chunks: tuple[Chunk, ...] | None = None
    """Which regions of the whole tensor lie where in ``tensor``; None: it is the whole one."""


@dataclasses.dataclass(frozen=True)
class Collected:
    """The state at one moment: its tensors (not copied) and its plain values (copied: encoded)."""

    leaves: Sequence[Leaf]
    """In a stable order. Tied tensors once; ``aliases`` maps the other names to the stored one."""
    aliases: Mapping[str, str]
    values: bytes
    optimizers: Sequence[object]
    """Every optimizer seen in the state."""
    unfenced: Sequence[str]
    """State paths of optimizers that do not run torch's step hooks (no overlap is possible with them)."""
    structure: object
    """Hashable; equal when names, dtypes, shapes, chunks, order, lateness and aliases are equal: the plan can be reused."""


@dataclasses.dataclass
class _Dynamic:
    """A tensor met on this walk, as it was last time."""

    found: Found
    identity: object
    leaf: int
    """Index of its leaf, or -1 where it is tied to another."""
    tied: object
    """What it is tied to: the name under which it is stored."""
    owned: bool = False


@dataclasses.dataclass
class _Merged:
    """Everything of the last walk, one list."""

    static: list[list[Found]]
    storages: Storages
    dynamic: list[_Dynamic]
    stored: dict[object, str]
    """Identity of a static tensor -> the name it is stored under."""
    leaves: list[Leaf]
    aliases: dict[str, str]
    structure: str


@dataclasses.dataclass
class _Walk:
    """One walk: what was found of each node, in the state's order."""

    blocks: list[tuple[list[Found], list[Found]]] = dataclasses.field(default_factory=list)
    """(static, dynamic) of each node."""
    encoded: dict[tuple[object, ...], bytes] = dataclasses.field(default_factory=dict)
    optimizers: list[object] = dataclasses.field(default_factory=list)
    unfenced: list[str] = dataclasses.field(default_factory=list)


class StateCollector:
    """Collects the same state again and again, quickly: remembers where each module's tensors are while the modules do not change."""

    def __init__(self) -> None:
        self._modules: dict[tuple[object, ...], ModuleEntries] = {}
        self._optimizers: dict[tuple[object, ...], OptimizerEntries] = {}
        self._names: dict[int, str] = {}
        self._spare_names: dict[int, str] = {}
        self._merged: _Merged | None = None
        self.rank_suffix: str = ""
        """Where set ("@rank-00003"): tensors of stateful objects and of plain data are kept by rank, with this at the end of their names.

        Others are taken to be equal on all ranks, which they are for modules and optimizers, or are DTensors.
        """
        self.replicated: Sequence[str] = ()
        """Patterns (as in ``fnmatch``) of names that are equal on all ranks all the same."""

    def collect(self, state: Mapping[str, Any]) -> Collected:
        """Walk the state. StateError / LayoutError name the path of what cannot be stored, before anything is written."""
        root = scan(state)
        walk = self._walk(root)
        merged = self._merged = self._again(walk) or self._merge(walk)
        document = b'{"state":%b}' % self._document(root, walk)
        return Collected(merged.leaves, merged.aliases, document, walk.optimizers, walk.unfenced, merged.structure)

    # -- the walk ---------------------------------------------------------------------------------------------------------

    def _walk(self, root: BranchNode) -> _Walk:
        walk = _Walk()
        nodes = list(leaves_of(root))
        _check_prefixes(root, nodes)
        found: dict[tuple[object, ...], tuple[list[Found], list[Found]]] = {}
        modules: dict[tuple[object, ...], ModuleEntries] = {}
        stale = False
        for node in nodes:
            if isinstance(node, ModuleNode):
                entries = self._modules.get(node.keys)
                if entries is None or entries.given is not node.module or not entries.unchanged():
                    entries, stale = ModuleEntries(node.module, node.keys, dotted(node.keys)), True
                modules[node.keys] = entries
                found[node.keys] = self._module(entries, walk)
        if stale or modules.keys() != self._modules.keys():
            self._modules = modules
            self._names, self._spare_names = names_of(modules.values())
            self._optimizers.clear()
        called = self._called(nodes) if self.rank_suffix else None
        for node in nodes:
            if not isinstance(node, (ModuleNode, OptimizerNode)):
                into: list[Found] = []
                value = node.owner.state_dict() if isinstance(node, StatefulNode) else node.value  # type: ignore[union-attr]
                kind = b"stateful" if isinstance(node, StatefulNode) else b"value"
                walk.encoded[node.keys] = b'{"%b":%b}' % (kind, encode_data(value, node.keys, into, None, called))
                found[node.keys] = _NOTHING, into
        self._take_optimizers(nodes, found, walk)
        walk.blocks = [found[node.keys] for node in nodes]
        return walk

    def _called(self, nodes: Sequence[Node]) -> Callable[[str, torch.Tensor], str]:
        """What tensors of objects and plain data are called where each rank keeps its own."""
        optimizers = [innermost(node.optimizer) for node in nodes if isinstance(node, OptimizerNode)]
        stepped = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        suffix, replicated = self.rank_suffix, list(self.replicated)

        def called(name: str, tensor: torch.Tensor) -> str:
            equal = (
                as_dtensor(tensor) is not None
                or id(tensor) in stepped
                or id(tensor) in self._names
                or any(fnmatch.fnmatchcase(name, pattern) for pattern in replicated)
            )
            return name if equal else name + suffix

        return called

    def _module(self, entries: ModuleEntries, walk: _Walk) -> tuple[list[Found], list[Found]]:
        tensors, plain = entries.dynamic()
        encoded = []
        for name, value in plain:
            encoded.append(b"%b:%b" % (msgspec.json.encode(name), encode_data(value, (*entries.keys, name), tensors)))
        walk.encoded[entries.keys] = b'{"module":{%b}}' % b",".join(encoded)
        return entries.static, tensors

    def _take_optimizers(self, nodes: list[Node], found: dict[tuple[object, ...], tuple[list[Found], list[Found]]], walk: _Walk) -> None:
        optimizers: dict[tuple[object, ...], OptimizerEntries] = {}
        loose = {id(one.tensor): one.name for _, dynamic in reversed(found.values()) for one in reversed(dynamic)}
        for node in nodes:
            if not isinstance(node, OptimizerNode):
                continue
            entries = self._optimizers.get(node.keys)
            if (
                entries is None
                or entries.given is not node.optimizer
                or not entries.unchanged()
                or any(loose.get(key, name) != name for key, name in entries.by_data.items())
            ):
                entries = OptimizerEntries(node.optimizer, node.keys, dotted(node.keys), {**self._spare_names, **loose, **self._names})
                entries.by_data = {key: name for key, name in entries.named.items() if key not in self._names}
            optimizers[node.keys] = entries
            into: list[Found] = []

            def tell(value: object, keys: tuple[object, ...], late: Callable[[str, torch.Tensor], bool], into: list[Found] = into) -> bytes:
                return encode_data(value, keys, into, late)

            walk.encoded[node.keys] = b'{"optimizer":%b}' % entries.encode(tell)
            found[node.keys] = entries.static, into
            walk.optimizers.append(entries.optimizer)
            if not is_fenced(entries.optimizer):
                walk.unfenced.append(entries.path)
        self._optimizers = optimizers
        self._mark_late(found, optimizers)

    def _mark_late(
        self, found: dict[tuple[object, ...], tuple[list[Found], list[Found]]], optimizers: Mapping[tuple[object, ...], OptimizerEntries]
    ) -> None:
        """Tensors of plain data that an optimizer steps are copied late, like parameters."""
        stepped = [entries.named for entries in optimizers.values()]
        for _, dynamic in found.values():
            for index, one in enumerate(dynamic):
                if not one.late and any(id(one.tensor) in named for named in stepped):
                    dynamic[index] = one._replace(late=True)

    # -- one list of leaves ------------------------------------------------------------------------------------------------

    def _again(self, walk: _Walk) -> _Merged | None:
        """The last walk's leaves, brought up to date, when only contents of dynamic tensors differ."""
        last = self._merged
        if (
            last is None
            or len(last.static) != len(walk.blocks)
            or any(a is not b for a, (b, _) in zip(last.static, walk.blocks, strict=True))
        ):
            return None
        if not last.storages.unchanged():
            return None
        dynamic = [one for _, several in walk.blocks for one in several]
        if len(dynamic) != len(last.dynamic):
            return None
        seen: dict[object, str] = {}
        fresh: dict[int, Leaf] = {}
        for now, before in zip(dynamic, last.dynamic, strict=True):
            if now.name != before.found.name or now.late != before.found.late:
                return None
            key = identity(now.tensor)
            tied = last.stored.get(key) or seen.setdefault(key, now.name)
            if tied != before.tied or (key != before.identity and before.identity in last.stored):
                return None
            if before.leaf >= 0 and (before.owned or key != before.identity):
                leaf = last.leaves[before.leaf]
                if spec_of(now) != leaf.spec or unwrapped(now.tensor, now.name)[1] != leaf.chunks:
                    return None
                fresh.update(_replace(before, now, leaf))
            before.found, before.identity = now, key
        if fresh:
            last.leaves = [fresh.get(index, leaf) for index, leaf in enumerate(last.leaves)]
        return last

    def _merge(self, walk: _Walk) -> _Merged:
        """All leaves, ties and names checked."""
        old = {leaf.spec.name: leaf for leaf in self._merged.leaves} if self._merged else {}
        moved = self._merged.storages.moved() if self._merged else set()
        where: dict[str, Found] = {}
        stored: dict[object, str] = {}
        static_ids: dict[object, str] = {}
        late: dict[str, bool] = {}
        aliases: dict[str, str] = {}
        chosen: dict[str, Found] = {}
        dynamic: list[_Dynamic] = []
        for static, several in walk.blocks:
            for is_dynamic, one in [*((False, one) for one in static), *((True, one) for one in several)]:
                other = where.setdefault(one.name, one)
                if other is not one:
                    raise StateError(
                        f"{way(other.keys)} and {way(one.keys)} have the same name {one.name!r}",
                        key=one.name,
                        kind="names",
                        hint="rename one of them",
                    )
                key = identity(one.tensor)
                tied = stored.setdefault(key, one.name)
                if tied == one.name:
                    chosen[one.name] = one
                else:
                    aliases[one.name] = tied
                late[tied] = late.get(tied, False) or one.late
                if is_dynamic:
                    dynamic.append(_Dynamic(one, key, -1, tied))
                else:
                    static_ids.setdefault(key, tied)
        leaves: list[Leaf] = []
        index: dict[str, int] = {}
        for name, one in chosen.items():
            local, chunks = unwrapped(one.tensor, name)
            leaf, before = Leaf(spec_of(one), local, late[name], chunks), old.get(name)
            same = (
                before is not None
                and before.tensor is local
                and id(local) not in moved
                and (before.spec, before.late, before.chunks) == (leaf.spec, leaf.late, leaf.chunks)
            )
            index[name] = len(leaves)
            leaves.append(before if same and before is not None else leaf)
        for entry in dynamic:
            entry.leaf = index.get(entry.found.name, -1)
        _check_groups(leaves)
        # Modules come first in the check of storages: their shapes are compared as well.
        in_modules = {id(one.static) for one in self._modules.values()}
        parts = [static for static, _ in walk.blocks]
        shaped = [one.tensor for static in parts if id(static) in in_modules for one in static]
        others = [one.tensor for static in parts if id(static) not in in_modules for one in static]
        body = msgspec.json.encode([[leaf.spec, leaf.late, leaf.chunks] for leaf in leaves] + [list(pair) for pair in aliases.items()])
        return _Merged(parts, Storages(shaped, others), dynamic, static_ids, leaves, aliases, xxhash.xxh3_128_hexdigest(body))

    def _document(self, node: Node, walk: _Walk) -> bytes:
        if not isinstance(node, BranchNode):
            return walk.encoded[node.keys]
        children = [self._document(child, walk) for _, child in node.children]
        if node.kind == "dict":
            children = [
                b"[%b,%b]" % (values.encode(key, path=dotted(node.keys)), child)
                for (key, _), child in zip(node.children, children, strict=True)
            ]
        return b'{"%b":[%b]}' % (node.kind.encode(), b",".join(children))


def names_of(modules: Iterable[ModuleEntries]) -> tuple[dict[int, str], dict[int, str]]:
    """Full names by identity of the tensors in modules.

    The second for parameters of modules whose own ``state_dict`` may call them otherwise or leave them out.
    """
    names: dict[int, str] = {}
    spare: dict[int, str] = {}
    for entries in modules:
        for one in entries.static:
            names.setdefault(id(one.tensor), one.name)
        if entries.by_method:
            for name, parameter in entries.root.named_parameters():
                spare.setdefault(id(parameter), f"{entries.path}.{entries.called(name)}")
    return names, spare


def _replace(before: _Dynamic, now: Found, leaf: Leaf) -> dict[int, Leaf]:
    """The leaf for new contents under an old name.

    Small eager ones on the host are copied into a tensor of ours, so that the leaf can stay.
    """
    if as_dtensor(now.tensor) is not None:
        return {before.leaf: dataclasses.replace(leaf, tensor=local_of(now.tensor))}
    if now.late or now.tensor.device.type != "cpu" or now.tensor.numel() * now.tensor.element_size() > _OWNED_NBYTES:
        return {before.leaf: dataclasses.replace(leaf, tensor=now.tensor)}
    with torch.no_grad():
        if before.owned:
            leaf.tensor.copy_(now.tensor)
            return {}
        before.owned = True
        return {before.leaf: dataclasses.replace(leaf, tensor=now.tensor.detach().clone(memory_format=torch.contiguous_format))}


def _check_prefixes(root: BranchNode, nodes: Sequence[Node]) -> None:
    """Names of a module or optimizer must not be mixed with another entry's whose key has dots in it."""
    for node in nodes:
        if not isinstance(node, DataNode) and not all(map(str, node.keys)):
            raise StateError(
                f"{way(node.keys)} has an empty key, so it has no name", key=dotted(node.keys), kind="names", hint="use non-empty keys"
            )
    paths = {dotted(node.keys): node for node in nodes}
    if len(paths) < len(nodes):
        by_path: dict[str, Node] = {}
        for node in nodes:
            other = by_path.setdefault(dotted(node.keys), node)
            if other is not node:
                raise StateError(
                    f"{way(other.keys)} and {way(node.keys)} have the same name {dotted(node.keys)!r}",
                    key=dotted(node.keys),
                    kind="names",
                    hint="rename one of them",
                )
    for path, node in paths.items():
        at = path.find(".")
        while at >= 0:
            outer = paths.get(path[:at])
            if outer is not None and not isinstance(outer, DataNode):
                raise StateError(
                    f"{way(node.keys)} would be named inside {way(outer.keys)}: {path!r}", key=path, kind="names", hint="rename one of them"
                )
            at = path.find(".", at + 1)


def _check_groups(leaves: Sequence[Leaf]) -> None:
    """Top-level keys name files; all names are text."""
    for leaf in leaves:
        if not is_text(leaf.spec.name):
            name = leaf.spec.name
            raise StateError(f"the tensor's name {name!r} is not valid text", key=name, kind="names", hint="rename it")
    for group in {leaf.spec.group for leaf in leaves}:
        if "/" in group or "\0" in group or group in {".", ".."}:
            raise StateError(
                f"top-level key {group!r} holds tensors but cannot name a file", key=group, kind="names", hint="leave '/' out of it"
            )
