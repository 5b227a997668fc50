"""Stores: bytes under keys. ``open_store(url)`` is the one way to get one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable
from urllib.parse import unquote

from everystep.errors import ConfigError

__all__ = ["Store", "open_store"]


@runtime_checkable
class Store(Protocol):
    """Bytes under keys ("a/b/c", no leading slash). Synchronous, thread-safe.

    When ``put``, ``create``, ``claim`` or ``delete`` returns, its effect survives a power cut. Objects never change once put, small
    pointer records (``replace``) apart. All errors are from ``everystep.errors``: NotFoundError for a key that is not there,
    CapacityError for a full disk or quota (needed and free bytes, errno), PermanentStoreError for permissions and read-only mounts,
    ConfigError for a bad key or a run path that cannot be one, TransientStoreError else (what may pass has been tried again by then).
    A failed ``put`` leaves nothing under the key and frees the space it took.
    """

    url: str

    @property
    def synced_s(self) -> float:
        """Seconds spent so far waiting for writes to become durable (fsync), a counter; 0.0 where the store cannot tell it from writing."""
        ...

    def put(self, key: str, data: bytes | memoryview, *, nbytes: int | None = None) -> None:
        """Write a new object whole. ``data`` may be longer than ``nbytes`` (padding to 4,096 bytes, which direct writes need); only
        ``nbytes`` are kept.

        Large page-aligned buffers go with O_DIRECT in several requests in flight. Never copies ``data`` whole.
        """
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Write or atomically replace a small record."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object only if the key is free; False when it was there already (whatever it holds)."""
        ...

    def claim(self, key: str) -> bool:
        """Take a name exclusively (a directory made with mkdir on a path): True for exactly one caller, ever, on every kind of mount."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object."""
        ...

    def read_into(self, key: str, offset: int, view: memoryview, *, shared: bool = False) -> None:
        """Fill ``view`` with bytes from ``offset`` on; CorruptionError when the object is shorter.

        Large reads use O_DIRECT where they can; not when they are ``shared``: other processes of this node are about to read the same
        bytes, which then come from the device once.
        """
        ...

    def size(self, key: str) -> int:
        """Size of the object in bytes."""
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, nbytes) of every object below the folder ``prefix`` ("" or ending in "/"), recursively, sorted; no temporary
        files.

        A folder that does not exist lists as empty; every other failure is an error, never "empty".
        """
        ...

    def folders(self, prefix: str) -> Sequence[str]:
        """Names of the folders directly below ``prefix``, sorted (claims and data folders)."""
        ...

    def delete(self, key: str) -> None:
        """Delete one object; no error when it is not there."""
        ...

    def delete_folder(self, prefix: str) -> int:
        """Delete everything below ``prefix`` (temporary files too) and the folder; returns bytes freed. No error when it is not there."""
        ...

    def leftovers(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """(key, nbytes, time of last change in seconds since the epoch) of temporary files below ``prefix``; ``delete`` takes these."""
        ...

    def free_nbytes(self) -> int | None:
        """Bytes that can still be written, or None where nobody knows."""
        ...


def open_store(url: str) -> Store:
    """The store at ``url``: a path (``~`` is expanded) or ``file://``. Touches nothing yet.

    Raises:
        ConfigError: The scheme is not supported (the supported ones are named), or ``url`` is empty.
    """
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if separator and scheme.isascii() and scheme.replace("+", "").replace("-", "").replace(".", "").isalnum():
        if scheme.lower() != "file":
            raise ConfigError(
                f"cannot open {text!r}: stores of kind {scheme + '://'!r} are not supported", key=text, kind="bad-url", hint="use a path or file://"
            )
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise ConfigError(f"cannot open {text!r}: it names no path of this machine", key=text, kind="bad-url", hint="write file:///absolute/path")
        text = "/" + unquote(path)
    if not text or "\0" in text:
        raise ConfigError(f"cannot open {text!r}: not a path", key=text, kind="bad-url", hint="name a folder, such as runs/mine")
    from everystep.store.local import LocalStore  # a store's module is loaded when it is used

    return LocalStore(os.path.expanduser(text))
