"""Checkpoints that DCP wrote, restored into modules and optimizers; what is missing or broken in them."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from everystep.errors import CorruptionError, LayoutError, NotFoundError
from everystep.integrations.dcp import reading as reading_module
from everystep.integrations.dcp import restore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore:Detected an existing checkpoint:UserWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.b = nn.Linear(4, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


def trained(seed, *, steps=1, groups=True, optimizer=torch.optim.AdamW):
    """A net, an optimizer and a scheduler that have taken some steps."""
    torch.manual_seed(seed)
    net = Net()
    params = [
        {"params": list(net.a.parameters()), "lr": 0.1 * seed},
        {"params": [*net.norm.parameters(), *net.b.parameters()], "lr": 0.3 * seed},
    ]
    optim = optimizer(params if groups else net.parameters(), lr=0.01 * seed)
    sched = torch.optim.lr_scheduler.StepLR(optim, 2)
    for _ in range(steps):
        net(torch.randn(5, 3)).sum().backward()
        optim.step()
        sched.step()
        optim.zero_grad()
    return net, optim, sched


def assert_same(a, b):
    """Two nested states are equal, tensors bit by bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert a == b


def states(*objects):
    return copy.deepcopy([one.state_dict() for one in objects])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("top", [True, False])
def test_get_state_dict_is_restored(tmp_path, flat, top):
    """Model, AdamW with two groups and scheduler by DCP's names, flattened or not, with and without the top-level key: as they were."""
    net, optim, sched = trained(1, steps=3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optim_state = get_state_dict(net, optim, options=options)
    dcp.save(
        {"model": model_state, "optim": optim_state, "sched": sched.state_dict()} if top else {**model_state, **optim_state},
        checkpoint_id=tmp_path / "c",
    )
    other_net, other_optim, other_sched = trained(2)
    state = {"model": other_net, "optim": other_optim, **({"sched": other_sched} if top else {})}
    report = restore(state, tmp_path / "c")
    assert_same(states(net, optim), states(other_net, other_optim))
    assert "optim.state.model.a.weight.exp_avg" in report.restored
    assert not report.missing
    assert not report.unexpected
    if top:
        assert_same(sched.state_dict(), other_sched.state_dict())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_numbered_optimizer_state_is_restored(tmp_path, optimizer):
    """A plain optimizer.state_dict(), whose parameters are numbers: into an optimizer that has taken no step yet too."""
    net, optim, _ = trained(1, steps=2, optimizer=optimizer)
    dcp.save({"model": net.state_dict(), "optim": optim.state_dict()}, checkpoint_id=tmp_path / "c")
    for steps in (0, 2):
        other_net, other_optim, _ = trained(2, steps=steps, optimizer=optimizer)
        restore({"model": other_net, "optim": other_optim}, tmp_path / "c")
        ours, theirs = states(optim, other_optim)
        assert_same(ours["param_groups"], theirs["param_groups"])
        assert_same(
            {key: dict(value) for key, value in ours["state"].items()}, {key: dict(value) for key, value in theirs["state"].items()}
        )


def test_tensor_learning_rates(tmp_path):
    """A learning rate that is a tensor is one in the checkpoint too, once for each parameter when flattened."""
    for flat in (False, True):
        net, other = Net(), Net()
        optim = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.25), foreach=False)
        net(torch.randn(4, 3)).sum().backward()
        optim.step()
        model_state, optim_state = get_state_dict(net, optim, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path / str(flat))
        other_optim = torch.optim.AdamW(other.parameters(), lr=torch.tensor(0.5), foreach=False)
        restore({"model": other, "optim": other_optim}, tmp_path / str(flat), strict=not flat)
        assert other_optim.param_groups[0]["lr"].item() == 0.25
        assert_same(states(net), states(other))


def test_wrappers_on_either_side(tmp_path):
    """A name that torch.compile or DDP put a prefix into is the same parameter."""
    net, other = Net(), Net()
    dcp.save({"model": {f"_orig_mod.module.{name}": value for name, value in net.state_dict().items()}}, checkpoint_id=tmp_path / "c")
    restore({"model": other}, tmp_path / "c")
    assert_same(states(net), states(other))


def test_plain_values(tmp_path):
    """Numbers, text, lists, tuples with tensors in them and integer keys come back as they were."""
    saved = {
        "epoch": 3,
        "name": "x",
        "shape": (1, 2),
        "list": [1, [2, 3]],
        "mixed": (torch.arange(3), 4),
        "deep": {"t": torch.ones(2), "l": [torch.zeros(1), {"k": None}]},
        5: "five",
    }
    dcp.save({"note": saved, "step": 7}, checkpoint_id=tmp_path / "c")
    note = {
        "epoch": 0,
        "name": "",
        "shape": (),
        "list": [],
        "mixed": (torch.zeros(3, dtype=torch.int64), 0),
        "deep": {"t": torch.zeros(2), "l": [torch.ones(1), {"k": 1}]},
        5: "",
    }
    state = {"note": note, "step": 0}
    restore(state, tmp_path / "c")
    assert_same(state["note"], saved)
    assert state["step"] == 7


