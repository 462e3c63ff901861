"""Drafts under construction: which children a node gets, which nodes are run next, which of them are proposed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specrun.draft_law import draft_law, draw_with_replacement
from specrun.drafters.pacing import Pacing
from specrun.drafters.vocabulary import Vocabulary
from specrun.proposal import FloatArray, Law, Proposal
from specrun.sequence import Sequence
from specrun.tree import DraftTree, IntArray
from specrun.warp import penalized

UNLIKELY = 0.01  # candidates below this are worth no row anywhere, and learning about them costs time


@dataclass
class Draft:
    """One sequence's draft: nodes in the order they were added, parents before children. Node 0 is the pending token.

    ``probs[i]`` is the drafter's own probability of node i after its parent, ``chances[i]`` what that is worth by
    experience, ``reach[i]`` the product of the chances on the way from the root. ``kept`` lists the nodes that were
    proposed, in the proposal's order.
    """

    sequence: Sequence
    budget: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    probs: list[float] = field(default_factory=lambda: [1.0])
    chances: list[float] = field(default_factory=lambda: [1.0])
    reach: list[float] = field(default_factory=lambda: [1.0])
    laws: dict[int, Law] = field(default_factory=dict)
    kept: list[int] = field(default_factory=lambda: [0])

    @staticmethod
    def of(sequence: Sequence, budget: int) -> Draft:
        return Draft(sequence, budget, [sequence.pending])

    @property
    def size(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, prob: float, chance: float) -> int:
        """A child of ``parent``; returns its node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.probs.append(prob)
        self.chances.append(chance)
        self.reach.append(self.reach[parent] * chance)
        return self.size - 1

    def path(self, node: int) -> list[int]:
        """The nodes below the root that lead to ``node``, itself included."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def at_depth(self, depth: int) -> list[int]:
        return [node for node in range(1, self.size) if self.depths[node] == depth]

    def proposal(self, nodes: Seq[int], source: str) -> Proposal:
        """The proposal of some nodes below the root; every node's parent must be among them (or be the root)."""
        self.kept = [0, *sorted(nodes)]
        place = {node: i for i, node in enumerate(self.kept)}
        parents = [-1] + [place[self.parents[node]] for node in self.kept[1:]]
        laws = {place[node]: law for node, law in self.laws.items() if node in place} if self.laws else None
        return Proposal(
            np.array([self.tokens[node] for node in self.kept], dtype=np.int64),
            DraftTree(np.array(parents, dtype=np.int64)),
            laws,
            source=source,
            chances=np.array([self.chances[node] for node in self.kept], dtype=np.float32),
        )


class Grower(Protocol):
    """How drafts of one kind grow. Levels go by depth: a node is run at the level of its own depth, if at all."""

    def expand(self, draft: Draft, node: int, logits: FloatArray) -> None:
        """Adds the children of ``node``; ``logits`` float32 [V_draft] are the drafter's after its path."""

    def frontier(self, draft: Draft, level: int) -> list[int]:
        """The nodes of depth ``level`` to run next, best first; none ends the draft."""

    def finish(self, draft: Draft) -> Proposal:
        """What is proposed of the grown draft."""


class BestFirst:
    """The EAGLE-2 tree: every level runs the ``topk`` best nodes and gives each ``topk`` children; the best nodes of
    all levels are proposed (Li et al. 2024, section 4). A chain when ``topk`` is 1.

    ``total`` counts the proposed nodes without the root. With ``pacing`` all three are upper bounds, and experience and
    costs choose; without, the tree is always as large. Ties go to the shallower node, then to the earlier: a node's
    parent is kept whenever it is.
    """

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        eos: frozenset[int],
        depth: int,
        topk: int,
        total: int,
        pacing: Pacing | None,
    ) -> None:
        self.name, self.vocabulary, self.eos, self.pacing = name, vocabulary, eos, pacing
        self.depth, self.topk, self.total = depth, topk, total

    def expand(self, draft: Draft, node: int, logits: FloatArray) -> None:
        self.add_children(draft, node, *best_tokens(_row(draft, node, logits, self.vocabulary), self.topk))

    def width_of(self, draft: Draft, node: int) -> int:
        """Children that ``node`` gets at most."""
        return self.topk

    def add_children(self, draft: Draft, node: int, columns: IntArray, probs: FloatArray) -> None:
        """Adds the first columns, best first, as children."""
        _add(draft, node, self.vocabulary.to_target(columns[: self.topk]), probs, self.pacing)

    def frontier(self, draft: Draft, level: int) -> list[int]:
        if level >= min(self.depth, draft.budget):
            return []
        ends = () if draft.sequence.params.ignore_eos else self.eos
        nodes = [node for node in draft.at_depth(level) if draft.tokens[node] not in ends]
        nodes = sorted(nodes, key=lambda node: (-draft.reach[node], node))[: self.topk]
        return nodes if self.pacing is None else self.pacing.worth_running(nodes, draft.reach, level)

    def finish(self, draft: Draft) -> Proposal:
        nodes = sorted(range(1, draft.size), key=lambda n: (-draft.reach[n], draft.depths[n], n))
        nodes = nodes[: min(self.total, draft.budget)]
        if self.pacing is not None:
            nodes = nodes[: self.pacing.count([draft.reach[node] for node in nodes])]
        return draft.proposal(nodes, self.name)


