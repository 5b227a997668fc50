"""The facade: save, restore, cadence, failures, conflicts, with the real agent in this process or beside it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.repository import CheckpointKey, Repository


class Trainee:
    """A small model in training, and its state."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.note: dict[str, Any] = {"tokens": 0, "name": "run"}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim, "note": self.note, "rng": everystep.RNG()}

    def train(self) -> None:
        self.optim.zero_grad()
        self.model(torch.randn(8, 16)).pow(2).mean().backward()
        self.optim.step()
        self.note["tokens"] += 8

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optim.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value.clone()
        return found

    def same(self, other: dict[str, torch.Tensor]) -> bool:
        mine = self.tensors()
        return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.fixture(params=[True, False], ids=["agent", "in-process"])
def agent(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def files_of(run: Path, step: int) -> list[Path]:
    repository = Repository.open(str(run))
    return [run / stored.key for stored in repository.manifest(repository.find(step)).objects]


def test_ten_lines(tmp_path: Path, agent: bool) -> None:
    """Train with a save at every step, end, start again: everything is as it was, the plain values included."""
    with everystep.Checkpointer(tmp_path / "run", agent=agent) as checkpointer:
        trainee = Trainee()
        assert checkpointer.restore(trainee.state) is None
        for step in range(1, 6):
            trainee.train()
            pending = checkpointer.save(step, trainee.state)
            assert pending.step == step
    expected, tokens, drawn = trainee.tensors(), trainee.note["tokens"], torch.get_rng_state()
    with everystep.Checkpointer(tmp_path / "run", agent=agent) as checkpointer:
        other = Trainee(seed=9)
        assert checkpointer.latest() == 5
        assert checkpointer.restore(other.state) == 5
        assert other.same(expected)
        assert other.note["tokens"] == tokens
        assert torch.equal(torch.get_rng_state(), drawn)


def test_sync_save_is_on_disk_when_it_returns(tmp_path: Path, agent: bool) -> None:
    """``sync=True`` returns after the commit, and a second reader sees it at once."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run", agent=agent, cadence=everystep.Cadence(disk=False)) as checkpointer:
        trainee.train()
        report = checkpointer.save(1, trainee.state, sync=True).report
        assert (report.outcome, report.tier) == ("disk", "disk")
        assert Repository.open(str(tmp_path / "run")).lineage() == [CheckpointKey(1, 1)]
        assert report.nbytes > 0
        assert report.timings_s["call"] > 0


def test_each_checkpoint_holds_its_own_step(tmp_path: Path) -> None:
    """F3: parameters moved to new storages between saves; every checkpoint holds the values of its own step and digests differ."""
    trainee = Trainee()
    kept = {}
    with everystep.Checkpointer(tmp_path / "run", keep=everystep.Keep(last=None)) as checkpointer:
        for step in range(1, 4):
            trainee.train()
            kept[step] = trainee.tensors()
            checkpointer.save(step, trainee.state, sync=True)
            for parameter in trainee.model.parameters():
                parameter.data = parameter.data.clone()
    for step, expected in kept.items():
        loaded = everystep.load(tmp_path / "run", step=step)["model"]
        assert all(torch.equal(loaded[name], expected[name]) for name in loaded)
    repository = Repository.open(str(tmp_path / "run"))
    digests = {repository.manifest(key).shards[0].digests for key in repository.lineage()}
    assert len(digests) == 3


def test_model_file_bears_the_modules_own_names(tmp_path: Path) -> None:
    """Born consolidated: the safetensors package reads ``model-00001-of-00001.safetensors`` and finds the module's names and values."""
    from safetensors.torch import load_file

    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        trainee.train()
        checkpointer.save(1, trainee.state, sync=True)
    [model] = [path for path in files_of(tmp_path / "run", 1) if path.name == "model-00001-of-00001.safetensors"]
    loaded = load_file(model)
    expected = trainee.model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


def test_nothing_of_the_old_buffer_is_left(tmp_path: Path) -> None:
    """F11: buffers filled with NaN before the restore hold no NaN after it."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        trainee.train()
        checkpointer.save(1, trainee.state, sync=True)
        expected = trainee.tensors()
        with torch.no_grad():
            for tensor in [*trainee.model.parameters(), *(value for values in trainee.optim.state.values() for value in values.values())]:
                tensor.fill_(float("nan"))
        assert checkpointer.restore(trainee.state) == 1
        assert trainee.same(expected)


def test_all_dtypes_round_trip(tmp_path: Path) -> None:
    """F22: every dtype that safetensors can hold, empty and 0-dim tensors included, comes back bit by bit."""
    words = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32", "float64",
             "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]  # fmt: skip
    state: dict[str, Any] = {}
    for word in words:
        dtype = getattr(torch, word)
        size = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 2, (12 * size,), dtype=torch.uint8) if word == "bool" else torch.randint(0, 256, (12 * size,), dtype=torch.uint8)
        state[word] = {"some": raw.view(dtype).view(3, 4), "none": torch.empty(0, 2, dtype=dtype), "one": raw.view(dtype)[0].clone()}
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state, sync=True)
    loaded = everystep.load(tmp_path / "run")
    for word in words:
        for name, expected in state[word].items():
            got = loaded[word][name]
            assert got.dtype == expected.dtype
            assert got.shape == expected.shape
            assert got.reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist(), (word, name)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    """F25: a tied head is stored once and tied again after the restore."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 32)
            self.head = nn.Linear(32, 100, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model}, sync=True)
        assert sum(path.stat().st_size for path in files_of(tmp_path / "run", 1)) < 2 * 100 * 32 * 4
        expected = model.embed.weight.detach().clone()
        with torch.no_grad():
            model.embed.weight.zero_()
        checkpointer.restore({"model": model})
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, expected)


