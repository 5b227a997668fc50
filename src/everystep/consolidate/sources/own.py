"""Everystep's own runs. No torch: an export that is a link of the checkpoint's files starts in no time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from everystep import values
from everystep.consolidate.source import ABSENT, Chunk, Found, Opened, SourceFile, SourceTensor
from everystep.errors import CheckpointError, ConfigError, CorruptionError, NotFoundError
from everystep.manifest import Manifest, digest, document_of_rank
from everystep.plan import node_of_file
from everystep.repository import CheckpointKey, Repository
from everystep.repository.records import manifest_key

_log = logging.getLogger("everystep")
_RENEW_S = 1200.0
_DATA = re.compile(r"(.+)/data/([0-9]{12,}-[0-9]{4,})/?")
_MORE_IS_BETTER = re.compile(r"acc|f1|bleu|rouge|auc|score|reward|precision|recall|map\b|psnr|ssim", re.IGNORECASE)
_MODEL = "model"


def run_of(path: str) -> tuple[str, str | None] | None:
    """The run that a path is, or is a checkpoint of (``RUN/data/KEY``), and that key; None where it is neither."""
    if os.path.isfile(os.path.join(path, "run.json")):
        return path, None
    inside = _DATA.fullmatch(path)
    if inside and os.path.isfile(os.path.join(inside[1], "run.json")):
        return inside[1], inside[2]
    return None


def found_in(run: str) -> list[Found]:
    """The committed checkpoints of the run's newest lineage, oldest first."""
    repository = Repository.open(run)
    found = []
    for key in reversed(repository.lineage()):
        with contextlib.suppress(NotFoundError):  # forgotten meanwhile
            try:
                manifest = repository.manifest(key)
            except CheckpointError as error:
                if isinstance(error, NotFoundError):
                    raise
                found.append(Found(run, "everystep", key.step, False, error.message, 0.0, {}, str(key)))
                continue
            why = "a verification found it bad" if repository.verified(key) is False else ""
            found.append(Found(run, "everystep", key.step, not why, why, manifest.saved_at, _metrics(repository, key), str(key)))
    return found


def open_own(run: str, *, step: int | str | None, group: str | None) -> Opened:
    """A checkpoint of a run. Errors as in ``open_source``."""
    repository = Repository.open(run)
    key, manifest = _chosen(repository, step)
    names = _Exported(manifest, group, run).names()
    if not names.stored:
        raise NotFoundError(f"step {key.step} of {run!r} holds no tensors of {group or 'its module'!r}", step=key.step, key=str(key),
                            kind="no-model", hint="they were dropped, or there never were any; see: everystep show")  # fmt: skip
    numbers: dict[int, int] = {}  # of the manifest's objects that are wanted, in their order
    for shard in manifest.shards:
        if manifest.tensors[shard.tensor].name in names.stored:
            numbers.setdefault(shard.object, 0)
    numbers = {at: number for number, at in enumerate(sorted(numbers))}
    objects = [manifest.objects[at] for at in numbers]
    files = [SourceFile(stored.key, _size(repository, stored.key)) for stored in objects]
    lost = [
        f"{file.key!r} is {file.nbytes:,} bytes long, not {stored.nbytes:,}"
        for file, stored in zip(files, objects, strict=True)
        if file.nbytes not in (ABSENT, stored.nbytes)
    ]
    chunks: dict[int, list[Chunk]] = {}
    for shard in manifest.shards:
        if shard.object in numbers:
            chunks.setdefault(shard.tensor, []).append(
                Chunk(shard.region, numbers[shard.object], shard.offset, shard.nbytes, shard.digests, shard.block)
            )
    tensors = {}
    for at, spec in enumerate(manifest.tensors):
        own = names.stored.get(spec.name)
        if own is not None:
            entry = spec.name.removeprefix(f"{spec.group}.")
            tensors[own] = SourceTensor(own, spec.dtype, spec.shape, tuple(chunks.get(at, ())), entry)
    if manifest.nodes > 1 and not manifest.shared:
        lost += _elsewhere(files)
    return Opened(
        kind="everystep", where=run, key=str(key), step=key.step, saved_at=manifest.saved_at,
        identity=digest(f"{group or ''}\n".encode() + repository.store.get(manifest_key(key))), store=repository.store, files=files,
        tensors=tensors, metrics=_metrics(repository, key), aliases=names.aliases, assets=_assets(repository.store.url), lost=lost,
        headers={number: (stored.header_nbytes, stored.header_digest) for number, stored in enumerate(objects)},
        holding=lambda: _holding(repository, key),
    )  # fmt: skip


