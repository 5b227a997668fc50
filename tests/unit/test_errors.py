"""The error tree: what a reader can catch, and that an error survives the way between processes."""

from __future__ import annotations

import pickle

import pytest

from everystep import errors

TREE = [getattr(errors, name) for name in errors.__all__ if name != "rebuild"]


@pytest.mark.parametrize("cls", TREE)
def test_every_field_survives_pickling(cls):
    """An error that crosses a process boundary keeps its type and every field."""
    made = cls("it failed", step=3, rank=1, key="model.w", kind="disk-full", hint="free some space", errno=28)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is cls
    assert vars(again) == vars(made)
    assert str(again) == "it failed (free some space)"


@pytest.mark.parametrize("cls", TREE)
def test_rebuild_makes_the_same_class(cls):
    """``rebuild`` finds each class of the tree by its name."""
    assert type(errors.rebuild(cls.__name__, "x")) is cls


def test_rebuild_of_an_unknown_name_is_the_root():
    """A name from a newer version still becomes an everystep error with its message."""
    made = errors.rebuild("QuantumError", "the cat")
    assert type(made) is errors.CheckpointError
    assert str(made) == "the cat"


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.NotFoundError, LookupError), (errors.LayoutError, ValueError), (errors.StateError, TypeError), (errors.CapacityError, OSError),
        (errors.StoreError, OSError), (errors.TransientStoreError, errors.StoreError), (errors.PermanentStoreError, errors.StoreError),
        (errors.ConfigError, ValueError),
    ],
)  # fmt: skip
def test_builtin_parents(cls, builtin):
    """Code that catches the builtin kind of error catches ours."""
    assert issubclass(cls, builtin)
    assert issubclass(cls, errors.CheckpointError)


def test_errno_is_the_operating_systems():
    """``errno`` of the errors that are OSErrors is readable the usual way."""
    assert errors.CapacityError("disk full", errno=28).errno == 28
    assert errors.StoreError("no number").errno is None
