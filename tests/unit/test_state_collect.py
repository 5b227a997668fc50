"""What a state's tensors are called, which may be copied late, what is refused, and what is remembered between saves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from everystep.errors import CheckpointError, StateError
from everystep.trainer.state import DTYPES, RNG, WORDS, StateCollector


def collect(state):
    return StateCollector().collect(state)


def names(state):
    return [leaf.spec.name for leaf in collect(state).leaves]


class Net(nn.Module):
    """A submodule called `module`, batch norm, and a buffer that is not persistent."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.norm(self.module(x))


def test_module_names_are_those_of_its_state_dict():
    """Parameters and persistent buffers, as in state_dict, behind the top-level key; the group is that key."""
    net = Net()
    leaves = collect({"model": net}).leaves
    assert [leaf.spec.name for leaf in leaves] == [f"model.{name}" for name in net.state_dict()]
    assert {leaf.spec.group for leaf in leaves} == {"model"}
    for leaf in leaves:
        assert leaf.tensor.data_ptr() == net.state_dict()[leaf.spec.name.removeprefix("model.")].data_ptr()
        assert leaf.spec.shape == tuple(leaf.tensor.shape)


def test_parameters_are_late_and_the_rest_is_not():
    """Parameters may be copied late; buffers, plain tensors and scalars may change at any time."""
    net = Net()
    late = {
        leaf.spec.name
        for leaf in collect({"m": net, "t": torch.ones(3), "frozen": nn.Linear(1, 1).requires_grad_(False)}).leaves
        if leaf.late
    }
    assert late == {"m.module.weight", "m.module.bias", "m.norm.weight", "m.norm.bias", "frozen.weight", "frozen.bias"}


@pytest.mark.parametrize("wrap", ["DataParallel", "compile", "checkpoint", "nested", "AveragedModel"])
def test_wrappers_do_not_show_in_names(wrap):
    """Prefixes of wrappers are stripped wherever they are; a user's own submodule called `module` is not."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = Net()
    bare = [f"m.{name}" for name in net.state_dict()]
    if wrap == "DataParallel":
        wrapped = nn.DataParallel(net)
    elif wrap == "compile":
        wrapped = torch.compile(net, backend="eager")
    elif wrap == "checkpoint":
        net.module = checkpoint_wrapper(net.module)
        wrapped = net
    elif wrap == "nested":
        net.norm = torch.compile(net.norm, backend="eager")
        wrapped = nn.DataParallel(torch.compile(net, backend="eager"))
    else:
        wrapped = torch.optim.swa_utils.AveragedModel(net)
        bare = ["m.n_averaged"] + [f"m.module.{name}" for name in net.state_dict()]
    assert sorted(names({"m": wrapped})) == sorted(bare)


def test_distributed_wrapper_does_not_show_in_names(tmp_path):
    """DistributedDataParallel's `module.` is stripped."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        net = Net()
        assert names({"m": nn.parallel.DistributedDataParallel(net)}) == names({"m": net})
    finally:
        torch.distributed.destroy_process_group()


def test_tied_parameters_are_stored_once():
    """F25: one leaf under the first name, an alias for each other, across top-level entries and different tensor objects of one memory."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    tied = Tied()
    collected = collect({"model": tied, "ema": {"copy": tied.embed.weight.detach()}, "half": tied.embed.weight.detach()[:2]})
    assert [leaf.spec.name for leaf in collected.leaves] == ["model.embed.weight", "half"]
    assert collected.aliases == {"model.head.weight": "model.embed.weight", "ema.copy": "model.embed.weight"}


def test_an_alias_is_late_if_any_of_its_names_is():
    """A parameter that also stands in plain data before its module stays a parameter."""
    net = nn.Linear(2, 2)
    (leaf, *_) = collect({"a": {"w": net.weight}, "m": net}).leaves
    assert (leaf.spec.name, leaf.late) == ("a.w", True)


def test_two_paths_with_one_name_are_refused():
    """Keys with dots that lead to one name: StateError that shows both ways."""
    with pytest.raises(StateError, match=r"state\['a'\]\['b\.c'\] and state\['a'\]\['b'\]\['c'\] have the same name 'a\.b\.c'"):
        collect({"a": {"b.c": torch.ones(1), "b": {"c": torch.ones(1)}}})
    with pytest.raises(StateError, match="same name"):
        collect({"a": {1: torch.ones(1), "1": torch.ones(1)}})
    with pytest.raises(StateError, match="would be named inside"):
        collect({"a": nn.Linear(1, 1), "a.x": torch.ones(1)})


@pytest.mark.parametrize(
    "state", [{"": 1}, {1: 2}, [("a", 1)], {"a": {"": torch.ones(1)}}, {"a": {"": nn.Linear(1, 1)}}, {"a/b": torch.ones(1)}]
)
def test_states_without_names_are_refused(state):
    """An empty or non-text top-level key, or a tensor without a name: StateError."""
    with pytest.raises(StateError):
        collect(state)


def _cycle():
    one = []
    one.append(one)
    return one


class Marked(torch.Tensor):
    """A tensor subclass."""


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "subclass": lambda: torch.ones(2).as_subclass(Marked),
    "structured array": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "object array": lambda: np.array([object()]),
    "masked array": lambda: np.ma.array([1.0]),
    "big-endian array": lambda: np.zeros(2, dtype=">f4"),
    "long double array": lambda: np.zeros(2, dtype=np.longdouble),
    "text array": lambda: np.array(["a"]),
    "lambda": lambda: lambda: 0,
    "object": object,
    "tensor in a set": lambda: {torch.ones(1)},
    "cycle": _cycle,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(what):
    """F17 F23: sparse, meta, subclasses, foreign dtypes and objects raise StateError that names the path, at once."""
    with pytest.raises(StateError, match=r"outer\.inner|outer\['inner'\]"):
        collect({"fine": torch.ones(2), "outer": {"inner": REFUSED[what]()}})


def test_quantized_nested_and_lazy_tensors_are_refused():
    """F17: quantized and nested tensors, and parameters of a lazy module, are refused with what to do."""
    with pytest.warns(UserWarning, match="deprecated"), pytest.raises(StateError, match="quantized"):
        collect({"t": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)})
    with pytest.raises(StateError, match="nested"):
        collect({"t": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)})
    with pytest.raises(StateError, match="run one forward pass"):
        collect({"m": nn.LazyLinear(3)})


def test_a_sharded_tensor_is_its_local_one(tmp_path):
    """A DTensor of one process is stored as its local tensor, never gathered."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
        leaf = collect({"m": model}).leaves[0]
        assert leaf.tensor is model.weight._local_tensor
        assert (leaf.spec.shape, len(leaf.chunks)) == ((2, 2), 1)
    finally:
        torch.distributed.destroy_process_group()


