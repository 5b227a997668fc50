"""Where other agents and trainers knock: HTTP/1.1 on cheroot's threads, every request and answer proved by the run token.

Theory of operation. A connection waits in cheroot's selector, not in a thread, until it says something; then it has ``_REQUEST_S`` to say
all of it. Threads, connections, and sizes of requests are bounded; of the threads only some may send data or wait for somebody, so that a
peer that reads slowly keeps nobody from saying that a step is sealed. Data go from the slab to the socket as they are: cheroot's own writer
would copy them several times over.

A request is refused when its proof is wrong, its time is more than ``WINDOW_S`` off, or its nonce has been seen within that time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import http
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from cheroot.makefile import MakeFile, StreamReader
from cheroot.server import Gateway, HTTPConnection, HTTPServer

from everystep.agent.talk import NONCE, PROOF, RANGE_NBYTES, TIME, TO, WINDOW_S, PeerFailed, RunToken, same
from everystep.errors import AgentError, CheckpointError, CorruptionError, NotFoundError

_log = logging.getLogger(__name__)
THREADS = 16
_SENDING, _WAITING = 8, 4
CONNECTIONS = 1024
_QUEUE = 256
_HEADER_NBYTES = 16 << 10
_BODY_NBYTES = 1 << 20
_REQUEST_S = 10.0
_PIECE_S = 20.0
PIECE_NBYTES = 4 << 20
"""Data are sent in pieces of this size; a piece that the peer does not take within ``_PIECE_S`` ends the connection."""
_IDLE_S = 60.0
_SENDING_WAIT_S = 5.0
_TOLD_S = 60.0
_TOLD_PEERS = 256
_SPAN = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_STATUS = {
    "gone": http.HTTPStatus.GONE, "busy": http.HTTPStatus.SERVICE_UNAVAILABLE, "token": http.HTTPStatus.UNAUTHORIZED,
    "replay": http.HTTPStatus.FORBIDDEN, "clock": http.HTTPStatus.FORBIDDEN, "protocol": http.HTTPStatus.BAD_REQUEST,
    "other-node": http.HTTPStatus.MISDIRECTED_REQUEST, "other-run": http.HTTPStatus.MISDIRECTED_REQUEST,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request whose proof is right. ``target``: path and query as they were sent; ``span``: first byte and one past the last."""

    method: str
    target: str
    span: tuple[int, int] | None
    body: bytes
    peer: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What to say. With ``pieces`` the answer is the bytes ``span`` of ``total``; they are closed (if generators) in any case."""

    status: int = 200
    body: bytes = b""
    span: tuple[int, int] = (0, 0)
    total: int = 0
    pieces: Iterable[memoryview] | None = None


def answer_of(error: CheckpointError) -> Answer:
    """The answer that makes this error again on the other side."""
    if isinstance(error, NotFoundError):
        status = http.HTTPStatus.NOT_FOUND
    elif isinstance(error, CorruptionError) and error.kind == "bounds":
        status = http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    else:
        status = _STATUS.get(error.kind, http.HTTPStatus.INTERNAL_SERVER_ERROR)
    failed = PeerFailed(name=type(error).__name__, message=error.message, kind=error.kind, hint=error.hint, step=error.step, key=error.key)
    return Answer(status=status, body=msgspec.msgpack.encode(failed))


class _Nonces:
    """Those seen lately. Only proven requests are remembered, so a stranger cannot fill it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: set[bytes] = set()
        self._old: set[bytes] = set()
        self._turn_at = time.monotonic() + 2 * WINDOW_S

    def seen(self, nonce: bytes) -> bool:
        """Whether it has been seen within the last ``2 * WINDOW_S``; now it has."""
        now = time.monotonic()
        with self._lock:
            if now >= self._turn_at:
                self._old, self._new = (self._new if now < self._turn_at + 2 * WINDOW_S else set()), set()
                self._turn_at = now + 2 * WINDOW_S
            if nonce in self._new or nonce in self._old:
                return True
            self._new.add(nonce)
            return False


