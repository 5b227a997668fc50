"""The demo's acts: each runs processes, shows them, and returns what it found as a value. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import pathlib
import shutil
import statistics
from collections.abc import Callable
from typing import Any

from everystep.demo.show import Stage, Status
from everystep.demo.sizes import SIZES, Size
from everystep.demo.watch import Child, Event, agent_of, agents_below, end_children, kill_process

NOISY = 0.2
"""Spread of the steps without checkpoints over the rounds, from which on a machine counts as noisy."""
TORCH_CACHE = "torch"
"""Folder for what torch itself would leave in the machine's temporary directory."""


class DemoFailedError(Exception):
    """A process of the demo ended in a way that the demo did not plan; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What the demo was asked to do."""

    size_name: str
    steps: int
    threads: int
    folder: pathlib.Path
    budget_s: float
    """Time for all of it, about: what the acts before leave of it goes to the comparison."""

    @property
    def size(self) -> Size:
        """The model's size."""
        return SIZES[self.size_name]

    @property
    def run(self) -> pathlib.Path:
        """The run's directory."""
        return self.folder / "run"


@dataclasses.dataclass(kw_only=True)
class Training:
    """One life of a trainer, as seen from outside."""

    losses: list[tuple[int, str]]
    """(step, exact bits of the loss as a hexadecimal float), in the order in which they came."""
    step_s: list[float]
    stall_s: list[float]
    restored: Event | None = None
    agent: int | None = None
    memory: int | None = None
    disk: int | None = None
    weights: str = ""
    killed_in: int | None = None
    """The step in whose middle the trainer was killed."""


