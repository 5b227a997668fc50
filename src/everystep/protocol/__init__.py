"""The agent's decisions as a pure state machine: events in, actions out. No clock, no threads, no I/O.

Theory of operation. A slab is FREE, FILLING (leased), SEALED (a snapshot) or PERSISTING (a snapshot being written); the last two may
also be *held* by readers. The agent is SERVING, DRAINING (it ends once nothing is left to write) or ENDED. ``transition`` looks up
``TABLE[state of the slab or phase of the agent, type of the event]`` and returns a new state and the actions, which the agent's
shell carries out in order. What is done after every event, whatever it was, is in ``_settle``: start the next persist, answer drains, end.

Several ranks of a node fill one slab for a step: the first to ask gets it, the others join. It is sealed when every rank has sealed its
*share*. When one gives its share up, is lost, or leases a later step without having sealed this one, the slab is *broken*: it will never
be a snapshot, everybody is told, and it is FREE once every rank that joined is done with it. A refusal is remembered for the node's other
ranks; a rank that asks again begins a new round.

On several nodes a sealed snapshot is *complete* once every node has sealed its share of the step, which the nodes' lead finds out; alone a
node completes it at once. Only complete snapshots are listed, read, persisted, or supersede anything; what seals on this node and
not on another is lost, and told, when the lead says so, when a later step is complete, or when somebody has waited ``COMPLETE_S`` for it.

What other nodes copy into their memory, or have copied last, is *kept* by this node whatever newer ones are complete: a lost node's copy
is worth nothing without the others' own shares. To who saved it it is superseded like any other. It gives way only to a save that finds
no memory though fewer than ``MAX_SLABS`` slabs are in use otherwise.

What must never happen (the property tests check it):

- a slab is sealed before every rank has sealed it; the ranks get different answers for one step;
- a complete snapshot goes away that is neither durable nor superseded by a complete one sealed later, unless it failed and that was told;
- a slab is leased while it is being persisted or read, or while it is the newest complete one (unless there is but one slab, and durable);
- two persists at once; a *bound* snapshot that is dropped without having become durable, failed, or, on one node, superseded by a later
  bound one;
- a snapshot that *must* reach the disk is dropped before it is durable or has failed. While such ones have all slabs, leases are refused.

The idle end. After ``idle_s`` without a trainer the newest snapshot is persisted and the agent ends. If that fails the agent stays and
tries again every ``idle_s`` (at least ``IDLE_RETRY_S``) until it succeeds, a trainer comes, or ``IDLE_GIVE_UP_S`` have passed since the
first try: only then does it end with the snapshot lost, and says so as an error. A beaten attempt's snapshot is not waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from everystep.protocol.events import (
    Accept,
    Action,
    Allocate,
    AllocationFailed,
    AnswerDrain,
    ByeSaid,
    Completed,
    Configured,
    Connected,
    ConnectionClosed,
    DrainAsked,
    Exit,
    Fail,
    FreeSlab,
    GivenBack,
    GiveSnapshot,
    Grant,
    Happened,
    KeepAsked,
    LeaseAsked,
    NewestWanted,
    Notify,
    Occupied,
    OfSlab,
    PersistFailed,
    PersistFinished,
    PlanAnnounced,
    Refuse,
    Sealed,
    Signalled,
    SnapshotAsked,
    SnapshotReleased,
    StartPersist,
    StepLost,
    StopAsked,
    TellNodes,
    Ticked,
)
from everystep.protocol.rows import (
    KEPT_SLABS,
    MAX_SLABS,
    AgentState,
    Peer,
    Phase,
    Refused,
    Share,
    SlabRow,
    SlabState,
    Waiting,
    is_complete,
    is_snapshot,
)

__all__ = [
    "COMPLETE_S",
    "IDLE_GIVE_UP_S",
    "IDLE_RETRY_S",
    "KEPT_SLABS",
    "MAX_SLABS",
    "TABLE",
    "Accept",
    "Action",
    "AgentState",
    "Allocate",
    "AllocationFailed",
    "AnswerDrain",
    "ByeSaid",
    "Completed",
    "Configured",
    "Connected",
    "ConnectionClosed",
    "DrainAsked",
    "Exit",
    "Fail",
    "FreeSlab",
    "GiveSnapshot",
    "GivenBack",
    "Grant",
    "Happened",
    "KeepAsked",
    "LeaseAsked",
    "NewestWanted",
    "Notify",
    "Occupied",
    "OfSlab",
    "Peer",
    "PersistFailed",
    "PersistFinished",
    "Phase",
    "PlanAnnounced",
    "Refuse",
    "Refused",
    "Sealed",
    "Share",
    "Signalled",
    "SlabRow",
    "SlabState",
    "SnapshotAsked",
    "SnapshotReleased",
    "StartPersist",
    "StepLost",
    "StopAsked",
    "TellNodes",
    "Ticked",
    "Waiting",
    "is_complete",
    "is_snapshot",
    "next_tick_at",
    "transition",
]

IDLE_RETRY_S = 60.0
"""The least time between two tries of an idle agent to persist what could not be persisted."""
IDLE_GIVE_UP_S = 24 * 3600.0
"""How long an idle agent keeps trying."""
COMPLETE_S = 60.0
"""How long a drain, or an agent without trainers, waits for the other nodes to seal what this one has sealed."""
_REFUSALS = 64
"""Steps whose refusal is remembered."""
_AHEAD = 2
"""A rank may be so many steps ahead of the others of its node."""


# -- one event -------------------------------------------------------------------------------------------------------------------
class _Draft:
    """The state while one event changes it, and the actions so far."""

    def __init__(self, state: AgentState, now: float) -> None:
        self.state = dataclasses.replace(state, slabs=dict(state.slabs), peers=dict(state.peers), refused=dict(state.refused),
                                         skipped=dict(state.skipped), lost=dict(state.lost))  # fmt: skip
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

    def notify(self, slab: SlabRow, what: str, error: str = "", kind: str = "", *, conns: Iterable[int] | None = None) -> None:
        there = tuple(conn for conn in (slab.conns if conns is None else conns) if conn in self.state.peers)
        if there:
            self.act(Notify(there, slab.id, what, slab.step, slab.attempt, slab.payload, error, kind))

    def tell_nodes(self, what: str, slab: SlabRow, reason: str = "") -> None:
        if slab.nodes > 1:
            self.act(TellNodes(what, slab.step, slab.attempt, reason))

    def empty(self, slab: SlabRow) -> SlabRow:
        """Make it FREE; what stays is its memory and the headers in it."""
        row = SlabRow(id=slab.id, nbytes=slab.nbytes, plan_id=slab.plan_id)
        self.state.slabs[slab.id] = row
        return row

    def release(self, slab: SlabRow) -> None:
        """A sealed slab is not needed any more; it is FREE once nobody reads it, and no copies of it count."""
        if self.is_copied(slab):
            self.change(slab, state=SlabState.SEALED, kept=True)
        else:
            self.let_go(slab)

    def let_go(self, slab: SlabRow) -> None:
        if slab.readers:
            self.change(slab, state=SlabState.SEALED, superseded=True)
        else:
            self.empty(slab)

    def is_copied(self, slab: SlabRow) -> bool:
        """Whether other nodes copy it or have copied it."""
        return slab.complete and (slab.attempt, slab.step) in self.state.keep

    def is_newest(self, slab: SlabRow) -> bool:
        newest = self.state.newest()
        return newest is not None and newest.id == slab.id

    def bind_newest(self) -> None:
        """The newest snapshot must reach the disk, also if it failed before. One that may yet be complete is waited for first."""
        beaten, newest = self.state.beaten_attempt, self.state.newest()
        coming = [s for s in (*self.state.incomplete(), *self.state.sealing()) if s.attempt > beaten]
        newer = [s for s in coming if newest is None or s.state is SlabState.FILLING or s.order > newest.order]
        for slab in coming:
            if slab.bound or (newer and slab is newer[-1]):
                row = self.change(slab, bound=True, awaited_since=self.now if slab.awaited_since is None else slab.awaited_since)
                if is_snapshot(row):
                    self.tell_nodes("wanted", row)
        if not newer and newest is not None and not newest.durable and not newest.doomed and newest.attempt > beaten:
            self.change(newest, bound=True, failed=False)
            self.tell_nodes("wanted", newest)

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
                if s.state is SlabState.SEALED and s.durable and not s.readers and not self.is_copied(s) and s.plan_id != plan_id
            )  # fmt: skip
        if len(self.state.slabs) < self.state.max_slabs and nbytes <= self.room(measured):
            return self.allocate(nbytes)
        return None

    def give_way(self, plan_id: str, nbytes: int, measured: int) -> SlabRow | None:
        """Where a save would find a slab if nothing were kept for copies, something is kept no more: what is not copied yet first."""
        kept = [s for s in self.state.slabs.values() if s.kept or (self.is_copied(s) and s.durable and s.plan_id != plan_id)]
        if sum(s not in kept and s.state is not SlabState.FREE for s in self.state.slabs.values()) >= MAX_SLABS:
            return None
        for slab in sorted(kept, key=lambda s: s.order, reverse=True):
            if slab.readers or slab.state is not SlabState.SEALED:
                continue
            self.tell_nodes("let go", slab)
            measured += self.free([slab])
            found = self.make_place(plan_id, nbytes, measured)
            if found is not None:
                return found
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
    times += [s.awaited_since + COMPLETE_S for s in (*state.incomplete(), *state.sealing()) if s.awaited_since is not None]
    return min(times, default=None)


def _settle(d: _Draft) -> None:
    """After every event: start what is due, answer who waits, end when it is time."""
    state = d.state
    for slab in state.incomplete():
        if slab.awaited_since is not None and slab.awaited_since + COMPLETE_S <= d.now:
            _lose(d, slab, f"the other nodes had not sealed it after {COMPLETE_S:g} s")
    for slab in state.sealing():
        if slab.awaited_since is not None and slab.awaited_since + COMPLETE_S <= d.now:
            slow = ", ".join(str(rank) for rank in slab.ranks if not (share := slab.joined(rank)) or not share.sealed)
            _empty_if_over(d, _break(d, slab, f"rank {slow} had not sealed it after {COMPLETE_S:g} s", set()))
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
    if newest is not None and newest.doomed and not newest.durable:
        return f"step {newest.step} of attempt {newest.attempt} is lost: it could not be committed: {state.error}"
    if newest is None or _nothing_to_keep(state):
        return ""
    return (f"step {newest.step} of attempt {newest.attempt} is lost: it could not be persisted within {IDLE_GIVE_UP_S / 3600:g} h after "
            f"the last trainer's end: {state.error}")  # fmt: skip


def _nothing_to_keep(state: AgentState) -> bool:
    newest = state.newest()
    # A beaten attempt's snapshot can never be committed: there is no point in keeping it.
    return newest is None or newest.durable or newest.doomed or newest.attempt <= state.beaten_attempt


def _reason_to_end(state: AgentState, now: float, *, quiet: bool, asked: bool) -> str:
    if state.end_at is not None and state.end_at <= now:
        return "signal: the time for the drain has passed"
    if asked:
        return "asked"
    if not quiet:
        return ""
    if state.signals and (not state.trainers() or state.signals > 1):
        return "signal"
    if state.trainers() or state.occupied or any(s.readers for s in state.slabs.values()):
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
    mine = d.state.peers[e.conn]
    newest = max(e.newest_attempt, d.state.newest_attempt, d.state.beaten_attempt)
    others = [p for c, p in d.state.peers.items() if c != e.conn and p.attempt]
    # Ranks of one job, or of the one that this connection is just leaving: the others will follow.
    mates = [p for p in others if _together(p, e.attempt, e.job, e.rank)]
    left = [p for p in others if _together(p, mine.attempt, mine.job, mine.rank)]
    stranger = next((p for p in others if p not in mates and p not in left), None)
    if stranger is not None:
        d.fail(e, "ConflictError", f"a trainer with pid {stranger.pid} is saving into this run now, as attempt {stranger.attempt}",
               kind="two-trainers", hint="stop it or use another run directory")  # fmt: skip
    elif e.attempt < newest or e.attempt <= d.state.beaten_attempt:
        d.fail(e, "ConflictError", f"attempt {e.attempt} is not the newest of this run: attempt {newest} exists", kind="old-attempt",
               hint="stop this trainer, or start it anew to go on from the newest checkpoint")  # fmt: skip
    elif mates and (e.ranks, e.nodes) != (d.state.ranks, d.state.nodes):
        d.fail(e, "AgentError", f"rank {e.rank} says that this node's ranks are {e.ranks}, of {e.nodes} nodes; "
               f"the others said {d.state.ranks} and {d.state.nodes}", kind="protocol")  # fmt: skip
    else:
        state = d.state
        if e.attempt != state.newest_attempt:
            state.refused.clear()
            state.skipped.clear()
            state.lost.clear()
        state.orphaned = False
        state.peers[e.conn] = dataclasses.replace(mine, attempt=e.attempt, job=e.job, rank=e.rank)
        state.newest_attempt, state.ranks, state.nodes = e.attempt, e.ranks, e.nodes
        state.persist_when_idle = e.persist_when_idle and e.nodes == 1  # the lead of several nodes says which step they persist
        state.budget, state.idle_s = e.budget, e.idle_s
        state.max_slabs = e.max_slabs or state.max_slabs
        current = {peer.attempt for peer in state.peers.values()}
        for slab in state.incomplete():
            if slab.attempt not in current:
                _lose(d, slab, f"its trainers have ended; attempt {e.attempt} goes on")
        d.act(Accept(e.conn, e.request))


def _together(peer: Peer, attempt: int, job: str, rank: int) -> bool:
    return bool(job) and (peer.attempt, peer.job) == (attempt, job) and peer.rank != rank


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
        what = "a save is skipped while the only free slab is busy"
        if fits >= MAX_SLABS:
            what = "what other nodes copy gives way to saves, and a lost node may cost steps"
        note = (f"only {fits} of {d.state.max_slabs} slabs of {e.nbytes:,} bytes fit into {everything:,} bytes{_because(d, e.limits)}: "
                f"{what}")  # fmt: skip
    d.act(Accept(e.conn, e.request, note))


def _because(d: _Draft, limits: str) -> str:
    reasons = [f"memory_budget {d.state.budget:,}"] if d.state.budget is not None else []
    reasons += [limits] if limits else []
    return f" ({'; '.join(reasons)})" if reasons else ""


def _lease_asked(d: _Draft, e: LeaseAsked, _: None) -> None:
    if not d.state.peers[e.conn].attempt:
        d.fail(e, "AgentError", "a slab was asked for before the attempt was named", kind="protocol")
        return
    peer = d.state.peers[e.conn]
    if (len(d.state.ranks) > 1 or d.state.nodes > 1) and _leased_together(d, e, peer):
        return
    slab = d.make_place(e.plan_id, e.nbytes, e.room) or d.give_way(e.plan_id, e.nbytes, e.room) or d.only_one(e.nbytes)
    if slab is not None:
        d.change(slab, state=SlabState.FILLING, shares=(Share(rank=peer.rank, conn=e.conn),), ranks=d.state.ranks, nodes=d.state.nodes,
                 step=e.step, attempt=peer.attempt, plan_id=e.plan_id)  # fmt: skip
        d.act(Grant(e.conn, e.request, slab.id, e.plan_id, slab.plan_id == e.plan_id))
        return
    slabs = d.state.slabs.values()
    inside = ", ".join(f"{s.state.value}{' and being read' if s.readers else ''} (step {s.step})" for s in slabs)
    if len(slabs) >= d.state.max_slabs:
        _refuse(d, e, "busy", f"all {len(slabs)} slabs are in use: {inside}")
    else:
        _refuse(d, e, "memory", f"another slab needs {e.nbytes:,} bytes, {max(0, d.room(e.room)):,} are available"
                f"{_because(d, e.limits)}; in use: {inside or 'none'}")  # fmt: skip


def _leased_together(d: _Draft, e: LeaseAsked, peer: Peer) -> bool:
    """What the node's other ranks have done about this step decides; False when this rank is the first to ask, and may."""
    for slab in list(d.state.slabs.values()):
        mine = slab.joined(peer.rank)
        older = slab.state is SlabState.FILLING and slab.attempt == peer.attempt and slab.step < e.step
        if older and (mine is None or not mine.ended):
            _end_share(d, slab, peer.rank, f"rank {peer.rank} did not save it")
    _tell_skipped(d, before=e.step)
    known = d.state.refused.pop(e.step, None)
    if known is not None and peer.rank not in known.told:
        _refuse(d, e, known.kind, known.reason, told=known.told)
        return True
    filling = [s for s in d.state.slabs.values() if s.state is SlabState.FILLING and s.attempt == peer.attempt and not s.broken]
    found = next((s for s in filling if s.step == e.step), None)
    behind = [s for s in filling if s.step < e.step]
    if found is None and len(behind) < _AHEAD:
        return False
    if found is None:
        slow = sorted({rank for s in behind for rank in s.ranks if not (share := s.joined(rank)) or not share.ended})
        _refuse(d, e, "busy", f"rank {', '.join(map(str, slow))} of this node has not finished step {behind[0].step} yet")
    elif found.joined(peer.rank) is not None:
        d.act(Refuse(e.conn, e.request, "busy", f"rank {peer.rank} has leased a slab for step {e.step} already"))
    elif found.plan_id != e.plan_id:
        reason = f"rank {peer.rank} saves other tensors than rank {found.shares[0].rank}"
        _empty_if_over(d, _break(d, found, reason, {*(share.rank for share in found.shares), peer.rank}))
        d.act(Refuse(e.conn, e.request, "rank", reason))
    else:
        d.change(found, shares=(*found.shares, Share(rank=peer.rank, conn=e.conn)))
        d.act(Grant(e.conn, e.request, found.id, e.plan_id, True))
    return True


