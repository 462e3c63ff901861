"""draft-model through the real loop: lossless, its cache follows, chains and trees, greedy and sampled."""

from __future__ import annotations

import pytest

from specrun.sampling import SamplingParams
from tests.runtime.drafters import bundles

CHAIN = "depth=4,adaptive=0"
TREE = "depth=3,topk=3,total_nodes=9,adaptive=0"


@pytest.fixture(scope="module")
def noisy(target, tmp_path_factory):
    return bundles.write_noisy(tmp_path_factory.mktemp("noisy") / "model", target)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A target as its own draft model (SELF of the cases)."""
    root = tmp_path_factory.mktemp("own")
    target = bundles.write_target(root / "target", max_position_embeddings=1024, layers=2)
    return bundles.engine(target, root / "bundle", f"draft-model={target},{CHAIN}", max_length=1024)


@pytest.mark.parametrize("options", [CHAIN, TREE, "depth=1,adaptive=0", "depth=6,topk=4"])
def test_greedy_tokens_are_plain_ones(target, noisy, tmp_path, options):
    """A10: a noisy copy of the target; rows of a batch accept different counts."""
    opened = bundles.engine(target, tmp_path / "bundle", f"draft-model={noisy},{options}")
    stats = bundles.assert_same_as_plain(opened, "draft-model")
    if "adaptive=0" in options:
        assert 0 < sum(s.accepted for s in stats) < sum(s.drafted for s in stats)


def test_itself_accepts_everything(own):
    """After every full acceptance the row of the last drafted token is caught up on, over 640 tokens."""
    for prompts, count in ((bundles.PROMPTS[:1], 640), (bundles.PROMPTS, 160)):
        plain, _ = bundles.tokens(own, "none", prompts, max_tokens=count)
        drafted, stats = bundles.tokens(own, "draft-model", prompts, max_tokens=count)
        assert drafted == plain
        assert all(s.acceptance == 1.0 and s.passes == count // 5 for s in stats)


def test_itself_as_a_tree_accepts_to_the_full_depth(target, tmp_path):
    opened = bundles.engine(target, tmp_path / "bundle", f"draft-model={target},{TREE}")
    stats = bundles.assert_same_as_plain(opened, "draft-model", max_tokens=41)
    assert all(s.passes == 10 for s in stats), "each pass accepts a path of three"


def test_catches_up_after_a_pause(own):
    """Drafting sets in late, and after plain stretches: everything is accepted again at once."""
    drafter = own.drafter("draft-model")
    wanted = drafter.propose
    budgets = iter([0] * 7 + [4] * 5 + [0] * 30 + [4] * 1000)

    def paused(sequences, limits):
        least = next(budgets)
        return wanted(sequences, [min(limit, least) for limit in limits])

    drafter.propose = paused
    try:
        drafted, (stats,) = bundles.tokens(own, "draft-model", bundles.PROMPTS[:1], max_tokens=200)
    finally:
        drafter.propose = wanted
    assert drafted == bundles.tokens(own, "none", bundles.PROMPTS[:1], max_tokens=200)[0]
    assert stats.acceptance == 1.0 and stats.accepted > 100


def test_a_conversation_whose_prefix_was_never_drafted(own):
    talk, other = own.conversation(), own.conversation()
    settings = SamplingParams(max_tokens=30, ignore_eos=True)
    history = list(bundles.PROMPTS[0])
    for drafter in ("none", "draft-model", "none", "draft-model"):
        last = [d for d in talk.stream(history, settings, drafter=drafter)][-1].choice
        plain = [d for d in other.stream(history, settings, drafter="none")][-1].choice
        assert last.token_ids == plain.token_ids
        assert drafter == "none" or last.stats.acceptance == 1.0
        history += [*last.token_ids, 9, 9]
    talk.close()
    other.close()


def test_context_end(target, tmp_path):
    """D03, H05: drafting stops at the last position, also where the draft model was made for fewer."""
    short = bundles.write_target(tmp_path / "short", max_position_embeddings=32)
    opened = bundles.engine(target, tmp_path / "bundle", f"draft-model={short},{CHAIN}", max_length=64)
    prompts = [list(range(5, 5 + n)) for n in (58, 61, 63, 40)]
    stats = bundles.assert_same_as_plain(opened, "draft-model", prompts, max_tokens=500)
    assert all(s.acceptance in (0.0, 1.0) for s in stats) and stats[-1].accepted > 10


def test_padded_vocabularies(tmp_path):
    """D04: 520 rows against 500; ids from 500 on exist for the target alone."""
    target = bundles.write_target(tmp_path / "target", vocab=512)
    small = bundles.write_target(tmp_path / "small", vocab=500)
    from tests.builder.tiny import tiny_tokenizer

    tiny_tokenizer(500).save(str(small / "tokenizer.json"))
    names = tiny_tokenizer(512)
    assert names.id_to_token(499) == tiny_tokenizer(500).id_to_token(499)
    opened = bundles.engine(target, tmp_path / "bundle", f"draft-model={small},{CHAIN}")
    prompts = [*bundles.PROMPTS[:3], [505, 511, 3]]
    bundles.assert_same_as_plain(opened, "draft-model", prompts)
    bundles.tokens(opened, "draft-model", prompts, temperature=1.0)


def test_sampled_law_is_the_targets(target, tmp_path):
    """Block verification of drawn chains."""
    noisy = bundles.write_noisy(tmp_path / "noisy", target, scale=0.06)
    opened = bundles.engine(target, tmp_path / "bundle", f"draft-model={noisy},{CHAIN}", max_batch=8)
    stats = bundles.assert_sampled_law(opened, "draft-model")
    assert 0.2 < sum(s.accepted for s in stats) / sum(s.drafted for s in stats) < 0.95


def test_a_seed_gives_the_same_text_in_any_batch(target, noisy, tmp_path):
    """B09."""
    opened = bundles.engine(target, tmp_path / "bundle", f"draft-model={noisy},depth=4")
    settings = [SamplingParams(max_tokens=30, temperature=0.8, seed=7 + i, ignore_eos=True) for i in range(4)]
    batch = opened.generate_batch(bundles.PROMPTS, settings, drafter="draft-model")
    alone = [opened.generate(p, s, drafter="draft-model") for p, s in zip(bundles.PROMPTS, settings, strict=True)]
    again = opened.generate_batch(bundles.PROMPTS[::-1], settings[::-1], drafter="draft-model")[::-1]
    assert [r.token_ids for r in batch] == [r.token_ids for r in alone] == [r.token_ids for r in again]
