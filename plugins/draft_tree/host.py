"""draft_tree on the host: the oracle's results from whole-array numpy, for vocabularies of real size."""

from __future__ import annotations

import numpy as np

from specrun.plugins.draft_tree.contract import CANDIDATES, FRONTIER, RERANK, chunk_count
from specrun.plugins.draft_tree.reference import Level, Reranked


def expand(logits: np.ndarray, parent_scores: np.ndarray, children: int, width: int) -> Level:
    """Grow one level from float32 ``logits`` [B, K, V] and cumulative ``parent_scores`` float32 [B, K].

    ``frontier`` [B, width] holds the best of the K x children new nodes, as parent * children + child, best first.
    Raises ContractError outside the contract.
    """
    CANDIDATES.check({"logits": logits}, {"children": children, "chunks": chunk_count(logits.shape[-1])})
    batch, parents, vocabulary = logits.shape
    rows = np.where(np.isnan(logits), np.float32(-np.inf), logits).reshape(-1, vocabulary)
    tokens = np.stack([best_tokens(row, children) for row in rows])
    with np.errstate(invalid="ignore"):  # a row of nothing but -inf: -inf less -inf
        log_q = np.minimum(np.take_along_axis(rows, tokens, 1) - _log_sum_exp(rows), 0)
    log_q[np.isnan(log_q)] = -np.inf
    scores = (parent_scores.reshape(-1, 1) + log_q).astype(np.float32).reshape(batch, parents, children)
    FRONTIER.check({"scores": scores}, {"width": width})
    frontier = np.argsort(-scores.reshape(batch, -1), axis=1, kind="stable")[:, :width]
    return Level(tokens.reshape(scores.shape), scores, frontier)


def best_tokens(row: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` best entries of ``row`` [V], best first, lower ids first on ties; no NaN. Partial sort: O(V)."""
    threshold = np.partition(row, len(row) - count)[len(row) - count]
    above = np.flatnonzero(row > threshold)
    tied = np.flatnonzero(row == threshold)[: count - len(above)]
    best = np.concatenate([above, tied])
    return best[np.argsort(-row[best], kind="stable")]


def rerank(
    pool_tokens: np.ndarray,
    pool_scores: np.ndarray,
    pool_parents: np.ndarray,
    pool_depths: np.ndarray,
    root_tokens: np.ndarray,
    nodes: int,
) -> Reranked:
    """Keep the best ``nodes - 1`` candidates of each lane's pool [B, P], and the root; shapes as in `contract.RERANK`.

    Raises ContractError outside the contract.
    """
    names = ("pool_tokens", "pool_scores", "pool_parents", "pool_depths", "root_tokens")
    pool = (pool_tokens, pool_scores, pool_parents, pool_depths, root_tokens)
    bound = RERANK.check(dict(zip(names, pool, strict=True)), {"nodes": nodes})
    batch, size = bound.dims["B"], bound.dims["P"]
    scores = np.where(np.isnan(pool_scores), -np.inf, pool_scores)
    best = np.lexsort((pool_depths, -scores), axis=1)[:, : nodes - 1]  # a stable sort: ties keep the pool's order
    kept = np.sort(best, axis=1)
    lanes = np.arange(batch)[:, None]
    node_of = np.zeros((batch, size + 1), np.int64)  # the last column is the root's, which parent -1 finds
    node_of[lanes, kept] = np.arange(1, nodes)
    root = np.full((batch, 1), -1)
    parents = np.concatenate([root, node_of[lanes, pool_parents[lanes, kept]]], axis=1)
    return Reranked(
        tokens=np.concatenate([root_tokens[:, None], pool_tokens[lanes, kept]], axis=1),
        parents=parents,
        depths=np.concatenate([root + 1, pool_depths[lanes, kept]], axis=1),
        kept=np.concatenate([root, kept], axis=1),
        tree_mask=_ancestors(parents),
    )


def _ancestors(parents: np.ndarray) -> np.ndarray:
    """Node i sees node j: bool [B, nodes, nodes], parents first."""
    batch, nodes = parents.shape
    mask = np.zeros((batch, nodes, nodes), dtype=bool)
    mask[:, np.arange(nodes), np.arange(nodes)] = True
    lanes = np.arange(batch)
    for node in range(1, nodes):
        mask[:, node] |= mask[lanes, parents[:, node]]
    return mask


def _log_sum_exp(rows: np.ndarray) -> np.ndarray:
    peak = rows.max(axis=1, keepdims=True)
    base = np.where(np.isfinite(peak), peak, 0)
    with np.errstate(divide="ignore"):
        return np.asarray(base + np.log(np.exp(rows - base).sum(axis=1, keepdims=True)))
