"""Which checkpoints can be restored, newest first, and taking the first that verifies."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

from everystep.agent import messages
from everystep.agent.client import AgentClient
from everystep.errors import AgentError, CapacityError, CorruptionError, NotFoundError, StoreError, TransientStoreError
from everystep.repository import CheckpointKey, Repository, Skipped
from everystep.trainer.reading import FETCH_NBYTES, ManifestReader, MemorySource, StoreSource
from everystep.trainer.state import RestoreReport
from everystep.transfer import Buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restorable:
    """A checkpoint and the tier it would come from."""

    key: CheckpointKey
    tier: str
    slab: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredFrom:
    """Where a restore's bytes came from, and what was passed over."""

    key: CheckpointKey
    tier: str
    nbytes: int
    skipped: tuple[Skipped, ...]


def restorable(repository: Repository, client: AgentClient | None) -> list[Restorable]:
    """Every checkpoint of the newest attempt's lineage, newest first; memory before disk for the same one."""
    found = [Restorable(key=key, tier="disk") for key in repository.lineage()]
    for summary in _snapshots(client):
        key = CheckpointKey(summary.step, summary.attempt)
        if repository.in_lineage(key):
            found.append(Restorable(key=key, tier="memory", slab=summary.slab))
    # Within one lineage a later attempt's steps come after everything it was resumed from.
    return sorted(found, key=lambda one: (one.key.attempt, one.key.step, one.tier == "memory"), reverse=True)


def restore_newest(
    repository: Repository,
    client: AgentClient | None,
    *,
    step: int | None,
    apply: Callable[[ManifestReader], RestoreReport],
    notice: Callable[[str], None],
) -> tuple[RestoredFrom, RestoreReport] | None:
    """Apply the newest checkpoint (or that of ``step``) that verifies; None when there is none at all.

    Raises:
        NotFoundError: ``step`` is not there; names the steps that are.
        CorruptionError: None of the candidates verifies.
    """
    everything = restorable(repository, client)
    candidates = everything if step is None else [one for one in everything if one.key.step == step]
    if step is not None and not candidates:
        elsewhere = [key for key in repository.keys() if key.step == step]
        candidates = [Restorable(key=key, tier="disk") for key in sorted(elsewhere, key=lambda key: key.attempt, reverse=True)]
    if step is not None and not candidates:
        there = sorted({one.key.step for one in everything})
        known = f"it has {_some(there)}" if there else "it has none yet"
        message = f"run {repository.store.url!r} has no checkpoint of step {step}; {known}"
        raise NotFoundError(message, step=step, kind="no-step", hint="name one of these, or none for the newest")
    skipped: list[Skipped] = []
    touched = False

    def applied(reader: ManifestReader) -> RestoreReport:
        nonlocal touched
        try:
            return apply(reader)
        finally:
            touched = touched or reader.touched

    for one in candidates:
        try:
            report, nbytes = _apply(repository, client, one, applied)
        except (CorruptionError, AgentError, NotFoundError, TransientStoreError) as error:
            # NotFoundError: an object of it is gone, or retention took it meanwhile. TransientStoreError: a bad sector, perhaps.
            skipped.append(Skipped(key=str(one.key), reason=f"{one.tier}: {error}"))
            notice(f"step {one.key.step} in {one.tier} is passed over: {error}")
            if one.tier == "disk" and isinstance(error, CorruptionError):
                _remember_bad(repository, one.key, error)
            continue
        return RestoredFrom(key=one.key, tier=one.tier, nbytes=nbytes, skipped=tuple(skipped)), report
    if not candidates:
        return None
    reasons = "; ".join(f"step {CheckpointKey.parse(one.key).step} {one.reason}" for one in skipped[:3])
    partly = "; the state is partly overwritten and must not be trained on" if touched else ""
    message = f"none of the {len(candidates)} checkpoints of run {repository.store.url!r} verifies: {reasons}{partly}"
    raise CorruptionError(message, kind="all-corrupt", hint=f"everystep verify {repository.store.url} --all")


def _apply(
    repository: Repository, client: AgentClient | None, one: Restorable, apply: Callable[[ManifestReader], RestoreReport]
) -> tuple[RestoreReport, int]:
    threads = min(4, max(2, len(os.sched_getaffinity(0))))
    with Buffers(nbytes=FETCH_NBYTES) as buffers:
        if one.slab is not None and client is not None:
            with client.take(one.slab) as taken:
                reader = ManifestReader(taken.manifest, MemorySource(taken, buffers), threads=threads)
                return apply(reader), reader.nbytes
        with repository.hold(one.key):
            manifest = repository.manifest(one.key)
            reader = ManifestReader(manifest, StoreSource(repository, manifest, buffers), threads=threads)
            return apply(reader), reader.nbytes


def _remember_bad(repository: Repository, key: CheckpointKey, error: CorruptionError) -> None:
    """Tell retention that this one is not to be counted among the good; on a read-only or full store nobody needs to know."""
    try:
        repository.record_verified(key, good=False, detail=str(error), now=time.time())
    except (StoreError, CapacityError):
        return


def _snapshots(client: AgentClient | None) -> list[messages.SnapshotSummary]:
    if client is None:
        return []
    try:
        return client.snapshots()
    except AgentError:
        return []  # it ended meanwhile: what it held is on disk or gone


def _some(steps: list[int]) -> str:
    shown = ", ".join(str(step) for step in steps[-8:])
    return f"steps {shown}" if len(steps) <= 8 else f"{len(steps)} steps, the newest are {shown}"
