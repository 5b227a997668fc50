"""Where the bytes of a tensor lie inside the zip that ``torch.save`` wrote, so that a part of it can be read without the rest."""

from __future__ import annotations

import io
import os
import pickle  # the unpickler below refuses all but a few names
import struct
import zipfile
import zlib
from typing import Any, NamedTuple

import torch

_STORAGES = {
    f"{word}Storage": dtype
    for word, dtype in {
        "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64,
        "Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64, "ComplexFloat": torch.complex64,
        "Untyped": torch.uint8,
    }.items()
}  # fmt: skip
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MOST_HEADER_NBYTES = 1 << 20
_BY_THE_WAY = (zipfile.BadZipFile, zipfile.LargeZipFile, struct.error, EOFError, ValueError, OverflowError, NotImplementedError, KeyError)
BROKEN = (*_BY_THE_WAY, MemoryError)
"""What the standard library's zip reader raises for bytes that are no zip."""


class Record(NamedTuple):
    """A tensor inside an archive: ``nbytes`` of a storage from ``offset`` (of the view) on, and how the tensor lies in it (in items)."""

    offset: int
    nbytes: int
    crc: int
    """CRC-32 of the storage; 0 where torch was told to leave it out."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...]

    def is_row_major(self) -> bool:
        """Whether the storage holds the tensor's items in their order, and nothing else."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.first == 0 and self.nbytes == expected * self.dtype.itemsize


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype
    numel: int


class _Told(NamedTuple):
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _OtherError(Exception):
    """Not a plain tensor in the usual form: torch itself has to read it."""


def _tensor(*told: Any) -> _Told:
    """``_rebuild_tensor_v2``: its dtype is the storage's; more than six arguments are attributes that it needs."""
    if len(told) != 6 or not isinstance(told[0], _Storage):
        raise _OtherError
    return _checked(told, told[0].dtype)


def _typed_tensor(*told: Any) -> _Told:
    """``_rebuild_tensor_v3``: its storage has no dtype, the seventh argument is the tensor's."""
    if len(told) not in {7, 8} or not isinstance(told[0], _Storage) or told[7:] not in {(), (None,)}:
        raise _OtherError
    return _checked(told, told[6])


def _checked(told: tuple[Any, ...], dtype: object) -> _Told:
    storage, first, shape, strides = told[:4]
    good = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)
    if (
        not good
        or not all(type(number) is int and number >= 0 for number in (first, *shape, *strides))
        or not isinstance(dtype, torch.dtype)
    ):
        raise _OtherError
    return _Told(storage, first, shape, strides, dtype)


_REBUILT = {"_rebuild_tensor_v2": _tensor, "_rebuild_tensor_v3": _typed_tensor}


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 (see unpickling.py: that in C makes its memo as large as a few bytes say)
    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch._utils" and name in _REBUILT:
            return _REBUILT[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in {"torch", "torch.storage"} and name in _STORAGES:
            return _STORAGES[name]
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise _OtherError

    def persistent_load(self, told: Any, /) -> _Storage:
        if not isinstance(told, tuple) or len(told) != 5 or told[0] != "storage":
            raise _OtherError
        _, dtype, key, _, numel = told
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or type(numel) is not int:
            raise _OtherError
        return _Storage(key, dtype, numel)


def record_of(view: io.BufferedIOBase, nbytes: int) -> Record | None:
    """The one tensor of an archive of ``nbytes``; None when only torch can tell (compressed, a subclass, another byte order).

    Raises:
        BROKEN: The bytes are no sound zip.
    """
    with zipfile.ZipFile(view) as archive:
        listed = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in listed if name.endswith("/data.pkl")]
        if len(pickles) != 1 or listed[pickles[0]].file_size > _MOST_HEADER_NBYTES:
            return None
        root = pickles[0].removesuffix("data.pkl")
        order = listed.get(root + "byteorder")
        if order is not None and _contents(view, order, nbytes) != b"little":
            return None
        try:
            told = _Unpickler(io.BytesIO(_contents(view, listed[pickles[0]], nbytes) or b"")).load()
        except (_OtherError, pickle.UnpicklingError, TypeError, AttributeError, IndexError, EOFError, RecursionError):
            return None
    entry = listed.get(f"{root}data/{told.storage.key}") if isinstance(told, _Told) else None
    if entry is None or not _is_stored(entry):
        return None
    begin = _begin(view, entry, nbytes)
    last = told.first + sum((size - 1) * stride for size, stride in zip(told.shape, told.strides, strict=True))
    if 0 not in told.shape and (last + 1) * told.dtype.itemsize > entry.file_size:
        raise zipfile.BadZipFile("a tensor reaches past its storage")
    return Record(begin, entry.file_size, entry.CRC, told.dtype, told.shape, told.first, told.strides)


def _is_stored(entry: zipfile.ZipInfo) -> bool:
    return entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size


def _begin(view: io.BufferedIOBase, entry: zipfile.ZipInfo, nbytes: int) -> int:
    """Where an entry's bytes begin."""
    view.seek(entry.header_offset)
    mark, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(view.read(_LOCAL_HEADER.size))
    begin: int = entry.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
    if mark != b"PK\3\4" or begin + entry.file_size > nbytes:
        raise zipfile.BadZipFile("a record ends outside the archive")
    return begin


def _contents(view: io.BufferedIOBase, entry: zipfile.ZipInfo, nbytes: int) -> bytes | None:
    """An entry's bytes; None when they are compressed. Not by ``ZipFile.read``, which does not know that sums may be left out."""
    if not _is_stored(entry):
        return None
    view.seek(_begin(view, entry, nbytes))
    data = view.read(entry.file_size)
    if entry.CRC and zlib.crc32(data) != entry.CRC:
        raise zipfile.BadZipFile(f"the sum of {entry.filename!r} does not match")
    return data


class FileView(io.RawIOBase):
    """``nbytes`` from ``offset`` on of a file descriptor, which stays open; has a place of its own."""

    def __init__(self, descriptor: int, offset: int, nbytes: int) -> None:
        self._descriptor, self._offset, self._nbytes, self._at = descriptor, offset, nbytes, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """As for any file."""
        at = offset + (0, self._at, self._nbytes)[whence]
        if at < 0:
            raise ValueError(f"cannot seek to {at}")
        self._at = at
        return at

    def tell(self) -> int:
        """As for any file."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """As for any file."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._nbytes - self._at))
        done = os.preadv(self._descriptor, [view[:count]], self._offset + self._at) if count else 0
        self._at += done
        return done
