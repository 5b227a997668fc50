"""``everystep consolidate``: whole Hugging Face safetensors from a checkpoint, now or by the schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everystep import errors
from everystep.cli import output
from everystep.cli import settings as words
from everystep.cli.exits import exit_code, guarded
from everystep.cli.usage import Command
from everystep.schedule import Consolidate, Decision, Seen, decide

if TYPE_CHECKING:
    from everystep.consolidate.job import Exported
    from everystep.consolidate.source import Found, Source

ASKED = "asked for"
_ADDRESS = re.compile(r"auto|local|ray://\S+|[^/\s]+:\d+")


class WithAddress(Command):
    """A command with ``--ray [ADDRESS]``: what follows is its address only where it looks like one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in click, which knows no such options."""
        read: list[str] = []
        for number, word in enumerate(args):
            read.append(word)
            if word == "--ray" and not (number + 1 < len(args) and _ADDRESS.fullmatch(args[number + 1])):
                read.append("auto")
        return super().parse_args(ctx, read)


@guarded
def consolidate(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A run, a checkpoint of another framework, or a folder with several of them.")
    ],
    which: Annotated[
        str | None, typer.Argument(metavar="WHICH", help="A step number, `latest` (the default), `best`, best:METRIC, or a whole key.")
    ] = None,
    when: words.When = None,
    final: Annotated[bool, typer.Option("--final", help="The run is over: its newest checkpoint, unless that was done.")] = False,
    due: Annotated[bool, typer.Option("--due", help="What is due by the `when` of --settings and not done yet.")] = False,
    into: words.Into = None,
    name: words.Name = None,
    group: words.GroupOf = None,
    dtype: words.Dtype = None,
    max_shard_size: words.MaxShardSize = None,
    include: words.Include = None,
    rename: words.Rename = None,
    assets: words.Assets = None,
    keep: words.Keep = None,
    drop_shards: words.DropShards = None,
    settings: words.Settings = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="Processes that share the work: 1, or with --ray one on each node, unless given.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=256, help="Threads of each; by default as many as help.")] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="[ADDRESS]", help="Share the work among the nodes of a Ray cluster that see the same folders."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and why, and do nothing.")] = False,
    background: Annotated[bool, typer.Option("--background", help="Give way to others: lowest CPU and disk priority.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write it again even if an equal export is there.")] = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
    reason: Annotated[str | None, typer.Option("--reason", hidden=True)] = None,
    root: Annotated[str | None, typer.Option("--root", hidden=True)] = None,
    origin: Annotated[str | None, typer.Option("--origin", hidden=True)] = None,
    as_json: output.AsJson = False,
) -> None:
    """Write a checkpoint as whole Hugging Face safetensors, which `from_pretrained` and every server load.

    Without WHICH the newest one. With --when (or --due) whatever is due by that schedule and not done yet; with --final the newest one,
    once. What was exported is shown by `everystep exports`.
    """
    if parent is not None:
        die_with_parent(parent)
    if background:
        give_way()
    options = words.settle(
        settings=settings, when=when, into=into, name=name, group=group, dtype=dtype, max_shard_size=max_shard_size, include=include,
        rename=rename, assets=assets, keep=keep, drop_shards=drop_shards,
    )  # fmt: skip
    scheduled = final or due or when is not None
    if scheduled and which is not None:
        flag = "--final" if final else "--when" if when is not None else "--due"
        raise errors.ConfigError(f"both WHICH ({which!r}) and {flag} were given", kind="usage", hint="give one of them")
    task = _Task(options=options, workers=workers, threads=threads, ray=ray, force=force, root=root, origin=origin, as_json=as_json)
    if not scheduled:
        if dry_run:
            task.show([], [(None, task.open(path, which or "latest"))])
        else:
            task.tell(task.run(path, which or "latest", reason=reason or ASKED))
        return
    if final:
        options = task.options = dataclasses.replace(options, when=["final", options.when] if due or when is not None else "final")
    _by_schedule(path, task, ended=final or options.when == "final", final=final, dry_run=dry_run)


class _Task:
    """How everything that one call of the command does is done."""

    def __init__(
        self, *, options: Consolidate, workers: int | None, threads: int | None, ray: str | None, force: bool, root: str | None,
        origin: str | None, as_json: bool,
    ) -> None:  # fmt: skip
        self.options, self.as_json = options, as_json
        self._workers, self._threads, self._ray, self._force, self.root, self._origin = workers, threads, ray, force, root, origin

    def open(self, path: str, which: str) -> Source:
        """The checkpoint meant."""
        from everystep.consolidate.source import open_source

        refuse_missing(path)
        return open_source(path, step=int(which) if which.isdecimal() else which, group=self.options.group)

    def run(self, path: str, which: str, *, reason: str) -> Exported:
        """Consolidate one."""
        from everystep.consolidate import job

        source = self.open(path, which)
        root = self.root or home(path, source.where, self.options)
        with _bar(f"step {source.step}", source, self.options) as pace:
            return job.run(
                source, self.options, root=root, reason=reason, threads=self._threads, workers=self._workers, ray=self._ray, pace=pace,
                force=self._force, origin=self._origin,
            )  # fmt: skip

    def tell(self, exported: Exported) -> None:
        """Of one."""
        if self.as_json:
            output.print_json(document(exported))
        else:
            output.print_text(line(exported))

    def show(self, decisions: Sequence[Decision], sources: Sequence[tuple[Decision | None, Source]]) -> None:
        """What ``--dry-run`` prints."""
        from everystep.consolidate import job

        plans = [(source, job.planned(source, self.options)) for _, source in sources]
        if self.as_json:
            output.print_json(
                {
                    "dry_run": True,
                    "decisions": [decision_document(decision) for decision in decisions],
                    "plans": [
                        {"key": source.key, "step": source.step, "id": plan.id, "nbytes": plan.nbytes,
                         "files": [{"name": file.name, "nbytes": file.nbytes, "linked": file.link is not None} for file in plan.files]}
                        for source, plan in plans
                    ],
                }
            )  # fmt: skip
            return
        if decisions:
            _print_decisions(decisions)
        for source, plan in plans:
            output.print_text(f"step {source.step} ({source.key}):")
            output.print_text(plan.describe())


def _by_schedule(path: str, task: _Task, *, ended: bool, final: bool, dry_run: bool) -> None:
    from everystep.consolidate import job
    from everystep.consolidate.watching import candidates, seen_of

    refuse_missing(path)
    found = {one.key: one for one in candidates(path) if one.complete}
    if not found:
        raise errors.NotFoundError(
            f"there is no complete checkpoint in {path!r}", key=path, kind="no-checkpoint",
            hint="give a run, a checkpoint of another framework, or the folder with them",
        )  # fmt: skip
    first = next(iter(found.values()))
    task.root = task.root or home(path, first.path, task.options) or job.export_root(first.path, task.options)
    done = history(task.root, task.options, [first])
    decisions = decide(task.options.when, [seen_of(one) for one in found.values()], done, ended=ended)
    due = [decision for decision in decisions if decision.due]
    if dry_run:
        task.show(decisions, [(decision, task.open(*where(found[decision.key]))) for decision in due])
        return
    exported, failed = [], None
    for decision in due:
        try:
            exported.append(task.run(*where(found[decision.key]), reason=decision.reason))
        except errors.CheckpointError as error:
            if len(due) == 1 or isinstance(error, (errors.ConfigError, errors.CapacityError)):
                raise
            failed = failed or error
            output.say_error(error)
        else:
            if not task.as_json:
                output.print_text(line(exported[-1]))
    if task.as_json and final and len(exported) == 1:
        output.print_json(document(exported[0]))
    elif task.as_json:
        output.print_json({"exported": [document(one) for one in exported], "decisions": [decision_document(one) for one in decisions]})
    elif not due:
        newest = decisions[-1]
        output.print_text(f"nothing is due: step {newest.step}: {newest.reason}")
    if failed is not None:
        raise typer.Exit(exit_code(failed))


def home(path: str, checkpoint: str, options: Consolidate) -> str | None:
    """Where the exports of checkpoints somewhere below ``path`` go, as `everystep watch` has it; None: where ``job.run`` puts them."""
    if options.into not in {"checkpoint", "latest"} or os.path.realpath(path) == os.path.realpath(checkpoint):
        return None
    return os.path.join(os.path.abspath(path), "exports")


def history(root: str, options: Consolidate, found: Sequence[Found]) -> Sequence[Seen]:
    """What of these checkpoints' run was exported before, for the schedule."""
    from everystep.consolidate.exports import Exports
    from everystep.repository import Repository

    origin = Repository.open(found[0].path).run_id if found and found[0].kind == "everystep" else ""
    return Exports(root, options.name).history(into=options.into, origin=origin)