def _refuse(d: _Draft, e: LeaseAsked, kind: str, reason: str, *, told: tuple[int, ...] = ()) -> None:
    rank = d.state.peers[e.conn].rank
    _remember_refusal(d, e.step, kind, reason, (*told, rank))
    if d.state.nodes > 1:
        d.state.skipped[e.step] = reason
    d.act(Refuse(e.conn, e.request, kind, reason))


def _tell_skipped(d: _Draft, *, before: float = float("inf")) -> None:
    """A rank that asks for a later step, or ends, does not ask for those again that it was refused: other nodes need not wait for them."""
    for step in sorted(step for step in d.state.skipped if step < before):
        d.act(TellNodes("lost", step, d.state.newest_attempt, f"it was skipped there: {d.state.skipped.pop(step)}"))


def _remember_refusal(d: _Draft, step: int, kind: str, reason: str, told: tuple[int, ...]) -> None:
    """Until every rank of the node knows."""
    refused = d.state.refused
    refused.pop(step, None)
    if not set(d.state.ranks) <= set(told):
        refused[step] = Refused(kind=kind, reason=reason, told=told)
        if len(refused) > _REFUSALS:
            del refused[min(refused)]


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
    if state.peers[e.conn].attempt:
        _tell_skipped(d)
    others = any(conn != e.conn and peer.role == "trainer" for conn, peer in state.peers.items())
    reading = any(slab.readers for slab in state.slabs.values())
    quiet = not others and not reading and not state.undrained() and _nothing_to_keep(state)
    ending = state.peers[e.conn].role == "trainer" and quiet and state.idle_s < float("inf")
    d.act(Accept(e.conn, e.request, ending=ending and not state.orphaned and not state.occupied))


