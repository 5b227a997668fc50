"""kill -9 of the real agent and of a real (torch-free) trainer process; full disks; nothing that was acknowledged may be lost."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import pytest
import safetensors
import xxhash

from everystep.agent import find_agents, messages
from everystep.agent.client import AgentClient
from everystep.errors import AgentError
from everystep.manifest import TensorSpec
from everystep.plan import plan_save
from everystep.policy import Cadence, Keep
from everystep.repository import CheckpointKey, Repository

BLOCK = 4 << 20
ROUNDS = int(os.environ.get("EVERYSTEP_SOAK_ROUNDS", "10"))


def make_plan(nbytes=BLOCK + 12):
    specs = [TensorSpec("model.weight", "U8", (nbytes,), "model"), TensorSpec("optim.step", "I32", (), "optim")]
    return plan_save(specs, aliases={})


def content(step, nbytes):
    return bytes([step % 251 + 1]) * nbytes


def fill(slab, plan, step):
    for placement in plan.placements:
        slab.view[placement.slab_offset : placement.slab_offset + placement.nbytes] = content(step, placement.nbytes)


class Trainer:
    """What a trainer does with the agent; here in the test's own process, and by ``TRAINER`` in one of its own."""

    def __init__(self, url, *, cadence=None, keep=None, nbytes=BLOCK + 12, parent=None, **options):
        self.url = str(url)
        self.repository = Repository.open(self.url, create=True)
        self.plan = make_plan(nbytes)
        self.events, self.changed, self.lost = [], threading.Condition(), threading.Event()
        self.options = options
        self.cadence, self.keep = cadence or Cadence(disk=False), keep or Keep(last=None)
        self.client = self.connect()
        above = max((one.attempt for one in self.client.snapshots()), default=0)
        self.attempt = self.repository.start_attempt(parent=parent, now=time.time(), above=above).attempt
        self.configure()

    def connect(self):
        return AgentClient.connect(run_url=self.url, run_id=self.repository.run_id, on_event=self.on_event, on_lost=self.lost.set, **self.options)

    def configure(self):
        self.client.configure(attempt=self.attempt, cadence=self.cadence, keep=self.keep, memory_budget=None)

    def on_event(self, event):
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait(self, what, step, timeout=20.0):
        def there():
            return next((e for e in self.events if (e.what, e.step) == (what, step)), None)

        with self.changed:
            assert self.changed.wait_for(there, timeout), (what, step, self.events)
            return there()

    def save(self, step, *, bound=True, pin=False, metrics=None):
        slab = self.client.lease(self.plan, step)
        if isinstance(slab, messages.NoSlab):
            return False
        fill(slab, self.plan, step)
        self.client.seal(slab, plan=self.plan, step=step, attempt=self.attempt, saved_at=time.time(), values=b"{}", metrics=metrics or {},
                         bound=bound, pin=pin, timings_s={"stage": 0.001})  # fmt: skip
        return True


# The same in a process of its own: reads commands, answers each with a line; what becomes of saves is told as it happens.
TRAINER = """
import ctypes, itertools, sys
sys.path.insert(0, sys.argv[1])
import test_agent_kill as t

url, disk, first, parent_step, parent_attempt = sys.argv[2:]
parent = t.CheckpointKey(int(parent_step), int(parent_attempt)) if int(parent_attempt) else None
trainer = t.Trainer(url, cadence=t.Cadence(disk=eval(disk)), parent=parent)
say = lambda *words: (sys.stdout.write(" ".join(map(str, words)) + chr(10)), sys.stdout.flush())  # whole lines from both threads
real = trainer.on_event
trainer.client._on_event = lambda event: (real(event), say(event.what, event.step))
say("attempt", trainer.attempt, trainer.client.welcome.pid)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "save":
        say("sealed" if trainer.save(int(rest[0]), bound=rest[1:] == ["bound"]) else "skipped", rest[0])
    elif word == "run":
        for step in itertools.count(int(first)):
            if trainer.save(step, bound=False):
                say("sealed", step)
    elif word == "lease":
        slab = trainer.client.lease(trainer.plan, int(rest[0]))
        slab.view[:1000] = b"x" * 1000
        say("leased", slab.id)
    elif word == "segv":
        ctypes.string_at(0)
    elif word == "close":
        trainer.client.close()
        say("closed")
"""


