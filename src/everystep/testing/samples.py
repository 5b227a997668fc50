"""Small but complete checkpoints to test repositories with; made without the code that plans and hashes real ones."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import xxhash

from everystep.manifest import Manifest, Part, Shard, StoredObject, TensorSpec, merge
from everystep.region import Region
from everystep.repository import CheckpointKey, Repository

__all__ = [
    "FILE_NAME", "OPTIMIZER_FILE", "node_file", "node_part", "node_payload", "optimizer_payload", "payload", "persist", "persist_node",
    "sample_part",
]  # fmt: skip

FILE_NAME = "model-00001-of-00001.safetensors"
OPTIMIZER_FILE = "optim-00001-of-00001.safetensors"
HEADER_NBYTES = 64
TENSOR_NBYTES = 100
_DOCUMENT = (
    b'{"state":{"dict":[["model",{"module":{}}],'
    b'["optim",{"optimizer":{"class":"SGD","groups":[],"flat":[],"loose":{},"others":{},"extra":{}}}],["epoch",{"value":3}]]}}'
)


def payload(key: CheckpointKey) -> bytes:
    """The data file of a checkpoint: a header that is none, then tensors ``model.a`` and ``model.b`` of 25 float32 each."""
    return b"h" * HEADER_NBYTES + bytes([key.step % 251]) * TENSOR_NBYTES + bytes([key.attempt % 251]) * TENSOR_NBYTES


def optimizer_payload(key: CheckpointKey) -> bytes:
    """The optimizer's file of a checkpoint: a header that is none, then ``optim.m`` of 25 float32."""
    return b"o" * HEADER_NBYTES + bytes([(key.step + 1) % 251]) * TENSOR_NBYTES


def sample_part(
    key: CheckpointKey, *, base: CheckpointKey | None = None, metrics: Mapping[str, float] | None = None, node: int = 0, nodes: int = 1,
    optimizer: bool = False,
) -> Part:  # fmt: skip
    """A node's part. ``model.a`` lies in the checkpoint's own file, ``model.b`` there too or, unchanged, in the file of ``base``.

    With ``optimizer`` there is a group ``optim`` as well, in a file of its own, and a document that says so.
    """
    objects, shards = [], []
    for number, (owner, offset) in enumerate(((key, HEADER_NBYTES), (base or key, HEADER_NBYTES + TENSOR_NBYTES))):
        data = payload(owner)
        if number == 0 or base is not None:
            header_digest = xxhash.xxh3_128_hexdigest(data[:HEADER_NBYTES])
            objects.append(StoredObject(f"data/{owner}/{FILE_NAME}", len(data), HEADER_NBYTES, header_digest))
        found = xxhash.xxh3_128_hexdigest(data[offset : offset + TENSOR_NBYTES])
        shards.append(Shard(number, Region((0,), (25,)), len(objects) - 1, offset, TENSOR_NBYTES, (found,)))
    tensors = [TensorSpec(f"model.{name}", "F32", (25,), "model") for name in "ab"]
    if optimizer:
        data = optimizer_payload(key)
        words = [xxhash.xxh3_128_hexdigest(piece) for piece in (data[:HEADER_NBYTES], data[HEADER_NBYTES:])]
        objects.append(StoredObject(f"data/{key}/{OPTIMIZER_FILE}", len(data), HEADER_NBYTES, words[0]))
        shards.append(Shard(2, Region((0,), (25,)), len(objects) - 1, HEADER_NBYTES, TENSOR_NBYTES, (words[1],)))
        tensors.append(TensorSpec("optim.m", "F32", (25,), "optim"))
    return Part(
        step=key.step, attempt=key.attempt, node=node, nodes=nodes, saved_at=1.0, objects=tuple(objects), shards=tuple(shards),
        tensors=tuple(tensors), aliases={}, values=msgspec.Raw(_DOCUMENT if optimizer else b"{}"),
        metrics=dict(metrics or {}), world=nodes, ranks=(node,),
    )  # fmt: skip


def persist(
    repository: Repository, key: CheckpointKey, *, base: CheckpointKey | None = None, metrics: Mapping[str, float] | None = None,
    optimizer: bool = False,
) -> Manifest:  # fmt: skip
    """Write a checkpoint's data and part; returns the manifest that would commit it."""
    part, data = sample_part(key, base=base, metrics=metrics, optimizer=optimizer), payload(key)
    repository.put_data(key, FILE_NAME, memoryview(data), nbytes=len(data))
    if optimizer:
        data = optimizer_payload(key)
        repository.put_data(key, OPTIMIZER_FILE, memoryview(data), nbytes=len(data))
    repository.put_part(part)
    return merge([part])


# -- several nodes ------------------------------------------------------------------------------------------------------


def node_file(node: int) -> str:
    """Name of a node's data file."""
    return f"model-n{node + 1:05d}-00001-of-00001.safetensors"


def node_payload(key: CheckpointKey, node: int) -> bytes:
    """A node's data file: a header that is none, then its 25 rows of ``model.a``."""
    return b"h" * HEADER_NBYTES + bytes([(key.step * 7 + key.attempt * 3 + node) % 251]) * TENSOR_NBYTES


def node_part(
    key: CheckpointKey, node: int, nodes: int, *, shared: bool = True, metrics: Mapping[str, float] | None = None
) -> Part:
    """The part of one of several nodes, of one rank each: its 25 rows of ``model.a``, and plain values of its own."""
    data = node_payload(key, node)
    stored = StoredObject(
        f"data/{key}/{node_file(node)}", len(data), HEADER_NBYTES, xxhash.xxh3_128_hexdigest(data[:HEADER_NBYTES])
    )
    found = xxhash.xxh3_128_hexdigest(data[HEADER_NBYTES:])
    return Part(
        step=key.step, attempt=key.attempt, node=node, nodes=nodes, saved_at=1.0 + node, objects=(stored,),
        shards=(Shard(0, Region((25 * node,), (25,)), 0, HEADER_NBYTES, TENSOR_NBYTES, (found,)),),
        tensors=(TensorSpec("model.a", "F32", (25 * nodes,), "model"),), aliases={},
        values=msgspec.Raw(b'{"state":{"dict":[["rank",{"plain":%d}]]}}' % node), metrics=dict(metrics or {}), world=nodes, ranks=(node,),
        shared=shared,
    )  # fmt: skip


def persist_node(repository: Repository, key: CheckpointKey, node: int, nodes: int, **options: bool | Mapping[str, float] | None) -> Part:
    """Write one node's data and part, as its agent does; see ``node_part``."""
    data = node_payload(key, node)
    repository.put_data(key, node_file(node), memoryview(data), nbytes=len(data))
    part = node_part(key, node, nodes, **options)  # type: ignore[arg-type]
    repository.put_part(part)
    return part
