"""The facade and consolidation: the end of a run, requests, what is bound for its number, and the model's own configuration."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))  # tests are no package

from exporting_fakes import Fake, eventually

import everystep
from everystep.agent import consolidating
from everystep.errors import CapacityError, ConfigError, NotFoundError
from everystep.repository import Repository
from everystep.trainer.consolidating import settings_of


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(tmp_path / "fake")
    monkeypatch.setenv(consolidating.COMMAND, made.command)
    return made


@pytest.fixture(params=[True, False], ids=["agent", "in-process"])
def agent(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def state_of(width: int = 4) -> dict[str, Any]:
    model = nn.Linear(width, width)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}


def committed(run: Path) -> list[int]:
    return sorted(key.step for key in Repository.open(str(run)).keys())


def test_close_makes_the_final_export(tmp_path: Path, fake: Fake, agent: bool, caplog: pytest.LogCaptureFixture) -> None:
    """``final``: nothing while it trains, the last step when it is closed, which waits for it, and the agent is gone then."""
    state = state_of()
    with caplog.at_level(logging.INFO, "everystep"), everystep.Checkpointer(tmp_path / "run", agent=agent, consolidate={"when": "final"}) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state)
        ckpt.wait()
        assert fake.calls() == []
    assert fake.steps() == [3]
    assert fake.calls()[0]["settings"]["when"] == "final"
    assert "step 3 is consolidated in" in caplog.text


def test_an_early_stop_is_an_end(tmp_path: Path, fake: Fake) -> None:
    """Leaving the loop before its time, or the program by ``sys.exit(0)``, ends the run like any other."""

    def train(run: Path, *, leaves: bool) -> None:
        with everystep.Checkpointer(run, consolidate="final") as ckpt:
            ckpt.save(7, state_of())
            if leaves:
                sys.exit(0)

    train(tmp_path / "run1", leaves=False)
    assert fake.steps() == [7]
    with pytest.raises(SystemExit):
        train(tmp_path / "run2", leaves=True)
    assert fake.steps() == [7, 7]


@pytest.mark.parametrize("error", [ValueError("no loss"), KeyboardInterrupt(), SystemExit(1)])
def test_a_run_that_raises_has_no_final(tmp_path: Path, fake: Fake, error: BaseException) -> None:
    """F22: training that ends by an error is not over; its newest step is durable, and is consolidated when it has been resumed and ends."""

    def train() -> None:
        with everystep.Checkpointer(tmp_path / "run", consolidate="final") as ckpt:
            ckpt.save(1, state_of())
            raise error

    with pytest.raises(type(error)):
        train()
    assert committed(tmp_path / "run") == [1]
    assert fake.calls() == []
    with everystep.Checkpointer(tmp_path / "run", consolidate="final") as ckpt:
        assert ckpt.restore(state_of()) == 1
    assert fake.steps() == [1]


def test_a_finished_run_that_is_started_again_gets_its_final(tmp_path: Path, fake: Fake, agent: bool) -> None:
    """A trainer that finds everything done, restores and saves nothing, ends the run too: what a preemption left out is made up for."""
    with everystep.Checkpointer(tmp_path / "run", agent=agent) as ckpt:
        ckpt.save(5, state_of())
    assert fake.calls() == []
    with everystep.Checkpointer(tmp_path / "run", agent=agent, consolidate="final") as ckpt:
        assert ckpt.restore(state_of()) == 5
    assert fake.steps() == [5]


def test_a_preempted_run_has_its_final_when_it_ends(tmp_path: Path, fake: Fake) -> None:
    """SIGTERM in the middle: exit 0 within the grace and no export; resumed on the same agent and ended: one, of the last step."""
    options: dict[str, Any] = {"consolidate": "final", "preemption": everystep.Preemption(grace_s=20)}

    def train() -> None:
        with everystep.Checkpointer(tmp_path / "run", **options) as ckpt:
            ckpt.save(1, state_of())
            os.kill(os.getpid(), signal.SIGTERM)
            ckpt.save(2, state_of())

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 0
    assert fake.calls() == []
    with everystep.Checkpointer(tmp_path / "run", **options) as ckpt:
        assert ckpt.restore(state_of()) == 2
        ckpt.save(3, state_of())
    assert fake.steps() == [3]


@pytest.mark.leaves_agent
def test_close_need_not_wait(tmp_path: Path, fake: Fake) -> None:
    """``wait=False``: close returns while the agent works on."""
    fake.shut()
    with everystep.Checkpointer(tmp_path / "run", consolidate=everystep.Consolidate(wait=False)) as ckpt:
        ckpt.save(1, state_of())
    assert fake.at_gate() == "000000000001-0001"
    fake.open()


def test_close_waits_where_nobody_would_go_on(tmp_path: Path, fake: Fake) -> None:
    """Without an agent of its own the process has to stay: ``wait=False`` is not heeded."""
    with everystep.Checkpointer(tmp_path / "run", agent=False, consolidate=everystep.Consolidate(wait=False)) as ckpt:
        ckpt.save(1, state_of())
    assert fake.steps() == [1]


def test_close_does_not_fail_for_an_export(tmp_path: Path, fake: Fake, agent: bool, caplog: pytest.LogCaptureFixture) -> None:
    """F57: what cannot be consolidated is in the log; the checkpoints are safe, and close raises nothing."""
    fake.say("fails")
    with everystep.Checkpointer(tmp_path / "run", agent=agent, consolidate="final") as ckpt:
        ckpt.save(1, state_of())
    assert committed(tmp_path / "run") == [1]
    assert "step 1 is not consolidated: no space" in caplog.text


@pytest.mark.leaves_agent
def test_close_waits_no_longer_than_it_may(tmp_path: Path, fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """A time for close is one for all that it does; what is left to the agent is in the log."""
    fake.shut()
    ckpt = everystep.Checkpointer(tmp_path / "run", consolidate="final")
    ckpt.save(1, state_of(), sync=True)
    ckpt.close(timeout_s=0.3)
    assert "not waited for: step 1" in caplog.text


@pytest.mark.leaves_agent
def test_a_signal_ends_the_wait_of_close(tmp_path: Path, fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """SIGTERM while close waits for the last export: the grace is not spent on it, and the agent goes on."""
    fake.shut()
    ckpt = everystep.Checkpointer(tmp_path / "run", consolidate="final", preemption=everystep.Preemption(grace_s=60))
    ckpt.save(1, state_of(), sync=True)

    def preempt() -> None:
        fake.at_gate()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=preempt).start()
    began = time.monotonic()
    ckpt.close(timeout_s=40)
    assert time.monotonic() - began < 20
    assert "not waited for: step 1" in caplog.text
    fake.open()
    eventually(lambda: fake.steps() == [1], "the agent has stopped too")


def test_training_goes_on_while_a_checkpoint_is_consolidated(tmp_path: Path, fake: Fake) -> None:
    """F35: a consolidation that does not end holds up no save, no commit and no restore; what is due meanwhile comes after it."""
    fake.shut()
    state = state_of()
    with everystep.Checkpointer(tmp_path / "run", keep=everystep.Keep(last=1), consolidate={"when": "every"}) as ckpt:
        ckpt.save(1, state, sync=True)
        fake.at_gate()
        for step in range(2, 6):
            assert ckpt.save(step, state, sync=True).report.outcome == "disk"
        assert ckpt.latest() == 5
        fake.open()
    assert fake.steps() == [1, 4, 5]


def test_on_demand(tmp_path: Path, fake: Fake, agent: bool) -> None:
    """The newest save, though it is in memory alone; its folder; also after close; a failure with its class; and nothing before a save."""
    state = state_of()
    ckpt = everystep.Checkpointer(tmp_path / "run", agent=agent, cadence=everystep.Cadence(disk=False))
    with pytest.raises(NotFoundError, match="nothing of"):
        ckpt.consolidate()
    ckpt.save(1, state)
    found = ckpt.consolidate(wait=True, timeout_s=10)
    assert found.wait() == found.path == f"{tmp_path}/run/exports/model-000000000001-0001"
    assert (found.done(), found.error, found.step) == (True, None, 1)
    with pytest.raises(ConfigError, match="names no checkpoint"):
        ckpt.consolidate("first")
    fake.say("fails")
    ckpt.save(2, state)
    with pytest.raises(CapacityError, match="no space"):
        ckpt.consolidate(2, wait=True)
    fake.unsay("fails")
    ckpt.save(3, state)
    later = ckpt.consolidate()
    ckpt.close()
    assert later.wait() == f"{tmp_path}/run/exports/model-000000000003-0001"
    assert fake.steps() == [1, 2, 3]


def test_on_demand_waits_for_as_long_as_it_is_told(tmp_path: Path, fake: Fake) -> None:
    """TimeoutError after the time; the export is made all the same."""
    fake.shut()
    with everystep.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state_of())
        pending = ckpt.consolidate()
        fake.at_gate()
        assert not pending.done()
        assert pending.path is None
        with pytest.raises(TimeoutError):
            pending.wait(0.05)
        fake.open()
        assert pending.wait(10) is not None


def test_steps_that_are_due_for_their_number_reach_the_disk(tmp_path: Path, fake: Fake) -> None:
    """``{every: 3}``: steps 3 and 6 are committed and consolidated, whatever the cadence of memory and disk is."""
    state = state_of()
    cadence = everystep.Cadence(memory=4, disk=1000)
    with everystep.Checkpointer(tmp_path / "run", cadence=cadence, keep=everystep.Keep(last=None), consolidate={"when": {"every": 3}}) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, state)
        ckpt.wait()
    assert {3, 6} <= set(committed(tmp_path / "run")) <= {3, 4, 6}
    assert fake.steps() == [3, 6]


def test_late_metrics_decide(tmp_path: Path, fake: Fake) -> None:
    """``improves``: what ``record`` tells of a step counts."""
    state = state_of()
    with everystep.Checkpointer(tmp_path / "run", keep=everystep.Keep(last=None), consolidate={"when": {"improves": "loss"}}) as ckpt:
        for step, loss in ((1, 3.0), (2, 4.0), (3, 1.0)):
            ckpt.save(step, state, sync=True)
            ckpt.record(step, {"loss": loss})
    assert fake.steps() == [1, 3]


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping, a word, a bool or the object itself; relative folders are those of the trainer; what else there is says what would be right."""
    monkeypatch.chdir(tmp_path)
    assert settings_of(None) is None
    assert settings_of("every") == everystep.Consolidate(when="every") == settings_of(True)
    found = settings_of({"when": "final", "into": "out/models", "assets": "base"})
    assert found is not None
    assert (found.into, found.assets) == (str(tmp_path / "out" / "models"), str(tmp_path / "base"))
    with pytest.raises(ConfigError, match="a list"):
        settings_of(["every"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sometimes"):
        everystep.Checkpointer(tmp_path / "run", consolidate="sometimes")
    assert not (tmp_path / "run").exists()


def llama(**more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True, **more))


@pytest.mark.parametrize("wrapped", ["plain", "compiled", "sharded"])
def test_a_transformers_model_brings_its_configuration(tmp_path: Path, fake: Fake, wrapped: str) -> None:
    """config.json and generation_config.json are written beside the exports before the first commit, with the model's own class, and named to
    the command."""
    model = llama()
    held: Any = model
    if wrapped == "compiled":
        held = torch.compile(model, backend="eager")
    elif wrapped == "sharded":  # fully_shard puts a class of its own in the place of the model's
        shard = type("FSDPModule", (), {})
        model.__class__ = type("FSDPLlamaForCausalLM", (shard, type(model)), {})
    with everystep.Checkpointer(tmp_path / "run", consolidate="every") as ckpt:
        ckpt.save(1, {"model": held}, sync=True)
    import transformers

    folder = Path(fake.calls()[0]["settings"]["assets"])
    assert folder.parent == tmp_path / "run" / "exports"
    assert folder.name.startswith(".assets-")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "generation_config.json"]
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings) == (16, 1, True)
    assert transformers.GenerationConfig.from_pretrained(folder).bos_token_id == model.generation_config.bos_token_id
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".tmp-")]


