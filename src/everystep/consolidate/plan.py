"""The plan of an export, as a value: which whole tensors go into which files, and which files are a source's own. No I/O.

A file of the source is an export's file as it is ("born consolidated") when it holds whole tensors only, all of them wanted under the names
and dtypes they have. What lies in no such file is laid out anew: by falling item size, so that typed views are aligned; then in the order
of the source's bytes, so that what is written together is read together.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from everystep import safetensors
from everystep.errors import ConfigError, LayoutError
from everystep.manifest import digest
from everystep.plan import MAX_FILE_HEADER_NBYTES
from everystep.safetensors import DTYPES, Entry

if TYPE_CHECKING:
    from everystep.consolidate.source import Chunk, Source, SourceTensor
    from everystep.schedule import Consolidate

__all__ = ["ExportPlan", "OutputFile", "plan_export"]

MAX_SHARD_NBYTES = 5_000_000_000
"""Tensor bytes of a file where nobody asks for another size; what Hugging Face writes."""
_CASTS = {"keep": None, "bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""What floating tensors become, by the settings' word; None: they stay."""
_CAST_FROM = ("F64", "F32", "F16", "BF16")
_VERSION = b"everystep export 1"
_LISTED = 5


class OutputFile(msgspec.Struct, frozen=True):
    """One file of the export."""

    name: str
    nbytes: int
    header: bytes
    """Its first bytes, up to the data; empty for a linked file, which has the source's own."""
    entries: tuple[Entry, ...]
    """In the order of their bytes, which are counted from where the data starts."""
    tensors: tuple[str, ...]
    """The source's name of each entry's tensor."""
    link: int | None
    """Index of the source's file that is this file, byte for byte; None: it is put together."""


class ExportPlan(msgspec.Struct, frozen=True):
    """What an export consists of."""

    id: str
    """Digest of the source's identity and all that shapes the result: equal plans make equal exports."""
    files: tuple[OutputFile, ...]
    weight_map: dict[str, str]
    """Tensor name -> file name, as in ``model.safetensors.index.json``."""
    aliases: dict[str, str]
    """Tied name -> the name in ``weight_map``; tied names are left out of the files."""
    nbytes: int
    """All files together."""
    total_size: int
    """All tensors together, in bytes."""

    def describe(self) -> str:
        """A few lines for people: each file with its size, its number of tensors and how it is made."""
        lines = [f"export plan {self.id[:12]}: {len(self.weight_map):,} tensors in {len(self.files)} files, {self.nbytes:,} bytes"]
        for file in self.files:
            how = "put together" if file.link is None else f"linked to file {file.link} of the checkpoint"
            lines.append(f"  {file.name}  {file.nbytes:,} bytes, {len(file.entries):,} tensors, {how}")
        lines += [f"  {alias} is {name}" for alias, name in self.aliases.items()]
        return "\n".join(lines)


class _Item(msgspec.Struct, frozen=True, gc=False):
    """One tensor of the export: its name there, and what it is in the source."""

    name: str
    stored: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    place: tuple[int, int]
    """File and offset of its first bytes in the source."""


def plan_export(source: Source, options: Consolidate, *, stem: str = "model", file_name: str | None = None) -> ExportPlan:
    """Decide what the export of a checkpoint looks like.

    ``options.include`` is matched against the source's names, tied ones too; of tied names the first that is wanted is written.
    ``options.rename`` is applied to what is left, tied names too.

    Args:
        source: What is exported.
        options: ``dtype``, ``max_shard_size``, ``include`` and ``rename`` matter here.
        stem: Begins the files' names: ``<stem>-00001-of-00003-<step>-<plan id>.safetensors``.
        file_name: All tensors go into one file of this very name (adapters); ``max_shard_size`` is left aside.

    Raises:
        LayoutError: A tensor cannot be held by safetensors files, or two have one name after renaming; names them.
        ConfigError: No tensor is wanted.
    """
    cast = _CASTS[options.dtype]
    limit = options.max_shard_nbytes if file_name is None else None
    items, aliases = _wanted(source, tuple(options.include), dict(options.rename), cast)
    bodies: list[_Body] = []
    if file_name is None:
        bodies = _born_whole(source, items, limit)
        kept = {name for body in bodies for name in body.tensors}
        items = [item for item in items if item.stored not in kept]
        limit = MAX_SHARD_NBYTES if limit is None else limit
    bodies += [_laid_out(part) for part in _cut(items, limit)]
    if file_name is not None and len(bodies) > 1:
        raise LayoutError(f"{len(items):,} tensors are too many for the one file {file_name!r}", key=file_name, kind="header-size")
    shape = [(body.header, body.entries, body.tensors, body.link) for body in bodies]
    plan_id = digest(msgspec.msgpack.encode((_VERSION, source.identity, source.step, stem, file_name, shape, aliases)))
    files = tuple(
        OutputFile(
            name=file_name or f"{stem}-{number:05d}-of-{len(bodies):05d}-{source.step}-{plan_id[:8]}.safetensors",
            nbytes=body.nbytes, header=body.header, entries=body.entries, tensors=body.tensors, link=body.link,
        )
        for number, body in enumerate(bodies, 1)
    )  # fmt: skip
    return ExportPlan(
        id=plan_id,
        files=files,
        weight_map={entry.name: file.name for file in files for entry in file.entries},
        aliases=aliases,
        nbytes=sum(file.nbytes for file in files),
        total_size=sum(entry.end - entry.begin for file in files for entry in file.entries),
    )


# -- what is wanted -----------------------------------------------------------------------------------------------------