class Odd:
    """A value that only unpickling brings back."""


def test_pickled_objects_are_refused_by_name(tmp_path):
    """An object of a class of one's own is refused under strict, with its class; without strict all the rest is restored."""
    net, other = Net(), Net()
    dcp.save({"model": net.state_dict(), "odd": {"thing": Odd(), "n": 1}}, checkpoint_id=tmp_path / "c")
    state = {"model": other, "odd": {"thing": None, "n": 0}}
    with pytest.raises(LayoutError, match=r"odd\.thing.*Odd") as caught:
        restore(state, tmp_path / "c")
    assert caught.value.kind == "pickle"
    restore(state, tmp_path / "c", strict=False)
    assert_same(states(net), states(other))
    assert state["odd"]["n"] == 1
    restore({"model": Net()}, tmp_path / "c", include=["model.*"])  # nobody wants it: it is not even looked at


def test_names_and_shapes_are_checked(tmp_path):
    """Names that one side lacks, other shapes and dtypes are errors before anything is changed."""
    net = Net()
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "c")
    wide = Net()
    wide.b = nn.Linear(4, 5)
    before = states(wide)
    with pytest.raises(LayoutError, match="shape"):
        restore({"model": wide}, tmp_path / "c")
    wide.more = nn.Linear(1, 1)
    with pytest.raises(LayoutError, match=r"model\.more\.weight"):
        restore({"model": wide}, tmp_path / "c")
    assert_same(states(wide)[0]["a.weight"], before[0]["a.weight"])
    with pytest.raises(LayoutError, match=r"model\.norm\.weight"):
        restore({"model": nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)})}, tmp_path / "c")
    half = Net().bfloat16()
    with pytest.raises(LayoutError, match="BF16"):
        restore({"model": half}, tmp_path / "c")
    restore({"model": half}, tmp_path / "c", cast=True)
    assert torch.equal(half.a.weight, net.a.weight.bfloat16())


def test_tied_weights(tmp_path):
    """DCP writes a tied tensor once for each of its names: it goes into the one tensor that the state has."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    net, other = Tied(), Tied()
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "c")
    restore({"model": other}, tmp_path / "c")
    assert torch.equal(other.head.weight, net.embed.weight)
    assert other.head.weight is other.embed.weight


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.uint16,
    ],
)
def test_dtypes(tmp_path, dtype):
    """Every dtype that everystep stores is read from an archive of torch.save."""
    value = torch.arange(6).view(2, 3).to(dtype)
    dcp.save({"t": {"x": value}}, checkpoint_id=tmp_path / "c")
    target = torch.zeros(2, 3).to(dtype)
    restore({"t": {"x": target}}, tmp_path / "c")
    assert torch.equal(target.view(torch.uint8), value.view(torch.uint8))


def test_other_layouts_in_the_archive(tmp_path):
    """Transposed tensors, channels last, views and scalars, empty tensors: their order in the archive is not that of the rows."""
    saved = {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "channels": torch.arange(48.0).view(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "view": torch.arange(40.0)[4:16].view(3, 4),
        "stepped": torch.arange(40.0)[::4],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
    }
    dcp.save({"t": saved}, checkpoint_id=tmp_path / "c")
    target = {name: torch.full_like(value, -1.0) for name, value in saved.items()}
    restore({"t": target}, tmp_path / "c")
    for name, value in saved.items():
        assert torch.equal(target[name], value), name


def test_threads_and_files(tmp_path):
    """DCP's writer with several threads and with one file for each item."""
    for options in ({"thread_count": 3}, {"single_file_per_rank": False}):
        net, other = Net(), Net()
        folder = tmp_path / next(iter(options))
        dcp.save({"model": net.state_dict(), "n": 1}, storage_writer=dcp.FileSystemWriter(folder, **options))
        restore({"model": other, "n": 0}, folder)
        assert_same(states(net), states(other))


