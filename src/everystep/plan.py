"""Plans as values: where each tensor goes in the slab, and which byte ranges a restore reads. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from everystep import safetensors
from everystep.errors import CorruptionError, LayoutError
from everystep.manifest import ALONE, BLOCK_NBYTES, Manifest, Part, Shard, StoredObject, TensorSpec, digest
from everystep.region import Region, boxes, is_run, missing, overlap, span, whole

ALIGN = safetensors.ALIGN
MAX_FILE_NBYTES = 4 << 30
MAX_FILE_HEADER_NBYTES = 32 << 20
"""A file is split before its header grows past this: a third of what readers take."""


class Placement(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor's region in the slab (and so in its file: ``offset`` there is ``slab_offset - file.slab_offset``)."""

    tensor: int
    file: int
    region: Region
    slab_offset: int
    nbytes: int
    block: int = 0
    """Bytes of a digest block, as in ``Shard``."""


class PlannedFile(msgspec.Struct, frozen=True, array_like=True):
    """One data file inside the slab; ``header`` (its length is the data's start, a multiple of ALIGN) is copied in once per slab."""

    name: str
    group: str
    slab_offset: int
    nbytes: int
    header: bytes


class SavePlan(msgspec.Struct, frozen=True):
    """Where everything of one node's snapshot lies in its slab. Sent to the agent once, cached by ``id`` (a digest of the content)."""

    id: str
    tensors: tuple[TensorSpec, ...]
    """As they were given to ``plan_save``, in that order."""
    files: tuple[PlannedFile, ...]
    placements: tuple[Placement, ...]
    """In the order of their bytes in the slab."""
    aliases: dict[str, str]
    nbytes: int
    """Slab size needed: a multiple of ALIGN, at least one."""

    def describe(self) -> str:
        """A few lines for people: each file with its size and number of tensors."""
        counts = [0] * len(self.files)
        for placement in self.placements:
            counts[placement.file] += 1
        lines = [f"save plan {self.id[:12]}: {len(self.tensors):,} tensors in {len(self.files)} files, slab of {self.nbytes:,} bytes"]
        lines += [
            f"  {file.name}  {file.nbytes:,} bytes, {count:,} tensors, at {file.slab_offset:,}"
            for file, count in zip(self.files, counts, strict=True)
        ]
        return "\n".join(lines)


# -- saving -------------------------------------------------------------------------------------------------------------


def plan_save(tensors: Sequence[TensorSpec], *, aliases: Mapping[str, str], max_file_nbytes: int = MAX_FILE_NBYTES) -> SavePlan:
    """Lay whole tensors out in files by group: ``<group>-00001-of-0000N.safetensors``. Of one process; of many: ``layout.plan_world``.

    Raises:
        LayoutError: A name occurs twice, a dtype cannot be stored, or an alias has no tensor to point at.
    """
    seen: set[str] = set()
    for spec in tensors:
        if spec.name in seen:
            raise LayoutError(f"tensor {spec.name!r} occurs twice in the state", key=spec.name, kind="name", hint="rename one of them")
        seen.add(spec.name)
        check_dtype(spec)
    check_aliases(aliases, seen)
    regions: dict[tuple[int, ...], Region] = {}  # a model has few shapes
    for spec in tensors:
        if spec.shape not in regions:
            regions[spec.shape] = whole(spec.shape)
    return lay_out(
        tensors, range(len(tensors)), [regions[spec.shape] for spec in tensors], aliases=aliases, max_file_nbytes=max_file_nbytes
    )[0]


def check_dtype(spec: TensorSpec) -> None:
    """LayoutError, with the tensor's name, for a dtype that no file can hold."""
    if spec.dtype not in safetensors.DTYPES:
        raise LayoutError(f"tensor {spec.name!r} has dtype {spec.dtype!r}, which cannot be stored", key=spec.name, kind="dtype",
                          hint=f"cast it to one of {', '.join(safetensors.DTYPES)}")  # fmt: skip


def check_aliases(aliases: Mapping[str, str], names: Container[str]) -> None:
    """LayoutError unless each alias is no tensor itself and points at one."""
    for alias, name in aliases.items():
        if name not in names or alias in names:
            raise LayoutError(
                f"{alias!r} cannot be an alias of {name!r}: {'both are' if name in names else 'there is no such'} tensor",
                key=alias,
                kind="alias",
            )