@pytest.mark.parametrize("what", ["delete", "truncate", "flip", "header", "manifest"])
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """F6 F7 F41: whatever is damaged in the newest checkpoint, the next older is restored and the skip is reported."""
    run = tmp_path / "run"
    trainee = Trainee()
    with everystep.Checkpointer(run) as checkpointer:
        for step in (1, 2):
            trainee.train()
            checkpointer.save(step, trainee.state, sync=True)
            if step == 1:
                expected = trainee.tensors()
    target = files_of(run, 2)[0]
    if what == "delete":
        target.unlink()
    elif what == "truncate":
        os.truncate(target, target.stat().st_size - 1)
    else:
        if what == "manifest":
            target = next((run / "manifests").glob("000000000002-*"))
        data = bytearray(target.read_bytes())
        data[40 if what == "header" else len(data) // 2 if what != "flip" else len(data) - 5] ^= 4
        target.write_bytes(data)
    with everystep.Checkpointer(run) as checkpointer, caplog.at_level(logging.WARNING, "everystep"):
        other = Trainee(seed=3)
        restored = checkpointer.restore(other.state)
        if what == "header":
            # It is not needed to read the tensors, the manifest says where they are; ``everystep verify`` reports it.
            assert restored == 2
            repository = Repository.open(str(run))
            assert any(problem for _, _, problem in repository.verify(repository.find(2)))
            return
        assert restored == 1
        assert other.same(expected)
        assert checkpointer.restored_from is not None
        assert [CheckpointKey.parse(one.key).step for one in checkpointer.restored_from.skipped] == [2]
        assert any("step 2" in record.getMessage() for record in caplog.records)


def test_every_checkpoint_damaged_is_an_error_that_names_them(tmp_path: Path) -> None:
    """F6: nothing good left is a CorruptionError, never zeros."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        trainee.train()
        checkpointer.save(1, trainee.state, sync=True)
    for path in files_of(tmp_path / "run", 1):
        path.unlink()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(everystep.CorruptionError, match="step 1"):
            checkpointer.restore(Trainee().state)
        with pytest.raises(everystep.CorruptionError):
            everystep.load(tmp_path / "run")


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    """Asking for a missing step names the steps there are."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(everystep.NotFoundError):
            checkpointer.restore(trainee.state, step=3)
        trainee.train()
        checkpointer.save(1, trainee.state, sync=True)
    with everystep.Checkpointer(tmp_path / "run") as checkpointer, pytest.raises(everystep.NotFoundError, match="steps 1"):
        checkpointer.restore(trainee.state, step=3)


def test_an_abandoned_timeline_is_not_mixed_in(tmp_path: Path) -> None:
    """F5: resumed from an older step, the same step saved again in the new attempt; the newest is the new attempt's, whole."""
    run = tmp_path / "run"
    trainee = Trainee()
    with everystep.Checkpointer(run, keep=everystep.Keep(last=None)) as checkpointer:
        for step in (1, 2, 3):
            trainee.train()
            checkpointer.save(step, trainee.state, sync=True)
    with everystep.Checkpointer(run, keep=everystep.Keep(last=None)) as checkpointer:
        other = Trainee(seed=5)
        assert checkpointer.restore(other.state, step=1) == 1
        torch.manual_seed(99)
        other.train()
        checkpointer.save(2, other.state, sync=True)
        assert checkpointer.steps() == [1, 2]
    with everystep.Checkpointer(run) as checkpointer:
        third = Trainee(seed=6)
        assert checkpointer.restore(third.state) == 2
        assert third.same(other.tensors())
        assert not third.same(trainee.tensors())


def test_saving_over_a_run_nobody_restored_has_to_be_said(tmp_path: Path) -> None:
    """Starting from scratch over existing checkpoints is a ConflictError unless ``fresh=True``."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(7, trainee.state, sync=True)
    with everystep.Checkpointer(tmp_path / "run") as checkpointer, pytest.raises(everystep.ConflictError, match="fresh=True"):
        checkpointer.save(1, trainee.state)
    with everystep.Checkpointer(tmp_path / "run", fresh=True) as checkpointer:
        checkpointer.save(1, trainee.state, sync=True)
        assert checkpointer.latest() == 1


def test_two_trainers_on_one_run(tmp_path: Path) -> None:
    """The second live trainer is refused in one line that says what to do; the first goes on."""
    first, second = Trainee(), Trainee()
    with everystep.Checkpointer(tmp_path / "run") as one:
        one.save(1, first.state, sync=True)
        with everystep.Checkpointer(tmp_path / "run") as two:
            two.restore(second.state)
            with pytest.raises(everystep.ConflictError) as refused:
                two.save(2, second.state)
            assert "\n" not in str(refused.value)
            assert str(os.getpid()) in str(refused.value)
        first.train()
        assert one.save(2, first.state, sync=True).report.tier == "disk"


def test_a_newer_attempt_stops_the_older(tmp_path: Path) -> None:
    """An attempt that sees a higher one commits nothing more and raises ConflictError."""
    trainee = Trainee()
    run = tmp_path / "run"
    checkpointer = everystep.Checkpointer(run)
    checkpointer.save(1, trainee.state, sync=True)
    Repository.open(str(run)).start_attempt(parent=CheckpointKey(1, 1), now=0.0)
    trainee.train()
    with pytest.raises(everystep.ConflictError):
        checkpointer.save(2, trainee.state, sync=True)
    with pytest.raises(everystep.ConflictError, match="attempt"):
        checkpointer.save(3, trainee.state)
    checkpointer.close()
    assert [key.step for key in Repository.open(str(run)).keys()] == [1]


def test_a_lambda_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    """F23: a value that cannot be stored is a StateError naming it, and nothing appears on disk."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(everystep.StateError, match=r"note\.hook"):
            checkpointer.save(1, {**trainee.state, "note": {"hook": lambda: 1}})
        assert not (tmp_path / "run" / "data").exists()
        assert checkpointer.save(1, trainee.state, sync=True).report.tier == "disk"


def test_steps_grow(tmp_path: Path) -> None:
    """A step that goes backwards or is no step is a ConfigError; the same step again keeps the first."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        first = checkpointer.save(5, trainee.state)
        assert checkpointer.save(5, trainee.state) is first
        for wrong in (4, -1, 1.5, True, "6"):
            with pytest.raises(everystep.ConfigError):
                checkpointer.save(wrong, trainee.state)  # type: ignore[arg-type]


def test_cadence_by_steps(tmp_path: Path) -> None:
    """``disk=3``: exactly the steps divisible by three are committed, and the last one at the end; others stay in memory."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run", cadence=everystep.Cadence(disk=3), keep=everystep.Keep(last=None)) as checkpointer:
        for step in range(1, 9):
            trainee.train()
            pending = checkpointer.save(step, trainee.state)
            if step % 3 == 0:
                assert pending.wait(timeout_s=20).tier == "disk"
            elif pending.report.outcome != "skipped":
                assert pending.wait(timeout_s=20).tier == "memory"
    assert [key.step for key in sorted(Repository.open(str(tmp_path / "run")).keys())] == [3, 6, 8]


