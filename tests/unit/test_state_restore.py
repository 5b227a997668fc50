"""Filling a state from a checkpoint, and loading one without a model."""

from __future__ import annotations

import collections
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from everystep.errors import CorruptionError, LayoutError, StateError
from everystep.trainer.state import RNG, WORDS, StateCollector, load_state, restore_into


class MemoryReader:
    """A checkpoint in memory, made from collected leaves: copies, by name."""

    def __init__(self, collected, step=1):
        self.step = step
        self.beyond = self.by_rank = False
        self.values = collected.values
        self.data = {leaf.spec.name: leaf.tensor.detach().clone() for leaf in collected.leaves}
        specs = {leaf.spec.name: leaf.spec for leaf in collected.leaves}
        self.tensors = {**specs, **{alias: specs[name] for alias, name in collected.aliases.items()}}
        self.reads = []

    def read(self, wanted):
        for name, tensor, region in wanted:
            stored = self.data[self.tensors[name].name]
            assert region is None
            assert (tensor.shape, tensor.dtype) == (stored.shape, stored.dtype)
            assert not tensor.requires_grad
            tensor.copy_(stored)
            self.reads.append(name)


def saved(state):
    return MemoryReader(StateCollector().collect(state))


def round_trip(value):
    return load_state(saved({"x": value}))["x"]


def bits(tensor):
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)


