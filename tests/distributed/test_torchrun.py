"""The same by torchrun itself, on two nodes: what it sets, how it ends ranks, how it restarts them."""

from __future__ import annotations

import pytest
from checks import acknowledged, lived, restored, run_of


@pytest.mark.timeout(300)
def test_torchrun_restarts_a_killed_rank(clusters, jobs):
    """A rank is killed; torchrun ends the others, starts all again, and they go on from memory bit by bit, up to the last step."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "shared"), "layout": "fsdp", "until": 8, "pause_at": [4]}
    job = jobs(cluster, per_node=2, options=options, torchrun=("--max-restarts", "2"))
    job.all_said("paused", timeout_s=90)
    job.wait(lambda: acknowledged(job, "memory") >= 3, what="an acknowledged step")
    known = lived(job)
    job.ranks[3].kill()
    job.wait(lambda: len(job.earlier) >= 4 and all(rank.said("restored") for rank in job.ranks), what="the ranks' second life", timeout_s=120)
    first = restored(job, known)
    assert first >= 3
    if first < 4:
        job.all_said("paused", timeout_s=60)
    for rank in job.ranks:
        rank.tell(go=True)
    job.finished(timeout_s=90)
    assert {rank.said("done")[0]["step"] for rank in job.ranks} == {8}
