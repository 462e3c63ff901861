"""Inputs for tree attention, shared by its tests: everything that must not be read is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from specrun.plugins.registry import OPS
from specrun.plugins.tree_attention.contract import tile_rows
from specrun.plugins.tree_attention.reference import tree_attention
from tests.plugins.interpreter import Interpreter

CACHES = ("key_cache", "value_cache")


@dataclass(frozen=True)
class Case:
    """``contexts`` has one entry a sequence; ``nodes`` new nodes each, in a random tree."""

    contexts: tuple[int, ...]
    nodes: int
    heads: int = 2
    kv_heads: int = 1
    size: int = 64
    dtype: str = "float32"
    splits: int = 1
    softcap: float = 0.0
    window: int = 0
    tile: int | None = None
    spare: int = 9  # cache rows beyond what the longest sequence needs

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != type(self).__dataclass_fields__[k].default}
        return "-".join(f"{k}{v}" for k, v in changed.items()).replace(" ", "")


def random_parents(rng: np.random.Generator, nodes: int) -> list[int]:
    """A random tree in which parents come first; node 0 is the root."""
    return [-1] + [int(rng.integers(0, node)) for node in range(1, nodes)]


def mask_of(parents: list[int]) -> np.ndarray:
    """Each node sees its ancestors and itself."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], start=1):
        mask[node] |= mask[parent]
    return mask


def inputs_of(case: Case, parents: list[int] | None = None, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype
    batch, capacity = len(case.contexts), max(case.contexts) + case.nodes + case.spare
    masks = [mask_of(parents or random_parents(rng, case.nodes)) for _ in range(batch)]
    cache_shape = (batch, case.kv_heads, capacity, case.size)
    inputs = {
        "query": rng.standard_normal((batch, case.nodes, case.heads, case.size)).astype(kind),
        "key_cache": rng.standard_normal(cache_shape, dtype=np.float32).astype(kind),
        "value_cache": rng.standard_normal(cache_shape, dtype=np.float32).astype(kind),
        "context_lengths": np.array(case.contexts),
        "positions": np.array([c + m.sum(1) - 1 for c, m in zip(case.contexts, masks, strict=True)]),
        "tree_mask": np.stack(masks),
    }
    for lane, context in enumerate(case.contexts):
        end = context + case.nodes if context >= 0 else 0
        below = max(0, context - case.window + 1) // 64 * 64 if case.window else 0  # whole blocks under the window
        for name in CACHES:
            inputs[name][lane, :, end:] = np.nan
            inputs[name][lane, :, :below] = np.nan
    return inputs


def attributes_of(case: Case) -> dict[str, float | int]:
    tile = case.tile or tile_rows(case.nodes, case.heads, case.kv_heads)
    scale = case.size**-0.5
    return {
        "scale": scale,
        "softcap": case.softcap,
        "window": case.window,
        "splits": case.splits,
        "tile_rows": tile,
    }


def oracle(inputs: dict[str, np.ndarray], **attributes: Any) -> np.ndarray:
    """In float64, from a cache without poison: what the kernels give if they read only what they may."""
    clean = {name: inputs[name].astype(np.float32) for name in ("query", *CACHES)}
    clean |= {name: np.nan_to_num(clean[name]) for name in CACHES}
    return tree_attention(**{**inputs, **clean}, **attributes)


def run_kernels(interpreter: Interpreter, inputs: dict[str, np.ndarray], **attributes: float | int) -> np.ndarray:
    """Both kernels, one after the other: attention [B, N, H, D] in the query's type."""
    partials = interpreter.run(OPS["tree_attention_split"], inputs, **attributes)
    merged = interpreter.run(OPS["tree_attention_merge"], partials, output_type=inputs["query"].dtype.name)
    return merged["attention"]
