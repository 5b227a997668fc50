"""What one agent or trainer asks of another node's agent: HTTP/1.1 on ``http.client``, answers read straight into the caller's memory.

Every request bears an HMAC-SHA256 over everything it says, its time and a nonce; every answer one over that nonce, the status and the
body. The key is the run token, which both sides have from the job's agreement and which is never sent. The bytes of snapshots and
objects are not in the HMAC: whoever reads them compares them with the digests of a part or manifest, and that came with an HMAC.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TypeVar
from urllib.parse import quote

import msgspec

from everystep.agent.messages import PeerAddress, SnapshotSummary
from everystep.agent.talk import NONCE, PROOF, TIME, TO, PeerFailed, RunToken, Taken, same
from everystep.errors import AgentError, CheckpointError, CorruptionError, NotFoundError, rebuild
from everystep.manifest import BLOCK_NBYTES, Part, decode, digest_count
from everystep.repository import CheckpointKey

_ANSWER_NBYTES = 1 << 30
_READ_NBYTES = 16 << 20
_SLOWEST = 4 << 20
"""Bytes a second: data that come slower count as not coming."""
_TAKE_EXTRA_S = 120.0
"""The first reader of a snapshot waits until the agent has computed its digests."""
_BUSY_PAUSE_S = 0.2
_IDLE = 4
_Anything = TypeVar("_Anything")


# -- one connection ------------------------------------------------------------------------------------------------------------
class _Deadline:
    """When the exchange that a connection is in has to be over (monotonic seconds)."""

    def __init__(self) -> None:
        self.at = float("inf")

    def left(self) -> float:
        """Seconds left; TimeoutError when none are."""
        seconds = self.at - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        return seconds


class _TimedIO(io.RawIOBase):
    """Reads from a socket until a deadline, however slowly bytes drip in."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: _Deadline) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        self._sock.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.deadline = _Deadline()

    def connect(self) -> None:
        self.timeout = self.deadline.left()
        super().connect()

    def answer(self) -> http.client.HTTPResponse:
        """As ``getresponse``, but in time."""
        self.response_class = self._timed_response  # type: ignore[assignment]
        return self.getresponse()

    def _timed_response(self, sock: socket.socket, *args: object, **words: object) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, *args, **words)  # type: ignore[arg-type]
        response.fp = io.BufferedReader(_TimedIO(response.fp.detach(), sock, self.deadline), 64 << 10)
        return response


def _fill(response: http.client.HTTPResponse, view: memoryview) -> None:
    """Read exactly ``view`` from the body, without a buffer in between. ConnectionError when it ends before."""
    done = 0
    while done < len(view):
        got = response.fp.readinto1(view[done:])
        if not got:
            raise ConnectionError(f"the answer ends {len(view) - done:,} bytes early")
        done += got
    response.length = 0


