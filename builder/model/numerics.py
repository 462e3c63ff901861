"""Numerics: how linear layers and embeddings are stored and computed. One object for each choice of precision."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from specbuild.checkpoint import check_finite
from specbuild.model.graph import DTYPES, MICROSOFT, GraphBuilder
from specbuild.model.quantize import BLOCK, code_shape, quantize
from specbuild.model.weights import Weight
from specrun.errors import CheckpointError

FLOAT16_MAX = 65504.0
HEAD_BITS = 8


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
        transposed = g.weight((weight, "T"), f"{weight.name}.T", (columns, rows), lambda: self._read(weight).T)
        return g.op("MatMul", x, transposed)

    def embedding(self, g: GraphBuilder, tokens: ir.Value, weight: Weight) -> ir.Value:
        return g.op("Gather", self.stored(g, weight), tokens, axis=0)

    def head(self, g: GraphBuilder, rows: ir.Value, weight: Weight) -> ir.Value:
        return g.op("Gemm", rows, self.stored(g, weight), transB=1)

    def stored(self, g: GraphBuilder, weight: Weight) -> ir.Value:
        """The weight as it is, in this precision."""
        return g.weight(weight, weight.name, weight.shape, lambda: self._read(weight))

    def _read(self, weight: Weight) -> np.ndarray:
        return finite(weight, DTYPES[self.dtype])


class Blocked(Dense):
    """Linear weights as integers in blocks of 32, computed in float32 by products that round activations to 8 bits.

    The embedding and the LM head keep 8 bits at either precision, stored once where they are tied: measured on the
    demo model, a 4-bit head costs a fifth more divergence from float32 (KL) and saves less than a tenth of a step.

    ONNX Runtime computes a row with the same bits in every pass of two rows or more, but not in a pass of one:
    hence ``min_rows``.
    """

    min_rows = 2

    def __init__(self, bits: int) -> None:
        super().__init__(f"int{bits}", ir.DataType.FLOAT)
        self.bits = bits

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        return self._product(g, x, weight, self.bits)

    def embedding(self, g: GraphBuilder, tokens: ir.Value, weight: Weight) -> ir.Value:
        hidden = weight.shape[1]
        if hidden % BLOCK:
            return super().embedding(g, tokens, weight)
        codes, scales = self._codes(g, weight, HEAD_BITS)
        scales = g.op("Unsqueeze", scales, g.constant([2]))
        layout = {"gather_axis": 0, "quantize_axis": 2, "block_size": BLOCK, "bits": HEAD_BITS}
        blocks = g.op("GatherBlockQuantized", codes, tokens, scales, domain=MICROSOFT, **layout)
        return g.op("Reshape", blocks, g.constant([0, 0, hidden]))

    def head(self, g: GraphBuilder, rows: ir.Value, weight: Weight) -> ir.Value:
        return self._product(g, rows, weight, HEAD_BITS)

    def _product(self, g: GraphBuilder, x: ir.Value, weight: Weight, bits: int) -> ir.Value:
        rows, columns = weight.shape
        layout = {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
        return g.op("MatMulNBits", x, *self._codes(g, weight, bits), domain=MICROSOFT, **layout)

    def _codes(self, g: GraphBuilder, weight: Weight, bits: int) -> tuple[ir.Value, ir.Value]:
        shape = code_shape((weight.shape[0], weight.shape[1]), bits)
        memory = _OneQuantization(weight, bits)
        name = f"{weight.name}.int{bits}"
        codes = g.weight((weight, bits), name, shape, memory.codes, ir.DataType.UINT8)
        return codes, g.weight((weight, bits, "scales"), f"{name}.scales", shape[:2], memory.scales)


class DraftWeights:
    """A drafter's numerics: products in blocks of ``bits`` bits, embedding rows as the target stores them.

    A draft need not be exact, only cheap: whatever it proposes, the target decides. So its passes may be of one row,
    and its LM head, most of what a drafter of one layer reads, is a quarter of one in float32.
    """

    dtype = ir.DataType.FLOAT
    min_rows = 1

    def __init__(self, target: Numerics, bits: int) -> None:
        self.name = f"int{bits}"
        self._blocks = Blocked(bits)
        self.linear = self._blocks.linear
        self.head = self._blocks.head
        self.embedding = target.embedding


class _OneQuantization:
    """Quantizes a weight when its codes are written and keeps the scales for the moment right after."""

    def __init__(self, weight: Weight, bits: int) -> None:
        self.weight, self.bits = weight, bits
        self._scales: np.ndarray | None = None

    def codes(self) -> np.ndarray:
        codes, self._scales = quantize(finite(self.weight, np.float32), self.bits)
        return codes

    def scales(self) -> np.ndarray:
        if self._scales is None:
            self.codes()
        scales, self._scales = self._scales, None
        assert scales is not None
        return scales


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
