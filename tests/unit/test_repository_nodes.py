"""Several nodes on one run: one store that all see, or a store for each; claims, parts, commits, giving up, sweeps, verifying."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import threading

import pytest

from everystep.errors import ConflictError, CorruptionError, NotFoundError, TransientStoreError
from everystep.manifest import encode, merge
from everystep.policy import Keep
from everystep.repository import Attempt, CheckpointKey, Repository, lineage_limits
from everystep.store.local import LocalStore
from everystep.testing import CrashingStore, Mount, SimDisk
from everystep.testing.samples import node_file, node_part, node_payload, persist, persist_node

LATER = 1e12
NODES = 3


def key(step, attempt=1):
    return CheckpointKey(step, attempt)


def seen_by(disk, path="/run"):
    """The run as one more process sees it."""
    return Repository(LocalStore(path, disk=disk, writers=1, sleep=[].append))


@pytest.fixture
def disk():
    return SimDisk()


@pytest.fixture
def nodes(disk):
    """Each node's repository on one store, with the job's attempt."""
    lead = seen_by(disk)
    lead.begin(create=True)
    lead.start_attempt(parent=None, now=1.0, world=NODES, nodes=NODES, number=1, job="j")
    lead.renew(1, now=0.0, ttl_s=100.0)
    return [lead, *(seen_by(disk) for _ in range(NODES - 1))]


@pytest.fixture
def apart():
    """Each node's repository on a disk of its own."""
    found = []
    for _ in range(NODES):
        one = seen_by(SimDisk())
        one.begin(create=True, run_id="0123456789abcdef")
        one.start_attempt(parent=None, now=1.0, world=NODES, nodes=NODES, number=1, job="j", shared=False)
        found.append(one)
    return found


def persist_all(nodes, which, **options):
    """All nodes' data and parts; returns the manifest."""
    return merge([persist_node(repository, which, node, NODES, **options) for node, repository in enumerate(nodes)])


def save(nodes, step, attempt=1, **options):
    manifest = persist_all(nodes, key(step, attempt), **options)
    for repository in nodes:
        repository.commit(manifest)
    return key(step, attempt)


def wrongs(repository, which):
    return {name.removeprefix(f"data/{which}/"): wrong for name, _, wrong in repository.verify(which) if wrong}


def sweep(repository, **options):
    planned = repository.plan_sweep(**options)
    repository.sweep(planned)
    return planned


# -- the run's id and attempts ---------------------------------------------------------------------------------------------


def test_run_id_of_the_agreement():
    """A new run gets the id that the nodes agreed on; one that has another is a conflict, and stays as it is."""
    one, other = seen_by(SimDisk()), seen_by(SimDisk())
    one.begin(create=True, run_id="00000000000000aa")
    other.begin(create=True, run_id="00000000000000aa")
    one.begin(create=True, run_id="00000000000000aa")
    assert one.run_id == other.run_id == "00000000000000aa"
    with pytest.raises(ConflictError, match="00000000000000bb") as caught:
        one.begin(create=True, run_id="00000000000000bb")
    assert caught.value.kind == "other-run"
    with pytest.raises(ConflictError):
        one.begin(create=False, run_id="00000000000000bb")
    with pytest.raises(NotFoundError):
        seen_by(SimDisk()).begin(create=False, run_id="00000000000000aa")
    again = seen_by(one.store._disk)
    again.begin(create=False)
    assert again.run_id == "00000000000000aa"


def test_run_made_by_all_nodes_at_once(tmp_path):
    """All nodes make the run at the same moment with one id: all succeed, and there is one record."""
    barrier, found = threading.Barrier(6), []

    def make():
        barrier.wait(10)
        found.append(Repository.open(str(tmp_path / "run"), create=True, run_id="00000000000000aa").run_id)

    run_threads([make] * 6)
    assert found == ["00000000000000aa"] * 6


