from __future__ import annotations

import dataclasses
import itertools

import pytest

from everystep import protocol as p

TRAINER, OTHER, VISITOR = 1, 2, 3
BIG = 1 << 40


class Agent:
    """Feeds events to the table and keeps what it answered."""

    def __init__(self, **state):
        self.state = p.AgentState(**state)
        self.now = 0.0
        self.actions = ()

    def feed(self, event):
        self.state, self.actions = p.transition(self.state, event, now=self.now)
        return self.actions

    def kinds(self):
        return [type(action).__name__ for action in self.actions]

    def one(self, kind):
        (found,) = [action for action in self.actions if isinstance(action, kind)]
        return found

    def trainer(self, conn=TRAINER, attempt=1, *, idle=False, budget=None):
        self.feed(p.Connected(conn=conn, request=1, role="trainer", pid=1000 + conn))
        self.feed(p.Configured(conn=conn, request=2, attempt=attempt, newest_attempt=0, persist_when_idle=idle, budget=budget,
                               idle_s=self.state.idle_s))  # fmt: skip
        return self.actions

    def lease(self, step, conn=TRAINER, plan="a", nbytes=100, room=BIG):
        self.feed(p.LeaseAsked(conn=conn, request=step, plan_id=plan, nbytes=nbytes, step=step, room=room))
        granted = [action.slab for action in self.actions if isinstance(action, p.Grant)]
        return granted[0] if granted else None

    def save(self, step, *, bound=False, must=False, conn=TRAINER, attempt=1, room=BIG, plan="a", nbytes=100):
        slab = self.lease(step, conn, room=room, plan=plan, nbytes=nbytes)
        if slab is not None:
            self.feed(p.Sealed(conn=conn, request=step, slab=slab, step=step, attempt=attempt, bound=bound, must=must, room=room,
                               payload=f"step {step}"))  # fmt: skip
        return slab

    def steps(self):
        return sorted(s.step for s in self.state.slabs.values() if p.is_snapshot(s))


def subclasses(kind):
    return {cls for cls in vars(p).values() if isinstance(cls, type) and issubclass(cls, kind) and cls is not kind}


def test_table_is_complete():
    """Every (slab state, slab event) and every (phase, agent event) has its entry, and there is no entry besides."""
    of_slab = subclasses(p.OfSlab)
    of_agent = subclasses(p.Happened) - of_slab - {p.OfSlab}
    assert set(p.TABLE) == set(itertools.product(p.SlabState, of_slab)) | set(itertools.product(p.Phase, of_agent))


def test_transition_leaves_the_old_state_alone():
    """A transition makes a new state; the one it came from is as it was."""
    agent = Agent()
    agent.trainer()
    before, copy = agent.state, dict(agent.state.slabs)
    agent.save(1, bound=True)
    assert before.slabs == copy == {}
    assert agent.state.slabs


def test_lease_seal_persist():
    """The plain way: allocate, grant, seal, persist, committed; the newest stays in memory."""
    agent = Agent()
    agent.trainer()
    slab = agent.lease(1)
    assert agent.kinds() == ["Allocate", "Grant"]
    agent.feed(p.Sealed(conn=TRAINER, request=9, slab=slab, step=1, attempt=1, bound=True, room=BIG))
    assert agent.kinds() == ["Accept", "Allocate", "StartPersist"]
    agent.feed(p.PersistFinished(slab=slab))
    assert agent.one(p.Notify).what == "committed"
    assert agent.steps() == [1]


def test_unbound_waits_for_nothing_when_cadence_is_off():
    """With disk=False a sealed snapshot starts no persist; with None it does."""
    for idle, expected in ((False, []), (True, ["StartPersist"])):
        agent = Agent()
        agent.trainer(idle=idle)
        agent.save(1)
        assert [kind for kind in agent.kinds() if kind == "StartPersist"] == expected


def test_only_sealed_slab_is_not_refilled_while_another_persists():
    """Of three slabs one persists, one is the newest sealed, one is filled; a fourth save is skipped and says what is in use."""
    agent = Agent()
    agent.trainer()
    agent.save(1, bound=True)
    agent.save(2)
    third = agent.lease(3)
    assert agent.lease(4) is None
    assert agent.one(p.Refuse).kind == "busy"
    agent.feed(p.Sealed(conn=TRAINER, request=3, slab=third, step=3, attempt=1, bound=False))
    assert agent.steps() == [1, 3]
    assert agent.save(4) is not None


def test_bound_is_superseded_only_by_bound():
    """A bound snapshot that waits survives unbound ones and gives way to the next bound one."""
    agent = Agent()
    agent.trainer()
    agent.save(1, bound=True)
    agent.save(2, bound=True)
    agent.save(3)
    assert agent.steps() == [1, 2, 3]
    assert agent.save(4) is None
    agent.feed(p.PersistFinished(slab=1))
    assert agent.one(p.StartPersist).payload == "step 2"

    agent = Agent()
    agent.trainer()
    agent.save(1, bound=True)
    agent.save(2, bound=True)
    agent.save(3, bound=True)
    assert agent.one(p.Notify).what == "superseded"
    assert agent.steps() == [1, 3]


def test_must_is_superseded_by_nothing():
    """A snapshot that must reach the disk waits for it, whatever is sealed later, and is bound without being called so."""
    for later in ({}, {"bound": True}, {"must": True}):
        agent = Agent()
        agent.trainer()
        first = agent.save(1, bound=True)
        second = agent.save(2, must=True)
        agent.save(3, **later)
        assert agent.steps() == [1, 2, 3]
        assert agent.save(4, **later) is None
        assert agent.one(p.Refuse).kind == "busy"
        agent.feed(p.PersistFinished(slab=first))
        assert agent.one(p.StartPersist).payload == "step 2"
        assert agent.save(4, **later) == first
        assert 2 in agent.steps()
        agent.feed(p.PersistFinished(slab=second))
        assert agent.one(p.Notify) == p.Notify((TRAINER,), second, "committed", 2, 1, "step 2")
        assert 2 not in agent.steps()


