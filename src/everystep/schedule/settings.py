"""The knob: when, where and what, checked on construction; to and from what YAML and JSON say."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from everystep.errors import ConfigError
from everystep.schedule.reading import FORMS, is_step, read_when
from everystep.schedule.text import shown

_DTYPES = {
    "keep": "keep", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
}  # fmt: skip
_UNITS = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def size_nbytes(value: str | int) -> int:
    """Bytes in 5000000000, "5GB" (decimal) or "5GiB" (binary). ConfigError says which units there are."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{0,9})?)\s*([A-Za-z]+)\s*", value, re.ASCII) if isinstance(value, str) else None
    nbytes = int(float(found[1]) * _UNITS.get(found[2], 0)) if found is not None else 0
    if nbytes < 1:
        hint = f'write bytes as an int, or "5GB" (decimal) or "5GiB" (binary); the units are {", ".join(_UNITS)}'
        raise ConfigError(f"{shown(value)} is not a size", hint=hint)
    return nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Consolidate:
    """When checkpoints become whole models, where these go and what they look like: the same words in Python, YAML and on the command line.

    Args:
        when: ``"every"``, ``"never"``, ``"final"``, ``{"every": 500}``, ``{"every": "30min"}``,
            ``{"improves": "val_loss", "mode": "min", "min_delta": 0.01}``, ``{"metric": "val_loss", "below": 2.0}`` (or ``above``),
            ``{"at": [100, 200]}``, ``{"phases": [{"until": 1000, "when": "never"}, {"when": "final"}]}``, a list of these (any of),
            NeMo's ``True`` and ``False``, or text as on the command line. Kept as plain words, dicts and lists, in one form.
        into: ``"latest"`` (the run's ``exports/``, with ``LATEST``), ``"checkpoint"`` (inside the step), or a folder: a path object, or
            text with a ``/`` in it.
        name: Begins the names of the export folders.
        group: Which top-level entry of the state; None: the only module.
        keep: How many of the newest exports stay, besides the previous one; None: all.
        drop_shards: ``"optimizer"`` or ``"all"`` (also ``True``): what of the checkpoint is forgotten once its export is verified;
            False: nothing.
        dtype: ``"keep"``, ``"bf16"``, ``"fp16"`` or ``"fp32"``; what floating tensors of 16 bits and more are cast to.
        max_shard_size: Bytes, "5GB" or "5GiB" a file; None: as stored where files can be linked, else 5 GB.
        include: Patterns (as of a shell, on the exported names) of the tensors that are wanted; none: all.
        rename: Regular expressions with what replaces them, applied to each name in order.
        assets: Folder whose config, tokenizer and processor files go with the model.
        wait: Whether ``Checkpointer.close()`` waits for what is due, ``final`` included.
    """

    when: Any = "final"
    into: str = "latest"
    name: str = "model"
    group: str | None = None
    keep: int | None = 1
    drop_shards: bool | str = False
    dtype: str = "keep"
    max_shard_size: str | int | None = None
    include: tuple[str, ...] = ()
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assets: str | None = None
    wait: bool = True

    def __post_init__(self) -> None:
        """Check and bring into one form; ConfigError says what would be right."""
        self._set("when", read_when(self.when).document())
        self._set("into", _into(self.into))
        if not isinstance(self.name, str) or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.name) is None:
            raise self._wrong("name", "cannot begin a folder's name", "up to 100 of letters, digits, . _ and -, a letter or digit first")
        if self.group is not None and (not isinstance(self.group, str) or not self.group):
            raise self._wrong("group", "does not name an entry of the state", 'write one of the keys of what save() gets, such as "model"')
        if self.keep is not None and not is_step(self.keep, 1):
            raise self._wrong("keep", "is not a number of exports", "give an int >= 1, or None to keep all")
        if not isinstance(self.drop_shards, bool) and self.drop_shards not in ("optimizer", "all"):
            raise self._wrong("drop_shards", "is not known", 'write False, "optimizer" or "all" (also True)')
        self._set("drop_shards", "all" if self.drop_shards is True else self.drop_shards)
        dtype = str(self.dtype).removeprefix("torch.")  # torch's own dtypes too, without importing it
        if dtype not in _DTYPES:
            raise self._wrong("dtype", "is not known", "write keep, bf16, fp16 or fp32")
        self._set("dtype", _DTYPES[dtype])
        if self.max_shard_size is not None:
            size_nbytes(self.max_shard_size)
        include = (self.include,) if isinstance(self.include, str) else self.include
        if not isinstance(include, Sequence) or not all(isinstance(one, str) and one for one in include):
            raise self._wrong("include", "is not a list of patterns", 'write ("encoder.*", "head.*")')
        self._set("include", tuple(include))
        self._set("rename", _renames(self.rename))
        if self.assets is not None:
            self._set("assets", _path(self.assets) or None)
            if self.assets is None:
                raise ConfigError("assets='' is not a folder", hint="name the folder with config.json and the tokenizer's files")
        if not isinstance(self.wait, bool):
            raise self._wrong("wait", "is not known", "write True or False")

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # frozen for everybody else

    def _wrong(self, field: str, why: str, hint: str) -> ConfigError:
        return ConfigError(f"Consolidate({field}={shown(getattr(self, field))}) {why}", hint=hint)

    @property
    def max_shard_nbytes(self) -> int | None:
        """``max_shard_size`` in bytes."""
        return None if self.max_shard_size is None else size_nbytes(self.max_shard_size)


