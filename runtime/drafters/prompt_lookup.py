"""Prompt lookup (Saxena 2023): what followed the last tokens' latest earlier occurrence, proposed again."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext
from specrun.economics import Economics
from specrun.proposal import Commit, Proposal
from specrun.rules import SampleAndMatch
from specrun.sequence import Sequence

# Chance that the first token after a match of that many tokens is accepted, and that the next one is once the one
# before was: priors from chat, code and translation text; each run learns its own on top.
FIRST = {1: 0.24, 2: 0.5, 3: 0.62, 4: 0.75, 6: 0.82, 8: 0.9}
NEXT = 0.8
FIRST_LENGTH = 4  # drafted tokens before anything is known of the sequence


class NgramIndex:
    """Where each n-gram of a growing token list was last followed by something. O(max_ngram) a token."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        self.tokens: list[int] = []

    def append(self, token: int) -> None:
        end = len(self.tokens)
        for size in self._sizes:
            if size <= end:
                self._next[tuple(self.tokens[end - size :])] = end
        self.tokens.append(token)

    def match(self, longest: int = 16) -> tuple[int, int]:
        """(position after the newest earlier occurrence of the longest known suffix, tokens that match up to there).

        (0, 0) when no suffix occurred before.
        """
        tokens, end = self.tokens, len(self.tokens)
        for size in self._sizes:
            at = self._next.get(tuple(tokens[end - size :])) if size <= end else None
            if at is not None:
                while size < min(longest, at) and tokens[at - size - 1] == tokens[end - size - 1]:
                    size += 1
                return at, size
        return 0, 0


@dataclass
class State:
    """``length``: the most tokens to draft next; doubles when a draft is accepted whole, shrinks when it is not."""

    index: NgramIndex
    length: int = FIRST_LENGTH
    matched: int = 0  # length of the current match, 0 without one; set by propose
    predicted: list[int] = field(default_factory=list)  # what the match predicts, drafted or not; set by propose


@dataclass
class PromptLookup:
    name: str
    economics: Economics
    eos_token_ids: frozenset[int]
    min_ngram: int = 2
    max_ngram: int = 4
    max_length: int = 16
    rule = SampleAndMatch()
    taps: tuple[int, ...] = ()
    _states: dict[Sequence, State] = field(default_factory=dict)

    @staticmethod
    def open(record: DrafterRecord, context: DraftContext) -> PromptLookup:
        return PromptLookup(record.name, context.economics, context.eos_token_ids, **record.options)

    def begin(self, sequence: Sequence) -> None:
        state = State(NgramIndex(self.min_ngram, self.max_ngram))
        for token in sequence.tokens:
            state.index.append(token)
        self._states[sequence] = state

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return [self._draft(s, self._states[s], budget) for s, budget in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: Sequence, state: State, budget: int) -> Proposal:
        at, state.matched = state.index.match()
        state.predicted = self._until_eos(state.index.tokens[at : at + self.max_length]) if state.matched else []
        drafted = state.predicted[: min(budget, state.length)]
        chances = [self._chance(state.matched, i) for i in range(len(drafted))]
        return Proposal.chain(sequence.pending, drafted[: self.economics.best_length(chances)], self.name)

    def _until_eos(self, tokens: list[int]) -> list[int]:
        for i, token in enumerate(tokens):
            if token in self.eos_token_ids:
                return tokens[: i + 1]
        return tokens

    def _chance(self, matched: int, depth: int) -> float:
        return self.economics.acceptance.rate(self._key(matched, depth), FIRST[_known(matched)] if depth == 0 else NEXT)

    def _key(self, matched: int, depth: int) -> tuple[object, ...]:
        return (self.name, _known(matched), 0) if depth == 0 else (self.name, matched > 3, min(depth, 4))

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        state = self._states[sequence]
        if commit.verdict is None or commit.proposal is None:
            return  # a prefill chunk: begin has seen the prompt
        self._learn(state, commit.verdict.tokens)
        for token in commit.verdict.tokens:
            state.index.append(token)
        drafted, accepted = commit.proposal.drafted, commit.verdict.accepted
        if drafted:
            state.length = min(self.max_length, 2 * drafted) if accepted == drafted else max(2, accepted + 1)

    def _learn(self, state: State, emitted: list[int]) -> None:
        """Scores the prediction against what was emitted, also where nothing was drafted: that costs nothing."""
        for depth, (predicted, token) in enumerate(zip(state.predicted, emitted, strict=False)):
            self.economics.acceptance.observe(self._key(state.matched, depth), predicted == token)
            if predicted != token:
                break

    def end(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)


def _known(matched: int) -> int:
    return max(size for size in FIRST if size <= matched)
