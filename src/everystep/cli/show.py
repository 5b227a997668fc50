"""``everystep show``: what one checkpoint holds."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from everystep import errors
from everystep.cli import output, runs
from everystep.cli.exits import guarded
from everystep.cli.plain import flatten, tell
from everystep.manifest import Manifest, Part, document_of_rank
from everystep.repository import CheckpointKey, Repository

SHOWN_VALUES = 40


@guarded
def show(
    run: runs.Run,
    step: runs.Step = "latest",
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor, not only a line for each group.")] = False,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Whose plain values are shown: each rank has its own.")] = 0,
    as_json: output.AsJson = False,
) -> None:
    """Show what a checkpoint holds: files, tensors by group, plain values, metrics, and where it comes from.

    A step that is only in the agent's memory yet is shown from there.
    """
    repository = runs.open_run(run)
    key, manifest, where = find(repository, step)
    document = describe(repository, key, manifest, where=where, tensors=tensors, rank=rank)
    if as_json:
        output.print_json(document)
    else:
        _print(document, manifest, tensors=tensors)


def find(repository: Repository, step: str) -> tuple[CheckpointKey, Manifest | Part, str]:
    """The checkpoint meant, its manifest, and the tier it was read from (``disk`` before ``memory``).

    Of a step that several nodes hold in memory it is this node's part: the agent here knows no more.
    """
    try:
        key = runs.resolve(repository, step)
        return key, repository.manifest(key), "disk"
    except errors.NotFoundError:
        with runs.visit(repository) as client:
            for item in client.snapshots() if client else ():
                found = CheckpointKey(item.step, item.attempt)
                if step in {"latest", str(item.step), str(found)} and not item.replica and client is not None:
                    with client.take(item.slab) as taken:
                        return found, taken.part if item.nodes > 1 else taken.manifest, "memory"
        raise


def describe(
    repository: Repository, key: CheckpointKey, manifest: Manifest | Part, *, where: str, tensors: bool, rank: int = 0
) -> dict[str, Any]:
    """Everything about a checkpoint as one JSON document. Plain values are those of ``rank``.

    Raises:
        LayoutError: No such rank has saved it, or (of a part) not on this node.
    """
    if rank >= manifest.world:
        raise errors.LayoutError(
            f"step {key.step} was saved by {output.plural(manifest.world, 'rank')}: there is no rank {rank}", step=key.step, rank=rank,
            kind="rank", hint=f"--rank takes 0 to {manifest.world - 1}",
        )  # fmt: skip
    if isinstance(manifest, Part):
        saved = runs.Saved(nodes=manifest.nodes, world=manifest.world, shared=manifest.shared, here=(manifest.node,))
        rank = rank if rank in manifest.ranks else manifest.ranks[0]
    else:
        saved = runs.saved_by(repository, key, manifest)
    there = _files_here(repository, key, saved) if where == "disk" else None
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
        **saved.document(),
        "in_lineage": repository.in_lineage(key),
        "resumed_from": parent,
        "versions": {} if attempt is None else attempt.versions,
        "pinned": on_disk and repository.pinned(key),
        "verified": repository.verified(key) if on_disk else None,
        "reduced": key.reduced,
        "dropped": [] if isinstance(manifest, Part) else list(manifest.dropped),
        "metrics": repository.metrics(key) if on_disk else dict(manifest.metrics),
        "nbytes": runs.stored_nbytes(manifest),
        "files": [
            {"key": stored.key, "nbytes": stored.nbytes, "here": there is None or stored.key in there} for stored in manifest.objects
        ],
        "groups": _groups(manifest, nbytes_by_tensor),
        "aliases": dict(manifest.aliases),
        "values_of_rank": rank,
        "values_differ": sorted(manifest.by_rank),
        "values": {path: tell(value) for path, value in flatten(document_of_rank(manifest, rank)).items()},
    }
    if tensors:
        document["tensors"] = [
            {"name": spec.name, "group": spec.group, "dtype": spec.dtype, "shape": list(spec.shape), "nbytes": count}
            for spec, count in zip(manifest.tensors, nbytes_by_tensor, strict=True)
        ]
    return document


def _files_here(repository: Repository, key: CheckpointKey, saved: runs.Saved) -> set[str] | None:
    """Keys of the data files in this node's own store; None where all nodes' files are expected in it."""
    if saved.shared:
        return None
    return {name for name, _ in repository.store.list(repository.data_key(key, ""))}


def _groups(manifest: Manifest | Part, nbytes_by_tensor: list[int]) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for spec, count in zip(manifest.tensors, nbytes_by_tensor, strict=True):
        group = groups.setdefault(spec.group, {"group": spec.group, "tensors": 0, "elements": 0, "nbytes": 0, "dtypes": set()})
        group["tensors"] += 1
        group["elements"] += math.prod(spec.shape)
        group["nbytes"] += count
        group["dtypes"].add(spec.dtype)
    return [{**group, "dtypes": sorted(group["dtypes"])} for _, group in sorted(groups.items())]


def _lowest_rank(manifest: Manifest | Part) -> int:
    return manifest.ranks[0] if isinstance(manifest, Part) else 0


def _saved_by(document: dict[str, Any]) -> str:
    saved = runs.Saved(
        nodes=document["nodes"], world=document["world"], shared=document["shared"], here=tuple(document["nodes_here"])
    )
    if saved.complete:
        return f"{saved}"
    elsewhere = "what the others hold is in their agents" if document["read_from"] == "memory" else "the others' files are on their nodes"
    return f"{saved}; here: {saved.whose()} ({elsewhere})"


def _print(document: dict[str, Any], manifest: Manifest | Part, *, tensors: bool) -> None:
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
        *([["saved by", _saved_by(document)]] if document["world"] > 1 else []),
        *([["reduced", _reduced(document)]] if document["dropped"] else []),
        ["resumed from", document["resumed_from"] or "nothing: started fresh"],
        ["state", f"{output.nbytes(document['nbytes'])} in {output.plural(len(document['files']), 'file')}, {marks}"],
        ["metrics", "  ".join(f"{name}={output.number(value)}" for name, value in sorted(document["metrics"].items())) or "none"],
        ["written by", "  ".join(f"{name} {version}" for name, version in sorted(document["versions"].items())) or "unknown"],
    ]
    output.print_table(["", ""], facts)
    output.print_text()
    apart = any(not file["here"] for file in document["files"])
    output.print_table(
        ["file", "size", *(["where"] if apart else [])],
        [
            [file["key"], output.nbytes(file["nbytes"]), *(["here" if file["here"] else "another node"] if apart else [])]
            for file in document["files"]
        ],
        right=["size"],
    )
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
        output.print_table(["value" + (f" of rank {document['values_of_rank']}" if document["world"] > 1 else ""), ""],
                           [[path, _short(value)] for path, value in shown])  # fmt: skip
        if len(shown) < len(values):
            output.print_text(f"... and {len(values) - len(shown)} more (--tensors shows all)")
    others = document["values_differ"]
    if others:
        numbers = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        differing = f"{output.plural(len(others), 'rank')} with other values than rank {_lowest_rank(manifest)}"
        output.print_text(f"{differing}: {numbers} (see --rank)")


def _reduced(document: dict[str, Any]) -> str:
    return f"without {', '.join(document['dropped'])}, dropped after the export: a restore takes the rest, with include=[...]"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
