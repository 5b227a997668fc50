"""Data-parallel training (DDP) that saves every step, and goes on from the last one when it is started again.

    torchrun --nproc-per-node 2 examples/ddp.py

Kill a rank, all of them, or the machine, and start the same command again. With ``--max-restarts 3`` torchrun does that itself.
It runs on the CPU, and on GPUs, one for each rank, where there are any.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everystep


class Batches:
    """Numbered samples, dealt out to the ranks. Where it is, is the same on all ranks: so it is right in a larger or smaller world too."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device, self.seen = size, device, 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's next inputs and targets, each of ``size`` rows."""
        first = self.seen + dist.get_rank() * self.size
        self.seen += dist.get_world_size() * self.size
        numbers = torch.arange(first, first + self.size, device=self.device)[:, None]
        inputs = torch.sin(numbers * torch.arange(1, 33, device=self.device))
        return inputs, inputs.sum(1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.seen = state["seen"]


def main() -> None:
    """Train, from where the last start has come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/ddp", help="the run's directory, by the same path on every node")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same weights on all ranks
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)).to(device)
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(16, device)
    torch.manual_seed(1 + rank)  # other dropout on each

    # The model, not the DDP around it: its files then bear the model's own names. Model and optimizer are stored once, RNG by rank.
    state = {"model": model, "optim": optimizer, "batches": batches, "rng": everystep.RNG()}
    with everystep.Checkpointer(options.run) as checkpointer:
        step = checkpointer.restore(state) or 0
        if rank == 0:
            print(f"begins after step {step}", flush=True)
        while step < options.steps:
            inputs, targets = batches.next()
            loss = (trained(inputs) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            checkpointer.save(step, state)
            if rank == 0:
                print(f"step {step} loss {loss.item():.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
