"""The tensorrt target: the full TensorRT, which builds for the GPU it runs on."""

from __future__ import annotations

from typing import Any

from specbuild.model.lowering_portable import PortableLowering
from specbuild.targets.tensorrt_family import TensorRTTarget, precision_of
from specrun.errors import CompileError


def open_target(variants: tuple[str, ...], quantize: str | None, dtype: str, max_length: int) -> TensorRTTarget:
    try:
        import tensorrt as trt
    except ImportError:
        raise CompileError(
            "Target tensorrt: the Python package tensorrt is not installed. On a machine with an NVIDIA data-centre "
            "GPU run `pip install 'specbuild[tensorrt]'` (it fetches its libraries from NVIDIA's own package index), "
            "or choose --target tensorrt-rtx, which builds anywhere."
        ) from None
    if quantize is not None:
        raise CompileError(f"Quantization {quantize!r}: not offered for target tensorrt, only for cpu. Leave it out.")
    precision, others = precision_of(variants, dtype)
    if others:
        raise CompileError(
            f"Target tensorrt: variant {others[0]!r} is unknown. It takes fp16 or bf16 and builds for this GPU."
        )
    return TensorRTTarget(Full(trt), precision, max_length)


class Full:
    name = "tensorrt"

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.architectures: tuple[str, ...] = (_architecture(),)

    def lowering(self, capacity: int) -> PortableLowering:
        return PortableLowering(capacity)

    def configure(self, config: Any) -> None:
        config.profiling_verbosity = self.trt.ProfilingVerbosity.DETAILED


def _architecture() -> str:
    """sm_XY of the GPU that TensorRT will build for. Raises CompileError where there is none."""
    try:
        from cuda.core import Device

        device = Device(0)
        device.set_current()
        capability = device.compute_capability
    except Exception as error:  # cuda-python raises ImportError, RuntimeError or its own CUDAError
        raise CompileError(
            f"Target tensorrt: no usable NVIDIA GPU here ({error}), and TensorRT builds only for the GPU it runs on. "
            "Compile on the machine that will serve, or choose --target tensorrt-rtx, which builds anywhere."
        ) from error
    return f"sm_{capability.major}{capability.minor}"