class Process:
    """``TRAINER`` running."""

    def __init__(self, url, *, disk=False, first=1, parent=(0, 0)):
        command = [sys.executable, "-c", TRAINER, os.path.dirname(__file__), str(url), repr(disk), str(first), *map(str, parent)]
        with tempfile.TemporaryFile("w+") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1)
            words = self.read("attempt")
            errors.seek(0)
            assert words is not None, errors.read()
        _, attempt, pid = words
        self.attempt, self.agent_pid = int(attempt), int(pid)

    def read(self, *wanted):
        """The words of the next line that begins with one of ``wanted`` (any when there are none); None at the end."""
        for line in self.process.stdout:
            words = line.split()
            if not wanted or words[0] in wanted:
                return words
        return None

    def say(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self, number=signal.SIGKILL):
        """Kill it and read what it still said."""
        if number:
            self.process.send_signal(number)
        rest = [line.split() for line in self.process.stdout if line.endswith("\n")]
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)
        return rest


def visit(url):
    repository = Repository.open(str(url))
    return AgentClient.connect(run_url=str(url), run_id=repository.run_id, role="visitor", spawn=False)


def wait_gone(pid, timeout=10):
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], timeout)[0], "the agent lives on"
        finally:
            os.close(fd)


def assert_all_verify(repository):
    for key in repository.keys():
        assert [wrong for _, _, wrong in repository.verify(key) if wrong] == [], key


def stop(url):
    with contextlib.closing(visit(url)) as visitor:
        pid = visitor.welcome.pid
        visitor.stop()
    wait_gone(pid)


def test_killed_trainer_loses_nothing_that_was_sealed(tmp_path):
    """A trainer killed with -9: its newest snapshot is listed, taken with right digests, and persisted although disk=False."""
    trainer = Process(tmp_path / "run")
    for step in (1, 2):
        trainer.say(f"save {step}")
        trainer.read("sealed")
    trainer.end()
    visitor = visit(tmp_path / "run")
    newest = visitor.snapshots()[0]
    assert (newest.step, newest.attempt) == (2, 1)
    with visitor.take(newest.slab) as taken:
        (shard,) = [s for s in taken.manifest.shards if taken.manifest.tensors[s.tensor].name == "model.weight"]
        begin = taken.file_offsets[shard.object] + shard.offset
        got = bytes(taken.view[begin : begin + shard.nbytes])
    assert got == content(2, BLOCK + 12)
    assert shard.digests == (xxhash.xxh3_128_hexdigest(got[:BLOCK]), xxhash.xxh3_128_hexdigest(got[BLOCK:]))
    assert visitor.drain(timeout_s=20).complete
    visitor.close()
    stop(tmp_path / "run")
    repository = Repository.open(str(tmp_path / "run"))
    assert repository.keys() == [CheckpointKey(2, 1)]
    assert_all_verify(repository)
    (file,) = (tmp_path / "run").glob("data/*/model-*.safetensors")
    with safetensors.safe_open(str(file), "numpy") as opened:
        assert opened.get_tensor("weight").tobytes() == content(2, BLOCK + 12)


@pytest.mark.leaves_agent
def test_agent_killed_during_a_write(tmp_path):
    """F32: the pending save is lost with an AgentError, the previous checkpoint is good, and the next save starts a new agent."""
    trainer = Trainer(tmp_path / "run", nbytes=48 << 20)
    trainer.save(1)
    trainer.wait("committed", 1)
    killed = trainer.client.welcome.pid
    trainer.save(2)
    os.kill(killed, signal.SIGKILL)
    assert trainer.lost.wait(10)
    with pytest.raises(AgentError, match="gone"):
        trainer.client.drain(timeout_s=5)
    assert not trainer.client.alive
    trainer.client.close()
    assert CheckpointKey(1, 1) in trainer.repository.keys()
    assert_all_verify(trainer.repository)
    trainer.client = trainer.connect()
    trainer.configure()
    assert trainer.client.welcome.pid != killed
    trainer.save(3)
    trainer.wait("committed", 3)
    assert_all_verify(trainer.repository)
    trainer.client.close()


