"""Which checkpoint is restored, and where its bytes are: seen by every node, decided by rank 0, tried by all ranks.

Theory of operation. Each node tells what its agent holds in memory (its own share of a step, copies of others') and what its store lists.
Rank 0 makes of it a list of *choices*, newest first: a step counts when the nodes found cover all nodes that saved it. Then all ranks try
one choice after the other. Each asks what it needs of the checkpoint, and all hear whether it fits everybody (*fits*) before anybody's
tensors change; each reads, and all hear whether everybody succeeded (*restored*); if not, the next choice is tried.

A reduced checkpoint (``Repository.reduce``) lacks some groups. It is a choice where its step is asked for, or where none of the names that
are asked for can be of these groups; else it is told of as lacking.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from everystep.agent import messages
from everystep.agent.client import AgentClient
from everystep.agent.peers import PeerClient
from everystep.errors import AgentError, CheckpointError, ConflictError, CorruptionError, LayoutError, NotFoundError, TransientStoreError
from everystep.manifest import Manifest, check, decode, merge
from everystep.plan import Fetch, node_of_file
from everystep.repository import CheckpointKey, Repository, Skipped, lineage_limits, within
from everystep.repository.records import manifest_key
from everystep.trainer.reading import FETCH_NBYTES, ManifestReader
from everystep.trainer.state import RestoreReport
from everystep.trainer.topology import Topology
from everystep.trainer.world import Failure, World, is_told
from everystep.transfer import Buffers

_PASSED_OVER = (CorruptionError, AgentError, NotFoundError, TransientStoreError)
_RANK: Mapping[str, int] = {"memory": 2, "peer": 1, "disk": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredFrom:
    """Where a restore's bytes came from, and what was passed over.

    Args:
        key: Step and attempt.
        tier: "memory" (agents of the nodes that saved it), "peer" (copies on other nodes were needed) or "disk".
        nbytes: Bytes that this rank read.
        skipped: Checkpoints that were newer and could not be restored, with the reasons.
    """

    key: CheckpointKey
    tier: str
    nbytes: int
    skipped: tuple[Skipped, ...]


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One node's share of a step in an agent's memory."""

    step: int
    attempt: int
    node: int
    nodes: int
    slab: int
    replica: bool


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint in a node's store. ``parts``: the nodes whose files are there; None: all.

    ``committed`` is False where this node's part is there and the manifest is not: another node may have come further.
    """

    step: int
    attempt: int
    parts: tuple[int, ...] | None = None
    committed: bool = True
    reduced: int = 0
    dropped: tuple[str, ...] = ()
    """Groups that a reduced one lacks."""


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """An attempt as a store records it."""

    parent: tuple[int, int] | None
    nodes: int
    shared: bool
    life: str = ""
    """Equal on all nodes that took part in it."""


class View(msgspec.Struct, frozen=True, array_like=True):
    """What one node has to offer."""

    held: tuple[Held, ...]
    listed: tuple[Listed, ...]
    attempts: dict[int, Seen]
    newest_attempt: int


class Where(msgspec.Struct, frozen=True, array_like=True):
    """A node of this world that has a saved node's share, in memory (``slab``) or in its store (None)."""

    node: int
    slab: int | None = None


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that can be restored. ``tier``: "memory", "peer" (copies on other nodes are needed) or "disk"."""

    step: int
    attempt: int
    tier: str
    sources: tuple[tuple[Where, ...], ...]
    """For each node that saved it, where its share is; empty: in the store that every rank sees."""
    manifests: tuple[int, ...] = ()
    """Nodes whose stores have the manifest, where not every rank sees it."""
    reduced: int = 0
    dropped: tuple[str, ...] = ()
    """Groups that a reduced one lacks."""

    @property
    def key(self) -> CheckpointKey:
        """Step and attempt, and which reduction."""
        return CheckpointKey(self.step, self.attempt, self.reduced)


def view(repository: Repository, client: AgentClient | None) -> View:
    """What this node has to offer."""
    attempts = {number: _seen(record) for number, record in repository.attempts().items()}
    listed = []
    for key in repository.keys():
        seen = attempts.get(key.attempt)
        apart = seen is not None and seen.nodes > 1 and not seen.shared and not key.reduced
        parts = tuple(sorted(repository.parts_there(key))) if apart else None
        listed.append(Listed(key.step, key.attempt, parts, reduced=key.reduced, dropped=_dropped(repository, key)))
    listed += [
        Listed(key.step, key.attempt, tuple(sorted(repository.parts_there(key))), committed=False)
        for key in sorted(repository.perhaps_elsewhere())
    ]
    held = [
        Held(one.step, one.attempt, one.node, one.nodes, one.slab, one.replica)
        for one in (_snapshots(client) if client is not None else [])
    ]
    return View(tuple(held), tuple(listed), attempts, repository.newest_attempt())


def _dropped(repository: Repository, key: CheckpointKey) -> tuple[str, ...]:
    try:
        return repository.dropped(key)
    except _PASSED_OVER:
        return ()  # whoever wants to restore it hears what is wrong


def _seen(record: Any) -> Seen:
    parent = None if record.parent_attempt is None else (record.parent_attempt, record.parent_step)
    return Seen(parent, record.nodes, record.shared, record.job or repr(record.started_at))


def _snapshots(client: AgentClient) -> list[messages.SnapshotSummary]:
    try:
        return client.snapshots()
    except AgentError:
        return []  # it ended meanwhile: what it held is on disk or gone


class Lacking(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that is there in part only."""

    step: int
    attempt: int
    tier: str
    nodes: int
    absent: tuple[int, ...]
    """Saved nodes of which nothing is found."""
    manifests: tuple[int, ...] = ()
    reduced: int = 0
    """Not 0: nothing is absent but the groups that were ``dropped``."""
    dropped: tuple[str, ...] = ()

    @property
    def key(self) -> CheckpointKey:
        """Step and attempt, and which reduction."""
        return CheckpointKey(self.step, self.attempt, self.reduced)

    def __str__(self) -> str:
        if self.reduced:
            return was_reduced(self.dropped)
        which = ", ".join(str(node + 1) for node in self.absent[:8]) + (" ..." if len(self.absent) > 8 else "")
        share = "files" if self.tier == "disk" else "memory"
        are, s = "are" if self.tier == "disk" else "is", "s" * (len(self.absent) > 1)
        return f"the {share} of node{s} {which} of the {self.nodes} that saved it {are} nowhere on the nodes found"


