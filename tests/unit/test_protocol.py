from __future__ import annotations

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
        assert agent.one(p.Notify) == p.Notify(TRAINER, second, "committed", 2, 1, "step 2")
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
            assert agent.one(p.Notify) == p.Notify(TRAINER, agent.one(p.Notify).slab, "superseded", step - 1, 1, f"step {step - 1}")
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
