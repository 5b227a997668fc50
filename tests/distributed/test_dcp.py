"""DCP beside everystep on real ranks: what DCP saved is restored in any other layout, and torch's own calls save and load through ``Writer`` and ``Reader``.

The functions above the tests run in the ranks. Contents follow from a tensor's name alone, so that no layout and no arithmetic has an influence on them, and are
compared as whole tensors that torch gathers.
"""

from __future__ import annotations

import json
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest

KINDS = ("fsdp", "tp", "hsdp", "replicated")


# -- in the ranks -----------------------------------------------------------------------------------------------------------------
def start(kind: str, *, steps: int = 1) -> tuple[Any, Any]:
    """Join the job, once; a model of one kind of parallelism and its AdamW, which has taken ``steps`` steps. One rank alone is no job."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    model.register_buffer("seen", torch.zeros(2))
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards")))
    elif kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for _ in range(steps):
        for parameter in model.parameters():  # no forward: torch has none for uneven shards of tensor parallelism
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def named(model: Any, optimizer: Any) -> dict[str, Any]:
    """All tensors of model and optimizer by name."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found.update((f"optim.state.{name}.{key}", value) for key, value in optimizer.state.get(parameter, {}).items())
    return found


def contents(name: str, tensor: Any) -> Any:
    """What a tensor of that name holds after ``fill``."""
    import torch

    first = zlib.crc32(name.encode()) % 1000
    return (torch.arange(tensor.numel(), dtype=torch.float64) + first).view(tensor.shape).to(tensor.dtype)


def fill(model: Any, optimizer: Any) -> None:
    """Give every tensor contents of its own, and the optimizer's group a learning rate of its own."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, tensor in named(model, optimizer).items():
            full = contents(name, tensor)
            tensor.copy_(distribute_tensor(full, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else full)
    optimizer.param_groups[0]["lr"] = 0.125


def wrong(model: Any, optimizer: Any) -> list[str]:
    """Names of the tensors that do not hold what ``fill`` gave them (all ranks together)."""
    import torch
    from torch.distributed.tensor import DTensor

    tensors = named(model, optimizer)
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    bad = [name for name, tensor in full.items() if not torch.equal(tensor, contents(name, tensor))]
    if len(full) != 5 + 4 * 3:
        bad.append(f"{sorted(full)}")
    return bad + ([] if optimizer.param_groups[0]["lr"] == 0.125 else ["lr"])


def states(model: Any, optimizer: Any, *, flat: bool = False) -> dict[str, Any]:
    """As torch has them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model_state, optim_state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": model_state, "optim": optim_state}


def dcp_saves(voice: Any, folder: str, kind: str) -> None:
    """DCP itself saves: in its own format (flattened and not), and the model as Hugging Face shards."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = start(kind)
    fill(model, optimizer)
    for flat in (False, True):
        dcp.save(states(model, optimizer, flat=flat), checkpoint_id=f"{folder}/flat-{int(flat)}")
    dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True))
    voice.tell("saved")


def restores(voice: Any, folder: str, kind: str) -> None:
    """What DCP saved into this layout: into an optimizer that has state, and into one that has none."""
    from everystep.integrations.dcp import restore

    for name, steps in (("flat-0", 1), ("flat-1", 0)):
        model, optimizer = start(kind, steps=steps)
        restore({"model": model, "optim": optimizer}, f"{folder}/{name}")
        voice.tell("restored", of=name, wrong=wrong(model, optimizer))
    model, optimizer = start(kind)
    restore({"model": model}, f"{folder}/hf")
    voice.tell("restored", of="hf", wrong=[name for name in wrong(model, optimizer) if name.startswith("model.")])


def loses(voice: Any, folder: str, kind: str) -> None:
    """A restore that cannot be: tells the error of this rank, and whether the model is as it was."""
    import torch

    from everystep.errors import CorruptionError
    from everystep.integrations.dcp import restore

    model, _ = start(kind)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    try:
        restore({"model": model}, f"{folder}/flat-0", include=["model.*"])
        voice.tell("restored", message="")
    except CorruptionError as error:
        same = all(torch.equal(one, parameter.to_local()) for one, parameter in zip(before, model.parameters(), strict=True))
        voice.tell("restored", message=error.message, same=same)


def writes(voice: Any, run: str, kind: str, flat: bool) -> None:
    """Torch's save and async_save through Writer, three steps."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from everystep.integrations.dcp import Writer

    model, optimizer = start(kind)
    fill(model, optimizer)
    more = {"plain": torch.arange(6.0).view(2, 3), "epoch": 4, "mixed": (torch.ones(2), "x"), "mine": {"rank": dist.get_rank()}}
    writer = Writer(run)
    dcp.save({**states(model, optimizer, flat=flat), "more": more}, checkpoint_id="step-1", storage_writer=writer)
    with torch.no_grad():
        model.seen.fill_(-1)
    dcp.save({**states(model, optimizer, flat=flat), "more": more}, checkpoint_id="step-2", storage_writer=writer)
    fill(model, optimizer)
    future = dcp.async_save({**states(model, optimizer, flat=flat), "more": more}, checkpoint_id="step-3", storage_writer=writer)
    with torch.no_grad():
        model.seen.fill_(-2)
    future.result(timeout=60)
    writer.close()
    voice.tell("saved")


