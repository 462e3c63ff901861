"""Sampled output through the real loop follows the target's law: the statistical twin of `specbuild prove`."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from specrun import contract
from specrun.draft_law import draft_law, draw_with_replacement, draw_without_replacement
from specrun.proposal import Proposal
from specrun.rules import (
    BlockVerification,
    ChainRejection,
    SampleAndMatch,
    TreeRejectionWithoutReplacement,
    TreeRejectionWithReplacement,
)
from specrun.sampling import SamplingParams
from specrun.tree import DraftTree
from specrun.warp import History, warp
from tests.runtime.scripted import Scripted
from tests.runtime.test_loop import finish, sequence
from tests.runtime.tiny_engine import TinyEngine

SETTINGS = {"temperature": 0.9, "top_p": 0.97, "frequency_penalty": 0.5, "max_tokens": 6}
PROMPT = [3, 1, 0, 1, 2]
CHAIN, TREE = (-1, 0, 1), (-1, 0, 0, 1, 2)
SEEDS = 320


def drawn(noise: np.ndarray, parents: tuple[int, ...], draw, rule) -> Scripted:
    """Draws a tree from a bad bigram model."""
    shape = DraftTree(np.array(parents))

    def draft(sequence, budget):
        tree = shape.prefix(budget + 1)
        tokens, laws = [sequence.pending, *[0] * (tree.size - 1)], {}
        for node in (n for n in range(tree.size) if tree.children[n]):
            path = [tokens[n] for n in tree.path_to(node)[1:]]
            children = tree.children[node]
            laws[node] = draft_law(noise[tokens[node]], sequence.params, sequence.history, path)
            found = draw(laws[node], len(children), sequence.uniforms, len(sequence.tokens), children[0])
            assert len(found) == len(children)
            for child, token in zip(children, found, strict=True):
                tokens[child] = token
        return Proposal(np.array(tokens), tree, laws)

    scripted = Scripted(draft)
    scripted.rule = rule
    return scripted


CASES = {
    "match": (CHAIN, draw_with_replacement, SampleAndMatch()),
    "chain": (CHAIN, draw_with_replacement, ChainRejection()),
    "block": (CHAIN, draw_with_replacement, BlockVerification()),
    "with": (TREE, draw_with_replacement, TreeRejectionWithReplacement()),
    "without": (TREE, draw_without_replacement, TreeRejectionWithoutReplacement()),
}


@pytest.fixture(scope="module")
def engine():
    return TinyEngine(vocab=4, sharpness=0.6)


@pytest.fixture(scope="module")
def law(engine):
    """float64 [4, 4]: the target's own law of the second and third token, by whole-prefix passes."""
    params = SamplingParams(**SETTINGS)
    joint = np.zeros((4, 4))
    for first, p in enumerate(following(engine, params, [])):
        for second, q in enumerate(following(engine, params, [first])):
            joint[second] += p * q * following(engine, params, [first, second])
    assert joint.sum() == pytest.approx(1)
    return joint


def following(engine, params, output: list[int]) -> np.ndarray:
    """The law of the token after the prompt and ``output``, float64 [4]."""
    history, tokens = History(PROMPT), [*PROMPT, *output]
    for token in output:
        history.append(token)
    n = len(tokens)
    inputs = {
        contract.TOKENS: np.array([tokens]),
        contract.POSITIONS: np.arange(n)[None],
        contract.CONTEXT_LENGTHS: np.zeros(1, np.int64),
        contract.TREE_MASK: np.tri(n, dtype=bool)[None],
        contract.LOGIT_ROWS: np.array([[n - 1]]),
    }
    outputs = {contract.LOGITS: np.zeros((1, 1, engine.vocab), np.float32)}
    for layer in range(engine.layers):
        for name in (contract.key_cache(layer), contract.value_cache(layer)):
            outputs[contract.updated(name)] = np.zeros((1, engine.kv_heads, n, engine.head_dim), np.float32)
    engine.bind(inputs, outputs).enqueue()
    found = warp(outputs[contract.LOGITS][0, 0], params, history)
    probs = np.zeros(engine.vocab)
    probs[np.arange(engine.vocab) if found.tokens is None else found.tokens] = found.probs
    return probs


@pytest.mark.parametrize("name", CASES)
def test_the_loop_emits_the_targets_law(engine, law, name):
    """The first token comes from prefill; the two looked at come from drafts, in one round or two, with penalties."""
    parents, draw, rule = CASES[name]
    noise = np.random.default_rng(4).normal(0, 0.8, (4, 4)).astype(np.float32)
    loop, counts, accepted = engine.loop(), np.zeros((4, 4)), 0
    for seed in range(0, SEEDS, 8):
        drafter = drawn(noise, parents, draw, rule)
        batch = [sequence(engine, PROMPT, drafter, seed=seed + i, **SETTINGS) for i in range(8)]
        for s in finish(loop, *batch):
            counts[s.output[1], s.output[2]] += 1
            accepted += s.stats.accepted
    assert SEEDS < accepted < 5 * SEEDS, "drafts must be accepted and rejected often"
    expected = law * SEEDS
    assert expected.min() > 3
    assert chisquare(counts.ravel(), expected.ravel()).pvalue > 0.02
