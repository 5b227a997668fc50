"""Preemption: one rank's choice of a tier, and many ranks' agreement on a step under every interleaving, with clocks and worlds made of dictionaries."""

from __future__ import annotations

import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import HashStore

from everystep.errors import AgentError, ConfigError, StoreError
from everystep.trainer.pending import Report
from everystep.trainer.preemption import Preemption, Watch
from everystep.trainer.signals import Ear
from everystep.trainer.world import World

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
GIB = 1 << 30


class Clock:
    """Seconds that pass when somebody waits."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pause(self, seconds):
        self.now += seconds


class Save:
    """A save that is sealed and committed at given times."""

    def __init__(self, clock, *, sealed_s=0.1, durable_s=None, error=None):
        self.clock, self.error = clock, error
        self.sealed_at = clock.now + sealed_s
        self.durable_at = float("inf") if durable_s is None else clock.now + durable_s

    @property
    def report(self):
        if self.error is not None:
            return Report(step=7, outcome="failed", tier="", nbytes=0, timings_s={}, reason=str(self.error))
        tier = "disk" if self.clock.now >= self.durable_at else "memory" if self.clock.now >= self.sealed_at else ""
        return Report(step=7, outcome=tier or "staging", tier=tier, nbytes=GIB, timings_s={})

    def wait(self, tier=None, timeout_s=None):
        if self.error is not None:
            raise self.error
        at = self.sealed_at if tier == "memory" else self.durable_at
        until = self.clock.now + timeout_s
        self.clock.now = max(self.clock.now, min(at, until))
        if at > until:
            raise TimeoutError(f"not at {tier}")
        return self.report


class Store:
    """The keys of a job."""

    def __init__(self):
        self.keys, self.counts, self.gone = {}, {}, False
        self.operations = 0

    def turn(self):
        self.operations += 1
        if self.gone:
            raise AgentError("the job's store cannot be reached", kind="store-gone")


class Rank:
    """What one rank sees of the store; ``turn`` may let others go first."""

    def __init__(self, store, rank, size, turn=lambda: None):
        self.store, self.rank, self.size, self.turn = store, rank, size, turn

    def _go(self):
        self.turn()
        self.store.turn()

    def put(self, key, value):
        self._go()
        assert isinstance(value, bytes)
        self.store.keys[key] = value

    def look(self, key):
        self._go()
        return self.store.keys.get(key)

    def offer(self, key, value):
        self._go()
        return self.store.keys.setdefault(key, value)

    def add(self, key, amount):
        self._go()
        self.store.counts[key] = self.store.counts.get(key, 0) + amount
        return self.store.counts[key]


def watching(preemption=None, clock=None, **options):
    """A watch that hears what ``send`` says, and touches no handler of this process."""
    clock = clock or Clock()
    watch = Watch(preemption or Preemption(), clock=clock, pause=getattr(clock, "pause", lambda _: None), **options)
    watch._ear._listens = True
    return watch, clock


def send(watch, number=TERM):
    """A signal arrives."""
    watch._ear._arrived(number, None)


def learn(watch, seconds):
    """A GiB took so long to the disk, after a second in the queue."""
    watch.learn(Report(step=1, outcome="disk", tier="disk", nbytes=GIB, timings_s={"queue": 1.0, "total": 1.0 + seconds}))


# -- one rank -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("grace_s", "known_s", "really_s", "tier", "durable", "waited_s"),
    [
        (5, 1.0, 1.0, "disk", True, 1.0),
        (5, 20.0, 20.0, "memory", False, 0.1),
        (5, 1.0, 20.0, "memory", False, 4.5),  # the disk has become slower: the grace less a tenth
        (30, 1.0, 1.0, "disk", True, 1.0),
        (30, 15.0, 15.0, "disk", True, 15.0),
        (30, 20.0, 20.0, "memory", False, 0.1),  # 20 s and half a write before it do not go into 28
        (30, 60.0, 1.0, "memory", False, 0.1),
        (120, 60.0, 60.0, "disk", True, 60.0),
        (120, 100.0, 100.0, "memory", False, 0.1),
        (120, 10.0, 300.0, "memory", False, 118.0),
        (5, None, 1.0, "disk", True, 1.0),  # nothing known: tried
        (5, None, 20.0, "memory", False, 4.5),
    ],
)
def test_the_best_tier_that_the_grace_allows(grace_s, known_s, really_s, tier, durable, waited_s, caplog):
    """F53: disk where it fits, else memory; what is reported is what is so, and the waiting ends before the grace does."""
    watch, clock = watching(Preemption(grace_s=grace_s))
    if known_s is not None:
        learn(watch, known_s)
    assert watch.due(6) is None
    send(watch)
    request = watch.due(7)
    save = Save(clock, durable_s=really_s)
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit) as ended:
        watch.finish(request, save)
    assert ended.value.code == 0
    report = watch.report
    assert (report.step, report.signal, report.tier, report.durable, report.grace_s) == (7, "SIGTERM", tier, durable, grace_s)
    assert report.waited_s == pytest.approx(waited_s)
    assert durable == (save.report.tier == "disk") == (not report.reason)
    assert len(caplog.messages) == 1
    assert ("step 7 is on disk" in caplog.text) == durable
    assert ("in memory and not on disk" in caplog.text) != durable
    assert watch.drain_s(None) == (0.0 if not durable else pytest.approx(grace_s - min(2, grace_s / 10) - waited_s))


def test_the_grace_is_measured_from_the_signal():
    """F53: what the step took after the signal is gone from the grace; a second signal does not begin a new one."""
    watch, clock = watching(Preemption(grace_s=30))
    learn(watch, 10.0)
    send(watch)
    clock.now += 20
    send(watch)
    request = watch.due(7)
    assert watch.left_s(request) == pytest.approx(8.0)
    assert request.tier == "memory"
    clock.now += 100
    assert watch.left_s(request) == 0.0


@pytest.mark.parametrize("options", [{"outlives": False}, {"preemption": Preemption(memory=False)}])
def test_memory_that_ends_with_the_process_is_no_tier(options):
    """Where the agent would not go on, the disk is waited for to the end of the grace although it will hardly be in time."""
    watch, clock = watching(**options)
    learn(watch, 1000.0)
    send(watch)
    request = watch.due(1)
    assert request.tier == "disk"
    with pytest.raises(SystemExit):
        watch.finish(request, Save(clock, durable_s=20.0))
    assert watch.report.durable


def test_an_agent_inside_the_process_is_drained_as_long_as_it_lives():
    """close() does not cut short the only one who writes."""
    watch, clock = watching(outlives=False)
    send(watch)
    assert watch.drain_s(None) is None
    with pytest.raises(SystemExit):
        watch.finish(watch.due(1), Save(clock, durable_s=500.0))
    assert watch.drain_s(None) is None


def test_a_failed_save_is_not_called_saved(caplog):
    """F55: exit code 1, no tier, and the reason in the one line."""
    watch, clock = watching()
    send(watch)
    with pytest.raises(SystemExit) as ended:
        watch.finish(watch.due(7), Save(clock, error=StoreError("disk gone", kind="io")))
    assert ended.value.code == 1
    assert (watch.report.tier, watch.report.durable) == ("", False)
    assert "step 7 is not saved: disk gone" in caplog.text
    assert watch.drain_s(None) == 0.0


def test_usr1_saves_once_and_goes_on(caplog):
    """SIGUSR1: one save for each signal, no exit, quiet when it went well, and close() waits as usual."""
    watch, clock = watching()
    send(watch, USR1)
    send(watch, USR1)
    request = watch.due(3)
    assert not request.exit
    report = watch.finish(request, Save(clock, durable_s=1.0))
    assert (report.signal, report.durable) == ("SIGUSR1", True)
    assert not caplog.records
    assert watch.due(4) is None
    assert watch.drain_s(None) is None
    send(watch, USR1)
    assert watch.due(5) is not None


def test_a_signal_during_the_save_is_served_by_the_next_one():
    """What comes after the copy may have begun is not taken for served; SIGTERM goes before SIGUSR1 and serves both."""
    watch, clock = watching()
    send(watch, USR1)
    request = watch.due(3)
    clock.now += 0.5
    send(watch)
    watch.finish(request, Save(clock, durable_s=1.0))
    send(watch, USR1)
    request = watch.due(4)
    assert (request.exit, request.signal) == (True, "SIGTERM")
    with pytest.raises(SystemExit):
        watch.finish(request, Save(clock, durable_s=1.0))
    assert watch.due(5) is None


def test_without_exit_the_program_goes_on():
    """exit=False: SIGTERM is a save, once."""
    watch, clock = watching(Preemption(exit=False))
    send(watch)
    assert watch.finish(watch.due(3), Save(clock, durable_s=1.0)).durable
    assert watch.due(4) is None
    assert watch.drain_s(12.0) == 12.0


def test_close_without_another_save_is_bounded_by_the_grace():
    """A loop that ends by itself after the signal does not wait for the disk beyond the grace."""
    watch, clock = watching(Preemption(grace_s=30))
    assert watch.drain_s(None) is None
    send(watch)
    clock.now += 10
    assert watch.drain_s(None) == pytest.approx(18.0)
    assert watch.drain_s(5.0) == 5.0
    clock.now += 100
    assert watch.drain_s(None) == 0.0


def test_nothing_is_watched_by_default():
    """Without a Preemption no handler is installed and no store is looked at."""
    store, before = Store(), signal.getsignal(TERM)
    watch = Watch(None)
    watch.install()
    watch.join(Rank(store, 0, 4))
    assert watch.due(1) is None
    assert watch.drain_s(None) is None
    assert signal.getsignal(TERM) is before
    assert store.operations == 0
    watch.remove()


@pytest.mark.parametrize(
    "options",
    [{"grace_s": 0}, {"grace_s": float("nan")}, {"grace_s": float("inf")}, {"grace_s": "30"}, {"grace_s": True}, {"signals": (signal.SIGKILL,)},
     {"signals": ("SIGNONE",)}, {"save_signals": (4711,)}, {"signals": (TERM,), "save_signals": (TERM,)}],
)  # fmt: skip
def test_nonsense_is_refused(options):
    """ConfigError says which option."""
    with pytest.raises(ConfigError) as error:
        Preemption(**options)
    assert error.value.key in options


def test_signals_may_be_named():
    """Names, numbers and signal.Signals are the same; one needs no tuple."""
    assert Preemption(signals=["SIGTERM", 15, TERM], save_signals="SIGUSR2") == Preemption(signals=(TERM,), save_signals=(signal.SIGUSR2,))


# -- handlers -----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def usr2():
    """SIGUSR2 with a handler that lists what it gets; restored afterwards."""
    got = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGUSR2, before)


def test_handlers_chain_and_go(usr2):
    """The handler that was there is called with every signal, also after ours is gone, and is back in its place."""
    before = signal.getsignal(signal.SIGUSR2)
    ear = Ear((signal.SIGUSR2,), lambda: 5.0)
    ear.install()
    assert signal.getsignal(signal.SIGUSR2) is not before
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert usr2 == [signal.SIGUSR2] * 2
    assert ear.earliest((signal.SIGUSR2,)) == (signal.SIGUSR2, 5.0)
    ear.remove()
    ear.remove()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_two_watches_may_go_in_any_order(usr2):
    """The lower of two handlers that is taken away first leaves the chain whole, and both are gone in the end."""
    before = signal.getsignal(signal.SIGUSR2)
    first, second = Ear((signal.SIGUSR2,), lambda: 1.0), Ear((signal.SIGUSR2,), lambda: 2.0)
    first.install()
    second.install()
    first.remove()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert first.earliest((signal.SIGUSR2,)) is None
    assert second.earliest((signal.SIGUSR2,)) == (signal.SIGUSR2, 2.0)
    second.remove()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert usr2 == [signal.SIGUSR2] * 2
    signal.signal(signal.SIGUSR2, before)


def test_an_ignored_signal_stays_ignored(usr2, caplog):
    """SIG_IGN is somebody's will: it is left, with a warning that says so."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    ear = Ear((signal.SIGUSR2,), lambda: 1.0)
    ear.install()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    assert "SIGUSR2 is ignored in this process, and is not watched" in caplog.text
    ear.remove()


