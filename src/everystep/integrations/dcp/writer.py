"""``Writer``: DCP's ``save`` and ``async_save`` into an everystep run.

Theory of operation. DCP plans who writes what, and asks a storage writer to write the items. Everystep plans for itself: which rank stores
which region follows from what every rank holds. So the writer takes what each rank *holds* (the planner's flattened state dict, whole, as
it was before DCP left the copies on other ranks out), gives it the shape it had, and hands it to a ``Checkpointer``. The layout then stays
the same from save to save, replicated tensors are shared out by bytes between the ranks, and nothing depends on how DCP chose among equal
copies. A planner that changes data on its way to the storage is asked for each of a rank's own items (``resolve_data``); one that decides
by itself what is written can be followed in one process only.
"""

# ruff: noqa: SLF001 (what the checkpointer saved last has no public name)

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from everystep.errors import ConfigError, ConflictError, StateError
from everystep.integrations.dcp.naming import nested
from everystep.integrations.dcp.runs import Run, step_of
from everystep.trainer.arguments import checked_step
from everystep.trainer.checkpointer import Checkpointer
from everystep.trainer.pending import Pending
from everystep.trainer.sharding import as_dtensor


class Writer(StorageWriter):
    """A storage writer for ``torch.distributed.checkpoint.save`` and ``async_save`` that saves into an everystep run.

    Args:
        run: The run's folder or URL, or a ``Checkpointer`` (made with ``replicated=["*"]`` where there are several ranks: DCP takes
            tensors that are no DTensors for equal on all of them).
        step: The training step of what is saved: a number, or a callable that gives it; settable later as ``writer.step``. None: the
            last number in the ``checkpoint_id`` that ``save`` is given.
        sync: ``save`` returns when the checkpoint is durable, as DCP's own writer does. False: when it is staged in memory; see
            ``pending``.
        options: For a run given by its path, as for ``Checkpointer`` (``cadence``, ``keep``, ``fresh``, ...). All writers and readers of
            one path in a process share one checkpointer; the first one's options count. Nothing is deleted unless ``keep`` says so.
    """

    def __init__(
        self, run: str | os.PathLike[str] | Checkpointer, *, step: int | Callable[[], int] | None = None, sync: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self._run = Run(run, options)
        self.step = step
        self.sync = sync
        self._named: int | None = None
        self.pending: Pending | None = None
        """What became of the last save."""

    def close(self) -> None:
        """Make everything durable and let the run go, where it was given by its path."""
        self._run.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": None}

    # -- DCP's interface ---------------------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new checkpoint begins."""
        self._named = step_of(checkpoint_id) if checkpoint_id is not None and self.step is None else None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the ranks meet in ``write_data``."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is; says at once, and on every rank, when the step is not known."""
        self._step()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Hand what this rank holds to the checkpointer (all ranks together).

        Raises:
            ConflictError: The step is saved already.
            StateError: It holds something that everystep cannot store; nothing was written.
        """
        step, checkpointer = self._step(), self._run.checkpointer()
        self._named = None if self.step is None else self._named
        if checkpointer._last_step == step and checkpointer._last is not None and checkpointer._last.error is None:
            raise ConflictError(f"step {step} is saved in run {checkpointer.path!r} already; everystep overwrites nothing", step=step,
                                kind="exists", hint="save under another step")  # fmt: skip
        self.pending = checkpointer.save(step, state_of(plan, planner, ranks=checkpointer._run.world.size), sync=self.sync)
        report = self.pending.report
        if report.outcome == "failed" and self.pending.error is not None:
            raise self.pending.error
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the checkpoint is committed, by its manifest."""
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta:
        """The run and the step."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=None)

    @property
    def checkpoint_id(self) -> str:
        """The run."""
        return self._run.given.path if isinstance(self._run.given, Checkpointer) else self._run.given

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP never has to guess this writer from an id: it is passed."""
        return False

    def _step(self) -> int:
        told = self.step() if callable(self.step) else self.step
        told = self._named if told is None else told
        if told is None:
            raise ConfigError(
                "the Writer does not know which step this is", kind="step",
                hint="pass Writer(run, step=...), set writer.step, or give save a checkpoint_id such as 'step-100'",
            )  # fmt: skip
        return checked_step(told)


_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan")
_CHANGING = ("resolve_data", "lookup_object", "transform_object")


def state_of(plan: SavePlan, planner: SavePlanner, *, ranks: int) -> dict[str, Any]:
    """What this rank holds of the state that a planner was given, in the shape it had before it was flattened.

    Args:
        plan: The rank's final plan.
        planner: The planner; see the module's theory of operation for how much of it counts.
        ranks: How many ranks save together.

    Raises:
        StateError: A ShardedTensor, or an item of a tensor whose other parts are not there.
        ConfigError: A planner of its own kind, with several ranks.
    """
    whole = isinstance(planner, DefaultSavePlanner) and _keeps(planner, _PLANNING)
    if whole and not (ranks == 1 and any(map(_is_sharded_tensor, planner.state_dict.values()))):  # type: ignore[attr-defined]
        default = cast("DefaultSavePlanner", planner)
        flat = dict(default.state_dict)
        for name, value in flat.items():
            if _is_sharded_tensor(value):
                raise StateError(f"{name!r} is a ShardedTensor, which everystep does not store", key=name, kind="tensor",
                                 hint="use DTensor (FSDP2), or FSDP1 with a device mesh")  # fmt: skip
        if not _keeps(default, _CHANGING):
            flat = {name: _changed(name, value, default) for name, value in flat.items()}
    elif ranks == 1:
        flat = _from_items(plan.items, planner)
    else:
        raise ConfigError(
            f"{type(planner).__name__} decides by itself what each of {ranks} ranks writes, which everystep cannot follow", kind="planner",
            hint="use DefaultSavePlanner, or a subclass that changes set_up_planner, resolve_data, lookup_object or transform_object only",
        )  # fmt: skip
    return nested(flat, getattr(planner, "mappings", {}) if getattr(planner, "flatten_state_dict", True) else {})


def _keeps(planner: SavePlanner, methods: Sequence[str]) -> bool:
    return all(getattr(type(planner), method) is getattr(DefaultSavePlanner, method) for method in methods)


def _is_sharded_tensor(value: object) -> bool:
    return any(kind.__name__ == "ShardedTensor" for kind in type(value).__mro__)


def _changed(name: str, value: Any, planner: DefaultSavePlanner) -> Any:
    """A value as the planner hands it to a storage; of a DTensor, the local part."""
    items = _create_write_items(name, value)
    if isinstance(value, torch.Tensor) and items:
        if len(items) > 1:
            raise StateError(
                f"tensor {name!r} is several items on one rank, which a planner with its own resolve_data cannot change", key=name,
                kind="planner", hint="use DefaultSavePlanner",
            )  # fmt: skip
        data = planner.resolve_data(items[0])
        given = as_dtensor(value)
        if given is None or not isinstance(data, torch.Tensor):
            return data
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(data, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride())
    return planner.lookup_object(items[0].index) if items else value


def _from_items(items: Sequence[WriteItem], planner: SavePlanner) -> dict[str, Any]:
    """The items of a plan that is one process's own; tensors in several items are put together."""
    flat: dict[str, Any] = {}
    filled: dict[str, int] = {}
    for item in items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
            flat[name] = _object(item, planner)
            continue
        data = planner.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            raise StateError(
                f"the planner gives a {type(data).__name__} for tensor {name!r}", key=name, kind="planner", hint="return a tensor"
            )
        size, chunk = tuple(item.tensor_data.size), item.tensor_data.chunk
        if tuple(chunk.sizes) == size:
            flat[name], filled[name] = data, data.numel()
            continue
        if name not in flat:
            flat[name] = torch.empty(size, dtype=data.dtype, device=data.device)
        flat[name][tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))].copy_(data)
        filled[name] = filled.get(name, 0) + data.numel()
    for name, count in filled.items():
        if count != flat[name].numel():
            raise StateError(f"the planner gives {count} of the {flat[name].numel()} elements of tensor {name!r}", key=name, kind="planner",
                             hint="save from all processes that hold parts of it")  # fmt: skip
    return flat


def _object(item: WriteItem, planner: SavePlanner) -> Any:
    """A plain value: the object itself where the planner can look it up, else what torch loads as plain data from its bytes."""
    look_up = getattr(planner, "lookup_object", None)
    if callable(look_up):
        return look_up(item.index)
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        return data
    data.seek(0)
    return torch.load(data, map_location="cpu", weights_only=True)
