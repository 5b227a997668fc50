"""What ranks hold of DTensors, and state that goes through a slab from any layout to any other, on real ranks.

The functions above the tests run in the ranks. Values to compare with come from a plain model of one process that takes the same steps:
they are computed element by element, so that no layout has an influence on them.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WORLD = 4
SHAPES = [(7,), (3, 5), (5, 7), (1, 2), (2, 0), (9, 4), (7, 6, 5)]


# -- in the ranks -------------------------------------------------------------------------------------------------------
def start() -> tuple[int, int]:
    """Join the job: (rank, world size)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def whole_of(shape: tuple[int, ...]) -> Any:
    """A tensor whose every element tells where it is."""
    import torch

    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)


def held(voice: Any, case: str, tensor: Any, full: Any) -> None:
    """Tell which regions this rank holds, and whether their contents are those of the whole tensor."""
    import torch

    from everystep.trainer.sharding import box, unwrapped

    local, chunks = unwrapped(tensor, case)
    same = all(torch.equal(box(local, chunk.local), box(full, chunk.region)) for chunk in chunks)
    counted = sum(chunk.region.numel for chunk in chunks) == local.numel()
    regions = [[list(chunk.region.offsets), list(chunk.region.sizes)] for chunk in chunks]
    voice.tell("held", case=case, shape=list(full.shape), same=same, counted=counted, regions=regions)


def distributed(voice: Any) -> None:
    """Tensors given out by torch's own ``distribute_tensor``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    start()
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2), (2, 1, 2))}
    placements: dict[tuple[int, ...], list[list[Any]]] = {
        (4,): [[Shard(0)], [Shard(1)], [Replicate()], [_StridedShard(0, split_factor=2)]],
        (2, 2): [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(0)], [Shard(1), Replicate()],
                 [_StridedShard(0, split_factor=2), Shard(0)], [_StridedShard(0, split_factor=3), Replicate()]],
        (2, 1, 2): [[Shard(0), Shard(0), Shard(0)], [Replicate(), Shard(0), Shard(1)], [Shard(2), Shard(1), Shard(0)]],
    }  # fmt: skip
    for size, mesh in meshes.items():
        for placed in placements[size]:
            for shape in SHAPES:
                if all(getattr(one, "dim", 0) < len(shape) for one in placed):
                    # torch cannot scatter strided shards of uneven sizes, but it can cut them.
                    source = None if any(isinstance(one, _StridedShard) for one in placed) else 0
                    tensor = distribute_tensor(whole_of(shape), mesh, placed, src_data_rank=source)
                    held(voice, f"{shape} {placed} on {size}", tensor, whole_of(shape))


def net(seed: int) -> Any:
    """A model with odd sizes, tied weights, buffers and a scalar parameter; its values are the same in every process."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 6)
            self.a = nn.Linear(6, 7)
            self.b = nn.Linear(7, 6)
            self.thin = nn.Linear(6, 1)
            self.lm_head = nn.Linear(6, 7, bias=False)
            self.lm_head.weight = self.embed.weight
            self.register_buffer("seen", torch.full((3,), float(seed)))

        def forward(self, ids: Any) -> Any:
            x = self.b(torch.tanh(self.a(self.embed(ids))))
            return self.lm_head(x) + self.thin(x)

    model = Net()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(whole_of(tuple(parameter.shape)) / 10 + number + 100 * seed)
    return model


