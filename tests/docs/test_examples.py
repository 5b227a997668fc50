"""Every example in the documentation runs, every link leads somewhere, and what is documented exists."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "DESIGN.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RUNNER = """
import os, runpy, shlex, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
namespace = {"__name__": "__main__"}
for kind, where, text in BLOCKS:
    print(f"-- {where}", flush=True)
    if kind == "python":
        exec(compile("\\n" * (int(where.rpartition(":")[2]) - 1) + text, where.rpartition(":")[0], "exec"), namespace)
    else:
        for line in text.splitlines():
            if line.startswith("$ everystep"):
                command = [sys.executable, "-m", "everystep.cli", *shlex.split(line)[2:]]
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)
"""


def blocks(page):
    """(kind, file:line, text) of a page's examples, in order."""
    text = page.read_text()
    return [(match[1], f"{page.name}:{text[: match.start()].count(chr(10)) + 2}", match[2]) for match in BLOCK.finditer(text)]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_examples_of_a_page_run_in_order(page, tmp_path):
    """A page's Python blocks and `$ everystep` lines run from top to bottom in an empty directory, warnings being errors."""
    program = tmp_path / "examples.py"
    program.write_text(f"BLOCKS = {blocks(page)!r}\n{textwrap.dedent(RUNNER)}")
    work = tmp_path / "work"
    work.mkdir()
    result = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=140,
        env=dict(os.environ),
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def anchors(page):
    """What GitHub makes of the page's headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    """Every relative link names a file that is there, and every fragment a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), target
        if fragment:
            assert fragment in anchors(other), target


TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_every_test_that_is_named_exists():
    """What a page calls a test, `folder/file.py::test_name`, is one."""
    import ast

    known = {}
    for page in PAGES:
        for name, function in TEST.findall(page.read_text()):
            path = ROOT / "tests" / name
            assert path.exists(), f"{page.name}: {name}"
            if path not in known:
                known[path] = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
            assert function in known[path], f"{page.name}: {name}::{function}"
    assert len(known) > 10


def test_every_failure_has_its_test():
    """Each line of the tables of failures names a test, but for what it says nobody can see."""
    rows = [
        line
        for line in (ROOT / "docs" / "failures.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| failure ")
    ]
    assert len(rows) > 40
    for row in rows:
        assert TEST.search(row) or "cannot be detected" in row or "can go unnoticed" in row, row


def test_every_command_and_exit_code_is_in_the_reference():
    """The reference names each command, each error class with its exit code, and each public name."""
    import everystep
    from everystep import errors
    from everystep.cli import exits
    from everystep.cli.app import app

    text = (ROOT / "docs" / "reference.md").read_text()
    for command in (one for one in app.registered_commands if not one.hidden):
        assert f"`everystep {command.name}" in text, command.name
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.CheckpointError):
            row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` "))
            assert row.rstrip("| ").endswith(f"| {exits.exit_code(value('x'))}"), name
    for name in everystep.__all__:
        assert f"{name}" in text, name


@pytest.mark.parametrize(
    ("name", "method"),
    [("Checkpointer", "__init__"), ("Checkpointer", "save"), ("Checkpointer", "restore"), ("Cadence", "__init__"), ("Keep", "__init__")],
)
def test_signatures_in_the_reference_are_those_of_the_code(name, method):
    """The reference lists the parameters that the code has, in order."""
    import everystep

    text = (ROOT / "docs" / "reference.md").read_text()
    written = f"{name}(" if method == "__init__" else f"{name}.{method}("
    listed = [word.strip() for word in re.search(re.escape(f"`{written}") + r"([^)]*)\)", text)[1].split(",")]
    parameters = list(inspect.signature(getattr(getattr(everystep, name), method)).parameters)[1:]
    assert [word for word in listed if word != "*"] == parameters


def test_every_public_thing_has_a_docstring():
    """Public names, and the public methods of public classes, say what they do."""
    import everystep

    for name in everystep.__all__:
        value = getattr(everystep, name)
        if not isinstance(value, type):
            continue
        assert value.__doc__, name
        for method, function in vars(value).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert function.__doc__, f"{name}.{method}"


def test_every_test_has_a_docstring():
    """Each test says in a sentence what must hold."""
    import ast

    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert ast.get_docstring(node), f"{path.name}:{node.lineno} {node.name}"


def test_nothing_names_this_machine():
    """No absolute path of a developer's machine is in what is committed."""
    names = re.compile(r"/(work|root)/[a-z]+")
    for folder in ("src", "docs", "tests", "bench", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".md", ".toml"} and path != Path(__file__):
                assert not names.search(path.read_text()), path
