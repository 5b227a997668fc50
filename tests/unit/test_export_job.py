"""One consolidation from beginning to end: real runs of the trainer, loaded by transformers; small foreign folders for the rest."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import everystep
from everystep.consolidate import job
from everystep.consolidate.exports import LATEST, Exports
from everystep.consolidate.source import open_source
from everystep.errors import CapacityError, ConfigError, ConflictError, CorruptionError, NotFoundError
from everystep.repository import CheckpointKey, Repository
from everystep.schedule import Consolidate, Seen, decide

with contextlib.suppress(ImportError):
    import transformers

needs_transformers = pytest.mark.skipif("transformers" not in globals(), reason="transformers is not installed")


def tiny_model(*, tied=True, dtype=torch.float32):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def train(model, run, steps=2, metrics=None, first=1, **options):
    """A few real steps, each saved to disk."""
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    with everystep.Checkpointer(run, agent=False, keep=everystep.Keep(last=None), **options) as ckpt:
        for step in range(first, first + steps):
            loss = model(input_ids=torch.randint(0, 64, (2, 8))).logits.float().pow(2).mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            ckpt.save(
                step, {"model": model, "optim": optim, "count": step}, metrics={"loss": 1.0 / step} if metrics is None else metrics
            ).wait("disk")


def assets_of(model, folder):
    """What a base model's folder has beside its weights."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def export(run, *, step="latest", reason="every", force=False, workers=1, root=None, **settings):
    return job.run(
        open_source(str(run), step=step, group=settings.get("group")),
        Consolidate(**settings),
        reason=reason,
        force=force,
        workers=workers,
        root=root,
    )


def bits(tensor):
    return (
        tensor.detach().contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype).numpy().tobytes()
        if tensor.dim()
        else tensor.detach().float().numpy().tobytes()
    )


def equal(model, wanted):
    left, right = model.state_dict(), wanted.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype, name
        assert bits(left[name]) == bits(tensor), name


def weights(folder):
    """All tensors of an export by its index, read by the safetensors package."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


# -- what from_pretrained loads ---------------------------------------------------------------------------------------------


@needs_transformers
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("settings", [{}, {"max_shard_size": 5000}], ids=["linked", "split"])
def test_loads_bit_equal(tmp_path, tied, settings):
    """F25: from_pretrained(LATEST) gives the trained model bit by bit, tied embeddings stored once and tied again."""
    model = tiny_model(tied=tied)
    assets = assets_of(model, tmp_path / "base")
    train(model, tmp_path / "run")
    done = export(tmp_path / "run", assets=str(assets), **settings)
    latest = tmp_path / "run" / "exports" / LATEST
    assert os.path.realpath(latest) == done.path == str(tmp_path / "run" / "exports" / "model-000000000002-0001")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(latest)
    equal(loaded, model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    stored = weights(latest)
    assert ("lm_head.weight" in stored) != tied
    files = sorted(name for name in os.listdir(latest) if name.endswith(".safetensors"))
    assert len(files) == 1 if not settings else len(files) > 2
    assert all("-of-" in name and "-2-" in name for name in files)
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "README.md",
        "everystep.json",
        "model.safetensors.index.json",
    } <= set(os.listdir(latest))
    card = (latest / "README.md").read_text()
    assert "| step | 2 |" in card
    assert "| loss | 0.5 |" in card
    record = json.loads((latest / "everystep.json").read_text())
    assert record["metrics"] == {"loss": 0.5}
    assert {file["name"] for file in record["files"]} == set(os.listdir(latest)) - {"everystep.json"}


@needs_transformers
@pytest.mark.parametrize(
    ("trained", "dtype", "wanted"), [("float32", "bf16", "bfloat16"), ("bfloat16", "keep", "bfloat16"), ("bfloat16", "fp32", "float32")]
)
def test_dtypes(tmp_path, trained, dtype, wanted):
    """A cast export, or one of a model trained in another dtype than its base, loads in the dtype that it has, equal to torch's own cast."""
    model = tiny_model(dtype=getattr(torch, trained))
    other = tiny_model(dtype=torch.float16)
    other.config.dtype = torch.float16
    assets = assets_of(other, tmp_path / "base")
    train(model, tmp_path / "run", steps=1)
    export(tmp_path / "run", assets=str(assets), dtype=dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "exports" / LATEST)
    equal(loaded, model.to(getattr(torch, wanted)))


