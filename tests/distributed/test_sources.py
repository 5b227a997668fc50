"""What DCP saved on real ranks, opened for consolidation: whole tensors come out of every layout, and what is lost is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_dcp import KINDS, contents


@pytest.fixture(scope="module", params=KINDS)
def saved(request, launcher, tmp_path_factory):
    """A model and an optimizer saved by DCP on four ranks: in its own format, and the model as Hugging Face parts."""
    from launch import Job
    from nodes import Cluster

    folder = tmp_path_factory.mktemp(request.param)
    with (
        Cluster(1, isolated=False) as cluster,
        Job(launcher, cluster, "test_dcp:dcp_saves", per_node=4, options={"folder": str(folder), "kind": request.param}) as job,
    ):
        job.finished()
    return folder


def tensor_of(source: Any, name: str) -> Any:
    """A whole float32 tensor, from the bytes that its chunks are."""
    import torch

    tensor = source.tensors[name]
    found = np.full(tensor.shape, np.nan, np.float32)
    for chunk in tensor.chunks:
        data = (Path(source.store.url) / source.files[chunk.file].key).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
        assert chunk.strides is None
        place = tuple(slice(a, a + n) for a, n in zip(chunk.region.offsets, chunk.region.sizes, strict=True))
        found[place] = np.frombuffer(data, np.float32).reshape(chunk.region.sizes)
    return torch.from_numpy(found)


@pytest.mark.parametrize("name", ["flat-0", "flat-1", "hf"])
def test_every_layout_opens_as_whole_tensors(saved, name):
    """F6: FSDP, tensor parallel, HSDP and replicated tensors of four ranks are the full tensors, under the module's own names."""
    import torch

    from everystep.consolidate.source import check_cover, find_checkpoints, open_source

    source = open_source(saved / name)
    check_cover(source)
    shapes = {"0.weight": (7, 5), "0.bias": (7,), "2.weight": (3, 7), "2.bias": (3,), "seen": (2,)}
    assert {name: tensor.shape for name, tensor in source.tensors.items()} == shapes
    for name_, shape in shapes.items():
        full = tensor_of(source, name_)
        assert torch.equal(full, contents(f"model.{name_}", torch.empty(shape)))
    assert [one.complete for one in find_checkpoints(saved / name)] == [True]


@pytest.mark.parametrize("name", ["flat-0", "hf"])
def test_no_file_can_be_lost_without_being_told(saved, name, tmp_path):
    """F6: each file deleted in turn: either nothing of the model was in it, or what is lost is named; never another tensor.

    The last of the Hugging Face parts is apart: there nothing but what lies beside the checkpoint could tell.
    """
    from everystep.consolidate.source import check_cover, open_source
    from everystep.errors import CorruptionError

    whole = open_source(saved / name)
    used = {whole.files[chunk.file].key for tensor in whole.tensors.values() for chunk in tensor.chunks}
    files = sorted(path.name for path in (saved / name).iterdir() if path.suffix in {".distcp", ".safetensors"})
    for file in files if name == "flat-0" else files[:-1]:
        folder = shutil.copytree(saved / name, tmp_path / file)
        (folder / file).unlink()
        message = ""
        try:
            source = open_source(folder)
            check_cover(source)
        except CorruptionError as error:
            message = error.message
        if message:
            assert file in used
            assert re.search(r"region \[.*\] of '|the end of '|by the numbers of the others", message)
        else:
            lost = whole.tensors.keys() - source.tensors.keys()
            alone = {key for key in lost if {whole.files[chunk.file].key for chunk in whole.tensors[key].chunks} == {file}}
            assert file not in used or lost == alone != set()  # a tensor that was in no other file: told by a mapping, where there is one
            assert all(source.tensors[key].shape == tensor.shape for key, tensor in whole.tensors.items() if key not in lost)
