"""From a sealed snapshot to a committed checkpoint, one after the other, and what follows a commit: retention and the sweep.

One node's manifest is its part: nobody else waits for it. Several nodes write their files, then their parts, and each commits the
manifest once it has all parts; the manifests are equal to the byte, so it does not matter who is first. On a tier that all nodes see
the parts meet in the store; where each node has its own, the agents fetch each other's, and each commits to its own store.
A node that waits is patient with one that says "not yet", and gives up what another gave up, or whose agent is silent for ``SILENT_S``
(``OVER_S`` when the trainers have gone on to a newer attempt, whose saves wait behind this one).
On a shared tier giving up leaves a tombstone, so that nobody waits longer than he must. Where there are many nodes the others look only
for the manifest at first: parts that all of them read would be the square of their number.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from everystep.agent.persist import Snapshot, write
from everystep.agent.stats import AgentStats
from everystep.errors import AgentError, CheckpointError, ConflictError, StoreError
from everystep.manifest import Part, merge
from everystep.policy import Keep
from everystep.repository import CheckpointKey, Repository

_log = logging.getLogger(__name__)

SILENT_S = 60.0
"""A node whose agent does not answer for so long is not waited for."""
OVER_S = 3.0
"""The same when a newer attempt has begun."""
PATIENCE_S = 1800.0
"""Nor is one that has said "not yet" for so long."""
ASK_AFTER_S = 3.0
"""Parts that have not come to the store by then are asked for; at once when a newer attempt has begun: they may be lost with a node."""
_ANSWER_S, _GLANCE_S, _GLANCES = 5.0, 0.5, 4
_MANY, HEAD_START_S = 16, 5.0
"""Of more nodes than this each leaves the collecting of parts to the one before it for so long."""
_GRACE_S = 5.0
"""One node's manifest is as good as another's: who cannot write it looks for so long whether somebody else can."""
_PAUSE_S, _PAUSE_MAX_S = 0.01, 1.0
_FATES, _PARTS = 32, 4
"""What became of so many persists is known, and the parts of so many kept: nodes persist one after the other, in the same order."""
_FETCHING = 8


class Others(Protocol):
    """The other nodes (``agent/nodes.py``)."""

    def part(self, node: int, key: CheckpointKey, *, timeout_s: float) -> Part:
        """Their part once it is durable. AgentError: of kind "gone" when it will not come, "unreachable", or not yet ("timeout")."""
        ...

    def part_changed(self, key: CheckpointKey) -> None:
        """The part of this node is durable, or will not come."""
        ...

    def settled(self, key: CheckpointKey, error: str = "") -> None:
        """This node has committed it, or given it up."""
        ...


class Outcome(Protocol):
    """Who is told what became of a snapshot."""

    def persisted(self, slab: int, snapshot: Snapshot, timings: dict[str, float]) -> tuple[int, ...]:
        """It is committed. Returns the connections that sealed it."""
        ...

    def not_persisted(self, slab: int, snapshot: Snapshot, error: Exception, *, doomed: bool) -> None:
        """It is not; ``doomed``: it cannot be any more."""
        ...

    def forgotten(self, conns: tuple[int, ...], key: CheckpointKey) -> None:
        """Retention has deleted this one."""
        ...

    def kept(self) -> Keep:
        """What retention keeps."""
        ...

    def held(self) -> Collection[CheckpointKey]:
        """What somebody waits to read: retention leaves it for now."""
        ...

    def in_memory(self) -> Sequence[CheckpointKey]:
        """What may yet be committed."""
        ...

    def newest_attempt(self) -> int:
        """Of the trainers."""
        ...

    def unexpected(self, doing: str, error: BaseException) -> None:
        """An error that nobody foresaw."""
        ...


class Persister:
    """The persisting thread."""

    def __init__(self, repository: Repository, stats: AgentStats, outcome: Outcome, others: Callable[[], Others | None]) -> None:
        self._repository = repository
        self._stats = stats
        self._outcome = outcome
        self._others = others
        self._swept_for = -1
        self._fates: dict[CheckpointKey, Part | str] = {}
        self._telling = threading.Lock()
        self._ending = threading.Event()
        self._queue: queue.SimpleQueue[tuple[int, Snapshot] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="everystep-persist", daemon=True)
        self.last: CheckpointKey | None = None
        """What was committed last together with other nodes that have stores of their own."""
        self._thread.start()

    def start(self, slab: int, snapshot: Snapshot) -> None:
        """Persist it once those before it are through."""
        self._queue.put((slab, snapshot))

    def close(self, *, wait: bool) -> None:
        """End the thread; ``wait`` for what it is doing."""
        self._queue.put(None)
        if wait:
            self._thread.join()
        else:
            self._ending.set()

    def fate(self, key: CheckpointKey) -> Part | None:
        """This node's part once it is durable; None: that is not known. AgentError (kind "gone"): it will not come."""
        with self._telling:
            known = self._fates.get(key)
        if isinstance(known, str):
            raise AgentError(known, step=key.step, kind="gone")
        return known

    def _note(self, key: CheckpointKey, fate: Part | str) -> None:
        with self._telling:
            self._fates.pop(key, None)
            self._fates[key] = fate
            parts = [known for known, what in self._fates.items() if isinstance(what, Part)]
            for known in [*parts[:-_PARTS], *list(self._fates)[:-_FATES]]:
                self._fates.pop(known, None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            slab, snapshot = item
            try:
                self._persist(slab, snapshot)
            except Exception as error:  # the agent's top: what comes after the commit must not end the commits to come
                self._outcome.unexpected(f"tidying up after {snapshot.key}", error)

    def _persist(self, slab: int, snapshot: Snapshot) -> None:
        key, team = snapshot.key, snapshot.team
        timings = {"queue": time.monotonic() - snapshot.sealed_at}
        others = self._others() if team.nodes > 1 else None
        try:
            if others is None:
                self._commit_alone(snapshot, timings)
            else:
                self._commit_together(snapshot, others, timings)
        except Exception as error:  # whatever it is, the trainer is told, and the slab stays
            if not isinstance(error, (CheckpointError, OSError)):
                self._outcome.unexpected(f"persisting {key}", error)
            end = self._given_up(snapshot, error)
            if end != "committed":
                if end != "left":
                    self._note(key, str(error))
                self._outcome.not_persisted(slab, snapshot, error, doomed=end == "doomed")
                if others is not None:
                    others.settled(key, str(error))
                return
        timings["total"] = time.monotonic() - snapshot.sealed_at
        if others is not None:
            self.last = None if team.shared else key
            others.settled(key)
        conns = self._outcome.persisted(slab, snapshot, timings)
        if not team.keeps_house:
            return
        for gone in forget_unkept(self._repository, self._outcome.kept(), self._stats, held=self._outcome.held()):
            self._outcome.forgotten(conns, gone)
        if self._swept_for != key.attempt:
            self._swept_for = key.attempt
            in_progress = () if team.alone else self._outcome.in_memory()
            sweep_leftovers(self._repository, key.attempt, self._stats, alone=team.alone, in_progress=in_progress)

    def _commit_alone(self, snapshot: Snapshot, timings: dict[str, float]) -> None:
        part = write(self._repository, snapshot, timings)
        began = time.monotonic()
        if snapshot.pin:
            self._repository.pin(snapshot.key, reason="pinned by the save")  # before retention can see it
        self._repository.commit(merge([part]))
        timings["commit"] = time.monotonic() - began

    def _commit_together(self, snapshot: Snapshot, others: Others, timings: dict[str, float]) -> None:
        repository, key = self._repository, snapshot.key
        part = write(repository, snapshot, timings)
        began = time.monotonic()
        repository.put_part(part)
        timings["part"] = time.monotonic() - began
        self._note(key, part)
        others.part_changed(key)
        began = time.monotonic()
        meeting = _Meeting(repository, others, part, self._ending, lambda: self._outcome.newest_attempt() > key.attempt)
        parts = meeting.in_store() if snapshot.team.shared else meeting.by_agents()
        timings["meet"] = time.monotonic() - began
        if parts is None:
            return  # another node has committed it meanwhile
        began = time.monotonic()
        if snapshot.pin:
            repository.pin(key, reason="pinned by the save")
        try:
            repository.commit(merge(parts))
        except StoreError:
            if not snapshot.team.shared or not meeting.committed_by_others():
                raise
        timings["commit"] = time.monotonic() - began

    def _given_up(self, snapshot: Snapshot, error: Exception) -> str:
        """Free the space of a save that failed, and say so where others wait for it.

        Returns "committed" where another node has committed it, "doomed" when nobody can any more, "left" when it is left to the other
        nodes, else "". If the giving up fails too, the sweep does it; the first error is the one to tell.
        """
        key, team = snapshot.key, snapshot.team
        try:
            if team.nodes == 1:
                if not isinstance(error, ConflictError):  # else another one's data may be there now: the sweep knows which is whose
                    self._repository.forget(key, sole_committer=True)
                return ""
            if isinstance(error, ConflictError) and error.kind == "committed":
                return "committed"
            if isinstance(error, ConflictError) and error.kind != "forgotten":
                return ""
            durable = isinstance(self._fates.get(key), Part)
            if durable and isinstance(error, AgentError) and error.kind == "ending":
                return "left"  # this agent has no time to wait for the others, but they need nothing more of it
            if not team.shared and durable:
                return ""  # others may have it by now, and commit
            self._repository.give_up(key, f"node {team.node}: {error}")
        except ConflictError as late:
            if late.kind == "committed":
                return "committed"
            _log.warning("what the failed save %s wrote is still there: %s", key, late)
            return ""
        except (CheckpointError, OSError) as failed:
            _log.warning("what the failed save %s wrote is still there: %s", key, failed)
            return ""
        return "doomed"


class _Meeting:
    """One step's parts coming together."""

    def __init__(
        self, repository: Repository, others: Others, part: Part, ending: threading.Event, over: Callable[[], bool]
    ) -> None:  # fmt: skip
        self._repository = repository
        self._others = others
        self._key = CheckpointKey(part.step, part.attempt)
        self._nodes = part.nodes
        self._parts = {part.node: part}
        self._began = time.monotonic()
        self._reads_at = self._began + (HEAD_START_S * part.node if part.nodes > _MANY else 0.0)
        self._asked_at: dict[int, float] = {}
        self._silent_since: dict[int, float] = {}
        self._ending = ending
        self._over = over
        self._failed = threading.Event()

    def in_store(self) -> list[Part] | None:
        """All parts, by way of the store; None when somebody has committed them."""
        repository, key = self._repository, self._key
        pause_s = _PAUSE_S
        asks_at = self._reads_at + ASK_AFTER_S
        while True:
            if time.monotonic() >= self._reads_at:
                for node in repository.parts_there(key) - self._parts.keys():
                    self._parts[node] = repository.read_part(key, node)
            if len(self._parts) == self._nodes:
                return list(self._parts.values())
            if repository.committed(key):
                return None
            reason = repository.given_up(key)
            if reason is not None:
                raise AgentError(f"step {key.step} is given up: {reason}", step=key.step, kind="given-up")
            if time.monotonic() >= asks_at or (self._over() and not self._asked_at):
                # A few in turn: meanwhile the store is not looked at.
                for node in sorted(self._missing(), key=lambda node: self._asked_at.get(node, 0.0))[:_GLANCES]:
                    self._ask(node, timeout_s=_GLANCE_S)
                asks_at = time.monotonic() + ASK_AFTER_S
            self._pause(pause_s)
            pause_s = min(_PAUSE_MAX_S, pause_s * 1.5)

    def by_agents(self) -> list[Part]:
        """All parts, by asking for them."""
        missing = self._missing()
        with ThreadPoolExecutor(min(_FETCHING, len(missing)), thread_name_prefix="everystep-parts") as pool:
            for done in [pool.submit(self._fetch, node) for node in missing]:
                done.result()
        return list(self._parts.values())

    def committed_by_others(self) -> bool:
        """Whether the manifest comes to be in the store without this node."""
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until:
            try:
                if self._repository.committed(self._key):
                    return True
            except StoreError as error:
                _log.debug("whether %s is committed cannot be seen: %s", self._key, error)
            self._pause(0.2)
        return False

    def _missing(self) -> list[int]:
        return [node for node in range(self._nodes) if node not in self._parts]

    def _fetch(self, node: int) -> None:
        pause_s = _PAUSE_S
        while node not in self._parts and not self._failed.is_set():
            try:
                self._ask(node, timeout_s=_ANSWER_S)
                if node not in self._parts:
                    self._pause(pause_s)
            except BaseException:
                self._failed.set()
                raise
            pause_s = min(_PAUSE_MAX_S, pause_s * 1.5)

    def _ask(self, node: int, *, timeout_s: float) -> None:
        """Ask for a part. Raises when there is no point in waiting for it."""
        step = self._key.step
        self._asked_at[node] = time.monotonic()
        try:
            part = self._others.part(node, self._key, timeout_s=timeout_s)
            if (part.step, part.attempt, part.node) != (self._key.step, self._key.attempt, node):
                message = f"node {node} has sent the part of step {part.step} of node {part.node}"
                raise AgentError(message, step=step, kind="protocol")
            self._parts[node] = part
        except (AgentError, StoreError) as error:
            now = time.monotonic()
            if error.kind in ("gone", "protocol"):
                raise AgentError(f"node {node} has given it up: {error.message}", step=step, kind="given-up") from error
            if error.kind not in ("unreachable", "lost"):
                self._silent_since.pop(node, None)
            elif now - self._silent_since.setdefault(node, self._asked_at[node]) > (silent_s := OVER_S if self._over() else SILENT_S):
                message = f"the agent of node {node} has not answered for {silent_s:g} s: {error.message}"
                raise AgentError(message, step=step, kind="unreachable", hint="see the log of that node's agent") from error
            if now - self._began > PATIENCE_S:
                message = f"node {node} has not written its part within {PATIENCE_S:g} s"
                raise AgentError(message, step=step, kind="timeout", hint="see the log of that node's agent") from error

    def _pause(self, seconds: float) -> None:
        if self._ending.wait(seconds):
            raise AgentError(f"step {self._key.step} is given up: the agent is ending", step=self._key.step, kind="ending")


def sweep_leftovers(repository: Repository, attempt: int, stats: AgentStats, *, alone: bool = True,
                    in_progress: Sequence[CheckpointKey] = ()) -> None:  # fmt: skip
    """Delete what a killed agent or trainer has left behind. Only between persists: then nothing of this agent's is half written."""
    try:
        if repository.newest_attempt() != attempt:
            return  # somebody else may be writing the newer one
        freed = repository.sweep(repository.plan_sweep(now=time.time(), sole_committer=alone, in_progress=in_progress))
    except CheckpointError as error:
        stats.count("sweep_failures")
        _log.warning("what killed processes left behind could not be swept: %s", error)
        return
    if freed:
        stats.count("bytes_swept", freed)
        _log.info("swept %d bytes that killed processes had left behind", freed)


def forget_unkept(
    repository: Repository, keep: Keep, stats: AgentStats, *, held: Collection[CheckpointKey] = ()
) -> Iterable[CheckpointKey]:
    """Do what retention decides, but for what is ``held``; returns what is gone.

    A store that fails is told in the log and counted: the next commit tries again.

    No tombstones are needed, also with several nodes: what goes is older than a committed one, and a node that has put its part of that
    one is through with the older, since it persists one after the other.
    """
    gone = []
    began = time.monotonic()
    try:
        for kept in repository.retention(keep, now=time.time()):
            if kept.keep:
                continue
            key = CheckpointKey.parse(kept.key)
            if key in held:
                continue
            try:
                repository.forget(key, sole_committer=True)
            except ConflictError as error:
                _log.info("%s stays for now: %s", key, error)  # pinned or held since the decision
                continue
            _log.info("step %d of attempt %d forgotten: %s", key.step, key.attempt, kept.reason)
            gone.append(key)
    except CheckpointError as error:
        stats.count("retention_failures")
        _log.warning("old checkpoints could not be forgotten: %s", error)
    if gone:
        stats.observe({"forget": time.monotonic() - began})
        stats.count("forgotten", len(gone))
    return gone
