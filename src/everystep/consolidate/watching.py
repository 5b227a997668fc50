"""Follows a folder that a training job writes its checkpoints to, and consolidates those that the schedule says.

Theory of operation. Every ``poll_s`` a look: the times of the folders below DIR are compared with the last look's, and only when something
changed (or now and then all the same: not every file system tells) the checkpoints are listed and the schedule asked. What is due waits in
a queue, protected from the job's own pruning (``protecting``), and is consolidated by a child process, one at a time: this process imports
no torch, stays small, goes on looking meanwhile, and survives whatever happens to the child. What has been done is read from the exports'
``history.json`` at each look, so a watch that was killed goes on where it was. Between the looks it sleeps in ``select`` and is woken by
the child's end or by a signal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from everystep import errors
from everystep.consolidate import protecting
from everystep.consolidate.source import Found, find_checkpoints
from everystep.schedule import Consolidate, Decision, Seen, decide

__all__ = ["Child", "Event", "Outcome", "Watch", "candidates", "fingerprint", "seen_of"]

FULL_LOOK = 6
"""Every how many polls a look lists the checkpoints although no folder's time has changed."""

DEPTH = 3
"""How deep folders' times are compared: DIR/lightning_logs/version_0/checkpoints."""

PROTECTED = 3
"""How many due checkpoints are protected at once: the one that is read, and two that wait. Each may keep space from the job."""

