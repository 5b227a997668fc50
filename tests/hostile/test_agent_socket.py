from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time

import msgspec
import pytest

from everystep import protocol
from everystep.agent import client as client_module
from everystep.agent import messages, server
from everystep.agent.client import AgentClient, find_agents
from everystep.agent.memory import Room
from everystep.agent.runtime import Place, runtime_dir
from everystep.agent.server import AgentServer
from everystep.agent.serving import accept
from everystep.agent.wire import Channel
from everystep.errors import AgentError, CapacityError, ConfigError, ConflictError, CorruptionError, NotFoundError, rebuild
from everystep.manifest import TensorSpec
from everystep.plan import SavePlan, plan_save
from everystep.policy import Cadence, Keep
from everystep.repository import Repository

ENOUGH = Room(1 << 40, "plenty")


class Here:
    """An agent in this process, and raw or proper connections to it."""

    def __init__(self, folder, room=ENOUGH):
        self.repository = Repository.open(str(folder / "run"), create=True)
        self.server = AgentServer(self.repository, run_url=str(folder / "run"), run_id=self.repository.run_id, idle_s=600.0, room=lambda: room)
        self.open, self.clients, self.serving = [], [], []

    def raw(self):
        ours, theirs = socket.socketpair()
        ours.settimeout(10)
        self.serving.append(self.server.adopt(Channel(theirs)))
        self.open.append(ours)
        return ours

    def client(self, *, role="trainer"):
        client = AgentClient(Channel(self.raw()), idle_s=600.0, wait_closed=None, on_event=None, on_lost=None, timeout_s=10)
        client._channel.timeout(None)
        client._welcome = client._ask(messages.Hello(protocol=1, role=role, run_id=self.repository.run_id, pid=os.getpid()), messages.Welcome)
        self.clients.append(client)
        return client

    def trainer(self, budget=None):
        client = self.client()
        attempt = self.repository.start_attempt(parent=None, now=0.0).attempt
        client.configure(attempt=attempt, cadence=Cadence(disk=False), keep=Keep(), memory_budget=budget)
        return client


@pytest.fixture
def here(tmp_path):
    agent = Here(tmp_path)
    yield agent
    for client in agent.clients:
        client.close(bye=False)
    for sock in agent.open:
        sock.close()
    for thread in agent.serving:
        thread.join(10)
    agent.server.close()


def hello(run_id, **changes):
    body = {"type": "Hello", "id": 1, "protocol": 1, "role": "trainer", "run_id": run_id, "pid": 1, **changes}
    return msgspec.msgpack.encode(body)


def framed(body):
    return struct.pack("<I", len(body)) + body


def answer(sock):
    """What the agent says last before it closes the connection; None when it just closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    last = None
    while data:
        (nbytes,) = struct.unpack("<I", data[:4])
        last, data = msgspec.msgpack.decode(data[4 : 4 + nbytes]), data[4 + nbytes :]
    return last


GARBAGE = {
    "zeros": b"\0" * 4096,
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "oversize": struct.pack("<I", 0xFFFFFFFF) + b"x",
    "long hello": struct.pack("<I", (64 << 10) + 1) + b"x",
    "no msgpack": framed(b"\xc1" * 100),
    "nested": framed(b"\x91" * 50_000),
    "other type": framed(msgspec.msgpack.encode([1, 2, 3])),
    "unknown message": framed(msgspec.msgpack.encode({"type": "Format", "id": 1})),
    "field missing": framed(msgspec.msgpack.encode({"type": "Hello", "id": 1})),
    "no hello": framed(msgspec.msgpack.encode({"type": "ListSnapshots", "id": 1})),
    "protocol 0": framed(hello("x", protocol=0)),
    "role": framed(hello("x", role="root")),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_without_harm(here, name):
    """A connection that begins with anything but a hello is told so and closed; others do not notice."""
    good = here.client(role="visitor")
    sock = here.raw()
    sock.sendall(GARBAGE[name])
    sock.shutdown(socket.SHUT_WR)
    said = answer(sock)
    assert said is None or (said["type"] == "Failed" and said["name"] == "AgentError")
    assert good.snapshots() == []


@pytest.mark.parametrize("cut", [1, 3, 4, 10])
def test_half_a_message_is_no_message(here, cut):
    """A peer that dies in the middle of a message leaves nothing behind."""
    sock = here.raw()
    sock.sendall(framed(hello(here.repository.run_id))[:cut])
    sock.close()
    assert here.client(role="visitor").welcome.trainers == ()


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode({"type": "Seal", "id": 2}), msgspec.msgpack.encode({"type": "Welcome"})])
def test_garbage_after_the_hello_ends_only_that_connection(here, body):
    """Nonsense of a peer that is known is refused like a stranger's."""
    good = here.client(role="visitor")
    sock = here.raw()
    sock.sendall(framed(hello(here.repository.run_id)) + framed(body))
    sock.shutdown(socket.SHUT_WR)
    assert answer(sock)["name"] == "AgentError"
    assert good.snapshots() == []