def test_must_gives_way_when_it_has_failed():
    """One that must reach the disk and cannot is told and let go when a newer one is there: the disk's failure does not stop the saves."""
    agent = Agent()
    agent.trainer()
    slabs = [agent.save(step, must=True) for step in (1, 2, 3)]
    assert agent.lease(4) is None
    agent.feed(p.PersistFailed(slab=slabs[0], error="disk full"))
    assert [(a.what, a.step) for a in agent.actions if isinstance(a, p.Notify)] == [("failed", 1)]
    assert agent.steps() == [2, 3]
    assert agent.lease(4) == slabs[0]


def test_newest_is_taken_when_the_disk_is_idle():
    """As fast as the disk takes them: what was sealed meanwhile is superseded, the newest is persisted next, older ones never."""
    agent = Agent()
    agent.trainer(idle=True)
    slab = agent.save(1)
    for step in (2, 3, 4, 5):
        agent.save(step)
        if step > 2:
            assert agent.one(p.Notify) == p.Notify((TRAINER,), agent.one(p.Notify).slab, "superseded", step - 1, 1, f"step {step - 1}")
    agent.feed(p.PersistFinished(slab=slab))
    assert agent.one(p.StartPersist).payload == "step 5"


def test_lost_connection_frees_the_lease_and_binds_the_newest():
    """F36: what was being filled is reclaimed; what was sealed last is persisted."""
    agent = Agent()
    agent.trainer()
    agent.save(1)
    filling = agent.lease(2)
    agent.feed(p.ConnectionClosed(conn=TRAINER))
    assert agent.state.slabs[filling].state is p.SlabState.FREE
    assert agent.one(p.StartPersist).payload == "step 1"


def test_visitor_takes_nothing_with_it():
    """A visitor's end frees what it read and changes nothing else."""
    agent = Agent()
    agent.trainer()
    slab = agent.save(1)
    agent.feed(p.Connected(conn=VISITOR, request=1, role="visitor", pid=7))
    agent.feed(p.SnapshotAsked(conn=VISITOR, request=2, slab=slab))
    assert agent.state.slabs[slab].readers == (VISITOR,)
    agent.feed(p.ConnectionClosed(conn=VISITOR))
    assert agent.state.slabs[slab].readers == ()
    assert agent.actions == ()


def test_held_snapshot_is_not_refilled():
    """A snapshot that is read and superseded keeps its slab until the reader is done."""
    agent = Agent(max_slabs=2)
    agent.trainer()
    slab = agent.save(1)
    agent.feed(p.SnapshotAsked(conn=TRAINER, request=5, slab=slab))
    agent.save(2)
    assert agent.lease(3) is None
    agent.feed(p.SnapshotReleased(conn=TRAINER, request=6, slab=slab))
    assert agent.lease(3) == slab


def test_failed_persist_stays_in_memory_and_is_tried_again_by_a_drain():
    """F54: the trainer is told; the snapshot stays; a drain tries once more; the next save works."""
    agent = Agent()
    agent.trainer()
    slab = agent.save(1, bound=True)
    agent.feed(p.PersistFailed(slab=slab, error="disk full"))
    assert agent.one(p.Notify).what == "failed"
    assert agent.steps() == [1]
    agent.feed(p.DrainAsked(conn=TRAINER, request=8, timeout_s=10.0))
    assert agent.kinds() == ["StartPersist"]
    agent.feed(p.PersistFailed(slab=slab, error="disk still full"))
    assert agent.one(p.AnswerDrain) == p.AnswerDrain(TRAINER, 8, complete=False, newest_durable_step=None, error="disk still full")
    assert agent.save(2, bound=True) is not None
    agent.feed(p.PersistFinished(slab=agent.one(p.StartPersist).slab))
    assert agent.one(p.Notify).what == "committed"


def test_conflict_ends_the_attempt():
    """An attempt that met a higher one commits nothing more, and its next seal says so."""
    agent = Agent()
    agent.trainer()
    slab = agent.save(1, bound=True)
    agent.save(2, bound=True)
    agent.feed(p.PersistFailed(slab=slab, error="attempt 2 exists", conflict=True))
    assert [(a.what, a.step) for a in agent.actions if isinstance(a, p.Notify)] == [("failed", 1), ("failed", 2)]
    assert not any(isinstance(a, p.StartPersist) for a in agent.actions)
    agent.save(3, bound=True)
    assert agent.one(p.Fail).name == "ConflictError"
    agent.feed(p.DrainAsked(conn=TRAINER, request=8, timeout_s=10.0))
    assert not agent.one(p.AnswerDrain).complete


def test_second_live_trainer_is_refused():
    """Two trainers on one run: the second is told the first one's pid; after the first has gone it may."""
    agent = Agent()
    agent.trainer()
    agent.trainer(OTHER, attempt=2)
    assert agent.one(p.Fail).name == "ConflictError"
    assert "pid 1001" in agent.one(p.Fail).message
    agent.feed(p.ConnectionClosed(conn=TRAINER))
    agent.feed(p.Configured(conn=OTHER, request=3, attempt=2, newest_attempt=1, persist_when_idle=False, budget=None, idle_s=1.0))
    assert agent.kinds() == ["Accept"]


