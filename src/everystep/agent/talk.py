"""What nodes say to each other: the messages, and how each side proves that it has the run token."""

from __future__ import annotations

import hashlib
import hmac
from typing import NoReturn

import msgspec

from everystep.errors import ConfigError

NONCE, TIME, TO, PROOF = "X-Everystep-Nonce", "X-Everystep-Time", "X-Everystep-To", "X-Everystep-Proof"
HOLD_S = 60.0
"""How long an agent keeps a snapshot for a reader that does not read."""
RANGE_NBYTES = 64 << 20
"""The longest range that one request may ask for."""
WINDOW_S = 120.0
"""How far a request's time may be from the answering agent's clock."""
_TOKEN_NBYTES = 16


class PeerFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is an error: an error of ``errors``, to be made again on the other side."""

    name: str
    message: str
    kind: str = ""
    hint: str = ""
    step: int | None = None
    key: str | None = None


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that is now held for the asker. ``part``: encoded record; ``hold`` names the hold."""

    hold: str
    part: bytes
    file_offsets: tuple[int, ...]
    nbytes: int


class SealedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """To the lead: which steps a node has sealed that are not complete yet, which it will never seal (step, reason), and which it wants on
    disk."""

    node: int
    attempt: int
    steps: tuple[int, ...]
    failed: tuple[tuple[int, str], ...] = ()
    wanted: tuple[int, ...] = ()
    copied: tuple[int, str] | None = None
    """The step whose copies it has been told to make last and is done with; why they are not all whole, if so."""
    sender: str = ""
    """Another one than before: an agent that knows nothing of what its node was told."""


class SettledSteps(msgspec.Struct, frozen=True, kw_only=True):
    """To the lead: (step, attempt, error) of what a node has committed or, with an error, given up, oldest first."""

    node: int
    settled: tuple[tuple[int, int, str], ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """From the lead, all of one attempt: the newest complete step, complete steps that are to be persisted and that not all nodes have
    settled, the newest step that all have settled, and steps that will not be complete: (step, node at fault, reason).

    ``copy``: the step that is to be copied to other nodes' memory, or that was last; ``copied``: the newest one that is whole with all
    holders; ``uncopied``: why the copies are not renewed."""

    attempt: int
    complete: int | None = None
    persist: tuple[int, ...] = ()
    settled: int | None = None
    failed: tuple[tuple[int, int, str], ...] = ()
    copy: int | None = None
    copied: int | None = None
    uncopied: str = ""
    lost_below: int | None = None
    """Steps up to this one that are not complete yet will not be: ``failed`` names the newest of them only."""
    sender: str = ""
    """Another one than before: a lead that knows nothing of what it was told."""


class RunToken:
    """The job's secret; shows itself to nobody."""

    def __init__(self, token: bytes) -> None:
        if len(token) < _TOKEN_NBYTES:
            message = f"a run token of {len(token)} bytes is too short"
            raise ConfigError(message, kind="token", hint=f"give {_TOKEN_NBYTES} random bytes or more")
        self._key = bytes(token)

    def __repr__(self) -> str:
        return "RunToken(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a run token is not stored")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunToken) and hmac.compare_digest(self._key, other._key)

    __hash__ = None  # type: ignore[assignment]

    def of_request(self, method: str, target: str, *, span: str, to: str, nonce: str, at: str, body: bytes) -> str:
        """Proof that a request comes from one who has the token, in hex."""
        return self._proof("request", method, target, span, to, nonce, at, hashlib.sha256(body).hexdigest())

    def of_answer(self, nonce: str, status: int, span: str, body: bytes | None) -> str:
        """The same of the answer to the request with this nonce. ``body`` None: data, which have digests of their own."""
        return self._proof("answer", nonce, str(status), span, "data" if body is None else hashlib.sha256(body).hexdigest())

    def _proof(self, *fields: str) -> str:
        coded = [field.encode("utf-8", "surrogateescape") for field in fields]
        return hmac.new(self._key, b"".join(b"%d:%s" % (len(field), field) for field in coded), hashlib.sha256).hexdigest()


def same(proof: str, expected: str) -> bool:
    """Compare two proofs in a time that tells nothing."""
    return hmac.compare_digest(proof.encode("utf-8", "surrogateescape"), expected.encode())
