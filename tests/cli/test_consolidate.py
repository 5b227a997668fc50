"""consolidate and exports: what they print, what they refuse, and what lies there afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file

from everystep import Checkpointer

STATE = {"state": {"dict": [["model", {"module": {}}], ["optim", {"optimizer": {}}]]}}
"""The structure of a state with a module and its optimizer, as a trainer tells it."""


@pytest.fixture
def three(made, arrays):
    """A run with the steps 10, 20, 30; 20 has the lowest loss."""
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        made.save(step, arrays(step), plain=STATE, metrics={"val_loss": loss})
    return made


def tensors(folder):
    """All tensors of an export, by way of its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        found.update(load_file(folder / file))
    assert found.keys() == index["weight_map"].keys()
    return found


def is_model_of(folder, arrays):
    """Whether an export holds exactly the model of these arrays, bit for bit."""
    wanted = {name.removeprefix("model."): array for name, array in arrays.items() if name.startswith("model.")}
    found = tensors(folder)
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def steps(everystep, path):
    """Steps that were exported, in order."""
    return [row["step"] for row in everystep("exports", path, "--json").json["exports"]]


def test_the_newest_is_written_once_and_linked(everystep, three, arrays, tmp_path):
    """One JSON object; an own checkpoint is linked; the second call finds it there; LATEST leads to it."""
    told = everystep("consolidate", three.path, "--json")
    assert told.code == 0, told
    assert told.json.keys() >= {"path", "step", "key", "nbytes", "linked", "seconds", "already"}
    assert (told.json["step"], told.json["key"], told.json["already"]) == (30, "000000000030-0001", False)
    assert told.json["linked"] == told.json["nbytes"]
    folder = three.path / "exports" / "LATEST"
    assert str(folder.resolve()) == told.json["path"]
    assert is_model_of(folder, arrays(30))
    again = everystep("consolidate", three.path, "--json").json
    assert (again["path"], again["already"]) == (told.json["path"], True)
    assert "was there already" in everystep("consolidate", three.path).stdout
    assert everystep("consolidate", three.path, "--force", "--json").json["already"] is False


def test_an_own_run_is_consolidated_without_torch(three):
    """Neither torch nor anything that brings it is imported: `everystep consolidate` starts fast."""
    code = "import sys; from everystep.cli.app import app\ntry: app()\nfinally: print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    command = [sys.executable, "-c", code, "consolidate", str(three.path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("which", "step"), [("10", 10), ("000000000020-0001", 20), ("best", 20), ("best:val_loss:max", 10), ("latest", 30)])
def test_which(everystep, three, which, step):
    """A number, a key, the best by a metric, the newest."""
    assert everystep("consolidate", three.path, which, "--json").json["step"] == step


@pytest.mark.parametrize("which", ["40", "000000000010-0007"])
def test_a_checkpoint_that_is_not_there(everystep, three, which):
    """Not found, in one line, and nothing is made."""
    told = everystep("consolidate", three.path, which, "--json")
    assert told.code == 10
    assert told.json["error"]["name"] == "NotFoundError"
    assert told.stderr.count("\n") == 1
    assert not (three.path / "exports").exists()


def test_dry_run_of_a_schedule_says_why_and_does_nothing(everystep, three):
    """Each checkpoint with its decision and reason, the plan of those that are due, and no export."""
    told = everystep("consolidate", three.path, "--when", "improves: val_loss", "--dry-run", "--json")
    assert told.code == 0, told
    assert [(one["step"], one["due"]) for one in told.json["decisions"]] == [(10, True), (20, True), (30, False)]
    assert all(one["reason"] for one in told.json["decisions"])
    assert [plan["step"] for plan in told.json["plans"]] == [10, 20]
    assert all(file["linked"] for plan in told.json["plans"] for file in plan["files"])
    text = everystep("consolidate", three.path, "--when", "improves: val_loss", "--dry-run").stdout
    assert "not due" in text
    assert "step 20 (000000000020-0001):" in text
    assert not (three.path / "exports").exists()


def test_dry_run_of_one_shows_its_plan(everystep, three):
    """Without a schedule the plan of the one that is meant."""
    told = everystep("consolidate", three.path, "20", "--dry-run", "--json").json
    assert [plan["step"] for plan in told["plans"]] == [20]
    assert told["decisions"] == []


