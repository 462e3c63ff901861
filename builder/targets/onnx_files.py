"""Writing a graph as model.onnx plus one file of weights beside it, streamed tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_to_external

from specbuild.model.graph import GraphBuilder

PAGE = 4096  # offsets of large tensors: a runtime can map them instead of copying
SMALL = 1024  # bytes; below this a tensor stays inside the graph, where shape arithmetic can see it


class WeightStore:
    """Where the weights of a bundle lie, so that a later engine refers to them instead of storing them again."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, ir.ExternalTensor] = {}

    def adopt(self, graph: GraphBuilder, model: ir.Model) -> None:
        """Points every weight of ``model`` (built from ``graph``) that is already on disk to its place there."""
        for name, key in graph.weight_keys.items():
            value = model.graph.initializers[name]
            tensor = self._tensors.get((key, value.dtype))
            if tensor is not None:
                value.const_value = tensor

    def remember(self, graph: GraphBuilder, model: ir.Model) -> None:
        """Notes where ``model``'s weights lie, after it was saved."""
        for name, key in graph.weight_keys.items():
            value = model.graph.initializers[name]
            if isinstance(value.const_value, ir.ExternalTensor):
                self._tensors[key, value.dtype] = value.const_value


def save_model(
    model: ir.Model, directory: Path, stem: str, progress: Callable[[int], None] | None = None
) -> tuple[str, ...]:
    """Writes ``stem.onnx`` and, for weights that are not on disk yet, ``stem.weights`` into ``directory``.

    Returns the names of the files that the model needs, the graph first. ``progress`` is called with the bytes
    written since the last call. At any time one weight is in memory.
    """
    for value in model.graph.initializers.values():  # small ones now: an error of theirs must leave as it is
        if isinstance(value.const_value, ir.LazyTensor) and value.const_value.nbytes < SMALL:
            value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)
    values = [value for value in model.graph.initializers.values() if _is_new(value.const_value)]
    tensors = [value.const_value for value in values if value.const_value is not None]

    def report(tensor: ir.TensorProtocol, info: object) -> None:
        if progress is not None:
            progress(tensor.nbytes)

    external = convert_tensors_to_external(
        tensors, directory, f"{stem}.weights", callback=report, alignment=PAGE, align_threshold=PAGE
    )
    for value, tensor in zip(values, external, strict=True):
        value.const_value = tensor
    ir.save(model, directory / f"{stem}.onnx")
    places = [v.const_value for v in model.graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor)]
    return (f"{stem}.onnx", *dict.fromkeys(str(place.location) for place in places))


def weight_bytes(model: ir.Model) -> int:
    """What ``save_model`` will report in all."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and _is_new(tensor))


def _is_new(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and tensor.nbytes >= SMALL and not isinstance(tensor, ir.ExternalTensor)
