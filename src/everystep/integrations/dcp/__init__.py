"""Everystep beside PyTorch's Distributed Checkpoint (DCP): read what DCP wrote, and save and load through DCP's own calls."""

from __future__ import annotations

from everystep.integrations.dcp.foreign import restore
from everystep.integrations.dcp.reader import Reader
from everystep.integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer", "restore"]
