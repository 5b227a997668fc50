"""The local store's failures, fallbacks and addresses, on simulated disks."""

from __future__ import annotations

import errno
import mmap
import os
import threading

import pytest

from everystep.errors import CapacityError, ConfigError, NotFoundError, PermanentStoreError, TransientStoreError
from everystep.store import local, open_store
from everystep.store.disk import RealDisk, address
from everystep.store.local import LocalStore
from everystep.testing import FaultPlan, Mount, SimDisk, Survival

MIB = 1 << 20


def aligned(nbytes, fill=b"\x5a"):
    """A page-aligned buffer."""
    buffer = mmap.mmap(-1, nbytes)
    buffer[:] = fill * nbytes
    return memoryview(buffer)


def on(*faults, **options):
    """A store on a simulated disk that has its folder already."""
    disk = SimDisk(**options)
    store = LocalStore("/run", disk=disk, sleep=[].append)
    store.put("before", b"kept")
    disk.faults.extend(faults)
    disk.calls.clear()
    return store, disk


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks in two MiB."""
    monkeypatch.setattr(local, "_BLOCK", 1 << 16)


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
@pytest.mark.parametrize(("code", "expected"), [(errno.EIO, TransientStoreError), (errno.ENOSPC, CapacityError), (errno.EDQUOT, CapacityError)])
def test_one_failing_writer(nth, code, expected, small_blocks):
    """F1: the N-th of several writes in flight fails: that errno is raised, nothing is left, and the next put works."""
    store, _disk = on(FaultPlan("pwrite", nth, code))
    with pytest.raises(expected) as caught:
        store.put("data/x", aligned(2 * MIB))
    assert caught.value.errno == code
    assert isinstance(caught.value, OSError)
    assert list(store.list("")) == [("before", 4)]
    assert list(store.leftovers("")) == []
    store.put("data/x", aligned(2 * MIB))
    assert store.size("data/x") == 2 * MIB


def test_first_failure_wins_and_stops_the_others(small_blocks):
    """F1: the failure that came first is reported, and the other writer begins no further block."""
    first_failed = threading.Event()

    class Failing(SimDisk):
        def pwrite(self, fd, data, offset):
            if offset == 0:
                try:
                    raise OSError(errno.EIO, "first")
                finally:
                    first_failed.set()
            assert first_failed.wait(10)
            if offset > 0:
                raise OSError(errno.ENOSPC, "second")
            return super().pwrite(fd, data, offset)

    disk = Failing()
    store = LocalStore("/run", disk=disk)
    with pytest.raises((TransientStoreError, CapacityError)) as caught:
        store.put("data/x", aligned(2 * MIB))
    assert caught.value.errno == errno.EIO
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("everystep-write")]


@pytest.mark.parametrize(("kind", "nth"), [("open", 1), ("pwrite", 1), ("fsync", 1), ("fsync", 2), ("fsync", 3), ("ftruncate", 1), ("fallocate", 1), ("rename", 1), ("mkdir", 1)])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failure_of_any_call(kind, nth, code):
    """F1, F40: whichever call of a put fails, the errno is kept, no object is there, what was there stays, and the put works the next time."""
    store, _disk = on(FaultPlan(kind, nth, code))
    with pytest.raises((TransientStoreError, CapacityError)) as caught:
        store.put("data/x", aligned(2 * MIB))
    assert caught.value.errno == code
    assert store.get("before") == b"kept"
    assert list(store.leftovers("")) == []
    assert list(store.list("")) == [("before", 4)]
    store.put("data/x", aligned(2 * MIB))
    assert store.size("data/x") == 2 * MIB


@pytest.mark.parametrize("size", [40_000, 4 * MIB])
def test_disk_full(size):
    """F40: a full disk is a CapacityError with needed and free bytes; the space of the failed object is free again and the rest is intact."""
    store, _disk = on(capacity=30_000)
    with pytest.raises(CapacityError, match=rf"{size} bytes needed, 29996 free") as caught:
        store.put("data/x", aligned(4 * MIB)[:size])
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.hint
    assert store.free_nbytes() == 29_996
    assert store.get("before") == b"kept"
    store.put("data/y", b"small")


def test_space_is_checked_before_writing():
    """F40: a large object that cannot fit fails before the first byte is written."""
    store, disk = on(capacity=3 * MIB)
    with pytest.raises(CapacityError):
        store.put("data/x", aligned(4 * MIB))
    assert "pwrite" not in disk.calls
    assert "fallocate" not in disk.calls


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_not_permitted(code):
    """A read-only mount or missing permission is a PermanentStoreError that says what to do."""
    store, _disk = on(FaultPlan("open", 1, code))
    with pytest.raises(PermanentStoreError) as caught:
        store.put("data/x", b"1")
    assert caught.value.errno == code
    assert "another path" in caught.value.hint


@pytest.mark.parametrize("call", [lambda s: s.put("a/x", b"1"), lambda s: s.create("a/x", b"1"), lambda s: s.claim("a/x"), lambda s: s.get("before"), lambda s: list(s.list(""))])
@pytest.mark.parametrize("kind", ["stat", "fstat", "open", "read", "pwrite", "pread", "scandir", "mkdir", "fsync", "link", "rename", "unlink"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY])
def test_what_may_pass_is_retried(call, kind, code):
    """F42: a stale handle or a mount that hiccups once is tried again from the start; for ever, it is an error and not an endless loop."""
    for nth in (1, 2, 3):
        store, disk = on(FaultPlan(kind, nth, code))
        assert call(store) is not False
        assert list(store.leftovers("")) == [] or kind == "unlink"
    store, disk = on(FaultPlan(kind, 1, code, times=0))
    try:
        call(store)
    except TransientStoreError as caught:
        error = caught
    else:
        error = None
    # What discards a temporary file after a failure is not counted as a try.
    assert disk.faults[0].seen == (4 if error else 0) or kind == "unlink"
    assert error is None or error.errno == code


def test_pauses_between_tries():
    """The tries of one operation take less than a second, with growing pauses; the next operation has its own."""
    pauses = []
    store = LocalStore("/run", disk=SimDisk(faults=[FaultPlan("rename", 1, errno.ETIMEDOUT, times=0)]), sleep=pauses.append)
    for _ in range(2):
        with pytest.raises(TransientStoreError):
            store.put("x", b"1")
        assert pauses == sorted(pauses)
        assert len(pauses) == 3
        assert 0 < sum(pauses) < 1
        pauses.clear()


@pytest.mark.parametrize("kind", ["link", "unlink", "fsync", "rename"])
@pytest.mark.parametrize("links", [True, False])
def test_the_winner_is_told_so_after_a_hiccup(kind, links):
    """``create`` and ``claim`` that took their name, and were tried again for what came after that, won: they say so."""
    for nth in range(1, 6):
        store, _ = on(FaultPlan(kind, nth, errno.ETIMEDOUT), links=links)
        assert store.create("x", b"1")
        assert store.claim("y.claim")
        assert not store.create("x", b"1")
        assert not store.claim("y.claim")


def test_failing_reads_are_tried_once_more():
    """EIO while reading may pass, once; twice it is an error. A disk that is full or read-only is never asked again."""
    reads = [("read", lambda s: s.get("before")), ("pread", lambda s: s.get("before")), ("fstat", lambda s: s.size("before")),
             ("scandir", lambda s: list(s.list(""))), ("pread", lambda s: s.read_into("before", 0, memoryview(bytearray(4))))]  # fmt: skip
    for kind, read in reads:
        store, disk = on(FaultPlan(kind, 1, errno.EIO))
        read(store)
        assert disk.faults[0].seen >= 2
        store, disk = on(FaultPlan(kind, 1, errno.EIO, times=0))
        with pytest.raises(TransientStoreError) as caught:
            read(store)
        assert (caught.value.errno, disk.faults[0].seen) == (errno.EIO, 2)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("kind", ["open", "pwrite", "fsync", "rename"])
def test_failing_writes_are_not_retried(code, kind):
    """F1: what the kernel had taken may be lost: a write that failed for good is not tried again behind the caller's back."""
    store, disk = on(FaultPlan(kind, 1, code))
    with pytest.raises((TransientStoreError, CapacityError, PermanentStoreError)) as caught:
        store.put("x", b"1")
    assert (caught.value.errno, disk.faults[0].seen) == (code, 1)


