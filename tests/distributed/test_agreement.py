"""What ranks have to agree on, and what happens when one of them fails, sees something else, or has another order of doing things."""

from __future__ import annotations

import signal

import pytest
from checks import lived, manifests, restored, run_of


def test_a_state_that_one_rank_cannot_store_is_told_to_all(clusters, jobs):
    """Rank 2's state is refused before the first agreement: all raise, naming rank 2 and the key; the next save works (F31)."""
    cluster = clusters(2)
    job = jobs(cluster, "programs:fails_at_start", per_node=2, options={**run_of(cluster, "shared"), "how": "state", "who": 2})
    lines = job.all_said("refused", timeout_s=30)
    assert {line["error"] for line in lines} == {"StateError"}
    assert all("deep" in line["message"] for line in lines)
    assert all("rank 2" in line["message"] for rank, line in enumerate(lines) if rank != 2), lines
    assert {line["outcome"] for line in job.all_said("again", timeout_s=30)} <= {"memory", "disk"}
    job.all_said("over")


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_does_not_come_is_named(clusters, jobs, how):
    """Rank 1 raises, or is killed, before the first save: the others raise within the time-out and name it (F31)."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "how": how, "who": 1, "timeout_s": 3.0}
    job = jobs(cluster, "programs:fails_at_start", per_node=2, options=options)
    lines = job.all_said("refused", ranks=[0, 2, 3], timeout_s=30)
    assert all("rank 1" in line["message"] for line in lines), lines
    assert all(line["hint"] for line in lines)
    waited = max(line["at"] for rank in (0, 2, 3) for line in job.ranks[rank].said("refused")) - max(
        line["at"] for rank in (0, 2, 3) for line in job.ranks[rank].said("ready")
    )
    assert waited < 15


def test_saves_and_all_reduces_in_any_order(clusters, jobs):
    """Each rank has another order of saves and all-reduces, some still under way: nothing hangs, and the last step is on disk (F33)."""
    cluster = clusters(2)
    options = run_of(cluster, "shared")
    job = jobs(cluster, "programs:interleaved", per_node=2, options={**options, "rounds": 8})
    job.all_said("saved", timeout_s=60)
    job.finished()
    for node in cluster.nodes:
        node.kill_agents()
    again = jobs(cluster, per_node=2, options={**options, "layout": "fsdp", "steps": 0})
    restored(again, lived(job), step=10, tier="disk")


def test_ranks_with_another_view_of_the_store_take_one_step(clusters, jobs):
    """Some ranks do not see the newest manifests: all restore the same step, with its right values (F34)."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "keep": None}
    saved = jobs(cluster, per_node=2, options={**options, "steps": 4, "wait": "disk"})
    saved.finished()
    for node in cluster.nodes:
        node.kill_agents()
    for blind in ([0], [1, 3], [2]):
        job = jobs(cluster, "programs:sees_less", per_node=2, options={**options, "blind": blind, "newest": 3})
        assert restored(job, lived(saved)) in (2, 3, 4)
        job.finished()


def test_a_rank_that_crashes_while_it_copies(clusters, jobs):
    """Rank 3 dies of SIGSEGV between lease and seal: the others are told, nothing of that step is kept, the one before is restored (F36)."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "disk": False}
    job = jobs(cluster, "programs:dies_leasing", per_node=2, options={**options, "who": 3, "at": 3})
    job.ended(ranks=[3])
    assert job.ranks[3].status == -signal.SIGSEGV
    outcomes = job.all_said("outcome", ranks=[0, 1, 2], timeout_s=40)
    # Skipped: the other node had heard of it before it asked for a slab.
    assert all(line["outcome"] in {"failed", "skipped"} and "rank 3" in line["reason"] for line in outcomes), outcomes
    job.kill()
    again = jobs(cluster, per_node=2, options={**options, "layout": "copies", "steps": 0})
    restored(again, lived(job), step=2, tier="memory")
    again.finished()


def test_two_jobs_on_one_run(clusters, jobs):
    """A second job on the run of a living one is refused on all its ranks, with the reason; the first one is not disturbed."""
    cluster = clusters(2)
    options = run_of(cluster, "shared")
    first = jobs(cluster, per_node=2, options={**options, "layout": "copies", "steps": 4, "wait": "memory", "pause_at": [2]})
    first.all_said("paused")
    second = jobs(cluster, "programs:two_jobs", per_node=2, options=options)
    lines = second.all_said("refused", timeout_s=30)
    assert {line["error"] for line in lines} == {"ConflictError"}, lines
    second.finished()
    for rank in first.ranks:
        rank.tell(go=True)
    assert all(line["failures"] == [] for line in first.all_said("done"))
    first.finished()
    assert manifests(cluster.shared / "run")[-1].startswith("000000000004")


def test_one_rank_alone_changes_its_structure(clusters, jobs):
    """A buffer that only rank 1 has so long: nobody hangs, steps go on being saved, and every rank gets its own buffer back."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "who": 1, "at": 3}
    job = jobs(cluster, "programs:changes_alone", per_node=2, options={**options, "steps": 5})
    job.finished()
    assert all(rank.said("saved")[-1]["outcome"] in {"memory", "disk", "superseded"} for rank in job.ranks)
    again = jobs(cluster, "programs:changes_alone", per_node=2, options={**options, "steps": 0})
    restored(again, lived(job), step=5)
    assert [rank.said("restored")[0]["held"] for rank in again.ranks] == [lived(job)[rank.rank, 5]["held"] for rank in again.ranks]
