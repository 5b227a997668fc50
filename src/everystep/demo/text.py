"""Real text that is on every machine: the Python standard library's own source, and a data loader that can be stopped and resumed."""

from __future__ import annotations

import pathlib
import sysconfig

import torch

from everystep.demo.sizes import END
from everystep.errors import ConfigError

_LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "ensurepip", "site-packages", "dist-packages", "__pycache__"}
)


def read_text(*, limit_nbytes: int = 8_000_000, folder: pathlib.Path | None = None) -> bytes:
    """Source of the standard library, files in a fixed order, each ended by a zero byte; whole files up to ``limit_nbytes``.

    Raises:
        ConfigError: There is no source to read (a Python without its standard library as files).
    """
    folder = folder or pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (path.relative_to(folder).as_posix(), path)
        for path in folder.rglob("*.py")
        if _LEFT_OUT.isdisjoint(path.relative_to(folder).parts) and not path.name.startswith("_sysconfigdata")
    )
    documents: list[bytes] = []
    nbytes = 0
    for _, path in files:
        document = path.read_bytes().replace(bytes([END]), b"") + bytes([END])
        if nbytes + len(document) > limit_nbytes:
            break
        documents.append(document)
        nbytes += len(document)
    if nbytes < 20_000:
        raise ConfigError(
            f"no standard library source in {str(folder)!r}: found {nbytes} bytes of it", hint="use a Python whose library is plain files"
        )
    return b"".join(documents)


class Loader:
    """Rows of ``context + 1`` bytes, every row of the text once an epoch, in an order drawn anew each epoch. A Stateful.

    ``next()`` returns int64 tensors ``inputs`` and ``targets``, both ``(batch, context)``.
    """

    def __init__(self, text: bytes, *, batch: int, context: int, seed: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch = batch
        self._context = context
        self._seed = seed
        self._rows = (len(text) - 1) // context
        self._epoch = 0
        self._position = 0
        self._order = self._draw()

    def _draw(self) -> torch.Tensor:
        # A generator of its own: the order depends on the seed and the epoch only, not on what else drew random numbers.
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(self._rows, generator=generator)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch; begins the next epoch when fewer than a batch of rows are left."""
        if self._position + self._batch > self._rows:
            self._epoch += 1
            self._position = 0
            self._order = self._draw()
        rows = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        index = rows[:, None] * self._context + torch.arange(self._context + 1)
        taken = self._bytes[index].long()
        return taken[:, :-1], taken[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands."""
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Stand there again."""
        self._seed, self._epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._order = self._draw()