def test_a_deletion_that_is_tried_again_is_durable():
    """A folder that was gone at the second try is made durable as gone."""
    store, disk = on()
    store.put("a/b/x", b"123")
    disk.faults.append(FaultPlan("fsync", 1, errno.ETIMEDOUT))
    assert store.delete_folder("a/b/") == 3
    assert not [path for path in disk.after_power_cut(Survival.NOTHING).files() if "/b/" in path]


@pytest.mark.parametrize(("before", "after"), [(b"short", b"rather long" * 1000), (b"rather long" * 1000, b"short"), (b"", b"x"), (b"x", b"")])
def test_record_replaced_while_it_is_read(before, after):
    """A record that another process replaces between the opening and the reading is read whole, the old or the new."""
    class Racing(SimDisk):
        racing = False

        def open(self, path, flags):
            fd = super().open(path, flags)
            if self.racing:
                self.racing = False
                LocalStore("/run", disk=self).replace("r", after)
            return fd

    disk = Racing()
    store = LocalStore("/run", disk=disk)
    store.replace("r", before)
    disk.racing = True
    assert store.get("r") == before
    assert store.get("r") == after


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 100_000])
@pytest.mark.parametrize("told", [0, 1, 5000, 200_000])
def test_get_reads_to_the_end(nbytes, told):
    """A size that is out of date (network mounts remember them) does not cut the object off, nor pad it."""
    class Remembering(SimDisk):
        def fstat(self, fd):
            return super().fstat(fd)._replace(nbytes=told)

    store = LocalStore("/run", disk=Remembering(short=3000))
    content = os.urandom(nbytes)
    store.put("x", content)
    assert store.get("x") == content


