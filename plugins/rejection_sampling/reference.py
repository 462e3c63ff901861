"""Rejection sampling in numpy, float64: the oracle of the kernels. Clear before fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specrun.plugins.rejection_sampling.contract import (
    BLOCK_WALK,
    BLOCK_WALK_DENSE,
    EXHAUSTED,
    MATCH_WALK,
    REJECTION_WALK,
    REJECTION_WALK_DENSE,
    SAMPLE_ROWS,
    STATISTICS,
    TYPICAL_WALK,
)

Arrays = dict[str, np.ndarray]


def sample_rows(capacity: int = 4096, **inputs: np.ndarray) -> Arrays:
    """Warp and draw every row: ``adjusted``, ``drawn`` and ``statistics`` as the contract describes them.

    The inputs are left as they are. Raises ContractError on other shapes or types.
    """
    bound = SAMPLE_ROWS.check(inputs, {"capacity": capacity})
    batch, nodes = bound.dims["B"], bound.dims["N"]
    adjusted = inputs["logits"].copy()
    drawn = np.zeros((batch, nodes), dtype=np.int64)
    statistics = np.zeros((batch, nodes, STATISTICS), dtype=np.float32)
    for b in range(batch):
        for n in range(nodes):
            lists = (inputs[name][b, n] for name in ("adjust_tokens", "adjust_counts", "adjust_bias"))
            adjusted[b, n] = adjust(adjusted[b, n], inputs["penalties"][b], *lists)
            temperature, top_k, top_p, min_p = (inputs[name][b] for name in ("temperature", "top_k", "top_p", "min_p"))
            drawn[b, n], statistics[b, n] = sample_row(
                adjusted[b, n], temperature, top_k, top_p, min_p, inputs["uniforms"][b, n]
            )
    return {"adjusted": adjusted, "drawn": drawn, "statistics": statistics}


def adjust(
    row: np.ndarray, penalties: np.ndarray, tokens: np.ndarray, counts: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """One row [V] after penalties and bias; ``tokens`` [A] are distinct, -1 pads."""
    out = row.astype(np.float32)
    repetition, frequency, presence = penalties
    for token, count, extra in zip(tokens, counts, bias, strict=True):
        if token < 0:
            continue
        value = out[token]
        if count >= 0:
            value = value / repetition if value > 0 else value * repetition
            value = value - frequency * count - presence * (count > 0)
        out[token] = value + extra
    return out


def sample_row(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> tuple[int, np.ndarray]:
    """The row's token and its statistics float32 [5]."""
    best = float(np.max(row))
    if not np.isfinite(best):
        return -1, np.array([0, 0, np.inf, 1, 0], dtype=np.float32)  # a law without any token
    if temperature <= 0:
        return int(np.argmax(row)), np.array([best, 0, best, 1, 0], dtype=np.float32)
    logits = row.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - best) / max(float(temperature), 1e-30))
    floor = smallest_kept(logits, weights, int(top_k), float(top_p), float(min_p))
    weights = np.where(logits >= floor, weights, 0)
    total = weights.sum()
    probs = weights[weights > 0] / total
    entropy = -np.sum(probs * np.log(probs))
    statistics = np.array([best, 1 / max(float(temperature), 1e-30), floor, total, entropy], dtype=np.float32)
    return quantile(weights, float(uniform)), statistics


