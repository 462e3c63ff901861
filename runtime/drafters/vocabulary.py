"""The ids a drafter speaks of, in terms of the target's."""

from __future__ import annotations

import numpy as np

from specrun.distribution import Distribution
from specrun.proposal import FloatArray, Law
from specrun.tree import IntArray


class Vocabulary:
    """``target_ids`` int64 [V_draft] maps a pruned vocabulary's columns to the target's ids; None: they are the same.

    ``size``: the target's ids end here; columns beyond are padding and never drafted.
    """

    def __init__(self, size: int, target_ids: IntArray | None = None) -> None:
        self.size = size
        self.target_ids = target_ids
        self._padding = None if target_ids is None else np.flatnonzero(target_ids >= size)

    def row(self, logits: FloatArray) -> FloatArray:
        """A drafter's logits without padding: one column an id of the target, or one an id of the pruned vocabulary."""
        if self._padding is not None:
            if self._padding.size:
                logits = logits.copy()
                logits[self._padding] = -np.inf
            return logits
        if logits.size >= self.size:
            return logits[: self.size]
        return np.concatenate([logits, np.full(self.size - logits.size, -np.inf, dtype=np.float32)])

    def to_target(self, columns: IntArray) -> IntArray:
        """The target's ids of some columns."""
        return columns if self.target_ids is None else self.target_ids[columns]

    @staticmethod
    def probability(law: Law, token: int) -> float:
        return Distribution.of(law).at(token)
