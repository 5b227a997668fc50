"""``everystep show``: what one checkpoint holds."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from everystep import errors
from everystep.cli import output, runs
from everystep.cli.exits import guarded
from everystep.cli.plain import flatten, tell
from everystep.manifest import Manifest
from everystep.repository import CheckpointKey, Repository

SHOWN_VALUES = 40


@guarded
def show(
    run: runs.Run,
    step: runs.Step = "latest",
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor, not only a line for each group.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Show what a checkpoint holds: files, tensors by group, plain values, metrics, and where it comes from.

    A step that is only in the agent's memory yet is shown from there.
    """
    repository = runs.open_run(run)
    key, manifest, where = find(repository, step)
    document = describe(repository, key, manifest, where=where, tensors=tensors)
    if as_json:
        output.print_json(document)
    else:
        _print(document, manifest, tensors=tensors)


def find(repository: Repository, step: str) -> tuple[CheckpointKey, Manifest, str]:
    """The checkpoint meant, its manifest, and the tier it was read from (``disk`` before ``memory``)."""
    try:
        key = runs.resolve(repository, step)
        return key, repository.manifest(key), "disk"
    except errors.NotFoundError:
        with runs.visit(repository) as client:
            for item in client.snapshots() if client else ():
                found = CheckpointKey(item.step, item.attempt)
                if step in {"latest", str(item.step), str(found)} and client is not None:
                    with client.take(item.slab) as taken:
                        return found, taken.manifest, "memory"
        raise


def describe(repository: Repository, key: CheckpointKey, manifest: Manifest, *, where: str, tensors: bool) -> dict[str, Any]:
    """Everything about a checkpoint as one JSON document."""
    attempt = repository.attempts().get(key.attempt)
    parent = None
    if attempt is not None and attempt.parent_attempt is not None and attempt.parent_step is not None:
        parent = str(CheckpointKey(attempt.parent_step, attempt.parent_attempt))
    nbytes_by_tensor = [0] * len(manifest.tensors)
    for shard in manifest.shards:
        nbytes_by_tensor[shard.tensor] += shard.nbytes
    on_disk = where == "disk"
    document: dict[str, Any] = {
        "run": repository.store.url,
        "key": str(key),
        "step": key.step,
        "attempt": key.attempt,
        "read_from": where,
        "saved_at": manifest.saved_at,
        "age_s": runs.now() - manifest.saved_at,
        "nodes": manifest.nodes,
        "in_lineage": repository.in_lineage(key),
        "resumed_from": parent,
        "versions": {} if attempt is None else attempt.versions,
        "pinned": on_disk and repository.pinned(key),
        "verified": repository.verified(key) if on_disk else None,
        "metrics": repository.metrics(key) if on_disk else dict(manifest.metrics),
        "nbytes": runs.stored_nbytes(manifest),
        "files": [{"key": stored.key, "nbytes": stored.nbytes} for stored in manifest.objects],
        "groups": _groups(manifest, nbytes_by_tensor),
        "aliases": dict(manifest.aliases),
        "values": {path: tell(value) for path, value in flatten(bytes(manifest.values)).items()},
    }
    if tensors:
        document["tensors"] = [
            {"name": spec.name, "group": spec.group, "dtype": spec.dtype, "shape": list(spec.shape), "nbytes": count}
            for spec, count in zip(manifest.tensors, nbytes_by_tensor, strict=True)
        ]
    return document


def _groups(manifest: Manifest, nbytes_by_tensor: list[int]) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for spec, count in zip(manifest.tensors, nbytes_by_tensor, strict=True):
        group = groups.setdefault(spec.group, {"group": spec.group, "tensors": 0, "elements": 0, "nbytes": 0, "dtypes": set()})
        group["tensors"] += 1
        group["elements"] += math.prod(spec.shape)
        group["nbytes"] += count
        group["dtypes"].add(spec.dtype)
    return [{**group, "dtypes": sorted(group["dtypes"])} for _, group in sorted(groups.items())]


def _print(document: dict[str, Any], manifest: Manifest, *, tensors: bool) -> None:
    marks = ", ".join(
        [
            *(["pinned"] if document["pinned"] else []),
            {True: "verified", False: "CORRUPT", None: "not verified"}[document["verified"]],
            *([] if document["in_lineage"] else ["abandoned timeline"]),
        ]
    )
    facts = [
        ["step", f"{document['step']} of attempt {document['attempt']}  ({document['key']}, from {document['read_from']})"],
        ["saved", f"{output.age(document['age_s'])} ago"],
        ["resumed from", document["resumed_from"] or "nothing: started fresh"],
        ["state", f"{output.nbytes(document['nbytes'])} in {output.plural(len(document['files']), 'file')}, {marks}"],
        ["metrics", "  ".join(f"{name}={output.number(value)}" for name, value in sorted(document["metrics"].items())) or "none"],
        ["written by", "  ".join(f"{name} {version}" for name, version in sorted(document["versions"].items())) or "unknown"],
    ]
    output.print_table(["", ""], facts)
    output.print_text()
    output.print_table(["file", "size"], [[file["key"], output.nbytes(file["nbytes"])] for file in document["files"]], right=["size"])
    output.print_text()
    output.print_table(
        ["group", "tensors", "elements", "size", "dtypes"],
        [
            [group["group"], str(group["tensors"]), f"{group['elements']:,}", output.nbytes(group["nbytes"]), " ".join(group["dtypes"])]
            for group in document["groups"]
        ],
        right=["tensors", "elements", "size"],
    )
    if tensors:
        output.print_text()
        output.print_table(
            ["tensor", "dtype", "shape", "size"],
            [
                [item["name"], item["dtype"], "x".join(map(str, item["shape"])) or "scalar", output.nbytes(item["nbytes"])]
                for item in document["tensors"]
            ],
            right=["size"],
        )
    if document["aliases"]:
        output.print_text()
        output.print_table(["tied name", "stored as"], [[name, stored] for name, stored in sorted(document["aliases"].items())])
    values = list(document["values"].items())
    if values:
        output.print_text()
        shown = values if tensors else values[:SHOWN_VALUES]
        output.print_table(["value", ""], [[path, _short(value)] for path, value in shown])
        if len(shown) < len(values):
            output.print_text(f"... and {len(values) - len(shown)} more (--tensors shows all)")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
