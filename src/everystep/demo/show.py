"""How the demo looks: a calm live line on a terminal, plain lines in a log. Imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
_INDENT = "   "


def seconds_text(seconds: float) -> str:
    """A duration in the unit that reads best."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s"


def printable(text: str) -> str:
    """``text`` with a dot for what a terminal would not show, or would obey (a model may well sample an escape code)."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "    " if letter == "\t" else "\u00b7" for letter in text)


def nbytes_text(nbytes: float) -> str:
    """A size in decimal units."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB" if nbytes < 1e7 else f"{nbytes / 1e6:.0f} MB"


def sparkline(values: list[float], *, width: int, bars: str = _BARS) -> str:
    """``values`` as a row of bars, at most ``width`` of them (each the mean of a run of values)."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(bars[int((value - low) / (high - low or 1.0) * (len(bars) - 1))] for value in means)


class Status:
    """What the live line shows of the training that runs now."""

    def __init__(self, *, steps: int, checkpoints: bool) -> None:
        self.steps = steps
        self.checkpoints = checkpoints
        self.step = 0
        self.losses: list[float] = []
        self.seconds: float | None = None
        self.stall: float | None = None
        self.memory: int | None = None
        self.disk: int | None = None
        self.waiting = "starting Python and torch"

    def tiers(self) -> str:
        """Where the newest checkpoints are."""
        memory, disk = ("-" if step is None else step for step in (self.memory, self.disk))
        return f"memory: step {memory}   disk: step {disk}"

    def line(self) -> str:
        """All of it in one plain line."""
        parts = [f"step {self.step:>3}/{self.steps}"]
        if self.losses:
            parts.append(f"loss {self.losses[-1]:.3f}")
        if self.seconds is not None:
            parts.append(f"{seconds_text(self.seconds)} a step")
        if self.checkpoints and self.stall is not None:
            parts += [f"stall {seconds_text(self.stall)}", self.tiers()]
        return "   ".join(parts)


class Stage:
    """Where the demo is shown. ``lively``: a terminal that can redraw a line."""

    def __init__(self, *, console: Console | None = None, lively: bool | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.lively = self.console.is_terminal if lively is None else lively
        self.began = time.monotonic()
        encoding = (self.console.encoding or "ascii").lower()
        self._unicode = encoding.startswith("utf")

    @property
    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self.began

    def act(self, number: int, title: str) -> None:
        """A heading."""
        self.console.print()
        self.console.print(Text.assemble((f"{number}  {title}", "bold"), (f"   {self.elapsed:.0f} s", "dim")))

    def say(self, text: str, *, style: str = "") -> None:
        """A sentence, indented and wrapped."""
        self._paragraph(Text(text, style=style))

    def happened(self, what: str, text: str, *, good: bool) -> None:
        """Something that is worth a colour: a kill, or a promise kept."""
        self._paragraph(Text.assemble((what, "bold green" if good else "bold red"), text))

    def _paragraph(self, text: Text) -> None:
        for line in text.wrap(self.console, min(self.console.width, 110) - len(_INDENT)):
            line.rstrip()
            self.console.print(Text(_INDENT) + line)

    @contextlib.contextmanager
    def live(self, status: Status) -> Iterator[None]:
        """Show ``status`` while it changes; what it was in the end stays."""
        if not self.lively:
            yield
            return
        with Live(get_renderable=lambda: self._drawn(status), console=self.console, refresh_per_second=8):
            yield

    def tick(self, status: Status, *, every: int) -> None:
        """A step is over: in a log, print each ``every``-th."""
        if not self.lively and (status.step % every == 0 or status.step in (1, status.steps)):
            self.console.print(Text("   " + status.line(), style="dim"))

    @contextlib.contextmanager
    def doing(self, text: str) -> Iterator[Callable[[str], None]]:
        """Something without steps is going on; what it yields says more about it, on a terminal."""
        if not self.lively:
            self.console.print(Text(f"   {text} ...", style="dim"))
            yield lambda _: None
            return
        with self.console.status(Text(text, style="dim")) as shown:
            yield lambda more: shown.update(Text(f"{text}: {more}", style="dim"))

    def _drawn(self, status: Status) -> Group:
        width = 24
        done = status.step * width // status.steps
        full, empty = ("━", "━") if self._unicode else ("#", ".")
        first = Text.assemble("   ", (full * done, "cyan"), (empty * (width - done), "bright_black"))
        first.append(f"  step {status.step:>3}/{status.steps}")
        if status.losses:
            bars = _BARS if self._unicode else _ASCII_BARS
            first.append(f"   loss {status.losses[-1]:.3f}  ")
            first.append(sparkline(status.losses, width=20, bars=bars), style="cyan")
        if status.waiting:
            second = Text(f"   {status.waiting}", style="dim")
        else:
            parts = [f"{seconds_text(status.seconds)} a step" if status.seconds is not None else ""]
            if status.checkpoints and status.stall is not None:
                parts += [f"stall {seconds_text(status.stall)}", status.tiers()]
            second = Text("   " + "   ".join(part for part in parts if part), style="dim")
        return Group(first, second)
