"""The static n-gram table against counting by hand."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.train.corpus import Corpus
from tools.train.ngram import arrays, count_table, pack

CONVERSATIONS = st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=20), min_size=1, max_size=6)


def by_hand(texts: list[list[int]], prompt: int, order: int) -> dict[tuple[int, ...], Counter[int]]:
    following: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for at in range(max(prompt, order), len(text)):
            following[tuple(text[at - order : at])][text[at]] += 1
    return following


@settings(max_examples=60, deadline=None)
@given(CONVERSATIONS, st.sampled_from([2, 3]), st.integers(1, 2))
def test_the_table_holds_the_likeliest_next_tokens(texts: list[list[int]], order: int, least: int) -> None:
    table = count_table(Corpus.of((text, 2) for text in texts), order, least, least_share=0.5)
    counted = by_hand(texts, 2, order)
    for context, following in counted.items():
        best, total = max(following.values()), sum(following.values())
        found = table.lookup([9, *context])
        if best < least or best < 0.5 * total:
            assert found is None
        else:
            assert found is not None
            assert following[found[0]] == best and found[1] == best / total
    assert len(table.keys) <= len(counted)


def test_an_unknown_context_has_no_row() -> None:
    table = count_table(Corpus.of([([1, 2, 3, 4, 1, 2, 3, 4], 0)]), 2, 1, 0.0)
    assert table.lookup([2, 1]) is None
    assert table.lookup([1, 2]) == (3, 1.0)


def test_keys_keep_large_ids_apart() -> None:
    contexts = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [151935, 151934, 7]])
    assert len(set(pack(contexts).tolist())) == 4


def test_long_counts_are_scaled_not_wrapped() -> None:
    table = count_table(Corpus.of([([5, 6] * 100_000, 0)]), 2, 1, 0.0)
    assert table.lookup([5, 6]) == (5, 1.0)
    assert arrays([table])["count_2"].dtype == np.uint16
