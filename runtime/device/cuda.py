"""CudaDevice: device buffers, stored kernels and CUDA graphs through cuda-python alone (no Triton, no torch).

Kernels are the binaries that were compiled with the bundle (`specrun.plugins.store`). A launch checks the tensors'
types and shapes against the stored record, reads all sizes off the shapes, and passes pointers and int32 sizes.
cuda-python is imported when a CudaDevice is made, so that this module can be imported anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.device import Enqueueable
from specrun.errors import BundleError, CaptureError
from specrun.plugins.errors import ContractError
from specrun.plugins.launch import POINTER_TYPES, Launch

Array = npt.NDArray[Any]


class DeviceArray:
    """A contiguous array in device memory. ``owner`` keeps the allocation alive; ``address`` is its first element's."""

    def __init__(self, owner: Any, address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.owner = owner
        self.address = address
        self.shape = shape
        self.dtype = np.dtype(dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: int) -> DeviceArray:
        """The ``index``-th part along the first dimension, in the same memory; for instance one layer of a cache."""
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"index {index} of an array of {self.shape[0]}")
        step = self.nbytes // self.shape[0]
        return DeviceArray(self.owner, self.address + index * step, self.shape[1:], self.dtype)


class CudaStep:
    """A captured step: an executable graph, and the buffers that it reads and writes."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.operands: list[Any] = []


class CudaDevice:
    """One GPU and one stream. ``kernels`` are stored kernels: those built for this GPU's architecture are loaded."""

    name = "cuda"

    def __init__(self, kernels: Iterable[tuple[Launch, bytes]] = (), ordinal: int = 0) -> None:
        self._core: Any = import_module("cuda.core")
        self._driver: Any = import_module("cuda.bindings.driver")
        self._device = self._core.Device(ordinal)
        self._device.set_current()
        self._stream = self._device.create_stream()
        self._builder: Any = None
        self._step: CudaStep | None = None
        major, minor = self._device.compute_capability
        self.architecture = 10 * int(major) + int(minor)
        self._kernels = self._load(kernels)

    @property
    def processors(self) -> int:
        """Streaming multiprocessors: what split counts are chosen for."""
        return int(self._device.properties.multiprocessor_count)

    @property
    def stream_handle(self) -> int:
        """The stream that everything runs on, for engines that enqueue themselves."""
        return int(self._stream.handle)

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        self._refuse("allocate a buffer")
        kind = np.dtype(dtype)
        buffer = self._device.allocate(max(prod(shape) * kind.itemsize, 1), stream=self._stream)
        buffer.fill(0, stream=self._stream)
        return DeviceArray(buffer, int(buffer.handle), tuple(shape), kind)

    def view(self, buffer: DeviceArray, start: int, shape: tuple[int, ...]) -> DeviceArray:
        return DeviceArray(buffer.owner, buffer.address + start * buffer.dtype.itemsize, tuple(shape), buffer.dtype)

    def copy(self, destination: DeviceArray, source: DeviceArray | Array) -> None:
        """Copy between buffers, or from host memory (not while capturing: a replay would read that memory again)."""
        if destination.shape != tuple(source.shape) or destination.dtype != source.dtype:
            raise CaptureError(
                f"copy: destination is {destination.dtype}{list(destination.shape)}, "
                f"source is {source.dtype}{list(source.shape)}; they must be equal"
            )
        if isinstance(source, DeviceArray):
            self._keep(destination, source)
            self._call("cuMemcpyDtoDAsync", destination.address, source.address, destination.nbytes, self.stream_handle)
            return
        self._refuse("copy from host memory")
        host = np.ascontiguousarray(source)
        self._call("cuMemcpyHtoDAsync", destination.address, host.ctypes.data, host.nbytes, self.stream_handle)
        self.synchronize()  # ``host`` may be a temporary

    def launch(self, kernel: str, *arguments: Any) -> None:
        """Run a stored kernel on its inputs, then its outputs, all DeviceArrays; sizes come from their shapes.

        ``kernel`` is an op's name (the stored variant that fits the arguments is run) or one variant's own.
        """
        record, entry, sizes = self._variant(kernel, arguments)
        grid = record.grid_for(sizes)
        if 0 in grid:
            return
        tensors = iter(arguments)
        values = [next(tensors).address if p.pointer else np.int32(sizes[p.name]) for p in record.parameters]
        config = self._core.LaunchConfig(grid=grid, block=record.threads, shmem_size=record.shared_bytes)
        self._keep(*arguments)
        self._core.launch(self._builder or self._stream, config, entry, *values)

    def enqueue(self, engine: Enqueueable) -> None:
        self._keep(engine)
        engine.enqueue()

    @contextmanager
    def capture(self) -> Iterator[CudaStep]:
        self._refuse("capture another step")
        self._step, self._builder = CudaStep(), self._stream.create_graph_builder()
        try:
            self._builder.begin_building(mode="thread_local")
            yield self._step
            self._step.graph = self._builder.end_building().complete()
        finally:
            self._builder.close()
            self._step, self._builder = None, None

    def replay(self, step: CudaStep) -> None:
        self._refuse("replay a step")
        step.graph.launch(self._stream)

    def read(self, buffer: DeviceArray) -> Array:
        self._refuse("read a buffer on the host")
        host = np.empty(buffer.shape, buffer.dtype)
        self._call("cuMemcpyDtoHAsync", host.ctypes.data, buffer.address, host.nbytes, self.stream_handle)
        self.synchronize()
        return host

    def synchronize(self) -> None:
        self._refuse("synchronize")
        self._stream.sync()

    def _load(self, kernels: Iterable[tuple[Launch, bytes]]) -> dict[str, list[tuple[Launch, Any]]]:
        """This GPU's kernels by their own names and by their ops'."""
        loaded: dict[str, list[tuple[Launch, Any]]] = {}
        limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for record, cubin in kernels:
            if record.architecture == self.architecture:
                entry = self._core.ObjectCode.from_cubin(cubin).get_kernel(record.entry)
                self._call("cuKernelSetAttribute", limit, record.shared_bytes, entry.handle, self._device.device_id)
                for name in (record.kernel, record.kernel.partition(".")[0]):
                    loaded.setdefault(name, []).append((record, entry))
        return loaded

    def _variant(self, name: str, arguments: tuple[Any, ...]) -> tuple[Launch, Any, dict[str, int]]:
        """The stored kernel of that name that takes these arguments, and all sizes."""
        refusals = []
        for record, entry in self._kernels.get(name, ()):
            try:
                sizes = record.sizes_for([argument.shape for argument in arguments])
                _check_types(record, arguments)
            except ContractError as refusal:
                refusals.append(refusal)
            else:
                return record, entry, sizes
        if not refusals:
            known = ", ".join(sorted({record.kernel for stored in self._kernels.values() for record, _ in stored}))
            raise BundleError(
                f"kernel '{name}' is not in the bundle for sm_{self.architecture}, this GPU's architecture; "
                f"kernels for it: {known or 'none'}. Compile the bundle for sm_{self.architecture}"
            )
        if len(refusals) == 1:
            raise refusals[0]
        found = ", ".join(f"{argument.dtype}{list(argument.shape)}" for argument in arguments)
        raise ContractError(name, "arguments", found, " | ".join(map(str, refusals)))

    def _call(self, function: str, *arguments: Any) -> None:
        (status,) = getattr(self._driver, function)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function} failed: {status.name}")

    def _keep(self, *operands: Any) -> None:
        if self._step is not None:
            self._step.operands.extend(operands)

    def _refuse(self, what: str) -> None:
        if self._step is not None:
            raise CaptureError(f"CudaDevice: a captured step tried to {what}; a CUDA graph can't. Do it before capture")


def _check_types(record: Launch, arguments: tuple[Any, ...]) -> None:
    pointers = (p for p in record.parameters if p.pointer)
    for parameter, argument in zip(pointers, arguments, strict=True):
        if POINTER_TYPES.get(str(argument.dtype)) != parameter.type:
            wanted = next(name for name, kind in POINTER_TYPES.items() if kind == parameter.type)
            raise ContractError(record.kernel, parameter.name, f"dtype {argument.dtype}", wanted)
