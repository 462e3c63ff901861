"""One comparer for every kernel and its oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# Largest norm of the difference over the norm of the expected, by the type that the kernel reads and writes.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float, name: str = "array") -> None:
    """Shapes equal; NaN and infinities in the same places; the rest within ``tolerance`` relative to the whole norm.

    The message gives the first coordinates that differ and both values there. ``tolerance`` 0 asks for equality.
    """
    assert found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}"
    left, right = np.asarray(found), np.asarray(expected)
    if tolerance == 0 and right.dtype.kind not in "fV":
        _fail_at(left != right, left, right, f"{name}: values differ")
        return
    left, right = left.astype(np.float64), right.astype(np.float64)
    _fail_at(np.isnan(left) != np.isnan(right), left, right, f"{name}: NaN in other places")
    infinite = np.isinf(left) | np.isinf(right)
    _fail_at(infinite & (left != right), left, right, f"{name}: infinities differ")
    finite = np.isfinite(left) & np.isfinite(right)
    gap = np.where(finite, left, 0) - np.where(finite, right, 0)
    scale = float(np.linalg.norm(right[finite])) or 1.0
    error = float(np.linalg.norm(gap)) / scale
    if error > tolerance:
        far = np.abs(gap) > tolerance * scale / np.sqrt(max(gap.size, 1))
        _fail_at(far, left, right, f"{name}: relative error {error:.3g} above {tolerance:.3g}")


def assert_equal(found: np.ndarray, expected: np.ndarray, name: str = "array") -> None:
    """Bit for bit, shapes and types included."""
    assert found.dtype == expected.dtype, f"{name}: dtype {found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}"
    bits = np.dtype(f"u{found.dtype.itemsize}")
    differs = np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(expected).view(bits)
    _fail_at(differs, found, expected, f"{name}: bits differ")


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A buffer whose every element is wrong: NaN, an integer that no op gives, or True."""
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    poison = np.nan if kind.kind in "fV" else True if kind.kind == "b" else np.iinfo(kind).max - 11
    return np.full(shape, poison, dtype=kind)


def _fail_at(differs: np.ndarray, left: np.ndarray, right: np.ndarray, what: str) -> None:
    if not differs.any():
        return
    place = tuple(int(i) for i in np.argwhere(differs)[0])
    share = f"{int(differs.sum())} of {differs.size}"
    raise AssertionError(f"{what} ({share}), first at {list(place)}: found {left[place]}, expected {right[place]}")
