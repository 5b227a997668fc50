"""The plan of a whole world: what each rank copies where in its node's slab, so that everything is stored exactly once. No I/O.

``plan_world`` gets from every rank what it holds and gives every node its files. It goes by regions, not by ranks' numbers or meshes:

1. Each tensor's distinct regions must cover it without meeting. Several ranks that hold the same region are its replicas.
2. Of each region, one replica writes; a large one is cut between several of them. Whoever has least to write so far is taken.
3. What the ranks of one node write of a tensor is merged to as few boxes as possible, usually one: the whole tensor, or the node's rows.
4. Each node's boxes are laid out in files as one process would do it (``plan.lay_out``).

Everything is done in a fixed order, so that equal layouts give equal plans on whatever machine.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from everystep.errors import LayoutError
from everystep.manifest import BLOCK_NBYTES, TensorSpec
from everystep.plan import MAX_FILE_NBYTES, SavePlan, check_aliases, check_dtype, file_stems, lay_out, node_suffix
from everystep.region import Region, is_run, missing, overlap, span, whole
from everystep.safetensors import DTYPES

MIN_CUT_NBYTES = 1 << 20
"""A region is not cut between its replicas into pieces smaller than this."""
MIN_BLOCK_NBYTES = 64 << 10
"""Digest blocks are not made smaller than this to end where ranks' shares do: a read skips no smaller gap (``plan_restore``)."""


class HeldTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one rank holds of a tensor: regions counted in the whole tensor. None, or only empty ones: nothing of it."""

    spec: TensorSpec
    regions: tuple[Region, ...]
    drifts: bool = False
    """Replicas may differ (statistics of batch norm): small ones are all taken from the lowest rank, so that they belong together."""


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """What one rank wants saved. ``node``: nodes are counted from 0, each has a rank."""

    node: int
    tensors: tuple[HeldTensor, ...]
    aliases: dict[str, str]
    """Tied name -> the name it is stored under, of tensors that this rank or others list."""


class SlabCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One box that a rank copies: ``region`` (counted in the whole tensor) of its ``tensors[tensor]`` into ``placements[placement]``.

    The region lies inside one of those that the rank holds, and inside the placement's.
    """

    tensor: int
    placement: int
    region: Region


class NodePlan(msgspec.Struct, frozen=True, array_like=True):
    """A node's slab, and by rank what is copied into it, in the order of the slab. Together the copies fill each placement once."""

    plan: SavePlan
    copies: dict[int, tuple[SlabCopy, ...]]


class _Cut:
    """How one tensor or many alike are held: computed once for all of the same shape and holdings."""

    __slots__ = ("alone", "alone_numel", "by_node", "holders", "replicated")

    def __init__(self, ranks: Sequence[int], held: Sequence[tuple[Region, ...]]) -> None:
        self.holders: dict[Region, list[int]] = {}
        """Distinct regions with elements -> the ranks that hold them, rising."""
        for rank, regions in zip(ranks, held, strict=True):
            for region in regions:
                if 0 not in region.sizes:
                    holders = self.holders.setdefault(region, [])
                    if not holders or holders[-1] != rank:
                        holders.append(rank)
        self.alone = [(holders[0], region) for region, holders in self.holders.items() if len(holders) == 1]
        self.replicated = [(region, holders) for region, holders in self.holders.items() if len(holders) > 1]
        self.alone_numel: dict[int, int] = {}
        """Rank -> elements that only it holds."""
        for rank, region in self.alone:
            self.alone_numel[rank] = self.alone_numel.get(rank, 0) + region.numel
        self.by_node: dict[int, _Share] | None = None


class _Share:
    """What the ranks of one node write of a tensor: boxes in the order of their offsets, and who writes what into each.

    ``runs``: by box, how many elements long the equal runs are into which its writers divide it; 0: they do not.
    """

    __slots__ = ("boxes", "runs", "writes")

    def __init__(self, writes: Sequence[tuple[int, Region]]) -> None:
        self.boxes = merge_boxes([region for _, region in writes])
        self.writes: list[list[tuple[int, Region]]] = [[] for _ in self.boxes]
        for rank, region in writes:
            self.writes[_box_with(self.boxes, region.offsets)].append((rank, region))
        self.runs = [_run(box, [region for _, region in of_box]) for box, of_box in zip(self.boxes, self.writes, strict=True)]


