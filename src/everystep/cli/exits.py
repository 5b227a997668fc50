"""Exit codes in one table, and the guard around every command that turns errors into one line and a code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from everystep import errors
from everystep.cli import output

__all__ = ["EXIT_CODES", "INTERRUPTED", "document", "exit_code", "guarded"]

INTERRUPTED = 130

EXIT_CODES: tuple[tuple[type[errors.CheckpointError], int, str], ...] = (
    (errors.ConfigError, 2, "wrong usage, or something was wrong before anything ran"),
    (errors.NotFoundError, 10, "no such run, checkpoint or agent"),
    (errors.ConflictError, 11, "another writer was first, or the request contradicts what is kept"),
    (errors.CorruptionError, 12, "bytes are wrong or missing"),
    (errors.StoreError, 13, "the store failed"),
    (errors.CapacityError, 14, "no space or no memory"),
    (errors.CheckpointError, 1, "any other failure"),
)
"""The first row whose class matches decides. 0 is success, 2 also comes from the option parser, 130 is an interrupt (Ctrl-C)."""

Command = TypeVar("Command", bound=Callable[..., Any])


def exit_code(error: errors.CheckpointError) -> int:
    """The process's exit code for an error."""
    return next(code for cls, code, _ in EXIT_CODES if isinstance(error, cls))


def guarded(command: Command) -> Command:
    """Wrap a command: an error becomes one line on stderr (with ``--json`` also a document on stdout) and its exit code; no traceback
    unless EVERYSTEP_DEBUG is set."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except errors.CheckpointError as error:
            _debug()
            code = exit_code(error)
            output.say_error(error)
            if kwargs.get("as_json"):
                output.print_json(document(error, code))
            raise typer.Exit(code) from None
        except (KeyboardInterrupt, typer.Abort):
            _debug()
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `everystep ls RUN | head`: whoever read has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:  # one of the two tops: a bug must not show a traceback to a person who cannot do anything with it
            _debug()
            output.say_error(
                errors.CheckpointError(f"{type(error).__name__}: {error}", hint="this is a bug: EVERYSTEP_DEBUG=1 shows where")
            )
            raise typer.Exit(1) from None

    return run  # type: ignore[return-value]


def document(error: errors.CheckpointError, code: int) -> dict[str, object]:
    """What ``--json`` prints of an error."""
    return {
        "error": {
            "name": type(error).__name__,
            "message": error.message,
            "hint": error.hint,
            "kind": error.kind,
            "step": error.step,
            "key": error.key,
            "exit_code": code,
        }
    }


def _debug() -> None:
    """With EVERYSTEP_DEBUG set let the error that is being handled through."""
    if os.environ.get("EVERYSTEP_DEBUG", "0") not in {"", "0"}:
        raise  # noqa: PLE0704  # called from except clauses only
