"""The user's state <-> named tensors and plain values.

``StateCollector`` walks a state for a save, ``restore_into`` fills one from a checkpoint, ``load_state`` gives the contents of one
without a model. The work is in ``nodes`` (the walk), ``modules``, ``optimizers``, ``rng``, ``tensors``, ``collect``, ``restor*`` and
``loading``.
"""

from __future__ import annotations

from everystep.foreign.dtypes import DTYPES, WORDS
from everystep.trainer.collect import Collected, Leaf, StateCollector
from everystep.trainer.loading import load_state
from everystep.trainer.restore import restore_into
from everystep.trainer.restoring import RestoreReport, TensorReader
from everystep.trainer.rng import RNG

__all__ = ["DTYPES", "RNG", "WORDS", "Collected", "Leaf", "RestoreReport", "StateCollector", "TensorReader", "load_state", "restore_into"]
