"""``everystep doctor``: what this place can do, what everystep will choose here, and what an agent survives."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import xxhash

from everystep import __version__, errors
from everystep.agent.memory import Room, memory_room
from everystep.cli import output, surroundings
from everystep.cli.exits import guarded
from everystep.cli.probe import MAX_NBYTES, Probe, probe

SLABS = 3


@guarded
def doctor(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A run's directory, or where one shall be.")] = ".",
    max_mib: Annotated[int, typer.Option(min=16, max=MAX_NBYTES >> 20, help="Bytes the disk test may write, in MiB.")] = MAX_NBYTES >> 20,
    as_json: output.AsJson = False,
) -> None:
    """Test a directory's file system and this machine: O_DIRECT, fsync, links, bandwidth, memory limits; say what everystep will choose
    and what an agent survives here.

    Writes at most 256 MiB into a new folder there and deletes it again.
    """
    place = existing(path)
    with output.progress(f"testing {place}", 2 * (max_mib << 20)) as advance:
        disk = probe(place, max_nbytes=max_mib << 20, on_bytes=advance)
    limits = surroundings.memory_limits()
    where = surroundings.context(os.environ)
    survival = surroundings.survival(where)
    speeds = memory_speeds()
    room = memory_room()
    chosen = choices(disk, room)
    doubts = warnings(disk, limits)
    if as_json:
        output.print_json(
            {
                "everystep": __version__,
                "python": platform.python_version(),
                "kernel": platform.release(),
                "asked": path,
                "disk": dataclasses.asdict(disk),
                "memory": {
                    "limits": [{**dataclasses.asdict(limit), "free_nbytes": limit.free_nbytes} for limit in limits],
                    "room_nbytes": room.nbytes,
                    "copy": speeds["copy"],
                    "hash": speeds["hash"],
                },
                "context": where,
                "survival": [dataclasses.asdict(row) for row in survival],
                "choices": chosen,
                "warnings": doubts,
            }
        )
        return
    _print_disk(disk)
    output.print_text()
    output.print_table(
        ["memory", "limit", "free"],
        [[limit.source, output.nbytes(limit.limit_nbytes), output.nbytes(limit.free_nbytes)] for limit in limits],
        right=["limit", "free"],
    )
    output.print_text(f"copy {_rate(speeds['copy'])}, XXH3-128 {_rate(speeds['hash'])} (one thread, warm)")
    output.print_text()
    output.print_table(["everystep will", ""], [[name, what] for name, what in chosen.items()])
    output.print_text()
    lives_in = ", ".join(f"{kind}: {what}" for kind, what in where.items()) or "no container, Slurm job or systemd unit was recognised"
    output.print_table(
        ["when", "snapshot in memory", "because / instead"],
        [[row.event, "survives" if row.survives else "is lost", row.why] for row in survival],
    )
    output.print_text(f"({lives_in})")
    for doubt in doubts:
        output.print_text(f"warning: {doubt}")


def existing(path: str) -> Path:
    """The directory ``path`` or, when the run is not there yet, the nearest one above it that is.

    Raises:
        ConfigError: It is a file, or a URL of a store that is not a path.
    """
    if "://" in path and not path.startswith("file://"):
        raise errors.ConfigError(f"doctor tests paths, and {path!r} is none", key=path, kind="scheme", hint="give a directory")
    place = Path(path.removeprefix("file://")).absolute()
    if place.exists() and not place.is_dir():
        raise errors.ConfigError(f"{path!r} is a file", key=path, kind="not-a-directory", hint="give a directory")
    while not place.is_dir():
        place = place.parent
    return place


def memory_speeds() -> dict[str, float]:
    """Warm copy and hash of one thread, in bytes per second."""
    source, target = bytearray(os.urandom(1 << 20) * 32), bytearray(32 << 20)
    best = {"copy": 0.0, "hash": 0.0}
    for _ in range(3):
        begin = time.perf_counter()
        target[:] = source
        middle = time.perf_counter()
        xxhash.xxh3_128_digest(source)
        end = time.perf_counter()
        best = {"copy": max(best["copy"], len(source) / (middle - begin)), "hash": max(best["hash"], len(source) / (end - middle))}
    return best


def choices(disk: Probe, room: Room) -> dict[str, str]:
    """What everystep does here without being told."""
    writes = (
        f"directly (O_DIRECT, blocks aligned to {max(4096, disk.direct_alignment)} bytes), then fsync"
        if disk.direct_alignment
        else f"through the page cache, then fsync: {disk.file_system} refuses O_DIRECT"
    )
    publish = (
        "with a hard link, which cannot overwrite" if not disk.link else "with an exclusive directory and a rename: no hard links here"
    )
    return {
        "write": writes,
        "publish a manifest": publish,
        "keep in memory": f"up to {SLABS} snapshots, allocated as needed; all fit while one is under {output.nbytes(room.nbytes / SLABS)}",
        "reach the disk": f"about {_rate(disk.direct_write or disk.buffered_write)}: {_per_gib(disk)} for each GiB of state",
    }


def warnings(disk: Probe, limits: Sequence[surroundings.Limit]) -> list[str]:
    """What is wrong or cannot be proven here."""
    found = []
    if disk.mkdir:
        found.append(f"mkdir: {disk.mkdir}: two trainers on one run cannot be told apart on {disk.mounted_at}; use another file system")
    found += [f"{name}: {what} on {disk.mounted_at}" for name, what in (("link", disk.link), ("rename", disk.rename)) if what]
    if disk.file_system in {"tmpfs", "ramfs"}:
        found.append(f"{disk.mounted_at} is {disk.file_system}: what lies there is memory, and is gone after a reboot")
    elif disk.file_system == "overlay":
        found.append(f"{disk.mounted_at} is a container's overlay: it goes with the container; mount a volume for the run")
    elif disk.file_system.startswith(("fuse", "nfs", "cifs", "9p")):
        found.append(f"{disk.file_system}: whether fsync reaches a disk is decided by the server and cannot be proven from here")
    tight = [limit for limit in limits if limit.limit_nbytes and limit.free_nbytes < limit.limit_nbytes // 10]
    found += [f"memory: {limit.source} has only {output.nbytes(limit.free_nbytes)} left" for limit in tight]
    return found


def _rate(value: float | None) -> str:
    return "not measured" if value is None else f"{value / 1e9:.2f} GB/s"


def _per_gib(disk: Probe) -> str:
    speed = disk.direct_write or disk.buffered_write
    return output.seconds((1 << 30) / speed) if speed else "?"


def _print_disk(disk: Probe) -> None:
    right = "yes"
    output.print_table(
        ["disk", disk.path],
        [
            ["file system", f"{disk.file_system}, mounted at {disk.mounted_at}, {output.nbytes(disk.free_nbytes)} free"],
            ["O_DIRECT", f"yes, {disk.direct_alignment} bytes" if disk.direct_alignment else "no"],
            ["fsync of 4 KiB", f"{output.seconds(disk.fsync_p50_s)} (worst {output.seconds(disk.fsync_max_s)})"],
            ["hard link", disk.link or right],
            ["atomic rename", disk.rename or right],
            ["exclusive mkdir", disk.mkdir or right],
            ["reflink", "yes" if disk.reflink else "no"],
            ["write, O_DIRECT", _rate(disk.direct_write)],
            ["write, cache + fsync", _rate(disk.buffered_write)],
            ["read, O_DIRECT", _rate(disk.direct_read)],
        ],
    )
