"""The loop over a numpy engine: greedy equality, limits, batches whose rows differ, caches that agree with tokens."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.errors import CapacityError
from specrun.proposal import Proposal
from specrun.sampling import SamplingParams
from specrun.sequence import Sequence
from specrun.tree import DraftTree
from tests.runtime.scripted import Scripted, nothing, oracle_chain, random_tree, wrong_chain
from tests.runtime.tiny_engine import TinyEngine


class Characters:
    """A codec with one character an id."""

    def decode(self, ids, skip_special=True):
        return "".join(chr(97 + i % 26) for i in ids)


def sequence(engine, prompt, drafter, **params):
    from specrun.text import TextStream

    settings = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **params})
    eos = frozenset({3})
    return Sequence(
        list(prompt), settings, drafter, drafter.rule, TextStream(Characters(), settings.stop), eos, engine.max_length
    )


def finish(loop, *sequences):
    for s in sequences:
        loop.admit(s)
    while loop.active:
        loop.step()
        for s in loop.active:
            assert s.lane.length == len(s.tokens) - 1, "the cache holds all tokens but the last"
    return sequences


def plain(engine, prompt, **params):
    (s,) = finish(engine.loop(), sequence(engine, prompt, nothing(), **params))
    return s


@pytest.fixture(scope="module")
def engine():
    return TinyEngine()


PROMPT = [5, 9, 2, 7, 1, 1, 8, 20, 30, 4, 6]


def reference(engine, prompt, count):
    """Greedy continuation by whole-prefix passes: no cache, no chunks, no loop."""
    from specrun import contract

    tokens = list(prompt)
    for _ in range(count):
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
                shape = (1, engine.kv_heads, n, engine.head_dim)
                outputs[contract.updated(name)] = np.zeros(shape, np.float32)
        engine.bind(inputs, outputs).enqueue()
        tokens.append(int(outputs[contract.LOGITS][0, 0].argmax()))
    return tokens[len(prompt) :]


def test_plain_equals_the_reference(engine):
    assert plain(engine, PROMPT).output == reference(engine, PROMPT, 40)


@pytest.mark.parametrize("seed", range(4))
def test_trees_leave_greedy_tokens_alone(engine, seed):
    """A08, A10: trees of any shape; the accepted path is committed in path order."""
    answer = plain(engine, PROMPT, max_tokens=80).output
    (s,) = finish(engine.loop(), sequence(engine, PROMPT, random_tree(answer, engine.vocab, seed), max_tokens=80))
    assert s.output == answer
    assert s.stats.accepted > 10, "the trees must be accepted now and then, or nothing was tested"


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_self_accepts_everything_and_anti_nothing(engine, length):
    """H08: rates in [0, 1]; 1 for the target itself; emitted = accepted + passes + 1."""
    answer = plain(engine, PROMPT, max_tokens=200).output
    (right,) = finish(engine.loop(), sequence(engine, PROMPT, oracle_chain(answer, length), max_tokens=200))
    (wrong,) = finish(engine.loop(), sequence(engine, PROMPT, wrong_chain(answer, length, 32), max_tokens=200))
    assert right.output == wrong.output == answer
    assert right.stats.acceptance == 1.0 and wrong.stats.acceptance == 0.0
    for s in (right, wrong):
        assert s.stats.emitted == s.stats.accepted + s.stats.passes + 1 == 200


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 7])
def test_max_tokens_is_exact(engine, limit):
    """C05, C06."""
    answer = plain(engine, PROMPT).output
    (s,) = finish(engine.loop(), sequence(engine, PROMPT, oracle_chain(answer, 4), max_tokens=limit, logprobs=0))
    assert s.output == answer[:limit] and s.finish_reason == "length"
    assert len(s.logprobs) == limit == s.stats.emitted
    assert s.lane.length == len(s.tokens) - 1


@pytest.mark.parametrize("index", range(12))
def test_eos_inside_a_run(engine, index):
    """C04: whichever output token is declared EOS, the output ends with its first occurrence."""
    answer = plain(engine, PROMPT).output
    s = sequence(engine, PROMPT, oracle_chain(answer, 5), ignore_eos=False)
    s.eos_token_ids = frozenset({answer[index]})
    finish(engine.loop(), s)
    first = answer.index(answer[index])
    assert s.output == answer[: first + 1]
    assert (s.finish_reason, s.stop_reason) == ("stop", answer[index])
    assert s.lane.length == len(s.tokens) - 1


def test_stop_string_over_tokens_and_runs(engine):
    answer = plain(engine, PROMPT).output
    text = Characters().decode(answer)
    for begin in range(8):
        stop = text[begin : begin + 3]
        s = sequence(engine, PROMPT, oracle_chain(answer, 4), stop=(stop,))
        finish(engine.loop(), s)
        assert s.stream.text == text[: text.index(stop)]
        assert Characters().decode(s.output) == text[: text.index(stop) + 3]
        assert s.lane.length == len(s.tokens) - 1


def test_rows_of_a_batch_do_not_touch_each_other(engine):
    """A09, G01: different accepted counts, different ends, more requests than lanes; each equals its solo run."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 32, size=n).tolist() for n in (1, 3, 17, 9, 30, 8, 2, 11)]
    counts = [5, 60, 12, 33, 1, 48, 20, 7]
    solo = [plain(engine, p, max_tokens=c).output for p, c in zip(prompts, counts, strict=True)]
    loop = engine.loop(max_batch=3)
    waiting = []
    for i, (p, c) in enumerate(zip(prompts, counts, strict=True)):
        full = plain(engine, p, max_tokens=c + 10).output
        drafter = [oracle_chain(full, 4), random_tree(full, 32, i), wrong_chain(full, 3, 32)][i % 3]
        waiting.append(sequence(engine, p, drafter, max_tokens=c))
    everyone = list(waiting)
    while waiting or loop.active:
        while waiting and loop.has_room:
            loop.admit(waiting.pop(0))
        if loop.active:
            loop.step()
    assert [s.output for s in everyone] == solo


