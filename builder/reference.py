"""Reference: the portable graph, unfused and in float32, run without cache or tree. What ``specbuild check`` trusts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from specbuild.checkpoint import Checkpoint
from specbuild.model.decoder import DecoderSpec
from specbuild.model.quantize import dequantize
from specbuild.progress import Silent
from specbuild.targets.cpu import open_target
from specbuild.targets.onnx_files import save_model
from specrun import contract
from specrun.bundle import Bundle, EngineRecord, Limits


@dataclass(frozen=True)
class Prefill:
    """``logits`` float32 [N, V]; ``hidden`` float32 [N, k * H] or None."""

    logits: np.ndarray
    hidden: np.ndarray | None


class Reference:
    """Runs one graph file; every call starts from an empty cache."""

    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = ort.InferenceSession(str(path), options)
        self._outputs = [output.name for output in self._session.get_outputs()]

    def prefill(self, tokens: Sequence[int], features: Sequence[np.ndarray] = ()) -> Prefill:
        """Logits and features of every token of one sequence."""
        count = len(tokens)
        feed = {
            contract.TOKENS: np.array([tokens], dtype=np.int64),
            contract.POSITIONS: np.arange(count)[None],
            contract.CONTEXT_LENGTHS: np.zeros(1, dtype=np.int64),
            contract.TREE_MASK: np.tri(count, dtype=np.bool_)[None],
            contract.LOGIT_ROWS: np.arange(count)[None],
        }
        if features:
            feed[contract.HIDDEN_IN] = np.stack(features)[None]
        for tensor in self._session.get_inputs():
            if tensor.name == contract.WRITE_ROWS:
                feed[tensor.name] = np.zeros(1, dtype=np.int64)
            elif tensor.name not in feed:
                _, heads, _, width = tensor.shape
                feed[tensor.name] = np.zeros((1, heads, count, width), dtype=np.float32)
        wanted = [name for name in self._outputs if name in (contract.LOGITS, contract.HIDDEN)]
        found = dict(zip(wanted, self._session.run(wanted, feed), strict=True))
        hidden = found.get(contract.HIDDEN)
        return Prefill(found[contract.LOGITS][0], None if hidden is None else hidden[0])

    def heads(self, features: np.ndarray) -> np.ndarray:
        """A head engine's logits float32 [R, heads, V] of features float32 [R, H_in]."""
        result: np.ndarray = self._session.run([contract.HEAD_LOGITS], {contract.HIDDEN_IN: features[None]})[0][0]
        return result


def reference_of_engine(bundle: Bundle, record: EngineRecord, directory: Path) -> Reference:
    """A cpu engine's own graph with integer products in float32; ``directory`` takes the widened copy."""
    path = bundle.file(record.files[0])
    if not record.precision.startswith("int"):
        return Reference(path)
    model = ir.load(path)
    _widen(model.graph)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses():
            del model.graph.initializers[name]
        elif isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = _copied(value.const_value)
    return Reference(directory / save_model(model, directory, "reference")[0])


def reference_of_checkpoint(
    checkpoint: Checkpoint, record: EngineRecord, max_length: int, directory: Path
) -> Reference:
    """The float32 graph of ``checkpoint`` that exposes what ``record`` does."""
    spec = DecoderSpec("reference", checkpoint.config, checkpoint.tensors, max_length, record.taps)
    target = open_target((), None, checkpoint.config.dtype, max_length)
    written = target.compile(spec.describe(), directory, Limits(1, 1, 1), Silent())
    return Reference(directory / written.files[0])


def _widen(graph: ir.Graph) -> None:
    """Replaces every ``MatMulNBits`` by a float32 ``MatMul``. Other users of the codes are exact and stay."""
    for node in list(graph):
        if node.op_type != "MatMulNBits":
            continue
        x, codes, scales = node.inputs[:3]
        assert x is not None and codes is not None and scales is not None
        columns, rows, bits = (node.attributes[name].as_int() for name in ("K", "N", "bits"))
        name = f"{node.name}.wide"
        tensor = ir.LazyTensor(
            _transposed(codes, scales, columns, bits, name),
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape((columns, rows)),
            name=name,
        )
        weight = ir.Value(name=name, const_value=tensor, type=ir.TensorType(ir.DataType.FLOAT), shape=tensor.shape)
        graph.register_initializer(weight)
        product = ir.node("MatMul", [x, weight], name=f"{name}.product")
        graph.insert_before(node, product)
        node.outputs[0].replace_all_uses_with(product.outputs[0])
        graph.remove(node, safe=True)


def _transposed(codes: ir.Value, scales: ir.Value, columns: int, bits: int, name: str) -> Callable[[], ir.Tensor]:
    def make() -> ir.Tensor:
        assert codes.const_value is not None and scales.const_value is not None
        weight = dequantize(codes.const_value.numpy(), scales.const_value.numpy(), columns, bits)
        return ir.Tensor(np.ascontiguousarray(weight.T), name=name)

    return make


def _copied(tensor: ir.ExternalTensor) -> ir.LazyTensor:
    """A tensor that is written again, beside the copied graph."""
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name),
        dtype=tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
    )