def test_old_attempt_is_refused():
    """An attempt below the store's newest cannot be configured."""
    agent = Agent()
    agent.feed(p.Connected(conn=TRAINER, request=1, role="trainer", pid=9))
    agent.feed(p.Configured(conn=TRAINER, request=2, attempt=3, newest_attempt=4, persist_when_idle=False, budget=None, idle_s=1.0))
    assert agent.one(p.Fail).kind == "old-attempt"


def test_drain_waits_for_all_that_is_due():
    """A drain is answered when the running persist and the newest snapshot are durable, not before."""
    agent = Agent()
    agent.trainer()
    first = agent.save(1, bound=True)
    second = agent.save(2)
    agent.feed(p.DrainAsked(conn=TRAINER, request=8, timeout_s=10.0))
    assert agent.actions == ()
    agent.feed(p.PersistFinished(slab=first))
    assert agent.kinds() == ["Notify", "StartPersist"]
    agent.feed(p.PersistFinished(slab=second))
    assert agent.one(p.AnswerDrain) == p.AnswerDrain(TRAINER, 8, complete=True, newest_durable_step=2, error="")


def test_drain_times_out():
    """A drain that takes too long is answered with the truth, at the time that ``next_tick_at`` names."""
    agent = Agent()
    agent.trainer()
    agent.save(1, bound=True)
    agent.feed(p.DrainAsked(conn=TRAINER, request=8, timeout_s=10.0))
    assert p.next_tick_at(agent.state) == 10.0
    agent.now = 10.0
    agent.feed(p.Ticked())
    assert not agent.one(p.AnswerDrain).complete


def test_ends_after_the_last_bye_once_durable():
    """A clean end: bye, close, the running persist, then the agent ends; not before."""
    agent = Agent()
    agent.trainer()
    slab = agent.save(1, bound=True)
    agent.feed(p.ByeSaid(conn=TRAINER, request=8))
    agent.feed(p.ConnectionClosed(conn=TRAINER))
    assert agent.state.phase is p.Phase.SERVING
    agent.feed(p.PersistFinished(slab=slab))
    assert "Exit" in agent.kinds()


def test_bye_without_drain_loses_nothing():
    """With disk=False and no drain the snapshot stays until the idle end, which persists it."""
    agent = Agent(idle_s=600.0)
    agent.trainer()
    slab = agent.save(1)
    agent.feed(p.ByeSaid(conn=TRAINER, request=8))
    agent.feed(p.ConnectionClosed(conn=TRAINER))
    assert agent.actions == ()
    agent.now = p.next_tick_at(agent.state)
    agent.feed(p.Ticked())
    assert agent.kinds() == ["StartPersist"]
    agent.feed(p.PersistFinished(slab=slab))
    assert agent.one(p.Exit).reason == "idle"


def idle_with_a_broken_disk(idle_s):
    """An agent whose trainer was lost and whose newest snapshot has failed twice: at the loss, and at the idle end."""
    agent = Agent(idle_s=idle_s)
    agent.trainer()
    slab = agent.save(1)
    agent.feed(p.ConnectionClosed(conn=TRAINER))
    agent.feed(p.PersistFailed(slab=slab, error="disk full"))
    agent.now = p.next_tick_at(agent.state)
    agent.feed(p.Ticked())
    assert agent.kinds() == ["StartPersist"]
    agent.feed(p.PersistFailed(slab=slab, error="disk full"))
    return agent, slab


@pytest.mark.parametrize(("idle_s", "pause_s"), [(600.0, 600.0), (1.0, 60.0)])
def test_idle_end_waits_for_the_disk(idle_s, pause_s):
    """F54: an idle agent keeps a snapshot that cannot be persisted and tries again each ``idle_s``, at least 60 s apart; then it ends."""
    agent, slab = idle_with_a_broken_disk(idle_s)
    for number in range(1, 4):
        assert agent.state.phase is p.Phase.DRAINING
        assert agent.steps() == [1]
        assert p.next_tick_at(agent.state) == pytest.approx(idle_s + number * pause_s)
        agent.feed(p.Ticked())
        assert agent.actions == ()  # not yet
        agent.now = p.next_tick_at(agent.state)
        agent.feed(p.Ticked())
        assert agent.kinds() == ["StartPersist"]
        if number < 3:
            agent.feed(p.PersistFailed(slab=slab, error="disk full"))
    agent.feed(p.PersistFinished(slab=slab))
    assert agent.one(p.Exit) == p.Exit("idle")


def test_idle_end_gives_up_after_a_day():
    """After 24 hours of tries the idle agent ends, and says what is lost and why; not before."""
    agent, slab = idle_with_a_broken_disk(7 * 3600.0)
    while agent.state.phase is not p.Phase.ENDED:
        agent.now = p.next_tick_at(agent.state)
        agent.feed(p.Ticked())
        agent.feed(p.PersistFailed(slab=slab, error="disk full"))
    assert agent.now == (7 + 24) * 3600.0
    ended = agent.one(p.Exit)
    assert ended.reason == "idle"
    assert ended.lost == "step 1 of attempt 1 is lost: it could not be persisted within 24 h after the last trainer's end: disk full"


def test_idle_retries_are_called_off_by_a_trainer():
    """A trainer that comes while the idle agent keeps trying finds the snapshot, and no try is due any more."""
    agent, _ = idle_with_a_broken_disk(600.0)
    agent.trainer(OTHER, attempt=2)
    assert agent.state.phase is p.Phase.SERVING
    assert agent.steps() == [1]
    assert p.next_tick_at(agent.state) is None


