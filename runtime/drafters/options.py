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


def tree_grower(
    record: DrafterRecord, context: DraftContext, vocabulary: Vocabulary, pacing: Pacing | None
) -> BestFirst | StaticTree:
    """How trees of the best candidates grow. Where the target verifies nothing but chains, they are chains."""
    options, chains = record.options, context.target.chains_only
    if "tree" in options:
        paths = [path for path in options["tree"] if not chains or not any(path)]
        return StaticTree(record.name, vocabulary, paths, pacing)
    topk = 1 if chains else options["topk"]
    depth, total = options["depth"], options["total_nodes"]
    return BestFirst(record.name, vocabulary, context.eos_token_ids, depth, topk, total, pacing)


def growers(record: DrafterRecord, context: DraftContext, vocabulary: Vocabulary) -> Growers:
    """``record.options``: depth, topk, total_nodes; ``adaptive`` (1: they are upper bounds); ``tree``: choice paths.

    With a ``topk`` of 1 drafts are chains, which are drawn from the drafter's law for sampled requests and judged as
    a block; trees hold the best candidates and are judged by sample-and-match.
    """
    options, eos = record.options, context.eos_token_ids
    pacing = Pacing(context.economics) if options["adaptive"] else None
    best = tree_grower(record, context, vocabulary, pacing)
    depth, total = options["depth"], options["total_nodes"]
    if "tree" in options or options["topk"] > 1:
        return Growers(greedy=best, sampled=best, rule=SampleAndMatch(), pacing=pacing)
    drawn = DrawnChain(record.name, vocabulary, eos, min(depth, total), LEAST if options["adaptive"] else 0.0)
    return Growers(greedy=best, sampled=drawn, rule=BlockVerification(), pacing=pacing)
