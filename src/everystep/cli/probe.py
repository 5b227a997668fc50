"""Measures what a directory's file system can do, with at most 256 MiB that it deletes again.

Everything happens in a new folder below the directory. A probe that fails says so in its result: what cannot be done is a finding,
not an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from everystep import errors

__all__ = ["MAX_NBYTES", "Probe", "file_system", "probe"]

MAX_NBYTES = 256 << 20
BLOCK_NBYTES = 8 << 20
SYNCS = 16
WRITERS = 2
TIME_LIMIT_S = 3.0
FICLONE = 0x40049409
"""The ioctl that makes a file share another's blocks (linux/fs.h)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """What was found. Bandwidths in bytes per second (None: not measured), latencies in seconds, semantics as "" (right) or the fault."""

    path: str
    file_system: str
    mounted_at: str
    free_nbytes: int
    direct_alignment: int | None
    """Smallest block that O_DIRECT takes here (512 or 4096), None where it is refused."""
    fsync_p50_s: float
    fsync_max_s: float
    link: str
    rename: str
    mkdir: str
    reflink: bool
    tested_nbytes: int
    direct_write: float | None
    buffered_write: float
    """With fsync, as everything that counts as written."""
    direct_read: float | None


def file_system(path: Path) -> tuple[str, str]:
    """(type, mount point) of the file system that holds ``path``."""
    real = path.resolve()
    best = ("unknown", "/")
    for partition in psutil.disk_partitions(all=True):  # in the order of mounting: a later mount on the same point hides the earlier
        mount = Path(partition.mountpoint)
        if (real == mount or mount in real.parents) and len(partition.mountpoint) >= len(best[1]):
            best = (partition.fstype, partition.mountpoint)
    return best


