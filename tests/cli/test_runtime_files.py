"""What agents leave in their runtime directory: nothing after a clean end, the log after one with an error."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

import pytest
import torch

import everystep as package
from everystep.agent import runtime
from everystep.agent.runtime import Place


def names(folder):
    """What lies in the runtime directory."""
    return sorted(path.name for path in folder.iterdir())


def test_a_clean_end_leaves_nothing(runtime_dir, tmp_path):
    """After close() the agent has removed its socket, its lock and its log, run after run."""
    for name in ("a", "b"):
        with package.Checkpointer(tmp_path / name) as ckpt:
            ckpt.save(1, {"x": torch.zeros(3)}).wait("memory")
            assert [one.rpartition(".")[2] for one in names(runtime_dir)] == ["lock", "log", "sock"]
    assert names(runtime_dir) == []


def test_an_agent_in_the_trainers_process_leaves_nothing(runtime_dir, tmp_path):
    """agent=False takes the run's lock, too, and removes it."""
    with package.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        ckpt.save(1, {"x": torch.zeros(3)}, sync=True)
        assert names(runtime_dir) != []
    assert names(runtime_dir) == []


def test_an_end_with_an_error_leaves_the_log(runtime_dir, tmp_path):
    """Where a snapshot could not be written, the log that says why is still there, and nothing else."""
    ckpt = package.Checkpointer(tmp_path / "run", cadence=package.Cadence(disk=False))
    ckpt.save(1, {"x": torch.zeros(3)}).wait("memory")
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(package.CheckpointError):
        ckpt.close(timeout_s=5)
    subprocess.run(
        [sys.executable, "-m", "everystep.cli", "agent", "stop", str(tmp_path / "run"), "--force"],
        check=True, timeout=60, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    [log] = runtime_dir.iterdir()
    assert log.suffix == ".log"
    assert "ERROR" in log.read_text()


def test_a_foreground_agent_that_is_interrupted_is_130_and_leaves_nothing(runtime_dir, tmp_path):
    """Ctrl-C ends `agent run` after a drain with 130, and its last word is one line."""
    command = [sys.executable, "-m", "everystep.cli", "agent", "run", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "serves" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=20) == 130
    assert rest.splitlines()[-1] == "interrupted"
    assert "Traceback" not in rest
    assert names(runtime_dir) == []


def test_a_lock_that_was_removed_between_open_and_lock_is_not_taken(tmp_path, monkeypatch):
    """An agent that ends removes the file that a starting one has just opened: the starting one locks the file that is there, not that one."""
    place = Place.of_run(tmp_path, "run", "/somewhere")
    ending = place.take_lock()
    real, calls = fcntl.flock, []

    def flock(fd, how):
        if not calls:
            calls.append(fd)
            place.clear(log=True)
            os.close(ending)
        real(fd, how)

    monkeypatch.setattr(runtime.fcntl, "flock", flock)
    taken = place.take_lock()
    assert taken is not None
    assert os.path.samestat(os.fstat(taken), place.lock.stat())
    other = os.open(place.lock, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(taken)


def test_a_log_that_was_removed_is_made_again(tmp_path):
    """An agent whose log was removed while it started writes to a file that can be found."""
    place = Place.of_run(tmp_path, "run", "/somewhere")
    script = (
        "import os, sys; from pathlib import Path; from everystep.agent.runtime import Place;"
        "place = Place.of_run(Path(sys.argv[1]), 'run', '/somewhere'); os.unlink(place.log); place.adopt_log(); os.write(2, b'here')"
    )
    with place.log.open("wb") as log:
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], stderr=log, check=True, timeout=60)
    assert place.log.read_bytes() == b"here"
    assert place.log.stat().st_mode & 0o777 == 0o600
