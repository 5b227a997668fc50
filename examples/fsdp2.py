"""Fully sharded training (FSDP2) that saves every step; SIGTERM saves once more and ends it.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Start the same command again and it goes on, on as many ranks as you like: 3 restore what 2 have saved.
It runs on the CPU, and on GPUs, one for each rank, where there are any.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everystep


def block(width: int) -> torch.nn.Module:
    """A layer to be sharded by itself."""
    return torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(4 * width, width))


def main() -> None:
    """Train, from where the last start has come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/fsdp2", help="the run's directory, by the same path on every node")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (world,))
    model = torch.nn.Sequential(block(32), block(32), torch.nn.Linear(32, 1)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    torch.manual_seed(1 + rank)

    # Sharded tensors are stored as the regions that the ranks hold, which on one node are whole tensors again.
    state = {"model": model, "optim": optimizer, "sched": sched, "rng": everystep.RNG()}
    with everystep.Checkpointer(options.run, preemption=everystep.Preemption(grace_s=30.0)) as checkpointer:
        step = checkpointer.restore(state) or 0
        if rank == 0:
            print(f"begins after step {step}", flush=True)
        while step < options.steps:
            numbers = torch.arange(16, device=device)[:, None] + 16 * (world * step + rank)
            inputs = torch.sin(numbers * torch.arange(1, 33, device=device))
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sched.step()
            step += 1
            checkpointer.save(step, state)
            if rank == 0:
                print(f"step {step} loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    try:
        main()
    finally:  # also when a preemption ends the program: gloo's threads have to go before the interpreter does
        if dist.is_initialized():
            dist.destroy_process_group()
