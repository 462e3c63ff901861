"""From stored names to the canonical decoder: splits fused projections, settles tied heads, checks every shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from specbuild.checkpoint.files import shorten
from specbuild.checkpoint.weights import WEIGHT_DTYPES, WeightSource
from specbuild.config import ModelConfig
from specrun.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Canonical name -> shape of every tensor the decoder needs (the head included, tied or not)."""
    shapes: Shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
        HEAD: (config.vocab_size, config.hidden_size),
    }
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()})
    return shapes


def layer_shapes(config: ModelConfig) -> Shapes:
    """The same for one decoder layer, without the ``model.layers.N.`` prefix."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def arrange(
    stored: Mapping[str, WeightSource], config: ModelConfig
) -> tuple[ModelConfig, dict[str, WeightSource], dict[str, WeightSource]]:
    """The configuration (its tie settled), the decoder's tensors by canonical name, and all others by stored name.

    Raises CheckpointError for missing tensors, wrong shapes and dtypes that are not float32, float16 or bfloat16.
    """
    tensors = split_fused(stored, config)
    config = _settle_tie(tensors, config)
    expected = expected_shapes(config)
    if config.tie_embeddings:
        del expected[HEAD]
    missing = [name for name in expected if name not in tensors]
    if missing:
        hint = "; if its head shares the embedding, set tie_word_embeddings to true" if missing == [HEAD] else ""
        raise CheckpointError(
            f"the checkpoint lacks {shorten(missing)}, which a {config.family} model of {config.num_layers} layers "
            f"needs{hint}"
        )
    for name, shape in expected.items():
        _check(tensors[name], shape)
    decoder = {name: tensors[name] for name in expected}
    return config, decoder, {name: source for name, source in tensors.items() if name not in expected}


def split_fused(stored: Mapping[str, WeightSource], config: ModelConfig) -> dict[str, WeightSource]:
    """Replaces ``qkv_proj`` and ``gate_up_proj`` (Phi-3) of the decoder's layers by lazy views of their parts."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner, tensors = config.intermediate_size, dict(stored)
    fused = {
        "self_attn.qkv_proj": {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys},
        "mlp.gate_up_proj": {"mlp.gate_proj": inner, "mlp.up_proj": inner},
    }
    for layer in range(config.num_layers):
        for whole, parts in fused.items():
            source = tensors.pop(f"model.layers.{layer}.{whole}.weight", None)
            if source is None:
                continue
            _check(source, (sum(parts.values()), config.hidden_size))
            start = 0
            for part, rows in parts.items():
                name = f"model.layers.{layer}.{part}.weight"
                tensors[name] = source.rows(name, start, start + rows)
                start += rows
    return tensors


def _settle_tie(tensors: dict[str, WeightSource], config: ModelConfig) -> ModelConfig:
    """Decides between one matrix and two as transformers does; a tied checkpoint may store either name or both."""
    if not config.tie_embeddings or HEAD not in tensors:
        return config
    head = tensors[HEAD]
    if EMBEDDING not in tensors:
        tensors[EMBEDDING] = head.renamed(EMBEDDING)
    elif not head.same_values(tensors[EMBEDDING]):
        note = (
            "config.json: tie_word_embeddings is true but lm_head.weight and the embedding differ; "
            "they are used as two matrices"
        )
        return replace(config, tie_embeddings=False, notes=(*config.notes, note))
    del tensors[HEAD]
    return config


def _check(source: WeightSource, shape: tuple[int, ...]) -> None:
    if source.shape != shape:
        raise CheckpointError(
            f"tensor {source.name} has the shape {list(source.shape)}; config.json implies {list(shape)}. "
            "The weights and the configuration are of different models."
        )
    if source.dtype not in WEIGHT_DTYPES.values():
        raise CheckpointError(
            f"tensor {source.name} has the dtype {source.dtype}; a decoder's weights must be "
            f"{', '.join(WEIGHT_DTYPES)}. Use an unquantized checkpoint."
        )
