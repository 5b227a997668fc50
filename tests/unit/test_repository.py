"""A run on a store: keys, lineage, commits, small records, forgetting, sweeping, verifying."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time

import pytest

from everystep.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    PermanentStoreError,
    TransientStoreError,
)
from everystep.manifest import FORMAT, encode, merge
from everystep.policy import Keep
from everystep.repository import Attempt, CheckpointKey, Repository
from everystep.repository.records import KnownReferences
from everystep.store.local import LocalStore
from everystep.testing import CrashingStore, SimDisk
from everystep.testing.samples import FILE_NAME, payload, persist, sample_part

LATER = 1e12


@pytest.fixture
def disk():
    return SimDisk()


@pytest.fixture
def run(disk):
    """A new run with its first attempt."""
    repository = Repository(LocalStore("/run", disk=disk))
    repository.begin(create=True)
    repository.start_attempt(parent=None, now=1.0)
    return repository


def key(step, attempt=1):
    return CheckpointKey(step, attempt)


def save(repository, step, attempt=1, **options):
    repository.commit(persist(repository, key(step, attempt), **options))
    return key(step, attempt)


def wrongs(repository, which):
    return {name.rpartition("/")[2]: wrong for name, _, wrong in repository.verify(which) if wrong}


def reasons(planned):
    return {item.key: item.reason for item in planned}


# -- keys and the run ------------------------------------------------------------------------------------------------------


def test_keys_as_text():
    """A key's text sorts as its step does and parses back; other texts are none."""
    assert str(key(150, 2)) == "000000000150-0002"
    for one in (key(0, 0), key(150, 2), key(10**13, 12345)):
        assert CheckpointKey.parse(str(one)) == one
    for text in ("", "150-2", "000000000150", "000000000150-0002.json", "0000000000150-0002", "000000000150-00002", " 00000000150-0002", "00000000015٣-0002"):
        with pytest.raises(ValueError, match="not a checkpoint key"):
            CheckpointKey.parse(text)


def test_open(tmp_path):
    """A run is made on request, has one id for ever, and is missed when it is not there."""
    url = str(tmp_path / "runs/one")
    with pytest.raises(NotFoundError, match="no run at"):
        Repository.open(url)
    assert not (tmp_path / "runs").exists()
    made = Repository.open(url, create=True)
    assert len(made.run_id) == 16
    assert Repository.open(url, create=True).run_id == Repository.open(url).run_id == made.run_id


def test_newer_format(tmp_path):
    """A run of a newer format is refused with both numbers and what to do."""
    (tmp_path / "run.json").write_text(json.dumps({"format": FORMAT + 1, "anything": "else"}))
    with pytest.raises(ConfigError, match=rf"uses format {FORMAT + 1}, this everystep reads up to {FORMAT} \(upgrade"):
        Repository.open(str(tmp_path))


# -- attempts and lineage ------------------------------------------------------------------------------------------------------


def test_attempts_are_claimed_once(run):
    """Many starters at once get different attempts, each recorded with its parent."""
    barrier, made = threading.Barrier(6), []

    def start():
        barrier.wait(10)
        made.append(run.start_attempt(parent=key(3), world=2, now=5.0, versions={"torch": "2"}))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(attempt.attempt for attempt in made) == [2, 3, 4, 5, 6, 7]
    assert run.newest_attempt() == 7
    assert run.attempts()[5] == Attempt(attempt=5, parent_attempt=1, parent_step=3, started_at=5.0, world=2, versions={"torch": "2"})
    assert run.problems() == []


def test_attempt_above(run):
    """A new attempt is above what was seen elsewhere, and above its parent."""
    assert run.start_attempt(parent=None, now=1.0, above=7).attempt == 8
    assert run.start_attempt(parent=key(1, 20), now=1.0).attempt == 21


def test_alive(run):
    """An attempt is alive while it is the newest and its time has not run out."""
    assert not run.is_alive(1, now=0.0)
    run.renew(1, now=100.0, ttl_s=10.0)
    assert run.is_alive(1, now=109.0)
    assert not run.is_alive(1, now=110.0)
    run.start_attempt(parent=None, now=1.0)
    assert not run.is_alive(1, now=109.0)


def test_lineage_over_attempts(run):
    """F51, F5: steps after the resumed one belong to an abandoned timeline; the same step saved again is another checkpoint."""
    for step in (50, 100, 150):
        save(run, step)
    second = run.start_attempt(parent=key(100), now=2.0).attempt
    assert run.lineage() == [key(100), key(50)]
    save(run, 150, second)
    third = run.start_attempt(parent=key(150, second), now=3.0).attempt
    save(run, 120, third)
    assert run.lineage() == [key(120, 3), key(150, 2), key(100), key(50)]
    assert run.keys() == [key(50), key(100), key(150), key(150, 2), key(120, 3)]
    assert run.find(None) == key(120, 3)
    assert run.find(150) == key(150, 2)
    assert [run.in_lineage(one) for one in (key(150), key(99), key(151, 2), key(150, 2), key(999, 3), key(1, 4))] == [False, True, False, True, True, False]


