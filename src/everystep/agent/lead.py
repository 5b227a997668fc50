"""What the lead node decides: which steps are complete, which never will be, which are persisted and copied. No clock, threads or I/O.

A step is complete when every node has sealed it. Each node seals in rising order, so one that seals a step will not seal a lower one any
more. Persisting by "as fast as the disk takes them" or by a duration is decided here, so that all nodes persist the same steps; by a number
of steps it follows from the step itself, and nothing is decided here.

Copies to other nodes' memory are made of one step at a time: the newest complete one, when all nodes are done with the one before. Only
when a step is whole with all holders does it take the place of the last such one: until then every node keeps both, its own snapshot and
copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from everystep.agent.talk import Verdict

MOST_OPEN = 256
"""Steps remembered that are not complete."""
MOST_FAILED = 64
SETTLE_TIMEOUT_S = 600.0
"""A node that has neither committed nor given up by then is not waited for any more."""
COPY_TIMEOUT_S = 3600.0
"""Copies that are not whole by then are not waited for any more."""


class Lead:
    """The lead's view of one job. Not thread-safe.

    Args:
        nodes: How many there are.
        pace_s: Least time between decisions to persist; None: nothing is decided here.
        sender: Name of this life of the lead.
    """

    def __init__(self, nodes: int, pace_s: float | None, sender: str = "") -> None:
        self.nodes = nodes
        self.sender = sender
        self.pace_s = pace_s
        self.copies = False
        """Whether snapshots are copied to other nodes' memory."""
        self.attempt = 0
        self._begin(0)

    def _begin(self, attempt: int) -> None:
        self.attempt = attempt
        self.complete: int | None = None
        self.all_settled: int | None = None
        self._open: dict[int, set[int]] = {}
        self._highest: dict[int, int] = {}
        self._failed: dict[int, tuple[int, str]] = {}
        self._lost_below: int | None = None
        self._settled: dict[int, set[int]] = {}
        self._persists: dict[int, float] = {}
        self._wanted: set[int] = set()
        self._decided_at: float | None = None
        self._copy: int | None = None
        self._copied: int | None = None
        self._uncopied = ""
        self._copying_since: float | None = None
        self._copy_told: dict[int, str] = {}

    def ensure(self, attempt: int) -> bool:
        """Go on to this attempt if it is newer; whether it is the present one now."""
        if attempt > self.attempt:
            self._begin(attempt)
        return attempt == self.attempt

    def sealed(self, node: int, attempt: int, steps: Iterable[int], now: float) -> bool:
        """A node has sealed these; whether the verdict is to be told (again, perhaps)."""
        if not self.ensure(attempt):
            return False
        told_again = False
        for step in sorted(steps):
            self._highest[node] = max(step, self._highest.get(node, -1))
            if (self.complete is not None and step <= self.complete) or step in self._failed or self._is_lost(step):
                told_again = True  # the node does not know yet
                continue
            self._open.setdefault(step, set()).add(node)
        changed = told_again
        for step in sorted(self._open):
            if len(self._open[step]) == self.nodes:
                self._completed(step, now)
                changed = True
        for step, there in sorted(self._open.items()):
            without = next((other for other, highest in self._highest.items() if highest > step and other not in there), None)
            if without is not None:
                self._fail(step, without, f"node {without} has not saved it")
                changed = True
        while len(self._open) > MOST_OPEN:
            self._fail(min(self._open), -1, "too many steps are under way")
            changed = True
        return changed

    def forgets(self, node: int) -> None:
        """Another agent has taken the place of this node's: what the one before had sealed and not all others had is gone with it."""
        for step in list(self._open):
            self._open[step].discard(node)
            if not self._open[step]:
                del self._open[step]
        self._copy_told.pop(node, None)

    def failed(self, node: int, attempt: int, step: int, reason: str) -> bool:
        """A node will never seal this one; whether that is news."""
        if not self.ensure(attempt) or step in self._failed or self._is_lost(step) or (self.complete is not None and step <= self.complete):
            return False
        self._fail(step, node, reason)
        return True

    def wanted(self, node: int, attempt: int, steps: Iterable[int], now: float) -> bool:
        """A node wants these on disk: all persist them, once they are complete. Whether the verdict has changed."""
        if not self.ensure(attempt):
            return False
        changed = False
        for step in steps:
            if step in self._failed or step in self._persists or self._is_settled(step):
                changed = True  # the node does not know yet
            elif step in self._open or self.complete is None or step > self.complete:
                self._wanted.add(step)
            else:
                self._persists[step] = now
                changed = True
        while len(self._wanted) > MOST_OPEN:
            self._wanted.remove(min(self._wanted))
        return changed

    def settled(self, node: int, attempt: int, step: int, now: float) -> bool:
        """A node has committed this one, or given it up; whether the verdict has changed."""
        if not self.ensure(attempt) or self._is_settled(step):
            return False
        there = self._settled.setdefault(step, set())
        there.add(node)
        changed = len(there) == self.nodes
        if changed:
            del self._settled[step]
            self._persists.pop(step, None)
            self.all_settled = max(step, -1 if self.all_settled is None else self.all_settled)
            if self.pace_s == 0 and not self._persists and self.complete is not None and self.complete > self.all_settled:
                self._decide(self.complete, now)
        while len(self._settled) > MOST_OPEN:
            del self._settled[min(self._settled)]
        return changed

    def copied(self, node: int, attempt: int, step: int, problem: str, now: float) -> bool:
        """A node is done with its copies of this step; ``problem``: why they are not all whole. Whether the verdict has changed."""
        if not self.ensure(attempt) or step != self._copy or self._copying_since is None:
            return False
        self._copy_told[node] = problem
        if len(self._copy_told) < self.nodes:
            return False
        problems = [f"node {one + 1}: {why}" for one, why in sorted(self._copy_told.items()) if why]
        self._uncopied = "; ".join(problems[:3])
        if not problems:
            self._copied = step
        self._copying_since = None
        self._copy_next(now)
        return True

    def _copy_next(self, now: float) -> None:
        """Have the newest complete step copied, unless copies are under way or it was the last one that was."""
        late = self._copying_since is not None and now - self._copying_since > COPY_TIMEOUT_S
        if not self.copies or self.complete is None or (self._copy is not None and self._copy >= self.complete):
            return
        if self._copying_since is not None and not late:
            return
        if late:
            silent = ", ".join(str(node + 1) for node in range(self.nodes) if node not in self._copy_told)
            self._uncopied = f"node {silent} was not done with step {self._copy} after {COPY_TIMEOUT_S:g} s"
        self._copy, self._copying_since, self._copy_told = self.complete, now, {}

    def verdict(self) -> Verdict:
        """What every node is to know."""
        failed = tuple((step, node, reason) for step, (node, reason) in sorted(self._failed.items()))
        persist = tuple(sorted(self._persists))
        return Verdict(attempt=self.attempt, complete=self.complete, persist=persist, settled=self.all_settled, failed=failed,
                       copy=self._copy, copied=self._copied, uncopied=self._uncopied, sender=self.sender,
                       lost_below=self._lost_below)  # fmt: skip

    def _is_settled(self, step: int) -> bool:
        return self.all_settled is not None and step <= self.all_settled and step not in self._persists

    def _completed(self, step: int, now: float) -> None:
        self.complete = step
        del self._open[step]
        self._persists = {step: at for step, at in self._persists.items() if now - at <= SETTLE_TIMEOUT_S}
        idle = not self._persists
        if step in self._wanted:
            self._persists[step] = now
        self._wanted = {later for later in self._wanted if later > step}
        self._copy_next(now)
        if self.pace_s is None or not idle or step in self._persists:
            return
        if self._decided_at is None or now - self._decided_at >= self.pace_s:
            self._decide(step, now)

    def _decide(self, step: int, now: float) -> None:
        self._persists[step] = self._decided_at = now

    def _fail(self, step: int, node: int, reason: str) -> None:
        self._open.pop(step, None)
        self._failed[step] = (node, reason)
        while len(self._failed) > MOST_FAILED:
            # Who has not heard of it one by one hears that whatever is so old will not be complete: else its slab would never come free.
            forgotten = min(self._failed)
            del self._failed[forgotten]
            self._lost_below = max(forgotten, -1 if self._lost_below is None else self._lost_below)
        for open_step in [open_step for open_step in self._open if self._is_lost(open_step)]:
            del self._open[open_step]

    def _is_lost(self, step: int) -> bool:
        return self._lost_below is not None and step <= self._lost_below
