"""The agent consolidates by the schedule: what is due, what waits, what is held, what gives way, and the end of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))  # tests are no package

from exporting_fakes import Fake, eventually

from everystep import protocol
from everystep.agent import consolidating, exporting, messages
from everystep.agent.client import AgentClient
from everystep.errors import AgentError, CapacityError, ConfigError, NotFoundError
from everystep.manifest import TensorSpec
from everystep.plan import plan_save
from everystep.policy import Cadence, Keep
from everystep.repository import CheckpointKey, Repository
from everystep.schedule import Consolidate, to_document


class Trainer:
    """Without torch: saves small checkpoints, and hears what becomes of them."""

    def __init__(self, run, consolidate=None, *, keep=None, idle_s=600.0, configured=True, url=None):
        self.run = str(run)
        self.repository = Repository.open(self.run, create=True)
        self.settings = b"" if consolidate is None else msgspec.json.encode(to_document(consolidate))
        self.plan = plan_save([TensorSpec("model.w", "U8", (100,), "model")], aliases={})
        self.events, self.changed = [], threading.Condition()
        self.client = AgentClient.connect(run_url=self.run, run_id=self.repository.run_id, in_process=True, idle_s=idle_s, on_event=self.on_event)
        if configured:
            self.attempt = self.repository.start_attempt(parent=self.newest(), now=time.time()).attempt
            self.client.configure(attempt=self.attempt, cadence=Cadence(disk=False), keep=keep or Keep(last=None), memory_budget=None,
                                  consolidate=self.settings)  # fmt: skip

    def newest(self):
        keys = self.repository.lineage()
        return keys[0] if keys else None

    def on_event(self, event):
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def told(self, what, step, timeout_s=10):
        def there():
            return next((event for event in self.events if (event.what, event.step) == (what, step)), None)

        with self.changed:
            assert self.changed.wait_for(there, timeout_s), (what, step, self.events)
            return there()

    def save(self, step, *, metrics=None, bound=True):
        slab = self.client.lease(self.plan, step)
        assert not isinstance(slab, messages.NoSlab), slab
        self.client.seal(slab, plan=self.plan, step=step, attempt=self.attempt, saved_at=float(step), values=b'{"a":1}', metrics=metrics or {},
                         bound=bound, pin=False, must=bound, timings_s={})  # fmt: skip
        if bound:
            self.told("committed", step)

    def counters(self):
        return self.client.stats()["counters"]

    def there(self):
        return sorted(key.step for key in self.repository.keys())


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = Fake(tmp_path / "fake")
    monkeypatch.setenv(consolidating.COMMAND, made.command)
    return made


@pytest.fixture
def trainer(tmp_path):
    made = []

    def start(when=None, **options):
        consolidate = None if when is None else when if isinstance(when, Consolidate) else Consolidate(when=when)
        made.append(Trainer(tmp_path / "run", consolidate, **options))
        return made[-1]

    yield start
    for one in made:
        if one.client.alive:
            with contextlib.suppress(AgentError):
                one.client.stop(force=True)
        one.client.close()


def test_each_commit_is_consolidated_in_a_process_of_its_own(trainer, fake, monkeypatch):
    """``every``: one process for each checkpoint, with the run, the key and the settings; in a session of its own, and quiet (F4)."""
    monkeypatch.setenv("RANK", "3")
    one = trainer(Consolidate(when="every", dtype="bf16", keep=2))
    for step in (1, 2):
        one.save(step)
        event = one.told("exported", step)
        assert event.note.startswith(f"step {step} is consolidated in ")
    assert fake.targets() == ["000000000001-0001", "000000000002-0001"]
    for call in fake.calls():
        assert call["run"] == one.run
        assert {"--json", "--background", "--parent"} <= set(call["options"])
        assert call["options"][call["options"].index("--settings") + 1] == "-"
        assert call["options"][-1]
        assert (call["settings"]["dtype"], call["settings"]["keep"], call["settings"]["when"]) == ("bf16", 2, "every")
        assert call["session"] == call["pid"] != os.getsid(0)
        assert (call["omp"], call["rank"], call["cuda"]) == ("1", None, "")
    counters = one.counters()
    assert (counters["exports_begun"], counters["exported"], counters["bytes_exported"]) == (2, 2, 14)
    assert one.client.stats()["phases"]["export"]["count"] == 2


def test_what_waits_and_what_is_read_is_held_from_retention(trainer, fake):
    """Keep(last=1): the one that is being read and the two that wait stay; when they are done they go with the next commit."""
    fake.shut()
    one = trainer("every", keep=Keep(last=1))
    one.save(1)
    assert fake.at_gate() == "000000000001-0001"
    for step in (2, 3):
        one.save(step)
    one.client.drain(timeout_s=10)
    assert one.there() == [1, 2, 3]
    fake.open()
    for step in (1, 2, 3):
        one.told("exported", step)
    one.save(4)
    eventually(lambda: one.there() == [4], f"{one.there()}")
    assert fake.steps()[:3] == [1, 2, 3]


def test_older_ones_give_way_to_newer_ones(trainer, fake):
    """While one is being consolidated at most two wait: of five more the newest two, and the others are counted and forgotten like any other."""
    fake.shut()
    one = trainer("every", keep=Keep(last=1))
    one.save(1)
    fake.at_gate()
    for step in range(2, 7):
        one.save(step)
    eventually(lambda: one.there() == [1, 5, 6], f"{one.there()}")
    fake.open()
    one.told("exported", 6)
    assert fake.steps() == [1, 5, 6]
    assert one.counters()["exports_given_up"] == 3


def test_what_is_due_for_its_number_does_not_give_way(trainer, fake):
    """``{every: 2}`` of steps: all of them are consolidated, however many wait, and no others."""
    fake.shut()
    one = trainer({"every": 2}, keep=Keep(last=1))
    one.save(2)
    fake.at_gate()
    for step in range(3, 13):
        one.save(step)
    eventually(lambda: one.there() == [2, 4, 6, 8, 10, 12], f"{one.there()}")
    fake.open()
    one.told("exported", 12)
    assert fake.steps() == [2, 4, 6, 8, 10, 12]


def test_a_metric_that_comes_late_is_decided_about(trainer, fake):
    """``improves``: the loss of step 1 comes after its commit, that of step 2 is no better, that of step 3 is."""
    one = trainer({"improves": "loss"})
    one.save(1)
    assert fake.calls() == []
    one.client.record_metrics(step=1, attempt=1, metrics={"loss": 2.0})
    one.told("exported", 1)
    one.save(2, metrics={"loss": 3.0})
    one.save(3, metrics={"loss": 1.0})
    one.told("exported", 3)
    assert fake.steps() == [1, 3]


def test_a_metric_that_comes_before_the_commit_is_decided_about(trainer, fake):
    """Recorded while the snapshot is in memory alone: it is the checkpoint's when that is committed."""
    one = trainer({"improves": "loss"})
    one.save(1, bound=False)
    one.client.record_metrics(step=1, attempt=1, metrics={"loss": 2.0})
    one.client.drain(timeout_s=10)
    one.told("exported", 1)


