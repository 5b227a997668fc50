"""What every test shares: marks by folder, Hypothesis profiles, one OpenMP thread, and a runtime directory of its own for each test's agents."""

from __future__ import annotations

import os

# Two OpenMP threads beside a busy neighbour run many times slower; must be set before torch is imported, here and in the children.
os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import shutil
import signal
import tempfile
from pathlib import Path

import hypothesis
import psutil
import pytest

TESTS = Path(__file__).resolve().parent
KINDS = ("unit", "property", "contract", "stateful", "crash", "hostile", "cli", "docs", "formats", "distributed")
AGENT_GRACE_S = 5.0

hypothesis.settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, database=None, print_blob=True,
                                     suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow])  # fmt: skip
hypothesis.settings.register_profile("nightly", max_examples=3000, deadline=None, print_blob=True,
                                     suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow])  # fmt: skip
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config):
    """Register the marks: one for each folder, and those that change how a test is treated."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as nohup and a shell's "&" leave it; children inherit that, and tests press Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in KINDS:
        config.addinivalue_line("markers", f"{kind}: lies in tests/{kind}")
    config.addinivalue_line("markers", "leaves_agent: this test may end with an agent running (it is killed and not held against the test)")
    config.addinivalue_line("markers", "soak: takes minutes; runs with `make soak` only")


def pytest_addoption(parser):
    """``--soak`` runs the long tests too."""
    parser.addoption("--soak", action="store_true", default=False, help="run the tests marked soak as well")


def pytest_collection_modifyitems(config, items):
    """Mark each test by its folder; leave out the soak tests unless they were asked for."""
    for item in items:
        with contextlib.suppress(ValueError):
            kind = item.path.relative_to(TESTS).parts[0]
            if kind in KINDS:
                item.add_marker(kind)
    if not config.getoption("--soak"):
        soak = [item for item in items if item.get_closest_marker("soak")]
        if soak:
            config.hook.pytest_deselected(items=soak)
            items[:] = [item for item in items if not item.get_closest_marker("soak")]


def agents_of(folder: Path) -> list[psutil.Process]:
    """Processes, this one and its threads apart, that were started with ``folder`` as their runtime directory and run everystep's agent."""
    wanted = f"EVERYSTEP_RUNTIME_DIR={folder}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.Error):
            environ = Path(entry.path, "environ").read_bytes().split(b"\0")
            command = Path(entry.path, "cmdline").read_bytes()
            if wanted in environ and b"everystep" in command and b"agent" in command:
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


@pytest.fixture(autouse=True)
def runtime_dir(request, monkeypatch):
    """An empty directory for the sockets of this test's agents; fails a test that leaves an agent running (see the mark ``leaves_agent``).

    The path is short: the name of a Unix socket has at most 107 bytes.
    """
    folder = Path(tempfile.mkdtemp(prefix="es", dir="/tmp"))
    monkeypatch.setenv("EVERYSTEP_RUNTIME_DIR", str(folder))
    yield folder
    left: list[psutil.Process] = []
    if any(folder.iterdir()):  # no agent without a socket or a lock file there: most tests need no look at the process table
        may_leave = request.node.get_closest_marker("leaves_agent") is not None
        _, left = psutil.wait_procs(agents_of(folder), timeout=0 if may_leave else AGENT_GRACE_S)
        left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        if may_leave:
            left = []
    shutil.rmtree(folder, ignore_errors=True)
    if left:
        pytest.fail(
            f"left {len(left)} agent(s) running: pids {[process.pid for process in left]} (killed now; mark leaves_agent if that is meant)"
        )
