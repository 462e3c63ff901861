"""Rotary tables against transformers' own, for every kind (case D08)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from specbuild.config import ModelConfig
from specbuild.rope import RopeConfig
from specrun.errors import CheckpointError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-factor": {**YARN, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-implicit-factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    "yarn-implicit-original": {"rope_type": "yarn", "factor": 4.0},
}
TRAINED = 128


def llama_config(scaling: dict[str, Any] | None, **overrides: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 4 * TRAINED,
        "rope_theta": 10000.0,
        "rope_scaling": scaling,
        **overrides,
    }


def phi3_config(head_dim: int = 32, partial: float = 1.0, **overrides: Any) -> dict[str, Any]:
    rotary = int(head_dim * partial) // 2
    scaling = {
        "type": "longrope",
        "short_factor": np.linspace(1, 1.4, rotary).tolist(),
        "long_factor": np.linspace(1, 30, rotary).tolist(),
    }
    config = {"model_type": "phi3", "original_max_position_embeddings": TRAINED, "partial_rotary_factor": partial}
    return llama_config(scaling, hidden_size=4 * head_dim, **{**config, **overrides})


def tables(module: torch.nn.Module, length: int) -> tuple[np.ndarray, np.ndarray]:
    """transformers' cos and sin for one call over positions 0 to length - 1, without the repeated half."""
    cos, sin = module(torch.zeros(1, dtype=torch.float32), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


def hf_config(config: dict[str, Any]) -> Any:
    return AutoConfig.for_model(**config)


def rope_of(config: dict[str, Any]) -> RopeConfig:
    """The rotary embedding of a model that will not be used beyond the trained length."""
    return ModelConfig.from_hf(config, max_length=TRAINED).rope


def assert_same_tables(rope: RopeConfig, module: torch.nn.Module, length: int) -> None:
    for ours, theirs in zip(rope.cos_sin(length), tables(module, length), strict=True):
        assert ours.dtype == np.float32
        # A last-bit difference of a frequency turns by length * 2^-24 at the last position.
        np.testing.assert_allclose(ours, theirs, atol=length * 1.5e-7, rtol=0)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [1, TRAINED, TRAINED + 1, 4 * TRAINED])
def test_tables_equal_transformers_up_to_four_times_the_trained_length(name: str, length: int) -> None:
    config = llama_config(SCALINGS[name])
    assert_same_tables(ModelConfig.from_hf(config).rope, LlamaRotaryEmbedding(hf_config(config)), length)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers_to_the_last_bits(name: str) -> None:
    config = llama_config(SCALINGS[name], rope_theta=500000.0)
    module = LlamaRotaryEmbedding(hf_config(config))
    frequencies, scaling = ModelConfig.from_hf(config).rope.inverse_frequencies()
    np.testing.assert_allclose(frequencies, module.inv_freq.numpy(), rtol=3e-7, atol=0)
    assert scaling == pytest.approx(module.attention_scaling)


@pytest.mark.parametrize("length", [1, TRAINED, TRAINED + 1, 4 * TRAINED])
def test_dynamic_frequencies_follow_the_length_of_the_call(length: int) -> None:
    config = llama_config({"type": "dynamic", "factor": 2.0}, max_position_embeddings=TRAINED)
    module = LlamaRotaryEmbedding(hf_config(config))
    tables(module, length)  # transformers replaces the table during the call
    frequencies, _ = rope_of(config).inverse_frequencies(length)
    np.testing.assert_allclose(frequencies, module.inv_freq.numpy(), rtol=3e-7, atol=0)


def test_dynamic_table_is_exact_up_to_the_trained_length_and_refused_beyond() -> None:
    config = llama_config({"type": "dynamic", "factor": 2.0}, max_position_embeddings=TRAINED)
    rope = ModelConfig.from_hf(config).rope
    assert rope.exact_length == TRAINED
    assert_same_tables(rope, LlamaRotaryEmbedding(hf_config(config)), TRAINED)
    with pytest.raises(CheckpointError, match=r"'dynamic'.* beyond 128 tokens.*--max-length 128"):
        rope.cos_sin(TRAINED + 1)


@pytest.mark.parametrize("length", [1, TRAINED, TRAINED + 1, 4 * TRAINED])
@pytest.mark.parametrize("overrides", [{}, {"partial": 0.5}, {"rope_theta": 250000.0}], ids=str)
def test_longrope_frequencies_follow_the_length_of_the_call(length: int, overrides: dict[str, Any]) -> None:
    config = phi3_config(**overrides)
    module = Phi3RotaryEmbedding(hf_config(config))
    tables(module, length)
    frequencies, scaling = rope_of(config).inverse_frequencies(length)
    np.testing.assert_allclose(frequencies, module.inv_freq.numpy(), rtol=3e-7, atol=0)
    assert scaling == pytest.approx(module.attention_scaling)


def test_longrope_table_is_exact_up_to_the_trained_length_and_refused_beyond() -> None:
    config = phi3_config()
    rope = rope_of(config)
    assert rope.exact_length == TRAINED
    assert_same_tables(rope, Phi3RotaryEmbedding(hf_config(config)), TRAINED)
    message = r"'longrope' changes .* beyond 128 tokens.*--max-length 128"
    with pytest.raises(CheckpointError, match=message):
        rope.cos_sin(TRAINED + 1)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(config)


def test_longrope_with_one_set_of_divisors_has_one_table() -> None:
    config = phi3_config()
    config["rope_scaling"]["long_factor"] = config["rope_scaling"]["short_factor"]
    rope = ModelConfig.from_hf(config).rope
    assert rope.exact_length is None
    assert_same_tables(rope, Phi3RotaryEmbedding(hf_config(config)), 4 * TRAINED)


def test_old_phi3_names_of_longrope() -> None:
    config = phi3_config()
    config["rope_scaling"]["type"] = "su"
    assert rope_of(config).kind == "longrope"


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "mrope"}, r"'mrope' is not supported; supported: default, linear"),
        ({"rope_type": "linear"}, r"'linear' needs factor"),
        ({"rope_type": "llama3", "factor": 8.0}, r"'llama3' needs low_freq_factor, high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, r"1 values.*needs 32"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported"),
        ("linear", r"must be objects or null"),
    ],
)
def test_bad_rope_settings_are_refused_by_name(scaling: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(llama_config(scaling))


def test_json_round_trip() -> None:
    rope = rope_of(phi3_config())
    assert RopeConfig.from_json(rope.to_json()) == rope
