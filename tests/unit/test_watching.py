"""Following a folder: what is begun, protected, told and tried again, with children that only pretend; real folders, no clock."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from everystep import errors
from everystep.consolidate import protecting, watching
from everystep.consolidate.source import Found
from everystep.consolidate.watching import Outcome, Watch
from everystep.schedule import Consolidate, Seen

GOOD = Outcome(exported={"path": "there", "already": False})


class FakeChild:
    """A child that ends when it is asked the ``after``-th time."""

    def __init__(self, outcome, after=1):
        self._outcome, self._after = outcome, after
        self.killed = False
        self._reads, writes = os.pipe()
        os.close(writes)  # readable at once

    def fileno(self):
        return self._reads

    def outcome(self):
        self._after -= 1
        if self._after >= 0:
            return None
        os.close(self._reads)
        return self._outcome

    def kill(self):
        self.killed = True
        os.close(self._reads)


class Job:
    """A folder of checkpoints ``step-N``, and everything that a watch is given."""

    def __init__(self, root, kind="dcp"):
        self.root, self.kind = root, kind
        root.mkdir(exist_ok=True)
        self.events, self.started, self.done, self.tidied = [], [], [], []
        self.outcomes = {}
        self.now = 0.0
        self.looks = 0
        self.at_look = {}
        self.last_look = 5
        self.is_over = False
        self.wake = os.pipe2(os.O_NONBLOCK)
        self.children = []

    def save(self, step, *, complete=True, **metrics):
        folder = self.root / f"step-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "shard").write_bytes(bytes(100))
        (folder / "metrics").write_text(repr(metrics))
        if complete:
            (folder / "complete").touch()
        return folder

    def prune(self, step):
        shutil.rmtree(self.root / f"step-{step}")

    def find(self, root):
        """As a look at the folder gives them."""
        self.looks += 1
        if root == str(self.root) and self.looks in self.at_look:
            self.at_look.pop(self.looks)()
        found = []
        for folder in self.root.glob("step-*"):
            step, whole = int(folder.name.split("-")[1]), (folder / "complete").exists()
            why = "" if whole else "it has no complete"
            found.append(Found(str(folder), self.kind, step, whole, why, float(step), eval((folder / "metrics").read_text()), folder.name))
        return sorted(found, key=lambda one: one.step)

    def start(self, found, path, reason):
        self.started.append((found.step, path, reason))
        outcome = self.outcomes.get(found.step, GOOD)
        if isinstance(outcome, list):
            outcome = outcome.pop(0) if len(outcome) > 1 else outcome[0]
        if callable(outcome):
            outcome = outcome(path)
        if outcome.error is None:
            self.done.append(Seen(found.key, found.step, found.saved_at, found.metrics))
        self.children.append(FakeChild(outcome))
        return self.children[-1]

    def clock(self):
        self.now += 1.0
        return self.now

    def watch(self, when="every", *, once=False, **more):
        """Follow until the folder was listed ``last_look`` times."""
        watch = Watch(
            str(self.root), Consolidate(when=when), start=self.start, tell=self.events.append, done=lambda found: self.done,
            tidy=self.tidied.append, wake=self.wake[0], stopped=lambda: self.looks >= self.last_look or self.now > 500,
            over=lambda: self.is_over, poll_s=2.0, find=self.find, clock=self.clock, **more,
        )  # fmt: skip
        watch.run(once=once)
        return watch

    def told(self, *what):
        return [(event.what, event.details.get("step")) for event in self.events if not what or event.what in what]

    def text(self, what):
        return [event.text for event in self.events if event.what == what]

    def hidden(self):
        return [name for name in os.listdir(self.root) if name.startswith(".")]


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path / "job")
    yield made
    for end in made.wake:
        os.close(end)


def test_what_is_due_is_consolidated_oldest_first_and_once(job):
    """Steps that the schedule names are consolidated in order; at later looks nothing is begun again."""
    for step in (20, 5, 10, 7):
        job.save(step)
    job.watch("every: 5")
    assert [step for step, _, _ in job.started] == [5, 10, 20]
    assert job.told("consolidated") == [("consolidated", 5), ("consolidated", 10), ("consolidated", 20)]
    assert job.told("skipped") == [("skipped", 7)]


def test_an_incomplete_checkpoint_is_left_alone_until_it_is_complete(job):
    """Incomplete ones are told once, with why, and are consolidated when they are complete."""
    job.save(5, complete=False)
    job.at_look = {3: lambda: job.save(5)}
    job.watch()
    assert job.told("incomplete", "due", "consolidated") == [("incomplete", 5), ("due", 5), ("consolidated", 5)]
    assert "no complete" in job.text("incomplete")[0]


def test_a_checkpoint_that_is_pruned_while_it_waits_is_read_from_its_links(job):
    """The job deletes two checkpoints while an earlier one is read: their files are still there under the second name, whole."""
    for step in (5, 10, 15):
        job.save(step)
    read = {}

    def look(path):
        if not read:  # the first one is being read: now the job prunes what waits, and that one too
            for step in (5, 10, 15):
                job.prune(step)
        read[path] = sorted(os.listdir(path))
        return GOOD

    job.outcomes = dict.fromkeys((5, 10, 15), look)
    job.watch()
    assert list(read.values()) == [["complete", "metrics", "shard"]] * 3
    assert all(os.path.basename(path) == f"step-{step}" for step, path, _ in job.started)
    assert job.told("pruned") == []
    assert job.hidden() == []


def test_only_a_few_are_protected_at_once(job):
    """Of many that are due three are kept from pruning, not all of the disk."""
    for step in range(5, 50, 5):
        job.save(step)
    protected = []

    def look(path):
        [token] = [name for name in os.listdir(job.root / protecting.HIDDEN) if name != ".lock"]
        protected.append(len([name for name in os.listdir(job.root / protecting.HIDDEN / token) if name != ".lock"]))
        return GOOD

    job.outcomes = dict.fromkeys(range(5, 50, 5), look)
    job.last_look = 20
    job.watch()
    assert len(protected) == 9
    assert max(protected) == watching.PROTECTED


def test_a_checkpoint_that_goes_while_it_is_read_is_said_and_the_next_one_begun(job, monkeypatch):
    """Where nothing protects it, a pruned checkpoint is an event and no failure."""
    monkeypatch.setattr(protecting.os, "link", _refuse)
    job.save(5)
    job.save(10)
    gone = Outcome(error=errors.NotFoundError("shard is not there"))
    job.outcomes = {5: lambda path: job.prune(5) or gone}
    watch = job.watch()
    assert job.told("unprotected") == [("unprotected", None)]
    assert job.told("pruned", "failed", "consolidated") == [("pruned", 5), ("consolidated", 10)]
    assert watch.failed is None
    assert job.started[0][1] == str(job.root / "step-5")


def test_a_folder_that_cannot_be_listed_after_a_failure_ends_nothing(job):
    """A child fails, and so does the look that is to say whether its checkpoint is there still: it is tried again."""
    job.save(5)
    job.outcomes = {5: [Outcome(error=errors.TransientStoreError("it hangs")), GOOD]}
    job.at_look = {2: _refuse}
    job.last_look = 60
    job.watch(retry_s=(4.0, 4.0))
    assert job.told("pruned", "failed", "consolidated") == [("failed", 5), ("consolidated", 5)]


def _refuse(*args, **kwargs):
    raise PermissionError(1, "Operation not permitted")


def test_a_damaged_checkpoint_is_left_alone_until_it_changes(job):
    """Corruption is told once; the checkpoint is tried again when its files are others; a later one does not wait for it."""
    folder = job.save(5)
    job.save(10)
    job.outcomes = {5: [Outcome(error=errors.CorruptionError("region [0, 2) is missing")), GOOD]}
    job.at_look = {5: lambda: (folder / "shard").write_bytes(bytes(200))}
    job.last_look = 9
    watch = job.watch()
    assert job.told("failed", "consolidated") == [("failed", 5), ("consolidated", 10), ("consolidated", 5)]
    assert "left alone until it changes" in job.text("failed")[0]
    assert watch.failed is None


def test_a_damaged_best_checkpoint_does_not_hide_the_others(job):
    """With `improves`, what cannot be read counts for nothing: the next best becomes due."""
    job.save(5, val_loss=1.0)
    job.save(10, val_loss=3.0)
    job.outcomes = {5: Outcome(error=errors.CorruptionError("truncated"))}
    job.watch("improves: val_loss")
    assert job.told("failed", "consolidated") == [("failed", 5), ("consolidated", 10)]


def test_a_full_disk_is_said_once_and_tried_again_later(job):
    """Nothing is begun while the pause lasts; in the end it succeeds; the one that waits is not lost."""
    job.save(5)
    job.outcomes = {5: [Outcome(error=errors.CapacityError("5 bytes needed, 0 free"))] * 3 + [GOOD]}
    job.last_look = 60
    watch = job.watch(retry_s=(10.0, 20.0))
    assert job.told("full", "consolidated") == [("full", 5), ("consolidated", 5)]
    assert len(job.started) == 4
    assert watch.failed is None


def test_a_store_that_fails_is_tried_again_with_longer_pauses_and_others_go_on(job):
    """A child that broke off is begun again; meanwhile the next checkpoint has its turn."""
    job.save(5)
    job.save(10)
    job.outcomes = {5: [Outcome(error=errors.CheckpointError("its process ended by SIGKILL"))] * 2 + [GOOD]}
    job.last_look = 60
    job.watch(retry_s=(10.0, 20.0))
    assert [step for step, _, _ in job.started] == [5, 10, 5, 5]
    assert "tried again in 10 s" in job.text("failed")[0]
    assert "tried again in 20 s" in job.text("failed")[1]


def test_wrong_settings_end_the_watch(job):
    """A group that has to be named is no matter of one checkpoint: the error comes out, and nothing hidden stays."""
    job.save(5)
    job.outcomes = {5: Outcome(error=errors.ConfigError("there are two modules"))}
    with pytest.raises(errors.ConfigError, match="two modules"):
        job.watch()
    assert job.hidden() == []


def test_a_folder_that_is_not_there_yet_vanishes_and_comes_back(tmp_path):
    """It waits, says so once each time, and goes on."""
    job = Job(tmp_path / "job")
    job.save(5)
    away = tmp_path / "away"
    shutil.move(job.root, away)
    turns = {4: lambda: shutil.move(away, job.root), 30: lambda: shutil.move(job.root, away), 45: lambda: shutil.move(away, job.root)}

    def clock():
        job.now += 1.0
        turns.pop(int(job.now), lambda: None)()
        return job.now

    job.clock, job.last_look = clock, 1000
    watch = Watch(
        str(job.root), Consolidate(when="every"), start=job.start, tell=job.events.append, done=lambda found: job.done,
        tidy=job.tidied.append, wake=job.wake[0], stopped=lambda: job.now > 60, over=lambda: False, poll_s=2.0, find=job.find, clock=clock,
    )  # fmt: skip
    watch.run()
    assert job.told("absent", "back", "consolidated") == [
        ("absent", None), ("back", None), ("consolidated", 5), ("absent", None), ("back", None),
    ]  # fmt: skip
    assert "yet" in job.text("absent")[0]
    assert "any more" in job.text("absent")[1]


def test_once_does_what_is_due_now_and_returns(job):
    """One look, everything that is due, no second look; the failure stays known for the exit code."""
    for step in (5, 10, 15):
        job.save(step)
    job.outcomes = {10: Outcome(error=errors.StoreError("slow"))}
    job.at_look = {2: lambda: job.save(20)}
    watch = job.watch(once=True)
    assert [step for step, _, _ in job.started] == [5, 10, 15]
    assert job.told("over") == [("over", None)]
    assert watch.failed is None or isinstance(watch.failed, errors.StoreError)


def test_once_with_a_failure_at_last_says_so(job):
    """The newest failure that nothing made good is kept."""
    job.save(5)
    job.outcomes = {5: Outcome(error=errors.CorruptionError("truncated"))}
    assert isinstance(job.watch(once=True).failed, errors.CorruptionError)


def test_once_with_a_full_disk_ends(job):
    """Cron's next call tries again: this one ends, and knows why."""
    job.save(5)
    job.save(10)
    job.outcomes = {5: Outcome(error=errors.CapacityError("5 bytes needed, 0 free"))}
    assert isinstance(job.watch(once=True).failed, errors.CapacityError)
    assert [step for step, _, _ in job.started] == [5]
    assert "not done" in job.text("over")[0]


