"""All of the one-node benchmarks, each in a process of its own; one table, one JSON."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from _common import EXIT_BAR_MISSED, Results, main, say

PARTS = ("step", "stall", "disk", "small", "memory")


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Run every part and gather what it says."""
    cores = len(os.sched_getaffinity(0))
    environment = {"OMP_NUM_THREADS": str(min(8, cores)), "OMP_WAIT_POLICY": "passive", **os.environ}
    os.environ.setdefault("OMP_NUM_THREADS", environment["OMP_NUM_THREADS"])
    here = pathlib.Path(__file__).parent
    for part in PARTS:
        began = time.perf_counter()
        command = [sys.executable, str(here / f"{part}.py"), "--json", "--dir", str(arguments.folder)]
        command += ["--quick"] if arguments.quick else []
        command += ["--rounds", str(arguments.rounds)] if arguments.rounds else []
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode not in (0, EXIT_BAR_MISSED):
            raise SystemExit(f"bench/{part}.py failed with exit code {done.returncode}")
        results.include(json.loads(done.stdout))
        say(f"{part}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main("everystep on one node", measure)