class StaticTree:
    """A tree of fixed shape, given as choice paths: ``(0, 2)`` is the third best child of the root's best child."""

    def __init__(self, name: str, vocabulary: Vocabulary, paths: Seq[Seq[int]], pacing: Pacing | None) -> None:
        self.name, self.vocabulary, self.pacing = name, vocabulary, pacing
        self.paths = {tuple(path) for path in paths}
        self.width: dict[tuple[int, ...], int] = {}
        for path in self.paths:
            self.width[path[:-1]] = max(self.width.get(path[:-1], 0), path[-1] + 1)

    def expand(self, draft: Draft, node: int, logits: FloatArray) -> None:
        width = self.width_of(draft, node)
        self.add_children(draft, node, *best_tokens(_row(draft, node, logits, self.vocabulary), width))

    def width_of(self, draft: Draft, node: int) -> int:
        """Children that ``node`` gets."""
        return self.width[self._place(draft, node)]

    def add_children(self, draft: Draft, node: int, columns: IntArray, probs: FloatArray) -> None:
        """Adds the first columns, best first, as children."""
        columns = columns[: self.width_of(draft, node)]
        _add(draft, node, self.vocabulary.to_target(columns), probs, self.pacing)

    def frontier(self, draft: Draft, level: int) -> list[int]:
        if level >= draft.budget:
            return []
        nodes = [node for node in draft.at_depth(level) if self._place(draft, node) in self.width]
        return nodes if self.pacing is None else self.pacing.worth_running(nodes, draft.reach, level)

    def finish(self, draft: Draft) -> Proposal:
        nodes = [node for node in range(1, draft.size) if self._place(draft, node) in self.paths]
        nodes.sort(key=lambda n: (-draft.reach[n], draft.depths[n], n))
        nodes = nodes[: draft.budget]
        if self.pacing is not None:
            nodes = nodes[: self.pacing.count([draft.reach[node] for node in nodes])]
        return draft.proposal(nodes, self.name)

    def _place(self, draft: Draft, node: int) -> tuple[int, ...]:
        """The node's choice path: each step's rank among its siblings."""
        return tuple(n - draft.parents.index(draft.parents[n]) for n in draft.path(node))


class DrawnChain:
    """A chain drawn from the drafter's own law, warped as the request asks, for the exact rejection rules.

    Whether another token is drawn depends on the tokens before it alone, never on the token itself, and neither on
    time nor on other requests: anything else would change the output's law, or make a seed's output unrepeatable.
    """

    def __init__(self, name: str, vocabulary: Vocabulary, eos: frozenset[int], depth: int, least: float) -> None:
        self.name, self.vocabulary, self.eos, self.depth = name, vocabulary, eos, depth
        self.least = least  # stops where the drafter's own chance of what it drew so far falls below

    def expand(self, draft: Draft, node: int, logits: FloatArray) -> None:
        sequence = draft.sequence
        path = [draft.tokens[n] for n in draft.path(node)]
        law = draft_law(
            self.vocabulary.row(logits), sequence.params, sequence.history, path, self.vocabulary.target_ids
        )
        (token,) = draw_with_replacement(law, 1, sequence.uniforms, len(sequence.tokens), draft.size)
        draft.laws[node] = law
        prob = self.vocabulary.probability(law, token)
        draft.add(node, token, prob, prob)

    def frontier(self, draft: Draft, level: int) -> list[int]:
        last = draft.size - 1
        ended = draft.tokens[last] in self.eos and not draft.sequence.params.ignore_eos
        return [] if level >= min(self.depth, draft.budget) or ended or draft.reach[last] < self.least else [last]

    def finish(self, draft: Draft) -> Proposal:
        return draft.proposal(range(1, min(draft.size, draft.budget + 1)), self.name)


def _add(draft: Draft, node: int, tokens: IntArray, probs: FloatArray, pacing: Pacing | None) -> None:
    depth = draft.depths[node] + 1
    for token, prob in zip(tokens.tolist(), probs.tolist(), strict=False):
        if pacing is None:
            draft.add(node, token, prob, prob)
        elif prob >= UNLIKELY:
            draft.add(node, token, prob, pacing.chance(depth, prob))


def learn(draft: Draft, emitted: Seq[int], pacing: Pacing | None) -> None:
    """Compares a draft, the nodes that were not proposed included, with the tokens that came."""
    if pacing is None or draft.laws:
        return
    node, accepted = 0, 0
    for token in emitted:
        children = [n for n in range(node + 1, draft.size) if draft.parents[n] == node]
        for child in children:
            pacing.learn(draft.depths[child], draft.probs[child], draft.tokens[child] == token)
        node = next((child for child in children if draft.tokens[child] == token), 0)
        if node == 0:
            break
        accepted += node in draft.kept
    pacing.brought(len(draft.kept) - 1, accepted)


def _row(draft: Draft, node: int, logits: FloatArray, vocabulary: Vocabulary) -> FloatArray:
    """The drafter's row, penalized as the request asks where the vocabulary is the target's."""
    row = vocabulary.row(logits)
    params = draft.sequence.params
    if vocabulary.target_ids is not None or not (params.penalized or params.logit_bias):
        return row
    return penalized(row, params, draft.sequence.history, [draft.tokens[n] for n in draft.path(node)])


def best_tokens(row: FloatArray, count: int) -> tuple[IntArray, FloatArray]:
    """The ``count`` best columns, best first (ties to the lowest), and their probabilities under the row's softmax."""
    if count == 1:
        best = np.array([row.argmax()])
    else:
        best = np.argpartition(-row, min(count, row.size) - 1)[:count]
        best = best[np.lexsort((best, -row[best]))]
    weights = np.exp(row - row[best[0]])
    return best, weights[best] / weights.sum()
