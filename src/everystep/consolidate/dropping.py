"""What of a checkpoint is forgotten once its export is published: all of it, or what serving does not need."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from everystep.consolidate.exports import Exports
from everystep.consolidate.source import Source
from everystep.errors import CheckpointError, ConfigError, ConflictError, CorruptionError, NotFoundError
from everystep.repository import CheckpointKey, Repository
from everystep.repository.reducing import groups_of_kind
from everystep.schedule import Consolidate

__all__ = ["OWN", "check_drop", "drop_shards"]

OWN = "everystep"
"""``Source.kind`` of our own checkpoints."""


def check_drop(source: Source, options: Consolidate) -> None:
    """ConfigError when what ``drop_shards`` says cannot be done: said before anything is written."""
    if not options.drop_shards:
        return
    if source.kind != OWN:
        raise ConfigError(
            f"drop_shards={options.drop_shards!r}: {source.where!r} is not ours to delete from", key=source.where, kind="drop-shards",
            hint="leave it out: whoever wrote these checkpoints prunes them",
        )  # fmt: skip
    if options.into == "checkpoint":
        raise ConfigError(
            f"drop_shards={options.drop_shards!r} would delete the export with the checkpoint that it lies in", kind="drop-shards",
            hint="export into latest, or into a folder",
        )  # fmt: skip


def drop_shards(source: Source, options: Consolidate, exports: Exports) -> str:
    """Forget shards of this checkpoint, and of those that were exported before and could not be dropped then; says what came of it.

    A restore needs the newest good checkpoint: that one stays whole until a newer one has come and is exported too. The caller's own
    hold is over.
    """
    repository = Repository(source.store)
    own = CheckpointKey.parse(source.key)
    everything = options.drop_shards == "all"
    said = []
    for key in repository.droppable([own, *_earlier(exports, repository, options)], everything=everything):
        try:
            if everything:
                said.append(f"{key}: {repository.drop(key):,} bytes freed")
                continue
            groups = _optimizers(repository, key)
            if groups:
                said.append(f"{key}: {', '.join(groups)} dropped, now {repository.reduce(key, drop=groups)}")
        except (ConflictError, NotFoundError, ConfigError, CorruptionError) as error:  # the export is there; shards may stay
            said.append(f"{key} stays: {error.message}")
    verdict = repository.may_drop(own)
    if not verdict and verdict.kind != "no-checkpoint":
        said.append(f"{verdict.key} stays for now: {verdict.reason}")
    return "; ".join(said) or "nothing was left to drop"


def _earlier(exports: Exports, repository: Repository, options: Consolidate) -> Sequence[CheckpointKey]:
    """Other checkpoints of this run whose exports are there, and were made to drop the same."""
    found = []
    for past in exports.history():
        made = past.drop_shards == options.drop_shards and past.origin == repository.run_id
        if made and exports.holds(past.folder, past.id) and exports.whole(past.folder):
            with contextlib.suppress(ValueError):
                found.append(CheckpointKey.parse(past.key))
    return found


def _optimizers(repository: Repository, key: CheckpointKey) -> tuple[str, ...]:
    """Groups of the state that are optimizers. () where the whole one is gone: then another call is at it."""
    try:
        return groups_of_kind(repository.manifest(key), "optimizer")
    except CheckpointError:
        return ()
