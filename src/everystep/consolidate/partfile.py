"""Files of an export while they are put together: ``<name>.part`` until they are whole and durable, then ``<name>``."""

from __future__ import annotations

import errno
import os
import threading

from everystep.errors import CapacityError, CheckpointError, PermanentStoreError, TransientStoreError
from everystep.safetensors import ALIGN
from everystep.store.disk import Disk

SUFFIX = ".part"
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


class PartFile:
    """One output file that several threads write, each its own windows, past the page cache where that works.

    Args:
        disk: The system calls.
        path: The final name.
        nbytes: The final size.
        fresh: Start with an empty file; else what is there is kept (other processes write into it too).
    """

    def __init__(self, disk: Disk, path: str, nbytes: int, *, fresh: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self._disk = disk
        self._fresh = fresh
        self._fd = self._spare = -1
        self._direct = bool(_O_DIRECT)
        self._lock = threading.Lock()

    def write(self, view: memoryview, offset: int) -> None:
        """Write a window; ``view`` is page-aligned and padded to a multiple of ``ALIGN``, as ``offset`` is.

        Raises:
            CapacityError: No space; the file's other errors are StoreErrors.
        """
        try:
            self._write(view, offset)
        except OSError as error:
            raise translated(self._disk, error, self.path, self.nbytes) from error

    def _write(self, view: memoryview, offset: int) -> None:
        fd = self._opened()
        done = 0
        while done < len(view):
            try:
                progress = self._disk.pwrite(fd, view[done:], offset + done)
            except OSError as error:
                other = self._buffered(fd) if error.errno == errno.EINVAL else fd
                if other == fd:
                    raise
                fd = other
                continue
            progress -= progress % ALIGN
            if progress <= 0:
                raise OSError(errno.EIO, "write made no progress")
            done += progress

    def _opened(self) -> int:
        with self._lock:
            if self._fd < 0:
                path = self.path + SUFFIX
                if self._fresh:
                    unlink(self._disk, path)  # never written into: it may be another name of something
                flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if self._fresh else 0)
                try:
                    self._fd = self._disk.open(path, flags | (_O_DIRECT if self._direct else 0))
                except OSError as error:
                    if error.errno not in _UNSUPPORTED or not self._direct:
                        raise
                    self._direct = False
                    self._fd = self._disk.open(path, flags & ~os.O_EXCL)
                self._reserve()
            return self._fd

    def _buffered(self, refused: int) -> int:
        """The file system takes the flag and then no such writes: another descriptor, or ``refused`` where that was no direct one."""
        with self._lock:
            if self._direct and refused == self._fd:
                fd = self._disk.open(self.path + SUFFIX, os.O_WRONLY)
                self._direct = False
                old, self._fd = self._fd, fd
                self._spare = old  # other threads may be writing through it still
            return self._fd

    def _reserve(self) -> None:
        """Fail now when there is no space, not after minutes of writing."""
        try:
            self._disk.fallocate(self._fd, -(-self.nbytes // ALIGN) * ALIGN)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise

    def sync(self) -> None:
        """Make what was written durable."""
        try:
            self._disk.fsync(self._opened())
        except OSError as error:
            raise translated(self._disk, error, self.path, self.nbytes) from error

    def publish(self) -> None:
        """All is written: cut the padding off, make it durable, and give it its name."""
        try:
            fd = self._opened()
            self._disk.ftruncate(fd, self.nbytes)
            self._disk.fsync(fd)
            self.close()
            self._disk.rename(self.path + SUFFIX, self.path)
        except OSError as error:
            raise translated(self._disk, error, self.path, self.nbytes) from error

    def close(self) -> None:
        """Let the descriptors go; no error when they are gone."""
        with self._lock:
            for fd in (self._fd, self._spare):
                if fd >= 0:
                    self._disk.close(fd)
            self._fd = self._spare = -1


def unlink(disk: Disk, path: str) -> None:
    """Take a name away; no error when it is not there."""
    try:
        disk.unlink(path)
    except FileNotFoundError:
        return


def sync_folder(disk: Disk, path: str) -> None:
    """Make a folder's names durable, where the file system can."""
    fd = disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        disk.close(fd)


def translated(disk: Disk, error: OSError, path: str, needed: int) -> CheckpointError:
    """Everystep's error for the system's, about ``path`` of an export."""
    if isinstance(error, CheckpointError):
        return error
    code = error.errno or errno.EIO
    text = f"cannot write {path!r}: {error.strerror or os.strerror(code)}"
    if code in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f"{disk.statvfs(os.path.dirname(path)).free:,}"
        except OSError:
            free = "an unknown number"
        kind = "quota" if code == errno.EDQUOT else "disk-full"
        return CapacityError(f"{text}; {needed:,} bytes needed, {free} free", key=path, kind=kind, errno=code,
                             hint="free space, or export to another place with into")  # fmt: skip
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "change its permissions, or export to another place"
        return PermanentStoreError(text, key=path, kind="not-permitted", errno=code, hint=hint)
    return TransientStoreError(text, key=path, kind="io", errno=code, hint="see the system log (dmesg) and: everystep doctor")
