"""The target model as a torch function for training: taps, final hidden states and batched generation.

Only the Llama family (RMSNorm, rotary embeddings, grouped-query attention, SiLU gate) is spelled out here: drafters are
distilled from hidden states, which the compiled engines emit too, but training wants them in bulk and in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama-family decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_eps: float
    rope_theta: float

    def taps(self) -> tuple[int, int, int]:
        """Layers whose *input* EAGLE-3 reads (the residual stream entering them)."""
        return 2, self.layers // 2, self.layers - 3


class Rope:
    """Rotary embedding in the half-split convention of Hugging Face checkpoints."""

    def __init__(self, head_dim: int, theta: float, length: int, dtype: torch.dtype) -> None:
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x`` [B, heads, N, D] by ``positions`` [B, N] or [N]."""
        cos, sin = self.cos[positions], self.sin[positions]
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalization over the last axis, statistics in float32."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x * scale.to(x.dtype)) * weight


class Target:
    """A frozen Llama-family model; weights by their Hugging Face names."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], dtype: torch.dtype, length: int = 4096) -> None:
        self.shape, self.dtype = shape, dtype
        self.weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.rope = Rope(shape.head_dim, shape.rope_theta, length, dtype)
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.lm_head = self.weights.get("lm_head.weight", self.embedding)
        self.layers = [self._layer(index) for index in range(shape.layers)]

    def _layer(self, index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        own = {name[len(prefix) :]: t for name, t in self.weights.items() if name.startswith(prefix)}
        qkv = torch.cat([own[f"self_attn.{name}_proj.weight"] for name in "qkv"])
        gate_up = torch.cat([own[f"mlp.{name}_proj.weight"] for name in ("gate", "up")])
        return own | {"qkv": qkv, "gate_up": gate_up}

    def _qkv(self, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        batch, nodes, _ = x.shape
        normed = rms_norm(x, layer["input_layernorm.weight"], s.norm_eps)
        qkv = F.linear(normed, layer["qkv"]).view(batch, nodes, -1, s.head_dim).transpose(1, 2)
        q, k, v = qkv.split((s.heads, s.kv_heads, s.kv_heads), 1)
        return self.rope(q, positions), self.rope(k, positions), v

    def _finish(self, layer: dict[str, Tensor], x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended, layer["self_attn.o_proj.weight"])
        normed = rms_norm(x, layer["post_attention_layernorm.weight"], self.shape.norm_eps)
        gate, up = F.linear(normed, layer["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["mlp.down_proj.weight"])

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, taps: Sequence[int]) -> list[Tensor]:
        """Residual streams entering the layers ``taps``, then the final normed state: each [B, N, H].

        ``tokens`` [B, N] is padded on the right; causality keeps the padding from the real rows.
        """
        positions = torch.arange(tokens.shape[1])
        x, kept = F.embedding(tokens, self.embedding), []
        for index, layer in enumerate(self.layers):
            if index in taps:
                kept.append(x)
            q, k, v = self._qkv(layer, x, positions)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._finish(layer, x, attended.transpose(1, 2).flatten(2))
        return [*kept, rms_norm(x, self.weights["model.norm.weight"], self.shape.norm_eps)]

    @torch.no_grad()
    def prefill(self, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple[Cache, Tensor]:
        """Cache of right-padded prompts ``tokens`` [B, N] and the logits [B, V] after each prompt's last token."""
        cache = Cache(self.shape, tokens.shape[0], capacity, self.dtype)
        positions = torch.arange(tokens.shape[1])
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, positions)
            cache.keys[index][:, :, : k.shape[2]] = k
            cache.values[index][:, :, : v.shape[2]] = v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._finish(layer, x, attended.transpose(1, 2).flatten(2))
        cache.lengths = lengths.clone()
        return cache, self._logits(x[torch.arange(len(lengths)), lengths - 1])

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append one token a row (``tokens`` [B]) to the cache; logits [B, V] of the next."""
        s, rows = self.shape, torch.arange(len(tokens))
        positions, longest = cache.lengths[:, None], int(cache.lengths.max()) + 1
        mask = (torch.arange(longest)[None] <= positions)[:, None, None]
        x = F.embedding(tokens[:, None], self.embedding)
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, positions)
            cache.keys[index][rows, :, cache.lengths] = k[:, :, 0]
            cache.values[index][rows, :, cache.lengths] = v[:, :, 0]
            keys, values = cache.keys[index][:, :, :longest], cache.values[index][:, :, :longest]
            # The query heads of a group are laid along the query axis: no repeated keys.
            q = q.reshape(len(tokens), s.kv_heads, s.heads // s.kv_heads, s.head_dim)
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = self._finish(layer, x, attended.reshape(len(tokens), 1, -1))
        cache.lengths += 1
        return self._logits(x[:, 0])

    def _logits(self, x: Tensor) -> Tensor:
        normed = rms_norm(x, self.weights["model.norm.weight"], self.shape.norm_eps)
        return F.linear(normed, self.lm_head).float()


class Cache:
    """Key and value rows of a batch, one buffer a layer: [B, kv_heads, capacity, D]."""

    def __init__(self, shape: Shape, batch: int, capacity: int, dtype: torch.dtype) -> None:
        size = (batch, shape.kv_heads, capacity, shape.head_dim)
        self.keys = [torch.zeros(size, dtype=dtype) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, dtype=dtype) for _ in range(shape.layers)]
        self.lengths = torch.zeros(batch, dtype=torch.int64)

    def keep(self, rows: Tensor) -> None:
        """Drop every sequence but ``rows``."""
        self.keys = [buffer[rows] for buffer in self.keys]
        self.values = [buffer[rows] for buffer in self.values]
        self.lengths = self.lengths[rows]


