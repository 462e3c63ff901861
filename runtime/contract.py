"""The engine contract: every tensor name, dtype and shape that builder and runtime share, once.

B sequences, N new nodes each, S cache rows, M rows with logits. A decoder engine (the target, a draft model, an EAGLE
or MTP layer) is one function over these tensors. A head engine (Medusa) maps ``hidden_in`` to ``head_logits``.

An engine that drafts (``EngineRecord.scratch``) runs one pass a level of a draft. The rows of a draft's earlier passes
stay behind the committed ones; WRITE_ROWS says where the new nodes go, and TREE_MASK is bool [B, N, T]: column j is
cache row context length + j, a row of an earlier pass or of this one. Without WRITE_ROWS, T = N and nodes are written
from the context length on.

A head that is conditioned on the target (EAGLE, MTP) takes features in HIDDEN_IN and gives in HIDDEN, for every node,
what its children take in turn. Row i of its cache holds token i + 1 and the target's features at position i. EAGLE-3's
HIDDEN_IN is [the k taps of the target | the head's own feature]: a node whose features come from the target has zeros
in the second part, a drafted one has zeros in the first. For the others both are the same H columns.

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
WRITE_ROWS = "write_rows"  # int64 [B], engines that draft in several passes: the cache row of the first new node
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
