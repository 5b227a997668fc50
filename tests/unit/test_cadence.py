from __future__ import annotations

import dataclasses

import pytest

from everystep.errors import ConfigError
from everystep.policy import Cadence, disk_bound, duration_s, is_due


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("30s", 30.0), ("2min", 120.0), ("1h", 3600.0), ("1d", 86400.0), (" 1.5 min ", 90.0), (".5s", 0.5)],
)
def test_duration_is_read(text, seconds):
    """Every documented unit, with and without a fraction and spaces."""
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "30", "30 sec", "-1s", "0s", "1e3s", "٣s", "nan", float("nan"), float("inf"), 0, -1.0, 7, 0.25, True, None, [1]])
def test_what_is_no_duration_is_refused(text):
    """Anything else is a ConfigError that names the units."""
    with pytest.raises(ConfigError, match="250ms"):
        duration_s(text)


@pytest.mark.parametrize("arguments", [{"memory": 0}, {"memory": -1}, {"memory": 1.5}, {"memory": True}, {"memory": "1"}, {"disk": 0}, {"disk": -5},
                                       {"disk": True}, {"disk": 0.0}, {"disk": "soon"}, {"disk": float("nan")}])  # fmt: skip
def test_wrong_cadence_is_refused_at_once(arguments):
    """A cadence that makes no sense is a ConfigError when it is made, not at the first save."""
    with pytest.raises(ConfigError):
        Cadence(**arguments)


@pytest.mark.parametrize(("number", "written"), [(30.0, '"30s"'), (0.5, '"0.5s"')])
def test_float_is_neither_steps_nor_seconds(number, written):
    """``disk=30`` is steps, so ``disk=30.0`` is refused, and the hint says how either is written."""
    with pytest.raises(ConfigError, match="steps or seconds") as caught:
        Cadence(disk=number)
    assert written in caught.value.hint
    assert "int" in caught.value.hint


def test_cadence_cannot_be_changed():
    """A cadence is a value."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Cadence().memory = 2


def test_due_by_number():
    """The steps divisible by N are due, step 0 among them."""
    assert [step for step in range(10) if is_due(step, 4)] == [0, 4, 8]


def test_bound_by_step_number():
    """``disk=N`` binds the steps divisible by N whatever the time."""
    cadence = Cadence(disk=3)
    assert [step for step in range(1, 10) if disk_bound(step, cadence, now=0.0, last_bound_at=None)] == [3, 6, 9]


@pytest.mark.parametrize("disk", [None, False])
def test_nothing_is_bound_without_a_number(disk):
    """``None`` leaves it to the disk and ``False`` to the user: neither binds a step."""
    assert not any(disk_bound(step, Cadence(disk=disk), now=1e9, last_bound_at=None) for step in range(5))


def test_bound_by_time():
    """A duration binds the first save of all, then the first one when the time is up, not before."""
    cadence = Cadence(disk="10s")
    bound, last = [], None
    for now in (0.0, 4.0, 9.99, 10.0, 12.0, 25.0, 34.0, 35.0):
        if disk_bound(1, cadence, now=now, last_bound_at=last):
            bound.append(now)
            last = now
    assert bound == [0.0, 10.0, 25.0, 35.0]