def test_of_two_metrics_the_one_recorded_last_stands(trainer, fake, monkeypatch):
    """One comes while the snapshot is in memory alone, the next right after the commit, while that is decided about."""
    one = trainer({"improves": "loss"})
    decide, committed, go_on = exporting.Exporter.committed, threading.Event(), threading.Event()

    def slow(exporter, *args):
        committed.set()
        go_on.wait(10)
        decide(exporter, *args)

    monkeypatch.setattr(exporting.Exporter, "committed", slow)
    one.save(1, bound=False)
    one.client.record_metrics(step=1, attempt=1, metrics={"loss": 2.0})
    drains = threading.Thread(target=lambda: one.client.drain(timeout_s=10))
    drains.start()
    assert committed.wait(10)
    one.client.record_metrics(step=1, attempt=1, metrics={"loss": 1.0})
    go_on.set()
    drains.join(10)
    one.told("exported", 1)
    one.client.record_metrics(step=1, attempt=1, metrics={"other": 1.0})  # whatever was to be recorded before has been
    assert one.repository.metrics(CheckpointKey(1, 1)) == {"loss": 1.0, "other": 1.0}


@pytest.mark.parametrize(("word", "message"), [("fails", "no space"), ("breaks", "exit status 3: broken")])
def test_a_failure_is_told_and_the_next_one_is_tried(trainer, fake, word, message):
    """F57: a full disk, or a process that breaks: counted, noted, told to the trainer with its reason; saves go on and the next export is made."""
    fake.say(word)
    one = trainer("every")
    one.save(1)
    event = one.told("not exported", 1)
    assert message in event.note
    assert event.failed.name == ("CapacityError" if word == "fails" else "AgentError")
    assert message in one.client.stats()["notes"]["exports"]
    fake.unsay(word)
    one.save(2)
    one.told("exported", 2)
    assert "notes" not in one.client.stats()
    assert one.counters()["exports_failed"] == 1
    assert one.there() == [1, 2]


