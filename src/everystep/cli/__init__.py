"""The ``everystep`` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; the console script's entry."""
    try:
        from everystep.cli.app import app

        app(prog_name="everystep")
    except KeyboardInterrupt:  # while modules were still being loaded
        print("interrupted", file=sys.stderr)
        sys.exit(130)
