"""What was exported, longer than the exports themselves stay: ``history.json``, the memory of a schedule."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from everystep.consolidate.card import RECORD, Record, decode_record
from everystep.consolidate.folders import Lock, errors, make_folder, translated
from everystep.errors import CorruptionError, NotFoundError
from everystep.manifest import join_metrics, split_metrics
from everystep.schedule import Seen
from everystep.store.local import LocalStore

__all__ = ["HISTORY", "History", "Past", "names_of", "past_of", "read_record"]

HISTORY = "history.json"
_LOCK = ".history.lock"
_BOUND = 10_000

_log = logging.getLogger(__name__)


class Past(Seen, frozen=True, kw_only=True):
    """An export that was published once; it may be pruned by now. What a schedule's ``done`` consists of."""

    name: str
    folder: str
    """Relative to the root of exports."""
    reason: str
    published_at: float
    """Seconds since the epoch."""
    id: str
    same: str = ""
    """Equal for exports that differ only in what else their checkpoint held (shards forgotten since); "": nobody knows."""
    origin: str = ""
    """Tells one run from another."""
    latest: bool = False
    """Whether LATEST was moved to it."""
    beside: bool = False
    """Whether it lies beside its checkpoint and not among the exports."""
    drop_shards: str = ""
    """What of its checkpoint was to be forgotten; "": nothing."""
    nonfinite: Mapping[str, str] = {}
    """Only in the file: metrics that JSON has no number for."""


_ROWS = msgspec.json.Decoder(list[Past])


def names_of(name: str, key: str, id: str) -> tuple[str, str]:
    """Names that an export's folder may have: the plain one, or, where that is another export's of the same checkpoint, one with its id."""
    return f"{name}-{key}", f"{name}-{key}-{id[:8]}"


def past_of(record: Record, folder: str, *, latest: bool, beside: bool, same: str) -> Past:
    """What is remembered of the export in ``folder`` (relative to the root)."""
    return Past(
        key=record.key, step=record.step, saved_at=record.saved_at, metrics=dict(record.metrics), name=record.name, folder=folder,
        reason=record.reason, published_at=record.published_at, id=record.id, same=same, origin=record.origin, latest=latest, beside=beside,
        drop_shards=str(record.settings.get("drop_shards") or ""),
    )  # fmt: skip


def read_record(folder: str) -> Record:
    """What the export in ``folder`` (a path) says of itself. NotFoundError, CorruptionError."""
    path = f"{folder}/{RECORD}"
    try:
        with open(path, "rb") as file:
            return decode_record(file.read(), path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{folder!r} is no export: it has no {RECORD}", key=folder, kind="no-export") from error
    except OSError as error:
        raise translated(error, "read", path) from error


class History:
    """All that was ever published below one root, whatever its name; oldest first. Written under a lock of its own, held for a moment."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._store = LocalStore(root)

    def all(self) -> list[Past]:
        """What the file has, and then folders that it does not have (their writer was killed before it wrote that)."""
        known = self._rows()
        have = {(past.folder, past.id) for past in known}
        there = []
        with contextlib.suppress(NotFoundError), errors("list", self._root):
            for entry in sorted(os.scandir(self._root), key=lambda entry: entry.name):
                if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                    continue
                record = None
                with contextlib.suppress(NotFoundError, CorruptionError):
                    record = read_record(entry.path)
                if record is None or entry.name not in names_of(record.name, record.key, record.id):  # under another name it is a copy
                    continue
                if (entry.name, record.id) not in have:
                    there.append(past_of(record, entry.name, latest=False, beside=False, same=""))
        return known + sorted(there, key=lambda past: past.published_at)

    def remember(self, past: Past) -> None:
        """Add it, or what is new of it; any number of times."""
        make_folder(self._root)
        with Lock(f"{self._root}/{_LOCK}").held(patience_s=None):
            rows, recorded = self.all(), self._rows()
            known = next((row for row in recorded if (row.folder, row.id) == (past.folder, past.id)), None)
            if known is not None:
                past = msgspec.structs.replace(known, latest=known.latest or past.latest, same=past.same or known.same)
                if past == known:
                    return
            if not any((row.folder, row.id) == (past.folder, past.id) for row in rows):
                rows.append(past)
            rows = [past if (row.folder, row.id) == (past.folder, past.id) else row for row in rows]
            text = b",\n ".join(msgspec.json.encode(_told(row)) for row in _shortened(rows))
            self._store.replace(HISTORY, b"[\n " + text + b"\n]\n")

    def _rows(self) -> list[Past]:
        path = f"{self._root}/{HISTORY}"
        try:
            with open(path, "rb") as file:
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise translated(error, "read", path) from error
        try:
            return [_as_it_was(past) for past in _ROWS.decode(data)]
        except (ValueError, RecursionError, CorruptionError):
            return self._readable(data, path)

    @staticmethod
    def _readable(data: bytes, path: str) -> list[Past]:
        """What of a damaged file can be read: one bad row must not make all others be done again."""
        try:
            rows = msgspec.json.decode(data, type=list[Any])
        except (ValueError, RecursionError) as error:
            _log.warning("%r cannot be read (%s): what is remembered is what is there", path, error)
            return []
        known = []
        for row in rows:
            try:
                known.append(_as_it_was(msgspec.convert(row, Past)))
            except (msgspec.ValidationError, CorruptionError) as error:
                _log.warning("a row of %r cannot be read and is left out: %s", path, error)
        return known


def _as_it_was(past: Past) -> Past:
    return msgspec.structs.replace(past, metrics=join_metrics(past.metrics, past.nonfinite), nonfinite={}) if past.nonfinite else past


def _shortened(rows: list[Past]) -> list[Past]:
    """The newest ``_BOUND``, and of older ones those that have the lowest or highest value of a metric: what schedules compare with."""
    old = rows[:-_BOUND]
    extremes: dict[tuple[str, bool], Past] = {}
    for row in old:
        for name, value in row.metrics.items():
            for highest in (False, True):
                best = extremes.get((name, highest))
                if not math.isnan(value) and (best is None or ((value > best.metrics[name]) == highest and value != best.metrics[name])):
                    extremes[name, highest] = row
    kept = {id(row) for row in extremes.values()}
    return [row for row in old if id(row) in kept] + rows[-_BOUND:]


def _told(past: Past) -> Past:
    finite, words = split_metrics(past.metrics)
    return msgspec.structs.replace(past, metrics=finite, nonfinite=words)
