"""Host memory beside the slabs while a large state is written, and the extra peak of restoring it."""

from __future__ import annotations

import argparse
import os

import torch
from _common import MemoryWatch, Results, main, own_nbytes, peak_rss, reset_peak_rss, say

import everystep
from everystep.demo.watch import agent_of


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Write, then restore."""
    nbytes = (256 if arguments.quick else 2048) << 20
    count = 16
    run = arguments.folder / "run"
    state = {"tensors": {f"t{index:02}": torch.full((nbytes // 4 // count,), float(index)) for index in range(count)}}
    pids = [os.getpid()]
    with everystep.Checkpointer(run, keep=everystep.Keep(last=1)) as ckpt:
        # The state is there, and everything is imported: what comes on top of it, and all of the agent, counts.
        before, _ = own_nbytes(os.getpid())
        with MemoryWatch(lambda: pids) as watch:
            for step in range(3):
                say(f"writing {nbytes >> 20} MiB, {step + 1} of 3")
                pending = ckpt.save(step, state)
                if len(pids) == 1:
                    agent = agent_of(run)
                    pids += [agent] if agent else []
                pending.wait("disk")
    extra = watch.peak - before
    results.row("slabs (shared memory of trainer and agent)", [watch.shared_peak], "B")
    name = "trainer's growth and all of the agent, at the peak, without slabs"
    results.row(name, [extra], "B", samples=watch.samples, agent=len(pids) > 1)
    results.bar("host memory while writing, MiB beside the slabs", extra / 2**20, 128.0, why="" if len(pids) > 1 else "no agent was found")
    results.row("slabs, times the state", [watch.shared_peak / nbytes], "x")

    for tensor in state["tensors"].values():
        tensor.fill_(float("nan"))
    with everystep.Checkpointer(run) as ckpt:
        resident = reset_peak_rss()
        say(f"restoring {nbytes >> 20} MiB")
        ckpt.restore(state)
        grown = peak_rss() - resident
        tier = ckpt.restored_from.tier if ckpt.restored_from else ""
    right = tier == "disk" and all(bool((state["tensors"][f"t{index:02}"] == float(index)).all()) for index in range(count))
    results.row("restore from disk: extra peak of resident memory", [grown], "B")
    results.bar("restore from disk: extra peak, MiB", grown / 2**20, 128.0)
    results.bar("restored equal", float(right), 1.0, at_most=False)


if __name__ == "__main__":
    main("Host memory", measure)
