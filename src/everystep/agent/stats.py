"""Counters, and histograms of how long each phase of a save takes; mergeable over attempts.

The JSON: ``{"pid": 7, "uptime_s": 9.5, "counters": {"committed": 3}, "phases": {"write": {"count", "total_s", "min_s", "max_s", "p50_s",
"p90_s", "p99_s", "buckets": [[upper_s, count], ...]}}}``. The buckets' upper ends are ``1e-6 * 2 ** (i / 4)`` seconds. Where something is
amiss at present, ``"notes": {"copies": "why"}``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from everystep.repository import Repository

PHASES = ("plan", "stage", "fence", "call", "queue", "hash", "write", "sync", "commit", "total", "forget")
COUNTERS = ("saved", "committed", "superseded", "skipped", "failed", "forgotten", "bytes_saved", "bytes_committed")
_SMALLEST_S = 1e-6
_PER_OCTAVE = 4


class Histogram:
    """Durations in buckets that grow by a fourth of an octave each: quantiles are right within 10 %."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.min_s = math.inf
        self.max_s = 0.0
        self.buckets: dict[int, int] = {}

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        seconds = max(0.0, seconds)
        bucket = 0 if seconds <= _SMALLEST_S else math.floor(math.log2(seconds / _SMALLEST_S) * _PER_OCTAVE)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        self.total_s += seconds
        self.min_s = min(self.min_s, seconds)
        self.max_s = max(self.max_s, seconds)

    def quantile(self, share: float) -> float:
        """The duration that ``share`` of all do not exceed, from the middle of its bucket, in seconds; 0 when there is none."""
        wanted = max(1, math.ceil(share * self.count))
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= wanted:
                return min(self.max_s, float(_SMALLEST_S * 2 ** ((bucket + 0.5) / _PER_OCTAVE)))
        return 0.0

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add another's counts, as they stand in JSON."""
        self.count += int(other["count"])
        self.total_s += float(other["total_s"])
        if other["count"]:
            self.min_s = min(self.min_s, float(other["min_s"]))
        self.max_s = max(self.max_s, float(other["max_s"]))
        for upper_s, count in other["buckets"]:
            bucket = round(math.log2(upper_s / _SMALLEST_S) * _PER_OCTAVE) - 1
            self.buckets[bucket] = self.buckets.get(bucket, 0) + int(count)

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "count": self.count, "total_s": self.total_s, "min_s": self.min_s if self.count else 0.0, "max_s": self.max_s,
            "p50_s": self.quantile(0.5), "p90_s": self.quantile(0.9), "p99_s": self.quantile(0.99),
            "buckets": [[_SMALLEST_S * 2 ** ((bucket + 1) / _PER_OCTAVE), count] for bucket, count in sorted(self.buckets.items())],
        }  # fmt: skip


class AgentStats:
    """All of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._phases: dict[str, Histogram] = {name: Histogram() for name in PHASES}
        self._counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._notes: dict[str, str] = {}
        self.changes = 0
        """Grows with each change, so that an unchanged record is not written again."""

    def observe(self, timings_s: Mapping[str, float]) -> None:
        """Count durations by the name of the phase."""
        with self._lock:
            self.changes += 1
            for name, seconds in timings_s.items():
                self._phases.setdefault(name, Histogram()).observe(seconds)

    def count(self, name: str, by: int = 1) -> None:
        """Raise a counter."""
        with self._lock:
            self.changes += 1
            self._counters[name] = self._counters.get(name, 0) + by

    def note(self, name: str, text: str) -> None:
        """Say what is amiss at present; empty: nothing any more."""
        with self._lock:
            self.changes += 1
            self._notes.pop(name, None)
            if text:
                self._notes[name] = text

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add what another agent counted, as its JSON says."""
        with self._lock:
            for name, histogram in other.get("phases", {}).items():
                self._phases.setdefault(name, Histogram()).merge(histogram)
            for name, count in other.get("counters", {}).items():
                self._counters[name] = self._counters.get(name, 0) + int(count)

    def as_json(self) -> dict[str, object]:
        """Plain values, as in the module's text."""
        with self._lock:
            return {
                "pid": os.getpid(), "uptime_s": time.monotonic() - self._began, "counters": dict(self._counters),
                "phases": {name: one.as_json() for name, one in self._phases.items()},
                **({"notes": dict(self._notes)} if self._notes else {}),
            }  # fmt: skip

    def encode(self) -> bytes:
        """``as_json`` as bytes."""
        return msgspec.json.encode(self.as_json())


def stored(repository: Repository) -> dict[str, object] | None:
    """What the agents of all attempts recorded in the run, merged; None when nothing is recorded."""
    documents = repository.read_stats()
    if not documents:
        return None
    total = AgentStats()
    for document in documents.values():
        total.merge(document)
    newest = documents[max(documents)]
    return {**total.as_json(), "pid": newest["pid"], "uptime_s": newest["uptime_s"]}