RETRY_S = (30.0, 600.0)
"""Pause after a first failure that may pass by itself, and the longest; each is twice the one before."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened, for a person and for a program."""

    what: str
    """``watching``, ``absent``, ``back``, ``unreadable``, ``incomplete``, ``skipped``, ``due``, ``unprotected``, ``consolidated``,
    ``already``, ``pruned``, ``full``, ``failed``, ``over``, ``ended``."""
    text: str
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a child ended: with what it printed of the export, or with an error."""

    exported: Mapping[str, Any] | None = None
    error: errors.CheckpointError | None = None

    @classmethod
    def of(cls, code: int, printed: str, said: str) -> Outcome:
        """Of ``everystep consolidate --json``, by its exit code, its output, and its errors: its own error again, or how it broke off."""
        try:
            told = json.loads(printed)
        except ValueError:
            told = None
        told = told if isinstance(told, dict) else {}
        if code == 0 and "path" in told:
            return cls(exported=told)
        error = told.get("error")
        if isinstance(error, dict) and error.get("name"):
            return cls(error=errors.rebuild(
                str(error["name"]), str(error.get("message", "")), step=error.get("step"), key=error.get("key"),
                kind=str(error.get("kind") or ""), hint=str(error.get("hint") or ""),
            ))  # fmt: skip
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        hint = "is there enough memory?" if code == -signal.SIGKILL else ""
        why = f"its process ended {ended}" + (f": {last.strip()}" if last else "")
        return cls(error=errors.CheckpointError(why, kind="broke-off", hint=hint))


class Child(Protocol):
    """A process that consolidates one checkpoint."""

    def fileno(self) -> int:
        """Readable when the process has ended."""
        ...

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        ...

    def kill(self) -> None:
        """End it and wait for its end."""
        ...


Start = Callable[[Found, str, str], Child]
"""(checkpoint, where to read it, reason) -> a child that consolidates it."""


class Watch:
    """One folder followed.

    Args:
        root: The folder.
        options: When, what and where.
        start: Starts the child for one checkpoint.
        tell: Gets every event.
        done: Gives what has been consolidated before, from the exports' history.
        tidy: Removes partial exports that nobody holds; gets the checkpoints beside which there may be some.
        wake: A file descriptor that becomes readable when ``stopped`` may have changed.
        stopped: Whether to end now.
        over: Whether the job has ended: what ``final`` waits for.
        idle_s: The job also counts as ended when nothing has changed for so long; None: never.
        find: As ``candidates``, which it is unless given.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        root: str,
        options: Consolidate,
        *,
        start: Start,
        tell: Callable[[Event], None],
        done: Callable[[Sequence[Found]], Sequence[Seen]],
        tidy: Callable[[Sequence[Found]], None],
        wake: int,
        stopped: Callable[[], bool],
        over: Callable[[], bool],
        idle_s: float | None = None,
        poll_s: float = 10.0,
        retry_s: tuple[float, float] = RETRY_S,
        find: Callable[[str], Sequence[Found]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._options, self._start, self._tell_event = root, options, start, tell
        self._done, self._tidy, self._wake, self._stopped, self._over = done, tidy, wake, stopped, over
        self._idle_s, self._poll_s, self._retry_s, self._find, self._clock = idle_s, poll_s, retry_s, find or candidates, clock
        self._protection = protecting.Protection(root)
        self._told: dict[str, str] = {}
        self._print: object = None
        self._unchanged = 0
        self._changed_at = clock()
        self._there: bool | None = None
        self._any = False
        self._tidied = False
        self._queue: list[tuple[Found, Decision]] = []
        self._running: tuple[Found, Decision, Child] | None = None
        self._begun: dict[str, Found] = {}
        """What was begun and not finished."""
        self._bad: dict[str, object] = {}
        self._tries: dict[str, tuple[int, float]] = {}
        self._full: tuple[int, float] = (0, 0.0)
        self._succeeded = False
        self.failed: errors.CheckpointError | None = None
        """The newest failure that nothing has made good."""

    # -- the loop ---------------------------------------------------------------------------------------------------
    def run(self, *, once: bool = False) -> None:
        """Follow until told to stop, or until the job is over and all that was due is done; ``once``: what is due now, then return.

        Raises:
            NotFoundError: ``once``, and the folder is not there.
            ConfigError: What was asked for cannot be done with these checkpoints, such as a group that has to be named.
        """
        try:
            self._follow(once=once)
        finally:
            unfinished = [one for one in self._begun.values() if os.path.exists(one.path)]
            if self._running is not None:
                self._running[2].kill()
                self._running = None
            self._protection.close()
            with contextlib.suppress(errors.CheckpointError, OSError):  # the next watch, or the next export, does it
                self._tidy(unfinished)

    def _follow(self, *, once: bool) -> None:
        looked_at: float | None = None
        ended = False
        while not self._stopped():
            finished = self._reap()
            if not (once and looked_at is not None) and (finished or looked_at is None or self._clock() - looked_at >= self._poll_s):
                ended = self._is_over()
                self._look(ended=ended, once=once, all_of_it=finished or ended)
                looked_at = self._clock()
            self._begin()
            if self._running is None and (once or ended):
                if not once and self._queue:  # what failed is tried again
                    self._sleep(looked_at)
                    continue
                self._say("over", "all that was due is done" if not self._queue else f"{len(self._queue)} due, not done")
                return
            self._sleep(looked_at)
        self._say("ended", "asked to end" + (": what was being written is given up, and due again" if self._running else ""))

    def _sleep(self, looked_at: float | None) -> None:
        """Until the next look, the child's end, or a signal."""
        waiting: list[Any] = [self._wake]
        if self._running is not None:
            waiting.append(self._running[2])
        until = (self._clock() if looked_at is None else looked_at) + self._poll_s
        ready, _, _ = select.select(waiting, [], [], max(0.0, until - self._clock()))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)

    def _is_over(self) -> bool:
        if self._over():
            return True
        return self._idle_s is not None and self._any and self._clock() - self._changed_at >= self._idle_s

    # -- looking ----------------------------------------------------------------------------------------------------
    def _look(self, *, ended: bool, once: bool, all_of_it: bool) -> None:
        if not os.path.isdir(self._root):
            if once:
                raise errors.NotFoundError(
                    f"there is no folder {self._root!r}", key=self._root, kind="no-folder", hint="give the folder that the job writes to"
                )
            if self._there is not False:
                self._say("absent", f"{self._root!r} is not there{' any more' if self._there else ' yet'}: waiting for it")
            self._there, self._print = False, None
            for one, _ in self._queue:
                self._protection.release(one)
            self._queue = []
            return
        if self._there is False:
            self._say("back", f"{self._root!r} is there")
        self._there = True
        changed = self._has_changed()
        self._unchanged = 0 if changed else self._unchanged + 1
        if not changed and not all_of_it and self._unchanged % FULL_LOOK:
            return
        try:
            found = list(self._find(self._root))
            self._decide(found, ended=ended)
            self._told.pop("look", None)
        except (errors.CheckpointError, OSError) as error:
            if isinstance(error, errors.ConfigError):
                raise
            self._print = None  # look again at the next poll
            self._once("look", "unreadable", f"cannot look at the checkpoints: {_line(error)}")
            self.failed = error if isinstance(error, errors.CheckpointError) else errors.StoreError(_line(error), key=self._root)

    def _has_changed(self) -> bool:
        now = fingerprint(self._root)
        changed, self._print = now != self._print, now
        if changed:
            self._changed_at = self._clock()
        return changed

    def _decide(self, found: Sequence[Found], *, ended: bool) -> None:
        if not self._tidied:
            protecting.sweep(self._root, sorted({os.path.dirname(os.path.normpath(one.path)) for one in found}))
        complete = {one.key: one for one in found if one.complete}
        for one, _ in self._queue:  # the job deleted it, but its bytes are ours to read
            if one.key not in complete and self._protection.keeps(one):
                complete[one.key] = one
        if self._running is not None:  # deleted or not, it counts until it is done
            complete.setdefault(self._running[0].key, self._running[0])
        self._any = self._any or bool(complete)
        for one in found:
            if not one.complete:
                self._once(
                    one.path, "incomplete", f"{one.key or one.path} is not complete: {one.why}", key=one.key, step=one.step, path=one.path
                )
        # What cannot be read must not stand in the way of others: as the newest one, or as the best.
        complete = {key: one for key, one in complete.items() if key not in self._bad or self._bad[key] != _stamp(one)}
        done = self._done(found)
        known = {one.key for one in done}
        queue = []
        for decision in decide(self._options.when, [seen_of(one) for one in complete.values()], done, ended=ended):
            one = complete[decision.key]
            if not decision.due:
                if decision.key not in known:
                    self._once(f"skipped {decision.key}", "skipped", f"step {decision.step} is not due: {decision.reason}", **_about(one))
                continue
            if self._running is not None and self._running[0].key == decision.key:
                continue
            queue.append((one, decision))
        for one, _ in self._queue:
            if not any(one.key == other.key for other, _ in queue):
                self._protection.release(one)
        self._queue = queue
        if not queue and not self._tidied and self._running is None:  # else what a killed watch had begun is gone on with
            self._tidy([one for one in found if one.complete])
        self._tidied = True
        self._protect_waiting()

    def _protect_waiting(self) -> None:
        """The oldest that are due: what is pruned before its turn cannot be consolidated any more."""
        for one, _ in self._queue[: PROTECTED if self._running is None else PROTECTED - 1]:
            with contextlib.suppress(FileNotFoundError):  # said when its turn comes
                self._protect(one)

    def _protect(self, one: Found) -> protecting.Protected:
        protected = self._protection.protect(one)
        if not protected.how:
            self._once("unprotected", "unprotected", f"what is read cannot be kept from the job's own pruning: {protected.why}")
        return protected

    # -- consolidating ----------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        """Start the child for the first that is due, if none runs."""
        now = self._clock()
        if self._running is not None or now < self._full[1]:
            return
        for one, decision in list(self._queue):
            if now < self._tries.get(one.key, (0, 0.0))[1]:
                continue
            self._queue.remove((one, decision))
            try:
                protected = self._protect(one)
            except FileNotFoundError:
                self._pruned(one)
                continue
            try:
                child = self._start(one, protected.path, decision.reason)
            except OSError as error:  # no memory, no process more
                self._protection.release(one)
                self._failure(one, errors.StoreError(f"no process could be started: {_line(error)}", kind="no-process"))
                continue
            self._begun[one.key] = one
            self._running = (one, decision, child)
            text = f"step {one.step} ({one.key}): {decision.reason}"
            self._say("due", text, reason=decision.reason, protected=protected.how, **_about(one))
            return

    def _reap(self) -> bool:
        """Whether a child ended; what came of it is told."""
        if self._running is None:
            return False
        one, decision, child = self._running
        outcome = child.outcome()
        if outcome is None:
            return False
        self._running = None
        self._protection.release(one)
        if outcome.error is None:
            self._good(one, decision, outcome.exported or {})
        else:
            self._failure(one, outcome.error)
        return True

    def _good(self, one: Found, decision: Decision, exported: Mapping[str, Any]) -> None:
        self._succeeded, self.failed, self._full = True, None, (0, 0.0)
        self._begun.pop(one.key, None)
        self._tries.pop(one.key, None)
        self._bad.pop(one.key, None)
        self._told.pop("full", None)
        already = bool(exported.get("already"))
        text = f"step {one.step} {'was there already' if already else 'consolidated'}: {exported.get('path', '')}"
        told = {**exported, **_about(one), "reason": decision.reason}
        self._say("already" if already else "consolidated", text, **told)

    def _failure(self, one: Found, error: errors.CheckpointError) -> None:
        about = {"error": type(error).__name__, "kind": error.kind, "message": error.message, "hint": error.hint, **_about(one)}
        if isinstance(error, errors.CapacityError):
            self.failed = error
            tries, _ = self._full
            pause = self._pause(tries)
            self._full = (tries + 1, self._clock() + pause)
            self._once("full", "full", f"step {one.step}: {error}; tried again every now and then", **about)
            return
        if not self._still_there(one):
            self._pruned(one, error)
            return
        self.failed = error
        if isinstance(error, errors.ConfigError) and not self._succeeded:
            raise error
        if isinstance(error, (errors.CorruptionError, errors.LayoutError)):
            self._bad[one.key] = _stamp(one)
            self._say("failed", f"step {one.step}: {error}; left alone until it changes", **about)
            return
        tries = self._tries.get(one.key, (0, 0.0))[0]
        pause = self._pause(tries)
        self._tries[one.key] = (tries + 1, self._clock() + pause)
        self._say("failed", f"step {one.step}: {error}; tried again in {pause:g} s", **about)

    def _pause(self, tries: int) -> float:
        return min(self._retry_s[0] * 2.0 ** min(tries, 20), self._retry_s[1])

    def _still_there(self, one: Found) -> bool:
        """Whether the job still has this checkpoint, whole; also where that cannot be told now: it is tried again then."""
        try:
            if one.kind != "everystep":
                return os.path.exists(one.path) and any(now.complete for now in self._find(self._root) if now.path == one.path)
            return any(now.complete for now in self._find(self._root) if now.key == one.key)
        except (errors.CheckpointError, OSError):
            return True

    def _pruned(self, one: Found, error: errors.CheckpointError | None = None) -> None:
        text = f"step {one.step} ({one.key}) was deleted by its job before it was read to its end"
        self._say("pruned", text, message="" if error is None else error.message, **_about(one))

    # -- telling ----------------------------------------------------------------------------------------------------
    def _say(self, what: str, text: str, **details: Any) -> None:
        self._tell_event(Event(what, text, details))

    def _once(self, about: str, what: str, text: str, **details: Any) -> None:
        """Say it when it was not the last thing said about that."""
        if self._told.get(about) != text:
            self._told[about] = text
            self._say(what, text, **details)


