"""A repository against a model of it: any sequence of saves, restarts, pins, holds, retention, reductions, deletions and sweeps; and retention's promises."""

from __future__ import annotations

import contextlib
import math

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from everystep.errors import ConflictError
from everystep.manifest import merge
from everystep.policy import Candidate, retain
from everystep.repository import CheckpointKey, Repository
from everystep.store.local import LocalStore
from everystep.testing import Mount, SimDisk
from everystep.testing.samples import OPTIMIZER_FILE, node_part, node_payload, optimizer_payload, payload, persist, persist_node
from everystep.testing.strategies import candidates, checkpoint_keys, keeps, store_keys

STEPS = st.integers(1, 30)


class RepositoryMachine(stateful.RuleBasedStateMachine):
    """The model: which checkpoints are committed, which were given up, who is pinned, and each attempt's parent."""

    def __init__(self):
        super().__init__()
        self.repository = Repository(LocalStore("/run", disk=SimDisk(), writers=1))
        self.repository.begin(create=True)
        self.parents = {1: None}
        self.repository.start_attempt(parent=None, now=0.0)
        self.committed = {}
        self.gone = set()
        self.late = set()
        self.pinned = set()
        self.alive = set()
        self.pending = {}
        self.holds = contextlib.ExitStack()
        self.held = set()

    @property
    def attempt(self):
        return max(self.parents)

    def expected_lineage(self):
        """By walking parents one checkpoint at a time, unlike the code under test."""
        found, attempt, limit = [], self.attempt, math.inf
        while attempt is not None:
            found += sorted((key for key in self.committed if key.attempt == attempt and key.step <= limit), reverse=True)
            parent = self.parents[attempt]
            attempt, limit = (parent.attempt, parent.step) if parent else (None, 0)
        return found

    def drop(self, key):
        del self.committed[key]
        self.gone.add(key)

    @stateful.rule(steps=st.lists(STEPS, min_size=1, max_size=4, unique=True), share=st.booleans())
    def saves(self, steps, share):
        for step in steps:
            self.begin_save(step, float(step), share, later=False)

    @stateful.rule(step=STEPS, loss=st.none() | st.floats(0, 10))
    def begin_one(self, step, loss):
        self.begin_save(step, loss, share=False, later=True)

    def begin_save(self, step, loss, share, *, later):
        key = CheckpointKey(step, self.attempt)
        if key in self.committed or key in self.gone or key in self.pending:
            return
        lineage = self.expected_lineage()
        metrics = {} if loss is None else {"loss": loss}
        # A save may refer to the newest committed checkpoint's bytes, and holds it meanwhile; here it commits at once.
        base = lineage[0].full if share and lineage else None
        self.pending[key] = persist(self.repository, key, base=base, metrics=metrics, optimizer=True), metrics
        if not later:
            self.commit(key)

    @stateful.precondition(lambda self: self.pending)
    @stateful.rule(data=st.data())
    def end_save(self, data):
        self.commit(data.draw(st.sampled_from(sorted(self.pending))))

    def commit(self, key):
        manifest, metrics = self.pending.pop(key)
        if key in self.gone or not self.awaited(key):
            try:
                self.repository.commit(manifest)
            except ConflictError:
                self.gone.add(key)
                self.late.add(key)
            else:
                raise AssertionError(f"{key} was committed too late")
        else:
            self.repository.commit(manifest)
            self.committed[key] = metrics

    def awaited(self, key):
        """Whether the newest attempt is, or goes on from, what would be committed."""
        attempt, limit = self.attempt, math.inf
        while attempt is not None and attempt != key.attempt:
            parent = self.parents[attempt]
            attempt, limit = (parent.attempt, parent.step) if parent else (None, 0)
        return attempt is not None and key.step <= limit

    @stateful.precondition(lambda self: self.committed)
    @stateful.rule(data=st.data(), scratch=st.integers(0, 4))
    def restart(self, data, scratch):
        parent = None if scratch == 4 else data.draw(st.sampled_from(sorted(self.committed)))
        made = self.repository.start_attempt(parent=parent, now=0.0)
        assert made.attempt == self.attempt + 1
        self.parents[made.attempt] = parent

    @stateful.precondition(lambda self: self.committed)
    @stateful.rule(data=st.data(), what=st.sampled_from(["pin", "unpin", "hold", "measure", "again"]))
    def touch(self, data, what):
        key = data.draw(st.sampled_from(sorted(self.committed)))
        if what == "pin":
            self.repository.pin(key)
            self.pinned.add(key)
        elif what == "unpin":
            self.repository.unpin(key)
            self.pinned.discard(key)
        elif what == "hold":
            self.holds.enter_context(self.repository.hold(key))
            self.held.add(key)
        elif what == "measure":
            self.repository.record_metrics(key, {"loss": 0.5})
            self.committed[key] = {"loss": 0.5}
        elif key.attempt == self.attempt:
            self.repository.commit(self.repository.manifest(key))

    @stateful.rule()
    def readers_finish(self):
        self.holds.close()
        self.held.clear()

    @stateful.precondition(lambda self: self.committed)
    @stateful.rule(data=st.data(), sole=st.booleans())
    def forget(self, data, sole):
        key = data.draw(st.sampled_from(sorted(self.committed)))
        try:
            assert self.repository.forget(key, sole_committer=sole) > 0
        except ConflictError:
            assert key in self.pinned | self.held
        else:
            assert key not in self.pinned | self.held
            self.drop(key)

    def newest_good(self):
        """By the model: the newest whole one of the lineage, else of all that there are."""
        whole = [key for key in self.expected_lineage() if not key.reduced] or sorted(
            (key for key in self.committed if not key.reduced), key=lambda key: (key.attempt, key.step), reverse=True
        )
        return whole[0] if whole else None

    @stateful.precondition(lambda self: self.committed)
    @stateful.rule(data=st.data(), drop=st.sampled_from([["optim"], ["epoch"], ["optim", "epoch"]]), asked=st.booleans())
    def reduces(self, data, drop, asked):
        key = data.draw(st.sampled_from(sorted(self.committed)))
        dropped = set(self.repository.manifest(key).dropped)
        protected = key in self.pinned | self.held or key == self.newest_good()
        assert bool(self.repository.may_drop(key)) == (not protected)
        assert self.repository.droppable([key]) == ([] if protected else [key])
        try:
            made = self.repository.reduce(key.full if asked else key, drop=drop)
        except ConflictError:
            assert protected
            return
        manifest = self.repository.manifest(made)
        assert set(manifest.dropped) == dropped | set(drop)
        if set(drop) <= dropped:
            assert made == key
        else:
            assert not protected
            assert made.reduced == key.reduced + 1
            metrics = self.committed[key]
            self.drop(key)
            self.committed[made] = metrics

    @stateful.rule(keep=keeps())
    def retention(self, keep):
        decided = {CheckpointKey.parse(kept.key): kept for kept in self.repository.retention(keep, now=0.0)}
        assert set(decided) == set(self.committed)
        for key, kept in decided.items():
            if not kept.keep:
                assert key not in self.pinned | self.held
                self.repository.forget(key)
                self.drop(key)

    @stateful.rule(alive=st.booleans())
    def sweep(self, alive):
        if alive:
            self.repository.renew(self.attempt, now=0.0, ttl_s=100.0)
            self.alive.add(self.attempt)
        else:
            self.repository.renew(self.attempt, now=0.0, ttl_s=0.0)
            self.alive.discard(self.attempt)
        swept = {key for key in self.pending if key.attempt not in self.alive or not self.awaited(key)}
        self.repository.sweep(self.repository.plan_sweep(now=50.0))
        self.gone |= swept

    @stateful.invariant()
    def agrees(self):
        assert set(self.repository.keys()) == set(self.committed)
        assert self.repository.lineage() == self.expected_lineage()
        for key, metrics in self.committed.items():
            assert self.repository.metrics(key) == metrics
            assert self.repository.pinned(key) == (key in self.pinned)

    @stateful.invariant()
    def every_byte_is_there(self):
        for key in self.committed:
            manifest = self.repository.manifest(key)
            assert ("optim" in {spec.group for spec in manifest.tensors}) == ("optim" not in manifest.dropped)
            for stored in manifest.objects:
                _, owner, name = stored.key.split("/")
                made = optimizer_payload if name == OPTIMIZER_FILE else payload
                assert self.repository.store.get(stored.key) == made(CheckpointKey.parse(owner))

    @stateful.invariant()
    def nothing_else_is_there(self):
        """No forgotten checkpoint's data but what others need. What came too late waits for a sweep."""
        needed = {stored.key for key in self.committed for stored in self.repository.manifest(key).objects}
        for name, _ in self.repository.store.list("data/"):
            owner = CheckpointKey.parse(name.split("/")[1])
            assert name in needed or owner in self.committed or owner in self.pending or owner in self.late

    def teardown(self):
        self.holds.close()


