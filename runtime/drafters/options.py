"""From a drafter's options in the manifest to how its drafts grow."""

from __future__ import annotations

from typing import TypedDict

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext
from specrun.drafters.growth import BestFirst, DrawnChain, Grower, StaticTree
from specrun.drafters.pacing import Pacing
from specrun.drafters.vocabulary import Vocabulary
from specrun.rules import BlockVerification, Rule, SampleAndMatch

LEAST = 0.3  # a drawn chain ends where the drafter's chance of the whole chain falls below


class Growers(TypedDict):
    greedy: Grower
    sampled: Grower
    rule: Rule
    pacing: Pacing | None


def growers(record: DrafterRecord, context: DraftContext, vocabulary: Vocabulary) -> Growers:
    """``record.options``: depth, topk, total_nodes; ``adaptive`` (1: they are upper bounds); ``tree``: choice paths.

    With a ``topk`` of 1 drafts are chains, which are drawn from the drafter's law for sampled requests and judged as
    a block; trees hold the best candidates and are judged by sample-and-match.
    """
    options, eos = record.options, context.eos_token_ids
    pacing = Pacing(context.economics) if options["adaptive"] else None
    if "tree" in options:
        static = StaticTree(record.name, vocabulary, options["tree"], pacing)
        return Growers(greedy=static, sampled=static, rule=SampleAndMatch(), pacing=pacing)
    depth, topk, total = options["depth"], options["topk"], options["total_nodes"]
    best = BestFirst(record.name, vocabulary, eos, depth, topk, total, pacing)
    if topk > 1:
        return Growers(greedy=best, sampled=best, rule=SampleAndMatch(), pacing=pacing)
    drawn = DrawnChain(record.name, vocabulary, eos, min(depth, total), LEAST if options["adaptive"] else 0.0)
    return Growers(greedy=best, sampled=drawn, rule=BlockVerification(), pacing=pacing)
