"""The system calls that a local store makes, behind a seam, so that a simulated disk can stand in for the real one."""

# ruff: noqa: D102
# ``Disk`` has the docstrings.

from __future__ import annotations

import ctypes
import errno
import os
from typing import NamedTuple, Protocol

__all__ = ["Disk", "Entry", "RealDisk", "Space", "Stat", "address"]


class Entry(NamedTuple):
    """One name in a folder. Symbolic links are neither files nor folders."""

    name: str
    is_folder: bool
    is_file: bool


class Stat(NamedTuple):
    """What is known of one path."""

    nbytes: int
    device: int
    is_folder: bool
    modified_at: float
    """Seconds since the epoch."""


class Space(NamedTuple):
    """Bytes of a file system; ``total`` is 0 where it does not say."""

    free: int
    total: int


class Disk(Protocol):
    """System calls. Each raises OSError with errno as the kernel gives it; reads and writes may be short."""

    def open(self, path: str, flags: int) -> int:
        """Open a file or folder; files are made with mode 0666 less the umask."""
        ...

    def close(self, fd: int) -> None:
        """Close."""
        ...

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at ``offset``; returns the bytes written."""
        ...

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        """Read into ``view`` from ``offset``; returns the bytes read, 0 at the end."""
        ...

    def fsync(self, fd: int) -> None:
        """Make a file's content, or a folder's names, durable."""
        ...

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """Set the size."""
        ...

    def fallocate(self, fd: int, nbytes: int) -> None:
        """Reserve space for the first ``nbytes``; EOPNOTSUPP where the file system cannot."""
        ...

    def link(self, source: str, target: str) -> None:
        """A second name for a file; EEXIST when ``target`` is there."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Another name, replacing what was there."""
        ...

    def unlink(self, path: str) -> None:
        """Take a file's name away."""
        ...

    def mkdir(self, path: str) -> None:
        """Make a folder; EEXIST when the name is there."""
        ...

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        ...

    def scandir(self, path: str) -> list[Entry]:
        """Names in a folder, in any order."""
        ...

    def stat(self, path: str) -> Stat:
        """Size, device, kind and time of a path."""
        ...

    def fstat(self, fd: int) -> Stat:
        """The same of what is open, whatever lies under its name by now."""
        ...

    def statvfs(self, path: str) -> Space:
        """Space of the file system that holds ``path``."""
        ...


class RealDisk:
    """The machine's own disk."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def fallocate(self, fd: int, nbytes: int) -> None:
        # Not os.posix_fallocate: where a file system cannot, the C library writes into every block instead, minutes on a network mount.
        if _fallocate is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        while _fallocate(fd, 0, 0, nbytes) != 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def scandir(self, path: str) -> list[Entry]:
        with os.scandir(path) as entries:
            return [Entry(e.name, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False)) for e in entries]

    def stat(self, path: str) -> Stat:
        return _stat(os.stat(path))

    def fstat(self, fd: int) -> Stat:
        return _stat(os.fstat(fd))

    def statvfs(self, path: str) -> Space:
        found = os.statvfs(path)
        return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def _stat(found: os.stat_result) -> Stat:
    return Stat(found.st_size, found.st_dev, (found.st_mode & 0o170000) == 0o040000, found.st_mtime)


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer``: the only way to a read-only buffer's address without numpy."""

    _fields_ = [
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    ]  # fmt: skip


def address(view: memoryview) -> int:
    """Address of the first byte of a contiguous buffer; 0 for an empty one."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    try:
        return found.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))


_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    _fallocate.restype = ctypes.c_int