def test_lineage_from_scratch(run):
    """An attempt without parent begins a new lineage; what there was before is still found by its step."""
    save(run, 5)
    run.start_attempt(parent=None, now=2.0)
    assert run.lineage() == []
    assert run.find(5) == key(5)
    with pytest.raises(NotFoundError, match=r"from scratch.* 5"):
        run.find(None)


def test_find_names_the_steps(run):
    """A step that is not there is a NotFoundError that names those that are."""
    with pytest.raises(NotFoundError, match="nothing has been committed"):
        run.find(None)
    save(run, 5)
    save(run, 6)
    with pytest.raises(NotFoundError, match=r"step 7 .*5, 6"):
        run.find(7)


@pytest.mark.parametrize("damage", ["flip", "delete", "impostor"])
def test_unreadable_attempt(run, disk, damage):
    """An attempt whose record is lost falls to the newest checkpoint of the attempt before it, and is reported."""
    save(run, 1)
    run.start_attempt(parent=None, now=2.0)
    save(run, 2, 2)
    run.start_attempt(parent=None, now=3.0)
    save(run, 3, 3)
    if damage == "flip":
        disk.flip("/run/attempts/000003.json", 400)
    elif damage == "delete":
        run.store.delete("attempts/000003.json")
    else:
        run.store.replace("attempts/000003.json", encode("attempt", Attempt(attempt=3, parent_attempt=3, parent_step=1)))
    assert run.lineage() == [key(3, 3), key(2, 2)]
    assert [problem.key for problem in run.problems()] == ["attempts/000003.json"]
    assert sorted(run.attempts()) == [1, 2]
    assert run.start_attempt(parent=None, now=4.0).attempt == 4


# -- writing ---------------------------------------------------------------------------------------------------------------------


def test_commit_and_read(run):
    """A committed checkpoint is listed and reads back as it was committed."""
    manifest = persist(run, key(3), metrics={"loss": 0.5, "odd": math.inf})
    assert run.keys() == []
    run.commit(manifest)
    run.commit(manifest)
    assert run.keys() == [key(3)]
    assert run.manifest(key(3)) == manifest
    assert run.store.get(run.data_key(key(3), FILE_NAME)) == payload(key(3))
    with pytest.raises(NotFoundError):
        run.manifest(key(4))


def test_lost_answer(run):
    """F45: a creation whose answer was lost is settled by comparing bytes: the second commit succeeds."""
    manifest = persist(run, key(3))
    dying = Repository(CrashingStore(run.store, cut_at=1, after=True, error=TransientStoreError("answer lost"), below="manifests/"))
    with pytest.raises(TransientStoreError):
        dying.commit(manifest)
    dying.commit(manifest)
    assert run.keys() == [key(3)]


def test_another_manifest_is_a_conflict(run):
    """A different manifest for the same key is a ConflictError, and the first one stays."""
    save(run, 3)
    other = merge([sample_part(key(3), metrics={"loss": 9.0})])
    with pytest.raises(ConflictError, match="another checkpoint of step 3"):
        run.commit(other)
    assert run.manifest(key(3)).metrics == {}


def test_committed_data_is_never_overwritten(run):
    """The data of a committed checkpoint cannot be put again; a leftover that was not committed can."""
    persist(run, key(3))
    run.commit(persist(run, key(3)))
    with pytest.raises(ConflictError, match="committed already"):
        run.put_data(key(3), FILE_NAME, memoryview(b"other"), nbytes=5)
    assert wrongs(run, key(3)) == {}


def test_only_the_newest_attempt_commits(run):
    """An attempt that sees a higher one cannot commit, whatever it has written."""
    manifest = persist(run, key(3))
    run.start_attempt(parent=None, now=2.0)
    with pytest.raises(ConflictError, match="attempt 2 has started since"):
        run.commit(manifest)
    assert run.keys() == []


def test_attempt_that_starts_during_a_commit(run):
    """A higher attempt that starts and sweeps between the check and the creation makes the commit withdraw, also when its tombstone is gone."""
    manifest = persist(run, key(3))
    newest_attempt = run.newest_attempt
    looked = []

    def look():
        looked.append(newest_attempt())
        if len(looked) == 1:
            other = Repository(run.store)
            other.start_attempt(parent=None, now=2.0)
            for _ in range(3):
                other.sweep(other.plan_sweep(now=LATER))
            assert other.store.folders("data/") == []
            assert list(other.store.list("forgotten/")) == []
        return looked[-1]

    run.newest_attempt = look
    with pytest.raises(ConflictError):
        run.commit(manifest)
    assert run.keys() == []


