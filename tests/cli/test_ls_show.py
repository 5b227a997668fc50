"""ls and show: what they say of runs whose content is known."""

from __future__ import annotations

import time

import numpy as np

from everystep.repository import CheckpointKey
from everystep.testing.samples import persist


def test_ls_lists_every_checkpoint_and_marks_the_newest_and_the_best(everystep, three):
    """Ls --json lists all checkpoints in order, with the newest and the one of lowest loss marked."""
    rows = everystep("ls", three.path, "--json").json["checkpoints"]
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert [row["newest"] for row in rows] == [False, False, True]
    assert [row["best"] for row in rows] == [False, True, False]
    assert [row["metrics"] for row in rows] == [{"val_loss": 3.0}, {"val_loss": 1.0}, {"val_loss": 2.0}]
    assert all(row["where"] == ["disk"] and row["in_lineage"] and not row["pinned"] and row["verified"] is None for row in rows)
    sizes = [sum(path.stat().st_size for path in three.files(row["key"])) for row in rows]
    assert [row["nbytes"] for row in rows] == sizes


def test_ls_mode_max_marks_the_highest(everystep, three):
    """--mode max turns the choice of the best around."""
    rows = everystep("ls", three.path, "--metric", "val_loss", "--mode", "max", "--json").json["checkpoints"]
    assert [row["step"] for row in rows if row["best"]] == [10]


def test_ls_of_an_unknown_metric_names_those_there_are(everystep, three):
    """A metric that no checkpoint has is not found, and the answer names the others."""
    answer = everystep("ls", three.path, "--metric", "accuracy")
    assert answer.code == 10
    assert "'accuracy'" in answer.stderr
    assert "val_loss" in answer.stderr


def test_ls_as_a_table_has_a_line_for_each_checkpoint(everystep, made, arrays):
    """The table shows step, attempt, age, size and place of each checkpoint."""
    made.save(7, arrays(1), saved_at=time.time() - 180)
    answer = everystep("ls", made.path)
    assert answer.code == 0
    line = next(line for line in answer.stdout.splitlines() if line.startswith("*"))
    assert line.split()[:7] == ["*", "7", "1", "3", "min", *line.split()[5:7]]
    assert "disk" in line
    assert "1 checkpoint on disk" in answer.stdout


def test_ls_of_a_run_without_checkpoints_is_no_error(everystep, made):
    """A run that has saved nothing yet is listed as empty."""
    assert everystep("ls", made.path).stdout.rstrip().endswith("no checkpoint yet")
    assert everystep("ls", made.path, "--json").json["checkpoints"] == []


def test_ls_marks_an_abandoned_timeline(everystep, three, arrays):
    """F51: what lies behind the step that a later attempt resumed from is marked as abandoned and is never the newest."""
    keys = three.repository.keys()
    three.begin(parent=keys[0])
    three.save(11, arrays(11))
    rows = {row["key"]: row for row in everystep("ls", three.path, "--json").json["checkpoints"]}
    assert {key: row["in_lineage"] for key, row in rows.items()} == {
        "000000000010-0001": True, "000000000020-0001": False, "000000000030-0001": False, "000000000011-0002": True,
    }  # fmt: skip
    assert [key for key, row in rows.items() if row["newest"]] == ["000000000011-0002"]
    assert everystep("ls", three.path).stdout.count("abandoned") == 2


def test_ls_of_a_damaged_manifest_shows_the_rest_and_exits_with_12(everystep, three):
    """F7: one unreadable manifest is marked, the older checkpoint becomes the newest, and the exit code says corruption."""
    path = three.path / "manifests" / "000000000030-0001.json"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    answer = everystep("ls", three.path, "--json")
    assert answer.code == 12
    rows = answer.json["checkpoints"]
    assert [bool(row["damage"]) for row in rows] == [False, False, True]
    assert [row["newest"] for row in rows] == [False, True, False]
    assert answer.stderr.startswith("error: ")
    assert len(answer.stderr.splitlines()) == 1


