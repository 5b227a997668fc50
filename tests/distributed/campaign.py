"""Rounds of killing a random rank, agent or node at a random moment, on 4 ranks and 2 nodes: always a restore, never a wrong value, what is lost is told.

Run by hand: ``python campaign.py ROUNDS SEED``; prints one JSON line, exit code 1 on a violation. Every round starts all ranks (forked: about two seconds), which
restore and train on, saving every step, until something is killed:

- ``rank``: one rank, then the others, as torchrun does. What any rank was told to be safe in memory must be restored.
- ``agent``: one node's agent; the ranks have to go on by themselves and get a newer step acknowledged, which must be restored.
- ``node``: all ranks of a node and its agent at once, and half of the times its disk and its identity for good: another node takes its place. The peer's copy or
  the disk must have at least what was acknowledged on disk.

A restored step is compared, rank by rank and bit by bit, with what the rank that saved it held then; at the end all steps up to a limit are compared with a run
that was never interrupted and knows nothing of everystep.
"""

from __future__ import annotations

import collections
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checks import acknowledged, lived
from launch import Job, Launcher
from nodes import Cluster, why_not_isolated

COMPARED_STEPS = 200
SILENT_STEPS = 20


class Campaign:
    """State of the rounds: what is known of each step, and what has to be there."""

    def __init__(self, launcher: Launcher, cluster: Cluster, *, seed: int, layout: str = "fsdp", replicas: int = 1, say: bool = False) -> None:
        self._launcher = launcher
        self._cluster = cluster
        self._chance = random.Random(seed)
        self._say = say
        self._layout = layout
        self._options = {
            "path": str(cluster.shared / "run"),
            "layout": layout,
            "until": 1 << 40,
            "replicas": replicas,
            "idle_s": 30.0,
            "max_failing_s": 600.0,
        }
        self._known: dict[tuple[int, int], dict[str, Any]] = {}
        self._memory = self._disk = 0
        self._newest = 0
        """The newest step that every rank had saved, or was about to, when the last life ended."""
        self._last = ""
        self.counts: collections.Counter[str] = collections.Counter()
        self.lost: dict[str, list[int]] = {"rank": [], "agent": [], "node": []}
        self.violations: list[str] = []
        self.seconds: list[float] = []

    def round(self, number: int, *, last: bool = False) -> None:
        """One life of all ranks, and its end."""
        began = time.monotonic()
        what = self._chance.choices(["rank", "agent", "node"], [4, 3, 3])[0]
        with Job(
            self._launcher,
            self._cluster,
            "train:run",
            per_node=2,
            options={**self._options, **({"steps": 0, "until": None} if last else {})},
        ) as job:
            self._look(job, number)
            if last:
                job.finished()
                return
            if self._chance.random() < 0.85:  # else it may come before the first save
                job.wait(lambda: acknowledged(job, "memory"), what="a step in memory", timeout_s=60)
            job.linger(self._chance.expovariate(1 / 0.2))
            getattr(self, f"_kill_{what}")(job)
            self._known.update(lived(job))
            steps = [max((line["step"] for line in rank.said("step")), default=0) for rank in job.ranks]
            self._newest = max(min(steps), self._newest if not max(steps) else 0)
            self._disk = max(self._disk, acknowledged(job, "disk"))
            self._note_silence(job, number, max(steps))
        self._last = what
        self.counts[what] += 1
        self.seconds.append(time.monotonic() - began)
        if self._say:
            sys.stderr.write(f"round {number}: {what}, {self.seconds[-1]:.1f} s, newest step {self._newest}, on disk {self._disk}\n")

    def _look(self, job: Job, number: int) -> None:
        """What the ranks restored, against what is known and what was acknowledged."""
        lines = job.all_said("restored", timeout_s=60)
        found = {(line["step"], line["tier"]) for line in lines}
        steps = {step for step, _ in found}
        if len(steps) != 1:
            self._violated(number, f"ranks restored different steps: {sorted(found)}", job)
            return
        [step] = steps
        wrong = [rank for rank, line in enumerate(lines) if step and self._known[rank, step]["digest"] != line["digest"]]
        if wrong:
            self._violated(number, f"step {step} from {sorted(found)} differs on ranks {wrong}", job)
        floor = max(self._memory, self._disk)
        if step < floor:
            told = f"memory {self._memory}, disk {self._disk}"
            self._violated(
                number, f"restored step {step} after a kill of {self._last}; acknowledged were {told}; {lines[0]['skipped']}", job
            )
        self.counts["from_" + (max(tier for _, tier in found) or "nothing")] += 1
        if self._last:
            self.lost[self._last].append(max(0, self._newest - step))
        self._memory = 0

    def _note_silence(self, job: Job, number: int, newest: int) -> None:
        """How many steps of this life were not acknowledged in memory when it ended."""
        silent = newest - max(acknowledged(job, "memory"), min((line["step"] for line in job.ranks[0].said("restored")), default=0))
        self.counts["most_unacknowledged"] = max(self.counts["most_unacknowledged"], silent)
        if silent > SILENT_STEPS and self._say:
            reasons = collections.Counter(line["reason"] for rank in job.ranks for line in rank.said("acknowledged") if not line["tier"])
            sys.stderr.write(f"round {number}: {silent} steps without an acknowledgement; {reasons.most_common(6)}\n{job.report()}\n")

    def _violated(self, number: int, text: str, job: Job) -> None:
        self.violations.append(f"round {number}: {text}")
        sys.stderr.write(f"{self.violations[-1]}\n{job.report()}\n")

    # -- the kinds of end --------------------------------------------------------------------------------------------------------
    def _kill_rank(self, job: Job) -> None:
        victim = self._chance.randrange(job.world)
        job.ranks[victim].kill()
        job.ended(ranks=[victim])
        job.linger(self._chance.choice([0.0, 0.05, 0.3]))
        job.kill()
        self._memory = acknowledged(job, "memory")

    def _kill_agent(self, job: Job) -> None:
        node = self._chance.choice(self._cluster.nodes)
        node.kill_agents()
        at_kill = max((line["step"] for rank in job.ranks for line in rank.said("step")), default=0)
        # Steps begun after the kill were sealed by the agents that live now.
        job.wait(
            lambda: acknowledged(job, "memory") > at_kill + 1,
            what=f"a step after {at_kill + 1} in memory, after a killed agent",
            timeout_s=60,
        )
        job.linger(self._chance.expovariate(1 / 0.1))
        job.kill()
        self._memory = acknowledged(job, "memory")

    def _kill_node(self, job: Job) -> None:
        index = self._chance.randrange(len(self._cluster.nodes))
        node = self._cluster.nodes[index]
        node.kill()
        if self._cluster.isolated and self._chance.random() < 0.5:
            self._cluster.lose(node)
            self._cluster.nodes.remove(fresh := self._cluster.add())
            self._cluster.nodes.insert(index, fresh)
            self.counts["replaced"] += 1
        job.linger(self._chance.choice([0.0, 0.2]))
        job.kill()
        self._memory = 0  # the peer's copy comes after the acknowledgement: only the disk is promised

    # -- the end -----------------------------------------------------------------------------------------------------------------
    def compare(self) -> None:
        """All that was saved against an uninterrupted run."""
        steps = min(COMPARED_STEPS, max((step for _, step in self._known), default=0))
        with Job(self._launcher, self._cluster, "train:trajectory", per_node=2, options={"layout": self._layout, "steps": steps}) as job:
            job.finished(timeout_s=300)
            for place, line in lived(job).items():
                if place in self._known and self._known[place]["digest"] != line["digest"]:
                    self.violations.append(f"rank {place[0]} at step {place[1]} was not what the uninterrupted run has")
        self.counts["compared_steps"] = steps

    def result(self) -> dict[str, Any]:
        """Counts, steps lost by kind of kill, and violations."""
        lost = {kind: {"total": sum(steps), "most": max(steps, default=0), "rounds": len(steps)} for kind, steps in self.lost.items()}
        return {
            **self.counts,
            "lost_steps": lost,
            "s_a_round": round(sum(self.seconds) / max(1, len(self.seconds)), 2),
            "violations": self.violations,
        }


def campaign(launcher: Launcher, *, rounds: int, seed: int, **more: Any) -> dict[str, Any]:
    """Run it; stops at the first violation. Returns ``Campaign.result()``."""
    with Cluster(2, isolated=not why_not_isolated()) as cluster:
        made = Campaign(launcher, cluster, seed=seed, **more)
        for number in range(rounds):
            made.round(number)
            if made.violations:
                break
        if not made.violations:
            made.round(rounds, last=True)
            made.compare()
        return {"rounds": len(made.seconds), "seed": seed, **made.result()}


if __name__ == "__main__":
    with Launcher() as one:
        told = campaign(one, rounds=int(sys.argv[1]), seed=int(sys.argv[2]), say=True)
    print(json.dumps(told), flush=True)
    sys.exit(1 if told["violations"] else 0)
