"""A checkpoint as consolidation sees it, whoever wrote it: whole tensors by their exported names, and which bytes of which files they are.

Theory of operation. ``open_source`` looks at a folder and asks the small modules of ``sources`` in turn whether it is theirs. Each makes an
``Opened``: names as the module has them, chunks with absolute offsets, files with their sizes. Opening reads what a checkpoint says of
itself, never a tensor's bytes. What is missing is not an error of opening: a chunk lies in a file that is not there (``nbytes`` -1), or in
none; ``check_cover`` says so, by name, before the first byte is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from everystep.errors import CorruptionError, LayoutError
from everystep.region import Region, missing, overlap
from everystep.safetensors import DTYPES
from everystep.store import Store

ABSENT = -1
"""``SourceFile.nbytes`` of a file that should be there and is not."""
_LISTED = 5
_HINT = "take another copy or an older checkpoint"


class SourceFile(NamedTuple):
    """A file of the checkpoint: its key in the source's store, and its size; ``ABSENT`` where it is not there."""

    key: str
    nbytes: int


class Chunk(NamedTuple):
    """A region of a tensor, and the bytes that it is."""

    region: Region
    file: int
    """Which of ``Source.files``; -1: no file holds it."""
    offset: int
    """In the file, of the first byte (``strides``: of the region's first item)."""
    nbytes: int
    """``strides``: from the first item to the end of the last one."""
    digests: tuple[str, ...] = ()
    """XXH3-128 of each block, as ``manifest.Shard.digests``; () where nobody recorded any."""
    block: int = 0
    """Bytes of a digest block, as ``manifest.Shard.block``."""
    crc: int | None = None
    """CRC-32 of the whole chunk, where it is recorded."""
    strides: tuple[int, ...] | None = None
    """In items, where the bytes are not row-major."""


@dataclasses.dataclass(frozen=True)
class SourceTensor:
    """A whole tensor. Its chunks cover it exactly once, which ``check_cover`` checks."""

    name: str
    dtype: str
    """Safetensors' word."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    entry: str | None = None
    """Its name in the headers of safetensors files, where that is another one: such a file is not an export's as it is."""


class Source(Protocol):
    """A checkpoint that can be consolidated; read only."""

    @property
    def kind(self) -> str:
        """Who wrote it: "everystep", "dcp", "safetensors", "automodel", "accelerate", "transformers", "lightning", "torchtitan"."""
        ...

    @property
    def where(self) -> str:
        """The folder, for messages."""
        ...

    @property
    def key(self) -> str:
        """Names it in exports: a checkpoint key (``"000000000005-0001"``), else the folder's name; safe in a file name."""
        ...

    @property
    def step(self) -> int:
        """Training step; 0 where nothing tells it."""
        ...

    @property
    def saved_at(self) -> float:
        """Seconds since the epoch."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """What is known of its quality; {} where nothing is."""
        ...

    @property
    def identity(self) -> str:
        """XXH3-128 over what is stored: of the manifest's record, or of the names, sizes and times of all files."""
        ...

    @property
    def store(self) -> Store:
        """Where ``files`` are read from."""
        ...

    @property
    def files(self) -> Sequence[SourceFile]:
        """The files that chunks refer to, by index."""
        ...

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """By exported name: the module's own."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied name -> the name it is stored under, both exported names."""
        ...

    @property
    def assets(self) -> str | None:
        """A folder of the checkpoint's own with config.json and the like; None where there is none."""
        ...

    @property
    def headers(self) -> Mapping[int, tuple[int, str]]:
        """By file: size and digest of its safetensors header, where they are recorded."""
        ...

    @property
    def lost(self) -> Sequence[str]:
        """What is wrong with the files as a whole, such as one that is missing by the others' numbers; sentences for ``check_cover``."""
        ...

    def hold(self) -> AbstractContextManager[None]:
        """Keeps the checkpoint from being deleted while it is read, as far as its writer can be asked to."""
        ...

    def changed(self) -> bool:
        """Whether it is not any more what was opened: others may write into their files again."""
        ...


@contextlib.contextmanager
def _no_hold() -> Iterator[None]:
    yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A ``Source``, all fields as there."""

    kind: str
    where: str
    key: str
    step: int
    saved_at: float
    identity: str
    store: Store
    files: Sequence[SourceFile]
    tensors: Mapping[str, SourceTensor]
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assets: str | None = None
    headers: Mapping[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    lost: Sequence[str] = ()
    holding: Callable[[], AbstractContextManager[None]] = _no_hold
    identity_now: Callable[[], str] | None = None
    """What ``identity`` would be now; None: it cannot change."""

    def hold(self) -> AbstractContextManager[None]:
        """See ``Source``."""
        return self.holding()

    def changed(self) -> bool:
        """See ``Source``."""
        return self.identity_now is not None and self.identity_now() != self.identity


class Found(NamedTuple):
    """A checkpoint below a folder that a framework writes to."""

    path: str
    """To be given to ``open_source``; of a run, the run's (then ``key`` says which)."""
    kind: str
    step: int
    complete: bool
    why: str
    """Why it is not complete; "" when it is."""
    saved_at: float
    metrics: Mapping[str, float]
    key: str = ""
    """As ``Source.key``."""


