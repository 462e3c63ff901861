"""GGUF files: metadata as a config.json, tensors under Hugging Face names, the tokenizer from its metadata.

Names and layouts are those llama.cpp's converters write: https://github.com/ggml-org/gguf, `gguf-py` and the
`convert_hf_to_gguf` scripts. Two traps: the rows of Q and K are permuted for interleaved rotary embedding in `llama`
and `smollm3` files only, and Llama 3's rotary scaling is stored as a tensor of finished divisors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from specbuild.checkpoint.files import shorten
from specbuild.checkpoint.gguf_tokenizer import gguf_tokenizer
from specbuild.checkpoint.tokenizer import TokenizerAssets
from specbuild.checkpoint.weights import BFLOAT16, WeightSource
from specbuild.config import ModelConfig
from specrun.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "smollm3")
_PERMUTED = ("llama", "smollm3")

_PLAIN_TYPES = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: BFLOAT16,
}
_QUANTIZED_TYPES = tuple(GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"))
_DEQUANTIZED_VALUES = 1 << 22  # values dequantized at a time: the routines use several temporaries of that size

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def read_gguf(
    path: Path, max_length: int | None
) -> tuple[ModelConfig, dict[str, WeightSource], TokenizerAssets, dict[str, Any]]:
    """Configuration, tensors (Hugging Face names), tokenizer and the equivalent config.json of a GGUF file."""
    reader = open_reader(path)
    raw_config = hf_config_of(reader)
    config = ModelConfig.from_hf(raw_config, max_length=max_length)
    return config, gguf_tensors(reader, config), gguf_tokenizer(Metadata(reader)), raw_config


class _Reader(GGUFReader):
    """Keeps the map as a plain array: np.memmap's bookkeeping at each slice triples the time to read a vocabulary."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = mapped.view(np.ndarray)


def open_reader(path: Path) -> GGUFReader:
    """The memory-mapped file, or CheckpointError saying why it is not one."""
    try:
        return _Reader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable GGUF file ({error}); it is truncated, damaged or of an unknown version, "
            "download it again"
        ) from error


