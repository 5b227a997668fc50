"""The trainer's and the command line's end of the agent's socket; starts the agent where there is none."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from everystep.agent import messages
from everystep.agent.memory import Mapping
from everystep.agent.runtime import LOG_NBYTES, Place, environment, runtime_dir, sockets
from everystep.agent.wire import Anything, Channel
from everystep.errors import AgentError, CheckpointError, ConfigError, CorruptionError, NotFoundError, rebuild
from everystep.manifest import Manifest, Part, decode, merge
from everystep.plan import SavePlan
from everystep.policy import Cadence, Keep

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", bound=messages.Message)
_PROBE_TIMEOUT_S = 2.0
_END_TIMEOUT_S = 5.0
_DRAIN_EXTRA_S = 10.0
_TAKE_S_PER_BYTE = 2.0 / (1 << 30)
"""The agent hashes a snapshot before the first reader gets it: far slower than a busy machine does that."""
_TAKE_UNKNOWN_S = 600.0
_PREPARED = 64
"""Plans that need no announcing; of more the oldest are announced again."""


class Slab:
    """A leased slab, mapped here. ``view`` is the whole writable mapping (``plan.nbytes`` or more)."""

    id: int
    view: memoryview
    headers_written: bool

    def __init__(self, id: int, mapping: Mapping, *, headers_written: bool) -> None:
        self.id = id
        self.view = mapping.view
        self.headers_written = headers_written


class TakenSnapshot:
    """A node's snapshot in the agent's memory, held for reading. Object keys of ``part`` are file names."""

    def __init__(self, part: Part, file_offsets: Sequence[int], fd: int, nbytes: int) -> None:
        self.part = part
        self.file_offsets = file_offsets
        self._fd = fd
        self._nbytes = nbytes
        self._mapping: Mapping | None = None

    @property
    def manifest(self) -> Manifest:
        """Of a snapshot that is whole on this node; CorruptionError where other nodes have the rest."""
        return merge([self.part])

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the slab's bytes from ``offset`` on.

        Faster than mapping the slab where each byte is read once: no page tables.
        """
        done = 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if not got:
                message = f"the snapshot of step {self.part.step} ends {len(view) - done} bytes early"
                raise CorruptionError(message, step=self.part.step, kind="bounds", hint="restore from disk")
            done += got

    @property
    def view(self) -> memoryview:
        """The whole slab, mapped privately: writing into it changes nothing for anybody else."""
        if self._mapping is None:
            self._mapping = Mapping(self._fd, self._nbytes, private=True)
            self._mapping.populate()
        return self._mapping.view

    def close(self) -> None:
        """Let go of the memory."""
        if self._mapping is not None:
            self._mapping.close()
        os.close(self._fd)


