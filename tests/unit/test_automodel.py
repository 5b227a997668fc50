"""NeMo's recipes that consolidate, without NeMo: stand-ins with the methods that are overridden, and the data that NeMo itself wrote."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from everystep import errors
from everystep.consolidate.source import Found
from everystep.consolidate.watching import Outcome
from everystep.integrations import automodel
from everystep.integrations.consolidations import Consolidations, consolidate_checkpoints, settled
from everystep.schedule import Consolidate, Seen

DATA = Path(__file__).parents[1] / "data" / "automodel"


class Node:
    """Stands for NeMo's ConfigNode: dotted keys, to_dict."""

    def __init__(self, said):
        self.said = said

    def get(self, key, default=None):
        at = self.said
        for part in key.split("."):
            if not isinstance(at, dict) or part not in at:
                return default
            at = at[part]
        return Node(at) if isinstance(at, dict) else at

    def set_by_dotted(self, key, value):
        at = self.said
        *path, last = key.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value

    def to_dict(self):
        return self.said


class FakeRecipeForNextTokenPrediction:
    """Stands for nemo_automodel.recipes.llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction 0.7.0: the same methods and attributes."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.checkpointer = None
        self.step_scheduler = SimpleNamespace(sigterm_flag=False)
        self.saved = []
        self.fails_at = None

    def setup(self):
        config = SimpleNamespace(enabled=self.cfg.get("checkpoint.enabled", True), checkpoint_dir=self.cfg.get("checkpoint.checkpoint_dir"))
        self.checkpointer = SimpleNamespace(config=config, process_group=None)

    def save_checkpoint(self, epoch, step, train_loss, val_loss=None, best_metric_key="default"):
        self.saved.append(step)

    def run_train_validation_loop(self):
        for step in range(3):
            if step == self.fails_at:
                raise RuntimeError("a rank died")
            self.save_checkpoint(0, step, 1.0, {"default": 2.0})


class Process:
    """Stands for the process that consolidates: ends when it is let."""

    def __init__(self, outcome, let):
        self.outcome, self.let = outcome, let

    def wait(self):
        assert self.let.wait(30)
        return self.outcome


class Job:
    """A folder of checkpoints that are only told of, with everything that Consolidations asks of others."""

    def __init__(self, root, when, *, let=True, outcomes=(), **options):
        self.root, self.found, self.done, self.started, self.reasons = root, [], [], [], []
        self.begun, self.let = threading.Semaphore(0), threading.Event()
        if let:
            self.let.set()
        self.outcomes = list(outcomes)
        self.one = Consolidations(
            root, Consolidate(when=when, **options), start=self.start, find=lambda _: list(self.found), history=lambda: list(self.done)
        )

    def save(self, step, *, complete=True, **metrics):
        path = self.root / f"epoch_0_step_{step - 1}"
        path.mkdir()
        self.found.append(Found(str(path), "automodel", step, complete, "", 1000.0 + step, metrics, path.name))
        self.one()

    def start(self, found, path, reason):
        self.started.append(found.step)
        self.reasons.append(reason)
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome(exported={"path": path, "seconds": 0.5})
        if outcome.error is None:
            self.done.append(Seen(key=found.key, step=found.step, saved_at=found.saved_at, metrics=found.metrics))
        self.begun.release()
        return Process(outcome, self.let)


class Told(logging.Handler):
    """Lets a test wait for what is said."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.more = threading.Semaphore(0)

    def emit(self, record):
        self.more.release()


def links(root):
    return {os.readlink(root / name) for name in os.listdir(root) if (root / name).is_symlink()}


# -- when ---------------------------------------------------------------------------------------------------------------------
def test_every_n_and_final(tmp_path):
    """Every second checkpoint is consolidated in order, and the last one when the job is over, each once."""
    job = Job(tmp_path, [{"every": 4}, "final"])
    for step in (2, 4, 6, 8, 10):
        job.save(step)
        if step in {4, 8}:
            assert job.begun.acquire(timeout=30)
    job.one.close()
    assert job.started == [4, 8, 10]
    assert "final" in job.reasons[-1]


