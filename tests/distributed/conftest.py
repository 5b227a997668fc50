"""Clusters and jobs for the many-rank tests: one process to fork ranks from, nodes as namespaces, reference runs that are computed once.

``launch`` has the processes, ``nodes`` the nodes, ``train`` what the ranks do, ``programs`` what some tests have them do instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # tests are no package, and the ranks import the same modules by name

from launch import Job, Launcher
from nodes import Cluster, why_not_isolated


@pytest.fixture(scope="session")
def launcher():
    """The process that ranks are forked from, for all tests of the session."""
    with Launcher() as made:
        yield made


@pytest.fixture
def clusters():
    """Makes clusters that are gone after the test. ``isolated=True`` skips the test where there can be none."""
    made: list[Cluster] = []

    def make(count: int = 2, *, isolated: bool | None = None) -> Cluster:
        reason = why_not_isolated()
        if isolated and reason:
            pytest.skip(f"nodes need networks of their own: {reason}")
        made.append(Cluster(count, isolated=not reason if isolated is None else isolated))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def jobs(launcher):
    """Starts jobs that are over after the test."""
    made: list[Job] = []

    def start(cluster: Cluster, program: str = "train:run", **more) -> Job:
        made.append(Job(launcher, cluster, program, **more))
        return made[-1]

    yield start
    for job in made:
        job.close()


@pytest.fixture(scope="session")
def trajectory(launcher):
    """``trajectory(layout, world, steps)``: {(rank, step): line} of the uninterrupted run, computed once for each layout and world."""
    known: dict[tuple[str, int, int, bool], dict[tuple[int, int], dict]] = {}

    def found(layout: str, world: int, steps: int, *, full: bool = False) -> dict[tuple[int, int], dict]:
        key = layout, world, steps, full
        if key not in known:
            with Cluster(1, isolated=False) as cluster:
                job = Job(launcher, cluster, "train:trajectory", per_node=world, options={"layout": layout, "steps": steps, "full": full})
                with job:
                    job.finished()
                    known[key] = {(rank.rank, line["step"]): line for rank in job.ranks for line in rank.said("step")}
        return known[key]

    return found
