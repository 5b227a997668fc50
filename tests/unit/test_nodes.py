from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.agent.lead import COPY_TIMEOUT_S, MOST_FAILED, MOST_OPEN, SETTLE_TIMEOUT_S, Lead
from everystep.agent.messages import PeerAddress
from everystep.agent.nodes import Nodes
from everystep.agent.peers import PeerClient
from everystep.agent.posts import Posts
from everystep.agent.talk import SealedSteps
from everystep.errors import AgentError, CapacityError, ConfigError
from everystep.repository import CheckpointKey
from everystep.testing.sides import PlainJob, PlainSide, plain_part

TOKEN = b"0123456789abcdef-of-this-job"
OTHER_TOKEN = b"the-token-of-another-job-4711"
RUN = "a1b2c3"


def key(step, attempt=1):
    return CheckpointKey(step, attempt)


def told(side, what):
    return [event[1:] for event in side.told if event[0] == what]


# -- the lead's decisions --------------------------------------------------------------------------------------------------------
def test_step_is_complete_when_all_have_sealed_it():
    """Complete is what every node has sealed; the newest counts, in whatever order the news come."""
    lead = Lead(3, None)
    for node in (2, 0):
        lead.sealed(node, 1, [5], 0.0)
    assert lead.verdict().complete is None
    lead.sealed(1, 1, [5, 6], 0.0)
    assert lead.verdict().complete == 5
    lead.sealed(0, 1, [6, 7], 0.0)
    lead.sealed(2, 1, [6, 7], 0.0)
    assert lead.verdict().complete == 6
    lead.sealed(1, 1, [7], 0.0)
    assert lead.verdict().complete == 7
    assert lead.verdict().failed == ()


def test_node_that_went_on_will_not_seal_an_older_step():
    """A step that a node has skipped fails for all as soon as that node seals a later one, and names the node."""
    lead = Lead(2, None)
    lead.sealed(0, 1, [5], 0.0)
    lead.sealed(1, 1, [6], 0.0)
    assert lead.verdict().failed == ((5, 1, "node 1 has not saved it"),)
    assert lead.sealed(0, 1, [5, 6], 0.0)
    assert lead.verdict().complete == 6


def test_failed_step_stays_failed():
    """What one node has given up is not complete when the others seal it later."""
    lead = Lead(2, None)
    assert lead.failed(1, 1, 5, "torn")
    assert not lead.failed(0, 1, 5, "torn too")
    assert lead.sealed(0, 1, [5], 0.0), "it is to be told again"
    lead.sealed(1, 1, [5], 0.0)
    assert lead.verdict().complete is None
    assert lead.verdict().failed == ((5, 1, "torn"),)


def test_older_attempts_count_for_nothing():
    """News of an attempt that is over change nothing; those of a newer one begin it."""
    lead = Lead(1, 0.0)
    lead.sealed(0, 2, [5], 0.0)
    for change in (lead.sealed(0, 1, [9], 0.0), lead.failed(0, 1, 9, ""), lead.settled(0, 1, 5, 0.0), lead.wanted(0, 1, [5], 0.0)):
        assert not change
    assert (lead.verdict().attempt, lead.verdict().complete) == (2, 5)
    lead.sealed(0, 3, [2], 0.0)
    assert (lead.verdict().attempt, lead.verdict().complete, lead.verdict().persist) == (3, 2, (2,))


def test_persist_as_fast_as_the_disks_take_them():
    """Cadence None: the first complete step, then, when every node has settled that, the newest complete one."""
    lead = Lead(2, 0.0)
    for step in (1, 2, 3):
        for node in (0, 1):
            lead.sealed(node, 1, [step], 0.0)
        assert lead.verdict().persist == (1,)
    lead.settled(0, 1, 1, 0.0)
    assert lead.verdict().persist == (1,)
    assert lead.settled(1, 1, 1, 0.0)
    assert (lead.verdict().persist, lead.verdict().settled) == ((3,), 1)
    for node in (0, 1):
        lead.settled(node, 1, 3, 0.0)
    assert (lead.verdict().persist, lead.verdict().settled) == ((), 3)
    for node in (0, 1):
        lead.sealed(node, 1, [4], 0.0)
    assert lead.verdict().persist == (4,)


