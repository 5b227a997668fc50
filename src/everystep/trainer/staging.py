"""Copy one snapshot into a slab while training goes on, and fence it before parameters change.

Theory of operation. ``stage`` copies what may change at any time (buffers, scalars) inside the call. What only an optimizer's step
changes is cut into chunks. A thread takes chunks one after the other; so does whoever waits in ``fence`` (an optimizer's step, the next
save), so that the rest goes at the training thread's own speed. When the last chunk is copied the tensors are compared with what they
were at the call (version counter, and a bounded sample of the contents: fused optimizers and ``.data`` writes raise no counter), and only
then is the fence open and the slab sealed. A storage that is swapped meanwhile is kept alive and copied as the call saw it. Copies are
``memmove`` calls: they release the GIL and, unlike ``Tensor.copy_``, start no second OpenMP team beside the training's own (measured on
two cores: 1 against 8 GB/s beside a busy team). Accelerator tensors go through ``device.py``; the host is not blocked by their fence.

What is copied is boxes: a whole tensor, or that region of it which this rank holds and writes. A box whose bytes follow each other on both
sides is one move; one with long rows is a move for each row; others are strided copies, in chunks.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import operator
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from everystep.errors import CapacityError, CheckpointError, LayoutError, TornSnapshotError
from everystep.layout import SlabCopy
from everystep.plan import SavePlan
from everystep.region import Region
from everystep.trainer.device import Device, Mark, device_for
from everystep.trainer.sharding import box
from everystep.trainer.state import Leaf

_CHUNK_NBYTES = 16 << 20
_SAMPLED_LEAVES = 256
_SAMPLE_NBYTES = 32
_SAMPLE_SETS = 8

_ROW_NBYTES = 256 << 10
"""Rows shorter than this are copied by torch, many in one call: after each move the GIL has to be had again."""

Move = tuple[int, int, int]
"""(target address, source address, nbytes)."""


class SlabViews:
    """Typed tensors over the placements of one slab; made once for each slab and plan."""

    def __init__(self, view: memoryview, plan: SavePlan, dtypes: Sequence[torch.dtype]) -> None:
        flat = torch.frombuffer(view, dtype=torch.uint8)
        self.address = flat.data_ptr()
        self.nbytes = flat.numel()
        self.keep = flat
        self.addresses = [self.address + placement.slab_offset for placement in plan.placements]
        self.placements = plan.placements
        self._dtypes = dtypes
        self._typed: dict[int, torch.Tensor] = {}

    def target(self, copy: SlabCopy) -> torch.Tensor:
        """The part of a placement that a copy's region of the whole tensor goes to."""
        held = self.placements[copy.placement].region
        inside = copy.region.relative_to(held.offsets)
        if not inside.fits(held.sizes):
            raise LayoutError(f"the plan puts region {copy.region} of a tensor into a placement of {held}", kind="copies")
        return box(self.typed(copy.placement), inside)

    def typed(self, index: int) -> torch.Tensor:
        """Placement ``index`` as a tensor of its dtype and shape."""
        found = self._typed.get(index)
        if found is None:
            placement = self.placements[index]
            raw = self.keep[placement.slab_offset : placement.slab_offset + placement.nbytes]
            found = raw.view(self._dtypes[index]).view(placement.region.sizes)
            self._typed[index] = found
        return found


class _Box(NamedTuple):
    """One copy: a part of a leaf's tensor, and the part of a placement that takes it (equal shapes)."""

    leaf: Leaf
    source: torch.Tensor
    device: Device | None
    copy: SlabCopy


