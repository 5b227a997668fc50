"""When a checkpoint is consolidated, where it goes and what it looks like: decisions with reasons. Pure, as ``policy.py`` is.

What ``when`` says is read once into a tree of rules, a class for each form. A rule judges one checkpoint by what is known of those that
are consolidated; it has no memory of its own, so that any process can decide from the records of a run, at any time, and come to the
same answer.
"""

from __future__ import annotations

from everystep.schedule.deciding import best_by, binds, decide, describe
from everystep.schedule.reading import read_when
from everystep.schedule.rules import Decision, Rule, Seen
from everystep.schedule.settings import Consolidate, from_document, size_nbytes, to_document
from everystep.schedule.text import parse_when

__all__ = [
    "Consolidate",
    "Decision",
    "Rule",
    "Seen",
    "best_by",
    "binds",
    "decide",
    "describe",
    "from_document",
    "parse_when",
    "read_when",
    "size_nbytes",
    "to_document",
]
