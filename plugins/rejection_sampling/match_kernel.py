"""The walks that need no q: sample-and-match, and typical acceptance. One program judges one sequence's draft.

Nodes come parents first, so one scan over them in order is the whole walk: a node is tried when its parent is where the
walk stands.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from specrun.plugins.compile import KernelSpec, parameters_of, sizes_of
from specrun.plugins.contract import Bound, OpContract
from specrun.plugins.launch import Extent
from specrun.plugins.rejection_sampling.contract import MATCH_WALK, TYPICAL_WALK
from specrun.plugins.rejection_sampling.law_kernel import target

WARPS = 8
NODES = 128  # the contract's limit: a path fits one vector


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
    tokens_ptr, parents_ptr, nodes_ptr, drawn_ptr, N, path_ptr, accepted_ptr, next_token_ptr, NODES: tl.constexpr,
):  # fmt: skip
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
    tokens_ptr, parents_ptr, logits_ptr, statistics_ptr, count, epsilon: tl.constexpr, delta: tl.constexpr,
    V: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
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
    tokens_ptr, parents_ptr, nodes_ptr, drawn_ptr, logits_ptr, statistics_ptr, temperature_ptr, N, path_ptr,
    accepted_ptr, next_token_ptr, epsilon: tl.constexpr, delta: tl.constexpr, V: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
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


def walk_spec(
    contract: OpContract, bound: Bound, function: Any, sizes: tuple[str, ...], **constants: Any
) -> KernelSpec:
    """A walk's variant: one program a sequence."""
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
    return walk_spec(MATCH_WALK, bound, match_walk_kernel, ("N",))


def typical_walk_spec(bound: Bound) -> KernelSpec:
    epsilon, delta = bound.attributes["epsilon"], bound.attributes["delta"]
    return walk_spec(TYPICAL_WALK, bound, typical_walk_kernel, ("N",), epsilon=epsilon, delta=delta)
