"""How many saves have failed in a row, for how long, and when that has to be said loudly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from everystep.errors import CheckpointError

_log = logging.getLogger("everystep")
_KEPT = 100


class Failures:
    """Counts failed saves. With a save at every step a short trouble is many failures in a row, so the time they last counts as well.

    Args:
        at_most: This many in a row are borne; 0: none.
        for_s: ... unless they have lasted less than this many seconds.
    """

    def __init__(self, *, at_most: int, for_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.errors: list[CheckpointError] = []
        """Oldest first, the newest hundred."""
        self._at_most = at_most
        self._for_s = for_s
        self._clock = clock
        self._in_a_row = 0
        self._since = 0.0
        self._without_since: float | None = None

    def add(self, step: int, error: CheckpointError, *, counts: bool = True) -> None:
        """A save has failed. ``counts`` is False for what failed together with one that is counted."""
        self.errors.append(error)
        del self.errors[:-_KEPT]
        if counts:
            if not self._in_a_row:
                self._since = self._clock()
            self._in_a_row += 1
        _log.error("save of step %d failed: %s", step, error)

    def without(self) -> bool:
        """A save has been left out. That is no failure by itself; True when none has been made for as long as failures are borne."""
        now = self._clock()
        if self._without_since is None:
            self._without_since = now
        return now - self._without_since >= self._for_s

    def saved(self) -> None:
        """A save has come as far as memory."""
        self._without_since = None

    def end(self) -> None:
        """A save has succeeded."""
        self._in_a_row = 0

    def raise_if_due(self) -> None:
        """Raise the last error when the row is long enough; then a new row begins."""
        enough = self._in_a_row >= self._at_most and self._clock() - self._since >= self._for_s
        if self._in_a_row and (not self._at_most or enough):
            self._in_a_row = 0
            raise self.errors[-1]