class Metadata:
    """Key-value metadata with the architecture's prefix filled in for keys that start with a dot."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields
        self.architecture = str(self.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The value as a plain Python object, or ``default``."""
        field = self._fields.get(f"{self.architecture}{key}" if key.startswith(".") else key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """The value; CheckpointError by name where it is absent."""
        value = self.get(key)
        if value is None:
            name = f"{self.architecture}{key}" if key.startswith(".") else key
            raise CheckpointError(f"the GGUF file lacks the metadata {name}; convert the model again")
        return value


def hf_config_of(reader: GGUFReader) -> dict[str, Any]:
    """The config.json that describes the same model; refuses what the file holds beyond the supported families."""
    meta, tensors = Metadata(reader), {tensor.name: tensor for tensor in reader.tensors}
    _refuse_unsupported(meta)
    if "token_embd.weight" not in tensors:
        raise CheckpointError("the GGUF file lacks the tensor token_embd.weight; it is not a whole language model")
    heads, hidden = meta.need(".attention.head_count"), meta.need(".embedding_length")
    head_dim = int(meta.get(".attention.key_length", hidden // heads))
    config: dict[str, Any] = {
        "model_type": meta.architecture,
        "hidden_size": hidden,
        "intermediate_size": meta.need(".feed_forward_length"),
        "num_hidden_layers": meta.need(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.need(".attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.need(".context_length"),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "dtype": _dtype_of(reader),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "sliding_window": meta.get(".attention.sliding_window") or None,
        "use_sliding_window": bool(meta.get(".attention.sliding_window")),
        "max_window_layers": 0,
    }
    rotary = int(meta.get(".rope.dimension_count", head_dim))
    return (
        config | _rope_of(meta, tensors) | ({} if rotary == head_dim else {"partial_rotary_factor": rotary / head_dim})
    )


def _refuse_unsupported(meta: Metadata) -> None:
    if meta.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"GGUF architecture {meta.architecture or 'unnamed'!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)} (mistral files name llama)"
        )
    if meta.get("split.count", 1) > 1:
        raise CheckpointError(
            "the GGUF file is one part of a split model; merge the parts with llama-gguf-split --merge"
        )
    if meta.get(".expert_count", 0):
        raise CheckpointError("the GGUF file holds a mixture-of-experts model, which is not supported")
    per_layer = [key for key in (".attention.head_count", ".feed_forward_length") if isinstance(meta.get(key), list)]
    if per_layer:
        raise CheckpointError(f"the GGUF file varies {shorten(per_layer)} by layer, which is not supported")


def _dtype_of(reader: GGUFReader) -> str:
    """The 16-bit type the matrices are stored in; float32 for quantized and float32 files."""
    types = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    if GGMLQuantizationType.BF16 in types:
        return "bfloat16"
    return "float16" if GGMLQuantizationType.F16 in types and not types & set(_QUANTIZED_TYPES) else "float32"


def _rope_of(meta: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; the divisors of Llama 3 and LongRoPE are tensors of the file."""
    rope: dict[str, Any] = {"rope_theta": meta.get(".rope.freq_base", 10000.0)}
    trained = meta.get(".rope.scaling.original_context_length")
    kind, factor = meta.get(".rope.scaling.type", "none"), meta.get(".rope.scaling.factor")
    divisors = {name: tensors[name].data.astype(np.float64).tolist() for name in _ROPE_TENSORS if name in tensors}
    if "rope_factors_long.weight" in divisors:
        scaling = {
            "rope_type": "longrope",
            "long_factor": divisors["rope_factors_long.weight"],
            "short_factor": divisors["rope_factors_short.weight"],
            "attention_factor": meta.get(".rope.scaling.attn_factor"),
        }
        return rope | {"rope_scaling": scaling, "original_max_position_embeddings": trained}
    if "rope_freqs.weight" in divisors:
        return rope | {"rope_scaling": {"rope_type": "llama3", "frequency_factors": divisors["rope_freqs.weight"]}}
    if kind == "linear":
        return rope | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        beta = {name: meta.get(f".rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained, **beta}
        return rope | {"rope_scaling": scaling}
    if kind != "none":
        raise CheckpointError(f"GGUF rope scaling {kind!r} is not supported; supported: none, linear, yarn, longrope")
    return rope


def gguf_tensors(reader: GGUFReader, config: ModelConfig) -> dict[str, WeightSource]:
    """The file's tensors, lazily dequantized, un-permuted and under Hugging Face names; unknown ones keep theirs."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if config.family in _PERMUTED else {}
    sources: dict[str, WeightSource] = {}
    for tensor in reader.tensors:
        if tensor.name in _ROPE_TENSORS:
            continue
        name, block = _hf_name(tensor.name, config.family)
        sources[name] = _source(name, tensor, heads.get(block))
    return sources


def _hf_name(name: str, family: str) -> tuple[str, str]:
    """The Hugging Face name and the block's own ("attn_q"); unknown names map to themselves."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is None or layer[2] not in _LAYER_NAMES:
        return _TOP_NAMES.get(name, name), ""
    block = "mlp.gate_up_proj" if family == "phi3" and layer[2] == "ffn_up" else _LAYER_NAMES[layer[2]]
    return f"model.layers.{layer[1]}.{block}.{layer[3]}", layer[2]


def _source(name: str, tensor: Any, permuted_heads: int | None) -> WeightSource:
    kind = tensor.tensor_type
    if kind not in _PLAIN_TYPES and kind not in _QUANTIZED_TYPES:
        supported = ", ".join(t.name for t in (*_PLAIN_TYPES, *_QUANTIZED_TYPES))
        raise CheckpointError(
            f"GGUF tensor {tensor.name} has the type {kind.name}, which is not supported; supported: {supported}"
        )
    shape = tuple(int(n) for n in reversed(tensor.shape))
    order = None if permuted_heads is None else _row_order(shape[0], permuted_heads, name)

    def load(rows: slice) -> np.ndarray:
        data = tensor.data[rows] if order is None else tensor.data[order[rows]]
        if kind in _PLAIN_TYPES:
            # gguf hands out bfloat16 as raw bytes; the arrays are views of a read-only map
            return np.asarray(data.view(_PLAIN_TYPES[kind]))
        return _dequantized(data, kind, shape[-1])

    return WeightSource(name, shape, _PLAIN_TYPES.get(kind, np.dtype(np.float32)), load)


def _row_order(rows: int, heads: int, name: str) -> np.ndarray:
    """Stored row of each output row: within a head, llama.cpp interleaves the two halves that rotate together."""
    if rows % (2 * heads):
        raise CheckpointError(f"tensor {name} has {rows} rows, which {heads} heads of an even size cannot share")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _dequantized(data: np.ndarray, kind: GGMLQuantizationType, columns: int) -> np.ndarray:
    """Float32 values of quantized rows, some rows at a time so that the temporaries stay small."""
    out = np.empty((*data.shape[:-1], columns), np.float32)
    step = max(1, _DEQUANTIZED_VALUES // columns)
    for start in range(0, len(data), step):
        out[start : start + step] = dequantize(data[start : start + step], kind)
    return out
