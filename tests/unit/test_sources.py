"""Checkpoints as consolidation sees them: recognised by their folders, names, bytes of every tensor, and all that may be wrong with their files."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn

import everystep
from everystep.consolidate.source import Found, Opened, SourceTensor, check_cover, find_checkpoints, open_source
from everystep.consolidate.sources.folders import metrics_in, safe, step_in
from everystep.errors import ConfigError, CorruptionError, LayoutError, NotFoundError
from everystep.manifest import merge
from everystep.repository import CheckpointKey, Repository
from everystep.store import open_store
from everystep.testing.samples import node_file, node_part, node_payload

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore:Detected an existing checkpoint:UserWarning")

DATA = Path(__file__).resolve().parents[1] / "data"
AUTOMODEL = DATA / "automodel"
FOREIGN = DATA / "foreign"
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32,
    "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def gathered(source, tensor):
    """A whole tensor, from the files' bytes and what the source says of them; sums and digests are checked on the way."""
    dtype = DTYPES[tensor.dtype]
    size = dtype.itemsize
    items = np.zeros((*tensor.shape, size), np.uint8)
    for chunk in tensor.chunks:
        data = (Path(source.store.url) / source.files[chunk.file].key).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
        assert len(data) == chunk.nbytes
        if chunk.crc is not None:
            assert zlib.crc32(data) == chunk.crc
        block = chunk.block or 4 << 20
        for at, word in enumerate(chunk.digests):
            assert xxhash.xxh3_128_hexdigest(data[at * block : (at + 1) * block]) == word
        if not chunk.region.numel:
            continue
        strides = chunk.strides or [int(np.prod(chunk.region.sizes[dim + 1 :])) for dim in range(len(chunk.region.sizes))]
        part = np.lib.stride_tricks.as_strided(
            np.frombuffer(data, np.uint8), (*chunk.region.sizes, size), (*(size * one for one in strides), 1)
        )
        items[tuple(slice(a, a + n) for a, n in zip(chunk.region.offsets, chunk.region.sizes, strict=True))] = part
    return (
        torch.from_numpy(items.reshape(-1).copy()).view(dtype).view(tensor.shape) if items.size else torch.empty(tensor.shape, dtype=dtype)
    )


def everything(source):
    """All tensors of a source that passes the check, tied ones too."""
    check_cover(source)
    found = {name: gathered(source, tensor) for name, tensor in source.tensors.items()}
    return {**found, **{alias: found[name] for alias, name in source.aliases.items()}}


def same(one, other):
    """Names, shapes, dtypes and bytes are equal."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        a, b = (each.contiguous().reshape(-1).view(torch.uint8) if each.numel() else each for each in (tensor, other[name]))
        assert torch.equal(a, b), name
    return True


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return optimizer


def copied(source, target):
    """A copy of test data, times and links kept."""
    shutil.copytree(source, target, symlinks=True)
    return target


def set_times(folder, **ages):
    """All files of a folder written at one moment, some of them (by the end of their names) later by seconds."""
    for path in Path(folder).rglob("*"):
        late = sum(seconds for end, seconds in ages.items() if path.name.removesuffix(".distcp").removesuffix(".safetensors").endswith(end))
        os.utime(path, (1_000_000 + late, 1_000_000 + late))


# -- everystep's own runs ------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(3.5))
        self.register_buffer("count", torch.tensor([1, 2, 3], dtype=torch.int32))


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints of a module, an optimizer and plain values."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = {}
    with everystep.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
            model.inner(model.embed(torch.arange(3))).sum().backward()
            optimizer.step()
            ckpt.save(step, {"model": model, "optim": optimizer, "step": step}, metrics={"val_loss": loss}, sync=True)
            saved[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return str(tmp_path / "run"), saved


def test_a_run_is_a_source_of_its_only_module(run):
    """F4, F24, F25: the module's own names, 0-dim and integer buffers, tied names as aliases; no optimizer, no step number."""
    path, saved = run
    source = open_source(path)
    assert (source.kind, source.where, source.key, source.step, dict(source.metrics)) == (
        "everystep",
        path,
        "000000000003-0001",
        3,
        {"val_loss": 0.75},
    )
    assert same(everything(source), saved[3])
    assert dict(source.aliases) == {"head.weight": "embed.weight"}
    assert source.tensors["scale"].shape == ()
    assert gathered(source, source.tensors["scale"]).item() == 3.5
    assert all(chunk.digests for tensor in source.tensors.values() for chunk in tensor.chunks)
    assert [file.key for file in source.files] == ["data/000000000003-0001/model-00001-of-00001.safetensors"]
    header = (Path(path) / source.files[0].key).read_bytes()[: source.headers[0][0]]
    assert xxhash.xxh3_128_hexdigest(header) == source.headers[0][1]


@pytest.mark.parametrize(("step", "expected"), [
    ("latest", 3), (None, 3), (1, 1), ("1", 1), ("000000000002-0001", 2), ("best", 2), ("best:val_loss", 2), ("best:val_loss:max", 3),
])  # fmt: skip
def test_which_checkpoint_of_a_run(run, step, expected):
    """Latest, best by a metric, a number, a key; each with that step's bytes."""
    path, saved = run
    source = open_source(path, step=step)
    assert source.step == expected
    assert same(everything(source), saved[expected])