def test_persist_by_duration():
    """A duration: the first step that is complete after that time; none while one is under way."""
    lead = Lead(1, 10.0)
    for step, now in ((1, 0.0), (2, 5.0), (3, 11.0)):
        lead.sealed(0, 1, [step], now)
    assert lead.verdict().persist == (1,)
    lead.settled(0, 1, 1, 12.0)
    assert lead.verdict().persist == ()
    lead.sealed(0, 1, [4], 12.0)
    assert lead.verdict().persist == (4,)
    lead.settled(0, 1, 4, 13.0)
    lead.sealed(0, 1, [5], 21.9)
    assert lead.verdict().persist == ()
    lead.sealed(0, 1, [6], 22.0)
    assert lead.verdict().persist == (6,)


def test_persist_that_never_ends_is_not_waited_for():
    """A node that settles nothing holds the others' persists up for a bounded time only."""
    lead = Lead(2, 0.0)
    for step, now in ((1, 0.0), (2, SETTLE_TIMEOUT_S - 1), (3, SETTLE_TIMEOUT_S + 1)):
        for node in (0, 1):
            lead.sealed(node, 1, [step], now)
    assert lead.verdict().persist == (3,)


def test_wanted_steps_are_persisted_by_all():
    """A step that one node wants on disk is persisted by all, once, when it is complete, whatever the cadence."""
    lead = Lead(2, None)
    lead.sealed(0, 1, [1], 0.0)
    lead.wanted(0, 1, [1], 0.0)
    assert lead.verdict().persist == ()
    lead.sealed(1, 1, [1], 0.0)
    assert lead.verdict().persist == (1,)
    lead.sealed(0, 1, [2], 0.0)
    lead.sealed(1, 1, [2], 0.0)
    lead.wanted(1, 1, [2], 0.0)
    assert lead.verdict().persist == (1, 2)
    for node in (0, 1):
        lead.settled(node, 1, 2, 0.0)
    assert (lead.verdict().persist, lead.verdict().settled) == ((1,), 2)
    for node in (0, 1):
        lead.settled(node, 1, 1, 0.0)
    assert (lead.verdict().persist, lead.verdict().settled) == ((), 2)
    lead.wanted(0, 1, [1, 2], 0.0)
    assert lead.verdict().persist == ()


def completes(lead, *steps, now=0.0):
    for step in steps:
        for node in range(lead.nodes):
            lead.sealed(node, 1, [step], now)
    return lead.verdict()


def test_one_step_is_copied_at_a_time():
    """The newest complete step is copied when every node is done with the one before; it is the copied one when it is whole with all."""
    lead = Lead(2, None)
    assert completes(lead, 1).copy is None, "without replicas"
    lead = Lead(2, None)
    lead.copies = True
    told = completes(lead, 1)
    assert (told.copy, told.copied) == (1, None)
    assert completes(lead, 2, 3).copy == 1
    assert not lead.copied(0, 1, 1, "", 1.0)
    assert not lead.copied(0, 1, 1, "", 1.0), "repeated"
    assert not lead.copied(1, 1, 3, "", 1.0), "of another step"
    assert lead.copied(1, 1, 1, "", 1.0)
    told = lead.verdict()
    assert (told.copy, told.copied) == (3, 1)
    lead.copied(0, 1, 3, "", 1.0)
    lead.copied(1, 1, 3, "", 1.0)
    told = lead.verdict()
    assert (told.copy, told.copied) == (3, 3), "nothing newer is complete"
    assert completes(lead, 4).copy == 4


def test_copies_that_fail_change_nothing_but_the_reason():
    """A holder that cannot copy, or is silent for too long, holds up the next copies only so long; what was copied last stays so."""
    lead = Lead(2, None)
    lead.copies = True
    completes(lead, 1)
    for node in (0, 1):
        lead.copied(node, 1, 1, "", 0.0)
    completes(lead, 2, 3)
    lead.copied(0, 1, 2, "", 0.0)
    assert lead.copied(1, 1, 2, "no memory", 0.0)
    told = lead.verdict()
    assert (told.copy, told.copied, told.uncopied) == (3, 1, "node 2: no memory")
    lead.copied(0, 1, 3, "", 0.0)
    assert completes(lead, 4, now=COPY_TIMEOUT_S).copy == 3
    told = completes(lead, 5, now=COPY_TIMEOUT_S + 1)
    assert (told.copy, told.copied) == (5, 1)
    assert "node 2 was not done with step 3" in told.uncopied
    for node in (0, 1):
        lead.copied(node, 1, 5, "", 0.0)
    told = lead.verdict()
    assert (told.copied, told.uncopied) == (5, "")


