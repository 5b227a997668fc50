"""Runs made through the repository itself (no torch), and the command line called in this process or as a child."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from everystep import manifest, plan, values
from everystep.cli.app import app
from everystep.repository import CheckpointKey, Repository

WORDS = {
    np.dtype("float32"): "F32",
    np.dtype("float64"): "F64",
    np.dtype("int64"): "I64",
    np.dtype("uint8"): "U8",
    np.dtype("float16"): "F16",
}


class Answer:
    """What one call of the command line said."""

    def __init__(self, code, stdout, stderr):
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def json(self):
        return json.loads(self.stdout)

    def __repr__(self):
        return f"Answer(code={self.code}, stdout={self.stdout!r}, stderr={self.stderr!r})"


@pytest.fixture
def everystep():
    """Call the command line in this process."""

    def call(*args, stdin=None):
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def shell():
    """Call the command line as a program of its own."""

    def call(*args, env=None, timeout_s=60):
        import os

        process = subprocess.run(
            [sys.executable, "-m", "everystep.cli", *map(str, args)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **(env or {})}, check=False,
        )  # fmt: skip
        return Answer(process.returncode, process.stdout, process.stderr)

    return call


class MadeRun:
    """A run written through ``Repository``, step by step."""

    def __init__(self, path: Path):
        self.path = path
        self.repository = Repository.open(str(path), create=True)
        self.attempt = 0
        self.begin()

    def begin(self, *, parent=None):
        """Start the next attempt."""
        started = self.repository.start_attempt(parent=parent, now=time.time(), versions={"everystep": "0.1.0", "torch": "2.13.0"})
        self.attempt = started.attempt
        return self

    def save(self, step, arrays, *, plain=None, metrics=None, saved_at=None) -> CheckpointKey:
        """Commit ``{full name: numpy array}`` and plain values."""
        specs = [manifest.TensorSpec(name, WORDS[array.dtype], array.shape, name.split(".")[0]) for name, array in arrays.items()]
        planned = plan.plan_save(specs, aliases={})
        slab = np.zeros(planned.nbytes, np.uint8)
        for file in planned.files:
            slab[file.slab_offset : file.slab_offset + len(file.header)] = np.frombuffer(file.header, np.uint8)
        digests = []
        for placement in planned.placements:
            raw = np.frombuffer(arrays[specs[placement.tensor].name].tobytes(), np.uint8)
            slab[placement.slab_offset : placement.slab_offset + len(raw)] = raw
            digests.append(manifest.block_digests(memoryview(raw)))
        key = CheckpointKey(step, self.attempt)
        for file in planned.files:
            self.repository.put_data(key, file.name, memoryview(slab[file.slab_offset :]), nbytes=file.nbytes)
        part = plan.slab_part(
            planned, step=step, attempt=self.attempt, node=0, nodes=1, saved_at=time.time() if saved_at is None else saved_at,
            values=values.encode({} if plain is None else plain), metrics=metrics or {},
            object_key={file.name: self.repository.data_key(key, file.name) for file in planned.files},
            digests=digests, header_digests=[manifest.digest(file.header) for file in planned.files],
        )  # fmt: skip
        self.repository.put_part(part)
        self.repository.commit(manifest.merge([part]))
        return key

    def files(self, key):
        """Paths of the data files of a checkpoint."""
        return sorted((self.path / "data" / str(key)).glob("*.safetensors"))


@pytest.fixture(name="arrays")
def _arrays():
    """The function that makes a small model and its optimizer state from a seed."""
    return arrays


def arrays(seed, *, rows=5):
    """A small model and its optimizer state."""
    rng = np.random.default_rng(seed)
    return {
        "model.weight": rng.standard_normal((rows, 7)).astype(np.float32),
        "model.bias": rng.standard_normal(7).astype(np.float32),
        "optim.state.weight.exp_avg": rng.standard_normal((rows, 7)).astype(np.float32),
        "optim.state.weight.step": np.array(float(seed), np.float32),
    }


@pytest.fixture
def made(tmp_path):
    """An empty run to save into."""
    return MadeRun(tmp_path / "run")


@pytest.fixture
def three(made):
    """A run with the steps 10, 20, 30; 20 has the lowest loss."""
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        made.save(step, arrays(step), plain={"note": {"step": step, "name": "x"}}, metrics={"val_loss": loss})
    return made
