"""Lowering: how attention, its cache and its rotary positions become nodes. The model code calls these two verbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir

from specbuild.config import ModelConfig
from specbuild.model.graph import GraphBuilder
from specrun import contract


@dataclass(frozen=True)
class HeadNorms:
    """Qwen3: queries and keys are normalized head by head before the rotation. Vectors of head_dim."""

    query: ir.Value
    key: ir.Value
    epsilon: float


@dataclass(frozen=True)
class DecoderStep:
    """The contract's inputs of one pass, and what a lowering derives from them once (``shared``)."""

    tokens: ir.Value
    positions: ir.Value
    context_lengths: ir.Value
    tree_mask: ir.Value
    logit_rows: ir.Value
    write_rows: ir.Value  # the context lengths, where the engine takes no WRITE_ROWS
    keys: tuple[ir.Value, ...]
    values: tuple[ir.Value, ...]
    config: ModelConfig
    shared: Any


class Lowering(Protocol):
    """Two verbs. ``begin`` is called once a graph, ``attention`` once a layer."""

    def begin(
        self, g: GraphBuilder, config: ModelConfig, layers: int, max_positions: int, scratch: bool = False
    ) -> DecoderStep:
        """Declares the inputs (with WRITE_ROWS where ``scratch``), derives masks and rotary tables."""

    def attention(
        self, g: GraphBuilder, step: DecoderStep, layer: int, qkv: ir.Value, norms: HeadNorms | None, rotary: bool
    ) -> ir.Value:
        """qkv [B, N, (heads + 2 kv_heads) * head_dim] to [B, N, heads * head_dim].

        Rotates, writes the new rows into cache ``layer`` (declaring its outputs) and attends.
        """


Inputs = tuple[ir.Value, ir.Value, ir.Value, ir.Value, ir.Value, ir.Value]


def declare_inputs(g: GraphBuilder, scratch: bool = False) -> Inputs:
    """The inputs every decoder has, in the order of ``contract.DECODER_INPUTS``, then the rows to write."""
    integer = ir.DataType.INT64
    tokens = g.input(contract.TOKENS, integer, ("B", "N"))
    positions = g.input(contract.POSITIONS, integer, ("B", "N"))
    lengths = g.input(contract.CONTEXT_LENGTHS, integer, ("B",))
    mask = g.input(contract.TREE_MASK, ir.DataType.BOOL, ("B", "N", "T" if scratch else "N"))
    rows = g.input(contract.LOGIT_ROWS, integer, ("B", "M"))
    write = g.input(contract.WRITE_ROWS, integer, ("B",)) if scratch else lengths
    return tokens, positions, lengths, mask, rows, write
