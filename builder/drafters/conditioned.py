"""A decoder layer over concat[embedding, feature], as EAGLE-1 and the MTP layouts have it: one description for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from specbuild.config import ModelConfig
from specbuild.model.blocks import Blocks, EngineDescription
from specbuild.model.weights import Weight, Weights


@dataclass(frozen=True)
class ConditionedLayer:
    """Names are of ``tensors``; a norm that is None is left out.

    ``layer``: prefix of the decoder layer (which may lack its input_layernorm). ``fused`` names the projection of the
    two, ``feature_first`` their order. Logits are ``lm_head`` of ``output_norm``; what is fed back is that norm's
    output where ``feeds_normed``, else its input.
    """

    name: str
    config: ModelConfig
    tensors: Mapping[str, Weight]
    embedding: Weight
    lm_head: Weight
    layer: str
    fused: str
    feature_first: bool = False
    embedding_norm: str | None = None
    feature_norm: str | None = None
    output_norm: str | None = None
    feeds_normed: bool = False

    def describe(self, max_positions: int) -> EngineDescription:
        hidden = self.config.hidden_size
        return EngineDescription(
            name=self.name,
            kind="decoder",
            vocab_size=self.lm_head.shape[0],
            hidden_size=hidden,
            emit=lambda b: self.emit(b, max_positions),
            config=self.config,
            cache_layers=1,
            taps=(1,),
            hidden_in=self.tensors[f"{self.fused}.weight"].shape[1] - hidden,
            scratch=True,
        )

    def emit(self, b: Blocks, max_positions: int) -> None:
        config, weights = self.config, Weights(self.tensors)
        layer = weights.below(self.layer) if self.layer else weights
        step = b.decoder_inputs(config, 1, max_positions, scratch=True)
        parts = [
            self._normed(b, b.embedding(step.tokens, self.embedding), self.embedding_norm),
            self._normed(b, b.hidden_in(config.hidden_size), self.feature_norm),
        ]
        both = b.concat(parts[::-1] if self.feature_first else parts)
        x = b.linear(both, weights[f"{self.fused}.weight"], weights.get(f"{self.fused}.bias"))
        first = layer.get("input_layernorm.weight")
        normed = x if first is None else b.rms_norm(x, first, config.rms_norm_eps)
        x = b.add(x, b.attention(step, 0, normed, layer.below("self_attn"), config))
        normed = b.rms_norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        x = b.add(x, b.mlp(normed, layer.below("mlp")))
        output = self._normed(b, x, self.output_norm)
        b.hidden([output if self.feeds_normed else x], config.hidden_size)
        b.logits(b.lm_head(b.gather_rows(output, step.logit_rows), self.lm_head), self.lm_head.shape[0])

    def _normed(self, b: Blocks, x: ir.Value, name: str | None) -> ir.Value:
        return x if name is None else b.rms_norm(x, self.tensors[name], self.config.rms_norm_eps)
