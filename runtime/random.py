"""Counter-based uniforms: what is drawn depends on the request's seed and the place of the draw, on nothing else.

Key = (seed, choice), counter = (position, stream, index), through Philox (Salmon et al. 2011). The same request gives
the same tokens alone, in any batch, in any process.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.random import Philox

from specrun.distribution import Distribution

LARGEST = 1.0 - 2.0**-24  # the largest float32 below 1: a uniform stays below 1 when a kernel rounds it


class Stream(IntEnum):
    """Independent streams of one request; the values are part of what makes a seed repeatable.

    A (position, stream, index) must never be consulted twice for decisions that matter. TARGET and RESIDUAL draws are
    counted by the position of the token they choose, which is chosen once. DRAFT and ACCEPT draws are counted by the
    position right after the draft's root, with the draw's or node's own index: a rejected draft's positions are
    drafted again by the next step, and must meet fresh numbers there.
    """

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    TARGET = 3


class Chance(Protocol):
    """What a rule may ask of randomness. The proof enumerates the rules by answering these two every possible way."""

    def choose(self, law: Distribution, position: int, stream: Stream, index: int = 0) -> int:
        """A token drawn from ``law``."""

    def accept(self, p: float, q: float, position: int, index: int) -> bool:
        """True with probability min(1, p / q); True when q is 0 and p is not, False whenever p is 0."""


class Uniforms:
    """The uniforms of one choice of one request; stateless, so a draw can be repeated anywhere."""

    def __init__(self, seed: int, choice: int = 0) -> None:
        self._key = np.array([seed, choice], dtype=np.uint64)

    def draw(self, position: int, stream: Stream, index: int = 0) -> float:
        """A number in [0, 1), below 1 also after rounding to float32."""
        counter = np.array([position, stream, index, 0], dtype=np.uint64)
        raw = int(Philox(counter=counter, key=self._key).random_raw())
        return min((raw >> 11) * 2.0**-53, LARGEST)

    def choose(self, law: Distribution, position: int, stream: Stream, index: int = 0) -> int:
        """A token drawn from ``law`` by inverse CDF, in order of token id."""
        return law.quantile(self.draw(position, stream, index))

    def accept(self, p: float, q: float, position: int, index: int) -> bool:
        """``u < p / q``, strict and without dividing: u = 0 never accepts a token of probability 0."""
        return self.draw(position, Stream.ACCEPT, index) * q < p