def _connection_closed(d: _Draft, e: ConnectionClosed, _: None) -> None:
    peer = d.state.peers.pop(e.conn)
    asked_to_end = any(w.stop for w in d.state.waiting)
    # A stop goes on without the one who asked for it; a drain only concerns who waits for it.
    d.state.waiting = tuple(w for w in d.state.waiting if w.conn != e.conn or w.stop)
    for slab in list(d.state.slabs.values()):
        if slab.state is SlabState.FILLING and (e.conn in slab.conns or _expected(slab, peer)):
            if slab.share_of(e.conn) is not None or _expected(slab, peer):
                _end_share(d, slab, peer.rank, f"rank {peer.rank} was lost", lost=True)
        elif e.conn in slab.readers:
            _drop_reader(d, slab, e.conn, every=True)
    if peer.role != "trainer":
        return
    if peer.attempt:
        _tell_skipped(d)
        d.state.orphaned = d.state.orphaned or (not peer.bye and (len(d.state.ranks) > 1 or d.state.nodes > 1))
    sealed = max((s for s in d.state.slabs.values() if is_snapshot(s)), key=lambda s: s.order, default=None)
    if not peer.bye and sealed is not None and e.conn in sealed.conns:
        d.bind_newest()
    if not d.state.trainers():
        d.state.idle_since = d.now
        # One that never ends for want of a trainer stays, and one whose memory somebody will want.
        d.state.bye_end = peer.bye and not asked_to_end and not d.state.orphaned and d.state.idle_s < float("inf")