def train(setting: Setting, stage: Stage, *, checkpoints: bool, kill_in: int | None = None, with_agent: bool = False,
          known: dict[int, float] | None = None, on_restored: Callable[[Event], None] | None = None) -> Training:  # fmt: skip
    """Run the trainer's command; ``kill_in``: kill -9 in the middle of that step, ``with_agent``: its agent too."""
    status = Status(steps=setting.steps, checkpoints=checkpoints)
    curve = dict(known or {})
    seen = Training(losses=[], step_s=[], stall_s=[])
    arguments = [str(setting.run), "--size", setting.size_name, "--steps", str(setting.steps), "--threads", str(setting.threads)]
    arguments += [] if checkpoints else ["--without"]
    arguments += [] if kill_in is None else ["--die-in", str(kill_in)]
    every = max(1, setting.steps // 6)
    with Child("everystep.demo.trainer", arguments, threads=setting.threads) as child:
        with contextlib.ExitStack() as shown:
            shown.enter_context(stage.live(status))
            for event in child.events():
                what = event["event"]
                if what == "restored":
                    seen.restored = event
                    status.waiting = ""
                    if on_restored and event["step"]:
                        on_restored(event)
                    curve = {step: loss for step, loss in curve.items() if step <= event["step"]}
                    status.step, status.losses = event["step"], list(curve.values())
                elif what == "error":
                    raise DemoFailedError(f"the trainer failed: {event['message']}")
                if what in ("middle", "step", "end"):
                    seen.memory, seen.disk = status.memory, status.disk = event["memory"], event["disk"]
                if what == "middle" and event["step"] == kill_in:
                    child.kill()
                    if with_agent and seen.agent is not None:
                        kill_process(seen.agent)
                    seen.killed_in = kill_in
                    break
                if what == "step":
                    _note(event, seen, status, curve)
                    if with_agent and seen.agent is None:
                        seen.agent = agent_of(setting.run)
                    stage.tick(status, every=every)
                elif what == "end":
                    seen.weights = event["weights"]
                    status.waiting = ""
        if seen.killed_in is None:
            wrong = child.finish()
            if wrong or not seen.weights:
                raise DemoFailedError(f"the trainer ended too early ({wrong or 'it did not reach its last step'})")
    return seen


def _note(event: Event, seen: Training, status: Status, curve: dict[int, float]) -> None:
    seen.losses.append((event["step"], event["loss"]))
    seen.step_s.append(event["seconds"])
    seen.stall_s.append(event["stall"])
    curve[event["step"]] = float.fromhex(event["loss"])
    status.waiting = "writing the last checkpoint to disk" if status.checkpoints and event["step"] == status.steps else ""
    status.step, status.losses = event["step"], list(curve.values())
    status.seconds, status.stall = statistics.median(seen.step_s[-9:]), event["stall"]


def sample(setting: Setting, folder: pathlib.Path) -> tuple[str, str]:
    """(by what, text) from the exported folder."""
    arguments = [str(folder), "--size", setting.size_name, "--threads", str(setting.threads)]
    with Child("everystep.demo.sample", arguments, threads=setting.threads) as child:
        for event in child.events():
            if event["event"] == "error":
                raise DemoFailedError(f"the exported folder does not load: {event['message']}")
            if event["event"] == "sample":
                return event["by"], event["text"]
        raise DemoFailedError(f"the exported folder was not sampled from ({child.finish()})")


def compare(setting: Setting, *, seconds: float, steps: int, on_block: Callable[[str, int], None]) -> list[dict[str, Any]]:
    """The table's rows: medians over all blocks (of ``steps`` timed steps, for about ``seconds``) of each mode."""
    step_s: dict[str, dict[int, list[float]]] = {}
    stall_s: dict[str, list[float]] = {}
    durable_s: dict[str, list[float]] = {}
    folder = setting.folder / "compare"
    arguments = [str(folder), "--size", setting.size_name, "--threads", str(setting.threads)]
    arguments += ["--seconds", str(seconds), "--steps", str(steps)]
    ended = False
    with Child("everystep.demo.compare", arguments, threads=setting.threads) as child:
        for event in child.events():
            if event["event"] == "error":
                raise DemoFailedError(f"the comparison failed: {event['message']}")
            if event["event"] == "timed":
                on_block(event["mode"], event["round"])
                step_s.setdefault(event["mode"], {}).setdefault(event["round"], []).append(event["seconds"])
                stall_s.setdefault(event["mode"], []).append(event["stall"])
            elif event["event"] == "durable":
                durable_s.setdefault(event["mode"], []).append(event["seconds"])
            ended = ended or event["event"] == "end"
        wrong = child.finish()
        if wrong or not ended:
            raise DemoFailedError(f"the comparison ended too early ({wrong})")
    shutil.rmtree(folder, ignore_errors=True)
    base = {number: statistics.median(times) for number, times in step_s["none"].items()}
    spread = (max(base.values()) - min(base.values())) / statistics.median(base.values())
    return [
        {
            "mode": mode,
            "step_s": statistics.median(itertools.chain.from_iterable(rounds.values())),
            # By round: what else the machine did in a round slowed all modes of that round.
            "ratio": statistics.median([statistics.median(times) / base[number] for number, times in rounds.items()]),
            "stall_p50_s": statistics.median(stall_s[mode]),
            "stall_p99_s": percentile(stall_s[mode], 99),
            "durable_s": statistics.median(durable_s[mode]) if mode in ("disk", "torch", "dcp") else None,
            "steps": sum(map(len, rounds.values())),
            "rounds": len(rounds),
            **({"spread": spread} if mode == "none" else {}),
        }
        for mode, rounds in step_s.items()
    ]


def noise_note(rows: list[dict[str, Any]]) -> str:
    """What has to be said beside the table, or "": that the machine was noisy, or that a ratio below 1 is chance."""
    none = next(row for row in rows if row["mode"] == "none")
    below = any(row["ratio"] < 0.995 for row in rows)  # shown as less than 1.00
    if none["spread"] > NOISY:
        return (
            f"The machine was noisy: steps without checkpoints took {none['spread']:.0%} longer in one round than in another, so that the "
            "ratios say little. Run it again when nothing else runs."
        )
    if none["rounds"] < 3 or below:
        why = f"in only {none['rounds']} round{'s' if none['rounds'] > 1 else ''}" if none["rounds"] < 3 else "and the machine was noisy"
        return f"Measured {why}: differences of a few per cent are chance" + (
            ", and no checkpoint makes training faster." if below else "."
        )
    return ""


def percentile(values: list[float], percent: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def clean_up(folder: pathlib.Path, *, keep: bool) -> list[int]:
    """End what still runs for ``folder`` and, unless ``keep``, remove it; returns the agents' process ids."""
    end_children()
    left = agents_below(folder)
    for pid in left:
        kill_process(pid)
    shutil.rmtree(folder / TORCH_CACHE if keep else folder, ignore_errors=True)
    return left
