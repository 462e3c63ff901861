"""The rules on the host: what they accept, emit and refuse. That they are lossless is proved in tests/builder."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.draft_law import draft_law, draw_with_replacement
from specrun.errors import UserError
from specrun.proposal import DenseLaw, Proposal
from specrun.random import Stream, Uniforms
from specrun.rules import (
    RULES,
    BlockVerification,
    ChainRejection,
    SampleAndMatch,
    TreeRejectionWithoutReplacement,
    TreeRejectionWithReplacement,
    TypicalAcceptance,
    rule_named,
)
from specrun.sampling import SamplingParams
from specrun.tree import DraftTree
from specrun.warp import History

SAMPLED = SamplingParams(temperature=1.0)
REJECTION = (ChainRejection, BlockVerification, TreeRejectionWithReplacement, TreeRejectionWithoutReplacement)
TREE_RULES = (SampleAndMatch, TreeRejectionWithReplacement, TreeRejectionWithoutReplacement)
SIZE = 32


class Model:
    """A target whose logits depend on the last two tokens only; ``reads`` lists the rows asked for."""

    def __init__(self, seed=0, size=SIZE, scale=1.5):
        self.table = np.random.default_rng(seed).normal(0, scale, (size, size, size)).astype(np.float32)

    def row(self, tokens):
        return self.table[tokens[-2], tokens[-1]]

    def verify(self, history, proposal):
        before = history.tokens[:-1]
        return Rows(
            [
                self.row(before + [int(proposal.tokens[n]) for n in proposal.tree.path_to(i)])
                for i in range(proposal.tree.size)
            ]
        )


class Rows:
    """Logits rows that remember which were read."""

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __getitem__(self, node):
        self.read.append(node)
        return self.rows[node]


def decode(model, rule, params, draft, length, seed=0, prompt=(1, 2)):
    """The loop in small: propose, verify, commit. Returns tokens and accepted counts."""
    history, uniforms, accepted = History(prompt), Uniforms(seed), []
    while len(history.tokens) < len(prompt) + length:
        proposal = draft(history, uniforms)
        verdict = rule.judge(
            proposal, model.verify(history, proposal), history, params, uniforms, len(history.tokens)
        )
        accepted.append(verdict.accepted)
        for token in verdict.tokens:
            history.append(token)
    return history.tokens[len(prompt) : len(prompt) + length], accepted


def plain(history, uniforms):
    return Proposal.empty(history.tokens[-1])


def scripted(parents, width=3):
    """A deterministic tree: candidates cycle over the ids, duplicates included."""

    def draft(history, uniforms):
        tokens = [history.tokens[-1], *[(7 * i + len(history.tokens)) % width for i in range(1, len(parents))]]
        return Proposal(np.array(tokens), DraftTree(np.array(parents)))

    return draft


def sampled_chain(model, params, count):
    """A chain drawn from ``model``'s own laws."""

    def draft(history, uniforms):
        path, laws = [], {}
        for node in range(count):
            law = draft_law(model.row(history.tokens + path), params, history, path)
            laws[node] = law
            path += draw_with_replacement(law, 1, uniforms, len(history.tokens), node + 1)
        return Proposal(np.array([history.tokens[-1], *path]), DraftTree.chain(count), laws)

    return draft


TREE = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 4]


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.5)])
def test_sample_and_match_is_the_plain_output_token_for_token(params):
    model = Model(size=4)
    for draft in (scripted(TREE), scripted([-1, 0, 1, 2]), scripted([-1, 0, 0, 0])):
        undrafted, _ = decode(model, SampleAndMatch(), params, plain, 60, seed=5)
        drafted, accepted = decode(model, SampleAndMatch(), params, draft, 60, seed=5)
        assert drafted == undrafted
        assert sum(accepted) > 5


@pytest.mark.parametrize("rule", RULES)
def test_b11_greedy_under_every_rule_is_the_argmax_with_ties_to_the_lowest_id(rule):
    rows = np.array([[1, 1, 0], [0, 2, 2], [0, 0, 3], [9, 0, 0]], dtype=np.float32)
    proposal = Proposal.chain(2, [0, 1, 1])
    for params in (SamplingParams(), SamplingParams(top_p=0.9, top_k=2)):
        verdict = rule().judge(proposal, rows, History([2]), params, Uniforms(0), 1)
        assert (verdict.path, verdict.next_token, verdict.tokens) == ([0, 1, 2], 2, [0, 1, 2])


@pytest.mark.parametrize("rule", REJECTION)
def test_b10_equal_laws_are_always_accepted(rule):
    model = Model(3)
    _, accepted = decode(model, rule(), SAMPLED, sampled_chain(model, SAMPLED, 4), 400)
    assert set(accepted) == {4}


