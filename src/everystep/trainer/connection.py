"""The run as one trainer sees it: its repository, its agent, its attempt, and what the ranks agreed on about them."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from everystep.agent import messages
from everystep.agent.client import AgentClient
from everystep.errors import AgentError, CheckpointError, ConfigError, ConflictError, NotFoundError
from everystep.layout import RankLayout, SlabCopy, plan_world
from everystep.plan import SavePlan
from everystep.policy import Cadence, Keep
from everystep.repository import CheckpointKey, Repository
from everystep.trainer.finding import Choice, Reach, View, choose, lacking_error, view
from everystep.trainer.topology import ALONE, Place, Topology, are_hidden, host_towards, own_place, topology
from everystep.trainer.world import Group, World

_SEES_TRIES, _SEES_PAUSE_S = 4, 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks agreed on at the start of an attempt."""

    attempt: int
    job: str
    shared: bool
    """Whether all nodes see one store."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How agents are to treat this run."""

    cadence: Cadence
    keep: Keep
    memory_budget: int | None
    idle_s: float
    replicas: int
    replica_nbytes_s: int | None
    domain: str | None


class Connection:
    """Finds or starts the agent, claims the attempt at the first save, and starts a new agent when the old one is gone. Not thread-safe.

    With many ranks ``found``, ``writing`` (while there is no attempt) and ``planned`` are calls that all ranks make together.
    """

    def __init__(
        self,
        path: str,
        *,
        options: Options,
        group: Group,
        in_process: bool,
        fresh: bool,
        on_event: Callable[[messages.Event], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.path = path
        self.agreed: Agreed | None = None
        self.conflict: ConflictError | None = None
        self.client: AgentClient | None = None
        self.generation = 0
        """Changes with every new agent: slabs of the one before are gone."""
        self.consolidate = b""
        """What agents are told to consolidate: JSON of ``schedule.to_document``."""
        self._options = options
        self._group = group
        self._in_process = in_process
        self._on_event = on_event
        self._on_lost = on_lost
        self._repository: Repository | None = None
        self._parent: CheckpointKey | None = None
        self._looked = fresh
        self._prepared: set[str] = set()
        self._world: World | None = None
        self._topology: Topology | None = None
        self._token = b""
        self._port = 0
        self.addresses: tuple[messages.PeerAddress, ...] = ()
        """Where the nodes' agents are reached, by node; empty with one node, and before anybody asked."""

    @property
    def attempt(self) -> int | None:
        """The attempt that saves go into, once it is claimed."""
        return None if self.agreed is None else self.agreed.attempt

    @property
    def world(self) -> World:
        """All ranks; found when it is first needed, because the process group may be made after the checkpointer."""
        if self._world is None:
            self._world = World.of(self._group)
        return self._world

    @property
    def known(self) -> Topology | None:
        """The same without waiting for anybody: None where the ranks have not met, or there is no process group any more."""
        if self._topology is None:
            with contextlib.suppress(CheckpointError, RuntimeError, ValueError):
                return self.met() if self.world.size == 1 else None
        return self._topology

    def met(self) -> Topology:
        """Who is on which node (all ranks together, once)."""
        if self._topology is None:
            world = self.world
            if world.size == 1:
                self._topology = ALONE
                return self._topology
            with world.agreeing():
                mine = dataclasses.asdict(own_place(self._options.domain))
            places = [Place(**told) for told in world.exchange("who is where", mine)]
            if are_hidden(places):
                with world.agreeing():
                    seen = dataclasses.replace(places[world.rank], host=host_towards(places, world.rank))
                places = [Place(**told) for told in world.exchange("who is where, seen from others", dataclasses.asdict(seen))]
            self._token = world.share("token", None if world.rank else secrets.token_bytes(32))
            met = topology(places, world.rank)
            sharing = max(map(met.node_of.count, range(met.nodes)))  # the same on all ranks: all raise, or none
            if self._in_process and sharing > 1:
                raise ConfigError(f"agent=False keeps snapshots in the trainer's process, but {sharing} ranks share a node",
                                  kind="agent", hint="leave agent=True: the ranks of a node share one agent")  # fmt: skip
            self._topology = met
        return self._topology

    # -- the run ---------------------------------------------------------------------------------------------------------------
    def opened(self, *, create: bool, run_id: str | None = None) -> Repository | None:
        """The run as this rank sees it, or None when there is none yet (and not ``create``)."""
        if self._repository is None:
            try:
                self._repository = Repository.open(self.path, create=create, run_id=run_id)
            except NotFoundError:
                return None
        return self._repository

    def found(self, *, create: bool) -> Repository | None:
        """The same for all ranks together: one run, with one id, wherever a node keeps it."""
        self.met()
        world = self.world
        if world.size == 1:
            return self.opened(create=create)
        with world.agreeing():
            repository = self.opened(create=False)
            mine = repository.run_id if repository else ""
        ids = {told: rank for rank, told in reversed(list(enumerate(world.exchange("run", mine)))) if told}
        if len(ids) > 1:
            sides = " and ".join(f"rank {rank} sees run {told!r}" for told, rank in sorted(ids.items(), key=lambda pair: pair[1])[:2])
            raise ConflictError(f"the ranks do not see one run at {self.path!r}: {sides}", key=self.path, kind="other-run",
                                hint="name a path that is one store on all nodes, or empty on all of them")  # fmt: skip
        if not ids and not create:
            return None
        run_id = next(iter(ids), None)
        with world.agreeing():
            if run_id is None and not world.rank:
                made = self.opened(create=True)
                run_id = made.run_id if made else None
        run_id = world.share("run id", run_id)
        with world.agreeing():
            return self.opened(create=True, run_id=run_id)

    def reading(self, repository: Repository, *, spawn: bool = False) -> AgentClient | None:
        """The run's agent on this node if one is there; none is started unless asked for."""
        if spawn:
            return self._connected(repository)
        if self.client is None or not self.client.alive:
            try:
                self.client = self._connect(repository, spawn=False, in_process=False)
            except (NotFoundError, AgentError):
                return None
        return self.client

    def restorable(self) -> list[Choice]:
        """What can be restored now as far as this node sees, newest first."""
        repository = self.opened(create=False)
        return [] if repository is None else choose([view(repository, self.reading(repository))], step=None).choices

    def reach(self, repository: Repository) -> Reach:
        """How this rank gets at what there is to restore (all ranks together)."""
        several = self.met().nodes > 1
        with self.world.agreeing():
            client = self.reading(repository, spawn=several)
        if several and client is not None:
            self.open_peers(client)
        return Reach(repository=repository, client=client, where=self.met(), addresses=self.addresses, token=self._token)

    def looked(self, restored: CheckpointKey | None) -> None:
        """The trainer has asked for what there is, and continues from ``restored``."""
        self._looked = True
        self._parent = restored or self._parent

    # -- saving ----------------------------------------------------------------------------------------------------------------
    def writing(self) -> tuple[AgentClient, int]:
        """A live agent that knows this attempt.

        Raises:
            ConflictError: Another live trainer, a newer attempt, or checkpoints that nobody restored.
        """
        if self.agreed is None:
            self.agreed = self._agree() if self.world.size > 1 else self._claim()
        repository = self._existing()
        client = self.client
        if client is None or not client.alive:
            client = self._connected(repository)
            try:
                self._configure(client, self.agreed)
                self.meet_peers(client)
            except CheckpointError:
                client.close(bye=False)  # half made it would be taken for whole by the next save
                raise
        return client, self.agreed.attempt

    def _claim(self) -> Agreed:
        """One rank takes the next attempt."""
        repository = self._existing(create=True)
        client = self._connected(repository)
        above = max((summary.attempt for summary in client.snapshots()), default=0)
        self._refuse_unseen([view(repository, client)])
        # The agent is asked first: claiming an attempt while another trainer lives would stop that one.
        agreed = Agreed(attempt=max(repository.newest_attempt(), above) + 1, job="", shared=True)
        self._configure(client, agreed)
        started = repository.start_attempt(parent=self._parent, now=time.time(), versions=_versions(), above=above)
        if started.attempt != agreed.attempt:
            agreed = dataclasses.replace(agreed, attempt=started.attempt)
            self._configure(client, agreed)
        return agreed

    def _agree(self) -> Agreed:
        """All ranks take the next attempt together."""
        self.found(create=True)
        world, where = self.world, self.met()
        with world.agreeing():
            repository = self._existing()
            client = self._connected(repository)
            above = max((summary.attempt for summary in client.snapshots()), default=0)
            unseen = None if self._looked or not where.is_first else view(repository, client)
            mine = msgspec.msgpack.encode(
                _Start(max(repository.newest_attempt(), above, self._parent.attempt if self._parent else 0), self._looked, unseen)
            )
        told = [msgspec.msgpack.decode(data, type=_Start) for data in world.exchange("attempt", mine)]
        if len({one.looked for one in told}) > 1:
            without = [rank for rank, one in enumerate(told) if not one.looked]
            raise ConflictError(f"rank {without[0]} saves without having restored, other ranks have", kind="not-restored", rank=without[0],
                                hint="call restore(state) on every rank, or pass fresh=True on every rank")  # fmt: skip
        self._refuse_unseen([one.unseen for one in told if one.unseen is not None])
        number = max(one.newest for one in told) + 1
        provisional = Agreed(attempt=number, job=world.share("job", None if world.rank else secrets.token_hex(8)), shared=True)
        with world.agreeing():
            self._configure(client, provisional)
        world.exchange("agents", None)  # nothing is claimed before every node's agent has said yes
        with world.agreeing():
            if not world.rank:
                self._start(repository, provisional)
        world.share("claim", None)
        with world.agreeing():
            sees = where.node == 0 or self._sees(repository, provisional)
        seen = world.exchange("store", sees)
        agreed = dataclasses.replace(provisional, shared=all(seen))
        if not agreed.shared:
            self._refuse_half_shared(seen)
            if self.consolidate and msgspec.json.decode(self.consolidate)["when"] != "never":
                raise apart(self.path)
            with world.agreeing():
                if where.is_first:  # rank 0's record says now, too, that each node has a store of its own
                    self._start(repository, agreed)
            world.exchange("stores", None)
        with world.agreeing():
            self._configure(client, agreed)
        self.open_peers(client)
        # Whoever failed up to here is heard of by all: none goes on with an attempt that another does not know of.
        world.exchange("agreed", None)
        return agreed

    def _start(self, repository: Repository, agreed: Agreed) -> None:
        where = self.met()
        repository.start_attempt(
            parent=self._parent, world=self.world.size, nodes=where.nodes, versions=_versions(), now=time.time(), number=agreed.attempt,
            job=agreed.job, shared=agreed.shared,
        )  # fmt: skip

    def _sees(self, repository: Repository, agreed: Agreed) -> bool:
        """Whether rank 0's claim is in the store that this rank sees. A network file system may take a moment to show it."""
        for again in range(_SEES_TRIES if len(self.met().hosts) > 1 else 1):
            if again:
                time.sleep(_SEES_PAUSE_S)
            record = repository.attempt_record(agreed.attempt)
            if record is not None and record.job == agreed.job:
                return True
        return False

    def _refuse_half_shared(self, seen: list[bool]) -> None:
        where = self.met()
        others = [rank for rank, node in enumerate(where.node_of) if node and seen[rank]]
        if others:
            without = next(rank for rank, sees in enumerate(seen) if not sees)
            message = f"{self.path!r} is one store for rank 0 and rank {others[0]}, but not for rank {without}"
            raise ConfigError(message, key=self.path, kind="half-shared",
                              hint="name a path that all nodes share, or one that each node has on a disk of its own")  # fmt: skip

    def open_peers(self, client: AgentClient) -> None:
        """Have the nodes' agents reach each other (all ranks together); nothing with one node."""
        world, where = self.world, self.met()
        if where.nodes == 1:
            return
        with world.agreeing():
            host, self._port = client.open_peers(self._token, where.hosts[where.node], self._port)
        told = world.exchange("peers", [host, self._port])
        firsts = [where.node_of.index(node) for node in range(where.nodes)]
        self.addresses = tuple(
            messages.PeerAddress(node=node, host=told[first][0], port=told[first][1], domain=where.domains[node])
            for node, first in enumerate(firsts)
        )
        with world.agreeing():
            client.set_peers(self.addresses, self.met().node)
        world.exchange("ready", None)

    def meet_peers(self, client: AgentClient) -> None:
        """A new agent takes the place of one that died: at the same address, so that nobody has to be told."""
        if self.addresses:
            client.open_peers(self._token, self.met().hosts[self.met().node], self._port)
            client.set_peers(self.addresses, self.met().node)

    # -- plans -----------------------------------------------------------------------------------------------------------------
    def planned(self, layout: RankLayout) -> tuple[SavePlan, tuple[SlabCopy, ...]]:
        """The node's plan and this rank's copies, from every rank's layout (all ranks together)."""
        world, pack = self.world, msgspec.msgpack.encode
        layouts = world.gather("layout", pack(layout))
        with world.agreeing():
            plans = None
            if layouts is not None:
                by_node = plan_world([msgspec.msgpack.decode(told, type=RankLayout) for told in layouts])
                packed = [pack(node.plan) for node in by_node]
                node_of = self.met().node_of
                plans = [[packed[node], pack(by_node[node].copies.get(rank, ()))] for rank, node in enumerate(node_of)]
        plan, copies = world.scatter("plan", plans)
        return msgspec.msgpack.decode(plan, type=SavePlan), msgspec.msgpack.decode(copies, type=tuple[SlabCopy, ...])

    def prepare(self, client: AgentClient, plan: SavePlan) -> None:
        """Announce a plan once to each agent."""
        if plan.id not in self._prepared:
            client.prepare(plan)
            self._prepared.add(plan.id)

    def forget(self, plan: SavePlan) -> None:
        """The plan is no longer remembered here: it will be announced again before it is used."""
        self._prepared.discard(plan.id)

    # -- ending ----------------------------------------------------------------------------------------------------------------
    def new_timeline(self) -> None:
        """The next save starts a new attempt."""
        self.agreed = None

    def failed(self, error: BaseException, *, awaited: bool = False, meets: bool = False) -> None:
        """This rank ends or fails before the ranks have agreed: tell the others, who wait.

        Args:
            error: Why.
            awaited: The others wait although they have agreed: for this rank's part of something else.
            meets: Also when this rank has not met the others yet. Not for one that may just have looked at the run by itself: its next
                checkpointer would then be the others' next but one.
        """
        if self._world is None and not meets:
            return
        try:
            world = self.world
        except (ConfigError, RuntimeError, ValueError):
            return  # no process group any more
        if world.size > 1 and (awaited or self.agreed is None):
            world.fail(error)

    def ended(self, *, meets: bool = False) -> None:
        """This rank ends in order; whoever still waits for it hears of it. Where the process group is gone nobody does."""
        if dist.is_available() and dist.is_initialized():
            self.failed(AgentError("it ended before the ranks had agreed on their first save", kind="ended"), meets=meets)

    def close(self) -> None:
        """Say goodbye to the agent."""
        if self._world is not None:
            self._world.close()
        if self.client is not None:
            self.client.close()

    def abandon(self) -> None:
        """Go without a goodbye."""
        if self._world is not None:
            self._world.close()
        if self.client is not None:
            self.client.close(bye=False)

    # -- inside ----------------------------------------------------------------------------------------------------------------
    def _existing(self, *, create: bool = False) -> Repository:
        repository = self.opened(create=create)
        if repository is None:
            raise NotFoundError(f"run {self.path!r} could not be made", key=self.path, kind="no-run")
        return repository

    def _connected(self, repository: Repository) -> AgentClient:
        if self.client is None or not self.client.alive:
            self.client = self._connect(repository, spawn=not self._in_process, in_process=self._in_process)
        return self.client

    def _connect(self, repository: Repository, *, spawn: bool, in_process: bool) -> AgentClient:
        client = AgentClient.connect(
            run_url=self.path,
            run_id=repository.run_id,
            spawn=spawn,
            in_process=in_process,
            idle_s=self._options.idle_s,
            on_event=self._on_event,
            on_lost=self._on_lost,
        )
        self.generation += 1
        self._prepared.clear()
        return client

    def _configure(self, client: AgentClient, agreed: Agreed) -> None:
        options, where = self._options, self.met()
        try:
            client.configure(
                attempt=agreed.attempt, cadence=options.cadence, keep=options.keep, memory_budget=options.memory_budget, rank=where.rank,
                ranks=where.ranks, world=len(where.node_of), node=where.node, nodes=where.nodes, shared=agreed.shared,
                replicas=options.replicas, replica_nbytes_s=options.replica_nbytes_s, job=agreed.job, consolidate=self.consolidate,
            )  # fmt: skip
        except ConflictError as error:
            self.conflict = error
            raise

    def _refuse_unseen(self, views: list[View]) -> None:
        if self._looked:
            return
        found = choose(views, step=None)
        if found.lacking and not found.choices:
            raise lacking_error(self.path, found.lacking)
        if found.choices:
            message = f"run {self.path!r} has checkpoints up to step {found.choices[0].step} that this trainer has not restored"
            raise ConflictError(message, kind="not-restored", hint="call restore(state) first, or pass fresh=True to start from scratch")


def apart(path: str) -> ConfigError:
    """Each node has a store of its own, and the run is to be consolidated."""
    return ConfigError(f"{path!r} is a store of each node's own: none has all files of a checkpoint, so none can be consolidated there",
                       key=path, kind="consolidate", hint="name a path that all nodes share, or leave consolidate out")  # fmt: skip


class _Start(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says before the ranks take a new attempt."""

    newest: int
    """Attempt."""
    looked: bool
    unseen: View | None


def _versions() -> dict[str, str]:
    from everystep import __version__

    return {"everystep": __version__, "torch": str(torch.__version__)}
