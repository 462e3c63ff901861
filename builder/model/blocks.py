"""Building blocks of decoders and draft heads.

A file that describes an engine makes an ``EngineDescription`` whose ``emit`` receives ``Blocks`` and calls its verbs;
it never touches ONNX, precisions or targets. A one-layer head that is conditioned on the target's features, whole::

    def emit(b: Blocks) -> None:
        step = b.decoder_inputs(config, layers=1, max_positions=4096)    # tokens, positions, ... and the caches
        hidden = b.hidden_in(width=3 * H)                                # float32 [B, N, width]
        embedded = b.embedding(step.tokens, w["embed_tokens.weight"])
        x = b.linear(b.concat([embedded, hidden]), w["fc.weight"])
        x = b.decoder_layer(step, 0, x, w.below("layers.0"), config)
        b.hidden([x])                                                    # output HIDDEN
        b.logits(b.lm_head(b.gather_rows(x, step.logit_rows), w["lm_head.weight"]))

    EngineDescription("eagle", "decoder", vocab_size=V, hidden_size=H, cache_layers=1, config=config,
                      hidden_in=3 * H, taps=(1,), emit=emit)

Weights are any hashable objects with ``name``, ``shape`` and ``read_float32()`` (``specbuild.model.weights``). A
weight is stored once: a head that borrows the target's embedding passes the target checkpoint's own object, and on the
cpu target its engine reads the target's file. A variant of a layer
(no input norm, inputs twice as wide, other residuals) is written with ``attention`` and ``mlp`` in place of
``decoder_layer``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from specbuild.config import ModelConfig
from specbuild.model.graph import DTYPES, GraphBuilder
from specbuild.model.lowering import DecoderStep, HeadNorms, Lowering
from specbuild.model.numerics import Numerics, finite
from specbuild.model.weights import Weight, Weights
from specrun import contract


@dataclass(frozen=True)
class EngineDescription:
    """One engine to compile, for any target. The fields mean what ``specrun.bundle.EngineRecord``'s do.

    ``config`` and ``cache_layers`` give the cache's shape; a head engine has neither. ``sample``: token ids of real
    text, where the engine's range should be checked against a narrow floating-point type.
    """

    name: str
    kind: str
    vocab_size: int
    hidden_size: int
    emit: Callable[[Blocks], None] = field(repr=False)
    config: ModelConfig | None = None
    cache_layers: int = 0
    taps: tuple[int, ...] = ()
    hidden_in: int | None = None
    heads: int = 0
    sample: tuple[int, ...] = ()
    scratch: bool = False


class Blocks:
    """The verbs, bound to one graph, one precision and one lowering of attention."""

    def __init__(self, graph: GraphBuilder, numerics: Numerics, lowering: Lowering) -> None:
        self.graph = graph
        self.numerics = numerics
        self.lowering = lowering

    # Inputs

    def decoder_inputs(
        self, config: ModelConfig, layers: int, max_positions: int, scratch: bool = False
    ) -> DecoderStep:
        """Declares the contract's inputs and ``layers`` caches of ``config``'s shape.

        ``max_positions``: rotary tables reach this far, in tokens. ``scratch``: for engines that draft (WRITE_ROWS).
        """
        return self.lowering.begin(self.graph, config, layers, max_positions, scratch)

    def hidden_in(self, width: int, rows: str = "N") -> ir.Value:
        """Declares HIDDEN_IN, float32 [B, rows, width], and brings it to the graph's type. Head engines: rows="M"."""
        value = self.graph.input(contract.HIDDEN_IN, ir.DataType.FLOAT, ("B", rows, width))
        return value if self.graph.dtype == ir.DataType.FLOAT else self.graph.cast(value, self.graph.dtype)

    # Layers

    def linear(self, x: ir.Value, weight: Weight, bias: Weight | None = None) -> ir.Value:
        """x [..., in] through weight [out, in], plus bias [out]."""
        y = self.numerics.linear(self.graph, x, weight)
        return y if bias is None else self.add(y, self.vector(bias))

    def rms_norm(self, x: ir.Value, weight: Weight, epsilon: float) -> ir.Value:
        """Root-mean-square normalization over the last axis (Zhang and Sennrich 2019)."""
        return self.graph.op("RMSNormalization", x, self.vector(weight), axis=-1, epsilon=epsilon)

    def embedding(self, tokens: ir.Value, weight: Weight) -> ir.Value:
        """tokens [B, N] to rows of weight [V, H]."""
        return self.numerics.embedding(self.graph, tokens, weight)

    def attention(self, step: DecoderStep, layer: int, x: ir.Value, weights: Weights, config: ModelConfig) -> ir.Value:
        """Self-attention of the tree's nodes over the cache and each other, with its projections.

        ``weights``: q_proj, k_proj, v_proj, o_proj (with biases where they are there), q_norm and k_norm if
        ``config.qk_norm``. ``x`` may be wider than the model (EAGLE-3). Writes cache ``layer``.
        """
        projections = ("q_proj", "k_proj", "v_proj")
        biased = weights.get("q_proj.bias") is not None
        bias = weights.stacked(projections, "bias") if biased else None
        qkv = self.linear(x, weights.stacked(projections, "weight"), bias)
        norms = None
        if config.qk_norm:
            q_norm, k_norm = self.vector(weights["q_norm.weight"]), self.vector(weights["k_norm.weight"])
            norms = HeadNorms(q_norm, k_norm, config.rms_norm_eps)
        rotary = config.rope_layers[layer]
        context = self.lowering.attention(self.graph, step, layer, qkv, norms, rotary)
        return self.linear(context, weights["o_proj.weight"], weights.get("o_proj.bias"))

    def mlp(self, x: ir.Value, weights: Weights) -> ir.Value:
        """Gated SiLU: down(silu(gate(x)) * up(x)); gate and up are one product."""
        names = ("gate_proj", "up_proj")
        bias = weights.stacked(names, "bias") if weights.get("up_proj.bias") is not None else None
        both = self.linear(x, weights.stacked(names, "weight"), bias)
        gate, up = self.graph.multi("Split", both, outputs=2, axis=-1, num_outputs=2)
        return self.linear(
            self.multiply(self.silu(gate), up), weights["down_proj.weight"], weights.get("down_proj.bias")
        )

    def decoder_layer(
        self, step: DecoderStep, layer: int, x: ir.Value, weights: Weights, config: ModelConfig
    ) -> ir.Value:
        """A pre-norm layer: x + attention(norm(x)), then plus mlp(norm(.))."""
        with self.graph.scope(f"layers.{layer}"):
            with self.graph.scope("attention"):
                normed = self.rms_norm(x, weights["input_layernorm.weight"], config.rms_norm_eps)
                x = self.add(x, self.attention(step, layer, normed, weights.below("self_attn"), config))
            with self.graph.scope("mlp"):
                normed = self.rms_norm(x, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
                return self.add(x, self.mlp(normed, weights.below("mlp")))

    def gather_rows(self, x: ir.Value, rows: ir.Value) -> ir.Value:
        """x [B, N, H] at rows [B, M]: [B, M, H]."""
        index = self.graph.op("Unsqueeze", rows, self.graph.constant([-1]))
        return self.graph.op("GatherND", x, index, batch_dims=1)

    def lm_head(self, rows: ir.Value, weight: Weight) -> ir.Value:
        """rows [B, M, H] through weight [V, H], which may be the embedding's: [B, M, V] in the graph's type."""
        vocabulary, hidden = weight.shape
        g = self.graph
        with g.scope("lm_head"):
            flat = g.op("Reshape", rows, g.constant([-1, hidden]))
            logits = self.numerics.head(g, flat, weight)
            batch = g.op("Shape", rows, start=0, end=2)
            return g.op("Reshape", logits, g.op("Concat", batch, g.constant([vocabulary]), axis=0))

    # Arithmetic

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.graph.op("Add", a, b)

    def subtract(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.graph.op("Sub", a, b)

    def multiply(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.graph.op("Mul", a, b)

    def silu(self, x: ir.Value) -> ir.Value:
        return self.graph.op("Mul", x, self.graph.op("Sigmoid", x))

    def concat(self, parts: Sequence[ir.Value], axis: int = -1) -> ir.Value:
        return parts[0] if len(parts) == 1 else self.graph.op("Concat", *parts, axis=axis)

    def split(self, x: ir.Value, sizes: Sequence[int]) -> tuple[ir.Value, ...]:
        """x [..., sum of sizes] in pieces along its last axis."""
        return self.graph.multi("Split", x, self.graph.constant(list(sizes)), outputs=len(sizes), axis=-1)

    def vector(self, weight: Weight) -> ir.Value:
        """A small weight in the graph's type, as it is stored."""
        dtype = DTYPES[self.graph.dtype]
        return self.graph.weight(weight, weight.name, weight.shape, lambda: finite(weight, dtype))

    # Outputs

    def logits(self, value: ir.Value, vocabulary: int) -> None:
        """Declares LOGITS, float32 [B, M, vocabulary]."""
        self._output(contract.LOGITS, value, ("B", "M", vocabulary))

    def head_logits(self, parts: Sequence[ir.Value], vocabulary: int) -> None:
        """Declares HEAD_LOGITS, float32 [B, M, heads, vocabulary], from each head's [B, M, vocabulary]."""
        axis = self.graph.constant([2])
        stacked = self.concat([self.graph.op("Unsqueeze", part, axis) for part in parts], axis=2)
        self._output(contract.HEAD_LOGITS, stacked, ("B", "M", len(parts), vocabulary))

    def shared_head_logits(self, rows: Sequence[ir.Value], weight: Weight) -> None:
        """HEAD_LOGITS of heads that share one LM head, from each head's [B, M, H]: one product for all of them."""
        vocabulary, width = weight.shape
        axis, heads = self.graph.constant([2]), len(rows)
        stacked = self.concat([self.graph.op("Unsqueeze", x, axis) for x in rows], axis=2)
        flat = self.graph.op("Reshape", stacked, self.graph.constant([0, -1, width]))
        logits = self.lm_head(flat, weight)
        shaped = self.graph.op("Reshape", logits, self.graph.constant([0, -1, heads, vocabulary]))
        self._output(contract.HEAD_LOGITS, shaped, ("B", "M", heads, vocabulary))

    def hidden(self, taps: Sequence[ir.Value], width: int) -> None:
        """Declares HIDDEN, float32 [B, N, width], the concatenated taps."""
        self._output(contract.HIDDEN, self.concat(taps), ("B", "N", width))

    def _output(self, name: str, value: ir.Value, shape: Sequence[int | str]) -> None:
        # A value may be used by nodes or be two outputs at once; an output of its own keeps names apart.
        value = self.graph.cast(value, ir.DataType.FLOAT) if self.graph.dtype != ir.DataType.FLOAT else value
        self.graph.output(name, self.graph.op("Identity", value), ir.DataType.FLOAT, shape)
