"""What goes with weights so that they load: configuration, tokenizer, processor, templates, a model's own code. Nothing else is carried."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import xxhash

from everystep.errors import ConfigError, CorruptionError, NotFoundError, PermanentStoreError

__all__ = ["CONFIG", "NO_ASSETS", "Assets", "collect"]

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
_CARRIED = (
    CONFIG, ADAPTER_CONFIG, "generation_config.json", "quantize_config.json", "hf_quant_config.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges*", "*.model", "*.tiktoken",
    "processor_config.json", "*preprocessor_config.json", "image_processor*.json", "feature_extractor*.json", "chat_template*",
)  # fmt: skip
_CODE = ("configuration_*.py", "modeling_*.py", "modular_*.py", "tokenization_*.py", "processing_*.py", "image_processing_*.py",
         "feature_extraction_*.py", "video_processing_*.py", "generation_*.py")  # fmt: skip
_NAMING_CODE = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files besides the configuration that may name code of the model's own."""
_FOLDERS = {"additional_chat_templates": ("*.jinja",)}
"""Folders that go too, and which of their files."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")
_MAX_NBYTES = 1 << 30
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclasses.dataclass(frozen=True)
class Assets:
    """Files by name (``"config.json"``, ``"additional_chat_templates/tool.jinja"``), sorted, with their contents."""

    files: Mapping[str, bytes]

    @property
    def adapter(self) -> bool:
        """Whether they are a PEFT adapter's: an adapter's configuration and no model's."""
        return ADAPTER_CONFIG in self.files and CONFIG not in self.files

    @property
    def id(self) -> str:
        """XXH3-128 over names and contents."""
        state = xxhash.xxh3_128()
        for name, data in self.files.items():
            state.update(f"{name}\0{len(data)}\0".encode())
            state.update(data)
        return state.hexdigest()

    def for_dtypes(self, words: Iterable[str]) -> Assets:
        """The same for weights of these safetensors dtypes: a configuration that names a dtype names theirs.

        ``from_pretrained`` makes the model in the dtype of its configuration: one that tells of the base model's would silently change
        the weights. Weights of several floating dtypes say nothing, and leave the configuration as it is.
        """
        floating = {_DTYPES[word] for word in words if word in _DTYPES}
        text = self.files.get(CONFIG)
        if text is None or len(floating) != 1:
            return self
        config = _load(text, CONFIG)
        if not _set_dtype(config, floating.pop()):
            return self
        data = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
        return Assets({**self.files, CONFIG: data})


NO_ASSETS = Assets({})


def collect(folder: str | os.PathLike[str], *, asked: bool = True) -> Assets:
    """What of ``folder`` goes with weights.

    Args:
        folder: A model's folder. Links in it are followed: a hub's cache is made of them.
        asked: Somebody named this folder: it must be there and have a configuration. Else: what there is.

    Raises:
        NotFoundError: There is no such folder.
        ConfigError: It has neither ``config.json`` nor ``adapter_config.json``.
        CorruptionError: A configuration is not JSON.
    """
    root = os.path.expanduser(os.fspath(folder))
    try:
        names = _names(root)
        files = {name: _read(f"{root}/{name}") for name in names}
    except (FileNotFoundError, NotADirectoryError) as error:
        if not asked:
            return NO_ASSETS
        raise NotFoundError(f"no folder {root!r} to take configuration and tokenizer from", key=root, kind="no-assets",
                            hint="name the folder of the base model: assets=...") from error  # fmt: skip
    except OSError as error:
        raise PermanentStoreError(f"cannot read the model's small files in {root!r}: {error.strerror}", key=root, kind="not-permitted",
                                  errno=error.errno, hint="change its permissions") from error  # fmt: skip
    config = _load(files[CONFIG], f"{root}/{CONFIG}") if CONFIG in files else {}
    coded = "auto_map" in config or any(b'"auto_map"' in files.get(name, b"") for name in _NAMING_CODE)
    files = {name: data for name, data in files.items() if coded or not name.endswith(".py") or _matches(name, _CODE)}
    if asked and not {CONFIG, ADAPTER_CONFIG} & files.keys():
        raise ConfigError(f"{root!r} has neither {CONFIG} nor {ADAPTER_CONFIG}", key=root, kind="no-assets",
                          hint="name the folder of the base model: assets=...")  # fmt: skip
    return Assets(files)


def _names(root: str) -> list[str]:
    names = [name for name in os.listdir(root) if _matches(name, (*_CARRIED, "*.py"))]
    for folder, patterns in _FOLDERS.items():
        if os.path.isdir(f"{root}/{folder}"):
            names += [f"{folder}/{name}" for name in os.listdir(f"{root}/{folder}") if _matches(name, patterns)]
    return sorted(name for name in names if os.path.isfile(f"{root}/{name}"))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return not name.startswith(".") and not name.endswith(_WEIGHTS) and any(fnmatchcase(name, pattern) for pattern in patterns)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        data = file.read(_MAX_NBYTES + 1)
    if len(data) > _MAX_NBYTES:
        raise OSError(errno.EFBIG, f"{os.path.basename(path)!r} is larger than {_MAX_NBYTES:,} bytes: that is no small file")
    return data


def _load(text: bytes, path: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path!r} is not JSON: {error}", key=path, kind="config", hint="take another copy of it") from None
    if not isinstance(config, dict):
        raise CorruptionError(f"{path!r} is not a JSON object", key=path, kind="config", hint="take another copy of it")
    return config


def _set_dtype(config: dict[str, Any], dtype: str) -> bool:
    """Where the configuration, or one within it (``text_config``), names a floating dtype, name this one; whether that changed it."""
    changed = False
    for key in _DTYPE_KEYS:
        if config.get(key) not in (None, dtype) and str(config[key]).removeprefix("torch.") in _DTYPES.values():
            config[key], changed = dtype, True
    for key, inner in config.items():
        if key.endswith("_config") and isinstance(inner, dict) and key != "quantization_config":
            changed |= _set_dtype(inner, dtype)
    return changed
