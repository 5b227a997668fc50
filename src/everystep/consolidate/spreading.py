"""One export written by workers on the nodes of a Ray cluster: each has its share of the plan, and the driver gives the files their names.

Theory of operation. All nodes have to see the folders of the checkpoint and of the export under the same paths. So first the driver puts a
file with a random word into the export's folder, and a task on each node reads it, tries to write beside it, looks for the checkpoint's
files, and tells its version of everystep. Then each share is a task on a node of its own choosing by the driver, which starts it anew, on
another node if there is one, when its worker or node is lost: shares can be written any number of times.

A node that is lost for Ray may still run, cut off, and write. So each try of a share has a lease, a small file in the export's folder. A
worker looks for its lease before every window and ends when it is gone; the driver deletes it before it starts another try, and when it
ends itself. What a worker without a lease still had in hand is the same bytes in the same places.

Ray carries bytes only, JSON both ways; what runs on the nodes is ``nodeside.py``. Nothing else of everystep imports ray.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from everystep import __version__
from everystep.consolidate.folders import errors as folder_errors
from everystep.consolidate.nodeside import looking, writing
from everystep.consolidate.plan import ExportPlan
from everystep.consolidate.source import Source
from everystep.consolidate.writing import finish_export
from everystep.errors import CheckpointError, ConfigError, TransientStoreError, rebuild
from everystep.store.local import LocalStore

__all__ = ["Cluster", "Lost", "Node", "connected", "require", "spread"]

_TRIES = 4
"""How often a share is begun before the export is given up."""
_SEEN_S = 10.0
"""How long a node may take to see a file that another one has made: file systems over a network remember for a while what was not there."""
_KNOCK_S = 10.0
"""How long a cluster may take to answer at all."""
_LOOK_S = 120.0
"""How long a node may take to start a process that looks."""
_STUCK_S = 30.0
"""After so long without a start it is said what a share waits for."""
_END_S = 10.0
"""How long workers that were told to end are waited for."""
_POLL_S = 1.0

_log = logging.getLogger(__name__)


class Node(NamedTuple):
    """A node of the cluster that computes."""

    id: str
    name: str
    """For people: host name, address, and the beginning of the id."""
    cpus: float


class Lost(NamedTuple):
    """A task did not return: its worker or node is gone, or it raised."""

    why: str
    node: bool = False
    """The node is gone."""


def require() -> Any:
    """The package ``ray``. ConfigError when it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("sharing an export among machines needs ray, which is not installed", kind="no-ray",
                          hint="pip install everystep[ray]") from error  # fmt: skip
    return ray


