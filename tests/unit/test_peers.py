from __future__ import annotations

import contextlib
import copy
import http.client
import logging
import os
import pickle
import socket
import threading
import time

import msgspec
import pytest

from everystep.agent import peers, peerserver, talk
from everystep.agent.messages import PeerAddress
from everystep.agent.nodes import Nodes
from everystep.agent.peers import PeerClient
from everystep.agent.talk import NONCE, PROOF, TIME, TO, RunToken, Verdict
from everystep.errors import AgentError, CapacityError, ConfigError, CorruptionError, NotFoundError
from everystep.repository import CheckpointKey
from everystep.testing.sides import PlainJob, PlainSide, plain_part

TOKEN = b"0123456789abcdef-of-this-job"
OTHER_TOKEN = b"the-token-of-another-job-4711"
RUN = "a1b2c3"
KEY = CheckpointKey(7, 1)
MIB = 1 << 20


@pytest.fixture
def job():
    """Two nodes."""
    with PlainJob(2, TOKEN, run_id=RUN) as job:
        yield job


@pytest.fixture
def client(job):
    """Asks node 1."""
    with PeerClient(job.addresses[1], token=TOKEN, run_id=RUN, timeout_s=5.0) as client:
        yield client


def signed(address, method, target, *, token=TOKEN, body=b"", span="", nonce=None, at=None, to=None, change=None):
    """One request made by hand from RFC and design, not with the client: (status, headers, body)."""
    import hashlib
    import hmac

    nonce = os.urandom(16).hex() if nonce is None else nonce
    at = f"{time.time():.3f}" if at is None else at
    to = str(address.node) if to is None else to
    fields = ["request", method, target, span, to, nonce, at, hashlib.sha256(body).hexdigest()]
    text = b"".join(b"%d:%s" % (len(field), field.encode()) for field in fields)
    headers = {NONCE: nonce, TIME: at, TO: to, PROOF: hmac.new(token, text, hashlib.sha256).hexdigest()}
    if span:
        headers["Range"] = span
    if change:
        method, target, body = change(method, target, body, headers)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=5)
    with contextlib.closing(connection):
        connection.request(method, target, body=body or None, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def test_snapshot_is_read_whole_and_in_ranges(job, client):
    """What a peer holds comes over byte for byte, in whole and in any range, into the caller's memory."""
    data = job.sides[1].add(KEY, 21 * MIB + 4096)
    assert [(one.node, one.step, one.nbytes) for one in client.snapshots()] == [(1, 7, len(data))]
    with client.take(1, KEY) as remote:
        assert remote.nbytes == len(data)
        assert remote.part.tensors[0].name == "model.w1"
        got = bytearray(len(data))
        remote.read_into(0, memoryview(got))
        assert got == data
        for begin, end in ((0, 1), (4095, 4097), (len(data) - 1, len(data)), (MIB - 7, 17 * MIB + 3)):
            got = bytearray(end - begin)
            remote.read_into(begin, memoryview(got))
            assert got == data[begin:end]
        remote.read_into(5, memoryview(bytearray()))
        assert job.sides[1].counts.get("released", 0) == 0
    job.sides[1].wait_count("released")


def test_views_of_other_types_are_filled(job, client):
    """A view of floats in two dimensions is filled as its bytes."""
    data = job.sides[1].add(KEY)
    got = bytearray(48)
    with client.take(1, KEY) as remote:
        remote.read_into(8, memoryview(got).cast("f", (3, 4)))
    assert got == data[8:56]


def test_many_threads_share_a_client(job, client):
    """Eight threads read through one client at the same time, each its own bytes."""
    data = job.sides[1].add(KEY, 16 * MIB)
    wrong = []
    with client.take(1, KEY) as remote:

        def read(number):
            for turn in range(8):
                begin = (number * 8 + turn) * (MIB // 4) + number
                got = bytearray(MIB // 4)
                remote.read_into(begin, memoryview(got)[: min(len(got), len(data) - begin)])
                if got[: len(data) - begin] != data[begin : begin + len(got)]:
                    wrong.append((number, turn))

        threads = [threading.Thread(target=read, args=(number,)) for number in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_kept_connections_are_used_again_and_lost_ones_replaced(job, client, monkeypatch):
    """Requests in a row use one connection; one that the server has closed meanwhile is replaced without an error."""
    made = []
    connect = peers._Connection.connect

    def counted(self):
        if threading.current_thread() is threading.main_thread():  # the nodes talk too
            made.append(self)
        connect(self)

    monkeypatch.setattr(peers._Connection, "connect", counted)
    for _ in range(5):
        client.snapshots()
    assert len(made) == 1
    made[0].sock.shutdown(socket.SHUT_RDWR)  # as a server that ends does to connections kept too long
    client.snapshots()
    assert len(made) == 2


def test_what_is_not_there(job, client):
    """Snapshots, objects and routes that are not there are NotFoundError and name the peer and the thing."""
    with pytest.raises(NotFoundError, match=r"127\.0\.0\.2:\d+.*000000000007-0001"):
        client.take(1, KEY)
    with pytest.raises(NotFoundError, match="copy of snapshot"):
        client.take(0, KEY)
    with pytest.raises(NotFoundError, match="data/x/y"):
        client.read_object("data/x/y", 0, memoryview(bytearray(1)))
    with pytest.raises(NotFoundError):
        client.post("nothing", Verdict(attempt=1))


def test_objects_of_the_store(job, client):
    """Objects of the peer's store are read by key in ranges, manifests whole; bytes beyond the end are an error, not zeros."""
    data = os.urandom(9 * MIB)
    job.sides[1].objects = {"data/000000000007-0001/my model-1.safetensors": data, "manifests/k.json": b"{}", "manifests/empty": b""}
    key = "data/000000000007-0001/my model-1.safetensors"
    assert client.object_nbytes(key) == len(data)
    got = bytearray(5 * MIB)
    client.read_object(key, 3 * MIB + 1, memoryview(got))
    assert got == data[3 * MIB + 1 : 8 * MIB + 1]
    assert client.get_manifest("manifests/k.json") == b"{}"
    assert client.get_manifest("manifests/empty") == b""
    with pytest.raises(CorruptionError) as caught:
        client.read_object(key, len(data) - 5, memoryview(bytearray(6)))
    assert caught.value.kind == "bounds"
    client.snapshots()  # the connection is still good


def test_manifest_changed_on_its_way_is_refused(job, client, monkeypatch):
    """A manifest is proved by the run token, since everything else is compared with it: one that somebody has altered is not taken."""
    side = job.sides[1]
    side.objects = {"manifests/k.json": b"x" * (5 * MIB)}
    assert client.get_manifest("manifests/k.json") == side.objects["manifests/k.json"]
    plain = peers._fill

    def altered(response, view):
        plain(response, view)
        if len(view) > MIB:
            view[7] ^= 1

    monkeypatch.setattr(peers, "_fill", altered)
    with pytest.raises(AgentError) as caught:
        client.get_manifest("manifests/k.json")
    assert caught.value.kind == "token"


def test_failing_store_ends_the_answer_early(job, client):
    """A store that fails in the middle of an answer ends it: the reader sees an error, not short or wrong data."""
    side = job.sides[1]
    side.objects = {"data/k/f": bytes(9 * MIB)}

    def read(key, offset, view):
        if offset:
            raise CapacityError("the disk is on fire")

    side.read_object = read
    with pytest.raises(AgentError) as caught:
        client.read_object("data/k/f", 0, memoryview(bytearray(9 * MIB)))
    assert caught.value.kind == "unreachable"
    assert "early" in str(caught.value)


def test_parts(job, client):
    """A part that is not durable yet is None, then it is there, also for one who waits; one that will not come says why."""
    side, nodes = job.sides[1], job.nodes[1]
    assert client.part(KEY) is None
    part = plain_part(bytes(8192), node=1, nodes=2, key=KEY)
    got = []
    thread = threading.Thread(target=lambda: got.append(client.part(KEY, wait_s=10.0)))
    asked = threading.Event()
    plain = side.local_part
    side.local_part = lambda key: (asked.set(), plain(key))[1]
    thread.start()
    assert asked.wait(5)
    side.parts[KEY] = part
    nodes.part_changed(KEY)
    thread.join(timeout=5)
    assert got == [part]
    other = CheckpointKey(8, 1)
    side.parts[other] = CapacityError("the disk is full")
    with pytest.raises(AgentError, match="will not come: the disk is full") as caught:
        client.part(other)
    assert caught.value.kind == "gone"


# -- the token ----------------------------------------------------------------------------------------------------------------
def test_wrong_token_is_one_line_on_both_sides(job, caplog):
    """A peer of another job is refused: one line says so to the asker, one to the log of the asked; a second try adds none."""
    caplog.set_level(logging.INFO)
    with PeerClient(job.addresses[1], token=OTHER_TOKEN, run_id=RUN) as stranger:
        for _ in range(3):
            with pytest.raises(AgentError, match=r"peer 127\.0\.0\.2:\d+ refused the run token: it belongs to another job") as caught:
                stranger.snapshots()
            assert caught.value.kind == "token"
            assert "\n" not in str(caught.value)
    told = [record for record in caplog.records if "run token" in record.getMessage()]
    assert len(told) == 1
    assert "127.0.0.1" in told[0].getMessage()


def test_server_without_the_token_is_not_believed(job, client, monkeypatch):
    """An answer that does not prove the token is refused, data and others alike: nobody can take the peer's place."""
    job.sides[1].add(KEY)
    with client.take(1, KEY) as remote:
        monkeypatch.setattr(RunToken, "of_answer", lambda self, nonce, status, span, body: "0" * 64)
        for ask in (client.snapshots, lambda: remote.read_into(0, memoryview(bytearray(10)))):
            monkeypatch.setattr(peers, "same", lambda proof, expected: proof != "0" * 64)
            with pytest.raises(AgentError, match="does not prove") as caught:
                ask()
            assert caught.value.kind == "token"
        monkeypatch.undo()


def test_token_never_shows(job, caplog, capfd):
    """The token is in no repr, error, log or header, and is neither stored nor compared carelessly."""
    caplog.set_level(logging.DEBUG)
    seen = []
    send = socket.socket.sendall
    with PeerClient(job.addresses[1], token=OTHER_TOKEN, run_id=RUN) as stranger, PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as friend:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http.client.HTTPConnection, "send", _spy(http.client.HTTPConnection.send, seen))
            with pytest.raises(AgentError) as caught:
                stranger.snapshots()
            friend.snapshots()
        texts = [repr(stranger), repr(friend), repr(RunToken(TOKEN)), str(caught.value), repr(caught.value), repr(vars(job.nodes[1]._server))]
    status, headers, body = signed(job.addresses[1], "GET", f"/v1/{RUN}/snapshots", token=OTHER_TOKEN)
    texts += [caplog.text, *capfd.readouterr(), str(headers), body.decode("latin-1"), b"".join(seen).decode("latin-1")]
    assert status == 401
    assert len(seen) >= 2
    for token in (TOKEN, OTHER_TOKEN):
        for shown in (token.decode(), token.hex()):
            assert not [text for text in texts if shown in text]
    assert send is socket.socket.sendall
    with pytest.raises(TypeError):
        pickle.dumps(RunToken(TOKEN))
    assert RunToken(TOKEN) == RunToken(bytes(TOKEN))
    assert RunToken(TOKEN) != RunToken(OTHER_TOKEN)
    with pytest.raises(ConfigError, match="too short"):
        RunToken(b"short")


def _spy(send, seen):
    def spy(self, data):
        seen.append(bytes(data))
        return send(self, data)

    return spy


@pytest.mark.parametrize("what", ["method", "target", "body", "Range", NONCE, TIME, TO, PROOF])
def test_any_change_on_the_way_is_found(job, what):
    """A request of which any signed thing is changed on its way is refused (401), and does nothing."""
    body = msgspec.msgpack.encode(Verdict(attempt=1, complete=7))

    def change(method, target, body, headers):
        if what == "method":
            return "PUT", target, body
        if what == "target":
            return method, target + "?x", body
        if what == "body":
            return method, target, body.replace(b"\x07", b"\x08")
        headers[what] = {"Range": "bytes=0-1", NONCE: os.urandom(16).hex(), TIME: f"{time.time() - 1:.3f}", TO: "0", PROOF: "0" * 64}[what]
        return method, target, body

    status, _, _ = signed(job.addresses[1], "POST", f"/v1/{RUN}/complete", body=body, change=change)
    assert status == 401
    assert job.sides[1].told == []
    assert signed(job.addresses[1], "POST", f"/v1/{RUN}/complete", body=body)[0] == 200
    job.sides[1].wait_told("completed", CheckpointKey(7, 1), False)


def test_replayed_requests_are_refused(job):
    """What somebody has recorded and sends again is refused within the time window by its nonce, later by its time; also a hold is not taken."""
    body = msgspec.msgpack.encode(Verdict(attempt=1, complete=7))
    again = {"nonce": os.urandom(16).hex(), "at": f"{time.time():.3f}"}
    assert signed(job.addresses[1], "POST", f"/v1/{RUN}/complete", body=body, **again)[0] == 200
    assert signed(job.addresses[1], "POST", f"/v1/{RUN}/complete", body=body, **again)[0] == 403
    old = f"{time.time() - talk.WINDOW_S - 5:.3f}"
    status, _, answer = signed(job.addresses[1], "POST", f"/v1/{RUN}/complete", body=body, at=old)
    assert status == 403
    assert b"clocks differ" in answer
    job.sides[1].add(KEY)
    held = []
    job.sides[1].on_hold = held.append
    again = {"nonce": os.urandom(16).hex(), "at": f"{time.time():.3f}"}
    assert [signed(job.addresses[1], "GET", f"/v1/{RUN}/snapshots/1/{KEY}", **again)[0] for _ in range(2)] == [200, 403]
    assert held == [KEY]
    assert [event for event in job.sides[1].told if event[0] == "completed"] == [("completed", KEY, False)]


def test_nonces_are_forgotten_in_time(monkeypatch):
    """A nonce is remembered for at least twice the window, then forgotten: memory does not grow for ever."""
    now = 1000.0
    monkeypatch.setattr(peerserver.time, "monotonic", lambda: now)
    nonces = peerserver._Nonces()
    assert not nonces.seen(b"first-nonce")
    now += 2 * talk.WINDOW_S
    assert nonces.seen(b"first-nonce")
    now += 2 * talk.WINDOW_S
    assert nonces.seen(b"first-nonce") is False
    now += 10 * talk.WINDOW_S
    assert not nonces.seen(b"another one")
    assert len(nonces._new) + len(nonces._old) == 1


@pytest.mark.parametrize("at", ["", "nan", "inf", "soon", "-1"])
def test_request_without_a_time(job, at):
    """A time that is none is refused, also where its proof is right."""
    assert signed(job.addresses[1], "GET", f"/v1/{RUN}/snapshots", at=at)[0] in (400, 403)


def test_request_meant_for_another_node_or_run(job):
    """A request for another node (its proof holds for that one only) or another run is refused, and says who answers."""
    with (
        PeerClient(PeerAddress(node=0, host=job.addresses[1].host, port=job.addresses[1].port), token=TOKEN, run_id=RUN) as astray,
        pytest.raises(AgentError, match="this is node 1, not 0") as caught,
    ):
        astray.snapshots()
    assert caught.value.kind == "other-node"
    with PeerClient(job.addresses[1], token=TOKEN, run_id="other") as astray, pytest.raises(AgentError, match="serves run 'a1b2c3'") as caught:
        astray.snapshots()
    assert caught.value.kind == "other-run"


def test_new_token_of_the_next_job(job, client):
    """Opened again with another token the same port serves the new job, and the old one no more."""
    client.snapshots()
    address = job.addresses[1]
    assert job.nodes[1].open(OTHER_TOKEN, "127.0.0.2") == (address.host, address.port)
    with pytest.raises(AgentError, match="refused the run token"):
        client.snapshots()
    with PeerClient(address, token=OTHER_TOKEN, run_id=RUN) as new:
        new.snapshots()


# -- holds ------------------------------------------------------------------------------------------------------------------------
def test_hold_ends_when_nobody_reads():
    """A reader that goes away without a word does not keep a snapshot for ever; one that reads on takes it again by itself."""
    with PlainJob(2, TOKEN, run_id=RUN, hold_s=0.2) as job, PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as client:
        data = job.sides[1].add(KEY)
        remote = client.take(1, KEY)
        job.sides[1].wait_count("released")
        got = bytearray(MIB)
        remote.read_into(MIB, memoryview(got))
        assert got == data[MIB : 2 * MIB]
        job.sides[1].wait_count("released", 2)
        del job.sides[1].data[KEY]
        with pytest.raises(NotFoundError):
            remote.read_into(0, memoryview(got))
        remote.close()


def test_snapshot_that_changed_is_not_read_on():
    """When a hold has ended and the step is another one's now, reading on is refused rather than mixed."""
    with PlainJob(2, TOKEN, run_id=RUN, hold_s=0.2) as job, PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as client:
        job.sides[1].add(KEY)
        remote = client.take(1, KEY)
        job.sides[1].wait_count("released")
        job.sides[1].add(KEY, 7 * MIB)
        with pytest.raises(AgentError, match="no longer the one") as caught:
            remote.read_into(0, memoryview(bytearray(9)))
        assert caught.value.kind == "gone"


def test_reading_renews_the_hold():
    """As long as somebody reads the hold stays, however long that takes in all."""
    with PlainJob(2, TOKEN, run_id=RUN, hold_s=0.5) as job, PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as client:
        job.sides[1].add(KEY)
        with client.take(1, KEY) as remote:
            until = time.monotonic() + 1.2
            while time.monotonic() < until:
                remote.read_into(0, memoryview(bytearray(100)))
            assert job.sides[1].counts.get("released", 0) == 0


def test_holds_end_with_the_agent(job, client):
    """Closing the nodes' talk releases what was held."""
    job.sides[1].add(KEY)
    client.take(1, KEY)
    job.nodes[1].close()
    assert job.sides[1].counts["released"] == 1


# -- peers in trouble -----------------------------------------------------------------------------------------------------------
def test_unreachable_peer_is_one_line():
    """Nobody listens there: AgentError "unreachable", with address and node in one line."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.3", 0))
        address = PeerAddress(node=2, host="127.0.0.3", port=taken.getsockname()[1])
        with PeerClient(address, token=TOKEN, run_id=RUN) as client, pytest.raises(AgentError, match=r"peer 127\.0\.0\.3:\d+ \(node 2\)") as caught:
            client.snapshots()
    assert caught.value.kind == "unreachable"
    assert "\n" not in str(caught.value)


def test_taken_port_and_foreign_address_are_one_line(job):
    """A port that is taken and an address that is not this machine's are told as AgentError "port"; nothing is left behind."""
    side = PlainSide(0, 1)
    nodes = Nodes(side, RUN)
    with pytest.raises(AgentError, match=r"cannot listen for peers on 127\.0\.0\.2:\d+: port \d+ is taken") as caught:
        nodes.open(TOKEN, "127.0.0.2", job.addresses[1].port)
    assert caught.value.kind == "port"
    with pytest.raises(AgentError, match=r"192\.0\.2\.1:0: Cannot assign") as caught:
        nodes.open(TOKEN, "192.0.2.1")
    assert caught.value.kind == "port"
    host, port = nodes.open(TOKEN, "127.0.0.3")
    assert (host, nodes.open(TOKEN, "127.0.0.3", port)) == ("127.0.0.3", (host, port))
    nodes.close()


def test_sockets_of_systemd_are_not_served_on(monkeypatch):
    """A socket handed over by systemd may have any address: peers are not served on it."""
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    with pytest.raises(AgentError, match="unset LISTEN_PID"):
        Nodes(PlainSide(0, 1), RUN).open(TOKEN, "127.0.0.1")


def test_closing_a_client_ends_its_calls():
    """A call that waits for a peer that says nothing ends at once when the client is closed, and later ones do not begin."""
    with _Fake(_nothing) as fake:
        client = PeerClient(fake.address, token=TOKEN, run_id=RUN, timeout_s=20)
        caught = []

        def ask():
            try:
                client.snapshots()
            except AgentError as error:
                caught.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert fake.heard.wait(5)
        client.close()
        thread.join(timeout=5)
        assert [error.kind for error in caught] == ["unreachable"]
        with pytest.raises(AgentError, match="closed"):
            client.snapshots()


def test_only_the_given_address_is_listened_on(job):
    """The port answers at the address that the job uses and at no other of the same machine."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.9", job.addresses[1].port), timeout=2)


def test_dead_agent_comes_back_at_its_port(job, client):
    """A new agent takes the killed one's port, also while connections of the old one linger, and clients go on."""
    client.snapshots()
    job.nodes[1].close()
    with pytest.raises(AgentError) as caught:
        client.snapshots()
    assert caught.value.kind == "unreachable"
    again = Nodes(PlainSide(1, 2), RUN)
    again.configure(1, 1, 2, None)
    again.open(TOKEN, "127.0.0.2", job.addresses[1].port)
    client.snapshots()
    again.close()


class _Fake:
    """A server that answers as it is told, to see what the client makes of it."""

    def __init__(self, speak):
        self.listener = socket.create_server(("127.0.0.4", 0))
        self.address = PeerAddress(node=3, host="127.0.0.4", port=self.listener.getsockname()[1])
        self.speak = speak
        self.end = threading.Event()
        self.heard = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.recv(65536)
                self.heard.set()
                self.speak(sock, self.end)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.end.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(timeout=5)


def _says(text):
    def speak(sock, end):
        sock.sendall(text)

    return speak


def _nothing(sock, end):
    end.wait(10)


def _drips(sock, end):
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000:
        sock.sendall(bytes([byte]))
        if end.wait(0.02):
            return


@pytest.mark.parametrize(
    ("speak", "kind"),
    [
        (_nothing, "unreachable"),
        (_drips, "unreachable"),
        (_says(b""), "unreachable"),
        (_says(b"what?\r\n\r\n"), "unreachable"),
        (_says(b"HTTP/1.1 200 OK\r\n\r\n"), "unreachable"),
        (_says(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"), "unreachable"),
        (_says(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"), "unreachable"),
        (_says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"), "unreachable"),
        (_says(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"), "unreachable"),
        (_says(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"), "token"),
        (_says(b"HTTP/1.1 206 Partial\r\nContent-Length: 8\r\nContent-Range: bytes 0-7/8\r\n\r\n12345678"), "token"),
        (_says(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nX-Everystep-Proof: abc\r\n\r\n"), "token"),
        (_says(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n"), "token"),
        (_says(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000 + b"\r\n"), "unreachable"),
        (_says(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000 + b"\r\n\r\n"), "unreachable"),
    ],
)  # fmt: skip
def test_client_survives_any_server(speak, kind):
    """Whatever answers at a peer's address, a slow, dead, dripping or lying one: AgentError in time, and never bytes."""
    with _Fake(speak) as fake, PeerClient(fake.address, token=TOKEN, run_id=RUN, timeout_s=0.6) as client:
        began = time.monotonic()
        for ask in (client.snapshots, lambda: client.read_object("data/x/y", 0, memoryview(bytearray(8)))):
            with pytest.raises(AgentError) as caught:
                ask()
            assert caught.value.kind == kind
        assert time.monotonic() - began < 8


def test_slow_readers_do_not_keep_others_from_speaking(job, monkeypatch):
    """Peers that take no data hold some threads, and others that ask for data are told to wait; a message still gets through at once."""
    monkeypatch.setattr(peerserver, "_SENDING_WAIT_S", 0.2)
    job.sides[1].add(KEY, 64 * MIB)
    slow = []
    with PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as client, client.take(1, KEY) as remote:
        target = f"/v1/{RUN}/snapshots/1/{KEY}/data?hold={remote._hold}"
        token = RunToken(TOKEN)
        for _ in range(peerserver._SENDING):
            sock = socket.create_connection((job.addresses[1].host, job.addresses[1].port))
            slow.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            nonce, at = os.urandom(16).hex(), f"{time.time():.3f}"
            span = f"bytes=0-{64 * MIB - 1}"
            proof = token.of_request("GET", target, span=span, to="1", nonce=nonce, at=at, body=b"")
            sock.sendall(f"GET {target} HTTP/1.1\r\n{NONCE}: {nonce}\r\n{TIME}: {at}\r\n{TO}: 1\r\nRange: {span}\r\n{PROOF}: {proof}\r\n\r\n".encode())
            assert sock.recv(12) == b"HTTP/1.1 206"
        began = time.monotonic()
        client.snapshots()
        client.post("complete", Verdict(attempt=1, complete=3))
        assert time.monotonic() - began < 2
        status, _, _ = signed(job.addresses[1], "GET", target, span="bytes=0-9")
        assert status == 503
        for sock in slow:
            sock.close()
        got = bytearray(10)
        remote.read_into(0, memoryview(got))
        assert got == job.sides[1].data[KEY][:10]


def test_errors_of_the_side_come_over_as_they_are(job, client):
    """What goes wrong at the other end is the same error here, with the peer's name in front; a bug there is an AgentError and in its log."""
    job.sides[1].add(KEY)

    def fail(key):
        raise CapacityError("no memory for digests", kind="memory", hint="wait", step=7)

    job.sides[1].on_hold = fail
    with pytest.raises(CapacityError, match=r"peer 127\.0\.0\.2:\d+: no memory for digests \(wait\)") as caught:
        client.take(1, KEY)
    assert (caught.value.kind, caught.value.step) == ("memory", 7)

    def bug(key):
        raise ZeroDivisionError("a bug")

    job.sides[1].on_hold = bug
    with pytest.raises(AgentError, match="ZeroDivisionError"):
        client.take(1, KEY)
    job.sides[1].on_hold = copy.copy
    client.take(1, KEY).close()


def test_described_wrongly(job, client):
    """A snapshot whose description does not fit it, or is another's, is refused."""
    side = job.sides[1]
    side.add(KEY)
    side.described[KEY] = side.described[KEY][:-20] + b"x" * 20
    with pytest.raises(CorruptionError):
        client.take(1, KEY)
    other = CheckpointKey(8, 1)
    side.add(other)
    side.described[KEY] = side.described[other]
    with pytest.raises(CorruptionError, match="cannot be"):
        client.take(1, KEY)
    side.add(KEY)
    side.data[KEY] = side.data[KEY][: 4 * MIB]
    with pytest.raises(CorruptionError, match="cannot be"):
        client.take(1, KEY)
