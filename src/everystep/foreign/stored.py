"""A checkpoint that others wrote, opened: which tensors it has, and which regions of them lie where in its files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from everystep.errors import CorruptionError, LayoutError, NotFoundError
from everystep.foreign.dtypes import WORDS
from everystep.foreign.sharded import read_header, regions_of
from everystep.foreign.unpickling import Place, ToldMetadata, is_inside, unpickled
from everystep.region import Region, whole

INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_RANKED = re.compile(r"__(\d{1,9})\.metadata")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9})\.safetensors")
_MOST_METADATA_NBYTES = 4 << 30
_MOST_INDEX_NBYTES = 1 << 30
_HINT = "take another copy or an older checkpoint"


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """A region of a tensor, and where it lies. ``zipped``: in an archive that ``torch.save`` wrote; else row by row as it is."""

    region: Region
    path: str
    place: Place | None
    zipped: bool


@dataclasses.dataclass
class StoredTensor:
    """A tensor of the checkpoint. ``at_least``: its shape is only as large as the regions that were found (nothing tells the whole)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: list[StoredChunk]
    at_least: bool = False


@dataclasses.dataclass(frozen=True)
class StoredPlain:
    """An item that ``torch.save`` wrote and that is no tensor."""

    path: str
    place: Place | None


