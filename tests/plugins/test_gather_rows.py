"""gather_rows: the kernel against the oracle, and the oracle against its definition."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from specrun.plugins.errors import ContractError
from specrun.plugins.gather_rows.reference import gather_rows
from specrun.plugins.registry import OPS
from tests.compare import assert_equal
from tests.plugins.interpreter import Interpreter


@dataclass(frozen=True)
class Case:
    batch: int
    nodes: int
    rows: int
    width: int
    dtype: str


CASES = [
    Case(1, 1, 1, 16, "float32"),
    Case(3, 7, 4, 40, "float16"),
    Case(2, 5, 6, 1100, "bfloat16"),
]


def inputs_of(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    kind = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype
    source = rng.standard_normal((case.batch, case.nodes, case.width)).astype(kind)
    return {"source": source, "rows": rng.integers(-1, case.nodes, (case.batch, case.rows))}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_matches_oracle(interpreter: Interpreter, case: Case) -> None:
    inputs = inputs_of(case)
    found = interpreter.run(OPS["gather_rows"], inputs)
    assert_equal(found["gathered"], gather_rows(**inputs))


def test_oracle_by_hand() -> None:
    source = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    gathered = gather_rows(source, np.array([[2, -1], [0, 0]]))
    assert gathered.tolist() == [[[4, 5], [0, 0]], [[6, 7], [6, 7]]]


def test_row_past_the_nodes_is_refused() -> None:
    with pytest.raises(ContractError, match=r"gather_rows: argument 'rows': found row 3; supported: rows below N = 3"):
        gather_rows(np.zeros((1, 3, 2), np.float32), np.array([[3]]))
