"""tree_attention in numpy: the oracle of the kernels."""

from __future__ import annotations

import numpy as np

from specrun.plugins.tree_attention.contract import SPLIT


def tree_attention(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    context_lengths: np.ndarray,
    positions: np.ndarray,
    tree_mask: np.ndarray,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> np.ndarray:
    """Attention of N new nodes over cache rows below the context length and the rows behind that ``tree_mask`` shows.

    Shapes as in the contract; returns float64 [B, N, H, D]. Raises ContractError outside the contract.
    """
    inputs = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "context_lengths": context_lengths,
        "positions": positions,
        "tree_mask": tree_mask,
    }
    SPLIT.check(inputs, {"scale": scale, "softcap": softcap, "window": window})
    attention = np.zeros(query.shape)
    for lane, context in enumerate(context_lengths.tolist()):
        if context < 0:
            continue
        visible = visibility(context, positions[lane], tree_mask[lane], window)
        rows = context + tree_mask.shape[2]
        keys = key_cache[lane, :, :rows].astype(np.float64)
        values = value_cache[lane, :, :rows].astype(np.float64)
        group = query.shape[2] // keys.shape[0]
        for head in range(query.shape[2]):
            scores = query[lane, :, head].astype(np.float64) @ keys[head // group].T * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            attention[lane, :, head] = masked_softmax(scores, visible) @ values[head // group]
    return attention


def visibility(context: int, positions: np.ndarray, tree_mask: np.ndarray, window: int) -> np.ndarray:
    """Which rows each node sees: bool [N, context + T] from ``positions`` [N] and ``tree_mask`` [N, T]."""
    visible = np.concatenate([np.ones((len(positions), context), dtype=bool), tree_mask], axis=1)
    if window:
        row_positions = np.concatenate([np.arange(context), positions])
        visible &= positions[:, None] - row_positions[None, :] < window
    return visible


def masked_softmax(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Softmax of each row over its visible columns; a row that sees nothing is all zeros."""
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(peak), peak, 0))
    total = weights.sum(axis=1, keepdims=True)
    return np.asarray(weights / np.where(total > 0, total, 1))


def merge(partial: np.ndarray, partial_lse: np.ndarray) -> np.ndarray:
    """Join partial results [B, N, H, splits, D] by their log-sum-exp [B, N, H, splits]: float64 [B, N, H, D]."""
    shape = partial_lse.shape
    lse = partial_lse.astype(np.float64).reshape(-1, shape[-1])
    weights = masked_softmax(lse, np.isfinite(lse)).reshape(*shape, 1)
    return np.asarray((weights * np.where(weights > 0, partial, 0)).sum(axis=3))
