"""``everystep consolidate --ray``: shares on the nodes of a real Ray cluster (where ray is installed), and what is refused before."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

import everystep
from everystep.consolidate import nodeside, spreading

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install everystep[ray]")

GATE = """
import os, sys, threading, time
import importlib.util

GATE = {gate!r}


def gated(write_export):
    def write(*args, pace, only, **more):
        lock, seen = threading.Lock(), 0

        def slow(nbytes):
            nonlocal seen
            pace(nbytes)
            with lock:
                seen += 1
                here = seen == 2
            if here:
                open(f"{{GATE}}/{{only[0]}}-{{os.getpid()}}", "w").close()
                while not os.path.exists(f"{{GATE}}/open"):
                    time.sleep(0.02)
                pace(nbytes)

        return write_export(*args, pace=slow, only=only, **more)

    return write


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "everystep.consolidate.writing":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.write_export = gated(module.write_export)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""
"""Put into the nodes' Python: a share says that it is in its second window, and waits there until it may go on."""

FAST = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture
def shards(tmp_path):
    """A checkpoint of eight files, 64 MiB together, and its tensors."""
    rng = np.random.default_rng(7)
    folder, tensors, weight_map = tmp_path / "step-5", {}, {}
    folder.mkdir()
    for number in range(1, 9):
        name = f"model-{number:05d}-of-00008.safetensors"
        part = {
            f"layers.{number}.weight": rng.standard_normal((1 << 10, 2 << 10)).astype(np.float32),
            f"layers.{number}.bias": rng.standard_normal(77).astype(np.float32),
        }
        save_file(part, folder / name)
        tensors.update(part)
        weight_map.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder, tensors


class Nodes:
    """A Ray cluster of processes of this machine: a head without CPUs, and nodes of one CPU each."""

    def __init__(self, gate: Path):
        self.gate = gate
        gate.mkdir()
        site = gate.parent / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(textwrap.dedent(GATE).format(gate=str(gate)))
        self._path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
        self.folder = tempfile.mkdtemp(prefix="er-", dir="/tmp")  # short: sockets have their names in it
        with self._quiet() as cluster_utils:
            self.cluster = cluster_utils.Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": FAST},
            )
        self.workers = [self.add(), self.add()]

    @contextlib.contextmanager
    def _quiet(self):
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            from ray import cluster_utils

            patch.setenv("PYTHONPATH", self._path)
            patch.setenv("RAY_TMPDIR", self.folder)
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            yield cluster_utils

    def add(self):
        with self._quiet():
            return self.cluster.add_node(num_cpus=1)

    def kill(self, node):
        """As when a machine stops."""
        with self._quiet():
            self.cluster.remove_node(node, allow_graceful=False)

    def at_gate(self, count, *, but=()):
        """(share, pid, name) of so many shares that are in their middle."""
        deadline = time.monotonic() + 60
        while True:
            found = [
                (int(name.split("-")[0]), int(name.split("-")[1]), name)
                for name in sorted(os.listdir(self.gate))
                if name != "open" and name not in but
            ]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    def open(self):
        (self.gate / "open").touch()

    def node_of(self, pid):
        """The node (raylet) that a worker belongs to."""
        raylets = {process.pid for process in psutil.Process(pid).parents()}
        [node] = [node for node in self.workers if raylets & {info.process.pid for info in node.all_processes["raylet"]}]
        return node

    def close(self):
        with self._quiet():
            self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def nodes(tmp_path):
    """Two nodes, and a gate in which their workers wait."""
    made = Nodes(tmp_path / "gate")
    yield made
    made.close()


@contextlib.contextmanager
def consolidating(nodes, folder, *words):
    """The command as a process of its own."""
    command = [
        sys.executable,
        "-m",
        "everystep.cli",
        "consolidate",
        "--ray",
        nodes.cluster.address,
        str(folder),
        "--max-shard-size",
        "5MB",
        "--json",
        *words,
    ]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ended(process, code=0):
    """What it printed: the document, and the lines for people."""
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, (stdout, stderr)
    return (json.loads(stdout) if stdout else None), stderr


def is_whole(told, tensors):
    """The export holds these tensors, bit for bit, in several files, and nothing of ours beside."""
    folder = Path(told["path"])
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name in set(index.values()):
        found.update(load_file(folder / name))
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    assert len(set(index.values())) > 2
    assert not [name for name in os.listdir(folder) if name.startswith(".") or name.endswith(".part")]
    assert [name for name in os.listdir(folder.parent) if name.endswith(".partial")] == []


