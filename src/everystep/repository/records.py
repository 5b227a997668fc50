"""The values and small records of a run, and the names they lie under."""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Iterable, Mapping

import msgspec

from everystep.errors import ConfigError, CorruptionError

_KEY = re.compile(r"([0-9]{12,})-([0-9]{4,})(?:-r([1-9][0-9]{0,5}))?")
_PART = re.compile(r"node-([0-9]{5,})\.json")
UNREADABLE = (CorruptionError, ConfigError)
"""What ``decode`` raises: damaged, or of a newer format. One such record must not keep the others from being used."""


class CheckpointKey(msgspec.Struct, frozen=True, order=True):
    """Names one checkpoint; ``str(key)`` is ``"000000000150-0002"`` (step, attempt), of a reduced one ``"000000000150-0002-r1"``."""

    step: int
    attempt: int
    reduced: int = 0
    """Which reduction of it this is (see ``Repository.reduce``); 0: the checkpoint as it was saved."""

    def __str__(self) -> str:
        return f"{self.step:012d}-{self.attempt:04d}" + (f"-r{self.reduced}" if self.reduced else "")

    @property
    def full(self) -> CheckpointKey:
        """The key under which it was saved."""
        return CheckpointKey(self.step, self.attempt) if self.reduced else self

    @classmethod
    def parse(cls, text: str) -> CheckpointKey:
        """The key in ``text``; ValueError when it is none."""
        found = _KEY.fullmatch(text)
        key = cls(int(found[1]), int(found[2]), int(found[3] or 0)) if found else None
        if key is None or str(key) != text:
            raise ValueError(f"{text!r} is not a checkpoint key, such as '000000000150-0002'")
        return key


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One life of the run, as recorded in ``attempts/<n>.json``."""

    attempt: int
    parent_attempt: int | None = None
    parent_step: int | None = None
    started_at: float = 0.0
    world: int = 1
    nodes: int = 1
    versions: dict[str, str] = {}
    job: str = ""
    """Random id of the agreement between the ranks that claimed it; the same in every store of the job."""
    shared: bool = True
    """Whether all nodes see this store. False: each node has a store of its own, with its own files in it."""


class Skipped(msgspec.Struct, frozen=True):
    """A checkpoint that was passed over, and why."""

    key: str
    reason: str


class Swept(msgspec.Struct, frozen=True):
    """Something that a sweep deletes (or would), why, and how many bytes that frees."""

    key: str
    reason: str
    nbytes: int
    blocked: bool = False
    """True: it stays; the reason says why."""


class RunRecord(msgspec.Struct, frozen=True):
    """``run.json``."""

    run_id: str


class Tombstone(msgspec.Struct, frozen=True, omit_defaults=True):
    """``forgotten/<key>.json``: what has one counts for nothing."""

    reason: str = ""
    given_up: bool = False
    """True: given up before it was committed (see ``fates.py``); False: forgotten, for good."""


class AliveRecord(msgspec.Struct, frozen=True):
    """``alive/<attempt>.json``: seconds since the epoch."""

    until: float


class VerifiedRecord(msgspec.Struct, frozen=True):
    """``verified/<key>.json``."""

    good: bool
    detail: str
    at: float


class MetricsRecord(msgspec.Struct, frozen=True):
    """``metrics/<key>.json``; see ``manifest.split_metrics``."""

    metrics: dict[str, float]
    nonfinite: dict[str, str] = {}


class ObjectKey(msgspec.Struct, frozen=True, array_like=True):
    """The first field of a manifest's ``StoredObject``."""

    key: str


class References(msgspec.Struct, frozen=True):
    """The one field of a manifest that a deletion needs: a tenth of the time of reading it all."""

    objects: list[ObjectKey]


class DroppedGroups(msgspec.Struct, frozen=True):
    """The one field of a manifest that tells what a reduced checkpoint lacks."""

    dropped: tuple[str, ...] = ()