def _ticked(d: _Draft, _e: Ticked, _: None) -> None:
    idle = d.state.idle_since
    if d.state.phase is Phase.SERVING and idle is not None and not d.state.trainers() and idle + d.state.idle_s <= d.now:
        d.state.ending, d.state.phase, d.state.retry_at = "idle", Phase.DRAINING, None
        d.bind_newest()
    elif _ends_idle(d.state) and d.state.retry_at is not None and d.state.retry_at <= d.now:
        d.state.retry_at = None
        d.bind_newest()


def _newest_wanted(d: _Draft, _e: NewestWanted, _: None) -> None:
    d.bind_newest()


def _occupied(d: _Draft, e: Occupied, _: None) -> None:
    d.state.occupied = e.occupied


def _signalled(d: _Draft, e: Signalled, _: None) -> None:
    d.state.signals += 1
    d.bind_newest()
    d.state.ending, d.state.phase = d.state.ending if d.state.ending == "asked" else "signal", Phase.DRAINING
    if d.state.end_at is None:
        d.state.end_at = d.now + e.grace_s


# -- events of a slab ------------------------------------------------------------------------------------------------------------------
def _sealed(d: _Draft, e: Sealed, slab: SlabRow) -> None:
    mine = slab.share_of(e.conn)
    several = len(slab.ranks) > 1
    if mine is None or (several and (e.step, e.attempt) != (slab.step, slab.attempt)):
        _not_yours(d, e, slab)
        return
    if e.attempt <= d.state.beaten_attempt:
        _end_share(d, slab, mine.rank, f"attempt {e.attempt} has been superseded by a newer one")
        d.fail(e, "ConflictError", f"attempt {e.attempt} has been superseded by a newer attempt of this run; step {e.step} is not kept",
               kind="old-attempt", hint="stop this trainer: another one has taken over the run")  # fmt: skip
        return
    shares = tuple(dataclasses.replace(share, sealed=True, ended=True) if share is mine else share for share in slab.shares)
    d.state.skipped.pop(slab.step, None)
    row = d.change(slab, shares=shares, step=e.step, attempt=e.attempt, bound=slab.bound or e.bound or e.must, must=slab.must or e.must,
                   payload=e.payload)  # fmt: skip
    if slab.broken:
        d.act(Accept(e.conn, e.request))
        d.notify(row, "failed", f"step {row.step} is not saved: {row.broken}", "rank", conns=(e.conn,))
        _empty_if_over(d, row)
        return
    whole = {share.rank for share in shares if share.sealed} == set(slab.ranks)
    if whole:
        row = d.change(row, state=SlabState.SEALED, order=d.state.next_order)
        d.state.next_order += 1
        if slab.nodes == 1:
            _complete(d, row, told=several)
        else:
            if row.bound:  # first: what is complete and what is to be persisted comes in one message then
                d.tell_nodes("wanted", row)
            d.tell_nodes("sealed", row)
    d.act(Accept(e.conn, e.request))
    if not whole:
        return
    if row.step in d.state.lost and row.attempt == d.state.newest_attempt and slab.nodes > 1:
        _lose(d, row, d.state.lost[row.step])
        return
    # Ahead of its need, so that the next save finds a slab with its pages in place.
    full = len(d.state.slabs) >= d.state.max_slabs or any(s.state is SlabState.FREE for s in d.state.slabs.values())
    if not full and slab.nbytes <= d.room(e.room):
        d.allocate(slab.nbytes)


