"""Any state that can be saved comes back: nested data with tensors, and what is remembered never differs from a fresh look."""

from __future__ import annotations

import copy
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import nn

from everystep.layout import HeldTensor, RankLayout, plan_world
from everystep.manifest import TensorSpec, block_digests, digest, merge
from everystep.plan import slab_part
from everystep.region import Region
from everystep.trainer.reading import ManifestReader
from everystep.trainer.restoring import Wanted
from everystep.trainer.sharding import Chunk, box
from everystep.trainer.staging import SlabViews, Stager
from everystep.trainer.state import WORDS, Leaf, StateCollector, load_state, restore_into


class MemoryReader:
    """A checkpoint in memory, made from collected leaves: copies, by name."""

    def __init__(self, collected, step=1):
        self.step = step
        self.beyond = self.by_rank = False
        self.values = collected.values
        self.data = {leaf.spec.name: leaf.tensor.detach().clone() for leaf in collected.leaves}
        specs = {leaf.spec.name: leaf.spec for leaf in collected.leaves}
        self.tensors = {**specs, **{alias: specs[name] for alias, name in collected.aliases.items()}}

    def read(self, wanted):
        for name, tensor, _ in wanted:
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


# -- regions ---------------------------------------------------------------------------------------------------------------


class SlabSource:
    """The bytes of slabs in memory, one for each node."""

    def __init__(self, places, *, direct):
        self.places, self.direct = places, direct

    def read_into(self, number, offset, view):
        slab, at = self.places[number]
        view[:] = slab[at + offset : at + offset + len(view)]

    def bytes_of(self, fetch, *, shared=False):
        view = memoryview(bytearray(fetch.nbytes))
        self.read_into(fetch.object, fetch.offset, view)
        return view

    def release(self, view):
        pass


def cells(shape, grid):
    """The boxes that ``torch.chunk`` along each dimension makes, empty ones too."""
    sides = []
    for size, count in zip(shape, grid, strict=True):
        full = -(-size // count)
        sides.append([(min(i * full, size), max(0, min(full, size - i * full))) for i in range(count)])
    return [Region(tuple(begin for begin, _ in picked), tuple(size for _, size in picked)) for picked in itertools.product(*sides)]


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    grids = st.tuples(*[st.integers(1, 3) for _ in shape])
    return shape, draw(grids), draw(grids), draw(st.integers(1, 2)), draw(st.integers(1, 3))


@hypothesis.given(layouts(), st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.uint8, torch.bfloat16]), st.sampled_from([1, 64, 1 << 20]))
def test_any_layout_is_staged_and_read_as_any_other(layout, together, direct, dtype, direct_nbytes):
    """Regions of any grid, with replicas, on one or several nodes: staged by boxes, and read back as the boxes of any other grid."""
    shape, saved, wanted, replicas, nodes = layout
    full = torch.arange(math.prod(shape)).view(shape).to(dtype)
    spec = TensorSpec("m.w", WORDS[dtype], shape, "m")
    held = cells(shape, saved) * replicas
    nodes = min(nodes, len(held))
    leaves, told = [], []
    for rank, region in enumerate(held):
        chunks = (Chunk(region, Region((0,) * len(shape), region.sizes)),) if region.numel else ()
        leaves.append([Leaf(spec, box(full, region).clone(), late=bool(rank % 2), chunks=chunks)])
        told.append(RankLayout(rank % nodes, (HeldTensor(spec, tuple(chunk.region for chunk in chunks)),), {}))
    plans = plan_world(told)
    parts, slabs = [], {}
    for number, node in enumerate(plans):
        slab = memoryview(bytearray(node.plan.nbytes))
        ranks = tuple(rank for rank in range(len(held)) if rank % nodes == number)
        for rank in ranks:
            stager, errors = Stager(notice=lambda _: None), []
            stager.stage(step=1, leaves=leaves[rank], copies=node.copies.get(rank, ()), views=SlabViews(slab, node.plan, [dtype] * len(node.plan.placements)),
                         overlap=False, finish=lambda staging, errors=errors: errors.append(staging.error))  # fmt: skip
            assert errors == [None]
            stager.close()
        slabs.update((file.name, (slab, file.slab_offset)) for file in node.plan.files)
        parts.append(slab_part(
            node.plan, step=1, attempt=1, node=number, nodes=nodes, saved_at=0.0, values=b'{"state":{"dict":[]}}', metrics={}, world=len(held), ranks=ranks,
            object_key={file.name: file.name for file in node.plan.files}, header_digests=[digest(file.header) for file in node.plan.files],
            digests=[block_digests(slab[one.slab_offset : one.slab_offset + one.nbytes], one.block) for one in node.plan.placements],
        ))  # fmt: skip
    manifest = merge(parts)
    reader = ManifestReader(manifest, SlabSource([slabs[stored.key] for stored in manifest.objects], direct=direct), threads=1)
    targets = []
    for number, region in enumerate(cells(shape, wanted)):
        tensor = torch.zeros(region.sizes, dtype=dtype)
        targets.append(Wanted("m.w", tensor.transpose(0, -1).contiguous().transpose(0, -1) if number % 2 else tensor, region))
    targets.append(Wanted("m.w", torch.zeros(shape, dtype=dtype)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("everystep.trainer.reading._DIRECT_NBYTES", direct_nbytes)
        for several in [targets] if together else [*([one] for one in targets[:3]), targets[3:]]:
            reader.read(several)
    assert all(torch.equal(one.tensor, full if one.region is None else box(full, one.region)) for one in targets)
