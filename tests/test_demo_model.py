"""The demo model against transformers: greedy tokens over 32 prompts x 128, plain, with chains and with trees."""

from __future__ import annotations

import numpy as np
import pytest

import specrun
from specrun.sampling import SamplingParams
from tests.demo_prompts import PROMPTS
from tests.runtime.scripted import oracle_chain, random_tree

pytestmark = pytest.mark.demo

TOKENS = 128
TIE = 2e-3  # fp32 sums in another order move these logits by less than this; a mismatch above it is a failure


@pytest.fixture(scope="module")
def engine(demo_bundle):
    return specrun.load(demo_bundle, verify=False)


@pytest.fixture(scope="module")
def prompts(engine):
    return [engine.text.encode(engine.text.chat([{"role": "user", "content": p}]), special=False) for p in PROMPTS]


@pytest.fixture(scope="module")
def plain(engine, prompts):
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    return [g.token_ids for g in engine.generate_batch(prompts, params, drafter="none")]


def test_plain_tokens_are_the_references(demo_gguf, engine, prompts, plain):
    """Teacher forcing: at every position of our output the reference's argmax is our token, or the two are a tie."""
    import torch

    model = transformers_model(demo_gguf)
    ties = 0
    for prompt, output in zip(prompts, plain, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].numpy()
        for i in np.flatnonzero(logits.argmax(-1) != output):
            gap = float(logits[i].max() - logits[i, output[i]])
            print(f"tie: position {i}, reference {logits[i].argmax()}, ours {output[i]}, gap {gap:.2e} (bound {TIE})")
            assert gap < TIE
            ties += 1
    print(f"{ties} ties in {len(prompts) * TOKENS} tokens")
    assert ties < 10


def transformers_model(demo_gguf):
    """transformers' Llama with the checkpoint's tensors (they are compared with the gguf package's elsewhere)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from specbuild.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(demo_gguf)
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope.theta, tie_word_embeddings=True,
        max_position_embeddings=c.max_position,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    state = {name: torch.from_numpy(weight.read_float32()) for name, weight in checkpoint.tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and missing == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("shape", ["prompt-lookup", "chain", "tree"])
def test_drafts_leave_the_tokens_alone(engine, prompts, plain, shape):
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    if shape == "prompt-lookup":
        drafters = ["prompt-lookup"] * len(prompts)
    else:
        make = {"chain": lambda a, i: oracle_chain(a, 3 + i % 5), "tree": lambda a, i: random_tree(a, 49152, i)}[shape]
        drafters = [make(answer, i) for i, answer in enumerate(plain)]
    results = engine.generate_batch(prompts, params, drafter=drafters)
    accepted = sum(g.stats.accepted for g in results)
    assert accepted > (100 if shape == "prompt-lookup" else 1000)  # lookups are gated; scripted drafts are often right
    for prompt, result, expected in zip(prompts, results, plain, strict=True):
        if result.token_ids != expected:
            _tie_or_fail(engine, prompt, result.token_ids, expected)


def _tie_or_fail(engine, prompt, found, expected):
    """The first difference must be a tie of the target's own logits."""
    at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=2)
    best, second = engine.generate(prompt + expected[:at], params, drafter="none").logprobs[0].top
    gap = best[1] - second[1]
    print(f"tie: output position {at}, {expected[at]} or {found[at]}, top-2 gap {gap:.2e} (bound {TIE})")
    assert gap < TIE and {best[0], second[0]} == {found[at], expected[at]}
