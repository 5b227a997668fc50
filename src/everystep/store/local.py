"""A store on a path: any mounted POSIX file system.

Theory of operation. An object is written under a temporary name (``.tmp-<random>``) in its own folder, made durable (fsync),
published under its final name (rename, or link where it must not exist yet), and then the folder is made durable. Only then does
the call return. A folder that had to be made is made durable in its parent before anything goes into it. So after a power cut there
is the whole object or none, plus perhaps a temporary file, which is no object. The one truly exclusive operation on every kind of
mount is ``mkdir``; ``claim`` rests on it alone. ``link`` has had two winners on some FUSE mounts, which is harmless for what
``create`` is used for: records whose bytes are equal whoever writes them.

Large objects go past the page cache (O_DIRECT) in blocks, several in flight, which is two to six times faster than buffered writing
and fsync. Where the file system or the buffer does not allow it, the same code writes buffered; what a device refused once is not
tried on it again.

Where several machines mount one file system, each remembers names and attributes for a while, also that a name is *not* there. A file
that is opened is asked for anew (so sizes are taken of open files); before a read reports that something is missing, the folders above it
are opened, which makes the mount ask its server about their names, and it is looked for again.

What a moment may mend (a stale NFS handle, a mount that did not answer in time) is tried again from the start, three times within about
a second; a read that fails with EIO, once. A write that fails with EIO never: what the kernel had taken may be lost, and a second
attempt that succeeds would hide it. The same for a disk that is full or read-only.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from everystep.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    CorruptionError,
    NotFoundError,
    PermanentStoreError,
    StoreError,
    TransientStoreError,
)
from everystep.store.disk import Disk, Entry, RealDisk, address

__all__ = ["TEMPORARY", "LocalStore"]

TEMPORARY = ".tmp-"
"""Names that begin with this are no objects."""

_PAGE = 4096
_BLOCK = 8 << 20
_LARGE = 1 << 20
_PAUSES_S = (0.05, 0.2, 0.5)
"""Before each further try of what failed with one of ``_PASSING``."""
_PASSING = (errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY)
_STILL_OPEN = ".nfs"
"""What NFS makes of a deleted file that is open on this machine still; it goes, and its folder can, when it is closed."""
_MUTEX_TRIES = 200
_MUTEX_WAIT_S = 0.01
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
Failures = list[BaseException]
_Result = TypeVar("_Result")


class LocalStore:
    """Bytes under keys below a folder. See ``everystep.store.Store`` for the contract.

    Args:
        path: The folder. It and at most one parent are made at the first write; a typing error or a missing mount is not papered over.
        disk: The system calls; the machine's own by default.
        writers: Requests in flight during a large write.
        large_nbytes: From this size on an object is written in blocks past the page cache where that works.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self, path: str, *, disk: Disk | None = None, writers: int = 2, large_nbytes: int = _LARGE,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:  # fmt: skip
        self.path = os.path.abspath(path)
        self.url = self.path
        self._disk: Disk = RealDisk() if disk is None else disk
        self._writers = writers
        self._large_nbytes = large_nbytes
        self._sleep = sleep
        self._durable_folders: set[str] = set()
        self._lock = threading.Lock()
        """Of changes of ``_durable_folders`` and ``_synced_s``."""
        self._refuses_direct: set[int] = set()
        self._refuses_fallocate: set[int] = set()
        self._synced_s = 0.0
        self._was_there = False
        """Whether the store's folder has been seen: then it is not made again when it is gone."""

    def __repr__(self) -> str:
        return f"LocalStore({self.path!r})"

    @property
    def synced_s(self) -> float:
        """See ``Store.synced_s``."""
        return self._synced_s

    # -- writing ---------------------------------------------------------------------------------------
    def put(self, key: str, data: bytes | memoryview, *, nbytes: int | None = None) -> None:
        """See ``Store.put``."""
        self._put(key, data, nbytes, withdraw=True)

    def replace(self, key: str, data: bytes) -> None:
        """See ``Store.replace``."""
        self._put(key, data, None, withdraw=False)

    def _put(self, key: str, data: bytes | memoryview, nbytes: int | None, *, withdraw: bool) -> None:
        view = memoryview(data).cast("B")
        size = len(view) if nbytes is None else nbytes
        if not 0 <= size <= len(view):
            raise ValueError(f"cannot write {size} bytes of a buffer of {len(view)}")
        path = self._file(key)

        def publish(temporary: str) -> bool:
            self._disk.rename(temporary, path)
            return True

        self._do("write", key, lambda: self._write_new(path, view, size, publish, withdraw=withdraw), needed=size)

    def create(self, key: str, data: bytes) -> bool:
        """See ``Store.create``."""
        path, view, won = self._file(key), memoryview(data), False

        def publish(temporary: str) -> bool:
            nonlocal won
            try:
                self._disk.link(temporary, path)
            except FileExistsError:
                self._disk.unlink(temporary)
                return False
            except OSError as error:
                if error.errno not in (*_UNSUPPORTED, errno.EPERM, errno.EMLINK):
                    raise
                won = self._rename_exclusively(temporary, path)
                return won
            won = True
            self._disk.unlink(temporary)
            return True

        def make() -> bool:
            if not won:
                return self._write_new(path, view, len(view), publish, withdraw=False)
            self._fsync_folder(os.path.dirname(path))  # what failed came after our name was there: nobody else has made it
            return True

        return self._do("create", key, make, needed=len(view))

    def claim(self, key: str) -> bool:
        """See ``Store.claim``."""
        path, won = self._file(key), False

        def make() -> bool:
            nonlocal won
            folder = os.path.dirname(path)
            self._ensure_folder(folder)
            with contextlib.suppress(FileExistsError):
                self._disk.mkdir(path)
                won = True  # stays so when what follows fails and is tried again
            self._fsync_folder(folder)  # for the loser too: what it saw must not be undone by a power cut
            return won

        return self._do("claim", key, make)

    def delete(self, key: str) -> None:
        """See ``Store.delete``."""
        path = self._file(key, temporary=True)

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(path)
            with contextlib.suppress(FileNotFoundError):  # another may have unlinked it and not come to this yet
                self._fsync_folder(os.path.dirname(path))

        self._do("delete", key, remove)

    def delete_folder(self, prefix: str) -> int:
        """See ``Store.delete_folder``."""
        path = self._folder(prefix)
        if path == self.path:
            raise ConfigError("the whole run cannot be deleted through its store", key=prefix)

        freed, tries = 0, 0

        def remove() -> int:
            nonlocal freed, tries
            tries += 1
            with self._lock:
                self._durable_folders -= {folder for folder in self._durable_folders if (folder + "/").startswith(path + "/")}
            try:
                freed += self._remove_link_or_tree(path)
            except FileNotFoundError:
                if tries == 1:
                    return 0
            with contextlib.suppress(FileNotFoundError):
                self._fsync_folder(os.path.dirname(path))
            return freed

        return self._do("delete", prefix, remove)

    # -- reading -----------------------------------------------------------------------------------------
    def get(self, key: str) -> bytes:
        """See ``Store.get``."""
        path = self._file(key)

        def read() -> bytes:
            fd = self._disk.open(path, os.O_RDONLY)
            try:
                # Of the open file: another may lie under its name by now. One byte more than it says: a full buffer means that there
                # is more.
                data = bytearray(self._disk.fstat(fd).nbytes + 1)
                got = self._read_all(fd, memoryview(data), 0)
                while got == len(data):
                    data = data + bytes(_PAGE + got)
                    got += self._read_all(fd, memoryview(data)[got:], got)
            finally:
                self._disk.close(fd)
            self._was_there = True
            return bytes(memoryview(data)[:got])

        return self._do("read", key, read, reads=True)

    def read_into(self, key: str, offset: int, view: memoryview, *, shared: bool = False) -> None:
        """See ``Store.read_into``."""
        path, view = self._file(key), view.cast("B")
        if offset < 0:
            raise ValueError(f"negative offset {offset}")
        got = self._do("read", key, lambda: self._read_range(path, offset, view, cached=shared), reads=True)
        if got < len(view):
            raise CorruptionError(
                f"{key!r} in {self.path!r} ends at byte {offset + got}, but {len(view)} bytes from {offset} were expected",
                key=key, kind="truncated", hint="restore an older step, or see `everystep verify`",
            )  # fmt: skip

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        path = self._file(key)

        def measure() -> int:
            fd = self._disk.open(path, os.O_RDONLY)
            try:
                found = self._disk.fstat(fd)
            finally:
                self._disk.close(fd)
            if found.is_folder:
                raise FileNotFoundError(errno.ENOENT, "is a folder")
            return found.nbytes

        return self._do("read", key, measure, reads=True)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See ``Store.list``."""
        self._folder(prefix)
        for key, nbytes, _ in self._walk(prefix):
            if not key.rpartition("/")[2].startswith(TEMPORARY):
                yield key, nbytes

    def leftovers(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """See ``Store.leftovers``."""
        self._folder(prefix)
        # A folder that is closed to us is none of ours (lost+found, where the run is a mount point): nothing of ours is in it.
        for found in self._walk(prefix, closed=True):
            if found[0].rpartition("/")[2].startswith(TEMPORARY):
                yield found

    def folders(self, prefix: str) -> Sequence[str]:
        """See ``Store.folders``."""
        path = self._folder(prefix)
        return sorted(e.name for e in self._entries(path, prefix) if e.is_folder and not e.name.startswith(TEMPORARY))

    def free_nbytes(self) -> int | None:
        """See ``Store.free_nbytes``."""
        path = self.path
        while True:
            try:
                space = self._disk.statvfs(path)
            except OSError:
                if path == os.path.dirname(path):
                    return None
                path = os.path.dirname(path)
                continue
            return space.free if space.total else None

    # -- keys ------------------------------------------------------------------------------------------------
    def _file(self, key: str, *, temporary: bool = False) -> str:
        parts = key.split("/")
        if "" in parts or "." in parts or ".." in parts or "\0" in key:
            raise ConfigError(f"{key!r} is not a key: keys are names joined by single slashes", key=key, kind="bad-key")
        if not temporary and f"/{TEMPORARY}" in f"/{key}":
            raise ConfigError(f"{key!r} is not a key: names that begin with {TEMPORARY!r} are temporary files", key=key, kind="bad-key")
        return f"{self.path.rstrip('/')}/{key}"

    def _folder(self, prefix: str) -> str:
        if prefix and not prefix.endswith("/"):
            raise ConfigError(f"{prefix!r} is not a folder: folders are empty or end in a slash", key=prefix, kind="bad-key")
        return self._file(prefix[:-1]) if prefix else self.path

    # -- folders -----------------------------------------------------------------------------------------------
    def _ensure_folder(self, path: str) -> None:
        """Make the folder and its parents up to the store's own, each durable in its parent."""
        if path in self._durable_folders:
            return
        if path == self.path:
            self._ensure_root()
            self._was_there = True
        else:
            parent = os.path.dirname(path)
            self._ensure_folder(parent)
            self._mkdir(path)
            self._fsync_folder(parent)  # even when it was there: its maker may not have come to that yet
        with self._lock:
            self._durable_folders.add(path)

    def _forget_folders(self) -> None:
        with self._lock:
            self._durable_folders.clear()

    def _ensure_root(self) -> None:
        parent = os.path.dirname(self.path)
        was_there = self._was_there  # before the look: another thread may be making it now
        missing = [path for path in (self.path, parent) if not self._is_there(path)]
        if missing and was_there:
            # What would be written to a new folder of this name nobody would find: it is no run, and the run is elsewhere or deleted.
            raise PermanentStoreError(
                f"the folder {self.path!r} is gone: it was moved or deleted while it was in use", key=self.path, kind="run-gone",
                hint="move it back, or start again with the path where it is now",
            )  # fmt: skip
        if len(missing) == 2 and not self._is_there(os.path.dirname(parent)):
            raise ConfigError(
                f"cannot make the run {self.path!r}: {os.path.dirname(parent)!r} does not exist",
                key=self.path, kind="no-parent", hint=f"check the path and its mount, or run: mkdir -p {parent}",
            )  # fmt: skip
        for path in reversed(missing):
            self._mkdir(path)
        for path in reversed(missing or [self.path]):
            try:
                self._fsync_folder(os.path.dirname(path))
            except OSError as error:
                # A folder above the run may be closed to us (a mount point in a protected one): its durability is its owner's matter.
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
        self._is_folder_or_raise(self.path)

    def _is_there(self, path: str) -> bool:
        try:
            self._disk.stat(path)
        except FileNotFoundError:
            return False
        return True

    def _ask_again(self, path: str) -> bool:
        """Open the folders above ``path``, from the store's own down: their names are asked for anew. False where one is not there."""
        folder = self.path
        below = os.path.relpath(os.path.dirname(path), folder) if path != folder else "."
        for name in ("", *(below.split("/") if below != "." else ())):
            folder = f"{folder.rstrip('/')}/{name}" if name else folder
            try:
                self._disk.close(self._disk.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            except OSError:
                return False
        return True

    def _exists(self, path: str) -> bool:
        """Whether a file is there, whatever this machine remembers."""
        return self._is_there(path) or (self._ask_again(path) and self._is_there(path))

    def _mkdir(self, path: str) -> None:
        try:
            self._disk.mkdir(path)
        except FileExistsError:
            self._is_folder_or_raise(path)

    def _is_folder_or_raise(self, path: str) -> None:
        if not self._disk.stat(path).is_folder:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def _fsync_folder(self, path: str) -> None:
        fd = self._disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._sync(fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:  # some FUSE and SMB mounts know no fsync of folders
                raise
        finally:
            self._disk.close(fd)

    def _entries(self, path: str, prefix: str) -> Sequence[Entry]:
        try:
            return self._do("list", prefix, lambda: self._disk.scandir(path), reads=True)
        except NotFoundError:
            return []

    def _walk(self, prefix: str, *, closed: bool = False) -> Iterator[tuple[str, int, float]]:
        """(key, nbytes, modified at) of every file below, sorted by key. One that vanishes meanwhile is left out, and with ``closed``
        a folder below that must not be looked into."""
        folder = self._folder(prefix)
        entries = self._entries(folder, prefix)
        for entry in sorted(entries, key=lambda e: e.name + "/" if e.is_folder else e.name):
            key = prefix + entry.name
            if entry.is_folder:
                if entry.name.startswith(TEMPORARY):
                    continue
                try:
                    yield from self._walk(key + "/", closed=closed)
                except PermanentStoreError as error:
                    if not closed or error.kind != "not-permitted":
                        raise
            elif entry.is_file:
                try:
                    found = self._do("list", key, functools.partial(self._disk.stat, f"{folder}/{entry.name}"), reads=True)
                except NotFoundError:
                    continue
                yield key, found.nbytes, found.modified_at

    def _remove_link_or_tree(self, path: str) -> int:
        """What a symbolic link leads to lies outside of the run perhaps, beside what is not ours: the link goes, that stays."""
        parent, name = os.path.split(path)
        found = next((entry for entry in self._disk.scandir(parent) if entry.name == name), None)
        if found is None or found.is_folder:
            return self._remove_tree(path)
        self._disk.unlink(path)
        return 0

    def _remove_tree(self, path: str) -> int:
        freed = 0
        for last in (False, False, True):  # again when somebody adds files meanwhile
            kept_open = 0
            for entry in self._disk.scandir(path):
                below = f"{path}/{entry.name}"
                if entry.is_file and entry.name.startswith(_STILL_OPEN):
                    kept_open += 1
                    continue
                if entry.is_folder:
                    freed += self._remove_tree(below)
                    continue
                try:
                    nbytes = self._disk.stat(below).nbytes if entry.is_file else 0
                    self._disk.unlink(below)
                except FileNotFoundError:
                    continue
                freed += nbytes
            if kept_open:
                break
            try:
                self._disk.rmdir(path)
                break
            except OSError as error:
                if last or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        return freed

    # -- one new file ----------------------------------------------------------------------------------------------
    def _write_new(self, path: str, view: memoryview, nbytes: int, publish: Callable[[str], bool], *, withdraw: bool) -> bool:
        folder = os.path.dirname(path)
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        published = False
        try:
            try:
                self._ensure_folder(folder)
                self._write_temporary(temporary, view, nbytes, self._disk.stat(folder).device)
            except FileNotFoundError:  # somebody deleted the folder behind our back
                self._forget_folders()
                self._ensure_folder(folder)
                self._write_temporary(temporary, view, nbytes, self._disk.stat(folder).device)
            published = publish(temporary)
            self._fsync_folder(folder)  # also when another was first: its name must be durable before we report it
        except BaseException:
            if not published:
                self._discard(temporary)
            elif withdraw:
                self._discard(path)  # its name may not be durable: better no object than one that a power cut takes back
            raise
        return published

    def _discard(self, temporary: str) -> None:
        with contextlib.suppress(OSError):  # the error that brought us here is the one to report; a temporary file is swept later
            self._disk.unlink(temporary)

    def _write_temporary(self, temporary: str, view: memoryview, nbytes: int, device: int) -> None:
        large = nbytes >= self._large_nbytes
        direct = bool(_O_DIRECT) and large and device not in self._refuses_direct and address(view) % _PAGE == 0
        if direct:
            try:
                self._write_file(temporary, view, nbytes, device, direct=True, large=True)
                return
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._discard(temporary)
        self._write_file(temporary, view, nbytes, device, direct=False, large=large)
        if direct:
            self._refuses_direct.add(device)  # only now: the refusal was of direct writing, not of this file

    def _write_file(self, temporary: str, view: memoryview, nbytes: int, device: int, *, direct: bool, large: bool) -> None:
        fd = self._disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (_O_DIRECT if direct else 0))
        try:
            if large:
                self._reserve(fd, temporary, -(-nbytes // _PAGE) * _PAGE if direct else nbytes, device)
                self._write_blocks(fd, view, nbytes, direct=direct)
                self._disk.ftruncate(fd, nbytes)
            else:
                self._write_all(fd, view[:nbytes], 0, step=1)
            self._sync(fd)
        finally:
            self._disk.close(fd)

    def _sync(self, fd: int) -> None:
        began = time.perf_counter()
        self._disk.fsync(fd)
        with self._lock:
            self._synced_s += time.perf_counter() - began

    def _reserve(self, fd: int, temporary: str, nbytes: int, device: int) -> None:
        """Fail now when there is no space, not after minutes of writing."""
        space = self._disk.statvfs(os.path.dirname(temporary))
        if space.total and space.free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if device in self._refuses_fallocate:
            return
        try:
            self._disk.fallocate(fd, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._refuses_fallocate.add(device)

    def _write_blocks(self, fd: int, view: memoryview, nbytes: int, *, direct: bool) -> None:
        """Write in blocks, ``writers`` in flight. The first failure wins and stops the others; no thread outlives the call."""
        padded = -(-nbytes // _PAGE) * _PAGE
        body = nbytes if not direct else padded if padded <= len(view) else nbytes // _PAGE * _PAGE
        offsets = iter(range(0, body, _BLOCK))
        lock = threading.Lock()
        failures: Failures = []

        def write() -> None:
            try:
                while True:
                    with lock:
                        offset = None if failures else next(offsets, None)
                    if offset is None:
                        return
                    self._write_all(fd, view[offset : min(offset + _BLOCK, body)], offset, step=_PAGE if direct else 1)
            except BaseException as error:  # carried to the caller, which raises the first of them
                failures.append(error)

        others = [threading.Thread(target=write, name="everystep-write") for _ in range(min(self._writers, -(-body // _BLOCK)) - 1)]
        for thread in others:
            thread.start()
        write()
        for thread in others:
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt as interrupt:  # the file must not be closed under a writing thread
                    failures.append(interrupt)
        if failures:
            raise failures[0]
        if body < nbytes:
            self._write_tail(fd, view[body:nbytes], body)

    def _write_tail(self, fd: int, tail: memoryview, offset: int) -> None:
        """Write less than a page directly, from a page of our own; the caller cuts the padding off."""
        with mmap.mmap(-1, _PAGE) as page:
            page[: len(tail)] = tail
            view = memoryview(page)
            try:
                self._write_all(fd, view, offset, step=_PAGE)
            finally:
                view.release()

    def _write_all(self, fd: int, view: memoryview, offset: int, *, step: int) -> None:
        """Write all of it, however short the single writes are; they go on at multiples of ``step``."""
        done = 0
        while done < len(view):
            progress = self._disk.pwrite(fd, view[done:], offset + done)
            progress -= progress % step if done + progress < len(view) else 0
            if progress <= 0:
                raise OSError(errno.EIO, "write made no progress")
            done += progress

    def _rename_exclusively(self, temporary: str, path: str) -> bool:
        """``create`` where there are no hard links: a folder as the mutex."""
        mutex = f"{os.path.dirname(path)}/{TEMPORARY}mutex-{os.path.basename(path)}"
        for patience in range(_MUTEX_TRIES, -1, -1):
            try:
                self._disk.mkdir(mutex)
                break
            except FileExistsError:
                if self._exists(path):
                    self._disk.unlink(temporary)
                    return False
                if not patience:
                    # No EBUSY of the system's, which would be tried again: this has been waited for.
                    raise TransientStoreError(
                        f"cannot create {path!r}: another writer died while it created this", key=os.path.relpath(path, self.path),
                        kind="io", errno=errno.EBUSY, hint=f"remove the folder {mutex!r}",
                    ) from None  # fmt: skip
                self._sleep(_MUTEX_WAIT_S)
        try:
            if self._exists(path):
                self._disk.unlink(temporary)
                return False
            self._disk.rename(temporary, path)
            return True
        finally:
            self._disk.rmdir(mutex)

    # -- reading ranges ----------------------------------------------------------------------------------------------
    def _read_range(self, path: str, offset: int, view: memoryview, *, cached: bool) -> int:
        """Read; what is aligned in file and memory past the page cache, if it is large and not ``cached``. Returns bytes until the end."""
        head = -offset % _PAGE
        middle = (len(view) - head) // _PAGE * _PAGE
        got, direct = 0, False
        if _O_DIRECT and not cached and middle >= self._large_nbytes and (address(view) + head) % _PAGE == 0:
            device = self._disk.stat(path).device
            direct = device not in self._refuses_direct
        fd = self._disk.open(path, os.O_RDONLY)
        try:
            if direct:
                got = self._read_all(fd, view[:head], offset)
                if got == head:
                    got += self._read_direct(path, offset + head, view[head : head + middle], device)
            if not direct or got in (head, head + middle):
                got += self._read_all(fd, view[got:], offset + got)
        finally:
            self._disk.close(fd)
        return got

    def _read_direct(self, path: str, offset: int, view: memoryview, device: int) -> int:
        """Bytes read past the page cache; 0 where the device refuses, which the caller makes good."""
        try:
            fd = self._disk.open(path, os.O_RDONLY | _O_DIRECT)
            try:
                return self._read_all(fd, view, offset, step=_PAGE)
            finally:
                self._disk.close(fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._refuses_direct.add(device)
            return 0

    def _read_all(self, fd: int, view: memoryview, offset: int, *, step: int = 1) -> int:
        done = 0
        while done < len(view):
            progress = self._disk.pread(fd, view[done:], offset + done)
            whole = progress - progress % step
            if whole <= 0:
                return done + progress  # the end of the file
            done += whole
        return done

    # -- errors --------------------------------------------------------------------------------------------------------
    def _do(self, what: str, key: str, action: Callable[[], _Result], *, needed: int = 0, reads: bool = False) -> _Result:
        """Run it; what may pass is tried again (with fresh names: handles may be stale), and the system's errors become ours."""
        pauses, again, asked = iter(_PAUSES_S), [errno.EIO] if reads else [], not reads
        while True:
            try:
                return action()
            except OSError as error:
                if isinstance(error, CheckpointError):
                    raise
                if error.errno == errno.ENOENT and not asked:
                    asked = True
                    if self._ask_again(f"{self.path}/{key}".rstrip("/")):
                        continue
                if error.errno in again:
                    again.remove(error.errno)
                elif error.errno not in _PASSING:
                    raise self._translate(error, what, key, needed) from error
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise self._translate(error, what, key, needed) from error
            self._sleep(pause_s)
            self._forget_folders()

    def _translate(self, error: OSError, what: str, key: str, needed: int) -> CheckpointError:
        code = error.errno or errno.EIO
        reason = error.strerror or os.strerror(code)
        text = f"cannot {what} {key!r} in {self.path!r}: {reason}"
        if code == errno.ENOENT:
            return NotFoundError(f"no {key!r} in {self.path!r}", key=key, kind="not-found", errno=code)
        if code in (errno.ENOSPC, errno.EDQUOT):
            free = self.free_nbytes()
            there = "an unknown number" if free is None else str(free)
            why = "quota exceeded" if code == errno.EDQUOT else "no space left"
            return CapacityError(
                f"cannot {what} {key!r} in {self.path!r}: {why}; {needed} bytes needed, {there} free",
                key=key, kind="quota" if code == errno.EDQUOT else "disk-full", errno=code,
                hint=f"free space, or see: everystep sweep {self.path}",
            )  # fmt: skip
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "remount it writable" if code == errno.EROFS else "change its permissions"
            return PermanentStoreError(text, key=key, kind="not-permitted", errno=code, hint=f"{hint}, or choose another path")
        if code in (errno.ENOTDIR, errno.EISDIR):
            in_the_way = self._file_in_the_way()
            if in_the_way:
                hint = "choose another path for the run"
                return ConfigError(f"{in_the_way!r} is a file, not a folder", key=self.path, kind="not-a-folder", errno=code, hint=hint)
            return PermanentStoreError(text, key=key, kind="not-a-folder", errno=code, hint="move away what lies under that name")
        if code in (errno.ENAMETOOLONG, errno.ELOOP):
            return PermanentStoreError(text, key=key, kind="bad-path", errno=code, hint="choose another path for the run")
        return self._transient(text, key, code)

    def _transient(self, text: str, key: str, code: int) -> StoreError:
        return TransientStoreError(text, key=key, kind="io", errno=code, hint="see the system log (dmesg) and: everystep doctor")

    def _file_in_the_way(self) -> str:
        """The run's folder or the nearest thing above it that exists, if that is a file; else empty."""
        path = self.path
        while True:
            try:
                return "" if self._disk.stat(path).is_folder else path
            except (FileNotFoundError, NotADirectoryError):
                path = os.path.dirname(path)
            except OSError:
                return ""
