"""Copies of other nodes' complete snapshots in this node's memory, so that a lost node can be restored without a disk.

Theory of operation. Who copies whom follows from the peers' addresses alone (``holders``); which step is copied the lead says, the same to
all. A thread pulls the snapshots of the nodes that this one copies, into memory of its own; each block is compared with its digest as it
comes; then the lead is told. The older copies stay until it says (``keep``) that the newer are whole with all holders: a copy is worth
something only together with the other nodes' shares of the same step. The older ones' memory is then filled next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from everystep.agent.memory import Room, SlabMemory, memory_room
from everystep.agent.messages import PeerAddress, SnapshotSummary
from everystep.agent.peers import PeerClient, RemoteSnapshot, ranges_to_verify
from everystep.errors import AgentError, CapacityError, CheckpointError, CorruptionError, NotFoundError
from everystep.manifest import Part, digest, encode
from everystep.repository import CheckpointKey
from everystep.transfer import Transfer

_log = logging.getLogger(__name__)
_WINDOW_NBYTES = 8 << 20
"""Blocks are pulled together up to this many bytes."""
_STREAMS = 2
_TRIES, _PAUSE_S = 5, 0.05
_NO_SOURCE = "it does not know any node whose snapshots it is to copy"


def holders(addresses: Sequence[PeerAddress], replicas: int) -> dict[int, tuple[int, ...]]:
    """For each node the nodes that hold copies of its snapshots: ``replicas`` of them, or all others if there are fewer.

    Nodes stand in a ring, those of one domain beside each other, and each is copied by the one that stands as far on as the largest domain
    is large: another domain, wherever no domain has more than half of the nodes, and every node holds as many copies as every other.
    A node without a domain is one by itself.
    """
    domain_of = {address.node: address.domain or f"\0{address.node}" for address in addresses}
    sizes: dict[str, int] = {}
    for domain in domain_of.values():
        sizes[domain] = sizes.get(domain, 0) + 1
    ring = sorted(domain_of, key=lambda node: (-sizes[domain_of[node]], domain_of[node] if sizes[domain_of[node]] > 1 else "", node))
    count, stride = len(ring), max(sizes.values(), default=1)
    shifts: list[int] = []
    for shift in (*(stride * times % count for times in range(1, replicas + 1) if count), *range(1, count)):
        if shift and shift not in shifts and len(shifts) < replicas:
            shifts.append(shift)
    return {node: tuple(ring[(at + shift) % count] for shift in shifts) for at, node in enumerate(ring)}


class TokenBucket:
    """Lets so many bytes a second pass, after a pause a tenth of a second's worth at once."""

    def __init__(self, limit_nbytes_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit_nbytes_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def limit(self, limit_nbytes_s: float | None) -> None:
        """From now on so many bytes a second; None: all there is."""
        with self._lock:
            self._limit = limit_nbytes_s

    def delay_s(self, nbytes: int) -> float:
        """Take these bytes; returns how long to wait before they may pass."""
        with self._lock:
            if self._limit is None:
                return 0.0
            now = self._clock()
            begin = max(self._free_at, now - 0.1)
            self._free_at = begin + nbytes / self._limit
            return max(0.0, begin - now)


@dataclasses.dataclass
class _Copy:
    """A whole copy in memory. Guarded by the lock of ``Replicas``, as far as it changes."""

    slab: int
    node: int
    key: CheckpointKey
    memory: SlabMemory
    nbytes: int
    part: bytes
    file_offsets: tuple[int, ...]
    saved_at: float
    nodes: int
    world: int
    readers: int = 0
    dropped: bool = False


class HeldCopy:
    """A copy that stays as it is until ``release``."""

    def __init__(self, copy: _Copy, release: Callable[[_Copy], None]) -> None:
        self.part = copy.part
        self.file_offsets = copy.file_offsets
        self.nbytes = copy.nbytes
        self.view = copy.memory.view[: copy.nbytes]
        self._copy = copy
        self._release = release
        self._released = False

    @contextlib.contextmanager
    def readable_fd(self) -> Iterator[int]:
        """A descriptor of the memory through which nobody can write."""
        with self._copy.memory.readable_fd() as fd:
            yield fd

    def release(self) -> None:
        """Nothing is read any more."""
        if not self._released:
            self._released = True
            with contextlib.suppress(BufferError):  # a slice of it is on its way to a socket that has broken
                self.view.release()
            self._release(self._copy)


class Replicas:
    """The copies that this agent holds for others, and the thread that renews them. Thread-safe.

    Args:
        client: Gives the client of a node's agent; AgentError when its address is not known.
        done: Hears that this node is done with a step's copies, and why they are not all whole, if so.
        count: Raises a counter: "replicas", "replica_bytes", "replica_failures", "replica_mismatches", "replica_no_memory".
        room: Measures the memory there is for more copies.
    """

    def __init__(
        self,
        client: Callable[[int], PeerClient],
        *,
        count: Callable[[str, int], None],
        done: Callable[[CheckpointKey, str], None],
        room: Callable[[], Room] = memory_room,
    ) -> None:
        self._client = client
        self._done = done
        self._count = count
        self._room = room
        self._bucket = TokenBucket(None)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._stop = threading.Event()
        self._node = 0
        self._replicas = 0
        self._addresses: Sequence[PeerAddress] = ()
        self._sources: tuple[int, ...] = ()
        self._copies: dict[tuple[int, CheckpointKey], _Copy] = {}
        self._spares: dict[int, SlabMemory] = {}
        self._next_slab = -1
        self._pending: CheckpointKey | None = None
        self._pulling: CheckpointKey | None = None
        self._told: dict[int, str] = {}
        self._thread: threading.Thread | None = None

    # -- what is copied -----------------------------------------------------------------------------------------------------------
    def configure(self, node: int, replicas: int, *, limit_nbytes_s: float | None = None) -> None:
        """Which node this is, how many copies of each node's snapshots there shall be, and what bandwidth pulls may take."""
        self._bucket.limit(limit_nbytes_s)
        with self._lock:
            self._node, self._replicas = node, replicas
            self._assign()

    def set_peers(self, addresses: Sequence[PeerAddress]) -> None:
        """The agents of all nodes."""
        with self._lock:
            self._addresses = tuple(addresses)
            self._assign()

    def copy(self, key: CheckpointKey) -> None:
        """Pull this step, unless a newer one comes before its turn."""
        with self._lock:
            if self._stop.is_set() or (self._pending is not None and _age(self._pending) >= _age(key)):
                return
            self._pending = key
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="everystep-replicas", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def keep(self, keys: Collection[CheckpointKey]) -> None:
        """Of these steps the copies stay; older ones, and what is between them, are not needed any more."""
        with self._lock:
            for node, key in [at for at in self._copies if at[1] not in keys and any(_age(at[1]) < _age(kept) for kept in keys)]:
                self._drop(node, key, spare=node in self._sources)
            self._drop_spares()

    def drop_older(self, key: CheckpointKey) -> None:
        """The job goes on without copies, and this step of it is safe."""
        with self._lock:
            if not self._sources:
                for node, older in [at for at in self._copies if _age(at[1]) < _age(key)]:
                    self._drop(node, older, spare=False)
                self._drop_spares()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is pulled and nothing waits to be; False when that takes longer."""
        with self._lock:
            return self._wake.wait_for(lambda: self._pending is None and self._pulling is None, timeout=timeout_s)

    # -- reading them --------------------------------------------------------------------------------------------------------------
    def summaries(self) -> list[SnapshotSummary]:
        """All whole copies, newest first. ``slab`` is negative."""
        with self._lock:
            copies = sorted(self._copies.values(), key=lambda copy: (*_age(copy.key), -copy.node), reverse=True)
            return [
                SnapshotSummary(slab=copy.slab, step=copy.key.step, attempt=copy.key.attempt, nbytes=copy.nbytes, saved_at=copy.saved_at,
                                persisted=False, node=copy.node, nodes=copy.nodes, world=copy.world, replica=True)
                for copy in copies
            ]  # fmt: skip

    def hold(self, slab: int) -> HeldCopy:
        """The copy with this (negative) number, for reading. NotFoundError when it is there no more."""
        with self._lock:
            copy = next((copy for copy in self._copies.values() if copy.slab == slab), None)
            return self._held(copy, f"no copy {slab} is held here")

    def hold_copy(self, node: int, key: CheckpointKey) -> HeldCopy:
        """The copy of a node's snapshot, for reading. NotFoundError when there is none of that step."""
        with self._lock:
            return self._held(self._copies.get((node, key)), f"no copy of snapshot {key} of node {node} is held here")

    def free(self) -> int:
        """Give all copies up, once they are not read any more; returns their bytes."""
        with self._lock:
            nbytes = sum(copy.memory.nbytes for copy in self._copies.values()) + sum(spare.nbytes for spare in self._spares.values())
            self._pending = None
            for node, key in list(self._copies):
                self._drop(node, key, spare=False)
            self._free_spares()
        return nbytes

    def stop(self) -> None:
        """Begin the end: no other pull is begun."""
        self._stop.set()
        with self._lock:
            self._wake.notify_all()

    def close(self) -> None:
        """End the thread and free the copies."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout=30.0)
        self.free()

    # -- the thread ---------------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            with self._lock:
                self._pulling = None
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._pending is not None or self._stop.is_set())
                if self._stop.is_set() or self._pending is None:
                    return
                key, self._pending = self._pending, None
                self._pulling, sources = key, self._sources
            problems = [problem for node in sources if (problem := self._try(node, key))]
            if not self._stop.is_set():
                self._done(key, "; ".join(problems) if sources else _NO_SOURCE)

    def _try(self, node: int, key: CheckpointKey) -> str:
        """Copy a step of one node; why that was not done, if so. What goes wrong is counted and told, and the older copy stays."""
        try:
            for tries in range(_TRIES):
                try:
                    self._pull(node, key)
                    break
                except (AgentError, NotFoundError) as error:
                    # A link that was away for a moment; or the node has not heard yet that this step is complete.
                    passing = isinstance(error, NotFoundError) or error.kind in ("unreachable", "gone", "busy")
                    if tries + 1 == _TRIES or not passing or self._pending is not None or self._stop.wait(_PAUSE_S * 2**tries):
                        raise
        except CheckpointError as error:
            with self._lock:
                superseded = isinstance(error, NotFoundError) and self._pending is not None
            if superseded or self._stop.is_set():
                return f"step {key.step} of node {node + 1} has been superseded"
            self._count("replica_failures", 1)
            self._tell(node, f"the snapshot of step {key.step} of node {node} is not copied: {error}")
            return f"step {key.step} of node {node + 1} is not copied: {error}"
        except Exception as error:  # the thread's top: the copies to come must not end with this one
            self._count("unexpected_errors", 1)
            _log.exception("copying step %d of node %d failed", key.step, node)
            self._tell(node, f"{type(error).__name__}: {error}")
            return f"step {key.step} of node {node + 1} is not copied: {type(error).__name__}: {error}"
        self._tell(node, "")
        return ""

    def _pull(self, node: int, key: CheckpointKey) -> None:
        with self._lock:
            if (node, key) in self._copies:
                return
        with self._client(node).take(node, key) as remote:
            memory = self._memory(node, remote.nbytes)
            try:
                self._fill(remote, memory)
            except BaseException as error:
                with self._lock:
                    self._spares[node] = memory  # the next try fills it anew
                if isinstance(error, CorruptionError):
                    self._count("replica_mismatches", 1)
                raise
            copy = _Copy(slab=0, node=node, key=key, memory=memory, nbytes=remote.nbytes, part=encode("part", remote.part),
                         file_offsets=remote.file_offsets, saved_at=remote.part.saved_at, nodes=remote.part.nodes,
                         world=_world(remote.part))  # fmt: skip
        with self._lock:
            copy.slab, self._next_slab = self._next_slab, self._next_slab - 1
            self._copies[node, key] = copy
        self._count("replicas", 1)
        self._count("replica_bytes", copy.nbytes)

    def _fill(self, remote: RemoteSnapshot, memory: SlabMemory) -> None:
        """Pull everything that has a digest, and compare it."""
        checks = sorted(ranges_to_verify(remote.part, remote.file_offsets))
        with Transfer(threads=_STREAMS, budget_nbytes=2 * _STREAMS * _WINDOW_NBYTES) as transfer:
            transfer.run(
                (end - begin, lambda begin=begin, end=end, several=several: self._fill_window(remote, memory.view, begin, end, several))  # type: ignore[misc]
                for begin, end, several in _windows(checks)
            )

    def _fill_window(self, remote: RemoteSnapshot, view: memoryview, begin: int, end: int, checks: Sequence[tuple[int, int, str]]) -> None:
        if self._stop.wait(self._bucket.delay_s(end - begin)):
            raise AgentError("the agent ends", kind="ending")
        remote.read_into(begin, view[begin:end])
        for at, nbytes, word in checks:
            if digest(view[at : at + nbytes]) != word:
                message = f"bytes {at:,} to {at + nbytes:,} of snapshot {remote.key} of node {remote.node} came with another digest"
                raise CorruptionError(message, step=remote.key.step, kind="digest", hint="a node's memory or network may be at fault")

    # -- memory -------------------------------------------------------------------------------------------------------------------
    def _memory(self, node: int, nbytes: int) -> SlabMemory:
        """Memory for a new copy: what the one before the last had, or more if there is room."""
        with self._lock:
            spare = self._spares.pop(node, None)
            if spare is not None and spare.nbytes != nbytes:
                spare.close()
                spare = None
        if spare is not None:
            return spare
        room = self._room()
        if nbytes > room.nbytes:
            self._count("replica_no_memory", 1)
            raise CapacityError(f"{nbytes:,} bytes of memory are needed and {room.nbytes:,} are there ({room.limits})", kind="memory",
                                hint="give the agent more memory, or set replicas=0")  # fmt: skip
        try:
            return SlabMemory(nbytes)
        except (OSError, ValueError) as error:
            self._count("replica_no_memory", 1)
            raise CapacityError(f"{nbytes:,} bytes of memory cannot be had: {error}", kind="memory") from error

    def _assign(self) -> None:
        nodes = [address.node for address in self._addresses]
        holds = holders(self._addresses, self._replicas) if self._replicas > 0 and self._node in nodes else {}
        self._sources = tuple(sorted(node for node, by in holds.items() if self._node in by))
        domain_of = {address.node: address.domain for address in self._addresses}
        for node in self._sources:
            if domain_of[node] and domain_of[node] == domain_of[self._node]:
                _log.warning("node %d is copied within its own domain %r: there are too few others", node, domain_of[node])

    def _drop_spares(self) -> None:
        """Of nodes that are others' to copy now."""
        for node in [node for node in self._spares if node not in self._sources]:
            self._spares.pop(node).close()

    def _drop(self, node: int, key: CheckpointKey, *, spare: bool) -> None:
        copy = self._copies.pop((node, key), None)
        if copy is None:
            return
        copy.dropped = True
        if copy.readers:
            return  # freed by its last reader
        if spare and node not in self._spares:
            self._spares[node] = copy.memory
        else:
            copy.memory.close()

    def _free_spares(self) -> None:
        for spare in self._spares.values():
            spare.close()
        self._spares.clear()

    def _held(self, copy: _Copy | None, why: str) -> HeldCopy:
        if copy is None:
            raise NotFoundError(why, kind="snapshot")
        copy.readers += 1
        return HeldCopy(copy, self._released)

    def _released(self, copy: _Copy) -> None:
        with self._lock:
            copy.readers -= 1
            if copy.dropped and not copy.readers:
                copy.memory.close()

    def _tell(self, node: int, problem: str) -> None:
        """Log a problem once, and its end."""
        before = self._told.pop(node, "")
        if problem:
            self._told[node] = problem
            if not before:
                _log.warning("%s", problem)
        elif before:
            _log.info("node %d is copied again", node)


def _age(key: CheckpointKey) -> tuple[int, int]:
    return key.attempt, key.step


def _world(part: Part) -> int:
    world = getattr(part, "world", 1)
    return int(world)


def _windows(checks: Sequence[tuple[int, int, str]]) -> Iterator[tuple[int, int, Sequence[tuple[int, int, str]]]]:
    """(begin, end, checks in it) of ranges to pull together: neighbours, up to ``_WINDOW_NBYTES``, and no check in two of them."""
    first = 0
    while first < len(checks):
        begin, end = checks[first][0], checks[first][0] + checks[first][1]
        last = first + 1
        while last < len(checks):
            at, nbytes, _ = checks[last]
            if at - end > 4096 or max(end, at + nbytes) - begin > _WINDOW_NBYTES:
                break
            end, last = max(end, at + nbytes), last + 1
        yield begin, end, checks[first:last]
        first = last
