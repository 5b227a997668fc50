"""A checkpoint as nested plain structures, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from everystep.errors import CorruptionError
from everystep.foreign.dtypes import DTYPES
from everystep.trainer.restore_data import SAME
from everystep.trainer.restore_optimizer import SavedOptimizer
from everystep.trainer.restoring import Restore, TensorReader, as_refs, document_of, kind_of, told_refs
from everystep.trainer.tensors import dotted


def load_state(reader: TensorReader, *, include: Sequence[str] | None = None) -> dict[str, Any]:
    """The state as nested dicts of fresh tensors on the CPU and plain values, without a model.

    A module becomes a flat mapping of its names to tensors (tied names share one), an optimizer ``{"state": {parameter: {...}},
    "param_groups": [...]}`` with parameters by name, an object what its ``state_dict`` gave; plain data is as it was. ``include`` as in
    ``restore_into``: entries in which nothing matches are left out.
    """
    loading = _Loading(Restore(reader, strict=False, include=include, cast=False, on_cpu=True))
    state = loading.node((), document_of(reader))
    loading.job.run()
    return {} if state is SAME else dict(state)


class _Loading:
    """Builds plain structures from the document; ``SAME`` stands for nothing asked for."""

    def __init__(self, job: Restore) -> None:
        self.job = job
        self._made: dict[str, torch.Tensor] = {}

    def node(self, keys: tuple[object, ...], told: Mapping[str, Any]) -> Any:
        kind, body = kind_of(told)
        path = dotted(keys)
        if kind == "module":
            return self._module(path, body) or (SAME if keys and not self.job.wants_whole(path) else {})
        if kind == "optimizer":
            return SavedOptimizer(body, path, self.job).plain() or SAME
        if kind in {"value", "stateful"}:
            kept = self._prune(as_refs(body), keys)
            return SAME if kept is SAME else self.job.materialise(kept)
        if kind == "dict":
            pairs = [(self.job.decode(key), child) for key, child in body]
            made = {key: value for key, child in pairs if (value := self.node((*keys, key), child)) is not SAME}
            return made if made or not keys or self.job.wants_whole(path) else SAME
        if kind in {"list", "tuple"}:
            items = [value for index, child in enumerate(body) if (value := self.node((*keys, index), child)) is not SAME]
            return SAME if body and not items else tuple(items) if kind == "tuple" else items
        raise CorruptionError(
            f"a checkpoint's values hold an entry of unknown kind {kind!r:.40}",
            kind="values",
            hint="written by a newer version? upgrade everystep",
        )

    def _module(self, path: str, plain: Mapping[str, Any]) -> dict[str, Any]:
        job, prefix = self.job, f"{path}."
        inner = {name for told in plain.values() for name in told_refs(told)}
        made: dict[str, Any] = {}
        for name, spec in job.reader.tensors.items():
            if name.startswith(prefix) and name not in inner and job.wants(name):
                if spec.name not in self._made:
                    self._made[spec.name] = job.make(name, None, torch.device("cpu"), DTYPES[spec.dtype])
                made[name.removeprefix(prefix)] = self._made[spec.name]
        made.update((name, job.decode(told)) for name, told in plain.items() if job.wants(prefix + name))
        return made

    def _prune(self, tree: Any, keys: tuple[object, ...]) -> Any:
        if self.job.wants_whole(dotted(keys)):
            return tree
        if isinstance(tree, Mapping):
            kept = {key: value for key, item in tree.items() if (value := self._prune(item, (*keys, key))) is not SAME}
            return kept or SAME
        if isinstance(tree, (list, tuple)) and any(self._prune(item, (*keys, index)) is not SAME for index, item in enumerate(tree)):
            return tree
        return SAME
