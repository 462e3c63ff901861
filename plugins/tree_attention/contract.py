"""tree_attention: new nodes attend to a sequence's committed cache rows and to the new rows that their tree allows.

Two ops, because a TensorRT plugin launches one kernel and has no workspace: ``tree_attention_split`` attends over parts
of the cache at once and leaves partial results as outputs; ``tree_attention_merge`` joins them by their log-sum-exp.

Rows are linear today. A paged cache adds one input to the first op, ``block_table`` int32 [B, pages], and changes one
function of its kernel (`kernel.row_offsets`); nothing else knows how a row is addressed.
"""

from __future__ import annotations

from specrun.plugins.contract import FLOATS, Attribute, Limit, OpContract, Rule, Tensor

HEAD_SIZES = (64, 80, 96, 128, 256)
MAX_NODES = 128
MAX_ROWS = 1024  # behind the committed ones: a draft in several passes keeps the rows of its earlier passes there
MAX_SPLITS = 64
TILE_ROWS = (16, 32, 64)  # a taller tile spills registers at head size 128 and above

_CACHE = ("B", "H_kv", "S", "D")

SPLIT = OpContract(
    name="tree_attention_split",
    version=1,
    inputs=(
        Tensor("query", "T", ("B", "N", "H", "D"), "the new nodes' queries, rotary positions applied"),
        Tensor("key_cache", "T", _CACHE, "committed rows, then the T rows of tree_mask: written, or finite"),
        Tensor("value_cache", "T", _CACHE, "as key_cache"),
        Tensor("context_lengths", "int64", ("B",), "committed rows; negative: an idle lane, nothing is read"),
        Tensor("positions", "int64", ("B", "N"), "context length + depth of the node; a sliding window needs them"),
        Tensor("tree_mask", "bool", ("B", "N", "T"), "node i sees row context length + j; T = N unless drafting"),
    ),
    outputs=(
        Tensor("partial", "float32", ("B", "N", "H", "splits", "D"), "each split's own softmax average"),
        Tensor("partial_lse", "float32", ("B", "N", "H", "splits"), "its log-sum-exp; -inf: partial not written"),
    ),
    attributes=(
        Attribute("scale", 1.0, "what scores are multiplied by, usually D ** -0.5", required=True),
        Attribute("softcap", 0.0, "c > 0: scores become c * tanh(score / c); 0: as they are"),
        Attribute("window", 0, "w > 0: a node sees positions above its own - w only; 0: all"),
        Attribute("splits", 1, "parts that the visible rows of a sequence are divided into"),
        Attribute("tile_rows", 16, "query rows (nodes x heads of one KV head) that share a pass over the cache"),
    ),
    types={"T": FLOATS},
    limits={
        "N": Limit(high=MAX_NODES),
        "T": Limit(high=MAX_ROWS),
        "S": Limit(high=1 << 24),
        "D": Limit(choices=HEAD_SIZES),
        "window": Limit(low=0),
        "splits": Limit(high=MAX_SPLITS),
        "tile_rows": Limit(choices=TILE_ROWS),
    },
    rules=(
        Rule("query", "H = {H} with H_kv = {H_kv}", "H a multiple of H_kv", lambda v: v["H"] % v["H_kv"] == 0),
        Rule(
            "tree_mask",
            "T = {T} with N = {N} and window = {window}",
            "T = N, or T above N without a window (the rows of earlier passes have no positions here)",
            lambda v: v["T"] == v["N"] or (v["T"] > v["N"] and v["window"] == 0),
        ),
        Rule("softcap", "{softcap}", "0 or more", lambda v: v["softcap"] >= 0),
    ),
    static=("H", "H_kv", "D"),
)

MERGE = OpContract(
    name="tree_attention_merge",
    version=1,
    inputs=SPLIT.outputs,
    outputs=(Tensor("attention", "output_type", ("B", "N", "H", "D"), "zeros where a node sees nothing"),),
    attributes=(Attribute("output_type", "float16", "dtype of the attention", required=True),),
    types={"output_type": FLOATS},
    limits={"D": Limit(choices=HEAD_SIZES), "splits": Limit(high=MAX_SPLITS)},
    static=("H", "splits", "D"),
)


def tile_rows(nodes: int, heads: int, kv_heads: int) -> int:
    """The smallest tile that holds all query rows of one KV head (the cache is then read once), or the largest."""
    rows = nodes * (heads // kv_heads)
    return next((tile for tile in TILE_ROWS if tile >= rows), TILE_ROWS[-1])


def split_count(batch: int, kv_heads: int, row_tiles: int, capacity: int, processors: int) -> int:
    """Into how many parts to divide the cache so that the programs fill ``processors`` multiprocessors twice over.

    A part is at least 256 rows of ``capacity``, so that merging stays cheap next to reading.
    """
    programs = batch * kv_heads * row_tiles
    wanted = -(-2 * processors // programs)
    return max(1, min(wanted, capacity // 256, MAX_SPLITS))
