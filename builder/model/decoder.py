"""DecoderSpec: one description of a decoder-only language model, for every target and precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from specbuild.config import ModelConfig
from specbuild.model.blocks import Blocks, EngineDescription
from specbuild.model.weights import Weight, Weights
from specrun import contract


@dataclass(frozen=True)
class DecoderSpec:
    """A model and what it exposes.

    ``taps``: what HIDDEN holds, in order (see ``specrun.contract``); empty for no HIDDEN. ``max_positions``: how far
    the rotary tables reach, in tokens. ``tensors``: canonical (Hugging Face Llama) names. ``sample`` as in
    ``EngineDescription``.
    """

    name: str
    config: ModelConfig
    tensors: Mapping[str, Weight] = field(repr=False)
    max_positions: int
    taps: tuple[int, ...] = ()
    sample: tuple[int, ...] = ()
    drafts: bool = False  # a draft model: its passes see the scratch rows of earlier ones

    def describe(self) -> EngineDescription:
        return EngineDescription(
            name=self.name,
            kind="decoder",
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.hidden_size,
            emit=self.emit,
            config=self.config,
            cache_layers=self.config.num_layers,
            taps=self.taps,
            sample=self.sample[: self.max_positions],
            scratch=self.drafts,
        )

    def emit(self, b: Blocks) -> None:
        """Embedding, layers, final norm, head over the rows that are asked for."""
        config, weights = self.config, Weights(self.tensors)
        step = b.decoder_inputs(config, config.num_layers, self.max_positions, self.drafts)
        streams = [b.embedding(step.tokens, weights["model.embed_tokens.weight"])]
        for layer in range(config.num_layers):
            below = weights.below(f"model.layers.{layer}")
            streams.append(b.decoder_layer(step, layer, streams[-1], below, config))
        norm = weights["model.norm.weight"]
        rows = b.rms_norm(b.gather_rows(streams[-1], step.logit_rows), norm, config.rms_norm_eps)
        b.logits(b.lm_head(rows, self.head(weights)), config.vocab_size)
        if self.taps:
            taps = [self._tap(b, tap, streams, norm) for tap in self.taps]
            b.hidden(taps, len(taps) * config.hidden_size)

    def _tap(self, b: Blocks, tap: int, streams: list[ir.Value], norm: Weight) -> ir.Value:
        if tap == contract.FINAL_NORM:
            return b.rms_norm(streams[-1], norm, self.config.rms_norm_eps)
        return streams[tap]

    @staticmethod
    def head(weights: Weights) -> Weight:
        """The LM head, or the embedding where a checkpoint ties them and stores it once."""
        return weights.get("lm_head.weight") or weights["model.embed_tokens.weight"]
