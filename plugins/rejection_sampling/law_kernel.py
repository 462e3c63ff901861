"""What the walks that know q compute with: p, q and (s p - c q)+ of tokens, its mass, a draw from it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def target(logits, statistics_ptr):
    """p of these logits, by the row's statistics."""
    best = tl.load(statistics_ptr)
    scale = tl.load(statistics_ptr + 1)
    floor = tl.load(statistics_ptr + 2)
    total = tl.load(statistics_ptr + 3)
    return tl.where(logits >= floor, tl.exp((logits - best) * scale) / total, 0.0)


@triton.jit
def listed(slots, tokens_ptr, probs_ptr, K):
    """q of these tokens, from a short list."""
    law = slots.to(tl.float32) * 0.0
    for k in range(0, K):
        law = tl.where(slots == tl.load(tokens_ptr + k).to(tl.int32), tl.load(probs_ptr + k), law)
    return law


@triton.jit
def remaining(
    slots, logits_ptr, statistics_ptr, tokens_ptr, probs_ptr, K, s, c, V: tl.constexpr, DENSE: tl.constexpr
):
    """(s p - c q)+ of these tokens."""
    inside = slots < V
    p = target(tl.load(logits_ptr + slots, mask=inside, other=float("-inf")), statistics_ptr)
    if DENSE:
        q = tl.load(probs_ptr + slots, mask=inside, other=0.0)
    else:
        q = listed(slots, tokens_ptr, probs_ptr, K)
    return tl.where(inside, tl.maximum(s * p - c * q, 0.0), 0.0)


@triton.jit
def mass(
    logits_ptr, statistics_ptr, tokens_ptr, probs_ptr, K, s, c, V: tl.constexpr, DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of (s p - c q)+ over the vocabulary."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        total += remaining(slots, logits_ptr, statistics_ptr, tokens_ptr, probs_ptr, K, s, c, V, DENSE)
    return tl.sum(total, 0)


@triton.jit
def draw(
    logits_ptr, statistics_ptr, tokens_ptr, probs_ptr, K, s, c, goal, V: tl.constexpr, DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token where the running sum of (s p - c q)+ exceeds ``goal``."""
    running = 0.0
    found = -1
    last = 0
    start = 0
    while (start < V) & (found < 0):
        slots = start + tl.arange(0, BLOCK)
        values = remaining(slots, logits_ptr, statistics_ptr, tokens_ptr, probs_ptr, K, s, c, V, DENSE)
        hit = (running + tl.cumsum(values, 0) > goal) & (values > 0)
        first = tl.min(tl.where(hit, slots, V), 0)
        found = tl.where(first < V, first, -1)
        last = tl.maximum(last, tl.max(tl.where(values > 0, slots, 0), 0))
        running += tl.sum(values, 0)
        start += BLOCK
    return tl.where(found < 0, last, found)


@triton.jit
def draft_at(token, tokens_ptr, probs_ptr, K, DENSE: tl.constexpr):
    """q of one token."""
    if DENSE:
        q = tl.load(probs_ptr + token)
    else:
        q = listed(token, tokens_ptr, probs_ptr, K)
    return q


@triton.jit
def draw_at(
    node, s, c, goal, logits_ptr, statistics_ptr, draft_tokens_ptr, draft_probs_ptr, K,
    V: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A draw from (s p - c q)+ at a node; pointers are one sequence's."""
    here = tl.full([], 0, tl.int64) + node
    row_ptr = logits_ptr + here * V
    list_ptr = draft_tokens_ptr + here * K
    probs_ptr = draft_probs_ptr + here * (V if DENSE else K)
    return draw(row_ptr, statistics_ptr + here * 5, list_ptr, probs_ptr, K, s, c, goal, V, DENSE, BLOCK)
