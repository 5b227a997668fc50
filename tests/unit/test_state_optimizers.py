"""Optimizers by the names of their parameters: every one of torch's goes on bit by bit after a restore."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from everystep.errors import LayoutError, StateError
from everystep.trainer.state import StateCollector, load_state, restore_into


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


class Small(nn.Module):
    """Two linear layers; their parameters have two dimensions or one."""

    def __init__(self, *, bias=True):
        super().__init__()
        self.a = nn.Linear(4, 6, bias=bias)
        self.b = nn.Linear(6, 3, bias=bias)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Sparse(nn.Module):
    """A table with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.a = nn.Embedding(7, 3, sparse=True)
        self.b = nn.Embedding(5, 3, sparse=True)

    def forward(self, x):
        rows = (x.abs().sum(1) * 10).long()
        return self.a(rows % 7) + self.b(rows % 5)


OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
EXTRA = {"SGD": [{"momentum": 0.9, "nesterov": True}, {}], "Adam": [{"amsgrad": True}], "RMSprop": [{"momentum": 0.5, "centered": True}],
         "LBFGS": [{"line_search_fn": "strong_wolfe", "history_size": 3}], "NAdam": [{"decoupled_weight_decay": True}], "Adagrad": [{"initial_accumulator_value": 0.5}]}  # fmt: skip


def variants():
    for name, cls in OPTIMIZERS.items():
        accepted = inspect.signature(cls).parameters
        ways = [{}]
        if "foreach" in accepted:
            ways = [{"foreach": False}, {"foreach": True}]
        if "fused" in accepted:
            try:
                cls([nn.Parameter(torch.zeros(2))], fused=True)
            except RuntimeError:
                pass
            else:
                ways.append({"fused": True})
        for way in ways:
            for more in [{}, *EXTRA.get(name, [])]:
                yield pytest.param(cls, {**way, **more}, id=f"{name}-{way or 'plain'}-{more}")
        if "maximize" in accepted and name == "Adam":
            yield pytest.param(cls, {"lr": torch.tensor(0.01), "foreach": False, "capturable": False}, id="Adam-tensor-lr")


def model_for(cls):
    torch.manual_seed(3)
    if cls is torch.optim.SparseAdam:
        return Sparse()
    return Small(bias=cls.__name__ != "Muon")


def train(model, optimizer, steps, seed):
    chance = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=chance)
        y = torch.randn(8, 3, generator=chance)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.dim() else tensor.detach().reshape(1).view(torch.uint8)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def state_by_name(model, optimizer):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: entry for parameter, entry in sorted(optimizer.state.items(), key=lambda pair: names[id(pair[0])])}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("cls", "options"), list(variants()))
