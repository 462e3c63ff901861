"""commit_rows as a TensorRT plugin; the caches are changed in place."""

from __future__ import annotations

from specrun.plugins.commit_rows.contract import CONTRACT
from specrun.plugins.commit_rows.kernel import spec
from specrun.plugins.registration import register_op


def register() -> None:
    """Put the op into TensorRT's plugin registry of this process."""
    register_op(CONTRACT, spec)