def test_idle_end_does_not_wait_for_a_beaten_attempt():
    """A snapshot whose attempt has met a higher one can never be committed: the idle agent ends without a wait."""
    agent = Agent(idle_s=600.0)
    agent.trainer()
    slab = agent.save(1, bound=True)
    agent.feed(p.PersistFailed(slab=slab, error="attempt 2 exists", conflict=True))
    agent.feed(p.ConnectionClosed(conn=TRAINER))
    agent.now = p.next_tick_at(agent.state)
    agent.feed(p.Ticked())
    assert agent.one(p.Exit) == p.Exit("idle")


def test_agent_of_its_own_stays():
    """An agent that is never idle (a unit of its own) outlives the last trainer's bye."""
    agent = Agent(idle_s=float("inf"))
    agent.trainer()
    agent.feed(p.ByeSaid(conn=TRAINER, request=8))
    agent.feed(p.ConnectionClosed(conn=TRAINER))
    assert agent.state.phase is p.Phase.SERVING
    assert p.next_tick_at(agent.state) == float("inf")


def test_idle_end_is_called_off_by_a_trainer():
    """A trainer that comes back while the idle agent drains keeps it alive."""
    agent = Agent(idle_s=1.0)
    agent.trainer()
    slab = agent.save(1)
    agent.feed(p.ConnectionClosed(conn=TRAINER))
    agent.now = 5.0
    agent.feed(p.Ticked())
    assert agent.state.phase is p.Phase.DRAINING
    agent.feed(p.Connected(conn=OTHER, request=1, role="trainer", pid=8))
    agent.feed(p.PersistFinished(slab=slab))
    assert agent.state.phase is p.Phase.SERVING


def test_signal_waits_for_trainer_and_drain():
    """F53: SIGTERM persists the newest, lets a trainer make its last save, and ends when it has gone; the deadline ends it in any case."""
    agent = Agent()
    agent.trainer()
    first = agent.save(1)
    agent.feed(p.Signalled(grace_s=100.0))
    assert agent.kinds() == ["StartPersist"]
    agent.feed(p.PersistFinished(slab=first))
    assert agent.state.phase is p.Phase.DRAINING
    assert agent.save(2, bound=True) is not None
    agent.now = 100.0
    agent.feed(p.Ticked())
    assert "Exit" in agent.kinds()


def test_second_signal_does_not_wait_for_trainers():
    """A second signal ends a drained agent although a trainer is connected."""
    agent = Agent()
    agent.trainer()
    agent.feed(p.Signalled(grace_s=100.0))
    assert agent.actions == ()
    agent.feed(p.Signalled(grace_s=100.0))
    assert agent.kinds() == ["Exit"]


def test_stop_refuses_to_lose_a_snapshot():
    """A stop that cannot make the newest durable fails and the agent lives on; with force it ends at once."""
    agent = Agent()
    agent.trainer()
    slab = agent.save(1)
    agent.feed(p.Connected(conn=VISITOR, request=1, role="visitor", pid=7))
    agent.feed(p.StopAsked(conn=VISITOR, request=2))
    agent.feed(p.PersistFailed(slab=slab, error="disk full"))
    assert agent.one(p.Fail).kind == "not-durable"
    assert agent.state.phase is p.Phase.SERVING
    agent.feed(p.StopAsked(conn=VISITOR, request=3, force=True))
    assert agent.kinds() == ["Accept", "Exit"]
    agent.feed(p.LeaseAsked(conn=TRAINER, request=4, plan_id="a", nbytes=100, step=9, room=BIG))
    assert agent.one(p.Fail).kind == "ending"


def test_capacity_is_refused_with_numbers():
    """F30: not even one slab fits: the numbers are in the error; a budget counts like a limit."""
    agent = Agent()
    agent.trainer()
    agent.feed(p.PlanAnnounced(conn=TRAINER, request=5, plan_id="a", nbytes=1000, room=999, limits="control group limit 5,000"))
    failed = agent.one(p.Fail)
    assert failed.name == "CapacityError"
    assert "1,000" in failed.message
    assert "999" in failed.message
    assert "control group limit 5,000" in failed.message
    agent = Agent()
    agent.trainer(budget=500)
    agent.feed(p.PlanAnnounced(conn=TRAINER, request=5, plan_id="a", nbytes=1000, room=BIG))
    assert "memory_budget 500" in agent.one(p.Fail).message


def test_one_slab_is_enough_with_a_warning():
    """F30: room for one of three slabs: a note, no second slab; saves are skipped while it is busy, and go by way of the disk."""
    agent = Agent()
    agent.trainer()
    agent.feed(p.PlanAnnounced(conn=TRAINER, request=5, plan_id="a", nbytes=100, room=150))
    assert agent.one(p.Accept).note.startswith("only 1 of 3 slabs")
    slab = agent.save(1, bound=True, room=50)
    assert agent.lease(2, room=50) is None
    assert agent.one(p.Refuse).kind == "memory"
    agent.feed(p.PersistFinished(slab=slab))
    assert agent.lease(2, room=50) == slab
    assert agent.kinds() == ["Grant"]
    assert agent.steps() == []


def test_one_slab_does_not_get_stuck():
    """With one slab and no disk cadence, a save that finds an unpersisted snapshot in it is skipped and has that one persisted, so that others can follow."""
    agent = Agent()
    agent.trainer(idle=False, budget=150)
    slab = agent.save(1)
    assert agent.lease(2) is None
    assert agent.kinds() == ["Refuse", "StartPersist"]
    agent.feed(p.PersistFinished(slab=slab))
    assert agent.lease(3) == slab


def test_slabs_of_an_old_layout_make_room():
    """FREE slabs of another layout are freed before a new one is allocated past the budget; a durable one too when there is no other way."""
    agent = Agent()
    agent.trainer(budget=300)
    first = agent.save(1, bound=True)
    agent.save(2, bound=True)
    agent.feed(p.PersistFinished(slab=first))
    agent.feed(p.PersistFinished(slab=2))
    assert agent.lease(3, plan="b", nbytes=250) is not None
    assert agent.kinds() == ["FreeSlab", "FreeSlab", "FreeSlab", "Allocate", "Grant"]
    assert sum(s.nbytes for s in agent.state.slabs.values()) <= 300


