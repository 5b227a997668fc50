"""Slabs as memory: sealed memfds, their prefaulting, and how much the machine has left for them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 0x1, 0x2
_PIECE = 32 << 20
_RESERVE = 256 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Mapping:
    """A slab mapped into this process. ``populate`` may run in one thread while others use ``view``."""

    def __init__(self, fd: int, nbytes: int, *, private: bool = False) -> None:
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        self._map = mmap.mmap(fd, nbytes, access=access)
        self._advice = _MADV_POPULATE_READ if private else _MADV_POPULATE_WRITE
        self._closing = threading.Event()
        self._busy = threading.Lock()
        self.nbytes = nbytes
        self.populated = 0
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # without huge pages: slower, not wrong
                self._map.madvise(advice)
        first = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(first)
        del first
        self.view = memoryview(self._map)

    def populate(self) -> None:
        """Put every page in place, in pieces; returns early when the mapping is closed. ``mmap.madvise`` holds the GIL, hence libc's."""
        for at in range(0, self.nbytes, _PIECE):
            nbytes = min(_PIECE, self.nbytes - at)
            with self._busy:
                if self._closing.is_set():
                    return
                if _libc.madvise(self._address + at, nbytes, self._advice) and ctypes.get_errno() == errno.EINVAL:
                    break  # an older kernel: pages come as they are touched
            self.populated = at + nbytes
        self.populated = self.nbytes

    def close(self) -> None:
        """Unmap, or leave that to the last view of it that somebody still has."""
        self._closing.set()
        with self._busy, contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


class SlabMemory:
    """A slab that this process owns."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("everystep-slab", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self.mapping = Mapping(self.fd, nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.nbytes = nbytes
        self.view = self.mapping.view

    @contextlib.contextmanager
    def readable_fd(self) -> Iterator[int]:
        """A descriptor through which nobody can write (``/proc`` permitting)."""
        try:
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            fd = os.dup(self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def close(self) -> None:
        """Give the memory back now, also where another process still maps it."""
        self.mapping.close()
        _libc.fallocate(self.fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, 0, self.nbytes)
        os.close(self.fd)


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes that can still be taken, and how that was found."""

    nbytes: int
    limits: str


def memory_room(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Room:
    """What the machine and every control group above this process leave, less a reserve, the file cache counted as free."""
    found: list[tuple[int, int, str]] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (proc / "meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
        found.append((kib["MemAvailable"] << 10, kib["MemTotal"] << 10, f"available memory {kib['MemAvailable'] << 10:,}"))
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                for root in (cgroups / "unified", cgroups):
                    found += _limits(root, path, "memory.max", "memory.current", ("inactive_file", "active_file"))
            elif "memory" in controllers.split(","):
                caches = ("total_inactive_file", "total_active_file")
                found += _limits(cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", caches)
    if not found:
        return Room(1 << 62, "")
    free, _, limits = min((free - min(_RESERVE, total // 16), total, text) for free, total, text in found)
    return Room(max(0, free), limits)


def _limits(root: Path, path: str, limit_file: str, usage_file: str, caches: tuple[str, ...]) -> list[tuple[int, int, str]]:
    """(bytes left, limit, text) of each group from ``path`` up to ``root``; in a container perhaps only ``root`` can be seen."""
    found = []
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / limit_file).read_text())  # ValueError: "max"
            if limit < 1 << 60:
                used = int((group / usage_file).read_text())
                words = (line.split() for line in (group / "memory.stat").read_text().splitlines())
                cached = sum(int(value) for name, value in words if name in caches)
                found.append((limit - max(0, used - cached), limit, f"control group limit {limit:,}, used {used:,}"))
        if group == root:
            break
    return found
