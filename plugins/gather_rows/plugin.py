"""gather_rows as a TensorRT plugin."""

from __future__ import annotations

from specrun.plugins.gather_rows.contract import CONTRACT
from specrun.plugins.gather_rows.kernel import spec
from specrun.plugins.registration import register_op


def register() -> None:
    """Put the op into TensorRT's plugin registry of this process."""
    register_op(CONTRACT, spec)