def test_late_committer_withdraws(run):
    """A commit of what was forgotten meanwhile is refused and counts for nothing, also when the tombstone comes between check and creation."""
    manifest = persist(run, key(3))
    create = run.store.create

    def slow_create(name, data):
        if name.startswith("manifests/"):
            Repository(LocalStore("/run", disk=run.store._disk)).forget(key(3))
        return create(name, data)

    run.store.create = slow_create
    with pytest.raises(ConflictError, match="given up or forgotten"):
        run.commit(manifest)
    assert run.keys() == []
    with pytest.raises(ConflictError, match="given up or forgotten"):
        run.commit(manifest)
    run.store.create = create
    run.sweep(run.plan_sweep(now=1.0))
    assert list(run.store.list("manifests/")) == []


def test_checkpoint_with_wrong_content(run):
    """A manifest that lies under another key's name is corrupt, not that key's."""
    save(run, 3)
    run.store.put(f"manifests/{key(4)}.json", run.store.get(f"manifests/{key(3)}.json"))
    with pytest.raises(CorruptionError, match="holds step 3"):
        run.manifest(key(4))


# -- small records ------------------------------------------------------------------------------------------------------------------


def test_metrics(run):
    """Metrics of the save and later ones are joined, the later wins; committing again does not take them back; odd numbers survive."""
    manifest = persist(run, key(3), metrics={"loss": 0.5, "lr": 0.1})
    run.commit(manifest)
    run.record_metrics(key(3), {"loss": 0.25, "val": math.nan, "top": -math.inf})
    run.commit(manifest)
    found = run.metrics(key(3))
    assert math.isnan(found.pop("val"))
    assert found == {"loss": 0.25, "lr": 0.1, "top": -math.inf}
    assert run.metrics(save(run, 4)) == {}


def test_metrics_of_what_is_not_there(run):
    """Metrics of a checkpoint that was never committed, or is forgotten, are refused, and nothing of them stays."""
    persist(run, key(3))
    run.forget(save(run, 4, metrics={"loss": 1.0}))
    for one in (key(3), key(4), key(5)):
        with pytest.raises(NotFoundError, match="no checkpoint of step") as caught:
            run.record_metrics(one, {"val": 1.0})
        assert caught.value.kind == "no-checkpoint"
    assert list(run.store.list("metrics/")) == []


def test_metrics_that_lose_against_forget(run):
    """A checkpoint that is forgotten while its metrics are being written: they do not stay, whoever was faster; the caller is told."""
    save(run, 3, metrics={"loss": 0.5})
    replace = run.store.replace

    def slow_replace(name, data):
        Repository(run.store).forget(key(3), sole_committer=True)
        replace(name, data)

    run.store.replace = slow_replace
    with pytest.raises(NotFoundError):
        run.record_metrics(key(3), {"val": 1.0})
    assert list(run.store.list("metrics/")) == []


def test_metrics_during_a_deletion_that_is_called_off(run):
    """A tombstone that is taken back again costs no metrics."""
    save(run, 3, metrics={"loss": 0.5})
    replace = run.store.replace

    def slow_replace(name, data):
        run.store.create(f"forgotten/{key(3)}.json", encode("forgotten", {}))
        replace(name, data)

    run.store.replace = slow_replace
    run.record_metrics(key(3), {"val": 1.0})
    run.store.delete(f"forgotten/{key(3)}.json")
    assert run.metrics(key(3)) == {"loss": 0.5, "val": 1.0}


def test_metrics_record_lost(run, disk, caplog):
    """A damaged metrics record gives way to the manifest's own, in the log, and never breaks retention."""
    save(run, 3, metrics={"loss": 0.5})
    run.record_metrics(key(3), {"top": 2.0})
    disk.flip(f"/run/metrics/{key(3)}.json", 300)
    assert run.metrics(key(3)) == {"loss": 0.5}
    assert caplog.messages == []
    run.record_metrics(key(3), {"val": 1.0})
    assert run.metrics(key(3)) == {"loss": 0.5, "val": 1.0}
    assert [f"metrics/{key(3)}.json" in message and "is lost" in message for message in caplog.messages] == [True]


def test_damaged_metrics_record_is_made_again(run, disk):
    """A damaged record is written again, also when the new metrics are none, and a newer format's is left alone."""
    save(run, 3, metrics={"loss": 0.5})
    name = f"metrics/{key(3)}.json"
    disk.flip(f"/run/{name}", 300)
    run.record_metrics(key(3), {})
    assert run.metrics(key(3)) == {"loss": 0.5}
    newer = b'{"format":%d,"kind":"metrics"}' % (FORMAT + 1)
    run.store.replace(name, newer)
    with pytest.raises(ConfigError, match="upgrade"):
        run.record_metrics(key(3), {"val": 1.0})
    assert run.store.get(name) == newer


