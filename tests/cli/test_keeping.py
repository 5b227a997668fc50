"""verify, pin, forget, sweep: what they change and what they refuse."""

from __future__ import annotations

import os
import pty

import pytest


def flip(path, at=-1):
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def steps(everystep, run):
    """Steps that ls shows."""
    return [row["step"] for row in everystep("ls", run, "--json").json["checkpoints"]]


def test_verify_of_a_good_checkpoint_is_recorded(everystep, three):
    """Verify reads every data file, exits with 0, and ls shows the result from then on."""
    found = everystep("verify", three.path, "--json")
    assert found.code == 0
    [checkpoint] = found.json["checkpoints"]
    assert checkpoint["good"]
    assert checkpoint["step"] == 30
    assert checkpoint["nbytes"] >= sum(path.stat().st_size for path in three.files(checkpoint["key"]))
    assert [row["verified"] for row in everystep("ls", three.path, "--json").json["checkpoints"]] == [None, None, True]


def test_verify_all_names_the_damaged_object_and_goes_on(everystep, three):
    """F7: with one bit flipped in the middle checkpoint, --all checks all three, names the file, exits with 12, and records both results."""
    path = three.files("000000000020-0001")[0]
    flip(path)
    answer = everystep("verify", three.path, "--all", "--json")
    assert answer.code == 12
    assert [item["good"] for item in answer.json["checkpoints"]] == [True, False, True]
    [bad] = answer.json["checkpoints"][1]["bad"]
    assert bad["object"].endswith(path.name)
    assert answer.stderr.startswith("error: 1 checkpoint of 3 failed")
    assert [row["verified"] for row in everystep("ls", three.path, "--json").json["checkpoints"]] == [True, False, True]
    assert "CORRUPT" in everystep("verify", three.path, "20").stdout


def test_verify_of_a_missing_file_and_of_a_damaged_manifest(everystep, three):
    """F6, F7: a file that is gone and a manifest that cannot be read are findings of exit code 12."""
    three.files("000000000010-0001")[0].unlink()
    flip(three.path / "manifests" / "000000000020-0001.json", at=100)
    answers = [everystep("verify", three.path, step, "--json") for step in ("10", "20")]
    assert [answer.code for answer in answers] == [12, 12]
    assert all(answer.json["checkpoints"][0]["bad"] for answer in answers)


def test_verify_of_a_step_and_all_together_is_a_usage_error(everystep, three):
    """Two answers to the same question are refused."""
    assert everystep("verify", three.path, "10", "--all").code == 2


def test_pin_protects_and_remove_takes_it_away(everystep, three):
    """A pinned checkpoint is shown as pinned and not forgotten; without its pin it is."""
    assert everystep("pin", three.path, "10", "--json").json["pinned"] is True
    assert [row["pinned"] for row in everystep("ls", three.path, "--json").json["checkpoints"]] == [True, False, False]
    refused = everystep("forget", three.path, "10", "--yes", "--json")
    assert (refused.code, refused.json["error"]["kind"]) == (11, "pinned")
    assert everystep("pin", three.path, "10", "--remove").code == 0
    assert everystep("forget", three.path, "10", "--yes").code == 0
    assert steps(everystep, three.path) == [20, 30]


def test_forget_deletes_the_data_and_says_how_much(everystep, three):
    """Forgotten steps are gone from the list and their data from the disk."""
    size = sum(path.stat().st_size for step in (10, 20) for path in three.files(f"{step:012d}-0001"))
    found = everystep("forget", three.path, "10", "20", "--yes", "--json").json
    assert found["freed_nbytes"] >= size
    assert steps(everystep, three.path) == [30]
    assert not three.files("000000000010-0001")


def test_forget_refuses_the_newest_good_one_and_changes_nothing(everystep, three):
    """The newest good checkpoint needs --force; when it is refused, no other step of the same call is forgotten either."""
    answer = everystep("forget", three.path, "10", "latest", "--yes", "--json")
    assert (answer.code, answer.json["error"]["kind"]) == (11, "newest-good")
    assert steps(everystep, three.path) == [10, 20, 30]
    assert everystep("forget", three.path, "latest", "--yes", "--force").code == 0
    assert steps(everystep, three.path) == [10, 20]


