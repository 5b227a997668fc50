"""kill -9 of the agent while the real command consolidates for it, again and again: exports are whole, nothing outlives it, and the end comes."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import everystep

ROUNDS = min(20, max(4, int(os.environ.get("EVERYSTEP_SOAK_ROUNDS", "4"))))


def consolidating(run: Path) -> list[psutil.Process]:
    """Processes that consolidate this run."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "consolidate" in words and str(run) in words and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wrong(exports: Path, wanted: dict[int, torch.Tensor]) -> list[str]:
    """What is to be seen under final names and is not what was saved."""
    found = []
    for folder in [path for path in exports.glob("model-*") if path.is_dir()]:
        step = json.loads((folder / "everystep.json").read_text())["step"]
        tensors: dict[str, torch.Tensor] = {}
        for path in folder.glob("*.safetensors"):
            tensors |= load_file(path)
        if not torch.equal(tensors["weight"], wanted[step]):
            found.append(f"{folder.name} is not step {step}")
    return found


@pytest.mark.leaves_agent
@pytest.mark.timeout(300)
def test_agents_killed_in_the_middle_of_exports(tmp_path: Path) -> None:
    """F24, F25, F48: four agents are killed at random moments of their exports. What has a final name is whole, no process goes on for a dead agent, what
    retention kept is restored, and the run's end makes its export and leaves nothing half done behind."""
    chance = random.Random(4)
    run, wanted = tmp_path / "run", {}
    model = nn.Linear(64, 4096, bias=False)
    for number in range(ROUNDS + 1):
        last = number == ROUNDS
        checkpointer = everystep.Checkpointer(run, keep=everystep.Keep(last=2), consolidate={"when": [{"every": 2}, "final"], "keep": None, "dtype": "keep"})
        begin = checkpointer.restore({"model": model}) or 0
        assert begin == max(wanted, default=0)
        assert begin == 0 or torch.equal(model.weight, wanted[begin])
        for step in range(begin + 1, begin + 4):
            with torch.no_grad():
                model.weight.normal_()
            wanted[step] = model.weight.detach().clone()
            checkpointer.save(step, {"model": model}, sync=True)
        client = checkpointer._run.client
        assert client is not None
        if not last:
            threading.Event().wait(chance.uniform(0.0, 1.0))
            os.kill(client.welcome.pid, signal.SIGKILL)
            _, alive = psutil.wait_procs(consolidating(run), timeout=10)
            assert not alive
            checkpointer._run.abandon()
            checkpointer._closed = True
        else:
            checkpointer.close()
        assert wrong(run / "exports", wanted) == []
    exports = run / "exports"
    assert exports.joinpath("LATEST").resolve().name.startswith(f"model-{max(wanted):012d}")
    steps = {json.loads(path.read_text())["step"] for path in exports.glob("model-*/everystep.json")}
    assert {max(wanted), max(wanted) - max(wanted) % 2} <= steps
    assert not list(exports.glob(".*.partial"))
    assert not (exports / "waiting.json").exists()
