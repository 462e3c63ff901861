"""Scoring a compiled drafter on transcripts: what a chain of two would have drafted at every position, in two passes.

The first pass runs the drafter over the whole transcript, as its cache would hold it; the second adds, behind every
position, a node with the token drafted there. No position waits for another: the target's tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specbuild.doctor.transcript import Transcript
from specrun.decoder import Decoder, Row
from specrun.drafters.vocabulary import Vocabulary
from specrun.heads import Heads
from specrun.proposal import FloatArray
from specrun.tree import IntArray

HEAD_ROWS = 32  # rows a call of a head engine: its logits are wide


@dataclass(frozen=True)
class Score:
    """``counts`` int64 [P]: how many tokens of a chain of two the target would have accepted at each position."""

    counts: IntArray

    @property
    def first(self) -> float:
        """Acceptance of the first token."""
        return float((self.counts >= 1).mean()) if self.counts.size else 0.0

    @property
    def second(self) -> float:
        """Acceptance of the second where the first was accepted."""
        reached = int((self.counts >= 1).sum())
        return float((self.counts >= 2).sum() / reached) if reached else 0.0

    @property
    def mean(self) -> float:
        """Accepted tokens of a chain of two: what readings are ranked by."""
        return float(self.counts.mean()) if self.counts.size else 0.0

    def lead(self, other: Score) -> tuple[float, float]:
        """How much higher the mean is than ``other``'s at the same positions, and that difference's standard error."""
        difference = (self.counts - other.counts).astype(np.float64)
        if difference.size < 2:
            return 0.0, np.inf
        return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(difference.size))


class Drafting(Protocol):
    """A compiled drafter. ``taps``: what it reads of the target; empty where it reads tokens only."""

    taps: tuple[int, ...]

    def counts(self, line: Transcript, features: FloatArray | None) -> IntArray:
        """Accepted tokens at every position that a draft of two fits behind; features float32 [L - 1, k * H]."""

    def notes(self, lines: Sequence[Transcript]) -> list[str]:
        """What else is to be said of it after it was scored."""


def score(drafter: Drafting, lines: Sequence[Transcript], shuffle: np.random.Generator | None = None) -> Score:
    """``shuffle`` gives every position another position's features: what is accepted then owes nothing to them."""
    counts = []
    for line in lines:
        features = line.features(drafter.taps) if drafter.taps else None
        if features is not None and shuffle is not None:
            features = features[shuffle.permutation(len(features))]
        counts.append(drafter.counts(line, features))
    return Score(np.concatenate(counts, dtype=np.int64) if counts else np.zeros(0, dtype=np.int64))


