"""How the command line is read: usage lines, and what was typed wrongly as one line and, with ``--json``, a document like any other error.

typer brings click in some versions and a copy of it in others, so that what is needed of it is reached by way of typer's own names.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from everystep import errors
from everystep.cli import output
from everystep.cli.exits import INTERRUPTED, document

__all__ = ["Command", "Group", "interrupted"]

_ClickError: type[Any] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


class Command(TyperCommand):
    """A command whose usage line names arguments plainly: ``RUN``, ``[STEP]``, ``STEP...``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the command's name."""
        pieces = [self.options_metavar] if self.options_metavar else []
        for param in self.params:
            if param.param_type_name == "argument":
                name = param.metavar or str(param.name).upper()
                pieces.append((name if param.required else f"[{name}]") + ("" if param.nargs == 1 else "..."))
        return pieces


class Group(TyperGroup):
    """The root of all commands; ends the process with the exit codes of ``exits``."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run what ``args`` say (default: the process's own)."""
        extra = {**extra, "prog_name": prog_name, "complete_var": complete_var, "standalone_mode": False}
        extra["windows_expand_args"] = windows_expand_args
        if not standalone_mode:
            return super().main(args, **extra)
        try:
            code = super().main(args, **extra)
        except _ClickError as error:
            code = _refuse(error, sys.argv[1:] if args is None else args)
        except (typer.Abort, KeyboardInterrupt):
            code = interrupted()
        sys.exit(code or 0)

    def make_context(self, *args: Any, **more: Any) -> Any:
        """As in click; Ctrl-C is Abort, of which typer does not make an exit code by itself."""
        with _aborting():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        """As in click; Ctrl-C is Abort."""
        with _aborting():
            return super().invoke(ctx)


@contextlib.contextmanager
def _aborting() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Abort from None


def interrupted() -> int:
    """Say that Ctrl-C came; the exit code."""
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _refuse(error: Any, args: Sequence[str]) -> int:
    """Tell what was typed wrongly; the exit code."""
    code = int(error.exit_code)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # the help
        return code
    context = getattr(error, "ctx", None)
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    told = errors.ConfigError(
        message[:1].lower() + message[1:], kind="usage", hint=f"{context.command_path if context else 'everystep'} --help"
    )
    output.say_error(told)
    if "--json" in args:
        output.print_json(document(told, code))
    return code
