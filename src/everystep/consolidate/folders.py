"""What exports need of a file system beyond a store's bytes: names that change places in one step, locks that die with their holder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator

from everystep.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ConflictError,
    NotFoundError,
    PermanentStoreError,
    TransientStoreError,
)

__all__ = ["NO_LINKS", "Lock", "errors", "exchange", "make_folder", "sync", "translated"]

NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems without symbolic links say to one."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_POLL_S = 0.2
_AT_FDCWD = -100
_EXCHANGE = 2

_log = logging.getLogger(__name__)


def sync(path: str) -> None:
    """Make a file's bytes, or a folder's names, durable. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # some mounts know no fsync of folders
            raise
    finally:
        os.close(fd)


def exchange(one: str, other: str) -> bool:
    """Let two names change places in one step; False where the system cannot. OSError."""
    if _renameat2 is None:
        return False
    if _renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), other)


_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def make_folder(place: str) -> None:
    """Make a folder and at most one parent, durable; a typing error or a missing mount is not papered over.

    Raises:
        ConfigError: More than one parent does not exist ("no-parent"), or one is a file ("not-a-folder").
    """
    missing: list[str] = []
    path = place
    with errors("make", place):
        while not os.path.isdir(path):
            if os.path.lexists(path):
                raise ConfigError(
                    f"{path!r} is a file, not a folder", key=path, kind="not-a-folder", hint="choose another path for the exports"
                )
            missing.append(path)
            path = os.path.dirname(path)
        if len(missing) > 2:
            raise ConfigError(
                f"cannot make {place!r}: {os.path.dirname(os.path.dirname(place))!r} does not exist", key=place, kind="no-parent",
                hint=f"check the path and its mount, or run: mkdir -p {os.path.dirname(place)}",
            )  # fmt: skip
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            with contextlib.suppress(PermissionError):  # a folder above may be closed to us: its durability is its owner's matter
                sync(os.path.dirname(folder))


class Lock:
    """A lock file: one holder at a time, of all processes and threads; the system takes it away from one that dies.

    Args:
        path: The file; made when it is not there.
        passing: Delete it at the end. Whoever waited for the deleted one takes another.
    """

    def __init__(self, path: str, *, passing: bool = False) -> None:
        self.path = path
        self.works = True
        """False: this file system has no locks, and nobody is kept away."""
        self._passing = passing

    @contextlib.contextmanager
    def held(self, *, patience_s: float | None) -> Iterator[None]:
        """Hold it. Waits for at most ``patience_s``, None: for ever.

        Raises:
            ConflictError: Another still holds it (``kind`` "busy"); says who.
        """
        fd = self._take(patience_s)
        try:
            yield
        finally:
            try:
                if self._passing and self.works:
                    with contextlib.suppress(OSError):
                        os.unlink(self.path)
            finally:
                os.close(fd)

    def _take(self, patience_s: float | None) -> int:
        until = None if patience_s is None else time.monotonic() + patience_s
        told = False
        while True:
            with errors("lock", self.path):
                fd, taken, holder = self._try()
            if fd is not None:
                return fd
            if taken:
                continue
            folder = os.path.dirname(self.path)
            if until is not None and time.monotonic() >= until:
                raise ConflictError(
                    f"{holder} is exporting into {folder!r}", key=folder, kind="busy", hint="try again when it has finished"
                )
            if not told:
                _log.warning("waiting for %s, which is exporting into %r", holder, folder)
                told = True
            time.sleep(_POLL_S)

    def _try(self) -> tuple[int | None, bool, str]:
        """The descriptor that holds it, or None with whether it was ours and useless (deleted meanwhile), and who has it."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            taken = self._flock(fd)
            if not taken:
                return None, False, os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            if not _is_same(fd, self.path):
                return None, True, ""
            with contextlib.suppress(OSError):  # for whoever waits; a full disk must not keep anybody from deleting things here
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
            held, fd = fd, -1
            return held, True, ""
        finally:
            if fd >= 0:
                os.close(fd)

    def _flock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.works = False
        return True


def _is_same(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def errors(what: str, path: str) -> Iterator[None]:
    """The system's errors as ours; see ``translated``."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise translated(error, what, path) from error


def translated(error: OSError, what: str, path: str) -> CheckpointError:
    """What failed on which path, as the error whose reader knows what to do."""
    code = error.errno or errno.EIO
    text = f"cannot {what} {path!r}: {error.strerror or os.strerror(code)}"
    if code == errno.ENOENT:
        return NotFoundError(text, key=path, kind="not-found", errno=code, hint="it was moved or deleted while it was in use: try again")
    if code in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(text, key=path, kind="quota" if code == errno.EDQUOT else "disk-full", errno=code,
                             hint="free space, or export into another folder")  # fmt: skip
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "remount it writable" if code == errno.EROFS else "change its permissions"
        return PermanentStoreError(text, key=path, kind="not-permitted", errno=code, hint=f"{hint}, or export into another folder")
    if code in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
        return ConflictError(text, key=path, kind="in-the-way", errno=code, hint="move away what lies under that name")
    return TransientStoreError(text, key=path, kind="io", errno=code, hint="see the system log (dmesg)")
