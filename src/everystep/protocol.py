"""The agent's decisions as a pure state machine: events in, actions out. No clock, no threads, no I/O.

Theory of operation. A slab is FREE, FILLING (leased), SEALED (a snapshot) or PERSISTING (a snapshot being written); the last two may
also be *held* by readers. The agent is SERVING, DRAINING (it ends once nothing is left to write) or ENDED. ``transition`` looks up
``TABLE[state of the slab or phase of the agent, type of the event]`` and returns a new state and the actions, which the agent's
shell carries out in order. What is done after every event, whatever it was, is in ``_settle``: start the next persist, answer drains, end.

What must never happen (the property tests check it):

- a sealed snapshot goes away that is neither durable nor superseded by one sealed later, unless it failed and somebody was told;
- a slab is leased while it is being persisted or read, or while it is the only sealed one (unless there is but one slab, and durable);
- two persists at once; a *bound* snapshot that is dropped without having become durable, failed, or superseded by a later bound one;
- a snapshot that *must* reach the disk is dropped before it is durable or has failed. While such ones have all slabs, leases are refused.

The idle end. After ``idle_s`` without a trainer the newest snapshot is persisted and the agent ends. If that fails the agent stays and
tries again every ``idle_s`` (at least ``IDLE_RETRY_S``) until it succeeds, a trainer comes, or ``IDLE_GIVE_UP_S`` have passed since the
first try: only then does it end with the snapshot lost, and says so as an error. A beaten attempt's snapshot is not waited for.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any

MAX_SLABS = 3
"""One filling, the newest sealed, one persisting."""
IDLE_RETRY_S = 60.0
"""The least time between two tries of an idle agent to persist what could not be persisted."""
IDLE_GIVE_UP_S = 24 * 3600.0
"""How long an idle agent keeps trying."""


class SlabState(enum.Enum):
    """What a slab is."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    PERSISTING = "persisting"


