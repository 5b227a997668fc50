"""When a checkpoint is consolidated and why, what each word means, and what is said about a wrong one."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pathlib
import pickle
import subprocess
import sys

import pytest

from everystep.errors import ConfigError
from everystep.schedule import (
    Consolidate,
    Seen,
    best_by,
    binds,
    decide,
    describe,
    from_document,
    parse_when,
    read_when,
    size_nbytes,
    to_document,
)  # fmt: skip


def seen(steps, metrics=None, *, every_s=60.0, attempt=1):
    """One checkpoint a step, sealed a minute apart a step; ``metrics`` maps a step to its val_loss."""
    metrics = metrics or {}
    return [
        Seen(f"{step:04}-{attempt}", step, 1000.0 + every_s * step, {"val_loss": metrics[step]} if step in metrics else {})
        for step in steps
    ]


def due(when, have, done=(), *, ended=False):
    return [decision.step for decision in decide(when, have, done, ended=ended) if decision.due]


def why(when, have, done=(), *, ended=False):
    return {decision.step: decision.reason for decision in decide(when, have, done, ended=ended)}


# -- the forms ---------------------------------------------------------------------------------------------------------

LOSSES = {1: 3.0, 2: 2.0, 3: 2.5, 4: 1.95, 6: 1.0}

FORMS = [
    ("every", "every", [1, 2, 3, 4, 5, 6]),
    (True, "every", [1, 2, 3, 4, 5, 6]),
    ("never", "never", []),
    (False, "never", []),
    ("final", "final", []),
    ({"every": 2}, {"every": 2}, [2, 4, 6]),
    ({"every": 1}, {"every": 1}, [1, 2, 3, 4, 5, 6]),
    ({"every": "2min"}, {"every": "2min"}, [1, 3, 5]),
    ({"every": " 90 s "}, {"every": "90s"}, [1, 3, 5]),
    ({"every": "1h"}, {"every": "1h"}, [1]),
    ({"improves": "val_loss"}, {"improves": "val_loss", "mode": "min"}, [1, 2, 4, 6]),
    ({"improves": "val_loss", "mode": "max"}, {"improves": "val_loss", "mode": "max"}, [1]),
    ({"improves": "val_loss", "min_delta": 0.5}, {"improves": "val_loss", "mode": "min", "min_delta": 0.5}, [1, 2, 6]),
    ({"improves": "other"}, {"improves": "other", "mode": "min"}, []),
    ({"metric": "val_loss", "below": 2.0}, {"metric": "val_loss", "below": 2.0}, [4, 6]),
    ({"metric": "val_loss", "above": 2}, {"metric": "val_loss", "above": 2.0}, [1, 3]),
    ({"at": [5, 2, 2, 99]}, {"at": [2, 5, 99]}, [2, 5]),
    ({"at": 3}, {"at": [3]}, [3]),
    ({"phases": [{"until": 3, "when": "every"}, {"until": 5, "when": "never"}, {"when": {"at": [1, 6]}}]},
     {"phases": [{"until": 3, "when": "every"}, {"until": 5, "when": "never"}, {"when": {"at": [1, 6]}}]}, [1, 2, 6]),
    ({"phases": [{"until": 3, "when": "every"}]}, {"phases": [{"until": 3, "when": "every"}]}, [1, 2]),
    ({"phases": [{"until": 5, "when": {"phases": [{"until": 2, "when": "every"}, {"when": [{"at": [4]}, "never"]}]}}]},
     {"phases": [{"until": 5, "when": {"phases": [{"until": 2, "when": "every"}, {"when": [{"at": [4]}, "never"]}]}}]}, [1, 4]),
    ([{"every": 3}, {"at": [2]}], [{"every": 3}, {"at": [2]}], [2, 3, 6]),
    ((["final"], [[{"every": 3}]]), ["final", {"every": 3}], [3, 6]),
    ([["final", {"at": [1]}], {"every": 3}], ["final", {"at": [1]}, {"every": 3}], [1, 3, 6]),
    ([{"every": 3}], {"every": 3}, [3, 6]),
    ("every: 2", {"every": 2}, [2, 4, 6]),
    ("final, every: 3", ["final", {"every": 3}], [3, 6]),
]  # fmt: skip


@pytest.mark.parametrize(("when", "form", "steps"), FORMS, ids=[str(when) for when, _, _ in FORMS])
def test_forms(when, form, steps):
    """Each form is accepted, kept in one plain form, and makes the right ones of six checkpoints due, oldest first and each with a reason."""
    assert Consolidate(when=when).when == form
    assert Consolidate(when=form).when == form
    have = seen(range(1, 7), LOSSES)
    assert due(when, have[::-1]) == steps
    decisions = decide(when, have[::-1], [], ended=False)
    assert [(decision.key, decision.step) for decision in decisions] == [(one.key, one.step) for one in have]
    assert all(decision.reason and "\n" not in decision.reason for decision in decisions)
    assert decide(read_when(when), have, [], ended=False) == decisions
    assert json.loads(json.dumps(form)) == form
    assert describe(when) == describe(form)


@pytest.mark.parametrize(
    ("when", "steps"),
    [("every", []), ("never", []), ("final", []), ({"every": 4}, [0, 4, 8, 12]), ({"every": "4min"}, []), ({"improves": "val_loss"}, []),
     ({"metric": "val_loss", "below": 1}, []), ({"at": [3, 5]}, [3, 5]), ([{"every": 6}, "every", {"at": [1]}], [0, 1, 6, 12]),
     ({"phases": [{"until": 6, "when": {"every": 2}}, {"until": 10, "when": "every"}, {"when": [{"every": 3}, "final"]}]}, [0, 2, 4, 12]),
     ({"phases": [{"until": 6, "when": {"every": 4}}]}, [0, 4])],
)  # fmt: skip
def test_what_binds(when, steps):
    """A step has to reach the disk where its number alone makes it due; `every` takes what reaches it anyway."""
    assert [step for step in range(13) if binds(when, step)] == steps
    assert [step for step in range(13) if binds(read_when(when), step)] == steps


# -- final -------------------------------------------------------------------------------------------------------------


def test_final_is_due_once():
    """F57: `final` is due for the newest checkpoint when the run has ended, and never again, however often one asks."""
    have = seen([10, 20, 30])
    assert due("final", have) == []
    assert why("final", have)[30] == "final: the run has not ended"
    assert due("final", have[::-1], ended=True) == [30]
    assert why("final", have, ended=True) == {10: "final: step 30 is newer", 20: "final: step 30 is newer", 30: "final"}
    assert due("final", have, [have[2]], ended=True) == []
    assert why("final", have, [have[2]], ended=True)[30] == "already"
    assert due("final", have, have[:2], ended=True) == [30]
    assert decide("final", [], have, ended=True) == []


def test_final_after_the_shards_are_gone():
    """F57: with drop_shards the newest is no longer there, or bears a new key: an older one is not taken for the final one."""
    have = seen([10, 20, 30])
    assert due("final", have[:2], [have[2]], ended=True) == []
    assert why("final", have[:2], [have[2]], ended=True)[20] == "final: step 30 is consolidated already"
    reduced = Seen("0030-1r", 30, have[2].saved_at, have[2].metrics)
    assert due(["final", "every"], [reduced], [have[2]], ended=True) == []


def test_final_of_a_run_that_went_on():
    """A run that was ended, exported and continued has a new end; one that went back to an earlier step too, though its steps are lower."""
    first = seen([100, 200])
    assert due("final", [*first, *seen([300])], [first[1]], ended=True) == [300]
    again = Seen("0150-2", 150, first[1].saved_at + 5, {})
    assert due("final", [first[0], again], [first[1]], ended=True) == [150]


def test_final_in_a_phase_and_in_a_list():
    """`final` inside a phase counts when the end lies in that phase; in a list it comes besides the others."""
    when = {"phases": [{"until": 100, "when": "never"}, {"when": ["final", {"every": 100}]}]}
    assert due(when, seen([50, 60]), ended=True) == []
    assert due(when, seen([50, 100, 130]), ended=True) == [100, 130]
    assert due([{"every": 10}, "final"], seen([10, 20]), ended=True) == [10, 20]


# -- time --------------------------------------------------------------------------------------------------------------


def test_time_counts_from_the_last_consolidated_one():
    """A duration is counted between seals, from the last export of whatever reason; exactly that long is enough; an older one is not due."""
    have = seen([0, 30, 60], every_s=1.0)
    assert due({"every": "30s"}, have) == [0, 30, 60]
    assert due({"every": "31s"}, have) == [0, 60]
    assert due([{"every": "31s"}, {"at": [30]}], have) == [0, 30]
    assert due({"every": "30s"}, have[:2], [have[2]]) == []
    assert due({"every": "30s"}, have[2:], [have[1], have[0]]) == [60]
    assert due({"every": "31s"}, have[2:], [have[1], have[0]]) == []
    assert "older than step 60" in why({"every": "30s"}, have[:2], [have[2]])[0]
    assert why({"every": "31s"}, have)[30] == "every 31s: 30 s after step 0"


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_a_metric_that_comes_after_the_export_counts():
    """An export that was made before its metric came is one of those that the next have to be better than."""
    exported = seen([1])
    assert due({"improves": "val_loss"}, seen([1, 2], {1: 0.4, 2: 0.5}), exported) == []
    assert due({"improves": "val_loss"}, seen([1, 2], {1: 0.4, 2: 0.3}), exported) == [2]


def test_a_metric_that_comes_late():
    """Without its metric a checkpoint is not due and says so; when the metric comes it is judged by what was done meanwhile."""
    assert why({"improves": "val_loss"}, seen([1]))[1] == "val_loss is not there yet"
    assert why({"metric": "val_loss", "below": 3}, seen([1]))[1] == "val_loss is not there yet"
    later = seen([2], {2: 1.0})
    assert due({"improves": "val_loss"}, seen([1], {1: 0.5}) + later, later) == [1]
    assert due({"improves": "val_loss"}, seen([1], {1: 2.0}) + later, later) == []
    assert due({"metric": "val_loss", "below": 3}, seen([1], {1: 2.0}) + later, later) == [1]


def test_what_is_no_measurement():
    """NaN is no measurement, in a candidate or in what was done; a loss of infinity is no improvement on nothing."""
    assert due([{"improves": "val_loss"}, {"metric": "val_loss", "below": 9}], seen([1, 2], {1: math.nan, 2: 5.0})) == [2]
    assert why({"improves": "val_loss"}, seen([1], {1: math.nan}))[1] == "val_loss is NaN"
    assert due({"improves": "val_loss"}, seen([2], {2: 5.0}), seen([1], {1: math.nan})) == [2]
    assert due({"improves": "val_loss"}, seen([1, 2, 3], {1: math.inf, 2: 5.0, 3: math.inf})) == [2]
    assert due({"improves": "val_loss", "mode": "max"}, seen([1, 2, 3], {1: -math.inf, 2: 5.0, 3: math.inf})) == [2, 3]


def test_a_tie_is_no_improvement():
    """An equal value is not better, nor one that is better by min_delta and no more."""
    assert due({"improves": "val_loss"}, seen([1, 2], {1: 2.0, 2: 2.0})) == [1]
    assert due({"improves": "val_loss", "min_delta": 0.5}, seen([1, 2, 3], {1: 2.0, 2: 1.5, 3: 1.25})) == [1, 3]
    assert due({"metric": "val_loss", "below": 2}, seen([1], {1: 2.0})) == []
    assert due({"metric": "val_loss", "above": 2}, seen([1], {1: 2.0})) == []


def test_improvement_counts_every_consolidated_one():
    """What was consolidated for another reason, or long ago, raises the bar as well."""
    assert due([{"at": [1]}, {"improves": "val_loss"}], seen([2], {2: 3.0}), seen([1], {1: 2.5})) == []
    assert due({"improves": "val_loss"}, seen([7, 8], {7: 2.0, 8: 0.5}), seen([1], {1: 1.0})) == [8]
    assert due({"improves": "val_loss", "mode": "max"}, seen([7, 8, 9], {7: 2.0, 8: 4.0, 9: 3.0}), seen([1, 2], {1: 1.0, 2: 2.5})) == [8]
    assert "improves on 1 of step 1" in why({"improves": "val_loss"}, seen([8], {8: 0.5}), seen([1], {1: 1.0}))[8]


def test_what_is_done_is_not_due():
    """A checkpoint that is consolidated is not due again by any rule, and given twice it is due once."""
    have = seen([5, 10])
    assert due(["every", {"every": 5}, {"at": [5, 10]}], have, [have[0]]) == [10]
    assert why("every", have, [have[0]])[5] == "already"
    assert due("every", [*have, *have]) == [5, 10]


def test_unknown_times_are_not_the_same():
    """Checkpoints whose time is not known (0) and whose step is the same are still different ones."""
    assert [one.due for one in decide("every", [Seen("a", 0, 0.0), Seen("b", 0, 0.0)], [], ended=False)] == [True, True]


def test_reasons_of_a_list():
    """A due one gives the reasons for it, another all against it."""
    when = [{"every": 2}, {"metric": "val_loss", "below": 2}, "final"]
    assert why(when, seen([4, 5], {4: 1.5, 5: 2.5})) == {
        4: "every 2; val_loss 1.5 is below 2",
        5: "not divisible by 2; val_loss 2.5 is not below 2; final: the run has not ended",
    }
    assert why(["every", {"at": [5]}, "final"], seen([5]), ended=True)[5] == "final; every; at 5"
    assert why({"phases": [{"until": 9, "when": {"every": 2}}]}, seen([8, 9])) == {
        8: "every 2 (until 9)",
        9: "after the last phase, which ends at step 9",
    }


# -- text --------------------------------------------------------------------------------------------------------------

TEXTS = [
    ("every", "every"),
    (" final ", "final"),
    ("true", True),
    ("False", False),
    ("every: 5", {"every": 5}),
    ("every:5", {"every": 5}),
    ("{every:5}", {"every": 5}),
    ("every: 30min", {"every": "30min"}),
    ("{improves: val_loss, mode: min}", {"improves": "val_loss", "mode": "min"}),
    ("improves: val_loss, mode: max, min_delta: 1e-3", {"improves": "val_loss", "mode": "max", "min_delta": 0.001}),
    ("improves: val/loss", {"improves": "val/loss"}),
    ("improves: eval loss ", {"improves": "eval loss"}),
    ("improves: train:loss", {"improves": "train:loss"}),
    ("improves: 'every: day''s, {loss}'", {"improves": "every: day's, {loss}"}),
    ("metric: acc, above: -.5", {"metric": "acc", "above": -0.5}),
    ("at: [1, 2,3,]", {"at": [1, 2, 3]}),
    ("[final, every: 5]", ["final", {"every": 5}]),
    ("final, every: 5", ["final", {"every": 5}]),
    ("{every: 5}, {every: 30min}", [{"every": 5}, {"every": "30min"}]),
    (
        "{phases: [{until: 10, when: never}, {when: [final, {every: 2}]}]}",
        {"phases": [{"until": 10, "when": "never"}, {"when": ["final", {"every": 2}]}]},
    ),
    ("phases: [\n  {until: 10, when: never},\n  {when: final},\n]", {"phases": [{"until": 10, "when": "never"}, {"when": "final"}]}),
    ('{"improves": "l\\u006fss", "mode": "min", "min_delta": 0.5}', {"improves": "loss", "mode": "min", "min_delta": 0.5}),
    ('{"at":[1,2]}', {"at": [1, 2]}),
    ("{'every': 5}", {"every": 5}),
    ("[]", []),
    ("{}", {}),
    ("null", None),
    ("5", 5),
]


@pytest.mark.parametrize(("text", "value"), TEXTS, ids=[text for text, _ in TEXTS])
def test_text(text, value):
    """Text of a command line gives what YAML or JSON would give."""
    assert parse_when(text) == value
    assert type(parse_when(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "named"),
    [("{every: 5", "'}'"), ("[final", "']'"), ("every: ", "at its end"), ("every: 5}", "at '}'"), ("{every: 5]", "']'"), ("{final}", "'final' has no key"), ("every: 5, every: 7", "twice"),
     ("{every: 5} every", "comma"), ("every: 5\nmode: min", "comma"), ("improves: 'a", "does not end"), ('improves: "\\x"', "cannot be read"), ("[[1]: 2]", "key"), (",", "word"), ("a: b: c", "comma"),
     ("[" * 500, "brackets"), ("{when: " * 500, "brackets"), ("", "not known"), (" \n", "not known"), ("x" * 100_001, "100,001")],
)  # fmt: skip
def test_text_that_cannot_be_read(text, named):
    """Text that is no flow style is one line that says where, with the forms that there are."""
    with pytest.raises(ConfigError) as caught:
        parse_when(text)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert caught.value.hint


# -- wrong words -------------------------------------------------------------------------------------------------------

LOOP: list[object] = []
LOOP.append(LOOP)

WRONG = [
    ("allways", ["'allways'", "every, never, final", "{every: 500}", "{improves: val_loss", "{at: ", "{phases: "]),
    ("Final", ["'Final'", "final"]),
    (None, ["None", "every, never, final"]),
    (5, ["5", "{every: 500}"]),
    (b"every", ["b'every'", "every, never, final"]),
    ([], ["[]", "never"]),
    ([[]], ["[]", "never"]),
    (["final", "sometimes"], ["'sometimes'", "every, never, final"]),
    ({}, ["{}", "every, never, final"]),
    ({"evry": 5}, ["'evry'", "{every: 500}"]),
    ({"mode": "min"}, ["'mode'", "{improves: val_loss, mode: min}"]),
    ({"every": 5, "at": [1]}, ["2 rules", "every, at", "[{every: ...}, {at: ...}]"]),
    ({"every": 5, "mode": "min"}, ["'mode' does not belong to every", "alone"]),
    ({"improves": "loss", "mod": "max"}, ["'mod' does not belong to improves", "mode and min_delta"]),
    ({"metric": "loss", "below": 1, "mode": "max"}, ["'mode' does not belong to metric", "below and above"]),
    ({"every": 0}, ["every: 0", "int >= 1"]),
    ({"every": -1}, ["every: -1"]),
    ({"every": True}, ["every: True"]),
    ({"every": 30.0}, ["every: 30.0", '"30s"']),
    ({"every": "5"}, ["every: '5'", "500"]),
    ({"every": "5 years"}, ["'5 years'", '"1d"']),
    ({"every": "final"}, ["'final'"]),
    ({"every": None}, ["None"]),
    ({"improves": ""}, ["improves: ''", "val_loss"]),
    ({"improves": 3}, ["improves: 3"]),
    ({"improves": "loss", "mode": "lowest"}, ["'lowest'", "min (lower is better) or max"]),
    ({"improves": "loss", "min_delta": -1}, ["min_delta=-1", ">= 0"]),
    ({"improves": "loss", "min_delta": "a"}, ["min_delta='a'"]),
    ({"improves": "loss", "min_delta": math.nan}, ["min_delta=nan"]),
    ({"metric": "loss"}, ["says no level", "below: 2.0", "improves"]),
    ({"metric": "loss", "below": 1, "above": 0}, ["both below and above"]),
    ({"metric": "loss", "below": "low"}, ["below='low'"]),
    ({"metric": "loss", "below": math.inf}, ["below=inf"]),
    ({"metric": "loss", "above": True}, ["above=True"]),
    ({"metric": None, "above": 1}, ["metric: None"]),
    ({"at": []}, ["at: []", "[100, 200]"]),
    ({"at": [1, -2]}, ["-2", "whole numbers"]),
    ({"at": [1.0]}, ["1.0"]),
    ({"at": "100"}, ["'100'"]),
    ({"at": True}, ["True"]),
    ({"phases": []}, ["phases: []", "until: 1000"]),
    ({"phases": "final"}, ["'final'", "until: 1000"]),
    ({"phases": ["final"]}, ["phase 1", "'final'", "until: 1000"]),
    ({"phases": [{"until": 5}]}, ["phase 1", "until and when"]),
    ({"phases": [{"until": 5, "when": "every", "mode": "min"}]}, ["phase 1", "until and when"]),
    ({"phases": [{"when": "every"}, {"when": "final"}]}, ["phase 1 of 2", "no until"]),
    ({"phases": [{"until": 5, "when": "every"}, {"until": 5, "when": "final"}]}, ["phase 2", "until=5", "after 5"]),
    ({"phases": [{"until": 0, "when": "every"}]}, ["until=0"]),
    ({"phases": [{"until": "5", "when": "every"}]}, ["until='5'"]),
    ({"phases": [{"until": 5, "when": "evry"}]}, ["'evry'", "every, never, final"]),
    (LOOP, ["20 levels"]),
    ("every, " * 3 + "nevr", ["'nevr'", "never"]),
    ("every: 5, at: [1]", ["2 rules", "[{every: ...}, {at: ...}]"]),
    ("final, improves: val_loss, mode: min", ["'mode'", "{improves: val_loss, mode: min}"]),
]


@pytest.mark.parametrize(("when", "named"), WRONG, ids=[repr(when)[:60] for when, _ in WRONG])
def test_wrong_words(when, named):
    """A wrong word is a ConfigError of one line, the same from every call, that names it and says which words there are."""
    with pytest.raises(ConfigError) as caught:
        Consolidate(when=when)
    message = str(caught.value)
    assert [word for word in named if word not in message] == []
    assert "\n" not in message
    assert len(message) < 500
    assert caught.value.hint
    for call in (lambda: decide(when, [], [], ended=False), lambda: binds(when, 1), lambda: describe(when), lambda: best_by(when)):
        with pytest.raises(ConfigError) as again:
            call()
        assert str(again.value) == message


@pytest.mark.parametrize(
    ("bad", "named"),
    [({"into": "lastest"}, ["'lastest'", '"latest" or "checkpoint"', "./lastest"]), ({"into": ""}, ["''", "latest"]), ({"into": None}, ["None", "path"]), ({"into": "a/\0"}, ["path"]),
     ({"name": "a/b"}, ["name='a/b'"]), ({"name": ""}, ["name=''"]), ({"name": ".x"}, ["name='.x'"]), ({"name": "x" * 101}, ["name="]), ({"name": None}, ["name=None"]), ({"name": "a\n"}, ["name="]),
     ({"group": ""}, ["group=''"]), ({"group": 1}, ["group=1"]), ({"keep": 0}, ["keep=0", "None to keep all"]), ({"keep": True}, ["keep=True"]), ({"keep": 1.5}, ["keep=1.5"]),
     ({"drop_shards": "model"}, ["drop_shards='model'", '"optimizer" or "all"']), ({"drop_shards": None}, ["drop_shards=None"]), ({"drop_shards": 1}, ["drop_shards=1"]),
     ({"dtype": "int8"}, ["dtype='int8'", "keep, bf16, fp16 or fp32"]), ({"dtype": None}, ["dtype=None"]),
     ({"max_shard_size": "5"}, ["'5'", "GB", "GiB"]), ({"max_shard_size": "5Gb"}, ["'5Gb'"]), ({"max_shard_size": 0}, ["0"]), ({"max_shard_size": True}, ["True"]), ({"max_shard_size": "0GB"}, ["'0GB'"]),
     ({"include": 5}, ["include=5"]), ({"include": [""]}, ["include="]), ({"include": [5]}, ["include=[5]"]), ({"include": {"a": "b"}}, ["include="]),
     ({"rename": {"(": "x"}}, ["'('", "re.sub"]), ({"rename": {"a": r"\1"}}, [r"\1", "re.sub"]), ({"rename": {"a": r"\g<b>"}}, ["re.sub"]), ({"rename": "a"}, ["rename='a'"]), ({"rename": {"a": 1}}, ["rename="]),
     ({"assets": ""}, ["assets=''"]), ({"assets": 5}, ["5", "path"]), ({"wait": "yes"}, ["wait='yes'"]), ({"wait": 1}, ["wait=1"])],
    ids=repr,
)  # fmt: skip
def test_settings_are_checked(bad, named):
    """A setting that cannot be meant is a ConfigError of one line that says what would be right."""
    with pytest.raises(ConfigError) as caught:
        Consolidate(**bad)
    message = str(caught.value)
    assert [word for word in named if word not in message] == []
    assert "\n" not in message
    assert caught.value.hint


# -- the knob ----------------------------------------------------------------------------------------------------------


def test_defaults():
    """Without a word it is one model at the end, under the run's LATEST, as it was trained."""
    knob = Consolidate()
    assert (knob.when, knob.into, knob.name, knob.keep, knob.dtype, knob.drop_shards, knob.wait) == (
        "final",
        "latest",
        "model",
        1,
        "keep",
        False,
        True,
    )
    assert (knob.group, knob.max_shard_nbytes, knob.include, knob.rename, knob.assets) == (None, None, (), {}, None)


