"""The agent as a process: one for each run and node, detached from the trainer that started it, or in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from everystep.agent import messages
from everystep.agent.runtime import LOG_NBYTES, Place, runtime_dir
from everystep.agent.server import AgentServer
from everystep.agent.wire import Channel
from everystep.errors import CheckpointError, ConfigError, ConflictError
from everystep.repository import Repository

_log = logging.getLogger(__name__)
READY = b"ready"
INTERRUPTED = 130
_LOCK_WAIT_S = 5.0
_DESCRIPTORS = 65536
_CLOSED = (errno.EBADF, errno.EINVAL)
"""What ``accept`` says of a listener that has been closed or shut down."""
_ACCEPT_PAUSE_S, _ACCEPT_PAUSE_MAX_S = 0.02, 2.0


def serve(run_url: str, run_id: str | None, idle_s: float, foreground: bool = True, *, ready_fd: int | None = None) -> int:
    """Be the run's agent until the end; returns the exit status: 0, or 130 when SIGINT (Ctrl-C) asked for the end.

    A clean end leaves nothing in the runtime directory; one with an error in the log leaves the log.

    Args:
        run_url: Absolute, or of a path relative to here.
        run_id: Must be that of the run at ``run_url``; None: whatever that is (the run is made if it is not there).
        idle_s: End after this time without a trainer.
        foreground: Log to stderr as it is, and raise ConflictError when the run has an agent; else the log is kept short and the loser of a
            race for the run returns at once.
        ready_fd: Where to write ``READY`` once the socket listens.
    """
    log = _log_to_stderr(bounded=not foreground)
    _allow_descriptors()
    if "://" not in run_url:
        run_url = str(Path(run_url).absolute())
    repository = Repository.open(run_url, create=run_id is None)
    if run_id not in (None, repository.run_id):
        raise ConfigError(f"{run_url!r} is run {repository.run_id!r}, not {run_id!r}", key=run_url, kind="other-run",
                          hint="the run directory was replaced: restart the trainer")  # fmt: skip
    place = Place.of_run(runtime_dir(), repository.run_id, run_url)
    lock = _take_lock(place)
    if lock is None:
        if foreground:
            message = f"run {run_url!r} has an agent on this node already"
            raise ConflictError(message, key=run_url, kind="two-agents", hint="everystep agent ls")
        return 0
    if not foreground:
        place.adopt_log()
    status = 0
    news = _News()
    with place.listen() as listener:
        server = AgentServer(repository, run_url=run_url, run_id=repository.run_id, idle_s=idle_s, own_idle_s=foreground)
        server.on_end(news.end)
        threading.Thread(target=accept, args=(listener, server), name="everystep-accept", daemon=True).start()
        if ready_fd is not None:
            with contextlib.suppress(BrokenPipeError):  # who started us is gone: the run may still have use for us
                os.write(ready_fd, READY)
            os.close(ready_fd)
        _log.info("agent %d serves run %s at %s", os.getpid(), repository.run_id, run_url)
        while (number := news.wait()) is not None:
            if number == signal.SIGUSR2:
                server.consolidate_now()
                continue
            server.signal()
            if number == signal.SIGINT:
                status = INTERRUPTED
        with contextlib.suppress(FileNotFoundError):  # gone before the lock is: the next agent makes its own
            place.socket.unlink()
    server.close()
    place.clear(log=not foreground and not log.troubled)
    os.close(lock)
    return status


class _News:
    """What the main thread waits for: SIGTERM, SIGINT, SIGUSR2 (consolidate the newest now) and the agent's end.

    The kernel may hand a signal to any thread, and a handler written in Python runs only once something wakes the main one. So that one
    waits at a pipe, into which the interpreter writes the signal's number whichever thread it came to.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._ended = False
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)  # anything but the default: the pipe tells of it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def end(self) -> None:
        """The agent is to end. From any thread."""
        self._ended = True
        with contextlib.suppress(BlockingIOError):  # full: then there is something to wake up for
            os.write(self._writer, b"\0")

    def wait(self) -> int | None:
        """The number of the next signal; None: the end."""
        number = 0
        while not self._ended and not number:
            number = os.read(self._reader, 1)[0]
        return None if self._ended else number


