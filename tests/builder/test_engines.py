"""Engines described with the building blocks: taps, features as input, shared weights, size."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import numpy as np
import onnx
import pytest

from specbuild.checkpoint import Checkpoint, open_checkpoint
from specbuild.model.blocks import Blocks, EngineDescription
from specbuild.model.decoder import DecoderSpec
from specbuild.model.weights import Array, Weights
from specbuild.progress import Silent
from specbuild.targets.cpu import CpuTarget, open_target
from specrun.bundle import Bundle, EngineRecord, FileRecord, Limits, Manifest, ModelSummary
from specrun.contract import FINAL_NORM
from specrun.tree import DraftTree
from tests.builder.engines import BareEngine, largest, open_reference
from tests.builder.tiny import write_tiny_checkpoint

LIMITS = Limits(max_batch=2, max_nodes=16, prefill_chunk=32)


def target() -> CpuTarget:
    return open_target((), None, "float32", 128)


def as_bundle(directory: Path, *engines: EngineRecord) -> Bundle:
    files = tuple(FileRecord(p.name, "", p.stat().st_size) for p in directory.iterdir())
    summary = ModelSummary("llama", 512, 512, 128, (2,))
    return Bundle(directory, Manifest("test", summary, LIMITS, engines, (), files))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_tiny_checkpoint(tmp_path / "model", "llama", tie=True, layers=3))


def test_taps_are_the_streams_that_enter_layers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In the order asked for; the stream that leaves the last layer and the one after the final norm differ."""
    import torch

    out = tmp_path / "out"
    out.mkdir()
    spec = DecoderSpec("target", checkpoint.config, checkpoint.tensors, 128, taps=(2, 0, 3, FINAL_NORM))
    record = target().compile(spec.describe(), out, LIMITS, Silent())
    assert record.taps == (2, 0, 3, FINAL_NORM)
    tokens = [5, 9, 200, 31, 7]
    hidden = BareEngine(as_bundle(out, record)).prefill([tokens])["hidden"][0]
    model = open_reference(Path(checkpoint.source))
    seen: list[np.ndarray] = []
    for layer in model.model.layers:  # type: ignore[attr-defined]
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0].numpy()))
    model.model.norm.register_forward_hook(  # type: ignore[attr-defined]
        lambda module, inputs, output: seen.extend((inputs[0][0].numpy(), output[0].numpy()))
    )
    with torch.no_grad():
        model(torch.tensor([tokens]))  # type: ignore[operator]
    expected = np.concatenate([seen[2], seen[0], seen[3], seen[4]], axis=-1)
    assert largest(hidden, expected) < 1e-5


def test_a_head_on_the_targets_features_shares_its_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """An EAGLE-like layer: fc over [embedding, features], one decoder layer, the target's embedding and head."""
    out = tmp_path / "out"
    out.mkdir()
    cpu, config, hidden = target(), checkpoint.config, checkpoint.config.hidden_size
    spec = DecoderSpec("target", config, checkpoint.tensors, 128, taps=(3,))
    whole = cpu.compile(spec.describe(), out, LIMITS, Silent())
    fc = Array("fc.weight", np.random.default_rng(0).standard_normal((hidden, 2 * hidden)).astype(np.float32) / 8)
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    one = dataclasses.replace(config, num_layers=1, rope_layers=(True,))

    def emit(b: Blocks) -> None:
        step = b.decoder_inputs(one, layers=1, max_positions=128)
        x = b.linear(b.concat([b.embedding(step.tokens, embedding), b.hidden_in(hidden)]), fc)
        x = b.decoder_layer(step, 0, x, Weights(checkpoint.tensors).below("model.layers.1"), one)
        b.hidden([x], hidden)
        b.logits(b.lm_head(b.gather_rows(x, step.logit_rows), embedding), config.vocab_size)

    head = EngineDescription(
        "head", "decoder", config.vocab_size, hidden, emit, one, cache_layers=1, taps=(1,), hidden_in=hidden
    )
    record = cpu.compile(head, out, LIMITS, Silent())
    assert record.files == ("head.onnx", "target.weights", "head.weights")
    assert (out / "head.weights").stat().st_size < 2 * 4 * fc.array.size
    bundle = as_bundle(out, whole, record)
    features = BareEngine(bundle).prefill([[4, 5, 6, 7]])["hidden"]
    engine = BareEngine(bundle, "head")
    result = engine.run(
        np.array([[5, 6, 7, 8]]), np.arange(4)[None], np.tri(4, dtype=bool)[None], np.array([[3]]), features
    )
    assert result["logits"].shape == (1, 1, 512) and result["hidden"].shape == (1, 4, hidden)
    tail = engine.run(
        np.array([[5, 6]]), np.arange(2)[None], DraftTree.chain(1).mask[None], np.array([[1]]), features[:, :2]
    )
    assert largest(tail["hidden"][0], result["hidden"][0, :2]) < 1e-5


def test_head_engine(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Medusa-like: rows of features to logits for each head."""
    import onnxruntime as ort

    out = tmp_path / "out"
    out.mkdir()
    hidden, vocabulary = checkpoint.config.hidden_size, checkpoint.config.vocab_size
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    rng = np.random.default_rng(0)
    blocks = [Array(f"{i}.weight", rng.standard_normal((hidden, hidden)).astype(np.float32)) for i in range(2)]
    biases = [Array(f"{i}.bias", rng.standard_normal(hidden).astype(np.float32)) for i in range(2)]

    def emit(b: Blocks) -> None:
        x = b.hidden_in(hidden, rows="M")
        streams = [b.add(x, b.silu(b.linear(x, w, bias))) for w, bias in zip(blocks, biases, strict=True)]
        b.head_logits([b.lm_head(stream, embedding) for stream in streams], vocabulary)

    description = EngineDescription("medusa", "heads", vocabulary, hidden, emit, hidden_in=hidden, heads=2)
    record = target().compile(description, out, LIMITS, Silent())
    assert record.cache is None and record.heads == 2
    features = rng.standard_normal((2, 3, hidden)).astype(np.float32)
    found = ort.InferenceSession(str(out / record.files[0])).run(["head_logits"], {"hidden_in": features})[0]
    linear = [features @ w.array.T + bias.array for w, bias in zip(blocks, biases, strict=True)]
    expected = np.stack([features + y / (1 + np.exp(-y)) for y in linear], axis=2) @ embedding.read_float32().T
    assert largest(found, expected) < 1e-5


def test_above_two_gigabytes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """F04: 2.2 GB of weights go beside the graph; peak memory follows the largest tensor, not the file."""
    out = tmp_path / "out"
    out.mkdir()
    rows, hidden = 4_300_000, checkpoint.config.hidden_size
    config = dataclasses.replace(checkpoint.config, vocab_size=rows, num_layers=1, rope_layers=(True,))

    class Zeros:
        shape = (rows, hidden)

        def __init__(self, name: str) -> None:
            self.name = name

        def read_float32(self) -> np.ndarray:
            return np.zeros(self.shape, dtype=np.float32)

    tensors = dict(checkpoint.tensors) | {n: Zeros(n) for n in ("model.embed_tokens.weight", "lm_head.weight")}
    record = target().compile(DecoderSpec("target", config, tensors, 64).describe(), out, LIMITS, Silent())
    size = (out / "target.weights").stat().st_size
    assert size > 2_200_000_000 and (out / "target.onnx").stat().st_size < 1_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 1.5 * size
    onnx.checker.check_model(str(out / "target.onnx"))
    assert record.vocab_size == rows