class _Tensor:
    """One tensor of the world, as the ranks list it."""

    __slots__ = ("cut", "drifts", "held", "index_at", "spec")

    cut: _Cut

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.drifts = False
        self.index_at: dict[int, int] = {}
        """Rank -> index in its layout, ranks rising."""
        self.held: list[tuple[Region, ...]] = []
        """What those ranks hold."""

    @property
    def told_by(self) -> int:
        """The first rank that lists it."""
        return next(iter(self.index_at))


def plan_world(layouts: Sequence[RankLayout], *, max_file_nbytes: int = MAX_FILE_NBYTES) -> list[NodePlan]:
    """The plans of all nodes, by node. ``layouts`` are by rank.

    A region that several ranks hold is written by one of them; from ``MIN_CUT_NBYTES`` for each of two pieces on, it is cut between them.
    A node's plan lists the tensors of which it stores something; a tensor without elements is stored by the first rank that lists it.

    Raises:
        LayoutError: Ranks disagree about a tensor or an alias, a region is out of bounds, held by nobody, or meets another without being
            the same; a name occurs twice in one rank, a dtype cannot be stored, a node has no rank. Names the tensor, regions and ranks.
    """
    nodes = _nodes_of(layouts)
    tensors = _collect(layouts)
    aliases = _aliases(layouts, tensors)
    _compare(tensors)
    shares = _share(tensors, [layout.node for layout in layouts])
    by_node: list[list[tuple[_Tensor, _Share]]] = [[] for _ in nodes]
    for tensor, of_tensor in zip(tensors.values(), shares, strict=True):
        for node, share in of_tensor.items():
            by_node[node].append((tensor, share))
    stems = file_stems(dict.fromkeys(tensor.spec.group for tensor in tensors.values()))
    plans = []
    for node, ranks in enumerate(nodes):
        suffix = node_suffix(node) if len(nodes) > 1 else ""
        plans.append(_plan_node(by_node[node], ranks, aliases=aliases, stems=stems, suffix=suffix, max_file_nbytes=max_file_nbytes))
    return plans


def _nodes_of(layouts: Sequence[RankLayout]) -> list[list[int]]:
    """Each node's ranks."""
    if not layouts:
        raise LayoutError("a world without ranks has nothing to plan", kind="world")
    nodes: dict[int, list[int]] = {}
    for rank, layout in enumerate(layouts):
        nodes.setdefault(layout.node, []).append(rank)
    if sorted(nodes) != list(range(len(nodes))):
        raise LayoutError(f"the nodes of {len(layouts)} ranks are {sorted(nodes)!r:.80}, not counted from 0 without gaps", kind="world")
    return [nodes[node] for node in range(len(nodes))]


def _collect(layouts: Sequence[RankLayout]) -> dict[str, _Tensor]:
    """Every tensor by name, in the order in which ranks list them; who holds what."""
    tensors: dict[str, _Tensor] = {}
    for rank, layout in enumerate(layouts):
        for index, held in enumerate(layout.tensors):
            spec = held.spec
            tensor = tensors.get(spec.name)
            if tensor is None:
                check_dtype(spec)
                tensor = tensors[spec.name] = _Tensor(spec)
            elif spec is not tensor.spec and spec != tensor.spec:
                raise _disagree(tensor, spec, rank)
            if rank in tensor.index_at:
                raise LayoutError(
                    f"tensor {spec.name!r} occurs twice in the state of rank {rank}",
                    key=spec.name, rank=rank, kind="name", hint="rename one of them",
                )  # fmt: skip
            tensor.index_at[rank] = index
            tensor.held.append(held.regions)
            tensor.drifts |= held.drifts
    return tensors


