"""A training whose data order is part of its state: trained once without a break, and once with lives that end by kill -9.

Run: python sampling.py RUN. Prints one JSON document: the steps of the training without checkpoints, and for each life what it restored and its
steps. Lives are forked from this process, which has torch loaded and no threads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import everystep

SAMPLES, BATCH, EPOCHS = 28, 4, 3


class Loader:
    """Each sample once an epoch, in an order drawn from a generator of its own; its state says where it is."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)
        self.epoch, self.at, self.order = 0, 0, torch.randperm(SAMPLES, generator=self.generator)

    def batch(self) -> torch.Tensor:
        """The rows of the next batch."""
        if self.at == SAMPLES:
            self.epoch, self.at, self.order = self.epoch + 1, 0, torch.randperm(SAMPLES, generator=self.generator)
        self.at += BATCH
        return self.order[self.at - BATCH : self.at]

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"epoch": self.epoch, "at": self.at, "order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.at, self.order = state["epoch"], state["at"], state["order"].clone()
        self.generator.set_state(state["generator"])


def train(run: str, say: Callable[..., None]) -> None:
    """Train to the end, from the newest checkpoint of ``run`` (empty: without checkpoints)."""
    torch.manual_seed(5)
    data = torch.randn(SAMPLES, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 21)
    loader = Loader()
    torch.manual_seed(6)
    state = {"model": model, "optim": optim, "sched": sched, "loader": loader, "rng": everystep.RNG()}
    ckpt = everystep.Checkpointer(run) if run else None
    step = (ckpt.restore(state) or 0) if ckpt else 0
    say("restored", step=step, tier=ckpt.restored_from.tier if ckpt and ckpt.restored_from else "")
    while step < EPOCHS * SAMPLES // BATCH:
        rows = loader.batch()
        loss = model(data[rows]).pow(2).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        sched.step()
        step += 1
        if ckpt:
            ckpt.save(step, state)
        agent = ckpt._run.client.welcome.pid if ckpt and ckpt._run.client else 0
        say("step", step=step, epoch=loader.epoch, rows=rows.tolist(), loss=loss.item().hex(), agent=agent)
    if ckpt:
        ckpt.close()


LIVES = ((4, False), (10, True), (16, False), (None, False))
"""After which step each life is killed, and whether its agent is too."""


def life(run: str, kill_after: int | None, *, agent_too: bool) -> list[dict[str, Any]]:
    """One life of the training; returns what it said before it was killed or ended."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        train(run, lambda word, **what: os.write(theirs, json.dumps({"what": word, **what}).encode() + b"\n"))
        os._exit(0)
    os.close(theirs)
    said = []
    with os.fdopen(ours) as lines:
        for line in lines:
            said.append(json.loads(line))
            if kill_after is not None and said[-1]["what"] == "step" and said[-1]["step"] >= kill_after:
                if agent_too:
                    agent = os.pidfd_open(said[-1]["agent"])
                    os.kill(said[-1]["agent"], signal.SIGKILL)
                    select.select([agent], [], [], 10)
                    os.close(agent)
                os.kill(child, signal.SIGKILL)
                break
    _, status = os.waitpid(child, 0)
    if status != (0 if kill_after is None else signal.SIGKILL):
        raise SystemExit(f"a life ended with status {status}")
    return said


if __name__ == "__main__":
    plain: list[dict[str, Any]] = []
    train(
        "", lambda word, **what: plain.append(what) if word == "step" else None
    )  # first: what torch loads late is there for the lives too
    lives = [life(sys.argv[1], kill_after, agent_too=agent_too) for kill_after, agent_too in LIVES]
    print(json.dumps({"plain": plain, "lives": lives}), flush=True)