class _Waiter:
    """Somebody waits here for the answer to a request."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.answer: Anything | None = None
        self.fd: int | None = None


class AgentClient:
    """One connection. Thread-safe. Every method raises AgentError when the agent is gone, and what the agent answered otherwise.

    A call never hangs: it ends after ``timeout_s`` with AgentError. ``on_event`` is called from the reading thread for every
    ``messages.Event``, so it must not call this client; ``on_lost`` once when the connection ends without ``close``.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        idle_s: float,
        wait_closed: Callable[[float], bool] | None,
        on_event: Callable[[messages.Event], None] | None,
        on_lost: Callable[[], None] | None,
        timeout_s: float,
    ) -> None:
        self._idle_s = idle_s
        self._wait_closed = wait_closed
        self._channel = channel
        self._on_event = on_event
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._waiters: dict[int, _Waiter] = {}
        self._mappings: dict[int, Mapping] = {}
        self._prepared: dict[str, None] = {}
        self._listed: dict[int, int] = {}
        self._welcome: messages.Welcome | None = None
        self._alive = True
        self._closing = False
        self._reader = threading.Thread(target=_read, args=(weakref.ref(self), channel), name="everystep-client", daemon=True)
        self._reader.start()
        _clients.add(self)

    @classmethod
    def connect(
        cls,
        *,
        run_url: str,
        run_id: str,
        role: str = "trainer",
        spawn: bool = True,
        in_process: bool = False,
        idle_s: float = 600.0,
        on_event: Callable[[messages.Event], None] | None = None,
        on_lost: Callable[[], None] | None = None,
        timeout_s: float = 30.0,
    ) -> AgentClient:
        """Find the run's agent on this node or start one (``spawn``), or be it in this process (``in_process``).

        NotFoundError when there is none and ``spawn`` is False.
        """
        if "://" not in run_url:
            run_url = str(Path(run_url).absolute())
        until = time.monotonic() + timeout_s

        def begin(sock: socket.socket, wait_closed: Callable[[float], bool] | None = None) -> AgentClient:
            client = cls(Channel(sock), idle_s=idle_s, wait_closed=wait_closed, on_event=on_event, on_lost=on_lost, timeout_s=timeout_s)
            hello = messages.Hello(protocol=messages.PROTOCOL, role=role, run_id=run_id, pid=os.getpid())
            try:
                client._welcome = client._ask(hello, messages.Welcome)
            except BaseException:
                client.close(bye=False)
                raise
            return client

        try:
            place = Place.of_run(runtime_dir(create=spawn or in_process), run_id, run_url)
        except NotFoundError as error:
            raise _no_agent(run_url) from error
        except (CheckpointError, OSError) as error:
            if not in_process:
                raise
            _log.debug("no other process can find this agent: %s", error)
            return begin(*_serve_here(None, run_url, run_id, idle_s))
        pause_s = 0.01
        while True:
            found = _connect(place, until)
            if found is not None:
                try:
                    return begin(found)
                except AgentError as error:
                    if error.kind not in ("lost", "ending") or time.monotonic() > until:
                        raise
                    _log.debug("the agent ended while it was asked: %s", error)
            elif in_process and (lock := place.take_lock()) is not None:
                return begin(*_serve_here((place, lock), run_url, run_id, idle_s))
            elif not spawn:
                raise _no_agent(run_url)
            if time.monotonic() > until:
                raise AgentError(f"no agent for run {run_url!r} came up within {timeout_s:g} s", key=run_url, kind="no-agent",
                                 hint=f"see {place.log}, or pass agent=False")  # fmt: skip
            if not in_process and _start(place, run_url, run_id, idle_s, until=until):
                continue
            time.sleep(pause_s)  # another agent has the lock and is just beginning or ending: nothing to wait on
            pause_s = min(0.2, pause_s * 2)

    @property
    def welcome(self) -> messages.Welcome:
        """What the agent said of itself."""
        if self._welcome is None:
            raise self._gone()
        return self._welcome

    @property
    def alive(self) -> bool:
        """Whether the connection stands."""
        return self._alive and os.getpid() == self._pid

    def configure(
        self,
        *,
        attempt: int,
        cadence: Cadence,
        keep: Keep,
        memory_budget: int | None,
        rank: int = 0,
        ranks: Sequence[int] = (0,),
        world: int = 1,
        node: int = 0,
        nodes: int = 1,
        shared: bool = True,
        replicas: int = 0,
        replica_nbytes_s: int | None = None,
        job: str = "",
        consolidate: bytes = b"",
    ) -> None:
        """Say which attempt this is and what to keep; ConflictError when another live trainer has the run or a higher attempt exists.

        Args:
            attempt: Claimed in the store.
            cadence: How often a snapshot is to reach the disk.
            keep: Retention.
            memory_budget: Bytes of this node's own slabs; copies for other nodes take what the machine has besides.
            rank: Of this process.
            ranks: All ranks of this node, rising.
            world: How many ranks there are.
            node: Number of this node.
            nodes: How many there are.
            shared: Whether all nodes see one store.
            replicas: How many other nodes hold a copy of this one's newest snapshot.
            replica_nbytes_s: Bandwidth that this node's pulls of copies may take; None: all there is.
            job: Id of the ranks' agreement: other ranks of this job may be configured at the same time.
            consolidate: JSON of ``schedule.to_document``; empty: nothing by itself.
        """
        if self.welcome.protocol != messages.PROTOCOL:
            raise AgentError(
                f"the agent with pid {self.welcome.pid} is of version {self.welcome.version} and speaks another protocol", kind="protocol",
                hint="everystep agent stop, then save again",
            )  # fmt: skip
        self._ask(messages.Configure(
            attempt=attempt, cadence_disk=cadence.disk, keep_last=keep.last, keep_best=keep.best, keep_metric=keep.metric,
            keep_mode=keep.mode, keep_every=keep.every, memory_budget=memory_budget, idle_s=self._idle_s, rank=rank, ranks=tuple(ranks),
            world=world, node=node, nodes=nodes, shared=shared, replicas=replicas, replica_nbytes_s=replica_nbytes_s, job=job,
            consolidate=consolidate,
        ), messages.Done)  # fmt: skip

    def open_peers(self, token: bytes, host: str, port: int = 0) -> tuple[str, int]:
        """Have the agent listen for other nodes' agents at ``host``; returns where it does. AgentError when the port is taken."""
        opened = self._ask(messages.OpenPeers(token=token, host=host, port=port), messages.PeersOpened)
        return opened.host, opened.port

    def set_peers(self, addresses: Sequence[messages.PeerAddress], node: int) -> None:
        """Tell the agent, which is that of ``node``, where the agents of all nodes are, this one included."""
        self._ask(messages.SetPeers(peers=tuple(addresses), node=node), messages.Done)

    def prepare(self, plan: SavePlan) -> None:
        """Announce a plan; slabs are allocated and prefaulted in the background. CapacityError when not even one fits (numbers)."""
        done = self._ask(messages.Prepare(plan=plan), messages.Done)
        with self._lock:
            self._prepared.pop(plan.id, None)
            self._prepared[plan.id] = None
            if len(self._prepared) > _PREPARED:
                del self._prepared[next(iter(self._prepared))]
        if done.note:
            _log.warning("%s", done.note)

    def lease(self, plan: SavePlan, step: int) -> Slab | messages.NoSlab:
        """A slab to fill. Headers of the plan's files are already in place in it when this returns."""
        if plan.id not in self._prepared:
            self.prepare(plan)
        try:
            answer, fd = self._request(messages.Lease(plan_id=plan.id, step=step))
        except AgentError as error:
            if error.kind != "unknown-plan":
                raise
            self.prepare(plan)  # the agent remembers only so many
            answer, fd = self._request(messages.Lease(plan_id=plan.id, step=step))
        if isinstance(answer, messages.NoSlab):
            return answer
        if not isinstance(answer, messages.SlabGranted):
            raise _unexpected(answer)
        self._note_granted(answer, fd)
        return Slab(answer.slab, self._mappings[answer.slab], headers_written=answer.headers_written)

    def _note_granted(self, granted: messages.SlabGranted, fd: int | None) -> None:
        """Keep the mappings in step with what the agent thinks we have."""
        for freed in granted.freed:
            mapping = self._mappings.pop(freed, None)
            if mapping is not None:
                mapping.close()
        if fd is not None:
            try:
                mapping = Mapping(fd, granted.nbytes)
            finally:
                os.close(fd)
            self._mappings[granted.slab] = mapping
            threading.Thread(target=mapping.populate, name="everystep-populate", daemon=True).start()

    def seal(self, slab: Slab, *, plan: SavePlan, step: int, attempt: int, saved_at: float, values: bytes, metrics: dict[str, float],
             bound: bool, pin: bool, timings_s: dict[str, float], must: bool = False) -> None:  # fmt: skip
        """The slab is complete: from now on it survives this process.

        ``bound``: it is to reach the disk unless a later bound one supersedes it. ``must``: it reaches the disk or the failure is told,
        whatever is sealed later; for a sync, a pin, and steps that retention keeps.
        """
        self._ask(messages.Seal(
            slab=slab.id, plan_id=plan.id, step=step, attempt=attempt, saved_at=saved_at, values=values, metrics=metrics, bound=bound,
            pin=pin, timings_s=timings_s, must=must,
        ), messages.Done)  # fmt: skip

    def give_back(self, slab: Slab, reason: str = "") -> None:
        """End the lease without a snapshot. The node's other ranks are told ``reason``."""
        self._ask(messages.GiveBack(slab=slab.id, reason=reason), messages.Done)

    def record_metrics(self, *, step: int, attempt: int, metrics: dict[str, float]) -> None:
        """Attach metrics to a snapshot or checkpoint."""
        self._ask(messages.RecordMetrics(step=step, attempt=attempt, metrics=metrics), messages.Done)

    def snapshots(self) -> list[messages.SnapshotSummary]:
        """Sealed snapshots in memory, newest sealed first."""
        found = self._ask(messages.ListSnapshots(), messages.Snapshots).snapshots
        self._listed = {one.slab: one.nbytes for one in found}
        return list(found)

    @contextlib.contextmanager
    def take(self, slab: int) -> Iterator[TakenSnapshot]:
        """Hold a snapshot. CorruptionError when its digests cannot be trusted; NotFoundError when it is gone.

        The time-out grows with the snapshot, which may have to be hashed first.
        """
        nbytes = self._listed.get(slab)
        timeout_s = self._timeout_s + (_TAKE_UNKNOWN_S if nbytes is None else nbytes * _TAKE_S_PER_BYTE)
        try:
            answer, fd = self._request(messages.TakeSnapshot(slab=slab), timeout_s=timeout_s)
        except BaseException as error:
            if not isinstance(error, CheckpointError) or error.kind == "timeout":  # no answer yet: it may be held for us all the same
                self._let_go(slab)
            raise
        try:
            if not isinstance(answer, messages.SnapshotTaken):
                raise _unexpected(answer)
            if fd is None:
                raise AgentError(f"the agent sent no descriptor for slab {slab}", kind="protocol")
            part = decode("part", answer.part, Part, key=f"slab {slab}")
            _check_bounds(part, answer)
        except BaseException:
            if fd is not None:
                os.close(fd)
            self._let_go(slab)
            raise
        taken = TakenSnapshot(part, answer.file_offsets, fd, answer.slab_nbytes)
        try:
            yield taken
        finally:
            taken.close()
            with contextlib.suppress(AgentError):  # a dead agent holds nothing any more
                self._ask(messages.ReleaseSnapshot(slab=slab), messages.Done)

    def _let_go(self, slab: int) -> None:
        """End a hold without waiting for the answer."""
        with contextlib.suppress(OSError):  # a dead agent holds nothing any more
            self._channel.send(messages.ReleaseSnapshot(id=next(self._ids), slab=slab))

    def drain(self, *, timeout_s: float, exit: bool = False) -> messages.Drained:
        """Wait until everything sealed that should be durable is."""
        return self._ask(messages.Drain(timeout_s=timeout_s, exit=exit), messages.Drained, timeout_s=timeout_s + _DRAIN_EXTRA_S)

    def consolidate(self, what: str, *, step: int, attempt: int, settings: bytes = b"") -> int:
        """Have "latest" (at least ``step``), "best", a step or a key consolidated; returns the ticket to ask ``export`` with."""
        return self._ask(messages.Consolidate(what=what, step=step, attempt=attempt, consolidate=settings), messages.Consolidating).ticket

    def export(self, ticket: int, *, timeout_s: float) -> messages.Export:
        """What has become of it, waiting at most so long. Raises what it failed with."""
        return self._ask(messages.AskExport(ticket=ticket, timeout_s=timeout_s), messages.Export, timeout_s=timeout_s + _DRAIN_EXTRA_S)

    def ending(self, because: str, *, timeout_s: float, settings: bytes = b"") -> messages.ExportsFinished:
        """Say that this trainer ends ("done", "preempted", "failed"), and wait at most so long for what is due to be consolidated."""
        return self._ask(messages.Ending(because=because, timeout_s=timeout_s, consolidate=settings), messages.ExportsFinished,
                         timeout_s=timeout_s + _DRAIN_EXTRA_S)  # fmt: skip

    def stats(self) -> dict[str, object]:
        """Counters and histograms of the agent's phases (see ``agent/stats.py``)."""
        found: dict[str, object] = msgspec.json.decode(self._ask(messages.AskStats(), messages.Stats).json)
        return found

    def stop(self, *, force: bool = False) -> None:
        """End the agent. Without ``force`` it drains first; AgentError when the newest snapshot cannot be made durable, and it lives on."""
        with contextlib.suppress(AgentError) if force else contextlib.nullcontext():  # a forced end may be faster than its answer
            self._ask(messages.Stop(force=force), messages.Done, timeout_s=self._timeout_s if force else 3600.0)
        self._reader.join(timeout=self._timeout_s)  # the connection ends with the agent

    def close(self, *, bye: bool = True) -> None:
        """Close the connection; with ``bye`` the agent knows that it was on purpose. Safe to call at any time, also twice."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
        ending: int | None = None
        if bye and self._alive:
            with contextlib.suppress(AgentError):  # it is gone: as good
                ending = self._said_bye()
        self._channel.shut()
        if ending is not None:
            # It still records its statistics: the caller may want to move or delete the run's folder next.
            _readable(ending, _END_TIMEOUT_S)
            os.close(ending)
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=self._timeout_s)
        if self._wait_closed is not None:
            self._wait_closed(self._timeout_s)
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()
        _clients.discard(self)

    def _said_bye(self) -> int | None:
        """A descriptor that becomes readable when the agent's process has ended; None when it does not end now, or is this process."""
        pid = self.welcome.pid
        try:
            process = os.pidfd_open(pid) if pid != self._pid else None
        except OSError:
            process = None
        if self._ask(messages.Bye(), messages.Done).ending or process is None:
            return process
        os.close(process)
        return None

    # -- requests ----------------------------------------------------------------------------------------------------------------
    def _ask(self, message: messages.Message, answer: type[_Answer], *, timeout_s: float | None = None) -> _Answer:
        found, fd = self._request(message, timeout_s=timeout_s)
        if fd is not None:
            os.close(fd)
        if not isinstance(found, answer):
            raise _unexpected(found)
        return found

    def _request(self, message: messages.Message, *, timeout_s: float | None = None) -> tuple[Anything, int | None]:
        """Send and wait for the answer; an answer that is an error is raised."""
        if os.getpid() != self._pid:
            raise AgentError("this connection to the agent belongs to another process", kind="forked", hint="connect again after a fork")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        number = next(self._ids)
        waiter = _Waiter()
        with self._lock:
            if not self._alive:
                raise self._gone()
            self._waiters[number] = waiter
        try:
            try:
                self._channel.send(msgspec.structs.replace(message, id=number))
            except OSError as error:
                self._alive = False  # the reading thread will see it too, but the next save may be sooner
                raise self._gone() from error
            if not waiter.arrived.wait(timeout_s):
                raise AgentError(f"the agent did not answer {type(message).__name__} within {timeout_s:g} s", kind="timeout",
                                 hint="everystep agent ls")  # fmt: skip
        except BaseException:
            with self._lock:
                self._waiters.pop(number, None)
            if waiter.answer is not None:  # it came between the time-out or the interrupt and here
                self._unclaimed(waiter.answer, waiter.fd)
            raise
        with self._lock:
            self._waiters.pop(number, None)
        answer = waiter.answer
        if answer is None:
            raise self._gone()
        if isinstance(answer, messages.Failed):
            raise _rebuilt(answer)
        return answer, waiter.fd

    def _gone(self) -> AgentError:
        pid = f" with pid {self._welcome.pid}" if self._welcome is not None else ""
        return AgentError(f"the agent{pid} is gone", kind="lost", hint="the next save starts a new one")

    def _dispatch(self, message: Anything, fd: int | None) -> None:
        if isinstance(message, messages.Event):
            if self._on_event is not None:
                self._on_event(message)
            return
        with self._lock:
            waiter = self._waiters.get(message.id)
            if waiter is not None:
                waiter.answer, waiter.fd, fd = message, fd, None
                waiter.arrived.set()
        if waiter is None:
            self._unclaimed(message, fd)

    def _unclaimed(self, message: Anything, fd: int | None) -> None:
        """An answer for which nobody waits any more. A slab that was granted is taken note of and given back, else it would stay leased."""
        if isinstance(message, messages.SlabGranted):
            self._note_granted(message, fd)
            with contextlib.suppress(OSError):  # it is gone: as good
                self._channel.send(messages.GiveBack(id=next(self._ids), slab=message.slab))
        elif fd is not None:
            os.close(fd)
        if isinstance(message, messages.Failed) and not message.id:
            _log.warning("the agent ends the connection: %s", message.message)

    def _lost(self) -> None:
        with self._lock:
            self._alive = False
            waiters, closing = list(self._waiters.values()), self._closing
            for waiter in waiters:
                waiter.arrived.set()
        if not closing and self._on_lost is not None and self._welcome is not None:
            self._on_lost()

    def _after_fork(self) -> None:
        """In the child: let go of the socket, so that the agent sees the end of its trainer while its children live on."""
        self._alive = False
        self._channel.close()


