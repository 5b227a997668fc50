"""Small but complete checkpoints to test repositories with; made without the code that plans and hashes real ones."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import xxhash

from everystep.manifest import Manifest, Part, Shard, StoredObject, TensorSpec, merge
from everystep.region import Region
from everystep.repository import CheckpointKey, Repository

__all__ = ["FILE_NAME", "payload", "persist", "sample_part"]

FILE_NAME = "model-00001-of-00001.safetensors"
HEADER_NBYTES = 64
TENSOR_NBYTES = 100


def payload(key: CheckpointKey) -> bytes:
    """The data file of a checkpoint: a header that is none, then tensors ``model.a`` and ``model.b`` of 25 float32 each."""
    return b"h" * HEADER_NBYTES + bytes([key.step % 251]) * TENSOR_NBYTES + bytes([key.attempt % 251]) * TENSOR_NBYTES


def sample_part(
    key: CheckpointKey, *, base: CheckpointKey | None = None, metrics: Mapping[str, float] | None = None, node: int = 0, nodes: int = 1
) -> Part:
    """A node's part. ``model.a`` lies in the checkpoint's own file, ``model.b`` there too or, unchanged, in the file of ``base``."""
    objects, shards = [], []
    for number, (owner, offset) in enumerate(((key, HEADER_NBYTES), (base or key, HEADER_NBYTES + TENSOR_NBYTES))):
        data = payload(owner)
        if number == 0 or base is not None:
            header_digest = xxhash.xxh3_128_hexdigest(data[:HEADER_NBYTES])
            objects.append(StoredObject(f"data/{owner}/{FILE_NAME}", len(data), HEADER_NBYTES, header_digest))
        found = xxhash.xxh3_128_hexdigest(data[offset : offset + TENSOR_NBYTES])
        shards.append(Shard(number, Region((0,), (25,)), len(objects) - 1, offset, TENSOR_NBYTES, (found,)))
    return Part(
        step=key.step, attempt=key.attempt, node=node, nodes=nodes, saved_at=1.0, objects=tuple(objects), shards=tuple(shards),
        tensors=tuple(TensorSpec(f"model.{name}", "F32", (25,), "model") for name in "ab"), aliases={}, values=msgspec.Raw(b"{}"),
        metrics=dict(metrics or {}),
    )  # fmt: skip


def persist(
    repository: Repository, key: CheckpointKey, *, base: CheckpointKey | None = None, metrics: Mapping[str, float] | None = None
) -> Manifest:
    """Write a checkpoint's data and part; returns the manifest that would commit it."""
    part, data = sample_part(key, base=base, metrics=metrics), payload(key)
    repository.put_data(key, FILE_NAME, memoryview(data), nbytes=len(data))
    repository.put_part(part)
    return merge([part])
