"""A kill campaign: real trainers (forked from one process that has torch loaded) and the real agent are killed with -9 at random moments.

Run: python campaign.py DIR ROUNDS SEED. After every kill the next trainer restores, and what it restored is compared with the trajectory of an
uninterrupted run, bit by bit; nothing that was acknowledged may be lost. Prints one JSON line; exit code 1 on a violation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import everystep

STEPS_A_LIFE = 400


class Training:
    """A tiny deterministic training: model, fused AdamW, scheduler, data drawn from a generator that is part of the state."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 5, 0.99)
        self.count = {"seen": 0}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim, "sched": self.sched, "rng": everystep.RNG(), "count": self.count}

    def step(self) -> None:
        loss = self.model(torch.randn(16, 32)).pow(2).mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.sched.step()
        self.count["seen"] += 16

    def digest(self) -> str:
        found = hashlib.sha1(str((self.count["seen"], self.sched.get_last_lr())).encode())
        for tensor in self.model.state_dict().values():
            found.update(tensor.detach().numpy().tobytes())
        for values in self.optim.state.values():
            for value in values.values():
                found.update(value.detach().numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()


def reference() -> Iterator[str]:
    """Digests of the uninterrupted run at step 0, 1, 2, ..."""
    torch.manual_seed(7)
    training = Training()
    state = torch.get_rng_state()
    while True:
        yield training.digest()
        torch.set_rng_state(state)
        training.step()
        state = torch.get_rng_state()


def life(folder: str, say: int) -> None:
    """One trainer: restore, say what was found, train and save until killed. Says only what was acknowledged."""

    def tell(**what: Any) -> None:
        os.write(say, json.dumps(what).encode() + b"\n")

    training = Training()
    checkpointer = everystep.Checkpointer(folder, cadence=everystep.Cadence(disk=None))
    step = checkpointer.restore(training.state) or 0
    where = checkpointer.restored_from
    tell(what="restored", step=step, digest=training.digest(), tier=where.tier if where else "")
    if os.environ.get("CAMPAIGN_DEBUG"):
        print(step, where, checkpointer._run.client, file=sys.stderr, flush=True)
    waiting: list[everystep.Pending] = []
    first = step + 1
    for step in range(first, first + STEPS_A_LIFE):
        training.step()
        waiting.append(checkpointer.save(step, training.state))
        if checkpointer._run.client is not None and checkpointer._run.client.alive:
            tell(what="agent", pid=checkpointer._run.client.welcome.pid)
        for pending in list(waiting):
            if pending.report.tier:
                tell(what="acknowledged", step=pending.step, tier=pending.report.tier)
            if pending.done():
                waiting.remove(pending)
    os._exit(0)


_rest: dict[int, bytes] = {}


def read_lines(fd: int, until: float) -> Iterator[dict[str, Any]]:
    """Lines from the child up to a moment, or up to its end; half a line is kept for the next call."""
    while True:
        data = _rest.get(fd, b"")
        if b"\n" in data:
            line, _rest[fd] = data.split(b"\n", 1)
            yield json.loads(line)
            continue
        left = until - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return
        got = os.read(fd, 65536)
        if not got:
            return
        _rest[fd] = data + got


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def campaign(folder: str, rounds: int, seed: int) -> dict[str, Any]:
    """Run it; returns counts, and under ``violations`` whatever was lost or wrong."""
    chance = random.Random(seed)
    truth = reference()
    known: list[str] = []
    counts = {"rounds": 0, "trainer": 0, "agent": 0, "both": 0, "from_memory": 0, "from_disk": 0, "from_nothing": 0, "lost_steps": 0}
    violations: list[str] = []
    sealed = durable = agent = 0
    for number in range(rounds):
        what = chance.choices(["trainer", "agent", "both"], [6, 2, 2])[0]
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            with contextlib.suppress(BrokenPipeError):
                life(folder, theirs)
            os._exit(0)
        os.close(theirs)
        lines = read_lines(ours, time.monotonic() + 30)
        first = next(lines, None)
        if first is None or first["what"] != "restored":
            violations.append(f"round {number}: the trainer ended or hung before it had restored: {first}")
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        while len(known) <= first["step"]:
            known.append(next(truth))
        if first["digest"] != known[first["step"]]:
            violations.append(f"round {number}: step {first['step']} from {first['tier']} differs from the uninterrupted run")
        floor = max(durable, sealed)
        if first["step"] < floor:
            violations.append(f"round {number}: restored step {first['step']} from {first['tier'] or 'nothing'}, acknowledged were {sealed} (memory) {durable} (disk)")
        counts["from_" + (first["tier"] or "nothing")] += 1
        counts["lost_steps"] += max(0, sealed - first["step"])
        sealed = 0
        seen = []
        if chance.random() < 0.85:  # else it may die before its first save
            for line in read_lines(ours, time.monotonic() + 30):
                seen.append(line)
                if line["what"] == "acknowledged":
                    break
        seen.extend(read_lines(ours, time.monotonic() + chance.expovariate(1 / 0.1)))
        agent = next((line["pid"] for line in reversed(seen) if line["what"] == "agent"), agent)
        if what in ("agent", "both") and agent and alive(agent):
            os.kill(agent, signal.SIGKILL)
        if what == "agent":
            seen.extend(read_lines(ours, time.monotonic() + 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.extend(read_lines(ours, time.monotonic() + 5))
        os.close(ours)
        _rest.pop(ours, None)
        for line in seen:
            if line["what"] == "agent":
                agent = line["pid"]
            elif line["what"] == "acknowledged":
                sealed = max(sealed, line["step"])
                if line["tier"] == "disk":
                    durable = max(durable, line["step"])
        if what == "both" and agent and alive(agent):
            os.kill(agent, signal.SIGKILL)
        if what in ("agent", "both"):
            sealed = 0 if what == "both" else sealed
            if what == "agent":
                # Which agent acknowledged what is not known from outside: only the disk counts when one died in between.
                sealed = 0
        counts["rounds"] += 1
        counts[what] += 1
    if agent and alive(agent):
        os.kill(agent, signal.SIGKILL)
    return {**counts, "violations": violations}


if __name__ == "__main__":
    result = campaign(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(result), flush=True)
    os._exit(1 if result["violations"] else 0)
