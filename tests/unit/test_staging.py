"""Staging: eager and late copies, the fence, torn snapshots, the accelerator seam."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import pytest
import torch

from everystep.errors import LayoutError, TornSnapshotError
from everystep.layout import HeldTensor, RankLayout, SlabCopy, plan_world
from everystep.manifest import TensorSpec
from everystep.plan import SavePlan, plan_save
from everystep.region import Region
from everystep.trainer.sharding import Chunk, box
from everystep.trainer.staging import SlabViews, Stager, Staging, order_of
from everystep.trainer.staging import _rows as staging_rows
from everystep.trainer.staging import _strided as staging_strided
from everystep.trainer.state import Leaf

_WORDS = {torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16"}


def leaf(name: str, tensor: torch.Tensor, *, late: bool = True) -> Leaf:
    return Leaf(spec=TensorSpec(f"m.{name}", _WORDS[tensor.dtype], tuple(tensor.shape), "m"), tensor=tensor, late=late)


class Bench:
    """A stager with one slab, and what the slab holds afterwards."""

    def __init__(self, leaves: Sequence[Leaf], **options: object) -> None:
        self.notices: list[str] = []
        self.stager = Stager(notice=self.notices.append, **options)  # type: ignore[arg-type]
        self.leaves = leaves
        self.plan: SavePlan = plan_save([one.spec for one in leaves], aliases={})
        self.order = order_of(self.plan, leaves)
        self.slab = mmap.mmap(-1, self.plan.nbytes)
        self.views = SlabViews(memoryview(self.slab), self.plan, [self._dtype(index) for index in range(len(leaves))])
        self.finished: list[Staging] = []

    def _dtype(self, index: int) -> torch.dtype:
        name = self.plan.tensors[self.plan.placements[index].tensor].name
        return next(one.tensor.dtype for one in self.leaves if one.spec.name == name)

    def stage(self, step: int, *, overlap: bool = True) -> Staging:
        return self.stager.stage(
            step=step, leaves=self.leaves, copies=self.order, views=self.views, overlap=overlap, finish=self.finished.append
        )

    def staged(self, name: str) -> torch.Tensor:
        index = next(copy.placement for copy in self.order if self.leaves[copy.tensor].spec.name == f"m.{name}")
        return self.views.typed(index).clone()


class Gate:
    """A strided tensor whose copy can be held: stands for a slow copy."""

    def __init__(self, stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
        from everystep.trainer import staging

        self.open = threading.Event()
        self.reached = threading.Event()
        real = staging._strided

        def held(target: torch.Tensor, source: torch.Tensor) -> object:
            runs = list(real(target, source))

            def wait() -> None:
                self.reached.set()
                assert self.open.wait(20)
                for run in runs:
                    run()

            return [wait]

        monkeypatch.setattr(staging, "_strided", held)


def test_everything_arrives_overlapped_or_not() -> None:
    """Contiguous, strided, empty and 0-dim tensors are in the slab bit by bit, both ways."""
    for overlap in (True, False):
        tensors = {
            "big": torch.randn(3000, 2000),
            "strided": torch.randn(64, 32).t(),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(3.5),
            "half": torch.randn(7).to(torch.bfloat16),
        }
        bench = Bench([leaf(name, tensor, late=name != "scalar") for name, tensor in tensors.items()])
        bench.stage(1, overlap=overlap)
        bench.stager.fence()
        bench.stager.idle()
        bench.stager.close()
        assert [one.error for one in bench.finished] == [None]
        for name, tensor in tensors.items():
            assert torch.equal(bench.staged(name), tensor), name


def test_eager_tensors_hold_the_value_of_the_call() -> None:
    """F2: a tensor that may change early is copied before stage returns."""
    step = torch.tensor(1, dtype=torch.int64)
    bench = Bench([leaf("w", torch.randn(1000, 1000)), leaf("step", step, late=False)])
    bench.stage(1)
    step.add_(41)
    bench.stager.fence()
    bench.stager.idle()
    bench.stager.close()
    assert bench.staged("step") == 1


def test_fence_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence does not open while a chunk is still being copied."""
    weight = torch.randn(64, 32).t()
    stager_bench = Bench([leaf("w", weight)])
    gate = Gate(stager_bench.stager, monkeypatch)
    stager_bench.stage(1)
    assert gate.reached.wait(20)
    passed = threading.Event()
    waiter = threading.Thread(target=lambda: (stager_bench.stager.fence(), passed.set()))
    waiter.start()
    assert not passed.wait(0.05)
    gate.open.set()
    waiter.join(20)
    assert passed.is_set()
    stager_bench.stager.idle()
    stager_bench.stager.close()
    assert torch.equal(stager_bench.staged("w"), weight)


