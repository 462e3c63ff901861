"""Lookahead: the window against Jacobi iteration done by hand, the pool, and the loop's tokens."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.decoder import Row
from specrun.drafters.lookahead import Pool, Window
from specrun.economics import Economics, PassCosts
from specrun.proposal import Proposal
from tests.runtime.drafters.cheap import FREE, PROMPTS, TWO_CORES, answers, decode, lookahead, loop_of, recorded
from tests.runtime.tiny_engine import TinyEngine

LENGTH = 120


@pytest.fixture(scope="module")
def engine():
    return TinyEngine()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (5, 2)])
def test_greedy_tokens_are_plain_decodings(engine, shape, batch):
    """Passengers are never emitted and never committed, whatever the window's shape."""
    plain_answers = answers(engine, PROMPTS, max_tokens=LENGTH)
    loop = loop_of(engine, FREE)
    drafter = lookahead(loop.economics, *shape)
    seen = recorded(drafter)
    for start in range(0, len(PROMPTS), batch):
        done = decode(engine, loop, drafter, PROMPTS[start : start + batch], max_tokens=LENGTH)
        assert [s.output for s in done] == plain_answers[start : start + batch]
        assert sum(s.stats.accepted for s in done) > 0
    riders = [0 if proposal.passengers is None else proposal.passengers.tokens.size for proposal in seen]
    assert np.count_nonzero(riders) > 50
    assert all(proposal.tree.size + count <= 16 for proposal, count in zip(seen, riders, strict=True))
    assert not drafter.states and not drafter.windows


def test_window_rows_see_what_the_paper_says(engine):
    """Each window token's logits equal those of a plain prefill of exactly what it may see: prefix, pending token,
    level-0 tokens of columns up to its own, its own column's earlier levels. Guesses in the pass change nothing."""
    prefix, pending = [5, 9, 2, 7, 1], 8
    window = Window([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 3)
    draft = Proposal.chain(pending, [20, 21])
    decoder = engine.decoder()
    lane = decoder.cache.acquire()
    decoder.run([Row.of_chunk(lane, np.array(prefix), logits=False)])
    decoder.cache.commit(lane, range(5))
    row = Row.of_tree(lane, draft.tokens, draft.tree, window.passengers(3))
    logits = decoder.run([row]).logits[0].copy()
    for level in range(3):
        for column in range(3):
            own = [window.levels[above][column] for above in range(1, level + 1)]
            seen = [*prefix, pending, *window.levels[0][: column + 1], *own]
            other = engine.decoder()
            place = other.cache.acquire()
            chunk = Row.of_chunk(place, np.array(seen), logits=True)
            expected = other.run([chunk]).logits[0][0]
            np.testing.assert_allclose(logits[3 + 3 * level + column], expected, rtol=1e-4, atol=1e-4)


def test_window_fills_moves_and_feeds_the_pool():
    window, pool = Window.start([1, 2, 3, 4], 2, 2), Pool(2)
    assert window.levels == [[1, 3]]
    window.observe(one_hot([5, 6]), pool)
    assert window.levels == [[1, 3], [5, 6]] and pool.tails(1) == []
    window.observe(one_hot([0, 0, 7, 8]), pool)
    assert window.levels == [[5, 6], [7, 8]]
    assert pool.tails(1) == [(5, 7)] and pool.tails(3) == [(6, 8)]


def one_hot(tokens):
    return np.eye(10, dtype=np.float32)[tokens]


def test_pool_keeps_the_latest():
    pool = Pool(2)
    for tail in ((2, 3), (4, 5), (2, 3), (6, 7)):
        pool.add([1, *tail])
    assert pool.tails(1) == [(6, 7), (2, 3)]


def test_a_window_that_cannot_pay_is_not_carried(engine):
    """On two cores 28 window tokens cost twice what they bring: the pass stays as narrow as the guesses."""
    loop = loop_of(engine, TWO_CORES)
    drafter = lookahead(loop.economics, 7, 5, 3, capacity=64)
    seen = recorded(drafter)
    decode(engine, loop, drafter, PROMPTS[:2], max_tokens=60)
    assert seen and all(proposal.passengers is None for proposal in seen)


def test_a_window_is_dropped_when_it_does_not_deliver():
    economics = Economics(PassCosts({1: 1.0, 16: 1.3}))
    drafter = lookahead(economics)
    assert drafter.trial.pays(6)
    for _ in range(200):
        drafter.trial.observe(True, 1, economics.cost(7))
    assert not drafter.trial.pays(6)
