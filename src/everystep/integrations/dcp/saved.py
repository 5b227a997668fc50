"""A checkpoint of an everystep run as DCP would have written it, for ``restore``: what ``Writer`` saved, into modules and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everystep import values
from everystep.foreign.stored import Stored, StoredPlain, StoredTensor
from everystep.integrations.dcp.naming import Names
from everystep.integrations.dcp.reading import Want
from everystep.trainer.restoring import TensorReader, Wanted


def stored_of(names: Names) -> Stored:
    """What a checkpoint holds, without places: ``SavedReader`` knows where it is."""
    stored = Stored()
    stored.folders = [f"step {names.reader.step}"]
    stored.step = names.reader.step
    for name, named in names.entries.items():
        stored.paths[name] = named.path
        if named.tensor is None:
            stored.plain[name] = StoredPlain("", None)
        else:
            spec = names.reader.tensors[named.tensor]
            stored.tensors[name] = StoredTensor(name, spec.dtype, spec.shape, [])
    return stored


class SavedReader:
    """Reads the tensors and plain values of a checkpoint of an everystep run by DCP's names."""

    def __init__(self, reader: TensorReader, names: Names) -> None:
        self._reader = reader
        self._names = names

    def read(self, wanted: Sequence[Want]) -> None:
        """Fill all of them, verified."""
        self._reader.read([Wanted(self._stored(want.stored.name), want.tensor, want.region) for want in wanted])

    def _stored(self, name: str) -> str:
        named = self._names.entries.get(name)
        return name if named is None or named.tensor is None else named.tensor

    def value(self, name: str, stored: StoredPlain) -> Any:
        """A plain value, with ``Ref`` for tensors inside."""
        return self._names.materialised(self._names.entries[name].value, values.Ref)

    def inner(self, name: str) -> StoredTensor:
        """A tensor inside a plain value, by the name it is stored under."""
        spec = self._reader.tensors[name]
        return StoredTensor(name, spec.dtype, spec.shape, [])
