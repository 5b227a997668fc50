"""Which regions DTensors hold, without processes: cuts against ``torch.chunk``, and what collecting and restoring make of them."""

from __future__ import annotations

import itertools
import logging
import math

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from everystep.errors import LayoutError, StateError
from everystep.manifest import Manifest, TensorSpec, join_documents
from everystep.region import Region
from everystep.trainer.reading import ManifestReader
from everystep.trainer.restoring import Wanted
from everystep.trainer.sharding import Chunk, Cut, box, chunks_of, unwrapped
from everystep.trainer.state import RNG, Leaf, StateCollector, load_state, restore_into

RANK, WORLD = 1, 3


@pytest.fixture
def mesh():
    """A mesh of three ranks of which this process is the second; nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    yield init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def sharded(full, mesh, dim=0):
    """This rank's shard of a whole tensor as a DTensor."""
    pieces = [*full.chunk(WORLD, dim), *[full.narrow(dim, 0, 0)] * WORLD]
    return DTensor.from_local(pieces[RANK].clone(), mesh, [Shard(dim)], run_check=False, shape=full.shape, stride=full.stride())


def chunked(tensor, count, dim):
    """Like ``torch.chunk``, with empty pieces where it gives fewer."""
    pieces = list(tensor.chunk(count, dim)) if tensor.numel() else []
    return [*pieces, *[tensor.narrow(dim, 0, 0)] * (count - len(pieces))]


def contents(full, chunks, shape):
    """The local tensor that chunks describe; what none of them fills is -1."""
    local = torch.full(shape, -1, dtype=full.dtype)
    for chunk in chunks:
        box(local, chunk.local).copy_(box(full, chunk.region))
    return local


# -- cuts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 2), (9, 4), (0, 3), (5, 6, 7)])
def test_plain_cuts_are_those_of_chunk(shape):
    """F12, F13: tensors cut along one or several dimensions, evenly or not, hold what ``torch.chunk`` gives them, empty shards too."""
    full = torch.arange(math.prod(shape)).view(shape)
    for sizes in ((4,), (2, 3), (3, 1, 2)):
        for dims in itertools.product(range(len(shape)), repeat=len(sizes)):
            for position in itertools.product(*map(range, sizes)):
                local = full
                for dim, size, at in zip(dims, sizes, position, strict=True):
                    local = chunked(local, size, dim)[at]
                cuts = tuple(map(Cut, dims, sizes, position))
                chunks = chunks_of(shape, cuts, tuple(local.shape))
                assert chunks is not None
                assert (chunks == ()) == (local.numel() == 0)
                assert torch.equal(contents(full, chunks, local.shape), local)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 2), (2, 4), (3, 2), (8, 3)])
def test_fsdp_shards_what_tensor_parallelism_left(dp, tp):
    """F14: a strided shard before a plain one, of any size: each rank holds its part of its tensor-parallel part, and all of them everything."""
    for size in range(1, 30):
        full = torch.arange(size)
        held = []
        for i, j in itertools.product(range(dp), range(tp)):
            local = chunked(chunked(full, tp, 0)[j], dp, 0)[i]
            chunks = chunks_of((size,), (Cut(0, dp, i, tp), Cut(0, tp, j)), tuple(local.shape))
            assert chunks is not None
            assert torch.equal(contents(full, chunks, local.shape), local)
            held += local.tolist()
        assert sorted(held) == list(range(size))


