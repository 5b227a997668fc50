"""Snapshots in memory, given to those who read them: this node's trainers and visitors, and other nodes' agents and trainers.

``Sharing`` is also this agent's side of the talk between nodes (``nodes.Side``). What peers read is held in the protocol by a connection
with a negative number, one for each hold; copies held for other nodes have negative numbers where slabs have positive ones.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everystep import protocol
from everystep.agent import messages
from everystep.agent.persist import Snapshot
from everystep.errors import CheckpointError, NotFoundError
from everystep.manifest import Part
from everystep.repository import CheckpointKey

if TYPE_CHECKING:
    from everystep.agent.memory import SlabMemory
    from everystep.agent.nodes import Held, Nodes
    from everystep.agent.replicas import HeldCopy
    from everystep.agent.server import AgentServer

_log = logging.getLogger(__name__)


class Sharing:
    """What one agent gives to readers, and has to do with other nodes."""

    def __init__(self, server: AgentServer) -> None:
        self._server = server
        self._making = threading.Lock()
        self._nodes: Nodes | None = None
        self._next_hold = -1
        self._granted: set[int] = set()
        self._copies: dict[tuple[int, int], list[HeldCopy]] = {}

    @property
    def nodes(self) -> Nodes:
        """The talk with other nodes; made when it is first needed, since most agents have nobody to talk to."""
        with self._making:
            if self._nodes is None:
                from everystep.agent.nodes import Nodes

                self._nodes = Nodes(self, self._server.run_id)
            return self._nodes

    def close(self, last: CheckpointKey | None, *, linger_s: float) -> None:
        """End the talk, once others have done with this node's part of ``last``."""
        with self._making:
            nodes = self._nodes
        if nodes is not None:
            if last is not None:
                nodes.wait_settled(last, timeout_s=linger_s)
            nodes.close()
        with self._server.lock:
            copies, self._copies = self._copies, {}
        for held in copies.values():
            for one in held:
                one.release()

    def tell_nodes(self, action: protocol.TellNodes) -> None:
        """What the protocol has to say to the lead."""
        key = CheckpointKey(action.step, action.attempt)
        if action.what == "sealed":
            self.nodes.sealed(key)
        elif action.what == "lost":
            self.nodes.failed(key, action.reason)
        elif action.what == "let go":
            self._server.stats.count("copies_gave_way")
            _log.warning("step %d of attempt %d gives way to a newer save before other nodes need it no more: there is too little memory",
                         action.step, action.attempt)  # fmt: skip
        else:
            self.nodes.wanted(key)

    def durable(self, key: CheckpointKey, *, nodes: int) -> None:
        """A step is on disk: a job that goes on with one node needs no copies for the others any more."""
        if nodes == 1 and self._nodes is not None:
            self._nodes.replicas.configure(0, 0)
            self._nodes.replicas.drop_older(key)

    def problems(self) -> list[str]:
        """Why which other node cannot be told anything at present, a line each."""
        return [] if self._nodes is None else [f"node {node + 1}: {why}" for node, why in sorted(self._nodes.problems().items())[:3]]

    # -- readers on this node -------------------------------------------------------------------------------------------------------
    def give(self, action: protocol.GiveSnapshot) -> None:
        """Answer a TakeSnapshot. With the agent's lock held."""
        if action.conn < 0:
            self._granted.add(action.conn)
            return
        memory = self._server.memory[action.slab]
        self._server.aside(self._server.hashes, lambda: self._give(action, memory))

    def _give(self, action: protocol.GiveSnapshot, memory: SlabMemory) -> None:
        server, snapshot = self._server, action.payload
        try:
            part, offsets = snapshot.described()
            answer = messages.SnapshotTaken(id=action.request, part=part, slab_nbytes=memory.nbytes, file_offsets=offsets)
            with memory.readable_fd() as readable:
                fd = os.dup(readable)
        except Exception as error:  # whatever it is, the reader is told, and the slab is not held for it any more
            if not isinstance(error, (CheckpointError, OSError)):
                server.unexpected(f"giving {snapshot.key} to a reader", error)
            server.tell(action.conn, messages.failure(error, action.request))
            with server.lock:
                if action.conn in server.state.peers:
                    server.feed(protocol.SnapshotReleased(conn=action.conn, slab=action.slab))
            return
        server.tell(action.conn, answer, fd)

    def copies(self) -> Sequence[messages.SnapshotSummary]:
        """Held for other nodes."""
        return () if self._nodes is None else self._nodes.replicas.summaries()

    def give_copy(self, conn: int, message: messages.TakeSnapshot) -> None:
        """Answer a TakeSnapshot of a copy. NotFoundError."""
        if self._nodes is None:
            raise NotFoundError(f"there is no copy {message.slab} here", kind="no-snapshot", hint="list the snapshots again")
        copy = self._nodes.replicas.hold(message.slab)
        try:
            with copy.readable_fd() as readable:
                fd = os.dup(readable)
        except BaseException:
            copy.release()
            raise
        with self._server.lock:
            self._copies.setdefault((conn, message.slab), []).append(copy)
        answer = messages.SnapshotTaken(id=message.id, part=copy.part, slab_nbytes=copy.nbytes, file_offsets=copy.file_offsets)
        self._server.tell(conn, answer, fd)

    def end_copy(self, conn: int, slab: int | None = None) -> None:
        """The reader is done with one copy, or (None) gone."""
        with self._server.lock:
            if slab is not None:
                held = self._copies.get((conn, slab), [])
                ended = [held.pop()] if held else []
                if not held:
                    self._copies.pop((conn, slab), None)
            else:
                mine = [key for key in self._copies if key[0] == conn]
                ended = [copy for key in mine for copy in self._copies.pop(key)]
        for copy in ended:
            copy.release()

    # -- other nodes (``nodes.Side``) ----------------------------------------------------------------------------------------------------
    def completed(self, key: CheckpointKey, persist: bool) -> None:
        """Every node has sealed it."""
        server = self._server
        with server.lock:
            server.feed(protocol.Completed(step=key.step, attempt=key.attempt, persist=persist))
            rows = [slab for slab in server.state.slabs.values() if protocol.is_complete(slab) and slab.payload.key == key]
            error = server.state.error if any(slab.failed for slab in rows) else "" if rows else "it is not in memory any more"
            settled = not rows or any(slab.durable or slab.failed for slab in rows)
        if persist and settled:
            self.nodes.settled(key, error)

    def keep(self, keys: Sequence[CheckpointKey]) -> None:
        """Other nodes copy these, or have copied them."""
        self._server.feed(protocol.KeepAsked(keys=frozenset((key.attempt, key.step) for key in keys)))

    def note(self, name: str, text: str) -> None:
        """A line of the statistics."""
        self._server.stats.note(name, text)

    def failed(self, key: CheckpointKey, node: int, reason: str) -> None:
        """Another node will never seal it."""
        named = reason if node < 0 or f"node {node}" in reason else f"node {node}: {reason}"
        self._server.feed(protocol.StepLost(step=key.step, attempt=key.attempt, reason=named))

    def local_snapshots(self) -> Sequence[messages.SnapshotSummary]:
        """What this node's ranks have sealed, newest first; whoever sees all nodes' lists sees which steps are complete.

        A node need not have heard of it: the others may have given up for a newer step what this one still believes to be the newest.
        """
        server = self._server
        with server.lock:
            rows = sorted((s for s in server.state.slabs.values() if protocol.is_snapshot(s)), key=lambda s: s.order, reverse=True)
            return [
                messages.SnapshotSummary(
                    slab=s.id, step=s.step, attempt=s.attempt, nbytes=s.payload.nbytes, saved_at=s.payload.saved_at, persisted=s.durable,
                    node=s.payload.team.node, nodes=s.payload.team.nodes, world=s.payload.team.world,
                )
                for s in rows
            ]  # fmt: skip

    def hold(self, key: CheckpointKey) -> Held:
        """This node's share of a snapshot, for a peer. NotFoundError."""
        server = self._server
        with server.lock:
            row = next((s for s in server.state.slabs.values() if protocol.is_snapshot(s) and s.payload.key == key), None)
            conn = self._next_hold
            self._next_hold -= 1
            if row is not None:
                server.feed(protocol.Connected(conn=conn, role="visitor", pid=os.getpid()))
                if conn in server.state.peers:
                    server.feed(protocol.SnapshotAsked(conn=conn, slab=row.id))
            granted = conn in self._granted
            self._granted.discard(conn)
        if row is None or not granted:
            raise NotFoundError(f"step {key.step} of attempt {key.attempt} is not in memory here", step=key.step, kind="no-snapshot")
        try:
            return _Hold(server, conn, row.payload, server.memory[row.id].nbytes)
        except BaseException:
            server.feed(protocol.ConnectionClosed(conn=conn))
            raise

    def local_part(self, key: CheckpointKey) -> Part | None:
        """This node's part once it is durable."""
        return self._server.part(key)

    def object_nbytes(self, object_key: str) -> int:
        """Size of an object of this agent's store."""
        return self._server.repository.store.size(object_key)

    def read_object(self, object_key: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from an object of this agent's store."""
        self._server.repository.store.read_into(object_key, offset, view)

    def count(self, name: str, by: int = 1) -> None:
        """Raise a counter."""
        self._server.stats.count(name, by)


class _Hold:
    """A snapshot that a peer reads (``nodes.Held``)."""

    def __init__(self, server: AgentServer, conn: int, snapshot: Snapshot, nbytes: int) -> None:
        self._server = server
        self._conn = conn
        self.view = snapshot.view
        self.nbytes = nbytes
        self.part, self.file_offsets = snapshot.described()

    def release(self) -> None:
        """Nothing is read after it."""
        with self._server.lock:
            if self._conn in self._server.state.peers:
                self._server.feed(protocol.ConnectionClosed(conn=self._conn))
