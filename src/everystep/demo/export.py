"""Makes a Hugging Face model folder from a checkpoint: its own model file, linked, and the small files beside it. Imports no torch."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

from everystep.demo.sizes import END, VOCABULARY, Size
from everystep.repository import Repository


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level tokenizer: printable ones for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + index) for index, byte in enumerate(others)}}


def tokenizer() -> dict[str, object]:
    """``tokenizer.json`` of a tokenizer whose tokens are the bytes: token number = byte."""
    letters = byte_letters()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, object] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "vocab": {letters[byte]: byte for byte in range(VOCABULARY)}, "merges": [],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip


def export(run: pathlib.Path, folder: pathlib.Path, *, size: Size) -> str:
    """Write the folder from the run's newest checkpoint; returns how the weights got there: "linked" or "copied".

    Raises:
        NotFoundError: The run holds no checkpoint.
    """
    repository = Repository.open(str(run))
    newest = repository.manifest(repository.find(None))
    (key,) = (stored.key for stored in newest.objects if pathlib.PurePosixPath(stored.key).name.startswith("model-"))
    weights = run / key
    folder.mkdir(parents=True)
    target, how = folder / "model.safetensors", "linked"
    try:
        os.link(weights, target)
    except OSError:  # a file system without hard links, or another one
        shutil.copyfile(weights, target)
        how = "copied"
    end = byte_letters()[END]
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": size.context, "eos_token": end, "bos_token": end,
                        "clean_up_tokenization_spaces": False}  # fmt: skip
    small = {
        "config.json": size.config(),
        "generation_config.json": {"bos_token_id": END, "eos_token_id": END, "do_sample": True, "temperature": 0.7, "top_k": 20},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in small.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return how
