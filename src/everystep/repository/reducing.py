"""Reducing a checkpoint: its manifest without some groups is committed under a new key, and the whole one is forgotten.

Theory of operation. A manifest never changes, so what is left of a checkpoint gets a manifest of its own, ``<key>-r1``, which refers to the
files in the whole one's folder. The order is that of any commit and any deletion: the files are there; the new manifest; the tombstone of
the whole one, its manifest, then those files that no manifest refers to any more. Whatever comes in between, one of the two is there.
While the new manifest is being made the whole one is held: who forgets it sees the hold, or has left a tombstone that we see. A reduction
made of a reduction is the next one, ``-r2``, and stands for all before it; what was dropped once stays dropped.

Each step can be repeated. A call that was killed is made again with the same arguments and goes on where that one stopped (for the time
of its hold it is refused as being read); what it left is swept otherwise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from everystep import values
from everystep.errors import ConfigError, ConflictError, CorruptionError, LayoutError, NotFoundError
from everystep.manifest import Manifest, Part, Shard, check, decode, document_entries
from everystep.policy import Candidate, protected
from everystep.repository.records import UNREADABLE, CheckpointKey, References, age, manifest_key, within
from everystep.repository.sweeping import Forgetting

_NULL = b"null"
_HOLD_S = 120.0
"""Reading and writing a manifest takes seconds at most; a killed call's hold keeps the next one away for no longer than this."""
_BRANCHES = ("dict", "list", "tuple")
_WHY = {
    "newest good": "it is the newest good one: a restore would take it",
    "newest verified": "it is the newest verified one",
    "pinned": "it is pinned",
    "held by a reader": "it is being read",
}
_KINDS = {"pinned": "pinned", "held by a reader": "held"}


class MayDrop(msgspec.Struct, frozen=True):
    """Whether a checkpoint may be reduced or dropped now; true or false by itself."""

    key: CheckpointKey
    may: bool
    reason: str
    """Why it may not; empty where it may."""
    kind: str = ""
    """For the error: "pinned", "held", "newest-good" or "no-checkpoint"."""

    def __bool__(self) -> bool:
        return self.may


# -- manifests ------------------------------------------------------------------------------------------------------------


def groups_of_kind(manifest: Manifest | Part, kind: str) -> tuple[str, ...]:
    """The groups (top-level entries of the state) that are of one kind on all ranks, sorted.

    Args:
        manifest: Of a checkpoint.
        kind: A word of the document: ``"optimizer"``, ``"module"``, ``"stateful"`` or ``"value"``. A list or mapping of optimizers is of
            this kind too; one that holds a model beside its optimizer is of none.

    Raises:
        CorruptionError: The plain values cannot be read.
    """
    kinds: dict[str, set[str]] = {}
    for entries in document_entries(manifest).values():
        for key, child in entries.items():
            kinds.setdefault(_group_of_key(key), set()).update(_kinds(child) if child != _NULL else ())
    return tuple(sorted(group for group, found in kinds.items() if found == {kind}))