def test_final_only_when_ended(tmp_path):
    """A job that failed is not over: `final` is not due."""
    job = Job(tmp_path, "final")
    job.save(2)
    job.one.close(ended=False)
    assert job.started == []


def test_final_of_a_job_that_had_ended_already(tmp_path):
    """A finished job that is started again and saves nothing consolidates its newest checkpoint once (F57)."""
    for started in ([6], []):
        job = Job(tmp_path, "final")
        for step in (2, 6):
            path = tmp_path / f"epoch_0_step_{step}"
            path.mkdir(exist_ok=True)
            job.found.append(Found(str(path), "automodel", step, True, "", 1000.0 + step, {}, path.name))
        if not started:
            job.done.append(Seen(key="epoch_0_step_6", step=6, saved_at=1006.0, metrics={}))
        job.one.close()
        assert job.started == started


def test_improves_by_losses(tmp_path):
    """A better validation loss is due, a worse or unknown one is not."""
    job = Job(tmp_path, {"improves": "val_loss"})
    for step, metrics in ((1, {"val_loss": 3.0}), (2, {"val_loss": 3.5}), (3, {}), (4, {"val_loss": 2.5})):
        job.save(step, **metrics)
    job.one.close()
    assert job.started == [1, 4]


def test_incomplete_ones_are_left_alone(tmp_path):
    """What NeMo is still writing is not started."""
    job = Job(tmp_path, "every")
    job.save(1, complete=False)
    job.one.close()
    assert job.started == []


def test_two_wait_and_older_ones_are_passed_over(tmp_path, caplog):
    """While one is consolidated the newest two wait, protected from pruning; older ones are passed over, with a notice, and for good."""
    job = Job(tmp_path, "every", let=False)
    job.save(1)
    assert job.begun.acquire(timeout=30)
    with caplog.at_level(logging.INFO, "everystep.consolidate"):
        for step in (2, 3, 4, 5):
            job.save(step)
        closing = threading.Thread(target=job.one.close)
        closing.start()
        job.let.set()
        closing.join(30)
    assert job.started == [1, 4, 5]
    assert [record.message for record in caplog.records if "faster" in record.message] == [
        "step 2 is not consolidated: checkpoints become due faster than they are consolidated",
        "step 3 is not consolidated: checkpoints become due faster than they are consolidated",
    ]


def test_protected_while_it_is_read(tmp_path):
    """A symbolic link beside the checkpoint keeps NeMo from pruning it, until it is read."""
    job = Job(tmp_path, "every", let=False)
    job.save(1)
    assert job.begun.acquire(timeout=30)
    assert links(tmp_path) == {"epoch_0_step_0"}
    job.let.set()
    job.one.close()
    assert links(tmp_path) == set()


def test_not_waiting_leaves_it_running_and_protected(tmp_path):
    """close(wait=False) starts what is due and returns; the link stays for the process, and the next job's first look sweeps it."""
    job = Job(tmp_path, "final", let=False)
    job.save(7)
    job.one.close(wait=False)
    assert job.started == [7]
    assert links(tmp_path) == {"epoch_0_step_6"}
    job.let.set()
    job.one._protection._lock, lock = None, job.one._protection._lock  # the job is gone, and its lock with it
    os.close(lock)
    later = Job(tmp_path, "never")
    later.one.close()
    assert links(tmp_path) == set()