def test_torch_is_wrong_where_we_compute_ourselves():
    """9 rows on 4 x 2: FSDP2 gives row 8 to the rank at (3, 1); torch's offsets give it to (3, 0). When this fails torch may be used."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert _compute_local_shape_and_global_offset((9,), (4, 2), [3, 0], placements)[0] == (1,)
    assert chunks_of((9,), (Cut(0, 4, 3, 2), Cut(0, 2, 0)), (0,)) == ()
    assert chunks_of((9,), (Cut(0, 4, 3, 2), Cut(0, 2, 1)), (1,)) == (Chunk(Region((8,), (1,)), Region((0,), (1,))),)


@pytest.mark.parametrize(("size", "ranks", "factor"), [(12, 3, 2), (7, 2, 3), (5, 4, 2), (10, 2, 2)])
def test_a_strided_shard_alone_has_several_chunks(size, ranks, factor):
    """Where nothing else cuts the dimension, what a rank holds are pieces from all over it, as torch cuts them."""
    full = torch.arange(size * 2).view(size, 2)
    locals_, _ = _StridedShard(0, split_factor=factor)._split_tensor(full, ranks, with_padding=False)
    for position, local in enumerate(locals_):
        chunks = chunks_of((size, 2), (Cut(0, ranks, position, factor),), tuple(local.shape))
        assert chunks is not None
        assert torch.equal(contents(full, chunks, local.shape), local)
        assert len(chunks) <= factor
    assert len(chunks_of((12, 2), (Cut(0, 3, 0, 2),), (4, 2)) or ()) == 2


def test_sizes_that_the_cuts_do_not_give():
    """Another local size than the placements give is no layout; an empty shard may have any shape."""
    assert chunks_of((7, 2), (Cut(0, 4, 0),), (3, 2)) is None
    assert chunks_of((7, 2), (Cut(2, 4, 0),), (2, 2)) is None
    assert chunks_of((7, 2), (Cut(0, 4, 0),), (0,)) is None
    assert chunks_of((3, 2), (Cut(0, 4, 3),), (0,)) == ()
    assert chunks_of((), (), ()) == (Chunk(Region((), ()), Region((), ())),)


def test_unwrapped(mesh):
    """A plain tensor is itself; a DTensor its local tensor, never a copy, and the region it is."""
    plain = torch.ones(3)
    assert unwrapped(plain) == (plain, None)
    parameter = nn.Parameter(sharded(torch.arange(14.0).view(7, 2), mesh))
    local, chunks = unwrapped(parameter, "w")
    assert local is parameter._local_tensor
    assert chunks == (Chunk(Region((3, 0), (3, 2)), Region((0, 0), (3, 2))),)
    everywhere = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False)
    assert unwrapped(everywhere)[1] == (Chunk(Region((0, 0), (2, 2)), Region((0, 0), (2, 2))),)


def test_partial_and_odd_placements_are_refused(mesh):
    """What no rank holds, or another size than the placements say, is refused with the tensor's name and what to do."""
    with pytest.raises(StateError, match=r"'d\.x' is a DTensor with partial placements.*redistribute"):
        StateCollector().collect({"d": {"x": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)}})
    odd = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False, shape=torch.Size([7]), stride=(1,))
    with pytest.raises(StateError, match=r"'d\.x' is a DTensor of shape \[7\].* holds \[2\] of it"):
        StateCollector().collect({"d": {"x": odd}})


@pytest.mark.parametrize(
    ("local", "why"),
    [(torch.ones(2, device="meta"), "meta device"), (torch.ones(2, dtype=torch.complex128), "complex128")],
)
def test_what_cannot_be_stored_cannot_in_a_dtensor(mesh, local, why):
    """F17: a DTensor's local tensor is looked at like any other: a meta tensor and odd dtypes are refused by name."""
    with pytest.raises(StateError, match=rf"'d\.x'.*{why}"):
        StateCollector().collect({"d": {"x": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}})


# -- collecting -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Sharded weights, two of them tied, a plain buffer."""

    def __init__(self, mesh, value=0.0):
        super().__init__()
        self.w = nn.Parameter(sharded(torch.arange(14.0).view(7, 2) + value, mesh))
        self.tied = self.w
        self.b = nn.Parameter(sharded(torch.arange(2.0) + value, mesh))
        self.register_buffer("count", torch.tensor(3))


