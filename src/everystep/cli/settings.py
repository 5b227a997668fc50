"""What is consolidated and how, as options of commands, as a file, or both: flags go before the file."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from everystep import errors
from everystep.schedule import Consolidate, from_document, parse_when

__all__ = [
    "Assets", "DropShards", "Dtype", "GroupOf", "Include", "Into", "Keep", "MaxShardSize", "Name", "Rename", "Settings", "When",
    "read_settings", "settle",
]  # fmt: skip

When = Annotated[
    str | None,
    typer.Option(
        "--when", metavar="W", help="The schedule: every, never, final, or such as 'every: 5', 'every: 30min', 'improves: val_loss', "
        "'{metric: acc, above: 0.9}', 'at: [100, 500]', or a list of these."
    ),
]  # fmt: skip
Into = Annotated[
    str | None,
    typer.Option("--into", metavar="PLACE", help="checkpoint (beside the step), latest (exports/LATEST, the default), or a folder."),
]
Name = Annotated[str | None, typer.Option("--name", help="Begins the names of export folders; model unless given.")]
GroupOf = Annotated[str | None, typer.Option("--group", help="Which top-level entry of the state; needed where there are several modules.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="keep (the default), bf16, fp16 or fp32.")]
MaxShardSize = Annotated[str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Bytes of a file at most, such as 5GB.")]
Include = Annotated[list[str] | None, typer.Option("--include", metavar="PATTERN", help="Only tensors whose names match; may be repeated.")]
Rename = Annotated[
    list[str] | None, typer.Option("--rename", metavar="A=B", help="Regular expression and what it becomes, in order; may be repeated.")
]
Assets = Annotated[str | None, typer.Option("--assets", metavar="DIR", help="Folder with config.json, tokenizer files and the like.")]
Keep = Annotated[str | None, typer.Option("--keep", metavar="N", help="Newest exports that stay, besides the one before; or all.")]
DropShards = Annotated[
    str | None,
    typer.Option("--drop-shards", metavar="WHAT", help="What of the checkpoint goes once its export is verified: no, optimizer or all."),
]
Settings = Annotated[
    str | None,
    typer.Option("--settings", metavar="FILE", help="JSON or YAML with the same words, or with a `consolidate:` block; - is stdin."),
]

_YAML_HINT = "write it as JSON, or: pip install PyYAML"


def settle(
    *,
    settings: str | None,
    when: str | None = None,
    into: str | None = None,
    name: str | None = None,
    group: str | None = None,
    dtype: str | None = None,
    max_shard_size: str | None = None,
    include: list[str] | None = None,
    rename: list[str] | None = None,
    assets: str | None = None,
    keep: str | None = None,
    drop_shards: str | None = None,
) -> Consolidate:
    """The settings of a file with those of the flags over them.

    Raises:
        ConfigError: A word is not known, or the file cannot be read.
    """
    document = {} if settings is None else read_settings(settings)
    if when is not None:
        document["when"] = parse_when(when)
    if into is not None:
        document["into"] = _place(into)
    for word, value in (("name", name), ("group", group), ("dtype", dtype), ("max_shard_size", max_shard_size)):
        if value is not None:
            document[word] = int(value) if word == "max_shard_size" and value.isdecimal() else value
    if include:
        document["include"] = list(include)
    if rename:
        document["rename"] = dict(_renaming(pair) for pair in rename)
    if assets is not None:
        document["assets"] = os.path.abspath(assets)
    if keep is not None:
        document["keep"] = _number_or_all(keep)
    if drop_shards is not None:
        document["drop_shards"] = False if drop_shards in {"no", "none", "false"} else drop_shards
    return from_document(document)


def _place(into: str) -> str:
    """A folder in full; a word is left to be judged: ``lates`` is not meant as one."""
    if "://" in into or ("/" not in into and into not in {".", ".."} and not into.startswith("~")):
        return into
    return os.path.abspath(os.path.expanduser(into))


def _renaming(pair: str) -> tuple[str, str]:
    pattern, found, replacement = pair.rpartition("=")
    if not found or not pattern:
        raise errors.ConfigError(f"--rename {pair!r} has no '='", kind="usage", hint="write PATTERN=REPLACEMENT, such as '^model\\.='")
    return pattern, replacement


def _number_or_all(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise errors.ConfigError(f"--keep {text!r} is no number", kind="usage", hint="give a number of exports, or all") from None


# -- files ----------------------------------------------------------------------------------------------------------------
def read_settings(path: str) -> dict[str, Any]:
    """The mapping in a JSON or YAML file (``-``: stdin). Of a file with a ``consolidate`` block, such as a recipe's, the block."""
    where = "stdin" if path == "-" else repr(path)
    try:
        if path == "-":
            text = sys.stdin.read()
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise errors.ConfigError(f"the settings in {where} cannot be read: {why}", key=path, kind="settings") from None
    document = _parse(text, where)
    if document is None:
        document = {}
    if isinstance(document, dict) and "consolidate" in document:
        document = document["consolidate"]
    if not isinstance(document, dict):
        raise errors.ConfigError(f"the settings in {where} are no mapping", key=path, kind="settings", hint='such as {"when": "final"}')
    return dict(document)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        broken = error
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]  # not among the dependencies
    except ImportError:
        told = f"the settings in {where} are not JSON ({broken}), and there is no PyYAML to read YAML"
        raise errors.ConfigError(told, kind="settings", hint=_YAML_HINT) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise errors.ConfigError(
            f"the settings in {where} are neither JSON nor YAML: {' '.join(str(error).split())}", kind="settings"
        ) from None
