"""The facade: save at every step with almost no stall, restore the newest good state."""

# ruff: noqa: SLF001 (a Pending is moved on by the checkpointer alone)

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from everystep import policy
from everystep.agent import messages
from everystep.agent.client import AgentClient, Slab
from everystep.errors import (
    AgentError,
    CapacityError,
    CheckpointError,
    ConfigError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    StoreError,
    rebuild,
)
from everystep.foreign.dtypes import DTYPES
from everystep.plan import SavePlan
from everystep.policy import Cadence, Keep
from everystep.repository import CheckpointKey
from everystep.schedule import Consolidate
from everystep.trainer.arguments import as_url, check_numbers, checked_step, numbers_of, outside_inference, some
from everystep.trainer.connection import Connection, Options
from everystep.trainer.consolidating import Exporting, settings_of
from everystep.trainer.failing import Failures
from everystep.trainer.finding import RestoredFrom, restore
from everystep.trainer.pending import Pending, PendingExport
from everystep.trainer.planning import Plans
from everystep.trainer.preemption import Preemption, PreemptionReport, Request, Watch
from everystep.trainer.restoring import TensorReader
from everystep.trainer.staging import SlabViews, Stager, Staging
from everystep.trainer.state import RestoreReport, StateCollector, restore_into
from everystep.trainer.world import Group

__all__ = ["Checkpointer"]

_log = logging.getLogger("everystep")
_DRAIN_TIMEOUT_S = 3600.0
_OF_OTHERS = ("incomplete", "rank")
"""Kinds of failures that another rank's or node's leaving out of a step is to this one."""
_OF_ONE_STEP = ("forgotten", "committed")
"""Conflicts that concern one step's checkpoint and not who has the run."""


class _Aim(NamedTuple):
    """What a save is for: ``bound`` for the disk; ``must`` get there whatever comes later; ``waits_s``: so long for a slab."""

    metrics: dict[str, float]
    bound: bool
    must: bool
    waits_s: float
    pin: bool