def candidates(root: str) -> list[Found]:
    """As ``find_checkpoints``; of a run those of its newest timeline: what was abandoned is not what a schedule counts."""
    found = find_checkpoints(root)
    if not any(one.kind == "everystep" for one in found):
        return found
    from everystep.repository import Repository

    lineage = {str(key) for key in Repository.open(found[0].path).lineage()}
    return [one for one in found if one.key in lineage]


def seen_of(found: Found) -> Seen:
    """What the schedule needs of a checkpoint."""
    return Seen(key=found.key, step=found.step, saved_at=found.saved_at, metrics=dict(found.metrics))


def fingerprint(root: str) -> object:
    """Changes when something is made, renamed or deleted in the folders below ``root``, or a JSON file of theirs is rewritten."""
    return hash(tuple(_times(root, DEPTH)))


def _times(folder: str, depth: int) -> Iterator[tuple[str, int, int]]:
    try:
        yield folder, os.stat(folder).st_mtime_ns, 0
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # deleted while we look: that is a change too
        yield folder, -1, -1
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                if depth > 1:
                    yield from _times(entry.path, depth - 1)
            elif entry.name.endswith(".json"):  # metrics that come late
                told = entry.stat(follow_symlinks=False)
                yield entry.path, told.st_mtime_ns, told.st_size


def _stamp(found: Found) -> object:
    """Of all that lies in one checkpoint: whether it is still the one that could not be consolidated."""
    if found.kind == "everystep":
        return found.key
    stamps: list[tuple[str, int, int]] = []
    for folder, _, files in os.walk(found.path):
        for name in files:
            with contextlib.suppress(OSError):
                told = os.stat(os.path.join(folder, name))
                stamps.append((os.path.join(folder, name), told.st_size, told.st_mtime_ns))
    return hash(tuple(sorted(stamps)))


def _about(found: Found) -> dict[str, Any]:
    return {"key": found.key, "step": found.step, "source": found.path, "source_kind": found.kind}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
