"""Batched generation with the target: what the drafters learn from is the target's own text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specrun.engine import Engine
from specrun.sampling import SamplingParams
from tools.train.target import Cache, Target


@dataclass(frozen=True)
class Warp:
    """How the next token is chosen: temperature 0 is greedy, otherwise nucleus sampling."""

    temperature: float = 0.0
    top_p: float = 1.0

    def pick(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """One token a row [B] of logits [B, V]; the nucleus is looked for among the 256 likeliest."""
        if self.temperature == 0.0:
            return logits.argmax(-1)
        top, ids = logits.topk(min(256, logits.shape[-1]))
        probabilities = (top / self.temperature).softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities > self.top_p
        choice = torch.multinomial(probabilities.masked_fill(outside, 0.0), 1, generator=generator)
        return ids.gather(-1, choice)[:, 0]


@dataclass
class _Batch:
    """Sequences decoded together; finished ones leave once they are a quarter of the rows."""

    owners: list[int]
    cache: Cache
    pending: Tensor
    texts: dict[int, list[int]] = field(default_factory=dict)

    def compact(self, alive: Tensor) -> None:
        rows = alive.nonzero()[:, 0]
        self.cache.keep(rows)
        self.pending = self.pending[rows]
        self.owners = [self.owners[row] for row in rows.tolist()]


def batches_by_length(lengths: Sequence[int], most_rows: int, most_tokens: int) -> Iterator[list[int]]:
    """Indices grouped so that a group's padded size is at most ``most_tokens`` and its lengths are near each other."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and (len(group) == most_rows or (len(group) + 1) * lengths[index] > most_tokens):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


class Writer(Protocol):
    """Continues prompts until a stop id or a limit."""

    def run(self, prompts: Sequence[Sequence[int]], limit: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (index of the prompt, new tokens, stop id included), in any order."""


MakeWriter = Callable[[Warp, int], Writer]  # how tokens are chosen, and the seed


class CompiledWriter:
    """Writes with a compiled bundle: what it emits is what ``specrun`` emits, drafted or not."""

    def __init__(self, engine: Engine, warp: Warp, seed: int = 0) -> None:
        self.engine, self.warp, self.seed = engine, warp, seed

    def run(self, prompts: Sequence[Sequence[int]], limit: int) -> Iterator[tuple[int, list[int]]]:
        """Batches of as many prompts as the bundle has lanes."""
        lanes = self.engine.manifest.limits.max_batch
        for group in batches_by_length([len(prompt) for prompt in prompts], lanes, most_tokens=1 << 30):
            settings = {"max_tokens": limit, "temperature": self.warp.temperature, "top_p": self.warp.top_p}
            params = [SamplingParams(**settings, seed=self.seed + index) for index in group]
            results = self.engine.generate_batch([list(prompts[index]) for index in group], params)
            yield from zip(group, (result.token_ids for result in results), strict=True)


class Generator:
    """Writes with the torch target, in bf16 and in large batches."""

    def __init__(self, target: Target, stops: Sequence[int], warp: Warp, seed: int = 0) -> None:
        self.target, self.warp = target, warp
        self.stops = torch.tensor(list(stops))
        self.random = torch.Generator().manual_seed(seed)

    def run(self, prompts: Sequence[Sequence[int]], limit: int, rows: int = 96) -> Iterator[tuple[int, list[int]]]:
        """Yield (index of the prompt, new tokens) as batches end, stop ids included."""
        for group in batches_by_length([len(prompt) for prompt in prompts], rows, most_tokens=65536):
            yield from self._batch({index: prompts[index] for index in group}, limit).items()

    def _batch(self, prompts: dict[int, Sequence[int]], limit: int) -> dict[int, list[int]]:
        batch = self._prefill(prompts, limit)
        alive = torch.ones(len(batch.owners), dtype=torch.bool)
        for _ in range(limit):
            for owner, token, live in zip(batch.owners, batch.pending.tolist(), alive.tolist(), strict=True):
                if live:
                    batch.texts[owner].append(token)
            alive &= ~torch.isin(batch.pending, self.stops)
            if not alive.any():
                break
            if alive.sum() < 0.75 * len(alive):
                batch.compact(alive)
                alive = alive[alive]
            batch.pending = self.warp.pick(self.target.decode(batch.pending, batch.cache), self.random)
        return batch.texts

    def _prefill(self, prompts: dict[int, Sequence[int]], limit: int) -> _Batch:
        lengths = torch.tensor([len(prompt) for prompt in prompts.values()])
        longest = int(lengths.max())
        tokens = torch.zeros(len(lengths), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts.values()):
            tokens[row, : len(prompt)] = torch.as_tensor(prompt)
        cache, logits = self.target.prefill(tokens, lengths, longest + limit + 1)
        pending = self.warp.pick(logits, self.random)
        return _Batch(list(prompts), cache, pending, {owner: [] for owner in prompts})
