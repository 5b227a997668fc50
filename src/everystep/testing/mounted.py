"""One machine's view of a disk that several machines share, as network file systems have it: right, but at times out of date."""

from __future__ import annotations

import errno
import os
import threading

from everystep.store.disk import Entry, Space, Stat
from everystep.testing.simdisk import SimDisk

__all__ = ["Mount"]


class Mount:
    """Stands in for ``everystep.store.disk.RealDisk``: a mount of ``server`` that remembers what it has seen.

    A name that was not there is taken to be absent, and what ``stat`` said of a path is taken to be true, until its folder is opened (that
    makes a mount ask the server). What is open is read as stale (ESTALE) once another machine has deleted or replaced it.

    Args:
        server: The disk that all mounts share.
        lagging: See the attribute.
    """

    def __init__(self, server: SimDisk, *, lagging: bool = False) -> None:
        self.server = server
        self.lagging = lagging
        """While this is set, a folder that was listed before is listed as it was then."""
        self.stale_reads = 0
        """How many reads were told ESTALE."""
        self._absent: set[str] = set()
        self._stats: dict[str, Stat] = {}
        self._listings: dict[str, list[Entry]] = {}
        self._lock = threading.RLock()

    # -- what is remembered ------------------------------------------------------------------------------------
    def _ask(self, path: str) -> None:
        """Forget what is remembered of the names in a folder."""
        self._absent = {name for name in self._absent if os.path.dirname(name) != path}
        self._stats = {name: found for name, found in self._stats.items() if os.path.dirname(name) != path}

    def _refuse_absent(self, path: str) -> None:
        if any((path + "/").startswith(name + "/") for name in self._absent):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _changed(self, *paths: str) -> None:
        for path in paths:
            self._absent.discard(path)
            self._stats.pop(path, None)

    # -- the calls -----------------------------------------------------------------------------------------------
    def open(self, path: str, flags: int) -> int:
        """Open; see ``Disk``."""
        with self._lock:
            if flags & os.O_CREAT:
                self._changed(path)
                return self.server.open(path, flags)
            self._refuse_absent(path)
            try:
                fd = self.server.open(path, flags)
            except FileNotFoundError:
                self._absent.add(path)
                raise
            if self.server.fstat(fd).is_folder:
                self._ask(path)
            return fd

    def close(self, fd: int) -> None:
        """Close; see ``Disk``."""
        self.server.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write; see ``Disk``."""
        return self.server.pwrite(fd, data, offset)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        """Read; see ``Disk``."""
        if not self.server.is_named(fd):
            self.stale_reads += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self.server.pread(fd, view, offset)

    def fsync(self, fd: int) -> None:
        """Make durable; see ``Disk``."""
        self.server.fsync(fd)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """Set the size; see ``Disk``."""
        self.server.ftruncate(fd, nbytes)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """Reserve space; see ``Disk``."""
        self.server.fallocate(fd, nbytes)

    def link(self, source: str, target: str) -> None:
        """Second name; see ``Disk``."""
        with self._lock:
            self._changed(target)
            self.server.link(source, target)

    def rename(self, source: str, target: str) -> None:
        """Another name; see ``Disk``."""
        with self._lock:
            self._changed(source, target)
            self.server.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file's name; see ``Disk``."""
        with self._lock:
            self._changed(path)
            self.server.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a folder; see ``Disk``."""
        with self._lock:
            self._changed(path)
            self.server.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder; see ``Disk``."""
        with self._lock:
            self._changed(path)
            self.server.rmdir(path)

    def scandir(self, path: str) -> list[Entry]:
        """Names in a folder; see ``Disk``."""
        with self._lock:
            if self.lagging and path in self._listings:
                return list(self._listings[path])
            self._refuse_absent(path)
            try:
                found = self.server.scandir(path)
            except FileNotFoundError:
                self._absent.add(path)
                self._listings[path] = []
                raise
            self._ask(path)
            self._listings[path] = list(found)
            return found

    def stat(self, path: str) -> Stat:
        """What is known of a path; see ``Disk``."""
        with self._lock:
            self._refuse_absent(path)
            if path not in self._stats:
                try:
                    self._stats[path] = self.server.stat(path)
                except FileNotFoundError:
                    self._absent.add(path)
                    raise
            return self._stats[path]

    def fstat(self, fd: int) -> Stat:
        """What is known of what is open; see ``Disk``."""
        return self.server.fstat(fd)

    def statvfs(self, path: str) -> Space:
        """Space; see ``Disk``."""
        return self.server.statvfs(path)