def test_the_newest_that_is_known_to_be_bad_is_passed_over(run):
    """A failed verification, then a broken manifest: the next older one is the latest; by its number a bad one is still to be had."""
    path, _ = run
    repository = Repository.open(path)
    repository.record_verified(CheckpointKey(3, 1), good=False, detail="", now=1.0)
    assert open_source(path).step == 2
    (Path(path) / "manifests/000000000002-0001.json").write_bytes(b"{")
    assert open_source(path).step == 1
    assert open_source(path, step=3).step == 3
    with pytest.raises(CorruptionError):
        open_source(path, step=2)
    assert [(one.step, one.complete) for one in find_checkpoints(path)] == [(1, True), (2, False), (3, False)]


def test_what_cannot_be_meant_in_a_run(run):
    """Unknown steps, words, keys, groups and metrics are errors that say what there is."""
    path, _ = run
    for step, kind, told in ((9, NotFoundError, "1, 2, 3"), ("newest", ConfigError, "latest"), ("000000000009-0001", NotFoundError, "ls"),
                             ("best:acc", NotFoundError, "val_loss"), ("best:val_loss:up", ConfigError, "min")):  # fmt: skip
        with pytest.raises(kind, match=told):
            open_source(path, step=step)
    with pytest.raises(ConfigError, match="'model'"):
        open_source(path, group="optim")


def test_the_folder_of_a_checkpoint_in_a_run(run):
    """``RUN/data/KEY`` is that checkpoint of the run."""
    path, _ = run
    assert open_source(f"{path}/data/000000000002-0001").key == "000000000002-0001"


def test_several_modules_want_a_group(tmp_path):
    """Two modules: ConfigError lists them; each alone; names tied across modules stay whole in each."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.weight = first.weight
    with everystep.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        ckpt.save(1, {"actor": first, "critic": second, "more": {"deep": nn.Linear(1, 1)}}, sync=True)
    with pytest.raises(ConfigError, match=r"'actor', 'critic', 'more\.deep'"):
        open_source(tmp_path / "run")
    for group, module in (("actor", first), ("critic", second)):
        source = open_source(tmp_path / "run", group=group)
        assert same(everything(source), dict(module.state_dict()))
        assert not source.aliases
    assert (
        set(open_source(tmp_path / "run", group="more").tensors)
        == set(open_source(tmp_path / "run", group="more.deep").tensors)
        == {"weight", "bias"}
    )


class Remembering(nn.Linear):
    def get_extra_state(self):
        return {"seen": torch.ones(3), "note": "x"}

    def set_extra_state(self, state):
        pass


def test_what_a_module_stores_beside_its_tensors_stays_out(tmp_path):
    """F24: the extra state of a module is no tensor of its state dict, even where there are tensors in it."""
    with everystep.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        ckpt.save(1, {"model": nn.Sequential(Remembering(2, 2))}, sync=True)
    assert set(open_source(tmp_path / "run").tensors) == {"0.weight", "0.bias"}


def test_a_state_of_plain_tensors(tmp_path):
    """A state dict instead of a module is taken by its key."""
    state = net().state_dict()
    with everystep.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        ckpt.save(1, {"model": dict(state), "ema": {"weight": torch.ones(2)}, "epoch": 3}, sync=True)
    assert same(everything(open_source(tmp_path / "run")), dict(state))
    assert same(everything(open_source(tmp_path / "run", group="ema")), {"weight": torch.ones(2)})


def test_every_dtype_of_a_run(tmp_path):
    """F22: integers, bool, 8-bit floats, complex numbers, empty tensors and 0-dim ones."""
    module = nn.Module()
    for at, dtype in enumerate(DTYPES.values()):
        module.register_buffer(f"b{at}", torch.arange(8.0).view(2, 4).to(dtype))
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("scalar", torch.tensor(2.5, dtype=torch.float16))
    with everystep.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        ckpt.save(1, {"model": module}, sync=True)
    assert same(everything(open_source(tmp_path / "run")), dict(module.state_dict()))


def test_files_of_a_run_that_are_gone_or_cut_off(run):
    """F6: a data file deleted, then one that is too short: opening works, the check names tensors and the file, nothing else."""
    path, _ = run
    file = Path(path) / "data/000000000003-0001/model-00001-of-00001.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(CorruptionError, match=r"model-00001-of-00001.safetensors.*(bytes long|ends at)"):
        check_cover(open_source(path))
    file.unlink()
    with pytest.raises(CorruptionError, match=r"region \[.*\] of '.*model-00001-of-00001.safetensors' is not there"):
        check_cover(open_source(path))


@pytest.fixture
def apart(tmp_path):
    """Stores of three nodes, each with its own node's files of one checkpoint of a module."""
    key = CheckpointKey(7, 1)
    stores = [Repository(open_store(str(tmp_path / f"node{node}"))) for node in range(3)]
    parts = []
    for node, repository in enumerate(stores):
        repository.begin(create=True, run_id="0123456789abcdef")
        repository.start_attempt(parent=None, now=1.0, world=3, nodes=3, number=1, job="j", shared=False)
        data = node_payload(key, node)
        repository.put_data(key, node_file(node), memoryview(data), nbytes=len(data))
        document = msgspec.Raw(b'{"state":{"dict":[["model",{"module":{}}]]}}')
        parts.append(msgspec.structs.replace(node_part(key, node, 3, shared=False), values=document))
        repository.put_part(parts[-1])
    for repository in stores:
        repository.commit(merge(parts))
    return tmp_path, key