def test_when_consolidates_what_is_due_and_not_done_yet(everystep, three, arrays):
    """Due ones in order, each with its reason; called again nothing is due; a new checkpoint is."""
    told = everystep("consolidate", three.path, "--when", "every: 20", "--json").json
    assert [one["step"] for one in told["exported"]] == [20]
    assert [one["due"] for one in told["decisions"]] == [False, True, False]
    again = everystep("consolidate", three.path, "--when", "every: 20")
    assert again.code == 0
    assert "nothing is due" in again.stdout
    three.save(40, arrays(40), plain=STATE)
    assert [one["step"] for one in everystep("consolidate", three.path, "--when", "every: 20", "--json").json["exported"]] == [40]


@pytest.mark.parametrize("flags", [["--final"], ["--when", "final"]])
def test_final_is_done_once(everystep, three, flags):
    """F57: the newest checkpoint of a run that is over; a second call does nothing and is no error."""
    assert everystep("consolidate", three.path, *flags).code == 0
    assert steps(everystep, three.path) == [30]
    told = everystep("consolidate", three.path, *flags)
    assert told.code == 0
    assert "nothing is due" in told.stdout
    assert steps(everystep, three.path) == [30]


def test_final_after_the_checkpoint_went_takes_no_older_one(everystep, three):
    """F57: the checkpoint that was exported as the final one may be forgotten since; what is the newest then was not the final one."""
    assert everystep("consolidate", three.path, "--final").code == 0
    assert everystep("forget", three.path, "30", "--yes", "--force").code == 0
    assert everystep("consolidate", three.path, "--final").code == 0
    assert steps(everystep, three.path) == [30]


def test_what_became_of_the_shards_is_said(everystep, three):
    """--drop-shards: an older checkpoint is forgotten once it is exported; the newest stays, with the reason."""
    told = everystep("consolidate", three.path, "20", "--drop-shards", "all", "--json")
    assert told.code == 0, told
    assert "000000000020-0001" in told.json["dropped"]
    assert [row["step"] for row in everystep("ls", three.path, "--json").json["checkpoints"]] == [10, 30]
    assert "stays" in everystep("consolidate", three.path, "30", "--drop-shards", "all").stdout


def test_final_with_a_schedule_does_both(everystep, three):
    """--when with --final: what the schedule still asks for, and the newest."""
    assert everystep("consolidate", three.path, "--when", "at: [10]", "--final", "--keep", "all").code == 0
    assert steps(everystep, three.path) == [10, 30]


@pytest.mark.parametrize("kind", ["json", "yaml", "block", "stdin"])
def test_settings_from_a_file_and_flags_over_them(everystep, three, tmp_path, kind):
    """JSON, YAML, the block of a recipe, or stdin; a flag goes before the file."""
    file = tmp_path / "settings"
    text = {"json": '{"name": "small", "dtype": "fp16"}', "stdin": '{"name": "small", "dtype": "fp16"}'}.get(kind, "name: small\ndtype: fp16\n")
    if kind == "block":
        text = "model: other\nconsolidate:\n  name: small\n  dtype: fp16\n"
    file.write_text(text)
    at = "-" if kind == "stdin" else file
    told = everystep("consolidate", three.path, "20", "--settings", at, "--dtype", "keep", "--json", stdin=text if kind == "stdin" else None)
    assert told.code == 0, told
    assert os.path.basename(told.json["path"]).startswith("small-")
    assert told.json["linked"] == told.json["nbytes"]


def test_due_follows_the_when_of_the_settings(everystep, three, tmp_path):
    """A settings file's schedule is asked with --due only: without, WHICH is what was asked for."""
    (tmp_path / "s.json").write_text('{"when": {"at": [10]}, "keep": null}')
    assert everystep("consolidate", three.path, "--settings", tmp_path / "s.json", "--due").code == 0
    assert steps(everystep, three.path) == [10]
    assert everystep("consolidate", three.path, "--settings", tmp_path / "s.json").code == 0
    assert steps(everystep, three.path) == [10, 30]