class Phase(enum.Enum):
    """What the agent is doing as a whole."""

    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlabRow:
    """One slab. ``payload`` is the shell's own description of the snapshot; it is carried along and never looked at."""

    id: int
    nbytes: int
    state: SlabState = SlabState.FREE
    plan_id: str = ""
    """Whose headers are in it; empty: nobody's."""
    conn: int = 0
    """Who fills it, or who sealed it."""
    step: int = 0
    attempt: int = 0
    order: int = 0
    """Of sealing: later is greater."""
    bound: bool = False
    must: bool = False
    """Bound, and superseded by nothing."""
    durable: bool = False
    failed: bool = False
    superseded: bool = False
    """Waits only for its readers to be free."""
    readers: tuple[int, ...] = ()
    payload: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One connection. ``attempt`` is 0 until it is configured."""

    role: str
    pid: int
    attempt: int = 0
    bye: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting:
    """Somebody who waits for the end of a drain (``stop``: for the end of the agent)."""

    conn: int
    request: int
    until: float
    exit: bool = False
    stop: bool = False


@dataclasses.dataclass(kw_only=True)
class AgentState:
    """Everything the decisions depend on. ``transition`` copies it; rows are frozen and replaced."""

    phase: Phase = Phase.SERVING
    slabs: dict[int, SlabRow] = dataclasses.field(default_factory=dict)
    peers: dict[int, Peer] = dataclasses.field(default_factory=dict)
    waiting: tuple[Waiting, ...] = ()
    max_slabs: int = MAX_SLABS
    budget: int | None = None
    idle_s: float = 600.0
    idle_since: float | None = 0.0
    persist_when_idle: bool = False
    beaten_attempt: int = 0
    """Attempts up to this one have met a higher one and commit nothing more."""
    newest_attempt: int = 0
    newest_durable_step: int | None = None
    error: str = ""
    """Of the newest failed persist, until one succeeds."""
    signals: int = 0
    end_at: float | None = None
    ending: str = ""
    """Why it is DRAINING."""
    retry_at: float | None = None
    """When the idle end tries again."""
    bye_end: bool = False
    """The last trainer said goodbye: end as soon as everything is durable."""
    next_slab: int = 1
    next_order: int = 1

    def newest(self) -> SlabRow | None:
        """The snapshot sealed last."""
        return max((s for s in self.slabs.values() if is_snapshot(s)), key=lambda s: s.order, default=None)

    def persisting(self) -> SlabRow | None:
        """The slab being written, if any."""
        return next((s for s in self.slabs.values() if s.state is SlabState.PERSISTING), None)

    def trainers(self) -> list[int]:
        """Connections of trainers."""
        return [conn for conn, peer in self.peers.items() if peer.role == "trainer"]

    def due(self) -> list[SlabRow]:
        """Snapshots that are to be persisted, in the order in which they are: bound ones first."""
        newest = self.newest()
        rows = [
            s
            for s in self.slabs.values()
            if s.state is SlabState.SEALED and is_snapshot(s) and not s.durable and not s.failed
            and (s.bound or (self.persist_when_idle and s is newest))
        ]  # fmt: skip
        return sorted(rows, key=lambda s: (not s.bound, s.order))

    def undrained(self) -> bool:
        """Whether something is being or will be written."""
        return self.persisting() is not None or bool(self.due())


def is_snapshot(slab: SlabRow) -> bool:
    """Whether the slab holds a sealed snapshot that has not been replaced."""
    return slab.state in (SlabState.SEALED, SlabState.PERSISTING) and not slab.superseded


# -- events -------------------------------------------------------------------------------------------------------------------
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
    """A trainer named its attempt and policy. ``newest_attempt``: the highest in the store."""

    attempt: int
    newest_attempt: int
    persist_when_idle: bool
    budget: int | None
    idle_s: float


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
class Sealed(OfSlab):
    """A leased slab is complete. ``room`` as in LeaseAsked: the next slab is allocated ahead of its need."""

    step: int
    attempt: int
    bound: bool
    must: bool = False
    room: int = 0
    payload: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenBack(OfSlab):
    """A lease ends without a snapshot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationFailed(OfSlab):
    """The shell could not make this slab after all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistFinished(OfSlab):
    """The snapshot is committed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistFailed(OfSlab):
    """The snapshot could not be committed. ``conflict``: its attempt met a higher one."""

    error: str
    conflict: bool = False


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
    """Tell the one who sealed it what became of a snapshot ("committed", "superseded", "failed")."""

    conn: int
    slab: int
    what: str
    step: int
    attempt: int
    payload: Any = None


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


