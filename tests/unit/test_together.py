"""Two ranks of one node that save and restore together; the ranks are threads here, with a real agent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import everystep
from everystep.agent import messages
from everystep.errors import AgentError, CapacityError, ConfigError, NotFoundError
from everystep.trainer import connection
from everystep.trainer.finding import Choice, Reach, Where, opened
from everystep.trainer.topology import ALONE, Place
from everystep.trainer.world import World
from everystep.transfer import Buffers


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., list[everystep.Checkpointer]]]:
    """Makes one checkpointer for each rank."""
    made: list[everystep.Checkpointer] = []
    stores = itertools.count()

    def make(size: int = 2, **options: Any) -> list[everystep.Checkpointer]:
        store = dist.PrefixStore(f"{next(stores)}/", dist.HashStore())
        new = [everystep.Checkpointer(tmp_path / "run", idle_s=5, **options) for _ in range(size)]
        for rank, one in enumerate(new):
            one._run._world = World(store, rank, size, timeout_s=5.0)
        made.extend(new)
        return new

    yield make
    together(made, lambda one, _: one.close(10))


def together(ranks: Sequence[everystep.Checkpointer], job: Callable[[everystep.Checkpointer, int], Any]) -> list[Any]:
    """Every rank's result, or its error."""

    def one(pair: tuple[int, everystep.Checkpointer]) -> Any:
        try:
            return job(pair[1], pair[0])
        except Exception as error:
            return error

    if not ranks:
        return []
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, enumerate(ranks)))


def state(rank: int) -> dict[str, Any]:
    """What one rank keeps for itself."""
    return {"held": torch.full((3,), float(rank)), "number": rank}


def test_a_rank_that_fails_at_the_agreements_end_takes_all_back(ranks: Callable[..., list[everystep.Checkpointer]]) -> None:
    """F31: rank 1 fails at its very last part of the agreement: no rank goes on with the attempt, and the next save of all works."""
    both = ranks()
    configure, calls = both[1]._run._configure, itertools.count(1)

    def fails_once(*arguments: Any) -> None:
        if next(calls) == 2:
            raise AgentError("the agent did not answer", kind="timeout")
        configure(*arguments)

    both[1]._run._configure = fails_once  # type: ignore[method-assign]
    first, second = together(both, lambda one, rank: one.save(1, state(rank)))
    assert str(first) == "rank 1: the agent did not answer"
    assert str(second) == "the agent did not answer"
    assert [one._run.attempt for one in both] == [None, None]
    assert together(both, lambda one, rank: one.save(2, state(rank)).wait("memory", 10).outcome) == ["memory", "memory"]


def test_a_rank_that_fails_between_agreement_and_plan_is_heard_of(ranks: Callable[..., list[everystep.Checkpointer]]) -> None:
    """F31: the agent of one node ends just then: the others do not wait for its rank's layout until the time-out."""
    both = ranks()
    for one in both:
        one._run.world.timeout_s = 60.0
    writing = both[1]._run.writing

    def loses_its_agent() -> Any:
        writing()
        raise AgentError("no agent came up", kind="no-agent")

    both[1]._run.writing = loses_its_agent  # type: ignore[method-assign]
    first, second = together(both, lambda one, rank: one.save(1, state(rank)))
    assert str(first) == "rank 1: no agent came up"
    assert str(second) == "no agent came up"


def test_an_agent_that_dies_while_the_ranks_agree_is_a_failed_save(ranks: Callable[..., list[everystep.Checkpointer]]) -> None:
    """Training goes on: the first save fails on all ranks, with the one named whose agent it was, and the next one is made."""
    both = ranks()
    writing = both[1]._run.writing

    def loses_its_agent() -> Any:
        writing()
        both[1]._run.writing = writing  # type: ignore[method-assign]
        raise AgentError("the agent is gone", kind="lost")

    both[1]._run.writing = loses_its_agent  # type: ignore[method-assign]
    failed = together(both, lambda one, rank: one.save(1, state(rank)))
    assert [str(one.error) for one in failed] == ["rank 1: the agent is gone", "the agent is gone"]
    saved = together(both, lambda one, rank: one.save(2, state(rank)).wait("memory", 30).outcome)
    assert set(saved) <= {"memory", "disk"}


def test_a_clock_does_not_have_one_rank_save_alone(ranks: Callable[..., list[everystep.Checkpointer]], tmp_path: Path) -> None:
    """disk="0s" with memory=2: rank 0's clock is due at every step, but only those that are due for all ranks are saved, and get to the disk."""
    both = ranks(cadence=everystep.Cadence(memory=2, disk="0.001s"))
    outcomes = [together(both, lambda one, rank: one.save(step, state(rank)).wait("memory", 10).outcome) for step in range(1, 5)]  # noqa: B023
    assert outcomes[0] == outcomes[2] == ["skipped", "skipped"]
    assert set(outcomes[1] + outcomes[3]) <= {"memory", "disk"}
    together(both, lambda one, _: one.wait(10))
    assert [one.failures for one in both] == [[], []]
    assert (tmp_path / "run" / "manifests" / "000000000004-0001.json").exists()


