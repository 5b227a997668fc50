"""What the ranks of some tests do beside plain training: saves in different orders, failures at the start, views that differ."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from train import Training, begin, opened, whence

import everystep


def hangs(voice: Any) -> None:
    """Wait for nothing."""
    threading.Event().wait()


def interleaved(voice: Any, *, path: str, rounds: int, **options: Any) -> None:
    """Training's all-reduces and saves in another order on each rank, with an all-reduce under way while others save. Ends when all is saved."""
    rank, world = begin(timeout_s=20)
    training = Training("fsdp")
    with opened(path, **options) as ckpt:
        training.step()
        ckpt.save(1, training.state).wait("memory", 30)  # the ranks agree once, all together
        total = torch.zeros(())
        for step in range(2, rounds + 2):
            training.step()
            work = None
            saved = None
            for turn in range(world):
                if (turn + rank) % world == 0:
                    saved = ckpt.save(step, training.state)
                else:
                    work = dist.all_reduce(total.add_(1.0), async_op=True)
                    if (turn + step) % 2:
                        work.wait()
            assert saved is not None
            assert work is not None
            work.wait()
            voice.tell("step", step=step, digest=training.digest())
        report = ckpt.save(rounds + 2, training.state, sync=True).report
        voice.tell("step", step=rounds + 2, digest=training.digest())
        voice.tell("saved", step=rounds + 2, outcome=report.outcome, tier=report.tier)
    dist.destroy_process_group()


def fails_at_start(voice: Any, *, path: str, how: str, who: int, timeout_s: float | None = None, **options: Any) -> None:
    """Rank ``who`` fails before the first save's agreement: ``state`` (what it saves cannot be stored), ``raises`` (it comes to no save and waits), ``dies``."""
    rank, _ = begin()
    if timeout_s is not None:
        _short_patience(timeout_s)
    training = Training("ddp")
    ckpt = opened(path, **options)
    state = training.state
    voice.tell("ready")
    try:
        if rank == who and how == "state":
            state = {**state, "bad": {"deep": object()}}
        if rank == who and how == "raises":
            voice.ask()
            raise ZeroDivisionError("before the first save")
        if rank == who and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.save(1, state).wait("memory", 30)
        voice.tell("saved", step=1)
    except everystep.CheckpointError as error:
        voice.tell("refused", error=type(error).__name__, message=str(error), kind=error.kind, rank=error.rank, hint=error.hint)
    if how == "state":  # a later save goes well: nobody is left behind in the round that failed
        report = ckpt.save(2, training.state).wait("memory", 30)
        voice.tell("again", step=2, outcome=report.outcome, tier=report.tier)
        ckpt.close(30)
    voice.tell("over")
    voice.ask()
    os._exit(0)


def _short_patience(timeout_s: float) -> None:
    """Wait for other ranks no longer than this at the start."""
    from everystep.trainer import world

    made = world.World.__init__

    def short(self: Any, *arguments: Any, **more: Any) -> None:
        more["timeout_s"] = timeout_s
        made(self, *arguments, **more)

    world.World.__init__ = short  # type: ignore[method-assign]


def sees_less(voice: Any, *, path: str, blind: list[int], newest: int, **options: Any) -> None:
    """Ranks in ``blind`` see a listing without steps from ``newest`` on, as an attribute cache would have it; then all restore."""
    from everystep.store.local import LocalStore

    rank, _ = begin()
    if rank in blind:
        seen = LocalStore.list

        def less(self: Any, *arguments: Any, **more: Any) -> Any:
            return [found for found in seen(self, *arguments, **more) if not _is_of(found, newest)]

        LocalStore.list = less  # type: ignore[method-assign]
    training = Training("fsdp")
    with opened(path, **options) as ckpt:
        step = ckpt.restore(training.state)
        voice.tell("restored", step=step or 0, digest=training.digest(), **whence(ckpt))
    dist.barrier()
    dist.destroy_process_group()


def _is_of(found: Any, newest: int) -> bool:
    key = found if isinstance(found, str) else getattr(found, "key", "")
    stem = key.rsplit("/", 1)[-1].split("-")[0]
    return "manifests" in key and stem.isdigit() and int(stem) >= newest


def dies_leasing(voice: Any, *, path: str, who: int, at: int, number: int = signal.SIGSEGV, **options: Any) -> None:
    """Rank ``who`` dies of a signal while it copies step ``at`` into the slab; the others go on until they are killed."""
    from everystep.trainer import staging

    rank, _ = begin(timeout_s=20)
    training = Training("copies")
    with opened(path, **options) as ckpt:
        ckpt.restore(training.state)
        for step in range(1, at + 1):
            training.step()
            voice.tell("step", step=step, digest=training.digest())
            if step == at and rank == who:
                signal.signal(number, signal.SIG_DFL)
                staging.Stager.stage = lambda *_, **__: os.kill(os.getpid(), number)  # type: ignore[method-assign]
            pending = ckpt.save(step, training.state)
            if step < at:
                pending.wait("memory", 30)
            voice.tell("saved", step=step)
        try:
            report = pending.wait("memory", 20)
            voice.tell("outcome", outcome=report.outcome, reason=report.reason)
        except (everystep.CheckpointError, TimeoutError) as error:
            voice.tell("outcome", outcome="failed", reason=str(error), kind=getattr(error, "kind", "timeout"))
        voice.ask()
        os._exit(0)


