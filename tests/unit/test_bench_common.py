"""What the benchmarks share: figures, bars, raw disk access and memory sampling."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

BENCH = pathlib.Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def common() -> types.ModuleType:
    """bench/_common.py as a module; bench is a folder of programs, not a package."""
    spec = importlib.util.spec_from_file_location("bench_common", BENCH / "_common.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_row_holds_median_and_spread(common: types.ModuleType) -> None:
    """The median is the middle one and not the mean, so that one slow round does not count."""
    results = common.Results()
    assert results.row("x", [1.0, 100.0, 2.0], "s") == 2.0
    assert results.rows == [{"name": "x", "median": 2.0, "min": 1.0, "max": 100.0, "n": 3, "unit": "s"}]


@pytest.mark.parametrize(
    ("value", "bound", "at_most", "holds"),
    [(1.0, 1.0, True, True), (1.01, 1.0, True, False), (0.85, 0.85, False, True), (0.84, 0.85, False, False)],
)
def test_a_bar_holds_up_to_its_bound(common: types.ModuleType, value: float, bound: float, at_most: bool, holds: bool) -> None:
    """The bound itself is good enough, in both directions."""
    results = common.Results()
    results.bar("x", value, bound, at_most=at_most)
    assert results.bars[0]["holds"] is holds


def test_a_bar_that_is_not_a_number_is_missed(common: types.ModuleType) -> None:
    """NaN never passes as a good figure."""
    results = common.Results()
    results.bar("x", float("nan"), 1.0)
    results.bar("y", float("nan"), 1.0, at_most=False)
    assert [bar["holds"] for bar in results.bars] == [False, False]


def test_a_bar_that_does_not_apply_is_listed_with_its_reason(common: types.ModuleType) -> None:
    """It does not fail the run, and says why it was not counted."""
    results = common.Results()
    results.bar("x", 5.0, 1.0, applies=False, why="the step is too short")
    assert results.bars[0]["holds"] is True
    assert results.bars[0]["applies"] is False
    assert results.bars[0]["why"] == "the step is too short"


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 5), (90, 9), (99, 10), (100, 10)])
def test_percentile_is_the_nearest_rank(common: types.ModuleType, percent: float, expected: float) -> None:
    """Of the numbers one to ten."""
    assert common.percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == expected


def test_measures_are_taken_in_turn(common: types.ModuleType) -> None:
    """Each round measures all, beginning with another one, so that no one always comes first."""
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = common.in_turn(3, {name: (lambda name=name: measure(name)) for name in "abc"})
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


@pytest.mark.parametrize("blocks", [1, 3])
def test_raw_write_and_read_move_the_same_bytes(common: types.ModuleType, tmp_path: pathlib.Path, blocks: int) -> None:
    """A yardstick that skips bytes would make everybody else look slow."""
    nbytes = blocks * common.BLOCK - 4096
    buffer, back = common.warm_buffer(nbytes), common.warm_buffer(nbytes)
    assert common.raw_write(tmp_path / "raw", buffer, nbytes=nbytes) > 0
    assert (tmp_path / "raw").read_bytes() == buffer[:]
    assert back[:] != buffer[:]
    assert common.raw_read([tmp_path / "raw"], back) > 0
    assert back[:] == buffer[:]


def test_a_failed_raw_write_raises(common: types.ModuleType, tmp_path: pathlib.Path) -> None:
    """A file that is there already is not measured into."""
    (tmp_path / "raw").write_bytes(b"x")
    with pytest.raises(FileExistsError):
        common.raw_write(tmp_path / "raw", common.warm_buffer(4096), nbytes=4096)


def test_memory_watch_sees_what_was_taken(common: types.ModuleType) -> None:
    """32 MiB more are seen as 32 MiB more, and shared memory is apart."""
    before, _ = common.own_nbytes(os.getpid())
    with common.MemoryWatch(lambda: [os.getpid()], every_s=0.001) as watch:
        held = bytearray(os.urandom(4096) * (32 << 8))
        while watch.samples < 3:
            pass
    assert len(held) == 32 << 20
    assert 30 << 20 <= watch.peak - before <= 48 << 20


@pytest.mark.parametrize(("measured", "code"), [(1.0, 0), (2.0, 3)])
def test_exit_code_says_whether_the_bars_hold(tmp_path: pathlib.Path, measured: float, code: int) -> None:
    """0, or 3 when a bar falls short; the JSON has machine, rows and bars either way."""
    program = (
        f"import sys; sys.path.insert(0, {str(BENCH)!r}); import _common\n"
        f"_common.main('t', lambda a, r: r.bar('b', {measured}, 1.0) or (a.folder / 'x').write_text('x'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--json", "--dir", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    assert document["bars"] == [
        {"name": "b", "value": measured, "bound": 1.0, "sign": "<=", "holds": code == 0, "applies": True, "why": ""}
    ]
    assert document["rows"] == []
    assert document["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert list(tmp_path.iterdir()) == []


def test_the_table_names_a_missed_bar(common: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A person sees which one."""
    results = common.Results()
    results.row("speed", [2.0e9], "B/s")
    results.bar("too slow", 2.0, 1.0)
    common.show("t", results)
    shown = capsys.readouterr().out
    assert "2.00 GB/s" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("too slow"))
    assert "MISSED" in line


def test_the_runner_runs_every_program() -> None:
    """No benchmark is left out of ``bench/engine.py``, and none is named that is not there."""
    text = (BENCH / "engine.py").read_text(encoding="utf-8")
    spec = next(line for line in text.splitlines() if line.startswith("PARTS"))
    names = [word.strip(' "') for word in spec.split("(", 1)[1].rstrip(")").split(",")]
    programs = {path.stem for path in BENCH.glob("[a-z]*.py")} - {"engine", "distributed", "consolidate"}  # benchmarks of their own
    assert set(names) == programs
