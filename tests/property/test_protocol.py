from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from everystep import protocol as p

BUDGETS = (None, 1000, 250, 150)
OPS = (
    "connect", "configure", "lease", "lease", "lease", "seal", "seal", "seal", "give back", "finish", "finish", "fail", "conflict",
    "take", "release", "lose", "bye", "visitor", "drain", "tick", "signal", "stop", "announce",
)  # fmt: skip
SCRIPTS = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 7)), max_size=60)


class Broken(AssertionError):
    """An invariant does not hold."""


def check(holds, what):
    if not holds:
        raise Broken(what)


class Driver:
    """Plays a script of events, as an agent's shell could see them, and checks the invariants after each."""

    def __init__(self, max_slabs):
        self.state = p.AgentState(max_slabs=max_slabs, idle_s=50.0)
        self.now = 0.0
        self.conns, self.readers, self.answered = [], [], set()
        self.next_conn, self.request, self.step, self.attempt = 1, 0, 0, 0

    def play(self, script):
        for op, number in script:
            if self.state.phase is p.Phase.ENDED:
                return
            getattr(self, op.replace(" ", "_"))(number)
        self.end()

    def feed(self, event):
        before = self.state
        self.state, actions = p.transition(before, event, now=self.now)
        self.compare(before, event, actions)
        return actions

    def of(self, *states):
        return [s for s in self.state.slabs.values() if s.state in states]

    def pick(self, items, number):
        return items[number % len(items)] if items else None

    def asked(self):
        self.request += 1
        return self.request

    # -- events
    def connect(self, number):
        self.conns.append(self.next_conn)
        self.feed(p.Connected(conn=self.next_conn, request=self.asked(), role="trainer", pid=self.next_conn))
        self.next_conn += 1
        self.configure(number)

    def visitor(self, _):
        self.conns.append(self.next_conn)
        self.feed(p.Connected(conn=self.next_conn, request=self.asked(), role="visitor", pid=self.next_conn))
        self.next_conn += 1

    def configure(self, number):
        conn = self.pick(self.conns, -1)
        if conn is not None:
            self.attempt += 1
            self.feed(p.Configured(conn=conn, request=self.asked(), attempt=self.attempt, newest_attempt=self.attempt - 1,
                                   persist_when_idle=bool(number % 2), budget=BUDGETS[number // 2], idle_s=50.0))  # fmt: skip

    def announce(self, number):
        conn = self.pick(self.conns, number)
        if conn is not None:
            self.feed(p.PlanAnnounced(conn=conn, request=self.asked(), plan_id="ab"[number % 2], nbytes=(100, 240)[number % 2], room=700))

    def lease(self, number):
        conn = self.pick(self.conns, number)
        if conn is not None:
            self.step += 1
            self.feed(p.LeaseAsked(conn=conn, request=self.asked(), plan_id="ab"[number % 7 == 0], nbytes=(100, 240)[number % 7 == 0],
                                   step=self.step, room=700))  # fmt: skip

    def seal(self, number):
        slab = self.pick(self.of(p.SlabState.FILLING), number)
        if slab is not None:
            attempt = self.state.peers[slab.conns[0]].attempt
            self.feed(p.Sealed(conn=slab.conns[0], request=self.asked(), slab=slab.id, step=slab.step, attempt=attempt, bound=number % 3 == 0,
                               must=number in (1, 6), room=700))  # fmt: skip

    def give_back(self, number):
        slab = self.pick(self.of(p.SlabState.FILLING), number)
        if slab is not None:
            self.feed(p.GivenBack(conn=slab.conns[0], request=self.asked(), slab=slab.id))

    def finish(self, _):
        for slab in self.of(p.SlabState.PERSISTING)[:1]:
            self.feed(p.PersistFinished(slab=slab.id))

    def fail(self, _):
        for slab in self.of(p.SlabState.PERSISTING)[:1]:
            self.feed(p.PersistFailed(slab=slab.id, error="broken"))

    def conflict(self, number):
        for slab in self.of(p.SlabState.PERSISTING)[:1] if number == 0 else ():
            self.feed(p.PersistFailed(slab=slab.id, error="conflict", conflict=True))

    def take(self, number):
        conn, slab = self.pick(self.conns, number), self.pick(list(self.state.slabs), number)
        if conn is not None and slab is not None:
            self.feed(p.SnapshotAsked(conn=conn, request=self.asked(), slab=slab))

    def release(self, number):
        slab = self.pick([s for s in self.state.slabs.values() if s.readers], number)
        if slab is not None:
            self.feed(p.SnapshotReleased(conn=slab.readers[0], request=self.asked(), slab=slab.id))

    def lose(self, number):
        conn = self.pick(self.conns, number)
        if conn is not None:
            self.conns.remove(conn)
            self.feed(p.ConnectionClosed(conn=conn))

    def bye(self, number):
        conn = self.pick(self.conns, number)
        if conn is not None:
            self.feed(p.ByeSaid(conn=conn, request=self.asked()))
            self.lose(number)

    def drain(self, number):
        conn = self.pick(self.conns, number)
        if conn is not None:
            self.feed(p.DrainAsked(conn=conn, request=self.asked(), timeout_s=20.0, exit=number == 7))

    def tick(self, number):
        self.now += 3.0 * number if number < 7 else 9 * 3600.0
        self.feed(p.Ticked())
        at = p.next_tick_at(self.state)
        check(self.state.phase is p.Phase.ENDED or at is None or at > self.now, "the clock asks for what it has just been given")

    def signal(self, number):
        if number == 0:
            self.feed(p.Signalled(grace_s=100.0))

    def occupy(self, number):
        self.feed(p.Occupied(occupied=number % 3 > 0))

    def want(self, _):
        self.feed(p.NewestWanted())

    def stop(self, number):
        conn = self.pick(self.conns, number)
        if conn is not None and number < 2:
            self.feed(p.StopAsked(conn=conn, request=self.asked(), force=number == 0))

    def end(self):
        """Every connection is lost and the disk works: then the snapshot that a trainer sealed last becomes durable."""
        newest = self.state.newest()
        was_lost = newest is not None and newest.conns[0] in self.conns
        while self.conns and self.state.phase is not p.Phase.ENDED:
            self.lose(0)
        while self.of(p.SlabState.PERSISTING):
            self.finish(0)
        for slab in self.state.slabs.values():
            if self.state.phase is not p.Phase.ENDED and slab.must and slab.attempt > self.state.beaten_attempt:
                check(slab.durable or slab.failed, "one that must be is not on disk")
        newest = self.state.newest()
        if was_lost and newest.attempt > self.state.beaten_attempt:
            check(newest.durable, "the newest snapshot of a lost trainer is not on disk")

    # -- invariants
    def compare(self, before, event, actions):
        after = self.state
        for old in before.slabs.values():
            if p.is_snapshot(old):
                self.compare_snapshot(old, after, event)
        persisting = [s for s in after.slabs.values() if s.state is p.SlabState.PERSISTING]
        check(len(persisting) <= 1, "two persists at once")
        check(len(after.slabs) <= max(after.max_slabs, len(before.slabs)), "too many slabs")
        for slab in after.slabs.values():
            check(not slab.readers or slab.state in (p.SlabState.SEALED, p.SlabState.PERSISTING), "a slab is read that holds no snapshot")
        newest = before.newest()
        for action in actions:
            if isinstance(action, p.Grant):
                old = before.slabs.get(action.slab)
                joined = old is not None and old.state is p.SlabState.FILLING and len(old.ranks) > 1 and old.step == event.step
                check(not joined or event.conn not in old.conns, "a rank has the same slab twice")
                over = old is not None and len(old.ranks) * old.nodes > 1 and all(share.ended or share.conn == event.conn for share in old.shares)
                given_up = over and old.state is p.SlabState.FILLING and old.step < event.step
                if not joined and not given_up:
                    self.compare_grant(old, newest, alone=len(before.slabs) == 1)
            if isinstance(action, p.FreeSlab):
                old = before.slabs[action.slab]
                check(not old.readers and old.state in (p.SlabState.FREE, p.SlabState.SEALED), "memory freed under somebody")
            if isinstance(action, p.Allocate):
                check(after.budget is None or sum(s.nbytes for s in after.slabs.values()) <= after.budget, "past the budget")
            if isinstance(action, p.StartPersist):
                check(action.slab in [s.id for s in persisting], "persists what is not persisting")
            if isinstance(action, p.AnswerDrain) and action.complete:
                check(after.newest() is None or after.newest().durable, "drained, but the newest is not durable")
                check(not after.undrained(), "drained, but something is due")
            if isinstance(action, p.Exit) and action.reason in ("idle", "the last trainer has ended"):
                check(not after.occupied, "ends by itself while it is occupied")
            if isinstance(action, p.Exit) and action.reason in ("asked", "the last trainer has ended"):
                check(after.newest() is None or after.newest().durable, "ends before the newest is durable")
            if isinstance(action, p.Exit) and action.reason == "idle":
                kept = after.newest() is None or after.newest().durable or after.newest().attempt <= after.beaten_attempt
                check(kept != bool(action.lost), "an idle end loses the newest and does not say so")
                check(kept or self.now >= before.idle_since + before.idle_s + p.IDLE_GIVE_UP_S, "an idle end gives up too early")
            if getattr(action, "request", 0):
                check(action.request not in self.answered, "answered twice")
                self.answered.add(action.request)
        if after.phase is p.Phase.DRAINING and after.ending == "idle" and not after.undrained() and p.next_tick_at(after) is None:
            check(after.occupied or any(s.readers for s in after.slabs.values()), "an idle agent neither ends nor tries again")
        if persisting and not before.persisting():
            check(any(isinstance(a, p.StartPersist) for a in actions), "says that it persists and does not")

    def compare_snapshot(self, old, after, event):
        new = after.slabs.get(old.id)
        ends = isinstance(event, (p.PersistFinished, p.PersistFailed)) and event.slab == old.id
        if new is not None and new.order == old.order and p.is_snapshot(new):
            if old.bound and not new.bound:
                raise Broken("a bound snapshot is bound no more")
            check(new.must == old.must and (new.bound or not new.must), "what must be on disk is not bound to it")
            return
        check(old.state is not p.SlabState.PERSISTING or ends, "a slab that is being persisted is taken away")
        if not old.complete:
            given_up = not new or new.order != old.order or new.state is p.SlabState.FREE or (new.superseded and bool(new.readers))
            check(given_up, "an incomplete snapshot is in a strange state")
            return
        newer = [s for s in after.slabs.values() if p.is_complete(s) and s.order > old.order]
        settled = old.durable or old.failed or ends
        check(settled or newer, "a sealed snapshot is gone")
        check(settled or not old.must, "one that must be on disk gave way")
        check(settled or not old.bound or any(s.bound for s in newer), "a bound snapshot gave way to one that is not")
        check(old.durable or isinstance(event, p.PersistFinished) or newer, "the newest snapshot is gone and not on disk")

    def compare_grant(self, old, newest, *, alone):
        if old is not None:
            check(not old.readers, "a slab is leased that is read")
            if alone and old.state is p.SlabState.SEALED and old.durable:
                return  # there is memory for one slab only, and its snapshot is on disk
            check(old.state is p.SlabState.FREE, f"a slab is leased that is {old.state.value}")
            check(newest is None or newest.id != old.id, "the only snapshot is refilled")


@hypothesis.given(SCRIPTS, st.sampled_from([1, 2, 3]))
@hypothesis.settings(max_examples=max(300, hypothesis.settings.default.max_examples))
def test_invariants_hold(script, max_slabs):
    """Whatever happens in whatever order, nothing sealed is lost, nothing is refilled in use, drains tell the truth."""
    Driver(max_slabs).play(script)


@hypothesis.given(st.lists(st.tuples(st.sampled_from((*OPS, "occupy", "occupy", "want")), st.integers(0, 7)), max_size=60))
def test_invariants_hold_while_the_shell_has_work_of_its_own(script):
    """The same when the agent consolidates now and then and asks for the newest on disk: then it does not end by itself."""
    Driver(3).play(script)


CLUSTER_OPS = (
    "lease", "lease", "seal", "seal", "save", "save", "save", "save", "give back", "lose", "finish", "finish", "fail", "take", "release",
    "deliver", "deliver", "deliver", "drain", "tick",
)  # fmt: skip
CLUSTER_SCRIPTS = st.lists(
    st.tuples(st.sampled_from(CLUSTER_OPS), st.integers(0, 1), st.integers(0, 2), st.integers(0, 7)), max_size=100
)


class Rank:
    """A trainer's process: saves rising steps, one at a time."""

    def __init__(self, number):
        self.number = number
        self.conn = 0
        self.step = 0
        self.slab = None


class NodeDriver(Driver):
    """One node's agent and its ranks."""

    def __init__(self, cluster, number, ranks, max_slabs):
        super().__init__(max_slabs)
        self.cluster, self.number = cluster, number
        self.ranks = [Rank(number * ranks + at) for at in range(ranks)]
        self.sealed_by, self.round = {}, {}
        for rank in self.ranks:
            self.join(rank)

    def join(self, rank):
        rank.conn, rank.slab = self.next_conn, None
        self.next_conn += 1
        self.conns.append(rank.conn)
        self.feed(p.Connected(conn=rank.conn, request=self.asked(), role="trainer", pid=rank.conn))
        self.feed(p.Configured(
            conn=rank.conn, request=self.asked(), attempt=1, newest_attempt=1, persist_when_idle=True, budget=None, idle_s=50.0, job="job",
            rank=rank.number, ranks=tuple(one.number for one in self.ranks), nodes=self.cluster.nodes,
        ))  # fmt: skip
        check(self.state.peers[rank.conn].attempt == 1, "a rank of the job is refused")

    def feed(self, event):
        before = self.state
        actions = super().feed(event)
        for action in actions:
            if isinstance(action, p.TellNodes):
                self.cluster.hear(self.number, action)
        for slab in self.state.slabs.values():
            old = before.slabs.get(slab.id)
            if p.is_snapshot(slab) and (old is None or old.order != slab.order):
                check(self.sealed_by.get((slab.id, slab.step), set()) == {rank.number for rank in self.ranks}, "sealed before every rank has")
            if slab.state is p.SlabState.FILLING:
                steps = [s.step for s in self.state.slabs.values() if s.state is p.SlabState.FILLING and not s.broken]
                check(len(self.ranks) == 1 or len(steps) == len(set(steps)), "two slabs for one step")
            check(slab.state is not p.SlabState.PERSISTING or slab.complete, "persists what is not complete")
        return actions

    def ask(self, rank, step):
        """Lease; checks that it is the answer that the others got."""
        rank.step = max(rank.step, step)
        rank.slab = None
        broken_before = [number for number, refused in self.state.refused.items() if refused.kind == "rank"]
        actions = self.feed(p.LeaseAsked(conn=rank.conn, request=self.asked(), plan_id="a", nbytes=100, step=step, room=10_000))
        granted = next((action.slab for action in actions if isinstance(action, p.Grant)), None)
        told = self.round.setdefault(step, {})
        if rank.number in told:  # it asks again: a new round
            told.clear()
        if granted is None and any(told.values()):
            check(step in broken_before, "one rank is refused what another one has")
        if granted is not None:
            check(all(slab in (None, granted) for slab in told.values()), "two ranks have different slabs")
            check(all(told.values()), "one rank has what another one is refused")
            rank.slab = granted
            self.sealed_by.setdefault((granted, step), set())
            if not any(told.values()):
                self.sealed_by[granted, step] = set()
        told[rank.number] = granted
        return granted

    def seal_share(self, rank, *, bound=False, must=False):
        slab, rank.slab = rank.slab, None
        row = self.state.slabs[slab]
        check(row.state is p.SlabState.FILLING and row.step == rank.step, "a leased slab was taken away")
        self.sealed_by[slab, rank.step].add(rank.number)
        actions = self.feed(p.Sealed(conn=rank.conn, request=self.asked(), slab=slab, step=rank.step, attempt=1, bound=bound, must=must, room=10_000))
        check(any(isinstance(action, p.Accept) for action in actions), "a share is not accepted")
        if row.broken:
            check(any(isinstance(a, p.Notify) and a.what == "failed" and rank.conn in a.conns for a in actions), "nobody says that it failed")

    def act(self, op, rank, number):
        if op == "lease" and (rank.slab is None or number == 0):
            refused = self.round.get(rank.step, {}).get(rank.number, 0) is None
            self.ask(rank, rank.step + (0 if number < 3 and refused else 2 if number == 3 else 1))
        elif op == "seal" and rank.slab is not None:
            self.seal_share(rank, bound=number == 3, must=number == 4)
        elif op == "save":  # of the whole node, when all its ranks are at the same step
            step = max(one.step for one in self.ranks) + 1
            if all(one.slab is None for one in self.ranks) and None not in [self.ask(one, step) for one in self.ranks]:
                for one in self.ranks:
                    self.seal_share(one, bound=number == 3, must=number == 4)
        elif op == "give back" and rank.slab is not None:
            slab, rank.slab = rank.slab, None
            self.feed(p.GivenBack(conn=rank.conn, request=self.asked(), slab=slab, reason="torn"))
        elif op == "lose" and number < 2:
            self.conns.remove(rank.conn)
            self.feed(p.ConnectionClosed(conn=rank.conn))
            self.join(rank)
        elif op in ("finish", "fail"):
            getattr(self, op)(number)
        elif op in ("take", "release", "drain"):
            getattr(self, op)(number % 7)
        elif op == "tick":
            self.now += number / 2
            self.feed(p.Ticked())


class Cluster:
    """Nodes, and a lead that hears and tells in its own time."""

    def __init__(self, nodes, ranks, max_slabs):
        self.nodes = nodes
        self.sealed = [set() for _ in range(nodes)]
        self.lost, self.complete, self.outbox = set(), 0, [[] for _ in range(nodes)]
        self.wanted, self.completed = set(), set()
        self.drivers = []
        self.drivers += [NodeDriver(self, number, ranks, max_slabs) for number in range(nodes)]

    def hear(self, node, action):
        step = action.step
        if action.what == "sealed":
            self.sealed[node].add(step)
            for lower in sorted({low for there in self.sealed for low in there if self.complete < low < step} - self.sealed[node]):
                self.lose(lower)
            if step not in self.lost and all(step in there for there in self.sealed) and step > self.complete:
                self.complete = step
                self.completed.add(step)
                self.tell(p.Completed(step=step, attempt=1, persist=step in self.wanted))
        elif action.what == "lost" and step > self.complete:
            self.lose(step)
        elif action.what == "wanted" and step not in self.wanted:
            self.wanted.add(step)
            if step in self.completed:
                self.tell(p.Completed(step=step, attempt=1, persist=True))

    def lose(self, step):
        if step not in self.lost:
            self.lost.add(step)
            self.tell(p.StepLost(step=step, attempt=1, reason="another node has not saved it"))

    def tell(self, event):
        for outbox in self.outbox:
            outbox.append(event)

    def deliver(self, node):
        if self.outbox[node]:
            self.drivers[node].feed(self.outbox[node].pop(0))

    def play(self, script):
        for op, node, rank, number in script:
            driver = self.drivers[node % self.nodes]
            if op == "deliver":
                self.deliver(driver.number)
            else:
                driver.act(op, driver.ranks[rank % len(driver.ranks)], number)
        self.settle()
        self.end()

    def settle(self):
        while any(self.outbox):
            for node in range(self.nodes):
                self.deliver(node)
        for driver in self.drivers:
            if self.nodes > 1 and self.complete:
                held = [s.step for s in driver.state.slabs.values() if p.is_complete(s)]
                check(self.complete in held, "a node has lost the newest complete step")
            check(not any(s.step <= self.complete for s in driver.state.incomplete()), "a step that will never be complete stays")

    def end(self):
        """From wherever it is, a save of all ranks succeeds after at most some that are skipped, as the disk goes on."""
        step = max(rank.step for driver in self.drivers for rank in driver.ranks)
        for _ in range(8):
            step += 1
            slabs = [driver.ask(rank, step) for driver in self.drivers for rank in driver.ranks]
            if None not in slabs:
                break
            for driver in self.drivers:
                for rank in driver.ranks:
                    if rank.slab is not None:
                        driver.seal_share(rank)
                for slab in list(driver.state.slabs.values()):
                    for conn in slab.readers:
                        driver.feed(p.SnapshotReleased(conn=conn, slab=slab.id))
                driver.finish(0)
            self.settle()
        else:
            raise Broken("no step can be saved any more")
        for driver in self.drivers:
            for rank in driver.ranks:
                driver.seal_share(rank)
        self.settle()
        for driver in self.drivers:
            newest = driver.state.newest()
            check(newest is not None and newest.step == step, "a step that all have sealed is not the newest")


@hypothesis.given(CLUSTER_SCRIPTS, st.sampled_from([(1, 2), (1, 3), (2, 1), (2, 2)]), st.sampled_from([3, 4]))
@hypothesis.settings(max_examples=max(300, hypothesis.settings.default.max_examples))
def test_invariants_hold_for_ranks_and_nodes(script, shape, max_slabs):
    """However the ranks of the nodes and the lead's messages interleave: all or nothing for a step, and saving never gets stuck."""
    Cluster(*shape, max_slabs).play(script)


def release_at_once(self, slab):
    self.empty(slab)


def bind_nothing(self):
    return None


def nothing_persists(self):
    return None


def always_release(d, e, slab):
    d.notify(slab, "failed")
    d.empty(slab)


def supersede_bound(d, e, slab):
    for other in list(d.state.slabs.values()):
        if other.state is p.SlabState.SEALED and other.bound:
            d.change(other, bound=False)
    REAL_SEALED(d, e, slab)


def supersede_must(d, e, slab):
    for other in list(d.state.slabs.values()):
        if other.state is p.SlabState.SEALED and other.must:
            d.change(other, must=False, bound=False)
            d.release(d.state.slabs[other.id])
    REAL_SEALED(d, e, slab)


def lease_newest(self, plan_id, nbytes):
    """As the design's first draft would have it: the only sealed slab is refilled while another persists."""
    found = REAL_SUITED(self, plan_id, nbytes)
    newest = self.state.newest()
    if found is None and newest is not None and newest.state is p.SlabState.SEALED and not newest.readers:
        found = self.empty(newest)
    return found


def refill_undurable(self, nbytes):
    slab = next(iter(self.state.slabs.values()), None)
    if len(self.state.slabs) == 1 and slab.state is p.SlabState.SEALED and not slab.readers and slab.nbytes >= nbytes:
        return self.empty(slab)
    return None


REAL_SEALED, REAL_SUITED = p._sealed, p._Draft.suited
MUTANTS = {
    "refilled while held": ("_Draft", "release", release_at_once),
    "lost newest is not bound": ("_Draft", "bind_newest", bind_nothing),
    "two persists": ("AgentState", "persisting", nothing_persists),
    "failure drops the snapshot": ((p.SlabState.PERSISTING, p.PersistFailed), None, always_release),
    "bound is superseded by any": ((p.SlabState.FILLING, p.Sealed), None, supersede_bound),
    "must is superseded by any": ((p.SlabState.FILLING, p.Sealed), None, supersede_must),
    "the only sealed slab is refilled": ("_Draft", "suited", lease_newest),
    "the only slab is refilled before it is on disk": ("_Draft", "only_one", refill_undurable),
}


SAVES = st.lists(st.tuples(st.sampled_from(["plain", "bound", "must"]), st.booleans()), min_size=1, max_size=30)


@hypothesis.given(SAVES, st.sampled_from([1, 2, 3]), st.booleans())
def test_saves_that_wait_for_a_slab_get_one(saves, max_slabs, idle):
    """However many must reach the disk, a lease that is refused finds a persist under way, and gets its slab after at most two more."""
    state, _ = p.transition(p.AgentState(max_slabs=max_slabs), p.Connected(conn=1, role="trainer", pid=1), now=0.0)
    state, _ = p.transition(
        state, p.Configured(conn=1, attempt=1, newest_attempt=0, persist_when_idle=idle, budget=None, idle_s=50.0), now=0.0
    )
    told = {}

    def feed(event):
        nonlocal state
        state, actions = p.transition(state, event, now=0.0)
        told.update((action.step, action.what) for action in actions if isinstance(action, p.Notify))
        return next((action.slab for action in actions if isinstance(action, p.Grant)), None)

    for step, (kind, works) in enumerate(saves):
        for _ in range(4):
            slab = feed(p.LeaseAsked(conn=1, request=1, plan_id="a", nbytes=100, step=step, room=1000))
            if slab is not None:
                break
            assert state.persisting() is not None, "refused, and nothing will change that"
            ended = state.persisting().id
            feed(p.PersistFinished(slab=ended) if works or max_slabs == 1 else p.PersistFailed(slab=ended, error="broken"))
        assert slab is not None
        feed(p.Sealed(conn=1, request=1, slab=slab, step=step, attempt=1, bound=kind != "plain", must=kind == "must", room=1000))
    while state.persisting() is not None:
        feed(p.PersistFinished(slab=state.persisting().id))
    assert {told.get(step) for step, (kind, _) in enumerate(saves) if kind == "must"} <= {"committed", "failed"}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_found(mutant, monkeypatch):
    """Each planted bug breaks an invariant within the number of tries that the property gets."""
    where, name, replacement = MUTANTS[mutant]
    if name is None:
        monkeypatch.setitem(p.TABLE, where, replacement)
    else:
        monkeypatch.setattr(getattr(p, where), name, replacement)

    def breaks(script):
        try:
            Driver(3).play(script)
        except AssertionError:
            return True
        return False

    found = hypothesis.find(SCRIPTS, breaks, settings=hypothesis.settings(max_examples=3000, derandomize=True, database=None, deadline=None,
                                                                          phases=[hypothesis.Phase.generate]))  # fmt: skip
    assert found


def own_slab_each(d, e, peer):
    return False


def sealed_by_the_first(d, e, slab):
    d.change(slab, ranks=tuple(share.rank for share in slab.shares if share.conn == e.conn))
    REAL_SEALED(d, e, d.state.slabs[slab.id])


def never_broken(d, slab, reason, knowing):
    return slab


def refusal_forgotten(d, step, kind, reason, told):
    return None


def complete_when_sealed_here(d, e, slab):
    REAL_SEALED(d, e, slab)
    row = d.state.slabs[slab.id]
    if row.state is p.SlabState.SEALED:
        p._complete(d, row, told=True)


def lost_elsewhere_stays(d, e, slab):
    return None


def dropped_for_a_lease(self, plan_id, nbytes):
    """A slab that other nodes may have sealed is refilled when no other is free."""
    found = REAL_SUITED(self, plan_id, nbytes)
    incomplete = self.state.incomplete()
    return found if found is not None or not incomplete else self.empty(incomplete[0])


CLUSTER_MUTANTS = {
    "a slab for each rank": ("_leased_together", own_slab_each),
    "sealed when one rank has": ((p.SlabState.FILLING, p.Sealed), sealed_by_the_first),
    "a share given up does not matter": ("_break", never_broken),
    "a refusal is not remembered": ("_remember_refusal", refusal_forgotten),
    "complete when sealed here": ((p.SlabState.FILLING, p.Sealed), complete_when_sealed_here),
    "what another node has lost stays": ((p.Phase.SERVING, p.StepLost), lost_elsewhere_stays),
    "an incomplete snapshot is refilled": ("suited", dropped_for_a_lease),
}


@pytest.mark.parametrize("mutant", CLUSTER_MUTANTS)
def test_planted_bugs_of_ranks_and_nodes_are_found(mutant, monkeypatch):
    """Each planted bug in what ranks and nodes do together breaks an invariant."""
    where, replacement = CLUSTER_MUTANTS[mutant]
    if isinstance(where, tuple):
        monkeypatch.setitem(p.TABLE, where, replacement)
    else:
        monkeypatch.setattr(p._Draft if where == "suited" else p, where, replacement)

    def breaks(script):
        try:
            Cluster(2, 2, 3).play(script)
        except AssertionError:
            return True
        return False

    found = hypothesis.find(CLUSTER_SCRIPTS, breaks, settings=hypothesis.settings(
        max_examples=2000, derandomize=True, database=None, deadline=None, phases=[hypothesis.Phase.generate]))  # fmt: skip
    assert found is not None
