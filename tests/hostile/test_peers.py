from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import os
import random
import socket
import threading
import time

import msgspec
import pytest

from everystep.agent import peerserver, talk
from everystep.agent.peers import PeerClient
from everystep.agent.talk import NONCE, PROOF, TIME, TO, SealedSteps, SettledSteps, Verdict
from everystep.errors import CheckpointError, CorruptionError
from everystep.repository import CheckpointKey
from everystep.testing.sides import PlainJob

TOKEN = b"0123456789abcdef-of-this-job"
RUN = "a1b2c3"
KEY = CheckpointKey(7, 1)
MIB = 1 << 20
PREFIX = f"/v1/{RUN}/"


@pytest.fixture
def job():
    """Two nodes; node 1 has a snapshot, and an object."""
    with PlainJob(2, TOKEN, run_id=RUN) as job:
        job.sides[1].add(KEY, 2 * MIB)
        job.sides[1].objects = {"data/k/f": b"0123456789"}
        yield job


@pytest.fixture
def alive(job):
    """Says whether node 1 still serves one who has the token."""

    def ask():
        with PeerClient(job.addresses[1], token=TOKEN, run_id=RUN, timeout_s=5) as client:
            return [one.step for one in client.snapshots()] == [7]

    yield ask
    assert ask()


def raw(job, data, *, timeout_s=5.0):
    """Send bytes, then read all that comes; what the server made of it."""
    got = b""
    with socket.create_connection((job.addresses[1].host, job.addresses[1].port), timeout=timeout_s) as sock:
        with contextlib.suppress(OSError):
            for piece in data if isinstance(data, list) else [data]:
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while piece := sock.recv(65536):
                got += piece
    return got


def signed_headers(method, target, *, body=b"", span="", token=TOKEN, to="1"):
    nonce, at = os.urandom(16).hex(), f"{time.time():.3f}"
    fields = ["request", method, target, span, to, nonce, at, hashlib.sha256(body).hexdigest()]
    coded = [field.encode("utf-8", "surrogateescape") for field in fields]
    text = b"".join(b"%d:%s" % (len(field), field) for field in coded)
    headers = {NONCE: nonce, TIME: at, TO: to, PROOF: hmac.new(token, text, hashlib.sha256).hexdigest()}
    return {**headers, "Range": span} if span else headers


def signed(job, method, target, *, body=b"", span="", token=TOKEN):
    """A request with a right proof, whatever it says: (status, body)."""
    connection = http.client.HTTPConnection(job.addresses[1].host, job.addresses[1].port, timeout=5)
    with contextlib.closing(connection):
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in signed_headers(method, target, body=body, span=span, token=token).items():
            connection.putheader(name, value)
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        answer = connection.getresponse()
        return answer.status, answer.read()


GARBAGE = [
    b"",
    b"\r\n\r\n",
    b"\0" * 1000,
    b"GET",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\n\n",
    b"get / HTTP/1.1\r\n\r\n",
    b"GET http://elsewhere/ HTTP/1.1\r\n\r\n",
    b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\n\r\n",
    b"GET /v1/a1b2c3/snapshots HTTP/1.1\r\nno colon here\r\n\r\n",
    b"GET /v1/a1b2c3/snapshots HTTP/1.1\r\n: empty\r\n\r\n",
    b"GET /v1/a1b2c3/snapshots HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/a1b2c3/sealed HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n",
    b"POST /v1/a1b2c3/sealed HTTP/1.1\r\nContent-Length: \xb2\r\n\r\nab",
    b"POST /v1/a1b2c3/sealed HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\nabcde",
    b"POST /v1/a1b2c3/sealed HTTP/1.1\r\nContent-Length: 500\r\n\r\nshort",
    b"POST /v1/a1b2c3/sealed HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    b"POST /v1/a1b2c3/sealed HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFF\r\n",
    b"POST /v1/a1b2c3/sealed HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    b"GET /v1/a1b2c3/snapshots HTTP/1.1\r\nExpect: 100-continue\r\n\r\n",
    "GET /v1/a1b2c3/sn\u00e4pshots HTTP/1.1\r\n\r\n".encode(),
    b"GET /%zz%00%ff HTTP/1.1\r\nX-Everystep-Proof: \xff\xfe\r\n\r\n",
    b"GET //[::1 HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 500,
]


@pytest.mark.parametrize("data", GARBAGE)
def test_garbage(job, alive, data):
    """What is no request of ours is refused without an answer of value, and the server serves on."""
    held = []
    job.sides[1].on_hold = held.append
    answer = raw(job, data)
    for one in answer.split(b"HTTP/1.1 ")[1:]:
        assert one[:1] in (b"4", b"5") or one[:3] == b"100", answer
    assert held == []
    assert job.sides[1].told == []