def built(kind: str, world: int, *, seed: int) -> tuple[Any, Any]:
    """(model, optimizer) of one kind of parallelism."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = net(seed)
    if kind == "fsdp":
        for one in (model.a, model.b, model):
            fully_shard(one)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for one in (model.a, model):
            fully_shard(one, mesh=mesh)
    elif kind in {"tp", "tp_fsdp"}:
        size = (world // 2, 2) if kind == "tp_fsdp" else (1, world)
        mesh = init_device_mesh("cpu", size, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel(), "lm_head": ColwiseParallel()})
        model.embed.weight = model.lm_head.weight
        if kind == "tp_fsdp":
            for one in (model.a, model):
                fully_shard(one, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def step(model: Any, optimizer: Any, times: int = 2) -> None:
    """Optimizer steps whose gradients are computed element by element from the parameters."""
    for number in range(times):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.1 + number
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any, optimizer: Any, rank: int) -> dict[str, Any]:
    """A state with something of every sort."""
    import torch

    from everystep.trainer.state import RNG

    class Loader:
        """Hands out a tensor of its own on each rank."""

        def __init__(self) -> None:
            self.at = torch.tensor([rank, rank * 10])

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at.clone(), "epoch": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at, self.epoch = state["at"], state["epoch"]

    return {"model": model, "optim": optimizer, "loader": Loader(), "rng": RNG(), "shared": {"mean": torch.tensor([5.0, 6.0])}}


class SlabSource:
    """The bytes of a slab in a file."""

    direct = True

    def __init__(self, slab: memoryview, offsets: list[int]) -> None:
        self._slab, self._offsets = slab, offsets

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        at = self._offsets[number] + offset
        view[:] = self._slab[at : at + len(view)]

    def bytes_of(self, fetch: Any, *, shared: bool = False) -> memoryview:
        view = memoryview(bytearray(fetch.nbytes))
        self.read_into(fetch.object, fetch.offset, view)
        return view

    def release(self, view: memoryview) -> None:
        pass


def save(state: dict[str, Any], folder: Path, rank: int, world: int) -> None:
    """All ranks copy their boxes into one slab, a file; the last of them writes what was saved beside it."""
    import msgspec
    import torch.distributed as dist

    from everystep.foreign.dtypes import DTYPES
    from everystep.layout import HeldTensor, RankLayout, plan_world
    from everystep.manifest import block_digests, digest, encode, join_documents, merge
    from everystep.plan import slab_part
    from everystep.region import whole
    from everystep.trainer.staging import SlabViews, Stager
    from everystep.trainer.state import StateCollector

    collector = StateCollector()
    collector.rank_suffix, collector.replicated = f"@rank-{rank:05d}", ["shared.*"]
    collected = collector.collect(state)
    tensors = tuple(
        HeldTensor(leaf.spec, (whole(leaf.spec.shape),) if leaf.chunks is None else tuple(chunk.region for chunk in leaf.chunks))
        for leaf in collected.leaves
    )
    told = msgspec.msgpack.encode(RankLayout(0, tensors, dict(collected.aliases))), collected.values
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, told)
    [node] = plan_world([msgspec.msgpack.decode(layout, type=RankLayout) for layout, _ in everybody])
    folder.mkdir(exist_ok=True)
    with (folder / "slab").open("a+b") as file:
        if rank == 0:
            os.ftruncate(file.fileno(), node.plan.nbytes)
        dist.barrier()
        slab = mmap.mmap(file.fileno(), node.plan.nbytes)
    dtypes = [DTYPES[node.plan.tensors[placement.tensor].dtype] for placement in node.plan.placements]
    stager, errors = Stager(notice=print), []
    stager.stage(step=1, leaves=collected.leaves, copies=node.copies.get(rank, ()), views=SlabViews(memoryview(slab), node.plan, dtypes),
                 overlap=True, finish=lambda staging: errors.append(staging.error))  # fmt: skip
    stager.fence()
    stager.idle()
    stager.close()
    assert errors == [None], errors
    dist.barrier()
    if rank == 0:
        view = memoryview(slab)
        values, by_rank = join_documents({number: document for number, (_, document) in enumerate(everybody)})
        part = slab_part(
            node.plan, step=1, attempt=1, node=0, nodes=1, saved_at=0.0, values=values, metrics={}, world=world, ranks=tuple(range(world)), by_rank=by_rank,
            object_key={file.name: file.name for file in node.plan.files}, header_digests=[digest(file.header) for file in node.plan.files],
            digests=[block_digests(view[one.slab_offset : one.slab_offset + one.nbytes], one.block) for one in node.plan.placements],
        )  # fmt: skip
        manifest = merge([part])
        where = {file.name: file.slab_offset for file in node.plan.files}
        (folder / "manifest").write_bytes(encode("manifest", manifest))
        (folder / "offsets").write_text(json.dumps([where[stored.key] for stored in manifest.objects]))
    dist.barrier()


def restore(state: dict[str, Any], folder: Path, rank: int) -> Any:
    """Fill a state from what ``save`` left."""
    from everystep.manifest import Manifest, decode
    from everystep.trainer.reading import ManifestReader
    from everystep.trainer.state import restore_into

    manifest = decode("manifest", (folder / "manifest").read_bytes(), Manifest, key="manifest")
    offsets = json.loads((folder / "offsets").read_text())
    with (folder / "slab").open("rb") as file:
        slab = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return restore_into(state, ManifestReader(manifest, SlabSource(memoryview(slab), offsets), threads=2, rank=rank))


def differences(model: Any, optimizer: Any, reference: tuple[Any, Any]) -> list[str]:
    """Names of parameters, buffers and optimizer states that are not the plain model's."""
    import torch

    from everystep.trainer.sharding import as_dtensor, box, unwrapped

    wanted = dict(reference[0].state_dict())
    found = dict(model.state_dict())
    for (name, mine), (_, plain) in zip(model.named_parameters(), reference[0].named_parameters(), strict=True):
        state = optimizer.state[mine]
        wanted |= {f"{name}:{key}": tensor for key, tensor in reference[1].state[plain].items()}
        found |= {f"{name}:{key}": tensor for key, tensor in state.items()}
        for key, tensor in state.items():
            if key != "step" and (as_dtensor(tensor) is None) != (as_dtensor(mine) is None):
                return [f"{name}:{key} is a {type(tensor)}"]
            if key != "step" and as_dtensor(mine) is not None and tensor.placements != mine.placements:
                return [f"{name}:{key} has placements {tensor.placements}"]
    wrong = [name for name in wanted if name not in found]
    for name, tensor in wanted.items():
        local, chunks = unwrapped(found[name].detach(), name)
        if chunks is None:
            wrong += [] if torch.equal(local, tensor) else [name]
        elif not all(torch.equal(box(local, chunk.local), box(tensor.detach(), chunk.region)) for chunk in chunks):
            wrong.append(name)
    return wrong