def _complete(d: _Draft, slab: SlabRow, *, told: bool) -> None:
    """Every node has sealed it: what was sealed before gives way, unless it is bound for the disk and this one is not."""
    d.change(slab, complete=True)
    if slab.nodes == 1 and d.state.keep:  # the job goes on alone
        _keep_asked(d, KeepAsked(keys=frozenset()), None)
    for number in list(d.state.slabs):
        other, row = d.state.slabs[number], d.state.slabs[slab.id]
        if other.state is not SlabState.SEALED or other.superseded or other.kept or other.order >= row.order:
            continue
        if not other.complete:
            _lose(d, other, f"step {row.step} is complete, and not every node has sealed this one")
            continue
        pending = not other.durable and not other.failed
        # Several nodes would not drop the same ones, and each then wait for parts that the others do not write.
        if pending and (other.must or (other.bound and (not row.bound or row.nodes > 1))):
            continue
        if pending:
            d.notify(other, "superseded")
        d.release(other)
    row = d.state.slabs[slab.id]
    if told:
        d.notify(row, "complete")
    if row.bound:
        d.tell_nodes("wanted", row)


def _completed(d: _Draft, e: Completed, _: None) -> None:
    found = [s for s in d.state.slabs.values() if is_snapshot(s) and (s.step, s.attempt) == (e.step, e.attempt)]
    if not found:
        return
    slab = max(found, key=lambda s: s.order)
    if e.persist and not slab.durable and not slab.failed:
        slab = d.change(slab, bound=True)
    if not slab.complete:
        _complete(d, slab, told=True)


