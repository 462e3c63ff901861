"""draft_tree as four TensorRT plugins."""

from __future__ import annotations

from specrun.plugins.draft_tree import kernel
from specrun.plugins.draft_tree.contract import CANDIDATES, CHILDREN, FRONTIER, RERANK
from specrun.plugins.registration import register_op


def register() -> None:
    """Put the ops into TensorRT's plugin registry of this process."""
    register_op(CANDIDATES, kernel.candidates_spec)
    register_op(CHILDREN, kernel.children_spec)
    register_op(FRONTIER, kernel.frontier_spec)
    register_op(RERANK, kernel.rerank_spec)
