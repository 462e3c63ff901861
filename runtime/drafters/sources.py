"""Drafts from cheap sources: whatever can guess the next token of a path without running an engine.

A source (suffix matches, an n-gram table, a model's draft that is already there) guesses tokens with chances;
``grow`` unfolds the guesses of all sources best first into one tree, and ``SourceDrafter`` cuts that tree where
another node costs more than it brings. What each guess was worth is learned from every token that is emitted, drafted
or not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

import numpy as np

from specrun.bundle import DrafterRecord, EngineRecord
from specrun.economics import Acceptance, Economics
from specrun.proposal import Commit, Proposal
from specrun.rules import SampleAndMatch
from specrun.sequence import Sequence
from specrun.tree import DraftTree


class Guess(NamedTuple):
    """``chance``: that the target emits ``token`` next, as its source sees it. ``key``: what to learn it under."""

    token: int
    chance: float
    key: Hashable


class Reader(Protocol):
    """A source's view of one sequence. A cursor stands for the sequence's tokens plus a drafted path."""

    def append(self, token: int) -> None:
        """The sequence emitted a token."""

    def root(self) -> Any:
        """The cursor of the empty path; None where the source has nothing to say."""

    def guesses(self, cursor: Any) -> Seq[Guess]:
        """What may follow, best first."""

    def advance(self, cursor: Any, token: int) -> Any:
        """The cursor one drafted token further, or None."""


class Source(Protocol):
    def read(self, tokens: Seq[int]) -> Reader:
        """Starts on a sequence whose prompt is ``tokens``."""

    def close(self, tokens: Seq[int]) -> None:
        """The sequence is over; ``tokens`` is all of it."""


@dataclass
class Node:
    """A node of a growing draft. ``reach``: chance that the whole path down to here is accepted."""

    token: int
    parent: int
    depth: int
    reach: float
    chance: float
    cursors: list[Any]
    guesses: list[Guess] = field(default_factory=list)
    children: dict[int, int] = field(default_factory=dict)


BUCKETS = [1 / (1 + math.exp(3 - step)) for step in range(7)]
AGREEMENT = 2.5  # odds of a guess of two sources over the (geometric) mean of what each gives it


def bucket(chance: float) -> int:
    """Chances in eight classes, finer towards 0 and 1 (even steps of log odds)."""
    return bisect_right(BUCKETS, chance)


@dataclass
class Draft:
    """One sequence's tree, best nodes first: every prefix of ``nodes`` is the best tree of its size."""

    readers: list[Reader]
    acceptance: Acceptance
    learned: Hashable  # part of every key: what kind of request the chances were learned from
    width: int
    eos_token_ids: frozenset[int]
    nodes: list[Node] = field(default_factory=list)
    frontier: list[tuple[float, int, int, Guess]] = field(default_factory=list)

    def start(self, pending: int) -> None:
        """The root and what may follow it."""
        self._expand(Node(pending, -1, 0, 1.0, 1.0, [reader.root() for reader in self.readers]))

    def join(self, reader: Reader) -> None:
        """Takes in another source, before the draft grows beyond its root."""
        (root,) = self.nodes
        root.cursors.append(reader.root())
        self.readers.append(reader)
        self.nodes, self.frontier = [], []
        self._expand(root)

    def grow(self, floors: Seq[float]) -> None:
        """Adds nodes as long as the k-th one after the root is reached with a chance above ``floors[k - 1]``."""
        while self.frontier and len(self.nodes) <= len(floors) and -self.frontier[0][0] > floors[len(self.nodes) - 1]:
            reach, _, parent, guess = heappop(self.frontier)
            cursors = [
                None if cursor is None else reader.advance(cursor, guess.token)
                for reader, cursor in zip(self.readers, self.nodes[parent].cursors, strict=True)
            ]
            self.nodes[parent].children[guess.token] = len(self.nodes)
            self._expand(Node(guess.token, parent, self.nodes[parent].depth + 1, -reach, guess.chance, cursors))

    def _expand(self, node: Node) -> None:
        index = len(self.nodes)
        self.nodes.append(node)
        if node.depth and node.token in self.eos_token_ids:
            return
        node.guesses = self._merge(node)
        for guess in node.guesses[: self.width]:
            heappush(self.frontier, (-node.reach * guess.chance, len(self.frontier) + 64 * index, index, guess))

    def _merge(self, node: Node) -> list[Guess]:
        """All sources' guesses, best first: one entry a token, calibrated by what such guesses were worth so far."""
        found = [
            guess
            for reader, cursor in zip(self.readers, node.cursors, strict=True)
            if cursor is not None
            for guess in reader.guesses(cursor)
        ]
        alone = len(found) == 1
        if not alone:
            merged: dict[int, Guess] = {}
            for guess in found:
                known = merged.get(guess.token)
                merged[guess.token] = guess if known is None else agree(known, guess)
            found = list(merged.values())
        rate, learned = self.acceptance.rate, self.learned
        calibrated = []
        for token, chance, source in found:
            key = (learned, alone, source)
            calibrated.append(Guess(token, rate(key, chance), key))
        if not alone:
            calibrated.sort(key=_by_chance, reverse=True)
        return calibrated

    def learn(self, emitted: Seq[int]) -> None:
        """Scores the guesses along the emitted tokens, whether they were drafted or not: that costs nothing."""
        node = self.nodes[0]
        for token in emitted:
            for guess in node.guesses[: self.width]:
                self.acceptance.observe(guess.key, guess.token == token)
            if token not in node.children:
                break
            node = self.nodes[node.children[token]]

    @property
    def reaches(self) -> list[float]:
        """Of the drafted nodes, falling."""
        return [node.reach for node in self.nodes[1:]]

    def reaches_of(self, other: Draft, drafted: int) -> list[float]:
        """What this draft takes the first nodes of another one to be reached with; 0 for those it does not hold."""
        places: list[int | None] = [0]
        for node in other.nodes[1 : drafted + 1]:
            parent = places[node.parent]
            places.append(None if parent is None else self.nodes[parent].children.get(node.token))
        return [0.0 if place is None else self.nodes[place].reach for place in places[1:]]

    def proposal(self, drafted: int, source: str, draft_cost: float = 0.0) -> Proposal:
        nodes = self.nodes[: drafted + 1]
        tree = DraftTree(np.array([node.parent for node in nodes], dtype=np.int64))
        tokens = np.array([node.token for node in nodes], dtype=np.int64)
        chances = np.array([node.chance for node in nodes], dtype=np.float32)
        return Proposal(tokens, tree, source=source, chances=chances, draft_cost=draft_cost)


