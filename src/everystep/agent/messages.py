"""What trainer and agent say to each other: length-prefixed msgpack over a Unix stream socket; descriptors travel beside ``SlabGranted``.

Frozen across versions, so that a newer trainer can take an older agent's snapshot: ``Hello``, ``ListSnapshots``, ``TakeSnapshot``,
``Drain`` and their answers. Fields are only ever added, with defaults. Every request carries an ``id`` that its answer repeats;
``Event`` has none.
"""

from __future__ import annotations

import msgspec

from everystep.errors import CheckpointError
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
    node: int = 0
    """Whose share of the step it is."""
    nodes: int = 1
    world: int = 1
    replica: bool = False
    """A copy that this agent holds for node ``node``; else its own."""


class Snapshots(Message, frozen=True, kw_only=True):
    """What all ranks of this node have sealed, newest first; then the copies held for other nodes."""

    snapshots: tuple[SnapshotSummary, ...]


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Give me the descriptor of this slab and the part that describes it; it is held until ReleaseSnapshot or the connection's end."""

    slab: int


class SnapshotTaken(Message, frozen=True, kw_only=True):
    """The slab's fd comes beside this. ``part`` is an encoded part record (``manifest.encode``), its object keys are file names,
    its digests are the slab's, computed by the agent; ``file_offsets`` says where each of its ``objects`` begins in the slab."""

    part: bytes
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
    """Attempt and policy of this trainer, sent once the attempt is claimed, before a lease. Answer: Done or Failed(ConflictError).

    Several connections are configured at once when their attempt and ``job`` are the same and their ranks differ.
    """

    attempt: int
    cadence_disk: int | float | str | bool | None
    keep_last: int | None
    keep_best: int
    keep_metric: str | None
    keep_mode: str
    keep_every: int | None
    memory_budget: int | None
    idle_s: float
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    """All ranks of this node, rising."""
    world: int = 1
    node: int = 0
    nodes: int = 1
    shared: bool = True
    """Whether all nodes see one store; else each has its own."""
    replicas: int = 0
    replica_nbytes_s: int | None = None
    """Bandwidth that copies for other nodes may take; None: all there is."""
    job: str = ""
    """Random id of the ranks' agreement; empty for a process by itself."""
    consolidate: bytes = b""
    """JSON of ``schedule.to_document``; empty: nothing is consolidated unless somebody asks for it."""


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node's agent listens for other agents. ``domain``: what fails together bears the same label."""

    node: int
    host: str
    port: int
    domain: str = ""


class OpenPeers(Message, frozen=True, kw_only=True):
    """Listen for the agents and trainers of other nodes. ``token`` is the job's secret; ``port`` 0: any. Answer: PeersOpened.

    Asked again with the same token and host the answer is the same.
    """

    token: bytes
    host: str
    port: int = 0

    def __repr__(self) -> str:
        """Without the token, which must reach no log."""
        return f"OpenPeers(id={self.id!r}, host={self.host!r}, port={self.port!r})"


class PeersOpened(Message, frozen=True, kw_only=True):
    """Where it listens now."""

    host: str
    port: int


class SetPeers(Message, frozen=True, kw_only=True):
    """The agents of all nodes of the job, this one's (``node``) among them. Answer: Done."""

    peers: tuple[PeerAddress, ...]
    node: int


class Prepare(Message, frozen=True, kw_only=True):
    """Remember this plan by its id; allocate and prefault slabs for it in the background. Answer: Done or Failed(CapacityError)."""

    plan: SavePlan


class Lease(Message, frozen=True, kw_only=True):
    """A slab to fill for ``step`` of plan ``plan_id``. Answer: SlabGranted, or NoSlab (that save is skipped and says why).

    All ranks of a node get the same slab for a step, or all are refused it.
    """

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
    """The lease ends without a seal (the save failed in the trainer): the step fails for all ranks of the node, which are told why."""

    slab: int
    reason: str = ""


class Seal(Message, frozen=True, kw_only=True):
    """The rank's share of the slab is complete; the slab is when every rank's is.

    ``bound``: it is to reach the disk unless a later bound one supersedes it; ``must``: whatever comes later.

    A pinned one is a ``must``. What one rank asks for holds for all. Answer: Done (alone it is the newest in memory then; see ``Event``).
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


class Consolidate(Message, frozen=True, kw_only=True):
    """Consolidate ``what``: "latest" (not older than ``step`` of ``attempt``, which is made durable first), "best", a step or a key.

    The ranks of a node that ask for the same at the same step get the same ticket. Answer: Consolidating.
    """

    what: str
    step: int = -1
    attempt: int = 0
    consolidate: bytes = b""
    """As in ``Configure``, for an agent that knows of no schedule."""


class Consolidating(Message, frozen=True, kw_only=True):
    """It has been taken on."""

    ticket: int


class AskExport(Message, frozen=True, kw_only=True):
    """What has become of it? Answered when it is over or ``timeout_s`` has passed: Export, or Failed with why it failed."""

    ticket: int
    timeout_s: float = 0.0


class Export(Message, frozen=True, kw_only=True):
    """The folder of a consolidated model; ``over`` is False while it is not there."""

    over: bool
    path: str = ""
    step: int = -1


class Ending(Message, frozen=True, kw_only=True):
    """The trainer has saved what it will, and why: "done" (the run is over when all ranks of the node say so), "preempted" (it may go on)
    or "failed". Answer: ExportsFinished, when nothing is to be consolidated any more or the time is up."""

    because: str
    timeout_s: float = 0.0
    consolidate: bytes = b""
    """As in ``Configure``: of a trainer that has found everything done and has saved nothing."""


class ExportsFinished(Message, frozen=True, kw_only=True):
    """``complete``: nothing is waiting; else ``error`` says what is."""

    complete: bool
    error: str = ""


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
    """What became of a sealed snapshot, sent to every rank of the node that sealed it.

    ``what``: "committed" | "superseded" | "failed" | "forgotten" | "complete"; of an export, to the node's first rank alone, "exported" |
    "not exported", with a ``note`` for its log. ``tier`` "disk"; of a "complete" one "memory": every rank
    of every node has sealed it (not told to a process by itself, for which the answer to its seal says so).
    ``timings_s`` of a committed one: queue (since the seal), hash, write (fsync included), commit, total (since the seal); of several nodes
    also part and meet (waiting for the others' parts).
    """

    what: str
    step: int
    attempt: int
    tier: str = "disk"
    nbytes: int = 0
    timings_s: dict[str, float] = {}
    failed: Failed | None = None
    note: str = ""


def failure(error: BaseException, request: int, *, step: int | None = None) -> Failed:
    """An error as an answer."""
    if isinstance(error, CheckpointError):
        step = error.step if error.step is not None else step
        return Failed(id=request, name=type(error).__name__, message=error.message, step=step, key=error.key, kind=error.kind,
                               hint=error.hint, errno=error.errno)  # fmt: skip
    number = error.errno if isinstance(error, OSError) else None
    name = "StoreError" if isinstance(error, OSError) else "AgentError"
    return Failed(id=request, name=name, message=f"{type(error).__name__}: {error}", step=step, kind="unexpected", errno=number,
                           hint="see the agent's log (everystep agent ls)")  # fmt: skip