# -- several machines on one network file system -------------------------------------------------------------------------------


def machines(**options):
    """The same store as two machines see it that mount one disk, and the mounts."""
    server = SimDisk(**options)
    mounts = [Mount(server), Mount(server)]
    stores = [LocalStore("/run", disk=mount, sleep=[].append) for mount in mounts]
    stores[0].put("before", b"kept")
    return stores, mounts


@pytest.mark.parametrize("key", ["x", "m/x", "data/k/x"])
@pytest.mark.parametrize("read", [
    lambda s, key: s.get(key), lambda s, key: s.size(key), lambda s, key: s.read_into(key, 0, memoryview(bytearray(3))),
])  # fmt: skip
def test_a_name_that_was_not_there(key, read):
    """F34: what this machine remembers to be missing is found once another has made it, however deep its new folders are."""
    (one, other), _ = machines()
    for _ in range(2):
        with pytest.raises(NotFoundError):
            read(other, key)
    one.put(key, b"abc")
    read(other, key)
    one.delete(key)
    with pytest.raises(NotFoundError):
        read(other, key)


def test_a_folder_that_was_not_there():
    """F34: a folder that was missing, and files in it, are listed once another machine has made them; sizes of replaced records are new."""
    (one, other), _ = machines()
    for _ in range(2):
        assert list(other.list("data/k/")) == []
        assert other.folders("data/") == []
    one.put("data/k/x", b"abc")
    assert list(other.list("data/k/")) == [("data/k/x", 3)]
    assert other.folders("data/") == ["k"]
    one.replace("alive/1", b"short")
    assert other.size("alive/1") == 5
    one.replace("alive/1", b"rather long")
    assert other.size("alive/1") == 11
    assert list(other.list("alive/")) == [("alive/1", 11)]


def test_listed_but_remembered_to_be_missing():
    """F34: a name that the listing has is not left out because this machine remembers that it was not there."""
    (one, other), mounts = machines()
    with pytest.raises(NotFoundError):
        other.get("x")
    one.put("x", b"abc")
    scandir = mounts[1].scandir

    def without_asking(path):
        remembered = set(mounts[1]._absent)
        found = scandir(path)
        mounts[1]._absent |= remembered
        return found

    mounts[1].scandir = without_asking
    assert list(other.list("")) == [("before", 4), ("x", 3)]


@pytest.mark.parametrize("act", ["replace", "delete"])
@pytest.mark.parametrize("read", [
    lambda s: s.get("r"), lambda s: s.read_into("r", 0, view := memoryview(bytearray(8))) or bytes(view),
])  # fmt: skip
def test_changed_by_another_machine_while_it_is_read(act, read):
    """F42: a record that another machine replaces while it is open here reads as stale, and is read anew; a deleted one is not found."""
    (one, other), mounts = machines()
    one.replace("r", b"old old ")
    opening = mounts[1].open

    def open_and_wait(path, flags):
        fd = opening(path, flags)
        if path.endswith("/r"):
            mounts[1].open = opening
            if act == "replace":
                one.replace("r", b"new new ")
            else:
                one.delete("r")
        return fd

    mounts[1].open = open_and_wait
    if act == "replace":
        assert read(other) == b"new new "
    else:
        with pytest.raises(NotFoundError):
            read(other)
    assert mounts[1].stale_reads == 1


