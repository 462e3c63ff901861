"""Tiny random heads in the layouts and names of the projects that publish them."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import load_file, save_file

HIDDEN, INNER, HEADS, KV, DIM, VOCAB = 64, 128, 4, 2, 16, 512


def matrix(rng, rows, columns, gain=1.0):
    return (gain * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def norm(rng, size=HIDDEN):
    return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)


def layer(rng, prefix, width=HIDDEN, bias=False):
    """Attention and MLP of a Llama layer whose attention reads ``width`` columns."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    tensors = {
        f"{attention}q_proj.weight": matrix(rng, HEADS * DIM, width),
        f"{attention}k_proj.weight": matrix(rng, KV * DIM, width),
        f"{attention}v_proj.weight": matrix(rng, KV * DIM, width),
        f"{attention}o_proj.weight": matrix(rng, HIDDEN, HEADS * DIM, 2.0),
        f"{mlp}gate_proj.weight": matrix(rng, INNER, HIDDEN),
        f"{mlp}up_proj.weight": matrix(rng, INNER, HIDDEN),
        f"{mlp}down_proj.weight": matrix(rng, HIDDEN, INNER, 2.0),
    }
    if bias:
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = tensors[f"{attention}{name}.weight"].shape[0]
            tensors[f"{attention}{name}.bias"] = rng.standard_normal(rows).astype(np.float32)
    return tensors


LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}


def draft_ids(count=128):
    return np.sort(np.random.default_rng(5).choice(VOCAB, count, replace=False))


def eagle3_tensors(seed=0, pruned=True, bias=False):
    rng = np.random.default_rng(seed)
    ids = draft_ids() if pruned else np.arange(VOCAB)
    tensors = {
        "fc.weight": matrix(rng, HIDDEN, 3 * HIDDEN),
        "norm.weight": norm(rng),
        "lm_head.weight": matrix(rng, ids.size, HIDDEN, 3 * np.sqrt(HIDDEN)),
        "d2t": ids - np.arange(ids.size),
        "t2d": np.isin(np.arange(VOCAB), ids),
        **{f"midlayer.{n}.weight": norm(rng) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **layer(rng, "midlayer.", 2 * HIDDEN, bias),
    }
    if bias:
        tensors["fc.bias"] = rng.standard_normal(HIDDEN).astype(np.float32)
    return tensors


def write(path, tensors, config, file="model.safetensors"):
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / file)
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_eagle3(path, tensors=None, **config):
    """SafeAILab's layout."""
    tensors = eagle3_tensors() if tensors is None else tensors
    described = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": tensors["lm_head.weight"].shape[0],
    }
    return write(path, tensors, described | config)


def weights_of(target):
    return load_file(target / "model.safetensors")


def eagle_tensors(seed=0, bias=True):
    """EAGLE-1's names: no input norm in layer 0, no final norm, no head."""
    rng = np.random.default_rng(seed)
    tensors = {
        "fc.weight": matrix(rng, HIDDEN, 2 * HIDDEN),
        "layers.0.post_attention_layernorm.weight": norm(rng),
        **layer(rng, "layers.0.", bias=bias),
    }
    if bias:
        tensors["fc.bias"] = rng.standard_normal(HIDDEN).astype(np.float32)
    return tensors


def write_eagle(path, tensors=None, **config):
    tensors = eagle_tensors() if tensors is None else tensors
    return write(path, tensors, LLAMA | {"bias": "fc.bias" in tensors} | config)


def medusa_tensors(seed=0, heads=3, blocks=2, own=True):
    """FasterDecoding's names."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = matrix(rng, HIDDEN, HIDDEN)
            tensors[f"{i}.{j}.linear.bias"] = rng.standard_normal(HIDDEN).astype(np.float32)
        if own:
            tensors[f"{i}.{blocks}.weight"] = matrix(rng, VOCAB, HIDDEN, 3 * np.sqrt(HIDDEN))
    return tensors


def mimo_tensors(seed=0, layers=1):
    rng = np.random.default_rng(seed)
    tensors = {}
    for i in range(layers):
        prefix = f"model.mtp_layers.{i}."
        names = ("token", "hidden", "final", "input", "post_attention")
        tensors |= {f"{prefix}{name}_layernorm.weight": norm(rng) for name in names}
        tensors[f"{prefix}input_proj.weight"] = matrix(rng, HIDDEN, 2 * HIDDEN)
        tensors |= layer(rng, prefix)
    return tensors


def deepseek_tensors(seed=0, layers=1, target_layers=4):
    """DeepSeek-V3's and GLM's names around a dense layer."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for i in range(layers):
        prefix = f"model.layers.{target_layers + i}."
        names = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
        tensors |= {f"{prefix}{name}.weight": norm(rng) for name in names}
        tensors[f"{prefix}eh_proj.weight"] = matrix(rng, HIDDEN, 2 * HIDDEN)
        tensors[f"{prefix}shared_head.head.weight"] = matrix(rng, VOCAB, HIDDEN, 3 * np.sqrt(HIDDEN))
        tensors[f"{prefix}embed_tokens.weight"] = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
        tensors |= layer(rng, prefix)
    return tensors