# -- one event -------------------------------------------------------------------------------------------------------------------
class _Draft:
    """The state while one event changes it, and the actions so far."""

    def __init__(self, state: AgentState, now: float) -> None:
        self.state = dataclasses.replace(state, slabs=dict(state.slabs), peers=dict(state.peers))
        self.now = now
        self.actions: list[Action] = []

    def act(self, action: Action) -> None:
        self.actions.append(action)

    def change(self, slab: SlabRow, **changes: Any) -> SlabRow:
        row = dataclasses.replace(slab, **changes)
        self.state.slabs[slab.id] = row
        return row

    def fail(self, event: Happened, name: str, message: str, *, kind: str = "", hint: str = "") -> None:
        if event.conn:
            self.act(Fail(event.conn, event.request, name, message, kind, hint))

    def notify(self, slab: SlabRow, what: str) -> None:
        if slab.conn in self.state.peers:
            self.act(Notify(slab.conn, slab.id, what, slab.step, slab.attempt, slab.payload))

    def empty(self, slab: SlabRow) -> SlabRow:
        """Make it FREE; what stays is its memory and the headers in it."""
        row = SlabRow(id=slab.id, nbytes=slab.nbytes, plan_id=slab.plan_id)
        self.state.slabs[slab.id] = row
        return row

    def release(self, slab: SlabRow) -> None:
        """A sealed slab is not needed any more; it is FREE once nobody reads it."""
        if slab.readers:
            self.change(slab, state=SlabState.SEALED, superseded=True)
        else:
            self.empty(slab)

    def is_newest(self, slab: SlabRow) -> bool:
        newest = self.state.newest()
        return newest is not None and newest.id == slab.id

    def bind_newest(self) -> None:
        """The newest snapshot must reach the disk, also if it failed before."""
        newest = self.state.newest()
        if newest is not None and not newest.durable and newest.attempt > self.state.beaten_attempt:
            self.change(newest, bound=True, failed=False)

    def allocate(self, nbytes: int) -> SlabRow:
        row = SlabRow(id=self.state.next_slab, nbytes=nbytes)
        self.state.next_slab += 1
        self.state.slabs[row.id] = row
        self.act(Allocate(row.id, nbytes))
        return row

    def free(self, slabs: Iterable[SlabRow]) -> int:
        """Give back their memory; returns how many bytes that were."""
        freed = 0
        for slab in list(slabs):
            del self.state.slabs[slab.id]
            self.act(FreeSlab(slab.id))
            freed += slab.nbytes
        return freed

    def room(self, measured: int) -> int:
        """What the machine has, within the budget."""
        used = sum(s.nbytes for s in self.state.slabs.values())
        return measured if self.state.budget is None else min(measured, self.state.budget - used)

    def suited(self, plan_id: str, nbytes: int) -> SlabRow | None:
        """The best FREE slab for a plan. One of more than twice the size belongs to another layout and is not kept for this one."""
        fitting = [s for s in self.state.slabs.values() if s.state is SlabState.FREE and nbytes <= s.nbytes <= 2 * nbytes]
        return min(fitting, key=lambda s: (s.plan_id != plan_id, s.nbytes, s.id), default=None)

    def make_place(self, plan_id: str, nbytes: int, measured: int) -> SlabRow | None:
        """A FREE slab for the plan: one there is, or a new one, for which slabs of other layouts are freed as far as needed."""
        slab = self.suited(plan_id, nbytes)
        if slab is not None:
            return slab
        measured += self.free(s for s in list(self.state.slabs.values()) if s.state is SlabState.FREE)
        if len(self.state.slabs) >= self.state.max_slabs or nbytes > self.room(measured):
            measured += self.free(
                s for s in list(self.state.slabs.values())
                if s.state is SlabState.SEALED and s.durable and not s.readers and s.plan_id != plan_id
            )  # fmt: skip
        if len(self.state.slabs) < self.state.max_slabs and nbytes <= self.room(measured):
            return self.allocate(nbytes)
        return None

    def only_one(self, nbytes: int) -> SlabRow | None:
        """Where memory suffices for one slab alone it is refilled when its snapshot is on disk; the disk is what a save goes by then.

        A snapshot that is not there yet is bound, else none would ever follow it.
        """
        slab = next(iter(self.state.slabs.values()), None)
        if len(self.state.slabs) != 1 or slab is None or not is_snapshot(slab):
            return None
        if slab.state is SlabState.SEALED and slab.durable and not slab.readers and nbytes <= slab.nbytes <= 2 * nbytes:
            return self.empty(slab)
        self.bind_newest()
        return None


def transition(state: AgentState, event: Happened, *, now: float) -> tuple[AgentState, tuple[Action, ...]]:
    """What ``event`` at time ``now`` (seconds, monotonic) makes of ``state``, and what is to be done about it, in order."""
    draft = _Draft(state, now)
    slab = state.slabs.get(event.slab) if isinstance(event, OfSlab) else None
    if isinstance(event, OfSlab) and slab is None:
        draft.fail(event, "AgentError", f"slab {event.slab} does not exist", kind="no-slab")
    elif event.conn and event.conn not in state.peers and not isinstance(event, Connected):
        draft.fail(event, "AgentError", "this connection has not said hello", kind="protocol")
    elif isinstance(event, OfSlab) and event.conn and state.phase is Phase.ENDED:
        _ended(draft, event, None)
    else:
        TABLE[slab.state if slab is not None else state.phase, type(event)](draft, event, slab)
    if draft.state.phase is not Phase.ENDED:
        _settle(draft)
    return draft.state, tuple(draft.actions)


