"""ls, show, verify and agent ls of runs that several nodes save: on one store, on a store for each, and in agents' memory."""

from __future__ import annotations

import contextlib
import types

import pytest

from everystep import agent as agents
from everystep.agent import messages
from everystep.agent.client import AgentClient
from everystep.manifest import encode, merge
from everystep.repository import CheckpointKey, Repository
from everystep.testing.samples import node_file, node_part, node_payload, persist_node

NODES = 2
KEY = CheckpointKey(7, 1)


@pytest.fixture
def shared(tmp_path):
    """A run that two nodes of one rank each saved into one store."""
    return make(tmp_path / "run", nodes=range(NODES), shared=True)


@pytest.fixture
def apart(tmp_path):
    """The same where each node has its own store: that of the second node."""
    return make(tmp_path / "run", nodes=[1], shared=False)


def make(path, *, nodes, shared):
    run = Repository.open(str(path), create=True)
    run.start_attempt(parent=None, now=1.0, world=NODES, nodes=NODES, number=1, job="j", shared=shared)
    for node in nodes:
        persist_node(run, KEY, node, NODES, shared=shared)
    run.commit(merge([node_part(KEY, node, NODES, shared=shared) for node in range(NODES)]))
    return path


class FakeAgent:
    """An agent's connection that answers what it is told to."""

    notes = ()

    def __init__(self, snapshots, *, run="/runs/x", part=None):
        self.welcome = types.SimpleNamespace(pid=123, run_url=run, run_id="aa", version="0.1.0", trainers=[9])
        self._snapshots, self._part = snapshots, part

    def snapshots(self):
        return self._snapshots

    def stats(self):
        return {"notes": dict(enumerate(self.notes))}

    @contextlib.contextmanager
    def take(self, slab):
        assert slab == 5
        yield types.SimpleNamespace(part=self._part)

    def close(self):
        pass


def summary(step, node, *, replica=False, slab=5):
    return messages.SnapshotSummary(
        slab=slab, step=step, attempt=1, nbytes=1000, saved_at=1.0, persisted=False, node=node, nodes=NODES, world=NODES, replica=replica
    )


def test_ls_of_a_store_that_all_nodes_see(everystep, shared):
    """The table says by how many ranks and nodes each checkpoint was saved; all files are here."""
    [row] = everystep("ls", shared, "--json").json["checkpoints"]
    assert {name: row[name] for name in ("nodes", "world", "shared", "nodes_here")} == {"nodes": 2, "world": 2, "shared": True, "nodes_here": [0, 1]}
    assert row["nbytes"] == 2 * len(node_payload(KEY, 0))
    table = everystep("ls", shared).stdout
    assert "2 ranks on 2 nodes" in table
    assert "files of" not in table


def test_ls_of_a_store_of_ones_own(everystep, apart):
    """Whose files are here is said, and that the others' are elsewhere."""
    [row] = everystep("ls", apart, "--json").json["checkpoints"]
    assert (row["shared"], row["nodes_here"]) == (False, [1])
    table = everystep("ls", apart).stdout
    assert "files of node 2 of 2" in table
    assert "the others' are on their nodes" in table


def test_ls_of_one_rank_says_nothing_of_nodes(everystep, three):
    """A run of one rank looks as it did."""
    assert "saved by" not in everystep("ls", three.path).stdout
    assert "saved by" not in everystep("show", three.path).stdout


def test_show_of_several_nodes(everystep, shared):
    """Show has the ranks, all files, rank 0's values, and any other rank's on request; a rank that there was not is an error that says so."""
    found = everystep("show", shared, "--json").json
    assert (found["world"], found["nodes"], found["values"], found["values_differ"]) == (2, 2, {"rank": 0}, [1])
    assert [file["here"] for file in found["files"]] == [True, True]
    assert everystep("show", shared, "--rank", "1", "--json").json["values"] == {"rank": 1}
    assert "2 ranks on 2 nodes" in everystep("show", shared).stdout
    answer = everystep("show", shared, "--rank", "2")
    assert answer.code != 0
    assert "no rank 2" in answer.stderr


def test_show_of_a_store_of_ones_own(everystep, apart):
    """Which files are on another node is said for each."""
    found = everystep("show", apart, "--json").json
    assert {file["key"].rpartition("/")[2]: file["here"] for file in found["files"]} == {node_file(0): False, node_file(1): True}
    printed = everystep("show", apart).stdout
    assert "here: node 2 of 2 (the others' files are on their nodes)" in printed
    assert printed.count("another node") == 1


def test_verify_of_a_store_of_ones_own(everystep, apart):
    """F7: good means this node's files, and says so; a flipped bit in them is found."""
    answer = everystep("verify", apart)
    assert answer.code == 0
    assert "here are only the files of node 2 of 2" in answer.stdout
    [checked] = everystep("verify", apart, "--json").json["checkpoints"]
    assert (checked["good"], checked["data_nbytes"], checked["nodes_here"]) == (True, len(node_payload(KEY, 1)), [1])
    path = apart / "data" / str(KEY) / node_file(1)
    data = bytearray(path.read_bytes())
    data[80] ^= 1
    path.write_bytes(data)
    answer = everystep("verify", apart)
    assert answer.code == 12
    assert node_file(1) in answer.stdout


