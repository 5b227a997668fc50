"""The examples, as a reader would run them: started, killed in the middle, started again; and once without a break."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS, PAUSE = 8, 5


# -- in the rank ------------------------------------------------------------------------------------------------------------
class _Told(io.TextIOBase):
    """What the example prints, told to the test line by line. Behind a line that begins with ``until`` it waits to be killed."""

    def __init__(self, voice: Any, until: str) -> None:
        self._voice, self._until, self._line = voice, until, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._voice.tell("line", text=line)
            if self._until and line.startswith(self._until):
                self._voice.tell("paused")
                self._voice.ask()
        return len(text)


def example(voice: Any, name: str, arguments: list[str], until: str = "") -> None:
    """Run an example as its own main program."""
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(_Told(voice, until)):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


# -- the tests --------------------------------------------------------------------------------------------------------------
def begun(job) -> int:
    """The step after which rank 0 began."""
    [line] = [line["text"] for line in job.ranks[0].said("line") if line["text"].startswith("begins")]
    return int(line.rpartition(" ")[2])


def losses(*jobs) -> dict[int, str]:
    """What rank 0 printed of each step, later lives over earlier ones."""
    told = [line["text"].split() for job in jobs for line in job.ranks[0].said("line") if line["text"].startswith("step ")]
    return {int(step): loss for _, step, _, loss in told}


@pytest.mark.parametrize(("name", "ranks"), [("ddp.py", 2), ("fsdp2.py", 2), ("hsdp.py", 4), ("dcp.py", 2)])
def test_example_goes_on_where_it_was_killed(clusters, jobs, name, ranks):
    """Killed after step 5 of 8 and started again by the same command, it goes on at step 4 or 5, and all losses are those of an uninterrupted run."""
    cluster = clusters(1, isolated=False)
    command = {"name": name, "arguments": [str(cluster.shared / "run"), "--steps", str(STEPS)]}
    killed = jobs(cluster, "test_examples:example", per_node=ranks, options={**command, "until": f"step {PAUSE} "})
    killed.all_said("paused", ranks=[0])
    killed.kill()
    again = jobs(cluster, "test_examples:example", per_node=ranks, options=command)
    again.finished()
    alone = {**command, "arguments": [str(cluster.shared / "alone"), "--steps", str(STEPS)]}
    unbroken = jobs(cluster, "test_examples:example", per_node=ranks, options=alone)
    unbroken.finished()
    assert (begun(killed), begun(unbroken)) == (0, 0)
    assert begun(again) in (PAUSE - 1, PAUSE)
    assert losses(killed, again) == losses(unbroken)
    assert sorted(losses(unbroken)) == list(range(1, STEPS + 1))
