"""The run as one trainer sees it: its repository, its agent, its attempt."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from everystep.agent import messages
from everystep.agent.client import AgentClient
from everystep.errors import AgentError, ConflictError, NotFoundError
from everystep.plan import SavePlan
from everystep.policy import Cadence, Keep
from everystep.repository import CheckpointKey, Repository
from everystep.trainer.finding import Restorable, restorable


class Connection:
    """Finds or starts the agent, claims the attempt at the first save, and starts a new agent when the old one is gone. Not thread-safe."""

    def __init__(
        self,
        path: str,
        *,
        cadence: Cadence,
        keep: Keep,
        memory_budget: int | None,
        idle_s: float,
        in_process: bool,
        fresh: bool,
        on_event: Callable[[messages.Event], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.path = path
        self.attempt: int | None = None
        self.conflict: ConflictError | None = None
        self.client: AgentClient | None = None
        self.generation = 0
        """Changes with every new agent: slabs of the one before are gone."""
        self._cadence = cadence
        self._keep = keep
        self._memory_budget = memory_budget
        self._idle_s = idle_s
        self._in_process = in_process
        self._on_event = on_event
        self._on_lost = on_lost
        self._repository: Repository | None = None
        self._parent: CheckpointKey | None = None
        self._looked = fresh
        self._prepared: set[str] = set()

    def opened(self, *, create: bool) -> Repository | None:
        """The run, or None when there is none yet (and not ``create``)."""
        if self._repository is None:
            try:
                self._repository = Repository.open(self.path, create=create)
            except NotFoundError:
                return None
        return self._repository

    def reading(self, repository: Repository) -> AgentClient | None:
        """The run's agent on this node if one is there; none is started."""
        if self.client is not None and self.client.alive:
            return self.client
        try:
            self.client = self._connect(repository, spawn=False, in_process=False)
        except (NotFoundError, AgentError):
            return None
        return self.client

    def restorable(self) -> list[Restorable]:
        """What can be restored now, newest first."""
        repository = self.opened(create=False)
        return [] if repository is None else restorable(repository, self.reading(repository))

    def looked(self, restored: CheckpointKey | None) -> None:
        """The trainer has asked for what there is, and continues from ``restored``."""
        self._looked = True
        self._parent = restored or self._parent

    def writing(self) -> tuple[AgentClient, int]:
        """A live agent that knows this attempt.

        Raises:
            ConflictError: Another live trainer, a newer attempt, or checkpoints that nobody restored.
        """
        repository = self.opened(create=True)
        if repository is None:
            raise NotFoundError(f"run {self.path!r} could not be made", key=self.path, kind="no-run")
        client = self.client
        if client is None or not client.alive:
            self.client = client = self._connect(repository, spawn=not self._in_process, in_process=self._in_process)
            if self.attempt is not None:
                self._configure(client, self.attempt)
        if self.attempt is None:
            self._refuse_unseen(repository, client)
            above = max((summary.attempt for summary in client.snapshots()), default=0)
            # The agent is asked first: claiming an attempt while another trainer lives would stop that one.
            expected = max(repository.newest_attempt(), above) + 1
            self._configure(client, expected)
            started = repository.start_attempt(parent=self._parent, now=time.time(), versions=_versions(), above=above)
            if started.attempt != expected:
                self._configure(client, started.attempt)
            self.attempt = started.attempt
        return client, self.attempt

    def prepare(self, client: AgentClient, plan: SavePlan) -> None:
        """Announce a plan once to each agent."""
        if plan.id not in self._prepared:
            client.prepare(plan)
            self._prepared.add(plan.id)

    def forget(self, plan: SavePlan) -> None:
        """The plan is no longer remembered here: it will be announced again before it is used."""
        self._prepared.discard(plan.id)

    def new_timeline(self) -> None:
        """The next save starts a new attempt."""
        self.attempt = None

    def close(self) -> None:
        """Say goodbye to the agent."""
        if self.client is not None:
            self.client.close()

    def abandon(self) -> None:
        """Go without a goodbye."""
        if self.client is not None:
            self.client.close(bye=False)

    def _connect(self, repository: Repository, *, spawn: bool, in_process: bool) -> AgentClient:
        client = AgentClient.connect(
            run_url=self.path,
            run_id=repository.run_id,
            spawn=spawn,
            in_process=in_process,
            idle_s=self._idle_s,
            on_event=self._on_event,
            on_lost=self._on_lost,
        )
        self.generation += 1
        self._prepared.clear()
        return client

    def _configure(self, client: AgentClient, attempt: int) -> None:
        try:
            client.configure(attempt=attempt, cadence=self._cadence, keep=self._keep, memory_budget=self._memory_budget)
        except ConflictError as error:
            self.conflict = error
            raise

    def _refuse_unseen(self, repository: Repository, client: AgentClient) -> None:
        if self._looked:
            return
        candidates = restorable(repository, client)
        if candidates:
            message = f"run {self.path!r} has checkpoints up to step {candidates[0].key.step} that this trainer has not restored"
            raise ConflictError(message, kind="not-restored", hint="call restore(state) first, or pass fresh=True to start from scratch")


def _versions() -> dict[str, str]:
    from everystep import __version__

    return {"everystep": __version__, "torch": str(torch.__version__)}
