"""The folder of exports by itself: publication, pointers, history, retention, locks, small files, cards."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from everystep.consolidate import exports as exports_module
from everystep.consolidate import folders, history
from everystep.consolidate.assets import collect
from everystep.consolidate.card import CARD, RECORD, FileRecord, Record, decode_record, encode_record, model_card
from everystep.consolidate.exports import BEST, LATEST, Exports
from everystep.errors import ConfigError, ConflictError, CorruptionError, NotFoundError, PermanentStoreError
from everystep.schedule import Consolidate, Seen, decide, to_document


def record_of(step, *, attempt=1, id=None, metrics=None, name="model", settings=None, origin="run", published_at=None, files=()):
    key = f"{step:012d}-{attempt:04d}"
    return Record(
        id=id or f"{attempt:016x}{step:016x}"[::-1], plan="p" * 32, name=name, key=key, step=step, attempt=attempt, saved_at=1000.0 * attempt + step, metrics=metrics or {},
        kind="everystep", source="run", origin=origin, identity="i" * 32, reason="every", published_at=published_at or 5000.0 + step, settings=settings or {},
        files=files, aliases={}, total_nbytes=9, linked_nbytes=0, everystep="0",
    )  # fmt: skip


def publish(exports, step, *, keep=1, best_by=None, data=b"weights", **told):
    record = record_of(step, files=(FileRecord("w.bin", len(data), ""),), **told)
    with exports.locked(patience_s=5):
        partial = exports.partial(record.key, record.id)
        exports.put(partial, "w.bin", data)
        path = exports.publish(partial, record)
        exports.settle(path, keep=keep, best_by=best_by)
    return path, record


def shown(root):
    """What a person sees: names that are not hidden."""
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


def test_publication(tmp_path):
    """An export appears under its name with its record, LATEST leads to it, and nothing hidden but locks is left."""
    exports = Exports(tmp_path / "exports", "model")
    path, record = publish(exports, 5)
    assert shown(tmp_path / "exports") == [LATEST, "history.json", "model-000000000005-0001"]
    assert os.readlink(tmp_path / "exports" / LATEST) == "model-000000000005-0001"
    assert exports.latest() == path
    assert (tmp_path / "exports" / LATEST / "w.bin").read_bytes() == b"weights"
    assert exports.record(path) == record
    assert sorted(os.listdir(path)) == ["everystep.json", "w.bin"]
    hidden = [name for name in os.listdir(tmp_path / "exports") if name.startswith(".")]
    assert sorted(hidden) == [".history.lock", ".lock"]


def test_incomplete_is_not_published(tmp_path):
    """F48: a folder that lacks a file of its record, or has it in another size, is not published; what does not belong in it goes."""
    exports = Exports(tmp_path, "model")
    record = record_of(5, files=(FileRecord("w.bin", 7, ""), FileRecord("config.json", 2, "")))
    partial = exports.partial(record.key, record.id)
    exports.put(partial, "w.bin", b"weights")
    with pytest.raises(CorruptionError, match=r"config\.json"):
        exports.publish(partial, record)
    exports.put(partial, "config.json", b"{}")
    exports.put(partial, "w.bin", b"weight")
    with pytest.raises(CorruptionError, match=r"w\.bin"):
        exports.publish(partial, record)
    assert shown(tmp_path) == []
    exports.put(partial, "w.bin", b"weights")
    exports.put(partial, "w.bin.part", b"half of it")
    path = exports.publish(partial, record)
    assert sorted(os.listdir(path)) == ["config.json", "everystep.json", "w.bin"]


class Dies(BaseException):
    """Stands for the end of the process."""


CALLS = ("open", "mkdir", "rename", "replace", "symlink", "unlink", "fsync", "rmdir")


class Crashing:
    """Lets the process 'die' at the n-th call that changes something."""

    def __init__(self, monkeypatch, at):
        self.left, self.said = at, []
        for name in CALLS:
            real = getattr(os, name)

            def call(*args, _real=real, _name=name, **kwargs):
                if _name == "open" and not args[1] & (os.O_CREAT | os.O_TRUNC):
                    return _real(*args, **kwargs)
                self.left -= 1
                if self.left < 0:
                    raise Dies
                self.said.append(_name)
                return _real(*args, **kwargs)

            monkeypatch.setattr(os, name, call)


def is_whole(path):
    told = json.loads((path / RECORD).read_bytes())
    return all((path / file["name"]).stat().st_size == file["nbytes"] for file in told["files"])


@pytest.fixture
def quick_folder(tmp_path):
    """A folder in memory, where one is: hundreds of publications wait for no disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = tempfile.mkdtemp(prefix="everystep-test-", dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("beside", [False, True])
def test_dies_at_every_call(quick_folder, monkeypatch, beside):
    """F48, F57: wherever its writer dies, what is visible is whole and LATEST leads to it; the next one makes good what is missing."""
    at = 0
    while True:
        root = quick_folder / str(at)
        (root / "ckpt").mkdir(parents=True)

        def make(root=root):
            return Exports(root / "exports", "model", beside=str(root / "ckpt") if beside else None)

        publish(make(), 4, metrics={"loss": 2.0}, best_by=("loss", "min"))
        publish(make(), 5, metrics={"loss": 3.0}, best_by=("loss", "min"), id="5" * 32)
        with monkeypatch.context() as patch:
            crashing = Crashing(patch, at)
            try:
                publish(make(), 6, metrics={"loss": 1.0}, best_by=("loss", "min"), data=b"newer", id="6" * 32)
                died = False
            except Dies:
                died = True
        place = root / ("ckpt" if beside else "exports")
        exported = [place / name for name in shown(place) if name not in (LATEST, BEST, "history.json")]
        assert exported
        assert all(is_whole(path) for path in exported), (at, crashing.said)
        if not beside:
            latest, best = make().latest(), make().best()
            assert latest is not None
            assert latest.endswith(("0005-0001", "0006-0001"))
            assert best is not None
        for name in os.listdir(place):
            if name.startswith(".tmp-"):
                os.utime(place / name, (1000.0, 1000.0))  # written by anybody, so it goes when it is old
        # A second life: finds it or makes it again, and ends in the same place.
        again = make()
        with again.locked(patience_s=0):
            again.sweep_all_but("")
            found = again.find(record_of(6).key, "6" * 32)
            if found is not None:
                again.settle(found, keep=1, best_by=("loss", "min"))
        if found is None:
            publish(make(), 6, metrics={"loss": 1.0}, best_by=("loss", "min"), data=b"newer", id="6" * 32)
        assert again.find(record_of(6).key, "6" * 32)
        assert [past.step for past in again.history()] == [4, 5, 6]
        if beside:
            assert shown(place) == ["consolidated"]
            assert [name for name in os.listdir(place) if name != "consolidated"] == []
        else:
            assert shown(place) == [BEST, LATEST, "history.json", "model-000000000005-0001", "model-000000000006-0001"]
            assert again.best() == again.latest()
            assert sorted(name for name in os.listdir(place) if name.startswith(".")) == [".history.lock", ".lock"]
        if not died:
            break
        at += 1
    assert at > 20


def test_retention(tmp_path):
    """The newest ``keep`` stay, and what LATEST led to before, and BEST; the history remembers the others."""
    exports = Exports(tmp_path, "model")
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 4.0}
    for step, loss in losses.items():
        publish(exports, step, keep=1, best_by=("loss", "min"), metrics={"loss": loss})
    assert shown(tmp_path) == [BEST, LATEST, "history.json", *(f"model-{step:012d}-0001" for step in (2, 4, 5))]
    assert os.readlink(tmp_path / BEST) == "model-000000000002-0001"
    assert [(past.step, past.metrics) for past in exports.history()] == [(step, {"loss": loss}) for step, loss in losses.items()]
    publish(exports, 6, keep=3)
    assert [past.step for past in exports.history() if os.path.isdir(tmp_path / past.folder)] == [2, 4, 5, 6]
    publish(exports, 7, keep=None)
    publish(exports, 8, keep=None)
    assert len(shown(tmp_path)) == 3 + 6


