"""agent, stats, and the other commands beside a living trainer."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from everystep.repository import Repository

TRAINER = """
import sys, torch, everystep
model = torch.nn.Linear(64, 64)
ckpt = everystep.Checkpointer(sys.argv[1], cadence=everystep.Cadence(disk=False))
for step in (1, 2, 3):
    ckpt.save(step, {"model": model, "note": {"step": step}}, metrics={"loss": 1.0 / step}).wait("memory")
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def training(tmp_path):
    """A trainer in a process of its own that has three snapshots in memory and none on disk, and waits: (run, process)."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "saved\n"
    yield run, process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=20)


def kill(process):
    """SIGKILL, and wait until it is gone."""
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=20)


@pytest.mark.leaves_agent
def test_commands_see_what_is_only_in_memory(everystep, training):
    """ls, show and agent ls show snapshots that no disk has yet, and the trainer's and agent's pids."""
    run, process = training
    rows = everystep("ls", run, "--json").json["checkpoints"]
    assert [row["where"] for row in rows] == [["memory"]] * len(rows)
    assert rows[-1]["step"] == 3
    assert rows[-1]["newest"]
    shown = everystep("show", run, "3", "--json").json
    assert (shown["read_from"], shown["step"], shown["values"]["note.step"]) == ("memory", 3, 3)
    assert {group["group"]: group["elements"] for group in shown["groups"]} == {"model": 64 * 64 + 64}
    [agent] = everystep("agent", "ls", "--json").json["agents"]
    assert agent["run"] == str(run)
    assert agent["trainers"] == [process.pid]
    assert max(snapshot["step"] for snapshot in agent["snapshots"]) == 3
    assert "everystep" in " ".join(psutil.Process(agent["pid"]).cmdline())
    table = everystep("agent", "ls").stdout
    assert str(agent["pid"]) in table
    assert str(process.pid) in table


@pytest.mark.leaves_agent
def test_stats_come_from_the_agent_and_then_from_the_record(everystep, training):
    """While the agent lives its figures are shown; after it has ended those that it recorded."""
    run, process = training
    document = everystep("stats", run, "--json").json
    assert document["source"] == "agent"
    assert document["phases"]["stage"]["count"] == 3
    assert sum(count for _, count in document["phases"]["stage"]["buckets"]) == 3
    assert "stage" in everystep("stats", run).stdout
    assert everystep("agent", "stats", run, "--json").json["pid"] == document["pid"]
    process.communicate("", timeout=30)  # the trainer ends cleanly, and so does its agent
    psutil.wait_procs([psutil.Process(document["pid"])] if psutil.pid_exists(document["pid"]) else [], timeout=10)
    recorded = everystep("stats", run, "--json").json
    assert recorded["source"] == "record"
    assert recorded["phases"]["write"]["count"] >= 1
    assert "last record" in everystep("stats", run).stdout


@pytest.mark.leaves_agent
def test_stop_makes_the_newest_snapshot_durable_first(everystep, training):
    """After `agent stop` the newest step is on disk and verifies, and the agent is gone."""
    run, process = training
    pid = everystep("agent", "ls", "--json").json["agents"][0]["pid"]
    kill(process)
    stopped = everystep("agent", "stop", run, "--json")
    assert (stopped.code, stopped.json["pid"], stopped.json["newest_durable_step"]) == (0, pid, 3)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=10)
    rows = everystep("ls", run, "--json").json["checkpoints"]
    assert [(row["step"], row["where"]) for row in rows if row["newest"]] == [(3, ["disk"])]
    assert everystep("verify", run, "3").code == 0
    assert everystep("agent", "stop", run).code == 10


@pytest.mark.leaves_agent
def test_stop_with_force_loses_what_is_in_memory(everystep, training):
    """--force ends the agent at once: nothing reaches the disk, and the answer said so by having no durable step."""
    run, process = training
    pid = everystep("agent", "ls", "--json").json["agents"][0]["pid"]
    found = everystep("agent", "stop", run, "--force", "--json").json
    assert (found["forced"], found["newest_durable_step"]) == (True, None)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=10)
    kill(process)
    assert everystep("ls", run, "--json").json["checkpoints"] == []


@pytest.mark.leaves_agent
@pytest.mark.parametrize("by", ["pid", "run_id", "path"])
def test_stop_takes_what_ls_shows(everystep, training, by):
    """An agent whose run was replaced by another one at its path is stopped by its process id, its run id, or that path."""
    run, process = training
    [agent] = everystep("agent", "ls", "--json").json["agents"]
    kill(process)
    run.rename(run.with_name("moved"))
    if by == "path":
        Repository.open(str(run), create=True)
    target = run if by == "path" else agent[by]
    stopped = everystep("agent", "stop", target, "--force", "--json")
    assert (stopped.code, stopped.json["pid"], stopped.json["run"]) == (0, agent["pid"], str(run))
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(agent["pid"]).wait(timeout=10)
    assert everystep("agent", "ls", "--json").json["agents"] == []
    missing = everystep("agent", "stop", target)
    assert missing.code == 10
    assert len(missing.stderr.splitlines()) == 1


@pytest.mark.leaves_agent
@pytest.mark.parametrize("words", [["verify"], ["verify", "3"], ["verify", "--all"], ["diff", "3", "latest"], ["pin", "3"]], ids=" ".join)
def test_a_step_that_is_in_memory_only_is_called_so(everystep, training, words):
    """Commands that need the disk say that the step is there, but in memory."""
    run, _ = training
    answer = everystep(words[0], run, *words[1:], "--json")
    assert (answer.code, answer.json["error"]["kind"], answer.json["error"]["step"]) == (10, "memory-only", 3)
    assert "step 3 is in memory only" in answer.stderr
    assert "nothing has been committed" not in answer.stderr


def test_agent_in_the_foreground_takes_a_run_and_ends_by_sigterm(everystep, shell, tmp_path):
    """`agent run` makes the run, is found by others, refuses a second one, and ends with 0 at SIGTERM."""
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-m", "everystep.cli", "agent", "run", str(run)], stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "serves" in line:
                break
        [agent] = everystep("agent", "ls", "--json").json["agents"]
        assert (agent["pid"], agent["run"], agent["trainers"]) == (process.pid, str(run), [])
        assert everystep("ls", run).code == 0
        assert shell("agent", "run", run).code == 11
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)
    assert everystep("agent", "ls", "--json").json["agents"] == []


def test_no_agent_is_said_plainly(everystep, made):
    """Where no agent runs, ls of agents is empty, and stats and stop are not found."""
    assert everystep("agent", "ls").stdout == "no agent runs on this node\n"
    assert everystep("agent", "ls", "--json").json == {"agents": []}
    for words in (["agent", "stats", made.path], ["agent", "stop", made.path], ["stats", made.path]):
        assert everystep(*words).code == 10


@pytest.mark.leaves_agent
def test_an_agent_that_does_not_answer_is_no_obstacle(everystep, training):
    """F35: with its agent stopped in its tracks, ls still lists the run's disk, and says that the agent does not answer."""
    run, _ = training
    agent = psutil.Process(everystep("agent", "ls", "--json").json["agents"][0]["pid"])
    agent.suspend()
    try:
        answer = everystep("ls", run, "--json")
    finally:
        agent.resume()
    assert answer.code == 0
    assert answer.json["checkpoints"] == []
    assert "does not answer" in answer.stderr


