"""A folder of exports: made out of sight, published whole, led to by LATEST, remembered, and deleted when nobody wants them any more.

Theory of operation. An export is written into a hidden folder (``.<folder>-<id>.partial``) of the same root. When every file is there, of
its size and durable, the record ``everystep.json`` is written last, the folder is made durable and renamed: under its final name it is
whole or not there. A published folder never changes; one that has to be replaced is exchanged for the new one in one system call. It goes
the other way round: renamed out of sight first, then deleted. LATEST and BEST are symbolic links, replaced by a rename, and lead to whole
folders only. Names of weight files carry step and plan, so a reader that goes through LATEST while it is moved finds a file missing, never
another's.

One process writes to a root at a time: it holds a lock (``.lock``) that the system takes away when it dies, so what is hidden and not
locked is left over. Whatever a killed one had not come to (LATEST, history, pruning) the next one makes good: the folders tell all of it.

Into a checkpoint's own folder the same works with one fixed name, ``consolidated``, and no pointers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from everystep.consolidate.card import RECORD, Record, encode_record
from everystep.consolidate.folders import NO_LINKS, Lock, errors, exchange, make_folder, sync
from everystep.consolidate.history import HISTORY, History, Past, names_of, past_of, read_record
from everystep.errors import ConflictError, CorruptionError, NotFoundError, StoreError
from everystep.store.local import TEMPORARY, LocalStore

__all__ = ["BEST", "CONSOLIDATED", "HISTORY", "LATEST", "Exports", "Past"]

LATEST = "LATEST"
BEST = "BEST"
CONSOLIDATED = "consolidated"
_PARTIAL = ".partial"
_TRASH = ".trash-"
# What is swept is told by all of its name: in a folder of the user's own there may be other hidden things.
_HIDDEN = re.compile(rf"\.(?:.+-[0-9a-f]{{8}}\{_PARTIAL}|(?:trash|{LATEST}|{BEST})-[0-9a-f]{{12}})")
_HIDDEN_BESIDE = re.compile(rf"\.(?:{CONSOLIDATED}-[0-9a-f]{{8}}\{_PARTIAL}|trash-[0-9a-f]{{12}})")
_PASSING = re.compile(rf"{re.escape(TEMPORARY)}(?:[0-9a-f]{{16}}|mutex-.+)")
_ABANDONED_S = 3600.0
"""Where locks do not work, what has not changed for so long is left over."""

_log = logging.getLogger(__name__)


class Exports:
    """The exports of one name below one root. Cheap to make; touches nothing until it has to.

    Args:
        root: The folder. It and at most one parent are made at the first write.
        name: Begins the folders' names.
        beside: The folder of a checkpoint: its one export lies there, as ``consolidated``, and ``root`` has the history only.
        taken: ``beside`` is another's: never made, since its owner would take it for a checkpoint.
    """

    def __init__(self, root: str | os.PathLike[str], name: str, *, beside: str | None = None, taken: bool = False) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self.name = name
        self.beside = beside is not None
        self.taken = taken
        self.place = os.path.abspath(beside) if beside is not None else self.root
        """Where folders are made."""
        self._store = LocalStore(self.place)
        self._history = History(self.root)
        # A checkpoint's folder stays as tidy as it was.
        self._lock = Lock(self._path(f".{CONSOLIDATED}.lock" if self.beside else ".lock"), passing=self.beside)

    # -- looking ---------------------------------------------------------------------------------------------------
    def history(self, *, into: str | None = None, origin: str = "") -> list[Past]:
        """All exports of this name that were ever published here, oldest first; those beside checkpoints, or (``into`` is not
        "checkpoint") those among the exports. Folders that are there but not remembered are added. With ``origin`` (of a run: its id) only
        its own: in a folder of several runs the others' have the same keys."""
        beside = self.beside if into is None else into == "checkpoint"
        known = [past for past in self._history.all() if past.name == self.name and past.beside == beside]
        return [past for past in known if not origin or past.origin in ("", origin)]

    def find(self, key: str, id: str, *, same: str = "") -> str | None:
        """Folder of the whole export of checkpoint ``key`` with this id (or with this ``same``), or None."""
        if self.beside:
            place = os.path.relpath(self._path(CONSOLIDATED), self.root)
            wanted = [(CONSOLIDATED, past.id) for past in self.history() if same and past.same == same and past.folder == place]
        else:
            wanted = [(past.folder, past.id) for past in self.history() if same and past.same == same]
        wanted = [*((folder, id) for folder in self._candidates(key, id)), *wanted]
        return next((self._path(folder) for folder, of in wanted if self.holds(folder, of) and self.whole(folder)), None)

    def holds(self, folder: str, id: str) -> bool:
        """Whether the export in a folder is still that of this id: another one may have got the name of one that is gone."""
        record = self._record_of(folder)
        return record is not None and record.id == id

    def whole(self, folder: str) -> bool:
        """Whether every file that its record names is there in its size. Reads no weights."""
        record = self._record_of(folder)
        if record is None:
            return False
        try:
            return all(os.stat(f"{self._path(folder)}/{file.name}").st_size == file.nbytes for file in record.files)
        except OSError:
            return False

    def latest(self) -> str | None:
        """Path of the folder that LATEST leads to, or None."""
        return self._led_to(LATEST)

    def best(self) -> str | None:
        """Path of the folder that BEST leads to, or None."""
        return self._led_to(BEST)

    def record(self, folder: str) -> Record:
        """What an export's folder (a path) says of itself. NotFoundError, CorruptionError."""
        return read_record(folder)

    # -- writing: one at a time ------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def locked(self, *, patience_s: float | None = None) -> Iterator[None]:
        """Be the only process (and thread) that writes here. Waits for another one, for at most ``patience_s``.

        Raises:
            ConflictError: The other is still at it (``kind`` "busy"); says which process it is.
            NotFoundError: The checkpoint that the export goes into was deleted by its owner.
            PermanentStoreError: The root cannot be written to.
            ConfigError: The root's parents do not exist, or it is a file.
        """
        if self.taken and not os.path.isdir(self.place):
            raise NotFoundError(f"{self.place!r} is not there any more: its export has no place", key=self.place, kind="no-checkpoint",
                                hint="take a newer checkpoint")  # fmt: skip
        make_folder(self.place)
        with self._lock.held(patience_s=patience_s):
            yield

    def check_room(self, key: str, id: str) -> None:
        """Refuse before anything is written when what lies under the names that are needed is not ours. ConflictError names it."""
        pointers = () if self.beside else (LATEST, BEST)
        for pointer in pointers:
            if os.path.lexists(self._path(pointer)) and not self._is_our_link(pointer):
                raise self._in_the_way(pointer, "is not a symbolic link of ours")
        for folder in self._candidates(key, id):
            if os.path.lexists(self._path(folder)) and not self._is_ours(folder):
                raise self._in_the_way(folder, f"is no export of ours: it has no {RECORD}")

    def partial(self, key: str, id: str) -> str:
        """Path of the hidden folder for a new export; made, or with what an interrupted one of the same id has left in it."""
        folder = self._partial_name(key, id)
        with errors("make", self._path(folder)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._path(folder))
            sync(self.place)
        return self._path(folder)

    def put(self, partial: str, name: str, data: bytes) -> None:
        """Write a small file of an export that is being made; durable."""
        self._store.replace(f"{os.path.relpath(partial, self.place)}/{name}", data)

    def discard(self, partial: str) -> None:
        """Delete what was written of an export that will not be; frees its space."""
        self._store.delete_folder(f"{os.path.relpath(partial, self.place)}/")

    def publish(self, partial: str, record: Record) -> str:
        """Make a finished folder visible under its final name; returns its path.

        Everything that ``record`` names is there already. What it does not name is deleted first, then all is made durable, the record
        is written, and the folder renamed.

        Raises:
            CorruptionError: A file is missing or of another size: nothing was published.
        """
        self._tidy(partial, record)
        self.put(partial, RECORD, encode_record(record))
        with errors("publish", partial):
            for folder, _, names in os.walk(partial, topdown=False):
                for name in names:
                    sync(f"{folder}/{name}")
                sync(folder)
        folder = self._final_name(record)
        path = self._path(folder)
        with errors("publish", path):
            if not os.path.lexists(path):
                os.rename(partial, path)
            elif not exchange(partial, path):
                # No exchange on this file system: for a moment there is none under this name.
                self._remove(folder)
                os.rename(partial, path)
            sync(self.place)
            if os.path.isdir(partial):
                self._remove(os.path.basename(partial))  # what was there before
        return path

    def settle(
        self, path: str, *, keep: int | None, best_by: tuple[str, str] | None, same: str = "",
        later: Callable[[Past], Mapping[str, float]] = lambda _: {},
    ) -> None:  # fmt: skip
        """All that follows the publication of the folder at ``path``: history, LATEST, BEST, pruning. Any number of times.

        Args:
            path: The published folder.
            keep: See ``prune``.
            best_by: Metric and "min" or "max" by which BEST is led to the best export that is there.
            same: See ``Past.same``.
            later: What is known by now of an export's checkpoint: metrics may have come after it was published.
        """
        record = self.record(path)
        folder = os.path.relpath(path, self.root)
        newest = not self.beside and self._is_newest(record, folder)
        self._history.remember(past_of(record, folder, latest=newest, beside=self.beside, same=same))
        if self.beside:
            return
        if newest:
            self._lead(LATEST, folder)
        if best_by is not None:
            best = self._best(*best_by, later)
            if best is not None:
                self._lead(BEST, best)
        try:
            self.prune(keep)
        except StoreError as error:  # the new export is there: what is too much goes next time
            _log.warning("exports in %r that are not wanted any more stay for now: %s", self.root, error)

    def prune(self, keep: int | None) -> list[str]:
        """Delete all but the ``keep`` exports of this name that were published last (None: keep all); returns the folders' names.

        Never what LATEST or BEST leads to, nor what LATEST led to before: a reader may be at it.
        """
        if keep is None or self.beside:
            return []
        there = self._there()
        stay = {past.folder for past in there[-keep:]}
        for pointer in (LATEST, BEST):
            stay.add(self._pointed(pointer) or "")
        latest = self._pointed(LATEST)
        stay |= {past.folder for past in [past for past in there if past.latest and past.folder != latest][-1:]}
        gone = [past.folder for past in there if past.folder not in stay]
        for folder in gone:
            self._remove(folder)
        return gone

    def sweep(self) -> list[str]:
        """Delete what dead writers left: partial exports, half-deleted ones, links that were not put in place. Nothing while one writes."""
        if not os.path.isdir(self.place):
            return []
        try:
            with self.locked(patience_s=0):
                return self.sweep_all_but("")
        except ConflictError:
            return []

    def sweep_all_but(self, partial: str) -> list[str]:
        """As ``sweep``, by the one who holds the lock and goes on with ``partial`` (a path)."""
        swept = []
        for name in sorted(os.listdir(self.place)):
            path = self._path(name)
            if path == partial or not self._is_hidden_of_ours(name) or not ((self._lock.works and not _is_passing(name)) or _is_old(path)):
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                self._store.delete_folder(f"{name}/")
            else:
                with contextlib.suppress(NotFoundError), errors("delete", path):
                    os.unlink(path)
            swept.append(name)
        return swept

    # -- names -----------------------------------------------------------------------------------------------------
    def _path(self, folder: str) -> str:
        return os.path.normpath(f"{self.place}/{folder}")

    def _candidates(self, key: str, id: str) -> Sequence[str]:
        """Names that an export may have, the first that is free."""
        return (CONSOLIDATED,) if self.beside else names_of(self.name, key, id)

    def _final_name(self, record: Record) -> str:
        plain, *others = self._candidates(record.key, record.id)
        there = self._record_of(plain)
        taken = others and os.path.lexists(self._path(plain)) and not (there is not None and there.id == record.id)
        folder = others[0] if taken else plain
        if os.path.lexists(self._path(folder)) and not self._is_ours(folder):
            raise self._in_the_way(folder, f"is no export of ours: it has no {RECORD}")
        return folder

    def partial_path(self, key: str, id: str) -> str:
        """Where ``partial`` makes the folder."""
        return self._path(self._partial_name(key, id))

    def _partial_name(self, key: str, id: str) -> str:
        return f".{CONSOLIDATED if self.beside else f'{self.name}-{key}'}-{id[:8]}{_PARTIAL}"

    def _is_hidden_of_ours(self, name: str) -> bool:
        if _is_passing(name):
            return not self.beside
        return (_HIDDEN_BESIDE if self.beside else _HIDDEN).fullmatch(name) is not None

    def _is_ours(self, folder: str) -> bool:
        return os.path.isfile(f"{self._path(folder)}/{RECORD}")

    def _is_our_link(self, pointer: str) -> bool:
        """Whether it leads to an export among ours, there or gone by now. Jobs keep links of the same name beside their checkpoints."""
        if not os.path.islink(self._path(pointer)):
            return False
        folder = os.readlink(self._path(pointer))
        return "/" not in folder and (self._is_ours(folder) or not os.path.lexists(self._path(folder)))

    def _in_the_way(self, folder: str, why: str) -> ConflictError:
        path = self._path(folder)
        return ConflictError(f"{path!r} is in the way of an export: it {why}", key=path, kind="in-the-way",
                             hint="move it away, or export into another folder")  # fmt: skip

    def _record_of(self, folder: str) -> Record | None:
        try:
            return self.record(self._path(folder))
        except (NotFoundError, CorruptionError):
            return None

    # -- publishing ------------------------------------------------------------------------------------------------
    def _tidy(self, partial: str, record: Record) -> None:
        """Check that the folder has what it should, and delete what else is in it."""
        wanted = {file.name: file.nbytes for file in record.files}
        with errors("publish", partial):
            for folder, _, names in os.walk(partial):
                for name in names:
                    path = os.path.join(folder, name)
                    relative = os.path.relpath(path, partial)
                    if relative not in wanted:
                        os.unlink(path)
                    elif os.stat(path).st_size == wanted[relative]:
                        del wanted[relative]
        if wanted:
            name = min(wanted)
            why = f"{name!r} is missing or not of {wanted[name]:,} bytes"
            raise CorruptionError(f"the export in {partial!r} is not whole: {why}", key=partial, kind="incomplete", hint="export again")

    def _remove(self, folder: str) -> None:
        """Out of sight in one step, then deleted."""
        trash = f"{_TRASH}{secrets.token_hex(6)}"
        with contextlib.suppress(NotFoundError):
            with errors("delete", self._path(folder)):
                os.rename(self._path(folder), self._path(trash))
                sync(self.place)
            self._store.delete_folder(f"{trash}/")

    def _there(self) -> list[Past]:
        """Those of the history that are there, oldest first: what lies under such a name and is none of them is not ours."""
        folders = set(os.listdir(self.place))
        return [past for past in self.history() if past.folder in folders and self.holds(past.folder, past.id)]

    # -- pointers --------------------------------------------------------------------------------------------------
    def _pointed(self, pointer: str) -> str | None:
        """The folder's name that a pointer holds, whether it is there or not."""
        try:
            return os.readlink(self._path(pointer))
        except OSError:
            pass
        try:
            with open(self._path(f"{pointer}.txt"), encoding="utf-8") as file:
                return file.read().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def _led_to(self, pointer: str) -> str | None:
        folder = self._pointed(pointer)
        return self._path(folder) if folder and os.path.isdir(self._path(folder)) else None

    def _lead(self, pointer: str, folder: str) -> None:
        if self._pointed(pointer) == folder:
            return
        temporary = self._path(f".{pointer}-{secrets.token_hex(6)}")
        with errors("lead", self._path(pointer)):
            try:
                os.symlink(folder, temporary)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                self._store.replace(f"{pointer}.txt", f"{folder}\n".encode())  # a file system without symbolic links
                return
            os.replace(temporary, self._path(pointer))
            sync(self.place)

    def _is_newest(self, record: Record, folder: str) -> bool:
        """Whether LATEST should lead to it: to what was saved last, which an old checkpoint exported on demand is not."""
        led = self._pointed(LATEST)
        if led is None or led == folder:
            return True
        there = self._record_of(led)
        if there is None:
            return True
        if there.origin == record.origin and there.attempt is not None and record.attempt is not None:
            return (record.attempt, record.step) >= (there.attempt, there.step)
        return (record.saved_at, record.step) >= (there.saved_at, there.step)

    def _best(self, metric: str, mode: str, later: Callable[[Past], Mapping[str, float]]) -> str | None:
        """Folder of the best export that is there, the earliest among equals."""
        sign = 1.0 if mode == "min" else -1.0
        measured = []
        for number, past in enumerate(self._there()):
            value = later(past).get(metric, past.metrics.get(metric, math.nan))
            if not math.isnan(value):
                measured.append((sign * value, number, past.folder))
        return min(measured)[2] if measured else None


def _is_passing(name: str) -> bool:
    """Whether it is a small file that is being written: without the lock, by whoever remembers an export."""
    return _PASSING.fullmatch(name) is not None


def _is_old(path: str) -> bool:
    """Whether nothing in it has changed for long."""
    try:
        newest = max((os.lstat(f"{folder}/{name}").st_mtime for folder, _, names in os.walk(path) for name in names), default=0.0)
        return max(newest, os.lstat(path).st_mtime) < time.time() - _ABANDONED_S
    except OSError:
        return False
