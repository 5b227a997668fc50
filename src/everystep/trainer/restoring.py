"""One restore while it is planned: what is to be filled and done, and what speaks against it."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from everystep import values
from everystep.errors import CorruptionError, LayoutError, StateError
from everystep.foreign.dtypes import DTYPES, WORDS
from everystep.manifest import TensorSpec
from everystep.region import Region
from everystep.trainer.sharding import as_dtensor, box, like, local_of, unwrapped
from everystep.trainer.tensors import fresh, identity, overlaps_itself, tell, untell, word_of

_CAST_NBYTES = 256 << 20
_LISTED = 10


class Wanted(NamedTuple):
    """A tensor to fill: with all of the stored one of that name, or with a region of it (of the tensor's sizes)."""

    name: str
    tensor: torch.Tensor
    region: Region | None = None


class TensorReader(Protocol):
    """A checkpoint being read, from memory or a store, as one rank sees it."""

    tensors: Mapping[str, TensorSpec]
    """By full name, tied names included; a tied name has the spec (and so the name) of the tensor that is stored."""
    values: bytes
    step: int
    beyond: bool
    """Whether this rank was not among those that saved, and ``values`` are another's."""
    by_rank: bool
    """Whether the ranks that saved had values of their own."""

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill each tensor (plain, dtype as stored, any strides, any device) with the verified bytes of its region, in place."""
        ...


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did."""

    restored: Sequence[str]
    """Full names of tensors, and paths of objects and plain values."""
    missing: Sequence[str]
    """Wanted by the state, not in the checkpoint (strict=False)."""
    unexpected: Sequence[str]
    """In the checkpoint, not wanted by the state (strict=False or include)."""
    kept: Sequence[str] = ()
    """Random number generators that are as they were: this rank was not among those that saved."""


class Phase(enum.IntEnum):
    """When something is done that is not filling tensors."""

    MODULES = 0
    OPTIMIZERS = 1
    DATA = 2
    STATEFUL = 3
    RNG = 4


class Restore:
    """One restore while it is planned: what is to be filled and done, and what speaks against it."""

    def __init__(self, reader: TensorReader, *, strict: bool, include: Sequence[str] | None, cast: bool, on_cpu: bool = False) -> None:
        self.reader = reader
        self.on_cpu = on_cpu
        self.strict = strict
        self.cast = cast
        self._include = None if include is None else [include] if isinstance(include, str) else list(include)
        self._matched: set[str] = set()
        self._filled: dict[object, str] = {}
        self.claimed: set[str] = set()
        self.restored: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.unfit: list[str] = []
        self.kept: list[str] = []
        self._wanted: list[Wanted] = []
        self._casts: list[Wanted] = []
        self._first: list[Callable[[], object]] = []
        self._later: list[tuple[Phase, Callable[[], object]]] = []

    # -- what nodes say ---------------------------------------------------------------------------------------------------

    def wants(self, name: str) -> bool:
        """Whether ``include`` asks for a full name or path."""
        if self._include is None:
            return True
        hits = [pattern for pattern in self._include if fnmatch.fnmatchcase(name, pattern)]
        self._matched.update(hits)
        return bool(hits)

    def wants_whole(self, path: str) -> bool:
        """The same for an object that is restored as one: ``sched`` and ``sched.*`` both ask for it."""
        return self.wants(path) or self.wants(path + ".")

    def refuse(self, why: str) -> None:
        """Something does not fit; all such things are told together."""
        self.unfit.append(why)

    def fill(self, name: str, target: torch.Tensor, *, into: str | None = None) -> None:
        """Tensor ``name`` of the checkpoint goes into ``target``; ``into`` is what the state calls it."""
        spec = self.reader.tensors[name]
        into = into or name
        self.claimed.add(name)
        try:
            word = word_of(target, into)
            wanted = _wanted(name, target, into)
        except StateError as error:
            self.refuse(
                error.message
                if target.device.type != "meta"
                else f"tensor {into!r} is on the meta device; call to_empty(device=...) on its module first"
            )
            return
        if tuple(target.shape) != spec.shape:
            self.refuse(f"{into!r} has shape {list(spec.shape)} in the checkpoint, {list(target.shape)} in the state")
        elif word != spec.dtype and not self.cast:
            self.refuse(f"{into!r} is {spec.dtype} in the checkpoint, {word} in the state (cast=True converts)")
        elif overlaps_itself(local_of(target)):
            self.refuse(f"{into!r} is an expanded tensor in the state: several elements are one memory cell")
        else:
            key = identity(target)
            stored = self._filled.get(key)
            if stored is None:
                self._filled[key] = spec.name
                (self._wanted if word == spec.dtype else self._casts).extend(wanted)
            elif stored != spec.name and self.strict:
                self.refuse(f"{into!r} is one tensor with another in the state, but the checkpoint has two: {stored!r} and {spec.name!r}")
            self.restored.append(into)

    def make(self, name: str, pattern: torch.Tensor | None, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor that tensor ``name`` goes into; laid out as ``pattern`` where the shapes are equal.

        Where ``pattern`` is a DTensor it is one too, of the same mesh: what torch computes with both wants that. Scalars are not.
        """
        spec = self.reader.tensors[name]
        if pattern is not None and as_dtensor(pattern) is not None and spec.shape:
            target = like(pattern, spec.shape, dtype, device)
        elif pattern is not None and tuple(pattern.shape) == spec.shape:
            target = torch.empty_like(local_of(pattern), dtype=dtype, device=device, requires_grad=False)
        else:
            target = torch.empty(spec.shape, dtype=dtype, device=device)
        self.claimed.add(name)
        (self._wanted if WORDS[dtype] == spec.dtype else self._casts).extend(_wanted(name, target, name))
        self.restored.append(name)
        return target

    def first(self, action: Callable[[], object]) -> None:
        """Do something when nothing speaks against the restore, before bytes are read."""
        self._first.append(action)

    def later(self, phase: Phase, action: Callable[[], object]) -> None:
        """Do something when the bytes are there."""
        self._later.append((phase, action))

    def decode(self, told: object, *, make: Callable[[values.Ref], object] | None = None) -> Any:
        """A value of the document, with fresh tensors that will be filled (those that ``make`` gives, where given)."""
        return values.decode(msgspec.json.encode(told), resolve=make or self._fresh, tagged=untell)

    def materialise(self, tree: Any) -> Any:
        """A tree with ``Ref`` in it, with fresh tensors that will be filled."""
        try:
            told = values.encode(tree, convert=_keep)
        except StateError as error:  # the tree came from the checkpoint: what cannot be stored was not stored by us
            raise CorruptionError(f"the checkpoint's values cannot be read: {error.message:.200}", kind="values",
                                  hint="take another copy or an older step") from None  # fmt: skip
        return values.decode(told, resolve=self._fresh, tagged=untell)

    def _fresh(self, ref: values.Ref) -> object:
        spec = self.reader.tensors.get(ref.name)
        if spec is None:
            raise CorruptionError(
                f"the checkpoint's values refer to tensor {ref.name!r}, which it does not hold",
                key=ref.name,
                kind="values",
                hint="take another copy or an older step",
            )
        value, tensor = fresh(values.Ref(ref.name, ref.kind.partition("@")[0]) if self.on_cpu else ref, spec)
        self.claimed.add(ref.name)
        self._wanted.append(Wanted(ref.name, tensor))
        return value

    # -- the end ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise LayoutError when something speaks against it; nothing has been changed yet."""
        unclaimed = [name for name in self.reader.tensors if name not in self.claimed]
        unexpected = [*self.unexpected, *unclaimed]
        asked = [name for name in unexpected if self.wants(name)]
        if self.strict and (self.missing or asked):
            sides = []
            if self.missing:
                sides.append(f"not in the checkpoint: {_listed(self.missing)}")
            if asked:
                sides.append(f"not in the state: {_listed(asked)}")
            raise LayoutError(
                f"step {self.reader.step} does not fit the state; {'; '.join(sides)}",
                step=self.reader.step,
                kind="names",
                key=(self.missing or asked)[0],
                hint="restore with strict=False, or choose names with include=[...]",
            )
        if self.unfit:
            raise LayoutError(
                f"step {self.reader.step} does not fit the state; {_listed(self.unfit, quote=False)}", step=self.reader.step, kind="layout"
            )
        if self.strict and self._include is not None:
            idle = [pattern for pattern in self._include if pattern not in self._matched]
            if idle:
                raise LayoutError(
                    f"include pattern {idle[0]!r} matches nothing in step {self.reader.step} or the state",
                    step=self.reader.step,
                    kind="include",
                    hint="patterns are matched with full names, such as 'model.*'",
                )
        self.unexpected = unexpected

    def run(self) -> None:
        """Fill, then do what comes later."""
        for prepare in self._first:
            prepare()
        with torch.no_grad():
            if self._wanted:
                self.reader.read(self._wanted)
            for batch in _batches(self._casts, self.reader):
                temporary = [
                    one._replace(tensor=torch.empty(one.tensor.shape, dtype=DTYPES[self.reader.tensors[one.name].dtype], device="cpu"))
                    for one in batch
                ]
                self.reader.read(temporary)
                for one, stored in zip(batch, temporary, strict=True):
                    one.tensor.copy_(stored.tensor)
        for _, action in sorted(self._later, key=lambda pair: pair[0]):
            action()

    def report(self) -> RestoreReport:
        """What was done."""
        restored, unexpected = dict.fromkeys(self.restored), dict.fromkeys(self.unexpected)
        return RestoreReport(tuple(restored), tuple(self.missing), tuple(unexpected), tuple(self.kept))


def _wanted(name: str, target: torch.Tensor, into: str) -> list[Wanted]:
    """What has to be read for a target: of a DTensor only this rank's part."""
    local, chunks = unwrapped(target.detach(), into)
    if chunks is None:
        return [Wanted(name, local)]
    return [Wanted(name, box(local, chunk.local), chunk.region) for chunk in chunks]


def _keep(value: object, path: str) -> object | None:
    return value if isinstance(value, (values.Ref, values.Tagged)) else tell(value)


def _listed(names: Sequence[str], *, quote: bool = True) -> str:
    shown = ", ".join(repr(name) if quote else name for name in names[:_LISTED])
    return shown + (f" and {len(names) - _LISTED} more ({len(names)} in all)" if len(names) > _LISTED else "")


def told_refs(told: object) -> list[str]:
    """The names of the tensors in a value of the document."""
    return [ref.name for ref in values.refs(msgspec.json.encode(told))]


def as_refs(told: object) -> Any:
    """A value of the document with a ``Ref`` in the place of each tensor."""
    return values.decode(msgspec.json.encode(told), tagged=untell)


def _batches(wanted: Sequence[Wanted], reader: TensorReader) -> Iterator[list[Wanted]]:
    batch: list[Wanted] = []
    size = 0
    for one in wanted:
        nbytes = one.tensor.numel() * DTYPES[reader.tensors[one.name].dtype].itemsize
        if batch and size + nbytes > _CAST_NBYTES:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += nbytes
    if batch:
        yield batch


# -- the document ---------------------------------------------------------------------------------------------------------


def document_of(reader: TensorReader) -> dict[str, Any]:
    """The document of a checkpoint's values: what the state is made of. CorruptionError when there is none."""
    try:
        told = msgspec.json.decode(reader.values)["state"]
        if len(told) != 1 or "dict" not in told:
            raise KeyError("dict")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"step {reader.step}: its values are not those of a state ({error})", step=reader.step, kind="values",
                              hint="take another copy or an older step") from None  # fmt: skip
    document: dict[str, Any] = told
    return document


_BODIES: Mapping[str, type] = {"module": dict, "optimizer": dict, "dict": list, "list": list, "tuple": list}
"""What the contents of each kind of entry are; those of plain values can be anything."""


def kind_of(told: Mapping[str, Any]) -> tuple[str, Any]:
    """What an entry of the document is, and its contents."""
    if isinstance(told, Mapping) and len(told) == 1:
        kind, body = next(iter(told.items()))
        pairs = kind != "dict" or (isinstance(body, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in body))
        if isinstance(body, _BODIES.get(kind, object)) and pairs:
            return kind, body
    raise CorruptionError("a checkpoint's values hold an entry of no known kind", kind="values", hint="take another copy or an older step")