def test_memory_cadence(tmp_path: Path) -> None:
    """``memory=4``: other steps return a Pending that is skipped, at no cost."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run", cadence=everystep.Cadence(memory=4, disk=False)) as checkpointer:
        outcomes = [checkpointer.save(step, trainee.state).wait("memory", 20).outcome for step in range(1, 9)]
    assert outcomes == ["skipped", "skipped", "skipped", "memory"] * 2


def test_keep_and_pin(tmp_path: Path) -> None:
    """F49: the last two, the best and a pinned one stay; metrics may come later."""
    trainee = Trainee()
    keep = everystep.Keep(last=2, best=1, metric="val_loss")
    with everystep.Checkpointer(tmp_path / "run", keep=keep) as checkpointer:
        for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 6.0, 7.0], start=1):
            trainee.train()
            checkpointer.save(step, trainee.state, sync=True, pin=step == 3, metrics={"val_loss": loss} if step != 2 else None)
            if step == 2:
                checkpointer.record(2, {"val_loss": loss})
    assert sorted(key.step for key in Repository.open(str(tmp_path / "run")).keys()) == [2, 3, 5, 6]


def test_a_failed_save_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F54 F56: one save fails, training goes on, the failure is logged and counted without anybody waiting, and the next save succeeds."""
    run = tmp_path / "run"
    trainee = Trainee()
    with everystep.Checkpointer(run) as checkpointer, caplog.at_level(logging.INFO, "everystep"):
        checkpointer.save(1, trainee.state, sync=True)
        (run / "data").rename(run / "elsewhere")
        (run / "data").write_text("in the way")
        trainee.train()
        failed = checkpointer.save(2, trainee.state)
        with pytest.raises(everystep.StoreError):
            failed.wait(timeout_s=20)
        (run / "data").unlink()
        (run / "elsewhere").rename(run / "data")
        trainee.train()
        assert checkpointer.save(3, trainee.state, sync=True).report.tier == "disk"
        assert len(checkpointer.failures) == 1
    said = [record.getMessage() for record in caplog.records]
    assert any("save of step 2 failed" in line for line in said)
    assert not any("step 2 saved" in line for line in said)  # F55
    assert any("step 3 saved" in line for line in said)


