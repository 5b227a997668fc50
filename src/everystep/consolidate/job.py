"""One consolidation from beginning to end: a checkpoint becomes an export that is published, led to and remembered.

What is there already is found and nothing is written; so a job may be started again at any time, after any kind of end.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from everystep import __version__
from everystep.consolidate.assets import ADAPTER_CONFIG, NO_ASSETS, Assets, collect
from everystep.consolidate.card import CARD, FileRecord, Record, model_card
from everystep.consolidate.dropping import OWN, check_drop, drop_shards
from everystep.consolidate.exports import Exports
from everystep.consolidate.history import Past
from everystep.consolidate.plan import ExportPlan, plan_export
from everystep.consolidate.sharing import share
from everystep.consolidate.source import Source, check_cover
from everystep.consolidate.writing import write_export
from everystep.errors import CapacityError, CheckpointError, ConfigError, ConflictError, NotFoundError, TransientStoreError
from everystep.manifest import digest
from everystep.repository import CheckpointKey, Repository
from everystep.schedule import Consolidate, best_by, to_document
from everystep.store import open_store
from everystep.store.local import LocalStore

__all__ = ["Exported", "export_root", "exports_of", "folder_at", "planned", "run"]

_SHAPING = ("group", "dtype", "max_shard_size", "include", "rename")
"""Settings that shape what is exported; the others say when, where and for how long."""
_SMALL_NBYTES = 256 << 10
"""Room for the card, the index and the record, apart from what the index holds for each tensor."""
_BUDGET_NBYTES = 256 << 20

_log = logging.getLogger(__name__)


class Exported(NamedTuple):
    """What came of it."""

    path: str
    step: int
    key: str
    nbytes: int
    """Of the export's weight files."""
    linked: int
    """Of these, bytes that are the checkpoint's own files."""
    seconds: float
    already: bool
    """It was there before; nothing was written."""
    latest: bool = False
    """Whether LATEST leads to it now."""
    dropped: str = ""
    """What became of the shards (``drop_shards``); "" where nothing was asked for."""


def export_root(source: Source | str | os.PathLike[str], options: Consolidate, *, origin: str | None = None) -> str:
    """The folder that has ``history.json``, and unless they go into their checkpoints the exports.

    Args:
        source: A source, or the path of a run; for others' checkpoints the path of one checkpoint.
        options: Its ``into`` matters.
        origin: Where the checkpoint really lies, when it is read elsewhere.
    """
    if options.into not in ("latest", "checkpoint"):
        return folder_at(options.into)
    if isinstance(source, (str, os.PathLike)):
        where = folder_at(os.fspath(source))
        own = os.path.isfile(f"{where}/run.json")
    else:
        where, own = _place(source, origin), source.kind == OWN
    return f"{where if own else os.path.dirname(where)}/exports"


def exports_of(source: Source, options: Consolidate, *, root: str | None = None, origin: str | None = None) -> Exports:
    """Where the exports of this source go."""
    home = root or export_root(source, options, origin=origin)
    if options.into != "checkpoint":
        return Exports(home, options.name)
    where = _place(source, origin)
    if source.kind == OWN:
        return Exports(home, options.name, beside=f"{where}/data/{source.key}")
    return Exports(home, options.name, beside=f"{where}/model" if source.kind == "automodel" else where, taken=True)


def planned(source: Source, options: Consolidate) -> ExportPlan:
    """The plan that ``run`` would carry out."""
    return _plan(source, options, _assets(source, options))