@needs_ray
def test_nodes_share_an_export(nodes, shards):
    """Each of two nodes writes its half; a second call finds it there."""
    folder, tensors = shards
    with consolidating(nodes, folder) as process:
        found = nodes.at_gate(2)
        assert {share for share, _, _ in found} == {0, 1}
        assert nodes.node_of(found[0][1]) is not nodes.node_of(found[1][1])
        nodes.open()
        told, said = ended(process)
    assert said == ""
    is_whole(told, tensors)
    with consolidating(nodes, folder, "--workers", "3") as process:
        assert ended(process)[0]["already"] is True
    with consolidating(nodes, folder, "--workers", "3", "--force") as process:
        is_whole(ended(process)[0], tensors)


@needs_ray
def test_a_node_is_lost_in_the_middle(nodes, shards):
    """A node is killed while it writes: its share is written again on the other one, and that is said."""
    folder, tensors = shards
    with consolidating(nodes, folder) as process:
        found = nodes.at_gate(2)
        share, pid, _ = found[0]
        nodes.kill(nodes.node_of(pid))
        nodes.open()
        told, said = ended(process)
    assert all(line.startswith("share ") for line in said.splitlines())
    assert f"share {share + 1} of 2 of the export is written again" in said
    is_whole(told, tensors)


@needs_ray
def test_a_worker_dies_in_the_middle(nodes, shards):
    """A worker is killed while it writes: its share is written again."""
    folder, tensors = shards
    with consolidating(nodes, folder) as process:
        found = nodes.at_gate(2)
        os.kill(found[1][1], signal.SIGKILL)
        nodes.at_gate(1, but=[name for _, _, name in found])  # its second try
        nodes.open()
        told, said = ended(process)
    assert f"share {found[1][0] + 1} of 2 of the export is written again" in said
    is_whole(told, tensors)


@needs_ray
def test_interrupted_and_started_again(nodes, shards):
    """Ctrl-C ends the workers too and publishes nothing; the next call does it."""
    folder, tensors = shards
    with consolidating(nodes, folder) as process:
        workers = [psutil.Process(pid) for _, pid, _ in nodes.at_gate(2)]
        process.send_signal(signal.SIGINT)
        _, said = ended(process, 130)
    assert said == "interrupted\n"
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    exports = folder.parent / "exports"
    assert [name for name in os.listdir(exports) if not name.startswith(".")] == []
    [partial] = exports.glob(".*.partial")
    assert [name for name in os.listdir(partial) if name.startswith(".ray")] == []
    nodes.open()
    with consolidating(nodes, folder) as process:
        is_whole(ended(process)[0], tensors)


@needs_ray
def test_what_a_worker_finds_wrong_is_the_error(nodes, shards):
    """F6: a shard is cut while it is read: the command's error names file and node; nothing is published and nothing stays."""
    folder, _ = shards
    with consolidating(nodes, folder) as process:
        nodes.at_gate(2)
        for file in folder.glob("model-*.safetensors"):
            os.truncate(file, 1 << 20)
        nodes.open()
        told, said = ended(process, 12)
    assert "-of-00008.safetensors" in told["error"]["message"]
    assert "on Ray's node" in told["error"]["message"]
    assert said.count("\n") == 1
    assert [name for name in os.listdir(folder.parent / "exports") if name != ".lock"] == []


