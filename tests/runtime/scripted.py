"""Test drafters: they play back what the test tells them to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specrun.proposal import Proposal
from specrun.rules import SampleAndMatch
from specrun.tree import DraftTree


class Scripted:
    """``draft(sequence, budget) -> Proposal``. Keeps every commit it was told of."""

    def __init__(self, draft: Callable, taps: tuple[int, ...] = ()) -> None:
        self.name, self.rule, self.taps, self.draft = "scripted", SampleAndMatch(), taps, draft
        self.commits: list = []

    def begin(self, sequence) -> None:
        pass

    def propose(self, sequences, budgets):
        return [self.draft(s, b) for s, b in zip(sequences, budgets, strict=True)]

    def observe(self, sequence, commit) -> None:
        self.commits.append(commit)

    def end(self, sequence) -> None:
        pass


def nothing() -> Scripted:
    return Scripted(lambda sequence, budget: Proposal.empty(sequence.pending))


def oracle_chain(answer: list[int], length: int) -> Scripted:
    """Drafts what is known to come next (SELF of the cases)."""

    def draft(sequence, budget):
        at = len(sequence.output)
        return Proposal.chain(sequence.pending, answer[at : at + min(length, budget)])

    return Scripted(draft)


def wrong_chain(answer: list[int], length: int, vocab: int) -> Scripted:
    """Always wrong from the first token on (ANTI)."""

    def draft(sequence, budget):
        at = len(sequence.output)
        tokens = [(t + 1) % vocab for t in answer[at : at + min(length, budget)]]
        return Proposal.chain(sequence.pending, tokens)

    return Scripted(draft)


def random_tree(answer: list[int], vocab: int, seed: int, nodes: int = 10) -> Scripted:
    """Random trees in which each node's right continuation is present with chance one half."""
    rng = np.random.default_rng(seed)

    def draft(sequence, budget):
        size = int(min(nodes, budget)) + 1
        parents = [-1] + [int(rng.integers(0, i)) for i in range(1, size)]
        tree = DraftTree(np.array(parents))
        at = len(sequence.output)
        tokens = [sequence.pending]
        for node in range(1, size):
            index = at + int(tree.depths[node]) - 1
            right = answer[index] if index < len(answer) else 0
            tokens.append(right if rng.random() < 0.5 else int(rng.integers(0, vocab)))
        return Proposal(np.array(tokens), tree)

    return Scripted(draft)
