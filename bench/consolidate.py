"""Consolidation of shards into whole tensors, beside the others' and beside ``cp`` of as many bytes.

Each measurement is a process of its own: imports come first, then the clock starts; memory is the growth of its resident peak from there.
Before each one what it reads is dropped from the page cache. What the others write is made durable here (fsync), inside the clock.
Throughput and CPU time count the shards' bytes, whatever the export's dtype. ``--sizes 1,4`` says which sizes, in GiB.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from _common import Results, forget, in_turn, main, peak_rss, reset_peak_rss, say

SHARDS = 8
SIDE = 4096
LAYOUTS = ("rows", "columns", "mixed")
ITEM = {"rows": (SIDE // SHARDS, SIDE), "columns": (SIDE, SIDE // SHARDS)}
SIZES: list[float] = []
"""GiB, when ``--sizes`` says which."""
Measured = dict[str, float]


# -- checkpoints --------------------------------------------------------------------------------------------------------


def tensors(nbytes: int) -> list[str]:
    """Names of the matrices, 4096 x 4096 float32 each, ``nbytes`` together."""
    return [f"model.layers.{number}.weight" for number in range(nbytes // (SIDE * SIDE * 4))]


def values(number: int) -> np.ndarray[Any, Any]:
    """The whole matrix: all elements differ from their neighbours, quickly made."""
    line = np.random.default_rng(number).random(SIDE, dtype=np.float32)
    return line[:, None] * 3 + line[None, :]


def cut_by(layout: str, number: int) -> str:
    """How a matrix is cut: as the layout says; mixed: in turn, as tensor parallelism does."""
    return layout if layout != "mixed" else ("rows", "columns")[number % 2]


def parts(layout: str, shard: int, count: int) -> Iterator[tuple[int, tuple[int, int], np.ndarray[Any, Any]]]:
    """(matrix, offsets, values) of what a shard holds."""
    for number in range(count):
        rows, columns = ITEM[cut_by(layout, number)]
        at = (shard * rows, 0) if rows < SIDE else (0, shard * columns)
        yield number, at, values(number)[at[0] : at[0] + rows, at[1] : at[1] + columns]


def write_dcp(folder: pathlib.Path, layout: str, names: Sequence[str]) -> None:
    """What torch's Hugging Face writer leaves: one file for each rank, offsets in the header."""
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        at, header, offsets = 0, {}, {}
        for number, name in enumerate(names):
            rows, columns = ITEM[cut_by(layout, number)]
            header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [at, at + rows * columns * 4]}
            offsets[name] = {"saved_offsets": [shard * rows, 0] if rows < SIDE else [0, shard * columns]}
            at += rows * columns * 4
        header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}  # type: ignore[assignment]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"shard-{shard + 1:05d}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, _, part in parts(layout, shard, len(names)):
                file.write(np.ascontiguousarray(part).data)
            os.fsync(file.fileno())