def test_one_form_of_each_setting():
    """What can be written in several ways is kept in one, and settings that say the same are equal."""
    import torch

    assert [Consolidate(dtype=word).dtype for word in ("bfloat16", "float16", "float32", "bf16", torch.bfloat16)] == [
        "bf16",
        "fp16",
        "fp32",
        "bf16",
        "bf16",
    ]
    assert Consolidate(drop_shards=True).drop_shards == "all"
    assert Consolidate(include="head.*").include == Consolidate(include=["head.*"]).include == ("head.*",)
    assert Consolidate(into=pathlib.Path("models")).into == "./models"
    assert Consolidate(into=pathlib.Path("/models/new")).into == Consolidate(into="/models/new").into == "/models/new"
    assert Consolidate(into=pathlib.Path("latest")).into == "./latest"
    assert Consolidate(assets=pathlib.Path("base")).assets == "base"
    assert Consolidate(when=True) == Consolidate(when="every") == Consolidate(when=["every"])
    assert Consolidate(max_shard_size="5GB").max_shard_nbytes == 5_000_000_000


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 1000**3), ("5GiB", 5 * 1024**3), (" 1.5 MB ", 1_500_000), ("1KiB", 1024), ("1kB", 1000), ("1KB", 1000), ("2TB", 2 * 1000**4), ("1TiB", 1024**4), ("7B", 7), (12, 12), ("250MiB", 250 * 1024**2)],
)  # fmt: skip
def test_sizes(text, nbytes):
    """GB is decimal and GiB binary."""
    assert size_nbytes(text) == nbytes


