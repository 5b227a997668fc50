"""What the many-rank tests compare, and how they look at a run from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch import Job
from nodes import Cluster, Node

Lived = dict[tuple[int, int], dict[str, Any]]


def lived(*jobs: Job) -> Lived:
    """{(rank, step): what it told before it saved that step}, later jobs over earlier ones."""
    return {(rank.rank, line["step"]): line for job in jobs for rank in job.ranks for line in rank.said("step")}


def restored(job: Job, known: Lived | None = None, *, step: int | None = None, tier: str | tuple[str, ...] | None = None, key: str = "digest",
             timeout_s: float = 60.0) -> int:  # fmt: skip
    """Wait until all ranks have restored; all the same step, from ``tier``, and bit by bit what is known of it. Returns the step."""
    lines = job.all_said("restored", timeout_s=timeout_s)
    steps = {line["step"] for line in lines}
    assert len(steps) == 1, f"ranks restored different steps: {[line['step'] for line in lines]}\n{job.report()}"
    [found] = steps
    assert step is None or found == step, f"restored step {found} instead of {step}: {lines}\n{job.report()}"
    tiers = {line["tier"] for line in lines}
    allowed = {tier} if isinstance(tier, str) else set(tier or tiers)
    assert tiers <= allowed, f"restored from {tiers} instead of {allowed}: {lines}\n{job.report()}"
    if known is not None:
        wrong = [rank for rank, line in enumerate(lines) if line[key] != known[rank, found][key]]
        assert not wrong, f"step {found} differs on ranks {wrong}\n{job.report()}"
    return found


def acknowledged(job: Job, tier: str) -> int:
    """The newest step of which some rank was told that it is safe in ``tier`` (``memory`` counts ``disk`` as well)."""
    allowed = ("disk",) if tier == "disk" else ("memory", "disk")
    return max((line["step"] for rank in job.ranks for line in rank.said("acknowledged") if line["tier"] in allowed), default=0)


def everystep(node: Node | None, *arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """The command line, on a node."""
    import os

    environment = {**os.environ, **(node.environment if node else {})}
    done = subprocess.run([*(node.prefix if node else []), sys.executable, "-m", "everystep.cli", *arguments], env=environment, capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert not ok or done.returncode == 0, f"everystep {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def as_json(node: Node | None, *arguments: str) -> Any:
    """What a command prints with ``--json``."""
    return json.loads(everystep(node, *arguments, "--json").stdout)


def manifests(run: Path, node: Node | None = None) -> list[str]:
    """Keys of committed checkpoints, by the names of their manifests."""
    names = node.names(run / "manifests") if node is not None else [path.name for path in (run / "manifests").glob("*")]
    return sorted(name.removesuffix(".json") for name in names)


def until(look: Any, *, what: str, tries: int = 100) -> Any:
    """Look again and again at something that gives no event, each look starting a process or a request, which is pause enough."""
    for _ in range(tries):
        found = look()
        if found:
            return found
    raise AssertionError(f"{what} did not come")


def run_of(cluster: Cluster, kind: str) -> dict[str, Any]:
    """Where a job's run lies: arguments for ``jobs(...)``. ``kind``: ``shared`` or ``local`` (a disk of its own on every node)."""
    return {"path": str((cluster.shared if kind == "shared" else cluster.nodes[0].local) / "run")}