def was_reduced(dropped: Sequence[str]) -> str:
    """What is said of a reduced checkpoint."""
    if not dropped:
        return "it was reduced: groups were dropped from it"
    return f"it was reduced: {', '.join(map(repr, dropped))} {'was' if len(dropped) == 1 else 'were'} dropped from it"


def is_satisfied(include: Sequence[str], dropped: Sequence[str]) -> bool:
    """Whether none of the patterns can match a name in one of the groups. When in doubt it is not."""
    for pattern in include:
        head = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        for group in dropped:
            inside = group + "."
            if fnmatch.fnmatchcase(group, pattern) or head.startswith(inside) or (head != pattern and inside.startswith(head)):
                return False
    return bool(dropped)


class Found(msgspec.Struct, frozen=True, array_like=True):
    """What the nodes have together."""

    choices: list[Choice]
    """What can be restored, newest first; memory before disk for the same step."""
    lacking: list[Lacking]
    """Steps of which something is there, but not all, newest first."""


def choose(views: Sequence[View], *, step: int | None, include: Sequence[str] | None = None) -> Found:
    """What can be restored from what the nodes have (of ``step`` alone, when one is asked for), and what cannot.

    ``include``: patterns of the only names that are asked for.
    """
    attempts: dict[int, Seen] = {}
    for one in views:
        attempts.update(one.attempts)
    claims = {*attempts, *(one.newest_attempt for one in views if one.newest_attempt)}
    limits = lineage_limits(claims, {number: seen.parent for number, seen in attempts.items()})
    _refuse_several_histories(views, limits)
    found = [one for one in (*_in_memory(views), *_on_disk(views, attempts)) if step in (None, one.step)]
    own = [one for one in found if within(one.key, limits)]
    if step is not None and not own:
        own = [one for one in found if one.tier == "disk"]
    if step is None:
        own = [one if isinstance(one, Lacking) else _if_satisfied(one, include) for one in own]
    own.sort(key=lambda one: (one.attempt, one.step, -one.reduced, _RANK[one.tier]), reverse=True)
    choices = [one for one in own if isinstance(one, Choice)]
    whole = {one.key.full for one in choices}
    return Found(choices, [one for one in own if isinstance(one, Lacking) and one.key.full not in whole])