def test_old_export_on_demand(tmp_path):
    """LATEST leads to what was saved last: an older checkpoint that is exported later does not take it, and a newer attempt does."""
    exports = Exports(tmp_path, "model")
    publish(exports, 300)
    publish(exports, 400)
    publish(exports, 100)
    assert exports.latest().endswith("400-0001")
    assert sorted(past.step for past in exports.history() if os.path.isdir(tmp_path / past.folder)) == [100, 300, 400]
    publish(exports, 200, attempt=2)
    assert exports.latest().endswith("200-0002")


def test_same_checkpoint_otherwise(tmp_path):
    """Another export of the same checkpoint (another dtype) gets a name of its own; the first stays as it is."""
    exports = Exports(tmp_path, "model")
    first, one = publish(exports, 5, id="a" * 32)
    second, _ = publish(exports, 5, id="b" * 32)
    assert first.endswith("model-000000000005-0001")
    assert second.endswith("model-000000000005-0001-bbbbbbbb")
    assert exports.latest() == second
    assert exports.find(one.key, "a" * 32) == first
    assert exports.find(one.key, "b" * 32) == second
    assert exports.find(one.key, "c" * 32) is None


def test_damaged_export_is_made_again(tmp_path):
    """An export that lost a file is not found, and is replaced by the new one in one step."""
    exports = Exports(tmp_path, "model")
    path, record = publish(exports, 5)
    os.truncate(f"{path}/w.bin", 3)
    assert exports.find(record.key, record.id) is None
    again, _ = publish(exports, 5)
    assert again == path
    assert exports.find(record.key, record.id) == path
    assert [past.step for past in exports.history()] == [5]
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(".")) == [".history.lock", ".lock"]


