"""The row kernel: penalties, temperature, top-k, top-p, min-p, statistics and the row's own draw. One program a row.

No sort. The cut of top-k and top-p is a threshold on the logits, found by narrowing a bracket of float32 values: each
round counts or weighs what lies above PIVOTS values at once. First the tokens that can be inside are gathered into a
short list (almost always a few hundred of a whole vocabulary), so that the rounds stay in the nearest cache; a row
whose list overflows is searched whole. Statistics are float32 and every sum has a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specrun.plugins.compile import KernelSpec, parameters_of, sizes_of
from specrun.plugins.contract import Bound
from specrun.plugins.launch import Extent
from specrun.plugins.rejection_sampling.block_kernel import block_walk_dense_spec, block_walk_spec
from specrun.plugins.rejection_sampling.contract import SAMPLE_ROWS
from specrun.plugins.rejection_sampling.match_kernel import match_walk_spec, typical_walk_spec
from specrun.plugins.rejection_sampling.rejection_kernel import rejection_walk_dense_spec, rejection_walk_spec

__all__ = [
    "block_walk_dense_spec",
    "block_walk_spec",
    "match_walk_spec",
    "rejection_walk_dense_spec",
    "rejection_walk_spec",
    "sample_rows_spec",
    "typical_walk_spec",
]

BLOCK, PIVOTS, WARPS = 2048, 8, 16


@triton.jit
def ordered(x):
    """float32 as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unordered(key):
    """The float32 behind an ordered int32."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def adjust_row(row_ptr, tokens_ptr, counts_ptr, bias_ptr, penalties_ptr, A, BLOCK: tl.constexpr):
    """Penalties and bias, in place, at the listed tokens."""
    repetition = tl.load(penalties_ptr)
    frequency = tl.load(penalties_ptr + 1)
    presence = tl.load(penalties_ptr + 2)
    for start in range(0, A, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        tokens = tl.load(tokens_ptr + slots, mask=slots < A, other=-1)
        counts = tl.load(counts_ptr + slots, mask=slots < A, other=-1)
        values = tl.load(row_ptr + tokens, mask=tokens >= 0, other=0.0)
        scaled = tl.where(values > 0, values / repetition, values * repetition)
        scaled = scaled - frequency * counts - tl.where(counts > 0, presence, 0.0)
        values = tl.where(counts >= 0, scaled, values) + tl.load(bias_ptr + slots, mask=slots < A, other=0.0)
        tl.store(row_ptr + tokens, values, mask=tokens >= 0)
    tl.debug_barrier()


@triton.jit
def maxima(row_ptr, V, BLOCK: tl.constexpr):
    """float32 [BLOCK]: the largest logit of every BLOCK-th column, each of another token; and how many are NaN."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + slots, mask=slots < V, other=float("-inf"))
        best = tl.maximum(best, logits)
        bad += (logits != logits).to(tl.int32)
    return best, tl.sum(bad, 0)


@triton.jit
def kth_of(values, k, PIVOTS: tl.constexpr):
    """The k-th largest of a vector that has at least k entries."""
    keys = ordered(values).to(tl.int64)
    low = tl.min(keys, 0)
    high = tl.max(keys, 0)
    steps = tl.arange(0, PIVOTS)
    while low < high:
        pivots = low + ((high - low) * (steps + 1) + PIVOTS - 1) // PIVOTS
        above = tl.sum((keys[:, None] >= pivots[None, :]).to(tl.int32), 0)
        low, high = narrowed(low, high, tl.sum((above >= k).to(tl.int64), 0), PIVOTS)
    return unordered(low.to(tl.int32))


@triton.jit
def narrowed(low, high, reached, PIVOTS: tl.constexpr):
    """The bracket between the last pivot that was reached and the first that wasn't."""
    width = high - low
    under = low + (width * reached + PIVOTS - 1) // PIVOTS
    over = low + (width * (reached + 1) + PIVOTS - 1) // PIVOTS - 1
    return tl.where(reached > 0, under, low), tl.where(reached < PIVOTS, over, high)