def test_what_is_being_read_counts_although_the_job_deleted_it(job):
    """With `improves`, the best so far is being read and gone from the folder: a worse one that comes meanwhile is not due."""
    job.save(5, val_loss=1.0)

    def long(found, path, reason):
        job.started.append((found.step, path, reason))
        job.prune(5)
        job.save(10, val_loss=2.0)
        return FakeChild(GOOD, after=10**9)

    job.start = long
    job.last_look = 8
    job.watch("improves: val_loss")
    assert job.told("due", "skipped") == [("due", 5), ("skipped", 10)]


def test_a_process_that_cannot_be_started_is_tried_again(job):
    """No memory for another process: a failure that may pass, said, and nothing stays protected for it."""
    job.save(5)
    start, job.start = job.start, None
    tries = iter([OSError(12, "Cannot allocate memory"), None])

    def begin(found, path, reason):
        error = next(tries)
        if error:
            raise error
        return start(found, path, reason)

    job.start = begin
    job.last_look = 60
    job.watch(retry_s=(5.0, 5.0))
    assert job.told("failed", "consolidated") == [("failed", 5), ("consolidated", 5)]


def test_once_without_the_folder_is_not_found(tmp_path):
    """Cron is told that there is nothing to follow."""
    job = Job(tmp_path / "job")
    job.root.rmdir()
    with pytest.raises(errors.NotFoundError, match="no folder"):
        job.watch(once=True)


