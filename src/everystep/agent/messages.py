"""What trainer and agent say to each other: length-prefixed msgpack over a Unix stream socket; descriptors travel beside ``SlabGranted``.

Frozen across versions, so that a newer trainer can take an older agent's snapshot: ``Hello``, ``ListSnapshots``, ``TakeSnapshot``,
``Drain`` and their answers. Fields are only ever added, with defaults. Every request carries an ``id`` that its answer repeats;
``Event`` has none.
"""

from __future__ import annotations

import msgspec

from everystep.plan import SavePlan

PROTOCOL = 1
"""Version of everything below that is not frozen."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Anything on the wire."""

    id: int = 0


# -- frozen -------------------------------------------------------------------------------------------------------------
class Hello(Message, frozen=True, kw_only=True):
    """First message of a connection. ``role`` is "trainer" (its disconnection frees its leases and drains to disk) or "visitor" (cli)."""

    protocol: int
    role: str
    run_id: str
    pid: int


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to Hello."""

    protocol: int
    version: str
    pid: int
    run_id: str
    run_url: str
    trainers: tuple[int, ...] = ()
    """Pids of trainers connected now, the asking one not counted."""


class ListSnapshots(Message, frozen=True, kw_only=True):
    """Which snapshots are in memory?"""


class SnapshotSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One sealed snapshot in memory."""

    slab: int
    step: int
    attempt: int
    nbytes: int
    saved_at: float
    persisted: bool


class Snapshots(Message, frozen=True, kw_only=True):
    """Newest sealed first."""

    snapshots: tuple[SnapshotSummary, ...]


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Give me the descriptor of this slab and a manifest of it; it is held until ReleaseSnapshot or the connection's end."""

    slab: int


class SnapshotTaken(Message, frozen=True, kw_only=True):
    """The slab's fd comes beside this. ``manifest`` is an encoded manifest record (``manifest.encode``), its object keys are file names,
    its digests are the slab's, computed by the agent; ``file_offsets`` says where each of its ``objects`` begins in the slab."""

    manifest: bytes
    file_offsets: tuple[int, ...]
    slab_nbytes: int


class Drain(Message, frozen=True, kw_only=True):
    """Persist the newest sealed snapshot if it is not, and answer when nothing is left to do or ``timeout_s`` has passed."""

    timeout_s: float
    exit: bool = False


class Drained(Message, frozen=True, kw_only=True):
    """``complete``: everything sealed that should be durable is."""

    complete: bool
    newest_durable_step: int | None = None
    error: str = ""


# -- the trainer's --------------------------------------------------------------------------------------------------------
class Configure(Message, frozen=True, kw_only=True):
    """Attempt and policy of this trainer, sent once the attempt is claimed, before a lease. Answer: Done or Failed(ConflictError)."""

    attempt: int
    cadence_disk: int | float | str | bool | None
    keep_last: int | None
    keep_best: int
    keep_metric: str | None
    keep_mode: str
    keep_every: int | None
    memory_budget: int | None
    idle_s: float


class Prepare(Message, frozen=True, kw_only=True):
    """Remember this plan by its id; allocate and prefault slabs for it in the background. Answer: Done or Failed(CapacityError)."""

    plan: SavePlan


class Lease(Message, frozen=True, kw_only=True):
    """A slab to fill for ``step`` of plan ``plan_id``. Answer: SlabGranted, or NoSlab (that save is skipped and says why)."""

    plan_id: str
    step: int


class SlabGranted(Message, frozen=True, kw_only=True):
    """``fresh``: the slab's fd comes beside this; else this connection has had it before. ``headers_written`` for this plan already."""

    slab: int
    nbytes: int
    fresh: bool
    headers_written: bool
    freed: tuple[int, ...] = ()
    """Slabs that this connection had and that are gone: unmap them."""


class NoSlab(Message, frozen=True, kw_only=True):
    """Why there is none: "busy" (all in use) or "memory" (budget or cgroup; numbers in the text)."""

    kind: str
    reason: str


class GiveBack(Message, frozen=True, kw_only=True):
    """The lease ends without a seal (the save failed in the trainer)."""

    slab: int


class Seal(Message, frozen=True, kw_only=True):
    """The slab is complete. ``bound``: it is to reach the disk unless a later bound one supersedes it; ``must``: whatever comes later.

    A pinned one is a ``must``. Answer: Done (it is the newest in memory).
    """

    slab: int
    plan_id: str
    step: int
    attempt: int
    saved_at: float
    values: bytes
    metrics: dict[str, float]
    bound: bool
    pin: bool
    timings_s: dict[str, float]
    must: bool = False


class RecordMetrics(Message, frozen=True, kw_only=True):
    """Metrics that come after the save."""

    step: int
    attempt: int
    metrics: dict[str, float]


class ReleaseSnapshot(Message, frozen=True, kw_only=True):
    """The restore from this slab is over."""

    slab: int


class Bye(Message, frozen=True, kw_only=True):
    """Clean end of a trainer, after its Drain: no drain is needed when the connection closes, and the last trainer's end ends the agent."""


# -- anybody's -----------------------------------------------------------------------------------------------------------------
class AskStats(Message, frozen=True, kw_only=True):
    """Counters and histograms."""


class Stats(Message, frozen=True, kw_only=True):
    """JSON: see ``agent/stats.py``."""

    json: bytes


class Stop(Message, frozen=True, kw_only=True):
    """End: after a drain, or at once with ``force``."""

    force: bool = False


class Done(Message, frozen=True, kw_only=True):
    """Yes. ``note`` is a warning for the trainer's log, such as that fewer slabs fit than are wanted.

    ``ending`` answers a Bye: the agent ends as soon as this connection is closed.
    """

    note: str = ""
    ending: bool = False


class Failed(Message, frozen=True, kw_only=True):
    """An error, to be rebuilt with ``errors.rebuild``."""

    name: str
    message: str
    step: int | None = None
    key: str | None = None
    kind: str = ""
    hint: str = ""
    errno: int | None = None


class Event(Message, frozen=True, kw_only=True):
    """What became of a sealed snapshot, sent to the trainer that sealed it.

    ``what``: "committed" | "superseded" | "failed" | "forgotten". ``tier`` "disk". ``timings_s`` of a committed one: queue (since
    the seal), hash, write (fsync included), part, commit, total (since the seal).
    """

    what: str
    step: int
    attempt: int
    tier: str = "disk"
    nbytes: int = 0
    timings_s: dict[str, float] = {}
    failed: Failed | None = None
