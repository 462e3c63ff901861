"""Drafters for the proof, over small models whose every law is known.

The drawn ones use the runtime's own code (`specrun.draft_law`), so that what is proved is what drafters call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.distribution import Distribution
from specrun.draft_law import draft_law, draw_with_replacement, draw_without_replacement
from specrun.proposal import Law, Proposal
from specrun.random import Chance
from specrun.sampling import SamplingParams
from specrun.tree import DraftTree
from specrun.warp import History

Row = npt.NDArray[np.float32]
Draw = Callable[[Law, int, Chance, int, int], list[int]]


class Model(Protocol):
    """Logits [V] that follow a context."""

    def row(self, context: Sequence[int]) -> Row:
        """float32 [V]; -inf is a token of probability 0."""


@dataclass(frozen=True)
class Table:
    """Random logits for every context of two tokens; near another table when ``base`` is given.

    ``bend`` may then change a row (zeros, spikes, ties).
    """

    size: int
    seed: int
    base: Table | None = None
    bend: Callable[[Row, Sequence[int]], Row] | None = None
    rows: dict[tuple[int, ...], Row] = field(default_factory=dict, compare=False)

    def row(self, context: Sequence[int]) -> Row:
        key = tuple(context[-2:])
        if key not in self.rows:
            row = np.random.default_rng([self.seed, *key]).normal(0, 1, self.size).astype(np.float32)
            if self.base is not None:
                row = (0.8 * self.base.row(key) + 0.6 * row).astype(np.float32)
            self.rows[key] = row if self.bend is None else self.bend(row, key)
        return self.rows[key]


@dataclass
class Growing:
    """A tree under construction: the shape says how many children a node wants, the laws how many it gets."""

    wanted: DraftTree
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    places: list[int] = field(default_factory=lambda: [0])  # each node's place in the wanted shape
    laws: dict[int, Law] = field(default_factory=dict)

    def path(self, node: int) -> list[int]:
        """The drafted tokens from the root (left out) to ``node``."""
        path: list[int] = []
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def add(self, parent: int, tokens: Sequence[int]) -> None:
        """Children of ``parent`` in draw order."""
        for token, place in zip(tokens, self.wanted.children[self.places[parent]], strict=False):
            self.tokens.append(token)
            self.parents.append(parent)
            self.places.append(place)

    def proposal(self, laws: bool) -> Proposal:
        tree = DraftTree(np.array(self.parents, dtype=np.int64))
        return Proposal(np.array(self.tokens, dtype=np.int64), tree, self.laws if laws else None, None, "the proof")


class Drafter(Protocol):
    """How a scheme drafts for a case."""

    def propose(
        self, model: Model, wanted: DraftTree, history: History, params: SamplingParams, chance: Chance, eos: int | None
    ) -> Proposal:
        """A draft after ``history``, of the wanted shape where the laws allow; nothing follows ``eos``."""


@dataclass(frozen=True)
class Drawn:
    """Children drawn from the model's warped law; ``draw`` says how."""

    draw: Draw

    def propose(
        self, model: Model, wanted: DraftTree, history: History, params: SamplingParams, chance: Chance, eos: int | None
    ) -> Proposal:
        growing = Growing(wanted, [history.tokens[-1]])
        node = 0
        while node < len(growing.tokens):
            count = len(wanted.children[growing.places[node]])
            if count and not (node and growing.tokens[node] == eos):
                self.grow(growing, node, count, model, history, params, chance)
            node += 1
        return growing.proposal(laws=True)

    def grow(
        self,
        growing: Growing,
        node: int,
        count: int,
        model: Model,
        history: History,
        params: SamplingParams,
        chance: Chance,
    ) -> None:
        path = growing.path(node)
        law = draft_law(model.row([*history.tokens, *path]), params, history, path)
        tokens = self.draw(law, count, chance, len(history.tokens), len(growing.tokens))
        growing.laws[node] = law
        growing.add(node, tokens)


@dataclass(frozen=True)
class Cautious(Drawn):
    """Draws nothing further after a token that q thinks unlikely. The token itself stays: whether the next one is drawn
    depends on what came before it alone.
    """

    def grow(
        self,
        growing: Growing,
        node: int,
        count: int,
        model: Model,
        history: History,
        params: SamplingParams,
        chance: Chance,
    ) -> None:
        if node and Distribution.of(growing.laws[growing.parents[node]]).at(growing.tokens[node]) < 0.3:
            return
        super().grow(growing, node, count, model, history, params, chance)


WITH_REPLACEMENT = Drawn(draw_with_replacement)
WITHOUT_REPLACEMENT = Drawn(draw_without_replacement)
CAUTIOUS = Cautious(draw_with_replacement)


@dataclass(frozen=True)
class Fixed:
    """Deterministic candidates: the model's best tokens, each ``repeat`` times in a row."""

    repeat: int = 1

    def propose(
        self, model: Model, wanted: DraftTree, history: History, params: SamplingParams, chance: Chance, eos: int | None
    ) -> Proposal:
        growing = Growing(wanted, [history.tokens[-1]])
        node = 0
        while node < len(growing.tokens):
            count = len(wanted.children[growing.places[node]])
            if count and not (node and growing.tokens[node] == eos):
                row = model.row([*history.tokens, *growing.path(node)])
                ranked = np.argsort(-row, kind="stable")
                growing.add(node, [int(ranked[i // self.repeat % ranked.size]) for i in range(count)])
            node += 1
        return growing.proposal(laws=False)
