"""tree_attention in Triton: split over the cache, then merge by log-sum-exp.

One program of the split kernel serves a tile of query rows (nodes x the heads of one KV head) over one part of one
sequence's visible rows, so each cache row is read once for all nodes and heads of its group. A part is a run of blocks
counted over the committed rows first and the new rows after them; blocks past the context, or below the sliding
window, are in no part and are never read. Scores live in registers only. The method is FlashDecoding (Dao et al.,
2023) with the tree mask applied to the last blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specrun.plugins.compile import KernelSpec, parameters_of, sizes_of
from specrun.plugins.contract import Bound
from specrun.plugins.launch import Extent
from specrun.plugins.tree_attention.contract import MERGE, SPLIT

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_offsets(rows, D: tl.constexpr):
    """Where cache rows lie, in elements from the start of their head. A block table would be looked up here."""
    return rows.to(tl.int64) * D


@triton.jit
def scores_of(query, keys, scale: tl.constexpr, softcap: tl.constexpr):
    """Scores in base-2 logarithms, capped if asked for."""
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if softcap > 0:
        scores = softcap * (1 - 2 / (tl.exp2(scores * (2 / softcap * LOG2_E)) + 1))
    return scores * LOG2_E


@triton.jit
def accumulate(
    state,
    query,
    key_ptr,
    value_ptr,
    rows,
    readable,
    visible,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """One block of cache rows: read the readable ones, add the visible ones to (peak, total, average so far)."""
    peak, total, average = state
    width = tl.arange(0, D_PAD)
    offsets = row_offsets(rows, D)
    key_mask = readable[None, :] & (width < D)[:, None]
    keys = tl.load(key_ptr + offsets[None, :] + width[:, None], mask=key_mask, other=0.0)
    scores = tl.where(visible, scores_of(query, keys, scale, softcap), float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    value_mask = readable[:, None] & (width < D)[None, :]
    values = tl.load(value_ptr + offsets[:, None] + width[None, :], mask=value_mask, other=0.0)
    added = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_peak, total * decay + tl.sum(weights, 1), average * decay[:, None] + added


@triton.jit
def part_of(split, context, new_rows, window: tl.constexpr, splits: tl.constexpr, BLOCK: tl.constexpr):
    """The first block that a window leaves, the committed blocks from it on, and this split's run of all blocks."""
    first = 0
    if window > 0:
        first = tl.maximum(context - window + 1, 0) // BLOCK
    old_blocks = tl.maximum(tl.cdiv(context, BLOCK) - first, 0)
    blocks = old_blocks + tl.cdiv(new_rows, BLOCK)
    part = tl.cdiv(blocks, splits)
    begin = split * part
    return first, old_blocks, begin, tl.minimum(begin + part, blocks)


@triton.jit
def store_part(state, partial_ptr, partial_lse_ptr, places, real, D: tl.constexpr, D_PAD: tl.constexpr):
    """The part's softmax average and its natural log-sum-exp; of rows that saw nothing the latter only, as -inf."""
    peak, total, average = state
    width = tl.arange(0, D_PAD)
    filled = total > 0
    divisor = tl.where(filled, total, 1.0)
    lse = tl.where(filled, (peak + tl.log2(divisor)) * LN_2, float("-inf"))
    tl.store(partial_lse_ptr + places, lse, mask=real)
    mask = (real & filled)[:, None] & (width < D)[None, :]
    tl.store(partial_ptr + places[:, None] * D + width[None, :], average / divisor[:, None], mask=mask)


