"""From what the user writes to rules; whatever is wrong is one line that says what would be right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everystep.errors import ConfigError
from everystep.policy import duration_s
from everystep.schedule.rules import AnyOf, At, EveryDuration, EverySteps, Improves, Level, Phases, Rule, Word
from everystep.schedule.text import DEEPEST, FORMS_HINT, parse_when, shown, unknown


def read_when(when: Any, depth: int = 0) -> Rule:
    """Read ``when`` in any of its forms; ConfigError says which there are."""
    if isinstance(when, Rule):
        return when
    if depth > DEEPEST:
        raise ConfigError(f"when has more than {DEEPEST} levels of lists and phases", hint="write it flatter; lists in lists are one list")
    if isinstance(when, bool):
        return Word("every" if when else "never")
    if isinstance(when, str):
        if when in {"every", "never", "final"}:
            return Word(when)
        read = parse_when(when)
        if isinstance(read, str):
            raise unknown(when)
        return read_when(read, depth + 1)
    if isinstance(when, Mapping):
        return _mapping(when, depth)
    if isinstance(when, Sequence) and not isinstance(when, bytes | bytearray | memoryview):
        rules: list[Rule] = []
        for one in when:
            rule = read_when(one, depth + 1)
            rules += rule.inner() if isinstance(rule, AnyOf) else [rule]
        if not rules:
            raise ConfigError("when=[] is a list of nothing", hint='write "never" for no consolidation; ' + FORMS_HINT)
        return rules[0] if len(rules) == 1 else AnyOf(tuple(rules))
    raise unknown(when)


def _mapping(when: Mapping[Any, Any], depth: int) -> Rule:
    named = [key for key in FORMS if key in when]
    if len(named) != 1:
        if len(named) > 1:
            raise ConfigError(f"when={shown(dict(when))} has {len(named)} rules in one mapping: {', '.join(named)}",
                              hint=f"for any of them write a list: [{', '.join(f'{{{name}: ...}}' for name in named)}]")  # fmt: skip
        raise unknown(dict(when))
    read, keys = FORMS[named[0]]
    for key in when:
        if key not in keys:
            raise ConfigError(f"when={shown(dict(when))}: {shown(key)} does not belong to {named[0]}",
                              hint=f"{named[0]} goes {f'with {_and(keys[1:])}' if keys[1:] else 'alone'}")  # fmt: skip
    return read(when, depth)


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _every(when: Mapping[str, Any], depth: int) -> Rule:
    every = when["every"]
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return EverySteps(every)
    if isinstance(every, str):
        text = "".join(every.split())
        try:
            duration_s(text)
        except ConfigError:
            text = ""
        if text:
            return EveryDuration(text)
    hint = 'write an int >= 1 for steps, such as 500, or a duration with its unit: "250ms", "30s", "30min", "1h" or "1d"'
    raise ConfigError(f"when={{every: {shown(every)}}} is neither a number of steps nor a duration", hint=hint)


def _metric(when: Mapping[str, Any], form: str) -> str:
    if isinstance(when[form], str) and when[form]:
        return str(when[form])
    hint = f"write {{{form}: val_loss, ...}}, with a name that save(metrics=...) or record() gets"
    raise ConfigError(f"when={{{form}: {shown(when[form])}}} does not name a metric", hint=hint)


def _number(when: Mapping[str, Any], key: str, *, least: float = -math.inf) -> float:
    value = when[key]
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= least:
        return float(value)
    raise ConfigError(f"{key}={shown(value)} in when is not a number{' >= 0' * (least == 0)}", hint=f"write it as {key}: 0.1")


def _improves(when: Mapping[str, Any], depth: int) -> Rule:
    mode = when.get("mode", "min")
    if mode not in ("min", "max"):
        raise ConfigError(f"mode={shown(mode)} in when is not known", hint="write min (lower is better) or max (higher is better)")
    return Improves(_metric(when, "improves"), mode, _number(when, "min_delta", least=0) if "min_delta" in when else 0.0)


def _level(when: Mapping[str, Any], depth: int) -> Rule:
    sides = [side for side in ("below", "above") if side in when]
    if len(sides) != 1:
        hint = "write {metric: val_loss, below: 2.0} or {metric: accuracy, above: 0.8}; for the best so far, {improves: val_loss}"
        raise ConfigError(f"when={shown(dict(when))} {'has both below and above' if sides else 'says no level'}", hint=hint)
    return Level(_metric(when, "metric"), sides[0], _number(when, sides[0]))


def is_step(value: object, least: int = 0) -> bool:
    """Whether it is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _at(when: Mapping[str, Any], depth: int) -> Rule:
    steps = [when["at"]] if isinstance(when["at"], int) else when["at"]
    if not isinstance(steps, Sequence) or isinstance(steps, str | bytes) or not steps or not all(map(is_step, steps)):
        raise ConfigError(f"when={{at: {shown(when['at'])}}} is not a list of steps", hint="write whole numbers >= 0: {at: [100, 200]}")
    return At(tuple(sorted(set(steps))))


def _phases(when: Mapping[str, Any], depth: int) -> Rule:
    phases, read, begin = when["phases"], list[tuple[int | None, Rule]](), 0
    hint = "write {phases: [{until: 1000, when: never}, {until: 5000, when: {every: 500}}, {when: final}]}"
    if not isinstance(phases, Sequence) or isinstance(phases, str | bytes) or not phases:
        raise ConfigError(f"when={{phases: {shown(phases)}}} is not a list of phases", hint=hint)
    for number, phase in enumerate(phases, 1):
        if not isinstance(phase, Mapping) or "when" not in phase or not set(phase) <= {"until", "when"}:
            raise ConfigError(f"phase {number} of when, {shown(phase)}, is not a mapping of until and when", hint=hint)
        until = phase.get("until")
        if until is None and number < len(phases):
            raise ConfigError(f"phase {number} of {len(phases)} of when has no until, so that the next one never begins", hint=hint)
        if until is not None and not is_step(until, begin + 1):
            raise ConfigError(f"phase {number} of when has until={shown(until)}, which is no step after {begin}", hint=hint)
        read.append((until, read_when(phase["when"], depth + 1)))
        begin = until or begin
    return Phases(tuple(read))


FORMS: dict[str, tuple[Callable[[Mapping[str, Any], int], Rule], tuple[str, ...]]] = {
    "every": (_every, ("every",)),
    "improves": (_improves, ("improves", "mode", "min_delta")),
    "metric": (_level, ("metric", "below", "above")),
    "at": (_at, ("at",)),
    "phases": (_phases, ("phases",)),
}