def test_other_nodes_files_in_stores_of_their_own(apart):
    """F6: where each node has a store, the regions and files of the others are named; with all files in one store it is whole."""
    root, key = apart
    with pytest.raises(CorruptionError) as caught:
        check_cover(open_source(root / "node1"))
    for node, there in ((0, False), (1, True), (2, False)):
        assert (node_file(node) not in caught.value.message) is there
        assert (f"[{25 * node}:{25 * node + 25}]" not in caught.value.message) is there
        assert (f"of node {node + 1} " not in caught.value.message) is there
    for node in (0, 2):
        shutil.copy(root / f"node{node}/data/{key}/{node_file(node)}", root / f"node1/data/{key}")
    expected = torch.frombuffer(bytearray(b"".join(node_payload(key, node)[64:] for node in range(3))), dtype=torch.float32)
    assert same(everything(open_source(root / "node1")), {"a": expected})


def test_a_hold_keeps_retention_away(run):
    """While it is held a checkpoint counts as held, afterwards not; one that is forgotten cannot be held."""
    path, _ = run
    source = open_source(path)
    repository = Repository.open(path)
    key = CheckpointKey(3, 1)
    with source.hold():
        assert repository.held(key, now=1.0)
    assert not repository.held(key, now=1.0)
    repository.forget(key)
    with pytest.raises(NotFoundError, match="forgotten"), source.hold():
        pass


def test_identity_follows_what_is_stored(run):
    """The same checkpoint has the same identity, another one or another group's another."""
    path, _ = run
    assert open_source(path).identity == open_source(path, step=3).identity != open_source(path, step=2).identity
    assert open_source(path, group="model").identity != open_source(path, step=2, group="model").identity


def test_a_run_is_opened_without_torch(run):
    """The source of a run imports no torch: an export that is a link starts at once."""
    path, _ = run
    program = (
        f"import sys; from everystep.consolidate.source import open_source, check_cover; check_cover(open_source({path!r})); "
        "print('torch' in sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == "False"


# -- DCP -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "prefix"), [
    (lambda model, optim: {"model": model, "optim": optim, "step": 5}, "model."),
    (lambda model, optim: {"app": {"model": model, "optim": optim, "epoch": torch.tensor(3)}}, "app.model."),
    (lambda model, optim: {"state_dict": model, "optimizer_0": optim, "lr_scheduler": {"base": torch.ones(2)}}, "state_dict."),
    (lambda model, optim: {**model, "optimizer": optim, "train_state": {"step": torch.tensor(4)}}, ""),
    (lambda model, optim: dict(model), ""),
])  # fmt: skip
def test_dcp_under_the_names_of_the_module(tmp_path, state, prefix):
    """F24: whatever a module's state lies under, the module's own names come out; optimizers, schedulers, counters and plain values stay out."""
    model = net()
    optim = trained(model).state_dict()
    dcp.save(state(dict(model.state_dict()), optim), checkpoint_id=tmp_path / "step-12", no_dist=True)
    source = open_source(tmp_path / "step-12")
    assert (source.kind, source.key, source.step) == ("torchtitan", "step-12", 12)
    assert same(everything(source), dict(model.state_dict()))
    assert all(chunk.crc for tensor in source.tensors.values() for chunk in tensor.chunks)
    if prefix:
        assert open_source(tmp_path / "step-12", group=prefix.strip(".")).tensors.keys() == source.tensors.keys()


def test_dcp_names_that_only_look_like_a_prefix(tmp_path):
    """A module whose own names all begin with ``model.`` (a language model with tied embeddings) keeps them: the planner told the way."""
    state = {"model.embed.weight": torch.ones(2), "model.norm.weight": torch.zeros(3)}
    dcp.save(dict(state), checkpoint_id=tmp_path / "flat", no_dist=True)
    dcp.save({"model": dict(state)}, checkpoint_id=tmp_path / "nested", no_dist=True)
    assert set(open_source(tmp_path / "flat").tensors) == set(open_source(tmp_path / "nested").tensors) == set(state)


