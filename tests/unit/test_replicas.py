from __future__ import annotations

import os
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.agent import replicas
from everystep.agent.memory import Room
from everystep.agent.messages import PeerAddress
from everystep.agent.peers import PeerClient
from everystep.agent.replicas import TokenBucket, holders
from everystep.errors import NotFoundError
from everystep.repository import CheckpointKey
from everystep.testing.sides import PlainJob

TOKEN = b"0123456789abcdef-of-this-job"
RUN = "a1b2c3"
MIB = 1 << 20
WAIT_S = 15


def key(step, attempt=1):
    return CheckpointKey(step, attempt)


def addresses(domains):
    return [PeerAddress(node=node, host="h", port=1, domain=domain) for node, domain in enumerate(domains)]


def complete(job, step, *, nbytes=6 * MIB):
    """Every node has a snapshot of this step, and all have heard so; returns their bytes."""
    data = [side.add(key(step), nbytes) for side in job.sides]
    job.sealed(key(step))
    for side in job.sides:
        with side._changed:
            assert side._changed.wait_for(lambda side=side: any(one[1] == key(step) for one in side.told if one[0] == "completed"), timeout=WAIT_S)
    return data


def idle(job, but=()):
    """Nothing is being pulled any more."""
    for number, nodes in enumerate(job.nodes):
        if number not in but:
            assert nodes.replicas.wait_idle(WAIT_S)


def copied(job, *steps, but=()):
    """Every node has heard that these, (step, attempt), and no others, are to be kept."""
    for number, side in enumerate(job.sides):
        if number not in but:
            with side._changed:
                wanted = tuple(key(*(one if isinstance(one, tuple) else (one,))) for one in steps)
                kept = lambda side=side: next((one[1] for one in reversed(side.told) if one[0] == "keep"), None)  # noqa: E731
                assert side._changed.wait_for(lambda kept=kept, wanted=wanted: kept() == wanted, timeout=WAIT_S), (wanted, kept())
            assert job.nodes[number].replicas.wait_idle(WAIT_S)


def copies(nodes):
    return {(one.node, one.step) for one in nodes.replicas.summaries()}


# -- who holds what ----------------------------------------------------------------------------------------------------------------
def test_ring():
    """Without domains each node is copied by the next; one node by nobody; more copies than others are as many as there are others."""
    assert holders(addresses([""] * 3), 1) == {0: (1,), 1: (2,), 2: (0,)}
    assert holders(addresses([""]), 1) == {0: ()}
    assert holders(addresses([""] * 3), 0) == {0: (), 1: (), 2: ()}
    assert holders(addresses([""] * 3), 2) == {0: (1, 2), 1: (2, 0), 2: (0, 1)}
    assert holders(addresses([""] * 3), 9) == {0: (1, 2), 1: (2, 0), 2: (0, 1)}
    assert holders([], 1) == {}


@given(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=1, max_size=24), st.integers(1, 3))
def test_copies_lie_in_other_domains(domains, count):
    """Any domains: nobody holds his own copy, all hold equally many, and where no domain has more than half of the nodes the first copy lies
    in another domain."""
    held = holders(addresses(domains), count)
    assert set(held) == set(range(len(domains)))
    for node, by in held.items():
        assert node not in by
        assert len(set(by)) == len(by) == min(count, len(domains) - 1)
    loads = Counter(node for by in held.values() for node in by)
    assert len(set(loads.values())) <= 1
    largest = max(Counter(domain for domain in domains if domain).values(), default=1)
    if largest * 2 <= len(domains):
        for node, by in held.items():
            assert not domains[node] or domains[by[0]] != domains[node]


def test_bandwidth():
    """The bucket lets bytes pass at the rate that it is given, and no faster after a pause than a tenth of a second's worth."""
    now = 0.0
    bucket = TokenBucket(100.0, lambda: now)
    assert bucket.delay_s(50) == 0
    assert bucket.delay_s(50) == pytest.approx(0.5)
    assert bucket.delay_s(50) == pytest.approx(1.0)
    now = 100.0
    assert bucket.delay_s(30) == 0
    assert bucket.delay_s(30) == pytest.approx(0.2)
    assert TokenBucket(None).delay_s(1 << 60) == 0


