"""Tree rejection sampling: one program judges one sequence's draft, its rows read only where the walk stands.

Residuals need no memory. After any number of rejections at a node the remaining law is (p - c q)+ / M for a number c:
with replacement every step subtracts M q, without replacement M q / (1 - the mass drawn so far), and a token once
rejected has nothing left, since it was rejected because p - c q fell short of q there. So each rejection is one pass
over the row for M, and a draw is one more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specrun.plugins.compile import KernelSpec
from specrun.plugins.contract import Bound
from specrun.plugins.rejection_sampling.contract import EXHAUSTED, REJECTION_WALK, REJECTION_WALK_DENSE
from specrun.plugins.rejection_sampling.law_kernel import draft_at, draw_at, mass, target
from specrun.plugins.rejection_sampling.match_kernel import matched, store_verdict, walk_spec

BLOCK = 2048


@triton.jit
def judged(
    tokens_ptr, parents_ptr, drawn_ptr, logits_ptr, statistics_ptr, draft_tokens_ptr, draft_probs_ptr, accept_ptr,
    residual_ptr, count, K, REPLACEMENT: tl.constexpr, EXHAUSTED: tl.constexpr, V: tl.constexpr,
    DENSE: tl.constexpr, BLOCK: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
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
        goal = tl.load(residual_ptr + node) * m
        token = draw_at(
            node, 1.0, c, goal, logits_ptr, statistics_ptr, draft_tokens_ptr, draft_probs_ptr, K, V, DENSE, BLOCK
        )
    return path, depth, token


@triton.jit
def rejection_walk_kernel(
    tokens_ptr, parents_ptr, nodes_ptr, drawn_ptr, logits_ptr, statistics_ptr, temperature_ptr, draft_tokens_ptr,
    draft_probs_ptr, accept_uniforms_ptr, residual_uniforms_ptr, N, K, path_ptr, accepted_ptr, next_token_ptr,
    REPLACEMENT: tl.constexpr, EXHAUSTED: tl.constexpr, V: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):  # fmt: skip
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
    tokens_ptr, parents_ptr, nodes_ptr, drawn_ptr, logits_ptr, statistics_ptr, temperature_ptr, draft_probs_ptr,
    accept_uniforms_ptr, residual_uniforms_ptr, N, path_ptr, accepted_ptr, next_token_ptr,
    REPLACEMENT: tl.constexpr, EXHAUSTED: tl.constexpr, V: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):  # fmt: skip
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


def rejection_walk_spec(bound: Bound) -> KernelSpec:
    rule = {"REPLACEMENT": bound.attributes["replacement"], "EXHAUSTED": EXHAUSTED}
    # Half a block: the list is compared with the block in registers, which a whole one would spill on sm_120.
    return walk_spec(REJECTION_WALK, bound, rejection_walk_kernel, ("N", "K"), DENSE=False, BLOCK=BLOCK // 2, **rule)


def rejection_walk_dense_spec(bound: Bound) -> KernelSpec:
    rule = {"REPLACEMENT": bound.attributes["replacement"], "EXHAUSTED": EXHAUSTED}
    return walk_spec(REJECTION_WALK_DENSE, bound, rejection_walk_dense_kernel, ("N",), DENSE=True, BLOCK=BLOCK, **rule)
