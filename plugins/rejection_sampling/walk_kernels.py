"""The walk kernels: one program judges one sequence's draft.

Nodes come parents first, so one scan over them in order is the whole walk: a node is tried when its parent is where the
walk stands. Residuals need no memory. After any number of rejections at a node the remaining law is (p - c q)+ / M for
a number c: with replacement every step subtracts M q, without replacement M q / (1 - the mass drawn so far), and a
token once rejected has nothing left, since it was rejected because p - c q fell short of q there. So each rejection is
one pass over the row for M, and a draw is one more.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from specrun.plugins.compile import KernelSpec, parameters_of, sizes_of
from specrun.plugins.contract import Bound, OpContract
from specrun.plugins.launch import Extent
from specrun.plugins.rejection_sampling.contract import (
    BLOCK_WALK,
    BLOCK_WALK_DENSE,
    EXHAUSTED,
    MATCH_WALK,
    REJECTION_WALK,
    REJECTION_WALK_DENSE,
    TYPICAL_WALK,
)

BLOCK, WARPS = 2048, 8
NODES = 128  # the contract's limit: a path fits one vector


@triton.jit
def target(logits, statistics_ptr):
    """p of these logits, by the row's statistics."""
    best = tl.load(statistics_ptr)
    scale = tl.load(statistics_ptr + 1)
    floor = tl.load(statistics_ptr + 2)
    total = tl.load(statistics_ptr + 3)
    return tl.where(logits >= floor, tl.exp((logits - best) * scale) / total, 0.0)


@triton.jit
def listed(slots, tokens_ptr, probs_ptr, K):
    """q of these tokens, from a short list."""
    law = slots.to(tl.float32) * 0.0
    for k in range(0, K):
        law = tl.where(slots == tl.load(tokens_ptr + k).to(tl.int32), tl.load(probs_ptr + k), law)
    return law


@triton.jit
def remaining(
    slots, logits_ptr, statistics_ptr, tokens_ptr, probs_ptr, K, s, c, V: tl.constexpr, DENSE: tl.constexpr
):
    """(s p - c q)+ of these tokens."""
    inside = slots < V
    p = target(tl.load(logits_ptr + slots, mask=inside, other=float("-inf")), statistics_ptr)
    if DENSE:
        q = tl.load(probs_ptr + slots, mask=inside, other=0.0)
    else:
        q = listed(slots, tokens_ptr, probs_ptr, K)
    return tl.where(inside, tl.maximum(s * p - c * q, 0.0), 0.0)


