"""GGUF files: names, permutation, types and metadata, against the directories they were made from and transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from specbuild.checkpoint import gguf_file, open_checkpoint
from specbuild.config import ModelConfig
from specrun.errors import CheckpointError
from tests.builder.tiny import FAMILIES, write_tiny_checkpoint
from tests.builder.tiny_gguf import write_tiny_gguf


def convert(tmp_path: Path, family: str = "llama", *, gguf_options: dict[str, Any] | None = None, **model: Any) -> Path:
    directory = write_tiny_checkpoint(tmp_path / "model", family, **model)
    return write_tiny_gguf(tmp_path / "model.gguf", directory, **(gguf_options or {}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_every_family_reads_as_its_directory(family: str, tie: bool, tmp_path: Path) -> None:
    # llama.cpp fixes SmolLM3's interval of layers without rotary embedding at 4.
    own = {"no_rope_layer_interval": 4, "layers": 4} if family == "smollm3" else {}
    ours = open_checkpoint(convert(tmp_path, family, tie=tie, kv_heads=2, **own))
    theirs = open_checkpoint(tmp_path / "model")
    assert set(ours.tensors) == set(theirs.tensors)
    assert ours.extra == {}
    for name, source in theirs.tensors.items():
        np.testing.assert_array_equal(ours.tensors[name].read(), source.read(), err_msg=name)
        assert ours.tensors[name].shape == source.shape
    differing = {"rms_norm_eps", "pad_token_id"} | ({"family"} if family == "mistral" else set())
    a, b = ours.config.to_json(), theirs.config.to_json()
    assert {key for key in a if a[key] != b[key]} <= differing
    assert a["rms_norm_eps"] == pytest.approx(b["rms_norm_eps"])


def test_attention_bias_of_llama_is_unpermuted_too(tmp_path: Path) -> None:
    ours = open_checkpoint(convert(tmp_path, attention_bias=True, mlp_bias=True))
    theirs = open_checkpoint(tmp_path / "model")
    assert ours.config.qkv_bias
    assert ours.config.mlp_bias
    for name, source in theirs.tensors.items():
        np.testing.assert_array_equal(ours.tensors[name].read(), source.read(), err_msg=name)


def transformers_tensors(file: Path) -> dict[str, np.ndarray]:
    """What transformers makes of the file: its own name map, dequantization and reversal of the permutation."""
    config = dict(load_gguf_checkpoint(file)["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tensors_equal_what_transformers_reads(family: str, tmp_path: Path) -> None:
    file = convert(tmp_path, family, gguf_options={"matrices": "Q8_0"})
    theirs, ours = transformers_tensors(file), open_checkpoint(file).tensors
    assert set(theirs) == set(ours)
    for name, source in ours.items():
        np.testing.assert_array_equal(source.read(), theirs[name], err_msg=name)


TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_read_lazily_by_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = convert(tmp_path, "qwen3", gguf_options={"matrices": kind}, hidden=256, layers=1)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}["blk.0.ffn_up.weight"]
    expected = dequantize(stored.data, stored.tensor_type)
    monkeypatch.setattr(gguf_file, "_DEQUANTIZED_VALUES", 7 * 256)  # several pieces, the last one shorter
    checkpoint = open_checkpoint(file)
    source = checkpoint.tensors["model.layers.0.mlp.up_proj.weight"]
    plain = {"F16": "float16", "BF16": "bfloat16"}
    assert checkpoint.config.dtype == source.dtype.name == plain.get(kind, "float32")
    assert source.read().dtype == source.dtype
    np.testing.assert_array_equal(source.read_float32(), expected)
    np.testing.assert_array_equal(source.load(slice(5, 9)).astype(np.float32), expected[5:9])


ROPE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("qwen2", {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 4.0}, {"factor": 4.0}),
    "yarn": (
        "qwen2",
        {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 128,
        },
        {"factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "default": ("qwen2", {"qwen2.rope.scaling.type": "none"}, {}),
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling_keys(kind: str, tmp_path: Path) -> None:
    family, metadata, parameters = ROPE[kind]
    rope = open_checkpoint(convert(tmp_path, family, gguf_options={"metadata": metadata})).config.rope
    assert (rope.kind, rope.parameters) == (kind, parameters)


def test_llama3_scaling_is_stored_as_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain = write_tiny_checkpoint(tmp_path / "plain", "llama")
    scaled = write_tiny_checkpoint(tmp_path / "model", "llama", rope_scaling=scaling)
    frequencies = [open_checkpoint(path).config.rope.inverse_frequencies()[0] for path in (plain, scaled)]
    divisors = (frequencies[0] / frequencies[1]).tolist()
    assert max(divisors) > 2
    config = json.loads((scaled / "config.json").read_text())
    (scaled / "config.json").write_text(json.dumps({**config, "gguf_divisors": {"rope_freqs.weight": divisors}}))
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "model.gguf", scaled))
    assert checkpoint.config.rope.kind == "llama3"
    assert checkpoint.extra == {}
    np.testing.assert_allclose(checkpoint.config.rope.inverse_frequencies()[0], frequencies[1], rtol=3e-7)
    assert ModelConfig.from_json(json.loads(json.dumps(checkpoint.config.to_json()))) == checkpoint.config


def test_longrope_divisors_of_phi3(tmp_path: Path) -> None:
    divisors = {
        "rope_factors_short.weight": np.linspace(1, 2, 8).tolist(),
        "rope_factors_long.weight": np.linspace(1, 20, 8).tolist(),
    }
    keys = {"phi3.rope.scaling.original_context_length": 128, "phi3.rope.scaling.attn_factor": 1.19}
    file = convert(tmp_path, "phi3", gguf_divisors=divisors, gguf_options={"metadata": keys})
    rope = open_checkpoint(file, max_length=128).config.rope
    assert (rope.kind, rope.exact_length) == ("longrope", 128)
    frequencies, scaling = rope.inverse_frequencies(129)
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(frequencies, plain / np.linspace(1, 20, 8), rtol=1e-6)
    assert scaling == pytest.approx(1.19)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mixture of experts": ({"llama.expert_count": 8}, r"mixture-of-experts"),
    "part of a split": ({"split.count": 3}, r"one part of a split model; merge"),
    "heads by layer": ({"llama.attention.head_count": [4, 4]}, r"varies \.attention\.head_count by layer"),
    "no epsilon": (
        {"llama.attention.layer_norm_rms_epsilon": None},
        r"lacks the metadata llama.attention.layer_norm_rms_epsilon",
    ),
    "rope scaling": ({"llama.rope.scaling.type": "spiral"}, r"rope scaling 'spiral' is not supported"),
    "sliding window": ({"llama.attention.sliding_window": 64}, r"sliding-window attention over 64 tokens"),
    "tokenizer kind": ({"tokenizer.ggml.model": "bert"}, r"tokenizer kind 'bert' is not supported; supported: gpt2"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "falcon"}, r"pre-tokenizer 'falcon' is not supported; supported: gpt-2"),
    "no tokenizer": ({"tokenizer.ggml.model": None}, r"holds no tokenizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str, tmp_path: Path) -> None:
    metadata, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(convert(tmp_path, gguf_options={"metadata": metadata}))


def test_unknown_architecture_and_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"architecture 'mamba' is not supported; supported: llama, qwen2"):
        open_checkpoint(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"has the type Q2_K, which is not supported; supported: F32"):
        open_checkpoint(convert(tmp_path, hidden=256, layers=1, gguf_options={"matrices": "Q2_K"}))


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.1, 0.5, 0.99])
def test_truncated_files(keep: float, tmp_path: Path) -> None:
    file = convert(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: not a readable GGUF file")):
        open_checkpoint(file)


@pytest.mark.demo
def test_demo_model(demo_reader: gguf.GGUFReader) -> None:
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in demo_reader.tensors[:21]}
    config = ModelConfig.from_gguf(demo_reader)
    assert config.tie_embeddings
    assert (config.num_layers, config.rope.theta) == (30, 100000.0)
    tensors = gguf_file.gguf_tensors(demo_reader, config)
    assert len(tensors) == 272
    interleaved = stored["blk.1.attn_k.weight"].reshape(3, 32, 2, 576)
    expected = np.concatenate([interleaved[:, :, 0], interleaved[:, :, 1]], axis=1).reshape(192, 576)
    for name, value in (
        ("model.embed_tokens.weight", stored["token_embd.weight"]),
        ("model.layers.1.self_attn.k_proj.weight", expected),
        ("model.layers.1.self_attn.v_proj.weight", stored["blk.1.attn_v.weight"]),
        ("model.layers.0.mlp.gate_proj.weight", stored["blk.0.ffn_gate.weight"]),
        ("model.layers.0.post_attention_layernorm.weight", stored["blk.0.ffn_norm.weight"]),
    ):
        np.testing.assert_array_equal(tensors[name].load(slice(100, 192)), value[100:192], err_msg=name)
