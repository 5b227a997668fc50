"""``everystep demo``: train a small GPT, kill it twice, show what comes back, and what it cost."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import shlex
import shutil
import signal
import statistics
import tempfile
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everystep import errors
from everystep.agent.memory import memory_room
from everystep.cli.doctor import existing
from everystep.cli.exits import guarded
from everystep.demo.acts import TORCH_CACHE, DemoFailedError, Setting, Training, clean_up, compare, noise_note, sample, train
from everystep.demo.export import export
from everystep.demo.show import Stage, nbytes_text, printable, seconds_text
from everystep.demo.sizes import SIZES, Size
from everystep.demo.watch import Event

_LABELS = {
    "none": "no checkpoints",
    "memory": "everystep, to memory",
    "disk": "everystep, to memory and disk",
    "torch": "torch.save",
    "dcp": "DCP async_save",
}


@dataclasses.dataclass
class Promise:
    """Something that the demo says will hold, and whether it did."""

    name: str
    holds: bool
    detail: str


def _threads() -> int:
    """Cores to compute on: those this process may use, eight at most (the model is small)."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@guarded
def run(
    params: Annotated[str, typer.Option("--params", help="Size of the model: 11M takes about three minutes on two cores; 46M and 345M, "
                                        "as large as FastPitch and Megatron-BERT, take longer and up to 4 and 23 GB of memory.")] = "11M",
    steps: Annotated[int, typer.Option("--steps", min=8, help="Training steps of the run.")] = 40,
    directory: Annotated[pathlib.Path | None, typer.Option("--dir", help="Where to put the run and the exported model. It is kept. "
                                                           "Default: a temporary directory, removed at the end.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary directory.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, in about half a minute: shows that it works, "
                                      "not what it costs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON; the story goes to stderr.")] = False,
) -> None:  # fmt: skip
    """Train a small GPT with a checkpoint at every step, kill it twice with -9, and go on from the newest one.

    From memory at most the step under way is lost; when memory is lost too, the steps since the newest checkpoint on disk. They are trained
    again, and the demo checks that all comes out equal to the last bit.
    """
    if quick:
        params, steps = "0.1M", min(steps, 16)
    if params not in SIZES:
        raise errors.ConfigError(f"--params {params!r} is no size", key=params, kind="usage", hint=f"there are {', '.join(SIZES)}")
    if directory is not None and (directory / "run").exists():
        raise errors.ConfigError(
            f"{str(directory / 'run')!r} is there already", key=str(directory), kind="usage", hint="name a new directory with --dir"
        )
    check_room(SIZES[params], params, directory or pathlib.Path(tempfile.gettempdir()))
    folder = directory.absolute() if directory else pathlib.Path(tempfile.mkdtemp(prefix="everystep-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(size_name=params, steps=steps, threads=_threads(), folder=folder, budget_s=20.0 if quick else 165.0)
    console = Console(highlight=False, stderr=as_json)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a log: nothing folds it, so lines may be longer than rich's 80
    stage = Stage(console=console)
    kept = keep or directory is not None
    code = 1
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / TORCH_CACHE))
    try:
        code = _play(setting, stage, as_json=as_json, kept=kept)
    except DemoFailedError as error:
        stage.console.print(f"\n[bold red]failed:[/] {escape(str(error))}")
    except KeyboardInterrupt:
        stage.console.print("\nStopped; everything that the demo started is ended.")
        code = 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleaning up
        clean_up(folder, keep=kept)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise typer.Exit(code)


