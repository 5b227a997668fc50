"""The agent's shell around ``protocol``: connections, slabs, and the threads that persist, hash and keep time.

Every event goes through ``feed`` under one lock, which carries out the actions in order; none of them waits for a disk or a peer: messages
go into the connection's outbox, persists to the persisting thread, small things on the store to the chores thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

from everystep import __version__, protocol
from everystep.agent import messages
from everystep.agent.committing import Others, Persister
from everystep.agent.exporting import Exporter
from everystep.agent.memory import Room, SlabMemory, memory_room
from everystep.agent.persist import Snapshot, Team, check_plan
from everystep.agent.snapshots import Sharing
from everystep.agent.stats import AgentStats
from everystep.agent.tickets import read_settings
from everystep.agent.wire import HELLO_NBYTES, Anything, Channel
from everystep.errors import AgentError, CheckpointError, ConflictError
from everystep.manifest import Part
from everystep.plan import SavePlan
from everystep.policy import Keep
from everystep.repository import CheckpointKey, Repository

_log = logging.getLogger(__name__)

RENEW_S = 30.0
ALIVE_TTL_S = 120.0
SIGNAL_GRACE_S = 120.0
LINGER_S = 30.0
"""An agent that is to end stays so long for other nodes that still need its part of what was saved last."""
_HELLO_TIMEOUT_S = 10.0
_TIMER_PAUSE_S = 1.0
_PLANS, _PLANS_NBYTES = 64, 64 << 20
"""Plans remembered, the ones in use apart: how many, and their bytes in memory."""
_FROZEN = (messages.ListSnapshots, messages.TakeSnapshot, messages.ReleaseSnapshot, messages.Drain, messages.Stop, messages.Bye)


class _Connection:
    """One peer. What is sent goes through a thread of its own: a peer that does not read stops nobody else."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        self.welcomed = False
        self.protocol = messages.PROTOCOL
        self.sent_slabs: set[int] = set()
        self._outbox: queue.SimpleQueue[tuple[messages.Message, int | None] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"everystep-send-{number}", daemon=True)
        self._writer.start()

    def send(self, message: messages.Message, fd: int | None = None) -> None:
        """Queue a message; takes over ``fd``."""
        self._outbox.put((message, fd))

    def _write(self) -> None:
        broken = False
        while (item := self._outbox.get()) is not None:
            message, fd = item
            try:
                if not broken:
                    self.channel.send(message, fd)
            except OSError as error:
                broken = True  # the reading thread sees the end too and tells the protocol
                _log.debug("connection %d: %s", self.number, error)
            finally:
                if fd is not None:
                    os.close(fd)

    def close(self) -> None:
        """Send what is queued, then end the connection."""
        self._outbox.put(None)
        if threading.current_thread() is not self._writer:
            self._writer.join(timeout=2.0)
        self.channel.shut()