def test_a_lane_that_waits_is_left_alone(engine):
    """A conversation's lane sits between two active ones; its rows survive their passes."""
    loop = engine.loop(max_batch=3)
    cache = loop.target.cache
    first, idle, last = (sequence(engine, PROMPT, nothing(), max_tokens=20) for _ in range(3))
    idle.keep_lane = True
    loop.admit(first)
    loop.admit(idle)
    loop.admit(last)
    loop.cancel(idle)
    before = cache.buffer[:, idle.lane.slot, :, : idle.lane.length].copy()
    while loop.active:
        loop.step()
    after = cache.buffer[:, idle.lane.slot, :, : idle.lane.length]
    assert np.array_equal(before, after)
    assert first.output == last.output == plain(engine, PROMPT, max_tokens=20).output


def test_context_end(engine):
    """H05: up to the last position, then finish_reason length; drafts never outgrow the context."""
    small = TinyEngine(max_length=64)
    for size in (58, 61, 63):
        prompt = np.random.default_rng(size).integers(0, 32, size=size).tolist()
        answer = reference(small, prompt, 64 - size)
        s = sequence(small, prompt, oracle_chain(answer + [0] * 8, 6), max_tokens=500)
        finish(small.loop(), s)
        assert s.output == answer and s.finish_reason == "length"


def test_prefill_chunks_change_nothing(engine):
    """H10: hidden rows reach the drafter for the whole prompt, whatever the chunk."""
    tapped = TinyEngine(taps=(1, -1))
    prompt = np.random.default_rng(3).integers(0, 32, size=50).tolist()
    seen = []
    for chunk in (7, 16, 64):
        drafter = Scripted(lambda s, b: Proposal.empty(s.pending), taps=(1, -1))
        (s,) = finish(tapped.loop(chunk=chunk), sequence(tapped, prompt, drafter, max_tokens=3))
        rows = np.concatenate([c.hidden for c in drafter.commits])
        tokens = np.concatenate([c.tokens for c in drafter.commits])
        assert tokens.tolist() == s.tokens[:-1]
        assert all(c.next_token == s.tokens[c.start + c.tokens.size] for c in drafter.commits)
        seen.append((s.output, rows))
    for output, rows in seen[1:]:
        assert output == seen[0][0]
        np.testing.assert_allclose(rows, seen[0][1], atol=1e-5)


