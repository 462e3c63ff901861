"""draft_tree: kernels and host twin against the oracle, ties included, and the oracle against EAGLE-2's definition."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.plugins.draft_tree import host, reference
from specrun.plugins.draft_tree.contract import chunk_count
from specrun.plugins.draft_tree.reference import Level, Reranked
from specrun.plugins.errors import ContractError
from specrun.plugins.registry import OPS
from tests.compare import assert_close, assert_equal
from tests.plugins.interpreter import Interpreter


def expand_on_device(
    interpreter: Interpreter, logits: np.ndarray, parent_scores: np.ndarray, children: int, width: int
) -> Level:
    chunks = chunk_count(logits.shape[-1])
    parts = interpreter.run(OPS["draft_candidates"], {"logits": logits}, children=children, chunks=chunks)
    made = interpreter.run(OPS["draft_children"], {**parts, "parent_scores": parent_scores})
    frontier = interpreter.run(OPS["draft_frontier"], {"scores": made["scores"]}, width=width)
    return Level(made["tokens"], made["scores"], frontier["frontier"])


def level_inputs(nodes: int, vocabulary: int, tied: bool) -> tuple[np.ndarray, np.ndarray]:
    """Two lanes; ``tied`` draws logits from five values, the same for every node, so that sums tie exactly as well."""
    rng = np.random.default_rng(nodes + vocabulary)
    if tied:
        row = rng.integers(-2, 3, (2, 1, vocabulary)).astype(np.float32)
        return np.repeat(row, nodes, axis=1), np.full((2, nodes), -1.5, np.float32)
    logits = rng.standard_normal((2, nodes, vocabulary), dtype=np.float32) * 4
    return logits, -rng.random((2, nodes), dtype=np.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("nodes", "vocabulary", "children", "width"), [(1, 7, 3, 3), (4, 5000, 4, 4), (3, 9000, 2, 6)])
def test_growing_a_level(
    interpreter: Interpreter, nodes: int, vocabulary: int, children: int, width: int, tied: bool
) -> None:
    logits, scores = level_inputs(nodes, vocabulary, tied)
    expected = reference.expand(logits, scores, children, width)
    twin = host.expand(logits, scores, children, width)
    for found in (twin, expand_on_device(interpreter, logits, scores, children, width)):
        assert_equal(found.tokens, expected.tokens, "tokens")
        assert_close(found.scores, expected.scores, 1e-6, "scores")
        assert_equal(found.frontier, expected.frontier, "frontier")


def test_banned_and_undefined_tokens_come_last(interpreter: Interpreter) -> None:
    """-inf (a padded or banned id) and NaN are candidates of score -inf; a row of nothing else is no error."""
    logits = np.full((1, 2, 6), -np.inf, np.float32)
    logits[0, 0, [1, 2, 4]] = [0.0, 0.0, np.nan]
    scores = np.zeros((1, 2), np.float32)
    expected = reference.expand(logits, scores, 3, 2)
    assert expected.tokens.tolist() == [[[1, 2, 0], [0, 1, 2]]]
    assert_close(expected.scores[0, 0], np.array([np.log(0.5), np.log(0.5), -np.inf]), 1e-6)
    for found in (host.expand(logits, scores, 3, 2), expand_on_device(interpreter, logits, scores, 3, 2)):
        assert_equal(found.tokens, expected.tokens)
        assert_close(found.scores, expected.scores, 1e-6)


def pool_of(rng: np.random.Generator, size: int, values: int) -> dict[str, np.ndarray]:
    """A random pool in which parents come first and no child scores above its parent; few ``values`` make many ties."""
    parents, depths, scores = [], [], []
    for place in range(size):
        parent = int(rng.integers(-1, place)) if place else -1
        parents.append(parent)
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
        scores.append((scores[parent] if parent >= 0 else 0.0) - float(rng.integers(0, values)))
    order = np.argsort(depths, kind="stable")  # level by level, as growth makes them
    moved = np.append(np.argsort(order), -1)
    return {
        "pool_tokens": rng.integers(0, 1000, (1, size)),
        "pool_scores": np.array([scores], np.float32)[:, order],
        "pool_parents": moved[np.array([parents])[:, order]],
        "pool_depths": np.array([depths])[:, order],
        "root_tokens": np.array([5]),
    }


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 40), values=st.integers(1, 4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_rerank_twin_matches_oracle_and_keeps_parents(seed: int, size: int, values: int, data: st.DataObject) -> None:
    pool = pool_of(np.random.default_rng(seed), size, values)
    nodes = data.draw(st.integers(2, size + 1))
    expected = reference.rerank(**pool, nodes=nodes)
    for name, value in host.rerank(**pool, nodes=nodes)._asdict().items():
        assert_equal(value, getattr(expected, name), name)
    kept = set(expected.kept[0].tolist())
    assert all(int(pool["pool_parents"][0, place]) in kept for place in kept - {-1})
    lowest = min(pool["pool_scores"][0, place] for place in kept - {-1})
    assert all(place in kept for place in range(size) if pool["pool_scores"][0, place] > lowest)


@pytest.mark.parametrize(("size", "nodes", "values"), [(1, 2, 2), (30, 8, 2), (70, 60, 3), (33, 34, 1)])
def test_rerank_kernel(interpreter: Interpreter, size: int, nodes: int, values: int) -> None:
    lanes = [pool_of(np.random.default_rng(seed), size, values) for seed in range(2)]
    pool = {name: np.concatenate([lane[name] for lane in lanes]) for name in lanes[0]}
    pool["pool_scores"][1, -1] = np.nan
    expected = reference.rerank(**pool, nodes=nodes)._asdict()
    for name, value in interpreter.run(OPS["draft_rerank"], pool, nodes=nodes).items():
        assert_equal(value, expected[name], name)


def test_on_a_tie_the_parent_goes_before_its_child() -> None:
    """The trap of the algorithm: a child that follows with certainty ties with its parent, here for the last place."""
    pool = {
        "pool_tokens": np.array([[7, 8, 9]]),
        "pool_scores": np.array([[-1.0, -1.0, -1.0]], np.float32),
        "pool_parents": np.array([[-1, -1, 0]]),
        "pool_depths": np.array([[1, 1, 2]]),
        "root_tokens": np.array([5]),
    }
    for rerank in (reference.rerank, host.rerank):
        tree = rerank(**pool, nodes=3)
        assert tree.tokens.tolist() == [[5, 7, 8]]
        assert tree.parents.tolist() == [[-1, 0, 0]]


def test_growth_and_rerank_find_the_best_paths() -> None:
    """A draft whose law depends on depth alone: the kept nodes are the best of all that EAGLE-2's growth visits."""
    rng = np.random.default_rng(4)
    levels, width = rng.standard_normal((3, 12), dtype=np.float32) * 2, 3
    log_q = levels - np.log(np.exp(levels).sum(1, keepdims=True))
    tree = grow(levels, width, nodes=8)
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    visited = []
    for law in log_q:
        best = np.argsort(-law)[:width]
        children = [(score + float(law[t]), (*path, int(t))) for score, path in frontier for t in best]
        visited += children
        frontier = sorted(children, reverse=True)[:width]
    expected = {path for _, path in sorted(visited, reverse=True)[:7]}
    paths = [tuple(tree.tokens[0, np.flatnonzero(row)[1:]].tolist()) for row in tree.tree_mask[0]]
    assert set(paths) == expected | {()}
    assert tree.depths[0].tolist() == [len(path) for path in paths]


