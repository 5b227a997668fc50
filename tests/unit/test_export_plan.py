from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import safetensors
import xxhash

from everystep.consolidate.plan import plan_export
from everystep.consolidate.source import Chunk, Opened, SourceFile, SourceTensor
from everystep.errors import ConfigError, LayoutError
from everystep.region import Region, whole
from everystep.safetensors import DTYPES
from everystep.schedule import Consolidate
from everystep.store import open_store


def source(tensors, *, files=None, kind="dcp", **more):
    """A source that is never read: name -> (dtype, shape), all in two halves in one file, or ``files``: lists of whole tensors."""
    found, listed, headers = {}, [], {}
    if files is None:
        at = 100
        for name, (word, shape) in tensors.items():
            size = DTYPES.get(word, 16)
            halves = [Region((0, *(0,) * len(shape[1:])), shape)] if not shape else [
                Region((0,) * len(shape), (shape[0] // 2, *shape[1:])),
                Region((shape[0] // 2, *(0,) * len(shape[1:])), (shape[0] - shape[0] // 2, *shape[1:])),
            ]  # fmt: skip
            if not shape:
                halves = [Region((), ())]
            chunks = []
            for half in halves:
                chunks.append(Chunk(half, 0, at, half.numel * size))
                at += half.numel * size
            found[name] = SourceTensor(name, word, shape, tuple(chunks))
        listed.append(SourceFile("shard.bin", at))
    for number, names in enumerate(files or ()):
        at = 4096
        for name in names:
            word, shape = tensors[name]
            nbytes = DTYPES[word] * int(np.prod(shape))
            found[name] = SourceTensor(name, word, shape, (Chunk(whole(shape), number, at, nbytes),))
            at += nbytes
        listed.append(SourceFile(f"data/model-{number}.safetensors", at))
        headers[number] = (4096, xxhash.xxh3_128_hexdigest(b"header"))
    options = {"kind": kind, "where": "/somewhere", "key": "k", "step": 7, "saved_at": 1.0, "identity": "i" * 32, "store": open_store("/somewhere"),
               "files": listed, "tensors": found, "headers": headers if kind == "everystep" else {}}  # fmt: skip
    return Opened(**{**options, **more})


TWO = {"a.weight": ("F32", (4, 8)), "b.weight": ("BF16", (6,))}


def told(file):
    """A file's header as another reader sees it."""
    body = json.loads(file.header[8:])
    assert int.from_bytes(file.header[:8], "little") + 8 == len(file.header)
    return body


def test_files_bear_step_and_plan_and_are_sound():
    """Names are <stem>-00001-of-0000N-<step>-<id>; the safetensors package reads headers, whose metadata says format pt."""
    plan = plan_export(source(TWO), Consolidate(), stem="adapter")
    (file,) = plan.files
    assert file.name == f"adapter-00001-of-00001-7-{plan.id[:8]}.safetensors"
    assert told(file)["__metadata__"] == {"format": "pt"}
    read = dict(safetensors.deserialize(file.header + bytes(128 + 12)))
    assert {name: (one["dtype"], tuple(one["shape"])) for name, one in read.items()} == TWO
    assert file.nbytes == len(file.header) + 140
    assert plan.nbytes == file.nbytes
    assert plan.total_size == 140
    assert plan.weight_map == dict.fromkeys(TWO, file.name)


def test_the_id_follows_from_all_that_shapes_the_result():
    """Equal inputs give equal plans; another identity, step, stem, dtype, size or name gives another id."""
    ids = {
        plan_export(source(TWO), Consolidate()).id,
        plan_export(source(TWO, identity="j" * 32), Consolidate()).id,
        plan_export(source(TWO, step=8), Consolidate()).id,
        plan_export(source(TWO), Consolidate(), stem="other").id,
        plan_export(source(TWO), Consolidate(dtype="fp16")).id,
        plan_export(source(TWO), Consolidate(max_shard_size=1)).id,
        plan_export(source(TWO), Consolidate(rename={"^a": "c"})).id,
        plan_export(source(TWO), Consolidate(include=("a.*",))).id,
        plan_export(source(TWO, aliases={"tied": "a.weight"}), Consolidate()).id,
    }
    assert len(ids) == 9
    assert plan_export(source(TWO), Consolidate()) == plan_export(source(TWO), Consolidate())


def test_entries_fall_in_item_size_so_that_views_are_aligned():
    """Within a file the item size never rises, and each entry begins at a multiple of it."""
    plan = plan_export(source({word: (word, (3,)) for word in DTYPES}), Consolidate())
    sizes = [DTYPES[entry.dtype] for entry in plan.files[0].entries]
    assert sizes == sorted(sizes, reverse=True)
    assert all(entry.begin % DTYPES[entry.dtype] == 0 for entry in plan.files[0].entries)


@pytest.mark.parametrize(("word", "dtype"), [("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16"), ("float16", "F16"), ("fp32", "F32")])
def test_only_floats_of_two_bytes_and_more_are_cast(word, dtype):
    """F22: FP8, integers and bool stay as they are, whatever the cast."""
    plan = plan_export(source({name: (name, (4,)) for name in DTYPES}), Consolidate(dtype=word))
    for entry in plan.files[0].entries:
        assert entry.dtype == (dtype if entry.name in {"F64", "F32", "F16", "BF16"} else entry.name)
        assert entry.end - entry.begin == 4 * DTYPES[entry.dtype]


@pytest.mark.parametrize(("size", "names"), [(128, [["a", "b"], ["c"], ["d"]]), ("0.1KB", [["a"], ["b"], ["c"], ["d"]]), ("1 KiB", [["a", "b", "c", "d"]])])
def test_files_hold_no_more_than_asked_for(size, names):
    """max_shard_size counts tensor bytes; a tensor that is larger has a file of its own; the numbers tell how many files there are."""
    tensors = {"a": ("F32", (16,)), "b": ("F32", (16,)), "c": ("F32", (100,)), "d": ("F32", (2,))}
    plan = plan_export(source(tensors), Consolidate(max_shard_size=size))
    assert [[entry.name for entry in file.entries] for file in plan.files] == names
    assert [file.name[:20] for file in plan.files] == [f"model-{n + 1:05d}-of-{len(names):05d}" for n in range(len(names))]


@pytest.mark.parametrize("options", [{"max_shard_size": "5 parsecs"}, {"max_shard_size": 0}, {"dtype": "int3"}, {"include": ("zz*",)}, {"rename": {"(": "x"}}, {"rename": {"a": r"\9"}}])
def test_what_cannot_be_understood_is_refused(options):
    """A bad size, dtype or pattern, and an include that matches nothing, are ConfigErrors."""
    with pytest.raises(ConfigError):
        plan_export(source(TWO), Consolidate(**options))


def test_names_that_nothing_matches_are_told():
    """The error lists what the source's names look like."""
    with pytest.raises(ConfigError, match=r"a\.weight"):
        plan_export(source(TWO), Consolidate(include=("model.*",)))


def test_include_and_rename():
    """Patterns are matched against the source's names; renaming comes after, in order."""
    plan = plan_export(source(TWO), Consolidate(include=("a.*",), rename={r"^a\.(w)": r"x.\1", "eight": "idth"}))
    assert list(plan.weight_map) == ["x.width"]
    assert plan.files[0].tensors == ("a.weight",)


@pytest.mark.parametrize("rename", [{".*weight": "same"}, {"^a.*": "__metadata__"}, {"^a.*": ""}])
def test_names_that_cannot_be_are_refused(rename):
    """Two tensors of one name, none, or the header's own word: LayoutError with the name."""
    with pytest.raises(LayoutError, match="weight"):
        plan_export(source(TWO), Consolidate(rename=rename))


def test_tied_names_are_stored_once():
    """F25: the other name is left out of the files and told; where only the other one is wanted, it is the one that is stored."""
    made = source(TWO, aliases={"head.weight": "a.weight"})
    plan = plan_export(made, Consolidate(rename={"^head": "lm_head"}))
    assert plan.aliases == {"lm_head.weight": "a.weight"}
    assert sorted(plan.weight_map) == ["a.weight", "b.weight"]
    plan = plan_export(made, Consolidate(include=("head.*",)))
    assert (plan.aliases, list(plan.weight_map), plan.files[0].tensors) == ({}, ["head.weight"], ("a.weight",))


def test_what_no_file_holds_is_refused_by_name():
    """F22: complex128 and the like: LayoutError that names the tensor; without it the rest goes."""
    made = source({**TWO, "spin": ("C128", (2,))})
    with pytest.raises(LayoutError, match=r"'spin'.*C128"):
        plan_export(made, Consolidate())
    assert sorted(plan_export(made, Consolidate(include=("*.weight",))).weight_map) == sorted(TWO)


# -- links --------------------------------------------------------------------------------------------------------------

FOUR = {"a": ("F32", (4,)), "b": ("F32", (8,)), "c": ("BF16", (6,)), "d": ("BF16", (0,))}
FILES = [["a", "b"], ["c", "d"]]


def links(made, **options):
    return [file.link for file in plan_export(made, Consolidate(**options)).files]


@pytest.mark.parametrize("kind", ["everystep", "safetensors"])
def test_files_of_whole_tensors_are_linked(kind):
    """A file of the source that holds just what is wanted is the export's file: no header of ours, its size, its entries."""
    made = source(FOUR, files=FILES, kind=kind)
    plan = plan_export(made, Consolidate())
    assert [file.link for file in plan.files] == [0, 1]
    assert [file.nbytes for file in plan.files] == [file.nbytes for file in made.files]
    assert [(entry.name, entry.begin, entry.end) for entry in plan.files[0].entries] == [("a", 0, 16), ("b", 16, 48)]
    assert all(file.header == b"" for file in plan.files)
    assert "linked to file 1" in plan.describe()


@pytest.mark.parametrize(
    ("options", "linked"),
    [
        ({"max_shard_size": 48}, [0, 1]),
        ({"max_shard_size": 47}, [1, None, None]),
        ({"dtype": "bf16"}, [1, None]),
        ({"rename": {"^c": "e"}}, [0, None]),
        ({"include": ("a", "c", "d")}, [1, None]),
        ({"include": ("a", "b", "c")}, [0, None]),
    ],
)
def test_a_file_is_linked_only_as_it_is(options, linked):
    """A cast, another name, a tensor too many or a smaller size: that file is put together anew, the others stay linked."""
    assert links(source(FOUR, files=FILES, kind="everystep"), **options) == linked


def test_files_with_parts_gaps_or_other_strides_are_not_linked():
    """What is not a whole row-major tensor, or leaves bytes between or behind, is read."""
    made = source(FOUR, files=FILES, kind="everystep")
    chunk = made.tensors["c"].chunks[0]

    def with_c(*chunks, **more):
        return dataclasses.replace(made, tensors={**made.tensors, "c": SourceTensor("c", "BF16", (6,), chunks)}, **more)

    assert links(with_c(chunk)) == [0, 1]
    assert links(with_c(chunk._replace(strides=(1,)))) == [0, None]
    assert links(with_c(chunk._replace(offset=4104, nbytes=12))) == [0, None]
    assert links(with_c(Chunk(Region((0,), (3,)), 1, 4096, 6), Chunk(Region((3,), (3,)), 1, 4102, 6))) == [0, None]
    assert links(with_c(chunk, files=[made.files[0], made.files[1]._replace(nbytes=9999)])) == [0, None]
    assert links(with_c(chunk, files=[made.files[0], made.files[1]._replace(key="weights.bin")])) == [0, None]
    assert links(with_c(chunk, headers={0: (4096, ""), 1: (4088, "")})) == [0, None]


def test_one_file_of_a_given_name():
    """Adapters: all tensors in one file of that very name, whatever the sizes, and never a link."""
    plan = plan_export(source(FOUR, files=FILES, kind="everystep"), Consolidate(max_shard_size=1), file_name="adapter_model.safetensors")
    assert [(file.name, file.link, len(file.entries)) for file in plan.files] == [("adapter_model.safetensors", None, 4)]
