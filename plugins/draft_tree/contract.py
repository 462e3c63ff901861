"""draft_tree: EAGLE-2's dynamic tree (Li et al., 2024) on the device: grow it level by level, then keep the best nodes.

A level is three launches over the draft's logits of the frontier nodes: ``draft_candidates`` takes each node's best
tokens from every chunk of the vocabulary, ``draft_children`` joins the chunks into children with cumulative scores,
``draft_frontier`` picks the nodes that are expanded next. In the end ``draft_rerank`` keeps the best of all levels.

Scores are sums of log q along the path, so no child scores above its parent. Order everywhere: higher score first, then
lower depth, then lower index (lower token id among one node's candidates). Hence a kept node's parent is kept.
"""

from __future__ import annotations

from specrun.plugins.contract import Attribute, Limit, OpContract, Rule, Tensor

CHUNK = 4096
MAX_CHILDREN = 16
MAX_POOL = 2048
MAX_NODES = 128

_PART = ("B", "K", "chunks", "children")
_CHILDREN = ("B", "K", "children")

CANDIDATES = OpContract(
    name="draft_candidates",
    version=1,
    inputs=(Tensor("logits", "float32", ("B", "K", "V"), "the draft's raw logits at the frontier nodes; NaN is -inf"),),
    outputs=(
        Tensor("part_logits", "float32", _PART, "each chunk's best logits, best first"),
        Tensor("part_tokens", "int32", _PART, "their token ids; 2**31 - 1 where a chunk has fewer"),
        Tensor("part_lse", "float32", ("B", "K", "chunks"), "the chunk's log-sum-exp"),
    ),
    attributes=(
        Attribute("children", 1, "candidates a node", required=True),
        Attribute("chunks", 1, "parts of the vocabulary, of 4096 ids each", required=True),
    ),
    limits={"children": Limit(high=MAX_CHILDREN), "chunks": Limit(high=256)},
    rules=(
        Rule("chunks", "{chunks} for V = {V}", "V / 4096, rounded up", lambda v: v["chunks"] == chunk_count(v["V"])),
        Rule("children", "{children} with V = {V}", "at most V", lambda v: v["children"] <= v["V"]),
    ),
)

CHILDREN = OpContract(
    name="draft_children",
    version=1,
    inputs=(*CANDIDATES.outputs, Tensor("parent_scores", "float32", ("B", "K"), "cumulative; 0 for the root")),
    outputs=(
        Tensor("tokens", "int64", _CHILDREN, "children of each frontier node, best first"),
        Tensor("scores", "float32", _CHILDREN, "parent's score + log q of the token"),
    ),
    limits={"children": Limit(high=MAX_CHILDREN), "chunks": Limit(high=256)},
    static=("chunks", "children"),
)

FRONTIER = OpContract(
    name="draft_frontier",
    version=1,
    inputs=(Tensor("scores", "float32", _CHILDREN, "cumulative scores of one level"),),
    outputs=(Tensor("frontier", "int64", ("B", "width"), "parent * children + child of the best, best first"),),
    attributes=(Attribute("width", 1, "how many nodes are expanded next", required=True),),
    limits={"children": Limit(high=MAX_CHILDREN), "K": Limit(high=MAX_CHILDREN), "width": Limit(high=MAX_CHILDREN)},
    rules=(
        Rule(
            "width", "{width} of {K} x {children} nodes", "at most all", lambda v: v["width"] <= v["K"] * v["children"]
        ),
    ),
    static=("K", "children"),
)

RERANK = OpContract(
    name="draft_rerank",
    version=1,
    inputs=(
        Tensor("pool_tokens", "int64", ("B", "P"), "every candidate of every level, level by level"),
        Tensor("pool_scores", "float32", ("B", "P"), "cumulative scores; NaN is -inf"),
        Tensor("pool_parents", "int64", ("B", "P"), "the parent's place in the pool, below the node's own; -1: root"),
        Tensor("pool_depths", "int64", ("B", "P"), "1 for the root's children"),
        Tensor("root_tokens", "int64", ("B",), "the pending token, node 0 of the tree"),
    ),
    outputs=(
        Tensor("tokens", "int64", ("B", "nodes"), "the root, then the kept candidates in the pool's order"),
        Tensor("parents", "int64", ("B", "nodes"), "-1 for the root"),
        Tensor("depths", "int64", ("B", "nodes"), "0 for the root"),
        Tensor("kept", "int64", ("B", "nodes"), "each node's place in the pool; -1 for the root"),
        Tensor("tree_mask", "bool", ("B", "nodes", "nodes"), "node i sees node j: its ancestors and itself"),
    ),
    attributes=(Attribute("nodes", 2, "nodes of the tree, the root included", required=True),),
    limits={"P": Limit(high=MAX_POOL), "nodes": Limit(low=2, high=MAX_NODES)},
    rules=(Rule("nodes", "{nodes} with P = {P}", "at most P + 1", lambda v: v["nodes"] <= v["P"] + 1),),
    static=("P",),
)


def chunk_count(vocabulary: int) -> int:
    """Parts of the vocabulary that ``draft_candidates`` searches at once."""
    return -(-vocabulary // CHUNK)
