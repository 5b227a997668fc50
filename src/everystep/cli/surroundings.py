"""Where a process runs: memory and cgroup limits, and what ends the processes around it (container, Slurm step, systemd unit).

Reads files only. Every function takes the root of the tree it reads from, so that tests can lay one out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Limit", "Survival", "context", "memory_limits", "survival"]

UNLIMITED = 1 << 60
"""cgroup v1 says "no limit" with a number near 2**63; anything this large is none."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """One bound on memory: who sets it, how much it allows, how much of it is in use (bytes)."""

    source: str
    limit_nbytes: int
    used_nbytes: int

    @property
    def free_nbytes(self) -> int:
        """What is left."""
        return max(0, self.limit_nbytes - self.used_nbytes)


@dataclasses.dataclass(frozen=True)
class Survival:
    """Whether a snapshot in the agent's memory is still there after something happened, and what to do where it is not."""

    event: str
    survives: bool
    why: str


def memory_limits(root: Path = Path("/")) -> list[Limit]:
    """The machine's memory and every cgroup limit (version 1 or 2, ancestors included) on this process."""
    limits = []
    meminfo = _meminfo(root)
    if "MemTotal" in meminfo:
        available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
        limits.append(Limit("machine", meminfo["MemTotal"], meminfo["MemTotal"] - available))
    for version, path in _cgroups(root):
        base = root / "sys/fs/cgroup" if version == 2 else root / "sys/fs/cgroup/memory"
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        # A container sees its own group at the mount's root, whatever path /proc names: the ancestors and the root are looked at alike.
        folders = [base.joinpath(*path.strip("/").split("/")[:depth]) for depth in range(len(path.strip("/").split("/")), -1, -1)]
        for folder in dict.fromkeys(folders):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and limit < UNLIMITED:
                limits.append(Limit(f"cgroup v{version} /{folder.relative_to(base)}".replace("/.", "/"), limit, used or 0))
    return limits


def context(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """What this process lives in: ``container``, ``slurm``, ``unit`` (systemd), each with what gave it away; empty outside all of them."""
    found = {}
    groups = " ".join(path for _, path in _cgroups(root, all_controllers=True))
    if "KUBERNETES_SERVICE_HOST" in environ:
        found["container"] = "kubernetes pod"
    elif (root / ".dockerenv").exists() or "docker" in groups:
        found["container"] = "docker"
    elif (root / "run/.containerenv").exists() or "libpod" in groups:
        found["container"] = "podman"
    elif environ.get("container") or any(word in groups for word in ("kubepods", "lxc", "containerd")):
        found["container"] = environ.get("container") or "container"
    if "SLURM_JOB_ID" in environ:
        found["slurm"] = f"job {environ['SLURM_JOB_ID']}, step {environ.get('SLURM_STEP_ID', '?')}"
    elif "slurm" in groups:
        found["slurm"] = "cgroup of a Slurm job"
    units = [part for part in groups.replace(" ", "/").split("/") if part.endswith((".service", ".scope")) and "slurm" not in part]
    if units and "container" not in found:
        found["unit"] = units[-1]
    return found


def survival(where: Mapping[str, str]) -> list[Survival]:
    """What an agent started by a trainer in this context outlives, row by row; the rows that do not apply here are left out."""
    rows = [
        Survival(
            "the trainer is killed, crashes, or is restarted by torchrun",
            True,
            "the agent is a process of its own, in a session of its own",
        ),
    ]
    if "unit" in where:
        session = where["unit"].startswith("session-")
        what = "the login session ends" if session else f"systemd stops or restarts {where['unit']}"
        why = (
            "unless KillUserProcesses=no and the user lingers (loginctl enable-linger)"
            if session
            else "the unit's control group is killed whole: run `everystep agent run` as a unit of its own"
        )
        rows.append(Survival(what, False, why))
    if "slurm" in where:
        rows.append(
            Survival(
                "the Slurm step or job ends", False, "the step's cgroup is killed whole: run `everystep agent run` in a step of its own"
            )
        )
    if "container" in where:
        rows.append(
            Survival(
                "the container or pod ends",
                False,
                "its processes end with it: run `everystep agent run` in a sidecar that shares its runtime directory",
            )
        )
    rows += [
        Survival("the kernel ends the whole cgroup for memory (memory.oom.group)", False, "leave room for the slabs in the memory limit"),
        Survival("the node reboots or fails", False, "only what is on a disk that outlives the node remains"),
    ]
    return rows


def _meminfo(root: Path) -> dict[str, int]:
    values = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values


def _cgroups(root: Path, *, all_controllers: bool = False) -> list[tuple[int, str]]:
    """(version, path) of the groups of this process that limit memory."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found.append((2, path))
        elif all_controllers or "memory" in controllers.split(","):
            found.append((1, path))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None
