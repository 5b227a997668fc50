"""Hearing signals without doing anything in their handlers."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from everystep.errors import ConfigError

_log = logging.getLogger("everystep")


class Ear:
    """Notes when each signal came first, then calls the Python handler that was there before.

    Only a signal that would do what it does by default, or that has a Python handler, is taken: one that is ignored, or whose handler
    Python does not know, is left as it is, with a warning. In a forked child, and after ``remove``, it does what it did before.
    """

    def __init__(self, numbers: Iterable[int], clock: Callable[[], float]) -> None:
        self.numbers = tuple(numbers)
        self._clock = clock
        self._pid = os.getpid()
        self._noted: dict[int, float] = {}
        self._before: dict[int, Any] = {}
        self._listens = False
        self._mine = self._arrived  # one object, so that it can be told from others

    def install(self) -> None:
        """Take the signals; a warning where that cannot be. To be called once."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals are not watched: the Checkpointer was not made in the main thread, which alone can install handlers")
            return
        _ears.add(self)
        for number in self.numbers:
            before = signal.getsignal(number)
            if before is None or before == signal.SIG_IGN:
                why = "is ignored in this process" if before is not None else "has a handler that Python does not know"
                _log.warning("%s %s, and is not watched; to watch it, set it to signal.SIG_DFL first", name_of(number), why)
                continue
            self._before[number] = before  # first: the signal may come at once
            self._listens = True
            signal.signal(number, self._mine)

    def remove(self) -> None:
        """Give them back where nobody has put a handler over ours; the others go through to what was there before.

        Only the main thread can give them back; in others they go through.
        """
        self._listens = False
        _ears.discard(self)
        if threading.current_thread() is threading.main_thread():
            self.give_back()

    def give_back(self) -> None:
        """Put back what was there before, where it is ours to do."""
        for number, before in self._before.items():
            if signal.getsignal(number) is self._mine:
                signal.signal(number, before)

    def earliest(self, numbers: Iterable[int]) -> tuple[int, float] | None:
        """The first of these that has come, and when."""
        times = [(self._noted.get(number, math.inf), number) for number in numbers]
        at, number = min(times, default=(math.inf, 0))
        return None if math.isinf(at) else (number, at)

    def forget(self, numbers: Iterable[int], *, until: float) -> None:
        """What came up to ``until`` is dealt with."""
        for number in numbers:
            if self._noted.get(number, math.inf) <= until:
                self._noted.pop(number, None)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        """The handler. It runs between any two operations of the main thread, whatever locks that holds: so it takes none."""
        before = self._before.get(number, signal.SIG_DFL)
        if self._listens and os.getpid() == self._pid:
            self._noted.setdefault(number, self._clock())
            if before is not signal.default_int_handler and callable(before):
                before(number, frame)
        elif callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_ears: weakref.WeakSet[Ear] = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    """Python drops a signal that reaches the child before its handlers are put back: the worker that it was to end would live."""
    if _ears:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number for ear in list(_ears) for number in ear.numbers})


def _after_fork() -> None:
    mask = getattr(_forking, "mask", None)
    if mask is not None:
        _forking.mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_fork() -> None:
    """A child, such as a worker of a pool, is not to note the signal that is to end it."""
    for ear in list(_ears):
        ear.give_back()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_fork)


def signals_of(option: str, given: object) -> tuple[int, ...]:
    """The signals that a user names: numbers, ``signal.Signals`` or their names. ConfigError when one is none that can be caught."""
    found: list[int] = []
    for one in given if isinstance(given, (tuple, list)) else (given,):
        try:
            number = signal.Signals[one] if isinstance(one, str) else signal.Signals(one)
        except (KeyError, ValueError):
            number = None
        if number is None or isinstance(one, bool) or number in (signal.SIGKILL, signal.SIGSTOP):
            message = f"Preemption({option}=...) has {one!r}, which is no signal that can be caught"
            raise ConfigError(message, key=option, kind="option", hint="give signals such as (signal.SIGTERM,)")
        found.append(number)
    return tuple(dict.fromkeys(found))


def name_of(number: int) -> str:
    """Such as ``SIGTERM``."""
    return signal.Signals(number).name
