"""Any state that can be saved comes back: nested data with tensors, and what is remembered never differs from a fresh look."""

from __future__ import annotations

import copy

import hypothesis
import hypothesis.strategies as st
import numpy as np
import torch
from torch import nn

from everystep.trainer.state import WORDS, StateCollector, load_state, restore_into


class MemoryReader:
    """A checkpoint in memory, made from collected leaves: copies, by name."""

    def __init__(self, collected, step=1):
        self.step = step
        self.values = collected.values
        self.data = {leaf.spec.name: leaf.tensor.detach().clone() for leaf in collected.leaves}
        specs = {leaf.spec.name: leaf.spec for leaf in collected.leaves}
        self.tensors = {**specs, **{alias: specs[name] for alias, name in collected.aliases.items()}}

    def read(self, wanted):
        for name, tensor in wanted:
            tensor.copy_(self.data[self.tensors[name].name])


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(WORDS, key=str)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    tensor = torch.tensor(list(raw), dtype=torch.uint8).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
arrays = st.sampled_from([np.arange(3), np.float16([1.5]), np.zeros((0, 2), np.uint8), np.array(True)])
keys = st.text("abc_", min_size=1, max_size=4)
data = st.recursive(
    plain | tensors() | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=12,
)
states = st.dictionaries(keys, data, max_size=4)


def same(a, b):
    """Equal in type, structure and bits."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return (
            torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)) if a.numel() else True
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b) and a.shape == b.shape
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def blank(value):
    """The same structure with other contents: tensors of zeros, no plain values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(blank, value))
    return None


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(states)
def test_data_comes_back(state):
    """F22 F23: any nested data loads equal, and restores equal into the same structure with other contents, tensors in place."""
    reader = MemoryReader(StateCollector().collect(state))
    assert same(load_state(reader), state)
    target = blank(state)
    holders = {leaf.spec.name: leaf.tensor.data_ptr() for leaf in StateCollector().collect(target).leaves}
    restore_into(target, reader)
    assert same(target, state)
    after = {leaf.spec.name: leaf.tensor.data_ptr() for leaf in StateCollector().collect(target).leaves}
    in_place = [name for name in holders if "tensor" in repr(type(_at(target, name))).lower()]
    assert all(holders[name] == after[name] for name in in_place)


def _at(tree, name):
    for word in name.split("."):
        tree = tree[word] if isinstance(tree, dict) else tree[int(word)]
    return tree


CHANGES = st.lists(
    st.sampled_from(["step", "data", "buffer", "add", "drop", "value", "tensor", "tie", "untie", "half", "group"]), max_size=8
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(CHANGES)
def test_what_is_remembered_never_differs_from_a_fresh_look(changes):
    """F3: after any changes to modules, optimizer and data, a collector that saw all states before gives what a new one gives."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "n": nn.BatchNorm1d(2)})
    optimizer = torch.optim.AdamW(net["a"].parameters())
    state = {"first": {"w": torch.ones(2)}, "m": net, "o": optimizer, "d": {"x": 1, "t": torch.zeros(3)}}
    old = StateCollector()
    seen = {}
    for number, change in enumerate(["", *changes]):
        if change == "step":
            for parameter in net["a"].parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        elif change == "data":
            net["a"].weight.data = net["a"].weight.data.clone()
        elif change == "half":
            net["n"].weight.data = net["n"].weight.data.half()
        elif change == "buffer":
            net["n"].running_mean = torch.full((2,), float(number))
        elif change == "add":
            net[f"x{number}"] = nn.Linear(1, 1)
        elif change == "drop" and len(net) > 2:
            del net[list(net)[-1]]
        elif change == "value":
            state["d"]["x"] = number
        elif change == "tensor":
            state["d"]["t"] = torch.full((3,), float(number))
        elif change == "tie":
            state["first"]["w"] = net["a"].weight
        elif change == "untie":
            state["first"]["w"] = torch.ones(2)
        elif change == "group" and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(net["n"].parameters())})
        now, fresh = old.collect(state), StateCollector().collect(state)
        assert now.values == fresh.values
        assert now.aliases == fresh.aliases
        assert now.structure == fresh.structure
        assert [(leaf.spec, leaf.late) for leaf in now.leaves] == [(leaf.spec, leaf.late) for leaf in fresh.leaves]
        for a, b in zip(now.leaves, fresh.leaves, strict=True):
            assert torch.equal(a.tensor, b.tensor)
            if a.late:
                assert a.tensor.data_ptr() == b.tensor.data_ptr()
        layout = [(leaf.spec, leaf.late) for leaf in now.leaves], dict(now.aliases)
        assert seen.setdefault(now.structure, copy.deepcopy(layout)) == layout


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.permutations(range(4)), st.permutations(range(4)), st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 2)
)
def test_any_order_and_grouping_of_parameters(one_order, two_order, grouping, steps):
    """Optimizer state is restored by name whatever the order and grouping on either side."""

    def make(order):
        net = nn.ParameterList([nn.Parameter(torch.randn(index + 1)) for index in range(4)])
        groups = [[net[index] for index in order if grouping[index] == which] for which in range(3)]
        return net, torch.optim.AdamW([{"params": group, "lr": 0.1 + which} for which, group in enumerate(groups) if group])

    one, first = make(one_order)
    for _ in range(steps):
        for parameter in one:
            parameter.grad = torch.randn_like(parameter)
        first.step()
    two, second = make(two_order)
    for group in second.param_groups:
        group["lr"] = 0.0
    restore_into({"o": second, "m": two}, MemoryReader(StateCollector().collect({"m": one, "o": first})))
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)
        assert same(first.state.get(a), second.state.get(b))
    rates = {
        index: group["lr"]
        for optimizer, net in ((first, one),)
        for group in optimizer.param_groups
        for index in range(4)
        if any(p is net[index] for p in group["params"])
    }
    again = {index: group["lr"] for group in second.param_groups for index in range(4) if any(p is two[index] for p in group["params"])}
    assert rates == again