# -- which checkpoint -------------------------------------------------------------------------------------------------------


def _chosen(repository: Repository, step: int | str | None) -> tuple[CheckpointKey, Manifest]:
    if step is None or step == "latest":
        return _newest(repository)
    if isinstance(step, str) and step.partition(":")[0] == "best":
        key = best_of({key: _metrics(repository, key) for key in repository.lineage()}, step, where=repository.store.url)
        return key, repository.manifest(key)
    if isinstance(step, str) and not step.isdigit():
        try:
            key = CheckpointKey.parse(step)
        except ValueError:
            raise ConfigError(f"{step!r} is no step", key=step, kind="step",
                              hint="give a number, latest, best, or a whole key such as 000000000150-0002") from None  # fmt: skip
        there = repository.standing(key)  # it may have been reduced
        if there is None:
            raise NotFoundError(f"there is no checkpoint {step!r} in {repository.store.url!r}", key=step, step=key.step,
                                kind="no-checkpoint", hint=f"everystep ls {repository.store.url}")  # fmt: skip
        return there, repository.manifest(there)
    key = repository.find(int(step))
    return key, repository.manifest(key)


def _newest(repository: Repository) -> tuple[CheckpointKey, Manifest]:
    """The newest of the lineage that is not known to be bad."""
    skipped = []
    for key in repository.lineage():
        if repository.verified(key) is False:
            skipped.append(f"{key}: a verification found it bad")
            continue
        try:
            return key, repository.manifest(key)
        except (CorruptionError, NotFoundError) as error:
            skipped.append(f"{key}: {error.message}")
            _log.warning("step %d is passed over: %s", key.step, error.message)
    key = repository.find(None)  # raises where there is none
    raise CorruptionError(f"no checkpoint of {repository.store.url!r} is good: {'; '.join(skipped[:3])}", key=str(key),
                          kind="no-checkpoint", hint=f"everystep verify {repository.store.url}")  # fmt: skip


def _metrics(repository: Repository, key: CheckpointKey) -> Mapping[str, float]:
    try:
        return repository.metrics(key)
    except CheckpointError:
        return {}


def best_of(measured: Mapping[Any, Mapping[str, float]], word: str, *, where: str) -> Any:
    """The best of several by ``"best"``, ``"best:NAME"`` or ``"best:NAME:max"``.

    ``"best"`` alone takes the only metric, or the only one of a loss in validation; more is better where the name says so (accuracy, F1).

    Raises:
        ConfigError: Several metrics could be meant, or the word after the name is neither min nor max.
        NotFoundError: Nothing was measured.
    """
    _, _, rest = word.partition(":")
    name, _, mode = rest.partition(":")
    there = sorted({metric for metrics in measured.values() for metric, value in metrics.items() if not math.isnan(value)})
    if not name:
        likely = [metric for metric in there if "val" in metric.lower() and "loss" in metric.lower()]
        if len(there) != 1 and len(likely) != 1 and there:
            raise ConfigError(f"the best of {where!r} by which metric? there are {', '.join(there)}", key=where, kind="metric",
                              hint=f"write best:{there[0]}, or best:{there[0]}:max")  # fmt: skip
        name = there[0] if len(there) == 1 else likely[0] if likely else ""
    if mode not in {"", "min", "max"}:
        raise ConfigError(f"mode {mode!r} is neither 'min' nor 'max'", kind="mode", hint=f"write best:{name}:max")
    known = {key: metrics[name] for key, metrics in measured.items() if not math.isnan(metrics.get(name, math.nan))}
    if not known:
        raise NotFoundError(f"no checkpoint of {where!r} has a metric{f' {name!r}' if name else ''}", key=name or where, kind="no-metric",
                            hint=f"there are: {', '.join(there) or 'none'}")  # fmt: skip
    sign = -1.0 if mode == "max" or (not mode and _MORE_IS_BETTER.search(name)) else 1.0
    return min(known, key=lambda key: sign * known[key])


