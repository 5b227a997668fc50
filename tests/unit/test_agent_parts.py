from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import resource
import socket
import statistics
import time

import pytest

from everystep.agent import client, messages
from everystep.agent.memory import Mapping, SlabMemory, memory_room
from everystep.agent.runtime import Place
from everystep.agent.stats import AgentStats, Histogram, stored
from everystep.agent.wire import Channel
from everystep.errors import AgentError
from everystep.repository import Repository

MIB = 1 << 20


def test_slab_cannot_be_resized_and_is_shared():
    """A slab's memfd keeps its size for ever; what one mapping writes another sees."""
    slab = SlabMemory(2 * MIB)
    for nbytes in (0, 4 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, nbytes)
    other = Mapping(slab.fd, slab.nbytes)
    slab.mapping.populate()
    other.view[MIB : MIB + 3] = b"abc"
    assert bytes(slab.view[MIB : MIB + 3]) == b"abc"
    assert slab.mapping.populated == slab.nbytes
    other.close()
    slab.close()


def test_readers_cannot_write():
    """The descriptor for readers opens no writable mapping, and a private view's changes reach nobody."""
    slab = SlabMemory(MIB)
    slab.view[:2] = b"ok"
    with slab.readable_fd() as fd:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(fd, MIB)
        reader = Mapping(fd, MIB, private=True)
    reader.populate()
    reader.view[:2] = b"no"
    assert bytes(slab.view[:2]) == b"ok"
    reader.close()
    slab.close()


def test_closed_slab_gives_its_memory_back_though_another_maps_it():
    """Closing a slab frees its pages also while a trainer still has it mapped."""
    slab = SlabMemory(4 * MIB)
    trainer = Mapping(slab.fd, slab.nbytes)
    trainer.view[:5] = b"pages"
    fd = os.dup(slab.fd)
    assert os.fstat(fd).st_blocks > 0
    slab.close()
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)
    trainer.close()


def test_mapping_with_views_can_be_closed():
    """Somebody who still holds a view keeps the memory; closing is no error, and populate stops."""
    slab = SlabMemory(MIB)
    view = slab.view[:10]
    slab.close()
    view[0] = 7
    slab.mapping.populate()
    assert slab.mapping.populated == 0


def meminfo(proc, available_mib, total_mib=1000):
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "meminfo").write_text(f"MemTotal: {total_mib * 1024} kB\nMemAvailable:   {available_mib * 1024} kB\nHugePages_Total: 0\n")
    (proc / "self" / "cgroup").write_text("")


def test_room_is_what_the_machine_has(tmp_path):
    """Without control groups: available memory less a reserve of a sixteenth."""
    meminfo(tmp_path / "proc", 500)
    room = memory_room(proc=tmp_path / "proc", cgroups=tmp_path / "cg")
    assert room.nbytes == 500 * MIB - 1000 * MIB // 16
    assert "available memory" in room.limits