def test_verify_of_a_store_that_all_nodes_see(everystep, shared):
    """Every node's part and data file is read; one node's missing part is named."""
    assert everystep("verify", shared, "--json").json["good"]
    (shared / "data" / str(KEY) / "node-00002.json").unlink()
    answer = everystep("verify", shared)
    assert answer.code == 12
    assert "node-00002.json: it is missing" in answer.stdout


def test_given_up_checkpoints_are_not_shown(everystep, shared):
    """A step that was given up is neither listed nor found, and the sweep has nothing to say of it while its attempt lives."""
    run = Repository.open(str(shared))
    run.renew(1, now=1e12, ttl_s=1e12)
    late = CheckpointKey(8, 1)
    persist_node(run, late, 0, NODES)
    run.give_up(late, "node 2 died")
    assert [row["step"] for row in everystep("ls", shared, "--json").json["checkpoints"]] == [7]
    assert everystep("show", shared, "8").code == 10
    assert everystep("show", shared, str(late)).code == 10
    assert everystep("sweep", shared, "--dry-run", "--json").json["swept"] == []
    assert everystep("verify", shared, "--all", "--json").json["good"]


def test_agent_ls_shows_own_snapshots_and_copies(everystep, monkeypatch):
    """Each agent's node is shown, what it holds of its own, and which copies it holds for other nodes."""
    client = FakeAgent([summary(30, 1), summary(20, 1), summary(29, 0, replica=True, slab=-1)])
    monkeypatch.setattr(agents, "find_agents", lambda: [types.SimpleNamespace(run_url="/runs/x", run_id="aa", pid=123)])
    monkeypatch.setattr(AgentClient, "connect", lambda **_: client)
    [told] = everystep("agent", "ls", "--json").json["agents"]
    assert [(one["step"], one["node"], one["nodes"], one["replica"]) for one in told["snapshots"]] == [
        (30, 1, 2, False), (20, 1, 2, False), (29, 0, 2, True),
    ]  # fmt: skip
    line = everystep("agent", "ls").stdout.splitlines()[-1]
    assert "2 of 2" in line
    assert "step 29 of node 1" in line
    assert " 30 " in line


def test_agent_ls_says_why_copies_are_not_renewed(everystep, monkeypatch):
    """A line below the table, and in JSON."""
    client = FakeAgent([summary(30, 1), summary(29, 0, replica=True, slab=-1)])
    client.notes = ["the copies in other nodes' memory are not renewed: node 2: no memory"]
    monkeypatch.setattr(agents, "find_agents", lambda: [types.SimpleNamespace(run_url="/runs/x", run_id="aa", pid=123)])
    monkeypatch.setattr(AgentClient, "connect", lambda **_: client)
    assert everystep("agent", "ls", "--json").json["agents"][0]["notes"] == client.notes
    assert "not renewed: node 2: no memory" in everystep("agent", "ls").stdout


def test_agent_ls_of_one_node_says_nothing_of_nodes(everystep, monkeypatch):
    """With one node the table is as it was."""
    one = messages.SnapshotSummary(slab=0, step=3, attempt=1, nbytes=10, saved_at=1.0, persisted=True)
    monkeypatch.setattr(agents, "find_agents", lambda: [types.SimpleNamespace(run_url="/runs/x", run_id="aa", pid=123)])
    monkeypatch.setattr(AgentClient, "connect", lambda **_: FakeAgent([one]))
    table = everystep("agent", "ls").stdout
    assert "copies" not in table
    assert "node" not in table


def test_what_several_nodes_hold_in_memory(everystep, shared, monkeypatch):
    """A step in memory alone is listed with whose share is here, and shown from this node's part."""
    step = CheckpointKey(9, 1)
    part = node_part(step, 1, NODES)
    client = FakeAgent([summary(9, 1), summary(9, 0, replica=True, slab=-1), summary(8, 1)], run=str(shared), part=part)
    monkeypatch.setattr(AgentClient, "connect", lambda **_: client)
    rows = {row["step"]: row for row in everystep("ls", shared, "--json").json["checkpoints"]}
    assert (rows[9]["where"], rows[9]["nodes_here"], rows[9]["nbytes"]) == (["memory"], [0, 1], 2000)
    assert rows[8]["nodes_here"] == [1]
    assert "files of node 2 of 2" in everystep("ls", shared).stdout
    found = everystep("show", shared, "9", "--json").json
    assert (found["read_from"], found["nodes_here"], found["values"], found["values_of_rank"]) == ("memory", [1], {"rank": 1}, 1)
    assert "what the others hold is in their agents" in everystep("show", shared, "9").stdout


def test_part_of_another_save_is_no_good(everystep, apart):
    """A sound part that does not fit the manifest is damage."""
    (apart / "data" / str(KEY) / "node-00002.json").write_bytes(encode("part", node_part(KEY, 1, NODES, shared=False, metrics={"x": 1.0})))
    answer = everystep("verify", apart)
    assert answer.code == 12
    assert "does not agree" in answer.stdout
