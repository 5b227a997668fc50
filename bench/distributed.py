"""Many ranks: FSDP2 with a save at every step, time to durable, restore into other worlds, from memory and from a peer; beside DCP.

Every measurement runs in ranks of its own on this machine (gloo, one thread each). The first saves are apart, systems are measured in
turn in one job, and what each of them saved is read back and compared, shard by shard.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from _common import Results, forget, main, percentile, raw_read, raw_write, say, warm_buffer

WARM = 3
"""Saves before the timed ones: everystep has three slabs, and fills each for the first time."""
GB = 10**9
SIZES = {True: [0.1], False: [0.5]}
"""State in GB, for ``--quick`` and by default; the project's own figures are those of ``--sizes 1.5,4``."""
ENGINES = (
    "none",
    "everystep memory",
    "everystep disk",
    "DCP save",
    "DCP async thread",
    "DCP async thread with a reused stager",
    "DCP async process",
)
RANK_TIMEOUT_S = 3600.0
EXPORT_STEPS = 4
"""Of so many steps one goes to the disk, where what consolidation costs is measured."""


# -- the ranks --------------------------------------------------------------------------------------------------------------
def shape(nbytes: float) -> dict[str, int]:
    """A transformer whose parameters and AdamW moments take about ``nbytes``."""
    width, vocabulary = next((pair for bound, pair in ((0.3, (256, 8000)), (2.5, (768, 16000))) if nbytes <= bound * GB), (1024, 16000))
    layers = max(1, round((nbytes / 12 - width * vocabulary) / (12 * width * width)))
    return {"width": width, "layers": layers, "vocabulary": vocabulary}


class Training:
    """A transformer under FSDP2 with AdamW, as ``_engines.Training`` is without."""

    def __init__(self, *, width: int, layers: int, vocabulary: int, tokens: int) -> None:
        import torch
        import torch.distributed as dist
        from _engines import FenceClock
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        made = [nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0) for _ in range(layers)]
        self.model = nn.Sequential(*made, nn.Linear(width, vocabulary))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.fence = FenceClock(self.optimizer)
        torch.manual_seed(1 + dist.get_rank())
        self.inputs = torch.randn(1, tokens, width)
        self.targets = torch.randint(0, vocabulary, (1, tokens))
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer}
        self.nbytes = 12 * sum(parameter.numel() for parameter in self.model.parameters())
        self.number = 0

    def step(self) -> None:
        """Forward, backward, optimizer."""
        from torch import nn

        loss = nn.functional.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.number += 1

    def fake(self, number: int) -> None:
        """A state as after step ``number``, without training and the same in every world: for what is not about training."""
        import torch

        with torch.no_grad():
            if not self.optimizer.state:
                for parameter in self.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            while self.number < number:
                self.number += 1
                for tensor in self.shards():
                    tensor.mul_(0.75).add_(self.number)

    def shards(self) -> list[Any]:
        """This rank's share of every tensor."""
        found = list(self.model.parameters())
        for parameter in self.model.parameters():
            found += list(self.optimizer.state.get(parameter, {}).values())
        return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (one.detach() for one in found)]

    def copies(self) -> list[Any]:
        """Copies of them."""
        return [tensor.clone() for tensor in self.shards()]

    def spoil(self) -> None:
        """Overwrite all of them with NaN."""
        for tensor in self.shards():
            tensor.fill_(float("nan"))

    def equals(self, copies: list[Any]) -> bool:
        """Whether this rank's shares are these, on every rank."""
        import torch
        import torch.distributed as dist

        right = torch.tensor(float(all(torch.equal(one, other) for one, other in zip(self.shards(), copies, strict=True))))
        dist.all_reduce(right, dist.ReduceOp.MIN)
        return bool(right)


@contextlib.contextmanager
def none(training: Training, folder: pathlib.Path) -> Iterator[Any]:
    """No checkpoints."""
    from _engines import Saver

    yield Saver(lambda *_: None, lambda: None, lambda _: {})


