"""A store that dies at its N-th operation, to test what is above stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from everystep.store import Store
from everystep.testing.simdisk import PowerCut

__all__ = ["CrashingStore"]


class CrashingStore:
    """Wraps any store; the ``cut_at``-th changing operation (counted from 1) and everything after it raises.

    Args:
        store: Where the operations before that go.
        cut_at: Which operation dies; None: none.
        after: The operation takes effect and its answer is lost, instead of not taking effect.
        error: What it raises instead of ``PowerCut``, for that one operation only: the store works again afterwards.
        below: Only operations on keys that begin with this count.
    """

    def __init__(
        self, store: Store, *, cut_at: int | None = None, after: bool = False, error: Exception | None = None, below: str = ""
    ) -> None:
        self.url = store.url
        self.operations: list[tuple[str, str]] = []
        """(operation, key) of the changing operations so far."""
        self._store = store
        self._cut_at = cut_at
        self._after = after
        self._error = error
        self._below = below
        self._counted = 0
        self._dead = False
        self._lock = threading.Lock()

    def _dies(self, operation: str, key: str) -> bool:
        self._check()
        with self._lock:
            self.operations.append((operation, key))
            if not key.startswith(self._below):
                return False
            self._counted += 1
            return self._counted == self._cut_at

    def _check(self) -> None:
        if self._dead:
            raise PowerCut

    def _die(self) -> None:
        if self._error is not None:
            raise self._error
        self._dead = True
        raise PowerCut

    def _begin(self, operation: str, key: str) -> bool:
        dies = self._dies(operation, key)
        if dies and not self._after:
            self._die()
        return dies

    @property
    def synced_s(self) -> float:
        """See ``Store.synced_s``."""
        return self._store.synced_s

    def put(self, key: str, data: bytes | memoryview, *, nbytes: int | None = None) -> None:
        """See ``Store.put``."""
        dies = self._begin("put", key)
        self._store.put(key, data, nbytes=nbytes)
        if dies:
            self._die()

    def replace(self, key: str, data: bytes) -> None:
        """See ``Store.replace``."""
        dies = self._begin("replace", key)
        self._store.replace(key, data)
        if dies:
            self._die()

    def create(self, key: str, data: bytes) -> bool:
        """See ``Store.create``."""
        dies = self._begin("create", key)
        created = self._store.create(key, data)
        if dies:
            self._die()
        return created

    def claim(self, key: str) -> bool:
        """See ``Store.claim``."""
        dies = self._begin("claim", key)
        won = self._store.claim(key)
        if dies:
            self._die()
        return won

    def delete(self, key: str) -> None:
        """See ``Store.delete``."""
        dies = self._begin("delete", key)
        self._store.delete(key)
        if dies:
            self._die()

    def delete_folder(self, prefix: str) -> int:
        """See ``Store.delete_folder``."""
        dies = self._begin("delete_folder", prefix)
        freed = self._store.delete_folder(prefix)
        if dies:
            self._die()
        return freed

    def get(self, key: str) -> bytes:
        """See ``Store.get``."""
        self._check()
        return self._store.get(key)

    def read_into(self, key: str, offset: int, view: memoryview, *, shared: bool = False) -> None:
        """See ``Store.read_into``."""
        self._check()
        self._store.read_into(key, offset, view, shared=shared)

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        self._check()
        return self._store.size(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See ``Store.list``."""
        self._check()
        return self._store.list(prefix)

    def leftovers(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """See ``Store.leftovers``."""
        self._check()
        return self._store.leftovers(prefix)

    def folders(self, prefix: str) -> Sequence[str]:
        """See ``Store.folders``."""
        self._check()
        return self._store.folders(prefix)

    def free_nbytes(self) -> int | None:
        """See ``Store.free_nbytes``."""
        self._check()
        return self._store.free_nbytes()
