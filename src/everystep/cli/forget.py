"""``everystep forget``: unpublish checkpoints and delete their data."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from everystep import errors
from everystep.cli import output, runs
from everystep.cli.exits import guarded
from everystep.repository import CheckpointKey, Repository


@guarded
def forget(
    run: runs.Run,
    steps: Annotated[list[str], typer.Argument(metavar="STEP", help="Step numbers, `latest`, or whole keys.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Forget even the newest good checkpoint and pinned ones.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Unpublish checkpoints and delete their data.

    Refuses, before anything is deleted, the newest good checkpoint (a restore would take it) and pinned ones, unless --force is given.
    """
    repository = runs.open_run(run)
    keys = list(dict.fromkeys(runs.resolve(repository, step) for step in steps))
    if not force:
        for key in keys:
            refuse_protected(repository, key, run=run)
    if not yes:
        confirm(keys, as_json=as_json)
    freed = {key: _forget(repository, key) for key in keys}
    if as_json:
        output.print_json(
            {
                "run": repository.store.url,
                "forgotten": [{"key": str(key), "step": key.step, "freed_nbytes": count} for key, count in freed.items()],
                "freed_nbytes": sum(freed.values()),
            }
        )
        return
    for key, count in freed.items():
        output.print_text(f"{key}  forgotten, {output.nbytes(count)} freed")


def refuse_protected(repository: Repository, key: CheckpointKey, *, run: str) -> None:
    """ConflictError when ``key`` is what retention never removes."""
    if repository.pinned(key):
        raise errors.ConflictError(
            f"checkpoint {key} is pinned",
            step=key.step,
            key=str(key),
            kind="pinned",
            hint=f"everystep pin {run} {key} --remove, or --force",
        )
    if key == newest_good(repository):
        raise errors.ConflictError(
            f"checkpoint {key} is the newest good one: a restore would take it",
            step=key.step,
            key=str(key),
            kind="newest-good",
            hint="--force forgets it all the same",
        )


def newest_good(repository: Repository) -> CheckpointKey | None:
    """The checkpoint that a restore would take: the newest of the lineage that is readable and not known to be corrupt."""
    for key in repository.lineage():
        if key.reduced or repository.verified(key) is False:
            continue
        try:
            repository.manifest(key)
        except errors.CorruptionError:
            continue
        return key
    return None


def confirm(keys: list[CheckpointKey], *, as_json: bool) -> None:
    """Ask; where nobody can answer, say what to do instead."""
    if as_json or not sys.stdin.isatty():
        raise errors.ConfigError("forget asks before it deletes, and nobody can answer here", kind="confirm", hint="say --yes")
    if not typer.confirm(f"Forget {', '.join(str(key) for key in keys)}?"):
        raise typer.Exit(1)


def _forget(repository: Repository, key: CheckpointKey) -> int:
    if repository.pinned(key):
        repository.unpin(key)  # with --force only: without it a pin was refused before anything was deleted
    return repository.forget(key)
