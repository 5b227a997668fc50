"""Loads the exported folder and goes on from a prompt: with transformers where it is installed, else with the demo's own model."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys

import torch

from everystep.demo.model import GPT
from everystep.demo.sizes import SIZES, Size
from everystep.demo.trainer import emit

PROMPT = "import os\n\n\ndef "
SEED = 7


def with_transformers(folder: pathlib.Path, count: int) -> tuple[str, str] | None:
    """(version, text), or None where transformers is not installed."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    try:
        import transformers
        from transformers import AutoTokenizer, GPT2LMHeadModel
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    model, loaded = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    wrong = {key: list(names) for key, names in loaded.items() if names}
    if wrong:
        raise ValueError(f"transformers finds the exported folder at odds with GPT-2: {wrong}")
    words = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(SEED)
    prompt = words(PROMPT, return_tensors="pt")
    made = model.generate(
        input_ids=prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=count, do_sample=True, temperature=0.7,
        top_k=20, pad_token_id=0,
    )  # fmt: skip
    return transformers.__version__, words.decode(made[0], skip_special_tokens=True)


def with_own_model(folder: pathlib.Path, size: Size, count: int) -> str:
    """The text, by the demo's own model from the same file (read by hand: the safetensors package is not needed for it)."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    buffer = bytearray(data[8 + length :])
    state = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            state[name] = torch.frombuffer(buffer, dtype=torch.float32, count=(end - begin) // 4, offset=begin).view(entry["shape"])
    model = GPT(size)
    # The head is the embedding, stored once: all other names have to be there.
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"the exported file lacks {missing} and has {unexpected} too much")
    return model.sample(PROMPT.encode(), count=count, seed=SEED).decode("utf-8", errors="replace")


def main() -> None:
    """Read the command line and sample."""
    parser = argparse.ArgumentParser(prog="everystep.demo.sample", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    count = min(160, size.context - len(PROMPT))
    torch.set_num_threads(arguments.threads)
    try:
        made = with_transformers(arguments.folder, count)
        text = made[1] if made else with_own_model(arguments.folder, size, count)
    except (ValueError, OSError, RuntimeError) as error:
        emit("error", message=" ".join(str(error).split()))
        sys.exit(1)
    emit("sample", by=f"transformers {made[0]}" if made else "the demo's own model", text=text)


if __name__ == "__main__":
    main()
