"""mtp: multi-token-prediction layers, one for each drafted token; the last one is reused for deeper drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specrun.bundle import DrafterRecord
from specrun.cache import Lane
from specrun.decoder import Decoder, Row
from specrun.drafters import DraftContext
from specrun.drafters.eagle import FeatureDrafter
from specrun.proposal import Commit, FloatArray
from specrun.sequence import Sequence


@dataclass
class Fed:
    """One sequence's part of a later layer: its lane, and the earlier layer's features of rows it has not run."""

    lane: Lane
    waiting: list[FloatArray] = field(default_factory=list)


@dataclass
class Mtp(FeatureDrafter):
    """Layer k's row i holds layer k - 1's features at position i and the token at i + 1 + k (DeepSeek-AI 2024, 2.2).

    Layer k drafts from the row of the last committed position: the tokens before it that only the draft knows give it
    no rows of their own, so from the third layer on its cache has a hole of k - 1 rows there.
    """

    later: list[Decoder] = field(default_factory=list)
    _fed: dict[Sequence, list[Fed]] = field(default_factory=dict)
    _starts_at: dict[Sequence, int] = field(default_factory=dict)  # position of the first observed row

    @classmethod
    def open(cls, record: DrafterRecord, context: DraftContext) -> Mtp:
        drafter = super().open(record, context)
        assert isinstance(drafter, Mtp)
        drafter.later = [context.open_decoder(engine) for engine in record.options["engines"][1:]]
        return drafter

    def stage(self, level: int) -> Decoder:
        return ([self.decoder, *self.later])[min(level, len(self.later))]

    def lane(self, sequence: Sequence, level: int) -> Lane:
        layer = min(level, len(self.later))
        return self._fed[sequence][layer - 1].lane if layer else super().lane(sequence, level)

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self._fed[sequence] = [Fed(decoder.cache.acquire()) for decoder in self.later]

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        for decoder, fed in zip(self.later, self._fed.pop(sequence, ()), strict=False):
            decoder.cache.release(fed.lane)
        self._starts_at.pop(sequence, None)

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        self._starts_at.setdefault(sequence, commit.start)
        super().observe(sequence, commit)

    def caught_up(self, sequence: Sequence, hidden: FloatArray | None) -> None:
        """Passes the features of new rows from layer to layer, as far as the tokens they go with are known."""
        for layer, (decoder, fed) in enumerate(zip(self.later, self._fed[sequence], strict=True), start=1):
            assert hidden is not None
            fed.waiting.append(hidden.copy())
            features = np.concatenate(fed.waiting)
            first = self._starts_at[sequence] + fed.lane.length + 1 + layer
            tokens = np.array(sequence.tokens[first : first + features.shape[0]], dtype=np.int64)
            count, fed.waiting = tokens.size, [features[tokens.size :]]
            hidden = np.zeros((0, features.shape[1]), dtype=np.float32)
            if count:
                row = Row.of_chunk(fed.lane, tokens, logits=False, hidden_in=features[:count])
                output = decoder.run([row])
                decoder.cache.commit(fed.lane, range(count))
                assert output.hidden is not None
                hidden = output.hidden[0]
