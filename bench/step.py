"""Training with a save at every step: stall and step time of each system against training without saves.

Two models: one whose step lasts ten or more warm memcpys of its state, one with a short step of three or more.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
import warnings

import torch
from _common import Results, main, percentile, say
from _engines import ENGINES, Saver, Training, memcpy

WARM = 3
"""Saves before the timed ones: everystep has three slabs, and fills each for the first time."""


class Taken:
    """What one system's blocks gave."""

    def __init__(self) -> None:
        self.step_s: list[list[float]] = []
        self.call_s: list[float] = []
        self.stall_s: list[float] = []
        self.first_s: list[float] = []
        self.durable_s: list[float] = []
        self.right = True


def block(training: Training, saver: Saver, taken: Taken, *, steps: int) -> None:
    """Steps with the first saves, timed steps, and the read-back of the last save."""
    for index in range(WARM):
        training.step(saver)
        began = time.perf_counter()
        saver.save(training.number, training.state)
        if index == 0:
            taken.first_s.append(time.perf_counter() - began)
        saver.wait()
    times = []
    for _ in range(steps):
        training.fence.seconds = 0.0
        began = time.perf_counter()
        training.step(saver)
        called = time.perf_counter()
        saver.save(training.number, training.state)
        ended = time.perf_counter()
        times.append(ended - began)
        taken.call_s.append(ended - called)
        taken.stall_s.append(ended - called + training.fence.seconds)
    taken.step_s.append(times)
    saver.wait()
    taken.durable_s.append(time.perf_counter() - called)
    expected = training.model.state_dict()
    loaded = saver.load(training.state)
    taken.right &= loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)


def compare(arguments: argparse.Namespace, results: Results, training: Training, *, name: str, rounds: int, steps: int,
            engines: list[str]) -> None:  # fmt: skip
    """All systems in turn on one model; rows, and the bars that hold at this ratio of step to memcpy."""
    copy_s = memcpy(training.nbytes)
    copies = []
    taken = {engine: Taken() for engine in engines}
    for _ in range(2):
        training.step()
    for index in range(rounds):
        for engine in engines[index % len(engines) :] + engines[: index % len(engines)]:
            say(f"{name}: round {index + 1} of {rounds}, {engine}")
            folder = arguments.folder / f"{name.replace(' ', '-')}-{index}-{engines.index(engine)}"
            with ENGINES[engine](folder) as saver:
                block(training, saver, taken[engine], steps=steps)
            shutil.rmtree(folder, ignore_errors=True)
            copies.append(copy_s())
    _report(results, training, taken, copies, name=name)


def _report(results: Results, training: Training, taken: dict[str, Taken], copies: list[float], *, name: str) -> None:
    copied = results.row(f"{name}: warm memcpy of the state", copies, "s", nbytes=training.nbytes)
    base = [statistics.median(times) for times in taken["none"].step_s]
    alone = results.row(f"{name}: step without saves", [time for times in taken["none"].step_s for time in times], "s")
    multiple = alone / copied
    results.row(f"{name}: step in memcpys of the state", [multiple], "x")
    ratios, added = {}, {}
    for engine, one in taken.items():
        if engine == "none":
            continue
        middles = [statistics.median(times) for times in one.step_s]
        ratios[engine] = results.row(f"{name}: step time, {engine}", [mine / other for mine, other in zip(middles, base, strict=True)], "x")
        added[engine] = statistics.median([mine - other for mine, other in zip(middles, base, strict=True)]) / copied
        results.row(f"{name}: added time in memcpys, {engine}", [added[engine]], "x")
        results.row(f"{name}: call, {engine}", one.call_s, "s")
        results.row(f"{name}: stall (call and fence), {engine}", one.stall_s, "s", p99=percentile(one.stall_s, 99))
        results.row(f"{name}: first save's call, {engine}", one.first_s, "s")
        if engine != "everystep memory":
            results.row(f"{name}: call to durable, {engine}", one.durable_s, "s")
        is_own, why = engine.startswith("everystep"), "" if one.right else "values differ"
        results.bar(f"{name}: what {engine} saved reads back equal", float(one.right), 1.0, at_most=False, applies=is_own, why=why)
    call = statistics.median(taken["everystep disk"].call_s + taken["everystep memory"].call_s)
    results.bar(f"{name}: everystep's overlapping call, ms", call * 1e3, 5.0)
    is_long, shown = multiple >= 10, f"a step is {multiple:.1f} memcpys"
    results.bar(f"{name}: step ratio, every step to memory", ratios["everystep memory"], 1.02, applies=is_long, why=shown)
    bound = 0.3 if multiple >= 3 else 1.1
    results.bar(f"{name}: memcpys added, every step to memory", added["everystep memory"], bound, applies=not is_long, why=shown)
    keeps_up = statistics.median(taken["everystep disk"].durable_s) <= alone
    results.bar(f"{name}: step ratio, every step to disk", ratios["everystep disk"], 1.05, applies=is_long and keeps_up,
                why=shown + ("" if keeps_up else "; the disk does not keep up"))  # fmt: skip


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Both models."""
    warnings.simplefilter("ignore")  # the other systems' own
    rounds = arguments.rounds or (2 if arguments.quick else 4)
    engines = list(ENGINES)
    width, layers, vocabulary, batch, steps = 512, 12, 16000, 4, 6
    if arguments.quick:
        width, layers, vocabulary, batch, steps = 256, 6, 4000, 2, 4
        engines = [engine for engine in engines if engine != "torch_checkpointing"]  # five seconds to start, each time
    long = Training(width=width, layers=layers, vocabulary=vocabulary, batch=batch, length=128)
    compare(arguments, results, long, name="long step", rounds=rounds, steps=steps, engines=engines)
    del long
    short = Training(width=width, layers=layers, vocabulary=vocabulary, batch=1, length=16)
    engines = ["none", "everystep memory", "everystep disk"]
    compare(arguments, results, short, name="short step", rounds=rounds, steps=2 * steps, engines=engines)


if __name__ == "__main__":
    main("A save at every step", measure)
