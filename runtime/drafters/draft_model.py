"""draft-model: a small language model with the target's vocabulary drafts, a token a step."""

from __future__ import annotations

import numpy as np

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext
from specrun.drafters.decoding import Chunk, DecoderDrafter
from specrun.drafters.options import growers
from specrun.drafters.vocabulary import Vocabulary
from specrun.proposal import Commit
from specrun.sequence import Sequence


class DraftModel(DecoderDrafter):
    """Its cache holds a prefix of the sequence's tokens: what is missing is caught up on when a draft is asked for."""

    @staticmethod
    def open(record: DrafterRecord, context: DraftContext) -> DraftModel:
        decoder = context.open_decoder(record.engine or record.name)
        vocabulary = Vocabulary(context.tokenizer_size)
        limits = context.bundle.manifest.limits
        return DraftModel(
            record.name,
            decoder,
            **growers(record, context, vocabulary),
            prefill_chunk=limits.prefill_chunk,
            max_nodes=limits.max_nodes,
        )

    def backlog(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self._states[sequence].lane.length

    def missing(self, sequence: Sequence) -> Chunk:
        tokens = np.array(sequence.tokens[self._states[sequence].lane.length :], dtype=np.int64)
        tokens[tokens >= self.decoder.record.vocab_size] = 0  # ids of the target that a smaller draft model never saw
        return Chunk(tokens)

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        """Keeps the rows of accepted tokens. The last drafted token has none: no pass was needed after it."""
        state = self._states[sequence]
        if state.draft is not None and commit.verdict is not None and commit.proposal is not None:
            path = [state.draft.kept[node] for node in commit.verdict.path[1:]]
            rows = [state.rows[node] for node in path if node in state.rows]
            self.decoder.cache.commit(state.lane, rows)
        super().observe(sequence, commit)