def next_tick_at(state: AgentState) -> float | None:
    """When ``Ticked`` is due next, in the time of ``now``; None: not before something else happens."""
    times = [w.until for w in state.waiting]
    if state.end_at is not None:
        times.append(state.end_at)
    if state.idle_since is not None and state.phase is Phase.SERVING:
        times.append(state.idle_since + state.idle_s)
    if state.retry_at is not None and _ends_idle(state):
        times.append(state.retry_at)
    return min(times, default=None)


def _settle(d: _Draft) -> None:
    """After every event: start what is due, answer who waits, end when it is time."""
    state = d.state
    if state.persisting() is None and (due := state.due()):
        d.change(due[0], state=SlabState.PERSISTING)
        d.act(StartPersist(due[0].id, due[0].payload))
    newest = state.newest()
    durable = newest is None or newest.durable
    quiet = not state.undrained()
    done = [w for w in state.waiting if quiet or w.until <= d.now]
    state.waiting = tuple(w for w in state.waiting if w not in done)
    for waiting in done:
        if waiting.stop and durable:
            d.act(Accept(waiting.conn, waiting.request))
        elif waiting.stop:
            state.ending, state.phase = "", Phase.SERVING
            d.act(Fail(waiting.conn, waiting.request, "AgentError", f"the newest snapshot in memory cannot be persisted: {state.error}",
                       "not-durable", "mend that, or stop with force to lose it"))  # fmt: skip
        else:
            error = "" if quiet and durable else (state.error if quiet else "the time-out has passed")
            d.act(AnswerDrain(waiting.conn, waiting.request, quiet and durable, state.newest_durable_step, error))
    reason = _reason_to_end(state, d.now, quiet=quiet, asked=quiet and durable and any(w.exit or w.stop for w in done))
    if reason:
        _end(d, reason, lost=_lost(state) if reason == "idle" else "")
    elif quiet and _ends_idle(state) and not _nothing_to_keep(state) and state.retry_at is None:
        again_s, left_s = max(IDLE_RETRY_S, state.idle_s), _give_up_at(state) - d.now
        state.retry_at = d.now + (min(again_s, left_s) if left_s > 0 else again_s)


def _ends_idle(state: AgentState) -> bool:
    return state.phase is Phase.DRAINING and state.ending == "idle"


def _give_up_at(state: AgentState) -> float:
    return (state.idle_since or 0.0) + state.idle_s + IDLE_GIVE_UP_S


def _lost(state: AgentState) -> str:
    newest = state.newest()
    if newest is None or _nothing_to_keep(state):
        return ""
    return (f"step {newest.step} of attempt {newest.attempt} is lost: it could not be persisted within {IDLE_GIVE_UP_S / 3600:g} h after "
            f"the last trainer's end: {state.error}")  # fmt: skip


def _nothing_to_keep(state: AgentState) -> bool:
    newest = state.newest()
    # A beaten attempt's snapshot can never be committed: there is no point in keeping it.
    return newest is None or newest.durable or newest.attempt <= state.beaten_attempt


def _reason_to_end(state: AgentState, now: float, *, quiet: bool, asked: bool) -> str:
    if state.end_at is not None and state.end_at <= now:
        return "signal: the time for the drain has passed"
    if asked:
        return "asked"
    if not quiet:
        return ""
    if state.signals and (not state.trainers() or state.signals > 1):
        return "signal"
    if state.trainers() or any(s.readers for s in state.slabs.values()):
        return ""
    if state.ending == "idle" and (_nothing_to_keep(state) or _give_up_at(state) <= now):
        return "idle"
    return "the last trainer has ended" if state.bye_end and _nothing_to_keep(state) else ""


