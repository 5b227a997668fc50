"""The header of a safetensors file: bytes <-> entries, with every bound checked. No tensor data passes through here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import msgspec

from everystep.errors import CorruptionError, LayoutError
from everystep.region import Region, whole

ALIGN = 4096
"""The data of our files starts at a multiple of this, so that it can be written and read directly."""

MAX_HEADER_NBYTES = 100_000_000
"""Readers refuse longer headers (without the eight bytes of length before them)."""

METADATA = "__metadata__"
OURS = "everystep"

DTYPES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
"""Safetensors dtype word -> bytes of one item."""

_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")
_MAX_DIM = 1 << 63


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a file: bytes ``begin:end``, counted from where the data starts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Told(msgspec.Struct, frozen=True, gc=False):
    """An entry as the header tells it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    """What a file's header says. ``data_start`` is the data's offset in the file."""

    entries: tuple[Entry, ...]
    """In the order of their bytes."""
    metadata: dict[str, str]
    data_start: int


class Stored(msgspec.Struct, frozen=True):
    """What an entry of a file that everystep wrote is: ``region`` of the tensor whose full name and shape these are."""

    name: str
    shape: tuple[int, ...]
    region: Region


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor. LayoutError for a dtype that no safetensors file can hold."""
    size = DTYPES.get(dtype)
    if size is None:
        raise LayoutError(f"dtype {dtype!r} cannot be stored", kind="dtype", hint=f"safetensors files hold {', '.join(DTYPES)}")
    return size * math.prod(shape)


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The file's first bytes: eight bytes of length and JSON, padded with spaces so that the data starts at a multiple of ``ALIGN``.

    ``entries`` are in the order of their bytes and leave no gaps.

    Raises:
        LayoutError: Two entries share a name, one is called ``__metadata__``, they leave gaps or overlap, a size does not match,
            or the header is too long for readers.
    """
    body: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        if entry.name in body or entry.name == METADATA:
            why = "is reserved for the file's own metadata" if entry.name == METADATA else "occurs twice"
            raise LayoutError(f"entry {entry.name!r} {why} in one safetensors file", key=entry.name, kind="name", hint="rename the tensor")
        if entry.begin != at or entry.end - at != nbytes_of(entry.dtype, entry.shape):
            raise LayoutError(
                f"entry {entry.name!r}: bytes {entry.begin}:{entry.end} do not follow byte {at} "
                f"in the size of {entry.dtype} {entry.shape!r}",
                key=entry.name,
                kind="offsets",
            )
        at = entry.end
        body[entry.name] = _Told(entry.dtype, entry.shape, (entry.begin, entry.end))
    text = msgspec.json.encode(body)
    nbytes = -(len(text) + 8) % ALIGN + len(text)
    if nbytes > MAX_HEADER_NBYTES:
        raise LayoutError(
            f"a header of {nbytes:,} bytes for {len(entries):,} tensors is longer than safetensors readers take ({MAX_HEADER_NBYTES:,})",
            kind="header-size",
            hint="split the file",
        )
    return nbytes.to_bytes(8, "little") + text.ljust(nbytes)


def data_start(first_bytes: bytes | memoryview, file_nbytes: int) -> int:
    """Where the data starts, from the first eight bytes of a file: read that many bytes for ``parse``.

    Raises:
        CorruptionError: The file is too short, or says that its header is longer than it may be.
    """
    if len(first_bytes) < 8 or file_nbytes < 8:
        raise _corrupt(f"a file of {file_nbytes} bytes is too short to be one")
    nbytes = int.from_bytes(first_bytes[:8], "little")
    if nbytes > MAX_HEADER_NBYTES:
        raise _corrupt(f"its header would be {nbytes:,} bytes long, more than {MAX_HEADER_NBYTES:,}")
    if nbytes + 8 > file_nbytes:
        raise _corrupt(f"its header would end at byte {nbytes + 8:,} of a file of {file_nbytes:,}")
    return nbytes + 8