@needs_transformers
def test_what_the_trainer_left(tmp_path):
    """Without assets those that the trainer left in the run are used: the newest."""
    model = tiny_model()
    train(model, tmp_path / "run", steps=1)
    (tmp_path / "run" / "exports").mkdir(exist_ok=True)
    assets_of(model, tmp_path / "run" / "exports" / ".assets-1234")
    export(tmp_path / "run")
    equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "exports" / LATEST), model)


# -- own runs ----------------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def run(tmp_path):
    """Three steps of a tiny model with an optimizer; the run's folder and the models' states by step."""
    torch.manual_seed(1)
    model = Net()
    optim = torch.optim.AdamW(model.parameters())
    states = {}
    with everystep.Checkpointer(tmp_path / "run", agent=False, keep=everystep.Keep(last=None)) as ckpt:
        for step in (1, 2, 3):
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optim.step()
            states[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            ckpt.save(step, {"model": model, "optim": optim}, metrics={"loss": [0, 3.0, 1.0, 2.0][step]}).wait("disk")
    return tmp_path / "run", states


def check(folder, state):
    stored = weights(folder)
    assert set(stored) == set(state) - {"head.weight"}
    for name, tensor in stored.items():
        assert bits(tensor) == bits(state[name])


def test_born_consolidated(run):
    """An export of an own checkpoint is its own file by a second name: no byte is written, and it outlives the checkpoint."""
    path, states = run
    done = export(path)
    assert done.linked == done.nbytes
    assert done.latest
    (file,) = (name for name in os.listdir(done.path) if name.endswith(".safetensors"))
    original = path / "data" / "000000000003-0001" / "model-00001-of-00001.safetensors"
    assert os.path.samefile(original, f"{done.path}/{file}")
    Repository.open(str(path)).forget(CheckpointKey(3, 1))
    check(path / "exports" / LATEST, states[3])


def test_idempotent(run):
    """F57: done once; again it is found, however often and whatever happened to LATEST and history in between; force writes it anew."""
    path, states = run
    first = export(path, reason="final")
    before = sorted(os.listdir(path / "exports"))
    again = export(path, reason="final")
    assert again.already
    assert again.path == first.path
    assert sorted(os.listdir(path / "exports")) == before
    os.unlink(path / "exports" / LATEST)
    os.unlink(path / "exports" / "history.json")
    third = export(path, reason="final")
    assert third.already
    assert third.latest
    assert sorted(os.listdir(path / "exports")) == before
    inode = os.stat(first.path).st_ino
    forced = export(path, reason="final", force=True)
    assert not forced.already
    assert forced.path == first.path
    assert os.stat(first.path).st_ino != inode
    check(path / "exports" / LATEST, states[3])
    assert [past.step for past in Exports(path / "exports", "model").history()] == [3]


def test_final_is_done_once(run):
    """F57: the schedule knows from the history that final is done, in another process, after the export was pruned too."""
    path, _ = run
    keys = Repository.open(str(path)).keys()
    seen = [Seen(str(key), key.step, 1000.0 + key.step) for key in keys]

    def due():
        history = Exports(job.export_root(str(path), Consolidate()), "model").history()
        return [one.step for one in decide("final", seen, history, ended=True) if one.due]

    assert due() == [3]
    export(path, reason="final")
    assert due() == []


def test_old_step_on_demand(run):
    """An older step exported later does not take LATEST; both stay."""
    path, states = run
    export(path)
    done = export(path, step=1)
    assert not done.latest
    check(path / "exports" / LATEST, states[3])
    check(path / "exports" / "model-000000000001-0001", states[1])


def test_best(run):
    """With a schedule that improves there is BEST, which leads to the best that is there."""
    path, states = run
    for step in (1, 2, 3):
        export(path, step=step, when={"improves": "loss", "mode": "min"})
    check(path / "exports" / "BEST", states[2])
    check(path / "exports" / LATEST, states[3])


def test_names_and_patterns(run):
    """With include and rename the index has the new names, and another selection is another export of the same step."""
    path, states = run
    export(path)
    export(path, include=["layer.*"], rename={"^layer": "dense"})
    stored = weights(path / "exports" / LATEST)
    assert set(stored) == {"dense.weight", "dense.bias"}
    assert bits(stored["dense.weight"]) == bits(states[3]["layer.weight"])
    assert len([name for name in os.listdir(path / "exports") if name.startswith("model-")]) == 2


def test_into_the_checkpoint(run):
    """Into a checkpoint: inside the step, one export, gone with the step; another setting replaces it; verify and history do not mind."""
    path, states = run
    done = export(path, into="checkpoint")
    assert done.path == str(path / "data" / "000000000003-0001" / "consolidated")
    check(path / "data" / "000000000003-0001" / "consolidated", states[3])
    assert export(path, into="checkpoint").already
    assert not export(path, into="checkpoint", include=["layer.*"]).already
    assert set(weights(path / "data" / "000000000003-0001" / "consolidated")) == {"layer.weight", "layer.bias"}
    repository = Repository.open(str(path))
    assert [why for _, _, why in repository.verify(CheckpointKey(3, 1)) if why] == []
    options = Consolidate(into="checkpoint")
    assert {past.step for past in Exports(job.export_root(str(path), options), "model").history(into="checkpoint")} == {3}
    repository.forget(CheckpointKey(3, 1))
    assert not (path / "data" / "000000000003-0001").exists()


def test_into_a_path(run, tmp_path):
    """Into a path: LATEST and history are there, and nothing in the run."""
    path, states = run
    done = export(path, into=str(tmp_path / "models"), name="net")
    assert done.path == str(tmp_path / "models" / "net-000000000003-0001")
    check(tmp_path / "models" / LATEST, states[3])
    assert not (path / "exports").exists()


def test_two_runs_into_one_path(run, tmp_path):
    """A new run that exports into the same folder takes LATEST although its steps begin anew, and replaces nothing."""
    path, states = run
    export(path, into=str(tmp_path / "models"))
    torch.manual_seed(2)
    other = Net()
    with everystep.Checkpointer(tmp_path / "second", agent=False) as ckpt:
        ckpt.save(3, {"model": other}).wait("disk")
    done = export(tmp_path / "second", into=str(tmp_path / "models"))
    assert done.latest
    check(tmp_path / "models" / LATEST, other.state_dict())
    check(tmp_path / "models" / "model-000000000003-0001", states[3])


@pytest.mark.parametrize("settings", [{}, {"max_shard_size": 60}])
def test_several_processes(run, settings):
    """Several worker processes make the same files as one."""
    path, states = run
    one = export(path, into=str(path / "one"), **settings)
    many = export(path, into=str(path / "many"), workers=2, **settings)
    assert sorted(os.listdir(one.path)) == sorted(os.listdir(many.path))
    for name in os.listdir(one.path):
        if name.endswith((".safetensors", "index.json")):
            assert Path(one.path, name).read_bytes() == Path(many.path, name).read_bytes()
    check(path / "many" / LATEST, states[3])


def test_worker_that_fails(run):
    """An error of a worker process is the caller's, and nothing is published."""
    path, _ = run
    source = open_source(str(path))
    with open(path / source.files[0].key, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptionError):
        job.run(source, Consolidate(max_shard_size=60), reason="every", workers=2)
    assert [name for name in os.listdir(path / "exports") if not name.startswith(".")] == []


# -- shards that go -----------------------------------------------------------------------------------------------------------


def test_drop_optimizer(run):
    """With drop_shards=optimizer older checkpoints lose their optimizer once exported, the newest stays whole, and done stays done."""
    path, states = run
    repository = Repository.open(str(path))
    first = export(path, step=1, drop_shards="optimizer")
    assert "000000000001-0001-r1" in first.dropped
    assert [str(key) for key in repository.keys()] == ["000000000001-0001-r1", "000000000002-0001", "000000000003-0001"]
    newest = export(path, drop_shards="optimizer")
    assert "000000000003-0001 stays" in newest.dropped
    assert {tensor.group for tensor in repository.manifest(CheckpointKey(3, 1)).tensors} == {"model", "optim"}
    check(path / "exports" / "model-000000000001-0001", states[1])
    again = export(path, step="000000000001-0001-r1", drop_shards="optimizer")
    assert again.already
    assert again.path == first.path
    torch.manual_seed(9)
    model = Net()
    with everystep.Checkpointer(path, agent=False, keep=everystep.Keep(last=None)) as ckpt:
        ckpt.restore({"model": model, "optim": torch.optim.AdamW(model.parameters())})
        ckpt.save(4, {"model": model}).wait("disk")
    fourth = export(path, drop_shards="optimizer")
    assert "000000000003-0001: optim dropped" in fourth.dropped
    check(path / "exports" / "model-000000000003-0001", states[3])


def test_drop_all(run):
    """With drop_shards=all an older checkpoint is forgotten once it is exported; the export stays and loads."""
    path, states = run
    done = export(path, step=2, drop_shards=True)
    assert "bytes freed" in done.dropped
    assert [key.step for key in Repository.open(str(path)).keys()] == [1, 3]
    check(path / "exports" / "model-000000000002-0001", states[2])


def test_drop_what_cannot_be_dropped(run, tmp_path):
    """Dropping the shards that the export lies in, or another's checkpoints, is refused before anything is written."""
    path, _ = run
    with pytest.raises(ConfigError, match="delete the export"):
        export(path, into="checkpoint", drop_shards="all")
    folder = foreign(tmp_path)
    with pytest.raises(ConfigError, match="not ours"):
        export(folder, drop_shards="all")
    assert not (path / "exports").exists()


# -- others' checkpoints --------------------------------------------------------------------------------------------------------


def foreign(tmp_path, step=7, name="checkpoint-7"):
    """A folder of sharded Hugging Face safetensors, as save_pretrained writes them."""
    folder = tmp_path / "out" / name
    folder.mkdir(parents=True)
    rng = np.random.default_rng(step)
    one, two = ({name: torch.from_numpy(rng.standard_normal((6, 4), dtype=np.float32)) for name in names} for names in (("a", "b"), ("c",)))
    safetensors.torch.save_file(one, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    safetensors.torch.save_file(two, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    weight_map = {**dict.fromkeys(one, "model-00001-of-00002.safetensors"), **dict.fromkeys(two, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "x", "torch_dtype": "float32"}')
    return folder


def test_foreign_latest(tmp_path):
    """Another's checkpoint goes into exports beside it, with its own small files; the second time it is found."""
    folder = foreign(tmp_path)
    done = export(folder)
    assert done.path == str(tmp_path / "out" / "exports" / "model-checkpoint-7")
    assert set(weights(tmp_path / "out" / "exports" / LATEST)) == {"a", "b", "c"}
    assert json.loads((tmp_path / "out" / "exports" / LATEST / "config.json").read_text())["model_type"] == "x"
    assert export(folder).already
    original = safetensors.torch.load_file(folder / "model-00001-of-00002.safetensors")
    assert bits(weights(tmp_path / "out" / "exports" / LATEST)["a"]) == bits(original["a"])


def test_foreign_into_the_checkpoint(tmp_path):
    """Into a checkpoint: ``consolidated`` beside another's shards, found the second time although the folder has changed by it."""
    folder = foreign(tmp_path)
    before = set(os.listdir(folder))
    done = export(folder, into="checkpoint", dtype="bf16")
    assert done.path == str(folder / "consolidated")
    assert set(os.listdir(folder)) == before | {"consolidated"}
    assert weights(folder / "consolidated")["a"].dtype == torch.bfloat16
    assert json.loads((folder / "consolidated" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert export(folder, into="checkpoint", dtype="bf16").already
    assert [past.folder for past in Exports(tmp_path / "out" / "exports", "model").history(into="checkpoint")] == [
        "../checkpoint-7/consolidated"
    ]


def test_changed_since(tmp_path):
    """A checkpoint that was written anew under the same name is another one: it is exported again, under a name of its own."""
    folder = foreign(tmp_path)
    first = export(folder)
    tensors = safetensors.torch.load_file(folder / "model-00002-of-00002.safetensors")
    safetensors.torch.save_file(
        {name: tensor + 1 for name, tensor in tensors.items()}, folder / "model-00002-of-00002.safetensors", {"format": "pt"}
    )
    os.utime(folder / "model-00002-of-00002.safetensors", (2e9, 2e9))
    second = export(folder)
    assert not second.already
    assert second.path != first.path
    assert bits(weights(tmp_path / "out" / "exports" / LATEST)["c"]) == bits(tensors["c"] + 1)


def test_adapter(tmp_path):
    """PEFT: one file called adapter_model.safetensors with its configuration, no index; a card that says what it belongs to."""
    folder = foreign(tmp_path)
    base = tmp_path / "adapter"
    base.mkdir()
    (base / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    done = export(folder, assets=str(base))
    assert sorted(os.listdir(done.path)) == ["README.md", "adapter_config.json", "adapter_model.safetensors", "everystep.json"]
    assert set(safetensors.torch.load_file(f"{done.path}/adapter_model.safetensors")) == {"a", "b", "c"}
    assert 'base_model: "org/base"' in Path(done.path, "README.md").read_text()


def test_read_elsewhere(tmp_path):
    """A protected copy of a checkpoint's names is read, but the export goes where the checkpoint is, and says so."""
    folder = foreign(tmp_path)
    copy = tmp_path / "out" / ".everystep-reading" / "t" / "0" / "checkpoint-7"
    copy.mkdir(parents=True)
    for name in os.listdir(folder):
        os.link(folder / name, copy / name)
    done = job.run(open_source(str(copy)), Consolidate(), reason="every", origin=str(folder))
    assert done.path == str(tmp_path / "out" / "exports" / "model-checkpoint-7")
    assert json.loads(Path(done.path, "everystep.json").read_text())["source"] == "checkpoint-7"
    done = job.run(open_source(str(copy)), Consolidate(into="checkpoint"), reason="every", origin=str(folder))
    assert done.path == str(folder / "consolidated")


# -- what goes wrong ------------------------------------------------------------------------------------------------------------


def test_no_room(run, monkeypatch):
    """A file system without the room is said before anything is written, with both numbers; what is linked needs none."""
    path, _ = run
    real = os.statvfs

    class Full:
        f_bavail, f_frsize, f_blocks = 300, 1024, 1000

    assets = path / "base"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    (assets / "tokenizer.json").write_bytes(b" " * 100_000)
    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(CapacityError, match=r"bytes needed, 307,200 free") as caught:
        export(path, assets=str(assets), max_shard_size=60)
    assert caught.value.kind == "disk-full"
    assert [name for name in os.listdir(path / "exports") if name != ".lock"] == []
    assert export(path).linked
    monkeypatch.setattr(os, "statvfs", real)


def test_no_room_in_the_middle(run, monkeypatch):
    """A disk that fills up in the middle: everything that was written of it goes, and the error is of space."""
    path, _ = run

    def fill(source, plan, folder, **_):
        with open(f"{folder}/{plan.files[0].name}.part", "wb") as file:
            file.write(b"x" * 1000)
        raise CapacityError("no space left", kind="disk-full")

    monkeypatch.setattr(job, "write_export", fill)
    with pytest.raises(CapacityError):
        export(path)
    assert [name for name in os.listdir(path / "exports") if name != ".lock"] == []


@pytest.mark.parametrize("settings", [{"into": "s3://bucket/x"}, {"assets": "/not/there"}, {"into": "/not/there/at/all"}])
def test_wrong_settings(run, settings):
    """Settings that cannot be done are refused before anything is written."""
    path, _ = run
    with pytest.raises((ConfigError, NotFoundError)):
        export(path, **settings)
    assert not (path / "exports").exists()


def test_planned(run):
    """The plan that is shown beforehand is the one that is carried out."""
    path, _ = run
    plan = job.planned(open_source(str(path)), Consolidate(max_shard_size=60))
    done = export(path, max_shard_size=60)
    assert {file.name for file in plan.files} == {name for name in os.listdir(done.path) if name.endswith(".safetensors")}
    assert json.loads(Path(done.path, "everystep.json").read_text())["plan"] == plan.id


@pytest.mark.parametrize("into", ["checkpoint", "latest"])
def test_an_export_of_other_settings_under_the_same_name_is_not_taken_for_it(tmp_path, into):
    """Asked again for what another export has replaced meanwhile, the wanted one is made: never the other one as "already"."""
    model = torch.nn.Linear(4, 4)
    with everystep.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        ckpt.save(1, {"model": model}, sync=True)
    first = export(tmp_path / "run", into=into)
    if into == "latest":
        shutil.rmtree(first.path)  # as pruning does
    other = export(tmp_path / "run", into=into, dtype="bf16")
    assert other.path == first.path
    again = export(tmp_path / "run", into=into)
    assert not again.already
    assert {tensor.dtype for tensor in weights(Path(again.path)).values()} == {torch.float32}


def test_what_was_begun_of_an_export_that_is_there_goes(tmp_path):
    """A writer that was killed after it exchanged folders left the old one hidden under the same id: the next call deletes it."""
    with everystep.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(4, 4)}, sync=True)
    export(tmp_path / "run")
    root = tmp_path / "run/exports"
    exports = Exports(root, "model")
    [past] = exports.history()
    left = Path(exports.partial(past.key, past.id))
    (left / "old.safetensors").write_bytes(b"old")
    assert export(tmp_path / "run").already
    assert not left.exists()


@pytest.mark.parametrize(("group", "names"), [(None, {"weight", "bias"}), ("trainer", {"weight", "bias"}), ("trainer.net", {"weight", "bias"})])
def test_a_module_deeper_in_the_state_is_exported_under_its_own_names(tmp_path, group, names):
    """Files whose entries bear longer names than the module's are no exports as they are, and are written anew."""
    model = torch.nn.Linear(4, 4)
    with everystep.Checkpointer(tmp_path / "run", agent=False) as ckpt:
        ckpt.save(1, {"trainer": {"net": model}}, sync=True)
    found = weights(Path(export(tmp_path / "run", group=group).path))
    assert found.keys() == names
    assert torch.equal(found["weight"], model.weight)


def test_a_group_of_others_whole_files(tmp_path):
    """The same for a file of safetensors that holds the module under a prefix."""
    (tmp_path / "ckpt-3").mkdir()
    safetensors.torch.save_file({"model.a": torch.arange(3.0), "model.b": torch.ones(2)}, tmp_path / "ckpt-3/model.safetensors")
    found = weights(Path(export(tmp_path / "ckpt-3", group="model").path))
    assert found["a"].tolist() == [0.0, 1.0, 2.0]
    assert found.keys() == {"a", "b"}


def test_a_checkpoint_that_is_written_to_while_it_is_read_is_not_published(tmp_path):
    """Others may save into the same files again: a mixture of two saves is a ConflictError, and the next try takes the new one."""
    (tmp_path / "ckpt-3").mkdir()
    path = tmp_path / "ckpt-3/model.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(3)}, path)
    source = open_source(tmp_path / "ckpt-3")

    def overwrite(_):
        safetensors.torch.save_file({"a": torch.ones(3)}, path)
        os.utime(path, ns=(1, 1))  # sure to be another time than before

    with pytest.raises(ConflictError, match="written to"):
        job.run(source, Consolidate(dtype="bf16"), reason="x", pace=overwrite)
    assert [name for name in os.listdir(tmp_path / "exports") if not name.startswith(".")] == []
    assert weights(Path(export(tmp_path / "ckpt-3").path))["a"].tolist() == [1.0] * 3


def test_best_knows_metrics_that_came_after_the_export(tmp_path):
    """BEST leads to the best by what is known now: an export may have been made before its checkpoint was measured."""
    knob = {"when": [{"every": 1}, {"improves": "loss"}], "keep": None}
    model = torch.nn.Linear(2, 2)
    with everystep.Checkpointer(tmp_path / "run", agent=False, keep=everystep.Keep(last=None)) as ckpt:
        ckpt.save(1, {"model": model}, sync=True)
        first = export(tmp_path / "run", **knob)
        ckpt.record(1, {"loss": 0.1})
        ckpt.save(2, {"model": model}, metrics={"loss": 0.5}, sync=True)
        export(tmp_path / "run", **knob)
    assert (tmp_path / "run/exports/BEST").resolve() == Path(first.path)