def test_copies_that_died_with_their_agent_do_not_count():
    """A holder's new agent has nothing of what the one before had told to be whole."""
    lead = Lead(2, None)
    lead.copies = True
    completes(lead, 1)
    lead.copied(1, 1, 1, "", 0.0)
    lead.forgets(1)
    assert not lead.copied(0, 1, 1, "", 0.0)
    assert lead.verdict().copied is None
    assert lead.copied(1, 1, 1, "", 0.0)
    assert lead.verdict().copied == 1


def test_lead_remembers_little():
    """Steps that never become complete or settled do not pile up."""
    lead = Lead(2, 0.0)
    for step in range(3 * MOST_OPEN):
        lead.sealed(0, 1, [step], 0.0)
        lead.settled(0, 1, step, 0.0)
        lead.wanted(0, 1, [step + 10_000], 0.0)
    assert len(lead._open) <= MOST_OPEN
    assert len(lead._settled) <= MOST_OPEN
    assert len(lead._wanted) <= MOST_OPEN
    assert len(lead.verdict().failed) <= MOST_FAILED


@given(st.data())
def test_reports_lost_late_and_repeated(data):
    """Three nodes that seal or skip steps, and whose reports are lost, repeated or late: complete is always a step that all have sealed,
    it only rises, and once the last reports arrive it is the last step that all have sealed."""
    count, steps = 3, 6
    seals = [[step for step in range(steps) if data.draw(st.booleans(), label=f"node {node} seals {step}")] for node in range(count)]
    lead = Lead(count, 0.0)
    done = [0] * count
    sent = []
    highest = -1
    for _ in range(data.draw(st.integers(0, 40))):
        node = data.draw(st.integers(0, count - 1))
        done[node] = min(len(seals[node]), done[node] + 1)
        complete = lead.verdict().complete
        known = {step for step, _, _ in lead.verdict().failed}
        report = (node, [step for step in seals[node][: done[node]] if step not in known and (complete is None or step > complete)])
        sent.append(report)
        if data.draw(st.booleans(), label="arrives"):
            lead.sealed(report[0], 1, report[1], 0.0)
            if data.draw(st.booleans(), label="another arrives again"):
                late = data.draw(st.sampled_from(sent))
                lead.sealed(late[0], 1, late[1], 0.0)
        complete = lead.verdict().complete
        if complete is not None:
            assert all(complete in some for some in seals)
            assert complete >= highest
            highest = complete
    for node in range(count):
        lead.sealed(node, 1, seals[node], 0.0)
    common = set(seals[0]).intersection(*seals[1:])
    failed = {step for step, _, _ in lead.verdict().failed}
    assert lead.verdict().complete == max(common - failed, default=None)


# -- talking -----------------------------------------------------------------------------------------------------------------------
def test_one_node_needs_nobody():
    """With one node everything is immediate, in the caller's thread, without a server or an address."""
    side = PlainSide(0, 1)
    nodes = Nodes(side, RUN)
    nodes.configure(1, 0, 1, None)
    before = threading.active_count()
    nodes.sealed(key(5))
    assert side.told == [("completed", key(5), True)]
    nodes.sealed(key(6))
    nodes.settled(key(5))
    assert side.told[1:] == [("completed", key(6), False), ("completed", key(6), True)]
    nodes.failed(key(7), "torn")
    assert side.told[3:] == [("failed", key(7), 0, "torn")]
    assert nodes.wait_settled(key(5), timeout_s=0)
    assert not nodes.wait_settled(key(6), timeout_s=0)
    assert threading.active_count() == before
    assert nodes._server is None
    nodes.close()


def test_all_nodes_hear_what_is_complete():
    """A step is complete on every node once the last one has sealed it, is persisted by all, and counts as settled when all say so."""
    with PlainJob(4, TOKEN) as job:
        job.sealed(key(5), by=(0, 1, 3))
        job.sealed(key(5), by=(2,))
        job.wait_told("completed", key(5), True)
        for nodes in job.nodes[:3]:
            nodes.settled(key(5))
        assert not job.nodes[0].wait_settled(key(5), timeout_s=0.05)
        job.nodes[3].settled(key(5), "the disk is full")
        for nodes in job.nodes:
            assert nodes.wait_settled(key(5), timeout_s=10)
            assert nodes.problems() == {}
        for side in job.sides:
            assert told(side, "failed") == []


