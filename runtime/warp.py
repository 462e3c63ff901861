"""From a row of logits to the law that a request samples from: penalties, bias, temperature, top-k, top-p, min-p."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.distribution import Distribution, running_index
from specrun.errors import RequestError, UserError
from specrun.proposal import FloatArray
from specrun.sampling import SamplingParams
from specrun.tree import IntArray

DENSE = 8  # a law on more than an eighth of the vocabulary is kept dense
COLDEST = 1e-30  # below it a temperature's reciprocal overflows float32; the law is the limit long before


class History:
    """The tokens of one sequence and how often each occurs in its output, kept incrementally.

    Holds every token up to and including the pending one.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(max(64, len(prompt)), dtype=np.int64)
        self._output = np.zeros(self._ids.size, dtype=np.int64)
        for token in prompt:
            self._slot(int(token))
            self.tokens.append(int(token))
        self.prompt_length = len(self.tokens)

    def append(self, token: int) -> None:
        """One more output token."""
        slot = self._slot(token)  # first: it may move the arrays
        self._output[slot] += 1
        self.tokens.append(token)

    def output_count(self, token: int) -> int:
        """How often ``token`` occurs in the output."""
        slot = self._slots.get(token)
        return 0 if slot is None else int(self._output[slot])

    def along(self, path: Sequence[int]) -> tuple[IntArray, IntArray]:
        """int64 [K] twice: the distinct tokens of the sequence and ``path``, and each one's count in the output."""
        size = len(self._slots)
        if not path:
            return self._ids[:size], self._output[:size]
        fresh = list(dict.fromkeys(token for token in path if token not in self._slots))
        slots = {token: size + i for i, token in enumerate(fresh)}
        counts = np.concatenate([self._output[:size], np.zeros(len(fresh), dtype=np.int64)])
        for token in path:
            counts[self._slots[token] if token in self._slots else slots[token]] += 1
        return np.concatenate([self._ids[:size], np.array(fresh, dtype=np.int64)]), counts

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._output = np.concatenate([self._output, np.zeros_like(self._output)])
            self._ids[slot] = token
        return slot


def penalized(row: FloatArray, params: SamplingParams, history: History, path: Sequence[int] = ()) -> FloatArray:
    """The logits [V] after penalties and bias, at the position that follows ``history`` and the drafted ``path``.

    Returns ``row`` itself when nothing applies, else a copy. RequestError when a bias names a token outside V.
    """
    if not params.penalized and not params.logit_bias:
        return row
    out = np.array(row, dtype=np.float32)
    if params.penalized:
        ids, counts = history.along(path)
        values = out[ids]
        if params.repetition_penalty != 1:
            scale = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / scale, values * scale)
        values -= (params.frequency_penalty * counts + params.presence_penalty * (counts > 0)).astype(np.float32)
        out[ids] = values
    for token, bias in params.logit_bias.items():
        if token >= out.size:
            raise RequestError(f"logit_bias: found token id {token}; this model's ids end at {out.size - 1}.")
        out[token] += np.float32(bias)
    return out


def warp(row: FloatArray, params: SamplingParams, history: History, path: Sequence[int] = ()) -> Distribution:
    """The law of the token that follows ``history`` and ``path``, given its logits [V].

    Sparse where top-k, top-p or min-p leave a short list, dense otherwise; greedy is all mass on the best logit, ties
    to the lowest id. Tokens that tie with the last one kept are all kept: the law never depends on a sort's order.
    UserError when the logits hold NaN or +inf, or nothing but -inf.
    """
    logits = penalized(row, params, history, path)
    best = _finite_best(logits)
    if params.greedy:
        return Distribution.point(int(logits.argmax()))
    tokens: IntArray | None = None
    if 0 < params.top_k < logits.size:
        tokens = np.flatnonzero(logits >= np.partition(logits, logits.size - params.top_k)[logits.size - params.top_k])
        logits = logits[tokens]
    weights = logits - best
    with np.errstate(over="ignore", under="ignore"):
        weights /= np.float32(max(params.temperature, COLDEST))
        np.exp(weights, out=weights)
    floor = max(nucleus_floor(weights, params.top_p), np.float32(params.min_p))  # the best weight is exp(0) = 1
    if floor > 0:
        weights, tokens = _cut(weights, tokens, floor)
    weights /= np.float32(weights.sum(dtype=np.float64))
    return Distribution(tokens, weights)


def _cut(weights: FloatArray, tokens: IntArray | None, floor: np.float32) -> tuple[FloatArray, IntArray | None]:
    """Only the weights from ``floor`` up; a long list stays dense, with zeros, which is cheaper to draw from."""
    kept = weights >= floor
    if tokens is None and np.count_nonzero(kept) > weights.size // DENSE:
        return weights * kept, None
    slots = np.flatnonzero(kept)
    return weights[slots], slots if tokens is None else tokens[slots]


def _finite_best(logits: FloatArray) -> np.float32:
    best = np.float32(logits.max())
    if not np.isfinite(best):
        raise UserError(
            f"logits: the largest of a row is {best}; finite logits are expected. The engine overflowed or its weights "
            "are damaged: compile with a wider type (fp32 or bf16) and check the checkpoint."
        )
    return best


def nucleus_floor(weights: npt.NDArray[np.float32], top_p: float) -> np.float32:
    """The smallest weight in the nucleus: the fewest of the largest weights that reach ``top_p`` of the sum.

    0 when top_p is 1. Only weights that can be inside are sorted: those below (1 - top_p) * sum / V together weigh
    less than what the nucleus leaves out.
    """
    if top_p >= 1:
        return np.float32(0)
    total = float(weights.sum(dtype=np.float64))
    chosen = np.compress(weights > (1 - top_p) * total / weights.size * 0.999, weights)
    chosen = -np.sort(np.negative(chosen, out=chosen))
    return np.float32(chosen[running_index(chosen, top_p * total, "left")])
