"""Jobs under a byte budget, and reusable buffers."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from everystep.errors import CorruptionError
from everystep.store.disk import address
from everystep.store.local import LocalStore
from everystep.testing import SimDisk
from everystep.transfer import Buffers, Transfer

PATIENCE_S = 10


def threads_left():
    return [thread for thread in threading.enumerate() if thread.name.startswith("everystep-transfer")]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_in_order(threads):
    """Results come in the jobs' order whatever order they end in, and no thread is left."""
    second_done = threading.Event()

    def first():
        assert threads == 1 or second_done.wait(PATIENCE_S)
        return 0

    def second():
        second_done.set()
        return 1

    jobs = [(1, first), (1, second)] + [(1, lambda number=number: number) for number in range(2, 50)]
    with Transfer(threads=threads) as transfer:
        assert list(transfer.results(jobs)) == list(range(50))
        assert list(transfer.results([])) == []
    assert threads_left() == []


def test_results_as_completed():
    """Unordered results come as they end."""
    second_taken = threading.Event()
    with Transfer(threads=2) as transfer:
        results = transfer.results([(1, lambda: second_taken.wait(PATIENCE_S) and "first"), (1, lambda: "second")], ordered=False)
        assert next(results) == "second"
        second_taken.set()
        assert list(results) == ["first"]


@pytest.mark.parametrize("ordered", [True, False])
def test_budget(ordered):
    """The costs of what runs or waits to be taken never exceed the budget, a single larger job apart, and jobs are drawn only as they fit."""
    lock, running, peak, drawn = threading.Lock(), [0], [0], [0]

    def job(cost):
        with lock:
            running[0] += cost
            peak[0] = max(peak[0], running[0])
        return cost

    def jobs():
        for number in range(60):
            cost = 25 if number == 30 else 4
            drawn[0] += 1
            yield cost, lambda cost=cost: job(cost)

    taken = 0
    with Transfer(threads=4, budget_nbytes=10) as transfer:
        for cost in transfer.results(jobs(), ordered=ordered):
            with lock:
                assert running[0] <= max(10, 25 if 25 in (cost, running[0]) else 10)
                running[0] -= cost
            taken += 1
            assert drawn[0] - taken <= 3  # two of 4 bytes fit beside this one, and one is in hand
    assert taken == 60
    assert peak[0] == 25


def test_first_failure_wins_and_stops_the_rest():
    """F1: the failure that came first in time is raised, what runs is waited for, and what had not begun never begins."""
    late_may_end, ended, begun = threading.Event(), [], []

    def late():
        assert late_may_end.wait(PATIENCE_S)
        ended.append("late")
        raise ValueError("second")

    def early():
        late_may_end.set()
        raise OSError("first")

    jobs = [(1, late), (1, early)] + [(1, lambda: begun.append(1))] * 20
    with Transfer(threads=2) as transfer:
        with pytest.raises((OSError, ValueError)) as caught:
            transfer.run(jobs)
        assert ended == ["late"]
        assert str(caught.value) == "first"
        assert len(begun) <= 1
        transfer.run([(1, lambda: begun.append("again"))])
    assert begun[-1] == "again"
    assert threads_left() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, RuntimeError])
def test_leaving_early(error):
    """Ctrl-C or an error in the loop waits for what runs and starts nothing more."""
    release, ended, begun = threading.Event(), [], []

    def running():
        assert release.wait(PATIENCE_S)
        ended.append(1)

    def jobs():
        yield 1, lambda: None
        yield 1, running
        while True:
            yield 1, lambda: begun.append(1)

    with Transfer(threads=2, budget_nbytes=3) as transfer:
        results = transfer.results(jobs())
        next(results)
        threading.Timer(0.01, release.set).start()
        with pytest.raises(error):
            results.throw(error())
        assert ended in ([1], [])  # dropped before it began, or waited for
        assert len(begun) <= 2
    assert threads_left() == []


def test_buffers_are_reused():
    """A buffer given back is the next one taken; each is page-aligned and of the size asked for; a larger one is not kept."""
    with Buffers(8192) as buffers:
        first = buffers.take(5000)
        assert (len(first), address(first) % 4096) == (5000, 0)
        where = address(first)
        second = buffers.take(8192)
        assert address(second) != where
        buffers.give_back(first[10:20])
        assert address(buffers.take(1)) == where
        large = buffers.take(100_000)
        assert len(large) == 100_000
        buffers.give_back(large)
        assert len(buffers._idle) == 0
        with pytest.raises(TypeError):
            buffers.give_back(memoryview(b"123"))


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 10), (5, 4096), (4095, 2), (4096, 4096), (9_990, 10), (0, 10_000), (10_000, 0)])
def test_buffers_read(offset, nbytes):
    """Exactly the wanted bytes, wherever they are in the object, read in whole pages."""
    reads = []

    class Recording(SimDisk):
        def pread(self, fd, view, offset):
            reads.append(offset)
            return super().pread(fd, view, offset)

    store = LocalStore("/run", disk=Recording())
    data = bytes(number % 251 for number in range(10_000))
    store.put("x", data)
    with Buffers(4096) as buffers:
        view = buffers.read(store, "x", offset, nbytes)
        assert bytes(view) == data[offset : offset + nbytes]
        assert {at % 4096 for at in reads} <= {0}
        buffers.give_back(view)
        with pytest.raises(CorruptionError):
            buffers.read(store, "x", offset, 10_001 - offset)


def test_imports_what_is_declared_alone():
    """What happens to be installed with torch is no dependency: storage is imported without it."""
    code = "import sys; sys.modules['typing_extensions'] = None; import everystep.transfer, everystep.repository"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_buffers_begin_at_large_pages_and_are_used_again():
    """Wherever the kernel puts the memory: a buffer begins at a large page, also the next ones, and one that was given back comes again."""
    with Buffers(nbytes=1 << 20) as buffers:
        views = [buffers.take(1 << 20) for _ in range(5)]
        assert [address(view) % (2 << 20) for view in views] == [0] * 5
        where = address(views[0])
        buffers.give_back(views[0])
        assert address(buffers.take(1 << 19)) == where


@pytest.mark.parametrize("shared", [True, False])
def test_the_store_hears_what_is_shared(shared):
    """Whether others of the node want the bytes too reaches the store, which decides how to read."""
    heard = []

    class Hearing:
        url = "hearing"

        def size(self, key):
            return 10

        def read_into(self, key, offset, view, *, shared=False):
            heard.append(shared)

    with Buffers(nbytes=1 << 20) as buffers:
        buffers.give_back(buffers.read(Hearing(), "x", 2, 5, shared=shared))
    assert heard == [shared]
