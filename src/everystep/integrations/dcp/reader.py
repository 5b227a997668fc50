"""``Reader``: DCP's ``load`` from an everystep run.

Theory of operation. The reader shows a checkpoint as DCP's metadata (each tensor one chunk: everystep finds the stored regions by itself),
and fills what the planner resolves region by region, each digest checked. Plain values are handed over as bytes that are made on the spot.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from everystep.errors import CheckpointError, ConfigError, CorruptionError, LayoutError
from everystep.foreign.dtypes import DTYPES
from everystep.integrations.dcp.naming import Named, Names
from everystep.integrations.dcp.runs import Run, step_of, through
from everystep.region import Region
from everystep.trainer.checkpointer import Checkpointer
from everystep.trainer.restoring import TensorReader, Wanted

_Result = TypeVar("_Result")


class Reader(StorageReader):
    """A storage reader for ``torch.distributed.checkpoint.load`` that loads from an everystep run.

    Names are those of DCP for the same state, also for a checkpoint that ``Checkpointer.save`` made of modules and optimizers (then as
    ``get_state_dict`` has them, with and without ``flatten_optimizer_state_dict``).

    Args:
        run: The run's folder or URL, or a ``Checkpointer``.
        step: Which checkpoint. None: the number in the ``checkpoint_id`` that ``load`` is given, or the newest that verifies.
        cast: Convert dtypes that differ; without it they are an error.
        options: As for ``Writer``.
    """

    def __init__(self, run: str | os.PathLike[str] | Checkpointer, *, step: int | None = None, cast: bool = False, **options: Any) -> None:
        super().__init__()
        self._run = Run(run, options)
        self.step = step
        self.cast = cast
        self._named: int | None = None
        self._names: Names | None = None
        self._failed: CheckpointError | None = None
        self.loaded_step: int | None = None
        """The step of what was loaded."""

    def close(self) -> None:
        """Let the run go, where it was given by its path; see ``Writer.close``."""
        self._run.close()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins."""
        self._named = step_of(checkpoint_id) if checkpoint_id is not None and self.step is None else None
        self._names = None

    def read_metadata(self) -> Metadata:
        """What the checkpoint holds (all ranks together)."""
        self._names = self._failed = None
        try:
            self._names = self._through(Names)
        except CheckpointError as error:
            # DCP would log it, try something else and say that there is no metadata: told in the next call, it reaches the caller.
            self._failed = error
            return Metadata({})
        entries = {name: self._told(named) for name, named in self._names.entries.items()}
        paths = {name: named.path for name, named in self._names.entries.items()}
        return Metadata(
            state_dict_metadata=entries, planner_data=paths, storage_data={}, storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id)
        )

    def _told(self, named: Named) -> Any:
        if named.tensor is None:
            return BytesStorageMetadata()
        spec = self._reader_names().reader.tensors[named.tensor]
        size = torch.Size(spec.shape)
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        return TensorStorageMetadata(properties=TensorProperties(dtype=DTYPES[spec.dtype]), size=size, chunks=[chunk])

    def _reader_names(self) -> Names:
        if self._names is None:
            raise ConfigError("read_metadata comes first", kind="order", hint="pass the reader to torch.distributed.checkpoint.load")
        return self._names

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Say what ``read_metadata`` found wrong."""
        if self._failed is not None:
            raise self._failed

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner resolves (all ranks together); a checkpoint that does not verify is passed over for the next older one.

        Raises:
            CorruptionError: None verifies.
            LayoutError: A dtype differs, without ``cast``.
        """
        promised = self._reader_names()

        def apply(reader: TensorReader) -> int:
            names = promised if reader.values == promised.reader.values and reader.tensors == promised.reader.tensors else Names(reader)
            _Loading(reader, names, promised, planner, cast=self.cast).run(plan.items)
            return reader.step

        self.loaded_step = self._through(apply, continues=True)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _through(self, apply: Callable[[TensorReader], _Result], *, continues: bool = False) -> _Result:
        return through(self._run.checkpointer(), apply, step=self._named if self.step is None else self.step, continues=continues)

    @property
    def checkpoint_id(self) -> str:
        """The run."""
        return self._run.given.path if isinstance(self._run.given, Checkpointer) else self._run.given

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP never has to guess this reader from an id: it is passed."""
        return False


class _Loading:
    """One checkpoint into what a planner resolves."""

    def __init__(self, reader: TensorReader, names: Names, promised: Names, planner: LoadPlanner, *, cast: bool) -> None:
        self.reader = reader
        self.names = names
        self.promised = promised
        self.planner = planner
        self.cast = cast

    def run(self, items: Sequence[ReadItem]) -> None:
        wanted: list[Wanted] = []
        casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        plain: list[tuple[ReadItem, Named]] = []
        inner: dict[str, torch.Tensor] = {}
        for item in items:
            named = self._named(item.storage_index)
            if item.type == LoadItemType.BYTE_IO:
                plain.append((item, named))
                for name in self.names.refers(named.value):
                    inner.setdefault(name, self._fresh(name, self.reader.tensors[name].shape))
                continue
            assert named.tensor is not None
            offsets = item.storage_index.offset or [0] * len(item.storage_offsets)
            region = Region(tuple(a + b for a, b in zip(offsets, item.storage_offsets, strict=True)), tuple(item.lengths))
            target = self.planner.resolve_tensor(item).detach()
            filled.append((item, target))
            dtype = DTYPES[self.reader.tensors[named.tensor].dtype]
            if tuple(target.shape) != region.sizes:
                raise LayoutError(f"{item.storage_index.fqn!r}: the planner gives {list(target.shape)} for region {region}", kind="shape")
            if target.dtype == dtype:
                wanted.append(Wanted(named.tensor, target, region))
                continue
            if not self.cast:
                raise LayoutError(
                    f"{item.storage_index.fqn!r} is {dtype} in the checkpoint, {target.dtype} in the state", step=self.reader.step,
                    key=item.storage_index.fqn, kind="dtype", hint="Reader(..., cast=True) converts",
                )  # fmt: skip
            casts.append((target, torch.empty(region.sizes, dtype=dtype)))
            wanted.append(Wanted(named.tensor, casts[-1][1], region))
        wanted += [Wanted(name, tensor) for name, tensor in inner.items()]
        with torch.no_grad():
            if wanted:
                self.reader.read(wanted)
            for target, stored in casts:
                target.copy_(stored)
        for item, target in filled:
            self.planner.commit_tensor(item, target)
        for item, named in plain:
            data = io.BytesIO()
            # In memory only, from values that held no code: DCP's planners take bytes.
            value = self.names.materialised(named.value, lambda name, kind: inner[name].numpy() if kind == "numpy" else inner[name])
            torch.save(value, data)
            data.seek(0)
            self.planner.load_bytes(item, data)

    def _named(self, index: MetadataIndex) -> Named:
        """The entry, which must be what the plan was made for: an older checkpoint may have taken its place."""
        name = index.fqn
        was, named = self.promised.entries[name], self.names.entries.get(name)
        good = named is not None and (was.tensor is None) == (named.tensor is None)
        if good and named is not None and named.tensor is not None and was.tensor is not None:
            good = self.promised.reader.tensors[was.tensor].shape == self.reader.tensors[named.tensor].shape
        if not good or named is None:
            raise CorruptionError(f"step {self.reader.step} holds something else under {name!r} than the newest one", step=self.reader.step,
                                  key=name, kind="names", hint="load that step by itself: Reader(run, step=...)")  # fmt: skip
        return named

    def _fresh(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=DTYPES[self.reader.tensors[name].dtype])
