"""Stored plain values for people: flat, by path. Nothing is made of what the bytes say (``everystep.values`` has the JSON's tags)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from everystep import errors

__all__ = ["flatten", "tell"]

LONG = 16
"""A sequence with more items than this, none of them a container, is one entry (a generator's state has hundreds of numbers)."""

SEQUENCES = {"tuple", "set", "frozenset"}
MAPPINGS = {"dict", "OrderedDict", "Counter"}


def flatten(data: bytes) -> dict[str, object]:
    """Path -> stored JSON of every plain value; references to tensors are left out. CorruptionError when the bytes are no such JSON."""
    try:
        tree = msgspec.json.decode(data)
        if isinstance(tree, dict) and set(tree) == {"state"} and isinstance(tree["state"], dict):
            return dict(_node(tree["state"], ""))
        return dict(_walk(tree, ""))
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise errors.CorruptionError(f"the plain values cannot be read: {error}", kind="values", hint="everystep verify RUN STEP") from None


def tell(value: object) -> object:
    """A stored value as it is shown: what is not plain JSON becomes a short text."""
    if isinstance(value, list):
        head = ", ".join(str(tell(item)) for item in value[:6])
        return f"[{head}, ... {len(value)} items]" if len(value) > 6 else f"[{head}]"
    if not isinstance(value, dict):
        return value
    if not value:
        return "{}"
    tag, payload = value["$"]
    if tag == "int":
        return int(payload, 16)
    if tag in {"bytes", "bytearray"}:
        return f"<{len(payload) * 3 // 4 - payload.count('=')} bytes>"
    if tag in {"enum", "flag"}:
        return f"{payload[0]}.{payload[1]}.{tell(payload[2])}"
    if tag == "numpy":
        return f"<numpy {payload[0]}>"
    if tag in {"path", "tagged"}:
        return f"{tell(payload[1])}"
    if tag == "float":
        return str(payload)
    return f"<{tag}> {tell(payload)}"


def _node(node: dict[str, Any], path: str) -> Iterator[tuple[str, object]]:
    """One node of the trainer's document (``trainer/collect.py``): a branch, a module, an optimizer, a stateful object, or plain data."""
    [(word, payload)] = node.items()
    if word == "dict":
        for key, child in payload:
            yield from _node(child, _join(path, tell(key)))
    elif word in {"list", "tuple"}:
        for index, child in enumerate(payload):
            yield from _node(child, f"{path}[{index}]")
    elif word == "module":  # tensors, and what modules store beside them
        if payload:
            yield from _walk(payload, path)
    elif word == "optimizer":
        for index, group in enumerate(payload["groups"]):
            yield from _walk(group["values"], f"{path}.groups[{index}]")
            yield f"{path}.groups[{index}].params", group["params"]
        columns = [form["columns"] for form in payload["flat"] if form["columns"]]
        rest = {"numbers": columns, "loose": payload["loose"], "others": payload["others"], "extra": payload["extra"]}
        yield from _walk({name: value for name, value in rest.items() if value}, path) if any(rest.values()) else ()
    else:
        yield from _walk(payload, path)


def _walk(value: Any, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, list):
        yield from _sequence(value, path)
    elif isinstance(value, dict) and "$" in value:
        tag, payload = value["$"]
        if tag == "ref":
            return
        if tag == "tagged" and isinstance(payload[1], (dict, list)):
            yield from _walk(payload[1], path)
        elif tag in SEQUENCES:
            yield from _sequence(payload, path)
        elif tag in MAPPINGS:
            for key, item in payload:
                yield from _walk(item, _join(path, tell(key)))
        elif tag == "defaultdict":
            for key, item in payload[1]:
                yield from _walk(item, _join(path, tell(key)))
        elif tag == "deque":
            yield from _sequence(payload[1], path)
        elif tag == "namedtuple":
            yield from _sequence(payload[2], path)
        else:
            yield path, value
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _walk(item, _join(path, key))
    else:
        yield path, value


def _sequence(items: list[Any], path: str) -> Iterator[tuple[str, object]]:
    if not items or (len(items) > LONG and not any(isinstance(item, (dict, list)) for item in items)):
        yield path, items
        return
    for index, item in enumerate(items):
        yield from _walk(item, f"{path}[{index}]")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
