"""The tensorrt-rtx target: TensorRT for RTX, built ahead of time for named compute capabilities, also without a GPU."""

from __future__ import annotations

from typing import Any

from specbuild.model.lowering_portable import PortableLowering
from specbuild.targets.tensorrt_family import TensorRTTarget, precision_of, refuse_quantization
from specrun.errors import CompileError

DEFAULT = ("sm80", "sm86", "sm89", "sm120")  # one engine for all of them shares the weights


def open_target(
    variants: tuple[str, ...], quantize: str | None, dtype: str, max_length: int, quantize_drafters: str | None = None
) -> TensorRTTarget:
    try:
        import tensorrt_rtx as trt
    except ImportError:
        raise CompileError(
            "Target tensorrt-rtx: the Python package tensorrt_rtx is not installed. Run "
            "`pip install 'specbuild[tensorrt-rtx]'` (Linux or Windows; it builds engines without a GPU too)."
        ) from None
    refuse_quantization("tensorrt-rtx", quantize, quantize_drafters)
    precision, capabilities = precision_of(variants, dtype)
    known = [name for name in dir(trt.ComputeCapability) if name.startswith("SM")]
    for capability in capabilities:
        if capability.upper() not in known:
            raise CompileError(
                f"Target tensorrt-rtx: {capability!r} is neither a compute capability that TensorRT for RTX "
                f"{trt.__version__} builds for ({', '.join(name.lower() for name in known)}) nor fp16 or bf16."
            )
    return TensorRTTarget(Rtx(trt, capabilities or DEFAULT), precision, max_length)


class Rtx:
    name = "tensorrt-rtx"

    def __init__(self, trt: Any, capabilities: tuple[str, ...]) -> None:
        self.trt = trt
        self.capabilities = tuple(dict.fromkeys(name.upper() for name in capabilities))
        self.architectures = tuple(name.lower().replace("sm", "sm_") for name in self.capabilities)

    def lowering(self, capacity: int) -> PortableLowering:
        return PortableLowering(capacity)

    def network_flags(self) -> int:
        return 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def configure(self, config: Any) -> None:
        config.num_compute_capabilities = len(self.capabilities)
        for i, name in enumerate(self.capabilities):
            config.set_compute_capability(getattr(self.trt.ComputeCapability, name), i)
        # Buffers come from the runtime, so that a step can be captured in a CUDA graph.
        config.set_flag(self.trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
