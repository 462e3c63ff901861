"""What heads that borrow from the target have in common: their configuration, embedding, LM head and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specbuild.checkpoint import Checkpoint
from specbuild.checkpoint.layout import EMBEDDING, HEAD
from specbuild.config import FAMILIES, ModelConfig
from specbuild.drafters import CompileContext
from specbuild.drafters.sources import Head
from specbuild.model.weights import Weight

# What row i of a pruned LM head stands for: id i + d2t[i], id d2t[i], the i-th id that t2d flags, or id i.
MAPS = ("offset", "absolute", "t2d", "identity")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def layer_config(
    head: Head, prefix: str, raw: Mapping[str, Any], hidden: int, target: ModelConfig, rope: str | None = None
) -> ModelConfig:
    """The configuration of a head's one decoder layer.

    ``prefix``: where its tensors are ("midlayer."). Sizes come from the head's config ``raw`` and are checked against
    its tensors; what it leaves out is the target's. The context is the target's, whatever ``raw`` says of it. Rotary
    positions are the head's where it names a scaling or another base, else the target's with its scaling; ``rope``
    (``own`` or ``target``) forces one of the two.
    """
    shapes = {name: head.tensors[f"{prefix}self_attn.{name}.weight"].shape for name in ATTENTION}
    heads = int(raw.get("num_attention_heads") or target.num_heads)
    head_dim = int(raw.get("head_dim") or shapes["q_proj"][0] // heads)
    kv_heads = int(raw.get("num_key_value_heads") or shapes["k_proj"][0] // head_dim)
    for name, rows in (("q_proj", heads * head_dim), ("k_proj", kv_heads * head_dim), ("v_proj", kv_heads * head_dim)):
        if shapes[name][0] != rows:
            raise head.error(
                f"tensor {prefix}self_attn.{name}.weight has {shapes[name][0]} rows, expected {rows} from {heads} "
                f"heads, {kv_heads} key-value heads and a head dimension of {head_dim}. Its config.json is of "
                "another head."
            )
    family = raw.get("model_type")
    own = ModelConfig.from_hf(
        {
            "model_type": family if family in FAMILIES else "llama",
            "hidden_size": hidden,
            "intermediate_size": head.tensors[f"{prefix}mlp.gate_proj.weight"].shape[0],
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": raw.get("max_position_embeddings") or target.max_position,
            "rms_norm_eps": raw.get("rms_norm_eps") or target.rms_norm_eps,
            "rope_theta": raw.get("rope_theta") or target.rope.theta,
            **{key: raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)},
        },
        weights_dtype="float32",
        max_length=1,
    )
    named = own.rope.kind != "default" or own.rope.theta != target.rope.theta or head_dim != target.head_dim
    if rope == "target" and head_dim != target.head_dim:
        raise head.error(f"rope is target, but its head dimension is {head_dim} and the target's {target.head_dim}.")
    keeps_own = named if rope is None else rope == "own"
    return replace(
        own,
        rope=own.rope if keeps_own else target.rope,
        rope_layers=(True,),
        max_position=target.max_position,
        qk_norm=f"{prefix}self_attn.q_norm.weight" in head.tensors,
    )


def layer_shapes(head: Head, prefix: str, hidden: int, width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes of the tensors a layer must have and may have, norms aside. ``width``: what its attention reads.

    Numbers of rows that only the config knows are checked by ``layer_config``. A bias that only some of q, k and v
    have, or whose weight is not there, is missing.
    """
    stored = head.tensors
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    needed: dict[str, Any] = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        source = stored.get(f"{attention}{name}.weight")
        rows = source.shape[0] if source is not None and source.shape else 0
        needed[f"{attention}{name}.weight"] = (rows, width)
        if any(f"{attention}{other}.bias" in stored for other in ("q_proj", "k_proj", "v_proj")):
            needed[f"{attention}{name}.bias"] = (rows,)
    queries = needed[f"{attention}q_proj.weight"][0]
    needed[f"{attention}o_proj.weight"] = (hidden, queries)
    gate = stored.get(f"{mlp}gate_proj.weight")
    inner = gate.shape[0] if gate is not None and gate.shape else 0
    biased = any(f"{mlp}{name}.bias" in stored for name in ("gate_proj", "up_proj"))
    for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
        needed[f"{mlp}{name}.weight"] = shape
        if biased and name != "down_proj":
            needed[f"{mlp}{name}.bias"] = (inner,)
    optional: dict[str, Any] = {f"{attention}o_proj.bias": (hidden,), f"{mlp}down_proj.bias": (hidden,)}
    if any(f"{attention}{name}_norm.weight" in stored for name in "qk"):
        needed |= {f"{attention}{name}_norm.weight": () for name in "qk"}
    return needed, optional