def test_show_tells_tensors_groups_values_and_origin(everystep, three, arrays):
    """Show --json has every tensor with dtype, shape and bytes, sums by group, plain values, metrics and the attempt's versions."""
    found = everystep("show", three.path, "20", "--tensors", "--json").json
    expected = arrays(20)
    assert {item["name"]: (item["shape"], item["nbytes"]) for item in found["tensors"]} == {
        name: (list(array.shape), array.nbytes) for name, array in expected.items()
    }
    assert {item["dtype"] for item in found["tensors"]} == {"F32"}
    groups = {group["group"]: group for group in found["groups"]}
    assert groups["model"]["tensors"] == 2
    assert groups["model"]["elements"] == 5 * 7 + 7
    assert groups["optim"]["nbytes"] == expected["optim.state.weight.exp_avg"].nbytes + 4
    assert found["values"] == {"note.step": 20, "note.name": "x"}
    assert found["metrics"] == {"val_loss": 1.0}
    assert found["versions"] == {"everystep": "0.1.0", "torch": "2.13.0"}
    assert (found["step"], found["attempt"], found["read_from"], found["resumed_from"]) == (20, 1, "disk", None)
    assert [file["nbytes"] for file in found["files"]] == [path.stat().st_size for path in three.files(found["key"])]


def test_show_takes_the_newest_by_default_a_number_or_a_whole_key(everystep, three):
    """No step and `latest` mean the newest; a key means exactly that checkpoint."""
    shown = [everystep("show", three.path, *step, "--json").json["step"] for step in ([], ["latest"], ["10"], ["000000000020-0001"])]
    assert shown == [30, 30, 10, 20]


def test_show_says_what_an_attempt_resumed_from(everystep, three, arrays):
    """A checkpoint of a later attempt names the one that attempt went on from."""
    three.begin(parent=three.repository.find(20))
    three.save(21, arrays(21))
    assert everystep("show", three.path, "--json").json["resumed_from"] == "000000000020-0001"
    assert "000000000020-0001" in everystep("show", three.path).stdout


def test_show_prints_values_of_every_kind(everystep, made, arrays):
    """F23: plain values that JSON cannot tell are shown as short texts, and long ones are cut, not folded out."""
    plain = {
        "big": 1 << 80, "nan": float("nan"), "pair": (1, "b"), "raw": b"abcd", "none": None, "empty": {}, "list": list(range(700)),
        "by number": {3: "three"}, "scalar": np.float32(1.5), "members": {1, 2},
    }  # fmt: skip
    made.save(1, arrays(1), plain=plain)
    found = everystep("show", made.path, "--json").json["values"]
    assert found["big"] == 1 << 80
    assert found["nan"] == "nan"
    assert (found["pair[0]"], found["pair[1]"]) == (1, "b")
    assert found["raw"] == "<4 bytes>"
    assert found["none"] is None
    assert found["list"] == "[0, 1, 2, 3, 4, 5, ... 700 items]"
    assert found["by number.3"] == "three"
    assert (found["members[0]"], found["members[1]"]) == (1, 2)
    assert everystep("show", made.path).code == 0


def test_reduced_checkpoints_say_what_they_lack(everystep, made):
    """A reduced one is listed with the groups that were dropped, is never the newest, and is found by its step; its old key leads to the new one."""
    for step in (1, 2):
        made.repository.commit(persist(made.repository, CheckpointKey(step, 1), metrics={"loss": 1.0 / step}, optimizer=True))
    made.repository.reduce(CheckpointKey(1, 1), drop=["optim"])
    rows = everystep("ls", made.path, "--json").json["checkpoints"]
    assert [(row["key"], row["reduced"], row["dropped"], row["newest"]) for row in rows] == [
        ("000000000001-0001-r1", 1, ["optim"], False), ("000000000002-0001", 0, [], True)
    ]  # fmt: skip
    assert rows[0]["metrics"] == {"loss": 1.0}
    table = everystep("ls", made.path).stdout
    assert table.count("without optim") == 1
    shown = everystep("show", made.path, "1", "--json").json
    assert (shown["key"], shown["dropped"], [group["group"] for group in shown["groups"]]) == ("000000000001-0001-r1", ["optim"], ["model"])
    assert "without optim" in everystep("show", made.path, "1").stdout
    gone = everystep("show", made.path, "000000000001-0001")
    assert gone.code == 10
    assert "it was reduced to 000000000001-0001-r1" in gone.stderr
    assert everystep("verify", made.path, "--all").code == 0
    assert everystep("show", made.path, "--json").json["dropped"] == []
    assert everystep("forget", made.path, "1", "--yes").code == 0
    assert [row["step"] for row in everystep("ls", made.path, "--json").json["checkpoints"]] == [2]
