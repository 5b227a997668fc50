"""What peers may read here: snapshots that are held for them, copies, parts, and objects of this agent's store."""

from __future__ import annotations

import contextlib
import dataclasses
import http
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote

import msgspec

from everystep.agent.peerserver import PIECE_NBYTES, Answer, Asked, checked_span
from everystep.agent.replicas import Replicas
from everystep.agent.talk import Taken
from everystep.errors import AgentError, CheckpointError, NotFoundError
from everystep.manifest import Part, encode
from everystep.repository import CheckpointKey

if TYPE_CHECKING:
    from everystep.agent.nodes import Held, Side

_HOLDS = 1024
POLL_S = 20.0
"""The longest that an answer about a part is waited for."""


@dataclasses.dataclass
class _Held:
    """One reader's hold. Guarded by the lock of ``Holds``."""

    snapshot: Held
    path: str
    until: float
    reading: int = 0
    ended: bool = False


class Holds:
    """Snapshots held for readers on other nodes; each ends when it is not read for ``hold_s``."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._lock = threading.Lock()
        self._by_id: dict[str, _Held] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, path: str, snapshot: Held) -> str:
        """Begin a hold; returns its name."""
        name = os.urandom(16).hex()
        with self._lock:
            full = len(self._by_id) >= _HOLDS
            if not full:
                self._by_id[name] = _Held(snapshot, path, time.monotonic() + self._hold_s)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="everystep-holds", daemon=True)
                self._thread.start()
        if full:
            snapshot.release()
            raise AgentError(f"{_HOLDS:,} readers hold snapshots here", kind="busy")
        return name

    def pieces(self, path: str, name: str, span: tuple[int, int] | None) -> tuple[_Pieces, int]:
        """Bytes of a held snapshot, and how many it has. AgentError kind "gone" when the hold has ended."""
        with self._lock:
            held = self._by_id.get(name)
            if held is None or held.path != path or held.ended:
                raise AgentError("the hold on the snapshot has ended", kind="gone", hint="take the snapshot again")
            begin, end = checked_span(span, held.snapshot.nbytes)
            held.reading += 1
            return _Pieces(lambda: self._read_over(held), held.snapshot.view[begin:end]), held.snapshot.nbytes

    def end(self, path: str, name: str) -> None:
        """End a hold, if there is one; one being read ends when that is over."""
        with self._lock:
            held = self._by_id.get(name)
            if held is not None and held.path == path:
                held.ended = True
        self.expire()

    def close(self) -> None:
        """End all of them."""
        self._closed.set()
        self.expire(everything=True)

    def expire(self, *, everything: bool = False) -> None:
        """Release what is over."""
        now = time.monotonic()
        with self._lock:
            over = [
                name
                for name, held in self._by_id.items()
                if not held.reading and (held.ended or everything or self._closed.is_set() or held.until <= now)
            ]
            released = [self._by_id.pop(name) for name in over]
        for held in released:
            held.snapshot.release()

    def _run(self) -> None:
        while not self._closed.wait(self._hold_s / 8):
            self.expire()

    def _read_over(self, held: _Held) -> None:
        with self._lock:
            held.reading -= 1
            held.until = time.monotonic() + self._hold_s
        self.expire()


class _Pieces:
    """Data of an answer; ``close`` is called in any case."""

    def __init__(self, done: Callable[[], None], view: memoryview) -> None:
        self._done = done
        self._view = view

    def __iter__(self) -> Iterator[memoryview]:
        yield self._view

    def close(self) -> None:
        """Nothing is read any more."""
        self._view.release()
        self._done()


class Routes:
    """Answers what peers ask that have the token.

    Args:
        side: This agent.
        replicas: The copies that it holds.
        run_id: Of the run.
        node: Gives which node this is.
        take_post: Takes in what a peer tells (path, body).
        wait_part: Waits for this node's own part (key, until).
        hold_s: How long a snapshot is held for a reader that does not read.
    """

    def __init__(
        self,
        side: Side,
        replicas: Replicas,
        *,
        run_id: str,
        node: Callable[[], int],
        take_post: Callable[[str, bytes], None],
        wait_part: Callable[[CheckpointKey, float], Part | None],
        hold_s: float,
    ) -> None:
        self.holds = Holds(hold_s)
        self.may_wait: Callable[[], contextlib.AbstractContextManager[bool]] = contextlib.nullcontext  # type: ignore[assignment]
        """Gives whether a thread may wait for something (see ``PeerServer.may_wait``)."""
        self._side = side
        self._replicas = replicas
        self._run_id = run_id
        self._node = node
        self._take_post = take_post
        self._wait_part = wait_part
        self._encoded: tuple[Part, bytes] | None = None
        """The part that was asked for last: every other node asks for the same one."""

    def serve(self, asked: Asked) -> Answer:
        """Answer a peer that has the token."""
        prefix = f"/v1/{quote(self._run_id, safe='')}/"
        if not asked.target.startswith(prefix):
            raise AgentError(f"this agent serves run {self._run_id!r}, not what {asked.target!r:.80} names", kind="other-run")
        path, _, query = asked.target[len(prefix) :].partition("?")
        kind, _, rest = path.partition("/")
        if asked.method == "POST":
            self._take_post(path, asked.body)
            return Answer(body=msgspec.msgpack.encode(None))
        if asked.method == "DELETE" and kind == "snapshots":
            self.holds.end(path, _word(query, "hold"))
            return Answer(body=msgspec.msgpack.encode(None))
        if asked.method == "GET":
            if path == "snapshots":
                found = (*self._side.local_snapshots(), *self._replicas.summaries())
                return Answer(body=msgspec.msgpack.encode(found))
            if kind == "snapshots":
                return self._give_snapshot(asked, path, query)
            if kind == "parts":
                return self._give_part(_key(rest), _word(query, "wait"))
            if kind == "objects":
                return self._give_object(asked, _object_key(rest), query)
        raise NotFoundError(f"there is nothing to {asked.method!r:.20} at {path!r:.80}", kind="route")

    def _give_snapshot(self, asked: Asked, path: str, query: str) -> Answer:
        words = path.split("/")
        if len(words) == 4 and words[3] == "data":
            pieces, total = self.holds.pieces(path.removesuffix("/data"), _word(query, "hold"), asked.span)
            assert asked.span is not None
            return Answer(pieces=pieces, span=asked.span, total=total)
        if len(words) != 3 or not words[1].isascii() or not words[1].isdigit():
            raise NotFoundError(f"{path!r:.80} names no snapshot", kind="route")
        node, key = int(words[1][:9]), _key(words[2])
        # By what the snapshots say, not by this node's number: another job may have numbered the nodes differently.
        own = any((one.node, one.step, one.attempt) == (node, key.step, key.attempt) for one in self._side.local_snapshots())
        held: Held = self._side.hold(key) if own else self._replicas.hold_copy(node, key)
        taken = Taken(hold=self.holds.add(path, held), part=held.part, file_offsets=tuple(held.file_offsets), nbytes=held.nbytes)
        return Answer(body=msgspec.msgpack.encode(taken))

    def _give_part(self, key: CheckpointKey, wait: str) -> Answer:
        try:
            wait_s = min(max(0.0, float(wait or 0)), POLL_S)
        except ValueError:
            raise AgentError(f"{wait!r:.20} is no time to wait", kind="protocol") from None
        try:
            found = self._side.local_part(key)
            if found is None and wait_s:
                with self.may_wait() as may:
                    found = self._wait_part(key, time.monotonic() + wait_s) if may else None
        except CheckpointError as error:
            reason = f"the part of node {self._node()} of step {key.step} will not come: {error.message}"
            raise AgentError(reason, step=key.step, kind="gone", hint=error.hint) from error
        if found is None:
            return Answer(status=int(http.HTTPStatus.ACCEPTED), body=b"")
        known = self._encoded
        if known is None or known[0] is not found:
            known = self._encoded = found, encode("part", found)
        return Answer(body=known[1])

    def _give_object(self, asked: Asked, key: str, query: str) -> Answer:
        total = self._side.object_nbytes(key)
        if query == "size":
            return Answer(body=msgspec.msgpack.encode(total))
        if query == "whole" and key.startswith("manifests/"):  # what everything else is compared with: the answer's proof covers it
            return Answer(body=b"".join(map(bytes, _ObjectPieces(self._side, key, (0, total)))) if total else b"")
        span = checked_span(asked.span, total)
        return Answer(pieces=_ObjectPieces(self._side, key, span), span=span, total=total)


class _ObjectPieces:
    """Bytes of an object of the store, read while they are sent."""

    def __init__(self, side: Side, key: str, span: tuple[int, int]) -> None:
        self._side, self._key, self._span = side, key, span

    def __iter__(self) -> Iterator[memoryview]:
        begin, end = self._span
        with mmap.mmap(-1, min(PIECE_NBYTES, end - begin)) as pages, memoryview(pages) as buffer:  # aligned, for direct reads
            for at in range(begin, end, PIECE_NBYTES):
                with buffer[: min(PIECE_NBYTES, end - at)] as piece:
                    self._side.read_object(self._key, at, piece)
                    yield piece

    def close(self) -> None:
        """Nothing to do."""


def _word(query: str, name: str) -> str:
    try:
        return parse_qs(query[:200], max_num_fields=8).get(name, [""])[0]
    except ValueError:  # too many
        return ""


def _key(text: str) -> CheckpointKey:
    try:
        return CheckpointKey.parse(text[:60])
    except ValueError as error:
        raise NotFoundError(str(error), kind="route") from None


def _object_key(quoted: str) -> str:
    """The store key that a path names; NotFoundError unless it is of data or a manifest, and cannot lead anywhere else."""
    key = unquote(quoted)
    words = key.split("/")
    if (words[0] not in ("data", "manifests") or len(words) < 2 or "\\" in key or "\0" in key or "\ufffd" in key
            or any(word in ("", ".", "..") for word in words)):  # fmt: skip
        raise NotFoundError(f"{key!r:.80} names no object that peers may read", kind="route")
    return key
