"""``everystep sweep``: delete data that nobody refers to."""

from __future__ import annotations

from typing import Annotated

import typer

from everystep.cli import output, runs
from everystep.cli.exits import guarded


@guarded
def sweep(
    run: runs.Run,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Delete data that no checkpoint refers to and that no living attempt can still commit: what a crash or a half-done deletion left."""
    repository = runs.open_run(run)
    planned = repository.plan_sweep(now=runs.now())
    freed = 0 if dry_run else repository.sweep(planned)
    if as_json:
        output.print_json(
            {
                "run": repository.store.url,
                "dry_run": dry_run,
                "swept": [{"key": item.key, "reason": item.reason, "nbytes": item.nbytes, "blocked": item.blocked} for item in planned],
                "freed_nbytes": freed,
            }
        )
        return
    if planned:
        rows = [[item.key, "stays" if item.blocked else "goes", output.nbytes(item.nbytes), item.reason] for item in planned]
        output.print_table(["what", "", "size", "why"], rows, right=["size"])
    going = [item for item in planned if not item.blocked]
    total = sum(item.nbytes for item in going) if dry_run else freed
    output.print_text(f"{output.plural(len(going), 'item')} {'would free' if dry_run else 'freed'} {output.nbytes(total)}")
