"""Warps and penalties against the textbook, written the slow way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.distribution import BLOCK, Distribution
from specrun.draft_law import draft_law, draw_with_replacement, draw_without_replacement
from specrun.errors import RequestError, UserError
from specrun.proposal import DenseLaw, SparseLaw
from specrun.random import Uniforms
from specrun.sampling import SamplingParams
from specrun.warp import History, penalized, warp

SAMPLED = SamplingParams(temperature=1.0)


def textbook(row, params):
    """The warped law as float64 [V], by full sorts, renormalizing after every cut."""
    logits = np.asarray(row, dtype=np.float64)
    if params.temperature == 0:
        return np.eye(logits.size)[int(np.argmax(logits))]
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    if params.top_k:
        p = np.where(p >= np.sort(p)[::-1][min(params.top_k, p.size) - 1], p, 0)
        p /= p.sum()
    if params.top_p < 1:
        mass_above = np.array([p[p > x].sum() for x in p])
        p = np.where(mass_above < params.top_p, p, 0)
        p /= p.sum()
    p = np.where(p >= params.min_p * p.max(), p, 0)
    return p / p.sum()


def dense(law, size):
    out = np.zeros(size)
    out[np.arange(size) if law.tokens is None else law.tokens] = law.probs
    return out


def row(size, seed, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1.0, 0.99, 0.8, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_warp_is_the_textbook(size, seed, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = row(size, seed)
    law = warp(logits, params, History([0]))
    np.testing.assert_allclose(dense(law, size), textbook(logits, params), atol=1e-6)
    assert law.probs.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("scale", [0.01, 2.0, 8.0])
@pytest.mark.parametrize("top_p", [0.95, 0.5])
def test_the_nucleus_of_a_large_vocabulary(scale, top_p):
    logits = row(5000, 3, scale)
    params = SamplingParams(temperature=0.7, top_p=top_p)
    np.testing.assert_allclose(dense(warp(logits, params, History([0])), 5000), textbook(logits, params), atol=1e-6)


def test_b10_ties_are_kept_whole_and_degenerate_rows_are_laws():
    tied = np.zeros(8, dtype=np.float32)
    for params in (SamplingParams(temperature=1, top_k=3), SamplingParams(temperature=1, top_p=0.4)):
        np.testing.assert_allclose(dense(warp(tied, params, History([0])), 8), np.full(8, 1 / 8))
    masked = np.array([-np.inf, 1.0, -np.inf, -np.inf], dtype=np.float32)
    everything = SamplingParams(temperature=1e-40, top_k=3, top_p=0.9, min_p=0.1)
    assert dense(warp(masked, everything, History([0])), 4).tolist() == [0, 1, 0, 0]
    assert dense(warp(np.array([3.0], np.float32), everything, History([0])), 1).tolist() == [1]


def test_b11_greedy_is_the_lowest_id_among_ties_whatever_top_p_says():
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=1, top_p=0.1, min_p=0.5)):
        assert dense(warp(np.array([1, 1, 0], np.float32), params, History([0])), 3).tolist() == [1, 0, 0]


@pytest.mark.parametrize("bad", [[np.nan, 1], [np.inf, 1], [-np.inf, -np.inf]])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(UserError, match="logits: the largest of a row is"):
        warp(np.array(bad, np.float32), SAMPLED, History([0]))


def test_b08_penalties_follow_prompt_output_and_path():
    history = History([1, 2])
    history.append(3)
    history.append(3)
    params = SamplingParams(temperature=1, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = np.array([4, 4, -4, 4, 4, 4], dtype=np.float32)
    out = penalized(logits, params, history, [2, 4, 4])
    # 1: prompt only; 2: prompt and path, negative; 3: output twice; 4: path twice
    np.testing.assert_allclose(out, [4, 2, -8 - 0.5 - 0.25, 2 - 1 - 0.25, 2 - 1 - 0.25, 4])
    assert logits.tolist() == [4, 4, -4, 4, 4, 4], "the engine's row is left as it was"
    np.testing.assert_allclose(penalized(logits, params, history), [4, 2, -8, 2 - 1 - 0.25, 4, 4])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300)), st.lists(st.integers(0, 300)), st.lists(st.integers(0, 300), max_size=6))
def test_a_path_counts_as_appended_tokens_would(prompt, output, path):
    history, longer = History(prompt), History(prompt)
    for token in output:
        history.append(token)
        longer.append(token)
    seen = dict(zip(*map(lambda a: a.tolist(), history.along(path)), strict=True))
    for token in path:
        longer.append(token)
    assert seen == {t: longer.output_count(t) for t in {*longer.tokens}}
    assert history.tokens == prompt + output and history.prompt_length == len(prompt)
    assert sum(history.output_count(t) for t in set(output)) == len(output)


def test_penalized_copies_only_when_something_applies():
    logits = row(10, 0)
    assert penalized(logits, SAMPLED, History([1])) is logits
    biased = penalized(logits, SamplingParams(logit_bias={3: -100.0}), History([1]))
    assert biased[3] == logits[3] - 100 and biased is not logits


def test_a_bias_on_an_unknown_token_is_refused():
    with pytest.raises(RequestError, match=r"found token id 10; this model's ids end at 9"):
        penalized(row(10, 0), SamplingParams(logit_bias={10: 1.0}), History([1]))


def test_quantile_is_the_inverse_cdf_in_token_order():
    law = Distribution(np.array([2, 5, 9]), np.array([1, 0, 3], np.float32))
    assert [law.quantile(u) for u in (0, 0.2499, 0.25, 0.999)] == [2, 2, 9, 9]


@pytest.mark.parametrize("size", [4 * BLOCK, 4 * BLOCK + 1, 20 * BLOCK + 77])
def test_quantile_over_blocks_agrees_with_one_running_sum(size):
    weights = np.random.default_rng(1).exponential(1, size).astype(np.float32)
    weights[: BLOCK + 3] = 0
    weights[-BLOCK - 5 :] = 0
    law = Distribution(None, weights)
    running = np.cumsum(weights, dtype=np.float64)
    for u in [0.0, 1 - 2.0**-24, *np.random.default_rng(2).random(200)]:
        expected = int(np.searchsorted(running, u * running[-1], side="right"))
        assert law.quantile(u) == expected and weights[expected] > 0


def test_excess_is_the_positive_part():
    p = Distribution(None, np.array([0.5, 0.25, 0.25, 0], np.float32))
    sparse = Distribution(np.array([0, 3]), np.array([0.75, 0.25], np.float32))
    for other in (sparse, Distribution(None, dense(sparse, 4))):
        left, mass = p.excess(other)
        assert mass == 0.5 and left.probs.tolist() == [0, 0.5, 0.5, 0]
    left, mass = sparse.excess(p, scale=0.8)
    assert mass == pytest.approx(0.3) and left.probs == pytest.approx([1 / 3, 2 / 3])
    assert p.excess(p) == (p, 0.0)


def test_laws_that_are_no_laws_are_refused():
    for law in (
        DenseLaw(np.zeros(3, np.float32)),
        DenseLaw(np.array([1, -1, 1], np.float32)),
        SparseLaw(np.array([1, 1]), np.array([0.5, 0.5], np.float32)),
    ):
        with pytest.raises(ValueError):
            Distribution.of(law)


def test_draft_law_is_the_warped_law_and_maps_a_pruned_vocabulary():
    logits, params = row(50, 5), SamplingParams(temperature=0.8, top_k=7, logit_bias={3: 2.0})
    law = Distribution.of(draft_law(logits, params, History([1])))
    np.testing.assert_array_equal(law.probs, warp(logits, params, History([1])).probs)
    vocabulary = np.random.default_rng(0).permutation(500)[:50]
    mapped = draft_law(logits, params, History([1]), vocabulary=vocabulary)
    plain = warp(logits, SamplingParams(temperature=0.8, top_k=7), History([1]))
    np.testing.assert_array_equal(Distribution.of(mapped).on(vocabulary[plain.tokens]), plain.probs)


def test_draws_are_distinct_without_replacement_and_end_with_the_support():
    law = SparseLaw(np.array([4, 7, 9]), np.array([0.1, 0.7, 0.2], np.float32))
    for seed in range(20):
        assert sorted(draw_without_replacement(law, 5, Uniforms(seed), 3, 1)) == [4, 7, 9]
    drawn = draw_with_replacement(law, 3000, Uniforms(0), 3, 1)
    assert np.mean(np.array(drawn) == 7) == pytest.approx(0.7, abs=0.03)


def test_history_grows_past_its_first_arrays() -> None:
    history = History([1, 2])
    for token in [*range(300), *range(0, 300, 2)]:
        history.append(token)
    assert [history.output_count(t) for t in (0, 1, 63, 64, 298, 299)] == [2, 1, 1, 2, 2, 1]