def test_metrics_from_several_threads(run, disk):
    """Two writers of one record at the same moment: neither takes back what the other wrote."""
    save(run, 3, metrics={"loss": 0.5})
    barrier = threading.Barrier(2)

    class Meeting(LocalStore):
        """Both readers have read before either writes, if nothing keeps them apart."""

        def get(self, name):
            data = super().get(name)
            if name.startswith("metrics/"):
                with contextlib.suppress(threading.BrokenBarrierError):
                    barrier.wait(0.2)
            return data

    writers = [
        threading.Thread(target=Repository(Meeting("/run", disk=disk)).record_metrics, args=(key(3), {name: 1.0})) for name in ("a", "b")
    ]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join(10)
    assert run.metrics(key(3)) == {"loss": 0.5, "a": 1.0, "b": 1.0}


def test_verified_and_pins(run):
    """Verification results and pins are remembered and taken back."""
    one = save(run, 3)
    assert run.verified(one) is None
    run.record_verified(one, good=True, detail="", now=1.0)
    assert run.verified(one) is True
    run.record_verified(one, good=False, detail="bit", now=2.0)
    assert run.verified(one) is False
    assert not run.pinned(one)
    run.pin(one, reason="paper")
    assert run.pinned(one)
    run.unpin(one)
    run.unpin(one)
    assert not run.pinned(one)


def test_hold(run):
    """A hold protects while it lasts, is gone afterwards, expires by itself, and does not matter where nothing can be written."""
    one = save(run, 3)
    with run.hold(one):
        assert run.held(one, now=time.time())
        assert not run.held(one, now=time.time() + 3601)
        assert "held" in run.retention(Keep(last=1), now=time.time())[0].reason
        with pytest.raises(ConflictError, match="being read"):
            run.forget(one)
        assert run.keys() == [one]
    assert not run.held(one, now=time.time())
    for error in (PermanentStoreError("read-only"), CapacityError("full")):
        with Repository(CrashingStore(run.store, cut_at=1, error=error)).hold(one):
            assert not run.held(one, now=time.time())


# -- forgetting -----------------------------------------------------------------------------------------------------------------------


def test_forget(run):
    """Forgetting takes manifest, data and records, frees their bytes, and leaves the tombstone unless nobody else can commit."""
    save(run, 3, metrics={"loss": 1.0})
    run.record_verified(key(3), good=True, detail="", now=1.0)
    with run.hold(key(3)):
        pass
    sizes = dict(run.store.list(""))
    freed = run.forget(key(3))
    assert freed == sum(nbytes for name, nbytes in sizes.items() if name.startswith(("data/", "manifests/")))
    assert [name for name, _ in run.store.list("") if str(key(3)) in name] == [f"forgotten/{key(3)}.json"]
    assert run.keys() == []
    save(run, 4)
    run.forget(key(4), sole_committer=True)
    assert not [name for name, _ in run.store.list("") if str(key(4)) in name]
    assert run.store.folders("data/") == run.store.folders("holds/") == []
    assert run.forget(key(4), sole_committer=True) == 0


def test_order_of_forgetting(run):
    """Invariant 2: the tombstone, then the manifest, then the data."""
    save(run, 3)
    store = CrashingStore(run.store)
    Repository(store).forget(key(3), sole_committer=True)
    assert [operation for operation in store.operations if "holds" not in operation[1]] == [
        ("create", f"forgotten/{key(3)}.json"), ("delete", f"manifests/{key(3)}.json"), ("delete_folder", f"data/{key(3)}/"), ("delete", f"forgotten/{key(3)}.json"),
    ]  # fmt: skip


def test_order_of_a_save(run):
    """Invariant 2: data, part, metrics, manifest."""
    store = CrashingStore(run.store)
    repository = Repository(store)
    repository.commit(persist(repository, key(3), metrics={"loss": 1.0}))
    assert [name.split("/")[0] + "/" + name.rpartition("/")[2][:4] for _, name in store.operations] == ["data/mode", "data/node", "metrics/0000", "manifests/0000"]


def test_pinned_is_not_forgotten(run):
    """A pinned checkpoint cannot be forgotten by accident."""
    run.pin(save(run, 3))
    with pytest.raises(ConflictError, match="pinned"):
        run.forget(key(3))
    assert run.keys() == [key(3)]
    assert wrongs(run, key(3)) == {}


def test_reader_that_comes_during_forget(run):
    """A hold that appears after the first look is seen after the tombstone, which is then taken back."""
    one = save(run, 3)
    create, holds = run.store.create, []

    def create_then_hold(name, data):
        created = create(name, data)
        if name.startswith("forgotten/"):
            hold = Repository(LocalStore("/run", disk=run.store._disk)).hold(one)
            hold.__enter__()
            holds.append(hold)
        return created

    run.store.create = create_then_hold
    with pytest.raises(ConflictError, match="being read"):
        run.forget(one)
    assert run.keys() == [one]
    holds[0].__exit__(None, None, None)