def run_threads(actions):
    failures = []

    def guarded(action):
        try:
            action()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_attempt_of_an_exact_number(disk):
    """An attempt is claimed by the number agreed on: a lower one, or one that is taken, is a conflict and changes nothing."""
    run = seen_by(disk)
    run.begin(create=True)
    made = run.start_attempt(parent=key(3, 2), world=4, nodes=2, versions={"torch": "2"}, now=5.0, number=7, job="aa", shared=False)
    assert made == Attempt(
        attempt=7, parent_attempt=2, parent_step=3, started_at=5.0, world=4, nodes=2, versions={"torch": "2"}, job="aa", shared=False
    )
    assert run.attempt_record(7) == run.attempts()[7] == made
    for number, job in ((7, "bb"), (7, ""), (6, "aa"), (1, "")):
        with pytest.raises(ConflictError, match="is taken already") as caught:
            run.start_attempt(parent=None, now=6.0, number=number, job=job)
        assert caught.value.kind == "attempt"
    assert run.attempts() == {7: made}
    assert run.attempt_record(6) is None
    assert run.start_attempt(parent=None, now=6.0).attempt == 8
    with pytest.raises(ConflictError):
        run.start_attempt(parent=None, now=6.0, number=7, job="aa")


def test_attempt_claimed_again_by_the_same_job(disk):
    """The same agreement may claim its number again, from any node: then what is recorded is what it said last."""
    run = seen_by(disk)
    run.begin(create=True)
    run.start_attempt(parent=None, now=5.0, nodes=2, number=1, job="aa")
    again = seen_by(disk).start_attempt(parent=None, now=6.0, nodes=2, number=1, job="aa", shared=False)
    assert not again.shared
    assert run.attempt_record(1) == again


def test_exact_number_is_claimed_once(tmp_path):
    """Of many jobs that agreed on the same number at the same moment one has it."""
    Repository.open(str(tmp_path / "run"), create=True)
    barrier, won, lost = threading.Barrier(6), [], []

    def start(job):
        run = Repository.open(str(tmp_path / "run"))
        barrier.wait(10)
        try:
            won.append(run.start_attempt(parent=None, now=1.0, number=1, job=job))
        except ConflictError as error:
            lost.append(error.kind)

    run_threads([lambda job=job: start(job) for job in "abcdef"])
    assert len(won) == 1
    assert lost == ["attempt"] * 5
    assert Repository.open(str(tmp_path / "run")).attempt_record(1) == won[0]


@pytest.mark.parametrize(
    ("claims", "parents", "expected"),
    [
        ([], {}, {}),
        ([1], {1: None}, {1: None}),
        ([1, 2], {1: None, 2: (1, 30)}, {2: None, 1: 30}),
        ([1, 2, 3], {1: None, 2: (1, 30), 3: (1, 20)}, {3: None, 1: 20}),
        ([1, 2, 3], {1: None, 3: None}, {3: None}),
        ([1, 2, 4], {1: None, 2: (1, 5)}, {4: None, 2: None, 1: 5}),
        ([2], {2: (1, 5)}, {2: None, 1: 5}),
        ([1, 2], {1: (2, 5), 2: (1, 5)}, {2: None, 1: 5}),
    ],
)
def test_lineage_limits(claims, parents, expected):
    """F51: the newest attempt's lineage by attempt, with lost records, gaps and records that contradict each other."""
    assert lineage_limits(claims, parents) == expected


# -- parts and commits -----------------------------------------------------------------------------------------------------


def test_parts_are_seen_as_they_come(nodes):
    """Parts are listed by node as they become durable, read back as they were, and nothing is committed by them."""
    which = key(3)
    assert nodes[0].parts_there(which) == frozenset()
    with pytest.raises(NotFoundError):
        nodes[0].read_part(which, 1)
    for node in (1, 0, 2):
        part = persist_node(nodes[node], which, node, NODES, metrics={"loss": 0.5})
        assert node in nodes[0].parts_there(which)
        assert nodes[0].read_part(which, node) == part
    assert nodes[2].parts_there(which) == {0, 1, 2}
    assert not nodes[0].committed(which)
    assert nodes[0].keys() == []


def test_part_under_anothers_name(nodes):
    """A part that is another node's, or of another save, is corrupt."""
    which = key(3)
    nodes[0].store.put(f"data/{which}/node-00001.json", encode("part", node_part(which, 1, NODES)))
    nodes[0].store.put(f"data/{which}/node-00002.json", encode("part", node_part(key(4), 1, NODES)))
    nodes[0].store.put(f"data/{which}/node-1.json", b"mine")
    for node in (0, 1):
        with pytest.raises(CorruptionError, match="holds the part of node 1"):
            nodes[0].read_part(which, node)
    assert nodes[0].parts_there(which) == {0, 1}