class _TimedSocket:
    """A connection's socket, read until a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.until = float("inf")

    def recv_into(self, buffer: memoryview) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(min(left, _REQUEST_S))
        return self._sock.recv_into(buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _PeerConnection(HTTPConnection):
    def __init__(self, server: _Server, sock: socket.socket, makefile: object = None) -> None:
        self._timed = _TimedSocket(sock)
        super().__init__(server, sock, self._makefile)

    def _makefile(self, sock: socket.socket, mode: str, nbytes: int) -> object:
        return StreamReader(self._timed, mode, nbytes) if "r" in mode else MakeFile(sock, mode, nbytes)

    def communicate(self) -> bool:
        """One request and its answer."""
        self._timed.until = time.monotonic() + _REQUEST_S
        return bool(super().communicate())  # type: ignore[no-untyped-call]


class _Server(HTTPServer):
    """cheroot's, with all its limits set, its log in ours, and quiet connections in the selector."""

    ConnectionClass = _PeerConnection
    timeout = int(_IDLE_S)
    keep_alive_conn_limit = CONNECTIONS
    max_request_header_size = _HEADER_NBYTES
    max_request_body_size = _BODY_NBYTES
    request_queue_size = 128
    shutdown_timeout = 1

    def __init__(self, host: str, port: int, peers: PeerServer) -> None:
        super().__init__((host, port), _Gateway, minthreads=THREADS, maxthreads=THREADS, server_name="everystep")
        self.requests._queue.maxsize = _QUEUE  # noqa: SLF001 (the constructor has no argument for it)
        self.requests._queue_put_timeout = 0.5  # noqa: SLF001 (as above: the thread that accepts must not stand still)
        self.peers = peers
        self.refused: OSError | None = None

    def bind(self, family: int, type: int, proto: int = 0) -> Any:
        """For ``port`` 0 too, so that the next agent gets this port while connections of this one linger."""
        try:
            sock = super().bind(family, type, proto)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return sock
        except OSError as error:
            self.refused = error
            raise

    def process_conn(self, conn: Any) -> None:
        if conn.last_used is not None:
            super().process_conn(conn)
        elif self.can_add_keepalive_connection:
            self.put_conn(conn)
        else:
            conn.close()

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        """Where cheroot would print to stderr."""
        bad = level >= logging.ERROR
        _log.log(level if bad else logging.DEBUG, "peer connection: %s", msg, exc_info=traceback and bad)


class _Gateway(Gateway):
    def respond(self) -> None:
        """Called by cheroot with a parsed request."""
        self.req.server.peers.respond(self.req)


