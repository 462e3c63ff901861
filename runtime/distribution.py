"""Distribution: a probability law over the vocabulary, dense or on a short support. The rules compute with these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from specrun.proposal import DenseLaw, Law, SparseLaw
from specrun.tree import IntArray

Weights = npt.NDArray[np.floating[Any]]
BLOCK = 256  # a dense inverse CDF sums blocks first: a running sum over a whole vocabulary is slow


@dataclass(frozen=True, eq=False)
class Distribution:
    """Token ``tokens[i]`` (or ``i`` when dense) has probability ``weights[i] / total``.

    ``tokens`` is int64 [K], ascending and distinct, or None when ``weights`` covers the vocabulary. Dividing by the
    float64 total on reading makes every law sum to 1 to float64 accuracy, whatever its weights were rounded to.
    """

    tokens: IntArray | None
    weights: Weights

    @cached_property
    def total(self) -> float:
        """The weights' sum in float64; positive."""
        return float(self.weights.sum(dtype=np.float64))

    @property
    def probs(self) -> npt.NDArray[np.float64]:
        """float64 [K] (or [V] when dense): the probabilities, in the order of ``tokens``."""
        probs = _float64(self.weights)
        probs /= self.total
        return probs

    @staticmethod
    def point(token: int) -> Distribution:
        """All mass on one token."""
        return Distribution(np.array([token], dtype=np.int64), np.ones(1, dtype=np.float32))

    @staticmethod
    def of(law: Law) -> Distribution:
        """A drafter's law. ValueError when a token is listed twice, a weight is negative or nothing has mass."""
        if isinstance(law, DenseLaw):
            made = Distribution(None, law.probs)
        else:
            order = np.argsort(law.tokens, kind="stable")
            made = Distribution(law.tokens[order], law.probs[order])
            if np.any(np.diff(law.tokens[order]) <= 0):
                raise ValueError(f"SparseLaw: a token is listed twice in {law.tokens.tolist()}")
        if not (made.total > 0 and float(made.weights.min()) >= 0):
            raise ValueError(f"law: weights must be non-negative with a positive sum, found a sum of {made.total}")
        return made

    def law(self) -> Law:
        """The same law in a Proposal's form; weights of a warped row pass through unrounded."""
        probs = self.weights.astype(np.float32, copy=False)
        return DenseLaw(probs) if self.tokens is None else SparseLaw(self.tokens, probs)

    def at(self, token: int) -> float:
        """The probability of one token; 0 outside the support."""
        if self.tokens is None:
            return float(self.weights[token]) / self.total if token < self.weights.size else 0.0
        slot = int(np.searchsorted(self.tokens, token))
        found = slot < self.tokens.size and self.tokens[slot] == token
        return float(self.weights[slot]) / self.total if found else 0.0

    def on(self, tokens: IntArray) -> npt.NDArray[np.float64]:
        """float64 [len(tokens)]: the probabilities of ``tokens``."""
        if self.tokens is None:
            return _float64(self.weights[tokens]) / self.total
        slots = np.minimum(np.searchsorted(self.tokens, tokens), self.tokens.size - 1)
        return np.where(self.tokens[slots] == tokens, _float64(self.weights[slots]) / self.total, 0.0)

    def excess(self, other: Distribution, scale: float = 1.0) -> tuple[Distribution, float]:
        """``(scale * self - other)+`` normalized, and its mass before that.

        Where the mass is 0 (equal laws, or equal up to rounding) the law returned is ``self``: a draw from it is what
        the residual's limit would be.
        """
        left = self.probs
        left *= scale
        if self.tokens is not None:
            left -= other.on(self.tokens)
        elif other.tokens is None:
            left -= other.probs
        else:
            left[other.tokens] -= other.probs
        np.maximum(left, 0.0, out=left)
        mass = float(left.sum())
        return (Distribution(self.tokens, left), mass) if mass > 0 else (self, 0.0)

    def without(self, token: int) -> Distribution | None:
        """The law conditioned on not being ``token``; None when nothing else has mass."""
        weights = self.weights.astype(np.float64)
        if self.tokens is None:
            weights[token] = 0.0
        else:
            weights[self.tokens == token] = 0.0
        return Distribution(self.tokens, weights) if weights.sum() > 0 else None

    def quantile(self, u: float) -> int:
        """The token where the running sum, in order of token id, first exceeds ``u``; ``u`` in [0, 1).

        A token of probability 0 is never returned: the sum must pass ``u`` strictly, at a positive weight.
        """
        slot = running_index(self.weights, u * self.total, "right")
        return slot if self.tokens is None else int(self.tokens[slot])


def _float64(weights: Weights) -> npt.NDArray[np.float64]:
    return weights.astype(np.float64)


def running_index(weights: Weights, target: float, side: Literal["left", "right"]) -> int:
    """The first index whose running float64 sum reaches ``target`` (``left``) or exceeds it (``right``).

    The last positive weight's index when rounding leaves none.
    """
    start = 0
    if weights.size > 4 * BLOCK:
        whole = weights.size // BLOCK * BLOCK
        sums = np.cumsum(weights[:whole].reshape(-1, BLOCK).sum(axis=1, dtype=np.float64))
        block = int(np.searchsorted(sums, target, side=side))
        start = block * BLOCK
        target -= float(sums[block - 1]) if block else 0.0
        weights = weights[start : start + BLOCK] if start < whole else weights[start:]
    running = np.cumsum(weights, dtype=np.float64)
    slot = int(np.searchsorted(running, target, side=side))
    if slot == weights.size or weights[slot] == 0:
        slot = int(np.flatnonzero(weights)[-1])
    return start + slot
