"""How the trainers of a run end, and whether that is the end of the run: a value with rules, no threads and no clock.

When all ranks of the node have said that they are "done", the run is over. When one was "preempted" it may go on: it is over when no
trainer has come back for as long as an agent waits for one. When one failed or was lost, nobody knows whether it is over.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

ENDS = ("done", "preempted", "failed", "lost")
"""How a trainer ends, the gravest last."""


class Endings:
    """Of one attempt."""

    def __init__(self) -> None:
        self.concluded = False
        """Whether it is decided what the end of the run asks for."""
        self._ending: dict[int, str] = {}
        """By connection: who has said that it ends, and is there yet."""
        self._left = ""
        """The gravest end of those who have gone."""
        self._left_at = 0.0

    def ends(self, conn: int, because: str, *, saved: bool) -> None:
        """A trainer has saved what it will. The first of a life that has ``saved`` nothing is not bound to how the life before ended."""
        if not saved and not self._ending:
            self._left, self.concluded = "", False
        self._ending[conn] = because

    def gone(self, conn: int, *, bye: bool, saved: bool, now: float) -> bool:
        """A trainer's connection is closed; False when it has neither ``saved`` nor said that it ends: it has only looked."""
        if not saved and conn not in self._ending:
            return False
        because = self._ending.pop(conn, "done" if bye else "lost")
        self._left = max(because, self._left or because, key=ENDS.index)
        self._left_at = now
        return True

    def pending(self, idle_s: float) -> bool:
        """Whether the end of the run has come, or will unless a trainer comes back, and nothing is decided about it."""
        reasons = {*self._ending.values(), *([self._left] if self._left else [])}
        waits = "preempted" not in reasons or idle_s < float("inf")
        return bool(reasons) and reasons <= {"done", "preempted"} and waits and not self.concluded

    def over(self, there: AbstractSet[int]) -> bool:
        """Whether none of the trainers that are ``there`` goes on."""
        return there <= self._ending.keys() and not (there and self._preempted)

    def due_at(self, idle_s: float) -> float:
        """When the end counts; before that a trainer may come back."""
        return self._left_at + idle_s if self._preempted else 0.0

    @property
    def _preempted(self) -> bool:
        return "preempted" in {*self._ending.values(), self._left}
