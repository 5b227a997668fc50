"""Ranks, agents and nodes are killed, links cut and slowed, disks filled: what is restored is right, and what is lost is what was said to be lost."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from pathlib import Path
from random import Random

import pytest
from checks import acknowledged, as_json, everystep, lived, manifests, restored, run_of, until

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to hold an agent up in fsync")


def replica_steps(node) -> set[int]:
    """Steps of which the node's agent holds another node's copy, as the command line tells."""
    found = as_json(node, "agent", "ls")
    agents = found["agents"] if isinstance(found, dict) else found
    return {snapshot["step"] for agent in agents for snapshot in agent.get("snapshots", []) if snapshot.get("replica")}


@pytest.mark.parametrize("kind", ["shared", "local"])
@pytest.mark.parametrize("who", [0, 3])
def test_any_rank_may_be_killed(clusters, jobs, kind, who):
    """SIGKILL to one rank at a random moment, the others as torchrun does it: the step that was acknowledged in memory is there, bit by bit."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, kind), "layout": "fsdp"}
    job = jobs(cluster, per_node=2, options={**options, "steps": 1000})
    job.wait(lambda: acknowledged(job, "memory") >= 3, what="an acknowledged step")
    job.ranks[who].kill()
    job.ended(ranks=[who])
    job.kill()
    again = jobs(cluster, per_node=2, options={**options, "steps": 2, "wait": "memory"})
    step = restored(again, lived(job))
    assert step >= acknowledged(job, "memory")
    again.finished()


def test_any_agent_may_be_killed(clusters, jobs):
    """SIGKILL to each node's agent in turn while training goes on: no rank stops, another agent starts, and a later step is committed."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "layout": "fsdp"}
    job = jobs(cluster, per_node=2, options={**options, "steps": 12, "pause_at": [3, 6], "sync_last": True})
    for node in reversed(cluster.nodes):
        job.all_said("paused", count=2 - cluster.nodes.index(node))
        assert node.kill_agents()
        for rank in job.ranks:
            rank.tell(go=True)
    job.finished()
    for node in cluster.nodes:
        node.kill_agents()
    again = jobs(cluster, per_node=2, options={**options, "steps": 0})
    restored(again, lived(job), step=12, tier="disk")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_restored_from_its_peer(clusters, jobs, lost):
    """A whole node goes for good, agent and disk; nothing was ever written to disk: a new node and the old one restore the last step from the peer's copy."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "shared"), "layout": "fsdp", "replicas": 1, "disk": False}
    job = jobs(cluster, per_node=2, options={**options, "steps": 4, "wait": "memory", "close": False})
    job.all_said("done")
    kept = cluster.nodes[1 - lost]
    until(lambda: 4 in replica_steps(kept), what="the copy of step 4 on the peer")
    job.kill()
    cluster.lose(cluster.nodes[lost])
    run = cluster.shared / "run"
    for path in [*run.glob("data/*"), *run.glob("manifests/*")]:  # whatever an agent may have written when the trainers died
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    fresh = cluster.add()
    order = [fresh, kept] if lost == 0 else [kept, fresh]
    again = jobs(cluster, nodes=order, per_node=2, options={**options, "steps": 2, "wait": "memory"})
    restored(again, lived(job), step=4, tier=("memory", "peer"))
    again.finished()