def _end(d: _Draft, reason: str, *, lost: str = "") -> None:
    d.state.phase = Phase.ENDED
    d.act(Exit(reason, lost))


# -- events of the agent ------------------------------------------------------------------------------------------------------------
def _connected(d: _Draft, e: Connected, _: None) -> None:
    d.state.peers[e.conn] = Peer(role=e.role, pid=e.pid)
    if e.role == "trainer":
        d.state.idle_since = None
        d.state.bye_end = False
        if d.state.ending == "idle":
            d.state.ending, d.state.phase = "", Phase.SERVING
    d.act(Accept(e.conn, e.request))


def _configured(d: _Draft, e: Configured, _: None) -> None:
    other = next((p for c, p in d.state.peers.items() if c != e.conn and p.attempt), None)
    newest = max(e.newest_attempt, d.state.newest_attempt, d.state.beaten_attempt)
    if other is not None:
        d.fail(e, "ConflictError", f"a trainer with pid {other.pid} is saving into this run now, as attempt {other.attempt}",
               kind="two-trainers", hint="stop it or use another run directory")  # fmt: skip
    elif e.attempt < newest or e.attempt <= d.state.beaten_attempt:
        d.fail(e, "ConflictError", f"attempt {e.attempt} is not the newest of this run: attempt {newest} exists", kind="old-attempt",
               hint="stop this trainer, or start it anew to go on from the newest checkpoint")  # fmt: skip
    else:
        state = d.state
        state.peers[e.conn] = dataclasses.replace(state.peers[e.conn], attempt=e.attempt)
        state.newest_attempt, state.persist_when_idle = e.attempt, e.persist_when_idle
        state.budget, state.idle_s = e.budget, e.idle_s
        d.act(Accept(e.conn, e.request))


def _plan_announced(d: _Draft, e: PlanAnnounced, _: None) -> None:
    everything = e.room + sum(s.nbytes for s in d.state.slabs.values())
    if d.state.budget is not None:
        everything = min(everything, d.state.budget)
    fits = everything // max(1, e.nbytes)
    if fits < 1:
        d.fail(e, "CapacityError", f"a slab for one snapshot needs {e.nbytes:,} bytes of memory, {max(0, everything):,} are available"
               f"{_because(d, e.limits)}", kind="memory", hint="raise the memory limit or memory_budget, or save less")  # fmt: skip
        return
    d.make_place(e.plan_id, e.nbytes, e.room)
    note = ""
    if fits < d.state.max_slabs:
        note = (f"only {fits} of {d.state.max_slabs} slabs of {e.nbytes:,} bytes fit into {everything:,} bytes{_because(d, e.limits)}: "
                "a save is skipped while the only free slab is busy")  # fmt: skip
    d.act(Accept(e.conn, e.request, note))


def _because(d: _Draft, limits: str) -> str:
    reasons = [f"memory_budget {d.state.budget:,}"] if d.state.budget is not None else []
    reasons += [limits] if limits else []
    return f" ({'; '.join(reasons)})" if reasons else ""


def _lease_asked(d: _Draft, e: LeaseAsked, _: None) -> None:
    if not d.state.peers[e.conn].attempt:
        d.fail(e, "AgentError", "a slab was asked for before the attempt was named", kind="protocol")
        return
    slab = d.make_place(e.plan_id, e.nbytes, e.room) or d.only_one(e.nbytes)
    if slab is not None:
        d.change(slab, state=SlabState.FILLING, conn=e.conn, step=e.step, plan_id=e.plan_id)
        d.act(Grant(e.conn, e.request, slab.id, e.plan_id, slab.plan_id == e.plan_id))
        return
    slabs = d.state.slabs.values()
    inside = ", ".join(f"{s.state.value}{' and being read' if s.readers else ''} (step {s.step})" for s in slabs)
    if len(slabs) >= d.state.max_slabs:
        d.act(Refuse(e.conn, e.request, "busy", f"all {len(slabs)} slabs are in use: {inside}"))
    else:
        d.act(Refuse(e.conn, e.request, "memory", f"another slab needs {e.nbytes:,} bytes, {max(0, d.room(e.room)):,} are available"
                     f"{_because(d, e.limits)}; in use: {inside or 'none'}"))  # fmt: skip


