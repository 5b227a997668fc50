"""What ranks tell each other through the process group's store; the ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from everystep.errors import AgentError, ConflictError, LayoutError
from everystep.trainer.handshake import Handshake
from everystep.trainer.world import World


def strangers(size: int) -> list[World]:
    """Ranks that have not met yet."""
    store = dist.HashStore()
    return [World(dist.PrefixStore("test/", store), rank, size, timeout_s=2.0) for rank in range(size)]


@pytest.fixture
def worlds() -> Callable[[int], list[World]]:
    """Makes the world of so many ranks, as each of them sees it."""

    def make(size: int) -> list[World]:
        ranks = strangers(size)
        together(ranks, World.begin)
        return ranks

    return make


def together(worlds: list[World], job: Callable[[World], Any]) -> list[Any]:
    """Every rank's result, or its error."""

    def one(world: World) -> Any:
        try:
            return job(world)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(one, worlds))


def test_exchange_gives_everybody_all_messages(worlds: Callable[[int], list[World]]) -> None:
    """Three ranks see each other's messages in order of rank, twice under the same label."""
    found = together(worlds(3), lambda world: [world.exchange("a", {"rank": world.rank}), world.exchange("a", world.rank * 10)])
    assert found == [[[{"rank": 0}, {"rank": 1}, {"rank": 2}], [0, 10, 20]]] * 3


def test_large_messages(worlds: Callable[[int], list[World]]) -> None:
    """What is larger than a value of the store arrives whole, also when it does not compress."""
    import random

    blob = random.Random(1).randbytes(9 << 20)
    found = together(worlds(2), lambda world: world.share("blob", blob if world.rank == 0 else None))
    assert found == [blob, blob]


def test_scatter_and_gather(worlds: Callable[[int], list[World]]) -> None:
    """Rank 0 gets everybody's message, and everybody gets what is meant for it."""

    def job(world: World) -> Any:
        gathered = world.gather("g", world.rank)
        return gathered, world.scatter("s", [f"for {rank}" for rank in range(3)] if world.rank == 0 else None)

    assert together(worlds(3), job) == [([0, 1, 2], "for 0"), (None, "for 1"), (None, "for 2")]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_is_named_on_all_others(worlds: Callable[[int], list[World]], failing: int) -> None:
    """F31: the others raise the same error with the rank's name, and the next agreement works."""

    def job(world: World) -> Any:
        def start() -> None:
            with world.agreeing():
                if world.rank == failing:
                    raise LayoutError("it does not fit", key="w", kind="shape")
            world.exchange("start", None)

        with pytest.raises(LayoutError) as raised:
            start()
        return str(raised.value), raised.value.rank, world.exchange("again", world.rank)

    for rank, (text, named, again) in enumerate(together(worlds(3), job)):
        assert again == [0, 1, 2]
        if rank != failing:
            assert text == f"rank {failing}: it does not fit"
            assert named == failing


def test_a_rank_that_does_not_come_is_named(worlds: Callable[[int], list[World]]) -> None:
    """F31: after the time-out all who came raise, and name those who did not."""
    three = worlds(4)
    for world in three:
        world.timeout_s = 0.3
    errors = together([three[0], three[2]], lambda world: world.exchange("start", None))
    for error in errors:
        assert isinstance(error, AgentError)
        assert "ranks 1, 3 did not come to agree on 'start'" in str(error)


def test_a_missing_rank_0_is_named(worlds: Callable[[int], list[World]]) -> None:
    """The others do not wait for ever for rank 0."""
    two = worlds(2)
    two[1].timeout_s = -2.4
    (error,) = together(two[1:], lambda world: world.exchange("start", None))
    assert isinstance(error, AgentError)
    assert error.rank == 0


def test_who_comes_late_to_a_failed_round_hears_of_it(worlds: Callable[[int], list[World]]) -> None:
    """A failure waits for those who have not come yet; then all are in the next round."""
    two = worlds(2)
    two[0].fail(ConflictError("another job has the run"))
    with pytest.raises(ConflictError, match="rank 0: another job has the run"):
        two[1].exchange("start", None)
    assert together(two, lambda world: world.exchange("start", world.rank)) == [[0, 1], [0, 1]]


