"""What every store must do, as pytest tests: subclass ``StoreContract`` and give a ``store`` fixture."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import pytest

from everystep.errors import ConfigError, CorruptionError, NotFoundError
from everystep.store import Store

__all__ = ["StoreContract"]

PAGE = 4096
RACERS = 8


def _race(run: Callable[[int], bool]) -> list[bool]:
    """Results of ``run(0)`` to ``run(RACERS - 1)``, started at the same moment in a thread each."""
    barrier, results, failures = threading.Barrier(RACERS), [False] * RACERS, list[BaseException]()

    def racer(number: int) -> None:
        try:
            barrier.wait(timeout=10)
            results[number] = run(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=racer, args=(number,)) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


def _content(nbytes: int) -> bytes:
    """Bytes that differ from block to block."""
    block = b"".join(number.to_bytes(4, "little") for number in range(min(nbytes // 4 + 1, 1 << 16)))
    return (block * (nbytes // len(block) + 1))[:nbytes]


class StoreContract:
    """Tests of one kind of store: subclass it in a test module and define a fixture ``store`` that gives an empty one.

    ::

        class TestMyStore(StoreContract):
            @pytest.fixture
            def store(self, tmp_path):
                return MyStore(tmp_path)
    """

    @pytest.mark.parametrize("nbytes", [0, 1, 10, PAGE - 1, PAGE, PAGE + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (9 << 20) + 7])
    def test_put_any_size(self, store: Store, nbytes: int) -> None:
        """F46: what is put at any size is what is read, with the exact size."""
        data = _content(nbytes)
        store.put("data/x", data)
        assert store.size("data/x") == nbytes
        assert store.get("data/x") == data

    @pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, (2 << 20) + 1, (17 << 20) - 5])
    def test_put_padded_page_aligned(self, store: Store, nbytes: int) -> None:
        """F46: of a page-aligned buffer with padding only the wanted bytes are kept."""
        padded = -(-nbytes // PAGE) * PAGE
        with mmap.mmap(-1, padded) as buffer:
            data = _content(nbytes)
            buffer[:nbytes] = data
            buffer[nbytes:] = b"\xff" * (padded - nbytes)
            with memoryview(buffer) as view:
                store.put("data/x", view, nbytes=nbytes)
            assert store.size("data/x") == nbytes
            assert store.get("data/x") == data

    def test_put_page_aligned_without_padding(self, store: Store) -> None:
        """A page-aligned buffer that ends inside a page is written whole."""
        nbytes = (3 << 20) + 123
        with mmap.mmap(-1, 4 << 20) as buffer:
            buffer[:nbytes] = _content(nbytes)
            with memoryview(buffer) as whole, whole[:nbytes] as view:
                store.put("data/x", view)
            assert store.get("data/x") == buffer[:nbytes]

    def test_put_misaligned(self, store: Store) -> None:
        """A large buffer at an odd address is written whole."""
        nbytes = (3 << 20) + 5
        with mmap.mmap(-1, 4 << 20) as buffer:
            buffer[1 : 1 + nbytes] = _content(nbytes)
            with memoryview(buffer) as whole, whole[1 : 1 + nbytes] as view:
                store.put("data/x", view)
            assert store.get("data/x") == _content(nbytes)

    def test_put_more_than_given(self, store: Store) -> None:
        """More bytes than the buffer has cannot be put, and nothing is left."""
        with pytest.raises(ValueError, match="5 bytes"):
            store.put("data/x", b"abc", nbytes=5)
        assert list(store.list("")) == []

    def test_replace(self, store: Store) -> None:
        """A pointer record is made and then replaced whole."""
        store.replace("exports/LATEST", b"one, rather long")
        store.replace("exports/LATEST", b"two")
        assert store.get("exports/LATEST") == b"two"
        assert list(store.list("")) == [("exports/LATEST", 3)]

    def test_create_only_once(self, store: Store) -> None:
        """The second creation reports that the key was taken and changes nothing."""
        assert store.create("manifests/a", b"first")
        assert not store.create("manifests/a", b"second")
        assert not store.create("manifests/a", b"first")
        assert store.get("manifests/a") == b"first"

    def test_create_race(self, store: Store) -> None:
        """Of many creators at the same moment one wins, and its bytes are there."""
        for round_ in range(5):
            won = _race(lambda number, key=f"m/{round_}": store.create(key, b"%d" % number))  # type: ignore[misc]
            assert won.count(True) == 1
            assert store.get(f"m/{round_}") == b"%d" % won.index(True)

    def test_claim_race(self, store: Store) -> None:
        """Of many claimants at the same moment one wins, and nobody ever again."""
        for round_ in range(5):
            assert _race(lambda _, key=f"attempts/{round_}.claim": store.claim(key)).count(True) == 1  # type: ignore[misc]
            assert not store.claim(f"attempts/{round_}.claim")
        assert list(store.folders("attempts/")) == [f"{round_}.claim" for round_ in range(5)]

    def test_put_race_in_new_folders(self, store: Store) -> None:
        """Many writers that make the same new folders at the same moment all succeed."""
        _race(lambda number: bool(store.put(f"data/new/deep/{number}", b"x" * number)))  # type: ignore[func-returns-value]
        assert list(store.list("data/")) == [(f"data/new/deep/{number}", number) for number in range(RACERS)]

    def test_absent(self, store: Store) -> None:
        """A key that is not there is a NotFoundError, however it is read; and a folder is no object."""
        store.put("data/a/x", b"1")
        for key in ("nothing", "data/a/y", "data/b/x", "data/a"):
            with pytest.raises(NotFoundError) as caught:
                store.size(key)
            assert caught.value.key == key
            if key != "data/a":
                with pytest.raises(NotFoundError):
                    store.get(key)
                with pytest.raises(NotFoundError):
                    store.read_into(key, 0, memoryview(bytearray(1)))

    @pytest.mark.parametrize("nbytes", [0, 1, PAGE, (2 << 20) + 1])
    def test_read_into_anywhere(self, store: Store, nbytes: int) -> None:
        """F10: any range is read into a buffer at any alignment, and nothing beside it is touched."""
        data = _content((4 << 20) + 17)
        store.put("data/x", data)
        with mmap.mmap(-1, 4 << 20) as buffer:
            for offset in (0, 1, 511, PAGE - 1, PAGE, PAGE + 1, (1 << 20) + 3):
                for shift in (0, 1, 3):
                    start = (offset + shift) % PAGE
                    buffer[: start + nbytes + 64] = b"\xee" * (start + nbytes + 64)
                    with memoryview(buffer) as whole, whole[start : start + nbytes] as view:
                        store.read_into("data/x", offset, view)
                    assert buffer[start : start + nbytes] == data[offset : offset + nbytes]
                    assert buffer[:start] == b"\xee" * start
                    assert buffer[start + nbytes : start + nbytes + 64] == b"\xee" * 64

    @pytest.mark.parametrize(
        ("size", "offset", "nbytes"), [(10, 0, 11), (10, 10, 1), (10, 99, 1), ((3 << 20) + 5, 0, (3 << 20) + 6), (2 << 20, 0, 3 << 20)]
    )
    def test_read_beyond_the_end(self, store: Store, size: int, offset: int, nbytes: int) -> None:
        """F6: a range that the object does not have is a CorruptionError that names the object."""
        store.put("data/x", _content(size))
        with pytest.raises(CorruptionError) as caught:
            store.read_into("data/x", offset, memoryview(mmap.mmap(-1, 4 << 20))[:nbytes])
        assert caught.value.key == "data/x"

    def test_list(self, store: Store) -> None:
        """Listing is recursive, sorted by key, with sizes; of a folder that is not there it is empty."""
        for number, key in enumerate(["b", "a/z", "a/b/c", "a-b/c", "a.b", "a/b-c", "a/b.d"]):
            store.put(key, b"x" * number)
        assert list(store.list("")) == [("a-b/c", 3), ("a.b", 4), ("a/b-c", 5), ("a/b.d", 6), ("a/b/c", 2), ("a/z", 1), ("b", 0)]
        assert list(store.list("a/b/")) == [("a/b/c", 2)]
        assert list(store.list("none/")) == []
        assert list(store.folders("")) == ["a", "a-b"]
        assert list(store.folders("a/")) == ["b"]
        assert list(store.folders("none/")) == []

    def test_delete(self, store: Store) -> None:
        """Deleting takes one object, and twice is no error."""
        store.put("a/x", b"1")
        store.put("a/y", b"2")
        for _ in range(2):
            store.delete("a/x")
        store.delete("none/x")
        assert list(store.list("")) == [("a/y", 1)]

    def test_delete_folder(self, store: Store) -> None:
        """Deleting a folder takes everything below it, says how many bytes, and twice is no error; its name can be used again."""
        store.put("data/k/x", b"123")
        store.put("data/k/deep/y", b"45")
        store.put("data/kk/x", b"6")
        assert store.delete_folder("data/k/") == 5
        assert store.delete_folder("data/k/") == 0
        assert list(store.list("")) == [("data/kk/x", 1)]
        assert list(store.folders("data/")) == ["kk"]
        store.put("data/k/x", b"new")
        assert store.get("data/k/x") == b"new"

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/./b", "a\0b", ".tmp-x", "a/.tmp-x"])
    def test_bad_keys(self, store: Store, key: str) -> None:
        """A key that leads out of the store or hides in it is refused (a ValueError), and nothing is written."""
        for call in (
            lambda: store.put(key, b""), lambda: store.create(key, b""), lambda: store.claim(key), lambda: store.get(key),
            lambda: store.read_into(key, 0, memoryview(bytearray(1))), lambda: store.size(key), lambda: store.replace(key, b""),
        ):  # fmt: skip
            with pytest.raises(ConfigError):
                call()
        assert list(store.list("")) == []
        assert list(store.folders("")) == []

    def test_bad_folders(self, store: Store) -> None:
        """A folder is named with its slash; the whole store cannot be deleted."""
        delete = store.delete_folder
        for call in (lambda: list(store.list("a")), lambda: store.folders("a"), lambda: delete("a"), lambda: delete("")):
            with pytest.raises(ConfigError):
                call()

    def test_no_leftovers(self, store: Store) -> None:
        """After successful writes there are no temporary files, and there is a number of free bytes or None."""
        store.put("a/x", b"1" * 100)
        store.create("a/y", b"1")
        store.create("a/y", b"1")
        store.replace("a/z", b"1")
        assert list(store.leftovers("")) == []
        free = store.free_nbytes()
        assert free is None or free > 0
