"""Compare two checkpoints tensor by tensor; the one command module that computes with torch, and imports it only when it runs.

Tensors whose shards have equal digests are equal and are not read. Of the others both sides are in memory at once, one tensor at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from everystep.cli.plain import flatten, tell
from everystep.manifest import Manifest, TensorSpec

if TYPE_CHECKING:
    import torch

    from everystep.trainer.reading import ManifestReader

__all__ = ["Difference", "Numbers", "compare_tensors", "compare_values", "numbers"]

CHUNK = 1 << 22
"""Elements compared at once: bounds what the arithmetic in double precision takes."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """How far two tensors of one shape and dtype are apart."""

    count: int
    """Elements whose bytes differ."""
    elements: int
    max_abs: float
    """Largest absolute difference; infinite where one side is NaN and the other is not."""
    max_rel: float
    """Largest absolute difference over the larger magnitude of the two elements."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One tensor that is not the same on both sides. ``what``: only-in-a, only-in-b, dtype, shape, or content (then with numbers)."""

    name: str
    what: str
    a: str
    b: str
    numbers: Numbers | None = None


def compare_tensors(
    a: Manifest, b: Manifest, read_a: ManifestReader, read_b: ManifestReader, *, on_bytes: Callable[[int], None]
) -> Iterator[Difference]:
    """Every tensor that differs, by name; tied names are compared under each of their names."""
    digests_a, digests_b = _digests(a), _digests(b)
    for name in sorted({*read_a.tensors, *read_b.tensors}):
        one, other = read_a.tensors.get(name), read_b.tensors.get(name)
        if one is None or other is None:
            yield Difference(name, "only-in-b" if one is None else "only-in-a", _spec(one), _spec(other))
            continue
        nbytes = sum(part[1] for part in digests_a[one.name])
        if one.dtype != other.dtype or one.shape != other.shape:
            yield Difference(name, "dtype" if one.shape == other.shape else "shape", _spec(one), _spec(other))
        elif digests_a[one.name] != digests_b[other.name]:
            found = numbers(_read(read_a, name, one), _read(read_b, name, other))
            if found.count:
                yield Difference(name, "content", _spec(one), _spec(other), found)
        on_bytes(nbytes)


def numbers(a: torch.Tensor, b: torch.Tensor) -> Numbers:
    """Compare two tensors of equal shape and dtype, by bytes and by value."""
    import torch

    count, max_abs, max_rel = 0, 0.0, 0.0
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for begin in range(0, flat_a.numel(), CHUNK):
        one, other = flat_a[begin : begin + CHUNK], flat_b[begin : begin + CHUNK]
        bytes_a, bytes_b = one.view(torch.uint8).view(one.numel(), -1), other.view(torch.uint8).view(one.numel(), -1)
        unequal = (bytes_a != bytes_b).any(dim=1)
        changed = int(unequal.sum())
        if not changed:
            continue
        count += changed
        wide = torch.complex128 if a.dtype.is_complex else torch.float64
        x, y = one[unequal].to(wide), other[unequal].to(wide)
        distance = (x - y).abs()
        size = torch.maximum(x.abs(), y.abs())
        relative = torch.where(distance == 0, torch.zeros_like(distance), distance / size)
        # Both NaN with other bits, or the same infinity: no distance. One NaN: as far as can be.
        both = (x.isnan() & y.isnan()) | (x == y)
        distance = torch.where(both, torch.zeros_like(distance), torch.nan_to_num(distance, nan=math.inf, posinf=math.inf))
        relative = torch.where(both, torch.zeros_like(relative), torch.nan_to_num(relative, nan=math.inf, posinf=math.inf))
        max_abs, max_rel = max(max_abs, float(distance.max())), max(max_rel, float(relative.max()))
    return Numbers(count, flat_a.numel(), max_abs, max_rel)


def compare_values(a: Manifest, b: Manifest) -> list[tuple[str, object, object]]:
    """Plain values that differ: (path, value in a or None, value in b or None), as they are shown."""
    one, other = flatten(bytes(a.values)), flatten(bytes(b.values))
    absent = object()
    changed = [path for path in sorted({*one, *other}) if not _same(one.get(path, absent), other.get(path, absent))]
    return [(path, tell(one.get(path)), tell(other.get(path))) for path in changed]


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b  # stored JSON: NaN is a tagged text there, and 1, 1.0 and True are not the same


def _digests(manifest: Manifest) -> dict[str, list[tuple[object, int, int, tuple[str, ...]]]]:
    found: dict[str, list[tuple[object, int, int, tuple[str, ...]]]] = {spec.name: [] for spec in manifest.tensors}
    for shard in sorted(manifest.shards, key=lambda shard: (shard.tensor, shard.region.offsets)):
        found[manifest.tensors[shard.tensor].name].append((shard.region, shard.nbytes, shard.block, shard.digests))
    return found


def _read(reader: ManifestReader, name: str, spec: TensorSpec) -> torch.Tensor:
    import torch

    from everystep.foreign.dtypes import DTYPES
    from everystep.trainer.restoring import Wanted

    tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    reader.read([Wanted(name, tensor)])
    return tensor


def _spec(spec: TensorSpec | None) -> str:
    return "" if spec is None else f"{spec.dtype}[{'x'.join(map(str, spec.shape))}]"