def test_other_threads_cannot_install(usr2, caplog):
    """In a thread nothing is installed, with a warning; nothing breaks when it is removed there."""
    before = signal.getsignal(signal.SIGUSR2)
    ear = Ear((signal.SIGUSR2,), lambda: 1.0)
    thread = threading.Thread(target=lambda: (ear.install(), ear.remove()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert "main thread" in caplog.text


def test_removed_in_another_thread_it_lets_signals_through(usr2):
    """A close() in a thread cannot put handlers back; ours then passes everything on and notes nothing."""
    ear = Ear((signal.SIGUSR2,), lambda: 1.0)
    ear.install()
    thread = threading.Thread(target=ear.remove)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert usr2 == [signal.SIGUSR2]
    assert ear.earliest((signal.SIGUSR2,)) is None


# -- many ranks ---------------------------------------------------------------------------------------------------------------
class _Over(BaseException):
    """The test is over for a rank that waits for a dead one."""


class Job:
    """Threads as ranks. One runs at a time, up to its next look at the store; ``choices`` say who is next.

    A rank enters its call n when all others have ended their call n - ``skew``, as gradients that are summed over all ranks make it; one
    that has died never does. Signals arrive between two looks at the store.
    """

    def __init__(self, size, *, calls, skew, choices, signals, dead=None, preemption=None, clock=None, slow=()):
        self.size, self.calls, self.skew, self.dead = size, calls, skew, dead or {}
        self.store, self.clock = Store(), clock or Clock()
        self.done = [0] * size
        self.saved = [[] for _ in range(size)]
        self.reports = [[] for _ in range(size)]
        self.codes = [None] * size
        self.errors = []
        self.first_seen = None
        self._choices, self._signals = iter(choices), sorted(signals, reverse=True)
        self._main = threading.Semaphore(0)
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._ready = [lambda: True for _ in range(size)]
        self._ended = [False] * size
        self.watches = []
        for rank in range(size):
            watch = Watch(preemption or Preemption(), clock=self.clock, pause=lambda s, rank=rank: self._paused(rank, s))
            watch._ear._listens = True
            watch.join(Rank(self.store, rank, size, turn=lambda rank=rank: self._yield(rank)))
            if rank in slow:
                learn(watch, 1e6)
            self.watches.append(watch)
        self._polled = set()
        self._over = False

    def _yield(self, rank, ready=lambda: True):
        self._ready[rank] = ready
        self._main.release()
        self._turns[rank].acquire()
        if self._over:
            raise _Over

    def _paused(self, rank, seconds):
        """Time passes when every rank that lives has been paused: nobody else could have done anything meanwhile."""
        self._polled.add(rank)
        alive = {other for other in range(self.size) if not self._ended[other]}
        if self._polled >= {other for other in alive if self._ready[other]() or other == rank}:
            self._polled.clear()
            self.clock.now += seconds

    def _train(self, rank):
        watch = self.watches[rank]
        try:
            for call in range(1, self.calls + 1):
                if self.dead.get(rank) == call:
                    return
                self._yield(rank, lambda call=call: all(self.done[other] >= call - self.skew for other in range(self.size) if other != rank))
                noted = bool(watch._ear._noted)
                request = watch.due(10 * call)
                if self.first_seen is None and noted:
                    self.first_seen = call
                if request is not None:
                    self.saved[rank].append((call, request.step, request.exit, request.tier))
                    save = Save(self.clock, sealed_s=0.0, durable_s=0.0 if request.tier == "disk" else None)
                    self.reports[rank].append(watch.finish(request, save))
                self.done[rank] = call
        except _Over:
            return
        except SystemExit as ended:
            self.codes[rank] = ended.code
            early = [other for other in range(self.size) if self.saved[other] != self.saved[rank]]
            if early and not self.dead:
                self.errors.append(AssertionError(f"rank {rank} has gone before ranks {early} had saved"))
            self.reports[rank].append(watch.report)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._ended[rank] = True
            self._main.release()

    def run(self):
        """Until every rank has ended; returns those that wait for one that will never come."""
        threads = [threading.Thread(target=self._train, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
            self._main.acquire()
        turn = 0
        while True:
            ready = [rank for rank in range(self.size) if not self._ended[rank] and self._ready[rank]()]
            if not ready:
                break
            while self._signals and self._signals[-1][0] <= turn:
                _, rank, number = self._signals.pop()
                if not self._ended[rank]:
                    send(self.watches[rank], number)
            choice = next(self._choices, None)
            rank = ready[(turn if choice is None else choice) % len(ready)]
            turn += 1
            assert turn < 20_000, "no end"
            self._turns[rank].release()
            self._main.acquire()
        stuck = [rank for rank in range(self.size) if not self._ended[rank]]
        self._over = True
        for rank in stuck:
            self._turns[rank].release()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return stuck


jobs = st.fixed_dictionaries({
    "size": st.integers(2, 4),
    # Runs of one rank, for otherwise nobody gets far ahead.
    "choices": st.lists(st.tuples(st.integers(0, 3), st.integers(1, 25)), max_size=40).map(lambda runs: [r for r, n in runs for _ in range(n)]),
})  # fmt: skip
arrivals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), st.sampled_from([TERM, TERM, USR1])), min_size=1, max_size=5)


def arriving(given_signals, size):
    return [(turn, rank % size, number) for turn, rank, number in given_signals]


@given(job=jobs, signals=arrivals)
@example(  # a rank that is to end joins another one's SIGUSR1 first
    job={"size": 2, "choices": [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]}, signals=[(0, 0, USR1), (6, 1, TERM)]
)
def test_all_ranks_save_at_the_same_call(job, signals):
    """Whatever the interleaving and whoever is signalled, also twice: all save the same steps, exit together with 0, and nobody waits in vain."""
    running = Job(**job, calls=40, skew=1, signals=arriving(signals, job["size"]))
    assert running.run() == []
    assert running.saved == [running.saved[0]] * job["size"]
    assert running.saved[0]
    assert all(report.durable and not report.reason for reports in running.reports for report in reports)
    ends = any(number == TERM for _, _, number in signals)
    assert running.codes == [0 if ends else None] * job["size"]
    assert [entry[2] for entry in running.saved[0]] == [False] * (len(running.saved[0]) - ends) + [True] * ends
    assert len(running.saved[0]) <= len(signals)
    # Two calls after the first rank that saw its signal: no second round where every step synchronises.
    assert running.saved[0][0][0] <= running.first_seen + 2


@given(job=jobs, signals=arrivals, skew=st.integers(2, 6))
def test_ranks_far_apart_agree_as_well(job, signals, skew):
    """Hosts that run ahead by several steps need more rounds, and still save the same steps without a deadlock."""
    running = Job(**job, calls=120, skew=skew, signals=arriving(signals, job["size"]))
    assert running.run() == []
    assert running.saved == [running.saved[0]] * job["size"]
    assert running.saved[0]
    assert all(report.durable and not report.reason for reports in running.reports for report in reports)


@given(job=jobs, slow=st.integers(0, 3))
def test_one_slow_disk_decides_for_all(job, slow):
    """F53: the tier is the one that every rank can reach."""
    slow %= job["size"]
    running = Job(**job, calls=20, skew=1, signals=[(0, 0, TERM)], slow={slow})
    assert running.run() == []
    assert {entry[3] for saved in running.saved for entry in saved} == {"memory"}
    assert all(code == 0 for code in running.codes)
    assert all(not reports[-1].durable and "the disk would take" in reports[-1].reason for reports in running.reports)


@given(job=jobs, dead_at=st.integers(1, 8), turn=st.integers(0, 30))
def test_a_dead_rank_holds_nobody_for_longer_than_the_grace(job, dead_at, turn):
    """Ranks wait for one that died no longer than the grace lasts, name it, and never claim more than is so."""
    running = Job(**job, calls=30, skew=1, signals=[(turn, 0, TERM)], dead={1: dead_at}, preemption=Preemption(grace_s=5.0))
    began = running.clock.now
    stuck = running.run()
    # Those that have no step to wait for are in the training's own collective, which is not for us to end.
    assert all(running.saved[rank] == [] or running.codes[rank] is None for rank in stuck)
    assert running.clock.now - began <= 5.0
    for rank in range(job["size"]):
        if rank != 1 and running.saved[rank]:
            assert "rank 1 did not come" in running.reports[rank][-1].reason or running.reports[rank][-1].durable


def test_a_failure_on_one_rank_is_known_to_all():
    """A step of which one rank has no part is not called saved by the others, and all exit with 1."""
    store, clock = Store(), Clock()
    watches = []
    for rank in range(2):
        watch, _ = watching(clock=clock)
        watch.join(Rank(store, rank, 2))
        watches.append(watch)
    send(watches[1])
    learn(watches[0], 1e6)
    requests = [[watch.due(step) for watch in watches] for step in (1, 2, 3)]
    assert requests[:2] == [[None, None]] * 2
    codes = []
    for watch, request, error in zip(watches, requests[2], (StoreError("no space", kind="disk-full"), None), strict=True):
        assert (request.tier, request.signal) == ("memory", "SIGTERM")
        store.counts["preemption/0/done"] = 1  # the other one is done as well: it runs at the same time
        with pytest.raises(SystemExit) as ended:
            watch.finish(request, Save(clock, error=error))
        codes.append(ended.value.code)
    assert codes == [1, 1]
    assert [watch.report.tier for watch in watches] == ["", ""]
    assert "rank 0: no space" in watches[1].report.reason


def test_a_rank_that_does_not_come_is_named():
    """The wait ends with the grace, and the report says for whom it was."""
    store, clock = Store(), Clock()
    first, _ = watching(Preemption(grace_s=10), clock=clock)
    second, _ = watching(clock=clock)
    first.join(Rank(store, 0, 2))
    second.join(Rank(store, 1, 2))
    send(first)
    for step in (1, 2):
        assert first.due(step) is None
        assert second.due(step) is None
    request = first.due(3)
    with pytest.raises(SystemExit):
        first.finish(request, Save(clock, durable_s=None))
    assert "rank 1 did not come" in first.report.reason
    assert not first.report.durable
    assert clock.now - 1000.0 < 10.0


def test_a_store_that_is_gone_stops_nothing(caplog):
    """When rank 0 has ended, with the store, save goes on, with one warning; a wait at the end ends."""
    store, clock = Store(), Clock()
    watch, _ = watching(clock=clock)
    watch.join(Rank(store, 1, 2))
    store.gone = True
    send(watch)
    assert watch.due(1) is None
    assert watch.due(2) is None
    assert len(caplog.messages) == 1
    store.gone = False
    other, _ = watching(clock=clock)
    other.join(Rank(store, 0, 2))
    requests = [(watch.due(step), other.due(step))[0] for step in (3, 4, 5, 6)]
    request = next(one for one in requests if one is not None)
    store.gone = True
    with pytest.raises(SystemExit):
        watch.finish(request, Save(clock, durable_s=0.5))
    assert watch.report.durable


def test_a_save_costs_one_look():
    """Without a signal a call of save looks at the store once; with one rank never."""
    store = Store()
    watch, _ = watching()
    watch.join(Rank(store, 3, 8))
    for step in range(100):
        assert watch.due(step) is None
    assert store.operations == 100
    watch.join(World.alone())
    send(watch)
    assert watch.due(200) is not None
    assert store.operations == 100


def test_the_job_s_real_store():
    """The agreement over torch's own store: the same target, counted, and saved by all ranks, one of which is to end after all."""
    store, clock = HashStore(), Clock()
    worlds = [World(store, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(World.begin, worlds))
    watches = []
    for world in worlds:
        world.glance = world.look  # type: ignore[method-assign] # what comes late is another test's matter
        watch, _ = watching(clock=clock)
        watch.join(world)
        watches.append(watch)
    assert [watch.due(1) for watch in watches] == [None] * 3
    send(watches[2], USR1)
    assert [watch.due(2) for watch in watches] == [None] * 3
    send(watches[0], TERM)  # on its way to the target of the other's SIGUSR1: no round of its own is needed
    assert [watch.due(3) for watch in watches] == [None] * 3
    requests = [watch.due(4) for watch in watches]
    assert [(request.step, request.exit, request.signal) for request in requests] == [(4, True, "SIGTERM")] * 3


def test_the_same_step_again_is_no_further_call():
    """Ranks that differ in how often they save the same step still count alike."""
    store, clock = Store(), Clock()
    one, _ = watching(clock=clock)
    two, _ = watching(clock=clock)
    one.join(Rank(store, 0, 2))
    two.join(Rank(store, 1, 2))
    send(one)
    for step in (1, 2):
        assert [one.due(step), one.due(step), two.due(step)] == [None] * 3
    assert one.due(3) is not None
    assert two.due(3) is not None
