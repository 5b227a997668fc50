"""Two agents in this process, each with two ranks: one slab for a node's ranks, and one checkpoint of all nodes."""

from __future__ import annotations

import os
import socket
import threading
import time

import msgspec
import pytest
import safetensors.numpy
import xxhash

from everystep import protocol
from everystep.agent import committing, messages
from everystep.agent.client import AgentClient
from everystep.agent.memory import Room
from everystep.agent.server import AgentServer
from everystep.agent.wire import Channel
from everystep.errors import AgentError, ConflictError
from everystep.layout import HeldTensor, RankLayout, plan_world
from everystep.manifest import TensorSpec, document_of_rank
from everystep.policy import Cadence, Keep
from everystep.region import Region
from everystep.repository import CheckpointKey, Repository

ROWS, WIDTH, TOKEN = 8, 1000, b"0123456789abcdef0123456789abcdef"
SPEC = TensorSpec("model.w", "U8", (ROWS, WIDTH), "model")


def values(rank):
    return msgspec.json.encode({"state": {"dict": [["rank", rank], ["same", 1]]}})


def content(step):
    return bytes((7 * step + at) % 251 for at in range(ROWS * WIDTH))


class Rank:
    """A trainer without torch: leases, fills its rows, seals."""

    def __init__(self, job, node, rank):
        self.job, self.node, self.rank = job, node, rank
        self.events, self.changed = [], threading.Condition()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        node.server.adopt(Channel(theirs))
        self.client = AgentClient(Channel(ours), idle_s=600.0, wait_closed=None, on_event=self.on_event, on_lost=None, timeout_s=20.0)
        hello = messages.Hello(protocol=messages.PROTOCOL, role="trainer", run_id=job.run_id, pid=1000 + rank)
        self.client._welcome = self.client._ask(hello, messages.Welcome)

    def configure(self, *, cadence=None, keep=None, attempt=1, job="job", replicas=0):
        self.client.configure(
            attempt=attempt, cadence=cadence or Cadence(disk=False), keep=keep or Keep(last=None), memory_budget=None, rank=self.rank,
            ranks=self.node.ranks, world=self.job.world, node=self.node.number, nodes=len(self.job.nodes), shared=self.job.shared,
            replicas=replicas, job=job,
        )  # fmt: skip

    def on_event(self, event):
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def told(self, what, step, timeout=10):
        def there():
            return next((event for event in self.events if (event.what, event.step) == (what, step)), None)

        with self.changed:
            assert self.changed.wait_for(there, timeout), (self.rank, what, step, self.events)
            return there()

    def lease(self, step):
        return self.client.lease(self.node.plan.plan, step)

    def fill(self, slab, step):
        data = content(step)
        rows = range(self.rank * self.job.rows, (self.rank + 1) * self.job.rows)
        for copy in self.node.plan.copies[self.rank]:
            placement = self.node.plan.plan.placements[copy.placement]
            for row in range(copy.region.offsets[0], copy.region.offsets[0] + copy.region.sizes[0]):
                assert self.job.everywhere or row in rows
                at = placement.slab_offset + (row - placement.region.offsets[0]) * WIDTH
                slab.view[at : at + WIDTH] = data[row * WIDTH : (row + 1) * WIDTH]

    def seal(self, slab, step, *, bound=False, must=False, pin=False, attempt=1):
        self.client.seal(slab, plan=self.node.plan.plan, step=step, attempt=attempt, saved_at=100.0 + step + self.rank, values=values(self.rank),
                         metrics={"loss": 1.0 * self.rank}, bound=bound, pin=pin, must=must, timings_s={})  # fmt: skip

    def save(self, step, **options):
        slab = self.lease(step)
        assert not isinstance(slab, messages.NoSlab), slab
        self.fill(slab, step)
        self.seal(slab, step, **options)


class Node:
    def __init__(self, job, number, ranks, url):
        self.number, self.ranks = number, tuple(ranks)
        self.repository = Repository.open(str(url), create=True, run_id=job.run_id)
        self.server = AgentServer(self.repository, run_url=str(url), run_id=job.run_id, idle_s=600.0)
        self.plan = None
        self.trainers = []