def _no_lease_while_draining(d: _Draft, e: LeaseAsked, slab: None) -> None:
    if d.state.ending == "asked":
        d.act(Refuse(e.conn, e.request, "busy", "the agent has been told to end"))
    else:
        _lease_asked(d, e, slab)


def _drain_asked(d: _Draft, e: DrainAsked, _: None) -> None:
    d.bind_newest()
    d.state.waiting += (Waiting(conn=e.conn, request=e.request, until=d.now + e.timeout_s, exit=e.exit),)


def _stop_asked(d: _Draft, e: StopAsked, _: None) -> None:
    if e.force:
        d.act(Accept(e.conn, e.request))
        _end(d, "told to, without a drain")
        return
    d.bind_newest()
    d.state.ending, d.state.phase = "asked", Phase.DRAINING
    d.state.waiting += (Waiting(conn=e.conn, request=e.request, until=float("inf"), stop=True),)


def _bye_said(d: _Draft, e: ByeSaid, _: None) -> None:
    state = d.state
    state.peers[e.conn] = dataclasses.replace(state.peers[e.conn], bye=True)
    others = any(conn != e.conn and peer.role == "trainer" for conn, peer in state.peers.items())
    reading = any(slab.readers for slab in state.slabs.values())
    quiet = not others and not reading and not state.undrained() and _nothing_to_keep(state)
    ending = state.peers[e.conn].role == "trainer" and quiet and state.idle_s < float("inf")
    d.act(Accept(e.conn, e.request, ending=ending))


def _connection_closed(d: _Draft, e: ConnectionClosed, _: None) -> None:
    peer = d.state.peers.pop(e.conn)
    asked_to_end = any(w.stop for w in d.state.waiting)
    # A stop goes on without the one who asked for it; a drain only concerns who waits for it.
    d.state.waiting = tuple(w for w in d.state.waiting if w.conn != e.conn or w.stop)
    for slab in list(d.state.slabs.values()):
        if slab.state is SlabState.FILLING and slab.conn == e.conn:
            d.empty(slab)
        elif e.conn in slab.readers:
            _drop_reader(d, slab, e.conn, every=True)
    if peer.role != "trainer":
        return
    newest = d.state.newest()
    if not peer.bye and newest is not None and newest.conn == e.conn:
        d.bind_newest()
    if not d.state.trainers():
        d.state.idle_since = d.now
        d.state.bye_end = peer.bye and not asked_to_end and d.state.idle_s < float("inf")  # one that never ends for want of a trainer stays


def _ticked(d: _Draft, _e: Ticked, _: None) -> None:
    idle = d.state.idle_since
    if d.state.phase is Phase.SERVING and idle is not None and not d.state.trainers() and idle + d.state.idle_s <= d.now:
        d.state.ending, d.state.phase, d.state.retry_at = "idle", Phase.DRAINING, None
        d.bind_newest()
    elif _ends_idle(d.state) and d.state.retry_at is not None and d.state.retry_at <= d.now:
        d.state.retry_at = None
        d.bind_newest()


def _signalled(d: _Draft, e: Signalled, _: None) -> None:
    d.state.signals += 1
    d.bind_newest()
    d.state.ending, d.state.phase = d.state.ending if d.state.ending == "asked" else "signal", Phase.DRAINING
    if d.state.end_at is None:
        d.state.end_at = d.now + e.grace_s


