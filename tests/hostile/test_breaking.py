"""What broke the library once: memory freed under a copy, stale values, lost leases, runs that move, and saves that nobody missed."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import everystep
from everystep.errors import (
    AgentError,
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    PermanentStoreError,
    StateError,
    TornSnapshotError,
)


def state(value, numel=16):
    """A tensor and a number that say the same."""
    return {"x": torch.full((numel,), float(value)), "v": value}


def agent_of(checkpointer):
    """The pid of the agent it talks to."""
    return checkpointer._run.client.welcome.pid


def test_storage_swapped_while_it_is_copied(tmp_path):
    """``param.data = other`` right after save: the memory that a thread still reads stays, and the checkpoint holds the values of the call."""
    program = f"""
import torch, everystep
model = torch.nn.Linear(8192, 8192, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.zeros(8192, 8192)
checkpointer = everystep.Checkpointer({str(tmp_path / "run")!r}, agent=False)
checkpointer.save(1, {{"model": model, "optimizer": optimizer}}).wait("memory")
before = model.weight.detach().clone()
pending = checkpointer.save(2, {{"model": model, "optimizer": optimizer}})
model.weight.data = other
pending.wait("disk")
print(torch.equal(everystep.load(checkpointer.path, step=2)["model"]["weight"], before))
checkpointer.save(3, {{"model": model, "optimizer": optimizer}}, sync=True)
print(torch.equal(everystep.load(checkpointer.path)["model"]["weight"], other))
checkpointer.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["True", "True"]
    assert done.stdout.split()[-1] == "True"


def test_copies_keep_the_memory_they_read():
    """The memory of a late tensor lives as long as a copy may read it, and no longer than the tensors are what they were."""
    from everystep.plan import plan_save
    from everystep.trainer.staging import SlabViews, Stager, order_of
    from everystep.trainer.state import StateCollector

    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collector, stager = StateCollector(), Stager(notice=lambda _: None)

    def stage():
        collected = collector.collect({"model": model, "optimizer": optimizer})
        plan = plan_save([leaf.spec for leaf in collected.leaves], aliases=collected.aliases)
        views = SlabViews(memoryview(bytearray(plan.nbytes)), plan, [torch.float32])
        order = order_of(plan, collected.leaves)
        stager.stage(step=1, leaves=collected.leaves, copies=order, views=views, overlap=True, finish=lambda _: None)
        stager.fence()
        stager.idle()
        return views

    first = stage()
    pointer = model.weight.data_ptr()
    (kept,) = stager._copies[id(first)].sources
    assert kept.data_ptr() == pointer
    model.weight.data = torch.zeros(4, 4)
    second = stage()
    assert list(stager._copies) == [id(second)]
    stager.close()


class Counting(torch.optim.Optimizer):
    """Replaces its state's dictionaries at each step, and counts under a key that is no parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        """Count."""
        for group in self.param_groups:
            for parameter in group["params"]:
                known = self.state.get(parameter) or {"buffer": torch.zeros_like(parameter), "n": 0}
                self.state[parameter] = {**known, "n": known["n"] + 1}
        self.state["steps"] = self.state.get("steps", 0) + 1 if "steps" in self.state else 1


def test_numbers_of_an_optimizer_that_replaces_its_dictionaries(tmp_path):
    """Plain numbers are those of now, also where the dictionaries around them are new ones with the old tensors."""
    model = nn.Linear(3, 3)
    optimizer = Counting(model.parameters())
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        for step in range(1, 5):
            optimizer.step()
            checkpointer.save(step, {"model": model, "optimizer": optimizer}, sync=True)
            saved = everystep.load(tmp_path / "run")["optimizer"]["state"]
            assert saved["steps"] == step
            assert [entry["n"] for entry in saved.values() if isinstance(entry, dict)] == [step, step]


@pytest.mark.parametrize("change", ["transpose", "dtype"])
def test_data_changes_its_look_but_not_its_memory(tmp_path, change):
    """``.data`` set to another view of the same bytes is saved as what it is now."""
    module = nn.Module()
    module.register_buffer("b", torch.randn(4, 4))
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, {"module": module}, sync=True)
        module.b.data = module.b.data.t() if change == "transpose" else module.b.data.view(torch.int32)
        for step in range(5, 9):
            checkpointer.save(step, {"module": module}, sync=True)
            saved = everystep.load(tmp_path / "run")["module"]["b"]
            assert saved.dtype == module.b.dtype
            assert torch.equal(saved, module.b)


def test_tensors_of_inference_mode(tmp_path):
    """A model made in inference mode is saved and restored; what a restore in inference mode makes can be trained on."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.inference_mode():
        ema = copy.deepcopy(model)
    expected = ema.weight.clone()
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        for step in range(1, 4):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            checkpointer.save(step, {"model": model, "optimizer": optimizer, "ema": ema}, sync=True)
    with torch.inference_mode():
        ema.weight.zero_()
    fresh = torch.optim.Adam(model.parameters())
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        with torch.inference_mode():
            assert checkpointer.restore({"model": model, "optimizer": fresh, "ema": ema}) == 3
        assert torch.equal(ema.weight, expected)
        model(torch.ones(1, 3)).sum().backward()
        fresh.step()


def test_lazily_conjugated_parameter_is_not_torn(tmp_path):
    """A tensor whose bytes are not its values is compared by nothing, not by its bytes."""
    module = nn.Module()
    module.p = nn.Parameter(torch.randn(4, dtype=torch.complex64).conj())
    module.q = nn.Parameter(torch.randn(3))
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        checkpointer.save(1, {"module": module, "optimizer": torch.optim.SGD([module.q], lr=0.1)}).wait("disk")
    assert torch.equal(everystep.load(tmp_path / "run")["module"]["p"], module.p)


def test_default_device_of_the_user(tmp_path):
    """torch.set_default_device concerns the user's tensors, not ours."""
    model = nn.Linear(3, 3)
    torch.set_default_device("meta")
    try:
        with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
            checkpointer.save(1, {"model": model, "rng": everystep.RNG()}, sync=True)
            expected = model.weight.detach().clone()
            model.weight.data.zero_()
            assert checkpointer.restore({"model": model, "rng": everystep.RNG()}) == 1
    finally:
        torch.set_default_device(None)
    assert torch.equal(model.weight, expected)


@pytest.mark.parametrize("how", ["timeout", "interrupt"])
def test_lease_that_nobody_waited_for(tmp_path, how):
    """A slab granted after the time-out, or after Ctrl-C, goes back: later saves find slabs."""
    checkpointer = everystep.Checkpointer(tmp_path / "run")
    checkpointer.save(1, state(1), sync=True)
    pid = agent_of(checkpointer)
    checkpointer._run.client._timeout_s = 0.3 if how == "timeout" else 30.0
    for step in range(2, 6):
        os.kill(pid, signal.SIGSTOP)
        alarm = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        if how == "interrupt":
            alarm.start()
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(step, state(step))
            alarm.join()
        elif step < 4:
            assert checkpointer.save(step, state(step)).report.outcome == "failed"
        os.kill(pid, signal.SIGCONT)
        checkpointer._run.client.snapshots()  # what was under way has been answered
    checkpointer._run.client._timeout_s = 30.0
    for step in range(10, 16):
        assert checkpointer.save(step, state(step)).wait("memory").outcome in ("memory", "disk")
    checkpointer.close()
    assert everystep.load(tmp_path / "run")["v"] == 15


@pytest.mark.leaves_agent
@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_run_goes_away_under_its_agent(tmp_path, how):
    """A save is not acknowledged where nobody would find it: the run's folder is not made again, nor is another run written to."""
    run = tmp_path / "run"
    checkpointer = everystep.Checkpointer(run)
    checkpointer.save(1, state(1), sync=True)
    if how == "deleted":
        shutil.rmtree(run)
    else:
        run.rename(tmp_path / "elsewhere")
    if how == "replaced":
        with everystep.Checkpointer(run, agent=False) as other:
            other.save(1, state(100), sync=True)
    with pytest.raises(ConflictError if how == "replaced" else PermanentStoreError, match=r"moved or deleted|another run"):
        checkpointer.save(2, state(2), sync=True)
    if how == "replaced":
        assert everystep.load(run)["v"] == 100
        checkpointer.close()
    else:
        assert not run.exists()
        with pytest.raises(AgentError, match="not on disk"):
            checkpointer.close()


@pytest.mark.leaves_agent
def test_copied_run_does_not_save_into_the_first(tmp_path):
    """A copy has the id of the first, whose agent must not take the copy's saves: it gets an agent of its own."""
    first = everystep.Checkpointer(tmp_path / "a", cadence=everystep.Cadence(disk=False))
    first.save(1, state(1), sync=True)
    first.save(2, state(2)).wait("memory")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    into = state(0)
    with everystep.Checkpointer(tmp_path / "b") as second:
        assert second.restore(into) == 1
        second.save(10, state(10), sync=True)
    first.close()
    assert (everystep.load(tmp_path / "a")["v"], everystep.load(tmp_path / "b")["v"]) == (2, 10)


def test_symbolic_link_to_a_run_is_the_run(tmp_path):
    """Another name of the same folder is no other place."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    checkpointer = everystep.Checkpointer(tmp_path / "run")
    checkpointer.save(1, state(1)).wait("memory")
    with everystep.Checkpointer(tmp_path / "link") as second:
        assert second.restore(into := state(0)) == 1
        assert into["v"] == 1
        with pytest.raises(ConflictError, match="is saving into this run now"):
            second.save(2, state(2))
    checkpointer.close()


def test_run_without_its_record(tmp_path):
    """A run that lost run.json still has its checkpoints: a restore finds them, and nothing starts over them."""
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        checkpointer.save(7, state(7), sync=True)
    (tmp_path / "run" / "run.json").unlink()
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        assert checkpointer.restore(state(0)) == 7
        checkpointer.save(8, state(8), sync=True)
    assert everystep.load(tmp_path / "run", step=7)["v"] == 7


def test_deleting_follows_no_link(tmp_path):
    """Retention takes away a link that stands for a checkpoint's folder, not what lies behind it."""
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        checkpointer.save(1, state(1), sync=True)
    (folder,) = (tmp_path / "run" / "data").iterdir()
    outside = tmp_path / "outside"
    folder.rename(outside)
    (outside / "precious").write_text("x")
    folder.symlink_to(outside)
    with everystep.Checkpointer(tmp_path / "run", agent=False, keep=everystep.Keep(last=1)) as checkpointer:
        assert checkpointer.restore(state(0)) == 1
        for step in (2, 3):
            checkpointer.save(step, state(step), sync=True)
    assert not folder.is_symlink()
    assert (outside / "precious").read_text() == "x"


def test_agent_gone_before_the_end(tmp_path):
    """``close`` and ``wait`` do not pass over a newest snapshot that died with the agent's memory."""
    checkpointer = everystep.Checkpointer(tmp_path / "run", cadence=everystep.Cadence(disk=1000))
    checkpointer.save(1, state(1)).wait("memory")
    os.kill(agent_of(checkpointer), signal.SIGKILL)
    checkpointer._run.client._reader.join(timeout=10)
    with pytest.raises(AgentError, match="before step 1 was on disk"):
        checkpointer.wait()
    with pytest.raises(AgentError, match="before step 1 was on disk"):
        checkpointer.close()


def torn_save(checkpointer, step, full):
    """A save that fails, because the model changed before it was copied."""
    go = threading.Event()
    stager = checkpointer._stager
    work = everystep.trainer.staging.Staging.work

    def later(staging, **how):
        go.wait()
        work(staging, **how)

    everystep.trainer.staging.Staging.work = later
    try:
        pending = checkpointer.save(step, full)
        with torch.no_grad():
            full["model"].weight.add_(1)
        go.set()
        stager.idle()
    finally:
        everystep.trainer.staging.Staging.work = work
    with pytest.raises(TornSnapshotError):
        pending.wait()


def test_failed_step_can_be_saved_again(tmp_path):
    """Saving a step again after its save failed is a save, not the first one's failure once more."""
    model = nn.Linear(4, 4)
    full = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        torn_save(checkpointer, 1, full)
        assert checkpointer.save(1, full, sync=True).report.outcome == "disk"
    assert torch.equal(everystep.load(tmp_path / "run")["model"]["weight"], model.weight)


def test_restore_after_a_failed_save(tmp_path):
    """A failed save does not stand in the way of going back to what was saved before."""
    model = nn.Linear(4, 4)
    full = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        checkpointer.save(1, full, sync=True)
        expected = model.weight.detach().clone()
        torn_save(checkpointer, 2, full)
        assert checkpointer.restore(full) == 1
        assert torch.equal(model.weight, expected)
        checkpointer.save(2, full)


def test_sync_save_is_not_skipped(tmp_path):
    """With memory for one slab, a save with ``sync`` waits for it instead of being skipped."""
    numel = 1 << 20
    with everystep.Checkpointer(tmp_path / "run", agent=False, memory_budget=numel * 4 + (1 << 16)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(2 * step, state(step, numel))
            assert checkpointer.save(2 * step + 1, state(10 * step, numel), sync=True).report.outcome == "disk"
            assert everystep.load(tmp_path / "run")["v"] == 10 * step


def test_clock_set_back(tmp_path, monkeypatch):
    """A cadence by time goes by a clock that nobody sets."""
    with everystep.Checkpointer(tmp_path / "run", agent=False, cadence=everystep.Cadence(disk="5s")) as checkpointer:
        checkpointer.save(1, state(1)).wait("disk")
        wall, ticks = time.time() - 7200, time.monotonic() + 6
        monkeypatch.setattr(time, "time", lambda: wall)
        monkeypatch.setattr("everystep.trainer.checkpointer.time.monotonic", lambda: ticks)
        assert checkpointer.save(2, state(2)).wait("disk").outcome == "disk"


@pytest.mark.parametrize("metrics", [{1: 0.5}, {"a": "x"}, {"a": None}, {"\udc80": 1.0}])
def test_metrics_that_are_none(tmp_path, metrics):
    """Metrics that cannot be stored are refused by name, before they reach (and end) the connection to the agent."""
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        with pytest.raises(ConfigError, match="metric"):
            checkpointer.save(1, state(1), metrics=metrics)
        checkpointer.save(1, state(1), sync=True)
        with pytest.raises(ConfigError, match="metric"):
            checkpointer.record(1, metrics)


@pytest.mark.parametrize("path", ["", "a\0b", "\udc80"])
def test_paths_that_name_no_folder(path):
    """An empty path is not the working directory, and what is no text cannot be told to an agent."""
    with pytest.raises(ConfigError, match="path"):
        everystep.Checkpointer(path)


@pytest.mark.parametrize("step", [1 << 63, 1 << 64, 10**30])
def test_step_beyond_all_steps(tmp_path, step):
    """A number that no message can carry is refused as a step."""
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer, pytest.raises(ConfigError, match="step is"):
        checkpointer.save(step, state(1))


def test_names_that_are_no_text(tmp_path):
    """Half a surrogate pair in a name is refused with the name, not with a traceback from the encoder."""
    module = nn.Module()
    module._parameters["\udc80"] = nn.Parameter(torch.zeros(2))
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        with pytest.raises(StateError, match="not valid text"):
            checkpointer.save(1, {"module": module})
        with pytest.raises(StateError, match="is not a name"):
            checkpointer.save(1, {"\udc80": torch.zeros(2)})


def test_lost_record_on_a_store_that_cannot_be_written(tmp_path, monkeypatch):
    """Where run.json is lost and cannot be made again, that is an error and not 'nothing there'."""
    from everystep.repository import Repository
    from everystep.store.local import LocalStore

    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        checkpointer.save(1, state(1), sync=True)
    (tmp_path / "run" / "run.json").unlink()

    def refuse(*_):
        raise PermanentStoreError("read-only", kind="not-permitted")

    monkeypatch.setattr(LocalStore, "create", refuse)
    with pytest.raises(CorruptionError, match=r"no run\.json"):
        Repository.open(str(tmp_path / "run"))


@pytest.mark.parametrize("run", [[0, 10**15], [-2, 1]])
def test_optimizer_that_claims_too_many_parameters(run):
    """A huge run of parameters in a checkpoint's values is corruption, not a list of that length."""
    from everystep.trainer.restore_optimizer import SavedOptimizer

    told = {"keys": [["n", ""]], "params": [run], "columns": {"n": [1, 2, 3]}}
    body = {"groups": [{"values": {}, "params": ["a", "b"]}], "flat": [told], "loose": [], "others": [], "extra": {}}
    with pytest.raises(CorruptionError, match="cannot be read"):
        SavedOptimizer(body, "optimizer", None)


@pytest.mark.parametrize("told", [{"module": []}, {"dict": {}}, {"dict": [["a"]]}, {"list": 3}, {"a": 1, "b": 2}, 7])
def test_entries_of_a_wrong_form(told):
    """An entry of a checkpoint's values that is not built as its kind says is corruption."""
    from everystep.trainer.restoring import kind_of

    with pytest.raises(CorruptionError, match="no known kind"):
        kind_of(told)


def test_damaged_newest_on_a_full_disk(tmp_path, monkeypatch):
    """That the damage cannot be noted down, for want of space, does not keep a restore from the older checkpoint."""
    with everystep.Checkpointer(tmp_path / "run", agent=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), sync=True)
    (file,) = (tmp_path / "run" / "data" / "000000000002-0001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def full(*_, **__):
        raise CapacityError("no space left", kind="disk-full")

    monkeypatch.setattr("everystep.repository.Repository.record_verified", full)
    assert everystep.load(tmp_path / "run")["v"] == 1


def test_agent_that_is_gone_is_noticed_at_the_first_failure(tmp_path):
    """A send that fails ends the connection: the next save has a new agent, however late the reading thread sees the end."""
    checkpointer = everystep.Checkpointer(tmp_path / "run", max_failures=2, max_failing_s=0)
    checkpointer.save(1, state(1), sync=True)
    client = checkpointer._run.client
    client._channel.send = lambda *_: (_ for _ in ()).throw(BrokenPipeError())
    assert checkpointer.save(2, state(2)).report.outcome == "failed"
    assert not client.alive
    client._channel.shut()  # as the death of the agent would
    client._reader.join(timeout=10)
    for step in (3, 4, 5):
        checkpointer.save(step, state(step), sync=True)
    checkpointer.close()
    assert everystep.load(tmp_path / "run")["v"] == 5


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_two_trainers_without_an_agent_of_their_own(tmp_path, first, second):
    """With ``agent=False`` on one side or both: the second trainer of a live run is refused all the same, and the first goes on."""
    one = everystep.Checkpointer(tmp_path / "run", agent=first)
    one.save(1, state(1), sync=True)
    with everystep.Checkpointer(tmp_path / "run", agent=second) as two:
        two.restore(state(0))
        with pytest.raises(ConflictError, match=str(os.getpid())):
            two.save(2, state(2))
    one.save(2, state(3), sync=True)
    one.close()
    assert everystep.load(tmp_path / "run")["v"] == 3


def test_in_process_trainer_takes_what_an_agent_holds(tmp_path):
    """A restart with ``agent=False`` while an agent still has a newer snapshot in memory goes on from that snapshot."""
    one = everystep.Checkpointer(tmp_path / "run", cadence=everystep.Cadence(disk=False))
    one.save(1, state(1), sync=True)
    one.save(2, state(2)).wait("memory")
    into = state(0)
    with everystep.Checkpointer(tmp_path / "run", agent=False) as two:
        assert two.restore(into) == 2
    one.close()