def parse(first_bytes: bytes | memoryview, file_nbytes: int) -> Header:
    """The header of a file of ``file_nbytes``, anybody's. ``first_bytes`` reach at least up to ``data_start(...)``.

    Raises:
        CorruptionError: Not a safetensors header, or anything in it is out of bounds: gaps, overlaps, sizes that do not match
            dtype and shape, ends beyond the file, trailing bytes, names twice.
        LayoutError: An entry has a type of less than a byte, which everystep does not read.
    """
    start = data_start(first_bytes, file_nbytes)
    if len(first_bytes) < start:
        raise _corrupt(f"{len(first_bytes):,} bytes are too few for a header of {start:,}")
    body = _load(bytes(first_bytes[8:start]))
    metadata = body.pop(METADATA, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(f"{METADATA} does not map words to words")
    entries = sorted((_entry(name, value) for name, value in body.items()), key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            raise _corrupt(f"entry {entry.name!r} begins at byte {entry.begin:,} of the data, not at {at:,}: there is a gap or an overlap")
        at = entry.end
    if start + at != file_nbytes:
        raise _corrupt(f"its entries end at byte {start + at:,} of a file of {file_nbytes:,}")
    return Header(tuple(entries), metadata, start)


def _load(text: bytes) -> dict[str, object]:
    """The JSON object in ``text``: UTF-8, begins with a brace, no name twice."""
    if not text.startswith(b"{"):
        raise _corrupt("its header is not a JSON object")
    try:
        body = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except CorruptionError:
        raise
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"its header is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise _corrupt("its header is not a JSON object")
    return body


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _corrupt(f"{twice!r} occurs twice in its header")
    return found


def _no_constant(word: str) -> object:
    raise ValueError(f"{word} is no JSON value")


def _entry(name: str, value: object) -> Entry:
    if not isinstance(value, dict):
        raise _corrupt(f"entry {name!r} is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise _corrupt(f"entry {name!r} lacks dtype, shape or data_offsets")
    if not all(type(number) is int and 0 <= number < _MAX_DIM for number in (*shape, *offsets)):
        raise _corrupt(f"entry {name!r} has a number that is no size: shape {shape!r:.100}, data_offsets {offsets!r:.100}")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise _corrupt(f"{name!r} is no text") from None
    if dtype in _SUB_BYTE:
        raise LayoutError(
            f"entry {name!r} is of type {dtype}, which is smaller than a byte",
            key=name,
            kind="dtype",
            hint="everystep does not read such types",
        )
    if dtype not in DTYPES:
        raise _corrupt(f"entry {name!r} has the unknown dtype {dtype!r:.40}")
    begin, end = offsets
    if end - begin != DTYPES[dtype] * math.prod(shape):
        raise _corrupt(f"entry {name!r}: bytes {begin:,}:{end:,} are not the size of {dtype} {shape!r:.100}")
    return Entry(name, dtype, tuple(shape), begin, end)


def our_metadata(*, group: str, entries: Mapping[str, Stored], aliases: Mapping[str, str]) -> dict[str, str]:
    """The ``__metadata__`` of a file that everystep writes.

    Args:
        group: Full names are ``<group>.<entry>`` unless ``entries`` says otherwise.
        entries: Entry name -> what it is, for those that are not whole or whose full name differs.
        aliases: Tied full name -> the full name (in this file) it is stored under.
    """
    told: dict[str, object] = {"group": group}
    if entries:
        told["entries"] = dict(entries)
    if aliases:
        told["aliases"] = dict(sorted(aliases.items()))
    return {"format": "pt", OURS: msgspec.json.encode(told).decode()}


class _Ours(msgspec.Struct):
    group: str
    entries: dict[str, Stored] = {}
    aliases: dict[str, str] = {}


def our_entries(found: Header) -> tuple[dict[str, Stored], dict[str, str]] | None:
    """What each entry of a file that everystep wrote is, and its aliases; None for a file by others.

    Raises:
        CorruptionError: Our note in the metadata cannot be read or contradicts the entries.
    """
    text = found.metadata.get(OURS)
    if text is None:
        return None
    try:
        told = msgspec.json.decode(text, type=_Ours)
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"its {OURS!r} note cannot be read: {error}") from None
    stored = {}
    for entry in found.entries:
        known = told.entries.get(entry.name)
        if known is None:
            known = Stored(f"{told.group}.{entry.name}", entry.shape, whole(entry.shape))
        if known.region.sizes != entry.shape or not known.region.fits(known.shape):
            raise _corrupt(f"entry {entry.name!r} of shape {entry.shape!r} is not region {known.region} of {known.name!r}")
        stored[entry.name] = known
    names = {known.name for known in stored.values()}
    for alias, name in told.aliases.items():
        if name not in names or alias in names:
            raise _corrupt(f"{alias!r} cannot be an alias of {name!r} there")
    return stored, told.aliases


def _corrupt(why: str) -> CorruptionError:
    return CorruptionError(f"not a sound safetensors file: {why}", kind="safetensors", hint="take another copy or an older step")
