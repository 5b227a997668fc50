"""What all benchmarks share: rows and bars, their table and JSON, raw disk and memory speed to compare with, and memory in use.

Rules of measuring (they are why the figures repeat): the first save of any system is apart, because it allocates; what is
compared is measured in turn (A B A B) in one run, so that other load falls on all alike; figures are ratios with median,
minimum and maximum; the number of torch threads is said; and what was saved is read back and compared, because a fast wrong
answer is worth nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

BLOCK = 8 << 20
EXIT_BAR_MISSED = 3


class Results:
    """Rows (what was measured) and bars (what it has to reach)."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.bars: list[dict[str, Any]] = []

    def row(self, name: str, values: Sequence[float], unit: str, **more: object) -> float:
        """Note measurements of one thing; returns their median."""
        middle = statistics.median(values)
        self.rows.append({"name": name, "median": middle, "min": min(values), "max": max(values), "n": len(values), "unit": unit, **more})
        return middle

    def bar(self, name: str, value: float, bound: float, *, at_most: bool = True, applies: bool = True, why: str = "") -> None:
        """Hold a value against its bound. One that does not apply here (``why`` says it) is listed, and holds."""
        holds = (value <= bound if at_most else value >= bound) if applies else True
        sign = "<=" if at_most else ">="
        self.bars.append({"name": name, "value": value, "bound": bound, "sign": sign, "holds": holds, "applies": applies, "why": why})

    def include(self, other: dict[str, Any]) -> None:
        """Add another benchmark's output."""
        self.rows += other["rows"]
        self.bars += other["bars"]

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {"machine": machine(), "rows": self.rows, "bars": self.bars}


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    memory = next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": memory,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "unset"),
    }


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _lines(path: str) -> list[str]:
    try:
        return pathlib.Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


# -- running ----------------------------------------------------------------------------------------------------------------
def main(title: str, measure: Callable[[argparse.Namespace, Results], None]) -> None:
    """Run one benchmark from its command line; ends the process: 0, or 3 when a bar falls short."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: ends within a minute")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--dir", type=pathlib.Path, help="where to write (default: a temporary directory); what is written is removed")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement")
    arguments = parser.parse_args()
    results = Results()
    with work_folder(arguments.dir) as folder:
        arguments.folder = folder
        measure(arguments, results)
    if arguments.json:
        print(json.dumps(results.as_json()))
    else:
        show(title, results)
    sys.exit(0 if all(bar["holds"] for bar in results.bars) else EXIT_BAR_MISSED)


@contextlib.contextmanager
def work_folder(parent: pathlib.Path | None) -> Iterator[pathlib.Path]:
    """An empty directory that is gone afterwards."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="everystep-bench-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield pathlib.Path(folder)


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def figure(value: float, unit: str) -> str:
    """A value with its unit, in three or four digits."""
    if unit == "s":
        return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "B":
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.3f} {unit}".rstrip()


