"""WeightSource: a tensor of a checkpoint that is read when asked, in whole or by rows, and never kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from specrun.errors import CheckpointError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WEIGHT_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": BFLOAT16}

_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class WeightSource:
    """``load(rows)`` returns those rows (axis 0) in ``dtype``; it reads from a memory-mapped file each time."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[slice], np.ndarray]

    def read(self) -> np.ndarray:
        """The whole tensor, ``shape`` in ``dtype``."""
        return self.load(slice(None))

    def read_float32(self) -> np.ndarray:
        """The whole tensor in float32."""
        return self.read().astype(np.float32, copy=False)

    def renamed(self, name: str) -> WeightSource:
        """The same tensor under another name."""
        return replace(self, name=name)

    def rows(self, name: str, start: int, stop: int) -> WeightSource:
        """A lazy view of rows ``start`` to ``stop``."""

        def load(rows: slice) -> np.ndarray:
            first, last, _ = rows.indices(stop - start)
            return self.load(slice(start + first, start + last))

        return WeightSource(name, (stop - start, *self.shape[1:]), self.dtype, load)

    def same_values(self, other: WeightSource) -> bool:
        """Whether both hold the same values, compared a few rows at a time."""
        if self.shape != other.shape:
            return False
        step = max(1, _CHUNK_VALUES // max(1, int(np.prod(self.shape[1:]))))
        starts = range(0, self.shape[0], step)
        return all(
            np.array_equal(self.load(slice(i, i + step)), other.load(slice(i, i + step)), equal_nan=False)
            for i in starts
        )


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises CheckpointError if ``array`` (any floating dtype) holds NaN or infinite values."""
    flat = np.ascontiguousarray(array).reshape(-1)
    for start in range(0, flat.size, _CHUNK_VALUES):
        bad = ~np.isfinite(flat[start : start + _CHUNK_VALUES])
        if bad.any():
            first = start + int(np.argmax(bad))
            place = tuple(int(i) for i in np.unravel_index(first, array.shape))
            raise CheckpointError(
                f"tensor {name} holds a value that is not finite ({flat[first]!s}) at index {place}; every weight must "
                "be finite. The checkpoint is damaged or its training diverged; download or convert it again."
            )
