"""The compiled graph against transformers: every family, every kind of rotary scaling, trees, batches, widths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbuild.compile import compile_bundle
from specrun.bundle import Bundle
from specrun.tree import DraftTree
from tests.builder.engines import BareEngine, largest, open_reference, reference_logits
from tests.builder.tiny import FAMILIES, write_tiny_checkpoint

TOLERANCE = 3e-5  # of the largest logit

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}

Compiled = Callable[..., tuple[Bundle, Path]]


@pytest.fixture
def compiled(tmp_path: Path) -> Compiled:
    def build(family: str = "llama", **options: Any) -> tuple[Bundle, Path]:
        model = write_tiny_checkpoint(tmp_path / "model", family, **options)
        return compile_bundle(model, tmp_path / "out.bundle"), model

    return build


def tokens_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 500, shape)


def check_tree_step(bundle: Bundle, model: Path, lengths: tuple[int, int]) -> None:
    """Prefill two prompts in one padded pass, verify a different tree on each; every node equals a plain prefill of
    its root path."""
    reference = open_reference(model)
    prompts = [tokens_of(1, lengths[0]).tolist(), tokens_of(2, lengths[1]).tolist()]
    engine = BareEngine(bundle, batch=2, capacity=lengths[0] + 24)
    out = engine.prefill(prompts)["logits"]
    for b, prompt in enumerate(prompts):
        assert largest(out[b, : len(prompt)], reference_logits(reference, prompt)) < TOLERANCE
    trees = [DraftTree(np.array([-1, 0, 0, 1, 1, 2, 2])), DraftTree(np.array([-1, 0, 1, 2, 0, 4, 0]))]
    drafted = tokens_of(3, 2, 7)
    logits = engine.verify(drafted, trees)["logits"]
    for b, tree in enumerate(trees):
        for node in range(tree.size):
            path = tree.path_to(node)
            expected = reference_logits(reference, prompts[b] + drafted[b, path].tolist())[-1]
            assert largest(logits[b, node], expected) < TOLERANCE, f"row {b}, node {node}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_prefill_and_tree(compiled: Compiled, family: str) -> None:
    """A08: positions are depths, siblings do not see each other; rows of a batch have different contexts."""
    check_tree_step(*compiled(family), (19, 6))


@pytest.mark.parametrize("kind", ROPES)
def test_every_rotary_kind(compiled: Compiled, kind: str) -> None:
    """D08: positions up to four times the original range."""
    longest = 128 if kind == "dynamic" else 512
    check_tree_step(*compiled(rope_scaling=ROPES[kind], max_position_embeddings=longest), (110, 40))


def test_longrope_and_partial_rotation(compiled: Compiled) -> None:
    """Phi-3: both factor lists alike (one table), and half of each head unrotated."""
    factors = np.linspace(1, 3, 4).tolist()
    rope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    bundle, model = compiled("phi3", rope_scaling=rope, partial_rotary_factor=0.5, original_max_position_embeddings=64)
    check_tree_step(bundle, model, (80, 40))


@pytest.mark.parametrize(
    "options",
    [
        {"family": "llama", "tie": True},
        {"family": "llama", "heads": 6, "kv_heads": 1, "hidden": 96},
        {"family": "llama", "heads": 4, "kv_heads": 4},
        {"family": "llama", "attention_bias": True, "mlp_bias": True},
        {"family": "qwen3", "head_dim": 32},
        {"family": "qwen2", "tie": True, "dtype": "bfloat16"},
    ],
    ids=["tied", "multi-query", "multi-head", "biases", "own-head-dim", "bfloat16"],
)
def test_variants(compiled: Compiled, options: dict[str, Any]) -> None:
    """E05: head_dim is the config's own; ties and biases of every place."""
    check_tree_step(*compiled(**options), (12, 5))


def test_no_shape_is_baked_in(compiled: Compiled) -> None:
    """F05: any prompt length and width; A11: the first row's logits do not depend on the width of the pass."""
    bundle, model = compiled()
    reference = open_reference(model)
    for length in (1, 2, 3, 5, 6, 7, 63, 64, 65):
        prompt = tokens_of(length, length).tolist()
        engine = BareEngine(bundle)
        assert largest(engine.prefill([prompt])["logits"][0], reference_logits(reference, prompt)) < TOLERANCE
    drafted = tokens_of(9, 1, 9)
    rows = [engine.verify(drafted[:, :width], [DraftTree.chain(width - 1)])["logits"][0, 0] for width in range(1, 10)]
    for width, row in enumerate(rows, start=1):
        assert largest(row, rows[0]) < 1e-6 and row.argmax() == rows[0].argmax(), f"width {width}"


def test_rows_beyond_the_context_do_not_matter(compiled: Compiled) -> None:
    """What an earlier pass left in the cache beyond the context has weight exactly zero."""
    bundle, _ = compiled()
    clean, dirty = BareEngine(bundle), BareEngine(bundle)
    prompt = tokens_of(5, 11).tolist()
    for engine in (clean, dirty):
        engine.prefill([prompt])
    dirty.verify(tokens_of(6, 1, 8), [DraftTree.chain(7)])
    for cache in dirty.caches.values():
        cache[:, :, 24:] = 1e4
    step = tokens_of(7, 1, 2)
    one, two = (engine.verify(step, [DraftTree.chain(1)])["logits"] for engine in (clean, dirty))
    assert np.array_equal(one, two)
