"""The handle of one save, and what it reports."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping

from everystep.errors import CheckpointError, ConfigError

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