def without_groups(manifest: Manifest, drop: Collection[str], *, number: int) -> Manifest:
    """The manifest of reduction ``number``: without the tensors and plain values of the groups in ``drop``.

    A tensor of such a group that another one shares (by a tied name, or as a value) stays, under its name. Metrics stay.

    Raises:
        LayoutError: There is no such group, or nothing would be left (``kind`` "groups").
        CorruptionError: The plain values cannot be read.
    """
    dropping = frozenset(drop)
    entries = document_entries(manifest)
    known = {spec.group for spec in manifest.tensors} | {_group_of_key(key) for found in entries.values() for key in found}
    strange = sorted(dropping - known - set(manifest.dropped))
    if strange:
        there = ", ".join(map(repr, sorted(known)))
        raise LayoutError(
            f"step {manifest.step} has no group {strange[0]!r} that could be dropped", step=manifest.step, key=strange[0], kind="groups",
            hint=f"there are {there}",
        )  # fmt: skip
    left = {which: {key: child for key, child in found.items() if _group_of_key(key) not in dropping} for which, found in entries.items()}
    groups = sorted(known)
    aliases = {alias: name for alias, name in manifest.aliases.items() if _group_of_name(alias, groups) not in dropping}
    shared = {*aliases.values(), *(ref.name for found in left.values() for child in found.values() for ref in values.refs(child))}
    numbers = [at for at, spec in enumerate(manifest.tensors) if spec.group not in dropping or spec.name in shared]
    if not numbers:
        raise LayoutError(
            f"nothing would be left of step {manifest.step} without {', '.join(map(repr, sorted(dropping)))}", step=manifest.step,
            kind="groups", hint="drop it as a whole",
        )  # fmt: skip
    shards, objects = _renumbered(manifest, numbers)
    by_rank = {which: _joined(found) for which, found in left.items() if which >= 0 and found}
    reduced = msgspec.structs.replace(
        manifest, tensors=tuple(manifest.tensors[at] for at in numbers), objects=tuple(manifest.objects[at] for at in objects),
        shards=shards, aliases=aliases, values=msgspec.Raw(b'{"state":{"dict":%b}}' % _joined(left[-1])), by_rank=by_rank, shared=True,
        reduced=number, dropped=tuple(sorted({*manifest.dropped, *dropping})),
    )  # fmt: skip
    check(reduced)
    return reduced


def _renumbered(manifest: Manifest, numbers: Sequence[int]) -> tuple[tuple[Shard, ...], list[int]]:
    """The shards of some tensors, by their new numbers, and the objects that they lie in."""
    tensor_of = {old: new for new, old in enumerate(numbers)}
    kept = [shard for shard in manifest.shards if shard.tensor in tensor_of]
    objects = sorted({shard.object for shard in kept})
    object_of = {old: new for new, old in enumerate(objects)}
    return tuple(
        msgspec.structs.replace(shard, tensor=tensor_of[shard.tensor], object=object_of[shard.object]) for shard in kept
    ), objects


def _joined(entries: Mapping[bytes, bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % b",".join(b"[%b,%b]" % pair for pair in entries.items()))


def _kinds(child: bytes) -> set[str]:
    """The words of the leaves below a node of the document."""
    found: set[str] = set()
    stack: list[Any] = [msgspec.json.decode(child)]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict) or len(node) != 1:
            raise CorruptionError("the stored plain values cannot be read: a node that is none", kind="values", hint="take an older step")
        [(word, body)] = node.items()
        if word in _BRANCHES:
            stack += [item[1] for item in body] if word == "dict" else body
        else:
            found.add(word)
    return found


def _group_of_key(key: bytes) -> str:
    """The group of a top-level entry of the document: its key, of a flat state the first part of it (as the trainer names files)."""
    try:
        text = str(values.decode(key))
    except (CorruptionError, LayoutError):  # of a type that only the program that saved it knows
        text = key.decode()
    return text.partition(".")[0] or text


def _group_of_name(name: str, groups: Iterable[str]) -> str:
    """The group of a tied name, which begins with its group's; only a group whose own name begins with a dot has to be looked for."""
    return name.partition(".")[0] or max((group for group in groups if (name + ".").startswith(group + ".")), key=len, default=name)


# -- the run ----------------------------------------------------------------------------------------------------------------


