"""What is to be consolidated, who asked for it, and who waits: plain values of ``exporting.py``."""

from __future__ import annotations

import dataclasses

import msgspec

from everystep.agent import messages
from everystep.agent.consolidating import Outcome
from everystep.errors import ConfigError
from everystep.repository import CheckpointKey
from everystep.schedule import Consolidate, from_document


@dataclasses.dataclass(eq=False)
class Job:
    """One thing to consolidate. ``key`` is None where only the process finds out ("best", or a step that is not there yet)."""

    target: str
    key: CheckpointKey | None
    reason: str
    stays: bool
    """It does not give way to newer ones."""
    final: bool = False
    tickets: list[int] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"step {self.key.step}" if self.key is not None else f"{self.target!r}"


@dataclasses.dataclass(eq=False)
class Ticket:
    """One request, by the words it came with; ``job`` once it is known what they mean, ``outcome`` when it is over."""

    what: str
    step: int
    attempt: int
    job: Job | None = None
    outcome: Outcome | None = None
    looked: int = -1
    """How many commits there had been when it was last looked up."""

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet what it means."""
        return self.job is None and self.outcome is None


@dataclasses.dataclass(frozen=True)
class Waiter:
    """A connection that waits for a ticket, or (None) for the end of everything, ``since`` when."""

    conn: int
    request: int
    until: float
    ticket: int | None
    since: float


class Noted(msgspec.Struct, frozen=True):
    """One line of the record of what waits, for the agent that comes after a killed one."""

    key: str
    reason: str
    stays: bool = True


def read_settings(settings: bytes) -> Consolidate | None:
    """A trainer's settings; None for none. ConfigError when they are not understood."""
    try:
        return from_document(msgspec.json.decode(settings)) if settings else None
    except msgspec.DecodeError as error:
        raise ConfigError(f"settings to consolidate are no JSON: {error}", kind="consolidate") from error


def target_of(what: str) -> str:
    """``what`` as the command line takes it; ConfigError when it can be nothing."""
    if what in ("latest", "best") or parsed(what) is not None:
        return what
    if what.isascii() and what.isdigit():
        return str(int(what))
    raise ConfigError(f"{what!r:.60} names no checkpoint", kind="consolidate",
                      hint='write "latest", "best", a step, or a key as everystep ls shows it')  # fmt: skip


def parsed(text: str) -> CheckpointKey | None:
    """The key in ``text``, or None."""
    try:
        return CheckpointKey.parse(text)
    except ValueError:
        return None


def answer(request: int, outcome: Outcome | None) -> messages.Message:
    """To who asks what has become of a ticket."""
    if outcome is None:
        return messages.Export(id=request, over=False)
    if outcome.error is not None:
        return messages.failure(outcome.error, request)
    return messages.Export(id=request, over=True, path=outcome.path, step=outcome.step)
