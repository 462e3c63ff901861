"""SamplingParams: one request's settings, validated where they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrun.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request; the order of the warps is the order of the fields.

    Penalties and bias act on the logits of each position with that position's own prefix, drafted tokens included:
    ``repetition_penalty`` over prompt and output (Keskar et al. 2019; as transformers), ``frequency_penalty`` and
    ``presence_penalty`` over the output only (as the OpenAI API), ``logit_bias`` added last. Then temperature, top-k,
    top-p, min-p, each renormalizing. ``temperature=0`` is greedy: argmax of the penalized logits, ties to the lowest
    id, whatever top-k/p say.

    Raises RequestError for a value outside its range.
    """

    max_tokens: int = 256
    repetition_penalty: float = 1.0  # > 0
    frequency_penalty: float = 0.0  # [-2, 2]
    presence_penalty: float = 0.0  # [-2, 2]
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    temperature: float = 0.0  # >= 0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1)
    seed: int = 0  # [0, 2**64)
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; K >= 0: the chosen token's and the K best
    n: int = 1  # independent continuations; choice i draws with stream seed (seed, i)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _integer("max_tokens", self.max_tokens, 1, None)
        _number("repetition_penalty", self.repetition_penalty, lambda v: v > 0, "above 0")
        _number("frequency_penalty", self.frequency_penalty, lambda v: -2 <= v <= 2, "in [-2, 2]")
        _number("presence_penalty", self.presence_penalty, lambda v: -2 <= v <= 2, "in [-2, 2]")
        _number("temperature", self.temperature, lambda v: v >= 0, "0 (greedy) or above")
        _integer("top_k", self.top_k, 0, None)
        _number("top_p", self.top_p, lambda v: 0 < v <= 1, "in (0, 1]")
        _number("min_p", self.min_p, lambda v: 0 <= v < 1, "in [0, 1)")
        _integer("seed", self.seed, 0, 2**64 - 1)
        _integer("n", self.n, 1, 64)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 1000)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError(f"stop: found {list(self.stop)!r}; every stop string must be non-empty text.")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token id", token, 0, None)
            _number(f"logit_bias[{token}]", bias, lambda v: True, "a finite number")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        """Whether a position's logits depend on the tokens before it beyond the model."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise RequestError(f"{name}: found {value!r}, expected {expected}.")


def _number(name: str, value: Any, accepts: Any, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not accepts(value):
        raise RequestError(f"{name}: found {value!r}, expected a number {expected}.")