# -- the client ----------------------------------------------------------------------------------------------------------------
class PeerClient:
    """One other agent, as seen from here. Thread-safe: each thread has a connection of its own while it needs one; a few are kept.

    A call that finds its kept connection closed connects once more. None takes longer than ``timeout_s``, and for data a second more for
    each 4 MiB.

    Args:
        address: Where it listens, and as which node.
        token: The job's secret.
        run_id: Of the run it must serve.
        timeout_s: For an answer that needs no work at the other end.

    Raises:
        AgentError: From every method. ``kind`` "unreachable": it cannot be reached or does not answer in time; "token": one of the two has
            another run token; "other-run", "other-node": it serves something else; "gone": what was asked for will not come (any more);
            "busy": it has too much to do.
        NotFoundError: From every method: it has no such thing.
    """

    def __init__(self, address: PeerAddress, *, token: bytes, run_id: str, timeout_s: float = 10.0) -> None:
        self.address = address
        self.name = f"{address.host}:{address.port}"
        self._token = RunToken(token)
        self._prefix = f"/v1/{quote(run_id, safe='')}/"
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"PeerClient(node {self.address.node} at {self.name})"

    def __enter__(self) -> PeerClient:  # noqa: PYI034 (typing.Self needs Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls under way end with AgentError, now."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                with contextlib.suppress(OSError, AttributeError):  # not connected yet, or not any more
                    connection.sock.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.close()

    def snapshots(self) -> tuple[SnapshotSummary, ...]:
        """Complete snapshots in its memory, copies for other nodes included."""
        _, body = self._exchange("GET", "snapshots")
        return self._decoded(body, tuple[SnapshotSummary, ...])

    def take(self, node: int, key: CheckpointKey) -> RemoteSnapshot:
        """Node ``node``'s share of a snapshot: its own, or a copy that it holds. Held until the result is closed, or is not read for
        a minute."""
        return RemoteSnapshot(self, node, key)

    def read_object(self, key: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on of an object in its store. CorruptionError when the object is shorter."""
        self._read(f"objects/{quote(key, safe='/')}", offset, view)

    def object_nbytes(self, key: str) -> int:
        """Size of an object in its store."""
        _, body = self._exchange("GET", f"objects/{quote(key, safe='/')}?size")
        return self._decoded(body, int)

    def get_manifest(self, key: str) -> bytes:
        """A manifest of its store, by its key there. Proved by the token, unlike data: it is what data are compared with."""
        timeout_s = self._timeout_s + self.object_nbytes(key) / _SLOWEST
        return self._exchange("GET", f"objects/{quote(key, safe='/')}?whole", timeout_s=timeout_s)[1]

    def part(self, key: CheckpointKey, *, wait_s: float = 0.0) -> Part | None:
        """Its own part of a checkpoint once that is durable; None when it is not yet after ``wait_s`` (or earlier: ask again).

        AgentError kind "gone" when it will not come, with the reason.
        """
        status, body = self._exchange("GET", f"parts/{key}?wait={wait_s:.3f}", timeout_s=self._timeout_s + wait_s)
        return None if status == http.client.ACCEPTED else decode("part", body, Part, key=f"part of node {self.address.node} of {key}")

    def post(self, what: str, message: msgspec.Struct) -> None:
        """Tell it something; saying it twice does no harm."""
        self._exchange("POST", what, body=msgspec.msgpack.encode(message))

    def read_held(self, path: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from what ``path`` names (see RemoteSnapshot)."""
        self._read(path, offset, view)

    def ask(self, method: str, path: str, into: type[_Anything], *, timeout_s: float | None = None) -> _Anything:
        """The answer to a request that has no body (see RemoteSnapshot)."""
        _, body = self._exchange(method, path, timeout_s=timeout_s)
        return self._decoded(body, into)

    # -- inside ---------------------------------------------------------------------------------------------------------------
    def _read(self, path: str, offset: int, view: memoryview) -> None:
        flat = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        for at in range(0, len(flat), _READ_NBYTES):
            piece = flat[at : at + _READ_NBYTES]
            self._exchange("GET", path, begin=offset + at, into=piece)

    def _exchange(
        self, method: str, path: str, *, body: bytes = b"", begin: int = 0, into: memoryview | None = None, timeout_s: float | None = None,
    ) -> tuple[int, bytes]:  # fmt: skip
        """One request and its answer, the body of which goes into ``into`` if that is given: (status, body)."""
        nbytes = 0 if into is None else len(into)
        until = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s) + nbytes / _SLOWEST
        while True:
            try:
                return self._try(method, self._prefix + path, body, begin, into, until)
            except AgentError as error:
                if error.kind != "busy" or time.monotonic() + _BUSY_PAUSE_S > until:
                    raise
            threading.Event().wait(_BUSY_PAUSE_S)

    def _try(self, method: str, target: str, body: bytes, begin: int, into: memoryview | None, until: float) -> tuple[int, bytes]:
        fresh = False
        while True:
            connection = None if fresh else self._kept()
            fresh = connection is None
            connection = connection or _Connection(self.address.host, self.address.port)
            connection.deadline.at = until
            with self._lock:
                if self._closed:
                    connection.close()
                    raise self._unreachable("its client here is closed")
                self._busy.add(connection)
            good = False
            try:
                result = self._speak(connection, method, target, body, begin, into)
                good = True
                return result
            except CheckpointError:  # first: some of ours are OSErrors too
                good = True
                raise
            except TimeoutError as error:
                raise self._unreachable("it does not answer in time") from error
            except (OSError, http.client.HTTPException) as error:
                if fresh:
                    raise self._unreachable(f"{error}" or type(error).__name__) from error
                fresh = True  # it had been kept too long: once more, on a new one
            finally:
                self._keep(connection, good=good)

    def _speak(
        self, connection: _Connection, method: str, target: str, body: bytes, begin: int, into: memoryview | None
    ) -> tuple[int, bytes]:
        token, nonce, at, to = self._token, os.urandom(16).hex(), f"{time.time():.3f}", str(self.address.node)
        span = "" if into is None else f"bytes={begin}-{begin + len(into) - 1}"
        headers = {NONCE: nonce, TIME: at, TO: to}
        headers[PROOF] = token.of_request(method, target, span=span, to=to, nonce=nonce, at=at, body=body)
        if span:
            headers["Range"] = span
        if connection.sock is not None:
            connection.sock.settimeout(connection.deadline.left())
        connection.request(method, target, body=body or None, headers=headers)
        response = connection.answer()
        try:
            return response.status, self._body(response, nonce, begin, into)
        finally:
            unread = response.length != 0
            response.close()
            if unread:  # what is left of the answer must not be taken for the next one
                connection.close()

    def _body(self, response: http.client.HTTPResponse, nonce: str, begin: int, into: memoryview | None) -> bytes:
        """Read the answer's body and check that it comes from one who has the token; a bad status becomes the error that it says."""
        proof, span = response.headers.get(PROOF, ""), response.headers.get("Content-Range", "")
        nbytes = response.length
        if nbytes is None or nbytes > _ANSWER_NBYTES:
            raise http.client.HTTPException("the answer has no length, or a wrong one")
        if into is not None and response.status == http.client.PARTIAL_CONTENT:
            if not same(proof, self._token.of_answer(nonce, response.status, span, None)):
                raise self._stranger(response)
            if nbytes != len(into) or span.partition("/")[0] != f"bytes {begin}-{begin + nbytes - 1}":
                raise CorruptionError(f"peer {self.name} has {span or 'nothing'!r} where {len(into):,} bytes from {begin:,} on should be",
                                      kind="bounds", hint="take another copy or an older step")  # fmt: skip
            _fill(response, into)
            return b""
        body = bytearray(nbytes)
        _fill(response, memoryview(body))
        if not same(proof, self._token.of_answer(nonce, response.status, span, bytes(body))):
            raise self._stranger(response)
        if response.status not in (http.client.OK, http.client.ACCEPTED):
            raise self._told(bytes(body), response.status)
        return bytes(body)

    def _stranger(self, response: http.client.HTTPResponse) -> AgentError:
        if response.status == http.client.UNAUTHORIZED:
            return AgentError(f"peer {self.name} refused the run token: it belongs to another job", kind="token",
                              hint="end the other job's agent, or start the job again")  # fmt: skip
        message = f"peer {self.name} does not prove that it has the run token: it belongs to another job, or is no agent"
        return AgentError(message, kind="token", hint="end the other job's agent, or start the job again")

    def _told(self, body: bytes, status: int) -> CheckpointError:
        failed = self._decoded(body, PeerFailed)
        message = f"peer {self.name}: {failed.message}"
        error = rebuild(failed.name, message, step=failed.step, key=failed.key, kind=failed.kind, hint=failed.hint)
        if status == http.client.NOT_FOUND and not isinstance(error, NotFoundError):
            return NotFoundError(error.message, key=error.key, kind=error.kind, hint=error.hint)
        return error

    def _decoded(self, body: bytes, into: type[_Anything]) -> _Anything:
        try:
            return msgspec.msgpack.decode(body, type=into)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise AgentError(f"the answer of peer {self.name} cannot be understood: {error}", kind="protocol",
                             hint="run the same version of everystep on all nodes") from error  # fmt: skip

    def _unreachable(self, why: str) -> AgentError:
        return AgentError(f"peer {self.name} (node {self.address.node}) cannot be reached: {why}", kind="unreachable",
                          hint="see whether its node lives and its agent runs (everystep agent ls there)")  # fmt: skip

    def _kept(self) -> _Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, connection: _Connection, *, good: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if good and connection.sock is not None and not self._closed and len(self._idle) < _IDLE:
                self._idle.append(connection)
                return
        connection.close()


