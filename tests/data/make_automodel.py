"""Write tests/data/automodel: checkpoints as NeMo AutoModel 0.7.0 writes them, on two gloo ranks, of a model of five thousand parameters.

    pip install torch==2.13.0 nemo-automodel==0.7.0 && pip uninstall triton
    python tests/data/make_automodel.py [FOLDER]

What writes is NeMo's own: ``BaseRecipe.save_checkpoint`` with its ``Checkpointer``, over a Qwen3 that is sharded with ``fully_shard``. Training is
a few steps on random tokens, enough for an optimizer state. Four checkpoint roots come of it:

- ``run``: ``save_consolidated: false``, three checkpoints with losses.json, LATEST and LOWEST_VAL, bfloat16, tied embeddings, tensors whose rows
  do not divide by two. Validated by one set, in its last checkpoint by two. ``ckpt_every_steps: 2``: NeMo counts steps from 0, so after two,
  four and six steps there are ``_step_1``, ``_step_3`` and ``_step_5``; step_scheduler.pt has the numbers of steps.
- ``every``: ``save_consolidated: every``, one checkpoint, float32, without a base model: its consolidated/ equals the shards bit by bit. One of
  its tensors, ``model.gain``, has fewer rows than there are ranks.
- ``mapped``: ``true``, over a bfloat16 base model of two files: its consolidated/ is cast to the base's dtypes and split as the base is.
- ``peft``: LoRA adapters, with the optimizer's state.

Random states (torch's, numpy's) and the other optimizers' are left out afterwards: they are large, and no reader of weights looks at them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
KEEP_OPTIM = ("peft/epoch_0_step_1",)


def main() -> None:
    """Make the data in a folder of their own, so that no path of this machine gets into them, and move them to where they belong."""
    target = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "automodel"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _base_model("base-bf16")
        mp.spawn(_rank, args=(os.path.join(folder, "meeting"),), nprocs=RANKS)
        shutil.rmtree(target, ignore_errors=True)
        os.makedirs(target)
        for root in ("run", "every", "mapped", "peft"):
            for name in os.listdir(root):
                if name.startswith("epoch_") and not os.path.islink(os.path.join(root, name)):
                    _thin(root, name)
            shutil.move(root, target)
        os.chdir(os.path.dirname(target))
    nbytes = sum(os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(target) for name in names)
    print(f"{target}: {nbytes:,} bytes")


def _thin(root: str, name: str) -> None:
    folder = os.path.join(root, name)
    for entry in ("rng", "dataloader", *(() if f"{root}/{name}" in KEEP_OPTIM else ("optim",))):
        shutil.rmtree(os.path.join(folder, entry), ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "model", "consolidate.sh"))  # NeMo's own program, not data


def _config(*, tied: bool):
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=51, hidden_size=16, intermediate_size=25, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=32, tie_word_embeddings=tied, attention_bias=False, architectures=["Qwen3ForCausalLM"], bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def _model(*, tied: bool, dtype: torch.dtype):
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(7)
    return Qwen3ForCausalLM(_config(tied=tied)).to(dtype)


def _base_model(folder: str) -> None:
    _model(tied=False, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="7KB")


def _rank(rank: int, meeting: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{meeting}")
    try:
        _write_all()
    finally:
        dist.destroy_process_group()


def _write_all() -> None:
    run = _recipe("run", model=_model(tied=True, dtype=torch.bfloat16), save_consolidated=False)
    # What NeMo's training loop hands over: the loss of the step, and the loss on each validation set by its name.
    for epoch, step, train, val in (
        (0, 1, 4.25, {"default": 3.5}),
        (0, 3, 3.75, {"default": 2.5}),
        (1, 5, 3.25, {"squad": 2.75, "wiki": 3.0}),
    ):
        run.train()
        run.step_scheduler.step, run.step_scheduler.epoch = step, epoch
        run.save_checkpoint(epoch, step, train, val, best_metric_key="squad")
    run.checkpointer.finalize()

    model = _model(tied=False, dtype=torch.float32)
    model.model.gain = torch.nn.Parameter(torch.full((1,), 1.5))
    every = _recipe("every", model=model, save_consolidated="every")
    every.train()
    every.save_checkpoint(0, 1, 4.5, {"default": 3.5})
    every.checkpointer.finalize()

    mapped = _recipe("mapped", model=_model(tied=False, dtype=torch.float32), save_consolidated=True, model_repo_id="base-bf16")
    mapped.train()
    mapped.save_checkpoint(0, 1, 4.5, None)
    mapped.checkpointer.finalize()

    from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules

    lora = PeftConfig(target_modules=["*layers.0.self_attn.q_proj"], dim=2, alpha=4)
    model = _model(tied=False, dtype=torch.bfloat16)
    model.config.name_or_path = "base-bf16"
    apply_lora_to_linear_modules(model, lora)
    peft = _recipe("peft", model=model, save_consolidated=False, is_peft=True, peft_config=lora)
    peft.train()
    peft.save_checkpoint(0, 1, 4.5, {"default": 3.5})
    peft.checkpointer.finalize()


def _recipe(root: str, *, model, peft_config=None, **settings):
    """A recipe as NeMo's are, with what its ``save_checkpoint`` looks at."""
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.components.training.rng import StatefulRNG
    from nemo_automodel.components.training.step_scheduler import StepScheduler
    from nemo_automodel.recipes.base_recipe import BaseRecipe
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    class Tiny(BaseRecipe):
        def train(self) -> None:
            tokens = torch.randint(0, 51, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    recipe = Tiny()
    recipe.cfg = ConfigNode({"model": {"model_type": "qwen3"}, "checkpoint": {"checkpoint_dir": root, **settings}})
    recipe.rng = StatefulRNG(seed=1, ranked=True)
    recipe.model = model
    recipe.peft_config = peft_config
    recipe.device_mesh = None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    recipe.optimizer = torch.optim.AdamW(trained, lr=0.01)
    recipe.step_scheduler = StepScheduler(
        global_batch_size=RANKS, local_batch_size=1, dp_size=RANKS, dataloader=None, ckpt_every_steps=2, max_steps=100, start_step=1
    )
    recipe.checkpointer = CheckpointingConfig(checkpoint_dir=root, **settings).build(dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)
    return recipe


if __name__ == "__main__":
    main()
