"""``everystep exports``: what was exported from a run, and where LATEST and BEST lead."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everystep import errors
from everystep.cli import output, runs
from everystep.cli.exits import guarded

if TYPE_CHECKING:
    from everystep.consolidate.exports import Exports
    from everystep.consolidate.history import Past


@guarded
def exports(
    path: Annotated[str, typer.Argument(metavar="RUN", help="A run, a folder that `everystep watch` follows, or a folder of exports.")],
    name: Annotated[str | None, typer.Option("--name", help="Only exports of this name.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """List what was exported: what is there, what is gone again, why it was made, and where LATEST and BEST lead."""
    from everystep.consolidate.exports import Exports
    from everystep.consolidate.history import History

    root = os.path.abspath(find_root(path))
    found = Exports(root, name or "model")
    rows = [_document(found, past) for past in History(root).all() if name in {None, past.name}]
    rows.sort(key=lambda row: (row["published_at"], row["step"]))
    if as_json:
        output.print_json({"root": root, "latest": found.latest(), "best": found.best(), "exports": rows})
    elif not rows:
        output.print_text(f"no export {'' if name is None else f'{name!r} '}in {root}")
    else:
        now = runs.now()
        output.print_table(
            ["step", "checkpoint", "size", "made", "ago", "where", ""],
            [
                [str(row["step"]), row["key"], "gone" if row["nbytes"] is None else output.nbytes(row["nbytes"]), row["reason"],
                 output.age(now - row["published_at"]), row["folder"], _marks(row)]
                for row in rows
            ],
            right=["step", "size", "ago"],
        )  # fmt: skip


def find_root(path: str) -> str:
    """The folder of exports that is meant: itself, or ``exports`` in it."""
    from everystep.consolidate.card import RECORD
    from everystep.consolidate.exports import LATEST
    from everystep.consolidate.history import HISTORY

    for folder in (os.path.join(path, "exports"), path):  # a LATEST alone may be the job's own
        if any(os.path.exists(os.path.join(folder, name)) for name in (HISTORY, os.path.join(LATEST, RECORD))):
            return folder
    if not os.path.isdir(path):
        raise errors.NotFoundError(f"there is no folder {path!r}", key=path, kind="no-folder", hint="give a run, or a folder of exports")
    if os.path.exists(os.path.join(path, "run.json")) or os.path.isdir(os.path.join(path, "exports")):
        return os.path.join(path, "exports")
    raise errors.NotFoundError(
        f"nothing was exported in {path!r}", key=path, kind="no-exports", hint=f"everystep consolidate {path} makes the first export"
    )


def _document(found: Exports, past: Past) -> dict[str, Any]:
    folder = os.path.normpath(os.path.join(found.root, past.folder))
    latest, best = found.latest(), found.best()
    nbytes = _nbytes(found, folder, past.id)
    return {
        "name": past.name, "key": past.key, "step": past.step, "reason": past.reason, "published_at": past.published_at,
        "metrics": dict(past.metrics), "folder": folder, "nbytes": nbytes, "latest": nbytes is not None and _same(latest, folder),
        "best": nbytes is not None and _same(best, folder),
    }  # fmt: skip


def _nbytes(found: Exports, folder: str, id: str) -> int | None:
    """Of an export that is there; None of one that is gone, or whose folder is another's by now."""
    try:
        record = found.record(folder)
    except errors.CheckpointError:
        return None
    return sum(file.nbytes for file in record.files) if record.id == id else None


def _same(one: str | None, other: str) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(other)


def _marks(row: dict[str, Any]) -> str:
    return ", ".join(word for word in ("latest", "best") if row[word]).upper()