def test_undurable_snapshot_of_an_old_layout_stays():
    """A sealed snapshot that is not on disk is never freed to make room."""
    agent = Agent()
    agent.trainer(budget=300)
    agent.save(1)
    assert agent.lease(3, plan="b", nbytes=250) is None
    assert agent.steps() == [1]


def test_failed_allocation_is_forgotten():
    """A slab that could not be made is gone, and the next lease tries anew."""
    agent = Agent()
    agent.trainer()
    slab = agent.lease(1)
    agent.feed(p.AllocationFailed(slab=slab))
    assert slab not in agent.state.slabs
    assert agent.lease(1) not in (None, slab)


@pytest.mark.parametrize("event", [p.Sealed(conn=OTHER, request=1, slab=1, step=1, attempt=1, bound=True), p.GivenBack(conn=OTHER, request=1, slab=1),
                                   p.Sealed(conn=TRAINER, request=1, slab=99, step=1, attempt=1, bound=True)])  # fmt: skip
def test_stranger_cannot_seal_or_give_back(event):
    """Only who leased a slab seals it or gives it back; a slab that is not there is an error."""
    agent = Agent()
    agent.trainer()
    agent.feed(p.Connected(conn=OTHER, request=1, role="trainer", pid=8))
    agent.lease(1)
    agent.feed(event)
    assert agent.one(p.Fail).name == "AgentError"
    assert agent.state.slabs[1].state is p.SlabState.FILLING


def test_who_says_no_hello_is_refused():
    """An event of an unknown connection is refused."""
    agent = Agent()
    agent.feed(p.DrainAsked(conn=5, request=1, timeout_s=1.0))
    assert agent.one(p.Fail).kind == "protocol"


class Team(Agent):
    """Several ranks of one node; connection 10 + rank."""

    def __init__(self, ranks=2, nodes=1, **state):
        super().__init__(**state)
        self.ranks, self.nodes = tuple(range(ranks)), nodes
        for rank in self.ranks:
            self.feed(p.Connected(conn=10 + rank, request=1, role="trainer", pid=1000 + rank))
            self.configure(rank)
            assert self.kinds() == ["Accept"]

    def configure(self, rank, *, attempt=1, job="job", **more):
        self.feed(p.Configured(conn=10 + rank, request=2, attempt=attempt, newest_attempt=0, persist_when_idle=True, budget=None,
                               idle_s=self.state.idle_s, job=job, rank=rank, ranks=self.ranks, nodes=self.nodes, **more))  # fmt: skip

    def ask(self, rank, step, **more):
        return self.lease(step, conn=10 + rank, **more)

    def seal(self, rank, slab, step, *, bound=False, must=False, attempt=1):
        self.feed(p.Sealed(conn=10 + rank, request=step, slab=slab, step=step, attempt=attempt, bound=bound, must=must, room=BIG,
                           payload=f"step {step}"))  # fmt: skip

    def save_all(self, step, **how):
        for slab in [self.ask(rank, step) for rank in self.ranks]:
            assert slab is not None
        for rank in self.ranks:
            self.seal(rank, slab, step, **how)
        return slab

    def complete(self, step, *, persist=False):
        self.feed(p.Completed(step=step, attempt=1, persist=persist))

    def told(self, what):
        return [(action.step, action.conns, action.error) for action in self.actions if isinstance(action, p.Notify) and action.what == what]

    def nodes_told(self):
        return [(action.what, action.step) for action in self.actions if isinstance(action, p.TellNodes)]


def test_ranks_join_one_slab_and_it_seals_with_the_last():
    """The second rank gets the first one's slab; a snapshot it is, and told to both, when both have sealed."""
    team = Team()
    slab = team.ask(0, 1)
    assert team.ask(1, 1) == slab
    assert team.one(p.Grant).headers_written
    team.seal(0, slab, 1)
    assert team.kinds() == ["Accept"]
    assert team.steps() == []
    team.seal(1, slab, 1)
    assert team.steps() == [1]
    assert team.told("complete") == [(1, (10, 11), "")]
    assert team.one(p.StartPersist).payload == "step 1"
    team.feed(p.PersistFinished(slab=slab))
    assert team.told("committed") == [(1, (10, 11), "")]


def test_what_one_rank_asks_for_holds_for_all():
    """Bound and must of any rank are the snapshot's."""
    team = Team()
    slab = team.ask(0, 1)
    team.ask(1, 1)
    team.seal(0, slab, 1, must=True)
    team.seal(1, slab, 1)
    assert (team.state.slabs[slab].bound, team.state.slabs[slab].must) == (True, True)


def test_refusal_is_remembered_for_the_other_ranks():
    """All ranks are refused a step that one was refused, also when a slab is free by then; asking again begins a new round."""
    team = Team(max_slabs=2)
    held = team.save_all(1, must=True)
    team.save_all(2, must=True)
    assert team.ask(0, 3) is None
    reason = team.one(p.Refuse).reason
    team.feed(p.PersistFinished(slab=held))
    assert team.ask(1, 3) is None
    assert team.one(p.Refuse).reason == reason
    slab = team.ask(1, 3)
    assert slab is not None
    assert team.ask(0, 3) == slab


