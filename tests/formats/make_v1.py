"""Writes tests/formats/v1: what version 1 of the format looks like. Run once, at its release; what it wrote is checked in and never changed.

Run: python tests/formats/make_v1.py. It refuses to write over what is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import everystep

FOLDER = Path(__file__).resolve().parent / "v1"
KEEP = everystep.Keep(last=None, best=1, metric="loss")


class Tied(nn.Module):
    """An embedding and a head that share their weight, a 0-dim buffer, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=True)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.seen = 0

    def get_extra_state(self) -> Any:
        """A value that is no tensor."""
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        """The value back."""
        self.seen = state["seen"]


def made(step: int) -> dict[str, Any]:
    """The state at a step: every number follows from the step."""
    model = Tied()
    with torch.no_grad():
        model.embed.weight.copy_(torch.arange(12.0).view(4, 3) + step)
        model.head.bias.copy_(torch.arange(4.0) * step)
        model.scale.fill_(3.5 + step)
    model.seen = 100 * step
    optim = torch.optim.AdamW(model.parameters(), lr=0.25)
    for number, parameter in enumerate(model.parameters()):
        optim.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.full_like(parameter, number + step / 8),
            "exp_avg_sq": torch.full_like(parameter, number + step / 4),
        }
    tensors = {
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "complex64": torch.tensor([1 + 2j], dtype=torch.complex64),
        "float8": torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "int64": torch.tensor([[step, -(1 << 40)]]),
        "uint16": torch.tensor([65535, step], dtype=torch.uint16),
        "empty": torch.empty(0, 5),
    }
    note = {
        "tuple": (1, (2.5, None)),
        "set": {1, 2},
        "bytes": b"\x00\xff",
        "inf": float("inf"),
        "big": 1 << 80,
        7: "an int key",
        "dtype": torch.float16,
    }
    return {"model": model, "optim": optim, "tensors": tensors, "note": note, "step": step}


def write(run: Path) -> None:
    """Two lives: steps 1 to 3, then resumed from 2 with steps 3 (again) and 4; step 4 is pinned, step 1 has the best loss."""
    with everystep.Checkpointer(run, agent=False, keep=KEEP) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, made(step), sync=True, metrics={"loss": float(step), "odd": float("nan")})
    with everystep.Checkpointer(run, agent=False, keep=KEEP) as checkpointer:
        checkpointer.restore(made(0), step=2)
        for step in (3, 4):
            checkpointer.save(step, made(10 * step), sync=True, metrics={"loss": float(step)}, pin=step == 4)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=False)
    write(FOLDER / "run")
    print(sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()), "bytes in", FOLDER)