def test_every_byte_comes_from_the_checkpoint():
    """F11: buffers and parameters filled with NaN before the restore hold none after it, and are the objects they were."""
    net, other = Net(), Net()
    net.norm.running_mean.normal_()
    reader = saved({"model": net})
    objects = dict(other.state_dict(keep_vars=True))
    with torch.no_grad():
        for tensor in objects.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 99)
    versions = {name: tensor._version for name, tensor in objects.items()}
    report = restore_into({"model": other}, reader)
    for name, tensor in other.state_dict(keep_vars=True).items():
        assert tensor is objects[name]
        assert tensor._version > versions[name]
        assert torch.equal(tensor, net.state_dict()[name]), name
    assert other.line.weight.requires_grad
    assert set(report.restored) == set(reader.tensors)


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 2), (2, 3)], ids=str)
def test_every_dtype_round_trips(dtype, shape):
    """F22: each dtype, empty and 0-dim tensors too, comes back bit by bit, in place and fresh."""
    count = torch.Size(shape).numel()
    raw = torch.arange(1, count * dtype.itemsize + 1, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    reader = saved({"t": tensor})
    target = torch.zeros(shape, dtype=dtype)
    restore_into({"t": target}, reader)
    assert bits(target) == bits(tensor)
    loaded = load_state(reader)["t"]
    assert (loaded.dtype, loaded.shape, bits(loaded)) == (dtype, torch.Size(shape), bits(tensor))


ARRAYS = [np.arange(6, dtype=kind).reshape(2, 3) for kind in ("b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "F")]
ARRAYS += [np.array([True, False]), np.array(3.5), np.zeros((0, 2)), np.arange(6).reshape(2, 3).T, np.arange(6)[::-1], np.arange(8)[::2]]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}-{array.strides}")
def test_arrays_come_back_as_arrays(array):
    """F23: numpy arrays of every dtype safetensors can hold, in any layout, write-protected too."""
    array.flags.writeable = False
    back = round_trip({"deep": [array]})["deep"][0]
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)


VALUES = [
    None, True, 0, -(2**70), 1.5, float("inf"), -0.0, "text", b"bytes", 1 + 2j, (1, (2,)), {1, 2}, frozenset({3}), [[], {}, ()],
    torch.float8_e5m2, torch.device("cuda:3"), torch.Size([2, 3]), torch.channels_last, torch.strided, np.dtype("f4"), np.float32(2.5), np.int64(7),
    collections.Counter("abca"), collections.OrderedDict(b=1, a=2), {1: "int key", (2, 3): "tuple key", "a.b": "dotted"},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value):
    """F23: typed round trip of plain values, in a mapping of the user and without one."""
    back = round_trip(value)
    assert type(back) is type(value)
    assert back == value
    state = {"x": "something else"}
    restore_into(state, saved({"x": value}))
    assert type(state["x"]) is type(value)
    assert state["x"] == value


def test_plain_data_is_replaced_in_its_mapping():
    """Values and arrays take the saved ones' places; containers stay the objects they are; arrays of the same shape are filled."""
    array, inner, items = np.zeros(3), {"old": 1, "n": {"k": 0}}, [9]
    state = {"epoch": 0, "note": inner, "list": items, "array": array, "best": None, "grown": np.zeros(2), "none": {}}
    restore_into(state, saved({"epoch": 3, "note": {"new": (1, 2), "n": {"k": 5}}, "list": [1, [2]], "array": np.arange(3.0), "best": torch.ones(2),
                               "grown": np.arange(5), "none": {"t": torch.zeros(1)}}))  # fmt: skip
    assert state["epoch"] == 3
    assert state["note"] is inner
    assert inner == {"new": (1, 2), "n": {"k": 5}}
    assert state["list"] is items
    assert items == [1, [2]]
    assert state["array"] is array
    assert array.tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(state["best"], torch.ones(2))
    assert state["grown"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(state["none"]["t"], torch.zeros(1))


def test_tensors_in_plain_data_are_filled_in_place():
    """Tensors keep their identity wherever they are; plain values beside them are replaced, in a tuple by a new tuple."""
    a, b, c = torch.zeros(2), torch.zeros(3), torch.zeros(4)
    state = {"d": {"a": a, "n": 1}, "t": (b, 5), "l": [{"c": c}, 1]}
    restore_into(state, saved({"d": {"a": torch.ones(2), "n": 2}, "t": (torch.ones(3), 6), "l": [{"c": torch.ones(4)}, 2]}))
    assert state["d"]["a"] is a
    assert state["t"][0] is b
    assert state["l"][0]["c"] is c
    assert (a.sum(), b.sum(), c.sum()) == (2, 3, 4)
    assert (state["d"]["n"], state["t"][1], state["l"][1]) == (2, 6, 2)


def test_a_state_that_cannot_be_written_is_told_before():
    """Values that would have to be replaced in something immutable: LayoutError, unless they are equal."""
    net = nn.Linear(1, 1)
    reader = saved({"m": net, "epoch": 3})
    with pytest.raises(LayoutError, match="'epoch' is a plain value in a mappingproxy"):
        restore_into(types.MappingProxyType({"m": net, "epoch": 0}), reader)
    restore_into(types.MappingProxyType({"m": net, "epoch": 3}), reader)


# -- what does not fit ---------------------------------------------------------------------------------------------------


def untouched(state, reader, match, **options):
    """The restore raises, and nothing has changed or been read."""
    before = StateCollector().collect(state)
    kept = [bits(leaf.tensor) for leaf in before.leaves]
    with pytest.raises(LayoutError, match=match):
        restore_into(state, reader, **options)
    assert not reader.reads
    after = StateCollector().collect(state)
    assert [bits(leaf.tensor) for leaf in after.leaves] == kept
    assert after.values == before.values


def test_names_that_one_side_lacks():
    """F9: strict lists both sides; strict=False reports them and restores the rest."""
    one, two = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    reader = saved({"m": one, "gone": 1})
    state = {"m": two, "new": 0, "new_tensor": torch.zeros(1)}
    untouched(
        state,
        reader,
        r"not in the checkpoint: 'm\.c\.weight', 'm\.c\.bias', 'new', 'new_tensor'; not in the state: 'gone', 'm\.a\.weight', 'm\.a\.bias'",
    )
    report = restore_into(state, reader, strict=False)
    assert list(report.missing) == ["m.c.weight", "m.c.bias", "new", "new_tensor"]
    assert list(report.unexpected) == ["gone", "m.a.weight", "m.a.bias"]
    assert torch.equal(two["b"].weight, one["b"].weight)
    assert state["new"] == 0


def test_long_lists_are_cut():
    """At most ten names of each side are shown, and how many there are."""
    reader = saved({"m": nn.Sequential(*[nn.Linear(1, 1) for _ in range(9)])})
    untouched({"m": nn.Linear(1, 1)}, reader, r"and 8 more \(18 in all\)")


def test_shapes_that_differ():
    """F17: shapes are checked for all tensors before any is filled; cast and strict do not change that."""
    reader = saved({"m": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))})
    for options in ({}, {"cast": True}, {"strict": False}):
        untouched(
            {"m": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4))},
            reader,
            r"'m\.1\.weight' has shape \[3, 2\] in the checkpoint, \[4, 2\]",
            **options,
        )