def test_parts_never_change(nodes):
    """F5: a part may be put again as it is; another one of the same node and save is a conflict."""
    which = key(3)
    persist_node(nodes[1], which, 1, NODES)
    persist_node(nodes[1], which, 1, NODES)
    with pytest.raises(ConflictError, match="another part of node 1") as caught:
        nodes[1].put_part(node_part(which, 1, NODES, metrics={"loss": 2.0}))
    assert caught.value.kind == "part"
    assert nodes[0].read_part(which, 1) == node_part(which, 1, NODES)


@pytest.mark.parametrize("order", list(itertools.permutations(range(NODES))))
def test_commit_by_any_node_in_any_order(nodes, order):
    """F47: every node commits from the parts it reads itself, in any order and again: one result, byte for byte."""
    which = key(3)
    persist_all(nodes, which, metrics={"loss": 0.5})
    seen = set()
    for node in (*order, *order):
        parts = [nodes[node].read_part(which, other) for other in reversed(order)]
        nodes[node].commit(merge(parts))
        seen.add(nodes[node].store.get(f"manifests/{which}.json"))
        assert all(one.committed(which) for one in nodes)
    assert len(seen) == 1
    assert nodes[0].keys() == [which]
    assert nodes[0].metrics(which) == {"loss": 0.5}
    assert wrongs(nodes[1], which) == {}


@pytest.mark.parametrize("links", [True, False])
def test_commit_by_many_threads_at_once(links):
    """F47: many committers at the same moment on one store, with and without hard links: all succeed, one manifest, no leftovers."""
    disk = SimDisk(links=links)
    lead = seen_by(disk)
    lead.begin(create=True)
    lead.start_attempt(parent=None, now=1.0)
    for step in range(1, 6):
        manifest = persist_all([seen_by(disk) for _ in range(NODES)], key(step), metrics={"loss": 1.0})
        barrier = threading.Barrier(6)

        def commit(manifest=manifest, barrier=barrier):
            one = Repository(LocalStore("/run", disk=disk, writers=1))
            barrier.wait(10)
            one.commit(manifest)

        run_threads([commit] * 6)
        assert lead.store.get(f"manifests/{key(step)}.json") == encode("manifest", manifest)
    assert lead.keys() == [key(step) for step in range(1, 6)]
    assert list(lead.store.leftovers("")) == []


def _commit_in_a_process(url, step, node, barrier, answers):
    """Persist a node's share, wait for all parts, and commit."""
    repository = Repository.open(url)
    persist_node(repository, key(step), node, NODES)
    barrier.wait(30)
    repository.commit(merge([repository.read_part(key(step), other) for other in range(NODES)]))
    answers.put((node, repository.committed(key(step))))


def test_commit_by_many_processes_at_once(tmp_path):
    """F47: a process for each node on a real file system commits the same step at once: one result, no error."""
    url = str(tmp_path / "run")
    run = Repository.open(url, create=True)
    run.start_attempt(parent=None, now=1.0, nodes=NODES)
    spawn = multiprocessing.get_context("fork")
    barrier, answers = spawn.Barrier(NODES), spawn.Queue()
    processes = [spawn.Process(target=_commit_in_a_process, args=(url, 3, node, barrier, answers)) for node in range(NODES)]
    for process in processes:
        process.start()
    told = sorted(answers.get(timeout=30) for _ in processes)
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * NODES
    assert told == [(node, True) for node in range(NODES)]
    assert run.store.get(f"manifests/{key(3)}.json") == encode("manifest", merge([node_part(key(3), node, NODES) for node in range(NODES)]))
    assert wrongs(run, key(3)) == {}


def test_another_manifest_by_another_node(nodes):
    """Two nodes whose manifests differ: the second is told, and the first one stays."""
    manifest = persist_all(nodes, key(3))
    nodes[0].commit(manifest)
    other = merge([node_part(key(3), node, NODES, metrics={"loss": 2.0}) for node in range(NODES)])
    with pytest.raises(ConflictError) as caught:
        nodes[1].commit(other)
    assert caught.value.kind == "manifest"
    assert nodes[0].manifest(key(3)) == manifest


def test_metrics_are_not_taken_back_by_a_late_node(nodes):
    """Metrics recorded after the first node's commit survive the others' commits, also one that had looked before."""
    manifest = persist_all(nodes, key(3), metrics={"loss": 0.5})
    slow = nodes[1]
    create = slow.store.create

    def slow_create(name, data):
        if name.startswith("metrics/"):
            nodes[0].commit(manifest)
            nodes[0].record_metrics(key(3), {"loss": 0.25, "val": 1.0})
        return create(name, data)

    slow.store.create = slow_create
    slow.commit(manifest)
    nodes[2].commit(manifest)
    assert nodes[2].metrics(key(3)) == {"loss": 0.25, "val": 1.0}


