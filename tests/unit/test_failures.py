"""Inputs that broke other checkpoint systems, each through the real Checkpointer onto a real disk."""

from __future__ import annotations

import enum
import errno
import logging
import math
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import everystep
from everystep.repository import CheckpointKey, Repository
from everystep.store.disk import RealDisk
from everystep.store.local import LocalStore
from everystep.transfer import Buffers

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def checkpointer(run: Path, **options: Any) -> everystep.Checkpointer:
    """In this process: the same code as the agent's, and faults can be planted in it."""
    return everystep.Checkpointer(run, agent=False, **options)


def data_files(run: Path, step: int) -> list[Path]:
    repository = Repository.open(str(run))
    return [run / stored.key for stored in repository.manifest(repository.find(step)).objects]


def steps_on_disk(run: Path) -> list[int]:
    return sorted(key.step for key in Repository.open(str(run)).keys())


def assert_all_verify(run: Path) -> None:
    repository = Repository.open(str(run))
    for key in repository.keys():
        assert [wrong for _, _, wrong in repository.verify(key) if wrong] == [], key


def bits(tensor: torch.Tensor) -> list[int]:
    flat: list[int] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return flat


# -- false success ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_one_write_fails(run: Path, monkeypatch: pytest.MonkeyPatch, nth: int, code: int) -> None:
    """F1: the N-th write of a save fails, the others succeed: the save fails with that errno, there is no manifest, and the next save works."""
    state = {"a": torch.arange(20 * MIB, dtype=torch.uint8), "b": torch.ones(300_000)}
    real, seen = RealDisk.pwrite, []

    def failing(self: RealDisk, fd: int, data: memoryview, offset: int) -> int:
        if len(data) >= MIB:
            seen.append(offset)
            if len(seen) == nth:
                raise OSError(code, os.strerror(code))
        return real(self, fd, data, offset)

    with checkpointer(run) as ckpt:
        ckpt.save(1, state, sync=True)
        monkeypatch.setattr(RealDisk, "pwrite", failing)
        with pytest.raises(everystep.CheckpointError) as caught:
            ckpt.save(2, state, sync=True)
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == code
        assert steps_on_disk(run) == [1]
        assert not list((run / "data").glob("000000000002-*")), "what the failed save wrote is still there"
        assert ckpt.save(3, state, sync=True).report.tier == "disk"
    assert steps_on_disk(run) == [1, 3]
    assert_all_verify(run)


def test_step_counter_changed_in_place(run: Path) -> None:
    """F2: an optimizer's `step` and every other tensor changed in place by the next step right after `save` returned: the old values are saved."""
    model = nn.Linear(400, 400)
    optim = torch.optim.AdamW(model.parameters(), fused=True)
    with checkpointer(run, cadence=everystep.Cadence(disk=1), keep=everystep.Keep(last=None)) as ckpt:
        for step in range(1, 4):
            model(torch.ones(2, 400)).sum().backward()
            optim.step()
            pending = ckpt.save(step, {"model": model, "optim": optim})
            for entry in optim.state.values():
                entry["step"].add_(1000)
            pending.wait("disk", 20)
            for entry in optim.state.values():
                entry["step"].sub_(1000)
            saved = everystep.load(run, step=step)["optim"]
            found = [value for name, value in flat(saved) if name.endswith("step") and isinstance(value, torch.Tensor)]
            assert [value.item() for value in found] == [step, step]


def flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [pair for key, value in tree.items() for pair in flat(value, f"{prefix}.{key}" if prefix else str(key))]