def where(found: Found) -> tuple[str, str]:
    """What to open for a checkpoint that was found: path, and which."""
    return found.path, found.key if found.kind == "everystep" else "latest"


def refuse_missing(path: str) -> None:
    """NotFoundError when nothing is there."""
    if "://" not in path and not os.path.exists(path):
        raise errors.NotFoundError(
            f"there is no {path!r}", key=path, kind="no-path", hint="give a run, a checkpoint, or the folder with them"
        )


def document(exported: Exported) -> dict[str, Any]:
    """What ``--json`` prints of one."""
    return exported._asdict()


def line(exported: Exported) -> str:
    """The same for people."""
    if exported.already:
        text = f"step {exported.step}  was there already: {exported.path}"
    else:
        linked = "" if not exported.linked else " (linked)"
        if 0 < exported.linked < exported.nbytes:
            linked = f" ({output.nbytes(exported.linked)} linked)"
        text = f"step {exported.step}  {output.nbytes(exported.nbytes)}{linked} in {output.seconds(exported.seconds)}: {exported.path}"
    return f"{text}\nshards: {exported.dropped}" if exported.dropped else text


def decision_document(decision: Decision) -> dict[str, Any]:
    """As JSON."""
    return {"key": decision.key, "step": decision.step, "due": decision.due, "reason": decision.reason}


