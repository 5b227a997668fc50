"""What happens to the agent, and what its shell is to do about it."""

from __future__ import annotations

import dataclasses
from typing import Any


# -- events ---------------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, kw_only=True)
class Happened:
    """An event. ``conn`` and ``request`` say whom to answer; 0 for nobody."""

    conn: int = 0
    request: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSlab(Happened):
    """An event that concerns one slab."""

    slab: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Connected(Happened):
    """Somebody said hello."""

    role: str
    pid: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configured(Happened):
    """A trainer named its attempt and policy. ``newest_attempt``: the highest in the store. ``max_slabs`` None: as it is."""

    attempt: int
    newest_attempt: int
    persist_when_idle: bool
    budget: int | None
    idle_s: float
    job: str = ""
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    nodes: int = 1
    max_slabs: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanAnnounced(Happened):
    """A plan of ``nbytes``. ``room``: bytes that the machine has for more slabs; ``limits`` says how that was found."""

    plan_id: str
    nbytes: int
    room: int
    limits: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaseAsked(Happened):
    """A trainer wants a slab to fill."""

    plan_id: str
    nbytes: int
    step: int
    room: int
    limits: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrainAsked(Happened):
    """Persist the newest and answer when nothing is left."""

    timeout_s: float
    exit: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopAsked(Happened):
    """End, after a drain unless ``force``."""

    force: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByeSaid(Happened):
    """The trainer ends on purpose."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionClosed(Happened):
    """The connection is gone, with or without a bye."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticked(Happened):
    """Time has passed (see ``next_tick_at``)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signalled(Happened):
    """SIGTERM or SIGINT: end when drained and no trainer is left, or after ``grace_s``. A second one does not wait for trainers."""

    grace_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewestWanted(Happened):
    """Somebody wants the newest snapshot on disk, and does not wait here for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Occupied(Happened):
    """The shell has (or no longer has) work for the run besides the slabs: until that is done the agent does not end by itself."""

    occupied: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed(Happened):
    """Every node has sealed its share of this step. ``persist``: and every node is to persist it."""

    step: int
    attempt: int
    persist: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepAsked(Happened):
    """These, (attempt, step), stay in memory whatever newer ones are complete, and no others: other nodes copy them or have copied them."""

    keys: frozenset[tuple[int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLost(Happened):
    """Another node will never seal its share of this step."""

    step: int
    attempt: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sealed(OfSlab):
    """A rank has filled its share of a leased slab. ``payload`` covers what was sealed before as well.

    ``room`` as in LeaseAsked: the next slab is allocated ahead of its need.
    """

    step: int
    attempt: int
    bound: bool
    must: bool = False
    room: int = 0
    payload: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenBack(OfSlab):
    """A lease ends without a snapshot."""

    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationFailed(OfSlab):
    """The shell could not make this slab after all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistFinished(OfSlab):
    """The snapshot is committed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistFailed(OfSlab):
    """The snapshot could not be committed. ``conflict``: its attempt met a higher one. ``doomed``: nobody can commit it any more."""

    error: str
    conflict: bool = False
    doomed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotAsked(OfSlab):
    """Somebody wants to read a snapshot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotReleased(OfSlab):
    """The reader is done."""


# -- actions ----------------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Action:
    """What the shell is to do."""


@dataclasses.dataclass(frozen=True)
class Allocate(Action):
    """Make a slab and prefault it in the background."""

    slab: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class FreeSlab(Action):
    """Give the slab's memory back."""

    slab: int


@dataclasses.dataclass(frozen=True)
class Grant(Action):
    """Lease this slab; the plan's headers are to be copied into it first unless ``headers_written``."""

    conn: int
    request: int
    slab: int
    plan_id: str
    headers_written: bool


@dataclasses.dataclass(frozen=True)
class Refuse(Action):
    """No slab for this step."""

    conn: int
    request: int
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Accept(Action):
    """Answer yes; ``note`` is a warning for the log. ``ending``: the agent ends when this connection closes."""

    conn: int
    request: int
    note: str = ""
    ending: bool = False


@dataclasses.dataclass(frozen=True)
class Fail(Action):
    """Answer with an error of class ``name``."""

    conn: int
    request: int
    name: str
    message: str
    kind: str = ""
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class StartPersist(Action):
    """Write and commit this snapshot; ends in PersistFinished or PersistFailed."""

    slab: int
    payload: Any = None


@dataclasses.dataclass(frozen=True)
class GiveSnapshot(Action):
    """Answer with the slab's descriptor and manifest."""

    conn: int
    request: int
    slab: int
    payload: Any = None


@dataclasses.dataclass(frozen=True)
class Notify(Action):
    """Tell those who sealed it what became of a snapshot ("complete", "committed", "superseded", "failed").

    ``error``: why it failed where that was not a persist's doing; ``kind`` goes with it.
    """

    conns: tuple[int, ...]
    slab: int
    what: str
    step: int
    attempt: int
    payload: Any = None
    error: str = ""
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class TellNodes(Action):
    """Tell the nodes' lead: this node has "sealed" its share of the step, "lost" it for good (``reason``), or has it "wanted" on disk.

    "let go" is not for the lead: this node needed the memory of a snapshot that was kept for its copies.
    """

    what: str
    step: int
    attempt: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class AnswerDrain(Action):
    """Answer a drain."""

    conn: int
    request: int
    complete: bool
    newest_durable_step: int | None
    error: str


@dataclasses.dataclass(frozen=True)
class Exit(Action):
    """End the agent. ``lost``: what is given up, and why."""

    reason: str
    lost: str = ""
