"""Hypothesis strategies for everystep's values."""

from __future__ import annotations

from hypothesis import strategies as st

from everystep.policy import Candidate, Keep
from everystep.repository import CheckpointKey

__all__ = ["candidates", "checkpoint_keys", "keeps", "store_keys"]

_NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1, max_size=12).filter(
    lambda name: name not in {".", ".."} and not name.startswith(".tmp-")
)


def store_keys() -> st.SearchStrategy[str]:
    """Valid keys of a store, of one to four names."""
    return st.lists(_NAMES, min_size=1, max_size=4).map("/".join)


def checkpoint_keys(*, max_step: int = 10**13, max_attempt: int = 10**6, max_reduced: int = 3) -> st.SearchStrategy[CheckpointKey]:
    """Keys of checkpoints, reduced ones too."""
    return st.builds(
        CheckpointKey, step=st.integers(0, max_step), attempt=st.integers(1, max_attempt), reduced=st.integers(0, max_reduced)
    )


def keeps() -> st.SearchStrategy[Keep]:
    """Every sound retention."""
    return st.builds(
        Keep, last=st.none() | st.integers(1, 5), best=st.integers(0, 3), metric=st.just("loss"), mode=st.sampled_from(["min", "max"]),
        every=st.none() | st.integers(1, 7),
    )  # fmt: skip


def candidates(*, max_size: int = 12) -> st.SearchStrategy[list[Candidate]]:
    """Committed checkpoints with distinct keys, as retention sees them."""
    one = st.builds(
        lambda key, loss, **flags: Candidate(
            key=str(key), step=key.step, attempt=key.attempt, reduced=key.reduced, metrics={} if loss is None else {"loss": loss}, **flags
        ),
        checkpoint_keys(max_step=40, max_attempt=3), st.none() | st.floats(width=16), pinned=st.booleans(), held=st.booleans(),
        verified=st.none() | st.booleans(), in_lineage=st.booleans(),
    )  # fmt: skip
    return st.lists(one, max_size=max_size, unique_by=lambda candidate: candidate.key)