def test_other_run_is_refused(here):
    """An agent serves its own run only, and says which."""
    sock = here.raw()
    sock.sendall(framed(hello("another")))
    said = answer(sock)
    assert (said["name"], said["kind"], said["id"]) == ("AgentError", "other-run", 1)
    assert here.repository.run_id in said["message"]


def test_other_protocol_may_only_use_the_frozen_messages(here):
    """A newer trainer can list and take an older agent's snapshots, and is told to stop it for the rest."""
    sock = here.raw()
    channel = Channel(sock)
    channel.send(messages.Hello(id=1, protocol=2, role="trainer", run_id=here.repository.run_id, pid=1))
    assert channel.receive()[0].protocol == 1
    channel.send(messages.ListSnapshots(id=2))
    assert channel.receive()[0].snapshots == ()
    channel.send(messages.Lease(id=3, plan_id="x", step=1))
    failed = channel.receive()[0]
    assert (failed.name, failed.kind) == ("AgentError", "protocol")
    assert "stop" in failed.hint


def test_other_user_is_refused(here, monkeypatch):
    """A peer with another uid gets nothing, whatever it says."""
    monkeypatch.setattr(Channel, "peer", lambda _: (1, os.geteuid() + 1))
    sock = here.raw()
    assert answer(sock)["kind"] == "other-user"  # before it has said anything


def test_descriptors_nobody_asked_for_are_closed(here):
    """Descriptors sent to the agent do not pile up in it."""
    client = here.client(role="visitor")
    reading, writing = os.pipe()
    for _ in range(5):
        with client._channel._sending:
            body = msgspec.msgpack.encode(messages.ListSnapshots(id=0))
            socket.send_fds(client._channel._sock, [struct.pack("<I", len(body))], [writing, writing])
            client._channel._sock.sendall(body)
    client.snapshots()
    os.close(writing)
    assert os.read(reading, 1) == b""  # end of file: nobody else has the writing end
    os.close(reading)


def test_plan_that_does_not_fit_is_refused(here):
    """A plan that points outside of its slab never reaches a write."""
    client = here.trainer()
    plan = plan_save([TensorSpec("model.w", "F32", (10,), "model")], aliases={})
    good = msgspec.structs.asdict(plan)
    for wrong in ({"nbytes": 100}, {"nbytes": 0}, {"placements": (msgspec.structs.replace(plan.placements[0], slab_offset=1 << 40),)},
                  {"placements": (msgspec.structs.replace(plan.placements[0], file=7),)}, {"placements": (msgspec.structs.replace(plan.placements[0], block=-1),)},
                  {"placements": (msgspec.structs.replace(plan.placements[0], block=5 << 20),)}, {"files": (msgspec.structs.replace(plan.files[0], nbytes=1),)}):  # fmt: skip
        with pytest.raises(AgentError, match="does not fit its slab"):
            client.prepare(SavePlan(**{**good, **wrong}))
    client.prepare(plan)
    assert hasattr(client.lease(plan, 1), "view")


