"""``Writer`` and ``Reader`` in one process: torch's own calls over an everystep run; what lies on disk is the same as a save of everystep's own."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import everystep
from everystep.errors import ConfigError, ConflictError
from everystep.integrations.dcp import Reader, Writer, restore
from everystep.integrations.dcp.naming import nested
from everystep.integrations.dcp.runs import step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
IN_PROCESS = {"agent": False}


@pytest.fixture
def run(tmp_path):
    """A run that is let go after the test."""
    yield tmp_path / "run"
    Writer(tmp_path / "run").close()


def save(state, run, step, **more):
    dcp.save(state, storage_writer=Writer(run, step=step, **IN_PROCESS, **more))


def load(state, run, **more):
    reader = Reader(run, **IN_PROCESS, **more)
    dcp.load(state, storage_reader=reader)
    return reader


def trained(seed, *, steps=2):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optim = torch.optim.AdamW([{"params": net[0].parameters(), "lr": 0.1 * seed}, {"params": [*net[1].parameters(), *net[2].parameters()]}])
    for _ in range(steps):
        net(torch.randn(5, 3)).sum().backward()
        optim.step()
        optim.zero_grad()
    return net, optim


def equal(a, b):
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


# -- the usual -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
def test_model_and_optimizer(run, flat):
    """get_state_dict, save, load, set_state_dict: model and AdamW are as they were."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    net, optim = trained(1)
    model_state, optim_state = get_state_dict(net, optim, options=options)
    save({"model": model_state, "optim": optim_state}, run, 3)
    other, other_optim = trained(2)
    model_state, optim_state = get_state_dict(other, other_optim, options=options)
    state = {"model": model_state, "optim": optim_state}
    reader = load(state, run)
    assert reader.loaded_step == 3
    set_state_dict(other, other_optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    assert equal(dict(net.state_dict()), dict(other.state_dict()))
    assert equal(optim.state_dict(), other_optim.state_dict())


VALUES = {
    "tensor": torch.arange(6.0).view(2, 3),
    "view": torch.arange(40.0)[4:16].view(3, 4).t(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4, dtype=torch.int16),
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "nested": {"list": [torch.ones(2), {"deep": torch.zeros(1), "n": 1}], "numbers": [1, 2.5, None], "pair": (1, "x")},
    "mixed": (torch.arange(3), [torch.ones(1)], 5),
    "array": np.arange(4, dtype=np.float32),
    "text": "words",
    "flag": True,
}


def zeros(value):
    """The same shape of state with other contents."""
    if isinstance(value, dict):
        return {key: zeros(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(zeros, value))
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 9)
    return type(value)() if value is not None and not isinstance(value, np.ndarray) else None


def test_all_kinds_of_values(run):
    """Tensors of any kind, nested lists and mappings, plain values, tuples with tensors inside, arrays: through torch's calls and back."""
    save({"state": VALUES}, run, 1)
    state = {"state": zeros(VALUES)}
    load(state, run)
    assert equal(state["state"], VALUES)


def test_no_pickle_is_stored(run):
    """What lies on disk is an ordinary everystep checkpoint: safetensors and JSON."""
    save({"model": trained(1)[0].state_dict(), "n": {"a": [1], "t": (torch.ones(1),)}}, run, 1)
    files = [path for path in (run / "data").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json"}
    assert any(path.suffix == ".safetensors" for path in files)
    assert not any(b"torch._utils" in path.read_bytes() or b"PK\3\4" in path.read_bytes() for path in files)


def test_the_same_as_everysteps_own_save(run, tmp_path):
    """Names, shapes and contents are those of ``Checkpointer.save`` of the same state; each side restores what the other saved."""
    state = {"model": dict(trained(1)[0].state_dict()), "note": {"epoch": 3, "t": torch.ones(2)}}
    save(state, run, 4)
    Writer(run).close()
    with everystep.Checkpointer(tmp_path / "own", agent=False) as own:
        own.save(4, state, sync=True)
    assert equal(everystep.load(run), everystep.load(tmp_path / "own"))
    target = zeros(state)
    with everystep.Checkpointer(run, agent=False) as checkpointer:
        assert checkpointer.restore(target) == 4
    assert equal(target, state)
    target = zeros(state)
    load(target, tmp_path / "own")
    Reader(tmp_path / "own").close()
    assert equal(target, state)


@pytest.mark.parametrize("flat", [False, True])
def test_what_everystep_saved_of_modules_and_optimizers(run, flat):
    """A checkpoint of modules and optimizers by ``Checkpointer.save`` loads through torch's calls by get_state_dict's names."""
    net, optim = trained(1)
    with everystep.Checkpointer(run, agent=False) as checkpointer:
        checkpointer.save(5, {"model": net, "optim": optim}, sync=True)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    other, other_optim = trained(2)
    model_state, optim_state = get_state_dict(other, other_optim, options=options)
    state = {"model": model_state, "optim": optim_state}
    load(state, run)
    set_state_dict(other, other_optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    assert equal(dict(net.state_dict()), dict(other.state_dict()))
    assert equal(optim.state_dict(), other_optim.state_dict())


@pytest.mark.parametrize("flat", [False, True])
def test_from_torchs_calls_to_a_checkpointer(run, flat):
    """What torch's save wrote is restored into modules, optimizers and objects themselves, and the run goes on with Checkpointer.save."""
    net, optim = trained(1)
    model_state, optim_state = get_state_dict(net, optim, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    note = {"epoch": 3, "pair": (torch.arange(3), 4), "array": np.arange(2.0)}
    save({"model": model_state, "optim": optim_state, "note": note}, run, 7)
    Writer(run).close()
    with everystep.Checkpointer(run, agent=False) as checkpointer:
        for given in (1, 0):
            other, other_optim = trained(2, steps=given)
            state = {
                "model": other,
                "optim": other_optim,
                "note": {"epoch": 0, "pair": (torch.zeros(3, dtype=torch.int64), 0), "array": None},
            }
            restore(state, checkpointer)
            assert equal(dict(net.state_dict()), dict(other.state_dict()))
            assert equal(optim.state_dict(), other_optim.state_dict())
            assert equal(state["note"], note)
        checkpointer.save(8, state, sync=True)
        assert checkpointer.restore(state) == 8
    other, other_optim = trained(3)
    restore({"model": other, "optim": other_optim}, run, step=7, include=["model.*", "optim.*"])
    Reader(run).close()
    assert equal(optim.state_dict(), other_optim.state_dict())


def test_a_flat_state_dict(run):
    """``dcp.save(model.state_dict())``, whose top-level keys have dots in them."""
    net, other = trained(1)[0], trained(2)[0]
    save(net.state_dict(), run, 1)
    state = other.state_dict()
    load(state, run)
    other.load_state_dict(state)
    assert equal(dict(net.state_dict()), dict(other.state_dict()))
    target = zeros(dict(net.state_dict()))
    Writer(run).close()
    with everystep.Checkpointer(run, agent=False) as checkpointer:
        checkpointer.restore(target)
    assert equal(target, dict(net.state_dict()))


def test_stateful_objects(run):
    """Objects with state_dict and load_state_dict at the top level, which torch itself asks."""

    class Counter:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"value": self.value, "t": torch.tensor([self.value])}

        def load_state_dict(self, state):
            self.value = state["value"] + int(state["t"])

    save({"counter": Counter(4)}, run, 1)
    counter = Counter(0)
    load({"counter": counter}, run)
    assert counter.value == 8


# -- steps -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "step"), [("step-100", 100), ("ckpt/epoch_0_step_20", 20), ("/a/1/2/", 2), ("7", 7), ("s3://b/step=00000012", 12)]
)
def test_the_step_in_an_id(told, step):
    """The last number of the last part of an id."""
    assert step_of(told) == step


def test_steps_come_from_ids_arguments_or_callables(run):
    """checkpoint_id, ``step=`` as a number and as a callable; all are there, none is deleted, and each can be loaded."""
    writer = Writer(run, **IN_PROCESS)
    dcp.save({"x": torch.tensor([1.0])}, checkpoint_id="step-1", storage_writer=writer)
    writer.step = 2
    dcp.save({"x": torch.tensor([2.0])}, storage_writer=writer)
    counted = iter(range(3, 100))
    for number in (3, 4, 5):
        at = next(counted)
        dcp.save({"x": torch.tensor([float(number)])}, storage_writer=Writer(run, step=lambda at=at: at))
    for step in (1, 3, 5):
        state = {"x": torch.zeros(1)}
        dcp.load(state, checkpoint_id=f"step-{step}", storage_reader=Reader(run))
        assert state["x"].item() == step
    state = {"x": torch.zeros(1)}
    assert load(state, run).loaded_step in {1, 3, 5}  # the newest of the timeline that the last load began


def test_a_step_has_to_be_known(run):
    """Neither an id nor a step: ConfigError before anything is written; an id without a number too."""
    with pytest.raises(CheckpointException, match="does not know which step"):
        dcp.save({"x": torch.zeros(1)}, storage_writer=Writer(run, **IN_PROCESS))
    with pytest.raises(ConfigError, match="newest"):
        dcp.save({"x": torch.zeros(1)}, checkpoint_id="newest", storage_writer=Writer(run, **IN_PROCESS))
    assert not run.exists()


def test_a_step_is_saved_once(run):
    """Saving a step again is refused, whatever it holds: nothing is overwritten."""
    save({"x": torch.ones(1)}, run, 1)
    with pytest.raises(CheckpointException, match="saved in run") as caught:
        save({"x": torch.zeros(1)}, run, 1)
    [[error, _]] = caught.value.failures.values()
    assert isinstance(error, ConflictError)
    state = {"x": torch.zeros(1)}
    load(state, run)
    assert state["x"].item() == 1


def test_a_second_process_has_to_load_first(run):
    """A run that has checkpoints is gone on with after a load, as with Checkpointer: else a ConflictError."""
    save({"x": torch.ones(1)}, run, 1)
    Writer(run).close()
    with pytest.raises(CheckpointException, match="restore"):
        save({"x": torch.ones(1)}, run, 2)
    load({"x": torch.zeros(1)}, run)
    save({"x": torch.full((1,), 2.0)}, run, 2)
    state = {"x": torch.zeros(1)}
    assert load(state, run).loaded_step == 2
    assert state["x"].item() == 2


def test_nothing_to_load(run):
    """No run, no such step, missing names, other shapes and dtypes: errors that say so."""
    for reader in (Reader(run, **IN_PROCESS), Reader(run, step=3, **IN_PROCESS)):
        with pytest.raises(CheckpointException, match="no run"):
            dcp.load({"x": torch.zeros(1)}, storage_reader=reader)
    save({"x": torch.ones(3)}, run, 1)
    with pytest.raises(CheckpointException, match=r"step 9.*has steps 1"):
        load({"x": torch.zeros(3)}, run, step=9)
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"x": torch.zeros(3), "y": torch.zeros(3)}, run)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"x": torch.zeros(4)}, run)
    with pytest.raises(CheckpointException, match="cast=True"):
        load({"x": torch.zeros(3, dtype=torch.float64)}, run)
    state = {"x": torch.zeros(3, dtype=torch.float64)}
    load(state, run, cast=True)
    assert torch.equal(state["x"], torch.ones(3, dtype=torch.float64))


