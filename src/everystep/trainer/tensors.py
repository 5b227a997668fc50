# ruff: noqa: SLF001 (only the identity of an empty storage tells whether two tensors are one)
"""What counts as a tensor that can be stored, its dtype word, and values that only torch and numpy know."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from everystep.errors import StateError
from everystep.foreign.dtypes import DTYPES, WORDS
from everystep.manifest import TensorSpec
from everystep.trainer.sharding import as_dtensor, local_of
from everystep.values import Ref, Tagged

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Found(NamedTuple):
    """A tensor met on the walk. ``keys`` is the way to it, for messages; ``late`` as in ``Leaf``."""

    name: str
    tensor: torch.Tensor
    late: bool
    keys: tuple[object, ...]


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def way(keys: tuple[object, ...]) -> str:
    """The way to an entry as one would write it: ``state['a']['b.c'][0]``."""
    return "state" + "".join(f"[{key!r:.80}]" for key in keys)


def dotted(keys: tuple[object, ...]) -> str:
    """The name of an entry: its keys joined with dots."""
    return ".".join(map(str, keys))


def refused(name: str, why: str, hint: str) -> StateError:
    """The StateError about one tensor."""
    return StateError(f"tensor {name!r} {why}", key=name, kind="tensor", hint=hint)


def word_of(tensor: torch.Tensor, name: str) -> str:
    """The dtype word of a tensor that can be stored.

    Raises:
        StateError: Sparse, meta, nested, quantized, not yet initialised, a tensor subclass (in a DTensor too), or a dtype safetensors
            cannot hold.
    """
    tensor = local_of(tensor)
    kind = type(tensor)
    if kind not in _PLAIN:
        _check_kind(tensor, kind, name)
    if tensor.is_nested:
        raise refused(name, "is a nested tensor, which cannot be stored", "store its values and offsets as two tensors")
    if tensor.layout is not torch.strided:
        raise refused(name, f"is sparse ({tensor.layout}), which cannot be stored", "store its indices and values, or to_dense() of it")
    if tensor.device.type == "meta":
        raise refused(
            name, "is on the meta device: it has no data", "materialise the module with to_empty and restore or initialise it first"
        )
    if tensor.is_quantized:
        raise refused(name, f"is quantized ({tensor.dtype}), which cannot be stored", "store int_repr() with its scale and zero point")
    word = WORDS.get(tensor.dtype)
    if word is None:
        raise refused(
            name,
            f"has dtype {tensor.dtype}, which safetensors files cannot hold",
            "view it as a dtype they hold, for example with torch.view_as_real",
        )
    return word


def _is_plain(kind: type[torch.Tensor]) -> bool:
    """Tensors and parameters, and subclasses of parameters that change nothing about the data.

    ``isinstance`` would not do: it tells parameters by a flag, not by their class.
    """
    if kind in _PLAIN:
        return True
    known = torch.nn.Parameter in kind.__mro__ or torch.nn.Buffer in kind.__mro__
    return (
        known
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not issubclass(kind, (UninitializedParameter, UninitializedBuffer))
    )


def _check_kind(tensor: torch.Tensor, kind: type[torch.Tensor], name: str) -> None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise refused(name, "belongs to a lazy module that has not seen its first input", "run one forward pass before saving or restoring")
    if any(cls.__name__ == "ShardedTensor" for cls in kind.__mro__):
        raise refused(name, "is a ShardedTensor, which torch has given up for DTensor", "shard the model with fully_shard (FSDP2)")
    if not _is_plain(kind):
        raise refused(
            name,
            f"is a {kind.__module__}.{kind.__qualname__}, a tensor subclass that would come back as something else",
            "store the plain tensors in it",
        )


def spec_of(found: Found) -> TensorSpec:
    """Name, dtype word, shape and group of a tensor found on the walk; StateError when it cannot be stored."""
    return TensorSpec(found.name, word_of(found.tensor, found.name), tuple(found.tensor.shape), _group_of(found))


def _group_of(found: Found) -> str:
    """The file it lies in: the top-level key, of a flat state (``model.state_dict()`` itself) its first part."""
    key = str(found.keys[0])
    return key.partition(".")[0] or key


def identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are one and the same memory seen in the same way (tied), while both are alive."""
    sharded = as_dtensor(tensor)
    if sharded is not None:
        local = local_of(sharded)
        # Of an empty shard the storage tells: ranks must not differ in what they take for tied.
        memory = identity(local) if local.numel() else local.untyped_storage()._cdata
        return memory, local.dtype, tuple(sharded.shape), sharded.placements
    if not _is_plain(type(tensor)) or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements may be one memory cell (an expanded tensor): it cannot be filled in place."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def array_tensor(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """A tensor over the array's memory (over a copy where torch cannot share it). StateError for dtypes that cannot be stored."""
    if type(array) is not np.ndarray:
        raise refused(
            name,
            f"is a {type(array).__module__}.{type(array).__qualname__}, which would come back as a plain array",
            "store numpy.asarray of it",
        )
    if not array.dtype.isnative or array.dtype.kind not in "biufc":
        raise refused(
            name, f"is a numpy array of dtype {array.dtype.str!r}, which cannot be stored", "convert it to a native numeric dtype"
        )
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()
    # numpy has two names for each 64-bit integer; torch knows one.
    array = array.view(np.dtype(array.dtype.str))
    try:
        with warnings.catch_warnings():
            # Only read from: an array that is write-protected is fine.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except TypeError:
        raise refused(
            name, f"is a numpy array of dtype {array.dtype.name!r}, which cannot be stored", "convert it to a numeric dtype"
        ) from None


