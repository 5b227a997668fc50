"""A disk in memory that fails on request and loses what was not made durable when the power is cut.

Theory of operation. Contents and names have two states each: what every process sees (volatile) and what is on the platter (durable).
A write changes the volatile content; ``fsync`` of the file makes it durable. Making, linking, renaming and removing names are
operations queued at their folder; ``fsync`` of the folder makes them durable. At a power cut any subset of what is queued may have
reached the platter: ``after_power_cut`` builds the disk that is found then. Each block of a written file survives by itself, so files
come out torn; a name may survive without its content (the zero-length file after a rename without fsync), and content without its name.
A rename within a folder is one operation, as journals make it.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import threading
from collections.abc import Callable, Collection, Sequence

from everystep.store.disk import Entry, Space, Stat

__all__ = ["FaultPlan", "PowerCut", "SimDisk", "Survival"]

_CHANGING = ("open", "pwrite", "fsync", "ftruncate", "fallocate", "link", "rename", "unlink", "mkdir", "rmdir")


class PowerCut(BaseException):  # it is no error of the program: nothing in it may handle this
    """The power is gone: every later call on this disk raises this too."""


class Survival(enum.Enum):
    """What of the things that were not made durable is found after a power cut."""

    NOTHING = "nothing"
    EVERYTHING = "everything"
    NAMES = "names"
    """Every name, no content: the classic empty file under its final name."""
    CONTENTS = "contents"
    """Every content, no name."""
    RANDOM = "random"
    """Each block and each name by a coin that the seed decides."""


class FaultPlan:
    """Which calls fail: the N-th call of a kind, counted from 1, raises OSError with ``code``.

    Args:
        kind: A ``Disk`` method's name, such as ``"pwrite"``.
        nth: Which call of that kind.
        code: An errno.
        times: How many calls in a row fail; 0 for all from then on.
        below: Only calls whose path contains this count.
    """

    def __init__(self, kind: str, nth: int, code: int, *, times: int = 1, below: str = "") -> None:
        self.kind = kind
        self.nth = nth
        self.code = code
        self.times = times
        self.below = below
        self.seen = 0
        self._lock = threading.Lock()

    def check(self, kind: str, path: str) -> None:
        """Raise if this call is to fail."""
        if kind != self.kind or self.below not in path:
            return
        with self._lock:
            self.seen += 1
            seen = self.seen
        if seen >= self.nth and (self.times == 0 or seen < self.nth + self.times):
            raise OSError(self.code, os.strerror(self.code))


class _File:
    def __init__(self) -> None:
        self.volatile = bytearray()
        self.durable = b""
        self.modified_at = 0.0


class _Folder:
    def __init__(self) -> None:
        self.volatile: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}
        self.queued: list[Sequence[tuple[str, _File | _Folder | None]]] = []
        """Changes since the last fsync, each atomic: (name, what it means now or None)."""
        self.modified_at = 0.0

    def change(self, *names: tuple[str, _File | _Folder | None]) -> None:
        self.queued.append(names)
        _apply(self.volatile, names)


def _apply(names: dict[str, _File | _Folder], changes: Sequence[tuple[str, _File | _Folder | None]]) -> None:
    for name, node in changes:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class SimDisk:
    """Stands in for ``everystep.store.disk.RealDisk``. Thread-safe.

    Args:
        cut_at: The power is cut instead of this changing call (counted from 1); None never.
        faults: Which calls fail.
        capacity: Bytes the disk holds.
        direct: Whether O_DIRECT is accepted; without it ``open`` raises EINVAL as some file systems do.
        links: Whether hard links are; without them ``link`` raises EPERM.
        block_nbytes: What survives a power cut survives in blocks of this size.
        short: Writes and reads longer than this are short, as the kernel may have it; None for whole ones.
        clock: What ``modified_at`` says.
    """

    def __init__(
        self,
        *,
        cut_at: int | None = None,
        faults: Collection[FaultPlan] = (),
        capacity: int = 1 << 40,
        direct: bool = True,
        links: bool = True,
        block_nbytes: int = 64,
        short: int | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.cut_at = cut_at
        self.faults = list(faults)
        self.capacity = capacity
        self.direct = direct
        self.links = links
        self.short = short
        self.calls: list[str] = []
        """Kinds of the changing calls so far."""
        self._block = block_nbytes
        self._clock = clock
        self._root = _Folder()
        self._open: dict[int, tuple[_File | _Folder, str]] = {}
        self._next_fd = 1000
        self._lock = threading.RLock()
        self._dead = False

    # -- the calls -----------------------------------------------------------------------------------------
    def open(self, path: str, flags: int) -> int:
        """Open; see ``Disk``."""
        creates = bool(flags & os.O_CREAT)
        with self._lock:
            self._called("open" if creates else "read", path)
            if flags & getattr(os, "O_DIRECT", 0) and not self.direct:
                raise _failed(errno.EINVAL)
            folder, name = self._parent(path)
            node = folder.volatile.get(name) if name else folder
            if node is None:
                if not creates:
                    raise _failed(errno.ENOENT)
                node = _File()
                node.modified_at = self._clock()
                folder.change((name, node))
            elif flags & os.O_EXCL:
                raise _failed(errno.EEXIST)
            if isinstance(node, _Folder) and flags & (os.O_WRONLY | os.O_RDWR):
                raise _failed(errno.EISDIR)
            if isinstance(node, _File) and flags & os.O_DIRECTORY:
                raise _failed(errno.ENOTDIR)
            self._next_fd += 1
            self._open[self._next_fd] = node, path
            return self._next_fd

    def close(self, fd: int) -> None:
        """Close; see ``Disk``."""
        with self._lock:
            del self._open[fd]

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write; see ``Disk``."""
        with self._lock:
            file, path = self._file(fd)
            self._called("pwrite", path)
            data = data[: self.short]
            self._need(file, offset + len(data))
            if len(file.volatile) < offset + len(data):
                file.volatile.extend(bytes(offset + len(data) - len(file.volatile)))
            file.volatile[offset : offset + len(data)] = data
            file.modified_at = self._clock()
            return len(data)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        """Read; see ``Disk``."""
        with self._lock:
            file, path = self._file(fd)
            self._called("pread", path)
            found = file.volatile[offset : offset + len(view[: self.short])]
            view[: len(found)] = found
            return len(found)

    def fsync(self, fd: int) -> None:
        """Make durable; see ``Disk``."""
        with self._lock:
            node, path = self._open[fd]
            self._called("fsync", path)
            if isinstance(node, _File):
                node.durable = bytes(node.volatile)
            else:
                node.durable = dict(node.volatile)
                node.queued.clear()

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """Set the size; see ``Disk``."""
        with self._lock:
            file, path = self._file(fd)
            self._called("ftruncate", path)
            self._resize(file, nbytes)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """Reserve space; see ``Disk``."""
        with self._lock:
            file, path = self._file(fd)
            self._called("fallocate", path)
            self._resize(file, max(nbytes, len(file.volatile)))

    def link(self, source: str, target: str) -> None:
        """Second name; see ``Disk``."""
        with self._lock:
            self._called("link", target)
            if not self.links:
                raise _failed(errno.EPERM)
            node = self._node(source)
            folder, name = self._parent(target)
            if name in folder.volatile:
                raise _failed(errno.EEXIST)
            folder.change((name, node))

    def rename(self, source: str, target: str) -> None:
        """Another name; see ``Disk``."""
        with self._lock:
            self._called("rename", target)
            node = self._node(source)
            old, old_name = self._parent(source)
            new, new_name = self._parent(target)
            if isinstance(new.volatile.get(new_name), _Folder) and isinstance(node, _File):
                raise _failed(errno.EISDIR)
            if old is new:
                new.change((old_name, None), (new_name, node))
            else:
                new.change((new_name, node))
                old.change((old_name, None))

    def unlink(self, path: str) -> None:
        """Remove a file's name; see ``Disk``."""
        with self._lock:
            self._called("unlink", path)
            if isinstance(self._node(path), _Folder):
                raise _failed(errno.EISDIR)
            folder, name = self._parent(path)
            folder.change((name, None))

    def mkdir(self, path: str) -> None:
        """Make a folder; see ``Disk``."""
        with self._lock:
            self._called("mkdir", path)
            folder, name = self._parent(path)
            if not name or name in folder.volatile:
                raise _failed(errno.EEXIST)
            folder.change((name, _Folder()))

    def rmdir(self, path: str) -> None:
        """Remove an empty folder; see ``Disk``."""
        with self._lock:
            self._called("rmdir", path)
            node = self._node(path)
            if isinstance(node, _File):
                raise _failed(errno.ENOTDIR)
            if node.volatile:
                raise _failed(errno.ENOTEMPTY)
            folder, name = self._parent(path)
            folder.change((name, None))

    def scandir(self, path: str) -> list[Entry]:
        """Names in a folder; see ``Disk``."""
        with self._lock:
            self._called("scandir", path)
            node = self._node(path)
            if isinstance(node, _File):
                raise _failed(errno.ENOTDIR)
            return [Entry(name, isinstance(found, _Folder), isinstance(found, _File)) for name, found in node.volatile.items()]

    def stat(self, path: str) -> Stat:
        """What is known of a path; see ``Disk``."""
        with self._lock:
            self._called("stat", path)
            return _stat(self._node(path))

    def fstat(self, fd: int) -> Stat:
        """What is known of what is open; see ``Disk``."""
        with self._lock:
            node, path = self._open[fd]
            self._called("fstat", path)
            return _stat(node)

    def statvfs(self, path: str) -> Space:
        """Space; see ``Disk``."""
        with self._lock:
            self._called("statvfs", path)
            return Space(max(0, self.capacity - self._used()), self.capacity)

    def files(self) -> dict[str, bytes]:
        """Content of every file by its path; folders end in a slash and are empty."""
        found: dict[str, bytes] = {}

        def visit(path: str, node: _File | _Folder) -> None:
            if isinstance(node, _File):
                found[path] = bytes(node.volatile)
                return
            found[path + "/"] = b""
            for name, below in node.volatile.items():
                visit(f"{path}/{name}", below)

        with self._lock:
            visit("", self._root)
        return found

    def is_named(self, fd: int) -> bool:
        """Whether what is open still lies under the name by which it was opened."""
        with self._lock:
            node, path = self._open[fd]
            try:
                return self._node(path) is node
            except OSError:
                return False

    def flip(self, path: str, bit: int) -> None:
        """Flip one bit of a file, as a failing disk may."""
        with self._lock:
            node = self._node(path)
            if not isinstance(node, _File):
                raise _failed(errno.EISDIR)
            node.volatile[bit // 8] ^= 1 << bit % 8
            node.durable = bytes(node.volatile)

    # -- power -----------------------------------------------------------------------------------------------
    def cut(self) -> None:
        """Cut the power now."""
        self._dead = True

    def after_power_cut(self, survival: Survival, *, seed: int = 0) -> SimDisk:
        """The disk that is found when the power is back. This one is not changed, so that several outcomes can be looked at."""
        chance = random.Random(seed)  # noqa: S311 - a test's coin
        found = SimDisk(capacity=self.capacity, direct=self.direct, links=self.links, block_nbytes=self._block, clock=self._clock)
        copies: dict[int, _File | _Folder] = {}

        def name_survives() -> bool:
            return survival in (Survival.EVERYTHING, Survival.NAMES) or (survival is Survival.RANDOM and chance.random() < 0.5)

        def content_survives() -> bool:
            return survival in (Survival.EVERYTHING, Survival.CONTENTS) or (survival is Survival.RANDOM and chance.random() < 0.5)

        def copy(node: _File | _Folder) -> _File | _Folder:
            if id(node) in copies:
                return copies[id(node)]
            if isinstance(node, _File):
                file = copies[id(node)] = _File()
                file.volatile = bytearray(self._survived(node, content_survives))
                file.durable = bytes(file.volatile)
                file.modified_at = node.modified_at
                return file
            folder = copies[id(node)] = _Folder()
            names = dict(node.durable)
            for changes in node.queued:
                if name_survives():
                    _apply(names, changes)
            folder.volatile = {name: copy(below) for name, below in names.items()}
            folder.durable = dict(folder.volatile)
            return folder

        root = copy(self._root)
        assert isinstance(root, _Folder)
        found._root = root
        return found

    def _survived(self, file: _File, survives: Callable[[], bool]) -> bytes:
        """The content found later: each changed block old or new by itself; a grown file may have its new size without its new bytes."""
        if file.durable == file.volatile:
            return file.durable
        size = len(file.volatile) if survives() else len(file.durable)
        content = bytearray(file.durable[:size].ljust(size, b"\0"))
        for at in range(0, min(size, len(file.volatile)), self._block):
            new = bytes(file.volatile[at : min(at + self._block, size)])
            if content[at : at + len(new)] != new and survives():
                content[at : at + len(new)] = new
        return bytes(content)

    # -- inside ------------------------------------------------------------------------------------------------
    def _called(self, kind: str, path: str) -> None:
        if self._dead:
            raise PowerCut
        if kind in _CHANGING:
            self.calls.append(kind)
            if self.cut_at is not None and len(self.calls) >= self.cut_at:
                self._dead = True
                raise PowerCut
        for fault in self.faults:
            fault.check(kind, path)

    def _parent(self, path: str) -> tuple[_Folder, str]:
        parts = [part for part in path.split("/") if part]
        node: _File | _Folder = self._root
        for part in parts[:-1]:
            if isinstance(node, _File):
                raise _failed(errno.ENOTDIR)
            below = node.volatile.get(part)
            if below is None:
                raise _failed(errno.ENOENT)
            node = below
        if isinstance(node, _File):
            raise _failed(errno.ENOTDIR)
        return node, parts[-1] if parts else ""

    def _node(self, path: str) -> _File | _Folder:
        folder, name = self._parent(path)
        node = folder.volatile.get(name) if name else folder
        if node is None:
            raise _failed(errno.ENOENT)
        return node

    def _file(self, fd: int) -> tuple[_File, str]:
        node, path = self._open[fd]
        if isinstance(node, _Folder):
            raise _failed(errno.EISDIR)
        return node, path

    def _resize(self, file: _File, nbytes: int) -> None:
        self._need(file, nbytes)
        del file.volatile[nbytes:]
        file.volatile.extend(bytes(nbytes - len(file.volatile)))

    def _need(self, file: _File, nbytes: int) -> None:
        grown = nbytes - len(file.volatile)
        if grown > 0 and self._used() + grown > self.capacity:
            raise _failed(errno.ENOSPC)

    def _used(self) -> int:
        """Bytes of all files that have a name or are open."""
        files: dict[int, int] = {}

        def visit(node: _File | _Folder) -> None:
            if isinstance(node, _File):
                files[id(node)] = len(node.volatile)
            else:
                for below in node.volatile.values():
                    visit(below)

        if self.capacity >= 1 << 40:
            return 0  # nobody asks
        visit(self._root)
        for node, _ in self._open.values():
            visit(node)
        return sum(files.values())


def _stat(node: _File | _Folder) -> Stat:
    if isinstance(node, _Folder):
        return Stat(0, 1, True, node.modified_at)
    return Stat(len(node.volatile), 1, False, node.modified_at)


def _failed(code: int) -> OSError:
    return OSError(code, os.strerror(code))