def test_single_keys(worlds: Callable[[int], list[World]]) -> None:
    """Put, look, offer (the first wins) and count."""
    first, second = worlds(2)
    assert second.look("k") is None
    first.put("k", b"\x00\xff")
    assert second.look("k") == b"\x00\xff"
    assert first.offer("o", b"mine") == b"mine"
    assert second.offer("o", b"yours") == b"mine"
    assert second.look("o") == b"mine"
    assert [first.add("n", 1), second.add("n", 2), first.add("n", 0)] == [1, 3, 3]


def test_alone() -> None:
    """A world of one rank needs no store."""
    world = World.alone()
    assert world.exchange("a", 1) == [1]
    assert world.share("b", 2) == 2
    assert world.gather("c", 3) == [3]
    assert world.scatter("d", [4]) == 4
    assert (world.look("k"), world.offer("k", b"v"), world.add("k", 5)) == (None, b"v", 5)
    world.fail(RuntimeError("nobody to tell"))


def test_who_fails_after_a_message_does_not_spoil_it(worlds: Callable[[int], list[World]]) -> None:
    """A rank that ends right after an exchange must not take its result from one that is still reading it."""
    first, second = worlds(2)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(second.gather, "g", 1)
        assert first.gather("g", 0) == [0, 1]
        slow.result()
    assert first.share("s", "told") == "told"
    first.fail(AgentError("it ended"))
    assert second.share("s") == "told"
    second.gather("g", 2)
    with pytest.raises(AgentError, match="rank 0: it ended"):
        second.share("s")


