"""Copies in other nodes' memory: whichever node is lost at whatever moment, the others have a whole step together."""

from __future__ import annotations

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from everystep import protocol as p
from everystep.agent import lead as lead_module
from everystep.agent import nodes as nodes_module
from everystep.agent.nodes import Nodes
from everystep.agent.posts import Posts
from everystep.repository import CheckpointKey

OPS = ("save", "save", "talk", "talk", "talk", "send", "arrive", "arrive", "report", "pull", "pull", "break", "finish", "read", "release", "restart")
SCRIPTS = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 2), st.integers(0, 15)), max_size=120)


class NoPosts(Posts):
    """Sends nothing: the script does."""

    def mark(self, destinations):
        pass


class Copies:
    """What ``Replicas`` does, without threads, for the node before this one in the ring."""

    def __init__(self, agent):
        self.agent, self.held, self.pending = agent, set(), None

    def configure(self, *_, **__):
        pass

    def copy(self, key):
        self.pending = key

    def keep(self, keys):
        self.held = {one for one in self.held if one in keys or all((one.attempt, one.step) > (key.attempt, key.step) for key in keys)}

    def drop_older(self, key):
        raise AssertionError("the job goes on with copies")

    def pull(self, *, works):
        if self.pending is not None:
            key, self.pending = self.pending, None
            whole = works and key in self.agent.source.own()
            if whole:
                self.held.add(key)
            self.agent.nodes._copied(key, "" if whole else "it was gone")


class Agent:
    """One node: the protocol's state, and its side of the talk between nodes."""

    def __init__(self, number, count):
        self.number, self.count = number, count
        self.state, self.now, self.conn = p.AgentState(max_slabs=p.MAX_SLABS + p.KEPT_SLABS), 0.0, 0
        self.nodes = Nodes(self, "a1b2c3")
        self.nodes._posts = NoPosts(lambda _: None, lambda *_: None)
        self.copies = self.nodes.replicas = Copies(self)
        self.source = None
        self.flight = None

    def begin(self, attempt):
        if self.conn:
            self.feed(p.ConnectionClosed(conn=self.conn))
        self.conn += 1
        self.feed(p.Connected(conn=self.conn, role="trainer", pid=7))
        self.feed(p.Configured(
            conn=self.conn, attempt=attempt, newest_attempt=attempt - 1, persist_when_idle=False, budget=None, idle_s=1e9, job=f"job {attempt}",
            nodes=self.count,
        ))  # fmt: skip
        self.nodes.configure(attempt, self.number, self.count, None, 1)

    def feed(self, event):
        self.state, actions = p.transition(self.state, event, now=self.now)
        for action in actions:
            if isinstance(action, p.TellNodes):
                key = CheckpointKey(action.step, action.attempt)
                assert action.what != "let go", "there is memory for all"
                {"sealed": self.nodes.sealed, "wanted": self.nodes.wanted, "lost": lambda key: self.nodes.failed(key, "lost")}[action.what](key)
        return actions

    def save(self, attempt, step):
        granted = self.feed(p.LeaseAsked(conn=self.conn, request=1, plan_id="a", nbytes=100, step=step, room=100_000))
        for grant in [one for one in granted if isinstance(one, p.Grant)]:
            self.feed(p.Sealed(conn=self.conn, request=2, slab=grant.slab, step=step, attempt=attempt, bound=False, room=100_000,
                               payload=CheckpointKey(step, attempt)))  # fmt: skip

    def own(self):
        return {slab.payload for slab in self.state.slabs.values() if p.is_snapshot(slab)}

    # -- nodes.Side
    def completed(self, key, persist):
        self.feed(p.Completed(step=key.step, attempt=key.attempt, persist=persist))

    def failed(self, key, node, reason):
        self.feed(p.StepLost(step=key.step, attempt=key.attempt, reason=reason))

    def keep(self, keys):
        self.feed(p.KeepAsked(keys=frozenset((key.attempt, key.step) for key in keys)))

    def note(self, name, text):
        pass

    def count(self, name, by=1):
        pass


