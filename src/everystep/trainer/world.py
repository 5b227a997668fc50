"""What the ranks of a job tell each other when they have to agree: small messages through the process group's store.

Theory of operation. No collective is used: they must not be mixed with the training's own, hang for half an hour when somebody is missing,
and do not say who it is. Messages go through the key-value store that the process group was set up with. ``exchange`` gathers at rank 0 and
shares what was gathered; the messages of a *round* are numbered, so that every rank means the same one. A rank that fails in a round writes
why, once; all others find it, raise, and go on to the next round, so that a later save can try again. Steady-state saves use none of this.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import torch.distributed as dist

from everystep.errors import AgentError, CheckpointError, ConfigError, rebuild
from everystep.trainer.handshake import Handshake, missing
from everystep.trainer.lookout import EVERY_S, PER_RANK_S, Lookout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Group: TypeAlias = "dist.ProcessGroup | Literal['alone'] | None"

TIMEOUT_S = 120.0
"""How long ranks wait for each other at the start, and whenever the structure of the state has changed."""
_FAILING_S = 5.0
"""How long a rank that fails before the ranks have met waits for rank 0, to tell it why."""
_PAUSE_S, _PAUSE_MAX_S = 0.001, 0.1
_CHUNK_NBYTES = 4 << 20
"""The store takes values of up to 8 MiB."""
_turns: dict[str, Iterator[int]] = {}


_TOLD = "_everystep_told"


def is_told(error: BaseException) -> bool:
    """Whether the error ended a round: all ranks know of it."""
    return getattr(error, _TOLD, False)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank gave a round up. ``number``: of the last message that it gave its part of; who waits for a later one has to know."""

    rank: int
    number: int
    name: str
    message: str
    step: int | None = None
    key: str | None = None
    kind: str = ""
    hint: str = ""
    errno: int | None = None
    late: tuple[int, ...] = ()
    """Ranks that did not come in time."""

    @classmethod
    def of(cls, error: BaseException, rank: int, number: int = 0, late: Sequence[int] = ()) -> Failure:
        """What is told of an error."""
        if isinstance(error, CheckpointError):
            return cls(rank=rank, number=number, name=type(error).__name__, message=error.message, step=error.step, key=error.key,
                       kind=error.kind, hint=error.hint, errno=error.errno, late=tuple(late))  # fmt: skip
        return cls(rank=rank, number=number, name="AgentError", message=f"{type(error).__name__}: {error}", kind="rank-failed")

    def error(self) -> CheckpointError:
        """The same error on another rank, which names the one that had it."""
        return rebuild(self.name, f"rank {self.rank}: {self.message}", self.step, self.rank, self.key, self.kind, self.hint, self.errno)