def test_dcp_without_the_ways_to_its_names(tmp_path):
    """Where no planner told the ways, one prefix that all of a model's names have is taken off, and wrappers' words."""
    names = {"app.model._orig_mod.a": torch.ones(2), "app.model.b.c": torch.zeros(3), "app.optim.state.a.exp_avg": torch.ones(2)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(names, checkpoint_id=tmp_path / "bare", planner=planner, no_dist=True)
    assert set(open_source(tmp_path / "bare").tensors) == {"a", "b.c"}
    assert set(open_source(tmp_path / "bare", group="app.model").tensors) == {"a", "b.c"}


def test_several_modules_in_dcp_want_a_group(tmp_path):
    """Two state dicts and none that is called a model: ConfigError lists both; a model beside an average is the model."""
    parts = {"weight": torch.ones(2, 2)}
    dcp.save({"actor": parts, "critic": parts, "actor_optim": {"exp_avg": torch.ones(1)}}, checkpoint_id=tmp_path / "two", no_dist=True)
    with pytest.raises(ConfigError, match="'actor', 'critic'"):
        open_source(tmp_path / "two")
    assert set(open_source(tmp_path / "two", group="critic").tensors) == {"weight"}
    with pytest.raises(ConfigError, match="no module 'judge'"):
        open_source(tmp_path / "two", group="judge")
    dcp.save({"model": {**parts, "bias": torch.ones(1)}, "ema": parts}, checkpoint_id=tmp_path / "ema", no_dist=True)
    assert set(open_source(tmp_path / "ema").tensors) == {"weight", "bias"}


def test_dcp_tensors_in_every_order_and_dtype(tmp_path):
    """F4, F22: transposed, expanded, cut out of larger ones, empty, 0-dim; integers and 8-bit floats: strides tell where their items are."""
    base = torch.arange(60.0).view(3, 4, 5)
    state = {
        "transposed": base.permute(2, 0, 1), "part": base[1:, 2:, 1:3], "rows": base[1:], "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "empty": torch.empty(0, 4), "scalar": torch.tensor(3.5), "big": torch.arange(40_000.0).view(200, 200).t(),
        **{f"dtype.{at}": torch.arange(6.0).view(2, 3).to(dtype) for at, dtype in enumerate(DTYPES.values())},
    }  # fmt: skip
    dcp.save({"model": state}, checkpoint_id=tmp_path / "odd", no_dist=True)
    source = open_source(tmp_path / "odd")
    assert same(everything(source), state)
    assert gathered(source, source.tensors["scalar"]).item() == 3.5
    assert source.tensors["scalar"].shape == ()
    assert source.tensors["big"].chunks[0].strides == (1, 200)
    assert source.tensors["big"].chunks[0].crc is None
    assert source.tensors["dtype.0"].chunks[0].strides is None


def test_a_dtype_that_no_file_can_hold_is_named(tmp_path):
    """F22: complex128 is refused by the tensor's name when it is wanted, and does not keep the others from being exported."""
    dcp.save({"model": {"fine": torch.ones(2), "wide": torch.ones(2, dtype=torch.complex128)}}, checkpoint_id=tmp_path / "c", no_dist=True)
    source = open_source(tmp_path / "c")
    check_cover(source, ["fine"])
    with pytest.raises(LayoutError, match="'wide' has dtype 'complex128'"):
        check_cover(source)


@pytest.fixture
def two_ranks(tmp_path):
    """A real checkpoint of two ranks that has both ranks' files."""
    return copied(FOREIGN / "accelerate/checkpoint-4/pytorch_model_fsdp_0", tmp_path / "step-4")


@pytest.mark.parametrize("lost", ["__0_0.distcp", "__1_0.distcp"])
def test_a_lost_file_of_dcp_is_named(two_ranks, lost):
    """F6: either of two files deleted: CorruptionError names it and the regions; never zeros, never a smaller tensor."""
    (two_ranks / lost).unlink()
    with pytest.raises(CorruptionError, match=rf"region \[.*\] of '.*weight' \('{lost}' is not there\)"):
        check_cover(open_source(two_ranks))


@pytest.mark.parametrize("lost", ["__0_0.distcp", "__1_0.distcp"])
def test_a_truncated_file_of_dcp_is_named(two_ranks, lost):
    """A file that ends too early is named with the byte it ends at."""
    os.truncate(two_ranks / lost, 9000)
    with pytest.raises(CorruptionError, match=rf"'{lost}' ends at byte 9,000"):
        check_cover(open_source(two_ranks))


def test_files_of_another_save_in_dcps_folder(two_ranks, tmp_path):
    """F6: shapes and dtypes that are not the metadata's, bytes that are no archive, and data that is newer than the metadata: all are told."""
    data = (two_ranks / "__1_0.distcp").read_bytes()
    set_times(two_ranks, __1_0=3600)
    with pytest.raises(CorruptionError, match=r"'__1_0.distcp' was written after '.metadata': it is of another save.*touch"):
        check_cover(open_source(two_ranks))
    set_times(two_ranks, metadata=60)
    check_cover(open_source(two_ranks))
    (two_ranks / "__1_0.distcp").write_bytes(data[64:] + data[:64])
    with pytest.raises(
        CorruptionError, match=r"region \[.*\] of '.*' in '.*__1_0.distcp' at byte .* is corrupt: it is no archive of torch.save"
    ):
        open_source(two_ranks)
    dcp.save({"model": {"a": torch.ones(3, dtype=torch.float32)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.save({"model": {"a": torch.ones(3, dtype=torch.int32)}}, checkpoint_id=tmp_path / "b", no_dist=True)
    shutil.copy(tmp_path / "b/__0_0.distcp", tmp_path / "a/__0_0.distcp")
    with pytest.raises(
        CorruptionError, match=r"holds torch.int32 \[3\] there, the metadata says torch.float32 \[3\]; they are of two saves"
    ):
        open_source(tmp_path / "a")


def test_a_chunk_that_the_metadata_says_nothing_of(two_ranks):
    """A place that is missing in the metadata is a region that no file holds."""
    reader = dcp.FileSystemReader(two_ranks)
    metadata = reader.read_metadata()
    gone = next(index for index in metadata.storage_data if index.fqn == "model.model.norm.weight")
    del metadata.storage_data[gone]
    writer = dcp.FileSystemWriter(two_ranks)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [[]])  # DCP's own way to write its metadata; it puts the results into storage_data
    (two_ranks / ".metadata").unlink(missing_ok=True)
    metadata.storage_data.pop(gone, None)
    (two_ranks / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptionError, match="no file holds it"):
        check_cover(open_source(two_ranks))


def test_compressed_archives_are_refused_by_name(tmp_path):
    """An archive that only torch can read is a LayoutError that names the tensor."""
    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    [info] = metadata.storage_data.values()
    packed = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "a/__0_0.distcp") as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    (tmp_path / "a/__0_0.distcp").write_bytes(packed.getvalue())
    info.offset, info.length = 0, len(packed.getvalue())
    (tmp_path / "a/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(LayoutError, match=r"of 'model\.a' .* is compressed"):
        open_source(tmp_path / "a")


def test_dcp_whose_save_was_not_finished(tmp_path):
    """Without its metadata a folder is not complete: told by find_checkpoints and by opening."""
    folder = copied(FOREIGN / "accelerate/checkpoint-4/pytorch_model_fsdp_0", tmp_path / "out/step-4")
    (folder / ".metadata").unlink()
    [found] = find_checkpoints(tmp_path / "out")
    assert (found.complete, found.kind, found.step) == (False, "torchtitan", 4)
    assert ".metadata" in found.why
    with pytest.raises(CorruptionError, match="was not finished"):
        open_source(folder)
    with pytest.raises(CorruptionError, match="not complete"):
        open_source(tmp_path / "out")


# -- safetensors ---------------------------------------------------------------------------------------------------------------


def parts_of(folder, tensors, ranks, *, world=None):
    """Parts as DCP's Hugging Face writer leaves them: each rank's rows of each tensor in its own file (of ``world`` only the first ``ranks``)."""
    folder.mkdir(parents=True, exist_ok=True)
    world = world or ranks
    for rank in range(ranks):
        entries, told = {}, {}
        for name, tensor in tensors.items():
            if not tensor.dim():
                if rank == 0:
                    entries[name], told[name] = tensor, {"saved_offsets": []}
                continue
            rows = -(-tensor.shape[0] // world)
            entries[name] = tensor[rank * rows : (rank + 1) * rows].clone()
            told[name] = {"saved_offsets": [min(rank * rows, tensor.shape[0]), *[0] * (tensor.dim() - 1)]}
        metadata = {"DCP_SHARDING_INFO": json.dumps(told), "DCP_VERSION": "1.0", "format": "pt"}
        safetensors.torch.save_file(entries, folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata=metadata)
    return folder


def weights():
    torch.manual_seed(2)
    return {
        "model.embed_tokens.weight": torch.randn(40, 4),
        "norm.weight": torch.randn(8),
        "few": torch.randn(2, 3),
        "scalar": torch.tensor(3.5),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("sub", ["", "sharded"])
def test_parts_of_any_number_of_ranks(tmp_path, ranks, sub):
    """F4: parts are put together, in the folder or in the ``sharded`` one that DCP makes beside its own consolidation."""
    parts_of(tmp_path / "out-9" / sub, weights(), ranks)
    source = open_source(tmp_path / "out-9")
    assert (source.kind, source.step, source.key) == ("safetensors", 9, "out-9")
    assert same(everything(source), weights())


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_lost_part_in_the_middle_is_named(tmp_path, lost):
    """F6: parts of four ranks, one of the first three deleted: the regions that it held are named."""
    folder = parts_of(tmp_path / "out", weights(), 4)
    (folder / f"shard-{lost:05d}-model-00001-of-00001.safetensors").unlink()
    begin = (lost - 1) * 10
    with pytest.raises(CorruptionError, match=rf"region \[{begin}:{begin + 10}, 0:4\] of 'model.embed_tokens.weight' \(no file holds it\)"):
        check_cover(open_source(folder))


def test_a_rank_that_is_missing_between_others_is_named(tmp_path):
    """F6: ranks 1, 3 and 4 of four wrote: the second's file is missed even where no tensor has a hole; every second rank is no gap."""
    tensors = {name: torch.randn(6, 2) for name in "abcd"}
    for rank, name in enumerate(tensors):
        file = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        told = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": [0, 0]}})}
        safetensors.torch.save_file({name: tensors[name]}, tmp_path / file, metadata=told)
    check_cover(open_source(tmp_path))
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptionError, match=r"'shard-00002-model-.*' is not there, by the numbers of the others"):
        check_cover(open_source(tmp_path))
    (tmp_path / "shard-00004-model-00001-of-00001.safetensors").unlink()
    check_cover(open_source(tmp_path))


def test_a_lost_last_part_is_told_by_what_else_is_known(tmp_path):
    """F6: the last of the parts deleted, where torch makes a smaller tensor: the vocabulary in config.json, or the random states, tell."""
    folder = parts_of(tmp_path / "vocab", weights(), 3, world=4)
    assert "few" in open_source(folder).tensors
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 40}}))
    with pytest.raises(CorruptionError, match=r"region \[30:40, 0:4\] of 'model.embed_tokens.weight' .*its shape is \[40, 4\]"):
        check_cover(open_source(folder))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 30}))
    check_cover(open_source(folder))
    for rank in range(4):
        (folder / f"random_states_{rank}.pkl").write_bytes(b"")
    with pytest.raises(CorruptionError, match=r"the end of 'model\.embed_tokens\.weight' .* no cut among 4 ranks"):
        check_cover(open_source(folder))


