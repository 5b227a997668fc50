"""A run's whole life on a disk that loses power at every single call; and planted bugs, each of which the same harness must find."""

from __future__ import annotations

import dataclasses

import pytest

from everystep.errors import ConflictError
from everystep.manifest import encode, merge
from everystep.policy import Keep
from everystep.repository import CheckpointKey, Repository
from everystep.store.local import LocalStore
from everystep.testing import CrashingStore, PowerCut, SimDisk, Survival
from everystep.testing.samples import OPTIMIZER_FILE, node_file, node_payload, persist, persist_node

TTL_S = 100.0
LATER = 1e12  # every hold, attempt and temporary file is old by then
OUTCOMES = [(Survival.NOTHING, 0), (Survival.EVERYTHING, 0), (Survival.NAMES, 0), (Survival.CONTENTS, 0), (Survival.RANDOM, 1), (Survival.RANDOM, 2)]


class Violation(AssertionError):
    """An invariant is broken."""


@dataclasses.dataclass
class Journal:
    """What the history was told, as a trainer would know it."""

    run_id: str = ""
    attempt: int = 0
    acknowledged: set[CheckpointKey] = dataclasses.field(default_factory=set)
    given_up: set[CheckpointKey] = dataclasses.field(default_factory=set)
    refused: set[CheckpointKey] = dataclasses.field(default_factory=set)
    """Given up before they were committed, for good."""
    reducing: set[CheckpointKey] = dataclasses.field(default_factory=set)
    """Asked to be reduced: they may be there under the one key or the other."""

    @property
    def owed(self):
        return self.acknowledged - self.given_up


def save(repository, journal, key, *, base=None):
    """A save as the agent does it: persist, commit, acknowledge, then retention."""
    repository.commit(persist(repository, key, base=base, metrics={"loss": 1.0 / key.step} if key.step % 2 else None))
    journal.acknowledged.add(key)
    for kept in repository.retention(Keep(last=2, best=1, metric="loss"), now=10.0):
        if not kept.keep:
            forget(repository, journal, CheckpointKey.parse(kept.key))


def forget(repository, journal, key):
    journal.given_up.add(key)
    repository.forget(key, sole_committer=key.step % 2 == 0)


def history(repository, journal):
    """Saves, a restart, unchanged bytes stored once, retention, an interrupted save, a sweep by somebody else, and a committer that comes too late."""
    repository.begin(create=True)
    journal.run_id = repository.run_id
    first = repository.start_attempt(parent=None, now=1.0).attempt
    journal.attempt = first
    repository.renew(first, now=1.0, ttl_s=TTL_S)
    for step in (1, 2, 3, 4):
        save(repository, journal, CheckpointKey(step, first))
    persist(repository, CheckpointKey(5, first))  # and dies
    second = repository.start_attempt(parent=CheckpointKey(3, first), now=2.0).attempt
    journal.attempt = second
    repository.renew(second, now=2.0, ttl_s=TTL_S)
    repository.sweep(repository.plan_sweep(now=3.0))
    save(repository, journal, CheckpointKey(6, second))
    repository.pin(CheckpointKey(6, second))
    save(repository, journal, CheckpointKey(7, second), base=CheckpointKey(6, second))
    repository.record_metrics(CheckpointKey(7, second), {"loss": 0.01})
    repository.unpin(CheckpointKey(6, second))
    forget(repository, journal, CheckpointKey(6, second))  # its bytes are still needed
    late = CheckpointKey(8, second)
    manifest = persist(repository, late)
    repository.sweep(repository.plan_sweep(now=2.0 + 2 * TTL_S))  # somebody takes the attempt for dead
    try:
        repository.commit(manifest)
        journal.acknowledged.add(late)
    except ConflictError:
        pass
    save(repository, journal, CheckpointKey(9, second))
    save(repository, journal, CheckpointKey(10, second))


