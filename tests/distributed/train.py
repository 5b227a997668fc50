"""The training that the many-rank tests save, kill and restore: small, of every kind of parallelism, and the same to the last bit on every run.

What a rank trains on follows from the step, its rank and the world alone, all-reduces are gloo's on the CPU, and there is one thread: two runs of one world and layout
have equal bits at every step, and what a restore brings back can be compared with what was saved (``digest``: this rank's own tensors and plain values), without any
function of the code under test or of torch's for putting shards together. Across worlds and layouts whole tensors are compared (``full_digest``).
"""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everystep

LAYOUTS = ("ddp", "fsdp", "hsdp", "tp", "fsdp-tp", "copies")
"""``copies``: every rank trains alone on the same data and never waits for another one."""
SAMPLES = 997


class Model(nn.Module):
    """Shapes that do not divide: 7 rows and 3 rows on 4 ranks are uneven shards and empty ones; a frozen parameter, for which AdamW
    has no state; a buffer that forward changes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(12, width)
        self.mid = nn.Linear(width, 7)
        self.down = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(12), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.down(torch.tanh(self.mid(torch.relu(self.up(batch)))))


class Loader:
    """A stateful data loader: which sample comes next on this rank; each sample once per epoch over all ranks."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.at = 0
        self.saved_by = rank
        self.drawn: list[int] = []

    def draw(self, count: int) -> torch.Tensor:
        numbers = [(self.at + offset) * self.world + self.rank for offset in range(count)]
        self.at += count
        self.drawn = (self.drawn + numbers)[-32:]
        return torch.tensor(numbers) % SAMPLES

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rank": self.rank, "world": self.world, "order": torch.tensor(self.drawn, dtype=torch.int64).sum()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.saved_by = state["at"], state["rank"]
        self.drawn = []


