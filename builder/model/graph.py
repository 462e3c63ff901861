"""GraphBuilder: writes an ONNX graph node by node, with weights that are read only when the file is written.

It knows ONNX and nothing of models. Names are made of scopes, so that the same description gives the same bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

OPSET = 24
MICROSOFT = "com.microsoft"

DTYPES: dict[ir.DataType, Any] = {
    ir.DataType.FLOAT: np.float32,
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
    ir.DataType.INT64: np.int64,
    ir.DataType.UINT8: np.uint8,
    ir.DataType.BOOL: np.bool_,
}


class GraphBuilder:
    """One graph under construction. ``dtype`` is the type of activations and dense weights."""

    def __init__(self, name: str, dtype: ir.DataType, opset: int = OPSET) -> None:
        self.dtype = dtype
        self._graph = ir.Graph([], [], nodes=[], name=name, opset_imports={"": opset})
        self._scopes: list[str] = []
        self._taken: dict[str, int] = {}
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._weights: dict[Hashable, ir.Value] = {}

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefixes the names of what is added inside with ``name``."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Declares a graph input; strings are symbolic dimensions."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._graph.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, dtype: ir.DataType, shape: ir.Shape | Sequence[int | str]) -> None:
        """Declares ``value`` as the graph output ``name``."""
        value.name = name
        value.type = ir.TensorType(dtype)
        value.shape = ir.Shape(shape)
        self._graph.outputs.append(value)

    def op(self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Adds a node with one output and returns it."""
        return self.multi(kind, *inputs, outputs=1, domain=domain, **attributes)[0]

    def multi(
        self, kind: str, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """Adds a node with ``outputs`` outputs and returns them."""
        if domain and domain not in self._graph.opset_imports:
            self._graph.opset_imports[domain] = 1
        name = self._name(kind)
        values = [ir.Value(name=name if i == 0 else f"{name}:{i}") for i in range(outputs)]
        self._graph.append(ir.node(kind, list(inputs), attributes, domain=domain, outputs=values, name=name))
        return tuple(values)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """``value`` as ``dtype``; a cast from the graph's own type to itself is left out."""
        return self.op("Cast", value, to=int(dtype))

    def constant(self, array: Any, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """A small constant; equal ones are shared."""
        data = np.asarray(array, dtype=DTYPES[dtype])
        key = (dtype, data.shape, data.tobytes())
        if key not in self._constants:
            name = f"constant.{len(self._constants)}"
            tensor = ir.Tensor(data, dtype=dtype, name=name)
            self._constants[key] = self._initializer(name, dtype, data.shape, tensor)
        return self._constants[key]

    def weight(
        self,
        key: Hashable,
        name: str,
        shape: Sequence[int],
        produce: Callable[[], np.ndarray],
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """A weight whose array ``produce`` makes when the file is written.

        ``produce`` returns an array of ``shape`` in ``dtype`` (the graph's own type by default). ``key`` stands for
        its content and layout: a second call with an equal key shares it. ``name`` is for people; where another
        weight has it, a number is added.
        """
        if key not in self._weights:
            dtype = dtype or self.dtype
            name = self._unused(name)
            self._weights[key] = self._initializer(name, dtype, shape, _lazy(name, shape, dtype, produce))
        return self._weights[key]

    @property
    def weight_keys(self) -> dict[str, Hashable]:
        """Each weight's name in the graph and its key."""
        return {str(value.name): key for key, value in self._weights.items()}

    def build(self) -> ir.Model:
        """The finished model."""
        return ir.Model(self._graph, ir_version=11, producer_name="specbuild")

    def _initializer(self, name: str, dtype: ir.DataType, shape: Sequence[int], tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _name(self, kind: str) -> str:
        return self._unused(".".join([*self._scopes, kind]))

    def _unused(self, base: str) -> str:
        count = self._taken.get(base, 0)
        self._taken[base] = count + 1
        return base if count == 0 else f"{base}_{count}"


def _lazy(name: str, shape: Sequence[int], dtype: ir.DataType, produce: Callable[[], np.ndarray]) -> ir.LazyTensor:
    def make() -> ir.Tensor:
        array = np.ascontiguousarray(produce())
        if array.shape != tuple(shape) or array.dtype != DTYPES[dtype]:
            raise ValueError(f"weight {name}: made {array.dtype}{array.shape}, declared {dtype}{tuple(shape)}")
        return ir.Tensor(array, dtype=dtype, name=name)

    return ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape), name=name)
