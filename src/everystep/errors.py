"""The error tree, grouped by what the reader of the error does next.

Every error carries where it happened (``step``, ``rank``, ``key``), a short machine-readable ``kind`` and a ``hint``: the next
thing to do, preferably a command. ``str(error)`` is one line: what failed, on which thing, why, and the hint.
"""

from __future__ import annotations

__all__ = [
    "AgentError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ConflictError",
    "CorruptionError",
    "LayoutError",
    "NotFoundError",
    "PermanentStoreError",
    "StateError",
    "StoreError",
    "TornSnapshotError",
    "TransientStoreError",
    "rebuild",
]


class CheckpointError(Exception):
    """Root of every error that everystep raises on purpose.

    Args:
        message: What failed, on which thing, and why; one line, values with ``!r``.
        step: Training step concerned, if any.
        rank: Rank concerned, if any.
        key: Store key, path or tensor name concerned, if any.
        kind: Short stable word for programs, such as ``"disk-full"``.
        hint: What to do next; names a command where there is one.
        errno: The operating system's number, where there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        key: str | None = None,
        kind: str = "",
        hint: str = "",
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.rank = rank
        self.key = key
        self.kind = kind
        self.hint = hint
        self.errno = errno

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (
            rebuild,
            (type(self).__name__, self.message, self.step, self.rank, self.key, self.kind, self.hint, self.errno),
        )


class NotFoundError(CheckpointError, LookupError):
    """Nothing is there: start fresh or name another step."""


class CorruptionError(CheckpointError):
    """Bytes are wrong or missing: take another tier or an older step."""


class LayoutError(CheckpointError, ValueError):
    """The checkpoint does not fit what was asked: names, shapes or dtypes."""


class StateError(CheckpointError, TypeError):
    """A value in the state cannot be stored; ``key`` names it."""


class TornSnapshotError(CheckpointError):
    """A tensor changed while it was being copied, before the fence."""


class ConflictError(CheckpointError):
    """Another writer was first, and differs."""


class CapacityError(CheckpointError, OSError):
    """No space or no memory: says how much is needed and how much is there."""


class StoreError(CheckpointError, OSError):
    """The store failed."""


class TransientStoreError(StoreError):
    """The store failed in a way that is retried; raised when the retries are spent."""


class PermanentStoreError(StoreError):
    """The store failed in a way only a person can mend: credentials, a missing bucket, a read-only mount."""


class AgentError(CheckpointError):
    """The agent died or does not answer."""


class ConfigError(CheckpointError, ValueError):
    """Something was wrong before anything ran."""


_BY_NAME: dict[str, type[CheckpointError]] = {
    cls.__name__: cls
    for cls in (
        CheckpointError, NotFoundError, CorruptionError, LayoutError, StateError, TornSnapshotError, ConflictError, CapacityError,
        StoreError, TransientStoreError, PermanentStoreError, AgentError, ConfigError,
    )
}  # fmt: skip


def rebuild(
    name: str,
    message: str,
    step: int | None = None,
    rank: int | None = None,
    key: str | None = None,
    kind: str = "",
    hint: str = "",
    errno: int | None = None,
) -> CheckpointError:
    """Make the error called ``name`` again, as when it crossed from the agent to the trainer."""
    cls = _BY_NAME.get(name, CheckpointError)
    return cls(message, step=step, rank=rank, key=key, kind=kind, hint=hint, errno=errno)