def shards_of(folder, tensor, cuts):
    """A checkpoint of tensor ``m.w`` in several chunks, each in a file of its own, as several ranks would have written it."""
    dcp.save({"m": {"w": torch.zeros(1)}}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    entry = metadata.state_dict_metadata["m.w"]
    entry.size, entry.chunks, metadata.storage_data = tensor.size(), [], {}
    entry.properties.dtype = tensor.dtype
    for number, (offsets, sizes) in enumerate(cuts):
        part = tensor[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].clone()
        file = folder / f"__{number}_0.distcp"
        torch.save(part, file)
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        metadata.storage_data[dcp.metadata.MetadataIndex("m.w", offsets)] = dcp.filesystem._StorageInfo(file.name, 0, file.stat().st_size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


CUTS = {
    "rows": [((0, 0), (2, 6)), ((2, 0), (2, 6)), ((4, 0), (1, 6))],
    "columns": [((0, 0), (5, 2)), ((0, 2), (5, 3)), ((0, 5), (5, 1))],
    "blocks": [(((r, c)), (n, m)) for (r, n), (c, m) in itertools.product([(0, 3), (3, 2)], [(0, 4), (4, 2)])],
}


@pytest.mark.parametrize("cut", CUTS)
def test_chunks_are_put_together(tmp_path, cut):
    """Rows, columns and blocks of several ranks fill one tensor, whatever its strides."""
    tensor = torch.arange(30.0).view(5, 6)
    shards_of(tmp_path / "c", tensor, CUTS[cut])
    for target in (torch.zeros(5, 6), torch.zeros(6, 5).t(), torch.zeros(10, 6)[::2]):
        restore({"m": {"w": target}}, tmp_path / "c")
        assert torch.equal(target, tensor)


def test_large_chunks_in_pieces(tmp_path, monkeypatch):
    """Chunks larger than a piece, gaps larger than what is read over: the same values."""
    monkeypatch.setattr(reading_module, "_PIECE_NBYTES", 64)
    monkeypatch.setattr(reading_module, "_GAP_NBYTES", 8)
    tensor = torch.arange(900.0).view(9, 10, 10)
    shards_of(tmp_path / "c", tensor, [((0, 0, 0), (9, 10, 7)), ((0, 0, 7), (9, 10, 3))])
    target = torch.zeros(9, 10, 10)
    restore({"m": {"w": target}}, tmp_path / "c")
    assert torch.equal(target, tensor)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_shard_file_is_named(tmp_path, lost):
    """F6: one of three shard files is gone, then the last one: CorruptionError names the region and the file; nothing was changed."""
    tensor = torch.arange(30.0).view(5, 6) + 1
    shards_of(tmp_path / "c", tensor, CUTS["rows"])
    (tmp_path / "c" / f"__{lost}_0.distcp").unlink()
    target = torch.full((5, 6), -1.0)
    with pytest.raises(CorruptionError) as caught:
        restore({"m": {"w": target}}, tmp_path / "c")
    first, count = ((0, 2), (2, 2), (4, 1))[lost]
    assert f"[{first}:{first + count}, 0:6] of 'm.w'" in caught.value.message
    assert f"__{lost}_0.distcp" in caught.value.message
    assert torch.equal(target, torch.full((5, 6), -1.0))


def test_a_chunk_that_nobody_wrote_is_named(tmp_path):
    """Chunks that do not cover the tensor, and chunks that overlap: CorruptionError with the region."""
    tensor = torch.arange(30.0).view(5, 6)
    shards_of(tmp_path / "gap", tensor, CUTS["rows"][:2])
    with pytest.raises(CorruptionError, match=r"\[4:5, 0:6\]"):
        restore({"m": {"w": torch.zeros(5, 6)}}, tmp_path / "gap")
    shards_of(tmp_path / "twice", tensor, [*CUTS["rows"], ((1, 0), (2, 6))])
    with pytest.raises(CorruptionError, match="more than once"):
        restore({"m": {"w": torch.zeros(5, 6)}}, tmp_path / "twice")


def test_a_truncated_file(tmp_path):
    """A .distcp cut anywhere: CorruptionError, never zeros."""
    net = Net()
    dcp.save({"model": net.state_dict(), "n": 1}, checkpoint_id=tmp_path / "c")
    file = tmp_path / "c" / "__0_0.distcp"
    data = file.read_bytes()
    for end in (0, 1, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:end])
        with pytest.raises(CorruptionError):
            restore({"model": Net(), "n": 0}, tmp_path / "c")


def test_changed_bytes(tmp_path):
    """A flipped bit in a tensor's bytes does not pass: the archive's own sum is compared where all of a chunk is read."""
    tensor = torch.arange(30.0).view(5, 6)
    shards_of(tmp_path / "c", tensor, [((0, 0), (5, 6))])
    file = tmp_path / "c" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.find(tensor.numpy().tobytes())
    data[at + 17] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="sum"):
        restore({"m": {"w": torch.zeros(5, 6)}}, tmp_path / "c")