def test_wrong_order_of_requests_is_refused(here):
    """A lease without an attempt, a seal without a lease, a slab that is not there: an error each, and the connection goes on."""
    client = here.client()
    plan = plan_save([TensorSpec("model.w", "F32", (10,), "model")], aliases={})
    with pytest.raises(AgentError, match="attempt"):
        client.lease(plan, 1)
    with pytest.raises(AgentError, match="does not exist"):
        client._ask(messages.GiveBack(slab=7), messages.Done)
    with pytest.raises(AgentError, match="does not exist"):
        client._ask(messages.Seal(slab=7, plan_id=plan.id, step=1, attempt=1, saved_at=0.0, values=b"{}", metrics={}, bound=False, pin=False,
                                  timings_s={}), messages.Done)  # fmt: skip
    with pytest.raises(AgentError, match="does not exist"), client.take(7):
        pass
    assert client.snapshots() == []


def test_second_trainer_is_refused(here):
    """While one trainer is configured another one is told its pid."""
    here.trainer()
    with pytest.raises(ConflictError, match=f"pid {os.getpid()}"):
        here.trainer()


def test_too_little_memory_for_a_slab(tmp_path):
    """F30: a control group too small for one slab is a CapacityError with the numbers; for one slab, a warning and skipped saves."""
    plan = plan_save([TensorSpec("model.w", "U8", (100_000,), "model")], aliases={})
    for nbytes in (50_000, plan.nbytes + 50_000):
        here = Here(tmp_path, Room(nbytes, "control group limit 200,000, used 150,000"))
        client = here.trainer()
        if nbytes == 50_000:
            with pytest.raises(CapacityError, match=f"{plan.nbytes:,} bytes .* 50,000 are available .*control group limit 200,000"):
                client.prepare(plan)
        else:
            assert client._ask(messages.Prepare(plan=plan), messages.Done).note.startswith("only 1 of 3 slabs")
            here.server._room = lambda: Room(50_000, "control group limit 200,000")
            assert hasattr(client.lease(plan, 1), "view")
            refused = client.lease(plan, 2)
            assert refused.kind == "memory"
            assert f"needs {plan.nbytes:,} bytes" in refused.reason
            assert "control group limit 200,000" in refused.reason
        client.close(bye=False)
        here.serving[-1].join(10)
        here.server.close()


def test_client_does_not_hang_on_a_silent_agent(tmp_path, runtime_dir):
    """An agent that accepts and says nothing is an AgentError after the time-out."""
    place = Place.of_run(runtime_dir, "silent", str(tmp_path))
    with place.listen(), pytest.raises(AgentError, match="did not answer"):
        AgentClient.connect(run_url=str(tmp_path), run_id="silent", spawn=False, timeout_s=0.2)


def test_client_refuses_a_socket_of_another_user(tmp_path, runtime_dir, monkeypatch):
    """A socket that somebody else serves is not trusted."""
    monkeypatch.setattr(Channel, "peer", lambda _: (1, os.geteuid() + 1))
    with Place.of_run(runtime_dir, "other", str(tmp_path)).listen(), pytest.raises(ConfigError, match="served by user"):
        AgentClient.connect(run_url=str(tmp_path), run_id="other", spawn=False)


def test_stale_socket_is_no_agent(tmp_path, runtime_dir):
    """The socket of an agent that died is neither found nor connected to."""
    Place.of_run(runtime_dir, "stale", str(tmp_path)).listen().close()
    assert find_agents() == []
    with pytest.raises(NotFoundError, match="no agent"):
        AgentClient.connect(run_url=str(tmp_path), run_id="stale", spawn=False)


def test_agent_that_cannot_open_its_run_says_why(tmp_path):
    """What keeps the agent from starting reaches the trainer as the error that it is, not as a time-out."""
    with pytest.raises(NotFoundError, match="no run"):
        AgentClient.connect(run_url=str(tmp_path / "nothing"), run_id="0123", timeout_s=20)
    repository = Repository.open(str(tmp_path / "run"), create=True)
    with pytest.raises(ConfigError, match=repository.run_id):
        AgentClient.connect(run_url=str(tmp_path / "run"), run_id="0123", timeout_s=20)


def test_forked_child_lets_go(here):
    """After a fork the child can neither use the connection nor keep it open."""
    client = here.client()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.snapshots()
        except AgentError as error:
            os.write(writing, error.kind.encode())
        with contextlib.suppress(OSError):
            os.fstat(client._channel.fileno())
            os.write(writing, b" still open")
        client.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"forked"
    os.close(reading)
    os.close(writing)
    assert client.snapshots() == []


