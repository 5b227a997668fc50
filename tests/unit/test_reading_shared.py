"""Which reads of a restore are told to be shared with the node's other ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from everystep.manifest import TensorSpec, block_digests, digest, merge
from everystep.plan import Fetch, plan_save, slab_part
from everystep.region import Region
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
        raise AssertionError("not for a source that is not direct")

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
