"""Sharded Hugging Face safetensors: plain shards with an index, and the shards that DCP's Hugging Face writer leaves."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from everystep.errors import CorruptionError, LayoutError, NotFoundError
from everystep.integrations.dcp import restore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def net():
    torch.manual_seed(1)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 6, bias=False), nn.Linear(6, 5)]), "norm": nn.LayerNorm(5)})


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def fresh():
    other = net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(-7)
    return other


def sharded(folder, tensors, ranks):
    """Shards as DCP writes them: each rank's rows of each tensor in its own file, where they begin in the metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        entries, info = {}, {}
        for name, tensor in tensors.items():
            rows = -(-tensor.shape[0] // ranks)
            part = tensor[rank * rows : (rank + 1) * rows]
            entries[name] = part.clone()
            info[name] = {"saved_offsets": [min(rank * rows, tensor.shape[0]), *[0] * (tensor.dim() - 1)]}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        safetensors.torch.save_file(entries, folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata=metadata)


def test_plain_shards_with_an_index(tmp_path):
    """Files and index as transformers writes them: every tensor is found, other files beside them are not looked at."""
    model = net()
    state = model.state_dict()
    names = list(state)
    files = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, held in files.items():
        safetensors.torch.save_file({name: state[name].clone() for name in held}, tmp_path / file, metadata={"format": "pt"})
    safetensors.torch.save_file({"other": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}})
    )
    other = fresh()
    restore({"model": other}, tmp_path)
    assert same(model, other)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_missing_file_is_named(tmp_path, index, lost):
    """F6: one of three files deleted, in turn, with and without an index: CorruptionError names what is lost; nothing is changed."""
    model = net()
    state = model.state_dict()
    names = sorted(state)
    held = {number: names[number - 1 :: 3] for number in (1, 2, 3)}
    for number, some in held.items():
        safetensors.torch.save_file({name: state[name].clone() for name in some}, tmp_path / f"model-{number:05d}-of-00003.safetensors")
    if index:
        weights = {name: f"model-{number:05d}-of-00003.safetensors" for number, some in held.items() for name in some}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (tmp_path / f"model-{lost:05d}-of-00003.safetensors").unlink()
    other = fresh()
    with pytest.raises(CorruptionError, match=f"model-{lost:05d}-of-00003") as caught:
        restore({"model": other}, tmp_path)
    assert any(f"'model.{name}'" in caught.value.message for name in held[lost])
    assert "0:" in caught.value.message or str(list(state[held[lost][0]].shape)) in caught.value.message
    assert same(other, fresh())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_of_dcp(tmp_path, ranks):
    """Rows of every rank by DCP_SHARDING_INFO, uneven and empty ones too, into whole tensors."""
    model, other = net(), fresh()
    sharded(tmp_path / "c", model.state_dict(), ranks)
    restore({"model": other}, tmp_path / "c")
    assert same(model, other)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_missing_shard_of_dcp_is_named(tmp_path, lost):
    """F6: shards tell only where they begin, so that a lost last one would be a smaller tensor: CorruptionError with the regions for each."""
    model, other = net(), fresh()
    sharded(tmp_path / "c", model.state_dict(), 3)
    (tmp_path / "c" / f"shard-{lost:05d}-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptionError) as caught:
        restore({"model": other}, tmp_path / "c")
    rows = {1: "0:2", 2: "2:4", 3: "4:6"}[lost]
    assert f"[{rows}, 0:4] of 'layers.0.weight'" in caught.value.message
    assert same(other, fresh())


@pytest.mark.parametrize("distributed", [True, False])
def test_what_dcps_writer_leaves(tmp_path, distributed):
    """The Hugging Face writer of DCP itself, with shards and with whole files."""
    model, other = net(), fresh()
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "c"), save_distributed=distributed)
    dcp.save(model.state_dict(), storage_writer=writer)
    restore({"model": other}, tmp_path / "c")
    assert same(model, other)


def test_several_files_of_one_rank(tmp_path):
    """A mapping of names to files, as AutoModel passes it: shard k of file i."""
    model, other = net(), fresh()
    mapping = {name: 1 + index % 2 for index, name in enumerate(model.state_dict())}
    dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "c"), mapping, save_distributed=True))
    assert len(list((tmp_path / "c").glob("shard-*.safetensors"))) == 2
    restore({"model": other}, tmp_path / "c")
    assert same(model, other)


def test_hostile_indexes(tmp_path):
    """An index that leads out of the folder, is no JSON, or lists what its file does not hold: CorruptionError."""
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors")
    for told in ('{"weight_map": {"w": "../a.safetensors"}}', '{"weight_map": {"w": "/etc/passwd"}}', '{"weight_map": [1]}', "[]", "{", '{"weight_map": {"w": 1}}', "[" * 5000,
                 '{"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}'):  # fmt: skip
        (tmp_path / "model.safetensors.index.json").write_text(told)
        with pytest.raises(CorruptionError):
            restore({"m": {"w": torch.zeros(2)}}, tmp_path)


@pytest.mark.parametrize(
    "told",
    ["{", "[]", "{}", '{"w": 1}', '{"w": {"saved_offsets": [0, 0]}}', '{"w": {"saved_offsets": [-1]}}', '{"w": {"saved_offsets": ["0"]}}'],
)
def test_hostile_sharding_info(tmp_path, told):
    """Offsets that are none: CorruptionError."""
    safetensors.torch.save_file(
        {"w": torch.zeros(2)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", metadata={"DCP_SHARDING_INFO": told}
    )
    with pytest.raises(CorruptionError):
        restore({"m": {"w": torch.zeros(2)}}, tmp_path)


def test_shards_that_contradict_each_other(tmp_path):
    """The same region twice with one content is a replica; overlapping ones, other dtypes and whole tensors of two shapes are not."""

    def shard(number, tensor, offsets):
        info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offsets}})} if offsets is not None else None
        safetensors.torch.save_file({"w": tensor}, tmp_path / f"shard-{number:05d}-model-00001-of-00001.safetensors", metadata=info)

    target = torch.zeros(4)
    shard(1, torch.arange(4.0), [0])
    shard(2, torch.arange(4.0), [0])
    restore({"m": {"w": target}}, tmp_path)
    assert torch.equal(target, torch.arange(4.0))
    shard(2, torch.arange(2.0), [1])
    with pytest.raises(CorruptionError, match="more than once"):
        restore({"m": {"w": target}}, tmp_path)
    shard(2, torch.arange(4.0).half(), [0])
    with pytest.raises(CorruptionError, match="contradict"):
        restore({"m": {"w": target}}, tmp_path)


def test_a_truncated_safetensors_file(tmp_path):
    """Cut anywhere: CorruptionError that names the file."""
    safetensors.torch.save_file({"w": torch.arange(100.0)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    for end in (0, 7, 20, len(data) - 1):
        (tmp_path / "model.safetensors").write_bytes(data[:end])
        with pytest.raises(CorruptionError, match=r"model\.safetensors"):
            restore({"m": {"w": torch.zeros(100)}}, tmp_path)


def test_smaller_tensors_are_still_a_misfit(tmp_path):
    """A whole tensor of another shape is no lost shard: LayoutError; an empty folder is no checkpoint."""
    safetensors.torch.save_file({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")
    with pytest.raises(LayoutError, match="shape"):
        restore({"m": {"w": torch.zeros(5)}}, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError):
        restore({"m": {"w": torch.zeros(5)}}, tmp_path / "empty")
