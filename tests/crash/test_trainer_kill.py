"""kill -9 of real trainers and of the real agent at random moments, then restore."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = int(os.environ.get("EVERYSTEP_SOAK_ROUNDS", "50"))


@pytest.mark.leaves_agent
@pytest.mark.timeout(600)
def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """After each kill what is restored equals the uninterrupted run bit by bit, and nothing acknowledged is lost."""
    script = Path(__file__).with_name("campaign.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), str(ROUNDS), "20"], capture_output=True, text=True, timeout=590, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["violations"] == [], result
    assert result["rounds"] == ROUNDS
    assert result["from_memory"] > ROUNDS // 4
    assert result["from_disk"] > ROUNDS // 20