def test_many_steps_in_a_row():
    """Fifty steps sealed as fast as it goes: every node hears of the last one, in rising order, and none is persisted that is not complete."""
    with PlainJob(3, TOKEN) as job:
        for step in range(1, 51):
            job.sealed(key(step))
        for side in job.sides:
            deadline = time.monotonic() + 10
            while key(50) not in [one for one, _ in told(side, "completed")]:
                assert time.monotonic() < deadline
                with side._changed:
                    side._changed.wait(0.2)
            first = [one for one, persist in told(side, "completed") if not persist]
            assert first == sorted(first)
            assert next(one for one, persist in told(side, "completed") if persist) == told(job.sides[0], "completed")[0][0]


def test_step_that_one_node_gives_up():
    """One node gives a step up: all hear which and why, also the lead, and the next step is complete all the same."""
    with PlainJob(3, TOKEN, cadence=False) as job:
        job.sealed(key(5), by=(0, 2))
        job.nodes[1].failed(key(5), "rank 3 gave step 5 up")
        job.wait_told("failed", key(5), 1, "rank 3 gave step 5 up")
        job.sealed(key(6))
        job.wait_told("completed", key(6), False)
        job.sealed(key(7), by=(1, 2))
        job.sealed(key(8), by=(0, 1, 2))
        job.wait_told("failed", key(7), 0, "node 0 has not saved it")
        job.wait_told("completed", key(8), False)
        assert all((step, True) not in told(side, "completed") for side in job.sides for step in (key(6), key(8)))


def test_wanted_by_one_is_persisted_by_all():
    """A drain on one node makes all nodes persist the step."""
    with PlainJob(3, TOKEN, cadence=False) as job:
        job.sealed(key(5))
        job.wait_told("completed", key(5), False)
        job.nodes[2].wanted(key(5))
        job.wait_told("completed", key(5), True)


def test_new_attempt_begins_anew():
    """After a restart steps count from where the new attempt begins, lower ones than before too."""
    with PlainJob(2, TOKEN, cadence=False) as job:
        job.sealed(key(50))
        job.wait_told("completed", key(50), False)
        for number, nodes in enumerate(job.nodes):
            nodes.configure(2, number, 2, False)
        job.sealed(key(51, 1))
        job.sealed(key(10, 2))
        job.wait_told("completed", key(10, 2), False)
        assert all(key(51, 1) not in [one for one, _ in told(side, "completed")] for side in job.sides)


def test_lead_that_is_away_stops_nobody():
    """While the lead cannot be reached nothing waits, it is counted and told once, and the newest state reaches it when it is back."""
    with PlainJob(2, TOKEN, cadence=False, post_timeout_s=0.5) as job:
        job.sealed(key(1))
        job.wait_told("completed", key(1), False)
        host, port = job.addresses[0].host, job.addresses[0].port
        job.nodes[0].close()
        began = time.monotonic()
        for step in range(2, 40):
            job.nodes[1].sealed(key(step))
            job.nodes[1].settled(key(step))
        assert time.monotonic() - began < 2
        job.sides[1].wait_count("peer_failures", 2)
        assert "cannot be reached" in job.nodes[1].problems()[0]
        side = PlainSide(0, 2)
        again = Nodes(side, RUN)
        again.configure(1, 0, 2, False)
        again.open(TOKEN, host, port)
        again.set_peers(job.addresses, 0)
        again.sealed(key(39))
        side.wait_told("completed", key(39), False)
        job.sides[1].wait_told("completed", key(39), False)
        again.close()


def test_new_lead_is_told_again():
    """The lead's agent is killed and a new one takes its place: it hears what the others have sealed and settled before, without their doing
    anything more."""
    with PlainJob(3, TOKEN, cadence=False, post_timeout_s=1.0) as job:
        job.sealed(key(1))
        job.wait_told("completed", key(1), False)
        for nodes in job.nodes[1:]:
            nodes.settled(key(1))
            nodes.sealed(key(2))
        job.nodes[2].failed(key(3), "torn")
        job.sides[1].wait_told("failed", key(3), 2, "torn")
        host, port = job.addresses[0].host, job.addresses[0].port
        job.nodes[0].close()
        side = PlainSide(0, 3)
        again = Nodes(side, RUN)
        again.configure(1, 0, 3, False)
        again.open(TOKEN, host, port)
        again.set_peers(job.addresses, 0)
        again.sealed(key(2))
        again.settled(key(1))
        for one in (side, *job.sides[1:]):
            one.wait_told("completed", key(2), False)
        for nodes in (again, *job.nodes[1:]):
            assert nodes.wait_settled(key(1), timeout_s=10)
        again.close()