_Member: TypeAlias = tuple[int, str, int, int]
"""(-bytes of an item, full name, piece, bytes): sorted, a file's order."""


def lay_out(
    tensors: Sequence[TensorSpec],
    tensor_of: Sequence[int],
    regions: Sequence[Region],
    *,
    aliases: Mapping[str, str],
    max_file_nbytes: int = MAX_FILE_NBYTES,
    stems: Mapping[str, str] | None = None,
    suffix: str = "",
    blocks: Sequence[int] = (),
) -> tuple[SavePlan, list[int]]:
    """Lay the pieces of one node out in files by group: ``<stem><suffix>-00001-of-0000N.safetensors``.

    Piece ``i`` is ``regions[i]`` of ``tensors[tensor_of[i]]``; the pieces of one tensor come in the order of their offsets and have no
    element in common. Within a file, entries are ordered by falling item size (so typed views are aligned), then by name and piece,
    without gaps; each file begins at a multiple of ALIGN; a file is split before ``max_file_nbytes`` (a larger piece has a file of its
    own) and long before a header of 100 MB. Entry names inside a file are the tensor's name without the ``group.`` prefix, so a module's
    file bears the module's own names; of what is not a whole tensor, ``<name>@<offsets>``.

    ``stems`` are the words for groups in file names (default: ``file_stems`` of the groups that occur), ``suffix`` what follows them: it
    tells apart the files of several nodes. ``blocks`` are the pieces' digest blocks in bytes (``Shard.block``), if they are not all 0.

    Returns:
        The plan, and which piece each placement is.
    """
    groups: dict[str, list[_Member]] = {}
    for piece, tensor in enumerate(tensor_of):
        spec = tensors[tensor]
        itemsize = safetensors.DTYPES[spec.dtype]
        groups.setdefault(spec.group, []).append((-itemsize, spec.name, piece, itemsize * math.prod(regions[piece].sizes)))
    tied: dict[str, list[str]] = {}
    for alias, name in sorted(aliases.items()):
        tied.setdefault(name, []).append(alias)
    files: list[PlannedFile] = []
    placements: list[Placement] = []
    pieces: list[int] = []
    slab_offset = 0
    if stems is None:
        stems = file_stems(groups)
    for group, members in groups.items():
        members.sort()
        entry_of = _entry_names(group, [name for _, name, _, _ in members])
        shards = {
            piece: regions[piece] for _, _, piece, _ in members if regions[piece].sizes != tensors[tensor_of[piece]].shape
        }  # few or none on one node
        cuts = _split(members, regions, shards, tied, max_file_nbytes)
        shard_entry = _shard_names(members, shards, entry_of)
        for number, (first, last) in enumerate(cuts, 1):
            entries = []
            at = 0
            for _, name, piece, nbytes in members[first:last]:
                entry = shard_entry[piece] if piece in shards else entry_of[name]
                entries.append(safetensors.Entry(entry, tensors[tensor_of[piece]].dtype, regions[piece].sizes, at, at + nbytes))
                at += nbytes
            shapes = {piece: tensors[tensor_of[piece]].shape for _, _, piece, _ in members[first:last] if piece in shards} if shards else {}
            header = safetensors.header(entries, _metadata(group, members[first:last], entries, shapes, shards, tied))
            base = slab_offset + len(header)
            placements += [
                Placement(
                    tensor_of[piece],
                    len(files),
                    regions[piece],
                    base + entry.begin,
                    entry.end - entry.begin,
                    blocks[piece] if blocks else 0,
                )
                for (_, _, piece, _), entry in zip(members[first:last], entries, strict=True)
            ]
            pieces += [piece for _, _, piece, _ in members[first:last]]
            name = f"{stems[group]}{suffix}-{number:05d}-of-{len(cuts):05d}.safetensors"
            files.append(PlannedFile(name, group, slab_offset, len(header) + at, header))
            slab_offset += -(-(len(header) + at) // ALIGN) * ALIGN
    specs = tuple(tensors)
    known = dict(sorted(aliases.items()))
    content = msgspec.msgpack.encode((specs, files, known, blocks))
    plan = SavePlan(
        id=digest(content), tensors=specs, files=tuple(files), placements=tuple(placements), aliases=known, nbytes=max(slab_offset, ALIGN)
    )
    return plan, pieces


def node_suffix(node: int) -> str:
    """What tells the files of one of several nodes (counted from 0) from the others'; stands behind the stem."""
    return f"-n{node + 1:05d}"


def node_of_file(name: str) -> int:
    """The node that wrote a data file, by its name; 0 for a file of a checkpoint of one node."""
    found = re.search(r"-n([0-9]{5,9})-[0-9]{5,}-of-[0-9]{5,}\.safetensors$", name)
    return max(int(found[1]) - 1, 0) if found else 0


def file_stems(groups: Iterable[str]) -> dict[str, str]:
    """A word for file names for each group: the group itself where that is safe, else made safe and told apart by a digest of the group.

    Distinct groups never share one, not even on a file system that ignores case, and none ends as ``node_suffix`` does.
    """
    names = list(groups)
    safe = {group: re.sub(r"[^A-Za-z0-9_-]", "_", group)[:80] or "_" for group in names}
    folded: dict[str, int] = {}
    for word in safe.values():
        folded[word.lower()] = folded.get(word.lower(), 0) + 1
    return {
        # "~" is in no safe word, so that what bears a digest meets only other digests.
        group: word
        if word == group and folded[word.lower()] == 1 and not re.search(r"-n[0-9]{5,}$", word)
        else f"{word}~{digest(group.encode('utf-8', 'surrogatepass'))[:12]}"
        for group, word in safe.items()
    }


def _entry_names(group: str, names: Sequence[str]) -> dict[str, str]:
    """Full name -> name inside the group's files. ``names`` are sorted where they repeat: one for each piece."""
    prefix = group + "."
    entry_of = {name: name.removeprefix(prefix) for name in names}
    taken = set(entry_of.values())
    if len(taken) == len(entry_of) and "" not in taken and safetensors.METADATA not in taken:
        return entry_of
    # "a" and "a.a" in group "a", or a tensor called like the file's own metadata: rare, and mapped back in the metadata.
    counts: dict[str, int] = {}
    for entry in entry_of.values():
        counts[entry] = counts.get(entry, 0) + 1
    for name in sorted(entry_of):
        entry = entry_of[name]
        if counts[entry] > 1 or entry in ("", safetensors.METADATA):
            candidate = f"{entry}@{digest(name.encode())[:12]}"
            while candidate in taken:
                candidate += "@"
            taken.add(candidate)
            entry_of[name] = candidate
    return entry_of


def _shard_names(members: Sequence[_Member], shards: Mapping[int, Region], entry_of: Mapping[str, str]) -> dict[int, str]:
    """Entry names of the pieces that are not whole tensors: ``name@offsets``."""
    if not shards:
        return {}
    taken = set(entry_of.values())
    found = {}
    for _, name, piece, _ in members:
        if piece in shards:
            candidate = f"{entry_of[name]}@{','.join(map(str, shards[piece].offsets))}"
            while candidate in taken:
                candidate += "@"
            taken.add(candidate)
            found[piece] = candidate
    return found


def _split(
    members: Sequence[_Member], regions: Sequence[Region], shards: Container[int], tied: Mapping[str, list[str]], max_file_nbytes: int
) -> list[tuple[int, int]]:
    """Which members go into which file: ranges, in order."""
    cuts = []
    first = 0
    data = 0
    header = fixed = ALIGN + 512
    for position, (_, name, piece, nbytes) in enumerate(members):
        # A bound from above: six bytes for each letter that JSON escapes, twice for what the metadata may say again.
        letters = len(name) if name.isascii() and name.isprintable() and '"' not in name and "\\" not in name else 12 * len(name)
        told = (
            2 * letters
            + 24 * len(regions[piece].sizes)
            + 160
            + (12 * sum(len(alias) + len(name) + 8 for alias in tied[name]) if name in tied else 0)
        )
        if piece in shards:  # the name and the offsets once more, and the metadata's shape and region
            told += 2 * letters + 120 * len(regions[piece].sizes) + 80
        if position > first and (data + nbytes + header + told > max_file_nbytes or header + told > MAX_FILE_HEADER_NBYTES):
            cuts.append((first, position))
            first = position
            data = 0
            header = fixed
        data += nbytes
        header += told
    cuts.append((first, len(members)))
    return cuts


def _metadata(
    group: str,
    members: Sequence[_Member],
    entries: Sequence[safetensors.Entry],
    shapes: Mapping[int, tuple[int, ...]],
    shards: Mapping[int, Region],
    tied: Mapping[str, list[str]],
) -> dict[str, str]:
    """The ``__metadata__`` of a file. ``shapes`` are those of the shards' tensors, by piece."""
    prefix = group + "."
    unusual = {
        entry.name: safetensors.Stored(name, shapes.get(piece, entry.shape), shards.get(piece) or whole(entry.shape))
        for (_, name, piece, _), entry in zip(members, entries, strict=True)
        if prefix + entry.name != name
    }
    aliases = {alias: name for _, name, _, _ in members if name in tied for alias in tied[name]} if tied else {}
    return safetensors.our_metadata(group=group, entries=unusual, aliases=aliases)


def slab_part(
    plan: SavePlan,
    *,
    step: int,
    attempt: int,
    node: int,
    nodes: int,
    saved_at: float,
    values: bytes,
    metrics: Mapping[str, float],
    object_key: Mapping[str, str],
    digests: Sequence[tuple[str, ...]],
    header_digests: Sequence[str],
    world: int = 1,
    ranks: tuple[int, ...] = ALONE,
    by_rank: Mapping[int, msgspec.Raw] = {},
    shared: bool = True,
) -> Part:
    """The part that describes a slab filled by ``plan``.

    ``object_key`` maps file name to store key; ``digests`` is by placement, ``header_digests`` by file; ``values`` and ``by_rank`` are what
    ``join_documents`` makes of the documents of the node's ``ranks``.
    """
    objects = tuple(
        StoredObject(object_key[file.name], file.nbytes, len(file.header), header_digest)
        for file, header_digest in zip(plan.files, header_digests, strict=True)
    )
    begins = [file.slab_offset for file in plan.files]
    shards = tuple(
        Shard(one.tensor, one.region, one.file, one.slab_offset - begins[one.file], one.nbytes, words, one.block)
        for one, words in zip(plan.placements, digests, strict=True)
    )
    return Part(
        step=step,
        attempt=attempt,
        node=node,
        nodes=nodes,
        saved_at=saved_at,
        tensors=plan.tensors,
        objects=objects,
        shards=shards,
        aliases=dict(plan.aliases),
        values=msgspec.Raw(values),
        metrics=dict(metrics),
        world=world,
        ranks=ranks,
        by_rank=dict(by_rank),
        shared=shared,
    )


# -- restoring ----------------------------------------------------------------------------------------------------------


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes ``begin:end`` of a shard (whole digest blocks), at ``at`` in the fetched buffer. ``targets`` index the wanted list."""

    shard: int
    begin: int
    end: int
    at: int
    targets: tuple[int, ...]

    def digests(self, manifest: Manifest) -> tuple[str, ...]:
        """What ``block_digests`` of the piece's bytes must be."""
        shard = manifest.shards[self.shard]
        known, block = shard.digests, shard.block_nbytes
        return known if len(known) == 1 else known[self.begin // block : -(-self.end // block)]


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """One read: ``nbytes`` from ``offset`` of ``objects[object]``, and what to verify and place from it."""

    object: int
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


class RestorePlan(msgspec.Struct, frozen=True):
    """Reads in order of object and offset; coalesced over small shards, split at digest blocks for large ones."""

    fetches: tuple[Fetch, ...]
    nbytes: int

    def describe(self) -> str:
        """A few lines for people: how many reads and bytes from each object (by its index in the manifest)."""
        by_object: dict[int, list[int]] = {}
        for fetch in self.fetches:
            by_object.setdefault(fetch.object, []).append(fetch.nbytes)
        lines = [f"restore plan: {len(self.fetches):,} reads, {self.nbytes:,} bytes, from {len(by_object)} objects"]
        lines += [f"  object {index}: {len(sizes):,} reads, {sum(sizes):,} bytes" for index, sizes in by_object.items()]
        return "\n".join(lines)


class Copy(msgspec.Struct, frozen=True, gc=False):
    """Part of a fetched piece that goes into one target.

    The source is a row-major box of shape ``sizes``, ``nbytes`` from byte ``offset`` of the piece on (so ``piece.at + offset`` of the
    fetched buffer); its sub-box ``source`` goes to the sub-box ``destination`` of the target, counted from the wanted region's corner.
    ``flat`` is not None where both are runs: then ``run_nbytes`` from byte ``offset + run_offset`` of the piece go to byte ``flat`` of the
    (contiguous) target.
    """

    target: int
    offset: int
    nbytes: int
    sizes: tuple[int, ...]
    source: Region
    destination: Region
    flat: int | None = None
    run_offset: int = 0
    run_nbytes: int = 0


def plan_restore(
    manifest: Manifest, wanted: Sequence[tuple[str, Region]], *, fetch_nbytes: int = 8 << 20, gap_nbytes: int = 64 << 10
) -> RestorePlan:
    """Which byte ranges fill the wanted regions (by full name; aliases are followed).

    A fetch is at most ``fetch_nbytes`` (but a digest block at least); shards up to ``gap_nbytes`` apart are read together. Shards
    that hold nothing of a wanted region are not read; one without elements needs no read.

    Raises:
        CorruptionError: A wanted region is not covered by the stored shards (named).
        LayoutError: A wanted name is not in the checkpoint, or a region is out of bounds.
    """
    index_of = {spec.name: index for index, spec in enumerate(manifest.tensors)}
    wanted_tensors = [_find(manifest, index_of, name, region) for name, region in wanted]
    shards_of = _shards_of(manifest.shards, set(wanted_tensors))
    needs: dict[int, _Needed | list[_Needed]] = {}
    for target, tensor in enumerate(wanted_tensors):
        for number, begin, end in _cover(manifest, wanted[target][0], wanted[target][1], shards_of.get(tensor, ())):
            need = (begin, end, target)
            known_need = needs.setdefault(number, need)
            if known_need is not need:
                if not isinstance(known_need, list):
                    known_need = needs[number] = [known_need]
                known_need.append(need)
    order = sorted(needs, key=lambda number: (manifest.shards[number].object, manifest.shards[number].offset, number))
    fetches = tuple(_fetches(manifest.shards, order, needs, max(fetch_nbytes, BLOCK_NBYTES), gap_nbytes))
    return RestorePlan(fetches, sum(fetch.nbytes for fetch in fetches))


def _shards_of(shards: Sequence[Shard], tensors: set[int]) -> dict[int, tuple[int, ...] | list[int]]:
    """Numbers of each tensor's shards. A tuple for a single one: of a million tensors most have one, and a list is twice as large."""
    found: dict[int, tuple[int, ...] | list[int]] = {}
    for number, shard in enumerate(shards):
        if shard.tensor not in tensors:
            continue
        known = found.get(shard.tensor)
        if known is None:
            found[shard.tensor] = (number,)
        elif isinstance(known, list):
            known.append(number)
        else:
            found[shard.tensor] = [*known, number]
    return found


_Needed: TypeAlias = tuple[int, int, int]
"""(begin, end, target): bytes of a shard that a target needs something of."""


def _find(manifest: Manifest, index_of: Mapping[str, int], name: str, region: Region) -> int:
    stored = manifest.aliases.get(name, name)
    index = index_of.get(stored)
    if index is None:
        raise LayoutError(
            f"{name!r} is not in the checkpoint of step {manifest.step}",
            step=manifest.step,
            key=name,
            kind="name",
            hint="everystep show lists what is in it",
        )
    if not region.fits(manifest.tensors[index].shape):
        raise LayoutError(
            f"region {region} of {name!r} is out of its shape {manifest.tensors[index].shape!r}", step=manifest.step, key=name, kind="shape"
        )
    return index


def _cover(manifest: Manifest, name: str, region: Region, numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """(shard, begin, end): bytes, by whole digest blocks, of the shards that hold something of the region."""
    numel = region.numel
    if numel == 0:
        return []
    shards = manifest.shards
    if len(numbers) == 1 and shards[numbers[0]].region == region:
        return [(numbers[0], 0, shards[numbers[0]].nbytes)]
    found = []
    parts = []
    for number in numbers:
        shard = shards[number]
        common = region.intersect(shard.region)
        if common is None:
            continue
        parts.append(common)
        itemsize = shard.nbytes // shard.region.numel
        first, last = span(shard.region.sizes, common.relative_to(shard.region.offsets))
        block = shard.block_nbytes
        begin = first * itemsize // block * block
        found.append((number, begin, min(-(-last * itemsize // block) * block, shard.nbytes)))
    pair = overlap(parts)
    if pair:
        raise CorruptionError(
            f"step {manifest.step} holds region {pair[0]} of {name!r} more than once", step=manifest.step, key=name, kind="overlap"
        )
    if sum(part.numel for part in parts) != numel:
        gaps = missing(region.sizes, [part.relative_to(region.offsets) for part in parts])
        named = ", ".join(str(gap.moved_by(region.offsets)) for gap in gaps[:5]) + (f" and {len(gaps) - 5} more" if len(gaps) > 5 else "")
        raise CorruptionError(
            f"step {manifest.step} lacks {named} of {name!r}", step=manifest.step, key=name, kind="missing", hint="restore an older step"
        )
    return found


def _ranges(needed: _Needed | list[_Needed], limit: int, block: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """The union of a shard's needed ranges, cut to at most ``limit`` bytes at block boundaries, with the targets that need some of each."""
    if not isinstance(needed, list):
        if needed[1] - needed[0] <= limit:
            yield needed[0], needed[1], needed[2:]
            return
        needed = [needed]
    needed.sort()
    step = max(limit // block, 1) * block
    position = 0
    while position < len(needed):
        begin, end, _ = needed[position]
        stop = position + 1
        while stop < len(needed) and needed[stop][0] <= end:
            end = max(end, needed[stop][1])
            stop += 1
        for at in range(begin, end, step):
            until = min(at + step, end)
            yield at, until, tuple(target for b, e, target in needed[position:stop] if b < until and e > at)
        position = stop


def _fetches(
    shards: Sequence[Shard], order: Sequence[int], needs: Mapping[int, _Needed | list[_Needed]], limit: int, gap: int
) -> Iterator[Fetch]:
    pieces: list[Piece] = []
    object_ = start = stop = -1
    for number in order:
        shard = shards[number]
        for begin, end, targets in _ranges(needs[number], limit, shard.block_nbytes):
            offset = shard.offset + begin
            if pieces and (shard.object != object_ or offset < start or offset - stop > gap or shard.offset + end - start > limit):
                yield Fetch(object_, start, stop - start, tuple(pieces))
                pieces = []
            if not pieces:
                object_ = shard.object
                start = stop = offset
            pieces.append(Piece(number, begin, end, offset - start, targets))
            stop = max(stop, shard.offset + end)
    if pieces:
        yield Fetch(object_, start, stop - start, tuple(pieces))


def place(manifest: Manifest, piece: Piece, wanted: Sequence[tuple[str, Region]]) -> Iterator[Copy]:
    """What of a fetched piece goes where, once its digests are found right. Over all pieces, each element of a target comes once."""
    shard = manifest.shards[piece.shard]
    region = shard.region
    itemsize = shard.nbytes // region.numel
    if piece.begin == 0 and piece.end == shard.nbytes:
        parts = [(Region((0,) * len(region.sizes), region.sizes), 0)]
    else:
        parts = boxes(region.sizes, piece.begin // itemsize, piece.end // itemsize)
    for target in piece.targets:
        want = wanted[target][1]
        for box, first in parts:
            offset = first * itemsize - piece.begin
            here = box.moved_by(region.offsets)
            common = want.intersect(here)
            if common is None:
                continue
            source = common.relative_to(here.offsets)
            destination = common.relative_to(want.offsets)
            nbytes = box.numel * itemsize
            if is_run(box.sizes, source) and is_run(want.sizes, destination):
                run = span(box.sizes, source)
                flat = span(want.sizes, destination)[0] * itemsize
                yield Copy(target, offset, nbytes, box.sizes, source, destination, flat, run[0] * itemsize, (run[1] - run[0]) * itemsize)
            else:
                yield Copy(target, offset, nbytes, box.sizes, source, destination)