@triton.jit
def tree_attention_split_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    context_lengths_ptr,
    positions_ptr,
    tree_mask_ptr,
    N,
    T,
    S,
    partial_ptr,
    partial_lse_ptr,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    window: tl.constexpr,
    splits: tl.constexpr,
    H: tl.constexpr,
    H_kv: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group: tl.constexpr = H // H_kv
    split = tl.program_id(1)
    lane = (tl.program_id(2) // H_kv).to(tl.int64)
    kv_head = tl.program_id(2) % H_kv

    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    nodes = rows // group
    real = rows < N * group
    heads = kv_head * group + rows % group
    width = tl.arange(0, D_PAD)
    query_rows = (lane * N + nodes) * H + heads
    query_mask = real[:, None] & (width < D)[None, :]
    query = tl.load(query_ptr + query_rows[:, None] * D + width[None, :], mask=query_mask, other=0.0)
    positions = tl.load(positions_ptr + lane * N + nodes, mask=real, other=0)

    length = tl.load(context_lengths_ptr + lane)
    context = tl.minimum(tl.maximum(length, 0), S).to(tl.int32)
    new_rows = tl.where(length < 0, 0, tl.minimum(T, S - context)).to(tl.int32)
    first, old_blocks, begin, end = part_of(split, context, new_rows, window, splits, BLOCK)

    cache_head = (lane * H_kv + kv_head) * S * D
    key_ptr = key_cache_ptr + cache_head
    value_ptr = value_cache_ptr + cache_head
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    average = tl.zeros([TILE, D_PAD], tl.float32)
    columns = tl.arange(0, BLOCK)

    for block in range(begin, tl.minimum(end, old_blocks)):
        cached = (first + block) * BLOCK + columns
        readable = cached < context
        visible = real[:, None] & readable[None, :]
        if window > 0:
            visible = visible & (positions[:, None] - cached[None, :] < window)
        peak, total, average = accumulate(
            (peak, total, average), query, key_ptr, value_ptr, cached, readable, visible, scale, softcap, D, D_PAD
        )

    for block in range(tl.maximum(begin, old_blocks), end):
        fresh = (block - old_blocks) * BLOCK + columns
        readable = fresh < new_rows
        mask_rows = (lane * N + nodes) * T
        visible = real[:, None] & readable[None, :]
        visible = tl.load(tree_mask_ptr + mask_rows[:, None] + fresh[None, :], mask=visible, other=0) != 0
        if window > 0:
            places = tl.load(positions_ptr + lane * N + fresh, mask=readable, other=0)
            visible = visible & (positions[:, None] - places[None, :] < window)
        peak, total, average = accumulate(
            (peak, total, average), query, key_ptr, value_ptr, context + fresh, readable, visible, scale, softcap,
            D, D_PAD,
        )  # fmt: skip

    store_part((peak, total, average), partial_ptr, partial_lse_ptr, query_rows * splits + split, real, D, D_PAD)


@triton.jit
def tree_attention_merge_kernel(
    partial_ptr,
    partial_lse_ptr,
    attention_ptr,
    splits: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    width = tl.arange(0, D_PAD)
    parts = tl.arange(0, SPLITS_PAD)
    lse = tl.load(partial_lse_ptr + row * splits + parts, mask=parts < splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(lse - base), 0)
    average = tl.zeros([D_PAD], tl.float32)
    for start in tl.static_range(0, SPLITS_PAD, TILE):
        tile = start + tl.arange(0, TILE)
        tile_lse = tl.load(partial_lse_ptr + row * splits + tile, mask=tile < splits, other=float("-inf"))
        weights = tl.exp(tile_lse - base)
        written = (tile_lse > float("-inf"))[:, None] & (width < D)[None, :]
        places = (row * splits + tile)[:, None] * D + width[None, :]
        average += tl.sum(weights[:, None] * tl.load(partial_ptr + places, mask=written, other=0.0), 0)
    average = average / tl.where(total > 0, total, 1.0)
    tl.store(attention_ptr + row * D + width, average.to(attention_ptr.dtype.element_ty), mask=width < D)


def split_spec(bound: Bound) -> KernelSpec:
    """The split kernel for one dtype, head layout, tile and split count."""
    dims, attributes, kind = bound.dims, bound.attributes, bound.types["T"]
    padded = triton.next_power_of_2(dims["D"])
    tile, splits = int(attributes["tile_rows"]), int(attributes["splits"])
    block, warps = _block_and_warps(padded, tile, kind)
    constants = {name: attributes[name] for name in ("scale", "softcap", "window", "splits")}
    constants |= {name: dims[name] for name in ("H", "H_kv", "D")}
    constants |= {"D_PAD": padded, "TILE": tile, "BLOCK": block}
    variant = f"{kind}.h{dims['H']}-{dims['H_kv']}.d{dims['D']}.r{tile}.s{splits}"
    extras = "".join(f".{name}{attributes[name]}" for name in ("softcap", "window") if attributes[name])
    return KernelSpec(
        name=f"tree_attention_split.{variant}{extras}",
        function=tree_attention_split_kernel,
        parameters=parameters_of(SPLIT, bound, ("N", "T", "S")),
        constants=constants,
        sizes=sizes_of(SPLIT, bound) | {"group": dims["H"] // dims["H_kv"]},
        grid=(Extent(("N", "group"), tile), Extent(("splits",)), Extent(("B", "H_kv"))),
        warps=warps,
    )


def _block_and_warps(padded: int, tile: int, kind: str) -> tuple[int, int]:
    """Cache rows a block and warps: the largest that spill no registers; float32, there to check with, is not tuned."""
    if kind == "float32":
        return (32 if padded <= 128 else 16), 8
    return (32 if padded * tile > 128 * 64 else 64), (8 if padded * tile > 64 * 64 else 4)


def merge_spec(bound: Bound) -> KernelSpec:
    """The merge kernel for one output dtype, head size and split count."""
    splits, size, kind = bound.dims["splits"], bound.dims["D"], bound.types["output_type"]
    padded = triton.next_power_of_2(splits)
    return KernelSpec(
        name=f"tree_attention_merge.{kind}.h{bound.dims['H']}.d{size}.s{splits}",
        function=tree_attention_merge_kernel,
        parameters=parameters_of(MERGE, bound, ()),
        constants={
            "splits": splits,
            "SPLITS_PAD": padded,
            "TILE": min(padded, 16),
            "D": size,
            "D_PAD": triton.next_power_of_2(size),
        },
        sizes=sizes_of(MERGE, bound),
        grid=(Extent(("B", "N", "H")), Extent(()), Extent(())),
    )