def test_runtime_dir_must_be_ours_alone(tmp_path, monkeypatch):
    """A directory that others may enter, a link, a file, somebody else's: refused with what to do."""
    monkeypatch.setenv("EVERYSTEP_RUNTIME_DIR", str(tmp_path / "a"))
    assert runtime_dir().stat().st_mode & 0o777 == 0o700
    (tmp_path / "a").chmod(0o750)
    with pytest.raises(ConfigError, match=r"mode 750.*chmod 700"):
        runtime_dir()
    (tmp_path / "a").chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.setenv("EVERYSTEP_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(ConfigError, match="not a directory"):
        runtime_dir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "a", 12345, -1)
        monkeypatch.setenv("EVERYSTEP_RUNTIME_DIR", str(tmp_path / "a"))
        with pytest.raises(ConfigError, match="user 12345"):
            runtime_dir()


def test_long_runtime_dir(tmp_path, monkeypatch):
    """A socket's path may be longer than the kernel's 107 bytes."""
    folder = tmp_path / ("x" * 120)
    monkeypatch.setenv("EVERYSTEP_RUNTIME_DIR", str(folder))
    repository = Repository.open(str(tmp_path / "run"), create=True)
    with contextlib.closing(AgentClient.connect(run_url=str(tmp_path / "run"), run_id=repository.run_id)) as client:
        assert [agent.pid for agent in find_agents()] == [client.welcome.pid]
        client.stop()


def test_run_id_never_becomes_a_path(tmp_path):
    """A run id with slashes or of any length names a plain file."""
    for run_id in ("../../etc/passwd", "a" * 500, "", ".", "ü"):
        place = Place.of_run(tmp_path, run_id, str(tmp_path))
        assert place.socket.parent == tmp_path
        assert len(place.socket.name) < 64
        assert place.lock.name.isascii()


def test_failed_travels_whole():
    """Every field of an error comes through."""
    failed = messages.Failed(name="CapacityError", message="m", step=3, key="k", kind="disk-full", hint="h", errno=28)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(failed), type=messages.Failed)
    error = rebuild(again.name, again.message, again.step, None, again.key, again.kind, again.hint, again.errno)
    assert (type(error), error.step, error.key, error.kind, error.hint, error.errno) == (CapacityError, 3, "k", "disk-full", "h", 28)


def test_peer_that_does_not_read_stops_nobody(here):
    """Answers to a peer that reads nothing pile up in its own outbox; others are answered at once."""
    sock = here.raw()
    sock.sendall(framed(hello(here.repository.run_id, role="visitor")))
    request = framed(msgspec.msgpack.encode({"type": "AskStats", "id": 1}))

    def pester():
        with contextlib.suppress(OSError):
            for _ in range(2000):
                sock.sendall(request)

    thread = threading.Thread(target=pester, daemon=True)
    thread.start()
    began = time.monotonic()
    good = here.client(role="visitor")
    for _ in range(10):
        assert good.snapshots() == []
    assert time.monotonic() - began < 10
    sock.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_failing_accept_does_not_end_the_agent(here, tmp_path, monkeypatch):
    """No descriptors left, a peer that gave up, no thread left: the agent takes the next connection; a closed listener is the end."""
    place = Place.of_run(runtime_dir(), here.repository.run_id, str(tmp_path / "run"))
    listener = place.listen()
    troubles = [OSError(errno.EMFILE, "too many open files"), OSError(errno.ECONNABORTED, "aborted"), None]

    class Troubled:
        def accept(self):
            if troubles and (trouble := troubles.pop(0)) is not None:
                raise trouble
            return listener.accept()

        def fileno(self):
            return listener.fileno()

    real, refused = AgentServer.adopt, []

    def adopt(server, channel):
        if not refused:
            refused.append(channel)
            raise RuntimeError("can't start new thread")
        return real(server, channel)

    monkeypatch.setattr(AgentServer, "adopt", adopt)
    thread = threading.Thread(target=accept, args=(Troubled(), here.server), daemon=True)
    thread.start()
    with place.connect(timeout_s=10) as sock:
        assert sock.recv(1) == b""  # this one there was no thread for
    client = AgentClient.connect(run_url=str(tmp_path / "run"), run_id=here.repository.run_id, role="visitor", spawn=False)
    counters = client.stats()["counters"]
    assert (counters["accept_failures"], counters["unexpected_errors"]) == (2, 1)
    client.close()
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert not thread.is_alive()
    listener.close()