@contextlib.contextmanager
def own(training: Training, folder: pathlib.Path, *, disk: bool, budget: int | None = None) -> Iterator[Any]:
    """everystep, to memory or to the disk too; both as fast as they go."""
    from _engines import Saver

    import everystep

    cadence = everystep.Cadence(disk=None if disk else False)
    with everystep.Checkpointer(folder, cadence=cadence, memory_budget=budget) as ckpt:
        last: list[everystep.Pending] = []

        def save(step: int, state: dict[str, Any]) -> None:
            last[:] = [ckpt.save(step, state)]

        def wait() -> None:
            last[0].wait("disk" if disk else "memory")

        def load(state: dict[str, Any]) -> dict[str, Any]:
            ckpt.restore(state)
            return {}

        yield Saver(save, wait, load)


@contextlib.contextmanager
def dcp(training: Training, folder: pathlib.Path, *, how: str) -> Iterator[Any]:
    """DCP as its documentation has it; an earlier save is waited for before the next."""
    import torch.distributed as dist
    from _engines import Saver, state_dicts
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    group = dist.new_group(backend="gloo")  # its collectives must not mix with training's
    running: list[Any] = []
    last = [folder]
    more: dict[str, Any] = {"process_group": group}
    stager = None
    if how == "reused":
        stager = DefaultStager(
            StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
        )
        more["async_stager"] = stager
    if how == "process":
        more["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS

    def wait() -> None:
        if running:
            future = running.pop()
            getattr(future, "upload_completion", future).result()

    def save(step: int, state: dict[str, Any]) -> None:
        wait()
        last[0] = folder / str(step % 2)
        if how == "save":
            checkpoint.save(state_dicts(state), checkpoint_id=last[0], process_group=group)
        else:
            running.append(checkpoint.async_save(state_dicts(state), checkpoint_id=last[0], **more))

    def load(state: dict[str, Any]) -> dict[str, Any]:
        into = state_dicts(state)
        checkpoint.load(into, checkpoint_id=last[0], process_group=group)
        state["model"].load_state_dict(into["model"])
        state["optim"].load_state_dict(into["optim"])
        return {}

    yield Saver(save, wait, load)
    wait()
    if stager is not None:
        stager.close()
    dist.destroy_process_group(group)


def engine(name: str, budget: int | None) -> Callable[[Training, pathlib.Path], Any]:
    """The system of a name."""
    if name == "none":
        return none
    if name.startswith("everystep"):
        return lambda training, folder: own(training, folder, disk=name.endswith("disk"), budget=budget)
    how = {"DCP save": "save", "DCP async thread": "thread", "DCP async process": "process"}.get(name, "reused")
    return lambda training, folder: dcp(training, folder, how=how)


def block(training: Training, saver: Any, taken: dict[str, Any], *, steps: int) -> None:
    """Steps with the first saves, timed steps, and the read-back of the last save."""
    import torch.distributed as dist

    for index in range(WARM):
        training.step()
        began = time.perf_counter()
        saver.save(training.number, training.state)
        if index == 0:
            taken["first_s"].append(time.perf_counter() - began)
        saver.wait()
    times = []
    dist.barrier()
    used = time.process_time()
    for _ in range(steps):
        training.fence.seconds = 0.0
        began = time.perf_counter()
        training.step()
        called = time.perf_counter()
        saver.save(training.number, training.state)
        ended = time.perf_counter()
        times.append(ended - began)
        taken["call_s"].append(ended - called)
        taken["stall_s"].append(ended - called + training.fence.seconds)
    taken["step_s"].append(times)
    taken["cpu_s"].append((time.process_time() - used) / steps)
    saver.wait()
    taken["durable_s"].append(time.perf_counter() - called)


def steps_program(options: dict[str, Any]) -> dict[str, Any]:
    """All systems in turn while training."""
    import torch.distributed as dist
    from _engines import memcpy

    training = Training(**options["shape"], tokens=options["tokens"])
    folder = pathlib.Path(options["folder"])
    measured = ("step_s", "cpu_s", "call_s", "stall_s", "first_s", "durable_s")
    taken: dict[str, Any] = {name: {**{key: [] for key in measured}, "right": True} for name in options["engines"]}
    failed: dict[str, str] = {}
    copy_s = memcpy(training.nbytes // dist.get_world_size())
    copies = []
    for _ in range(2):
        training.step()
    for index in range(options["rounds"]):
        names = [name for name in options["engines"] if name not in failed]
        for name in names[index % len(names) :] + names[: index % len(names)]:
            if dist.get_rank() == 0:
                say(f"round {index + 1} of {options['rounds']}, {name}")
            target = folder / f"steps-{index}-{options['engines'].index(name)}"
            try:
                with engine(name, options["budget"])(training, target) as saver:
                    block(training, saver, taken[name], steps=options["steps"])
                    if name != "none":
                        held = training.copies()
                        training.spoil()
                        saver.load(training.state)
                        taken[name]["right"] &= training.equals(held)
                        del held
            except (RuntimeError, ValueError, OSError, TypeError) as error:
                if name == "none" or name.startswith("everystep"):
                    raise
                failed[name] = f"{type(error).__name__}: {error}"  # another system that does not run here
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(target, ignore_errors=True)
            copies.append(copy_s())
    return {"taken": taken, "copies": copies, "nbytes": training.nbytes, "failed": failed}


def durable_program(options: dict[str, Any]) -> dict[str, Any]:
    """Saves to the disk in turn with a raw write of as many bytes by rank 0; leaves the last ones for the restores."""
    import torch.distributed as dist

    import everystep

    training = Training(**options["shape"], tokens=8)
    folder = pathlib.Path(options["folder"])
    nbytes = training.nbytes // 4096 * 4096
    first = dist.get_rank() == 0
    buffer = warm_buffer(nbytes) if first else None
    raw, sealed = [], []
    how: dict[str, Any] = {"cadence": everystep.Cadence(disk=False), "keep": everystep.Keep(last=None), "memory_budget": options["budget"]}
    with everystep.Checkpointer(folder / "durable", **how) as ckpt:
        for step in range(1, options["rounds"] + 3):
            dist.barrier()
            if buffer is not None:
                raw_s = raw_write(folder / f"raw-{step}", buffer, nbytes=nbytes)
                (folder / f"raw-{step}").rename(folder / f"old-{step}")  # removed at the end: freeing slows what is measured next
            dist.barrier()
            training.fake(step)
            pending = ckpt.save(step, training.state, pin=True)
            began = time.perf_counter()
            pending.wait("disk")
            if step > 2 and first:
                raw.append(raw_s)
                sealed.append(time.perf_counter() - began)
    if first:
        for path in folder.glob("old-*"):
            path.unlink()
    return {"raw": raw, "sealed": sealed, "nbytes": training.nbytes, "last": options["rounds"] + 2}


def restore_program(options: dict[str, Any]) -> dict[str, Any]:
    """Restores from the disk in turn with a raw read of the files by rank 0, in whatever world this is."""
    import torch.distributed as dist

    import everystep

    training = Training(**options["shape"], tokens=8)
    training.fake(options["last"])
    held = training.copies()
    run = pathlib.Path(options["folder"]) / "durable"
    files = sorted(max((run / "data").iterdir()).glob("*.safetensors"))
    first = dist.get_rank() == 0
    buffer = warm_buffer(-(-max(file.stat().st_size for file in files) // 4096) * 4096) if first else None
    raw, took, right = [], [], True
    for index in range(options["rounds"] + 1):
        dist.barrier()
        raw_s = raw_read(files, buffer) if buffer is not None else 0.0
        training.spoil()
        if first:
            forget(files)
        with everystep.Checkpointer(run) as ckpt:
            dist.barrier()
            began = time.perf_counter()
            ckpt.restore(training.state)
            dist.barrier()
            ended = time.perf_counter()
            right &= ckpt.restored_from is not None and ckpt.restored_from.tier == "disk"
        right &= training.equals(held)
        if index:
            raw.append(raw_s)
            took.append(ended - began)
    return {"raw": raw, "took": took, "right": right}


def memory_program(options: dict[str, Any]) -> dict[str, Any]:
    """Restores from memory, in turn with a memcpy of a rank's share; with ``peer``, of what another node's agent holds for this one."""
    import torch.distributed as dist
    from _engines import memcpy

    import everystep

    training = Training(**options["shape"], tokens=8)
    training.fake(1)
    held = training.copies()
    copy_s = memcpy(training.nbytes // dist.get_world_size())
    copies, took, right, tiers = [], [], True, set()
    replicas = {"replicas": 1} if options["peer"] else {}
    with everystep.Checkpointer(options["run"], cadence=everystep.Cadence(disk=False), memory_budget=options["budget"], **replicas) as ckpt:
        ckpt.save(1, training.state).wait("memory")
        if options["peer"]:
            _lose_own_memory(ckpt, options)
        for index in range(options["rounds"] + 1):
            training.spoil()
            copied = copy_s()
            dist.barrier()
            began = time.perf_counter()
            ckpt.restore(training.state)
            dist.barrier()
            ended = time.perf_counter()
            right &= training.equals(held)
            tiers.add(ckpt.restored_from.tier if ckpt.restored_from else "")
            if index:
                copies.append(copied)
                took.append(ended - began)
    return {"copies": copies, "took": took, "right": right, "tiers": sorted(tiers), "nbytes": training.nbytes}


def _lose_own_memory(ckpt: Any, options: dict[str, Any]) -> None:
    """Rank 0's agent is killed once rank 1's has the copy: what rank 0 held can come from there alone."""
    import torch
    import torch.distributed as dist

    client = ckpt._run.client  # noqa: SLF001
    deadline = time.monotonic() + 120
    have = torch.zeros(())
    while not have and time.monotonic() < deadline:
        have = torch.tensor(float(dist.get_rank() == 1 and any(one.replica for one in client.snapshots())))
        dist.all_reduce(have, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        os.kill(client.welcome.pid, signal.SIGKILL)
    dist.barrier()


def exports_program(options: dict[str, Any]) -> dict[str, Any]:
    """Training with every checkpoint consolidated against none, in turn; both save every few steps to the disk."""
    import torch.distributed as dist

    import everystep

    training = Training(**options["shape"], tokens=options["tokens"])
    took: dict[str, list[float]] = {"never": [], "every": []}
    exported, right = [], True
    for index in range(options["rounds"] + 1):
        for when in ("never", "every") if index % 2 else ("every", "never"):
            target = pathlib.Path(options["folder"]) / f"exports-{index}-{when}"
            how: dict[str, Any] = {"cadence": everystep.Cadence(disk=EXPORT_STEPS), "memory_budget": options["budget"]}
            with everystep.Checkpointer(target, consolidate=everystep.Consolidate(when=when, keep=None), **how) as ckpt:
                training.step()
                ckpt.save(1, training.state).wait("memory")
                dist.barrier()
                began = time.perf_counter()
                for step in range(2, 2 + options["steps"]):
                    training.step()
                    ckpt.save(step, training.state)
                dist.barrier()
                ended = time.perf_counter()
            if index:
                took[when].append((ended - began) / options["steps"])
            if dist.get_rank() == 0:
                there = sorted(target.glob("exports/model-0*"))
                right &= bool(there) == (when == "every")
                if when == "every":
                    exported.append(len(there))
                shutil.rmtree(target, ignore_errors=True)
            dist.barrier()
    return {"took": took, "exported": exported, "right": right, "nbytes": training.nbytes}


PROGRAMS = {
    "exports": exports_program,
    "steps": steps_program,
    "durable": durable_program,
    "restore": restore_program,
    "memory": memory_program,
}


def rank(name: str, options: dict[str, Any], told: str) -> None:
    """One rank of a measurement; rank 0 writes what was found."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # the other systems' own
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=1800))
    found = PROGRAMS[name](options)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        pathlib.Path(told).write_text(json.dumps(gathered), encoding="ascii")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # FSDP keeps gloo's threads alive; one that drops a tensor while the interpreter ends would abort the process


# -- the benchmark ----------------------------------------------------------------------------------------------------------
def job(name: str, world: int, options: dict[str, Any], folder: pathlib.Path, *, apart: bool = False) -> list[dict[str, Any]]:
    """Run a program in so many ranks; what each of them found. ``apart``: each rank is a node of its own."""
    told = folder / f"told-{name}-{world}.json"
    told.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for number in range(world):
        runtime = folder / f"run-{number if apart else 0}"
        runtime.mkdir(mode=0o700, exist_ok=True)
        places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        surroundings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "EVERYSTEP_RUNTIME_DIR": str(runtime)}
        environment = {**os.environ, **{key: str(value) for key, value in places.items()}, **surroundings}
        processes.append(subprocess.Popen([sys.executable, __file__, "--rank", name, json.dumps(options), str(told)], env=environment))
    statuses = [process.wait(RANK_TIMEOUT_S) for process in processes]
    if any(statuses):
        raise RuntimeError(f"the ranks of {name!r} ended with {statuses}")
    found: list[dict[str, Any]] = json.loads(told.read_text(encoding="ascii"))
    return found


def training_rows(results: Results, title: str, found: list[dict[str, Any]]) -> None:
    """Rows and bars of ``steps_program``."""
    first = found[0]
    copies = [value for one in found for value in one["copies"]]
    copied = results.row(f"{title}: warm memcpy of a rank's share", copies, "s", nbytes=first["nbytes"])
    base = [statistics.median(times) for times in first["taken"]["none"]["step_s"]]
    alone = results.row(f"{title}: step without saves", [time for times in first["taken"]["none"]["step_s"] for time in times], "s")
    multiple = alone / copied
    for name, why in first["failed"].items():
        say(f"{title}: {name} does not run here: {why}")
    for name, one in first["taken"].items():
        if name == "none" or name in first["failed"]:
            continue
        middles = [statistics.median(times) for times in one["step_s"]]
        ratio = results.row(f"{title}: step time, {name}", [mine / other for mine, other in zip(middles, base, strict=True)], "x")
        # Where all cores are busy a copy's cost is what it takes of them, and this is less noisy than the time.
        pairs = [pair for rank in found for pair in zip(rank["taken"][name]["cpu_s"], rank["taken"]["none"]["cpu_s"], strict=True)]
        used = [mine / other for mine, other in pairs]
        results.row(f"{title}: CPU time of the ranks a step, {name}", used, "x")
        stalls = [value for rank in found for value in rank["taken"][name]["stall_s"]]
        firsts = [value for rank in found for value in rank["taken"][name]["first_s"]]
        results.row(f"{title}: stall (call and fence), {name}", stalls, "s", p50=percentile(stalls, 50), p99=percentile(stalls, 99))
        results.row(f"{title}: stall p99, {name}", [percentile(stalls, 99)], "s")
        results.row(f"{title}: first save's call, {name}", firsts, "s")
        durable = one["durable_s"]
        if name != "everystep memory":
            results.row(f"{title}: call to durable, {name}", durable, "s")
        right = all(rank["taken"][name]["right"] for rank in found)
        is_own = name.startswith("everystep")
        why = "" if right else "values differ"
        results.bar(f"{title}: what {name} saved reads back equal", float(right), 1.0, at_most=False, applies=is_own, why=why)
        if is_own:
            keeps_up = name == "everystep memory" or statistics.median(durable) <= alone
            why = f"a step is {multiple:.1f} memcpys" + ("" if keeps_up else "; the disk does not keep up")
            bound = 1.03 if name == "everystep memory" else 1.06
            results.bar(f"{title}: step ratio, {name}", ratio, bound, applies=multiple >= 10 and keeps_up, why=why)


def disk_rows(results: Results, title: str, options: dict[str, Any], folder: pathlib.Path, *, rounds: int) -> None:
    """Time to durable, and restores into the same, half and double the world."""
    say(f"{title}: durable")
    found = job("durable", 2, {**options, "rounds": rounds}, folder)[0]
    nbytes = found["nbytes"]
    results.row(f"{title}: raw O_DIRECT write", [nbytes / value for value in found["raw"]], "B/s")
    results.row(f"{title}: save returned to durable (copy included)", [nbytes / value for value in found["sealed"]], "B/s")
    shares = [plain / value for plain, value in zip(found["raw"], found["sealed"], strict=True)]
    share = results.row(f"{title}: durable, share of raw write", shares, "x")
    results.bar(f"{title}: time to durable, share of a raw O_DIRECT write", share, 0.85, at_most=False)
    for world in (2, 1, 4):
        say(f"{title}: restore into {world}")
        found_by = job("restore", world, {**options, "rounds": rounds, "last": found["last"]}, folder)
        one = found_by[0]
        results.row(f"{title}: raw O_DIRECT read, before restoring into {world}", [nbytes / value for value in one["raw"]], "B/s")
        results.row(f"{title}: restore into {world} ranks, verified", [nbytes / value for value in one["took"]], "B/s")
        share = statistics.median([plain / value for plain, value in zip(one["raw"], one["took"], strict=True)])
        results.bar(f"{title}: restore into {world} ranks, share of a raw O_DIRECT read", share, 0.8, at_most=False)
        results.bar(f"{title}: restored into {world} ranks equal", float(all(each["right"] for each in found_by)), 1.0, at_most=False)
    shutil.rmtree(folder / "durable", ignore_errors=True)


def memory_rows(results: Results, title: str, options: dict[str, Any], folder: pathlib.Path, *, rounds: int) -> None:
    """From the agent's memory, and from another node's."""
    for peer in (False, True):
        say(f"{title}: restore from {'a peer' if peer else 'memory'}")
        more = {**options, "rounds": rounds, "peer": peer, "run": str(folder / ("peer" if peer else "memory"))}
        found = job("memory", 2, more, folder, apart=peer)
        one, name = found[0], "a peer (loopback)" if peer else "memory"
        results.row(f"{title}: restore from {name}, verified", [one["nbytes"] / value for value in one["took"]], "B/s", tiers=one["tiers"])
        share = [plain / value for plain, value in zip(one["copies"], one["took"], strict=True)]
        results.row(f"{title}: restore from {name}, share of a memcpy", share, "x")
        wanted = ["peer"] if peer else ["memory"]
        right = all(each["right"] for each in found) and one["tiers"] == wanted
        results.bar(f"{title}: restored from {name} equal", float(right), 1.0, at_most=False, why="" if right else f"tiers {one['tiers']}")


def export_rows(results: Results, title: str, options: dict[str, Any], folder: pathlib.Path) -> None:
    """What consolidation costs a step: of one node's files, which are linked, and of two nodes' shards, which are read and written."""
    for name, world, bound in (("linked", 1, 1.02), ("of two nodes' shards", 2, 1.05)):
        say(f"{title}: every checkpoint consolidated, {name}")
        found = job("exports", world, options, folder, apart=world > 1)[0]
        took = found["took"]
        results.row(f"{title}: step, none consolidated, {world} ranks", took["never"], "s")
        results.row(f"{title}: exports in {options['steps']} steps, {name}", found["exported"], "")
        ratios = [every / never for every, never in zip(took["every"], took["never"], strict=True)]
        ratio = results.row(f"{title}: step time, each consolidated, {name}", ratios, "x")
        results.bar(f"{title}: exports are there, {name}", float(found["right"]), 1.0, at_most=False)
        results.bar(f"{title}: step ratio of every against never, {name}", ratio, bound)


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Everything, for every size."""
    quick = arguments.quick
    rounds = arguments.rounds or (2 if quick else 3)
    for size in SIZES[quick]:
        title = f"{size:g} GB"
        options: dict[str, Any] = {"shape": shape(size * GB), "folder": str(arguments.folder), "budget": BUDGET_NBYTES}
        if "steps" in PARTS:
            engines = [name for name in ENGINES if name in CHOSEN and (not quick or name in ENGINES[:4])]
            steps = {**options, "tokens": 64, "engines": engines, "rounds": rounds, "steps": 4 if quick else 6}
            training_rows(results, title, job("steps", 2, steps, arguments.folder))
        if "exports" in PARTS:
            export_rows(results, title, {**options, "tokens": 64, "rounds": rounds, "steps": 3 * EXPORT_STEPS}, arguments.folder)
        if "disk" in PARTS:
            disk_rows(results, title, options, arguments.folder, rounds=max(3, rounds))
        if "memory" in PARTS:
            memory_rows(results, title, options, arguments.folder, rounds=max(3, rounds))


PARTS = ["steps", "exports", "disk", "memory"]
CHOSEN = list(ENGINES)
BUDGET_NBYTES: int | None = None

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
        sys.exit(0)
    own_options = argparse.ArgumentParser(add_help=False)
    own_options.add_argument("--sizes", help="GB of state, such as 1.5,4")
    own_options.add_argument("--parts", help="some of steps,exports,disk,memory")
    own_options.add_argument("--engines", help=f"what to measure beside none in steps, some of {', '.join(ENGINES[1:])}")
    own_options.add_argument("--budget", type=float, help="GB of memory for everystep's snapshots, where three of them are too many")
    chosen, rest = own_options.parse_known_args()
    sys.argv[1:] = rest
    if chosen.sizes:
        SIZES = {key: [float(size) for size in chosen.sizes.split(",")] for key in (True, False)}
    if chosen.budget:
        BUDGET_NBYTES = int(chosen.budget * GB)
    if chosen.parts:
        PARTS = chosen.parts.split(",")
    if chosen.engines:
        CHOSEN = ["none", *chosen.engines.split(",")]
        unknown = [name for name in CHOSEN if name not in ENGINES]
        if unknown:
            own_options.error(f"--engines: {unknown[0]!r} is none of {', '.join(ENGINES[1:])}")
    main("Many ranks: FSDP2 on two", measure)
