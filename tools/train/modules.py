"""Blocks that the trainable drafters share; parameter names are those of the public checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbuild.config import ModelConfig
from tools.train.target import Rope


class Norm(nn.Module):
    """RMS normalization with a learned scale."""

    def __init__(self, size: int, eps: float, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), scale))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention over ``width`` input features, with the extra rows of an unrolled draft."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Rope, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend from ``x`` [B, N, width], the inputs of unrolled step ``len(past)``, and append its keys to ``past``.

        Row t of step k stands at position t + k. It sees rows 0..t of step 0 (features of the target) and row t of
        every later step up to its own: the rows that drafting has in its cache.
        """
        step = len(past)
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        positions = torch.arange(x.shape[1]) + step
        q, k = rope(q, positions).to(v.dtype), rope(k, positions).to(v.dtype)
        past.append((k, v))
        if step == 0:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            attended = self._unrolled(q, past)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _unrolled(self, q: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        group = self.config.num_heads // self.config.num_kv_heads
        past = [(k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for k, v in past]
        (keys, values), later = past[0], past[1:]
        ahead = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ keys.transpose(-1, -2)).masked_fill(ahead, float("-inf"))
        own = torch.stack([(q * k).sum(-1) for k, _ in later], -1)
        weights = (torch.cat((scores, own), -1) * self.config.head_dim**-0.5).float().softmax(-1).to(q.dtype)
        attended = weights[..., : q.shape[2]] @ values
        for index, (_, v) in enumerate(later):
            attended = attended + weights[..., q.shape[2] + index, None] * v
        return attended


class Mlp(nn.Module):
    """SiLU-gated feed-forward block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama layer; EAGLE-1's first layer has no ``input_layernorm``."""

    def __init__(self, config: ModelConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = Mlp(config)
        if input_norm:
            self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        normed = self.input_layernorm(x) if hasattr(self, "input_layernorm") else x
        x = x + self.self_attn(normed, rope, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class FusionLayer(nn.Module):
    """EAGLE-3's midlayer: attention reads concat[norm(embedding), norm(feature)], the residual is the feature."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedding: Tensor, feature: Tensor, rope: Rope, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat((self.input_layernorm(embedding), self.hidden_norm(feature)), -1)
        x = feature + self.self_attn(both, rope, past)
        return x + self.mlp(self.post_attention_layernorm(x))
