"""Write tests/data/foreign: checkpoints as Transformers, Accelerate and Lightning write them on two gloo ranks, of models of a few thousand parameters.

    pip install torch==2.13.0 transformers==5.24 accelerate==1.15 lightning==2.6.6
    python tests/data/make_foreign.py [FOLDER]

- ``transformers``: ``save_pretrained(distributed_checkpoint=True)`` of a Llama that is sharded with ``fully_shard``; embeddings are tied.
- ``accelerate/checkpoint-4``: ``save_fsdp_model`` of the same model with SHARDED_STATE_DICT, as the Trainer calls it, and a trainer_state.json.
- ``lightning/epoch=0-step=2.ckpt``: a LightningModule that trains ``self.model``, two steps under ``ModelParallelStrategy``.

Beside each lies ``expected.safetensors``: all of the module's tensors, gathered by torch.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

RANKS = 2


def main() -> None:
    """Make the data in a folder of their own, so that no path of this machine gets into them, and move them to where they belong."""
    target = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "foreign"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        mp.spawn(_rank, args=(os.path.join(folder, "meeting"),), nprocs=RANKS)
        mp.spawn(_lightning, args=(), nprocs=RANKS)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move("made", target)
        os.chdir(os.path.dirname(target))
    nbytes = sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(target) for name in names)
    print(f"{target}: {nbytes:,} bytes")


def _gathered(model: nn.Module, path: str) -> None:
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        save_file({name: tensor.clone() for name, tensor in full.items()}, path)


def _rank(rank: int, meeting: str) -> None:
    from accelerate import PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model
    from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=51, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                         tie_word_embeddings=True)  # fmt: skip
    if rank == 0:
        LlamaForCausalLM(config).save_pretrained("base")
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained("base", distributed_config=DistributedConfig(fsdp_size=RANKS, tp_size=1))
    model.save_pretrained("made/transformers/checkpoint", distributed_checkpoint=True)
    _gathered(model, "made/transformers/expected.safetensors")
    PartialState(cpu=True)  # its logger wants one
    plugin = SimpleNamespace(state_dict_type=StateDictType.SHARDED_STATE_DICT, fsdp_version=2, state_dict_config=SimpleNamespace(),
                             cpu_ram_efficient_loading=False)  # fmt: skip
    accelerator = SimpleNamespace(num_processes=RANKS, process_index=rank, is_fsdp2=True)
    save_fsdp_model(plugin, accelerator, model, "made/accelerate/checkpoint-4")
    _gathered(model, "made/accelerate/expected.safetensors")
    if rank == 0:
        history = [
            {"step": 2, "epoch": 0.5, "loss": 4.5},
            {"step": 4, "epoch": 1.0, "loss": 4.25},
            {"step": 4, "epoch": 1.0, "eval_loss": 4.0},
        ]
        with open("made/accelerate/checkpoint-4/trainer_state.json", "w") as file:
            json.dump({"global_step": 4, "epoch": 1.0, "log_history": history}, file)
    dist.destroy_process_group()


def _lightning(rank: int) -> None:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), NODE_RANK="0",
                      TORCHELASTIC_RUN_ID="made")  # fmt: skip

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))

        def configure_model(self) -> None:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    torch.manual_seed(1)
    strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1, process_group_backend="gloo")
    trainer = lightning.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=2, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, barebones=False)  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 5), batch_size=2))
    trainer.save_checkpoint("made/lightning/epoch=0-step=2.ckpt")
    _gathered(module.model, "made/lightning/expected.safetensors")


if __name__ == "__main__":
    main()