def test_random_bytes(job, alive):
    """Two hundred connections with random bytes, and with requests of which some bytes are changed, do no harm."""
    rng = random.Random(7)
    whole = b"GET " + PREFIX.encode() + b"snapshots HTTP/1.1\r\n"
    for turn in range(200):
        data = bytearray(rng.randbytes(rng.randrange(300)))
        if turn % 2:
            data = bytearray(whole)
            for name, value in signed_headers("GET", PREFIX + "snapshots").items():
                data += f"{name}: {value}\r\n".encode()
            data += b"\r\n"
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
        answer = raw(job, bytes(data))
        if answer.startswith(b"HTTP/1.1 200"):  # the change was in what does not count, such as a blank or the case of a name
            assert turn % 2


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"b" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 50_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nA: b\r\n" + b" c\r\n" * 50_000 + b"\r\n",
        b"A" * 1_000_000,
        b"POST / HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n" + b"x" * 2_000_000,
    ],
)
def test_huge_headers_and_bodies(job, alive, data):
    """Long lines, many headers and large bodies are cut off by their bounds (400, 413, 414)."""
    answer = raw(job, data)
    assert not answer or answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 414")


@pytest.mark.parametrize(
    "path",
    [
        "objects/data/../../etc/passwd",
        "objects/data/..%2f..%2fetc/passwd",
        "objects/%2e%2e/%2e%2e/etc/passwd",
        "objects/data/%2e%2e/x",
        "objects//etc/passwd",
        "objects/data//x",
        "objects/data/./x",
        "objects/data/x%00y",
        "objects/data\\..\\x",
        "objects/data%5c..%5cx",
        "objects/data/%ff%fe",
        "objects/data",
        "objects/",
        "objects",
        "objects/run.json",
        "objects/alive/1",
        "objects/pins/x",
        "objects/DATA/k/f",
        "snapshots/1/../../x",
        "snapshots/1/000000000007-0001/../data",
        "snapshots/1/7-1",
        "snapshots/-1/000000000007-0001",
        "snapshots/1e0/000000000007-0001",
        "snapshots/%C2%B2/000000000007-0001",
        "snapshots/99999999999999999999/000000000007-0001",
        "snapshots/1/" + "9" * 400 + "-0001",
        "parts/../x",
        "parts/",
        "../" + RUN + "/snapshots",
        "",
        "snapshots/",
        "snapshots/1",
    ],
)
def test_paths_lead_nowhere_else(job, alive, path):
    """A path that is none of ours is 404, also from one who has the token, and the store is not asked for it."""
    asked = []
    job.sides[1].object_nbytes = asked.append
    status, _ = signed(job, "GET", PREFIX + path.encode().decode("latin-1"), span="bytes=0-1")
    assert status == 404
    assert asked == []


@pytest.mark.parametrize(
    ("span", "status"),
    [
        ("bytes=0-9", 206), ("bytes=9-9", 206), ("bytes=0-10", 416), ("bytes=10-10", 416), ("bytes=5-4", 416), ("bytes=-5", 416),
        ("bytes=0-", 416), ("bytes=0-1,3-4", 416), ("bytes=" + "9" * 30 + "-" + "9" * 31, 416), ("lines=0-1", 416), ("bytes=\u00b2-3", 416),
        ("bytes=0x0-0x1", 416), ("bytes=+0-+1", 416), ("bytes=0-999999999999999999", 416), ("", 400),
    ],
)  # fmt: skip
def test_ranges_out_of_bounds(job, alive, span, status):
    """Ranges are answered exactly, or refused: never cut, never beyond the end."""
    span = span.encode().decode("latin-1")
    assert signed(job, "GET", PREFIX + "objects/data/k/f", span=span)[0] == status
    with PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as client, client.take(1, KEY) as remote:
        target = f"{PREFIX}snapshots/1/{KEY}/data?hold={remote._hold}"
        moved = span.replace("bytes=0-10", f"bytes=0-{2 * MIB}").replace("bytes=10-10", f"bytes={2 * MIB}-{2 * MIB}")
        assert signed(job, "GET", target, span=moved)[0] == status
        for begin, nbytes in ((2 * MIB - 1, 2), (2 * MIB, 1), (1 << 50, 5)):
            with pytest.raises(CorruptionError):
                remote.read_into(begin, memoryview(bytearray(nbytes)))


