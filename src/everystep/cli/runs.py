"""What commands know of a run: the one to open, the step that was meant, and the checkpoints on disk and in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from everystep import errors
from everystep.agent import messages
from everystep.agent.client import AgentClient
from everystep.cli import output
from everystep.manifest import Manifest, Part
from everystep.repository import CheckpointKey, Repository

__all__ = [
    "Row", "Run", "Saved", "Step", "gather", "in_memory", "in_memory_only", "mark_best", "open_run", "resolve", "saved_by", "stored_nbytes",
    "visit",
]  # fmt: skip

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's directory.")]
Step = Annotated[str, typer.Argument(metavar="STEP", help="A step number, `latest`, or a whole key such as 000000000150-0002.")]

RUN_LOOKS_LIKE = "a run is the directory given to everystep.Checkpointer; it holds run.json, manifests/ and data/"


def open_run(url: str) -> Repository:
    """The run at ``url``; what is not a run is an error that says what one looks like, and nothing is created."""
    if "://" not in url or url.startswith("file://"):
        path = url.removeprefix("file://")
        if os.path.exists(path) and not os.path.isdir(path):
            raise errors.ConfigError(f"{url!r} is a file, not a run", key=url, kind="not-a-run", hint=RUN_LOOKS_LIKE)
        if not os.path.exists(path):
            raise errors.NotFoundError(f"there is no directory {url!r}", key=url, kind="no-run", hint=RUN_LOOKS_LIKE)
        if not os.path.exists(os.path.join(path, "run.json")) and os.access(path, os.X_OK):
            raise errors.NotFoundError(f"{url!r} is no run: it has no run.json", key=url, kind="no-run", hint=RUN_LOOKS_LIKE)
    return Repository.open(url)


def resolve(repository: Repository, step: str) -> CheckpointKey:
    """The committed checkpoint that ``step`` means: a number, ``latest``, or a whole key.

    Raises:
        NotFoundError: There is none; says so when it is there in the agent's memory (kind ``memory-only``).
        ConfigError: ``step`` is no step.
    """
    try:
        return _committed(repository, step)
    except errors.NotFoundError as error:
        held = next((key for key in _keys_in_memory(repository) if step in {"latest", str(key.step), str(key)}), None)
        if held is None:
            raise
        raise in_memory_only(repository, held) from error


def in_memory_only(repository: Repository, key: CheckpointKey) -> errors.NotFoundError:
    """That a checkpoint is not on disk yet, and what brings it there."""
    return errors.NotFoundError(
        f"step {key.step} is in memory only: it has not reached the disk yet",
        step=key.step,
        key=str(key),
        kind="memory-only",
        hint=f"`everystep show` reads it there; save(sync=True) or `everystep agent stop {repository.store.url}` bring it to disk",
    )


def _keys_in_memory(repository: Repository) -> list[CheckpointKey]:
    """Snapshots that the agent holds, newest first."""
    return [CheckpointKey(item.step, item.attempt) for item in in_memory(repository)]


def _committed(repository: Repository, step: str) -> CheckpointKey:
    if step == "latest":
        return repository.find(None)
    with contextlib.suppress(ValueError):
        key = CheckpointKey.parse(step)
        keys = repository.keys()
        if key not in keys:
            reduced = [str(one) for one in keys if one.full == key]
            what = f"; it was reduced to {reduced[-1]}" if reduced else ""
            raise errors.NotFoundError(
                f"there is no checkpoint {step!r}{what}", key=step, kind="no-checkpoint", hint=f"everystep ls {repository.store.url}"
            )
        return key
    try:
        return repository.find(int(step))
    except ValueError:
        raise errors.ConfigError(
            f"{step!r} is no step", key=step, kind="step", hint="give a number, `latest`, or a whole key such as 000000000150-0002"
        ) from None


@contextlib.contextmanager
def visit(repository: Repository) -> Iterator[AgentClient | None]:
    """A connection to the run's agent on this node, or None where there is none. One that does not answer is said and counts as none."""
    try:
        client = AgentClient.connect(run_url=repository.store.url, run_id=repository.run_id, role="visitor", spawn=False, timeout_s=5.0)
    except errors.NotFoundError:
        yield None
        return
    except errors.AgentError as error:
        output.note(f"the run's agent does not answer: {error}")
        yield None
        return
    try:
        yield client
    finally:
        client.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """Who saved a checkpoint, and whose files are in the store that is looked at."""

    nodes: int = 1
    world: int = 1
    shared: bool = True
    """False: each node's store has its own files only."""
    here: tuple[int, ...] = (0,)
    """The nodes, counted from 0, whose files are (or whose share in memory is) here."""

    @property
    def complete(self) -> bool:
        """Whether all nodes' files are here."""
        return len(self.here) == self.nodes

    def __str__(self) -> str:
        ranks = output.plural(self.world, "rank")
        return ranks if self.nodes == 1 else f"{ranks} on {self.nodes} nodes"

    def whose(self) -> str:
        """Whose files are here, for people: ``node 2 of 4``; nodes are counted from 1 as in the names of files."""
        if not self.here:
            return f"no node of {self.nodes}"
        numbers = ", ".join(str(node + 1) for node in self.here)
        return f"{'node' if len(self.here) == 1 else 'nodes'} {numbers} of {self.nodes}"

    def document(self) -> dict[str, object]:
        """As JSON."""
        return {"nodes": self.nodes, "world": self.world, "shared": self.shared, "nodes_here": list(self.here)}