def test_parts_of_two_saves(tmp_path):
    """F6: parts of another world left in the folder, other dtypes, or parts that are much older: all are told, with both files."""
    folder = parts_of(tmp_path / "out", weights(), 4)
    parts_of(folder, weights(), 2)
    with pytest.raises(CorruptionError, match=r"overlap \('shard-0000\d.*' and 'shard-0000\d.*' are of two saves\)"):
        check_cover(open_source(folder))
    other = parts_of(tmp_path / "other", weights(), 2)
    shutil.copy(other / "shard-00001-model-00001-of-00001.safetensors", other / "shard-00003-model-00001-of-00001.safetensors")
    with pytest.raises(CorruptionError, match=r"'shard-00001.*' and 'shard-00003.*' both hold region .* they are of two saves"):
        check_cover(open_source(other))
    third = parts_of(tmp_path / "third", weights(), 2)
    old = third / "shard-00001-model-00001-of-00001.safetensors"
    os.utime(old, (1_000_000, 1_000_000))
    with pytest.raises(CorruptionError, match=r"'shard-00002.*' was written .* s after 'shard-00001.*': they are of two saves"):
        check_cover(open_source(third))
    parts_of(third, {**weights(), "norm.weight": torch.ones(8, dtype=torch.float16)}, 1)
    with pytest.raises(CorruptionError, match=r"contradicts the other files about 'norm\.weight'"):
        open_source(third)