def test_replacing_without_exchange(tmp_path, monkeypatch):
    """Where two names cannot change places in one step, replacing works all the same."""
    monkeypatch.setattr(folders, "_renameat2", None)
    exports = Exports(tmp_path, "model", beside=str(tmp_path / "ckpt"))
    publish(exports, 5, data=b"one", id="1" * 32)
    path, _ = publish(exports, 5, data=b"other", id="2" * 32)
    assert (tmp_path / "ckpt" / "consolidated" / "w.bin").read_bytes() == b"other"
    assert path == str(tmp_path / "ckpt" / "consolidated")
    assert os.listdir(tmp_path / "ckpt") == ["consolidated"]


def test_without_symbolic_links(tmp_path, monkeypatch):
    """A file system without symbolic links gets LATEST.txt, which is read back."""

    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    exports = Exports(tmp_path, "model")
    publish(exports, 5)
    path, _ = publish(exports, 6)
    assert (tmp_path / "LATEST.txt").read_text() == "model-000000000006-0001\n"
    assert exports.latest() == path


@pytest.mark.parametrize("damage", [b"", b"{", b'{"a": 1}', b"[1, 2]", b"\xff\xfe", b"[{}]"])
def test_damaged_history(tmp_path, caplog, damage):
    """A history that cannot be read is told, and made again from what is there."""
    exports = Exports(tmp_path, "model")
    for step in (1, 2, 3):
        publish(exports, step, keep=1)
    (tmp_path / "history.json").write_bytes(damage)
    assert [past.step for past in exports.history()] == [2, 3]
    assert "history.json" in caplog.text
    publish(exports, 4, keep=1)
    assert [past["step"] for past in json.loads((tmp_path / "history.json").read_bytes())] == [2, 3, 4]


def test_long_history(tmp_path, monkeypatch):
    """A history is bounded: the newest stay, and what was best and worst of each metric, for schedules to compare with."""
    monkeypatch.setattr(history, "_BOUND", 4)
    exports = Exports(tmp_path, "model")
    losses = [5.0, 1.0, 3.0, 9.0, 2.0, float("nan"), 4.0, 6.0, 2.5, 7.0]
    for step, loss in enumerate(losses, 1):
        publish(exports, step, metrics={"loss": loss})
    assert [past["step"] for past in json.loads((tmp_path / "history.json").read_bytes())] == [2, 4, 7, 8, 9, 10]