class AgentServer:
    """One run's agent, in a process of its own or (``adopt``) inside the trainer.

    Args:
        repository: Where to persist.
        run_url: As the trainer named it, absolute.
        run_id: Who asks for another one is refused.
        idle_s: Ends by itself after this time without a trainer; infinite: never.
        own_idle_s: Whether ``idle_s`` stands whatever a trainer asks for.
        room: Measures the memory there is for more slabs.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        run_url: str,
        run_id: str,
        idle_s: float,
        own_idle_s: bool = False,
        room: Callable[[], Room] = memory_room,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repository = repository
        self.run_url = run_url
        self.run_id = run_id
        self.stats = AgentStats()
        self.end_reason = ""
        self._idle_s = idle_s if own_idle_s else None
        self._room = room
        self._clock = clock
        self.lock = threading.RLock()
        self.state = protocol.AgentState(idle_s=idle_s, idle_since=clock())
        self._connections: dict[int, _Connection] = {}
        self._next_connection = 1
        self._plans: dict[str, SavePlan] = {}
        self.memory: dict[int, SlabMemory] = {}
        self._errors: dict[int, messages.Failed] = {}
        self._timings: dict[int, dict[str, float]] = {}
        self._keep = Keep()
        self._team = Team()
        self._sharing = Sharing(self)
        self._on_end: list[Callable[[], None]] = []
        self._ended = threading.Event()
        self._closed = threading.Event()
        self._ticks = threading.Condition()
        self._ticking = 0
        self._prefaults: queue.SimpleQueue[SlabMemory | None] = queue.SimpleQueue()
        # A reader's hashing and a slow store must not keep the attempt's lease from being renewed: a thread each.
        self.chores = ThreadPoolExecutor(1, thread_name_prefix="everystep-chores")
        self.hashes = ThreadPoolExecutor(1, thread_name_prefix="everystep-readers")
        self._renewals = ThreadPoolExecutor(1, thread_name_prefix="everystep-renew")
        self._renewal: Future[None] | None = None
        self._renew_at = clock() + RENEW_S
        self._recorded = 0
        self._persister = Persister(repository, self.stats, self, self._others)
        self.exports = Exporter(self)
        for name, target in (("prefault", self._run_prefaults), ("timer", self._run_timer)):
            threading.Thread(target=target, name=f"everystep-{name}", daemon=True).start()

    # -- life ------------------------------------------------------------------------------------------------------------------
    def adopt(self, channel: Channel) -> threading.Thread:
        """Serve a connection, in a thread of its own, which is returned."""
        with self.lock:
            number = self._next_connection
            self._next_connection += 1
            connection = _Connection(number, channel)
            self._connections[number] = connection
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"everystep-serve-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads
            with self.lock:
                del self._connections[number]
            connection.close()
            raise
        return thread

    def signal(self) -> None:
        """SIGTERM or SIGINT came: drain, then end."""
        self.feed(protocol.Signalled(grace_s=SIGNAL_GRACE_S))

    def consolidate_now(self) -> None:
        """SIGUSR2 came: consolidate the newest checkpoint."""
        try:
            self.exports.ask("latest")
        except CheckpointError as error:
            _log.warning("%s", error)

    @property
    def team(self) -> Team:
        """Who saves together, as the trainer said last."""
        return self._team

    def on_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once, from any thread, when the agent is to end (``close`` comes after it)."""
        with self.lock:
            self._on_end.append(call)
            ended = self._ended.is_set()
        if ended:
            call()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait for the end of ``close``; False when it took longer."""
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        """End the threads and give the memory back. A persist that runs is waited for unless the end was forced."""
        with self.lock:
            forced = self.state.persisting() is not None
        self.exports.close()
        self._persister.close(wait=not forced)
        self._sharing.close(None if forced else self._persister.last, linger_s=LINGER_S)
        with self._ticks:
            self._ticks.notify_all()
        self._prefaults.put(None)
        self._record_stats()
        for pool in (self.chores, self.hashes, self._renewals):
            pool.shutdown(wait=not forced, cancel_futures=True)
        with self.lock:
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.close()
        with self.lock:
            memory, self.memory = list(self.memory.values()), {}
        for slab in memory:
            slab.close()
        self._closed.set()

    # -- connections ---------------------------------------------------------------------------------------------------------------
    def _serve(self, connection: _Connection) -> None:
        channel = connection.channel
        request = 0
        try:
            _, uid = channel.peer()
            if uid != os.geteuid():
                raise AgentError(f"user {uid} may not talk to an agent of user {os.geteuid()}", kind="other-user")
            channel.timeout(_HELLO_TIMEOUT_S)
            first = channel.receive(limit=HELLO_NBYTES)
            if first is not None:
                request = first[0].id
                self._greet(connection, first[0], first[1])
                channel.timeout(None)
                request = 0
            while first is not None and (received := channel.receive()) is not None:
                message, fd = received
                if fd is not None:
                    os.close(fd)  # nobody has a reason to send us one
                self._answer(connection, message)
        except (OSError, CheckpointError) as error:
            _log.info("connection %d ends: %s", connection.number, error)
            if isinstance(error, CheckpointError):
                connection.send(messages.failure(error, request))
        except Exception as error:  # the agent's top: one connection's fault must not end the others, nor leave its leases behind
            _log.exception("connection %d failed", connection.number)
            connection.send(messages.failure(error, request))
        finally:
            if connection.welcomed:
                with self.lock:
                    peer = self.state.peers.get(connection.number)
                self.feed(protocol.ConnectionClosed(conn=connection.number))
                if peer is not None and peer.role == "trainer":
                    self.exports.left(connection.number, bye=peer.bye, attempt=peer.attempt)
            self._sharing.end_copy(connection.number)
            with self.lock:
                self._connections.pop(connection.number, None)
            connection.close()
            channel.close()

    def _greet(self, connection: _Connection, message: Anything, fd: int | None) -> None:
        if fd is not None:
            os.close(fd)
        if not isinstance(message, messages.Hello) or message.protocol < 1 or message.role not in ("trainer", "visitor"):
            raise AgentError("the first message is not a hello that this agent understands", kind="protocol")
        # A probe (agent ls) does not know the run's id yet.
        if message.run_id != self.run_id and not (message.role == "visitor" and not message.run_id):
            raise AgentError(f"this agent serves run {self.run_id!r}, not {message.run_id!r}", kind="other-run")
        connection.protocol = message.protocol
        self.feed(protocol.Connected(conn=connection.number, request=message.id, role=message.role, pid=message.pid))

    def _answer(self, connection: _Connection, message: Anything) -> None:
        """Turn a message into an event, or answer it here where no decision is needed."""
        try:
            if connection.protocol != messages.PROTOCOL and not isinstance(message, _FROZEN):
                raise AgentError(
                    f"this agent speaks version {messages.PROTOCOL} of the protocol, the trainer {connection.protocol}", kind="protocol",
                    hint="everystep agent stop, then start the trainer again",
                )  # fmt: skip
            answer = self._answers.get(type(message))
            if answer is None:
                raise AgentError(f"{type(message).__name__} is not a request", kind="protocol")
            answer(self, connection, message)
        except CheckpointError as error:
            connection.send(messages.failure(error, message.id))

    def _configure(self, connection: _Connection, message: messages.Configure) -> None:
        team = _team(message)
        read_settings(message.consolidate)
        newest = self.repository.newest_attempt()
        keep = Keep(last=message.keep_last, best=message.keep_best, metric=message.keep_metric, mode=message.keep_mode,
                    every=message.keep_every)  # fmt: skip
        with self.lock:
            self.feed(protocol.Configured(
                conn=connection.number, request=message.id, attempt=message.attempt, newest_attempt=newest,
                persist_when_idle=message.cadence_disk is None, budget=message.memory_budget,
                idle_s=message.idle_s if self._idle_s is None else self._idle_s, job=message.job, rank=message.rank, ranks=message.ranks,
                nodes=message.nodes, max_slabs=protocol.MAX_SLABS
                + (protocol.KEPT_SLABS if message.replicas > 0 and message.nodes > 1 else 0),
            ))  # fmt: skip
            peer = self.state.peers.get(connection.number)
            accepted = peer is not None and peer.attempt == message.attempt
            if accepted:
                self._keep, self._team = keep, team
        if accepted and team.nodes > 1:
            self._sharing.nodes.configure(message.attempt, team.node, team.nodes, message.cadence_disk, message.replicas,
                                          message.replica_nbytes_s)  # fmt: skip
        if accepted:
            self.exports.configure(message.consolidate, message.attempt, first=message.rank == team.ranks[0])
            self._renewal = self.aside(self._renewals, self._renew)

    def _prepare(self, connection: _Connection, message: messages.Prepare) -> None:
        check_plan(message.plan)
        with self.lock:
            self._plans.pop(message.plan.id, None)
            self._plans[message.plan.id] = message.plan
            used = {slab.plan_id for slab in self.state.slabs.values()}
            kept_nbytes = 0
            for number, unused in enumerate([plan for plan_id, plan in reversed(self._plans.items()) if plan_id not in used]):
                kept_nbytes += _plan_nbytes(unused)
                if unused.id != message.plan.id and (number >= _PLANS or kept_nbytes > _PLANS_NBYTES):
                    del self._plans[unused.id]
            room = self._free_memory()
            self.feed(protocol.PlanAnnounced(
                conn=connection.number, request=message.id, plan_id=message.plan.id, nbytes=message.plan.nbytes, room=room.nbytes,
                limits=room.limits,
            ))  # fmt: skip

    def _lease(self, connection: _Connection, message: messages.Lease) -> None:
        with self.lock:
            plan = self._plans.get(message.plan_id)
            if plan is None:
                raise AgentError(f"plan {message.plan_id!r} is not known to this agent", step=message.step, kind="unknown-plan")
            free = any(s.state is protocol.SlabState.FREE and s.plan_id == plan.id for s in self.state.slabs.values())
            room = Room(0, "") if free else self._free_memory()
            self.feed(protocol.LeaseAsked(
                conn=connection.number, request=message.id, plan_id=plan.id, nbytes=plan.nbytes, step=message.step, room=room.nbytes,
                limits=room.limits,
            ))  # fmt: skip

    def _seal(self, connection: _Connection, message: messages.Seal) -> None:
        with self.lock:
            plan, memory = self._plans.get(message.plan_id), self.memory.get(message.slab)
            row = self.state.slabs.get(message.slab)
            if plan is None or (row is not None and row.state is protocol.SlabState.FILLING and row.plan_id != plan.id):
                raise AgentError(f"slab {message.slab} was not leased for plan {message.plan_id!r}", step=message.step, kind="protocol")
            snapshot = None if memory is None else self._sealed_so_far(connection, row, plan, message, memory)
            full = len(self.state.slabs) >= self.state.max_slabs
            before = self.state.next_order
            self.feed(protocol.Sealed(
                conn=connection.number, request=message.id, slab=message.slab, step=message.step, attempt=message.attempt,
                bound=message.bound, must=message.must or message.pin, payload=snapshot, room=0 if full else self._free_memory().nbytes,
            ))  # fmt: skip
            sealed = self.state.next_order > before
        if sealed and snapshot is not None:
            self.stats.count("saved")
            self.stats.count("bytes_saved", snapshot.nbytes)
            self.stats.observe(message.timings_s)

    def _sealed_so_far(
        self, connection: _Connection, row: protocol.SlabRow | None, plan: SavePlan, message: messages.Seal, memory: SlabMemory
    ) -> Snapshot:
        peer = self.state.peers.get(connection.number)
        rank = 0 if peer is None else peer.rank
        if row is not None and isinstance(row.payload, Snapshot):
            return row.payload.joined(rank, message)
        return Snapshot(plan, {rank: message}, memory.view, self._team)

    def _list(self, connection: _Connection, message: messages.ListSnapshots) -> None:
        found = (*self._sharing.local_snapshots(), *self._sharing.copies())
        connection.send(messages.Snapshots(id=message.id, snapshots=found))

    def _record_metrics(self, connection: _Connection, message: messages.RecordMetrics) -> None:
        key = CheckpointKey(message.step, message.attempt)
        with self.lock:
            for slab in self.state.slabs.values():
                known = slab.payload
                if isinstance(known, Snapshot) and known.key == key and not known.settled and not slab.superseded:
                    known.late_metrics.update(message.metrics)
                    connection.send(messages.Done(id=message.id))
                    return

        def record() -> None:
            try:
                self.repository.record_metrics(key, message.metrics)
                self.exports.measured(key)
                connection.send(messages.Done(id=message.id))
            except CheckpointError as error:
                connection.send(messages.failure(error, message.id))

        self.aside(self.chores, record)

    def _consolidate(self, connection: _Connection, message: messages.Consolidate) -> None:
        ticket = self.exports.ask(message.what, step=message.step, attempt=message.attempt, settings=message.consolidate)
        connection.send(messages.Consolidating(id=message.id, ticket=ticket))

    def _ask_export(self, connection: _Connection, message: messages.AskExport) -> None:
        self.exports.await_ticket(connection.number, message.id, message.ticket, message.timeout_s)

    def _ending(self, connection: _Connection, message: messages.Ending) -> None:
        self.exports.ending(connection.number, message.id, message.because, message.timeout_s, message.consolidate)

    def _ask_stats(self, connection: _Connection, message: messages.AskStats) -> None:
        connection.send(messages.Stats(id=message.id, json=self.stats.encode()))

    def _give_back(self, connection: _Connection, message: messages.GiveBack) -> None:
        self.feed(protocol.GivenBack(conn=connection.number, request=message.id, slab=message.slab, reason=message.reason))

    def _take(self, connection: _Connection, message: messages.TakeSnapshot) -> None:
        if message.slab < 0:
            self._sharing.give_copy(connection.number, message)
            return
        self.feed(protocol.SnapshotAsked(conn=connection.number, request=message.id, slab=message.slab))

    def _release(self, connection: _Connection, message: messages.ReleaseSnapshot) -> None:
        if message.slab < 0:
            self._sharing.end_copy(connection.number, message.slab)
            connection.send(messages.Done(id=message.id))
            return
        self.feed(protocol.SnapshotReleased(conn=connection.number, request=message.id, slab=message.slab))

    def _open_peers(self, connection: _Connection, message: messages.OpenPeers) -> None:
        host, port = self._sharing.nodes.open(message.token, message.host, message.port)
        connection.send(messages.PeersOpened(id=message.id, host=host, port=port))

    def _set_peers(self, connection: _Connection, message: messages.SetPeers) -> None:
        self._sharing.nodes.set_peers(message.peers, message.node)
        connection.send(messages.Done(id=message.id))

    def _drain(self, connection: _Connection, message: messages.Drain) -> None:
        self.feed(protocol.DrainAsked(conn=connection.number, request=message.id, timeout_s=message.timeout_s, exit=message.exit))

    def _stop(self, connection: _Connection, message: messages.Stop) -> None:
        self.feed(protocol.StopAsked(conn=connection.number, request=message.id, force=message.force))

    def _bye(self, connection: _Connection, message: messages.Bye) -> None:
        self.feed(protocol.ByeSaid(conn=connection.number, request=message.id))

    # -- the protocol -----------------------------------------------------------------------------------------------------------------
    def feed(self, event: protocol.Happened) -> None:
        """Let the protocol decide about an event, and do what it says."""
        failed: Exception | None = None
        with self.lock:
            self.state, actions = protocol.transition(self.state, event, now=self._clock())
            for action in actions:
                try:
                    self._actions[type(action)](self, action)
                except Exception as error:  # the state has changed: an action left out would be missed for ever
                    failed = failed or error
        with self._ticks:
            self._ticking += 1
            self._ticks.notify_all()
        if failed is not None:
            raise failed

    def tell(self, conn: int, message: messages.Message, fd: int | None = None) -> None:
        """Send to a connection if it is still there; takes over ``fd``."""
        connection = self._connections.get(conn)
        if connection is not None:
            connection.send(message, fd)
        elif fd is not None:
            os.close(fd)

    def _do_accept(self, action: protocol.Accept) -> None:
        connection = self._connections.get(action.conn)
        if connection is None or connection.welcomed:
            self.tell(action.conn, messages.Done(id=action.request, note=action.note, ending=action.ending))
            return
        connection.welcomed = True
        others = tuple(peer.pid for conn, peer in self.state.peers.items() if peer.role == "trainer" and conn != action.conn)
        connection.send(messages.Welcome(
            id=action.request, protocol=messages.PROTOCOL, version=__version__, pid=os.getpid(), run_id=self.run_id, run_url=self.run_url,
            trainers=others,
        ))  # fmt: skip

    def _do_fail(self, action: protocol.Fail) -> None:
        failed = messages.Failed(id=action.request, name=action.name, message=action.message, kind=action.kind, hint=action.hint)
        self.tell(action.conn, failed)

    def _do_refuse(self, action: protocol.Refuse) -> None:
        self.stats.count("skipped")
        # Slabs that wait for other nodes stay in use: why those are silent is what the trainer's log needs.
        reason = "; ".join([action.reason, *self._sharing.problems()])
        self.tell(action.conn, messages.NoSlab(id=action.request, kind=action.kind, reason=reason))

    def _do_allocate(self, action: protocol.Allocate) -> None:
        try:
            memory = SlabMemory(action.nbytes)
        except OSError as error:
            _log.warning("a slab of %d bytes cannot be made: %s", action.nbytes, error)
            self.feed(protocol.AllocationFailed(slab=action.slab))
            return
        self.memory[action.slab] = memory
        self._prefaults.put(memory)

    def _do_free(self, action: protocol.FreeSlab) -> None:
        memory = self.memory.pop(action.slab, None)
        if memory is not None:
            memory.close()

    def _do_grant(self, action: protocol.Grant) -> None:
        memory, connection = self.memory.get(action.slab), self._connections.get(action.conn)
        if memory is None or connection is None:
            reason = "the system refused the memory (see the agent's log)"
            self.tell(action.conn, messages.NoSlab(id=action.request, kind="memory", reason=reason))
            return
        if not action.headers_written:
            for file in self._plans[action.plan_id].files:
                memory.view[file.slab_offset : file.slab_offset + len(file.header)] = file.header
        fresh = action.slab not in connection.sent_slabs
        freed = tuple(connection.sent_slabs - set(self.memory))
        connection.sent_slabs = (connection.sent_slabs & set(self.memory)) | {action.slab}
        connection.send(messages.SlabGranted(id=action.request, slab=action.slab, nbytes=memory.nbytes, fresh=fresh, headers_written=True,
                                             freed=freed), os.dup(memory.fd) if fresh else None)  # fmt: skip

    def _do_persist(self, action: protocol.StartPersist) -> None:
        self._persister.start(action.slab, action.payload)

    def _do_notify(self, action: protocol.Notify) -> None:
        if action.what in ("committed", "superseded"):
            self.stats.count(action.what)
        failed = None
        if action.what == "failed":
            failed = self._errors.get(action.slab)
            if action.error:
                failed = messages.Failed(name="AgentError", message=action.error, step=action.step, kind=action.kind)
        event = messages.Event(
            what=action.what, step=action.step, attempt=action.attempt, tier="memory" if action.what == "complete" else "disk",
            nbytes=action.payload.nbytes, timings_s=self._timings.get(action.slab, {}) if action.what == "committed" else {}, failed=failed,
        )  # fmt: skip
        for conn in action.conns:
            self.tell(conn, event)

    def _do_tell_nodes(self, action: protocol.TellNodes) -> None:
        self._sharing.tell_nodes(action)

    def _do_give_snapshot(self, action: protocol.GiveSnapshot) -> None:
        self._sharing.give(action)

    def _do_answer_drain(self, action: protocol.AnswerDrain) -> None:
        self.tell(action.conn, messages.Drained(
            id=action.request, complete=action.complete, newest_durable_step=action.newest_durable_step,
            error="; ".join([action.error, *self._sharing.problems()]) if action.error else "",
        ))  # fmt: skip

    def _do_exit(self, action: protocol.Exit) -> None:
        if action.lost:
            _log.error("%s", action.lost)
        _log.info("the agent ends: %s", action.reason)
        self.end_reason = action.reason
        self._ended.set()
        for call in self._on_end:
            call()

    # -- threads --------------------------------------------------------------------------------------------------------------------------
    def unexpected(self, doing: str, error: BaseException) -> None:
        """Log and count an error that nobody foresaw, at the top of a thread that has to go on."""
        self.stats.count("unexpected_errors")
        _log.error("unexpected error while %s: %s: %s", doing, type(error).__name__, error, exc_info=error)

    # -- what becomes of persists (``committing.Outcome``), in the persisting thread ---------------------------------------------------
    def not_persisted(self, slab: int, snapshot: Snapshot, error: Exception, *, doomed: bool) -> None:
        """Tell the trainer."""
        self.stats.count("failed")
        with self.lock:
            failed = messages.failure(error, 0, step=snapshot.key.step)
            conflict = isinstance(error, ConflictError) and error.kind == "superseded-attempt"
            if conflict:  # it is told to the others of this attempt too
                self._errors.update(dict.fromkeys(self.state.slabs, failed))
            self._errors[slab] = failed
            try:
                self.feed(protocol.PersistFailed(slab=slab, error=str(error), conflict=conflict, doomed=doomed))
            finally:
                self._errors.clear()  # everybody has been told
                _log.error("step %d of attempt %d is not saved to disk: %s", snapshot.key.step, snapshot.key.attempt, error)

    def persisted(self, slab: int, snapshot: Snapshot, timings: dict[str, float]) -> tuple[int, ...]:
        """It is on disk: say so. Returns the connections that sealed it."""
        self.stats.observe(timings)
        self.stats.count("bytes_committed", snapshot.nbytes)
        with self.lock:
            snapshot.settled = True
            late, conns = dict(snapshot.late_metrics), self.state.slabs[slab].conns
            if late:  # before those that come from now on: newer ones stand
                self.aside(self.chores, lambda: self._record_late(snapshot.key, late))
        self.exports.committed(snapshot.key, snapshot.saved_at, late)  # first: a trainer that hears of the commit may end
        with self.lock:
            self._timings[slab] = timings
            try:
                self.feed(protocol.PersistFinished(slab=slab))
            finally:
                del self._timings[slab]
        self._sharing.durable(snapshot.key, nodes=snapshot.team.nodes)
        _log.info("step %d of attempt %d saved to disk in %.3f s", snapshot.key.step, snapshot.key.attempt, timings["total"])
        return conns

    def forgotten(self, conns: tuple[int, ...], key: CheckpointKey) -> None:
        """Tell the trainer."""
        with self.lock:
            for conn in conns:
                self.tell(conn, messages.Event(what="forgotten", step=key.step, attempt=key.attempt))

    def kept(self) -> Keep:
        """What retention keeps, as the trainer said last."""
        with self.lock:
            return self._keep

    def held(self) -> frozenset[CheckpointKey]:
        """What is to be consolidated."""
        return self.exports.held()

    def in_memory(self) -> list[CheckpointKey]:
        """What may yet be committed."""
        with self.lock:
            return [slab.payload.key for slab in self.state.slabs.values() if isinstance(slab.payload, Snapshot)]

    def newest_attempt(self) -> int:
        """Of the trainers."""
        return self.state.newest_attempt

    def _others(self) -> Others | None:
        return self._sharing.nodes

    def part(self, key: CheckpointKey) -> Part | None:
        """This node's part of a step once it is durable, for other nodes; None: not yet. AgentError (kind "gone"): it will not come."""
        known = self._persister.fate(key)
        if known is None and key not in self.in_memory():
            raise AgentError(f"step {key.step} of attempt {key.attempt} is not in memory here", step=key.step, kind="gone")
        return known

    def _record_late(self, key: CheckpointKey, metrics: dict[str, float]) -> None:
        try:
            self.repository.record_metrics(key, metrics)
        except CheckpointError as error:
            self.stats.count("metrics_failures")
            _log.error("metrics of %s are not recorded: %s", key, error)

    def _run_prefaults(self) -> None:
        with contextlib.suppress(OSError):  # a courtesy to the training's threads, where the kernel lets us
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while (memory := self._prefaults.get()) is not None:
            try:
                memory.mapping.populate()
            except Exception as error:  # pages come as they are touched, then
                self.unexpected("putting a slab's pages in place", error)

    def _run_timer(self) -> None:
        seen = -1
        while not self._ended.is_set():
            try:
                seen = self._tick(seen)
            except Exception as error:  # without this thread no time-out ever passes
                self.unexpected("keeping time", error)
                self._ended.wait(_TIMER_PAUSE_S)  # what fails at once and always must not fill the log

    def _tick(self, seen: int) -> int:
        """Do what is due, then wait until something may be; returns the count of events seen."""
        now = self._clock()
        with self.lock:
            tick_at = protocol.next_tick_at(self.state)
            at_work = bool(self.state.trainers()) or self.state.undrained()
        if self._renew_at <= now:
            self._renew_at = now + RENEW_S
            if at_work and (self._renewal is None or self._renewal.done()):  # behind one that hangs they would pile up
                self._renewal = self.aside(self._renewals, self._renew)
            self.aside(self.chores, self._record_stats)
        if tick_at is not None and tick_at <= now:
            self.feed(protocol.Ticked())
        with self._ticks:
            if self._ticking == seen:
                wake_at = min(self._renew_at, tick_at if tick_at is not None and tick_at > now else self._renew_at)
                self._ticks.wait(max(0.0, wake_at - now))
            return self._ticking

    def aside(self, pool: ThreadPoolExecutor, job: Callable[[], None]) -> Future[None] | None:
        """Have a thread do it; None when the agent is closing."""

        def run() -> None:
            try:
                job()
            except Exception as error:  # the thread's top: a job tells its own errors; what comes here is a mistake of ours
                self.unexpected("working in the background", error)

        try:
            return pool.submit(run)
        except RuntimeError:  # the agent is closing: nobody waits for it any more
            return None

    def _renew(self) -> None:
        attempt = self.state.newest_attempt
        if attempt and self._team.keeps_house:
            try:
                self.repository.renew(attempt, now=time.time(), ttl_s=ALIVE_TTL_S)
            except CheckpointError as error:
                self.stats.count("renew_failures")
                _log.warning("attempt %d could not be renewed: %s", attempt, error)

    def _record_stats(self) -> None:
        attempt, changes = self.state.newest_attempt, self.stats.changes
        if attempt and changes != self._recorded:
            try:
                self.repository.record_stats(attempt, self.stats.as_json(), node=self._team.node)
                self._recorded = changes
            except CheckpointError as error:
                _log.warning("the statistics could not be recorded: %s", error)

    def _free_memory(self) -> Room:
        """What is there for more slabs: pages that are promised to slabs and not yet in place count as taken."""
        room = self._room()
        promised = sum(memory.nbytes - memory.mapping.populated for memory in self.memory.values())
        return Room(max(0, room.nbytes - promised), room.limits)

    _answers: ClassVar[dict[type[Anything], Callable[..., None]]] = {
        messages.Configure: _configure, messages.Prepare: _prepare, messages.Lease: _lease,
        messages.Seal: _seal, messages.GiveBack: _give_back, messages.ListSnapshots: _list,
        messages.TakeSnapshot: _take, messages.ReleaseSnapshot: _release, messages.Drain: _drain,
        messages.RecordMetrics: _record_metrics, messages.AskStats: _ask_stats, messages.Stop: _stop,
        messages.Bye: _bye, messages.OpenPeers: _open_peers, messages.SetPeers: _set_peers,
        messages.Consolidate: _consolidate, messages.AskExport: _ask_export, messages.Ending: _ending,
    }  # fmt: skip
    _actions: ClassVar[dict[type[protocol.Action], Callable[..., None]]] = {
        protocol.Accept: _do_accept, protocol.Fail: _do_fail, protocol.Refuse: _do_refuse,
        protocol.Allocate: _do_allocate, protocol.FreeSlab: _do_free, protocol.Grant: _do_grant,
        protocol.StartPersist: _do_persist, protocol.Notify: _do_notify,
        protocol.GiveSnapshot: _do_give_snapshot, protocol.AnswerDrain: _do_answer_drain,
        protocol.Exit: _do_exit, protocol.TellNodes: _do_tell_nodes,
    }  # fmt: skip


def _plan_nbytes(plan: SavePlan) -> int:
    """About what a plan takes in memory: its headers, and some hundred bytes for each tensor and placement."""
    return sum(len(file.header) for file in plan.files) + 500 * (len(plan.tensors) + len(plan.placements) + len(plan.aliases))


def _team(message: messages.Configure) -> Team:
    """Who saves together, when what the trainer says of it makes sense."""
    ranks = message.ranks
    rising = all(first < second for first, second in itertools.pairwise(ranks))
    inside = ranks and rising and ranks[0] >= 0 and ranks[-1] < message.world and message.rank in ranks
    if not inside or not 0 <= message.node < message.nodes or len(ranks) + message.nodes - 1 > message.world:
        text = f"rank {message.rank} of {ranks} of a world of {message.world}, on node {message.node} of {message.nodes}, cannot be"
        raise AgentError(text, kind="protocol")
    return Team(ranks, message.world, message.node, message.nodes, message.shared)