class Checkpointer:
    """Saves and restores one run's state.

    Args:
        path: The run's folder (a path, or a URL of a supported store). Made at the first save.
        cadence: How often a save reaches memory and disk. The default: every save to memory, and to disk as fast as it takes them.
        keep: Which checkpoints on disk stay. The default: the last three.
        overlap: Copy parameters and optimizer state while training goes on, up to the next optimizer step.
        memory_budget: Bytes of host memory that all slabs together may take; None: as much as three snapshots, within what the machine
            and its cgroup have.
        max_failures: A save that fails is logged and counted; after this many in a row, if they lasted ``max_failing_s``, the next ``save``
            raises (0: after the first, at once).
        max_failing_s: Seconds that saves may go on failing before training is stopped for it; see ``max_failures``.
        agent: Keep snapshots in a process of their own that outlives this one. False: the same code in this process, for
            environments that forbid it; memory then dies with the trainer.
        idle_s: An agent without a trainer ends after this many seconds.
        fresh: Start a new timeline although the run has checkpoints (they stay until retention takes them).
        group: The ranks that save together: a process group whose messages may go over its store; None: the default group when
            torch.distributed is initialised at the first save or restore; ``"alone"``: this process by itself.
        replicas: On several nodes: how many other nodes' agents keep a copy of this node's newest snapshot in their memory.
        replica_nbytes_s: Bytes a second that a node's agent may take for copies of others' snapshots; None: as fast as the network is.
        domain: What fails together with this node bears the same word (a rack, a zone): copies go elsewhere where they can. None:
            ``EVERYSTEP_DOMAIN``.
        preemption: What SIGTERM and SIGUSR1 do; None: they are not looked at.
        replicated: Patterns (``"ema.*"``) of tensors in plain data and stateful objects that are equal on all ranks: stored once, and not
            by rank.
        consolidate: When checkpoints become whole Hugging Face models, and where (``Consolidate``, or a mapping with its words). The first
            node's agent does it in the background. None: only when ``consolidate()`` or somebody else asks for it.

    A run belongs to one job at a time: one trainer, or all ranks of a group, which make the same calls with the same arguments. The first
    ``save``, a ``save`` whose state has new tensors, and every ``restore`` are calls that all ranks have to make together; other saves
    exchange nothing between ranks. Thread-safe; not usable in a forked child.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cadence: Cadence | None = None,
        keep: Keep | None = None,
        overlap: bool = True,
        memory_budget: int | None = None,
        max_failures: int = 3,
        max_failing_s: float = 60.0,
        agent: bool = True,
        idle_s: float = 600.0,
        fresh: bool = False,
        group: Group = None,
        replicas: int = 0,
        replica_nbytes_s: int | None = None,
        domain: str | None = None,
        replicated: Sequence[str] = (),
        preemption: Preemption | None = None,
        consolidate: Consolidate | Mapping[str, Any] | str | bool | None = None,
    ) -> None:
        self.path = as_url(path)
        self.cadence = cadence or Cadence()
        self.keep = keep or Keep()
        self.overlap = overlap
        check_numbers(memory_budget=memory_budget, max_failures=max_failures, max_failing_s=max_failing_s, idle_s=idle_s,
                      replicas=replicas, replica_nbytes_s=replica_nbytes_s)  # fmt: skip
        self._fresh = fresh
        self.last_restore: RestoreReport | None = None
        self.restored_from: RestoredFrom | None = None
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._failing = Failures(at_most=max_failures, for_s=max_failing_s)
        self._best = policy.BestSoFar(self.keep)
        self._collector = StateCollector()
        self._collector.replicated = tuple(replicated)
        self._stager = Stager(notice=_log.warning)
        options = Options(
            cadence=self.cadence, keep=self.keep, memory_budget=memory_budget, idle_s=idle_s, replicas=replicas,
            replica_nbytes_s=replica_nbytes_s, domain=domain,
        )  # fmt: skip
        self._run = Connection(
            self.path, options=options, group=group, in_process=not agent, fresh=fresh, on_event=_weakly(self._on_event),
            on_lost=_weakly(self._on_lost),
        )  # fmt: skip
        self._watch = Watch(preemption, outlives=agent)
        self._exports = Exporting(settings_of(consolidate), self._run, self._watch, outlives=agent)
        self._because = "done"
        """Why the checkpointer ends: see ``messages.Ending``."""
        self._generation = 0
        self._plans = Plans(self._run)
        self._views: dict[tuple[int, str], SlabViews] = {}
        self._last_step: int | None = None
        self._last: Pending | None = None
        self._last_bound_at: float | None = None
        self._skipped: int | None = None
        self._owed = False
        self._call_s: float | None = None
        self._pending: dict[tuple[int, int], Pending] = {}
        self._warned: set[str] = set()
        self._hook = register_optimizer_step_pre_hook(_fence_hook(weakref.ref(self)))
        self._joined = False
        self._replan = False
        """All ranks plan anew at the save under way: none may leave it out."""
        self._abandon = weakref.finalize(self, _abandoned, self.path, self._pid, self._run, self._stager, self._hook, self._watch)
        self._abandon.atexit = False  # then close() is called
        _open.add(self)
        self._watch.install()

    @property
    def preempted(self) -> PreemptionReport | None:
        """What became of the save that the last signal asked for; None when there was none."""
        return self._watch.report

    @property
    def _decides(self) -> bool:
        """Whether this rank's clock says when a save is bound for the disk; a number of steps is the same for all."""
        if not isinstance(self.cadence.disk, (str, float)) or self._run.world.size == 1:
            return True
        where = self._run.met()
        return where.nodes == 1 and where.is_first  # the agents of several nodes agree on it by themselves

    @property
    def failures(self) -> list[CheckpointError]:
        """Every failed save of this object, oldest first (the newest hundred)."""
        return self._failing.errors

    # -- saving --------------------------------------------------------------------------------------------------------------
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        sync: bool = False,
        pin: bool = False,
    ) -> Pending:
        """Take a snapshot of ``state`` as of training step ``step``; returns at once.

        Call it after the optimizer's step and before the next backward pass: gradients are not state.

        Args:
            step: Training step, growing within one life of the run.
            state: Nested mapping of modules, optimizers, objects with ``state_dict``/``load_state_dict``, tensors and plain values.
            metrics: Numbers that ``Keep(best=...)`` and consolidation look at.
            sync: Return when the checkpoint is committed to disk.
            pin: Keep this checkpoint whatever ``keep`` says (implies that it goes to disk).

        Raises:
            StateError, LayoutError: The state holds something that cannot be stored; nothing was written.
            ConflictError: Another trainer has the run, a newer attempt exists, or there are checkpoints that nobody restored.
            CheckpointError: The last ``max_failures`` saves failed one after the other, for ``max_failing_s`` or longer.
        """
        began = time.perf_counter()
        with self._lock:
            self._usable()
            step = checked_step(step)
            request = self._asked(step)
            self._replan = self._plans.next_call(step)
            pending = self._save(step, state, numbers=numbers_of(metrics or {}, step), sync=sync, pin=pin, request=request, began=began)
        if sync:
            pending.wait("disk")
        if request is not None:
            self._watch.finish(request, pending)
        return pending

    def _asked(self, step: int) -> Request | None:
        """Whether a signal asks for this save."""
        if not self._joined:
            self._watch.join(self._run.world)
            self._joined = True
        return self._watch.due(step)

    def _save(self, step: int, state: Mapping[str, Any], *, numbers: dict[str, float], sync: bool, pin: bool, request: Request | None,
              began: float) -> Pending:  # fmt: skip
        self._stager.fence()
        self._stager.idle()
        if self._run.conflict is not None:
            raise self._run.conflict
        if request is None:
            self._failing.raise_if_due()
        if self._last is not None and step == self._last_step and self._last.report.outcome != "failed":
            drain_s = None if sync or pin else 0.0 if request is None else self._watch.left_s(request)
            return self._again(self._last, metrics=numbers, drain_s=drain_s, pin=pin)
        if self._last_step is not None and step < self._last_step:
            message = f"step {step} comes after step {self._last_step} in the same attempt"
            raise ConfigError(message, step=step, kind="step-order", hint="steps grow; restore(state, step=...) starts a new timeline")
        # What retention is to keep has to get to the disk first.
        numbered = policy.keeps_step(step, self.keep) or self._exports.binds(step)
        kept = self.cadence.disk is not False and (self._is_best(numbers) or numbered)
        ticks = time.monotonic()  # the clock on the wall may be set back, and then nothing would be due for long
        due = self._owed or (self._decides and policy.disk_bound(step, self.cadence, now=ticks, last_bound_at=self._last_bound_at))
        must = pin or sync or kept or request is not None
        bound = must or due
        waits_s = _DRAIN_TIMEOUT_S if pin or sync else 0.0 if request is None else self._watch.left_s(request)
        aim = _Aim(metrics=numbers, bound=bound, must=must, waits_s=waits_s, pin=pin)
        if not self._takes(step, bound=bound, joint=pin or sync or request is not None):
            pending = Pending(step)
            pending._advance("skipped", reason=f"not due: memory every {self.cadence.memory} steps")
            return pending
        with outside_inference():
            pending = self._take(step, state, aim, began=began)
        if self._last is pending and pending.report.outcome != "failed":
            self._last_bound_at = ticks if bound else self._last_bound_at
            self._owed = False
        else:
            self._owed = bound  # the disk gets the next one that can be saved instead
        return pending

    def _takes(self, step: int, *, bound: bool, joint: bool) -> bool:
        """Whether a save is made at all.

        Many ranks all have to come to the same answer by the step alone: what a clock, a metric, or a save that failed on one of them binds
        for the disk has to wait for a step that is due for all.
        """
        if joint or self._replan or policy.is_due(step, self.cadence.memory):
            return True
        disk = self.cadence.disk
        if self._run.world.size == 1 or disk is False:
            return bound
        by_number = isinstance(disk, int) and policy.is_due(step, disk)
        return by_number or policy.keeps_step(step, self.keep) or self._exports.binds(step)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Attach metrics that became known after ``save(step, ...)``, such as a validation loss."""
        with self._lock:
            self._usable()
            client, attempt = self._run.client, self._run.attempt
            if client is None or attempt is None or self._last_step is None or step > self._last_step:
                message = f"step {step} was not saved by this checkpointer"
                raise NotFoundError(message, step=step, kind="no-save", hint="call record after save")
            if step == self._last_step:  # the agent knows of it when it is sealed
                self._stager.fence()
                self._stager.idle()
            client.record_metrics(step=step, attempt=attempt, metrics=numbers_of(metrics, step))

    def _take(self, step: int, state: Mapping[str, Any], aim: _Aim, *, began: float) -> Pending:
        pending, now = Pending(step), time.time()
        for key, known in list(self._pending.items()):  # other threads take theirs out meanwhile
            if known.done():
                self._pending.pop(key, None)
        starting = self._run.attempt is None
        awaited = starting or self._plans.due  # the others come to plan with this rank
        try:
            if starting:
                self._run.world.begin()
            self._collector.rank_suffix = f"@rank-{self._run.world.rank:05d}" if self._run.world.size > 1 else ""
            collected = self._collector.collect(state)
            if starting:
                self._exports.describe(state)
            client, attempt = self._run.writing()
            if starting:
                self._exports.write()
            planned = self._plans.of(collected, starting=starting, waits_s=aim.waits_s)
            awaited = False
            if planned is None:
                reason = "its state has other tensors than before, and the ranks plan anew two saves later"
                self._leave_out(step, reason)
                return self._skip(pending, "structure", reason)
            plan, copies = planned
            self._run.prepare(client, plan)
            planned_s = time.perf_counter() - began
            slab = client.lease(plan, step)
            if isinstance(slab, messages.NoSlab) and aim.waits_s > 0:
                slab = self._waited_for(client, plan, step, aim.waits_s)
        except ConflictError as error:
            if awaited:
                self._run.failed(error, awaited=True)
            raise
        except (AgentError, CapacityError, StoreError) as error:
            if awaited:
                self._run.failed(error, awaited=True)
            self._fail(pending, error)
            # The ranks never came together: that is no hiccup. An agent that died meanwhile is one: the next save agrees anew.
            if starting and self._run.world.size > 1 and error.kind != "lost":
                raise
            if error.kind not in {"timeout", "lost"}:  # an agent that does not answer would not answer this either
                self._leave_out(step, f"its save of step {step} failed: {error}")
            return pending
        except BaseException as error:
            if awaited:
                self._run.failed(error, awaited=True)
            if not starting:
                self._leave_out(step, f"its save of step {step} failed: {error}")
            raise
        if isinstance(slab, messages.NoSlab):
            return self._skip(pending, slab.kind, slab.reason)
        self._skipped = None
        overlap = self.overlap and bool(collected.optimizers) and not collected.unfenced
        if collected.unfenced and self.overlap:
            text = f"{collected.unfenced[0]!r} does not run torch's optimizer step hooks: save() copies everything in the call"
            self._notice_once("unfenced", text)
        pending._expect_disk(aim.bound or self.cadence.disk is None)
        pending._must = aim.waits_s > 0
        together = self._run.world.size > 1
        self._pending[step, attempt] = pending
        self._last, self._last_step = pending, step
        # Of the save before: how long this one's call and fence take is known only when it has been sealed.
        timings = {"plan": planned_s, "fence": self._stager.take_fence_s()}
        before_s = {} if self._call_s is None else {"call": self._call_s}

        def finish(staging: Staging) -> None:
            if staging.error is not None:
                self._give_back(client, slab)
                self._fail(pending, staging.error)
                return
            pending._time({**timings, "stage": staging.stage_s}, nbytes=sum(file.nbytes for file in plan.files))
            try:
                client.seal(
                    slab, plan=plan, step=step, attempt=attempt, saved_at=now, values=collected.values, metrics=aim.metrics,
                    bound=aim.bound, must=aim.must, pin=aim.pin, timings_s={**timings, **before_s, "stage": staging.stage_s},
                )  # fmt: skip
            except CheckpointError as error:
                self._fail(pending, error)
                return
            except Exception as error:  # the staging thread's top: whoever waits for this save has to hear of it
                self._fail(pending, CheckpointError(f"step {step} could not be sealed: {error!r}", step=step, kind="internal"))
                return
            if not together:  # else the agent says when all ranks have sealed it
                self._in_memory(pending)

        try:
            views = self._viewed(slab, plan)
            self._stager.stage(step=step, leaves=collected.leaves, copies=copies, views=views, overlap=overlap, finish=finish)
        except BaseException as error:  # also an interrupt: the slab must not stay leased
            self._give_back(client, slab)
            broken = CheckpointError(f"save of step {step} was broken off: {error!r}", step=step, kind="interrupted", hint="save it again")
            pending._advance("failed", reason=broken.message, error=broken)
            raise
        self._call_s = time.perf_counter() - began
        pending._time({"call": self._call_s})
        return pending

    def _leave_out(self, step: int, reason: str) -> None:
        """Other ranks must not wait for this one's share of a step that it does not save."""
        client, plan = self._run.client, self._plans.current
        if self._run.world.size == 1 or client is None or not client.alive or plan is None:
            return
        try:
            slab = client.lease(plan, step)
            if isinstance(slab, Slab):
                client.give_back(slab, reason)
        except CheckpointError as error:
            _log.debug("the other ranks are not told that step %d is left out: %s", step, error)

    def _skip(self, pending: Pending, kind: str, reason: str) -> Pending:
        self._skipped = pending.step
        if self._run.met().nodes > 1 and self._failing.without():
            # Agents that do not hear of each other fill their slabs with steps that are never complete.
            hint = "everystep agent ls, and the agents' logs beside their sockets, show what they wait for"
            self._fail(pending, AgentError(f"for long no step has been saved: {reason}", step=pending.step, kind="stuck", hint=hint))
            return pending
        self._notice_once(kind, f"step {pending.step} is not saved: {reason}")
        pending._advance("skipped", reason=reason)
        return pending

    def _waited_for(self, client: AgentClient, plan: SavePlan, step: int, timeout_s: float) -> Slab:
        """A slab for a save that must not be skipped: there is one when all that is bound for the disk is there."""
        client.drain(timeout_s=timeout_s)
        slab = client.lease(plan, step)
        if isinstance(slab, messages.NoSlab):
            raise CapacityError(f"step {step} is not saved: {slab.reason}", step=step, kind=slab.kind, hint="raise memory_budget")
        return slab

    def _again(self, last: Pending, *, metrics: dict[str, float], drain_s: float | None, pin: bool) -> Pending:
        self._notice_once("again", f"step {last.step} is saved already; a step names one state, the first one is kept")
        if metrics:
            self.record(last.step, metrics)
        if drain_s is None or drain_s > 0:
            try:
                self._drain(drain_s)
            except CheckpointError:
                if drain_s is None:
                    raise  # else a signal's time is up: what was reached is in the report
        repository, attempt = self._run.opened(create=False), self._run.attempt
        if pin and repository is not None and attempt is not None:
            repository.pin(CheckpointKey(last.step, attempt), reason="pinned by a save")
        return last

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        metric = self.keep.metric
        if not self.keep.best or not metrics or metric is None:
            return False
        if metric not in metrics:
            self._notice_once("metric", f"keep looks at the metric {metric!r}, which is not among those of this save: {sorted(metrics)}")
            return False
        repository = self._run.opened(create=False)
        if not self._best.known and repository is not None:
            self._best.learn(repository.metrics(key) for key in repository.lineage())
        return self._best.improves(metrics[metric])

    def _viewed(self, slab: Slab, plan: SavePlan) -> SlabViews:
        if self._generation != self._run.generation:
            self._forget_views(lambda _: True)
            self._generation = self._run.generation
        found = self._views.get((slab.id, plan.id))
        if found is None:
            dtypes = [DTYPES[plan.tensors[placement.tensor].dtype] for placement in plan.placements]
            known = self._plans.ids
            self._forget_views(lambda key: key[0] == slab.id or key[1] not in known)
            found = self._views[slab.id, plan.id] = SlabViews(slab.view, plan, dtypes)
        return found

    def _forget_views(self, which: Callable[[tuple[int, str]], bool]) -> None:
        for key in [key for key in self._views if which(key)]:
            self._stager.forget_views(self._views.pop(key))

    # -- restoring -----------------------------------------------------------------------------------------------------------
    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        include: Sequence[str] | None = None,
        cast: bool = False,
    ) -> int | None:
        """Fill ``state`` in place from the newest verified checkpoint, in memory or on disk; returns its step, or None when there is none.

        A checkpoint whose bytes do not verify is passed over with a report (``restored_from.skipped``, and a log line), and the next older
        one is taken.

        Args:
            state: As for ``save``.
            step: Take this step's checkpoint instead of the newest.
            strict: Names of state and checkpoint must agree.
            include: Patterns (``"model.*"``) of full names; only these are restored.
            cast: Convert dtypes that differ.

        Raises:
            NotFoundError: ``step`` was given and is not there.
            LayoutError: Names, shapes or dtypes do not fit; nothing was changed.
            CorruptionError: There are checkpoints and none of them verifies.
        """
        found = self._restore(
            lambda reader: restore_into(state, reader, strict=strict, include=include, cast=cast), step=step, include=include
        )
        if found is None:
            return None
        source, report = found
        if not strict and (report.missing or report.unexpected):
            _log.warning(
                "step %d is restored in part: %d tensors, without %d that the checkpoint lacks (%s) and %d that the state lacks (%s)",
                source.key.step, len(report.restored), len(report.missing), some(report.missing), len(report.unexpected),
                some(report.unexpected),
            )  # fmt: skip
        return source.key.step

    def _restore(
        self, apply: Callable[[TensorReader], RestoreReport], *, step: int | None, include: Sequence[str] | None = None
    ) -> tuple[RestoredFrom, RestoreReport] | None:
        """Have ``apply`` take the newest checkpoint that verifies, or that of ``step``; the next attempt goes on from it."""
        with self._lock, outside_inference():
            self._usable()
            self._stager.fence()
            self._stager.idle()
            if self._run.attempt is not None:
                self._finish_timeline()
            self._run.world.begin()
            repository = self._run.found(create=False)
            if repository is None:
                self._run.looked(None)
                if step is not None:
                    message = f"no run at {self.path!r}, so no step {step}"
                    raise NotFoundError(message, step=step, kind="no-run", hint="check the path with: everystep ls RUN")
                return None
            try:
                found = restore(
                    self._run.world, self._run.reach(repository), step=step, apply=apply, notice=_log.warning, include=include
                )
            except CorruptionError as error:
                if error.kind != "incomplete" or not self._fresh or step is not None:
                    raise
                _log.warning("starting from scratch: %s", error.message)
                found = None
            if found is None:
                self._run.looked(None)
                return None
            self.restored_from, self.last_restore = found
            self._run.looked(self.restored_from.key)
            return found

    def steps(self) -> list[int]:
        """Steps that can be restored now, in memory or on disk, in rising order."""
        with self._lock:
            self._usable()
            return sorted({choice.step for choice in self._run.restorable()})

    def latest(self) -> int | None:
        """The newest step that can be restored, or None."""
        with self._lock:
            self._usable()
            choices = self._run.restorable()
            return choices[0].step if choices else None

    # -- consolidation -------------------------------------------------------------------------------------------------------
    def consolidate(self, step: int | str = "latest", *, wait: bool = False, timeout_s: float | None = None) -> PendingExport:
        """Have a checkpoint made a whole Hugging Face model now, whatever the schedule says; returns at once unless ``wait``.

        Any rank may ask, also all at once: what they ask for at one step is done once. On nodes other than the first there is nothing to
        wait for, and the path stays None.

        Args:
            step: ``"latest"`` (the newest save, which is made durable first), ``"best"`` by the schedule's metric, a step, or a key.
            wait: Return when the model is there.
            timeout_s: With ``wait``: give up after this many seconds; None: never.

        Raises:
            NotFoundError: Nothing was saved or restored yet.
            ConfigError: ``step`` is none of these, or each node has a store of its own.
            CheckpointError: With ``wait``: it failed. TimeoutError: ``timeout_s`` passed.
        """
        with self._lock:
            self._usable()
            self._stager.fence()
            self._stager.idle()
            pending = self._exports.ask(step if isinstance(step, str) else checked_step(step), self._last_step)
        if wait:
            pending.wait(timeout_s)
        return pending

    # -- ending --------------------------------------------------------------------------------------------------------------
    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the newest snapshot is committed to disk.

        Raises:
            CheckpointError: It could not be made durable.
        """
        with self._lock:
            self._usable()
            self._stager.fence()
            self._stager.idle()
            self._drain(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Make the newest snapshot durable, let the agent go, and end. Idempotent.

        With ``Consolidate(wait=True)`` it waits for what is due to be consolidated, ``final`` included; what of that fails is in the log.

        Raises:
            CheckpointError: The newest snapshot is not durable, and why.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            if self._skipped is not None:
                _log.warning("step %d, the last one, was not saved: no slab was free", self._skipped)
            began = time.monotonic()
            allowed_s = self._watch.drain_s(timeout_s)
            because = "preempted" if self._watch.ending else self._because
            in_a_hurry = allowed_s == 0.0 and timeout_s != 0.0  # a word here: see Watch.drain_s
            try:
                self._stager.fence()
                self._stager.idle()
                if in_a_hurry:
                    self._exports.end(because, 0.0)
                    self._run.abandon()  # the agent makes the newest snapshot durable by itself
                elif self._run.conflict is None:
                    try:
                        self._drain(allowed_s)
                    except BaseException:
                        because = "failed"
                        raise
                    finally:
                        self._exports.end(because, None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began)))
                self._run.ended()
            finally:
                self._exports.over()
                self._closed = True
                self._watch.remove()
                _open.discard(self)
                self._hook.remove()
                self._stager.close()
                self._run.close()
                for pending in list(self._pending.values()):
                    if not pending.done():
                        error = AgentError(f"closed before step {pending.step} was on disk", step=pending.step, kind="closed")
                        pending._advance("failed", reason=error.message, error=error)
                self._pending.clear()
                self._abandon.detach()
                self._views.clear()
                self._plans.clear()

    def __enter__(self) -> Checkpointer:  # noqa: PYI034 (typing.Self needs Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._run.failed(error, meets=True)
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                self._because = "failed"
        try:
            self.close()
        except CheckpointError as failed:
            if kind is None:
                raise
            # The body's own error is the one to see; this one must not hide it.
            _log.error("%s", failed)

    def _drain(self, timeout_s: float | None) -> None:
        if self._last is None:
            return
        client = self._run.client
        if client is not None and client.alive:
            drained = client.drain(timeout_s=_DRAIN_TIMEOUT_S if timeout_s is None else timeout_s)
            if not drained.complete:
                message = f"the newest snapshot (step {self._last_step}) is not on disk: {drained.error or 'the time was up'}"
                newest = drained.newest_durable_step
                hint = "nothing of this attempt is on disk" if newest is None else f"step {newest} is the newest on disk"
                raise AgentError(message, step=self._last_step, kind="not-durable", hint=hint)
        elif self._last.error is None and self._last.report.tier != "disk":
            message = f"the agent of {self.path!r} ended before step {self._last_step} was on disk"
            raise AgentError(message, step=self._last_step, kind="not-durable", hint="save again, or see: everystep ls RUN")
        # What came before the failed one is safe by now; that the newest is not has to be said.
        if self._last.error is not None:
            raise self._last.error

    def _finish_timeline(self) -> None:
        """A restore in the middle of an attempt: what was saved becomes durable, and the next save starts a new attempt."""
        try:
            self._drain(None)
        except CheckpointError as error:
            # Whoever restores wants what there is: a save that failed must not stand in its way.
            _log.warning("restoring although %s", error)
        self._run.new_timeline()
        self._last = self._last_step = self._last_bound_at = None
        self._owed = False
        self._best = policy.BestSoFar(self.keep)

    # -- outcomes --------------------------------------------------------------------------------------------------------------
    def _on_event(self, event: messages.Event) -> None:
        pending = self._pending.get((event.step, event.attempt))
        if event.what == "complete":
            if pending is not None:
                self._in_memory(pending)
        elif event.what in ("exported", "not exported"):
            _log.log(logging.INFO if event.what == "exported" else logging.WARNING, "%s", event.note)
        elif event.what == "committed":
            self._failing.end()
            _log.info("step %d saved to disk in %.2f s", event.step, event.timings_s.get("total", 0.0))
            self._settle(pending, "disk", event)
        elif event.what == "superseded":
            self._settle(pending, "superseded", event)
        elif event.what == "failed" and event.failed is not None:
            failed = event.failed
            if failed.kind in _OF_OTHERS and not (pending is not None and pending._must):
                # Another node had no slab free, say: nothing is broken, and who has failed counts it.
                self._notice_once(failed.kind, failed.message)
                if pending is not None:
                    pending._advance("skipped", reason=failed.message)
                return
            error = rebuild(failed.name, failed.message, failed.step, None, failed.key, failed.kind, failed.hint, failed.errno)
            if event.attempt != self._run.attempt:  # of a timeline that a restore has ended: it says nothing about this one
                _log.error("step %d of attempt %d is not saved: %s", event.step, event.attempt, error)
                if pending is not None:
                    pending._advance("failed", reason=str(error), error=error)
                return
            if isinstance(error, ConflictError) and error.kind not in _OF_ONE_STEP:
                self._run.conflict = error
            self._fail(pending or Pending(event.step), error)

    def _in_memory(self, pending: Pending) -> None:
        self._failing.saved()
        if not pending._disk_expected:
            self._failing.end()
        pending._advance("memory")

    def _settle(self, pending: Pending | None, outcome: str, event: messages.Event) -> None:
        if pending is not None:
            pending._advance(outcome, timings_s=event.timings_s)
            if outcome == "disk":
                self._watch.learn(pending.report)
            self._pending.pop((event.step, event.attempt), None)

    def _on_lost(self) -> None:
        first = True  # however many saves were under way, one thing has failed
        for (step, _), pending in list(self._pending.items()):
            if not pending.done():
                message = f"the agent of {self.path!r} ended before step {step} was on disk"
                error = AgentError(message, step=step, kind="agent-lost", hint="the next save starts a new one")
                self._fail(pending, error, counts=first)
                first = False
        self._pending.clear()

    def _fail(self, pending: Pending, error: CheckpointError, *, counts: bool = True) -> None:
        self._failing.add(pending.step, error, counts=counts)
        pending._advance("failed", reason=str(error), error=error)
        for key, known in list(self._pending.items()):
            if known is pending:
                self._pending.pop(key, None)
        self._last = pending if self._last is None or self._last.step <= pending.step else self._last

    def _give_back(self, client: AgentClient, slab: Slab) -> None:
        try:
            client.give_back(slab)
        except AgentError as error:
            # The connection is gone, and with it the lease.
            _log.debug("lease not given back: %s", error)

    def _notice_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s", text)

    def _usable(self) -> None:
        if self._closed:
            message = f"the checkpointer of {self.path!r} is closed"
            raise ConfigError(message, kind="closed", hint="make a new Checkpointer")
        if os.getpid() != self._pid:
            message = f"the checkpointer of {self.path!r} was made in process {self._pid} and is used in its fork {os.getpid()}"
            raise ConfigError(message, kind="forked", hint="save in the process that made it")

    def _fence(self) -> None:
        if os.getpid() == self._pid:
            self._stager.fence()


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _close_all() -> None:
    for checkpointer in list(_open):
        if checkpointer._pid == os.getpid():
            checkpointer._run.ended(meets=True)
            if getattr(sys, "last_value", None) is not None:  # the program ends by an exception that nobody caught
                checkpointer._because = "failed"
        try:
            checkpointer.close()
        except CheckpointError as error:
            _log.error("%s", error)


atexit.register(_close_all)


def _in_fork() -> None:
    """A lock that another thread held at the fork would never come free."""
    for checkpointer in list(_open):
        checkpointer._lock = threading.RLock()


os.register_at_fork(after_in_child=_in_fork)


def _abandoned(path: str, pid: int, run: Connection, stager: Stager, hook: RemovableHandle, watch: Watch) -> None:
    """A checkpointer is gone without ``close``: free what it held. Its agent takes it for a trainer that died, and persists the newest."""
    if os.getpid() != pid:
        return
    watch.remove()
    hook.remove()
    stager.close()
    run.abandon()
    _log.warning("the checkpointer of %r was dropped without close(); its agent makes the newest snapshot durable", path)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method, without keeping its object alive; nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call


def _fence_hook(owner: weakref.ref[Checkpointer]) -> Any:
    """A step pre-hook for every optimizer of the process; holds no checkpointer alive."""

    def hook(*_: object) -> None:
        checkpointer = owner()
        if checkpointer is not None:
            checkpointer._fence()

    return hook
