"""The demo: its pieces, and the whole of it with a tiny model."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from torch.nn import functional

from everystep.agent.memory import Room
from everystep.cli import demo
from everystep.demo import acts, export, show, watch
from everystep.demo.compare import modes_of_round
from everystep.demo.model import GPT, build
from everystep.demo.sizes import SIZES
from everystep.demo.text import Loader, read_text
from everystep.errors import CapacityError, ConfigError

TINY = SIZES["0.1M"]
COMMAND = [sys.executable, "-c", "import typer; from everystep.cli.demo import run; typer.run(run)"]


def test_text_is_the_library_source_in_a_fixed_order() -> None:
    """Two readings agree, documents end with a zero byte, and a limit cuts between files."""
    whole = read_text()
    assert whole == read_text()
    assert b"class OrderedDict" in whole
    part = read_text(limit_nbytes=300_000)
    assert 50_000 < len(part) <= 300_000
    assert whole.startswith(part)
    assert part.endswith(b"\0")


def test_a_python_without_source_is_a_config_error(tmp_path: pathlib.Path) -> None:
    """It says what was found and what to do."""
    with pytest.raises(ConfigError, match="found 0 bytes"):
        read_text(folder=tmp_path)


def test_loader_gives_each_row_once_an_epoch() -> None:
    """F60: every row of 26 in each of two epochs, in another order."""
    loader = Loader(bytes(range(105)), batch=2, context=4, seed=3)
    epochs = [[int(first) for _ in range(13) for first in loader.next()[0][:, 0]] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 104, 4))
    assert epochs[0] != epochs[1]


def test_loader_goes_on_where_it_stood() -> None:
    """F60: after a restore in the second epoch the same batches come."""
    text = bytes(range(105))
    loader, other = Loader(text, batch=2, context=4, seed=3), Loader(text, batch=2, context=4, seed=99)
    for _ in range(17):
        loader.next()
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for _ in range(12):
        for mine, theirs in zip(loader.next(), other.next(), strict=True):
            assert torch.equal(mine, theirs)


def test_targets_are_inputs_shifted_by_one() -> None:
    """The model learns the next byte."""
    inputs, targets = Loader(bytes(range(105)), batch=2, context=4, seed=3).next()
    assert torch.equal(inputs + 1, targets)


@pytest.mark.parametrize("name", ["0.1M", "11M", "46M", "345M"])
def test_sizes_are_what_they_are_called(name: str) -> None:
    """Counted on the model itself, without memory for it."""
    size = SIZES[name]
    with torch.device("meta"):
        model = GPT(size)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == size.parameters
    assert count == pytest.approx(float(name[:-1]) * 1e6, rel=0.25)


def test_model_is_gpt2_by_an_independent_computation() -> None:
    """One block's forward by hand, with GPT-2's transposed weights, gives the model's logits."""
    size = dataclasses.replace(TINY, layers=1, heads=1)
    torch.manual_seed(0)
    model = GPT(size).eval()
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    tokens = torch.tensor([[7, 1, 255, 0]])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        spread = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return (x - x.mean(-1, keepdim=True)) / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"transformer.h.0.{name}.weight"] + weights[f"transformer.h.0.{name}.bias"]

    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][:4]
    query, key, value = linear(norm(x, "transformer.h.0.ln_1"), "attn.c_attn").split(size.width, -1)
    scores = (query @ key.transpose(1, 2) / size.width**0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    x = x + linear(scores.softmax(-1) @ value, "attn.c_proj")
    inner = linear(norm(x, "transformer.h.0.ln_2"), "mlp.c_fc")
    inner = 0.5 * inner * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
    x = norm(x + linear(inner, "mlp.c_proj"), "transformer.ln_f")
    assert torch.allclose(model(tokens).double(), x @ weights["transformer.wte.weight"].T, atol=1e-4)


def test_model_is_the_same_every_time_and_learns() -> None:
    """Two builds are equal to the bit; thirty steps on one batch bring the loss well below that of guessing."""
    model, optimizer, _ = build(TINY, steps=10)
    again, _, _ = build(TINY, steps=10)
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), again.parameters(), strict=True))
    inputs, targets = Loader(read_text(limit_nbytes=200_000), batch=4, context=TINY.context, seed=1).next()
    guess = float(functional.cross_entropy(torch.zeros(1, 256), torch.tensor([0])))
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < guess - 0.5


