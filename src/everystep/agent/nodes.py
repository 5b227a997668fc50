"""What the agents of one job tell each other: what is sealed, complete, to be persisted and durable; and what they give each other.

Theory of operation. The lead is node 0. Every node tells it what it has sealed, will not seal, wants on disk and has settled; the lead
tells every node its verdict. Both are states and not events: a message holds all that the other may not know yet, so that one that is lost,
late or repeated does no harm, and of several only the newest is sent. For each destination there is one such message at most, sent by a few
threads; one that cannot be reached is tried again, ever more slowly, and holds up nobody else. Nothing here waits for a peer but ``part``
and ``wait_settled``, and these for a time that is told.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from everystep.agent.lead import Lead
from everystep.agent.messages import PeerAddress, SnapshotSummary
from everystep.agent.peers import PeerClient
from everystep.agent.posts import Posts
from everystep.agent.replicas import Replicas
from everystep.agent.talk import HOLD_S, RunToken, SealedSteps, SettledSteps, Verdict
from everystep.errors import AgentError, CheckpointError, ConfigError, NotFoundError
from everystep.manifest import Part
from everystep.policy import duration_s
from everystep.repository import CheckpointKey

if TYPE_CHECKING:
    from everystep.agent.peerserver import PeerServer
    from everystep.agent.routes import Routes

_log = logging.getLogger(__name__)
LEAD = 0
_POST_TIMEOUT_S = 5.0
_FLUSH_S = 2.0
"""At the end, how long the last news to those who can be reached are waited for."""
_POLL_S = 20.0
_PART_PAUSE_S = 0.25
_SETTLED = 64
_FAILED = 64
_Message = TypeVar("_Message", bound=msgspec.Struct)


class Held(Protocol):
    """A snapshot that stays as it is until ``release``."""

    part: bytes
    """Encoded part record; its object keys are file names."""
    file_offsets: tuple[int, ...]
    """Where each of the part's ``objects`` begins in the slab."""
    nbytes: int
    """Of the slab that the files take."""
    view: memoryview

    def release(self) -> None:
        """Called once; nothing is read after it."""
        ...