def write_nodes(folder: pathlib.Path, layout: str, names: Sequence[str]) -> None:
    """The files of an everystep checkpoint of eight nodes, and what their manifest says, for ``open_nodes``."""
    from everystep.layout import HeldTensor, RankLayout, plan_world
    from everystep.manifest import TensorSpec, block_digests
    from everystep.region import Region

    folder.mkdir(parents=True)
    specs = [TensorSpec(f"model.{name}", "F32", (SIDE, SIDE), "model") for name in names]
    ranks = []
    for shard in range(SHARDS):
        held = []
        for number, spec in enumerate(specs):
            rows, columns = ITEM[cut_by(layout, number)]
            offsets = (shard * rows, 0) if rows < SIDE else (0, shard * columns)
            held.append(HeldTensor(spec, (Region(offsets, (rows, columns)),)))
        ranks.append(RankLayout(shard, tuple(held), {}))
    told: list[Any] = []
    for node in plan_world(ranks):
        for number, planned in enumerate(node.plan.files):
            with (folder / planned.name).open("wb") as file:
                file.write(planned.header)
                for one in node.plan.placements:
                    if one.file == number:
                        of = names.index(node.plan.tensors[one.tensor].name.removeprefix("model."))
                        (top, left), (rows, columns) = one.region.offsets, one.region.sizes
                        part = np.ascontiguousarray(values(of)[top : top + rows, left : left + columns])
                        at = one.slab_offset - planned.slab_offset
                        told.append((names[of], one.region.offsets, one.region.sizes, planned.name, at, part.nbytes,
                                     block_digests(part.data, one.block), one.block))  # fmt: skip
                        file.write(part.data)
                os.fsync(file.fileno())
    (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")


def open_nodes(folder: str) -> Any:
    """The checkpoint of ``write_nodes`` as a source."""
    from everystep.consolidate.source import Chunk, Opened, SourceFile, SourceTensor
    from everystep.region import Region
    from everystep.store import open_store

    told = json.loads(pathlib.Path(folder, "told.json").read_text(encoding="utf-8"))
    keys = sorted({one[3] for one in told})
    chunks: dict[str, list[Chunk]] = {}
    for name, offsets, sizes, key, at, nbytes, digests, block in told:
        region = Region(tuple(offsets), tuple(sizes))
        chunks.setdefault(name, []).append(Chunk(region, keys.index(key), at, nbytes, tuple(digests), block))
    return Opened(
        kind="everystep", where=folder, key="1", step=1, saved_at=0.0, identity=folder, store=open_store(folder),
        files=[SourceFile(key, os.path.getsize(os.path.join(folder, key))) for key in keys],
        tensors={name: SourceTensor(name, "F32", (SIDE, SIDE), tuple(of)) for name, of in chunks.items()},
    )  # fmt: skip


# -- the systems; each makes all imports, then returns the work --------------------------------------------------------


def everystep_dcp(folder: str, out: str, names: Sequence[str], *, dtype: str = "keep") -> Callable[[], object]:
    """everystep, of what DCP wrote."""
    if dtype != "keep":
        import torch  # noqa: F401
    from everystep.consolidate.source import open_source
    from everystep.consolidate.writing import write_export

    return lambda: _export(open_source(folder), out, dtype, write_export)


def everystep_nodes(folder: str, out: str, names: Sequence[str], *, dtype: str = "keep") -> Callable[[], object]:
    """everystep, of its own checkpoint; every byte is verified."""
    from everystep.consolidate.writing import write_export

    return lambda: _export(open_nodes(folder), out, dtype, write_export)


def _export(source: Any, out: str, dtype: str, write_export: Callable[..., object]) -> None:
    from everystep.consolidate.plan import plan_export
    from everystep.schedule import Consolidate

    plan = plan_export(source, Consolidate(dtype=dtype))
    write_export(source, plan, out)


def torch_files(folder: str, out: str, names: Sequence[str]) -> Callable[[], object]:
    """torch's, as one process calls it."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    return lambda: (consolidate_safetensors_files(folder, out, dict.fromkeys(names, 1)), _fsync(out))


def torch_every_rank(folder: str, out: str, names: Sequence[str]) -> Callable[[], object]:
    """torch's, as ranks call it, with one rank and a thread for each core over four files."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank

    index = {name: number % 4 + 1 for number, name in enumerate(names)}
    return lambda: (consolidate_safetensors_files_on_every_rank(folder, out, index, num_threads=os.cpu_count() or 1), _fsync(out))


def nemo(folder: str, out: str, names: Sequence[str]) -> Callable[[], object]:
    """NeMo AutoModel's, one rank, one file."""
    from nemo_automodel.components.checkpoint._backports import consolidate_hf_safetensors as module

    return lambda: (module.consolidate_safetensors_files_on_every_rank(folder, out, dict.fromkeys(names, 1), num_threads=5), _fsync(out))


def copied(folder: str, out: str, names: Sequence[str]) -> Callable[[], object]:
    """``cp`` of the shards."""
    files = sorted(str(path) for path in pathlib.Path(folder).glob("*.safetensors"))
    return lambda: (subprocess.run(["cp", *files, out], check=True), _fsync(out))


def _fsync(folder: str) -> None:
    for path in pathlib.Path(folder).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


SYSTEMS: dict[str, tuple[str, str, Callable[..., Callable[[], object]]]] = {
    "cp": ("", "dcp", copied),
    "everystep, of DCP's shards": ("", "dcp", everystep_dcp),
    "everystep, of DCP's shards, to bf16": ("", "dcp", functools.partial(everystep_dcp, dtype="bf16")),
    "everystep, of its own 8 nodes, verified": ("", "nodes", everystep_nodes),
    "torch consolidate_safetensors_files": ("torch", "dcp", torch_files),
    "torch ..._on_every_rank, 4 files": ("torch", "dcp", torch_every_rank),
    "nemo_automodel": ("nemo_automodel", "dcp", nemo),
}
"""Name -> (package it needs, whose checkpoint it takes, itself)."""


def child(arguments: Sequence[str]) -> None:
    """One measurement, in a process of its own; prints what it took."""
    name, folder, out, count = arguments
    work = SYSTEMS[name][2](folder, out, tensors(int(count)))
    before = reset_peak_rss()
    cpu, began = _cpu_s(), time.perf_counter()
    work()
    print(json.dumps({"seconds": time.perf_counter() - began, "cpu": _cpu_s() - cpu, "memory": peak_rss() - before}))


def _cpu_s() -> float:
    return sum(of.ru_utime + of.ru_stime for of in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


# -- measuring ----------------------------------------------------------------------------------------------------------


def run_one(name: str, folder: pathlib.Path, nbytes: int, kept: dict[str, list[Measured]]) -> float:
    """Measure one system once; checks what it wrote the first time."""
    source = folder / SYSTEMS[name][1]
    out = folder / "out"
    out.mkdir()
    forget(list(source.iterdir()))
    command = [sys.executable, __file__, "--child", name, str(source), str(out), str(nbytes)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout
    measured = json.loads(told.splitlines()[-1])
    if name not in kept and name != "cp":
        check(out, tensors(nbytes), bf16="bf16" in name)
    kept.setdefault(name, []).append(measured)
    for path in out.iterdir():
        path.unlink()
    out.rmdir()
    return float(measured["seconds"])


def check(out: pathlib.Path, names: Sequence[str], *, bf16: bool) -> None:
    """Compare with the whole matrices; a fast wrong answer is worth nothing."""
    import torch
    from safetensors import safe_open

    seen = set()
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                whole = torch.from_numpy(values(names.index(name)))
                if not torch.equal(file.get_tensor(name), whole.bfloat16() if bf16 else whole):
                    raise SystemExit(f"{path}: {name} differs")
                seen.add(name)
    if seen != set(names):
        raise SystemExit(f"{out} lacks tensors")


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """All layouts and sizes."""
    sizes = SIZES or ([0.25] if arguments.quick else [1.0, 4.0])
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    systems = [name for name, (package, _, _) in SYSTEMS.items() if not package or importlib.util.find_spec(package)]
    for size in sizes:
        nbytes = int(size * 2**30)
        medians: dict[tuple[str, str], float] = {}
        for layout in LAYOUTS:
            folder = arguments.folder / f"{layout}-{size:g}"
            write_dcp(folder / "dcp", layout, tensors(nbytes))
            write_nodes(folder / "nodes", layout, tensors(nbytes))
            kept: dict[str, list[Measured]] = {}
            say(f"{size:g} GiB, {layout}: written")
            in_turn(rounds, {name: functools.partial(run_one, name, folder, nbytes, kept) for name in systems})
            for name, of in kept.items():
                title = f"{size:g} GiB, {layout}: {name}"
                medians[layout, name] = results.row(title, [nbytes / one["seconds"] for one in of], "B/s")
                results.row(f"{title}, memory", [one["memory"] for one in of], "B")
                results.row(f"{title}, CPU a GB", [one["cpu"] * 1e9 / nbytes for one in of], "s")
                if name.startswith("everystep") and "bf16" not in name:
                    pairs = zip(kept["cp"], of, strict=True)
                    share = results.row(f"{title}, share of cp", [plain["seconds"] / one["seconds"] for plain, one in pairs], "x")
                    results.bar(f"{title}, share of cp", share, 0.8, at_most=False)
                    results.bar(f"{title}, memory, MiB", max(one["memory"] for one in of) / 2**20, 256)
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        for name in systems:
            if name.startswith("everystep"):
                ratio = medians["rows", name] / medians["columns", name]
                results.bar(f"{size:g} GiB: {name}, time of columns by time of rows", ratio, 2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        if "--sizes" in sys.argv:  # GiB, such as 1,4; the rest is what all benchmarks take
            at = sys.argv.index("--sizes")
            SIZES += [float(word) for word in sys.argv[at + 1].split(",")]
            del sys.argv[at : at + 2]
        main("Consolidation", measure)