@pytest.mark.parametrize("links", [True, False])
def test_create_of_a_name_that_was_not_there(links):
    """F34: a machine that remembers a name to be free does not overwrite what another has created under it, with and without hard links."""
    (one, other), _ = machines(links=links)
    with pytest.raises(NotFoundError):
        other.get("m/x")
    assert one.create("m/x", b"first")
    assert not other.create("m/x", b"second")
    assert one.get("m/x") == other.get("m/x") == b"first"


def test_writing_into_a_folder_that_another_machine_deleted():
    """F42: a folder that this machine has made and another has deleted since is made again."""
    (one, other), _ = machines()
    other.put("data/k/x", b"1")
    one.delete_folder("data/k/")
    other.put("data/k/y", b"2")
    assert list(one.list("data/")) == [("data/k/y", 1)]


def test_files_that_are_still_open():
    """F42: what NFS keeps of a deleted file that is open here does not make the deletion of its folder fail; later it goes."""
    store, disk = on()
    store.put("data/k/x", b"123")
    disk.close(disk.open("/run/data/k/.nfs000000000000abcd", os.O_CREAT | os.O_WRONLY))
    assert store.delete_folder("data/k/") == 3
    assert store.folders("data/") == ["k"]
    disk.unlink("/run/data/k/.nfs000000000000abcd")
    store.delete_folder("data/k/")
    assert store.folders("data/") == []


def test_folders_are_remembered_by_several_threads():
    """Writers in new folders and deleters at the same time do not trip over what the store remembers of its folders."""
    class Eager(set):
        """Gives the processor away while it is looked through."""

        def __iter__(self):
            for item in super().__iter__():
                yield item
                meeting.wait(0.001)

    meeting = threading.Event()
    store = LocalStore("/run", disk=SimDisk())
    store.put("a/x", b"1")
    store._durable_folders = Eager(store._durable_folders)
    failures = []

    def write(number):
        try:
            for turn in range(20):
                store.put(f"data/{number}-{turn}/x", b"1")
                store.delete_folder(f"data/{number}-{turn}/")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert list(store.list("data/")) == []


def test_closed_folders_hide_no_leftovers():
    """A folder of others that must not be looked into (lost+found) breaks the search for temporary files neither before nor after it."""
    store, disk = on(FaultPlan("scandir", 1, errno.EACCES, times=0, below="lost+found"))
    disk.mkdir("/run/lost+found")
    store.put("z/x", b"1")
    for name in (".tmp-a", "z/.tmp-b"):
        disk.close(disk.open(f"/run/{name}", os.O_CREAT | os.O_WRONLY))
    assert [name for name, _, _ in store.leftovers("")] == [".tmp-a", "z/.tmp-b"]
    with pytest.raises(PermanentStoreError):
        list(store.list(""))


def test_listing_errors_are_not_empty():
    """A folder that cannot be read is an error, never an empty listing."""
    for call in (lambda s: list(s.list("a/")), lambda s: s.folders("a/"), lambda s: list(s.leftovers("a/"))):
        store, _ = on(FaultPlan("scandir", 1, errno.EIO, times=0))
        with pytest.raises(TransientStoreError):
            call(store)


def opened_directly(disk_class):
    """A disk class that counts the files opened with O_DIRECT."""

    class Counting(disk_class):
        directly = 0

        def open(self, path, flags):
            if flags & os.O_DIRECT:
                Counting.directly += 1
            return super().open(path, flags)

    return Counting


@pytest.mark.parametrize("nbytes", [MIB, 2 * MIB + 1, 9 * MIB + 4095])
def test_large_aligned_objects_are_written_directly(nbytes):
    """F46: O_DIRECT for large page-aligned buffers, never for small or misaligned ones."""
    disk = opened_directly(SimDisk)()
    store = LocalStore("/run", disk=disk)
    store.put("x", aligned(12 * MIB)[1 : nbytes + 1])
    store.put("x", b"small")
    assert disk.directly == 0
    store.put("x", aligned(12 * MIB), nbytes=nbytes)
    assert disk.directly == 1
    assert store.size("x") == nbytes


