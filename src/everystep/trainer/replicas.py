"""Whether tensors that count as copies of each other are: of what all ranks hold under one name a single copy is stored."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import xxhash

from everystep.trainer.state import Leaf

_ELEMENTS = 4
_HASH_NBYTES = 8


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A few elements of each of a rank's parameters and optimizer tensors that are not sharded, hashed."""

    names: str
    """Digest of their names: ranks that list others are not compared."""
    hashes: bytes


def whole_leaves(leaves: Sequence[Leaf]) -> list[Leaf]:
    """What only an optimizer's step changes, and every rank holds all of; buffers may differ between ranks."""
    return [leaf for leaf in leaves if leaf.late and leaf.chunks is None and _is_plain(leaf.tensor)]


def _is_plain(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def sample(leaves: Sequence[Leaf]) -> Sample:
    """Of a rank's state, as it is now."""
    chosen = whole_leaves(leaves)
    names = xxhash.xxh3_128(b"".join(leaf.spec.name.encode() + b"\0" for leaf in chosen))
    return Sample(names.hexdigest(), b"".join(_hash(leaf.tensor) for leaf in chosen))


def unequal(samples: Sequence[Sample], leaves: Sequence[Leaf]) -> tuple[int, list[str]] | None:
    """The first rank whose tensors differ from rank 0's (``leaves``), and which; None when all that can be compared are equal."""
    first = samples[0]
    for rank, other in enumerate(samples):
        if other.names == first.names and other.hashes != first.hashes:
            steps = range(0, len(first.hashes), _HASH_NBYTES)
            differ = [at // _HASH_NBYTES for at in steps if first.hashes[at : at + _HASH_NBYTES] != other.hashes[at : at + _HASH_NBYTES]]
            chosen = whole_leaves(leaves)
            return rank, [chosen[index].spec.name for index in differ]
    return None


def _hash(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().view(-1)
    middle = flat.numel() // 2
    pieces = [flat[:_ELEMENTS], flat[middle : middle + _ELEMENTS], flat[-_ELEMENTS:]]
    data = b"".join(bytes(piece.cpu().contiguous().view(torch.uint8).numpy()) for piece in pieces)
    return xxhash.xxh3_64(data).digest()