def two_jobs(voice: Any, *, path: str, **options: Any) -> None:
    """Save once on a run that another job may have; tell what came of it."""
    begin()
    training = Training("copies")
    with opened(path, **options) as ckpt:
        try:
            ckpt.restore(training.state)
            training.step()
            report = ckpt.save(1000, training.state).wait("memory", 30)
            voice.tell("saved", outcome=report.outcome)
        except everystep.CheckpointError as error:
            voice.tell("refused", error=type(error).__name__, message=str(error), kind=error.kind)
    dist.barrier()
    dist.destroy_process_group()


def resized(voice: Any, *, path: str, layout: str, **options: Any) -> None:
    """Restore in this world, whatever world saved; tell the whole state, the loader and the generators of this rank; train on a little."""
    import hashlib

    begin()
    training = Training(layout)
    if layout != "copies":
        training.step()  # an optimizer with state of its own: all of it has to be replaced
    training.spoil()
    before = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
    with opened(path, **options) as ckpt:
        step = ckpt.restore(training.state)
        generator = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
        voice.tell("restored", step=step or 0, digest=training.digest(), full=training.full_digest(), saved_by=training.loader.saved_by, drawn=training.loader.at,
                   generator=generator, before=before, **whence(ckpt))  # fmt: skip
        losses = [training.step() for _ in range(2)]
        voice.tell("trained", losses=losses, full=training.full_digest())
    dist.barrier()
    dist.destroy_process_group()


def quiet(voice: Any, *, path: str, steps: int, **options: Any) -> None:
    """Count what is asked of the job's store and how often a directory is listed, up to the first save and after it."""
    from everystep.store.local import LocalStore
    from everystep.trainer import world

    counted = [0]

    def counting(function: Any) -> Any:
        def counts(*arguments: Any, **more: Any) -> Any:
            counted[0] += 1
            return function(*arguments, **more)

        return counts

    for kind, names in ((LocalStore, ("list",)), (world.World, ("exchange", "gather", "share", "scatter", "put", "offer"))):
        for name in names:
            setattr(kind, name, counting(getattr(kind, name)))
    begin(timeout_s=20)
    training = Training("fsdp")
    with opened(path, **options) as ckpt:
        training.step()
        ckpt.save(1, training.state).wait("memory", 30)
        before = counted[0]
        for step in range(2, steps + 2):
            training.step()
            ckpt.save(step, training.state).wait("memory", 30)
        voice.tell("asked", before=before, after=counted[0])
    dist.barrier()
    dist.destroy_process_group()


def preempted(voice: Any, *, path: str, grace_s: float, steps: int = 10_000, layout: str = "fsdp", exit: bool = True, **options: Any) -> None:
    """Train until a signal ends it; told are the step at which it ended, and what was said of it."""
    begin(timeout_s=30)
    training = Training(layout)
    step = 0
    with opened(path, preemption=everystep.Preemption(grace_s=grace_s, exit=exit), **options) as ckpt:
        ckpt.restore(training.state)
        try:
            for step in range(1, steps + 1):
                training.step()
                voice.tell("step", step=step, digest=training.digest())
                ckpt.save(step, training.state)
                if step == 3:
                    voice.tell("under way")
        except SystemExit as left:
            report = ckpt.preempted
            assert report is not None
            voice.tell("preempted", step=step, code=left.code, tier=report.tier, durable=report.durable, reason=report.reason, signal=report.signal,
                       reported=report.step)  # fmt: skip
            raise


def changes_alone(voice: Any, *, path: str, who: int, at: int, steps: int, **options: Any) -> None:
    """From step ``at`` on, one rank's loader holds a longer buffer of its own: its structure changes, and nobody else's."""
    rank, _ = begin(timeout_s=30)
    training = Training("fsdp")
    # A restore fits the saved tensor to the state's: who continues has to have it as it was.
    buffer = {"held": torch.arange(9 if rank == who and not steps else 4)}
    with opened(path, **options) as ckpt:
        state = {**training.state, "buffer": buffer}
        found = ckpt.restore(state) or 0
        voice.tell("restored", step=found, digest=training.digest(), held=buffer["held"].tolist(), **whence(ckpt))
        for step in range(found + 1, found + steps + 1):
            training.step()
            if rank == who and step == at:
                buffer["held"] = torch.arange(9)
            buffer["held"] += rank
            voice.tell("step", step=step, digest=training.digest(), held=buffer["held"].tolist())
            report = ckpt.save(step, state).wait("memory", 30)
            voice.tell("saved", step=step, outcome=report.outcome, reason=report.reason)
    dist.barrier()
    dist.destroy_process_group()