def adam(model):
    """An optimizer with state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def test_leaves_are_local_with_global_specs(mesh):
    """Specs have the whole shape, tensors the rank's part; ties and empty shards are told as on every rank; moments are sharded too."""
    model = Net(mesh)
    collected = StateCollector().collect({"model": model, "optim": adam(model)})
    leaves = {leaf.spec.name: leaf for leaf in collected.leaves}
    assert collected.aliases == {"model.tied": "model.w"}
    assert leaves["model.w"].spec == TensorSpec("model.w", "F32", (7, 2), "model")
    assert leaves["model.w"].tensor is model.w._local_tensor
    assert leaves["optim.state.model.w.exp_avg"].spec.shape == (7, 2)
    assert leaves["optim.state.model.w.exp_avg"].chunks == leaves["model.w"].chunks == (Chunk(Region((3, 0), (3, 2)), Region((0, 0), (3, 2))),)
    assert leaves["model.b"].chunks == (Chunk(Region((1,), (1,)), Region((0,), (1,))),)
    assert leaves["model.count"].chunks is None
    assert all(leaf.late == (name not in {"model.count"} and not name.endswith("step")) for name, leaf in leaves.items())


def test_plain_moments_of_a_shard_are_refused(mesh):
    """A plain tensor of the local shape beside a sharded parameter would be taken for equal on all ranks: refused by name."""
    model = Net(mesh)
    optimizer = adam(model)
    optimizer.state[model.w]["exp_avg"] = optimizer.state[model.w]["exp_avg"].to_local()
    with pytest.raises(StateError, match=r"'optim' keeps 'exp_avg' of 'model\.w' as a plain tensor of its local shape \[3, 2\]"):
        StateCollector().collect({"model": model, "optim": optimizer})


def test_distinct_objects_over_one_empty_shard_are_tied(mesh):
    """F25: ranks must not differ in what they take for one tensor, even where there is nothing of it."""
    one = DTensor.from_local(torch.empty(0, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size([1, 2]), stride=(2, 1))
    again, other = one.detach(), DTensor.from_local(torch.empty(0, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size([1, 2]), stride=(2, 1))
    assert again is not one
    collected = StateCollector().collect({"d": {"a": one, "b": again, "c": other}})
    assert collected.aliases == {"d.b": "d.a"}
    assert [leaf.chunks for leaf in collected.leaves] == [(), ()]


def test_steady_state_notices_a_replaced_local_tensor(mesh):
    """The same list of leaves while nothing moved; a DTensor whose local tensor was replaced, or moved, has a new leaf, others keep theirs."""
    model = Net(mesh)
    state = {"model": model, "optim": adam(model)}
    collector = StateCollector()
    first = collector.collect(state)
    with torch.no_grad():
        model.w.add_(1)
    assert collector.collect(state).leaves is first.leaves
    model.w._local_tensor = model.w._local_tensor.clone()
    second = collector.collect(state)
    assert second.structure == first.structure
    assert second.leaves[0].tensor is model.w._local_tensor
    assert [a is b for a, b in zip(first.leaves, second.leaves, strict=True)].count(False) == 1
    model.w._local_tensor.data = model.w._local_tensor.clone()
    third = collector.collect(state)
    assert third.leaves[0] is not second.leaves[0]
    assert third.leaves[1:] == second.leaves[1:]


def test_replaced_tensors_of_plain_data(mesh):
    """DTensors in plain data that are new objects each time keep their structure; another cut of the same shape changes it."""
    collector = StateCollector()
    full = torch.arange(12.0).view(6, 2)
    first = collector.collect({"d": {"x": sharded(full, mesh)}})
    moved = sharded(full + 1, mesh)
    second = collector.collect({"d": {"x": moved}})
    assert second.structure == first.structure
    assert second.leaves[0].tensor is moved._local_tensor
    other = collector.collect({"d": {"x": sharded(full, mesh, dim=1)}})
    assert other.structure != first.structure


def test_tensors_kept_by_rank(mesh):
    """Tensors of objects and plain data get the rank's suffix, in the document too; modules', optimizers', DTensors and patterns do not."""
    model = Net(mesh)
    loose = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), loose], momentum=0.9)
    state = {"loader": RNG(), "model": model, "optim": optimizer,
             "data": {"mine": torch.ones(1), "all": torch.ones(1), "stepped": loose, "cut": sharded(torch.ones(7), mesh), "again": model.count}}  # fmt: skip
    collector = StateCollector()
    collector.rank_suffix, collector.replicated = "@rank-00001", ["data.al*"]
    collected = collector.collect(state)
    names = {leaf.spec.name for leaf in collected.leaves}
    assert {name for name in names if name.startswith("data.")} == {"data.mine@rank-00001", "data.all", "data.stepped", "data.cut"}
    assert collected.aliases == {"data.again": "model.count", "model.tied": "model.w"}
    assert {name for name in names if name.startswith("loader.")} == {"loader.python.words@rank-00001", "loader.torch@rank-00001", "loader.numpy.state.key@rank-00001"}
    again = collector.collect(state)
    assert again.structure == collected.structure
    assert collector.collect(state).leaves is again.leaves
    assert {leaf.spec.group for leaf in collected.leaves} == {"loader", "model", "data"}
    collector.rank_suffix = ""
    assert "data.mine" in {leaf.spec.name for leaf in collector.collect(state).leaves}


