"""Start the ranks of a job, hear what they tell, and end them: real processes, waited for by events and never by sleeping.

``import torch`` and what FSDP pulls in cost seconds in every process, so ranks are forked from a process that has imported them (the *nursery*, one for all
jobs of a test session) and then enter their node's namespaces; the rank sees what torchrun would give it (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
``Job.torchrun`` starts the same programs by torchrun itself, once per node, for the tests that are about it.

A rank talks over a Unix socket: lines of JSON in both directions. What a rank wrote to standard error lies in a file of its own, and ``Job.wait`` that runs
out of time has every rank abort with the stacks of all its threads before it raises.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from nodes import Cluster, Node, enter  # noqa: E402 (the folder has to be found first: tests are no package)

_IMPORTED = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "torch.distributed.device_mesh",
             "torch._dynamo", "torch.optim.lr_scheduler", "everystep.trainer.checkpointer", "everystep.testing", "http.client", "subprocess")  # fmt: skip
DEFAULT_TIMEOUT_S = 60.0


# -- in the rank ------------------------------------------------------------------------------------------------------------
class Voice:
    """What a rank says to the test, and hears from it."""

    def __init__(self, path: str, *, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._heard = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self.tell("hello", rank=rank, pid=os.getpid(), node=os.environ["EVERYSTEP_TEST_NODE"])

    def tell(self, what: str, **more: Any) -> None:
        """Say something; it has reached the test's side when this returns, whatever becomes of this process."""
        with self._lock:
            self._socket.sendall(json.dumps({"what": what, **more}).encode() + b"\n")

    def ask(self) -> dict[str, Any]:
        """The next thing that the test says; an empty one when it says no more."""
        line = self._heard.readline()
        return json.loads(line) if line else {}

    def close(self) -> None:
        """Nothing more is said."""
        self._heard.close()
        self._socket.close()


def live(program: str, options: dict[str, Any]) -> None:
    """The life of a rank: run ``module:function`` with a voice and its options. Errors are told, and end the process with 1."""
    faulthandler.enable()
    voice = Voice(os.environ["EVERYSTEP_TEST_SOCKET"], rank=int(os.environ["RANK"]))
    module, function = program.split(":")
    try:
        getattr(importlib.import_module(module), function)(voice, **options)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(text)
        with contextlib.suppress(OSError):
            voice.tell("raised", error=type(error).__name__, message=str(error), kind=getattr(error, "kind", ""), traceback=text)
        if isinstance(error, SystemExit):
            raise
        raise SystemExit(1) from None
    voice.tell("ended")
    voice.close()


# -- the nursery --------------------------------------------------------------------------------------------------------------
def _nursery(descriptor: int) -> None:
    """Fork ranks as told over a socket, and say which ended how. No threads here, or the children would miss theirs."""
    control = socket.socket(fileno=descriptor)
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    control.send(b'{"ready": true}')
    while True:
        readable, _, _ = select.select([control, ours], [], [])
        if ours in readable:
            os.read(ours, 4096)
            for pid in list(children):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    children.discard(pid)
                    control.send(json.dumps({"pid": pid, "status": os.waitstatus_to_exitcode(status)}).encode())
        if control in readable:
            message = control.recv(1 << 20)
            if not message:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            order = json.loads(message)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (ours, theirs):
                    os.close(fd)
                control.close()
                _born(order)
            children.add(pid)
            control.send(json.dumps({"token": order["token"], "born": pid}).encode())


def _born(order: dict[str, Any]) -> None:
    status = 1
    try:
        errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(errors, 2)
        os.dup2(errors, 1)
        os.environ.update(order["environment"])
        enter(order["holder"])
        random.seed()
        live(order["program"], order["options"])
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # the child's top
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        if order["options"].get("at_exit"):
            sys.exit(status)  # as a user's script ends: threads joined, atexit run
        os._exit(status)


