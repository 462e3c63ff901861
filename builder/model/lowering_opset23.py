"""The portable lowering for ONNX Runtime before 1.24, the newest there is for Python 3.10, which stops at opset 23.

The one operator of opset 24 in the portable lowering is ``TensorScatter``; ``ScatterND`` writes the same rows to the
same places, also in place where input and output are bound to one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import onnx_ir as ir

from specbuild.config import ModelConfig
from specbuild.model.graph import GraphBuilder
from specbuild.model.lowering import DecoderStep
from specbuild.model.lowering_portable import PortableLowering, Shared


@dataclass(frozen=True)
class _Indexed(Shared):
    rows: ir.Value  # int64 [B, H_kv, N, 3]: lane, head and cache row of every new row


class Opset23Lowering(PortableLowering):
    """``PortableLowering`` without ``TensorScatter``."""

    opset = 23

    def begin(
        self, g: GraphBuilder, config: ModelConfig, layers: int, max_positions: int, scratch: bool = False
    ) -> DecoderStep:
        step = super().begin(g, config, layers, max_positions, scratch)
        with g.scope("step"):
            rows = _row_indices(g, step, config.num_kv_heads)
        shared = {field.name: getattr(step.shared, field.name) for field in fields(step.shared)}
        return replace(step, shared=_Indexed(**shared, rows=rows))

    def write(self, g: GraphBuilder, step: DecoderStep, cache: ir.Value, rows: ir.Value) -> ir.Value:
        return g.op("ScatterND", cache, step.shared.rows, rows)


def _row_indices(g: GraphBuilder, step: DecoderStep, heads: int) -> ir.Value:
    lanes, nodes = (g.op("Shape", step.tokens, start=axis, end=axis + 1) for axis in (0, 1))
    shape = g.op("Concat", lanes, g.constant([heads]), nodes, g.constant([1]), axis=0)
    row = g.op("Add", g.op("Unsqueeze", step.write_rows, g.constant([1])), _count(g, nodes))
    parts = (
        g.op("Unsqueeze", _count(g, lanes), g.constant([1, 2, 3])),
        g.constant(np.arange(heads).reshape(1, heads, 1, 1)),
        g.op("Unsqueeze", row, g.constant([1, 3])),
    )
    return g.op("Concat", *(g.op("Expand", part, shape) for part in parts), axis=-1)


def _count(g: GraphBuilder, size: ir.Value) -> ir.Value:
    """0, 1, ... size - 1."""
    return g.op("Range", g.constant(0), g.op("Squeeze", size), g.constant(1))