# -- copying -------------------------------------------------------------------------------------------------------------------------
def test_copy_is_there_after_complete():
    """After a complete step each node holds the next one's bytes, lists them as a copy, and gives them to local readers and to peers."""
    with PlainJob(3, TOKEN, run_id=RUN, replicas=1) as job:
        data = complete(job, 5, nbytes=13 * MIB + 4096)
        idle(job)
        for number, nodes in enumerate(job.nodes):
            source = (number - 1) % 3
            (summary,) = nodes.replicas.summaries()
            assert (summary.node, summary.step, summary.attempt, summary.replica, summary.nodes) == (source, 5, 1, True, 3)
            assert summary.slab < 0
            held = nodes.replicas.hold(summary.slab)
            assert held.view == data[source]
            with held.readable_fd() as fd:
                assert os.pread(fd, 4096, 8192) == data[source][8192 : 8192 + 4096]
                with pytest.raises(OSError, match="Bad file"):
                    os.write(fd, b"x")
            held.release()
            held.release()
            with PeerClient(job.addresses[number], token=TOKEN, run_id=RUN) as client:
                assert {(one.node, one.step, one.replica) for one in client.snapshots()} == {(number, 5, False), (source, 5, True)}
                with client.take(source, key(5)) as remote:
                    got = bytearray(len(data[source]))
                    remote.read_into(0, memoryview(got))
                    assert got == data[source]
                    assert remote.part.node == source
        assert job.sides[0].counts["replica_bytes"] == len(data[2])


def test_lost_node_is_read_from_its_peer():
    """A node is gone, agent and all: its share is still read, by the new agent in its place, from the one that holds the copy."""
    with PlainJob(3, TOKEN, run_id=RUN, replicas=1) as job:
        data = complete(job, 5)
        idle(job)
        job.nodes[1].close()
        with PeerClient(job.addresses[2], token=TOKEN, run_id=RUN) as client, client.take(1, key(5)) as remote:
            got = bytearray(remote.nbytes)
            remote.read_into(0, memoryview(got))
        assert got == data[1]


def test_copy_in_another_domain():
    """With two racks of two nodes each copy lies in the other rack."""
    with PlainJob(4, TOKEN, replicas=1, domains=["a", "a", "b", "b"]) as job:
        complete(job, 5, nbytes=MIB)
        idle(job)
        for number, nodes in enumerate(job.nodes):
            ((source, _),) = copies(nodes)
            assert (source < 2) != (number < 2)


def test_copies_are_of_one_step_everywhere():
    """While one step is pulled several more become complete: all keep that one and the last that was copied, own and copies; then the newest is next."""
    with PlainJob(3, TOKEN, replicas=1, cadence=False) as job:
        complete(job, 1)
        copied(job, 1)
        began, go_on, held = threading.Event(), threading.Event(), [[], [], []]

        def slow(one):
            held[1].append(one.step)
            began.set()
            assert go_on.wait(WAIT_S)

        job.sides[0].on_hold = lambda one: held[0].append(one.step)
        job.sides[1].on_hold = slow
        complete(job, 2)
        assert began.wait(WAIT_S)
        for step in (3, 4, 5):
            complete(job, step)
        copied(job, 1, 2, but=(2,))
        assert copies(job.nodes[1]) == {(0, 1), (0, 2)}
        assert copies(job.nodes[2]) == {(1, 1)}
        go_on.set()
        copied(job, 5)
        assert [copies(nodes) for nodes in job.nodes] == [{(2, 5)}, {(0, 5)}, {(1, 5)}]
        assert held[0] == held[1] == [2, 5]