def check_room(size: Size, name: str, folder: pathlib.Path) -> None:
    """CapacityError when the model does not fit into this machine's memory, or its checkpoints on the disk: before anything is started."""
    room = memory_room()
    if room.nbytes < size.memory_nbytes:
        raise errors.CapacityError(
            f"{name} takes about {nbytes_text(size.memory_nbytes)} of memory, and {nbytes_text(room.nbytes)} are free: "
            f"{nbytes_text(size.memory_nbytes - room.nbytes)} are missing ({room.limits})",
            kind="memory",
            hint="choose a smaller --params",
        )
    place = existing(str(folder))
    free = shutil.disk_usage(place).free
    if free < size.disk_nbytes:
        raise errors.CapacityError(
            f"{name} takes about {nbytes_text(size.disk_nbytes)} of disk, and {nbytes_text(free)} are free at {str(place)!r}",
            key=str(place),
            kind="disk-full",
            hint="name a directory on another disk with --dir, or choose a smaller --params",
        )


def _interrupt(*_: object) -> None:
    """A polite kill is a Ctrl-C: everything that was started is ended."""
    raise KeyboardInterrupt


def _play(setting: Setting, stage: Stage, *, as_json: bool, kept: bool) -> int:
    """All acts; returns the exit code."""
    _introduce(setting, stage)
    first, second = _kill_steps(setting.steps)

    stage.act(1, "Train without checkpoints")
    plain = train(setting, stage, checkpoints=False)
    stage.say("This loss curve is the measure: whatever is killed below has to end up exactly here.")

    stage.act(2, "Train again, with a checkpoint at every step")
    lives = [train(setting, stage, checkpoints=True, kill_in=first)]
    stage.happened("kill -9 ", f"to the trainer, in the middle of step {first}.", good=False)
    stage.say("The trainer is gone. Its last checkpoint is in memory of the agent, a small process beside it, which lives on.")

    stage.act(3, "The same command again")
    lives.append(_resume(setting, stage, lives, kill_in=second))
    stage.happened("kill -9 ", f"to the trainer and to the agent, in the middle of step {second}.", good=False)
    stage.say("Memory is lost with them, as when a machine loses its power. What was on the disk by then is there.")

    stage.act(4, "And again")
    lives.append(_resume(setting, stage, lives, kill_in=None))
    stage.say("The run is complete. The trainer waited for the disk, and its agent, with nothing left to do, ended too.")

    promises = _judge_resumes(lives)
    stage.act(5, "Is it the same curve?")
    promises += _judge_curve(plain, lives, stage)

    stage.act(6, "A model folder for Hugging Face")
    promises.append(_export(setting, stage, kept=kept))

    stage.act(7, "What it costs")
    rows = _compare(setting, stage, step_s=statistics.median(plain.step_s))

    failed = [promise for promise in promises if not promise.holds]
    stage.console.print()
    if failed:
        stage.console.print(f"[bold red]failed:[/] {escape('; '.join(f'{promise.name}: {promise.detail}' for promise in failed))}")
    else:
        stage.console.print(f"[bold green]Every promise held[/], in {stage.elapsed:.0f} s.")
    _what_next(setting, stage, kept=kept)
    if as_json:
        print(json.dumps(_report(setting, stage, plain, lives, promises, rows)))
    return 1 if failed else 0


def _what_next(setting: Setting, stage: Stage, *, kept: bool) -> None:
    """Where the run is, and what to look at."""
    if kept:
        run = shlex.quote(str(setting.run))
        stage.say(f"The run and the exported model are kept in {setting.folder}. Look at them with")
    else:
        run = "RUN"
        stage.say("The run's folder is removed now; --keep keeps it, --dir DIR puts it where you like. Then look at it with")
    for command, what in (
        (f"everystep ls {run}", "which checkpoints there are"),
        (f"everystep show {run}", "what the newest one holds"),
        ("everystep doctor DIR", "what your own disk and machine can do, and what survives there"),
    ):
        stage.console.print(f"      {command}    [dim]{what}[/]", soft_wrap=True)


