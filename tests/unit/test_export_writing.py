from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import threading

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from everystep import transfer
from everystep.consolidate import linking, writing
from everystep.consolidate.checking import Checks, StoppedError
from everystep.consolidate.plan import plan_export
from everystep.consolidate.source import Chunk, Opened, SourceFile, SourceTensor, open_source
from everystep.errors import CapacityError, ConflictError, CorruptionError, LayoutError, PermanentStoreError
from everystep.region import Region, whole
from everystep.schedule import Consolidate
from everystep.store import open_store
from everystep.store.disk import RealDisk
from everystep.testing.chunked import array, chunked_source, grid

WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def rows_and_columns(tmp_path, **more):
    """Two tensors of a few windows of 4,096 bytes in three files, one cut by rows and one by columns."""
    tensors = {"rows": ("F32", array("F32", (90, 64), seed=1)), "columns": ("BF16", array("BF16", (100, 120), seed=2))}
    regions = {"rows": grid((90, 64), [[17, 40], []]), "columns": grid((100, 120), [[], [7, 50, 90]])}
    return chunked_source(str(tmp_path), tensors, regions, files=3, **more), tensors


def whole_files(tmp_path, *, kind="everystep"):
    """A source of one safetensors file of whole tensors, with digests of 64 bytes."""
    (tmp_path / "data").mkdir()
    state = {"a": torch.arange(100, dtype=torch.float32), "b": torch.arange(30, dtype=torch.int64)}
    path = tmp_path / "data/model.safetensors"
    save_file(state, path, metadata={"format": "pt"})
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors, at = {}, start
    for name, tensor in sorted(state.items(), key=lambda one: -one[1].element_size()):
        digests = tuple(xxhash.xxh3_128_hexdigest(data[b : min(b + 64, at + tensor.nbytes)]) for b in range(at, at + tensor.nbytes, 64))
        chunk = Chunk(whole(tuple(tensor.shape)), 0, at, tensor.nbytes, digests, 64)
        tensors[name] = SourceTensor(name, WORDS[tensor.dtype], tuple(tensor.shape), (chunk,))
        at += tensor.nbytes
    made = Opened(
        kind=kind, where=str(tmp_path), key="k", step=3, saved_at=1.0, identity="i", store=open_store(str(tmp_path)),
        files=[SourceFile("data/model.safetensors", len(data))], tensors=tensors,
        headers={0: (start, xxhash.xxh3_128_hexdigest(data[:start]))} if kind == "everystep" else {},
    )  # fmt: skip
    return made, path, state


def export(source, out, disk=None, only=(0, 1), **options):
    plan = plan_export(source, Consolidate(**options))
    return plan, writing.write_export(source, plan, str(out), disk=disk, only=only)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def small(monkeypatch, threads=2, window=4096, read=512):
    monkeypatch.setattr(writing, "_sizes", lambda *_: (threads, window, read))


# -- what is written ----------------------------------------------------------------------------------------------------


def test_a_number_stays_a_number(tmp_path, out):
    """F4: a tensor without dimensions is exported as it is, shape []."""
    value = np.float32(3.5).reshape(()).view("u4")
    plan, _ = export(chunked_source(str(tmp_path), {"scale": ("F32", value)}, {"scale": [Region((), ())]}), out)
    found = load_file(out / plan.files[0].name)["scale"]
    assert (found.shape, found.item(), found.dtype) == (torch.Size([]), 3.5, torch.float32)


@pytest.mark.parametrize("threads", [1, 4])
def test_digests_are_of_whole_files(tmp_path, out, monkeypatch, threads):
    """Each file's digest is XXH3-128 of its bytes, however many threads wrote it in windows; paced by its bytes; nothing else is left."""
    small(monkeypatch, threads)
    source, _ = rows_and_columns(tmp_path, check="digests")
    plan, paced = plan_export(source, Consolidate(max_shard_size=23040)), []
    written = writing.write_export(source, plan, str(out), pace=paced.append)
    assert len(plan.files) == 2
    assert written.digests == {file.name: xxhash.xxh3_128_hexdigest((out / file.name).read_bytes()) for file in plan.files}
    assert sum(paced) == plan.nbytes == written.nbytes
    assert written.linked == 0
    assert sorted(os.listdir(out)) == sorted(written.digests)


