"""watch beside a process that saves and prunes: what is exported, protected, survived, and left behind."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

SAVING = Path(__file__).with_name("saving.py")
_spec = importlib.util.spec_from_file_location("saving", SAVING)
saving = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(saving)


STATE = {"state": {"dict": [["model", {"module": {}}], ["optim", {"optimizer": {}}]]}}
"""The structure of a state with a module and its optimizer, as a trainer tells it."""


@pytest.fixture
def three(made, arrays):
    """A run with the steps 10, 20, 30; 20 has the lowest loss."""
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        made.save(step, arrays(step), plain=STATE, metrics={"val_loss": loss})
    return made


class Job:
    """The process that saves."""

    def __init__(self, kind, root):
        self.root = root
        self.process = subprocess.Popen([sys.executable, str(SAVING), kind, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def do(self, *lines):
        """One line after the other, each when the one before is done."""
        for line in lines:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == line + "\n"

    def end(self):
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


class Watching:
    """``everystep watch`` as a process, its events as they come."""

    def __init__(self, root, *words):
        command = [sys.executable, "-m", "everystep.cli", "watch", str(root), "--json", "--poll", "100ms", *map(str, words)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.events = []

    def until(self, what, **wanted):
        """Read events up to this one."""
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == what and all(self.events[-1].get(name) == value for name, value in wanted.items()):
                return self.events[-1]
        raise AssertionError(f"it ended before {what!r}: {self.events[-5:]} {self.process.stderr.read()}")

    def end(self, number=signal.SIGTERM):
        """Ask it to end; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        with self.process:
            self.events += [json.loads(line) for line in self.process.stdout]
            self.said = self.process.stderr.read()
            return self.process.wait(30)

    def told(self, *what):
        return [(event["event"], event.get("step")) for event in self.events if event["event"] in what]


@pytest.fixture
def start(tmp_path):
    """Starts jobs and watches; ends what a failed test left."""
    started = []

    def begin(cls, *args):
        started.append(cls(*args))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        with one.process, contextlib.suppress(BrokenPipeError):
            pass


@pytest.fixture
def job(start, tmp_path):
    """NeMo AutoModel's layout."""
    made = start(Job, "automodel", tmp_path / "checkpoints")
    yield made
    made.end()


