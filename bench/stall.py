"""A save that cannot overlap against one warm memcpy, and the worst pause of another Python thread in the trainer."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import warnings

import torch
from _common import Results, main, say
from _engines import ENGINES, Training, memcpy, own


class Ticker:
    """A Python thread that would like to run every half millisecond; ``worst`` is the longest it was kept waiting, in seconds."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def _tick(self) -> None:
        before = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            self.worst = max(self.worst, now - before)
            before = now

    def __enter__(self) -> Ticker:  # noqa: PYI034 (Self is not in Python 3.10)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def synchronous(arguments: argparse.Namespace, results: Results, *, nbytes: int, rounds: int) -> None:
    """``overlap=False``: the call lasts as long as the copy."""
    count = 24
    state = {"tensors": {f"t{index:02}": torch.randn(nbytes // 4 // count) for index in range(count)}}
    nbytes = sum(tensor.nbytes for tensor in state["tensors"].values())
    copy_s, saves, copies = memcpy(nbytes), [], []
    with own(arguments.folder / "synchronous", disk=False, overlap=False) as saver:
        for step in range(3):  # as many as there are slabs: each one's first use is slower
            saver.save(step, state)
        for step in range(3, 3 + rounds):
            copies.append(copy_s())
            began = time.perf_counter()
            saver.save(step, state)
            saves.append(time.perf_counter() - began)
            saver.wait()
    results.row("warm memcpy", copies, "s", nbytes=nbytes)
    results.row("save without overlap: call", saves, "s")
    ratio = results.row("save without overlap: call in memcpys", [save / copy for save, copy in zip(saves, copies, strict=True)], "x")
    results.bar("save without overlap, in warm memcpys", ratio, 1.15)


def pause(arguments: argparse.Namespace, results: Results, *, rounds: int, steps: int, quick: bool) -> None:
    """Worst pause of a thread that ticks while training saves at every step, less the worst without saves, in turn."""
    torch.set_num_threads(1)
    training = Training(width=256 if quick else 512, layers=8, vocabulary=4000, batch=2, length=64)
    training.step()
    engines = ["none", "everystep disk", "torch.save", "DCP async_save"]
    worst: dict[str, list[float]] = {engine: [] for engine in engines}
    for index in range(rounds):
        for engine in engines[index % len(engines) :] + engines[: index % len(engines)]:
            say(f"pause: round {index + 1} of {rounds}, {engine}")
            with ENGINES[engine](arguments.folder / f"pause-{index}-{engines.index(engine)}") as saver:
                training.step(saver)
                saver.save(training.number, training.state)
                saver.wait()
                with Ticker() as ticker:
                    for _ in range(steps):
                        training.step(saver)
                        saver.save(training.number, training.state)
                    saver.wait()
                worst[engine].append(ticker.worst)
    for engine in engines:
        results.row(f"worst pause of another thread, {engine}", worst[engine], "s")
    more = statistics.median(worst["everystep disk"]) - statistics.median(worst["none"])
    results.bar("worst pause of another thread, ms more than without saves", more * 1e3, 15.0)


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Both."""
    warnings.simplefilter("ignore")  # the other systems' own
    quick = arguments.quick
    synchronous(arguments, results, nbytes=(128 if quick else 1024) << 20, rounds=arguments.rounds or (5 if quick else 9))
    pause(arguments, results, rounds=arguments.rounds or (1 if quick else 3), steps=3 if quick else 8, quick=quick)


if __name__ == "__main__":
    main("Stall without overlap, and pauses", measure)
