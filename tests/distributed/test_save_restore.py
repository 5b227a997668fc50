"""Save at every step and restore with 4 ranks on 2 nodes, by every layout, from memory and from disk; grow and shrink; what lies on disk."""

from __future__ import annotations

import json
import math

import pytest
from checks import as_json, lived, manifests, restored, run_of
from train import LAYOUTS

PARALLEL = [layout for layout in LAYOUTS if layout != "copies"]


def abandon(job) -> None:
    """Kill all ranks, as after a crash: their agents stay."""
    job.all_said("done")
    job.kill()


@pytest.mark.parametrize("layout", PARALLEL)
def test_a_restart_goes_on_bit_by_bit(clusters, jobs, trajectory, layout):
    """Killed after step 3, resumed from memory, closed after step 5, resumed from disk: everything equals the uninterrupted run (F12, F13, F14)."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "layout": layout}
    known = trajectory(layout, 4, 7)
    first = jobs(cluster, per_node=2, options={**options, "steps": 3, "wait": "memory", "close": False})
    abandon(first)
    second = jobs(cluster, per_node=2, options={**options, "until": 5})
    restored(second, known, step=3, tier="memory")
    second.finished()
    for node in cluster.nodes:
        node.kill_agents()
    third = jobs(cluster, per_node=2, options={**options, "until": 7})
    restored(third, known, step=5, tier="disk")
    third.finished()
    told = {place: (line["digest"], line["loss"]) for place, line in lived(first, second, third).items()}
    assert told == {place: (line["digest"], line["loss"]) for place, line in known.items() if place[1]}


def test_every_node_has_a_disk_of_its_own(clusters, jobs, trajectory):
    """Node-local stores: each node has the same manifest and only its own files; restored from both disks together; one lost disk is said and passed over."""
    cluster = clusters(2, isolated=True)
    options = {**run_of(cluster, "local"), "layout": "fsdp"}
    known = trajectory("fsdp", 4, 4)
    job = jobs(cluster, per_node=2, options={**options, "steps": 3})
    job.finished()
    run = cluster.nodes[0].local / "run"
    one, other = cluster.nodes
    assert manifests(run, one) == manifests(run, other) != []
    newest = manifests(run, one)[-1]
    assert one.read_disk(run / "manifests" / f"{newest}.json") == other.read_disk(run / "manifests" / f"{newest}.json")
    files = [set(node.names(run / "data" / newest)) for node in (one, other)]
    data = [{name for name in names if name.endswith(".safetensors")} for names in files]
    assert data[0]
    assert data[1]
    assert not data[0] & data[1]
    for node in cluster.nodes:
        node.kill_agents()
    again = jobs(cluster, per_node=2, options={**options, "steps": 1})
    restored(again, known, step=3, tier="disk")
    again.finished()
    # The newest one's bytes vanish on one node: all ranks take the one before.
    for node in cluster.nodes:
        node.kill_agents()
    newest = manifests(run, other)[-1]
    other.remove(run / "data" / newest)
    third = jobs(cluster, per_node=2, options={**options, "steps": 0})
    restored(third, known, step=3, tier="disk")
    assert all(any(newest in text for text in rank.said("restored")[0]["skipped"]) for rank in third.ranks)
    third.finished()


def test_each_region_lies_on_disk_once(clusters, jobs):
    """Two replica groups (HSDP on two nodes) save one step of one run: one manifest, every byte once, the work shared between them (F18)."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "layout": "hsdp", "width": 4096}
    job = jobs(cluster, per_node=2, options={**options, "steps": 2, "disk": 2})
    job.finished()
    run = cluster.shared / "run"
    assert [key[:12] for key in manifests(run)] == ["000000000002"]
    [key] = manifests(run)
    body = json.loads((run / "manifests" / f"{key}.json").read_bytes())["body"]
    size = {"F32": 4, "I64": 8, "U8": 1, "U32": 4}
    wanted = sum(math.prod(shape) * size[dtype] for _, dtype, shape, *_ in body["tensors"])
    held = {path.name: path.stat().st_size for path in (run / "data" / key).glob("*.safetensors")}
    assert wanted <= sum(held.values()) < wanted + 16384 * len(held)
    shares = [sum(nbytes for name, nbytes in held.items() if f"-n0000{node}-" in name) for node in (1, 2)]
    assert min(shares) > 0.3 * sum(shares), held
    as_json(None, "verify", str(run))


def test_other_worlds_read_what_eight_ranks_saved(clusters, jobs):
    """8 ranks save; 6, 3, 1 and 12 restore, on two nodes and on one, optimizer included; what they then train on is finite and equal on all (F15)."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "layout": "fsdp"}
    saved = jobs(cluster, per_node=4, options={**options, "steps": 2, "full": True, "disk": 2})
    saved.finished(timeout_s=90)
    known = lived(saved)
    for node in cluster.nodes:
        node.kill_agents()
    for counts in ([3, 3], [2, 1], [1], [6, 6]):
        job = jobs(cluster, "programs:resized", nodes=cluster.nodes[: len(counts)], per_node=counts, options=options)
        lines = job.all_said("restored", timeout_s=90)
        assert {(line["step"], line["full"]) for line in lines} == {(2, known[0, 2]["full"])}, job.report()
        job.finished(timeout_s=90)
        assert len({line["full"] for rank in job.ranks for line in rank.said("trained")}) == 1


def test_other_worlds_read_what_agents_hold(clusters, jobs):
    """4 ranks on 2 nodes are killed; 2 ranks on the same nodes, then 6, restore from the agents' memory though nothing is on disk."""
    cluster = clusters(2)
    options = {**run_of(cluster, "shared"), "layout": "fsdp", "disk": False}
    saved = jobs(cluster, per_node=2, options={**options, "steps": 2, "full": True, "wait": "memory", "close": False})
    abandon(saved)
    known = lived(saved)
    for counts in ([1, 1], [3, 3]):
        job = jobs(cluster, "programs:resized", per_node=counts, options=options)
        lines = job.all_said("restored", timeout_s=90)
        assert {(line["step"], line["full"]) for line in lines} == {(2, known[0, 2]["full"])}, job.report()
        job.finished(timeout_s=90)


def test_ranks_that_are_new_take_another_ones_place(clusters, jobs):
    """2 ranks grow to 4: loaders of ranks 2 and 3 are those of ranks 0 and 1, their generators stay their own; 1 rank goes on as rank 0 (F16)."""
    cluster = clusters(1)
    options = {**run_of(cluster, "shared"), "layout": "ddp"}
    saved = jobs(cluster, per_node=2, options={**options, "steps": 3})
    saved.finished()
    known = lived(saved)
    assert known[0, 3]["generator"] != known[1, 3]["generator"]
    for world in (4, 1):
        job = jobs(cluster, "programs:resized", per_node=world, options=options)
        for rank, line in enumerate(job.all_said("restored")):
            assert (line["step"], line["saved_by"], line["drawn"]) == (3, rank % 2, known[rank % 2, 3]["drawn"]), job.report()
            assert line["generator"] == (known[rank, 3]["generator"] if rank < 2 else line["before"]), job.report()
        job.finished()


def test_steady_saves_exchange_nothing(clusters, jobs):
    """After the first save no rank asks the job's store or lists a directory, whatever the number of steps."""
    cluster = clusters(2)
    job = jobs(cluster, "programs:quiet", per_node=2, options={**run_of(cluster, "shared"), "steps": 4})
    counts = job.all_said("asked")
    assert all(line["after"] == line["before"] for line in counts), counts
    assert all(line["before"] > 0 for line in counts)
    job.finished()