@pytest.mark.leaves_agent  # it keeps in memory what the disk refused
def test_failures_in_a_row_are_raised(tmp_path: Path) -> None:
    """After ``max_failures`` in a row the next save raises the last one."""
    run = tmp_path / "run"
    trainee = Trainee()
    checkpointer = everystep.Checkpointer(run, max_failures=2, max_failing_s=0)
    checkpointer.save(1, trainee.state, sync=True)
    (run / "data").rename(run / "elsewhere")
    (run / "data").write_text("in the way")
    for step in (2, 3):
        with pytest.raises(everystep.StoreError):
            checkpointer.save(step, trainee.state).wait(timeout_s=20)
    with pytest.raises(everystep.StoreError):
        checkpointer.save(4, trainee.state)
    with pytest.raises(everystep.CheckpointError):
        checkpointer.close()


def test_agent_killed_between_saves(tmp_path: Path) -> None:
    """F32: kill -9 of the agent fails what was under way; the next save starts a new one and works."""
    import psutil

    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, trainee.state, sync=True)
        assert checkpointer._run.client is not None
        pid = checkpointer._run.client.welcome.pid
        gone = psutil.Process(pid)
        gone.kill()
        psutil.wait_procs([gone], timeout=10)
        trainee.train()
        outcomes = []
        for step in range(2, 6):
            outcomes.append(checkpointer.save(step, trainee.state).report.outcome)
            trainee.train()
        assert checkpointer.save(6, trainee.state, sync=True).report.tier == "disk"
        assert checkpointer._run.client.welcome.pid != pid


