"""For drafters that sample: warp their logits as the request asks, draw, and hand over exactly the law drawn from."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.distribution import Distribution
from specrun.proposal import FloatArray, Law, SparseLaw
from specrun.random import Chance, Stream
from specrun.sampling import SamplingParams
from specrun.tree import IntArray
from specrun.warp import History, warp


def draft_law(
    row: FloatArray,
    params: SamplingParams,
    history: History,
    path: Sequence[int] = (),
    vocabulary: IntArray | None = None,
) -> Law:
    """The law of a drafter's next token after ``history`` and the drafted ``path``, in the target's token ids.

    ``row`` is float32 [V_draft]; ``vocabulary`` int64 [V_draft] maps a pruned vocabulary's rows to target ids.
    Penalties and bias speak of target ids, so a pruned vocabulary goes without them: that costs acceptance, never
    correctness.
    """
    if vocabulary is None:
        return warp(row, params, history, path).law()
    plain = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    warped = warp(row, plain, history)
    return SparseLaw(vocabulary if warped.tokens is None else vocabulary[warped.tokens], warped.weights)


def draw_with_replacement(law: Law, count: int, chance: Chance, position: int, first: int) -> list[int]:
    """``count`` independent tokens of ``law``; duplicates happen and are right.

    ``position`` is the place right after the draft's root; ``first`` the index of the first drawn node, which makes
    every draw of one draft distinct.
    """
    source = Distribution.of(law)
    return [chance.choose(source, position, Stream.DRAFT, first + i) for i in range(count)]


def draw_without_replacement(law: Law, count: int, chance: Chance, position: int, first: int) -> list[int]:
    """Up to ``count`` distinct tokens of ``law``, each conditioned on the earlier ones; fewer when its support ends."""
    drawn: list[int] = []
    source: Distribution | None = Distribution.of(law)
    while source is not None and len(drawn) < count:
        drawn.append(chance.choose(source, position, Stream.DRAFT, first + len(drawn)))
        source = source.without(drawn[-1])
    return drawn
