"""A command in the place of ``everystep consolidate``: says what it was called with, waits until it is let go, fails when told to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
from pathlib import Path

SCRIPT = r"""
import json, os, sys
folder, run, target, *options = sys.argv[1:]
if "--parent" in options:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
said = {"run": run, "target": target, "options": options, "settings": json.load(sys.stdin), "pid": os.getpid(), "group": os.getpgid(0),
        "session": os.getsid(0), "omp": os.environ.get("OMP_NUM_THREADS"), "rank": os.environ.get("RANK"), "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}
with open(folder + "/calls", "a") as calls:
    calls.write(json.dumps(said) + "\n")
gate = folder + "/gate"
if os.path.exists(gate):
    import fcntl
    with open(gate) as waits:
        with open(folder + "/at-gate", "w") as door:
            door.write(target)
        fcntl.flock(waits, fcntl.LOCK_SH)
if os.path.exists(folder + "/fails"):
    print(json.dumps({"error": {"name": "CapacityError", "message": "no space", "kind": "space", "hint": "", "step": 1, "key": target}}))
    sys.exit(14)
if os.path.exists(folder + "/breaks"):
    print("Traceback ...\nbroken", file=sys.stderr)
    sys.exit(3)
print(json.dumps({"path": run + "/exports/model-" + target, "key": target if "-" in target else "", "step": 1, "nbytes": 7, "linked": 7, "seconds": 0.1, "already": False}))
"""


class Fake:
    """One folder with what the command is to do, and what it was called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        script = folder / "fake.py"
        script.write_text(SCRIPT)
        self.command = f"{sys.executable} -S -E {script} {folder}"

    def calls(self) -> list[dict]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
        return []

    def targets(self) -> list[str]:
        return [call["target"] for call in self.calls()]

    def steps(self) -> list[int]:
        return [int(target.split("-")[0]) for target in self.targets()]

    def shut(self) -> None:
        """From now on each waits at the gate. ``at_gate`` says when one has come there."""
        os.mkfifo(self.folder / "at-gate")
        self._gate = os.open(self.folder / "gate", os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._gate, fcntl.LOCK_EX)

    def at_gate(self) -> str:
        """Wait until one has come to the gate; which one."""
        with open(self.folder / "at-gate") as door:
            return door.read()

    def open(self) -> None:
        """Let the one at the gate go, and all that come."""
        (self.folder / "gate").unlink()
        os.close(self._gate)

    def say(self, word: str) -> None:
        (self.folder / word).touch()

    def unsay(self, word: str) -> None:
        (self.folder / word).unlink()


def eventually(condition, what: str, timeout_s: float = 10.0):
    """Wait for something in this process that gives no event."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        found = condition()
        if found:
            return found
        pause.wait(0.01)
    raise AssertionError(what)
