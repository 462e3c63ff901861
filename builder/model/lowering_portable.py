"""The portable lowering: standard ONNX operators of opset 24, which any runtime opens.

``TensorScatter`` writes the cache in place, ``Attention`` reads it under an additive mask that is built once a pass.
It serves ONNX Runtime and TensorRT for RTX (whose cache layer demands a fixed capacity, and whose attention a float
mask), and is the reference that other lowerings are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.config import ModelConfig
from specbuild.model.graph import DTYPES, OPSET, GraphBuilder
from specbuild.model.lowering import DecoderStep, HeadNorms, declare_inputs
from specbuild.rope import RopeConfig
from specrun import contract


@dataclass(frozen=True)
class Shared:
    mask: ir.Value | None  # graph's type, [B, 1, N, S]: 0 where visible; None where a lowering needs none
    cos: ir.Value | None  # [positions, rotary_dim / 2]; None when no layer rotates
    sin: ir.Value | None


class PortableLowering:
    """``capacity``: rows of the cache, or None where they are free to grow."""

    opset = OPSET

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity

    def begin(
        self, g: GraphBuilder, config: ModelConfig, layers: int, max_positions: int, scratch: bool = False
    ) -> DecoderStep:
        inputs = declare_inputs(g, scratch)
        shape = ("B", config.num_kv_heads, self.capacity or "S", config.head_dim)
        keys = tuple(g.input(contract.key_cache(i), g.dtype, shape) for i in range(layers))
        values = tuple(g.input(contract.value_cache(i), g.dtype, shape) for i in range(layers))
        _, _, context_lengths, tree_mask, *_ = inputs
        with g.scope("step"):
            mask = self.mask(g, config, context_lengths, tree_mask, keys[0])
            cos, sin = _rotary_tables(g, config.rope, max_positions) if any(config.rope_layers) else (None, None)
        return DecoderStep(*inputs, keys, values, config, Shared(mask, cos, sin))

    def attention(
        self, g: GraphBuilder, step: DecoderStep, layer: int, qkv: ir.Value, norms: HeadNorms | None, rotary: bool
    ) -> ir.Value:
        config = step.config
        q, k, v = self._heads(g, step, qkv, norms, rotary)
        keys = self._append(g, step, step.keys[layer], k)
        values = self._append(g, step, step.values[layer], v)
        context = self.attend(g, step, q, keys, values)
        return g.op("Reshape", context, g.constant([0, 0, config.num_heads * config.head_dim]))

    def attend(self, g: GraphBuilder, step: DecoderStep, q: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
        """Queries [B, H, N, D] over the updated caches: [B, N, H, D]."""
        context = g.op("Attention", q, keys, values, step.shared.mask)
        return g.op("Transpose", context, perm=[0, 2, 1, 3])

    def _heads(
        self, g: GraphBuilder, step: DecoderStep, qkv: ir.Value, norms: HeadNorms | None, rotary: bool
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values, [B, heads, N, head_dim] each, rotated."""
        config = step.config
        hq, hkv = config.num_heads, config.num_kv_heads
        heads = g.op("Reshape", qkv, g.constant([0, 0, hq + 2 * hkv, config.head_dim]))
        heads = g.op("Transpose", heads, perm=[0, 2, 1, 3])
        if norms is None and rotary:  # one rotation over queries and keys together
            both, v = g.multi("Split", heads, g.constant([hq + hkv, hkv]), outputs=2, axis=1)
            q, k = g.multi("Split", self._rotate(g, step, both), g.constant([hq, hkv]), outputs=2, axis=1)
            return q, k, v
        q, k, v = g.multi("Split", heads, g.constant([hq, hkv, hkv]), outputs=3, axis=1)
        if norms is not None:
            q = g.op("RMSNormalization", q, norms.query, axis=-1, epsilon=norms.epsilon)
            k = g.op("RMSNormalization", k, norms.key, axis=-1, epsilon=norms.epsilon)
        if rotary:
            q, k = self._rotate(g, step, q), self._rotate(g, step, k)
        return q, k, v

    def _rotate(self, g: GraphBuilder, step: DecoderStep, heads: ir.Value) -> ir.Value:
        rope, shared = step.config.rope, step.shared
        whole = rope.rotary_dim == step.config.head_dim
        partial: dict[str, Any] = {} if whole else {"rotary_embedding_dim": rope.rotary_dim}
        return g.op("RotaryEmbedding", heads, shared.cos, shared.sin, step.positions, **partial)

    def write(self, g: GraphBuilder, step: DecoderStep, cache: ir.Value, rows: ir.Value) -> ir.Value:
        """``cache`` with the pass's ``rows`` [B, H_kv, N, D] at ``step.write_rows`` and behind."""
        return g.op("TensorScatter", cache, rows, step.write_rows, axis=2)

    def _append(self, g: GraphBuilder, step: DecoderStep, cache: ir.Value, rows: ir.Value) -> ir.Value:
        updated = self.write(g, step, cache, rows)
        assert cache.name is not None and cache.shape is not None
        g.output(contract.updated(cache.name), updated, g.dtype, cache.shape)
        return updated

    def mask(
        self, g: GraphBuilder, config: ModelConfig, context: ir.Value, tree_mask: ir.Value, cache: ir.Value
    ) -> ir.Value | None:
        """Additive [B, 1, N, S], for ``attend``.

        A cache row's place relative to the context selects a column of [1 | tree_mask | 0]: column 0 for committed
        rows, column 1 + j for row j behind them, the last for rows not yet written.
        """
        nodes = g.op("Shape", tree_mask, start=1, end=2)
        assert tree_mask.shape is not None
        width = nodes if tree_mask.shape[1] == tree_mask.shape[2] else g.op("Shape", tree_mask, start=2, end=3)
        ends = g.op("Concat", g.op("Shape", tree_mask, start=0, end=2), g.constant([1]), axis=0)
        hidden = g.constant(_lowest(g.dtype), g.dtype)
        zero = g.constant(0, g.dtype)
        tree = g.op("Where", tree_mask, zero, hidden)
        columns = g.op("Concat", g.op("Expand", zero, ends), tree, g.op("Expand", hidden, ends), axis=-1)
        column = g.op("Sub", self._rows(g, cache), g.op("Unsqueeze", context, g.constant([-1])))
        column = g.op("Add", column, g.constant(1))
        column = g.op("Max", column, g.constant(0))
        column = g.op("Min", column, g.op("Add", width, g.constant([1])))
        column = g.op("Unsqueeze", column, g.constant([1]))
        shape = g.op("Concat", g.constant([1]), nodes, g.constant([1]), axis=0)
        mask = g.op("GatherElements", columns, g.op("Expand", column, shape), axis=2)
        return g.op("Unsqueeze", mask, g.constant([1]))

    def _rows(self, g: GraphBuilder, cache: ir.Value) -> ir.Value:
        """0, 1, ... S - 1."""
        if self.capacity is not None:
            return g.constant(np.arange(self.capacity))
        size = g.op("Squeeze", g.op("Shape", cache, start=2, end=3))
        return g.op("Range", g.constant(0), size, g.constant(1))


def _lowest(dtype: ir.DataType) -> float:
    """Far below any score, and finite: infinities would make NaN of 0 * inf in fused kernels."""
    return -65504.0 if dtype == ir.DataType.FLOAT16 else -1e30


def _rotary_tables(g: GraphBuilder, rope: RopeConfig, positions: int) -> tuple[ir.Value, ir.Value]:
    """Cosines and sines of every position, [positions, rotary_dim / 2].

    Where the model's frequencies change beyond ``rope.exact_length``, the table repeats its last row: only nodes
    beyond the longest context reach it, and those are never accepted.
    """
    exact = min(positions, rope.exact_length or positions)
    cos, sin = (np.pad(table, ((0, positions - exact), (0, 0)), mode="edge") for table in rope.cos_sin(exact))
    dtype = DTYPES[g.dtype]
    key = (repr(rope), positions)
    return (
        g.weight((key, "cos"), "rotary.cos", cos.shape, lambda: cos.astype(dtype)),
        g.weight((key, "sin"), "rotary.sin", sin.shape, lambda: sin.astype(dtype)),
    )
