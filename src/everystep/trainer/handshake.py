"""How the ranks find a part of the job's store that belongs to this life of the job alone.

Theory of operation. The store may outlive a restart of the ranks (``torchrun --max-restarts`` keeps it), and then holds what their earlier
lives have written; nothing that a rank could read there says which life it is from, and nodes may count restarts differently. So every
rank says hello with a word drawn for this life. Rank 0 draws the name of the part and answers each word with it, again when a rank's word
changes: what it answered before was a dead rank's. A rank takes only the answer to its own word, and says inside the new part that it has
come.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d as c10d

from everystep.errors import AgentError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PAUSE_S, _PAUSE_MAX_S = 0.001, 0.1


def missing(late: Sequence[int], label: str, timeout_s: float) -> AgentError:
    """The error about ranks that did not come."""
    shown = ", ".join(map(str, late[:8])) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
    return AgentError(
        f"rank{'s' * (len(late) > 1)} {shown} did not come to agree on {label!r} within {timeout_s:g} s", rank=late[0], kind="rank-missing",
        hint="every rank has to make its first save, and every restore, together with the others",
    )  # fmt: skip


class Handshake:
    """One rank's part. Not thread-safe.

    Args:
        store: The part of the store that is for this checkpointer, in all lives of the job.
        rank: This rank.
        size: How many there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.late: tuple[int, ...] = ()
        """Who had not come when ``meet`` gave up."""
        self._store = store
        self._rank = rank
        self._word = secrets.token_hex(8).encode()
        self._said = False
        self._name: bytes | None = self._word if rank == 0 else None
        self._answered: dict[int, bytes] = {}
        self._absent = list(range(1, size)) if rank == 0 else []

    @property
    def is_over(self) -> bool:
        """Whether this rank need not wait for anybody any more."""
        return self._name is not None and not self._absent

    def space(self, store: Store | None = None) -> Store | None:
        """The part of the store for this life (by another connection, if one is given); None before its name is known."""
        if self._name is None:
            return None
        return c10d.PrefixStore(f"{self._name.decode()}/", store or self._store)

    def meet(self, timeout_s: float) -> None:
        """Come together. Called again after a failure it goes on where it stopped.

        Raises:
            AgentError: Not all came within the time; ``late`` says who.
        """
        until, pause_s = time.monotonic() + timeout_s, _PAUSE_S
        while not self._step():
            if time.monotonic() >= until:
                self.late = tuple(self._absent) if self._rank == 0 else (0,)
                raise missing(self.late, "start", timeout_s)
            time.sleep(pause_s)
            pause_s = min(_PAUSE_MAX_S, 1.5 * pause_s)

    def _step(self) -> bool:
        """Do what can be done now; whether that was all."""
        if self._rank == 0:
            space = self.space()
            self._absent = [rank for rank in self._absent if space is not None and not space.check([f"here/{rank}"])]
            for rank in self._absent:
                self._answer(rank)
            return not self._absent
        if not self._said:
            self._store.set(f"hello/{self._rank}", self._word)  # type: ignore[arg-type]
            self._said = True
        key = f"welcome/{self._rank}"
        word, _, name = bytes(self._store.get(key)).partition(b" ") if self._store.check([key]) else (b"", b"", b"")
        if word != self._word:
            return False
        self._name = name
        space = self.space()
        if space is not None:
            space.set(f"here/{self._rank}", b"1")  # type: ignore[arg-type]
        return True

    def _answer(self, rank: int) -> None:
        key = f"hello/{rank}"
        if self._store.check([key]):
            word = bytes(self._store.get(key))
            if self._answered.get(rank) != word:
                self._store.set(f"welcome/{rank}", word + b" " + self._word)  # type: ignore[arg-type]
                self._answered[rank] = word
