"""``everystep watch``: follow the folder of a running job and consolidate its checkpoints by a schedule."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Annotated, Any

import psutil
import typer

from everystep import errors
from everystep.cli import settings as words
from everystep.cli.consolidate import history
from everystep.cli.exits import INTERRUPTED, document, exit_code, guarded
from everystep.policy import duration_s
from everystep.schedule import Consolidate, to_document

if TYPE_CHECKING:
    from everystep.consolidate.source import Found
    from everystep.consolidate.watching import Event, Outcome

_QUIET = frozenset({"skipped"})
"""Events that are told with --json and on request only: one for each checkpoint that is not due."""


@guarded
def watch(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder that the job writes its checkpoints to, or a run.")],
    when: words.When = None,
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
    once: Annotated[bool, typer.Option("--once", help="Do what is due now and end: for cron.")] = False,
    final: Annotated[bool, typer.Option("--final", help="The job is over: `final` is due. With --once.")] = False,
    pid: Annotated[
        int | None, typer.Option("--pid", min=1, help="The job's process: when it has ended `final` is due, and then the watch ends.")
    ] = None,
    idle: Annotated[
        str | None,
        typer.Option("--idle", metavar="DURATION", help="Without any change for so long (2h) the job counts as over, as with --pid."),
    ] = None,
    poll: Annotated[str, typer.Option("--poll", metavar="DURATION", help="Time between two looks.")] = "10s",
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the work.")] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also why checkpoints are not due.")] = False,
    as_lines: Annotated[bool, typer.Option("--json", help="One JSON document a line for each event.")] = False,
) -> None:
    """Follow a folder that a running job of NeMo, torchtitan, Transformers, Accelerate or Lightning writes, and consolidate by a schedule.

    The job is not changed and its files are only read: incomplete checkpoints are left alone, and the one that is read is kept from the
    job's own pruning where that is possible. Ends on SIGTERM or Ctrl-C; started again it goes on where it was.
    """
    from everystep.consolidate.watching import Watch

    options = words.settle(
        settings=settings, when=when, into=into, name=name, group=group, dtype=dtype, max_shard_size=max_shard_size, include=include,
        rename=rename, assets=assets, keep=keep, drop_shards=drop_shards,
    )  # fmt: skip
    if final and not once:
        raise errors.ConfigError(
            "--final says that the job is over: there is nothing to follow", kind="usage", hint="add --once, or give --pid or --idle"
        )
    folder = os.path.abspath(folder)
    places = _Places(folder, options)
    over = (lambda: final) if pid is None else _ended(pid)
    tell = _Teller(as_json=as_lines, verbose=verbose)
    with _signals() as (wake, received):
        following = Watch(
            folder, options, start=places.starter(workers), tell=tell, done=places.done, tidy=places.tidy, wake=wake,
            stopped=lambda: bool(received), over=over, idle_s=None if idle is None else duration_s(idle), poll_s=duration_s(poll),
        )  # fmt: skip
        if not once:
            tell.started(folder, options, ends=pid is not None or idle is not None)
        try:
            following.run(once=once)
        except errors.CheckpointError as error:
            tell.failed(error)
            raise
    if received:
        raise typer.Exit(INTERRUPTED if received[0] == signal.SIGINT else 0)
    if following.failed is not None and (once or pid is not None or idle is not None):
        raise typer.Exit(exit_code(following.failed))


class _Places:
    """Where the exports of what is watched go, and what is there already."""

    def __init__(self, folder: str, options: Consolidate) -> None:
        self._folder, self._options = folder, options
        if options.into in {"checkpoint", "latest"}:
            self.root = os.path.join(folder, "exports")
        else:
            from everystep.consolidate.job import folder_at

            self.root = folder_at(options.into)
            if os.path.realpath(self.root) == os.path.realpath(folder):
                raise errors.ConfigError(
                    f"the exports cannot go into the watched folder {folder!r} itself: the job has a LATEST of its own there",
                    key=folder, kind="into", hint=f"--into latest puts them into {self.root}/exports",
                )  # fmt: skip

    def done(self, found: Sequence[Found]) -> Sequence[Any]:
        """What was exported before."""
        return history(self.root, self._options, found)

    def tidy(self, found: Sequence[Found]) -> None:
        """Remove what dead writers left."""
        from everystep.consolidate.exports import Exports

        if self._options.into != "checkpoint":
            Exports(self.root, self._options.name).sweep()
            return
        for one in found:
            with contextlib.suppress(errors.CheckpointError):
                Exports(self.root, self._options.name, beside=_beside(one)).sweep()

    def starter(self, workers: int) -> Callable[[Found, str, str], _Process]:
        """What starts the child for one checkpoint."""
        document = json.dumps(to_document(self._options))

        def start(found: Found, path: str, reason: str) -> _Process:
            arguments = [path, *([found.key] if found.kind == "everystep" else [])]
            arguments += ["--reason", reason, "--root", self.root, "--workers", str(workers)]
            if path != found.path:
                arguments += ["--origin", found.path]
            return _Process(arguments, document)

        return start


def _beside(found: Found) -> str:
    """The folder of a checkpoint that its own export goes into."""
    if found.kind == "everystep":
        return os.path.join(found.path, "data", found.key)
    return os.path.join(found.path, "model") if found.kind == "automodel" else found.path


class _Process:
    """``everystep consolidate`` as a child that gives way to everybody and dies with this process."""

    def __init__(self, arguments: list[str], document: str) -> None:
        flags = ["--settings", "-", "--json", "--background", "--parent", str(os.getpid())]
        command = [sys.executable, "-m", "everystep.cli", "consolidate", *flags, *arguments]
        self._stdout: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the outcome
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._stdout, stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is for the watch, which ends it
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(document.encode())
        self._pidfd = os.pidfd_open(self._process.pid)

    def fileno(self) -> int:
        """Readable once it has ended."""
        return self._pidfd

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        from everystep.consolidate.watching import Outcome

        code = self._process.poll()
        if code is None:
            return None
        printed, said = _read(self._stdout), _read(self._stderr)
        self._close()
        return Outcome.of(code, printed, said)

    def kill(self) -> None:
        """End it and wait for its end; its locks go with it."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        os.close(self._pidfd)
        self._stdout.close()
        self._stderr.close()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


