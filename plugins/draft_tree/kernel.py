"""draft_tree in Triton: candidates of a chunk, children of a node, frontier of a level, and the final re-ranking.

Nothing is sorted: a handful of best entries is taken one by one, and orders of small sets come from counting, for every
entry, how many go before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specrun.plugins.compile import KernelSpec, parameters_of, sizes_of
from specrun.plugins.contract import Bound
from specrun.plugins.draft_tree.contract import CANDIDATES, CHILDREN, CHUNK, FRONTIER, RERANK
from specrun.plugins.launch import Extent

NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def take_best(values, tokens, free):
    """The best free entry by (higher value, lower token) and what is free after it is taken."""
    best = tl.max(tl.where(free != 0, values, float("-inf")), 0)
    token = tl.min(tl.where((values == best) & (free != 0), tokens, NO_TOKEN), 0)
    return best, token, tl.where(tokens == token, 0, free)


@triton.jit
def draft_candidates_kernel(
    logits_ptr,
    V,
    part_logits_ptr,
    part_tokens_ptr,
    part_lse_ptr,
    children: tl.constexpr,
    chunks: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits_ptr + row * V + tokens, mask=tokens < V, other=float("-inf"))
    values = tl.where(values == values, values, float("-inf"))
    peak = tl.max(values, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    part = row * chunks + chunk
    tl.store(part_lse_ptr + part, base + tl.log(tl.sum(tl.exp(values - base), 0)))
    free = tl.where(tokens < V, 1, 0)
    for child in range(children):
        best, token, free = take_best(values, tokens, free)
        tl.store(part_logits_ptr + part * children + child, best)
        tl.store(part_tokens_ptr + part * children + child, token)


@triton.jit
def draft_children_kernel(
    part_logits_ptr,
    part_tokens_ptr,
    part_lse_ptr,
    parent_scores_ptr,
    tokens_ptr,
    scores_ptr,
    children: tl.constexpr,
    chunks: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PAD)
    lse = tl.load(part_lse_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    peak = tl.max(lse, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = base + tl.log(tl.sum(tl.exp(lse - base), 0))
    part = tl.arange(0, PARTS_PAD)
    places = row * (chunks * children) + part
    values = tl.load(part_logits_ptr + places, mask=part < chunks * children, other=float("-inf"))
    tokens = tl.load(part_tokens_ptr + places, mask=part < chunks * children, other=NO_TOKEN)
    free = tl.where(tokens < NO_TOKEN, 1, 0)
    parent = tl.load(parent_scores_ptr + row)
    for child in range(children):
        best, token, free = take_best(values, tokens, free)
        log_q = tl.where(best == float("-inf"), float("-inf"), tl.minimum(best - total, 0.0))
        tl.store(tokens_ptr + row * children + child, token.to(tl.int64))
        tl.store(scores_ptr + row * children + child, parent + log_q)


@triton.jit
def draft_frontier_kernel(scores_ptr, frontier_ptr, width: tl.constexpr, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, COUNT_PAD)
    scores = tl.load(scores_ptr + lane * COUNT + place, mask=place < COUNT, other=float("-inf"))
    rank = tl.zeros([COUNT_PAD], tl.int32)
    for start in range(0, COUNT, 16):
        other = start + tl.arange(0, 16)
        rival = tl.load(scores_ptr + lane * COUNT + other, mask=other < COUNT, other=float("-inf"))
        tied = (rival[None, :] == scores[:, None]) & (other[None, :] < place[:, None])
        before = (other < COUNT)[None, :] & ((rival[None, :] > scores[:, None]) | tied)
        rank += tl.sum(tl.where(before, 1, 0), 1)
    tl.store(frontier_ptr + lane * width + rank, place.to(tl.int64), mask=(place < COUNT) & (rank < width))


@triton.jit
def draft_rerank_kernel(
    pool_tokens_ptr,
    pool_scores_ptr,
    pool_parents_ptr,
    pool_depths_ptr,
    root_tokens_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    kept_ptr,
    tree_mask_ptr,
    nodes: tl.constexpr,
    NODES_PAD: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, P_PAD)
    real = place < P
    scores = tl.load(pool_scores_ptr + lane * P + place, mask=real, other=float("-inf"))
    scores = tl.where(scores == scores, scores, float("-inf"))
    depths = tl.load(pool_depths_ptr + lane * P + place, mask=real, other=0).to(tl.int32)
    rank = tl.zeros([P_PAD], tl.int32)
    for start in range(0, P, 4):  # few rivals at a time: every one costs registers for the whole pool
        other = start + tl.arange(0, 4)
        rival = tl.load(pool_scores_ptr + lane * P + other, mask=other < P, other=float("-inf"))
        rival = tl.where(rival == rival, rival, float("-inf"))
        rival_depth = tl.load(pool_depths_ptr + lane * P + other, mask=other < P, other=0).to(tl.int32)
        nearer = rival_depth[None, :] < depths[:, None]
        earlier = (rival_depth[None, :] == depths[:, None]) & (other[None, :] < place[:, None])
        tied = (rival[None, :] == scores[:, None]) & (nearer | earlier)
        before = (other < P)[None, :] & ((rival[None, :] > scores[:, None]) | tied)
        rank += tl.sum(tl.where(before, 1, 0), 1)

    kept = real & (rank < nodes - 1)
    node = tl.cumsum(tl.where(kept, 1, 0), 0)
    pool_parents = tl.load(pool_parents_ptr + lane * P + place, mask=real, other=-1)
    found = tl.gather(node, tl.maximum(pool_parents, 0).to(tl.int32), 0)
    parents = tl.where(pool_parents < 0, 0, found)
    target = lane * nodes + node
    tokens = tl.load(pool_tokens_ptr + lane * P + place, mask=kept, other=0)
    tl.store(tokens_ptr + target, tokens, mask=kept)
    tl.store(parents_ptr + target, parents.to(tl.int64), mask=kept)
    tl.store(depths_ptr + target, depths.to(tl.int64), mask=kept)
    tl.store(kept_ptr + target, place.to(tl.int64), mask=kept)
    tl.store(tokens_ptr + lane * nodes, tl.load(root_tokens_ptr + lane))
    tl.store(parents_ptr + lane * nodes, -1)
    tl.store(depths_ptr + lane * nodes, 0)
    tl.store(kept_ptr + lane * nodes, -1)

    tl.debug_barrier()  # the parents above, written in the pool's order, are read back in the nodes' order
    row = tl.arange(0, NODES_PAD)
    column = tl.arange(0, NODES_PAD)
    parent = tl.load(parents_ptr + lane * nodes + row, mask=row < nodes, other=0)
    parent = tl.maximum(parent, 0).to(tl.int32)
    ancestor = row
    sees = tl.where(column[None, :] == ancestor[:, None], 1, 0)
    for _ in range(tl.max(tl.where(kept, depths, 0), 0)):
        ancestor = tl.gather(parent, ancestor, 0)
        sees = tl.where(column[None, :] == ancestor[:, None], 1, sees)
    inside = (row < nodes)[:, None] & (column < nodes)[None, :]
    tl.store(tree_mask_ptr + (lane * nodes + row)[:, None] * nodes + column[None, :], sees != 0, mask=inside)


def candidates_spec(bound: Bound) -> KernelSpec:
    """One variant for a number of children and of chunks."""
    constants = {"children": bound.attributes["children"], "chunks": bound.attributes["chunks"], "CHUNK": CHUNK}
    return KernelSpec(
        name=f"draft_candidates.k{constants['children']}.c{constants['chunks']}",
        function=draft_candidates_kernel,
        parameters=parameters_of(CANDIDATES, bound, ("V",)),
        constants=constants,
        sizes=sizes_of(CANDIDATES, bound),
        grid=(Extent(("B", "K")), Extent(("chunks",)), Extent(())),
        warps=8,
    )


def children_spec(bound: Bound) -> KernelSpec:
    """One variant for a number of children and of chunks."""
    children, chunks = bound.dims["children"], bound.dims["chunks"]
    pads = {
        "CHUNKS_PAD": triton.next_power_of_2(chunks),
        "PARTS_PAD": triton.next_power_of_2(chunks * children),
    }
    return KernelSpec(
        name=f"draft_children.k{children}.c{chunks}",
        function=draft_children_kernel,
        parameters=parameters_of(CHILDREN, bound, ()),
        constants={"children": children, "chunks": chunks, **pads},
        sizes=sizes_of(CHILDREN, bound),
        grid=(Extent(("B", "K")), Extent(()), Extent(())),
    )


def frontier_spec(bound: Bound) -> KernelSpec:
    """One variant for a level's size and the next one's width."""
    count, width = bound.dims["K"] * bound.dims["children"], int(bound.attributes["width"])
    return KernelSpec(
        name=f"draft_frontier.n{count}.w{width}",
        function=draft_frontier_kernel,
        parameters=parameters_of(FRONTIER, bound, ()),
        constants={"width": width, "COUNT": count, "COUNT_PAD": triton.next_power_of_2(count)},
        sizes=sizes_of(FRONTIER, bound),
        grid=(Extent(("B",)), Extent(()), Extent(())),
    )


def rerank_spec(bound: Bound) -> KernelSpec:
    """One variant for a pool's size and a tree's."""
    pool, nodes = bound.dims["P"], int(bound.attributes["nodes"])
    return KernelSpec(
        name=f"draft_rerank.p{pool}.n{nodes}",
        function=draft_rerank_kernel,
        parameters=parameters_of(RERANK, bound, ()),
        constants={
            "nodes": nodes,
            "NODES_PAD": triton.next_power_of_2(nodes),
            "P": pool,
            "P_PAD": triton.next_power_of_2(pool),
        },
        sizes=sizes_of(RERANK, bound),
        grid=(Extent(("B",)), Extent(()), Extent(())),
        warps=8,
    )