def test_new_agent_of_a_node_is_told_again():
    """A node's agent is killed and a new one takes its place: it hears what is complete before anything new happens."""
    with PlainJob(2, TOKEN, cadence=False, post_timeout_s=1.0) as job:
        job.sealed(key(1))
        job.wait_told("completed", key(1), False)
        job.nodes[1].close()
        side = PlainSide(1, 2)
        again = Nodes(side, RUN)
        again.open(TOKEN, job.addresses[1].host, job.addresses[1].port)
        again.set_peers(job.addresses, 1)
        again.configure(1, 1, 2, False)
        side.wait_told("completed", key(1), False)
        again.close()


def test_share_that_died_with_its_agent_does_not_count():
    """A node seals a step, its agent is killed and replaced, and only then the others seal it: the step is never complete, the next one is."""
    with PlainJob(2, TOKEN, cadence=False, post_timeout_s=1.0) as job:
        job.nodes[1].sealed(key(1))
        job.nodes[1].failed(key(0), "skipped")  # told after or with what was sealed
        job.sides[0].wait_told("failed", key(0), 1, "skipped")
        job.nodes[1].close()
        side = PlainSide(1, 2)
        again = Nodes(side, RUN)
        again.configure(1, 1, 2, False)
        again.open(TOKEN, job.addresses[1].host, job.addresses[1].port)
        again.set_peers(job.addresses, 1)
        again.failed(key(2), "skipped")
        job.sides[0].wait_told("failed", key(2), 1, "skipped")
        job.nodes[0].sealed(key(1))
        job.nodes[0].sealed(key(3))
        again.sealed(key(3))
        for one in (job.sides[0], side):
            one.wait_told("completed", key(3), False)
        job.sides[0].wait_told("failed", key(1), 1, "node 1 has not saved it")
        assert ("completed", key(1), False) not in job.sides[0].told
        again.close()


def test_parts_of_an_attempt_that_is_over_are_found_by_who_wrote_them():
    """After a restart that numbers the nodes anew each old part is asked of everybody; "gone" is said when nobody has it."""
    with PlainJob(3, TOKEN, cadence=False) as job:
        old, new = key(4), key(9, 2)
        turned = [2, 0, 1]  # the number that each node bears now
        addresses = [msgspec.structs.replace(one, node=turned[one.node]) for one in job.addresses]
        for number, nodes in enumerate(job.nodes):
            job.sides[number].parts[old] = plain_part(bytes(8192), node=number, nodes=3, key=old)
            nodes.set_peers(addresses, turned[number])
        assert job.nodes[0].part(2, old, timeout_s=10).node == 2  # not yet configured anew
        for number, nodes in enumerate(job.nodes):
            nodes.configure(2, turned[number], 3, False)
        for asker in range(3):
            for number in range(3):
                if number != asker:
                    assert job.nodes[asker].part(number, old, timeout_s=10).node == number
        job.sides[2].parts[old] = AgentError("not in memory here", kind="gone")
        with pytest.raises(AgentError) as caught:
            job.nodes[0].part(2, old, timeout_s=10)
        assert caught.value.kind == "gone"
        job.sides[1].parts[new] = plain_part(bytes(8192), node=turned[1], nodes=3, key=new)
        assert job.nodes[0].part(turned[1], new, timeout_s=10).node == turned[1]


def test_node_that_speaks_again_is_answered_at_once():
    """A back-off does not outlast the trouble: who tells us something is told what we could not tell before."""
    tries, told = [], threading.Event()

    def deliver(destination):
        tries.append(destination)
        if len(tries) < 4:
            raise AgentError("away", kind="unreachable")
        told.set()

    posts = Posts(deliver, lambda destination, failure: None)
    posts.mark([1])
    for _ in range(200):
        posts.hurry([1])
        if told.wait(0.01):
            break
    assert told.is_set()
    posts.close(flush_s=1.0)
    posts.join(timeout_s=1.0)


