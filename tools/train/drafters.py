"""The drafters that can be trained, each as: features of a batch -> the features that predict, one per unrolled depth.

Every drafter answers the same question. Row t knows the tokens up to t + 1 and the target's states up to t; the
prediction at depth d is a feature whose product with LM-head rows scores token t + 2 + d. (The draft model and Medusa
know no token beyond their own row; they are shifted into the same frame.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbuild.config import ModelConfig
from tools.train.modules import DecoderLayer, FusionLayer, Norm
from tools.train.shards import Rows
from tools.train.target import Rope, Target

Past = list[tuple[Tensor, Tensor]]


def shifted(x: Tensor, by: int) -> Tensor:
    """Row t of the result is row t + ``by`` of ``x`` [B, N, ...]; zeros follow the end."""
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1) if by else x


class Drafter(nn.Module):
    """What the training loop needs of a drafter."""

    reduced_vocabulary = False
    max_depth = 8

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.config: ModelConfig = target.config
        self.frozen = (target.embedding, target.lm_head)
        self.rope = Rope(self.config, min(4096, self.config.max_position), torch.float32)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embedding, which all drafters borrow."""
        return F.embedding(tokens, self.frozen[0])

    def features(self, rows: Rows, depth: int) -> list[Tensor]:
        """``depth`` tensors [B, N, H]."""
        raise NotImplementedError


class Eagle3(Drafter):
    """One layer over the fused taps; chained through its own un-normed output (EAGLE-3, section 3)."""

    reduced_vocabulary = True

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        hidden = self.config.hidden_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = FusionLayer(self.config)
        self.norm = Norm(hidden, self.config.rms_norm_eps)
        # A random head is confident and wrong under the target's LM head: small logits at first train faster.
        self.norm.weight.data = 0.4 * target.norm.float()

    def features(self, rows: Rows, depth: int) -> list[Tensor]:
        feature = self.fc(rows.hidden[:, :, :3].flatten(2))
        past: Past = []
        outputs = []
        for step in range(depth):
            feature = self.midlayer(self.embed(shifted(rows.tokens, step + 1)), feature, self.rope, past)
            outputs.append(self.norm(feature))
        return outputs


class Eagle(Drafter):
    """EAGLE-1: predicts the target's next final hidden state, to which the target's LM head applies."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.fc = nn.Linear(2 * self.config.hidden_size, self.config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(self.config, input_norm=False)])

    def features(self, rows: Rows, depth: int) -> list[Tensor]:
        feature = rows.hidden[:, :, -1].float()
        past: Past = []
        outputs = []
        for step in range(depth):
            embedding = self.embed(shifted(rows.tokens, step + 1))
            fused = self.fc(torch.cat((embedding, feature.to(embedding.dtype)), -1))
            feature = self.layers[0](fused, self.rope, past)
            outputs.append(feature)
        return outputs


class ResidualBlock(nn.Module):
    """Medusa's block: x + SiLU(W x + b), W = 0 at first so that a new head repeats the target's prediction."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(Drafter):
    """Independent heads on the final hidden state; the target's LM head serves them all."""

    max_depth = 4

    def __init__(self, target: Target, blocks: int = 1) -> None:
        super().__init__(target)
        size = self.config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(blocks))) for _ in range(self.max_depth)
        )

    def features(self, rows: Rows, depth: int) -> list[Tensor]:
        state = rows.hidden[:, :, -1].float()
        return [head(state) for head in list(self.heads)[:depth]]


class DraftModel(Drafter):
    """A small Llama-family model between the target's embedding and the target's LM head."""

    def __init__(self, target: Target, layers: int = 2) -> None:
        super().__init__(target)
        self.layers = nn.ModuleList(DecoderLayer(self.config) for _ in range(layers))
        self.norm = Norm(self.config.hidden_size, self.config.rms_norm_eps)
        self.norm.weight.data = 0.4 * target.norm.float()

    def features(self, rows: Rows, depth: int) -> list[Tensor]:
        x = self.embed(rows.tokens).float()
        for layer in self.layers:
            x = layer(x, self.rope, [])
        x = self.norm(x)
        # Given accepted tokens, its depth-d prediction is its ordinary one, d + 1 rows further on.
        return [shifted(x, step + 1) for step in range(depth)]


@dataclass(frozen=True)
class Kind:
    """How a kind is made and how deep its training unrolls as progress goes from 0 to 1."""

    make: Callable[[Target], Drafter]
    depth: Callable[[float], int]


def late_unrolling(progress: float) -> int:
    """One step for most of the run (it is the fastest), two and three at its end, when depths are learned."""
    return 1 if progress < 0.65 else 2 if progress < 0.85 else 3


KINDS: dict[str, Kind] = {
    "eagle3": Kind(Eagle3, late_unrolling),
    "eagle": Kind(Eagle, late_unrolling),
    "medusa": Kind(Medusa, lambda progress: Medusa.max_depth),
    "draft-model": Kind(DraftModel, lambda progress: 1),
}