def run(
    source: Source, options: Consolidate, *, root: str | None = None, reason: str, threads: int | None = None, workers: int | None = None,
    ray: str | None = None, pace: Callable[[int], None] | None = None, force: bool = False, origin: str | None = None,
    patience_s: float | None = None,
) -> Exported:  # fmt: skip
    """Consolidate a checkpoint, unless an equal export is there.

    Args:
        source: What is consolidated; held from deletion meanwhile.
        options: How, and where to.
        root: Folder of the exports; None: as ``export_root`` says.
        reason: Why; goes into the record and the card.
        threads: See ``write_export``.
        workers: Processes that share the work; by default 1, and with ``ray`` one on each node.
        ray: Address of a Ray cluster on whose nodes they run; None: here.
        pace: See ``write_export``; of one process only, or with ``ray`` as ``spread`` says.
        force: Write it again although it is there.
        origin: Where the checkpoint really lies, when ``source`` is read elsewhere (a protected copy of its names).
        patience_s: How long to wait while another process exports into the same place; None: until it has finished.

    Raises:
        CapacityError: There is no room: said before anything is written where that can be known, and else everything written is deleted.
        ConflictError: Another process is exporting there ("busy"), something that is not ours is in the way ("in-the-way"), or the
            checkpoint was written to meanwhile ("changed").
        CorruptionError: The checkpoint is not whole, or its bytes are wrong; nothing is published.
        ConfigError, NotFoundError, LayoutError: The settings do not fit the source or the place; with ``ray``, there is none, or a node
            does not see what this one sees.
    """
    began = time.monotonic()
    if ray is not None:
        from everystep.consolidate.spreading import require

        require()
    check_drop(source, options)
    exports = exports_of(source, options, root=root, origin=origin)
    assets = _assets(source, options)
    with source.hold():
        plan = _plan(source, options, assets)
        assets = assets.for_dtypes(entry.dtype for file in plan.files for entry in file.entries)
        export_id, same, origin_id = _ids(source, options, plan, assets, origin)
        check_cover(source, [name for file in plan.files for name in file.tensors])
        with exports.locked(patience_s=patience_s):
            partial = exports.partial_path(source.key, export_id)
            exports.sweep_all_but(partial)
            path = None if force else exports.find(source.key, export_id, same=same)
            already, linked = path is not None, 0
            if path is not None or force:  # what was begun of it is not gone on with
                with contextlib.suppress(NotFoundError):
                    exports.discard(partial)
            if path is None:
                exports.check_room(source.key, export_id)
                job = _Job(source, options, plan, assets, exports, export_id, origin_id, reason, origin)
                path, linked = job.write(threads=threads, workers=workers, ray=ray, pace=pace)
            exports.settle(path, keep=options.keep, best_by=best_by(options.when), same=same, later=functools.partial(_metrics_now, source))
            latest = exports.latest() == path
    dropped = drop_shards(source, options, exports) if options.drop_shards else ""
    return Exported(path, source.step, source.key, plan.nbytes, linked, time.monotonic() - began, already, latest, dropped)


class _Job(NamedTuple):
    """What a consolidation is about, once it is decided."""

    source: Source
    options: Consolidate
    plan: ExportPlan
    assets: Assets
    exports: Exports
    id: str
    origin_id: str
    reason: str
    origin: str | None

    def write(self, *, threads: int | None, workers: int | None, ray: str | None, pace: Callable[[int], None] | None) -> tuple[str, int]:
        """Write and publish; the export's path and how many of its bytes are linked. What cannot be of use to a next try is deleted."""
        partial = self.exports.partial_path(self.source.key, self.id)
        self._check_space(partial)
        self.exports.partial(self.source.key, self.id)
        try:
            if ray is not None:
                linked, digests = self._spread(partial, threads, workers, ray, pace)
            elif workers is not None and workers > 1:
                linked, digests = share(self.plan, partial, self._document(threads, workers), workers)
            else:
                written = write_export(self.source, self.plan, partial, threads=threads, budget_nbytes=_BUDGET_NBYTES, pace=pace)
                linked, digests = written.linked, written.digests
            if self.source.changed():
                raise ConflictError(f"{self.source.where!r} was written to while it was consolidated", step=self.source.step,
                                    key=self.source.where, kind="changed", hint="start it again when nothing writes there")  # fmt: skip
            return self.exports.publish(partial, self._beside_weights(partial, linked, digests)), linked
        except TransientStoreError:
            raise  # goes on from here the next time, as after a kill
        except ConfigError:  # nothing was written: what is there is an earlier try's
            with contextlib.suppress(OSError):
                os.rmdir(partial)
            raise
        except CheckpointError:
            with contextlib.suppress(CheckpointError):
                self.exports.discard(partial)
            raise

    def _spread(
        self, partial: str, threads: int | None, workers: int | None, ray: str, pace: Callable[[int], None] | None
    ) -> tuple[int, dict[str, str]]:
        from everystep.consolidate.spreading import connected, spread

        with connected(ray) as cluster:
            return spread(cluster, self.source, self.plan, partial, self._document(threads, 1), workers=workers, pace=pace)

    def _document(self, threads: int | None, workers: int) -> dict[str, Any]:
        """What a worker needs to come to the same plan."""
        source, own = self.source, self.source.kind == OWN
        return {
            "path": _place(source, None), "step": source.key if own else None, "group": self.options.group, "plan_id": self.plan.id,
            "options": to_document(self.options), **_naming(self.assets), "threads": threads, "budget_nbytes": _BUDGET_NBYTES // workers,
            "parent": os.getpid(),
        }  # fmt: skip

    def _check_space(self, partial: str) -> None:
        """CapacityError when the file system has not the room. Files that are linked take none; those of an interrupted try are there."""
        device = os.stat(self.exports.place).st_dev
        needed = _SMALL_NBYTES + sum(map(len, self.assets.files.values())) + 200 * len(self.plan.weight_map)
        for file in self.plan.files:
            if not (file.link is not None and self._device_of(file.link) == device):
                needed += max(0, file.nbytes - max(_allocated(f"{partial}/{file.name}"), _allocated(f"{partial}/{file.name}.part")))
        space = os.statvfs(self.exports.place)
        free = space.f_bavail * space.f_frsize
        if space.f_blocks and free < needed:
            raise CapacityError(
                f"cannot export step {self.source.step} into {self.exports.place!r}: {needed:,} bytes needed, {free:,} free",
                step=self.source.step, key=self.exports.place, kind="disk-full", hint="free space, or export into another folder",
            )  # fmt: skip

    def _device_of(self, file: int) -> int | None:
        store = self.source.store
        if not isinstance(store, LocalStore):
            return None
        try:
            return os.stat(f"{store.path}/{self.source.files[file].key}").st_dev
        except OSError:
            return None

    def _beside_weights(self, partial: str, linked: int, digests: Mapping[str, str]) -> Record:
        """Write the small files; the record, which ``publish`` writes last, has them all."""
        small = dict(self.assets.files)
        if not self.assets.adapter:
            index = {"metadata": {"total_size": self.plan.total_size}, "weight_map": dict(sorted(self.plan.weight_map.items()))}
            small["model.safetensors.index.json"] = msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
        files = [FileRecord(file.name, file.nbytes, digests.get(file.name, "")) for file in self.plan.files]
        files += [FileRecord(name, len(data), digest(data)) for name, data in sorted(small.items())]
        record = self._record(tuple(files), linked)
        card = model_card(record, adapter=self.assets.adapter, base_model=_base_model(self.assets)).encode()
        record = msgspec.structs.replace(record, files=(*record.files, FileRecord(CARD, len(card), digest(card))))
        for name, data in (*small.items(), (CARD, card)):
            self.exports.put(partial, name, data)
        return record

    def _record(self, files: tuple[FileRecord, ...], linked: int) -> Record:
        source = self.source
        key = _checkpoint_key(source)
        return Record(
            id=self.id, plan=self.plan.id, name=self.options.name, key=source.key, step=source.step, attempt=key.attempt if key else None,
            saved_at=source.saved_at, metrics=dict(source.metrics), kind=source.kind, source=os.path.basename(_place(source, self.origin)),
            origin=self.origin_id, identity=source.identity, reason=self.reason, published_at=time.time(),
            settings=to_document(self.options), files=files, aliases=dict(self.plan.aliases), total_nbytes=self.plan.total_size,
            linked_nbytes=linked, everystep=__version__,
        )  # fmt: skip