def test_documents():
    """Settings go through JSON and come back equal; a document names every setting, and what it leaves out has its default."""
    knob = Consolidate(
        when=[{"improves": "val_loss"}, "final"], into="/models", name="bert", group="ema", keep=None, drop_shards="optimizer", dtype="bf16",
        max_shard_size="5GB", include=("a.*", "b.?"), rename={r"^a\.(.*)": r"b.\1", "x": ""}, assets="base", wait=False,
    )  # fmt: skip
    document = json.loads(json.dumps(to_document(knob)))
    assert set(document) == {field.name for field in dataclasses.fields(Consolidate)}
    assert from_document(document) == knob
    assert list(from_document(document).rename) == [r"^a\.(.*)", "x"]
    assert from_document(to_document(Consolidate())) == Consolidate() == from_document({})
    assert from_document({"when": {"every": 5}, "keep": 2}) == Consolidate(when={"every": 5}, keep=2)


def test_settings_are_values():
    """Settings can be copied, pickled and changed by replace; neither their document nor what they were made from reaches into them."""
    source = {"phases": [{"until": 5, "when": ["final", {"at": [1]}]}]}
    knob = Consolidate(when=source, rename={"a": "b"})
    before = copy.deepcopy(to_document(knob))
    to_document(knob)["when"]["phases"][0]["until"] = 7
    to_document(knob)["rename"]["c"] = "d"
    source["phases"][0]["until"] = 9
    assert to_document(knob) == before
    assert pickle.loads(pickle.dumps(knob)) == copy.deepcopy(knob) == knob
    assert dataclasses.replace(knob, keep=3) == Consolidate(when=before["when"], rename={"a": "b"}, keep=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        knob.keep = 5


@pytest.mark.parametrize(
    ("document", "named"),
    [({"whem": "final"}, ["'whem'", "when, into, name, group, keep, drop_shards, dtype, max_shard_size, include, rename, assets, wait"]), ({"every": 5}, ["every belongs under when", "{when: {every: ...}}"]),
     ({5: 5}, ["5", "when, into"]), ("final", ["'final' is not a mapping", "{when: 'final'}"]), (None, ["None", "mapping"]), ({"when": "final", "keep": 0}, ["keep=0"])],
)  # fmt: skip
def test_documents_are_checked(document, named):
    """An unknown key is an error that lists the keys."""
    with pytest.raises(ConfigError) as caught:
        from_document(document)
    assert [word for word in named if word not in str(caught.value)] == []


# -- in words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "words"),
    [("every", "each checkpoint"), ("never", "no checkpoint"), ("final", "the newest checkpoint when the run ends"), ({"every": 5}, "each checkpoint whose step is divisible by 5"),
     ({"every": "30min"}, "the first checkpoint, then one that was saved 30min or more after the last consolidated one"),
     ({"improves": "acc", "mode": "max", "min_delta": 0.1}, "each checkpoint whose acc is higher by more than 0.1 than that of every consolidated one"),
     ({"improves": "loss"}, "each checkpoint whose loss is lower than that of every consolidated one"), ({"metric": "loss", "below": 2}, "each checkpoint whose loss is below 2"),
     ({"at": [7]}, "the checkpoint of step 7"), ({"at": range(1, 20)}, "the checkpoints of steps 1, 2, 3, 4, 5, 6, 7, 8, ... (19 steps)"),
     (["final", {"at": [7]}], "the newest checkpoint when the run ends, and the checkpoint of step 7"),
     ({"phases": [{"until": 10, "when": "never"}, {"until": 20, "when": "every"}, {"when": "final"}]},
      "before step 10: no checkpoint; from step 10 and before step 20: each checkpoint; from step 20: the newest checkpoint when the run ends"),
     ([{"phases": [{"when": "every"}]}, "final"], "(each checkpoint), and the newest checkpoint when the run ends")],
)  # fmt: skip
def test_described(when, words):
    """`--dry-run` says in words what a schedule does."""
    assert describe(when) == words


def test_by_what_there_is_a_best():
    """The first `improves`, wherever it stands, says what BEST is."""
    assert best_by(
        ["final", {"phases": [{"until": 5, "when": "never"}, {"when": [{"improves": "acc", "mode": "max"}, {"improves": "loss"}]}]}]
    ) == ("acc", "max")
    assert best_by({"improves": "loss"}) == ("loss", "min")
    assert best_by(["final", {"metric": "loss", "below": 1}]) is None


def test_the_schedule_starts_without_torch():
    """Deciding needs neither torch nor numpy, so that a command about a schedule starts at once."""
    program = "import sys, everystep.schedule; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
