"""How commands speak: one JSON document or tables on stdout; progress, notices and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from everystep import errors

__all__ = [
    "AsJson",
    "age",
    "nbytes",
    "note",
    "number",
    "plural",
    "print_json",
    "print_table",
    "print_text",
    "progress",
    "say_error",
    "seconds",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

WIDE = 200
"""Columns where stdout is no terminal: nothing is folded or cut in a pipe or a log."""

FOLDED = 20
"""Columns of text that stay readable when a table's cells are folded."""


def _console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDE, highlight=False, soft_wrap=not stream.isatty())


def print_json(document: object) -> None:
    """One JSON document on stdout; NaN and infinities, which JSON lacks, as strings."""
    sys.stdout.write(json.dumps(_finite(document), indent=2, default=str) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_text(text: str = "") -> None:
    """A line on stdout, as it is."""
    _console().print(text, markup=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A table on stdout. Columns named in ``right`` are right-aligned; texts are shown as they are (no markup).

    Nothing is ever cut: on a terminal that is too narrow cells are folded, and where even that would leave columns unreadable each row
    becomes a block of ``column: text`` lines. In a pipe rows are as wide as they have to be, without blanks at their ends.
    """
    widths = (
        [max(map(cell_len, (column, *cells))) for column, cells in zip(columns, zip(*rows, strict=True), strict=True)]
        if rows
        else [0] * len(columns)
    )
    console = _console()
    room = console.width - 2 * (len(columns) - 1)
    needed = sum(width if column in right else min(width, FOLDED) for column, width in zip(columns, widths, strict=True))
    if sys.stdout.isatty() and needed > room:
        _print_blocks(console, columns, rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column, width in zip(columns, widths, strict=True):
        # A narrow column stays whole, so that the wide ones are folded.
        fixed = column in right or width <= FOLDED
        table.add_column(column, justify="right" if column in right else "left", no_wrap=fixed, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    if sys.stdout.isatty():
        console.print(table)
        return
    console.width = max(WIDE, console.measure(table).maximum)
    with console.capture() as shown:
        console.print(table)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in shown.get().splitlines()))


def _print_blocks(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for number, row in enumerate(rows):
        if number:
            console.print()
        for column, cell in zip(columns, row, strict=True):
            if cell:
                console.print(f"{column}: {cell}" if column else cell, markup=False, overflow="fold")


def note(text: str) -> None:
    """A notice on stderr."""
    _console(stderr=True).print(text, markup=False, style="dim")


def say_error(error: errors.CheckpointError) -> None:
    """``error: what failed (what to do)`` on stderr, in one line."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)


@contextlib.contextmanager
def progress(label: str, total_nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while something long runs, and nothing where stderr is no terminal; gives the function that adds bytes done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(escape(label), total=total_nbytes)
        yield lambda done: bar.advance(task, done)


def nbytes(count: float) -> str:
    """Bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError  # pragma: no cover  # the last unit always returns


def seconds(value: float) -> str:
    """A duration for people: ``< 1 us``, ``350 us``, ``12 ms``, ``1.5 s``."""
    if value < 1e-3:
        return "< 1 us" if 0 < value < 5e-7 else f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def age(value: float) -> str:
    """How long ago, roughly: ``5 s``, ``3 min``, ``2 h``, ``4 d``."""
    value = max(0.0, value)
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if value < limit:
            return f"{value / size:.0f} {unit}"
    return f"{value / 86400:.0f} d"


def number(value: float) -> str:
    """A metric for people."""
    return f"{value:.6g}"


def plural(count: int, noun: str) -> str:
    """``1 checkpoint``, ``2 checkpoints``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
