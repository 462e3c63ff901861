"""Does a float16 graph overflow? Runs it in float32 on a sample prompt and looks at what every product and sum reaches.

The float16 graph itself is run, with its weights widened node by node, so nothing is stored twice and no second
description of the model exists.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from specbuild.model.blocks import EngineDescription
from specrun import contract
from specrun.errors import CompileError

LARGEST = 65504.0
_PROBED = ("MatMul", "Gemm", "Add", "Mul", "Attention")
_RANGES = "ranges"


def check(stored: ir.Model, growing: ir.Model, directory: Path, engine: EngineDescription) -> None:
    """Raises CompileError when a node exceeds float16's range over ``engine.sample``.

    ``stored`` is the float16 model whose weights file lies in ``directory``; ``growing`` the same engine with a cache
    of any capacity, so that the check needs a small one. ``growing`` is changed.
    """
    for name, value in growing.graph.initializers.items():
        tensor = stored.graph.initializers[name].const_value if name in stored.graph.initializers else None
        if isinstance(tensor, ir.ExternalTensor) and tensor.dtype == ir.DataType.FLOAT16:
            value.const_value = tensor
    nodes = _widen(growing.graph)
    path = directory / f"{engine.name}.wide.onnx"
    ir.save(growing, path)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # folding casts would double memory
    session = ort.InferenceSession(str(path), options)
    ranges = session.run([_RANGES], _feed(session, engine))[0]
    path.unlink()
    worst = np.flatnonzero(~(ranges <= LARGEST))
    if worst.size:
        first = int(worst[0])
        raise CompileError(
            f"Engine {engine.name!r}: in float16 this model overflows: node {nodes[first]} reaches {ranges[first]:.4g} "
            "on a sample text, above 65504, so its logits would be NaN. Compile it in bfloat16: add the variant bf16, "
            "as in --target tensorrt-rtx:bf16."
        )


def _widen(graph: ir.Graph) -> list[str]:
    """Turns a float16 graph into one that computes in float32 and has an output RANGES, float32 [nodes]: the largest
    magnitude of every probed node. Returns their names."""
    wide: dict[ir.Value, ir.Value] = {}
    for tensor in [*graph.inputs, *graph.outputs]:
        if tensor.dtype == ir.DataType.FLOAT16:
            tensor.dtype = ir.DataType.FLOAT
    for node in list(graph):
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT16:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
        for index, value in enumerate(node.inputs):
            if value is None or not value.is_initializer() or value.dtype != ir.DataType.FLOAT16:
                continue
            if value not in wide:
                cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)})
                graph.insert_before(node, cast)
                wide[value] = cast.outputs[0]
            node.replace_input_with(index, wide[value])
    return _probe(graph)


def _probe(graph: ir.Graph) -> list[str]:
    probed = [node for node in graph if node.op_type in _PROBED and _is_float(node)]
    maxima = []
    for node in probed:
        absolute = ir.node("Abs", [node.outputs[0]])
        largest = ir.node("ReduceMax", absolute.outputs, {"keepdims": 0})
        flat = ir.node("Unsqueeze", [largest.outputs[0], _axis(graph)])
        graph.extend([absolute, largest, flat])
        maxima.append(flat.outputs[0])
    joined = ir.node("Concat", maxima, {"axis": 0})
    graph.append(joined)
    output = joined.outputs[0]
    output.name, output.type = _RANGES, ir.TensorType(ir.DataType.FLOAT)
    graph.outputs.append(output)
    return [str(node.name) for node in probed]


def _is_float(node: ir.Node) -> bool:
    """Integer arithmetic happens in the scope that derives the mask, and only there."""
    return not str(node.name).startswith("step.")


def _axis(graph: ir.Graph) -> ir.Value:
    name = "ranges.axis"
    if name not in graph.initializers:
        tensor = ir.tensor([0], dtype=ir.DataType.INT64, name=name)
        graph.register_initializer(ir.Value(name=name, const_value=tensor))
    return graph.initializers[name]


def _feed(session: ort.InferenceSession, engine: EngineDescription) -> dict[str, np.ndarray]:
    nodes = len(engine.sample)
    feed = {
        contract.TOKENS: np.array([engine.sample], dtype=np.int64),
        contract.POSITIONS: np.arange(nodes)[None],
        contract.CONTEXT_LENGTHS: np.zeros(1, dtype=np.int64),
        contract.TREE_MASK: np.tri(nodes, dtype=np.bool_)[None],
        contract.LOGIT_ROWS: np.array([[nodes - 1]]),
    }
    for tensor in session.get_inputs():
        if tensor.name not in feed:
            shape = [1, *(nodes if isinstance(size, str) else size for size in tensor.shape[1:])]
            feed[tensor.name] = np.zeros(shape, dtype=np.float32)
    return feed
