"""Heads in the real loop: right ones accept all they can, wrong ones cost nothing but time; chains, trees, batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specrun.sampling import SamplingParams
from tests.runtime.drafters import bundles, fixtures

HIDDEN, VOCAB = fixtures.HIDDEN, fixtures.VOCAB
CHAIN = "depth=3,topk=1,adaptive=0"
TREE = "depth=3,topk=3,total_nodes=12,adaptive=0"
CYCLE = np.random.default_rng(3).permutation(VOCAB)


def after(steps):
    """int [VOCAB]: the token that follows each token ``steps`` places on, in the cyclic target."""
    tokens = np.arange(VOCAB)
    for _ in range(steps):
        tokens = CYCLE[tokens]
    return tokens


def rows_for(embedding, steps):
    """An LM head that finds, for the embedding of a token, the token ``steps`` places on."""
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    head[after(steps)] = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    return 40 * head


def silence(tensors):
    """Layers that add nothing: what comes in goes out."""
    quiet = ("o_proj.weight", "o_proj.bias", "down_proj.weight")
    return {
        name: np.zeros_like(value) if name.endswith(quiet) else np.ones_like(value) if "norm" in name else value
        for name, value in tensors.items()
    }


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory):
    """A target whose every token has one successor, known from its embedding alone. It carries MTP layers."""
    extra = silence(fixtures.deepseek_tensors())
    path = bundles.write_target(tmp_path_factory.mktemp("cyclic"), extra_tensors=extra)
    weights = silence(load_file(path / "model.safetensors"))
    weights["lm_head.weight"] = rows_for(weights["model.embed_tokens.weight"], 1)
    prefix = "model.layers.4."
    weights[f"{prefix}eh_proj.weight"] = np.hstack([np.eye(HIDDEN), np.zeros((HIDDEN, HIDDEN))]).astype(np.float32)
    weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def heads(cyclic, tmp_path_factory):
    """Of every kind, each right about the cyclic target as far as its kind can be."""
    root = tmp_path_factory.mktemp("heads")
    embedding = fixtures.weights_of(cyclic)["model.embed_tokens.weight"]
    eagle = silence(fixtures.eagle_tensors(bias=False))
    eagle["fc.weight"] = np.hstack([np.eye(HIDDEN), np.zeros((HIDDEN, HIDDEN))]).astype(np.float32)
    fixtures.write_eagle(root / "eagle", eagle)
    eagle3 = silence(fixtures.eagle3_tensors(pruned=False))
    eagle3["fc.weight"] = np.hstack([np.eye(HIDDEN) / 3] * 3).astype(np.float32)
    eagle3["lm_head.weight"] = rows_for(embedding, 2)
    fixtures.write_eagle3(root / "eagle3", eagle3)
    medusa = {n: np.zeros_like(v) for n, v in fixtures.medusa_tensors().items()}
    medusa |= {f"{i}.2.weight": rows_for(embedding, i + 2) for i in range(3)}
    fixtures.write(root / "medusa", medusa, {}, "medusa_lm_head.safetensors")
    return {kind: f"{kind}={root / kind}" for kind in ("eagle", "eagle3", "medusa")} | {"mtp": "mtp"}


KINDS = ("eagle", "eagle3", "medusa", "mtp")


@pytest.mark.parametrize("options", [CHAIN, TREE])
@pytest.mark.parametrize("kind", KINDS)
def test_right_heads_accept_as_deep_as_they_can(cyclic, heads, tmp_path, kind, options):
    """Off by one anywhere (token, feature, position, tap) and nothing would be accepted."""
    opened = bundles.engine(cyclic, tmp_path / "bundle", f"{heads[kind]},{options}")
    # Medusa and EAGLE-3 guess from features alone; this EAGLE-3 head feeds the same feature back at every depth.
    depth = 1 if kind == "eagle3" else 3
    stats = bundles.assert_same_as_plain(opened, kind, max_tokens=41)
    assert all(s.passes == 40 // (depth + 1) for s in stats), [s.passes for s in stats]


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_several_drafters_in_one_bundle(target, tmp_path, quantize):
    """Random heads are wrong: the tokens stay, whichever drafter a request of the batch names; sampled ones as well."""
    paths = [
        f"eagle={fixtures.write_eagle(tmp_path / 'eagle')},{TREE}",
        f"eagle3={fixtures.write_eagle3(tmp_path / 'eagle3')},{CHAIN}",
        f"medusa={fixtures.write(tmp_path / 'medusa', fixtures.medusa_tensors(), {})},topk=2",
        f"draft-model={target},{TREE}",
    ]
    opened = bundles.engine(target, tmp_path / "bundle", *paths, quantize=quantize)
    names = ["eagle", "eagle3", "medusa", "draft-model"]
    plain, _ = bundles.tokens(opened, "none", max_tokens=24)
    settings = SamplingParams(max_tokens=24, ignore_eos=True)
    mixed = opened.generate_batch(bundles.PROMPTS, settings, drafter=names)
    assert [r.token_ids for r in mixed] == plain
    for name in names:
        bundles.assert_same_as_plain(opened, name, max_tokens=16)
        assert opened.manifest.drafter(name).bytes > 0
        alone = opened.generate(bundles.PROMPTS[0], replace(settings, temperature=1.0, seed=3), drafter=name)
        assert len(alone.token_ids) == 24


def test_trees_are_chains_where_only_chains_are_exact(cyclic, heads, tmp_path):
    """int4: the accepted path must lie in the cache as plain decoding would have laid it; drafts go as deep as ever."""
    for kind, options in (
        ("eagle", TREE),
        ("medusa", "topk=3,adaptive=0"),
        ("mtp", "tree=chain-and-siblings,adaptive=0"),
    ):
        opened = bundles.engine(cyclic, tmp_path / kind, f"{heads[kind]},{options}", quantize="int4")
        stats = bundles.assert_same_as_plain(opened, kind, max_tokens=25)
        assert all(s.drafted <= 3 * s.passes and s.accepted > s.passes for s in stats)


def test_sampled_law_of_trees(target, tmp_path):
    """EAGLE-2 trees hold the best candidates: sample-and-match."""
    head = fixtures.write_eagle(tmp_path / "head")
    opened = bundles.engine(target, tmp_path / "bundle", f"eagle={head},depth=2,topk=2,adaptive=0", max_batch=8)
    bundles.assert_sampled_law(opened, "eagle", count=300)


def test_sampled_law_of_chains_over_a_pruned_vocabulary(target, tmp_path):
    """EAGLE-3 chains are drawn from a law over a few of the target's ids, and judged as a block."""
    tensors = fixtures.eagle3_tensors(pruned=False)
    for name in ("lm_head.weight", "d2t", "t2d"):  # every other id
        tensors[name] = tensors[name][::2]
    tensors["d2t"], tensors["t2d"] = np.arange(0, VOCAB, 2) - np.arange(VOCAB // 2), np.arange(VOCAB) % 2 == 0
    head = fixtures.write_eagle3(tmp_path / "head", tensors)
    opened = bundles.engine(target, tmp_path / "bundle", f"eagle3={head},depth=2,topk=1,adaptive=0", max_batch=8)
    assert opened.drafter("eagle3").rule.name == "block-verification"
    bundles.assert_sampled_law(opened, "eagle3", count=300)


def test_static_trees_draft_their_shape(cyclic, heads, tmp_path):
    """EAGLE-1 and Medusa over a tree profile; the profile's paths are what is verified."""
    tree = "chain-and-siblings"
    for kind in ("eagle", "medusa"):
        opened = bundles.engine(cyclic, tmp_path / kind, f"{heads[kind]},tree={tree},adaptive=0")
        stats = bundles.assert_same_as_plain(opened, kind, max_tokens=41)
        assert all(s.passes == 10 and s.drafted >= 9 * 7 for s in stats)


def test_prefill_chunks_change_no_draft(target, tmp_path):
    """H10: the head sees the features of every prompt token, in whatever chunks they come."""
    head = fixtures.write_eagle3(tmp_path / "head")
    prompt = np.random.default_rng(2).integers(3, 500, size=100).tolist()
    seen = []
    for chunk in (16, 256):
        opened = bundles.engine(target, tmp_path / f"{chunk}", f"eagle3={head},{TREE}")
        drafter = opened.drafter("eagle3")
        opened._loop.limits = replace(opened._loop.limits, prefill_chunk=chunk)
        drafter.prefill_chunk = chunk
        proposals = []
        propose = drafter.propose
        drafter.propose = lambda s, b, propose=propose, kept=proposals: kept.extend(propose(s, b)) or kept[-len(s) :]
        bundles.tokens(opened, "eagle3", [prompt], max_tokens=20)
        seen.append([p.tokens.tolist() for p in proposals])
    assert seen[0] == seen[1] and len(seen[0]) == 19


def test_memory_stays_flat_without_drafts(target, tmp_path):
    """H04: features of tokens that are never drafted for are run in chunks, not kept."""
    head = fixtures.write_eagle3(tmp_path / "head")
    opened = bundles.engine(target, tmp_path / "bundle", f"eagle3={head},{CHAIN}", max_length=512)
    drafter = opened.drafter("eagle3")
    drafter.prefill_chunk = 32
    waiting = []
    propose = drafter.propose

    def none(sequences, budgets):
        waiting.extend(drafter._observed[s].size for s in sequences)
        return propose(sequences, [0] * len(budgets))

    drafter.propose = none
    bundles.tokens(opened, "eagle3", max_tokens=300)
    assert max(waiting) <= 33 and len(waiting) > 250
    assert not drafter._observed and not drafter._states, "finished sequences leave nothing behind"


def test_a_conversation_goes_on_from_a_prefix_that_was_not_observed(cyclic, heads, tmp_path):
    """Lanes that already hold a prefix: its features are gone, drafting goes on without them."""
    opened = bundles.engine(cyclic, tmp_path / "bundle", f"{heads['eagle']},{CHAIN}")
    talk, other = opened.conversation(), opened.conversation()
    settings, history = SamplingParams(max_tokens=21, ignore_eos=True), list(bundles.PROMPTS[0])
    for drafter in ("none", "eagle", "eagle"):
        turn = list(talk.stream(history, settings, drafter=drafter))[-1].choice
        assert turn.token_ids == list(other.stream(history, settings, drafter="none"))[-1].choice.token_ids
        assert drafter == "none" or turn.stats.passes == 5
        history += [*turn.token_ids, 9, 9]
    talk.close()
    other.close()


def test_pacing_gives_up_on_a_wrong_head(target, tmp_path):
    """With adaptive drafting a random head is soon left alone, and tried again now and then."""
    head = fixtures.write_eagle3(tmp_path / "head")
    opened = bundles.engine(target, tmp_path / "bundle", f"eagle3={head}", max_length=512)
    _, (stats,) = bundles.tokens(opened, "eagle3", [[5, 9, 300]], max_tokens=400)
    assert stats.drafted < 60
