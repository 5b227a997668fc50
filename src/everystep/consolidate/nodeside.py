"""What runs on other machines when an export is spread (``spreading.py``): see whether the folders are the same, write a share."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable

from everystep.consolidate.folders import errors as folder_errors
from everystep.consolidate.sharing import write_share
from everystep.errors import CheckpointError, ConflictError, TransientStoreError

__all__ = ["Lease", "looking", "write_here", "writing"]


def looking() -> Callable[[bytes], bytes]:
    """What a node is asked first. A function inside a function goes to the node by value: nothing of everystep has to be there."""

    def look(task: bytes) -> bytes:
        import json
        import os
        import time

        given = json.loads(task)
        try:
            import everystep

            version = str(getattr(everystep, "__version__", "of an unknown version"))
        except ImportError:
            version = ""
        token, problem = given["token"], ""
        deadline = time.monotonic() + given["patience_s"]
        while True:
            try:
                with open(token, encoding="utf-8") as file:
                    seen = file.read() == given["word"]
                problem = "" if seen else "has another file there"
            except OSError as error:
                problem = error.strerror or str(error)
            if not problem or time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        folder = os.path.dirname(token)
        if problem:
            return json.dumps({"version": version, "problem": f"does not see the export's folder {folder!r}: {problem}"}).encode()
        try:
            beside = f"{token}-{os.urandom(6).hex()}"
            os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(beside)
        except OSError as error:
            problem = f"cannot write into the export's folder {folder!r}: {error.strerror}"
        for path, nbytes in given["files"]:
            try:
                size = os.stat(path).st_size
            except OSError as error:
                problem = problem or f"does not see the checkpoint's file {path!r}: {error.strerror}"
                break
            if size != nbytes:
                problem = problem or f"sees another checkpoint: {path!r} has {size:,} bytes there, and {nbytes:,} here"
                break
        return json.dumps({"version": version, "problem": problem}).encode()

    return look


def writing() -> Callable[[bytes], bytes]:
    """What writes a share; its node has an equal everystep by now."""

    def write(task: bytes) -> bytes:
        from everystep.consolidate.nodeside import write_here

        return write_here(task)

    return write


def write_here(task: bytes) -> bytes:
    """On a node: write the share that ``task`` (JSON) is about; what came of it, or everystep's error, as JSON."""
    given = json.loads(task)
    lease = Lease(given["lease"])
    try:
        lease.sign(given["patience_s"])
        share, shares = given["only"]
        written = write_share(given["document"], given["folder"], (share, shares), pace=lease.check)
    except CheckpointError as error:
        told = {name: getattr(error, name) for name in ("message", "step", "key", "kind", "hint")}
        return json.dumps({"error": {**told, "name": type(error).__name__}}).encode()
    return json.dumps({"nbytes": written.nbytes, "linked": written.linked, "digests": written.digests}).encode()


class Lease:
    """Says, while it is there, that the share is this worker's."""

    def __init__(self, path: str) -> None:
        self._path = path

    def sign(self, patience_s: float) -> None:
        """Write into it who has it: for the driver, and for people who look there."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fd = os.open(self._path, os.O_WRONLY)
                break
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise self._superseded() from None
                time.sleep(0.1)
            except OSError as error:
                raise TransientStoreError(f"cannot read {self._path!r}: {error.strerror}", key=self._path, kind="io") from error
        with folder_errors("write", self._path), os.fdopen(fd, "wb") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}\n".encode())

    def check(self, nbytes: int) -> None:
        """Before each window. It is opened, which is what makes a network's file system ask its server."""
        try:
            os.close(os.open(self._path, os.O_RDONLY))
        except FileNotFoundError:
            raise self._superseded() from None
        except OSError as error:
            raise TransientStoreError(f"cannot read {self._path!r}: {error.strerror}", key=self._path, kind="io") from error

    def _superseded(self) -> ConflictError:
        return ConflictError(f"this share was taken back: {self._path!r} is gone", key=self._path, kind="superseded")