class Job:
    """Three nodes; node n holds the copy of node n - 1."""

    def __init__(self, count=3):
        self.agents = [Agent(number, count) for number in range(count)]
        for agent in self.agents:
            agent.source = self.agents[agent.number - 1]
        self.attempt, self.step, self.safe = 0, [0] * count, 0
        self.restart(0, 0)
        for op in ("save", "talk", "pull", "talk"):
            getattr(self, op)(0, 0)
        self.check()
        assert self.safe

    def play(self, script):
        for op, node, number in script:
            getattr(self, op.replace("break", "break_off"))(node, number)
            self.check()

    def check(self):
        """Once a step has been copied: whoever is lost, the rest have a whole step, and it never gets older."""
        lead = self.agents[0].nodes._lead
        if lead.verdict().copied is None and not self.safe:
            return
        self.safe += 1
        for lost in self.agents:
            holder = self.agents[(lost.number + 1) % len(self.agents)]
            whole = set.intersection(holder.copies.held, *(agent.own() for agent in self.agents if agent is not lost))
            assert whole, f"without node {lost.number}: {[(sorted(one.own()), sorted(one.copies.held)) for one in self.agents]}"

    # -- what happens
    def restart(self, _node, number):
        if number == 0:
            self.attempt += 1
            self.step = [max(self.step)] * len(self.agents)
            for agent in self.agents:
                agent.flight = None
                agent.begin(self.attempt)

    def save(self, node, number):
        for one in range(len(self.agents)) if number < 10 else [node]:
            self.step[one] += 1
            self.agents[one].save(self.attempt, self.step[one])

    def talk(self, node, number):
        """Everybody tells and hears what there is; or only so far."""
        for op in ("report", "send", "arrive")[: 3 - number // 6]:
            getattr(self, op)(node, 0)

    def send(self, node, number):
        for agent in self.agents if number < 6 else [self.agents[node]]:
            agent.flight = agent.flight or self.agents[0].nodes._lead.verdict()

    def arrive(self, node, number):
        for agent in self.agents if number < 6 else [self.agents[node]]:
            if agent.flight is not None:
                verdict, agent.flight = agent.flight, None
                agent.nodes._hear(verdict)

    def report(self, node, number):
        for agent in self.agents[1:] if number < 6 else [self.agents[node]]:
            if agent.number:
                self.agents[0].nodes._take_post("sealed", msgspec.msgpack.encode(agent.nodes._reported()))
            for key in [slab.payload for slab in agent.state.slabs.values() if slab.durable]:
                self.agents[0].nodes._lead.settled(agent.number, key.attempt, key.step, 0.0)

    def pull(self, node, number):
        for agent in self.agents if number < 6 else [self.agents[node]]:
            agent.copies.pull(works=True)

    def break_off(self, node, _number):
        self.agents[node].copies.pull(works=False)

    def finish(self, node, _number):
        slab = self.agents[node].state.persisting()
        if slab is not None:
            self.agents[node].feed(p.PersistFinished(slab=slab.id))

    def read(self, node, number):
        agent = self.agents[node]
        slabs = [slab.id for slab in agent.state.slabs.values() if p.is_snapshot(slab)]
        if slabs:
            agent.feed(p.SnapshotAsked(conn=agent.conn, request=3, slab=slabs[number % len(slabs)]))

    def release(self, node, _number):
        agent = self.agents[node]
        for slab in list(agent.state.slabs.values()):
            for conn in slab.readers:
                agent.feed(p.SnapshotReleased(conn=conn, request=4, slab=slab.id))


@hypothesis.given(SCRIPTS)
@hypothesis.settings(max_examples=max(300, hypothesis.settings.default.max_examples))
def test_any_lost_node_leaves_a_whole_step(script):
    """From the first copied step on, through restarts, late messages and pulls that fail: own snapshots and copies are a whole step without any node."""
    Job().play(script)


def test_copies_are_renewed():
    """A save at every step, and pulls that take three steps each: the step that is whole without any one node is never older than that takes."""
    job = Job()
    for round_ in range(40):
        for op in ("save", "talk", *(["pull"] if round_ % 3 == 2 else []), "talk"):
            getattr(job, op)(0, 1)
            job.check()
        if round_ > 8:
            assert job.agents[0].nodes._own.copied >= job.step[0] - 6
            assert all(len(agent.state.slabs) <= p.MAX_SLABS + p.KEPT_SLABS for agent in job.agents)
            assert all(step == job.step[0] for step in job.step)
    assert job.safe


def release_at_once(self, slab):
    self.let_go(slab)


def copied_when_one_is(self, node, attempt, step, problem, now):
    for one in range(self.nodes):
        REAL_COPIED(self, one, attempt, step, problem, now)
    return True


def newest_only(self, verdict):
    kept, copy = REAL_TO_KEEP(self, verdict)
    return (kept and kept[-1:]), copy


def forgets_the_attempt_before(self, verdict):
    kept, copy = REAL_TO_KEEP(self, verdict)
    return (kept and tuple(key for key in kept if key.attempt == verdict.attempt)), copy


def copies_only_while_whole_here(self, *, works):
    pending = self.pending
    REAL_PULL(self, works=works)
    if pending in self.held:
        self.held = {pending}


REAL_COPIED, REAL_TO_KEEP, REAL_PULL = lead_module.Lead.copied, Nodes._to_keep, Copies.pull
MUTANTS = {
    "own snapshots go when a newer one is complete": (p._Draft, "release", release_at_once),
    "copied when one holder has it": (lead_module.Lead, "copied", copied_when_one_is),
    "only what is being copied is kept": (nodes_module.Nodes, "_to_keep", newest_only),
    "a new attempt keeps nothing of the one before": (nodes_module.Nodes, "_to_keep", forgets_the_attempt_before),
    "a holder drops the old copy when the new one is whole here": (Copies, "pull", copies_only_while_whole_here),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_found(mutant, monkeypatch):
    """Each planted bug leaves, at some moment, a node whose loss would cost every step in memory."""
    where, name, replacement = MUTANTS[mutant]
    monkeypatch.setattr(where, name, replacement)

    def breaks(script):
        try:
            Job().play(script)
        except AssertionError:
            return True
        return False

    found = hypothesis.find(SCRIPTS, breaks, settings=hypothesis.settings(max_examples=3000, derandomize=True, database=None, deadline=None,
                                                                          phases=[hypothesis.Phase.generate]))  # fmt: skip
    assert found