def test_every_optimizer_goes_on_bit_by_bit(cls, options, steps):
    """F20 F21: saved before the first step and after three, into a fresh model and optimizer in another order: three more steps are bit-equal."""
    model = model_for(cls)
    optimizer = cls(model.parameters(), **copy.deepcopy(options))
    train(model, optimizer, steps, 1)
    keys_before = {name: list(entry) for name, entry in state_by_name(model, optimizer).items()}
    hooks = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("step"))
    optimizer.register_state_dict_pre_hook(lambda *_: hooks.append("state_dict"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: hooks.append("load_state_dict"))
    reader = saved({"optim": optimizer, "model": model})
    assert not hooks
    assert {name: list(entry) for name, entry in state_by_name(model, optimizer).items()} == keys_before

    other = model_for(cls)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(float("nan"))
    fresh = cls(list(other.parameters())[::-1], **copy.deepcopy(options))
    fresh.register_load_state_dict_pre_hook(lambda *_: hooks.append("load_state_dict"))
    restore_into({"model": other, "optim": fresh}, reader)
    assert not hooks
    assert same(state_by_name(model, optimizer), state_by_name(other, fresh))

    train(model, optimizer, 3, 2)
    train(other, fresh, 3, 2)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert same(a, b), name
    assert same(state_by_name(model, optimizer), state_by_name(other, fresh))


def adam(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    train(model, optimizer, 2, 1)
    return optimizer


def test_state_tensors_are_called_after_their_parameters():
    """Names of optimizer tensors are the parameter's full name and the key, never numbers; moments are late, step counters are not."""
    model = Small()
    collected = StateCollector().collect({"model": model, "optim": adam(model)})
    late = {leaf.spec.name: leaf.late for leaf in collected.leaves if leaf.spec.group == "optim"}
    expected = {
        f"optim.state.model.{name}.{key}": key != "step"
        for name, _ in model.named_parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert late == expected


def test_step_scalars_are_eager():
    """F2: `step` and other scalars of an optimizer are copied inside the call."""
    model = Small()
    optimizer = torch.optim.NAdam(model.parameters())
    train(model, optimizer, 1, 1)
    late = {leaf.spec.name.rpartition(".")[2] for leaf in StateCollector().collect({"m": model, "o": optimizer}).leaves if leaf.late}
    assert late == {"weight", "bias", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_frozen_parameters_get_no_entry(optimizer):
    """F21: neither saving nor restoring invents state for parameters that have none."""
    model = Small()
    model.a.requires_grad_(False)
    one = optimizer(model.parameters(), lr=0.1)
    train(model, one, 2, 1)
    reader = saved({"model": model, "optim": one})
    assert not [name for name in reader.tensors if name.startswith("optim.") and ".a." in name]
    other = Small()
    two = optimizer(other.parameters(), lr=0.1)
    restore_into({"model": other, "optim": two}, reader)
    assert {id(parameter) for parameter in two.state} == {
        id(b) for a, b in zip(model.parameters(), other.parameters(), strict=True) if a in one.state
    }
    assert other.a.weight not in two.state


def test_restore_of_an_unstepped_optimizer_clears_a_used_one():
    """F20: going back to step 0 leaves no moments behind."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    reader = saved({"model": model, "optim": optimizer})
    train(model, optimizer, 2, 1)
    restore_into({"model": model, "optim": optimizer}, reader)
    assert not optimizer.state


def test_existing_state_is_filled_in_place():
    """A used optimizer keeps its tensors; their contents are the checkpoint's."""
    model = Small()
    optimizer = adam(model)
    reader = saved({"model": model, "optim": optimizer})
    before = dict(optimizer.state[model.a.weight])
    kept = {key: tensor.clone() for key, tensor in before.items()}
    train(model, optimizer, 2, 5)
    restore_into({"model": model, "optim": optimizer}, reader)
    for key, tensor in optimizer.state[model.a.weight].items():
        assert tensor is before[key]
        assert same(tensor, kept[key])


def test_groups_are_matched_by_names():
    """Groups in another order take the hyperparameters of the saved group with their names; how to compute stays the target's choice."""
    model = Small()
    one = torch.optim.AdamW(
        [{"params": model.a.parameters(), "lr": 0.5}, {"params": model.b.parameters(), "lr": 0.25, "betas": (0.5, 0.75)}], foreach=True
    )
    reader = saved({"model": model, "optim": one})
    other = Small()
    two = torch.optim.AdamW([{"params": other.b.parameters()}, {"params": other.a.parameters()}], foreach=False)
    restore_into({"model": other, "optim": two}, reader)
    assert [(group["lr"], group["betas"], group["foreach"]) for group in two.param_groups] == [
        (0.25, (0.5, 0.75), False),
        (0.5, (0.9, 0.999), False),
    ]


def test_changed_grouping_takes_the_group_with_most_names():
    """One group where there were two takes the hyperparameters of the group it shares most names with; the state goes by parameter."""
    model = Small()
    one = torch.optim.AdamW([{"params": [model.a.weight], "lr": 0.5}, {"params": [model.a.bias, *model.b.parameters()], "lr": 0.25}])
    train(model, one, 1, 1)
    other = Small()
    two = torch.optim.AdamW(other.parameters())
    restore_into({"model": other, "optim": two}, saved({"model": model, "optim": one}))
    assert [group["lr"] for group in two.param_groups] == [0.25]
    assert same(state_by_name(model, one), state_by_name(other, two))


def test_added_parameters_are_missing_when_strict():
    """F9: a parameter that the checkpoint lacks is a LayoutError, with strict=False a report; its group still gets the hyperparameters."""
    small, big = Small(bias=False), Small()
    reader = saved({"model": small, "optim": adam(small, lr=0.5)})
    optimizer = torch.optim.AdamW(big.parameters())
    kept = big.a.bias.detach().clone()
    with pytest.raises(LayoutError, match=r"not in the checkpoint: 'model\.a\.bias', 'model\.b\.bias', 'optim\.state\.model\.a\.bias'"):
        restore_into({"model": big, "optim": optimizer}, reader)
    assert not optimizer.state
    report = restore_into({"model": big, "optim": optimizer}, reader, strict=False)
    assert list(report.missing) == ["model.a.bias", "model.b.bias", "optim.state.model.a.bias", "optim.state.model.b.bias"]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert set(optimizer.state) == {big.a.weight, big.b.weight}
    assert same(big.a.bias, kept)


def test_parameter_without_a_name_is_refused():
    """An optimizer over a parameter that the state does not hold: StateError names group, index and shape and says what to do."""
    model, other = Small(), Small()
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [other.b.bias, other.a.weight]}])
    with pytest.raises(StateError, match=r"'optim': parameter 0 of group 1, of shape \(3,\).*put the module that owns it"):
        StateCollector().collect({"optim": optimizer, "model": model})


def test_names_given_to_the_optimizer_are_the_fallback():
    """Without the module in the state, the names given to the optimizer are used."""
    model = Small()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 1, 1)
    reader = saved({"optim": optimizer})
    assert "optim.state.a.weight.momentum_buffer" in reader.tensors
    other = Small()
    two = torch.optim.SGD(reversed(list(other.named_parameters())), lr=0.1, momentum=0.9)
    restore_into({"optim": two}, reader)
    assert same(state_by_name(model, optimizer), state_by_name(other, two))


