"""Which ranks share a node, and where each node is reached."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from everystep.agent.runtime import runtime_dir
from everystep.errors import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank is."""

    node: str
    """Equal for ranks that reach one agent's socket."""
    host: str
    """Address at which the other nodes reach this one."""
    domain: str
    """Failure domain of the node: a rack, a power feed, a zone."""
    machine: str = ""
    """Equal for nodes on one machine, whose loopback addresses reach each other."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """The nodes of a world, numbered by their lowest rank, as one rank sees them."""

    rank: int
    node: int
    """This rank's node."""
    node_of: tuple[int, ...]
    """By rank."""
    hosts: tuple[str, ...]
    """By node."""
    domains: tuple[str, ...]
    """By node."""

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.hosts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """This node's ranks, rising."""
        return tuple(rank for rank, node in enumerate(self.node_of) if node == self.node)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.rank == self.ranks[0]


ALONE = Topology(rank=0, node=0, node_of=(0,), hosts=("",), domains=("",))
"""One rank on one node."""


def topology(places: Sequence[Place], rank: int) -> Topology:
    """The nodes from every rank's place, by rank."""
    numbers: dict[str, int] = {}
    firsts: list[Place] = []
    for place in places:
        if place.node not in numbers:
            numbers[place.node] = len(firsts)
            firsts.append(place)
    node_of = tuple(numbers[place.node] for place in places)
    return Topology(rank=rank, node=node_of[rank], node_of=node_of, hosts=tuple(first.host for first in firsts),
                    domains=tuple(first.domain for first in firsts))  # fmt: skip


def own_place(domain: str | None) -> Place:
    """Where this process is. ``EVERYSTEP_ADDRESS`` and ``EVERYSTEP_DOMAIN`` say otherwise where what is found is wrong."""
    found = runtime_dir().stat()
    # The directory is where the agent's socket is; two containers of one machine that do not share it are two nodes.
    machine = _boot_id()
    return Place(
        node=f"{machine}-{found.st_dev:x}-{found.st_ino:x}",
        machine=machine,
        host=os.environ.get("EVERYSTEP_ADDRESS") or _address_towards(os.environ.get("MASTER_ADDR", "")),
        domain=domain if domain is not None else os.environ.get("EVERYSTEP_DOMAIN", ""),
    )


def are_hidden(places: Sequence[Place]) -> bool:
    """Whether one of several machines gave an address that only itself can reach: its own name is a loopback address in its hosts file."""
    machines = {place.machine for place in places}
    return len(machines) > 1 and any(_is_loopback(place.host) for place in places)


def host_towards(places: Sequence[Place], rank: int) -> str:
    """This rank's address once more, now from the way to another machine.

    Raises:
        ConfigError: No machine has an address that others can reach.
    """
    mine = places[rank]
    if not _is_loopback(mine.host):
        return mine.host
    other = next((place.host for place in places if place.machine != mine.machine and not _is_loopback(place.host)), None)
    found = _address_towards(other) if other is not None else mine.host
    if _is_loopback(found):
        raise ConfigError(f"the other machines cannot reach this one at {mine.host}", key=mine.host, kind="address",
                          hint="set EVERYSTEP_ADDRESS on each machine to its address in the job's network")  # fmt: skip
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _address_towards(master: str) -> str:
    """The address from which this machine speaks with the job's master: the network that the job uses. Nothing is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(master or "127.0.0.1", 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
