"""The target model as a torch function for training: taps, final hidden states and batched generation.

Drafters are distilled from hidden states, which the compiled engines emit too; training wants them in bulk and in
bf16, hence this second, small spelling of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from specbuild.checkpoint import Checkpoint, open_checkpoint
from specbuild.config import ModelConfig


def default_taps(config: ModelConfig) -> tuple[int, int, int]:
    """Layers whose *input*, the residual stream entering them, EAGLE-3 reads."""
    return 2, config.num_layers // 2, config.num_layers - 3


class Rope:
    """Rotary embedding in the half-split convention of Hugging Face checkpoints."""

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype) -> None:
        cos, sin = (torch.from_numpy(table).repeat(1, 2) for table in config.rope.cos_sin(length))
        self.cos, self.sin, self.width = cos.to(dtype), sin.to(dtype), config.rope.rotary_dim

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x`` [B, heads, N, D] by ``positions`` [B, N] or [N]; features beyond the rotary width stay."""
        cos, sin = self.cos[positions], self.sin[positions]
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        turned, kept = x[..., : self.width], x[..., self.width :]
        low, high = turned.chunk(2, -1)
        return torch.cat((turned * cos + torch.cat((-high, low), -1) * sin, kept), -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalization over the last axis, statistics in float32."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x * scale.to(x.dtype)) * weight


class Layer:
    """One decoder layer; projections that read the same input are joined."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        prefix = f"model.layers.{index}."
        own = {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}
        self.config, self.weights, self.rotated = config, own, config.rope_layers[index]
        self.qkv = _joined(own, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])
        self.gate_up = _joined(own, ["mlp.gate_proj", "mlp.up_proj"])
        self.down, self.output = _joined(own, ["mlp.down_proj"]), _joined(own, ["self_attn.o_proj"])

    def attention_inputs(self, x: Tensor, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, heads, N, D], keys and values [B, kv_heads, N, D]."""
        c = self.config
        normed = rms_norm(x, self.weights["input_layernorm.weight"], c.rms_norm_eps)
        split = F.linear(normed, *self.qkv).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        q, k, v = split.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)
        if c.qk_norm:
            q = rms_norm(q, self.weights["self_attn.q_norm.weight"], c.rms_norm_eps)
            k = rms_norm(k, self.weights["self_attn.k_norm.weight"], c.rms_norm_eps)
        return (rope(q, positions), rope(k, positions), v) if self.rotated else (q, k, v)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input and the attended values [B, N, heads * D]."""
        x = x + F.linear(attended, *self.output)
        normed = rms_norm(x, self.weights["post_attention_layernorm.weight"], self.config.rms_norm_eps)
        gate, up = F.linear(normed, *self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, *self.down)


def _joined(weights: dict[str, Tensor], names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    bias = torch.cat([weights[f"{name}.bias"] for name in names]) if f"{names[0]}.bias" in weights else None
    return torch.cat([weights[f"{name}.weight"] for name in names]), bias


class Target:
    """A frozen decoder; ``weights`` by canonical names."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype, length: int = 4096) -> None:
        self.config, self.dtype = config, dtype
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.rope = Rope(config, min(length, config.max_position), dtype)
        self.embedding = weights["model.embed_tokens.weight"]
        self.lm_head = weights.get("lm_head.weight", self.embedding)
        self.norm = weights["model.norm.weight"]
        self.layers = [Layer(config, weights, index) for index in range(config.num_layers)]

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, taps: Sequence[int]) -> list[Tensor]:
        """Residual streams entering the layers ``taps``, then the final normed state: each [B, N, H].

        ``tokens`` [B, N] is padded on the right; causality keeps the padding from the real rows.
        """
        positions = torch.arange(tokens.shape[1])
        x, entering = F.embedding(tokens, self.embedding), []
        for layer in self.layers:
            entering.append(x)
            x = layer.finish(x, _causal(*layer.attention_inputs(x, self.rope, positions)))
        return [*(entering[tap] for tap in taps), rms_norm(x, self.norm, self.config.rms_norm_eps)]

    @torch.no_grad()
    def prefill(self, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple[Cache, Tensor]:
        """Cache of right-padded prompts ``tokens`` [B, N] and the logits [B, V] after each prompt's last token."""
        cache = Cache(self.config, tokens.shape[0], capacity, self.dtype)
        positions = torch.arange(tokens.shape[1])
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.attention_inputs(x, self.rope, positions)
            cache.keys[index][:, :, : k.shape[2]] = k
            cache.values[index][:, :, : v.shape[2]] = v
            x = layer.finish(x, _causal(q, k, v))
        cache.lengths = lengths.clone()
        return cache, self._logits(x[torch.arange(len(lengths)), lengths - 1])

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append one token a row (``tokens`` [B]) to the cache; logits [B, V] of the next."""
        c, rows = self.config, torch.arange(len(tokens))
        positions, longest = cache.lengths[:, None], int(cache.lengths.max()) + 1
        mask = (torch.arange(longest)[None] <= positions)[:, None, None]
        x = F.embedding(tokens[:, None], self.embedding)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.attention_inputs(x, self.rope, positions)
            cache.keys[index][rows, :, cache.lengths] = k[:, :, 0]
            cache.values[index][rows, :, cache.lengths] = v[:, :, 0]
            # The query heads of a group are laid along the query axis: no repeated keys.
            q = q.reshape(len(tokens), c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
            keys, values = cache.keys[index][:, :, :longest], cache.values[index][:, :, :longest]
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = layer.finish(x, attended.reshape(len(tokens), 1, -1))
        cache.lengths += 1
        return self._logits(x[:, 0])

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(rms_norm(x, self.norm, self.config.rms_norm_eps), self.lm_head).float()


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2).flatten(2)


class Cache:
    """Key and value rows of a batch, one buffer a layer: [B, kv_heads, capacity, D]."""

    def __init__(self, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype) -> None:
        size = (batch, config.num_kv_heads, capacity, config.head_dim)
        self.keys = [torch.zeros(size, dtype=dtype) for _ in range(config.num_layers)]
        self.values = [torch.zeros(size, dtype=dtype) for _ in range(config.num_layers)]
        self.lengths = torch.zeros(batch, dtype=torch.int64)

    def keep(self, rows: Tensor) -> None:
        """Drop every sequence but ``rows``."""
        self.keys = [buffer[rows] for buffer in self.keys]
        self.values = [buffer[rows] for buffer in self.values]
        self.lengths = self.lengths[rows]


def load_target(source: str | Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Target, Checkpoint]:
    """The model of a Hugging Face directory, hub id or GGUF file. Raises CheckpointError."""
    checkpoint = open_checkpoint(source)
    weights = {name: torch.from_numpy(source.read_float32().copy()) for name, source in checkpoint.tensors.items()}
    return Target(checkpoint.config, weights, dtype), checkpoint