# -- what is exported ----------------------------------------------------------------------------------------------------


def _plan(source: Source, options: Consolidate, assets: Assets) -> ExportPlan:
    return plan_export(source, options, **_naming(assets))


def _naming(assets: Assets) -> dict[str, Any]:
    return {"stem": "adapter_model", "file_name": "adapter_model.safetensors"} if assets.adapter else {"stem": "model"}


def _assets(source: Source, options: Consolidate) -> Assets:
    if options.assets is not None:
        return collect(options.assets)
    if source.assets is not None:
        return collect(source.assets, asked=False)
    return NO_ASSETS


def _ids(source: Source, options: Consolidate, plan: ExportPlan, assets: Assets, origin: str | None) -> tuple[str, str, str]:
    """The export's id; ``Past.same``; and what tells this run from others."""
    place = _place(source, origin)
    if source.kind == OWN:
        origin_id = Repository(source.store).run_id
        shaping = {name: value for name, value in to_document(options).items() if name in _SHAPING}
        same = digest(msgspec.msgpack.encode((origin_id, source.step, source.saved_at, shaping, assets.id)))
    else:
        origin_id, same = digest(os.path.dirname(place).encode()), ""
    return digest(f"{plan.id} {assets.id}".encode()), same, origin_id


def _checkpoint_key(source: Source) -> CheckpointKey | None:
    try:
        return CheckpointKey.parse(source.key) if source.kind == OWN else None
    except ValueError:
        return None


def _metrics_now(source: Source, past: Past) -> Mapping[str, float]:
    """What this run knows by now of a checkpoint that it exported; {} of others' and of forgotten ones."""
    repository = Repository(source.store)
    try:
        return repository.metrics(CheckpointKey.parse(past.key)) if source.kind == OWN and past.origin == repository.run_id else {}
    except (CheckpointError, ValueError):
        return {}


def _base_model(assets: Assets) -> str:
    if not assets.adapter:
        return ""
    try:
        told = msgspec.json.decode(assets.files[ADAPTER_CONFIG], type=dict[str, Any]).get("base_model_name_or_path")
    except msgspec.DecodeError:
        return ""
    return told if isinstance(told, str) and not os.path.isabs(told) else ""  # a path of one machine tells nobody else anything


# -- places --------------------------------------------------------------------------------------------------------------


def folder_at(url: str) -> str:
    """The folder that a path (``~`` is expanded) or ``file://`` names, in full. ConfigError where it is none."""
    store = open_store(url)  # refuses what it cannot open
    assert isinstance(store, LocalStore)
    return store.path


def _place(source: Source, origin: str | None) -> str:
    """The folder of the run, or of another's checkpoint."""
    if origin is not None:
        return folder_at(origin)
    if source.kind == OWN and isinstance(source.store, LocalStore):
        return source.store.path
    return os.path.abspath(source.where)


def _allocated(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0
