"""What users pass to the facade, checked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from everystep.errors import ConfigError
from everystep.trainer.tensors import is_text


def outside_inference() -> contextlib.AbstractContextManager[None]:
    """Tensors of ours that are made in inference mode could not be written to, nor trained on, outside of it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def as_url(path: str | os.PathLike[str]) -> str:
    """The run's absolute path, or its URL as it is."""
    text = os.fspath(path)
    if not text or "\0" in text or not is_text(text):
        message = f"the run's path is {text!r}" if text else "the run's path is empty"
        raise ConfigError(message, kind="path", hint="name a folder for the run, such as 'runs/gpt'")
    return text if "://" in text else str(Path(text).expanduser().absolute())


def check_numbers(*, memory_budget: object, max_failures: object, max_failing_s: object, idle_s: object, replicas: object,
                  replica_nbytes_s: object) -> None:  # fmt: skip
    """ConfigError for a checkpointer's option that is no sensible number."""
    for name, value, kinds, least in (
        ("memory_budget", memory_budget, (int,), 1),
        ("max_failures", max_failures, (int,), 0),
        ("max_failing_s", max_failing_s, (int, float), 0),
        ("idle_s", idle_s, (int, float), 0),
        ("replicas", replicas, (int,), 0),
        ("replica_nbytes_s", replica_nbytes_s, (int,), 1),
    ):
        if value is None and name in {"memory_budget", "replica_nbytes_s"}:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool) or not value >= least:
            unit = "bytes" if name == "memory_budget" else "seconds" if name.endswith("_s") else "failures"
            raise ConfigError(f"{name} is {value!r}", key=name, kind="option", hint=f"pass a number of {unit}, at least {least}")


def some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"


def checked_step(step: int) -> int:
    """The step as a plain int; ConfigError when it is none."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        message = f"step is {step!r}, a {type(step).__name__}"
        raise ConfigError(message, kind="step", hint="pass the training step as an int >= 0")
    number = int(step.__index__())
    if not 0 <= number < 1 << 63:
        message = f"step is {number}"
        raise ConfigError(message, kind="step", hint="pass the training step as an int >= 0 (of at most 63 bits)")
    return number


def numbers_of(metrics: Mapping[str, float], step: int) -> dict[str, float]:
    """The metrics as floats; ConfigError names one that is no number."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            name_is_text = False
        else:
            name_is_text = isinstance(name, str) and is_text(name)
        if not name_is_text:
            message = f"metric {name!r} of step {step} is {value!r:.80}"
            raise ConfigError(message, step=step, kind="metrics", hint="metrics are numbers by name, such as {'val_loss': 1.5}")
    return numbers