def test_yaml_without_a_yaml_library_is_one_clear_line(everystep, three, tmp_path, monkeypatch):
    """PyYAML is no dependency: what to do is said."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "s.yaml").write_text("when: final\n")
    told = everystep("consolidate", three.path, "--settings", tmp_path / "s.yaml")
    assert told.code == 2
    assert told.stderr.count("\n") == 1
    assert "PyYAML" in told.stderr
    assert "JSON" in told.stderr


WRONG = [
    (["10", "--when", "every"], "WHICH"),
    (["10", "--final"], "--final"),
    (["--when", "sometimes"], "every"),
    (["--when", "{every: 5"], "when"),
    (["--dtype", "int4"], "bf16"),
    (["--into", "lates"], "latest"),
    (["--rename", "abc"], "="),
    (["--rename", "(=b"], "("),
    (["--keep", "few"], "--keep"),
    (["--drop-shards", "some"], "optimizer"),
    (["--max-shard-size", "5 bananas"], "GB"),
    (["--settings", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
    (["--name", "a/b"], "name"),
    (["--group", "nothing"], "nothing"),
    (["--workers", "0"], "--workers"),
]


@pytest.mark.parametrize(("words", "named"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_what_is_typed_wrongly_is_one_line(everystep, three, words, named):
    """Usage errors name what was wrong, before anything is written."""
    told = everystep("consolidate", three.path, *words, "--json")
    assert told.code in {2, 10}, told
    assert named in told.stderr
    assert told.stderr.startswith("error: ")
    assert told.stderr.count("\n") == 1
    assert told.json["error"]["exit_code"] == told.code
    assert not (three.path / "exports").exists()


@pytest.mark.parametrize("content", ["[1, 2]", '{"wen": "final"}', "a: b: c", "\ufffe"])
def test_settings_that_are_none(everystep, three, tmp_path, content):
    """No mapping, an unknown word, broken YAML: one line, exit code 2."""
    (tmp_path / "s").write_text(content)
    told = everystep("consolidate", three.path, "--settings", tmp_path / "s")
    assert told.code == 2, told
    assert told.stderr.count("\n") == 1


@pytest.mark.parametrize("made", ["nothing", "file", "empty", "other"])
def test_what_is_no_checkpoint(everystep, tmp_path, made):
    """A path that is not there, a file, an empty folder, a folder of something else: said, and nothing is made."""
    path = tmp_path / "x"
    if made == "file":
        path.write_bytes(b"abc")
    elif made != "nothing":
        path.mkdir()
    if made == "other":
        (path / "notes.txt").write_text("none")
    for words in ([], ["--final"], ["--when", "every", "--dry-run"]):
        told = everystep("consolidate", path, *words)
        assert told.code in {2, 10}, (words, told)
        assert told.stderr.count("\n") == 1
        assert str(path) in told.stderr
    assert sorted(os.listdir(tmp_path)) == ([] if made == "nothing" else ["x"])


def test_a_damaged_checkpoint_is_not_exported(everystep, three, arrays):
    """F6: with a data file gone nothing is published; the exit code is 12, and the schedule goes on with the others."""
    three.files("000000000020-0001")[0].unlink()
    told = everystep("consolidate", three.path, "20", "--json")
    assert told.code == 12, told
    told = everystep("consolidate", three.path, "--when", "every", "--keep", "all")
    assert told.code == 12, told
    assert told.stderr.count("\n") == 1
    assert steps(everystep, three.path) == [10, 30]
    assert is_model_of(three.path / "exports" / "LATEST", arrays(30))


def test_into_a_folder_and_into_the_checkpoint(everystep, three, arrays, tmp_path):
    """A path takes the exports and their LATEST; `checkpoint` puts one beside the shards."""
    told = everystep("consolidate", three.path, "10", "--into", tmp_path / "served", "--json").json
    assert is_model_of(tmp_path / "served" / "LATEST", arrays(10))
    assert told["path"].startswith(str(tmp_path / "served"))
    told = everystep("consolidate", three.path, "10", "--into", "checkpoint", "--json").json
    assert told["path"] == str(three.path / "data" / "000000000010-0001" / "consolidated")
    assert everystep("consolidate", three.path, "--when", "every", "--into", "checkpoint", "--json").json["decisions"][0]["due"] is False


def test_what_is_asked_for_reaches_the_export(everystep, three, arrays, tmp_path):
    """include, rename, dtype and assets as flags."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text('{"model_type": "x"}')
    flags = ["--include", "w*", "--rename", "^weight$=w.0", "--dtype", "fp16", "--assets", tmp_path / "assets"]
    told = everystep("consolidate", three.path, "10", *flags, "--json")
    assert told.code == 0, told
    folder = three.path / "exports" / "LATEST"
    found = tensors(folder)
    assert list(found) == ["w.0"]
    assert np.array_equal(found["w.0"], arrays(10)["model.weight"].astype(np.float16))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "x"