def tell(value: object) -> Tagged | None:
    """Values of torch and numpy that are not data, as tagged plain values; None for anything else."""
    if isinstance(value, torch.dtype):
        return Tagged("torch.dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Tagged("torch.device", str(value))
    if isinstance(value, torch.Size):
        return Tagged("torch.Size", list(value))
    if isinstance(value, torch.memory_format):
        return Tagged("torch.memory_format", str(value).removeprefix("torch."))
    if isinstance(value, torch.layout):
        return Tagged("torch.layout", str(value).removeprefix("torch."))
    if isinstance(value, np.dtype) and not value.hasobject and value.names is None:
        return Tagged("numpy.dtype", value.str)
    return None


_TORCH_WORDS = {"torch.dtype": torch.dtype, "torch.memory_format": torch.memory_format, "torch.layout": torch.layout}


def untell(tag: str, payload: object) -> object:
    """The value that ``tell`` tagged; a ``Tagged`` of an unknown tag is left as it is."""
    if tag in _TORCH_WORDS:
        found = vars(torch).get(str(payload))
        if isinstance(found, _TORCH_WORDS[tag]):
            return found
    if tag == "torch.device":
        return torch.device(str(payload))
    if tag == "torch.Size":
        return torch.Size(cast("list[int]", payload))
    if tag == "numpy.dtype":
        return np.dtype(str(payload))
    return Tagged(tag, payload)


def ref_kind(value: object) -> str:
    """What a ``Ref`` says of the tensor or array in its place: ``numpy``, ``tensor`` (on the CPU) or ``tensor@cuda``."""
    if isinstance(value, torch.Tensor):
        return "tensor" if value.device.type == "cpu" else f"tensor@{value.device.type}"
    return "numpy"


def device_of(kind: str) -> torch.device:
    """Where a fresh tensor for a ``Ref`` of this kind goes: the saved type of device where this machine has one, else the CPU."""
    if kind == "tensor@cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def fresh(ref: Ref, spec: TensorSpec) -> tuple[object, torch.Tensor]:
    """A new tensor (or array) for a reference, and the tensor that fills it."""
    tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device_of(ref.kind))
    if ref.kind == "numpy":
        return tensor.numpy(), tensor
    return tensor, tensor