def embedding_of(head: Head, checkpoint: Checkpoint, hidden: int) -> Weight:
    """The head's own embedding, or the target's where it has none. Raises CompileError when neither fits."""
    own, config = head.tensors.get("embed_tokens.weight"), checkpoint.config
    if own is not None:
        least = checkpoint.tokenizer.vocab_size
        if len(own.shape) != 2 or own.shape[1] != hidden or own.shape[0] < least:
            raise head.error(
                f"tensor embed_tokens.weight has the shape {list(own.shape)}, expected [{config.vocab_size}, {hidden}] "
                f"(at least the tokenizer's {least} rows). The head was made for another vocabulary."
            )
        return own
    if hidden != config.hidden_size:
        raise head.error(
            f"the head lacks embed_tokens.weight, and its width is {hidden}: the target's embedding, of width "
            f"{config.hidden_size}, cannot take its place."
        )
    return checkpoint.tensors[EMBEDDING]


def target_head(head: Head, checkpoint: Checkpoint, hidden: int) -> Weight:
    """The target's LM head, for a head of the same width. Raises CompileError for another width."""
    if hidden != checkpoint.config.hidden_size:
        raise head.error(
            f"the head lacks lm_head.weight, and its width is {hidden}: the target's LM head, of width "
            f"{checkpoint.config.hidden_size}, cannot take its place."
        )
    return checkpoint.tensors.get(HEAD) or checkpoint.tensors[EMBEDDING]


def draft_vocabulary(head: Head, size: int, checkpoint: Checkpoint, reading: str = "offset") -> np.ndarray | None:
    """int64 [size]: the target's id of each row of the head's LM head; None where the rows are the target's.

    ``reading`` is one of ``MAPS``. Raises CompileError for a map that leads out of the vocabulary, repeats an id or
    contradicts ``t2d``, and for a pruned head without a map.
    """
    vocabulary = checkpoint.config.vocab_size
    if reading in ("t2d", "identity"):
        return _without_d2t(head, size, vocabulary, reading)
    if "d2t" not in head.tensors:
        if size < checkpoint.tokenizer.vocab_size:
            raise head.error(
                f"lm_head.weight has {size} rows, the target's vocabulary {vocabulary}, and there is no d2t to say "
                "which ids they are. A pruned vocabulary needs its map."
            )
        return None
    stored = head.integers("d2t")
    if stored.shape != (size,):
        raise head.error(f"tensor d2t has the shape {list(stored.shape)}, expected [{size}], lm_head.weight's rows.")
    readings = {"offset": stored + np.arange(size), "absolute": stored}
    ids = readings[reading]
    if fault := _fault(head, ids, vocabulary):
        other = "offset" if reading == "absolute" else "absolute"
        hint = (
            f" Read as {other} it is sound: add the option map={other}."
            if not _fault(head, readings[other], vocabulary)
            else ""
        )
        raise head.error(f"tensor d2t {fault}.{hint} The head was made for another vocabulary, or the map is damaged.")
    return None if np.array_equal(ids, np.arange(vocabulary)) else ids


def _without_d2t(head: Head, size: int, vocabulary: int, reading: str) -> np.ndarray | None:
    if reading == "identity":
        return None if size == vocabulary else np.arange(size)
    flags = head.integers("t2d") if "t2d" in head.tensors else np.zeros(0, dtype=np.int64)
    ids = np.flatnonzero(flags)
    if flags.shape != (vocabulary,) or ids.size != size:
        raise head.error(
            f"map=t2d: tensor t2d has the shape {list(flags.shape)} and flags {ids.size} ids, expected [{vocabulary}] "
            f"with {size} flags, lm_head.weight's rows."
        )
    return ids


def _fault(head: Head, ids: np.ndarray, vocabulary: int) -> str:
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if outside.size:
        return f"leads to id {outside[0]} (of {outside.size} such), expected ids below {vocabulary}"
    if np.unique(ids).size != ids.size:
        return f"names {ids.size - np.unique(ids).size} ids twice"
    if "t2d" in head.tensors:
        flags = head.tensors["t2d"].read().astype(bool)
        if flags.size != vocabulary or not np.array_equal(np.flatnonzero(flags), np.sort(ids)):
            return "and t2d name different ids"
    return ""


def save_vocabulary(context: CompileContext, name: str, ids: np.ndarray | None) -> str | None:
    """The path of the map in the bundle, for ``DrafterRecord.arrays``."""
    return None if ids is None else context.save_arrays(f"{name}.vocabulary", {"target_ids": ids})
