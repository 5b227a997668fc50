"""How all ranks come to do something at the same call of ``save`` because one of them asks for it: it has had a signal, or needs new plans.

Theory of operation. The ranks count their calls of ``save``, and agree in rounds that never wait. The first rank with a signal offers a
*target*: a call some way ahead. Every rank that meets the target before it is past it counts itself as having *seen* it. Whoever comes to
the target first offers the *verdict*: save here, if all have seen it; else the next round's target, twice as far ahead. Only one verdict
stands, so all save at the same call or none does.

A margin without that count would not do. Hosts run ahead of their devices, so that a rank may be further than one thinks; and a rank that
waits inside ``save`` for one that is past the target, and that needs the first one's gradients to come any further, waits for ever. Only
when a verdict to save stands, and everybody is at that call or will come to it, do the ranks wait for each other; and even then not long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from everystep.errors import AgentError

MARGIN = 2
"""Calls from a signal to the save: where every step synchronises, each rank has looked once in between."""
_MARGIN_MAX = 256
_POLL_S, _POLL_PER_RANK_S = 0.02, 1e-4
_LAST_OUT_S = 1.0
_NAMED = 1024
"""Worlds larger than this are not asked rank by rank who is missing."""


class Shared(Protocol):
    """What ``trainer.world.World`` does for this. AgentError when the store cannot be reached."""

    rank: int
    size: int

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""

    def look(self, key: str) -> bytes | None:
        """A key's value, or None; does not wait."""

    def offer(self, key: str, value: bytes) -> bytes:
        """Set a key unless it has a value; what stands."""

    def add(self, key: str, amount: int) -> int:
        """Count; returns the new value."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a signal asks for."""

    signal: str
    exit: bool
    left_s: float
    """Of the grace, on the rank that says so, when it says so."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The call at which to save, by number."""

    at: int
    margin: int
    wish: Wish


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What all do at a target: save and wait for ``tier``, or, with ``next``, go on to that one."""

    wish: Wish
    tier: str = "disk"
    reason: str = ""
    next: Target | None = None


class Agreed(NamedTuple):
    """This call is the one. ``left_s``: of the shortest grace that this rank knows of."""

    round: int
    verdict: Verdict
    left_s: float


class Others(NamedTuple):
    """What the other ranks made of the save; ``broken``: one of them has not saved its part."""

    text: str
    broken: bool = False


class Rounds:
    """One rank's part. Its calls of ``due`` are counted by ``next_call``; every method raises AgentError when the store is gone.

    Args:
        tier: What to wait for when that many seconds are left, and why not for the disk.
        about: What these rounds are about; rounds about something else are others.
        glance: What is known of a key without waiting; default: ``world.look``. It may be late: then the margin grows.
    """

    def __init__(
        self, world: Shared, *, tier: Callable[[float], tuple[str, str]], clock: Callable[[], float], about: str = "preemption",
        glance: Callable[[str], bytes | None] | None = None,
    ) -> None:  # fmt: skip
        self._glance = glance or world.look
        self._about = about
        self._world = world
        self._tier = tier
        self._clock = clock
        self._round = 0
        self._call = 0
        self._target: Target | None = None
        self._seen = False
        self._deadline = math.inf

    @property
    def has_target(self) -> bool:
        """Whether a call is named at which all may save."""
        return self._target is not None

    def next_call(self) -> None:
        """This rank has come to a call of ``save``."""
        self._call += 1

    def due(self, mine: Wish | None) -> Agreed | None:
        """Whether all save at this call. ``mine``: what this rank's own signals ask for."""
        if self._target is None:
            found = self._glance(self._key("target"))
            if found is None:
                if mine is None:
                    return None
                own = Target(at=self._call + MARGIN, margin=MARGIN, wish=mine)
                found = self._world.offer(self._key("target"), msgspec.json.encode(own))
            self._meet(msgspec.json.decode(found, type=Target))
        while self._target is not None and self._call >= self._target.at:
            key = self._key("verdict")
            found = self._world.look(key) or self._world.offer(key, msgspec.json.encode(self._proposed(self._target, mine)))
            verdict = msgspec.json.decode(found, type=Verdict)
            agreed = Agreed(self._round, verdict, self._left_s(mine))
            self._round += 1
            self._target, self._seen, self._deadline = None, False, math.inf
            if verdict.next is None:
                return agreed
            self._meet(verdict.next)
        return None

    def gather(self, round: int, *, failed: str, exit: bool, until: float, pause: Callable[[float], None]) -> Others:
        """Say that this rank is done (or ``failed``), and wait until all are: one that exits takes the process group with it.

        Args:
            round: As agreed.
            failed: Why this rank has not saved its part; empty if it has.
            exit: This rank ends next.
            until: By the clock; not a moment longer.
            pause: Waits that many seconds.
        """
        world, base = self._world, f"{self._about}/{round}"
        pause_s = _POLL_S + _POLL_PER_RANK_S * world.size
        if failed:
            world.offer(f"{base}/failed", f"rank {world.rank}: {failed}".encode())
        world.put(f"{base}/done/{world.rank}", b"done")
        count = world.add(f"{base}/done", 1)
        while count < world.size and self._clock() < until:
            pause(max(0.0, min(pause_s, until - self._clock())))
            count = world.add(f"{base}/done", 0)
        other = world.look(f"{base}/failed")
        missing = self._missing(base) if count < world.size else ""
        if exit:
            self._last_out(base, min(until, self._clock() + _LAST_OUT_S), pause_s, pause)
        if other is not None and not failed:
            return Others(other.decode(errors="replace"), broken=True)
        return Others(missing)

    def _key(self, name: str) -> str:
        return f"{self._about}/{self._round}/{name}"

    def _meet(self, target: Target) -> None:
        """A target is seen for the first time; that counts if it is not past."""
        self._target = target
        self._deadline = self._clock() + target.wish.left_s
        if self._call <= target.at:
            tier, reason = self._tier(target.wish.left_s)
            if tier != "disk":  # before it is counted: whoever finds that all have seen it finds this as well
                self._world.offer(self._key("slow"), f"rank {self._world.rank}: {reason}".encode())
            self._world.add(self._key("seen"), 1)
            self._seen = True

    def _left_s(self, mine: Wish | None) -> float:
        return min(self._deadline - self._clock(), math.inf if mine is None else mine.left_s)

    def _proposed(self, target: Target, mine: Wish | None) -> Verdict:
        wish = mine if mine is not None and mine.exit and not target.wish.exit else target.wish
        wish = msgspec.structs.replace(wish, left_s=self._left_s(mine))
        if self._seen and self._world.add(self._key("seen"), 0) >= self._world.size:
            tier, reason = self._tier(wish.left_s)
            slow = self._world.look(self._key("slow"))
            if slow is not None:
                tier, reason = "memory", slow.decode(errors="replace")
            return Verdict(wish=wish, tier=tier, reason=reason)
        margin = min(_MARGIN_MAX, 2 * target.margin)
        return Verdict(wish=wish, next=Target(at=self._call + margin, margin=margin, wish=wish))

    def _missing(self, base: str) -> str:
        world = self._world
        late = [rank for rank in range(world.size) if world.look(f"{base}/done/{rank}") is None] if world.size <= _NAMED else []
        if not late:
            return "" if world.size <= _NAMED else "some ranks did not come to the end of the save in time"
        shown = ", ".join(map(str, late[:8])) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
        return f"rank{'s' * (len(late) > 1)} {shown} did not come to the end of the save in time"

    def _last_out(self, base: str, until: float, pause_s: float, pause: Callable[[float], None]) -> None:
        """Rank 0 may hold the store: it goes when the others have seen what they need."""
        try:
            count = self._world.add(f"{base}/left", 1)
            while self._world.rank == 0 and count < self._world.size and self._clock() < until:
                pause(pause_s)
                count = self._world.add(f"{base}/left", 0)
        except AgentError:
            return  # it has gone: nothing is left to wait for
