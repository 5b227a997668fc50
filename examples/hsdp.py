"""Hybrid sharding (HSDP): two replica groups, each of which shards the model among its ranks. On two nodes each is a replica.

    torchrun --nproc-per-node 4 examples/hsdp.py
    torchrun --nnodes 2 --nproc-per-node 2 --node-rank 0 --master-addr HOST --master-port 29500 examples/hsdp.py    # and rank 1

What both groups hold is stored once, each writing a half. With ``--replicas 1`` every node's snapshot lies in another node's memory
too: one that is lost, agent and all, is restored from there.
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


def main() -> None:
    """Train, from where the last start has come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/hsdp", help="the run's directory, by the same path on every node")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=0, help="copies of each node's newest snapshot in other nodes' memory")
    options = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 1)).to(device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)

    state = {"model": model, "optim": optimizer, "rng": everystep.RNG()}
    with everystep.Checkpointer(options.run, replicas=options.replicas) as checkpointer:
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
            step += 1
            checkpointer.save(step, state)
            if rank == 0:
                print(f"step {step} loss {loss.item():.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