def test_checkpoints_of_the_real_trainer_can_be_looked_at(everystep, tmp_path):
    """What Checkpointer wrote: show has its groups and values, diff its changes, verify finds it whole."""
    import torch

    import everystep as package

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer, "rng": package.RNG(), "note": {"shape": (1, 2), "tags": {"a"}}}
    run = tmp_path / "run"
    before = model.weight.detach().clone()
    with package.Checkpointer(run, keep=package.Keep(last=None)) as ckpt:
        ckpt.save(1, state, sync=True)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        ckpt.save(2, state, sync=True, metrics={"loss": float("nan")})
    shown = everystep("show", run, "2", "--tensors", "--json").json
    names = {item["name"]: item["shape"] for item in shown["tensors"]}
    assert names["model.weight"] == [3, 4]
    assert shown["metrics"] == {"loss": "nan"}
    assert (shown["values"]["note.shape[0]"], shown["values"]["note.tags[0]"]) == (1, "a")
    assert shown["values"]["optim.groups[0].betas[1]"] == 0.999
    assert shown["values"]["optim.groups[0].params"] == "[model.weight, model.bias]"
    assert not any("$" in path or path.startswith("state") for path in shown["values"])
    found = {item["name"]: item for item in everystep("diff", run, "1", "2", "--json").json["tensors"]}
    expected = (before.double() - model.weight.detach().double()).abs().max().item()
    assert found["model.weight"]["numbers"]["max_abs"] == pytest.approx(expected, rel=1e-12)
    assert found["model.weight"]["numbers"]["count"] == int((before != model.weight).sum())
    assert any(item["what"] == "only-in-b" for name, item in found.items() if name.startswith("optim."))
    assert everystep("verify", run, "--all").code == 0
    for words in (["ls"], ["show"], ["show", "--tensors"]):
        assert everystep(words[0], run, *words[1:]).code == 0


def test_sparkline_keeps_the_gaps_and_is_never_wider_than_its_limit():
    """Bars stand at their durations: empty buckets between filled ones are blank, one among many is seen, and the ends bracket the data."""
    from everystep.cli import stats

    def upper(place):
        return 1e-6 * 2 ** (place / 4)

    low, bars, high = stats.sparkline([[upper(9), 1000], [upper(13), 1]])
    assert bars == "█   ▁"
    assert (low, high) == (stats.output.seconds(upper(8)), stats.output.seconds(upper(13)))
    assert len(stats.sparkline([[upper(1), 1], [upper(100), 1]])[1]) <= stats.MAX_BARS
    assert stats.sparkline([]) == ("", "", "")