def test_exported_names_and_shapes_are_gpt2s(tmp_path: pathlib.Path) -> None:
    """transformers, where it is installed, builds the same model from config.json and gives the same logits."""
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    model = GPT(TINY).eval()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(TINY.config()), encoding="utf-8")
    other = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    tokens = torch.randint(0, 256, (2, 9))
    assert torch.allclose(model(tokens), other(tokens).logits, atol=1e-5)


def test_tokenizer_maps_bytes_to_themselves(tmp_path: pathlib.Path) -> None:
    """tokenizer.json, read by the tokenizers package where it is installed, gives the bytes of any text."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(export.tokenizer()), encoding="utf-8")
    text = "def f(x):\n\treturn 'ä€\U0001f600' \x7f\x00"
    words = tokenizers.Tokenizer.from_file(str(path))
    assert words.encode(text).ids == list(text.encode())
    assert words.decode(list(text.encode()), skip_special_tokens=False) == text


def test_byte_letters_are_256_different_ones() -> None:
    """Printable bytes stand for themselves; space and newline are GPT-2's G and C with marks."""
    letters = export.byte_letters()
    assert sorted(letters) == list(range(256))
    assert len(set(letters.values())) == 256
    assert (letters[ord("a")], letters[ord(" ")], letters[ord("\n")]) == ("a", "\u0120", "\u010a")


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5e-6, "2 us"), (0.0012, "1.2 ms"), (0.0421, "42 ms"), (0.35, "0.35 s"), (12.3456, "12.35 s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    """In the unit that fits."""
    assert show.seconds_text(seconds) == text


def test_sparkline_falls_with_the_values() -> None:
    """One bar for each value up to the width, the highest first; no values, no bars."""
    assert show.sparkline([3.0, 2.0, 1.0], width=9, bars="0123456789") == "940"
    assert show.sparkline([float(value) for value in range(100, 0, -1)], width=5, bars="0123456789") == "96420"
    assert show.sparkline([], width=5) == ""
    assert show.sparkline([1.0], width=5, bars="01") == "0"


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    """A sampled escape code becomes a dot; letters, lines and tabs stay readable."""
    assert show.printable("d\u00e9f\t\x1b[2J\n\x00\r") == "d\u00e9f    \u00b7[2J\n\u00b7\u00b7"


def test_a_log_gets_plain_lines() -> None:
    """No escape codes, no redrawing; a kill and a promise are readable."""
    out = io.StringIO()
    stage = show.Stage(console=Console(file=out, width=100, highlight=False))
    status = show.Status(steps=10, checkpoints=True)
    status.step, status.losses, status.seconds, status.stall, status.memory = 5, [5.0, 4.0], 0.25, 0.0005, 5
    with stage.live(status):
        stage.act(2, "Train")
        stage.tick(status, every=5)
        stage.happened("kill -9 ", "to the trainer.", good=False)
    shown = out.getvalue()
    assert "\x1b" not in shown
    assert "step   5/10   loss 4.000   0.25 s a step   stall 500 us   memory: step 5   disk: step -" in shown
    assert "kill -9 to the trainer." in shown


def test_a_child_that_fails_is_told_in_one_line() -> None:
    """The last line of its stderr, and its exit code."""
    with watch.Child("everystep.demo.trainer", ["run", "--size", "none-such", "--steps", "1", "--threads", "1"], threads=1) as child:
        assert list(child.events()) == []
        assert child.finish().startswith("exit code 2: ")


def test_a_child_dies_with_its_context() -> None:
    """Leaving the block, also by an error, leaves no process behind."""
    with pytest.raises(ZeroDivisionError), watch.Child("http.server", ["0", "--bind", "127.0.0.1"], threads=1) as child:  # noqa: PT012
        assert psutil.pid_exists(child.pid)
        _ = 1 / 0
    assert not psutil.pid_exists(child.pid)


def test_ctrl_c_while_a_child_starts_loses_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes after the process is known, and cleaning up ends it."""
    real, started = subprocess.Popen, []

    def interrupted(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        process = real(*args, **kwargs)
        started.append(process)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watch.Child("http.server", ["0", "--bind", "127.0.0.1"], threads=1)
    assert started[0].poll() is None
    watch.end_children()
    assert started[0].poll() == -signal.SIGKILL
    started[0].stdout.close()


def _life(losses: dict[int, str], **more: Any) -> acts.Training:
    return acts.Training(losses=list(losses.items()), step_s=[0.1], stall_s=[0.0], **more)


def _quiet() -> show.Stage:
    return show.Stage(console=Console(file=io.StringIO()))


def test_a_loss_that_differs_in_its_last_bit_breaks_the_promise() -> None:
    """Also where only the step that was trained twice differs."""
    bits = {step: float(step).hex() for step in range(1, 5)}
    off = float.fromhex(bits[2])
    plain = _life(bits, weights="w")
    for second, holds in (({2: bits[2], 3: bits[3], 4: bits[4]}, True), ({2: (off * (1 + 2**-52)).hex(), 3: bits[3], 4: bits[4]}, False)):
        lives = [_life({1: bits[1], 2: bits[2]}), _life(second, weights="w")]
        curve, weights = demo._judge_curve(plain, lives, _quiet())
        assert (curve.holds, weights.holds) == (holds, True)


def test_a_missing_step_or_other_weights_break_the_promise() -> None:
    """A curve with a hole is not the same curve."""
    bits = {step: float(step).hex() for step in range(1, 5)}
    lives = [_life({1: bits[1], 2: bits[2]}), _life({4: bits[4]}, weights="other")]
    curve, weights = demo._judge_curve(_life(bits, weights="w"), lives, _quiet())
    assert (curve.holds, weights.holds) == (False, False)
    assert "lacks steps [3]" in curve.detail


@pytest.mark.parametrize(
    ("tier", "step", "holds"), [("memory", 5, True), ("memory", 4, True), ("memory", 3, False), ("disk", 5, False), (None, 0, False)]
)
def test_a_resume_from_memory_loses_one_step_at_most(tier: str | None, step: int, holds: bool) -> None:
    """Killed in step 6, five were finished; the disk instead of memory is not what was promised."""
    lives = [
        _life({}, killed_in=6),
        _life({}, killed_in=9, restored={"step": step, "tier": tier}),
        _life({}, restored={"step": 2, "tier": "disk"}),
    ]
    memory, disk = demo._judge_resumes(lives)
    assert (memory.holds, disk.holds) == (holds, True)


def test_rounds_of_the_others_are_left_out_first() -> None:
    """With time for all, all are measured; with less, torch.save and DCP lose their rounds, and everystep's go on."""
    costs = {"none": 1.0, "memory": 1.0, "disk": 1.0, "torch": 5.0, "dcp": 5.0}
    assert modes_of_round({}, rounds=0, left_s=0.0) == ["none", "memory", "disk", "torch", "dcp"]
    assert len(modes_of_round(costs, rounds=1, left_s=13 + 3 * 3)) == 5
    assert modes_of_round(costs, rounds=1, left_s=13 + 3 * 3 - 0.1) == ["none", "memory", "disk"]
    assert len(modes_of_round(costs, rounds=4, left_s=13)) == 5
    assert modes_of_round(costs, rounds=1, left_s=3.0) == ["none", "memory", "disk"]
    assert modes_of_round(costs, rounds=1, left_s=2.9) == []


@pytest.mark.parametrize(
    ("spread", "rounds", "ratio", "said"),
    [
        (0.05, 6, 1.01, None),
        (0.05, 6, 0.98, "noisy"),
        (0.05, 6, 0.996, None),
        (0.3, 6, 1.01, "noisy"),
        (0.3, 6, 0.8, "noisy"),
        (0.0, 1, 1.01, "only 1 round:"),
        (0.1, 2, 0.9, "only 2 rounds:"),
    ],
)
def test_a_noisy_table_says_so(spread: float, rounds: int, ratio: float, said: str | None) -> None:
    """A large spread, too few rounds, and a ratio below 1 never go without their note; a calm table has none."""
    rows = [{"mode": "none", "ratio": 1.0, "spread": spread, "rounds": rounds}, {"mode": "memory", "ratio": ratio, "rounds": rounds}]
    note = acts.noise_note(rows)
    assert (note == "") == (said is None)
    assert (said or "") in note
    assert "\n" not in note


@pytest.mark.parametrize(("memory", "disk", "missing"), [(10**9, 10**15, "of memory"), (10**15, 10**9, "of disk"), (10**15, 10**15, "")])
def test_a_model_that_does_not_fit_is_refused_before_anything_starts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, memory: int, disk: int, missing: str
) -> None:
    """The error has what is needed and what is free; what fits passes."""
    monkeypatch.setattr(demo, "memory_room", lambda: Room(memory, "told by the test"))
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda _: type("Usage", (), {"free": disk}))
    if not missing:
        demo.check_room(SIZES["345M"], "345M", tmp_path / "not" / "there")
        return
    with pytest.raises(CapacityError, match=missing) as caught:
        demo.check_room(SIZES["345M"], "345M", tmp_path / "not" / "there")
    assert "1.0 GB are free" in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [8, 16, 40, 1000])
