"""The model card: what an export's folder says of itself to people, and the record that says the same to programs."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from everystep.errors import CorruptionError
from everystep.manifest import join_metrics, split_metrics

__all__ = ["CARD", "RECORD", "FileRecord", "Record", "decode_record", "encode_record", "model_card"]

CARD = "README.md"
RECORD = "everystep.json"
_FORMAT = 1


class FileRecord(msgspec.Struct, frozen=True):
    """A file of an export. ``digest``: XXH3-128 over all of it; "" for one that is the checkpoint's own file by a second name."""

    name: str
    nbytes: int
    digest: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``everystep.json``: what an export is, and of which files it consists."""

    format: int = _FORMAT
    id: str
    """Digest of all that shapes the export; equal exports have the same."""
    plan: str
    """``ExportPlan.id``: of the weights alone."""
    name: str
    key: str
    step: int
    attempt: int | None
    """Of an everystep run; None for others' checkpoints."""
    saved_at: float
    """Of the checkpoint, seconds since the epoch."""
    metrics: dict[str, float]
    nonfinite: dict[str, str] = {}
    """Only in the file: metrics that JSON has no number for."""
    kind: str
    """Who wrote the checkpoint."""
    source: str
    """Name (not path) of the run's or checkpoint's folder."""
    origin: str
    """Digest that tells one run from another."""
    identity: str
    """``Source.identity``."""
    reason: str
    """Why it was exported."""
    published_at: float
    settings: dict[str, Any]
    """The schedule's words, as YAML has them."""
    files: tuple[FileRecord, ...]
    """All of the folder, but this one."""
    aliases: dict[str, str]
    """Tied name, in no file -> the name it is stored under."""
    total_nbytes: int
    """Of the tensors."""
    linked_nbytes: int
    """Of files that are the checkpoint's own."""
    everystep: str
    """Version of the writer."""


def encode_record(record: Record) -> bytes:
    """As ``everystep.json``."""
    finite, words = split_metrics(record.metrics)
    told = msgspec.structs.replace(record, metrics=finite, nonfinite=words)
    return msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n"


def decode_record(data: bytes, path: str) -> Record:
    """The record in ``data``. CorruptionError when it is none (or of a newer version: such an export is not ours to judge)."""
    try:
        record = msgspec.json.decode(data, type=Record)
        if record.format != _FORMAT:
            raise CorruptionError(f"{path!r} is of format {record.format}", key=path, kind="record", hint="pip install -U everystep")
        return msgspec.structs.replace(record, metrics=join_metrics(record.metrics, record.nonfinite), nonfinite={})
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path!r} cannot be read: {error}", key=path, kind="record", hint="export again") from None


def model_card(record: Record, *, adapter: bool, base_model: str = "") -> str:
    """Markdown, with the front matter that hubs read.

    Args:
        record: What is told.
        adapter: It is a PEFT adapter and no whole model.
        base_model: What the adapter belongs to.
    """
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}"]
    lines += [f"base_model: {_quoted(base_model)}"] if base_model else []
    lines += ["tags:", "- everystep", "---", "", f"# {record.name}, step {record.step:,}", ""]
    what = "The adapter" if adapter else "The model"
    lines += [f"{what} as it was at step {record.step:,}: checkpoint `{record.key}` of `{record.source}` ({record.kind}).", ""]
    lines += ["| | |", "|---|---|", f"| step | {record.step} |"]
    lines += [f"| attempt | {record.attempt} |"] if record.attempt is not None else []
    lines += [
        f"| saved | {_time(record.saved_at)} |",
        f"| consolidated | {_time(record.published_at)} |",
        f"| because | {_cell(record.reason)} |",
        f"| tensors | {record.total_nbytes:,} bytes |",
        f"| checkpoint's digest | `{record.identity}` |",
        f"| export's digest | `{record.id}` |",
    ]
    if record.metrics:
        lines += ["", "## Metrics", "", "| metric | value |", "|---|---|"]
        lines += [f"| {_cell(name)} | {value:.6g} |" for name, value in sorted(record.metrics.items())]
    linked = "*linked*: the checkpoint's own file by a second name, with the checkpoint's own digests."
    lines += ["", "## Files", "", f"XXH3-128 of each file; {linked}", ""]
    lines += ["| file | bytes | digest |", "|---|---|---|"]
    lines += [f"| {_cell(file.name)} | {file.nbytes:,} | {f'`{file.digest}`' if file.digest else '*linked*'} |" for file in record.files]
    if record.aliases:
        lines += ["", "## Tied weights", "", "Stored once; they load under both names.", ""]
        lines += [f"- `{alias}` is `{name}`" for alias, name in sorted(record.aliases.items())]
    lines += ["", f"Written by everystep {record.everystep}; the same for programs: `{RECORD}`."]
    return "\n".join(lines) + "\n"


def _time(seconds: float) -> str:
    try:
        return dt.datetime.fromtimestamp(seconds, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g} s since the epoch"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("\r", " ")


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