# -- events of a slab ------------------------------------------------------------------------------------------------------------------
def _sealed(d: _Draft, e: Sealed, slab: SlabRow) -> None:
    if slab.conn != e.conn:
        _not_yours(d, e, slab)
        return
    if e.attempt <= d.state.beaten_attempt:
        d.empty(slab)
        d.fail(e, "ConflictError", f"attempt {e.attempt} has been superseded by a newer attempt of this run; step {e.step} is not kept",
               kind="old-attempt", hint="stop this trainer: another one has taken over the run")  # fmt: skip
        return
    bound = e.bound or e.must
    for other in list(d.state.slabs.values()):
        if other.state is not SlabState.SEALED or other.superseded:
            continue
        pending = not other.durable and not other.failed
        if pending and (other.must or (other.bound and not bound)):
            continue
        if pending:
            d.notify(other, "superseded")
        d.release(other)
    d.change(slab, state=SlabState.SEALED, step=e.step, attempt=e.attempt, order=d.state.next_order, bound=bound, must=e.must,
             payload=e.payload)  # fmt: skip
    d.state.next_order += 1
    d.act(Accept(e.conn, e.request))
    # Ahead of its need, so that the next save finds a slab with its pages in place.
    full = len(d.state.slabs) >= d.state.max_slabs or any(s.state is SlabState.FREE for s in d.state.slabs.values())
    if not full and slab.nbytes <= d.room(e.room):
        d.allocate(slab.nbytes)


def _given_back(d: _Draft, e: GivenBack, slab: SlabRow) -> None:
    if slab.conn != e.conn:
        _not_yours(d, e, slab)
        return
    d.empty(slab)
    d.act(Accept(e.conn, e.request))


def _given_back_already(d: _Draft, e: GivenBack, _: SlabRow) -> None:
    d.act(Accept(e.conn, e.request))


def _not_yours(d: _Draft, e: OfSlab, slab: SlabRow) -> None:
    d.fail(e, "AgentError", f"slab {slab.id} is not leased to this connection: it is {slab.state.value}", kind="protocol")


def _allocation_failed(d: _Draft, _e: AllocationFailed, slab: SlabRow) -> None:
    del d.state.slabs[slab.id]


def _persist_finished(d: _Draft, _e: PersistFinished, slab: SlabRow) -> None:
    d.notify(slab, "committed")
    d.state.newest_durable_step, d.state.error = slab.step, ""
    row = d.change(slab, state=SlabState.SEALED, durable=True, failed=False)
    if not d.is_newest(row):
        d.release(row)


def _persist_failed(d: _Draft, e: PersistFailed, slab: SlabRow) -> None:
    d.notify(slab, "failed")
    d.state.error = e.error
    d.change(slab, state=SlabState.SEALED, failed=True)
    if e.conflict:
        d.state.beaten_attempt = max(d.state.beaten_attempt, slab.attempt)
        for other in list(d.state.slabs.values()):
            if is_snapshot(other) and not other.durable and not other.failed and other.attempt <= d.state.beaten_attempt:
                d.notify(other, "failed")
                d.change(other, failed=True)
    for other in list(d.state.slabs.values()):
        if is_snapshot(other) and other.failed and not d.is_newest(other):
            d.release(other)  # given up: who sealed it has been told


def _snapshot_asked(d: _Draft, e: SnapshotAsked, slab: SlabRow) -> None:
    if slab.superseded:
        _no_snapshot(d, e, slab)
        return
    d.change(slab, readers=(*slab.readers, e.conn))
    d.act(GiveSnapshot(e.conn, e.request, slab.id, slab.payload))


def _no_snapshot(d: _Draft, e: OfSlab, slab: SlabRow) -> None:
    d.fail(e, "NotFoundError", f"there is no snapshot in slab {slab.id} any more", kind="no-snapshot", hint="list the snapshots again")