def _keep_asked(d: _Draft, e: KeepAsked, _: None) -> None:
    d.state.keep = e.keys
    for slab in list(d.state.slabs.values()):
        if not slab.kept or (slab.attempt, slab.step) in e.keys:
            continue
        if slab.state is SlabState.PERSISTING or (slab.bound and not slab.durable and not slab.failed):
            d.change(slab, kept=False)  # the others persist it too: it goes when that is done
        else:
            d.let_go(slab)


def _step_lost(d: _Draft, e: StepLost, _: None) -> None:
    if e.attempt == d.state.newest_attempt:
        d.state.lost[e.step] = e.reason  # also for what is not sealed here yet: it is not told again
        if len(d.state.lost) > _REFUSALS:
            del d.state.lost[min(d.state.lost)]
    for slab in d.state.incomplete():
        if (slab.step, slab.attempt) == (e.step, e.attempt):
            _lose(d, slab, e.reason)


def _lose(d: _Draft, slab: SlabRow, reason: str) -> None:
    """It will never be complete. One that nobody meant for the disk, and that a newer one replaces, is superseded like any other."""
    newer = any(s.order > slab.order for s in d.state.slabs.values() if is_snapshot(s))
    if slab.bound or not newer:
        d.notify(slab, "failed", f"step {slab.step} is not saved: {reason}", "incomplete")
    else:
        d.notify(slab, "superseded")
    d.release(slab)
    d.tell_nodes("lost", slab, reason)
    if slab.awaited_since is not None:  # somebody waits: for the next best, then
        d.bind_newest()