class PeerServer:
    """Listens on one address until it is closed.

    Args:
        token: The job's secret; ``retoken`` sets another.
        host: The only address to listen on.
        port: 0: any free one.
        serve: Answers a request whose proof is right; any CheckpointError becomes an answer. Called in many threads.

    Raises:
        AgentError: ``kind`` "port": the address cannot be listened on.
    """

    def __init__(self, token: RunToken, host: str, port: int, *, serve: Callable[[Asked], Answer]) -> None:
        if not host:
            raise AgentError("no address to listen on for peers is given", kind="port")
        if os.environ.get("LISTEN_PID"):  # cheroot would take that socket, whatever its address
            raise AgentError("LISTEN_PID is set: peers would be served on a socket of systemd's", kind="port", hint="unset LISTEN_PID")
        self.node: int | None = None
        """Which node this is, once that is known: a request meant for another is refused."""
        self.host = host
        self._token = token
        self._serve = serve
        self._nonces = _Nonces()
        self._sending = threading.BoundedSemaphore(_SENDING)
        self._waiting = threading.BoundedSemaphore(_WAITING)
        self._told: dict[str, float] = {}
        self._lock = threading.Lock()
        self._server = _Server(host, port, self)
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="everystep-peers", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise self._not_listening(host, port) from self._failed
        self.port = int(self._server.bind_addr[1])

    def retoken(self, token: RunToken) -> None:
        """Another job of the run: from now on its token counts and no other."""
        self._token = token

    @contextlib.contextmanager
    def may_wait(self) -> Any:
        """Gives whether the thread may wait for something; only a few may at a time."""
        got = self._waiting.acquire(blocking=False)
        try:
            yield got
        finally:
            if got:
                self._waiting.release()

    def close(self) -> None:
        """Close all connections and end the threads."""
        stopping = threading.Thread(target=self._server.stop, name="everystep-peers-stop", daemon=True)
        stopping.start()
        while stopping.is_alive():
            with contextlib.suppress(OSError):  # wakes the selector, which looks every half second only
                socket.create_connection((self.host, self.port), timeout=0.2).close()
            stopping.join(timeout=0.02)
        self._thread.join(timeout=5.0)

    # -- a request --------------------------------------------------------------------------------------------------------------
    def respond(self, req: Any) -> None:
        """Check the request, have it answered, and send that."""
        peer = f"{req.conn.remote_addr}:{req.conn.remote_port}"
        token, nonce = self._token, _text(req, NONCE)
        body = _read_body(req)
        try:
            answer = self._serve(self._proven(req, body, token, peer))
        except CheckpointError as error:
            if error.kind == "token":
                self._tell(req.conn.remote_addr, "refused the run token of %s: it belongs to another job (%s)", peer, error.message)
            answer = answer_of(error)
        except Exception as error:  # the thread's top: whatever it is, the peer is told, and the server lives
            _log.exception("a request of peer %s failed", peer)
            answer = answer_of(AgentError(f"{type(error).__name__}: {error}", kind="unexpected", hint="see the log of its agent"))
        try:
            self._send(req, answer, token, nonce)
        finally:
            close = getattr(answer.pieces, "close", None)
            if close is not None:
                close()

    def _proven(self, req: Any, body: bytes | None, token: RunToken, peer: str) -> Asked:
        if body is None:
            raise AgentError("a request has no length, or a wrong one", kind="protocol")
        method, target = req.method.decode("latin-1"), req.uri.decode("latin-1")
        nonce, at, to, span = (_text(req, name) for name in (NONCE, TIME, TO, "Range"))
        proof = token.of_request(method, target, span=span, to=to, nonce=nonce, at=at, body=body)
        if not same(_text(req, PROOF), proof):
            raise AgentError("a request does not prove that its sender has the run token", kind="token")
        # From here on it is somebody who has the token, or somebody who repeats what such a one has said.
        try:
            late_s, spoken = time.time() - float(at), bytes.fromhex(nonce)
        except ValueError:
            raise AgentError("a request has no time or no nonce", kind="protocol") from None
        if not abs(late_s) <= WINDOW_S:
            raise AgentError(f"the clocks differ by {late_s:+.0f} s, more than the {WINDOW_S:.0f} s allowed", kind="clock",
                             hint="set the clocks of the nodes by NTP")  # fmt: skip
        if self.node is not None and to != str(self.node):
            raise AgentError(f"this is node {self.node}, not {to:.20}", kind="other-node", hint="start the job again")
        if len(spoken) < 8 or self._nonces.seen(spoken):
            self._tell(req.conn.remote_addr, "refused a request of %s that was made before (%s)", peer, target)
            raise AgentError("a request is repeated", kind="replay")
        return Asked(method=method, target=target, span=_span(span), body=body, peer=peer)

    def _send(self, req: Any, answer: Answer, token: RunToken, nonce: str) -> None:
        if answer.pieces is not None and not self._sending.acquire(timeout=_SENDING_WAIT_S):
            answer = answer_of(AgentError("too many peers read at the same time", kind="busy"))
        try:
            data = answer.pieces
            begin, end = answer.span
            span = f"bytes {begin}-{end - 1}/{answer.total}" if data is not None else ""
            nbytes = end - begin if data is not None else len(answer.body)
            status = http.HTTPStatus(http.HTTPStatus.PARTIAL_CONTENT if data is not None else answer.status)
            proof = token.of_answer(nonce, int(status), span, None if data is not None else answer.body)
            req.status = f"{int(status)} {status.phrase}".encode()
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(nbytes), PROOF: proof}
            if span:
                headers["Content-Range"] = span
            req.outheaders = [(name.encode(), value.encode()) for name, value in headers.items()]
            req.conn.socket.settimeout(_PIECE_S)
            req.ensure_headers_sent()
            for piece in (memoryview(answer.body),) if data is None else data:
                for at in range(0, len(piece), PIECE_NBYTES):
                    # The socket's own sendall: no copies, and the GIL is free meanwhile.
                    req.conn.socket.settimeout(_PIECE_S)
                    req.conn.socket.sendall(piece[at : at + PIECE_NBYTES])
        except CheckpointError as error:  # an object's bytes cannot be read: the answer ends early, and the connection with it
            _log.warning("an answer to a peer ends early: %s", error)
            raise ConnectionResetError(errno.ECONNRESET, "the answer ends early") from error
        finally:
            if answer.pieces is not None:
                self._sending.release()

    # -- inside ------------------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._server.prepare()
        except BaseException as error:  # told to the thread that waits
            self._failed = error
            return
        finally:
            self._ready.set()
        try:
            self._server.serve()
        except Exception:  # the thread's top
            _log.exception("peers are not served any more")

    def _not_listening(self, host: str, port: int) -> AgentError:
        why = self._server.refused or self._failed
        number = why.errno if isinstance(why, OSError) else None
        taken = f"port {port} is taken" if number == errno.EADDRINUSE else os.strerror(number) if number else str(why)
        hint = "another job's agent may listen there: end it (everystep agent ls), or take another port"
        if number != errno.EADDRINUSE:
            hint = "give an address of this node"
        return AgentError(f"cannot listen for peers on {host}:{port}: {taken}", kind="port", errno=number, hint=hint)

    def _tell(self, host: str, text: str, *values: object) -> None:
        """One line a minute for each peer: nobody shall fill the log."""
        now = time.monotonic()
        with self._lock:
            if now - self._told.get(host, -_TOLD_S) < _TOLD_S:
                return
            if len(self._told) >= _TOLD_PEERS:
                self._told.clear()
            self._told[host] = now
        _log.warning(text, *values)


