"""The forms of ``when``, a class for each, and what they judge by."""

# ruff: noqa: D102  # what judge, document, describe, binds and inner do is said once, in Rule

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from everystep.policy import duration_s, is_due


class Seen(msgspec.Struct, frozen=True):
    """One committed checkpoint: its key, step, the time of its seal (seconds since the epoch) and the metrics that are known by now."""

    key: str
    step: int
    saved_at: float
    metrics: Mapping[str, float] = {}


class Decision(msgspec.Struct, frozen=True):
    """One checkpoint, whether it is to be consolidated, and why."""

    key: str
    step: int
    due: bool
    reason: str


class Known:
    """What there is to judge by: the consolidated checkpoints, and the newest one once the run has ended."""

    def __init__(self, done: Sequence[Seen], final: Seen | None) -> None:
        self.final = final
        self.last: Seen | None = None
        """The consolidated one that was saved last."""
        self.done = list(done)
        self._keys: set[str] = set()
        self._same: set[tuple[int, float]] = set()
        self._bests: dict[tuple[str, str], tuple[float, int]] = {}
        for one in self.done:
            self._note(one)

    def add(self, one: Seen) -> None:
        """Count one as consolidated."""
        self.done.append(one)
        self._note(one)

    def _note(self, one: Seen) -> None:
        self._keys.add(one.key)
        if one.saved_at > 0:  # 0 is what a source says that does not know
            self._same.add((one.step, one.saved_at))
        self._bests.clear()
        if self.last is None or one.saved_at > self.last.saved_at:
            self.last = one

    def has(self, one: Seen) -> bool:
        """By key, or by step and seal: a checkpoint that was reduced after its export bears a new key and is the same one."""
        return one.key in self._keys or (one.step, one.saved_at) in self._same

    def best(self, metric: str, mode: str) -> tuple[float, int] | None:
        """Value and step of the best one; None when none was measured."""
        if (metric, mode) not in self._bests:
            values = [(value, one.step) for one in self.done if not math.isnan(value := measured(one, metric))]
            if not values:
                return None
            self._bests[metric, mode] = (min if mode == "min" else max)(values, key=lambda pair: pair[0])
        return self._bests[metric, mode]


def measured(one: Seen, metric: str) -> float:
    """Its metric; NaN when there is none."""
    value = one.metrics.get(metric)
    return math.nan if value is None else float(value)


class Rule(abc.ABC):
    """One form of ``when``, checked."""

    @abc.abstractmethod
    def judge(self, one: Seen, known: Known) -> tuple[bool, str]:
        """Whether this one, which is not consolidated yet, is due; and why or why not."""

    @abc.abstractmethod
    def document(self) -> Any:
        """The form as YAML says it: words, numbers, dicts and lists."""

    @abc.abstractmethod
    def describe(self) -> str:
        """What the rule does, in words."""

    def binds(self, step: int) -> bool:
        """Whether the number of the step alone makes it due."""
        return False

    def inner(self) -> Sequence[Rule]:
        """The rules inside this one."""
        return ()


@dataclasses.dataclass(frozen=True)
class Word(Rule):
    """``every``, ``never`` or ``final``."""

    word: str

    def judge(self, one: Seen, known: Known) -> tuple[bool, str]:
        if self.word != "final":
            return self.word == "every", self.word
        if known.final is None:
            return False, "final: the run has not ended"
        if one.key != known.final.key:
            return False, f"final: step {known.final.step} is newer"
        for other in known.done:  # its shards may be gone (drop_shards): then an older one is the newest, and is not what `final` means.
            # An export of an abandoned timeline has a higher step but an earlier seal, and does not count.
            if other.step >= one.step and other.saved_at >= one.saved_at:
                return False, f"final: step {other.step} is consolidated already"
        return True, "final"

    def document(self) -> str:
        return self.word

    def describe(self) -> str:
        return {"every": "each checkpoint", "never": "no checkpoint", "final": "the newest checkpoint when the run ends"}[self.word]


@dataclasses.dataclass(frozen=True)
class EverySteps(Rule):
    """``{every: 500}``."""

    steps: int

    def judge(self, one: Seen, known: Known) -> tuple[bool, str]:
        due = self.binds(one.step)
        return due, f"every {self.steps}" if due else f"not divisible by {self.steps}"

    def binds(self, step: int) -> bool:
        return is_due(step, self.steps)

    def document(self) -> dict[str, Any]:
        return {"every": self.steps}

    def describe(self) -> str:
        return f"each checkpoint whose step is divisible by {self.steps}"


@dataclasses.dataclass(frozen=True)
class EveryDuration(Rule):
    """``{every: 30min}``."""

    duration: str

    def judge(self, one: Seen, known: Known) -> tuple[bool, str]:
        if known.last is None:
            return True, f"every {self.duration}: the first"
        passed_s = one.saved_at - known.last.saved_at
        if passed_s < 0:
            return False, f"every {self.duration}: older than step {known.last.step}, which is consolidated"
        return passed_s >= duration_s(self.duration), f"every {self.duration}: {passed_s:.6g} s after step {known.last.step}"

    def document(self) -> dict[str, Any]:
        return {"every": self.duration}

    def describe(self) -> str:
        return f"the first checkpoint, then one that was saved {self.duration} or more after the last consolidated one"


