"""No drafting: plain decoding is the same loop with empty proposals."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext
from specrun.proposal import Commit, Proposal
from specrun.rules import SampleAndMatch
from specrun.sequence import Sequence


class NoDrafter:
    name = "none"
    rule = SampleAndMatch()
    taps: tuple[int, ...] = ()

    @staticmethod
    def open(record: DrafterRecord, context: DraftContext) -> NoDrafter:
        return NoDrafter()

    def begin(self, sequence: Sequence) -> None:
        pass

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return [Proposal.empty(sequence.pending) for sequence in sequences]

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        pass

    def end(self, sequence: Sequence) -> None:
        pass
