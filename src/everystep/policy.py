"""Decisions with reasons: when to save to which tier, what to keep. Pure: ``now`` is an argument."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from everystep.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """How often a ``save`` reaches each tier.

    Args:
        memory: Every how many steps ``save`` stages to memory (1: each call; a step that is not due returns a Pending that is ``skipped``).
        disk: None (default): as fast as the disk takes them without queueing, newest wins. An int N: the steps divisible by N.
            A duration as text ("30s", "2min", "1h"): the first save after that time. False: never by itself. A float is refused: nobody
            sees that 30 would be steps and 30.0 seconds.
    """

    memory: int = 1
    disk: int | str | bool | None = None

    def __post_init__(self) -> None:
        """Check both; ConfigError says what would be right."""
        if isinstance(self.memory, bool) or not isinstance(self.memory, int) or self.memory < 1:
            raise ConfigError(f"Cadence(memory={self.memory!r}) is not a number of steps", hint="give an int >= 1")
        if self.disk is None or self.disk is False:
            return
        if self.disk is True:
            raise ConfigError("Cadence(disk=True) says nothing", hint="None: as fast as the disk takes them; an int: every so many steps")
        if isinstance(self.disk, int):
            if self.disk < 1:
                raise ConfigError(f"Cadence(disk={self.disk!r}) is not a number of steps", hint="give an int >= 1, or False for never")
        elif isinstance(self.disk, float):
            raise ConfigError(f"Cadence(disk={self.disk!r}) could be steps or seconds",
                              hint=f'write a duration as text, such as "{self.disk:g}s", and a number of steps as an int')  # fmt: skip
        else:
            duration_s(self.disk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints on disk stay. The newest verified one, pinned and held ones always stay.

    Args:
        last: The newest this many (>= 1), or None for all.
        best: How many of the best by ``metric``.
        metric: Name of the metric, such as ``"val_loss"``; needed by ``best``.
        mode: ``"min"`` or ``"max"``.
        every: Also keep each step divisible by this.
    """

    last: int | None = 3
    best: int = 0
    metric: str | None = None
    mode: str = "min"
    every: int | None = None

    def __post_init__(self) -> None:
        """Check all; ConfigError says what would be right."""
        for name, value, least in (("last", self.last, 1), ("best", self.best, 0), ("every", self.every, 1)):
            if value is None and name != "best":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"Keep({name}={value!r}) is not a number of checkpoints or steps", hint=f"give an int >= {least}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"Keep(mode={self.mode!r}) is not known", hint='write "min" or "max"')
        if self.best and not self.metric:
            raise ConfigError(f"Keep(best={self.best}) does not say by which metric", hint='add metric="val_loss", or what save() gets')


class Kept(msgspec.Struct, frozen=True):
    """One checkpoint with the decision about it and why."""

    key: str
    step: int
    keep: bool
    reason: str


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What retention knows of one committed checkpoint (newest last is not required)."""

    key: str
    step: int
    attempt: int
    metrics: Mapping[str, float]
    pinned: bool = False
    held: bool = False
    verified: bool | None = None
    """False: known to be corrupt (never counts as the newest good one); None: not yet checked; True: checked."""
    in_lineage: bool = True
    """False: belongs to an abandoned timeline; counts for nothing in ``last`` but is only forgotten when it is not pinned or held."""
    reduced: int = 0
    """Which reduction of that step it is: it lacks some groups, so it is no good one to go on from. 0: it holds all that was saved."""


def keeps_step(step: int, keep: Keep) -> bool:
    """Whether retention keeps this step for its number."""
    return keep.every is not None and step % keep.every == 0


class BestSoFar:
    """The best values of ``keep.metric`` seen, to say of a new one whether retention would keep it."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._values: list[float] = []
        self.known = False
        """Whether what lies on the store has been told."""

    def learn(self, metrics: Iterable[Mapping[str, float]]) -> None:
        """What earlier checkpoints have."""
        self.known = True
        metric = self._keep.metric
        for one in metrics:
            if metric is not None and metric in one:
                self.improves(one[metric])

    def improves(self, value: float) -> bool:
        """Whether ``value`` is among the ``keep.best`` best; it counts from now on."""
        if math.isnan(value):
            return False
        ranked = sorted([*self._values, value], reverse=self._keep.mode == "max")[: self._keep.best]
        better = ranked != self._values  # also when there were fewer than that; a tie with the worst changes nothing
        self._values = ranked
        return better