class _Copies:
    """What is to be copied for one list of leaves into one slab; cached while both stay the same."""

    def __init__(
        self, leaves: Sequence[Leaf], views: SlabViews, copies: Sequence[SlabCopy], eager: frozenset[str], devices: _Devices
    ) -> None:
        self.leaves = leaves
        self.views = views
        self.copies = copies
        self.eager = eager
        self.now: list[Callable[[], None]] = []
        self.late: list[Callable[[], None]] = []
        self.late_boxes: list[_Box] = []
        self.sources: list[torch.Tensor] = []
        """Keep alive the memory that the moves read: ``param.data = other`` frees it while a thread copies."""
        moves: dict[bool, list[Move]] = {False: [], True: []}
        remote: dict[tuple[int, bool], tuple[Device, list[torch.Tensor], list[torch.Tensor]]] = {}
        late_leaves: dict[str, Leaf] = {}
        for copy in copies:
            leaf = leaves[copy.tensor]
            # A tensor made in inference mode has no version to watch.
            late = leaf.late and leaf.spec.name not in eager and not leaf.tensor.is_inference()
            if late:
                late_leaves[leaf.spec.name] = leaf
            if not copy.region.numel:
                continue
            source = _source(leaf, copy.region)
            device = devices.get(source.device)
            if late:
                self.late_boxes.append(_Box(leaf, source, device, copy))
            plain = device is None and not source.is_neg() and not source.is_conj()
            if plain and source.is_contiguous() and copy.region == views.placements[copy.placement].region:
                # The usual case, without making a view of the slab.
                moves[late].append((views.addresses[copy.placement], source.data_ptr(), views.placements[copy.placement].nbytes))
                self.sources.append(source)
                continue
            target = views.target(copy)
            if device is not None:
                _, targets, sources = remote.setdefault((id(device), late), (device, [], []))
                targets.append(target)
                sources.append(source)
                continue
            rows = _rows(target, source) if plain else None
            if rows is None:
                (self.late if late else self.now).extend(_strided(target, source))
            else:
                moves[late] += rows
                self.sources.append(source)
        for late, todo in moves.items():
            (self.late if late else self.now).extend(_mover(group) for group in _chunks(todo))
        self.remote = [(device, late, targets, sources) for (_, late), (device, targets, sources) in remote.items()]
        self.late_leaves = list(late_leaves.values())
        self.late_tensors = [leaf.tensor for leaf in self.late_leaves]
        self._samples: dict[int, _Samples] = {}

    def samples(self, step: int) -> _Samples:
        """The bytes to look at for this step."""
        turn = step % _SAMPLE_SETS
        if turn not in self._samples:
            self._samples[turn] = _Samples(self, turn)
        return self._samples[turn]


def _source(leaf: Leaf, region: Region) -> torch.Tensor:
    """The part of a leaf's tensor that holds a region of the whole one."""
    tensor = leaf.tensor.detach()
    if leaf.chunks is None:
        return box(tensor, region)
    for chunk in leaf.chunks:
        inside = region.relative_to(chunk.region.offsets)
        if inside.fits(chunk.region.sizes):
            return box(tensor, inside.moved_by(chunk.local.offsets))
    raise LayoutError(
        f"the plan takes region {region} of {leaf.spec.name!r} from this rank, which holds "
        f"{', '.join(str(chunk.region) for chunk in leaf.chunks) or 'nothing of it'}",
        key=leaf.spec.name,
        kind="copies",
    )


def _rows(target: torch.Tensor, source: torch.Tensor) -> list[Move] | None:
    """The copy as moves of bytes; None where rows are too short for that."""
    # Dimensions from the inside out, as long as both sides have them without gaps.
    inner, run = source.dim(), 1
    while inner and (source.shape[inner - 1] == 1 or source.stride(inner - 1) == target.stride(inner - 1) == run):
        inner -= 1
        run *= source.shape[inner]
    nbytes = run * source.element_size()
    if inner and nbytes < _ROW_NBYTES:
        return None
    rows: list[Move] = [(target.data_ptr(), source.data_ptr(), nbytes)]
    for dim in reversed(range(inner)):
        there, here = target.stride(dim) * target.element_size(), source.stride(dim) * source.element_size()
        rows = [(t + index * there, s + index * here, n) for index in range(source.shape[dim]) for t, s, n in rows]
    return rows


class _Devices:
    """One seam for each accelerator, and which slabs it has pinned."""

    def __init__(self, make: Callable[[torch.device], Device | None], notice: Callable[[str], None]) -> None:
        self._make = make
        self._notice = notice
        self._known: dict[torch.device, Device | None] = {}
        self._pinned: dict[int, Device | None] = {}

    def get(self, device: torch.device) -> Device | None:
        """The seam of a device; None for the host."""
        if device not in self._known:
            self._known[device] = self._make(device)
        return self._known[device]

    def pin(self, views: SlabViews) -> None:
        """Register the slab's mapping once, for all devices, if there is one. Without it copies work, but wait for the host."""
        device = next((device for device in self._known.values() if device is not None), None)
        if device is not None and views.address not in self._pinned:
            self._pinned[views.address] = device
            try:
                device.register(views.address, views.nbytes)
            except CapacityError as error:
                self._pinned[views.address] = None
                self._notice(f"{error}: saves copy into unpinned memory and are slower")

    def unpin(self, address: int | None = None) -> None:
        """Release the page lock of one mapping, or of all."""
        for pinned in list(self._pinned):
            if address is None or pinned == address:
                device = self._pinned.pop(pinned)
                if device is not None:
                    device.unregister(pinned)


