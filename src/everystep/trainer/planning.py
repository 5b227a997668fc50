"""Which plan a save follows: made when the structure of the state is new, by one rank alone or by all together.

Theory of operation. A plan of many ranks comes from all their layouts, so that all have to take part in making it. At the start of an
attempt all do. Later a rank may find by itself that its state has other tensors than before (a data loader's buffer has grown): it must not
wait for ranks that know nothing of it. It looks around for a moment: when the states of all have changed at this call, all plan at once.
Else it asks for a round (``targets.py``); its saves are skipped until the call that all agree on, two calls later where every step
synchronises, and there all plan. In a save that must not be skipped, which all ranks are to make together, those with a known state look
around as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from everystep.errors import AgentError
from everystep.layout import HeldTensor, RankLayout, SlabCopy
from everystep.plan import SavePlan, plan_save
from everystep.region import whole
from everystep.trainer.connection import Connection
from everystep.trainer.replicas import Sample, sample, unequal
from everystep.trainer.staging import order_of
from everystep.trainer.state import Collected, Leaf
from everystep.trainer.targets import Rounds, Wish

__all__ = ["Planned", "Plans"]

_log = logging.getLogger("everystep")
_PLANS = 4
"""Plans remembered at a time by a rank alone; the agent remembers more, so that a plan known here is known there."""
_PATIENCE_S, _UNCHANGED_S, _BRIEF_S = 5.0, 1.0, 0.5
"""How long a rank looks around for the others: in a save that must not be skipped, when its state is new or not; and in any other."""
_PAUSE_S, _PAUSE_MAX_S = 0.001, 0.02
_WISH = Wish(signal="plan", exit=False, left_s=1e9)

Planned = tuple[SavePlan, Sequence[SlabCopy]]


class Plans:
    """The plans of one checkpointer. Not thread-safe."""

    def __init__(self, run: Connection) -> None:
        self._run = run
        self._known: dict[object, Planned] = {}
        self._rounds: Rounds | None = None
        self._step: int | None = None
        self._call = 0
        self._asked_at = 0
        self._unreachable = False
        self._due = False

    @property
    def ids(self) -> set[str]:
        """Of the plans that are remembered."""
        return {plan.id for plan, _ in self._known.values()}

    @property
    def current(self) -> SavePlan | None:
        """The plan used last."""
        return next(reversed(self._known.values()))[0] if self._known else None

    @property
    def due(self) -> bool:
        """Whether all ranks plan at this call, and have not yet."""
        return self._due

    def next_call(self, step: int) -> bool:
        """This rank has come to a call of ``save``: whether all ranks plan anew at this one. Called once in each, before anything else."""
        world = self._run.world
        if world.size == 1:
            return False
        if step == self._step:  # the same step again is no further call
            self._due = False
            return False
        self._step = step
        self._call += 1
        if self._rounds is None:
            self._rounds = Rounds(world, tier=lambda _: ("disk", ""), clock=time.monotonic, about="plan", glance=world.glance)
        self._rounds.next_call()
        self._due = self._agreed(self._rounds, None)
        return self._due

    def of(self, collected: Collected, *, starting: bool, waits_s: float = 0.0) -> Planned | None:
        """The plan for a state; None: it waits for the call at which all ranks plan anew.

        Args:
            collected: This rank's state.
            starting: The attempt has just begun: all ranks are here.
            waits_s: So long this save may be waited for; 0: it may be skipped.
        """
        structure = collected.structure
        found = self._known.get(structure)
        if self._run.world.size == 1:
            return found or self._alone(collected)
        if not starting and not self._due:
            if found is not None and waits_s <= 0:
                return found
            if self._rounds is None or (found is None and self._rounds.has_target and waits_s <= 0):
                return None
            patience_s = _BRIEF_S if waits_s <= 0 else min(waits_s, _PATIENCE_S if found is None else _UNCHANGED_S)
            if not self._all_at_once(patience_s, new=found is None):
                if found is not None:
                    return found
                if not self._agreed(self._rounds, _WISH):  # a call that another rank has named meanwhile may be this one
                    return None
        self._due = False
        layout = RankLayout(self._run.met().node, tuple(map(_held, collected.leaves)), dict(collected.aliases))
        made = self._run.planned(layout)
        # One at a time: a rank that went back to an older one would be alone with it.
        for plan, _ in self._known.values():
            if plan.id != made[0].id:
                self._run.forget(plan)
        self._known = {structure: made}
        self._compare(collected)
        return made

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def _compare(self, collected: Collected) -> None:
        """Say so when what is stored once, because all ranks hold it under one name, is not the same on all of them."""
        world = self._run.world
        told = world.gather("copies", msgspec.msgpack.encode(sample(collected.leaves)))
        found = None if told is None else unequal([msgspec.msgpack.decode(data, type=Sample) for data in told], collected.leaves)
        if found is not None:
            rank, names = found
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            _log.warning(
                "rank %d's %s%s differ from rank 0's, and one copy of each is stored: tensors of one name have to be equal on all ranks "
                "unless they are DTensors; give those of pipeline stages names of their own", rank, ", ".join(map(repr, names[:3])), more,
            )  # fmt: skip

    def _alone(self, collected: Collected) -> Planned:
        plan = plan_save([leaf.spec for leaf in collected.leaves], aliases=collected.aliases)
        while len(self._known) >= _PLANS:
            dropped, _ = self._known.pop(next(iter(self._known)))
            self._run.forget(dropped)
        made = self._known[collected.structure] = plan, order_of(plan, collected.leaves)
        return made

    def _all_at_once(self, patience_s: float, *, new: bool) -> bool:
        """Whether all ranks plan at this call: they are in it together, and the state of one of them at least is ``new``."""
        if self._asked_at == self._call:
            return False  # the same step again: what was found then is done
        world, base = self._run.world, f"plan/at/{self._call}"
        until, pause_s = time.monotonic() + patience_s, _PAUSE_S
        try:
            if not world.rank and self._asked_at:  # whoever is still there finds nobody, and goes on as it would have done
                for name in ("new", "here", "verdict"):
                    world.drop(f"plan/at/{self._asked_at}/{name}")
            self._asked_at = self._call
            if new:
                world.add(f"{base}/new", 1)
            count = world.add(f"{base}/here", 1)
            while count < world.size and time.monotonic() < until and world.look(f"{base}/verdict") is None:
                time.sleep(pause_s)
                pause_s = min(_PAUSE_MAX_S, 1.5 * pause_s)
                count = world.add(f"{base}/here", 0)
            plans = count >= world.size and world.add(f"{base}/new", 0) > 0
            # One answer for all, also for those who were still counting, and those who come later.
            return world.offer(f"{base}/verdict", b"plan" if plans else b"later") == b"plan"
        except AgentError as error:
            self._lost(error)
            return False

    def _agreed(self, rounds: Rounds, wish: Wish | None) -> bool:
        try:
            return rounds.due(wish) is not None
        except AgentError as error:
            self._lost(error)
            return False

    def _lost(self, error: AgentError) -> None:
        """Rank 0 has gone: the training will notice as well."""
        if not self._unreachable:
            _log.warning("other ranks are not asked for new plans any more: %s", error)
        self._unreachable = True


def _held(leaf: Leaf) -> HeldTensor:
    regions = (whole(leaf.spec.shape),) if leaf.chunks is None else tuple(chunk.region for chunk in leaf.chunks)
    return HeldTensor(leaf.spec, regions, drifts=not leaf.late and leaf.chunks is None)
