"""How drafts grow, without engines: the EAGLE-2 tree against its definition, ties, fixed shapes, pacing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specrun.drafters.growth import BestFirst, Draft, StaticTree, best_tokens
from specrun.drafters.pacing import LONGEST_PAUSE, Pacing
from specrun.drafters.vocabulary import Vocabulary
from specrun.economics import Economics, PassCosts
from specrun.sampling import SamplingParams
from specrun.sequence import Sequence
from specrun.tree import DraftTree

VOCAB = 12


class Nothing:
    """Stands for everything of a sequence that growing never touches."""

    stopped, text = None, ""


def sequence():
    return Sequence([3], SamplingParams(ignore_eos=True), Nothing(), Nothing(), Nothing(), frozenset(), 100)


def logits_of(path, seed):
    """A drafter whose law depends on the whole path."""
    return np.random.default_rng([seed, *path]).normal(size=VOCAB).astype(np.float32) * 2


def grow(grower, seed, budget=63):
    draft = Draft.of(sequence(), budget)
    grower.expand(draft, 0, logits_of((), seed))
    for level in itertools.count(1):
        nodes = grower.frontier(draft, level)
        if not nodes:
            return grower.finish(draft)
        for node in nodes:
            grower.expand(draft, node, logits_of([draft.tokens[n] for n in draft.path(node)], seed))


def eagle2(seed, depth, topk, total):
    """The tree as a set of paths, from the paper: log-probabilities, levels, beams, then the best of all."""
    scores, beam = {}, {(): 0.0}
    for _ in range(depth):
        level = {}
        for path, score in beam.items():
            row = logits_of(path, seed).astype(np.float64)
            logp = row - np.log(np.exp(row).sum())
            for token in np.argsort(-logp, kind="stable")[:topk]:
                level[(*path, int(token))] = score + logp[token]
        scores |= level
        beam = dict(sorted(level.items(), key=lambda item: -item[1])[:topk])
    return set(sorted(scores, key=lambda path: (-scores[path], len(path)))[:total])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("depth", "topk", "total"), [(3, 3, 8), (5, 4, 20), (2, 10, 7), (4, 1, 4)])
def test_the_tree_is_eagle2s(seed, depth, topk, total):
    proposal = grow(BestFirst("x", Vocabulary(VOCAB), frozenset(), depth, topk, total, None), seed)
    paths = {
        tuple(int(proposal.tokens[n]) for n in proposal.tree.path_to(node)[1:]) for node in range(1, proposal.tree.size)
    }
    assert paths == eagle2(seed, depth, topk, total)


def test_ties_keep_parents():
    """A certain child scores as much as its parent: the parent comes first, whatever the cut."""
    certain = np.full(VOCAB, -np.inf, np.float32)
    certain[5] = 0.0
    for total in range(1, 5):
        grower = BestFirst("x", Vocabulary(VOCAB), frozenset(), 4, 3, total, None)
        draft = Draft.of(sequence(), 63)
        grower.expand(draft, 0, certain)
        for level in (1, 2, 3):
            for node in grower.frontier(draft, level):
                grower.expand(draft, node, certain)
        proposal = grower.finish(draft)
        assert proposal.tokens[1:].tolist() == [5] * total and proposal.tree.parents.tolist() == list(range(-1, total))


def test_end_of_sequence_is_not_drafted_beyond():
    grower = BestFirst("x", Vocabulary(VOCAB), frozenset(range(VOCAB)), 4, 2, 20, None)
    draft = Draft.of(sequence(), 63)
    object.__setattr__(draft.sequence, "params", SamplingParams())
    grower.expand(draft, 0, logits_of((), 0))
    assert grower.frontier(draft, 1) == []


def test_budgets_bound_depth_and_size():
    for budget in (1, 2, 5):
        proposal = grow(BestFirst("x", Vocabulary(VOCAB), frozenset(), 6, 3, 30, None), 1, budget)
        assert proposal.drafted == budget and proposal.tree.depths.max() <= budget


def test_static_trees_keep_their_shape():
    paths = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    proposal = grow(StaticTree("x", Vocabulary(VOCAB), paths, None), 4)
    shape = DraftTree.from_paths(paths)
    assert sorted(proposal.tree.depths.tolist()) == sorted(shape.depths.tolist())
    assert sorted(map(len, proposal.tree.children)) == sorted(map(len, shape.children))
    order = np.argsort(-logits_of((), 4), kind="stable")[:3].tolist()
    assert [int(proposal.tokens[n]) for n in proposal.tree.children[0]] == order


def test_best_tokens_ties_and_padding():
    row = np.array([1, 3, 3, 0, -np.inf], np.float32)
    tokens, probs = best_tokens(row, 3)
    assert tokens.tolist() == [1, 2, 0] and probs[0] == probs[1] > probs[2]
    pruned = Vocabulary(10, np.array([7, 2, 12, 9]))
    assert pruned.row(np.zeros(4, np.float32))[2] == -np.inf, "ids beyond the tokenizer are padding"
    assert pruned.to_target(np.array([0, 3])).tolist() == [7, 9]
    assert Vocabulary(6).row(np.ones(4, np.float32)).tolist() == [1, 1, 1, 1, -np.inf, -np.inf]
    assert Vocabulary(3).row(np.ones(4, np.float32)).size == 3


def priced(curve, step):
    economics = Economics(PassCosts(curve))
    pacing = Pacing(economics)
    economics.costs.plain_seconds = 1.0
    pacing.timed("first", step)
    pacing.timed("step", step)
    return pacing


def test_the_same_code_drafts_single_tokens_here_and_trees_there():
    """Dear rows: only likely nodes are verified. Free rows: all of them are."""
    reach = [0.6, 0.3, 0.2, 0.1, 0.05, 0.02]
    assert priced({1: 1.0, 2: 1.4, 8: 3.8}, 0.1).count(reach) == 1
    assert priced({1: 1.0, 2: 1.7, 8: 6.0}, 0.1).count(reach) == 0
    assert priced({1: 1.0, 2: 1.001, 8: 1.005}, 0.01).count(reach) == 6


def test_levels_end_where_a_step_costs_more_than_it_brings():
    dear, cheap = priced({1: 1.0, 2: 1.15, 8: 1.7}, 0.5), priced({1: 1.0, 2: 1.001, 8: 1.005}, 0.01)
    reach = [1.0, 0.5, 0.1]
    assert dear.worth_running([1, 2], reach, 1) == []
    assert cheap.worth_running([1, 2], reach, 1) == [1, 2]


def test_a_drafter_that_never_pays_is_tried_less_and_less():
    pacing = priced({1: 1.0, 2: 1.9, 8: 8.0}, 0.3)
    tries = []
    for i in range(1000):
        if pacing.worth_starting():
            tries.append(i)
            pacing.brought(1, i % 10 == 0)
    assert 5 < len(tries) < 80 and max(np.diff(tries)) <= LONGEST_PAUSE + 1


def test_a_try_that_must_catch_up_on_a_long_prompt_is_rarer():
    """1000 rows of 0.004 plain passes each are worth a try in 200 proposals, not in 64."""
    pacing = priced({1: 1.0, 2: 1.9, 8: 8.0}, 0.3)
    plain = pacing.economics.costs.plain_seconds
    assert plain is not None
    pacing.timed("row", 0.004 * plain)
    tries = []
    for i in range(2000):
        if pacing.worth_starting(1000):
            tries.append(i)
            pacing.brought(1, i % 10 == 0)
    settled = tries[tries.index(next(i for i in tries if i > 100)) :]
    assert min(np.diff(settled)) >= 200 and len(settled) > 5


def test_a_change_of_text_is_noticed_by_what_drafts_bring():
    pacing = priced({1: 1.0, 2: 1.1}, 0.1)
    for _ in range(200):
        assert pacing.worth_starting()
        pacing.brought(1, 1)
    tries = 0
    for _ in range(200):
        if pacing.worth_starting():
            tries += 1
            pacing.brought(1, 0)
    assert tries < 50
    for _ in range(300):
        if pacing.worth_starting():
            pacing.brought(1, 1)
    assert all(pacing.worth_starting() for _ in range(10))


def test_chances_follow_experience():
    """A drafter that is surer than it should be is believed less after a while."""
    pacing = priced({1: 1.0, 2: 1.1}, 0.1)
    assert pacing.chance(1, 0.9) == pytest.approx(0.9)
    for i in range(100):
        pacing.learn(1, 0.9, i % 2 == 0)
    assert 0.4 < pacing.chance(1, 0.9) < 0.65 and pacing.chance(1, 0.1) == pytest.approx(0.1)
