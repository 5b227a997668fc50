"""What a restore reads: whole digest blocks, whatever their size, and which reads are told to be shared with the node's other ranks."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch

from everystep.agent.peers import ranges_to_verify
from everystep.errors import CorruptionError
from everystep.layout import HeldTensor, RankLayout, plan_world
from everystep.manifest import Part, Shard, StoredObject, TensorSpec, block_digests, digest, merge
from everystep.plan import Fetch, plan_save, slab_part
from everystep.region import Region, whole
from everystep.trainer.reading import ManifestReader
from everystep.trainer.restoring import Wanted

ROWS, COLUMNS = 3 << 10, 1 << 10  # 12 MiB of F32: three digest blocks
MANIFEST_VALUES = b"{}"


@dataclasses.dataclass
class Slab:
    """A source that notes which reads were told to be shared."""

    data: memoryview
    begin: int
    told: list[bool]
    direct: bool = False

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        assert self.direct
        view[:] = self.data[self.begin + offset : self.begin + offset + len(view)]

    def bytes_of(self, fetch: Fetch, *, shared: bool = False) -> memoryview:
        self.told.append(shared)
        return memoryview(bytearray(self.data[self.begin + fetch.offset : self.begin + fetch.offset + fetch.nbytes]))

    def release(self, view: memoryview) -> None:
        pass


@pytest.mark.parametrize(
    ("neighbours", "rows", "shared"),
    [
        (0, None, False),
        (0, (0, ROWS // 2), False),
        (1, None, True),
        (1, (0, ROWS // 3), False),
        (1, (0, ROWS // 2), False),
        (1, (600, 1000), True),
        (7, (ROWS // 8, ROWS // 8), True),
    ],
)
def test_only_what_neighbours_want_too_is_shared(neighbours: int, rows: tuple[int, int] | None, shared: bool) -> None:
    """Alone on its node a rank shares nothing; with neighbours, replicas and shares of which much more is read than is wanted."""
    plan = plan_save([TensorSpec("model.w", "F32", (ROWS, COLUMNS), "model")], aliases={})
    slab = bytearray(plan.nbytes)
    [placement], [file] = plan.placements, plan.files
    stored = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    view = memoryview(slab)
    view[placement.slab_offset : placement.slab_offset + placement.nbytes] = stored.numpy().tobytes()
    manifest = merge([slab_part(
        plan, step=1, attempt=1, node=0, nodes=1, saved_at=0.0, values=MANIFEST_VALUES, metrics={}, world=1, ranks=(0,), by_rank={},
        object_key={file.name: file.name}, header_digests=[digest(file.header)],
        digests=[block_digests(view[placement.slab_offset : placement.slab_offset + placement.nbytes])],
    )])  # fmt: skip
    source = Slab(view, file.slab_offset, [])
    region = None if rows is None else Region((rows[0], 0), (rows[1], COLUMNS))
    target = torch.zeros((ROWS, COLUMNS) if rows is None else (rows[1], COLUMNS))
    ManifestReader(manifest, source, threads=1, neighbours=neighbours).read([Wanted("model.w", target, region)])
    assert torch.equal(target, stored if rows is None else stored[rows[0] : rows[0] + rows[1]])
    assert set(source.told) == {shared}


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_of_another_size_are_verified(direct: bool) -> None:
    """Two ranks' rows of 6 MiB have blocks of 3 MiB: each rank reads its own ones and finds a byte that is wrong in any of them."""
    layout = TensorSpec("model.w", "F32", (ROWS, COLUMNS), "model")
    held = [HeldTensor(layout, (Region((begin, 0), (ROWS // 2, COLUMNS)),)) for begin in (0, ROWS // 2)]
    [node_plan] = plan_world([RankLayout(0, (one,), {}) for one in held])
    plan = node_plan.plan
    [placement], [file] = plan.placements, plan.files
    assert placement.block == 3 << 20
    stored = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    view = memoryview(bytearray(plan.nbytes))
    view[placement.slab_offset : placement.slab_offset + placement.nbytes] = stored.numpy().tobytes()
    manifest = merge([slab_part(
        plan, step=1, attempt=1, node=0, nodes=1, saved_at=0.0, values=MANIFEST_VALUES, metrics={}, world=2, ranks=(0, 1), by_rank={},
        object_key={file.name: file.name}, header_digests=[digest(file.header)],
        digests=[block_digests(view[placement.slab_offset : placement.slab_offset + placement.nbytes], placement.block)],
    )])  # fmt: skip
    for rank, one in enumerate(held):
        [region] = one.regions
        target = torch.zeros(region.sizes)
        reader = ManifestReader(manifest, Slab(view, file.slab_offset, [], direct=direct), threads=1, rank=rank, neighbours=1)
        reader.read([Wanted("model.w", target, region)])
        assert torch.equal(target, stored[region.offsets[0] : region.offsets[0] + ROWS // 2])
        assert reader.nbytes == target.nbytes
        for at in (1 << 20, 5 << 20):
            spoiled = placement.slab_offset + rank * (6 << 20) + at
            view[spoiled] ^= 1
            with pytest.raises(CorruptionError, match=r"model\.w"):
                reader.read([Wanted("model.w", target, region)])
            view[spoiled] ^= 1


def test_copies_for_other_nodes_are_verified_by_their_blocks() -> None:
    """What a peer's part says of blocks decides which bytes each digest is of; sizes that no reader takes are refused."""
    data = memoryview(bytearray(range(256)) * 64)
    shard = Shard(0, whole((len(data),)), 0, 4096, len(data), block_digests(data, 6000), 6000)
    part = part_with(shard, len(data))
    expected = [(0, 4096, "0" * 32), *((4096 + at, min(6000, len(data) - at), digest(data[at : at + 6000])) for at in range(0, len(data), 6000))]
    assert sorted(ranges_to_verify(part, (0,))) == sorted(expected)
    for block in (-1, 5 << 20):
        with pytest.raises(CorruptionError):
            list(ranges_to_verify(part_with(Shard(0, shard.region, 0, 4096, len(data), ("0" * 32,), block), len(data)), (0,)))


def part_with(shard: Shard, nbytes: int) -> Part:
    return Part(step=1, attempt=1, node=0, nodes=1, saved_at=0.0, tensors=(TensorSpec("g.w", "U8", (nbytes,), "g"),), aliases={},
                objects=(StoredObject("data/w", 4096 + nbytes, 4096, "0" * 32),), shards=(shard,), values=msgspec.Raw(b"{}"))  # fmt: skip
