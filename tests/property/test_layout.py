"""Any mesh and placement into any other: a simulated world saves into slabs, and each rank of another world gets what it wants from them."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from everystep import layout as layouts
from everystep import manifest as manifests
from everystep import plan as plans
from everystep.layout import HeldTensor, RankLayout, merge_boxes, plan_world
from everystep.manifest import Manifest, Part, TensorSpec, block_digests, decode, digest, document_of_rank, encode, join_documents, merge
from everystep.plan import place, plan_restore, slab_part
from everystep.region import Region, whole
from everystep.safetensors import our_entries, parse

DTYPES = {"U8": np.uint8, "F32": np.float32, "I64": np.int64}


@pytest.fixture(autouse=True, params=[(8, 32), (1 << 20, 4 << 20)], ids=["small", "as it is"])
def sizes(request, monkeypatch):
    """Once with such small limits that replicas share most tensors and shards have several digests, once as they are."""
    monkeypatch.setattr(layouts, "MIN_CUT_NBYTES", request.param[0])
    for module in (manifests, plans, layouts):
        monkeypatch.setattr(module, "BLOCK_NBYTES", request.param[1])
    monkeypatch.setattr(layouts, "MIN_BLOCK_NBYTES", min(layouts.MIN_BLOCK_NBYTES, request.param[0]))


def box_of(array, region):
    return array[(*(slice(a, a + n) for a, n in zip(region.offsets, region.sizes, strict=True)), ...)]  # a view, also of a 0-dim array


@st.composite
def cuts(draw, box):
    """A box cut again and again along any dimension: boxes that cover it once, empty ones among them."""
    if draw(st.booleans()) or not box.sizes:
        return [box]
    dim = draw(st.integers(0, len(box.sizes) - 1))
    at = draw(st.integers(0, box.sizes[dim]))
    first = Region(box.offsets, (*box.sizes[:dim], at, *box.sizes[dim + 1 :]))
    second = Region((*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :]), (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :]))
    return draw(cuts(first)) + draw(cuts(second))


@st.composite
def meshes(draw, box):
    """A box cut into a grid as torch cuts: chunks of equal size in each dimension, the last ones smaller or empty."""
    found = [box]
    for dim, size in enumerate(box.sizes):
        count = draw(st.integers(1, 4))
        chunk = max(1, -(-size // count))
        ends = [min(size, chunk * number) for number in range(count)] + [size]
        found = [
            Region((*one.offsets[:dim], ends[number], *one.offsets[dim + 1 :]), (*one.sizes[:dim], ends[number + 1] - ends[number], *one.sizes[dim + 1 :]))
            for one in found
            for number in range(count)
        ]
    return found


@st.composite
def holdings(draw, shape, world):
    """By rank the regions it holds of a tensor, None where it does not list it. Each region has one holder, all, or any."""
    regions = draw(cuts(whole(shape)) | meshes(whole(shape)))
    kind = draw(st.sampled_from(["one each", "replica groups", "any"]))
    held = [[] for _ in range(world)]
    groups = draw(st.integers(1, world))
    for number, region in enumerate(regions):
        if kind == "one each":
            ranks = [number % world]
        elif kind == "replica groups":
            ranks = [rank for rank in range(world) if rank % groups == number % groups]
        else:
            ranks = draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
        for rank in ranks:
            held[rank].append(region)
    listed = draw(st.lists(st.booleans(), min_size=world, max_size=world))
    anywhere = any(held)
    return [tuple(regions) if regions or listed[rank] or not anywhere else None for rank, regions in enumerate(held)]


@st.composite
def worlds(draw, max_ranks=5):
    """(node of each rank, arrays, by name who holds what)."""
    nodes = draw(st.integers(1, 3))
    node_of = draw(st.permutations([*range(nodes), *draw(st.lists(st.integers(0, nodes - 1), max_size=max_ranks - nodes))]))
    arrays, held = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        name = f"{draw(st.sampled_from(['model', 'optim']))}.{number}"
        numel = int(np.prod(shape, dtype=int))
        arrays[name] = np.arange(1 + 1000 * number, 1 + 1000 * number + numel).astype(DTYPES[draw(st.sampled_from(sorted(DTYPES)))]).reshape(shape)
        held[name] = draw(holdings(shape, len(node_of)))
    return node_of, arrays, held


WORD = {np.dtype(kind): word for word, kind in DTYPES.items()}


def layouts_of(node_of, arrays, held):
    """What each rank sends to be planned; every second rank lists its tensors the other way round."""
    found = []
    for rank, node in enumerate(node_of):
        mine = [
            HeldTensor(TensorSpec(name, WORD[array.dtype], array.shape, name.split(".")[0]), held[name][rank])
            for name, array in arrays.items()
            if held[name][rank] is not None
        ]
        found.append(RankLayout(node, tuple(mine[:: 1 - 2 * (rank % 2)]), {}))
    return found


def fill(node_plans, told, arrays):
    """The slabs as all ranks leave them. Each copy is of what the rank holds, inside its placement, and no element comes twice."""
    slabs = []
    for node_plan in node_plans:
        plan = node_plan.plan
        slab = np.full(plan.nbytes, 0xEE, np.uint8)
        for file in plan.files:
            slab[file.slab_offset : file.slab_offset + len(file.header)] = np.frombuffer(file.header, np.uint8)
        counts = [np.zeros(placement.region.sizes, int) for placement in plan.placements]
        for rank, copies in node_plan.copies.items():
            assert [copy.placement for copy in copies] == sorted(copy.placement for copy in copies)
            for copy in copies:
                of_rank, placement = told[rank].tensors[copy.tensor], plan.placements[copy.placement]
                assert of_rank.spec == plan.tensors[placement.tensor]
                assert any(region.intersect(copy.region) == copy.region for region in of_rank.regions)
                assert placement.region.intersect(copy.region) == copy.region
                array = arrays[of_rank.spec.name]
                typed = slab[placement.slab_offset : placement.slab_offset + placement.nbytes].view(array.dtype).reshape(placement.region.sizes)
                inside = copy.region.relative_to(placement.region.offsets)
                box_of(typed, inside)[...] = box_of(array, copy.region)
                box_of(counts[copy.placement], inside)[...] += 1
        assert all((count == 1).all() for count in counts)
        slabs.append(bytes(slab))
    return slabs


def parts_of(node_plans, slabs, node_of, documents):
    parts = []
    for node, (node_plan, slab) in enumerate(zip(node_plans, slabs, strict=True)):
        plan, view = node_plan.plan, memoryview(slab)
        ranks = tuple(rank for rank, of in enumerate(node_of) if of == node)
        assert node_plan.copies.keys() == set(ranks)
        values, by_rank = join_documents({rank: documents[rank] for rank in ranks})
        part = slab_part(
            plan, step=1, attempt=1, node=node, nodes=len(node_plans), saved_at=0.0, values=values, metrics={}, object_key={file.name: f"data/x/{file.name}" for file in plan.files},
            digests=[block_digests(view[p.slab_offset : p.slab_offset + p.nbytes], p.block) for p in plan.placements], header_digests=[digest(file.header) for file in plan.files],
            world=len(node_of), ranks=ranks, by_rank=by_rank, shared=True,
        )  # fmt: skip
        parts.append(decode("part", encode("part", part), Part, key="k"))
        assert parts[-1] == part
    return parts


def restore(manifest, objects, wanted, arrays, fetch_nbytes):
    """What a consumer does: read by the plan, verify, place."""
    targets = [np.full(region.sizes, 77, arrays[name].dtype) for name, region in wanted]
    counts = [np.zeros(region.sizes, int) for _, region in wanted]
    for fetch in plan_restore(manifest, wanted, fetch_nbytes=fetch_nbytes).fetches:
        data = objects[manifest.objects[fetch.object].key][fetch.offset : fetch.offset + fetch.nbytes]
        for piece in fetch.pieces:
            of_piece = data[piece.at : piece.at + piece.end - piece.begin]
            assert block_digests(memoryview(of_piece), manifest.shards[piece.shard].block) == piece.digests(manifest)
            for copy in place(manifest, piece, wanted):
                box = np.frombuffer(of_piece[copy.offset : copy.offset + copy.nbytes], targets[copy.target].dtype).reshape(copy.sizes)
                box_of(targets[copy.target], copy.destination)[...] = box_of(box, copy.source)
                box_of(counts[copy.target], copy.destination)[...] += 1
    return targets, counts


def files_of(node_plans, slabs):
    return {
        f"data/x/{file.name}": slab[file.slab_offset : file.slab_offset + file.nbytes]
        for node_plan, slab in zip(node_plans, slabs, strict=True)
        for file in node_plan.plan.files
    }


@given(worlds(), st.data())
def test_any_world_into_any_other(world, data):
    """F11, F12, F13, F14, F15, F18: every element is stored once whatever the ranks hold, and any other world gets from it what it wants, bit by bit."""
    node_of, arrays, held = world
    told = layouts_of(node_of, arrays, held)
    node_plans = plan_world(told, max_file_nbytes=data.draw(st.sampled_from([1, 10_000, 1 << 30])))
    slabs = fill(node_plans, told, arrays)
    documents = [b'{"state":{"dict":[["a",{"value":%d}]]}}' % (rank % 2) for rank in range(len(node_of))]
    parts = parts_of(node_plans, slabs, node_of, documents)
    manifest = merge(parts)
    record = encode("manifest", manifest)
    assert encode("manifest", merge(data.draw(st.permutations(parts)))) == record
    manifest = decode("manifest", record, Manifest, key="k")
    assert [document_of_rank(manifest, rank) for rank in range(len(node_of))] == documents
    assert sum(shard.nbytes for shard in manifest.shards) == sum(array.nbytes for array in arrays.values())

    objects = files_of(node_plans, slabs)
    new_world = data.draw(st.integers(1, 5))
    for ranks in zip(*(data.draw(holdings(array.shape, new_world)) for array in arrays.values()), strict=True):
        wanted = [(name, region) for name, regions in zip(arrays, ranks, strict=True) for region in regions or ()]
        for (name, region), target, count in zip(wanted, *restore(manifest, objects, wanted, arrays, data.draw(st.integers(1, 200))), strict=True):
            assert target.tobytes() == box_of(arrays[name], region).tobytes()
            assert (count == 1).all()


@given(worlds())
def test_files_say_what_is_in_them(world):
    """F4: the safetensors package opens every node's files, and our note in them tells each entry's region; on one node all are whole tensors under their own names."""
    node_of, arrays, held = world
    told = layouts_of(node_of, arrays, held)
    node_plans = plan_world(told)
    nodes = len(node_plans)
    seen = {name: np.zeros(array.shape, int) for name, array in arrays.items()}
    for key, data in files_of(node_plans, fill(node_plans, told, arrays)).items():
        loaded = safetensors.numpy.load(data)
        stored, _ = our_entries(parse(data, len(data)))
        assert stored.keys() == loaded.keys()
        for entry, known in stored.items():
            assert loaded[entry].dtype == arrays[known.name].dtype
            assert loaded[entry].tobytes() == box_of(arrays[known.name], known.region).tobytes()
            box_of(seen[known.name], known.region)[...] += 1
            if known.region.sizes == known.shape:
                assert entry == known.name.split(".")[1]
            else:
                assert entry == f"{known.name.split('.')[1]}@{','.join(map(str, known.region.offsets))}"
            if nodes == 1:
                assert known.region.sizes == known.shape
        assert ("-n0000" in key) == (nodes > 1)
    assert all((count == 1).all() for count in seen.values())


@given(worlds())
def test_plans_are_values(world):
    """Equal layouts give equal plans, also when they came over a wire."""
    told = layouts_of(*world)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=list[RankLayout])
    assert again == told
    assert plan_world(again) == plan_world(told)
    sent = plan_world(told)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=list[layouts.NodePlan]) == sent


@given(st.data())
def test_merged_boxes_have_the_same_elements(data):
    """Boxes that are merged cover the same elements once, are no more than before, and are one where they fill one."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    regions = [region for region in data.draw(cuts(whole(shape)) | meshes(whole(shape))) if region.numel]
    some = data.draw(st.lists(st.sampled_from(regions), min_size=1, unique=True))
    expected, found = np.zeros(shape, int), np.zeros(shape, int)
    for region in some:
        box_of(expected, region)[...] += 1
    merged = merge_boxes(some)
    for region in merged:
        box_of(found, region)[...] += 1
    assert (found == expected).all()
    assert len(merged) <= len(some)
    assert merged == sorted(merged, key=lambda region: region.offsets)
    assert all(any(box.intersect(region) == region for box in merged) for region in some)
    assert merge_boxes(regions) == [whole(shape)]