@dataclasses.dataclass(frozen=True)
class Improves(Rule):
    """``{improves: val_loss, mode: min, min_delta: 0.01}``."""

    metric: str
    mode: str
    min_delta: float

    def judge(self, one: Seen, known: Known) -> tuple[bool, str]:
        value = measured(one, self.metric)
        if math.isnan(value):
            return False, unmeasured(one, self.metric)
        found = known.best(self.metric, self.mode)
        sign = 1 if self.mode == "min" else -1
        # Nothing measured is worse than any number, and as bad as the worst infinity: a diverged loss is no improvement on nothing.
        best = sign * math.inf if found is None else found[0]
        due = sign * value < sign * best - self.min_delta
        if found is None:
            return due, f"{self.metric} {value:.6g} is the first measured" if due else f"{self.metric} is {value:.6g}"
        less = f" by more than {self.min_delta:.6g}" if self.min_delta else ""
        return due, f"{self.metric} {value:.6g} {'improves' if due else 'does not improve'} on {best:.6g} of step {found[1]}{less}"

    def document(self) -> dict[str, Any]:
        return {"improves": self.metric, "mode": self.mode, **({"min_delta": self.min_delta} if self.min_delta else {})}

    def describe(self) -> str:
        less = f" by more than {self.min_delta:.6g}" if self.min_delta else ""
        better = "lower" if self.mode == "min" else "higher"
        return f"each checkpoint whose {self.metric} is {better}{less} than that of every consolidated one"


@dataclasses.dataclass(frozen=True)
class Level(Rule):
    """``{metric: val_loss, below: 2.0}`` and ``above``."""

    metric: str
    side: str
    level: float

    def judge(self, one: Seen, known: Known) -> tuple[bool, str]:
        value = measured(one, self.metric)
        if math.isnan(value):
            return False, unmeasured(one, self.metric)
        due = value < self.level if self.side == "below" else value > self.level
        return due, f"{self.metric} {value:.6g} is {'' if due else 'not '}{self.side} {self.level:.6g}"

    def document(self) -> dict[str, Any]:
        return {"metric": self.metric, self.side: self.level}

    def describe(self) -> str:
        return f"each checkpoint whose {self.metric} is {self.side} {self.level:.6g}"


def unmeasured(one: Seen, metric: str) -> str:
    """Why there is nothing to judge by."""
    return f"{metric} is NaN" if metric in one.metrics else f"{metric} is not there yet"


@dataclasses.dataclass(frozen=True)
class At(Rule):
    """``{at: [100, 200]}``."""

    steps: tuple[int, ...]

    def judge(self, one: Seen, known: Known) -> tuple[bool, str]:
        due = self.binds(one.step)
        return due, f"at {one.step}" if due else f"not at {self._few()}"

    def binds(self, step: int) -> bool:
        return step in self.steps

    def document(self) -> dict[str, Any]:
        return {"at": list(self.steps)}

    def describe(self) -> str:
        return f"the checkpoint of step {self._few()}" if len(self.steps) == 1 else f"the checkpoints of steps {self._few()}"

    def _few(self) -> str:
        few = ", ".join(map(str, self.steps[:8]))
        return few if len(self.steps) <= 8 else f"{few}, ... ({len(self.steps)} steps)"


@dataclasses.dataclass(frozen=True)
class Phases(Rule):
    """``{phases: [{until: 1000, when: ...}, {when: ...}]}``: of a step, the first whose ``until`` is above it."""

    phases: tuple[tuple[int | None, Rule], ...]

    def judge(self, one: Seen, known: Known) -> tuple[bool, str]:
        until, rule = self._of(one.step)
        if rule is None:
            return False, f"after the last phase, which ends at step {self.phases[-1][0]}"
        due, reason = rule.judge(one, known)
        return due, reason if until is None else f"{reason} (until {until})"

    def binds(self, step: int) -> bool:
        rule = self._of(step)[1]
        return rule is not None and rule.binds(step)

    def inner(self) -> Sequence[Rule]:
        return [rule for _, rule in self.phases]

    def document(self) -> dict[str, Any]:
        return {"phases": [{**({} if until is None else {"until": until}), "when": rule.document()} for until, rule in self.phases]}

    def describe(self) -> str:
        said, begin = [], 0
        for until, rule in self.phases:
            bounds = [f"from step {begin}"] * (begin > 0) + [f"before step {until}"] * (until is not None)
            said.append(f"{' and '.join(bounds)}: {rule.describe()}" if bounds else rule.describe())
            begin = until or begin
        return "; ".join(said)

    def _of(self, step: int) -> tuple[int | None, Rule | None]:
        return next(((until, rule) for until, rule in self.phases if until is None or step < until), (None, None))


@dataclasses.dataclass(frozen=True)
class AnyOf(Rule):
    """A list: due when any of its rules says so."""

    rules: tuple[Rule, ...]

    def judge(self, one: Seen, known: Known) -> tuple[bool, str]:
        judged = [rule.judge(one, known) for rule in self.rules]
        due = any(due for due, _ in judged)
        reasons = dict.fromkeys(reason for is_one, reason in judged if is_one == due)
        if due:  # that a run is over comes first: the reason goes with the export, and whoever reads it looks for that
            return due, "; ".join(sorted(reasons, key=lambda reason: not reason.startswith("final")))
        return due, "; ".join(reasons)

    def binds(self, step: int) -> bool:
        return any(rule.binds(step) for rule in self.rules)

    def inner(self) -> Sequence[Rule]:
        return self.rules

    def document(self) -> list[Any]:
        return [rule.document() for rule in self.rules]

    def describe(self) -> str:
        return ", and ".join(f"({rule.describe()})" if isinstance(rule, Phases) else rule.describe() for rule in self.rules)