def smallest_kept(logits: np.ndarray, weights: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest logit that top-k, then top-p, then min-p keep; ties with it are kept. -inf when nothing is cut."""
    floor = -np.inf
    order = np.argsort(-logits, kind="stable")
    if 0 < top_k < logits.size:
        floor = logits[order[top_k - 1]]
    kept = np.where(logits >= floor, weights, 0)[order]
    if top_p < 1:
        reached = int(np.searchsorted(np.cumsum(kept), top_p * kept.sum()))
        floor = max(floor, logits[order[min(reached, logits.size - 1)]])
    if min_p > 0:
        floor = max(floor, np.min(logits[weights >= min_p]))
    return float(floor)


def quantile(weights: np.ndarray, uniform: float) -> int:
    """The first index whose running sum exceeds ``uniform`` of the whole; never one of weight 0."""
    running = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(running, uniform * running[-1], side="right"))
    positive = np.flatnonzero(weights > 0)
    return int(min(index, positive[-1]))


class Verdicts(NamedTuple):
    """``path`` int64 [B, N], ``accepted`` int64 [B], ``next_token`` int64 [B]."""

    path: np.ndarray
    accepted: np.ndarray
    next_token: np.ndarray


class Sequence:
    """One sequence's arrays, and the laws at its nodes."""

    def __init__(self, inputs: Arrays, index: int) -> None:
        self.arrays = {name: array[index] for name, array in inputs.items()}
        self.size = int(self.arrays["nodes"])

    def __getattr__(self, name: str) -> np.ndarray:
        array: np.ndarray = self.arrays[name]
        return array

    def children(self, node: int) -> list[int]:
        return [n for n in range(node + 1, self.size) if self.parents[n] == node]

    def target(self, node: int) -> np.ndarray:
        """p at a node, float64 [V]."""
        best, scale, floor, total, _ = self.statistics[node].astype(np.float64)
        logits = self.logits[node].astype(np.float64)
        with np.errstate(under="ignore"):
            law: np.ndarray = np.where(logits >= floor, np.exp((logits - best) * scale), 0) / total
        return law

    def draft(self, node: int) -> np.ndarray:
        """q at a node, float64 [V]."""
        probs: np.ndarray = self.draft_probs[node].astype(np.float64)
        if "draft_tokens" not in self.arrays:
            return probs
        law = np.zeros(self.logits.shape[-1])
        listed = self.draft_tokens[node] >= 0
        law[self.draft_tokens[node][listed]] = probs[listed]
        return law


def match_walk(**inputs: np.ndarray) -> Verdicts:
    """Descend while a child holds the node's drawn token."""
    MATCH_WALK.check(inputs)
    return _each(inputs, match_one)


def typical_walk(epsilon: float = 0.09, delta: float = 0.3, **inputs: np.ndarray) -> Verdicts:
    """Medusa's typical acceptance (lossy): the longest path of tokens above the bar, the likelier one among equals."""
    TYPICAL_WALK.check(inputs, {"epsilon": epsilon, "delta": delta})
    return _each(inputs, lambda sequence: typical_one(sequence, epsilon, delta))


def rejection_walk(replacement: bool = True, **inputs: np.ndarray) -> Verdicts:
    """Tree rejection sampling, children drawn with or without replacement; a chain is a tree of one child a node."""
    contract = REJECTION_WALK if "draft_tokens" in inputs else REJECTION_WALK_DENSE
    contract.check(inputs, {"replacement": replacement})
    return _each(inputs, lambda sequence: rejection_one(sequence, replacement))


def block_walk(**inputs: np.ndarray) -> Verdicts:
    """Block verification of a chain."""
    contract = BLOCK_WALK if "draft_tokens" in inputs else BLOCK_WALK_DENSE
    contract.check(inputs)
    return _each(inputs, block_one)


def _each(inputs: Arrays, judge: Callable[[Sequence], tuple[list[int], int]]) -> Verdicts:
    batch, nodes = inputs["tokens"].shape
    path = np.full((batch, nodes), -1, dtype=np.int64)
    accepted, next_token = np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int64)
    for index in range(batch):
        sequence = Sequence(inputs, index)
        greedy = judge is not match_one and sequence.temperature <= 0
        walked, next_token[index] = match_one(sequence) if greedy else judge(sequence)
        path[index, : len(walked)] = walked
        accepted[index] = len(walked) - 1
    return Verdicts(path, accepted, next_token)


def match_one(sequence: Sequence) -> tuple[list[int], int]:
    path = [0]
    while True:
        token = sequence.drawn[path[-1]]
        child = next((c for c in sequence.children(path[-1]) if sequence.tokens[c] == token), None)
        if child is None:
            return path, int(token)
        path.append(child)


def typical_one(sequence: Sequence, epsilon: float, delta: float) -> tuple[list[int], int]:
    paths: dict[int, tuple[int, float, list[int]]] = {0: (0, 0.0, [0])}
    for node in range(1, sequence.size):
        parent = int(sequence.parents[node])
        if parent not in paths:
            continue
        chance = sequence.target(parent)[sequence.tokens[node]]
        if chance > min(epsilon, delta * np.exp(-float(sequence.statistics[parent, 4]))):
            depth, score, path = paths[parent]
            paths[node] = (depth + 1, score + np.log(chance), [*path, node])
    best = max(paths.values(), key=lambda p: p[:2])[2]
    return best, int(sequence.drawn[best[-1]])


def rejection_one(sequence: Sequence, replacement: bool) -> tuple[list[int], int]:
    path = [0]
    while True:
        node = path[-1]
        children = sequence.children(node)
        if not children:
            return path, int(sequence.drawn[node])
        remaining, conditioned = sequence.target(node), sequence.draft(node)
        undrawn = 1.0
        for child in children:
            if undrawn <= EXHAUSTED:
                continue
            token = sequence.tokens[child]
            if sequence.accept_uniforms[child] * conditioned[token] < remaining[token]:
                path.append(child)
                break
            remaining = residual(remaining, conditioned)
            if not replacement:
                undrawn *= 1 - conditioned[token]
                conditioned[token] = 0
                conditioned /= conditioned.sum() or 1
        else:
            return path, quantile(remaining, float(sequence.residual_uniforms[node]))


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """norm((p - q)+); p itself where nothing is left."""
    left = np.maximum(p - q, 0)
    return left / left.sum() if left.sum() > 0 else p


def block_one(sequence: Sequence) -> tuple[list[int], int]:
    path, prefix, kept, ending = [0], 1.0, 0, None
    while sequence.children(path[-1]) and prefix > 0:
        node = path[-1]
        p, q = sequence.target(node), sequence.draft(node)
        left = np.maximum(prefix * p - q, 0)
        if node == 0 or sequence.accept_uniforms[node] * (left.sum() + 1 - prefix) < left.sum():
            kept, ending = len(path) - 1, left if left.sum() > 0 else p
        child = sequence.children(node)[0]
        token = sequence.tokens[child]
        carried = prefix * p[token]
        prefix = 0.0 if carried == 0 else 1.0 if carried >= q[token] else carried / q[token]
        path.append(child)
    if ending is None or sequence.accept_uniforms[path[-1]] < prefix:
        return path, int(sequence.drawn[path[-1]])
    return path[: kept + 1], quantile(ending, float(sequence.residual_uniforms[path[kept]]))
