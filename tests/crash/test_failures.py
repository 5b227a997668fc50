"""Inputs that broke other checkpoint systems and need real processes, real file systems, or a power cut."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import everystep
from everystep import protocol
from everystep.agent import messages
from everystep.agent.client import AgentClient
from everystep.agent.memory import Room
from everystep.agent.server import SIGNAL_GRACE_S, AgentServer
from everystep.agent.wire import Channel
from everystep.errors import AgentError
from everystep.manifest import TensorSpec
from everystep.plan import plan_save
from everystep.policy import Cadence, Keep
from everystep.repository import CheckpointKey, Repository
from everystep.store.disk import RealDisk, address
from everystep.store.local import LocalStore
from everystep.testing import PowerCut, SimDisk, Survival
from everystep.testing.samples import persist

MIB = 1 << 20
HERE = Path(__file__).parent


def neighbour(name):
    """Another file of this folder as a module: the tests are no package."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kill = neighbour("test_agent_kill")
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and control groups need root")


def started(script, *arguments, **options):
    """A Python process with pipes; its lines are read with ``line_of``."""
    how = [str(script)] if isinstance(script, Path) else ["-c", script]
    process = subprocess.Popen(
        [sys.executable, *how, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, **options
    )
    children.append(process)
    return process


children: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_child_is_left():
    """A test that fails in the middle leaves no process and no pipe behind that would fail the next one."""
    yield
    while children:
        process = children.pop()
        process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        process.wait(10)


def line_of(process, word):
    """What follows ``word`` on the next line that begins with it, as JSON."""
    for line in process.stdout:
        first, _, rest = line.partition(" ")
        if first == word:
            return json.loads(rest)
    raise AssertionError(f"the process ended ({process.wait(10)}) before it said {word!r}")


def say(process, line):
    process.stdin.write(line + "\n")
    process.stdin.flush()


def ended(process, number=None, timeout=20):
    """Send the signal, if any, and wait; returns the exit status."""
    if number is not None:
        process.send_signal(number)
    process.stdin.close()
    process.stdout.close()
    return process.wait(timeout)


def wait_gone(pid, timeout):
    """Whether the process ended within the time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout)[0])
    finally:
        os.close(fd)


def assert_all_verify(repository):
    for key in repository.keys():
        assert [wrong for _, _, wrong in repository.verify(key) if wrong] == [], key


# -- power cuts ----------------------------------------------------------------------------------------------------------


class NoFileFsync(LocalStore):
    """A planted bug: the name is durable before the content is."""

    def _write_file(self, temporary, view, nbytes, device, *, direct, large):
        fd = self._disk.open(temporary, os.O_WRONLY | os.O_CREAT)
        self._write_all(fd, view[:nbytes], 0, step=1)
        self._disk.close(fd)


def cut_while_the_pointer_moves(store_class):
    """A pointer that follows a growing run, cut at every call: whatever it says after the cut is there, and committed."""

    def history(store, told):
        repository = Repository(store)
        repository.begin(create=True)
        attempt = repository.start_attempt(parent=None, now=0.0).attempt
        for step in (1, 2, 3):
            key = CheckpointKey(step, attempt)
            repository.commit(persist(repository, key))
            store.replace("exports/LATEST", str(key).encode())
            told.append(key)

    def mounted():
        disk = SimDisk()
        disk.mkdir("/mnt")
        fd = disk.open("/", 0)
        disk.fsync(fd)
        disk.close(fd)
        disk.calls.clear()
        return disk

    counting = mounted()
    history(store_class("/mnt/run", disk=counting, writers=1), [])
    outcomes = 0
    for cut_at in range(1, len(counting.calls) + 1):
        disk, told = mounted(), []
        disk.cut_at = cut_at
        with pytest.raises(PowerCut):
            history(store_class("/mnt/run", disk=disk, writers=1), told)
        for survival in Survival:
            repository = Repository(LocalStore("/mnt/run", disk=disk.after_power_cut(survival, seed=cut_at), writers=1))
            exports = dict(repository.store.list("exports/"))
            pointed = repository.store.get("exports/LATEST").decode() if exports else ""
            assert "exports/LATEST" in exports or not told, f"cut at {cut_at}, {survival}: the pointer is lost"
            if exports:
                key = CheckpointKey.parse(pointed)  # ValueError: empty or torn
                assert key in repository.keys(), f"cut at {cut_at}, {survival}: LATEST names {key}, which is not durable"
                assert not told or key >= told[-1], f"cut at {cut_at}, {survival}: LATEST went back to {key}"
                assert not [wrong for _, _, wrong in repository.verify(key, threads=1) if wrong]
            outcomes += 1
    return outcomes


def test_a_pointer_never_precedes_its_target():
    """F38 F39: the power is cut at each call while LATEST moves: it is whole, names a durable checkpoint that verifies, and never goes back."""
    assert cut_while_the_pointer_moves(LocalStore) > 300


def test_a_zero_length_pointer_is_found():
    """F38 F39: the same harness finds a store that renames before it has synced the content."""
    with pytest.raises((AssertionError, ValueError, everystep.CheckpointError)):
        cut_while_the_pointer_moves(NoFileFsync)


# -- real file systems -----------------------------------------------------------------------------------------------------


class CountingDisk(RealDisk):
    """Tells whether writes went past the page cache."""

    def __init__(self):
        self.direct = []

    def open(self, path, flags):
        if flags & os.O_WRONLY:
            self.direct.append(bool(flags & os.O_DIRECT))
        return super().open(path, flags)


@pytest.fixture(params=["ext4", "xfs", "btrfs", "tmpfs"])
def mounted(request, tmp_path):
    """An empty file system of a kind, in a file behind a loop device: (kind, folder, mount again)."""
    kind, image, folder = request.param, tmp_path / "image", tmp_path / "mnt"
    folder.mkdir()
    source = ["-t", "tmpfs", "-o", "size=200m", "tmpfs"]
    if kind != "tmpfs":
        if shutil.which(f"mkfs.{kind}") is None:
            pytest.skip(f"mkfs.{kind} is not installed")
        with image.open("wb") as file:
            file.truncate(320 * MIB)  # sparse; no less for xfs
        subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True, capture_output=True)
        source = ["-o", "loop", str(image)]

    def mount():
        done = subprocess.run(["mount", *source, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")

    def again():
        if kind != "tmpfs":
            subprocess.run(["umount", str(folder)], check=True)
            mount()

    mount()
    yield kind, folder, again
    subprocess.run(["umount", "-l", str(folder)], check=True)


@AS_ROOT
def test_sizes_on_real_file_systems(mounted):
    """F46: 10, 4095, 4096, 4097 and many unaligned bytes, directly where the file system can: right after a new mount, and read at any offset."""
    kind, folder, again = mounted
    content = np.random.default_rng(7).integers(0, 256, 9 * MIB + 4099, dtype=np.uint8).tobytes()
    aligned = memoryview(mmap.mmap(-1, 10 * MIB))
    aligned[: len(content)] = content
    assert address(aligned) % 4096 == 0
    disk = CountingDisk()
    store = LocalStore(str(folder / "run"), disk=disk, large_nbytes=1)
    sizes = [0, 1, 10, 511, 512, 4095, 4096, 4097, 65537, MIB, 8 * MIB, 8 * MIB + 1, 9 * MIB + 4095, len(content)]
    for size in sizes:
        store.put(f"padded/{size}", aligned, nbytes=size)  # as a slab is written: the padding behind is there
        store.put(f"exact/{size}", aligned[:size])
        store.put(f"shifted/{size}", memoryview(content)[3 : 3 + size] if size + 3 <= len(content) else memoryview(content))
        assert store.create(f"record/{size}", content[: min(size, 65537)])
    assert any(disk.direct) or kind == "tmpfs", f"{kind} was never written directly"
    again()
    for size in sizes:
        for name in ("padded", "exact"):
            assert (folder / "run" / name / str(size)).read_bytes() == content[:size], (kind, name, size)
        expected = content[3 : 3 + size] if size + 3 <= len(content) else content
        assert (folder / "run" / "shifted" / str(size)).read_bytes() == expected, (kind, size)
        assert store.get(f"record/{size}") == content[: min(size, 65537)]
    into = memoryview(mmap.mmap(-1, 9 * MIB))
    for begin in (0, 1, 4095, 4096, 4097):
        store.read_into(f"padded/{len(content)}", begin, into[: 8 * MIB + begin])
        assert into[: 8 * MIB + begin] == content[begin : begin + 8 * MIB + begin], (kind, begin)
    assert list(store.leftovers("")) == []
    repository = Repository.open(str(folder / "checkpoints"), create=True)
    with everystep.Checkpointer(folder / "checkpoints", agent=False) as ckpt:
        ckpt.save(1, {"t": torch.frombuffer(bytearray(content), dtype=torch.uint8)}, sync=True)
    again()
    assert everystep.load(folder / "checkpoints")["t"].numpy().tobytes() == content
    assert_all_verify(repository)


# -- memory ----------------------------------------------------------------------------------------------------------------

WRITER = """
import gc, json, sys
import torch, everystep

say = lambda word, **what: (sys.stdout.write(word + " " + json.dumps(what) + chr(10)), sys.stdout.flush())
run, mib = sys.argv[1], int(sys.argv[2])
large = {f"layer{n}": torch.full((mib << 16,), float(n)) for n in range(3)}  # read straight into place
small = {f"small{n}": torch.full((1 << 14,), float(n)) for n in range(mib << 2)}  # read through buffers; mib MiB in all
state = {"model": {**large, **small}}
with everystep.Checkpointer(run) as warm:  # everything imported and touched once, with little data
    warm.save(0, {"t": torch.ones(5)}, sync=True)
ckpt = everystep.Checkpointer(run, fresh=True)
say("ready")
for line in sys.stdin:
    if line.startswith("save"):
        for step in range(1, 4):
            state["model"]["layer0"].fill_(100.0 + step)
            pending = ckpt.save(step, state)
            pending.wait("memory", 60)
            if step == 1:
                say("agent", pid=ckpt._run.client.welcome.pid)
        ckpt.wait()
        say("saved")
    elif line.startswith("close"):
        ckpt.close()
        say("closed")
    elif line.startswith("wipe"):
        for tensor in state["model"].values():
            tensor.fill_(-1.0)
        say("wiped")
    elif line.startswith("restore"):
        if ckpt._closed:
            ckpt = everystep.Checkpointer(run)
        step = ckpt.restore(state)
        good = all(bool((tensor == (100.0 + step if name == "layer0" else float(name[5:]))).all()) for name, tensor in state["model"].items())
        say("restored", step=step, tier=ckpt.restored_from.tier, good=good)
"""


class Watched:
    """Peaks of the memory of processes, (anonymous, anonymous and shared), looked at every two milliseconds."""

    def __init__(self, pid):
        self.peaks = {pid: memory_of(pid)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while not self._stop.wait(0.002):
            peaks = self.peaks
            for pid in list(peaks):
                peaks[pid] = tuple(map(max, peaks[pid], memory_of(pid)))

    def begin(self, *pids):
        """Forget the peaks; from now on these are watched."""
        self.peaks = {pid: memory_of(pid) for pid in pids}
        return dict(self.peaks)

    def close(self):
        self._stop.set()
        self._thread.join()


def memory_of(pid):
    """Bytes of anonymous memory, and of that and shared memory (slabs, and what mmap made), now; zeros for a process that is gone."""
    found = {"RssAnon": 0, "RssShmem": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) << 10
    return found["RssAnon"], sum(found.values())


def slabs_of(pid):
    """Bytes of the slabs of an agent."""
    found = {}  # by inode: a mapping has a descriptor of its own
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith("/memfd:everystep-slab"):
                found[os.stat(entry.path).st_ino] = os.stat(entry.path).st_blocks * 512
    return sum(found.values())


@pytest.mark.timeout(120)
def test_memory_of_trainer_and_agent(tmp_path):
    """F27 F29: while 512 MiB are written three times, trainer and agent take at most 128 MiB beside the slabs; restores take at most their budget."""
    mib = 512
    process = started(WRITER, tmp_path / "run", mib)
    with contextlib.closing(Watched(process.pid)) as watched:
        line_of(process, "ready")
        before, _ = watched.begin(process.pid)[process.pid]
        assert before > mib * MIB, "the state itself is anonymous memory: the measure works"
        say(process, "save")
        agent = line_of(process, "agent")["pid"]
        watched.peaks[agent] = memory_of(agent)
        line_of(process, "saved")
        slabs = slabs_of(agent)
        assert mib * MIB <= slabs <= 3 * (mib + 2) * MIB
        for peak in (
            watched.peaks[process.pid][0] + watched.peaks[agent][0],
            sum(watched.peaks[pid][1] - slabs for pid in (process.pid, agent)),
        ):
            assert peak - before <= 128 * MIB, f"trainer and agent take {(peak - before) / MIB:.0f} MiB beside the slabs"
        for tier in ("memory", "disk"):
            say(process, "wipe")
            line_of(process, "wiped")
            which = 1 if tier == "disk" else 0  # from memory the snapshot itself is mapped: it is shared and takes nothing
            before = watched.begin(process.pid)[process.pid][which]
            say(process, "restore")
            got = line_of(process, "restored")
            assert (got["step"], got["tier"], got["good"]) == (3, tier, True)
            extra = watched.peaks[process.pid][which] - before
            assert extra <= 64 * MIB + 24 * MIB, f"a restore from {tier} takes {extra / MIB:.0f} MiB"
            say(process, "close")
            line_of(process, "closed")
    assert ended(process) == 0


CONFINED = """
import os, sys
group, run, slabs = sys.argv[1], sys.argv[2], float(sys.argv[3])
open(group + "/cgroup.procs", "w").write(str(os.getpid()))  # before anything is allocated: memory stays charged to where it was touched
import json, logging
import torch, everystep

nbytes = 160 << 20
state = {"t": torch.ones(nbytes // 4)}
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("everystep").addHandler(handler)
words = dict(line.split() for line in open(group + "/memory.stat"))
used = int(open(group + "/memory.usage_in_bytes").read()) - int(words["total_inactive_file"])
limit = int((used + (50 << 20) + slabs * nbytes) * 16 / 15)  # the agent, and the reserve that it leaves
open(group + "/memory.limit_in_bytes", "w").write(str(limit))
ckpt = everystep.Checkpointer(run, max_failures=100)
reports = []
for step in range(1, 7):
    state["t"].fill_(float(step))
    pending = ckpt.save(step, state)
    try:
        report = pending.wait("disk", 60)
        reports.append([report.outcome, report.reason])
    except everystep.CapacityError as error:
        reports.append(["CapacityError", str(error)])
try:
    ckpt.close()
    closed = ""
except everystep.CheckpointError as error:
    closed = type(error).__name__
print("told " + json.dumps({"reports": reports, "warnings": warnings, "limit": limit, "closed": closed}), flush=True)
"""


@pytest.fixture
def group():
    """An empty memory control group below this process's own."""
    folder = None
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                folder = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / f"everystep-test-{os.getpid()}"
    if folder is None:
        pytest.skip("no memory control group of version 1 here")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
            wait_gone(int(pid), 5)
    folder.rmdir()


@AS_ROOT
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("slabs", "outcome"), [(1.5, "disk"), (0.5, "CapacityError")])
def test_a_control_group_too_small(tmp_path, group, slabs, outcome):
    """F30: trainer and agent in a real control group with room for one slab: a warning, and every save goes by way of it; for none: CapacityError with numbers."""
    process = started(CONFINED, group, tmp_path / "run", slabs)
    told = line_of(process, "told")
    assert ended(process) == 0
    oom = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    assert oom.get("oom_kill", "0") == "0"
    assert [one[0] for one in told["reports"]] == [outcome] * 6, told
    if outcome == "disk":
        assert len([line for line in told["warnings"] if line.startswith("only 1 of 3 slabs")]) == 1, told["warnings"]
        assert told["closed"] == ""
        repository = Repository.open(str(tmp_path / "run"))
        assert [key.step for key in repository.lineage()] == [6, 5, 4]
        assert_all_verify(repository)
    else:
        limit = f"control group limit {told['limit'] // 4096 * 4096:,}"
        assert all(limit in reason and "bytes of memory" in reason for _, reason in told["reports"]), told
        assert told["closed"] == "CapacityError"


# -- processes that die ------------------------------------------------------------------------------------------------------


@pytest.mark.leaves_agent
def test_agent_killed_under_a_pending_save(tmp_path):
    """F32: the agent is killed with -9 while it writes: wait() raises AgentError, nothing half is committed, and the next save gets a new agent."""
    state = {"t": torch.arange(192 * MIB, dtype=torch.uint8)}
    with everystep.Checkpointer(tmp_path / "run", overlap=False, cadence=Cadence(disk=1)) as ckpt:
        ckpt.save(1, {"t": torch.ones(3)}, sync=True)
        killed = ckpt._run.client.welcome.pid
        pending = ckpt.save(2, state)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(AgentError, match="before step 2 was on disk"):
            pending.wait("disk", 20)
        assert [key.step for key in Repository.open(str(tmp_path / "run")).keys()] == [1]
        assert ckpt.save(3, {"t": torch.ones(3)}, sync=True).report.tier == "disk"
        assert ckpt._run.client.welcome.pid != killed
        assert len(ckpt.failures) == 1
    assert_all_verify(Repository.open(str(tmp_path / "run")))


TRAINER = """
import json, sys, torch, everystep
say = lambda word, **what: (sys.stdout.write(word + " " + json.dumps(what) + chr(10)), sys.stdout.flush())
state = {"t": torch.zeros(200_000)}
ckpt = everystep.Checkpointer(sys.argv[1], cadence=everystep.Cadence(disk=False))
step = ckpt.restore(state) or 0
say("restored", step=step, value=float(state["t"][7]))
for line in sys.stdin:
    step += 1
    state["t"].fill_(float(step))
    pending = ckpt.save(step, state)
    pending.wait("memory", 20)
    say("sealed", step=step, tier=pending.report.tier, agent=ckpt._run.client.welcome.pid)
"""


def test_sigterm_kills_a_trainer(tmp_path):
    """F53: SIGTERM to a trainer that does nothing about it and to its agent: the trainer dies of it, the agent makes the newest snapshot durable and ends."""
    trainer = started(TRAINER, tmp_path / "run")
    line_of(trainer, "restored")
    for _ in range(3):
        say(trainer, "go")
        told = line_of(trainer, "sealed")
    assert told["tier"] == "memory", "nothing has asked for the disk yet, and nothing may say that it is there"
    assert Repository.open(str(tmp_path / "run")).keys() == []
    os.kill(told["agent"], signal.SIGTERM)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(20) == -signal.SIGTERM
    assert wait_gone(told["agent"], 20)
    repository = Repository.open(str(tmp_path / "run"))
    assert [key.step for key in repository.keys()] == [3]
    assert_all_verify(repository)
    assert everystep.load(tmp_path / "run")["t"].unique().tolist() == [3.0]


@pytest.mark.parametrize("agent_first", [True, False])
@pytest.mark.parametrize("grace_s", [5, 30, 120])
def test_sigterm_to_everybody(tmp_path, grace_s, agent_first):
    """F53: 5, 30 or 120 s between SIGTERM and SIGKILL, in either order: what was sealed is on disk and the agent has ended by itself before."""
    trainer = kill.Process(tmp_path / "run")
    for step in (1, 2):
        trainer.say(f"save {step}")
        trainer.read("sealed")
    for agent in (agent_first, not agent_first):
        if agent:
            os.kill(trainer.agent_pid, signal.SIGTERM)
        else:
            said = trainer.end(signal.SIGTERM)
    assert trainer.process.returncode == -signal.SIGTERM
    assert wait_gone(trainer.agent_pid, grace_s), "the agent would have been killed in its drain"
    repository = Repository.open(str(tmp_path / "run"))
    assert [key.step for key in repository.keys()] == [2]
    assert all(words[0] != "committed" or words[1] == "2" for words in said)
    assert_all_verify(repository)


SLOW_AGENT = """
import os, sys
from everystep.agent import run_foreground
from everystep.store.disk import RealDisk

real = RealDisk.fsync
def slow(self, fd):
    path = os.readlink(f"/proc/self/fd/{fd}")
    if "/data/000000000002" in path and os.path.isfile(path):
        print("slow", flush=True)
        sys.stdin.readline()
    real(self, fd)
RealDisk.fsync = slow
sys.exit(run_foreground(sys.argv[1], idle_s=None))
"""


@pytest.mark.parametrize("files_in_time", [0, 1, 2])
def test_grace_and_a_slow_disk(tmp_path, files_in_time):
    """F53: a disk so slow that the grace ends before, between or after the two files of a snapshot: committed when both are there, else the one before it is what there is."""
    run = tmp_path / "run"
    Repository.open(str(run), create=True)
    agent = started(SLOW_AGENT, run, stderr=subprocess.PIPE)
    for line in agent.stderr:
        if "serves run" in line:
            break
    trainer = kill.Process(run)
    assert trainer.agent_pid == agent.pid
    trainer.say("save 1 bound")
    trainer.read("committed")
    trainer.say("save 2")
    trainer.read("sealed")
    agent.send_signal(signal.SIGTERM)
    assert agent.stdout.readline() == "slow\n"  # the drain has begun
    said = trainer.end(signal.SIGTERM)
    assert trainer.process.returncode == -signal.SIGTERM
    assert not [words for words in said if words[0] == "committed"], "told before it was true"
    repository = Repository.open(str(run))
    for _ in range(files_in_time):
        assert [key.step for key in repository.keys()] == [1]
        say(agent, "on")
        told = agent.stdout.readline()
    if files_in_time == 2:
        assert told == "", "a third file?"
        assert ended(agent) == 0
        assert [key.step for key in repository.keys()] == [1, 2]
    else:
        assert ended(agent, signal.SIGKILL) == -signal.SIGKILL
        assert [key.step for key in repository.keys()] == [1]
        after = kill.Process(run, parent=(1, 1))
        after.say("save 3 bound")
        after.read("committed")
        after.say("close")
        after.process.stdin.close()
        after.end(0)
        assert [key.step for key in repository.lineage()] == [3, 1]
    agent.stderr.close()
    assert_all_verify(repository)


def test_the_agents_own_deadline(tmp_path, monkeypatch):
    """F53: a drain longer than the agent's own deadline ends there and not before, without a commit, and who waits for it is not told that it is complete."""
    now, may_write, writes = [1000.0], threading.Event(), threading.Event()
    real = RealDisk.pwrite

    def stuck(self, fd, data, offset):
        if "/data/" in os.readlink(f"/proc/self/fd/{fd}"):
            writes.set()
            assert may_write.wait(20)
            raise OSError(errno.EIO, "the process would be gone by now")
        return real(self, fd, data, offset)

    monkeypatch.setattr(RealDisk, "pwrite", stuck)
    repository = Repository.open(str(tmp_path / "run"), create=True)
    server = AgentServer(repository, run_url=str(tmp_path / "run"), run_id=repository.run_id, idle_s=600.0, room=lambda: Room(1 << 40, ""),
                         clock=lambda: now[0])  # fmt: skip
    ours, theirs = socket.socketpair()
    serving = server.adopt(Channel(theirs))
    client = AgentClient(Channel(ours), idle_s=600.0, wait_closed=None, on_event=None, on_lost=None, timeout_s=20)
    client._welcome = client._ask(messages.Hello(protocol=1, role="trainer", run_id=repository.run_id, pid=os.getpid()), messages.Welcome)
    attempt = repository.start_attempt(parent=None, now=0.0).attempt
    client.configure(attempt=attempt, cadence=Cadence(disk=False), keep=Keep(), memory_budget=None)
    plan = plan_save([TensorSpec("model.w", "U8", (3 * MIB,), "model")], aliases={})
    client.prepare(plan)
    slab = client.lease(plan, 1)
    client.seal(slab, plan=plan, step=1, attempt=1, saved_at=0.0, values=b"{}", metrics={}, bound=False, pin=False, timings_s={})
    end = threading.Event()
    server.on_end(end.set)
    server.signal()
    assert writes.wait(20)
    for grace_s in (5.0, 30.0, SIGNAL_GRACE_S - 0.1):
        now[0] = 1000.0 + grace_s
        server.feed(protocol.Ticked())
        assert not end.is_set(), f"gave up after {grace_s} s"
    now[0] = 1000.0 + SIGNAL_GRACE_S
    server.feed(protocol.Ticked())
    assert end.wait(20)
    assert "the time for the drain has passed" in server.end_reason
    assert repository.keys() == []
    closing = threading.Thread(target=server.close)
    closing.start()
    with pytest.raises(AgentError):
        client.drain(timeout_s=1.0)
    may_write.set()
    closing.join(20)
    assert not closing.is_alive()
    client.close(bye=False)
    serving.join(20)
    server._persister._thread.join(20)
    assert repository.keys() == []


# -- data and order ------------------------------------------------------------------------------------------------------------


@pytest.mark.leaves_agent
def test_sample_order_after_kill(tmp_path):
    """F60: killed with -9 in each epoch, once together with the agent: each sample exactly once an epoch, and the losses are the uninterrupted run's, bit by bit."""
    done = subprocess.run(
        [sys.executable, str(HERE / "sampling.py"), str(tmp_path / "run")], capture_output=True, text=True, timeout=100, check=True
    )
    told = json.loads(done.stdout)
    plain = {what["step"]: what for what in told["plain"]}
    assert sorted(plain) == list(range(1, 22))
    run: dict[int, dict] = {}  # what counts: a step that comes after the restored one never happened
    tiers = []
    for restored, *steps in told["lives"]:
        assert restored["what"] == "restored"
        tiers.append(restored["tier"])
        assert restored["step"] >= max(run, default=0) - 1 or restored["tier"] == "disk", "the newest sealed snapshot was there to be had"
        # A life may get further than it could tell: those steps are the uninterrupted run's if what follows is.
        run = {step: run.get(step, plain[step]) for step in range(1, restored["step"] + 1)}
        assert [what["step"] for what in steps] == list(range(restored["step"] + 1, restored["step"] + 1 + len(steps)))
        run.update({what["step"]: what for what in steps})
    assert tiers == ["", "memory", "disk", "memory"]
    assert sorted(run) == sorted(plain)
    for epoch in range(3):
        assert sorted(row for what in run.values() if what["epoch"] == epoch for row in what["rows"]) == list(range(28)), f"epoch {epoch}"
    assert [run[step]["rows"] for step in sorted(run)] == [plain[step]["rows"] for step in sorted(run)]
    assert [run[step]["loss"] for step in sorted(run)] == [plain[step]["loss"] for step in sorted(run)]
