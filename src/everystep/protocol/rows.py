"""What the agent's decisions depend on: slabs with their shares, connections, and who waits. All of it is data."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

MAX_SLABS = 3
"""One filling, the newest sealed, one persisting."""
KEPT_SLABS = 2
"""So many more where other nodes copy what is here: the snapshot that is being copied, and the last one that was."""


class SlabState(enum.Enum):
    """What a slab is."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    PERSISTING = "persisting"


class Phase(enum.Enum):
    """What the agent is doing as a whole."""

    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part in a slab."""

    rank: int
    conn: int
    sealed: bool = False
    ended: bool = False
    """Sealed, given back or lost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """A step that was refused, and which ranks know."""

    kind: str
    reason: str
    told: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlabRow:
    """One slab. ``payload`` is the shell's own description of the snapshot; it is carried along and never looked at."""

    id: int
    nbytes: int
    state: SlabState = SlabState.FREE
    plan_id: str = ""
    """Whose headers are in it; empty: nobody's."""
    shares: tuple[Share, ...] = ()
    """Of the ranks that joined."""
    ranks: tuple[int, ...] = (0,)
    """Those that must."""
    nodes: int = 1
    step: int = 0
    attempt: int = 0
    order: int = 0
    """Of sealing: later is greater."""
    broken: str = ""
    """Why it will never be sealed."""
    complete: bool = False
    """Every node has sealed its share of the step."""
    awaited_since: float | None = None
    """Since when somebody waits for it to be complete, and then persisted."""
    bound: bool = False
    must: bool = False
    """Bound, and superseded by nothing."""
    durable: bool = False
    failed: bool = False
    doomed: bool = False
    """Given up in the store: it can never be committed."""
    superseded: bool = False
    """Waits only for its readers to be free."""
    kept: bool = False
    """Superseded as far as its trainers know; stays for the sake of its copies on other nodes."""
    readers: tuple[int, ...] = ()
    payload: Any = None

    @property
    def conns(self) -> tuple[int, ...]:
        """Who fills it, or who sealed it."""
        return tuple(share.conn for share in self.shares)

    def share_of(self, conn: int) -> Share | None:
        """The share that this connection has not ended yet."""
        return next((share for share in self.shares if share.conn == conn and not share.ended), None)

    def joined(self, rank: int) -> Share | None:
        """The share of this rank."""
        return next((share for share in self.shares if share.rank == rank), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One connection. ``attempt`` is 0 until it is configured; then it is ``rank`` of ``job``."""

    role: str
    pid: int
    attempt: int = 0
    job: str = ""
    rank: int = 0
    bye: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting:
    """Somebody who waits for the end of a drain (``stop``: for the end of the agent)."""

    conn: int
    request: int
    until: float
    exit: bool = False
    stop: bool = False


@dataclasses.dataclass(kw_only=True)
class AgentState:
    """Everything the decisions depend on. ``transition`` copies it; rows are frozen and replaced."""

    phase: Phase = Phase.SERVING
    slabs: dict[int, SlabRow] = dataclasses.field(default_factory=dict)
    peers: dict[int, Peer] = dataclasses.field(default_factory=dict)
    waiting: tuple[Waiting, ...] = ()
    ranks: tuple[int, ...] = (0,)
    """Of this node, as the trainers said."""
    nodes: int = 1
    refused: dict[int, Refused] = dataclasses.field(default_factory=dict)
    """By step, of the newest attempt; only where there are several ranks."""
    skipped: dict[int, str] = dataclasses.field(default_factory=dict)
    """Steps that were refused here and that other nodes may be waiting for: the lead is told as soon as nobody can ask again."""
    lost: dict[int, str] = dataclasses.field(default_factory=dict)
    """Steps of the newest attempt that another node will never seal."""
    keep: frozenset[tuple[int, int]] = frozenset()
    """(attempt, step) of snapshots that other nodes copy or have copied: without this node's share the copies are worth nothing."""
    orphaned: bool = False
    """A rank was lost without a goodbye: somebody will want what is in memory."""
    max_slabs: int = MAX_SLABS
    budget: int | None = None
    idle_s: float = 600.0
    idle_since: float | None = 0.0
    persist_when_idle: bool = False
    beaten_attempt: int = 0
    """Attempts up to this one have met a higher one and commit nothing more."""
    newest_attempt: int = 0
    newest_durable_step: int | None = None
    error: str = ""
    """Of the newest failed persist, until one succeeds."""
    signals: int = 0
    end_at: float | None = None
    ending: str = ""
    """Why it is DRAINING."""
    retry_at: float | None = None
    """When the idle end tries again."""
    bye_end: bool = False
    """The last trainer said goodbye: end as soon as everything is durable."""
    occupied: bool = False
    """The shell consolidates, or will: it is not to end for want of a trainer. Who tells it to end does not wait for that."""
    next_slab: int = 1
    next_order: int = 1

    def newest(self) -> SlabRow | None:
        """The complete snapshot sealed last."""
        return max((s for s in self.slabs.values() if is_complete(s)), key=lambda s: s.order, default=None)

    def sealing(self) -> list[SlabRow]:
        """What some ranks have sealed and others are still filling; oldest first."""
        rows = (s for s in self.slabs.values() if s.state is SlabState.FILLING and not s.broken and any(one.sealed for one in s.shares))
        return sorted(rows, key=lambda s: s.step)

    def incomplete(self) -> list[SlabRow]:
        """What this node has sealed and, as far as it knows, others have not; oldest first."""
        return sorted((s for s in self.slabs.values() if is_snapshot(s) and not s.complete), key=lambda s: s.order)

    def persisting(self) -> SlabRow | None:
        """The slab being written, if any."""
        return next((s for s in self.slabs.values() if s.state is SlabState.PERSISTING), None)

    def trainers(self) -> list[int]:
        """Connections of trainers."""
        return [conn for conn, peer in self.peers.items() if peer.role == "trainer"]

    def due(self) -> list[SlabRow]:
        """Snapshots that are to be persisted, in the order in which they are: bound ones first."""
        newest = self.newest()
        rows = [
            s
            for s in self.slabs.values()
            if s.state is SlabState.SEALED and is_complete(s) and not s.durable and not s.failed
            and (s.bound or (self.persist_when_idle and s is newest))
        ]  # fmt: skip
        return sorted(rows, key=lambda s: (not s.bound, s.order))

    def undrained(self) -> bool:
        """Whether something is being or will be written."""
        return (
            self.persisting() is not None
            or bool(self.due())
            or any(s.bound for s in self.incomplete())
            or any(s.awaited_since is not None for s in self.sealing())
        )


def is_snapshot(slab: SlabRow) -> bool:
    """Whether the slab holds a sealed snapshot that has not been replaced."""
    return slab.state in (SlabState.SEALED, SlabState.PERSISTING) and not slab.superseded


def is_complete(slab: SlabRow) -> bool:
    """Whether it holds one that every node has sealed."""
    return slab.complete and is_snapshot(slab)