class Side(Protocol):
    """What the nodes' talk needs of this agent. Its methods are called from threads of ``Nodes`` or of its server, without a lock held."""

    def completed(self, key: CheckpointKey, persist: bool) -> None:
        """All nodes have sealed ``key``; ``persist``: and it is to be persisted. May be repeated, with ``persist`` later than without;
        after a newer one only to be persisted. Where it is not there any more: ``settled(key, why)``."""
        ...

    def keep(self, keys: Sequence[CheckpointKey]) -> None:
        """These snapshots, and no others, stay in memory though newer ones are complete: other nodes copy them or have copied them. Told
        before ``completed`` of a newer one; one of them may not be known to be complete here yet."""
        ...

    def note(self, name: str, text: str) -> None:
        """Set a line of the agent's statistics; empty: there is nothing to say."""
        ...

    def failed(self, key: CheckpointKey, node: int, reason: str) -> None:
        """``key`` will never be complete, by the fault of ``node`` (-1: nobody's). May be repeated."""
        ...

    def local_snapshots(self) -> Sequence[SnapshotSummary]:
        """This node's own complete snapshots, newest first."""
        ...

    def hold(self, key: CheckpointKey) -> Held:
        """This node's share of a snapshot, for reading. May compute digests first. NotFoundError when it is not there."""
        ...

    def local_part(self, key: CheckpointKey) -> Part | None:
        """This node's part, once its data are durable; None: not yet. A CheckpointError says why it will not come."""
        ...

    def object_nbytes(self, object_key: str) -> int:
        """Size of an object of this agent's store."""
        ...

    def read_object(self, object_key: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from an object of this agent's store."""
        ...

    def count(self, name: str, by: int = 1) -> None:
        """Raise a counter of the agent's statistics."""
        ...


@dataclasses.dataclass
class _Own:
    """What this node has to tell and has been told, of one attempt. Guarded by the lock of ``Nodes``."""

    attempt: int = 0
    open: set[int] = dataclasses.field(default_factory=set)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    wanted: set[int] = dataclasses.field(default_factory=set)
    complete: int | None = None
    persisted: set[int] = dataclasses.field(default_factory=set)
    all_settled: int | None = None
    unsettled: tuple[int, ...] = ()
    told_failed: set[int] = dataclasses.field(default_factory=set)
    copy: int | None = None
    copied: int | None = None
    copied_here: tuple[int, str] | None = None
    """As in ``SealedSteps.copied``."""


class Nodes:
    """The nodes of one job, as seen from one of them. Thread-safe.

    With one node nothing is sent and ``side`` is called before ``sealed`` returns; with several it is called from threads of this object.

    Args:
        side: This agent.
        run_id: Of the run; peers of another run are refused.
        hold_s: How long a snapshot is held for a reader that does not read.
        post_timeout_s: How long one message to another agent may take.
    """

    def __init__(self, side: Side, run_id: str, *, hold_s: float = HOLD_S, post_timeout_s: float = _POST_TIMEOUT_S) -> None:
        self.run_id = run_id
        self._side = side
        self._post_timeout_s = post_timeout_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._hearing = threading.RLock()
        self._opening = threading.Lock()
        self._node = 0
        self._nodes = 1
        self._lead = Lead(1, None)
        self._own = _Own()
        self._spread_verdict: Verdict | None = None
        self._sender = os.urandom(8).hex()
        self._senders: dict[int, str] = {}
        self._settled: list[tuple[int, int, str]] = []
        self._settled_told = 0
        """How many of ``_settled`` the present lead has been told."""
        self._addresses: dict[int, PeerAddress] = {}
        self._here = 0
        """This node's number among the addresses: a job that has not begun its attempt yet may have given it another than ``_node``."""
        self._readdressed = False
        """Nodes may bear other numbers than when what is under way was sealed."""
        self._clients: dict[int, PeerClient] = {}
        self._problems: dict[int, str] = {}
        self._token: bytes = b""
        self._server: PeerServer | None = None
        self._closed = False
        self._hold_s = hold_s
        self._routes: Routes | None = None
        self._posts = Posts(self._deliver, self._note)
        self._copies = False
        self._keep: tuple[CheckpointKey, ...] = ()
        """What this node keeps, own snapshots and copies, whatever newer ones are complete; rising."""
        self._uncopied = ""
        self.replicas = Replicas(self._client, count=side.count, done=self._copied)

    # -- what the agent does with it ---------------------------------------------------------------------------------------------
    @property
    def node(self) -> int:
        """Which node this is."""
        return self._node

    def configure(self, attempt: int, node: int, nodes: int, cadence_disk: float | str | bool | None, replicas: int = 0,
                  replica_nbytes_s: int | None = None) -> None:  # fmt: skip
        """Begin an attempt. Asked again with the same arguments: nothing changes.

        Args:
            attempt: Of the ranks.
            node: This node's number.
            nodes: How many there are.
            cadence_disk: As in ``messages.Configure``. None and durations: the lead decides what is persisted.
            replicas: Copies of each node's newest complete snapshot on other nodes.
            replica_nbytes_s: Bandwidth that this node's pulls of copies may take; None: all there is.
        """
        pace_s: float | None = None
        if cadence_disk is None:
            pace_s = 0.0
        elif isinstance(cadence_disk, str):
            pace_s = duration_s(cadence_disk)
        elif isinstance(cadence_disk, float):
            pace_s = cadence_disk
        with self._lock:
            if (node, nodes, pace_s) != (self._node, self._nodes, self._lead.pace_s):
                if (node, nodes) == (self._node, self._nodes):
                    self._lead.pace_s = pace_s
                else:
                    self._node, self._nodes, self._own, self._sender = node, nodes, _Own(), os.urandom(8).hex()
                    self._lead, self._senders = Lead(nodes, pace_s, self._sender), {}
            self._copies = self._lead.copies = replicas > 0 and nodes > 1
            self._lead.ensure(attempt)
            self._turn(attempt)
            self._number_server()
        self.replicas.configure(node, replicas, limit_nbytes_s=replica_nbytes_s)
        self._greet()

    def open(self, token: bytes, host: str, port: int = 0) -> tuple[str, int]:
        """Listen for peers; returns where. Asked again for the same host nothing changes but the token.

        Raises:
            AgentError: ``kind`` "port": the address cannot be listened on.
            ConfigError: The token is too short.
        """
        from everystep.agent.peerserver import PeerServer
        from everystep.agent.routes import Routes

        run_token = RunToken(token)
        with self._opening:  # every rank of a node asks
            if self._routes is None:
                self._routes = Routes(self._side, self.replicas, run_id=self.run_id, node=lambda: self._node, take_post=self._take_post,
                                      wait_part=self._local_part, hold_s=self._hold_s)  # fmt: skip
            server = self._server
            if server is not None and server.host == host and port in (0, server.port):
                server.retoken(run_token)
            else:
                if server is not None:
                    server.close()
                    self._server = None
                server = PeerServer(run_token, host, port, serve=self._routes.serve)
                self._routes.may_wait = server.may_wait
            with self._lock:
                stale = self._drop_clients() if self._token != token else []
                self._server, self._token = server, token
                self._number_server()
        for client in stale:
            client.close()
        return server.host, server.port

    def set_peers(self, addresses: Sequence[PeerAddress], node: int) -> None:
        """All nodes' agents, this one's among them."""
        known = {address.node: address for address in addresses}
        if len(known) != len(addresses) or node not in known:
            raise ConfigError(f"the peers' addresses {sorted(known)!r:.80} are not one for each node, {node} among them", kind="peers")
        with self._lock:
            stale = self._drop_clients() if known != self._addresses else []
            self._readdressed = self._readdressed or (bool(self._addresses) and known != self._addresses)
            self._addresses, self._here = known, node
            self._problems.clear()
            self._number_server()
        for client in stale:
            client.close()
        self.replicas.set_peers(addresses)
        self._posts.hurry()
        self._greet()

    def sealed(self, key: CheckpointKey) -> None:
        """All ranks of this node have sealed ``key``."""
        self._report(key, lambda own: own.open.add(key.step))

    def failed(self, key: CheckpointKey, reason: str) -> None:
        """This node will never seal ``key``."""

        def note(own: _Own) -> None:
            own.open.discard(key.step)
            own.failed[key.step] = reason[:500]
            while len(own.failed) > _FAILED:
                del own.failed[min(own.failed)]

        self._report(key, note)

    def wanted(self, key: CheckpointKey) -> None:
        """This node wants ``key`` on disk: once it is complete, all persist it."""

        def note(own: _Own) -> None:
            if key.step not in own.persisted:  # else the lead has said so already
                own.wanted.add(key.step)

        self._report(key, note)

    def settled(self, key: CheckpointKey, error: str = "") -> None:
        """This node has committed ``key``, or, with an error, given it up."""
        with self._lock:
            if self._node == LEAD:
                self._lead.settled(LEAD, key.attempt, key.step, time.monotonic())
            else:
                self._settled.append((key.step, key.attempt, error[:500]))
                surplus = max(0, len(self._settled) - _SETTLED)
                del self._settled[:surplus]
                self._settled_told = max(0, self._settled_told - surplus)
            self._changed.notify_all()
        self._spread()

    def _copied(self, key: CheckpointKey, problem: str) -> None:
        """This node is done with the copies of this step."""

        def note(own: _Own) -> None:
            own.copied_here = key.step, problem[:500]

        self._report(key, note)

    def part_changed(self, key: CheckpointKey) -> None:
        """``side.local_part(key)`` may answer differently now."""
        with self._lock:
            self._changed.notify_all()

    def part(self, node: int, key: CheckpointKey, *, timeout_s: float) -> Part:
        """A node's part of ``key`` once its data are durable.

        Raises:
            AgentError: It will not come (``kind`` "gone"), it did not come in time ("timeout"), or its node could not be reached until
                then ("unreachable").
        """
        until = time.monotonic() + timeout_s
        failure: CheckpointError | None = None
        while (left := until - time.monotonic()) > 0 and not self._closed:
            found = None
            try:
                found = self._part_of(node, key, until, wait_s=min(left, _POLL_S))
                failure = None
            except AgentError as error:
                if error.kind not in ("unreachable", "busy"):
                    raise
                failure = error
            if found is not None:
                return found
            with self._lock:
                self._changed.wait_for(lambda: self._closed, timeout=max(0.0, min(_PART_PAUSE_S, until - time.monotonic())))
        self._side.count("parts_not_come")
        if failure is not None:
            raise failure
        raise AgentError(f"the part of node {node} of step {key.step} did not come within {timeout_s:g} s", step=key.step, kind="timeout",
                         hint="see the log of that node's agent")  # fmt: skip

    def _part_of(self, node: int, key: CheckpointKey, until: float, *, wait_s: float) -> Part | None:
        """Ask for a part, once. Where the nodes may bear other numbers by now the others are asked too; "gone" if none of them has it."""
        with self._lock:
            over = key.attempt < self._own.attempt
            others = [one for one in self._addresses if one not in (node, self._here)] if over or self._readdressed else []
            own = node == self._node and not over
            asked = [*([node] if not over or (node in self._addresses and node != self._here) else []), *others]
        waits = False
        failure: AgentError | None = None
        for number, one in enumerate(asked):
            first = not number and not over
            try:
                found = self._local_part(key, until) if own and first else self._client(one).part(key, wait_s=wait_s if first else 0.0)
            except AgentError as error:
                if error.kind not in ("gone", "unreachable", "busy") or (first and (error.kind != "gone" or not others)):
                    raise
                if failure is None or failure.kind == "gone":  # one that is silent may be the one that has it
                    failure = error
                continue
            if (found is None and first) or (found is not None and (found.node == node or not others)):
                return found
            waits = waits or found is None
            if time.monotonic() >= until:
                return None
        if waits:
            return None
        if failure is not None:
            raise failure
        raise AgentError(f"no node has the part of what was node {node} at step {key.step}", step=key.step, kind="gone")

    def wait_settled(self, key: CheckpointKey, *, timeout_s: float) -> bool:
        """Wait until all nodes have committed ``key`` or given it up; False when that takes longer than ``timeout_s``."""

        def over() -> bool:
            own = self._own
            return (
                self._closed
                or own.attempt > key.attempt
                or (
                    own.attempt == key.attempt
                    and own.all_settled is not None
                    and own.all_settled >= key.step
                    and key.step not in own.unsettled
                )
            )

        with self._lock:
            return self._changed.wait_for(over, timeout=timeout_s) and not self._closed

    def problems(self) -> dict[int, str]:
        """Why which node cannot be told anything at present."""
        with self._lock:
            return dict(self._problems)

    def close(self) -> None:
        """End the talk: threads, server, holds, copies."""
        self._posts.close(flush_s=_FLUSH_S)
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            server, self._server = self._server, None
            clients = self._drop_clients()
        self.replicas.stop()
        for client in clients:
            client.close()
        self._posts.join(timeout_s=_FLUSH_S)
        self.replicas.close()
        if server is not None:
            server.close()
        if self._routes is not None:
            self._routes.holds.close()

    # -- telling ----------------------------------------------------------------------------------------------------------------------
    def _report(self, key: CheckpointKey, note: Callable[[_Own], None]) -> None:
        with self._lock:
            self._turn(key.attempt)
            if key.attempt != self._own.attempt:
                return  # of an attempt that is over
            note(self._own)
            again = self._node == LEAD and self._take_report(self._reported()) and self._nodes > 1
        if again:
            self._posts.mark([LEAD])  # it may be about what this node has been told before it sealed it
        self._spread()

    def _turn(self, attempt: int) -> None:
        if attempt > self._own.attempt:
            self._own = _Own(attempt=attempt)

    def _reported(self) -> SealedSteps:
        own = self._own
        return SealedSteps(node=self._node, attempt=own.attempt, steps=tuple(sorted(own.open)), failed=tuple(sorted(own.failed.items())),
                           wanted=tuple(sorted(own.wanted)), copied=own.copied_here, sender=self._sender)  # fmt: skip

    def _take_report(self, report: SealedSteps) -> bool:
        """The lead hears a node, with the lock held; whether there is news for all."""
        lead, now = self._lead, time.monotonic()
        news = [lead.failed(report.node, report.attempt, step, reason) for step, reason in report.failed]
        news.append(lead.sealed(report.node, report.attempt, report.steps, now))
        news.append(lead.wanted(report.node, report.attempt, report.wanted, now))
        if report.copied is not None:
            news.append(lead.copied(report.node, report.attempt, *report.copied, now))
        return any(news)

    def _greet(self) -> None:
        """Let the others hear from this agent, perhaps a new one, so that they tell it what it does not know."""
        with self._lock:
            known = self._nodes > 1 and len(self._addresses) > 1
            others = [node for node in range(self._nodes) if node != self._node] if self._node == LEAD else [LEAD]
        if known:
            self._posts.mark(others)

    def _spread(self) -> None:
        """Something has changed here: let those know whom it concerns."""
        with self._lock:
            alone, lead = self._nodes == 1, self._node == LEAD
            verdict = self._lead.verdict()
            news = self._news(verdict) if lead else False
            others = [node for node in range(self._nodes) if node != self._node] if news else []
        if alone:
            self._hear(verdict)
        elif lead:
            if news:
                self._posts.mark([LEAD, *others])
        else:
            self._posts.mark([LEAD])

    def _news(self, verdict: Verdict) -> bool:
        if verdict == self._spread_verdict:
            return False
        self._spread_verdict = verdict
        return True

    def _deliver(self, destination: int) -> None:
        with self._lock:
            lead, node = self._node == LEAD, self._node
            verdict = self._lead.verdict()
            report, settled, known = self._reported(), tuple(self._settled[self._settled_told :]), self._senders.get(LEAD)
        if destination == node:
            if lead:
                self._hear(verdict)
            return
        client = self._client(destination)
        if lead:
            client.post("complete", verdict)
            return
        if report.attempt:
            client.post("sealed", report)
        if settled:
            client.post("settled", SettledSteps(node=node, settled=settled))
        with self._lock:
            if self._senders.get(LEAD) == known and settled and settled[-1] in self._settled:
                self._settled_told = len(self._settled) - self._settled[::-1].index(settled[-1])

    def _note(self, destination: int, failure: CheckpointError | None) -> None:
        with self._lock:
            before = self._problems.pop(destination, None)
            if failure is not None:
                self._problems[destination] = str(failure)
        if failure is not None:
            self._side.count("peer_failures")
            if before is None:
                _log.warning("node %d is not told: %s", destination, failure)
        elif before is not None:
            _log.info("node %d is told again", destination)

    # -- hearing ----------------------------------------------------------------------------------------------------------------------
    def _hear(self, verdict: Verdict) -> None:
        """Take the lead's verdict in and tell ``side`` what is new in it, one verdict at a time."""
        with self._lock:
            new_lead = self._nodes > 1 and self._node != LEAD and self._senders.get(LEAD) != verdict.sender
            if new_lead:  # it knows nothing of what the one before was told
                self._senders[LEAD], self._settled_told = verdict.sender, 0
        if new_lead:
            self._posts.mark([LEAD])
        with self._hearing:
            completes: list[tuple[int, bool]] = []
            with self._lock:
                self._turn(verdict.attempt)
                own = self._own
                if verdict.attempt != own.attempt:
                    return
                failed = [one for one in verdict.failed if one[0] not in own.told_failed]
                own.told_failed = {step for step, _, _ in verdict.failed}
                to_persist = [step for step in verdict.persist if step not in own.persisted]
                own.persisted = set(verdict.persist)
                completes += [(step, True) for step in to_persist]
                newest = verdict.complete
                if newest is not None and (own.complete is None or newest > own.complete):
                    own.complete = newest
                    own.open = {step for step in own.open if step > newest}
                    if newest not in to_persist:
                        completes.append((newest, False))
                own.open -= own.told_failed
                below = verdict.lost_below
                fallen = [] if below is None else sorted(step for step in own.open if step <= below)
                own.open -= set(fallen)
                own.wanted -= set(fallen)
                own.failed = {
                    step: why
                    for step, why in own.failed.items()
                    if step not in own.told_failed and (newest is None or step > newest)
                }  # fmt: skip
                own.wanted -= own.told_failed | own.persisted
                if verdict.settled is not None:
                    own.wanted = {step for step in own.wanted if step > verdict.settled}
                own.all_settled, own.unsettled = verdict.settled, verdict.persist
                kept, copy = self._to_keep(verdict)
                if copy is not None and copy.step != newest and not any(step == copy.step for step, _ in completes):
                    completes.append((copy.step, False))  # else a newer one that is complete would have it given up here
                uncopied, noted, self._uncopied = verdict.uncopied, self._uncopied, verdict.uncopied
                self._changed.notify_all()
            if kept is not None:
                self._side.keep(kept)
                self.replicas.keep(kept)
            if copy is not None:
                self.replicas.copy(copy)
            elif not self._copies and newest is not None and any(step == newest for step, _ in completes):
                self.replicas.drop_older(CheckpointKey(newest, verdict.attempt))
            if uncopied != noted:
                self._side.note("copies", uncopied and f"the copies in other nodes' memory are not renewed: {uncopied}")
            for step, node, reason in failed:
                self._side.failed(CheckpointKey(step, verdict.attempt), node, reason)
            for step in fallen:
                self._side.failed(CheckpointKey(step, verdict.attempt), -1, "another node has not saved it")
            for step, persist in sorted(completes):
                self._side.completed(CheckpointKey(step, verdict.attempt), persist)

    def _to_keep(self, verdict: Verdict) -> tuple[tuple[CheckpointKey, ...] | None, CheckpointKey | None]:
        """What this node keeps from now on (None: as it was), and what it is to copy (None: nothing new). With the lock held.

        An attempt that has no step copied yet keeps what the one before kept: that may be all that a node lost now can be restored from.
        A lead that has lost its memory takes nothing back.
        """
        own, before = self._own, self._keep
        if not self._copies:
            self._keep = () if verdict.complete is not None else before
            return (self._keep if self._keep != before else None), None
        news = verdict.copy is not None and (own.copy is None or verdict.copy > own.copy)
        if news:
            own.copy = verdict.copy
        if verdict.copied is not None and (own.copied is None or verdict.copied > own.copied):
            own.copied = verdict.copied
        older = [key for key in before if key.attempt < own.attempt] if own.copied is None else []
        mine = {CheckpointKey(step, own.attempt) for step in (own.copied, own.copy) if step is not None}
        self._keep = (*older[:1], *older[1:][-1:], *sorted(mine, key=lambda key: key.step))
        copy = CheckpointKey(verdict.copy, own.attempt) if news and verdict.copy is not None else None
        return (self._keep if self._keep != before else None), copy

    # -- serving ----------------------------------------------------------------------------------------------------------------------
    def _take_post(self, path: str, body: bytes) -> None:
        if path not in ("complete", "sealed", "settled"):
            raise NotFoundError(f"there is nothing to tell at {path!r:.80}", kind="route")
        if path == "complete":
            verdict = _decoded(body, Verdict)
            self._posts.hurry([LEAD])
            if self._nodes > 1:  # else no attempt has begun here: the lead is asked again when one does
                self._hear(verdict)
            return
        with self._lock:
            if self._node != LEAD:
                raise AgentError(f"node {self._node} is not the lead", kind="other-node")
            if path == "sealed":
                report = _decoded(body, SealedSteps)
                self._check_node(report.node)
                met = self._senders.get(report.node) == report.sender
                if not met and report.node in self._senders:
                    self._lead.forgets(report.node)
                self._senders[report.node] = report.sender
                if self._take_report(report) or not met:
                    self._posts.mark([report.node])  # perhaps it missed the last verdict
                self._posts.hurry([report.node])
            else:
                settled = _decoded(body, SettledSteps)
                self._check_node(settled.node)
                for step, attempt, error in settled.settled:
                    self._lead.settled(settled.node, attempt, step, time.monotonic())
                    if error:
                        _log.warning("node %d could not persist step %d: %s", settled.node, step, error)
        self._spread()

    def _check_node(self, node: int) -> None:
        if not 0 < node < self._nodes:
            raise AgentError(f"node {node} is none of the {self._nodes} of this job", kind="other-node")

    def _local_part(self, key: CheckpointKey, until: float) -> Part | None:
        while True:
            found = self._side.local_part(key)
            left = until - time.monotonic()
            if found is not None or left <= 0 or self._closed:
                return found
            with self._lock:
                self._changed.wait(min(left, 1.0))

    # -- inside -----------------------------------------------------------------------------------------------------------------------
    def _client(self, node: int) -> PeerClient:
        with self._lock:
            if self._closed:
                raise AgentError("the agent ends", kind="ending")
            client = self._clients.get(node)
            if client is None:
                address = self._addresses.get(node)
                if address is None or not self._token:
                    raise AgentError(f"the address of node {node} is not known", kind="unreachable")
                client = PeerClient(address, token=self._token, run_id=self.run_id, timeout_s=self._post_timeout_s)
                self._clients[node] = client
            return client

    def _number_server(self) -> None:
        """Let the server know which node it is: by its own address, which is known before an attempt is begun, else as configured."""
        if self._server is not None:
            here = (self._server.host, self._server.port)
            found = next((node for node, address in self._addresses.items() if (address.host, address.port) == here), None)
            self._server.node = self._node if found is None and self._nodes > 1 else found

    def _drop_clients(self) -> list[PeerClient]:
        dropped, self._clients = list(self._clients.values()), {}
        return dropped


def _decoded(body: bytes, into: type[_Message]) -> _Message:
    try:
        return msgspec.msgpack.decode(body, type=into)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        hint = "run the same version of everystep on all nodes"
        raise AgentError(f"a message cannot be understood: {error}", kind="protocol", hint=hint) from error