def test_tensors_of_the_state_name_parameters_too():
    """A parameter that is a plain entry of the state is named by that, and is late because an optimizer steps it."""
    weight = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    collected = StateCollector().collect({"weights": {"w": weight}, "optim": optimizer})
    assert {leaf.spec.name: leaf.late for leaf in collected.leaves} == {
        "weights.w": True, "optim.state.weights.w.step": False, "optim.state.weights.w.exp_avg": True, "optim.state.weights.w.exp_avg_sq": True}  # fmt: skip


def test_tensor_learning_rates_are_eager_and_restored_in_place():
    """A tensor in a param group is a leaf of its own, copied at once, and filled in place."""
    model = Small()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    collected = StateCollector().collect({"m": model, "o": optimizer})
    assert {leaf.spec.name: leaf.late for leaf in collected.leaves}["o.param_groups.0.lr"] is False
    other = Small()
    rate = torch.tensor(0.125)
    two = torch.optim.Adam(other.parameters(), lr=rate, foreach=False)
    restore_into({"m": other, "o": two}, MemoryReader(collected))
    assert two.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    three = torch.optim.Adam(other.parameters(), lr=0.125)
    restore_into({"m": other, "o": three}, MemoryReader(collected))
    assert three.param_groups[0]["lr"] == 0.5
    assert type(three.param_groups[0]["lr"]) is float


class Unhooked:
    """Looks like an optimizer, but torch's hooks do not run in its step."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 0.5}]
        self.state = {parameter: {"count": 3, "mean": torch.ones(2)} for parameter in self.param_groups[0]["params"]}

    def step(self):
        """Nothing."""

    def state_dict(self):
        """What it would pickle."""
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state_dict):
        """Nothing."""


class Wrapped(torch.optim.Optimizer):
    """Holds a torch optimizer, as accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_unfenced_optimizers_are_told():
    """Optimizers that do not run torch's step hooks are listed by path; wrappers around one that does are not."""
    model = Small()
    collected = StateCollector().collect(
        {"m": model, "a": {"x": Unhooked(model.parameters())}, "b": Wrapped(torch.optim.SGD(model.parameters()))}
    )
    assert list(collected.unfenced) == ["a.x"]
    assert [type(one).__name__ for one in collected.optimizers] == ["Unhooked", "SGD"]


