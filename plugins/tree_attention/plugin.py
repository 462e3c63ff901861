"""tree_attention as two TensorRT plugins; the partial results between them are ordinary tensors of the network."""

from __future__ import annotations

from specrun.plugins.registration import register_op
from specrun.plugins.tree_attention.contract import MERGE, SPLIT
from specrun.plugins.tree_attention.kernel import merge_spec, split_spec


def register() -> None:
    """Put both ops into TensorRT's plugin registry of this process."""
    register_op(SPLIT, split_spec)
    register_op(MERGE, merge_spec)