def test_final_is_due_when_the_job_has_ended_and_then_the_watch_ends(job):
    """F57: the newest checkpoint, once; the watch returns by itself."""
    job.save(5)
    job.save(10)
    job.at_look = {3: lambda: setattr(job, "is_over", True)}
    job.last_look = 1000
    job.watch("final")
    assert [step for step, _, _ in job.started] == [10]
    assert job.events[-1].what == "over"


def test_without_a_change_for_long_the_job_counts_as_over(job):
    """--idle: no process to look at, only the folder."""
    job.save(5)
    job.last_look = 1000
    job.watch("final", idle_s=100.0)
    assert [step for step, _, _ in job.started] == [5]
    assert job.events[-1].what == "over"


def test_looks_without_a_change_list_nothing(job):
    """The checkpoints are listed when a folder's time has changed, and now and then; between these only times are looked at."""
    job.save(5)
    job.done = [Seen("step-5", 5, 5.0, {})]
    job.last_look = 1000
    watched = []
    wanted = watching.fingerprint
    original = job.find
    job.find = lambda root: watched.append(job.now) or original(root)
    job.watch()
    polls = job.now / 4
    assert wanted(str(job.root)) == wanted(str(job.root))
    assert 2 <= len(watched) <= polls / 3


def test_the_end_kills_what_runs_and_tidies(job):
    """Asked to end in the middle: the child is killed, links are gone, the partial export is swept."""
    job.save(5)
    job.start = lambda found, path, reason: job.children.append(FakeChild(GOOD, after=10**9)) or job.children[-1]
    job.last_look = 1000
    job.watch()
    assert job.children[0].killed
    assert job.told("due", "ended") == [("due", 5), ("ended", None)]
    assert job.hidden() == []
    assert [one.step for one in job.tidied[-1]] == [5]