class World:
    """All ranks of a job, as one of them sees them. Not thread-safe, apart from ``put``, ``look``, ``offer`` and ``add``.

    Args:
        store: The group's store with a prefix of its own; None: there is one rank.
        rank: This rank, in the group.
        size: How many there are.
        timeout_s: How long to wait for the others.
    """

    def __init__(self, store: Store | None, rank: int, size: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._store = store
        self._handshake = None if store is None else Handshake(store, rank, size)
        self._space: Store | None = None
        """The part of the store for this life."""
        self._round = 0
        self._number = 0
        self._given = 0
        """Of the last message that this rank has given its part of."""
        self._lookout: Lookout | None = None
        self._still: Callable[[], bool] = lambda: True
        self._gathered = ""
        """Where the last message that was gathered lies."""

    @classmethod
    def alone(cls) -> World:
        """A world of one rank."""
        return cls(None, 0, 1)

    @classmethod
    def of(cls, group: Group, *, timeout_s: float = TIMEOUT_S) -> World:
        """The world of a process group: the default one for None, if there is one.

        The first call for a group on one rank meets the first on the others, and so on: what a checkpointer is called (its path) may differ
        between nodes.

        Raises:
            ConfigError: This process is not in the group, or the group has no store.
        """
        if group == "alone" or (group is None and not (dist.is_available() and dist.is_initialized())):
            return cls.alone()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ConfigError("this process is not a rank of the given process group", kind="group",
                              hint="make the Checkpointer in its ranks only")  # fmt: skip
        if size == 1:
            return cls.alone()
        turn = next(_turns.setdefault("" if group is None else group.group_name, itertools.count()))
        prefix = f"everystep/{turn}/"
        found = cls(dist.distributed_c10d.PrefixStore(prefix, _store_of(group)), rank, size, timeout_s=timeout_s)
        found._still = dist.is_initialized
        return found

    # -- messages of a round ------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """All ranks are about to do something together: leave the rounds behind that the others gave up because this one did not come.

        There nobody waits for it any more; who raised their error now would miss what the others do next.
        """
        if self._store is None:
            return
        self._meet()
        with self._reachable():
            while (data := self._look(f"{self._round}/failed")) is not None:
                if self.rank not in msgspec.msgpack.decode(data, type=Failure).late:
                    return
                self._enter_next()

    def _meet(self) -> None:
        handshake = self._handshake
        if handshake is not None and not handshake.is_over:
            try:
                with self._reachable():
                    handshake.meet(self.timeout_s)
            except AgentError as error:
                self.fail(error, late=handshake.late)
                raise

    def exchange(self, label: str, mine: object, *, timeout_s: float | None = None) -> list[Any]:
        """Every rank's message (plain values), by rank.

        Raises:
            CheckpointError: A rank failed (its error, with its rank), or did not come within the time (AgentError names it).
        """
        gathered = self.gather(label, mine, timeout_s=timeout_s)
        return list(self.share(label, gathered, timeout_s=timeout_s))

    def gather(self, label: str, mine: object, *, timeout_s: float | None = None) -> list[Any] | None:
        """Every rank's message at rank 0, None at the others."""
        if self._store is None:
            return [mine]
        base = self._gathered = self._next(label)
        if self.rank:
            self._write(f"{base}/{self.rank}", mine)
            self._given = self._number
            return None
        self._given = self._number
        until = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        return [mine, *(self._read(f"{base}/{rank}", label, until, came_from=rank, last=True) for rank in range(1, self.size))]

    def share(self, label: str, value: object = None, *, timeout_s: float | None = None) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self._store is None:
            return value
        base = self._next(label)
        if not self.rank:
            self._write(base, value)
            self._given = self._number
            return value
        self._given = self._number
        # Rank 0 may have waited its whole time for somebody else before it says so.
        until = time.monotonic() + 5.0 + 2 * (self.timeout_s if timeout_s is None else timeout_s)
        return self._read(base, label, until, came_from=0)

    def scatter(self, label: str, values: list[Any] | None, *, timeout_s: float | None = None) -> Any:
        """The value that rank 0 has for this rank."""
        if self._store is None:
            return (values or [None])[0]
        base = self._next(label)
        if not self.rank:
            for rank, value in enumerate(values or []):
                if rank:
                    self._write(f"{base}/{rank}", value)
            self._given = self._number
            return (values or [None])[0]
        self._given = self._number
        until = time.monotonic() + 5.0 + 2 * (self.timeout_s if timeout_s is None else timeout_s)
        return self._read(f"{base}/{self.rank}", label, until, came_from=0, last=True)

    @contextlib.contextmanager
    def agreeing(self, *expected: type[BaseException]) -> Iterator[None]:
        """What fails in here on this rank is told to all others, who wait for it; but for what is ``expected``."""
        try:
            yield
        except expected:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException, *, late: Sequence[int] = ()) -> None:
        """This rank gives the round up, and says why; nothing when the error is one that a round has ended with.

        Only while others are to come to a message of this round: a rank that fails after the last one would be a round ahead of them.
        """
        if self._store is None or is_told(error):
            return
        with contextlib.suppress(CheckpointError, dist.DistError, RuntimeError):  # the store is gone with rank 0: nobody can be told
            if self._handshake is not None and not self._handshake.is_over and not late:
                with contextlib.suppress(AgentError):
                    self._handshake.meet(min(_FAILING_S, self.timeout_s))
            if self._handshake is not None and self._handshake.space() is not None:  # else it has not met rank 0, and nobody reads it
                failure = msgspec.msgpack.encode(Failure.of(error, self.rank, self._given, late))
                self._kv.set(f"{self._round}/failed/{self.rank}", failure)  # type: ignore[arg-type]
                self._offer(f"{self._round}/failed", failure)
        self._leave(error)

    def _leave(self, error: BaseException) -> None:
        setattr(error, _TOLD, True)
        self._enter_next()

    def _enter_next(self) -> None:
        self._round += 1
        self._number = self._given = 0

    def _next(self, label: str) -> str:
        self._meet()
        self._number += 1
        return f"{self._round}/{self._number}-{label}"

    def _write(self, key: str, value: object) -> None:
        data = zlib.compress(msgspec.msgpack.encode(value), 1)
        chunks = [data[at : at + _CHUNK_NBYTES] for at in range(0, len(data), _CHUNK_NBYTES)]
        with self._reachable():
            for index, chunk in enumerate(chunks[1:], 1):
                self._kv.set(f"{key}/{index}", chunk)  # type: ignore[arg-type]
            self._kv.set(key, b"%d " % len(chunks) + chunks[0])  # type: ignore[arg-type]

    def _read(self, key: str, label: str, until: float, *, came_from: int, last: bool = False) -> Any:
        """A message, once it is there. ``last``: nobody else reads it, so that it need not be kept."""
        pause_s = _PAUSE_S
        with self._reachable():
            # Asked again and again: a wait that times out writes lines of its own into everybody's log.
            while not self._kv.check([key]):
                self._raise_if_failed(came_from)
                if time.monotonic() >= until:
                    self._raise_missing(label, came_from)
                time.sleep(pause_s)
                pause_s = min(_PAUSE_MAX_S, 1.5 * pause_s)
            count, _, first = bytes(self._kv.get(key)).partition(b" ")
            data = first + b"".join(bytes(self._kv.get(f"{key}/{index}")) for index in range(1, int(count)))
            if last:
                for one in (key, *(f"{key}/{index}" for index in range(1, int(count)))):
                    self._kv.delete_key(one)
        return msgspec.msgpack.decode(zlib.decompress(data))

    def _raise_if_failed(self, came_from: int) -> None:
        data = self._look(f"{self._round}/failed")
        if data is None:
            return
        # Of several that failed the first to say so stands; it may have come further than the one that is waited for.
        for told in (data, self._look(f"{self._round}/failed/{came_from}")):
            failure = None if told is None else msgspec.msgpack.decode(told, type=Failure)
            if failure is not None and failure.number < self._number:  # else it failed after this message: that is for the next one
                error = failure.error()
                self._leave(error)
                raise error

    def _raise_missing(self, label: str, came_from: int) -> None:
        # The rest of them, without waiting.
        rest = range(came_from + 1, self.size) if self._gathered else ()
        late = [came_from, *(rank for rank in rest if rank != self.rank and not self._kv.check([f"{self._gathered}/{rank}"]))]
        error = missing(late, label, self.timeout_s)
        self.fail(error, late=late)
        raise error

    # -- single keys, at any time ------------------------------------------------------------------------------------------------
    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        if self._store is not None:
            with self._reachable():
                self._kv.set(f"key/{key}", value)  # type: ignore[arg-type]

    def look(self, key: str) -> bytes | None:
        """A key's value, or None; does not wait."""
        if self._store is None:
            return None
        with self._reachable():
            return self._look(f"key/{key}")

    def glance(self, key: str) -> bytes | None:
        """What is known of a key without waiting for the network: a thread looks for it, by a connection of its own."""
        if self._store is None:
            return None
        if self._handshake is None or self._handshake.space() is None:
            return None  # nobody has anything to say before the ranks have met
        if self._lookout is None:
            apart, still = World(self._store, self.rank, self.size), self._still
            apart._space = self._handshake.space(_apart(self._store))

            def look(key: str) -> bytes | None:
                if not still():  # rank 0 may go any time now, and takes the store along
                    raise AgentError("the process group has been destroyed", kind="store-gone")
                return apart.look(key)

            self._lookout = Lookout(look, pause_s=EVERY_S + PER_RANK_S * self.size)
        return self._lookout.glance(key)

    def close(self) -> None:
        """Look out for nothing any more."""
        if self._lookout is not None:
            self._lookout.close()

    def offer(self, key: str, value: bytes) -> bytes:
        """Set a key unless it has a value; returns the value it has now."""
        if self._store is None:
            return value
        with self._reachable():
            return self._offer(f"key/{key}", value)

    def add(self, key: str, amount: int) -> int:
        """Count: add to a key that begins at 0; returns what it is now. A key that is counted is not ``put`` or ``offer``-ed."""
        if self._store is None:
            return amount
        with self._reachable():
            return int(self._kv.add(f"key/{key}", amount))

    def drop(self, key: str) -> None:
        """A key is needed no more."""
        if self._store is not None:
            with self._reachable():
                self._kv.delete_key(f"key/{key}")

    def _look(self, key: str) -> bytes | None:
        return bytes(self._kv.get(key)) if self._kv.check([key]) else None

    def _offer(self, key: str, value: bytes) -> bytes:
        return bytes(self._kv.compare_set(key, "", value))  # type: ignore[arg-type]

    @property
    def _kv(self) -> Store:
        if self._space is None:
            if self._handshake is None:
                raise AssertionError("a world of one rank has no store")
            if self._handshake.space() is None:
                self._handshake.meet(self.timeout_s)
            self._space = self._handshake.space()
        if self._space is None:
            raise AssertionError("the ranks have met, and the store has no part for them")
        return self._space

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise AgentError(f"the job's store cannot be reached: {error}", rank=0, kind="store-gone",
                             hint="rank 0, which holds it, has ended") from error  # fmt: skip


def _apart(store: Store) -> Store:
    """A connection of its own to the same store: a call that waits holds up all others on the same one."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    if clone is None:
        return store
    try:
        return clone()
    except RuntimeError:  # a kind of store that cannot be cloned
        return store


def _store_of(group: dist.ProcessGroup | None) -> Store:
    """A connection of our own to the group's store: waiting on the group's own would hold up the others who use it.

    torch has no public name for the store of a group.
    """
    from torch.distributed import distributed_c10d as c10d

    try:
        store: Store = c10d._get_process_group_store(group or c10d._get_default_group())  # noqa: SLF001
    except (AttributeError, KeyError) as error:
        hint = "make it with torch.distributed.init_process_group"
        raise ConfigError("the process group has no store", kind="group", hint=hint) from error
    return _apart(store)