class KnownReferences:
    """What manifests refer to outside of their own checkpoint's folder, remembered: a manifest never changes, and few refer to others.

    A manifest is told by its key and its size, as a listing has them. Bounded: beyond the bound a manifest is read each time again.
    Thread-safe.
    """

    BOUND = 1 << 17

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[CheckpointKey, tuple[int, frozenset[str]]] = {}
        self._weight = 0

    def get(self, key: CheckpointKey, nbytes: int) -> frozenset[str] | None:
        """The object keys, or None when nothing is known of this manifest."""
        with self._lock:
            size, found = self._known.get(key, (-1, None))
            return found if size == nbytes else None

    def put(self, key: CheckpointKey, nbytes: int, objects: Iterable[str]) -> frozenset[str]:
        """Remember; returns those of the objects that are another checkpoint's."""
        found = frozenset(name for name in objects if not name.startswith(f"data/{key}/"))
        with self._lock:
            self._drop(key)
            if self._weight + 1 + len(found) <= self.BOUND:
                self._known[key] = nbytes, found
                self._weight += 1 + len(found)
        return found

    def keep(self, keys: Container[CheckpointKey]) -> None:
        """Drop what is known of others."""
        with self._lock:
            for key in [key for key in self._known if key not in keys]:
                self._drop(key)

    def _drop(self, key: CheckpointKey) -> None:
        known = self._known.pop(key, None)
        self._weight -= 1 + len(known[1]) if known else 0


def age(key: CheckpointKey) -> tuple[int, int, int]:
    """Order of time: a later attempt's checkpoints come after everything it was resumed from, a reduction after what it was made of."""
    return key.attempt, key.step, key.reduced


def worth(key: CheckpointKey) -> tuple[int, int, int]:
    """Order in which readers want them: the newest highest, and of one checkpoint the whole one before its reductions."""
    return key.attempt, key.step, -key.reduced


def within(key: CheckpointKey, limits: Mapping[int, int | None]) -> bool:
    """Whether a key lies in a lineage: ``limits`` has each attempt's newest step that belongs to it, or None for all."""
    if key.attempt not in limits:
        return False
    limit = limits[key.attempt]
    return limit is None or key.step <= limit


def lineage_limits(claims: Iterable[int], parents: Mapping[int, tuple[int, int] | None]) -> dict[int, int | None]:
    """The newest attempt's lineage: for each attempt in it the newest step that belongs to it, or None for all of them.

    Args:
        claims: Every attempt that was ever claimed.
        parents: By attempt the (attempt, step) that it went on from; None: from scratch; absent: its record is lost, and its parent is
            taken to be all of the attempt before it.
    """
    known = sorted(set(claims), reverse=True)
    limits: dict[int, int | None] = {}
    number, limit = known[0] if known else 0, None
    while number > 0 and number not in limits:
        limits[number] = limit
        if number not in parents:
            number, limit = next((claim for claim in known if claim < number), 0), None
        else:
            parent = parents[number]
            if parent is None:
                break
            number, limit = parent
    return limits


def parsed(text: str) -> CheckpointKey | None:
    """The key in ``text``, or None."""
    try:
        return CheckpointKey.parse(text)
    except ValueError:
        return None


def manifest_key(key: CheckpointKey) -> str:
    """Store key of a manifest."""
    return f"manifests/{key}.json"


def tombstone_key(key: CheckpointKey) -> str:
    """Store key of a tombstone."""
    return f"forgotten/{key}.json"


def part_name(node: int) -> str:
    """Parts are numbered from 1 in their names, as the data files are; ``Part.node`` counts from 0."""
    return f"node-{node + 1:05d}.json"


def node_of(name: str) -> int | None:
    """The node whose part has this name (counted from 0), or None when it is no part's."""
    found = _PART.fullmatch(name)
    node = int(found[1]) - 1 if found else -1
    return node if node >= 0 and part_name(node) == name else None