def test_holder_that_cannot_copy(caplog):
    """One holder has no memory: the copies made last stay with all, whole, the reason is told, and they are renewed when it has memory again."""
    with PlainJob(3, TOKEN, replicas=1, cadence=False) as job:
        complete(job, 1)
        copied(job, 1)
        plain, job.nodes[2].replicas._room = job.nodes[2].replicas._room, lambda: Room(MIB, "a small machine")
        for step in (2, 3, 4):
            complete(job, step)
            copied(job, 1, step)
            for side in job.sides:
                with side._changed:
                    assert side._changed.wait_for(lambda side=side: any(one[0] == "note" for one in side.told), timeout=WAIT_S)
                (line,) = {one[2] for one in side.told if one[0] == "note"} if step == 2 else {""}
                assert step != 2 or "node 3: step 2 of node 2 is not copied" in line
            assert copies(job.nodes[2]) == {(1, 1)}
            assert (2, 1) in copies(job.nodes[0])
        job.nodes[2].replicas._room = plain
        complete(job, 5)
        copied(job, 5)
        for side in job.sides:
            with side._changed:
                assert side._changed.wait_for(lambda side=side: ("note", "copies", "") in side.told, timeout=WAIT_S)


def test_superseded_snapshot_is_passed_over():
    """A step that its node has no more when its turn comes is not copied; the next is."""
    with PlainJob(2, TOKEN, replicas=1, cadence=False) as job:

        def vanish(one):
            if one.step == 1:
                raise NotFoundError("superseded")

        job.sides[1].on_hold = vanish
        complete(job, 1)
        complete(job, 2)
        copied(job, 2)
        assert copies(job.nodes[0]) == {(1, 2)}


def test_source_that_has_not_heard_yet():
    """A node that is asked for a step before it has heard that it is complete is asked again."""
    with PlainJob(2, TOKEN, replicas=1, cadence=False) as job:
        asked = []

        def not_yet(one):
            asked.append(one)
            if len(asked) < 3:
                raise NotFoundError("not complete here")

        job.sides[1].on_hold = not_yet
        complete(job, 1)
        idle(job)
        assert copies(job.nodes[0]) == {(1, 1)}
        assert job.sides[0].counts.get("replica_failures", 0) == 0


def test_damaged_bytes_are_never_kept(caplog):
    """Bytes that arrive with another digest than the part says: the copy is dropped, counted and told, the old one stays, the next is good."""
    with PlainJob(2, TOKEN, replicas=1, cadence=False) as job:
        data = complete(job, 1)
        copied(job, 1)
        old = bytes(data[1])
        plain = job.sides[1].add

        def damaged(one, nbytes):
            result = plain(one, nbytes)
            job.sides[1].data[one][5 * MIB] ^= 1
            return result

        job.sides[1].add = damaged
        complete(job, 2)
        idle(job)
        assert copies(job.nodes[0]) == {(1, 1)}
        held = job.nodes[0].replicas.hold_copy(1, key(1))
        assert held.view == old
        held.release()
        assert job.sides[0].counts["replica_mismatches"] == 1
        assert job.sides[0].counts["replica_failures"] == 1
        assert "step 2 of node 1 is not copied: bytes" in caplog.text
        job.sides[1].add = plain
        complete(job, 3)
        copied(job, 3)
        assert copies(job.nodes[0]) == {(1, 3)}


def test_source_that_dies_in_the_middle():
    """The source goes away while it is read: the old copy stays whole, it is counted, and the thread lives on."""
    with PlainJob(3, TOKEN, replicas=1, cadence=False, post_timeout_s=1.0) as job:
        data = complete(job, 1)
        copied(job, 1)
        waiting, go_on = threading.Event(), threading.Event()

        def hold(one):
            waiting.set()
            assert go_on.wait(WAIT_S)

        job.sides[1].on_hold = hold
        complete(job, 2)
        assert waiting.wait(WAIT_S)
        killer = threading.Thread(target=job.nodes[1].close)
        killer.start()
        go_on.set()
        killer.join(WAIT_S)
        idle(job, but=(1,))
        if copies(job.nodes[2]) == {(1, 1)}:
            held = job.nodes[2].replicas.hold_copy(1, key(1))
            assert held.view == data[1]
            held.release()
            assert job.sides[2].counts["replica_failures"] >= 1
        else:  # it was faster than the killer
            assert copies(job.nodes[2]) >= {(1, 2)}
        assert copies(job.nodes[0]) >= {(2, 1)}, "without it what the others have of step 1 is worth nothing"