def test_segfault_with_a_lease(tmp_path):
    """F36: a trainer that dies by SIGSEGV in the middle of filling: the lease is reclaimed, nothing unsealed is persisted."""
    trainer = Process(tmp_path / "run")
    trainer.say("save 1")
    trainer.read("sealed")
    trainer.say("lease 2")
    trainer.read("leased")
    trainer.say("segv")
    trainer.end(0)
    assert trainer.process.returncode == -signal.SIGSEGV
    again = Trainer(tmp_path / "run", parent=CheckpointKey(1, 1))
    assert again.client.welcome.pid == trainer.agent_pid
    slabs = [again.client.lease(again.plan, step) for step in (2, 3)]
    assert all(hasattr(slab, "view") for slab in slabs), "the dead trainer's slab was not reclaimed"
    for slab in slabs:
        again.client.give_back(slab)
    again.client.drain(timeout_s=20)
    assert {key.step for key in again.repository.keys()} <= {1}
    again.client.stop(force=True)
    again.client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_full_disk(tmp_path):
    """F40, F54, F55: a save that does not fit fails with CapacityError, its space is freed, the previous one is good, the next one works."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        trainer = Trainer(disk / "run", in_process=True)
        trainer.save(1)
        trainer.wait("committed", 1)
        small, trainer.plan = trainer.plan, make_plan(8 << 20)
        trainer.save(2)
        failed = trainer.wait("failed", 2).failed
        assert failed.name == "CapacityError"
        assert not [event for event in trainer.events if (event.what, event.step) == ("committed", 2)]
        assert trainer.repository.store.folders("data/") == ["000000000001-0001"]
        trainer.plan = small
        trainer.save(3, pin=True)
        trainer.wait("committed", 3)
        assert trainer.repository.pinned(CheckpointKey(3, 1))
        assert [key.step for key in trainer.repository.keys()] == [1, 3]
        assert_all_verify(trainer.repository)
        counters = trainer.client.stats()["counters"]
        assert (counters["committed"], counters["failed"]) == (2, 1)
        trainer.client.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_no_orphan_after_a_clean_end(tmp_path):
    """The last trainer's bye ends the agent once everything is durable."""
    trainer = Trainer(tmp_path / "run", cadence=Cadence())
    trainer.save(1, bound=False)
    assert trainer.client.drain(timeout_s=20).complete
    pid = trainer.client.welcome.pid
    trainer.client.close()
    trainer.client.close()
    wait_gone(pid)
    assert find_agents() == []
    assert not trainer.lost.is_set()
    assert trainer.repository.read_stats()[1]["counters"]["committed"] == 1


def test_two_starters_get_one_agent(tmp_path):
    """Several processes that look for the run's agent at the same time all get the same one."""
    repository = Repository.open(str(tmp_path / "run"), create=True)
    barrier, clients = threading.Barrier(3), []

    def start():
        barrier.wait(10)
        clients.append(AgentClient.connect(run_url=str(tmp_path / "run"), run_id=repository.run_id, role="visitor"))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    pids = {client.welcome.pid for client in clients}
    assert len(clients) == 3
    assert len(pids) == 1
    assert [agent.pid for agent in find_agents()] == list(pids)
    for client in clients:
        client.close()
    stop(tmp_path / "run")


