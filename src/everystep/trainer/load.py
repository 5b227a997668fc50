"""Read a checkpoint without a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from everystep.agent.client import AgentClient
from everystep.errors import AgentError, LayoutError, NotFoundError
from everystep.repository import Repository
from everystep.trainer.arguments import as_url, outside_inference
from everystep.trainer.finding import Reach, restore, was_reduced
from everystep.trainer.state import RestoreReport, load_state
from everystep.trainer.topology import ALONE
from everystep.trainer.world import World

_log = logging.getLogger("everystep")


def load(path: str | os.PathLike[str], *, step: int | None = None, include: Sequence[str] | None = None) -> dict[str, Any]:
    """A checkpoint's tensors and plain values without a model: nested dicts, modules as ``{name: tensor}``.

    Args:
        path: The run's folder or URL.
        step: Which checkpoint; None: the newest that verifies, in memory or on disk.
        include: Patterns of full names to take (``"model.*"``).

    Raises:
        NotFoundError: No run, no checkpoint, or not this step.
        CorruptionError: None of the checkpoints verifies.
        LayoutError: ``include`` matches nothing.
    """
    repository = Repository.open(as_url(path))
    client: AgentClient | None = None
    try:
        client = AgentClient.connect(run_url=repository.store.url, run_id=repository.run_id, role="visitor", spawn=False)
    except (NotFoundError, AgentError):
        client = None  # no agent holds anything of this run here: the disk has it all
    try:
        taken: dict[str, Any] = {}

        def apply(reader: Any) -> RestoreReport:
            taken.update(load_state(reader, include=include))
            return RestoreReport(restored=(), missing=(), unexpected=())

        with outside_inference():
            reach = Reach(repository=repository, client=client, where=ALONE, addresses=(), token=b"")
            found = restore(World.alone(), reach, step=step, apply=apply, notice=_log.warning, include=include)
        if found is not None and include is not None and not taken:
            key = found[0].key
            message = f"include {list(include)!r} matches nothing in step {key.step} of run {repository.store.url!r}"
            message += f"; {was_reduced(repository.dropped(key))}" if key.reduced else ""
            raise LayoutError(message, kind="include", hint="patterns are matched with full names, such as 'model.*'")
        if found is None:
            message = f"run {repository.store.url!r} has no checkpoint yet"
            raise NotFoundError(message, kind="no-checkpoint", hint="see everystep ls RUN")
        return taken
    finally:
        if client is not None:
            client.close()
