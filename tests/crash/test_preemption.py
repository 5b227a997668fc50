"""Signals in real processes: what a preempted trainer says of its last step is what lies in the run's folder."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

import everystep
from everystep.repository import Repository

TRAINER = """
import faulthandler, json, logging, os, signal, sys
faulthandler.dump_traceback_later(100, exit=True)
import torch
import everystep

def say(**what):
    print(json.dumps(what), flush=True)

class Bell:
    def __init__(self, ring, at):
        self.ring, self.at = ring, at
    def state_dict(self):
        self.ring("save")
        return dict(self.at)
    def load_state_dict(self, state):
        pass

def train(path, events, options):
    logging.basicConfig(filename=f"{path}.log", level=logging.INFO, force=True)
    at, calls = {"step": 0}, []
    def ring(where):
        for name in events.get(f"{where}@{at['step']}", []):
            os.kill(os.getpid(), getattr(signal, name))
    class Loud(torch.optim.SGD):
        def step(self, *args):
            ring("optimizer")
            return super().step(*args)
    if events.get("chain"):
        signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = Loud(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optimizer, "bell": Bell(ring, at)}
    ckpt = everystep.Checkpointer(path, cadence=everystep.Cadence(disk=False), keep=everystep.Keep(last=None), idle_s=1.0,
                                  preemption=everystep.Preemption(**options))
    try:
        with ckpt:
            for step in range(1, 1 + events.get("steps", 12)):
                at["step"] = step
                optimizer.zero_grad()
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()
                ring("before")
                if events.get("slow") == step:  # as if the disk were known to take minutes
                    ckpt._watch._disk = (1.0, 300)
                pending = ckpt.save(step, state)
                ring("after")
                if step in events.get("tell", []):
                    pending.wait("memory")
                    say(step=step)
                    sys.stdin.readline()
    finally:
        report = ckpt.preempted
        say(report=None if report is None else vars(report), weight=model.weight.sum().item(), calls=calls, step=at["step"],
            restored=[signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGUSR1)])

before = signal.getsignal(signal.SIGTERM)
for path, events, options in json.loads(sys.argv[1]):
    try:
        train(path, events, options)
        say(code=None)
    except SystemExit as ended:
        say(code=ended.code)
        if len(sys.argv) > 2:
            raise
    signal.signal(signal.SIGTERM, before)
"""

PLACES = {
    "before the save": ({"before@5": ["SIGTERM"]}, 5),
    "in the middle of the save": ({"save@5": ["SIGTERM"]}, 6),
    "after the save": ({"after@5": ["SIGTERM"]}, 6),
    "in optimizer.step": ({"optimizer@5": ["SIGTERM"]}, 5),
    "twice": ({"optimizer@5": ["SIGTERM", "SIGTERM"]}, 5),
    "again in the save that serves it": ({"before@5": ["SIGTERM"], "save@5": ["SIGTERM", "SIGUSR1"]}, 5),
    "at the first step": ({"before@1": ["SIGTERM"]}, 1),
}
OTHERS = {
    "chain": ({"chain": True, "optimizer@3": ["SIGTERM", "SIGTERM"]}, {}),
    "usr1": ({"optimizer@4": ["SIGUSR1"], "save@7": ["SIGUSR1", "SIGUSR1"], "steps": 10}, {}),
    "slow": ({"slow": 5, "before@5": ["SIGTERM"]}, {"grace_s": 20.0}),
}


class Outcome:
    """What a trainer left: the code it would have exited with, its last words, its log, and its run's folder."""

    def __init__(self, run: Path, said: list[str]) -> None:
        self.run = run
        self.log = Path(f"{run}.log").read_text()
        self.last, self.code = json.loads(said[0]), json.loads(said[1])["code"]
        self.report = self.last["report"]