def test_second_live_trainer_is_refused_by_the_real_agent(tmp_path):
    """Two trainers on one run: the second one gets a ConflictError with the first one's pid, the first one goes on."""
    first = Trainer(tmp_path / "run")
    second = Process.__new__(Process)
    second.process = subprocess.run(
        [sys.executable, "-c", TRAINER, os.path.dirname(__file__), str(tmp_path / "run"), "False", "1", "0", "0"],
        capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert second.process.returncode == 1
    assert f"ConflictError: a trainer with pid {os.getpid()}" in second.process.stderr
    first.client.close()


@pytest.mark.parametrize("how", ["signal", "idle"])
def test_newest_snapshot_is_persisted_before_the_end(tmp_path, how):
    """F53: SIGTERM, and the idle end, make the newest snapshot durable before the agent goes."""
    trainer = Trainer(tmp_path / "run", idle_s=0.2 if how == "idle" else 600.0)
    trainer.save(1, bound=False)
    pid = trainer.client.welcome.pid
    if how == "signal":
        os.kill(pid, signal.SIGTERM)
        trainer.wait("committed", 1)
        trainer.save(2, bound=False)  # a trainer that is there may still save
    trainer.client.close(bye=False)
    wait_gone(pid)
    assert trainer.repository.keys()[-1].step == (2 if how == "signal" else 1)
    assert_all_verify(trainer.repository)


def test_agent_is_light_and_without_torch(tmp_path):
    """The agent's process has no torch, no numpy, and less than 40 MB of its own without slabs."""
    repository = Repository.open(str(tmp_path / "run"), create=True)
    client = AgentClient.connect(run_url=str(tmp_path / "run"), run_id=repository.run_id, role="visitor")
    process = psutil.Process(client.welcome.pid)
    assert process.memory_info().rss < 40 << 20
    assert not [one.path for one in process.memory_maps() if "torch" in one.path or "numpy" in one.path]
    client.close()
    stop(tmp_path / "run")


@pytest.mark.leaves_agent
def test_kill_campaign(tmp_path):
    """Round after round the trainer, the agent or both are killed at a random moment: acknowledged commits verify, sealed snapshots survive a trainer."""
    url, chance = tmp_path / "run", random.Random(20260101)
    Repository.open(str(url), create=True)
    newest = CheckpointKey(0, 0)
    committed: set[CheckpointKey] = set()
    for number in range(ROUNDS):
        victim = chance.choice(["trainer", "trainer", "agent", "both"])
        trainer = Process(url, disk=None, first=newest.step + 1, parent=(newest.step, newest.attempt))
        said: list[list[str]] = []
        trainer.say("run")
        said += [trainer.read() for _ in range(chance.randrange(1, 12))]
        if victim != "trainer":
            os.kill(trainer.agent_pid, signal.SIGKILL)
        said += trainer.end(0 if victim == "agent" else signal.SIGKILL)
        committed |= {CheckpointKey(int(words[1]), trainer.attempt) for words in said if words[0] == "committed"}
        sealed = [int(words[1]) for words in said if words[0] == "sealed"]
        repository = Repository.open(str(url))
        context = f"round {number}, {victim}"
        if victim == "trainer" and sealed:
            with contextlib.closing(visit(url)) as visitor:
                snapshot = visitor.snapshots()[0]
                assert snapshot.attempt == trainer.attempt, context
                assert snapshot.step >= sealed[-1], context
                with visitor.take(snapshot.slab) as taken:
                    assert bytes(taken.view[taken.file_offsets[0] + 4096 :][:1000]) == content(snapshot.step, 1000), context
                newest = CheckpointKey(snapshot.step, snapshot.attempt)
        else:
            wait_gone(trainer.agent_pid)
            newest = max((key for key in repository.lineage()), key=lambda key: (key.attempt, key.step), default=CheckpointKey(0, 0))
        assert committed <= set(repository.keys()), context
    with contextlib.suppress(Exception), contextlib.closing(visit(url)) as visitor:
        assert visitor.drain(timeout_s=20) is not None
    assert committed <= set(repository.keys())
    assert_all_verify(repository)


def test_agent_in_the_foreground(tmp_path):
    """``run_foreground`` serves a run that it makes, refuses to be a second one, outlives a trainer's bye, and ends by SIGTERM."""
    code = "import sys; from everystep.agent import run_foreground; sys.exit(run_foreground(sys.argv[1], idle_s=None))"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        for line in agent.stderr:
            if "serves run" in line:
                break
        trainer = Trainer(tmp_path / "run", spawn=False)
        assert trainer.client.welcome.pid == agent.pid
        second = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert "ConflictError" in second.stderr
        trainer.save(1)
        trainer.client.drain(timeout_s=20)
        trainer.client.close()
        assert [one.pid for one in find_agents()] == [agent.pid]
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(10) == 0
    assert_all_verify(trainer.repository)


SIGNAL_IN_A_THREAD = """
import os, signal, sys, threading, time
from everystep.agent import find_agents, run_foreground

def kill():
    while not find_agents():
        time.sleep(0.01)
    time.sleep(0.2)  # the main thread waits by now, and nothing else wakes it
    signal.pthread_kill(threading.get_ident(), int(sys.argv[2]))
    time.sleep(60)

threading.Thread(target=kill, daemon=True).start()
sys.exit(run_foreground(sys.argv[1], idle_s=None))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_that_comes_to_another_thread(tmp_path, number, status):
    """The kernel may hand a signal to any thread of the agent: it ends all the same, though nothing else wakes the main thread."""
    command = [sys.executable, "-c", SIGNAL_IN_A_THREAD, str(tmp_path / "run"), str(int(number))]
    assert subprocess.run(command, timeout=20, stderr=subprocess.DEVNULL, check=False).returncode == status
