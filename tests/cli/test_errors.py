"""Exit codes and bad input: one line that says what to do, the code from the table, and never a traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer

from everystep import errors
from everystep.cli import exits, output

READING = (
    ["ls"],
    ["show"],
    ["verify"],
    ["diff", "1", "2"],
    ["pin", "1"],
    ["forget", "1", "--yes"],
    ["sweep"],
    ["stats"],
    ["agent", "stats"],
    ["agent", "stop"],
)


def command(words, run):
    """``words`` with the run in its place."""
    at = 2 if words[0] == "agent" else 1
    return [*words[:at], run, *words[at:]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFoundError("x"), 10),
        (errors.ConflictError("x"), 11),
        (errors.CorruptionError("x"), 12),
        (errors.StoreError("x"), 13),
        (errors.TransientStoreError("x"), 13),
        (errors.PermanentStoreError("x"), 13),
        (errors.CapacityError("x"), 14),
        (errors.ConfigError("x"), 2),
        (errors.LayoutError("x"), 1),
        (errors.StateError("x"), 1),
        (errors.TornSnapshotError("x"), 1),
        (errors.AgentError("x"), 1),
        (errors.CheckpointError("x"), 1),
    ],
)
def test_exit_code_of_every_error(error, code):
    """Each class of error has the exit code that the documentation names."""
    assert exits.exit_code(error) == code


def test_every_error_class_is_in_the_table():
    """A new class of error gets an exit code on purpose: the list above is complete."""
    known = {mark.args[1][i][0].__class__ for mark in test_exit_code_of_every_error.pytestmark for i in range(len(mark.args[1]))}
    assert known == {value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.CheckpointError)}


@pytest.mark.parametrize(
    ("raised", "code"), [(KeyboardInterrupt(), 130), (typer.Abort(), 130), (RuntimeError("oops"), 1), (ZeroDivisionError(), 1)]
)
def test_guard_turns_interrupts_and_bugs_into_codes(raised, code, capsys):
    """Ctrl-C is 130; a bug is 1, says that it is one, and shows no traceback."""

    @exits.guarded
    def broken():
        raise raised

    with pytest.raises(typer.Exit) as caught:
        broken()
    assert caught.value.exit_code == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1
    assert ("bug" in said) == (code == 1)


def test_guard_lets_the_error_through_for_debugging(monkeypatch):
    """With EVERYSTEP_DEBUG=1 the traceback is there."""
    monkeypatch.setenv("EVERYSTEP_DEBUG", "1")

    @exits.guarded
    def broken():
        raise errors.NotFoundError("nothing there")

    with pytest.raises(errors.NotFoundError):
        broken()


def test_an_error_is_one_line_even_when_its_message_is_not(capsys):
    """Line breaks in a message do not break the one line."""
    output.say_error(errors.CorruptionError("one\ntwo", hint="three"))
    assert capsys.readouterr().err == "error: one two (three)\n"


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_random_folder_is_no_run(everystep, tmp_path, words):
    """Every command on a folder that is no run: not found, says what a run looks like, and writes nothing into the folder."""
    (tmp_path / "letter.txt").write_text("hello")
    answer = everystep(*command(words, tmp_path))
    assert answer.code == 10
    assert answer.stdout == ""
    assert re.fullmatch(r"error: .*run\.json.*\n", answer.stderr)
    assert os.listdir(tmp_path) == ["letter.txt"]


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_file_and_a_missing_path_are_no_run(everystep, tmp_path, words):
    """A file is a usage error, a path that is not there is not found; neither is created."""
    file = tmp_path / "file"
    file.write_text("hello")
    assert everystep(*command(words, file)).code == 2
    assert everystep(*command(words, tmp_path / "missing" / "run")).code == 10
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_run_of_a_newer_format(everystep, made, words):
    """A run that a later version wrote is refused with the advice to upgrade; nothing in it changes."""
    path = made.path / "run.json"
    document = json.loads(path.read_bytes())
    document["format"] = 99
    path.write_text(json.dumps(document))
    answer = everystep(*command(words, made.path))
    assert answer.code == 2
    assert "99" in answer.stderr
    assert "upgrade" in answer.stderr
    assert json.loads(path.read_bytes()) == document


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', bytes(100)])
def test_a_damaged_run_file_is_a_corruption(everystep, made, content):
    """F7: whatever run.json holds that is not a run's record is corruption, exit code 12, in one line."""
    (made.path / "run.json").write_bytes(content)
    answer = everystep("ls", made.path)
    assert answer.code == 12
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [["show", "40"], ["verify", "40"], ["diff", "10", "40"], ["pin", "40"], ["forget", "40", "--yes"], ["show", "000000000010-0009"]],
    ids=" ".join,
)
def test_a_step_that_is_not_there(everystep, three, words):
    """A missing step is not found, and the answer helps to find those that are."""
    answer = everystep(*command(words, three.path), "--json")
    assert answer.code == 10
    document = answer.json
    assert set(document) == {"error"}
    assert document["error"]["exit_code"] == 10
    assert answer.stderr.startswith("error: ")