def _print_decisions(decisions: Sequence[Decision]) -> None:
    rows = [[decision.key, str(decision.step), "due" if decision.due else "not due", decision.reason] for decision in decisions]
    output.print_table(["checkpoint", "step", "", "why"], rows, right=["step"])


@contextlib.contextmanager
def _bar(label: str, source: Source, options: Consolidate) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal; where there is none, nothing that would have to be called."""
    if not sys.stderr.isatty():
        yield None
        return
    from everystep.consolidate import job

    total = job.planned(source, options).nbytes
    with output.progress(label, total) as advance:
        yield advance


# -- as a child -------------------------------------------------------------------------------------------------------------
def give_way() -> None:
    """The lowest priority for CPU and disk. What the system does not grant is no error."""
    with contextlib.suppress(OSError):
        os.nice(19)
    import psutil

    with contextlib.suppress(psutil.Error, OSError, AttributeError, ValueError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends. Linux only; elsewhere nothing happens.

    ``parent``: its process id; one that ended before this call is told by it.
    """
    import ctypes

    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


@guarded
def worker(
    number: Annotated[int, typer.Argument(min=0)],
    count: Annotated[int, typer.Argument(min=1)],
    folder: Annotated[str, typer.Argument()],
    as_json: Annotated[bool, typer.Option("--json", hidden=True)] = True,
) -> None:
    """One of several processes that write one export: its share of the ranges. The task comes as JSON on stdin."""
    from everystep.consolidate.sharing import write_share

    task = json.load(sys.stdin)
    die_with_parent(task["parent"])
    written = write_share(task, folder, (number, count))
    print(json.dumps({"nbytes": written.nbytes, "linked": written.linked, "seconds": written.seconds}))