class _Teller:
    """Events as lines: for people with the time, or as JSON."""

    def __init__(self, *, as_json: bool, verbose: bool) -> None:
        self._as_json, self._verbose = as_json, verbose

    def __call__(self, event: Event) -> None:
        if self._as_json:
            line = {"event": event.what, "at": time.time(), "text": event.text, **event.details}
            sys.stdout.write(json.dumps(line, default=str) + "\n")
        elif self._verbose or event.what not in _QUIET:
            sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {event.what:<12}  {' '.join(event.text.split())}\n")
        sys.stdout.flush()

    def failed(self, error: errors.CheckpointError) -> None:
        """The last line of a watch that cannot go on; for people the error itself says it."""
        from everystep.consolidate.watching import Event

        if self._as_json:
            self(Event("error", str(error), document(error, exit_code(error))))

    def started(self, folder: str, options: Consolidate, *, ends: bool) -> None:
        """The first line."""
        from everystep.consolidate.watching import Event
        from everystep.schedule import describe

        text = f"{folder}: {describe(options.when)}, into {options.into}"
        if not ends and "final" in json.dumps(to_document(options).get("when", "final")):
            text += f"; nobody says here when the job is over: give --pid or --idle, or run `everystep consolidate {folder} --final` then"
        self(Event("watching", text, {"folder": folder, "pid": os.getpid(), "settings": to_document(options)}))


def _ended(pid: int) -> Callable[[], bool]:
    """Whether the process with this id has ended; another that gets the id later does not count."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return lambda: True

    def ended() -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return ended


@contextlib.contextmanager
def _signals() -> Iterator[tuple[int, list[int]]]:
    """SIGTERM and SIGINT are remembered and wake whoever waits for the file descriptor, instead of ending the process in the middle."""
    received: list[int] = []
    reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def remember(number: int, _: object) -> None:
        received.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(writes, b"!")

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield reads, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reads)
        os.close(writes)