def save_all(voice: Any, folder: str, kinds: list[str]) -> None:
    """Save each kind, and restore each into every other, into fresh optimizers and used ones."""
    rank, world = start()
    reference = built("plain", world, seed=1)
    step(*reference)
    for kind in kinds:
        model, optimizer = built(kind, world, seed=1)
        step(model, optimizer)
        wrong = differences(model, optimizer, reference)
        save(state_of(model, optimizer, rank), Path(folder) / kind, rank, world)
        voice.tell("saved", kind=kind, wrong=wrong)
    restore_all(voice, folder, kinds, kinds, started=(rank, world))


def restore_all(voice: Any, folder: str, kinds: list[str], into: list[str], *, started: tuple[int, int] | None = None) -> None:
    """Restore each saved kind into each other."""
    rank, world = started or start()
    reference = built("plain", world, seed=1)
    step(*reference)
    for kind in kinds:
        for other in into:
            for used in (False, True):
                model, optimizer = built(other, world, seed=2)
                if used:
                    step(model, optimizer, 1)
                state = state_of(model, optimizer, rank + 50)
                report = restore(state, Path(folder) / kind, rank)
                wrong = differences(model, optimizer, reference)
                voice.tell("restored", case=f"{kind} -> {other}{' used' * used}", wrong=wrong, loader=state["loader"].at.tolist(),
                           kept=list(report.kept), shared=state["shared"]["mean"].tolist())  # fmt: skip


