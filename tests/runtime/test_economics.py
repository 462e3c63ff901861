"""Costs, calibration and budgets: what is chosen is the best that can be chosen, and noise does not change it much."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun import calibration
from specrun.economics import CPU_PRIOR, Acceptance, Economics, PassCosts
from tests.runtime.tiny_engine import TinyEngine

curves = st.lists(st.floats(0.0, 0.6), min_size=20, max_size=20).map(
    lambda steps: {n + 1: 1 + float(np.sum(steps[:n])) for n in range(20)}
)
falling = st.lists(st.floats(0.01, 1.0), max_size=12).map(lambda r: sorted(r, reverse=True))


@settings(max_examples=60, deadline=None)
@given(curves, falling, st.floats(1.0, 3.0))
def test_the_width_chosen_is_the_best_of_all(curve, reaches, pace):
    economics = Economics(PassCosts(curve))
    economics.pace = pace

    def value(width):
        return sum(reaches[:width]) - pace * curve[width + 1]

    (chosen,) = economics.best_sizes([reaches])
    assert value(chosen) >= max(value(width) for width in range(len(reaches) + 1)) - 1e-9
    assert economics.value(reaches) == pytest.approx(value(chosen) - value(0), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(curves, falling, st.floats(1.0, 3.0))
def test_floors_never_end_a_draft_that_pays(curve, reaches, pace):
    economics = Economics(PassCosts(curve))
    economics.pace = pace
    (chosen,) = economics.best_sizes([reaches])
    floors = economics.floors(12)
    for k in range(chosen):
        assert max(reaches[k:chosen]) >= floors[k] - 1e-9


def test_one_width_for_a_batch():
    """A pass is as wide as its widest draft: one sequence's sure guess must pay for the others' padding."""
    costs = PassCosts({1: 1.0, 2: 1.3, 3: 1.6, 64: 10.0})
    economics = Economics(costs)
    assert economics.best_sizes([[0.9, 0.8]]) == [2]
    economics.start_pass(4)
    assert economics.best_sizes([[0.9, 0.8], [], [], []]) == [0, 0, 0, 0]
    assert economics.best_sizes([[0.9, 0.8]] * 4) == [2] * 4


def test_costs_between_and_beyond_points():
    costs = PassCosts({1: 1.0, 2: 1.2, 4: 1.4, 8: 2.0}, {4: {1: 1.5, 4: 3.0}})
    assert costs(3) == pytest.approx(1.3) and costs(10) == pytest.approx(2.3)
    assert costs(1, 4) == 1.5 and costs.relative(4, 4) == pytest.approx(2.0)
    assert 1.0 < costs(1, 2) < 1.5
    assert costs(2, 8) > costs(2, 4)
    modelled = PassCosts({1: 1.0, 2: 1.2, 4: 1.4, 8: 2.0})
    assert modelled(2, 4) == pytest.approx(2.0)


def test_pace_follows_and_never_falls_below_plain():
    economics = Economics(PassCosts(CPU_PRIOR))
    part = economics.of("suffix")
    for _ in range(300):
        part.observe_pass(2, 2.0)
    assert part.pace == pytest.approx(2 / 1.15, rel=0.02) and economics.pace == 1.0
    for _ in range(300):
        part.observe_pass(16, 1.0)
    assert part.pace == 1.0


def test_acceptance_learns_and_forgets():
    acceptance = Acceptance()
    assert acceptance.rate("x", 0.5) == 0.5
    for _ in range(500):
        acceptance.observe("x", True)
    assert acceptance.rate("x", 0.5) > 0.9
    for _ in range(200):
        acceptance.observe("x", False)
    assert acceptance.rate("x", 0.5) < 0.1


def test_noise_only_slows_passes_down():
    """Samples disturbed upwards, a whole point among them: the curve stays near the true one and never falls."""
    rng = np.random.default_rng(1)
    true = {1: 10.0, 2: 11.0, 4: 13.0, 8: 17.0, 16: 25.0}
    samples = {n: (t * (1 + 0.6 * (rng.random(12) < 0.4) * rng.random(12))).tolist() for n, t in true.items()}
    samples[4] = [40.0] * 12
    curve = calibration.typical(samples)
    curve = {n: seconds / curve[1] for n, seconds in curve.items()}
    assert list(curve.values()) == sorted(curve.values())
    for n in (2, 8, 16):
        assert curve[n] == pytest.approx(true[n] / 10, rel=0.05)
    assert curve[4] <= curve[8]


def test_a_context_shorter_than_the_measurements_is_enough():
    decoder = TinyEngine(max_length=20).decoder()
    (curve,) = calibration.measure(decoder, 16).values()
    assert set(curve) == {1, 2, 3, 4, 6, 8, 12, 16}


def test_attention_over_a_larger_cache_is_measured_where_the_cache_grows():
    decoder = TinyEngine(max_length=4000).decoder()
    curves = calibration.measure(decoder, 16)
    assert set(curves) == {256, 2304} and set(curves[2304]) == {1, 2, 4, 8, 16}
    assert curves[256][1] == 1.0
    decoder.cache.acquire()
    assert decoder.cache.capacity == 256  # measuring leaves no large cache behind


def test_costs_follow_the_caches_rows():
    """Attention adds to wide passes more than to narrow ones, so drafting pays less in a long context."""
    costs = PassCosts({1: 1.0, 4: 1.2, 8: 1.5}, {2: {1: 1.1, 8: 2.0}}, 256, (2304, {1: 1.1, 4: 1.5, 8: 2.1}))
    short = costs.relative(8)
    costs.at(1280)
    assert costs(1) == pytest.approx(1.05) and costs(8) == pytest.approx(1.8)
    assert costs.relative(8) == pytest.approx(1.8 / 1.05) and costs.relative(8) > short
    assert costs(8, 2) == pytest.approx(2.0 + 2 * 0.3)
    assert costs.slopes(7)[0] > 0
    costs.at(256)
    assert costs.relative(8) == short
    fixed = PassCosts({1: 1.0, 8: 1.5})
    fixed.at(4096)
    assert fixed(8) == 1.5


def test_measured_once_and_remembered(tmp_path, monkeypatch):
    class Manifest:
        limits = type("Limits", (), {"max_nodes": 16})

        @staticmethod
        def to_json():
            return "{}"

    bundle = type("Bundle", (), {"manifest": Manifest})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder = TinyEngine().decoder()
    costs = calibration.pass_costs(bundle, decoder, None)
    (file,) = tmp_path.rglob("*.json")
    ((_, curve),) = json.loads(file.read_text()).items()
    kept = {int(n): c for n, c in curve.items()}
    assert kept[1] == 1.0 and max(kept) == 16 and not decoder.cache.lanes(0, 8)
    decoder.run = None  # a second look must not run a pass
    assert calibration.pass_costs(bundle, decoder, None)(8) == costs(8)
    for damaged in ("not json", "{}", '{"256": {"1": 0.5}}', "[]", '{"256": 1}'):
        file.write_text(damaged)
        with pytest.raises(TypeError):
            calibration.pass_costs(bundle, decoder, None)
