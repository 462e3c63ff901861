"""draft_tree in numpy and Python: the oracle of the kernels and of the twin that the host runs (`host.py`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from specrun.plugins.draft_tree.contract import CANDIDATES, FRONTIER, RERANK, chunk_count


class Level(NamedTuple):
    """One level of growth: ``tokens`` int64 and ``scores`` float32 [B, K, children]; ``frontier`` int64 [B, width]."""

    tokens: np.ndarray
    scores: np.ndarray
    frontier: np.ndarray


class Reranked(NamedTuple):
    """The final tree, as `contract.RERANK` defines its outputs."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    kept: np.ndarray
    tree_mask: np.ndarray


def expand(logits: np.ndarray, parent_scores: np.ndarray, children: int, width: int) -> Level:
    """Grow one level from float32 ``logits`` [B, K, V] and cumulative ``parent_scores`` float32 [B, K]."""
    CANDIDATES.check({"logits": logits}, {"children": children, "chunks": chunk_count(logits.shape[-1])})
    shape = (*logits.shape[:2], children)
    tokens, scores = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    FRONTIER.check({"scores": scores}, {"width": width})
    frontier = np.zeros((len(logits), width), np.int64)
    for lane in range(len(logits)):
        for node, row in enumerate(logits[lane]):
            best = sorted(range(len(row)), key=lambda token: (-_number(row[token]), token))[:children]
            total = log_sum_exp(row)
            for child, token in enumerate(best):
                log_q = np.float32(min(_number(row[token]) - total, 0.0)) if total > -math.inf else -np.inf
                tokens[lane, node, child] = token
                scores[lane, node, child] = parent_scores[lane, node] + log_q
        flat = scores[lane].ravel()
        frontier[lane] = sorted(range(len(flat)), key=lambda place: (-flat[place], place))[:width]
    return Level(tokens, scores, frontier)


def rerank(
    pool_tokens: np.ndarray,
    pool_scores: np.ndarray,
    pool_parents: np.ndarray,
    pool_depths: np.ndarray,
    root_tokens: np.ndarray,
    nodes: int,
) -> Reranked:
    """Keep the best ``nodes - 1`` candidates of each lane's pool [B, P], and the root."""
    names = ("pool_tokens", "pool_scores", "pool_parents", "pool_depths", "root_tokens")
    pool = (pool_tokens, pool_scores, pool_parents, pool_depths, root_tokens)
    bound = RERANK.check(dict(zip(names, pool, strict=True)), {"nodes": nodes})
    made = [np.zeros(shape, dtype) for shape, dtype in RERANK.output_layouts(bound).values()]
    result = Reranked(*made)
    for lane in range(len(pool_tokens)):
        order = sorted(
            range(pool_tokens.shape[1]),
            key=lambda place: (-_number(pool_scores[lane, place]), pool_depths[lane, place], place),
        )
        kept = [-1, *sorted(order[: nodes - 1])]
        for node, place in enumerate(kept):
            root = place < 0
            parent = -1 if root else kept.index(int(pool_parents[lane, place]))
            result.tokens[lane, node] = root_tokens[lane] if root else pool_tokens[lane, place]
            result.parents[lane, node] = parent
            result.depths[lane, node] = 0 if root else pool_depths[lane, place]
            result.kept[lane, node] = place
            if not root:
                result.tree_mask[lane, node] = result.tree_mask[lane, parent]
            result.tree_mask[lane, node, node] = True
    return result


def log_sum_exp(row: np.ndarray) -> float:
    """log(sum(exp(row))) of a vector in float64; NaN counts as -inf."""
    numbers = np.where(np.isnan(row), -np.inf, row).astype(np.float64)
    peak = float(numbers.max())
    return peak if math.isinf(peak) else peak + math.log(float(np.exp(numbers - peak).sum()))


def _number(value: float) -> float:
    return -math.inf if math.isnan(value) else float(value)
