"""A static n-gram table: the token that most often follows two or three tokens in the target's own text.

Keys are exact, packed tokens in ascending order, so a lookup is one binary search and there are no collisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.train.corpus import Corpus

BITS = 21  # three token ids below 2**21 fit one uint64


@dataclass(frozen=True)
class NgramTable:
    """Rows of one order: ``keys`` uint64 [R] ascending, ``next`` [R], ``count`` and ``total`` uint16 [R].

    ``total`` counts the occurrences of the context, ``count`` those followed by ``next``: their ratio is the
    acceptance to expect.
    """

    order: int
    keys: np.ndarray
    next: np.ndarray
    count: np.ndarray
    total: np.ndarray

    def lookup(self, context: Sequence[int]) -> tuple[int, float] | None:
        """(token, its share) after the last ``order`` tokens of ``context``; None for an unknown context."""
        key = pack(np.asarray(context[-self.order :], np.uint64)[None])[0]
        row = int(np.searchsorted(self.keys, key))
        if row == len(self.keys) or self.keys[row] != key:
            return None
        return int(self.next[row]), float(self.count[row]) / float(self.total[row])


def pack(contexts: np.ndarray) -> np.ndarray:
    """uint64 keys of ``contexts`` [R, order]; the newest token is the lowest 21 bits."""
    keys = np.zeros(len(contexts), np.uint64)
    for column in contexts.astype(np.uint64).T:
        keys = (keys << np.uint64(BITS)) | column
    return keys


def count_table(corpus: Corpus, order: int, least_count: int, least_share: float) -> NgramTable:
    """Count what follows every ``order`` tokens in the responses; keep contexts that predict well and often enough."""
    keys, following = _pairs(corpus, order)
    places = np.lexsort((following, keys))
    keys, following = keys[places], following[places]
    changed = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]) | (following[1:] != following[:-1])])
    pair_keys, pair_next = keys[changed], following[changed]
    pair_counts = np.diff(np.r_[changed, len(keys)])
    unique, first = np.unique(pair_keys, return_index=True)
    totals = np.add.reduceat(pair_counts, first)
    owner = np.repeat(np.arange(len(unique)), np.diff(np.r_[first, len(pair_keys)]))
    best = np.lexsort((-pair_counts, owner))[first]
    counts = pair_counts[best]
    kept = (counts >= least_count) & (counts >= least_share * totals)
    most = np.iinfo(np.uint16).max
    token = np.uint16 if pair_next.max() <= most else np.uint32
    scale = np.maximum(1.0, totals / most)
    small = [(values / scale).astype(np.uint16)[kept] for values in (counts, totals)]
    return NgramTable(order, unique[kept], pair_next[best].astype(token)[kept], *small)


def _pairs(corpus: Corpus, order: int) -> tuple[np.ndarray, np.ndarray]:
    keys, following = [], []
    for index in range(len(corpus)):
        tokens = corpus[index]
        start = max(order, int(corpus.prompt_lengths[index]))
        if len(tokens) > start:
            windows = np.lib.stride_tricks.sliding_window_view(tokens, order)[start - order : -1]
            keys.append(pack(windows))
            following.append(tokens[start:])
    return np.concatenate(keys), np.concatenate(following)


def arrays(tables: Sequence[NgramTable]) -> dict[str, np.ndarray]:
    """The file's arrays: ``keys_3``, ``next_3``, ``count_3``, ``total_3`` and so on for every order."""
    return {
        f"{name}_{table.order}": getattr(table, name) for table in tables for name in ("keys", "next", "count", "total")
    }
