"""DCP's pickled metadata: its own classes are read, everything else is refused and nothing is run."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from everystep.errors import CorruptionError
from everystep.foreign.unpickling import Place, unpickled
from everystep.region import Region


def metadata(**changes):
    """Sound metadata of one tensor in two chunks and one value."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    fields = {
        "state_dict_metadata": {
            "w": TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([4, 3]), chunks),
            "lr": BytesStorageMetadata(),
        },
        "planner_data": {"w": ("w",), "lr": ("optim", "param_groups", 0, "lr")},
        "storage_data": {
            MetadataIndex("w", torch.Size([0, 0])): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex("w", torch.Size([2, 0])): _StorageInfo("__1_0.distcp", 7, 100),
            MetadataIndex("lr"): _StorageInfo("__0_0.distcp", 100, 50),
        },
    }
    return Metadata(**{**fields, **changes})


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_sound_metadata_is_read(protocol):
    """Shapes, dtypes, chunks, places and ways come out as DCP put them in, in every protocol of pickle."""
    told = unpickled(pickle.dumps(metadata(), protocol), key="k")
    assert told.tensors["w"].dtype is torch.bfloat16
    assert told.tensors["w"].shape == (4, 3)
    assert told.tensors["w"].chunks == (
        (Region((0, 0), (2, 3)), Place("__0_0.distcp", 0, 100)),
        (Region((2, 0), (2, 3)), Place("__1_0.distcp", 7, 100)),
    )
    assert told.plain == {"lr": Place("__0_0.distcp", 100, 50)}
    assert told.paths["lr"] == ("optim", "param_groups", 0, "lr")


def test_what_dcp_writes_is_read(tmp_path):
    """A file that DCP itself wrote, with the folder's path in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": {"w": torch.ones(3), "n": 1}}, checkpoint_id=tmp_path / "c")
    told = unpickled((tmp_path / "c" / ".metadata").read_bytes(), key="k")
    assert set(told.tensors) == {"a.w"}
    assert set(told.plain) == {"a.n"}


class Evil:
    """Unpickles by running a command."""

    def __init__(self, function, *arguments):
        self.told = function, arguments

    def __reduce__(self):
        return self.told


@pytest.mark.parametrize("where", ["alone", "planner_data", "storage_data", "state_dict_metadata"])
@pytest.mark.parametrize("call", [os.system, exec, eval, getattr, __import__, print, io.open, torch.load])
def test_code_is_refused_and_not_run(tmp_path, where, call):
    """os.system and its like, anywhere in the file: CorruptionError names it, and nothing happened."""
    mark = tmp_path / "mark"
    evil = Evil(call, f"touch {mark}")
    data = pickle.dumps(evil if where == "alone" else metadata(**{where: {"x": evil}}))
    with pytest.raises(CorruptionError) as caught:
        unpickled(data, key="k")
    assert caught.value.kind == "pickle"
    assert f".{call.__name__}" in caught.value.message
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.Linear",
        "torch.Tensor",
        "torch.hub.load",
        "builtins.object",
        "torch.distributed.checkpoint.metadata.dataclass",
        "os.path.join",
    ],
)
def test_other_names_are_refused(name):
    """Harmless or not: a name that DCP's metadata has no use for is refused, also one that its module happens to have."""
    module, _, word = name.rpartition(".")
    data = b"\x80\x02c" + module.encode() + b"\n" + word.encode() + b"\n."
    with pytest.raises(CorruptionError, match=word):
        unpickled(data, key="k")


def test_classes_are_inert():
    """A pickle cannot change what the unpickler's own stand-ins are, nor call their state in."""
    good = pickle.dumps(metadata(), 2)
    attack = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}(X\x05\x00\x00\x00statesNubub."
    with pytest.raises(CorruptionError):
        unpickled(attack, key="k")
    assert unpickled(good, key="k").tensors


def test_a_few_bytes_take_no_memory():
    """Numbers in the pickle that say how much there is to come: no memory is taken for them."""
    import resource

    for data in (
        b"\x80\x02Nr\xf0\xff\xff\x7f.",
        b"\x80\x04\x8d" + b"\xff" * 6 + b"\0\0.",
        b"\x80\x04\x95" + b"\xff" * 6 + b"\0\0.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(CorruptionError):
            unpickled(data, key="k")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def entry(**changes):
    fields = {"properties": TensorProperties(), "size": torch.Size([2]), "chunks": [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]}
    return {"w": TensorStorageMetadata(**{**fields, **changes})}


@pytest.mark.parametrize(
    "changes",
    [
        {"state_dict_metadata": None},
        {"state_dict_metadata": {1: BytesStorageMetadata()}},
        {"state_dict_metadata": {"w": 5}},
        {"storage_data": None},
        {"storage_data": {"w": 1}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("../../etc/passwd", 0, 1)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("/etc/passwd", 0, 1)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("a\0b", 0, 1)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("f", -1, 1)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("f", 0, "1")}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("f", 0, True)}},
        {"state_dict_metadata": entry(size=[-2])},
        {"state_dict_metadata": entry(size="2")},
        {"state_dict_metadata": entry(size=[2.0])},
        {"state_dict_metadata": entry(chunks=None)},
        {"state_dict_metadata": entry(chunks=[3])},
        {"state_dict_metadata": entry(chunks=[ChunkStorageMetadata([1], [2])])},
        {"state_dict_metadata": entry(chunks=[ChunkStorageMetadata([0, 0], [2, 1])])},
        {"state_dict_metadata": entry(properties=None)},
        {"state_dict_metadata": entry(size=[1 << 70])},
    ],
)
def test_nonsense_is_refused(changes):
    """Wrong types, negative and huge numbers, regions outside the tensor, files outside the folder: CorruptionError."""
    with pytest.raises(CorruptionError):
        unpickled(pickle.dumps(metadata(**changes)), key="k")


def test_every_cut_is_refused():
    """A file that ends early, anywhere, and one with a changed byte: CorruptionError or sound metadata, never another error."""
    data = pickle.dumps(metadata())
    for end in range(len(data)):
        with pytest.raises(CorruptionError):
            unpickled(data[:end], key="k")
    for at in range(0, len(data), 3):
        changed = data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :]
        with contextlib.suppress(CorruptionError):
            unpickled(changed, key="k")


def test_stream_extensions_are_refused():
    """Items that went through a stream transform cannot be read: said so."""
    info = _StorageInfo("f", 0, 1, ["stream.zstd"])
    with pytest.raises(CorruptionError, match="zstd"):
        unpickled(pickle.dumps(metadata(storage_data={MetadataIndex("w"): info})), key="k")


def test_an_archives_memo_is_as_small_as_the_archive():
    """A tensor's archive whose pickle numbers its memo in millions takes no memory for that: it is only torch's to read."""
    import tracemalloc
    import zipfile

    from everystep.foreign.archive import record_of

    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02Nr\xff\xff\xff\x00.")  # None, put at 16,777,215 of the memo
    tracemalloc.start()
    try:
        assert record_of(made, len(made.getvalue())) is None
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
