"""The run itself: ``Repository``. How it works is told in the package's docstring."""

from __future__ import annotations

from collections.abc import Iterator

from everystep.errors import ConflictError, NotFoundError
from everystep.manifest import Manifest, Part, encode
from everystep.policy import Keep, Kept, retain
from everystep.repository.records import UNREADABLE, CheckpointKey, Tombstone, manifest_key, part_name
from everystep.repository.reducing import Reducing
from everystep.repository.verifying import verify_objects, verify_own_parts, verify_parts


class Repository(Reducing):
    """A run on one store. Cheap to make; holds no connection, and remembers only what never changes. Thread-safe.

    Reading is in ``published.py``, deleting in ``sweeping.py``, reducing in ``reducing.py``, attempts in ``attempts.py``; here are the
    writes of a save.
    """

    # -- writing, in this order: data, part, manifest --------------------------------------------------
    def put_data(self, key: CheckpointKey, file_name: str, data: memoryview, *, nbytes: int) -> None:
        """Make one data file durable (``data`` may be padded, see ``Store.put``). An attempt's own leftover of the same name is replaced.

        Raises:
            ConflictError: The key is committed already ("committed"): its data must not change; or it was given up meanwhile ("forgotten").
        """
        if self._fates.published(key):
            raise ConflictError(
                f"step {key.step} of attempt {key.attempt} in {self.store.url!r} is committed already", step=key.step, key=str(key),
                kind="committed", hint="save each step once",
            )  # fmt: skip
        self._refuse_elsewhere()
        try:
            self.store.put(self.data_key(key, file_name), data, nbytes=nbytes)
        except NotFoundError:  # its folder was deleted under it
            self._refuse_given_up(key)
            raise

    def put_part(self, part: Part) -> None:
        """Make the node's part durable: it is there for other nodes from now on, and never changes. Idempotent.

        Raises:
            ConflictError: Another part of this node is there (``kind`` "part"), or the key was given up ("forgotten").
        """
        key = CheckpointKey(part.step, part.attempt)
        self._refuse_given_up(key)
        name, data = self.data_key(key, part_name(part.node)), encode("part", part)
        try:
            if not self.store.create(name, data) and self.store.get(name) != data:
                raise ConflictError(
                    f"another part of node {part.node} of step {key.step} of attempt {key.attempt} is in {self.store.url!r}", step=key.step,
                    key=name, kind="part", hint="two jobs write to one run: stop one of them, or give it another path",
                )  # fmt: skip
        except NotFoundError:
            self._refuse_given_up(key)
            raise

    def commit(self, manifest: Manifest) -> None:
        """Create the manifest. Idempotent: any node, any number of times, in any order.

        Raises:
            ConflictError: A higher attempt exists that does not go on from this step (``kind`` "superseded-attempt"), another manifest is
                there ("manifest"), or the key was given up or forgotten, or its data is gone ("forgotten").
        """
        key = CheckpointKey(manifest.step, manifest.attempt, manifest.reduced)
        self._refuse_elsewhere()
        if not key.reduced:  # a reduction is of what is committed: nobody goes on from it, and whoever makes it need not be a trainer
            self._refuse_if_superseded(key)
        if key in self._keys("forgotten/"):
            self._refuse_given_up(key)
        if manifest.metrics:
            self._metrics_of_the_save(key, manifest.metrics)
        data, name = encode("manifest", manifest), manifest_key(key)
        created = self.store.create(name, data)
        if not created:
            self._compare(name, data, key)
        # By the listing and by the name: a network mount may be behind with either.
        listed = key in self._keys("forgotten/")
        self._refuse_given_up(key, listed=listed)
        superseded = key.reduced > 0 or self.newest_attempt() > key.attempt
        if (superseded or manifest.nodes > 1) and not self._all_there(manifest, key, every=superseded):
            # We slept between the first look and the creation, and it was forgotten, or a newer attempt's sweep took the data; the
            # tombstone may be gone too.
            if created:
                self.store.delete(name)
            raise self._was_forgotten(key, "")
        self._known.put(key, len(data), (stored.key for stored in manifest.objects))

    def _refuse_given_up(self, key: CheckpointKey, *, listed: bool = False) -> None:
        """ConflictError when a tombstone stands. One that came too late is taken back."""
        stone = self._fates.tombstone(key) or (Tombstone() if listed else None)
        if stone is not None and not (stone.given_up and self._fates.call_off(key)):
            raise self._was_forgotten(key, stone.reason)

    def _compare(self, name: str, data: bytes, key: CheckpointKey) -> None:
        try:
            there = self.store.get(name)
        except NotFoundError:
            raise self._was_forgotten(key, "") from None
        if there == data:
            return
        if self._fates.marked(key):
            raise self._was_forgotten(key, self.given_up(key) or "")
        raise ConflictError(
            f"another checkpoint of step {key.step} of attempt {key.attempt} is committed in {self.store.url!r}", step=key.step,
            key=name, kind="manifest", hint="two trainers write to one run: stop one of them, or give it another path",
        )  # fmt: skip

    def _refuse_if_superseded(self, key: CheckpointKey) -> None:
        newest = self.newest_attempt()
        # What the newest attempt itself goes on from may still arrive: its trainer was restored from memory before the disk had it.
        if newest > key.attempt and not self.in_lineage(key):
            raise ConflictError(
                f"attempt {key.attempt} of run {self.store.url!r} cannot commit step {key.step}: attempt {newest} has started since",
                step=key.step, key=str(key), kind="superseded-attempt",
                hint="another trainer took over this run: stop this one, or give it another path",
            )  # fmt: skip

    def _was_forgotten(self, key: CheckpointKey, reason: str) -> ConflictError:
        return ConflictError(
            f"step {key.step} of attempt {key.attempt} in {self.store.url!r} was given up or forgotten before it was committed"
            + (f": {reason}" if reason else ""),
            step=key.step, key=str(key), kind="forgotten", hint="save again at a later step",
        )  # fmt: skip

    def _all_there(self, manifest: Manifest, key: CheckpointKey, *, every: bool) -> bool:
        """Whether the files that this store should have are there: every one, or at least one of this checkpoint's own."""
        folder = self.data_key(key, "")
        try:
            if manifest.nodes > 1 and not manifest.shared:
                parts = [self.read_part(key, node) for node in self.parts_there(key)]
                objects = [stored for part in parts for stored in part.objects]
                if not parts:
                    return False
            else:
                objects = list(manifest.objects)
            own = [stored for stored in objects if stored.key.startswith(folder)]
            return all(self.store.size(stored.key) == stored.nbytes for stored in (objects if every else own[:1]))
        except NotFoundError:
            return False

    # -- retention and checking ------------------------------------------------------------------------------------
    def retention(self, keep: Keep, *, now: float) -> list[Kept]:
        """Decide (not do) what to keep, with reasons. Sees all attempts' committed checkpoints; incomplete ones count for nothing."""
        return retain(self._candidates(now=now, measured=keep.best > 0), keep)

    def verify(self, key: CheckpointKey, *, threads: int = 2) -> Iterator[tuple[str, int, str]]:
        """Read every byte and compare; yields (object key, nbytes, "" or what is wrong) as it goes: manifest, parts, data files.

        Where each node has a store of its own, only that node's files are looked for here: those of the parts that are there, and
        whatever else of the checkpoint is.
        """
        name = manifest_key(key)
        data = self.store.get(name)
        try:
            manifest = self._checked(data, key)
        except UNREADABLE as error:
            yield name, len(data), error.message
            return
        yield name, len(data), ""
        if manifest.reduced:  # the parts were those of the whole one
            yield from verify_objects(self.store, manifest, threads=threads)
            return
        folder = self.data_key(key, "")
        parts = [self.data_key(key, part_name(node)) for node in range(manifest.nodes)]
        there = {stored for stored, _ in self.store.list(folder)}
        objects = None
        if manifest.nodes > 1 and not manifest.shared:
            objects = {stored.key for stored in manifest.objects} & there
            objects |= yield from verify_own_parts(self.store, [part for part in parts if part in there], manifest, folder)
        elif manifest.nodes > 1 or parts[0] in there:  # one node's manifest is its part: a file that says the same need not be there
            yield from verify_parts(self.store, parts, data)
        yield from verify_objects(self.store, manifest, threads=threads, only=objects)
