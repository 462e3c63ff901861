"""Tiny random checkpoints of every family in Hugging Face layout, for tests. Needs no torch.

Weights are scaled so that the two largest logits lie far apart (typically several units), which makes greedy tokens
comparable across implementations, and so that the layers outweigh the embedding: outputs depend on the context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specbuild.checkpoint.layout import expected_shapes
from specbuild.config import ModelConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "smollm3": {"no_rope_layer_interval": 2},
}
_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. A fast draft is verified by the target model in one pass.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 1))\n",
    "Speculative decoding proposes tokens and keeps those that the model would have written itself.",
]


def write_tiny_checkpoint(
    path: str | Path,
    family: str,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 512,
    tie: bool = False,
    rope_scaling: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    **overrides: Any,
) -> Path:
    """Writes a model directory to ``path`` (created) and returns it. ``overrides`` are keys of config.json.

    An override of None writes null; ``extra_tensors`` are stored as they are, beside the decoder's.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None if rope_scaling is None else dict(rope_scaling),
        "tie_word_embeddings": tie,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **_FAMILY_KEYS.get(family, {}),
        **overrides,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {**tiny_weights(config, seed, dtype), **(extra_tensors or {})}
    _save(path, tensors, shards)
    _write_tokenizer(path, vocab)
    return path


def tiny_weights(config: Mapping[str, Any], seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The stored tensors of ``config``: fused for Phi-3, without a head where the embedding is tied."""
    model = ModelConfig.from_hf(config, max_length=1)
    rng = np.random.default_rng(seed)
    tensors = {name: _random(rng, name, shape, model) for name, shape in expected_shapes(model).items()}
    if model.tie_embeddings:
        del tensors["lm_head.weight"]
    if model.family == "phi3":
        tensors = _fuse(tensors, model.num_layers)
    return {name: value.astype(_DTYPES[dtype]) for name, value in tensors.items()}


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], model: ModelConfig) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    embedding = 2.0 if model.tie_embeddings else 1.0
    if "norm" in name:
        return 1 + 0.1 * values
    if name.endswith(".bias"):
        return 0.5 * values
    if name == "model.embed_tokens.weight":
        return embedding * values
    if name == "lm_head.weight":
        return 3 * values
    gain = 2.5 * embedding if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
    return gain / np.sqrt(shape[1], dtype=np.float32) * values


def _fuse(tensors: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    fused = dict(tensors)
    for layer in range(layers):
        for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            block = whole.split(".")[0]
            names = [f"model.layers.{layer}.{block}.{part}_proj.weight" for part in parts]
            fused[f"model.layers.{layer}.{whole}_proj.weight"] = np.concatenate([fused.pop(name) for name in names])
    return fused


def _save(path: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard, names in enumerate(np.array_split(np.array(list(tensors)), shards), start=1):
        file = f"model-{shard:05}-of-{shards:05}.safetensors"
        save_file({str(name): tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map.update({str(name): file for name in names})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def tiny_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly ``vocab`` tokens; below 259 it knows only some bytes and drops others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if vocab < len(alphabet) + len(SPECIAL_TOKENS):
        tokens = (
            [*SPECIAL_TOKENS, *alphabet[64 : 61 + vocab]] if vocab < 190 else [*SPECIAL_TOKENS, *alphabet[: vocab - 3]]
        )
        tokenizer.model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    else:
        trainer = trainers.BpeTrainer(
            vocab_size=vocab, initial_alphabet=alphabet, special_tokens=list(SPECIAL_TOKENS), show_progress=False
        )
        tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fillers = range(tokenizer.get_vocab_size(), vocab)
    tokenizer.add_tokens([AddedToken(f"<filler{i}>", normalized=False) for i in fillers])
    return tokenizer


def _write_tokenizer(path: Path, vocab: int) -> None:
    tiny_tokenizer(vocab).save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}))