_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()
_held: dict[int, socket.socket] = {}
"""Locks of the agents in this process, and where they listen."""


def _leave_to_parent() -> None:
    for client in list(_clients):
        client._after_fork()  # noqa: SLF001 - the same module's business
    for lock, listener in _held.items():  # a child that lives longer must not keep the run
        listener.close()
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _read(client: weakref.ref[AgentClient], channel: Channel) -> None:
    """The reading thread. It holds the client only while it dispatches, so that one that is dropped without ``close`` goes away."""
    try:
        while (received := channel.receive()) is not None:
            target = client()
            if target is None:
                break
            try:
                target._dispatch(*received)  # noqa: SLF001 - the same module's business
            except Exception:  # a callback's fault must not end the connection
                _log.exception("in the callback for an event of the agent")
            del target
    except (OSError, CheckpointError) as error:
        _log.debug("the connection to the agent ends: %s", error)
    finally:
        target = client()
        if target is not None:
            target._lost()  # noqa: SLF001 - the same module's business
        channel.shut()
        channel.close()


def _rebuilt(failed: messages.Failed) -> CheckpointError:
    return rebuild(failed.name, failed.message, failed.step, None, failed.key, failed.kind, failed.hint, failed.errno)


def _unexpected(answer: Anything) -> AgentError:
    return AgentError(f"the agent answered with {type(answer).__name__}, which makes no sense here", kind="protocol")


