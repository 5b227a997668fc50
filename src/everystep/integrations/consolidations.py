"""What a training loop of any framework calls after its own saves, to have whole models made of its checkpoints by a schedule.

Theory of operation. The training thread only puts a word into a queue. A thread of the first rank lists the checkpoints, asks the schedule,
protects what is due from the job's own pruning, and starts one process at a time, with the lowest priority, that does all reading and
writing; there is no collective operation and no barrier. What was done before is read from the exports' history, so that a job that is
started again neither repeats nor forgets. A process that was started is left to end by itself when training dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from everystep.errors import CheckpointError, ConfigError, CorruptionError, LayoutError
from everystep.schedule import Consolidate, Seen, decide, from_document, to_document

if TYPE_CHECKING:
    from everystep.consolidate.protecting import Protection
    from everystep.consolidate.source import Found
    from everystep.consolidate.watching import Outcome

__all__ = ["Consolidations", "Running", "consolidate_checkpoints", "is_first_rank", "settled"]

WAITING = 2
"""How many due checkpoints wait while one is consolidated; older ones are passed over. Each costs the job the space that it wanted back."""

_log = logging.getLogger("everystep.consolidate")


class Running(Protocol):
    """A process that consolidates one checkpoint."""

    def wait(self) -> Outcome:
        """Return when it has ended: with what it exported, or with the error."""
        ...


Start = Callable[["Found", str, str], Running]
"""(checkpoint, where to read it, reason) -> a process that consolidates it."""


def consolidate_checkpoints(
    root: str | os.PathLike[str], consolidate: Consolidate | Mapping[str, Any] | str | bool | Sequence[Any]
) -> Consolidations:
    """What a training loop calls after each of its own saves, to have whole models made of its checkpoints by a schedule.

    Args:
        root: The folder that the loop saves its checkpoints to.
        consolidate: The schedule and the rest: a ``Consolidate``, a mapping as in YAML, or what its ``when`` would be.

    Returns:
        Call it on every rank, after each save; it returns at once. On other ranks than the first of ``torch.distributed`` it does nothing.

    Raises:
        ConfigError: A word in ``consolidate`` is not known, or it asks for what cannot be done here.
    """
    options = settled(consolidate)
    if "://" in os.fspath(root):
        raise ConfigError(f"checkpoints in {os.fspath(root)!r} cannot be consolidated: it is no folder", kind="no-folder",
                          hint="save to a folder, or run `everystep consolidate` where there is a copy")  # fmt: skip
    return Consolidations(root, options, active=is_first_rank(None))


class Consolidations:
    """The consolidations of one job's checkpoints. Calling it says that there may be a new one. Also a context manager.

    Args:
        root: The folder with the checkpoints.
        options: When, what and where.
        active: False: every call does nothing, as for ranks that do not publish checkpoints.
        start: Starts the process for one checkpoint.
        find: As ``find_checkpoints``.
        history: What was consolidated before, for the schedule.
    """

    def __init__(
        self, root: str | os.PathLike[str], options: Consolidate, *, active: bool = True, start: Start | None = None,
        find: Callable[[str], Sequence[Found]] | None = None, history: Callable[[], Sequence[Seen]] | None = None,
    ) -> None:  # fmt: skip
        from everystep.consolidate.job import folder_at

        self._root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self._options = dataclasses.replace(
            options,
            into=options.into if options.into in ("checkpoint", "latest") else folder_at(options.into),
            assets=options.assets if options.assets is None else folder_at(options.assets),
        )
        self._active = active
        self._start = start or self._start_process
        self._find = find or _find
        self._history = history or self._read_history
        self._turns: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        # From here on of the thread alone.
        self._protection: Protection | None = None
        self._waiting: list[tuple[Found, str]] = []
        self._running: Found | None = None
        self._passed: dict[str, Seen] = {}
        self._bad: set[str] = set()

    def __call__(self) -> None:
        """There may be a new checkpoint. Returns at once and never raises."""
        self._put(_Turn("saved"))

    def __enter__(self) -> Consolidations:  # noqa: PYI034  # Self needs Python 3.11
        return self

    def __exit__(self, cls: type[BaseException] | None, *_: object) -> None:
        self.close(ended=cls is None, wait=None if cls is None else False)

    def close(self, *, ended: bool = True, wait: bool | None = None) -> None:
        """Do what is due, and no more after that. Closing twice is no error.

        Args:
            ended: The job is over, so that ``final`` is due.
            wait: Whether to return only when it is done. None: as the settings say. False: it is started and goes on by itself.
        """
        if self._closed:
            return
        self._put(_Turn("close", ended=ended, wait=self._options.wait if wait is None else wait))
        self._closed = True
        if self._thread is not None:
            self._thread.join()

    def _put(self, turn: _Turn) -> None:
        if not self._active or self._closed:
            return
        self._turns.put(turn)
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="everystep-consolidate", daemon=True)
            self._thread.start()

    # -- the thread ---------------------------------------------------------------------------------------------------
    def _follow(self) -> None:
        from everystep.consolidate import protecting

        self._protection = protecting.Protection(self._root)
        protecting.sweep(self._root)
        closing = False
        while True:
            turn = self._turns.get()
            if turn.what == "over":
                self._finish(turn)
            else:
                self._look(ended=turn.ended)
            closing = closing or turn.what == "close"
            if turn.what == "close" and not turn.wait:
                while self._waiting:  # none would be started later: they wait for each other in their exports' lock
                    self._begin()
                return  # what is read stays protected until a later job finds that nobody holds it
            if closing and (self._waiting or self._running):
                reading = [*([self._running] if self._running else []), *(one for one, _ in self._waiting)]
                _log.info("waiting for the consolidation of %s", ", ".join(f"step {one.step}" for one in reading))
            if self._running is None:
                self._begin()
            if closing and self._running is None:
                self._protection.close()
                return

    def _look(self, *, ended: bool) -> None:
        """Ask the schedule about everything that is there."""
        try:
            found = {one.key: one for one in self._find(self._root) if one.complete}
            taken = [_seen(one) for one in (self._running, *(one for one, _ in self._waiting)) if one is not None]
            done = [*self._history(), *taken, *self._passed.values()]
            decisions = decide(self._options.when, [_seen(one) for one in found.values()], done, ended=ended)
        except (CheckpointError, OSError) as error:
            _log.warning("cannot look at the checkpoints in %s: %s", self._root, error)
            return
        for decision in decisions:
            if decision.due and decision.key not in self._bad:
                self._waiting.append((found[decision.key], decision.reason))
        while len(self._waiting) > WAITING:
            one, _ = self._waiting.pop(0)
            self._passed[one.key] = _seen(one)
            self._release(one)
            _log.warning("step %d is not consolidated: checkpoints become due faster than they are consolidated", one.step)
        for one, _ in self._waiting:
            with contextlib.suppress(FileNotFoundError):  # said when its turn comes
                self._protect(one)

    def _begin(self) -> None:
        """Start the process for the one that has waited longest and can still be read, if any."""
        while self._waiting:
            one, reason = self._waiting.pop(0)
            try:
                running = self._start(one, self._protect(one), reason)
            except OSError as error:
                _log.warning("step %d is not consolidated: %s", one.step, error)
                self._passed[one.key] = _seen(one)
                self._release(one)
                continue
            self._running = one
            threading.Thread(target=self._await, args=(one, running), name="everystep-consolidating", daemon=True).start()
            return

    def _await(self, one: Found, running: Running) -> None:
        self._turns.put(_Turn("over", found=one, outcome=running.wait()))

    def _finish(self, turn: _Turn) -> None:
        one, outcome = turn.found, turn.outcome
        assert one is not None
        assert outcome is not None
        self._running = None
        self._release(one)
        if outcome.error is None:
            exported = outcome.exported or {}
            _log.info("step %d is consolidated: %s (%.1f s)", one.step, exported.get("path", ""), exported.get("seconds", 0.0))
            return
        # A full disk may have room again at the next save; a checkpoint that is not whole will not become whole.
        if isinstance(outcome.error, (ConfigError, CorruptionError, LayoutError)):
            self._bad.add(one.key)
        _log.warning("step %d is not consolidated: %s", one.step, outcome.error)

    def _protect(self, one: Found) -> str:
        """Where it can be read whatever the job deletes."""
        assert self._protection is not None
        protected = self._protection.protect(one)
        if not protected.how:
            _log.warning("step %d cannot be kept from the job's own pruning: %s", one.step, protected.why)
        return protected.path

    def _release(self, one: Found) -> None:
        assert self._protection is not None
        self._protection.release(one)

    # -- what it asks of others -----------------------------------------------------------------------------------------
    def _home(self) -> str:
        """The folder with the exports' history."""
        return os.path.join(self._root, "exports") if self._options.into in ("checkpoint", "latest") else self._options.into

    def _read_history(self) -> Sequence[Seen]:
        from everystep.consolidate.exports import Exports

        return Exports(self._home(), self._options.name).history(into=self._options.into)

    def _start_process(self, one: Found, path: str, reason: str) -> Running:
        which = [one.key] if one.kind == "everystep" else []
        command = [
            sys.executable, "-m", "everystep.cli", "consolidate", path, *which, "--settings", "-", "--json", "--background",
            "--reason", reason, "--root", self._home(), "--origin", one.path,
        ]  # fmt: skip
        return _Process(command, json.dumps(to_document(self._options)))


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A word for the thread."""

    what: str
    """``saved``, ``over`` (a process ended) or ``close``."""
    ended: bool = False
    wait: bool = False
    found: Found | None = None
    outcome: Outcome | None = None


class _Process:
    """``everystep consolidate`` in a session of its own: signals to the job are not for it, and it outlives the job when that is killed."""

    def __init__(self, command: Sequence[str], document: str) -> None:
        with contextlib.ExitStack() as stack:
            # Files and no pipes: a process that nobody reads from any more goes on all the same.
            self._printed: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self._said: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            settings = stack.enter_context(tempfile.TemporaryFile())
            settings.write(document.encode())
            settings.seek(0)
            self._process = subprocess.Popen(
                command, stdin=settings, stdout=self._printed, stderr=self._said, start_new_session=True, env=_environment()
            )
            settings.close()
            stack.pop_all()

    def wait(self) -> Outcome:
        """See ``Running``."""
        from everystep.consolidate.watching import Outcome

        code = self._process.wait()
        return Outcome.of(code, _read(self._printed), _read(self._said))


def _read(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


def _environment() -> dict[str, str]:
    """As this process's, with this very package found first, and without its GPUs."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "CUDA_VISIBLE_DEVICES": ""}