keys = st.text(max_size=4) | st.integers()
entries = st.dictionaries(keys, st.integers(0, 2), max_size=4)


@given(st.lists(entries, min_size=1, max_size=5), st.data())
def test_documents_of_many_ranks_come_back(states, data):
    """F16: however they are spread over nodes, each rank's document comes back with its own entries; what all share is there once."""
    documents = [json.dumps({"state": {"dict": [[key, {"value": value}] for key, value in state.items()]}}, separators=(",", ":")).encode() for state in states]
    world = len(states)
    nodes = data.draw(st.integers(1, world))
    node_of = data.draw(st.permutations([*range(nodes), *data.draw(st.lists(st.integers(0, nodes - 1), min_size=world - nodes, max_size=world - nodes))]))
    parts = []
    for node in range(nodes):
        ranks = tuple(rank for rank in range(world) if node_of[rank] == node)
        values, by_rank = join_documents({rank: documents[rank] for rank in ranks})
        part = Part(step=1, attempt=1, node=node, nodes=nodes, saved_at=0.0, tensors=(), objects=(), shards=(), aliases={}, values=msgspec.Raw(values), world=world, ranks=ranks, by_rank=by_rank)
        parts.append(decode("part", encode("part", part), Part, key="k"))
        assert all(told(document_of_rank(parts[-1], rank)) == told(documents[rank]) for rank in ranks)
    manifest = merge(data.draw(st.permutations(parts)))
    assert bytes(manifest.values) == documents[0]
    for rank in range(3 * world):
        assert told(document_of_rank(manifest, rank)) == told(documents[rank % world])
    values, by_rank = join_documents(dict(enumerate(documents)))
    assert (values, {rank: bytes(pairs) for rank, pairs in by_rank.items()}) == (documents[0], {rank: bytes(pairs) for rank, pairs in manifest.by_rank.items()})
    assert by_rank.keys() == {rank for rank in range(world) if told(documents[rank]) != told(documents[0])}


def told(document):
    return {json.dumps(key): child for key, child in json.loads(document)["state"]["dict"]}