def test_dead_node_costs_others_only_their_steps():
    """A node that is gone completes nothing any more; the lead still tells the others what it knows, and closes in time."""
    with PlainJob(3, TOKEN, cadence=False, post_timeout_s=0.5) as job:
        job.nodes[2].close()
        job.sealed(key(1), by=(0, 1))
        job.nodes[1].failed(key(2), "torn")
        for side in job.sides[:2]:
            side.wait_told("failed", key(2), 1, "torn")
        job.sides[0].wait_count("peer_failures")
        assert set(job.nodes[0].problems()) == {2}
        assert told(job.sides[0], "completed") == []
        began = time.monotonic()
        job.nodes[0].close()
        assert time.monotonic() - began < 5


def test_node_that_does_not_answer_holds_up_no_other():
    """A peer that takes connections and says nothing costs the others no time."""
    with PlainJob(3, TOKEN, cadence=False, post_timeout_s=6.0) as job, socket.create_server(("127.0.0.5", 0)) as mute:
        addresses = [*job.addresses[:2], PeerAddress(node=2, host="127.0.0.5", port=mute.getsockname()[1])]
        job.nodes[0].set_peers(addresses, 0)
        began = time.monotonic()
        for step in range(1, 6):
            job.nodes[0].failed(key(step), "torn")
            job.sides[1].wait_told("failed", key(step), 0, "torn")
        assert time.monotonic() - began < 5
        job.nodes[0].set_peers(job.addresses, 0)


def test_other_jobs_token_between_nodes():
    """Two jobs on one run: a node with another token is refused, that is told once, and nothing of it counts."""
    with PlainJob(2, TOKEN, cadence=False) as job:
        job.nodes[1].open(OTHER_TOKEN, job.addresses[1].host)
        job.sealed(key(1))
        job.sides[1].wait_count("peer_failures")
        assert "refused the run token: it belongs to another job" in job.nodes[1].problems()[0]
        assert told(job.sides[0], "completed") == []


def test_posts_that_cannot_be_meant():
    """The lead takes news only from nodes of its job, and others take none for it."""
    with PlainJob(2, TOKEN) as job:
        for number, node in ((0, 0), (0, 2), (0, -1), (1, 1)):
            with PeerClient(job.addresses[number], token=TOKEN, run_id=RUN) as client, pytest.raises(AgentError) as caught:
                client.post("sealed", SealedSteps(node=node, attempt=1, steps=(1,)))
            assert caught.value.kind == "other-node"


def test_part_of_another_node():
    """A part is waited for until it is durable, across the network and locally; what will not come says why; time runs out."""
    with PlainJob(2, TOKEN) as job:
        part = plain_part(bytes(9000), node=1, nodes=2, key=key(5))
        got = []
        thread = threading.Thread(target=lambda: got.append(job.nodes[0].part(1, key(5), timeout_s=10)))
        thread.start()
        job.sides[1].parts[key(5)] = part
        job.nodes[1].settled(key(5))
        thread.join(timeout=10)
        assert got == [part]
        assert job.nodes[1].part(1, key(5), timeout_s=1) == part
        with pytest.raises(AgentError, match=r"node 1 of step 6 did not come within 0\.3 s") as caught:
            job.nodes[0].part(1, key(6), timeout_s=0.3)
        assert caught.value.kind == "timeout"
        job.sides[1].parts[key(6)] = CapacityError("the disk is full")
        with pytest.raises(AgentError, match="the disk is full") as caught:
            job.nodes[0].part(1, key(6), timeout_s=5)
        assert caught.value.kind == "gone"
        job.nodes[1].close()
        with pytest.raises(AgentError) as caught:
            job.nodes[0].part(1, key(5), timeout_s=0.4)
        assert caught.value.kind == "unreachable"
        assert job.sides[0].counts["parts_not_come"] == 2


def test_more_waiters_than_may_wait():
    """Of many that wait for a part some wait at the peer and others ask again: all get it, and messages still get through."""
    with PlainJob(2, TOKEN) as job:
        part = plain_part(bytes(9000), node=1, nodes=2, key=key(5))
        got = []
        threads = [threading.Thread(target=lambda: got.append(job.nodes[0].part(1, key(5), timeout_s=20))) for _ in range(20)]
        for thread in threads:
            thread.start()
        with PeerClient(job.addresses[1], token=TOKEN, run_id=RUN) as client:
            client.snapshots()
        job.sides[1].parts[key(5)] = part
        job.nodes[1].part_changed(key(5))
        for thread in threads:
            thread.join(timeout=20)
        assert got == [part] * 20


