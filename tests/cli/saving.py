"""A training job as far as its folder shows: saves and prunes as it is told, a line at a time, and answers each line when it is done.

``python saving.py automodel FOLDER``: NeMo AutoModel's layout, two ranks, its own pruning rule. ``python saving.py dcp FOLDER``: torchtitan's,
written by torch itself. Lines: ``save STEP``, ``begin STEP`` (and no more: incomplete), ``keep N`` (prune), ``loss X`` (of the next save).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path


def weights(step):
    """What step ``step`` saves, by name; anybody can make it again."""
    import numpy as np

    rng = np.random.default_rng(step)
    return {
        "embed.weight": rng.standard_normal((10, 8)).astype(np.float32),
        "head.bias": rng.standard_normal(7).astype(np.float32),
        "head.weight": rng.standard_normal((7, 8)).astype(np.float32),
    }


class AutoModel:
    """``epoch_0_step_N``: shards of two ranks, rows each."""

    def __init__(self, root):
        self.root, self.loss = root, 1.0

    def begin(self, step):
        from safetensors.numpy import save_file

        folder = self.root / f"epoch_0_step_{step}"
        (folder / "model" / ".hf_metadata").mkdir(parents=True)
        (folder / ".incomplete").touch()
        tensors = weights(step)
        for rank in range(2):
            held, told = {}, {}
            for name, tensor in tensors.items():
                rows = -(-tensor.shape[0] // 2)
                held[name] = tensor[rank * rows : (rank + 1) * rows].copy()
                told[name] = {"saved_offsets": [rank * rows, *[0] * (tensor.ndim - 1)]}
            metadata = {"DCP_SHARDING_INFO": json.dumps(told), "DCP_VERSION": "1.0", "format": "pt"}
            save_file(held, folder / "model" / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata=metadata)
        (folder / "model/.hf_metadata/config.json").write_text('{"model_type": "none"}')
        (folder / "model/.hf_metadata/fqn_to_file_index_mapping.json").write_text(json.dumps(dict.fromkeys(tensors, 1)))
        return folder

    def save(self, step):
        folder = self.begin(step)
        (folder / "losses.json").write_text(json.dumps({"train_loss": 2.0, "val_loss": self.loss}))
        (folder / ".incomplete").unlink()
        new = self.root / f".LATEST.{step}"
        new.symlink_to(folder.name)
        new.replace(self.root / "LATEST")

    def keep(self, count):
        """Its rule: what a link in the folder leads to is spared."""
        spared = {os.readlink(entry) for entry in self.root.iterdir() if entry.is_symlink()}
        found = sorted(self.root.glob("epoch_*_step_*"), key=lambda folder: int(folder.name.split("_")[-1]))
        for folder in found[:-count]:
            if folder.name not in spared:
                shutil.rmtree(folder)


class Dcp:
    """``step-N``: what torch's DCP writes, model and optimizer together."""

    def __init__(self, root):
        import torch.distributed.checkpoint  # noqa: F401  # before the first line is answered

        self.root, self.loss = root, 1.0

    def save(self, step):
        import torch
        from torch.distributed import checkpoint

        tensors = {name: torch.from_numpy(tensor) for name, tensor in weights(step).items()}
        checkpoint.save(tensors, checkpoint_id=str(self.root / f"step-{step}"), no_dist=True)

    def begin(self, step):
        self.save(step)
        (self.root / f"step-{step}" / ".metadata").unlink()

    def keep(self, count):
        found = sorted(self.root.glob("step-*"), key=lambda folder: int(re.sub(r"\D", "", folder.name)))
        for folder in found[:-count]:
            shutil.rmtree(folder)


def main():
    """Do what stdin says."""
    kind, root = {"automodel": AutoModel, "dcp": Dcp}[sys.argv[1]], Path(sys.argv[2])
    root.mkdir(parents=True, exist_ok=True)
    job = kind(root)
    print("ready", flush=True)
    for line in sys.stdin:
        word, value = line.split()
        if word == "loss":
            job.loss = float(value)
        else:
            getattr(job, word)(int(value))
        print(word, value, flush=True)


if __name__ == "__main__":
    main()