@pytest.mark.parametrize("budget", [0, 1 << 20, 20 << 20, 256 << 20])
@pytest.mark.parametrize("columns", [False, True])
def test_memory_follows_from_the_budget_not_from_the_tensor(tmp_path, out, monkeypatch, budget, columns):
    """F28: a tensor of many times the budget goes through within it, rows or columns; the smallest budget is three buffers of 64 KiB."""
    made, lock, memory = [], threading.Lock(), transfer._memory

    def counted(nbytes):
        with lock:
            made.append(nbytes)
        return memory(nbytes)

    monkeypatch.setattr(transfer, "_memory", counted)
    values = array("F32", (1500, 2048))
    cuts = [[], [512, 1000]] if columns else [[700], []]
    source = chunked_source(str(tmp_path), {"t": ("F32", values)}, {"t": grid(values.shape, cuts)}, check="digests", block=100_000)
    plan = plan_export(source, Consolidate())
    writing.write_export(source, plan, str(out), budget_nbytes=budget)
    assert sum(made) <= max(budget, 3 * (64 << 10) + 8 * 4096)
    assert load_file(out / plan.files[0].name)["t"].numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("budget", [1 << 20, 10 << 20, 50 << 20, 256 << 20, 1 << 30])
@pytest.mark.parametrize("threads", [None, 1, 2, 16])
def test_windows_and_reads_fit_the_budget(budget, threads):
    """Threads times window and reads, with the large pages that they begin at, stay within the budget; never more threads than asked for."""
    count, window, read = writing._sizes(threads, budget)
    assert count * (window + read) <= budget
    assert 1 <= count <= (threads or 8)
    assert window % 4096 == read % 4096 == 0


# -- what is wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_file_that_is_missing_or_cut_is_told_with_its_tensors(tmp_path, out, monkeypatch, harm, threads):
    """F6: CorruptionError with the file's name and the tensors in it; never zeros, and no file under its final name."""
    small(monkeypatch, threads)
    source, _ = rows_and_columns(tmp_path)
    number = source.tensors["rows"].chunks[1].file
    path = tmp_path / source.files[number].key
    names = {name for name, tensor in source.tensors.items() if any(chunk.file == number for chunk in tensor.chunks)}
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CorruptionError, match=source.files[number].key) as caught:
        export(source, out)
    assert any(repr(name) in str(caught.value) for name in names)
    assert not list(out.glob("*.safetensors"))


@pytest.mark.parametrize("hole", ["chunk", "file"])
def test_regions_that_no_file_holds_are_never_zeros(tmp_path, out, hole):
    """F6: a chunk that is not there, or lies in no file, is CorruptionError by name, also when nobody checked the cover."""
    source, _ = rows_and_columns(tmp_path)
    tensor = source.tensors["rows"]
    chunks = tensor.chunks[:-1] if hole == "chunk" else (*tensor.chunks[:-1], tensor.chunks[-1]._replace(file=-1))
    source = dataclasses.replace(source, tensors={**source.tensors, "rows": dataclasses.replace(tensor, chunks=chunks)})
    with pytest.raises(CorruptionError, match="'rows'"):
        export(source, out)
    assert not list(out.glob("*.safetensors"))


class Failing(RealDisk):
    """Fails as told."""

    def __init__(self, *, write=0, direct="", short=0):
        self.write, self.direct, self.short, self.writes = write, direct, short, 0

    def open(self, path, flags):
        if self.direct == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writing")
        return super().open(path, flags)

    def pwrite(self, fd, data, offset):
        self.writes += 1
        if self.write and self.writes > 2:
            raise OSError(self.write, os.strerror(self.write))
        if self.direct == "write" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writing")
        return super().pwrite(fd, data[: self.short] if self.short and len(data) > self.short else data, offset)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, CapacityError), (errno.EDQUOT, CapacityError), (errno.EROFS, PermanentStoreError)])
def test_a_full_disk_is_told_with_the_numbers(tmp_path, out, monkeypatch, code, error, threads):
    """F40: CapacityError with needed bytes and errno, though other threads wait for the one that failed; no file has its final name."""
    small(monkeypatch, threads)
    source, _ = rows_and_columns(tmp_path)
    with pytest.raises(error) as caught:
        export(source, out, disk=Failing(write=code))
    assert caught.value.errno == code
    assert not list(out.glob("*.safetensors"))


