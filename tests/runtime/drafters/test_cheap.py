"""Lookup, suffix, n-gram table and hybrid over the loop: tokens are the target's own, whatever is drafted."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.drafters.hybrid import Member
from specrun.economics import Economics, PassCosts
from specrun.proposal import Commit, Proposal, Verdict
from tests.runtime.drafters.cheap import (
    FREE,
    LAW_PROMPT,
    PROMPTS,
    TWO_CORES,
    ModelDrafter,
    answers,
    decode,
    hybrid,
    lookahead,
    lookup,
    loop_of,
    ngram,
    recorded,
    sampled_law,
    suffix,
)
from tests.runtime.scripted import wrong_chain
from tests.runtime.test_loop import sequence
from tests.runtime.tiny_engine import TinyEngine
from tools.simulate_drafters import Stream, replay

LENGTH = 120


@pytest.fixture(scope="module")
def engine():
    return TinyEngine()


@pytest.fixture(scope="module")
def plain_answers(engine):
    return answers(engine, PROMPTS, max_tokens=LENGTH)


def make(kind, economics, texts):
    model = ModelDrafter({tuple(p): text[len(p) :] for p, text in zip(PROMPTS, texts, strict=False)}, 0.7, 0.05)
    return {
        "lookup": lambda: lookup(economics),
        "suffix": lambda: suffix(economics),
        "suffix-chain": lambda: suffix(economics, width=1),
        "suffix-shared": lambda: suffix(economics, shared=4096),
        "ngram": lambda: ngram(economics, texts),
        "hybrid": lambda: hybrid(economics, texts),
        "hybrid-model": lambda: hybrid(economics, texts, model),
    }[kind]()


KINDS = ["lookup", "suffix", "suffix-chain", "suffix-shared", "ngram", "hybrid", "hybrid-model"]


@pytest.mark.parametrize("costs", [FREE, TWO_CORES], ids=["trees", "chains"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_plain_decodings(engine, plain_answers, kind, batch, costs):
    loop = loop_of(engine, costs)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain_answers, strict=True)] * 2
    drafter = make(kind, loop.economics, texts)
    for start in range(0, len(PROMPTS), batch):
        done = decode(engine, loop, drafter, PROMPTS[start : start + batch], max_tokens=LENGTH)
        assert [s.output for s in done] == plain_answers[start : start + batch]
        assert sum(s.stats.accepted for s in done) > 0, "nothing was accepted: the test shows nothing"
    assert not drafter.states


def test_free_rows_make_trees_and_dear_rows_make_short_drafts(engine):
    """The same drafter branches where rows are nearly free and drafts little where they are not."""
    sizes, branched = {}, {}
    for name, costs in (("free", FREE), ("dear", {1: 1.0, 2: 1.5, 4: 2.5})):
        loop = loop_of(engine, costs)
        drafter = suffix(loop.economics)
        seen = recorded(drafter)
        decode(engine, loop, drafter, PROMPTS, max_tokens=LENGTH)
        sizes[name] = np.mean([p.drafted for p in seen])
        branched[name] = any(len(children) > 1 for p in seen for children in p.tree.children)
    assert sizes["free"] > 2 * sizes["dear"] and branched["free"]


def small_drafter(kind, economics):
    if kind == "lookahead":
        return lookahead(economics)
    if kind == "suffix":
        return suffix(economics)
    model = ModelDrafter({tuple(LAW_PROMPT): [4, 1, 2]}, 0.8, 0.01)
    return hybrid(economics, [LAW_PROMPT * 2] * 3, model)


@pytest.mark.parametrize("kind", ["suffix", "hybrid-model", "lookahead"])
def test_sampled_tokens_follow_the_targets_law(kind):
    """Three tokens after a prompt, 960 draws through the real loop, against the exact joint law."""
    engine = TinyEngine(vocab=5, hidden=8, layers=1, heads=2, kv_heads=1, sharpness=1.2, seed=4)
    loop = loop_of(engine, FREE)
    drafter = small_drafter(kind, loop.economics)
    pvalue, accepted = sampled_law(engine, loop, drafter)
    assert accepted > 300
    assert pvalue > 1e-3


def test_repetition_is_accepted_to_the_end():
    """A text that repeats itself: few passes, and nothing drafted beyond what may be emitted."""
    economics = Economics(PassCosts(TWO_CORES))
    period = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    outcome = replay(suffix(economics), economics, Stream(period * 2, period * 50, "all"))
    assert outcome.tokens == 599 and outcome.passes < 70
    assert outcome.accepted / outcome.drafted > 0.97


def test_drafts_end_at_eos():
    """What follows an EOS in the text is never drafted."""
    economics = Economics(PassCosts(FREE))
    drafter = suffix(economics)
    engine = TinyEngine()
    s = sequence(engine, [5, 6, 7, 3, 9, 9, 5, 6, 7, 3, 9, 9, 5, 6], drafter)
    drafter.begin(s)
    (proposal,) = drafter.propose([s], [15])
    ends = [node for node in range(1, proposal.tree.size) if proposal.tokens[node] == 3]
    assert ends and not any(proposal.tree.children[node] for node in ends)


def test_a_drafter_that_is_always_wrong_is_given_up(engine, plain_answers):
    """I02: a model drafter that never helps is asked ever more rarely; greedy tokens stay."""
    loop = loop_of(engine, TWO_CORES)
    answer = {tuple(p): [(t + 1) % 32 for t in a] for p, a in zip(PROMPTS, plain_answers, strict=True)}
    model = ModelDrafter(answer, 1.0, 0.3)
    drafter = hybrid(loop.economics, [[1, 2]], model)
    passes = 0
    for _ in range(3):
        for s, plain_answer in zip(
            decode(engine, loop, drafter, PROMPTS, max_tokens=LENGTH), plain_answers, strict=True
        ):
            assert s.output == plain_answer
            passes += s.stats.passes
    assert model.asked < 0.1 * passes


def test_drafting_settles_at_zero_without_swinging():
    """I01, H03: at a batch whose rows are dear drafting stops for good, and it returns when the batch shrinks."""
    costs = PassCosts({1: 1.0, 2: 1.02, 16: 1.2}, {8: {1: 1.5, 2: 3.0, 4: 6.0}})
    economics = Economics(costs)
    drafter = economics.of("x")
    for _ in range(100):
        economics.start_pass(1)
        assert drafter.best_sizes([[0.6, 0.5]]) == [2]
        drafter.observe_pass(3, 2.0)
    economics.start_pass(8)
    sizes = [drafter.best_sizes([[0.6, 0.5]] * 8) for _ in range(20)]
    assert sizes == [[0] * 8] * 20
    economics.start_pass(1)
    assert drafter.best_sizes([[0.6, 0.5]]) == [2]


def test_members_see_their_own_verdict(engine, plain_answers):
    """A hybrid tells its model drafter how its own draft would have fared, never another source's nodes."""
    loop = loop_of(engine, FREE)
    model = ModelDrafter({tuple(p): a for p, a in zip(PROMPTS, plain_answers, strict=True)}, 1.0, 0.0)
    drafter = hybrid(loop.economics, [[1, 2]], model)
    decode(engine, loop, drafter, PROMPTS[:1], max_tokens=40)
    judged = [c for c in model.commits if c.verdict is not None]
    assert judged
    for commit in judged:
        assert commit.proposal.tokens.size <= 3
        assert (
            commit.proposal.tokens[commit.verdict.path].tolist() == commit.tokens[: len(commit.verdict.path)].tolist()
        )
        assert commit.verdict.accepted == min(commit.proposal.drafted, len(commit.verdict.tokens) - 1)


