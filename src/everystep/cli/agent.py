"""``everystep agent``: the agents of this node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep import errors
from everystep.agent.client import AgentClient
from everystep.cli import output, runs
from everystep.cli.exits import INTERRUPTED, guarded
from everystep.cli.stats import print_stats
from everystep.cli.usage import Command
from everystep.repository import Repository

app = typer.Typer(help="The process on each node that holds a run's snapshots and makes them durable.", no_args_is_help=True)

DRAIN_TIMEOUT_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Living:
    """One agent and what it holds."""

    pid: int
    run: str
    run_id: str
    version: str
    trainers: tuple[int, ...]
    snapshots: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    """What is amiss at present."""


@app.command("ls", cls=Command, short_help="List the agents of this node.")
@guarded
def ls(as_json: output.AsJson = False) -> None:
    """List the agents of this node that this user may talk to, and what they hold in memory: their node's own snapshots, and copies of
    other nodes' (replicas)."""
    from everystep.agent import find_agents

    found = [_ask(agent.run_url, agent.run_id) for agent in find_agents()]
    living = [one for one in found if one is not None]
    if as_json:
        output.print_json({"agents": [dataclasses.asdict(one) for one in living]})
    elif not living:
        output.print_text("no agent runs on this node")
    else:
        several = any(snapshot["nodes"] > 1 for one in living for snapshot in one.snapshots)
        output.print_table(
            ["pid", "run", "trainer", *(["node"] if several else []), "snapshots", "in memory", "newest step",
             *(["copies for others"] if several else []), "version"],
            [_cells(one, several=several) for one in living],
            right=["pid", "snapshots", "in memory", "newest step"],
        )  # fmt: skip
        for one in living:
            for note in one.notes:
                output.print_text(f"agent {one.pid}: {note}")


@app.command("stats", cls=Command, short_help="Counters and times of a living agent.")
@guarded
def stats(run: runs.Run, as_json: output.AsJson = False) -> None:
    """Counters and the time each phase took, from the run's living agent."""
    repository = runs.open_run(run)
    with _connected(repository) as client:
        document = client.stats()
    if as_json:
        output.print_json({"run": repository.store.url, "source": "agent", **document})
    else:
        print_stats(document, source=f"agent of {run}")


@app.command("stop", cls=Command, short_help="End an agent once its newest snapshot is on disk.")
@guarded
def stop(
    target: Annotated[
        str, typer.Argument(metavar="RUN|ID|PID", help="The run's directory, or the run id or process id that `agent ls` shows.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Do not make what is in memory durable first: it is lost.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for the disk.")] = DRAIN_TIMEOUT_S,
    as_json: output.AsJson = False,
) -> None:
    """End an agent, after its newest snapshot is on disk. A trainer that still saves starts a new one."""
    with contextlib.closing(_find(target)) as client:
        pid, run_url = client.welcome.pid, client.welcome.run_url
        newest = None
        if not force:
            drained = client.drain(timeout_s=timeout_s)
            newest = drained.newest_durable_step
            if not drained.complete:
                raise errors.AgentError(
                    f"the newest snapshot is not on disk: {drained.error or f'not done within {timeout_s:g} s'}",
                    kind="not-durable",
                    hint=f"everystep agent stop {target} --force ends it all the same and loses what is in memory",
                )
        client.stop(force=force)
    if as_json:
        output.print_json({"run": run_url, "pid": pid, "stopped": True, "forced": force, "newest_durable_step": newest})
    else:
        durable = "" if newest is None else f"; step {newest} is on disk"
        output.print_text(f"agent {pid} ended{durable}")


@app.command("run", cls=Command, short_help="Be the agent of RUN, in the foreground.")
@guarded
def run_(
    run: runs.Run,
    idle_s: Annotated[
        float | None, typer.Option("--idle", min=0.0, help="End after this many seconds without a trainer (default: never).")
    ] = None,
) -> None:
    """Run the agent of RUN in the foreground: for a sidecar container, a DaemonSet, or a systemd unit of its own.

    What it holds then outlives the trainer's container or unit. SIGTERM, or Ctrl-C, ends it once everything is on disk.
    """
    from everystep.agent import run_foreground  # brings the whole agent, which other commands need not load

    code = run_foreground(run, idle_s=idle_s)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise typer.Exit(code)


def _connected(repository: Repository) -> contextlib.closing[AgentClient]:
    return contextlib.closing(AgentClient.connect(run_url=repository.store.url, run_id=repository.run_id, role="visitor", spawn=False))


def _find(target: str) -> AgentClient:
    """A connection to the agent that ``target`` means: a run's directory, a run id, or a process id.

    A directory's own agent comes first; else the one that says it serves this path, though the run there was replaced or is gone.
    """
    from everystep.agent import find_agents

    missing: errors.CheckpointError
    try:
        repository = runs.open_run(target)
        return AgentClient.connect(run_url=repository.store.url, run_id=repository.run_id, role="visitor", spawn=False)
    except (errors.NotFoundError, errors.ConfigError, errors.CorruptionError) as error:
        missing = error
    path = str(Path(target.removeprefix("file://")).absolute())
    for agent in find_agents():
        if target in {agent.run_id, str(agent.pid)} or agent.run_url.removeprefix("file://") == path:
            return AgentClient.connect(run_url=agent.run_url, run_id=agent.run_id, role="visitor", spawn=False)
    if isinstance(missing, errors.NotFoundError) and missing.kind == "no-run" and not os.path.exists(path):
        raise errors.NotFoundError(
            f"{target!r} is no run's directory, and no agent on this node has it as its run id or process id",
            key=target,
            kind="no-agent",
            hint=f"everystep agent ls shows those there are; {runs.RUN_LOOKS_LIKE}",
        )
    raise missing


def _ask(run_url: str, run_id: str) -> Living | None:
    try:
        client = AgentClient.connect(run_url=run_url, run_id=run_id, role="visitor", spawn=False, timeout_s=5.0)
        with contextlib.closing(client):
            welcome = client.welcome
            held = tuple(
                {
                    "step": one.step, "attempt": one.attempt, "nbytes": one.nbytes, "saved_at": one.saved_at, "persisted": one.persisted,
                    "node": one.node, "nodes": one.nodes, "world": one.world, "replica": one.replica,
                }
                for one in client.snapshots()
            )
            notes: tuple[str, ...] = ()
            with contextlib.suppress(errors.AgentError):  # one of another version does not tell
                notes = tuple(sorted(dict(client.stats().get("notes") or {}).values()))  # type: ignore[call-overload]
            return Living(welcome.pid, welcome.run_url, welcome.run_id, welcome.version, tuple(welcome.trainers), held, notes)
    except (errors.NotFoundError, errors.AgentError):
        return None  # it ended while we looked


def _cells(one: Living, *, several: bool) -> list[str]:
    own = [snapshot for snapshot in one.snapshots if not snapshot["replica"]]
    newest = max(own, key=lambda snapshot: (snapshot["attempt"], snapshot["step"]), default=None)
    copies = [f"step {snapshot['step']} of node {snapshot['node'] + 1}" for snapshot in one.snapshots if snapshot["replica"]]
    return [
        str(one.pid),
        one.run,
        ", ".join(map(str, one.trainers)) or "none",
        *([f"{newest['node'] + 1} of {newest['nodes']}" if newest else "?"] if several else []),
        str(len(own)),
        output.nbytes(sum(snapshot["nbytes"] for snapshot in one.snapshots)),
        "-" if newest is None else str(newest["step"]),
        *([", ".join(copies) or "none"] if several else []),
        one.version,
    ]