def test_shared_bytes_stay(run):
    """Data that a later checkpoint refers to stays when its own checkpoint is forgotten, and goes with the last reference."""
    save(run, 3)
    save(run, 4, base=key(3))
    run.forget(key(3), sole_committer=True)
    assert run.keys() == [key(4)]
    assert wrongs(run, key(4)) == {}
    assert reasons(run.plan_sweep(now=LATER)) == {}
    run.forget(key(4), sole_committer=True)
    run.sweep(run.plan_sweep(now=LATER))
    assert run.store.folders("data/") == []


def test_unreadable_manifest_blocks(run, disk):
    """F7: what an unreadable manifest may refer to stays, and the sweep says why; what is newer goes."""
    save(run, 3)
    save(run, 5)
    persist(run, key(4))
    persist(run, key(6))
    disk.flip(f"/run/manifests/{key(5)}.json", 1000)
    run = Repository(run.store)  # another process: this one has seen that manifest when it was whole
    run.forget(key(3))
    assert run.store.get(run.data_key(key(3), FILE_NAME)) == payload(key(3))
    planned = run.plan_sweep(now=LATER)
    assert {item.key: item.blocked for item in planned} == {f"data/{key(3)}/": True, f"data/{key(4)}/": True, f"data/{key(6)}/": False}
    assert "unreadable manifest of step 5" in planned[0].reason
    run.sweep(planned)
    assert list(run.store.folders("data/")) == [str(key(3)), str(key(4)), str(key(5))]


def test_retention_in_a_run(run):
    """F49, F50, F51: the best and the newest stay; incomplete checkpoints count for nothing; earlier attempts are seen."""
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(run, step, metrics={"loss": loss})
    second = run.start_attempt(parent=key(3), now=2.0).attempt
    save(run, 4, second, metrics={"loss": 5.0})
    for step in (5, 6, 7):
        persist(run, key(step, second))
    run.record_metrics(key(1), {"loss": 9.0})
    decided = run.retention(Keep(last=2, best=1, metric="loss"), now=1.0)
    assert {one.step for one in decided if one.keep} == {2, 3, 4}
    assert {one.step for one in decided} == {1, 2, 3, 4}


def counting(run):
    """Names of the objects that are read from now on."""
    reads, get = [], run.store.get

    def count(name):
        reads.append(name)
        return get(name)

    run.store.get = count
    return reads


def rounds(run, first, last):
    """What the agent does again and again: a commit, retention, and forgetting what is not kept."""
    for step in range(first, last):
        save(run, step)
        for kept in run.retention(Keep(last=20), now=1.0):
            if not kept.keep:
                run.forget(CheckpointKey.parse(kept.key), sole_committer=True)


def test_steady_retention_reads_each_manifest_once(run, disk):
    """With 20 kept, a commit and a deletion read no manifest again: not in the process that committed them, and once in another one."""
    rounds(run, 1, 21)
    reads = counting(run)
    rounds(run, 21, 26)
    assert [name for name in reads if name.startswith("manifests/")] == []
    other = Repository(LocalStore("/run", disk=disk))
    reads = counting(other)
    rounds(other, 26, 27)
    assert sorted(name for name in reads if name.startswith("manifests/")) == [f"manifests/{key(step)}.json" for step in range(7, 26)]
    reads.clear()
    rounds(other, 27, 32)
    assert [name for name in reads if name.startswith("manifests/")] == []
    assert [one.step for one in other.keys()] == list(range(12, 32))
    assert other.store.folders("data/") == [str(key(step)) for step in range(12, 32)]


def test_steady_retention_asks_for_names_alone(run):
    """With few or many kept, a commit and a deletion take the same number of the store's operations."""
    def operations(kept):
        store = CrashingStore(run.store)
        asked = []

        def counted(name, real):
            return lambda *args: asked.append(name) or real(*args)

        for name in ("list", "get", "size", "folders"):
            setattr(store, name, counted(name, getattr(store, name)))
        repository = Repository(store)
        for step in range(kept * 100, kept * 100 + kept):
            save(repository, step)
        repository.forget(key(kept * 100))
        asked.clear()
        store.operations.clear()
        save(repository, kept * 100 + kept)
        repository.retention(Keep(last=kept), now=1.0)
        repository.forget(key(kept * 100 + 1))
        return len(asked), len(store.operations)

    assert operations(3) == operations(12)


def test_references_of_a_manifest_that_was_made_again(run, disk):
    """A key that is forgotten and committed again by another process refers to what the new manifest says."""
    save(run, 3)
    save(run, 5)
    run.forget(save(run, 1))  # now the references of both are known
    other = Repository(LocalStore("/run", disk=disk))
    other.forget(key(5), sole_committer=True)
    save(other, 5, base=key(3))
    run.forget(key(3), sole_committer=True)
    assert wrongs(run, key(5)) == {}


