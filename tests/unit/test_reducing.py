"""Reducing checkpoints: what is left of a manifest, what may be dropped, races, retention, and restores."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch

import everystep
from everystep.errors import ConfigError, ConflictError, CorruptionError, LayoutError, NotFoundError
from everystep.manifest import Manifest, decode, document_of_rank, encode, merge
from everystep.policy import Candidate, Keep, protected, retain
from everystep.repository import CheckpointKey, Repository
from everystep.repository.reducing import groups_of_kind, without_groups
from everystep.store.local import LocalStore
from everystep.testing import CrashingStore, SimDisk
from everystep.testing.samples import FILE_NAME, OPTIMIZER_FILE, node_file, node_part, persist, persist_node, sample_part

LATER = 1e12


@pytest.fixture
def run():
    """A new run with its first attempt."""
    repository = Repository(LocalStore("/run", disk=SimDisk()))
    repository.begin(create=True)
    repository.start_attempt(parent=None, now=1.0)
    return repository


def key(step, attempt=1, reduced=0):
    return CheckpointKey(step, attempt, reduced)


def save(repository, step, attempt=1, **options):
    repository.commit(persist(repository, key(step, attempt), optimizer=True, **options))
    return key(step, attempt)


def there(repository):
    return sorted(name.removeprefix("data/") for name, _ in repository.store.list("data/") if not name.endswith(".json"))


def wrongs(repository, which):
    return [(name, wrong) for name, _, wrong in repository.verify(which) if wrong]


def document(*entries):
    return msgspec.Raw(b'{"state":{"dict":[%b]}}' % b",".join(entries))


def trained(**changes):
    """The manifest of a checkpoint with an optimizer, with other fields than that one has."""
    return msgspec.structs.replace(merge([sample_part(key(3), optimizer=True)]), **changes)


# -- keys and manifests -------------------------------------------------------------------------------------------------------


def test_keys_of_reductions():
    """A reduction's key is the checkpoint's with its number, sorts after it, and before the next step; nothing else is one."""
    assert str(key(150, 2, 1)) == "000000000150-0002-r1"
    assert CheckpointKey.parse("000000000150-0002-r12") == key(150, 2, 12)
    assert CheckpointKey.parse("000000000150-0002") == key(150, 2) == CheckpointKey(150, 2, 0)
    assert sorted([key(151), key(150, 1, 2), key(150, 1), key(150, 1, 1)]) == [key(150), key(150, 1, 1), key(150, 1, 2), key(151)]
    assert key(150, 2, 3).full == key(150, 2).full == key(150, 2)
    for text in ("000000000150-0002-r0", "000000000150-0002-r01", "000000000150-0002-r", "000000000150-0002r1", "000000000150-0002-R1"):
        with pytest.raises(ValueError, match="not a checkpoint key"):
            CheckpointKey.parse(text)


def test_old_manifests_are_the_same_bytes():
    """A manifest that is not reduced is written as before: none of the new fields is in it."""
    data = encode("manifest", trained())
    assert b"reduced" not in data
    assert b"dropped" not in data
    assert decode("manifest", data, Manifest, key="m").dropped == ()


def test_what_is_left_of_a_manifest():
    """Tensors, files and plain values of the group go, the others stay as they are; the bytes say what was dropped."""
    whole = trained(metrics={"loss": 0.5})
    left = without_groups(whole, ["optim"], number=1)
    assert [spec.name for spec in left.tensors] == ["model.a", "model.b"]
    assert [stored.key for stored in left.objects] == [f"data/{key(3)}/{FILE_NAME}"]
    assert left.shards == whole.shards[:2]
    assert msgspec.json.decode(left.values) == {"state": {"dict": [["model", {"module": {}}], ["epoch", {"value": 3}]]}}
    assert (left.reduced, left.dropped, left.metrics) == (1, ("optim",), {"loss": 0.5})
    again = without_groups(left, ["epoch"], number=2)
    assert (again.dropped, again.tensors) == (("epoch", "optim"), left.tensors)
    assert encode("manifest", again) == encode("manifest", without_groups(whole, ["optim", "epoch"], number=2))


def test_groups_that_are_not_there():
    """A group that is not there is named with those that are, and nothing can be dropped to the last tensor."""
    with pytest.raises(LayoutError, match=r"no group 'optimizer'.*'epoch', 'model', 'optim'"):
        without_groups(trained(), ["optimizer"], number=1)
    with pytest.raises(LayoutError, match="nothing would be left of step 3 without 'model', 'optim'"):
        without_groups(trained(), ["model", "optim"], number=1)


def test_tied_names_are_right():
    """A tied name of a dropped group goes; a tensor of one that another group has under a tied name, or as a value, stays."""
    own = without_groups(trained(aliases={"optim.copy": "model.a", "model.c": "model.b"}), ["optim"], number=1)
    assert own.aliases == {"model.c": "model.b"}
    lent = without_groups(trained(aliases={"model.c": "optim.m"}), ["optim"], number=1)
    assert lent.aliases == {"model.c": "optim.m"}
    assert [spec.name for spec in lent.tensors] == ["model.a", "model.b", "optim.m"]
    referring = document(b'["model",{"module":{}}]', b'["optim",{"value":1}]', b'["kept",{"value":{"$":["ref",["tensor","optim.m"]]}}]')
    assert [spec.name for spec in without_groups(trained(values=referring), ["optim"], number=1).tensors][-1] == "optim.m"


def test_plain_values_of_every_rank():
    """What ranks tell beside the first one's values loses the group too; a rank that has nothing else to tell is not listed."""
    whole = trained(
        nodes=1, world=3, values=document(b'["model",{"module":{}}]', b'["optim",{"value":0}]', b'["rng",{"value":0}]'),
        by_rank={1: msgspec.Raw(b'[["optim",{"value":1}],["rng",{"value":1}]]'), 2: msgspec.Raw(b'[["optim",null]]')},
    )  # fmt: skip
    left = without_groups(whole, ["optim"], number=1)
    told = [dict(msgspec.json.decode(document_of_rank(left, rank))["state"]["dict"]) for rank in range(3)]
    assert told == [{"model": {"module": {}}, "rng": {"value": value}} for value in (0, 1, 0)]
    assert sorted(left.by_rank) == [1]