def _in_place(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def _through_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(3)


def _through_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[...] = 5


def _swapped(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones_like(tensor)


def test_a_swapped_storage_is_copied_as_the_call_saw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``param.data = other`` (an offload, ``model.half()``) before the fence: the snapshot holds the values of the call."""
    weight, other = torch.randn(500, 100), torch.randn(64, 32).t()
    bench = Bench([leaf("w", weight), leaf("slow", other)])
    gate = Gate(bench.stager, monkeypatch)
    before = weight.clone()
    bench.stage(1)
    assert gate.reached.wait(20)
    _swapped(weight)
    gate.open.set()
    bench.stager.fence()
    bench.stager.idle()
    bench.stager.close()
    assert bench.finished[0].error is None
    assert torch.equal(bench.staged("w"), before)


@pytest.mark.parametrize("change", [_in_place, _through_data, _through_numpy])
def test_a_change_before_the_fence_is_torn(change: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """In-place writes, `.data` writes, numpy writes and storage swaps before the fence fail that snapshot, and only that."""
    weight, other = torch.randn(500, 100), torch.randn(64, 32).t()
    bench = Bench([leaf("w", weight), leaf("slow", other)])
    gate = Gate(bench.stager, monkeypatch)
    bench.stage(1)
    assert gate.reached.wait(20)
    change(weight)  # type: ignore[operator]
    gate.open.set()
    bench.stager.fence()
    bench.stager.idle()
    assert isinstance(bench.finished[0].error, TornSnapshotError)
    assert bench.finished[0].torn == ["m.w"]
    assert len(bench.notices) == 1
    # From now on that tensor is copied in the call: the same change harms nothing, and the value is the call's.
    bench.leaves = [leaf("w", weight), leaf("slow", other)]
    before = weight.clone()
    bench.stage(2)
    change(weight)  # type: ignore[operator]
    bench.stager.fence()
    bench.stager.idle()
    bench.stager.close()
    assert bench.finished[1].error is None
    assert torch.equal(bench.staged("w"), before)


def test_many_tensors_are_sampled_within_a_bound() -> None:
    """With more tensors than the sample, a change of all of them behind the counter's back is still found."""
    tensors = [torch.randn(16) for _ in range(2000)]
    bench = Bench([leaf(str(index), tensor) for index, tensor in enumerate(tensors)])
    copies_done = bench.stage(1)
    copies_done.copied.wait(20)
    bench.stager.idle()
    watch = copies_done.watch
    assert watch is not None
    assert len(watch.samples.host) == 256
    for tensor in tensors:
        tensor.numpy()[...] += 1
    assert watch.changed()
    bench.stager.close()


class FakeMark:
    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self) -> None:
        assert self.event.wait(20)


class FakeDevice:
    """An accelerator on the host: late copies run only when the test lets the stream go."""

    def __init__(self) -> None:
        self.queue: list[object] = []
        self.log: list[str] = []
        self.marks: list[FakeMark] = []

    def register(self, address: int, nbytes: int) -> None:
        self.log.append("register")

    def unregister(self, address: int) -> None:
        self.log.append("unregister")

    def copy_now(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.log.append("now")
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def copy_late(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.log.append("late")
        self.queue.extend((lambda t=t, s=s: t.copy_(s)) for t, s in zip(targets, sources, strict=True))

    def gather(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        result = torch.zeros(sum(source.numel() for source in sources), dtype=torch.uint8)
        self.queue.append(lambda: result.copy_(torch.cat(list(sources))))
        return result

    def mark(self) -> FakeMark:
        mark = FakeMark()
        self.marks.append(mark)
        self.queue.append(mark.event.set)
        return mark

    def hold_training(self, mark: FakeMark) -> None:
        self.log.append("hold")

    def go(self) -> None:
        for work in self.queue:
            work()  # type: ignore[operator]
        self.queue.clear()


def test_accelerator_fence_holds_the_stream_not_the_host() -> None:
    """With an accelerator the fence returns while copies are queued, and the snapshot is finished when they have run."""
    weight, counter = torch.randn(40, 10), torch.tensor(2, dtype=torch.int64)
    device = FakeDevice()
    bench = Bench([leaf("w", weight), leaf("n", counter, late=False)], make_device=lambda _: device)
    bench.stage(1)
    bench.stager.fence()
    assert sorted(device.log) == ["hold", "late", "now", "register"]
    assert device.log[-1] == "hold"
    assert bench.finished == []
    device.go()
    bench.stager.idle()
    assert [one.error for one in bench.finished] == [None]
    assert torch.equal(bench.staged("w"), weight)
    assert bench.staged("n") == 2
    bench.stager.close()
    assert device.log[-1] == "unregister"


def test_accelerator_contents_are_sampled_on_its_stream() -> None:
    """A write that reaches the tensor between the first sample and the copy's end is torn although no counter moved."""
    weight = torch.randn(40, 10)
    device = FakeDevice()
    bench = Bench([leaf("w", weight)], make_device=lambda _: device)
    bench.stage(1)
    device.queue[0]()  # type: ignore[operator]  # the sample taken at the call
    weight.numpy()[...] = 0
    del device.queue[0]
    bench.stager.fence()
    device.go()
    bench.stager.idle()
    bench.stager.close()
    assert isinstance(bench.finished[0].error, TornSnapshotError)


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt."""


def test_an_interrupted_chunk_is_copied_by_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the fence in the middle of a chunk: the chunk does not count as copied, and the snapshot is whole in the end."""
    from everystep.trainer import staging

    main, real = threading.get_ident(), staging._strided
    broken, taken = [], threading.Event()

    def breaking(target: torch.Tensor, source: torch.Tensor) -> object:
        (run,) = real(target, source)

        def chunk() -> None:
            if threading.get_ident() == main and not broken:
                broken.append(1)
                raise Interrupted
            if threading.get_ident() != main:
                taken.set()
                while not broken:  # leave the main thread something to take
                    threading.Event().wait(0.001)
            run()

        return [chunk]

    monkeypatch.setattr(staging, "_strided", breaking)
    tensors = [torch.randn(64, 32).t() for _ in range(6)]
    bench = Bench([leaf(str(index), tensor) for index, tensor in enumerate(tensors)])
    bench.stage(1)
    assert taken.wait(20)
    with pytest.raises(Interrupted):
        bench.stager.fence()
    bench.stager.idle()
    bench.stager.close()
    assert broken
    assert [one.error for one in bench.finished] == [None]
    assert all(torch.equal(bench.staged(str(index)), tensor) for index, tensor in enumerate(tensors))


def test_an_error_in_the_staging_thread_fails_the_save_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in the thread: the snapshot fails, the fence opens, the next one works."""
    from everystep.trainer import staging

    weight = torch.randn(500, 100)
    bench = Bench([leaf("w", weight)])
    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "settle", lambda _: (_ for _ in ()).throw(MemoryError("none")))
        bench.stage(1)
        bench.stager.idle()
    assert "MemoryError" in str(bench.finished[0].error)
    bench.stage(2)
    bench.stager.fence()
    bench.stager.idle()
    bench.stager.close()
    assert bench.finished[1].error is None
    assert torch.equal(bench.staged("w"), weight)


def test_memory_that_cannot_be_pinned_is_only_slower() -> None:
    """A failed page lock is a notice, not the end of saving."""
    from everystep.errors import CapacityError

    class Unpinnable(FakeDevice):
        def register(self, address: int, nbytes: int) -> None:
            raise CapacityError("no", kind="pinned-memory")

    device = Unpinnable()
    bench = Bench([leaf("w", torch.randn(4, 4))], make_device=lambda _: device)
    for step in (1, 2):
        bench.stage(step)
        bench.stager.fence()
        device.go()
        bench.stager.idle()
    bench.stager.close()
    assert [one.error for one in bench.finished] == [None, None]
    assert len(bench.notices) == 1


# -- boxes of whole tensors -----------------------------------------------------------------------------------------------


class Ranks:
    """Several ranks' stagers over one slab: each rank has some regions of each tensor."""

    def __init__(self, held: dict[str, tuple[torch.Tensor, list[list[Region]]]], ranks: int) -> None:
        self.whole = {name: tensor for name, (tensor, _) in held.items()}
        self.leaves = [[self._leaf(name, tensor, regions[rank]) for name, (tensor, regions) in held.items()] for rank in range(ranks)]
        layouts = [
            RankLayout(0, tuple(HeldTensor(one.spec, tuple(chunk.region for chunk in one.chunks or ())) for one in leaves), {})
            for leaves in self.leaves
        ]
        [self.node] = plan_world(layouts)
        self.plan = self.node.plan
        self.slab = mmap.mmap(-1, self.plan.nbytes)
        dtypes = [self.whole[self.plan.tensors[one.tensor].name.removeprefix("m.")].dtype for one in self.plan.placements]
        self.views = [SlabViews(memoryview(self.slab), self.plan, dtypes) for _ in range(ranks)]
        self.stagers = [Stager(notice=lambda _: None) for _ in range(ranks)]
        self.finished: list[Staging] = []

    def _leaf(self, name: str, tensor: torch.Tensor, regions: list[Region]) -> Leaf:
        """The regions side by side in a local tensor along its first dimension."""
        pieces = [box(tensor, region) for region in regions]
        starts = [sum(len(piece) for piece in pieces[:index]) for index in range(len(pieces))]
        local = torch.cat(pieces) if pieces else tensor.new_empty(0)
        spec = TensorSpec(f"m.{name}", _WORDS[tensor.dtype], tuple(tensor.shape), "m")
        places = [Region((start, *(0,) * (tensor.dim() - 1)), region.sizes) for start, region in zip(starts, regions, strict=True)]
        return Leaf(spec, local, late=True, chunks=tuple(map(Chunk, regions, places)))

    def stage(self, rank: int, step: int = 1, *, overlap: bool = True) -> None:
        self.stagers[rank].stage(step=step, leaves=self.leaves[rank], copies=self.node.copies[rank], views=self.views[rank], overlap=overlap,
                                 finish=self.finished.append)  # fmt: skip

    def end(self) -> list[object]:
        for stager in self.stagers:
            stager.fence()
            stager.idle()
            stager.close()
        return [one.error for one in self.finished]

    def staged(self, name: str) -> torch.Tensor:
        """The whole tensor, put together from its placements."""
        found = torch.full_like(self.whole[name], -1)
        for index, placement in enumerate(self.plan.placements):
            if self.plan.tensors[placement.tensor].name == f"m.{name}":
                box(found, placement.region).copy_(self.views[0].typed(index))
        return found


def halves(shape: tuple[int, ...], dim: int, cut: int) -> list[list[Region]]:
    """One region for each of two ranks, cut along a dimension."""
    first, rest = list(shape), list(shape)
    first[dim], rest[dim] = cut, shape[dim] - cut
    offsets = [0] * len(shape)
    offsets[dim] = cut
    return [[Region((0,) * len(shape), tuple(first))], [Region(tuple(offsets), tuple(rest))]]


def test_boxes_of_several_ranks_make_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row, column and mixed shards, several to a rank, long rows and short ones, come together in one slab bit by bit."""
    monkeypatch.setattr("everystep.trainer.staging._ROW_NBYTES", 1 << 10)
    for overlap in (True, False):
        held = {
            "rows": (torch.randn(7, 5), halves((7, 5), 0, 3)),
            "columns": (torch.randn(6, 9), halves((6, 9), 1, 4)),
            "wide": (torch.randn(5, 2, 700), halves((5, 2, 700), 2, 300)),
            "middle": (torch.randn(3, 4, 600), halves((3, 4, 600), 1, 1)),
            "empty": (torch.randn(1, 3), [[Region((0, 0), (1, 3))], []]),
            "both": (torch.randn(4, 3), [[Region((0, 0), (4, 3))]] * 2),
            "mixed": (torch.arange(24).view(6, 4), [[Region((0, 0), (2, 4)), Region((4, 0), (2, 4))], [Region((2, 0), (2, 4))]]),
            "half": (torch.randn(8).to(torch.bfloat16), halves((8,), 0, 5)),
        }
        ranks = Ranks(held, 2)
        for rank in (0, 1):
            ranks.stage(rank, overlap=overlap)
        assert ranks.end() == [None, None]
        assert {name for name, (tensor, _) in held.items() if not torch.equal(ranks.staged(name), tensor)} == set()


def test_long_rows_are_moves_and_short_ones_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous boxes are one move, long rows one each; shorter ones do not go by moves."""
    monkeypatch.setattr("everystep.trainer.staging._ROW_NBYTES", 32 << 10)
    slab = torch.zeros(40, 20000)
    source = torch.randn(40, 20000)
    rows = staging_rows(slab[4:9], source[10:15])
    assert rows == [(slab[4:9].data_ptr(), source[10:15].data_ptr(), 5 * 80000)]
    rows = staging_rows(slab[:, 5000:15000], source[:, :10000])
    assert rows is not None
    assert sorted(rows) == [(slab[i, 5000:].data_ptr(), source[i].data_ptr(), 40000) for i in range(40)]
    assert staging_rows(slab[:, :8000], source[:, :8000]) is None


@pytest.mark.parametrize("dim", [0, 1])
def test_a_torn_box_is_noticed(dim: int) -> None:
    """Writes that raise no version counter into a sharded tensor, contiguous or not in the slab, fail the snapshot."""
    ranks = Ranks({"w": (torch.randn(50, 40), halves((50, 40), dim, 20))}, 2)
    local = ranks.leaves[1][0].tensor
    held = threading.Event()
    real = Staging.settle

    def settle(self: Staging) -> None:
        held.wait(20)
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "settle", settle)
        ranks.stage(1)
        ranks.finished.clear()
        local.numpy()[...] += 1.0
        held.set()
        errors = ranks.end()
    assert [type(error) for error in errors] == [TornSnapshotError]
    assert "'m.w'" in str(errors[0])


def test_a_changed_version_of_a_box_is_noticed() -> None:
    """An ordinary write in place between the call and the fence fails the snapshot; on the next step the box is copied in the call."""
    ranks = Ranks({"w": (torch.randn(5, 4), halves((5, 4), 1, 2))}, 2)
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(ranks.stagers[0], patch)
        ranks.stage(0)
        assert gate.reached.wait(20)
        ranks.leaves[0][0].tensor.add_(1)
        gate.open.set()
        ranks.stagers[0].fence()
        ranks.stagers[0].idle()
    assert isinstance(ranks.finished[0].error, TornSnapshotError)
    assert ranks.stagers[0].eager == {"m.w"}
    ranks.stage(0, 2)
    assert ranks.end()[1] is None


def test_only_what_this_rank_copies_is_watched() -> None:
    """A replica whose part another rank writes may change its tensors at once."""
    tensor = torch.randn(4, 4)
    ranks = Ranks({"w": (tensor, [[Region((0, 0), (4, 4))]] * 2)}, 2)
    [idle] = [rank for rank in (0, 1) if not ranks.node.copies.get(rank)]
    ranks.stagers[idle].stage(
        step=1, leaves=ranks.leaves[idle], copies=(), views=ranks.views[idle], overlap=True, finish=ranks.finished.append
    )
    ranks.leaves[idle][0].tensor.add_(1)
    ranks.stage(1 - idle)
    assert ranks.end() == [None, None]
    assert torch.equal(ranks.staged("w"), tensor)


def test_a_plan_that_asks_for_what_is_not_held_is_refused() -> None:
    """A copy outside the rank's chunks names the region and what the rank holds."""
    ranks = Ranks({"w": (torch.randn(5, 4), halves((5, 4), 0, 2))}, 2)
    with pytest.raises(LayoutError, match=r"region \[1:3, 0:4\] of 'm\.w'.*holds \[0:2, 0:4\]"):
        ranks.stagers[0].stage(step=1, leaves=ranks.leaves[0], copies=[SlabCopy(0, 0, Region((1, 0), (2, 4)))], views=ranks.views[0],
                               overlap=False, finish=ranks.finished.append)  # fmt: skip


def test_a_plan_that_copies_out_of_a_placement_is_refused() -> None:
    """A copy that does not lie in its placement is refused before any byte is written: it would go into another tensor's."""
    tensor = torch.randn(5, 4)
    regions = halves((5, 4), 0, 2)
    one = Leaf(TensorSpec("m.w", "F32", (5, 4), "m"), tensor, late=False)
    layouts = [RankLayout(rank, (HeldTensor(one.spec, tuple(regions[rank])),), {}) for rank in (0, 1)]
    plan = plan_world(layouts)[1].plan
    views = SlabViews(memoryview(mmap.mmap(-1, plan.nbytes)), plan, [torch.float32])
    stager = Stager(notice=lambda _: None)
    stager.stage(step=1, leaves=[one], copies=[SlabCopy(0, 0, Region((3, 0), (2, 4)))], views=views, overlap=False, finish=lambda _: None)
    assert torch.equal(views.typed(0)[1:], tensor[3:])
    with pytest.raises(LayoutError, match=r"region \[1:3, 0:4\].*placement of \[2:5, 0:4\]"):
        stager.stage(
            step=2, leaves=[one], copies=[SlabCopy(0, 0, Region((1, 0), (2, 4)))], views=views, overlap=False, finish=lambda _: None
        )


def test_large_strided_copies_are_cut() -> None:
    """A strided copy of many chunks is many calls, so that a fence shares the work; together they copy everything."""
    source = torch.randn(3000, 4000).t()
    target = torch.zeros(4000, 3000)
    runs = list(staging_strided(target, source))
    assert len(runs) == 3
    for run in runs:
        run()
    assert torch.equal(target, source)