def begin(*, timeout_s: float = 30.0) -> tuple[int, int]:
    """Join the process group; (rank, world)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


class Training:
    """Model, AdamW, scheduler, RNG, loader, counters; ``layout`` is one of ``LAYOUTS``."""

    def __init__(self, layout: str, *, width: int = 8, replicate: int = 2) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        share = {"copies": self.world, "tp": self.world, "fsdp-tp": 2}.get(layout, 1)
        """So many ranks train on the same data: tensor parallelism has it so."""
        torch.manual_seed(7)
        model = Model(width)
        self.layout = layout
        self.model: nn.Module = model
        self.plain = model
        if layout == "ddp":
            # Otherwise DDP arranges its buckets anew after the first step, and a resumed run would add up in another order for one step.
            self.model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        elif layout == "copies":
            pass
        elif layout == "fsdp":
            self._shard(model, init_device_mesh("cpu", (self.world,), mesh_dim_names=("shard",)))
        elif layout == "hsdp":
            self._shard(model, init_device_mesh("cpu", (replicate, self.world // replicate), mesh_dim_names=("replicate", "shard")))
        elif layout == "tp":
            mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "mid": RowwiseParallel()})
        elif layout == "fsdp-tp":
            mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("shard", "tp"))
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "mid": RowwiseParallel()})
            self._shard(model, mesh["shard"])
        else:
            raise ValueError(layout)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 5, 0.9)
        self.loader = Loader(self.rank // share, self.world // share)
        self.count = {"tokens": 0, "history": [0.5]}
        torch.manual_seed(100 + self.rank // share)  # noise of its own
        table = torch.Generator().manual_seed(1)
        self.samples = torch.randn(SAMPLES, 12, generator=table)
        self.targets = torch.randn(SAMPLES, 3, generator=table)

    @staticmethod
    def _shard(model: Model, mesh: Any) -> None:
        fully_shard(model.mid, mesh=mesh)
        fully_shard(model, mesh=mesh)

    @property
    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "rng": everystep.RNG(),
            "loader": self.loader,
            "count": self.count,
        }

    def step(self) -> float:
        """Train once; the loss of this rank."""
        numbers = self.loader.draw(2)
        batch = self.samples[numbers] + 0.1 * torch.randn(2, 12)
        loss = (self.model(batch) - self.targets[numbers]).pow(2).mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.sched.step()
        self.count["tokens"] += 2
        self.count["history"] = [*self.count["history"], round(float(loss.detach()), 6)][-3:]
        return float(loss.detach())

    # -- what it holds ---------------------------------------------------------------------------------------------------------
    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        found = [*self.plain.named_parameters(), *self.plain.named_buffers()]
        for name, parameter in self.plain.named_parameters():
            found += [(f"{name}.{key}", value) for key, value in sorted(self.optim.state.get(parameter, {}).items())]
        return found

    def _values(self) -> str:
        return repr(([group["lr"] for group in self.optim.param_groups], self.sched.get_last_lr(), self.sched.last_epoch))

    def digest(self) -> str:
        """Of everything this rank holds, its own loader and RNG included."""
        found = hashlib.sha1(f"{self._values()} {self.count} {self.loader.at} {self.loader.rank}".encode())
        for name, tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(name.encode() + str(tuple(local.shape)).encode() + local.detach().contiguous().numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()

    def full_digest(self) -> str:
        """Of the whole tensors and the replicated values, equal on every rank and in every world. A collective."""
        found = hashlib.sha1(self._values().encode())
        for name, tensor in self._tensors():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(name.encode() + str(tuple(whole.shape)).encode() + whole.detach().contiguous().numpy().tobytes())
        return found.hexdigest()

    def spoil(self) -> None:
        """Overwrite everything, so that nothing can look restored by accident."""
        with torch.no_grad():
            for _, tensor in self._tensors():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(77)
        torch.manual_seed(666)


def opened(path: str, *, replicas: int = 0, disk: Any = None, memory: int = 1, keep: int | None = 3, **more: Any) -> everystep.Checkpointer:
    """A checkpointer as the tests use it. ``disk``: as in ``Cadence``."""
    if replicas:
        more["replicas"] = replicas
    more.setdefault("idle_s", 60.0)
    return everystep.Checkpointer(path, cadence=everystep.Cadence(memory=memory, disk=disk), keep=everystep.Keep(last=keep), **more)


def whence(checkpointer: everystep.Checkpointer) -> dict[str, Any]:
    """Where the last restore came from, for telling."""
    found = checkpointer.restored_from
    return {"tier": found.tier if found else "", "skipped": [f"{one.key}: {one.reason}" for one in found.skipped] if found else []}


def run(
    voice: Any,
    *,
    path: str,
    layout: str = "fsdp",
    steps: int = 5,
    until: int | None = None,
    wait: str | None = None,
    pause_at: list[int] | None = None,
    restore: bool = True,
    each_s: float = 0.0,
    full: bool = False,
    close: bool = True,
    group_timeout_s: float = 30.0,
    width: int = 8,
    sync_last: bool = False,
    spoil: bool = True,
    **checkpointer: Any,
) -> None:
    """One life of a rank: restore, train ``steps`` more (or up to step ``until``), save every one.

    Tells ``restored`` (step, tier, digest), ``step`` (step, loss, digest; before it is saved), ``saved`` (with ``wait``: the outcome), and by the way ``acknowledged``
    (step, tier: at least these are safe). At ``pause_at`` it tells ``paused`` and goes on when spoken to; ``{"stop": true}`` ends the loop.
    """
    begin(timeout_s=group_timeout_s)
    training = Training(layout, width=width)
    with opened(path, **checkpointer) as ckpt:
        if spoil and restore:
            fresh = {name: tensor.detach().clone() for name, tensor in _locals(training)}
        step = ckpt.restore(training.state) if restore else None
        if spoil and restore and step is None:
            assert all(torch.equal(fresh[name], tensor) for name, tensor in _locals(training)), (
                "restore() returned None and changed something"
            )
        step = step or 0
        voice.tell("restored", step=step, digest=training.digest(), full=training.full_digest() if full else "", **whence(ckpt))
        if pause_at and step in pause_at:
            voice.tell("paused", step=step)
            if voice.ask().get("stop"):
                steps = until = 0
        waiting: list[everystep.Pending] = []
        last = until if until is not None else step + steps
        while step < last:
            step += 1
            loss = training.step()
            voice.tell("step", step=step, loss=loss, **held(training, full=full))
            pending = ckpt.save(step, training.state, sync=sync_last and step == last)
            if wait is not None:
                report = pending.wait(wait, 30)
                voice.tell("saved", step=step, outcome=report.outcome, tier=report.tier, reason=report.reason)
            waiting.append(pending)
            waiting = acknowledge(voice, waiting)
            if pause_at and step in pause_at:
                voice.tell("paused", step=step)
                if voice.ask().get("stop"):
                    break
            if each_s:
                time.sleep(each_s)
        if close:
            ckpt.wait(30)
            acknowledge(voice, waiting)
        voice.tell("done", step=step, digest=training.digest(), failures=[str(error) for error in ckpt.failures])
        if not close:
            voice.ask()
            os._exit(0)  # as if killed: no close, no bye
    if layout != "copies":
        dist.barrier()
    dist.destroy_process_group()


def _locals(training: Training) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.to_local() if isinstance(tensor, DTensor) else tensor) for name, tensor in training._tensors()]


def acknowledge(voice: Any, waiting: list[everystep.Pending]) -> list[everystep.Pending]:
    """Tell what became of saves; returns those of which more may come."""
    left = []
    for pending in waiting:
        report = pending.report
        told = getattr(pending, "told", "")
        if report.outcome not in (told, "staging"):
            pending.told = report.outcome  # type: ignore[attr-defined]
            voice.tell("acknowledged", step=pending.step, tier=report.tier, outcome=report.outcome, reason=report.reason)
        if not pending.done():
            left.append(pending)
    return left


def held(training: Training, *, full: bool) -> dict[str, Any]:
    """Digests, for telling."""
    generator = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
    return {"digest": training.digest(), "full": training.full_digest() if full else "", "drawn": training.loader.at, "generator": generator}


def trajectory(voice: Any, *, layout: str, steps: int, width: int = 8, full: bool = False) -> None:
    """The uninterrupted run, without everystep: digests at step 0, 1, 2, ..."""
    begin()
    training = Training(layout, width=width)
    voice.tell("step", step=0, loss=0.0, digest=training.digest(), full=training.full_digest() if full else "")
    for step in range(1, steps + 1):
        loss = training.step()
        voice.tell("step", step=step, loss=loss, digest=training.digest(), full=training.full_digest() if full else "")
    dist.barrier()
    voice.tell("ended")
    os._exit(0)  # DDP's reducer and gloo, taken down on a busy machine, abort once in some hundred times; nothing of ours is in here