def saved_by(repository: Repository, key: CheckpointKey, manifest: Manifest) -> Saved:
    """Who saved a committed checkpoint, and whose files are in this store."""
    apart = manifest.nodes > 1 and not manifest.shared
    here = tuple(sorted(repository.parts_there(key))) if apart else tuple(range(manifest.nodes))
    return Saved(nodes=manifest.nodes, world=manifest.world, shared=manifest.shared, here=here)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint or snapshot as ``ls`` shows it."""

    key: CheckpointKey
    saved_at: float | None
    nbytes: int
    where: tuple[str, ...]
    """Of ``memory`` and ``disk``."""
    in_lineage: bool
    newest: bool = False
    pinned: bool = False
    best: bool = False
    verified: bool | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    saved: Saved = Saved()
    dropped: tuple[str, ...] = ()
    """Groups that a reduced checkpoint lacks."""
    damage: str = ""
    """Why the manifest cannot be read, or empty."""

    def document(self, *, now: float) -> dict[str, object]:
        """As JSON."""
        return {
            "key": str(self.key),
            "step": self.key.step,
            "attempt": self.key.attempt,
            "saved_at": self.saved_at,
            "age_s": None if self.saved_at is None else now - self.saved_at,
            "nbytes": self.nbytes,
            **self.saved.document(),
            "where": list(self.where),
            "newest": self.newest,
            "in_lineage": self.in_lineage,
            "pinned": self.pinned,
            "best": self.best,
            "verified": self.verified,
            "metrics": self.metrics,
            "reduced": self.key.reduced,
            "dropped": list(self.dropped),
            "damage": self.damage,
        }


def stored_nbytes(manifest: Manifest | Part) -> int:
    """Bytes of the data files that a checkpoint refers to."""
    return sum(stored.nbytes for stored in manifest.objects)


def gather(repository: Repository) -> list[Row]:
    """Every checkpoint and snapshot of the run, in order of attempt and step; the newest restorable one is marked."""
    snapshots: dict[CheckpointKey, list[messages.SnapshotSummary]] = {}
    for item in in_memory(repository):
        snapshots.setdefault(CheckpointKey(item.step, item.attempt), []).append(item)
    lineage = set(repository.lineage())
    rows: dict[CheckpointKey, Row] = {}
    for key in repository.keys():
        with contextlib.suppress(errors.NotFoundError):  # retention took it while we looked
            rows[key] = _disk_row(repository, key, in_lineage=key in lineage, snapshot=snapshots.get(key))
    for key, items in snapshots.items():
        if key not in rows:
            rows[key] = _memory_row(key, items, in_lineage=repository.in_lineage(key))
    ordered = [rows[key] for key in sorted(rows, key=lambda key: (key.attempt, key.step, key.reduced))]
    restorable = [row.key for row in ordered if row.in_lineage and not row.damage and row.verified is not False and not row.key.reduced]
    newest = max(restorable, key=lambda key: (key.attempt, key.step), default=None)
    return [dataclasses.replace(row, newest=row.key == newest) for row in ordered]


def in_memory(repository: Repository) -> Sequence[messages.SnapshotSummary]:
    """What the run's agent holds, newest first; nothing where there is none."""
    with visit(repository) as client:
        try:
            return client.snapshots() if client else ()
        except errors.AgentError as error:
            output.note(f"the run's agent does not answer: {error}")
            return ()


def _memory_row(key: CheckpointKey, items: Sequence[messages.SnapshotSummary], *, in_lineage: bool) -> Row:
    """Of the agent's own share and the copies that it holds for other nodes."""
    first = items[0]
    saved = Saved(nodes=first.nodes, world=first.world, here=tuple(sorted({item.node for item in items})))
    return Row(
        key=key, saved_at=max(item.saved_at for item in items), nbytes=sum(item.nbytes for item in items), where=("memory",),
        in_lineage=in_lineage, saved=saved,
    )  # fmt: skip


def _disk_row(
    repository: Repository, key: CheckpointKey, *, in_lineage: bool, snapshot: Sequence[messages.SnapshotSummary] | None
) -> Row:
    where = ("disk",) if snapshot is None else ("memory", "disk")
    pinned, verified = repository.pinned(key), repository.verified(key)
    try:
        manifest = repository.manifest(key)
    except errors.CorruptionError as error:
        saved_at = None if snapshot is None else snapshot[0].saved_at
        return Row(
            key=key, saved_at=saved_at, nbytes=0, where=where, in_lineage=in_lineage, pinned=pinned, verified=False, damage=error.message
        )
    return Row(
        key=key,
        saved_at=manifest.saved_at,
        nbytes=stored_nbytes(manifest),
        where=where,
        in_lineage=in_lineage,
        pinned=pinned,
        verified=verified,
        metrics=repository.metrics(key),
        saved=saved_by(repository, key, manifest),
        dropped=manifest.dropped,
    )


def mark_best(rows: list[Row], *, metric: str | None, mode: str) -> tuple[list[Row], str | None]:
    """Mark the best row by ``metric``; without one by the only metric there is. Returns the rows and the metric used."""
    if mode not in {"min", "max"}:
        raise errors.ConfigError(f"mode {mode!r} is neither 'min' nor 'max'", kind="mode")
    names = sorted({name for row in rows for name in row.metrics})
    if metric is None:
        metric = names[0] if len(names) == 1 else None
    elif metric not in names:
        raise errors.NotFoundError(
            f"no checkpoint has the metric {metric!r}", key=metric, kind="no-metric", hint=f"there are: {', '.join(names) or 'none'}"
        )
    scored = [row for row in rows if metric is not None and metric in row.metrics and row.metrics[metric] == row.metrics[metric]]
    if metric is None or not scored:
        return rows, metric
    sign = 1 if mode == "min" else -1
    best = min(scored, key=lambda row: (sign * row.metrics[metric], -row.key.step)).key
    return [dataclasses.replace(row, best=row.key == best) for row in rows], metric


def now() -> float:
    """Seconds since the epoch."""
    return time.time()