def _no_agent(run_url: str) -> NotFoundError:
    message = f"run {run_url!r} has no agent on this node"
    return NotFoundError(message, key=run_url, kind="no-agent", hint="everystep agent ls shows those there are")


def _check_bounds(part: Part, taken: messages.SnapshotTaken) -> None:
    """The slab is read by offset: nothing may lie outside of it."""
    ends = [begin + stored.nbytes for begin, stored in zip(taken.file_offsets, part.objects, strict=False)]
    low, high = min(taken.file_offsets, default=0), max(ends, default=0)
    if len(taken.file_offsets) != len(part.objects) or low < 0 or high > taken.slab_nbytes:
        raise CorruptionError(f"the snapshot of step {part.step} in memory lies outside its slab", step=part.step, kind="bounds",
                              hint="take the newest checkpoint on disk")  # fmt: skip


def _connect(place: Place, until: float) -> socket.socket | None:
    """A connection, or None when nobody listens."""
    try:
        sock = place.connect(timeout_s=max(0.1, until - time.monotonic()))
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    except OSError as error:
        raise AgentError(f"the agent at {str(place.socket)!r} cannot be reached: {error}", kind="no-answer", errno=error.errno) from error
    _, uid = Channel(sock).peer()
    if uid != os.geteuid():
        sock.close()
        raise ConfigError(f"the socket {str(place.socket)!r} is served by user {uid}", kind="other-user", hint="set EVERYSTEP_RUNTIME_DIR")
    sock.settimeout(None)
    return sock