@pytest.mark.parametrize("name", ["decode", "_check_bounds"])
def test_snapshot_that_cannot_be_trusted_is_let_go(here, monkeypatch, name):
    """A client that refuses what it got does not keep the slab from being filled again, nor its other hold from being one."""
    trainer, visitor = here.trainer(), here.client(role="visitor")
    slab = seal(trainer, here, 1)

    def refuse(*_, **__):
        raise CorruptionError("that is no manifest")

    with visitor.take(slab.id):
        with monkeypatch.context() as patched:
            patched.setattr(client_module, name, refuse)
            with pytest.raises(CorruptionError):
                visitor.take(slab.id).__enter__()
        visitor.snapshots()
        assert len(here.server.state.slabs[slab.id].readers) == 1
    assert here.server.state.slabs[slab.id].readers == ()


def seal(client, here, step, plan=None, **how):
    plan = plan or plan_save([TensorSpec("model.w", "F32", (10,), "model")], aliases={})
    slab = client.lease(plan, step)
    attempt = here.repository.newest_attempt()
    client.seal(slab, plan=plan, step=step, attempt=attempt, saved_at=0.0, values=b"{}", metrics={}, bound=False, pin=False, timings_s={}, **how)
    return slab


def test_changing_shapes_do_not_pile_up(here, monkeypatch):
    """A state with new shapes each step: neither side remembers more plans than it may, by number or by bytes, and old ones still work."""
    plans = [plan_save([TensorSpec("model.w", "F32", (n + 1,), "model")], aliases={}) for n in range(100)]
    client = here.trainer()
    for step, plan in enumerate(plans):
        client.give_back(client.lease(plan, step))
    assert len(client._prepared) <= 64
    assert len(here.server._plans) <= 64 + 3
    monkeypatch.setattr(server, "_PLANS_NBYTES", 3 * len(plans[0].files[0].header))
    client.give_back(client.lease(plans[0], 100))
    assert len(here.server._plans) <= 3 + 3
    client.give_back(client.lease(plans[60], 101))  # the client thinks that the agent knows it


def test_what_was_told_of_persists_is_not_kept(here, monkeypatch):
    """Timings and errors of persists are gone once they are told, with or without somebody to tell."""
    client = here.trainer()
    seal(client, here, 1)
    assert client.drain(timeout_s=10).complete
    monkeypatch.setattr(Repository, "commit", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    seal(client, here, 2)
    assert not client.drain(timeout_s=10).complete
    assert (here.server._timings, here.server._errors) == ({}, {})


def test_idle_agent_keeps_trying_before_it_gives_a_snapshot_up(tmp_path, monkeypatch, caplog):
    """F54: after the last trainer's end the snapshot that cannot be persisted is tried again and again; its loss is an error in the log."""
    monkeypatch.setattr(protocol, "IDLE_RETRY_S", 0.02)
    monkeypatch.setattr(protocol, "IDLE_GIVE_UP_S", 0.6)
    tries = []

    def broken(*_):
        tries.append(1)
        raise OSError(5, "broken")

    monkeypatch.setattr(Repository, "commit", broken)
    here = Here(tmp_path)
    ended = threading.Event()
    here.server.on_end(ended.set)
    client = here.trainer()
    here.server.state.idle_s = 0.01
    seal(client, here, 7)
    with caplog.at_level("ERROR", logger="everystep"):
        client.close(bye=False)
        assert ended.wait(10)
    here.server.close()
    assert len(tries) > 2
    assert here.server.end_reason == "idle"
    assert any(record.message.startswith("step 7 of attempt 1 is lost") and "broken" in record.message for record in caplog.records)
