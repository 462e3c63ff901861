"""The engine contract: every tensor name, dtype and shape that builder and runtime share, once.

B sequences, N new nodes each, S cache rows, M rows with logits. A decoder engine (the target, a draft model, an EAGLE
or MTP layer) is one function over these tensors. A head engine (Medusa) maps ``hidden_in`` to ``head_logits``.

The manifest records ``CONTRACT_VERSION``; a runtime refuses another one by name. Raise it when the meaning of any
tensor changes, even when its shape does not.
"""

from __future__ import annotations

CONTRACT_VERSION = 1

TOKENS = "tokens"  # int64 [B, N]: node 0 is the pending token, the rest are drafted, parents before children
POSITIONS = "positions"  # int64 [B, N]: context length + depth of the node
CONTEXT_LENGTHS = "context_lengths"  # int64 [B]: committed cache rows; new rows are written from here on
TREE_MASK = "tree_mask"  # bool [B, N, N]: node i sees node j
LOGIT_ROWS = "logit_rows"  # int64 [B, M]: which nodes get logits
HIDDEN_IN = "hidden_in"  # float32 [B, N, H_in] (decoder) or [B, M, H_in] (heads): the features a node is conditioned on
LOGITS = "logits"  # float32 [B, M, V]
HIDDEN = "hidden"  # float32 [B, N, k * H]: the tapped residual streams, concatenated in tap order
HEAD_LOGITS = "head_logits"  # float32 [B, M, heads, V]: head i predicts the token i + 2 places after its row

DECODER_INPUTS = (TOKENS, POSITIONS, CONTEXT_LENGTHS, TREE_MASK, LOGIT_ROWS)


def key_cache(layer: int) -> str:
    """Input name of layer ``layer``'s keys: [B, H_kv, S, D], bound to the same buffer as its output."""
    return f"key_cache.{layer}"


def value_cache(layer: int) -> str:
    """Input name of layer ``layer``'s values: [B, H_kv, S, D], bound to the same buffer as its output."""
    return f"value_cache.{layer}"


def updated(cache_name: str) -> str:
    """Output name of a cache: a graph's inputs and outputs need distinct names even when they share a buffer."""
    return f"{cache_name}.out"


# Taps: what an engine may expose in HIDDEN. An integer i is the residual stream ENTERING layer i (so i = number of
# layers is the stream that leaves the last layer, before the final norm); FINAL_NORM is the stream after that norm.
FINAL_NORM = -1