def test_groups_by_kind():
    """A group is an optimizer when its node is one, or a branch of nothing else, on every rank; a flat state's keys make one group."""
    optimizer = b'{"optimizer":{}}'
    values = document(
        b'["model",{"module":{}}]', b'["optim",%b]' % optimizer, b'["several",{"list":[%b,%b]}]' % (optimizer, optimizer),
        b'["named",{"dict":[["a",%b]]}]' % optimizer, b'["mixed",{"dict":[["m",{"module":{}}],["o",%b]]}]' % optimizer,
        b'["flat.a",%b]' % optimizer, b'["flat.b",{"value":1}]', b"[7,%b]" % optimizer, b'["odd",%b]' % optimizer,
    )  # fmt: skip
    whole = trained(values=values, world=2, by_rank={1: msgspec.Raw(b'[["odd",{"value":1}],["own",{"optimizer":{}}]]')})
    assert groups_of_kind(whole, "optimizer") == ("7", "named", "optim", "own", "several")
    assert groups_of_kind(whole, "module") == ("model",)
    assert groups_of_kind(sample_part(key(3), optimizer=True), "optimizer") == ("optim",)


# -- reducing -----------------------------------------------------------------------------------------------------------------


def test_reduce(run):
    """The reduced one takes the whole one's place: optimizer's file gone, model's there and good, metrics kept, no attempt claimed."""
    one, two = save(run, 1, metrics={"loss": 0.5}), save(run, 2)
    run.record_metrics(one, {"val": 0.25})
    for which in (one, two):
        run.record_verified(which, good=True, detail="", now=1.0)
    made = run.reduce(one, drop=["optim"])
    assert made == key(1, reduced=1)
    assert run.keys() == [made, two]
    assert there(run) == [f"{one}/{FILE_NAME}", f"{two}/{FILE_NAME}", f"{two}/{OPTIMIZER_FILE}"]
    assert wrongs(run, made) == []
    assert run.dropped(made) == run.manifest(made).dropped == ("optim",)
    assert (run.metrics(made), run.verified(made)) == ({"loss": 0.5, "val": 0.25}, True)
    assert (run.newest_attempt(), run.dropped(two)) == (1, ())
    with pytest.raises(NotFoundError):
        run.manifest(one)
    assert run.plan_sweep(now=LATER) == []


