"""Plans of many ranks: who writes what, whole files on one node, replicas that share, contradictions by name."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from everystep.errors import LayoutError
from everystep.layout import HeldTensor, RankLayout, SlabCopy, merge_boxes, plan_world
from everystep.manifest import BLOCK_NBYTES, Manifest, TensorSpec, block_digests, decode, digest, encode, merge
from everystep.plan import plan_restore, plan_save, slab_part
from everystep.region import Region, whole

MIB = 1 << 20


def spec(name, shape, dtype="F32"):
    return TensorSpec(name, dtype, shape, name.split(".")[0])


def rows(shape, begin, end):
    return Region((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))


def columns(shape, begin, end):
    return Region((0, begin), (shape[0], end - begin))


def chunks(size, count):
    """Ranges as ``torch.chunk`` cuts them: the last ones smaller or empty."""
    chunk = -(-size // count)
    return [(min(size, chunk * number), min(size, chunk * (number + 1))) for number in range(count)]


def world(*ranks, aliases=None):
    """Layouts from (node, {spec: regions}) by rank."""
    return [RankLayout(node, tuple(HeldTensor(one, tuple(regions)) for one, regions in held.items()), aliases or {}) for node, held in ranks]


def fill(node_plan, layouts, arrays):
    """One node's slab, as its ranks leave it."""
    plan = node_plan.plan
    slab = bytearray(b"\xee" * plan.nbytes)
    for file in plan.files:
        slab[file.slab_offset : file.slab_offset + len(file.header)] = file.header
    for rank, copies in node_plan.copies.items():
        for copy in copies:
            placement = plan.placements[copy.placement]
            array = arrays[layouts[rank].tensors[copy.tensor].spec.name]
            typed = np.frombuffer(slab, array.dtype, placement.nbytes // array.itemsize, placement.slab_offset).reshape(placement.region.sizes)
            inside = copy.region.relative_to(placement.region.offsets)
            typed[(*(slice(a, a + n) for a, n in zip(inside.offsets, inside.sizes, strict=True)), ...)] = array[
                (*(slice(a, a + n) for a, n in zip(copy.region.offsets, copy.region.sizes, strict=True)), ...)
            ]
    return bytes(slab)


def files(node_plan, slab):
    return {file.name: safetensors.numpy.load(slab[file.slab_offset : file.slab_offset + file.nbytes]) for file in node_plan.plan.files}


def part_of(node_plan, slab, *, node=0, nodes=1, world=1, ranks=(0,)):
    """What a node's agent tells of a filled slab."""
    plan, view = node_plan.plan, memoryview(slab)
    return slab_part(
        plan, step=1, attempt=1, node=node, nodes=nodes, saved_at=0.0, values=b"{}", metrics={}, object_key={file.name: f"data/x/{file.name}" for file in plan.files},
        digests=[block_digests(view[p.slab_offset : p.slab_offset + p.nbytes], p.block) for p in plan.placements],
        header_digests=[digest(file.header) for file in plan.files], world=world, ranks=ranks,
    )  # fmt: skip


def written(node_plans, layouts):
    """Bytes that each rank copies."""
    found = [0] * len(layouts)
    for node_plan in node_plans:
        for rank, copies in node_plan.copies.items():
            found[rank] += sum(copy.region.numel * 4 for copy in copies)
    return found


# -- one node -----------------------------------------------------------------------------------------------------------


def test_one_rank_alone_is_planned_as_one_process():
    """A world of one rank that holds whole tensors has the very plan of ``plan_save``, id and bytes, and copies each tensor whole."""
    specs = [spec("model.w", (4, 3)), spec("optim.w.exp_avg", (4, 3)), spec("model.empty", (0, 3)), spec("model.scalar", (), "I64"), spec("a", (2,), "U8")]
    [node_plan] = plan_world([RankLayout(0, tuple(HeldTensor(one, (whole(one.shape),)) for one in specs), {"model.tied": "model.w"})])
    assert node_plan.plan == plan_save(specs, aliases={"model.tied": "model.w"})
    assert {(copy.tensor, copy.region) for copy in node_plan.copies[0]} == {(index, whole(one.shape)) for index, one in enumerate(specs) if one.name != "model.empty"}


@pytest.mark.parametrize("size", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("cut", [rows, columns])
def test_shards_of_one_node_become_whole_tensors(size, cut):
    """F12, F13: row and column shards of four ranks, uneven and empty ones among them, come out as whole tensors in a plain file."""
    shape = (size, 6) if cut is rows else (6, size)
    one = spec("model.w", shape)
    layouts = world(*((0, {one: [cut(shape, *ends)]}) for ends in chunks(size, 4)))
    [node_plan] = plan_world(layouts)
    array = np.arange(size * 6, dtype=np.float32).reshape(shape)
    found = files(node_plan, fill(node_plan, layouts, {"model.w": array}))
    assert list(found) == ["model-00001-of-00001.safetensors"]
    assert list(found["model-00001-of-00001.safetensors"]) == ["w"]
    assert np.array_equal(found["model-00001-of-00001.safetensors"]["w"], array)
    assert [placement.region for placement in node_plan.plan.placements] == [whole(shape)]


@pytest.mark.parametrize(("shape", "count"), [((1024, 1024), 2), ((16, 1 << 20), 2), ((4096, 1000), 4), ((1000, 1000), 3), ((7, MIB), 3), ((64, 4096), 2), ((257, 2049), 2)])
def test_a_rank_that_restores_its_own_share_reads_nothing_else(shape, count):
    """Digest blocks end where the ranks' rows do: for few large rows, many small ones, and uneven ones."""
    held = chunks(shape[0], count)
    layouts = world(*((0, {spec("model.w", shape): [rows(shape, *ends)]}) for ends in held))
    [node_plan] = plan_world(layouts)
    [placement] = node_plan.plan.placements
    assert 0 < placement.block <= BLOCK_NBYTES
    manifest = merge([part_of(node_plan, fill(node_plan, layouts, {"model.w": np.arange(np.prod(shape), dtype=np.float32).reshape(shape)}), world=count, ranks=tuple(range(count)))])
    for begin, end in held:
        assert plan_restore(manifest, [("model.w", rows(shape, begin, end))]).nbytes == (end - begin) * 4 * shape[1]
    assert len(manifest.shards[0].digests) <= count * -(-placement.nbytes // count // BLOCK_NBYTES) + 1


def test_blocks_stay_as_they_are_where_nothing_is_won():
    """One writer, columns, and rows too small to be worth a digest; and the plan's id tells plans of other blocks apart."""
    for held in ([whole((2048, 1024))], [columns((2048, 1024), 0, 512), columns((2048, 1024), 512, 1024)]):
        [node_plan] = plan_world(world(*((0, {spec("model.w", (2048, 1024)): [region]}) for region in held)))
        assert [placement.block for placement in node_plan.plan.placements] == [0]
    [small] = plan_world(world(*((0, {spec("model.w", (64, 64)): [rows((64, 64), *ends)]}) for ends in chunks(64, 2))))
    assert [placement.block for placement in small.plan.placements] == [0]
    [two], [four] = (plan_world(world(*((0, {spec("model.w", (2048, 1024)): [rows((2048, 1024), *ends)]}) for ends in chunks(2048, n)))) for n in (2, 4))
    assert (two.plan.files, two.plan.id) != (four.plan.files, four.plan.id)
    assert two.plan.files == four.plan.files


def test_strided_shards():
    """F14: seven rows on a 2x2 mesh, cut by tensor parallelism first and by FSDP inside of it, are all there once."""
    shape = (7, 3)
    one = spec("model.w", shape)
    by_tp = [list(range(*ends)) for ends in chunks(7, 2)]
    by_rank = [[held[at] for at in range(*ends)] for ends in chunks(4, 2) for held in by_tp for at_most in [len(held)] for ends in [(ends[0], min(ends[1], at_most))]]
    layouts = world(*((0, {one: [rows(shape, row, row + 1) for row in held]}) for held in by_rank))
    assert sorted(itertools.chain(*by_rank)) == list(range(7))
    [node_plan] = plan_world(layouts)
    array = np.arange(21, dtype=np.float32).reshape(shape)
    assert np.array_equal(files(node_plan, fill(node_plan, layouts, {"model.w": array}))["model-00001-of-00001.safetensors"]["w"], array)


def test_ranks_may_hold_different_tensors():
    """Pipeline stages: each rank lists its own tensors, each is written by the rank that has it, tied names included."""
    first, second = spec("model.a", (2,)), spec("model.b", (3,))
    layouts = [RankLayout(0, (HeldTensor(first, (whole((2,)),)),), {}), RankLayout(1, (HeldTensor(second, (whole((3,)),)),), {"model.c": "model.b"})]
    one, other = plan_world(layouts)
    assert (one.plan.tensors, one.plan.aliases) == ((first,), {})
    assert (other.plan.tensors, other.plan.aliases) == ((second,), {"model.c": "model.b"})
    assert one.copies == {0: (SlabCopy(0, 0, whole((2,))),)}
    assert other.copies == {1: (SlabCopy(0, 0, whole((3,))),)}


# -- several nodes ------------------------------------------------------------------------------------------------------


def test_each_node_has_its_rows():
    """Row shards of four ranks on two nodes: each node's file has its rows as one entry, named by where they begin."""
    shape = (10, 2)
    one = spec("model.w", shape)
    layouts = world(*((rank // 2, {one: [rows(shape, *ends)]}) for rank, ends in enumerate(chunks(10, 4))))
    array = np.arange(20, dtype=np.float32).reshape(shape)
    found = {}
    for node_plan in plan_world(layouts):
        found |= files(node_plan, fill(node_plan, layouts, {"model.w": array}))
    assert found.keys() == {"model-n00001-00001-of-00001.safetensors", "model-n00002-00001-of-00001.safetensors"}
    assert np.array_equal(found["model-n00001-00001-of-00001.safetensors"]["w@0,0"], array[:6])
    assert np.array_equal(found["model-n00002-00001-of-00001.safetensors"]["w@6,0"], array[6:])


def test_shards_that_fill_no_box():
    """A node that has the first and the last rows stores two entries, and neighbours are one."""
    shape = (8, 2)
    one = spec("model.w", shape)
    layouts = world((0, {one: [rows(shape, 0, 1), rows(shape, 6, 8)]}), (1, {one: [rows(shape, 2, 6)]}), (0, {one: [rows(shape, 1, 2)]}))
    here, there = plan_world(layouts)
    assert [placement.region for placement in here.plan.placements] == [rows(shape, 0, 2), rows(shape, 6, 8)]
    assert [placement.region for placement in there.plan.placements] == [rows(shape, 2, 6)]
    array = np.arange(16, dtype=np.float32).reshape(shape)
    [found] = files(here, fill(here, layouts, {"model.w": array})).values()
    assert {name: value.tolist() for name, value in found.items()} == {"w@0,0": array[:2].tolist(), "w@6,0": array[6:].tolist()}


def test_an_entry_that_is_called_like_a_shard():
    """A tensor whose name looks like another one's shard keeps it; the shard is told apart."""
    shape = (2, 2)
    layouts = world(
        (0, {spec("model.w", shape): [rows(shape, 0, 1)], spec("model.w@0,0", (1,)): [whole((1,))]}),
        (1, {spec("model.w", shape): [rows(shape, 1, 2)]}),
    )
    arrays = {"model.w": np.arange(4, dtype=np.float32).reshape(shape), "model.w@0,0": np.float32([9])}
    here, _ = plan_world(layouts)
    [found] = files(here, fill(here, layouts, arrays)).values()
    assert {name: value.tolist() for name, value in found.items()} == {"w@0,0": [9.0], "w@0,0@": [[0.0, 1.0]]}


def test_two_replica_groups_store_one_copy():
    """F18: HSDP on two nodes, each with all shards: every region is stored once, both nodes write half, and the parts make one manifest."""
    shape = (8, MIB // 8)
    names = ["model.a", "model.b", "model.c", "model.d"]
    held = [{spec(name, shape): [rows(shape, *ends)] for name in names} | {spec("model.bias", (16,)): [whole((16,))]} for ends in chunks(8, 4)]
    layouts = world(*((group, of_rank) for group in range(2) for of_rank in held))
    node_plans = plan_world(layouts)
    arrays = {name: np.arange(at, MIB + at, dtype=np.float32).reshape(shape) for at, name in enumerate(names)} | {"model.bias": np.arange(16, dtype=np.float32)}
    parts = []
    for node, node_plan in enumerate(node_plans):
        parts.append(part_of(node_plan, fill(node_plan, layouts, arrays), node=node, nodes=2, world=8, ranks=tuple(range(4 * node, 4 * node + 4))))
    manifest = merge(parts)
    assert sum(shard.nbytes for shard in manifest.shards) == sum(array.nbytes for array in arrays.values())
    assert decode("manifest", encode("manifest", manifest), Manifest, key="k") == manifest
    by_node = [sum(placement.nbytes for placement in node_plan.plan.placements) for node_plan in node_plans]
    assert max(by_node) - min(by_node) <= 64
    loads = written(node_plans, layouts)
    assert max(loads) - min(loads) <= 64
    assert len(manifest.shards) == 5  # a node's shards of a tensor are one


# -- replicas -----------------------------------------------------------------------------------------------------------


def test_replicas_share_evenly():
    """DDP: of large tensors each replica writes equal rows, small ones go to whoever has least; one node's file has them whole."""
    held = {spec("model.big", (4096, 1000)): [whole((4096, 1000))]} | {spec(f"model.{i}", (1 + i % 50, 100)): [whole((1 + i % 50, 100))] for i in range(200)}
    layouts = world(*((0, held) for _ in range(4)))
    node_plans = plan_world(layouts)
    loads = written(node_plans, layouts)
    assert sum(loads) == 4 * sum(one.shape[0] * one.shape[1] for one in held)
    assert max(loads) - min(loads) <= 50 * 100 * 4
    assert {placement.region for placement in node_plans[0].plan.placements} == {whole(one.shape) for one in held}
    big = [copy.region.sizes for copies in node_plans[0].copies.values() for copy in copies if copy.tensor == 0]
    assert big == [(1024, 1000)] * 4


def test_who_has_more_of_its_own_gets_less():
    """A rank with shards of its own leaves what is replicated to the others."""
    mine = spec("model.mine", (1000,))
    held = {spec(f"model.{i}", (100,)): [whole((100,))] for i in range(10)}
    layouts = world((0, {mine: [whole((1000,))], **held}), (0, held), (0, held))
    assert written(plan_world(layouts), layouts) == [4000, 2000, 2000]


def test_replicas_on_nodes_keep_their_rows_together():
    """What each node writes of a replicated tensor is one box, so that it is one entry."""
    shape = (4096, 1024)
    layouts = world(*((rank // 3, {spec("model.w", shape): [whole(shape)]}) for rank in range(6)))
    node_plans = plan_world(layouts)
    assert [[placement.region for placement in node_plan.plan.placements] for node_plan in node_plans] == [[rows(shape, 0, 2048)], [rows(shape, 2048, 4096)]]


@pytest.mark.parametrize("shape", [(1, 4 * MIB), (2, 2 * MIB), (1, 3, 2 * MIB)])
def test_few_rows_are_cut_otherwise(shape):
    """A large tensor with fewer rows than replicas is cut along the first dimension that is long enough."""
    layouts = world(*((0, {spec("model.w", shape): [whole(shape)]}) for _ in range(4)))
    [node_plan] = plan_world(layouts)
    assert {copy.region.numel for copies in node_plan.copies.values() for copy in copies} == {np.prod(shape) // 4}
    assert [len(copies) for copies in node_plan.copies.values()] == [1] * 4
    assert [placement.region for placement in node_plan.plan.placements] == [whole(shape)]


def test_small_tensors_are_not_cut():
    """Below 1 MiB for each piece a replicated tensor is written by one rank."""
    layouts = world(*((0, {spec("model.w", (2 * MIB - 4,), "U8"): [whole((2 * MIB - 4,))]}) for _ in range(4)))
    [node_plan] = plan_world(layouts)
    assert sorted(map(len, node_plan.copies.values())) == [0, 0, 0, 1]


# -- contradictions -----------------------------------------------------------------------------------------------------

W = spec("model.w", (4, 2))
TOP, BOTTOM = rows((4, 2), 0, 2), rows((4, 2), 2, 4)
BAD_WORLDS = {
    "no ranks": ([], "without ranks"),
    "a node without ranks": (world((0, {W: [TOP]}), (2, {W: [BOTTOM]})), r"\[0, 2\]"),
    "other shapes": (world((0, {W: [TOP]}), (0, {spec("model.w", (4, 3)): [BOTTOM]})), r"'model\.w' is F32 \(4, 2\).* on rank 0 and F32 \(4, 3\).* on rank 1"),
    "other dtypes": (world((0, {W: [TOP]}), (0, {spec("model.w", (4, 2), "BF16"): [BOTTOM]})), r"F32.*rank 0.*BF16.*rank 1"),
    "other groups": (world((0, {W: [TOP]}), (0, {TensorSpec("model.w", "F32", (4, 2), "other"): [BOTTOM]})), r"of 'model' on rank 0 .* of 'other' on rank 1"),
    "held by nobody": (world((0, {W: [TOP]}), (0, {W: [rows((4, 2), 3, 4)]})), r"no rank holds \[2:3, 0:2\] of 'model\.w'.* rank 0, 1 lists"),
    "all empty": (world((0, {W: []}), (0, {W: [rows((4, 2), 4, 4)]})), r"no rank holds \[0:4, 0:2\] of 'model\.w'"),
    "overlap": (world((0, {W: [TOP]}), (0, {W: [rows((4, 2), 1, 4)]}), (0, {W: [TOP]})), r"\[0:2, 0:2\] \(rank 0, 2\) and \[1:4, 0:2\] \(rank 1\) of 'model\.w'"),
    "out of bounds": (world((0, {W: [TOP]}), (0, {W: [rows((4, 2), 2, 5)]})), r"rank 1 holds region \[2:5, 0:2\] of 'model\.w'"),
    "of other dimensions": (world((0, {W: [Region((0,), (4,))]})), r"rank 0 holds region \[0:4\] of 'model\.w'"),
    "twice in one rank": ([RankLayout(0, (HeldTensor(W, (TOP,)), HeldTensor(W, (BOTTOM,))), {})], r"'model\.w' occurs twice in the state of rank 0"),
    "an unknown dtype": (world((0, {spec("model.w", (4,), "C128"): [whole((4,))]})), r"'model\.w' has dtype 'C128'"),
    "an alias of nothing": (world((0, {W: [TOP, BOTTOM]}), aliases={"model.v": "model.u"}), r"'model\.v'.*'model\.u'"),
    "tied otherwise": ([RankLayout(0, (HeldTensor(W, (TOP, BOTTOM)),), {"v": "model.w"}), RankLayout(0, (), {"v": "model.u"})], r"'model\.w' on rank 0 and to 'model\.u' on rank 1"),
    "tied here only": ([RankLayout(0, (HeldTensor(W, (TOP, BOTTOM)),), {"model.v": "model.w"}), RankLayout(0, (HeldTensor(spec("model.v", ()), (whole(()),)),), {})],
                       r"'model\.v' is tied to 'model\.w' on rank 0 and a tensor of its own on rank 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_WORLDS)
def test_contradictions_are_named(name):
    """F17, F35: whatever ranks disagree about is a LayoutError that names the tensor, the regions and the ranks, before anything is written."""
    layouts, why = BAD_WORLDS[name]
    with pytest.raises(LayoutError, match=why):
        plan_world(layouts)


# -- large worlds -------------------------------------------------------------------------------------------------------


def test_four_thousand_ranks():
    """F37: 4,096 ranks on 512 nodes with a shard each of a few tensors: every node's eight shards are one entry, and together they are everything."""
    specs = [spec(f"model.{number}", (8192, 4), "BF16") for number in range(3)]
    layouts = [RankLayout(rank // 8, tuple(HeldTensor(one, (rows(one.shape, 2 * rank, 2 * rank + 2),)) for one in specs), {}) for rank in range(4096)]
    node_plans = plan_world(layouts)
    assert len(node_plans) == 512
    for node, node_plan in enumerate(node_plans):
        assert [placement.region for placement in node_plan.plan.placements] == [rows((8192, 4), 16 * node, 16 * node + 16)] * 3
        assert [len(copies) for copies in node_plan.copies.values()] == [3] * 8
    names = [file.name for node_plan in node_plans for file in node_plan.plan.files]
    assert len(set(names)) == 512
    assert len({node_plan.plan.id for node_plan in node_plans}) == 512


def test_merging_goes_on_until_nothing_fits():
    """Columns merge to rows and rows to blocks; what is left keeps its order."""
    cells = [Region((row, column), (1, 1)) for row in (0, 1, 3) for column in (0, 1, 2)]
    assert merge_boxes(cells[::-1]) == [Region((0, 0), (2, 3)), Region((3, 0), (1, 3))]
    assert merge_boxes(cells[:1] + cells[4:5]) == [cells[0], cells[4]]
    upright, far = Region((0, 1), (2, 1)), Region((5, 5), (1, 1))
    assert merge_boxes([Region((0, 0), (1, 1)), upright, Region((1, 0), (1, 1)), far]) == [Region((0, 0), (2, 2)), far]


def test_plans_tell_themselves_over_a_wire():
    """A node's plan and copies are plain values for msgpack."""
    node_plans = plan_world(world((0, {W: [TOP]}), (1, {W: [BOTTOM]})))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(node_plans), type=list[type(node_plans[0])]) == node_plans