def test_parts_that_are_cut_off(tmp_path):
    """A file that is shorter than its header says is named, and not complete."""
    folder = parts_of(tmp_path / "out/checkpoint-3", weights(), 2)
    os.truncate(folder / "shard-00002-model-00001-of-00001.safetensors", 300)
    with pytest.raises(CorruptionError, match="shard-00002"):
        open_source(folder)
    [found] = find_checkpoints(tmp_path / "out")
    assert not found.complete
    assert "shard-00002" in found.why
    assert found.step == 3


@pytest.mark.parametrize("index", [True, False])
def test_whole_tensors_in_numbered_files(tmp_path, index):
    """F6: files as transformers writes them, with and without an index; a missing one is named by its number."""
    tensors = weights()
    names = sorted(tensors)
    held = {f"model-{number:05d}-of-00003.safetensors": names[number - 1 :: 3] for number in (1, 2, 3)}
    for file, some in held.items():
        safetensors.torch.save_file({name: tensors[name] for name in some}, tmp_path / file)
    if index:
        told = {"metadata": {}, "weight_map": {name: file for file, some in held.items() for name in some}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(told))
    assert same(everything(open_source(tmp_path)), tensors)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptionError, match=r"'model-00002-of-00003.safetensors' is not there"):
        check_cover(open_source(tmp_path))
    assert find_checkpoints(tmp_path)[0].complete is not index


# -- what frameworks write -----------------------------------------------------------------------------------------------------


def expected(kind):
    return safetensors.torch.load_file(FOREIGN / kind / "expected.safetensors")


def test_transformers_distributed_checkpoint(tmp_path):
    """Real shards of two ranks: equal to torch's own gathering; the folder's config is the assets; tied weights lie there once."""
    source = open_source(copied(FOREIGN / "transformers/checkpoint", tmp_path / "c"))
    assert source.kind == "transformers"
    assert source.assets == str(tmp_path / "c")
    full = expected("transformers")
    found = everything(source)
    assert same(found, {name: full[name] for name in found})
    assert full.keys() - found.keys() <= {"lm_head.weight"}
    for file in source.files:
        lost = copied(FOREIGN / "transformers/checkpoint", tmp_path / f"without-{file.key[:11]}")
        (lost / file.key).unlink()
        with pytest.raises(CorruptionError, match="is not whole"):
            check_cover(open_source(lost))


def test_accelerate_under_the_trainer(tmp_path):
    """Real FSDP shards inside checkpoint-N: names of the model, step and metrics from the Trainer's state; no tensors of the optimizer."""
    root = tmp_path / "out"
    folder = copied(FOREIGN / "accelerate/checkpoint-4", root / "checkpoint-4")
    source = open_source(root)
    assert (source.kind, source.key, source.step) == ("transformers", "checkpoint-4", 4)
    assert dict(source.metrics) == {"loss": 4.25, "eval_loss": 4.0}
    assert same(everything(source), expected("accelerate"))
    (folder / "trainer_state.json").unlink()
    assert find_checkpoints(root)[0].complete
    assert open_source(folder).kind == "accelerate"
    (folder / "scheduler.pt").write_bytes(b"")
    [found] = find_checkpoints(root)
    assert not found.complete
    assert "trainer_state.json" in found.why