def test_dtypes_that_differ():
    """F8: float32 300.25 into int8 is an error unless a cast was asked for."""
    reader = saved({"t": torch.tensor([300.25, 7.75])})
    target = torch.zeros(2, dtype=torch.int8)
    untouched({"t": target}, reader, r"'t' is F32 in the checkpoint, I8 in the state")
    wide = torch.zeros(2, dtype=torch.float64)
    restore_into({"t": wide}, reader, cast=True)
    assert wide.tolist() == [300.25, 7.75]
    restore_into({"t": target}, reader, cast=True)
    assert target[1] == 7


def test_meta_targets_are_refused():
    """F17: a target on the meta device says to call to_empty first."""
    reader = saved({"m": nn.Linear(2, 2)})
    with pytest.raises(LayoutError, match="to_empty"), torch.device("meta"):
        restore_into({"m": nn.Linear(2, 2)}, reader)


def test_expanded_and_sparse_targets_are_refused():
    """F17: targets that cannot be filled in place are refused by name."""
    untouched({"t": torch.zeros(1).expand(3)}, saved({"t": torch.ones(3)}), "'t' is an expanded tensor")
    with pytest.raises(LayoutError, match="'t' is sparse"):
        restore_into({"t": torch.eye(3).to_sparse()}, saved({"t": torch.eye(3)}))


def test_kinds_that_differ():
    """What was a module, an optimizer, an object or data cannot be restored into something else."""
    net = nn.Linear(2, 2)
    reader = saved({"x": net})
    for other, what in (
        (torch.ones(1), "plain data"),
        (RNG(), "an object with a state_dict"),
        (torch.optim.SGD(net.parameters()), "an optimizer"),
    ):
        with pytest.raises(LayoutError, match=f"'x' is a module in the checkpoint, {what} in the state"):
            restore_into({"m": net, "x": other}, reader, strict=False)
    with pytest.raises(LayoutError, match="'x' is a float in the checkpoint, a tensor in the state"):
        restore_into({"x": torch.ones(1)}, saved({"x": 1.0}))


def test_values_that_are_none_of_a_state():
    """Bytes that are not a state's document: CorruptionError."""
    reader = saved({"x": 1})
    for values in (b"", b"[]", b'{"state":3}', b'{"state":{"odd":[]}}'):
        reader.values = values
        with pytest.raises(CorruptionError):
            restore_into({"x": 1}, reader)
        with pytest.raises(CorruptionError):
            load_state(reader)


# -- include -------------------------------------------------------------------------------------------------------------


def test_include_restores_only_what_matches():
    """Patterns over full names and paths: the rest of the state is not touched, even where it would not fit."""
    one, two = Net(), Net()
    reader = saved({"model": one, "ema": Net(), "rng": RNG(), "note": {"a": 1, "b": 2}, "t": torch.ones(3)})
    kept = two.norm.weight.detach().clone().fill_(7)
    with torch.no_grad():
        two.norm.weight.copy_(kept)
    state = {"model": two, "note": {"a": 0, "b": 0}, "t": torch.zeros(5), "other": 1}
    report = restore_into(state, reader, include=["model.line.*", "note.a"])
    assert torch.equal(two.line.weight, one.line.weight)
    assert torch.equal(two.norm.weight, kept)
    assert state["note"] == {"a": 1, "b": 0}
    assert set(reader.reads) == {"model.line.weight", "model.line.bias"}
    assert set(report.restored) == {"model.line.weight", "model.line.bias", "note.a"}
    assert not report.missing
    assert "model.norm.weight" in report.unexpected


