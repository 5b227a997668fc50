"""How commands look: on narrow terminals, in pipes, and when what was typed is wrong."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest

from everystep.cli import output, stats


def on_terminal(columns, *words):
    """What the command line prints on a terminal of so many columns, without its colours."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "everystep.cli", *map(str, words)],
        stdin=subprocess.DEVNULL, stdout=follower, stderr=subprocess.DEVNULL, env={**environment, "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while select.select([leader], [], [], 60)[0]:
        try:
            data = os.read(leader, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(leader)
    assert process.wait(timeout=20) == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")


def words_of(text):
    """The text's words in order: folding moves them, but must not lose any."""
    return sorted(text.split())


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_doctor_drops_nothing_on_a_terminal(tmp_path, columns):
    """At any width every row says whether a snapshot survives, in lines that fit, and no text is cut."""
    shown = on_terminal(columns, "doctor", tmp_path, "--max-mib", "16")
    assert "survives" in shown
    assert shown.count("is lost") >= 2
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    flat = "".join(shown.split())
    for text in ("run", "outlives", "allocated", "remains"):
        assert text in flat


@pytest.mark.parametrize("columns", [30, 60, 80, 100])
def test_tables_fold_and_never_cut(everystep, three, columns):
    """Ls on a terminal has the same words as in a pipe, whatever the width."""
    piped = everystep("ls", three.path, "--metric", "val_loss").stdout
    shown = on_terminal(columns, "ls", three.path, "--metric", "val_loss")
    assert "…" not in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    for word in ("best", "val_loss=3", "val_loss=1", "disk", "10", "20", "30"):
        assert word in piped
        assert word in shown


def test_no_blanks_at_the_ends_of_lines_in_a_pipe(everystep, three, tmp_path):
    """What goes to a file or a pipe has no padding."""
    for words in (
        ["ls", three.path],
        ["show", three.path, "--tensors"],
        ["diff", three.path, "10", "20"],
        ["doctor", tmp_path, "--max-mib", "16"],
    ):
        lines = everystep(*words).stdout.splitlines()
        assert lines == [line.rstrip() for line in lines], words


def test_counts_agree_with_their_nouns(everystep, made, arrays):
    """One tensor differs, two differ."""
    one, other, third = arrays(1), arrays(1), arrays(1)
    other["model.bias"] = other["model.bias"] + 1
    third["model.bias"] = third["model.weight"] = one["model.weight"] * 2
    for step, content in enumerate((one, other, third), start=1):
        made.save(step, content)
    assert everystep("diff", made.path, "1", "2").stdout.splitlines()[-1] == "1 tensor of 4 and 0 plain values differs"
    assert everystep("diff", made.path, "1", "3").stdout.splitlines()[-1] == "2 tensors of 4 and 0 plain values differ"


def test_verify_ls_and_show_mean_the_same_size(everystep, three):
    """The bytes that verify names as data are those of the data files, as ls and show have them; what it read beyond are records."""
    size = sum(path.stat().st_size for path in three.files("000000000030-0001"))
    [checked] = everystep("verify", three.path, "--json").json["checkpoints"]
    records = [three.path / "manifests" / "000000000030-0001.json", *(three.path / "data" / "000000000030-0001").glob("node-*.json")]
    assert (checked["data_nbytes"], checked["nbytes"]) == (size, size + sum(path.stat().st_size for path in records))
    said = output.nbytes(size)
    assert f"{said} of data files, and the manifest" in everystep("verify", three.path).stdout
    assert said in everystep("ls", three.path).stdout
    assert said in everystep("show", three.path).stdout


def test_durations_too_short_to_measure():
    """Nothing is longer than the longest: the histogram of what takes no time begins at 0."""
    low, bars, _ = stats.sparkline([[1e-6 * 2 ** (1 / 4), 7]])  # the bucket of everything up to a microsecond
    assert (low, bars) == ("0 us", "█")
    assert [output.seconds(value) for value in (0.0, 1e-7, 6e-7, 0.012)] == ["0 us", "< 1 us", "1 us", "12 ms"]


USAGE = {
    "show": "RUN [STEP]",
    "verify": "RUN [STEP]",
    "diff": "RUN A B",
    "pin": "RUN STEP",
    "forget": "RUN STEP...",
    "doctor": "[PATH]",
    "agent stop": "RUN|ID|PID",
    "agent run": "RUN",
}


@pytest.mark.parametrize("command", USAGE)
def test_usage_lines_are_plain(everystep, command):
    """The usage line names the arguments as the documentation does."""
    first = everystep(*command.split(), "--help").stdout.splitlines()[0]
    assert first.endswith(f"{command} [OPTIONS] {USAGE[command]}")


def test_help_of_groups_cuts_no_line(shell):
    """Each command's line in the two lists is a whole sentence, also on 80 columns."""
    for words in ([], ["agent"]):
        text = shell(*words, "--help", env={"COLUMNS": "80"}).stdout
        assert "..." not in text.split("Commands:")[1]


@pytest.mark.parametrize(
    "words",
    [["ls", "--json"], ["nonsense", "--json"], ["ls", "RUN", "--nonsense", "--json"], ["verify", "RUN", "--threads", "many", "--json"],
     ["agent", "nonsense", "--json"], ["forget", "RUN", "--json"], ["demo", "--params", "7B", "--json"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_with_json_is_a_document(everystep, three, words):
    """What was typed wrongly is the same document as any other error on stdout, one line on stderr, and 2."""
    answer = everystep(*[three.path if word == "RUN" else word for word in words])
    assert answer.code == 2
    assert answer.json["error"]["exit_code"] == 2
    assert answer.json["error"]["name"] == "ConfigError"
    assert re.fullmatch(r"error: .* \(.*\)\n", answer.stderr)


def test_wrong_usage_without_json_is_one_line(shell):
    """As a program: stdout is empty, and stderr names the mistake and the help."""
    answer = shell("verify")
    assert (answer.code, answer.stdout, answer.stderr) == (2, "", "error: missing argument 'RUN' (everystep verify --help)\n")


INTERRUPTED = """
import sys, types
import everystep.cli
{}
sys.argv = ["everystep", *sys.argv[1:]]
everystep.cli.main()
"""


@pytest.mark.parametrize(
    "where",
    [
        "sys.meta_path.insert(0, types.SimpleNamespace(find_spec=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())))",
        "import typer.core; typer.core.TyperCommand.parse_args = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())",
        "import everystep.repository as r; r.Repository.open = lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt())",
    ],
    ids=["while it starts", "while it reads its arguments", "while it works"],
)
def test_ctrl_c_is_one_line_and_130(three, where):
    """Wherever Ctrl-C comes: one line, no traceback, 130."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(where), "ls", str(three.path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_json_stays_json_in_a_pipe(shell, three):
    """The document is parsed by a program that reads the pipe."""
    assert json.loads(shell("ls", three.path, "--json").stdout)["checkpoints"][0]["step"] == 10
