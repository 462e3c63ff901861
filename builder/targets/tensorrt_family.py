"""What the two TensorRT flavours share: from an engine description to a serialized engine and its layer list.

The graph is written to disk, parsed, and built for the shapes that the bundle's limits allow; only the engine stays.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from specbuild.model.blocks import Blocks, EngineDescription
from specbuild.model.graph import GraphBuilder
from specbuild.model.lowering import Lowering
from specbuild.model.lowering_portable import PortableLowering
from specbuild.model.numerics import Dense
from specbuild.progress import Progress
from specbuild.targets import overflow
from specbuild.targets.cpu import cache_shape
from specbuild.targets.onnx_files import save_model, weight_bytes
from specrun.backends.ort import usable_cores
from specrun.bundle import EngineRecord, Limits
from specrun.errors import CompileError

PRECISIONS = {
    "fp16": (ir.DataType.FLOAT16, "float16"),
    "bf16": (ir.DataType.BFLOAT16, "bfloat16"),
}


class Flavour(Protocol):
    """What differs between the packages. ``trt`` is the imported module."""

    name: str
    trt: Any
    architectures: tuple[str, ...]

    def lowering(self, capacity: int) -> Lowering:
        """How attention is written for this flavour."""

    def configure(self, config: Any) -> None:
        """Sets what the builder's configuration needs beyond shapes."""

    def network_flags(self) -> int:
        """Bits of ``trt.NetworkDefinitionCreationFlag``."""


def precision_of(variants: Sequence[str], dtype: str) -> tuple[str, tuple[str, ...]]:
    """The precision and the other variants of ``--target NAME:variant,...``.

    bf16 where the checkpoint is bfloat16, else fp16, unless a variant says which.
    """
    named = [v for v in variants if v in PRECISIONS]
    if len(named) > 1:
        raise CompileError(f"Target variants {named}: name one precision.")
    chosen = named[0] if named else "bf16" if dtype == "bfloat16" else "fp16"
    return chosen, tuple(v for v in variants if v not in PRECISIONS)


def refuse_quantization(target: str, *asked: str | None) -> None:
    """Raises CompileError unless every one of ``asked`` leaves the weights as they are."""
    for quantize in asked:
        if quantize not in (None, "none"):
            raise CompileError(
                f"Quantization {quantize!r}: not offered for target {target}, only for cpu. Leave it out."
            )


class TensorRTTarget:
    """A flavour at one precision. ``max_length``: tokens of a sequence; the cache has room for a pass beyond them."""

    def __init__(self, flavour: Flavour, precision: str, max_length: int) -> None:
        self.flavour, self.precision, self.max_length = flavour, precision, max_length
        self.name, self.drafting = flavour.name, self
        self.dtype, self.cache_dtype = PRECISIONS[precision]

    def compile(self, engine: EngineDescription, directory: Path, limits: Limits, progress: Progress) -> EngineRecord:
        capacity = self.max_length + max(limits.max_nodes, limits.prefill_chunk)
        model = self._graph(engine, self.flavour.lowering(capacity))
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            report = progress.start(f"{engine.name}: graph", weight_bytes(model))
            files = save_model(model, Path(scratch), engine.name, report)
            if self.precision == "fp16" and engine.sample:
                overflow.check(model, self._graph(engine, PortableLowering()), Path(scratch), engine)
            stem = f"{engine.name}.{self.name}"
            layers = self._build(Path(scratch) / files[0], directory / f"{stem}.engine", limits, progress, engine.name)
        (directory / f"{stem}.layers.json").write_text(json.dumps(layers, indent=1) + "\n", encoding="utf-8")
        return EngineRecord(
            name=engine.name,
            kind=engine.kind,
            target=self.name,
            precision=self.precision,
            compiler=f"{self.flavour.trt.__name__} {self.flavour.trt.__version__}",
            files=(f"{stem}.engine", f"{stem}.layers.json"),
            vocab_size=engine.vocab_size,
            hidden_size=engine.hidden_size,
            architectures=self.flavour.architectures,
            cache=cache_shape(engine, self.cache_dtype, capacity),
            taps=engine.taps,
            hidden_in=engine.hidden_in,
            heads=engine.heads,
            scratch=engine.scratch,
        )

    def _graph(self, engine: EngineDescription, lowering: Lowering) -> ir.Model:
        graph = GraphBuilder(engine.name, self.dtype)
        engine.emit(Blocks(graph, Dense(self.precision, self.dtype), lowering))
        return graph.build()

    def _build(self, onnx: Path, engine: Path, limits: Limits, progress: Progress, name: str) -> dict[str, Any]:
        """Builds ``onnx`` into the file ``engine`` and returns the network's layers."""
        trt = self.flavour.trt
        logger = _logger(trt)
        builder = trt.Builder(logger)
        builder.max_threads = usable_cores()
        network = builder.create_network(self.flavour.network_flags())
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(onnx)):
            errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
            raise CompileError(f"Engine {name!r}: {trt.__name__} {trt.__version__} cannot read its graph ({errors}).")
        config = builder.create_builder_config()
        self.flavour.configure(config)
        config.add_optimization_profile(_profile(builder, network, limits))
        config.progress_monitor = monitor = _monitor(trt, progress, f"{name}: {self.name}")
        with engine.open("wb") as stream:
            done = builder.build_serialized_network_to_stream(network, config, _writer(trt, stream.write))
        if not done:
            reason = "; ".join(logger.errors) or "no reason given"
            raise CompileError(f"Engine {name!r}: {trt.__name__} {trt.__version__} could not build it ({reason}).")
        monitor.close()
        return _layers(network)


def _profile(builder: Any, network: Any, limits: Limits) -> Any:
    """One optimization profile: 1 to the limits, tuned for a verify pass of one sequence."""
    profile = builder.create_optimization_profile()
    nodes = max(limits.max_nodes, limits.prefill_chunk)
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        fixed = tuple(tensor.shape)
        shapes = [_shape(tensor.name, fixed, *point) for point in ((1, 1), (1, 8), (limits.max_batch, nodes))]
        profile.set_shape(tensor.name, *shapes)
    return profile


def _shape(name: str, fixed: tuple[int, ...], batch: int, nodes: int) -> tuple[int, ...]:
    """A tensor's shape with its dynamic dimensions (-1) filled in: the first is B, the others N or M."""
    return (batch, *(nodes if size < 0 else size for size in fixed[1:]))


def _layers(network: Any) -> dict[str, Any]:
    """What the parser made of the graph: how many layers of each type, and every layer as "TYPE name"."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    counts = Counter(layer.type.name for layer in layers)
    return {"counts": dict(sorted(counts.items())), "layers": [f"{x.type.name} {x.name}" for x in layers]}


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps errors for the message of the exception, and is silent otherwise."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

    return Logger()


def _writer(trt: Any, write: Callable[[bytes], int]) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            return write(data)

    return Writer()


def _monitor(trt: Any, progress: Progress, task: str) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Shows the outermost phase. Called from the builder's threads."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.report: Callable[[int], None] | None = None
            self.phase, self.left = "", 0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None and self.report is None:
                self.phase, self.left = phase_name, num_steps
                self.report = progress.start(task, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name == self.phase and self.report is not None and self.left > 0:
                self.report(1)
                self.left -= 1
            return True

        def phase_finish(self, phase_name: str) -> None:
            pass

        def close(self) -> None:
            if self.report is not None:
                self.report(self.left)

    return Monitor()
