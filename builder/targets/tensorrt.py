"""The tensorrt target: the full TensorRT, which builds for the GPU it runs on, with the project's attention plugins.

Their kernels are compiled ahead of time and lie in the engine.
"""

from __future__ import annotations

from typing import Any

from specbuild.model.lowering_plugin import PluginLowering
from specbuild.targets.tensorrt_family import TensorRTTarget, precision_of, refuse_quantization
from specrun.errors import CompileError


def open_target(
    variants: tuple[str, ...], quantize: str | None, dtype: str, max_length: int, quantize_drafters: str | None = None
) -> TensorRTTarget:
    try:
        import tensorrt as trt
    except ImportError:
        raise CompileError(
            "Target tensorrt: the Python package tensorrt is not installed. On a machine with an NVIDIA data-centre "
            "GPU run `pip install 'specbuild[tensorrt]'` (it fetches its libraries from NVIDIA's own package index), "
            "or choose --target tensorrt-rtx, which builds anywhere."
        ) from None
    refuse_quantization("tensorrt", quantize, quantize_drafters)
    precision, others = precision_of(variants, dtype)
    if others:
        raise CompileError(
            f"Target tensorrt: variant {others[0]!r} is unknown. It takes fp16 or bf16 and builds for this GPU."
        )
    flavour = Full(trt)
    _register_plugins()
    return TensorRTTarget(flavour, precision, max_length)


class Full:
    name = "tensorrt"

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        architecture, self._processors = _gpu()
        self.architectures: tuple[str, ...] = (architecture,)

    def lowering(self, capacity: int) -> PluginLowering:
        return PluginLowering(capacity, self.architectures[0], self._processors)

    def network_flags(self) -> int:
        flags = self.trt.NetworkDefinitionCreationFlag
        return 1 << int(flags.STRONGLY_TYPED) | 1 << int(flags.PREFER_AOT_PYTHON_PLUGINS)

    def configure(self, config: Any) -> None:
        config.profiling_verbosity = self.trt.ProfilingVerbosity.DETAILED


def _register_plugins() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        raise CompileError(
            "Target tensorrt: the Python package triton is not installed; the attention plugins' kernels are compiled "
            "with it. Run `pip install 'specbuild[kernels]'`."
        ) from None
    from specrun.plugins.registry import register_all

    register_all()


def _gpu() -> tuple[str, int]:
    """sm_XY and the number of multiprocessors of the GPU that TensorRT will build for. Raises CompileError."""
    try:
        from cuda.core import Device

        device = Device(0)
        device.set_current()
        capability, processors = device.compute_capability, device.properties.multiprocessor_count
    except Exception as error:  # cuda-python raises ImportError, RuntimeError or its own CUDAError
        raise CompileError(
            f"Target tensorrt: no usable NVIDIA GPU here ({error}), and TensorRT builds only for the GPU it runs on. "
            "Compile on the machine that will serve, or choose --target tensorrt-rtx, which builds anywhere."
        ) from error
    return f"sm_{capability.major}{capability.minor}", int(processors)
