"""The store contract on what a local store meets: a disk, a memory file system, and simulated disks with other habits."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from everystep.store import Store, open_store
from everystep.store.local import LocalStore
from everystep.testing import SimDisk, StoreContract


class TestOnDisk(StoreContract):
    """The temporary directory's file system."""

    @pytest.fixture
    def store(self, tmp_path):
        return open_store(str(tmp_path / "runs" / "one"))

    def test_is_a_store(self, store):
        """The class satisfies the protocol."""
        assert isinstance(store, Store)


class TestInMemoryFileSystem(StoreContract):
    """tmpfs: refuses O_DIRECT on many kernels."""

    @pytest.fixture
    def store(self):
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no /dev/shm here")
        folder = tempfile.mkdtemp(dir="/dev/shm")
        yield LocalStore(folder + "/run")
        shutil.rmtree(folder)


class TestWithoutDirectWrites(StoreContract):
    """A file system that refuses O_DIRECT, with short reads and writes and one writer."""

    @pytest.fixture
    def store(self):
        return LocalStore("/run", disk=SimDisk(direct=False, short=(1 << 20) + 4096), writers=1)


class TestWithoutLinks(StoreContract):
    """A file system without hard links: a folder is the mutex."""

    @pytest.fixture
    def store(self):
        return LocalStore("/run", disk=SimDisk(links=False, short=3_000_000))