def test_a_model_beside_the_trainers_checkpoints_is_none(tmp_path):
    """What the Trainer saved at its end lies in the root of the checkpoints: these are found, not that."""
    for step in (2, 10):
        copied(FOREIGN / "accelerate/checkpoint-4/pytorch_model_fsdp_0", tmp_path / f"checkpoint-{step}/pytorch_model_fsdp_0")
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "training_args.bin").write_bytes(b"")
    assert [one.step for one in find_checkpoints(tmp_path)] == [2, 10]
    assert open_source(tmp_path).step == 10
    assert open_source(tmp_path, step=2).key == "checkpoint-2"
    with pytest.raises(NotFoundError, match="steps 2, 10"):
        open_source(tmp_path, step=3)
    with pytest.raises(ConfigError, match="no step"):
        open_source(tmp_path, step="checkpoint-3")


def test_lightning(tmp_path):
    """Real shards of ModelParallelStrategy: what the LightningModule trains, by its own names; step and metrics from the folder's name."""
    folder = copied(FOREIGN / "lightning/epoch=0-step=2.ckpt", tmp_path / "epoch=0-val_loss=0.25-step=2.ckpt")
    source = open_source(folder)
    assert (source.kind, source.step, dict(source.metrics)) == ("lightning", 2, {"val_loss": 0.25})
    assert same(everything(source), expected("lightning"))
    nameless = copied(folder, tmp_path / "last.ckpt")
    assert open_source(nameless).step == 2
    (nameless / "meta.pt").unlink()
    assert [(one.complete, one.kind) for one in find_checkpoints(nameless)] == [(False, "lightning")]


@pytest.fixture
def nemo(tmp_path):
    """A root of NeMo AutoModel's with three real checkpoints."""
    return copied(AUTOMODEL / "run", tmp_path / "run")


def test_automodel_roots(nemo):
    """Latest, best and steps of a root; metrics from losses.json; config files as assets; all steps are found, oldest first."""
    found = find_checkpoints(nemo)
    assert [(one.step, one.kind, one.complete) for one in found] == [(2, "automodel", True), (4, "automodel", True), (6, "automodel", True)]
    assert found[0].metrics == {"train_loss": 4.25, "val_loss": 3.5}
    assert found[0].key == "epoch_0_step_1"
    assert open_source(nemo).step == 6
    assert open_source(nemo, step="best").step == 4
    assert open_source(nemo, step=2).step == 2
    assert open_source(nemo, step="epoch_0_step_3").step == 4
    assert open_source(nemo / "epoch_0_step_1/model").key == "epoch_0_step_1"
    (nemo / "epoch_1_step_9.reserving-0a/model/.hf_metadata").mkdir(parents=True)
    assert len(find_checkpoints(nemo)) == 3
    source = open_source(nemo / "LATEST")
    assert source.key == "epoch_1_step_5"
    assert Path(source.assets, "config.json").is_file()
    (nemo / "LOWEST_VAL").unlink()
    assert open_source(nemo, step="best").step == 4
    (nemo / "LATEST").unlink()
    (nemo / "LATEST.txt").write_text("epoch_0_step_1\n")
    assert open_source(nemo).step == 2


@pytest.mark.parametrize(("scheduler", "step"), [(1, 1), (3, 1), ("two", 1), (None, 1), (b"", 1), (b"PK", 1)], ids=str)
def test_automodel_step_where_its_scheduler_does_not_say(nemo, scheduler, step):
    """The folder's number is the step unless step_scheduler.pt says one more: it is looked at, not unpickled, and may be absent or broken."""
    path = nemo / "epoch_0_step_1/step_scheduler.pt"
    path.unlink()
    if isinstance(scheduler, bytes):
        path.write_bytes(scheduler)
    elif scheduler is not None:
        torch.save({"step": scheduler, "epoch": 0}, path)
    assert open_source(nemo / "epoch_0_step_1").step == step


def test_automodel_checkpoints_that_are_being_written(nemo):
    """The links are moved before a checkpoint is complete: the newest complete one is the latest, the other one is told as incomplete."""
    (nemo / "epoch_1_step_5/.incomplete").write_bytes(b"")
    (nemo / "epoch_1_step_7").mkdir()
    (nemo / "epoch_1_step_7/.incomplete").write_bytes(b"")
    assert open_source(nemo).step == 4
    assert [(one.step, one.complete) for one in find_checkpoints(nemo)] == [(2, True), (4, True), (6, False), (7, False)]
    for step in (6, 7):
        with pytest.raises(CorruptionError, match="incomplete"):
            open_source(nemo, step=step)


@pytest.mark.parametrize("kind", ["every", "mapped"])
def test_automodel_shards_equal_its_own_consolidation(kind):
    """Real shards of NeMo AutoModel, put together, are what it consolidated itself (cast to the base model's dtype where it did so)."""
    folder = AUTOMODEL / kind / "epoch_0_step_1"
    theirs = {}
    for file in (folder / "model/consolidated").glob("*.safetensors"):
        theirs.update(safetensors.torch.load_file(file))
    ours = everything(open_source(folder))
    assert same({name: tensor.to(theirs[name].dtype) for name, tensor in ours.items()}, theirs)
    assert kind == "mapped" or same(ours, theirs)