def test_configuration_of_several_models_or_of_the_users_own(tmp_path: Path, fake: Fake) -> None:
    """Of two models the one that is named is meant, and none if none is; a folder that the user names is taken as it is."""
    first, second = llama(), llama(rms_norm_eps=0.5)
    for number, options in enumerate(({}, {"group": "ema"}, {"assets": str(tmp_path)})):
        with everystep.Checkpointer(tmp_path / f"run{number}", consolidate={"when": "final", **options}) as ckpt:
            ckpt.save(1, {"model": first, "ema": second})
        assets = fake.calls()[-1]["settings"]["assets"]
        if number == 1:
            assert json.loads((Path(assets) / "config.json").read_text())["rms_norm_eps"] == 0.5
        else:
            assert assets == (None if number == 0 else str(tmp_path))


def test_what_asks_for_nothing_starts_nothing(tmp_path: Path, fake: Fake) -> None:
    """Without ``consolidate`` no process is started, no folder made, and an end is as it was."""
    with everystep.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state_of())
    assert fake.calls() == []
    assert not (tmp_path / "run" / "exports").exists()


@pytest.mark.leaves_agent
def test_waiting_for_an_export_of_an_agent_that_dies_ends(tmp_path: Path, fake: Fake) -> None:
    """F25: the agent is killed in the middle of an export: who waits for it has an AgentError, and saving goes on with another agent."""
    fake.shut()
    state = state_of()
    with everystep.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state, sync=True)
        pending = ckpt.consolidate()
        fake.at_gate()
        client = ckpt._run.client
        assert client is not None
        os.kill(client.welcome.pid, signal.SIGKILL)
        eventually(lambda: not client.alive, "the end was not seen")
        with pytest.raises(everystep.AgentError):
            pending.wait(10)
        fake.open()
        assert ckpt.save(2, state, sync=True).report.outcome == "disk"


@pytest.mark.timeout(100)
def test_what_was_trained_can_be_served(tmp_path: Path) -> None:
    """The whole way, with the real command: a transformers model is trained, ends, and ``from_pretrained`` loads exports/LATEST with equal bits."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with everystep.Checkpointer(tmp_path / "run", keep=everystep.Keep(last=1), consolidate={"when": ["final", {"at": [2]}], "keep": None}) as ckpt:
        for step in range(1, 4):
            optimizer.zero_grad()
            model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
            optimizer.step()
            ckpt.save(step, {"model": model, "optim": optimizer}, sync=True)
    import transformers

    exports = tmp_path / "run" / "exports"
    served = transformers.LlamaForCausalLM.from_pretrained(exports / "LATEST")
    mine, its = model.state_dict(), served.state_dict()
    assert its.keys() == mine.keys()
    assert all(torch.equal(its[name], mine[name]) for name in mine)
    steps = [json.loads(path.read_text())["step"] for path in exports.glob("model-*/everystep.json")]
    assert sorted(steps) == [2, 3]
    assert not list(exports.glob("*.partial")) + list(exports.glob("waiting.json"))