class Odd(nn.Module):
    """A 0-dim parameter and buffer, an empty one, and an extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.scale = nn.Parameter(torch.tensor(3.5))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.seen = 12

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_scalars_and_leaves_in_the_weights_file(run: Path) -> None:
    """F4 F24: the safetensors package reads the weights file; 0-dim tensors are there with shape []; the step number and other values are not."""
    model = Odd()
    with checkpointer(run) as ckpt:
        ckpt.save(1, {"model": model, "step": 41, "note": {"lr": 0.1}}, sync=True)
        model.seen = 0
        ckpt.restore({"model": model, "step": 0, "note": {"lr": 0.0}})
    [path] = [path for path in data_files(run, 1) if path.name.startswith("model-")]
    loaded = load_file(path)
    assert sorted(loaded) == ["count", "nothing", "scale", "weight"]
    assert loaded["scale"].shape == torch.Size([])
    assert loaded["scale"].item() == 3.5
    assert loaded["count"].item() == 7
    assert loaded["nothing"].shape == (0, 4)
    assert torch.equal(loaded["weight"], torch.arange(6.0).view(2, 3))
    with safe_open(path, "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    assert [path.name for path in data_files(run, 1)] == ["model-00001-of-00001.safetensors"], "no file for what holds no tensor"
    assert model.seen == 12


def three_groups() -> dict[str, Any]:
    return {name: nn.Linear(3 + number, 5) for number, name in enumerate(("first", "second", "third"))}


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_of_three_files_is_gone(run: Path, which: int) -> None:
    """F6: one of three files deleted, whichever, then all but one: CorruptionError that names it; no tensor is touched."""
    with checkpointer(run) as ckpt:
        ckpt.save(1, three_groups(), sync=True)
    files = data_files(run, 1)
    assert len(files) == 3
    for gone in (which, (which + 1) % 3):
        files[gone].unlink()
        target = three_groups()
        before = {name: bits(module.weight) for name, module in target.items()}
        with checkpointer(run) as ckpt, pytest.raises(everystep.CorruptionError) as caught:
            ckpt.restore(target)
        assert any(path.name in str(caught.value) for path in files if not path.exists())
        missing = [path.name.partition("-")[0] for path in files if not path.exists()]
        for name in missing:
            assert bits(target[name].weight) == before[name], "filled from nothing"
        with pytest.raises(everystep.CorruptionError):
            everystep.load(run)
        found = [name for name, _, wrong in Repository.open(str(run)).verify(CheckpointKey(1, 1)) if wrong]
        assert [Path(name).name for name in found] == [path.name for path in files if not path.exists()]


def test_a_flipped_bit_anywhere_in_the_payload(run: Path) -> None:
    """F7: one bit flipped in any tensor, in its first or last byte, is a CorruptionError from restore and load, and found by verify."""
    state = {"model": nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), "extra": torch.arange(5 * MIB, dtype=torch.uint8)}
    with checkpointer(run) as ckpt:
        ckpt.save(1, state, sync=True)
    repository = Repository.open(str(run))
    manifest = repository.manifest(CheckpointKey(1, 1))
    for shard in manifest.shards:
        path = run / manifest.objects[shard.object].key
        for at in (shard.offset, shard.offset + shard.nbytes - 1):
            flip(path, at)
            with pytest.raises(everystep.CorruptionError):
                everystep.load(run)
            with checkpointer(run) as ckpt, pytest.raises(everystep.CorruptionError, match="step 1"):
                ckpt.restore(state)
            assert [name for name, _, wrong in repository.verify(CheckpointKey(1, 1)) if wrong] == [manifest.objects[shard.object].key]
            flip(path, at)
    assert everystep.load(run)["extra"].sum() == state["extra"].sum()


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def test_what_does_not_fit_is_refused_from_disk_too(run: Path) -> None:
    """F8 F9 F17: another dtype, other names, another shape in what is restored from disk: LayoutError that names it, and nothing is changed."""
    with checkpointer(run) as ckpt:
        ckpt.save(1, {"t": torch.tensor([300.25, 7.75]), "old": torch.ones(2)}, sync=True)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"t": torch.zeros(2, dtype=torch.int8), "old": torch.zeros(2)}, "'t' is F32 in the checkpoint, I8"),
        ({"t": torch.zeros(3), "old": torch.zeros(2)}, r"'t' has shape \[2\] in the checkpoint, \[3\]"),
        ({"t": torch.zeros(2), "new": torch.zeros(2)}, "not in the checkpoint: 'new'; not in the state: 'old'"),
    ]
    for target, said in cases:
        with checkpointer(run) as ckpt, pytest.raises(everystep.LayoutError, match=said):
            ckpt.restore(target)
        assert not any(tensor.any() for tensor in target.values()), "a tensor was filled before all were checked"
    with checkpointer(run) as ckpt:
        target = {"t": torch.zeros(2, dtype=torch.float64), "old": torch.zeros(2)}
        ckpt.restore(target, cast=True)
        assert target["t"].tolist() == [300.25, 7.75]
        renamed = {"t": torch.zeros(2), "new": torch.zeros(2)}
        ckpt.restore(renamed, strict=False)
        assert ckpt.last_restore is not None
        assert (ckpt.last_restore.missing, ckpt.last_restore.unexpected) == (("new",), ("old",))
        assert renamed["t"].tolist() == [300.25, 7.75]


def test_reads_at_every_alignment(tmp_path: Path) -> None:
    """F10: bytes that begin anywhere modulo 512 in a file are read right, directly where the file system can, and so are ends that lie anywhere."""
    content = np.random.default_rng(5).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
    (tmp_path / "object").write_bytes(content)
    store = LocalStore(str(tmp_path), large_nbytes=4096)
    with Buffers(nbytes=64 << 10) as buffers:
        for begin in range(4096, 4096 + 512):
            end = len(content) - begin % 37 if begin % 3 else begin + 20_000 + begin % 29
            view = buffers.read(store, "object", begin, end - begin)
            assert bytes(view) == content[begin:end], begin
            buffers.give_back(view)
            into = bytearray(9000)
            store.read_into("object", begin, memoryview(into))
            assert into == content[begin : begin + 9000]


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_not_a_byte_of_the_old_state_is_left(run: Path, tier: str) -> None:
    """F11: every floating tensor filled with NaN, every other with ones: after the restore each byte is the checkpoint's, buffers included."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    optim = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.randn(8, 16)).sum().backward()
    optim.step()
    state = {"model": model, "optim": optim, "loose": {"t": torch.randn(5, dtype=torch.float64), "n": torch.arange(9)}}

    def tensors() -> list[torch.Tensor]:
        return [*model.state_dict().values(), *(v for e in optim.state.values() for v in e.values()), *state["loose"].values()]

    ckpt = everystep.Checkpointer(run, agent=tier == "memory")
    ckpt.save(1, state, sync=True)
    if tier == "disk":
        ckpt.close()
        ckpt = checkpointer(run)
    expected = [bits(tensor) for tensor in tensors()]
    with torch.no_grad():
        for tensor in tensors():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    assert ckpt.restore(state) == 1
    assert ckpt.restored_from is not None
    assert ckpt.restored_from.tier == tier
    assert [bits(tensor) for tensor in tensors()] == expected
    ckpt.close()