@pytest.mark.parametrize("how", [{"direct": "open"}, {"direct": "write"}, {"short": 4096}, {"short": 5000}])
def test_file_systems_without_direct_writing_and_short_writes(tmp_path, out, monkeypatch, how):
    """F46: where O_DIRECT is refused, at opening or at writing, or writes are short, the bytes are the same."""
    small(monkeypatch, window=16384)
    source, tensors = rows_and_columns(tmp_path, check="crc")
    plan, _ = export(source, out, disk=Failing(**how))
    found = load_file(out / plan.files[0].name)
    assert all(found[name].view(torch.uint8).numpy().tobytes() == values.tobytes() for name, (_, values) in tensors.items())


# -- links --------------------------------------------------------------------------------------------------------------


def test_an_own_file_is_the_same_inode(tmp_path, out):
    """Born consolidated: the export's file is the checkpoint's, no byte was read or written but its header's."""
    source, path, state = whole_files(tmp_path)
    plan, written = export(source, out)
    target = out / plan.files[0].name
    assert target.samefile(path)
    assert (written.linked, written.nbytes, written.digests) == (path.stat().st_size, path.stat().st_size, {target.name: ""})
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_file(target).items())
    assert export(source, out)[1].linked == written.linked
    assert os.listdir(out) == [target.name]


def test_a_wrong_file_under_a_links_name_is_replaced(tmp_path, out):
    """What lies there in another size is not taken for the link."""
    source, path, _ = whole_files(tmp_path)
    target = out / plan_export(source, Consolidate()).files[0].name
    target.write_bytes(b"cut off")
    export(source, out)
    assert target.read_bytes() == path.read_bytes()


def test_others_files_are_copied_since_they_may_be_written_anew(tmp_path, out):
    """A foreign file of whole tensors is copied, not linked: overwriting it in place leaves the export as it was."""
    source, path, _ = whole_files(tmp_path, kind="safetensors")
    before = path.read_bytes()
    plan, _ = export(source, out)
    with path.open("r+b") as file:
        file.write(bytes(len(before)))
    assert (out / plan.files[0].name).read_bytes() == before


@pytest.mark.parametrize("way", ["copy", "stream"])
def test_where_links_cannot_be_the_bytes_are_copied_and_checked(tmp_path, out, monkeypatch, way):
    """No hard links: the file is copied inside the system, or streamed, byte for byte; one flipped bit is found by name in both."""
    source, path, _ = whole_files(tmp_path)
    monkeypatch.setattr(linking, "hard_link", lambda *_: False)
    if way == "stream":
        monkeypatch.setattr(linking, "clone", lambda *_, **__: "")
    plan, written = export(source, out)
    target = out / plan.files[0].name
    assert target.read_bytes() == path.read_bytes()
    assert not target.samefile(path)
    assert written.digests == {target.name: xxhash.xxh3_128_hexdigest(path.read_bytes())}
    assert written.linked == (path.stat().st_size if way == "copy" else 0)
    target.unlink()
    flip(path, path.stat().st_size - 10)
    with pytest.raises(CorruptionError, match="'a'"):
        export(source, out)
    assert not target.exists()


class HeaderLast(RealDisk):
    """The file's first bytes are written after all others."""

    def __init__(self):
        super().__init__()
        self.others = threading.Event()

    def pwrite(self, fd, view, offset):
        if offset == 0 and not self.others.wait(20):
            raise AssertionError("nothing else was written")
        try:
            return super().pwrite(fd, view, offset)
        finally:
            if offset:
                self.others.set()


