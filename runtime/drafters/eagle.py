"""Heads that are conditioned on the target's features: EAGLE-1, EAGLE-2, EAGLE-3, and a single MTP layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import load_file

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext
from specrun.drafters.decoding import Chunk, DecoderDrafter
from specrun.drafters.options import growers
from specrun.drafters.vocabulary import Vocabulary
from specrun.proposal import Commit, FloatArray
from specrun.sequence import Sequence
from specrun.tree import IntArray


@dataclass
class Observed:
    """What the target has committed and the head has not seen: tokens int64 [K], one place on, and features [K, W]."""

    tokens: list[IntArray] = field(default_factory=list)
    features: list[FloatArray] = field(default_factory=list)

    def take(self) -> tuple[IntArray, FloatArray]:
        """All of it; nothing is left."""
        tokens, features = np.concatenate(self.tokens), np.concatenate(self.features)
        self.tokens, self.features = [], []
        return tokens, features

    @property
    def size(self) -> int:
        return sum(tokens.size for tokens in self.tokens)


@dataclass
class FeatureDrafter(DecoderDrafter):
    """Row i of the head's cache holds the target's features at position i and the token at i + 1.

    Rows count from where features were first observed: with rotary positions only their differences matter, so a
    sequence that starts on a lane with a prefix is drafted for without that prefix. Rows that were drafted carry the
    head's own features in place of the target's and are never kept.
    """

    _observed: dict[Sequence, Observed] = field(default_factory=dict)

    @classmethod
    def open(cls, record: DrafterRecord, context: DraftContext) -> FeatureDrafter:
        ids = None
        if record.arrays is not None:
            ids = load_file(context.bundle.file(record.arrays))["target_ids"]
        limits = context.bundle.manifest.limits
        return cls(
            record.name,
            context.open_decoder(record.engine or record.name),
            **growers(record, context, Vocabulary(context.tokenizer_size, ids)),
            prefill_chunk=limits.prefill_chunk,
            max_nodes=limits.max_nodes,
            taps=tuple(record.options["taps"]),
        )

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self._observed[sequence] = Observed()

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._observed.pop(sequence, None)

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        """Queues the new rows. A queue as long as a prefill chunk is run, so that memory stays flat without drafts."""
        super().observe(sequence, commit)
        observed = self._observed[sequence]
        assert commit.hidden is not None  # the target exposes the taps of every drafter of its bundle
        observed.tokens.append(np.append(commit.tokens[1:], commit.next_token))
        observed.features.append(commit.hidden)
        if observed.size > self.prefill_chunk:
            last = self.flush(sequence, self.missing(sequence), 1)
            assert last.features is not None
            observed.tokens.append(last.tokens.copy())
            observed.features.append(last.features[:, : commit.hidden.shape[1]].copy())

    def backlog(self, sequence: Sequence) -> int:
        return self._observed[sequence].size

    def missing(self, sequence: Sequence) -> Chunk:
        tokens, given = self._observed[sequence].take()
        features = np.zeros((tokens.size, self.decoder.record.hidden_in or 0), dtype=np.float32)
        features[:, : given.shape[1]] = given
        return Chunk(tokens, features)