def _kill_steps(steps: int) -> tuple[int, int]:
    """In the middle of which steps the kills come."""
    return max(3, steps * 2 // 5), max(6, steps * 7 // 10)


def _introduce(setting: Setting, stage: Stage) -> None:
    size = setting.size
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    model = f"a GPT-2 of {size.parameters / 1e6:.1f} M parameters; with its optimizer {nbytes_text(size.state_nbytes)} of state"
    table.add_row("model", model)
    table.add_row("text", f"Python {platform.python_version()}'s own standard library, byte by byte")
    table.add_row("machine", f"torch {metadata.version('torch')} on {setting.threads} threads ({os.cpu_count()} cores)")
    table.add_row("run", str(setting.run))
    title = "[bold]everystep demo[/]: a checkpoint at every training step, two kills, and on from the newest one"
    stage.console.print(Panel(table, title=title, title_align="left", border_style="bright_black", expand=False))
    if setting.size_name not in ("0.1M", "11M"):
        stage.say(f"As large as {setting.size.named_after}: this takes longer than three minutes.", style="dim")


def _resume(setting: Setting, stage: Stage, lives: list[Training], *, kill_in: int | None) -> Training:
    """Start the same command once more after a kill."""
    before = lives[-1]
    reached = (before.killed_in or 1) - 1
    known = {step: float.fromhex(loss) for life in lives for step, loss in life.losses}

    def told(event: Event) -> None:
        lost = reached - event["step"]
        where = "memory" if event["tier"] == "memory" else "disk"
        fate = {0: "No finished step was lost.", 1: "1 finished step was lost, and is trained again."}
        text = f", every byte verified, in {seconds_text(event['seconds'])}. "
        text += fate.get(lost, f"{lost} finished steps were lost, and are trained again.")
        stage.happened(f"Step {event['step']} is back from {where}", text, good=True)

    return train(setting, stage, checkpoints=True, kill_in=kill_in, with_agent=True, known=known, on_restored=told)


def _judge_resumes(lives: list[Training]) -> list[Promise]:
    """Whether both resumes came from the tier they should."""
    promises = []
    for life, before, tier, allowed in ((lives[1], lives[0], "memory", 1), (lives[2], lives[1], "disk", None)):
        event = life.restored or {"step": 0, "tier": None}
        lost = (before.killed_in or 1) - 1 - event["step"]
        holds = event["tier"] == tier and event["step"] > 0 and lost >= 0 and (allowed is None or lost <= allowed)
        found = f"step {event['step']} from {event['tier']}, {lost} steps lost" if event["step"] else "nothing was restored"
        promises.append(Promise(f"resume from {tier}", holds, found))
    return promises


def _judge_curve(plain: Training, lives: list[Training], stage: Stage) -> list[Promise]:
    """Compare each loss, also those of steps trained twice, and the final weights, bit by bit."""
    expected = dict(plain.losses)
    trained = [pair for life in lives for pair in life.losses]
    differ = sorted({step for step, loss in trained if expected.get(step) != loss})
    absent = sorted(set(expected) - {step for step, _ in trained})
    curve = Promise("loss curve", not differ and not absent, f"differs at steps {differ[:5]}, lacks steps {absent[:5]}")
    weights = Promise("final weights", plain.weights == lives[-1].weights, f"{plain.weights} and {lives[-1].weights}")
    for promise, kept in (
        (curve, f"{len(expected)} of {len(expected)} losses are equal to the last bit to those of act 1"),
        (weights, "so are all bytes of the final weights"),
    ):
        found = kept if promise.holds else f"{promise.name}: {promise.detail}"
        stage.happened("yes: " if promise.holds else "no: ", found + ".", good=promise.holds)
    first, last = float.fromhex(plain.losses[0][1]), float.fromhex(plain.losses[-1][1])
    stage.say(
        f"Loss {first:.3f} to {last:.3f}. Model, optimizer, schedule, random numbers and the place in the data all came back: "
        "without any one of them the curves would part."
    )
    return [curve, weights]


def _export(setting: Setting, stage: Stage, *, kept: bool) -> Promise:
    """Write the folder and sample from it."""
    folder = setting.folder / "export"
    try:
        how = export(setting.run, folder, size=setting.size)
        with stage.doing("loading it"):
            by, text = sample(setting, folder)
    except (DemoFailedError, OSError, ValueError) as error:
        stage.happened("no: ", str(error), good=False)
        return Promise("export", False, str(error))
    stage.say(
        f"model.safetensors is the checkpoint's own file, {how} under the name that from_pretrained looks for, beside a config.json: "
        "the weights bear the model's own names and are plain safetensors, so there is nothing to convert."
    )
    if kept:
        stage.say(str(folder), style="dim")
    stage.happened(by, f" loads it and goes on from a prompt ({setting.steps} steps teach it what Python looks like, no more):", good=True)
    shown = Panel(Text(printable(text).rstrip()), border_style="bright_black", width=min(84, stage.console.width - 3))
    stage.console.print(Padding(shown, (0, 0, 0, 3)))
    return Promise("export", True, f"loaded by {by}")


def _compare(setting: Setting, stage: Stage, *, step_s: float) -> list[dict[str, Any]]:
    """Measure, and show the table."""
    stage.say("A save at every step by each in turn (A B C D E, and again), on the same model, in one process.", style="dim")
    seconds = max(4.0, min(60.0, setting.budget_s - stage.elapsed))
    with stage.doing("measuring") as update:
        # Where steps are slow, rounds are shorter, so that there is time for more than one.
        rows = compare(
            setting,
            seconds=seconds,
            steps=6 if step_s < 0.5 else 3,
            on_block=lambda mode, number: update(f"round {number + 1}: {_LABELS[mode]}"),
        )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("a save at every step", no_wrap=True)
    for heading in ("step time", "ratio", "stall p50", "p99", "to durable"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: list(_LABELS).index(row["mode"])):
        none = row["mode"] == "none"
        own = row["mode"] in ("memory", "disk")
        table.add_row(
            _LABELS[row["mode"]],
            seconds_text(row["step_s"]),
            f"{row['ratio']:.2f} x",
            "" if none else seconds_text(row["stall_p50_s"]),
            "" if none else seconds_text(row["stall_p99_s"]),
            seconds_text(row["durable_s"]) if row["durable_s"] is not None else "",
            style="bold" if own else "",
        )
    stage.console.print(Padding(table, (0, 0, 0, 3)))
    by_mode = {row["mode"]: row for row in rows}
    rounds, others = by_mode["none"]["rounds"], by_mode["torch"]["rounds"]
    stage.say(
        f"Medians of {by_mode['none']['steps']} steps each, in {rounds} round{'s' if rounds > 1 else ''}"
        f"{'' if others == rounds else f' (torch.save and DCP in {others})'}. Stall: what training waited for, in the call and "
        "before the optimizer's step. To durable: from the call until a power cut cannot take it.",
        style="dim",
    )
    note = noise_note(rows)
    if note:
        stage.say(note)
    return rows


def _report(setting: Setting, stage: Stage, plain: Training, lives: list[Training], promises: list[Promise],
            rows: list[dict[str, Any]]) -> dict[str, Any]:  # fmt: skip
    """What ``--json`` prints."""
    return {
        "machine": {"cores": os.cpu_count(), "threads": setting.threads, "system": platform.platform(), "python": platform.python_version(),
                    "torch": metadata.version("torch")},
        "model": {"params": setting.size.parameters, "state_nbytes": setting.size.state_nbytes, "steps": setting.steps},
        "resumes": [life.restored for life in lives[1:]],
        "killed_in": [life.killed_in for life in lives[:2]],
        "losses": [loss for _, loss in plain.losses],
        "stall_p50_s": statistics.median([stall for life in lives for stall in life.stall_s]),
        "promises": [dataclasses.asdict(promise) for promise in promises],
        "rows": rows,
        "elapsed_s": stage.elapsed,
    }  # fmt: skip