def _serve_here(
    found_by: tuple[Place, int] | None, run_url: str, run_id: str, idle_s: float
) -> tuple[socket.socket, Callable[[float], bool]]:
    """The agent in this process, in threads; returns our end of the connection, and how to wait for the agent's end.

    With a place and its lock other processes find it as they would find any agent, so that nobody takes over the run unasked.
    """
    from everystep.agent.server import AgentServer
    from everystep.agent.serving import accept
    from everystep.repository import Repository

    repository = Repository.open(run_url)
    if repository.run_id != run_id:
        raise ConfigError(f"{run_url!r} is run {repository.run_id!r}, not {run_id!r}", key=run_url, kind="other-run")
    server = AgentServer(repository, run_url=run_url, run_id=run_id, idle_s=idle_s)
    listener: socket.socket | None = None
    if found_by is not None:
        place, lock = found_by
        listener = place.listen()
        _held[lock] = listener
        threading.Thread(target=accept, args=(listener, server), name="everystep-accept", daemon=True).start()

    def end() -> None:
        if found_by is not None and listener is not None:
            place, lock = found_by
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
            with contextlib.suppress(FileNotFoundError):
                place.socket.unlink()
            if _held.pop(lock, None) is not None:
                listener.close()
                place.clear(log=False)
                os.close(lock)
        server.close()

    server.on_end(lambda: threading.Thread(target=end, name="everystep-close", daemon=True).start())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    serving = server.adopt(Channel(theirs))

    def wait_closed(timeout_s: float) -> bool:
        serving.join(timeout_s)
        # Without an end it goes on in the background, to persist what has to be.
        return server.wait_closed(timeout_s) if server.end_reason else True

    return ours, wait_closed