def test_an_export_beside_the_checkpoint_stays_while_what_is_left_of_it_is_there(run):
    """A model exported into the checkpoint's own folder is not deleted with the optimizer's files, nor swept; it goes with the rest."""
    first, _ = save(run, 1), save(run, 2)
    exported = f"data/{first}/consolidated/model.safetensors"
    run.store.put(exported, memoryview(b"model"), nbytes=5)
    left = run.reduce(first, drop=["optim"])
    run.sweep(run.plan_sweep(now=LATER))
    assert run.store.get(exported) == b"model"
    assert f"data/{first}/{OPTIMIZER_FILE}" not in {name for name, _ in run.store.list("data/")}
    run.forget(left)
    run.sweep(run.plan_sweep(now=LATER))
    assert not [name for name, _ in run.store.list(f"data/{first}/")]


def test_reduce_is_idempotent(run):
    """The same call again, by either key, changes nothing; another group makes the next reduction, which stands for both."""
    one, two = save(run, 1), save(run, 2)
    made = run.reduce(one, drop="optim")
    before = run.store.get(f"manifests/{made}.json")
    for which in (one, made):
        assert run.reduce(which, drop=["optim"]) == made
    assert run.store.get(f"manifests/{made}.json") == before
    assert run.reduce(one, drop=["epoch"]) == key(1, reduced=2)
    assert run.keys() == [key(1, reduced=2), two]
    assert run.dropped(key(1, reduced=2)) == ("epoch", "optim")
    assert run.reduce(one, drop=["optim"]) == key(1, reduced=2)
    with pytest.raises(ConfigError, match="no group is named"):
        run.reduce(two, drop=[])
    with pytest.raises(NotFoundError, match="no checkpoint of step 9"):
        run.reduce(key(9), drop=["optim"])


def test_what_is_protected_is_not_reduced(run):
    """The newest good, the newest verified, pinned and read ones are refused, with the reason, and stay as they are."""
    keys = [save(run, step) for step in range(1, 6)]
    run.record_verified(keys[1], good=True, detail="", now=1.0)
    run.record_verified(keys[4], good=False, detail="bad", now=1.0)
    run.pin(keys[2])
    with run.hold(keys[0]):
        told = {one: run.may_drop(one) for one in [*keys, key(9)]}
        assert {one.step: verdict.kind for one, verdict in told.items()} == {
            1: "held", 2: "newest-good", 3: "pinned", 4: "newest-good", 5: "", 9: "no-checkpoint"
        }  # fmt: skip
        assert "newest verified" in told[keys[1]].reason
        assert "a restore would take it" in told[keys[3]].reason
        assert run.droppable([*keys, key(9)]) == [keys[4]]
        for one in keys[:4]:
            for refused in (lambda one=one: run.reduce(one, drop=["optim"]), lambda one=one: run.drop(one)):
                with pytest.raises(ConflictError) as caught:
                    refused()
                assert caught.value.kind == told[one].kind
    assert run.keys() == keys
    run.unpin(keys[2])
    assert run.droppable(keys) == [keys[0], keys[2], keys[4]]


def test_catching_up(run):
    """The newest one is left for later: as newer ones come it can be reduced, and what is reduced already is not named again."""
    one, two = save(run, 1), save(run, 2)
    assert run.droppable([one, two]) == [one]
    run.reduce(one, drop=["optim"])
    assert run.droppable([one, two]) == []
    three = save(run, 3)
    assert run.droppable([one, two]) == [two]
    assert run.droppable([one, two], everything=True) == [key(1, reduced=1), two]
    run.reduce(two, drop=["optim"])
    for which in (one, two):
        assert run.drop(which) > 0
    assert run.keys() == [three]
    assert there(run) == [f"{three}/{FILE_NAME}", f"{three}/{OPTIMIZER_FILE}"]


def test_unreadable_newest_protects_the_next(run):
    """A newest checkpoint whose manifest is damaged is none to go on from: the one before it is protected too."""
    one, two, three = (save(run, step) for step in (1, 2, 3))
    run.store._disk.flip(f"/run/manifests/{three}.json", 300)
    assert [run.may_drop(which).may for which in (one, two, three)] == [True, False, False]


