"""The agent inside this process: what becomes of saves, with a real run on disk."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import xxhash

from everystep import protocol
from everystep.agent import client as client_module
from everystep.agent import committing, messages, server
from everystep.agent import persist as persisting
from everystep.agent.client import AgentClient
from everystep.agent.memory import Mapping
from everystep.errors import AgentError, ConflictError, NotFoundError
from everystep.manifest import TensorSpec, block_digests
from everystep.plan import plan_save
from everystep.policy import Cadence, Keep
from everystep.repository import CheckpointKey, Repository


class Trainer:
    def __init__(self, url, *, cadence=None, keep=None, budget=None):
        self.repository = Repository.open(str(url), create=True)
        self.plan = plan_save([TensorSpec("model.w", "U8", (5000,), "model")], aliases={})
        self.events, self.changed, self.lost = [], threading.Condition(), threading.Event()
        self.client = AgentClient.connect(run_url=str(url), run_id=self.repository.run_id, in_process=True, on_event=self.on_event, on_lost=self.lost.set)
        self.attempt = self.repository.start_attempt(parent=None, now=time.time()).attempt
        self.client.configure(attempt=self.attempt, cadence=cadence or Cadence(disk=False), keep=keep or Keep(last=None), memory_budget=budget)

    def on_event(self, event):
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait(self, what, step):
        def there():
            return next((e for e in self.events if (e.what, e.step) == (what, step)), None)

        with self.changed:
            assert self.changed.wait_for(there, 10), (what, step, self.events)
            return there()

    def save(self, step, *, bound=False, pin=False, must=False, metrics=None):
        slab = self.client.lease(self.plan, step)
        assert not isinstance(slab, messages.NoSlab), slab
        (placement,) = self.plan.placements
        slab.view[placement.slab_offset : placement.slab_offset + 5000] = bytes([step]) * 5000
        self.client.seal(slab, plan=self.plan, step=step, attempt=self.attempt, saved_at=1.0 * step, values=b'{"a":1}', metrics=metrics or {},
                         bound=bound, pin=pin, must=must, timings_s={"stage": 0.25, "call": 0.5})  # fmt: skip

    def steps(self):
        return sorted(key.step for key in self.repository.keys())


@pytest.fixture
def trainer(tmp_path):
    trainers = []

    def start(**options):
        trainers.append(Trainer(tmp_path / "run", **options))
        return trainers[-1]

    yield start
    for one in trainers:
        if one.client.alive:
            one.client.stop(force=True)
        one.client.close()


def test_committed_checkpoint_is_what_was_sealed(trainer):
    """Manifest, digests, values, metrics and the event's timings of one bound save."""
    one = trainer()
    one.save(3, bound=True, metrics={"loss": 1.5})
    event = one.wait("committed", 3)
    assert {"queue", "hash", "write", "sync", "commit", "total"} == set(event.timings_s)
    manifest = one.repository.manifest(CheckpointKey(3, 1))
    assert bytes(manifest.values) == b'{"a":1}'
    assert (manifest.saved_at, manifest.metrics) == (3.0, {"loss": 1.5})
    assert manifest.shards[0].digests == (xxhash.xxh3_128_hexdigest(b"\3" * 5000),)
    assert one.repository.is_alive(1, now=time.time())


def test_memory_only_until_the_drain(trainer):
    """disk=False: nothing is written until a drain; superseded ones are told."""
    one = trainer()
    for step in (1, 2, 3):
        one.save(step)
    assert one.wait("superseded", 2)
    assert one.steps() == []
    drained = one.client.drain(timeout_s=10)
    assert (drained.complete, drained.newest_durable_step) == (True, 3)
    assert one.steps() == [3]
    assert [(s.step, s.persisted) for s in one.client.snapshots()] == [(3, True)]


def test_retention_follows_each_commit(trainer):
    """With last=2: older ones are forgotten, with an event; a pinned save stays."""
    one = trainer(keep=Keep(last=2))
    for step in (1, 2, 3, 4):
        one.save(step, bound=True, pin=step == 1)
        one.wait("committed", step)
    one.wait("forgotten", 2)
    assert one.steps() == [1, 3, 4]


def test_metrics_after_the_save(trainer):
    """Metrics recorded while the snapshot is only in memory, and after its commit, are both the checkpoint's."""
    one = trainer()
    one.save(1, metrics={"a": 1.0})
    one.client.record_metrics(step=1, attempt=1, metrics={"b": 2.0})
    one.client.drain(timeout_s=10)
    one.client.record_metrics(step=1, attempt=1, metrics={"c": 3.0})
    one.client.stats()
    assert one.repository.metrics(CheckpointKey(1, 1)) == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_newer_attempt_elsewhere_ends_this_one(trainer):
    """A higher attempt in the store: the save fails with a ConflictError, nothing is committed, and the next seal says the same."""
    one = trainer()
    one.repository.start_attempt(parent=None, now=time.time())
    one.save(1, bound=True)
    failed = one.wait("failed", 1).failed
    assert (failed.name, failed.step) == ("ConflictError", 1)
    assert one.steps() == []
    with pytest.raises(ConflictError):
        one.save(2, bound=True)