def test_a_part_of_what_is_there(run):
    """Loading fewer names than were saved, and with allow_partial_load more."""
    save({"a": torch.ones(2), "b": torch.ones(2), "n": 3}, run, 1)
    state = {"b": torch.zeros(2)}
    load(state, run)
    assert torch.equal(state["b"], torch.ones(2))
    state = {"b": torch.zeros(2), "new": torch.zeros(1)}
    dcp.load(state, storage_reader=Reader(run), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(state["b"], torch.ones(2))
    assert torch.equal(state["new"], torch.zeros(1))


def test_without_a_state_dict(run):
    """Torch's planner that builds the state from the metadata alone (as its converters do) gets the saved structure."""
    save({"model": {"w": torch.arange(4.0)}, "n": {"a": [1, 2], "l": [torch.ones(1), {"k": 2}]}}, run, 1)
    state = {}
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(state, Reader(run, **IN_PROCESS), no_dist=True, planner=_EmptyStateDictLoadPlanner())
    assert equal(state, {"model": {"w": torch.arange(4.0)}, "n": {"a": [1, 2], "l": [torch.ones(1), {"k": 2}]}})


def test_a_damaged_checkpoint_is_passed_over(run):
    """The newest one is damaged: the older one is loaded; asked for by its step, the damaged one is a CorruptionError."""
    for step in (1, 2):
        save({"x": torch.full((1000,), float(step)), "n": step}, run, step)
    [file] = (run / "data" / "000000000002-0001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    Writer(run).close()
    state = {"x": torch.zeros(1000), "n": 0}
    with pytest.raises(CheckpointException, match="verif"):
        load(dict(state), run, step=2)
    assert load(state, run).loaded_step == 1
    assert equal(state, {"x": torch.ones(1000), "n": 1})


# -- planners ------------------------------------------------------------------------------------------------------------------------------


class Half(DefaultSavePlanner):
    """Changes tensors on their way to the storage."""

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) else data


class Renaming(DefaultSavePlanner):
    """Changes names."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner({f"my_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class Without(DefaultSavePlanner):
    """Leaves items out."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if not item.index.fqn.startswith("big")])


class Own(SavePlanner):
    """Of no kin to torch's; cuts its tensor in two."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.inner = DefaultSavePlanner()
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self):
        plan = self.inner.create_local_plan()
        items = []
        for item in plan.items:
            if item.tensor_data is None:
                items.append(item)
                continue
            for row in range(item.tensor_data.size[0]):
                sizes = torch.Size([1, *item.tensor_data.size[1:]])
                offsets = torch.Size([row, *[0] * (len(sizes) - 1)])
                data = dataclasses.replace(item.tensor_data, chunk=dcp.metadata.ChunkStorageMetadata(offsets, sizes))
                items.append(dataclasses.replace(item, index=dcp.metadata.MetadataIndex(item.index.fqn, offsets), tensor_data=data))
        return SavePlan(items, planner_data=plan.planner_data)

    def create_global_plan(self, all_plans):
        return all_plans, dcp.metadata.Metadata({})

    def finish_plan(self, new_plan):
        return new_plan

    def resolve_data(self, write_item):
        if write_item.tensor_data is None:
            return self.inner.resolve_data(write_item)
        return self.inner.state_dict[write_item.index.fqn].narrow(0, write_item.index.offset[0], 1)


def test_planners_of_ones_own(run):
    """What a planner changes, renames, leaves out or cuts is what is saved."""
    state = {"w": torch.arange(6.0).view(3, 2), "big": torch.ones(5), "n": {"a": 1}}
    for step, planner in enumerate((Half(), Renaming(), Without(), Own()), 1):
        dcp.save(state, storage_writer=Writer(run, step=step, **IN_PROCESS), planner=planner)
    Writer(run).close()
    halved, renamed, without, own = (everystep.load(run, step=step) for step in (1, 2, 3, 4))
    assert equal(halved, {"w": state["w"].half(), "big": state["big"].half(), "n": {"a": 1}})
    assert equal(renamed, {f"my_{key}": value for key, value in state.items()})
    assert equal(without, {"w": state["w"], "n": {"a": 1}})
    assert own.pop("n.a", None) == 1
    assert equal(own, {"w": state["w"], "big": state["big"]})


def test_plan_caching(run):
    """Torch's cache of plans keeps a plan from the first save: the later states are saved all the same."""
    for step in (1, 2, 3):
        dcp.save(
            {"w": torch.full((3,), float(step))},
            storage_writer=Writer(run, step=step, **IN_PROCESS),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
    state = {"w": torch.zeros(3)}
    load(state, run)
    assert torch.equal(state["w"], torch.full((3,), 3.0))


def test_unflattened(run):
    """A planner that does not flatten hands over nested values."""
    state = {"w": torch.ones(2), "n": {"a": [1, 2], 5: "x"}}
    dcp.save(
        state,
        storage_writer=Writer(run, step=1, **IN_PROCESS),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    Writer(run).close()
    assert equal(everystep.load(run), state)


def test_nested_shapes():
    """Ways with numbers are lists, holes are None; values that are mappings stay as they are."""
    flat = {"a.0.x": 1, "a.1": 2, "b": {0: "kept"}, "c.1": 5}
    paths = {"a.0.x": ("a", 0, "x"), "a.1": ("a", 1), "c.1": ("c", 1)}
    assert nested(flat, paths) == {"a": [{"x": 1}, 2], "b": {0: "kept"}, "c": [None, 5]}


# -- async_save --------------------------------------------------------------------------------------------------------------------------


def test_async_save(run):
    """async_save in a thread saves what the state was at the call, although it changes at once."""
    writer = Writer(run, **IN_PROCESS)
    for step in (1, 2, 3):
        tensor = torch.full((1000,), float(step))
        future = dcp.async_save({"x": tensor, "n": step}, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)
        tensor.fill_(-1)
        future.result(timeout=60)
    for step in (3, 1):
        state = {"x": torch.zeros(1000), "n": 0}
        load(state, run, step=step)
        assert equal(state, {"x": torch.full((1000,), float(step)), "n": step})


def test_async_errors_reach_the_future(run):
    """What cannot be saved is raised by the future."""
    future = dcp.async_save({"x": torch.ones(1), "odd": object}, checkpoint_id="1", storage_writer=Writer(run, **IN_PROCESS), no_dist=True)
    with pytest.raises(CheckpointException, match="odd"):
        future.result(timeout=60)


def test_writers_travel(run):
    """A writer made from a path can be sent to the process of async_save, and knows there what was loaded; one made from a checkpointer cannot."""
    save({"x": torch.ones(1)}, run, 1)
    Writer(run).close()
    load({"x": torch.zeros(1)}, run)
    there = pickle.loads(pickle.dumps(Writer(run, step=2)))
    assert there._run.resumed.step == 1
    with everystep.Checkpointer(run.parent / "other", agent=False) as checkpointer, pytest.raises(ConfigError, match="another process"):
        pickle.dumps(Writer(checkpointer))


def test_not_waiting_for_the_disk(run):
    """sync=False returns when the snapshot is staged; ``pending`` says when it is durable."""
    writer = Writer(run, step=1, sync=False, **IN_PROCESS)
    dcp.save({"x": torch.ones(5)}, storage_writer=writer)
    assert writer.pending is not None
    writer.pending.wait("disk")
    assert writer.pending.report.tier == "disk"


def test_a_checkpointer_of_ones_own(run):
    """A Writer and a Reader around the program's own Checkpointer, which stays open."""
    with everystep.Checkpointer(run, agent=False) as checkpointer:
        dcp.save({"x": torch.ones(2)}, storage_writer=Writer(checkpointer, step=1))
        state = {"x": torch.zeros(2)}
        dcp.load(state, storage_reader=Reader(checkpointer))
        assert torch.equal(state["x"], torch.ones(2))
        checkpointer.save(2, copy.deepcopy(state), sync=True)
        assert checkpointer.latest() == 2
        with pytest.raises(ConfigError, match="made from a path"):
            Writer(checkpointer, keep=everystep.Keep(last=1))
