"""The random number generators as stateful objects: tensors and plain values, no pickle."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch


class Stateful(Protocol):
    """An object that hands out its state and takes it back."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: tensors, arrays and plain values, nested."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take back what ``state_dict`` gave."""
        ...


def _python_state(generator: random.Random | None) -> dict[str, Any]:
    version, words, gauss = (random if generator is None else generator).getstate()
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}


def _set_python_state(generator: random.Random | None, saved: Mapping[str, Any]) -> None:
    (random if generator is None else generator).setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))


class RNG:
    """Stateful for the random number generators of Python, NumPy and torch (CPU and every CUDA device).

    NumPy's is its legacy global one; put a ``numpy.random.Generator`` (likewise a ``random.Random`` or ``torch.Generator``) into the state
    under a name of its own. It is restored after everything else, so that nothing draws numbers after it.

    The number of CUDA devices may differ at restore: devices 0, 1, ... take the states there are; a device without one keeps what it
    has. Processes that have not used CUDA yet store no CUDA state.
    """

    def state_dict(self) -> dict[str, Any]:
        """States of all generators. Reads only: no number is drawn, CUDA is not initialised."""
        return {
            "python": _python_state(None),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (the legacy global generator is what is saved)
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set all generators to the saved states."""
        _set_python_state(None, state_dict["python"])
        np.random.set_state(state_dict["numpy"])  # noqa: NPY002
        torch.set_rng_state(state_dict["torch"])
        if torch.cuda.is_available():
            for index, state in enumerate(state_dict["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, index)


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _PythonRandom:
    def __init__(self, generator: random.Random) -> None:
        self.generator = generator

    def state_dict(self) -> Mapping[str, Any]:
        return _python_state(self.generator)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _set_python_state(self.generator, state_dict)


class _NumpyGenerator:
    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> Mapping[str, Any]:
        return self.generator.bit_generator.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state_dict


class _NumpyRandomState:
    def __init__(self, generator: np.random.RandomState) -> None:
        self.generator = generator

    def state_dict(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.generator.get_state(legacy=False)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict)


class _TorchGenerator:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> Mapping[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict["state"].cpu())


_ADAPTERS: tuple[tuple[type, Any], ...] = (
    (random.Random, _PythonRandom),
    (np.random.Generator, _NumpyGenerator),
    (np.random.RandomState, _NumpyRandomState),
    (torch.Generator, _TorchGenerator),
)


def generator(value: object) -> Stateful | None:
    """A stateful view of a random number generator; None for anything else."""
    if isinstance(value, RNG):
        return value
    for kind, adapter in _ADAPTERS:
        if isinstance(value, kind):
            made: Stateful = adapter(value)
            return made
    return None