def test_a_node_may_be_lost_at_any_moment(clusters, jobs):
    """A save at every step, pulls that take much longer than a step, nothing on disk: from the first copied step on a node may go at any moment, one after the
    other, and the others restore from memory each time, never an older step than was whole."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "shared"), "layout": "fsdp", "replicas": 1, "disk": False, "width": 2000, "each_s": 0.02, "replica_nbytes_s": 1 << 20}
    random = Random(5)
    lives, order, found = [], list(cluster.nodes), [0]
    for lost in (1, 0):
        job = jobs(cluster, nodes=order, per_node=1, options={**options, "steps": 10_000})
        begun = restored(job, lived(*lives), tier=("memory", "peer")) if lives else 0
        assert begun >= found[0]
        lives.append(job)

        def copied(node=order[0], begun=begun, found=found):
            held = sorted(step for step in replica_steps(node) if step > begun)
            found[0] = held[0] if len(held) > 1 else begun  # a newer one is copied when the one before it is whole everywhere
            return len(held) > 1

        until(copied, what="a copied step")
        threading.Event().wait(random.random())
        cluster.lose(order[lost])
        job.kill()
        for path in [*(cluster.shared / "run").glob("data/*"), *(cluster.shared / "run").glob("manifests/*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        order[lost] = cluster.add()
    again = jobs(cluster, nodes=order, per_node=1, options={**options, "steps": 2, "wait": "memory"})
    assert restored(again, lived(*lives), tier=("memory", "peer")) >= found[0]
    again.finished()


def test_a_lost_node_without_a_peer_costs_what_was_not_on_disk(clusters, jobs):
    """Without copies, a lost node's memory is gone: the newest checkpoint on the shared disk is restored, and not a step older."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "shared"), "layout": "fsdp"}
    job = jobs(cluster, per_node=2, options={**options, "steps": 5, "wait": "memory", "disk": 3, "pause_at": [5]})
    job.all_said("paused")
    job.wait(lambda: acknowledged(job, "disk") or manifests(cluster.shared / "run"), what="step 3 on disk")
    lost, kept = cluster.nodes
    lost.kill()
    job.kill()
    cluster.lose(lost)
    again = jobs(cluster, nodes=[cluster.add(), kept], per_node=2, options={**options, "steps": 0})
    restored(again, lived(job), step=3, tier="disk")
    again.finished()


@contextlib.contextmanager
def held_in_fsync(node):
    """The node's agents do not come back from fsync: nothing of theirs becomes durable."""
    tracers = []
    for agent in node.agents():
        command = [
            "strace",
            "-f",
            "-q",
            "-p",
            str(agent.pid),
            "-e",
            "trace=fsync,fdatasync",
            "-e",
            "inject=fsync,fdatasync:delay_enter=60000000",
        ]
        tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        tracers.append(tracer)
        until(lambda pid=agent.pid: "TracerPid:\t0" not in Path(f"/proc/{pid}/status").read_text(), what="strace", tries=100_000)
    try:
        yield
    finally:
        for tracer in tracers:
            tracer.kill()
            tracer.wait()


@needs_strace
def test_a_node_that_dies_before_its_part(clusters, jobs):
    """Step 3's data of node 1 never gets durable, then the node dies: step 3 is not committed, step 2 is restored, and what is left of 3 is swept."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "shared"), "layout": "fsdp"}
    job = jobs(cluster, per_node=2, options={**options, "steps": 3, "wait": "memory", "pause_at": [2, 3]})
    job.all_said("paused")
    run = cluster.shared / "run"
    until(lambda: [key for key in manifests(run) if key.startswith("000000000002")], what="step 2 on disk", tries=100_000)
    lost, kept = reversed(cluster.nodes)
    # Both agents are through with it: what is held up next is step 3.
    saved = "step 2 of attempt 1 saved to disk"
    until(lambda: all(saved in log.read_text() for node in cluster.nodes for log in node.runtime.glob("*.log")), what=saved, tries=100_000)
    with held_in_fsync(lost):
        for rank in job.ranks:
            rank.tell(go=True)
        job.all_said("paused", count=2)
        until(lambda: list(run.glob("data/000000000003-0001/node-00001.json")) or list(run.glob("data/000000000003-0001/node-00000.json")),
              what="the other node's part of step 3", tries=1_000_000)  # fmt: skip
        lost.kill()
    kept.kill_agents()
    job.kill()
    assert [key[:12] for key in manifests(run)][-1] == "000000000002"
    again = jobs(cluster, per_node=2, options={**options, "steps": 2, "wait": "disk"})
    restored(again, lived(job), step=2, tier="disk")
    again.finished()
    everystep(None, "sweep", str(run))
    assert not (run / "data" / "000000000003-0001").exists()
    as_json(None, "verify", str(run), "--all")


def test_a_cut_link_loses_steps_and_nothing_else(clusters, jobs):
    """Node 1's cable is pulled while all train on: no rank stops; plugged in again, later steps are committed and restored."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "shared"), "layout": "copies"}
    # Ranks that wait for nobody need a pace, or all is over before the cable is in again.
    job = jobs(cluster, per_node=2, options={**options, "steps": 9, "pause_at": [2, 6], "max_failing_s": 600.0, "each_s": 0.1, "sync_last": True})
    job.all_said("paused")
    cluster.nodes[1].cut()
    for rank in job.ranks:
        rank.tell(go=True)
    job.all_said("paused", count=2, timeout_s=60)
    cluster.nodes[1].mend()
    for rank in job.ranks:
        rank.tell(go=True)
    job.finished(timeout_s=90)
    for node in cluster.nodes:
        node.kill_agents()
    again = jobs(cluster, per_node=2, options={**options, "steps": 0})
    restored(again, lived(job), step=9, tier="disk")