def test_known_references_are_bounded():
    """Beyond the bound nothing is remembered, and what is dropped makes room again."""
    known = KnownReferences()
    known.BOUND = 5
    assert known.put(key(1), 10, [f"data/{key(1)}/x", f"data/{key(0)}/x"]) == {f"data/{key(0)}/x"}
    known.put(key(2), 10, [])
    assert known.get(key(1), 10) == {f"data/{key(0)}/x"}
    assert known.get(key(1), 11) is None
    known.put(key(3), 10, ["a", "b", "c"])
    assert known.get(key(3), 10) is None
    known.keep({key(2)})
    known.put(key(3), 10, ["a", "b", "c"])
    assert (known.get(key(1), 10), known.get(key(2), 10), known.get(key(3), 10)) == (None, frozenset(), {"a", "b", "c"})


def test_retention_reads_no_manifests(run):
    """Deciding costs small records only: manifests may be large."""
    for step in range(1, 5):
        save(run, step, metrics={"loss": float(step)})
    reads = []
    get = run.store.get
    run.store.get = lambda name: reads.append(name) or get(name)
    run.retention(Keep(last=1, best=1, metric="loss"), now=1.0)
    assert not [name for name in reads if name.startswith(("manifests/", "data/"))]


# -- sweeping --------------------------------------------------------------------------------------------------------------------------


def test_sweep_of_incomplete_data(run):
    """Data without manifest goes when no attempt can commit it: of an older attempt, or of the newest when it is not alive; never what is in progress."""
    save(run, 1)
    persist(run, key(2))
    run.renew(1, now=100.0, ttl_s=10.0)
    assert run.plan_sweep(now=105.0) == []
    assert list(reasons(run.plan_sweep(now=115.0))) == [f"data/{key(2)}/"]
    assert run.plan_sweep(now=115.0, in_progress=[key(2)]) == []
    second = run.start_attempt(parent=key(1), now=2.0).attempt
    run.renew(second, now=100.0, ttl_s=10.0)
    persist(run, key(3, second))
    planned = run.plan_sweep(now=105.0)
    assert [(item.key, item.blocked) for item in planned] == [(f"data/{key(2)}/", False)]
    assert "attempt 1 ended" in planned[0].reason
    assert run.sweep(planned) == planned[0].nbytes > 0
    assert list(run.store.folders("data/")) == [str(key(1)), str(key(3, second))]
    assert wrongs(run, key(1)) == {}


def test_sweep_sees_a_commit_since_the_plan(run):
    """What was committed after the plan was made stays, and stays visible."""
    manifest = persist(run, key(3))
    planned = run.plan_sweep(now=LATER)
    run.commit(manifest)
    assert run.sweep(planned) == 0
    assert run.keys() == [key(3)]
    assert wrongs(run, key(3)) == {}


def test_sweep_finishes_deletions(run):
    """A deletion that was interrupted at any point is finished by the next sweep, records and all."""
    for cut_at in range(2, 6):
        save(run, cut_at, metrics={"loss": 1.0})
        dying = Repository(CrashingStore(run.store, cut_at=cut_at, error=TransientStoreError("dead")))
        with pytest.raises(TransientStoreError):
            dying.forget(key(cut_at))
        run.sweep(run.plan_sweep(now=1.0))
        assert [name for name, _ in run.store.list("") if str(key(cut_at)) in name] == [f"forgotten/{key(cut_at)}.json"]
        assert run.plan_sweep(now=LATER) == []


def test_interrupted_deletion_of_what_is_protected_now(run):
    """An interrupted deletion does not go on while somebody reads; a pin calls it off."""
    save(run, 3)
    run.store.create(f"forgotten/{key(3)}.json", encode("forgotten", {}))
    with run.hold(key(3)):
        planned = run.plan_sweep(now=time.time())
        assert [(item.key, item.blocked) for item in planned] == [(f"manifests/{key(3)}.json", True)]
        run.sweep(planned)
    run.pin(key(3))
    assert run.keys() == []
    run.sweep(run.plan_sweep(now=time.time()))
    assert run.keys() == [key(3)]
    assert wrongs(run, key(3)) == {}


