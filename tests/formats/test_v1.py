"""Format version 1, as its first release wrote it, reads for ever. ``make_v1.py`` made the files; they never change."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import everystep
from everystep.manifest import FORMAT
from everystep.repository import CheckpointKey, Repository

GOLDEN = Path(__file__).resolve().parent / "v1" / "run"
FIRST, SECOND, THIRD = CheckpointKey(1, 1), CheckpointKey(2, 1), CheckpointKey(3, 1)
THIRD_AGAIN, FOURTH = CheckpointKey(3, 2), CheckpointKey(4, 2)
MADE = {FIRST: 1, SECOND: 2, THIRD: 3, THIRD_AGAIN: 30, FOURTH: 40}
"""The number that each checkpoint's values follow from."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy: reading leaves holds and results of verification behind. Empty folders are not in a checkout, and must not be needed."""
    shutil.copytree(GOLDEN, tmp_path / "run")
    for folder in sorted((tmp_path / "run").rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return tmp_path / "run"


def expected(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """What the model's file holds, computed with numpy alone."""
    return {
        "embed.weight": np.arange(12, dtype=np.float32).reshape(4, 3) + np.float32(number),
        "head.bias": np.arange(4, dtype=np.float32) * np.float32(number),
        "scale": np.float32(3.5 + number),
    }


def test_fixture_is_small_and_of_version_1() -> None:
    """What is checked in stays below 100 KB, and each record says format 1."""
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 100_000
    records = [path for path in files if path.suffix == ".json"]
    assert len(records) > 10
    assert all(json.loads(path.read_bytes())["format"] == 1 for path in records)
    assert FORMAT >= 1


def test_run_is_understood(run: Path) -> None:
    """Attempts, lineage, an abandoned timeline, the pin and the metrics are read as they were written."""
    repository = Repository.open(str(run))
    assert repository.keys() == sorted(MADE, key=lambda key: (key.attempt, key.step))
    assert repository.lineage() == [FOURTH, THIRD_AGAIN, SECOND, FIRST]
    assert repository.newest_attempt() == 2
    second = repository.attempts()[2]
    assert (second.parent_attempt, second.parent_step, second.world, second.nodes) == (1, 2, 1, 1)
    assert [key for key in MADE if repository.pinned(key)] == [FOURTH]
    metrics = repository.manifest(FIRST).metrics
    assert metrics["loss"] == 1.0
    assert math.isnan(metrics["odd"])
    kept = repository.retention(everystep.Keep(last=1, best=1, metric="loss"), now=0.0)
    assert {one.key for one in kept if one.keep} == {str(FOURTH), str(FIRST)}


@pytest.mark.parametrize("key", MADE, ids=str)
def test_everything_verifies(run: Path, key: CheckpointKey) -> None:
    """Each object of each checkpoint has the digests that were recorded."""
    repository = Repository.open(str(run))
    found = list(repository.verify(key))
    assert len(found) >= 3
    assert [wrong for _, _, wrong in found if wrong] == []


@pytest.mark.parametrize("key", MADE, ids=str)
def test_the_safetensors_package_reads_the_weights(key: CheckpointKey) -> None:
    """The model's file of each checkpoint holds the module's own names and the known values; the tied name is stored once."""
    loaded = load_file(GOLDEN / "data" / str(key) / "model-00001-of-00001.safetensors")
    wanted = expected(MADE[key])
    assert loaded.keys() == wanted.keys()
    for name, value in wanted.items():
        assert loaded[name].dtype == np.float32
        assert loaded[name].tobytes() == value.tobytes(), name
        assert loaded[name].shape == value.shape


@pytest.mark.parametrize(("step", "number"), [(1, 1), (2, 2), (3, 30), (4, 40), (None, 40)])
def test_load(run: Path, step: int | None, number: int) -> None:
    """``load`` gives the known tensors and values of each step of the newest lineage."""
    loaded = everystep.load(run, step=step)
    for name, value in expected(number).items():
        assert loaded["model"][name].numpy().tobytes() == value.tobytes(), name
    assert torch.equal(loaded["model"]["head.weight"], loaded["model"]["embed.weight"])
    assert loaded["step"] == number
    tensors = loaded["tensors"]
    assert tensors["bool"].tolist() == [True, False]
    assert (tensors["bfloat16"].dtype, tensors["bfloat16"].tolist()) == (torch.bfloat16, [1.5, -2.0])
    assert tensors["complex64"].tolist() == [1 + 2j]
    assert (tensors["float8"].dtype, tensors["float8"].view(torch.uint8).tolist()) == (torch.float8_e4m3fn, [1, 2, 3])
    assert tensors["int64"].tolist() == [[number, -(1 << 40)]]
    assert (tensors["uint16"].dtype, tensors["uint16"].tolist()) == (torch.uint16, [65535, number])
    assert tensors["empty"].shape == (0, 5)
    assert loaded["note"] == {
        "tuple": (1, (2.5, None)), "set": {1, 2}, "bytes": b"\x00\xff", "inf": math.inf, "big": 1 << 80, 7: "an int key", "dtype": torch.float16,
    }  # fmt: skip


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_restore_and_go_on(run: Path) -> None:
    """A model and an optimizer, its parameters in another order, are restored from it, and the run goes on from there with a new attempt."""
    model = Tied()
    optim = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.9)
    state = {"model": model, "optim": optim}
    with everystep.Checkpointer(run, agent=False, keep=everystep.Keep(last=None)) as checkpointer:
        assert checkpointer.restore(state, include=["model*", "optim*"]) == 4
        assert model.seen == 4000
        assert optim.param_groups[0]["lr"] == 0.25
        assert model.scale.item() == 43.5
        for number, parameter in enumerate(model.parameters()):
            assert optim.state[parameter]["step"].item() == 40.0
            assert optim.state[parameter]["exp_avg"].unique().tolist() == [number + 5.0]
            assert optim.state[parameter]["exp_avg_sq"].unique().tolist() == [number + 10.0]
        checkpointer.save(5, state, sync=True)
    repository = Repository.open(str(run))
    assert repository.lineage()[:2] == [CheckpointKey(5, 3), FOURTH]
    assert all(not wrong for key in repository.keys() for _, _, wrong in repository.verify(key))


def test_a_flipped_bit_in_each_file_is_found(run: Path) -> None:
    """The digests of version 1 are really compared: one bit of any data file or manifest is noticed."""
    repository = Repository.open(str(run))
    for path in sorted([*(run / "data" / str(FOURTH)).iterdir(), run / "manifests" / f"{FOURTH}.json"]):
        whole = path.read_bytes()
        for at in (9, len(whole) // 2, len(whole) - 3):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert any(wrong for _, _, wrong in repository.verify(FOURTH)), (path.name, at)
        path.write_bytes(whole)
    assert not any(wrong for _, _, wrong in repository.verify(FOURTH))