def reads(voice: Any, run: str, kind: str, flat: bool, steps: list[int]) -> None:
    """Torch's load through Reader into this layout."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    from everystep.integrations.dcp import Reader

    model, optimizer = start(kind)
    for step in steps:
        state = states(model, optimizer, flat=flat)
        more = {"plain": torch.zeros(2, 3), "epoch": 0, "mixed": (torch.zeros(2), ""), "mine": {"rank": -1}}
        reader = Reader(run)
        dcp.load({**state, "more": more}, checkpoint_id=f"step-{step}", storage_reader=reader)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(flatten_optimizer_state_dict=flat),
        )
        bad = wrong(model, optimizer)
        good = (
            torch.equal(more["plain"], torch.arange(6.0).view(2, 3)) and more["epoch"] == 4 and torch.equal(more["mixed"][0], torch.ones(2))
        )
        voice.tell("loaded", step=reader.loaded_step, wrong=bad, more=good, rank=more["mine"]["rank"])
    reader.close()


def own(voice: Any, run: str, kind: str, load: bool) -> None:
    """``Checkpointer.save`` of modules and optimizers, or torch's load of it through Reader."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    import everystep
    from everystep.integrations.dcp import Reader

    model, optimizer = start(kind)
    if not load:
        fill(model, optimizer)
        with everystep.Checkpointer(run) as checkpointer:
            checkpointer.save(1, {"model": model, "optim": optimizer}, sync=True)
        voice.tell("saved")
        return
    state = states(model, optimizer)
    reader = Reader(run)
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    voice.tell("loaded", wrong=wrong(model, optimizer))
    reader.close()


# -- the tests --------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved(launcher, tmp_path_factory):
    """What DCP saved with FSDP2 on three ranks."""
    from launch import Job
    from nodes import Cluster

    folder = tmp_path_factory.mktemp("dcp")
    with (
        Cluster(1, isolated=False) as cluster,
        Job(launcher, cluster, "test_dcp:dcp_saves", per_node=3, options={"folder": str(folder), "kind": "fsdp"}) as job,
    ):
        job.finished()
    return folder


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("tp", 3), ("hsdp", 4), ("fsdp", 4), ("replicated", 2), ("replicated", 1)])
def test_what_dcp_saved_is_restored_in_another_layout(clusters, jobs, saved, kind, ranks):
    """FSDP2 on three ranks, by DCP and as Hugging Face shards, into any other layout and world: every element, the optimizer's too."""
    job = jobs(clusters(1, isolated=False), "test_dcp:restores", per_node=ranks, options={"folder": str(saved), "kind": kind})
    job.finished()
    told = [line for rank in job.ranks for line in rank.said("restored")]
    assert len(told) == 3 * ranks
    assert not [line for line in told if line["wrong"]], told


def test_a_lost_file_of_dcp_is_named_on_the_ranks_that_need_it(clusters, jobs, saved, tmp_path):
    """F6: one rank's file is gone: the ranks that need something of it say which regions, and their tensors are as they were."""
    import shutil

    shutil.copytree(saved, tmp_path / "c")
    lost = tmp_path / "c" / "flat-0" / "__1_0.distcp"
    lost.unlink()
    job = jobs(clusters(1, isolated=False), "test_dcp:loses", per_node=2, options={"folder": str(tmp_path / "c"), "kind": "fsdp"})
    job.finished()
    messages = [rank.said("restored")[0] for rank in job.ranks]
    assert any(line["message"] for line in messages)
    for line in messages:
        if line["message"]:
            assert lost.name in line["message"]
            assert "of 'model." in line["message"]
            assert line["same"]


@pytest.mark.parametrize(("kind", "ranks", "flat"), [("fsdp", 2, False), ("tp", 2, True), ("hsdp", 4, False)])
def test_torchs_calls_save_and_load_a_run(clusters, jobs, kind, ranks, flat):
    """Torch's save and async_save through Writer; load through Reader in the same and in another world; values by rank; the checkpoint verifies."""
    from checks import everystep

    cluster = clusters(1, isolated=False)
    run = str(cluster.shared / "run")
    jobs(cluster, "test_dcp:writes", per_node=ranks, options={"run": run, "kind": kind, "flat": flat}).finished()
    assert not list(Path(run).rglob("*.distcp"))
    everystep(cluster.nodes[0], "verify", run)
    for other, count in ((kind, ranks), ("fsdp", 3), ("replicated", 1)):
        job = jobs(cluster, "test_dcp:reads", per_node=count, options={"run": run, "kind": other, "flat": flat, "steps": [3, 1]})
        job.finished()
        for number, rank in enumerate(job.ranks):
            told = rank.said("loaded")
            assert [line["step"] for line in told] == [3, 1]
            assert not [line for line in told if line["wrong"] or not line["more"]], told
            assert {line["rank"] for line in told} == {number % ranks}


def test_what_everystep_saved_loads_through_torchs_calls(clusters, jobs):
    """A save of modules and optimizers by Checkpointer on two ranks, loaded by torch's load on three, by get_state_dict's names."""
    cluster = clusters(1, isolated=False)
    run = str(cluster.shared / "run")
    jobs(cluster, "test_dcp:own", per_node=2, options={"run": run, "kind": "fsdp", "load": False}).finished()
    job = jobs(cluster, "test_dcp:own", per_node=3, options={"run": run, "kind": "fsdp", "load": True})
    job.finished()
    assert not [line for rank in job.ranks for line in rank.said("loaded") if line["wrong"]]


def test_writer_on_two_nodes(clusters, jobs):
    """Two nodes of two ranks: torch's calls save into one run, and one rank loads it."""
    cluster = clusters(2, isolated=False)
    run = str(cluster.shared / "run")
    jobs(cluster, "test_dcp:writes", per_node=2, options={"run": run, "kind": "fsdp", "flat": False}).finished()
    assert json.loads((Path(run) / "run.json").read_text())
    job = jobs(
        clusters(1, isolated=False), "test_dcp:reads", per_node=1, options={"run": run, "kind": "replicated", "flat": False, "steps": [3]}
    )
    job.finished()
    [told] = job.ranks[0].said("loaded")
    assert not told["wrong"]
    assert told["more"]
