"""The run itself: ``Repository``. How it works is told in the package's docstring."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from everystep.errors import CapacityError, ConfigError, ConflictError, CorruptionError, NotFoundError, PermanentStoreError, StoreError
from everystep.manifest import FORMAT, Manifest, Part, check, decode, encode, join_metrics, split_metrics
from everystep.policy import Candidate, Keep, Kept, retain
from everystep.repository.records import (
    UNREADABLE,
    AliveRecord,
    Attempt,
    CheckpointKey,
    KnownReferences,
    MetricsRecord,
    References,
    RunRecord,
    Skipped,
    Swept,
    VerifiedRecord,
    age,
    manifest_key,
    parsed,
    part_name,
    within,
)
from everystep.repository.verifying import verify_objects, verify_parts
from everystep.store import Store, open_store

_log = logging.getLogger(__name__)
_NUMBER = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})(\.claim|\.json)")
_HOLD = re.compile(r"holds/([^/]+)/([0-9]{13,})-[0-9a-f]+\.json")
_RECORDS = ("pins/", "verified/", "metrics/")
_MERGING = threading.Lock()
"""Metrics are read, changed and written back: the threads of one process do that one after the other."""
_TEMPORARY_AGE_S = 3600.0


class Repository:
    """A run on one store. Cheap to make; holds no connection, and remembers only what never changes. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._run_id = ""
        self._known = KnownReferences()

    # -- the run ---------------------------------------------------------------------------------
    @classmethod
    def open(cls, url: str, *, create: bool = False) -> Repository:
        """The run at ``url``. NotFoundError when there is none (and not ``create``); ConfigError for a newer format."""
        repository = cls(open_store(url))
        repository.begin(create=create)
        return repository

    def begin(self, *, create: bool) -> None:
        """Read ``run.json``, or make it; see ``open``. One that is lost, of a run with checkpoints, is made again."""
        try:
            data = self.store.get("run.json")
        except NotFoundError as error:
            lost = any(True for _ in self.store.list("manifests/"))  # no reason to see no checkpoints, and to start over them
            if not create and not lost:
                raise NotFoundError(
                    f"no run at {self.store.url!r}", key=self.store.url, kind="no-run", hint="check the path; the first save makes a run"
                ) from error
            try:
                self.store.create("run.json", encode("run", RunRecord(secrets.token_hex(8))))
            except StoreError as failed:
                if create:
                    raise
                raise CorruptionError(
                    f"run {self.store.url!r} has checkpoints but no run.json, and none can be written: {failed}", key="run.json",
                    kind="no-run-record", hint="put run.json back, or make the folder writable: a new one is made then",
                ) from failed  # fmt: skip
            if lost:
                _log.warning("run %r had checkpoints but no run.json: it has a new one, with a new id", self.store.url)
            # Read back: where "create only if new" is not exclusive two starters agree on one id all the same.
            data = self.store.get("run.json")
        self._run_id = self._read_run(data).run_id

    def _read_run(self, data: bytes) -> RunRecord:
        try:
            told = msgspec.json.decode(data, type=dict[str, object]).get("format")
        except msgspec.DecodeError:
            told = None
        if isinstance(told, int) and told > FORMAT:
            raise ConfigError(
                f"run {self.store.url!r} uses format {told}, this everystep reads up to {FORMAT}", key=self.store.url, kind="format",
                hint="upgrade: pip install -U everystep",
            )  # fmt: skip
        return decode("run", data, RunRecord, key="run.json")

    @property
    def run_id(self) -> str:
        """Random id of the run from ``run.json``, read once."""
        if not self._run_id:
            self.begin(create=False)
        return self._run_id

    # -- attempts ----------------------------------------------------------------------------------
    def newest_attempt(self) -> int:
        """The highest attempt ever claimed; 0 when there is none. One listing."""
        return max(self._claims(), default=0)

    def start_attempt(self, *, parent: CheckpointKey | None, world: int = 1, nodes: int = 1, versions: dict[str, str] | None = None,
                      now: float, above: int = 0) -> Attempt:  # fmt: skip
        """Claim the next attempt (more than the highest seen here and more than ``above``) exclusively and record it."""
        number = max(self.newest_attempt(), above, parent.attempt if parent else 0) + 1
        while not self.store.claim(f"attempts/{number:06d}.claim"):
            number += 1
        attempt = Attempt(
            attempt=number, parent_attempt=parent.attempt if parent else None, parent_step=parent.step if parent else None,
            started_at=now, world=world, nodes=nodes, versions=versions or {},
        )  # fmt: skip
        name, data = f"attempts/{number:06d}.json", encode("attempt", attempt)
        # It may be ours: a mount that did not answer in time has perhaps done what was asked before it was asked again.
        if not self.store.create(name, data) and self.store.get(name) != data:
            raise ConflictError(f"attempt {number} of {self.store.url!r} is recorded already", key=name, kind="attempt")
        return attempt

    def attempts(self) -> dict[int, Attempt]:
        """Every recorded attempt by number; one whose record is unreadable is left out (and reported by ``problems``)."""
        return self._read_attempts()[0]

    def problems(self) -> list[Skipped]:
        """Records of attempts that cannot be read or are missing, and what is assumed instead."""
        return self._read_attempts()[1]

    def renew(self, attempt: int, *, now: float, ttl_s: float) -> None:
        """Say that the attempt is alive until ``now + ttl_s`` (``alive/<attempt>``)."""
        self.store.replace(f"alive/{attempt:06d}.json", encode("alive", AliveRecord(now + ttl_s)))

    def is_alive(self, attempt: int, *, now: float) -> bool:
        """Whether the attempt may still commit: it is the newest and has not let its time run out. True when its record is unreadable."""
        return attempt >= self.newest_attempt() and self._lives(attempt, now)

    def _lives(self, attempt: int, now: float) -> bool:
        if f"{attempt:06d}.json" not in self._names("alive/", ".json"):
            return False
        try:
            return decode("alive", self.store.get(f"alive/{attempt:06d}.json"), AliveRecord, key=f"alive/{attempt:06d}.json").until > now
        except NotFoundError:
            return False
        except UNREADABLE:
            return True  # when in doubt nothing is swept

    def _claims(self) -> set[int]:
        """Numbers of claims (folders) and of records (files)."""
        folders = [name for name in self.store.folders("attempts/") if name.endswith(".claim")]
        names = [*folders, *self._names("attempts/", ".json")]
        return {int(found[1]) for found in map(_NUMBER.fullmatch, names) if found}

    def _read_attempts(self) -> tuple[dict[int, Attempt], list[Skipped]]:
        found: dict[int, Attempt] = {}
        problems = []
        recorded = set(self._names("attempts/", ".json"))
        for number in sorted(self._claims()):
            key = f"attempts/{number:06d}.json"
            why = "has no record (it stopped while it started)"
            if key.removeprefix("attempts/") in recorded:
                try:
                    attempt = decode("attempt", self.store.get(key), Attempt, key=key)
                except UNREADABLE as error:
                    why = f"has an unreadable record: {error.message}"
                else:
                    whole = (attempt.parent_attempt is None) == (attempt.parent_step is None)
                    if whole and attempt.attempt == number and (attempt.parent_attempt or 0) < number:
                        found[number] = attempt
                        continue
                    why = "has a record that contradicts itself"
            assumed = "its parent is taken to be the newest checkpoint of the attempt before it"
            problems.append(Skipped(key, f"attempt {number} {why}; {assumed}"))
        return found, problems

    def _chain(self) -> list[tuple[int, int | None]]:
        """The newest attempt's lineage: (attempt, newest step that belongs to it or None for all), newest first."""
        claims = sorted(self._claims(), reverse=True)
        records = self.attempts()
        chain: list[tuple[int, int | None]] = []
        number, limit = claims[0] if claims else 0, None
        while number > 0:
            chain.append((number, limit))
            record = records.get(number)
            if record is None:  # lost: the attempt before it, whole
                number, limit = next((claim for claim in claims if claim < number), 0), None
            elif record.parent_attempt is None:
                break
            else:
                number, limit = record.parent_attempt, record.parent_step
        return chain

    # -- reading -----------------------------------------------------------------------------------
    def keys(self) -> list[CheckpointKey]:
        """All committed, not forgotten checkpoints, by attempt and step."""
        committed = self._keys("manifests/")  # before the tombstones: one that is forgotten meanwhile has its tombstone first
        return sorted(committed - self._keys("forgotten/"), key=age)

    def lineage(self) -> list[CheckpointKey]:
        """Committed checkpoints of the highest attempt's lineage, newest first."""
        limits = dict(self._chain())
        return sorted((key for key in self.keys() if within(key, limits)), key=age, reverse=True)

    def in_lineage(self, key: CheckpointKey) -> bool:
        """Whether a key (committed here or held in memory) belongs to the highest attempt's lineage."""
        return within(key, dict(self._chain()))

    def find(self, step: int | None) -> CheckpointKey:
        """The newest checkpoint, or that of ``step`` (the newest attempt's in the lineage, else the newest that has it).

        Raises:
            NotFoundError: There is none; names the steps there are.
        """
        keys, limits = self.keys(), dict(self._chain())
        own = [key for key in keys if within(key, limits)]
        fitting = [key for key in own if step in (None, key.step)] or [key for key in keys if key.step == step]
        if fitting:
            return fitting[-1]
        steps = sorted({key.step for key in keys})
        shown = ", ".join(map(str, steps[-10:]))
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        hint = f"there are steps {'..., ' if len(steps) > 10 else ''}{shown}" if steps else "nothing has been committed yet"
        if steps and step is None:
            hint = f"the newest attempt started from scratch; earlier attempts have steps {shown}: name one"
        raise NotFoundError(f"{what} in {self.store.url!r}", step=step, key=self.store.url, kind="no-checkpoint", hint=hint)

    def manifest(self, key: CheckpointKey) -> Manifest:
        """Read and check one manifest. CorruptionError, NotFoundError."""
        name = manifest_key(key)
        if key in self._keys("forgotten/"):
            raise NotFoundError(
                f"step {key.step} of attempt {key.attempt} in {self.store.url!r} is forgotten", step=key.step, key=name, kind="forgotten"
            )
        return self._checked(self.store.get(name), key)

    def metrics(self, key: CheckpointKey) -> dict[str, float]:
        """The manifest's metrics and those recorded later."""
        if f"{key}.json" not in self._names("metrics/", ".json"):
            return {}
        try:
            return self._read_metrics(key)
        except UNREADABLE:
            return dict(self.manifest(key).metrics)

    def _read_metrics(self, key: CheckpointKey) -> dict[str, float]:
        name = f"metrics/{key}.json"
        try:
            record = decode("metrics", self.store.get(name), MetricsRecord, key=name)
        except NotFoundError:
            return {}
        return join_metrics(record.metrics, record.nonfinite)

    def _checked(self, data: bytes, key: CheckpointKey) -> Manifest:
        manifest = decode("manifest", data, Manifest, key=manifest_key(key))
        if (manifest.step, manifest.attempt) != (key.step, key.attempt):
            raise CorruptionError(
                f"{manifest_key(key)!r} holds step {manifest.step} of attempt {manifest.attempt}", step=key.step, key=manifest_key(key),
                kind="manifest", hint="take an older step",
            )  # fmt: skip
        check(manifest)
        return manifest

    # -- writing, in this order: data, part, manifest --------------------------------------------------
    def data_key(self, key: CheckpointKey, file_name: str) -> str:
        """Store key of a data file of a checkpoint."""
        return f"data/{key}/{file_name}"

    def put_data(self, key: CheckpointKey, file_name: str, data: memoryview, *, nbytes: int) -> None:
        """Make one data file durable (``data`` may be padded, see ``Store.put``). An attempt's own leftover of the same name is replaced.

        Raises:
            ConflictError: The key is committed already: its data must not change.
        """
        if key in self._keys("manifests/"):
            raise ConflictError(
                f"step {key.step} of attempt {key.attempt} in {self.store.url!r} is committed already", step=key.step, key=str(key),
                kind="committed", hint="save each step once",
            )  # fmt: skip
        self._refuse_elsewhere()
        self.store.put(self.data_key(key, file_name), data, nbytes=nbytes)

    def put_part(self, part: Part) -> None:
        """Make the node's part durable."""
        data = encode("part", part)
        self.store.put(self.data_key(CheckpointKey(part.step, part.attempt), part_name(part.node)), data)

    def commit(self, manifest: Manifest) -> None:
        """Create the manifest. Idempotent.

        Raises:
            ConflictError: A higher attempt exists that does not go on from this step (``kind`` "superseded-attempt"), another manifest is
                there ("manifest"), or the key is forgotten ("forgotten"; then what this call created is withdrawn).
        """
        key = CheckpointKey(manifest.step, manifest.attempt)
        self._refuse_elsewhere()
        self._refuse_if_superseded(key)
        if key in self._keys("forgotten/"):
            raise self._was_forgotten(key)
        if manifest.metrics:
            self._merge_metrics(key, manifest.metrics, newer=False)
        data, name = encode("manifest", manifest), manifest_key(key)
        created = self.store.create(name, data)
        if not created:
            self._compare(name, data, key)
        if key in self._keys("forgotten/"):
            if created:
                self.store.delete(name)
            raise self._was_forgotten(key)
        if created and self.newest_attempt() > key.attempt and not self._all_there(manifest):
            # We slept between the first look and the creation, and a newer attempt's sweep took the data; its tombstone may be gone too.
            self.store.delete(name)
            raise self._was_forgotten(key)
        self._known.put(key, len(data), (stored.key for stored in manifest.objects))

    def _refuse_elsewhere(self) -> None:
        """Nothing is written where this run is no longer: moved or deleted under its writer, perhaps with another run in its place."""
        if not self._run_id:
            return
        try:
            there = self._read_run(self.store.get("run.json")).run_id
        except NotFoundError as error:
            raise PermanentStoreError(
                f"there is no run at {self.store.url!r} any more: it was moved or deleted while it was in use", key=self.store.url,
                kind="run-gone", hint="move it back, or start again with the path where it is now",
            ) from error  # fmt: skip
        if there != self._run_id:
            raise ConflictError(
                f"another run, {there!r}, is at {self.store.url!r} now, in the place of {self._run_id!r}", key=self.store.url,
                kind="other-run", hint="start again: what is saved there belongs to the new run",
            )  # fmt: skip

    def _compare(self, name: str, data: bytes, key: CheckpointKey) -> None:
        try:
            there = self.store.get(name)
        except NotFoundError:
            raise self._was_forgotten(key) from None
        if there != data:
            raise ConflictError(
                f"another checkpoint of step {key.step} of attempt {key.attempt} is committed in {self.store.url!r}", step=key.step,
                key=name, kind="manifest", hint="two trainers write to one run: stop one of them, or give it another path",
            )  # fmt: skip

    def _refuse_if_superseded(self, key: CheckpointKey) -> None:
        newest = self.newest_attempt()
        # What the newest attempt itself goes on from may still arrive: its trainer was restored from memory before the disk had it.
        if newest > key.attempt and not self.in_lineage(key):
            raise ConflictError(
                f"attempt {key.attempt} of run {self.store.url!r} cannot commit step {key.step}: attempt {newest} has started since",
                step=key.step, key=str(key), kind="superseded-attempt",
                hint="another trainer took over this run: stop this one, or give it another path",
            )  # fmt: skip

    def _was_forgotten(self, key: CheckpointKey) -> ConflictError:
        return ConflictError(
            f"step {key.step} of attempt {key.attempt} in {self.store.url!r} was given up or forgotten before it was committed",
            step=key.step, key=str(key), kind="forgotten", hint="save again at a later step",
        )  # fmt: skip

    def _all_there(self, manifest: Manifest) -> bool:
        try:
            return all(self.store.size(stored.key) == stored.nbytes for stored in manifest.objects)
        except NotFoundError:
            return False

    # -- small records ------------------------------------------------------------------------------------
    def record_metrics(self, key: CheckpointKey, metrics: dict[str, float]) -> None:
        """Metrics that come after the commit.

        Raises:
            NotFoundError: There is no such checkpoint (``kind`` "no-checkpoint"); nothing is recorded then.
            ConfigError: Its metrics are recorded in a newer format.
        """
        missing = NotFoundError(
            f"no checkpoint of step {key.step} of attempt {key.attempt} in {self.store.url!r}", step=key.step, key=manifest_key(key),
            kind="no-checkpoint", hint="it is forgotten, or was never saved to disk; see: everystep ls",
        )  # fmt: skip
        if key not in self._keys("manifests/") or key in self._keys("forgotten/"):
            raise missing
        self._merge_metrics(key, metrics, newer=True)
        # Write mine, then look at yours: the one who forgets deletes the manifest before the records, and may have come by already.
        if key not in self._keys("manifests/"):
            self.store.delete(f"metrics/{key}.json")
            raise missing

    def _merge_metrics(self, key: CheckpointKey, metrics: Mapping[str, float], *, newer: bool) -> None:
        with _MERGING:
            known, damaged = self._metrics_to_merge(key)
            merged = {**known, **metrics} if newer else {**metrics, **known}
            data = encode("metrics", MetricsRecord(*split_metrics(merged)))
            if damaged or not known or data != encode("metrics", MetricsRecord(*split_metrics(known))):
                self.store.replace(f"metrics/{key}.json", data)

    def _metrics_to_merge(self, key: CheckpointKey) -> tuple[dict[str, float], bool]:
        """What is recorded; of a damaged record what the manifest has of it, and True."""
        if f"{key}.json" not in self._names("metrics/", ".json"):
            return {}, False
        try:
            return self._read_metrics(key), False
        except CorruptionError as error:
            known = {}
            with contextlib.suppress(NotFoundError, CorruptionError):
                known = dict(self.manifest(key).metrics)
            _log.warning("%s: what was recorded after the save of step %d (attempt %d) is lost; its record is made again from %s",
                         error.message, key.step, key.attempt, "the manifest" if known else "what comes now")  # fmt: skip
            return known, True

    def record_verified(self, key: CheckpointKey, *, good: bool, detail: str, now: float) -> None:
        """The result of a verification."""
        self.store.replace(f"verified/{key}.json", encode("verified", VerifiedRecord(good, detail, now)))

    def verified(self, key: CheckpointKey) -> bool | None:
        """The last verification's result, None when there was none."""
        return self._read_verified(key) if key in self._keys("verified/") else None

    def _read_verified(self, key: CheckpointKey) -> bool | None:
        name = f"verified/{key}.json"
        try:
            return decode("verified", self.store.get(name), VerifiedRecord, key=name).good
        except (NotFoundError, *UNREADABLE):
            return None

    def pin(self, key: CheckpointKey, *, reason: str = "") -> None:
        """Keep this checkpoint whatever the retention says."""
        self.store.replace(f"pins/{key}.json", encode("pin", {"reason": reason}))

    def unpin(self, key: CheckpointKey) -> None:
        """Take the pin away."""
        self.store.delete(f"pins/{key}.json")

    def pinned(self, key: CheckpointKey) -> bool:
        """Whether it is pinned."""
        return key in self._keys("pins/")

    @contextlib.contextmanager
    def hold(self, key: CheckpointKey, *, ttl_s: float = 3600.0) -> Iterator[None]:
        """Protect a checkpoint while it is read; the hold expires by itself. On a read-only (or full) store it holds nothing.

        Read the manifest inside: NotFoundError then means that it was forgotten just before.
        """
        name = f"holds/{key}/{int((time.time() + ttl_s) * 1000):013d}-{secrets.token_hex(4)}.json"
        try:
            self.store.put(name, encode("hold", {}))
            held = True
        except (PermanentStoreError, CapacityError):
            held = False
        try:
            yield
        finally:
            if held:
                with contextlib.suppress(StoreError):  # it expires by itself
                    self.store.delete(name)

    def held(self, key: CheckpointKey, *, now: float) -> bool:
        """Whether somebody reads it."""
        return key in self._held(now=now, prefix=f"holds/{key}/")

    def _held(self, *, now: float, prefix: str = "holds/") -> set[CheckpointKey]:
        return {key for _, key, until in self._holds(prefix) if until > now}

    def _holds(self, prefix: str = "holds/") -> Iterator[tuple[str, CheckpointKey, float]]:
        """(name, key, until) of every hold; files of others are none."""
        for name, _ in self.store.list(prefix):
            found = _HOLD.fullmatch(name)
            key = parsed(found[1]) if found else None
            if found and key:
                yield name, key, int(found[2]) / 1000

    # -- forgetting: tombstone, manifest, data ---------------------------------------------------------------
    def retention(self, keep: Keep, *, now: float) -> list[Kept]:
        """Decide (not do) what to keep, with reasons. Sees all attempts' committed checkpoints; incomplete ones count for nothing."""
        keys, limits = self.keys(), dict(self._chain())
        pins, held, verified = self._keys("pins/"), self._held(now=now), self._keys("verified/")
        measured = self._keys("metrics/") if keep.best else set()
        return retain(
            [
                Candidate(
                    key=str(key), step=key.step, attempt=key.attempt, metrics=self._metrics_or_none(key) if key in measured else {},
                    pinned=key in pins, held=key in held, verified=self._read_verified(key) if key in verified else None,
                    in_lineage=within(key, limits),
                )
                for key in keys
            ],
            keep,
        )  # fmt: skip

    def _metrics_or_none(self, key: CheckpointKey) -> dict[str, float]:
        try:
            return self.metrics(key)
        except (NotFoundError, *UNREADABLE):
            return {}

    def forget(self, key: CheckpointKey, *, sole_committer: bool = False) -> int:
        """Unpublish and delete; returns bytes freed.

        With ``sole_committer`` (nobody else can commit this key late) the tombstone goes at the end.
        Data that another checkpoint's manifest refers to stays until that one is forgotten too.

        Raises:
            ConflictError: It is pinned (``kind`` "pinned") or being read ("held"): nothing has changed.
        """
        tombstone = f"forgotten/{key}.json"
        self._refuse_if_protected(key)
        created = self.store.create(tombstone, encode("forgotten", {}))
        try:
            self._refuse_if_protected(key)  # a reader that came in between saw no tombstone yet, but now we see its hold
        except ConflictError:
            if created:  # another's stays: the sweep calls it off, or goes on when the reader has finished
                self.store.delete(tombstone)
            raise
        freed = self._delete_manifest(key)
        bytes_of_data, rest = self._delete_data(key)
        self._delete_records(key)
        if sole_committer and not rest:
            self.store.delete(tombstone)
        return freed + bytes_of_data

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
        for name, nbytes in list(self.store.list(folder)):
            if name not in needed:
                self.store.delete(name)
                freed += nbytes
        return freed, True

    def _delete_records(self, key: CheckpointKey) -> None:
        self.store.delete_folder(f"holds/{key}/")
        for folder in _RECORDS:
            if key in self._keys(folder):
                self.store.delete(f"{folder}{key}.json")

    def _references(self, *, but: CheckpointKey | None = None) -> tuple[set[str], list[CheckpointKey]]:
        """Object keys of other checkpoints that committed manifests refer to, and the manifests that could not be read.

        Each manifest is read once by each process: the rest of the time this costs two listings.
        """
        needed: set[str] = set()
        unreadable = []
        sizes = self._sizes("manifests/")
        self._known.keep(sizes)
        for key in sizes.keys() - self._keys("forgotten/"):
            if key == but:
                continue
            try:
                needed |= self._read_references(key, sizes[key])
            except NotFoundError:
                continue
            except UNREADABLE:
                unreadable.append(key)
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
        ``in_progress`` is left over too, although the attempt is alive.
        What looks deletable but has to stay for now is listed with ``blocked`` and the reason.
        """
        manifests, forgotten = self._keys("manifests/"), self._keys("forgotten/")
        # Folders first, then manifests: what is committed in between must not look like a leftover.
        with_data = self._with_data()
        folders = with_data - self._keys("manifests/") | (manifests & forgotten)
        newest, busy = self.newest_attempt(), frozenset(in_progress)
        alive = not sole_committer and self._lives(newest, now)
        limits, lives = dict(self._chain()), {key.attempt: self._lives(key.attempt, now) for key in folders if key.attempt < newest}
        planned: list[Swept] = []
        doomed: dict[CheckpointKey, str] = {}
        for key in sorted((folders | forgotten) - busy, key=age):
            if key in forgotten:
                doomed[key] = "its deletion was interrupted"
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
        planned += self._plan_tombstones(forgotten - folders - busy, newest=newest, now=now)
        swept = tuple(item.key for item in planned if item.key.endswith("/") and not item.blocked)
        for name, nbytes, modified_at in self.store.leftovers(""):
            owner = parsed(name.split("/")[1]) if name.startswith("data/") else None
            if modified_at < now - _TEMPORARY_AGE_S and owner not in busy and not name.startswith(swept):
                planned.append(Swept(name, "temporary file of a writer that is gone", nbytes))
        return planned

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
                    yield from (Swept(name, reason, nbytes) for name, nbytes in self.store.list(folder) if name not in needed)
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
            if key not in there and (key in doomed or key.attempt < newest or (key.attempt == newest and not alive) or passed):
                yield Swept(f"{folder}{key}.json", "its checkpoint is gone", 0)

    def _plan_tombstones(self, keys: Collection[CheckpointKey], *, newest: int, now: float) -> Iterator[Swept]:
        """Tombstones outlive their attempt: they go when it is superseded and has let its time run out."""
        lives: dict[int, bool] = {}
        for key in sorted(keys):
            if key.attempt < newest and not lives.setdefault(key.attempt, self._lives(key.attempt, now)):
                yield Swept(f"forgotten/{key}.json", f"attempt {key.attempt} is over", 0)

    def sweep(self, planned: Sequence[Swept]) -> int:
        """Do it; returns bytes freed. An incomplete checkpoint gets a tombstone first, so that a late committer withdraws."""
        freed = 0
        for item in planned:
            if item.blocked:
                continue
            parts = item.key.split("/")
            key = parsed(parts[1].removesuffix(".json")) if len(parts) > 1 else None
            if key is not None and parts[0] == "manifests":
                if self.pinned(key) or self.held(key, now=time.time()):
                    continue  # since the plan was made
                freed += self._delete_manifest(key) + self._delete_data(key)[0]
                self._delete_records(key)
            elif key is not None and parts[0] == "data" and not parts[-1].startswith("."):
                freed += self._sweep_data(key, item.key)
            else:
                self.store.delete(item.key)
                freed += item.nbytes
        return freed

    def _sweep_data(self, key: CheckpointKey, name: str) -> int:
        if self.store.create(f"forgotten/{key}.json", encode("forgotten", {})) and key in self._keys("manifests/"):
            # Committed since the plan was made, perhaps acknowledged: it stays. (Or its committer saw the tombstone and withdraws:
            # then the next sweep has it.)
            self.store.delete(f"forgotten/{key}.json")
            return 0
        if name.endswith("/"):
            freed = self.store.delete_folder(name)
            self._delete_records(key)
            return freed
        nbytes = self.store.size(name)
        self.store.delete(name)
        return nbytes

    def _nbytes(self, folder: str) -> int:
        return sum(nbytes for _, nbytes in self.store.list(folder)) + sum(nbytes for _, nbytes, _ in self.store.leftovers(folder))

    # -- names -----------------------------------------------------------------------------------------------------
    def _names(self, prefix: str, suffix: str) -> list[str]:
        """Names of the objects directly in a folder."""
        names = (name.removeprefix(prefix) for name, _ in self.store.list(prefix))
        return [name for name in names if name.endswith(suffix) and "/" not in name]

    def _keys(self, prefix: str) -> set[CheckpointKey]:
        """Checkpoint keys that have a record in a folder; files of others are left alone."""
        return set(self._sizes(prefix))

    def _with_data(self) -> set[CheckpointKey]:
        return {key for name in self.store.folders("data/") if (key := parsed(name))}

    def _sizes(self, prefix: str) -> dict[CheckpointKey, int]:
        """The same with the records' sizes in bytes."""
        found: dict[CheckpointKey, int] = {}
        for name, nbytes in self.store.list(prefix):
            key = parsed(name.removeprefix(prefix).removesuffix(".json")) if name.endswith(".json") else None
            if key:
                found[key] = nbytes
        return found

    # -- checking --------------------------------------------------------------------------------------------------
    def verify(self, key: CheckpointKey, *, threads: int = 2) -> Iterator[tuple[str, int, str]]:
        """Read every byte and compare; yields (object key, nbytes, "" or what is wrong) as it goes: manifest, parts, data files."""
        name = manifest_key(key)
        data = self.store.get(name)
        try:
            manifest = self._checked(data, key)
        except UNREADABLE as error:
            yield name, len(data), error.message
            return
        yield name, len(data), ""
        parts = [self.data_key(key, part_name(node)) for node in range(manifest.nodes)]
        # One node's manifest is its part: a file that says the same once more need not be there.
        if manifest.nodes > 1 or any(stored == parts[0] for stored, _ in self.store.list(self.data_key(key, ""))):
            yield from verify_parts(self.store, parts, data)
        yield from verify_objects(self.store, manifest, threads=threads)

    # -- the agent's statistics --------------------------------------------------------------------------------------
    def record_stats(self, attempt: int, document: Mapping[str, object]) -> None:
        """Keep an attempt's counters and histograms (see ``agent/stats.py``); replaces what was recorded of it before."""
        self.store.replace(f"stats/{attempt:06d}.json", encode("stats", dict(document)))

    def read_stats(self) -> dict[int, dict[str, Any]]:
        """The recorded documents by attempt; an unreadable one is left out."""
        found: dict[int, dict[str, Any]] = {}
        for name in self._names("stats/", ".json"):
            number = _NUMBER.fullmatch(name)
            with contextlib.suppress(NotFoundError, *UNREADABLE):
                if number:
                    found[int(number[1])] = decode("stats", self.store.get(f"stats/{name}"), dict[str, Any], key=f"stats/{name}")
        return found
