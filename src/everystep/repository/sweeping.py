"""Deleting: checkpoints that are forgotten, and what crashes and interrupted deletions have left."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from everystep.errors import ConflictError, NotFoundError, StoreError
from everystep.manifest import decode
from everystep.repository.published import Published
from everystep.repository.records import (
    UNREADABLE,
    CheckpointKey,
    KnownReferences,
    References,
    Swept,
    age,
    manifest_key,
    parsed,
    tombstone_key,
    within,
)
from everystep.store import Store

_log = logging.getLogger(__name__)
_RECORDS = ("pins/", "verified/", "metrics/")
_EXPORTED = "consolidated/"
_TEMPORARY_AGE_S = 3600.0


class Forgetting(Published):
    """What of ``Repository`` deletes."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._known = KnownReferences()

    # -- forgetting: tombstone, manifest, data ---------------------------------------------------------------
    def forget(self, key: CheckpointKey, *, sole_committer: bool = False) -> int:
        """Unpublish and delete; returns bytes freed.

        With ``sole_committer`` (nobody else can commit this key late: with several nodes, all have settled it) the tombstone goes at
        the end.
        Data that another checkpoint's manifest refers to stays until that one is forgotten too: what this one was the last to need of
        forgotten ones goes with it.

        Raises:
            ConflictError: It is pinned (``kind`` "pinned") or being read ("held"): nothing has changed.
        """
        return self._forget(key, sole_committer=sole_committer)

    def _forget(self, key: CheckpointKey, *, sole_committer: bool = False, heir: CheckpointKey | None = None) -> int:
        """``heir``: its reduction, which gets metrics that came late."""
        self._refuse_if_protected(key)
        created = self._fates.forget(key)
        try:
            self._refuse_if_protected(key)  # a reader that came in between saw no tombstone yet, but now we see its hold
        except ConflictError:
            if created:  # another's stays: the sweep calls it off, or goes on when the reader has finished
                self.store.delete(tombstone_key(key))
            raise
        lenders = self._lenders(key)
        freed = self._delete_manifest(key)
        if heir is not None and key in self._keys("metrics/"):
            self._merge_metrics(heir, self._metrics_to_merge(key)[0])
        bytes_of_data, rest = self._delete_data(key)
        freed += bytes_of_data + self._delete_lent(lenders, over=key.full if sole_committer else None)
        self._delete_records(key)
        if sole_committer and not rest:
            self.store.delete(tombstone_key(key))
        return freed

    def give_up(self, key: CheckpointKey, reason: str) -> int:
        """Decide that a checkpoint will never be committed, by any node, and delete what this store has of it; returns bytes freed.

        Any node may; the first decides. On a store of the node's own: not once its part has been given to another node, which may have
        committed it then. A deletion that fails is left to the sweep: what counts is the decision.

        Raises:
            ConflictError: It is committed (``kind`` "committed"): nothing has changed.
        """
        if not self._fates.give_up(key, reason):
            raise ConflictError(
                f"step {key.step} of attempt {key.attempt} in {self.store.url!r} is committed: it cannot be given up", step=key.step,
                key=str(key), kind="committed", hint="forget it instead",
            )  # fmt: skip
        freed = 0
        try:
            freed, _ = self._delete_data(key)
            self._delete_records(key)
        except StoreError as error:  # another node may be writing there still
            _log.warning("what was written of step %d (attempt %d), given up, is still there: %s", key.step, key.attempt, error)
        return freed

    def given_up(self, key: CheckpointKey) -> str | None:
        """Why a checkpoint can never be committed any more (given up or forgotten); None when it can, or is. By name, without a listing."""
        stone = self._fates.tombstone(key)
        if stone is None or (stone.given_up and self._fates.published(key)):
            return None
        return stone.reason or "it was forgotten"

    def _refuse_if_protected(self, key: CheckpointKey) -> None:
        protection = "pinned" if self.pinned(key) else "held" if self.held(key, now=time.time()) else ""
        if protection and key in self._keys("manifests/"):
            raise ConflictError(
                f"step {key.step} of attempt {key.attempt} in {self.store.url!r} is {'pinned' if protection == 'pinned' else 'being read'}",
                step=key.step, key=str(key), kind=protection,
                hint="unpin it first" if protection == "pinned" else "try again when the reader has finished",
            )  # fmt: skip

    def _delete_manifest(self, key: CheckpointKey) -> int:
        try:
            nbytes = self.store.size(manifest_key(key))
        except NotFoundError:
            return 0
        self.store.delete(manifest_key(key))
        return nbytes

    def _delete_data(self, key: CheckpointKey) -> tuple[int, bool]:
        """Delete a checkpoint's data as far as no manifest refers to it; (bytes freed, whether something stays)."""
        needed, unreadable = self._references(but=key)
        if any(age(other) > age(key) for other in unreadable):
            return 0, True
        folder = f"data/{key}/"
        if not any(name.startswith(folder) for name in needed):
            return self.store.delete_folder(folder), False
        freed = 0
        exported = self._exported_beside(key)
        for name, nbytes in list(self.store.list(folder)):
            if name not in needed and not name.startswith(exported):
                self.store.delete(name)
                freed += nbytes
        return freed, True

    def _exported_beside(self, key: CheckpointKey) -> tuple[str, ...]:
        """The model that was exported into a checkpoint's folder: it stays for as long as a reduction of that one is there."""
        names = self._keys("manifests/")
        reductions = {one for one in names if one.reduced and one.full == key}
        there = reductions - self._fates.gone(reductions, self._keys("forgotten/")) if reductions else reductions
        return (f"data/{key}/{_EXPORTED}",) if there else ()

    def _lenders(self, key: CheckpointKey) -> set[CheckpointKey]:
        """Forgotten checkpoints in whose folders data of this one lies. Its manifest is read only where there may be some."""
        if not self._keys("forgotten/") - {key}:
            return set()
        try:
            names = self._read_references(key, self.store.size(manifest_key(key)))
        except (NotFoundError, *UNREADABLE):
            return {key.full} - {key}
        return {owner for name in names if name.startswith("data/") and (owner := parsed(name.split("/")[1]))}

    def _delete_lent(self, lenders: Collection[CheckpointKey], *, over: CheckpointKey | None = None) -> int:
        """Of forgotten checkpoints the data that was there for one that is gone by now. ``over``: whose tombstone may go as well."""
        if not lenders:
            return 0
        forgotten, committed = self._keys("forgotten/"), self._keys("manifests/")
        freed = 0
        for lender in sorted(lenders, key=age):
            if lender in forgotten and lender not in committed:
                nbytes, rest = self._delete_data(lender)
                freed += nbytes
                if lender == over and not rest:
                    self.store.delete(tombstone_key(lender))
        return freed

    def _delete_records(self, key: CheckpointKey) -> None:
        self.store.delete_folder(f"holds/{key}/")
        for folder in _RECORDS:
            if key in self._keys(folder):
                self.store.delete(f"{folder}{key}.json")

    def _references(self, *, but: CheckpointKey | None = None) -> tuple[set[str], list[CheckpointKey]]:
        """Object keys of other checkpoints that committed manifests refer to, and the manifests that could not be read.

        Each manifest is read once by each process: the rest of the time this costs three listings. Another process may reduce a checkpoint
        meanwhile: it creates the new manifest, then leaves the tombstone, then deletes the old manifest, and one of the two has to be
        seen. So tombstones are listed first, and manifests until nothing has changed between two listings.
        """
        needed: set[str] = set()
        unreadable: set[CheckpointKey] = set()
        forgotten = self._keys("forgotten/")
        sizes, seen = self._sizes("manifests/"), set[CheckpointKey]()
        gone = self._fates.gone(sizes, forgotten)
        while True:
            for key in sizes.keys() - gone - seen:
                if key == but:
                    continue
                try:
                    needed |= self._read_references(key, sizes[key])
                except NotFoundError:
                    continue
                except UNREADABLE:
                    unreadable.add(key)
            again = self._sizes("manifests/")
            if again.keys() == sizes.keys():
                break
            seen |= sizes.keys()
            sizes = again
        self._known.keep(sizes)
        return needed, sorted(unreadable, key=age)

    def _read_references(self, key: CheckpointKey, nbytes: int) -> frozenset[str]:
        known = self._known.get(key, nbytes)
        if known is not None:
            return known
        data = self.store.get(manifest_key(key))
        found = decode("manifest", data, References, key=manifest_key(key))
        return self._known.put(key, len(data), (stored.key for stored in found.objects))

    # -- sweeping ------------------------------------------------------------------------------------------------
    def plan_sweep(self, *, now: float, in_progress: Sequence[CheckpointKey] = (), sole_committer: bool = False) -> list[Swept]:
        """Data nobody refers to and that no attempt can still commit, half-done deletions, expired holds, temporary files.

        With ``sole_committer`` the caller is the only one who could commit anything of the newest attempt: what of it is not
        ``in_progress`` is left over too, although the attempt is alive. With several nodes on one store nobody is: what the newest attempt
        has not committed stays while it lives, unless it is given up; ``in_progress`` are the keys that any node has not settled yet.
        On a store of one of several nodes' own, what has its part stays until a newer one is committed: other nodes may have committed it.
        What looks deletable but has to stay for now is listed with ``blocked`` and the reason.
        """
        names, forgotten = self._keys("manifests/"), self._keys("forgotten/")
        marks = {key for key in names & forgotten if self._fates.marked(key)}
        late = {key for key in (names & forgotten) - marks if self._fates.lost(key)}
        manifests, forgotten = names - marks, forgotten - late
        # Folders first, then manifests: what is committed in between must not look like a leftover.
        with_data = self._with_data()
        folders = with_data - (self._keys("manifests/") - marks) | (manifests & forgotten)
        newest, busy = self.newest_attempt(), frozenset(in_progress)
        alive = not sole_committer and self._lives(newest, now)
        limits, lives = self._limits(), {key.attempt: self._lives(key.attempt, now) for key in folders if key.attempt < newest}
        planned = [Swept(tombstone_key(key), "it was given up too late: it is committed", 0) for key in sorted(late, key=age)]
        elsewhere = self._perhaps_elsewhere(folders - forgotten - busy, manifests - forgotten, limits)
        doomed: dict[CheckpointKey, str] = {}
        for key in sorted((folders | forgotten) - busy - elsewhere, key=age):
            if key in forgotten:
                doomed[key] = self._why_forgotten(key) if key in folders else ""
            elif key.attempt < newest:
                # What the newest attempt goes on from may still arrive: its trainer was restored from memory before the disk had it.
                if lives[key.attempt] and within(key, limits):
                    continue
                doomed[key] = f"attempt {key.attempt} ended before it was committed"
            elif key.attempt == newest and not alive:
                doomed[key] = f"attempt {newest} is not alive any more and never committed it"
        planned += self._plan_doomed(doomed, folders, manifests, now=now)
        kept = (manifests - forgotten) | busy | with_data
        planned += self._plan_records(kept=kept, newest=newest, alive=alive, doomed=doomed, now=now)
        planned += self._plan_tombstones(forgotten - folders - busy, marks, newest=newest, now=now)
        # Whoever writes what is neither committed nor given up may be slow, but is there.
        written = busy | {key for key in with_data - manifests - forgotten if key.attempt >= newest and alive}
        planned += self._plan_temporary(written, planned, now=now)
        return planned

    def _why_forgotten(self, key: CheckpointKey) -> str:
        stone = self._fates.tombstone(key)
        return f"it was given up: {stone.reason}" if stone is not None and stone.given_up else "its deletion was interrupted"

    def perhaps_elsewhere(self) -> set[CheckpointKey]:
        """Checkpoints of the lineage that are not committed here and not given up, but of which this node's part is durable.

        Only where each node has a store of its own: other nodes may have committed them to theirs, and what is here is this node's share.
        Those older than the newest committed one are left out. A manifest found elsewhere can be committed here too, with ``commit``.
        """
        with_data = self._with_data()
        names, forgotten = self._keys("manifests/"), self._keys("forgotten/")
        committed = names - self._fates.gone(names, forgotten)
        return self._perhaps_elsewhere(with_data - names - forgotten, committed, self._limits())

    def _perhaps_elsewhere(
        self, keys: Collection[CheckpointKey], committed: Collection[CheckpointKey], limits: Mapping[int, int | None]
    ) -> set[CheckpointKey]:
        """Uncommitted ones that other nodes may have committed to stores of their own: this node's part, all they need of it, is here."""
        newest = max((key for key in committed if within(key, limits)), key=age, default=None)
        found = set()
        for key in keys:
            if within(key, limits) and (newest is None or age(key) > age(newest)):
                with contextlib.suppress(*UNREADABLE):
                    record = self.attempt_record(key.attempt)
                    if record is not None and record.nodes > 1 and not record.shared and self.parts_there(key):
                        found.add(key)
        return found

    def _plan_doomed(
        self, doomed: Mapping[CheckpointKey, str], folders: Collection[CheckpointKey], manifests: Collection[CheckpointKey], *, now: float
    ) -> Iterator[Swept]:
        needed, unreadable = self._references() if any(key in folders for key in doomed) else (set(), [])
        pins, held = self._keys("pins/"), self._held(now=now)
        for key, reason in doomed.items():
            if key in manifests and key in pins:
                yield Swept(f"forgotten/{key}.json", "its deletion was called off: it is pinned", 0)
            elif key in manifests and key in held:
                yield Swept(manifest_key(key), f"{reason}, but it is being read", 0, blocked=True)
            elif key in manifests:
                yield Swept(manifest_key(key), reason, self._nbytes(f"data/{key}/"))
            elif key in folders:
                later = next((other for other in unreadable if age(other) > age(key)), None)
                folder = f"data/{key}/"
                if later is not None:
                    why = f"the unreadable manifest of step {later.step} (attempt {later.attempt}) may refer to it: forget that one first"
                    yield Swept(folder, f"{reason}, but {why}", 0, blocked=True)
                elif any(name.startswith(folder) for name in needed):
                    stays = self._exported_beside(key)
                    found = ((name, nbytes) for name, nbytes in self.store.list(folder) if not name.startswith(stays))
                    yield from (Swept(name, reason, nbytes) for name, nbytes in found if name not in needed)
                else:
                    yield Swept(folder, reason, self._nbytes(folder))

    def _plan_records(
        self, *, kept: Collection[CheckpointKey], newest: int, alive: bool, doomed: Collection[CheckpointKey], now: float
    ) -> Iterator[Swept]:
        for name, key, until in self._holds():
            if until <= now and key not in doomed:
                yield Swept(name, "expired hold", 0)
        # Records first, then data and manifests: a record whose checkpoint is being committed has its data before it.
        recorded = [(folder, key) for folder in _RECORDS for key in sorted(self._keys(folder) - set(kept))]
        there = self._with_data() | self._keys("manifests/") if recorded else set()
        oldest = min((key for key in kept if key.attempt == newest), default=None)
        for folder, key in recorded:
            # Of a live attempt what is older than all it keeps is no save on its way; but a pin may wait for one.
            passed = key.attempt == newest and oldest is not None and key < oldest and folder != "pins/"
            # A reduction has no data of its own: it is committed while what it is made of is there.
            if not {key, key.full} & there and (key in doomed or key.attempt < newest or (key.attempt == newest and not alive) or passed):
                yield Swept(f"{folder}{key}.json", "its checkpoint is gone", 0)

    def _plan_tombstones(
        self, keys: Collection[CheckpointKey], marks: Collection[CheckpointKey], *, newest: int, now: float
    ) -> Iterator[Swept]:
        """Tombstones outlive their attempt: they go when it is superseded and has let its time run out. A mark goes before its own."""
        lives: dict[int, bool] = {}
        for key in sorted(keys):
            if key.attempt < newest and not lives.setdefault(key.attempt, self._lives(key.attempt, now)):
                for name in [manifest_key(key)] * (key in marks) + [tombstone_key(key)]:
                    yield Swept(name, f"attempt {key.attempt} is over", 0)

    def _plan_temporary(self, written: Collection[CheckpointKey], planned: Sequence[Swept], *, now: float) -> Iterator[Swept]:
        swept = tuple(item.key for item in planned if item.key.endswith("/") and not item.blocked)
        for name, nbytes, modified_at in self.store.leftovers(""):
            owner = parsed(name.split("/")[1]) if name.startswith("data/") else None
            if modified_at < now - _TEMPORARY_AGE_S and owner not in written and not name.startswith(swept):
                yield Swept(name, "temporary file of a writer that is gone", nbytes)

    def sweep(self, planned: Sequence[Swept]) -> int:
        """Do it; returns bytes freed. An incomplete checkpoint is given up first, so that a late committer is refused."""
        freed = 0
        for item in planned:
            if item.blocked:
                continue
            parts = item.key.split("/")
            key = parsed(parts[1].removesuffix(".json")) if len(parts) > 1 else None
            if key is not None and parts[0] == "manifests" and not parts[-1].startswith(".") and not self._fates.marked(key):
                if self.pinned(key) or self.held(key, now=time.time()):
                    continue  # since the plan was made
                lenders = self._lenders(key)
                freed += self._delete_manifest(key) + self._delete_data(key)[0] + self._delete_lent(lenders)
                self._delete_records(key)
            elif key is not None and parts[0] == "data" and not parts[-1].startswith("."):
                freed += self._sweep_data(key, item)
            else:
                self.store.delete(item.key)
                freed += item.nbytes
        return freed

    def _sweep_data(self, key: CheckpointKey, item: Swept) -> int:
        if not self._fates.give_up(key, item.reason):
            return 0  # committed since the plan was made, perhaps acknowledged: it stays
        if item.key.endswith("/"):
            freed = self.store.delete_folder(item.key)
            self._delete_records(key)
            return freed
        nbytes = self.store.size(item.key)
        self.store.delete(item.key)
        return nbytes

    def _nbytes(self, folder: str) -> int:
        return sum(nbytes for _, nbytes in self.store.list(folder)) + sum(nbytes for _, nbytes, _ in self.store.leftovers(folder))
