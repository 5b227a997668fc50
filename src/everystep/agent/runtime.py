"""Where agents are found: the runtime directory, names of sockets, and the lock that lets one agent live for each run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import site
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from everystep.errors import ConfigError, NotFoundError

_SOCKET_NAME_NBYTES = 107
LOG_NBYTES = 1 << 20


def runtime_dir(*, create: bool = True) -> Path:
    """``$EVERYSTEP_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/everystep``, else ``/tmp/everystep-<uid>``; mode 0700 and our own.

    Raises:
        ConfigError: The directory belongs to somebody else or others may enter it.
        NotFoundError: It is not there, and not ``create``.
    """
    uid = os.geteuid()
    named = os.environ.get("EVERYSTEP_RUNTIME_DIR")
    session = os.environ.get("XDG_RUNTIME_DIR")
    if named:
        path = Path(named).absolute()
    elif session and _is_ours(Path(session)):
        path = Path(session) / "everystep"
    else:
        path = Path(f"/tmp/everystep-{uid}")  # noqa: S108 - its owner and mode are checked below
    if create:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the agents' directory {str(path)!r} cannot be made: {error.strerror}", key=str(path), kind="runtime-dir",
                              hint="set EVERYSTEP_RUNTIME_DIR to a directory of yours", errno=error.errno) from error  # fmt: skip
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise NotFoundError(f"there is no agents' directory {str(path)!r}", key=str(path), kind="no-agent") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        whose = f"belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}"
        what = whose if stat.S_ISDIR(found.st_mode) else "is not a directory"
        raise ConfigError(f"the agents' directory {str(path)!r} {what}; it must be yours alone", key=str(path), kind="runtime-dir",
                          hint=f"chmod 700 {path}, or set EVERYSTEP_RUNTIME_DIR")  # fmt: skip
    return path


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        found = path.stat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def environment() -> dict[str, str]:
    """Ours, and this very package can be imported in it: for Python processes that the trainer or the agent starts."""
    environ = dict(os.environ)
    home = str(Path(__file__).resolve().parents[2])
    if home not in (*site.getsitepackages(), site.getusersitepackages()):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (home, environ.get("PYTHONPATH"))))
    return environ


class Place:
    """The files of one run's agent in the runtime directory."""

    def __init__(self, folder: Path, name: str) -> None:
        self.socket = folder / f"{name}.sock"
        self.lock = folder / f"{name}.lock"
        self.log = folder / f"{name}.log"

    @classmethod
    def of_run(cls, folder: Path, run_id: str, run_url: str) -> Place:
        """The place of the run with this id at this path: a copy of a run has its id and needs an agent of its own."""
        where = run_url if "://" in run_url else os.path.realpath(run_url)
        plain = run_id if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", run_id) else "x"
        return cls(folder, f"{plain}-{hashlib.sha256(f'{run_id} {where}'.encode(errors='surrogateescape')).hexdigest()[:12]}")

    def take_lock(self) -> int | None:
        """The descriptor of the lock file, locked for this process; None when another agent has it."""
        while True:
            fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            if _is_file(self.lock, fd):
                return fd
            os.close(fd)  # an agent that ended removed it between the two calls: whoever comes next would lock another file

    def adopt_log(self) -> None:
        """Have standard error, which is the log, in the file that bears its name: an agent that ended may have removed that one since.

        Only who has the lock may call this: it alone removes the log.
        """
        if not _is_file(self.log, 2):
            fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.dup2(fd, 2)
            os.close(fd)

    def clear(self, *, log: bool) -> None:
        """Remove the agent's files, the lock last, and the log only when asked. Only who has the lock may call this, before it lets go."""
        for path in (self.socket, *([self.log] if log else []), self.lock):
            with contextlib.suppress(OSError):  # gone, or the directory is: as good
                path.unlink()

    def listen(self) -> socket.socket:
        """A listening socket. Only who has the lock may call this: it replaces the socket of an agent that died."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        with _address(self.socket) as address:
            listener.bind(address)
        listener.listen(64)
        return listener

    def connect(self, *, timeout_s: float) -> socket.socket:
        """A connection to the agent. ConnectionRefusedError or FileNotFoundError when none listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            with _address(self.socket) as address:
                sock.connect(address)
        except BaseException:
            sock.close()
            raise
        return sock


def _is_file(path: Path, fd: int) -> bool:
    """Whether ``fd`` is open on what ``path`` names now."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    return False


def sockets(folder: Path) -> list[Place]:
    """Every place with a socket."""
    return [Place(folder, path.stem) for path in sorted(folder.glob("*.sock"))]


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """``path`` as the address of a socket: by way of the open directory where the name would be too long for the kernel."""
    if len(os.fsencode(path)) <= _SOCKET_NAME_NBYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
