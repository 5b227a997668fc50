"""Many reads or writes at once under a byte budget, and reusable page-aligned buffers for them.

Theory of operation. Jobs are pairs of a cost in bytes and a callable. The caller's thread feeds them to a few threads as long as the
costs of those not yet taken by the caller stay within the budget (one job is always let through), so memory is bounded however slow the
reader of the results is. The first failure stops the rest: what has not begun never begins, what runs is waited for, then the error
is raised. No thread outlives the ``with``.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

from everystep.store import Store
from everystep.store.disk import address

__all__ = ["Buffers", "Transfer"]

Result = TypeVar("Result")
_PAGE = 4096
_LARGE_PAGE = 2 << 20


class _StoppedError(Exception):
    """A job that never began because another failed; never seen outside."""


class Transfer:
    """A few threads and a byte budget; a context manager.

    Args:
        threads: Jobs that run at the same time; with one they run in the caller's own thread.
        budget_nbytes: Bound on the sum of the costs of jobs under way or whose result is not yet taken. A single larger job goes alone.
    """

    def __init__(self, *, threads: int = 2, budget_nbytes: int = 64 << 20) -> None:
        if threads < 1:
            raise ValueError(f"a transfer needs at least one thread, not {threads}")
        self._threads = threads
        self._budget_nbytes = budget_nbytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="everystep-transfer")

    def __enter__(self) -> Transfer:  # noqa: PYI034 (typing.Self needs Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what runs, drop what has not begun, end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, jobs: Iterable[tuple[int, Callable[[], object]]]) -> None:
        """Run all jobs; returns when all are done. The first failure (in time) stops the rest and is raised."""
        for _ in self.results(jobs, ordered=False):
            pass

    def results(self, jobs: Iterable[tuple[int, Callable[[], Result]]], *, ordered: bool = True) -> Generator[Result, None, None]:
        """Yield each job's result, in the jobs' order or as they complete.

        Leaving the loop early, an error in it, or Ctrl-C stops the rest and waits for what runs, so buffers can be reused at once.
        """
        if self._threads == 1:
            for _, job in jobs:
                yield job()
            return
        stop = threading.Event()
        failures: list[BaseException] = []  # in order of time: list.append is atomic
        under_way: deque[tuple[Future[Result], int]] = deque()
        spent, source, more = 0, iter(jobs), True
        following: tuple[int, Callable[[], Result]] | None = None

        def guarded(job: Callable[[], Result]) -> Result:
            if stop.is_set():
                raise _StoppedError
            try:
                return job()
            except BaseException as error:
                failures.append(error)
                stop.set()
                raise

        try:
            while more or under_way or following:
                while following or more:
                    following = following or next(source, None)
                    if following is None:
                        more = False
                        break
                    cost, job = following
                    if under_way and spent + cost > self._budget_nbytes:
                        break
                    under_way.append((self._pool.submit(guarded, job), cost))
                    spent += cost
                    following = None
                if not under_way:
                    break
                for future, cost in self._finished(under_way, ordered=ordered):
                    spent -= cost
                    if failures:
                        raise failures[0]
                    yield future.result()
        finally:
            stop.set()
            wait([future for future, _ in under_way])
            under_way.clear()

    @staticmethod
    def _finished(under_way: deque[tuple[Future[Result], int]], *, ordered: bool) -> Iterator[tuple[Future[Result], int]]:
        """Take what is done from ``under_way``, waiting for at least one (the first, if ``ordered``)."""
        futures = [future for future, _ in under_way]
        wait(futures[:1] if ordered else futures, return_when=FIRST_COMPLETED)
        if ordered:
            yield under_way.popleft()
            return
        for item in [item for item in under_way if item[0].done()]:
            under_way.remove(item)
            yield item


class Buffers:
    """A pool of page-aligned writable buffers; thread-safe.

    Fresh memory costs ten times what reused memory does (each page is faulted in), so reads take their buffers from here and give them
    back.

    Args:
        nbytes: Largest usual read. A larger one gets a buffer of its own that is not kept.
    """

    def __init__(self, nbytes: int = 8 << 20) -> None:
        self._capacity = -(-nbytes // _PAGE) * _PAGE + 2 * _PAGE
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        self._sizes: dict[tuple[str, str], int] = {}
        self._closed = False

    def __enter__(self) -> Buffers:  # noqa: PYI034 (typing.Self needs Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def take(self, nbytes: int) -> memoryview:
        """A page-aligned writable buffer of exactly ``nbytes``, with whatever was in it before."""
        buffer: mmap.mmap | None = None
        if nbytes <= self._capacity:
            with self._lock:
                buffer = self._idle.pop() if self._idle else None
        if buffer is None:
            buffer = _memory(max(nbytes, self._capacity))
        view = memoryview(buffer)
        begin = -address(view) % _LARGE_PAGE
        return view[begin : begin + nbytes]

    def read(self, store: Store, key: str, offset: int, nbytes: int, *, shared: bool = False) -> memoryview:
        """Exactly the wanted bytes of an object, read in whole pages so that they can go past the page cache. Give the view back after use.

        ``shared``: see ``Store.read_into``.

        Raises:
            CorruptionError: The object ends before ``offset + nbytes``.
        """
        if nbytes == 0:
            return self.take(0)
        begin = offset - offset % _PAGE
        end = min(-(-(offset + nbytes) // _PAGE) * _PAGE, max(self._size(store, key), offset + nbytes))
        view = self.take(end - begin)
        try:
            store.read_into(key, begin, view, shared=shared)
        except BaseException:
            self.give_back(view)
            raise
        return view[offset - begin : offset - begin + nbytes]

    def give_back(self, view: memoryview) -> None:
        """End the use of a view from ``take`` or ``read``: its bytes may change from now on."""
        buffer = view.obj
        if not isinstance(buffer, mmap.mmap):
            raise TypeError("this view is not from these buffers")
        with self._lock:
            if not self._closed and len(buffer) == _around(self._capacity):
                self._idle.append(buffer)

    def close(self) -> None:
        """Let the memory go; what is still in use goes when it is given back."""
        with self._lock:
            self._closed = True
            self._idle.clear()  # not closed by hand: an array may still look at one, and the memory goes with the last look

    def _size(self, store: Store, key: str) -> int:
        known = self._sizes.get((store.url, key))
        if known is None:  # objects never change
            known = self._sizes[store.url, key] = store.size(key)
        return known


def _around(nbytes: int) -> int:
    """Enough for ``nbytes`` from the start of a large page on, wherever the memory is."""
    return nbytes + _LARGE_PAGE


def _memory(nbytes: int) -> mmap.mmap:
    """Fresh memory, of large pages where there are any: into scattered small ones a disk reads past the page cache at half its speed.

    Private, since large pages for shared memory are off by default.
    """
    memory = mmap.mmap(-1, _around(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