def open_source(path: str | os.PathLike[str], *, step: int | str | None = "latest", group: str | None = None) -> Source:
    """The checkpoint at ``path``, recognised by looking: an everystep run, or a folder that another framework wrote.

    Args:
        path: A run, a checkpoint's folder, or a folder with several checkpoints.
        step: Which of several: "latest" (of a run: the newest that is not known to be bad), "best" (by the metric, where one stands
            out: see ``best_of``), ``"best:NAME"``, ``"best:NAME:max"``, a step's number or a checkpoint's key.
        group: Which top-level entry of the saved state is exported. None: the only module.

    Raises:
        NotFoundError: There is no such checkpoint; says what was looked for.
        ConfigError: It cannot be told what is meant: several modules, or several metrics; lists them.
        CorruptionError: What it says of itself cannot be read or contradicts itself.
    """
    from everystep.consolidate.sources import opened  # the sources import this module

    return opened(os.fspath(path), step=step, group=group)


def find_checkpoints(root: str | os.PathLike[str]) -> list[Found]:
    """All checkpoints at or below a folder that a framework writes, oldest first; a folder that is not there has none."""
    from everystep.consolidate.sources import found

    return found(os.fspath(root))


def check_cover(source: Source, names: Iterable[str] | None = None) -> None:
    """Check that the tensors (``names``; None: all) can be read whole: each element lies in exactly one chunk, of a file that has it.

    Looks at sizes as they were when the source was opened; reads nothing.

    Raises:
        CorruptionError: Something is missing or there twice; names tensors, regions and files.
        LayoutError: A name is not in the source, or a dtype is none that safetensors files hold.
    """
    lost = list(source.lost)
    for name in source.tensors if names is None else names:
        tensor = source.tensors.get(name)
        if tensor is None:
            raise LayoutError(f"{source.where!r} has no tensor {name!r}", key=name, kind="names", hint="see its names with: everystep show")
        lost += _lost(source, tensor)
    if lost:
        told = "; ".join(lost[:_LISTED]) + (f"; and {len(lost) - _LISTED} more" if len(lost) > _LISTED else "")
        raise CorruptionError(
            f"checkpoint {source.where!r} is not whole: {told}", step=source.step, key=source.where, kind="missing", hint=_HINT
        )


def _lost(source: Source, tensor: SourceTensor) -> Iterator[str]:
    """Sentences about what keeps a tensor from being read whole."""
    itemsize = DTYPES.get(tensor.dtype)
    if itemsize is None:
        raise LayoutError(f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which no safetensors file holds", key=tensor.name,
                          kind="dtype", hint="leave it out with include=[...]")  # fmt: skip
    good: list[Region] = []
    for chunk in tensor.chunks:
        if not chunk.region.fits(tensor.shape):
            yield f"region {chunk.region} of {tensor.name!r} is not within its shape {list(tensor.shape)}"
            return
        file = source.files[chunk.file] if chunk.file >= 0 else None
        if file is None:
            if chunk.region.numel:
                yield f"region {chunk.region} of {tensor.name!r} (no file holds it)"
        elif file.nbytes == ABSENT:
            yield f"region {chunk.region} of {tensor.name!r} ({file.key!r} is not there)"
        elif chunk.offset + chunk.nbytes > file.nbytes:
            yield (f"region {chunk.region} of {tensor.name!r} ({file.key!r} ends at byte {file.nbytes:,}, "
                   f"before byte {chunk.offset + chunk.nbytes:,})")  # fmt: skip
        elif chunk.strides is None and chunk.nbytes != chunk.region.numel * itemsize:
            yield f"region {chunk.region} of {tensor.name!r} ({chunk.nbytes:,} bytes in {file.key!r} are not its size)"
        good.append(chunk.region)
    pair = overlap(good)
    if pair:
        held = [source.files[chunk.file].key for region in pair for chunk in tensor.chunks if chunk.region == region and chunk.file >= 0][
            -2:
        ]
        yield f"regions {pair[0]} and {pair[1]} of {tensor.name!r} overlap ({' and '.join(map(repr, held))} are of two saves)"
    elif sum(region.numel for region in good) != Region((0,) * len(tensor.shape), tensor.shape).numel:
        yield from (f"region {hole} of {tensor.name!r} (no file holds it)" for hole in missing(tensor.shape, good))
