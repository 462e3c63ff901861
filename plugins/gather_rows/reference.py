"""gather_rows in numpy: the oracle of the kernel, and what the host runs."""

from __future__ import annotations

import numpy as np

from specrun.plugins.errors import ContractError
from specrun.plugins.gather_rows.contract import CONTRACT


def gather_rows(source: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of ``source`` [B, N, H] chosen by ``rows`` int64 [B, M]: [B, M, H]; a negative row gives zeros.

    Raises ContractError on other shapes or types, and on a row at or past N.
    """
    nodes = CONTRACT.check({"source": source, "rows": rows}).dims["N"]
    if rows.size and rows.max() >= nodes:
        raise ContractError(CONTRACT.name, "rows", f"row {rows.max()}", f"rows below N = {nodes}")
    gathered = np.take_along_axis(source, np.maximum(rows, 0)[:, :, None], axis=1)
    gathered[rows < 0] = 0
    return gathered