@needs_ray
def test_no_cluster_there(tmp_path, shards):
    """One line with the address; what an earlier try has written stays."""
    folder, _ = shards
    command = [
        sys.executable,
        "-m",
        "everystep.cli",
        "consolidate",
        str(folder),
        "--ray",
        "127.0.0.1:1",
        "--max-shard-size",
        "5MB",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2, done.stderr
    assert "127.0.0.1:1" in json.loads(done.stdout)["error"]["message"]
    assert list((folder.parent / "exports").glob(".*.partial")) == []


# -- without ray --------------------------------------------------------------------------------------------------------------


class Fake:
    """A cluster whose tasks do what they are told to, in this process."""

    def __init__(self, count, outcomes=()):
        self.alive = [spreading.Node(str(number), f"host-{number}", 1.0) for number in range(count)]
        self.outcomes = list(outcomes)
        """What becomes of the shares' tries, in order: None writes, Lost or a function is taken in its place."""
        self.begun, self.cancelled, self.results = [], [], {}

    def nodes(self):
        return list(self.alive)

    def start(self, function, task, node, *, cpus):
        ref = len(self.results)
        self.results[ref] = (function, json.dumps(task).encode(), node, cpus)
        if cpus:
            self.begun.append((task["only"][0], node.name))
        return ref

    def ended(self, refs, timeout_s):
        return [refs[0]]

    def result(self, ref):
        function, task, _, cpus = self.results[ref]
        outcome = self.outcomes.pop(0) if cpus and self.outcomes else None
        if isinstance(outcome, spreading.Lost):
            return outcome
        if outcome is not None:
            outcome(self, json.loads(task))
        return json.loads(function(task))

    def cancel(self, refs):
        self.cancelled += refs


@pytest.fixture
def exported(shards, tmp_path, monkeypatch):
    """A function that exports by a fake cluster."""
    from everystep.consolidate import job
    from everystep.consolidate.source import open_source

    def export(fake, workers=None):
        monkeypatch.setattr(spreading, "connected", lambda address: contextlib.nullcontext(fake))
        monkeypatch.setattr(spreading, "require", lambda: None)
        options = everystep.Consolidate(max_shard_size="5MB", into=str(tmp_path / "out"))
        return job.run(open_source(str(shards[0])), options, reason="asked for", ray="auto", workers=workers)._asdict()

    return export


def names_in(folder):
    return sorted(name for name in os.listdir(folder) if name != ".lock") if folder.is_dir() else []


@pytest.mark.parametrize(("workers", "begun"), [(None, ["host-0", "host-1"]), (3, ["host-0", "host-1", "host-0"]), (1, ["host-0"])])
def test_workers_are_even_on_the_nodes(exported, shards, workers, begun):
    """One on each node, or so many."""
    fake = Fake(2)
    is_whole(exported(fake, workers), shards[1])
    assert [name for _, name in fake.begun] == begun


def test_a_lost_share_is_given_to_a_node_that_lives(exported, shards):
    """A worker that is lost is tried again where there is the most room, the second time on another node; a node that is gone gets nothing."""
    fake = Fake(2, [spreading.Lost("WorkerCrashedError: gone")] * 2)
    is_whole(exported(fake, 1), shards[1])
    assert fake.begun[0] == (0, "host-0")
    assert [name for _, name in fake.begun] == ["host-0", "host-1", "host-0"]
    fake = Fake(2, [spreading.Lost("NodeDiedError: gone", node=True), None, spreading.Lost("WorkerCrashedError: gone")])
    shutil.rmtree(shards[0].parent / "out")
    is_whole(exported(fake), shards[1])
    assert fake.begun == [(0, "host-0"), (1, "host-1"), (0, "host-1"), (0, "host-1")]


def test_a_node_that_came_since_is_looked_at_first(exported, shards):
    """When all nodes that were there are gone, a new one takes over, after the same questions; when there is none, it is said, and the work stays."""

    def replaced(fake, task):
        fake.alive = [spreading.Node("9", "host-9", 1.0)]
        raise everystep.TransientStoreError("stale file handle", kind="io")

    class Answering(Fake):
        def result(self, ref):
            try:
                return super().result(ref)
            except everystep.TransientStoreError as error:
                return {
                    "error": {"name": "TransientStoreError", "message": error.message, "step": None, "key": None, "kind": "io", "hint": ""}
                }

    fake = Answering(1, [replaced])
    is_whole(exported(fake), shards[1])
    assert fake.begun == [(0, "host-0"), (0, "host-9")]
    assert [node.name for _, _, node, cpus in fake.results.values() if not cpus] == ["host-0", "host-9"]
    shutil.rmtree(shards[0].parent / "out")
    with pytest.raises(everystep.TransientStoreError, match="no node of the Ray cluster is left"):
        exported(Fake(1, [spreading.Lost("NodeDiedError: gone", node=True)]))
    assert any(name.endswith(".partial") for name in names_in(shards[0].parent / "out"))


def test_a_share_that_is_lost_again_and_again(exported, shards):
    """After four tries the export is given up: the last reason and the node are told, the others are ended, what is written stays."""
    fake = Fake(2, [spreading.Lost("OutOfMemoryError: too much")] * 9)
    with pytest.raises(everystep.TransientStoreError, match=r"host-\d was lost: OutOfMemoryError: too much"):
        exported(fake)
    assert max([share for share, _ in fake.begun].count(share) for share in (0, 1)) == 4
    assert fake.cancelled
    [partial] = [name for name in names_in(shards[0].parent / "out") if name.endswith(".partial")]
    assert [name for name in os.listdir(shards[0].parent / "out" / partial) if name.startswith(".ray")] == []
    is_whole(exported(Fake(2)), shards[1])


def look(tmp_path, **changed):
    """What a node answers."""
    (tmp_path / "token").write_text("word")
    (tmp_path / "shard").write_bytes(b"12345")
    task = {"token": str(tmp_path / "token"), "word": "word", "files": [(str(tmp_path / "shard"), 5)], "patience_s": 0.0, **changed}
    return json.loads(nodeside.looking()(json.dumps(task).encode()))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"token": "/nowhere/token"}, "does not see the export's folder '/nowhere': No such file"),
        ({"word": "other"}, "has another file there"),
        ({"files": [("/nowhere/shard", 5)]}, "does not see the checkpoint's file '/nowhere/shard'"),
        ({"files": [(__file__, 7)]}, "sees another checkpoint"),
    ],
    ids=["good", "unseen", "other", "no-source", "other-source"],
)
def test_a_node_tells_what_it_does_not_see(tmp_path, changed, told):
    """Folder, word, and the checkpoint's files with their sizes; a good node leaves nothing behind."""
    answer = look(tmp_path, **changed)
    assert answer["version"] == everystep.__version__
    assert (answer["problem"] == "") if told is None else (told in answer["problem"])
    assert sorted(os.listdir(tmp_path)) == ["shard", "token"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"version": "0.0.9", "problem": ""}, "host-1 has everystep 0.0.9, and this is"),
        ({"version": "", "problem": ""}, "host-1 has no everystep"),
        ({"version": everystep.__version__, "problem": "does not see the export's folder '/x': No such file"}, "host-1 does not see"),
    ],
    ids=["version", "none", "folder"],
)
def test_a_node_that_is_not_good_is_named(exported, shards, answer, told):
    """Nothing is written, nothing stays, and the error is of the kind that comes before anything runs."""

    class Answering(Fake):
        def result(self, ref):
            _, _, node, cpus = self.results[ref]
            return answer if node.name == "host-1" and not cpus else super().result(ref)

    fake = Answering(2)
    with pytest.raises(everystep.ConfigError, match=told):
        exported(fake)
    assert fake.begun == []
    assert names_in(shards[0].parent / "out") == []