@pytest.mark.parametrize("rule", REJECTION)
def test_b10_drafts_outside_either_law_are_handled(rule):
    one_hot = np.eye(4, dtype=np.float32)
    tokens, tree = np.array([0, 1]), DraftTree.chain(1)
    impossible = np.log(np.array([[0.5, 1e-30, 0.5, 1e-30], [1, 1, 1, 1]], dtype=np.float32))
    impossible[0, [1, 3]] = -np.inf
    for seed in range(50):
        judge = lambda law, rows, seed=seed: rule().judge(  # noqa: E731
            Proposal(tokens, tree, {0: DenseLaw(law)}), rows, History([0]), SAMPLED, Uniforms(seed), 1
        )
        rejected = judge(one_hot[1], impossible)  # p(x) = 0
        assert rejected.accepted == 0 and rejected.next_token in (0, 2)
        stray = judge(one_hot[2], np.zeros((2, 4), dtype=np.float32))  # q(x) = 0
        assert 0 <= stray.next_token < 4
        certain = judge(one_hot[1], np.log(np.maximum(one_hot[[1, 1]], 1e-30)))  # p = q = one-hot
        assert certain.accepted == 1


@pytest.mark.parametrize("rule", RULES)
def test_b10_a_vocabulary_of_one(rule):
    law = {0: DenseLaw(np.ones(1, np.float32))}
    proposal = Proposal(np.array([0, 0]), DraftTree.chain(1), law)
    verdict = rule().judge(proposal, np.zeros((2, 1), np.float32), History([0]), SAMPLED, Uniforms(0), 1)
    assert verdict.tokens == [0, 0]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("rule", REJECTION)
def test_b06_the_replacement_comes_from_the_row_of_the_rejection(rule, count):
    """The target always says token + 1 and the draft always token + 2; the row after a rejected draft would show."""
    size = 12
    table = np.full((size, size, size), -50.0, dtype=np.float32)
    for last in range(size):
        table[:, last, (last + 1) % size] = 0
    model = Model(size=size)
    model.table = table
    wrong = Model(size=size)
    wrong.table = np.roll(table, 1, axis=2)
    out, accepted = decode(model, rule(), SAMPLED, sampled_chain(wrong, SAMPLED, count), 300, prompt=(0, 0))
    assert out == [(i + 1) % size for i in range(300)]
    assert set(accepted) == {0}


@pytest.mark.parametrize("rule", REJECTION)
def test_b07_min_p_and_bias_reach_every_verified_token(rule):
    params = SamplingParams(temperature=1.0, min_p=0.3, logit_bias={3: -100.0, 5: 1.0})
    model = Model(8, size=8)
    noisy = Model(9, size=8)
    noisy.table = model.table + noisy.table * 0.5
    loose = SamplingParams(temperature=1.3)
    history_free, accepted = decode(model, rule(), params, sampled_chain(noisy, loose, 3), 2000)
    assert sum(accepted) > 100
    before = [1, 2, *history_free]
    for i, token in enumerate(history_free):
        logits = model.row(before[: i + 2]).copy()
        logits[3] -= 100
        logits[5] += 1
        assert token != 3
        assert logits[token] >= logits.max() + np.log(0.3) - 1e-5


@pytest.mark.parametrize("penalty", [-2.0, 2.0])
def test_b08_the_frequency_penalty_follows_each_nodes_path(penalty):
    """Greedy with a penalty: a draft that is right without its own path's counts is wrong with them."""
    model = Model(1, size=5, scale=0.6)
    params = SamplingParams(frequency_penalty=penalty)
    undrafted, _ = decode(model, SampleAndMatch(), params, plain, 80)
    drafted, accepted = decode(model, SampleAndMatch(), params, scripted(TREE, 5), 80)
    assert drafted == undrafted and sum(accepted) > 5
    assert undrafted != decode(model, SampleAndMatch(), SamplingParams(frequency_penalty=-penalty), plain, 80)[0]