def _snapshot_released(d: _Draft, e: SnapshotReleased, slab: SlabRow) -> None:
    if e.conn in slab.readers:
        _drop_reader(d, slab, e.conn, every=False)
    if e.request:
        d.act(Accept(e.conn, e.request))


def _drop_reader(d: _Draft, slab: SlabRow, conn: int, *, every: bool) -> None:
    readers = list(slab.readers)
    while conn in readers:
        readers.remove(conn)
        if not every:
            break
    row = d.change(slab, readers=tuple(readers))
    if row.superseded and not readers:
        d.empty(row)


def _ignore(_d: _Draft, _e: Happened, _slab: SlabRow | None) -> None:
    """Too late to matter."""


def _impossible(_d: _Draft, e: OfSlab, slab: SlabRow) -> None:
    raise AssertionError(f"the agent's shell reported {type(e).__name__} for slab {slab.id}, which is {slab.state.value}")


def _ended(d: _Draft, e: Happened, _: None) -> None:
    d.fail(e, "AgentError", "the agent is ending", kind="ending")


_Step = Callable[[_Draft, Any, Any], None]
_AT_WORK: dict[type[Happened], _Step] = {
    Connected: _connected, Configured: _configured, PlanAnnounced: _plan_announced, DrainAsked: _drain_asked, StopAsked: _stop_asked,
    ByeSaid: _bye_said, ConnectionClosed: _connection_closed, Ticked: _ticked, Signalled: _signalled,
}  # fmt: skip
_FREE, _FILLING, _SEALED, _PERSISTING = SlabState
TABLE: dict[tuple[SlabState | Phase, type[Happened]], _Step] = {
    (_FREE, Sealed): _not_yours, (_FILLING, Sealed): _sealed, (_SEALED, Sealed): _not_yours, (_PERSISTING, Sealed): _not_yours,
    (_FREE, GivenBack): _given_back_already, (_FILLING, GivenBack): _given_back,
    (_SEALED, GivenBack): _not_yours, (_PERSISTING, GivenBack): _not_yours,
    (_FREE, AllocationFailed): _allocation_failed, (_FILLING, AllocationFailed): _allocation_failed,
    (_SEALED, AllocationFailed): _impossible, (_PERSISTING, AllocationFailed): _impossible,
    (_FREE, PersistFinished): _impossible, (_FILLING, PersistFinished): _impossible,
    (_SEALED, PersistFinished): _impossible, (_PERSISTING, PersistFinished): _persist_finished,
    (_FREE, PersistFailed): _impossible, (_FILLING, PersistFailed): _impossible,
    (_SEALED, PersistFailed): _impossible, (_PERSISTING, PersistFailed): _persist_failed,
    (_FREE, SnapshotAsked): _no_snapshot, (_FILLING, SnapshotAsked): _no_snapshot,
    (_SEALED, SnapshotAsked): _snapshot_asked, (_PERSISTING, SnapshotAsked): _snapshot_asked,
    (_FREE, SnapshotReleased): _snapshot_released, (_FILLING, SnapshotReleased): _snapshot_released,
    (_SEALED, SnapshotReleased): _snapshot_released, (_PERSISTING, SnapshotReleased): _snapshot_released,
    **{(phase, event): step for phase in (Phase.SERVING, Phase.DRAINING) for event, step in _AT_WORK.items()},
    (Phase.SERVING, LeaseAsked): _lease_asked, (Phase.DRAINING, LeaseAsked): _no_lease_while_draining,
    **{(Phase.ENDED, event): _ended for event in (Connected, Configured, PlanAnnounced, LeaseAsked, DrainAsked, StopAsked, ByeSaid)},
    **{(Phase.ENDED, event): _ignore for event in (ConnectionClosed, Ticked, Signalled)},
}  # fmt: skip
"""Every (state of the slab, event of a slab) and (phase, event of the agent); what is not a step of the protocol is refused here too."""
