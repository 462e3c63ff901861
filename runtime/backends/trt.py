"""TensorRT and TensorRT for RTX: engines built ahead of time, run on an NVIDIA GPU.

The two packages differ in name and in plugins; what is used here they share. Contexts take their scratch memory from
one buffer, since passes follow each other on one stream.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from specrun.bundle import Bundle, EngineRecord
from specrun.device import Buffer, Device
from specrun.errors import BundleError
from specrun.plugins.store import KernelStore

KERNEL_FOLDER = "kernels"  # of the bundle; its keys are in the manifest
PACKAGES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def open_device(bundle: Bundle) -> Device:
    """The first CUDA device, with the bundle's kernels. Raises BundleError where there is no driver or no GPU."""
    try:
        from cuda.core import system

        count = int(system.get_num_devices())
    except Exception as error:  # cuda-python is absent, or found no driver: each has types of its own
        raise BundleError(
            f"{bundle.path}: its engines need an NVIDIA GPU and the packages of the extra 'cuda' ({error}). "
            "Install a driver and pip install 'specbuild[cuda]', or compile the bundle with --target cpu."
        ) from None
    if count == 0:
        raise BundleError(f"{bundle.path}: its engines need an NVIDIA GPU, none is here. Compile with --target cpu.")
    from specrun.device.cuda import CudaDevice

    store = KernelStore(bundle.path / KERNEL_FOLDER)
    return CudaDevice(store.get(key) for key in bundle.manifest.kernels.get("keys", ()))


def open_session(bundle: Bundle, record: EngineRecord, device: Any, threads: int | None) -> TrtSession:
    """Checks versions and architectures by name before the library sees a byte of the engine."""
    trt = _package(record)
    check_compiler(record, trt.__version__)
    check_architecture(record, f"sm_{device.architecture}")
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(bundle.file(record.files[0]).read_bytes())
    if engine is None:
        raise BundleError(
            f"Engine {record.name!r}: {record.compiler} wrote it, {PACKAGES[record.target]} {trt.__version__} cannot "
            "load it here. Compile the bundle again on this machine."
        )
    return TrtSession(trt, runtime, engine, device)


def check_compiler(record: EngineRecord, version: str) -> None:
    """An engine runs with the very version that built it. Raises BundleError naming both."""
    written = record.compiler.rpartition(" ")[2]
    if written != version:
        raise BundleError(
            f"Engine {record.name!r}: built by {record.target} {written}, installed is {record.target} {version}; "
            f"engines are tied to their version. Install {written}, or compile the bundle again."
        )


def check_architecture(record: EngineRecord, architecture: str) -> None:
    """``architecture``: the GPU's, for example "sm_89". Raises BundleError naming both."""
    if record.architectures and architecture not in record.architectures:
        raise BundleError(
            f"Engine {record.name!r}: compiled for {', '.join(record.architectures)}, this GPU is {architecture}. "
            f"Compile with --target {record.target}:{architecture.replace('_', '')}."
        )


def _package(record: EngineRecord) -> Any:
    name = PACKAGES[record.target]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BundleError(
            f"Engine {record.name!r}: needs the Python package {name} ({error}). "
            f"Install it with: pip install 'specbuild[{record.target},cuda]'"
        ) from None


class TrtSession:
    """A deserialized engine. Every binding has a context of its own, so that captured graphs keep their addresses."""

    def __init__(self, trt: Any, runtime: Any, engine: Any, device: Any) -> None:
        self._trt, self._runtime, self._engine, self._device = trt, runtime, engine, device
        size = max(1, int(engine.device_memory_size_v2))
        self._scratch = device.allocate((size,), "uint8")

    def bind(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> BoundTrt:
        context = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        context.set_device_memory(self._scratch.address, self._scratch.nbytes)
        for name, buffer in inputs.items():
            self._check(context.set_input_shape(name, tuple(buffer.shape)), name, buffer)
        for name, buffer in (*inputs.items(), *outputs.items()):
            self._check(context.set_tensor_address(name, buffer.address), name, buffer)
        return BoundTrt(context, self._device.stream_handle, (inputs, outputs))

    def _check(self, accepted: bool, name: str, buffer: Buffer) -> None:
        if not accepted:
            raise BundleError(
                f"Tensor {name!r}: the engine does not take shape {list(buffer.shape)}; it was compiled for smaller "
                "ones. Compile the bundle again with larger limits."
            )


class BoundTrt:
    """A context whose tensors have their addresses. Holds the buffers: the context knows only their addresses."""

    def __init__(self, context: Any, stream: int, buffers: Any) -> None:
        self._context, self._stream, self._buffers = context, stream, buffers

    def enqueue(self) -> None:
        if not self._context.execute_async_v3(self._stream):
            raise RuntimeError("TensorRT refused to enqueue the pass; its log says why")
