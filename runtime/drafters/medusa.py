"""medusa: heads that each guess one token further from the target's last features, all in one call."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext
from specrun.drafters.growth import BestFirst, Draft, StaticTree, best_tokens, learn
from specrun.drafters.options import tree_grower
from specrun.drafters.pacing import Pacing
from specrun.drafters.vocabulary import Vocabulary
from specrun.heads import Heads
from specrun.proposal import Commit, FloatArray, Proposal
from specrun.rules import SampleAndMatch
from specrun.sequence import Sequence


@dataclass
class State:
    """``hidden``: the target's features at the last committed row."""

    hidden: FloatArray | None = None
    draft: Draft | None = None


@dataclass
class Medusa:
    """A node's children are its depth's head's best tokens, whatever the path: the tree is a product of lists."""

    name: str
    heads: Heads
    grower: BestFirst | StaticTree
    vocabulary: Vocabulary
    pacing: Pacing | None
    taps: tuple[int, ...]
    rule = SampleAndMatch()
    _states: dict[Sequence, State] = field(default_factory=dict)

    @staticmethod
    def open(record: DrafterRecord, context: DraftContext) -> Medusa:
        options, vocabulary = record.options, Vocabulary(context.tokenizer_size)
        pacing = Pacing(context.economics) if options["adaptive"] else None
        grower = tree_grower(record, context, vocabulary, pacing)
        heads = context.open_heads(record.engine or record.name)
        return Medusa(record.name, heads, grower, vocabulary, pacing, tuple(options["taps"]))

    def begin(self, sequence: Sequence) -> None:
        self._states[sequence] = State()

    def end(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        state = self._states[sequence]
        if state.draft is not None and commit.verdict is not None and commit.proposal is not None:
            learn(state.draft, [*commit.tokens[1:].tolist(), commit.next_token], self.pacing)
        assert commit.hidden is not None  # the target exposes the taps of every drafter of its bundle
        state.draft, state.hidden = None, commit.hidden[-1].copy()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        if self.pacing is not None and any(budgets) and not self.pacing.worth_starting():
            budgets = [0] * len(budgets)
        return self.draft_now(sequences, budgets)

    def draft_now(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """See ``specrun.drafters.Priced``."""
        budget_of = dict(zip(sequences, budgets, strict=True))
        ready = [s for s in sequences if budget_of[s] > 0 and self._states[s].hidden is not None]
        if not ready:
            return [Proposal.empty(sequence.pending) for sequence in sequences]
        begin = time.perf_counter()
        hidden = [state.hidden for state in map(self._states.__getitem__, ready) if state.hidden is not None]
        logits = self.heads.run(np.stack(hidden))
        drafted = {s: self._draft(s, budget_of[s], logits[i]) for i, s in enumerate(ready)}
        cost = 0.0
        if self.pacing is not None:
            seconds = time.perf_counter() - begin
            cost = self.pacing.passes(seconds)
            self.pacing.timed("first", seconds)
            self.pacing.timed("step", 0.0)  # every head has run by then
        drafted = {s: replace(proposal, draft_cost=cost) for s, proposal in drafted.items()}
        return [drafted.get(sequence) or Proposal.empty(sequence.pending) for sequence in sequences]

    def _draft(self, sequence: Sequence, budget: int, logits: FloatArray) -> Proposal:
        draft = self._states[sequence].draft = Draft.of(sequence, budget)
        grower, level, frontier = self.grower, 0, [0]
        while frontier:
            width = max(grower.width_of(draft, node) for node in frontier)
            columns, probs = best_tokens(self.vocabulary.row(logits[level]), width)
            for node in frontier:
                grower.add_children(draft, node, columns, probs)
            level += 1
            frontier = grower.frontier(draft, level)
        return grower.finish(draft)

    def draft_costs(self, length: int) -> list[float]:
        """See ``specrun.drafters.Priced``: the first depth pays for all."""
        first = 0.0 if self.pacing is None else self.pacing.cost("first")
        return [first if depth == 0 else 0.0 for depth in range(length)]
