"""One snapshot in a slab: its digests, its part, and its way to the disk."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping

from everystep.agent import messages
from everystep.errors import AgentError
from everystep.manifest import BLOCK_NBYTES, Part, block_digests, digest, encode, join_documents
from everystep.plan import ALIGN, SavePlan, slab_part
from everystep.repository import CheckpointKey, Repository


@dataclasses.dataclass(frozen=True)
class Team:
    """Who saves together: this node's ranks among all of them."""

    ranks: tuple[int, ...] = (0,)
    world: int = 1
    node: int = 0
    nodes: int = 1
    shared: bool = True

    @property
    def keeps_house(self) -> bool:
        """Whether this node tidies its store: on a tier that all nodes see one of them does."""
        return self.nodes == 1 or not self.shared or self.node == 0

    @property
    def alone(self) -> bool:
        """Whether nobody else commits into this store."""
        return self.nodes == 1 or not self.shared


ALONE = Team()


class Snapshot:
    """A slab's content as far as it is sealed. Digests are computed once, by whoever needs them first: a persist or a reader."""

    def __init__(self, plan: SavePlan, seals: Mapping[int, messages.Seal], view: memoryview, team: Team = ALONE) -> None:
        first = seals[min(seals)]
        self.plan = plan
        self.seals = seals
        self.view = view
        self.team = team
        self.sealed_at = time.monotonic()
        self.key = CheckpointKey(first.step, first.attempt)
        self.nbytes = sum(file.nbytes for file in plan.files)
        self.saved_at = max(seal.saved_at for seal in seals.values())
        self.pin = any(seal.pin for seal in seals.values())
        self.late_metrics: dict[str, float] = {}
        """Metrics that came after the seal and before the commit."""
        self.settled = False
        """Whether a commit has taken the late metrics with it: later ones go to the store. Guarded by the agent's lock."""
        self._hashing = threading.Lock()
        self._digests: tuple[list[tuple[str, ...]], list[str]] | None = None

    def joined(self, rank: int, seal: messages.Seal) -> Snapshot:
        """The same with one more rank's seal."""
        more = Snapshot(self.plan, {**self.seals, rank: seal}, self.view, self.team)
        more.late_metrics = self.late_metrics
        return more

    def digests(self) -> tuple[list[tuple[str, ...]], list[str]]:
        """Block digests by placement, and header digests by file."""
        with self._hashing:
            if self._digests is None:
                blocks = [block_digests(self.view[p.slab_offset : p.slab_offset + p.nbytes], p.block) for p in self.plan.placements]
                heads = [digest(self.view[f.slab_offset : f.slab_offset + len(f.header)]) for f in self.plan.files]
                self._digests = blocks, heads
            return self._digests

    def part(self, object_key: Mapping[str, str]) -> Part:
        """This node's part of the manifest, its files under these names."""
        blocks, heads = self.digests()
        team = self.team
        values, by_rank = join_documents({rank: seal.values for rank, seal in self.seals.items()})
        metrics: dict[str, float] = {}
        for rank in sorted(self.seals, reverse=True):
            metrics |= self.seals[rank].metrics
        return slab_part(
            self.plan, step=self.key.step, attempt=self.key.attempt, node=team.node, nodes=team.nodes, saved_at=self.saved_at,
            values=values, metrics=metrics, object_key=object_key, digests=blocks, header_digests=heads, world=team.world,
            ranks=team.ranks, by_rank=by_rank, shared=team.shared,
        )  # fmt: skip

    def described(self) -> tuple[bytes, tuple[int, ...]]:
        """For who reads the slab: the encoded part, its objects under their files' names, and where each of them begins."""
        part = self.part({file.name: file.name for file in self.plan.files})
        begins = {file.name: file.slab_offset for file in self.plan.files}
        return encode("part", part), tuple(begins[stored.key] for stored in part.objects)


def check_plan(plan: SavePlan) -> None:
    """AgentError unless everything in the plan lies inside its slab: the agent must not trip over a trainer's mistake."""
    ranges = [(file.slab_offset, _padded(file.nbytes)) for file in plan.files]
    ranges += [(placement.slab_offset, placement.nbytes) for placement in plan.placements]
    inside = all(at >= 0 and nbytes >= 0 and at + nbytes <= plan.nbytes for at, nbytes in ranges)
    heads = all(len(file.header) <= file.nbytes for file in plan.files)
    files = all(0 <= placement.file < len(plan.files) for placement in plan.placements)
    sound = all(0 <= placement.block <= BLOCK_NBYTES for placement in plan.placements)
    if not (inside and heads and files and sound and plan.nbytes > 0 and plan.nbytes % ALIGN == 0):
        raise AgentError(f"plan {plan.id!r} does not fit its slab of {plan.nbytes:,} bytes", kind="protocol")


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def write(repository: Repository, snapshot: Snapshot, timings: dict[str, float]) -> Part:
    """Make the snapshot's files durable; returns the part that describes them, and adds seconds by phase.

    Hashing runs beside the writes: both read the slab once, and neither holds the GIL.
    """
    key = snapshot.key
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
    return snapshot.part(object_key)


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
