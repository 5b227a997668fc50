"""The text of a command line as the values that YAML would give."""

from __future__ import annotations

import json
import re
from typing import Any

from everystep.errors import ConfigError

FORMS_HINT = (
    "write every, never, final, {every: 500}, {every: 30min}, {improves: val_loss, mode: min}, {metric: val_loss, below: 2.0}, "
    "{at: [100, 200]}, {phases: [{until: 1000, when: never}, {when: final}]}, or a list of these"
)
DEEPEST = 20  # levels of lists and phases: nobody means more, and a list that holds itself ends here


def shown(value: object) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def unknown(value: object) -> ConfigError:
    """A word or mapping that is no rule."""
    return ConfigError(f"when={shown(value)} is not known", hint=FORMS_HINT)


_KEY = re.compile(r"(every|improves|mode|min_delta|metric|below|above|at|phases|until|when)\s*:")  # also without a space behind the colon
_PLAIN = re.compile(r"(?:[^,:\[\]{}]|:(?![\s,\[\]{}]|\Z))+")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\']|\'\')*\'', re.DOTALL)
_SPACE = re.compile(r"\s*")
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None, "~": None, "": None}


class _Flow:
    """Reads YAML's flow style, of which JSON is a part: mappings, lists, words, numbers, quoted text. Nothing else: no tags, no anchors."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> Any:
        """The value of the text. Without brackets, pairs alone are one mapping and anything else with commas is a list."""
        entries = self._entries("", 0)
        if len(entries) == 1 and entries[0][0] is None:
            return entries[0][1]
        if entries and all(key is not None for key, _ in entries):
            return self._mapping(entries)
        return [value if key is None else {key: value} for key, value in entries]

    def _fail(self, why: str) -> ConfigError:
        rest = self._text[self._at : self._at + 20]
        return ConfigError(f"{shown(self._text)} cannot be read: {why}{f' at {rest!r}' if rest else ' at its end'}", hint=FORMS_HINT)

    def _peek(self) -> str:
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches anything
        return self._text[self._at : self._at + 1]

    def _mapping(self, entries: list[tuple[str | None, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in entries:
            if key is None:
                raise self._fail(f"{shown(value)} has no key")
            if key in result:
                raise self._fail(f"{key!r} is there twice (for any of several rules write a list)")
            result[key] = value
        return result

    def _entries(self, end: str, depth: int) -> list[tuple[str | None, Any]]:
        """Entries, up to the closing bracket ``end``, which is passed; ``""`` is the text's end."""
        if depth > DEEPEST:
            raise self._fail(f"more than {DEEPEST} brackets in each other")
        entries: list[tuple[str | None, Any]] = []
        while self._peek() != end:
            entries.append(self._entry(depth))
            if self._peek() == ",":
                self._at += 1
            elif self._peek() != end:
                raise self._fail(f"expected a comma or {end!r}" if end else "expected a comma or the end")
        self._at += len(end)
        return entries

    def _entry(self, depth: int) -> tuple[str | None, Any]:
        known = _KEY.match(self._text, self._at)
        if known is not None:
            self._at = known.end()
            return known[1], self._value(depth)
        begin = self._at
        value = self._value(depth)
        if self._peek() == ":":
            if not isinstance(value, str | int | float):
                self._at = begin
                raise self._fail("a key is a word")
            self._at += 1
            return str(value), self._value(depth)
        return None, value

    def _value(self, depth: int) -> Any:
        opening = self._peek()
        if opening == "{":
            self._at += 1
            return self._mapping(self._entries("}", depth + 1))
        if opening == "[":
            self._at += 1
            return [value if key is None else {key: value} for key, value in self._entries("]", depth + 1)]
        if opening in {'"', "'"}:
            return self._quoted(opening)
        plain = _PLAIN.match(self._text, self._at)
        if plain is None:
            raise self._fail("expected a word, a number or a bracket")
        self._at = plain.end()
        return _scalar(plain[0].strip())

    def _quoted(self, opening: str) -> str:
        found = _QUOTED.match(self._text, self._at)
        if found is None:
            raise self._fail("the quotation does not end")
        try:
            said = str(json.loads(found[0])) if opening == '"' else found[0][1:-1].replace("''", "'")
        except ValueError:
            raise self._fail("the quotation cannot be read") from None
        self._at = found.end()
        return said


def _scalar(word: str) -> object:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if re.fullmatch(r"[-+]?\d{1,18}", word, re.ASCII):
        return int(word)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word, re.ASCII):
        return float(word)
    return word


def parse_when(text: str) -> Any:
    """What ``--when`` says, as the value that YAML would give: ``every``, ``every: 5``, ``{improves: val_loss, mode: min}``, JSON.

    Without brackets, pairs are one mapping (``improves: val_loss, mode: max``) and anything else is a list (``final, every: 5``).
    ConfigError when the text cannot be read; whether there is such a rule, ``Consolidate`` and ``decide`` check.
    """
    if len(text) > 100_000:
        raise ConfigError(f"when has {len(text):,} characters", hint="up to 100,000 are read")
    if not text.strip():
        raise unknown(text)
    return _Flow(text).whole()