def test_put_data_after_the_commit_of_others(nodes):
    """A node that persists again what others have committed meanwhile changes nothing and is told so."""
    which = save(nodes, 3)
    with pytest.raises(ConflictError) as caught:
        persist_node(nodes[2], which, 2, NODES)
    assert caught.value.kind == "committed"
    assert wrongs(nodes[0], which) == {}


# -- giving up -------------------------------------------------------------------------------------------------------------------


def test_giving_up(nodes):
    """A node dies before its part: the step is given up with the reason, its data goes, nobody commits it, and the previous one stays good."""
    before, which = save(nodes, 2), key(3)
    parts = [persist_node(nodes[node], which, node, NODES) for node in (0, 1)]
    assert nodes[0].given_up(which) is None
    assert nodes[0].give_up(which, "node 2 died") > 0
    assert [one.given_up(which) for one in nodes] == ["node 2 died"] * NODES
    assert list(nodes[0].store.list(f"data/{which}/")) == []
    with pytest.raises(ConflictError, match="node 2 died") as caught:
        nodes[1].commit(merge([*parts, node_part(which, 2, NODES)]))
    assert caught.value.kind == "forgotten"
    with pytest.raises(ConflictError, match="node 2 died"):
        nodes[2].put_part(node_part(which, 2, NODES))
    assert nodes[1].keys() == nodes[1].lineage() == [before]
    assert not nodes[1].committed(which)
    with pytest.raises(NotFoundError, match="forgotten"):
        nodes[1].manifest(which)
    assert wrongs(nodes[0], before) == {}
    nodes[1].give_up(which, "another reason")
    assert nodes[2].given_up(which) == "node 2 died"
    assert nodes[2].find(None) == before


def test_giving_up_what_is_committed(nodes):
    """What any node has committed cannot be given up, and nothing of it changes."""
    which = save(nodes, 3)
    with pytest.raises(ConflictError) as caught:
        nodes[1].give_up(which, "too late")
    assert caught.value.kind == "committed"
    assert nodes[0].given_up(which) is None
    assert nodes[2].keys() == [which]
    assert wrongs(nodes[0], which) == {}
    nodes[0].forget(which)
    assert nodes[1].given_up(which) == "it was forgotten"


@pytest.mark.parametrize("write", ["forgotten/", "manifests/"])
@pytest.mark.parametrize("late", [0, 1])
def test_commit_and_giving_up_at_once(nodes, write, late):
    """A commit between any two writes of a giving up: exactly one of them succeeds, everybody sees the same, and nothing acknowledged is lost."""
    which = key(3)
    manifest = persist_all(nodes, which)
    giver, create, outcome = nodes[1], nodes[1].store.create, []

    def racing_create(name, data):
        if name.startswith(write) and not outcome:
            outcome.append("")
            if not late:
                outcome[0] = commits()
            made = create(name, data)
            if late:
                outcome[0] = commits()
            return made
        return create(name, data)

    def commits():
        told = []
        for one in (nodes[0], nodes[2]):
            try:
                one.commit(manifest)
                told.append("committed")
            except ConflictError as error:
                told.append(error.kind)
        assert len(set(told)) == 1
        return told[0]

    giver.store.create = racing_create
    try:
        giver.give_up(which, "slow")
        given = True
    except ConflictError:
        given = False
    assert given == (outcome == ["forgotten"])
    assert [one.committed(which) for one in nodes] == [not given] * NODES
    assert nodes[0].keys() == ([] if given else [which])
    assert (nodes[2].given_up(which) is None) != given
    assert given or wrongs(nodes[0], which) == {}


