"""One check a kernel: fresh random inputs, and what to compare with what.

`tools/gpu_check.py` runs them at real sizes on a GPU, through the stored binaries; the tests here run them at small
sizes in the interpreter, so that what runs on a GPU once has run before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from specrun.plugins.commit_rows.reference import commit_rows
from specrun.plugins.draft_tree import host
from specrun.plugins.draft_tree.contract import CHUNK, chunk_count
from specrun.plugins.gather_rows.reference import gather_rows
from specrun.plugins.tree_attention.reference import merge
from tests.compare import TOLERANCE
from tests.plugins.attention_cases import Case, attributes_of, inputs_of, oracle
from tests.plugins.sampling_checks import WALKS, row_inputs, row_pairs, walk_inputs, walk_pairs

Arrays = dict[str, np.ndarray]
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (found, expected)


@dataclass(frozen=True)
class Check:
    """A kernel, sizes for a GPU and for the interpreter, inputs from them, and the pairs to compare."""

    op: str
    real: Mapping[str, Any]
    small: Mapping[str, Any]
    make: Callable[..., tuple[Arrays, dict[str, Any]]]
    pairs: Callable[[Arrays, Arrays, dict[str, Any]], Pairs]
    tolerance: float = 0.0

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{k}={v}' for k, v in self.real.items())})"


def _floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return rng.standard_normal(shape, dtype=np.float32).astype(kind)


def gather_inputs(
    rng: np.random.Generator, B: int, N: int, M: int, H: int, dtype: str
) -> tuple[Arrays, dict[str, Any]]:
    return {"source": _floats(rng, (B, N, H), dtype), "rows": rng.integers(-1, N, (B, M))}, {}


def gather_pairs(found: Arrays, inputs: Arrays, _: dict[str, Any]) -> Pairs:
    return {"gathered": (found["gathered"], gather_rows(**inputs))}


def commit_inputs(
    rng: np.random.Generator, C: int, B: int, heads: int, S: int, D: int, P: int, dtype: str
) -> tuple[Arrays, dict[str, Any]]:
    path = np.stack([np.sort(rng.choice(4 * P, P, replace=False)) for _ in range(B)])
    lengths = rng.integers(0, S - 4 * P, B)
    lengths[-1] = -1
    counts = rng.integers(0, P + 1, B)
    return {"caches": _floats(rng, (C, B, heads, S, D), dtype), "context_lengths": lengths, "path": path,
            "counts": counts}, {}  # fmt: skip


def commit_pairs(found: Arrays, inputs: Arrays, _: dict[str, Any]) -> Pairs:
    committed, lengths = commit_rows(**inputs)
    bits = f"u{committed.dtype.itemsize}"
    return {
        "committed": (found["committed"].view(bits), committed.view(bits)),
        "new_lengths": (found["new_lengths"], lengths),
    }


def attention_inputs(rng: np.random.Generator, case: Case) -> tuple[Arrays, dict[str, Any]]:
    return inputs_of(case, seed=int(rng.integers(1 << 31))), attributes_of(case)


def attention_pairs(found: Arrays, inputs: Arrays, attributes: dict[str, Any]) -> Pairs:
    values = {name: attributes[name] for name in ("scale", "softcap", "window")}
    return {"attention": (merge(found["partial"], found["partial_lse"]), oracle(inputs, **values))}


def merge_inputs(
    rng: np.random.Generator, B: int, N: int, H: int, splits: int, D: int, dtype: str
) -> tuple[Arrays, dict[str, Any]]:
    lse = rng.uniform(-50, 50, (B, N, H, splits)).astype(np.float32)
    lse[rng.random(lse.shape) < 0.2] = -np.inf
    partial = _floats(rng, (B, N, H, splits, D), "float32")
    partial[np.isneginf(lse)] = np.nan
    return {"partial": partial, "partial_lse": lse}, {"output_type": dtype}


def merge_pairs(found: Arrays, inputs: Arrays, _: dict[str, Any]) -> Pairs:
    return {"attention": (found["attention"], merge(**inputs))}


def candidate_inputs(rng: np.random.Generator, B: int, K: int, V: int, children: int) -> tuple[Arrays, dict[str, Any]]:
    return {"logits": _floats(rng, (B, K, V), "float32")}, {"children": children, "chunks": chunk_count(V)}


def candidate_pairs(found: Arrays, inputs: Arrays, attributes: dict[str, Any]) -> Pairs:
    logits, chunks = inputs["logits"], attributes["chunks"]
    padded = np.full((*logits.shape[:2], chunks * CHUNK), -np.inf, np.float32)
    padded[..., : logits.shape[2]] = logits
    parts = padded.reshape(*logits.shape[:2], chunks, CHUNK)
    order = np.argsort(-parts, axis=3, kind="stable")[..., : attributes["children"]]
    lse = np.log(np.exp(parts.astype(np.float64)).sum(3))
    return {
        "part_logits": (found["part_logits"], np.take_along_axis(parts, order, 3)),
        "part_tokens": (found["part_tokens"], (order + CHUNK * np.arange(chunks)[:, None]).astype(np.int32)),
        "part_lse": (found["part_lse"], lse),
    }


def children_inputs(rng: np.random.Generator, B: int, K: int, V: int, children: int) -> tuple[Arrays, dict[str, Any]]:
    inputs, attributes = candidate_inputs(rng, B, K, V, children)
    shape = (B, K, attributes["chunks"])
    blank = {"part_logits": np.zeros(0), "part_tokens": np.zeros(0), "part_lse": np.zeros(0)}
    parts = {name: pair[1] for name, pair in candidate_pairs(blank, inputs, attributes).items()}
    parts["part_lse"] = parts["part_lse"].astype(np.float32).reshape(shape)
    return {**parts, "parent_scores": -rng.random((B, K), dtype=np.float32)}, {}


def children_pairs(found: Arrays, inputs: Arrays, _: dict[str, Any]) -> Pairs:
    flat = inputs["part_logits"].reshape(*inputs["part_logits"].shape[:2], -1)
    tokens = inputs["part_tokens"].reshape(flat.shape)
    order = np.lexsort((tokens, -flat), axis=2)[..., : inputs["part_logits"].shape[3]]
    total = np.log(np.exp(inputs["part_lse"].astype(np.float64)).sum(2))
    scores = inputs["parent_scores"][..., None] + np.take_along_axis(flat, order, 2) - total[..., None]
    return {
        "tokens": (found["tokens"], np.take_along_axis(tokens, order, 2).astype(np.int64)),
        "scores": (found["scores"], scores),
    }


def frontier_inputs(
    rng: np.random.Generator, B: int, K: int, children: int, width: int
) -> tuple[Arrays, dict[str, Any]]:
    scores = -rng.integers(0, 40, (B, K, children)).astype(np.float32)  # many ties
    return {"scores": scores}, {"width": width}


def frontier_pairs(found: Arrays, inputs: Arrays, attributes: dict[str, Any]) -> Pairs:
    flat = inputs["scores"].reshape(len(inputs["scores"]), -1)
    return {"frontier": (found["frontier"], np.argsort(-flat, axis=1, kind="stable")[:, : attributes["width"]])}


def rerank_inputs(rng: np.random.Generator, B: int, P: int, nodes: int) -> tuple[Arrays, dict[str, Any]]:
    """A pool of growing depth in which each node's parent is among the nodes one level up."""
    depths = np.sort(rng.integers(1, 6, (B, P)), axis=1)
    depths[:, 0] = 1
    depths = np.minimum(depths, np.maximum.accumulate(np.r_["1", np.zeros((B, 1), int), depths[:, :-1]], axis=1) + 1)
    parents, scores = np.full((B, P), -1), np.zeros((B, P), np.float32)
    for lane in range(B):
        for place in range(P):
            above = np.flatnonzero(depths[lane, :place] == depths[lane, place] - 1)
            parents[lane, place] = rng.choice(above) if len(above) else -1
            base = scores[lane, parents[lane, place]] if len(above) else 0
            scores[lane, place] = base - rng.integers(0, 3)
    pool = {"pool_scores": scores, "pool_parents": parents, "pool_depths": depths}
    return {"pool_tokens": rng.integers(0, 1 << 17, (B, P)), **pool, "root_tokens": rng.integers(0, 99, B)}, {
        "nodes": nodes
    }


