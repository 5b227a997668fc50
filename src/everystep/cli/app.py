"""The command line's tree: which command is which function. Commands are wired here and nowhere else."""

from __future__ import annotations

from typing import Annotated

import typer

from everystep import __version__
from everystep.cli import agent, consolidate, demo, diff, doctor, exports, forget, ls, pin, show, stats, sweep, verify, watch
from everystep.cli.usage import Command, Group

__all__ = ["app"]

app = typer.Typer(
    name="everystep",
    cls=Group,
    help="Look at, check and look after the checkpoints of a training run. RUN is the directory given to everystep.Checkpointer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"everystep {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


app.command("ls", cls=Command, short_help="List the checkpoints, on disk and in memory.")(ls.ls)
app.command("show", cls=Command, short_help="What one checkpoint holds.")(show.show)
app.command("verify", cls=Command, short_help="Read back and compare every byte.")(verify.verify)
app.command("diff", cls=Command, short_help="Which tensors of two checkpoints differ.")(diff.diff)
app.command("pin", cls=Command, short_help="Keep a checkpoint, whatever retention says.")(pin.pin)
app.command("forget", cls=Command, short_help="Unpublish checkpoints and delete their data.")(forget.forget)
app.command("sweep", cls=Command, short_help="Delete data that nobody refers to.")(sweep.sweep)
app.command("consolidate", cls=consolidate.WithAddress, short_help="Write whole Hugging Face safetensors.")(consolidate.consolidate)
app.command("consolidate-worker", cls=Command, hidden=True)(consolidate.worker)
app.command("watch", cls=Command, short_help="Consolidate what a running job saves, by a schedule.")(watch.watch)
app.command("exports", cls=Command, short_help="What was exported, and where LATEST leads.")(exports.exports)
app.command("stats", cls=Command, short_help="How long each phase took.")(stats.stats)
app.command("doctor", cls=Command, short_help="Test the disk and the memory of this place.")(doctor.doctor)
app.add_typer(agent.app, name="agent", short_help="The agents of this node.")
app.command("demo", cls=Command, short_help="Train, kill, resume, compare.")(demo.run)
