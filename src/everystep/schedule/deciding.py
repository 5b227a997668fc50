"""Which checkpoints are to be consolidated, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from everystep.schedule.reading import read_when
from everystep.schedule.rules import Decision, Improves, Known, Seen


def decide(when: Any, seen: Sequence[Seen], done: Sequence[Seen], *, ended: bool) -> list[Decision]:
    """Decide for each committed checkpoint whether it is to be consolidated, oldest first.

    Args:
        when: Any form of ``Consolidate.when``.
        seen: The checkpoints of the newest lineage that are there, in any order.
        done: What has been consolidated before, of any age and timeline; it need not be in ``seen`` any more. What was given up on purpose
            (dropped from a queue) belongs here too, or it is due again.
        ended: Whether the run is over, which makes ``final`` due.

    A decision counts the due ones before it as done, so that one checkpoint at a time gives what all at once give, as long as the metrics
    of a checkpoint are there when it is first decided about. A metric that comes later is compared with all that was done meanwhile, and
    counts for what was done before it came, as long as the checkpoint is in ``seen``.
    """
    rule = read_when(when)
    oldest_first = sorted(seen, key=lambda one: (one.step, one.saved_at, one.key))
    measured = {one.key: one.metrics for one in oldest_first}
    # A metric may have come after the export, whose record does not know it then.
    done = [msgspec.structs.replace(one, metrics={**one.metrics, **measured[one.key]}) if one.key in measured else one for one in done]
    known = Known(done, oldest_first[-1] if ended and oldest_first else None)
    decisions = []
    for one in oldest_first:
        due, reason = (False, "already") if known.has(one) else rule.judge(one, known)
        if due:
            known.add(one)
        decisions.append(Decision(one.key, one.step, due, reason))
    return decisions


def binds(when: Any, step: int) -> bool:
    """Whether this step has to reach the disk because its number alone makes it due (``{every: N}``, ``at``, phases and lists of these)."""
    return read_when(when).binds(step)


def describe(when: Any) -> str:
    """What ``when`` consolidates, in words, for ``--dry-run`` and messages."""
    return read_when(when).describe()


def best_by(when: Any) -> tuple[str, str] | None:
    """Metric and mode ("min" or "max") of the first ``improves`` in ``when``, by which there is a BEST; None when there is none."""
    rule = read_when(when)
    if isinstance(rule, Improves):
        return rule.metric, rule.mode
    return next((found for one in rule.inner() if (found := best_by(one)) is not None), None)
