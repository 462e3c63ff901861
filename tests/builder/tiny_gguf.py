"""Tiny GGUF files, written with the `gguf` package the way llama.cpp's converters write real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import load_file

# Architectures whose converter permutes the rows of Q and K (class LlamaModel and what derives from it).
_PERMUTED = ("llama", "smollm3")


def write_tiny_gguf(
    path: Path, directory: Path, *, matrices: str = "F32", metadata: Mapping[str, Any] | None = None
) -> Path:
    """Converts the model directory ``directory`` (see ``tiny.py``) to a GGUF file at ``path``.

    ``matrices``: type of the two-dimensional tensors ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", or a K type, whose
    blocks are random bytes). ``metadata`` adds or replaces keys; a value of None drops one.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    values = {**_metadata(config, architecture), **_tokenizer(directory), **(metadata or {})}
    for key, value in values.items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(_architecture(architecture), config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        _add_tensor(writer, stored, _permuted(tensor, name, config, architecture), matrices)
    for name, divisors in (config.get("gguf_divisors") or {}).items():
        writer.add_tensor(name, np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _tokenizer(directory: Path) -> dict[str, Any]:
    data = json.loads((directory / "tokenizer.json").read_text())
    special = {token["id"]: token["special"] for token in data["added_tokens"]}
    vocabulary = {**data["model"]["vocab"], **{token["content"]: token["id"] for token in data["added_tokens"]}}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [(3 if special[i] else 4) if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        adders[type(value)](key, value)


def _permuted(tensor: np.ndarray, name: str, config: Mapping[str, Any], architecture: str) -> np.ndarray:
    if architecture not in _PERMUTED or not name.endswith(
        ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
    ):
        return tensor
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, matrices: str) -> None:
    kind = gguf.GGMLQuantizationType[matrices]
    if tensor.ndim < 2 or matrices == "F32":
        writer.add_tensor(name, tensor.astype(np.float32))
    elif matrices == "F16":
        writer.add_tensor(name, tensor.astype(np.float16))
    else:
        writer.add_tensor(name, _blocks(tensor, kind), raw_dtype=kind)


def _blocks(tensor: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The package quantizes no K types; any bytes are valid blocks of those (these keep scales finite)."""
    if not kind.name.endswith("_K"):
        return quantize(tensor, kind)
    shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
    return np.random.default_rng(tensor.size).integers(0, 0x70, shape, np.uint8)