def test_several_processes_write_the_same_bytes(everystep, three, arrays):
    """--workers: the files are those of one process."""
    one = everystep("consolidate", three.path, "10", "--dtype", "fp16", "--name", "one", "--json").json
    two = everystep("consolidate", three.path, "10", "--dtype", "fp16", "--name", "two", "--workers", "2", "--json")
    assert two.code == 0, two
    found = [{name: array.tobytes() for name, array in tensors(three.path / "exports" / f"{name}-000000000010-0001").items()} for name in ("one", "two")]
    assert found[0] == found[1]
    assert one["nbytes"] == two.json["nbytes"]


def test_exports_shows_what_is_there_and_what_is_gone(everystep, three):
    """Rows in order of time, with reason, size, LATEST and BEST; an export that was pruned is still told of."""
    for step in ("10", "20", "30"):
        assert everystep("consolidate", three.path, step).code == 0
    told = everystep("exports", three.path, "--json").json
    assert [(row["step"], row["nbytes"] is None, row["latest"]) for row in told["exports"]] == [
        (10, True, False), (20, False, False), (30, False, True),
    ]  # fmt: skip
    assert told["latest"] == told["exports"][2]["folder"]
    text = everystep("exports", three.path).stdout
    assert "gone" in text
    assert "LATEST" in text
    assert everystep("exports", three.path / "exports", "--json").json == told
    assert everystep("exports", three.path, "--name", "other", "--json").json["exports"] == []
    assert everystep("consolidate", three.path, "10", "--name", "other").code == 0
    assert [row["step"] for row in everystep("exports", three.path, "--name", "other", "--json").json["exports"]] == [10]
    assert len(everystep("exports", three.path, "--json").json["exports"]) == 4


def test_exports_of_nothing(everystep, three, tmp_path):
    """A run without exports has none; what is no run is an error that says how to make one."""
    assert everystep("exports", three.path, "--json").json["exports"] == []
    assert "no export" in everystep("exports", three.path).stdout
    assert everystep("exports", tmp_path / "nothing").code == 10
    (tmp_path / "empty").mkdir()
    told = everystep("exports", tmp_path / "empty")
    assert told.code == 10
    assert "everystep consolidate" in told.stderr


def test_background_gives_way():
    """The lowest priority for the processor, the idle class for the disk."""
    code = "import os, psutil; from everystep.cli.consolidate import give_way; give_way(); print(os.nice(0), int(psutil.Process().ionice().ioclass))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["19", str(int(psutil.IOPRIO_CLASS_IDLE))]


def test_with_parent_the_child_dies_when_its_parent_is_killed():
    """SIGKILL of whoever started it, who can do nothing about it any more, ends the child."""
    child = "from everystep.cli.consolidate import die_with_parent; import os; die_with_parent(os.getppid()); print('up', flush=True); import signal; signal.pause()"
    parent = (
        "import subprocess, sys, os, signal\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        found = psutil.Process(int(process.stdout.readline()))
        process.kill()
        _, alive = psutil.wait_procs([found], timeout=20)
    assert alive == []


def test_an_abandoned_timeline_is_not_counted(everystep, made, arrays):
    """A run that went on from step 10 in a second attempt: what the first one saved after that is not due and not the newest."""
    for step in (10, 20):
        made.save(step, arrays(step), plain=STATE)
    made.begin(parent=made.repository.find(10))
    made.save(15, arrays(15), plain=STATE)
    told = everystep("consolidate", made.path, "--when", "every", "--final", "--dry-run", "--json").json
    assert [one["key"] for one in told["decisions"]] == ["000000000010-0001", "000000000015-0002"]


def test_a_child_whose_parent_is_gone_already_does_nothing(everystep, three):
    """Killed between starting the child and the child's first act: told by the process id that is not its parent's."""
    assert everystep("consolidate", three.path, "--parent", "1").code == 1
    assert not (three.path / "exports").exists()


def test_another_run_in_the_same_folder_is_not_this_ones_past(everystep, three, tmp_path):
    """Two runs into one folder: steps of one are not done because the other has exported steps of the same keys."""
    other = tmp_path / "other"
    with Checkpointer(other, agent=False) as ckpt:
        ckpt.save(30, {"model": torch.nn.Linear(2, 2)}, sync=True)
    words = ["--when", "at: [30]", "--into", str(tmp_path / "models"), "--json"]
    for path in (three.path, other):
        told = everystep("consolidate", path, *words).json
        assert [one["step"] for one in told["exported"]] == [30]
        assert everystep("consolidate", path, *words).json["exported"] == []