@triton.jit
def mass(
    logits_ptr,
    statistics_ptr,
    tokens_ptr,
    probs_ptr,
    K,
    s,
    c,
    V: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of (s p - c q)+ over the vocabulary."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        total += remaining(slots, logits_ptr, statistics_ptr, tokens_ptr, probs_ptr, K, s, c, V, DENSE)
    return tl.sum(total, 0)


@triton.jit
def draw(
    logits_ptr,
    statistics_ptr,
    tokens_ptr,
    probs_ptr,
    K,
    s,
    c,
    goal,
    V: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first token where the running sum of (s p - c q)+ exceeds ``goal``."""
    running = 0.0
    found = -1
    last = 0
    start = 0
    while (start < V) & (found < 0):
        slots = start + tl.arange(0, BLOCK)
        values = remaining(slots, logits_ptr, statistics_ptr, tokens_ptr, probs_ptr, K, s, c, V, DENSE)
        hit = (running + tl.cumsum(values, 0) > goal) & (values > 0)
        first = tl.min(tl.where(hit, slots, V), 0)
        found = tl.where(first < V, first, -1)
        last = tl.maximum(last, tl.max(tl.where(values > 0, slots, 0), 0))
        running += tl.sum(values, 0)
        start += BLOCK
    return tl.where(found < 0, last, found)


@triton.jit
def draft_at(token, tokens_ptr, probs_ptr, K, DENSE: tl.constexpr):
    """q of one token."""
    if DENSE:
        q = tl.load(probs_ptr + token)
    else:
        q = listed(token, tokens_ptr, probs_ptr, K)
    return q


@triton.jit
def matched(tokens_ptr, parents_ptr, drawn_ptr, count, NODES: tl.constexpr):
    """The walk that descends while a child holds the drawn token: its nodes and how far it went."""
    places = tl.arange(0, NODES)
    path = tl.where(places == 0, 0, -1)
    node = 0
    depth = 0
    wanted = tl.load(drawn_ptr)
    for child in range(1, count):
        if (tl.load(parents_ptr + child) == node) & (tl.load(tokens_ptr + child) == wanted):
            node = child
            depth += 1
            path = tl.where(places == depth, child, path)
            wanted = tl.load(drawn_ptr + child)
    return path, depth, wanted


@triton.jit
def store_verdict(path_ptr, accepted_ptr, next_token_ptr, sequence, N, path, depth, token, NODES: tl.constexpr):
    """One sequence's outputs; places past the path hold -1."""
    places = tl.arange(0, NODES)
    tl.store(path_ptr + sequence * N + places, tl.where(places <= depth, path, -1), mask=places < N)
    tl.store(accepted_ptr + sequence, depth)
    tl.store(next_token_ptr + sequence, token)


@triton.jit
def match_walk_kernel(
    tokens_ptr,
    parents_ptr,
    nodes_ptr,
    drawn_ptr,
    N,
    path_ptr,
    accepted_ptr,
    next_token_ptr,
    NODES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    first = sequence * N
    count = tl.load(nodes_ptr + sequence)
    path, depth, token = matched(tokens_ptr + first, parents_ptr + first, drawn_ptr + first, count, NODES)
    store_verdict(path_ptr, accepted_ptr, next_token_ptr, sequence, N, path, depth, token, NODES)


@triton.jit
def path_to(node, depth, parents_ptr, NODES: tl.constexpr):
    """The nodes from the root to ``node``, which lies at ``depth``."""
    places = tl.arange(0, NODES)
    path = tl.full([NODES], -1, tl.int32)
    place = depth
    while place >= 0:
        path = tl.where(places == place, node, path)
        node = tl.load(parents_ptr + node).to(tl.int32)
        place -= 1
    return path


@triton.jit
def typical(
    tokens_ptr,
    parents_ptr,
    logits_ptr,
    statistics_ptr,
    count,
    epsilon: tl.constexpr,
    delta: tl.constexpr,
    V: tl.constexpr,
    NODES: tl.constexpr,
):
    """The last node of the longest typical path, and its depth; among equals the likelier, then the first."""
    places = tl.arange(0, NODES)
    depths = tl.where(places == 0, 0, -1)  # -1: does not stand
    scores = tl.zeros([NODES], tl.float32)
    for child in range(1, count):
        parent = tl.load(parents_ptr + child).to(tl.int32)
        row = statistics_ptr + parent * 5
        logit = tl.load(logits_ptr + parent.to(tl.int64) * V + tl.load(tokens_ptr + child))
        chance = target(logit, row)
        bar = tl.minimum(epsilon, delta * tl.exp(-tl.load(row + 4)))
        depth = tl.sum(tl.where(places == parent, depths, 0), 0)
        score = tl.sum(tl.where(places == parent, scores, 0.0), 0)
        if (depth >= 0) & (chance > bar):
            depths = tl.where(places == child, depth + 1, depths)
            scores = tl.where(places == child, score + tl.log(chance), scores)
    deepest = tl.max(depths, 0)
    likeliest = tl.max(tl.where(depths == deepest, scores, float("-inf")), 0)
    node = tl.min(tl.where((depths == deepest) & (scores == likeliest), places, NODES), 0)
    return node, deepest


@triton.jit
def typical_walk_kernel(
    tokens_ptr,
    parents_ptr,
    nodes_ptr,
    drawn_ptr,
    logits_ptr,
    statistics_ptr,
    temperature_ptr,
    N,
    path_ptr,
    accepted_ptr,
    next_token_ptr,
    epsilon: tl.constexpr,
    delta: tl.constexpr,
    V: tl.constexpr,
    NODES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    first = sequence * N
    count = tl.load(nodes_ptr + sequence)
    path, depth, token = matched(tokens_ptr + first, parents_ptr + first, drawn_ptr + first, count, NODES)
    if tl.load(temperature_ptr + sequence) > 0:
        logits = logits_ptr + first * V
        statistics = statistics_ptr + first * 5
        node, depth = typical(
            tokens_ptr + first, parents_ptr + first, logits, statistics, count, epsilon, delta, V, NODES
        )
        path = path_to(node, depth, parents_ptr + first, NODES)
        token = tl.load(drawn_ptr + first + node)
    store_verdict(path_ptr, accepted_ptr, next_token_ptr, sequence, N, path, depth, token, NODES)


@triton.jit
def judged(
    tokens_ptr,
    parents_ptr,
    drawn_ptr,
    logits_ptr,
    statistics_ptr,
    draft_tokens_ptr,
    draft_probs_ptr,
    accept_ptr,
    residual_ptr,
    count,
    K,
    REPLACEMENT: tl.constexpr,
    EXHAUSTED: tl.constexpr,
    V: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    """Tree rejection of one sequence, whose pointers these are: the path, its depth, the next token."""
    places = tl.arange(0, NODES)
    path = tl.where(places == 0, 0, -1)
    stride = V if DENSE else K
    node = 0
    depth = 0
    tried = 0
    c = 0.0
    m = 1.0
    undrawn = 1.0  # what is left of q after the children drawn before
    for child in range(1, count):
        if (tl.load(parents_ptr + child) == node) & (undrawn > EXHAUSTED):
            here = tl.full([], 0, tl.int64) + node
            row_ptr = logits_ptr + here * V
            row_statistics_ptr = statistics_ptr + here * 5
            list_ptr = draft_tokens_ptr + here * K
            probs_ptr = draft_probs_ptr + here * stride
            token = tl.load(tokens_ptr + child).to(tl.int32)
            q = draft_at(token, list_ptr, probs_ptr, K, DENSE)
            left = tl.maximum(target(tl.load(row_ptr + token), row_statistics_ptr) - c * q, 0.0)
            tried = 1
            if tl.load(accept_ptr + child) * q * m < left * undrawn:  # u < (left / m) / (q / undrawn)
                node = tl.full([], 0, tl.int32) + child
                depth += 1
                path = tl.where(places == depth, child, path)
                tried = 0
                c = 0.0
                m = 1.0
                undrawn = 1.0
            else:
                further = c + m / undrawn
                rest = mass(row_ptr, row_statistics_ptr, list_ptr, probs_ptr, K, 1.0, further, V, DENSE, BLOCK)
                c = tl.where(rest > 0, further, c)
                m = tl.where(rest > 0, rest, m)
                if not REPLACEMENT:
                    undrawn -= q
    token = tl.load(drawn_ptr + node).to(tl.int32)
    if tried > 0:
        here = tl.full([], 0, tl.int64) + node
        token = draw(
            logits_ptr + here * V,
            statistics_ptr + here * 5,
            draft_tokens_ptr + here * K,
            draft_probs_ptr + here * stride,
            K,
            1.0,
            c,
            tl.load(residual_ptr + node) * m,
            V,
            DENSE,
            BLOCK,
        )
    return path, depth, token


@triton.jit
def blocked(
    tokens_ptr,
    drawn_ptr,
    logits_ptr,
    statistics_ptr,
    draft_tokens_ptr,
    draft_probs_ptr,
    accept_ptr,
    residual_ptr,
    count,
    K,
    V: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Block verification of one sequence's chain, whose pointers these are: how far it went, and the next token."""
    stride = V if DENSE else K
    node = 0
    prefix = 1.0
    kept = 0
    kept_prefix = 1.0
    kept_mass = 0.0
    while (node + 1 < count) & (prefix > 0):
        here = tl.full([], 0, tl.int64) + node
        row_ptr = logits_ptr + here * V
        row_statistics_ptr = statistics_ptr + here * 5
        list_ptr = draft_tokens_ptr + here * K
        probs_ptr = draft_probs_ptr + here * stride
        left = mass(row_ptr, row_statistics_ptr, list_ptr, probs_ptr, K, prefix, 1.0, V, DENSE, BLOCK)
        if (node == 0) | (tl.load(accept_ptr + node) * (left + 1.0 - prefix) < left):
            kept = node
            kept_prefix = prefix
            kept_mass = left
        token = tl.load(tokens_ptr + node + 1).to(tl.int32)
        carried = prefix * target(tl.load(row_ptr + token), row_statistics_ptr)
        q = draft_at(token, list_ptr, probs_ptr, K, DENSE)
        prefix = tl.where(carried <= 0, 0.0, tl.where(carried >= q, 1.0, carried / q))
        node += 1
    token = tl.load(drawn_ptr + node).to(tl.int32)
    if (node > 0) & (tl.load(accept_ptr + node) >= prefix):
        node = kept
        here = tl.full([], 0, tl.int64) + node
        equal = kept_mass <= 0  # p = q up to rounding: draw from p
        token = draw(
            logits_ptr + here * V,
            statistics_ptr + here * 5,
            draft_tokens_ptr + here * K,
            draft_probs_ptr + here * stride,
            K,
            tl.where(equal, 1.0, kept_prefix),
            tl.where(equal, 0.0, 1.0),
            tl.load(residual_ptr + node) * tl.where(equal, 1.0, kept_mass),
            V,
            DENSE,
            BLOCK,
        )
    return node, token


@triton.jit
def rejection_walk_kernel(
    tokens_ptr,
    parents_ptr,
    nodes_ptr,
    drawn_ptr,
    logits_ptr,
    statistics_ptr,
    temperature_ptr,
    draft_tokens_ptr,
    draft_probs_ptr,
    accept_uniforms_ptr,
    residual_uniforms_ptr,
    N,
    K,
    path_ptr,
    accepted_ptr,
    next_token_ptr,
    REPLACEMENT: tl.constexpr,
    EXHAUSTED: tl.constexpr,
    V: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    first = sequence * N
    count = tl.load(nodes_ptr + sequence)
    path, depth, wanted = matched(tokens_ptr + first, parents_ptr + first, drawn_ptr + first, count, NODES)
    token = wanted.to(tl.int32)
    if tl.load(temperature_ptr + sequence) > 0:
        stride = V if DENSE else K
        path, depth, token = judged(
            tokens_ptr + first,
            parents_ptr + first,
            drawn_ptr + first,
            logits_ptr + first * V,
            statistics_ptr + first * 5,
            draft_tokens_ptr + first * K,
            draft_probs_ptr + first * stride,
            accept_uniforms_ptr + first,
            residual_uniforms_ptr + first,
            count,
            K,
            REPLACEMENT,
            EXHAUSTED,
            V,
            DENSE,
            BLOCK,
            NODES,
        )
    store_verdict(path_ptr, accepted_ptr, next_token_ptr, sequence, N, path, depth, token, NODES)


@triton.jit
def rejection_walk_dense_kernel(
    tokens_ptr,
    parents_ptr,
    nodes_ptr,
    drawn_ptr,
    logits_ptr,
    statistics_ptr,
    temperature_ptr,
    draft_probs_ptr,
    accept_uniforms_ptr,
    residual_uniforms_ptr,
    N,
    path_ptr,
    accepted_ptr,
    next_token_ptr,
    REPLACEMENT: tl.constexpr,
    EXHAUSTED: tl.constexpr,
    V: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    rejection_walk_kernel(
        tokens_ptr,
        parents_ptr,
        nodes_ptr,
        drawn_ptr,
        logits_ptr,
        statistics_ptr,
        temperature_ptr,
        tokens_ptr,  # no list: never read
        draft_probs_ptr,
        accept_uniforms_ptr,
        residual_uniforms_ptr,
        N,
        1,
        path_ptr,
        accepted_ptr,
        next_token_ptr,
        REPLACEMENT,
        EXHAUSTED,
        V,
        DENSE,
        BLOCK,
        NODES,
    )


@triton.jit
def block_walk_kernel(
    tokens_ptr,
    parents_ptr,
    nodes_ptr,
    drawn_ptr,
    logits_ptr,
    statistics_ptr,
    temperature_ptr,
    draft_tokens_ptr,
    draft_probs_ptr,
    accept_uniforms_ptr,
    residual_uniforms_ptr,
    N,
    K,
    path_ptr,
    accepted_ptr,
    next_token_ptr,
    V: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    first = sequence * N
    count = tl.load(nodes_ptr + sequence)
    path, depth, wanted = matched(tokens_ptr + first, parents_ptr + first, drawn_ptr + first, count, NODES)
    token = wanted.to(tl.int32)
    if tl.load(temperature_ptr + sequence) > 0:
        stride = V if DENSE else K
        depth, token = blocked(
            tokens_ptr + first,
            drawn_ptr + first,
            logits_ptr + first * V,
            statistics_ptr + first * 5,
            draft_tokens_ptr + first * K,
            draft_probs_ptr + first * stride,
            accept_uniforms_ptr + first,
            residual_uniforms_ptr + first,
            count,
            K,
            V,
            DENSE,
            BLOCK,
        )
        path = tl.arange(0, NODES)
    store_verdict(path_ptr, accepted_ptr, next_token_ptr, sequence, N, path, depth, token, NODES)


@triton.jit
def block_walk_dense_kernel(
    tokens_ptr,
    parents_ptr,
    nodes_ptr,
    drawn_ptr,
    logits_ptr,
    statistics_ptr,
    temperature_ptr,
    draft_probs_ptr,
    accept_uniforms_ptr,
    residual_uniforms_ptr,
    N,
    path_ptr,
    accepted_ptr,
    next_token_ptr,
    V: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    block_walk_kernel(
        tokens_ptr,
        parents_ptr,
        nodes_ptr,
        drawn_ptr,
        logits_ptr,
        statistics_ptr,
        temperature_ptr,
        tokens_ptr,  # no list: never read
        draft_probs_ptr,
        accept_uniforms_ptr,
        residual_uniforms_ptr,
        N,
        1,
        path_ptr,
        accepted_ptr,
        next_token_ptr,
        V,
        DENSE,
        BLOCK,
        NODES,
    )


def _spec(contract: OpContract, bound: Bound, function: Any, sizes: tuple[str, ...], **constants: Any) -> KernelSpec:
    marks = [f"{name}_{value}" for name, value in bound.attributes.items()]
    if "V" in contract.static:
        width = constants["V"] = bound.dims["V"]
        marks.append(f"v{width}")
    if "BLOCK" in constants:
        constants["BLOCK"] = min(constants["BLOCK"], max(128, triton.next_power_of_2(width)))
    return KernelSpec(
        name=".".join([contract.name, *marks]),
        function=function,
        parameters=parameters_of(contract, bound, sizes),
        constants=constants | {"NODES": NODES},
        sizes=sizes_of(contract, bound),
        grid=(Extent(("B",)), Extent(()), Extent(())),
        warps=WARPS if "BLOCK" in constants else 1,
    )


def match_walk_spec(bound: Bound) -> KernelSpec:
    return _spec(MATCH_WALK, bound, match_walk_kernel, ("N",))


def typical_walk_spec(bound: Bound) -> KernelSpec:
    epsilon, delta = bound.attributes["epsilon"], bound.attributes["delta"]
    return _spec(TYPICAL_WALK, bound, typical_walk_kernel, ("N",), epsilon=epsilon, delta=delta)


def rejection_walk_spec(bound: Bound) -> KernelSpec:
    rule = {"REPLACEMENT": bound.attributes["replacement"], "EXHAUSTED": EXHAUSTED}
    # Half a block: the list is compared with the block in registers, which a whole one would spill on sm_120.
    return _spec(REJECTION_WALK, bound, rejection_walk_kernel, ("N", "K"), DENSE=False, BLOCK=BLOCK // 2, **rule)


def rejection_walk_dense_spec(bound: Bound) -> KernelSpec:
    rule = {"REPLACEMENT": bound.attributes["replacement"], "EXHAUSTED": EXHAUSTED}
    return _spec(REJECTION_WALK_DENSE, bound, rejection_walk_dense_kernel, ("N",), DENSE=True, BLOCK=BLOCK, **rule)


def block_walk_spec(bound: Bound) -> KernelSpec:
    return _spec(BLOCK_WALK, bound, block_walk_kernel, ("N", "K"), DENSE=False, BLOCK=BLOCK)


def block_walk_dense_spec(bound: Bound) -> KernelSpec:
    return _spec(BLOCK_WALK_DENSE, bound, block_walk_dense_kernel, ("N",), DENSE=True, BLOCK=BLOCK)