class RemoteSnapshot:
    """A snapshot in another agent's memory, held for reading; a context manager. Thread-safe.

    Attributes:
        part: What it holds; ``objects`` keys are file names.
        file_offsets: Where each of ``part.objects`` begins in the slab.
        nbytes: Size of the slab.
    """

    def __init__(self, client: PeerClient, node: int, key: CheckpointKey) -> None:
        self.node = node
        self.key = key
        self._client = client
        self._path = f"snapshots/{node}/{key}"
        self._lock = threading.Lock()
        taken = self._take()
        self.nbytes = taken.nbytes
        self.file_offsets = taken.file_offsets
        self._part = taken.part
        self._hold = taken.hold
        self.part = decode("part", taken.part, Part, key=f"snapshot {key} of node {node}")
        self._check()

    def __enter__(self) -> RemoteSnapshot:  # noqa: PYI034 (typing.Self needs Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the slab's bytes from ``offset`` on. They are not verified: compare them with the part's digests."""
        hold = self._hold
        try:
            self._client.read_held(f"{self._path}/data?hold={hold}", offset, view)
        except AgentError as error:
            if error.kind != "gone":
                raise
            self._again(hold)  # nobody read for a while; if it is still there it is the same
            self._client.read_held(f"{self._path}/data?hold={self._hold}", offset, view)

    def close(self) -> None:
        """End the hold. If that cannot be said it ends by itself."""
        with contextlib.suppress(CheckpointError):
            self._client.ask("DELETE", f"{self._path}?hold={self._hold}", type(None))

    def _take(self) -> Taken:
        return self._client.ask("GET", self._path, Taken, timeout_s=_TAKE_EXTRA_S)

    def _again(self, hold: str) -> None:
        with self._lock:
            if self._hold != hold:
                return  # another thread was faster
            taken = self._take()
            if taken.part != self._part or taken.file_offsets != self.file_offsets:
                message = f"snapshot {self.key} of node {self.node} is no longer the one that was taken"
                raise AgentError(message, step=self.key.step, kind="gone")
            self._hold = taken.hold

    def _check(self) -> None:
        part, at = self.part, self.file_offsets
        inside = len(at) == len(part.objects) and all(
            begin >= 0 and 0 <= stored.header_nbytes <= stored.nbytes and begin + stored.nbytes <= self.nbytes
            for begin, stored in zip(at, part.objects, strict=False)
        )
        if not inside or (part.step, part.attempt, part.node) != (self.key.step, self.key.attempt, self.node):
            self.close()
            raise CorruptionError(f"peer {self._client.name} describes snapshot {self.key} of node {self.node} as what it cannot be",
                                  step=self.key.step, kind="part", hint="take another copy or an older step")  # fmt: skip


def ranges_to_verify(part: Part, file_offsets: tuple[int, ...]) -> Iterator[tuple[int, int, str]]:
    """(begin in the slab, length, digest) of each header and each block of the part's shards, in no order.

    CorruptionError unless all of them lie inside their files and each shard has as many digests as it has blocks.
    """
    for begin, stored in zip(file_offsets, part.objects, strict=True):
        yield begin, stored.header_nbytes, stored.header_digest
    for shard in part.shards:
        end = part.objects[shard.object].nbytes if 0 <= shard.object < len(part.objects) else -1
        if shard.offset < 0 or shard.nbytes < 0 or shard.offset + shard.nbytes > end:
            raise CorruptionError(f"a shard of the part of node {part.node} lies outside of its file", step=part.step, kind="bounds")
        if not 0 <= shard.block <= BLOCK_NBYTES or len(shard.digests) != digest_count(shard.nbytes, shard.block):
            raise CorruptionError(f"a shard of the part of node {part.node} has {len(shard.digests)} digests", step=part.step, kind="part")
        begin = file_offsets[shard.object] + shard.offset
        for at, nbytes, word in shard.blocks():
            yield begin + at, nbytes, word