def _if_satisfied(choice: Choice, include: Sequence[str] | None) -> Choice | Lacking:
    """A reduced checkpoint counts where nothing is asked for that it lacks."""
    if not choice.reduced or (include is not None and is_satisfied([include] if isinstance(include, str) else include, choice.dropped)):
        return choice
    return Lacking(choice.step, choice.attempt, choice.tier, 1, (), choice.manifests, choice.reduced, choice.dropped)


def _refuse_several_histories(views: Sequence[View], attempts: Iterable[int]) -> None:
    """Nodes with disks of their own may each have gone on by themselves: equal steps of equal attempts are not equal then."""
    for attempt in sorted(attempts, reverse=True):
        lives = {one.attempts[attempt].life: node for node, one in reversed(list(enumerate(views))) if attempt in one.attempts}
        if len(lives) > 1:
            first, second = sorted(lives.values())[:2]
            raise ConflictError(
                f"nodes {first + 1} and {second + 1} have different histories of this run: attempt {attempt} is not the same on both",
                key=f"attempts/{attempt:06d}.json", kind="histories",
                hint="each has trained on by itself: move the run away on the nodes whose history is not to be continued",
            )  # fmt: skip


def _in_memory(views: Sequence[View]) -> Iterator[Choice | Lacking]:
    shares: dict[tuple[int, int, int], dict[int, list[tuple[bool, Where]]]] = {}
    for node, one in enumerate(views):
        for held in one.held:
            of_step = shares.setdefault((held.attempt, held.step, held.nodes), {})
            of_step.setdefault(held.node, []).append((held.replica, Where(node, held.slab)))
    for (attempt, step, nodes), by_node in shares.items():
        absent = tuple(node for node in range(nodes) if node not in by_node)
        if absent:
            yield Lacking(step, attempt, "memory", nodes, absent)
        else:
            several = [sorted(by_node[node], key=lambda pair: pair[0]) for node in range(nodes)]
            tier = "peer" if any(places[0][0] for places in several) else "memory"
            yield Choice(step, attempt, tier, tuple(tuple(where for _, where in places) for places in several))


def _on_disk(views: Sequence[View], attempts: Mapping[int, Seen]) -> Iterator[Choice | Lacking]:
    stores: dict[tuple[int, int, int], dict[int, tuple[int, ...] | None]] = {}
    committed: dict[tuple[int, int, int], list[int]] = {}
    lacks: dict[tuple[int, int, int], tuple[str, ...]] = {}
    for node, one in enumerate(views):
        for listed in one.listed:
            known = listed.attempt, listed.step, listed.reduced
            stores.setdefault(known, {})[node] = listed.parts
            if listed.committed:
                committed.setdefault(known, []).append(node)
                lacks[known] = lacks.get(known) or listed.dropped
    for (attempt, step, reduced), manifests in committed.items():
        by_node, seen = stores[attempt, step, reduced], attempts.get(attempt)
        if seen is None or seen.nodes == 1 or seen.shared or reduced:
            # One that all nodes saved into one store is there for all, whatever a node's listing may say yet.
            everywhere = len(manifests) == len(views) or (seen is not None and seen.nodes > 1 and seen.shared)
            sources = () if everywhere else (tuple(map(Where, manifests)),)
            yield Choice(step, attempt, "disk", sources, tuple(manifests), reduced, lacks[attempt, step, reduced])
            continue
        apart = tuple(
            tuple(Where(node) for node, parts in sorted(by_node.items()) if saved in (parts or ())) for saved in range(seen.nodes)
        )
        if all(apart):
            yield Choice(step, attempt, "disk", apart, tuple(manifests))
        else:
            absent = tuple(saved for saved, places in enumerate(apart) if not places)
            yield Lacking(step, attempt, "disk", seen.nodes, absent, tuple(manifests))


# -- reading ---------------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """How this rank gets at the nodes' memory and stores."""

    repository: Repository
    client: AgentClient | None
    where: Topology
    addresses: Sequence[messages.PeerAddress]
    token: bytes

    def peer(self, node: int) -> PeerClient:
        """The agent of another node."""
        return PeerClient(self.addresses[node], token=self.token, run_id=self.repository.run_id)


class _Route:
    """One object of a manifest: how to read it. ``key`` is set when it lies in the store that this rank sees."""

    def __init__(self, read: Callable[[int, memoryview], None], key: str = "") -> None:
        self.read = read
        self.key = key


