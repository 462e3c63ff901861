"""commit_rows in numpy: the oracle of the kernel, and the twin that the host runs."""

from __future__ import annotations

import numpy as np

from specrun.plugins.commit_rows.contract import CONTRACT
from specrun.plugins.errors import ContractError


def commit_rows(
    caches: np.ndarray, context_lengths: np.ndarray, path: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A changed copy of ``caches`` [C, B, H_kv, S, D] and the new lengths int64 [B]; row by row, as the op is defined.

    Raises ContractError on shapes, types, a count or a path that the contract does not allow.
    """
    _check(caches, context_lengths, path, counts)
    committed, lengths = caches.copy(), context_lengths.copy()
    for lane, length in enumerate(context_lengths.tolist()):
        if length < 0:
            continue
        for row in range(int(counts[lane])):
            committed[:, lane, :, length + row] = caches[:, lane, :, length + int(path[lane, row])]
        lengths[lane] = length + counts[lane]
    return committed, lengths


def commit_rows_in_place(
    caches: np.ndarray, context_lengths: np.ndarray, path: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """The same on ``caches`` itself, moving only rows that change place; returns the new lengths."""
    _check(caches, context_lengths, path, counts)
    for lane, (length, count) in enumerate(zip(context_lengths.tolist(), counts.tolist(), strict=True)):
        nodes = path[lane, :count]
        staying = int(np.argmax(nodes != np.arange(count))) if (nodes != np.arange(count)).any() else count
        if length >= 0 and staying < count:
            moved = caches[:, lane][:, :, length + nodes[staying:]]  # a copy, so overlap is safe
            caches[:, lane, :, length + staying : length + count] = moved
    return np.where(context_lengths < 0, context_lengths, context_lengths + counts)


def _check(caches: np.ndarray, context_lengths: np.ndarray, path: np.ndarray, counts: np.ndarray) -> None:
    inputs = {"caches": caches, "context_lengths": context_lengths, "path": path, "counts": counts}
    dims = CONTRACT.check(inputs).dims
    if counts.min() < 0 or counts.max() > dims["P"]:
        wrong = counts[(counts < 0) | (counts > dims["P"])][0]
        raise ContractError(CONTRACT.name, "counts", f"{wrong}", f"0 to P = {dims['P']}")
    for length, nodes in ((n, p[:c].tolist()) for n, p, c in zip(context_lengths, path, counts, strict=True) if n >= 0):
        if any(node <= before for before, node in zip([-1, *nodes], nodes, strict=False)):
            raise ContractError(CONTRACT.name, "path", f"{nodes}", "node indices from 0 up, strictly ascending")
        if nodes and length + nodes[-1] >= dims["S"]:
            supported = f"rows below S = {dims['S']}"
            raise ContractError(CONTRACT.name, "path", f"node {nodes[-1]} after {length} rows", supported)