def test_sweep_of_records_and_tombstones(run):
    """Expired holds, records of what is gone, and tombstones of attempts that are over go; those of the newest attempt stay."""
    save(run, 3)
    run.store.put(f"metrics/{key(9)}.json", b"{}")
    run.store.put(f"holds/{key(3)}/{1000 * 50:013d}-aa.json", b"{}")
    run.store.put(f"holds/{key(3)}/{1000 * 500:013d}-bb.json", b"{}")
    run.forget(save(run, 4))
    run.renew(1, now=0.0, ttl_s=200.0)
    assert list(reasons(run.plan_sweep(now=100.0))) == [f"holds/{key(3)}/{50000:013d}-aa.json"]
    run.start_attempt(parent=key(3), now=2.0)
    assert list(reasons(run.plan_sweep(now=100.0))) == [f"holds/{key(3)}/{50000:013d}-aa.json", f"metrics/{key(9)}.json"]
    planned = run.plan_sweep(now=300.0)
    assert f"forgotten/{key(4)}.json" in reasons(planned)
    run.sweep(planned)
    assert [name for name, _ in run.store.list("") if name.startswith(("holds/", "metrics/", "forgotten/"))] == [f"holds/{key(3)}/{500000:013d}-bb.json"]


def test_sweep_of_temporary_files():
    """Temporary files go after an hour; those of a checkpoint in progress never."""
    now = [0.0]
    disk = SimDisk(clock=lambda: now[0])
    run = Repository(LocalStore("/run", disk=disk))
    run.begin(create=True)
    run.start_attempt(parent=None, now=0.0)
    save(run, 1)
    run.renew(1, now=0.0, ttl_s=1e6)
    persist(run, key(2))
    for folder in ("manifests", f"data/{key(1)}", f"data/{key(2)}"):
        disk.close(disk.open(f"/run/{folder}/.tmp-dead", 0o101))
    assert run.plan_sweep(now=3599.0) == []
    planned = run.plan_sweep(now=3601.0, in_progress=[key(2)])
    assert list(reasons(planned)) == [f"data/{key(1)}/.tmp-dead", "manifests/.tmp-dead"]
    run.sweep(planned)
    assert [name for name, _, _ in run.store.leftovers("")] == [f"data/{key(2)}/.tmp-dead"]
    assert run.keys() == [key(1)]


def test_files_of_others_are_left_alone(run):
    """Files and folders with names that are none of ours are neither read nor swept."""
    save(run, 3)
    for name in ("manifests/README", "manifests/notes.json", "data/mine/file", "pins/x.json", "notes.txt", "attempts/old/x"):
        run.store.put(name, b"mine")
    assert run.keys() == [key(3)]
    assert run.plan_sweep(now=LATER) == []
    assert run.newest_attempt() == 1


STRAYS = (".DS_Store", "README", "²", "9", "._{key}.json", "{key} (copy).json", "{key}.json~", "folder/x", "{key}.json/x", "³/²-aa.json",
          "{key}/deep/er/x", "000009 (copy).json", "0000009.json", "000009.json/x", "000008.claim", "²²²²²².json", "lost\udcff.json")  # fmt: skip


@pytest.mark.parametrize("folder", ["manifests", "forgotten", "pins", "holds", "verified", "metrics", "stats", "alive", "attempts", "data", "exports"])
def test_stray_names_in_any_folder(run, folder):
    """Files and folders that others put among the records break nothing, count for nothing and stay."""
    one = save(run, 3, metrics={"loss": 0.5})
    save(run, 4)
    run.record_stats(1, {"pid": 7})
    run.renew(1, now=0.0, ttl_s=1e6)
    before = {name for name, _ in run.store.list("")}
    for stray in STRAYS:
        run.store.put(f"{folder}/{stray.format(key=key(77))}", b"mine")
    if folder == "holds":
        run.store.put(f"holds/{one}/.DS_Store", b"mine")
        run.store.put(f"holds/{one}/²-aa.json", b"mine")
    strays = {name for name, _ in run.store.list("")} - before
    if folder == "data":
        strays = {name for name in strays if not name.startswith(f"data/{key(77)}/")}  # that folder's name is one of ours
    assert run.keys() == run.lineage()[::-1] == [one, key(4)]
    assert run.find(None) == key(4)
    assert wrongs(run, one) == {}
    assert {kept.step: kept.keep for kept in run.retention(Keep(last=1, best=1, metric="loss"), now=1.0)} == {3: True, 4: True}
    assert (run.newest_attempt(), run.problems(), run.is_alive(1, now=1.0)) == (1, [], True)
    assert run.read_stats() == {1: {"pid": 7}}
    assert not run.held(one, now=0.0)
    assert run.plan_sweep(now=10.0) == []
    run.sweep(run.plan_sweep(now=LATER))
    second = run.start_attempt(parent=one, now=2.0).attempt
    assert second == 2
    save(run, 5, second)
    run.forget(key(4))
    run.sweep(run.plan_sweep(now=LATER))
    assert run.keys() == [one, key(5, second)]
    assert strays <= {name for name, _ in run.store.list("")}


def test_stats_of_a_newer_format(run):
    """Statistics of a newer format are left out, and do not break those that can be read."""
    run.record_stats(1, {"pid": 7})
    run.store.put("stats/000002.json", b'{"format":%d,"kind":"stats"}' % (FORMAT + 1))
    assert run.read_stats() == {1: {"pid": 7}}