@pytest.fixture
def impatient():
    """Threads take turns a thousand times more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("links", [True, False])
def test_committers_and_givers_race(links, impatient):
    """Threads of several nodes commit and give up the same steps at once: never both, all agree in the end, and what was acknowledged is whole."""
    disk = SimDisk(links=links)
    lead = seen_by(disk)
    lead.begin(create=True)
    lead.start_attempt(parent=None, now=1.0, nodes=NODES)
    for step in range(1, 61):
        which = key(step)
        manifest = persist_all([lead] * NODES, which)
        barrier, committed, given = threading.Barrier(5), [], []

        def commit(manifest=manifest, barrier=barrier, committed=committed):
            one = Repository(LocalStore("/run", disk=disk, writers=1))
            barrier.wait(10)
            with contextlib.suppress(ConflictError):
                one.commit(manifest)
                committed.append(one)

        def give_up(which=which, barrier=barrier, given=given):
            one = Repository(LocalStore("/run", disk=disk, writers=1))
            barrier.wait(10)
            with contextlib.suppress(ConflictError):
                one.give_up(which, "race")
                given.append(one)

        run_threads([commit, give_up, commit, give_up, commit])
        assert bool(committed) != bool(given)
        assert lead.committed(which) == bool(committed)
        assert (which in lead.keys()) == bool(committed)
        assert not committed or wrongs(lead, which) == {}


def test_committer_that_passed_its_first_look(nodes):
    """A tombstone that comes between a committer's look and its manifest, from a giver that then dies: the manifest was first, and counts."""
    which = key(3)
    manifest = persist_all(nodes, which)
    create = nodes[0].store.create
    dying = Repository(CrashingStore(nodes[1].store, cut_at=1, after=True, error=TransientStoreError("dead"), below="forgotten/"))

    def slow_create(name, data):
        if name.startswith("manifests/"):
            with pytest.raises(TransientStoreError):
                dying.give_up(which, "slow")
        return create(name, data)

    nodes[0].store.create = slow_create
    nodes[0].commit(manifest)
    assert nodes[2].keys() == [which]
    assert list(nodes[2].store.list("forgotten/")) == []
    nodes[1].commit(manifest)


def test_giver_that_died_too_late(nodes):
    """A tombstone that came too late, left by a giver that died, hides nothing: readers look twice, and the sweep takes it away."""
    which = save(nodes, 3)
    dying = Repository(CrashingStore(nodes[1].store, cut_at=1, after=True, error=TransientStoreError("dead"), below="forgotten/"))
    with pytest.raises(TransientStoreError):
        dying.give_up(which, "slow")
    assert nodes[0].keys() == [which]
    assert nodes[0].committed(which)
    assert nodes[0].manifest(which).step == 3
    assert nodes[0].given_up(which) is None
    assert [item.key for item in sweep(nodes[0], now=1.0)] == [f"forgotten/{which}.json"]
    assert nodes[0].keys() == [which]
    assert wrongs(nodes[0], which) == {}


def test_forgetting_behind_a_giver_that_died(nodes):
    """Forgetting a checkpoint with a tombstone that came too late is for good: no late committer brings it back."""
    which = save(nodes, 3)
    manifest = nodes[0].manifest(which)
    dying = Repository(CrashingStore(nodes[1].store, cut_at=1, after=True, error=TransientStoreError("dead"), below="forgotten/"))
    with pytest.raises(TransientStoreError):
        dying.give_up(which, "slow")
    nodes[0].forget(which)
    with pytest.raises(ConflictError):
        nodes[2].commit(manifest)
    assert nodes[1].keys() == []


def test_commit_after_forgetting(nodes):
    """A node so late that the checkpoint is committed and forgotten already, tombstone and all, commits nothing without data."""
    which = save(nodes, 3)
    manifest = nodes[0].manifest(which)
    nodes[0].forget(which, sole_committer=True)
    with pytest.raises(ConflictError, match="given up or forgotten"):
        nodes[2].commit(manifest)
    assert nodes[0].keys() == []
    assert list(nodes[0].store.list("manifests/")) == []


def test_writer_whose_step_is_given_up_under_it(nodes):
    """A node that is writing when another gives the step up gets that reason, and what it leaves behind is swept while the attempt lives."""
    which, disk = key(3), nodes[0].store._disk
    rename = disk.rename

    def slow_rename(source, target):
        disk.rename = rename
        nodes[0].give_up(which, "node 1 is slow")
        return rename(source, target)

    disk.rename = slow_rename
    with pytest.raises(ConflictError, match="node 1 is slow"):
        persist_node(nodes[1], which, 1, NODES)
    nodes[2].store.put(f"data/{which}/{node_file(2)}", node_payload(which, 2))
    planned = sweep(nodes[0], now=1.0)
    assert [(item.key, item.reason) for item in planned] == [(f"data/{which}/", "it was given up: node 1 is slow")]
    assert nodes[0].store.folders("data/") == []
    assert nodes[1].given_up(which) == "node 1 is slow"


