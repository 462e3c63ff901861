"""sample_rows: the kernel against the oracle, and the oracle against the runtime's own warps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from specrun.plugins.registry import OPS
from specrun.plugins.rejection_sampling.reference import sample_rows
from specrun.sampling import SamplingParams
from specrun.warp import History, warp
from tests.compare import TOLERANCE, assert_close, assert_equal


@dataclass(frozen=True)
class Case:
    name: str
    width: int
    temperature: tuple[float, ...] = (1.0, 0.7)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    nodes: int = 2
    scale: float = 2.0
    capacity: int = 128
    adjusted: int = 1

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("dense", 1000),
    Case("one token", 1),
    Case("greedy beside sampled", 300, temperature=(0.0, 1.0)),
    Case("top-k", 1000, top_k=40),
    Case("top-k of one", 500, top_k=1),
    Case("top-k of all", 50, top_k=50),
    Case("top-k beyond the block", 5000, top_k=2500, nodes=1),
    Case("top-p", 1000, top_p=0.9),
    Case("top-p, tiny", 500, top_p=1e-6),
    Case("top-p, flat: the list overflows", 3000, top_p=0.95, scale=0.1, nodes=1),
    Case("min-p", 700, min_p=0.05),
    Case("all cuts", 2000, top_k=60, top_p=0.8, min_p=0.02),
    Case("cold", 400, temperature=(1e-4, 1e-38), top_p=0.9),
    Case("penalties and bias", 600, top_p=0.9, penalties=(1.3, 0.4, -0.2), adjusted=200),
    Case("wide", 20011, top_p=0.9, nodes=1, capacity=1024),
]


def inputs_of(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    batch = len(case.temperature)
    shape = (batch, case.nodes, case.adjusted)
    tokens = np.full(shape, -1, dtype=np.int64)
    if case.adjusted > 1:
        order = rng.permuted(np.tile(np.arange(case.width), (batch, case.nodes, 1)), axis=-1)
        tokens = np.where(rng.random(shape) < 0.9, order[..., : case.adjusted], -1)
    return {
        "logits": rng.normal(0, case.scale, (batch, case.nodes, case.width)).astype(np.float32),
        "temperature": np.array(case.temperature, np.float32),
        "top_k": np.full(batch, case.top_k, np.int32),
        "top_p": np.full(batch, case.top_p, np.float32),
        "min_p": np.full(batch, case.min_p, np.float32),
        "penalties": np.tile(np.array(case.penalties, np.float32), (batch, 1)),
        "adjust_tokens": tokens,
        "adjust_counts": rng.integers(-1, 4, shape).astype(np.int32),
        "adjust_bias": rng.normal(0, 1, shape).astype(np.float32),
        "uniforms": rng.random((batch, case.nodes)).astype(np.float32),
    }


def laws(adjusted: np.ndarray, statistics: np.ndarray) -> np.ndarray:
    """p of every row, from the statistics as a walk reads them."""
    best, scale, floor, total, _ = np.moveaxis(statistics.astype(np.float64)[..., None], -2, 0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.where(adjusted >= floor, np.exp((adjusted.astype(np.float64) - best) * scale), 0) / total


def run(interpreter, case: Case, inputs: dict[str, np.ndarray]):
    mine = {name: array.copy() for name, array in inputs.items()}
    found = interpreter.run(OPS["sample_rows"], mine, capacity=case.capacity)
    return found, sample_rows(case.capacity, **inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_matches_oracle(interpreter, case: Case):
    inputs = inputs_of(case)
    found, expected = run(interpreter, case, inputs)
    assert_close(found["adjusted"], expected["adjusted"], TOLERANCE["float32"], "adjusted")
    law = laws(expected["adjusted"], expected["statistics"])
    assert_close(laws(found["adjusted"], found["statistics"]), law, TOLERANCE["float32"], "law")
    # Greedy and near-greedy rows have an entropy near 0: absolute there.
    assert_close(found["statistics"][..., 4] + 1, expected["statistics"][..., 4] + 1, 1e-5, "entropy")
    for place in np.ndindex(found["drawn"].shape):
        assert_draw(found["drawn"][place], law[place], inputs["uniforms"][place])


def assert_draw(token: int, law: np.ndarray, uniform: float) -> None:
    """``token`` is the inverse CDF's, up to float32's rounding of the running sum."""
    running = np.cumsum(law)
    assert law[token] > 0
    assert running[token] - law[token] <= uniform + 2e-6 and running[token] >= uniform - 2e-6


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, logit_bias={3: 2.0, 9: -100.0}),
        SamplingParams(temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.3),
        SamplingParams(),
    ],
)
def test_b08_oracle_is_the_runtimes_warp(params):
    rng = np.random.default_rng(0)
    row = rng.normal(0, 2, 200).astype(np.float32)
    history = History([1, 2, 3, 3])
    for token in (5, 5, 9):
        history.append(token)
    path = [9, 11]
    ids, counts = history.along(path)
    ids = np.concatenate([ids, [t for t in params.logit_bias if t not in ids]]).astype(np.int64)
    counts = np.concatenate([counts, np.full(ids.size - counts.size, -1)]).astype(np.int32)
    bias = np.array([params.logit_bias.get(int(t), 0.0) for t in ids], np.float32)
    out = sample_rows(
        logits=row[None, None],
        temperature=np.float32([params.temperature]),
        top_k=np.int32([params.top_k]),
        top_p=np.float32([params.top_p]),
        min_p=np.float32([params.min_p]),
        penalties=np.float32([[params.repetition_penalty, params.frequency_penalty, params.presence_penalty]]),
        adjust_tokens=ids[None, None],
        adjust_counts=counts[None, None],
        adjust_bias=bias[None, None],
        uniforms=np.float32([[0.37]]),
    )
    law = warp(row, params, history, path)
    expected = np.zeros(200)
    expected[law.tokens if law.tokens is not None else slice(None)] = law.probs
    found = laws(out["adjusted"], out["statistics"])[0, 0]
    if params.greedy:
        assert out["drawn"][0, 0] == law.tokens[0]
    else:
        assert_close(found, expected, 1e-5)
        assert out["drawn"][0, 0] == law.quantile(0.37)


def test_b10_b11_degenerate_rows(interpreter):
    """Ties, -inf, NaN: greedy takes the lowest id, cuts keep ties whole, -1 where no token is right."""
    inf, nan = np.inf, np.nan
    rows = [[1, 1, 0, 1], [0, 0, 0, 0], [-inf, 2, -inf, -inf], [nan, 0, 0, 0], [-inf] * 4, [0, inf, 0, 0]]
    for temperature in (0.0, 1.0):
        case = Case("x", 4, temperature=(temperature,), top_k=2, top_p=0.7, nodes=6)
        inputs = inputs_of(case) | {"logits": np.array([rows], np.float32)}
        inputs["uniforms"] = np.full((1, 6), 0.999, np.float32)
        found, expected = run(interpreter, case, inputs)
        assert_equal(found["drawn"], expected["drawn"], "drawn")
        assert found["drawn"][0].tolist() == ([0, 0, 1, -1, -1, -1] if temperature == 0 else [3, 3, 1, -1, -1, -1])


def test_the_last_token_is_drawn_by_the_largest_uniform(interpreter):
    case = Case("x", 3000, temperature=(1.0,), nodes=1)
    inputs = inputs_of(case) | {"uniforms": np.full((1, 1), np.nextafter(np.float32(1), np.float32(0)))}
    inputs["logits"][0, 0, 2500:] = -np.inf
    found, _ = run(interpreter, case, inputs)
    assert 2400 < found["drawn"][0, 0] < 2500