def test_history_is_what_a_schedule_wants(tmp_path):
    """F57: what was exported is done for the schedule, also when it is pruned, and with metrics that JSON has no number for."""
    exports = Exports(tmp_path, "model")
    values = {1: 3.0, 2: 1.0, 3: float("nan"), 4: float("inf")}
    for step, value in values.items():
        publish(exports, step, keep=1, metrics={"loss": value})
    seen = [Seen(f"{step:012d}-0001", step, 1000.0 + step, {"loss": 0.5 if step == 5 else 9.0}) for step in (1, 4, 5, 6)]
    done = Exports(tmp_path, "model").history()
    decisions = decide({"improves": "loss", "mode": "min"}, seen, done, ended=False)
    assert [(one.step, one.due) for one in decisions] == [(1, False), (4, False), (5, True), (6, False)]
    assert repr([past.metrics["loss"] for past in done]) == "[3.0, 1.0, nan, inf]"
    text = (tmp_path / "history.json").read_text()
    assert "null" not in text
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_beside_a_checkpoint(tmp_path):
    """Into a checkpoint: one export with a fixed name, replaced as a whole; remembered among the exports."""
    (tmp_path / "data" / "k").mkdir(parents=True)
    exports = Exports(tmp_path / "exports", "model", beside=str(tmp_path / "data" / "k"))
    publish(exports, 5)
    assert os.listdir(tmp_path / "data" / "k") == ["consolidated"]
    assert [(past.step, past.folder) for past in exports.history()] == [(5, "../data/k/consolidated")]
    assert Exports(tmp_path / "exports", "model").history() == []
    assert [past.step for past in Exports(tmp_path / "exports", "model").history(into="checkpoint")] == [5]
    assert exports.prune(1) == []


def test_sweep(tmp_path):
    """What dead writers left goes; nothing goes while somebody writes, and nothing that is not ours."""
    exports = Exports(tmp_path, "model")
    path, record = publish(exports, 5)
    left = exports.partial("000000000007-0001", "7" * 32)
    exports.put(left, "half", b"x")
    (tmp_path / ".trash-123456789abc").mkdir()
    os.symlink("nowhere", tmp_path / ".LATEST-abcdef012345")
    (tmp_path / ".assets-1").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with Exports(tmp_path, "model").locked():
        assert exports.sweep() == []
        assert os.path.isdir(left)
    assert sorted(exports.sweep()) == sorted([os.path.basename(left), ".trash-123456789abc", ".LATEST-abcdef012345"])
    assert {".assets-1", "notes.txt", os.path.basename(path)} <= set(os.listdir(tmp_path))
    assert exports.find(record.key, record.id) == path
    assert Exports(tmp_path / "not" / "there", "model").sweep() == []


def test_without_locks(tmp_path, monkeypatch):
    """Where a mount has no locks, writing works, and only what has not changed for long is swept."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    exports = Exports(tmp_path, "model")
    publish(exports, 5)
    young, old = exports.partial("y", "7" * 32), exports.partial("o", "8" * 32)
    for path, name in ((young, "a"), (old, "b")):
        exports.put(path, name, b"x")
    for path in (f"{old}/b", old):
        os.utime(path, (1000.0, 1000.0))
    assert exports.sweep() == [os.path.basename(old)]


def test_one_writer_at_a_time(tmp_path):
    """A second writer waits until the first has finished, or says at once who is at it."""
    one, other = Exports(tmp_path, "model"), Exports(tmp_path, "model")
    entered = threading.Event()

    def second():
        with other.locked():
            entered.set()

    with one.locked():
        with pytest.raises(ConflictError, match=rf"process {os.getpid()} .*exporting") as caught, other.locked(patience_s=0):
            pass
        assert caught.value.kind == "busy"
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(10)
    thread.join()


def test_lock_that_is_deleted(tmp_path, monkeypatch):
    """A lock file that its holder deletes at its end lets nobody in who had opened it before: the next holder's is another file."""
    path = str(tmp_path / ".lock")
    first, second, third = (folders.Lock(path, passing=True) for _ in range(3))
    real, holders = second._flock, contextlib.ExitStack()
    before = contextlib.ExitStack()
    before.enter_context(first.held(patience_s=0))

    def late(fd):
        before.close()
        if not os.path.exists(path):
            holders.enter_context(third.held(patience_s=0))
        return real(fd)

    with holders, monkeypatch.context() as patch:
        patch.setattr(second, "_flock", late)
        with pytest.raises(ConflictError) as caught, second.held(patience_s=0):
            pass
    assert caught.value.kind == "busy"
    with second.held(patience_s=0):
        assert os.path.exists(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", ["LATEST", "BEST", "model-k"])
def test_something_in_the_way(tmp_path, what):
    """A file or folder of somebody else under a name that is needed is named before anything is written, and stays."""
    exports = Exports(tmp_path, "model")
    (tmp_path / what).mkdir()
    (tmp_path / what / "precious").write_text("x")
    with pytest.raises(ConflictError, match=what) as caught:
        exports.check_room("k", "1" * 32)
    assert caught.value.kind == "in-the-way"
    assert (tmp_path / what / "precious").read_text() == "x"


def test_places_that_cannot_be(tmp_path):
    """A root that is a file, or whose parents do not exist, is a wrong setting and says so."""
    (tmp_path / "file").write_text("x")
    for root, kind in (
        (tmp_path / "file", "not-a-folder"),
        (tmp_path / "file" / "sub", "not-a-folder"),
        (tmp_path / "a" / "b" / "c", "no-parent"),
    ):
        with pytest.raises(ConfigError) as caught, Exports(root, "model").locked():
            pass
        assert caught.value.kind == kind
    with Exports(tmp_path / "a" / "b", "model").locked():
        assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_read_only(tmp_path, monkeypatch, code):
    """A root that cannot be written to is said before anything else happens."""
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermanentStoreError, match="export into another folder"), Exports(tmp_path, "model").locked():
        pass


