"""Inputs and pairs of the rejection sampling kernels' checks (see `kernel_checks`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from specrun.plugins.registry import OPS
from specrun.plugins.rejection_sampling import reference

Arrays = dict[str, np.ndarray]
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]
Attributes = dict[str, Any]


def row_inputs(rng: np.random.Generator, B: int, N: int, V: int, A: int, capacity: int) -> tuple[Arrays, Attributes]:
    """Every sequence another setting: dense, top-p, top-k with top-p, min-p, greedy, penalties."""
    each = np.arange(B)
    tokens = np.argsort(rng.random((B, N, V), dtype=np.float32), axis=-1)[..., :A]
    return {
        "logits": rng.normal(0, 2.5, (B, N, V)).astype(np.float32),
        "temperature": np.where(each % 5 == 4, 0, 0.8).astype(np.float32),
        "top_k": np.where(each % 5 == 2, 50, 0).astype(np.int32),
        "top_p": np.where(each % 5 == 0, 1, 0.9).astype(np.float32),
        "min_p": np.where(each % 5 == 3, 0.02, 0).astype(np.float32),
        "penalties": np.where(each[:, None] % 2 == 0, [1, 0, 0], [1.2, 0.3, 0.1]).astype(np.float32),
        "adjust_tokens": np.where(rng.random((B, N, A)) < 0.8, tokens, -1),
        "adjust_counts": rng.integers(-1, 3, (B, N, A)).astype(np.int32),
        "adjust_bias": rng.normal(0, 1, (B, N, A)).astype(np.float32),
        "uniforms": rng.random((B, N), dtype=np.float32),
    }, {"capacity": capacity}


def row_pairs(found: Arrays, inputs: Arrays, attributes: Attributes) -> Pairs:
    """The laws, and how far each draw is from its token's share of the running sum (0; 1e-5 is float32's rounding)."""
    expected = reference.sample_rows(**attributes, **inputs)
    law = _laws(expected["adjusted"], expected["statistics"])
    after = np.take_along_axis(np.cumsum(law, -1), found["drawn"][..., None], -1)[..., 0]
    before = after - np.take_along_axis(law, found["drawn"][..., None], -1)[..., 0]
    outside = np.maximum(before - inputs["uniforms"], inputs["uniforms"] - after) - 1e-5
    sampled = inputs["temperature"][:, None] > 0
    greedy = np.where(sampled, -1, expected["drawn"])
    return {
        "adjusted": (found["adjusted"], expected["adjusted"]),
        "law": (_laws(found["adjusted"], found["statistics"]), law),
        "entropy": (found["statistics"][..., 4], expected["statistics"][..., 4]),
        "sampled": (np.where(sampled, np.maximum(outside, 0), 0), np.zeros_like(outside)),
        "greedy": (np.where(sampled, -1, found["drawn"]), greedy),
    }


def _laws(adjusted: np.ndarray, statistics: np.ndarray) -> np.ndarray:
    best, scale, floor, total, _ = np.moveaxis(statistics.astype(np.float64)[..., None], -2, 0)
    return np.where(adjusted >= floor, np.exp((adjusted - best) * scale), 0) / total


def walk_inputs(
    rng: np.random.Generator, B: int, N: int, V: int, K: int, op: str, **attributes: Any
) -> tuple[Arrays, Attributes]:
    """Random trees (a chain for block verification) drawn from laws near a peaked target's; K = 0 for dense laws."""
    chain = "block" in op
    parents = np.stack([[-1, *(i - 1 if chain else rng.integers(0, i) for i in range(1, N))] for _ in range(B)])
    logits = rng.normal(0, 4, (B, N, V)).astype(np.float32)
    noisy = logits + rng.normal(0, 1, logits.shape)
    if K:
        noisy = np.where(noisy >= np.sort(noisy, axis=-1)[..., -K, None], noisy, -np.inf)
    laws = np.exp(noisy - noisy.max(-1, keepdims=True))
    laws = (laws / laws.sum(-1, keepdims=True)).astype(np.float32)
    tokens = _drawn(rng, parents, laws, again=attributes.get("replacement", True))
    settings = np.ones(B, np.float32)
    rows = reference.sample_rows(
        logits=logits,
        temperature=settings,
        top_k=np.zeros(B, np.int32),
        top_p=settings * np.float32(0.95),
        min_p=settings * 0,
        penalties=np.tile(np.float32([1, 0, 0]), (B, 1)),
        adjust_tokens=np.full((B, N, 1), -1),
        adjust_counts=np.full((B, N, 1), -1, np.int32),
        adjust_bias=np.zeros((B, N, 1), np.float32),
        uniforms=rng.random((B, N), dtype=np.float32),
    )
    listed = np.argsort(-laws, axis=-1)[..., : max(K, 1)]
    everything = {
        "tokens": tokens,
        "parents": parents,
        "nodes": rng.integers(1, N + 1, B).astype(np.int32),
        "drawn": rows["drawn"],
        "logits": logits,
        "statistics": rows["statistics"],
        "temperature": (np.arange(B) % 4 > 0).astype(np.float32),
        "draft_tokens": listed,
        "draft_probs": np.take_along_axis(laws, listed, -1) if K else laws,
        "accept_uniforms": rng.random((B, N), dtype=np.float32),
        "residual_uniforms": rng.random((B, N), dtype=np.float32),
    }
    return {tensor.name: everything[tensor.name] for tensor in OPS[op].contract.inputs}, attributes


def _drawn(rng: np.random.Generator, parents: np.ndarray, laws: np.ndarray, again: bool) -> np.ndarray:
    """Tokens of all nodes, each drawn from its parent's law, without its earlier siblings unless ``again``."""
    tokens = np.zeros(parents.shape, dtype=np.int64)
    for b, node in np.ndindex(parents.shape):
        if node:
            law = laws[b, parents[b, node]].astype(np.float64)
            siblings = tokens[b, 1:node][parents[b, 1:node] == parents[b, node]]
            if not again and (law > 0).sum() > siblings.size:
                law[siblings] = 0
            tokens[b, node] = rng.choice(law.size, p=law / law.sum())
    return tokens


def walk_pairs(oracle: Any) -> Any:
    """Pairs of a walk, by its oracle."""

    def pairs(found: Arrays, inputs: Arrays, attributes: Attributes) -> Pairs:
        expected = oracle(**attributes, **inputs)
        return {name: (found[name], getattr(expected, name)) for name in ("accepted", "next_token", "path")}

    return pairs


# op, length of the list of a sparse law (0: dense), oracle, attributes
WALKS: list[tuple[str, int, Any, Attributes]] = [
    ("match_walk", 8, reference.match_walk, {}),
    ("typical_walk", 8, reference.typical_walk, {}),
    ("rejection_walk", 8, reference.rejection_walk, {"replacement": False}),
    ("rejection_walk_dense", 0, reference.rejection_walk, {"replacement": True}),
    ("block_walk", 8, reference.block_walk, {}),
    ("block_walk_dense", 0, reference.block_walk, {}),
]
