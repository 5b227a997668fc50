"""Exports among others: readers while LATEST moves, two writers, full and read-only disks, damaged sources, things in the way."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from everystep.consolidate import job
from everystep.consolidate.card import FileRecord, Record
from everystep.consolidate.exports import LATEST, Exports
from everystep.consolidate.source import open_source
from everystep.errors import CapacityError, ConfigError, ConflictError, CorruptionError
from everystep.schedule import Consolidate

SWAPS = 1000
READERS = 3


def checkpoint(folder, *, rows=64, seed=1):
    """A folder of two safetensors shards with an index and a configuration."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    weight_map = {}
    for at in (1, 2):
        name = f"model-0000{at}-of-00002.safetensors"
        tensors = {f"w{at}.{i}": rng.standard_normal((rows, 64), np.float32) for i in range(2)}
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def visible(root):
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


# -- readers while LATEST moves ------------------------------------------------------------------------------------------------

# Reads the model through LATEST by its index, as from_pretrained does, over and over; says of what steps the tensors were.
READER = """
import json, select, sys
from safetensors.numpy import load_file

latest = sys.argv[1]
whole = retries = mixtures = 0
steps = set()
print("ready", flush=True)
while True:
    try:
        with open(f"{latest}/model.safetensors.index.json") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
        values = set()
        for name in names:
            for tensor in load_file(f"{latest}/{name}").values():
                values |= set(tensor.ravel().tolist())
    except FileNotFoundError:
        retries += 1
        continue
    if len(values) == 1 and len(names) == 3:
        whole += 1
        steps |= values
    else:
        mixtures += 1
    if select.select([sys.stdin], [], [], 0.002)[0]:  # a moment for the writer, where there are few cores
        break
print(json.dumps({"whole": whole, "retries": retries, "mixtures": mixtures, "steps": len(steps), "last": max(values)}), flush=True)
"""