def test_kills_come_in_the_middle_and_apart(steps: int) -> None:
    """There are steps before, between and after them."""
    first, second = demo._kill_steps(steps)
    assert first >= 3
    assert first + 2 <= second
    assert second <= steps - 2


def test_an_unknown_size_is_a_usage_error() -> None:
    """It names the sizes there are."""
    done = subprocess.run([*COMMAND, "--params", "7B"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "345M" in done.stderr


def test_a_directory_in_use_is_not_touched(tmp_path: pathlib.Path) -> None:
    """Somebody's run is never trained into or removed."""
    (tmp_path / "run").mkdir()
    done = subprocess.run([*COMMAND, "--quick", "--dir", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


@pytest.mark.timeout(180)
def test_the_whole_demo_with_a_tiny_model(tmp_path: pathlib.Path) -> None:
    """Killed twice with -9, resumed from memory and from disk, bit-equal, exported; nothing runs on, and only what was asked for is left."""
    target = tmp_path / "demo"
    done = subprocess.run([*COMMAND, "--quick", "--json", "--dir", str(target)], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(promise["name"], promise["holds"]) for promise in document["promises"]] == [
        ("resume from memory", True),
        ("resume from disk", True),
        ("loss curve", True),
        ("final weights", True),
        ("export", True),
    ]
    assert [event["tier"] for event in document["resumes"]] == ["memory", "disk"]
    assert [row["mode"] for row in document["rows"]] == ["none", "memory", "disk", "torch", "dcp"]
    assert "kill -9 to the trainer and to the agent" in done.stderr
    for word in ("everystep ls", "everystep show", "everystep doctor", str(target / "run")):
        assert word in done.stderr.rpartition("Every promise held")[2]
    assert document["rows"][0]["rounds"] >= document["rows"][3]["rounds"] >= 1
    assert ("noisy" in done.stderr or "only" in done.stderr) or not any(row["ratio"] < 0.995 for row in document["rows"])
    assert sorted(path.name for path in target.iterdir()) == ["export", "run"]
    weights = target / "export" / "model.safetensors"
    assert weights.stat().st_nlink == 2
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(target) in " ".join(process.info["cmdline"] or [])]
    assert watch.agent_of(target / "run") is None


@pytest.mark.timeout(120)
def test_ctrl_c_ends_everything(tmp_path: pathlib.Path) -> None:
    """Exit code 130; trainer and agent are gone, and so is the temporary directory."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*COMMAND, "--quick", "--steps", "16"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "kill -9" in line:  # the agent lives, the next trainer starts
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 130, rest
    assert "Stopped" in rest
    assert list(tmp_path.iterdir()) == []
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or [])]
