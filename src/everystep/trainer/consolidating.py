"""The trainer's side of consolidation: the settings, what an agent is told of them, and the end of the run.

Nothing here is waited for in training, and nothing is exchanged between ranks: the first node's agent does the work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from everystep.agent.client import AgentClient
from everystep.errors import AgentError, CheckpointError, ConfigError, NotFoundError
from everystep.schedule import Consolidate, binds, from_document, to_document
from everystep.trainer.assets import config_files, folder_name, write_assets
from everystep.trainer.connection import Connection, apart
from everystep.trainer.pending import PendingExport
from everystep.trainer.preemption import Watch

_log = logging.getLogger("everystep")
_SLICE_S = 2.0
"""A signal that comes while the end waits has it wait no longer than this."""
_PAUSE_S = 0.5
_OVER = "exports are over"


def settings_of(given: Consolidate | Mapping[str, Any] | str | bool | None) -> Consolidate | None:
    """What the user gave, with absolute paths: the agent works in another folder. ConfigError says what would be right."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        given = from_document(given)
    elif isinstance(given, (str, bool)):
        given = Consolidate(when=given)
    elif not isinstance(given, Consolidate):
        raise ConfigError(f"consolidate is {given!r:.80}, a {type(given).__name__}", key="consolidate", kind="option",
                          hint='pass everystep.Consolidate(...), a mapping with the same words, or "final"')  # fmt: skip
    into = given.into if given.into in ("latest", "checkpoint") or "://" in given.into else _absolute(given.into)
    return dataclasses.replace(given, into=into, assets=None if given.assets is None else _absolute(given.assets))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


class Exporting:
    """Not thread-safe: the checkpointer's lock is held.

    Args:
        options: None: only what is asked for.
        run: The checkpointer's.
        watch: The checkpointer's. Once a signal has said that the process is to end, an agent that outlives it goes on alone.
        outlives: Whether the agent is a process of its own.
    """

    def __init__(self, options: Consolidate | None, run: Connection, watch: Watch, *, outlives: bool) -> None:
        self.options = options
        self._watch = watch
        self._run = run
        self._outlives = outlives
        self._pending: list[PendingExport] = []
        self._files: dict[str, bytes] = {}
        self._folder: Path | None = None
        self._tell(options)

    def _tell(self, options: Consolidate | None) -> None:
        self._run.consolidate = b"" if options is None else msgspec.json.encode(to_document(options))

    def binds(self, step: int) -> bool:
        """Whether this step is to be consolidated for its number, and so has to reach the disk."""
        return self.options is not None and binds(self.options.when, step)

    # -- configuration of a transformers model -------------------------------------------------------------------------------------
    def describe(self, state: Mapping[str, Any]) -> None:
        """Before the first save: what goes with the model, where nobody has named a folder."""
        options = self.options
        if options is None or options.assets is not None or self._folder is not None or "://" in self._run.path:
            return
        try:
            self._files = config_files(state, options.group)
        except (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            # another version of transformers than those we know: the save does not fail for that
            _log.warning("the model's configuration cannot be written beside its exports: %s", error)
        if self._files:
            self._folder = Path(self._run.path, "exports", folder_name(self._files))
            self._tell(dataclasses.replace(options, assets=str(self._folder)))

    def write(self) -> None:
        """The run is there: write what ``describe`` found."""
        if self._folder is None or not self._files or self._run.met().node or not self._run.met().is_first:
            return
        files, self._files = self._files, {}
        try:
            write_assets(self._folder, files)
        except OSError as error:
            _log.warning("the model's configuration cannot be written to %s: %s", self._folder, error)

    # -- asking --------------------------------------------------------------------------------------------------------------------
    def ask(self, step: int | str, last_step: int | None) -> PendingExport:
        """Have one consolidated."""
        what = step if isinstance(step, str) else str(step)
        client, attempt = self._run.client, self._run.attempt
        if client is None:
            raise NotFoundError(f"nothing of {self._run.path!r} was saved or restored by this checkpointer yet", kind="no-save",
                                hint="call consolidate after save, or use: everystep consolidate RUN")  # fmt: skip
        agreed, where = self._run.agreed, self._run.met()
        if agreed is not None and where.nodes > 1 and not agreed.shared:
            raise apart(self._run.path)
        if where.node:
            return PendingExport(what, None)
        ticket = client.consolidate(what, step=-1 if last_step is None else last_step, attempt=attempt or 0, settings=self._run.consolidate)
        pending = PendingExport(what, lambda timeout_s: client.export(ticket, timeout_s=timeout_s))
        self._pending = [*(one for one in self._pending if not one.done()), pending]
        return pending

    # -- ending --------------------------------------------------------------------------------------------------------------------
    def end(self, because: str, timeout_s: float | None) -> None:
        """Tell the agent why this trainer ends, and wait for what is due if that is wanted. Raises nothing: what failed is in the log."""
        if self.options is None and not self._pending:
            return
        waits = because == "done" and (self.options is None or self.options.wait or not self._outlives)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            where = self._run.known
            if where is None:
                return  # this job has neither saved nor looked, and its other ranks may be anywhere
            if where.node == 0:
                self._wait_here(because, until, waits=waits)
            elif waits:
                self._wait_elsewhere(until)
        except CheckpointError as error:
            _log.warning("what is to be consolidated at the end: %s; everystep consolidate RUN --final does it", error)

    def _wait_here(self, because: str, until: float | None, *, waits: bool) -> None:
        client = self._agent(spawn=because == "done")
        while client is not None:
            left_s = _SLICE_S if until is None else min(_SLICE_S, max(0.0, until - time.monotonic()))
            began = time.monotonic()
            found = client.ending(because, timeout_s=left_s if waits else 0.0, settings=self._run.consolidate)
            over = found.complete or time.monotonic() - began < left_s or (until is not None and time.monotonic() >= until)
            if over or not waits or (self._outlives and self._watch.ending):
                if waits and not found.complete:
                    _log.warning("not waited for: %s", found.error)
                break
        for pending in self._pending:
            pending._look(0.0)  # noqa: SLF001 - its answer has to be here before the connection is closed

    def over(self) -> None:
        """Whatever came of it, ranks of other nodes do not wait for this one any more. Raises nothing."""
        where = self._run.known if self.options is not None else None
        if where is None or where.nodes == 1 or self._run.world.rank or not dist.is_initialized():
            return
        with contextlib.suppress(CheckpointError):
            self._run.world.put(_OVER, b"1")

    def _agent(self, *, spawn: bool) -> AgentClient | None:
        """The agent; started where the trainer has found everything done and saved nothing."""
        if self._run.client is not None or not spawn:
            return self._run.client
        repository = self._run.opened(create=False)
        return None if repository is None else self._run.reading(repository, spawn=True)

    def _wait_elsewhere(self, until: float | None) -> None:
        """The ranks end together: who goes ahead would wait for the others at the job's next collective, which has a time-out."""
        world = self._run.world
        while dist.is_initialized() and (until is None or time.monotonic() < until) and not (self._outlives and self._watch.ending):
            try:
                if world.look(_OVER) is not None:
                    return
            except AgentError:
                return  # rank 0 has gone, and with it whom to wait for
            time.sleep(_PAUSE_S)
