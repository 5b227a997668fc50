"""``everystep diff``: which tensors and values of two checkpoints differ, and by how much."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from everystep.cli import output, runs
from everystep.cli.exits import guarded
from everystep.manifest import Manifest
from everystep.repository import CheckpointKey, Repository

WORDS = {
    "only-in-a": "only in A",
    "only-in-b": "only in B",
    "dtype": "other dtype",
    "shape": "other shape",
    "content": "differs",
}


@guarded
def diff(
    run: runs.Run,
    a: Annotated[str, typer.Argument(metavar="A", help="A step number, `latest`, or a whole key.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    as_json: output.AsJson = False,
) -> None:
    """Compare two checkpoints on disk tensor by tensor: which differ, in how many elements, and by how much at most.

    Tensors with equal digests are not read. Of the others two are in memory at a time.
    """
    repository = runs.open_run(run)
    keys = runs.resolve(repository, a), runs.resolve(repository, b)
    document = compare(repository, *keys)
    if as_json:
        output.print_json(document)
    else:
        _print(document)


def compare(repository: Repository, a: CheckpointKey, b: CheckpointKey) -> dict[str, Any]:
    """The differences of two checkpoints as one JSON document."""
    from everystep.cli.compare import compare_tensors, compare_values

    with _reading(repository, a) as (manifest_a, read_a), _reading(repository, b) as (manifest_b, read_b):
        with output.progress(f"diff {a.step} {b.step}", sum(shard.nbytes for shard in manifest_a.shards)) as advance:
            differences = list(compare_tensors(manifest_a, manifest_b, read_a, read_b, on_bytes=advance))
        values = compare_values(manifest_a, manifest_b)
        names = {*read_a.tensors, *read_b.tensors}
    return {
        "run": repository.store.url,
        "a": str(a),
        "b": str(b),
        "equal": not differences and not values,
        "tensors_compared": len(names),
        "tensors": [dataclasses.asdict(difference) for difference in differences],
        "values": [{"path": path, "a": one, "b": other} for path, one, other in values],
    }


@contextlib.contextmanager
def _reading(repository: Repository, key: CheckpointKey) -> Iterator[tuple[Manifest, Any]]:
    from everystep.trainer.reading import FETCH_NBYTES, ManifestReader, StoreSource
    from everystep.transfer import Buffers

    with repository.hold(key), contextlib.closing(Buffers(nbytes=FETCH_NBYTES)) as buffers:
        manifest = repository.manifest(key)
        yield manifest, ManifestReader(manifest, StoreSource(repository, manifest, buffers), threads=2)


def _print(document: dict[str, Any]) -> None:
    if document["equal"]:
        output.print_text(f"{document['a']} and {document['b']} are equal in all {document['tensors_compared']} tensors and all values")
        return
    rows = [_cells(difference) for difference in document["tensors"]]
    if rows:
        output.print_table(["tensor", "", "max abs", "max rel", "elements", "A", "B"], rows, right=["max abs", "max rel", "elements"])
    if document["values"]:
        output.print_text()
        output.print_table(["value", "A", "B"], [[item["path"], _short(item["a"]), _short(item["b"])] for item in document["values"]])
    output.print_text(
        f"{output.plural(len(rows), 'tensor')} of {document['tensors_compared']} and "
        f"{output.plural(len(document['values']), 'plain value')} {'differs' if len(rows) + len(document['values']) == 1 else 'differ'}"
    )


def _cells(difference: dict[str, Any]) -> list[str]:
    found = difference["numbers"]
    counted = ["", "", ""]
    if found is not None:
        counted = [output.number(found["max_abs"]), output.number(found["max_rel"]), f"{found['count']:,} of {found['elements']:,}"]
    return [difference["name"], WORDS[difference["what"]], *counted, difference["a"], difference["b"]]


def _short(value: object) -> str:
    text = "-" if value is None else value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