def _by_chance(guess: Guess) -> float:
    return guess.chance


def agree(one: Guess, other: Guess) -> Guess:
    """Two sources with the same guess: likelier than either thinks, by how sure both are together."""
    odds = AGREEMENT * math.sqrt(_odds(one.chance) * _odds(other.chance))
    chance = max(odds / (1 + odds), one.chance, other.chance)
    return Guess(one.token, chance, ("agree", bucket(chance)))


def _odds(chance: float) -> float:
    return max(chance, 1e-3) / max(1 - chance, 1e-3)


def options_for(record: DrafterRecord, target: EngineRecord) -> dict[str, Any]:
    """The drafter's options as ``target`` can use them: drafts that do not branch where only chains are exact."""
    return {**record.options, "width": 1} if target.chains_only else dict(record.options)


@dataclass
class State:
    """``known``: how many of the sequence's tokens the readers have seen."""

    readers: list[Reader]
    known: int
    draft: Draft | None = None


@dataclass
class SourceDrafter:
    """Drafts from one source or several. Proposals are deterministic candidates: sample-and-match verifies them."""

    name: str
    economics: Economics
    eos_token_ids: frozenset[int]
    sources: list[Source]
    max_nodes: int = 16
    width: int = 2
    rule = SampleAndMatch()
    taps: tuple[int, ...] = ()
    states: dict[Sequence, State] = field(default_factory=dict)

    def begin(self, sequence: Sequence) -> None:
        self.states[sequence] = State([s.read(sequence.tokens) for s in self.sources], len(sequence.tokens))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        drafts = [self.start(sequence) for sequence in sequences]
        return self.finish(drafts, budgets)

    def start(self, sequence: Sequence) -> Draft:
        """A draft of the sequence's sources that has not grown yet."""
        state = self.states[sequence]
        greedy, acceptance = sequence.params.greedy, self.economics.acceptance
        draft = state.draft = Draft(list(state.readers), acceptance, greedy, self.width, self.eos_token_ids)
        draft.start(sequence.pending)
        return draft

    def finish(self, drafts: Seq[Draft], budgets: Seq[int], riders: int = 0, draft_cost: float = 0.0) -> list[Proposal]:
        """Grows the drafts and cuts them where more nodes would not pay. ``riders``: passengers of the pass."""
        for draft, budget in zip(drafts, budgets, strict=True):
            draft.grow(self.economics.floors(min(budget, self.max_nodes)))
        sizes = self.economics.best_sizes([draft.reaches for draft in drafts], riders)
        return [draft.proposal(size, self.name, draft_cost) for draft, size in zip(drafts, sizes, strict=True)]

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        state = self.states[sequence]
        if commit.verdict is not None and state.draft is not None:
            state.draft.learn(commit.verdict.tokens)
        for token in sequence.tokens[state.known :]:
            for reader in state.readers:
                reader.append(token)
        state.known, state.draft = len(sequence.tokens), None

    def end(self, sequence: Sequence) -> None:
        if self.states.pop(sequence, None) is not None:
            for source in self.sources:
                source.close(sequence.tokens)
