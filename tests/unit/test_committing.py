"""How parts come together where there are many nodes: what is read and asked, and who is waited for."""

from __future__ import annotations

import threading

import pytest

from everystep.agent import committing
from everystep.errors import AgentError
from everystep.repository import CheckpointKey
from everystep.testing.sides import plain_part

KEY = CheckpointKey(5, 1)
NODES = 40


def part(node):
    return plain_part(bytes(8192), node=node, nodes=NODES, key=KEY)


class Store:
    """What of a repository a meeting needs. Counts."""

    def __init__(self, there=(), committed_after=None):
        self.there, self.committed_after = set(there), committed_after
        self.listed = self.looked = 0

    def parts_there(self, _key):
        self.listed += 1
        return frozenset(self.there)

    def read_part(self, _key, node):
        return part(node)

    def committed(self, _key):
        self.looked += 1
        return self.committed_after is not None and self.looked > self.committed_after

    def given_up(self, _key):
        return None


class Others:
    """Answers by node: an error's kind, or nothing: not yet."""

    def __init__(self, kinds=None, then=lambda asked: None):
        self.kinds, self.then, self.asked = kinds or {}, then, []

    def part(self, node, _key, *, timeout_s):
        self.asked.append(node)
        self.then(self.asked)
        raise AgentError(f"node {node} says nothing", kind=self.kinds.get(node, "timeout"))


def meeting(store, others, *, node=0, over=False):
    return committing._Meeting(store, others, part(node), threading.Event(), lambda: over)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(committing, "ASK_AFTER_S", 0.0)
    monkeypatch.setattr(committing, "_PAUSE_MAX_S", 0.01)


def test_node_that_is_late_with_its_head_start_reads_no_parts():
    """Where there are many nodes one that is not the first looks for the manifest and leaves the parts alone."""
    store, others = Store(there=range(NODES), committed_after=5), Others()
    assert meeting(store, others, node=7).in_store() is None
    assert (store.listed, others.asked) == (0, [])
    assert len(meeting(store, others).in_store()) == NODES


def test_head_start_passes(monkeypatch):
    """When nobody commits, the next node does after its head start."""
    monkeypatch.setattr(committing, "HEAD_START_S", 0.02)
    assert len(meeting(Store(there=range(NODES)), Others(), node=2).in_store()) == NODES


def test_missing_nodes_are_asked_in_turn_and_the_store_is_looked_at_in_between():
    """However many parts are missing a round asks a few; everybody has his turn."""
    store = Store()

    def then(asked):
        if len(asked) == 2 * (NODES - 1):
            store.there = set(range(NODES))

    others = Others(then=then)
    assert len(meeting(store, others).in_store()) == NODES
    assert sorted(others.asked[: NODES - 1]) == sorted(others.asked[NODES - 1 : 2 * (NODES - 1)]) == list(range(1, NODES))
    assert store.listed >= len(others.asked) // committing._GLANCES


def test_silence_counts_from_its_begin(monkeypatch):
    """One answer that does not come is no silence, however late it is asked for; one that lasts is, and sooner when a newer attempt waits."""
    store = Store()
    clock = [1000.0]
    monkeypatch.setattr(committing.time, "monotonic", lambda: clock[0])
    others = Others(kinds={9: "unreachable"})
    for over, patience_s in ((False, committing.SILENT_S), (True, committing.OVER_S)):
        one = meeting(store, others, over=over)
        clock[0] += 500.0
        one._ask(9, timeout_s=0.1)
        clock[0] += patience_s - 1
        one._ask(9, timeout_s=0.1)
        others.kinds[9] = "timeout"  # it lives
        one._ask(9, timeout_s=0.1)
        others.kinds[9] = "unreachable"
        one._ask(9, timeout_s=0.1)
        clock[0] += patience_s + 1
        with pytest.raises(AgentError, match=f"node 9 has not answered for {patience_s:g} s"):
            one._ask(9, timeout_s=0.1)


def test_what_an_older_attempt_has_left_is_asked_for_at_once(monkeypatch):
    """A step of an attempt that is over holds up those of the newer one no longer than its nodes take to answer: it may be lost with one of them."""
    monkeypatch.setattr(committing, "ASK_AFTER_S", 1e9)
    for over in (True, False):
        others = Others(kinds={1: "gone"})
        store = Store(committed_after=20)
        if over:
            with pytest.raises(AgentError, match="given it up"):
                meeting(store, others, over=over).in_store()
            assert store.looked <= 2
        else:
            assert meeting(store, others, over=over).in_store() is None
            assert others.asked == []
