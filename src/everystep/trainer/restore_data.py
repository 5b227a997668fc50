"""Plain data of the state against the checkpoint's: tensors and arrays are filled in place, plain values replaced."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from everystep import values
from everystep.foreign.dtypes import DTYPES
from everystep.trainer.nodes import has_tensors
from everystep.trainer.restoring import Phase, Restore
from everystep.trainer.tensors import dotted

SAME = object()
"""Nothing takes the place of what is there."""


def is_same(a: object, b: object) -> bool:
    """Whether putting ``a`` in the place of ``b`` would change nothing."""
    if a is b:
        return True
    with contextlib.suppress(ValueError, RuntimeError, TypeError):
        return type(a) is type(b) and not isinstance(a, (torch.Tensor, np.ndarray)) and bool(a == b) and repr(a) == repr(b)
    return False


class DataTarget:
    """Fits saved data (with ``Ref`` for tensors) to what the state holds."""

    def __init__(self, job: Restore) -> None:
        self.job = job

    def fit(self, target: Any, saved: Any, keys: tuple[object, ...]) -> Any:
        """Plan the contents of ``target``; returns what has to stand in its place (itself, where it is filled)."""
        if isinstance(target, torch.Tensor):
            self._tensor(target, saved, keys)
            return target
        if not has_tensors(target):
            return self._plain(target, saved, keys)
        if isinstance(target, Mapping):
            self._mapping(target, saved, keys)
            return target
        return self._sequence(target, saved, keys)

    def _tensor(self, target: torch.Tensor, saved: Any, keys: tuple[object, ...]) -> None:
        path = dotted(keys)
        if not self.job.wants(path) and not self.job.wants_whole(path):
            return
        if isinstance(saved, values.Ref) and saved.name in self.job.reader.tensors:
            self.job.fill(saved.name, target, into=path)
        else:
            self.job.refuse(f"{path!r} is a {type(saved).__qualname__} in the checkpoint, a tensor in the state")

    def _mapping(self, target: Mapping[Any, Any], saved: Any, keys: tuple[object, ...]) -> None:
        if not isinstance(saved, Mapping):
            self.job.refuse(f"{dotted(keys)!r} is a {type(saved).__qualname__} in the checkpoint, a mapping with tensors in the state")
            return
        for key, item in target.items():
            if key not in saved:
                self._absent(item, (*keys, key))
                continue
            made = self.fit(item, saved[key], (*keys, key))
            if is_same(made, item):
                continue
            if isinstance(target, MutableMapping):
                self.job.later(Phase.DATA, lambda key=key, made=made: target.__setitem__(key, made))  # type: ignore[misc]
            else:
                self.job.refuse(
                    f"{dotted((*keys, key))!r} is a plain value in a {type(target).__qualname__}, "
                    "where it cannot be replaced; put it into a dict"
                )
        for key, item in saved.items():
            # Tensors that nobody claims are told of by themselves.
            if key not in target and not _has_refs(item):
                self.job.unexpected.append(dotted((*keys, key)))

    def _absent(self, item: Any, keys: tuple[object, ...]) -> None:
        if isinstance(item, torch.Tensor) or not has_tensors(item):
            if self.job.wants(dotted(keys)):
                self.job.missing.append(dotted(keys))
            return
        for key, inner in item.items() if isinstance(item, Mapping) else enumerate(item):
            self._absent(inner, (*keys, key))

    def _sequence(self, target: Any, saved: Any, keys: tuple[object, ...]) -> Any:
        if not isinstance(saved, (list, tuple, collections.deque)) or len(saved) != len(target):
            here = f"{len(saved)} items" if isinstance(saved, (list, tuple, collections.deque)) else f"a {type(saved).__qualname__}"
            self.job.refuse(f"{dotted(keys)!r} is {here} in the checkpoint, {len(target)} items with tensors in the state")
            return target
        made = [self.fit(item, other, (*keys, index)) for index, (item, other) in enumerate(zip(target, saved, strict=True))]
        if all(map(is_same, made, target)):
            return target
        if isinstance(target, tuple):
            return tuple.__new__(type(target), made)
        for index, item in enumerate(made):
            if not is_same(item, target[index]):
                self.job.later(Phase.DATA, lambda index=index, item=item: target.__setitem__(index, item))  # type: ignore[misc]
        return target

    def _plain(self, target: Any, saved: Any, keys: tuple[object, ...]) -> Any:
        """Data without tensors in the state: the saved value as it was, in the old container or array where that fits."""
        path = dotted(keys)
        if not self.job.wants_whole(path):
            return self._some(target, saved, keys)
        self.job.restored.append(path)
        if isinstance(target, np.ndarray) and isinstance(saved, values.Ref) and self._array(target, saved, path):
            return target
        if type(target) is dict and type(saved) is dict:
            made = {key: self._plain(target.get(key), item, (*keys, key)) for key, item in saved.items()}
            self.job.later(Phase.DATA, lambda: _refill(target, made))
            return target
        if type(saved) in {type(None), bool, int, float, str}:
            return saved
        made_new = self.job.materialise(saved)
        if type(target) is list and type(made_new) is list:
            self.job.later(Phase.DATA, lambda: target.__setitem__(slice(None), made_new))
            return target
        return made_new

    def _some(self, target: Any, saved: Any, keys: tuple[object, ...]) -> Any:
        """Only what ``include`` asks for further inside."""
        if isinstance(target, MutableMapping) and isinstance(saved, Mapping):
            for key, item in saved.items():
                made = self._plain(target.get(key, SAME), item, (*keys, key))
                if made is not SAME and not is_same(made, target.get(key, SAME)):
                    self.job.later(Phase.DATA, lambda key=key, made=made: target.__setitem__(key, made))  # type: ignore[misc]
        elif not _has_refs(saved):
            self.job.unexpected.append(dotted(keys))
        return target

    def _array(self, target: np.ndarray[Any, Any], saved: values.Ref, path: str) -> bool:
        spec = self.job.reader.tensors.get(saved.name)
        if spec is None or not target.flags.writeable or target.shape != spec.shape or any(stride <= 0 for stride in target.strides):
            return False
        try:
            tensor = torch.from_numpy(target.view(np.dtype(target.dtype.str)))
        except (TypeError, ValueError):
            return False
        if tensor.dtype != DTYPES[spec.dtype]:
            return False
        self.job.fill(saved.name, tensor, into=path)
        return True


def _refill(target: dict[Any, Any], contents: dict[Any, Any]) -> None:
    target.clear()
    target.update(contents)


def _has_refs(tree: Any) -> bool:
    if isinstance(tree, values.Ref):
        return True
    if isinstance(tree, (Mapping, list, tuple, collections.deque)):
        return any(map(_has_refs, tree.values() if isinstance(tree, Mapping) else tree))
    return False