def test_shared_files_stay(run):
    """Files in the folder of a checkpoint before stay while a reduction needs them, and go with the last that does."""
    one = save(run, 1)
    two = save(run, 2, base=one)
    save(run, 3)
    run.forget(one)
    made = run.reduce(two, drop=["optim"])
    assert f"{one}/{FILE_NAME}" in there(run)
    assert wrongs(run, made) == []
    run.sweep(run.plan_sweep(now=LATER))
    assert wrongs(run, made) == []
    assert run.forget(made, sole_committer=True) > 200
    assert {name.split("/")[0] for name in there(run)} == {str(key(3))}


def test_restart_after_a_death_at_any_operation():
    """Whatever a reduction was doing when it died, one of the two is whole, and the same call ends it once its hold is over."""
    def prepared(store):
        repository = Repository(store)
        repository.begin(create=True)
        repository.start_attempt(parent=None, now=1.0)
        save(repository, 1, metrics={"loss": 0.5})
        save(repository, 2)

    counting = LocalStore("/run", disk=SimDisk())
    prepared(counting)
    operations = CrashingStore(counting)
    Repository(operations).reduce(key(1), drop=["optim"])
    assert len(operations.operations) > 5
    for cut_at in range(1, len(operations.operations) + 1):
        for after in (False, True):
            store = LocalStore("/run", disk=SimDisk())
            prepared(store)
            with pytest.raises(CorruptionError):
                Repository(CrashingStore(store, cut_at=cut_at, after=after, error=CorruptionError("dead"))).reduce(key(1), drop=["optim"])
            run = Repository(store)
            assert all(wrongs(run, one) == [] for one in run.keys())
            assert {one.full for one in run.keys()} == {key(1), key(2)}
            store.delete_folder("holds/")
            assert run.reduce(key(1), drop=["optim"]) == key(1, reduced=1)
            assert run.keys() == [key(1, reduced=1), key(2)]
            assert run.metrics(key(1, reduced=1)) == {"loss": 0.5}
            assert f"{key(1)}/{OPTIMIZER_FILE}" not in there(run)


def test_forgotten_by_another_in_between(run):
    """Somebody who forgets the whole one while its reduction is made sees that it is held; afterwards nothing needed is deleted."""
    one, _ = save(run, 1), save(run, 2)
    create, refused = run.store.create, []

    def slow_create(name, data):
        if name.startswith("manifests/"):
            try:
                Repository(LocalStore("/run", disk=run.store._disk)).forget(one)
            except ConflictError as error:
                refused.append(error.kind)
        return create(name, data)

    run.store.create = slow_create
    made = run.reduce(one, drop=["optim"])
    assert refused == ["held"]
    assert wrongs(run, made) == []


def test_sweeper_that_lists_while_another_reduces(run):
    """A sweep that lists before the reduction and reads after it sees the old manifest or the new one: shared files stay."""
    one = save(run, 1)
    two = save(run, 2, base=one)
    save(run, 3)
    run.forget(one)
    sweeper = Repository(LocalStore("/run", disk=run.store._disk))
    listing, done = sweeper.store.list, threading.Event()

    def slow_list(prefix):
        found = list(listing(prefix))
        if prefix == "manifests/" and not done.is_set():
            done.set()
            run.reduce(two, drop=["optim"])
        return iter(found)

    needed = {f"data/{one}/{FILE_NAME}", f"data/{two}/{FILE_NAME}"}
    sweeper.store.list = slow_list
    assert needed <= sweeper._references()[0]
    assert done.is_set()


def test_reader_that_comes_in_between(run):
    """A reader that takes the whole one just before it is forgotten keeps it; the next call goes on."""
    one, two = save(run, 1), save(run, 2)
    commit = run.commit
    reader = run.hold(one)

    def slow_commit(manifest):
        commit(manifest)
        reader.__enter__()

    run.commit = slow_commit
    with pytest.raises(ConflictError) as caught:
        run.reduce(one, drop=["optim"])
    assert caught.value.kind == "held"
    assert run.keys() == [one, key(1, reduced=1), two]
    assert run.find(1) == one
    assert run.droppable([one]) == []
    reader.__exit__(None, None, None)
    assert run.droppable([one]) == [one]
    assert run.reduce(one, drop=["optim"]) == key(1, reduced=1)
    assert run.keys() == [key(1, reduced=1), two]