def test_orphan_records_of_the_live_attempt(run):
    """Metrics of the live attempt go when they are older than all it keeps; newer ones, and pins, may belong to a save on its way."""
    run.renew(1, now=0.0, ttl_s=1e6)
    save(run, 5)
    for name in (f"metrics/{key(2)}", f"verified/{key(2)}", f"pins/{key(2)}", f"metrics/{key(6)}"):
        run.store.put(f"{name}.json", b"{}")
    assert list(reasons(run.plan_sweep(now=1.0))) == [f"verified/{key(2)}.json", f"metrics/{key(2)}.json"]


def test_sweep_leaves_what_may_still_be_committed(run):
    """Data of an older attempt that the newest goes on from stays while that attempt is alive, and its commit is accepted; the rest goes."""
    save(run, 1)
    run.renew(1, now=0.0, ttl_s=100.0)
    wanted, abandoned = persist(run, key(3)), persist(run, key(4))
    second = run.start_attempt(parent=key(3), now=1.0).attempt  # restored from memory: the disk is to have it soon
    run.renew(second, now=0.0, ttl_s=1000.0)
    assert list(reasons(run.plan_sweep(now=50.0))) == [f"data/{key(4)}/"]
    assert list(reasons(run.plan_sweep(now=50.0, sole_committer=True))) == [f"data/{key(4)}/"]
    assert list(reasons(run.plan_sweep(now=150.0))) == [f"data/{key(3)}/", f"data/{key(4)}/"]
    run.sweep(run.plan_sweep(now=50.0))
    run.commit(wanted)
    with pytest.raises(ConflictError):
        run.commit(abandoned)
    assert run.lineage() == [key(3), key(1)]
    assert wrongs(run, key(3)) == {}


def test_hold_behind_another_ones_tombstone(run):
    """A tombstone that was there already does not keep a reader's hold from being seen."""
    one = save(run, 3)
    tombstone = encode("forgotten", {})
    create = run.store.create

    def other_was_faster(name, data):
        create(name, tombstone)
        run.store.put(f"holds/{one}/{int((time.time() + 100) * 1000):013d}-aa.json", b"{}")
        return create(name, data)

    run.store.create = other_was_faster
    with pytest.raises(ConflictError, match="being read"):
        run.forget(one)
    assert run.store.get(f"manifests/{one}.json")
    assert run.store.get(run.data_key(one, FILE_NAME)) == payload(one)


# -- verifying --------------------------------------------------------------------------------------------------------------------------


def test_verify_good(run):
    """A good checkpoint verifies: manifest, part and data are each named with their size."""
    one = save(run, 3)
    assert [(name.split("/")[0], name.rpartition("/")[2], nbytes, wrong) for name, nbytes, wrong in run.verify(one)] == [
        ("manifests", f"{one}.json", run.store.size(f"manifests/{one}.json"), ""),
        ("data", "node-00001.json", run.store.size(f"data/{one}/node-00001.json"), ""),
        ("data", FILE_NAME, 264, ""),
    ]


def test_verify_finds_each_flipped_bit(run, disk):
    """F7: one bit flipped anywhere in payload, header, part or manifest is found, and nothing else is accused."""
    one = save(run, 3, metrics={"loss": 0.5})
    for path in (f"data/{one}/{FILE_NAME}", f"data/{one}/node-00001.json", f"manifests/{one}.json"):
        for bit in range(0, run.store.size(path) * 8, 41):
            disk.flip(f"/run/{path}", bit)
            found = [(name, wrong) for name, _, wrong in run.verify(one) if wrong]
            assert [name for name, _ in found] == [path], (path, bit)
            assert found[0][1]
            disk.flip(f"/run/{path}", bit)
    assert wrongs(run, one) == {}


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "missing at its end"), (payload(key(3))[:-1], "1 of 264"), (payload(key(3)) + b"xy", "2 unexpected bytes"), (None, "it is missing")]
)
def test_verify_finds_wrong_sizes(run, content, said):
    """F6: a file that is missing, cut off or too long is named with how much."""
    one = save(run, 3)
    if content is None:
        run.store.delete(run.data_key(one, FILE_NAME))
    else:
        run.store.put(run.data_key(one, FILE_NAME), content)
    assert said in wrongs(run, one)[FILE_NAME]


def test_verify_finds_a_part_that_does_not_fit(run):
    """A sound part of another save is found: it does not agree with the manifest. One node's checkpoint needs none: its manifest is its part."""
    one = save(run, 3)
    run.store.put(f"data/{one}/node-00001.json", encode("part", sample_part(one, metrics={"loss": 2.0})))
    assert "does not agree" in wrongs(run, one)["node-00001.json"]
    run.store.delete(f"data/{one}/node-00001.json")
    assert wrongs(run, one) == {}
    with pytest.raises(NotFoundError):
        list(run.verify(key(4)))