def test_what_a_dead_watch_left_is_swept_and_a_living_ones_is_not(tmp_path):
    """Links of a watch that was killed go at the next start; those that another living one reads stay."""
    job = Job(tmp_path / "job")
    job.save(5)
    [found] = job.find(str(job.root))
    dead, living = protecting.Protection(str(job.root)), protecting.Protection(str(job.root))
    left, read = dead.protect(found).path, living.protect(found).path
    os.close(dead._lock)  # as the kernel does when a process is killed
    assert protecting.sweep(str(job.root)) == 1
    assert not os.path.exists(left)
    assert os.path.exists(read)
    living.close()
    assert job.hidden() == []


def test_automodel_is_protected_by_a_symbolic_link_beside_the_step(tmp_path):
    """NeMo AutoModel spares what a link in its checkpoint folder points at; ours says relative where, and goes again, also after a kill."""
    job = Job(tmp_path / "job", kind="automodel")
    folder = job.save(5)
    [found] = job.find(str(job.root))
    protection = protecting.Protection(str(job.root))
    protected = protection.protect(found)
    assert protected == (str(folder), "symlink", "")
    [link] = [job.root / name for name in job.hidden() if (job.root / name).is_symlink()]
    assert os.readlink(link) == "step-5"
    assert protecting.sweep(str(job.root)) == 0
    assert link.is_symlink()
    os.close(protection._lock)
    assert protecting.sweep(str(job.root)) == 2
    assert job.hidden() == []