def history_of_reducing(repository, journal):
    """Saves with an optimizer, of which some bytes are stored once; reductions, one of them again; retention and a drop take what is left; a restart."""
    repository.begin(create=True)
    journal.run_id = repository.run_id
    first = repository.start_attempt(parent=None, now=1.0).attempt
    journal.attempt = first
    repository.renew(first, now=1.0, ttl_s=TTL_S)

    def save_trained(step, attempt, *, base=None):
        key = CheckpointKey(step, attempt)
        repository.commit(persist(repository, key, base=base, metrics={"loss": 1.0 / step}, optimizer=True))
        journal.acknowledged.add(key)
        return key

    def reduce(key, *drop):
        journal.reducing.add(key.full)
        made = repository.reduce(key, drop=drop)
        journal.given_up.add(key)
        journal.acknowledged.add(made)
        return made

    one, two = save_trained(1, first), save_trained(2, first, base=CheckpointKey(1, first))
    reduce(one, "optim")  # its model file is the newer one's too
    three = save_trained(3, first, base=two)
    repository.record_metrics(two, {"val": 0.5})
    again = reduce(reduce(two, "optim"), "epoch")
    forget(repository, journal, CheckpointKey(1, first, 1))
    second = repository.start_attempt(parent=three, now=2.0).attempt
    journal.attempt = second
    repository.renew(second, now=2.0, ttl_s=TTL_S)
    save_trained(4, second, base=three)
    reduce(three, "optim")  # of an attempt that is over
    repository.sweep(repository.plan_sweep(now=3.0))
    journal.given_up.add(again)
    repository.drop(two)
    journal.given_up.add(CheckpointKey(3, first, 1))
    repository.forget(CheckpointKey(3, first, 1), sole_committer=True)


def history_of_nodes(repositories, journal):
    """Two nodes on one store: parts and commits by either, a node that dies before its part, givings up in and out of time, retention, a next job."""
    lead, other = repositories
    for one in repositories:
        one.begin(create=True, run_id="00000000000000aa")
        journal.run_id = one.run_id
    first = lead.start_attempt(parent=None, now=1.0, world=2, nodes=2, number=1, job="j").attempt
    journal.attempt = first
    lead.renew(first, now=1.0, ttl_s=TTL_S)

    def save_together(step, *, order):
        key = CheckpointKey(step, first)
        for node in order:
            persist_node(repositories[node], key, node, 2, metrics={"loss": 1.0 / step})
        for node in reversed(order):
            repositories[node].commit(merge([repositories[node].read_part(key, part) for part in (0, 1)]))
            journal.acknowledged.add(key)
        return key

    save_together(1, order=(0, 1))
    save_together(2, order=(1, 0))
    dead = CheckpointKey(3, first)
    persist_node(lead, dead, 0, 2)  # the other node dies before its part
    lead.give_up(dead, "node 1 died")
    journal.refused.add(dead)
    other.store.put(other.data_key(dead, node_file(1)), node_payload(dead, 1))  # it was only slow
    kept = save_together(4, order=(0, 1))
    try:
        other.give_up(kept, "too late")
        raise Violation("what is committed was given up")
    except ConflictError:
        pass
    for kept_or_not in lead.retention(Keep(last=2), now=10.0):
        if not kept_or_not.keep:
            forget(lead, journal, CheckpointKey.parse(kept_or_not.key))
    lead.sweep(lead.plan_sweep(now=2.0))
    unfinished = CheckpointKey(5, first)
    parts = [persist_node(one, unfinished, node, 2) for node, one in enumerate(repositories)]
    half = CheckpointKey(6, first)
    persist_node(other, half, 1, 2)
    second = other.start_attempt(parent=kept, now=3.0, number=2, job="k").attempt  # the next job has one node
    journal.attempt = second
    other.renew(second, now=3.0, ttl_s=TTL_S)
    other.sweep(other.plan_sweep(now=4.0))
    try:
        lead.commit(merge(parts))
        raise Violation("an attempt that is over has committed")
    except ConflictError:
        pass
    save(other, journal, CheckpointKey(5, second))