def test_include_that_matches_nothing_is_an_error():
    """A pattern with a typing error does not silently restore nothing."""
    net = nn.Linear(2, 2)
    untouched({"model": net}, saved({"model": net}), "include pattern 'modle", include=["modle.*"])


def test_include_is_strict_about_what_matches():
    """Names that match and that one side lacks are an error still."""
    reader = saved({"m": nn.Linear(2, 2, bias=False), "x": 1})
    untouched({"m": nn.Linear(2, 2)}, reader, r"not in the checkpoint: 'm\.bias'$|not in the checkpoint: 'm\.bias' ", include=["m.*"])


@pytest.mark.parametrize(("include", "expected"), [
    (["model.line.*"], {"model": {"line.weight", "line.bias"}}), (["note.a", "deep*"], {"note": {"a"}, "deep": {"x"}}),
    (["rng"], {"rng": {"python", "numpy", "torch", "cuda"}}), (["*weight"], {"model": {"line.weight", "norm.weight"}, "optim": {"state", "param_groups"}}),
])  # fmt: skip
def test_load_with_include(include, expected):
    """`load_state` leaves out what is not asked for."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loaded = load_state(
        saved({"model": net, "note": {"a": 1, "b": 2}, "deep": {"x": [torch.ones(1)]}, "rng": RNG(), "optim": optimizer}), include=include
    )
    if "optim" in expected and "optim" not in loaded:
        expected = {key: value for key, value in expected.items() if key != "optim"}
    assert {key: set(value) for key, value in loaded.items()} == expected


# -- modules -------------------------------------------------------------------------------------------------------------


class WithExtra(nn.Module):
    """Keeps something beside its tensors."""

    def __init__(self, extra):
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [{"scale": 1.5, "n": (1, 2)}, "text", [torch.arange(3), {"t": torch.ones(1)}]])
def test_extra_state_of_any_kind_round_trips(extra):
    """Plain extra states, with tensors in them too, go through set_extra_state."""
    other = WithExtra(None)
    reader = saved({"m": nn.Sequential(WithExtra(extra))})
    restore_into({"m": nn.Sequential(other)}, reader)
    assert repr(other.extra) == repr(extra)
    assert repr(load_state(reader)["m"]["0._extra_state"]) == repr(extra)


def test_extra_state_of_another_size():
    """F19: a uint8 extra state whose size differs is a LayoutError by default, and replaced when asked."""
    saved_extra = torch.arange(5, dtype=torch.uint8)
    reader = saved({"m": WithExtra(saved_extra)})
    (leaf,) = [leaf for leaf in StateCollector().collect({"m": WithExtra(saved_extra)}).leaves if "extra" in leaf.spec.name]
    assert not leaf.late
    other = WithExtra(torch.zeros(3, dtype=torch.uint8))
    untouched({"m": other}, reader, r"extra state 'm\._extra_state' is U8 \[5\] in the checkpoint, U8 \[3\]")
    for options in ({"cast": True}, {"strict": False}):
        other = WithExtra(torch.zeros(3, dtype=torch.uint8))
        restore_into({"m": other}, reader, **options)
        assert torch.equal(other.extra, saved_extra)


class Renaming(nn.Module):
    """Makes a state dict of its own: another name, a transposed tensor, a plain entry."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 3))
        self.b = nn.Parameter(torch.randn(3))
        self.n = 0

    def state_dict(self, *args, prefix="", keep_vars=False, **kwargs):
        del args, kwargs
        return {f"{prefix}weight": self.w, f"{prefix}turned": torch.stack([self.b, self.b * 2]), f"{prefix}n": self.n}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        self.w.copy_(state_dict["weight"])
        self.b.copy_(state_dict["turned"][0])
        self.n = state_dict["n"]


