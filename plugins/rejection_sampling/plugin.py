"""Rejection sampling as TensorRT plugins: sample_rows, and a walk for every rule."""

from __future__ import annotations

from specrun.plugins.registration import register_op
from specrun.plugins.registry import OPS
from specrun.plugins.rejection_sampling.contract import CONTRACTS


def register() -> None:
    """Put the ops into TensorRT's plugin registry of this process."""
    for contract in CONTRACTS:
        register_op(contract, OPS[contract.name].spec)
