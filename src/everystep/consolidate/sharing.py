"""One export written by several processes: each has its share of the plan, and dies with the one that started it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import msgspec

from everystep.consolidate.plan import ExportPlan, plan_export
from everystep.consolidate.source import open_source
from everystep.consolidate.writing import Written, finish_export, write_export
from everystep.errors import ConflictError, TransientStoreError, rebuild
from everystep.schedule import from_document

__all__ = ["share", "write_share"]

_POLL_S = 0.02


def share(plan: ExportPlan, folder: str, document: Mapping[str, Any], workers: int) -> tuple[int, dict[str, str]]:
    """Write ``plan`` into ``folder`` by so many processes; bytes that are linked, and the digests.

    ``document`` goes to each of them: what it needs to come to the same plan. The first error ends all of them and is raised here.
    """
    data = msgspec.json.encode(document)
    command = [sys.executable, "-m", "everystep.cli", "consolidate-worker"]
    with contextlib.ExitStack() as stack:
        shares = [stack.enter_context(_worker([*command, str(index), str(workers), folder], data)) for index in range(workers)]
        running = list(shares)
        while running:
            ended = [one for one in running if one.process.poll() is not None]
            for one in ended:
                _check(one)
                running.remove(one)
            if not ended:
                time.sleep(_POLL_S)
    written = finish_export(plan, folder)
    return written.linked, dict(written.digests)


def write_share(document: Mapping[str, Any], folder: str, only: tuple[int, int], *, pace: Callable[[int], None] | None = None) -> Written:
    """In a worker: come to the plan that ``document`` is about and write a share of it; see ``write_export``.

    Raises:
        ConflictError: The checkpoint is not the one that the plan was made of.
    """
    source = open_source(document["path"], step=document.get("step"), group=document.get("group"))
    with source.hold():
        options = from_document(document["options"])
        plan = plan_export(source, options, stem=document.get("stem", "model"), file_name=document.get("file_name"))
        if plan.id != document["plan_id"]:
            raise ConflictError(
                f"{source.where!r} changed while it was consolidated", key=source.where, kind="changed", hint="start it again"
            )
        budget_nbytes = int(document.get("budget_nbytes") or 256 << 20)
        return write_export(source, plan, folder, threads=document.get("threads"), budget_nbytes=budget_nbytes, pace=pace, only=only)


class _Share(NamedTuple):
    """A worker: its process, and the files that it writes to."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]


@contextlib.contextmanager
def _worker(command: list[str], document: bytes) -> Iterator[_Share]:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(document)
        given.seek(0)
        with subprocess.Popen(command, stdin=given, stdout=output, stderr=errors) as process:
            try:
                yield _Share(process, output, errors)
            finally:
                if process.poll() is None:  # another one failed, or we are interrupted
                    process.kill()


def _check(share: _Share) -> None:
    """How a worker ended; its error is raised as ours."""
    code = share.process.returncode
    share.output.seek(0)
    share.errors.seek(0)
    lines = share.output.read().splitlines()
    try:
        told = msgspec.json.decode(b"\n".join(lines), type=dict[str, Any])
    except msgspec.DecodeError:
        told = {}
    error = told.get("error")
    if isinstance(error, dict):
        raise rebuild(str(error.get("name")), str(error.get("message")), step=error.get("step"), key=error.get("key"),
                      kind=str(error.get("kind", "")), hint=str(error.get("hint", "")))  # fmt: skip
    if code != 0:
        said = share.errors.read().decode(errors="replace").strip()[-500:]
        raise TransientStoreError(f"a process of the export ended with code {code}: {said}", kind="worker", hint="start it again")
