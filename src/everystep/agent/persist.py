"""One snapshot in a slab: its digests, its part, and its way to the disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from everystep.agent import messages
from everystep.agent.stats import AgentStats
from everystep.errors import AgentError, CheckpointError, ConflictError
from everystep.manifest import Manifest, Part, block_digests, digest, merge
from everystep.plan import ALIGN, SavePlan, slab_part
from everystep.policy import Keep
from everystep.repository import CheckpointKey, Repository

_log = logging.getLogger(__name__)


class Snapshot:
    """A sealed slab's content. Digests are computed once, by whoever needs them first: a persist or a reader."""

    def __init__(self, plan: SavePlan, seal: messages.Seal, view: memoryview) -> None:
        self.plan = plan
        self.seal = seal
        self.view = view
        self.sealed_at = time.monotonic()
        self.key = CheckpointKey(seal.step, seal.attempt)
        self.nbytes = sum(file.nbytes for file in plan.files)
        self.late_metrics: dict[str, float] = {}
        """Metrics that came after the seal and before the commit."""
        self.settled = False
        """Whether a commit has taken the late metrics with it: later ones go to the store. Guarded by the agent's lock."""
        self._hashing = threading.Lock()
        self._digests: tuple[list[tuple[str, ...]], list[str]] | None = None

    def digests(self) -> tuple[list[tuple[str, ...]], list[str]]:
        """Block digests by placement, and header digests by file."""
        with self._hashing:
            if self._digests is None:
                blocks = [block_digests(self.view[p.slab_offset : p.slab_offset + p.nbytes]) for p in self.plan.placements]
                heads = [digest(self.view[f.slab_offset : f.slab_offset + len(f.header)]) for f in self.plan.files]
                self._digests = blocks, heads
            return self._digests

    def manifest(self, object_key: Mapping[str, str]) -> Manifest:
        """The manifest of this snapshot, its files under these names."""
        return merge([self.part(object_key)])

    def part(self, object_key: Mapping[str, str]) -> Part:
        """The part of this snapshot."""
        blocks, heads = self.digests()
        seal = self.seal
        return slab_part(
            self.plan, step=seal.step, attempt=seal.attempt, node=0, nodes=1, saved_at=seal.saved_at, values=seal.values,
            metrics=seal.metrics, object_key=object_key, digests=blocks, header_digests=heads,
        )  # fmt: skip


def check_plan(plan: SavePlan) -> None:
    """AgentError unless everything in the plan lies inside its slab: the agent must not trip over a trainer's mistake."""
    ranges = [(file.slab_offset, _padded(file.nbytes)) for file in plan.files]
    ranges += [(placement.slab_offset, placement.nbytes) for placement in plan.placements]
    inside = all(at >= 0 and nbytes >= 0 and at + nbytes <= plan.nbytes for at, nbytes in ranges)
    heads = all(len(file.header) <= file.nbytes for file in plan.files)
    files = all(0 <= placement.file < len(plan.files) for placement in plan.placements)
    if not (inside and heads and files and plan.nbytes > 0 and plan.nbytes % ALIGN == 0):
        raise AgentError(f"plan {plan.id!r} does not fit its slab of {plan.nbytes:,} bytes", kind="protocol")


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def persist(repository: Repository, snapshot: Snapshot) -> dict[str, float]:
    """Make the snapshot a committed checkpoint; returns seconds by phase. What a failure has written is deleted again.

    Hashing runs beside the writes: both read the slab once, and neither holds the GIL.
    """
    key = snapshot.key
    timings = {"queue": time.monotonic() - snapshot.sealed_at}
    try:
        object_key = {file.name: repository.data_key(key, file.name) for file in snapshot.plan.files}
        hashing = _Aside(snapshot.digests)
        began, synced_s = time.monotonic(), repository.store.synced_s
        for file in snapshot.plan.files:
            end = file.slab_offset + _padded(file.nbytes)
            repository.put_data(key, file.name, snapshot.view[file.slab_offset : end], nbytes=file.nbytes)
        timings["sync"] = repository.store.synced_s - synced_s
        timings["write"] = time.monotonic() - began - timings["sync"]
        hashing.join()
        timings["hash"] = hashing.seconds
        began = time.monotonic()
        # One node's manifest is its part: nobody else waits for it, so it is not written by itself.
        manifest = snapshot.manifest(object_key)
        if snapshot.seal.pin:
            repository.pin(key, reason="pinned by the save")  # before retention can see it
        repository.commit(manifest)
        timings["commit"] = time.monotonic() - began
    except ConflictError:
        raise  # another one's data may be there now: the sweep knows which is whose
    except BaseException:
        _discard(repository, key)
        raise
    timings["total"] = time.monotonic() - snapshot.sealed_at
    return timings


def _discard(repository: Repository, key: CheckpointKey) -> None:
    """Free the space of a save that failed. If that fails too, the sweep does it; the first error is the one to tell."""
    try:
        repository.forget(key, sole_committer=True)
    except (CheckpointError, OSError) as error:
        _log.warning("what the failed save %s wrote is still there: %s", key, error)


class _Aside:
    """Runs a function in a thread beside its maker; its error comes out of ``join``."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="everystep-hash", daemon=True)
        self.seconds = 0.0
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._function()
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - began

    def join(self) -> None:
        """Wait for the end, and raise what the function raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def sweep_leftovers(repository: Repository, attempt: int, stats: AgentStats) -> None:
    """Delete what a killed agent or trainer has left behind. Only between persists: then nothing of this agent's is half written."""
    try:
        if repository.newest_attempt() != attempt:
            return  # somebody else may be writing the newer one
        freed = repository.sweep(repository.plan_sweep(now=time.time(), sole_committer=True))
    except CheckpointError as error:
        stats.count("sweep_failures")
        _log.warning("what killed processes left behind could not be swept: %s", error)
        return
    if freed:
        stats.count("bytes_swept", freed)
        _log.info("swept %d bytes that killed processes had left behind", freed)


def forget_unkept(repository: Repository, keep: Keep, stats: AgentStats) -> list[CheckpointKey]:
    """Do what retention decides; returns what is gone. A store that fails is told in the log and counted: the next commit tries again."""
    gone = []
    began = time.monotonic()
    try:
        for kept in repository.retention(keep, now=time.time()):
            if kept.keep:
                continue
            key = CheckpointKey.parse(kept.key)
            try:
                repository.forget(key, sole_committer=True)
            except ConflictError as error:
                _log.info("%s stays for now: %s", key, error)  # pinned or held since the decision
                continue
            _log.info("step %d of attempt %d forgotten: %s", key.step, key.attempt, kept.reason)
            gone.append(key)
    except CheckpointError as error:
        stats.count("retention_failures")
        _log.warning("old checkpoints could not be forgotten: %s", error)
    if gone:
        stats.observe({"forget": time.monotonic() - began})
        stats.count("forgotten", len(gone))
    return gone