def gathered(voice: Any, folder: str) -> None:
    """An FSDP2 root is left with gathered parameters by an evaluation; then it is saved, and restored into in the same condition."""
    import torch

    from everystep.trainer.sharding import as_dtensor
    from everystep.trainer.state import StateCollector

    rank, world = start()
    model, optimizer = built("fsdp", world, seed=1)
    ids = torch.arange(7)
    collector = StateCollector()
    first = collector.collect({"model": model, "optim": optimizer})
    with torch.no_grad():
        model(ids)
    gathered = as_dtensor(model.thin.weight) is None
    second = collector.collect({"model": model, "optim": optimizer})
    voice.tell("collected", gathered=gathered, still=as_dtensor(model.thin.weight) is None, same=first.leaves is second.leaves,
               fresh=StateCollector().collect({"model": model, "optim": optimizer}).structure == first.structure)  # fmt: skip
    save(state_of(model, optimizer, rank), Path(folder) / "gathered", rank, world)
    with torch.no_grad():
        expected = net(1)(ids)
        other, its = built("fsdp", world, seed=2)
        other(ids)
        restore(state_of(other, its, rank), Path(folder) / "gathered", rank)
        voice.tell("computed", close=torch.allclose(other(ids), expected))


def refused(voice: Any) -> None:
    """Partial placements, and a rank outside the mesh."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    from everystep.errors import StateError
    from everystep.trainer.state import StateCollector

    _, world = start()
    mesh = init_device_mesh("cpu", (world,))
    odd = [3, 1, 1, 2][dist.get_rank()]
    for name, tensor in {
        "partial": DTensor.from_local(torch.ones(2), mesh, [Partial()]),
        "odd": DTensor.from_local(torch.ones(odd), mesh, [Shard(0)], run_check=False, shape=torch.Size([7]), stride=(1,)),
    }.items():
        try:
            StateCollector().collect({"data": {name: tensor}})
        except StateError as error:
            voice.tell("refused", name=name, message=str(error))
    half = DeviceMesh("cpu", [0, 1])
    outside = distribute_tensor(torch.arange(6.0), half, [Shard(0)])
    [leaf] = StateCollector().collect({"data": {"half": outside}}).leaves
    voice.tell("outside", shape=list(leaf.spec.shape), local=list(leaf.tensor.shape), chunks=len(leaf.chunks or ()))


# -- the tests ----------------------------------------------------------------------------------------------------------
def covered(lines: list[dict[str, Any]]) -> str:
    """What is wrong with what the ranks of one case hold together."""
    shape = lines[0]["shape"]
    count = np.zeros(shape, dtype=int)
    for offsets, sizes in {(tuple(a), tuple(b)) for line in lines for a, b in line["regions"]}:
        count[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] += 1
    if not all(line["same"] and line["counted"] for line in lines):
        return "a rank's contents are not those of its regions"
    return "" if (count == 1).all() else f"elements are held {sorted(set(count.ravel().tolist()))} times"


def test_chunks_tell_what_ranks_hold(jobs, clusters):
    """F12, F13, F14: on 1-D, 2-D and 3-D meshes, uneven, empty, strided: contents are those of the regions, which cover the tensor once."""
    job = jobs(clusters(1, isolated=False), "test_sharding:distributed", per_node=WORLD)
    job.finished()
    by_case: dict[str, list[dict[str, Any]]] = {}
    for rank in job.ranks:
        for line in rank.said("held"):
            by_case.setdefault(line["case"], []).append(line)
    assert len(by_case) > 70
    wrong = {case: covered(lines) for case, lines in by_case.items()}
    assert {case: why for case, why in wrong.items() if why} == {}
    assert all(len(lines) == WORLD for lines in by_case.values())


@pytest.fixture(scope="module")
def saved(launcher, tmp_path_factory):
    """Checkpoints of every kind of parallelism on four ranks, and the job that wrote them and restored each as every other."""
    from launch import Job
    from nodes import Cluster

    folder = tmp_path_factory.mktemp("sharding")
    kinds = ["plain", "fsdp", "hsdp", "tp", "tp_fsdp"]
    options = {"folder": str(folder), "kinds": kinds}
    with Cluster(1, isolated=False) as cluster, Job(launcher, cluster, "test_sharding:save_all", per_node=WORLD, options=options) as job:
        job.finished()
        yield folder, kinds, job


def test_sharded_models_train_and_save_as_plain_ones(saved):
    """What is saved is what a plain model of one process has after the same steps, parameters and moments."""
    _, kinds, job = saved
    for rank in job.ranks:
        assert [(line["kind"], line["wrong"]) for line in rank.said("saved")] == [(kind, []) for kind in kinds]


def test_any_layout_restores_into_any_other(saved):
    """F13: plain, FSDP2, HSDP, tensor parallel and both together; optimizer state in place and made anew; tensors kept by rank."""
    _, kinds, job = saved
    for number, rank in enumerate(job.ranks):
        lines = rank.said("restored")
        assert len(lines) == 2 * len(kinds) ** 2
        assert [(line["case"], line["wrong"]) for line in lines if line["wrong"]] == []
        assert all(line["loader"] == [number, number * 10] for line in lines)
        assert all((line["kept"], line["shared"]) == ([], [5.0, 6.0]) for line in lines)


@pytest.mark.parametrize("world", [1, 3, 6])
def test_another_world_size_restores(saved, jobs, clusters, world):
    """F15, F16: four ranks' checkpoints on 1, 3 and 6: the same values; loaders of rank % 4, and random numbers of new ranks stay."""
    folder, _, _ = saved
    kinds = ["fsdp", "tp_fsdp"]
    into = ["plain", "fsdp"] + ["hsdp", "tp_fsdp"] * (world % 2 == 0)
    job = jobs(
        clusters(1, isolated=False),
        "test_sharding:restore_all",
        per_node=world,
        options={"folder": str(folder), "kinds": kinds, "into": into},
    )
    job.finished()
    for number, rank in enumerate(job.ranks):
        lines = rank.said("restored")
        assert len(lines) == 2 * len(kinds) * len(into)
        assert [(line["case"], line["wrong"]) for line in lines if line["wrong"]] == []
        assert all(line["loader"] == [number % WORLD, number % WORLD * 10] for line in lines)
        assert all(line["kept"] == (["rng"] if number >= WORLD else []) for line in lines)