def test_rank_that_leases_a_later_step_gives_up_the_earlier():
    """F31: a rank whose save failed before it sealed has given the step up when it asks for the next; the others are told, now or when they seal."""
    for joined in (True, False):
        team = Team(3)
        slab = team.ask(0, 1)
        team.ask(1, 1)
        if joined:
            team.ask(2, 1)
        team.seal(0, slab, 1)
        later = team.ask(2, 2)
        assert team.told("failed") == [(1, (10,), "step 1 is not saved: rank 2 did not save it")]
        team.seal(1, slab, 1)
        assert team.told("failed")[0][1] == (11,)
        assert team.state.slabs[slab].state is p.SlabState.FREE
        assert later != slab
        assert team.steps() == []


def test_rank_two_steps_ahead_is_refused():
    """A rank may be one step ahead of another one of its node; for the next it is refused at once, and so are the others."""
    team = Team(max_slabs=4)
    first = team.ask(0, 1)
    team.ask(1, 1)
    team.seal(0, first, 1)
    second = team.ask(0, 2)
    team.seal(0, second, 2)
    assert team.ask(0, 3) is None
    assert "rank 1 of this node has not finished step 1" in team.one(p.Refuse).reason
    team.seal(1, first, 1)
    assert team.ask(1, 2) == second
    team.seal(1, second, 2)
    assert team.ask(1, 3) is None
    assert team.state.newest().step == 2
    assert team.save_all(4) is not None


def test_ranks_with_different_plans_save_nothing():
    """A rank that leases the same step for other tensors breaks it, with the reason."""
    team = Team()
    slab = team.ask(0, 1)
    assert team.ask(1, 1, plan="b") is None
    assert "rank 1 saves other tensors than rank 0" in team.one(p.Refuse).reason
    team.seal(0, slab, 1)
    assert "other tensors" in team.told("failed")[0][2]


def test_lost_rank_breaks_what_it_has_not_sealed():
    """F36: a rank dies while it holds a share, or before it has one: the slab is free when the others have sealed theirs."""
    for joined in (True, False):
        team = Team()
        slab = team.ask(0, 1)
        if joined:
            team.ask(1, 1)
        team.feed(p.ConnectionClosed(conn=11))
        assert team.state.slabs[slab].state is p.SlabState.FILLING
        team.seal(0, slab, 1)
        assert team.told("failed") == [(1, (10,), "step 1 is not saved: rank 1 was lost")]
        assert team.state.slabs[slab].state is p.SlabState.FREE


def test_job_goes_on_to_its_next_attempt_rank_by_rank():
    """The ranks of one job name a new attempt one after the other; a process of no job, or of another one, is refused meanwhile."""
    team = Team()
    team.configure(0, attempt=2, job="next")
    assert team.kinds() == ["Accept"]
    team.feed(p.Connected(conn=20, request=1, role="trainer", pid=7))
    for job in ("", "other"):
        team.feed(p.Configured(conn=20, request=3, attempt=3, newest_attempt=2, persist_when_idle=False, budget=None, idle_s=9.0, job=job,
                               rank=5, ranks=(5,)))  # fmt: skip
        assert team.one(p.Fail).kind == "two-trainers"
    team.configure(1, attempt=2, job="next")
    assert team.kinds() == ["Accept"]


def test_agent_ends_with_the_bye_of_the_last_rank():
    """One rank's goodbye ends nothing; the last one's does, once all is on disk."""
    team = Team()
    slab = team.save_all(1)
    team.feed(p.PersistFinished(slab=slab))
    team.feed(p.ByeSaid(conn=10, request=1))
    assert not team.one(p.Accept).ending
    team.feed(p.ConnectionClosed(conn=10))
    team.feed(p.ByeSaid(conn=11, request=1))
    assert team.one(p.Accept).ending
    team.feed(p.ConnectionClosed(conn=11))
    assert team.one(p.Exit).reason == "the last trainer has ended"


def test_on_several_nodes_only_complete_snapshots_count():
    """What this node alone has sealed is not persisted, nor does it supersede; it may be read, by who knows that the others have it too."""
    team = Team(nodes=2)
    first = team.save_all(1)
    assert team.nodes_told() == [("sealed", 1)]
    team.complete(1)
    assert team.told("complete") == [(1, (10, 11), "")]
    second = team.save_all(2)
    assert team.state.newest().step == 1
    assert team.state.persisting() is None
    team.feed(p.SnapshotAsked(conn=10, request=5, slab=second))
    assert team.one(p.GiveSnapshot).slab == second
    team.feed(p.SnapshotReleased(conn=10, slab=second))
    team.complete(2, persist=True)
    assert team.told("superseded")[0][0] == 1
    assert team.state.slabs[first].state is p.SlabState.FREE
    assert team.one(p.StartPersist).payload == "step 2"


def test_bound_snapshot_that_is_never_complete_fails_with_the_node_named():
    """A bound one fails when the lead says who has not saved it, or when a newer one is complete; an unbound one is superseded."""
    team = Team(nodes=2, max_slabs=4)
    team.save_all(1, must=True)
    team.feed(p.StepLost(step=1, attempt=1, reason="node 1: rank 3 gave it up"))
    assert team.told("failed") == [(1, (10, 11), "step 1 is not saved: node 1: rank 3 gave it up")]
    team.save_all(2, bound=True)
    team.save_all(3)
    team.save_all(4)
    team.complete(4)
    assert [step for step, _, _ in team.told("failed")] == [2]
    assert [step for step, _, _ in team.told("superseded")] == [3]
    assert team.steps() == [4]