def test_modules_with_their_own_state_dict():
    """An overridden state_dict names the tensors, and load_state_dict takes them; its parameters are late and name optimizer state."""
    one, two = Renaming(), Renaming()
    one.n = 4
    optimizer = torch.optim.Adam(one.parameters())
    for parameter in one.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    collected = StateCollector().collect({"m": one, "o": optimizer})
    late = {leaf.spec.name: leaf.late for leaf in collected.leaves if "exp" not in leaf.spec.name and "step" not in leaf.spec.name}
    assert late == {"m.weight": True, "m.turned": False}
    assert "o.state.m.weight.exp_avg" in {leaf.spec.name for leaf in collected.leaves}
    fresh = torch.optim.Adam(two.parameters())
    restore_into({"m": two, "o": fresh}, MemoryReader(collected))
    assert torch.equal(one.w, two.w)
    assert torch.equal(one.b, two.b)
    assert two.n == 4
    assert torch.equal(fresh.state[two.b]["exp_avg"], optimizer.state[one.b]["exp_avg"])


@pytest.mark.parametrize("how", ["hook", "parametrized", "spectral"])
def test_hooked_modules_round_trip(how):
    """State dict hooks, parametrizations and old spectral norm: names are those of state_dict, values come back."""

    def make():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), nn.DataParallel(nn.Linear(3, 3)))
        if how == "hook":
            net.register_state_dict_post_hook(
                lambda module, state, prefix, meta: state.update({f"{prefix}first": state.pop(f"{prefix}0.weight")})
            )
            net._register_load_state_dict_pre_hook(
                lambda state, prefix, *rest: state.update({f"{prefix}0.weight": state.pop(f"{prefix}first")})
            )
        elif how == "parametrized":
            nn.utils.parametrizations.orthogonal(net[0])
        else:
            nn.utils.spectral_norm(net[0])
        return net

    one, two = make(), make()
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_()
    reader = saved({"m": one})
    assert set(reader.tensors) == {f"m.{name.replace('.module', '')}" for name in one.state_dict()}
    restore_into({"m": two}, reader)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name


def test_a_module_that_refuses_its_state_is_named():
    """What load_state_dict raises comes as a LayoutError with the module's path."""

    class Refusing(Renaming):
        def load_state_dict(self, state_dict, strict=True, assign=False):
            raise RuntimeError("not this")

    with pytest.raises(LayoutError, match="'m' refused its state: not this"):
        restore_into({"m": Refusing()}, saved({"m": Renaming()}))


def test_tied_parameters_are_restored_tied():
    """F25: stored once, both names restored, still one tensor; loading gives one tensor under both names."""

    def tied(order):
        net = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in order})
        net[order[1]].weight = net[order[0]].weight
        return net

    one, two = tied("ab"), tied("ba")
    reader = saved({"m": one})
    assert len(reader.data) == 1
    restore_into({"m": two}, reader)
    assert two["a"].weight is two["b"].weight
    assert torch.equal(two["a"].weight, one["a"].weight)
    loaded = load_state(reader)["m"]
    assert loaded["a.weight"] is loaded["b.weight"]
    apart = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
    restore_into({"m": apart}, reader)
    assert torch.equal(apart["a"].weight, apart["b"].weight)
    for name, linear in apart.items():
        nn.init.constant_(linear.weight, ord(name))
    untouched({"m": tied("ab")}, saved({"m": apart}), "one tensor with another in the state, but the checkpoint has two")


# -- objects -------------------------------------------------------------------------------------------------------------


class Recorder:
    """A stateful object that notes when it is loaded."""

    def __init__(self, state, log, name):
        self.state, self.log, self.name = state, log, name

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.log.append(self.name)
        self.state = state_dict
        torch.rand(1)
        random.random()
        np.random.rand()


def test_objects_get_back_the_tree_they_gave():
    """Trees of values and tensors come back through load_state_dict, with fresh tensors; random number generators last."""
    tree = {
        "n": [1, (2.5, None)],
        "t": torch.arange(4.0, requires_grad=True) * 2,
        "deep": {3: torch.ones(1, dtype=torch.bfloat16)},
        "a": np.arange(3),
    }
    log = []
    state = {"rng": RNG(), "first": Recorder(tree, log, "first"), "in": [{"second": Recorder({}, log, "second")}]}
    reader = saved(state)
    drawn = (torch.rand(2).tolist(), random.random(), np.random.rand())
    restore_into(state, reader)
    assert log == ["first", "second"]
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == drawn
    back = state["first"].state
    assert back is not tree
    assert repr(back["n"]) == repr(tree["n"])
    assert torch.equal(back["t"], tree["t"])
    assert not back["t"].requires_grad
    assert torch.equal(back["deep"][3], tree["deep"][3])
    assert np.array_equal(back["a"], tree["a"])


