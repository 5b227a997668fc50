"""Many small tensors: 5,000 parameters of 1 KiB with their optimizer, and a million tensors' plan and manifest."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time

from _common import Results, main, peak_rss, reset_peak_rss, say


def five_thousand(results: Results, folder: pathlib.Path, *, rounds: int, momentum: bool) -> None:
    """``momentum``: with one optimizer state for each parameter, so twice as many tensors."""
    import torch

    import everystep

    torch.manual_seed(0)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(256)) for _ in range(5000))
    state: dict[str, object] = {"model": model}
    name, tensors = "5,000 tensors of 1 KiB", 5000
    if momentum:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state["optim"] = optimizer
        name, tensors = "5,000 parameters of 1 KiB with momentum", 10_000
    run = folder / f"small-{momentum}"
    calls, saves, plans = [], [], []
    with everystep.Checkpointer(run, keep=everystep.Keep(last=1)) as ckpt:
        for step in range(rounds + 3):
            began = time.perf_counter()
            pending = ckpt.save(step, state)
            returned = time.perf_counter()
            report = pending.wait("disk")
            if step >= 3:
                calls.append(returned - began)
                saves.append(time.perf_counter() - began)
                plans.append(report.timings_s["plan"])
    stored = sum(path.stat().st_size for path in run.rglob("*") if path.is_file() and f"{rounds + 2:012d}-" in str(path))
    results.row(f"{name}: call", calls, "s")
    results.row(f"{name}: planning", plans, "s")
    saved = results.row(f"{name}: call to durable", saves, "s")
    results.bar(f"{name}: seconds a save, to durable", saved, 0.2)
    results.bar(f"{name}: steady-state planning, ms", sorted(plans)[len(plans) // 2] * 1e3, 5.0)
    results.bar(f"{name}: bytes on disk, times the tensors'", stored / (tensors * 1024), 1.1)
    loaded = everystep.load(run)["model"]
    right = all(torch.equal(loaded[str(index)], value.data) for index, value in enumerate(model))
    results.bar(f"{name}: reads back equal", float(right), 1.0, at_most=False)


def many(count: int, folder: pathlib.Path) -> dict[str, float]:
    """Plan, manifest to a file and back for ``count`` tensors of 1 KiB; run in a process of its own."""
    from everystep import manifest as records
    from everystep.plan import plan_save, slab_part
    from everystep.safetensors import data_start  # noqa: F401 (imported by the plan; here so that its import is not timed)

    specs = [records.TensorSpec(f"model.layer{index // 100}.weight{index % 100}", "F32", (256,), "model") for index in range(count)]
    reset_peak_rss()
    began = time.perf_counter()
    plan = plan_save(specs, aliases={})
    planned, planned_peak = time.perf_counter(), peak_rss()
    reset_peak_rss()
    part = slab_part(
        plan, step=1, attempt=1, node=0, nodes=1, saved_at=1.0, values=b"{}", metrics={},
        object_key={file.name: f"data/1-1/{file.name}" for file in plan.files},
        digests=[("0" * 32,)] * len(plan.placements), header_digests=["0" * 32] * len(plan.files),
    )  # fmt: skip
    target = folder / "manifest.json"
    target.write_bytes(records.encode("manifest", records.merge([part])))
    written, written_peak = time.perf_counter(), peak_rss()
    del specs, plan, part  # who reads has not written
    reset_peak_rss()
    reading = time.perf_counter()
    read = records.decode("manifest", target.read_bytes(), records.Manifest, key="manifest.json")
    records.check(read)
    ended = time.perf_counter()
    if len(read.tensors) != count:
        raise SystemExit(f"{len(read.tensors)} tensors came back of {count}")
    return {
        "plan": planned - began, "write": written - planned, "read": ended - reading, "plan_peak": planned_peak, "write_peak": written_peak,
        "read_peak": peak_rss(), "nbytes": target.stat().st_size,
    }  # fmt: skip


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Both."""
    count = 100_000 if arguments.quick else 1_000_000
    say(f"{count:,} tensors")
    program = (
        "import sys, json, pathlib; sys.path.insert(0, sys.argv[1]); import small; "
        "print(json.dumps(small.many(int(sys.argv[2]), pathlib.Path(sys.argv[3]))))"
    )
    taken = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", program, str(pathlib.Path(__file__).parent), str(count), str(arguments.folder)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(1 if arguments.quick else 3)
    ]
    for phase in ("plan", "write", "read"):
        results.row(f"{count:,} tensors: {phase}", [one[phase] for one in taken], "s")
        results.row(f"{count:,} tensors: {phase}, peak of resident memory", [one[f"{phase}_peak"] for one in taken], "B")
    results.row(f"{count:,} tensors: manifest", [one["nbytes"] for one in taken], "B")
    peak = max(one[f"{phase}_peak"] for one in taken for phase in ("plan", "write", "read"))
    whole = results.row(f"{count:,} tensors: plan, write and read", [one["plan"] + one["write"] + one["read"] for one in taken], "s")
    results.bar(f"{count:,} tensors: plan, manifest write and read, s", whole, 10.0 * count / 1e6)
    results.bar(f"{count:,} tensors: peak of resident memory, GiB", peak / 2**30, 1.0)
    rounds = arguments.rounds or (5 if arguments.quick else 11)
    for momentum in (False, True):
        say(f"5,000 small tensors, momentum {momentum}")
        five_thousand(results, arguments.folder, rounds=rounds, momentum=momentum)


if __name__ == "__main__":
    main("Many small tensors", measure)
