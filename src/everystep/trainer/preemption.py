"""SIGTERM: save, and exit 0. SIGUSR1: save now, and go on. See ``targets`` for how many ranks do that together."""

from __future__ import annotations

import dataclasses
import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Protocol

from everystep.errors import AgentError, CheckpointError, ConfigError
from everystep.trainer.pending import Report
from everystep.trainer.signals import Ear, name_of, signals_of
from everystep.trainer.targets import Agreed, Others, Rounds, Shared, Verdict, Wish

__all__ = ["Preemption", "PreemptionReport", "Request", "Saved", "Watch"]

_log = logging.getLogger("everystep")
_RESERVE_SHARE, _RESERVE_MAX_S = 0.1, 2.0
"""Of the grace: what the process keeps to end in."""
_UNDER_WAY = 1.5
"""A write that is under way is finished first: half a write, on average."""
_WEIGHT = 0.3
"""Of the newest observation of the disk's speed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preemption:
    """What a signal does: save at the next call of ``save`` (of many ranks: at one that all agree on), whatever the cadence; then exit.

    Args:
        grace_s: Seconds from the signal to the end, as the scheduler gives them. A signal is noticed between two operations of the main
            thread, so take off what the longest of them (a backward pass) takes.
        exit: After one of ``signals``: raise SystemExit from ``save``. False: go on, and leave the end to the program.
        signals: They mean that the process is to end.
        save_signals: They mean to save now and to go on.
        memory: When the disk would take longer than the grace lasts, leave as soon as the agent holds the step; the agent goes on
            writing it. False: wait for the disk for as long as the grace lasts, for places where the agent ends together with this process.
    """

    grace_s: float = 30.0
    exit: bool = True
    signals: tuple[int, ...] = (signal.SIGTERM,)
    save_signals: tuple[int, ...] = (signal.SIGUSR1,)
    memory: bool = True

    def __post_init__(self) -> None:
        """Check all; ConfigError says what would be right."""
        grace_s = self.grace_s
        if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not 0 < grace_s < math.inf:
            message = f"Preemption(grace_s={grace_s!r}) is not a time"
            raise ConfigError(message, key="grace_s", kind="option", hint="give seconds, more than 0")
        for option in ("signals", "save_signals"):
            object.__setattr__(self, option, signals_of(option, getattr(self, option)))
        both = set(self.signals) & set(self.save_signals)
        if both:
            message = f"Preemption has {name_of(min(both))} both in signals and in save_signals"
            raise ConfigError(message, key="signals", kind="option", hint="a signal either ends the process or does not")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreemptionReport:
    """What became of the save that a signal asked for, as far as it was known when ``save`` went on.

    Args:
        step: The training step.
        signal: The signal's name, here or on the rank that had it.
        tier: ``"disk"`` (committed), ``"memory"`` (the agent holds it), or ``""`` (it was not saved).
        durable: Whether it is on disk. True only after the commit.
        waited_s: Seconds that ``save`` waited for it, and for the other ranks.
        grace_s: Seconds that the signal gave.
        reason: Why it is not on disk; empty if it is.
    """

    step: int
    signal: str
    tier: str
    durable: bool
    waited_s: float
    grace_s: float
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """This call of ``save`` is to save, bound for the disk, whatever the cadence says.

    Args:
        step: The training step.
        exit: Whether ``Watch.finish`` raises SystemExit.
        tier: What ``finish`` waits for: ``"disk"`` or ``"memory"``.
        signal: The signal's name.
        reason: Why not the disk, when the tier is ``"memory"``.
        deadline: When the grace ends, by the watch's clock.
        asked_at: Signals that came until then are served by it.
        round: Of the agreement.
    """

    step: int
    exit: bool
    tier: str
    signal: str
    reason: str
    deadline: float
    asked_at: float
    round: int


class Saved(Protocol):
    """What ``finish`` needs of a ``Pending``."""

    @property
    def report(self) -> Report:
        """What is known now."""

    def wait(self, tier: str | None = None, timeout_s: float | None = None) -> Report:
        """CheckpointError when it failed; TimeoutError."""


class Watch:
    """The signals of one process, and what comes of them. One checkpointer calls it, one thread at a time unless a method says otherwise.

    Args:
        preemption: None: nothing is watched, and nothing here does anything.
        outlives: Whether the agent is a process of its own. If not, memory is no tier.
        clock: Seconds that never go back.
        pause: Waits that many seconds.
    """

    def __init__(
        self,
        preemption: Preemption | None,
        *,
        outlives: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.report: PreemptionReport | None = None
        """Of the last signal that was served."""
        self._preemption = preemption or Preemption()
        self._outlives = outlives
        self._clock = clock
        self._pause = pause
        self._ear: Ear | None = None
        if preemption is not None:
            self._ear = Ear((*preemption.signals, *preemption.save_signals), clock)
        self._rounds: Rounds | None = None
        self._step: int | None = None
        self._disk: tuple[float, int] | None = None
        self._leaving: Request | None = None
        self._unreachable = False

    def install(self) -> None:
        """Begin to listen; call it last in the checkpointer's ``__init__``. Outside the main thread only other ranks' signals count."""
        if self._ear is not None:
            self._ear.install()

    def remove(self) -> None:
        """Give the signals back; call it at the end of ``close``, and where a checkpointer is abandoned. Any thread; also twice."""
        if self._ear is not None:
            self._ear.remove()

    def join(self, world: Shared) -> None:
        """From now on the ranks of ``world`` agree. Call it before the first ``due`` on all ranks, or at the same call of ``save``."""
        many = self._ear is not None and world.size > 1
        self._rounds = Rounds(world, tier=self._tier, clock=self._clock, glance=getattr(world, "glance", None)) if many else None
        self._step = None

    def learn(self, report: Report) -> None:
        """A save has been committed: call it with each one's report, so that it is known how long the disk takes. Any thread."""
        seconds = report.timings_s.get("total", 0.0) - report.timings_s.get("queue", 0.0)
        if report.nbytes and seconds > 0:
            seen = report.nbytes / seconds
            known = self._disk
            self._disk = (seen if known is None else _WEIGHT * seen + (1 - _WEIGHT) * known[0], report.nbytes)

    def due(self, step: int) -> Request | None:
        """Whether this call of ``save`` has to save because of a signal.

        Call it once in every ``save``, as soon as the step is known to be a step, and before the cadence or an error can end the call: the
        ranks count them. If it returns a request: save, bound for the disk, not skippable, waiting for a free slab no longer
        than ``left_s(request)``; then ``finish``. Free with one rank, one look at the store with many.
        """
        if self._ear is None:
            return None
        mine = self._wish(self._ear)
        if self._rounds is None:
            if mine is None:
                return None
            tier, reason = self._tier(mine.left_s)
            return self._request(step, Agreed(0, Verdict(wish=mine, tier=tier, reason=reason), mine.left_s))
        if step != self._step:  # the same step again is the same state, and no further call
            self._step = step
            self._rounds.next_call()
        try:
            agreed = self._rounds.due(mine)
        except AgentError as error:  # rank 0 has gone: the training will notice as well
            if not self._unreachable:
                _log.warning("signals are not watched any more: %s", error)
            self._unreachable = True
            return None
        return None if agreed is None else self._request(step, agreed)

    def left_s(self, request: Request) -> float:
        """Seconds that may still be waited; some are kept to end in."""
        return max(0.0, request.deadline - self._reserve_s() - self._clock())

    def finish(self, request: Request, pending: Saved) -> PreemptionReport:
        """Wait as long as there is sense in it, say what was reached, and exit if that was asked for. Call it last in ``save``.

        Raises:
            SystemExit: The request says so. Code 0 if the step is saved, in memory or on disk; 1 if it is not.
        """
        began, reason = self._clock(), request.reason
        try:
            pending.wait(request.tier, timeout_s=self.left_s(request))
        except TimeoutError:
            reason = f"it had not got there when the {self._preemption.grace_s:g} s of grace were over"
        except CheckpointError as error:
            reason = str(error)
        found = pending.report
        if not found.tier and not reason:
            reason = found.reason or f"it is {found.outcome}"
        broken = False
        if self._rounds is not None:
            others = self._gathered(self._rounds, request, reason if not found.tier else "")
            broken = others.broken
            reason = "; ".join(part for part in (reason, others.text) if part)
        outcome = pending.report  # once more: it may have been committed meanwhile
        durable = outcome.tier == "disk"
        self.report = PreemptionReport(
            step=request.step, signal=request.signal, tier="" if broken and not durable else outcome.tier, durable=durable,
            waited_s=self._clock() - began, grace_s=self._preemption.grace_s,
            reason="" if durable else reason or outcome.reason or f"it is {outcome.outcome}",
        )  # fmt: skip
        self._served(request)
        self._say(request, self.report)
        if request.exit:
            self._leaving = request
            if threading.current_thread() is not threading.main_thread():
                _log.warning("save() was not called in the main thread, so SystemExit ends this thread only: end the process by yourself")
            raise SystemExit(0 if self.report.tier else 1)
        return self.report

    def drain_s(self, timeout_s: float | None) -> float | None:
        """How long ``close`` may wait for the disk: ``timeout_s``, or less when a signal has said that the process is to end.

        0.0: leave without waiting and without a goodbye, as if the process had died: the agent makes the newest snapshot durable by itself.
        """
        deadline = None
        if self._leaving is not None:
            deadline = self._leaving.deadline
        elif self._ear is not None and self._preemption.exit:
            noted = self._ear.earliest(self._preemption.signals)
            deadline = None if noted is None else noted[1] + self._preemption.grace_s
        if deadline is None or not self._outlives:
            return timeout_s  # nobody else would go on writing: it is tried until the process is killed
        if self._leaving is not None and self.report is not None and not self.report.durable:
            return 0.0  # what could be waited for has been
        left = max(0.0, deadline - self._reserve_s() - self._clock())
        return left if timeout_s is None else min(left, timeout_s)

    @property
    def ending(self) -> bool:
        """Whether a signal has said that the process is to end."""
        asked = self._ear is not None and self._preemption.exit and self._ear.earliest(self._preemption.signals) is not None
        return self._leaving is not None or asked

    def _wish(self, ear: Ear) -> Wish | None:
        """What this process's own signals ask for; to end goes before to save."""
        preemption = self._preemption
        for numbers, leave in ((preemption.signals, preemption.exit), (preemption.save_signals, False)):
            noted = ear.earliest(numbers)
            if noted is not None:
                return Wish(signal=name_of(noted[0]), exit=leave, left_s=noted[1] + preemption.grace_s - self._clock())
        return None

    def _request(self, step: int, agreed: Agreed) -> Request:
        verdict, now = agreed.verdict, self._clock()
        return Request(step=step, exit=verdict.wish.exit, tier=verdict.tier, signal=verdict.wish.signal, reason=verdict.reason,
                       deadline=now + agreed.left_s, asked_at=now, round=agreed.round)  # fmt: skip

    def _tier(self, left_s: float) -> tuple[str, str]:
        """The tier to wait for, and why not for the disk.

        While the disk's speed is not known it is tried: to wait costs seconds, to leave too early may cost the checkpoint.
        """
        left_s = max(0.0, left_s - self._reserve_s())
        if self._outlives and self._preemption.memory and self._disk is not None:
            bytes_per_s, nbytes = self._disk
            seconds = _UNDER_WAY * nbytes / bytes_per_s
            if seconds > left_s:
                return "memory", f"the disk would take about {seconds:.1f} s, and {left_s:.1f} s were left"
        return "disk", ""

    def _reserve_s(self) -> float:
        return min(_RESERVE_MAX_S, _RESERVE_SHARE * self._preemption.grace_s)

    def _gathered(self, rounds: Rounds, request: Request, failed: str) -> Others:
        until = request.deadline - self._reserve_s() / 2
        try:
            return rounds.gather(request.round, failed=failed, exit=request.exit, until=until, pause=self._pause)
        except AgentError as error:
            return Others(f"the other ranks could not be asked: {error}")

    def _served(self, request: Request) -> None:
        if self._ear is not None:
            ends = request.exit or not self._preemption.exit  # else a signal to end is still to be served
            numbers = (*self._preemption.save_signals, *(self._preemption.signals if ends else ()))
            self._ear.forget(numbers, until=request.asked_at)

    def _say(self, request: Request, report: PreemptionReport) -> None:
        if report.durable:
            what = f"is on disk after {report.waited_s:.1f} s"
        elif report.tier:
            after = "the agent goes on writing it for as long as it lives" if self._outlives else "it is still being written"
            what = f"is in memory and not on disk: {report.reason}; {after}"
        else:
            what = f"is not saved: {report.reason}"
        level = logging.INFO if report.durable and not request.exit else logging.WARNING
        _log.log(level, "%s: step %d %s; %s", report.signal, report.step, what, "exiting" if request.exit else "training goes on")
