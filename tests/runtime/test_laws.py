"""The law of what the loop emits, as a distribution: 20,000 draws of the next two tokens against exact numbers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specrun.proposal import Proposal
from specrun.sampling import SamplingParams
from specrun.sequence import Sequence
from specrun.text import TextStream
from specrun.tree import DraftTree
from tests.runtime.markov_engine import MarkovEngine
from tests.runtime.scripted import Scripted, nothing
from tests.runtime.test_loop import Characters

DRAWS = 20_000
VOCAB = 7
ENGINE = MarkovEngine(np.random.default_rng(5).normal(size=(VOCAB, VOCAB)) * 1.5)


def exact(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The warps written out: temperature, top-k, top-p (the smallest set that reaches it), min-p."""
    p = np.exp(row.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def guesses(vocab: int) -> Scripted:
    """Trees of random tokens, duplicates included, chosen without a look at what the target will draw."""
    rng = np.random.default_rng(11)

    def draft(sequence, budget):
        tokens = np.array([sequence.pending, *rng.integers(0, vocab, 3)])
        return Proposal(tokens, DraftTree(np.array([-1, 0, 0, 0]))).prefix(budget + 1)

    return Scripted(draft)


def draw(params: dict, drafter: Scripted, seeds: range) -> np.ndarray:
    """Counts [V, V, V] of the three tokens after prompt (2,): the first is prefill's, the next two the loop's."""
    loop, counts = ENGINE.loop(max_batch=64), np.zeros((VOCAB,) * 3, np.int64)
    waiting = list(seeds)
    while waiting or loop.active:
        done = []
        while waiting and loop.has_room:
            settings = SamplingParams(max_tokens=3, seed=waiting.pop(), ignore_eos=True, **params)
            sequence = Sequence(
                [2], settings, drafter, drafter.rule, TextStream(Characters()), frozenset(), ENGINE.max_length
            )
            loop.admit(sequence)
        done = list(loop.active)
        loop.step()
        for sequence in done:
            if sequence.finish_reason:
                counts[tuple(sequence.output)] += 1
    return counts


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 4, "min_p": 0.2},
]


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_law_of_the_next_two_tokens(settings, drafted):
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    rows = np.stack([exact(row, **off) for row in ENGINE.logits])
    seeds = range(DRAWS) if drafted else range(10**6, 10**6 + DRAWS)
    counts = draw(settings, guesses(VOCAB) if drafted else nothing(), seeds)
    expected = rows[2][:, None, None] * rows[:, :, None] * rows[None] * DRAWS
    assert counts.sum() == DRAWS and not counts[expected == 0].any()
    small = expected < 5
    seen = np.append(counts[~small], counts[small].sum())
    hoped = np.append(expected[~small], expected[small].sum())
    keep = hoped > 0
    p = stats.chisquare(seen[keep], hoped[keep] * seen[keep].sum() / hoped[keep].sum()).pvalue
    print(f"{settings} drafted={drafted}: p = {p:.3f}")
    assert p > 1e-3


def test_the_replacement_comes_from_the_row_of_the_rejection():
    """B06: after 0 comes 1 or 2; only 3 follows 1, 4 follows 2, 0 follows those. Drafts say 1, 3, 0 always."""
    logits = np.full((5, 5), -np.inf)
    logits[0, [1, 2]] = 0
    logits[1, 3] = logits[2, 4] = logits[3, 0] = logits[4, 0] = 0
    engine = MarkovEngine(logits)
    for length in (1, 4):
        script = {0: [1, 3, 0, 1], 1: [3, 0, 1, 3], 2: [4, 0, 1, 3], 3: [0, 1, 3, 0], 4: [0, 1, 3, 0]}

        def draft(s, budget, length=length, script=script):
            return Proposal.chain(s.pending, script[s.pending][: min(length, budget)])

        drafter = Scripted(draft)
        settings = SamplingParams(max_tokens=5000, temperature=1.0, seed=length, ignore_eos=True)
        s = Sequence([0], settings, drafter, drafter.rule, TextStream(Characters()), frozenset(), engine.max_length)
        loop = engine.loop(1)
        loop.admit(s)
        while loop.active:
            loop.step()
        bigrams = set(zip(s.tokens, s.tokens[1:], strict=False))
        assert bigrams == {(0, 1), (0, 2), (1, 3), (2, 4), (3, 0), (4, 0)}
        assert s.lane.length == len(s.tokens) - 1 == 5000
        assert abs(np.mean([t == 1 for t in s.tokens if t in (1, 2)]) - 0.5) < 0.05
