"""DCP's ``.metadata``: a pickle, read without running anything that it names.

Theory of operation. The unpickler knows the few classes that PyTorch's Distributed Checkpoint (DCP) writes there, by module and name. For
each it makes an inert record that keeps what the pickle says about the object; torch's own classes are not touched, so that neither their
constructors nor the version of torch that wrote the file matter. Any other name is refused before anything is called. What was read is then
checked field by field: a hostile file may put anything anywhere. The unpickler is the standard library's in Python: that in C keeps its
memo in an array, which a few bytes make as large as they like.
"""

from __future__ import annotations

import dataclasses
import io
import pickle  # the unpickler below refuses all but a few names
import posixpath
from collections.abc import Mapping
from typing import Any

import torch

from everystep.errors import CorruptionError
from everystep.region import Region

_HINT = "take another copy or an older step"
_MOST = 1 << 62


class _Record:
    """An object of the pickle: what it was made of, and its state. Never does anything."""

    __slots__ = ("args", "state")

    def __new__(cls, *args: object) -> _Record:  # noqa: PYI034 (typing.Self needs Python 3.11)
        made = super().__new__(cls)
        made.args, made.state = args, None  # type: ignore[attr-defined]
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __repr__(self) -> str:
        return type(self).__name__

    def fields(self) -> Mapping[str, Any]:
        """The attributes by name; empty where the state is something else."""
        return self.state if isinstance(self.state, dict) else {}


def _kind(name: str) -> type[_Record]:
    return type(name, (_Record,), {"__slots__": ()})


class _Tensor(_Record):
    """TensorStorageMetadata."""

    __slots__ = ()


class _Plain(_Record):
    """BytesStorageMetadata."""

    __slots__ = ()


class _Properties(_Record):
    """TensorProperties."""

    __slots__ = ()


class _Chunk(_Record):
    """ChunkStorageMetadata."""

    __slots__ = ()


class _Index(_Record):
    """MetadataIndex."""

    __slots__ = ()


class _Storage(_Record):
    """_StorageInfo."""

    __slots__ = ()


class _Metadata(_Record):
    """Metadata."""

    __slots__ = ()


_DCP = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_Ignored = _kind("Ignored")