# -- shapes, optimizers, values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda: torch.eye(3).to_sparse(), "sparse"), (lambda: torch.empty(3, device="meta"), "meta")],
    ids=["sparse", "meta"],
)
def test_what_has_no_bytes_is_refused_before_the_first_byte(run: Path, make: Any, kind: str) -> None:
    """F17: a sparse or a meta tensor deep in the state is refused with its name; nothing was written; the next good save works."""
    with checkpointer(run) as ckpt:
        with pytest.raises((everystep.StateError, everystep.LayoutError), match=r"other\.deep\.0") as caught:
            ckpt.save(1, {"fine": torch.ones(2), "other": {"deep": [make()]}})
        assert kind in str(caught.value)
        assert not (run / "data").exists()
        assert not (run / "manifests").exists()
        assert ckpt.save(1, {"fine": torch.ones(2)}, sync=True).report.tier == "disk"


class WithExtra(nn.Module):
    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = torch.arange(nbytes, dtype=torch.uint8)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_another_size_from_disk(run: Path) -> None:
    """F19: a uint8 extra state of another size is a LayoutError; with strict=False it is replaced."""
    with checkpointer(run) as ckpt:
        ckpt.save(1, {"model": WithExtra(5)}, sync=True)
        target = WithExtra(3)
        with pytest.raises(everystep.LayoutError, match="_extra_state"):
            ckpt.restore({"model": target})
        assert target.extra.tolist() == [0, 1, 2]
        ckpt.restore({"model": target}, strict=False)
        assert target.extra.tolist() == [0, 1, 2, 3, 4]