def test_deletion_that_fails_does_not_call_the_decision_off(nodes):
    """A giving up whose deletion fails has decided all the same; the sweep deletes later."""
    which = key(3)
    persist_node(nodes[0], which, 0, NODES)
    failing = Repository(CrashingStore(nodes[0].store, cut_at=1, error=TransientStoreError("busy"), below="data/"))
    assert failing.give_up(which, "gone") == 0
    assert nodes[1].given_up(which) == "gone"
    assert nodes[0].store.folders("data/") == [str(which)]
    sweep(nodes[0], now=1.0)
    assert nodes[0].store.folders("data/") == []


# -- sweeping on one store -------------------------------------------------------------------------------------------------------


def test_sweep_leaves_what_other_nodes_may_be_writing(nodes, disk):
    """What the live attempt has not committed is never touched, old temporary files of other nodes' slow writes included."""
    save(nodes, 2)
    persist_node(nodes[1], key(3), 1, NODES)
    disk.close(disk.open(f"/run/data/{key(3)}/.tmp-slow", os.O_CREAT | os.O_WRONLY))
    nodes[0].renew(1, now=99_990.0, ttl_s=100.0)
    assert nodes[0].plan_sweep(now=100_000.0) == []
    nodes[0].give_up(key(3), "node 2 died")
    persist_node_late = f"data/{key(3)}/{node_file(2)}"
    nodes[2].store.put(persist_node_late, b"late")
    assert [item.key for item in sweep(nodes[0], now=100_000.0)] == [f"data/{key(3)}/"]
    assert nodes[0].plan_sweep(now=100_000.0) == []


def test_on_one_store_nothing_is_elsewhere(nodes):
    """Where all nodes see one store, what is not committed there is committed nowhere."""
    persist_all(nodes, key(3))
    assert nodes[0].perhaps_elsewhere() == set()


def test_remains_are_swept_by_the_next_attempt(nodes, disk):
    """F5: a job whose nodes all died before a commit: the next attempt, of fewer nodes, sweeps the remains, and the same step is saved anew."""
    before = save(nodes, 2)
    manifest = persist_all(nodes, key(3))
    second = seen_by(disk).start_attempt(parent=before, now=200.0, nodes=1, number=2, job="k").attempt
    run = seen_by(disk)
    run.renew(second, now=200.0, ttl_s=100.0)
    assert [item.key for item in sweep(run, now=210.0)] == [f"data/{key(3)}/"]
    with pytest.raises(ConflictError):
        nodes[1].commit(manifest)
    run.commit(persist(run, key(3, second)))
    assert run.lineage() == [key(3, 2), before]
    for _ in range(3):
        sweep(run, now=250.0)
    assert list(run.store.list("forgotten/")) == []
    assert [name for name, _ in run.store.list("manifests/")] == [f"manifests/{before}.json", f"manifests/{key(3, 2)}.json"]
    with pytest.raises(ConflictError):
        nodes[2].commit(manifest)
    assert run.keys() == [before, key(3, 2)]


def test_interrupted_giving_up_is_finished(nodes):
    """A giving up that dies after any of its writes is finished, or called off, by the next sweep of a later attempt."""
    for cut_at in (1, 2, 3, 4):
        which = key(10 + cut_at)
        persist_all(nodes, which)
        dying = Repository(CrashingStore(nodes[0].store, cut_at=cut_at, after=True, error=TransientStoreError("dead")))
        try:
            dying.give_up(which, "gone")
        except TransientStoreError:
            assert cut_at <= 3
        sweep(nodes[1], now=1.0)
        assert nodes[1].store.folders("data/") == []
        assert nodes[1].keys() == []
        assert nodes[1].given_up(which) == "gone"


def test_retention_with_several_nodes(nodes):
    """Retention counts committed checkpoints alone; a given up one pushes nothing out, and every node's files of a forgotten one go."""
    for step in (1, 2, 3):
        save(nodes, step)
    persist_all(nodes, key(4))
    nodes[1].give_up(key(4), "no")
    persist_all(nodes, key(5))
    decided = nodes[0].retention(Keep(last=2), now=1.0)
    assert {kept.step: kept.keep for kept in decided} == {1: False, 2: True, 3: True}
    nodes[0].forget(key(1))
    assert not any(str(key(1)) in name for name, _ in nodes[1].store.list("data/"))
    nodes[2].commit(merge([node_part(key(5), node, NODES) for node in range(NODES)]))
    assert nodes[0].keys() == [key(2), key(3), key(5)]


# -- a store for each node -----------------------------------------------------------------------------------------------------------


