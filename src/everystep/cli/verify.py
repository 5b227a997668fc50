"""``everystep verify``: read every byte back and compare digests."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from everystep import errors
from everystep.cli import output, runs
from everystep.cli.exits import exit_code, guarded
from everystep.repository import CheckpointKey, Repository


@dataclasses.dataclass(frozen=True)
class Checked:
    """What verifying one checkpoint found."""

    key: CheckpointKey
    nbytes: int
    """Bytes read."""
    data_nbytes: int
    """Of them, bytes of data files: what ``ls`` and ``show`` call the size. The rest is the manifest and its parts."""
    bad: tuple[tuple[str, str], ...]
    """(object key, what is wrong with it)."""
    saved: runs.Saved = dataclasses.field(default_factory=runs.Saved)

    def document(self) -> dict[str, object]:
        """As JSON."""
        return {
            "key": str(self.key),
            "step": self.key.step,
            "attempt": self.key.attempt,
            "good": not self.bad,
            "nbytes": self.nbytes,
            "data_nbytes": self.data_nbytes,
            **self.saved.document(),
            "bad": [{"object": name, "what": what} for name, what in self.bad],
        }


@guarded
def verify(
    run: runs.Run,
    step: runs.Step = "latest",
    every: Annotated[bool, typer.Option("--all", help="Verify every checkpoint of the run.")] = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Reads in flight.")] = 2,
    as_json: output.AsJson = False,
) -> None:
    """Read every byte of a checkpoint back and compare it with its digest; names what is wrong, and remembers the result.

    Where each node has a store of its own, this is about the files of the node whose store it is.

    Exits with 12 when anything is wrong.
    """
    repository = runs.open_run(run)
    if every and step != "latest":
        raise errors.ConfigError("both a STEP and --all were given", kind="usage", hint="give one of them")
    keys = repository.keys() if every else [runs.resolve(repository, step)]
    if not keys:
        for item in runs.in_memory(repository):
            raise runs.in_memory_only(repository, CheckpointKey(item.step, item.attempt))
        raise errors.NotFoundError(
            f"{run!r} has no checkpoint to verify", key=run, kind="no-checkpoint", hint="the run has not committed one yet"
        )
    results = []
    for key in keys:
        try:
            result = check(repository, key, threads=threads)
        except errors.NotFoundError:
            if not every:
                raise
            output.note(f"{key} was forgotten meanwhile")
            continue
        _remember(repository, result)
        results.append(result)
        if not as_json:
            _report(result)
    bad = [result for result in results if result.bad]
    if as_json:
        output.print_json({"run": repository.store.url, "good": not bad, "checkpoints": [result.document() for result in results]})
    if bad:
        name, what = bad[-1].bad[0]
        error = errors.CorruptionError(
            f"{output.plural(len(bad), 'checkpoint')} of {len(results)} failed: {bad[-1].key}: {name}: {what}",
            key=str(bad[-1].key),
            hint=f"a restore takes the next older one; everystep forget {run} {bad[-1].key} frees the space",
        )
        output.say_error(error)
        raise typer.Exit(exit_code(error))


def check(repository: Repository, key: CheckpointKey, *, threads: int) -> Checked:
    """Verify one checkpoint, with a progress bar. A manifest that cannot be read is a finding like any other."""
    try:
        manifest = repository.manifest(key)
    except errors.CorruptionError as error:
        return Checked(key, 0, 0, ((error.key or "manifest", error.message),))
    files = {stored.key for stored in manifest.objects}
    done, data, bad = 0, 0, []
    saved = runs.saved_by(repository, key, manifest)
    expected = runs.stored_nbytes(manifest) if saved.complete else sum(nbytes for _, nbytes in repository.store.list(f"data/{key}/"))
    with output.progress(f"verify {key.step}", expected) as advance, repository.hold(key):
        for name, count, what in repository.verify(key, threads=threads):
            done += count
            data += count if name in files else 0
            advance(count)
            if what:
                bad.append((name, what))
    return Checked(key, done, data, tuple(bad), saved)


def _remember(repository: Repository, result: Checked) -> None:
    detail = "; ".join(f"{name}: {what}" for name, what in result.bad)
    try:
        repository.record_verified(result.key, good=not result.bad, detail=detail, now=runs.now())
    except (errors.StoreError, errors.CapacityError) as error:
        output.note(f"the result is not recorded: {error.message}")


def _report(result: Checked) -> None:
    if not result.bad:
        apart = "" if result.saved.complete else f"; here are only the files of {result.saved.whose()}: verify on the other nodes too"
        output.print_text(f"{result.key}  good     {output.nbytes(result.data_nbytes)} of data files, and the manifest{apart}")
    for name, what in result.bad:
        output.print_text(f"{result.key}  CORRUPT  {name}: {what}")
