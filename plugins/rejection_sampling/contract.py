"""Rejection sampling: one op that warps and samples every row, and the walks that judge a draft with the result.

``sample_rows`` runs once a pass over all B * N rows. A walk then runs once a sequence and reads only what it visits.
Uniforms come from outside (float32, in [0, 1)), so that a request's seed alone decides them.
"""

from __future__ import annotations

from specrun.plugins.contract import Attribute, Limit, OpContract, Tensor

STATISTICS = 5  # largest logit, 1 / temperature, smallest logit kept, sum of kept weights, entropy in nats
# Without replacement: below this mass of q not yet drawn, float32 no longer knows the conditioned law, and the node's
# later children are not tried. Whether to try a child then depends on the earlier ones alone: lossless.
EXHAUSTED = 1e-3

SAMPLE_ROWS = OpContract(
    name="sample_rows",
    version=1,
    inputs=(
        Tensor("logits", "float32", ("B", "N", "V"), "finite or -inf; penalized in place"),
        Tensor("temperature", "float32", ("B",), "0 is greedy"),
        Tensor("top_k", "int32", ("B",), "0 is off"),
        Tensor("top_p", "float32", ("B",), "1 is off"),
        Tensor("min_p", "float32", ("B",), "0 is off"),
        Tensor("penalties", "float32", ("B", 3), "repetition (1 is off), frequency and presence (0 is off)"),
        Tensor("adjust_tokens", "int64", ("B", "N", "A"), "distinct tokens to adjust on the node's path; -1 pads"),
        Tensor("adjust_counts", "int32", ("B", "N", "A"), "their counts in the output; -1: not in prompt or output"),
        Tensor("adjust_bias", "float32", ("B", "N", "A"), "added last"),
        Tensor("uniforms", "float32", ("B", "N"), "each row's draw"),
    ),
    outputs=(
        Tensor("adjusted", "float32", ("B", "N", "V"), "the logits after penalties and bias", aliases="logits"),
        Tensor("drawn", "int64", ("B", "N"), "each row's own token; -1 where the logits are not numbers"),
        Tensor("statistics", "float32", ("B", "N", STATISTICS), "p(x) = exp((l - [0]) * [1]) / [3] where l >= [2]"),
        Tensor("scratch_logits", "float32", ("B", "N", "capacity"), "the kernel's own"),
        Tensor("scratch_tokens", "int32", ("B", "N", "capacity"), "the kernel's own"),
    ),
    attributes=(Attribute("capacity", 4096, "tokens of a row that a cut is searched among before it reads all again"),),
    limits={"V": Limit(1, 1 << 20), "capacity": Limit(128, 65536), "N": Limit(1, 128)},
    static=("V",),
)

_TREE = (
    Tensor("tokens", "int64", ("B", "N"), "node 0 is the pending token"),
    Tensor("parents", "int64", ("B", "N"), "-1 at node 0; parents come first"),
    Tensor("nodes", "int32", ("B",), "how many of the N are real"),
    Tensor("drawn", "int64", ("B", "N"), "of sample_rows"),
)
_LAW = (
    Tensor("logits", "float32", ("B", "N", "V"), "as sample_rows left them"),
    Tensor("statistics", "float32", ("B", "N", STATISTICS), "of sample_rows"),
    Tensor("temperature", "float32", ("B",), "0 is greedy: the walk matches"),
)
_DRAWS = (
    Tensor("accept_uniforms", "float32", ("B", "N"), "each node's own"),
    Tensor("residual_uniforms", "float32", ("B", "N"), "for a draw at that node"),
)
_SPARSE = (
    Tensor("draft_tokens", "int64", ("B", "N", "K"), "support of the law that a node's children came from; -1 pads"),
    Tensor("draft_probs", "float32", ("B", "N", "K"), "their probabilities; all other tokens have 0"),
)
_DENSE = (Tensor("draft_probs", "float32", ("B", "N", "V"), "the law that a node's children came from"),)
_VERDICT = (
    Tensor("path", "int64", ("B", "N"), "accepted nodes from the root on; -1 after them"),
    Tensor("accepted", "int64", ("B",), "accepted drafted tokens"),
    Tensor("next_token", "int64", ("B",), "the new pending token"),
)
_LIMITS = {"N": Limit(1, 128)}
_REPLACEMENT = Attribute("replacement", True, "children drawn independently; False: each excludes the earlier ones")

MATCH_WALK = OpContract("match_walk", 1, inputs=_TREE, outputs=_VERDICT, limits=_LIMITS)

TYPICAL_WALK = OpContract(
    name="typical_walk",
    version=1,
    inputs=_TREE + _LAW,
    outputs=_VERDICT,
    attributes=(
        Attribute("epsilon", 0.09, "the highest bar"),
        Attribute("delta", 0.3, "the bar is delta * exp(-entropy) below it"),
    ),
    limits=_LIMITS,
    static=("V",),
)


def _walk(name: str, law: tuple[Tensor, ...], attributes: tuple[Attribute, ...]) -> OpContract:
    inputs = _TREE + _LAW + law + _DRAWS
    return OpContract(name, 1, inputs, _VERDICT, attributes, limits=_LIMITS, static=("V",))


REJECTION_WALK = _walk("rejection_walk", _SPARSE, (_REPLACEMENT,))
REJECTION_WALK_DENSE = _walk("rejection_walk_dense", _DENSE, (_REPLACEMENT,))
BLOCK_WALK = _walk("block_walk", _SPARSE, ())
BLOCK_WALK_DENSE = _walk("block_walk_dense", _DENSE, ())
CONTRACTS = (
    SAMPLE_ROWS,
    MATCH_WALK,
    TYPICAL_WALK,
    REJECTION_WALK,
    REJECTION_WALK_DENSE,
    BLOCK_WALK,
    BLOCK_WALK_DENSE,
)