def _allow_descriptors() -> None:
    """The lead of many nodes has two connections with each; the usual soft limit of 1,024 is for programs that use ``select``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _take_lock(place: Place) -> int | None:
    """The lock; None when a live agent has it. One that has closed its socket and is about to end is waited for."""
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        lock = place.take_lock()
        if lock is not None:
            return lock
        try:
            place.connect(timeout_s=1.0).close()
        except (ConnectionRefusedError, FileNotFoundError, TimeoutError):
            if time.monotonic() > until:
                return None
            time.sleep(0.02)  # between taking the lock and listening, or between closing and ending: nothing to wait on
        else:
            return None


def accept(listener: socket.socket, server: AgentServer) -> None:
    """Take connections until the listener is closed. What else goes wrong (no descriptors left, a peer that gave up) passes."""
    pause_s = _ACCEPT_PAUSE_S
    while True:
        try:
            sock, _ = listener.accept()
            try:
                server.adopt(Channel(sock))
            except BaseException:
                sock.close()
                raise
        except Exception as error:  # the thread's top: without it nobody finds the agent, while its lock keeps others away
            if listener.fileno() < 0 or (isinstance(error, OSError) and error.errno in _CLOSED):
                return
            if isinstance(error, OSError):
                server.stats.count("accept_failures")
                _log.warning("a connection could not be taken: %s", error)
            else:
                server.unexpected("taking a connection", error)
            if server.wait_closed(pause_s):
                return
            pause_s = min(_ACCEPT_PAUSE_MAX_S, 2 * pause_s)
        else:
            pause_s = _ACCEPT_PAUSE_S


def _log_to_stderr(*, bounded: bool) -> _Stream:
    handler = _BoundedStream() if bounded else _Stream()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("everystep")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler


class _Stream(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error; remembers whether an error was among what it wrote."""

    troubled = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        self.troubled = self.troubled or record.levelno >= logging.ERROR
        super().emit(record)


class _BoundedStream(_Stream):
    """Standard error is a file that is emptied when it has grown too long."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        with contextlib.suppress(OSError):  # not a file
            if os.fstat(2).st_size > LOG_NBYTES:
                os.ftruncate(2, 0)
        super().emit(record)


def main(arguments: list[str] | None = None) -> int:
    """``python -m everystep.agent RUN_URL --run-id ID``: what a trainer starts."""
    parser = argparse.ArgumentParser(prog="python -m everystep.agent", description=__doc__)
    parser.add_argument("run_url", help="the run, absolute")
    parser.add_argument("--run-id", help="id of the run; another one at RUN_URL is an error")
    parser.add_argument("--idle-s", type=float, default=600.0, help="end after so many seconds without a trainer (default: %(default)s)")
    parser.add_argument("--detach", action="store_true", help="go on in the background and return")
    parser.add_argument("--ready-fd", type=int, help="where to say that the socket listens, or why not")
    asked = parser.parse_args(arguments)
    if asked.detach:
        if os.fork():  # no thread has been started yet
            os._exit(0)
        os.setsid()  # away from the trainer's process group, whatever is done to that
    try:
        status = serve(asked.run_url, asked.run_id, asked.idle_s, foreground=not asked.detach, ready_fd=asked.ready_fd)
    except CheckpointError as error:
        _log.error("%s", error)
        if asked.ready_fd is not None:
            failed = messages.Failed(name=type(error).__name__, message=error.message, key=error.key, kind=error.kind, hint=error.hint,
                                     errno=error.errno)  # fmt: skip
            os.write(asked.ready_fd, msgspec.msgpack.encode(failed))
        status = 1
    logging.shutdown()
    sys.stderr.flush()
    # Threads that a forced end left behind must not hold the process; everything that matters is on disk or was given up.
    os._exit(status)