class Lion(torch.optim.Optimizer):
    """One state tensor for each parameter, and no `step`."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                entry = self.state[parameter]
                if not entry:
                    entry["exp_avg"] = torch.zeros_like(parameter)
                update = entry["exp_avg"].mul(group["betas"][0]).add(parameter.grad, alpha=1 - group["betas"][0]).sign_()
                parameter.add_(update, alpha=-group["lr"])
                entry["exp_avg"].lerp_(parameter.grad, 1 - group["betas"][1])


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "lion": Lion,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_round_trip_on_disk(run: Path, name: str, trained: int) -> None:
    """F20 F21: saved at step 0 or 3, restored into a fresh and a used optimizer: equal state, no invented entries, and training goes on bit by bit."""

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
        return model, OPTIMIZERS[name](model.parameters())

    def train(model: nn.Module, optim: Any, seeds: range) -> None:
        for seed in seeds:
            optim.zero_grad()
            model(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))).pow(2).mean().backward()
            optim.step()

    def seen(model: nn.Module, optim: Any) -> list[Any]:
        entries = [{key: bits(value) for key, value in optim.state.get(p, {}).items()} for p in model.parameters()]
        return [[bits(parameter) for parameter in model.parameters()], entries]

    model, optim = made()
    train(model, optim, range(trained))
    with checkpointer(run) as ckpt:
        ckpt.save(trained, {"model": model, "optim": optim}, sync=True)
        assert [len(optim.state[p]) if p in optim.state else 0 for p in model.parameters()] == [len(e) for e in seen(model, optim)[1]]
        expected = seen(model, optim)
        for used in (False, True):
            other, fresh = made()
            train(other, fresh, range(50, 52) if used else range(0))
            assert ckpt.restore({"model": other, "optim": fresh}) == trained
            # Adagrad makes its sums when it is made; apart from that nothing may appear or stay.
            assert seen(other, fresh) == expected
            train(other, fresh, range(10, 12))
            again, other_optim = made()
            train(again, other_optim, range(trained))
            train(again, other_optim, range(10, 12))
            assert seen(other, fresh) == seen(again, other_optim)


class Colour(enum.Enum):
    RED = 1


def test_plain_values_on_disk(run: Path) -> None:
    """F22 F23: values that JSON cannot tell apart come back from disk equal and of the same types; what cannot be stored is named before any write."""
    state: dict[str, Any] = {
        "big": [1 << 64, -(1 << 200), (1 << 63) - 1, True, False, None, -0.0, 1e308],
        "odd": [float("inf"), float("-inf")],
        "nested": {
            "tuple": (1, (2, ()), [], {}),
            "set": {3, "x"},
            "frozen": frozenset({4}),
            "bytes": b"\x00\xff",
            5: "int key",
            (1, 2): "tuple key",
        },
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
        "numpy": [np.float32(0.1), np.int64(-3), np.bool_(True)],
        "random": random.Random(3).getstate(),
        "tensors": [
            torch.tensor([1 + 2j], dtype=torch.complex64),
            torch.tensor([65535], dtype=torch.uint16),
            torch.empty(0, 3, dtype=torch.float8_e5m2),
        ],
        "nan": math.nan,
    }
    with checkpointer(run) as ckpt:
        ckpt.save(1, state, sync=True)
        for wrong in (lambda: 1, Fraction(1, 3), open(os.devnull)):  # noqa: SIM115
            with pytest.raises(everystep.StateError, match=r"deep\.er\[1\]|deep\.er\.1"):
                ckpt.save(2, {"deep": {"er": [1, wrong]}})
            if hasattr(wrong, "close"):
                wrong.close()
    assert steps_on_disk(run) == [1]
    loaded = everystep.load(run)
    assert math.isnan(loaded.pop("nan"))
    tensors = loaded.pop("tensors")
    for got, expected in zip(tensors, state["tensors"], strict=True):
        assert (got.dtype, got.shape, bits(got)) == (expected.dtype, expected.shape, bits(expected))
    for key, got in loaded.items():
        assert typed(got) == typed(state[key]), key


def typed(value: Any) -> Any:
    if isinstance(value, dict):
        return [(typed(key), typed(one)) for key, one in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    if isinstance(value, (list, tuple)):
        return type(value), [typed(one) for one in value]
    return type(value), repr(value)


def test_tied_weights_load_in_transformers(run: Path, tmp_path: Path) -> None:
    """F25: tied embeddings are stored once, and the weights file with a config beside it loads with `from_pretrained`."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    with checkpointer(run) as ckpt:
        ckpt.save(1, {"model": model}, sync=True)
    [path] = data_files(run, 1)
    assert path.stat().st_size < 4096 + sum(p.numel() * p.element_size() for p in model.parameters()) + 4096
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(path.read_bytes())
    config.save_pretrained(folder)
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_small_tensors_on_disk(run: Path) -> None:
    """F26: 5,000 tensors of 1 KiB: the data files are at most 1.1 x their bytes, all records together at most 0.25 x, and they load equal."""
    state = {"optim_like": {f"block.{number}.weight": torch.full((256,), float(number)) for number in range(5000)}}
    nbytes = 5000 * 1024
    with checkpointer(run) as ckpt:
        ckpt.save(1, state, sync=True)
    data = sum(path.stat().st_size for path in data_files(run, 1))
    everything = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    assert nbytes < data <= 1.1 * nbytes
    assert everything - data <= 0.25 * nbytes, f"records take {(everything - data) / nbytes:.3f} of the tensors' bytes"
    loaded = load_file(data_files(run, 1)[0])
    assert len(loaded) == 5000
    assert all(loaded[name].unique().tolist() == [float(name.split(".")[-2])] for name in list(loaded)[::97])


