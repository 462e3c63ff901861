"""HostDevice: numpy buffers, numpy kernels, and the discipline of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.device import Enqueueable
from specrun.errors import CaptureError
from specrun.plugins.commit_rows.reference import commit_rows_in_place

Array = npt.NDArray[Any]
Kernel = Callable[..., None]


class HostStep:
    """The calls of a captured step, each with the buffers it was captured with."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []


class HostDevice:
    """Runs on the CPU. ``kernels`` maps a name to a numpy function that writes into the buffers it is given."""

    name = "host"

    def __init__(self, kernels: Mapping[str, Kernel] | None = None) -> None:
        self._kernels = dict(kernels if kernels is not None else default_kernels())
        self._capturing: HostStep | None = None

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        self._refuse("allocate a buffer")
        return np.zeros(shape, dtype=dtype)

    def view(self, buffer: Array, start: int, shape: tuple[int, ...]) -> Array:
        return buffer.reshape(-1)[start : start + prod(shape)].reshape(shape)

    def copy(self, destination: Array, source: Array) -> None:
        if destination.shape != source.shape or destination.dtype != source.dtype:
            raise CaptureError(
                f"copy: destination is {destination.dtype}{list(destination.shape)}, "
                f"source is {source.dtype}{list(source.shape)}; they must be equal"
            )
        self._run(lambda: np.copyto(destination, source))

    def launch(self, kernel: str, *arguments: Any) -> None:
        function = self._kernels[kernel]
        self._run(lambda: function(*arguments))

    def enqueue(self, engine: Enqueueable) -> None:
        self._run(engine.enqueue)

    @contextmanager
    def capture(self) -> Iterator[HostStep]:
        self._refuse("capture another step")
        self._capturing = HostStep()
        try:
            yield self._capturing
        finally:
            self._capturing = None

    def replay(self, step: HostStep) -> None:
        self._refuse("replay a step")
        for call in step.calls:
            call()

    def read(self, buffer: Array) -> Array:
        self._refuse("read a buffer on the host")
        return buffer

    def synchronize(self) -> None:
        self._refuse("synchronize")

    def _run(self, call: Callable[[], None]) -> None:
        """Records while capturing, as a CUDA graph does, and runs otherwise."""
        if self._capturing is not None:
            self._capturing.calls.append(call)
        else:
            call()

    def _refuse(self, what: str) -> None:
        if self._capturing is not None:
            raise CaptureError(f"HostDevice: a captured step tried to {what}; CUDA graphs cannot. Do it before capture")


def default_kernels() -> dict[str, Kernel]:
    """The host twins of the ops that the runtime launches by name."""
    return {"commit_rows": _commit_rows}


def _commit_rows(caches: Array, lengths: Array, path: Array, counts: Array, committed: Array, new: Array) -> None:
    """``committed`` is ``caches`` itself: the op works in place."""
    new[:] = commit_rows_in_place(caches, lengths, path, counts)