class Reducing(Forgetting):
    """What of ``Repository`` reduces and drops checkpoints whose export is at hand."""

    def commit(self, manifest: Manifest) -> None:
        """See ``Repository``."""
        raise NotImplementedError

    def _candidates(self, *, now: float, measured: bool) -> list[Candidate]:
        """All committed checkpoints as retention sees them. ``measured``: with their metrics."""
        keys, limits = self.keys(), self._limits()
        pins, held, verified = self._keys("pins/"), self._held(now=now), self._keys("verified/")
        with_metrics = self._keys("metrics/") if measured else set()
        return [
            Candidate(
                key=str(key), step=key.step, attempt=key.attempt, metrics=self._metrics_or_none(key) if key in with_metrics else {},
                pinned=key in pins, held=key in held, verified=self._read_verified(key) if key in verified else None,
                in_lineage=within(key, limits), reduced=key.reduced,
            )
            for key in keys
        ]  # fmt: skip

    def _metrics_or_none(self, key: CheckpointKey) -> dict[str, float]:
        try:
            return self.metrics(key)
        except (NotFoundError, *UNREADABLE):
            return {}

    # -- what may be dropped -------------------------------------------------------------------------------------
    def may_drop(self, key: CheckpointKey) -> MayDrop:
        """Whether a checkpoint may be reduced or dropped now: not the newest good or newest verified one, nor a pinned or held one.

        One that was reduced already (``key`` as it was saved) is told of under the key that it has now.
        """
        there = self.standing(key)
        if there is None:
            return MayDrop(key, may=False, reason="it is not there: forgotten, or never saved to disk", kind="no-checkpoint")
        return self._verdict(there, self._protected())

    def droppable(self, keys: Iterable[CheckpointKey], *, everything: bool = False) -> list[CheckpointKey]:
        """Which of ``keys`` may be reduced (or dropped: ``everything``) now and have not been yet, oldest first.

        For a caller that had to leave the newest ones: when newer ones have come it asks again about all that it has exported. Also
        names one whose reduction was interrupted. Those that are gone are left out; with ``everything`` a reduced one counts, under
        the key that it has now.
        """
        reasons, there = self._protected(), set(self.keys())
        interrupted = self._keys("manifests/") - there
        found = set()
        for key in keys:
            family = {one for one in there | interrupted if one.full == key.full}
            asked = family if everything else family & {key}
            stands = max((one.reduced for one in family & there), default=0)
            found |= {one for one in asked if (one.reduced < stands if one in interrupted else self._verdict(one, reasons))}
        return sorted(found, key=age)

    def _protected(self) -> dict[CheckpointKey, str]:
        """Those that are never removed, and why."""
        found = self._candidates(now=time.time(), measured=False)
        reasons = {CheckpointKey.parse(key): why for key, why in protected(found).items()}
        bad = {one.key for one in found if one.verified is False}
        for key in self.lineage():  # the newest good one may turn out to be unreadable: then a restore takes the next
            if not key.reduced and str(key) not in bad:
                if "newest good" not in reasons.get(key, ""):
                    reasons[key] = ", ".join(filter(None, (reasons.get(key, ""), "newest good")))
                with contextlib.suppress(NotFoundError, *UNREADABLE):
                    decode("manifest", self.store.get(manifest_key(key)), References, key=manifest_key(key))
                    break
        return reasons

    def _verdict(self, key: CheckpointKey, reasons: Mapping[CheckpointKey, str]) -> MayDrop:
        why = reasons.get(key, "")
        words = why.split(", ") if why else []
        kind = next((_KINDS[word] for word in words if word in _KINDS), "newest-good" if words else "")
        return MayDrop(key, may=not words, reason=" and ".join(_WHY[word] for word in words), kind=kind)

    def _refuse_protected(self, keys: Iterable[CheckpointKey]) -> None:
        reasons = self._protected()
        for key in keys:
            verdict = self._verdict(key, reasons)
            if not verdict:
                raise ConflictError(
                    f"step {key.step} of attempt {key.attempt} in {self.store.url!r} is neither reduced nor dropped: {verdict.reason}",
                    step=key.step, key=str(key), kind=verdict.kind, hint="try again when that is over: when newer ones have come",
                )  # fmt: skip

    # -- doing it --------------------------------------------------------------------------------------------------
    def reduce(self, key: CheckpointKey, *, drop: Sequence[str]) -> CheckpointKey:
        """Commit the checkpoint without the groups in ``drop``, then forget the whole one; returns the key under which it is now.

        Idempotent, also after a kill at any point. Groups that an earlier reduction dropped stay dropped. Metrics are taken along. The
        attempt is not touched: a running trainer goes on. The caller's own hold on it has to be over.

        Args:
            key: As it was saved, or reduced.
            drop: Groups: top-level entries of the state (see ``groups_of_kind``).

        Raises:
            NotFoundError: There is no such checkpoint, whole or reduced (``kind`` "no-checkpoint").
            ConflictError: It is protected (``may_drop``): ``kind`` "newest-good", "pinned", "held". A reader that came in the middle
                leaves both; the next call goes on.
            LayoutError: There is no such group, or nothing would be left.
            ConfigError: No groups are named; or its files are on several nodes' own disks (``kind`` "node-local").
            CorruptionError: Its manifest cannot be read.
        """
        wanted = frozenset((drop,) if isinstance(drop, str) else drop)
        if not wanted:
            raise ConfigError("no group is named that is to be dropped", key=str(key), kind="groups", hint="name some, such as 'optimizer'")
        self._refuse_elsewhere()
        family = self._family(key)
        target = family[-1]
        if wanted <= set(self.dropped(target)):
            family.pop()
        self._refuse_protected(family)
        if target in family:
            target = self._commit_reduced(target, wanted)
        names = self._keys("manifests/") | self._keys("forgotten/")
        for one in sorted((one for one in names if one.full == key.full and one.reduced < target.reduced), key=age):
            if one in self._keys("manifests/"):
                self._refuse_protected([one])
            self._forget(one, heir=target)
        return target

    def drop(self, key: CheckpointKey) -> int:
        """Forget a checkpoint and its reductions, unless it is protected; returns bytes freed. As ``reduce``, of everything.

        Raises:
            NotFoundError, ConflictError, ConfigError, CorruptionError: As ``reduce``.
        """
        self._refuse_elsewhere()
        family = self._family(key)
        for one in family:
            self._refuse_scattered(self.manifest(one))
        self._refuse_protected(family)
        return sum(self._forget(one) for one in family)

    def _family(self, key: CheckpointKey) -> list[CheckpointKey]:
        """The checkpoint and its reductions, as far as they are there; the newest reduction last."""
        family = [one for one in self.keys() if one.full == key.full]
        if not family:
            raise NotFoundError(
                f"no checkpoint of step {key.step} of attempt {key.attempt} in {self.store.url!r}", step=key.step, key=manifest_key(key),
                kind="no-checkpoint", hint="it is forgotten, or was never saved to disk; see: everystep ls",
            )  # fmt: skip
        return family

    def _commit_reduced(self, base: CheckpointKey, drop: frozenset[str]) -> CheckpointKey:
        with self.hold(base, ttl_s=_HOLD_S, required=True):
            newest = self._family(base)[-1]
            if newest.reduced > base.reduced:  # another process came first
                if drop <= set(self.dropped(newest)):
                    return newest
                raise self._in_another_way(newest)
            manifest = self.manifest(base)
            self._refuse_scattered(manifest)
            names = self._keys("manifests/") | self._keys("forgotten/")
            number = 1 + max(one.reduced for one in {base, *names} if one.full == base.full)
            target = CheckpointKey(base.step, base.attempt, number)
            reduced = without_groups(manifest, drop, number=number)
            found = self._metrics_or_none(base)
            if found:
                self._merge_metrics(target, found)
            try:
                self.commit(reduced)
            except ConflictError as error:
                if error.kind != "manifest":
                    raise
                raise self._in_another_way(target) from error
            if self.verified(base):  # what is left of it was looked at too
                self.record_verified(target, good=True, detail=f"as {base}", now=time.time())
        return target

    def _in_another_way(self, key: CheckpointKey) -> ConflictError:
        return ConflictError(
            f"step {key.step} of attempt {key.attempt} in {self.store.url!r} is being reduced in another way just now",
            step=key.step, key=str(key), kind="manifest", hint="try again",
        )  # fmt: skip

    def _refuse_scattered(self, manifest: Manifest) -> None:
        """ConfigError where some of the files are on the disks of other nodes."""
        if manifest.nodes == 1 or manifest.shared:
            return
        for stored in manifest.objects:
            try:
                whole = self.store.size(stored.key) == stored.nbytes
            except NotFoundError:
                whole = False
            if not whole:
                raise ConfigError(
                    f"step {manifest.step} lies on the own disks of {manifest.nodes} nodes: {stored.key!r} is not in {self.store.url!r}",
                    step=manifest.step, key=stored.key, kind="node-local",
                    hint="only a checkpoint all of whose files are in one store can be reduced or dropped by one call",
                )  # fmt: skip
