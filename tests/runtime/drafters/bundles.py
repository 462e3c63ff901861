"""Tiny bundles with drafters, compiled for the cpu target, and what every drafter is compared with."""

from __future__ import annotations

from collections import Counter

import numpy as np
from safetensors.numpy import load_file, save_file
from scipy.stats import chi2

import specrun
from specbuild.compile import compile_bundle
from specrun.sampling import SamplingParams
from tests.builder.tiny import write_tiny_checkpoint

PROMPTS = [[5, 9, 300, 7, 1, 1, 8, 20, 30, 4, 6], [44, 3, 17], [101] * 7 + [12, 400, 9], [8]]


def write_target(path, **settings):
    """A Llama of four layers, so that taps 2, n // 2 and n - 3 are there."""
    return write_tiny_checkpoint(path, "llama", **{"layers": 4, "seed": 1, **settings})


def write_noisy(path, target, scale=0.02):
    """The checkpoint at ``target`` with noise on its weights: a drafter that is right now and then."""
    write_tiny_checkpoint(path, "llama", layers=4, seed=1)
    rng = np.random.default_rng(0)
    weights = load_file(target / "model.safetensors")
    noisy = {n: w + scale * w.std() * rng.standard_normal(w.shape).astype(w.dtype) for n, w in weights.items()}
    save_file(noisy, path / "model.safetensors", metadata={"format": "pt"})
    return path


def engine(target, output, *drafters, **settings):
    """Compiles and opens a bundle. Its drafters are exact, to be compared with references."""
    defaults = {"max_length": 256, "max_batch": 4, "quantize_drafters": "none"}
    compile_bundle(target, output, drafters=drafters, **{**defaults, **settings})
    return specrun.load(output, threads=1)


def tokens(opened, drafter, prompts=PROMPTS, **params):
    """Greedy (or as ``params`` say) continuations, all prompts in one batch, with their statistics."""
    settings = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **params})
    results = opened.generate_batch(prompts, settings, drafter=drafter)
    return [r.token_ids for r in results], [r.stats for r in results]


def assert_same_as_plain(opened, drafter, prompts=PROMPTS, **params):
    """Batch and single requests emit what plain decoding does. Returns the batch's statistics."""
    plain, _ = tokens(opened, "none", prompts, **params)
    drafted, stats = tokens(opened, drafter, prompts, **params)
    assert drafted == plain
    assert tokens(opened, drafter, prompts[:1], **params)[0] == plain[:1]
    for s in stats:
        assert s.emitted == s.accepted + s.passes + 1
    return stats


def exact_law(opened, prompt, length, temperature, top_k):
    """{continuation: probability} of ``length`` tokens, from the target's own log-probabilities."""
    law = {(): 1.0}
    for _ in range(length):
        prefixes = list(law)
        params = SamplingParams(max_tokens=1, logprobs=top_k, ignore_eos=True)
        results = opened.generate_batch([[*prompt, *prefix] for prefix in prefixes], params, drafter="none")
        longer = {}
        for prefix, result in zip(prefixes, results, strict=True):
            best = result.logprobs[0].top
            weights = np.exp([logprob / temperature for _, logprob in best])
            for (token, _), weight in zip(best, weights / weights.sum(), strict=True):
                longer[(*prefix, token)] = law[prefix] * weight
        law = longer
    return law


def assert_sampled_law(opened, drafter, count=500, temperature=5.0, top_k=3):
    """Continuations follow the target's exact law (chi-square over three tokens, the last two of them drafted)."""
    law = exact_law(opened, PROMPTS[0], 3, temperature, top_k)
    settings = {"temperature": temperature, "top_k": top_k, "ignore_eos": True, "max_tokens": 4}
    requests = [SamplingParams(seed=seed, **settings) for seed in range(count)]
    results = opened.generate_batch([PROMPTS[0]] * count, requests, drafter=drafter)
    seen = Counter(tuple(result.token_ids[:3]) for result in results)
    assert set(seen) <= set(law), "a token that the target cannot sample"
    common = [path for path in law if law[path] * count >= 5]
    expected = np.array([law[path] * count for path in common])
    found = np.array([seen[path] for path in common], dtype=float)
    found, expected = np.append(found, count - found.sum()), np.append(expected, count - expected.sum())
    statistic = ((found - expected) ** 2 / expected).sum()
    assert len(common) >= 8 and chi2.sf(statistic, len(common)) > 1e-3
    return [result.stats for result in results]
