"""Checkpoints of any layout to consolidate: tensors cut into chunks at will, in files made without the code that writes real ones."""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from everystep.consolidate.source import Chunk, Opened, SourceFile, SourceTensor
from everystep.region import Region
from everystep.safetensors import DTYPES
from everystep.store import open_store

__all__ = ["array", "chunked_source", "grid"]


def array(word: str, shape: Sequence[int], *, seed: int = 0) -> np.ndarray[Any, Any]:
    """Values for a tensor of a safetensors dtype, as unsigned numbers of its item size: any bits; of BOOL 0 and 1."""
    drawn = np.random.default_rng(seed).integers(0, 2 if word == "BOOL" else 256, (*shape, DTYPES[word]), dtype=np.uint8)
    return np.frombuffer(drawn.tobytes(), f"u{DTYPES[word]}").reshape(tuple(shape))


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Region]:
    """The cells that a shape is cut into; ``cuts`` are by dimension, where to cut; equal ones leave empty cells."""
    edges = [[0, *sorted(of), size] for size, of in zip(shape, cuts, strict=True)]
    spans = [[(begin, end - begin) for begin, end in itertools.pairwise(of)] for of in edges]
    return [Region(tuple(b for b, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*spans)]


def chunked_source(
    folder: str, tensors: Mapping[str, tuple[str, np.ndarray[Any, Any]]], regions: Mapping[str, Sequence[Region]], *, files: int = 1,
    check: str = "", block: int = 64, strided: Sequence[str] = (), seed: int = 0, gaps: bool = True, step: int = 5,
    aliases: Mapping[str, str] | None = None,
) -> Opened:  # fmt: skip
    """Write a checkpoint: each tensor's regions, dealt to files at random, with gaps between them.

    Args:
        folder: Where to.
        tensors: Name -> dtype word and values.
        regions: Name -> its chunks.
        files: How many.
        check: "digests" by ``block`` bytes, "crc", or neither.
        block: As ``Chunk.block``.
        strided: Names of tensors whose chunks are stored column by column.
        seed: Of what is random.
        gaps: Whether there are any.
        step: As ``Source.step``.
        aliases: As ``Source.aliases``.
    """
    chance = random.Random(seed)  # noqa: S311 (no secrets)
    bodies = [bytearray(chance.randbytes(chance.randrange(9, 5000) if gaps else 64)) for _ in range(files)]
    found = {}
    for name, (word, values) in tensors.items():
        chunks = []
        for region in regions[name]:
            part = values[tuple(slice(b, b + n) for b, n in zip(region.offsets, region.sizes, strict=True))]
            number = chance.randrange(files)
            body = bodies[number]
            if gaps and chance.random() < 0.5:
                body += chance.randbytes(chance.randrange(200))
            strides = None
            data = part.tobytes()
            if name in strided and part.size:
                data = part.tobytes(order="F")
                strides = tuple(int(np.prod(part.shape[:dim], dtype=np.int64)) for dim in range(part.ndim))
            digests = tuple(xxhash.xxh3_128_hexdigest(data[at : at + block]) for at in range(0, max(len(data), 1), block))
            chunks.append(
                Chunk(
                    region, number, len(body), len(data), digests if check == "digests" else (), block if check == "digests" else 0,
                    zlib.crc32(data) if check == "crc" else None, strides,
                )
            )  # fmt: skip
            body += data
        found[name] = SourceTensor(name, word, values.shape, tuple(chunks))
    listed = []
    for number, body in enumerate(bodies):
        if gaps:
            body.extend(chance.randbytes(chance.randrange(300)))
        key = f"shard-{number}.bin"
        with open(os.path.join(folder, key), "wb") as file:
            file.write(body)
        listed.append(SourceFile(key, len(body)))
    return Opened(
        kind="dcp", where=folder, key="source", step=step, saved_at=1.0, identity=xxhash.xxh3_128_hexdigest(b"".join(bodies)),
        store=open_store(folder), files=listed, tensors=found, aliases=aliases or {},
    )  # fmt: skip
