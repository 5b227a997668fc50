"""What all folders of other frameworks have in common: steps in names, files by index, an identity, whether the files are one save's."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everystep.consolidate.source import ABSENT, SourceFile
from everystep.manifest import digest

_MOST_JSON_NBYTES = 64 << 20
_STEP = re.compile(r"(?:^|[^a-z])(?:global_?)?step[=_-]?(\d{1,18})", re.IGNORECASE)
_LAST = re.compile(r"(?:^|[-_=])(\d{1,18})$")
_METRIC = re.compile(r"([A-Za-z_][\w/]*)=(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.]*\w=)", re.IGNORECASE)
_SLOW_NBYTES_S = 20e6
_SPREAD_S = 600.0
_CLOCK_S = 5.0
TOUCH = "if it is a copy that did not keep the files' times, `touch` all of its files"


class Files:
    """The files of one folder, numbered as they are asked for."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: list[SourceFile] = []
        self.times: dict[str, float] = {}
        self._numbers: dict[str, int] = {}

    def number(self, key: str) -> int:
        """Index of a file; one that is not there (or is no file) has the size ``ABSENT``."""
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self.files)
            told = _stat(os.path.join(self.folder, key))
            self.files.append(SourceFile(key, ABSENT if told is None else told.st_size))
            if told is not None:
                self.times[key] = told.st_mtime
        return known

    def nbytes(self, key: str) -> int:
        """Size of a file, or ``ABSENT``."""
        return self.files[self.number(key)].nbytes

    def torn(self) -> list[str]:
        """Sentences about files that are much older than the others: those of two saves."""
        if len(self.times) < 2:
            return []
        oldest, newest = min(self.times, key=self.times.__getitem__), max(self.times, key=self.times.__getitem__)
        # Copying takes time too.
        most = _SPREAD_S + sum(file.nbytes for file in self.files if file.nbytes > 0) / _SLOW_NBYTES_S
        apart = self.times[newest] - self.times[oldest]
        return [f"{newest!r} was written {apart:,.0f} s after {oldest!r}: they are of two saves ({TOUCH})"] if apart > most else []

    def newer(self, than: str) -> list[str]:
        """Sentences about files that were written after the one that is written last."""
        told = _stat(os.path.join(self.folder, than))
        late = [] if told is None else [key for key, at in sorted(self.times.items()) if at > told.st_mtime + _CLOCK_S and key != than]
        return [f"{key!r} was written after {than!r}: it is of another save, or one is going on ({TOUCH})" for key in late]


def _stat(path: str) -> os.stat_result | None:
    try:
        told = os.stat(path)
    except OSError:
        return None
    return told if stat.S_ISREG(told.st_mode) else None


def identity_of(folder: str, keys: Iterable[str], *, more: str = "") -> str:
    """Digest over names, sizes and times of files below a folder; what is not there has no time."""
    told = []
    for key in sorted(set(keys)):
        there = _stat(os.path.join(folder, key))
        told.append([key, there.st_size, there.st_mtime_ns] if there else [key, ABSENT, 0])
    return digest(json.dumps([more, told]).encode())


def changed_at(folder: str, keys: Iterable[str]) -> float:
    """When the newest of some files was written; 0.0 where none is there."""
    return max((there.st_mtime for key in keys if (there := _stat(os.path.join(folder, key)))), default=0.0)


def newest_of(folder: str, keys: Sequence[str]) -> str:
    """Which of some files was written last."""
    return max(keys, key=lambda key: changed_at(folder, [key]))


def names_in(folder: str) -> list[str]:
    """What lies in a folder, sorted; nothing where it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def own_name(folder: str) -> str:
    """A folder's own name, whatever links lead to it."""
    return os.path.basename(os.path.realpath(folder))


def safe(name: str) -> str:
    """The name as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9._=-]", "_", name).lstrip(".") or "checkpoint"


def step_in(name: str) -> int:
    """The step that a folder's name tells (``epoch=1-step=20.ckpt``, ``checkpoint-20``, ``20``); 0 where it tells none."""
    found = _STEP.findall(name) or _LAST.findall(name)
    return int(found[-1]) if found else 0


def metrics_in(name: str) -> dict[str, float]:
    """Metrics that a name tells (``epoch=1-val_loss=0.25.ckpt``)."""
    text = name.removesuffix(".ckpt")
    return {key: float(value) for key, value in _METRIC.findall(text) if key not in {"step", "epoch", "global_step"}}


def read_json(path: str) -> Any:
    """What a JSON file of others says; None where it is not there, not JSON, or unreasonably long."""
    try:
        told = _stat(path)
        if told is None or told.st_size > _MOST_JSON_NBYTES:
            return None
        with open(path, "rb") as file:
            return json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None


def numbers_of(told: Any, *, besides: Sequence[str] = ()) -> dict[str, float]:
    """The entries of a mapping that are numbers (not NaN)."""
    if not isinstance(told, Mapping):
        return {}
    return {
        str(name): float(value)
        for name, value in told.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value) and name not in besides
    }


def listed(names: Sequence[str], most: int = 5) -> str:
    """Some of the names, for messages."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