def test_what_one_rank_owes_the_disk_waits_for_a_step_of_all(ranks: Callable[..., list[everystep.Checkpointer]]) -> None:
    """A save bound by its number failed on rank 1 alone: it makes up for it at the next step that is due, and not at one of its own."""
    both = ranks(cadence=everystep.Cadence(memory=2, disk=2))
    together(both, lambda one, rank: one.save(2, state(rank)).wait("memory", 10))
    both[1]._owed = True
    assert together(both, lambda one, rank: one.save(3, state(rank)).report.outcome) == ["skipped", "skipped"]
    assert together(both, lambda one, rank: one.save(4, state(rank)).wait("disk", 10).outcome) == ["disk", "disk"]


def test_a_structure_that_is_new_on_all_ranks_costs_no_save(ranks: Callable[..., list[everystep.Checkpointer]]) -> None:
    """All ranks' buffers grow at the same step: planned and saved at once; a rank alone in a sync save is waited for by nobody for long."""
    both = ranks()
    states = [state(rank) for rank in range(2)]
    for step in (1, 2, 3):
        for one in states:
            one["held"] = torch.zeros(step)
        assert together(both, lambda one, rank: one.save(step, states[rank]).wait("memory", 10).outcome) == ["memory", "memory"]  # noqa: B023
    found = together(both, lambda one, rank: one.save(4, states[rank], sync=rank == 0).wait("disk", 10).outcome)
    assert found == ["disk", "disk"]


def test_who_only_looks_is_not_a_rank_that_gave_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asks a checkpointer of its own for the newest step and closes it: no world is taken, nobody is told."""
    monkeypatch.setattr(World, "of", lambda *_: pytest.fail("it met the others"))
    with everystep.Checkpointer(tmp_path / "run") as looking:
        assert looking.latest() is None
        assert looking.steps() == []


def test_agent_in_the_trainer_is_refused_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """agent=False, and ranks 0 and 1 share a node while rank 2 has its own: all three are refused, each time, and nobody waits."""
    store = dist.PrefixStore("t/", dist.HashStore())
    three = [everystep.Checkpointer(tmp_path / "run", agent=False) for _ in range(3)]
    nodes = iter(["a", "a", "b"])
    monkeypatch.setattr(connection, "own_place", lambda _: Place(node=next(nodes), machine="m", host="127.0.0.1", domain=""))
    for rank, one in enumerate(three):
        one._run._world = World(store, rank, 3, timeout_s=30.0)
    for _ in range(2):
        nodes = iter(["a", "a", "b"])
        found = together(three, lambda one, _: one.restore({}))
        assert [type(error) for error in found] == [ConfigError] * 3
    together(three, lambda one, _: one.close())


def test_a_slab_that_was_refilled_meanwhile_is_not_taken_for_the_old_step(tmp_path: Path) -> None:
    """load() beside a running training: what was listed as step 1 holds step 2 when it is taken; it must not be handed out as step 1."""
    with everystep.Checkpointer(tmp_path / "run", cadence=everystep.Cadence(disk=False)) as ckpt:
        ckpt.save(1, {"w": torch.ones(4)}).wait("memory", 10)
        ckpt.save(2, {"w": torch.zeros(4)}).wait("memory", 10)
        client, repository = ckpt._run.client, ckpt._run.opened(create=False)
        assert client is not None
        assert repository is not None
        (slab,) = {one.slab for one in client.snapshots() if one.step == 2}
        reach = Reach(repository=repository, client=client, where=ALONE, addresses=(), token=b"")
        listed = Choice(1, 1, "memory", ((Where(0, slab),),))
        with (
            pytest.raises(NotFoundError, match="holds step 2 of attempt 1 by now"),
            Buffers(nbytes=1 << 20) as buffers,
            opened(listed, reach, buffers),
        ):
            pass


def test_memory_that_does_not_suffice_is_told_at_the_first_save(ranks: Callable[..., list[everystep.Checkpointer]]) -> None:
    """F30: a budget below one snapshot: every rank of the node raises at its first save, and says the numbers."""
    both = ranks(memory_budget=8)
    for error in together(both, lambda one, rank: one.save(1, state(rank))):
        assert isinstance(error, CapacityError)


def test_buffers_of_replicas_come_from_one_rank(ranks: Callable[..., list[everystep.Checkpointer]], tmp_path: Path) -> None:
    """Batch norm's statistics differ between replicas: what is stored is rank 0's, not one rank's means with another's variances."""
    both = ranks()
    models = []
    for rank in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(*(torch.nn.BatchNorm1d(512) for _ in range(4))))
        models[rank](torch.randn(8, 512) * (rank + 1) + rank)
    together(both, lambda one, rank: one.save(1, {"model": models[rank]}, sync=True))
    stored = everystep.load(tmp_path / "run")["model"]
    assert all(torch.equal(stored[name], tensor) for name, tensor in models[0].state_dict().items())


def test_what_becomes_of_an_older_timeline_does_not_stop_the_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a restore the old attempt's last step cannot be committed any more: it is logged, and neither saves nor close() raise it."""
    with everystep.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}, sync=True)
        ckpt.restore({"w": torch.ones(2)})
        ckpt.save(2, {"w": torch.ones(2)}, sync=True)
        old = messages.Failed(name="ConflictError", message="attempt 1 is over", step=1, kind="superseded-attempt")
        ckpt._on_event(messages.Event(what="failed", step=1, attempt=1, tier="disk", nbytes=0, timings_s={}, failed=old))
        assert "step 1 of attempt 1 is not saved" in caplog.text
        ckpt.save(3, {"w": torch.ones(2)}, sync=True)
        assert ckpt.failures == []