def retain(candidates: Sequence[Candidate], keep: Keep) -> list[Kept]:
    """Decide for every candidate. ``last`` counts within the lineage; never forgets the newest good one, a pinned, held, or best one.

    Known-corrupt ones count for nothing; they stay only while they are newer than the oldest of the ``last`` good ones, as evidence. When
    the lineage has no good one yet (a fresh start over old checkpoints), the newest good one of the abandoned timelines stays. With
    ``last=None`` all stay. A reduced one takes its step's place in ``last`` and ``best``, and is never the newest good one; beside the
    whole one (it is being reduced) it stays or goes with it. Decisions come newest first.
    """
    newest_first = _newest_first(candidates)
    reasons: dict[str, list[str]] = {c.key: [] for c in newest_first}
    for key, best in _newest_good(newest_first):
        reasons[key].append(best)
    of_step: dict[tuple[int, int], Candidate] = {}
    for candidate in newest_first:
        of_step.setdefault((candidate.attempt, candidate.step), candidate)
    lineage = [c for c in of_step.values() if c.in_lineage]
    counted = 0
    for candidate in lineage:
        if keep.last is not None and counted >= keep.last:
            break
        counted += candidate.verified is not False
        reasons[candidate.key].append("corrupt, not counted" if candidate.verified is False else f"last {keep.last or 'all'}")
    for candidate in _best([c for c in lineage if c.verified is not False], keep):
        reasons[candidate.key].append(f"best {keep.best} by {keep.metric}")
    for candidate in newest_first:
        why = reasons[candidate.key]
        why += _protection(candidate)
        whole = of_step[candidate.attempt, candidate.step]
        if whole is not candidate:
            why += [f"made of {whole.key}"] * bool(reasons[whole.key])
            continue
        if candidate.in_lineage and keep.every is not None and is_due(candidate.step, keep.every):
            why.append(f"every {keep.every}")
        if not candidate.in_lineage and keep.last is None:
            why.append("all are kept")
    return [Kept(c.key, c.step, bool(reasons[c.key]), ", ".join(reasons[c.key]) or _against(c, keep)) for c in newest_first]


def protected(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Which of them are never removed or reduced, whatever is asked for, and why: the newest good, newest verified, pinned, held ones."""
    newest_first = _newest_first(candidates)
    reasons: dict[str, list[str]] = {c.key: _protection(c) for c in newest_first}
    for key, best in _newest_good(newest_first):
        reasons[key].append(best)
    return {key: ", ".join(why) for key, why in reasons.items() if why}


def _newest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The lineage's first; a whole one before its reductions."""
    return sorted(candidates, key=lambda c: (c.in_lineage, c.attempt, c.step, -c.reduced), reverse=True)


def _newest_good(newest_first: Sequence[Candidate]) -> Iterable[tuple[str, str]]:
    good = [c for c in newest_first if c.verified is not False and not c.reduced]
    yield from ((c.key, "newest good") for c in good[:1])
    yield from ((c.key, "newest verified") for c in [c for c in good if c.verified][:1])


def _protection(candidate: Candidate) -> list[str]:
    return ["pinned"] * candidate.pinned + ["held by a reader"] * candidate.held


def _best(candidates: Sequence[Candidate], keep: Keep) -> Sequence[Candidate]:
    """The best by the metric, newer first among equals. A NaN is no measurement."""
    if not keep.best or keep.metric is None:
        return ()
    name, sign = keep.metric, 1 if keep.mode == "min" else -1
    measured = [c for c in candidates if not math.isnan(c.metrics.get(name, math.nan))]
    return sorted(measured, key=lambda c: sign * c.metrics[name])[: keep.best]


def _against(candidate: Candidate, keep: Keep) -> str:
    if not candidate.in_lineage:
        return "abandoned: the run went on from an earlier step"
    return "corrupt" if candidate.verified is False else f"older than the last {keep.last}"


_UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(value: str) -> float:
    """Seconds in "250ms", "30s", "2min", "1h" or "1d". ConfigError says which units there are."""
    seconds = math.nan
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", value, re.ASCII)
        if match is not None and match[2] in _UNITS_S:
            seconds = float(match[1]) * _UNITS_S[match[2]]
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{value!r} is not a duration", hint='write it as "250ms", "30s", "2min", "1h" or "1d"')
    return seconds


def is_due(step: int, every: int) -> bool:
    """Whether a step is due by number."""
    return step % every == 0


def disk_bound(step: int, cadence: Cadence, *, now: float, last_bound_at: float | None) -> bool:
    """Whether this step must reach the disk (is *bound* for it), as opposed to may, when the disk is idle (cadence.disk is None).

    ``now`` and ``last_bound_at`` (None: no step has been bound yet) are seconds on one clock.
    """
    disk = cadence.disk
    if disk is None or isinstance(disk, bool):
        return False
    if isinstance(disk, int):
        return is_due(step, disk)
    return last_bound_at is None or now - last_bound_at >= duration_s(disk)