def _find(root: str) -> Sequence[Found]:
    from everystep.consolidate.source import find_checkpoints

    return find_checkpoints(root)


def _seen(found: Found) -> Seen:
    return Seen(key=found.key, step=found.step, saved_at=found.saved_at, metrics=dict(found.metrics))


def settled(block: Any) -> Consolidate:
    """What a ``consolidate:`` block says. ConfigError when that is not known, or cannot be done to others' checkpoints."""
    said = block.to_dict() if hasattr(block, "to_dict") else block
    if isinstance(said, Consolidate):
        options = said
    else:
        options = from_document(said) if isinstance(said, Mapping) else Consolidate(when=list(said) if isinstance(said, tuple) else said)
    if options.drop_shards:
        raise ConfigError(f"consolidate: drop_shards={options.drop_shards!r} is for everystep's own runs: these shards are another's",
                          hint="leave it out; NeMo itself keeps the newest of checkpoint.max_recent_checkpoints")  # fmt: skip
    if options.into not in ("checkpoint", "latest"):
        from everystep.consolidate.job import folder_at

        folder_at(options.into)  # refuses what is none, before anything is trained
    return options


def is_first_rank(group: Any) -> bool:
    """Whether this process publishes checkpoints: the first of the group, or the only one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank(group=group) == 0)
