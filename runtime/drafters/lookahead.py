"""Lookahead decoding (Fu et al. 2024): a Jacobi window in the target's own pass finds n-grams, a pool proposes them.

The window has W columns of up to N - 1 levels. Column i is one trajectory: its level-l token stands at offset i + 1 + l
after the pending token and sees the pending token, the level-0 tokens of columns up to i, and its own column's earlier
levels. Its tokens ride along in the pass as passengers and are never verified; the logits of each column's last level
give its next token. Once a column has N tokens they enter the pool under their first token, and the window moves on by
one level. Guesses are the pool's n-grams that start with the pending token, as branches of the draft.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext
from specrun.drafters.sources import Guess, Reader, SourceDrafter
from specrun.economics import Average, Economics
from specrun.proposal import Commit, FloatArray, Passengers, Proposal
from specrun.sequence import Sequence
from specrun.tree import BoolArray, IntArray

FIRST_GUESS = 0.3  # chance of the newest n-gram's next token before the pool was tried
LATER_GUESS = 0.1  # of an older one's
TYPICAL_YIELD = 1.6  # tokens a pass with a window is expected to emit before any was measured

Tail = tuple[int, ...]


class Pool:
    """n-grams by their first token, the ``guesses`` latest of each."""

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._tails: dict[int, OrderedDict[Tail, None]] = {}

    def add(self, ngram: Seq[int]) -> None:
        tails = self._tails.setdefault(ngram[0], OrderedDict())
        tail = tuple(ngram[1:])
        tails[tail] = None
        tails.move_to_end(tail)
        if len(tails) > self._guesses:
            tails.popitem(last=False)

    def tails(self, first: int) -> list[Tail]:
        """What followed ``first``, the latest first."""
        return list(reversed(self._tails.get(first, ())))


@dataclass
class PoolReader:
    """One sequence's pool as a source; every n-gram of its own text enters it as well. A cursor is a list of tails."""

    name: str
    pool: Pool
    level: int  # N
    last: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        self.last = [*self.last, token][-self.level :]
        if len(self.last) == self.level:
            self.pool.add(self.last)

    def root(self) -> list[Tail]:
        return self.pool.tails(self.last[-1])

    def guesses(self, cursor: list[Tail]) -> list[Guess]:
        found: dict[int, Guess] = {}
        for tail in cursor:
            if tail and tail[0] not in found:
                rank = len(found)
                chance = LATER_GUESS if rank else FIRST_GUESS
                found[tail[0]] = Guess(tail[0], chance, (self.name, min(rank, 3), self.level - len(tail)))
        return list(found.values())

    def advance(self, cursor: list[Tail], token: int) -> list[Tail]:
        return [tail[1:] for tail in cursor if tail and tail[0] == token]


@dataclass
class PoolSource:
    name: str
    level: int
    guesses: int

    def read(self, tokens: Seq[int]) -> Reader:
        reader = PoolReader(self.name, Pool(self.guesses), self.level)
        for token in tokens:
            reader.append(token)
        return reader

    def close(self, tokens: Seq[int]) -> None:
        pass


@dataclass
class Window:
    """``levels[l][i]``: level l of column i. Starts with tokens of the prompt at level 0 and fills up pass by pass."""

    levels: list[list[int]]
    depth: int  # N - 1

    @staticmethod
    def start(tokens: Seq[int], columns: int, depth: int) -> Window:
        """Level 0 takes tokens spread over the prompt: any guess does, those of the text do better."""
        step = max(1, len(tokens) // columns)
        return Window([[tokens[(i * step) % len(tokens)] for i in range(columns)]], depth)

    @property
    def columns(self) -> int:
        return len(self.levels[0])

    def passengers(self, tree_size: int) -> Passengers:
        """Level after level; the pending token is node 0 of the tree."""
        height, width = len(self.levels), self.columns
        offsets, mask = _layout(height, width)
        wide = np.zeros((height * width, tree_size + height * width), dtype=np.bool_)
        wide[:, 0] = True
        wide[:, tree_size:] = mask
        return Passengers(np.array(self.levels, dtype=np.int64).ravel(), offsets, wide)

    def observe(self, logits: FloatArray, pool: Pool) -> None:
        """Takes the next token of every column from the last level's logits, float32 [levels * W, V]."""
        newest = logits[-self.columns :].argmax(axis=1).tolist()
        if len(self.levels) == self.depth:
            for i, token in enumerate(newest):
                pool.add([*(level[i] for level in self.levels), token])
            self.levels.pop(0)
        self.levels.append(newest)


def _layout(height: int, width: int) -> tuple[IntArray, BoolArray]:
    """(offsets [height * width], which of each other the window's tokens see)."""
    level, column = np.divmod(np.arange(height * width), width)
    row = (level[None] == 0) & (column[None] <= column[:, None])
    own = (column[None] == column[:, None]) & (level[None] <= level[:, None])
    return column + 1 + level, row | own


@dataclass
class Trial:
    """Whether the window pays: tokens and costs of passes with and without it, as running means."""

    economics: Economics
    tokens: Average = field(default_factory=lambda: Average(16, 0.99))
    costs: Average = field(default_factory=lambda: Average(1, 0.99))

    def pays(self, riders: int) -> bool:
        with_window = self.tokens.mean(True, TYPICAL_YIELD) / self.costs.mean(True, self.economics.cost(1 + riders))
        without = self.tokens.mean(False, 1.0) / self.costs.mean(False, 1.0)
        return with_window > without

    def observe(self, had_window: bool, tokens: int, cost: float) -> None:
        self.tokens.observe(had_window, tokens)
        self.costs.observe(had_window, cost)


@dataclass
class Lookahead(SourceDrafter):
    """``window`` W columns, ``level`` N tokens an n-gram, ``guesses`` G branches; the defaults are the authors'."""

    window: int = 7
    level: int = 5
    capacity: int = 64  # nodes a pass may carry, window included
    windows: dict[Sequence, Window] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trial = Trial(self.economics)

    @staticmethod
    def open(record: DrafterRecord, context: DraftContext) -> Lookahead:
        window, level, guesses = (record.options[name] for name in ("window", "level", "guesses"))
        return Lookahead(
            record.name,
            context.economics,
            context.eos_token_ids,
            [PoolSource(record.name, level, guesses)],
            max_nodes=guesses * (level - 1),
            width=1 if context.target.chains_only else guesses,
            window=window,
            level=level,
            capacity=context.bundle.manifest.limits.max_nodes,
        )

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self.windows[sequence] = Window.start(sequence.tokens, self.window, self.level - 1)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        riders = self.window * (self.level - 1)
        if riders > self.capacity - 2 or not self.trial.pays(riders):
            return super().propose(sequences, budgets)
        limit = self.capacity - 1 - riders
        drafts = [self.start(sequence) for sequence in sequences]
        proposals = self.finish(drafts, [min(budget, limit) for budget in budgets], riders)
        return [
            proposal.carrying(self.windows[sequence].passengers(proposal.tree.size))
            for sequence, proposal in zip(sequences, proposals, strict=True)
        ]

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        super().observe(sequence, commit)
        if commit.proposal is None or commit.verdict is None:
            return
        riders = 0 if commit.proposal.passengers is None else commit.proposal.passengers.tokens.size
        cost = self.economics.cost(commit.proposal.tree.size + riders)
        self.trial.observe(riders > 0, len(commit.verdict.tokens), cost)
        if commit.passenger_logits is not None:
            (reader,) = self.states[sequence].readers
            if isinstance(reader, PoolReader):
                self.windows[sequence].observe(commit.passenger_logits, reader.pool)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self.windows.pop(sequence, None)