def test_range_longer_than_a_request_may_be(job, alive):
    """More than 64 MiB in one range is refused."""
    assert signed(job, "GET", PREFIX + "objects/data/k/f", span=f"bytes=0-{talk.RANGE_NBYTES}")[0] == 416


@pytest.mark.parametrize("query", ["", "hold=", "hold=x", "hold=%00", "hold=" + "a" * 32, "hold=a&hold=b", "x" * 5000, "&" * 150, "hold"])
def test_holds_that_are_not_there(job, alive, query):
    """Data of a hold that is not there, or is another snapshot's, are 410; ending it does nothing."""
    assert signed(job, "GET", f"{PREFIX}snapshots/1/{KEY}/data?{query}", span="bytes=0-1")[0] == 410
    assert signed(job, "DELETE", f"{PREFIX}snapshots/1/{KEY}?{query}")[0] == 200
    with PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as client, client.take(1, KEY) as remote:
        other = CheckpointKey(8, 1)
        assert signed(job, "GET", f"{PREFIX}snapshots/1/{other}/data?hold={remote._hold}", span="bytes=0-1")[0] == 410
        assert signed(job, "DELETE", f"{PREFIX}snapshots/1/{other}?hold={remote._hold}")[0] == 200
        remote.read_into(0, memoryview(bytearray(5)))


@pytest.mark.parametrize("path", ["sealed", "settled", "complete"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xc1", b"\xff" * 100, b"{}", b"\x93" * 20_000, msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"node": "x"}),
        msgspec.msgpack.encode({"node": 1, "attempt": 1, "steps": ["a"], "settled": "x"}), msgspec.msgpack.encode({"attempt": 1, "complete": 1.5}),
    ],
)  # fmt: skip
def test_messages_that_are_none(job, alive, path, body):
    """Bodies that are no messages are 400 (or 421 where they would not be taken anyway), and change nothing."""
    assert signed(job, "POST", PREFIX + path, body=body)[0] in (400, 421)
    assert job.sides[1].told == []


def test_numbers_that_cannot_be_meant(job, alive):
    """Steps and attempts at the ends of what numbers there are do no harm to the lead or the others."""
    with PeerClient(job.addresses[0], token=TOKEN, run_id=RUN) as lead, PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as other:
        huge = (1 << 63) - 1
        for client, what, message in (
            (lead, "sealed", SealedSteps(node=1, attempt=0, steps=tuple(range(2000)))),
            (lead, "sealed", SealedSteps(node=1, attempt=1, steps=(-5, huge), failed=((-1, "x" * 100_000),), wanted=(huge,))),
            (lead, "settled", SettledSteps(node=1, settled=((huge, 1, ""), (-1, -1, "e")))),
            (other, "complete", Verdict(attempt=-1, complete=5)),
        ):
            with contextlib.suppress(CheckpointError):
                client.post(what, message)
        job.nodes[0].sealed(CheckpointKey(8, 1))
        assert lead.snapshots() == ()


def test_quiet_connections_take_no_threads(job, alive):
    """Hundreds of connections that say nothing, or half a line, keep nobody else from being served."""
    address = (job.addresses[1].host, job.addresses[1].port)
    quiet = [socket.create_connection(address, timeout=5) for _ in range(300)]
    try:
        began = time.monotonic()
        assert alive()
        assert time.monotonic() - began < 3
    finally:
        for sock in quiet:
            sock.close()


def test_half_requests_end_in_time(job, monkeypatch):
    """Connections that send half a request, or drip it, are cut off after the time that a request may take, and threads are free again."""
    monkeypatch.setattr(peerserver, "_REQUEST_S", 0.5)
    address = (job.addresses[1].host, job.addresses[1].port)
    drips = [socket.create_connection(address, timeout=5) for _ in range(2 * peerserver.THREADS)]
    stop = threading.Event()

    def drip():
        while not stop.wait(0.05):
            for sock in drips:
                with contextlib.suppress(OSError):
                    sock.sendall(b"A")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with PeerClient(job.addresses[1], token=TOKEN, run_id=RUN, timeout_s=10) as client:
            assert [one.step for one in client.snapshots()] == [7]
    finally:
        stop.set()
        thread.join()
        for sock in drips:
            sock.close()


def test_threads_stay_few(job, alive):
    """However many ask at once, the server's threads stay as many as they are."""
    most = []

    def ask():
        for _ in range(5):
            with contextlib.suppress(CheckpointError), PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as client:
                client.snapshots()
                most.append(sum(thread.name.startswith("CP Server") for thread in threading.enumerate()))

    askers = [threading.Thread(target=ask) for _ in range(40)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join(timeout=20)
    assert len(most) == 200
    assert max(most) == len(job.nodes) * peerserver.THREADS
