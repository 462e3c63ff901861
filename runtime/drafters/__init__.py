"""Drafters: objects that propose. Nothing outside this package asks which drafter it is talking to."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specrun.errors import BundleError

if TYPE_CHECKING:
    from specrun.bundle import Bundle, DrafterRecord, EngineRecord
    from specrun.decoder import Decoder
    from specrun.economics import Economics
    from specrun.heads import Heads
    from specrun.proposal import Commit, Proposal
    from specrun.rules import Rule
    from specrun.sequence import Sequence


class Drafter(Protocol):
    """Proposes tokens for the target to verify; keeps its own state per sequence from ``begin`` to ``end``.

    ``rule`` verifies its proposals. ``taps`` names the target's residual streams it wants in ``Commit.hidden``, in
    order; empty when it needs none.

    Members of a hybrid keep this protocol. A hybrid asks a member only where its draft may pay, so a member can go
    many commits without a ``propose``: it catches up when it is asked next, not in ``observe``. The ``Commit`` that a
    member sees carries the member's own proposal (None when it was not asked) and the verdict on it: ``path`` walks
    the member's tree and ends where the emitted tokens leave it, so ``path`` may be shorter than ``Commit.tokens``.
    """

    name: str
    rule: Rule
    taps: tuple[int, ...]

    def begin(self, sequence: Sequence) -> None:
        """Before the sequence's prefill."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One proposal a sequence, of at most ``budgets[i]`` drafted nodes. Drafting fewer or none is always right."""

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        """After rows entered the target's cache: prefill chunks and verified paths alike. ``hidden`` is its to keep."""

    def end(self, sequence: Sequence) -> None:
        """The sequence is over: drops its state. Its lane in the target's cache may live on (chat)."""


@runtime_checkable
class Priced(Protocol):
    """Optional, for drafters that run an engine: what a draft costs, before it is asked for, and drafts on demand."""

    def draft_now(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """``propose`` without asking whether drafting pays: whoever knows the price has decided that."""

    def draft_costs(self, length: int) -> list[float]:
        """Cost of drafting each of ``length`` depths in turn, in plain target passes (the same batch, N = 1).

        The first one includes what must be caught up on. Measured when the drafter is opened.
        """


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is built from. Set by the engine when it opens a bundle.

    ``economics`` is the drafter's own part of the engine's (``Economics.of``): its pace and its acceptance rates.
    """

    bundle: Bundle
    target: EngineRecord
    economics: Economics
    tokenizer_size: int
    eos_token_ids: frozenset[int]
    open_decoder: Callable[[str], Decoder]  # a decoder of the bundle, with a cache for as many lanes as the target's
    open_heads: Callable[[str], Heads]  # a head engine of the bundle
    open_drafter: Callable[[str], Drafter]  # another drafter of the bundle: hybrids are made of drafters


KINDS = {
    "eagle": "specrun.drafters.eagle:FeatureDrafter",
    "medusa": "specrun.drafters.medusa:Medusa",
    "mtp": "specrun.drafters.mtp:Mtp",
    "eagle3": "specrun.drafters.eagle:FeatureDrafter",
    "draft-model": "specrun.drafters.draft_model:DraftModel",
    "none": "specrun.drafters.none:NoDrafter",
    "prompt-lookup": "specrun.drafters.prompt_lookup:PromptLookup",
    "suffix": "specrun.drafters.suffix:Suffix",
    "ngram": "specrun.drafters.ngram_table:Ngram",
    "lookahead": "specrun.drafters.lookahead:Lookahead",
    "hybrid": "specrun.drafters.hybrid:Hybrid",
}


def open_drafter(record: DrafterRecord, context: DraftContext) -> Drafter:
    """The drafter of a record: ``CLASS.open(record, context)``. Raises BundleError for an unknown kind."""
    if record.kind not in KINDS:
        raise BundleError(f"Drafter {record.name!r}: unknown kind {record.kind!r}; this specrun runs {sorted(KINDS)}.")
    module, _, name = KINDS[record.kind].partition(":")
    context = replace(context, economics=context.economics.of(record.name))
    drafter: Drafter = getattr(importlib.import_module(module), name).open(record, context)
    return drafter