def test_a_rank_broken_off_within_a_message_is_heard_of_at_once(worlds: Callable[[int], list[World]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is interrupted while it writes what others wait for: they raise its error, and do not wait for the time-out."""
    first, second = worlds(2)
    second.gather("g", 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    first.gather("g", 0)
    with monkeypatch.context() as patched:
        patched.setattr(first, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt), first.agreeing():
            first.share("s", "told")
    second.timeout_s = 60.0
    with pytest.raises(AgentError, match="rank 0: KeyboardInterrupt"):
        second.share("s")


def test_of_two_that_fail_the_one_that_is_waited_for_counts(worlds: Callable[[int], list[World]]) -> None:
    """Rank 1 has given its message and fails; rank 2 fails without: rank 0 does not wait for rank 2's message all the same."""
    zero, one, two = worlds(3)
    one.gather("g", 1)
    one.fail(AgentError("after it"))
    two.fail(AgentError("before it"))
    zero.timeout_s = 60.0
    with pytest.raises(AgentError, match="rank 2: before it"):
        zero.gather("g", 0)


def test_what_was_gathered_is_not_kept() -> None:
    """Layouts of a thousand ranks, again and again, must not fill the store's memory."""
    store = dist.HashStore()
    both = [World(dist.PrefixStore("t/", store), rank, 2, timeout_s=5.0) for rank in range(2)]

    def job(world: World) -> Any:
        world.gather("g", bytes(9 << 20))
        return world.scatter("s", [b"a", bytes(9 << 20)] if world.rank == 0 else None)

    together(both, World.begin)
    before = store.num_keys()
    for _ in range(3):
        assert [len(found) for found in together(both, job)] == [1, 9 << 20]
    assert store.num_keys() == before


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_one_missed_call_does_not_put_the_ranks_out_of_step(worlds: Callable[[int], list[World]], alone: int) -> None:
    """One rank calls twice without the others and gives up; whatever all then do together works, the first time."""
    ranks = worlds(3)
    assert together(ranks, lambda world: world.exchange("before", world.rank)) == [[0, 1, 2]] * 3

    def call(world: World) -> Any:
        world.begin()
        return world.exchange("call", world.rank)

    for world in ranks:
        world.timeout_s = 0.3 if not alone else -2.4
    for _ in range(2):
        with pytest.raises(AgentError, match="did not come to agree on 'call'"):
            call(ranks[alone])
    for world in ranks:
        world.timeout_s = 5.0
    assert together(ranks, call) == [[0, 1, 2]] * 3
    assert together(ranks, call) == [[0, 1, 2]] * 3


def test_a_store_that_has_outlived_a_restart(worlds: Callable[[int], list[World]]) -> None:
    """What an earlier life of the job left in the store, its words of greeting too, is not taken for this life's (torchrun keeps the store)."""
    store = dist.HashStore()

    def life(said: str) -> list[Any]:
        ranks = [World(dist.PrefixStore("t/", store), rank, 3, timeout_s=5.0) for rank in range(3)]
        return together(ranks, lambda world: (world.exchange("a", f"{said} {world.rank}"), world.offer("k", said.encode())))

    for said in ("first", "second", "third"):
        assert life(said) == [([f"{said} {rank}" for rank in range(3)], said.encode())] * 3


def test_a_rank_that_is_late_after_a_restart_gets_no_old_message() -> None:
    """Rank 0 of the new life begins while rank 1's old greeting is still there: it does not go on with the dead one's messages."""
    store = dist.HashStore()
    old = [World(dist.PrefixStore("t/", store), rank, 2, timeout_s=5.0) for rank in range(2)]
    together(old, lambda world: world.exchange("step", 10))
    first, second = (World(dist.PrefixStore("t/", store), rank, 2, timeout_s=5.0) for rank in range(2))
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(first.exchange, "step", 5)
        with pytest.raises(TimeoutError):
            waits.result(timeout=0.3)
        assert second.exchange("step", 7) == [5, 7]
        assert waits.result() == [5, 7]


def test_ranks_that_did_not_meet_are_named_and_meet_later() -> None:
    """F31: at the very beginning too, who is missing is named; when it comes after all, the ranks go on together."""
    three = strangers(3)
    three[0].timeout_s = three[2].timeout_s = 0.3
    for error in together([three[0], three[2]], lambda world: world.exchange("start", None)):
        assert isinstance(error, AgentError)
        assert "rank 1 did not come" in str(error) or "rank 0" in str(error)
    three[0].timeout_s = three[2].timeout_s = 5.0

    def again(world: World) -> Any:
        world.begin()
        return world.exchange("again", world.rank)

    assert together(three, again) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("late", [(), (0,)])
def test_a_rank_that_fails_before_rank_0_has_come_does_not_wait_for_it_again(monkeypatch: pytest.MonkeyPatch, late: tuple[int, ...]) -> None:
    """Rank 1 cannot tell anybody why it ends: it waits for rank 0 once and briefly, or not at all when it has waited already."""
    waits: list[float] = []

    def meet(self: Handshake, timeout_s: float) -> None:
        waits.append(timeout_s)
        raise AgentError("rank 0 did not come", kind="rank-missing")

    monkeypatch.setattr(Handshake, "meet", meet)
    world = World(dist.HashStore(), 1, 2, timeout_s=120.0)
    world.fail(LayoutError("it does not fit"), late=late)
    assert waits == ([] if late else [5.0])


def test_a_rank_that_comes_before_rank_0_after_a_restart_waits_for_it() -> None:
    """What the dead rank 0 answered the dead rank 1 is still there: the new rank 1 does not go where they met and read their messages."""
    store = dist.HashStore()
    old = [World(dist.PrefixStore("t/", store), rank, 2, timeout_s=5.0) for rank in range(2)]
    together(old, lambda world: world.exchange("step", 10))
    first, second = (World(dist.PrefixStore("t/", store), rank, 2, timeout_s=5.0) for rank in range(2))
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(second.exchange, "step", 7)
        with pytest.raises(TimeoutError):
            waits.result(timeout=0.3)
        assert first.exchange("step", 5) == [5, 7]
        assert waits.result() == [5, 7]
