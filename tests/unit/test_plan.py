"""Plans: files that the safetensors package opens, names that never meet, reads that are few and whole blocks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from everystep import plan as plans
from everystep.errors import CorruptionError, LayoutError
from everystep.manifest import BLOCK_NBYTES, Manifest, Shard, StoredObject, TensorSpec, block_digests, check, digest, merge
from everystep.plan import ALIGN, file_stems, place, plan_restore, plan_save, slab_part
from everystep.region import Region, whole
from everystep.safetensors import our_entries, parse

WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3"}


def raw(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def specs_of(tensors):
    return [TensorSpec(name, WORDS[t.dtype], tuple(t.shape), name.split(".")[0]) for name, t in tensors.items()]


def fill(plan, tensors):
    """The slab as staging leaves it."""
    slab = bytearray(b"\xee" * plan.nbytes)
    for file in plan.files:
        slab[file.slab_offset : file.slab_offset + len(file.header)] = file.header
    for placement in plan.placements:
        slab[placement.slab_offset : placement.slab_offset + placement.nbytes] = raw(tensors[plan.tensors[placement.tensor].name])
    return slab


def manifest_of(plan, slab, **changes):
    view = memoryview(slab)
    part = slab_part(
        plan, step=3, attempt=1, node=0, nodes=1, saved_at=9.0, values=b"{}", metrics={"loss": 0.5}, object_key={file.name: f"data/x/{file.name}" for file in plan.files},
        digests=[block_digests(view[p.slab_offset : p.slab_offset + p.nbytes], p.block) for p in plan.placements], header_digests=[digest(file.header) for file in plan.files],
    )  # fmt: skip
    return merge([part])


def state():
    torch.manual_seed(0)
    return {
        "model.embed.weight": torch.randn(11, 7), "model.half": torch.randn(5, 3).bfloat16(), "model.steps": torch.tensor(17), "model.mask": torch.tensor([True, False, True]),
        "model.empty": torch.empty(0, 4), "model.scalar": torch.tensor(3.5), "optim.a.exp_avg": torch.randn(3), "optim.a.f8": torch.randn(9).to(torch.float8_e4m3fn),
        "z": torch.randn(2, dtype=torch.complex64),
    }  # fmt: skip


def test_the_files_in_the_slab_are_safetensors_files():
    """F4, F22, F24: each file in the slab, cut out at its size, opens with the package and holds the module's own names and equal bytes."""
    tensors = state()
    plan = plan_save(specs_of(tensors), aliases={"model.head.weight": "model.embed.weight"})
    slab = fill(plan, tensors)
    assert [file.name for file in plan.files] == ["model-00001-of-00001.safetensors", "optim-00001-of-00001.safetensors", "z-00001-of-00001.safetensors"]
    seen = {}
    for file in plan.files:
        found = safetensors.torch.load(bytes(slab[file.slab_offset : file.slab_offset + file.nbytes]))
        seen |= {f"{file.group}.{name}" if name != file.group else name: tensor for name, tensor in found.items()}
    assert set(seen) == set(tensors)
    for name, tensor in tensors.items():
        assert seen[name].dtype == tensor.dtype
        assert seen[name].shape == tensor.shape
        assert raw(seen[name]) == raw(tensor)
    stored, aliases = our_entries(parse(plan.files[0].header, plan.files[0].nbytes))
    assert {known.name for known in stored.values()} == {name for name in tensors if name.startswith("model.")}
    assert aliases == {"model.head.weight": "model.embed.weight"}
    assert our_entries(parse(plan.files[2].header, plan.files[2].nbytes))[0]["z"].name == "z"


def test_everything_is_aligned():
    """Files begin on pages, data after the header too, and each tensor at a multiple of its item size; nothing overlaps."""
    tensors = state()
    plan = plan_save(specs_of(tensors), aliases={})
    end = 0
    for file in plan.files:
        assert file.slab_offset % ALIGN == 0
        assert len(file.header) % ALIGN == 0
        assert file.slab_offset >= end
        end = file.slab_offset + file.nbytes
    assert plan.nbytes % ALIGN == 0
    assert end <= plan.nbytes < end + ALIGN
    at = 0
    for placement in plan.placements:
        tensor = tensors[plan.tensors[placement.tensor].name]
        assert placement.nbytes == tensor.nbytes
        assert placement.slab_offset % tensor.element_size() == 0
        assert placement.slab_offset >= at
        at = placement.slab_offset + placement.nbytes
    assert sorted(placement.tensor for placement in plan.placements) == list(range(len(tensors)))


