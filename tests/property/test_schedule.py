"""Decisions do not depend on who asks, in which order, or how often."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import ConfigError
from everystep.schedule import Consolidate, Seen, binds, decide, describe, from_document, parse_when, read_when, to_document

METRICS = ["a", "b"]
names = st.sampled_from(METRICS)
durations = st.sampled_from(["1s", "10s", "1min", "1h"])
levels = st.integers(-5, 5).map(float)

memoryless = (
    st.sampled_from(["every", "never"])
    | st.builds(lambda steps: {"every": steps}, st.integers(1, 7))
    | st.builds(lambda steps: {"at": steps}, st.lists(st.integers(0, 40), min_size=1, max_size=5))
    | st.builds(lambda name, side, level: {"metric": name, side: level}, names, st.sampled_from(["below", "above"]), levels)
)
with_memory = st.builds(lambda duration: {"every": duration}, durations) | st.builds(
    lambda name, mode, delta: {"improves": name, "mode": mode, **({"min_delta": delta} if delta else {})},
    names,
    st.sampled_from(["min", "max"]),
    st.sampled_from([0.0, 0.5, 2.0]),
)


def phased(inner):
    """Phases of such rules: rising ends, the last with or without one."""
    return st.builds(
        lambda ends, rules, open_ended: {
            "phases": [
                {**({} if open_ended and number == len(ends) - 1 else {"until": until}), "when": rule}
                for number, (until, rule) in enumerate(zip(sorted(ends), rules, strict=False))
            ]
        },
        st.shared(st.sets(st.integers(1, 40), min_size=1, max_size=3), key="ends"),
        st.shared(st.sets(st.integers(1, 40), min_size=1, max_size=3), key="ends").flatmap(
            lambda ends: st.lists(inner, min_size=len(ends), max_size=len(ends))
        ),
        st.booleans(),
    )


def nested(leaf):
    return st.recursive(leaf, lambda inner: st.lists(inner, min_size=1, max_size=3) | phased(inner), max_leaves=6)


schedules = nested(memoryless | with_memory | st.just("final"))
values = st.sampled_from([math.nan, math.inf, -math.inf]) | st.integers(-6, 6).map(lambda half: half / 2)


@st.composite
def histories(draw, *, monotone=None):
    """Checkpoints of rising steps, with times that rise or (a clock that was set back) do not, and some of the metrics."""
    steps = sorted(draw(st.sets(st.integers(0, 45), max_size=14)))
    times = draw(st.lists(st.integers(1, 200), min_size=len(steps), max_size=len(steps), unique=True))
    if draw(st.booleans()) if monotone is None else monotone:
        times = sorted(times)
    return [
        Seen(f"{step:04}-1", step, float(time), draw(st.dictionaries(names, values, max_size=2)))
        for step, time in zip(steps, times, strict=True)
    ]


def due(decisions):
    return {decision.key for decision in decisions if decision.due}


def but(have, keys):
    return [one for one in have if one.key in keys]


@given(schedules, histories(), st.booleans(), st.randoms(use_true_random=False), st.data())
def test_decisions_are_a_function_of_what_is_known(when, have, ended, random, data):
    """Each checkpoint gets one decision with a reason, oldest first, whatever order is given, and the same at every call."""
    done = but(have, set(data.draw(st.lists(st.sampled_from([one.key for one in have]), unique=True)))) if have else []
    decisions = decide(when, have, done, ended=ended)
    assert [decision.key for decision in decisions] == [one.key for one in have]
    assert all(decision.reason for decision in decisions)
    shuffled, done_shuffled = list(have), list(done)
    random.shuffle(shuffled)
    random.shuffle(done_shuffled)
    again = decide(read_when(when), shuffled, done_shuffled, ended=ended)
    assert [(one.key, one.due) for one in again] == [(one.key, one.due) for one in decisions]
    assert due(decisions).isdisjoint(one.key for one in done)


@given(schedules, histories(), st.booleans())
def test_one_at_a_time_is_all_at_once(when, have, ended):
    """F57: an agent that decides after each commit and a command that decides afterwards agree; and so does one who has forgotten the older."""
    at_once = due(decide(when, have, [], ended=ended))
    one_by_one, alone = [], []
    for number, one in enumerate(have, 1):
        last = ended and number == len(have)
        one_by_one += but(have, due(decide(when, have[:number], one_by_one, ended=last)))
        alone += but(have, due(decide(when, [one], alone, ended=last)))
    assert {one.key for one in one_by_one} == at_once
    assert {one.key for one in alone} == at_once
    assert len(one_by_one) == len(at_once)


@given(schedules, histories(), st.booleans())
def test_deciding_again_changes_nothing(when, have, ended):
    """F57: once what is due is done nothing is due any more, also when the done ones or the others are no longer there."""
    done = but(have, due(decide(when, have, [], ended=ended)))
    assert due(decide(when, have, done, ended=ended)) == set()
    assert due(decide(when, done, done, ended=ended)) == set()


@given(schedules, histories(), st.data())
def test_late_metrics(when, have, data):
    """Metrics that come later, in any order, make no checkpoint due twice, and in the end there is nothing left to do."""
    order = data.draw(st.permutations(range(len(have))))
    known = {one.key: Seen(one.key, one.step, one.saved_at, {}) for one in have}
    done = []
    for number in order:
        found = but(have, due(decide(when, list(known.values()), done, ended=False)))
        done += found
        known[have[number].key] = have[number]
    done += but(have, due(decide(when, list(known.values()), done, ended=True)))
    assert len({one.key for one in done}) == len(done)
    assert due(decide(when, have, done, ended=True)) == set()


@given(st.lists(schedules, min_size=1, max_size=3), histories(), st.integers(0, 14), st.booleans())
def test_a_list_is_any_of_its_rules(rules, have, number, ended):
    """By what is known at that time a checkpoint is due by a list exactly when it is by one of its rules."""
    done, rest = have[:number], have[number : number + 1]
    assert due(decide(rules, rest, done, ended=ended)) == set().union(*(due(decide(rule, rest, done, ended=ended)) for rule in rules))


@given(st.lists(nested(memoryless), min_size=1, max_size=3), histories())
def test_lists_are_unions(rules, have):
    """Where no rule looks back, a list gives what its rules give, together."""
    assert due(decide(rules, have, [], ended=False)) == set().union(*(due(decide(rule, have, [], ended=False)) for rule in rules))


@given(histories(), st.lists(st.booleans(), min_size=15, max_size=15))
def test_final_is_due_at_most_once(have, ends):
    """F57: however often a run ends, is asked about again and goes on, `final` is due once an end, for the newest then."""
    done = []
    for number, _ in enumerate(have, 1):
        for _ in range(2):
            found = due(decide("final", have[:number], done, ended=ends[number]))
            assert found <= {have[number - 1].key}
            done += but(have, found)
    assert len({one.key for one in done}) == len(done)
    assert len(done) <= sum(ends[1 : len(have) + 1])


@given(histories(monotone=True), st.data())
def test_final_of_a_run_that_ended(have, data):
    """F57: of an ended run the newest is due unless it is done, whatever else was consolidated."""
    done = but(have, set(data.draw(st.lists(st.sampled_from([one.key for one in have]), unique=True)))) if have else []
    expected = {have[-1].key} - {one.key for one in done} if have else set()
    assert due(decide("final", have, done, ended=True)) == expected


@given(schedules, histories())
def test_bound_steps_are_due(when, have):
    """A step that is bound for the disk is due for its number, whatever was done before."""
    for one in have:
        if binds(when, one.step):
            assert due(decide(when, [one], [other for other in have if other is not one], ended=False)) == {one.key}


def by_hand(when, have, done):
    """The due ones of a schedule without `final`, written down once more in the plainest way."""
    done, found = list(done), set()

    def holds(rule, one):
        if isinstance(rule, list):
            return any(holds(inner, one) for inner in rule)
        if isinstance(rule, str):
            return rule == "every"
        if "phases" in rule:
            inside = [phase["when"] for phase in rule["phases"] if phase.get("until", math.inf) > one.step]
            return bool(inside) and holds(inside[0], one)
        if "at" in rule:
            return one.step in rule["at"]
        if "metric" in rule:
            value = one.metrics.get(rule["metric"], math.nan)
            return value < rule["below"] if "below" in rule else value > rule["above"]
        if "improves" in rule:
            sign = {"min": 1, "max": -1}[rule["mode"]]
            value = sign * one.metrics.get(rule["improves"], math.nan)
            others = [sign * other.metrics.get(rule["improves"], math.nan) for other in done]
            return all(value < other - rule.get("min_delta", 0) for other in [math.inf, *others] if not math.isnan(other))
        if isinstance(rule["every"], int):
            return one.step % rule["every"] == 0
        seconds = {"1s": 1, "10s": 10, "1min": 60, "1h": 3600}[rule["every"]]
        return all(one.saved_at - other.saved_at >= seconds for other in done)

    for one in have:
        if all(one.key != other.key for other in done) and holds(when, one):
            found.add(one.key)
            done.append(one)
    return found


@given(nested(memoryless | with_memory), histories(), st.integers(0, 14))
def test_as_by_hand(when, have, number):
    """Decisions are those of a second, plainer reading of what the forms mean."""
    assert due(decide(when, have, have[:number], ended=False)) == by_hand(when, have, have[:number])


def said(value):
    """A value in flow style, words without quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {said(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(said, value)) + "]"
    return str(value)


@given(schedules)
def test_the_same_in_python_json_and_on_the_command_line(when):
    """A schedule says the same as a Python value, as JSON, in flow style and in its one form, and goes through a document unchanged."""
    assert parse_when(json.dumps(when)) == when
    assert parse_when(said(when)) == when
    form = Consolidate(when=when).when
    assert Consolidate(when=form).when == form
    assert Consolidate(when=said(when)).when == form
    assert from_document(json.loads(json.dumps(to_document(Consolidate(when=when))))) == Consolidate(when=when)
    assert describe(when) == describe(form)


WORDS = [*"{}[],:'\"\\ \n0159.e-~", "every", "final", "improves", "at", "when", "phases", "every: ", "{until: 5, when: "]


@given(st.lists(st.sampled_from(WORDS), max_size=30).map("".join) | st.text(max_size=10))
def test_any_text_is_read_or_refused(text):
    """Whatever stands on the command line, it is a schedule or a ConfigError of one line, nothing else."""
    try:
        form = Consolidate(when=text).when
    except ConfigError as error:
        said = str(error)
    else:
        said = describe(form)
    assert said
    assert len(said.splitlines()) == 1