# -- restoring ------------------------------------------------------------------------------------------------------------


class Whole:
    """A checkpoint in memory with whole tensors, of which regions are asked for."""

    def __init__(self, values, tensors, *, beyond=False, aliases=()):
        self.step, self.values, self.data, self.beyond, self.by_rank = 1, values, tensors, beyond, True
        words = {torch.float32: "F32", torch.int64: "I64", torch.float64: "F64", torch.uint8: "U8", torch.uint32: "U32"}
        self.tensors = {name: TensorSpec(name, words[tensor.dtype], tuple(tensor.shape), name.partition(".")[0]) for name, tensor in tensors.items()}
        self.tensors |= {alias: self.tensors[name] for alias, name in aliases}
        self.asked = []

    def read(self, wanted):
        for name, tensor, region in wanted:
            stored = self.data[self.tensors[name].name]
            assert not isinstance(tensor, DTensor)
            assert tensor.dtype == stored.dtype
            tensor.copy_(stored if region is None else box(stored, region))
            self.asked.append((name, region))


def whole_checkpoint(collected, make):
    """A checkpoint like what was collected, with whole tensors as ``make`` gives them by spec."""
    return Whole(collected.values, {leaf.spec.name: make(leaf.spec) for leaf in collected.leaves}, aliases=collected.aliases.items())


def numbered(spec):
    """Contents that tell where each element is."""
    return (torch.arange(math.prod(spec.shape)) + len(spec.name)).view(spec.shape).to(torch.int64 if spec.dtype == "I64" else torch.float32)


@pytest.mark.parametrize("used", [False, True])
def test_dtensors_take_their_region(mesh, used):
    """Parameters are filled in place with this rank's region only; missing moments are made as DTensors of the parameter's placements."""
    model = Net(mesh)
    reader = whole_checkpoint(StateCollector().collect({"model": model, "optim": adam(model)}), numbered)
    other = Net(mesh, value=9.0)
    optimizer = adam(other) if used else torch.optim.Adam(other.parameters())
    before = other.w, other.w._local_tensor
    restore_into({"model": other, "optim": optimizer}, reader)
    assert (other.w, other.w._local_tensor) == before
    assert torch.equal(other.w._local_tensor, numbered(reader.tensors["model.w"])[3:6])
    moment = optimizer.state[other.w]["exp_avg"]
    assert (type(moment), moment.placements, moment.shape, moment.requires_grad) == (DTensor, (Shard(0),), (7, 2), False)
    assert torch.equal(moment._local_tensor, numbered(reader.tensors["optim.state.model.w.exp_avg"])[3:6])
    assert type(optimizer.state[other.w]["step"]) is torch.Tensor
    assert {region for name, region in reader.asked if name == "model.w"} == {Region((3, 0), (3, 2))}
    for parameter in other.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def test_casts_and_shapes_of_dtensors(mesh):
    """``cast`` converts a region at a time; a global shape that differs is refused before anything is read."""
    model = Net(mesh)
    reader = whole_checkpoint(StateCollector().collect({"model": model}), lambda spec: numbered(spec).double() if spec.name == "model.w" else numbered(spec))
    with pytest.raises(LayoutError, match=r"'model\.w' is F64 in the checkpoint, F32"):
        restore_into({"model": model}, reader)
    restore_into({"model": model}, reader, cast=True)
    assert torch.equal(model.w._local_tensor, numbered(reader.tensors["model.w"])[3:6])
    reader = whole_checkpoint(StateCollector().collect({"model": model}), lambda spec: torch.ones(8, 2) if spec.name == "model.w" else numbered(spec))
    with pytest.raises(LayoutError, match=r"'model\.w' has shape \[8, 2\] in the checkpoint, \[7, 2\]"):
        restore_into({"model": model}, reader)
    assert not reader.asked