@pytest.mark.parametrize("rule", [SampleAndMatch, *REJECTION])
def test_b09_a_seed_repeats_its_output(rule):
    model, drafter = Model(3), Model(4)
    runs = [decode(model, rule(), SAMPLED, sampled_chain(drafter, SAMPLED, 3), 60, seed=7)[0] for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != decode(model, rule(), SAMPLED, sampled_chain(drafter, SAMPLED, 3), 60, seed=8)[0]


def test_a09_rows_of_a_batch_are_judged_as_alone():
    """A tree wider than it is deep; one row accepts nothing, one everything, one part of it."""
    rows = np.full((6, 9), -20.0, dtype=np.float32)
    for node, token in enumerate([3, 5, 1, 7, 8, 8]):
        rows[node, token] = 0
    tree = DraftTree(np.array([-1, 0, 0, 1, 2, 3]))
    cases = {
        (1, 2, 5, 1, 7): ([0], [3]),
        (3, 2, 5, 1, 7): ([0, 1, 3, 5], [3, 5, 7, 8]),
        (2, 3, 5, 6, 7): ([0, 2], [3, 1]),
    }
    for drafted, (path, emitted) in cases.items():
        verdict = SampleAndMatch().judge(
            Proposal(np.array([0, *drafted]), tree), rows, History([0]), SAMPLED, Uniforms(1), 1
        )
        assert (verdict.path, verdict.tokens, verdict.next_token) == (path, emitted, emitted[-1])


def test_only_visited_rows_are_read():
    model, history = Model(0, size=4), History([1, 2])
    proposal = scripted(TREE)(history, None)
    for rule in (SampleAndMatch(),):
        rows = model.verify(history, proposal)
        verdict = rule.judge(proposal, rows, history, SAMPLED, Uniforms(3), 2)
        assert rows.read == verdict.path


def test_duplicate_children_are_each_their_own_node():
    """With replacement a rejected token may be drawn again; the second copy's subtree is the one walked."""
    law = DenseLaw(np.array([0.9, 0.1], np.float32))
    proposal = Proposal(np.array([0, 0, 0, 1]), DraftTree(np.array([-1, 0, 0, 2])), {0: law, 2: law})
    logits = np.log(np.array([[0.5, 0.5], [0.5, 0.5], [0.01, 0.99], [0.5, 0.5]], np.float32))
    paths = set()
    for seed in range(200):
        verdict = TreeRejectionWithReplacement().judge(proposal, logits, History([0]), SAMPLED, Uniforms(seed), 1)
        paths.add(tuple(verdict.path))
    assert {(0,), (0, 1)} <= paths


@pytest.mark.parametrize("rule", REJECTION)
def test_a_rejection_rule_refuses_drafts_without_laws(rule):
    with pytest.raises(UserError, match=rf"{rule.name}.*found deterministic candidates.*{SampleAndMatch.name}"):
        rule().judge(Proposal.chain(0, [1]), np.zeros((2, 4), np.float32), History([0]), SAMPLED, Uniforms(0), 1)
    empty = rule().judge(Proposal.empty(0), np.zeros((1, 4), np.float32), History([0]), SAMPLED, Uniforms(0), 1)
    assert empty.accepted == 0


@pytest.mark.parametrize("rule", [ChainRejection, BlockVerification])
def test_a_chain_rule_refuses_a_tree(rule):
    laws = {0: DenseLaw(np.ones(4, np.float32))}
    proposal = Proposal(np.array([0, 1, 2]), DraftTree(np.array([-1, 0, 0])), laws)
    with pytest.raises(UserError, match=r"required is a chain.*found a tree of 3 nodes that branches"):
        rule().judge(proposal, np.zeros((3, 4), np.float32), History([0]), SAMPLED, Uniforms(0), 1)


def test_a_missing_law_is_named():
    proposal = Proposal(np.array([0, 1, 1]), DraftTree.chain(2), {0: DenseLaw(np.array([0, 1], np.float32))}, None, "x")
    rows = np.array([[-np.inf, 0], [0, 0], [0, 0]], np.float32)
    with pytest.raises(UserError, match="proposal of x: node 1 has children and no law"):
        ChainRejection().judge(proposal, rows, History([0]), SAMPLED, Uniforms(0), 1)


def test_typical_acceptance_takes_the_longest_typical_path_and_says_it_is_lossy():
    assert not TypicalAcceptance().lossless
    p = np.array([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05], [0.3, 0.3, 0.4], [0.4, 0.3, 0.3], [0.3, 0.3, 0.4]], np.float32)
    tree = DraftTree(np.array([-1, 0, 0, 1, 2]))
    proposal = Proposal(np.array([0, 0, 1, 0, 2]), tree)  # 0 -> {0 -> 0 (atypical), 1 -> 2 (typical)}
    verdict = TypicalAcceptance().judge(proposal, np.log(p), History([0]), SAMPLED, Uniforms(0), 1)
    assert verdict.path == [0, 2, 4]
    strict = TypicalAcceptance(epsilon=0.6, delta=2.0)
    assert strict.judge(proposal, np.log(p), History([0]), SAMPLED, Uniforms(0), 1).path == [0, 1]


def test_rules_are_found_by_name():
    assert {type(rule_named(rule.name)) for rule in RULES} == set(RULES)
    with pytest.raises(UserError, match="expected one of sample-and-match, chain-rejection"):
        rule_named("hope")


def test_uniforms_of_rejected_places_are_never_consulted_again():
    """A rejected draft's places are drafted again by the next step; reusing a number there would bias the output."""

    class Watched(Uniforms):
        def __init__(self):
            super().__init__(0)
            self.places = []

        def draw(self, position, stream, index=0):
            self.places.append((position, Stream(stream), index))
            return super().draw(position, stream, index)

    model, drafter = Model(3), Model(4)
    for rule in REJECTION:
        watched, history = Watched(), History((1, 2))
        draft = sampled_chain(drafter, SAMPLED, 4)
        for _ in range(40):
            proposal = draft(history, watched)
            rows = model.verify(history, proposal)
            verdict = rule().judge(proposal, rows, history, SAMPLED, watched, len(history.tokens))
            for token in verdict.tokens:
                history.append(token)
        assert len(watched.places) == len(set(watched.places))
