"""Measures what a checkpoint at every step costs: everystep to memory and to disk, torch.save and DCP async_save, in turn, in one process.

Theory of operation: the modes take turns in short blocks (A B C D E, then again; torch.save and DCP in fewer rounds where time is
short), so that whatever else the machine does falls on all of them alike. A block begins with untimed saves, because the first ones of any
system allocate; the timed steps follow, and the block ends, untimed, when its last save is durable. A stall is everything the training
loop waited for: the call, and the fence before the optimizer's step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver as dcp

import everystep
from everystep.demo.model import build
from everystep.demo.sizes import SIZES
from everystep.demo.text import Loader, read_text
from everystep.demo.trainer import FenceClock, emit

OWN = ("none", "memory", "disk")
"""The modes of which as many rounds are measured as there is time for; the others' are left out first."""
_ENOUGH_ROUNDS = 5
_WARM = 3
"""Untimed saves of a block: everystep has three slabs, and fills each for the first time."""

State = dict[str, Any]
Save = Callable[[int, State], object]
Wait = Callable[[], object]


@contextlib.contextmanager
def nothing(_: pathlib.Path) -> Iterator[tuple[Save, Wait]]:
    """No checkpoints."""
    yield (lambda *_: None), (lambda: None)


@contextlib.contextmanager
def every_step(folder: pathlib.Path, *, disk: bool) -> Iterator[tuple[Save, Wait]]:
    """everystep, to memory or to disk as well."""
    with everystep.Checkpointer(folder, cadence=everystep.Cadence(disk=None if disk else False)) as ckpt:
        last: list[everystep.Pending] = []

        def save(step: int, state: State) -> None:
            last[:] = [ckpt.save(step, state)]

        def wait() -> None:
            last[0].wait("disk" if disk else "memory")

        yield save, wait


def state_dicts(state: State) -> dict[str, Any]:
    """What torch.save and DCP take."""
    return {name: entry.state_dict() for name, entry in state.items()}


@contextlib.contextmanager
def torch_save(folder: pathlib.Path) -> Iterator[tuple[Save, Wait]]:
    """torch.save inside the loop; durable after an fsync, which is not counted as stall."""
    folder.mkdir(parents=True)
    last = [folder / "0.pt"]

    def save(step: int, state: State) -> None:
        last[0] = folder / f"{step % 2}.pt"
        torch.save(state_dicts(state), last[0])

    def wait() -> None:
        with last[0].open("rb") as file:
            os.fsync(file.fileno())

    yield save, wait


@contextlib.contextmanager
def dcp_async(folder: pathlib.Path) -> Iterator[tuple[Save, Wait]]:
    """torch.distributed.checkpoint.async_save; the previous one is waited for first, as its documentation asks."""
    last: list[Any] = []

    def wait() -> None:
        if last:
            last.pop().result()

    def save(step: int, state: State) -> None:
        wait()
        last.append(dcp.async_save(state_dicts(state), checkpoint_id=folder / str(step % 2), no_dist=True))

    yield save, wait
    wait()


MODES: dict[str, Callable[[pathlib.Path], contextlib.AbstractContextManager[tuple[Save, Wait]]]] = {
    "none": nothing,
    "memory": lambda folder: every_step(folder, disk=False),
    "disk": lambda folder: every_step(folder, disk=True),
    "torch": torch_save,
    "dcp": dcp_async,
}


def modes_of_round(costs: dict[str, float], *, rounds: int, left_s: float) -> list[str]:
    """Which modes the next round has, given what a block of each took: all, everystep's and none, or nothing when there is no time.

    The first round has all. After it the others get another block only where there is still time for enough rounds of everystep's.
    """
    if not rounds:
        return list(MODES)
    own, everything = sum(costs[mode] for mode in OWN), sum(costs.values())
    if left_s >= everything + own * max(0, _ENOUGH_ROUNDS - rounds - 1):
        return list(MODES)
    return list(OWN) if left_s >= own else []


def compare(arguments: argparse.Namespace) -> None:
    """Rounds of the modes while there is time for one more (one at least)."""
    size = SIZES[arguments.size]
    torch.set_num_threads(arguments.threads)
    model, optimizer, scheduler = build(size, steps=10_000)
    loader = Loader(read_text(), batch=size.batch, context=size.context, seed=2)
    fence = FenceClock(optimizer)
    state: State = {"model": model, "optim": optimizer, "sched": scheduler, "loader": loader, "rng": everystep.RNG()}
    step = 0

    def train() -> None:
        nonlocal step
        model.loss(*loader.next()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        step += 1

    for _ in range(3):
        train()
    began, rounds = time.perf_counter(), 0
    costs: dict[str, float] = {}
    while order := modes_of_round(costs, rounds=rounds, left_s=arguments.seconds - (time.perf_counter() - began)):
        for mode in order[rounds % len(order) :] + order[: rounds % len(order)]:
            block = time.perf_counter()
            folder = arguments.folder / f"{mode}-{rounds}"
            with MODES[mode](folder) as (save, wait):
                for _ in range(_WARM):
                    train()
                    save(step, state)
                    wait()
                for _ in range(arguments.steps):
                    fence.seconds = 0.0
                    started = time.perf_counter()
                    train()
                    called = time.perf_counter()
                    save(step, state)
                    ended = time.perf_counter()
                    emit("timed", mode=mode, round=rounds, seconds=ended - started, stall=ended - called + fence.seconds)
                wait()
                emit("durable", mode=mode, round=rounds, seconds=time.perf_counter() - called)
            shutil.rmtree(folder, ignore_errors=True)
            costs[mode] = time.perf_counter() - block
        rounds += 1
    emit("end", rounds=rounds)


def main() -> None:
    """Read the command line and measure."""
    warnings.simplefilter("ignore")  # DCP's own
    parser = argparse.ArgumentParser(prog="everystep.demo.compare", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--steps", type=int, default=6, help="timed steps in a block")
    parser.add_argument("--seconds", type=float, required=True, help="time for all rounds, about")
    parser.add_argument("--threads", type=int, required=True)
    try:
        compare(parser.parse_args())
    except everystep.CheckpointError as error:
        emit("error", message=str(error))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