RepositoryMachine.TestCase.settings = hypothesis.settings(max_examples=60, stateful_step_count=20)


class TestRepository(RepositoryMachine.TestCase):
    """The repository does what the model does."""


class NodesMachine(stateful.RuleBasedStateMachine):
    """Two nodes, each with its own mount of one store. The model: whose parts are written, what is committed, and what is gone for good."""

    def __init__(self):
        super().__init__()
        disk = SimDisk()
        self.nodes = [Repository(LocalStore("/run", disk=Mount(disk), writers=1, sleep=[].append)) for _ in range(2)]
        for one in self.nodes:
            one.begin(create=True, run_id="00000000000000aa")
        self.parents = {}
        self.parts, self.committed, self.gone, self.alive = {}, set(), set(), set()
        self.start(None)

    def start(self, parent):
        number = len(self.parents) + 1
        self.nodes[number % 2].start_attempt(parent=parent, now=0.0, world=2, nodes=2, number=number, job=f"job {number}")
        assert self.nodes[1 - number % 2].attempt_record(number).job == f"job {number}"
        self.parents[number] = parent

    @property
    def attempt(self):
        return len(self.parents)

    def awaited(self, key):
        """Whether the newest attempt is, or goes on from, what would be committed."""
        attempt, limit = self.attempt, math.inf
        while attempt != key.attempt:
            parent = self.parents[attempt]
            if parent is None:
                return False
            attempt, limit = parent.attempt, parent.step
        return key.step <= limit

    def refused(self, action, *kinds):
        with pytest.raises(ConflictError) as caught:
            action()
        assert caught.value.kind in kinds

    @stateful.rule(node=st.integers(0, 1), step=st.integers(1, 6))
    def writes(self, node, step):
        key = CheckpointKey(step, self.attempt)

        def write():
            persist_node(self.nodes[node], key, node, 2, metrics={"loss": float(step)})

        if key in self.committed:
            self.refused(write, "committed")
        elif key in self.gone:
            self.refused(write, "forgotten")
        else:
            write()
            self.parts.setdefault(key, set()).add(node)

    @stateful.precondition(lambda self: any(len(nodes) == 2 for nodes in self.parts.values()))
    @stateful.rule(node=st.integers(0, 1), data=st.data(), read=st.booleans())
    def commits(self, node, data, read):
        key = data.draw(st.sampled_from(sorted(key for key, nodes in self.parts.items() if len(nodes) == 2)))
        one = self.nodes[node]
        if read and key not in self.gone:
            parts = [one.read_part(key, other) for other in (1, 0)]
        else:
            parts = [node_part(key, other, 2, metrics={"loss": float(key.step)}) for other in (0, 1)]
        if key in self.gone or not self.awaited(key):
            self.refused(lambda: one.commit(merge(parts)), "forgotten", "superseded-attempt")
        else:
            one.commit(merge(parts))
            self.committed.add(key)

    @stateful.rule(node=st.integers(0, 1), step=st.integers(1, 6))
    def gives_up(self, node, step):
        key = CheckpointKey(step, self.attempt)
        if key in self.committed:
            self.refused(lambda: self.nodes[node].give_up(key, "no"), "committed")
        else:
            self.nodes[node].give_up(key, "no")
            self.gone.add(key)

    @stateful.precondition(lambda self: self.committed)
    @stateful.rule(node=st.integers(0, 1), data=st.data())
    def forgets(self, node, data):
        key = data.draw(st.sampled_from(sorted(self.committed)))
        assert self.nodes[node].forget(key) > 0
        self.committed.discard(key)
        self.gone.add(key)

    @stateful.rule(data=st.data(), scratch=st.booleans())
    def restart(self, data, scratch):
        self.start(None if scratch or not self.committed else data.draw(st.sampled_from(sorted(self.committed))))

    @stateful.rule(node=st.integers(0, 1), alive=st.booleans())
    def sweeps(self, node, alive):
        one = self.nodes[node]
        one.renew(self.attempt, now=0.0, ttl_s=100.0 if alive else 0.0)
        (self.alive.add if alive else self.alive.discard)(self.attempt)
        swept = {key for key in self.parts if key.attempt not in self.alive or not self.awaited(key)}
        one.sweep(one.plan_sweep(now=50.0))
        self.gone |= swept - self.committed

    @stateful.invariant()
    def agrees(self):
        for one in self.nodes:
            assert set(one.keys()) == self.committed
            for key in self.parts:
                assert one.committed(key) == (key in self.committed)
                if key.attempt == self.attempt:
                    assert (one.given_up(key) is None) == (key not in self.gone)
                    if key not in self.gone:
                        assert one.parts_there(key) == self.parts[key]

    @stateful.invariant()
    def every_byte_is_there(self):
        for key in self.committed:
            for node, stored in enumerate(self.nodes[0].manifest(key).objects):
                assert self.nodes[1].store.get(stored.key) == node_payload(key, node)
            assert self.nodes[1].metrics(key) == {"loss": float(key.step)}


