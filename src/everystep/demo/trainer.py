"""The process that the demo trains in and kills, ``python -m everystep.demo.trainer RUN ...``; it speaks JSON lines on stdout."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

import everystep
from everystep.demo.model import GPT, build
from everystep.demo.sizes import SIZES
from everystep.demo.text import Loader, read_text


def emit(event: str, **fields: object) -> None:
    """One JSON line to whoever watches; ends the process quietly when nobody does any more."""
    try:
        os.write(1, json.dumps({"event": event, "at": time.time(), **fields}).encode() + b"\n")
    except BrokenPipeError:
        os._exit(1)


class FenceClock:
    """Measures how long optimizer steps wait for a checkpoint, from outside: between the first and the last hook before a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds = 0.0
        self._began = 0.0
        # Global hooks run in the order they were registered, an optimizer's own after them: everystep's fence lies in between.
        register_optimizer_step_pre_hook(self._first)
        optimizer.register_step_pre_hook(self._last)

    def _first(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _last(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began


class Tiers:
    """Which step has reached which tier, from the handles of the saves that are not through yet."""

    def __init__(self) -> None:
        self.memory: int | None = None
        self.disk: int | None = None
        self._open: list[tuple[int, everystep.Pending]] = []

    def add(self, step: int, pending: everystep.Pending) -> None:
        """Watch one more save."""
        self._open.append((step, pending))

    def look(self) -> dict[str, int | None]:
        """The newest step in each tier now."""
        for step, pending in self._open:
            tier = pending.report.tier
            if tier:
                self.memory = max(self.memory or 0, step)
            if tier == "disk":
                self.disk = max(self.disk or 0, step)
        self._open = [(step, pending) for step, pending in self._open if not pending.done()]
        return {"memory": self.memory, "disk": self.disk}


def weights_digest(model: GPT) -> str:
    """XXH3-128 over every parameter's bytes, by name."""
    digest = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def train(arguments: argparse.Namespace) -> None:
    """Train to the last step, from wherever the run stands."""
    size = SIZES[arguments.size]
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    model, optimizer, scheduler = build(size, steps=arguments.steps)
    loader = Loader(read_text(), batch=size.batch, context=size.context, seed=1)
    fence, tiers = FenceClock(optimizer), Tiers()
    state = {"model": model, "optim": optimizer, "sched": scheduler, "loader": loader, "rng": everystep.RNG()}
    with contextlib.ExitStack() as stack:
        ckpt, step = None, 0
        if not arguments.without:
            ckpt = stack.enter_context(everystep.Checkpointer(arguments.run))
            began = time.perf_counter()
            step = ckpt.restore(state) or 0
            emit("restored", step=step, seconds=time.perf_counter() - began, tier=ckpt.restored_from.tier if ckpt.restored_from else None)
        while step < arguments.steps:
            began = time.perf_counter()
            inputs, targets = loader.next()
            loss = model.loss(inputs, targets)
            emit("middle", step=step + 1, **tiers.look())
            if step + 1 == arguments.die_in:
                time.sleep(60)  # the kill comes here, in the middle of this step, however slow the watcher is to send it
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            step += 1
            stall = fence.seconds if ckpt else 0.0
            if ckpt:
                called = time.perf_counter()
                tiers.add(step, ckpt.save(step, state))
                stall += time.perf_counter() - called
            seconds = time.perf_counter() - began
            emit("step", step=step, loss=float(loss.detach()).hex(), seconds=seconds, stall=stall, **tiers.look())
    emit("end", step=step, weights=weights_digest(model), **tiers.look())


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="everystep.demo.trainer", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--die-in", type=int, help="wait for kill -9 in the middle of this step")
    parser.add_argument("--without", action="store_true", help="no checkpoints at all")
    try:
        train(parser.parse_args())
    except everystep.CheckpointError as error:
        emit("error", message=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