def test_dtype_words_are_those_of_safetensors():
    """F22: each word is the one that the safetensors package writes for that dtype."""
    safetensors = pytest.importorskip("safetensors.torch")
    import json

    for dtype, word in WORDS.items():
        assert DTYPES[word] is dtype
        if "fnuz" in str(dtype):
            continue  # torch has them, the package's torch writer does not
        data = safetensors.save({"x": torch.empty(3, dtype=torch.uint8).new_zeros(3 * dtype.itemsize).view(dtype)})
        assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"] == word


def test_non_leaf_tensors_and_scalars_are_taken():
    """A result of autograd is stored like any tensor; a 0-dim tensor keeps its shape."""
    x = torch.ones(2, requires_grad=True) * 2
    specs = {leaf.spec.name: leaf.spec.shape for leaf in collect({"x": x, "s": torch.tensor(3.5), "e": torch.empty(0, 4)}).leaves}
    assert specs == {"x": (2,), "s": (), "e": (0, 4)}


# -- again ---------------------------------------------------------------------------------------------------------------


def training():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"model": net, "optim": optimizer, "sched": scheduler, "rng": RNG(), "step": 1}


def test_an_unchanged_state_gives_the_same_leaves():
    """Leaves, and the list itself, are the same objects while the tensors are, although random states are handed out anew each time."""
    state, collector = training(), StateCollector()
    collector.collect(state)
    first = collector.collect(state)
    torch.rand(1)
    second = collector.collect({**state, "step": 2})
    assert second.leaves is first.leaves
    assert second.structure == first.structure
    assert hash(second.structure) == hash(first.structure)
    by_name = {leaf.spec.name: leaf for leaf in second.leaves}
    assert torch.equal(by_name["rng.torch"].tensor, torch.get_rng_state())


def test_plain_values_are_taken_each_time():
    """Learning rates and numbers are those of the moment; equal values are equal bytes."""
    state, collector = training(), StateCollector()
    first, again = collector.collect(state), collector.collect(state)
    assert first.values == again.values
    state["optim"].param_groups[0]["lr"] = 0.015625
    assert b"0.015625" in collector.collect(state).values


