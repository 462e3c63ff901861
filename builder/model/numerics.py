"""Numerics: how linear layers and embeddings are stored and computed. One object for each choice of precision."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from specbuild.checkpoint import check_finite
from specbuild.model.graph import DTYPES, GraphBuilder
from specbuild.model.weights import Weight
from specrun.errors import CheckpointError

FLOAT16_MAX = 65504.0


class Numerics(Protocol):
    """What a precision decides. ``min_rows`` as in ``EngineRecord``."""

    name: str
    dtype: ir.DataType
    min_rows: int

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        """x [..., in] times weight [out, in] transposed."""

    def embedding(self, g: GraphBuilder, tokens: ir.Value, weight: Weight) -> ir.Value:
        """Rows of weight [V, H]."""

    def head(self, g: GraphBuilder, rows: ir.Value, weight: Weight) -> ir.Value:
        """Logits of rows [R, H] (two axes) with weight [V, H], which may also be the embedding: [R, V]."""


class Dense:
    """Weights in one floating-point type."""

    min_rows = 1

    def __init__(self, name: str, dtype: ir.DataType) -> None:
        self.name = name
        self.dtype = dtype

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        rows, columns = weight.shape
        transposed = g.weight(f"{weight.name}.T", (columns, rows), lambda: self._read(weight).T)
        return g.op("MatMul", x, transposed)

    def embedding(self, g: GraphBuilder, tokens: ir.Value, weight: Weight) -> ir.Value:
        return g.op("Gather", self.stored(g, weight), tokens, axis=0)

    def head(self, g: GraphBuilder, rows: ir.Value, weight: Weight) -> ir.Value:
        return g.op("Gemm", rows, self.stored(g, weight), transB=1)

    def stored(self, g: GraphBuilder, weight: Weight) -> ir.Value:
        """The weight as it is, in this precision."""
        return g.weight(weight.name, weight.shape, lambda: self._read(weight))

    def _read(self, weight: Weight) -> np.ndarray:
        return finite(weight, DTYPES[self.dtype])


def finite(weight: Weight, dtype: Any) -> np.ndarray:
    """The weight in ``dtype``. Raises CheckpointError when a value is not finite, or too large for float16."""
    array = weight.read_float32()
    check_finite(weight.name, array)
    if dtype is np.float16 and (largest := np.abs(array).max(initial=0)) > FLOAT16_MAX:
        raise CheckpointError(
            f"{weight.name}: holds {largest:.5g}, more than float16 can (65504). Set dtype to bfloat16 "
            "in config.json, or compile for the cpu target, which computes in float32."
        )
    return array.astype(dtype, copy=False)