# -- which tensors ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Names:
    stored: dict[str, str]
    """Full name -> exported name."""
    aliases: dict[str, str]


class _Exported:
    """What of a manifest is the chosen module's, by the structure of rank 0's state."""

    def __init__(self, manifest: Manifest, group: str | None, where: str) -> None:
        self.manifest = manifest
        self.group = group
        self.where = where
        self.specs = {spec.name for spec in manifest.tensors}
        self.modules: dict[str, Mapping[str, Any]] = {}
        """Path of each module in the state -> what it stores beside tensors."""
        self.loose: dict[str, dict[str, str]] = {}
        """By top-level entry that is no module: path -> name of the tensor there."""
        try:
            tree = msgspec.json.decode(document_of_rank(manifest, 0))
            self._walk(tree["state"], ())
        except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CorruptionError(f"the structure of step {manifest.step} in {where!r} cannot be read: {error}", step=manifest.step,
                                  key=where, kind="values", hint="take an older step") from None  # fmt: skip

    def _walk(self, node: Mapping[str, Any], keys: tuple[str, ...]) -> None:
        [(word, body)] = node.items()
        if word == "dict":
            for key, child in body:
                self._walk(child, (*keys, str(values.decode(msgspec.json.encode(key)))))
        elif word in {"list", "tuple"}:
            for at, child in enumerate(body):
                self._walk(child, (*keys, str(at)))
        elif word == "module":
            self.modules[".".join(keys)] = body
        elif word != "optimizer" and keys:
            self.loose.setdefault(keys[0], {}).update(_tensors_in(body, ".".join(keys)))

    def names(self) -> _Names:
        paths = self._paths()
        if paths is None:
            return self._named(self.loose[self._loose()], self._loose() + ".")
        cut = paths[0] if len(paths) == 1 else (self.group or "")
        inner: set[str] = set()  # parts of what a module stores beside its state dict's entries
        for path in paths:
            for name, told in self.modules[path].items():
                inner |= {ref.name for ref in _refs(told)} - ({f"{path}.{name}"} if _is_tensor(told) else set())
        every = {
            name: name
            for name in [*self.specs, *self.manifest.aliases]
            if name not in inner and any(name.startswith(f"{path}.") for path in paths)
        }
        return self._named(every, f"{cut}." if cut else "")

    def _paths(self) -> list[str] | None:
        """The modules that are meant; None: none, but an entry that holds tensors."""
        if self.group is None:
            if len(self.modules) == 1:
                return list(self.modules)
            if not self.modules and self.loose:
                return None
            raise self._several(f"run {self.where!r} saves {len(self.modules)} modules")
        chosen = [path for path in self.modules if path == self.group or path.startswith(f"{self.group}.")]
        if chosen:
            return chosen
        if self.loose.get(self.group):
            return None
        raise self._several(f"run {self.where!r} saves no module {self.group!r}")

    def _loose(self) -> str:
        """An entry that is a state dict, as DCP's callers save it."""
        known = [name for name, tensors in self.loose.items() if tensors]
        if self.group is not None:
            return self.group
        if _MODEL in known:
            return _MODEL
        if len(known) != 1:
            raise self._several(f"run {self.where!r} saves {len(known)} entries with tensors")
        return known[0]

    def _several(self, what: str) -> ConfigError:
        there = sorted(self.modules) or sorted(name for name, tensors in self.loose.items() if tensors)
        return ConfigError(f"{what}: there are {', '.join(map(repr, there)) or 'none'}", step=self.manifest.step, key=self.where,
                           kind="group", hint=f"say which with group={there[0]!r}" if there else "nothing can be exported")  # fmt: skip

    def _named(self, places: Mapping[str, str], prefix: str) -> _Names:
        """``places``: path in the state -> name of the tensor, which may be another's (tied) or lie in another entry."""
        stored: dict[str, str] = {}
        aliases: dict[str, str] = {}
        # Names that tensors are stored under come first: what is tied to them is an alias.
        for place in sorted(places, key=lambda place: (places[place] not in self.specs, place)):
            full = self.manifest.aliases.get(places[place], places[place])
            if full not in self.specs:
                raise CorruptionError(f"the structure of step {self.manifest.step} refers to tensor {full!r}, which it does not hold",
                                      step=self.manifest.step, key=full, kind="values", hint="take an older step")  # fmt: skip
            own = place.removeprefix(prefix)
            if full in stored:
                aliases[own] = stored[full]
            else:
                stored[full] = own
        return _Names(stored, aliases)


