"""The kernel variants that are compiled in tests: every op of the registry, in its default configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrun.plugins.compile import KernelSpec
from specrun.plugins.contract import Bound, OpContract
from specrun.plugins.registry import OPS


@dataclass(frozen=True)
class Described:
    """A tensor's shape and dtype without its data."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Variant:
    """An op with sizes for its dimensions, dtypes for its type variables, and attributes."""

    op: str
    sizes: Mapping[str, int]
    types: Mapping[str, str]
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.op}-{'-'.join(self.types.values())}-{self.sizes.get('D', '')}"

    @property
    def contract(self) -> OpContract:
        return OPS[self.op].contract

    @property
    def inputs(self) -> dict[str, Described]:
        def describe(shape: tuple[str | int, ...], dtype: str) -> Described:
            return Described(tuple(self.sizes[s] if isinstance(s, str) else s for s in shape), dtype)

        return {t.name: describe(t.shape, self.types.get(t.type, t.type)) for t in self.contract.inputs}

    @property
    def bound(self) -> Bound:
        return self.contract.check(self.inputs, dict(self.attributes))

    @property
    def spec(self) -> KernelSpec:
        return OPS[self.op].spec(self.bound)


_HEADS = {"B": 2, "N": 8, "T": 8, "H": 32, "H_kv": 8, "S": 4096}
_TREE = {"B": 2, "N": 8, "V": 128_256, "K": 10}
_SPLIT = {"scale": 0.125, "splits": 8}

VARIANTS = [
    Variant("gather_rows", {"B": 2, "N": 8, "M": 5, "H": 2048}, {"T": "bfloat16"}, {}),
    Variant("commit_rows", {"C": 8, "B": 2, "H_kv": 8, "S": 4096, "D": 80, "P": 6}, {"T": "float16"}, {}),
    Variant("tree_attention_split", {**_HEADS, "D": 64}, {"T": "float16"}, {**_SPLIT, "tile_rows": 64}),
    Variant("tree_attention_split", {**_HEADS, "D": 128}, {"T": "bfloat16"}, {**_SPLIT, "tile_rows": 16}),
    Variant(
        "tree_attention_merge",
        {"B": 2, "N": 8, "H": 32, "splits": 20, "D": 128},
        {"output_type": "bfloat16"},
        {"output_type": "bfloat16"},
    ),
    Variant("draft_candidates", {"B": 2, "K": 10, "V": 32_000}, {}, {"children": 10, "chunks": 8}),
    Variant("draft_children", {"B": 2, "K": 10, "chunks": 8, "children": 10}, {}, {}),
    Variant("draft_frontier", {"B": 2, "K": 10, "children": 10}, {}, {"width": 10}),
    Variant("draft_rerank", {"B": 2, "P": 610}, {}, {"nodes": 60}),
    Variant("sample_rows", {**_TREE, "A": 16}, {}, {"capacity": 4096}),
    Variant("match_walk", _TREE, {}, {}),
    Variant("typical_walk", _TREE, {}, {"epsilon": 0.09, "delta": 0.3}),
    Variant("rejection_walk", _TREE, {}, {"replacement": False}),
    Variant("rejection_walk_dense", _TREE, {}, {"replacement": True}),
    Variant("block_walk", _TREE, {}, {}),
    Variant("block_walk_dense", _TREE, {}, {}),
]