def grow(levels: np.ndarray, width: int, nodes: int) -> Reranked:
    """A tree of ``nodes`` nodes from one law of logits a level, [levels, V], through the host's functions."""
    pool = {name: np.zeros((1, 0), kind) for name, kind in POOL.items()}
    places, scores = np.array([[-1]]), np.zeros((1, 1), np.float32)
    for depth, law in enumerate(levels, start=1):
        logits = np.repeat(law[None, None], scores.shape[1], axis=1)
        level = host.expand(logits, scores, width, width)
        size, count = pool["pool_tokens"].shape[1], level.scores[0].size
        grown = {
            "pool_tokens": level.tokens.reshape(1, -1),
            "pool_scores": level.scores.reshape(1, -1),
            "pool_parents": np.repeat(places, width, axis=1),
            "pool_depths": np.full((1, count), depth),
        }
        pool = {name: np.concatenate([pool[name], value], axis=1) for name, value in grown.items()}
        places = size + level.frontier
        scores = np.take_along_axis(level.scores.reshape(1, -1), level.frontier, 1)
    return host.rerank(**pool, root_tokens=np.array([0]), nodes=nodes)


POOL = {"pool_tokens": np.int64, "pool_scores": np.float32, "pool_parents": np.int64, "pool_depths": np.int64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 5}, "argument 'nodes': found 5 with P = 3; supported: at most P + 1"),
        ({"nodes": 1}, "argument 'nodes': found nodes = 1; supported: 2 to 128"),
        ({"pool_depths": np.ones((1, 4), int)}, "argument 'pool_depths': found shape [1, 4]; supported: [B, P] with P"),
    ],
)
def test_values_outside_the_contract_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = {**pool_of(np.random.default_rng(0), 3, 2), "nodes": 3, **change}
    for rerank in (reference.rerank, host.rerank):
        with pytest.raises(ContractError, match=re.escape(f"draft_rerank: {message}")):
            rerank(**arguments)


def test_more_children_than_tokens_are_refused() -> None:
    for expand in (reference.expand, host.expand):
        with pytest.raises(ContractError, match=r"draft_candidates: argument 'children': found 4 with V = 3"):
            expand(np.zeros((1, 1, 3), np.float32), np.zeros((1, 1), np.float32), 4, 1)