def test_a_new_rank_keeps_its_random_numbers(caplog):
    """F16: a rank that was not among those that saved takes plain values and loaders of another, not random states; that is told once."""
    state = {"rng": RNG(), "generator": torch.Generator().manual_seed(3), "data": {"epoch": 4}}
    collected = StateCollector().collect(state)
    reader = Whole(collected.values, {leaf.spec.name: leaf.tensor.clone() for leaf in collected.leaves}, beyond=True)
    torch.manual_seed(11)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(11))
    target = {"rng": RNG(), "generator": torch.Generator().manual_seed(5), "data": {"epoch": 0}}
    with caplog.at_level(logging.WARNING, logger="everystep"):
        report = restore_into(target, reader)
    assert list(report.kept) == ["rng", "generator"]
    assert target["data"] == {"epoch": 4}
    assert torch.equal(torch.rand(2), expected)
    assert target["generator"].initial_seed() == 5
    [record] = caplog.records
    assert "rng, generator" in record.getMessage()
    assert not report.unexpected


class Nowhere:
    """A source that nothing is read from."""

    direct = False


def by_rank_manifest(world=3):
    """A checkpoint of several ranks, each with a tensor of its own in ``data``."""
    documents, specs = {}, []
    for rank in range(world):
        collector = StateCollector()
        collector.rank_suffix = f"@rank-{rank:05d}"
        collected = collector.collect({"data": {"x": torch.ones(2)}, "same": {"n": 1}, "model": nn.Linear(1, 1)})
        documents[rank] = collected.values
        specs += [leaf.spec for leaf in collected.leaves if leaf.spec not in specs]
    values, by_rank = join_documents(documents)
    return Manifest(step=5, attempt=1, nodes=1, saved_at=0.0, tensors=tuple(specs), objects=(), shards=(), aliases={}, values=msgspec.Raw(values),
                    world=world, by_rank=by_rank)  # fmt: skip


@pytest.mark.parametrize(("rank", "own"), [(0, 0), (2, 2), (3, 0), (7, 1)])
def test_a_reader_sees_one_rank(rank, own):
    """A rank's own tensors and document, those of ``rank % world`` beyond the saved world; other ranks' tensors are not among them."""
    reader = ManifestReader(by_rank_manifest(), Nowhere(), threads=1, rank=rank)
    assert set(reader.tensors) == {f"data.x@rank-{own:05d}", "model.weight", "model.bias"}
    assert f"@rank-{own:05d}".encode() in reader.values
    assert reader.beyond == (rank >= 3)


def test_a_checkpoint_of_many_ranks_loads_without_a_model(mesh):
    """``load_state`` gives whole tensors, and the values of one rank under their plain names."""
    model = Net(mesh)
    reader = whole_checkpoint(StateCollector().collect({"model": model, "data": {"x": torch.ones(2)}}), numbered)
    loaded = load_state(reader)
    assert torch.equal(loaded["model"]["w"], numbered(reader.tensors["model.w"]))
    assert loaded["model"]["w"] is loaded["model"]["tied"]
    assert list(loaded["data"]) == ["x"]
    assert Wanted("a", torch.ones(1)).region is None
    assert Leaf(TensorSpec("a", "F32", (1,), "a"), torch.ones(1), late=False).chunks is None