def test_shared_reads_go_through_the_page_cache():
    """Large aligned reads go past the page cache; not when other processes of the node want the same bytes."""
    disk = opened_directly(SimDisk)()
    store = LocalStore("/run", disk=disk)
    store.put("x", aligned(4 * MIB))
    before, view = disk.directly, aligned(4 * MIB)
    store.read_into("x", 0, view, shared=True)
    assert disk.directly == before
    store.read_into("x", 0, view)
    assert disk.directly == before + 1


def test_direct_writes_go_in_whole_pages():
    """F46: with O_DIRECT every offset and length is a multiple of a page, also after short writes; the file is cut to its size."""
    writes = []

    class Recording(SimDisk):
        def pwrite(self, fd, data, offset):
            writes.append((offset, len(data), address(data)))
            return super().pwrite(fd, data, offset)

    store = LocalStore("/run", disk=Recording(short=3 * MIB + 77))
    content = os.urandom(17 * MIB + 123)
    buffer = aligned(18 * MIB)
    buffer[: len(content)] = content
    for view in (buffer, buffer[: len(content)]):
        writes.clear()
        store.put("x", view, nbytes=len(content))
        assert store.get("x") == content
        assert {value % 4096 for write in writes for value in write} == {0}


def test_refusal_is_remembered():
    """F46: what a device refused once (O_DIRECT, fallocate) is not tried on it again."""
    disk = opened_directly(SimDisk)(direct=False, faults=[FaultPlan("fallocate", 1, errno.EOPNOTSUPP, times=0)])
    store = LocalStore("/run", disk=disk)
    for _ in range(3):
        store.put("x", aligned(2 * MIB))
        buffer = aligned(2 * MIB, b"\0")
        store.read_into("x", 0, buffer)
        assert buffer == aligned(2 * MIB)
    assert disk.directly == 1
    assert disk.calls.count("fallocate") == 1


def test_a_refused_write_falls_back():
    """F46: EINVAL at the first direct write, as some FUSE mounts have it, is mended by buffered writing."""
    store, _disk = on(FaultPlan("pwrite", 1, errno.EINVAL))
    store.put("x", aligned(20 * MIB))
    assert store.get("x") == bytes(aligned(20 * MIB))
    assert list(store.leftovers("")) == []


def test_data_is_not_copied(monkeypatch):
    """What is written is the caller's own memory."""
    seen = []

    class Recording(SimDisk):
        def pwrite(self, fd, data, offset):
            seen.append((address(data), offset))
            return super().pwrite(fd, data, offset)

    buffer = aligned(20 * MIB)
    LocalStore("/run", disk=Recording()).put("x", buffer)
    assert {where - offset for where, offset in seen} == {address(buffer)}


def test_interrupt_waits_for_writers(small_blocks):
    """Ctrl-C during a large put leaves no thread, no object and no temporary file."""
    interrupted = threading.Event()

    class Interrupted(SimDisk):
        def pwrite(self, fd, data, offset):
            if threading.current_thread() is threading.main_thread():
                interrupted.set()
                raise KeyboardInterrupt
            assert interrupted.wait(10)
            return super().pwrite(fd, data, offset)

    store = LocalStore("/run", disk=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        store.put("x", aligned(2 * MIB))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("everystep-write")]
    assert list(store.list("")) == list(store.leftovers("")) == []


def test_order_of_a_put():
    """Content is durable before the name is published, and the name before the call returns."""
    store, disk = on()
    store.put("y", b"1")
    assert disk.calls == ["open", "pwrite", "fsync", "rename", "fsync"]
    disk.calls.clear()
    store.put("a/b/y", b"1")
    assert disk.calls == ["mkdir", "fsync", "mkdir", "fsync", "open", "pwrite", "fsync", "rename", "fsync"]


def test_folder_deleted_behind_our_back():
    """A folder that somebody else deleted is made again."""
    store, disk = on()
    store.put("a/b/x", b"1")
    LocalStore("/run", disk=disk).delete_folder("a/")
    store.put("a/b/y", b"2")
    assert list(store.list("a/")) == [("a/b/y", 1)]


def test_temporary_files_are_leftovers():
    """What a dead writer left is no object; it is listed as a leftover with its time, and can be deleted."""
    store, disk = on(clock=lambda: 42.0)
    fd = disk.open("/run/.tmp-dead", os.O_CREAT | os.O_WRONLY)
    disk.pwrite(fd, memoryview(b"123"), 0)
    disk.close(fd)
    assert list(store.list("")) == [("before", 4)]
    assert list(store.leftovers("")) == [(".tmp-dead", 3, 42.0)]
    store.delete(".tmp-dead")
    assert list(store.leftovers("")) == []