_KNOWN: Mapping[tuple[str, str], object] = {
    (_DCP, "Metadata"): _Metadata,
    (_DCP, "TensorStorageMetadata"): _Tensor,
    (_DCP, "BytesStorageMetadata"): _Plain,
    (_DCP, "ChunkStorageMetadata"): _Chunk,
    (_DCP, "TensorProperties"): _Properties,
    (_DCP, "MetadataIndex"): _Index,
    (_DCP, "StorageMeta"): _Ignored,
    (_DCP, "_MEM_FORMAT_ENCODING"): _Ignored,
    (_OLD, "TensorProperties"): _Properties,
    (_OLD, "MEM_FORMAT_ENCODING"): _Ignored,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Storage,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _Ignored,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    # The folder that the checkpoint was written to, as StorageMeta tells it.
    **{(home, name): _Ignored for home in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath", "WindowsPath")},
}  # fmt: skip
"""What a pickle of DCP's may name, and what stands for it here."""


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 (see above: the public name is the one in C)
    def find_class(self, module: str, name: str, /) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch":
            value = vars(torch).get(name)
            if isinstance(value, torch.dtype):
                return value
        raise _RefusedError(f"{module}.{name}")


class _RefusedError(Exception):
    """The pickle names something that DCP's metadata does not need."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one item lies: ``nbytes`` from ``offset`` on of a file below the checkpoint's folder."""

    file: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ToldTensor:
    """A tensor as the metadata tells it; a chunk without a place is one that nobody wrote."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[Region, Place | None], ...]


@dataclasses.dataclass(frozen=True)
class ToldMetadata:
    """What a ``.metadata`` file says, checked."""

    tensors: Mapping[str, ToldTensor]
    plain: Mapping[str, Place | None]
    """Items that ``torch.save`` wrote."""
    paths: Mapping[str, tuple[str | int, ...]]
    """Name -> the way to it in the saved state dict, where the planner told it."""


def unpickled(data: bytes, *, key: str) -> ToldMetadata:
    """What the bytes of a ``.metadata`` file say. ``key`` is its path, for messages.

    Raises:
        CorruptionError: Not such a pickle, it names a class that is not DCP's (the message says which), or a field is not what it must be.
    """
    try:
        told = _Unpickler(io.BytesIO(data)).load()
    except _RefusedError as error:
        raise CorruptionError(
            f"{key!r} names {str(error)!r:.200}, which DCP's metadata has no use for: it is refused, and nothing of it was run",
            key=key, kind="pickle", hint="do not load this checkpoint with anything that unpickles, unless you trust where it comes from",
        ) from None  # fmt: skip
    except Exception as error:  # a damaged pickle fails in any way there is, and each is the same to the reader
        raise _bad(key, f"it cannot be unpickled ({type(error).__name__}: {error!s:.200})") from None
    return _Reading(key).metadata(told)


def _bad(key: str, why: str) -> CorruptionError:
    return CorruptionError(f"{key!r} is no DCP metadata: {why}", key=key, kind="dcp-metadata", hint=_HINT)


class _Reading:
    """The records of one file -> checked values."""

    def __init__(self, key: str) -> None:
        self.key = key

    def expect(self, good: object, what: str) -> None:
        if not good:
            raise _bad(self.key, what)

    def metadata(self, told: object) -> ToldMetadata:
        self.expect(isinstance(told, _Metadata), f"it holds a {type(told).__name__}")
        fields = told.fields()  # type: ignore[attr-defined]
        entries, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
        self.expect(isinstance(entries, dict), "it lists no entries")
        self.expect(isinstance(storage, dict), "it does not say where its entries lie")
        places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for index, info in storage.items():
            self.expect(isinstance(index, _Index) and isinstance(info, _Storage), "its list of places holds something else")
            at, name = index.fields().get("offset"), index.fields().get("fqn")
            self.expect(isinstance(name, str), f"an entry is called {name!r:.80}")
            places[name, None if at is None else self.numbers(at, name)] = self.place(info, name)
        tensors: dict[str, ToldTensor] = {}
        plain: dict[str, Place | None] = {}
        for name, entry in entries.items():
            self.expect(isinstance(name, str), f"an entry is called {name!r:.80}")
            if isinstance(entry, _Plain):
                plain[name] = places.get((name, None))
            else:
                self.expect(isinstance(entry, _Tensor), f"entry {name!r} is a {type(entry).__name__}")
                tensors[name] = self.tensor(name, entry.fields(), places)
        return ToldMetadata(tensors, plain, self.paths(fields.get("planner_data"), entries))

    def tensor(self, name: str, fields: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...] | None], Place]) -> ToldTensor:
        shape = self.numbers(fields.get("size"), name)
        properties = fields.get("properties")
        state = properties.state if isinstance(properties, _Properties) else None
        dtype = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else None
        self.expect(isinstance(dtype, torch.dtype), f"tensor {name!r} has no dtype")
        chunks: Any = fields.get("chunks")
        self.expect(isinstance(chunks, list), f"tensor {name!r} has no chunks")
        found: list[tuple[Region, Place | None]] = []
        for chunk in chunks:
            self.expect(isinstance(chunk, _Chunk), f"a chunk of {name!r} is a {type(chunk).__name__}")
            region = Region(self.numbers(chunk.fields().get("offsets"), name), self.numbers(chunk.fields().get("sizes"), name))
            self.expect(region.fits(shape), f"a chunk of {name!r} is region {region}, out of the shape {list(shape)}")
            place = places.get((name, region.offsets))
            found.append((region, places.get((name, None)) if place is None and region.sizes == shape else place))
        return ToldTensor(dtype, shape, tuple(found))  # type: ignore[arg-type]

    def numbers(self, told: object, name: str) -> tuple[int, ...]:
        good = isinstance(told, (tuple, list)) and all(type(number) is int and 0 <= number < _MOST for number in told)
        self.expect(good, f"{name!r} has a size or offset {told!r:.80}")
        return tuple(told)  # type: ignore[arg-type]

    def place(self, info: _Storage, name: str) -> Place:
        fields = info.fields()
        file, offset, nbytes = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        self.expect(isinstance(file, str) and is_inside(file), f"{name!r} lies in file {file!r:.200}, which leads out of the folder")
        good = all(type(number) is int and 0 <= number < _MOST for number in (offset, nbytes))
        self.expect(good, f"{name!r} lies at byte {offset!r:.40}, {nbytes!r:.40} long")
        if fields.get("transform_descriptors"):
            raise CorruptionError(
                f"{self.key!r}: {name!r} was written through {fields['transform_descriptors']!r:.80}, which everystep cannot undo",
                key=self.key, kind="transformed", hint="save it again without stream extensions",
            )  # fmt: skip
        return Place(file, offset, nbytes)  # type: ignore[arg-type]

    @staticmethod
    def paths(told: object, entries: Mapping[str, object]) -> dict[str, tuple[str | int, ...]]:
        """The default planner's way to each name; what other planners put there is theirs."""
        if not isinstance(told, dict):
            return {}
        return {
            name: path
            for name, path in told.items()
            if name in entries and isinstance(path, tuple) and path and all(type(part) in {str, int} for part in path)
        }


def is_inside(file: str) -> bool:
    """Whether a relative path stays below the folder it is relative to."""
    return bool(file) and "\0" not in file and not posixpath.isabs(file) and ".." not in file.split("/") and file not in {".", "./"}