# -- in the test --------------------------------------------------------------------------------------------------------------
class Rank:
    """One life of one rank, as seen by the test."""

    def __init__(self, *, rank: int, pid: int, node: Node) -> None:
        self.rank = rank
        self.pid = pid
        self.node = node
        self.lines: list[dict[str, Any]] = []
        self.status: int | None = None
        """Exit status, negative for a signal; None while it lives (and always for ranks of torchrun)."""
        self.silent = False
        """Its end of the socket is closed."""
        self.voice: socket.socket | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.status is not None or self.silent

    def said(self, what: str) -> list[dict[str, Any]]:
        """Everything of one kind that it told."""
        return [line for line in self.lines if line["what"] == what]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; nothing happens when it is gone."""
        if not self.over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def tell(self, **what: Any) -> None:
        """Say something to it."""
        assert self.voice is not None
        with contextlib.suppress(OSError):
            self.voice.sendall(json.dumps(what).encode() + b"\n")


class TimedOut(AssertionError):
    """What was waited for did not come; the text has the ranks' last lines and stacks."""


class Launcher:
    """Starts jobs. One for a test session; a context manager."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[socket.socket, Job] = {}
        self._born: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._tokens = 0
        self._nursery: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._hear, daemon=True, name="launcher")
        self._thread.start()

    def start_nursery(self) -> None:
        """Have the process that ranks are forked from; done at the first job."""
        if self._nursery is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONWARNINGS": "default",
        }
        command = [sys.executable, str(HERE / "launch.py"), "--nursery", str(theirs.fileno())]
        self._nursery = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        if not ours.recv(4096):
            raise RuntimeError("the process that ranks are forked from did not start")
        self._control = ours
        self._watch(ours, self._from_nursery)

    def fork(self, order: dict[str, Any]) -> int:
        """A new rank; returns its pid."""
        self.start_nursery()
        assert self._control is not None
        with self.changed:
            self._tokens += 1
            token = self._tokens
            self._control.send(json.dumps({**order, "token": token}).encode())
            if not self.changed.wait_for(lambda: token in self._born, 30):
                raise RuntimeError("no rank was born")
            return self._born.pop(token)

    def _watch(self, sock: socket.socket, call: Callable[[socket.socket], bool]) -> None:
        with self.changed:
            self._selector.register(sock, selectors.EVENT_READ, call)
        self._wake.send(b"x")

    def watch_job(self, job: Job, listener: socket.socket) -> None:
        """Hear the ranks of a job."""
        self._watch(listener, job.accept)

    def unwatch(self, sock: socket.socket) -> None:
        """Hear it no more, and close it."""
        with self.changed, contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()

    def _hear(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._woken.recv(4096)
                    continue
                with self.changed:
                    if key.fileobj.fileno() < 0:  # type: ignore[union-attr]
                        continue
                    if not key.data(key.fileobj):
                        with contextlib.suppress(KeyError, ValueError):
                            self._selector.unregister(key.fileobj)
                    self.changed.notify_all()

    def register(self, sock: socket.socket, call: Callable[[socket.socket], bool]) -> None:
        """Within ``changed``: hear this socket as well."""
        self._selector.register(sock, selectors.EVENT_READ, call)

    def _from_nursery(self, sock: socket.socket) -> bool:
        message = sock.recv(65536)
        if not message:
            return False
        told = json.loads(message)
        if "born" in told:
            self._born[told["token"]] = told["born"]
        else:
            self._ended[told["pid"]] = told["status"]
        return True

    def status_of(self, pid: int) -> int | None:
        """How a forked rank ended; None while it lives."""
        return self._ended.get(pid)

    def close(self) -> None:
        """End the nursery and what is left of its children."""
        self._closing = True
        self._wake.send(b"x")
        self._thread.join(5)
        if self._control is not None:
            self._control.close()
        if self._nursery is not None:
            self._nursery.wait(10)
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def __enter__(self) -> Launcher:  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port(node: Node) -> int:
    """A port nobody has: on an isolated node any will do."""
    if node.holder is not None:
        return random.randrange(20000, 30000)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """The ranks of one job: ``per_node`` on each node, numbered by node. A context manager: what still lives is killed at its end.

    Args:
        launcher: Who starts processes.
        nodes: Where; the first one holds the job's store.
        per_node: Ranks on each node, one number or one for each.
        program: ``module:function``, called as ``function(voice, **options)`` in every rank.
        options: The same for all ranks; ``by_rank`` adds to them.
        torchrun: Arguments for torchrun, which starts the ranks then (``()`` for its defaults); None: forked ranks.
    """

    _made = 0

    def __init__(
        self,
        launcher: Launcher,
        cluster: Cluster,
        program: str,
        *,
        per_node: int | Sequence[int] = 1,
        nodes: Sequence[Node] | None = None,
        options: dict[str, Any] | None = None,
        by_rank: dict[int, dict[str, Any]] | None = None,
        environment: dict[str, str] | None = None,
        torchrun: Sequence[str] | None = None,
    ) -> None:
        self._launcher = launcher
        Job._made += 1
        self.folder = cluster.folder / f"job-{Job._made}"
        self.folder.mkdir()
        self.ranks: list[Rank] = []
        self.earlier: list[Rank] = []
        """Lives of ranks that torchrun has replaced."""
        self._unknown: dict[socket.socket, bytes] = {}
        self._spoken: dict[socket.socket, tuple[Rank, bytes]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.folder / "s"))
        self._listener.listen(128)
        self._waiting: list[tuple[Rank, dict[str, Any]]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        """torchrun's own, one for each node."""
        used = list(cluster.nodes if nodes is None else nodes)
        self.nodes = used
        counts = [per_node] * len(used) if isinstance(per_node, int) else list(per_node)
        self.world = sum(counts)
        launcher.watch_job(self, self._listener)
        port = free_port(used[0])
        shared = {"EVERYSTEP_TEST_SOCKET": str(self.folder / "s"), "EVERYSTEP_TEST_FOLDER": str(self.folder), **(environment or {})}
        if torchrun is not None:
            self._by_torchrun(used, counts, port, program, options or {}, by_rank or {}, shared, torchrun)
            return
        rank = 0
        for number, (node, count) in enumerate(zip(used, counts, strict=True)):
            for local in range(count):
                places = {"RANK": rank, "WORLD_SIZE": self.world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": number,
                          "MASTER_ADDR": used[0].address, "MASTER_PORT": port, "EVERYSTEP_TEST_NODE": node.name}  # fmt: skip
                order = {
                    "environment": {**{key: str(value) for key, value in places.items()}, **node.environment, **shared},
                    "holder": node.holder,
                    "errors": str(self.folder / f"rank-{rank}.err"),
                    "program": program,
                    "options": {**(options or {}), **(by_rank or {}).get(rank, {})},
                }
                pid = launcher.fork(order)
                node.pids.add(pid)
                with launcher.changed:
                    self._known(Rank(rank=rank, pid=pid, node=node))
                rank += 1

    def _by_torchrun(self, nodes: Sequence[Node], counts: Sequence[int], port: int, program: str, options: dict[str, Any],
                     by_rank: dict[int, dict[str, Any]], shared: dict[str, str], more: Sequence[str]) -> None:  # fmt: skip
        for number, (node, count) in enumerate(zip(nodes, counts, strict=True)):
            command = [*node.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--nproc-per-node", str(count),
                       "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].address}:{port}", "--rdzv-id", self.folder.name,
                       "--local-addr", node.address, *more, str(HERE / "launch.py"), "--rank", program, json.dumps(options), json.dumps(by_rank)]  # fmt: skip
            # With torchrun's own store shared, nodes that count restarts differently meet the addresses of the life before.
            own = {"EVERYSTEP_TEST_NODE": node.name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            environment = {**os.environ, **node.environment, **shared, **own}
            with (self.folder / f"torchrun-{number}.err").open("wb") as errors:
                self.processes.append(subprocess.Popen(command, env=environment, stdout=errors, stderr=errors))

    # -- hearing (in the launcher's thread, under its condition) ---------------------------------------------------------------
    def accept(self, listener: socket.socket) -> bool:
        connection, _ = listener.accept()
        self._unknown[connection] = b""
        self._launcher.register(connection, self._heard)
        return True

    def _known(self, rank: Rank) -> None:
        for connection, (waiting, _) in list(self._spoken.items()):  # it spoke before its pid was known here
            if waiting.pid == rank.pid:
                rank.lines, rank.voice = waiting.lines, connection
                self._spoken[connection] = rank, self._spoken[connection][1]
        self.ranks.append(rank)

    def _heard(self, connection: socket.socket) -> bool:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            if connection in self._spoken:
                self._spoken[connection][0].silent = True
            return False
        rank, before = self._spoken.get(connection, (None, self._unknown.get(connection, b"")))
        *lines, rest = (before + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if rank is None:
                rank = self._introduced(connection, told)
            rank.lines.append({**told, "at": time.monotonic()})
        if rank is None:
            self._unknown[connection] = rest
        else:
            self._spoken[connection] = rank, rest
        return True

    def _introduced(self, connection: socket.socket, hello: dict[str, Any]) -> Rank:
        found = next((rank for rank in self.ranks if rank.pid == hello["pid"]), None)
        if found is None:
            node = next(node for node in self.nodes if node.name == hello["node"])
            found = Rank(rank=hello["rank"], pid=hello["pid"], node=node)
            if self.processes:  # torchrun starts them
                node.pids.add(found.pid)
                replaced = [rank for rank in self.ranks if rank.rank == found.rank]
                self.earlier += replaced
                self.ranks = sorted([rank for rank in self.ranks if rank not in replaced] + [found], key=lambda rank: rank.rank)
        found.voice = connection
        self._unknown.pop(connection, None)
        return found

    # -- waiting ---------------------------------------------------------------------------------------------------------------
    def _settle(self) -> None:
        for rank in self.ranks:
            if rank.status is None:
                rank.status = self._launcher.status_of(rank.pid)
                if rank.status is not None:
                    rank.node.pids.discard(rank.pid)

    def wait(self, until: Callable[[], Any], *, what: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Wait until the ranks have told what is looked for; returns what ``until`` returned.

        Raises:
            TimedOut: with every rank's last lines and the stacks of its threads (the ranks are dead then).
        """
        found: Any = None

        def looked() -> bool:
            nonlocal found
            self._settle()
            found = until()
            return bool(found)

        with self._launcher.changed:
            if self._launcher.changed.wait_for(looked, timeout_s):
                return found
        raise TimedOut(f"waited {timeout_s:g} s for {what or 'the ranks'}\n{self.autopsy()}")

    def linger(self, seconds: float) -> None:
        """Let the ranks go on for so long, or until one of them ends: for moments that are to be random."""
        with self._launcher.changed:
            self._launcher.changed.wait_for(lambda: (self._settle(), any(rank.over for rank in self.ranks))[1], seconds)

    def all_said(
        self, what: str, *, count: int = 1, timeout_s: float = DEFAULT_TIMEOUT_S, ranks: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Wait until every rank (or these) has told ``what`` so many times; returns the last of each. A rank that ends first is an error."""
        wanted = list(range(self.world)) if ranks is None else list(ranks)

        def told() -> bool:
            if len(self.ranks) <= max(wanted):
                return False
            missing = [rank for rank in wanted if len(self.ranks[rank].said(what)) < count]
            ended = [rank for rank in missing if self.ranks[rank].over and not self._more_to_come(self.ranks[rank])]
            if ended and not self.processes:
                raise AssertionError(f"rank {ended[0]} ended ({self.ranks[ended[0]].status}) before it told {what!r}\n{self.report()}")
            return not missing

        self.wait(told, what=f"{what!r} from ranks {wanted}", timeout_s=timeout_s)
        return [self.ranks[rank].said(what)[count - 1] for rank in wanted]

    def _more_to_come(self, rank: Rank) -> bool:
        """It has ended, and not all that it wrote has been read."""
        return rank.status is not None and rank.voice is not None and not rank.silent

    def ended(self, *, timeout_s: float = DEFAULT_TIMEOUT_S, ranks: Sequence[int] | None = None) -> list[int | None]:
        """Wait for the end of every rank (or of these); returns their statuses."""
        wanted = list(range(self.world)) if ranks is None else list(ranks)
        over = lambda rank: rank.status is not None and (rank.silent or rank.voice is None)  # noqa: E731 - all it told is here too
        self.wait(lambda: all(over(self.ranks[rank]) for rank in wanted), what=f"the end of ranks {wanted}", timeout_s=timeout_s)
        return [self.ranks[rank].status for rank in wanted]

    def finished(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait for the end of all ranks; all have to end well."""
        if self.processes:
            deadline = time.monotonic() + timeout_s
            for process in self.processes:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise TimedOut(f"torchrun did not end within {timeout_s:g} s\n{self.autopsy()}") from None
            assert [process.returncode for process in self.processes] == [0] * len(self.processes), self.report()
            return
        self.ended(timeout_s=timeout_s)
        assert all(rank.status == 0 for rank in self.ranks), self.report()

    # -- ending ----------------------------------------------------------------------------------------------------------------
    def kill(self, number: int = signal.SIGKILL, *, ranks: Sequence[int] | None = None) -> None:
        """A signal to all ranks, or to these; after SIGKILL, their ends are waited for."""
        chosen = [rank for rank in self.ranks if ranks is None or rank.rank in ranks]
        for rank in chosen:
            rank.kill(number)
        if number == signal.SIGKILL and not self.processes:
            self.ended(ranks=[rank.rank for rank in chosen], timeout_s=20)

    def autopsy(self) -> str:
        """Abort what lives, so that it writes the stacks of all its threads, and tell everything."""
        for rank in self.ranks:
            rank.kill(signal.SIGABRT)
        with self._launcher.changed:
            self._launcher.changed.wait_for(self._all_dead, 5)
        return self.report()

    def _all_dead(self) -> bool:
        self._settle()
        return all(rank.silent if self.processes else rank.status is not None for rank in self.ranks)

    def errors(self, rank: int) -> str:
        """What a rank wrote to standard error."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"rank-{rank}.err").read_text(errors="replace")
        return ""

    def report(self) -> str:
        """Everything worth knowing about the ranks, for a failed test."""
        told = []
        for rank in self.ranks:
            told.append(f"-- rank {rank.rank} on {rank.node.name}: status {rank.status}, {len(rank.lines)} lines; the last:")
            told += [json.dumps({key: value for key, value in line.items() if key != "traceback"})[:400] for line in rank.lines[-4:]]
            told.append(self.errors(rank.rank)[-2500:])
        for path in sorted(self.folder.glob("torchrun-*.err")):
            told.append(f"-- {path.name}\n{path.read_text(errors='replace')[-6000:]}")
        for node in self.nodes:
            for path in sorted(node.runtime.glob("*.log")):
                told.append(f"-- agent's log on {node.name}\n{path.read_text(errors='replace')[-2000:]}")
        return "\n".join(told)

    def close(self) -> None:
        """Kill what lives."""
        for rank in self.ranks:
            rank.kill()
        for process in self.processes:
            process.kill()
            process.wait()
        if not self.processes:
            with contextlib.suppress(TimedOut):
                self.ended(timeout_s=10)
        for rank in self.ranks:
            rank.node.pids.discard(rank.pid)
        for connection in [*self._spoken, *self._unknown]:
            self._launcher.unwatch(connection)
        self._launcher.unwatch(self._listener)

    def __enter__(self) -> Job:  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, AssertionError) and "-- rank 0" not in str(error):
            sys.stderr.write(self.report() + "\n")
        self.close()


@contextlib.contextmanager
def launched(cluster: Cluster, program: str, **more: Any) -> Iterator[Job]:
    """A job with a launcher of its own, for use by hand."""
    with Launcher() as launcher, Job(launcher, cluster, program, **more) as job:
        yield job


if __name__ == "__main__":
    if sys.argv[1] == "--nursery":
        _nursery(int(sys.argv[2]))
    else:  # --rank: started by torchrun
        _, _, name, for_all, for_each = sys.argv
        sys.modules["launch"] = sys.modules["__main__"]
        live(name, {**json.loads(for_all), **json.loads(for_each).get(os.environ["RANK"], {})})