def check(repository, journal):
    """The invariants that a restart relies on."""
    repository.begin(create=True)
    if journal.run_id and repository.run_id != journal.run_id:
        raise Violation("another run id")
    if repository.newest_attempt() < journal.attempt:
        raise Violation("an attempt is forgotten: its number would be given twice")
    keys = repository.keys()
    stands = {key.full for key in keys} & journal.reducing
    lost = {key for key in journal.owed - set(keys) if key.full not in stands}
    if lost:
        raise Violation(f"acknowledged and lost: {lost}")
    false = journal.refused & {*keys, *(key for key in journal.refused if repository.committed(key))}
    if false:
        raise Violation(f"given up and committed all the same: {false}")
    for key in keys:
        for name, _, wrong in repository.verify(key, threads=1):
            if wrong:
                raise Violation(f"{key} is listed, but {name}: {wrong}")


def recover(repository, journal):
    """What follows a crash: check, sweep until nothing is left to sweep, check, go on, check."""
    check(repository, journal)
    for _ in range(3):
        planned = repository.plan_sweep(now=LATER)
        if any(item.blocked for item in planned):
            raise Violation(f"something readable blocks the sweep: {planned}")
        repository.sweep(planned)
    left = repository.plan_sweep(now=LATER)
    garbage = [name for name in repository.store.folders("data/") if CheckpointKey.parse(name) not in repository.keys()]
    needed = {name.split("/")[1] for key in repository.keys() for name in (stored.key for stored in repository.manifest(key).objects)}
    if left or set(garbage) - needed or list(repository.store.leftovers("")):
        raise Violation(f"the sweep leaves {left or garbage or 'temporary files'}")
    check(repository, journal)
    reduce_again(repository, journal)
    check(repository, journal)
    lineage = repository.lineage()
    attempt = repository.start_attempt(parent=lineage[0] if lineage else None, now=LATER).attempt
    key = CheckpointKey(100, attempt)
    repository.commit(persist(repository, key))
    if repository.find(None) != key or repository.lineage()[1:] != lineage:
        raise Violation("the next attempt does not go on from where the last one was")
    for name, _, wrong in repository.verify(key, threads=1):
        if wrong:
            raise Violation(f"the next checkpoint is not whole: {name} {wrong}")


def reduce_again(repository, journal):
    """What a job that was killed does when it starts again: the same reductions."""
    there = {key.full for key in repository.keys()}
    newest = next((key for key in repository.lineage() if not key.reduced), None)
    for key in sorted(journal.reducing & there - {newest}):
        made = repository.reduce(key, drop=["optim"])
        journal.given_up.add(key)
        if [one for one in repository.keys() if one.full == key] != [made]:
            raise Violation(f"{key} is not reduced to {made} alone")
        if repository.metrics(made).get("loss") != 1.0 / key.step:
            raise Violation(f"{made} has lost its metrics")
        if any(name.endswith(OPTIMIZER_FILE) for name, _ in repository.store.list(f"data/{key}/")):
            raise Violation(f"the optimizer of {key} is still there")


def open_on(disk, store_class=LocalStore, repository_class=Repository):
    return repository_class(store_class("/mnt/run", disk=disk, writers=1, large_nbytes=200))


def mounted(**options):
    """A disk with its mount point, as it was before the run."""
    disk = SimDisk(**options)
    disk.mkdir("/mnt")
    fd = disk.open("/", 0)
    disk.fsync(fd)
    disk.close(fd)
    disk.calls.clear()
    return disk


def cut_everywhere(store_class=LocalStore, repository_class=Repository, *, backwards=False, nodes=1, history=history):
    """Cut the power at each changing call of the history, look at each outcome; returns (calls, different disks found).

    ``backwards`` from the last call: bugs that show late are found sooner.
    """

    def story(disk, journal):
        if nodes == 1:
            history(open_on(disk, store_class, repository_class), journal)
        else:
            history_of_nodes([open_on(disk, store_class, repository_class) for _ in range(nodes)], journal)

    disk, journal = mounted(), Journal()
    story(disk, journal)
    calls, seen = len(disk.calls), set()
    for cut_at in sorted(range(1, calls + 2), reverse=backwards):
        disk, journal = mounted(), Journal()
        disk.cut_at = cut_at
        try:
            story(disk, journal)
            disk.cut()  # after the last call
        except PowerCut:
            pass
        for survival, seed in OUTCOMES:
            found = disk.after_power_cut(survival, seed=seed * 1000 + cut_at)
            # Temporary names are random; two disks that differ only in those are the same case.
            files = tuple(sorted((path.split(".tmp-")[0], content) for path, content in found.files().items() if path.count("/") > 1))
            state = (files, journal.run_id != "", journal.attempt, frozenset(journal.owed), frozenset(journal.refused))
            if hash(state) in seen:
                continue
            seen.add(hash(state))
            try:
                recover(open_on(found), journal)
            except Violation as violation:
                raise Violation(f"power cut at call {cut_at} of {calls}, {survival.value} {seed}: {violation}") from violation
    return calls, len(seen)