@pytest.mark.parametrize("pad", range(3))
def test_a_streamed_file_of_any_header_keeps_its_bytes(tmp_path, out, monkeypatch, pad):
    """Others' headers end anywhere and their items begin anywhere: streamed in windows, in any order, the file is the same."""
    small(monkeypatch, window=8192)
    monkeypatch.setattr(linking, "clone", lambda *_, **__: "")
    values = {"a": array("U8", (3,), seed=1), "b": array("F32", (4000,), seed=2), "c": array("U8", (5000,), seed=3)}
    told, body = {"__metadata__": {"format": "pt"}}, b""
    for name, value in values.items():
        word = "F32" if name == "b" else "U8"
        told[name] = {"dtype": word, "shape": list(value.shape), "data_offsets": [len(body), len(body) + value.nbytes]}
        body += value.tobytes()
    text = json.dumps(told).encode() + b" " * pad
    data = len(text).to_bytes(8, "little") + text + body
    (tmp_path / "run-5").mkdir()
    (tmp_path / "run-5/model.safetensors").write_bytes(data)
    plan, written = export(open_source(tmp_path / "run-5"), out, disk=HeaderLast())
    [file] = plan.files
    assert file.link is not None
    assert (out / file.name).read_bytes() == data
    assert written.digests == {file.name: xxhash.xxh3_128_hexdigest(data)}


def test_a_link_of_other_contents_is_refused(tmp_path, out):
    """A header that is not what was recorded is CorruptionError; one that names other tensors than planned, LayoutError."""
    source, path, _ = whole_files(tmp_path)
    tensor = source.tensors["a"]
    other = {"z": dataclasses.replace(tensor, name="z"), "b": source.tensors["b"]}
    with pytest.raises(LayoutError, match="does not hold what was planned"):
        export(dataclasses.replace(source, tensors=other), out)
    flip(path, 20)
    with pytest.raises(CorruptionError, match="header"):
        export(source, out)
    assert os.listdir(out) == []


def test_system_copies_are_reflinks_or_copies_or_nothing(tmp_path, monkeypatch):
    """``clone`` makes an equal file, or none where the system cannot; other errors leave none either."""
    original, target = tmp_path / "original", tmp_path / "target"
    original.write_bytes(os.urandom(100_000))
    assert linking.clone(str(original), str(target), 100_000) in {"reflink", "copy"}
    assert target.read_bytes() == original.read_bytes()
    target.unlink()
    monkeypatch.setattr(linking, "_reflink", lambda *_: False)
    for code in (errno.EXDEV, errno.EIO):
        monkeypatch.setattr(os, "copy_file_range", lambda *_, code=code: (_ for _ in ()).throw(OSError(code, "no")))
        if code == errno.EXDEV:
            assert not linking.clone(str(original), str(target), 100_000)
        else:
            with pytest.raises(OSError, match="no"):
                linking.clone(str(original), str(target), 100_000)
        assert not target.exists()
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EXDEV, "no")))
    assert not linking.hard_link(str(original), str(target))


# -- going on -----------------------------------------------------------------------------------------------------------


def test_whole_files_are_kept_and_others_begun_anew(tmp_path, out, monkeypatch):
    """F58: what lies under its name in its size is kept, with its digest; a size that is not right, and a rest, are written anew."""
    small(monkeypatch)
    source, _ = rows_and_columns(tmp_path)
    plan, written = export(source, out, max_shard_size=23040)
    first, second = (out / file.name for file in plan.files)
    inode, good = first.stat().st_ino, second.read_bytes()
    second.write_bytes(good[:-1])
    pathlib.Path(f"{second}.part").write_bytes(b"rest")
    assert export(source, out, max_shard_size=23040)[1].digests == written.digests
    assert first.stat().st_ino == inode
    assert second.read_bytes() == good
    assert sorted(os.listdir(out)) == sorted([first.name, second.name])


def test_a_rest_that_is_another_files_name_is_not_written_into(tmp_path, out):
    """A ``.part`` from before may be a hard link to something: it is taken away, never opened for writing."""
    source, _ = rows_and_columns(tmp_path)
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious" * 10_000)
    plan = plan_export(source, Consolidate())
    os.link(precious, out / f"{plan.files[0].name}.part")
    writing.write_export(source, plan, str(out))
    assert precious.read_bytes() == b"precious" * 10_000