class Job:
    """``nodes`` agents with ``local`` ranks each; a store for all, or one each."""

    def __init__(self, tmp_path, *, nodes=2, local=2, shared=True, everywhere=False):
        self.run_id, self.shared, self.world, self.everywhere = "feedbeef", shared, nodes * local, everywhere
        self.rows = ROWS // self.world
        self.nodes = []
        for number in range(nodes):
            ranks = range(number * local, (number + 1) * local)
            self.nodes.append(Node(self, number, ranks, tmp_path / ("run" if shared else f"run{number}")))
        regions = [Region((0, 0), (ROWS, WIDTH)) if everywhere else Region((rank * self.rows, 0), (self.rows, WIDTH)) for rank in range(self.world)]
        layouts = [
            RankLayout(node=rank // local, tensors=(HeldTensor(spec=SPEC, regions=(regions[rank],)),), aliases={}) for rank in range(self.world)
        ]
        for node, plan in zip(self.nodes, plan_world(layouts), strict=True):
            node.plan = plan
        for node in self.nodes if not shared else self.nodes[:1]:
            node.repository.start_attempt(parent=None, world=self.world, nodes=nodes, now=time.time(), number=1, job="job", shared=shared)
        self.ranks = []

    def start(self, **options):
        for node in self.nodes:
            node.trainers = [Rank(self, node, rank) for rank in node.ranks]
            self.ranks += node.trainers
        for rank in self.ranks:
            rank.configure(**options)
        if len(self.nodes) > 1:
            addresses = []
            for node in self.nodes:
                host, port = node.trainers[0].client.open_peers(TOKEN, "127.0.0.1")
                addresses.append(messages.PeerAddress(node=node.number, host=host, port=port, domain=f"rack {node.number}"))
            for rank in self.ranks:
                rank.client.set_peers(addresses, rank.node.number)
        return self

    def save(self, step, **options):
        for rank in self.ranks:
            rank.save(step, **options)

    def told(self, what, step):
        return [rank.told(what, step) for rank in self.ranks]

    def close(self):
        for node in self.nodes:
            for rank in node.trainers:
                rank.client.close(bye=False)
        for node in self.nodes:
            node.server._persister.close(wait=False)
            node.server._sharing.close(None, linger_s=0.0)


@pytest.fixture
def job(tmp_path):
    made = []

    def start(**options):
        made.append(Job(tmp_path, **{name: options.pop(name) for name in ("nodes", "local", "shared", "everywhere") if name in options}))
        return made[-1].start(**options)

    yield start
    for one in made:
        one.close()


def tensor_of(repositories, manifest):
    """The tensor as the safetensors package reads it from the files, put together by region."""
    whole = bytearray(ROWS * WIDTH)
    for shard in manifest.shards:
        stored = manifest.objects[shard.object]
        data = next(data for repository in repositories if (data := get(repository, stored.key)) is not None)
        piece = data[shard.offset : shard.offset + shard.nbytes]
        assert shard.digests == (xxhash.xxh3_128_hexdigest(piece),)
        begin = shard.region.offsets[0] * WIDTH
        whole[begin : begin + len(piece)] = piece
        safetensors.numpy.load(data)
    return bytes(whole)


def wait_for(there, timeout_s=15.0):
    until = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < until
        threading.Event().wait(0.01)


def get(repository, key):
    return repository.store.get(key) if key in {name for name, _ in repository.store.list("data/")} else None


def test_ranks_of_one_node_fill_one_slab(job):
    """Two ranks lease the same slab; it is a snapshot when both have sealed, with the documents of both, and a whole safetensors file."""
    one = job(nodes=1)
    first, second = one.ranks
    slabs = [first.lease(1), second.lease(1)]
    assert slabs[0].id == slabs[1].id
    first.fill(slabs[0], 1)
    first.seal(slabs[0], 1, bound=True)
    assert first.client.snapshots() == []
    second.fill(slabs[1], 1)
    second.seal(slabs[1], 1)
    one.told("complete", 1)
    one.told("committed", 1)
    (summary,) = second.client.snapshots()
    assert (summary.step, summary.world, summary.nodes, summary.replica) == (1, 2, 1, False)
    manifest = one.nodes[0].repository.manifest(CheckpointKey(1, 1))
    assert (manifest.world, manifest.nodes, manifest.saved_at, manifest.metrics) == (2, 1, 102.0, {"loss": 0.0})
    assert [document_of_rank(manifest, rank) for rank in (0, 1)] == [values(0), values(1)]
    assert tensor_of([one.nodes[0].repository], manifest) == content(1)
    (stored,) = manifest.objects
    loaded = safetensors.numpy.load(one.nodes[0].repository.store.get(stored.key))
    assert loaded["w"].tobytes() == content(1)


def test_third_trainer_of_another_job_is_refused(job):
    """A process of another agreement, and one of the same rank, are refused while the job lives."""
    one = job(nodes=1)
    stranger = Rank(one, one.nodes[0], 0)
    for name in ("other", "job"):
        with pytest.raises(ConflictError, match="is saving into this run now"):
            stranger.configure(job=name)
    stranger.client.close()


def test_rank_that_gives_up_takes_the_others_with_it(job):
    """One rank's failure fails the step for its node: who has sealed and who seals later is told why, and the next step is fine."""
    one = job(nodes=1)
    first, second = one.ranks
    slab = first.lease(1)
    first.seal(slab, 1)
    other = second.lease(1)
    second.client.give_back(other, "w changed while it was copied")
    failed = first.told("failed", 1).failed
    assert failed.kind == "rank"
    assert "rank 1 gave it up: w changed while it was copied" in failed.message
    assert first.client.snapshots() == []
    one.save(2)
    first.told("complete", 2)


def test_lost_rank_breaks_the_step_and_is_replaced(job):
    """A rank's connection ends in the middle of a step: the step fails for the others; a rank in its place saves the next one."""
    one = job(nodes=1)
    first, second = one.ranks
    first.seal(first.lease(1), 1)
    second.lease(1)
    second.client.close(bye=False)
    assert "rank 1 was lost" in first.told("failed", 1).failed.message
    replaced = Rank(one, one.nodes[0], 1)
    one.nodes[0].trainers[1] = replaced
    replaced.configure()
    first.save(2)
    replaced.save(2)
    first.told("complete", 2)


@pytest.mark.parametrize("shared", [True, False])
def test_nodes_commit_one_checkpoint(job, shared):
    """Each node writes its own files; the manifest is the same in every store, whole, and nobody's bytes are there twice."""
    one = job(shared=shared)
    one.save(3, bound=True)
    one.told("complete", 3)
    events = one.told("committed", 3)
    assert {"queue", "hash", "write", "sync", "part", "meet", "total"} <= set(events[0].timings_s)
    key = CheckpointKey(3, 1)
    stores = [node.repository for node in one.nodes]
    manifests = {repository.store.get(f"manifests/{key}.json") for repository in stores}
    assert len(manifests) == 1
    manifest = stores[0].manifest(key)
    assert (manifest.nodes, manifest.world, manifest.shared) == (2, 4, shared)
    assert tensor_of(stores, manifest) == content(3)
    assert [document_of_rank(manifest, rank) for rank in range(4)] == [values(rank) for rank in range(4)]
    files = [{name for name, _ in repository.store.list("data/") if name.endswith(".safetensors")} for repository in stores]
    assert files[0] == files[1] if shared else not files[0] & files[1]
    assert len(set.union(*files)) == 2


def test_replica_groups_store_each_region_once(job):
    """F18: both nodes hold the whole tensor: one copy of each region, one manifest."""
    one = job(everywhere=True)
    one.save(1, bound=True)
    one.told("committed", 1)
    repository = one.nodes[0].repository
    manifest = repository.manifest(CheckpointKey(1, 1))
    assert sum(shard.nbytes for shard in manifest.shards) == ROWS * WIDTH
    assert tensor_of([repository], manifest) == content(1)
    assert [name for name, _ in repository.store.list("manifests/")] == [f"manifests/{CheckpointKey(1, 1)}.json"]


def test_lead_decides_what_idle_disks_persist(job):
    """As fast as the disks take them: both nodes persist the same steps, the last one among them."""
    one = job(cadence=Cadence(disk=None))
    for step in range(1, 6):
        one.save(step)
        one.told("complete", step)
    one.told("committed", 5)
    keys = one.nodes[0].repository.keys()
    assert keys[-1] == CheckpointKey(5, 1)
    for node in one.nodes:
        for rank in node.trainers:
            assert {event.step for event in rank.events if event.what == "committed"} <= {key.step for key in keys}


@pytest.mark.parametrize("shared", [True, False])
def test_node_that_fails_its_part_fails_the_step_everywhere(job, shared, monkeypatch):
    """One node's disk fails: all are told, naming it, nothing is committed or waited for, and the next step is committed."""
    one = job(shared=shared)
    broken = one.nodes[1].repository
    monkeypatch.setattr(broken, "put_part", lambda _: (_ for _ in ()).throw(OSError(28, "no space left")))
    one.save(1, bound=True)
    failed = [event.failed for event in one.told("failed", 1)]
    assert all("no space left" in one.message for one in failed)
    assert any("node 1" in one.message for one in failed[:2])
    for node in one.nodes:
        assert node.repository.keys() == []
    monkeypatch.undo()
    one.save(2, bound=True)
    one.told("committed", 2)


def test_step_that_one_node_skips_is_never_complete(job):
    """A step that another node gives up or leaves out is told as such, the one before it stays, and the next one is complete."""
    one = job()
    one.save(1)
    one.told("complete", 1)
    for rank in one.nodes[0].trainers:
        rank.save(2, bound=True)
    slab = one.ranks[2].lease(2)
    one.ranks[2].client.give_back(slab, "it was torn")
    failed = one.ranks[0].told("failed", 2).failed
    assert failed.kind == "incomplete"
    assert "node 1" in failed.message
    assert "rank 2 gave it up: it was torn" in failed.message
    assert [summary.step for summary in one.ranks[0].client.snapshots()] == [1]
    for rank in one.nodes[0].trainers:
        rank.save(3)
    one.save(4)
    one.told("complete", 4)
    one.ranks[0].told("superseded", 3)
    assert [summary.step for summary in one.ranks[0].client.snapshots()] == [4]


def test_drain_on_every_node_persists_the_same_step(job):
    """With disk=False the drains of all ranks, at the same time, end with one checkpoint of the newest step."""
    one = job(shared=False)
    one.save(1)
    one.save(2)
    found = []
    threads = [threading.Thread(target=lambda rank=rank: found.append(rank.client.drain(timeout_s=20))) for rank in one.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(drained.complete, drained.newest_durable_step) for drained in found] == [(True, 2)] * 4
    for node in one.nodes:
        assert node.repository.keys() == [CheckpointKey(2, 1)]


def test_lost_trainers_leave_their_last_step_on_disk(job):
    """All trainers of all nodes are killed: their agents persist the newest complete step together."""
    one = job()
    one.save(1)
    one.told("complete", 1)
    for rank in one.ranks:
        rank.client.close(bye=False)
    until = time.monotonic() + 10
    while one.nodes[0].repository.keys() != [CheckpointKey(1, 1)]:
        assert time.monotonic() < until
        os.sched_yield()


def test_silent_node_is_given_up(job, monkeypatch):
    """A node whose agent is gone fails the step after the time a silent one gets, and is named; the tombstone says so too."""
    monkeypatch.setattr(committing, "SILENT_S", 0.2)
    monkeypatch.setattr(committing, "ASK_AFTER_S", 0.05)
    monkeypatch.setattr(committing, "_GLANCE_S", 0.05)
    one = job()
    dead = one.nodes[1].server._sharing.nodes
    gate = threading.Event()
    monkeypatch.setattr(one.nodes[1].server._persister, "start", lambda *_: gate.set())
    one.save(1, bound=True)
    one.told("complete", 1)
    assert gate.wait(10)
    dead.close()
    failed = one.ranks[0].told("failed", 1).failed
    assert "the agent of node 1 has not answered" in failed.message
    assert "node 1" in one.nodes[0].repository.given_up(CheckpointKey(1, 1))


def gated(monkeypatch, target, name):
    """Make a method wait; returns (set when it has begun, set to let it go on)."""
    begun, gate, real = threading.Event(), threading.Event(), getattr(target, name)

    def wait(*args, **words):
        begun.set()
        assert gate.wait(20)
        return real(*args, **words)

    monkeypatch.setattr(target, name, wait)
    return begun, gate


def test_slow_disk_on_one_node_does_not_part_the_nodes(job, monkeypatch):
    """While one node is behind with its disk all bound steps are kept: none is dropped on one node that the other one writes."""
    one = job(local=1, cadence=Cadence(disk=1))
    begun, gate = gated(monkeypatch, one.nodes[1].repository, "commit")
    one.save(1, bound=True)
    assert begun.wait(10)
    one.ranks[0].told("committed", 1)  # and node 0 goes on to the next
    for step in (2, 3):
        one.save(step, bound=True)
        one.told("complete", step)
    gate.set()
    for step in (1, 2, 3):
        one.told("committed", step)
    assert not [event for rank in one.ranks for event in rank.events if event.what in ("failed", "superseded")]


@pytest.mark.parametrize("shared", [True, False])
def test_restart_that_renumbers_the_nodes_loses_nothing_under_way(job, monkeypatch, shared):
    """Trainers are killed while a slow disk takes their last step, and come back with their nodes the other way round: it is committed."""
    monkeypatch.setattr(committing, "ASK_AFTER_S", 0.1)
    monkeypatch.setattr(committing, "_ANSWER_S", 0.2)
    one = job(local=1, shared=shared)
    begun, gate = gated(monkeypatch, one.nodes[1].repository, "put_data")
    one.save(1)
    one.told("complete", 1)
    for rank in one.ranks:
        rank.client.close(bye=False)
    assert begun.wait(10)
    first, second = one.nodes
    asked, real = threading.Event(), committing._Meeting._ask
    for node in one.nodes if not shared else one.nodes[:1]:
        node.repository.start_attempt(parent=CheckpointKey(1, 1), world=2, nodes=2, now=time.time(), number=2, job="again", shared=shared)
    one.nodes, one.ranks = [second, first], []
    for number, node in enumerate(one.nodes):
        node.number, node.ranks = number, (number,)
    one.start(attempt=2, job="again")

    def ask(meeting, node, **words):
        real(meeting, node, **words)
        asked.set()

    monkeypatch.setattr(committing._Meeting, "_ask", ask)
    assert asked.wait(10)
    gate.set()
    for node in (first, second):
        wait_for(lambda node=node: node.repository.committed(CheckpointKey(1, 1)))


def test_agent_that_is_made_to_end_leaves_its_part_to_the_others(job, monkeypatch):
    """An agent is stopped after its own part is durable: the other node, still writing, commits the step without it."""
    one = job(local=1, cadence=Cadence(disk=10))
    first, second = one.nodes
    begun, gate = gated(monkeypatch, second.repository, "put_data")
    one.save(10, bound=True)
    assert begun.wait(10)
    wait_for(lambda: first.server._persister._fates)
    first.server.feed(protocol.StopAsked(force=True))
    first.server.close()
    first.server._persister._thread.join(10)
    gate.set()
    one.ranks[1].told("committed", 10)
    assert second.repository.committed(CheckpointKey(10, 1))


def test_silent_node_holds_up_a_newer_attempt_only_shortly(job, monkeypatch):
    """A node is lost with its agent while another persists; when a newer attempt has begun the wait for it is short."""
    monkeypatch.setattr(committing, "OVER_S", 0.3)
    monkeypatch.setattr(committing, "ASK_AFTER_S", 0.05)
    one = job(local=1)
    begun, _ = gated(monkeypatch, one.nodes[1].server._persister, "_persist")
    one.save(1)
    one.told("complete", 1)
    for rank in one.ranks:
        rank.client.close(bye=False)
    assert begun.wait(10)
    one.nodes[1].server._sharing.nodes.close()
    first = one.nodes[0]
    first.repository.start_attempt(parent=None, now=time.time(), number=2)
    one.world, first.ranks = 1, (0,)
    both, one.nodes = one.nodes, [first]
    rank = Rank(one, first, 0)
    rank.configure(attempt=2, job="")
    one.nodes = both
    one.ranks.append(rank)
    wait_for(lambda: first.repository.given_up(CheckpointKey(1, 1)))
    assert "has not answered for 0.3 s" in first.repository.given_up(CheckpointKey(1, 1))


def test_copies_are_freed_when_a_job_goes_on_with_one_node(job):
    """Copies held for nodes that are no more go when the first step of the smaller job is on disk."""
    one = job(local=1, cadence=Cadence(disk=1), replicas=1)
    first = one.nodes[0]
    one.save(1, bound=True)
    one.told("committed", 1)
    wait_for(first.server._sharing.copies)
    for rank in one.ranks:
        rank.client.close(bye=False)
    first.repository.start_attempt(parent=CheckpointKey(1, 1), now=time.time(), number=2)
    one.world, one.everywhere, first.ranks = 1, True, (0,)
    region = Region((0, 0), (ROWS, WIDTH))
    first.plan = plan_world([RankLayout(node=0, tensors=(HeldTensor(spec=SPEC, regions=(region,)),), aliases={})])[0]
    both, one.nodes = one.nodes, [first]
    rank = Rank(one, first, 0)
    one.ranks.append(rank)
    rank.configure(attempt=2, job="", cadence=Cadence(disk=1), replicas=1)
    one.nodes = both
    assert first.server._sharing.copies()
    rank.save(2, bound=True, attempt=2)
    wait_for(lambda: not first.server._sharing.copies())


def test_copy_of_another_node_is_listed_and_taken(job):
    """With replicas=1 each node holds the other's newest complete snapshot, byte for byte, and gives it to a reader."""
    one = job(replicas=1)
    one.save(1)
    one.told("complete", 1)
    until = time.monotonic() + 10
    while not (copies := [s for s in one.ranks[0].client.snapshots() if s.replica]):
        assert time.monotonic() < until
        os.sched_yield()
    (copy,) = copies
    assert (copy.node, copy.step, copy.nodes, copy.slab < 0) == (1, 1, 2, True)
    with one.ranks[0].client.take(copy.slab) as taken:
        assert (taken.part.node, taken.part.ranks) == (1, (2, 3))
        (shard,) = taken.part.shards
        data = bytearray(shard.nbytes)
        taken.read_into(taken.file_offsets[shard.object] + shard.offset, memoryview(data))
    begin = shard.region.offsets[0] * WIDTH
    assert bytes(data) == content(1)[begin : begin + shard.nbytes]


def test_copied_step_is_whole_while_the_next_is_pulled(job, monkeypatch):
    """One agent's pull stands still while steps become complete: every agent keeps its share of the copied step and of the one being copied, and the copies."""
    go_on, stands = threading.Event(), threading.Event()
    one = job(local=1, replicas=1)
    holder = one.nodes[0].server._sharing.nodes.replicas
    plain = holder._fill

    def slow(remote, memory):
        if remote.key.step > 1:
            stands.set()
            assert go_on.wait(20)
        plain(remote, memory)

    monkeypatch.setattr(holder, "_fill", slow)

    def held(node):
        found = node.trainers[0].client.snapshots()
        return {s.step for s in found if not s.replica}, {s.step for s in found if s.replica}

    def copied(step):
        wait_for(lambda: all(node.server._sharing.nodes._own.copied == step for node in one.nodes))

    def saved(*steps):
        for step in steps:
            for rank in one.ranks:
                rank.save(step)
            one.told("complete", step)

    saved(1)
    copied(1)
    saved(2)
    assert stands.wait(10)
    saved(3, 4, 5)
    wait_for(lambda: held(one.nodes[1]) == ({1, 2, 5}, {1, 2}))
    wait_for(lambda: held(one.nodes[0]) == ({1, 2, 5}, {1}))
    stats = msgspec.json.decode(one.nodes[0].server.stats.encode())
    assert "notes" not in stats
    go_on.set()
    copied(5)
    for node in one.nodes:
        wait_for(lambda node=node: held(node) == ({5}, {5}))


def test_holder_without_memory_is_told_on_every_node(job):
    """One agent has no memory for copies: saves go on, the last copied step stays whole, and each agent's statistics say why copies are not renewed."""
    one = job(local=1, replicas=1)
    one.save(1)
    one.told("complete", 1)
    wait_for(lambda: all(node.server._sharing.nodes._own.copied == 1 for node in one.nodes))
    holder = one.nodes[1].server._sharing.nodes.replicas
    holder._free_spares()
    holder._room = lambda: Room(0, "a small machine")
    for step in (2, 3, 4):
        one.save(step)
        one.told("complete", step)
        for node in one.nodes:
            wait_for(lambda node=node: "a small machine" in node.trainers[0].client.stats().get("notes", {}).get("copies", ""))
    for node in one.nodes:
        assert 1 in {s.step for s in node.trainers[0].client.snapshots() if not s.replica}
        assert 1 in {s.step for s in node.trainers[0].client.snapshots() if s.replica}


def test_nonsense_about_the_world_is_refused(job):
    """Ranks that are not in the world, or not on the node, or of another node than the others said."""
    one = job(nodes=1)
    client = one.ranks[0].client
    plain = {"attempt": 1, "cadence": Cadence(disk=False), "keep": Keep(), "memory_budget": None, "job": "job"}
    for wrong in ({"rank": 5}, {"ranks": (1, 0), "world": 2}, {"node": 1}, {"ranks": (0, 1), "world": 1}, {"nodes": 2, "world": 1}):
        with pytest.raises(AgentError, match=r"cannot be"):
            client.configure(**plain, **wrong)
    with pytest.raises(AgentError, match="the others said"):
        client.configure(**plain, ranks=(0, 2), world=3)
