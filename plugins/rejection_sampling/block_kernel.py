"""Block verification: one program judges one sequence's chain as a whole."""

from __future__ import annotations

import triton
import triton.language as tl

from specrun.plugins.compile import KernelSpec
from specrun.plugins.contract import Bound
from specrun.plugins.rejection_sampling.contract import BLOCK_WALK, BLOCK_WALK_DENSE
from specrun.plugins.rejection_sampling.law_kernel import draft_at, draw_at, mass, target
from specrun.plugins.rejection_sampling.match_kernel import matched, store_verdict, walk_spec

BLOCK = 2048


@triton.jit
def blocked(
    tokens_ptr, drawn_ptr, logits_ptr, statistics_ptr, draft_tokens_ptr, draft_probs_ptr, accept_ptr, residual_ptr,
    count, K, V: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        equal = kept_mass <= 0  # p = q up to rounding: draw from p
        s = tl.where(equal, 1.0, kept_prefix)
        c = tl.where(equal, 0.0, 1.0)
        goal = tl.load(residual_ptr + node) * tl.where(equal, 1.0, kept_mass)
        token = draw_at(
            node, s, c, goal, logits_ptr, statistics_ptr, draft_tokens_ptr, draft_probs_ptr, K, V, DENSE, BLOCK
        )
    return node, token


@triton.jit
def block_walk_kernel(
    tokens_ptr, parents_ptr, nodes_ptr, drawn_ptr, logits_ptr, statistics_ptr, temperature_ptr, draft_tokens_ptr,
    draft_probs_ptr, accept_uniforms_ptr, residual_uniforms_ptr, N, K, path_ptr, accepted_ptr, next_token_ptr,
    V: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
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
    tokens_ptr, parents_ptr, nodes_ptr, drawn_ptr, logits_ptr, statistics_ptr, temperature_ptr, draft_probs_ptr,
    accept_uniforms_ptr, residual_uniforms_ptr, N, path_ptr, accepted_ptr, next_token_ptr, V: tl.constexpr,
    DENSE: tl.constexpr, BLOCK: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
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


def block_walk_spec(bound: Bound) -> KernelSpec:
    return walk_spec(BLOCK_WALK, bound, block_walk_kernel, ("N", "K"), DENSE=False, BLOCK=BLOCK)


def block_walk_dense_spec(bound: Bound) -> KernelSpec:
    return walk_spec(BLOCK_WALK_DENSE, bound, block_walk_dense_kernel, ("N",), DENSE=True, BLOCK=BLOCK)
