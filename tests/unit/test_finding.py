"""Which checkpoints the nodes of a job can restore together, and what is said of those that they cannot."""

from __future__ import annotations

import pytest

from everystep.errors import ConfigError, ConflictError
from everystep.trainer.finding import Choice, Held, Lacking, Listed, Seen, View, Where, choose
from everystep.trainer.topology import Place, are_hidden, host_towards, topology


def held(step: int, node: int, nodes: int, slab: int = 1, *, replica: bool = False) -> Held:
    """One node's share of a step of attempt 1 in memory."""
    return Held(step, 1, node, nodes, slab, replica)


def seen(*, nodes: int, shared: bool = True) -> dict[int, Seen]:
    """A run with one attempt."""
    return {1: Seen(None, nodes, shared)}


def node(attempts: dict[int, Seen], *, memory: tuple[Held, ...] = (), disk: tuple[Listed, ...] = ()) -> View:
    """What one node has."""
    return View(memory, disk, attempts, max(attempts, default=0))


def test_memory_of_all_nodes_makes_a_choice() -> None:
    """A step that both nodes hold comes before an older one on disk."""
    attempts = seen(nodes=2)
    views = [
        node(attempts, memory=(held(7, 0, 2, 3),), disk=(Listed(5, 1),)),
        node(attempts, memory=(held(7, 1, 2, 4),), disk=(Listed(5, 1),)),
    ]
    found = choose(views, step=None)
    assert found.choices == [
        Choice(7, 1, "memory", ((Where(0, 3),), (Where(1, 4),))),
        Choice(5, 1, "disk", (), (0, 1)),
    ]
    assert not found.lacking


def test_a_copy_takes_a_lost_nodes_place() -> None:
    """Node 2 is gone; node 1 holds its own share and a copy of node 2's: one node restores both."""
    views = [node(seen(nodes=2), memory=(held(7, 0, 2, 3), held(7, 1, 2, -1, replica=True)))]
    (choice,) = choose(views, step=None).choices
    assert (choice.tier, choice.sources) == ("peer", ((Where(0, 3),), (Where(0, -1),)))


def test_the_newest_step_that_is_whole_is_found_among_those_that_are_kept() -> None:
    """Nodes keep the step copied last (2), the one being copied (5) and the newest (9), and copies of some: without node 1 it is 2, or 5 once its copy is whole."""
    attempts = seen(nodes=3)
    own = [tuple(held(step, number, 3, slab=step) for step in (2, 5, 9)) for number in (0, 2)]
    for copied, newest in ((False, 2), (True, 5)):
        copies = (held(2, 1, 3, slab=-1, replica=True), *((held(5, 1, 3, slab=-2, replica=True),) if copied else ()))
        views = [node(attempts, memory=own[0]), node(attempts), node(attempts, memory=(*own[1], *copies))]
        found = choose(views, step=None)
        assert (found.choices[0].step, found.choices[0].tier) == (newest, "peer")
        assert found.lacking[0].step == 9


def test_own_memory_comes_before_a_copy() -> None:
    """Where a node still has its share, the copy that another holds is second."""
    views = [
        node(seen(nodes=2), memory=(held(7, 0, 2, 3), held(7, 1, 2, -1, replica=True))),
        node(seen(nodes=2), memory=(held(7, 1, 2, 4),)),
    ]
    (choice,) = choose(views, step=None).choices
    assert (choice.tier, choice.sources[1]) == ("memory", (Where(1, 4), Where(0, -1)))


def test_memory_of_some_nodes_is_told_as_lacking() -> None:
    """A step of which one node's memory is lost is not restored, and is not silently forgotten."""
    found = choose([node(seen(nodes=3), memory=(held(7, 0, 3), held(7, 2, 3)))], step=None)
    assert not found.choices
    assert found.lacking == [Lacking(7, 1, "memory", 3, (1,))]
    assert str(found.lacking[0]) == "the memory of node 2 of the 3 that saved it is nowhere on the nodes found"


def test_stores_of_their_own_count_when_all_parts_are_found() -> None:
    """Two nodes with disks of their own: the step that both have is taken, one that only one has is told."""
    attempts = seen(nodes=2, shared=False)
    views = [
        node(attempts, disk=(Listed(5, 1, (0,)), Listed(6, 1, (0,)))),
        node(attempts, disk=(Listed(5, 1, (1,)),)),
    ]
    found = choose(views, step=None)
    assert found.choices == [Choice(5, 1, "disk", ((Where(0),), (Where(1),)), (0, 1))]
    assert found.lacking == [Lacking(6, 1, "disk", 2, (1,), (0,))]
    assert "files of node 2 of the 2 that saved it are nowhere" in str(found.lacking[0])


def test_a_part_without_its_manifest_counts_where_another_node_committed() -> None:
    """A node that was killed between its part and its manifest has what is needed: the other node's manifest decides."""
    attempts = seen(nodes=2, shared=False)
    views = [node(attempts, disk=(Listed(6, 1, (0,)),)), node(attempts, disk=(Listed(6, 1, (1,), committed=False),))]
    (choice,) = choose(views, step=None).choices
    assert choice.manifests == (0,)
    neither = [node(attempts, disk=(Listed(6, 1, (number,), committed=False),)) for number in (0, 1)]
    assert choose(neither, step=None).choices == []