@dataclass
class DecoderDrafting:
    """A drafter with a decoder. One that reads features holds the token at i + 1 in row i, see ``specrun.contract``."""

    decoder: Decoder
    vocabulary: Vocabulary
    taps: tuple[int, ...]
    padded: int = 0  # rows whose largest logit was padding's

    def counts(self, line: Transcript, features: FloatArray | None) -> IntArray:
        shift = 0 if features is None else 1
        tokens, rows, first = line.tokens, line.tokens.size - 2 - shift, line.start - shift
        if rows <= first:
            return np.zeros(0, dtype=np.int64)
        lane = self.decoder.cache.acquire()
        scored, mask = np.arange(first, rows), np.tri(rows, dtype=np.bool_)
        given = self._inputs(None if features is None else features[:rows], front=True)
        known = tokens[shift : shift + rows]
        output = self.decoder.run([Row(lane, self._known(known), np.arange(rows), mask, scored, 0, given)])
        drafted = self._best(output.logits[0])
        own = self._inputs(None if output.hidden is None else output.hidden[0][first:], front=False)
        again = np.concatenate([mask[first:], np.eye(scored.size, dtype=np.bool_)], axis=1)
        output = self.decoder.run([Row(lane, drafted, scored + 1, again, np.arange(scored.size), 0, own, rows)])
        second = self._best(output.logits[0])
        self.decoder.cache.release(lane)
        right = drafted == tokens[scored + shift + 1]
        return right.astype(np.int64) + (right & (second == tokens[scored + shift + 2]))

    def _known(self, tokens: IntArray) -> IntArray:
        """Ids of the target that a smaller draft model never saw become 0, as when it drafts."""
        if self.taps:
            return tokens
        return np.where(tokens < self.decoder.record.vocab_size, tokens, 0)

    def _inputs(self, features: FloatArray | None, front: bool) -> FloatArray | None:
        """HIDDEN_IN: the target's features in ``front``, the drafter's own at the end; the rest is zero."""
        width = self.decoder.record.hidden_in
        if features is None or width is None:
            return None
        padded = np.zeros((len(features), width), dtype=np.float32)
        columns = slice(None, features.shape[1]) if front else slice(width - features.shape[1], None)
        padded[:, columns] = features
        return padded

    def notes(self, lines: Sequence[Transcript]) -> list[str]:
        """How often padding would have been drafted: scored once more, where there is any."""
        if self.vocabulary.target_ids is None and self.decoder.record.vocab_size <= self.vocabulary.size:
            return []
        self.padded = 0
        score(self, lines)
        if not self.padded:
            return []
        return [f"its largest logit lay on a padding row {self.padded} times; compile masks those rows."]

    def _best(self, logits: FloatArray) -> IntArray:
        self.padded += int((self.vocabulary.to_target(logits.argmax(axis=1)) >= self.vocabulary.size).sum())
        columns = np.array([int(self.vocabulary.row(row).argmax()) for row in logits], dtype=np.int64)
        return self.vocabulary.to_target(columns)


@dataclass
class HeadsDrafting:
    """Medusa: head i guesses the token i + 2 places after the position whose features it reads."""

    heads: Heads
    vocabulary: Vocabulary
    taps: tuple[int, ...]

    def counts(self, line: Transcript, features: FloatArray | None) -> IntArray:
        assert features is not None
        scored = np.arange(line.start - 1, line.tokens.size - 3)
        if not scored.size:
            return np.zeros(0, dtype=np.int64)
        guesses = self.guesses(features[scored])[:, :2]
        right = np.stack([guesses[:, i] == line.tokens[scored + 2 + i] for i in range(guesses.shape[1])])
        return np.asarray(np.cumprod(right, axis=0).sum(axis=0), dtype=np.int64)

    def notes(self, lines: Sequence[Transcript]) -> list[str]:
        """How far on each head's guess comes true most often: 2 for the first head, 3 for the second and so on."""
        guesses = [self.guesses(line.features(self.taps)[line.start - 1 :]) for line in lines]
        notes = []
        for head in range(self.heads.record.heads):
            share = {far: self._hits(lines, guesses, head, far) for far in range(1, head + 4)}
            best = max(share, key=lambda far: share[far])
            wrong = "" if best == head + 2 else f", not the one {head + 2} on ({share[head + 2]:.1%})"
            notes.append(f"head {head} predicts the token {best} on ({share[best]:.1%}){wrong}.")
        return notes

    @staticmethod
    def _hits(lines: Sequence[Transcript], guesses: Sequence[IntArray], head: int, far: int) -> float:
        """Share of the guesses of ``head`` that are the token ``far`` places on."""
        hits = []
        for line, guessed in zip(lines, guesses, strict=True):
            future = line.tokens[line.start - 1 + far :]
            hits.append(guessed[: future.size, head] == future[: len(guessed)])
        found = np.concatenate(hits)
        return float(found.mean()) if found.size else 0.0

    def guesses(self, features: FloatArray) -> IntArray:
        """int64 [P, heads]: every head's best token."""
        best = []
        for start in range(0, len(features), HEAD_ROWS):
            logits = self.heads.run(features[start : start + HEAD_ROWS])
            best += [[int(self.vocabulary.row(head).argmax()) for head in row] for row in logits]
        return np.array(best, dtype=np.int64)