@contextlib.contextmanager
def held(exports):
    """The exports' lock, held here: a child that consolidates waits for it in the middle of its work."""
    exports.mkdir(exist_ok=True)
    lock = os.open(exports / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def tensors(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}


def is_step(folder, step):
    """Whether the export holds what the job saved as this step, bit for bit."""
    wanted, found = saving.weights(step), tensors(folder)
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def hidden(root):
    return sorted(name for name in os.listdir(root) if name.startswith(".everystep"))


def test_a_running_job_is_followed(job, start):
    """Due steps are exported as they come, others and incomplete ones are not; LATEST is the newest; on SIGTERM it ends with 0."""
    watch = start(Watching, job.root, "--when", "every: 5", "--keep", "all")
    watch.until("watching")
    job.do("save 5", "save 7")
    watch.until("consolidated", step=5)
    job.do("begin 10")
    watch.until("incomplete", step=10)
    job.do("save 15")
    told = watch.until("consolidated", step=15)
    assert told["path"] == str((job.root / "exports" / "LATEST").resolve())
    assert watch.end() == 0
    assert watch.told("skipped", "consolidated") == [("skipped", 7), ("consolidated", 5), ("consolidated", 15)] or watch.told("consolidated") == [
        ("consolidated", 5), ("consolidated", 15),
    ]  # fmt: skip
    assert watch.events[-1]["event"] == "ended"
    assert is_step(job.root / "exports" / "LATEST", 15)
    assert is_step(next((job.root / "exports").glob("model-epoch_0_step_5")), 5)
    assert hidden(job.root) == []


def test_nemos_own_pruning_spares_the_step_that_is_read(job, start):
    """While step 5 is read the job prunes down to one: by its own rule the symbolic link protects it, and afterwards it goes."""
    with held(job.root / "exports"):
        watch = start(Watching, job.root, "--when", "every: 5")
        job.do("save 5")
        assert watch.until("due")["protected"] == "symlink"
        job.do("save 6", "save 7", "keep 1")
        assert (job.root / "epoch_0_step_5").exists()
        assert not (job.root / "epoch_0_step_6").exists()
    watch.until("consolidated", step=5)
    assert watch.end() == 0
    assert is_step(job.root / "exports" / "LATEST", 5)
    assert hidden(job.root) == []
    job.do("keep 1")
    assert not (job.root / "epoch_0_step_5").exists()


def test_a_real_dcp_checkpoint_deleted_while_it_is_read(start, tmp_path):
    """A checkpoint as torchtitan has it, written by torch: what the job deletes meanwhile is read from a second name of its files; nothing stays."""
    job = start(Job, "dcp", tmp_path / "checkpoint")
    with held(job.root / "exports"):
        watch = start(Watching, job.root, "--when", "every: 5")
        job.do("begin 3", "save 5")
        assert watch.until("due", step=5)["protected"] == "links"
        job.do("save 6", "keep 1")
        assert not (job.root / "step-5").exists()
    watch.until("consolidated", step=5)
    assert watch.end() == 0
    assert is_step(job.root / "exports" / "LATEST", 5)
    assert hidden(job.root) == []
    job.end()


def test_killed_and_started_again(job, start):
    """Killed with -9 in the middle: its child dies with it; the next watch sweeps what was left, and does what was due, once."""
    job.do("save 5", "save 10")
    with held(job.root / "exports"):
        watch = start(Watching, job.root, "--when", "every: 5", "--keep", "all")
        watch.until("due", step=5)
        children = psutil.Process(watch.process.pid).children()
        assert len(children) == 1
        watch.end(signal.SIGKILL)
        assert psutil.wait_procs(children, timeout=20)[1] == []
        assert hidden(job.root) != []
    watch = start(Watching, job.root, "--when", "every: 5", "--keep", "all")
    watch.until("consolidated", step=10)
    watch.end(signal.SIGKILL)
    job.do("save 15")
    watch = start(Watching, job.root, "--when", "every: 5", "--keep", "all")
    watch.until("consolidated", step=15)
    assert watch.end() == 0
    assert watch.told("due", "already") == [("due", 15)]
    assert hidden(job.root) == []
    assert sorted(path.name for path in (job.root / "exports").glob("[!.]*")) == [
        "LATEST", "history.json", "model-epoch_0_step_10", "model-epoch_0_step_15", "model-epoch_0_step_5",
    ]  # fmt: skip


def test_sigterm_in_the_middle_leaves_nothing(job, start):
    """Asked to end while a child works: the child is gone, and so are its partial export and the protection."""
    partial = job.root / "exports" / ".model-epoch_0_step_5-00000000.partial"
    job.do("save 5")
    with held(job.root / "exports"):
        watch = start(Watching, job.root, "--when", "every")
        watch.until("due", step=5)
        [child] = psutil.Process(watch.process.pid).children()
        partial.mkdir()
        (partial / "half").write_bytes(bytes(100))
        watch.process.terminate()
        watch.until("ended")
    assert watch.end() == 0
    assert not child.is_running()
    assert hidden(job.root) == []
    assert not (job.root / "exports" / "LATEST").exists()


def test_the_partial_export_of_a_killed_child_is_swept(job, everystep):
    """What a dead writer left goes when a watch has nothing to do with it."""
    job.do("save 5")
    partial = job.root / "exports" / ".model-epoch_0_step_4-00000000.partial"
    partial.mkdir(parents=True)
    (partial / "half").write_bytes(bytes(100))
    assert everystep("watch", job.root, "--when", "never", "--once").code == 0
    assert not partial.exists()


def test_a_folder_that_vanishes_and_comes_back(job, start, tmp_path):
    """It waits for the folder, says so once, and goes on with what is new."""
    watch = start(Watching, tmp_path / "later", "--when", "every")
    watch.until("absent")
    job.do("save 5")
    shutil.move(job.root, tmp_path / "later")
    watch.until("consolidated", step=5)
    shutil.move(tmp_path / "later", tmp_path / "away")
    watch.until("absent")
    shutil.move(tmp_path / "away", tmp_path / "later")
    watch.until("back")
    assert watch.end() == 0
    assert watch.told("absent", "back") == [("absent", None), ("back", None)] * 2


def test_a_full_disk_is_said_and_tried_again(job, start, tmp_path):
    """Exports into a disk that is full: said once, and done when there is room again."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], check=False, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        (place / "fills").write_bytes(bytes(2 << 20))
        job.do("save 5")
        command = "from everystep.consolidate import watching; watching.RETRY_S = (0.2, 0.2); watching.Watch.__init__.__kwdefaults__['retry_s'] = (0.2, 0.2); "
        command += "from everystep.cli import main; main()"
        watch = Watching.__new__(Watching)
        watch.events = []
        words = ["watch", str(job.root), "--when", "every", "--into", str(place / "served"), "--json", "--poll", "100ms"]
        watch.process = subprocess.Popen([sys.executable, "-c", command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        full = watch.until("full", step=5)
        assert full["error"] == "CapacityError"
        (place / "fills").unlink()
        watch.until("consolidated", step=5)
        assert watch.end() == 0
        assert is_step(place / "served" / "LATEST", 5)
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_final_when_the_process_has_ended(start, tmp_path):
    """F57: --pid: the newest checkpoint when the job's process is gone, and then the watch ends by itself."""
    job = start(Job, "automodel", tmp_path / "checkpoints")
    watch = start(Watching, job.root, "--when", "final", "--pid", str(job.process.pid))
    job.do("save 5", "save 9")
    watch.until("watching")
    job.end()
    watch.until("over")
    assert watch.process.wait(20) == 0
    assert watch.told("consolidated") == [("consolidated", 9)]
    assert is_step(job.root / "exports" / "LATEST", 9)


def test_once_for_cron(job, everystep):
    """One call does what is due and ends; the next one finds nothing to do; with --final the newest, once."""
    job.do("save 5", "save 10", "save 11", "begin 15")
    told = everystep("watch", job.root, "--when", "[every: 5, final]", "--once", "--keep", "all")
    assert told.code == 0, told
    assert told.stdout.count("  consolidated  ") == 2
    assert "incomplete" in told.stdout
    assert everystep("watch", job.root, "--when", "every: 5", "--once", "--json").stdout.count('"due"') == 0
    for count in (1, 0):
        told = everystep("watch", job.root, "--when", "[every: 5, final]", "--once", "--final", "--keep", "all")
        assert told.stdout.count("  consolidated  ") == count
    assert everystep("consolidate", job.root, "--final").code == 0
    assert [row["step"] for row in everystep("exports", job.root, "--json").json["exports"]] == [5, 10, 11]


def test_improvement_is_judged_by_the_jobs_own_metrics(job, everystep):
    """losses.json decides; the best so far is remembered in the history although its checkpoint is gone."""
    job.do("loss 3", "save 1", "loss 2", "save 2", "loss 4", "save 3")
    assert everystep("watch", job.root, "--when", "improves: val_loss", "--once").code == 0
    job.do("loss 2.5", "save 4", "keep 1")
    assert everystep("watch", job.root, "--when", "improves: val_loss", "--once").code == 0
    job.do("loss 1", "save 5")
    assert everystep("watch", job.root, "--when", "improves: val_loss", "--once").code == 0
    assert [row["step"] for row in everystep("exports", job.root, "--json").json["exports"]] == [1, 2, 5]


def test_a_missing_shard_is_never_zeros(job, everystep):
    """F6: a shard that is gone: CorruptionError by name, exit code 12, and the next checkpoint is exported all the same."""
    job.do("save 5", "save 10")
    next((job.root / "epoch_0_step_5" / "model").glob("shard-00002*")).unlink()
    told = everystep("watch", job.root, "--when", "every", "--once", "--json")
    events = [json.loads(line) for line in told.stdout.splitlines()]
    [failed] = [event for event in events if event["event"] == "failed"]
    assert failed["error"] == "CorruptionError"
    assert is_step(job.root / "exports" / "LATEST", 10)
    assert [row["step"] for row in everystep("exports", job.root, "--json").json["exports"]] == [10]


def test_beside_the_checkpoint(job, everystep):
    """--into checkpoint: where AutoModel itself would put it; known as done although nothing lies in exports."""
    job.do("save 5")
    for _ in range(2):
        assert everystep("watch", job.root, "--when", "every", "--into", "checkpoint", "--once").code == 0
    assert is_step(job.root / "epoch_0_step_5" / "model" / "consolidated", 5)
    told = everystep("watch", job.root, "--when", "every", "--into", "checkpoint", "--once", "--json")
    assert '"due"' not in told.stdout


def test_an_own_run_is_followed_too(everystep, three, arrays):
    """A run of ours under the same command; its own hold protects it."""
    told = everystep("watch", three.path, "--when", "improves: val_loss", "--once", "--json")
    assert told.code == 0, told
    events = [json.loads(line) for line in told.stdout.splitlines()]
    assert [event["step"] for event in events if event["event"] == "consolidated"] == [10, 20]
    assert np.array_equal(tensors(three.path / "exports" / "LATEST")["weight"], arrays(20)["model.weight"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--when", "sometimes"], "every"),
        (["--when", "every", "--final"], "--once"),
        (["--when", "every", "--poll", "10"], "30s"),
        (["--when", "every", "--idle", "soon"], "soon"),
        (["--when", "every", "--drop-shards", "all", "--once"], "drop"),
        (["--when", "every", "--into", "."], "LATEST"),
        (["--when", "every", "--into", "s3://bucket"], "s3://bucket"),
    ],
)
def test_what_is_typed_wrongly(job, everystep, monkeypatch, words, named):
    """One line on stderr, exit code 2, nothing made."""
    job.do("save 5")
    monkeypatch.chdir(job.root)
    told = everystep("watch", job.root, *words)
    assert told.code == 2, told
    assert named in told.stderr
    assert told.stderr.count("\n") == 1
    assert not (job.root / "exports" / "LATEST").exists()


def test_once_without_a_folder(everystep, tmp_path):
    """Exit code 10, as a line and as an event."""
    told = everystep("watch", tmp_path / "nothing", "--once", "--json")
    assert told.code == 10
    assert json.loads(told.stdout)["event"] == "error"


def test_ctrl_c_ends_it_with_130(job, start):
    """Interrupted as every command."""
    watch = start(Watching, job.root, "--when", "every")
    watch.until("watching")
    assert watch.end(signal.SIGINT) == 130