def _expected(slab: SlabRow, peer: Peer) -> bool:
    """Whether the slab waits for this one to join."""
    return bool(peer.attempt) and slab.attempt == peer.attempt and peer.rank in slab.ranks and slab.joined(peer.rank) is None


def _end_share(d: _Draft, slab: SlabRow, rank: int, reason: str, *, lost: bool = False) -> None:
    """This rank will not seal its share; nor will there be a snapshot. One that was ``lost`` may come back and ask anew."""
    shares = tuple(dataclasses.replace(share, ended=True) if share.rank == rank else share for share in slab.shares)
    row = d.change(slab, shares=shares)
    if (len(slab.ranks) > 1 or slab.nodes > 1) and not slab.broken:
        knowing = {share.rank for share in row.shares} | {rank}
        row = _break(d, row, reason, knowing - {rank} if lost else knowing)
    _empty_if_over(d, row)


def _break(d: _Draft, slab: SlabRow, reason: str, knowing: set[int]) -> SlabRow:
    """Tell who has sealed a share; who has not is told when it does, and whoever is not ``knowing`` when it asks."""
    row = d.change(slab, broken=reason)
    d.notify(row, "failed", f"step {row.step} is not saved: {reason}", "rank", conns=[share.conn for share in row.shares if share.sealed])
    d.tell_nodes("lost", row, reason)
    _remember_refusal(d, row.step, "rank", reason, tuple(sorted(knowing)))
    if slab.awaited_since is not None:
        d.bind_newest()
    return row