@pytest.mark.parametrize("change", ["data", "shape", "replace", "optimizer state", "buffer", "rng size"])
def test_a_moved_tensor_gets_a_new_leaf(change):
    """F3: new storages and new tensor objects are noticed; only their leaves are new."""
    state, collector = training(), StateCollector()
    collector.collect(state)
    before = collector.collect(state)
    net, optimizer = state["model"], state["optim"]
    weight = net.module.weight
    name = "model.module.weight"
    if change == "data":
        weight.data = weight.data.clone()
    elif change == "shape":
        weight.data = weight.data.view(2, 3)
    elif change == "replace":
        net.module.bias = nn.Parameter(torch.full((3,), 7.0))
        optimizer.param_groups[0]["params"][1] = net.module.bias
        optimizer.state[net.module.bias] = optimizer.state.pop(next(p for p in optimizer.state if p.shape == (3,)))
        name = "model.module.bias"
    elif change == "optimizer state":
        optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].clone()
        name = "optim.state.model.module.weight.exp_avg"
    elif change == "buffer":
        net.norm.running_mean = torch.ones(3)
        name = "model.norm.running_mean"
    else:
        state["note"] = torch.ones(3)
        name = "note"
    after = collector.collect(state)
    old = {leaf.spec.name: leaf for leaf in before.leaves}
    new = {leaf.spec.name: leaf for leaf in after.leaves}
    assert [key for key, leaf in new.items() if old.get(key) is not leaf and not key.startswith("rng.")] == [name]
    fresh = collect(state)
    assert {key: (leaf.spec, leaf.late, leaf.tensor.data_ptr()) for key, leaf in new.items() if not key.startswith("rng.")} == {
        leaf.spec.name: (leaf.spec, leaf.late, leaf.tensor.data_ptr()) for leaf in fresh.leaves if not leaf.spec.name.startswith("rng.")
    }
    # A replaced parameter's state comes last in the optimizer, so the order differs too.
    assert (after.structure == before.structure) == (change not in {"shape", "replace", "rng size"})


def test_a_renamed_or_added_module_is_noticed():
    """Submodules that come, go or change their name change names and structure."""
    net, collector = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), StateCollector()
    first = collector.collect({"m": net})
    net.append(nn.Linear(1, 1))
    second = collector.collect({"m": net})
    assert len(second.leaves) == len(first.leaves) + 2
    net._modules["x"] = net._modules.pop("2")
    assert [leaf.spec.name for leaf in collector.collect({"m": net}).leaves] == [f"m.{name}" for name in net.state_dict()]


def test_a_parameter_group_added_later_is_noticed():
    """A group that comes later, and the state it gets, are there at the next save."""
    net, extra, collector = Net(), nn.Linear(2, 2), StateCollector()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, lr=0.1)
    state = {"m": net, "x": extra, "o": optimizer}
    collector.collect(state)
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.75})
    assert b"0.75" in collector.collect(state).values
    extra(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert "o.state.x.weight.momentum_buffer" in {leaf.spec.name for leaf in collector.collect(state).leaves}


def test_numbers_in_optimizer_state_are_those_of_the_moment():
    """SparseAdam counts its steps in plain numbers: they are told anew without new leaves."""
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    collector = StateCollector()

    def one_step():
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        optimizer.step()

    one_step()
    state = {"m": table, "o": optimizer}
    first = collector.collect(state)
    assert b'"columns":{"step":[1]}' in first.values
    one_step()
    second = collector.collect(state)
    assert b'"columns":{"step":[2]}' in second.values
    assert second.leaves is first.leaves


def test_ties_that_begin_or_end_are_noticed():
    """Plain data that begins to share memory with a parameter becomes an alias, and back."""
    net, collector = nn.Linear(2, 2), StateCollector()
    state = {"m": net, "t": {"w": torch.ones(2, 2)}}
    assert not collector.collect(state).aliases
    state["t"]["w"] = net.weight
    assert collector.collect(state).aliases == {"t.w": "m.weight"}
    state["t"]["w"] = torch.ones(2, 2)
    after = collector.collect(state)
    assert not after.aliases
    assert {leaf.spec.name for leaf in after.leaves} == {"m.weight", "m.bias", "t.w"}


def test_ties_of_data_that_comes_first_end_too():
    """The same where the plain data has the first name, and the parameter is the alias."""
    net, collector = nn.Linear(2, 2), StateCollector()
    state = {"a": {"w": net.weight}, "m": net}
    assert collector.collect(state).aliases == {"m.weight": "a.w"}
    state["a"]["w"] = torch.full((2, 2), 5.0)
    after = collector.collect(state)
    assert not after.aliases
    assert {leaf.spec.name: leaf.tensor.data_ptr() for leaf in after.leaves}["m.weight"] == net.weight.data_ptr()


def test_collecting_changes_nothing():
    """No number is drawn, no gradient is touched, no mode changes."""
    state = training()
    state["model"].train(mode=True)
    before = torch.get_rng_state()
    versions = [parameter._version for parameter in state["model"].parameters()]
    collect(state)
    assert torch.equal(before, torch.get_rng_state())
    assert versions == [parameter._version for parameter in state["model"].parameters()]


def test_errors_leave_the_collector_usable():
    """A refused state is forgotten: the next one is collected as if it had not been."""
    collector, good = StateCollector(), training()
    first = collector.collect(good)
    with pytest.raises(CheckpointError):
        collector.collect({**good, "bad": torch.ones(2, device="meta")})
    assert [leaf.spec for leaf in collector.collect(good).leaves] == [leaf.spec for leaf in first.leaves]


def test_no_optimizer_is_told():
    """Without an optimizer in the state the list is empty: everything has to be copied in the call."""
    assert list(collect({"m": Net(), "x": math.pi}).optimizers) == []