def test_a_command_that_is_not_there_is_a_failure_like_any_other(trainer, monkeypatch):
    """The process cannot be started: told, counted, and nothing else suffers."""
    monkeypatch.setenv(consolidating.COMMAND, "/nowhere/everystep")
    one = trainer("every")
    one.save(1)
    assert "cannot be started" in one.told("not exported", 1).note
    one.save(2)
    assert one.there() == [1, 2]


# -- the end of a run -------------------------------------------------------------------------------------------------------------------
def test_what_cannot_be_started_for_whatever_reason_does_not_stop_the_next(trainer, fake, monkeypatch):
    """A command with a quote too many, a machine without another thread: that export fails, and the next is made."""
    one = trainer("every")
    monkeypatch.setenv(consolidating.COMMAND, "no 'end")
    one.save(1)
    assert "cannot be started" in one.told("not exported", 1).note
    monkeypatch.setenv(consolidating.COMMAND, fake.command)
    start = threading.Thread.start

    def refuses(thread):
        if thread.name == "everystep-consolidation":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as only_here:
        only_here.setattr(threading.Thread, "start", refuses)
        one.save(2)
        assert "can't start new thread" in one.told("not exported", 2).note
    one.save(3)
    one.told("exported", 3)


def test_final_is_made_when_the_run_ends(trainer, fake):
    """``final``: nothing while it runs; the newest when the trainer says that it is done, which waits for it; the agent ends with the goodbye."""
    one = trainer("final")
    one.save(1)
    one.save(2)
    assert fake.calls() == []
    found = one.client.ending("done", timeout_s=10)
    assert (found.complete, found.error) == (True, "")
    assert fake.steps() == [2]
    assert one.client._ask(messages.Bye(), messages.Done).ending


def test_an_end_that_is_told_while_others_are_answered_is_decided_about_first(trainer, fake, monkeypatch):
    """The thread of the exports is answering when the trainer says that it ends: that one is not told that there is nothing to do."""
    made, armed, came, go_on = [], threading.Event(), threading.Event(), threading.Event()
    init = exporting.Exporter.__init__

    def clock():
        if armed.is_set() and sys._getframe(1).f_code.co_name == "_answer":
            armed.clear()
            came.set()
            go_on.wait(10)
        return time.monotonic()

    def first(exporter, server):
        made.append(exporter)
        init(exporter, server, clock=clock)

    monkeypatch.setattr(exporting.Exporter, "__init__", first)
    one = trainer("final")
    one.save(1)
    armed.set()
    made[0]._wake()
    assert came.wait(10)
    answers = []
    ending = threading.Thread(target=lambda: answers.append((one.client.ending("done", timeout_s=20), fake.steps())))
    ending.start()
    eventually(lambda: made[0]._waiters, "nobody waits")
    go_on.set()
    ending.join(20)
    assert [(found.complete, steps) for found, steps in answers] == [(True, [1])]


def test_who_does_not_wait_leaves_it_to_the_agent(trainer, fake):
    """A trainer that goes at once: the agent lives on, makes the export, and then ends by itself."""
    fake.shut()
    one = trainer("final")
    one.save(1)
    found = one.client.ending("done", timeout_s=0)
    assert not found.complete
    assert not one.client._ask(messages.Bye(), messages.Done).ending
    one.client.close()
    assert fake.at_gate() == "000000000001-0001"
    visitor = AgentClient.connect(run_url=one.run, run_id=one.repository.run_id, role="visitor", spawn=False)
    fake.open()
    visitor._reader.join(10)  # the connection ends with the agent
    assert not visitor.alive
    assert fake.steps() == [1]
    assert not (Path(one.run) / "exports" / "waiting.json").exists()