# -- shares -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["digests", "crc"])
def test_shares_make_the_same_files(tmp_path, out, monkeypatch, check):
    """Processes with their own windows fill the same files; nothing has its name before the last one, and then all have."""
    source, _ = rows_and_columns(tmp_path, check=check, block=5000)
    plan, written = export(source, out)
    alone = {name: (out / name).read_bytes() for name in written.digests}
    together = tmp_path / "together"
    together.mkdir()
    for share, sizes in ((2, (1, 8192, 4096)), (0, (2, 4096, 512)), (1, (3, 4096, 1024))):
        with pytest.raises(ConflictError, match="share"):
            writing.finish_export(plan, str(together))
        monkeypatch.setattr(writing, "_sizes", lambda *_, sizes=sizes: sizes)
        writing.write_export(source, plan, str(together), only=(share, 3))
        assert not list(together.glob("*.safetensors"))
    finished = writing.finish_export(plan, str(together))
    assert {path.name: path.read_bytes() for path in together.iterdir()} == alone
    assert finished.nbytes == plan.nbytes
    assert set(finished.digests) == set(alone)


@pytest.mark.parametrize("share", [0, 1])
def test_each_share_checks_all_that_it_uses(tmp_path, out, share):
    """A digest block that the border of two shares cuts is checked by both: a bit flipped on its own side stops each."""
    values = array("U8", (50_000,))
    source = chunked_source(str(tmp_path), {"t": ("U8", values)}, {"t": [whole((50_000,))]}, check="digests", block=50_000, gaps=False)
    flip(tmp_path / source.files[0].key, 64 + (10, 49_990)[share])
    with pytest.raises(CorruptionError, match="'t'"):
        export(source, out, only=(share, 2))


def test_marks_of_another_number_of_shares_vouch_for_nothing(tmp_path, out):
    """Killed before its end, then written by more processes, with a bit flipped meanwhile: the sum of the parts that are there counts."""
    source = chunked_source(str(tmp_path), {"t": ("U8", array("U8", (50_000,)))}, {"t": [whole((50_000,))]}, check="crc", gaps=False)
    plan = plan_export(source, Consolidate())
    for count in (2, 3):
        for share in range(count):
            writing.write_export(source, plan, str(out), only=(share, count))
        flip(tmp_path / source.files[0].key, 64 + 25_000)
    flip(tmp_path / source.files[0].key, 64 + 25_000)
    with pytest.raises(CorruptionError, match="'t'"):
        writing.finish_export(plan, str(out))


def test_who_waits_for_a_part_of_a_block_is_let_go(tmp_path):
    """A thread that waits for the bytes before its own ends when another one fails, instead of waiting for ever."""
    source, _ = rows_and_columns(tmp_path, check="digests", block=1 << 20)
    checks, ended = Checks(source), []

    def wait():
        try:
            checks.piece(("rows", 0), source.tensors["rows"].chunks[0], 64, memoryview(bytes(64)))
        except StoppedError:
            ended.append("stopped")

    thread = threading.Thread(target=wait)
    thread.start()
    checks.stop()
    thread.join(20)
    assert ended == ["stopped"]


def test_a_failure_ends_those_who_wait_for_its_bytes(tmp_path, out, monkeypatch):
    """The thread of the first window fails while the second one waits for the first part of a digest block: its error comes, nothing hangs."""
    small(monkeypatch)
    source, _ = rows_and_columns(tmp_path, check="digests", block=1 << 20)
    calls, second = iter(range(10**6)), threading.Event()

    def pace(_):
        number = next(calls)  # of the first window, the header is all
        if number > 1:
            second.set()
        elif number == 1:
            assert second.wait(20)
            raise PermanentStoreError("the first one failed")

    with pytest.raises(PermanentStoreError, match="the first one"):
        writing.write_export(source, plan_export(source, Consolidate()), str(out), pace=pace)


def test_links_are_made_by_one_share(tmp_path, out):
    """Of several processes one links a file; finishing tells how many bytes were linked."""
    source, path, _ = whole_files(tmp_path)
    plan = plan_export(source, Consolidate())
    for share in (1, 0):
        writing.write_export(source, plan, str(out), only=(share, 2))
    assert writing.finish_export(plan, str(out)).linked == path.stat().st_size
    assert os.listdir(out) == [plan.files[0].name]


def test_a_share_that_is_none_is_refused(tmp_path, out):
    """Shares are counted from 0."""
    source, _ = rows_and_columns(tmp_path)
    with pytest.raises(ValueError, match="share 2 of 2"):
        export(source, out, only=(2, 2))
