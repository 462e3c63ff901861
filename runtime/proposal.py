"""Proposal and Verdict: what a drafter hands to the verifier, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from specrun.tree import BoolArray, DraftTree, IntArray

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DenseLaw:
    """The exact law a node's children were drawn from: float32 [V], sums to 1, warped with the request's settings."""

    probs: FloatArray


@dataclass(frozen=True)
class SparseLaw:
    """The same over a short list: ``tokens`` int64 [K], ``probs`` float32 [K]; every other token has probability 0."""

    tokens: IntArray
    probs: FloatArray


Law = DenseLaw | SparseLaw
ROOT = DraftTree.chain(0)  # shared by all empty proposals: its depths and mask are derived once


@dataclass(frozen=True)
class Passengers:
    """Nodes that ride along in the target's pass and are never verified (Lookahead's window and guesses' helpers).

    They come after the tree's nodes. ``tokens`` int64 [W]; ``offsets`` int64 [W], position minus context length;
    ``mask`` bool [W, N + W], which of the tree's nodes and passengers each one sees.
    """

    tokens: IntArray
    offsets: IntArray
    mask: BoolArray


@dataclass(frozen=True)
class Proposal:
    """One sequence's draft.

    ``tokens`` int64 [N]: node 0 is the pending token. ``laws`` maps an inner node to the exact law its children were
    drawn from, in draw order; None when the candidates are deterministic (then q = 1: sample-and-match).

    ``chances`` float32 [N], optional: the calibrated probability that each node is accepted given that its parent was
    (1 for node 0). Hybrids weigh a drafter's nodes by it; without it they go by what they have seen of the drafter.
    ``draft_cost``: what drafting took beforehand, in plain passes of the target; nothing for lookups.
    """

    tokens: IntArray
    tree: DraftTree
    laws: dict[int, Law] | None = None
    passengers: Passengers | None = None
    source: str = ""  # set by hybrid drafters: who proposed, for statistics only
    chances: FloatArray | None = None
    draft_cost: float = 0.0

    @staticmethod
    def empty(pending: int) -> Proposal:
        """No draft: the plain decode step."""
        return Proposal(np.array([pending], dtype=np.int64), ROOT)

    @staticmethod
    def chain(pending: int, drafted: list[int] | IntArray, source: str = "") -> Proposal:
        """A deterministic chain after the pending token."""
        tokens = np.concatenate([[pending], np.asarray(drafted, dtype=np.int64)]).astype(np.int64)
        return Proposal(tokens, DraftTree.chain(len(drafted)), source=source)

    @property
    def drafted(self) -> int:
        """How many tokens are up for acceptance."""
        return self.tree.size - 1

    def carrying(self, passengers: Passengers) -> Proposal:
        """The same draft with passengers."""
        return replace(self, passengers=passengers)

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes from the root along ``tokens``, as far as they were drafted."""
        path = [0]
        for token in tokens:
            hits = [child for child in self.tree.children[path[-1]] if self.tokens[child] == token]
            if not hits:
                break
            path.append(hits[0])
        return path

    def prefix(self, nodes: int) -> Proposal:
        """The first ``nodes`` nodes; laws of nodes that keep no child are dropped, passengers kept whole or dropped."""
        if nodes >= self.tree.size:
            return self
        tree = self.tree.prefix(nodes)
        laws = None if self.laws is None else {n: law for n, law in self.laws.items() if n < nodes and tree.children[n]}
        chances = None if self.chances is None else self.chances[:nodes]
        return Proposal(self.tokens[:nodes], tree, laws, None, self.source, chances, self.draft_cost)


@dataclass
class Verdict:
    """What the verifier decided for one sequence.

    ``path`` holds the accepted nodes from the root on (always starts with 0, the pending token); ``next_token`` is
    the token the target itself chose after the last of them: the new pending token.
    """

    path: list[int]
    next_token: int
    tokens: list[int] = field(default_factory=list)  # emitted by this pass: accepted drafts, then next_token

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens."""
        return len(self.path) - 1


@dataclass(frozen=True)
class Commit:
    """Rows that entered a sequence's cache, reported to its drafter through ``observe``.

    Prefill chunks and verify passes look the same: ``tokens`` int64 [K] are the tokens of the new rows, starting at
    position ``start``; ``hidden`` float32 [K, k * H] their tapped features (None when the drafter asks for none);
    ``next_token`` is the token that follows the last of them (the next prompt token, or the new pending token).
    ``proposal`` and ``verdict`` are None for prefill.
    """

    start: int
    tokens: IntArray
    next_token: int
    hidden: FloatArray | None = None
    proposal: Proposal | None = None
    verdict: Verdict | None = None
    passenger_logits: FloatArray | None = None  # float32 [W, V], when the proposal carried passengers