def test_waiting_ends_with_the_time(trainer, fake):
    """A trainer that has no more time is told what is not done."""
    fake.shut()
    one = trainer("final")
    one.save(1)
    began = time.monotonic()
    found = one.client.ending("done", timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert not found.complete
    assert "step 1" in found.error
    fake.at_gate()


@pytest.mark.parametrize("because", ["failed", None])
def test_a_run_that_failed_has_no_final(trainer, fake, because):
    """A trainer that raised, or was lost: it is not known whether the run is over, and nothing is consolidated as its end (F22)."""
    one = trainer("final", idle_s=0.2)
    one.save(1)
    if because:
        assert one.client.ending(because, timeout_s=10)
        one.client.close()
    else:
        one.client._channel.shut()
        one.client.close(bye=False)
    eventually(lambda: not list(Path(os.environ["EVERYSTEP_RUNTIME_DIR"]).glob("*.sock")), "the agent did not end")
    assert fake.calls() == []


def test_final_after_a_preemption_when_nobody_comes_back(trainer, fake):
    """Preempted, and no trainer within ``idle_s``: the run is over, the export is made, and the agent ends."""
    one = trainer("final", idle_s=0.3)
    one.save(1)
    began = time.monotonic()
    assert not one.client.ending("preempted", timeout_s=10).complete
    assert time.monotonic() - began < 5
    one.client.close()
    eventually(lambda: fake.steps() == [1], "no export")
    eventually(lambda: not list(Path(os.environ["EVERYSTEP_RUNTIME_DIR"]).glob("*.sock")), "the agent did not end")
    assert fake.steps() == [1]


def test_no_final_for_a_run_that_goes_on_elsewhere(trainer, fake):
    """The trainer was preempted and goes on with another node's agent: when this one has waited long enough, it is not the end of the run."""
    one = trainer("final", idle_s=0.3)
    one.save(1)
    assert not one.client.ending("preempted", timeout_s=0.0).complete
    one.repository.start_attempt(parent=one.newest(), now=time.time())
    one.client.close()
    eventually(lambda: not list(Path(os.environ["EVERYSTEP_RUNTIME_DIR"]).glob("*.sock")), "the agent did not end")
    assert fake.calls() == []


def test_no_final_for_a_run_that_was_preempted_and_goes_on(trainer, fake):
    """Preempted and resumed on the same agent: no export of the middle; one at its end."""
    one = trainer("final")
    one.save(1)
    one.client.ending("preempted", timeout_s=0)
    one.client.close(bye=False)
    two = trainer("final")
    two.save(2)
    assert fake.calls() == []
    assert two.client.ending("done", timeout_s=10).complete
    assert fake.steps() == [2]


def test_a_trainer_that_comes_in_time_takes_the_end_back(trainer, fake):
    """The end waits behind another export when a trainer comes: it is not made, and is made later, of what is the newest then."""
    fake.shut()
    one = trainer("final")
    one.save(1)
    one.client.consolidate("best", step=-1, attempt=0)
    fake.at_gate()
    one.client.ending("done", timeout_s=0)
    one.client.close()
    two = trainer("final")
    fake.open()
    two.save(2)
    assert two.client.ending("done", timeout_s=10).complete
    assert fake.targets() == ["best", "000000000002-0002"]


def test_all_ranks_of_the_node_have_to_end(tmp_path, fake):
    """Two ranks: the end of one is not the end of the run; when both have ended both are answered."""
    run = str(tmp_path / "run")
    repository = Repository.open(run, create=True)
    settings = msgspec.json.encode(to_document(Consolidate()))
    ranks = [AgentClient.connect(run_url=run, run_id=repository.run_id, in_process=True) for _ in range(2)]
    plan = plan_save([TensorSpec("model.w", "U8", (100,), "model")], aliases={})
    for rank, client in enumerate(ranks):
        client.configure(attempt=1, cadence=Cadence(disk=False), keep=Keep(), memory_budget=None, rank=rank, ranks=(0, 1), world=2, job="j",
                         consolidate=settings)  # fmt: skip
    repository.start_attempt(parent=None, now=time.time(), world=2)
    for client in ranks:
        client.seal(client.lease(plan, 1), plan=plan, step=1, attempt=1, saved_at=1.0, values=b'{"a":1}', metrics={}, bound=True, pin=False, timings_s={})
    assert ranks[0].drain(timeout_s=10).complete
    answers = []
    first = threading.Thread(target=lambda: answers.append(ranks[0].ending("done", timeout_s=20)))
    first.start()
    ranks[1].stats()
    assert fake.calls() == []
    assert ranks[1].ending("done", timeout_s=20).complete
    first.join(10)
    assert answers[0].complete
    assert fake.steps() == [1]
    for client in ranks:
        client.close()


def test_the_first_ranks_settings_count(tmp_path, fake):
    """Ranks whose models differ name other assets; the agent goes by its first rank, in whatever order they come."""
    run = str(tmp_path / "run")
    repository = Repository.open(run, create=True)
    repository.start_attempt(parent=None, now=time.time(), world=2)
    ranks = [AgentClient.connect(run_url=run, run_id=repository.run_id, in_process=True) for _ in range(2)]
    plan = plan_save([TensorSpec("model.w", "U8", (100,), "model")], aliases={})
    for rank, client in enumerate(ranks):
        settings = msgspec.json.encode(to_document(Consolidate(when="every", assets=f"/assets-of-{rank}")))
        client.configure(attempt=1, cadence=Cadence(disk=False), keep=Keep(), memory_budget=None, rank=rank, ranks=(0, 1), world=2, job="j",
                         consolidate=settings)  # fmt: skip
    for client in ranks:
        client.seal(client.lease(plan, 1), plan=plan, step=1, attempt=1, saved_at=1.0, values=b'{"a":1}', metrics={}, bound=True, pin=False, timings_s={})
    assert ranks[0].drain(timeout_s=10).complete
    eventually(fake.calls, "nothing is consolidated")
    assert fake.calls()[0]["settings"]["assets"] == "/assets-of-0"
    for client in ranks:
        client.close()


def test_a_rank_does_not_wait_for_ever_for_the_others(trainer, fake, tmp_path, monkeypatch):
    """Another rank that does not end, perhaps waiting for this one, is waited for ``OTHERS_S`` and no longer."""
    monkeypatch.setattr(exporting, "OTHERS_S", 0.2)
    one = trainer("final")
    one.save(1)
    other = Trainer(one.run, configured=False)
    found = one.client.ending("done", timeout_s=20)
    assert not found.complete
    other.client.close()
    eventually(lambda: fake.steps() == [1], "the end comes when the other has gone")


# -- on demand -----------------------------------------------------------------------------------------------------------------------------
def test_on_demand_makes_the_newest_durable_and_consolidates_it(trainer, fake):
    """The newest save is what "latest" means, though nothing was bound for the disk; asked for twice at one step it is done once."""
    one = trainer()
    one.save(1, bound=False)
    tickets = {one.client.consolidate("latest", step=1, attempt=1) for _ in range(3)}
    assert len(tickets) == 1
    found = one.client.export(*tickets, timeout_s=10)
    assert found.over
    assert found.path.endswith("model-000000000001-0001")
    assert fake.steps() == [1]
    assert one.there() == [1]
    assert fake.calls()[0]["settings"] == to_document(Consolidate())


def test_on_demand_by_step_key_and_best(trainer, fake):
    """A step, a key and "best" reach the command; a failure is raised where the ticket is asked for, with its class."""
    one = trainer("never")
    one.save(1)
    one.save(2)
    for what, target in (("1", "000000000001-0001"), ("000000000002-0001", "000000000002-0001"), ("best", "best")):
        assert one.client.export(one.client.consolidate(what, step=2, attempt=1), timeout_s=10).over
        assert fake.targets()[-1] == target
    fake.say("fails")
    ticket = one.client.consolidate("2", step=3, attempt=1)
    with pytest.raises(CapacityError, match="no space"):
        one.client.export(ticket, timeout_s=10)
    with pytest.raises(ConfigError, match="names no checkpoint"):
        one.client.consolidate("newest", step=2, attempt=1)
    with pytest.raises(NotFoundError):
        one.client.export(99, timeout_s=0)


def test_a_step_on_its_way_to_disk_is_not_taken_from_an_abandoned_timeline(trainer, fake, monkeypatch):
    """The run went back to step 1; its new step 2 is asked for before it is on disk, where the old step 2 lies: the new one is waited for."""
    one = trainer("never")
    one.save(1)
    one.save(2)
    one.attempt = one.repository.start_attempt(parent=CheckpointKey(1, 1), now=time.time()).attempt
    one.client.configure(attempt=one.attempt, cadence=Cadence(disk=False), keep=Keep(last=None), memory_budget=None)
    commit, go_on, looked = Repository.commit, threading.Event(), threading.Event()

    def slow(repository, manifest):
        go_on.wait(10)
        commit(repository, manifest)

    meant = exporting.Exporter._meant

    def look(exporter, ticket, **how):
        found = meant(exporter, ticket, **how)
        looked.set()
        return found

    monkeypatch.setattr(Repository, "commit", slow)
    monkeypatch.setattr(exporting.Exporter, "_meant", look)
    one.save(2, bound=False)
    ticket = one.client.consolidate("2", step=2, attempt=one.attempt)
    assert looked.wait(10)
    go_on.set()
    assert one.client.export(ticket, timeout_s=10).over
    assert fake.targets() == ["000000000002-0002"]


def test_asking_for_what_is_under_way_answers_after_the_time(trainer, fake):
    """A ticket that is not over is told so when the time has passed."""
    fake.shut()
    one = trainer()
    one.save(1)
    ticket = one.client.consolidate("latest", step=1, attempt=1)
    fake.at_gate()
    assert not one.client.export(ticket, timeout_s=0.05).over
    fake.open()
    assert one.client.export(ticket, timeout_s=10).over


def test_nothing_to_consolidate_is_said(trainer, fake):
    """The newest of a run without a checkpoint is a NotFoundError."""
    one = trainer()
    with pytest.raises(NotFoundError):
        one.client.export(one.client.consolidate("latest", step=-1, attempt=0), timeout_s=10)


@pytest.mark.parametrize(("text", "target"), [("", "000000000002-0001"), ("1\n", "000000000001-0001"), ("best", "best")])
def test_request_file(tmp_path, trainer, fake, monkeypatch, text, target):
    """A file in the run's folder asks for the newest, or for what it names, and is gone afterwards; also without a schedule."""
    monkeypatch.setattr(exporting, "LOOK_S", 0.05)
    one = trainer()
    one.save(1)
    one.save(2)
    (tmp_path / "run" / "consolidate.request").write_text(text)
    eventually(fake.targets, "the request was not seen")
    assert fake.targets() == [target]
    assert not (tmp_path / "run" / "consolidate.request").exists()


def test_a_request_that_makes_no_sense_is_taken_and_said(tmp_path, trainer, fake, monkeypatch, caplog):
    """A word that names no checkpoint: the file goes, the log says why, and nothing is started."""
    monkeypatch.setattr(exporting, "LOOK_S", 0.05)
    one = trainer()
    one.save(1)
    request = tmp_path / "run" / "consolidate.request"
    request.write_text("the newest please")
    eventually(lambda: not request.exists(), "the request was not taken")
    eventually(lambda: "names no checkpoint" in caplog.text, caplog.text)
    assert fake.calls() == []


# -- agents that end -----------------------------------------------------------------------------------------------------------------------
def test_an_agent_that_ends_ends_its_process_and_the_next_one_goes_on(trainer, fake):
    """F24: the agent is ended in the middle of an export: its process goes with it, what was due is written down, and the next agent does it."""
    fake.shut()
    one = trainer({"every": 1})
    one.save(1)
    fake.at_gate()
    one.save(2)
    record = Path(one.run) / "exports" / "waiting.json"
    eventually(lambda: record.exists() and len(msgspec.json.decode(record.read_bytes())) == 2, "nothing written down")
    process = psutil.Process(fake.calls()[0]["pid"])
    one.client.stop(force=True)
    psutil.wait_procs([process], timeout=10)
    assert not process.is_running()
    fake.open()
    two = trainer({"every": 1})
    two.told("exported", 1)
    two.told("exported", 2)
    assert fake.steps() == [1, 1, 2]
    eventually(lambda: not record.exists(), "the record stays")


def test_what_became_due_in_the_last_moment_is_written_down(trainer, fake, monkeypatch):
    """F24: a checkpoint that is committed while the thread of the exports is at something else, right before the agent is ended, is done by the next agent."""
    fake.shut()
    one = trainer({"every": 1})
    one.save(1)
    fake.at_gate()
    answers, came, go_on = exporting.Exporter._answer, threading.Event(), threading.Event()

    def slow(exporter):
        if threading.current_thread() is exporter._thread:
            came.set()
            go_on.wait(10)
        answers(exporter)

    monkeypatch.setattr(exporting.Exporter, "_answer", slow)
    one.client.consolidate("1", step=1, attempt=one.attempt)
    assert came.wait(10)
    one.save(2)
    stopping = threading.Thread(target=lambda: one.client.stop(force=True))
    stopping.start()
    one.client._reader.join(0.3)
    go_on.set()
    stopping.join(10)
    record = Path(one.run) / "exports" / "waiting.json"
    eventually(lambda: [line["key"][:12] for line in msgspec.json.decode(record.read_bytes())] == ["000000000001", "000000000002"], "not written down")


def test_what_could_not_be_written_down_is_tried_again(trainer, fake, monkeypatch):
    """A store that fails once when what is due is written down: it is there after the next look."""
    monkeypatch.setattr(exporting, "LOOK_S", 0.2)
    fake.shut()
    one = trainer({"every": 1})
    replace, failed = type(one.repository.store).replace, threading.Event()

    def fails_once(store, key, data):
        if key.endswith("waiting.json") and not failed.is_set():
            failed.set()
            raise CapacityError("no space", key=key)
        replace(store, key, data)

    monkeypatch.setattr(type(one.repository.store), "replace", fails_once)
    one.save(1)
    eventually((Path(one.run) / "exports" / "waiting.json").exists, "it is not written down")
    assert failed.is_set()
    fake.open()


@pytest.mark.parametrize("first", ["asks", "saves"])
def test_what_a_killed_agent_had_to_do_is_taken_up_before_anything_else(trainer, fake, first):
    """F24: whatever a trainer does first with the new agent, what the one before had written down is not written over."""
    one = trainer("never")
    one.save(1)
    one.save(2)
    one.client.stop(force=True)
    one.client.close()
    record = Path(one.run) / "exports" / "waiting.json"
    record.parent.mkdir(exist_ok=True)
    record.write_bytes(msgspec.json.encode([{"key": "000000000001-0001", "reason": "every 1", "stays": True}]))
    two = trainer("never", configured=first == "saves")
    if first == "saves":
        two.told("exported", 1)
    else:
        ticket = two.client.consolidate("2", step=2, attempt=1, settings=two.settings)
        assert two.client.export(ticket, timeout_s=10).over
    assert sorted(fake.steps()) == ([1] if first == "saves" else [1, 2])


def test_who_does_not_wait_is_answered_while_the_exports_hang(trainer, fake, monkeypatch):
    """F25: the folder of the exports does not answer: a preempted trainer, and one that asks whether an export is there, hear at once."""
    hangs, at_it = threading.Event(), threading.Event()

    def history(*_args, **_options):
        at_it.set()
        hangs.wait(30)
        return []

    monkeypatch.setattr("everystep.consolidate.exports.Exports.history", history)
    one = trainer("every")
    one.save(1)
    assert at_it.wait(10)
    ticket = one.client.consolidate("latest", step=1, attempt=one.attempt)
    began = time.monotonic()
    assert not one.client.export(ticket, timeout_s=0.0).over
    assert not one.client.ending("preempted", timeout_s=0.0).complete
    assert time.monotonic() - began < 5
    hangs.set()


def test_an_idle_agent_stays_while_something_is_consolidated(trainer, fake):
    """The trainer is lost and ``idle_s`` passes: the agent ends only when what was due is done."""
    fake.shut()
    one = trainer("every", idle_s=0.2)
    one.save(1)
    fake.at_gate()
    one.client._channel.shut()
    one.client.close(bye=False)
    visitor = AgentClient.connect(run_url=one.run, run_id=one.repository.run_id, role="visitor", spawn=False)
    threading.Event().wait(0.6)
    assert visitor.alive
    fake.open()
    visitor._reader.join(10)
    assert not visitor.alive


@pytest.mark.leaves_agent
def test_killed_agent_takes_its_process_along(tmp_path, fake):
    """SIGKILL of the agent's process: the consolidation does not outlive it; and SIGUSR2 had asked for it (F25)."""
    run = str(tmp_path / "run")
    repository = Repository.open(run, create=True)
    client = AgentClient.connect(run_url=run, run_id=repository.run_id)
    plan = plan_save([TensorSpec("model.w", "U8", (100,), "model")], aliases={})
    client.configure(attempt=repository.start_attempt(parent=None, now=time.time()).attempt, cadence=Cadence(disk=False), keep=Keep(), memory_budget=None)
    client.seal(client.lease(plan, 1), plan=plan, step=1, attempt=1, saved_at=1.0, values=b'{"a":1}', metrics={}, bound=False, pin=False, timings_s={})
    fake.shut()
    os.kill(client.welcome.pid, signal.SIGUSR2)
    assert fake.at_gate() == "000000000001-0001"
    process = psutil.Process(fake.calls()[0]["pid"])
    os.kill(client.welcome.pid, signal.SIGKILL)
    psutil.wait_procs([process], timeout=10)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    client.close(bye=False)


# -- the protocol --------------------------------------------------------------------------------------------------------------------------
def test_occupied_agent_does_not_end_by_itself():
    """The last trainer's goodbye and the idle time end no agent that is occupied; a signal and a stop do."""
    def agent():
        state = protocol.AgentState(idle_s=10.0)
        for event in (
            protocol.Connected(conn=1, request=1, role="trainer", pid=7),
            protocol.Configured(conn=1, request=2, attempt=1, newest_attempt=0, persist_when_idle=False, budget=None, idle_s=10.0),
            protocol.Occupied(occupied=True),
            protocol.ByeSaid(conn=1, request=3),
        ):
            state, actions = protocol.transition(state, event, now=0.0)
        assert actions == (protocol.Accept(1, 3, ending=False),)
        return protocol.transition(state, protocol.ConnectionClosed(conn=1), now=0.0)

    state, actions = agent()
    assert actions == ()
    state, actions = protocol.transition(state, protocol.Ticked(), now=100.0)
    assert actions == ()
    _, actions = protocol.transition(state, protocol.Occupied(occupied=False), now=100.0)
    assert [type(action) for action in actions] == [protocol.Exit]
    state, _ = agent()
    _, actions = protocol.transition(state, protocol.Signalled(grace_s=5.0), now=1.0)
    assert [type(action) for action in actions] == [protocol.Exit]


def test_newest_wanted_is_bound():
    """Whoever wants the newest on disk has it persisted, and is answered by nobody."""
    state = protocol.AgentState()
    for event in (
        protocol.Connected(conn=1, request=1, role="trainer", pid=7),
        protocol.Configured(conn=1, request=2, attempt=1, newest_attempt=0, persist_when_idle=False, budget=None, idle_s=10.0),
        protocol.LeaseAsked(conn=1, request=3, plan_id="a", nbytes=10, step=1, room=1000),
        protocol.Sealed(conn=1, request=4, slab=1, step=1, attempt=1, bound=False, room=1000),
    ):
        state, _ = protocol.transition(state, event, now=0.0)
    _, actions = protocol.transition(state, protocol.NewestWanted(), now=0.0)
    assert [type(action) for action in actions] == [protocol.StartPersist]


def test_settings_that_are_not_understood_are_refused(tmp_path):
    """A schedule from another version, or none at all: ConfigError at the start, and no attempt is spoiled."""
    run = str(tmp_path / "run")
    repository = Repository.open(run, create=True)
    client = AgentClient.connect(run_url=run, run_id=repository.run_id, in_process=True)
    for settings in (b"{", b'{"when":"sometimes"}', b'{"colour":1}'):
        with pytest.raises(ConfigError):
            client.configure(attempt=1, cadence=Cadence(), keep=Keep(), memory_budget=None, consolidate=settings)
    client.configure(attempt=1, cadence=Cadence(), keep=Keep(), memory_budget=None)
    client.close()
    assert CheckpointKey(1, 1) not in repository.keys()
