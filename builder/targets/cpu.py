"""The cpu target: the portable graph as ONNX Runtime opens it, float32 or blocked integers, cache of any capacity."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

from specbuild.model.blocks import Blocks, EngineDescription
from specbuild.model.graph import GraphBuilder
from specbuild.model.lowering_opset23 import Opset23Lowering
from specbuild.model.lowering_portable import PortableLowering
from specbuild.model.numerics import Blocked, Dense, DraftWeights, Numerics
from specbuild.progress import Progress
from specbuild.targets.onnx_files import WeightStore, save_model, weight_bytes
from specrun.bundle import CacheShape, EngineRecord, Limits
from specrun.errors import CompileError

DRAFT_BITS = 8  # measured on the demo model: as fast as 4, and it accepts more
OPSET_24 = (1, 24)  # the first ONNX Runtime that opens it


def open_target(
    variants: tuple[str, ...], quantize: str | None, dtype: str, max_length: int, quantize_drafters: str | None = None
) -> CpuTarget:
    if variants:
        raise CompileError(f"Target cpu: found variant {variants[0]!r}; one engine serves every CPU. Say just `cpu`.")
    numerics: dict[str | None, Numerics] = {
        None: Dense("fp32", ir.DataType.FLOAT),
        "int4": Blocked(4),
        "int8": Blocked(8),
    }
    if quantize not in numerics:
        known = ", ".join(str(name) for name in numerics if name)
        raise CompileError(
            f"Quantization {quantize!r}: unknown for target cpu. Choose one of {known}, or leave it out."
        )
    target = numerics[quantize]
    choices: dict[str | None, Numerics] = {
        None: DraftWeights(target, DRAFT_BITS),
        "none": target,
        "int4": DraftWeights(target, 4),
        "int8": DraftWeights(target, 8),
    }
    if quantize_drafters not in choices:
        known = ", ".join(str(name) for name in choices if name)
        raise CompileError(f"Drafters' quantization {quantize_drafters!r}: unknown. Choose one of {known}.")
    return CpuTarget(target, choices[quantize_drafters])


class CpuTarget:
    """``numerics`` says how weights are stored and multiplied, ``drafters`` the same for engines that only draft (None:
    alike). Engines of one bundle share the weights they have in common: the target compiles into one directory only."""

    name = "cpu"

    def __init__(self, numerics: Numerics, drafters: Numerics | None = None, store: WeightStore | None = None) -> None:
        self.numerics = numerics
        self._store = store or WeightStore()
        self.drafting = CpuTarget(drafters, store=self._store) if drafters else self

    def compile(self, engine: EngineDescription, directory: Path, limits: Limits, progress: Progress) -> EngineRecord:
        lowering = _lowering(ort.__version__)
        graph = GraphBuilder(engine.name, self.numerics.dtype, lowering.opset)
        engine.emit(Blocks(graph, self.numerics, lowering))
        model = graph.build()
        self._store.adopt(graph, model)
        files = save_model(model, directory, engine.name, progress.start(f"{engine.name} (cpu)", weight_bytes(model)))
        self._store.remember(graph, model)
        return EngineRecord(
            name=engine.name,
            kind=engine.kind,
            target=self.name,
            precision=self.numerics.name,
            compiler=f"onnxruntime {ort.__version__}",
            files=files,
            vocab_size=engine.vocab_size,
            hidden_size=engine.hidden_size,
            min_rows=self.numerics.min_rows,
            cache=cache_shape(engine, "float32", None),
            taps=engine.taps,
            hidden_in=engine.hidden_in,
            heads=engine.heads,
            scratch=engine.scratch,
        )


def _lowering(version: str) -> PortableLowering:
    """The lowering that this ONNX Runtime can open."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return PortableLowering() if (major, minor) >= OPSET_24 else Opset23Lowering()


def cache_shape(engine: EngineDescription, dtype: str, capacity: int | None) -> CacheShape | None:
    """The manifest's description of the engine's cache."""
    if engine.config is None:
        return None
    return CacheShape(engine.cache_layers, engine.config.num_kv_heads, engine.config.head_dim, dtype, capacity)
