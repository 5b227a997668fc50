"""The one seam between staging and an accelerator: pinned slabs, a side stream, events.

Staging needs four things of an accelerator: register a slab so that copies into it run asynchronously, run copies behind everything
the training stream has been given so far, learn on the host when they are over, and hold the training stream back until then without
blocking the host. ``CudaDevice`` is the real one; tests use a fake with the same methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from everystep.errors import CapacityError, StateError


class Mark(Protocol):
    """A point in the side stream's work (a CUDA event)."""

    def wait(self) -> None:
        """Block the host until the work before this point is done."""
        ...


class Device(Protocol):
    """An accelerator as staging sees it."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin a slab's mapping, once."""
        ...

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        ...

    def copy_now(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue copies on the *training* stream: ordered before whatever changes the sources next."""
        ...

    def copy_late(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue copies on the side stream, behind the training stream's work so far."""
        ...

    def gather(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sources' bytes one after the other, read on the side stream behind the training stream's work and the copies so far.

        They are on the host once a later mark is done.
        """
        ...

    def mark(self) -> Mark:
        """A point after everything enqueued so far on both streams by this object."""
        ...

    def hold_training(self, mark: Mark) -> None:
        """Make the training stream wait for ``mark``; the host goes on."""
        ...


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """The seam on one CUDA device."""

    def __init__(self, index: int) -> None:
        self.index = index
        with torch.cuda.device(index):
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock the slab's mapping (``cudaHostRegister``, portable to every device of the process)."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 1))  # type: ignore[no-untyped-call]
        if code not in (0, 712):  # 712: it is registered already, by another device of this process
            message = f"cudaHostRegister of {nbytes} bytes failed with code {code}"
            raise CapacityError(message, kind="pinned-memory", hint="raise the locked-memory limit (ulimit -l) or lower memory_budget")

    def unregister(self, address: int) -> None:
        """Release the page lock."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def copy_now(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue on the current stream."""
        with torch.cuda.device(self.index):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            # The side stream's mark has to cover these copies too.
            self.stream.wait_stream(torch.cuda.current_stream())

    def copy_late(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue on the side stream."""
        with torch.cuda.device(self.index):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
                    # The allocator must not hand this memory out again before the copy has run.
                    source.record_stream(self.stream)

    def gather(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate on the side stream, then copy to pinned memory."""
        with torch.cuda.device(self.index):
            # What the training stream has been given so far, an optimizer's step perhaps, has to be seen.
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.device(self.index), torch.cuda.stream(self.stream):
            joined = torch.cat([source.view(torch.uint8) for source in sources])
            return torch.empty(joined.numel(), dtype=torch.uint8, pin_memory=True).copy_(joined, non_blocking=True)

    def mark(self) -> Mark:
        """An event at the side stream's end."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.index):
            event.record(self.stream)
        return _CudaMark(event)

    def hold_training(self, mark: Mark) -> None:
        """``current_stream().wait_event``."""
        assert isinstance(mark, _CudaMark)
        with torch.cuda.device(self.index):
            torch.cuda.current_stream().wait_event(mark.event)


def device_for(device: torch.device) -> Device | None:
    """The seam for tensors on ``device``; None for the CPU, whose copies are plain memory moves."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return CudaDevice(device.index if device.index is not None else torch.cuda.current_device())
    message = f"tensors on {str(device)!r} cannot be staged: this version knows the CPU and CUDA"
    raise StateError(message, kind="device", hint="move the state to the CPU before save, or ask for this device in an issue")