def test_commit_on_stores_of_their_own(apart):
    """Each node writes the same manifest to its own store, which holds that node's files only, and verifies there."""
    which = key(3)
    manifest = persist_all(apart, which, shared=False)
    for node, one in enumerate(apart):
        assert one.parts_there(which) == {node}
        one.commit(manifest)
        one.commit(manifest)
        assert [name.rpartition("/")[2] for name, _, wrong in one.verify(which) if not wrong] == [
            f"{which}.json", f"node-{node + 1:05d}.json", node_file(node),
        ]  # fmt: skip
        assert wrongs(one, which) == {}
    assert len({one.store.get(f"manifests/{which}.json") for one in apart}) == 1


def test_commit_without_a_part_of_its_own(apart):
    """A node that has nothing of a step does not get its manifest."""
    manifest = persist_all(apart[:2], key(3), shared=False) if NODES == 2 else merge(
        [node_part(key(3), node, NODES, shared=False) for node in range(NODES)]
    )
    persist_node(apart[0], key(3), 0, NODES, shared=False)
    apart[0].commit(manifest)
    with pytest.raises(ConflictError):
        apart[1].commit(manifest)
    assert apart[1].keys() == []


def test_verify_finds_damage_on_a_store_of_its_own(apart):
    """F7: each flipped bit of this node's files, part and manifest is found, and nothing else is accused."""
    which = save(apart, 3, shared=False)
    one = apart[1]
    for path in (f"data/{which}/{node_file(1)}", f"data/{which}/node-00002.json", f"manifests/{which}.json"):
        for bit in range(0, one.store.size(path) * 8, 97):
            one.store._disk.flip(f"/run/{path}", bit)
            assert [name for name, _, wrong in one.verify(which) if wrong] == [path], (path, bit)
            one.store._disk.flip(f"/run/{path}", bit)
    assert wrongs(one, which) == {}


@pytest.mark.parametrize("nodes_there", [(1,), (1, 2)])
def test_verify_finds_what_is_missing_on_a_store_of_its_own(apart, nodes_there):
    """A data file that this node's part names and that is gone is missing; without any part that is said; two nodes on one disk are both looked at."""
    which = key(3)
    manifest = merge([node_part(which, node, NODES, shared=False) for node in range(NODES)])
    one = apart[1]
    for node in nodes_there:
        persist_node(one, which, node, NODES, shared=False)
    one.commit(manifest)
    assert wrongs(one, which) == {}
    one.store.delete(f"data/{which}/{node_file(nodes_there[-1])}")
    assert wrongs(one, which) == {node_file(nodes_there[-1]): "it is missing"}
    for node in nodes_there:
        one.store.delete(f"data/{which}/node-{node + 1:05d}.json")
    assert "" in wrongs(one, which)
    assert "no node's part" in wrongs(one, which)[""]


@pytest.mark.parametrize("change", [{"metrics": {"loss": 2.0}}, {"shared": True}])
def test_verify_finds_a_part_of_another_save(apart, change):
    """A sound part that says something else than the manifest is found."""
    which = save(apart, 3, shared=False)
    apart[1].store.put(f"data/{which}/node-00002.json", encode("part", node_part(which, 1, NODES, **{"shared": False, **change})))
    assert "does not agree" in wrongs(apart[1], which)["node-00002.json"]


def test_verify_with_all_nodes_on_one_store(nodes):
    """On a store that all see every node's part and data file is looked for, and a missing one named."""
    which = save(nodes, 3)
    good = [name.rpartition("/")[2] for name, _, wrong in nodes[1].verify(which) if not wrong]
    assert good == [f"{which}.json", *(f"node-{node + 1:05d}.json" for node in range(NODES)), *map(node_file, range(NODES))]
    nodes[0].store.delete(f"data/{which}/node-00002.json")
    nodes[0].store.delete(f"data/{which}/{node_file(2)}")
    assert wrongs(nodes[1], which) == {"node-00002.json": "it is missing", node_file(2): "it is missing"}


def test_sweep_keeps_what_other_nodes_may_have_committed(apart):
    """A node whose part was durable and which died before its commit keeps it: it is committed later, or swept once a newer one is there."""
    save(apart, 2, shared=False)
    manifest = persist_all(apart, key(3), shared=False)
    for one in (apart[0], apart[2]):
        one.commit(manifest)
    behind = apart[1]
    assert [one.perhaps_elsewhere() for one in apart] == [set(), {key(3)}, set()]
    assert sweep(behind, now=LATER, sole_committer=True) == []
    for one in apart:
        one.start_attempt(parent=key(3), now=2.0, nodes=NODES, number=2, job="k", shared=False)
    assert sweep(behind, now=LATER, sole_committer=True) == []
    behind.commit(manifest)
    assert behind.keys() == [key(2), key(3)]
    assert behind.perhaps_elsewhere() == set()
    assert wrongs(behind, key(3)) == {}


