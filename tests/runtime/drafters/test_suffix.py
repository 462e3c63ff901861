"""The suffix index against a search of the whole text; the shared store's bound; what counts make of a guess."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.drafters.suffix import LONGEST, OCCURRENCES, SharedTexts, SuffixIndex, counted, likelihood, suffix_sources

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def search(tokens, context):
    """Every earlier occurrence of the context's end: (match length, position after it)."""
    found = []
    for at in range(1, len(tokens)):
        length = 0
        while length < min(at, len(context), LONGEST) and tokens[at - length - 1] == context[-length - 1]:
            length += 1
        if length:
            found.append((length, at))
    pairs = [(length, at) for length, at in found if length > 1]
    return (pairs or found)[-OCCURRENCES:]


@settings(max_examples=100, deadline=None)
@given(texts)
def test_matches_are_those_of_a_full_search(tokens):
    index = SuffixIndex(tokens)
    assert index.find(tokens).occurrences == search(tokens, tokens)


@settings(max_examples=100, deadline=None)
@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_a_path_is_followed_as_if_it_had_been_emitted(tokens, path):
    """Matches along a drafted path are true ones, never taken for longer than they are; none is missed in a search
    that finds a match of two tokens or more."""
    index = SuffixIndex(tokens)
    cursor = index.find(tokens)
    for i, token in enumerate(path):
        cursor = index.advance(cursor, token)
        true = {at: n for n, at in search(tokens, [*tokens, *path[: i + 1]])}
        if len(tokens) <= OCCURRENCES:
            assert all(n <= true[at] for n, at in cursor.occurrences)
            assert bool(cursor.occurrences) == any(n > 1 for n in true.values())


def test_agreement_raises_and_dissent_lowers_a_chance():
    assert likelihood(8, 1, 0) > likelihood(2, 1, 0)
    assert likelihood(2, 4, 0) > likelihood(2, 1, 0) > likelihood(2, 1, 3)


def test_the_longest_match_leads_and_chances_stay_a_law():
    #         0  1  2  3  4  5  6  7  8  9
    tokens = [1, 2, 9, 5, 1, 2, 8, 4, 5, 1, 2]
    guesses = counted("s", 1, tokens, SuffixIndex(tokens).find(tokens).occurrences)
    assert [guess.token for guess in guesses] == [8, 9]
    assert sum(guess.chance for guess in guesses) <= 1
    assert [guess.token for guess in counted("s", 3, tokens, SuffixIndex(tokens).find(tokens).occurrences)] == [8]


def test_shared_store_keeps_its_bound_and_the_texts_in_use():
    """H04: a bounded number of tokens, however many requests end; texts that matched last stay longest."""
    rng = np.random.default_rng(0)
    store = SharedTexts(1000, lambda tokens, occurrences: counted("shared", 1, tokens, occurrences))
    useful = [900, 901, 902, 903, 904, 905]
    store.close(useful)
    for _ in range(200):
        store.close(rng.integers(0, 800, 90).tolist())
        assert len(store.index.tokens) <= 1000 and store.size == len(store.index.tokens)
        reader = store.read([7, 900, 901, 902])
        assert [guess.token for guess in reader.guesses(reader.root())] == [903]
    store.close(list(range(5000)))
    assert len(store.index.tokens) <= 1000


def test_texts_of_earlier_requests_are_found_but_never_run_into_each_other():
    _, shared = suffix_sources("suffix", shared=1000)
    shared.close([1, 2, 3])
    shared.close([4, 5, 6])
    reader = shared.read([9, 2])
    assert [guess.token for guess in reader.guesses(reader.root())] == [3]
    reader.append(3)
    assert reader.guesses(reader.root()) == []


@pytest.mark.parametrize("length", [1, 500])
def test_memory_of_an_index_is_bounded_by_its_text(length):
    index = SuffixIndex([5] * length)
    assert all(len(places) <= 2 * OCCURRENCES for places in index._after.values())
    assert len(index.find(index.tokens).occurrences) == min(OCCURRENCES, max(0, length - 2 if length > 2 else 0))
