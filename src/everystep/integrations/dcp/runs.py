"""The run behind a writer or a reader, which step is meant, and reading a checkpoint of it through its checkpointer."""

# ruff: noqa: SLF001 (`through` is to become a method of Checkpointer)

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from everystep.errors import ConfigError, NotFoundError
from everystep.policy import Keep
from everystep.trainer.arguments import as_url, checked_step, outside_inference
from everystep.trainer.checkpointer import Checkpointer
from everystep.trainer.finding import restore as restore_newest
from everystep.trainer.restoring import RestoreReport, TensorReader

_log = logging.getLogger("everystep")
_Result = TypeVar("_Result")

_runs: dict[str, Checkpointer] = {}
_runs_lock = threading.Lock()


class Run:
    """The run that a writer or reader belongs to. One made from a path shares its checkpointer with all others of that path."""

    def __init__(self, given: str | os.PathLike[str] | Checkpointer, options: Mapping[str, Any]) -> None:
        self.given = given if isinstance(given, Checkpointer) else as_url(given)
        self.options = dict(options)
        self.resumed: Any = None
        if isinstance(given, Checkpointer) and options:
            raise ConfigError(f"options {sorted(options)} are for a checkpointer that is made from a path", kind="option",
                              hint="set them where the Checkpointer is made")  # fmt: skip

    def checkpointer(self) -> Checkpointer:
        """The run's checkpointer, made when there is none."""
        if isinstance(self.given, Checkpointer):
            return self.given
        with _runs_lock:
            found = _runs.get(self.given)
            if found is None or found._closed or found._pid != os.getpid():
                # DCP never deletes a checkpoint, and keeps one copy of what is equal on all ranks.
                found = _runs[self.given] = Checkpointer(self.given, **{"keep": Keep(last=None), "replicated": ("*",), **self.options})
                if self.resumed is not None:
                    found._run.looked(self.resumed)
            return found

    def close(self) -> None:
        """Close the checkpointer that was made from a path: everything is durable then."""
        if isinstance(self.given, Checkpointer):
            return
        with _runs_lock:
            found = _runs.pop(self.given, None)
        if found is not None:
            found.close()

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.given, Checkpointer):
            raise ConfigError(
                f"a Writer that was made from a Checkpointer cannot go to another process (run {self.given.path!r})", kind="process",
                hint="make it from the run's path for async_save in a process of its own",
            )  # fmt: skip
        with _runs_lock:
            here = _runs.get(self.given)
        resumed = here.restored_from.key if here is not None and here.restored_from is not None else self.resumed
        return {"given": self.given, "options": self.options, "resumed": resumed}


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step in a checkpoint's id: the last number in its last part (``"ckpt/step-100"``).

    Raises:
        ConfigError: There is no number in it.
    """
    last = os.fspath(checkpoint_id).rstrip("/").rsplit("/", 1)[-1]
    numbers = re.findall(r"\d+", last)
    if not numbers:
        raise ConfigError(f"checkpoint_id {os.fspath(checkpoint_id)!r} does not tell the step", kind="step",
                          hint="end it with the step, as in 'step-100', or pass step=... to the Writer or Reader")  # fmt: skip
    return checked_step(int(numbers[-1]))


def through(checkpointer: Checkpointer, apply: Callable[[TensorReader], _Result], *, step: int | None, continues: bool) -> _Result:
    """Read the newest checkpoint that verifies, or that of ``step``, as ``Checkpointer.restore`` does.

    ``continues``: what is saved next comes after what was read, as after a restore.

    Raises:
        NotFoundError: There is none, or not this step.
    """
    taken: list[_Result] = []

    def applied(reader: Any) -> RestoreReport:
        taken[:] = [apply(reader)]
        return RestoreReport((), (), ())

    with checkpointer._lock, outside_inference():
        checkpointer._usable()
        checkpointer._stager.fence()
        checkpointer._stager.idle()
        run = checkpointer._run
        if run.attempt is not None:
            if continues:
                checkpointer._finish_timeline()
            else:
                checkpointer._drain(None)
        run.world.begin()
        repository = run.found(create=False)
        if repository is None:
            run.looked(None)
            raise NotFoundError(f"no run at {checkpointer.path!r}", kind="no-run", hint="check the path with: everystep ls RUN")
        found = restore_newest(run.world, run.reach(repository), step=step, apply=applied, notice=_log.warning)
        if found is None:
            run.looked(None)
            raise NotFoundError(f"run {checkpointer.path!r} has no checkpoint yet", kind="no-checkpoint", hint="see everystep ls RUN")
        checkpointer.restored_from = found[0]
        if run.attempt is None:
            run.looked(found[0].key)
    return taken[0]