def test_foreign_optimizers_and_wrappers_round_trip():
    """State of an optimizer-like object, numbers and tensors, goes by names; so does that of a wrapped one."""
    model, other = Small(), Small()
    one, two = Unhooked(model.parameters()), Unhooked(list(other.parameters())[::-1])
    one.state[model.a.bias]["count"] = 7
    inner = adam(model)
    for entry in two.state.values():
        entry.update(count=0, mean=torch.zeros(2))
    fresh = torch.optim.AdamW(other.parameters())
    restore_into({"m": other, "o": two, "w": Wrapped(fresh)}, saved({"m": model, "o": one, "w": Wrapped(inner)}))
    assert same(state_by_name(model, one), state_by_name(other, two))
    assert same(state_by_name(model, inner), state_by_name(other, fresh))


def test_state_under_other_keys_and_extra_state_are_kept():
    """State kept under something that is no parameter, and what a subclass adds in its own state_dict, round-trip."""

    class Odd(torch.optim.SGD):
        """Keeps a counter outside of `state`."""

        counter = 0

        def state_dict(self):
            return {**super().state_dict(), "counter": self.counter}

        def load_state_dict(self, state_dict):
            self.counter = state_dict["counter"]
            super().load_state_dict({key: value for key, value in state_dict.items() if key != "counter"})

    model, other = Small(), Small()
    one, two = Odd(model.parameters(), momentum=0.9), Odd(other.parameters(), momentum=0.9)
    train(model, one, 1, 1)
    one.counter = 5
    one.state["shared"] = {"t": torch.arange(4), "n": 3}
    reader = saved({"m": model, "o": one})
    assert "o.state.shared.t" in reader.tensors
    restore_into({"m": other, "o": two}, reader)
    assert two.counter == 5
    assert same(two.state.pop("shared"), {"t": torch.arange(4), "n": 3})
    one.state.pop("shared")
    assert same(state_by_name(model, one), state_by_name(other, two))


def test_lbfgs_over_other_parameters_is_refused():
    """LBFGS state covers all parameters at once: with a parameter more or less it does not fit."""
    model = Small()
    optimizer = torch.optim.LBFGS(model.parameters())
    train(model, optimizer, 1, 1)
    reader = saved({"m": model, "o": optimizer})
    with pytest.raises(LayoutError, match="LBFGS over other parameters"):
        restore_into({"m": model, "o": torch.optim.LBFGS(list(model.parameters())[:-1])}, reader, strict=False)


def test_tied_parameters_in_another_order_find_their_state():
    """F25: a tied parameter has several names; its optimizer state is found by any of them."""

    class Tied(nn.Module):
        def __init__(self, *names):
            super().__init__()
            weight = nn.Parameter(torch.randn(4))
            for name in names:
                self.register_parameter(name, weight)

    def one_step(model):
        optimizer = torch.optim.Adam(model.parameters())
        model.x.grad = torch.ones(4)
        optimizer.step()
        return optimizer

    model, other = Tied("x", "y"), Tied("y", "x")
    optimizer = one_step(model)
    fresh = torch.optim.Adam(other.parameters())
    restore_into({"m": other, "o": fresh}, saved({"m": model, "o": optimizer}))
    assert same(optimizer.state[model.x], fresh.state[other.x])


