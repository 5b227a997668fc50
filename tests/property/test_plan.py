"""Any layout into any other: bytes laid out by one set of regions and restored into another are the full tensor."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep import manifest as manifests
from everystep import plan as plans
from everystep.manifest import Part, Shard, StoredObject, TensorSpec, block_digests, merge
from everystep.plan import place, plan_restore, plan_save
from everystep.region import Region, whole

DTYPES = {"U8": np.uint8, "F32": np.float32, "I64": np.int64}


@pytest.fixture(autouse=True, params=[32, 4 << 20])
def block_nbytes(request, monkeypatch):
    """Once with blocks so small that most shards have several, once as they are."""
    monkeypatch.setattr(manifests, "BLOCK_NBYTES", request.param)
    monkeypatch.setattr(plans, "BLOCK_NBYTES", request.param)


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
def any_region(draw, shape):
    offsets = [draw(st.integers(0, size)) for size in shape]
    return Region(tuple(offsets), tuple(draw(st.integers(0, size - a)) for a, size in zip(offsets, shape, strict=True)))


def box_of(array, region):
    return array[(*(slice(a, a + n) for a, n in zip(region.offsets, region.sizes, strict=True)), ...)]  # a view, also of a 0-dim array


@st.composite
def checkpoints(draw):
    """Some tensors, each cut into shards that lie anywhere in some nodes' files; (manifest, objects' bytes, arrays)."""
    nodes = draw(st.integers(1, 3))
    arrays = {}
    files = [bytearray(draw(st.binary(min_size=8, max_size=8))) for _ in range(nodes)]
    told = [([], []) for _ in range(nodes)]
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        name = f"g.{number}"
        numel = int(np.prod(shape, dtype=int))
        arrays[name] = np.arange(1 + 1000 * number, 1 + 1000 * number + numel).astype(DTYPES[dtype]).reshape(shape)
        for region in draw(cuts(whole(shape))):
            node = draw(st.integers(0, nodes - 1))
            tensors, shards = told[node]
            spec = TensorSpec(name, dtype, shape, "g")
            if spec not in tensors:
                tensors.append(spec)
            if region.numel == 0 and numel:
                continue
            files[node] += b"\xee" * draw(st.integers(0, 3))
            data = box_of(arrays[name], region).tobytes()
            block = draw(st.integers(0, 4)) * np.dtype(DTYPES[dtype]).itemsize
            shards.append(Shard(tensors.index(spec), region, 0, len(files[node]), len(data), block_digests(memoryview(data), block), block))
            files[node] += data
    parts = [
        Part(step=1, attempt=1, node=node, nodes=nodes, saved_at=0.0, tensors=tuple(tensors), objects=(StoredObject(f"data/{node}", len(files[node]), 8, "0" * 32),),
             shards=tuple(shards), aliases={}, values=msgspec.Raw(b"{}"), world=nodes, ranks=(node,))
        for node, (tensors, shards) in enumerate(told)
    ]  # fmt: skip
    return parts, [bytes(data) for data in files], arrays


def restore(manifest, objects, wanted, arrays, **limits):
    """Read by the plan, verify, place by ``place``: what a consumer does, with byte arrays; both the flat way and the boxes."""
    targets = [np.full(region.sizes, 77, arrays[name].dtype) for name, region in wanted]
    counts = [np.zeros(region.sizes, int) for _, region in wanted]
    flats = [bytearray(target.tobytes()) for target in targets]
    plan = plan_restore(manifest, wanted, **limits)
    for fetch in plan.fetches:
        data = objects[fetch.object][fetch.offset : fetch.offset + fetch.nbytes]
        assert len(data) == fetch.nbytes
        for piece in fetch.pieces:
            piece_data = data[piece.at : piece.at + piece.end - piece.begin]
            assert block_digests(memoryview(piece_data), manifest.shards[piece.shard].block) == piece.digests(manifest)
            for copy in place(manifest, piece, wanted):
                target = targets[copy.target]
                box = np.frombuffer(piece_data[copy.offset : copy.offset + copy.nbytes], target.dtype).reshape(copy.sizes)
                box_of(target, copy.destination)[...] = box_of(box, copy.source)
                box_of(counts[copy.target], copy.destination)[...] += 1
                if copy.flat is None:
                    flats[copy.target] = None
                elif flats[copy.target] is not None:
                    begin = copy.offset + copy.run_offset
                    flats[copy.target][copy.flat : copy.flat + copy.run_nbytes] = piece_data[begin : begin + copy.run_nbytes]
    return plan, targets, counts, flats


@given(checkpoints(), st.data(), st.integers(1, 200), st.integers(0, 40))
def test_any_layout_into_any_other(checkpoint, data, fetch_nbytes, gap_nbytes):
    """F11, F12, F13, F15: whatever regions were saved and whatever are wanted, each wanted element comes exactly once and is right, however reads are cut."""
    parts, objects, arrays = checkpoint
    manifest = merge(parts)
    wanted = []
    for name, array in arrays.items():
        wanted += [(name, region) for region in data.draw(cuts(whole(array.shape)))]
        wanted.append((name, data.draw(any_region(array.shape))))
    wanted = data.draw(st.permutations(wanted))
    plan, targets, counts, flats = restore(manifest, objects, wanted, arrays, fetch_nbytes=fetch_nbytes, gap_nbytes=gap_nbytes)
    for (name, region), target, count, flat in zip(wanted, targets, counts, flats, strict=True):
        expected = box_of(arrays[name], region)
        assert np.array_equal(target, expected)
        assert (count == 1).all()
        if flat is not None:
            assert bytes(flat) == expected.tobytes()
    limit = max(fetch_nbytes, manifests.BLOCK_NBYTES)
    assert all(fetch.nbytes <= limit for fetch in plan.fetches)
    assert plan.nbytes == sum(fetch.nbytes for fetch in plan.fetches)
    order = [(fetch.object, fetch.offset) for fetch in plan.fetches]
    assert order == sorted(order)


@given(checkpoints(), st.data())
def test_only_needed_shards_are_read(checkpoint, data):
    """No piece is of a shard that shares no element with the wanted region, and pieces are whole digest blocks."""
    parts, _, arrays = checkpoint
    manifest = merge(parts)
    name = data.draw(st.sampled_from(sorted(arrays)))
    region = data.draw(any_region(arrays[name].shape))
    plan = plan_restore(manifest, [(name, region)])
    for fetch in plan.fetches:
        for piece in fetch.pieces:
            shard = manifest.shards[piece.shard]
            assert manifest.tensors[shard.tensor].name == name
            assert region.intersect(shard.region) is not None
            assert piece.begin % shard.block_nbytes == 0
            assert piece.end == shard.nbytes or piece.end % shard.block_nbytes == 0


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
specs = st.lists(
    st.builds(lambda group, inner, dtype, shape: TensorSpec(f"{group}.{inner}", dtype, tuple(shape), group), names, names, st.sampled_from(sorted(DTYPES)),
              st.lists(st.integers(0, 20), max_size=3)),
    max_size=12, unique_by=lambda spec: spec.name,
)  # fmt: skip


@given(specs, st.integers(1, 30_000))
def test_a_save_plan_places_everything_once(tensors, max_file_nbytes):
    """Every tensor has one place of its size, inside its group's file, overlapping nothing; no two files share a name."""
    plan = plan_save(tensors, aliases={}, max_file_nbytes=max_file_nbytes)
    assert sorted(placement.tensor for placement in plan.placements) == list(range(len(tensors)))
    assert len({file.name.lower() for file in plan.files}) == len(plan.files)
    taken = [(file.slab_offset, file.slab_offset + len(file.header)) for file in plan.files]
    for placement in plan.placements:
        spec, file = tensors[placement.tensor], plan.files[placement.file]
        assert file.group == spec.group
        assert placement.region == whole(spec.shape)
        assert placement.nbytes == int(np.prod(spec.shape, dtype=int)) * np.dtype(DTYPES[spec.dtype]).itemsize
        assert file.slab_offset + len(file.header) <= placement.slab_offset
        assert placement.slab_offset + placement.nbytes <= file.slab_offset + file.nbytes <= plan.nbytes
        if placement.nbytes:
            taken.append((placement.slab_offset, placement.slab_offset + placement.nbytes))
    taken.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