# -- storage, keeping, failing -------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_disk_full_for_one_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F40 F52 F54 F55 F56: keep 1, and the disk is full for the second save: needed and free bytes are told, the first checkpoint stays, the third save works."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        run = disk / "run"
        with checkpointer(run, keep=everystep.Keep(last=1)) as ckpt, caplog.at_level(logging.INFO, "everystep"):
            first = torch.arange(2 * MIB, dtype=torch.uint8)
            ckpt.save(1, {"t": first}, sync=True)
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            pending = ckpt.save(2, {"t": torch.ones(7 * MIB, dtype=torch.uint8)})
            with pytest.raises(everystep.CapacityError, match=r"\d+ bytes needed, \d+ free") as caught:
                pending.wait("disk", 20)
            assert caught.value.errno == errno.ENOSPC
            assert torch.equal(everystep.load(run, step=1)["t"], first)
            assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize >= free - 64 * 1024, "the failed save's space is not free again"
            assert len(ckpt.failures) == 1
            assert ckpt.save(3, {"t": first + 1}, sync=True).report.tier == "disk"
        assert steps_on_disk(run) == [3]
        assert_all_verify(run)
        said = [record.getMessage() for record in caplog.records]
        assert [line for line in said if line.startswith("save of step 2 failed")]
        assert not [line for line in said if "step 2 saved" in line]
        assert [line for line in said if line.startswith("step 3 saved to disk")]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


class Heard(logging.Handler):
    """Log lines, and waiting for one."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.changed:
            self.lines.append(record.getMessage())
            self.changed.notify_all()

    def wait(self, begin: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: any(line.startswith(begin) for line in self.lines), 20), (begin, self.lines)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    handler, log = Heard(), logging.getLogger("everystep")
    monkeypatch.setattr(log, "level", logging.INFO)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def test_failures_surface_although_nobody_waits(run: Path, heard: Heard) -> None:
    """F56: no handle is ever looked at: each failure is logged when it happens, the save after three in a row raises it, and so does the end."""
    state = {"t": torch.ones(3)}
    ckpt = checkpointer(run, cadence=everystep.Cadence(disk=1), max_failing_s=0)
    ckpt.save(1, state, sync=True)
    (run / "data").rename(run / "elsewhere")
    (run / "data").write_text("in the way")
    for step in (2, 3, 4):
        ckpt.save(step, state)
        heard.wait(f"save of step {step} failed")
    with pytest.raises(everystep.StoreError):
        ckpt.save(5, state)
    with pytest.raises(everystep.CheckpointError):
        ckpt.close()
    assert [error.step for error in ckpt.failures[:3]] == [2, 3, 4]


@pytest.mark.parametrize("own", [False, True])
def test_failure_of_the_very_last_save_surfaces(run: Path, own: bool) -> None:
    """F56: the last save of all fails and nobody looked: leaving the ``with`` raises it; an error of the body's own is not hidden by it."""

    def train() -> None:
        with checkpointer(run) as ckpt:
            ckpt.save(1, {"t": torch.ones(3)})
            ckpt.wait()
            (run / "data").rename(run / "elsewhere")
            (run / "data").write_text("in the way")
            ckpt.save(2, {"t": torch.ones(3)})
            if own:
                raise RuntimeError("the body's own")

    with pytest.raises(RuntimeError if own else everystep.CheckpointError):
        train()