def _read_body(req: Any) -> bytes | None:
    """The request's body; None where its length is not told as we want it, and then the connection ends after the answer."""
    length: bytes = req.inheaders.get(b"Content-Length", b"0")
    if req.chunked_read or not length.isdigit() or int(length) > _BODY_NBYTES:
        req.close_connection = True
        return None
    body: bytes = req.rfile.read(int(length)) if int(length) else b""
    if len(body) != int(length):
        raise ConnectionResetError(errno.ECONNRESET, f"the request ends {int(length) - len(body)} bytes early")
    return body


def _text(req: Any, name: str) -> str:
    value: bytes = req.inheaders.get(name.title().encode(), b"")
    return value.decode("latin-1")


def _span(text: str) -> tuple[int, int] | None:
    """(first, one past the last) of a Range header; CorruptionError kind "bounds" for another kind of range, or one that is too long."""
    if not text:
        return None
    found = _SPAN.fullmatch(text)
    begin, end = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
    if begin >= end or end - begin > RANGE_NBYTES:
        raise CorruptionError(f"the range {text!r:.80} is none that is served", kind="bounds")
    return begin, end


def checked_span(span: tuple[int, int] | None, total: int) -> tuple[int, int]:
    """The range asked for, if it lies within ``total`` bytes."""
    if span is None:
        raise AgentError("data are given by ranges", kind="protocol")
    if span[1] > total:
        raise CorruptionError(f"bytes {span[0]:,} to {span[1]:,} are not among the {total:,} that there are", kind="bounds")
    return span
