"""The comparer itself: what it lets pass, and what its messages point at."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compare import assert_close, assert_equal

EXPECTED = np.array([[1.0, np.nan, 3.0], [np.inf, -np.inf, 6.0]])


def test_equal_places_of_nan_and_infinity_pass() -> None:
    assert_close(EXPECTED + 1e-7, EXPECTED, 1e-6)
    assert_close(np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), 0.0)
    assert_close(np.zeros((0, 3)), np.zeros((0, 3)), 1e-6)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 1), 2.0, r"NaN in other places \(1 of 6\), first at \[0, 1\]: found 2.0, expected nan"),
        ((0, 2), np.nan, r"NaN in other places .* first at \[0, 2\]: found nan, expected 3.0"),
        ((1, 0), -np.inf, r"infinities differ .* first at \[1, 0\]: found -inf, expected inf"),
        ((1, 2), 6.1, r"relative error 0.0147 above 0.001 .* first at \[1, 2\]: found 6.1, expected 6.0"),
    ],
)
def test_first_mismatch_is_named(place: tuple[int, int], value: float, message: str) -> None:
    found = EXPECTED.copy()
    found[place] = value
    with pytest.raises(AssertionError, match=message):
        assert_close(found, EXPECTED, 1e-3)


def test_shapes_and_types_count() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(3,\)"):
        assert_close(np.zeros(2), np.zeros(3), 1.0)
    with pytest.raises(AssertionError, match="dtype float32, expected float64"):
        assert_equal(np.zeros(2, np.float32), np.zeros(2))


def test_bits_decide_equality() -> None:
    assert_equal(np.array([np.nan, 1.0]), np.array([np.nan, 1.0]))
    with pytest.raises(AssertionError, match=r"bits differ \(1 of 2\), first at \[1\]"):
        assert_equal(np.array([1.0, 0.0]), np.array([1.0, -0.0]))
