"""The run's own record and its attempts: who writes, and what each one goes on from."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from everystep.errors import ConfigError, ConflictError, CorruptionError, NotFoundError, PermanentStoreError, StoreError
from everystep.manifest import FORMAT, decode, encode
from everystep.repository.records import (
    UNREADABLE,
    AliveRecord,
    Attempt,
    CheckpointKey,
    RunRecord,
    Skipped,
    lineage_limits,
    parsed,
    within,
)
from everystep.store import Store, open_store

_log = logging.getLogger(__name__)
_NUMBER = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})(\.claim|\.json)")
_STATS = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})(?:-n([0-9]{5,}))?\.json")
_Self = TypeVar("_Self", bound="Attempts")


class Attempts:
    """What of ``Repository`` concerns the run as a whole."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._run_id = ""

    # -- the run ---------------------------------------------------------------------------------
    @classmethod
    def open(cls: type[_Self], url: str, *, create: bool = False, run_id: str | None = None) -> _Self:  # noqa: PYI019 - Self is of 3.11
        """The run at ``url``. NotFoundError when there is none (and not ``create``); ConfigError for a newer format; see ``begin``."""
        repository = cls(open_store(url))
        repository.begin(create=create, run_id=run_id)
        return repository

    def begin(self, *, create: bool, run_id: str | None = None) -> None:
        """Read ``run.json``, or make it; see ``open``. One that is lost, of a run with checkpoints, is made again.

        Args:
            create: Whether a run that is not there is made.
            run_id: The id that all nodes of a job agreed on: a new run gets it instead of a random one.

        Raises:
            ConflictError: Another run is there than ``run_id`` (``kind`` "other-run").
        """
        try:
            data = self.store.get("run.json")
        except NotFoundError as error:
            self._make_run(create=create, run_id=run_id, missing=error)
            # Read back: where "create only if new" is not exclusive two starters agree on one id all the same.
            data = self.store.get("run.json")
        found = self._read_run(data).run_id
        if run_id is not None and found != run_id:
            raise ConflictError(
                f"run {self.store.url!r} is {found!r}, but the other nodes of this job write run {run_id!r}", key=self.store.url,
                kind="other-run", hint="give this node the path where its part of the run is, or all nodes an empty one",
            )  # fmt: skip
        self._run_id = found

    def _make_run(self, *, create: bool, run_id: str | None, missing: NotFoundError) -> None:
        lost = any(True for _ in self.store.list("manifests/"))  # no reason to see no checkpoints, and to start over them
        if not create and not lost:
            raise NotFoundError(
                f"no run at {self.store.url!r}", key=self.store.url, kind="no-run", hint="check the path; the first save makes a run"
            ) from missing
        try:
            self.store.create("run.json", encode("run", RunRecord(run_id or secrets.token_hex(8))))
        except StoreError as failed:
            if create:
                raise
            raise CorruptionError(
                f"run {self.store.url!r} has checkpoints but no run.json, and none can be written: {failed}", key="run.json",
                kind="no-run-record", hint="put run.json back, or make the folder writable: a new one is made then",
            ) from failed  # fmt: skip
        if lost:
            _log.warning("run %r had checkpoints but no run.json: it has a new one, with a new id", self.store.url)

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

    # -- attempts ----------------------------------------------------------------------------------
    def newest_attempt(self) -> int:
        """The highest attempt ever claimed; 0 when there is none. One listing."""
        return max(self._claims(), default=0)

    def start_attempt(
        self, *, parent: CheckpointKey | None, world: int = 1, nodes: int = 1, versions: dict[str, str] | None = None, now: float,
        above: int = 0, number: int | None = None, job: str = "", shared: bool = True,
    ) -> Attempt:  # fmt: skip
        """Claim the next attempt (more than the highest seen here and more than ``above``) exclusively and record it.

        Args:
            parent: What it goes on from; None: nothing.
            world: Ranks of the job.
            nodes: Nodes of the job.
            versions: Of the software, for the record.
            now: Seconds since the epoch.
            above: The highest attempt seen elsewhere.
            number: Claim exactly this one, on which all nodes agreed. The same ``job`` may claim it again: then its record is the newer.
            job: Random id of that agreement.
            shared: Whether all nodes see this store.

        Raises:
            ConflictError: ``number``, or a higher one, is taken (``kind`` "attempt").
        """
        ours = number is not None and self._claim_exactly(number, job)
        if number is None:
            number = max(self.newest_attempt(), above, parent.attempt if parent else 0) + 1
            while not self.store.claim(_claim(number)):
                number += 1
        attempt = Attempt(
            attempt=number, parent_attempt=parent.attempt if parent else None, parent_step=parent.step if parent else None,
            started_at=now, world=world, nodes=nodes, versions=versions or {}, job=job, shared=shared,
        )  # fmt: skip
        name, data = _record(number), encode("attempt", attempt)
        # It may be ours: a mount that did not answer in time has perhaps done what was asked before it was asked again.
        if not self.store.create(name, data) and self.store.get(name) != data:
            if not ours:
                raise self._is_taken(number)
            self.store.replace(name, data)
        return attempt

    def _claim_exactly(self, number: int, job: str) -> bool:
        """Claim it; whether this job had it already. ConflictError when it cannot be had."""
        newest = self.newest_attempt()
        if newest < number and self.store.claim(_claim(number)):
            return False
        try:
            record = self.attempt_record(number)
        except UNREADABLE:
            record = None
        if newest > number or not job or record is None or record.job != job:
            raise self._is_taken(max(number, newest))
        return True

    def _is_taken(self, number: int) -> ConflictError:
        return ConflictError(
            f"attempt {number} of {self.store.url!r} is taken already", key=_record(number), kind="attempt",
            hint="another job has just started on this run: stop one of them, or give it another path",
        )  # fmt: skip

    def attempt_record(self, number: int) -> Attempt | None:
        """The record of one attempt, by its name; None when there is none. CorruptionError, ConfigError when it cannot be read."""
        try:
            return decode("attempt", self.store.get(_record(number)), Attempt, key=_record(number))
        except NotFoundError:
            return None

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
        name = f"alive/{attempt:06d}.json"
        listed = name.removeprefix("alive/") in self._names("alive/", ".json")
        try:
            return decode("alive", self.store.get(name), AliveRecord, key=name).until > now
        except NotFoundError:
            return listed  # nobody deletes these: a mount that lists it and does not find it is wrong
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

    def _limits(self) -> dict[int, int | None]:
        """The newest attempt's lineage, by attempt; see ``lineage_limits``."""
        parents: dict[int, tuple[int, int] | None] = {}
        for number, record in self.attempts().items():
            alone = record.parent_attempt is None or record.parent_step is None
            parents[number] = None if alone else (record.parent_attempt or 0, record.parent_step or 0)
        return lineage_limits(self._claims(), parents)

    def in_lineage(self, key: CheckpointKey) -> bool:
        """Whether a key (committed here or held in memory) belongs to the highest attempt's lineage."""
        return within(key, self._limits())

    # -- the agents' statistics --------------------------------------------------------------------------------------
    def record_stats(self, attempt: int, document: Mapping[str, object], *, node: int = 0) -> None:
        """Keep a node's counters and histograms of an attempt (see ``agent/stats.py``); replaces what was recorded of it before."""
        of_node = f"-n{node + 1:05d}" if node else ""
        self.store.replace(f"stats/{attempt:06d}{of_node}.json", encode("stats", dict(document)))

    def read_stats(self, *, node: int | None = None) -> dict[int, dict[str, Any]]:
        """The recorded documents of a node by attempt (None: of the first node that has one); an unreadable one is left out."""
        found: dict[int, dict[str, Any]] = {}
        for name in sorted(self._names("stats/", ".json"), key=lambda name: name.removesuffix(".json")):
            parts = _STATS.fullmatch(name)
            number, of_node = (int(parts[1]), int(parts[2] or 1) - 1) if parts else (0, -1)
            if not parts or number in found or node not in (None, of_node):
                continue
            with contextlib.suppress(NotFoundError, *UNREADABLE):
                found[number] = decode("stats", self.store.get(f"stats/{name}"), dict[str, Any], key=f"stats/{name}")
        return found

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


def _claim(number: int) -> str:
    return f"attempts/{number:06d}.claim"


def _record(number: int) -> str:
    return f"attempts/{number:06d}.json"