def test_failed_persist_is_told_and_tried_again(trainer, monkeypatch):
    """F54: an OSError nobody expected in the commit: the trainer is told, what was written is gone, the drain writes it again."""
    one = trainer()
    real = Repository.commit
    monkeypatch.setattr(Repository, "commit", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    one.save(1, bound=True)
    failed = one.wait("failed", 1).failed
    assert (failed.name, failed.errno) == ("StoreError", 5)
    assert not list(one.repository.store.list("data/"))
    assert not one.client.drain(timeout_s=10).complete
    monkeypatch.setattr(Repository, "commit", real)
    assert one.client.drain(timeout_s=10).complete
    assert one.steps() == [1]


def test_taken_snapshot_outlives_newer_saves(trainer):
    """A snapshot that is held keeps its bytes whatever is saved meanwhile; afterwards it is gone."""
    one = trainer()
    one.save(1)
    slab = one.client.snapshots()[0].slab
    with one.client.take(slab) as taken:
        for step in (2, 3, 4):
            one.save(step)
        shard = taken.manifest.shards[0]
        begin = taken.file_offsets[0] + shard.offset
        assert xxhash.xxh3_128_hexdigest(taken.view[begin : begin + 5000]) == shard.digests[0] == xxhash.xxh3_128_hexdigest(b"\1" * 5000)
        with pytest.raises(NotFoundError):
            one.client.take(slab).__enter__()


def test_lease_given_back_is_leased_again(trainer):
    """Ending a lease without a seal leaves no snapshot, and its slab is the next one's."""
    one = trainer()
    slab = one.client.lease(one.plan, 1)
    one.client.give_back(slab)
    assert one.client.lease(one.plan, 2).id == slab.id
    assert one.client.snapshots() == []


def test_headers_are_in_place(trainer):
    """Each file's header is in the slab before the trainer writes a byte, also after another plan has used the slab."""
    one = trainer(budget=3 * one_size())
    other = plan_save([TensorSpec("model.other", "U8", (5000,), "model")], aliases={})
    for plan in (one.plan, other, one.plan):
        slab = one.client.lease(plan, 1)
        (file,) = plan.files
        assert bytes(slab.view[: len(file.header)]) == file.header
        one.client.give_back(slab)


def one_size():
    return plan_save([TensorSpec("model.w", "U8", (5000,), "model")], aliases={}).nbytes


def test_stats_count_what_happened(trainer):
    """Counters and phases, those of the trainer among them."""
    one = trainer()
    one.save(1)
    one.save(2, bound=True)
    one.wait("committed", 2)
    stats = one.client.stats()
    assert {name: stats["counters"][name] for name in ("saved", "committed", "superseded", "failed", "skipped")} == {
        "saved": 2, "committed": 1, "superseded": 1, "failed": 0, "skipped": 0}  # fmt: skip
    assert stats["phases"]["stage"]["count"] == 2
    assert stats["phases"]["stage"]["total_s"] == pytest.approx(0.5)
    assert stats["phases"]["write"]["count"] == 1


def test_lost_is_told_once(trainer):
    """When the agent ends, ``on_lost`` is called and every call is an AgentError at once."""
    one = trainer()
    one.client.stop(force=True)
    assert one.lost.wait(10)
    assert not one.client.alive
    with pytest.raises(AgentError, match="gone"):
        one.client.snapshots()


class Once:
    """Raises what nobody foresaw the first time it is called, and calls the real thing from then on."""

    def __init__(self, real, times=1):
        self.real, self.left, self.again = real, times, threading.Event()

    def __call__(self, *args, **named):
        if self.left:
            self.left -= 1
            raise ValueError("nobody foresaw this")
        self.again.set()
        return self.real(*args, **named)


@pytest.mark.parametrize("what", ["forget_unkept", "sweep_leftovers"])
def test_error_after_the_commit_does_not_end_the_persists(trainer, monkeypatch, what):
    """Whatever retention or the sweep raises, the snapshot is durable, the error is counted, and the next ones are persisted."""
    monkeypatch.setattr(committing, what, Once(getattr(committing, what)))
    one = trainer()
    one.save(1, bound=True)
    one.wait("committed", 1)
    one.save(2, bound=True)
    one.wait("committed", 2)
    assert one.client.drain(timeout_s=10).complete
    assert one.steps() == [1, 2]
    assert one.client.stats()["counters"]["unexpected_errors"] == 1


def test_action_that_fails_does_not_swallow_the_others(trainer, monkeypatch):
    """When telling of a commit fails, the persist that was to start with it starts all the same."""
    one = trainer()
    monkeypatch.setitem(server.AgentServer._actions, protocol.Notify, Once(server.AgentServer._actions[protocol.Notify]))
    gate = threading.Event()
    real = Repository.commit
    monkeypatch.setattr(Repository, "commit", lambda *args: gate.wait(10) and real(*args))
    one.save(1, must=True)
    one.save(2, must=True)
    gate.set()
    one.wait("committed", 2)
    assert one.steps() == [1, 2]


def test_background_work_goes_on_after_an_error(trainer, monkeypatch):
    """The chores, the clock and the prefaulting each survive an error that nobody foresaw, and count it."""
    monkeypatch.setattr(server, "_TIMER_PAUSE_S", 0.0)
    tick, populate, record = Once(protocol.next_tick_at), Once(Mapping.populate), Once(Repository.record_metrics)
    monkeypatch.setattr(protocol, "next_tick_at", tick)
    monkeypatch.setattr(Repository, "record_metrics", lambda *args: record(*args))  # noqa: PLW0108 - to be bound as a method
    monkeypatch.setattr(Mapping, "populate", lambda mapping: populate(mapping) if threading.current_thread().name == "everystep-prefault" else None)
    one = trainer()
    one.save(1, bound=True)
    one.wait("committed", 1)
    one.client._timeout_s = 0.05  # nobody answers the one that fails
    with pytest.raises(AgentError, match="did not answer"):
        one.client.record_metrics(step=1, attempt=1, metrics={"a": 1.0})
    one.client._timeout_s = 30.0
    one.client.record_metrics(step=1, attempt=1, metrics={"b": 2.0})
    assert one.repository.metrics(CheckpointKey(1, 1)) == {"b": 2.0}
    assert tick.again.wait(10)
    assert populate.again.wait(10)
    assert one.client.stats()["counters"]["unexpected_errors"] == 3


def test_pinned_and_kept_saves_reach_the_disk_whatever_follows(trainer, monkeypatch):
    """A save that must reach the disk, and a pinned one, are committed although bound ones are sealed while they wait."""
    one = trainer()
    gate = threading.Event()
    real = Repository.commit
    monkeypatch.setattr(Repository, "commit", lambda *args: gate.wait(10) and real(*args))
    one.save(1, must=True)
    one.save(2, pin=True)
    one.save(3, bound=True)
    refused = one.client.lease(one.plan, 4)
    assert refused.kind == "busy"
    gate.set()
    for step in (1, 2, 3):
        one.wait("committed", step)
    assert one.steps() == [1, 2, 3]
    one.save(4)


def test_hashing_for_a_reader_holds_up_nothing_else(trainer, monkeypatch):
    """While a snapshot is hashed for a reader, the attempt stays alive and metrics are recorded; the reader waits longer the more there is."""
    monkeypatch.setattr(server, "RENEW_S", 0.01)
    monkeypatch.setattr(client_module, "_TAKE_S_PER_BYTE", 1.0)
    renewed, hashing, gate, found = threading.Event(), threading.Event(), threading.Event(), []
    one = trainer()
    one.save(1, bound=True)
    one.wait("committed", 1)
    one.save(2)

    def digests(view, block=0):
        hashing.set()
        assert gate.wait(10)
        return block_digests(view)

    monkeypatch.setattr(persisting, "block_digests", digests)
    slab = one.client.snapshots()[0].slab
    one.client._timeout_s = 0.0  # what is left is for the bytes

    def read():
        with one.client.take(slab) as taken:
            found.append(taken.manifest.step)
            one.client._timeout_s = 30.0

    reader = threading.Thread(target=read)
    reader.start()
    assert hashing.wait(10)
    one.client._timeout_s = 30.0
    monkeypatch.setattr(Repository, "renew", lambda *_, **__: renewed.set())
    assert renewed.wait(10)
    one.client.record_metrics(step=1, attempt=1, metrics={"a": 1.0})
    gate.set()
    reader.join(10)
    assert found == [2]


def test_slow_store_does_not_stop_the_renewals(trainer, monkeypatch):
    """While a chore waits for the store, the attempt is renewed."""
    monkeypatch.setattr(server, "RENEW_S", 0.01)
    renewed, recording, gate = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(Repository, "record_stats", lambda *_, **__: recording.set() or gate.wait(10))
    one = trainer()
    one.save(1)
    assert recording.wait(10)
    monkeypatch.setattr(Repository, "renew", lambda *_, **__: renewed.set())
    assert renewed.wait(10)
    gate.set()


def test_reader_is_told_of_what_nobody_foresaw(trainer, monkeypatch):
    """A snapshot that cannot be described is an error at once, and is not held."""
    one = trainer()
    one.save(1)
    manifest = Once(persisting.Snapshot.described)
    monkeypatch.setattr(persisting.Snapshot, "described", lambda *args: manifest(*args))  # noqa: PLW0108 - to be bound as a method
    slab = one.client.snapshots()[0].slab
    with pytest.raises(AgentError, match="nobody foresaw"):
        one.client.take(slab).__enter__()
    with one.client.take(slab) as taken:
        assert taken.manifest.step == 1


def test_agent_may_open_many_descriptors():
    """An agent raises the usual soft limit of descriptors as far as it may, and never lowers it."""
    script = """
import resource
from everystep.agent.serving import _allow_descriptors
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
_allow_descriptors()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
