"""The harness itself: what it cuts is cut, what it waits for is heard, what it leaves behind is nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from checks import lived
from launch import TimedOut

_TRY = "import socket,sys; s=socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.0); s.sendall(b'x' * 20); print(len(s.recv(1)))"
_SERVE = """
import socket, sys
l = socket.create_server((sys.argv[1], 0)); print(l.getsockname()[1], flush=True)
while True:
    c, _ = l.accept(); c.sendall(b'y'); c.close()
"""


def test_links_can_be_cut_and_slowed(clusters):
    """A node with its cable pulled is not reached, and is reached again afterwards; nodes have addresses and disks of their own."""
    cluster = clusters(2, isolated=True)
    one, other = cluster.nodes
    (one.disk / "mine").write_text("x")
    assert one.names(one.local) == ["mine"]
    assert other.names(other.local) == []
    command = [*one.prefix, sys.executable, "-c", _SERVE, one.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()

        def reached() -> bool:
            return (
                subprocess.run([*other.prefix, sys.executable, "-c", _TRY, one.address, port], capture_output=True, check=False).returncode
                == 0
            )

        try:
            assert reached()
            one.cut()
            assert not reached()
            one.mend()
            assert reached()
            one.slow(100_000)
            assert reached()
        finally:
            server.kill()


def test_a_small_disk_fills(clusters):
    """A disk of 16 MiB that is filled up has no room for a page, on that node alone."""
    cluster = clusters(2, isolated=True)
    one, other = cluster.nodes
    one.small_disk(16 << 20)
    filler = one.fill_disk()
    probe = "open('{}/probe', 'wb', 0).write(bytes(1 << 16))"
    written = [
        subprocess.run([*node.prefix, sys.executable, "-c", probe.format(node.local)], capture_output=True, check=False).returncode
        for node in (one, other)
    ]
    assert written == [1, 0]
    one.remove(filler)
    assert "filler" not in one.names(one.local)


def test_a_wait_that_times_out_shows_every_stack(clusters, jobs):
    """Ranks that hang are aborted, and the error has the line at which each one hung."""
    job = jobs(clusters(2), "programs:hangs", per_node=1)
    job.all_said("hello")
    with pytest.raises(TimedOut) as caught:
        job.wait(lambda: False, timeout_s=1.0)
    assert str(caught.value).count("in hangs") == 2
    assert [rank.status for rank in job.ranks] == [-6, -6]


def test_nothing_is_left_of_a_node(clusters, jobs):
    """A killed node has no process left; a closed cluster has no folder."""
    cluster = clusters(2)
    job = jobs(cluster, "programs:hangs", per_node=2)
    job.all_said("hello")
    cluster.nodes[1].kill()
    job.ended(ranks=[2, 3])
    assert [rank.status for rank in job.ranks] == [None, None, -9, -9]
    job.close()
    cluster.close()
    assert not os.path.exists(cluster.folder)


@pytest.mark.parametrize("layout", ["fsdp", "fsdp-tp"])
def test_two_runs_of_one_world_are_equal_to_the_bit(clusters, jobs, trajectory, layout):
    """What all comparisons rest on: the same training on one node and on two has the same digests at every step."""
    job = jobs(clusters(2), "train:trajectory", per_node=2, options={"layout": layout, "steps": 4})
    job.finished()
    known = trajectory(layout, 4, 4)
    mine = lived(job)
    assert {place: line["digest"] for place, line in mine.items()} == {place: line["digest"] for place, line in known.items()}
    assert len({line["digest"] for line in known.values()}) == len(known)
