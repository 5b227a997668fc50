"""Safetensors in the files of Hugging Face's layouts: whole tensors in numbered files, and the parts that DCP's Hugging Face writer leaves.

Nothing tells how large the tensors are of which DCP wrote parts, nor how many ranks wrote: torch takes the parts that it finds for all that
there are. Here every other sign is taken: the numbers in the files' names; how torch cuts a tensor among as many ranks as there are random
states (a cut that no such number of ranks makes has lost its end); the vocabulary's size; and what the callers know (``Expected``). A last
part that is lost without any of these signs cannot be told from a smaller tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from everystep.consolidate.source import Chunk, Found, Opened, SourceTensor
from everystep.consolidate.sources.folders import (
    Files,
    changed_at,
    identity_of,
    listed,
    names_in,
    own_name,
    read_json,
    safe,
    step_in,
)
from everystep.errors import CorruptionError, NotFoundError
from everystep.foreign.sharded import read_header, regions_of
from everystep.region import Region, missing, whole
from everystep.store import open_store

SUFFIX = ".safetensors"
INDEX = SUFFIX + ".index.json"
_PART = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9})\.safetensors")
_SUB_FOLDERS = ("sharded",)
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|lm_head)\.weight")
_MOST_FILES = 100_000
_HINT = "take another copy or an older checkpoint"


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is known of a sharded checkpoint besides its files."""

    names: frozenset[str] = frozenset()
    """Tensors that have to be there."""
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Whole shapes, by name."""
    world: int = 0
    """How many ranks saved; 0: as many as the files' numbers tell."""
    says: str = "the checkpoint's other files"
    """Who says it."""


def is_one(names: Sequence[str]) -> bool:
    """Whether a folder with these names in it holds safetensors."""
    return any(name.endswith((SUFFIX, INDEX)) for name in names)


def home_of(folder: str) -> str:
    """Where the files are: DCP's writer puts the parts into ``sharded/`` when it consolidates by itself."""
    for name in _SUB_FOLDERS:
        inner = os.path.join(folder, name)
        if any(map(_PART.fullmatch, names_in(inner))):
            return inner
    return folder


def found_at(path: str, *, kind: str = "safetensors", folder: str = "", metrics: Mapping[str, float] | None = None) -> Found:
    """The checkpoint at ``path`` with its files in ``folder`` (below it). Reads headers: a file that is still being written is cut off."""
    home = home_of(os.path.join(path, folder) if folder else path)
    names = names_in(home)
    files, why = _wanted(home, names)
    lost = [file for file in files if file not in names]
    if lost:
        why = f"{listed(lost)} is not there (yet)"
    try:
        for file in files if not why else ():
            read_header(os.path.join(home, file))
    except CorruptionError as error:
        why = error.message
    name = own_name(path)
    return Found(path, kind, step_in(name), not why, why, changed_at(home, files), metrics or {}, safe(name))


def open_safetensors(
    path: str, group: str | None, *, kind: str = "safetensors", folder: str = "", metrics: Mapping[str, float] | None = None,
    assets: str | None = None, step: int | None = None, expected: Expected | None = None,
) -> Opened:  # fmt: skip
    """All tensors of the safetensors files in ``folder`` (below ``path``). Errors as in ``open_source``."""
    home = home_of(os.path.join(path, folder) if folder else path)
    names = names_in(home)
    wanted, why = _wanted(home, names)
    if why:
        raise CorruptionError(f"{home!r} cannot be read: {why}", key=home, kind="index", hint=_HINT)
    reading = _Reading(home)
    for file in wanted:
        if file in names:
            reading.add(file)
        else:
            reading.files.number(file)
    tensors = reading.tensors()
    if group is not None:
        under = {name.removeprefix(group + "."): tensor for name, tensor in tensors.items() if name.startswith(group + ".")}
        if not under:
            raise NotFoundError(f"{home!r} has no tensors under {group!r}", key=home, kind="group", hint="leave the group out")
        tensors = {name: dataclasses.replace(tensor, name=name, entry=tensor.name) for name, tensor in under.items()}
    lost = [f"{file!r} is not there" for file in [*wanted, *_gaps(wanted)] if file not in names]
    lost += reading.twice()
    told = expected or Expected()
    if reading.parts:
        config = read_json(os.path.join(assets or home, "config.json"))
        if not told.shapes:
            lost += [f"{file!r} is not there, by the numbers of the others" for file in _ranks_between(wanted)]
        lost += [*reading.files.torn(), *_cut_off(tensors, {**_embedding_shapes(config, tensors), **told.shapes}, told)]
    lost += _not_there(tensors, home, told, names)
    ident = [*(file.key for file in reading.files.files), *(name for name in names if name.endswith(INDEX))]
    now = functools.partial(identity_of, home, ident, more=group or "")
    return Opened(
        kind=kind, where=path, key=safe(own_name(path)), step=step_in(own_name(path)) if step is None else step,
        saved_at=changed_at(home, wanted), identity=now(), identity_now=now, store=open_store(home),
        files=reading.files.files, tensors=tensors, metrics=metrics or {}, lost=lost,
        assets=assets or (home if "config.json" in names or "adapter_config.json" in names else None),
    )  # fmt: skip