def test_log_says_saved_only_after_the_commit(run: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """F55: when the line "saved to disk" is written, the manifest is there already; until then nothing says so."""
    found: list[tuple[int, list[int]]] = []
    emit = Heard.emit

    def looking(self: Heard, record: logging.LogRecord) -> None:
        if "saved to disk" in record.getMessage():
            found.append((int(record.getMessage().split()[1]), steps_on_disk(run)))
        emit(self, record)

    monkeypatch.setattr(Heard, "emit", looking)
    with checkpointer(run, cadence=everystep.Cadence(disk=1), keep=everystep.Keep(last=None)) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, {"t": torch.ones(3)}).wait("disk", 20)
    assert {step for step, _ in found} == {1, 2, 3, 4}
    assert all(step in there for step, there in found)


def test_incomplete_folders_push_nothing_out(run: Path) -> None:
    """F50: folders without a manifest, newer than everything, do not count: the two newest complete checkpoints stay, and restore takes the newest."""
    state = {"t": torch.ones(3)}
    with checkpointer(run, keep=everystep.Keep(last=2)) as ckpt:
        for step in (1, 2, 3):
            state["t"].fill_(step)
            ckpt.save(step, state, sync=True)
        for step in (50, 51, 52):
            folder = run / "data" / str(CheckpointKey(step, 1))
            folder.mkdir()
            (folder / "t-00001-of-00001.safetensors").write_bytes(b"half")
        state["t"].fill_(4)
        ckpt.save(4, state, sync=True)
    assert steps_on_disk(run) == [3, 4]
    with checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 4
        assert ckpt.steps() == [3, 4]


def test_retention_after_a_restart(run: Path) -> None:
    """F49 F51: after a restart in the middle retention counts the earlier attempt's checkpoints: the last two of both, and the best of the first stay."""
    state = {"t": torch.ones(3)}
    keep = everystep.Keep(last=2, best=1, metric="loss")
    for lives, steps in enumerate([(1, 2, 3), (4, 5), (6,)]):
        with checkpointer(run, keep=keep) as ckpt:
            assert ckpt.restore(state) == (None if not lives else steps[0] - 1)
            for step in steps:
                state["t"].fill_(step)
                ckpt.save(step, state, sync=True, metrics={"loss": 0.5 if step == 2 else 1.0 + step})
        assert steps_on_disk(run) == {0: [2, 3], 1: [2, 4, 5], 2: [2, 5, 6]}[lives]
    assert {key.attempt for key in Repository.open(str(run)).keys()} == {1, 2, 3}
    assert everystep.load(run, step=2)["t"].tolist() == [2.0] * 3


def test_the_newest_is_damaged_at_start(run: Path) -> None:
    """F41: two of three checkpoints are corrupt at start: the oldest is restored, both skips are reported, and the good one outlives retention."""
    state = {"t": torch.ones(300)}
    with checkpointer(run) as ckpt:
        for step in (1, 2, 3):
            state["t"].fill_(step)
            ckpt.save(step, state, sync=True)
    for step in (2, 3):
        path = data_files(run, step)[0]
        flip(path, path.stat().st_size - 1)
    with checkpointer(run, keep=everystep.Keep(last=1)) as ckpt:
        assert ckpt.restore(state) == 1
        assert state["t"].tolist() == [1.0] * 300
        assert ckpt.restored_from is not None
        assert [CheckpointKey.parse(one.key).step for one in ckpt.restored_from.skipped] == [3, 2]
        assert all("tensor 't' of step" in one.reason and "is corrupt" in one.reason for one in ckpt.restored_from.skipped)
        state["t"].fill_(4)
        ckpt.save(4, state, sync=True)
    assert 4 in steps_on_disk(run)
    assert everystep.load(run)["t"].tolist() == [4.0] * 300
