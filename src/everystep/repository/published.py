"""Committed checkpoints as readers see them, and the small records beside them: metrics, verifications, pins, holds."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping

from everystep.errors import CapacityError, CorruptionError, NotFoundError, PermanentStoreError, StoreError
from everystep.manifest import Manifest, Part, check, decode, encode, join_metrics, split_metrics
from everystep.repository.attempts import Attempts
from everystep.repository.fates import Fates
from everystep.repository.records import (
    UNREADABLE,
    CheckpointKey,
    DroppedGroups,
    MetricsRecord,
    VerifiedRecord,
    age,
    manifest_key,
    node_of,
    parsed,
    part_name,
    within,
    worth,
)
from everystep.store import Store

_log = logging.getLogger(__name__)
_HOLD = re.compile(r"holds/([^/]+)/([0-9]{13,})-[0-9a-f]+\.json")
_MERGING = threading.Lock()
"""Metrics are read, changed and written back: the threads of one process do that one after the other."""


class Published(Attempts):
    """What of ``Repository`` concerns checkpoints that are committed."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._fates = Fates(store)
        self._dropped: dict[CheckpointKey, tuple[str, ...]] = {}

    # -- reading -----------------------------------------------------------------------------------
    def keys(self) -> list[CheckpointKey]:
        """All committed, not forgotten checkpoints, by attempt and step."""
        committed = self._keys("manifests/")  # before the tombstones: one that is forgotten meanwhile has its tombstone first
        return sorted(committed - self._fates.gone(committed, self._keys("forgotten/")), key=age)

    def committed(self, key: CheckpointKey) -> bool:
        """Whether it is committed and not forgotten: asked by name, without a listing, so that it may be asked often."""
        return self._fates.published(key) and self._fates.lost(key)

    def lineage(self) -> list[CheckpointKey]:
        """Committed checkpoints of the highest attempt's lineage, newest first; a whole one before its reduction, where both are there."""
        limits = self._limits()
        return sorted((key for key in self.keys() if within(key, limits)), key=worth, reverse=True)

    def standing(self, key: CheckpointKey) -> CheckpointKey | None:
        """Under which key a checkpoint is there now: its own, or that of its newest reduction; None when neither is."""
        if self.committed(key):
            return key
        return max((one for one in self.keys() if one.full == key.full and one.reduced > key.reduced), key=age, default=None)

    def dropped(self, key: CheckpointKey) -> tuple[str, ...]:
        """The groups that a reduced checkpoint lacks; none of a whole one. Remembered: a manifest never changes.

        Raises:
            NotFoundError: It is not there.
            CorruptionError: Its manifest cannot be read.
        """
        if not key.reduced:
            return ()
        found = self._dropped.get(key)
        if found is None:
            name = manifest_key(key)
            found = decode("manifest", self.store.get(name), DroppedGroups, key=name).dropped
            self._dropped[key] = found
        return found

    def find(self, step: int | None) -> CheckpointKey:
        """The newest checkpoint, or that of ``step`` (the newest attempt's in the lineage, else the newest that has it).

        Without ``step`` a reduced one counts only where there is no other.

        Raises:
            NotFoundError: There is none; names the steps there are.
        """
        keys, limits = self.keys(), self._limits()
        own = [key for key in keys if within(key, limits)]
        fitting = [key for key in own if step in (None, key.step)] or [key for key in keys if key.step == step]
        if fitting:
            return max(fitting, key=lambda key: (step is not None or not key.reduced, *worth(key)))
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
        if (key in self._keys("forgotten/") and not self._fates.lost(key)) or self._fates.marked(key):
            raise NotFoundError(
                f"step {key.step} of attempt {key.attempt} in {self.store.url!r} is forgotten", step=key.step, key=name, kind="forgotten"
            )
        return self._checked(self.store.get(name), key)

    def data_key(self, key: CheckpointKey, file_name: str) -> str:
        """Store key of a data file of a checkpoint."""
        return f"data/{key}/{file_name}"

    def parts_there(self, key: CheckpointKey) -> frozenset[int]:
        """The nodes (counted from 0) whose parts are in this store, whether or not the checkpoint is committed. One listing."""
        folder = self.data_key(key, "")
        nodes = (node_of(name.removeprefix(folder)) for name, _ in self.store.list(folder))
        return frozenset(node for node in nodes if node is not None)

    def read_part(self, key: CheckpointKey, node: int) -> Part:
        """One node's part.

        Raises:
            NotFoundError: It is not there (yet).
            CorruptionError: It is damaged, or another's.
        """
        name = self.data_key(key, part_name(node))
        part = decode("part", self.store.get(name), Part, key=name)
        if (part.step, part.attempt, part.node) != (key.step, key.attempt, node):
            raise CorruptionError(
                f"{name!r} holds the part of node {part.node} of step {part.step} of attempt {part.attempt}", step=key.step, key=name,
                kind="part", hint="take an older step",
            )  # fmt: skip
        return part

    def _checked(self, data: bytes, key: CheckpointKey) -> Manifest:
        manifest = decode("manifest", data, Manifest, key=manifest_key(key))
        if (manifest.step, manifest.attempt, manifest.reduced) != (key.step, key.attempt, key.reduced):
            reduction = f", reduction {manifest.reduced}" if manifest.reduced else ""
            raise CorruptionError(
                f"{manifest_key(key)!r} holds step {manifest.step} of attempt {manifest.attempt}{reduction}", step=key.step,
                key=manifest_key(key), kind="manifest", hint="take an older step",
            )  # fmt: skip
        check(manifest)
        return manifest

    # -- metrics ---------------------------------------------------------------------------------------------
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

    def record_metrics(self, key: CheckpointKey, metrics: dict[str, float]) -> None:
        """Metrics that come after the commit. With several nodes one of them does this (the lead). Of a reduced one the first key will do.

        Raises:
            NotFoundError: There is no such checkpoint (``kind`` "no-checkpoint"); nothing is recorded then.
            ConfigError: Its metrics are recorded in a newer format.
        """
        missing = NotFoundError(
            f"no checkpoint of step {key.step} of attempt {key.attempt} in {self.store.url!r}", step=key.step, key=manifest_key(key),
            kind="no-checkpoint", hint="it is forgotten, or was never saved to disk; see: everystep ls",
        )  # fmt: skip
        there = self.standing(key)
        if there is None:
            raise missing
        self._merge_metrics(there, metrics)
        # Write mine, then look at yours: the one who forgets deletes the manifest before the records, and may have come by already.
        while not self._fates.published(there):
            self.store.delete(f"metrics/{there}.json")
            there = self.standing(there)
            if there is None:
                raise missing
            self._merge_metrics(there, metrics)  # it was reduced meanwhile

    def _metrics_of_the_save(self, key: CheckpointKey, metrics: Mapping[str, float]) -> None:
        """Before the manifest. Several nodes do this at once: one that is late must not take back what was recorded since."""
        if not self.store.create(f"metrics/{key}.json", encode("metrics", MetricsRecord(*split_metrics(metrics)))):
            self._merge_metrics(key, metrics, newer=False)

    def _merge_metrics(self, key: CheckpointKey, metrics: Mapping[str, float], *, newer: bool = True) -> None:
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

    # -- verifications, pins, holds ---------------------------------------------------------------------------
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
    def hold(self, key: CheckpointKey, *, ttl_s: float = 3600.0, required: bool = False) -> Iterator[None]:
        """Protect a checkpoint while it is read; the hold expires by itself. On a read-only (or full) store it holds nothing.

        Read the manifest inside: NotFoundError then means that it was forgotten just before.

        Raises:
            PermanentStoreError, CapacityError: It cannot be held, and is ``required``.
        """
        name = f"holds/{key}/{int((time.time() + ttl_s) * 1000):013d}-{secrets.token_hex(4)}.json"
        try:
            self.store.put(name, encode("hold", {}))
            held = True
        except (PermanentStoreError, CapacityError):
            if required:
                raise
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
