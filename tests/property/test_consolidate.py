"""Consolidation of any layout, with any memory, by any number of processes: the export equals the whole tensors, or there is none."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import tempfile
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from everystep.consolidate import writing
from everystep.consolidate.plan import plan_export
from everystep.errors import CorruptionError
from everystep.foreign.dtypes import DTYPES as TORCH
from everystep.safetensors import DTYPES
from everystep.schedule import Consolidate
from everystep.store.disk import RealDisk
from everystep.testing.chunked import array, chunked_source, grid

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOATS = ("F64", "F32", "F16", "BF16")


@st.composite
def checkpoints(draw):
    """Arguments of ``chunked_source``: a few tensors, cut in each dimension or none, some of several windows."""
    tensors, regions, strided = {}, {}, []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.one_of(st.lists(st.integers(0, 9), max_size=4), st.tuples(st.integers(1, 200), st.integers(1, 90))))
        word = draw(st.sampled_from(sorted(DTYPES)))
        name = f"layer.{number}.weight"
        tensors[name] = (word, array(word, shape, seed=draw(st.integers(0, 99))))
        cuts = [draw(st.lists(st.integers(0, size), max_size=3)) for size in shape]
        regions[name] = draw(st.permutations(grid(shape, cuts)))
        if draw(st.integers(0, 4)) == 0:
            strided.append(name)
    return {
        "tensors": tensors, "regions": regions, "strided": strided, "files": draw(st.integers(1, 4)), "seed": draw(st.integers(0, 99)),
        "check": draw(st.sampled_from(["", "digests", "crc"])), "block": draw(st.sampled_from([8, 24, 100, 4096, 10000])),
    }  # fmt: skip


def expected(word, values, dtype):
    """What PyTorch makes of the values, as bytes."""
    if not values.size:
        return b""
    tensor = torch.from_numpy(values.reshape(-1).view(np.uint8).copy()).view(TORCH[word])
    if dtype != "keep" and word in FLOATS:
        tensor = tensor.to(CASTS[dtype])
    return tensor.view(torch.uint8).numpy().tobytes()


def read(folder, plan):
    """All tensors of an export, by the safetensors package."""
    found = {}
    for file in plan.files:
        found.update(load_file(f"{folder}/{file.name}"))
    return found


def assert_equal(folder, plan, tensors, dtype="keep", renamed=lambda name: name, wanted=lambda name: True):
    found = read(folder, plan)
    assert sorted(found) == sorted(renamed(name) for name in tensors if wanted(name)) == sorted(plan.weight_map)
    for name, (word, values) in tensors.items():
        if wanted(name):
            tensor = found[renamed(name)]
            assert tuple(tensor.shape) == values.shape
            assert not values.size or tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == expected(word, values, dtype), name
            assert tensor.dtype == (CASTS[dtype] if dtype != "keep" and word in FLOATS else TORCH[word])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    made=checkpoints(), dtype=st.sampled_from(["keep", "keep", "bf16", "fp16", "fp32"]), limit=st.none() | st.integers(1, 3000),
    sizes=st.sampled_from([(1, 4096, 64), (3, 4096, 512), (2, 8192, 4096), (2, 1 << 20, 1 << 20)]), shares=st.sampled_from([1, 1, 2, 3]),
    rename=st.booleans(), some=st.booleans(),
)  # fmt: skip
def test_any_layout_equals_the_whole_tensors(made, dtype, limit, sizes, shares, rename, some):
    """F4, F13, F22: whatever the cut, dtype, cast, file size, memory and number of processes, what safetensors reads is the whole tensors."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(writing, "_sizes", return_value=sizes):
        out = pathlib.Path(folder, "out")
        out.mkdir()
        source = chunked_source(folder, **made)
        include = ("layer.[012].*",) if some and len(made["tensors"]) > 3 else ()
        plan = plan_export(source, Consolidate(dtype=dtype, max_shard_size=limit, include=include, rename={r"^layer\.(\d)": r"h\1"} if rename else {}))
        for share in range(shares):
            writing.write_export(source, plan, str(out), only=(share, shares))
        if shares > 1:
            writing.finish_export(plan, str(out))
        assert sorted(os.listdir(out)) == sorted(file.name for file in plan.files)
        assert_equal(
            out, plan, made["tensors"], dtype, renamed=lambda name: re.sub(r"^layer\.", "h", name) if rename else name,
            wanted=lambda name: not include or name[6] in "012",
        )  # fmt: skip


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(made=checkpoints(), at=st.integers(0, 10**9), bit=st.integers(0, 7), check=st.sampled_from(["digests", "crc"]), shares=st.integers(1, 2))
def test_any_flipped_bit_is_found_and_named(made, at, bit, check, shares):
    """F7: one bit of a chunk flipped: CorruptionError with the tensor's name, and no file that holds it has its final name."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(writing, "_sizes", return_value=(2, 4096, 512)):
        out = pathlib.Path(folder, "out")
        out.mkdir()
        source = chunked_source(folder, **{**made, "check": check})
        chunks = [(name, chunk) for name, tensor in source.tensors.items() for chunk in tensor.chunks if chunk.nbytes]
        if not chunks:
            return
        name, chunk = chunks[at % len(chunks)]
        path = pathlib.Path(folder, source.files[chunk.file].key)
        data = bytearray(path.read_bytes())
        data[chunk.offset + at % chunk.nbytes] ^= 1 << bit
        path.write_bytes(data)
        plan = plan_export(source, Consolidate())

        def attempt():
            for share in range(shares):
                writing.write_export(source, plan, str(out), only=(share, shares))
            writing.finish_export(plan, str(out))

        with pytest.raises(CorruptionError, match=re.escape(repr(name))):
            attempt()
        assert not (out / plan.weight_map[name]).exists()


class KilledError(BaseException):
    pass


class Dying(RealDisk):
    """Counts changes, and dies at one of them, for good."""

    def __init__(self, at):
        self.left = at

    def _step(self):
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def pwrite(self, fd, data, offset):
        self._step()
        return super().pwrite(fd, data, offset)

    def fsync(self, fd):
        self._step()
        super().fsync(fd)

    def ftruncate(self, fd, nbytes):
        self._step()
        super().ftruncate(fd, nbytes)

    def rename(self, source, target):
        self._step()
        super().rename(source, target)

    def unlink(self, path):
        self._step()
        super().unlink(path)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(made=checkpoints(), kills=st.lists(st.integers(0, 40), min_size=1, max_size=4), threads=st.integers(1, 3))
def test_killed_anywhere_nothing_wrong_has_a_name_and_the_next_finishes(made, kills, threads):
    """F58: killed at any change of the disk, again and again: a file under its name is whole, and the next call finishes the rest."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(writing, "_sizes", return_value=(threads, 4096, 512)):
        out = pathlib.Path(folder, "out")
        out.mkdir()
        source = chunked_source(folder, **made)
        plan = plan_export(source, Consolidate(max_shard_size=2000))
        whole = pathlib.Path(folder, "whole")
        whole.mkdir()
        digests = writing.write_export(source, plan, str(whole)).digests
        kept = {}
        for at in kills:
            with contextlib.suppress(KilledError):
                writing.write_export(source, plan, str(out), disk=Dying(at))
            for file in plan.files:
                path = out / file.name
                if path.exists():
                    assert path.read_bytes() == (whole / file.name).read_bytes()
                    assert kept.setdefault(file.name, path.stat().st_ino) == path.stat().st_ino
        assert writing.write_export(source, plan, str(out)).digests == digests
        assert {name: (out / name).stat().st_ino for name in kept} == kept
        assert sorted(os.listdir(out)) == sorted(file.name for file in plan.files)
        assert_equal(out, plan, made["tensors"])