@pytest.mark.parametrize("late", [False, True])
def test_late_metrics_follow(run, late):
    """Metrics for a step that was reduced meanwhile are recorded with the reduction, whenever they come."""
    one, _ = save(run, 1), save(run, 2)
    merge_metrics = run._merge_metrics

    def slow_merge(which, metrics):
        if which == one and late:
            Repository(run.store).reduce(one, drop=["optim"])
        merge_metrics(which, metrics)
        if which == one and not late:
            Repository(run.store).reduce(one, drop=["optim"])

    run._merge_metrics = slow_merge
    run.record_metrics(one, {"val": 1.0})
    run.record_metrics(one, {"top": 2.0})
    assert run.metrics(key(1, reduced=1)) == {"val": 1.0, "top": 2.0}
    assert [name for name, _ in run.store.list("metrics/")] == [f"metrics/{key(1, reduced=1)}.json"]


def test_two_reduce_at_once():
    """Two processes that reduce the same one: one result, whole; who loses hears that it is being read."""
    disk = SimDisk()
    run = Repository(LocalStore("/run", disk=disk))
    run.begin(create=True)
    run.start_attempt(parent=None, now=1.0)
    one, two = save(run, 1), save(run, 2)
    barrier, kinds = threading.Barrier(4), []

    def reduce():
        repository = Repository(LocalStore("/run", disk=disk))
        barrier.wait(10)
        try:
            kinds.append(str(repository.reduce(one, drop=["optim"])))
        except (ConflictError, NotFoundError) as error:
            kinds.append(error.kind)

    threads = [threading.Thread(target=reduce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(kinds) <= {str(key(1, reduced=1)), "held", "forgotten"}
    assert run.reduce(one, drop=["optim"]) == key(1, reduced=1)
    assert run.keys() == [key(1, reduced=1), two]
    assert wrongs(run, key(1, reduced=1)) == []


def test_a_reduction_that_another_process_has_just_committed_is_the_result(run):
    """Who looked before that, and comes after, makes no second one of the same; what drops something else hears of it."""
    one, _ = save(run, 1), save(run, 2)
    made = run._commit_reduced(one, frozenset({"optim"}))
    assert run.keys()[:2] == [one, made]  # the other has not forgotten the whole one yet
    assert run._commit_reduced(one, frozenset({"optim"})) == made
    with pytest.raises(ConflictError, match="another way") as caught:
        run._commit_reduced(one, frozenset({"model"}))
    assert caught.value.kind == "manifest"
    assert run.reduce(one, drop=["optim"]) == made
    assert one not in run.keys()


def test_manifest_under_anothers_key(run):
    """A reduction's manifest under the name of the whole one, or of another reduction, is corrupt."""
    one, _ = save(run, 1), save(run, 2)
    made = run.reduce(one, drop=["optim"])
    run.store.put(f"manifests/{key(1, reduced=2)}.json", run.store.get(f"manifests/{made}.json"))
    with pytest.raises(CorruptionError, match="reduction 1"):
        run.manifest(key(1, reduced=2))


def test_lineage_goes_by_step_and_attempt(run):
    """A reduction belongs to the lineage that its checkpoint belongs to; the newest that readers get is a whole one."""
    one, two = save(run, 1), save(run, 2)
    made = run.reduce(one, drop=["optim"])
    second = run.start_attempt(parent=made, now=2.0)
    assert (second.parent_attempt, second.parent_step) == (1, 1)
    assert run.in_lineage(made)
    assert not run.in_lineage(two)
    assert run.lineage() == [made]
    assert run.find(None) == made
    assert run.find(2) == two
    three = save(run, 3, second.attempt)
    assert run.lineage() == [three, made]
    assert (run.find(None), run.find(1)) == (three, made)
    assert run.reduce(two, drop=["optim"]) == key(2, reduced=1)  # of an abandoned timeline


def test_numbers_are_not_used_twice(run):
    """A reduction that was forgotten beside its whole one does not come back under its key."""
    one, _ = save(run, 1), save(run, 2)
    run.commit(without_groups(run.manifest(one), ["optim"], number=1))
    run.forget(key(1, reduced=1))
    assert run.reduce(one, drop=["optim"]) == key(1, reduced=2)
    assert wrongs(run, key(1, reduced=2)) == []


# -- several nodes ------------------------------------------------------------------------------------------------------------


def several(repository, step, *, shared):
    manifest = merge([persist_node(repository, key(step), node, 2, shared=shared) for node in (0, 1)])
    repository.commit(manifest)
    return key(step)


@pytest.mark.parametrize("shared", [True, False])
def test_nodes_files_in_one_store(run, shared):
    """What several nodes saved is reduced where all their files are in this store, and is verified without their parts."""
    one, _ = several(run, 1, shared=shared), several(run, 2, shared=shared)
    made = run.reduce(one, drop=["rank"])
    assert run.manifest(made).shared
    assert wrongs(run, made) == []
    assert there(run)[:2] == [f"{one}/{node_file(node)}" for node in (0, 1)]
    assert [json for json, _ in run.store.list(f"data/{one}/") if json.endswith(".json")] == []


def test_nodes_files_on_their_own_disks(run):
    """Where a node's files are elsewhere, reducing and dropping are refused with the file, and nothing changes."""
    parts = [node_part(key(1), node, 2, shared=False) for node in (0, 1)]
    persist_node(run, key(1), 0, 2, shared=False)
    run.commit(merge(parts))
    several(run, 2, shared=False)
    for refused in (lambda: run.reduce(key(1), drop=["rank"]), lambda: run.drop(key(1))):
        with pytest.raises(ConfigError, match=f"own disks of 2 nodes: .*{node_file(1)}") as caught:
            refused()
        assert caught.value.kind == "node-local"
    assert run.keys() == [key(1), key(2)]


# -- retention ----------------------------------------------------------------------------------------------------------------


def candidates(*told):
    return [Candidate(key=str(key(step, 1, reduced)), step=step, attempt=1, reduced=reduced, metrics={"loss": loss}) for step, reduced, loss in told]


def test_retention_of_reduced_ones():
    """A reduced one takes its step's place in last and best, never that of the newest good one; beside its whole one it is no second."""
    decided = {one.key: one for one in retain(candidates((5, 1, 1.0), (4, 0, 2.0), (3, 1, 0.5), (2, 0, 3.0)), Keep(last=1, best=1, metric="loss"))}
    assert {CheckpointKey.parse(one.key).step for one in decided.values() if one.keep} == {5, 4, 3}
    assert "newest good" in decided[str(key(4))].reason
    both = retain(candidates((5, 0, 1.0), (4, 0, 1.0), (4, 1, 1.0), (3, 0, 1.0), (2, 1, 1.0), (2, 0, 1.0)), Keep(last=3))
    assert [CheckpointKey.parse(one.key) for one in both if one.keep] == [key(5), key(4), key(4, 1, 1), key(3)]
    assert all(one.reason for one in both)
    assert protected(candidates((5, 1, 1.0), (4, 0, 1.0), (3, 0, 1.0))) == {str(key(4)): "newest good"}


# -- with a trainer -----------------------------------------------------------------------------------------------------------


def test_restore_of_reduced_ones(tmp_path, caplog):
    """A full restore passes a reduced one over and says so; its step, or names that are left, can be asked for; errors name what was dropped."""
    path = str(tmp_path / "run")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer, "epoch": 3}
    with everystep.Checkpointer(path, keep=Keep(last=None)) as ckpt:
        for step in (1, 2):
            with torch.no_grad():
                model.weight.fill_(step)
            ckpt.save(step, state, sync=True)
    run = Repository.open(path)
    assert groups_of_kind(run.manifest(key(1)), "optimizer") == ("optim",)
    assert run.reduce(key(1), drop=groups_of_kind(run.manifest(key(1)), "optimizer")) == key(1, reduced=1)
    with everystep.Checkpointer(path, keep=Keep(last=None)) as ckpt:
        assert ckpt.steps() == [2]
        assert ckpt.restore(state) == 2
        with pytest.raises(LayoutError, match="step 1 is not whole: it was reduced: 'optim' was dropped from it"):
            ckpt.restore(state, step=1)
        assert ckpt.restore(state, step=1, include=["model.*", "epoch"]) == 1
        assert torch.equal(model.weight, torch.full((2, 2), 1.0))
        assert any("without a part" in message for message in caplog.messages)
    assert sorted(everystep.load(path, step=1)) == ["epoch", "model"]
    with pytest.raises(LayoutError, match="'optim' was dropped"):
        everystep.load(path, step=1, include=["optim.*"])
    run.forget(key(2))
    with everystep.Checkpointer(path, keep=Keep(last=None)) as ckpt:
        with pytest.raises(CorruptionError, match=r"step 1 of run .* cannot be restored: it was reduced: 'optim' was dropped"):
            ckpt.restore(state)
        assert ckpt.restore(state, include=["model.*"]) == 1
