"""Prompt lookup (Saxena 2023): what followed the last tokens' latest earlier occurrence, proposed again.

Suffix drafting with one occurrence: among those that match longest (up to ``max_ngram`` tokens) the newest is followed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext
from specrun.drafters.sources import Guess, Source, SourceDrafter, bucket
from specrun.drafters.suffix import LONGEST, Occurrence, OwnText, likelihood


class PromptLookup(SourceDrafter):
    @staticmethod
    def open(record: DrafterRecord, context: DraftContext) -> PromptLookup:
        options = dict(record.options)
        shortest, longest = options.pop("min_ngram"), options.pop("max_ngram")

        def rank(tokens: Seq[int], occurrences: Seq[Occurrence]) -> list[Guess]:
            return newest(record.name, shortest, longest, tokens, occurrences)

        sources: list[Source] = [OwnText(rank)]
        return PromptLookup(
            record.name, context.economics, context.eos_token_ids, sources, options["max_length"], width=1
        )


def newest(name: str, shortest: int, longest: int, tokens: Seq[int], occurrences: Seq[Occurrence]) -> list[Guess]:
    """One guess: the continuation of the newest among the occurrences whose match (up to ``longest``) is longest."""
    if not occurrences:
        return []
    matched, at = max((min(length, longest), at) for length, at in occurrences)
    if matched < shortest:
        return []
    matched = min(LONGEST, max(length for length, place in occurrences if place == at))
    chance = likelihood(matched, 1, 0)
    return [Guess(tokens[at], chance, (name, bucket(chance)))]
