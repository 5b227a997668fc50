"""What is kept and why."""

from __future__ import annotations

import math

import pytest

from everystep.errors import ConfigError
from everystep.policy import Candidate, Keep, retain


def candidates(steps, *, attempt=1, **each):
    """One candidate a step; ``each`` maps a field to {step: value}."""
    return [
        Candidate(key=f"{step}-{attempt}", step=step, attempt=attempt, **{"metrics": {}, **{field: values[step] for field, values in each.items() if step in values}})
        for step in steps
    ]


def kept(decisions):
    return sorted(decision.step for decision in decisions if decision.keep)


def test_last():
    """The newest few stay, whatever order they are given in; each has a reason either way, newest first."""
    decisions = retain(candidates([3, 1, 5, 2, 4]), Keep(last=2))
    assert kept(decisions) == [4, 5]
    assert [decision.step for decision in decisions] == [5, 4, 3, 2, 1]
    assert all(decision.reason for decision in decisions)
    assert "newest good" in decisions[0].reason
    assert "older" in decisions[2].reason
    assert kept(retain(candidates([3, 1, 5]), Keep(last=None))) == [1, 3, 5]
    assert retain([], Keep()) == []


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 4)])
def test_best_is_not_the_newest(mode, best):
    """F49: keep 1 newest and 1 best: both stay."""
    metrics = {step: {"loss": value} for step, value in [(1, 2.0), (2, 1.0), (3, 3.0), (4, 9.0), (5, 4.0)]}
    decisions = retain(candidates(range(1, 6), metrics=metrics), Keep(last=1, best=1, metric="loss", mode=mode))
    assert kept(decisions) == sorted([best, 5])
    assert "best 1 by loss" in next(decision.reason for decision in decisions if decision.step == best)


def test_best_ignores_what_is_no_measurement():
    """A NaN, a missing metric and a corrupt checkpoint are never the best; of equals the newer is."""
    metrics = {1: {"loss": math.nan}, 2: {"loss": 1.0}, 3: {"loss": 1.0}, 4: {"other": 0.0}, 5: {"loss": 0.0}, 6: {"loss": math.inf}, 7: {}}
    found = retain(candidates(range(1, 8), metrics=metrics, verified={5: False}), Keep(last=1, best=1, metric="loss"))
    assert kept(found) == [3, 7]
    found = retain(candidates([1, 2], metrics={1: {"loss": -math.inf}}), Keep(last=1, best=3, metric="loss"))
    assert kept(found) == [1, 2]


def test_every():
    """Each N-th step stays as well."""
    assert kept(retain(candidates(range(10)), Keep(last=1, every=4))) == [0, 4, 8, 9]


def test_pinned_and_held():
    """What is pinned or being read stays, also out of an abandoned timeline, and says so."""
    decisions = retain(candidates([1, 2, 3, 4], pinned={1: True}, held={2: True}, in_lineage={1: False}), Keep(last=1))
    assert kept(decisions) == [1, 2, 4]
    assert {decision.step: decision.reason for decision in decisions}[1] == "pinned"
    assert "held" in {decision.step: decision.reason for decision in decisions}[2]


def test_corrupt_ones_count_for_nothing():
    """Known-corrupt checkpoints never push out good ones, and the newest good one stays however many corrupt ones are newer."""
    decisions = retain(candidates(range(1, 7), verified={6: False, 5: False, 3: False, 1: False}), Keep(last=2))
    assert kept(decisions) == [2, 3, 4, 5, 6]
    assert kept(retain(candidates([1, 2, 3], verified={2: False, 3: False}), Keep(last=1))) == [1, 2, 3]


def test_newest_verified_stays():
    """The newest checkpoint that was really verified stays, older than the last ones though it is."""
    assert kept(retain(candidates(range(1, 8), verified={2: True, 3: True}), Keep(last=2))) == [3, 6, 7]


def test_earlier_attempts_of_the_lineage():
    """F51: after a restart the checkpoints of earlier attempts are seen and counted."""
    found = retain(candidates([1, 2, 3]) + candidates([4], attempt=2), Keep(last=2))
    assert kept(found) == [3, 4]


def test_abandoned_timeline():
    """Checkpoints of an abandoned timeline count for nothing: newer steps there never push out the lineage's, and they go."""
    abandoned = candidates([150, 200], in_lineage={150: False, 200: False})
    found = retain(candidates([50, 100]) + abandoned + candidates([101], attempt=2), Keep(last=2))
    assert kept(found) == [100, 101]
    assert "abandoned" in found[-1].reason
    assert kept(retain(abandoned + candidates([1], attempt=2), Keep(last=None))) == [1, 150, 200]


def test_a_fresh_start_keeps_the_newest_good_one():
    """While a new lineage has no checkpoint the newest good one of the old timelines stays."""
    old = {1: False, 2: False, 3: False}
    assert kept(retain(candidates([1, 2, 3], in_lineage=old, verified={3: False}), Keep(last=1))) == [2]


@pytest.mark.parametrize(
    ("bad", "named"),
    [({"last": 0}, "last=0"), ({"last": -1}, "last=-1"), ({"last": True}, "last=True"), ({"last": 1.5}, "last=1.5"), ({"best": -1}, "best=-1"), ({"best": None}, "best=None"),
     ({"best": 1}, "metric"), ({"best": 1, "metric": ""}, "metric"), ({"mode": "least"}, "least"), ({"every": 0}, "every=0"), ({"every": "2"}, "every='2'")],
)  # fmt: skip
def test_keep_is_checked(bad, named):
    """A Keep that cannot be meant is a ConfigError (a ValueError) that names it."""
    with pytest.raises(ConfigError) as caught:
        Keep(**bad)
    assert named in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert caught.value.hint


def test_keep_accepts():
    """Ordinary choices are accepted."""
    Keep(last=None, best=2, metric="val_loss", mode="max", every=100)
    Keep()