def test_torn_snapshot_fails_that_save_only(tmp_path: Path) -> None:
    """A parameter changed between save and the optimizer's step: either the snapshot is whole as of the call, or the save fails loudly."""
    torch.manual_seed(0)
    big = nn.Linear(3000, 3000)
    optim = torch.optim.SGD(big.parameters(), lr=0.1)
    state = {"model": big, "optim": optim}
    with everystep.Checkpointer(tmp_path / "run", max_failures=100) as checkpointer:
        checkpointer.save(1, state, sync=True)
        before = big.weight.detach().clone()
        pending = checkpointer.save(2, state)
        big.weight.detach().numpy()[...] += 1
        failed: everystep.TornSnapshotError | None = None
        try:
            pending.wait(timeout_s=20)
        except everystep.TornSnapshotError as error:
            failed = error
        if failed is None:  # the copy was faster than this test
            assert torch.equal(everystep.load(tmp_path / "run", step=2)["model"]["weight"], before)
        else:
            assert failed.key == "model.weight"
            assert "model.weight" in str(failed)
        after = big.weight.detach().clone()
        checkpointer.save(3, state, sync=True)
        assert torch.equal(everystep.load(tmp_path / "run", step=3)["model"]["weight"], after)


def test_optimizer_step_is_fenced(tmp_path: Path) -> None:
    """Whatever the step that follows changes, the checkpoint holds the values of the call; many rounds, a state large enough to overlap."""
    torch.manual_seed(0)
    model = nn.Linear(2000, 2000)
    for fused in (False, True):
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        with everystep.Checkpointer(tmp_path / f"run{fused}", cadence=everystep.Cadence(disk=False)) as checkpointer:
            for step in range(1, 8):
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                expected = model.weight.detach().clone()
                pending = checkpointer.save(step, {"model": model, "optim": optim})
                optim.step()
                assert pending.wait("memory", 20).tier == "memory"
                assert torch.equal(everystep.load(tmp_path / f"run{fused}", step=step)["model"]["weight"], expected)


