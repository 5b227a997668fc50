"""The checkpoint systems that are compared, each as a context manager around its saves, and the models they are compared on."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import everystep

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Saver:
    """One system at work: ``save`` after each step, ``wait`` until the last save is as durable as it gets, ``load`` its model back."""

    save: Callable[[int, State], object]
    wait: Callable[[], object]
    load: Callable[[State], Mapping[str, torch.Tensor]]
    around_step: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What the system asks to be held around ``optimizer.step()``; waiting for it is stall."""


def state_dicts(state: State) -> dict[str, Any]:
    """The state as torch's own savers take it."""
    return {name: entry.state_dict() for name, entry in state.items()}


@contextlib.contextmanager
def none(_: pathlib.Path) -> Iterator[Saver]:
    """No checkpoints."""
    yield Saver(lambda *_: None, lambda: None, lambda state: state["model"].state_dict())


@contextlib.contextmanager
def own(folder: pathlib.Path, *, disk: bool, overlap: bool = True) -> Iterator[Saver]:
    """everystep, to memory only or to the disk too."""
    with everystep.Checkpointer(folder, cadence=everystep.Cadence(disk=None if disk else False), overlap=overlap) as ckpt:
        last: list[everystep.Pending] = []

        def save(step: int, state: State) -> everystep.Pending:
            last[:] = [ckpt.save(step, state)]
            return last[0]

        def wait() -> None:
            last[0].wait("disk" if disk else "memory")

        def load(_: State) -> Mapping[str, torch.Tensor]:
            loaded: Mapping[str, torch.Tensor] = everystep.load(folder, include=["model.*"])["model"]
            return loaded

        yield Saver(save, wait, load)


@contextlib.contextmanager
def torch_save(folder: pathlib.Path) -> Iterator[Saver]:
    """torch.save in the loop; ``wait`` adds the fsync that makes it durable."""
    folder.mkdir(parents=True)
    last = [folder / "0.pt"]

    def save(step: int, state: State) -> None:
        last[0] = folder / f"{step % 2}.pt"
        torch.save(state_dicts(state), last[0])

    def wait() -> None:
        with last[0].open("rb") as file:
            os.fsync(file.fileno())

    yield Saver(save, wait, lambda _: torch.load(last[0])["model"])


@contextlib.contextmanager
def dcp_async(folder: pathlib.Path) -> Iterator[Saver]:
    """DCP async_save with its defaults; the previous save is waited for before the next."""
    running: list[Any] = []
    last = [folder]

    def wait() -> None:
        if running:
            running.pop().result()

    def save(step: int, state: State) -> None:
        wait()
        last[0] = folder / str(step % 2)
        running.append(dcp.async_save(state_dicts(state), checkpoint_id=last[0], no_dist=True))

    def load(state: State) -> Mapping[str, torch.Tensor]:
        into = {"model": {name: torch.full_like(tensor, float("nan")) for name, tensor in state["model"].state_dict().items()}}
        dcp.load(into, checkpoint_id=last[0], no_dist=True)
        return into["model"]

    yield Saver(save, wait, load)
    wait()


@contextlib.contextmanager
def torch_checkpointing(folder: pathlib.Path) -> Iterator[Saver]:
    """torch_checkpointing: a thread stages into shared memory, a process writes; its lock is held around the optimizer's step."""
    from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager, CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False)
    config = CheckpointManager.Config(
        save=AsyncCheckpointSaverConfig(staging_config=staging), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
    )
    manager = config.build()
    running: list[Any] = []
    last = [folder]

    def wait() -> None:
        if running:
            running.pop().result()

    def save(step: int, state: State) -> None:
        wait()
        last[0] = folder / str(step)
        running.append(manager.save(str(last[0]), state_dicts(state)))

    def load(state: State) -> Mapping[str, torch.Tensor]:
        into = {"model": {name: torch.full_like(tensor, float("nan")) for name, tensor in state["model"].state_dict().items()}}
        loaded: Mapping[str, torch.Tensor] = manager.load(str(last[0]), into=into)["model"]
        return loaded

    try:
        yield Saver(save, wait, load, manager.lock)
    finally:
        manager.close()


ENGINES: dict[str, Callable[[pathlib.Path], contextlib.AbstractContextManager[Saver]]] = {
    "none": none,
    "everystep memory": lambda folder: own(folder, disk=False),
    "everystep disk": lambda folder: own(folder, disk=True),
    "torch.save": torch_save,
    "DCP async_save": dcp_async,
}
if importlib.util.find_spec("torch_checkpointing") is not None:
    ENGINES["torch_checkpointing"] = torch_checkpointing


class FenceClock:
    """Seconds that the optimizer's step waited for a copy, measured from outside: between the first global hook and the optimizer's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds = 0.0
        self._began = 0.0
        register_optimizer_step_pre_hook(self._first)
        optimizer.register_step_pre_hook(self._last)

    def _first(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _last(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Training:
    """A transformer with AdamW. ``step(around)`` trains once; ``state`` is what is saved."""

    def __init__(self, *, width: int, layers: int, vocabulary: int, batch: int, length: int) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
        self.model = nn.Sequential(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, vocabulary))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.fence = FenceClock(self.optimizer)
        self.inputs = torch.randn(batch, length, width)
        self.targets = torch.randint(0, vocabulary, (batch, length))
        self.state: State = {"model": self.model, "optim": self.optimizer}
        self.nbytes = 12 * sum(parameter.numel() for parameter in self.model.parameters())
        self.number = 0

    def step(self, saver: Saver | None = None) -> None:
        """Forward, backward, optimizer."""
        loss = nn.functional.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())
        loss.backward()
        began = time.perf_counter()
        with saver.around_step() if saver else contextlib.nullcontext():
            # Only what was waited for outside the optimizer's own hooks; the fence clock counts those.
            self.fence.seconds += time.perf_counter() - began
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.number += 1


def memcpy(nbytes: int) -> Callable[[], float]:
    """A measure of one warm pooled memcpy of ``nbytes`` by one thread, in seconds."""
    source = torch.ones(nbytes // 4)
    target = torch.zeros(nbytes // 4)
    threads = torch.get_num_threads()

    def measure() -> float:
        torch.set_num_threads(1)
        began = time.perf_counter()
        target.copy_(source)
        took = time.perf_counter() - began
        torch.set_num_threads(threads)
        return took

    measure()
    return measure