def show(title: str, results: Results) -> None:
    """The tables for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    told = machine()
    console.print(f"[bold]{title}[/]")
    versions = f"torch {told['torch']}, Python {told['python']}, OMP_NUM_THREADS {told['OMP_NUM_THREADS']}"
    console.print(f"[dim]{told['cpu']}, {told['cores']} cores, {versions}[/]\n")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("measured", "median", "min", "max", "n"):
        table.add_column(heading, justify="left" if heading == "measured" else "right")
    for row in results.rows:
        table.add_row(row["name"], *(figure(row[key], row["unit"]) for key in ("median", "min", "max")), str(row["n"]))
    console.print(table)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("bar", "value", "bound", ""):
        table.add_column(heading, justify="right" if heading in ("value", "bound") else "left")
    for bar in results.bars:
        verdict = "[dim]does not apply[/]" if not bar["applies"] else "[green]holds[/]" if bar["holds"] else "[red]MISSED[/]"
        table.add_row(bar["name"], f"{bar['value']:.3f}", f"{bar['sign']} {bar['bound']:g}", f"{verdict} [dim]{bar['why']}[/]")
    console.print(table)


# -- figures ----------------------------------------------------------------------------------------------------------------
def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def in_turn(rounds: int, measures: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Call each measure once a round, starting with another one each round."""
    names = list(measures)
    found: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(measures[name]())
    return found


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# -- raw speed --------------------------------------------------------------------------------------------------------------
def warm_buffer(nbytes: int) -> mmap.mmap:
    """Page-aligned memory whose pages are there already. It is a memfd's, as slabs are: O_DIRECT from it is up to half as fast again
    as from anonymous memory (fewer, larger pieces), and the yardstick has to be the best that plain calls can do."""
    descriptor = os.memfd_create("yardstick")
    try:
        os.ftruncate(descriptor, nbytes)
        buffer = mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
    for at in range(0, nbytes, BLOCK):
        buffer[at : at + BLOCK] = os.urandom(4096) * (min(BLOCK, nbytes - at) // 4096)
    return buffer


def opened_direct(path: pathlib.Path, flags: int) -> tuple[int, bool]:
    """(descriptor, whether it is O_DIRECT): falls back where the file system refuses."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError:
        return os.open(path, flags, 0o644), False


def raw_write(path: pathlib.Path, buffer: mmap.mmap, *, nbytes: int, threads: int = 2) -> float:
    """Seconds to write ``nbytes`` durably with plain calls: preallocated, O_DIRECT, 8 MiB blocks, ``threads`` in flight, fsync of both."""
    view = memoryview(buffer)
    began = time.perf_counter()
    out, _ = opened_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(out, 0, nbytes)
        _in_threads(threads, nbytes, lambda at, end: os.pwrite(out, view[at:end], at))
        os.fsync(out)
    finally:
        os.close(out)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return time.perf_counter() - began


def raw_read(paths: Sequence[pathlib.Path], buffer: mmap.mmap, *, threads: int = 2) -> float:
    """Seconds to read whole files into a warm buffer with O_DIRECT, 8 MiB blocks, two in flight."""
    view = memoryview(buffer)
    began = time.perf_counter()
    for path in paths:
        size = path.stat().st_size
        source, direct = opened_direct(path, os.O_RDONLY)
        try:
            rounded = -(-size // 4096) * 4096 if direct else size
            _in_threads(threads, rounded, lambda at, end: os.preadv(source, [view[at:end]], at))  # noqa: B023 (used at once)
        finally:
            os.close(source)
    return time.perf_counter() - began


def forget(paths: Sequence[pathlib.Path]) -> None:
    """Drop files from the page cache, so that what reads them next has to go to the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _in_threads(threads: int, nbytes: int, work: Callable[[int, int], object]) -> None:
    errors: list[OSError] = []

    def run(first: int) -> None:
        try:
            for at in range(first * BLOCK, nbytes, threads * BLOCK):
                work(at, min(nbytes, at + BLOCK))
        except OSError as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


# -- memory in use ------------------------------------------------------------------------------------------------------------
def own_nbytes(pid: int) -> tuple[int, int]:
    """(bytes that belong to the process: anonymous and its share of files; bytes of shared memory it has mapped: its share)."""
    own = shared = 0
    for line in _lines(f"/proc/{pid}/smaps_rollup"):
        word, *rest = line.split()
        if word in ("Pss_Anon:", "Pss_File:"):
            own += int(rest[0]) * 1024
        elif word == "Pss_Shmem:":
            shared += int(rest[0]) * 1024
    return own, shared


class MemoryWatch:
    """Samples ``own_nbytes`` of processes in a thread; ``peak`` is the largest sum. A context manager."""

    def __init__(self, pids: Callable[[], Sequence[int]], *, every_s: float = 0.02) -> None:
        self.peak = 0
        self.shared_peak = 0
        self.samples = 0
        self._pids = pids
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.is_set():
            pairs = [own_nbytes(pid) for pid in self._pids()]
            self.peak = max(self.peak, sum(own for own, _ in pairs))
            self.shared_peak = max(self.shared_peak, sum(shared for _, shared in pairs))
            self.samples += 1
            self._stop.wait(self._every_s)

    def __enter__(self) -> MemoryWatch:  # noqa: PYI034 (Self is not in Python 3.10)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def reset_peak_rss() -> int:
    """Forget the process's peak of resident memory; returns bytes resident now."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS:")


def peak_rss() -> int:
    """Largest resident memory since ``reset_peak_rss``, bytes."""
    return _status("VmHWM:")


def _status(field: str) -> int:
    return next((int(line.split()[1]) * 1024 for line in _lines("/proc/self/status") if line.startswith(field)), 0)
