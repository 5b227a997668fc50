"""When ranks plan anew, and that none of them waits for ranks that know nothing of it; the ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everystep.trainer.connection import Connection
from everystep.trainer.planning import Plans
from everystep.trainer.state import StateCollector
from everystep.trainer.topology import Place, topology
from everystep.trainer.world import World


class Run:
    """What plans need of a connection: one node with all ranks."""

    planned = Connection.planned

    def __init__(self, world: World) -> None:
        self.world = world
        self.forgotten: list[str] = []

    def met(self):
        return topology([Place(node="n", host="h", domain="")] * self.world.size, self.world.rank)

    def forget(self, plan):
        self.forgotten.append(plan.id)


class Rank:
    """One rank that saves a state of its own."""

    def __init__(self, world: World) -> None:
        self.run = Run(world)
        self.plans = Plans(self.run)  # type: ignore[arg-type]
        self.collector = StateCollector()
        self.collector.rank_suffix = f"@rank-{world.rank:05d}" if world.size > 1 else ""
        self.state = {"model": torch.nn.Linear(3, 2), "loader": {"held": torch.arange(4)}}

    def save(self, step: int, *, starting: bool = False, waits: bool = False):
        """The plan that this save would follow, or None."""
        self.plans.next_call(step)
        return self.plans.of(self.collector.collect(self.state), starting=starting, waits_s=30.0 if waits else 0.0)


def ranks_of(size: int) -> list[Rank]:
    if size == 1:
        return [Rank(World.alone())]
    store = dist.HashStore()
    worlds = [World(dist.PrefixStore("t/", store), rank, size, timeout_s=5.0) for rank in range(size)]
    for world in worlds:
        world.glance = world.look  # type: ignore[method-assign] # what comes late is tested elsewhere
    return [Rank(world) for world in worlds]


@pytest.fixture
def at_once():
    """Run something on every rank at the same time."""
    with ThreadPoolExecutor(4) as pool:

        def run(ranks: list[Rank], job: Callable[[Rank], Any]) -> list[Any]:
            return list(pool.map(job, ranks))

        yield run


def test_all_plan_at_the_start_and_never_again(at_once):
    """The first save of an attempt is planned together; later ones ask nobody."""
    ranks = ranks_of(3)
    first = at_once(ranks, lambda rank: rank.save(1, starting=True))
    assert len({plan.id for plan, _ in first}) == 1
    for rank in ranks:
        assert rank.save(2)[0].id == first[0][0].id
        assert rank.save(3)[0].id == first[0][0].id


def test_one_rank_alone_asks_and_waits_for_nobody(at_once):
    """Rank 1's buffer has grown: its saves are left out until all plan anew, two calls later, one after the other."""
    ranks = ranks_of(3)
    old = at_once(ranks, lambda rank: rank.save(1, starting=True))[0][0].id
    ranks[1].state["loader"]["held"] = torch.arange(9)
    for step in (2, 3):
        assert ranks[1].save(step) is None
        assert [rank.save(step)[0].id for rank in (ranks[0], ranks[2])] == [old, old]
    plans = at_once(ranks, lambda rank: rank.save(4))
    (new,) = {plan.id for plan, _ in plans}
    assert new != old
    assert {tensor.name: tensor.shape for tensor in plans[0][0].tensors}["loader.held@rank-00001"] == (9,)
    assert [rank.save(5)[0].id for rank in ranks] == [new] * 3
    assert all(rank.run.forgotten == [old] for rank in ranks)


def test_a_rank_that_goes_back_is_not_alone_with_its_old_plan(at_once):
    """After others have planned anew an old structure has no plan of its own any more: all plan once more."""
    ranks = ranks_of(2)
    first = at_once(ranks, lambda rank: rank.save(1, starting=True))[0][0].id
    ranks[1].state["loader"]["held"] = torch.arange(9)
    for step in (2, 3):
        ranks[1].save(step)
        ranks[0].save(step)
    at_once(ranks, lambda rank: rank.save(4))
    ranks[1].state["loader"]["held"] = torch.arange(4)
    assert ranks[1].save(5) is None
    ranks[0].save(5)
    ranks[0].save(6)
    ranks[1].save(6)
    again = at_once(ranks, lambda rank: rank.save(7))
    assert {plan.id for plan, _ in again} == {first}


def test_a_save_that_all_wait_for_is_planned_at_once(at_once):
    """With sync=True all ranks are in the call together: nothing is left out, whoever has changed."""
    ranks = ranks_of(3)
    old = at_once(ranks, lambda rank: rank.save(1, starting=True))[0][0].id
    assert {plan.id for plan, _ in at_once(ranks, lambda rank: rank.save(2, waits=True))} == {old}
    ranks[2].state["loader"]["held"] = torch.arange(5)
    assert {plan.id for plan, _ in at_once(ranks, lambda rank: rank.save(3, waits=True))} != {old}


def test_the_same_step_again_is_no_call(at_once):
    """A step that is saved twice counts once, so that ranks that do it and ranks that do not stay together."""
    ranks = ranks_of(2)
    at_once(ranks, lambda rank: rank.save(1, starting=True))
    ranks[0].save(1)
    ranks[1].state["loader"]["held"] = torch.arange(9)
    for step in (2, 3):
        ranks[1].save(step)
        ranks[0].save(step)
    assert [rank.plans.next_call(4) for rank in ranks] == [True, True]


def test_a_rank_alone_remembers_several_plans():
    """One rank goes back and forth between structures without planning again."""
    (rank,) = ranks_of(1)
    ids = []
    for length in (4, 9, 4, 9):
        rank.state["loader"]["held"] = torch.arange(length)
        ids.append(rank.save(len(ids))[0].id)
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]
    assert not rank.run.forgotten


def test_tensors_that_only_seem_to_be_copies_are_told_of(at_once, caplog):
    """Two pipeline stages with the same names: one copy would be stored, and rank 0 says so; equal ones are nobody's business."""
    ranks = ranks_of(3)
    for rank in ranks:
        rank.state = {"stage": torch.nn.Linear(3, 2), "optim": None}
        torch.manual_seed(1)
        torch.nn.init.ones_(rank.state["stage"].weight)
        torch.nn.init.zeros_(rank.state["stage"].bias)
    at_once(ranks, lambda rank: rank.save(1, starting=True))
    assert not caplog.records
    with torch.no_grad():
        ranks[2].state["stage"].weight[1, 2] = 7.0
    at_once(ranks, lambda rank: rank.save(2, starting=True))
    (record,) = caplog.records
    assert "rank 2's 'stage.weight' differ from rank 0's" in record.getMessage()