def test_a_members_path_ends_before_the_next_token(engine):
    """The last emitted token is pending, in no cache, even where the member had drafted it."""
    member = Member(*[ModelDrafter({}, 1.0, 0.05)] * 2)
    s = sequence(engine, [7], member.drafter)
    member.proposals[s] = Proposal.chain(7, [4, 5, 6])
    verified = Commit(0, np.array([7, 4]), 5, None, Proposal.chain(7, [4]), Verdict([0, 1], 5, [4, 5]))
    seen = member.commit(s, verified)
    assert seen.verdict.path == [0, 1] and seen.proposal.drafted == 3 and seen.tokens is verified.tokens
    assert member.commit(s, verified).proposal is None, "it was not asked in this pass"


def test_anti_loses_no_tokens(engine, plain_answers):
    loop = loop_of(engine, TWO_CORES)
    drafter = wrong_chain(plain_answers[0], 4, 32)
    (s,) = decode(engine, loop, drafter, PROMPTS[:1], max_tokens=LENGTH)
    assert s.output == plain_answers[0]


def test_a_member_costs_what_asking_it_takes():
    """A price that leaves out a part of drafting is corrected by what drafts cost; the first one may be far off."""
    model = ModelDrafter({}, 1.0, 0.05)
    member = Member(model, model)
    assert member.cost() == 0.05
    request = object()
    for cost, least, most in ((2.0, 2.0, 2.0), (0.4, 1.5, 1.6), (0.4, 1.1, 1.3)):
        member.priced = Costly(model, cost)
        member.propose([request], [1])
        assert least <= member.cost() <= most
    for _ in range(20):
        member.propose([request], [1])
    assert member.cost() == pytest.approx(0.4, rel=0.05)
    for _ in range(40):
        member.priced = Costly(model, 0.0)
        member.propose([request], [1])
    assert member.cost() == 0.05


class Costly:
    """Drafts one token at a cost, whatever its price says."""

    def __init__(self, model, cost):
        self.draft_costs, self.cost = model.draft_costs, cost

    def draft_now(self, sequences, budgets):
        chain = Proposal.chain(1, [2])
        return [Proposal(chain.tokens, chain.tree, draft_cost=self.cost) for _ in sequences]
