"""Keeps a checkpoint of somebody else's job readable while that job prunes its folder: nothing of the job's is changed, nothing is copied.

Theory of operation. Under the watched folder lies ``.everystep-reading/<token>/``, one for each living watch, with a locked ``.lock``. NeMo
AutoModel spares a checkpoint that a symbolic link beside it points at, so there the protection is ``.everystep-reading-<token>-<name>``. Of
other checkpoints every file is hard-linked into ``.everystep-reading/<token>/<name>/``, which is then what is read: the job deletes its own
names, and the bytes stay until ours go too. Whatever a killed watch left is told by its lock, which nobody holds any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from everystep.consolidate.source import Found

__all__ = ["HIDDEN", "Protected", "Protection", "sweep"]

HIDDEN = ".everystep-reading"
"""Begins the names of everything that lies in a watched folder for the time of reading."""

_LOCK = ".lock"
_LEVELS = 5
"""So far above a link lies the folder whose watch made it, at most: checkpoints are looked for three folders deep."""


class Protected(NamedTuple):
    """A checkpoint that is being read."""

    path: str
    """Where it is read."""
    how: str
    """``"symlink"``, ``"links"``, ``"hold"`` (an everystep run's own), or "" where the job's pruning cannot be kept away."""
    why: str = ""
    """Why it is not protected."""


class Protection:
    """What one watch protects under ``root``. To be closed."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._token = secrets.token_hex(6)
        self._lock: int | None = None
        self._count = 0
        self._protected: dict[str, tuple[Protected, str]] = {}

    def protect(self, found: Found) -> Protected:
        """Protect a checkpoint, once: asked again it gives the same answer.

        Raises:
            FileNotFoundError: It was deleted while it was being protected.
        """
        ident = _ident(found)
        if ident not in self._protected:
            self._protected[ident] = self._protect(found)
        return self._protected[ident][0]

    def keeps(self, found: Found) -> bool:
        """Whether its bytes can be read whatever the job deletes."""
        protected, _ = self._protected.get(_ident(found), (None, ""))
        return protected is not None and protected.how == "links" and os.path.isdir(protected.path)

    def release(self, found: Found) -> None:
        """Take the protection away. What cannot be removed now is swept later."""
        _, mine = self._protected.pop(_ident(found), (None, ""))
        if not mine:
            return
        if os.path.islink(mine):
            with contextlib.suppress(OSError):
                os.unlink(mine)
        else:
            shutil.rmtree(mine, ignore_errors=True)

    def close(self) -> None:
        """Take all protections away."""
        for ident in list(self._protected):
            _, mine = self._protected.pop(ident)
            if mine and os.path.islink(mine):
                with contextlib.suppress(OSError):
                    os.unlink(mine)
        if self._lock is not None:
            folder = os.path.join(self._root, HIDDEN)
            shutil.rmtree(os.path.join(folder, self._token), ignore_errors=True)
            os.close(self._lock)
            self._lock = None
            with contextlib.suppress(OSError), _locked(folder):
                _remove_if_empty(folder)

    def _protect(self, found: Found) -> tuple[Protected, str]:
        if found.kind == "everystep":
            return Protected(found.path, "hold"), ""
        try:
            home = self._home()
            name = os.path.basename(os.path.normpath(found.path))
            if found.kind == "automodel":
                return self._point_at(found.path, name)
            self._count += 1  # never a number again: what has it may be released while this one is read
            links = os.path.join(home, str(self._count), name)
            try:
                _link_tree(found.path, links)
            except OSError:
                shutil.rmtree(os.path.dirname(links), ignore_errors=True)
                raise
            return Protected(links, "links"), os.path.dirname(links)
        except OSError as error:
            if not os.path.exists(found.path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), found.path) from error
            return Protected(found.path, "", error.strerror or str(error)), ""

    def _point_at(self, path: str, name: str) -> tuple[Protected, str]:
        mine = os.path.join(os.path.dirname(os.path.normpath(path)), f"{HIDDEN}-{self._token}-{name}")
        os.symlink(name, mine)
        if not os.path.exists(mine):  # the job was just deleting it
            os.unlink(mine)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return Protected(path, "symlink"), mine

    def _home(self) -> str:
        """Our folder, made and locked. Under the lock of the parent, so that nobody sweeps it between the two."""
        folder = os.path.join(self._root, HIDDEN)
        home = os.path.join(folder, self._token)
        if self._lock is not None and not os.path.isdir(home):  # the watched folder was deleted and made again
            os.close(self._lock)
            self._lock = None
        for retries in (2, 1, 0):
            if self._lock is not None:
                break
            try:
                self._lock = _make_home(folder, home)
            except FileNotFoundError:  # another watch took its last things away, and the folder with them
                if not retries or not os.path.isdir(self._root):
                    raise
        return home


def _make_home(folder: str, home: str) -> int:
    os.makedirs(folder, exist_ok=True)
    with _locked(folder):
        os.mkdir(home)
        lock = os.open(os.path.join(home, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            shutil.rmtree(home, ignore_errors=True)
            raise
        return lock


def sweep(root: str, beside: Sequence[str] = ()) -> int:
    """Remove what watches that are dead left under ``root``; symbolic links also from the folders ``beside``. How many there were."""
    folder = os.path.join(root, HIDDEN)
    swept = 0
    if os.path.isdir(folder):
        with contextlib.suppress(OSError), _locked(folder):
            for token in os.listdir(folder):
                if token == _LOCK:
                    continue
                if not _is_held(os.path.join(folder, token, _LOCK)):
                    shutil.rmtree(os.path.join(folder, token), ignore_errors=True)
                    swept += 1
            _remove_if_empty(folder)
    for place in {root, *beside}:
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                path = os.path.join(place, name)
                if name.startswith(f"{HIDDEN}-") and os.path.islink(path) and not _lives(place, name[len(HIDDEN) + 1 :].split("-")[0]):
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                        swept += 1
    return swept


def _ident(found: Found) -> str:
    return f"{found.path}\0{found.key}"


def _link_tree(source: str, target: str) -> None:
    """The same folders, and every file under a second name. A link that leads to a file becomes one to that file itself."""
    if os.path.isfile(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.link(os.path.realpath(source), target)
        return
    os.makedirs(target)
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.name.startswith(HIDDEN):
                continue
            there = os.path.join(target, entry.name)
            if entry.is_dir():
                _link_tree(entry.path, there)
            else:
                os.link(os.path.realpath(entry.path) if entry.is_symlink() else entry.path, there)


def _lives(place: str, token: str) -> bool:
    """Whether somebody alive made the links of this token in a folder: who watches it, or a folder around it."""
    around = os.path.abspath(place)
    for _ in range(_LEVELS):
        if _is_held(os.path.join(around, HIDDEN, token, _LOCK)):
            return True
        around = os.path.dirname(around)
    return False


def _is_held(lock: str) -> bool:
    try:
        opened = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(opened)
    return False


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_if_empty(folder: str) -> None:
    """While its lock is held. Whoever waits for the lock finds the folder gone, and makes it again."""
    if os.listdir(folder) == [_LOCK]:
        os.unlink(os.path.join(folder, _LOCK))
        os.rmdir(folder)