def _chunks(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Group small moves, split large ones: about ``_CHUNK_NBYTES`` each."""
    group: list[Move] = []
    size = 0
    for target, source, nbytes in moves:
        for at in range(0, nbytes, _CHUNK_NBYTES):
            part = min(_CHUNK_NBYTES, nbytes - at)
            group.append((target + at, source + at, part))
            size += part
            if size >= _CHUNK_NBYTES or len(group) >= 512:
                yield group
                group, size = [], 0
    if group:
        yield group


def _mover(group: list[Move]) -> Callable[[], None]:
    move = ctypes.memmove

    def run() -> None:
        for target, source, nbytes in group:
            move(target, source, nbytes)

    return run


def _strided(target: torch.Tensor, source: torch.Tensor) -> Iterator[Callable[[], None]]:
    """Copies by torch, cut along the longest dimension into about ``_CHUNK_NBYTES`` each."""

    def run(target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)

    size = max(source.shape, default=1)
    count = min(size, -(-source.numel() * source.element_size() // _CHUNK_NBYTES))
    if count <= 1:
        yield functools.partial(run, target, source)
        return
    dim = list(source.shape).index(size)
    for to, of in zip(target.chunk(count, dim), source.chunk(count, dim), strict=True):
        yield functools.partial(run, to, of)


_version = operator.attrgetter("_version")  # torch has no public name for it


class _Samples:
    """Which bytes of the late tensors are looked at: a bounded number, drawn once and used every ``_SAMPLE_SETS`` saves."""

    def __init__(self, copies: _Copies, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 (no secret)
        late, count = copies.late_boxes, len(copies.late_boxes)
        self.host: list[tuple[int, int, int, int]] = []
        """(which late box, address in it, address in the slab, nbytes)."""
        self.remote: dict[int, tuple[Device, list[int], list[torch.Tensor]]] = {}
        for which in range(count) if count <= _SAMPLED_LEAVES else sorted(chance.sample(range(count), _SAMPLED_LEAVES)):
            _, source, device, copy = late[which]
            target = copies.views.target(copy)
            if source.is_neg() or source.is_conj():
                continue
            at = [chance.randrange(size) for size in source.shape]
            itemsize = source.element_size()
            take = itemsize
            if at and source.stride(-1) == target.stride(-1) == 1:
                length = min(max(_SAMPLE_NBYTES // itemsize, 1), source.shape[-1])
                at[-1] = min(at[-1], source.shape[-1] - length)
                take = length * itemsize
            begin = sum(map(operator.mul, at, source.stride()))
            if device is None:
                there = target.data_ptr() + itemsize * sum(map(operator.mul, at, target.stride()))
                self.host.append((which, source.data_ptr() + itemsize * begin, there, take))
            else:
                _, owners, slices = self.remote.setdefault(id(device), (device, [], []))
                owners.append(which)
                slices.append(source.as_strided((take // itemsize,), (1,), source.storage_offset() + begin).view(torch.uint8))


class _Watch:
    """What the late tensors were at the call, to compare when their copy is over."""

    def __init__(self, copies: _Copies, step: int) -> None:
        self.copies = copies
        self.samples = copies.samples(step)
        self.versions = list(map(_version, copies.late_tensors))
        look = ctypes.string_at
        self.seen = [look(source, nbytes) for _, source, _, nbytes in self.samples.host]
        self.before = self._gathered()
        self.after: dict[int, torch.Tensor] = {}

    def _gathered(self) -> dict[int, torch.Tensor]:
        return {key: device.gather(slices) for key, (device, _, slices) in self.samples.remote.items()}

    def copied(self) -> None:
        """The accelerators' copies are enqueued: enqueue the second look behind them."""
        self.after = self._gathered()

    def changed(self) -> list[str]:
        """Names of the tensors that are not what they were at the call, or not in the slab what they were."""
        torn: dict[str, None] = {}
        copies, look = self.copies, ctypes.string_at
        versions = list(map(_version, copies.late_tensors))
        if versions != self.versions:
            pairs = zip(copies.late_leaves, self.versions, versions, strict=True)
            torn.update((leaf.spec.name, None) for leaf, was, now in pairs if was != now)
        for (which, source, target, nbytes), before in zip(self.samples.host, self.seen, strict=True):
            # ``param.data = other`` is no harm: this is the memory that the call saw, kept alive by the copies, and it is what was copied.
            if look(source, nbytes) != before or look(target, nbytes) != before:
                torn[copies.late_boxes[which].leaf.spec.name] = None
        return list(torn)

    def changed_remotely(self) -> list[str]:
        """The same for accelerators, once the marks are done."""
        torn: dict[str, None] = {}
        for key, (_, owners, slices) in self.samples.remote.items():
            at = 0
            for which, piece in zip(owners, slices, strict=True):
                end = at + piece.numel()
                if not torch.equal(self.before[key][at:end], self.after[key][at:end]):
                    torn[self.copies.late_boxes[which].leaf.spec.name] = None
                at = end
        return list(torn)


class Staging:
    """One snapshot on its way into a slab."""

    def __init__(self, step: int, copies: _Copies, watch: _Watch | None) -> None:
        self.step = step
        self.watch = watch
        self.marks: list[tuple[Device, Mark]] = []
        self.error: CheckpointError | None = None
        self.torn: list[str] = []
        self.stage_s = 0.0
        self.copied = threading.Event()
        self.fenced = threading.Event()
        self._chunks = copies.late
        self._changed = threading.Condition()
        self._untaken = collections.deque(range(len(self._chunks)))
        self._busy: dict[int, int] = {}
        self._copied: set[int] = set()
        self._settling = threading.Lock()
        self._failed: Exception | None = None
        if not self._chunks:
            self.copied.set()

    def work(self, *, to_the_end: bool = False) -> None:
        """Copy chunks until none is left to take, beside anybody else who does so.

        An interrupt (Ctrl-C in the training thread) may break off anywhere in here: the chunk is then taken by somebody else, with
        ``to_the_end`` also one that is given back late. No chunk counts as copied that is not, and none is copied again once it counts.
        """
        me = threading.get_ident()
        while True:
            with self._changed:
                self._give_back(me)
                while to_the_end and not self._untaken and len(self._copied) < len(self._chunks):
                    self._changed.wait()
                if not self._untaken:
                    return
                self._busy[me] = self._untaken[0]
                self._untaken.popleft()
            try:
                self._chunks[self._busy[me]]()
            except Exception as error:  # whatever torch raises for a strided copy: it fails this snapshot, not training
                self._failed = error
            except BaseException:
                with self._changed:
                    self._give_back(me)
                raise
            with self._changed:
                self._copied.add(self._busy[me])
                del self._busy[me]
                if len(self._copied) == len(self._chunks):
                    self.copied.set()
                self._changed.notify_all()

    def _give_back(self, me: int) -> None:
        index = self._busy.pop(me, None)
        if index is not None and index not in self._copied and index not in self._untaken:
            self._untaken.appendleft(index)
            self._changed.notify_all()

    def settle(self) -> None:
        """Compare, once, when the host's copies are over; from then on the tensors may change."""
        with self._settling:
            if not self.fenced.is_set():
                if self.watch is not None:
                    self.judge(self.watch.changed())
                if self._failed is not None:
                    self.fail(self._failed)
                self.fenced.set()

    def fail(self, error: Exception) -> None:
        """Something nobody expected: this snapshot must not be sealed."""
        message = f"copying step {self.step} into the slab failed: {error!r}"
        self.error = CheckpointError(message, step=self.step, kind="stage", hint="training goes on; the next save tries again")

    def judge(self, torn: list[str]) -> None:
        """Remember which tensors changed, and fail the snapshot if any did."""
        self.torn.extend(torn)
        if self.torn and self.error is None:
            names = ", ".join(repr(name) for name in self.torn[:3])
            more = f" and {len(self.torn) - 3} more" if len(self.torn) > 3 else ""
            self.error = TornSnapshotError(
                f"the snapshot of step {self.step} is torn: {names}{more} changed between save and the next optimizer step",
                step=self.step,
                key=self.torn[0],
                kind="torn",
                hint="they are copied inside save() from now on; pass overlap=False if other tensors follow",
            )


class Stager:
    """Owns the staging thread, the fence, and the cached copies. One snapshot at a time.

    Args:
        make_device: Gives the seam for an accelerator; tests pass a fake.
        notice: Called with one line when the way of copying changes.
    """

    def __init__(self, *, notice: Callable[[str], None], make_device: Callable[[torch.device], Device | None] = device_for) -> None:
        self._notice = notice
        self._devices = _Devices(make_device, notice)
        self._copies: dict[int, _Copies] = {}
        self.eager: frozenset[str] = frozenset()
        self._current: Staging | None = None
        self._finish: Callable[[Staging], None] | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._fence_s = 0.0

    def stage(
        self,
        *,
        step: int,
        leaves: Sequence[Leaf],
        copies: Sequence[SlabCopy],
        views: SlabViews,
        overlap: bool,
        finish: Callable[[Staging], None],
    ) -> Staging:
        """Copy each box of ``copies`` from its leaf to its placement. Keep the same sequence while nothing changes: it is compared.

        With ``overlap`` returns when what may change early is copied; else when everything is. ``finish`` is called once, from the staging
        thread, or inside the call when nothing overlaps.
        """
        cached = self._copies.get(id(views))
        if (
            cached is None
            or cached.leaves is not leaves
            or cached.eager is not self.eager
            or cached.views is not views
            or (cached.copies is not copies and cached.copies != copies)
        ):
            # Those of other leaves are of no use any more, and keep memory.
            self._copies = {key: known for key, known in self._copies.items() if known.leaves is leaves}
            cached = self._copies[id(views)] = _Copies(leaves, views, copies, self.eager, self._devices)
        self._devices.pin(views)
        began = time.perf_counter()
        watch = _Watch(cached, step) if overlap and cached.late_leaves else None
        staging = Staging(step, cached, watch)
        for chunk in cached.now:
            chunk()
        touched: dict[int, Device] = {}
        for device, late, targets, sources in cached.remote:
            (device.copy_late if late and overlap else device.copy_now)(targets, sources)
            touched[id(device)] = device
        if watch is not None:
            watch.copied()
        staging.marks = [(device, device.mark()) for device in touched.values()]
        if overlap and (cached.late or staging.marks):
            with self._wake:
                self._start()
                self._current, self._finish = staging, finish
                self._wake.notify_all()
            return staging
        staging.work()
        for _, mark in staging.marks:
            mark.wait()
        staging.settle()
        staging.stage_s = time.perf_counter() - began
        finish(staging)
        return staging

    def fence(self) -> float:
        """Wait until the snapshot under way no longer needs the tensors; copies along. Returns the seconds waited.

        For accelerators the training stream waits, not the host.
        """
        staging = self._current
        if staging is None or staging.fenced.is_set() or threading.current_thread() is self._thread:
            return 0.0
        began = time.perf_counter()
        staging.work()
        staging.copied.wait()
        for device, mark in staging.marks:
            device.hold_training(mark)
        staging.settle()
        waited = time.perf_counter() - began
        self._fence_s += waited
        return waited

    def take_fence_s(self) -> float:
        """Seconds waited in fences since this was asked last."""
        waited, self._fence_s = self._fence_s, 0.0
        return waited

    def idle(self) -> None:
        """Wait until the snapshot under way is finished altogether (sealed or failed)."""
        with self._wake:
            self._wake.wait_for(lambda: self._current is None)

    def forget_views(self, views: SlabViews) -> None:
        """Drop what is cached for a slab that is no longer used."""
        self._copies.pop(id(views), None)
        self._devices.unpin(views.address)

    def close(self) -> None:
        """End the thread after the snapshot under way."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._devices.unpin()
        self._copies.clear()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="everystep-staging", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._current is not None or self._closing)
                staging, finish = self._current, self._finish
                if staging is None or finish is None:
                    return
            try:
                self._carry(staging)
            except Exception as error:  # the thread's top: training must neither hang nor lose the reason
                staging.fail(error)
            finally:
                staging.fenced.set()
            try:
                finish(staging)
            finally:
                self._done()
                del staging, finish  # they hold the checkpointer, which may be dropped

    def _carry(self, staging: Staging) -> None:
        """Copy, wait for the accelerators, judge."""
        began = time.perf_counter()
        staging.work(to_the_end=True)
        for _, mark in staging.marks:
            mark.wait()
        staging.settle()
        if staging.watch is not None:
            staging.judge(staging.watch.changed_remotely())
        staging.stage_s = time.perf_counter() - began
        if staging.torn:
            self.eager = self.eager | frozenset(staging.torn)
            self._notice(
                f"changed between save and the optimizer step: {len(staging.torn)} tensor{'s' * (len(staging.torn) > 1)}, first "
                f"{staging.torn[0]!r}; copied inside save() from now on"
            )

    def _done(self) -> None:
        with self._wake:
            self._current = None
            self._finish = None
            self._wake.notify_all()


def order_of(plan: SavePlan, leaves: Sequence[Leaf]) -> list[SlabCopy]:
    """The copies of one process that holds everything: each leaf, whole, to its placement."""
    where: Mapping[str, int] = {plan.tensors[placement.tensor].name: index for index, placement in enumerate(plan.placements)}
    places = [where[leaf.spec.name] for leaf in leaves]
    return [SlabCopy(number, index, plan.placements[index].region) for number, index in enumerate(places)]