def test_drain_waits_for_the_other_nodes_but_not_for_ever():
    """A drain has the newest sealed step persisted by all once it is complete; if it never is, the one before it, after a while."""
    for comes in (True, False):
        team = Team(nodes=2)
        team.save_all(1)
        team.complete(1)
        team.save_all(2)
        team.feed(p.DrainAsked(conn=10, request=7, timeout_s=500.0))
        assert team.nodes_told() == [("wanted", 2)]
        assert team.kinds() == ["TellNodes"]
        if comes:
            team.complete(2)
        else:
            team.now = p.next_tick_at(team.state)
            assert team.now == p.COMPLETE_S
            team.feed(p.Ticked())
            assert "the other nodes had not sealed it" in team.told("failed")[0][2]
        assert ("wanted", 2 if comes else 1) in team.nodes_told()
        persisted = team.one(p.StartPersist)
        assert persisted.payload == f"step {2 if comes else 1}"
        team.feed(p.PersistFinished(slab=persisted.slab))
        assert team.one(p.AnswerDrain).complete


def test_doomed_snapshot_is_not_tried_again():
    """What was given up in the store is not persisted by a drain; an idle end says that it is lost."""
    team = Team(nodes=2, idle_s=10.0)
    slab = team.save_all(1, bound=True)
    team.complete(1)
    team.feed(p.PersistFailed(slab=slab, error="node 1: disk full", doomed=True))
    team.feed(p.DrainAsked(conn=10, request=7, timeout_s=5.0))
    drained = team.one(p.AnswerDrain)
    assert (drained.complete, drained.error) == (False, "node 1: disk full")
    for conn in (10, 11):
        team.feed(p.ConnectionClosed(conn=conn))
    team.now = 10.0
    team.feed(p.Ticked())
    assert "step 1 of attempt 1 is lost" in team.one(p.Exit).lost


def test_bound_steps_of_several_nodes_are_persisted_one_and_all():
    """A later bound step supersedes no bound one where there are other nodes: they might be writing it, and wait for this node's part."""
    team = Team(nodes=2, max_slabs=4)
    slabs = []
    for step in (1, 2, 3):
        slabs.append(team.save_all(step, bound=True))
        assert team.nodes_told() == [("wanted", step), ("sealed", step)]
        team.complete(step)
    assert team.told("superseded") == []
    for step, slab in enumerate(slabs, 1):
        assert team.state.persisting().step == step
        team.feed(p.PersistFinished(slab=slab))
    assert team.steps() == [3]


def test_incomplete_steps_of_an_attempt_that_is_over_go_away():
    """When the ranks have all gone on to another attempt, what the old one left incomplete gives its slab back."""
    team = Team(nodes=2)
    slab = team.save_all(1)
    team.configure(0, attempt=2)
    assert team.steps() == [1]
    team.configure(1, attempt=2, max_slabs=4)
    assert team.state.slabs[slab].state is p.SlabState.FREE
    assert team.state.max_slabs == 4


def test_skipped_step_is_told_when_nobody_asks_again():
    """A refusal is told to the other nodes once a rank asks for a later step, or says goodbye; a step that is got after all is not."""
    team = Team(nodes=2, ranks=1)
    for step in (1, 2, 3):
        team.save_all(step)
    assert team.ask(0, 4) is None
    assert team.nodes_told() == []
    team.complete(3)
    assert team.ask(0, 4) is not None
    assert team.nodes_told() == []
    team.seal(0, team.one(p.Grant).slab, 4)
    team.save_all(5)
    assert team.ask(0, 6) is None
    assert team.ask(0, 7) is None
    assert team.nodes_told() == [("lost", 6)]
    team.feed(p.ByeSaid(conn=10, request=1))
    assert team.nodes_told() == [("lost", 7)]


def test_drain_waits_for_the_rank_that_is_still_sealing():
    """One rank drains while another one copies the same step: that step is what reaches the disk, and not the one before."""
    team = Team(nodes=2)
    team.save_all(1)
    team.complete(1)
    slab = team.ask(0, 2)
    team.ask(1, 2)
    team.seal(0, slab, 2)
    team.feed(p.DrainAsked(conn=10, request=7, timeout_s=500.0))
    assert team.kinds() == []
    team.seal(1, slab, 2)
    team.complete(2)
    assert team.one(p.StartPersist).payload == "step 2"
    team.feed(p.PersistFinished(slab=slab))
    assert team.one(p.AnswerDrain).newest_durable_step == 2
    later = team.ask(0, 3)
    team.ask(1, 3)
    team.seal(0, later, 3)
    team.feed(p.DrainAsked(conn=10, request=8, timeout_s=500.0))
    team.feed(p.GivenBack(conn=11, request=9, slab=later))
    assert team.one(p.AnswerDrain).complete


def test_agent_whose_rank_was_lost_stays_for_who_wants_its_memory():
    """One rank is killed, the others say goodbye: the agent does not end with them, but when it has been idle."""
    team = Team(idle_s=50.0)
    slab = team.save_all(1)
    team.feed(p.PersistFinished(slab=slab))
    team.feed(p.ConnectionClosed(conn=11))
    team.feed(p.ByeSaid(conn=10, request=1))
    assert not team.one(p.Accept).ending
    team.feed(p.ConnectionClosed(conn=10))
    assert team.state.phase is p.Phase.SERVING
    team.now = 50.0
    team.feed(p.Ticked())
    assert team.one(p.Exit).reason == "idle"


def test_step_that_another_node_lost_before_it_is_sealed_here():
    """The lead's word that a step is lost comes while it is still being filled: sealed, it is given up at once."""
    team = Team(nodes=2)
    slab = team.ask(0, 1)
    team.ask(1, 1)
    team.feed(p.StepLost(step=1, attempt=1, reason="node 1: busy"))
    team.seal(0, slab, 1)
    team.seal(1, slab, 1)
    assert team.told("failed") == [(1, (10, 11), "step 1 is not saved: node 1: busy")]
    assert team.state.slabs[slab].state is p.SlabState.FREE


