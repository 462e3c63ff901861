"""The uniforms: repeatable, independent of everything but seed and place, and never 1."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from specrun import random as random_module
from specrun.distribution import Distribution
from specrun.random import LARGEST, Stream, Uniforms


def test_b09_a_draw_depends_on_seed_choice_and_place_only():
    first, again = Uniforms(7), Uniforms(7)
    places = [(p, s, i) for p in (0, 1, 5000) for s in Stream for i in range(3)]
    drawn = [first.draw(*place) for place in places]
    assert [again.draw(*place) for place in reversed(places)] == drawn[::-1]
    assert len(set(drawn)) == len(places)
    assert Uniforms(8).draw(0, Stream.TARGET) != Uniforms(7).draw(0, Stream.TARGET)
    assert Uniforms(7, choice=1).draw(0, Stream.TARGET) != Uniforms(7).draw(0, Stream.TARGET)


def test_b09_the_same_numbers_in_another_process():
    code = "from specrun.random import Stream, Uniforms; print(repr(Uniforms(7, 2).draw(11, Stream.RESIDUAL, 3)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(out) == Uniforms(7, 2).draw(11, Stream.RESIDUAL, 3)


def test_seeds_up_to_64_bits_are_distinct():
    draws = {Uniforms(seed).draw(3, Stream.DRAFT) for seed in (0, 1, 2**32, 2**63, 2**64 - 1)}
    assert len(draws) == 5


@pytest.mark.parametrize("stream", list(Stream))
def test_a_stream_is_uniform(stream):
    u = Uniforms(1)
    sample = [u.draw(p, stream, i) for p in range(500) for i in range(4)]
    assert stats.kstest(sample, "uniform").pvalue > 1e-3


def test_streams_are_not_correlated():
    u = Uniforms(2)
    a, b = ([u.draw(p, s) for p in range(2000)] for s in (Stream.ACCEPT, Stream.RESIDUAL))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.08


class _Raw:
    """A generator stuck at one raw value."""

    def __init__(self, raw: int) -> None:
        self.raw = raw

    def __call__(self, **_: object) -> _Raw:
        return self

    def random_raw(self) -> int:
        return self.raw


def test_the_largest_uniform_stays_below_one_in_float32(monkeypatch):
    monkeypatch.setattr(random_module, "Philox", _Raw(2**64 - 1))
    u = Uniforms(0).draw(0, Stream.ACCEPT)
    assert u == LARGEST and np.float32(u) < 1
    assert Uniforms(0).choose(Distribution(None, np.array([1, 0, 1, 0], np.float32)), 0, Stream.TARGET) == 2


def test_a_zero_uniform_accepts_nothing_of_probability_zero(monkeypatch):
    monkeypatch.setattr(random_module, "Philox", _Raw(0))
    u = Uniforms(0)
    assert not u.accept(0.0, 0.5, 0, 1)
    assert not u.accept(0.0, 0.0, 0, 1)
    assert u.accept(1e-300, 0.5, 0, 1)
    assert u.choose(Distribution(None, np.array([0, 0, 1, 1], np.float32)), 0, Stream.TARGET) == 2


def test_accept_happens_with_probability_p_over_q():
    u = Uniforms(3)
    hits = sum(u.accept(0.3, 0.4, position, 1) for position in range(20000))
    assert stats.binomtest(hits, 20000, 0.75).pvalue > 1e-3
    assert all(u.accept(0.4, 0.4, position, 1) for position in range(2000))
    assert all(u.accept(0.1, 0.0, position, 1) for position in range(100))
