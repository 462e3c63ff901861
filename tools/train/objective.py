"""What a drafter learns, the target's next-token law at every drafted depth, and how well it has learned it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.train.drafters import Drafter, shifted
from tools.train.shards import Rows

DEPTH_DECAY = 0.8


class Vocabulary:
    """The LM-head rows that a loss is taken over."""

    def __init__(self, ids: Tensor, lm_head: Tensor) -> None:
        self.ids, self.rows = ids, lm_head[ids]
        self.place = torch.full((lm_head.shape[0],), -1, dtype=torch.int64)
        self.place[ids] = torch.arange(len(ids))


def likely_tokens(counts: Tensor, size: int) -> Tensor:
    """The ``size`` most frequent ids in ascending order: a draft vocabulary."""
    return counts.topk(size).indices.sort().values


def sampled_vocabulary(rows: Rows, counts: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """All ids of a batch plus others drawn by frequency: the softmax over them stands for the full one."""
    others = torch.multinomial((counts + 0.1).float(), size, generator=generator)
    return torch.cat((rows.tokens.flatten(), others)).unique()


def depth_losses(drafter: Drafter, rows: Rows, vocabulary: Vocabulary, depth: int) -> Iterator[Tensor]:
    """Soft cross-entropy against the target for each depth, over the tokens that ``vocabulary`` holds."""
    with torch.no_grad():
        teacher = F.linear(rows.hidden[:, :, -1], vocabulary.rows).float().softmax(-1)
    for step, feature in enumerate(drafter.features(rows, depth)):
        labels = vocabulary.place[shifted(rows.tokens, step + 2)]
        kept = (labels >= 0) & shifted(rows.real, step + 2)
        scores = F.linear(feature[kept].to(vocabulary.rows.dtype), vocabulary.rows)
        wanted = shifted(teacher, step + 1)[kept]
        yield -(wanted * scores.float().log_softmax(-1)).sum(-1).mean()


def total_loss(losses: Iterable[Tensor]) -> Tensor:
    """Deeper drafts weigh less: they are reached only when the shallower ones are accepted."""
    weighted = [(DEPTH_DECAY**step * loss, DEPTH_DECAY**step) for step, loss in enumerate(losses)]
    return sum((loss for loss, _ in weighted), torch.zeros(())) / sum(weight for _, weight in weighted)


@dataclass
class Acceptance:
    """Counts over response positions: drafted tokens that hit, and chains that hit at every depth so far, [depth]."""

    positions: Tensor
    hits: Tensor
    chains: Tensor
    ranked: Tensor

    @classmethod
    def none(cls, depth: int) -> Acceptance:
        zeros = [torch.zeros(depth, dtype=torch.int64) for _ in range(3)]
        return cls(zeros[0], zeros[1], zeros[2], torch.zeros(depth, 8, dtype=torch.int64))

    def add(self, drafter: Drafter, rows: Rows, vocabulary: Vocabulary) -> None:
        """Compare chained greedy drafts with the tokens that followed in the responses."""
        depth = len(self.hits)
        index = torch.arange(rows.tokens.shape[1])[None]
        alive = torch.ones_like(rows.real)
        for step, feature in enumerate(drafter.features(rows, depth)):
            counted = (index >= rows.prompt_lengths[:, None] - 1) & shifted(rows.real, step + 2)
            best = F.linear(feature.to(vocabulary.rows.dtype), vocabulary.rows).topk(8).indices
            equal = vocabulary.ids[best] == shifted(rows.tokens, step + 2)[..., None]
            alive &= equal[..., 0]
            self.positions[step] += counted.sum()
            self.hits[step] += (equal[..., 0] & counted).sum()
            self.chains[step] += (alive & counted).sum()
            self.ranked[step] += (equal & counted[..., None]).sum((0, 1))

    def by_depth(self) -> list[float]:
        """Share of positions whose drafted token at that depth is the target's, given the true tokens before it."""
        return (self.hits / self.positions.clamp(min=1)).tolist()

    def accepted(self) -> list[float]:
        """Mean accepted tokens for chains of length 1, 2, ..."""
        return (self.chains / self.positions.clamp(min=1)).cumsum(0).tolist()

    def by_rank(self) -> list[list[float]]:
        """Share of positions at which the token is the drafter's first, second, ... choice, for every depth."""
        return (self.ranked / self.positions.clamp(min=1)[:, None]).tolist()
