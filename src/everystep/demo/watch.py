"""Runs one of the demo's processes and hands on what it says, so that it can be shown, killed and cleaned up. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import psutil

from everystep.agent.client import AgentClient
from everystep.errors import AgentError, NotFoundError
from everystep.repository import Repository

Event = dict[str, Any]


class Child:
    """A process of the demo in a session of its own (so that Ctrl-C reaches only the demo, which ends it). A context manager."""

    def __init__(self, module: str, arguments: list[str], *, threads: int) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
            # Waiting torch threads sleep instead of spinning on the cores that the agent needs; the same for everybody measured here.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        }
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in __exit__)
        try:
            with _interrupts_later():
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env=environment,
                    start_new_session=True,
                )
                _running.add(self._process)
        except BaseException:  # also an interrupt
            self._errors.close()
            raise
        self.pid = self._process.pid

    def events(self) -> Iterator[Event]:
        """What the process says, until it ends. A line that was cut short by a kill is left out."""
        for line in self._process.stdout or ():
            if line.endswith(b"\n"):
                yield json.loads(line)

    def kill(self) -> None:
        """``kill -9``, and wait until the process is gone."""
        self._process.kill()
        self._process.wait()

    def finish(self) -> str:
        """Wait for the end; "" when it was a good one, else the last lines of its stderr."""
        code = self._process.wait()
        if code == 0:
            return ""
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"exit code {code}: {said[-1] if said else 'it said nothing'}"

    def __enter__(self) -> Child:  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
        _running.discard(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


_running: set[subprocess.Popen[bytes]] = set()
"""Every child there is, also one whose ``with`` block an interrupt kept from beginning."""


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C in the middle of starting a process would lose it: here it comes when the process is known."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def end_children() -> None:
    """``kill -9`` whatever child still runs."""
    for process in list(_running):
        process.kill()
        process.wait()
        _running.discard(process)


def kill_process(pid: int) -> None:
    """``kill -9`` of a process that is no child of ours, and wait until it is gone; nothing when it is gone already."""
    try:
        process = psutil.Process(pid)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    except psutil.NoSuchProcess:
        pass


def agent_of(run: pathlib.Path) -> int | None:
    """Process id of the run's agent on this node, or None when there is none."""
    try:
        client = AgentClient.connect(run_url=str(run), run_id=Repository.open(str(run)).run_id, role="visitor", spawn=False)
    except (NotFoundError, AgentError):
        return None
    try:
        return client.welcome.pid
    finally:
        client.close()


def agents_below(folder: pathlib.Path) -> list[int]:
    """Agents of runs below ``folder``, also those that do not answer yet: their command line names the run."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if "everystep.agent" in words and any(pathlib.Path(word).is_relative_to(folder) for word in words):
            found.append(int(process.info["pid"]))
    return found
