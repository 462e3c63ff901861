"""What heads draft in the real loop, node by node, against torch references that know no cache and no tree."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.drafters import bundles, fixtures, reference

TREE = "depth=3,topk=3,total_nodes=10,adaptive=0"
PROMPT = [5, 9, 300, 7, 1, 1, 8, 20, 30, 4, 6]


def recorded(opened, kind, count=6):
    """(tokens known, proposal) of every draft of a run of ``count`` passes, and all tokens."""
    drafter, seen = opened.drafter(kind), []
    propose = drafter.propose

    def recording(sequences, budgets):
        proposals = propose(sequences, budgets)
        seen.extend((list(s.tokens), p) for s, p in zip(sequences, proposals, strict=True))
        return proposals

    drafter.propose = recording
    (tokens,), _ = bundles.tokens(opened, kind, [PROMPT], max_tokens=count + 4)
    return seen[:count], PROMPT + tokens


def assert_parity(opened, checkpoint, kind, head):
    """Every drafted node's probability is the reference's, after its own path."""
    drafts, tokens = recorded(opened, kind)
    features = reference.target_features(checkpoint, tokens, opened.drafter(kind).taps)
    assert sum(p.drafted for _, p in drafts) >= 6 * 5, "nothing was drafted"
    for known, proposal in drafts:
        for node in range(1, proposal.tree.size):
            path = [int(proposal.tokens[i]) for i in proposal.tree.path_to(node)[1:]]
            law = head.law(known, features[: len(known) - 1], path[:-1])
            assert proposal.chances[node] == pytest.approx(law[path[-1]], abs=2e-4), (len(known), path)
        root = [int(proposal.tokens[i]) for i in proposal.tree.children[0]]
        law = head.law(known, features[: len(known) - 1], [])
        assert set(root) <= set(np.argsort(-law)[:3].tolist())


def test_eagle(target, tmp_path):
    """EAGLE-1's layout with every bias (D06)."""
    tensors = fixtures.eagle_tensors()
    opened = bundles.engine(
        target, tmp_path / "bundle", f"eagle={fixtures.write_eagle(tmp_path / 'head', tensors)},{TREE}"
    )
    assert_parity(opened, target, "eagle", reference.Eagle(tensors, fixtures.weights_of(target)))


def variants():
    rng = np.random.default_rng(9)
    plain = fixtures.eagle3_tensors()
    older = {f"aux_norm_{n}.weight": fixtures.norm(rng) for n in ("low", "mid", "high")}
    newer = {f"fc_norm.{i}.weight": fixtures.norm(rng) for i in range(3)}
    own = {"embed_tokens.weight": rng.standard_normal((fixtures.VOCAB, fixtures.HIDDEN)).astype(np.float32)}
    yield "plain", plain, {}, {}
    yield "residual normalized", plain, {"norm_before_residual": True}, {"norm_before_residual": True}
    yield "norms of taps", plain | newer | own, {}, {}
    yield "older norms of taps", plain | older, {"norm_output": True}, {"norm_output": True}
    yield "norm of all taps", plain | {"input_norm.weight": fixtures.norm(rng, 3 * fixtures.HIDDEN)}, {}, {}
    yield "biases", fixtures.eagle3_tensors(bias=True), {}, {}


@pytest.mark.parametrize(("tensors", "config", "flags"), [pytest.param(*v[1:], id=v[0]) for v in variants()])
def test_eagle3(target, tmp_path, tensors, config, flags):
    """SafeAILab's layout: the residual is the feature unless the config says otherwise."""
    path = fixtures.write_eagle3(tmp_path / "head", tensors, **config)
    opened = bundles.engine(target, tmp_path / "bundle", f"eagle3={path},{TREE}")
    head = reference.Eagle3(tensors, fixtures.weights_of(target))
    for flag, value in flags.items():
        setattr(head, flag, value)
    assert_parity(opened, target, "eagle3", head)


def test_eagle3_of_a_scaled_target(tmp_path):
    """D08: the head's config names the base alone; its rotary positions are interpolated as the target's are."""
    tensors = fixtures.eagle3_tensors()
    target = bundles.write_target(tmp_path / "target", rope_scaling={"rope_type": "linear", "factor": 4.0})
    path = fixtures.write_eagle3(tmp_path / "head", tensors)
    opened = bundles.engine(target, tmp_path / "bundle", f"eagle3={path},{TREE}")
    head = reference.Eagle3(tensors, fixtures.weights_of(target))
    head.stretch = 4.0
    assert_parity(opened, target, "eagle3", head)


def test_eagle3_of_speculators(target, tmp_path):
    """Their names and config; the residual is normalized unless the config says otherwise."""
    tensors = fixtures.eagle3_tensors()
    stored = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 128,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
        "transformer_layer_config": fixtures.LLAMA,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
    }
    path = fixtures.write(tmp_path / "head", stored, config)
    opened = bundles.engine(target, tmp_path / "bundle", f"eagle3={path},{TREE}")
    assert opened.drafter("eagle3").taps == (0, 1, 3)
    head = reference.Eagle3(tensors, fixtures.weights_of(target))
    head.norm_before_residual = True
    assert_parity(opened, target, "eagle3", head)


@pytest.mark.parametrize(
    ("make", "head"), [(fixtures.mimo_tensors, reference.MiMo), (fixtures.deepseek_tensors, reference.DeepSeek)]
)
def test_mtp(tmp_path, make, head):
    """The layer inside the target's checkpoint, reused for deeper drafts."""
    tensors = make()
    target = bundles.write_target(tmp_path / "target", extra_tensors=tensors)
    opened = bundles.engine(target, tmp_path / "bundle", f"mtp,{TREE}")
    assert_parity(opened, target, "mtp", head(tensors, fixtures.weights_of(target)))


def test_mtp_of_two_layers(tmp_path):
    """Each layer drafts one depth and keeps a cache of its own."""
    tensors = fixtures.mimo_tensors(layers=2)
    target = bundles.write_target(tmp_path / "target", extra_tensors=tensors)
    opened = bundles.engine(target, tmp_path / "bundle", "mtp,depth=2,topk=3,total_nodes=12,adaptive=0")
    assert_parity(opened, target, "mtp", reference.MiMoTwo(tensors, fixtures.weights_of(target)))
    deeper = bundles.engine(target, tmp_path / "deeper", "mtp,depth=4,topk=2,adaptive=0")
    bundles.assert_same_as_plain(deeper, "mtp")


@pytest.mark.parametrize("own", [True, False])
def test_medusa(target, tmp_path, own):
    """Own LM heads, or the target's for all; the config's wrong count of heads is not believed."""
    tensors = fixtures.medusa_tensors(own=own)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1} | ({} if own else {"borrow_lm_head": True})
    path = fixtures.write(tmp_path / "head", tensors, config, "medusa_lm_head.safetensors")
    opened = bundles.engine(target, tmp_path / "bundle", f"medusa={path},topk=3,total_nodes=10,adaptive=0")
    assert_parity(opened, target, "medusa", reference.Medusa(tensors, fixtures.weights_of(target)))