def test_optimizer_without_hooks_gets_no_overlap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer that does not run torch's step hooks: a one-line notice, and the copy is over when save returns."""

    class Homemade:
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            self.param_groups: list[dict[str, Any]] = [{"params": parameters, "lr": 0.1}]
            self.state: dict[Any, Any] = {}

        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(1.0)

        def state_dict(self) -> dict[str, Any]:
            return {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    model = nn.Linear(500, 500)
    optim = Homemade(list(model.parameters()))
    with everystep.Checkpointer(tmp_path / "run") as checkpointer, caplog.at_level(logging.WARNING, "everystep"):
        expected = model.weight.detach().clone()
        pending = checkpointer.save(1, {"model": model, "optim": optim})
        optim.step()
        pending.wait("disk", 20)
        assert torch.equal(everystep.load(tmp_path / "run")["model"]["weight"], expected)
    assert sum("hooks" in record.getMessage() for record in caplog.records) == 1


def test_include_and_strict(tmp_path: Path) -> None:
    """F9: weights alone by pattern; names that differ are refused with both sides listed, and accepted with ``strict=False``."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        trainee.train()
        checkpointer.save(1, trainee.state, sync=True)
        expected = trainee.tensors()
        other = Trainee(seed=4)
        lr = other.optim.param_groups[0]["lr"] = 0.5
        assert checkpointer.restore({"model": other.model}, include=["model.*"]) == 1
        assert torch.equal(other.model[0].weight, expected["0.weight"])
        assert other.optim.param_groups[0]["lr"] == lr
        grown = nn.Sequential(*trainee.model, nn.Linear(4, 4))
        with pytest.raises(everystep.LayoutError, match=r"3\.weight"):
            checkpointer.restore({"model": grown})
        checkpointer.restore({"model": grown}, strict=False)
        assert checkpointer.last_restore is not None
        assert "model.3.weight" in checkpointer.last_restore.missing
        with pytest.raises(everystep.LayoutError):
            checkpointer.restore({"model": nn.Sequential(nn.Linear(16, 33))}, strict=False)


def test_closed_forked_and_wrong_use(tmp_path: Path) -> None:
    """Use after close, and in a forked child, is one clear error."""
    trainee = Trainee()
    checkpointer = everystep.Checkpointer(tmp_path / "run")
    checkpointer.save(1, trainee.state)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            checkpointer.save(2, trainee.state)
        except everystep.ConfigError as error:
            os.write(theirs, str(error.kind).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(ours, 100) == b"forked"
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(everystep.ConfigError, match="closed"):
        checkpointer.save(2, trainee.state)


def test_a_run_of_a_newer_format(tmp_path: Path) -> None:
    """A run written by a newer format is refused with advice, and not touched."""
    trainee = Trainee()
    run = tmp_path / "run"
    with everystep.Checkpointer(run) as checkpointer:
        checkpointer.save(1, trainee.state, sync=True)
    record = json.loads((run / "run.json").read_bytes())
    record["format"] = 99
    (run / "run.json").write_text(json.dumps(record))
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    for use in (lambda c: c.restore(trainee.state), lambda c: c.save(2, trainee.state)):
        checkpointer = everystep.Checkpointer(run)
        with pytest.raises(everystep.ConfigError, match="upgrade"):
            use(checkpointer)
        checkpointer.close()
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


def test_a_copied_run_is_as_good(tmp_path: Path) -> None:
    """A run folder copied with cp -r restores."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        trainee.train()
        checkpointer.save(1, trainee.state, sync=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    loaded = everystep.load(tmp_path / "copy")
    assert torch.equal(loaded["model"]["0.weight"], trainee.model[0].weight)


def test_other_threads_may_save(tmp_path: Path) -> None:
    """Saves from another thread than the one that trains are safe."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        trainee.train()
        worker = threading.Thread(target=lambda: checkpointer.save(1, trainee.state))
        worker.start()
        worker.join()
    assert torch.equal(everystep.load(tmp_path / "run")["model"]["0.weight"], trainee.model[0].weight)


def test_what_a_killed_agent_left_behind_is_swept(tmp_path: Path) -> None:
    """Data of a save that a killed agent never committed is deleted by the agent that follows, in the same attempt and in the next."""
    run = tmp_path / "run"
    trainee = Trainee()
    for attempt in (1, 2):
        with everystep.Checkpointer(run) as checkpointer:
            checkpointer.restore(trainee.state)
            step = 10 * attempt
            checkpointer.save(step, trainee.state, sync=True)
            left = run / "data" / str(CheckpointKey(step + 1, attempt))
            left.mkdir()
            (left / "model-00001-of-00001.safetensors").write_bytes(bytes(5000))
            assert checkpointer._run.client is not None
            os.kill(checkpointer._run.client.welcome.pid, 9)
            trainee.train()
            for number in range(2, 7):
                checkpointer.save(step + number, trainee.state)
            checkpointer.save(step + 7, trainee.state, sync=True)
            checkpointer.wait()
        assert not left.exists()


def test_what_was_restored_from_memory_may_still_reach_the_disk(tmp_path: Path) -> None:
    """A trainer killed while the disk is slow goes on from memory; the step it goes on from is committed all the same."""
    run = tmp_path / "run"
    trainee = Trainee()
    with everystep.Checkpointer(run) as checkpointer:
        checkpointer.save(1, trainee.state, sync=True)
    repository = Repository.open(str(run))
    manifest = repository.manifest(CheckpointKey(1, 1))
    repository.store.delete(f"manifests/{CheckpointKey(1, 1)}.json")  # as if it were still being written
    repository.start_attempt(parent=CheckpointKey(1, 1), now=0.0)
    repository.commit(manifest)
    assert repository.lineage() == [CheckpointKey(1, 1)]
    repository.start_attempt(parent=None, now=0.0)
    with pytest.raises(everystep.ConflictError):
        repository.commit(manifest)


def test_failures_have_to_last(tmp_path: Path) -> None:
    """With a save at every step a moment's trouble is many failures in a row: training goes on until it has lasted ``max_failing_s``."""
    run = tmp_path / "run"
    trainee = Trainee()
    with everystep.Checkpointer(run, max_failures=2) as checkpointer:
        checkpointer.save(1, trainee.state, sync=True)
        (run / "data").rename(run / "elsewhere")
        (run / "data").write_text("in the way")
        for step in range(2, 8):
            with pytest.raises(everystep.StoreError):
                checkpointer.save(step, trainee.state).wait(timeout_s=20)
        (run / "data").unlink()
        (run / "elsewhere").rename(run / "data")
        assert checkpointer.save(8, trainee.state, sync=True).report.tier == "disk"
        assert len(checkpointer.failures) >= 6


def test_what_is_to_be_kept_reaches_the_disk(tmp_path: Path) -> None:
    """Steps that ``keep`` keeps for their number or their metric are bound for the disk, however rare the cadence."""
    trainee = Trainee()
    keep = everystep.Keep(last=1, every=4, best=1, metric="loss")
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: 9.0, 5: 9.0, 6: 1.0, 7: 2.0, 8: 8.0, 9: 7.0}
    with everystep.Checkpointer(tmp_path / "run", cadence=everystep.Cadence(disk="1h"), keep=keep) as checkpointer:
        for step, loss in losses.items():
            trainee.train()
            checkpointer.save(step, trainee.state, metrics={"loss": loss}).wait(timeout_s=20)
    assert sorted(key.step for key in Repository.open(str(tmp_path / "run")).keys()) == [4, 6, 8, 9]
    with everystep.Checkpointer(tmp_path / "run", cadence=everystep.Cadence(disk="1h"), keep=keep) as checkpointer:
        checkpointer.restore(trainee.state)
        for step, loss in {10: 1.5, 11: 0.5, 13: 3.0}.items():
            checkpointer.save(step, trainee.state, metrics={"loss": loss}).wait(timeout_s=20)
    assert sorted(key.step for key in Repository.open(str(tmp_path / "run")).keys()) == [4, 8, 11, 13]


def test_saving_a_step_again_applies_pin_and_metrics(tmp_path: Path) -> None:
    """The end-of-epoch pattern: save, validate, save the same step again with pin and metrics."""
    trainee = Trainee()
    run = tmp_path / "run"
    with everystep.Checkpointer(run) as checkpointer:
        checkpointer.save(2, trainee.state)
        checkpointer.save(2, trainee.state, sync=True, pin=True, metrics={"val": 1.0})
        repository = Repository.open(str(run))
        assert repository.pinned(CheckpointKey(2, 1))
    assert repository.metrics(CheckpointKey(2, 1)) == {"val": 1.0}


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """Strict: SGD's state does not pass for AdamW's, which would fail at its next step."""
    trainee = Trainee()
    sgd = torch.optim.SGD(trainee.model.parameters(), lr=0.1)
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        trainee.train()
        checkpointer.save(1, {"model": trainee.model, "optim": sgd}, sync=True)
        with pytest.raises(everystep.LayoutError, match="SGD"):
            checkpointer.restore({"model": trainee.model, "optim": trainee.optim})
        assert checkpointer.restore({"model": trainee.model, "optim": trainee.optim}, strict=False) == 1


def test_a_partial_restore_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``strict=False`` with names that do not match is a warning with numbers, not silence."""
    model = nn.Linear(3, 3)
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"m": model}, sync=True)
        with caplog.at_level(logging.WARNING, "everystep"):
            checkpointer.restore({"model": model}, strict=False)
    assert any("in part" in record.getMessage() and "model.weight" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("options", [{"memory_budget": "50MB"}, {"memory_budget": 0}, {"memory_budget": -1}, {"max_failures": -1}, {"max_failures": True}, {"idle_s": "x"}])
def test_wrong_options_fail_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    """A wrong option is a ConfigError from the constructor that names it."""
    with pytest.raises(everystep.ConfigError, match=next(iter(options))):
        everystep.Checkpointer(tmp_path / "run", **options)


def test_metrics_of_an_unknown_step(tmp_path: Path) -> None:
    """``record`` for a step that was never saved is a NotFoundError."""
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(everystep.NotFoundError):
            checkpointer.record(1, {"loss": 1.0})
        checkpointer.save(1, {"w": torch.zeros(3)})
        with pytest.raises(everystep.NotFoundError, match="500"):
            checkpointer.record(500, {"loss": 1.0})


def test_dropped_without_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpointer that is dropped lets its run go: a new one in the same process continues, from what was sealed last."""
    import gc

    trainee = Trainee()
    with caplog.at_level(logging.WARNING, "everystep"):
        checkpointer = everystep.Checkpointer(tmp_path / "run", cadence=everystep.Cadence(disk=False))
        checkpointer.save(1, trainee.state).wait("memory")
        threads = {thread.name for thread in threading.enumerate()}
        del checkpointer
        gc.collect()
    assert any("without close" in record.getMessage() for record in caplog.records)
    assert "everystep-staging" in threads
    assert "everystep-staging" not in {thread.name for thread in threading.enumerate()}
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore(trainee.state) == 1
        trainee.train()
        checkpointer.save(2, trainee.state, sync=True)


def test_a_bad_sector_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO while the newest checkpoint is read: the next older one is restored."""
    from everystep.errors import TransientStoreError
    from everystep.store.local import LocalStore

    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, trainee.state, sync=True)
            trainee.train()
    real = LocalStore.read_into

    def read_into(self: LocalStore, key: str, offset: int, view: memoryview, *, shared: bool = False) -> None:
        if str(CheckpointKey(2, 1)) in key:
            raise TransientStoreError("bad sector", errno=5, key=key)
        real(self, key, offset, view)

    monkeypatch.setattr(LocalStore, "read_into", read_into)
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore(trainee.state) == 1


def test_a_missing_file_names_its_tensors_and_the_state_is_told_of(tmp_path: Path) -> None:
    """F6: the error says which tensors are lost, and that the state must not be trained on."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        trainee.train()
        checkpointer.save(1, trainee.state, sync=True)
    [model] = [path for path in files_of(tmp_path / "run", 1) if path.name.startswith("optim")]
    model.unlink()
    lost = pytest.raises(everystep.CorruptionError, match=r"optim\.state\.model.*must not be trained on")
    with everystep.Checkpointer(tmp_path / "run") as checkpointer, lost:
        checkpointer.restore(trainee.state)


def test_an_owed_save_goes_to_the_disk_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step bound for the disk that finds no slab is made up for by the next one that does."""
    from everystep.agent import messages
    from everystep.agent.client import AgentClient

    trainee = Trainee()
    real = AgentClient.lease
    with everystep.Checkpointer(tmp_path / "run", cadence=everystep.Cadence(disk=4), keep=everystep.Keep(last=None)) as checkpointer:
        monkeypatch.setattr(AgentClient, "lease", lambda self, plan, step: messages.NoSlab(kind="busy", reason="test") if step == 4 else real(self, plan, step))
        for step in range(1, 8):
            checkpointer.save(step, trainee.state).wait(timeout_s=20)
    assert sorted(key.step for key in Repository.open(str(tmp_path / "run")).keys()) == [5, 7]


def test_load_of_nothing(tmp_path: Path) -> None:
    """A pattern that matches nothing is an error in ``load`` as it is in ``restore``."""
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, Trainee().state, sync=True)
    assert set(everystep.load(tmp_path / "run", include=["model.*"])) == {"model"}
    with pytest.raises(everystep.LayoutError, match="modle"):
        everystep.load(tmp_path / "run", include=["modle.*"])


def test_metrics_right_after_the_save(tmp_path: Path) -> None:
    """``record`` for the step that was saved a moment ago waits for its seal instead of missing it."""
    trainee = Trainee()
    with everystep.Checkpointer(tmp_path / "run") as checkpointer:
        for step in range(1, 6):
            trainee.train()
            checkpointer.save(step, trainee.state)
            checkpointer.record(step, {"loss": float(step)})
    repository = Repository.open(str(tmp_path / "run"))
    assert repository.metrics(CheckpointKey(5, 1)) == {"loss": 5.0}
