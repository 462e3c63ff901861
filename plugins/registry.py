"""Every op by name: its contract now, its kernel and its TensorRT registration when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from specrun.plugins.commit_rows.contract import CONTRACT as COMMIT_ROWS
from specrun.plugins.compile import KernelSpec
from specrun.plugins.contract import Bound, OpContract
from specrun.plugins.draft_tree.contract import CANDIDATES, CHILDREN, FRONTIER, RERANK
from specrun.plugins.gather_rows.contract import CONTRACT as GATHER_ROWS
from specrun.plugins.rejection_sampling.contract import CONTRACTS as REJECTION_SAMPLING
from specrun.plugins.tree_attention.contract import MERGE, SPLIT


@dataclass(frozen=True, slots=True)
class Op:
    """One op. ``folder`` is its package here; ``spec_name`` the function of its ``kernel.py`` that builds a variant."""

    contract: OpContract
    folder: str
    spec_name: str = "spec"

    def spec(self, bound: Bound) -> KernelSpec:
        """The kernel variant for these types, static sizes and attributes; needs Triton."""
        build: Callable[[Bound], KernelSpec] = getattr(self._module("kernel"), self.spec_name)
        return build(bound)

    def _module(self, name: str) -> Any:
        return import_module(f"specrun.plugins.{self.folder}.{name}")


_ALL = (
    Op(CANDIDATES, "draft_tree", "candidates_spec"),
    Op(CHILDREN, "draft_tree", "children_spec"),
    Op(FRONTIER, "draft_tree", "frontier_spec"),
    Op(RERANK, "draft_tree", "rerank_spec"),
    Op(COMMIT_ROWS, "commit_rows"),
    Op(GATHER_ROWS, "gather_rows"),
    Op(SPLIT, "tree_attention", "split_spec"),
    Op(MERGE, "tree_attention", "merge_spec"),
    *(Op(contract, "rejection_sampling", f"{contract.name}_spec") for contract in REJECTION_SAMPLING),
)
OPS: dict[str, Op] = {op.contract.name: op for op in _ALL}


def register_all() -> None:
    """Put every op into TensorRT's plugin registry of this process; needs TensorRT's Python package and Triton."""
    for folder in dict.fromkeys(op.folder for op in OPS.values()):
        import_module(f"specrun.plugins.{folder}.plugin").register()
