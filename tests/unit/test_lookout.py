"""Keys that are watched in the background."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from everystep.errors import AgentError
from everystep.trainer.lookout import Lookout


def test_a_key_is_seen_once_it_is_there() -> None:
    """The first glance finds nothing and starts the watch; a later one has what the thread found, and the key is not asked for again."""
    keys: dict[str, bytes] = {}
    asked, seen = [], threading.Event()

    def look(key: str) -> bytes | None:
        asked.append(key)
        if key in keys:
            seen.set()
        return keys.get(key)

    lookout = Lookout(look, pause_s=0.001)
    assert lookout.glance("k") is None
    keys["k"] = b"v"
    assert seen.wait(10)
    lookout.close()
    lookout._thread.join(10)
    count = len(asked)
    assert lookout.glance("k") == b"v"
    assert asked == ["k"] * count


def test_a_network_that_hangs_stops_nobody() -> None:
    """While the thread waits for the store, glances and the close come back at once."""
    hangs, go_on = threading.Event(), threading.Event()

    def look(key: str) -> bytes | None:
        hangs.set()
        go_on.wait(30)
        return None

    lookout = Lookout(look, pause_s=0.001)
    lookout.glance("k")
    assert hangs.wait(10)
    assert lookout.glance("k") is None
    assert lookout.glance("other") is None
    lookout.close()
    go_on.set()


def test_a_store_that_is_gone_is_told_at_the_next_glance() -> None:
    """The thread's error is raised where somebody can say it."""
    gone = AgentError("the job's store cannot be reached", kind="store-gone")

    def look(key: str) -> bytes | None:
        raise gone

    lookout = Lookout(look, pause_s=0.001)
    lookout.glance("k")
    lookout._thread.join(10)
    with pytest.raises(AgentError, match="cannot be reached"):
        lookout.glance("k")


LEAVES = """
import sys, time
import torch.distributed as dist
from everystep.trainer.lookout import Lookout

store = dist.TCPStore("127.0.0.1", 0, 1, True)
looks = [Lookout(lambda key: store.get(key) if store.check([key]) else None, pause_s=0.0) for _ in range(3)]
for look in looks:
    look.glance("never")
time.sleep(0.1)
"""


def test_the_interpreter_may_end_while_the_store_is_asked() -> None:
    """Nobody has called close: no thread is inside the store when the interpreter ends, which would end the process with SIGABRT."""
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