def test_every_rank_of_a_node_may_ask():
    """Opening, configuring and naming the peers again, also at once in many threads, changes nothing."""
    with PlainJob(2, TOKEN, cadence=False) as job:
        side = PlainSide(0, 1)
        nodes = Nodes(side, RUN)
        barrier = threading.Barrier(6)
        opened = []

        def rank():
            barrier.wait(5)
            nodes.configure(1, 0, 1, None)
            opened.append(nodes.open(TOKEN, "127.0.0.6"))

        threads = [threading.Thread(target=rank) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
        assert len(opened) == 6
        assert len(set(opened)) == 1
        nodes.close()
        job.sealed(key(1), by=(0,))
        for number, (node, _) in itertools.product(range(2), enumerate(job.nodes)):
            job.nodes[node].configure(1, node, 2, False)
            assert job.nodes[node].open(TOKEN, job.addresses[node].host, job.addresses[node].port * number) == (
                job.addresses[node].host, job.addresses[node].port)  # fmt: skip
            job.nodes[node].set_peers(job.addresses, node)
        job.sealed(key(1), by=(1,))
        job.wait_told("completed", key(1), False)
        with pytest.raises(ConfigError):
            job.nodes[0].set_peers(job.addresses[1:], 0)


def test_agents_that_only_restore_know_their_node_by_their_address():
    """Agents that were begun by a restore, without an attempt, are told the peers' addresses only, and answer to the numbers in them."""
    made = [Nodes(PlainSide(0, 1), RUN) for _ in range(2)]
    addresses = []
    for number, nodes in enumerate(made):
        host, port = nodes.open(TOKEN, f"127.0.0.{number + 1}")
        addresses.append(PeerAddress(node=number, host=host, port=port))
    for nodes in made:
        nodes.set_peers(addresses, 0)  # what they take themselves for
    for address in addresses:
        with PeerClient(address, token=TOKEN, run_id=RUN) as client:
            assert client.snapshots() == ()
    for nodes in made:
        nodes.close()


def test_side_that_fails_does_not_end_the_talk():
    """A mistake in the agent's own code, met in one message, is logged and counted; later messages still arrive."""
    with PlainJob(2, TOKEN, cadence=False) as job:
        plain = job.sides[0].completed
        calls = []

        def completed(one, persist):
            calls.append(one)
            if len(calls) == 1:
                raise ZeroDivisionError("a bug")
            plain(one, persist)

        job.sides[0].completed = completed
        job.sealed(key(1))
        job.sides[0].wait_count("peer_failures")
        job.sealed(key(2))
        job.wait_told("completed", key(2), False)


def test_last_news_are_told_before_the_end():
    """An agent that ends tells what it has settled, and the lead what all have, before it goes: nobody waits for the dead."""
    for _ in range(5):
        with PlainJob(3, TOKEN, cadence=False) as job:
            job.sealed(key(1))
            job.wait_told("completed", key(1), False)
            for number in (2, 1):
                job.nodes[number].settled(key(1))
            job.nodes[2].close()
            job.nodes[0].settled(key(1))
            assert job.nodes[0].wait_settled(key(1), timeout_s=10)
            job.nodes[0].close()
            assert job.nodes[1].wait_settled(key(1), timeout_s=0.5)


def test_threads_end():
    """Closing ends every thread that was begun."""
    before = set(threading.enumerate())
    with PlainJob(2, TOKEN, replicas=1) as job:
        job.sides[0].add(key(1))
        job.sides[1].add(key(1))
        job.sealed(key(1))
        job.wait_told("completed", key(1), True)
        with contextlib.suppress(AgentError):
            job.nodes[0].part(1, key(9), timeout_s=0.05)
    # Pools of agents that earlier tests began make their threads when they like.
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.name.startswith("everystep-chores")]
    for thread in left:
        thread.join(timeout=5)
    assert not [thread.name for thread in left if thread.is_alive()]


def test_more_lost_steps_than_a_verdict_names():
    """Node 0 seals steps of which the others fail so many that the lead no longer names them all: each comes free all the same."""
    with PlainJob(2, TOKEN) as job:
        for step in range(1, 6):
            job.sides[0].add(key(step))
            job.nodes[0].sealed(key(step))
        for step in range(1, 200):
            job.nodes[1].failed(key(step), "all slabs are in use")
        job.sides[1].add(key(200))
        job.nodes[1].sealed(key(200))
        for step in range(1, 6):
            job.sides[0].wait_told("failed", key(step), -1, "another node has not saved it")