def test_a_checkpoint_that_is_not_whole_is_not_tried_again(tmp_path, caplog):
    """A corrupt one is told of and left alone; one that found no room is tried again at the next save."""
    corrupt = Outcome(error=errors.CorruptionError("checkpoint is not whole: region missing"))
    full = Outcome(error=errors.CapacityError("no room"))
    job = Job(tmp_path, {"at": [1, 2]}, outcomes=[corrupt, full])
    told = Told()
    logging.getLogger("everystep.consolidate").addHandler(told)
    try:
        for step in (1, 2):
            job.save(step)
            assert told.more.acquire(timeout=30)
    finally:
        logging.getLogger("everystep.consolidate").removeHandler(told)
    job.save(3)
    job.one.close()
    assert job.started == [1, 2, 2]
    assert "step 1 is not consolidated: checkpoint is not whole: region missing" in caplog.text


def test_a_checkpoint_that_was_pruned_first(tmp_path, caplog):
    """One that is gone before its turn is told of, and the next is taken."""
    job = Job(tmp_path, "every", let=False)
    job.save(1)
    assert job.begun.acquire(timeout=30)
    (tmp_path / "epoch_0_step_1").mkdir()
    gone = Found(str(tmp_path / "epoch_0_step_1"), "automodel", 2, True, "", 1002.0, {}, "epoch_0_step_1")
    job.found.append(gone)
    (tmp_path / "epoch_0_step_1").rmdir()
    job.save(3)
    job.let.set()
    job.one.close()
    assert job.started == [1, 3]
    assert "step 2 is not consolidated" in caplog.text


def test_errors_of_looking_do_not_reach_training(tmp_path, caplog):
    """A store that fails while it is looked at is a warning, and the next look goes on."""
    answers = [OSError(5, "Input/output error"), []]

    def find(_):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    one = Consolidations(tmp_path, Consolidate(when="every"), find=find, history=list)
    one()
    one.close()
    assert "cannot look at the checkpoints" in caplog.text
    assert answers == []


def test_inactive_ranks_do_nothing(tmp_path):
    """Ranks that do not publish start no thread."""
    one = Consolidations(tmp_path, Consolidate(when="every"), active=False)
    one()
    one.close()
    assert one._thread is None


# -- recipes ------------------------------------------------------------------------------------------------------------------
def made(tmp_path, monkeypatch, block, **checkpoint):
    """The stand-in's consolidating subclass, set up, and the list of what it started."""
    calls = []

    class Spy(Consolidations):
        def __init__(self, root, options, **more):
            super().__init__(root, options, **{**more, "start": None, "find": lambda _: [], "history": list})
            calls.append(("opened", str(root), options, more["active"]))

        def __call__(self):
            calls.append(("saved",))

        def close(self, *, ended=True, wait=None):
            calls.append(("close", ended, wait))

    monkeypatch.setattr(automodel, "Consolidations", Spy)
    cfg = Node({"checkpoint": {"checkpoint_dir": str(tmp_path), **checkpoint}, **({} if block is None else {"consolidate": block})})
    recipe = automodel.consolidating(FakeRecipeForNextTokenPrediction)(cfg)
    recipe.setup()
    return recipe, calls


def test_recipe_tells_of_each_save_and_of_the_end(tmp_path, monkeypatch):
    """The subclass keeps the recipe's name and does what it does; after each save and at the end it says so."""
    recipe, calls = made(tmp_path, monkeypatch, {"when": {"every": 2}, "into": "latest"})
    recipe.run_train_validation_loop()
    assert type(recipe).__name__ == "FakeRecipeForNextTokenPrediction"
    assert recipe.saved == [0, 1, 2]
    assert calls == [
        ("opened", str(tmp_path), Consolidate(when={"every": 2}), True),
        ("saved",),
        ("saved",),
        ("saved",),
        ("close", True, None),
    ]
    assert recipe.cfg.get("checkpoint.save_consolidated") is False


def test_recipe_after_sigterm_starts_and_does_not_wait(tmp_path, monkeypatch):
    """A preempted job has little time (F57)."""
    recipe, calls = made(tmp_path, monkeypatch, "final")
    recipe.step_scheduler.sigterm_flag = True
    recipe.run_train_validation_loop()
    assert calls[-1] == ("close", True, False)


