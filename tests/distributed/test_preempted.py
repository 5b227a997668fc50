"""SIGTERM and SIGUSR1 to some ranks or to all: one step, the best tier that the grace allows, and the truth about it."""

from __future__ import annotations

import signal

import pytest
from checks import lived, manifests, restored, run_of
from test_failures import held_in_fsync, needs_strace


@pytest.mark.parametrize(("grace_s", "who"), [(30.0, [2]), (120.0, [0, 1, 2, 3])])
def test_sigterm_saves_one_step_to_disk(clusters, jobs, grace_s, who):
    """One rank of four has a SIGTERM, or all have: all save the same step to disk and exit 0; it is restored bit by bit (F53)."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "disk": 100_000}
    job = jobs(cluster, "programs:preempted", per_node=2, options={**options, "grace_s": grace_s})
    job.all_said("under way")
    job.kill(signal.SIGTERM, ranks=who)
    lines = job.all_said("preempted", timeout_s=40)
    assert len({line["step"] for line in lines}) == 1
    assert {(line["code"], line["tier"], line["durable"], line["signal"]) for line in lines} == {(0, "disk", True, "SIGTERM")}, lines
    assert job.ended() == [0] * 4
    for node in cluster.nodes:
        node.kill_agents()
    again = jobs(cluster, per_node=2, options={**options, "layout": "fsdp", "steps": 0})
    restored(again, lived(job), step=lines[0]["step"], tier="disk")
    again.finished()


@needs_strace
def test_sigterm_with_little_time_and_a_stuck_disk(clusters, jobs):
    """Five seconds, and the disk does not answer: the ranks leave in time, say that the step is in memory and not on disk, and it is restored from there (F53)."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "shared"), "disk": 100_000}
    job = jobs(cluster, "programs:preempted", per_node=2, options={**options, "grace_s": 5.0})
    job.all_said("under way")
    with held_in_fsync(cluster.nodes[1]):
        job.kill(signal.SIGTERM)
        lines = job.all_said("preempted", timeout_s=20)
        ends = job.ended(timeout_s=10)
        assert {(line["code"], line["tier"], line["durable"]) for line in lines} == {(0, "memory", False)}, lines
        assert all(line["reason"] for line in lines)
        assert ends == [0] * 4
        assert not [key for key in manifests(cluster.shared / "run") if int(key[:12]) >= lines[0]["step"]]
    again = jobs(cluster, per_node=2, options={**options, "layout": "fsdp", "steps": 0})
    restored(again, lived(job), step=lines[0]["step"], tier=("memory", "disk"))


def test_sigusr1_saves_and_goes_on(clusters, jobs):
    """SIGUSR1 to one rank: a step is saved to disk on all, whatever the cadence, and training goes on to its end."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "disk": 100_000}
    job = jobs(cluster, "programs:preempted", per_node=2, options={**options, "grace_s": 30.0, "steps": 40})
    job.all_said("under way")
    job.kill(signal.SIGUSR1, ranks=[1])
    job.finished(timeout_s=90)
    found = [int(key[:12]) for key in manifests(cluster.shared / "run")]
    assert [step for step in found if step < 40], found
