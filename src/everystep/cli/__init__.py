"""The ``everystep`` command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line; the console script's entry."""
    from everystep.cli.app import app

    app(prog_name="everystep")
