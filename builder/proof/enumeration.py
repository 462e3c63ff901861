"""Run code under every possible sequence of its random decisions, with the probability of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from specrun.distribution import Distribution
from specrun.random import Stream

T = TypeVar("T")


class ReusedDraw(Exception):
    """A random number was consulted twice: decisions that must be independent would not be."""


class Branches:
    """A source of chance (`specrun.random.Chance`) that replays a script of decisions and lists what else could be.

    Past the script's end it takes the first option of positive probability. ``choices`` holds every decision taken:
    its options with their probabilities, and which one.
    """

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self._places: set[tuple[int, int, int]] = set()
        self.choices: list[tuple[list[float], int]] = []

    def choose(self, law: Distribution, position: int, stream: Stream, index: int = 0) -> int:
        probs = law.probs
        tokens = range(probs.size) if law.tokens is None else law.tokens.tolist()
        options = [(token, float(p)) for token, p in zip(tokens, probs, strict=True) if p > 0]
        return int(options[self._decide([p for _, p in options], (position, int(stream), index))][0])

    def accept(self, p: float, q: float, position: int, index: int) -> bool:
        chance = 0.0 if p <= 0 else 1.0 if p >= q else p / q
        options = [(True, chance), (False, 1.0 - chance)]
        options = [(answer, p) for answer, p in options if p > 0]
        return options[self._decide([p for _, p in options], (position, int(Stream.ACCEPT), index))][0]

    @property
    def weight(self) -> float:
        """The probability of the decisions taken."""
        product = 1.0
        for options, taken in self.choices:
            product *= options[taken]
        return product

    def _decide(self, options: list[float], place: tuple[int, int, int]) -> int:
        if place in self._places:
            raise ReusedDraw(f"position {place[0]}, stream {Stream(place[1]).name}, index {place[2]}")
        self._places.add(place)
        step = len(self.choices)
        taken = self._script[step] if step < len(self._script) else 0
        self.choices.append((options, taken))
        return taken


def outcomes(run: Callable[[Branches], T]) -> Iterator[tuple[T, float]]:
    """``run``'s results under all decisions that have a positive probability, each with its probability."""
    script: list[int] = []
    while True:
        chance = Branches(script)
        result = run(chance)
        yield result, chance.weight
        script = [taken for _, taken in chance.choices]
        while script and script[-1] + 1 == len(chance.choices[len(script) - 1][0]):
            script.pop()
        if not script:
            return
        script[-1] += 1