def test_forget_protects_the_newest_good_one_when_newer_ones_are_damaged(everystep, three):
    """F41: a newest checkpoint that failed verification may be forgotten, and the good one before it is what is protected."""
    flip(three.files("000000000030-0001")[0])
    everystep("verify", three.path, "30")
    assert everystep("forget", three.path, "20", "--yes").code == 11
    assert everystep("forget", three.path, "30", "--yes").code == 0
    assert steps(everystep, three.path) == [10, 20]


def test_forget_with_force_takes_a_pinned_one(everystep, three):
    """--force forgets a pinned checkpoint, pin and all."""
    everystep("pin", three.path, "10")
    assert everystep("forget", three.path, "10", "--yes", "--force").code == 0
    assert steps(everystep, three.path) == [20, 30]
    assert not list((three.path / "pins").glob("*"))


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_forget_without_yes_and_without_a_terminal_is_refused(everystep, three, extra):
    """Where nobody can be asked, nothing is deleted, and the answer says to say --yes."""
    answer = everystep("forget", three.path, "10", *extra)
    assert answer.code == 2
    assert "--yes" in answer.stderr
    assert steps(everystep, three.path) == [10, 20, 30]


@pytest.mark.parametrize(("typed", "code", "left"), [("y\n", 0, [20, 30]), ("n\n", 1, [10, 20, 30])])
def test_forget_asks_at_a_terminal(everystep, three, typed, code, left):
    """At a terminal the answer decides."""
    import subprocess
    import sys

    leader, follower = pty.openpty()
    try:
        os.write(leader, typed.encode())
        process = subprocess.run(
            [sys.executable, "-m", "everystep.cli", "forget", str(three.path), "10"],
            stdin=follower,
            capture_output=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert process.returncode == code
    assert steps(everystep, three.path) == left


def test_sweep_says_what_it_would_delete_and_then_does(everystep, three, arrays):
    """Data that was never committed is listed by --dry-run, deleted without it, and in the end a sweep finds nothing."""
    three.begin(parent=three.repository.find(30))  # whatever attempt 1 left uncommitted can no longer be committed
    stray = three.path / "data" / "000000000040-0001"
    stray.mkdir()
    (stray / "model-00001-of-00001.safetensors").write_bytes(bytes(5000))
    dry = everystep("sweep", three.path, "--dry-run", "--json").json
    assert [item["nbytes"] for item in dry["swept"] if not item["blocked"]] == [5000]
    assert dry["freed_nbytes"] == 0
    assert stray.exists()
    assert "would free" in everystep("sweep", three.path, "--dry-run").stdout
    assert everystep("sweep", three.path, "--json").json["freed_nbytes"] == 5000
    assert not stray.exists()
    assert everystep("sweep", three.path, "--json").json["freed_nbytes"] == 0  # the tombstone that guarded the deletion
    assert everystep("sweep", three.path, "--json").json["swept"] == []
    assert steps(everystep, three.path) == [10, 20, 30]


def test_a_checkpoint_that_goes_while_one_looks_is_no_error(everystep, three, monkeypatch):
    """F52: retention may forget a checkpoint between a listing and its reading: ls and verify --all go on with the others."""
    from everystep.repository import Repository

    listed = Repository.keys

    def stale(self):
        found = listed(self)
        if found[0].step == 10:
            self.forget(found[0])
        return found

    monkeypatch.setattr(Repository, "keys", stale)
    assert steps(everystep, three.path) == [20, 30]
    monkeypatch.setattr(Repository, "keys", lambda self: sorted([*listed(self), type(listed(self)[0])(10, 1)]))
    answer = everystep("verify", three.path, "--all", "--json")
    assert answer.code == 0
    assert [item["step"] for item in answer.json["checkpoints"]] == [20, 30]
    assert "forgotten meanwhile" in answer.stderr