class Stored:
    """One or several folders that others wrote, taken as one checkpoint."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.tensors: dict[str, StoredTensor] = {}
        self.plain: dict[str, StoredPlain] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.unread: dict[str, str] = {}
        """Tensors that everystep cannot read, and why."""
        self.absent: list[str] = []
        """Files that should be there, by their numbers or the index, and are not."""
        self.step = 0

    @classmethod
    def open(cls, paths: Iterable[str | os.PathLike[str]], *, rank: int = 0) -> Stored:
        """Read what the folders say of themselves; no tensor's bytes.

        Args:
            paths: Folders with a ``.metadata``, or with safetensors files.
            rank: Whose items are taken where each rank wrote a ``.metadata`` of its own.

        Raises:
            NotFoundError: No such folder, or nothing in it that is a checkpoint.
            CorruptionError: It cannot be read.
        """
        stored = cls()
        for path in paths:
            stored._add(os.fspath(path), rank)
        return stored

    def _add(self, folder: str, rank: int) -> None:
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise NotFoundError(f"cannot read folder {folder!r}: {error.strerror}", key=folder, kind="no-folder",
                                hint="name the folder of a DCP or Hugging Face checkpoint") from None  # fmt: skip
        self.folders.append(folder)
        numbers = re.findall(r"\d+", Path(folder).absolute().name) or re.findall(r"\d+", Path(folder).absolute().parent.name)
        self.step = self.step or int(numbers[-1][-18:] if numbers else 0)
        ranked = sorted(int(found[1]) for found in map(_RANKED.fullmatch, names) if found)
        if ".metadata" in names:
            self._add_dcp(folder, [".metadata"])
        elif ranked:
            own = ranked[rank % len(ranked)]
            self._add_dcp(folder, [f"__{number}.metadata" for number in [own, *(number for number in ranked if number != own)]])
        elif any(name.endswith(_SUFFIX) for name in names) or INDEX in names:
            self._add_hf(folder, names)
        else:
            inside = [name for name in names if os.path.isdir(os.path.join(folder, name)) and _is_one(os.path.join(folder, name))]
            hint = (
                f"pass what is in it: {[os.path.join(folder, name) for name in inside]!r}"
                if inside
                else "name the folder with .metadata or *.safetensors"
            )
            raise NotFoundError(f"{folder!r} holds no DCP metadata and no safetensors files", key=folder, kind="no-checkpoint", hint=hint)

    # -- DCP -----------------------------------------------------------------------------------------------------------------

    def _add_dcp(self, folder: str, files: Sequence[str]) -> None:
        for file in files:
            path = os.path.join(folder, file)
            told = unpickled(_read(path, _MOST_METADATA_NBYTES), key=path)
            self._add_told(folder, told, first=file == files[0])

    def _add_told(self, folder: str, told: ToldMetadata, *, first: bool) -> None:
        for name, entry in told.tensors.items():
            word = WORDS.get(entry.dtype)
            if word is None:
                self.unread[name] = f"its dtype {entry.dtype} is none that everystep reads"
                continue
            chunks = [
                StoredChunk(region, os.path.join(folder, place.file) if place else "", place, zipped=True) for region, place in entry.chunks
            ]
            known = self.tensors.get(name)
            if known is None or first:
                self._unique(name, known)
                self.tensors[name] = StoredTensor(name, word, entry.shape, chunks)
            elif (known.dtype, known.shape) == (word, entry.shape):
                known.chunks += chunks
            else:
                raise CorruptionError(f"the ranks' metadata in {folder!r} contradict each other about {name!r}", key=name,
                                      kind="dcp-metadata", hint=_HINT)  # fmt: skip
        for name, place in told.plain.items():
            if first or name not in self.plain:
                self.plain[name] = StoredPlain(os.path.join(folder, place.file) if place else "", place)
        self.paths = {**told.paths, **self.paths}

    def _unique(self, name: str, known: object) -> None:
        if known is not None:
            raise LayoutError(f"{name!r} is in more than one of the folders {self.folders!r:.300}", key=name, kind="names",
                              hint="restore from one of them at a time")  # fmt: skip

    # -- Hugging Face ----------------------------------------------------------------------------------------------------------

    def _add_hf(self, folder: str, names: Sequence[str]) -> None:
        there = [name for name in names if name.endswith(_SUFFIX)]
        weights = _weight_map(os.path.join(folder, INDEX)) if INDEX in names else None
        if weights is None:
            files = there
            self.absent += [os.path.join(folder, name) for name in _gaps(there)]
        else:
            files = sorted(set(weights.values()))
            for name, file in weights.items():
                if file not in there:
                    # Its shape is known to nobody: what was in the file is told as lost when it is wanted.
                    self.absent.append(os.path.join(folder, file))
                    self.unread[name] = f"{os.path.join(folder, file)!r}, which holds it by {INDEX}, is not there"
        before = set(self.tensors)
        for file in files:
            if file in there:
                self._add_file(os.path.join(folder, file), before)
        self.absent = sorted(set(self.absent))
        for name, file in (weights or {}).items():
            if name not in self.tensors and name not in self.unread:
                raise CorruptionError(f"{INDEX} in {folder!r} lists tensor {name!r} in {file!r}, which does not hold it", key=name,
                                      kind="index", hint=_HINT)  # fmt: skip

    def _add_file(self, path: str, before: set[str]) -> None:
        header = read_header(path)
        regions = regions_of(path, header)
        for entry in header.entries:
            region, shape = regions.get(entry.name, (whole(entry.shape), entry.shape))
            place = Place(os.path.basename(path), header.data_start + entry.begin, entry.end - entry.begin)
            chunk = StoredChunk(region, path, place, zipped=False)
            partly = entry.name in regions
            known = self.tensors.get(entry.name)
            if known is None:
                self.tensors[entry.name] = StoredTensor(entry.name, entry.dtype, shape, [chunk], at_least=partly)
                continue
            self._unique(entry.name, known if entry.name in before else None)
            if known.dtype != entry.dtype or len(known.shape) != len(shape) or (not known.at_least and not partly and known.shape != shape):
                raise CorruptionError(f"the files of {os.path.dirname(path)!r} contradict each other about {entry.name!r}", key=entry.name,
                                      kind="safetensors", hint=_HINT)  # fmt: skip
            known.shape = tuple(map(max, known.shape, shape))
            known.at_least = known.at_least and partly
            known.chunks.append(chunk)


def _is_one(folder: str) -> bool:
    try:
        return any(name == ".metadata" or name.endswith(_SUFFIX) for name in os.listdir(folder))
    except OSError:
        return False


def _read(path: str, at_most: int) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > at_most:
                raise CorruptionError(f"{path!r} is {status.st_size:,} bytes long or no file", key=path, kind="size", hint=_HINT)
            return file.read()
    except OSError as error:
        raise CorruptionError(f"cannot read {path!r}: {error.strerror}", key=path, kind="unreadable", hint=_HINT) from None


def _weight_map(path: str) -> dict[str, str]:
    try:
        told = json.loads(_read(path, _MOST_INDEX_NBYTES))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptionError(f"{path!r} is no index: {error!r:.200}", key=path, kind="index", hint=_HINT) from None
    good = isinstance(told, dict) and all(isinstance(file, str) and is_inside(file) and "/" not in file for file in told.values())
    if not good:
        raise CorruptionError(
            f"{path!r} is no index: its weight_map does not map names to files beside it", key=path, kind="index", hint=_HINT
        )
    return dict(told)


def _gaps(names: Iterable[str]) -> list[str]:
    """Files that are missing by the numbers of the others (``-00001-of-00003``)."""
    series: dict[tuple[str, str], set[str]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found:
            series.setdefault((found[1], found[3]), set()).add(found[2])
    lost = []
    for (stem, total), numbers in series.items():
        if int(total) <= 100_000:
            lost += [
                f"{stem}{number:0{len(total)}d}-of-{total}{_SUFFIX}"
                for number in range(1, int(total) + 1)
                if f"{number:0{len(total)}d}" not in numbers
            ]
    return lost