@pytest.mark.parametrize("kind", ["dcp", "automodel"])
def test_a_checkpoint_deleted_while_it_is_protected_is_file_not_found(tmp_path, kind):
    """Half a set of links, or a link that leads nowhere, is not left, and not read."""
    job = Job(tmp_path / "job", kind)
    job.save(5)
    [found] = job.find(str(job.root))
    job.prune(5)
    protection = protecting.Protection(str(job.root))
    with pytest.raises(FileNotFoundError):
        protection.protect(found)
    protection.close()
    assert job.hidden() == []


def test_a_folder_one_may_not_write_to_is_read_unprotected(job, monkeypatch):
    """A read-only mount is no error: it is said that nothing keeps the job's pruning away."""
    monkeypatch.setattr(protecting.os, "makedirs", _refuse)
    job.save(5)
    job.watch()
    assert job.told("unprotected", "consolidated") == [("unprotected", None), ("consolidated", 5)]
    assert "not permitted" in job.text("unprotected")[0]


def found_at(path, kind="dcp"):
    return Found(str(path), kind, 1, True, "", 1.0, {}, path.name)


def test_releasing_one_protection_leaves_the_others(tmp_path):
    """Of checkpoints that were protected while an older protection ended, each has links of its own."""
    protection = protecting.Protection(str(tmp_path))
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    a, b, c = (found_at(tmp_path / name) for name in "abc")
    protection.protect(a)
    protection.protect(b)
    protection.release(a)
    there = protection.protect(c).path
    protection.release(b)
    assert (Path(there) / "weights").read_text() == "c"
    protection.close()


@pytest.mark.parametrize("roots", [("", "jobs/one"), ("jobs/one", "")])
def test_a_sweep_leaves_the_links_of_the_living(tmp_path, roots):
    """A link beside a checkpoint stays when somebody else sweeps who looks at a folder further up, or further down."""
    checkpoint = tmp_path / "jobs/one/epoch_0_step_1"
    checkpoint.mkdir(parents=True)
    mine, theirs = (str(tmp_path / root) for root in roots)
    protection = protecting.Protection(mine)
    protection.protect(found_at(checkpoint, "automodel"))
    [link] = [name for name in os.listdir(checkpoint.parent) if name.startswith(protecting.HIDDEN + "-")]
    protecting.sweep(theirs, [str(checkpoint.parent)])
    assert (checkpoint.parent / link).is_symlink()
    os.close(protection._lock)  # its process is gone, and the lock with it
    assert protecting.sweep(theirs, [str(checkpoint.parent)])
    assert not (checkpoint.parent / link).is_symlink()


@pytest.mark.parametrize(("code", "printed", "said", "expected"), [
    (0, '{"path": "/x", "step": 5}', "", {"path": "/x", "step": 5}),
    (14, '{"error": {"name": "CapacityError", "message": "no room", "kind": "full", "hint": "free some"}}', "", (errors.CapacityError, "no room")),
    (-9, "", "half a line", (errors.CheckpointError, "its process ended by SIGKILL: half a line (is there enough memory?)")),
    (3, "[1]", "Traceback\nbroken\n\n", (errors.CheckpointError, "its process ended with code 3: broken")),
    (0, "not JSON", "", (errors.CheckpointError, "its process ended with code 0")),
])  # fmt: skip
def test_how_a_child_ended(code, printed, said, expected):
    """What it exported, its own error again, or how it broke off."""
    found = Outcome.of(code, printed, said)
    if isinstance(expected, dict):
        assert (found.exported, found.error) == (expected, None)
    else:
        kind, text = expected
        assert found.exported is None
        assert type(found.error) is kind
        assert text in str(found.error)
