"""Blocked integer weights: the codes, the rows' independence of each other, what is stored once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.compile import compile_bundle
from specbuild.model.quantize import BLOCK, dequantize, quantize
from specrun.errors import CompileError
from specrun.tree import DraftTree
from tests.builder.engines import BareEngine
from tests.builder.tiny import write_tiny_checkpoint


@given(st.integers(1, 5), st.integers(1, 100), st.sampled_from([4, 8]), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_error_is_at_most_half_a_step(rows: int, columns: int, bits: int, seed: int) -> None:
    """One step at the end that has no code of its own (+half), half a step elsewhere."""
    weight = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    codes, scales = quantize(weight, bits)
    found = dequantize(codes, scales, columns, bits)
    step = np.repeat(np.abs(scales), BLOCK, axis=1)[:, :columns]
    half = 2 ** (bits - 1)
    edge = weight / np.where(step > 0, np.repeat(scales, BLOCK, axis=1)[:, :columns], 1) > half - 1.5
    assert (np.abs(found - weight) <= np.where(edge, 1.0001, 0.5001) * step).all()


def test_zero_blocks_and_extremes() -> None:
    weight = np.zeros((2, 2 * BLOCK), dtype=np.float32)
    weight[1, BLOCK:] = np.linspace(-1, 3, BLOCK)
    for bits in (4, 8):
        codes, scales = quantize(weight, bits)
        found = dequantize(codes, scales, 2 * BLOCK, bits)
        assert (found[0] == 0).all() and found[1, -1] == 3.0


@pytest.mark.parametrize("quantize_to", ["int4", "int8"])
def test_a_row_is_the_same_in_every_pass_of_two_rows_or_more(quantize_to: str, tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "llama", hidden=128, tie=True)
    bundle = compile_bundle(model, tmp_path / "out.bundle", quantize=quantize_to)
    record = bundle.manifest.engine("target")
    assert record.min_rows == 2 and record.precision == quantize_to
    engine = BareEngine(bundle)
    engine.prefill([np.arange(3, 40).tolist()])
    drafted = np.random.default_rng(0).integers(3, 500, (1, 17))
    rows = [engine.verify(drafted[:, :n], [DraftTree.chain(n - 1)])["logits"][0, :2] for n in range(2, 18)]
    for n, row in enumerate(rows, start=2):
        assert np.array_equal(row, rows[0]), f"{n} nodes"


@pytest.mark.parametrize(("quantize_to", "bound"), [("int8", 0.05), ("int4", 0.6)])
def test_logits_stay_close(quantize_to: str, bound: float, tmp_path: Path) -> None:
    """Also where the width is no multiple of the block."""
    model = write_tiny_checkpoint(tmp_path / "model", "qwen2", hidden=72, heads=3, kv_heads=1, head_dim=24)
    exact = BareEngine(compile_bundle(model, tmp_path / "a.bundle"))
    rounded = BareEngine(compile_bundle(model, tmp_path / "b.bundle", quantize=quantize_to))
    prompt = np.arange(3, 60).tolist()
    one, two = (engine.prefill([prompt])["logits"] for engine in (exact, rounded))
    assert 0 < np.linalg.norm(one - two) / np.linalg.norm(one) < bound


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    sizes = {}
    for tie in (True, False):
        model = write_tiny_checkpoint(tmp_path / str(tie), "llama", tie=tie, vocab=512, hidden=64)
        for quantize_to, code_bytes in ((None, 4), ("int8", 1)):
            bundle = compile_bundle(model, tmp_path / "out.bundle", quantize=quantize_to)
            sizes[tie, code_bytes] = sum(file.bytes for file in bundle.manifest.files if file.path.endswith("weights"))
    for code_bytes in (4, 1):
        assert sizes[False, code_bytes] - sizes[True, code_bytes] >= 512 * 64 * code_bytes


def test_drafters_are_quantized_apart_from_the_target(tmp_path: Path) -> None:
    """By default only they are; their embedding rows are the target's own, their passes may be of one row."""
    model = write_tiny_checkpoint(tmp_path / "model", "llama", hidden=64, tie=True)
    found = {}
    for asked, expected in ((None, "int8"), ("int4", "int4"), ("none", "fp32")):
        bundle = compile_bundle(
            model, tmp_path / "out.bundle", drafters=[f"draft-model={model}"], quantize_drafters=asked
        )
        target, drafter = bundle.manifest.engine("target"), bundle.manifest.engine("draft-model")
        assert (target.precision, drafter.precision, drafter.min_rows) == ("fp32", expected, 1)
        found[expected] = bundle.manifest.drafter("draft-model").bytes
    assert found["int4"] < found["int8"] < found["fp32"]


@pytest.mark.parametrize("asked", [{"quantize": "int4"}, {"quantize_drafters": "int8"}])
def test_gpu_targets_refuse_blocks(asked: dict[str, str], tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(CompileError, match="not offered for target tensorrt-rtx"):
        compile_bundle(model, tmp_path / "out.bundle", target="tensorrt-rtx:sm89", **asked)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("quantize_to", [None, "int4", "int8"])
def test_a_row_does_not_depend_on_the_capacity_or_the_batch(quantize_to: str | None, tmp_path: Path) -> None:
    """A speculative run grows its cache earlier than a plain one, and a batch reads other rows beside it."""
    model = write_tiny_checkpoint(tmp_path / "model", "llama", hidden=128, tie=True)
    bundle = compile_bundle(model, tmp_path / "out.bundle", quantize=quantize_to)
    prompts = [np.arange(3, 3 + n).tolist() for n in (37, 20, 9)]
    drafted = np.random.default_rng(0).integers(3, 500, (3, 4))
    rows = []
    for capacity, batch in ((64, 1), (128, 1), (512, 1), (768, 1), (1280, 1), (64, 3), (256, 3), (768, 3)):
        engine = BareEngine(bundle, batch=batch, capacity=capacity)
        engine.prefill(prompts[:batch])
        rows.append(engine.verify(drafted[:batch], [DraftTree.chain(3)] * batch)["logits"][0])
    for row in rows[1:]:
        assert np.array_equal(row, rows[0])