NodesMachine.TestCase.settings = hypothesis.settings(max_examples=60, stateful_step_count=20)


class TestNodes(NodesMachine.TestCase):
    """F47: two committing nodes on one store do what the model does."""


@hypothesis.given(candidates(), keeps())
def test_retention_never_removes(found, keep):
    """Invariant 11: the newest good one, pinned and held ones stay; each candidate gets one decision with a reason; a second round changes nothing."""
    decided = {kept.key: kept for kept in retain(found, keep)}
    assert set(decided) == {one.key for one in found}
    assert len(decided) == len(found)
    assert all(kept.reason for kept in decided.values())
    for one in found:
        if one.pinned or one.held:
            assert decided[one.key].keep
    good = [one for one in found if one.verified is not False and not one.reduced]
    for pool in ([one for one in good if one.in_lineage] or good, [one for one in good if one.verified and one.in_lineage]):
        if pool:
            assert decided[max(pool, key=lambda one: (one.attempt, one.step)).key].keep
    stay = [one for one in found if decided[one.key].keep]
    assert all(kept.keep for kept in retain(stay, keep))


@hypothesis.given(candidates(), keeps(), st.integers(1, 20))
def test_incomplete_ones_never_push_out(found, keep, more):
    """F50: corrupt checkpoints newer than everything change no decision about the good ones of the lineage."""
    before = {kept.key: kept.keep for kept in retain(found, keep)}
    corrupt = [Candidate(key=f"x{number}", step=100 + number, attempt=9, metrics={"loss": 0.0}, verified=False) for number in range(more)]
    after = {kept.key: kept.keep for kept in retain(found + corrupt, keep)}
    assert {one: after[one] for one in before} == before


@hypothesis.given(checkpoint_keys())
def test_keys_round_trip(key):
    """Any key's text parses back to it."""
    assert CheckpointKey.parse(str(key)) == key


@hypothesis.given(st.dictionaries(store_keys(), st.binary(max_size=20), max_size=8))
def test_store_lists_what_was_put(content):
    """Any set of keys of which none lies below another is listed sorted, with sizes."""
    content = {key: data for key, data in content.items() if not any(other.startswith(key + "/") for other in content)}
    store = LocalStore("/run", disk=SimDisk(), writers=1)
    for key, data in content.items():
        store.put(key, data)
    assert list(store.list("")) == sorted((key, len(data)) for key, data in content.items())