def rerank_pairs(found: Arrays, inputs: Arrays, attributes: dict[str, Any]) -> Pairs:
    expected = host.rerank(**inputs, nodes=attributes["nodes"])._asdict()
    return {name: (found[name], value) for name, value in expected.items()}


def _attention(dtype: str, small: Case, **real: Any) -> Check:
    sizes = {"case": Case(**real, dtype=dtype)}
    return Check("tree_attention_split", sizes, {"case": small}, attention_inputs, attention_pairs, TOLERANCE[dtype])


_SMALL_POOL = {"B": 2, "P": 20, "nodes": 8}
_SMALL_VOCABULARY = {"B": 1, "K": 2, "V": 5000, "children": 3}
_VOCABULARY = {"B": 4, "K": 10, "V": 128_256, "children": 10}
_LONG = (2000, 0, 4095, 777)

CHECKS = [
    Check(
        "gather_rows",
        {"B": 8, "N": 64, "M": 32, "H": 4096, "dtype": "bfloat16"},
        {"B": 2, "N": 3, "M": 2, "H": 48, "dtype": "bfloat16"},
        gather_inputs,
        gather_pairs,
    ),
    Check(
        "commit_rows",
        {"C": 16, "B": 4, "heads": 8, "S": 512, "D": 128, "P": 24, "dtype": "float16"},
        {"C": 2, "B": 2, "heads": 1, "S": 40, "D": 64, "P": 3, "dtype": "float16"},
        commit_inputs,
        commit_pairs,
    ),
    _attention("bfloat16", Case((9,), 2), contexts=_LONG, nodes=8, heads=32, kv_heads=8, size=128, splits=16),
    _attention("float16", Case((9,), 2), contexts=_LONG, nodes=60, heads=32, kv_heads=8, size=64, splits=8),
    _attention("float16", Case((9,), 2), contexts=_LONG, nodes=1, heads=14, kv_heads=2, size=80, splits=32),
    _attention("bfloat16", Case((9,), 2), contexts=_LONG, nodes=9, heads=4, kv_heads=1, size=256, softcap=50.0),
    _attention("float16", Case((9,), 2), contexts=_LONG, nodes=7, heads=8, kv_heads=8, size=96, window=512, splits=4),
    _attention("bfloat16", Case((9,), 2), contexts=(131_000,), nodes=32, heads=2, kv_heads=1, size=128, splits=64),
    _attention("float32", Case((9,), 2), contexts=(300, -1), nodes=16, heads=4, kv_heads=2, size=64, splits=3),
    Check(
        "tree_attention_merge",
        {"B": 4, "N": 16, "H": 32, "splits": 33, "D": 128, "dtype": "bfloat16"},
        {"B": 1, "N": 2, "H": 2, "splits": 5, "D": 80, "dtype": "bfloat16"},
        merge_inputs,
        merge_pairs,
        TOLERANCE["bfloat16"],
    ),
    Check("draft_candidates", _VOCABULARY, _SMALL_VOCABULARY, candidate_inputs, candidate_pairs, 1e-5),
    Check("draft_children", _VOCABULARY, _SMALL_VOCABULARY, children_inputs, children_pairs, 1e-5),
    Check(
        "draft_frontier",
        {"B": 8, "K": 10, "children": 10, "width": 10},
        {"B": 2, "K": 3, "children": 2, "width": 3},
        frontier_inputs,
        frontier_pairs,
    ),
    Check("draft_rerank", {"B": 8, "P": 610, "nodes": 60}, _SMALL_POOL, rerank_inputs, rerank_pairs),
    Check(
        "sample_rows",
        {"B": 8, "N": 8, "V": 128_256, "A": 64, "capacity": 4096},
        {"B": 5, "N": 1, "V": 900, "A": 20, "capacity": 256},
        row_inputs,
        row_pairs,
        1e-3,  # of the laws: float32 may see the nucleus end one token sooner or later
    ),
    *(
        Check(
            op,
            {"B": 16, "N": 8, "V": 128_256, "K": K, "op": op, **attributes},
            {"B": 4, "N": 5, "V": 700, "K": K, "op": op, **attributes},
            walk_inputs,
            walk_pairs(oracle),
        )
        for op, K, oracle, attributes in WALKS
    ),
]
