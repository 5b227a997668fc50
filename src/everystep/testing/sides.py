"""An agent's side of the talk between nodes, made of plain values, and the nodes of a small job in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from everystep.agent.messages import PeerAddress, SnapshotSummary
from everystep.agent.nodes import Nodes
from everystep.errors import CheckpointError, NotFoundError
from everystep.manifest import Part, Shard, StoredObject, TensorSpec, block_digests, digest, encode
from everystep.region import whole
from everystep.repository import CheckpointKey

_WAIT_S = 20.0
_HEADER_NBYTES = 4096


def plain_part(data: bytes, *, node: int, nodes: int, key: CheckpointKey) -> Part:
    """The part of one file: a header of 4 KiB, then one tensor of bytes."""
    view = memoryview(data)
    tensor = view[_HEADER_NBYTES:]
    spec = TensorSpec(f"model.w{node}", "U8", (len(tensor),), "model")
    stored = StoredObject(f"model-n{node:05d}.safetensors", len(view), _HEADER_NBYTES, digest(view[:_HEADER_NBYTES]))
    shard = Shard(0, whole(spec.shape), 0, _HEADER_NBYTES, len(tensor), block_digests(tensor))
    return Part(step=key.step, attempt=key.attempt, node=node, nodes=nodes, saved_at=5.0, tensors=(spec,), objects=(stored,),
                shards=(shard,), aliases={}, values=msgspec.Raw(b"{}"))  # fmt: skip


class PlainHeld:
    """A snapshot that a ``PlainSide`` lends."""

    def __init__(self, side: PlainSide, part: bytes, data: bytearray) -> None:
        self._side = side
        self.part = part
        self.file_offsets: tuple[int, ...] = (0,)
        self.nbytes = len(data)
        self.view = memoryview(data)

    def release(self) -> None:
        """Counts as "released"."""
        self._side.count("released")


class PlainSide:
    """Keeps snapshots, parts and objects in dictionaries, and notes what it is told (``nodes.Side``)."""

    def __init__(self, node: int, nodes: int) -> None:
        self.node = node
        self.nodes = nodes
        self.data: dict[CheckpointKey, bytearray] = {}
        self.described: dict[CheckpointKey, bytes] = {}
        self.parts: dict[CheckpointKey, Part | CheckpointError] = {}
        self.objects: dict[str, bytes] = {}
        self.told: list[tuple[object, ...]] = []
        self.counts: dict[str, int] = {}
        self.on_hold: Callable[[CheckpointKey], object] = lambda key: None
        """Called at the begin of each ``hold``."""
        self._changed = threading.Condition()

    def add(self, key: CheckpointKey, nbytes: int = 6 << 20) -> bytes:
        """Have a snapshot of random bytes; returns them."""
        data = np.random.default_rng(1000 * self.node + key.step).bytes(nbytes)
        self.described[key] = encode("part", plain_part(data, node=self.node, nodes=self.nodes, key=key))
        self.data[key] = bytearray(data)
        return data

    def wait_told(self, *event: object) -> None:
        """Wait until ("completed", key, persist) or ("failed", key, node, reason) has been told."""
        with self._changed:
            if not self._changed.wait_for(lambda: event in self.told, timeout=_WAIT_S):
                raise TimeoutError(f"{event} was not told; told were {self.told}")

    def wait_count(self, name: str, least: int = 1) -> None:
        """Wait until a counter has got that far."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.counts.get(name, 0) >= least, timeout=_WAIT_S):
                raise TimeoutError(f"{name} did not become {least}; counts are {self.counts}")

    def completed(self, key: CheckpointKey, persist: bool) -> None:
        """Noted."""
        self._note("completed", key, persist)

    def keep(self, keys: Sequence[CheckpointKey]) -> None:
        """Noted."""
        self._note("keep", tuple(keys))

    def note(self, name: str, text: str) -> None:
        """Noted."""
        self._note("note", name, text)

    def failed(self, key: CheckpointKey, node: int, reason: str) -> None:
        """Noted."""
        self._note("failed", key, node, reason)

    def local_snapshots(self) -> Sequence[SnapshotSummary]:
        """All."""
        return [
            SnapshotSummary(slab=1, step=key.step, attempt=key.attempt, nbytes=len(data), saved_at=5.0, persisted=False, node=self.node,
                            nodes=self.nodes)
            for key, data in self.data.items()
        ]  # fmt: skip

    def hold(self, key: CheckpointKey) -> PlainHeld:
        """Lend one."""
        self.on_hold(key)
        if key not in self.data:
            raise NotFoundError(f"no snapshot {key} is here")
        return PlainHeld(self, self.described[key], self.data[key])

    def local_part(self, key: CheckpointKey) -> Part | None:
        """From ``parts``; an error there is raised."""
        part = self.parts.get(key)
        if isinstance(part, CheckpointError):
            raise part
        return part

    def object_nbytes(self, object_key: str) -> int:
        """From ``objects``."""
        if object_key not in self.objects:
            raise NotFoundError(f"there is no {object_key!r}", key=object_key)
        return len(self.objects[object_key])

    def read_object(self, object_key: str, offset: int, view: memoryview) -> None:
        """From ``objects``."""
        view[:] = self.objects[object_key][offset : offset + len(view)]

    def count(self, name: str, by: int = 1) -> None:
        """Into ``counts``."""
        with self._changed:
            self.counts[name] = self.counts.get(name, 0) + by
            self._changed.notify_all()

    def _note(self, *event: object) -> None:
        with self._changed:
            self.told.append(event)
            self._changed.notify_all()


class PlainJob:
    """The nodes of a job in this process, node n at 127.0.0.(n + 1); a context manager.

    Attributes:
        nodes: Each node's ``Nodes``.
        sides: Each node's side.
        addresses: Where each listens.
    """

    def __init__(
        self, count: int, token: bytes, *, run_id: str = "a1b2c3", cadence: int | str | bool | None = None, replicas: int = 0,
        domains: Sequence[str] = (), attempt: int = 1, hold_s: float = 60.0, post_timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.token = token
        self.run_id = run_id
        self.sides = [PlainSide(number, count) for number in range(count)]
        self.nodes = [Nodes(side, run_id, hold_s=hold_s, post_timeout_s=post_timeout_s) for side in self.sides]
        self.addresses = []
        for number, nodes in enumerate(self.nodes):
            nodes.configure(attempt, number, count, cadence, replicas)
            host, port = nodes.open(token, f"127.0.0.{number + 1}")
            self.addresses.append(PeerAddress(node=number, host=host, port=port, domain=domains[number] if domains else ""))
        for number, nodes in enumerate(self.nodes):
            nodes.set_peers(self.addresses, number)

    def __enter__(self) -> PlainJob:  # noqa: PYI034 (typing.Self needs Python 3.11)
        return self

    def __exit__(self, *error: object) -> None:
        for nodes in self.nodes:
            nodes.close()

    def sealed(self, key: CheckpointKey, *, by: Sequence[int] | None = None) -> None:
        """These nodes (all) seal a step."""
        for node in range(len(self.nodes)) if by is None else by:
            self.nodes[node].sealed(key)

    def wait_told(self, *event: object) -> None:
        """Wait until every side has been told this."""
        for side in self.sides:
            side.wait_told(*event)
