"""Make a file that is another one, byte for byte, without moving its bytes: a hard link, a reflink, or a copy inside the system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable

FICLONE = 0x40049409
_STEP_NBYTES = 64 << 20
_CANNOT = (
    errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.ENOTTY, errno.EBADF,
    errno.ETXTBSY, errno.EACCES,
)  # fmt: skip
"""What says that this way is not open here, and another may be."""


def hard_link(original: str, target: str) -> bool:
    """A second name for a file that never changes; False where there can be none. A name that is there already is kept."""
    try:
        os.link(original, target)
    except FileExistsError:
        return os.path.samefile(original, target)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def clone(original: str, target: str, nbytes: int, *, pace: Callable[[int], None] | None = None) -> str:
    """A new durable file with the bytes of ``original``: says how, "reflink" or "copy"; "" (and no file) where neither can be."""
    with contextlib.ExitStack() as stack:
        source = os.open(original, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, source)
        copy = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        stack.callback(os.close, copy)
        try:
            how = "reflink" if _reflink(source, copy) else "copy" if _copy(source, copy, nbytes, pace) else ""
            if how:
                os.fsync(copy)
                return how
        except BaseException:
            os.unlink(target)
            raise
        os.unlink(target)
        return ""


def _reflink(source: int, copy: int) -> bool:
    try:
        fcntl.ioctl(copy, FICLONE, source)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def _copy(source: int, copy: int, nbytes: int, pace: Callable[[int], None] | None) -> bool:
    if not hasattr(os, "copy_file_range"):
        return False
    done = 0
    while done < nbytes:
        if pace is not None:
            pace(min(_STEP_NBYTES, nbytes - done))
        try:
            progress = os.copy_file_range(source, copy, min(_STEP_NBYTES, nbytes - done), done, done)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            return False
        if progress == 0:
            return False
        done += progress
    return True
