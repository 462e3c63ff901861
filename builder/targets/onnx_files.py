"""Writing a graph as model.onnx plus one file of weights beside it, streamed tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_to_external

PAGE = 4096  # offsets of large tensors: a runtime can map them instead of copying
SMALL = 1024  # bytes; below this a tensor stays inside the graph, where shape arithmetic can see it


def save_model(
    model: ir.Model, directory: Path, stem: str, progress: Callable[[int], None] | None = None
) -> tuple[str, ...]:
    """Writes ``stem.onnx`` and ``stem.weights`` into ``directory`` and returns their names.

    ``progress`` is called with the bytes written since the last call. At any time one weight is in memory.
    """
    for value in model.graph.initializers.values():  # small ones now: an error of theirs must leave as it is
        if not _is_large(value.const_value) and isinstance(value.const_value, ir.LazyTensor):
            value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)
    values = [value for value in model.graph.initializers.values() if _is_large(value.const_value)]
    tensors = [value.const_value for value in values if value.const_value is not None]

    def report(tensor: ir.TensorProtocol, info: object) -> None:
        if progress is not None:
            progress(tensor.nbytes)

    data = f"{stem}.weights"
    external = convert_tensors_to_external(
        tensors, directory, data, callback=report, alignment=PAGE, align_threshold=PAGE
    )
    for value, tensor in zip(values, external, strict=True):
        value.const_value = tensor
    ir.save(model, directory / f"{stem}.onnx")
    return (f"{stem}.onnx", data) if external else (f"{stem}.onnx",)


def weight_bytes(model: ir.Model) -> int:
    """What ``save_model`` will report in all."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and _is_large(tensor))


def _is_large(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and tensor.nbytes >= SMALL