@triton.jit
def weigh(list_ptr, size, pivots, best, scale, counting, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """float32 [PIVOTS]: the weight (``counting``: the number) of the list's logits at or above each pivot."""
    total = tl.zeros([PIVOTS], tl.float32)
    for start in range(0, size, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        logits = tl.load(list_ptr + slots, mask=slots < size, other=float("-inf"))
        values = tl.where(counting, 1.0, tl.exp((logits - best) * scale))
        above = (ordered(logits).to(tl.int64)[:, None] >= pivots[None, :]) & (slots < size)[:, None]
        total += tl.sum(tl.where(above, values[:, None], 0.0), 0)
    return total


@triton.jit
def threshold(
    list_ptr, size, floor, goal, best, scale, counting, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """The largest value in [floor, best] at or above which the list's weight (or number) reaches ``goal``."""
    low = ordered(floor).to(tl.int64)
    high = ordered(best).to(tl.int64)
    steps = tl.arange(0, PIVOTS)
    while low < high:
        pivots = low + ((high - low) * (steps + 1) + PIVOTS - 1) // PIVOTS
        above = weigh(list_ptr, size, pivots, best, scale, counting, BLOCK, PIVOTS)
        low, high = narrowed(low, high, tl.sum((above >= goal).to(tl.int64), 0), PIVOTS)
    return unordered(low.to(tl.int32))


@triton.jit
def summed(list_ptr, size, floor, best, scale, BLOCK: tl.constexpr):
    """The list's weight from ``floor`` up, and its weight times log-weight."""
    total = tl.zeros([BLOCK], tl.float32)
    surprise = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        logits = tl.load(list_ptr + slots, mask=slots < size, other=float("-inf"))
        logs = (logits - best) * scale
        weights = tl.where((logits >= floor) & (slots < size), tl.exp(logs), 0.0)
        total += weights
        surprise += tl.where(weights > 0, weights * logs, 0.0)
    return tl.sum(total, 0), tl.sum(surprise, 0)


@triton.jit
def search(
    list_ptr, size, floor, k, p, min_p, best, scale, total, surprise, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """The smallest logit kept by top-k, then top-p, then min-p, and the sums of what is kept.

    ``total`` and ``surprise`` come in as the whole row's, list or not. The cuts share one loop body: a search is long.
    """
    for cut in range(0, 3):
        if ((cut == 0) & (k > 0)) | ((cut == 1) & (p < 1)) | ((cut == 2) & (min_p > 0)):
            if cut == 2:
                floor = tl.maximum(floor, best + tl.log(min_p) / scale)
            else:
                goal = tl.where(cut == 0, k.to(tl.float32), p * total)
                floor = threshold(list_ptr, size, floor, goal, best, scale, cut == 0, BLOCK, PIVOTS)
            total, surprise = summed(list_ptr, size, floor, best, scale, BLOCK)
    return floor, total, surprise


@triton.jit
def drawn_slot(list_ptr, size, floor, best, scale, target, BLOCK: tl.constexpr):
    """Where the running weight first exceeds ``target``; the last positive weight if rounding leaves none."""
    running = 0.0
    found = -1
    last = -1
    start = 0
    while (start < size) & (found < 0):
        slots = start + tl.arange(0, BLOCK)
        logits = tl.load(list_ptr + slots, mask=slots < size, other=float("-inf"))
        weights = tl.where((logits >= floor) & (slots < size), tl.exp((logits - best) * scale), 0.0)
        hit = (running + tl.cumsum(weights, 0) > target) & (weights > 0)
        first = tl.min(tl.where(hit, slots, size), 0)
        found = tl.where(first < size, first, -1)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, slots, -1), 0))
        running += tl.sum(weights, 0)
        start += BLOCK
    return tl.where(found < 0, last, found)


@triton.jit
def first_at(row_ptr, V, best, BLOCK: tl.constexpr):
    """The lowest token whose logit is ``best``."""
    lowest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(0, V, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + slots, mask=slots < V, other=float("-inf"))
        lowest = tl.minimum(lowest, tl.where((logits == best) & (slots < V), slots, 0x7FFFFFFF))
    return tl.min(lowest, 0)


@triton.jit
def gather_list(row_ptr, cut, list_ptr, tokens_ptr, capacity, V, BLOCK: tl.constexpr):
    """Copy the row's logits from ``cut`` up, in order, with their tokens; how many there are (more may not fit)."""
    count = 0
    for start in range(0, V, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + slots, mask=slots < V, other=float("-inf"))
        keep = (logits >= cut) & (slots < V)
        places = count + tl.cumsum(keep.to(tl.int32), 0) - 1
        fits = keep & (places < capacity)
        tl.store(list_ptr + places, logits, mask=fits)
        tl.store(tokens_ptr + places, slots, mask=fits)
        count += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def lower_bound(columns, k, p, min_p, best, scale, total, V, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """A logit that no kept token is below, nor any that the later cuts weigh. -inf where nothing cheap is known.

    Top-k: at least k tokens reach the k-th of the columns' maxima; the nucleus is of what top-k keeps, so nothing else
    may raise this bound. Top-p: tokens below (1 - p) * total / V together weigh less than what the nucleus leaves out.
    The small margin covers rounding.
    """
    bound = float("-inf")
    if k > 0:
        if k <= BLOCK:
            bound = kth_of(columns, k, PIVOTS)
    else:
        if p < 1:
            bound = best + (tl.log((1.0 - p) * total / V) - 0.01) / scale
        if min_p > 0:
            bound = tl.maximum(bound, best + (tl.log(min_p) - 0.01) / scale)
    return bound


@triton.jit
def sampled(
    row_ptr,
    list_ptr,
    tokens_ptr,
    capacity,
    columns,
    k,
    p,
    min_p,
    best,
    scale,
    uniform,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The row's token and its floor, total and entropy."""
    floor = float("-inf")
    total, surprise = summed(row_ptr, V, floor, best, scale, BLOCK)
    kept_ptr = row_ptr
    size = V
    if (k > 0) | (p < 1) | (min_p > 0):
        cut = lower_bound(columns, k, p, min_p, best, scale, total, V, BLOCK, PIVOTS)
        count = gather_list(row_ptr, cut, list_ptr, tokens_ptr, capacity, V, BLOCK)
        kept_ptr = tl.where(count <= capacity, list_ptr, row_ptr)
        size = tl.where(count <= capacity, count, V)
        lowest = tl.maximum(cut, -3.0e38)  # a bracket of finite values: what lies below weighs nothing
        floor, total, surprise = search(
            kept_ptr, size, lowest, k, p, min_p, best, scale, total, surprise, BLOCK, PIVOTS
        )
    slot = drawn_slot(kept_ptr, size, floor, best, scale, uniform * total, BLOCK)
    token = tl.load(tokens_ptr + slot, mask=size < V, other=0)
    token = tl.where(size < V, token, slot)
    return token, floor, total, tl.log(total) - surprise / total


@triton.jit
def sample_rows_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    penalties_ptr,
    adjust_tokens_ptr,
    adjust_counts_ptr,
    adjust_bias_ptr,
    uniforms_ptr,
    N,
    A,
    capacity,
    adjusted_ptr,
    drawn_ptr,
    statistics_ptr,
    scratch_logits_ptr,
    scratch_tokens_ptr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row // N
    row_ptr = adjusted_ptr + row * V  # the same buffer as the logits
    adjusts = row * A
    adjust_row(
        row_ptr,
        adjust_tokens_ptr + adjusts,
        adjust_counts_ptr + adjusts,
        adjust_bias_ptr + adjusts,
        penalties_ptr + sequence * 3,
        A,
        128,
    )
    temperature = tl.load(temperature_ptr + sequence)
    k = tl.load(top_k_ptr + sequence)
    columns, bad = maxima(row_ptr, V, BLOCK)
    best = tl.max(columns, 0)
    scale = 0.0
    floor = best
    total = 1.0
    entropy = 0.0
    token = -1
    if (bad > 0) | (best == float("inf")) | (best == float("-inf")):
        best = 0.0
        floor = float("inf")
    elif temperature > 0:
        scale = 1.0 / tl.maximum(temperature, 1e-30)
        token, floor, total, entropy = sampled(
            row_ptr,
            scratch_logits_ptr + row * capacity,
            scratch_tokens_ptr + row * capacity,
            capacity,
            columns,
            tl.where(k < V, k, 0),
            tl.load(top_p_ptr + sequence),
            tl.load(min_p_ptr + sequence),
            best,
            scale,
            tl.load(uniforms_ptr + row),
            V,
            BLOCK,
            PIVOTS,
        )
    else:
        token = first_at(row_ptr, V, best, BLOCK)
    tl.store(drawn_ptr + row, token)
    statistics = statistics_ptr + row * 5
    tl.store(statistics, best)
    tl.store(statistics + 1, scale)
    tl.store(statistics + 2, floor)
    tl.store(statistics + 3, total)
    tl.store(statistics + 4, entropy)


def sample_rows_spec(bound: Bound) -> KernelSpec:
    """The variant for one vocabulary."""
    width = bound.dims["V"]
    block = min(BLOCK, max(128, triton.next_power_of_2(width)))
    return KernelSpec(
        name=f"sample_rows.v{width}",
        function=sample_rows_kernel,
        parameters=parameters_of(SAMPLE_ROWS, bound, ("N", "A", "capacity")),
        constants={"V": width, "BLOCK": block, "PIVOTS": PIVOTS},
        sizes=sizes_of(SAMPLE_ROWS, bound),
        grid=(Extent(("B", "N")), Extent(()), Extent(())),
        warps=WARPS if block == BLOCK else 4,
    )
