"""The per-node agent: owns the slabs, persists, commits, keeps and forgets; outlives the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everystep.agent.messages import Welcome

__all__ = ["find_agents", "run_foreground"]


def find_agents() -> list[Welcome]:
    """What each live agent of this user on this node says of itself; stale sockets are passed over."""
    from everystep.agent.client import find_agents as find

    return find()


def run_foreground(run_url: str, *, idle_s: float | None = 600.0) -> int:
    """Be the agent of the run in this process until it ends by itself or by a signal, after a drain; returns 0, or 130 after SIGINT.

    Args:
        run_url: The run's path; the run is made if it is not there.
        idle_s: End after this time without a trainer; None: never.

    Raises:
        ConflictError: The run has an agent on this node already.
    """
    from everystep.agent.serving import serve

    return serve(run_url, None, float("inf") if idle_s is None else idle_s, foreground=True)
