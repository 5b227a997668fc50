"""What the ranks of the tests of consolidation do."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from train import Training, begin, opened

import everystep


def trains(voice: Any, *, path: str, layout: str = "fsdp", steps: int = 3, group_timeout_s: float = 30.0, long_s: float = 0.0, ask: bool = False,
           raises: int | None = None, consolidate: Any = "final", **options: Any) -> None:  # fmt: skip
    """Train and save; with ``ask`` every rank asks for an export of step 2, and then trains for ``long_s``; told are what it was given and the end of close."""
    rank, _ = begin(timeout_s=group_timeout_s)
    training = Training(layout)
    ckpt = opened(path, consolidate=consolidate, **options)
    with ckpt:
        found = ckpt.restore(training.state) or 0
        for step in range(found + 1, found + steps + 1):
            training.step()
            ckpt.save(step, training.state).wait("memory", 30)
            if ask and step == 2:
                pending = ckpt.consolidate()
                voice.tell("asked", step=step)
                began = time.monotonic()
                longest_s = count = 0.0
                more = torch.ones(())
                while more > 0:  # collectives as in training, all the while
                    before = time.monotonic()
                    training.step()
                    more = torch.tensor(float(time.monotonic() < began + long_s))
                    dist.all_reduce(more)
                    longest_s, count = max(longest_s, time.monotonic() - before), count + 1
                voice.tell("trained on", steps=count, longest_s=longest_s, done=pending.done(), seconds=time.monotonic() - began)
        if raises == rank:
            raise ZeroDivisionError("at the end")
        ckpt.wait(30)
        voice.tell("closing", step=step)
    told = {"path": pending.wait(10)} if ask else {}
    voice.tell("closed", **told)
    dist.barrier()
    dist.destroy_process_group()


def closes_alone(voice: Any, *, path: str) -> None:
    """Rank 0 closes a checkpointer that has done nothing, and then meets the other rank, which does it the other way round."""
    rank, _ = begin()
    ckpt = opened(path, consolidate="final")
    if rank:
        dist.barrier()
    ckpt.close()
    voice.tell("closed")
    if not rank:
        dist.barrier()
    dist.destroy_process_group()


def apart(voice: Any, *, path: str, **options: Any) -> None:
    """Save once, with a schedule, where each node may have a store of its own; what came of it is told."""
    begin()
    training = Training("fsdp")
    ckpt = opened(path, **options)
    try:
        ckpt.save(1, training.state).wait("memory", 30)
        voice.tell("saved")
        pending = ckpt.consolidate()
        voice.tell("asked", path=pending.path)
    except everystep.CheckpointError as error:
        voice.tell("refused", error=type(error).__name__, message=str(error), kind=error.kind)
    ckpt.close()
    voice.tell("closed")
    dist.barrier()
    dist.destroy_process_group()