def test_a_worker_whose_share_was_taken_back_ends(exported, shards, tmp_path):
    """A node that is cut off and writes on: without its lease it ends before the next window."""

    def late(fake, task):
        os.unlink(task["lease"])
        task["patience_s"] = 0.0
        answer = json.loads(nodeside.write_here(json.dumps(task).encode()))
        assert (answer["error"]["name"], answer["error"]["kind"]) == ("ConflictError", "superseded")
        Path(task["lease"]).touch()

    is_whole(exported(Fake(2, [late])), shards[1])
    lease = nodeside.Lease(str(tmp_path / "lease"))
    (tmp_path / "lease").touch()
    lease.sign(0.0)
    assert (tmp_path / "lease").read_text().split()[1] == str(os.getpid())
    lease.check(1)
    (tmp_path / "lease").unlink()
    with pytest.raises(everystep.ConflictError):
        lease.check(1)


def call(*words):
    from typer.testing import CliRunner

    from everystep.cli.app import app

    return CliRunner().invoke(app, [str(word) for word in words])


def test_without_ray_it_is_one_line(shards, monkeypatch):
    """What to install is said, and nothing is made."""
    monkeypatch.setitem(sys.modules, "ray", None)
    told = call("consolidate", shards[0], "--ray")
    assert told.exit_code == 2
    assert told.stderr.count("\n") == 1
    assert "pip install everystep[ray]" in told.stderr
    assert not (shards[0].parent / "exports").exists()


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray", "PATH"], "auto"),
        (["PATH", "--ray"], "auto"),
        (["PATH", "--ray", "--json"], "auto"),
        (["--ray", "auto", "PATH"], "auto"),
        (["--ray", "head:6379", "PATH"], "head:6379"),
        (["--ray", "[::1]:6379", "PATH"], "[::1]:6379"),
        (["PATH", "--ray", "ray://head:10001"], "ray://head:10001"),
        (["PATH", "--ray=head:6379"], "head:6379"),
        (["PATH"], None),
    ],
)
def test_the_address_may_be_left_out(shards, monkeypatch, words, address):
    """--ray takes the next word only where that is an address."""
    from everystep.consolidate import job

    given = []

    def run(source, options, *, ray, workers, **more):
        given.append((source.where, ray, workers))
        return job.Exported("x", 5, "step-5", 1, 0, 0.0, already=False)

    monkeypatch.setattr(job, "run", run)
    told = call("consolidate", *[str(shards[0]) if word == "PATH" else word for word in words])
    assert told.exit_code == 0, told.output
    assert given == [(str(shards[0]), address, None)]