@pytest.mark.parametrize("why", ["newer", "abandoned", "given up", "no part"])
def test_sweep_takes_what_nobody_waits_for(apart, why):
    """On a node's own store: what is older than a committed one, abandoned, given up, or without its part goes."""
    save(apart, 1, shared=False)
    one = apart[1]
    persist_node(one, key(3), 1, NODES, shared=False)
    if why == "newer":
        save(apart, 4, shared=False)
    elif why == "abandoned":
        one.start_attempt(parent=key(1), now=2.0, nodes=NODES, number=2, job="k", shared=False)
    elif why == "given up":
        dying = Repository(CrashingStore(one.store, cut_at=4, error=TransientStoreError("busy")))
        dying.give_up(key(3), "disk full elsewhere")
    else:
        one.store.delete(f"data/{key(3)}/node-00002.json")
    assert one.perhaps_elsewhere() == set()
    assert [item.key for item in sweep(one, now=LATER, sole_committer=True)] == [f"data/{key(3)}/"]
    assert str(key(3)) not in one.store.folders("data/")


# -- network file systems ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mounts(disk):
    """A mount for each of two nodes, and a repository on each."""
    seen_by(disk).begin(create=True)
    seen_by(disk).start_attempt(parent=None, now=1.0, nodes=2, number=1, job="j")
    found = [Mount(disk), Mount(disk)]
    return found, [seen_by(mount) for mount in found]


def test_names_that_were_not_there_before(mounts):
    """F34: what another node has just written is seen by a node that had asked for it before."""
    _, (one, other) = mounts
    which = key(3)
    assert not other.committed(which)
    assert other.parts_there(which) == frozenset()
    assert other.given_up(which) is None
    assert other.attempt_record(2) is None
    with pytest.raises(NotFoundError):
        other.read_part(which, 0)
    parts = [persist_node(one, which, node, 2) for node in range(2)]
    assert other.parts_there(which) == {0, 1}
    assert other.read_part(which, 0) == parts[0]
    one.commit(merge(parts))
    assert other.committed(which)
    assert other.keys() == [which]
    one.start_attempt(parent=which, now=2.0, number=2, job="k")
    assert other.attempt_record(2).job == "k"
    one.forget(which)
    assert other.given_up(which) == "it was forgotten"
    assert not other.committed(which)


def test_sweeper_with_an_old_listing(mounts):
    """F34: a sweeper whose listings are from before the commit deletes nothing of what is committed."""
    (_, far), (one, other) = mounts
    parts = [persist_node(one, key(3), node, 2) for node in range(2)]
    assert other.keys() == []
    assert other.store.folders("data/") == [str(key(3))]
    assert list(other.store.list("forgotten/")) == []
    far.lagging = True
    one.commit(merge(parts))
    planned = other.plan_sweep(now=LATER)
    assert f"data/{key(3)}/" in [item.key for item in planned]
    other.sweep(planned)
    assert one.keys() == [key(3)]
    assert wrongs(one, key(3)) == {}


def test_committer_with_an_old_listing(mounts):
    """F34: a committer whose listings are from before the giving up is refused all the same."""
    (_, far), (one, other) = mounts
    parts = [persist_node(one, key(3), node, 2) for node in range(2)]
    assert other.keys() == []
    assert list(other.store.list("forgotten/")) == []
    far.lagging = True
    one.give_up(key(3), "node 0 says so")
    with pytest.raises(ConflictError, match="node 0 says so"):
        other.commit(merge(parts))
    assert one.keys() == []


def test_manifest_that_another_node_has_deleted(mounts):
    """F42: a checkpoint that another node forgets while this one still lists it is not found; that is no corruption."""
    (_, far), (one, other) = mounts
    parts = [persist_node(one, key(3), node, 2) for node in range(2)]
    one.commit(merge(parts))
    assert other.keys() == [key(3)]
    assert other.committed(key(3))
    far.lagging = True
    one.forget(key(3))
    assert not other.committed(key(3))
    with pytest.raises(NotFoundError):
        other.manifest(key(3))
