"""Keys of the job's store that are watched in the background: a save must not wait for the network to learn that there is nothing new."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

from everystep.errors import AgentError

_JOIN_S = 2.0
EVERY_S, PER_RANK_S = 0.05, 1e-4
"""How often the store is asked; in large worlds less often, since one process answers all."""


class Lookout:
    """Asks for keys until they have a value. Thread-safe; the thread ends with ``close`` or when nothing is watched for.

    Args:
        look: A key's value or None, as ``World.look``; called from a thread of its own. An AgentError ends the watch and is raised again by
            ``glance``.
        pause_s: Between two rounds over the keys.
    """

    def __init__(self, look: Callable[[str], bytes | None], *, pause_s: float = EVERY_S) -> None:
        self._look = look
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._wanted: dict[str, None] = {}
        self._found: dict[str, bytes] = {}
        self._failed: AgentError | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def glance(self, key: str) -> bytes | None:
        """What has been seen of a key so far; from the first call on it is watched. Never waits.

        Raises:
            AgentError: The store cannot be reached any more.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if key in self._found:
                return self._found[key]
            self._wanted[key] = None
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="everystep-lookout", daemon=True)
                self._thread.start()
                _watching.add(self)
        return None

    def close(self) -> None:
        """End the thread. One that waits for a dead network is left behind."""
        self._ended.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s):
            with self._lock:
                keys = list(self._wanted)
            for key in keys:
                try:
                    data = self._look(key)
                except AgentError as error:
                    with self._lock:
                        self._failed = error
                    return
                if data is not None:
                    with self._lock:
                        self._wanted.pop(key, None)
                        self._found[key] = data


_watching: weakref.WeakSet[Lookout] = weakref.WeakSet()


def _close_all() -> None:
    """No thread may come out of the store once the interpreter ends: taking its lock again would end the process with SIGABRT."""
    for lookout in list(_watching):
        lookout.close()


atexit.register(_close_all)
