"""What becomes of a checkpoint that is not committed yet: either its manifest comes, or it is given up; never both.

Theory of operation. Any node may commit a checkpoint and any may give it up, at the same time. The name of the manifest decides: it is
created once, and holds either the manifest or a *mark* that there will be none. Whoever gives up leaves a tombstone first (readers ignore
what has one, so nobody takes the mark for a checkpoint), then tries to create the mark. If the manifest was there first, giving up has
lost: the tombstone is taken back, by whichever side sees it, and nothing has been deleted. If the mark was there first, no committer ever
succeeds, and the data can go. A tombstone without that word in it is one of ``forget`` and is never taken back this way.
"""

from __future__ import annotations

from collections.abc import Collection

from everystep.errors import CorruptionError, NotFoundError
from everystep.manifest import decode, encode
from everystep.repository.records import UNREADABLE, CheckpointKey, Tombstone, manifest_key, tombstone_key
from everystep.store import Store

_MARK = "given-up"
_MARK_HEAD = encode(_MARK, {}).partition(b'"digest"')[0]
_FORGOTTEN = Tombstone()


class Fates:
    """Tombstones and marks of one run. Thread-safe; remembers only what never changes again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marked: set[CheckpointKey] = set()

    def tombstone(self, key: CheckpointKey) -> Tombstone | None:
        """The tombstone by its name, without a listing; None where there is none."""
        name = tombstone_key(key)
        try:
            return decode("forgotten", self._store.get(name), Tombstone, key=name)
        except NotFoundError:
            return None
        except UNREADABLE:
            return Tombstone(reason="it has a tombstone that cannot be read")

    def published(self, key: CheckpointKey) -> bool:
        """Whether a manifest, sound or not, lies under its name, and not a mark."""
        if key in self._marked:
            return False
        head = bytearray(len(_MARK_HEAD))
        try:
            self._store.read_into(manifest_key(key), 0, memoryview(head))
        except NotFoundError:
            return False
        except CorruptionError:
            return True  # cut off: shown as damaged, and nothing is deleted on its account
        if head != _MARK_HEAD:
            return True
        self._marked.add(key)
        return False

    def marked(self, key: CheckpointKey) -> bool:
        """Whether a mark lies under the manifest's name."""
        self.published(key)
        return key in self._marked

    def gone(self, committed: Collection[CheckpointKey], forgotten: Collection[CheckpointKey]) -> set[CheckpointKey]:
        """Of the names in ``manifests/`` those that count for nothing. Costs nothing for those without a tombstone."""
        return {key for key in committed if key in forgotten and not self.lost(key)}

    def lost(self, key: CheckpointKey) -> bool:
        """Whether a giving up came too late here: the checkpoint is committed, whatever its tombstone says."""
        stone = self.tombstone(key)
        return stone is None or (stone.given_up and self.published(key))

    def call_off(self, key: CheckpointKey) -> bool:
        """Take back a tombstone that came too late; False when it stands."""
        if not self.lost(key):
            return False
        self._store.delete(tombstone_key(key))
        return True

    def forget(self, key: CheckpointKey) -> bool:
        """Leave a tombstone for good; whether it is this call's."""
        created = self._store.create(tombstone_key(key), encode("forgotten", _FORGOTTEN))
        if not created:
            stone = self.tombstone(key)
            if stone is not None and stone.given_up:  # else a late committer might take it for one to be called off
                self._store.replace(tombstone_key(key), encode("forgotten", Tombstone(reason=stone.reason)))
        return created

    def give_up(self, key: CheckpointKey, reason: str) -> bool:
        """Decide that there will be no manifest; False when there is one already, which stays."""
        record = Tombstone(reason=reason, given_up=True)
        stone = self.tombstone(key)
        if stone is not None and not stone.given_up:
            return not self.published(key)  # forgotten for good: no mark is needed
        self._store.create(tombstone_key(key), encode("forgotten", record))
        self._store.create(manifest_key(key), encode(_MARK, record))
        if self.published(key):
            self.call_off(key)
            return False
        self._store.create(tombstone_key(key), encode("forgotten", record))  # should a sweep have taken it for one that is over
        return True