def _refs(told: object) -> list[values.Ref]:
    return values.refs(msgspec.json.encode(told))


def _is_tensor(told: object) -> bool:
    return isinstance(told, dict) and "$" in told and told["$"][0] == "ref" and told["$"][1][0] == "tensor"


def _tensors_in(told: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, name) of the tensors in plain data: mappings by text and lists, as state dicts are."""
    if isinstance(told, list):
        for at, item in enumerate(told):
            yield from _tensors_in(item, f"{path}.{at}")
    elif isinstance(told, dict) and "$" in told:
        tag, payload = told["$"]
        if tag == "ref":
            if payload[0] == "tensor":
                yield path, payload[1]
        elif tag in {"OrderedDict", "dict"}:
            for key, item in payload:
                if isinstance(key, str):
                    yield from _tensors_in(item, f"{path}.{key}")
    elif isinstance(told, dict):
        for key, item in told.items():
            yield from _tensors_in(item, f"{path}.{key}")


# -- its files --------------------------------------------------------------------------------------------------------------


def _size(repository: Repository, key: str) -> int:
    try:
        return repository.store.size(key)
    except NotFoundError:
        return ABSENT


def _elsewhere(files: Sequence[SourceFile]) -> list[str]:
    absent: dict[int, list[str]] = {}
    for file in files:
        if file.nbytes == ABSENT:
            absent.setdefault(node_of_file(file.key), []).append(file.key)
    return [
        f"{', '.join(map(repr, keys))} of node {node + 1} is not in this store: each node has its own; bring that node's data folder here"
        for node, keys in sorted(absent.items())
    ]


def _assets(url: str) -> str | None:
    """Where a run keeps the config of the model that it trains: the newest of them."""
    exports = os.path.join(url.removeprefix("file://"), "exports")
    try:
        with os.scandir(exports) as entries:
            found = [(entry.stat().st_mtime, entry.path) for entry in entries if entry.name.startswith(".assets-") and entry.is_dir()]
    except OSError:
        return None
    return max(found)[1] if found else None


@contextlib.contextmanager
def _holding(repository: Repository, key: CheckpointKey) -> Iterator[None]:
    """Hold it for as long as this takes: a hold expires by itself, in case nobody takes it back, and is renewed before it does."""
    done = threading.Event()
    with contextlib.ExitStack() as holds:
        holds.enter_context(repository.hold(key))
        if not repository.committed(key):
            raise NotFoundError(f"step {key.step} of attempt {key.attempt} in {repository.store.url!r} was forgotten just now",
                                step=key.step, key=str(key), kind="forgotten", hint="take another step")  # fmt: skip

        def renew() -> None:
            while not done.wait(_RENEW_S):
                with contextlib.suppress(CheckpointError):
                    holds.enter_context(repository.hold(key))

        thread = threading.Thread(target=renew, name="everystep-hold", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