@pytest.mark.parametrize("step", ["abc", "", "1.5", "newest", "10-1"])
def test_a_step_that_is_no_step(everystep, three, step):
    """What is neither a number, nor `latest`, nor a key is a usage error that says what a step is."""
    answer = everystep("show", three.path, step)
    assert answer.code == 2
    assert "latest" in answer.stderr


@pytest.mark.parametrize(
    "words", [["ls"], ["ls", "RUN", "--mode", "best"], ["nonsense"], ["show"], ["forget", "RUN"], ["ls", "RUN", "--nonsense"]], ids=" ".join
)
def test_wrong_usage_is_2(everystep, three, words):
    """Missing arguments, unknown commands, options and words are usage errors."""
    assert everystep(*[three.path if word == "RUN" else word for word in words]).code == 2


def test_unknown_url_scheme_names_the_supported_ones(everystep):
    """A store that is not supported is a usage error."""
    answer = everystep("ls", "s3://bucket/run")
    assert answer.code == 2
    assert "s3" in answer.stderr


@pytest.mark.parametrize(("code_of_os", "expected"), [(errno.EACCES, 13), (errno.ENOSPC, 14), (errno.EIO, 13)])
def test_a_failing_disk(everystep, three, monkeypatch, code_of_os, expected):
    """F40: what the operating system says of a write comes out as the store's or capacity's exit code, and the checkpoints stay."""
    from everystep.store.disk import RealDisk

    def fail(*_):
        raise OSError(code_of_os, os.strerror(code_of_os))

    with monkeypatch.context() as patched:
        patched.setattr(RealDisk, "pwrite", fail)
        answer = everystep("pin", three.path, "10", "--json")
    assert answer.code == expected
    assert answer.json["error"]["exit_code"] == expected
    assert len(everystep("ls", three.path, "--json").json["checkpoints"]) == 3


def test_verify_on_a_read_only_store_still_answers(everystep, three, monkeypatch):
    """Where the result cannot be recorded, verify says so and its answer counts all the same."""
    from everystep.store.disk import RealDisk

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("pwrite", "mkdir", "link", "rename", "fallocate"):
        monkeypatch.setattr(RealDisk, name, refuse)
    answer = everystep("verify", three.path, "--json")
    assert (answer.code, answer.json["good"]) == (0, True)
    assert "not recorded" in answer.stderr


def test_program_prints_version_help_and_no_traceback(shell, tmp_path):
    """As a real program: --version and --help answer, an error is one line on stderr, and stdout holds nothing else."""
    assert re.fullmatch(r"everystep \d+\.\d+\.\d+\n", shell("--version").stdout)
    text = shell("--help").stdout
    for word in ("ls", "show", "verify", "diff", "pin", "forget", "sweep", "doctor", "agent", "stats", "demo"):
        assert re.search(rf"^\s+{word}\b", text, re.MULTILINE), word
    answer = shell("ls", tmp_path)
    assert (answer.code, answer.stdout) == (10, "")
    assert len(answer.stderr.splitlines()) == 1


def test_a_closed_pipe_is_no_error(three):
    """`everystep show RUN | true` ends quietly."""
    script = f"{sys.executable} -m everystep.cli show {three.path} --tensors | true; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in process.stderr
    assert "error" not in process.stderr.lower()


def test_command_line_and_package_start_without_torch():
    """`import everystep` loads neither torch nor numpy, and listing a run needs no torch."""
    check = "import sys, everystep; assert not {'torch', 'numpy', 'typer'} & set(sys.modules); import everystep.cli.app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_every_public_name_can_be_imported():
    """Each name in __all__ exists, and completion shows it; an unknown one is an AttributeError."""
    import everystep

    for name in everystep.__all__:
        assert getattr(everystep, name) is not None
    assert set(everystep.__all__) <= set(dir(everystep))
    assert set(everystep._HOMES) | {"__version__"} == set(everystep.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        everystep.nonsense  # noqa: B018


def test_wheel_is_whole_and_typed(tmp_path):
    """The wheel that pip would install holds every module, py.typed and the licence, and no test."""
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", tmp_path, root],
        check=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    [wheel] = tmp_path.glob("everystep-*-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(root / "src")) for path in (root / "src" / "everystep").rglob("*.py")}
    assert modules <= names
    assert "everystep/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "bench/")) for name in names)
    subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); import everystep; print(everystep.__file__)"],
        check=True,
        timeout=60,
        env={"PATH": ""},
    )