def file_of(step):
    """A safetensors file with one tensor, every element of it the step."""
    data = np.full(512, step, np.int64).tobytes()
    header = json.dumps({"w": {"dtype": "I64", "shape": [512], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def publish(exports, step):
    key, ident = f"{step:012d}-0001", f"{step:08x}" * 4
    names = [f"model-{at:05d}-of-00003-{step}-{ident[:8]}.safetensors" for at in (1, 2, 3)]
    data = file_of(step)
    index = json.dumps({"weight_map": {f"w{at}": name for at, name in enumerate(names)}}).encode()
    files = (*(FileRecord(name, len(data), "") for name in names), FileRecord("model.safetensors.index.json", len(index), ""))
    record = Record(
        id=ident, plan=ident, name="model", key=key, step=step, attempt=1, saved_at=float(step), metrics={}, kind="everystep", source="run", origin="o", identity="i",
        reason="every", published_at=float(step), settings={}, files=files, aliases={}, total_nbytes=0, linked_nbytes=0, everystep="0",
    )  # fmt: skip
    with exports.locked():
        partial = exports.partial(key, ident)
        for name in names:
            Path(partial, name).write_bytes(data)
        exports.put(partial, "model.safetensors.index.json", index)
        exports.settle(exports.publish(partial, record), keep=1, best_by=None)


@pytest.fixture
def quick_folder(tmp_path):
    """A folder in memory, where one is: a thousand publications wait for no disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = tempfile.mkdtemp(prefix="everystep-test-", dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.mark.timeout(300)
def test_readers_while_latest_moves(quick_folder):
    """F59: a thousand new exports under readers that go through LATEST: each reads whole models or finds a file missing, never a mixture."""
    exports = Exports(quick_folder / "exports", "model")
    publish(exports, 1)
    latest = str(quick_folder / "exports" / LATEST)
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, latest], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(READERS)
    ]
    try:
        for reader in readers:
            assert reader.stdout.readline() == "ready\n"
        for step in range(2, SWAPS + 2):
            publish(exports, step)
        results = [json.loads(reader.communicate("stop\n")[0]) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    for result in results:
        assert result["mixtures"] == 0, results
        assert result["whole"] > 20, results
        assert result["steps"] > 10, results
        assert result["last"] == SWAPS + 1, results
    assert visible(quick_folder / "exports") == [LATEST, "history.json", f"model-{SWAPS:012d}-0001", f"model-{SWAPS + 1:012d}-0001"]
    assert len(exports.history()) == SWAPS + 1


def test_open_folder_stays_readable(tmp_path):
    """F59: a reader that has the folder before LATEST open when the next one comes still reads it whole, to its end."""
    exports = Exports(tmp_path, "model")
    publish(exports, 1)
    folder = os.path.realpath(tmp_path / LATEST)
    publish(exports, 2)
    index = json.loads(Path(folder, "model.safetensors.index.json").read_bytes())
    assert {Path(folder, name).read_bytes() for name in index["weight_map"].values()} == {file_of(1)}


# -- several writers -----------------------------------------------------------------------------------------------------------

WRITER = """
import logging, sys
from everystep.consolidate import job
from everystep.consolidate.source import open_source
from everystep.errors import ConflictError
from everystep.schedule import Consolidate
logging.basicConfig(level="WARNING")
try:
    done = job.run(open_source(sys.argv[1]), Consolidate(max_shard_size=20000), reason="every", patience_s=eval(sys.argv[2]))
    print("already" if done.already else "written", done.path)
except ConflictError as error:
    print(error.kind)
"""


def test_two_at_the_same_time(tmp_path):
    """Several processes that export one checkpoint at the same time: one writes it, the others wait and find it, one in a hurry says so."""
    folder = checkpoint(tmp_path / "out" / "checkpoint-5")
    root = job.export_root(open_source(str(folder)), Consolidate())
    command = [sys.executable, "-c", WRITER, str(folder)]
    with Exports(root, "model").locked():
        writers = [subprocess.Popen([*command, "None"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        for writer in writers:
            assert "waiting for process" in writer.stderr.readline()
        hurried = subprocess.run([*command, "0"], capture_output=True, text=True, check=True)
        assert hurried.stdout == "busy\n"
    said = sorted(writer.communicate(timeout=60)[0].split()[0] for writer in writers)
    assert said == ["already", "already", "written"]
    assert visible(root) == [LATEST, "history.json", "model-checkpoint-5"]
    assert len(json.loads(Path(root, "history.json").read_bytes())) == 1


# -- disks ---------------------------------------------------------------------------------------------------------------------

# Consolidates into a small file system of its own; says what came of it and what is there.
ON_A_MOUNT = """
import json, os, subprocess, sys
from everystep.consolidate import job
from everystep.consolidate.source import open_source
from everystep.errors import CheckpointError
from everystep.schedule import Consolidate
source, target, trick = sys.argv[1:]
if trick == "lies":  # what the file system says of its room is wrong, as with quotas
    real = os.statvfs
    class Lies:
        f_bavail, f_frsize, f_blocks = 1 << 30, 4096, 0
    os.statvfs = lambda path: Lies
if trick == "read-only":
    subprocess.run(["mount", "-o", "remount,ro", target], check=True)
try:
    job.run(open_source(source), Consolidate(into=target + "/models"), reason="every")
    said = "done"
except CheckpointError as error:
    said = [type(error).__name__, error.kind]
print(json.dumps([said, sorted(os.path.join(folder, name)[len(target) + 1:] for folder, _, names in os.walk(target) for name in names)]))
"""


@pytest.mark.parametrize(
    ("size", "trick", "said"),
    [("1m", "none", ["CapacityError", "disk-full"]), ("1m", "lies", ["CapacityError", "disk-full"]), ("8m", "none", "done"), ("8m", "read-only", ["PermanentStoreError", "not-permitted"])],
)  # fmt: skip
def test_real_file_system(tmp_path, size, trick, said):
    """A full disk is said before anything is written, or cleaned up when it comes in the middle; a read-only one is said."""
    folder = checkpoint(tmp_path / "checkpoint-5", rows=4096)
    target = tmp_path / "mount"
    target.mkdir()
    script = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "{sys.executable}" -c "$2" "$3" "$1" {trick}'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", str(target), ON_A_MOUNT, str(folder)]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount anything")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    outcome, there = json.loads(done.stdout)
    assert outcome == said, done.stderr
    if said == "done":
        assert any(name.endswith(".safetensors") for name in there)
    else:
        assert [name for name in there if name != "models/.lock"] == []


# -- sources and places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "truncated", "header"])
def test_damaged_source(tmp_path, damage):
    """A shard that is missing, cut off or no safetensors file: an error that names it, and nothing is published or left."""
    folder = checkpoint(tmp_path / "out" / "checkpoint-5")
    shard = folder / "model-00002-of-00002.safetensors"
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 8)
    else:
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(CorruptionError, match="00002-of-00002"):
        job.run(open_source(str(folder)), Consolidate(), reason="every")
    root = tmp_path / "out" / "exports"
    assert not root.exists() or set(os.listdir(root)) <= {".lock"}


def test_shard_that_goes_in_the_middle(tmp_path):
    """A shard that is deleted between the look and the reading: an error that names it, and nothing is published or left."""
    folder = checkpoint(tmp_path / "out" / "checkpoint-5")
    source = open_source(str(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptionError, match="00002-of-00002"):
        job.run(source, Consolidate(max_shard_size=20000), reason="every")
    assert set(os.listdir(tmp_path / "out" / "exports")) == {".lock"}


@pytest.mark.parametrize("into", ["latest", "checkpoint"])
def test_folder_of_somebody_else(tmp_path, into):
    """A folder under the export's name that is none of ours stays as it is, with force too: the error says to move it."""
    folder = checkpoint(tmp_path / "out" / "checkpoint-5")
    theirs = folder / "consolidated" if into == "checkpoint" else tmp_path / "out" / "exports" / "model-checkpoint-5"
    theirs.mkdir(parents=True)
    (theirs / "model.safetensors").write_bytes(b"precious")
    for force in (False, True):
        with pytest.raises(ConflictError, match="move it away") as caught:
            job.run(open_source(str(folder)), Consolidate(into=into), reason="every", force=force)
        assert caught.value.kind == "in-the-way"
    assert os.listdir(theirs) == ["model.safetensors"]
    assert (theirs / "model.safetensors").read_bytes() == b"precious"


def test_file_in_the_way(tmp_path):
    """A file where the root should be, or where LATEST should be: said before anything is written, and it stays."""
    folder = checkpoint(tmp_path / "out" / "checkpoint-5")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        job.run(open_source(str(folder)), Consolidate(into=str(tmp_path / "file")), reason="every")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / LATEST).write_text("mine")
    with pytest.raises(ConflictError, match=LATEST):
        job.run(open_source(str(folder)), Consolidate(into=str(tmp_path / "models")), reason="every")
    assert (tmp_path / "models" / LATEST).read_text() == "mine"
    assert visible(tmp_path / "models") == [LATEST]


def test_root_that_vanishes(tmp_path, monkeypatch):
    """A root that is deleted while an export is written into it: an error of ours, and the next one makes it anew."""
    folder = checkpoint(tmp_path / "out" / "checkpoint-5")
    real = job.write_export

    def vanish(source, plan, partial, **rest):
        written = real(source, plan, partial, **rest)
        shutil.rmtree(tmp_path / "out" / "exports")
        return written

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_export", vanish)
        with pytest.raises((CorruptionError, CapacityError, ConflictError, OSError, LookupError)) as caught:
            job.run(open_source(str(folder)), Consolidate(), reason="every")
        assert type(caught.value).__module__ == "everystep.errors"
    done = job.run(open_source(str(folder)), Consolidate(), reason="every")
    assert os.path.isdir(done.path)