def test_different_listings_of_one_store() -> None:
    """F34: a node whose listing does not show a step of a shared store yet restores it all the same."""
    attempts = seen(nodes=2)
    views = [node(attempts, disk=(Listed(5, 1), Listed(6, 1))), node(attempts, disk=(Listed(5, 1),))]
    assert [(choice.step, choice.sources) for choice in choose(views, step=None).choices] == [(6, ()), (5, ())]


def test_one_nodes_run_on_more_nodes() -> None:
    """What one node saved on its own disk is read by new nodes through that node."""
    views = [node(seen(nodes=1), disk=(Listed(5, 1),)), node({})]
    (choice,) = choose(views, step=None).choices
    assert (choice.sources, choice.manifests) == (((Where(0),),), (0,))


def test_abandoned_timelines_are_left_alone() -> None:
    """Attempt 2 went on from step 5 of attempt 1: attempt 1's later steps are not its past, wherever they lie."""
    attempts = {1: Seen(None, 1, True), 2: Seen((1, 5), 1, True)}
    views = [node(attempts, memory=(held(9, 0, 1),), disk=(Listed(5, 1), Listed(8, 1), Listed(6, 2)))]
    assert [(one.step, one.attempt) for one in choose(views, step=None).choices] == [(6, 2), (5, 1)]
    assert [(one.step, one.attempt) for one in choose(views, step=8).choices] == [(8, 1)]


def test_reduced_ones_count_where_nothing_is_missed() -> None:
    """A reduced step is no choice for a full restore, and told of as lacking; it is one for its step, or for names that it has."""
    disk = (Listed(5, 1), Listed(7, 1, reduced=1, dropped=("optim",)))
    views = [node(seen(nodes=1), disk=disk)]
    reduced = Choice(7, 1, "disk", (), (0,), 1, ("optim",))
    found = choose(views, step=None)
    assert [choice.step for choice in found.choices] == [5]
    assert [(one.step, str(one)) for one in found.lacking] == [(7, "it was reduced: 'optim' was dropped from it")]
    assert choose(views, step=7).choices == [reduced]
    for include, satisfied in ((["model.*"], True), (["epoch", "model.a"], True), (["opt*"], False), (["*"], False), (["optim"], False),
                               (["model.*", "optim.state.x"], False), (["[mo]*"], False), (["optimal.*"], True)):  # fmt: skip
        assert [one.step for one in choose(views, step=None, include=include).choices] == ([7, 5] if satisfied else [5])
    unreadable = [node(seen(nodes=1), disk=(Listed(7, 1, reduced=1),))]
    assert choose(unreadable, step=None, include=["model.*"]).choices == []


def test_whole_before_reduced() -> None:
    """While a step is being reduced both are there: the whole one is tried first, and nothing is said to lack."""
    views = [node(seen(nodes=2), disk=(Listed(7, 1), Listed(7, 1, reduced=1, dropped=("optim",))))] * 2
    assert [choice.reduced for choice in choose(views, step=7).choices] == [0, 1]
    found = choose(views, step=None)
    assert ([choice.reduced for choice in found.choices], found.lacking) == ([0], [])


def test_nodes_that_trained_on_by_themselves_are_not_mixed() -> None:
    """Both nodes' own disks have step 5 of attempt 2, each from a life of its own: neither is taken for the other."""
    both = [{1: Seen(None, 2, False, "job"), 2: Seen((1, 3), 1, True, life)} for life in ("1.5", "2.5")]
    views = [node(attempts, disk=(Listed(5, 2),)) for attempts in both]
    with pytest.raises(ConflictError, match="nodes 1 and 2 have different histories of this run: attempt 2") as raised:
        choose(views, step=None)
    assert raised.value.hint
    assert choose(views[:1], step=None).choices[0].step == 5


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    """Ranks of one socket are one node, wherever they stand in the order."""
    places = [Place(node=name, host=f"10.0.0.{name}", domain="") for name in ("2", "1", "2", "1")]
    where = topology(places, 3)
    assert (where.node_of, where.hosts, where.ranks, where.is_first) == ((0, 1, 0, 1), ("10.0.0.2", "10.0.0.1"), (1, 3), False)


def test_a_loopback_address_is_not_told_to_other_machines() -> None:
    """Debian's hosts file names a machine 127.0.1.1: the others would speak with themselves."""
    mine = Place(node="a", host="127.0.1.1", domain="", machine="A")
    other = Place(node="b", host="192.0.2.1", domain="", machine="B")
    assert are_hidden([mine, other])
    assert not are_hidden([mine, Place(node="c", host="127.0.0.1", domain="", machine="A")])
    assert host_towards([mine, other], 1) == "192.0.2.1"
    with pytest.raises(ConfigError, match=r"cannot reach this one at 127\.0\.1\.1") as raised:
        host_towards([mine, Place(node="b", host="127.0.1.1", domain="", machine="B")], 0)
    assert "EVERYSTEP_ADDRESS" in raised.value.hint