# -- records and cards -----------------------------------------------------------------------------------------------------


def test_record_round_trip():
    """A record is read back as it was, with metrics that JSON has no number for and all settings."""
    record = record_of(5, metrics={"a": 1.5, "b": float("inf")}, settings=to_document(Consolidate(when={"every": 5})))
    data = encode_record(record)
    json.loads(data, parse_constant=pytest.fail)
    assert decode_record(data, "x") == record
    with pytest.raises(CorruptionError):
        decode_record(data[:-20], "x")
    with pytest.raises(CorruptionError, match="format 2"):
        decode_record(data.replace(b'"format": 1', b'"format": 2'), "x")


def test_card():
    """The card has step, metrics, digests and tied names, as Markdown that hubs read."""
    record = record_of(
        1200, metrics={"val|loss": 1.25}, files=(FileRecord("a.safetensors", 4096, "d" * 32), FileRecord("b.safetensors", 1, ""))
    )
    card = model_card(record, adapter=False)
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| step | 1200 |" in card
    assert r"| val\|loss | 1.25 |" in card
    assert f"| a.safetensors | 4,096 | `{'d' * 32}` |" in card
    assert "| b.safetensors | 1 | *linked* |" in card
    adapter = model_card(record, adapter=True, base_model='org/base: "7B"')
    assert "library_name: peft" in adapter
    assert r'base_model: "org/base: \"7B\""' in adapter


# -- assets ----------------------------------------------------------------------------------------------------------------

CARRIED = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/tool.jinja", "modeling_custom.py", "configuration_custom.py", "hf_quant_config.json",
]  # fmt: skip
LEFT = [
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "tokenizer.bin", "README.md", "train.py", "optimizer.pt", ".git/config", ".tokenizer.json",
    "fqn_to_file_index_mapping.json", "events.log", "training_args.bin", "vocab.pt", "additional_chat_templates/x.py",
]  # fmt: skip


def write_all(folder, names, data=b"{}"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_what_is_carried(tmp_path):
    """Configuration, tokenizer, processor, templates and modeling code are carried; weights and everything else are not."""
    write_all(tmp_path, CARRIED + LEFT)
    found = collect(tmp_path)
    assert sorted(found.files) == sorted(CARRIED)
    assert not found.adapter


def test_code_that_a_configuration_names(tmp_path):
    """With custom code named in the configuration the other modules go too: modeling code imports them."""
    write_all(tmp_path, ["helpers.py", "modeling_x.py"])
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_x.Model"}}')
    assert "helpers.py" in collect(tmp_path).files
    (tmp_path / "config.json").write_text("{}")
    assert "helpers.py" not in collect(tmp_path).files


def test_links_of_a_cache(tmp_path):
    """A hub's cache is a folder of links to blobs: contents are carried, and a link to nowhere is not there."""
    (tmp_path / "blob").write_text('{"a": 1}')
    folder = tmp_path / "snapshot"
    folder.mkdir()
    os.symlink("../blob", folder / "config.json")
    os.symlink("../gone", folder / "tokenizer.json")
    assert collect(folder).files == {"config.json": b'{"a": 1}'}


def test_adapter(tmp_path):
    """An adapter's configuration without a model's makes it an adapter."""
    write_all(tmp_path, ["adapter_config.json", "tokenizer.json"])
    assert collect(tmp_path).adapter
    write_all(tmp_path, ["config.json"])
    assert not collect(tmp_path).adapter


def test_wrong_assets(tmp_path):
    """A folder that is not there, has no configuration, or a damaged one: each says which and what to do."""
    with pytest.raises(NotFoundError, match="gone"):
        collect(tmp_path / "gone")
    with pytest.raises(ConfigError, match="neither"):
        collect(tmp_path)
    assert collect(tmp_path, asked=False).files == {}
    assert collect(tmp_path / "gone", asked=False).files == {}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptionError, match="not JSON"):
        collect(tmp_path)