def _start(place: Place, run_url: str, run_id: str, idle_s: float, *, until: float) -> bool:
    """Start a detached agent and wait until it listens; False when another one has the run. Raises what kept it from starting."""
    from everystep.agent.serving import READY

    reading, writing = os.pipe()
    try:
        with contextlib.closing(_log_file(place)) as log:
            command = [sys.executable, "-m", "everystep.agent", run_url, "--run-id", run_id, "--idle-s", str(idle_s), "--detach",
                       "--ready-fd", str(writing)]  # fmt: skip
            try:
                starter = subprocess.Popen(
                    command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log.fd, pass_fds=(writing,),
                    start_new_session=True, env=environment(),
                )  # fmt: skip
            except OSError as error:
                message = f"the agent of run {run_url!r} cannot be started: {error}"
                raise AgentError(message, key=run_url, kind="no-agent", errno=error.errno,
                                 hint="pass agent=False to keep snapshots in the trainer's process") from error  # fmt: skip
        os.close(writing)
        writing = -1
        said = _said(reading, until)
        if said is None:
            with contextlib.suppress(ProcessLookupError):
                starter.kill()
        status = starter.wait()
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if said is None or (not said and status):
        tail: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # an agent that ended has removed it
            tail = place.log.read_bytes()[-500:].decode(errors="replace").strip().splitlines()
        why = tail[-1] if tail and said is not None else "it did not say that it listens in time"
        raise AgentError(f"the agent of run {run_url!r} did not start: {why}", key=run_url, kind="no-agent",
                         hint=f"see {place.log}, or pass agent=False")  # fmt: skip
    if said and said != READY:
        raise _rebuilt(msgspec.msgpack.decode(said, type=messages.Failed))
    return said == READY


