"""``everystep pin``: keep a checkpoint whatever the retention says."""

from __future__ import annotations

from typing import Annotated

import typer

from everystep.cli import output, runs
from everystep.cli.exits import guarded


@guarded
def pin(
    run: runs.Run,
    step: runs.Step,
    remove: Annotated[bool, typer.Option("--remove", help="Take the pin away.")] = False,
    reason: Annotated[str, typer.Option(help="Why; kept beside the pin.")] = "",
    as_json: output.AsJson = False,
) -> None:
    """Pin a checkpoint: no retention and no `forget` without --force removes it. --remove takes the pin away."""
    repository = runs.open_run(run)
    key = runs.resolve(repository, step)
    was = repository.pinned(key)
    if remove:
        repository.unpin(key)
    else:
        repository.pin(key, reason=reason)
    if as_json:
        output.print_json({"run": repository.store.url, "key": str(key), "step": key.step, "pinned": not remove, "was_pinned": was})
    else:
        output.print_text(f"{key}  {'no longer pinned' if remove and was else 'was not pinned' if remove else 'pinned'}")
