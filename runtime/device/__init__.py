"""Device: where buffers live and steps run. Two implementations with the same verbs (host.py, cuda.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Buffer = Any  # a numpy array on the host, a DeviceArray elsewhere; has .shape and .dtype


Step = Any  # what Device.capture yields: a captured sequence of launches over fixed buffers, opaque to everyone else


class Enqueueable(Protocol):
    """An engine bound to fixed buffers: one launch of it is one forward pass."""

    def enqueue(self) -> None: ...


class Device(Protocol):
    """Allocate, copy, launch, capture, replay, synchronize.

    While a step is captured nothing may be allocated and nothing may be read back on the host: a CUDA graph refuses
    both, so HostDevice does too (CaptureError).
    """

    name: str

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        """A zeroed buffer."""

    def view(self, buffer: Buffer, start: int, shape: tuple[int, ...]) -> Buffer:
        """``shape`` elements of a buffer from flat element ``start`` on, in the same memory."""

    def copy(self, destination: Buffer, source: Buffer) -> None:
        """Copies ``source`` (a host array or a buffer) into ``destination``; shapes and dtypes must be equal."""

    def launch(self, kernel: str, *arguments: Any) -> None:
        """Runs the op of that name on its inputs, then its outputs: buffers whose shapes give every size."""

    def enqueue(self, engine: Enqueueable) -> None:
        """Runs a bound engine once."""

    def capture(self) -> AbstractContextManager[Step]:
        """What is launched inside is recorded in the step it yields, and runs when that is replayed."""

    def replay(self, step: Step) -> None:
        """Runs a captured step again, on the same buffers."""

    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        """The buffer's content as a host array (no copy on the host device), after everything launched before."""

    def synchronize(self) -> None:
        """Waits for everything launched so far."""


def host_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype for a manifest's name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)