def test_padded_vocabulary_is_never_emitted():
    """D04: columns beyond the tokenizer's size have the highest logits here."""
    padded = TinyEngine(padded=8)
    s = sequence(padded, PROMPT, nothing(), temperature=1.5, seed=1)
    finish(padded.loop(), s)
    assert max(s.output) < 32
    assert plain(padded, PROMPT).output == plain(TinyEngine(), PROMPT).output


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 8}])
def test_seeded_output_is_the_same_in_a_batch_and_with_drafts(engine, settings):
    """B09: the draws are counted by position, so batch, order and drafts leave the tokens alone."""
    alone = [plain(engine, PROMPT[: 3 + i], seed=i, **settings).output for i in range(4)]
    loop = engine.loop(max_batch=4)
    batch = [
        sequence(engine, PROMPT[: 3 + i], random_tree(alone[i] + [0] * 20, 32, i), seed=i, **settings) for i in range(4)
    ]
    finish(loop, *batch[::-1])
    assert [s.output for s in batch] == alone
    assert sum(s.stats.accepted for s in batch) > 20


def test_penalties_follow_each_nodes_path(engine):
    """B08: with drafts the penalized output equals the one without; the penalty matters."""
    plain_output = plain(engine, PROMPT).output
    for settings in ({"frequency_penalty": 2.0}, {"repetition_penalty": 1.7}, {"presence_penalty": -2.0}):
        expected = plain(engine, PROMPT, **settings).output
        (s,) = finish(engine.loop(), sequence(engine, PROMPT, random_tree(expected, 32, 5), **settings))
        assert s.output == expected
    assert plain(engine, PROMPT, frequency_penalty=2.0).output != plain_output


def test_no_lane_left_is_refused_before_compute(engine):
    loop = engine.loop(max_batch=1)
    loop.admit(sequence(engine, PROMPT, nothing()))
    with pytest.raises(CapacityError, match="lanes"):
        loop.admit(sequence(engine, PROMPT, nothing()))
    assert len(loop.active) == 1


def test_counters_know_a_trees_deepest_node(engine):
    """The last node need not be the deepest one: depths are counted to the tree's own depth."""
    answer = plain(engine, PROMPT).output

    def draft(s, budget):
        at = len(s.output)
        right = (answer + [0] * 4)[at : at + 3]
        wrong = (right[0] + 1) % 32
        return Proposal(np.array([s.pending, *right, wrong]), DraftTree(np.array([-1, 0, 1, 2, 0]))).prefix(budget + 1)

    (s,) = finish(engine.loop(), sequence(engine, PROMPT, Scripted(draft)))
    assert len(s.stats.offered) == 3 and s.stats.taken[2] >= s.stats.passes - 1
    assert s.output == answer


def test_changing_draft_lengths(engine):
    """H03: 7 -> 5 -> 3 -> 0 -> 7 nodes at run time; drafted counts what was really drafted."""
    answer = plain(engine, PROMPT, max_tokens=100).output
    lengths = [7, 5, 3, 0, 7, 1, 2]
    drafted = []

    def draft(s, budget):
        at = len(s.output)
        tokens = answer[at : at + min(lengths[s.stats.passes % 7], budget)]
        drafted.append(len(tokens))
        return Proposal.chain(s.pending, tokens)

    (s,) = finish(engine.loop(), sequence(engine, PROMPT, Scripted(draft), max_tokens=100))
    assert s.output == answer and s.stats.drafted == sum(drafted) == s.stats.accepted


def test_only_the_leading_chain_is_verified_where_trees_are_not_exact(engine):
    """An engine that quantizes activations: a node beside a sibling's slot would not be the plain step's."""
    from dataclasses import replace

    answer = plain(engine, PROMPT).output
    loop = engine.loop()
    loop.target.record = replace(loop.target.record, min_rows=2)
    (s,) = finish(loop, sequence(engine, PROMPT, random_tree(answer, engine.vocab, 3)))
    assert s.output == answer
    trees = [commit.proposal.tree for commit in s.drafter.commits if commit.proposal is not None]
    assert trees and all(tree.chained == tree.size for tree in trees)
    assert DraftTree(np.array([-1, 0, 1, 1, 2])).chained == 3 and DraftTree.chain(0).chained == 1