def test_a_slow_link_slows_no_step(clusters, jobs):
    """Copies for a peer go over a link of 1 MB/s: they lag, training does not wait for them, and nothing fails."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "shared"), "layout": "copies", "replicas": 1, "width": 20_000, "each_s": 0.1, "sync_last": True}
    job = jobs(cluster, per_node=1, options={**options, "steps": 12, "pause_at": [2]})
    job.all_said("paused")
    cluster.nodes[1].slow(1_000_000)
    for rank in job.ranks:
        rank.tell(go=True)
    lines = job.all_said("step", count=12, timeout_s=60)
    assert lines
    times = [line["at"] for line in job.ranks[0].said("step")]
    # A state of 5 MB takes five seconds over that link: ten steps that waited for it would take fifty.
    assert times[-1] - times[2] < 15
    cluster.nodes[1].slow(None)
    assert all(line["failures"] == [] for line in job.all_said("done"))
    job.finished()


def test_a_full_disk_on_one_node_costs_that_step(clusters, jobs):
    """Node-local disks, and node 1's is full: no manifest of that step on either node, the ranks hear it; with room again, the next step is committed."""
    cluster = clusters(2, isolated=True)
    one, other = cluster.nodes
    other.small_disk(64 << 20)
    options = {**run_of(cluster, "local"), "layout": "fsdp", "max_failing_s": 600.0, "width": 20_000}
    job = jobs(cluster, per_node=2, options={**options, "steps": 6, "pause_at": [2, 4], "wait": "memory", "sync_last": True})
    job.all_said("paused")
    run = one.local / "run"
    until(lambda: all([key for key in manifests(run, node) if key.startswith("000000000002")] for node in cluster.nodes), what="step 2 on both disks")
    filler = other.fill_disk()
    for rank in job.ranks:
        rank.tell(go=True)
    job.all_said("paused", count=2)
    assert [key[:12] for key in manifests(run, one)][-1] == [key[:12] for key in manifests(run, other)][-1] == "000000000002"
    other.remove(filler)
    for rank in job.ranks:
        rank.tell(go=True)
    job.finished()
    assert manifests(run, one)[-1] == manifests(run, other)[-1]
    assert manifests(run, one)[-1].startswith("000000000006")
    for node in cluster.nodes:
        node.kill_agents()
    again = jobs(cluster, per_node=2, options={**options, "steps": 0})
    restored(again, lived(job), step=6, tier="disk")
    again.finished()


def test_ranks_move_to_other_nodes(clusters, jobs):
    """The same four ranks come back in another order of nodes: every rank still gets its own bits, from the agents' memory."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "shared"), "layout": "fsdp", "disk": False}
    job = jobs(cluster, per_node=2, options={**options, "steps": 2, "wait": "memory", "close": False})
    job.all_said("done")
    job.kill()
    again = jobs(cluster, nodes=list(reversed(cluster.nodes)), per_node=2, options={**options, "steps": 2, "wait": "memory"})
    restored(again, lived(job), step=2)
    again.finished()
