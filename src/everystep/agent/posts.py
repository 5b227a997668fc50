"""Threads that bring each destination what it does not know yet, the newest state only; one that fails holds up no other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from everystep.errors import AgentError, CheckpointError

_log = logging.getLogger(__name__)
_THREADS = 16
_RETRY_S, _RETRY_MAX_S = 0.25, 15.0


class Posts:
    """A few threads, begun as they are needed.

    Args:
        deliver: Sends a destination the newest state; a CheckpointError: it is tried again later.
        told: Hears how each try ended.
    """

    def __init__(self, deliver: Callable[[int], None], told: Callable[[int, CheckpointError | None], None]) -> None:
        self._deliver = deliver
        self._told = told
        self._changed = threading.Condition()
        self._due: dict[int, float] = {}
        self._under_way: set[int] = set()
        self._tries: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def mark(self, destinations: Sequence[int]) -> None:
        """There is news for these."""
        with self._changed:
            if self._closed:
                return
            for destination in destinations:
                self._due.setdefault(destination, 0.0)
            wanted = min(_THREADS, len(self._due) + len(self._under_way))
            while len(self._threads) < wanted:
                thread = threading.Thread(target=self._run, name=f"everystep-post-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def hurry(self, destinations: Sequence[int] | None = None) -> None:
        """What waits for another try is tried now: of all, since addresses have changed, or of those from whom we have just heard."""
        with self._changed:
            for destination in self._due if destinations is None else [one for one in destinations if one in self._due]:
                self._tries.pop(destination, None)
                self._due[destination] = 0.0
            self._changed.notify_all()

    def close(self, *, flush_s: float) -> None:
        """Begin the end: what is due and has not failed yet is delivered within this time, the rest is not."""
        with self._changed:
            self._changed.wait_for(lambda: all(self._tries.get(one) for one in (*self._due, *self._under_way)), timeout=flush_s)
            self._closed = True
            self._changed.notify_all()

    def join(self, *, timeout_s: float) -> None:
        """Wait for the threads."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _take(self) -> int | None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                ready = [(at, destination) for destination, at in self._due.items() if destination not in self._under_way]
                first = min(ready, default=None)
                if first is not None and first[0] <= now:
                    del self._due[first[1]]
                    self._under_way.add(first[1])
                    return first[1]
                self._changed.wait(None if first is None else first[0] - now)
            return None

    def _run(self) -> None:
        while (destination := self._take()) is not None:
            failure: CheckpointError | None = None
            try:
                self._deliver(destination)
            except CheckpointError as error:
                failure = error
            except Exception as error:  # the thread's top: without it nothing is told to anybody
                _log.exception("telling node %d failed", destination)
                failure = AgentError(f"{type(error).__name__}: {error}", kind="unexpected")
            with self._changed:
                self._under_way.discard(destination)
                if failure is None:
                    self._tries.pop(destination, None)
                else:
                    tries = self._tries[destination] = self._tries.get(destination, 0) + 1
                    self._due[destination] = time.monotonic() + min(_RETRY_MAX_S, _RETRY_S * 2 ** min(tries - 1, 16))
                self._changed.notify_all()
            self._told(destination, failure)