def test_power_cut_at_every_call():
    """F38, F52: whatever survives a power cut at any call, nothing acknowledged is lost, what is listed verifies, the sweep cleans up, and the run goes on."""
    calls, disks = cut_everywhere()
    assert calls > 250
    assert disks > 250


def test_power_cut_at_every_call_of_two_nodes():
    """F5, F47, F52: two nodes on one store, the power cut at any call of either: the previous one is good, and nothing is committed falsely."""
    calls, disks = cut_everywhere(nodes=2)
    assert calls > 200
    assert disks > 200


def test_power_cut_at_every_call_of_a_reduction():
    """F38, F52: whatever survives a power cut at any call of reductions, the whole checkpoint or the reduced one is there, whole, and the next call ends it."""
    calls, disks = cut_everywhere(history=history_of_reducing)
    assert calls > 250
    assert disks > 250


def test_store_dies_at_every_operation_of_two_nodes():
    """The same when the store dies between two operations of either node, before or after the operation took effect."""
    counting = CrashingStore(open_on(mounted()).store)
    history_of_nodes([Repository(counting), Repository(counting)], Journal())
    for cut_at in range(1, len(counting.operations) + 1):
        for after in (False, True):
            store, journal = open_on(mounted()).store, Journal()
            dying = CrashingStore(store, cut_at=cut_at, after=after)
            with pytest.raises(PowerCut):
                history_of_nodes([Repository(dying), Repository(dying)], journal)
            recover(Repository(store), journal)


@pytest.mark.parametrize("history", [history, history_of_reducing])
def test_store_dies_at_every_operation(history):
    """The same when a store of any kind dies between two operations, before or after the operation took effect."""
    counting = CrashingStore(open_on(mounted()).store)
    history(Repository(counting), Journal())
    for cut_at in range(1, len(counting.operations) + 1):
        for after in (False, True):
            store, journal = open_on(mounted()).store, Journal()
            with pytest.raises(PowerCut):
                history(Repository(CrashingStore(store, cut_at=cut_at, after=after)), journal)
            recover(Repository(store), journal)


# -- planted bugs ------------------------------------------------------------------------------------------------------------


class ManifestFirst(Repository):
    """Commits before the data is written."""

    def put_data(self, key, file_name, data, *, nbytes):
        self.waiting = (key, file_name, bytes(data), nbytes)

    def commit(self, manifest):
        super().commit(manifest)
        key, file_name, data, nbytes = self.waiting
        self.store.put(self.data_key(key, file_name), data, nbytes=nbytes)


class DataDeletedFirst(Repository):
    """Deletes the data of a checkpoint that is still published."""

    def _forget(self, key, **options):
        self._delete_data(key)
        return super()._forget(key, **options)


class DeletesBeforeItIsDecided(Repository):
    """Gives up by deleting first."""

    def give_up(self, key, reason):
        self._delete_data(key)
        return super().give_up(key, reason)


class ForgetsTheMark(Repository):
    """Gives up without a word where the manifest would be: the tombstone is taken for one that came too late."""

    def give_up(self, key, reason):
        freed = super().give_up(key, reason)
        self.store.delete(f"forgotten/{key}.json")
        return freed


class NoTombstone(Repository):
    """Sweeps what somebody may still commit without leaving word."""

    def _sweep_data(self, key, item):
        return self.store.delete_folder(item.key)


class BlindDeletion(Repository):
    """Deletes a forgotten checkpoint's bytes although a newer one refers to them."""

    def _references(self, *, but=None):
        return set(), []