def test_symlinks(tmp_path):
    """A pointer such as exports/LATEST is neither object nor folder, and deleting what it is in does not follow it."""
    store = open_store(str(tmp_path / "run"))
    store.put("data/k/x", b"1")
    store.put("exports/one/y", b"2")
    (tmp_path / "run/exports/LATEST").symlink_to("one")
    (tmp_path / "run/exports/data").symlink_to("../data")
    assert list(store.list("exports/")) == [("exports/one/y", 1)]
    assert list(store.folders("exports/")) == ["one"]
    store.delete_folder("exports/")
    assert list(store.list("")) == [("data/k/x", 1)]


@pytest.mark.parametrize(("url", "path"), [("runs/a", "{cwd}/runs/a"), ("/x/y", "/x/y"), ("~/r", "{home}/r"), ("file:///x/a%20b", "/x/a b"), ("file://localhost/x", "/x"), ("FILE:///x", "/x"), ("a://b"[:2] + "x", "{cwd}/a:x")])
def test_addresses(url, path, tmp_path, monkeypatch):
    """Paths, ``~`` and file:// lead to the same folders as in a shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert open_store(url).url == path.format(cwd=tmp_path, home="/home/me")


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://b/r", "az://b", "http://host/x", "", "file://", "file://server/share", "file:///a%00b"])
def test_addresses_refused(url):
    """Another scheme, or nothing at all, is refused with what is supported."""
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "runs/" in str(caught.value) or "file://" in str(caught.value)


def test_run_path_is_a_file(tmp_path):
    """A run path that is a file, or lies below one, is one clear ConfigError."""
    (tmp_path / "file").write_text("x")
    for path in ("file", "file/run", "file/runs/one"):
        store = open_store(str(tmp_path / path))
        for call in (lambda s: s.put("x", b"1"), lambda s: s.get("x"), lambda s: list(s.list("")), lambda s: s.claim("a/b")):
            with pytest.raises(ConfigError, match="/file' is a file"):
                call(store)


def test_run_path_without_parents(tmp_path):
    """One missing parent is made; a path whose parents are missing too is refused before anything is made."""
    open_store(str(tmp_path / "runs/one")).put("x", b"1")
    assert (tmp_path / "runs/one/x").read_bytes() == b"1"
    with pytest.raises(ConfigError, match=r"/far' does not exist"):
        open_store(str(tmp_path / "far/away/run")).put("x", b"1")
    assert not (tmp_path / "far").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_run_path_unwritable(tmp_path):
    """A folder without write permission is one clear PermanentStoreError."""
    tmp_path.chmod(0o500)
    with pytest.raises(PermanentStoreError, match="ermission"):
        open_store(str(tmp_path / "run")).put("x", b"1")


def test_free_space_before_the_run_exists(tmp_path):
    """The free space of a run that does not exist yet is its file system's."""
    free = open_store(str(tmp_path / "a/b/c")).free_nbytes()
    found = os.statvfs(tmp_path)
    assert abs(free - found.f_bavail * found.f_frsize) < 1 << 30


def test_address_of_a_buffer():
    """The address is right for writable and read-only buffers, and their slices."""
    buffer = aligned(8192)
    assert address(buffer) % 4096 == 0
    assert address(buffer[5:]) == address(buffer) + 5
    data = b"0123456789"
    assert address(memoryview(data)[3:]) == address(memoryview(data)) + 3
    assert address(memoryview(buffer).toreadonly()) == address(buffer)


def test_real_fallocate(tmp_path):
    """Reserving space sets the size on a real file, or says that it cannot."""
    disk = RealDisk()
    fd = disk.open(str(tmp_path / "x"), os.O_CREAT | os.O_WRONLY)
    code = 0
    try:
        disk.fallocate(fd, 10_000)
    except OSError as error:
        code = error.errno
    finally:
        disk.close(fd)
    assert (code, (tmp_path / "x").stat().st_size) in {(0, 10_000), (errno.EOPNOTSUPP, 0), (errno.ENOSYS, 0)}
    with pytest.raises(OSError, match="file descriptor") as caught:
        disk.fallocate(fd, 10)
    assert caught.value.errno == errno.EBADF