def _path(value: object) -> str:
    """A path as text. Not ``os.fspath``: nothing here touches the system."""
    text = value if isinstance(value, str) else getattr(type(value), "__fspath__", lambda _: None)(value)
    if not isinstance(text, str) or "\0" in text:
        raise ConfigError(f"{shown(value)} is not a path", hint="write it as text or as a pathlib.Path")
    return text


def _into(value: object) -> str:
    if value in ("checkpoint", "latest"):
        return str(value)
    text = _path(value)
    if text and "/" not in text and not isinstance(value, str):
        return f"./{text}"  # a path object says that it is a folder
    if "/" not in text:  # a word that is meant as a folder looks like a word that is misspelt
        folder = f', or the folder as "./{text}"' if text else ", or a folder"
        raise ConfigError(f"into={shown(value)} is not known", hint=f'write "latest" or "checkpoint"{folder}')
    return text


def _renames(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(one, str) for pair in value.items() for one in pair):
        raise ConfigError(f"rename={shown(value)} is not a mapping of text to text", hint='write {"^encoder\\\\.": "model.encoder."}')
    for pattern, replacement in value.items():
        try:
            re.compile(pattern).sub(replacement, "")  # reads the replacement too, whether anything matches or not
        except (re.error, IndexError) as error:
            raise ConfigError(f"rename={{{pattern!r}: {replacement!r}}} is not a regular expression and a replacement: {error}",
                              hint=r"what Python's re.sub takes; write \. for a dot and \1 for the first group") from None  # fmt: skip
    return dict(value)


_FIELDS = tuple(field.name for field in dataclasses.fields(Consolidate))


def to_document(consolidate: Consolidate) -> dict[str, Any]:
    """All settings as JSON and YAML say them."""
    document = {name: getattr(consolidate, name) for name in _FIELDS}
    document["when"] = read_when(consolidate.when).document()  # copies: nobody changes the settings through their document
    return {**document, "include": list(consolidate.include), "rename": dict(consolidate.rename)}


def from_document(document: Mapping[str, Any]) -> Consolidate:
    """Settings from what JSON or YAML said; what is not named has its default. ConfigError lists the keys when one is unknown."""
    if not isinstance(document, Mapping):
        hint = f"write {{when: {shown(document)}}}, with any of {', '.join(_FIELDS[1:])}"
        raise ConfigError(f"consolidate={shown(document)} is not a mapping", hint=hint)
    for key in document:
        if key in FORMS:
            raise ConfigError(f"consolidate: {key} belongs under when", hint=f"write {{when: {{{key}: ...}}}}")
        if key not in _FIELDS:
            raise ConfigError(f"consolidate: {shown(key)} is not known", hint=f"the keys are {', '.join(_FIELDS)}")
    return Consolidate(**document)