def _disagree(tensor: _Tensor, spec: TensorSpec, rank: int) -> LayoutError:
    def told(one: TensorSpec) -> str:
        return f"{one.dtype} {one.shape!r} of {one.group!r}"

    return LayoutError(
        f"tensor {spec.name!r} is {told(tensor.spec)} on rank {tensor.told_by} and {told(spec)} on rank {rank}",
        key=spec.name,
        rank=rank,
        kind="ranks",
        hint="give what differs between ranks a name of its own on each",
    )


def _aliases(layouts: Sequence[RankLayout], tensors: Mapping[str, _Tensor]) -> dict[str, str]:
    """The aliases of all ranks together."""
    told_by: dict[str, int] = {}
    aliases: dict[str, str] = {}
    for rank, layout in enumerate(layouts):
        for alias, name in layout.aliases.items():
            known = aliases.setdefault(alias, name)
            told_by.setdefault(alias, rank)
            if known != name:
                raise LayoutError(
                    f"{alias!r} is tied to {known!r} on rank {told_by[alias]} and to {name!r} on rank {rank}",
                    key=alias, rank=rank, kind="alias",
                )  # fmt: skip
            if alias in tensors and name in tensors:
                raise LayoutError(
                    f"{alias!r} is tied to {name!r} on rank {rank} and a tensor of its own on rank {tensors[alias].told_by}",
                    key=alias, rank=rank, kind="alias", hint="tie them on all ranks or on none",
                )  # fmt: skip
    check_aliases(aliases, tensors)
    return aliases


def _compare(tensors: Mapping[str, _Tensor]) -> None:
    """Find each tensor's cut. LayoutError unless its distinct regions have each of its elements once."""
    cuts: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[Region, ...], ...]], _Cut] = {}
    for tensor in tensors.values():
        ranks = tuple(tensor.index_at)
        alike = (tensor.spec.shape, ranks, tuple(tensor.held))
        cut = cuts.get(alike)
        if cut is None:
            cut = cuts[alike] = _Cut(ranks, tensor.held)
            _check_cover(tensor.spec, cut, ranks)
        tensor.cut = cut


def _check_cover(spec: TensorSpec, cut: _Cut, listed: Sequence[int]) -> None:
    shape = spec.shape
    for region, ranks in cut.holders.items():
        if not region.fits(shape):
            raise LayoutError(
                f"rank {_few(ranks)} holds region {region} of {spec.name!r}, out of its shape {shape!r}",
                key=spec.name, rank=ranks[0], kind="shape",
            )  # fmt: skip
    regions = list(cut.holders)
    pair = overlap(regions)
    if pair:
        first, second = (f"{region} (rank {_few(cut.holders[region])})" for region in sorted(pair, key=_corner))
        raise LayoutError(
            f"regions {first} and {second} of {spec.name!r} have elements in common and are not the same", key=spec.name, kind="overlap"
        )
    if sum(region.numel for region in regions) != whole(shape).numel:
        gaps = missing(shape, regions)
        named = ", ".join(map(str, gaps[:5])) + (f" and {len(gaps) - 5} more" if len(gaps) > 5 else "")
        raise LayoutError(
            f"no rank holds {named} of {spec.name!r} with shape {shape!r}, which rank {_few(listed)} lists", key=spec.name, kind="missing"
        )