def test_the_plan_is_a_value():
    """Equal specs give an equal plan and id; any difference in names, dtypes, shapes, order, limits or aliases another id."""
    base = [TensorSpec("m.a", "F32", (2,), "m"), TensorSpec("m.b", "F32", (2,), "m")]
    plan = plan_save(base, aliases={"m.c": "m.a"})
    assert plan_save(list(base), aliases={"m.c": "m.a"}) == plan
    others = [
        plan_save(base[::-1], aliases={"m.c": "m.a"}), plan_save(base, aliases={}), plan_save(base, aliases={"m.c": "m.b"}), plan_save(base[:1], aliases={"m.c": "m.a"}),
        plan_save([base[0], TensorSpec("m.b", "I32", (2,), "m")], aliases={"m.c": "m.a"}), plan_save([base[0], TensorSpec("m.b", "F32", (1, 2), "m")], aliases={"m.c": "m.a"}),
        plan_save(base, aliases={"m.c": "m.a"}, max_file_nbytes=1),
    ]  # fmt: skip
    assert len({plan.id, *(other.id for other in others)}) == len(others) + 1
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=plans.SavePlan)
    assert again == plan


def test_files_are_split_by_size():
    """No file is larger than asked, except one with a single tensor that is larger itself; the numbering says how many there are."""
    specs = [TensorSpec(f"m.{i:02d}", "U8", (3000,), "m") for i in range(20)] + [TensorSpec("m.big", "U8", (50_000,), "m")]
    plan = plan_save(specs, aliases={}, max_file_nbytes=20_000)
    count = len(plan.files)
    assert count > 3
    assert [file.name for file in plan.files] == [f"m-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for index, file in enumerate(plan.files):
        members = [plan.tensors[placement.tensor].name for placement in plan.placements if placement.file == index]
        assert file.nbytes <= 20_000 or members == ["m.big"]
    assert sorted(placement.tensor for placement in plan.placements) == list(range(21))


def test_files_are_split_by_header(monkeypatch):
    """A file's header stays under its limit, also where names need escapes and tied names are many."""
    monkeypatch.setattr(plans, "MAX_FILE_HEADER_NBYTES", 20_000)
    specs = [TensorSpec(f'm.{i}"\n\x01é𝄞' * 20, "U8", (0, 1 << 60), "m") for i in range(100)]
    aliases = {f"tied {i}": specs[i].name for i in range(0, 100, 3)}
    plan = plan_save(specs, aliases=aliases)
    assert 5 < len(plan.files) <= 100
    assert max(len(file.header) for file in plan.files) <= 20_000 + ALIGN
    told = {}
    for file in plan.files:
        told |= our_entries(parse(file.header, file.nbytes))[1]
    assert told == aliases


def test_no_tensors_is_a_plan_too():
    """A state of plain values alone has no files, and a slab that can still be mapped."""
    plan = plan_save([], aliases={})
    assert plan.files == ()
    assert plan.nbytes == ALIGN
    manifest = manifest_of(plan, bytearray(ALIGN))
    assert plan_restore(manifest, []).fetches == ()


@pytest.mark.parametrize(
    ("specs", "aliases", "why"),
    [
        ([TensorSpec("a.b", "F32", (), "a")] * 2, {}, "twice"), ([TensorSpec("a.b", "C128", (), "a")], {}, "C128"), ([TensorSpec("a.b", "F32", (), "a")], {"a.c": "a.d"}, "no such"),
        ([TensorSpec("a.b", "F32", (), "a")], {"a.b": "a.b"}, "both"),
    ],
)  # fmt: skip
def test_specs_that_cannot_be_stored(specs, aliases, why):
    """F17: a name twice, a dtype no file can hold and an alias of nothing are refused with the name, before anything is written."""
    with pytest.raises(LayoutError, match=why):
        plan_save(specs, aliases=aliases)


def test_entry_names_that_meet_are_told_apart():
    """Tensor "a" of group "a" beside "a.a", an empty inner name, and one called like the metadata: each is stored, and mapped back to its full name."""
    names = ["a", "a.a", "a.a.a", "a.", "a.__metadata__"]
    specs = [TensorSpec(name, "U8", (1,), "a") for name in names]
    plan = plan_save(specs, aliases={})
    (file,) = plan.files
    assert len(safetensors.deserialize(file.header + bytes(5))) == 5
    stored, _ = our_entries(parse(file.header, file.nbytes))
    assert {known.name for known in stored.values()} == set(names)


GROUPS = ["model", "Model", "MODEL", "a/b", "a b", "a_b", "a:b", "..", ".", "", "../../etc", "é", "è", "x" * 300, "x" * 301, "model~0123", "con.txt", "a\0b", "a\nb", "\ud800"]


def test_group_names_are_safe_and_never_meet():
    """Any group has a file name that is one plain word, and no two share one, not even where case does not count; plain groups keep theirs."""
    stems = file_stems(GROUPS)
    assert len({stem.lower() for stem in stems.values()}) == len(GROUPS)
    for stem in stems.values():
        assert 0 < len(stem) <= 100
        assert not set(stem) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-~")
    assert file_stems(["model", "optim", "a_b"]) == {"model": "model", "optim": "optim", "a_b": "a_b"}
    plan = plan_save([TensorSpec(f"{group}.w", "U8", (1,), group) for group in GROUPS[:-1]], aliases={})
    assert len({file.name.lower() for file in plan.files}) == len(GROUPS) - 1


def test_a_file_tells_its_node():
    """The node is read from the file's name, and a group that is called like the suffix of a node does not look like one."""
    specs = [TensorSpec(f"{group}.w", "U8", (1,), group) for group in ("model", "model-n00007")]
    files = [file.name for file in plan_save(specs, aliases={}).files]
    assert [plans.node_of_file(name) for name in files] == [0, 0]
    for node in (0, 6, 99_999):
        plan, pieces = plans.lay_out(specs, [0, 1], [whole((1,))] * 2, aliases={}, suffix=plans.node_suffix(node))
        assert [plans.node_of_file(file.name) for file in plan.files] == [node, node]
        assert pieces == [0, 1]
        assert len({file.name for file in plan.files}) == 2
    assert plans.node_of_file("model-n00000-00001-of-00001.safetensors") == 0


# -- restoring ------------------------------------------------------------------------------------------------------------


def big_manifest(*shapes, header=4096, itemsize=1):
    """One object with whole uint8 tensors after each other."""
    specs, shards, at = [], [], header
    for index, shape in enumerate(shapes):
        nbytes = int(np.prod(shape, dtype=int)) * itemsize
        specs.append(TensorSpec(f"g.{index}", "U8" if itemsize == 1 else "F32", shape, "g"))
        shards.append(Shard(index, whole(shape), 0, at, nbytes, tuple(f"{block:032x}" for block in range(max(1, -(-nbytes // BLOCK_NBYTES))))))
        at += nbytes
    manifest = Manifest(step=1, attempt=1, nodes=1, saved_at=0.0, tensors=tuple(specs), objects=(StoredObject("data/o", at, header, "0" * 32),), shards=tuple(shards),
                        aliases={"g.tied": "g.0"}, values=msgspec.Raw(b"{}"))  # fmt: skip
    check(manifest)
    return manifest


def everything(manifest):
    return [(spec.name, whole(spec.shape)) for spec in manifest.tensors]


def test_small_shards_are_read_together():
    """Two thousand tensors of 1 KiB are one read."""
    manifest = big_manifest(*[(1024,)] * 2000)
    plan = plan_restore(manifest, everything(manifest))
    assert len(plan.fetches) == 1
    assert plan.nbytes == 2000 * 1024
    assert plan.fetches[0].offset == 4096


def test_large_shards_are_read_in_whole_blocks():
    """A large tensor is read in several pieces of whole digest blocks, none larger than asked, each with its blocks' digests."""
    manifest = big_manifest((21 << 20,))
    plan = plan_restore(manifest, everything(manifest), fetch_nbytes=9 << 20)
    assert [fetch.nbytes for fetch in plan.fetches] == [8 << 20, 8 << 20, 5 << 20]
    blocks = []
    for fetch in plan.fetches:
        (piece,) = fetch.pieces
        assert piece.begin % BLOCK_NBYTES == 0
        blocks += piece.digests(manifest)
    assert tuple(blocks) == manifest.shards[0].digests
    tiny = plan_restore(manifest, everything(manifest), fetch_nbytes=1)
    assert {fetch.nbytes for fetch in tiny.fetches} == {4 << 20, 1 << 20}


def test_only_what_is_wanted_is_read():
    """Shards that hold nothing of the wanted regions are not read, of a large one only the blocks that do, and gaps are bridged only when small."""
    manifest = big_manifest((100,), (5000,), (100,), (64 << 20,))
    wanted = [("g.0", whole((100,))), ("g.2", whole((100,)))]
    assert [(fetch.offset, fetch.nbytes) for fetch in plan_restore(manifest, wanted).fetches] == [(4096, 5200)]
    assert [(fetch.offset, fetch.nbytes) for fetch in plan_restore(manifest, wanted, gap_nbytes=4999).fetches] == [(4096, 100), (9196, 100)]
    (fetch,) = plan_restore(manifest, [("g.3", Region((9 << 20,), (10,)))]).fetches
    (piece,) = fetch.pieces
    assert (piece.begin, piece.end) == (8 << 20, 12 << 20)
    assert piece.digests(manifest) == manifest.shards[3].digests[2:3]


def test_two_targets_share_a_read():
    """What two wanted regions have in common is read once and placed twice; an alias is read from the tensor it is tied to."""
    manifest = big_manifest((10, 10))
    wanted = [("g.0", Region((0, 0), (6, 10))), ("g.tied", Region((4, 0), (6, 10))), ("g.0", whole((10, 10)))]
    plan = plan_restore(manifest, wanted)
    assert plan.nbytes == 100
    (piece,) = plan.fetches[0].pieces
    assert piece.targets == (0, 1, 2)
    copies = {copy.target: copy for copy in place(manifest, piece, wanted)}
    assert (copies[1].flat, copies[1].run_offset, copies[1].run_nbytes) == (0, 40, 60)
    assert copies[1].destination == Region((0, 0), (6, 10))


def test_equal_regions_are_one_run():
    """The usual restore, whole into whole, is a flat copy for each piece, however it is split."""
    manifest = big_manifest((3, 7 << 20))
    wanted = everything(manifest)
    plan = plan_restore(manifest, wanted)
    covered = 0
    for fetch in plan.fetches:
        for piece in fetch.pieces:
            for copy in place(manifest, piece, wanted):
                assert copy.flat == covered == piece.begin + copy.offset + copy.run_offset
                covered += copy.run_nbytes
    assert covered == 21 << 20


def test_wishes_that_cannot_be_met():
    """F6, F9: an unknown name and a region out of bounds are LayoutErrors, an uncovered or doubly stored region a CorruptionError that names it."""
    manifest = big_manifest((4, 4))
    with pytest.raises(LayoutError, match=r"'g\.7' is not in"):
        plan_restore(manifest, [("g.7", whole((4, 4)))])
    for region in (whole((5, 4)), whole((4,)), Region((-1, 0), (1, 4)), Region((3, 0), (2, 4))):
        with pytest.raises(LayoutError, match="out of its shape"):
            plan_restore(manifest, [("g.0", region)])
    half = msgspec.structs.replace(manifest, shards=(msgspec.structs.replace(manifest.shards[0], region=Region((0, 0), (2, 4)), nbytes=8),))
    with pytest.raises(CorruptionError, match=r"lacks \[2:3, 0:4\] of 'g\.0'"):
        plan_restore(half, [("g.0", Region((1, 0), (2, 4)))])
    with pytest.raises(CorruptionError, match="more than once"):
        plan_restore(msgspec.structs.replace(manifest, shards=manifest.shards * 2), [("g.0", Region((1, 0), (2, 4)))])
    with pytest.raises(CorruptionError, match="lacks"):
        plan_restore(msgspec.structs.replace(manifest, shards=()), [("g.0", whole((4, 4)))])


def test_nothing_wanted_and_nothing_in_it():
    """F12: an empty tensor and an empty region need no read."""
    manifest = big_manifest((0, 3), (4,))
    assert plan_restore(manifest, [("g.0", whole((0, 3))), ("g.1", Region((2,), (0,)))]).fetches == ()


def test_a_slab_part_describes_the_slab():
    """Each shard of a slab's part is the tensor's bytes in its file, at the offset and with the digests it says."""
    tensors = state()
    plan = plan_save(specs_of(tensors), aliases={})
    slab = fill(plan, tensors)
    manifest = manifest_of(plan, slab)
    files = {f"data/x/{file.name}": bytes(slab[file.slab_offset : file.slab_offset + file.nbytes]) for file in plan.files}
    assert {stored.key: stored.nbytes for stored in manifest.objects} == {key: len(data) for key, data in files.items()}
    for shard in manifest.shards:
        data = files[manifest.objects[shard.object].key][shard.offset : shard.offset + shard.nbytes]
        assert data == raw(tensors[manifest.tensors[shard.tensor].name])
        assert shard.digests == (digest(data),)
    assert manifest.metrics == {"loss": 0.5}


def test_a_part_needs_a_digest_for_each_shard():
    """Fewer digests than placements are a mistake, not a part with fewer shards."""
    plan = plan_save([TensorSpec("m.a", "U8", (1,), "m")], aliases={})
    with pytest.raises(ValueError, match="zip"):
        slab_part(plan, step=1, attempt=1, node=0, nodes=1, saved_at=0.0, values=b"{}", metrics={}, object_key={plan.files[0].name: "k"}, digests=[], header_digests=["0" * 32])


def test_plans_describe_themselves():
    """The text for --dry-run names files, counts and bytes."""
    tensors = state()
    plan = plan_save(specs_of(tensors), aliases={})
    text = plan.describe()
    assert "9 tensors in 3 files" in text
    assert all(file.name in text and f"{file.nbytes:,} bytes" in text for file in plan.files)
    manifest = manifest_of(plan, fill(plan, tensors))
    text = plan_restore(manifest, everything(manifest)).describe()
    assert "3 reads" in text
    assert "from 3 objects" in text