def generators():
    return {"torch": torch.Generator().manual_seed(5), "numpy": np.random.default_rng(5), "mt": np.random.Generator(np.random.MT19937(5)),
            "philox": np.random.Generator(np.random.Philox(5)), "legacy": np.random.RandomState(5), "python": random.Random(5)}  # fmt: skip


DRAW = {
    "torch": lambda g: torch.rand(3, generator=g).tolist(),
    "python": lambda g: [g.random(), g.gauss(0, 1)],
    "legacy": lambda g: g.standard_normal(3).tolist(),
}


@pytest.mark.parametrize("kind", generators())
def test_generators_in_the_state_go_on(kind):
    """Generators of torch, numpy and Python are stored as tensors and values and restored in place."""
    draw = DRAW.get(kind, lambda g: g.standard_normal(3).tolist())
    one, two = generators()[kind], generators()[kind]
    draw(one)
    reader = saved({"g": {"x": one}})
    restore_into({"g": {"x": two}}, reader)
    assert draw(two) == draw(one)


@pytest.mark.parametrize("gauss", [False, True])
def test_global_generators_go_on(gauss):
    """F23: Python's, numpy's and torch's global generators, with a pending gaussian too, continue where they were."""
    if gauss:
        random.gauss(0, 1)
        np.random.randn()
    reader = saved({"rng": RNG()})
    drawn = [random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()]
    restore_into({"rng": RNG()}, reader)
    assert [random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()] == drawn


def test_more_saved_devices_than_there_are():
    """States of CUDA devices that this machine lacks are ignored."""
    state = RNG().state_dict()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 99
    if not torch.cuda.is_available():
        RNG().load_state_dict(state)


def test_grad_scaler_round_trips():
    """A GradScaler gives its state and takes it back."""
    one, two = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu")
    restore_into({"s": two}, saved({"s": one}))
    assert two.state_dict() == one.state_dict()
    assert two.get_scale() == 1024.0


def test_objects_in_lists_and_tuples():
    """Modules in lists and tuples are named by their index."""
    state = {"nets": [nn.Linear(1, 2), (nn.Linear(2, 1), 5)]}
    reader = saved(state)
    assert set(reader.tensors) == {"nets.0.weight", "nets.0.bias", "nets.1.0.weight", "nets.1.0.bias"}
    other = {"nets": [nn.Linear(1, 2), (nn.Linear(2, 1), 5)]}
    restore_into(other, reader)
    assert torch.equal(other["nets"][1][0].weight, state["nets"][1][0].weight)
    loaded = load_state(reader)
    assert set(loaded["nets"][0]) == {"weight", "bias"}
    assert loaded["nets"][1][1] == 5


def test_load_gives_the_state_without_a_model():
    """Modules as flat mappings, values as they were, tensors fresh."""
    net = Net()
    loaded = load_state(saved({"model": net, "epoch": 3, "cfg": {"lr": 0.5, "sizes": (1, 2)}, "empty": {}, "act": nn.Tanh()}))
    assert list(loaded) == ["model", "epoch", "cfg", "empty", "act"]
    assert loaded["model"].keys() == net.state_dict().keys()
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in net.state_dict().items())
    assert (loaded["epoch"], loaded["cfg"], loaded["empty"], loaded["act"]) == (3, {"lr": 0.5, "sizes": (1, 2)}, {}, {})


def test_an_object_without_load_state_dict_is_refused():
    """What could not take its state back is not saved."""

    class Half:
        def state_dict(self):
            return {}

    with pytest.raises(StateError, match=r"x is a .*Half"):
        saved({"x": Half()})