def test_recipe_that_fails_is_not_over(tmp_path, monkeypatch):
    """An exception of training comes through; what was due is started, `final` is not due."""
    recipe, calls = made(tmp_path, monkeypatch, "final")
    recipe.fails_at = 1
    with pytest.raises(RuntimeError, match="a rank died"):
        recipe.run_train_validation_loop()
    assert calls[-1] == ("close", False, False)


def test_recipe_without_the_block_is_nemos(tmp_path, monkeypatch):
    """No block: nothing is opened actively, and NeMo's own setting stays as it is."""
    recipe, calls = made(tmp_path, monkeypatch, None)
    recipe.run_train_validation_loop()
    assert calls[0] == ("opened", ".", Consolidate(when="never"), False)
    assert recipe.cfg.get("checkpoint.save_consolidated") is None


def test_recipe_with_nemos_consolidation_too_warns(tmp_path, monkeypatch, caplog):
    """What the YAML says of save_consolidated stays, with a warning that training waits for it."""
    recipe, _ = made(tmp_path, monkeypatch, "every", save_consolidated="every")
    assert recipe.cfg.get("checkpoint.save_consolidated") == "every"
    assert "NeMo consolidates too" in caplog.text


@pytest.mark.parametrize("checkpoint", [{"enabled": False}, {"checkpoint_dir": "msc://bucket/run"}], ids=str)
def test_recipe_without_a_folder_of_checkpoints(tmp_path, monkeypatch, checkpoint):
    """Checkpointing that is off, or goes to a place that is no folder, leaves nothing to consolidate."""
    recipe, calls = made(tmp_path, monkeypatch, "every", **checkpoint)
    recipe.run_train_validation_loop()
    assert calls[0][3] is False


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"when": "sometimes"}, "sometimes"),
        ({"when": "every", "dtpye": "bf16"}, "dtpye"),
        ({"every": 5}, "when"),
        ({"when": "every", "into": "lastest"}, "lastest"),
        ({"when": "every", "drop_shards": "all"}, "drop_shards"),
        ({"when": "every", "into": "s3://bucket/models"}, "s3://bucket/models"),
    ],
    ids=str,
)
def test_unknown_words_before_training(block, says):
    """A word that is not known is one line when the recipe is made, before anything of NeMo's is built."""

    class Never(FakeRecipeForNextTokenPrediction):
        def __init__(self, cfg):
            raise AssertionError("built")

    with pytest.raises(errors.ConfigError) as caught:
        automodel.consolidating(Never)(Node({"consolidate": block}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("block", "when"),
    [
        ("every", "every"),
        (True, "every"),
        (False, "never"),
        ({"every": 5}, None),
        (Node({"when": [{"every": "30min"}, "final"]}), [{"every": "30min"}, "final"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Node) else str(value),
)
def test_what_the_block_may_be(block, when):
    """A word or NeMo's true and false are `when`; a mapping is the block."""
    if when is None:
        block, when = Node({"when": block}), block
    assert settled(block) == Consolidate(when=when)


def test_names_of_recipes_without_nemo():
    """Only names of recipes import NeMo, and say what to install; everything else is an ordinary AttributeError."""
    with pytest.raises(AttributeError, match="no attribute 'consolidate'"):
        _ = automodel.consolidate
    if "nemo_automodel" not in sys.modules:
        with pytest.raises(ImportError, match="pip install nemo-automodel"):
            _ = automodel.TrainFinetuneRecipeForNextTokenPrediction


def test_importing_does_not_import_torch_or_nemo():
    """The module starts fast and imports NeMo only when a recipe is asked for."""
    program = "import everystep.integrations.automodel, sys; sys.exit(any(name in sys.modules for name in ('torch', 'nemo_automodel', 'everystep.consolidate.job')))"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_checkpoints_that_are_no_folder():
    """A URL is refused with what to do instead."""
    with pytest.raises(errors.ConfigError, match="is no folder"):
        consolidate_checkpoints("msc://bucket/run", "every")


# -- the data that NeMo wrote, and the real process ---------------------------------------------------------------------------
def read_safetensors(path):
    """Names -> (dtype, shape, bytes), by the format's definition."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return {
        name: (one["dtype"], tuple(one["shape"]), data[8 + size + one["data_offsets"][0] : 8 + size + one["data_offsets"][1]])
        for name, one in header.items()
        if name != "__metadata__"
    }, header.get("__metadata__", {})


def rebuilt(model):
    """Whole tensors from two ranks' shards, by hand: rows one after the other."""
    parts = [read_safetensors(path)[0] for path in sorted(model.glob("shard-*.safetensors"))]
    return {
        name: (dtype, (sum(part[name][1][0] for part in parts), *shape[1:]), b"".join(part[name][2] for part in parts))
        for name, (dtype, shape, _) in parts[0].items()
    }


def test_data_is_what_nemo_says_of_it():
    """The committed checkpoints: NeMo's own consolidation equals the shards bit by bit without a base model, and is cast to the base's dtype with one."""
    assert (
        rebuilt(DATA / "every/epoch_0_step_1/model")
        == read_safetensors(DATA / "every/epoch_0_step_1/model/consolidated/model-00001-of-00001.safetensors")[0]
    )
    model = DATA / "mapped/epoch_0_step_1/model"
    cast = {name: one for path in model.glob("consolidated/*.safetensors") for name, one in read_safetensors(path)[0].items()}
    whole = rebuilt(model)
    assert cast.keys() == whole.keys()
    for name, (dtype, shape, data) in cast.items():
        wide = np.frombuffer(whole[name][2], "<f4").view("<u4").astype("<u8")
        nearest = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2")  # round to nearest even
        assert (dtype, shape, data) == ("BF16", whole[name][1], nearest.tobytes())


@pytest.mark.timeout(100)
def test_consolidates_what_nemo_wrote(tmp_path, caplog):
    """The real process on real checkpoints: `improves` and `final` make an export each, equal to the shards; a second job finds all done (F57)."""
    root = tmp_path / "checkpoints"
    for name in ("epoch_0_step_1", "epoch_1_step_5"):
        shutil.copytree(DATA / "run" / name, root / name)
    before = set(root.rglob("*"))
    knob = {"when": [{"improves": "val_loss"}, "final"], "keep": None}
    with caplog.at_level(logging.INFO, "everystep.consolidate"), consolidate_checkpoints(root, knob) as saved:
        saved()
    exports = root / "exports"
    keys = {name for name in os.listdir(exports) if name.startswith("model-")}
    assert keys == {"model-epoch_0_step_1", "model-epoch_1_step_5"}, caplog.text
    assert os.readlink(exports / "LATEST") == "model-epoch_1_step_5"
    for key in keys:
        (written,) = (exports / key).glob("*.safetensors")
        assert read_safetensors(written)[0] == rebuilt(root / key.removeprefix("model-") / "model")
        assert json.loads((exports / key / "config.json").read_text())["model_type"] == "qwen3"
    assert {path for path in root.rglob("*") if exports not in (path, *path.parents)} == before
    caplog.clear()
    with caplog.at_level(logging.INFO, "everystep.consolidate"):
        consolidate_checkpoints(root, {"when": ["every", "final"]}).close()
    assert caplog.text == ""


@pytest.mark.timeout(60)
def test_missing_shard_is_told_of_and_training_goes_on(tmp_path, caplog):
    """F6: without one of two shards there is no export, and a warning that names what is missing."""
    root = tmp_path / "checkpoints"
    shutil.copytree(DATA / "run" / "epoch_0_step_3", root / "epoch_0_step_3")
    (root / "epoch_0_step_3/model/shard-00002-model-00001-of-00001.safetensors").unlink()
    consolidate_checkpoints(root, "final").close()
    assert "is not consolidated" in caplog.text
    assert not list((root / "exports").glob("model-*"))