def _said(fd: int, until: float) -> bytes | None:
    """Everything written to the pipe until its end or READY; None after the time is up."""
    from everystep.agent.serving import READY

    said = b""
    while said != READY:
        if not _readable(fd, until - time.monotonic()):
            return None
        data = os.read(fd, 1 << 16)
        if not data:
            break
        said += data
    return said


def _readable(fd: int, timeout_s: float) -> bool:
    """Wait until ``fd`` can be read or has ended. A trainer may have thousands of files open, which ``select`` cannot wait for."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(math.ceil(max(0.0, timeout_s) * 1000)))


class _log_file:  # noqa: N801 - used as a function
    """The agent's log, begun anew when it has grown long."""

    def __init__(self, place: Place) -> None:
        self.fd = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(self.fd).st_size > LOG_NBYTES:
            os.ftruncate(self.fd, 0)

    def close(self) -> None:
        os.close(self.fd)


def find_agents() -> list[messages.Welcome]:
    """What each live agent in the runtime directory says of itself. Stale sockets, and what does not answer within 2 s, are passed over."""
    try:
        folder = runtime_dir(create=False)
    except NotFoundError:
        return []
    found = []
    for place in sockets(folder):
        try:
            sock = _connect(place, time.monotonic() + _PROBE_TIMEOUT_S)
            if sock is None:
                continue
            with contextlib.closing(Channel(sock)) as channel:
                channel.timeout(_PROBE_TIMEOUT_S)
                channel.send(messages.Hello(id=1, protocol=messages.PROTOCOL, role="visitor", run_id="", pid=os.getpid()))
                received = channel.receive()
        except (OSError, CheckpointError) as error:
            _log.debug("no agent at %s: %s", place.socket, error)
            continue
        if received is not None and isinstance(received[0], messages.Welcome):
            found.append(received[0])
    return found