def probe(path: Path, *, max_nbytes: int = MAX_NBYTES, on_bytes: Callable[[int], None] = lambda _: None) -> Probe:
    """Test and measure the directory ``path``; ``on_bytes`` hears of bytes moved, for a progress bar.

    Raises:
        PermanentStoreError: Nothing can be written there.
        CapacityError: The disk is full.
    """
    kind, mount = file_system(path)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".everystep-doctor-", dir=path))
    except OSError as error:
        raise errors.PermanentStoreError(
            f"cannot write in {str(path)!r}: {error.strerror}",
            key=str(path),
            kind="unwritable",
            hint="choose another directory",
            errno=error.errno,
        ) from None
    try:
        free = shutil.disk_usage(folder).free
        tested = max(BLOCK_NBYTES, min(max_nbytes, free // 10) // BLOCK_NBYTES * BLOCK_NBYTES)
        if free < 2 * BLOCK_NBYTES:
            raise errors.CapacityError(
                f"only {free} bytes are free on {mount!r}, the test needs {2 * BLOCK_NBYTES}", key=mount, kind="disk-full"
            )
        alignment = direct_alignment(folder)
        syncs = fsync_latencies(folder)
        with contextlib.closing(mmap.mmap(-1, BLOCK_NBYTES)) as block:
            block[:] = os.urandom(1 << 20) * (BLOCK_NBYTES >> 20)  # not compressible to nothing, and every page is there
            # Direct first and the buffered one small: page cache that is being written back would slow the other.
            target = folder / "big"
            direct, written = write_speed(target, block, tested * 3 // 4, direct=True, on_bytes=on_bytes) if alignment else (None, 0)
            read = read_speed(target, written, on_bytes=on_bytes) if direct and written else None
            target.unlink(missing_ok=True)
            buffered, _ = write_speed(folder / "buffered", block, max(BLOCK_NBYTES, tested // 4), direct=False, on_bytes=on_bytes)
        return Probe(
            path=str(path),
            file_system=kind,
            mounted_at=mount,
            free_nbytes=free,
            direct_alignment=alignment,
            fsync_p50_s=statistics.median(syncs),
            fsync_max_s=max(syncs),
            link=link_semantics(folder),
            rename=rename_semantics(folder),
            mkdir=mkdir_semantics(folder),
            reflink=reflinks(folder),
            tested_nbytes=tested,
            direct_write=direct,
            buffered_write=buffered or 0.0,
            direct_read=read,
        )
    except OSError as error:
        if isinstance(error, errors.CheckpointError):
            raise
        raise errors.StoreError(
            f"the test in {str(path)!r} failed: {error.strerror}", key=str(path), kind="probe", errno=error.errno
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def direct_alignment(folder: Path) -> int | None:
    """The smallest of 512 and 4096 that a direct write may have as size and offset, None when direct writes are refused."""
    with contextlib.closing(mmap.mmap(-1, 8192)) as page:
        for size in (512, 4096):
            try:
                fd = os.open(folder / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            except OSError:
                return None
            with contextlib.suppress(OSError), memoryview(page)[:size] as view:
                try:
                    if os.pwrite(fd, view, 0) == size and os.pwrite(fd, view, size) == size:
                        return size
                finally:
                    os.close(fd)
    return None


def fsync_latencies(folder: Path) -> list[float]:
    """Seconds of each of a few small synchronous appends."""
    times: list[float] = []
    fd = os.open(folder / "small", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        begin = time.perf_counter()
        while len(times) < SYNCS and (not times or time.perf_counter() - begin < TIME_LIMIT_S):
            os.write(fd, bytes(4096))
            before = time.perf_counter()
            os.fsync(fd)
            times.append(time.perf_counter() - before)
    finally:
        os.close(fd)
    return times


def write_speed(path: Path, block: mmap.mmap, nbytes: int, *, direct: bool, on_bytes: Callable[[int], None]) -> tuple[float | None, int]:
    """(bytes per second to durable, bytes written) of one sequential pass, several requests in flight; stops at the time limit."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    try:
        begin = time.perf_counter()
        done = _in_flight(lambda offset: os.pwrite(fd, block, offset), nbytes, on_bytes=on_bytes)
        if done is None:
            return None, 0
        os.fsync(fd)
        return done / (time.perf_counter() - begin), done
    except OSError:
        if not direct:
            raise
        return None, 0
    finally:
        os.close(fd)


def read_speed(path: Path, nbytes: int, *, on_bytes: Callable[[int], None]) -> float | None:
    """Bytes per second of direct reads, several in flight; None where direct reads are refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    local = threading.local()

    def read(offset: int) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, BLOCK_NBYTES)
        return os.preadv(fd, [local.buffer], offset)

    try:
        begin = time.perf_counter()
        done = _in_flight(read, nbytes, on_bytes=on_bytes)
        return None if done is None else done / (time.perf_counter() - begin)
    except OSError:
        return None
    finally:
        os.close(fd)


def _in_flight(move: Callable[[int], int], nbytes: int, *, on_bytes: Callable[[int], None]) -> int | None:
    """Move ``nbytes`` block by block, ``WRITERS`` at a time as the store does; the bytes moved, None when a block was not moved whole."""
    deadline = time.perf_counter() + TIME_LIMIT_S
    moved, offsets = [], iter(range(0, nbytes, BLOCK_NBYTES))

    def work() -> None:
        for offset in offsets:  # next() on a range's iterator is atomic: each block goes to one thread
            if time.perf_counter() > deadline:
                return
            moved.append(move(offset))
            on_bytes(moved[-1])

    with ThreadPoolExecutor(WRITERS) as pool:
        for future in [pool.submit(work) for _ in range(WRITERS)]:
            future.result()
    return sum(moved) if moved and all(count == BLOCK_NBYTES for count in moved) else None


def link_semantics(folder: Path) -> str:
    """Whether a hard link publishes a file under a new name and refuses one that is taken."""
    source, target = folder / "link-source", folder / "link-target"
    source.write_bytes(b"new")
    try:
        os.link(source, target)
    except OSError as error:
        return f"not supported ({error.strerror})"
    try:
        os.link(source, target)
    except FileExistsError:
        return "" if target.read_bytes() == b"new" else "the linked file has other content"
    except OSError as error:
        return f"a taken name gives the wrong error ({error.strerror})"
    return "a taken name is overwritten"


def rename_semantics(folder: Path) -> str:
    """Whether a rename replaces a file so that its new content is seen at once."""
    source, target = folder / "rename-source", folder / "rename-target"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    try:
        os.replace(source, target)
    except OSError as error:
        return f"does not replace ({error.strerror})"
    return "" if target.read_bytes() == b"new" and not source.exists() else "the old content is still seen"


def mkdir_semantics(folder: Path) -> str:
    """Whether the same directory can be made only once."""
    os.mkdir(folder / "claim")
    try:
        os.mkdir(folder / "claim")
    except FileExistsError:
        return ""
    except OSError as error:
        return f"a taken name gives the wrong error ({error.strerror})"
    return "a directory can be made twice"


def reflinks(folder: Path) -> bool:
    """Whether a copy can share the blocks of its original."""
    source = folder / "clone-source"
    source.write_bytes(os.urandom(65536))
    with source.open("rb") as original, (folder / "clone-target").open("wb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, original.fileno())
        except OSError:
            return False
    return True