class ForgetsBeforeItReduces(Repository):
    """Forgets the whole checkpoint before its reduction is committed."""

    def commit(self, manifest):
        if manifest.reduced:
            full = CheckpointKey(manifest.step, manifest.attempt)
            self.store.create(f"forgotten/{full}.json", encode("forgotten", {}))
            self._delete_manifest(full)
        super().commit(manifest)


class TakesOnlyOwnFoldersForNeeded(Repository):
    """Deletes bytes in the folder of another, as if each checkpoint's data lay in its own."""

    def _read_references(self, key, nbytes):
        return frozenset() if key.reduced else super()._read_references(key, nbytes)


class NumbersAttemptsByCheckpoints(Repository):
    """Gives an attempt's number twice."""

    def start_attempt(self, *, parent, now, **others):
        attempt = super().start_attempt(parent=parent, now=now, **others)
        self.store.delete_folder(f"attempts/{attempt.attempt:06d}.claim/")
        self.store.delete(f"attempts/{attempt.attempt:06d}.json")
        return attempt


class NoFolderFsync(LocalStore):
    """Names are not made durable."""

    def _fsync_folder(self, path):
        pass


class NoParentFsync(LocalStore):
    """A new folder is not made durable in its parent."""

    def _ensure_folder(self, path):
        if path not in self._durable_folders and path != self.path:
            self._ensure_folder(path.rpartition("/")[0])
            self._mkdir(path)
            self._durable_folders.add(path)
        else:
            super()._ensure_folder(path)


class NoFileFsync(LocalStore):
    """Contents are not made durable before the name is."""

    def _write_file(self, temporary, view, nbytes, device, *, direct, large):
        fd = self._disk.open(temporary, 0o101)  # O_WRONLY | O_CREAT
        self._write_all(fd, view[:nbytes], 0, step=1)
        self._disk.close(fd)


class WritesInPlace(LocalStore):
    """Writes under the final name."""

    def _write_new(self, path, view, nbytes, publish, *, withdraw):
        self._ensure_folder(path.rpartition("/")[0])
        try:
            fd = self._disk.open(path, 0o301)  # O_WRONLY | O_CREAT | O_EXCL
        except FileExistsError:
            return False
        self._write_all(fd, view[:nbytes], 0, step=1)
        self._disk.fsync(fd)
        self._disk.close(fd)
        self._fsync_folder(path.rpartition("/")[0])
        return True


@pytest.mark.parametrize("bug", [ManifestFirst, DataDeletedFirst, NoTombstone, BlindDeletion, NumbersAttemptsByCheckpoints])
def test_finds_bugs_in_the_repository(bug):
    """A wrong order of writes or deletes in the repository is found by the harness."""
    with pytest.raises((Violation, ConflictError)):
        cut_everywhere(repository_class=bug, backwards=True)


@pytest.mark.parametrize("bug", [ForgetsBeforeItReduces, TakesOnlyOwnFoldersForNeeded, DataDeletedFirst])
def test_finds_bugs_in_reducing(bug):
    """A wrong order or a forgotten reference in a reduction is found by the harness."""
    with pytest.raises((Violation, ConflictError)):
        cut_everywhere(repository_class=bug, backwards=True, history=history_of_reducing)


@pytest.mark.parametrize("bug", [DeletesBeforeItIsDecided, ForgetsTheMark])
def test_finds_bugs_in_giving_up(bug):
    """A wrong order of deciding and deleting among several nodes is found by the harness."""
    with pytest.raises(Violation):
        cut_everywhere(repository_class=bug, nodes=2, backwards=True)


@pytest.mark.parametrize("bug", [NoFolderFsync, NoParentFsync, NoFileFsync, WritesInPlace])
def test_finds_bugs_in_the_store(bug):
    """A missing fsync or a write in place in the store is found by the harness."""
    with pytest.raises(Exception) as caught:  # a torn record may also show as its own error
        cut_everywhere(store_class=bug)
    assert "power cut at call" in str(caught.value) or type(caught.value).__module__ == "everystep.errors"