def test_memory_that_is_not_there(caplog):
    """Without room for a copy none is made, that is counted and told once, and training's own memory is left alone."""
    with PlainJob(2, TOKEN, replicas=1, cadence=False) as job:
        job.nodes[0].replicas._room = lambda: Room(MIB, "a small machine")
        for step in (1, 2):
            complete(job, step)
            idle(job)
        assert copies(job.nodes[0]) == set()
        assert job.sides[0].counts["replica_no_memory"] == 2
        assert caplog.text.count("a small machine") == 1
        assert copies(job.nodes[1]) == {(0, 2)}


def test_two_pieces_of_memory_are_filled_in_turn(monkeypatch):
    """Step after step no more memory is taken than for two copies; another size gives the old back."""
    made = []
    plain = replicas.SlabMemory

    def counted(nbytes):
        made.append(nbytes)
        return plain(nbytes)

    monkeypatch.setattr(replicas, "SlabMemory", counted)
    with PlainJob(2, TOKEN, replicas=1, cadence=False) as job:
        for step in range(1, 6):
            data = complete(job, step)
            copied(job, step)
            held = job.nodes[0].replicas.hold_copy(1, key(step))
            assert held.view == data[1]
            held.release()
        assert len(made) == 4  # two on each of two nodes
        complete(job, 6, nbytes=3 * MIB)
        copied(job, 6)
        assert made[4:] == [3 * MIB] * 2


def test_copy_that_is_read_is_not_overwritten():
    """A reader keeps its bytes while newer copies come; when it is done that memory is freed."""
    with PlainJob(2, TOKEN, replicas=1, cadence=False) as job:
        data = complete(job, 1)
        idle(job)
        held = job.nodes[0].replicas.hold_copy(1, key(1))
        memory = held._copy.memory
        for step in (2, 3, 4):
            complete(job, step)
            copied(job, step)
        assert held.view == data[1]
        held.release()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(memory.fd)
        assert copies(job.nodes[0]) == {(1, 4)}


def test_free():
    """Freed copies are gone, and the next complete step is copied again."""
    with PlainJob(2, TOKEN, replicas=1, cadence=False) as job:
        complete(job, 1)
        idle(job)
        slab = job.nodes[0].replicas.summaries()[0].slab
        assert job.nodes[0].replicas.free() == 6 * MIB
        assert copies(job.nodes[0]) == set()
        with pytest.raises(NotFoundError):
            job.nodes[0].replicas.hold(slab)
        complete(job, 2)
        idle(job)
        assert copies(job.nodes[0]) == {(1, 2)}


def test_copies_of_an_ended_job_stay_until_the_next_is_safe():
    """After a restart with other nodes an old copy stays until a step of the new attempt is complete and copied."""
    with PlainJob(3, TOKEN, replicas=1, cadence=False) as job:
        complete(job, 9)
        copied(job, 9)
        assert copies(job.nodes[0]) == {(2, 9)}
        for number, nodes in enumerate(job.nodes[:2]):
            nodes.configure(2, number, 2, False, 1)
            nodes.set_peers(job.addresses[:2], number)
        assert copies(job.nodes[0]) == {(2, 9)}
        for number in (0, 1):
            job.sides[number].add(key(4, 2))
            job.nodes[number].sealed(key(4, 2))
        copied(job, (4, 2), but=(2,))
        kept = [one[1] for one in job.sides[0].told if one[0] == "keep"]
        assert (key(9), key(4, 2)) in kept, "until then both"
        assert copies(job.nodes[0]) == {(1, 4)}


def test_no_replicas_no_thread():
    """Without replicas nothing is copied and no thread is begun."""
    with PlainJob(2, TOKEN) as job:
        complete(job, 1)
        assert [nodes.replicas._thread for nodes in job.nodes] == [None, None]


def test_closing_does_not_wait_for_a_limited_pull():
    """An agent that ends in the middle of a pull with little bandwidth ends at once."""
    with PlainJob(2, TOKEN, replicas=1, cadence=False) as job:
        job.nodes[0].replicas._bucket = TokenBucket(1000.0)
        complete(job, 1)
        job.sides[1].wait_count("replicas")
        began = time.monotonic()
        job.nodes[0].close()
        assert time.monotonic() - began < 5
        assert copies(job.nodes[0]) == set()