def test_dtype_in_the_configuration(tmp_path):
    """A configuration that names a dtype names that of the weights, else from_pretrained changes them; nothing else in it changes."""
    config = {
        "torch_dtype": "bfloat16",
        "hidden": 4,
        "text_config": {"dtype": "bfloat16"},
        "quantization_config": {"dtype": "float16"},
        "name": "ü",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assets = collect(tmp_path)
    told = json.loads(assets.for_dtypes(["F32", "I64"]).files["config.json"])
    assert told == {**config, "torch_dtype": "float32", "text_config": {"dtype": "float32"}}
    assert assets.for_dtypes(["F32", "BF16"]) is assets
    assert assets.for_dtypes(["BF16"]) is assets
    assert assets.for_dtypes(["I8"]) is assets
    assert assets.id != assets.for_dtypes(["F32"]).id
    assert exports_module.CONSOLIDATED == "consolidated"
    assert CARD == "README.md"


# -- what is not ours ----------------------------------------------------------------------------------------------------


def test_sweeping_leaves_others_hidden_things(tmp_path):
    """In a folder of the user's own, hidden names that only look like ours stay; what a dead writer left goes."""
    exports = Exports(tmp_path, "model")
    mine = [".film.partial", ".trash-old", ".LATEST-backup", ".BEST-of", ".model-5.partial"]
    left = [".model-000000000005-0001-0123abcd.partial", ".trash-0123456789ab", ".LATEST-0123456789ab"]
    for name in [*mine, *left]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thing").write_text("x")
    assert sorted(exports.sweep()) == sorted(left)
    assert all((tmp_path / name / "thing").exists() for name in mine)


def test_pruning_leaves_copies_and_what_is_no_export(tmp_path):
    """A copy of an export under a name of the user's own, and a folder of theirs under the name of a deleted export, are not pruned."""
    exports = Exports(tmp_path, "model")
    first, _ = publish(exports, 1)
    shutil.copytree(first, tmp_path / "the-good-one")
    shutil.rmtree(first)
    Path(first).mkdir()
    (Path(first) / "mine.txt").write_text("x")
    for step in (2, 3, 4, 5):
        publish(exports, step, keep=1)
    assert (tmp_path / "the-good-one" / "w.bin").read_bytes() == b"weights"
    assert (Path(first) / "mine.txt").exists()
    assert "the-good-one" not in {past.folder for past in exports.history()}
    assert not (tmp_path / "model-000000000003-0001").exists()


@pytest.mark.parametrize("target", ["epoch_0_step_5", "/somewhere/else", "../run/model-1"])
def test_a_jobs_own_latest_is_in_the_way(tmp_path, target):
    """LATEST that leads to a job's checkpoint (NeMo's, in its own folder) is not moved: ConflictError before anything is written."""
    (tmp_path / "epoch_0_step_5").mkdir()
    (tmp_path / LATEST).symlink_to(target)
    exports = Exports(tmp_path, "model")
    with pytest.raises(ConflictError, match="LATEST"):
        exports.check_room("000000000005-0001", "i" * 32)
    (tmp_path / LATEST).unlink()
    publish(exports, 1)
    exports.check_room("000000000005-0001", "i" * 32)
    shutil.rmtree(tmp_path / "model-000000000001-0001")
    exports.check_room("000000000005-0001", "i" * 32)  # ours, whose folder somebody deleted


def test_another_ones_checkpoint_is_not_made_again(tmp_path):
    """into="checkpoint", and the job pruned the checkpoint meanwhile: no folder of its name appears, which the job would take for one."""
    exports = Exports(tmp_path / "exports", "model", beside=str(tmp_path / "checkpoint-5"), taken=True)
    with pytest.raises(NotFoundError, match="checkpoint-5"), exports.locked(patience_s=0):
        pytest.fail("there is no place")
    assert os.listdir(tmp_path) == []