def _wanted(source: Source, include: tuple[str, ...], rename: Mapping[str, str], cast: str | None) -> tuple[list[_Item], dict[str, str]]:
    """The tensors of the export, each once, and the tied names that are left out."""
    wanted = _matcher(include)
    renamed = _renamer(rename)
    tied: dict[str, list[str]] = {}
    for alias, name in source.aliases.items():
        tied.setdefault(name, []).append(alias)
    items: list[_Item] = []
    aliases: dict[str, str] = {}
    named: dict[str, str] = {}
    for stored, tensor in source.tensors.items():
        names = [name for name in (stored, *sorted(tied.get(stored, ()))) if wanted(name)]
        for position, name in enumerate(names):
            new = renamed(name)
            if not new or new == safetensors.METADATA or new in named:
                why = f"and {named[new]!r} are" if new in named else "is"
                raise LayoutError(
                    f"tensor {name!r} {why} called {new!r} after renaming", key=name, kind="name", hint="change the rename patterns"
                )
            named[new] = name
            if position:
                aliases[new] = items[-1].name
            else:
                items.append(_item(tensor, new, cast))
    if not items:
        some = ", ".join(repr(name) for name in list(source.tensors)[:_LISTED]) or "none at all"
        raise ConfigError(
            f"no tensor of {source.where!r} matches {list(include)!r:.200}" if include else f"{source.where!r} has no tensors to export",
            key="include", kind="include", hint=f"its names begin with {some}",
        )  # fmt: skip
    return items, dict(sorted(aliases.items()))


def _matcher(include: Sequence[str]) -> Callable[[str], bool]:
    if not include:
        return lambda _: True
    pattern = re.compile("|".join(fnmatch.translate(word) for word in include))
    return lambda name: pattern.match(name) is not None


def _renamer(rename: Mapping[str, str]) -> Callable[[str], str]:
    steps = [(re.compile(pattern), new) for pattern, new in rename.items()]

    def renamed(name: str) -> str:
        for pattern, new in steps:
            name = pattern.sub(new, name)
        return name

    return renamed


def _item(tensor: SourceTensor, name: str, cast: str | None) -> _Item:
    if tensor.dtype not in DTYPES:
        raise LayoutError(
            f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which no safetensors file holds",
            key=tensor.name, kind="dtype", hint=f"leave it out with include; what files hold is {', '.join(DTYPES)}",
        )  # fmt: skip
    dtype = cast if cast is not None and tensor.dtype in _CAST_FROM else tensor.dtype
    place = min(((chunk.file, chunk.offset) for chunk in tensor.chunks), default=(-1, 0))
    return _Item(name, tensor.name, dtype, tensor.shape, DTYPES[dtype] * math.prod(tensor.shape), place)


# -- files --------------------------------------------------------------------------------------------------------------


class _Body(msgspec.Struct, frozen=True):
    """An output file that has no name yet."""

    nbytes: int
    header: bytes
    entries: tuple[Entry, ...]
    tensors: tuple[str, ...]
    link: int | None


def _born_whole(source: Source, items: Sequence[_Item], limit: int | None) -> list[_Body]:
    """The source's files that are files of the export just as they are."""
    wanted = {item.stored: item for item in items}
    held: dict[int, list[tuple[int, int, _Item]]] = {}
    spoilt: set[int] = set()
    for name, tensor in source.tensors.items():
        item = wanted.get(name)
        alike = item is not None and item.name == (item.stored if tensor.entry is None else tensor.entry) and item.dtype == tensor.dtype
        for chunk in tensor.chunks:
            if item is None or not alike or not _is_whole(tensor, chunk):
                spoilt.add(chunk.file)
            else:
                held.setdefault(chunk.file, []).append((chunk.offset, chunk.offset + chunk.nbytes, item))
    found = []
    for index in sorted(held.keys() - spoilt):
        file = source.files[index]
        members = sorted(held[index], key=lambda one: (one[0], one[1]))
        start = source.headers[index][0] if index in source.headers else members[0][0]
        at = start
        for begin, end, _ in members:
            if begin != at:
                break
            at = end
        else:
            if at == file.nbytes and start > 8 and file.key.endswith(".safetensors") and (limit is None or at - start <= limit):
                entries = tuple(Entry(item.name, item.dtype, item.shape, begin - start, end - start) for begin, end, item in members)
                found.append(_Body(file.nbytes, b"", entries, tuple(item.stored for _, _, item in members), index))
    return found


def _is_whole(tensor: SourceTensor, chunk: Chunk) -> bool:
    return len(tensor.chunks) == 1 and chunk.file >= 0 and chunk.strides is None and chunk.region.sizes == tensor.shape


def _cut(items: Sequence[_Item], limit: int | None) -> list[list[_Item]]:
    """Which tensors go into which file, in their order there. A tensor that is larger than ``limit`` has a file of its own."""
    parts: list[list[_Item]] = []
    data = told = 0
    for item in sorted(items, key=lambda one: (-DTYPES[one.dtype], one.place, one.name)):
        # A bound from above of what the header says of it: six bytes for each letter that JSON escapes.
        letters = len(item.name) if item.name.isascii() and item.name.isprintable() else 12 * len(item.name)
        grows = 2 * letters + 21 * len(item.shape) + 120
        if not parts or (limit is not None and data + item.nbytes > limit and data) or told + grows > MAX_FILE_HEADER_NBYTES:
            parts.append([])
            data = told = 0
        parts[-1].append(item)
        data += item.nbytes
        told += grows
    return parts


def _laid_out(part: Sequence[_Item]) -> _Body:
    entries = []
    at = 0
    for item in part:
        entries.append(Entry(item.name, item.dtype, item.shape, at, at + item.nbytes))
        at += item.nbytes
    header = safetensors.header(entries, {"format": "pt"})
    return _Body(len(header) + at, header, tuple(entries), tuple(item.stored for item in part), None)