def _empty_if_over(d: _Draft, slab: SlabRow) -> None:
    if (slab.broken or len(slab.ranks) == 1) and all(share.ended for share in slab.shares):
        d.empty(slab)


def _given_back(d: _Draft, e: GivenBack, slab: SlabRow) -> None:
    mine = slab.share_of(e.conn)
    if mine is None:
        _not_yours(d, e, slab)
        return
    why = f": {e.reason}" if e.reason else ""
    _end_share(d, slab, mine.rank, f"rank {mine.rank} gave it up{why}")
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
    d.change(slab, state=SlabState.SEALED, failed=True, doomed=e.doomed)
    if e.conflict:
        d.state.beaten_attempt = max(d.state.beaten_attempt, slab.attempt)
        for other in list(d.state.slabs.values()):
            if is_complete(other) and not other.durable and not other.failed and other.attempt <= d.state.beaten_attempt:
                d.notify(other, "failed")
                d.change(other, failed=True)
    for other in list(d.state.slabs.values()):
        if is_complete(other) and other.failed and not d.is_newest(other):
            d.release(other)  # given up: who sealed it has been told


def _snapshot_asked(d: _Draft, e: SnapshotAsked, slab: SlabRow) -> None:
    if not is_snapshot(slab):
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
    ByeSaid: _bye_said, ConnectionClosed: _connection_closed, Ticked: _ticked, Signalled: _signalled, Completed: _completed,
    StepLost: _step_lost, KeepAsked: _keep_asked, NewestWanted: _newest_wanted, Occupied: _occupied,
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
    **{(Phase.ENDED, event): _ignore for event in (ConnectionClosed, Ticked, Signalled, Completed, StepLost, KeepAsked, NewestWanted,
                                                           Occupied)},
}  # fmt: skip
"""Every (state of the slab, event of a slab) and (phase, event of the agent); what is not a step of the protocol is refused here too."""
