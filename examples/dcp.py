"""A program that calls torch.distributed.checkpoint (DCP), with everystep behind it: ``storage_writer`` and ``storage_reader`` are new.

    torchrun --nproc-per-node 2 examples/dcp.py

Start the same command again and it goes on. A program that need not call DCP has it easier, and stalls less, with
``everystep.Checkpointer`` as in fsdp2.py.
It runs on the CPU, and on GPUs, one for each rank, where there are any.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everystep
from everystep.integrations.dcp import Reader, Writer


def main() -> None:
    """Train, from where the last start has come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/dcp", help="the run's directory, by the same path on every node")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 1)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # sync=False: save returns when the snapshot is in the agent's memory. DCP never deletes, so a writer keeps all unless it is told.
    writer = Writer(options.run, sync=False, keep=everystep.Keep(last=3))
    reader = Reader(options.run)
    step = 0
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    try:
        dcp.load(state, storage_reader=reader)
    except dcp.CheckpointException as error:  # how DCP tells of errors
        if not all(isinstance(failure, everystep.NotFoundError) for failure, _ in error.failures.values()):
            raise
    else:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = reader.loaded_step or 0
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
        model_state, optim_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=f"step-{step}", storage_writer=writer)
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
    writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