def test_a_gathered_root_saves_its_shards_and_restores(jobs, clusters, tmp_path):
    """After an evaluation FSDP2's root has whole parameters: saved are the sharded ones, and a restore is seen by the next forward."""
    job = jobs(clusters(1, isolated=False), "test_sharding:gathered", per_node=WORLD, options={"folder": str(tmp_path)})
    job.finished()
    for rank in job.ranks:
        [line] = rank.said("collected")
        assert all(line[key] for key in ("gathered", "still", "same", "fresh")), line
        assert rank.said("computed")[0]["close"]


def test_what_no_rank_holds_is_refused(jobs, clusters):
    """Partial placements and odd local sizes are refused with the tensor's name; a rank outside the mesh holds nothing."""
    job = jobs(clusters(1, isolated=False), "test_sharding:refused", per_node=WORLD)
    job.finished()
    for rank in job.ranks:
        partial, *odd = rank.said("refused")
        assert "'data.partial'" in partial["message"]
        assert "partial" in partial["message"]
        # torch would cut 7 into 2, 2, 2, 1: three of the four ranks hold something else.
        assert len(odd) == 1
        assert "'data.odd'" in odd[0]["message"]
        [line] = rank.said("outside")
        assert line["shape"] == [6]
        assert (line["local"], line["chunks"]) == (([3], 1) if rank.rank < 2 else ([0], 0))