def _wanted(home: str, names: Sequence[str]) -> tuple[list[str], str]:
    """The files that make up the checkpoint, there or not; or why nobody can tell.

    Parts come before an index: where both are, the index is of a consolidated copy beside them.
    """
    parts = [name for name in names if _PART.fullmatch(name)]
    if parts:
        return parts, ""
    indexes = [name for name in names if name.endswith(INDEX)]
    index = "model" + INDEX if "model" + INDEX in indexes else indexes[0] if len(indexes) == 1 else None
    if index is None:
        if len(indexes) > 1:
            return [], f"it has several indexes: {listed(indexes)}"
        own = [name for name in names if name.endswith(SUFFIX)]
        return own, "" if own else "it holds no safetensors files"
    weights = (read_json(os.path.join(home, index)) or {}).get("weight_map")
    good = (
        isinstance(weights, dict)
        and weights
        and all(isinstance(file, str) and "/" not in file and file.endswith(SUFFIX) for file in weights.values())
    )
    return (sorted(set(weights.values())), "") if good and weights else ([], f"{index!r} is no index")


def _gaps(names: Iterable[str]) -> list[str]:
    """Files that are missing by the numbers of the others."""
    series: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        part, plain = _PART.fullmatch(name), _NUMBERED.fullmatch(name)
        if part:  # a rank that has nothing of a file writes none, but somebody writes each
            series.setdefault(("shard-*-model-", "", part[3]), set()).add(int(part[2]))
        elif plain:
            series.setdefault((plain[1], "", plain[3]), set()).add(int(plain[2]))
    return [
        f"{stem}{number:0{len(total)}d}-of-{total}{SUFFIX}"
        for (stem, _, total), numbers in sorted(series.items())
        if int(total) <= _MOST_FILES
        for number in range(1, int(total) + 1)
        if number not in numbers
    ]


def _ranks_between(names: Iterable[str]) -> list[str]:
    """Files of ranks between those that wrote. Regular gaps are none: with copies of the model inside the mesh, every n-th rank writes."""
    ranks = sorted({int(part[1]) for part in map(_PART.fullmatch, names) if part})
    if not ranks or (ranks[0] == 1 and len({after - before for before, after in itertools.pairwise(ranks)}) < 2):
        return []
    return [f"shard-{rank:05d}-model-*{SUFFIX}" for rank in range(1, min(ranks[-1], _MOST_FILES)) if rank not in ranks]


