"""Inputs that broke other checkpoint systems and need real processes, real file systems, or a power cut."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
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
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and control groups need root")


def started(script, *arguments, **options):
    """A Python process with pipes; its lines are read with ``line_of``."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, **options)


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

    def mounted(**options):
        disk = SimDisk(**options)
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
        disk, told = mounted(cut_at=cut_at), []
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
    source = ["-t", "tmpfs", "-o", "size=64m", "tmpfs"]
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
    import mmap

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
state = {"model": {f"layer{n}": torch.full((mib << 16,), float(n)) for n in range(4)}}  # 4 B x 4 = mib MiB
with everystep.Checkpointer(run) as warm:  # everything imported and touched once, with little data
    warm.save(0, {"t": torch.ones(5)}, sync=True)
ckpt = everystep.Checkpointer(run, fresh=True)
ckpt.restore({"t": torch.ones(5)})
say("ready")
for line in sys.stdin:
    if line.startswith("save"):
        for step in range(1, 4):
            state["model"]["layer0"].fill_(100.0 + step)
            pending = ckpt.save(step, state)
            pending.wait("memory", 60)
        ckpt.wait()
        say("saved", agent=ckpt._run.client.welcome.pid)
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
    """Peak of anonymous memory (slabs are shared memory and do not count) of processes, looked at every two milliseconds."""

    def __init__(self, pid):
        self.pids = {pid: 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while not self._stop.wait(0.002):
            self.look()

    def look(self):
        for pid in list(self.pids):
            self.pids[pid] = max(self.pids[pid], anonymous(pid))

    def begin(self, *pids):
        self.pids = dict.fromkeys(pids, 0)
        self.look()
        return dict(self.pids)

    def stop(self):
        self._stop.set()
        self._thread.join()


def anonymous(pid):
    """Bytes of anonymous memory now; 0 for a process that is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def slabs_of(pid):
    """Bytes of the slabs of an agent."""
    found = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith("/memfd:everystep-slab"):
                found += os.stat(entry.path).st_blocks * 512
    return found


def agents_started_by(folder):
    """The one agent whose runtime directory is ``folder``."""
    from everystep.agent import find_agents

    assert os.environ["EVERYSTEP_RUNTIME_DIR"] == str(folder)
    [agent] = find_agents()
    return agent.pid


@pytest.mark.timeout(120)
def test_memory_of_trainer_and_agent(tmp_path, runtime_dir):
    """F27 F29: while 512 MiB are written three times trainer and agent take at most 128 MiB beside the slabs; restores take at most the budget."""
    mib = 512
    with contextlib.closing(Watched(os.getpid())) if hasattr(Watched, "close") else contextlib.nullcontext():
        process = started(WRITER, tmp_path / "run", mib, env={**os.environ, "OMP_NUM_THREADS": "1"})
        watched = Watched(process.pid)
        try:
            line_of(process, "ready")
            before = watched.begin(process.pid)[process.pid]
            say(process, "save")
            seen = threading.Thread(target=lambda: None)
            seen.start()
            agent = line_of(process, "saved")["agent"]
            trainer_extra = watched.pids[process.pid] - before
            agent_peak = peak_anonymous(agent)
            slabs = slabs_of(agent)
            assert mib * MIB <= slabs <= 3 * (mib + 1) * MIB
            assert trainer_extra + agent_peak <= 128 * MIB, f"trainer {trainer_extra / MIB:.0f} MiB more, agent {agent_peak / MIB:.0f} MiB"
            for tier in ("memory", "disk"):
                say(process, "wipe")
                line_of(process, "wiped")
                before = watched.begin(process.pid, agent)
                say(process, "restore")
                got = line_of(process, "restored")
                assert (got["step"], got["tier"], got["good"]) == (3, tier, True)
                extra = watched.pids[process.pid] - before[process.pid]
                assert extra <= 64 * MIB + 16 * MIB, f"a restore from {tier} takes {extra / MIB:.0f} MiB"
                say(process, "close")
                line_of(process, "closed")
        finally:
            watched.stop()
            assert ended(process) == 0