def environment(folder: Path) -> dict[str, str]:
    folder.mkdir(mode=0o700, exist_ok=True)
    return {**os.environ, "EVERYSTEP_RUNTIME_DIR": str(folder)}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The outcome of a scenario by its name. All run in one process, one after the other, before the first test."""
    folder = tmp_path_factory.mktemp("p")
    scenarios = {**{name: (events, {}) for name, (events, _) in PLACES.items()}, **OTHERS}
    given = {name: (str(folder / name.replace(" ", "-")), *scenario) for name, scenario in scenarios.items()}
    done = subprocess.run([sys.executable, "-c", TRAINER, json.dumps(list(given.values()))], env=environment(folder / "s"), text=True,
                          capture_output=True, stdin=subprocess.DEVNULL, timeout=110, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    return {name: Outcome(Path(given[name][0]), said[2 * at : 2 * at + 2]) for at, name in enumerate(given)}


def on_disk(path: Path) -> list[int]:
    """Steps whose every byte verifies."""
    repository = Repository.open(str(path))
    return sorted(key.step for key in repository.lineage() if not any(wrong for _, _, wrong in repository.verify(key)))


@pytest.mark.parametrize("place", PLACES)
def test_sigterm_saves_and_exits_with_0(outcome, place):
    """F53: wherever it comes, the next save is on disk, whatever the cadence, the exit code is 0, and the report and the log are right."""
    found, step = outcome[place], PLACES[place][1]
    assert found.code == 0, found.log
    assert (found.report["step"], found.report["signal"], found.report["tier"], found.report["durable"]) == (step, "SIGTERM", "disk", True)
    assert found.last["step"] == step
    assert on_disk(found.run) == [step]
    assert f"SIGTERM: step {step} is on disk" in found.log
    assert everystep.load(found.run)["model"]["weight"].sum().item() == found.last["weight"]
    assert found.last["restored"] == [True, True]


def test_chained_handlers_are_called(outcome):
    """A handler of the program sees every signal, and is back when the checkpointer is closed."""
    found = outcome["chain"]
    assert found.code == 0, found.log
    assert found.last["calls"] == [signal.SIGTERM] * 2
    assert found.report["durable"]
    assert found.last["restored"] == [False, True]


def test_sigusr1_saves_and_goes_on(outcome):
    """The steps are on disk although the cadence leaves them out, training goes on to its end, and two signals in one save are one more save."""
    found = outcome["usr1"]
    assert found.code is None, found.log
    assert found.last["step"] == 10
    assert (found.report["step"], found.report["signal"], found.report["durable"]) == (8, "SIGUSR1", True)
    assert on_disk(found.run) == [4, 8, 10]  # the last one by close()
    assert "training goes on" in found.log


def test_memory_when_the_disk_is_too_slow(outcome):
    """F53: with too little grace for the disk the trainer leaves at once; the report says memory, and the agent makes it durable afterwards."""
    found = outcome["slow"]
    assert found.code == 0, found.log
    assert (found.report["step"], found.report["tier"], found.report["durable"]) == (5, "memory", False)
    assert found.report["waited_s"] < 10
    assert "in memory and not on disk" in found.log
    assert "is on disk" not in found.log
    agents = [process for process in psutil.process_iter(["cmdline"]) if str(found.run) in (process.info["cmdline"] or [])]
    _, alive = psutil.wait_procs(agents, timeout=30)  # it ends a second after its trainer, when everything is on disk
    assert not alive
    assert on_disk(found.run) == [5]
    assert everystep.load(found.run)["model"]["weight"].sum().item() == found.last["weight"]


def test_signals_from_outside_while_training(tmp_path):
    """A scheduler's two signals at any moment do what one does."""
    given = [(str(tmp_path / "run"), {"tell": [3], "steps": 100_000}, {})]
    with subprocess.Popen([sys.executable, "-c", TRAINER, json.dumps(given), "really"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:  # fmt: skip
        assert json.loads(process.stdout.readline()) == {"step": 3}
        process.stdin.write("go on\n")
        process.stdin.flush()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    report = json.loads(out.splitlines()[0])["report"]
    assert report["durable"]
    assert on_disk(tmp_path / "run") == [report["step"]]


def test_the_report_does_not_run_ahead_of_the_disk(tmp_path, monkeypatch):
    """F53, F55: a commit that hangs longer than the grace is not reported as one; without an agent close() still waits for it."""
    gate, real = threading.Event(), Repository.commit

    def commit(self, *args, **options):
        gate.wait(60)
        return real(self, *args, **options)

    monkeypatch.setattr(Repository, "commit", commit)
    state = {"weight": torch.arange(8.0)}
    with everystep.Checkpointer(tmp_path / "run", agent=False, preemption=everystep.Preemption(grace_s=0.5)) as ckpt:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            ckpt.save(1, state)
        assert ended.value.code == 0
        assert (ckpt.preempted.tier, ckpt.preempted.durable) == ("memory", False)
        assert ckpt.preempted.waited_s < 0.6
        assert on_disk(tmp_path / "run") == []
        gate.set()
    assert on_disk(tmp_path / "run") == [1]


def test_a_save_that_fails_is_reported_so(tmp_path, monkeypatch):
    """Nothing reached any tier: exit code 1, and neither report nor log claim anything."""

    def none_free(self, plan, step):
        raise everystep.CapacityError("no memory for a slab", kind="memory")

    monkeypatch.setattr("everystep.agent.client.AgentClient.lease", none_free)
    with everystep.Checkpointer(tmp_path / "run", agent=False, preemption=everystep.Preemption()) as ckpt:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            ckpt.save(1, {"weight": torch.arange(8.0)})
        assert ended.value.code == 1
        assert (ckpt.preempted.tier, ckpt.preempted.durable) == ("", False)
        assert "no memory for a slab" in ckpt.preempted.reason
        with pytest.raises(everystep.CheckpointError):
            ckpt.close()


FORKING = """
import os, signal, sys
from everystep.trainer.signals import Ear
ear = Ear((signal.SIGTERM,), lambda: 0.0)
ear.install()
child = os.fork()
if child == 0:
    signal.pause()
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, ear.earliest((signal.SIGTERM,)))
"""


def test_workers_that_are_forked_die_as_ever():
    """A pool or a loader ends its workers with SIGTERM: they must not take it for a preemption."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.strip() == "True None", done.stderr


RANK = """
import faulthandler, os, signal, sys
faulthandler.dump_traceback_later(60, exit=True)
import torch, torch.distributed as dist
from everystep.trainer.pending import Report
from everystep.trainer.preemption import Preemption, Watch
from everystep.trainer.world import World

class Save:
    def __init__(self, step):
        self.report = Report(step=step, outcome="disk", tier="disk", nbytes=1, timings_s={})
    def wait(self, tier=None, timeout_s=None):
        return self.report

dist.init_process_group("gloo")
rank = dist.get_rank()
watch = Watch(Preemption())
watch.install()
world = World.of(None)
world.begin()
watch.join(world)
saved = []
try:
    for step in range(1, 1000):
        dist.all_reduce(torch.ones(4))
        if step == 7 and rank == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGUSR1)
        if step == 15 and rank == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGTERM)
        request = watch.due(step)
        if request is not None:
            saved.append((step, request.signal))
            print(rank, saved, flush=True)
            watch.finish(request, Save(step))
    sys.exit(9)
finally:
    dist.destroy_process_group()  # else gloo's own thread may abort the process once the interpreter ends
"""


@pytest.mark.parametrize(("usr1", "term"), [(0, 2), (1, 0)])
def test_ranks_save_the_same_steps_and_leave_together(tmp_path, free_port, usr1, term):
    """Real ranks with a signal at one of them: all save the same two steps, and all exit with 0 although rank 0 holds the store."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = []
    for rank in range(3):
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
        ranks.append(subprocess.Popen([sys.executable, str(script), str(tmp_path), str(usr1), str(term)], env=environ, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE))  # fmt: skip
    outputs = [process.communicate(timeout=90) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], outputs
    said = [out.splitlines()[-1].partition(" ")[2] for out, _ in outputs]
    assert len(set(said)) == 1, said
    saves = ast.literal_eval(said[0])
    # These steps take no time: which ones are agreed on depends on when the others hear of it; a SIGTERM on the way to a save joins it.
    assert [name for _, name in saves] in (["SIGUSR1", "SIGTERM"], ["SIGTERM"])
    assert saves[-1][0] > 15
    assert all("did not come" not in err and "could not be asked" not in err for _, err in outputs)


@pytest.fixture
def free_port():
    """A TCP port that nobody has."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
