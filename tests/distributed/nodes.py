"""Several nodes on one machine, for tests: network namespaces behind a switch, each with an address, a runtime directory and a disk of its own.

A node is made of anonymous namespaces (network, mounts, host name) that one holder process keeps open, so that nothing is left behind however the tests
end: the holder reads from a pipe of this process, and the kernel takes the namespaces down with their last process. The switch is a bridge in a namespace of
its own; the machine's own network is not touched, and several test runs on one machine do not meet.

Inside a node ``Node.local`` is the same path on every node and another disk on each (a bind mount), ``Cluster.shared`` is one folder that all see. The product
tells nodes apart by their runtime directory (``EVERYSTEP_RUNTIME_DIR``), so where root or namespaces are missing a cluster of plain folders
(``Cluster(isolated=False)``) serves for whatever needs no cut link: ``Node.local`` then differs by node.

Delay and loss of single packets need the kernel's ``netem``, which many container kernels lack: links are cut, and slowed by a token bucket (``tbf``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

SUBNET = "10.77.0"
_CLONE_NEWNS, _CLONE_NEWNET, _CLONE_NEWUTS = 0x00020000, 0x40000000, 0x04000000
_HOLD = 'hostname "$1" && ip link set lo up && echo ready && exec cat'
_END_S = 10.0


@functools.cache
def why_not_isolated() -> str:
    """Why nodes cannot have networks and mounts of their own here; empty when they can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    missing = [tool for tool in ("ip", "nsenter", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} for network namespaces"
    tried = subprocess.run(
        ["unshare", "-m", "-u", "-n", "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True, check=False
    )
    return "" if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip() or tried.returncode}"


class _Holder:
    """A process that keeps namespaces open for as long as this object, or this process, lives."""

    def __init__(self, host: str) -> None:
        command = ["unshare", "-m", "-u", "-n", "--propagation", "private", "sh", "-c", _HOLD, "sh", host]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the namespaces of {host} could not be made")
        self.pid = self.process.pid

    def run(self, *command: str) -> None:
        """Run a command inside; its failure is an error here."""
        subprocess.run(
            ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--net", *command], check=True, capture_output=True, text=True
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Node:
    """One node: where its processes run, and what can happen to it."""

    def __init__(self, *, number: int, folder: Path, switch: _Holder | None) -> None:
        self.number = number
        self.name = f"node-{number}"
        self.folder = folder
        self.disk = folder / "disk"
        """Its own disk, seen from outside."""
        self.runtime = folder / "run"
        self._switch = switch
        self._holder: _Holder | None = None
        self.local = self.disk
        """Its own disk, seen from inside."""
        self.address = "127.0.0.1"
        self.interface = "lo"
        folder.mkdir()
        self.disk.mkdir()
        self.runtime.mkdir(mode=0o700)
        self.pids: set[int] = set()
        """Ranks started here, told by whoever starts them (agents are found by their environment)."""
        if switch is not None:
            self._isolate(switch)

    def _isolate(self, switch: _Holder) -> None:
        self._holder = _Holder(self.name)
        self.address, self.interface = f"{SUBNET}.{self.number + 1}", "eth0"
        port = f"port{self.number}"
        with contextlib.suppress(subprocess.CalledProcessError):  # of a node that was lost: it went with its namespace
            switch.run("ip", "link", "del", port)
        switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(self._holder.pid))
        switch.run("ip", "link", "set", port, "master", "br0", "up")
        self._holder.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self._holder.run("ip", "link", "set", "eth0", "up")
        self.local = self.folder.parent / "local"
        self.local.mkdir(exist_ok=True)
        self._holder.run("mount", "--bind", str(self.disk), str(self.local))
        hosts = self.folder / "hosts"  # there is no name server behind the switch
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{SUBNET}.{number + 1} node-{number}\n" for number in range(200)))
        self._holder.run("mount", "--bind", str(hosts), "/etc/hosts")

    # -- processes ------------------------------------------------------------------------------------------------------------
    @property
    def holder(self) -> int | None:
        """The process whose namespaces are the node's; None for a plain node."""
        return None if self._holder is None else self._holder.pid

    @property
    def environment(self) -> dict[str, str]:
        """What its processes need to know."""
        return {"EVERYSTEP_RUNTIME_DIR": str(self.runtime), "GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1"}

    @property
    def prefix(self) -> list[str]:
        """Put before a command to run it on the node."""
        return [] if self._holder is None else ["nsenter", "--target", str(self._holder.pid), "--mount", "--uts", "--net"]

    def agents(self) -> list[psutil.Process]:
        """Its living agents."""
        wanted = f"EVERYSTEP_RUNTIME_DIR={self.runtime}".encode()
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) not in self.pids:
                with contextlib.suppress(OSError, psutil.Error):
                    if b"everystep.agent" in Path(entry.path, "cmdline").read_bytes() and wanted in Path(
                        entry.path, "environ"
                    ).read_bytes().split(b"\0"):
                        process = psutil.Process(int(entry.name))
                        if process.status() != psutil.STATUS_ZOMBIE:
                            found.append(process)
        return found

    def kill_agents(self) -> list[int]:
        """SIGKILL to its agents; returns their pids when they are gone."""
        found = self.agents()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=_END_S)
        return [process.pid for process in found]

    def kill(self) -> None:
        """All its processes at once, the agents too; memory is lost, the disk stays. What a reboot leaves of the runtime directory: nothing."""
        for pid in list(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kill_agents()
        for path in self.runtime.iterdir():
            path.unlink()

    # -- the network ----------------------------------------------------------------------------------------------------------
    def _needs_network(self) -> _Holder:
        if self._switch is None:
            raise RuntimeError("a plain node has no link of its own")
        return self._switch

    def cut(self) -> None:
        """Pull its cable at the switch: its own interface stays up, and packets vanish."""
        self._needs_network().run("ip", "link", "set", f"port{self.number}", "nomaster")

    def mend(self) -> None:
        """Plug the cable in again."""
        self._needs_network().run("ip", "link", "set", f"port{self.number}", "master", "br0")

    def slow(self, nbytes_per_s: int | None) -> None:
        """Limit what it receives and sends (None: no limit any more), with a token bucket at both ends of its cable."""
        switch, holder = self._needs_network(), self._holder
        assert holder is not None
        for end, device in ((switch, f"port{self.number}"), (holder, "eth0")):
            with contextlib.suppress(subprocess.CalledProcessError):
                end.run("tc", "qdisc", "del", "dev", device, "root")
            if nbytes_per_s is not None:
                limit = ["rate", f"{nbytes_per_s * 8}bit", "burst", "64kb", "latency", "500ms"]
                end.run("tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)

    # -- the disk --------------------------------------------------------------------------------------------------------------
    def small_disk(self, nbytes: int) -> None:
        """Have a disk of this size at ``local`` from now on: ext4 in a file, so that it fills up as real ones do."""
        if self._holder is None:
            raise RuntimeError("a plain node has no mounts of its own")
        image = self.folder / f"disk-{uuid.uuid4().hex[:6]}.img"
        with image.open("wb") as file:
            file.truncate(nbytes)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
        self._holder.run("mount", "-o", "loop", str(image), str(self.local))

    def fill_disk(self, *, but_nbytes: int = 0) -> Path:
        """Fill the disk at ``local``, all but so many bytes; returns the file that fills it, as seen from inside."""
        filler = self.local / "filler"
        script = (
            "import os,sys\nd=os.open(sys.argv[1],os.O_CREAT|os.O_WRONLY|os.O_APPEND)\n"
            "for n in (1<<20,4096,1):\n  try:\n    while os.write(d,bytes(n)): pass\n  except OSError: pass\n"
            "os.ftruncate(d,max(0,os.fstat(d).st_size-int(sys.argv[2])))\ntry: os.fsync(d)\nexcept OSError: pass"
        )
        subprocess.run([*self.prefix, "python3", "-c", script, str(filler), str(but_nbytes)], check=True, capture_output=True)
        return filler

    def remove(self, path: Path) -> None:
        """Remove a file or a folder as seen from inside."""
        subprocess.run([*self.prefix, "rm", "-rf", str(path)], check=True, capture_output=True)

    def read_disk(self, path: Path) -> bytes:
        """A file as seen from inside."""
        return subprocess.run([*self.prefix, "cat", str(path)], check=True, capture_output=True).stdout

    def names(self, path: Path) -> list[str]:
        """Names in a folder as seen from inside; empty when it is not there."""
        done = subprocess.run([*self.prefix, "ls", "-A", str(path)], check=False, capture_output=True, text=True)
        return done.stdout.split()

    def close(self) -> None:
        """Kill what runs there and take its namespaces down."""
        with contextlib.suppress(FileNotFoundError):
            self.kill()
        if self._holder is not None:
            self._holder.close()
            self._holder = None


class Cluster:
    """Nodes that see each other, and a folder that all of them see. A context manager.

    Args:
        count: How many nodes.
        isolated: With networks and mounts of their own (see ``why_not_isolated``), or plain folders.
        folder: Where everything lies; None: a temporary directory (short: names of Unix sockets are).
    """

    def __init__(self, count: int, *, isolated: bool = True, folder: Path | None = None) -> None:
        self._owned = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="esn", dir="/tmp")) if folder is None else folder
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        self._switch: _Holder | None = None
        self.nodes: list[Node] = []
        self._made = 0
        try:
            if isolated:
                self._switch = _Holder("switch")
                self._switch.run("ip", "link", "add", "br0", "type", "bridge")
                self._switch.run("ip", "link", "set", "br0", "up")
            for _ in range(count):
                self.add()
        except BaseException:
            self.close()
            raise

    @property
    def isolated(self) -> bool:
        """Whether nodes have networks of their own."""
        return self._switch is not None

    def add(self) -> Node:
        """One more node."""
        node = Node(number=self._made, folder=self.folder / f"n{self._made}", switch=self._switch)
        self._made += 1
        self.nodes.append(node)
        return node

    def lose(self, node: Node) -> None:
        """A node is gone for good, its disk too. The others keep their order."""
        node.close()
        self.nodes.remove(node)
        shutil.rmtree(node.folder, ignore_errors=True)

    def close(self) -> None:
        """Kill everything, take the namespaces down, remove the folders."""
        for node in self.nodes:
            node.close()
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        if self._owned:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def on(nodes: Sequence[Node], rate: int) -> Iterator[None]:
    """Slow these nodes' links while the block runs."""
    for node in nodes:
        node.slow(rate)
    try:
        yield
    finally:
        for node in nodes:
            node.slow(None)


def enter(holder: int | None) -> None:
    """Move this single-threaded process into a node's namespaces."""
    if holder is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for name, kind in (("net", _CLONE_NEWNET), ("uts", _CLONE_NEWUTS), ("mnt", _CLONE_NEWNS)):
        descriptor = os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, kind) != 0:
                raise OSError(ctypes.get_errno(), f"setns {name} of process {holder}")
        finally:
            os.close(descriptor)
