"""Drafters: objects that propose. Nothing outside this package asks which drafter it is talking to."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
    """

    name: str
    rule: Rule
    taps: tuple[int, ...]

    def begin(self, sequence: Sequence) -> None:
        """Before the sequence's prefill."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One proposal a sequence, of at most ``budgets[i]`` drafted nodes. Drafting fewer, or none, is always right."""

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        """After rows entered the target's cache: prefill chunks and verified paths alike. ``hidden`` is its to keep."""

    def end(self, sequence: Sequence) -> None:
        """The sequence is over: drops its state. Its lane in the target's cache may live on (chat)."""


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is built from. Set by the engine when it opens a bundle."""

    bundle: Bundle
    target: EngineRecord
    economics: Economics
    tokenizer_size: int
    eos_token_ids: frozenset[int]
    open_decoder: Callable[[str], Decoder]  # a decoder engine of the bundle, with a cache for as many lanes as the target's
    open_heads: Callable[[str], Heads]  # a head engine of the bundle
    open_drafter: Callable[[str], Drafter]  # another drafter of the bundle: hybrids are made of drafters


KINDS = {
    "none": "specrun.drafters.none:NoDrafter",
    "prompt-lookup": "specrun.drafters.prompt_lookup:PromptLookup",
}


def open_drafter(record: DrafterRecord, context: DraftContext) -> Drafter:
    """The drafter of a record: ``CLASS.open(record, context)``. Raises BundleError for an unknown kind."""
    if record.kind not in KINDS:
        raise BundleError(f"Drafter {record.name!r}: kind {record.kind!r} is unknown; this specrun runs {sorted(KINDS)}.")
    module, _, name = KINDS[record.kind].partition(":")
    drafter: Drafter = getattr(importlib.import_module(module), name).open(record, context)
    return drafter