def test_automodel_adapters():
    """An adapter's file is the source, its folder with adapter_config.json the assets."""
    source = open_source(AUTOMODEL / "peft")
    theirs = safetensors.torch.load_file(AUTOMODEL / "peft/epoch_0_step_1/model/adapter_model.safetensors")
    assert same(everything(source), theirs)
    assert Path(source.assets, "adapter_config.json").is_file()
    assert source.tensors.keys() == theirs.keys()


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("alone", [False, True])
def test_automodel_without_one_of_its_shards(nemo, lost, alone):
    """F6: the first or the last shard deleted; the checkpoint beside it or its own config and mapping tell what is lost, by name."""
    if alone:
        for other in ("epoch_0_step_1", "epoch_0_step_3"):
            shutil.rmtree(nemo / other)
    (nemo / f"epoch_1_step_5/model/shard-{lost:05d}-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptionError, match=r"of 'model.embed_tokens.weight' \(no file holds it") as caught:
        check_cover(open_source(nemo))
    assert ("epoch_0_step_3" in caught.value.message) is (lost == 2 and not alone)


def test_automodel_of_dcps_files(tmp_path):
    """Saved with torch_save, the model is plain DCP."""
    folder = tmp_path / "epoch_0_step_8"
    copied(FOREIGN / "accelerate/checkpoint-4/pytorch_model_fsdp_0", folder / "model")
    source = open_source(tmp_path)
    assert (source.kind, source.step) == ("automodel", 8)
    assert same(everything(source), expected("accelerate"))
    (folder / "model/.metadata").unlink()
    assert not find_checkpoints(tmp_path)[0].complete


def test_automodel_is_held_by_a_link(nemo):
    """While it is held, a link in the root leads to the checkpoint, which its pruning spares; afterwards the root is as before."""
    before = sorted(path.name for path in nemo.iterdir())
    with open_source(nemo / "LATEST").hold():
        links = [path for path in nemo.iterdir() if path.is_symlink() and path.name not in before]
        assert [os.path.basename(os.path.realpath(path)) for path in links] == ["epoch_1_step_5"]
    assert sorted(path.name for path in nemo.iterdir()) == before


def test_identity_of_a_folder_follows_its_files(nemo):
    """Equal for a copy with its times, another after a file was written again; what consolidation puts beside the shards changes nothing."""
    first = open_source(nemo, step=4)
    assert first.identity == open_source(nemo, step=4).identity
    (nemo / "epoch_0_step_3/model/consolidated").mkdir()
    (nemo / "epoch_0_step_3/model/consolidated/model.safetensors").write_bytes(b"")
    assert first.identity == open_source(nemo, step=4).identity
    os.utime(nemo / "epoch_0_step_3/model" / first.files[0].key, (1, 1))
    assert first.identity != open_source(nemo, step=4).identity


def test_what_is_no_checkpoint(tmp_path):
    """Nothing, an empty folder, an export of ours: NotFoundError says what was looked for, and nothing is found."""
    with pytest.raises(NotFoundError, match="there is no folder"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"run\.json"):
        open_source(tmp_path)
    assert find_checkpoints(tmp_path / "nowhere") == find_checkpoints(tmp_path) == []
    for folder in ("exports/model-1", "model-2", ".everystep-reading/x"):
        (tmp_path / folder).mkdir(parents=True)
        safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "everystep.json").write_text("{}")
    assert find_checkpoints(tmp_path) == []


@pytest.mark.parametrize(("name", "step"), [
    ("epoch=1-step=20.ckpt", 20), ("checkpoint-7", 7), ("step-3", 3), ("000400", 400), ("epoch_2_step_9", 9), ("llama3-8b", 0), ("last.ckpt", 0),
    ("epoch=3-val_loss=0.25-step=100.ckpt", 100), ("global_step120", 120),
])  # fmt: skip
def test_steps_in_names(name, step):
    """What of a folder's name is the step."""
    assert step_in(name) == step


def test_metrics_and_file_names_in_names():
    """Metrics that a name tells, and names made safe for files."""
    assert metrics_in("epoch=3-val_loss=0.25-step=100.ckpt") == {"val_loss": 0.25}
    assert safe("a b/c") == "a_b_c"
    assert safe("..") == "checkpoint"
    assert safe("epoch=1.ckpt") == "epoch=1.ckpt"


def test_the_check_says_what_is_wrong(tmp_path):
    """Regions out of the shape, sizes that do not fit, unknown names: told one by one, a long list cut short."""
    folder = parts_of(tmp_path / "out", weights(), 2)
    source = open_source(folder)
    assert isinstance(source, Opened)
    assert isinstance(find_checkpoints(folder)[0], Found)
    with pytest.raises(LayoutError, match="no tensor 'other'"):
        check_cover(source, ["other"])
    broken = {name: SourceTensor(name, "F64", tensor.shape, tensor.chunks) for name, tensor in source.tensors.items()}
    with pytest.raises(CorruptionError, match=r"are not its size.*and \d more"):
        check_cover(Opened(**{**vars(source), "tensors": broken}))
    small = {"few": SourceTensor("few", "F32", (1, 3), source.tensors["few"].chunks)}
    with pytest.raises(CorruptionError, match="is not within its shape"):
        check_cover(Opened(**{**vars(source), "tensors": small}))


def test_two_tensors_of_one_name_are_refused():
    """Names that fall together when the way to them is cut are an error that names both: none is left out in silence."""
    from everystep.consolidate.sources.modules import module_names

    paths = {"one": ("model", "a.b"), "other": ("model", "a", "b")}
    with pytest.raises(LayoutError, match="'one' and 'other'"):
        module_names(dict.fromkeys(paths, (2,)), paths, "model", where="there")