def keep(team, *steps, attempt=1):
    team.feed(p.KeepAsked(keys=frozenset((attempt, step) for step in steps)))


def full_team():
    """Another node copies step 2, step 1 is copied, step 3 is the newest complete one."""
    team = Team(nodes=2, max_slabs=p.MAX_SLABS + p.KEPT_SLABS)
    for step in (1, 2, 3):
        team.save_all(step)
        keep(team, *range(1, min(step, 2) + 1))
        team.complete(step)
    assert team.steps() == [1, 2, 3]
    return team


def test_what_other_nodes_copy_is_kept():
    """A kept step is superseded to its trainers when a newer one is complete, stays listed and readable, is not persisted, and goes when another is kept."""
    team = Team(nodes=2, max_slabs=5)
    first = team.save_all(1)
    keep(team, 1)
    team.complete(1)
    for step in (2, 3, 4):
        team.save_all(step)
        team.complete(step)
        assert [told for told, _, _ in team.told("superseded")] == [step - 1]
        assert team.steps() == [1, step]
    team.feed(p.DrainAsked(conn=10, request=7, timeout_s=500.0))
    assert team.one(p.StartPersist).payload == "step 4"
    team.feed(p.SnapshotAsked(conn=10, request=5, slab=first))
    assert team.one(p.GiveSnapshot).payload == "step 1"
    keep(team, 4)
    assert team.steps() == [4]
    assert team.state.slabs[first].state is p.SlabState.SEALED, "it is read"
    team.feed(p.SnapshotReleased(conn=10, slab=first))
    assert team.state.slabs[first].state is p.SlabState.FREE


def test_kept_step_that_is_persisted_is_durable_before_it_goes():
    """A kept step that all nodes persist is not dropped before that is done; having been kept it then goes at once."""
    for kept_until_then in (True, False):
        team = Team(nodes=2, max_slabs=5)
        first = team.save_all(1)
        keep(team, 1)
        team.complete(1)
        team.save_all(2)
        team.complete(2)
        team.complete(1, persist=True)
        assert team.one(p.StartPersist).slab == first
        if not kept_until_then:
            keep(team, 2)
        team.feed(p.PersistFinished(slab=first))
        assert team.told("committed")[0][0] == 1
        assert team.steps() == ([1, 2] if kept_until_then else [2])


def test_copying_gives_way_to_a_save_without_memory():
    """A save that would find memory if nothing were kept gets it: first of what is not copied yet, then of what is; not what is being read."""
    team = full_team()
    slabs = {slab.step: slab.id for slab in team.state.slabs.values() if p.is_snapshot(slab)}
    for slab in [slab for slab in team.state.slabs.values() if slab.state is p.SlabState.FREE]:
        del team.state.slabs[slab.id]
    team.feed(p.SnapshotAsked(conn=10, request=5, slab=slabs[2]))
    assert team.ask(0, 4, room=0) is not None
    assert team.nodes_told() == [("let go", 1)]
    assert team.steps() == [2, 3]
    team = full_team()
    for slab in [slab for slab in team.state.slabs.values() if slab.state is p.SlabState.FREE]:
        del team.state.slabs[slab.id]
    assert team.ask(0, 4, room=0) is not None
    assert team.nodes_told() == [("let go", 2)]
    assert team.steps() == [1, 3]


def test_copying_does_not_give_way_to_steps_that_other_nodes_never_seal():
    """Another node is gone: what is sealed here alone fills three slabs and then waits; what a restore needs stays, also where memory is little."""
    for room in (BIG, 0):
        team = full_team()
        step = 4
        while len(team.state.slabs) < 5 or any(slab.state is p.SlabState.FREE for slab in team.state.slabs.values()):
            team.save_all(step)
            step += 1
        for more in range(step, step + 4):
            assert team.ask(0, more, room=room) is None
            team.ask(1, more, room=room)
            assert team.one(p.Refuse).kind == "busy"
        assert {1, 2, 3} < set(team.steps())


def test_kept_steps_of_another_layout_stay():
    """A lease for another layout frees what is durable and not kept."""
    team = full_team()
    for slab in list(team.state.slabs.values()):
        if slab.state is p.SlabState.SEALED:
            team.state.slabs[slab.id] = dataclasses.replace(slab, durable=True)
    assert team.ask(0, 4, plan="b", nbytes=200, room=0) is not None, "of the free slab and of step 3"
    assert team.steps() == [1, 2]


def test_a_job_that_goes_on_alone_keeps_nothing_for_copies():
    """Its first complete step frees what was kept for other nodes."""
    team = full_team()
    for rank in team.ranks:
        team.feed(p.ConnectionClosed(conn=10 + rank))
    team.feed(p.Connected(conn=30, request=1, role="trainer", pid=7))
    team.feed(p.Configured(conn=30, request=2, attempt=2, newest_attempt=1, persist_when_idle=False, budget=None, idle_s=9.0))
    assert team.steps() == [1, 2, 3]
    slab = team.lease(4, conn=30)
    team.feed(p.Sealed(conn=30, request=4, slab=slab, step=4, attempt=2, bound=False, room=BIG, payload="step 4"))
    assert 1 not in team.steps()
    assert 2 not in team.steps()


def test_too_few_slabs_for_copies_are_told_at_the_plan():
    """Memory for three or four slabs, where copies want five: saves go on, and the note says what gives way."""
    team = Team(nodes=2, max_slabs=5)
    team.feed(p.PlanAnnounced(conn=10, request=3, plan_id="a", nbytes=100, room=400))
    assert "only 4 of 5 slabs" in team.one(p.Accept).note
    assert "gives way to saves" in team.one(p.Accept).note