@pytest.mark.parametrize("version", [1, 2])
def test_room_is_what_the_smallest_control_group_leaves(tmp_path, version):
    """F30: v1 and v2, limits of groups further up count, file cache counts as free, and the numbers are in the text."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cg"
    meminfo(proc, 900)
    if version == 1:
        names, root, line = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), cgroups / "memory", "4:memory:/a/b\n0::/\n"
    else:
        names, root, line = ("memory.max", "memory.current", "inactive_file"), cgroups, "0::/a/b\n"
    (proc / "self" / "cgroup").write_text(line)
    (root / "a" / "b").mkdir(parents=True)
    for folder, limit, used, cached in ((root / "a", 160 * MIB, 100 * MIB, 40 * MIB), (root / "a" / "b", "max" if version == 2 else 1 << 62, 0, 0)):
        for name, value in zip(names[:2], (limit, used), strict=True):
            (folder / name).write_text(f"{value}\n")
        halves = (f"{names[2]} {cached // 2}", f"{names[2].replace('inactive', 'active')} {cached // 2}")
        (folder / "memory.stat").write_text("\n".join(["cache 1", *halves, ""]))
    room = memory_room(proc=proc, cgroups=cgroups)
    assert room.nbytes == (160 - 100 + 40 - 10) * MIB
    assert f"{160 * MIB:,}" in room.limits


def test_room_never_fails(tmp_path):
    """Where nothing can be read there is no limit that we know of; the real machine has some room."""
    assert memory_room(proc=tmp_path, cgroups=tmp_path).nbytes > 1 << 50
    assert 0 < memory_room().nbytes < 1 << 50


def test_quantiles_are_right_within_the_width_of_a_bucket():
    """Against the statistics module, over durations of six orders of magnitude."""
    chance, histogram = random.Random(1), Histogram()
    values = [10 ** chance.uniform(-5.5, 1) for _ in range(2000)]
    for value in values:
        histogram.observe(value)
    exact = statistics.quantiles(values, n=100)
    for share, at in ((0.5, 49), (0.9, 89), (0.99, 98)):
        assert histogram.quantile(share) == pytest.approx(exact[at], rel=0.11)
    assert histogram.max_s == max(values)


def test_histograms_merge_as_if_counted_together():
    """Two halves, one of them through JSON, are the whole; zero and empty ones do no harm."""
    chance, parts, whole = random.Random(2), [Histogram(), Histogram(), Histogram()], Histogram()
    for number in range(300):
        value = chance.expovariate(3.0) if number else 0.0
        parts[number % 2].observe(value)
        whole.observe(value)
    merged = Histogram()
    for part in parts:
        merged.merge(part.as_json())
    got, expected = merged.as_json(), whole.as_json()
    assert got.pop("total_s") == pytest.approx(expected.pop("total_s"))
    assert got == expected
    assert Histogram().as_json()["p99_s"] == 0.0


def test_stats_are_kept_in_the_run(tmp_path):
    """What attempts recorded is merged by ``stored``; None before anything is; a broken record is left out."""
    repository = Repository.open(str(tmp_path / "run"), create=True)
    assert stored(repository) is None
    for attempt in (1, 2):
        stats = AgentStats()
        stats.count("committed", attempt)
        stats.observe({"write": 0.5 * attempt})
        repository.record_stats(attempt, stats.as_json())
    (tmp_path / "run" / "stats" / "000003.json").write_text("{")
    found = stored(repository)
    assert found["counters"]["committed"] == 3
    assert found["phases"]["write"]["count"] == 2
    assert found["phases"]["write"]["total_s"] == pytest.approx(1.5)
    assert found["pid"] == os.getpid()


def test_channel_carries_messages_and_descriptors():
    """Messages of any size arrive in order, each with the descriptor that was sent beside it."""
    left, right = (Channel(sock) for sock in socket.socketpair())
    reading, writing = os.pipe()
    sent = [messages.Done(id=1), messages.SnapshotTaken(id=2, part=b"m" * 100_000, file_offsets=(0,), slab_nbytes=9), messages.Done(id=3)]
    for message in sent:
        left.send(message, reading if message.id == 2 else None)
    os.close(reading)
    got = [right.receive() for _ in sent]
    assert [message for message, _ in got] == sent
    assert [fd is not None for _, fd in got] == [False, True, False]
    fd = got[1][1]
    assert not os.get_inheritable(fd)
    os.write(writing, b"x")
    assert os.read(fd, 1) == b"x"
    for one in (fd, writing):
        os.close(one)
    left.shut()
    assert right.receive() is None
    left.close()
    right.close()


def test_channel_refuses_what_is_too_long():
    """A length past the limit is refused before anything of that size is held."""
    left, right = socket.socketpair()
    left.sendall(b"\xff\xff\xff\x7f")
    with contextlib.closing(Channel(right)) as channel, pytest.raises(AgentError, match="longer than"):
        channel.receive()
    left.close()


def test_waits_for_descriptors_of_any_number():
    """A trainer with more than a thousand open files still hears that its agent has come up, and of a silence that it is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        reading, writing = os.pipe()
        high = fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, 1500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert client._said(high, time.monotonic() - 1.0) is None
    os.write(writing, b"ready")
    assert client._said(high, time.monotonic() + 10.0) == b"ready"
    os.write(writing, b"why not")
    os.close(writing)
    assert client._said(high, time.monotonic() + 10.0) == b"why not"
    os.close(reading)
    os.close(high)


def test_one_lock_for_each_run(tmp_path):
    """The lock is taken once, is free again when its descriptor is closed, and other runs have their own."""
    place, other = Place.of_run(tmp_path, "a", "/r/a"), Place.of_run(tmp_path, "b", "/r/a")
    lock = place.take_lock()
    assert lock is not None
    assert Place.of_run(tmp_path, "a", "/r/a").take_lock() is None
    copy = Place.of_run(tmp_path, "a", "/r/copy").take_lock()  # a copy of a run has its id and another place
    assert copy is not None
    os.close(copy)
    os.close(other.take_lock())
    os.close(lock)
    again = place.take_lock()
    assert again is not None
    os.close(again)


def test_token_is_not_in_what_a_message_looks_like():
    """The job's secret reaches no log by way of a message's repr."""
    message = messages.OpenPeers(token=b"a secret of sixteen", host="127.0.0.1")
    assert "secret" not in repr(message)
    assert "127.0.0.1" in repr(message)