class _Reading:
    """Headers of many files -> tensors."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.files = Files(home)
        self.parts = False
        self._dtypes: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._chunks: dict[str, list[Chunk]] = {}
        self._whole: set[str] = set()

    def add(self, file: str) -> None:
        path = os.path.join(self.home, file)
        header = read_header(path)
        regions = regions_of(path, header)
        number = self.files.number(file)
        self.parts = self.parts or bool(regions)
        for entry in header.entries:
            region = regions[entry.name][0] if regions else whole(entry.shape)
            # An empty part lies at the end of the tensor.
            shape = tuple(offset + size for offset, size in zip(region.offsets, region.sizes, strict=True))
            known = self._shapes.setdefault(entry.name, shape)
            if self._dtypes.setdefault(entry.name, entry.dtype) != entry.dtype or len(known) != len(shape):
                raise CorruptionError(f"{path!r} contradicts the other files about {entry.name!r}: {entry.dtype} of {len(shape)} dims, "
                                      f"not {self._dtypes[entry.name]} of {len(known)}; they are of two saves", key=entry.name,
                                      kind="safetensors", hint=_HINT)  # fmt: skip
            self._shapes[entry.name] = tuple(map(max, known, shape))
            self._chunks.setdefault(entry.name, []).append(Chunk(region, number, header.data_start + entry.begin, entry.end - entry.begin))

    def tensors(self) -> dict[str, SourceTensor]:
        return {
            name: SourceTensor(name, self._dtypes[name], self._shapes[name], tuple(chunk for chunk in _filled(chunks)))
            for name, chunks in self._chunks.items()
        }

    def twice(self) -> list[str]:
        """Sentences about the same part in two files: DCP writes each once."""
        told = []
        for name, chunks in self._chunks.items():
            seen: dict[Region, int] = {}
            for chunk in chunks:
                other = seen.setdefault(chunk.region, chunk.file)
                if other != chunk.file and (chunk.region.numel or not chunk.region.sizes):
                    files = f"{self.files.files[other].key!r} and {self.files.files[chunk.file].key!r}"
                    told.append(f"{files} both hold region {chunk.region} of {name!r}: they are of two saves")
        return told


def _filled(chunks: Sequence[Chunk]) -> Iterable[Chunk]:
    """Without empty parts, unless the tensor is nothing else."""
    return [chunk for chunk in chunks if chunk.region.numel] or chunks[:1]


def _cut_off(tensors: Mapping[str, SourceTensor], shapes: Mapping[str, tuple[int, ...]], expected: Expected) -> list[str]:
    """Sentences about tensors whose end is lost."""
    told = []
    ranks = expected.world or max((len(tensor.chunks) for tensor in tensors.values()), default=0)
    for name, tensor in tensors.items():
        shape = shapes.get(name)
        if shape is not None and shape != tensor.shape:
            if len(shape) == len(tensor.shape) and all(there <= size for there, size in zip(tensor.shape, shape, strict=True)):
                holes = missing(shape, [chunk.region for chunk in tensor.chunks])
                told += [f"region {hole} of {name!r} (no file holds it; by {expected.says} its shape is {list(shape)})" for hole in holes]
            else:
                told.append(f"{name!r} has shape {list(tensor.shape)}, by {expected.says} {list(shape)}")
        elif shape is None and _is_cut(tensor, ranks):
            told.append(f"the end of {name!r} (the files hold {len(tensor.chunks)} equal parts of it, which is no cut among {ranks} ranks)")
    return told


def _cut_dim(tensor: SourceTensor) -> int | None:
    """The one dimension along which all parts have the same size but are at different places; None where it is otherwise."""
    regions = [chunk.region for chunk in tensor.chunks]
    dims = [dim for dim in range(len(tensor.shape)) if any(region.sizes[dim] != tensor.shape[dim] for region in regions)]
    return dims[0] if len(dims) == 1 and len({region.sizes for region in regions}) == 1 else None


def _is_cut(tensor: SourceTensor, ranks: int) -> bool:
    """Whether no mesh of a divisor of ``ranks`` would have cut a tensor of this size so."""
    dim = _cut_dim(tensor)
    if dim is None or ranks < 2:
        return False
    rows, part, count = tensor.shape[dim], tensor.chunks[0].region.sizes[dim], len(tensor.chunks)
    return not any(ranks % mesh == 0 and mesh >= count and -(-rows // mesh) == part for mesh in range(count, ranks + 1))


def _not_there(tensors: Mapping[str, SourceTensor], home: str, expected: Expected, names: Sequence[str]) -> list[str]:
    """Sentences about tensors that should be in the files and are not."""
    told = []
    if "model" + INDEX in names and not any(map(_PART.fullmatch, names)):
        weights = (read_json(os.path.join(home, "model" + INDEX)) or {}).get("weight_map") or {}
        told += [
            f"{name!r} ({file!r}, which holds it by the index, does not)" for name, file in sorted(weights.items()) if name not in tensors
        ]
    return told + [f"{name!r} (no file holds it; by {expected.says} there is one)" for name in sorted(expected.names - tensors.keys())]


def _embedding_shapes(config: object, tensors: Mapping[str, SourceTensor]) -> dict[str, tuple[int, ...]]:
    """Whole shapes of embeddings, by the size of the vocabulary in a model's config.json; only where a tensor has fewer rows than that."""
    if not isinstance(config, Mapping):
        return {}
    sizes = [one.get("vocab_size") for one in (config, config.get("text_config")) if isinstance(one, Mapping)]
    size = next((size for size in sizes if type(size) is int), 0)
    small = {name: tensor.shape for name, tensor in tensors.items() if len(tensor.shape) == 2 and tensor.shape[0] < size}
    return {name: (size, *shape[1:]) for name, shape in small.items() if _EMBEDDINGS.search(name)}


def header_shapes(home: str) -> dict[str, tuple[int, ...]]:
    """Shapes as far as a folder's files tell them; {} where they cannot be read."""
    names = names_in(home)
    files, why = _wanted(home, names)
    reading = _Reading(home)
    try:
        for file in files if not why else ():
            reading.add(file)
    except CorruptionError:
        return {}
    return {name: tensor.shape for name, tensor in reading.tensors().items()}