def test_fresh_state_has_the_parameters_layout():
    """Moments of a channels-last parameter are created channels-last, as torch would have."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    other = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    fresh = torch.optim.Adam(other.parameters())
    restore_into({"m": other, "o": fresh}, saved({"m": model, "o": optimizer}))
    assert fresh.state[other.weight]["exp_avg"].stride() == other.weight.stride() == optimizer.state[model.weight]["exp_avg"].stride()
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*epoch parameter.*")
def test_schedulers_go_on_with_the_optimizer(kind):
    """A scheduler and its optimizer restored into fresh ones give the same learning rates from then on."""
    make = SCHEDULERS[kind]

    def rates(optimizer, scheduler, steps):
        found = []
        for step in range(steps):
            optimizer.step()
            scheduler.step(*([1.0 + step] if kind == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, other = Small(), Small()
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    first = make(one)
    rates(one, first, 3)
    reader = saved({"model": model, "sched": first, "optim": one})
    two = torch.optim.SGD(other.parameters(), lr=0.1)
    second = make(two)
    restore_into({"model": other, "sched": second, "optim": two}, reader)
    assert two.param_groups[0]["lr"] == one.param_groups[0]["lr"]
    assert rates(two, second, 5) == rates(one, first, 5)


def test_a_stateful_object_cannot_disturb_learning_rates():
    """What a scheduler's load_state_dict does to the optimizer's groups is put back to the saved values."""

    class Meddler:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def state_dict(self):
            return {"x": 1}

        def load_state_dict(self, state_dict):
            self.optimizer.param_groups[0]["lr"] = 99.0

    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    state = {"m": model, "sched": Meddler(optimizer), "o": optimizer}
    reader = saved(state)
    optimizer.param_groups[0]["lr"] = 0.5
    restore_into(state, reader)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_load_gives_optimizer_state_by_names():
    """`load_state` gives an optimizer as state and param_groups with names, without a model."""
    model = Small()
    optimizer = adam(model, lr=0.5)
    loaded = load_state(saved({"model": model, "optim": optimizer}))
    assert same(loaded["optim"]["state"], {f"model.{name}": optimizer.state[parameter] for name, parameter in model.named_parameters()})
    (group,) = loaded["optim"]["param_groups"]
    assert group["params"] == [f"model.{name}" for name, _ in model.named_parameters()]
    assert (group["lr"], group["betas"]) == (0.5, (0.9, 0.999))


@pytest.mark.parametrize(
    ("pattern", "restored"), [("optim.state.model.a.*", {"a.weight", "a.bias"}), ("optim.*", {"a.weight", "a.bias", "b.weight", "b.bias"})]
)
def test_include_chooses_parameters_of_an_optimizer(pattern, restored):
    """Patterns choose which parameters' states are restored; the rest of the state is not touched."""
    model, other = Small(), Small()
    reader = saved({"model": model, "optim": adam(model, lr=0.5)})
    before = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
    fresh = torch.optim.AdamW(other.parameters(), lr=0.125)
    restore_into({"model": other, "optim": fresh}, reader, include=[pattern])
    assert set(state_by_name(other, fresh)) == restored
    assert same(before, {name: parameter.detach() for name, parameter in other.named_parameters()})
    assert fresh.param_groups[0]["lr"] == (0.5 if pattern == "optim.*" else 0.125)


def test_cast_restores_moments_in_the_models_dtype():
    """F8: with cast=True a checkpoint in float32 restores into a bfloat16 model and its fresh optimizer."""
    model = Small()
    reader = saved({"model": model, "optim": adam(model)})
    other = Small().to(torch.bfloat16)
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(LayoutError, match=r"'model\.a\.weight' is F32 in the checkpoint, BF16 in the state"):
        restore_into({"model": other, "optim": fresh}, reader)
    restore_into({"model": other, "optim": fresh}, reader, cast=True)
    assert torch.equal(other.a.weight, model.a.weight.to(torch.bfloat16))
    assert fresh.state[other.a.weight]["exp_avg"].dtype is torch.bfloat16
    assert fresh.state[other.a.weight]["step"].dtype is torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_on_cuda_the_step_is_where_torch_wants_it(options):
    """`step` stays on the CPU unless the target's kernels read it on the device; moments are on the parameter's device."""
    model, other = Small().cuda(), Small().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fresh = torch.optim.AdamW(other.parameters(), **options)
    restore_into({"m": other, "o": fresh}, saved({"m": model, "o": optimizer}))
    entry = fresh.state[other.a.weight]
    assert entry["step"].device.type == ("cuda" if options else "cpu")
    assert entry["exp_avg"].device.type == "cuda"
    for one in (model, other):
        for parameter in one.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fresh.step()
    torch.testing.assert_close(other.a.weight, model.a.weight)