def test_swapped_archives(tmp_path):
    """Metadata that points at another tensor's archive, at the middle of one, or at none: CorruptionError."""
    tensor = torch.arange(30.0).view(5, 6)
    for change in ("other", "middle", "garbage", "beyond"):
        folder = tmp_path / change
        shards_of(folder, tensor, [((0, 0), (5, 6))])
        file = folder / "__0_0.distcp"
        if change == "other":
            torch.save(torch.zeros(6, 5), file)
        elif change == "middle":
            file.write_bytes(file.read_bytes()[40:] + bytes(40))
        elif change == "garbage":
            file.write_bytes(bytes(range(256)) * 20)
        metadata = dcp.FileSystemReader(folder).read_metadata()
        [info] = metadata.storage_data.values()
        info.length = 1 << 40 if change == "beyond" else file.stat().st_size
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptionError):
            restore({"m": {"w": torch.zeros(5, 6)}}, folder)


def test_without_checksums(tmp_path):
    """Archives that torch wrote without sums are read all the same."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"t": {"x": torch.arange(5.0)}}, checkpoint_id=tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(before)
    target = torch.zeros(5)
    restore({"t": {"x": target}}, tmp_path / "c")
    assert torch.equal(target, torch.arange(5.0))


def test_several_folders(tmp_path):
    """Model and optimizer in folders of their own are one checkpoint; the folder around them says what to pass."""
    net, optim, _ = trained(1)
    model_state, optim_state = get_state_dict(net, optim)
    dcp.save(model_state, checkpoint_id=tmp_path / "step_7" / "model")
    dcp.save({"optim": optim_state}, checkpoint_id=tmp_path / "step_7" / "optim")
    other_net, other_optim, _ = trained(2)
    restore({"model": other_net, "optim": other_optim}, [tmp_path / "step_7" / "model", tmp_path / "step_7" / "optim"])
    assert_same(states(net, optim), states(other_net, other_optim))
    with pytest.raises(NotFoundError, match=r"pass what is in it.*model.*optim"):
        restore({"model": other_net}, tmp_path / "step_7")
    with pytest.raises(NotFoundError):
        restore({"model": other_net}, tmp_path / "nowhere")
    with pytest.raises(LayoutError, match="more than one"):
        restore({"model": other_net}, [tmp_path / "step_7" / "model"] * 2)


def test_metadata_by_rank(tmp_path):
    """A save without collectives leaves a metadata file for each rank: together they are the checkpoint."""
    net, other = Net(), Net()
    dcp.save({"model": net.state_dict(), "n": 4}, checkpoint_id=tmp_path / "c")
    (tmp_path / "c" / ".metadata").rename(tmp_path / "c" / "__0.metadata")
    state = {"model": other, "n": 0}
    restore(state, tmp_path / "c")
    assert_same(states(net), states(other))
    assert state["n"] == 4


def test_hostile_metadata_is_refused(tmp_path):
    """A folder whose metadata would run a command when unpickled: CorruptionError, and it did not run."""

    class Evil:
        def __reduce__(self):
            import os

            return os.system, (f"touch {tmp_path / 'mark'}",)

    dcp.save({"m": {"w": torch.zeros(1)}}, checkpoint_id=tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CorruptionError, match="system"):
        restore({"m": {"w": torch.zeros(1)}}, tmp_path / "c")
    assert not (tmp_path / "mark").exists()


def test_hostile_values_are_refused(tmp_path):
    """A plain value whose pickle would run a command: refused, and it did not run."""

    class Evil:
        def __reduce__(self):
            import os

            return os.system, (f"touch {tmp_path / 'mark'}",)

    dcp.save({"m": {"w": torch.zeros(1), "n": 1}}, checkpoint_id=tmp_path / "c")
    file = tmp_path / "c" / "evil.distcp"
    torch.save(Evil(), file)
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    for index, info in metadata.storage_data.items():
        if index.fqn == "m.n":
            info.relative_path, info.offset, info.length = file.name, 0, file.stat().st_size
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(LayoutError, match="plain data"):
        restore({"m": {"w": torch.zeros(1), "n": 0}}, tmp_path / "c")
    assert not (tmp_path / "mark").exists()


def test_extra_state(tmp_path):
    """What get_extra_state gives, a tensor or plain data, comes back through set_extra_state."""

    class Extra(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.value = value

        def get_extra_state(self):
            return self.value

        def set_extra_state(self, value):
            self.value = value

    for value in ({"a": 1, "b": [2]}, torch.arange(3)):
        net, other = Extra(value), Extra(type(value)() if isinstance(value, dict) else torch.zeros(3, dtype=torch.int64))
        folder = tmp_path / type(value).__name__
        dcp.save({"model": net.state_dict()}, checkpoint_id=folder)
        restore({"model": other}, folder)
        assert_same(other.value, value)
