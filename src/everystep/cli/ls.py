"""``everystep ls``: the checkpoints of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from everystep import errors
from everystep.cli import output, runs
from everystep.cli.exits import guarded


@guarded
def ls(
    run: runs.Run,
    metric: Annotated[str | None, typer.Option(help="Mark the best by this metric (default: the only metric there is).")] = None,
    mode: Annotated[str, typer.Option(help="Whether the best is the `min` or the `max`.")] = "min",
    as_json: output.AsJson = False,
) -> None:
    """List the checkpoints of a run, on disk and in its agent's memory.

    `*` marks the newest one that a restore would take; `~` one of an abandoned timeline (the run went back behind it and on from there).
    `without ...`: it was reduced after its export, so a restore takes it only when asked for its step, or for what is left of it.
    """
    repository = runs.open_run(run)
    rows, metric = runs.mark_best(runs.gather(repository), metric=metric, mode=mode)
    now = runs.now()
    if as_json:
        output.print_json(
            {
                "run": repository.store.url,
                "run_id": repository.run_id,
                "best_by": metric,
                "checkpoints": [row.document(now=now) for row in rows],
            }
        )
    elif not rows:
        output.print_text(f"{run}: no checkpoint yet")
    else:
        several = any(row.saved.world > 1 for row in rows)
        output.print_table(
            ["", "step", "attempt", "age", "size", *(["saved by"] if several else []), "where", "marks", "metrics"],
            [_cells(row, now=now, several=several) for row in rows],
            right=["step", "attempt", "age", "size"],
        )
        on_disk = [row for row in rows if "disk" in row.where]
        total = sum(row.nbytes for row in on_disk)
        output.print_text(
            f"{output.plural(len(on_disk), 'checkpoint')} on disk, {output.nbytes(total)} of data files; "
            f"{len(rows) - len(on_disk)} only in memory"
        )
        apart = [row for row in on_disk if not row.saved.shared]
        if apart:
            whose = apart[-1].saved.whose()
            output.print_text(f"each node has a store of its own: here are the files of {whose}, the others' are on their nodes")
    damaged = [row for row in rows if row.damage]
    if damaged:
        error = errors.CorruptionError(
            f"{output.plural(len(damaged), 'checkpoint')} cannot be read: {damaged[-1].damage}",
            key=str(damaged[-1].key),
            hint=f"everystep verify {run} --all; a restore takes the next older one",
        )
        output.say_error(error)
        raise typer.Exit(12)


def _cells(row: runs.Row, *, now: float, several: bool) -> list[str]:
    marks = [
        *(["pinned"] if row.pinned else []),
        *(["best"] if row.best else []),
        *({True: ["verified"], False: ["corrupt"], None: []}[row.verified]),
        *([] if row.in_lineage else ["abandoned"]),
        *([f"without {','.join(row.dropped) or '?'}"] if row.key.reduced else []),
        *([] if row.damage or row.saved.complete else [f"files of {row.saved.whose()}"]),
    ]
    return [
        "*" if row.newest else "" if row.in_lineage else "~",
        str(row.key.step),
        str(row.key.attempt),
        "?" if row.saved_at is None else output.age(now - row.saved_at),
        "?" if row.damage else output.nbytes(row.nbytes),
        *([str(row.saved)] if several else []),
        "+".join(row.where),
        " ".join(marks),
        " ".join(f"{name}={output.number(value)}" for name, value in sorted(row.metrics.items())),
    ]
