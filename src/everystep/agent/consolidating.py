"""One consolidation as a process of its own: started, ended, and what it said. It shares nothing with the agent but the run's folder."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from everystep.agent.runtime import environment
from everystep.errors import AgentError, CheckpointError, rebuild

COMMAND = "EVERYSTEP_CONSOLIDATE_COMMAND"
"""Environment variable: what is run in the place of ``python -m everystep.cli consolidate`` (words as a shell splits them)."""
# OpenMP's threads spin while they wait for work, which training needs the cores for; and no GPU is needed.
_QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0", "CUDA_VISIBLE_DEVICES": ""}
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
_SAID_NBYTES = 1 << 20


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it: the folder, or the error."""

    path: str = ""
    key: str = ""
    step: int = -1
    nbytes: int = 0
    already: bool = False
    """An equal export was there."""
    seconds: float = 0.0
    error: Any = None
    """A CheckpointError."""


class Consolidation:
    """The process. It is killed with the thread that starts it: that one must live as long as the agent.

    Args:
        run_url: The run.
        target: A checkpoint's key, a step, "latest" or "best".
        settings: JSON of ``schedule.to_document``.
        reason: Why it is due, for the history and the model card.
        on_end: Called once, from another thread, when it has ended and ``outcome`` is there.
    """

    def __init__(self, run_url: str, target: str, settings: bytes, reason: str, *, on_end: Callable[[], None]) -> None:
        self.target = target
        self.outcome: Outcome | None = None
        self._on_end = on_end
        self._began = time.monotonic()
        # Files in memory and not pipes: a worker that the trainer forks meanwhile would hold a pipe's other end open.
        command = shlex.split(os.environ.get(COMMAND, "")) or [sys.executable, "-m", "everystep.cli", "consolidate"]
        given, self._out, self._err = (os.memfd_create(f"everystep-{name}") for name in ("settings", "out", "err"))
        try:
            os.write(given, settings)
            os.lseek(given, 0, os.SEEK_SET)
            options = ("--settings", "-", "--json", "--background", "--parent", str(os.getpid()), "--reason", reason)
            self._process = subprocess.Popen(
                [*command, run_url, target, *options], cwd="/", stdin=given, stdout=self._out, stderr=self._err, env=_environment(),
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.close(self._out)
            os.close(self._err)
            raise AgentError(f"a process to consolidate {target} cannot be started: {error}", key=target, kind="no-process",
                             errno=error.errno) from error  # fmt: skip
        finally:
            os.close(given)
        try:
            threading.Thread(target=self._wait, name="everystep-consolidation", daemon=True).start()
        except RuntimeError:  # no more threads: nobody would hear of its end
            self.kill()
            self._process.wait()
            os.close(self._out)
            os.close(self._err)
            raise

    @property
    def pid(self) -> int:
        """Of the process, which leads a group of its own."""
        return self._process.pid

    def kill(self) -> None:
        """End it now, and what it has started. What it has written so far is taken up by the next one."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self) -> None:
        status = self._process.wait()
        try:
            self.outcome = self._said(status)
        finally:  # whatever it said: it is over
            if self.outcome is None:
                text = f"what consolidating {self.target} said cannot be read"
                self.outcome = Outcome(error=AgentError(text, key=self.target, kind="export"))
            os.close(self._out)
            os.close(self._err)
            self._on_end()

    def _said(self, status: int) -> Outcome:
        seconds = time.monotonic() - self._began
        document: Any = None
        with contextlib.suppress(msgspec.DecodeError):
            document = msgspec.json.decode(os.pread(self._out, _SAID_NBYTES, 0))
        if isinstance(document, list) and document:
            document = document[-1]
        try:
            if status == 0 and isinstance(document, dict):
                return msgspec.convert({**document, "seconds": seconds, "error": None}, Outcome)
            told = document["error"]
            error: CheckpointError = rebuild(told["name"], told["message"], told.get("step"), None, told.get("key"), told.get("kind") or "",
                                             told.get("hint") or "")  # fmt: skip
        except (msgspec.ValidationError, KeyError, TypeError):
            size = os.fstat(self._err).st_size
            lines = os.pread(self._err, 4096, max(0, size - 4096)).decode(errors="replace").strip().splitlines()
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            error = AgentError(f"consolidating {self.target} ended with {how}{': ' + lines[-1] if lines else ''}", key=self.target,
                               kind="export", hint=f"everystep consolidate RUN {self.target}")  # fmt: skip
        return Outcome(seconds=seconds, error=error)


def _environment() -> dict[str, str]:
    environ = {name: value for name, value in environment().items() if name not in _OF_A_RANK and not name.startswith("TORCHELASTIC_")}
    return {**environ, **_QUIET}
