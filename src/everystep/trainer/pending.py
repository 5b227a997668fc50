"""The handle of one save, and what it reports."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping

from everystep.agent import messages
from everystep.errors import AgentError, CheckpointError, ConfigError

_SLICE_S = 60.0
_FINAL = frozenset({"disk", "superseded", "failed", "skipped"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a save so far.

    Args:
        step: The training step.
        outcome: ``"staging"``, ``"memory"`` (sealed in the agent), ``"disk"`` (committed), ``"superseded"`` (a newer snapshot took its
            place before the disk was free: an outcome, not an error), ``"skipped"`` (not due, or no slab was free), or ``"failed"``.
        tier: The most durable tier reached: ``""``, ``"memory"`` or ``"disk"``.
        nbytes: Bytes of tensors in the snapshot.
        timings_s: Seconds by phase: ``call`` (the loop was blocked in ``save``), ``plan``, ``stage``, ``fence``, and from the agent
            ``queue``, ``hash``, ``write``, ``sync``, ``commit``, ``total``.
        reason: Why it was skipped or failed.
    """

    step: int
    outcome: str
    tier: str
    nbytes: int
    timings_s: Mapping[str, float]
    reason: str = ""


class Pending:
    """One save under way. Thread-safe.

    Nobody needs to wait on it: a failure is logged, counted, and raised by a later ``save`` or by ``close``.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._changed = threading.Condition()
        self._outcome = "staging"
        self._tier = ""
        self._nbytes = 0
        self._timings: dict[str, float] = {}
        self._reason = ""
        self._error: CheckpointError | None = None
        self._disk_expected = False
        self._must = False
        """It is an error when it is left out."""

    @property
    def report(self) -> Report:
        """A copy of what is known now."""
        with self._changed:
            return Report(
                step=self.step,
                outcome=self._outcome,
                tier=self._tier,
                nbytes=self._nbytes,
                timings_s=dict(self._timings),
                reason=self._reason,
            )

    @property
    def error(self) -> CheckpointError | None:
        """Why the save failed, if it did."""
        return self._error

    def done(self) -> bool:
        """Whether nothing more will become of this save by itself."""
        with self._changed:
            return self._is_final()

    def wait(self, tier: str | None = None, timeout_s: float | None = None) -> Report:
        """Block until the save has reached ``tier``, or something else became of it.

        Args:
            tier: ``"memory"`` or ``"disk"``; None: as far as the cadence takes it.
            timeout_s: Give up after this many seconds; None: never.

        Raises:
            CheckpointError: The save failed (the error itself, with its class).
            TimeoutError: ``timeout_s`` passed.
        """
        if tier not in (None, "memory", "disk"):
            message = f"unknown tier {tier!r}"
            raise ConfigError(message, kind="tier", hint='the tiers are "memory" and "disk"')
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_final() or (tier == "memory" and self._tier != ""), timeout_s):
                message = f"step {self.step} has not reached {tier or 'its tier'} within {timeout_s} s; it is at {self._outcome!r}"
                raise TimeoutError(message)
            if self._error is not None and not (tier == "memory" and self._tier):
                raise self._error
        return self.report

    # -- for the checkpointer ------------------------------------------------------------------------------------------
    def _is_final(self) -> bool:
        return self._outcome in _FINAL or (self._outcome == "memory" and not self._disk_expected)

    def _expect_disk(self, expected: bool) -> None:
        with self._changed:
            self._disk_expected = expected

    def _time(self, timings_s: Mapping[str, float], *, nbytes: int | None = None) -> None:
        with self._changed:
            self._timings.update(timings_s)
            self._nbytes = self._nbytes if nbytes is None else nbytes

    def _advance(self, outcome: str, *, timings_s: Mapping[str, float] | None = None, reason: str = "",
                 error: CheckpointError | None = None) -> None:  # fmt: skip
        with self._changed:
            self._timings.update(timings_s or {})
            if outcome == "superseded" and not self._disk_expected:
                return  # it was never meant for the disk: being in memory was all that was promised
            if self._outcome not in _FINAL or outcome == "disk":
                self._outcome = outcome
                if outcome in ("memory", "disk"):
                    self._tier = outcome
                self._reason = reason or self._reason
                self._error = error if outcome == "failed" else None
            self._changed.notify_all()


class PendingExport:
    """One checkpoint that is being consolidated because ``Checkpointer.consolidate`` asked for it. Thread-safe.

    Nobody needs to wait on it: what becomes of it is in the log too.
    """

    def __init__(self, what: str, ask: Callable[[float], messages.Export] | None) -> None:
        self.what = what
        self._ask = ask
        self._lock = threading.Lock()
        self._over = ask is None
        self._path: str | None = None
        self._step: int | None = None
        self._error: CheckpointError | None = None

    @property
    def path(self) -> str | None:
        """The folder with the whole model; None while it is not there, and on nodes other than the first, which nobody has told."""
        self._look(0.0)
        return self._path

    @property
    def step(self) -> int | None:
        """The step that it is of, once it is there."""
        self._look(0.0)
        return self._step

    @property
    def error(self) -> CheckpointError | None:
        """Why it failed, if it did."""
        self._look(0.0)
        return self._error

    def done(self) -> bool:
        """Whether it is there or has failed."""
        self._look(0.0)
        return self._over

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Block until the model is there; returns ``path``.

        Raises:
            CheckpointError: It failed, and why; AgentError: the agent has gone, and nobody knows.
            TimeoutError: ``timeout_s`` passed.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._over:
            self._look(_SLICE_S if until is None else min(_SLICE_S, max(0.0, until - time.monotonic())))
            if not self._over and until is not None and time.monotonic() >= until:
                message = f"{self.what!r} is not consolidated within {timeout_s} s"
                raise TimeoutError(message)
        if self._error is not None:
            raise self._error
        return self._path

    def _look(self, timeout_s: float) -> None:
        if self._over or self._ask is None:
            return
        try:
            found = self._ask(timeout_s)
        except CheckpointError as error:
            if isinstance(error, AgentError) and error.kind == "timeout":
                return  # a busy agent: it is asked again
            with self._lock:
                self._error, self._over = error, True
            return
        if found.over:
            with self._lock:
                self._path, self._step, self._over = found.path, found.step, True
