"""Consolidation with many ranks: one node's agent does it once, nobody waits in training, and all ranks end together."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from checks import manifests, run_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))  # tests are no package

from exporting_fakes import Fake

from everystep.agent.consolidating import COMMAND


def started(jobs, cluster, fake, program="consolidating:trains", **options):
    return jobs(cluster, program, per_node=2, options={**run_of(cluster, "shared"), **options}, environment={COMMAND: fake.command})


def test_final_is_made_once_by_one_node(clusters, jobs):
    """Two nodes, four ranks, one store: one process for the last step, and every rank's close comes back after it (F22)."""
    cluster = clusters(2)
    fake = Fake(cluster.shared / "fake")
    fake.shut()
    job = started(jobs, cluster, fake)
    job.all_said("closing")
    assert fake.at_gate() == "000000000003-0001"
    assert not [rank for rank in job.ranks if rank.said("closed")]
    fake.open()
    job.all_said("closed")
    job.finished()
    assert fake.steps() == [3]


def test_a_long_consolidation_touches_no_rank(clusters, jobs):
    """F35: the process group gives a collective 3 s. Four ranks ask for an export that takes longer: one is made; they train on with collectives while it runs,
    close waits for longer than that, and the barrier after it is fine."""
    cluster = clusters(2)
    fake = Fake(cluster.shared / "fake")
    fake.shut()
    job = started(jobs, cluster, fake, steps=3, group_timeout_s=3.0, ask=True, long_s=3.5)
    job.all_said("asked")
    assert fake.at_gate() == "000000000002-0001"
    lines = job.all_said("trained on")
    assert all(line["seconds"] >= 3.5 for line in lines)
    assert {line["done"] for line in lines[:2]} == {False}, lines
    assert max(line["longest_s"] for line in lines) < 2.5, lines
    job.all_said("closing")
    threading.Event().wait(3.5)  # longer than a collective may take
    assert not [rank for rank in job.ranks if rank.said("closed")]
    fake.open()
    lines = job.all_said("closed")
    job.finished()
    assert fake.steps() == [2, 3]
    assert [line["path"] for line in lines] == [f"{cluster.shared}/run/exports/model-000000000002-0001"] * 2 + [None] * 2


def test_a_rank_that_fails_makes_the_run_no_end(clusters, jobs):
    """One rank raises after the last step, the others close: no export; the job that goes on and ends makes it."""
    cluster = clusters(1)
    fake = Fake(cluster.shared / "fake")
    job = started(jobs, cluster, fake, steps=2, raises=1)
    job.ended(timeout_s=60)
    assert fake.calls() == []
    again = started(jobs, cluster, fake, steps=1)
    again.finished()
    assert fake.steps() == [3]


def test_a_rank_that_has_done_nothing_waits_for_nobody(clusters, jobs):
    """Ranks that have neither saved nor restored do not meet in close: one may be ended there by an error, or have little time, while others are elsewhere."""
    cluster = clusters(1)
    fake = Fake(cluster.shared / "fake")
    job = started(jobs, cluster, fake, "consolidating:closes_alone")
    job.all_said("closed")
    job.finished()
    assert fake.calls() == []


def test_each_commit_of_several_nodes(clusters, jobs):
    """``every``: what is consolidated was committed, each once, in order, although retention keeps one."""
    cluster = clusters(2)
    fake = Fake(cluster.shared / "fake")
    job = started(jobs, cluster, fake, steps=4, consolidate="every", disk=1, keep=1)
    job.finished()
    steps = fake.steps()
    assert steps == sorted(set(steps))
    assert steps[-1] == 4
    assert manifests(cluster.shared / "run")[-1].startswith("000000000004")


@pytest.mark.parametrize("consolidate", ["final", None])
def test_stores_of_the_nodes_own_are_refused(clusters, jobs, consolidate):
    """Each node has a disk of its own: a schedule is refused at the start, and a request when it comes, on every rank, with what to do."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "local"), **({"consolidate": consolidate} if consolidate else {})}
    job = jobs(cluster, "consolidating:apart", per_node=1, options=options)
    lines = job.all_said("refused")
    assert {(line["error"], line["kind"]) for line in lines} == {("ConfigError", "consolidate")}
    assert all("a store of each node's own" in line["message"] and "all nodes share" in line["message"] for line in lines)
    assert [bool(rank.said("saved")) for rank in job.ranks] == [not consolidate] * 2
    job.finished()