class RoutedSource:
    """A manifest's objects, each wherever it is (``reading.Source``)."""

    def __init__(self, routes: Sequence[_Route], repository: Repository, buffers: Buffers) -> None:
        self._routes = routes
        self._store = repository.store
        self._buffers = buffers
        # Reading past the page cache wants whole pages, which tensors are not.
        self.direct = not any(route.key for route in routes)

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on of an object."""
        self._routes[number].read(offset, view)

    def bytes_of(self, fetch: Fetch, *, shared: bool = False) -> memoryview:
        """The bytes of one fetch in a reused buffer."""
        route = self._routes[fetch.object]
        if route.key:
            return self._buffers.read(self._store, route.key, fetch.offset, fetch.nbytes, shared=shared)
        taken = self._buffers.take(fetch.nbytes)
        route.read(fetch.offset, taken)
        return taken

    def release(self, view: memoryview) -> None:
        """Give the buffer back."""
        self._buffers.give_back(view)


@contextlib.contextmanager
def opened(choice: Choice, reach: Reach, buffers: Buffers) -> Iterator[tuple[Manifest, RoutedSource]]:
    """The manifest of a choice, and its bytes, held while they are read."""
    with contextlib.ExitStack() as stack:
        manifest, routes = (_from_disk if choice.tier == "disk" else _from_memory)(choice, reach, stack)
        yield manifest, RoutedSource(routes, reach.repository, buffers)


def _nearest(places: Sequence[Where], reach: Reach) -> Where:
    return next((place for place in places if place.node == reach.where.node), places[0])


def _from_memory(choice: Choice, reach: Reach, stack: contextlib.ExitStack) -> tuple[Manifest, list[_Route]]:
    parts = []
    by_name: dict[str, _Route] = {}
    for saved, places in enumerate(choice.sources):
        place = _nearest(places, reach)
        if place.node == reach.where.node and reach.client is not None and place.slab is not None:
            taken: Any = stack.enter_context(reach.client.take(place.slab))
            if (taken.part.step, taken.part.attempt) != (choice.step, choice.attempt):  # training goes on, in another process
                message = f"its slab holds step {taken.part.step} of attempt {taken.part.attempt} by now"
                raise NotFoundError(message, step=choice.step, key=str(choice.key), kind="gone")
        else:
            peer = stack.enter_context(contextlib.closing(reach.peer(place.node)))
            taken = stack.enter_context(peer.take(saved, choice.key))
        parts.append(taken.part)
        for stored, begin in zip(taken.part.objects, taken.file_offsets, strict=True):
            by_name[stored.key] = _Route(lambda at, view, taken=taken, begin=begin: taken.read_into(begin + at, view))  # type: ignore[misc]
    manifest = merge(parts)
    return manifest, [by_name[stored.key] for stored in manifest.objects]


def _from_disk(choice: Choice, reach: Reach, stack: contextlib.ExitStack) -> tuple[Manifest, list[_Route]]:
    repository, key = reach.repository, choice.key
    if not choice.sources:
        if not reach.where.rank:
            stack.enter_context(repository.hold(key))
        manifest = repository.manifest(key)
        return manifest, [_own(repository, stored.key) for stored in manifest.objects]
    peers: dict[int, PeerClient] = {}

    def peer(node: int) -> PeerClient:
        if node not in peers:
            peers[node] = stack.enter_context(contextlib.closing(reach.peer(node)))
        return peers[node]

    if reach.where.node in choice.manifests:
        if reach.where.is_first:
            stack.enter_context(repository.hold(key))
        manifest = repository.manifest(key)
    else:
        name = manifest_key(key)
        manifest = decode("manifest", peer(choice.manifests[0]).get_manifest(name), Manifest, key=name)
        check(manifest)
    routes = []
    for stored in manifest.objects:
        place = _nearest(choice.sources[_saved_by(stored.key) if len(choice.sources) > 1 else 0], reach)
        if place.node == reach.where.node:
            routes.append(_own(repository, stored.key))
        else:
            routes.append(_Route(lambda at, view, key=stored.key, node=place.node: peer(node).read_object(key, at, view)))  # type: ignore[misc]
    return manifest, routes


def _own(repository: Repository, key: str) -> _Route:
    return _Route(lambda at, view: repository.store.read_into(key, at, view), key)


def _saved_by(object_key: str) -> int:
    """The node that wrote a file of a checkpoint of several nodes."""
    return node_of_file(object_key.rsplit("/", 1)[-1])


# -- trying --------------------------------------------------------------------------------------------------------------------
class _PassedOver(Exception):  # noqa: N818 (no error of this rank's)
    """Another rank cannot restore this choice."""


def restore(
    world: World,
    reach: Reach,
    *,
    step: int | None,
    apply: Callable[[Any], RestoreReport],
    notice: Callable[[str], None],
    include: Sequence[str] | None = None,
) -> tuple[RestoredFrom, RestoreReport] | None:
    """All ranks restore the newest checkpoint (or that of ``step``) that verifies on every rank; None when there is none at all.

    ``include``: the patterns of names that ``apply`` asks for; a reduced checkpoint counts where it has all of them.

    Raises:
        NotFoundError: ``step`` is not there; names the steps that are.
        CorruptionError: None of the choices verifies.
        CheckpointError: It does not fit a rank's state: nothing was changed on any rank.
    """
    url = reach.repository.store.url
    found, steps = _found(world, reach, step, include)
    choices = found.choices
    if found.lacking and not choices:
        raise lacking_error(url, found.lacking)
    if step is not None and not choices:
        known = f"it has {_some(steps)}" if steps else "it has none yet"
        message = f"run {url!r} has no checkpoint of step {step}; {known}"
        raise NotFoundError(message, step=step, kind="no-step", hint="name one of these, or none for the newest")
    newest = max(((one.attempt, one.step) for one in choices), default=(0, 0))
    skipped = [Skipped(str(one.key), f"{one.tier}: {one}") for one in found.lacking if (one.attempt, one.step) > newest]
    for one in found.lacking[: len(skipped)]:
        notice(f"step {one.step} in {one.tier} is passed over: {one}")
    touched = False
    for choice in choices:
        tried = _try(world, reach, choice, apply)
        if tried.report is not None:
            if choice.reduced:
                notice(f"step {choice.step} is restored without a part of what was saved: {was_reduced(choice.dropped)}")
            _catch_up(reach, choice, notice)
            return RestoredFrom(key=choice.key, tier=choice.tier, nbytes=tried.nbytes, skipped=tuple(skipped)), tried.report
        touched = touched or tried.touched
        skipped.append(Skipped(key=str(choice.key), reason=f"{choice.tier}: {tried.why}"))
        notice(f"step {choice.step} in {choice.tier} is passed over: {tried.why}")
    if not choices:
        return None
    reasons = "; ".join(f"step {CheckpointKey.parse(one.key).step} {one.reason}" for one in skipped[:3])
    partly = "; the state is partly overwritten and must not be trained on" if touched else ""
    message = f"none of the {len(choices)} checkpoints of run {url!r} verifies: {reasons}{partly}"
    raise CorruptionError(message, kind="all-corrupt", hint=f"everystep verify {url} --all")


def _catch_up(reach: Reach, choice: Choice, notice: Callable[[str], None]) -> None:
    """This node was stopped between its part and its manifest: its store gets the manifest that another one has."""
    mine = any(place.node == reach.where.node for places in choice.sources for place in places)
    if choice.tier != "disk" or len(choice.sources) < 2 or not reach.where.is_first or not mine or reach.where.node in choice.manifests:
        return
    name = manifest_key(choice.key)
    try:
        with contextlib.closing(reach.peer(choice.manifests[0])) as peer:
            reach.repository.commit(decode("manifest", peer.get_manifest(name), Manifest, key=name))
    except CheckpointError as error:
        notice(f"step {choice.step} is restored, but this node's store could not be given its manifest: {error}")


def lacking_error(url: str, lacking: Sequence[Lacking]) -> CorruptionError:
    """The error when there are checkpoints, and none of them is whole."""
    first = lacking[0]
    hint = "start the job on the nodes that have them, or mount their disks; fresh=True starts from scratch"
    if first.reduced:
        hint = f"restore(step={first.step}, include=['<group>.*']) takes groups that are left; fresh=True starts from scratch"
    more = f"; nor are {len(lacking) - 1} older ones" if len(lacking) > 1 else ""
    return CorruptionError(
        f"step {first.step} of run {url!r} cannot be restored: {first}{more}", step=first.step, key=str(first.key), kind="incomplete",
        hint=hint,
    )  # fmt: skip


def _found(world: World, reach: Reach, step: int | None, include: Sequence[str] | None) -> tuple[Found, list[int]]:
    """What there is to try, as rank 0 decides; and, when ``step`` is asked for and not there, which steps are."""
    mine = None
    with world.agreeing():
        if reach.where.is_first:
            mine = view(reach.repository, reach.client)
    told = world.gather("what there is", msgspec.msgpack.encode(mine))
    decided = b""
    with world.agreeing():
        if told is not None:
            views = [seen for data in told if (seen := msgspec.msgpack.decode(data, type=View | None)) is not None]
            found = choose(views, step=step, include=include)
            steps = [] if found.choices or step is None else sorted({one.step for one in choose(views, step=None).choices})
            decided = msgspec.msgpack.encode((found, steps))
    return msgspec.msgpack.decode(world.share("choices", decided), type=tuple[Found, list[int]])


@dataclasses.dataclass(frozen=True)
class _Tried:
    """What became of one choice: the report if every rank succeeded, else why not."""

    report: RestoreReport | None
    nbytes: int
    touched: bool
    why: str = ""


def _try(world: World, reach: Reach, choice: Choice, apply: Callable[[Any], RestoreReport]) -> _Tried:
    """One choice on all ranks: every rank takes part in two exchanges, whatever becomes of it."""
    asked = False
    mine: CheckpointError | None = None
    report: RestoreReport | None = None
    reader: ManifestReader | None = None

    def fits(error: CheckpointError | None = None) -> None:
        nonlocal asked
        if asked:
            return
        asked = True
        others = [told for told in world.exchange("fits", _told(error, world)) if told is not None]
        if others and error is None:
            raise _PassedOver

    ranks = len(reach.where.ranks)
    # More than cores: while some wait for the disk, others verify.
    threads = min(8, max(2, 6 // ranks, len(os.sched_getaffinity(0)) // ranks))
    try:
        with world.agreeing(*_PASSED_OVER, _PassedOver), Buffers(nbytes=FETCH_NBYTES) as buffers, opened(choice, reach, buffers) as found:
            reader = ManifestReader(*found, threads=threads, rank=world.rank, neighbours=ranks - 1)
            report = _applied(apply, _Asking(reader, fits), found[0])
            fits()
    except _PASSED_OVER as error:
        if is_told(error):
            raise  # no fault of the checkpoint: the ranks lost each other
        # NotFoundError: an object of it is gone, or retention took it meanwhile. TransientStoreError: a bad sector, perhaps.
        mine, report = error, None
        if choice.tier == "disk" and isinstance(error, CorruptionError):
            _remember_bad(reach.repository, choice.key, error)
    except _PassedOver:
        report = None
    nbytes, touched = (reader.nbytes, reader.touched) if reader is not None else (0, False)
    with contextlib.suppress(_PassedOver):
        fits(mine)
    told = [msgspec.convert(one, Failure) for one in world.exchange("restored", _told(mine, world)) if one is not None]
    if told or report is None:
        why = str(mine) if world.size == 1 else "; ".join(str(one.error()) for one in told[:3])
        return _Tried(None, nbytes, touched, why)
    return _Tried(report, nbytes, touched)


def _applied(apply: Callable[[Any], RestoreReport], asking: _Asking, manifest: Manifest) -> RestoreReport:
    """What a reduced checkpoint lacks is said where it does not fit."""
    try:
        return apply(asking)
    except LayoutError as error:
        if not manifest.dropped or is_told(error):
            raise
        raise LayoutError(
            f"{error.message}; step {manifest.step} is not whole: {was_reduced(manifest.dropped)}", step=error.step, rank=error.rank,
            key=error.key, kind=error.kind, hint="name what is left with include=[...], or another step",
        ) from error  # fmt: skip


def _told(error: CheckpointError | None, world: World) -> Any:
    return None if error is None else msgspec.to_builtins(Failure.of(error, world.rank))


def _remember_bad(repository: Repository, key: CheckpointKey, error: CorruptionError) -> None:
    """Tell retention that this one is not to be counted among the good; on a read-only or full store nobody needs to know.

    Other ranks may do the same just now, and wait for this one: it raises nothing.
    """
    with contextlib.suppress(CheckpointError):
        repository.record_verified(key, good=False, detail=str(error), now=time.time())


def _some(steps: list[int]) -> str:
    shown = ", ".join(str(step) for step in steps[-8:])
    return f"steps {shown}" if len(steps) <= 8 else f"{len(steps)} steps, the newest are {shown}"


class _Asking:
    """A reader that asks all ranks whether the checkpoint fits before the first tensor changes."""

    def __init__(self, reader: ManifestReader, fits: Callable[[], None]) -> None:
        self._reader = reader
        self._fits = fits
        self.step = reader.step
        self.values = reader.values
        self.tensors = reader.tensors
        self.beyond = reader.beyond
        self.by_rank = reader.by_rank

    def read(self, wanted: Any) -> None:
        """As the reader does it."""
        self._fits()
        self._reader.read(wanted)