@contextlib.contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """The cluster at ``address``, or the one that this process is connected to already.

    Args:
        address: As ``ray.init`` takes it; "auto": that of RAY_ADDRESS, or of this machine.

    Raises:
        ConfigError: ray is not installed, or there is no such cluster.
    """
    ray = require()
    if ray.is_initialized():
        yield Cluster(ray)
        return
    with contextlib.redirect_stdout(_Hushed(sys.stdout)):
        try:
            _knock(os.environ.get("RAY_ADDRESS") or address if address == "auto" else address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ImportError, OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(f"no Ray cluster can be reached at {address!r}: {_one_line(error)}", key=address, kind="ray",
                              hint="give the address of one, --ray HOST:PORT, or run: ray start --head") from error  # fmt: skip
        try:
            yield Cluster(ray)
        finally:
            with contextlib.redirect_stdout(io.StringIO()):
                ray.shutdown()


def _knock(address: str) -> None:
    """OSError where nobody listens: Ray would try for minutes, and then end the process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


class _Hushed(io.TextIOBase):
    """Standard output without what Ray's own threads print: the last pages of a lost node's log, in the middle of a JSON document. That the
    node is lost we say ourselves."""

    def __init__(self, real: TextIO) -> None:
        self._real = real

    def write(self, text: str) -> int:
        """As of a file."""
        return len(text) if threading.current_thread().name.startswith("ray_") else self._real.write(text)

    def flush(self) -> None:
        """As of a file."""
        self._real.flush()


class Cluster:
    """What is asked of Ray."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def nodes(self) -> list[Node]:
        """Those that are alive and have CPUs, the largest first."""
        found = []
        for one in self._ray.nodes():
            cpus = float(one.get("Resources", {}).get("CPU", 0.0))
            if one["Alive"] and cpus > 0:
                node_id = str(one["NodeID"])
                name = f"{one['NodeManagerHostname']} ({one['NodeManagerAddress']}, node {node_id[:8]})"
                found.append(Node(node_id, name, cpus))
        return sorted(found, key=lambda node: (-node.cpus, node.name))

    def start(self, function: Callable[[bytes], bytes], task: Mapping[str, Any], node: Node, *, cpus: int) -> Any:
        """Run ``function`` on this node and no other, in a process that ends with it; a reference to what it will return."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self._ray.remote(num_cpus=cpus, max_retries=0, max_calls=1)(function)
        there = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        return remote.options(scheduling_strategy=there).remote(json.dumps(task).encode())

    def ended(self, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those that ended, one way or the other; empty after ``timeout_s``."""
        done, _ = self._ray.wait(list(refs), num_returns=1, timeout=timeout_s)
        return list(done)

    def result(self, ref: Any) -> dict[str, Any] | Lost:
        """What a task returned."""
        try:
            told = json.loads(self._ray.get(ref))
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # of an exception in a task; its text is a traceback
            reason = cause if isinstance(cause, BaseException) else error
            node = type(error).__name__ in {"NodeDiedError", "LocalRayletDiedError", "TaskUnschedulableError"}
            return Lost(f"{type(reason).__name__}: {_one_line(reason).partition('. ')[0]}", node)
        assert isinstance(told, dict)
        return told

    def cancel(self, refs: Sequence[Any]) -> None:
        """Kill the workers of these; returns when they are gone, or after a while."""
        if not refs:
            return
        for ref in refs:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(ref, force=True)
        self._ray.wait(list(refs), num_returns=len(refs), timeout=_END_S)


def spread(
    cluster: Cluster, source: Source, plan: ExportPlan, folder: str, document: Mapping[str, Any], *, workers: int | None = None,
    pace: Callable[[int], None] | None = None,
) -> tuple[int, dict[str, str]]:  # fmt: skip
    """Write ``plan`` into ``folder`` by workers on the nodes; bytes that are linked, and the digests.

    Args:
        cluster: Where the workers run.
        source: What is exported.
        plan: What is written.
        folder: The partial folder; all nodes have to see it.
        document: As of ``share``: what a worker needs to come to the same plan.
        workers: How many, evenly on the nodes; None: one on each.
        pace: Told the bytes of each share that is done.

    Raises:
        ConfigError: A node does not see the folders, or has another everystep: names the node. Nothing was written.
        TransientStoreError: Workers were lost again and again, or no node is left; what was written stays for the next try.
    """
    nodes = cluster.nodes()
    if not nodes:
        raise ConfigError("the Ray cluster has no node with CPUs", kind="ray", hint="look at: ray status")
    count = len(nodes) if workers is None else workers
    spreading = _Spreading(cluster, source, folder, document, nodes[:count], count, pace)
    try:
        alone = spreading.run()
    finally:
        spreading.end()
    if count == 1:  # who writes everything gives the names too
        return int(alone["linked"]), dict(alone["digests"])
    written = finish_export(plan, folder)
    return written.linked, dict(written.digests)


class _Try(NamedTuple):
    """A share that was given to a node."""

    share: int
    number: int
    node: Node
    lease: str
    since: float


class _Spreading:
    """One call of ``spread``."""

    def __init__(
        self, cluster: Cluster, source: Source, folder: str, document: Mapping[str, Any], nodes: Sequence[Node], count: int,
        pace: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self._source = source
        self._folder = folder
        self._nodes = list(nodes)
        """Those that were looked at and are good."""
        self._count = count
        self._pace = pace
        self._word = secrets.token_hex(8)
        budget_nbytes = int(document["budget_nbytes"]) // -(-count // len(nodes))  # of a node's memory
        self._document = {**document, "budget_nbytes": budget_nbytes}
        self._running: dict[Any, _Try] = {}
        self._last: dict[str, Any] = {}
        self._gone: set[str] = set()
        self._told: set[str] = set()

    def run(self) -> dict[str, Any]:
        """All shares, once all nodes are known to be good; what the one told that ended last."""
        self._look(self._nodes)
        for share in range(self._count):
            self._begin(share, 1, self._nodes[share % len(self._nodes)])
        while self._running:
            for ref in self._cluster.ended(list(self._running), _POLL_S):
                self._end_of(self._running.pop(ref), self._cluster.result(ref))
            self._tell_stuck()
        return self._last

    def end(self) -> None:
        """Nobody writes any more, as far as that can be reached, and nothing of ours stays in the folder."""
        for one in self._running.values():
            _unlink(one.lease)
        self._cluster.cancel(list(self._running))
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if name.startswith(f".ray-{self._word}"):
                    _unlink(f"{self._folder}/{name}")

    # -- nodes -------------------------------------------------------------------------------------------------------
    def _look(self, nodes: Sequence[Node]) -> None:
        """ConfigError when one of them cannot do its part."""
        token = f"{self._folder}/.ray-{self._word}"
        _put(token, self._word)
        where = self._source.store.path if isinstance(self._source.store, LocalStore) else ""
        files = [(f"{where}/{file.key}", file.nbytes) for file in self._source.files if where and file.nbytes >= 0]
        task = {"token": token, "word": self._word, "files": files, "patience_s": _SEEN_S}
        looks = {self._cluster.start(looking(), task, node, cpus=0): node for node in nodes}
        told: dict[str, dict[str, Any] | Lost] = {}
        deadline = time.monotonic() + _LOOK_S
        try:
            while looks and time.monotonic() < deadline:
                for ref in self._cluster.ended(list(looks), _POLL_S):
                    told[looks.pop(ref).id] = self._cluster.result(ref)
        finally:
            self._cluster.cancel(list(looks))
        for node in nodes:
            self._judge(node, told.get(node.id, Lost(f"it did not answer within {_LOOK_S:.0f} s")))

    def _judge(self, node: Node, told: dict[str, Any] | Lost) -> None:
        if isinstance(told, Lost):
            message = f"Ray's node {node.name} could not be asked what it sees: {told.why}"
            raise TransientStoreError(message, key=self._folder, kind="worker", hint="look at: ray status")
        if told["version"] != __version__:
            has = f"has everystep {told['version']}" if told["version"] else "has no everystep"
            raise ConfigError(f"Ray's node {node.name} {has}, and this is {__version__}: they have to be equal", kind="version",
                              hint=f"there: pip install everystep=={__version__}")  # fmt: skip
        if told["problem"]:
            raise ConfigError(f"Ray's node {node.name} {told['problem']}", key=self._folder, kind="not-shared",
                              hint="all nodes have to see checkpoint and export under the same paths; or leave --ray out")  # fmt: skip

    def _another(self, lost: _Try) -> Node:
        """Where a share that was lost is tried next: a good node that is alive and has the fewest shares; the second time not the same."""
        alive = [node for node in self._cluster.nodes() if node.id not in self._gone]
        ids = {node.id for node in alive}
        good = [node for node in self._nodes if node.id in ids]
        if not alive:
            raise TransientStoreError("no node of the Ray cluster is left", key=self._folder, kind="ray",
                                      hint="look at: ray status, and start it again")  # fmt: skip
        for node in [node for node in alive if node.id not in {one.id for one in good}]:  # not needed before, or came since
            if any(one.id != lost.node.id for one in good):
                break
            try:
                self._look([node])
            except CheckpointError:
                if not good and node is alive[-1]:
                    raise
            else:
                good.append(node)
        self._nodes = good
        load = [one.node.id for one in self._running.values()]
        return min(
            good, key=lambda node: (lost.number > 1 and node.id == lost.node.id, load.count(node.id) / node.cpus, node.id == lost.node.id)
        )

    # -- shares ------------------------------------------------------------------------------------------------------
    def _begin(self, share: int, number: int, node: Node) -> None:
        lease = f"{self._folder}/.ray-{self._word}-{share + 1}-{number}"
        _put(lease, "")
        task = {"document": self._document, "folder": self._folder, "only": [share, self._count], "lease": lease, "patience_s": _SEEN_S}
        ref = self._cluster.start(writing(), task, node, cpus=1)
        self._running[ref] = _Try(share, number, node, lease, time.monotonic())

    def _end_of(self, one: _Try, told: dict[str, Any] | Lost) -> None:
        """A try ended: well, in vain, or so that no other one would do better."""
        _unlink(one.lease)
        if isinstance(told, Lost):
            if told.node:
                self._gone.add(one.node.id)  # which the cluster's own table may not say yet
            message = f"a worker of the export on Ray's node {one.node.name} was lost: {told.why}"
            error: CheckpointError = TransientStoreError(message, key=self._folder, kind="worker")
        elif "error" in told:
            found = told["error"]
            error = rebuild(found["name"], f"{found['message']}, on Ray's node {one.node.name}", step=found["step"], key=found["key"],
                            kind=found["kind"], hint=found["hint"])  # fmt: skip
        else:
            self._last = told
            if self._pace is not None:
                self._pace(int(told["nbytes"]))
            return
        if not isinstance(error, TransientStoreError):
            raise error
        if one.number >= _TRIES:
            error.hint = error.hint or "start it again; look at: ray status"
            raise error
        node = self._another(one)
        _log.warning("share %d of %d of the export is written again, on node %s: %s", one.share + 1, self._count, node.name, error.message)
        self._begin(one.share, one.number + 1, node)

    def _tell_stuck(self) -> None:
        for one in self._running.values():
            if one.lease in self._told or time.monotonic() < one.since + _STUCK_S:
                continue
            self._told.add(one.lease)
            with contextlib.suppress(OSError):
                if os.stat(one.lease).st_size == 0:
                    share = one.share + 1
                    _log.warning("share %d of %d of the export waits for a free CPU of Ray's node %s", share, self._count, one.node.name)


# -- small things -----------------------------------------------------------------------------------------------------------


def _put(path: str, text: str) -> None:
    with folder_errors("write", path), open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _one_line(error: BaseException) -> str:
    """Ray's errors are paragraphs."""
    words: Iterable[str] = str(error).split()
    return " ".join(words)[:300]
