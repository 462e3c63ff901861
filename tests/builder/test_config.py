"""ModelConfig against transformers' config classes: v4 and v5 styles, conflicts, dtypes, head sizes, windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from specbuild.config import FAMILIES, ModelConfig
from specrun.errors import CheckpointError

BASE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "vocab_size": 512,
}


def config_of(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    # Qwen's class default of 32 key-value heads fits no tiny model.
    kv_heads = {} if family in ("llama", "phi3") else {"num_key_value_heads": 2}
    window = {"sliding_window": None} if family == "mistral" else {}
    return {"model_type": family, **BASE, **kv_heads, **window, **overrides}


def hf(config: dict[str, Any], tmp_path: Path) -> Any:
    """What transformers makes of the same file."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(tmp_path)


def as_tuple(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


@pytest.mark.parametrize("family", FAMILIES)
def test_omitted_keys_default_as_in_transformers(family: str, tmp_path: Path) -> None:
    ours, theirs = ModelConfig.from_hf(config_of(family)), hf(config_of(family), tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == as_tuple(theirs.eos_token_id)
    assert ours.pad_token_id == theirs.pad_token_id
    assert ours.rope_layers == tuple(map(bool, getattr(theirs, "no_rope_layers", [1] * 8)))
    assert ours.notes == ()


THETA_STYLES = {
    "neither": {},
    "v4": {"rope_theta": 5e5},
    "v5": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "both agree": {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "both conflict": {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "v5 without a base": {"rope_theta": 3e4, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "scaling and parameters": {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    },
    "two names of the type": {"rope_scaling": {"type": "dynamic", "rope_type": "linear", "factor": 4.0}},
    "empty scaling": {"rope_scaling": {}, "rope_theta": 2e4},
}


@pytest.mark.parametrize("style", THETA_STYLES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_e02_rope_base_is_the_one_transformers_uses_and_conflicts_are_reported(
    style: str, family: str, tmp_path: Path
) -> None:
    config = config_of(family, **THETA_STYLES[style])
    ours, theirs = ModelConfig.from_hf(config), hf(config, tmp_path).rope_parameters
    assert ours.rope.theta == theirs["rope_theta"]
    assert ours.rope.kind == theirs["rope_type"]
    assert ours.rope.parameters.get("factor") == theirs.get("factor")
    assert bool(ours.notes) == (style in ("both conflict", "scaling and parameters", "two names of the type"))


def test_e02_the_note_names_both_values() -> None:
    (note,) = ModelConfig.from_hf(config_of(**THETA_STYLES["both conflict"])).notes
    assert "rope_theta is 10000.0 at top level" in note
    assert "1000000.0 is used" in note


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "auto"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
    ids=str,
)
def test_e04_dtype_comes_from_the_config_then_from_the_weights(keys: dict[str, Any], expected: str) -> None:
    config = ModelConfig.from_hf(config_of(**keys), weights_dtype="bfloat16")
    assert config.dtype == expected
    assert bool(config.notes) == (keys == {"dtype": "float16", "torch_dtype": "bfloat16"})


def test_e04_unknown_dtype_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"dtype 'float8_e4m3fn' is not known; expected one of float32, float16"):
        ModelConfig.from_hf(config_of(torch_dtype="float8_e4m3fn"))


def test_e05_stated_head_dim_wins_over_the_quotient(tmp_path: Path) -> None:
    config = config_of("qwen3", head_dim=32)
    ours = ModelConfig.from_hf(config)
    assert ours.head_dim == hf(config, tmp_path).head_dim == 32
    assert ours.rope.rotary_dim == 32
    assert ours.qk_norm


@pytest.mark.parametrize(
    ("family", "keys", "biases"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("phi3", {}, (False, False, False)),
        ("smollm3", {"mlp_bias": True}, (False, False, True)),
    ],
)
def test_biases(family: str, keys: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    config = ModelConfig.from_hf(config_of(family, **keys))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


def test_smollm3_layers_without_rope(tmp_path: Path) -> None:
    interval = config_of("smollm3", no_rope_layer_interval=3)
    expected = tuple(map(bool, hf(interval, tmp_path).no_rope_layers))
    assert ModelConfig.from_hf(interval).rope_layers == expected
    listed = config_of("smollm3", no_rope_layers=[1, 1, 1, 0, 1, 1, 1, 1])
    assert ModelConfig.from_hf(listed).rope_layers == (True, True, True, False, True, True, True, True)


WINDOWED = [
    config_of("mistral", sliding_window=256, max_position_embeddings=1024),
    {"model_type": "mistral", **BASE, "num_key_value_heads": 2},  # the class default is a window of 4096
    config_of("phi3", sliding_window=256),
    config_of("qwen2", use_sliding_window=True, sliding_window=256, max_window_layers=7),
    config_of("qwen3", use_sliding_window=True, sliding_window=256, layer_types=["sliding_attention"] * 8),
    config_of("smollm3", use_sliding_window=True, sliding_window=256),
]


@pytest.mark.parametrize("config", WINDOWED, ids=lambda c: c["model_type"])
def test_a_window_that_can_bind_is_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"sliding-window attention over \d+ tokens is not supported"):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize("config", WINDOWED, ids=lambda c: c["model_type"])
def test_a_window_that_cannot_bind_is_accepted(config: dict[str, Any]) -> None:
    shortened = ModelConfig.from_hf(config, max_length=256)
    assert shortened.max_position == 256
    wide = {**config, "sliding_window": config.get("max_position_embeddings", 32768)}
    assert ModelConfig.from_hf({**wide, "max_position_embeddings": wide["sliding_window"]}).max_position > 256


@pytest.mark.parametrize(
    "config",
    [
        config_of("qwen2", use_sliding_window=False, sliding_window=256),
        config_of("qwen2", use_sliding_window=True, sliding_window=256, max_window_layers=8),
        config_of("qwen3", use_sliding_window=True, sliding_window=256, layer_types=["full_attention"] * 8),
    ],
    ids=["switched off", "no windowed layer", "listed full"],
)
def test_full_attention_everywhere_is_accepted(config: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(config).max_position == 32768


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba' is not supported; supported model_type values: llama, mistral"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"architecture 'GPT2LMHeadModel' is not supported"),
        ({}, r"architecture 'none named' is not supported"),
        (config_of(hidden_size=None), r"hidden_size must be a positive integer, it is absent"),
        (config_of(vocab_size="many"), r"vocab_size must be a positive integer, found 'many'"),
        (config_of(num_key_value_heads=3), r"num_attention_heads \(4\) must be a multiple of num_key_value_heads"),
        (config_of(hidden_act="gelu"), r"hidden_act 'gelu' is not supported"),
        (config_of(rms_norm_eps=0), r"rms_norm_eps must be a small positive number"),
        (config_of(head_dim=15), r"rotary dimension must be even"),
        (config_of(rope_theta=-1.0), r"rope_theta must be a number above 1"),
        (config_of(quantization_config={"quant_method": "gptq"}), r"already quantized \(gptq\)"),
        (config_of("smollm3", no_rope_layers=[1, 0]), r"no_rope_layers lists 2 layers; num_hidden_layers says 8"),
        (config_of("qwen2", layer_types=["linear_attention"] * 8), r"layer_types linear_attention are not supported"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(config)


def test_json_round_trip() -> None:
    config = ModelConfig.from_hf(config_of("smollm3", rope_scaling={"type": "linear", "factor": 2.0}))
    data = json.loads(json.dumps(config.to_json()))
    assert ModelConfig.from_json(data) == config
    with pytest.raises(CheckpointError, match=r"'window'"):
        ModelConfig.from_json({**data, "window": 1})
