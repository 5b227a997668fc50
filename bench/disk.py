"""Time to durable and restore, against what the disk and memory give to plain calls for the same bytes."""

from __future__ import annotations

import argparse
import pathlib
import time

import torch
from _common import Results, main, raw_read, raw_write, say, warm_buffer
from _engines import memcpy

import everystep


def tensors(nbytes: int, *, count: int = 32) -> dict[str, torch.Tensor]:
    """Random tensors, ``nbytes`` together."""
    torch.manual_seed(0)
    return {f"t{index:02}": torch.randn(nbytes // 4 // count) for index in range(count)}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether all values are the same."""
    return all(torch.equal(left[name], right[name]) for name in left)


def durable(results: Results, folder: pathlib.Path, state: dict[str, dict[str, torch.Tensor]], nbytes: int, *, rounds: int) -> None:
    """Save, in turn with a raw write of as many bytes."""
    buffer = warm_buffer(nbytes)
    raw, sealed, whole = [], [], []
    # Nothing is deleted between the rounds: freeing a gigabyte in the background would slow whatever is measured next.
    with everystep.Checkpointer(folder / "durable", keep=everystep.Keep(last=None)) as ckpt:
        for step in range(rounds + 2):
            raw_s = raw_write(folder / f"raw-{step}", buffer, nbytes=nbytes)
            state["tensors"]["t00"][0] = float(step)
            began = time.perf_counter()
            pending = ckpt.save(step, state)
            returned = time.perf_counter()
            pending.wait("disk")
            ended = time.perf_counter()
            if step >= 2:  # the first ones allocate slabs
                raw.append(raw_s)
                sealed.append(ended - returned)
                whole.append(ended - began)
            say(f"durable: {step + 1} of {rounds + 2}")
    for target in folder.glob("raw-*"):
        target.unlink()
    results.row("raw O_DIRECT write", [nbytes / value for value in raw], "B/s", nbytes=nbytes)
    results.row("sealed to durable", [nbytes / value for value in sealed], "B/s", nbytes=nbytes)
    results.row("call to durable (copy included)", [nbytes / value for value in whole], "B/s", nbytes=nbytes)
    share = results.row("durable, share of raw write", [plain / value for plain, value in zip(raw, sealed, strict=True)], "x")
    results.bar("time to durable, share of a raw O_DIRECT write", share, 0.85, at_most=False)


def from_disk(results: Results, folder: pathlib.Path, state: dict[str, dict[str, torch.Tensor]], nbytes: int, *, rounds: int) -> None:
    """Restore in place from a run that no agent holds, in turn with a raw read of its data files."""
    run = folder / "durable"
    files = sorted(max((run / "data").iterdir()).glob("*.safetensors"))
    buffer = warm_buffer(-(-max(file.stat().st_size for file in files) // 4096) * 4096)
    raw, restored, right = [], [], True
    into = {"tensors": {name: torch.full_like(tensor, float("nan")) for name, tensor in state["tensors"].items()}}
    for index in range(rounds + 1):
        raw_s = raw_read(files, buffer)
        for tensor in into["tensors"].values():
            tensor.fill_(float("nan"))
        with everystep.Checkpointer(run) as ckpt:
            began = time.perf_counter()
            ckpt.restore(into)
            ended = time.perf_counter()
            right &= ckpt.restored_from is not None and ckpt.restored_from.tier == "disk"
        right &= equal(into["tensors"], state["tensors"])
        if index:
            raw.append(raw_s)
            restored.append(ended - began)
        say(f"restore from disk: {index + 1} of {rounds + 1}")
    results.row("raw O_DIRECT read", [nbytes / value for value in raw], "B/s", nbytes=nbytes)
    results.row("restore from disk, verified", [nbytes / value for value in restored], "B/s", nbytes=nbytes)
    share = results.row("restore from disk, share of raw read", [plain / value for plain, value in zip(raw, restored, strict=True)], "x")
    results.bar("restore from disk, share of a raw O_DIRECT read", share, 0.85, at_most=False)
    results.bar("restored from disk equal", float(right), 1.0, at_most=False)


def from_memory(results: Results, folder: pathlib.Path, state: dict[str, dict[str, torch.Tensor]], nbytes: int, *, rounds: int) -> None:
    """Restore in place from the agent's memory, in turn with a memcpy."""
    copy_s = memcpy(nbytes)
    copies, restored, right = [], [], True
    into = {"tensors": {name: torch.full_like(tensor, float("nan")) for name, tensor in state["tensors"].items()}}
    with everystep.Checkpointer(folder / "memory") as ckpt:
        ckpt.save(1, state).wait("disk")
        for index in range(rounds + 2):
            for tensor in into["tensors"].values():
                tensor.fill_(float("nan"))
            copied = copy_s()
            began = time.perf_counter()
            ckpt.restore(into)
            ended = time.perf_counter()
            right &= ckpt.restored_from is not None and ckpt.restored_from.tier == "memory" and equal(into["tensors"], state["tensors"])
            if index >= 2:
                copies.append(copied)
                restored.append(ended - began)
    results.row("memcpy", [nbytes / value for value in copies], "B/s", nbytes=nbytes)
    results.row("restore from memory, verified", [nbytes / value for value in restored], "B/s", nbytes=nbytes)
    share = results.row("restore from memory, share of memcpy", [plain / value for plain, value in zip(copies, restored, strict=True)], "x")
    results.bar("restore from memory, share of a memcpy", share, 0.6, at_most=False)
    results.bar("restored from memory equal", float(right), 1.0, at_most=False)


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """All three."""
    state = {"tensors": tensors((256 if arguments.quick else 1024) << 20)}
    nbytes = sum(tensor.nbytes for tensor in state["tensors"].values())
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    durable(results, arguments.folder, state, nbytes, rounds=rounds)
    from_disk(results, arguments.folder, state, nbytes, rounds=rounds)
    from_memory(results, arguments.folder, state, nbytes, rounds=rounds)


if __name__ == "__main__":
    main("Time to durable, and restore", measure)
