"""``everystep stats``: how long each phase of checkpointing took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from everystep import errors
from everystep.agent.stats import stored
from everystep.cli import output, runs
from everystep.cli.exits import guarded

BARS = " ▁▂▃▄▅▆▇█"
MAX_BARS = 40
SMALLEST_S, PER_OCTAVE = 1e-6, 4


@guarded
def stats(run: runs.Run, as_json: output.AsJson = False) -> None:
    """Show how long each phase took (plan, stage, fence, hash, write, sync, commit).

    `fence` is what an optimizer's step waited, `call` what `save` took, `total` from the seal to the commit. The figures come from the
    run's living agent, else from what it last recorded.
    """
    repository = runs.open_run(run)
    source = "agent"
    with runs.visit(repository) as client:
        document = None if client is None else client.stats()
    if document is None:
        source, document = "record", stored(repository)
    if document is None:
        raise errors.NotFoundError(
            f"{run!r} has no agent on this node and no recorded statistics",
            key=run,
            kind="no-stats",
            hint="they are there after the first save",
        )
    if as_json:
        output.print_json({"run": repository.store.url, "source": source, **document})
    else:
        print_stats(document, source=f"agent of {run}" if source == "agent" else f"last record of {run}")


def print_stats(document: Mapping[str, Any], *, source: str) -> None:
    """The counters and a line for each phase with its histogram, for people."""
    output.print_text(source)
    counters = document.get("counters", {})
    if counters:
        output.print_table(["counter", ""], [[name, f"{value:,}"] for name, value in counters.items()], right=[""])
        output.print_text()
    for note in dict(document.get("notes") or {}).values():
        output.print_text(note)
    phases = document.get("phases", {})
    if not phases:
        output.print_text("no phase was measured yet")
        return
    rows = [
        [
            name,
            str(phase["count"]),
            *(output.seconds(phase[field]) if phase.get(field) is not None else "-" for field in ("p50_s", "p90_s", "p99_s", "max_s")),
            output.seconds(phase["total_s"]),
            *sparkline(phase.get("buckets", ())),
        ]
        for name, phase in phases.items()
        if phase["count"]
    ]
    output.print_table(
        ["phase", "count", "p50", "p90", "p99", "max", "total", "from", "histogram", "to"],
        rows,
        right=["count", "p50", "p90", "p99", "max", "total", "from"],
    )


def sparkline(buckets: Sequence[Sequence[float]]) -> tuple[str, str, str]:
    """(lower end, bars, upper end) of a histogram given as its filled buckets: (upper bound in seconds, count).

    The bounds grow by a fixed factor (see ``agent/stats.py``), so that a bucket's place follows from its bound; gaps are blank.
    """
    filled = {round(math.log2(upper_s / SMALLEST_S) * PER_OCTAVE): count for upper_s, count in buckets if count}
    if not filled:
        return "", "", ""
    first, last = min(filled), max(filled)
    width = -(-(last - first + 1) // MAX_BARS)  # buckets in one bar
    counts = [sum(filled.get(place, 0) for place in range(at, at + width)) for at in range(first, last + 1, width)]
    most = max(counts)
    # A count of one among thousands is still seen: only zero is blank.
    bars = "".join(BARS[0] if not count else BARS[max(1, round(count / most * (len(BARS) - 1)))] for count in counts)
    low = _bound(first - 1) if first > 1 else 0.0  # the first bucket holds whatever is too short to tell apart
    return output.seconds(low), bars, output.seconds(_bound(first - 1 + width * len(counts)))


def _bound(place: int) -> float:
    return float(SMALLEST_S * 2 ** (place / PER_OCTAVE))