def _corner(region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return region.offsets, region.sizes


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


# -- who writes what ----------------------------------------------------------------------------------------------------


def _share(tensors: Mapping[str, _Tensor], node_of: Sequence[int]) -> list[dict[int, _Share]]:
    """By tensor, and by node that has something of it, what is written. Replicas share evenly by bytes, large regions first."""
    several = _share_replicas(tensors, len(node_of)) if any(tensor.cut.replicated for tensor in tensors.values()) else {}
    shares: list[dict[int, _Share]] = []
    merged: dict[tuple[tuple[int, Region], ...], _Share] = {}  # many tensors are shared alike
    for tensor in tensors.values():
        found = tensor.cut.by_node
        if found is None:
            writes = tensor.cut.alone + several.get(tensor.spec.name, [])
            if not tensor.cut.holders:  # no elements: somebody says that it is there
                writes.append((tensor.told_by, whole(tensor.spec.shape)))
            by_node: dict[int, list[tuple[int, Region]]] = {}
            for write in writes:
                by_node.setdefault(node_of[write[0]], []).append(write)
            found = {}
            for node, of_node in by_node.items():
                alike = tuple(of_node)
                if alike not in merged:
                    merged[alike] = _Share(of_node)
                found[node] = merged[alike]
            if not tensor.cut.replicated:
                tensor.cut.by_node = found
        shares.append(found)
    return shares


def _share_replicas(tensors: Mapping[str, _Tensor], world: int) -> dict[str, list[tuple[int, Region]]]:
    """By tensor who writes what of the regions that several ranks hold."""
    loads = [0] * world
    replicated: list[tuple[int, int, int, _Tensor, Region, list[int]]] = []
    for number, tensor in enumerate(tensors.values()):
        itemsize = DTYPES[tensor.spec.dtype]
        for rank, numel in tensor.cut.alone_numel.items():
            loads[rank] += itemsize * numel
        for at, (region, ranks) in enumerate(tensor.cut.replicated):
            replicated.append((-itemsize * region.numel, number, at, tensor, region, ranks))
    replicated.sort(key=lambda one: one[:3])
    writes: dict[str, list[tuple[int, Region]]] = {}
    for negative, _, _, tensor, region, ranks in replicated:
        nbytes = -negative
        pieces = _cut(region, max(1, min(len(ranks), nbytes // MIN_CUT_NBYTES)))
        chosen = ranks
        if tensor.drifts and nbytes < MIN_CUT_NBYTES:
            chosen = ranks[:1]
        elif len(pieces) < len(ranks):
            # Neighbours share a node, and their rows merge: so the pieces go by rank, and with equal loads a tensor's shards to one node.
            chosen = sorted(heapq.nsmallest(len(pieces), ranks, key=lambda rank: (loads[rank], rank)))
        mine = writes.setdefault(tensor.spec.name, [])
        for rank, piece in zip(chosen, pieces, strict=True):
            mine.append((rank, piece))
            loads[rank] += nbytes * piece.numel // region.numel
    return writes


def _cut(region: Region, count: int) -> list[Region]:
    """Up to ``count`` boxes of about equal size: along the first dimension that is long enough, else the longest."""
    if count == 1:
        return [region]
    sizes = region.sizes
    dim = next((dim for dim, size in enumerate(sizes) if size >= count), None)
    if dim is None:
        dim = max(range(len(sizes)), key=lambda d: sizes[d])
        count = sizes[dim]
    begin = region.offsets[dim]
    ends = [begin + sizes[dim] * number // count for number in range(count + 1)]
    return [_replaced(region, dim, at, end - at) for at, end in itertools.pairwise(ends)]


def _replaced(region: Region, dim: int, offset: int, size: int) -> Region:
    """The box with another range in one dimension."""
    return Region((*region.offsets[:dim], offset, *region.offsets[dim + 1 :]), (*region.sizes[:dim], size, *region.sizes[dim + 1 :]))


# -- one node -----------------------------------------------------------------------------------------------------------


def _plan_node(
    shares: Sequence[tuple[_Tensor, _Share]],
    ranks: Sequence[int],
    *,
    aliases: Mapping[str, str],
    stems: Mapping[str, str],
    suffix: str,
    max_file_nbytes: int,
) -> NodePlan:
    """Lay out what the node's ranks write, and tell each its copies."""
    tensor_of: list[int] = []
    regions: list[Region] = []
    blocks: list[int] = []
    copied: list[tuple[dict[int, int], list[tuple[int, Region]]]] = []
    for number, (tensor, share) in enumerate(shares):
        tensor_of += [number] * len(share.boxes)
        regions += share.boxes
        itemsize = DTYPES[tensor.spec.dtype]
        blocks += [_block(run * itemsize, itemsize) for run in share.runs]
        copied += [(tensor.index_at, writes) for writes in share.writes]
    own = [tensor.spec for tensor, _ in shares]
    names = {spec.name for spec in own}
    known = {alias: name for alias, name in aliases.items() if name in names}
    plan, pieces = lay_out(
        own, tensor_of, regions, aliases=known, max_file_nbytes=max_file_nbytes, stems=stems, suffix=suffix,
        blocks=blocks if any(blocks) else (),
    )  # fmt: skip
    copies: dict[int, list[SlabCopy]] = {rank: [] for rank in ranks}
    for number, (placement, piece) in enumerate(zip(plan.placements, pieces, strict=True)):
        if placement.nbytes:
            index_at, writes = copied[piece]
            for rank, region in writes:
                copies[rank].append(SlabCopy(index_at[rank], number, region))
    return NodePlan(plan, {rank: tuple(found) for rank, found in copies.items()})


def _run(box: Region, regions: Sequence[Region]) -> int:
    """The length of the runs in which ``regions`` fill the box, all alike but perhaps the last; 0 for one region, and when it is not so."""
    if len(regions) < 2:
        return 0
    inside = [region.relative_to(box.offsets) for region in regions]
    if not all(is_run(box.sizes, one) for one in inside):
        return 0
    spans = sorted(span(box.sizes, one) for one in inside)
    run = spans[0][1]
    return run if all(begin == at * run and end <= begin + run for at, (begin, end) in enumerate(spans)) else 0


def _block(run_nbytes: int, itemsize: int) -> int:
    """Digest blocks that divide a rank's share, so that a rank which restores just that reads nothing of its neighbours'; 0: as usual."""
    if run_nbytes < MIN_BLOCK_NBYTES:
        return 0
    least = -(-run_nbytes // BLOCK_NBYTES)
    return next((run_nbytes // count for count in range(least, 4 * least) if run_nbytes % (count * itemsize) == 0), 0)


def _box_with(boxes: Sequence[Region], at: tuple[int, ...]) -> int:
    """Which of the boxes has the element ``at``; the only one, if there is but one."""
    if len(boxes) == 1:
        return 0
    return next(
        number
        for number, box in enumerate(boxes)
        if all(a <= index < a + n for a, n, index in zip(box.offsets, box.sizes, at, strict=True))
    )


def merge_boxes(regions: Sequence[Region]) -> list[Region]:
    """As few boxes as is easily found that have the same elements, each made of whole regions, in the order of their offsets.

    ``regions`` have no element in common, and no empty one is among several. One box, if they fill one.
    """
    if len(regions) == 1:
        return list(regions)
    columns = range(len(regions[0].offsets))
    low = tuple(min(region.offsets[dim] for region in regions) for dim in columns)
    high = [max(region.offsets[dim] + region.sizes[dim] for region in regions) for dim in columns]
    bounds = Region(low, tuple(end - begin for begin, end in zip(low, high, strict=True)))
    if bounds.numel == sum(region.numel for region in regions):
        return [bounds]
    found = list(regions)
    before = len(found) + 1
    while len(found) < before:
        before = len(found)
        for dim in reversed(columns):
            found = _merge_along(found, dim)
    return sorted(found, key=_corner)


def _merge_along(regions: list[Region], dim: int) -> list[Region]:
    """Join boxes that follow each other in one dimension and agree in all others."""
    chains: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Region]] = {}
    for region in regions:
        others = region.offsets[:dim] + region.offsets[dim + 1 :], region.sizes[:dim] + region.sizes[dim + 1 :]
        chains.setdefault(others, []).append(region)
    found: list[Region] = []
    for chain in chains.values():
        chain.sort(key=_corner)
        last = chain[0]
        for region in chain[1:]:
            if last.offsets[dim] + last.sizes[dim] == region.offsets[dim]:
                last = _replaced(last, dim, last.offsets[dim], last.sizes[dim] + region.sizes[dim])
            else:
                found.append(last)
                last = region
        found.append(last)
    return found
