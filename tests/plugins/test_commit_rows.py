"""commit_rows: kernel and in-place twin against the oracle, overlap, idle lanes, batches of unequal acceptance."""

from __future__ import annotations

import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from specrun.plugins.commit_rows.reference import commit_rows, commit_rows_in_place
from specrun.plugins.errors import ContractError
from specrun.plugins.gather_rows.reference import gather_rows
from specrun.plugins.registry import OPS
from tests.compare import assert_equal
from tests.plugins.interpreter import Interpreter


@dataclass(frozen=True)
class Case:
    """One entry of ``lengths`` and ``paths`` a lane; the slab has ``buffers`` caches."""

    lengths: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    buffers: int = 4
    heads: int = 2
    size: int = 64
    dtype: str = "float32"


CASES = [
    Case((0,), ((0,),)),
    Case((5,), ((0, 2, 3, 4, 7),)),
    Case((3, 0, 8), ((), (0, 1, 2, 3), (0, 4)), dtype="float16"),
    Case((2, -1, 1), ((1, 2), (0, 3), (0, 1, 5)), size=80, dtype="bfloat16"),
    Case((1,), (tuple(range(1, 40)),), buffers=2, heads=1),
    Case((4,), ((0, 3, 9),), size=96, dtype="uint8"),
]


def inputs_of(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    kind = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype
    longest = max(len(path) for path in case.paths) or 1
    path = np.full((len(case.paths), longest), 1 << 40)  # what lies past a lane's count must not be used
    for lane, nodes in enumerate(case.paths):
        path[lane, : len(nodes)] = nodes
    shape = (case.buffers, len(case.paths), case.heads, 48, case.size)
    return {
        "caches": rng.integers(0, 200, shape).astype(kind),
        "context_lengths": np.array(case.lengths),
        "path": path,
        "counts": np.array([len(nodes) for nodes in case.paths]),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_and_twin_match_oracle(interpreter: Interpreter, case: Case) -> None:
    inputs = inputs_of(case)
    committed, lengths = commit_rows(**inputs)
    twin = {name: value.copy() for name, value in inputs.items()}
    assert_equal(commit_rows_in_place(**twin), lengths)
    assert_equal(twin["caches"], committed)
    found = interpreter.run(OPS["commit_rows"], inputs)
    assert_equal(found["committed"], committed)
    assert_equal(found["new_lengths"], lengths)


def test_oracle_by_hand() -> None:
    caches = np.arange(6, dtype=np.float32).reshape(1, 1, 1, 6, 1)
    committed, lengths = commit_rows(caches, np.array([1]), np.array([[0, 2, 3]]), np.array([3]))
    assert committed.ravel().tolist() == [0, 1, 3, 4, 4, 5]
    assert lengths.tolist() == [4]


def test_lanes_without_accepted_rows_are_untouched(interpreter: Interpreter) -> None:
    """Case G02: neither a lane of length 0 that accepts nothing nor an idle one is advanced, read or written."""
    inputs = inputs_of(Case((0, -1), ((), (0, 1))))
    before = inputs["caches"].copy()
    found = interpreter.run(OPS["commit_rows"], inputs)
    assert_equal(found["committed"], before)
    assert found["new_lengths"].tolist() == [0, -1]


def test_every_lane_of_a_batch_equals_its_solo_run(interpreter: Interpreter) -> None:
    """Case A09: eight nodes of depth three; one lane accepts the root only, one a whole path, one something between."""
    case = Case((6, 9, 2), ((0,), (0, 2, 5, 7), (0, 1)))
    together = inputs_of(case)
    hidden = np.random.default_rng(2).standard_normal((3, 8, 32), dtype=np.float32)
    rows = np.where(np.arange(4) < together["counts"][:, None], together["path"], -1)
    gathered = interpreter.run(OPS["gather_rows"], {"source": hidden, "rows": rows})["gathered"]
    found = interpreter.run(OPS["commit_rows"], {**together, "caches": together["caches"].copy()})
    for lane in range(3):
        one = slice(lane, lane + 1)
        solo = {name: value[one].copy() for name, value in together.items() if name != "caches"}
        solo["caches"] = np.ascontiguousarray(together["caches"][:, one])
        alone = interpreter.run(OPS["commit_rows"], solo)
        assert_equal(found["committed"][:, one], alone["committed"])
        assert_equal(found["new_lengths"][one], alone["new_lengths"])
        assert_equal(gathered[one], gather_rows(hidden[one], rows[one]))
        last = int(together["counts"][lane]) - 1  # the next token comes from the row of the last accepted node
        assert_equal(gathered[lane, last], hidden[lane, case.paths[lane][-1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": np.array([6])}, "argument 'counts': found 6; supported: 0 to P = 5"),
        ({"path": np.array([[0, 2, 2, 4, 7]])}, "argument 'path': found [0, 2, 2, 4, 7]; supported: node indices"),
        ({"path": np.array([[-1, 2, 3, 4, 7]])}, "argument 'path': found [-1, 2, 3, 4, 7]; supported: node indices"),
        ({"context_lengths": np.array([41])}, "argument 'path': found node 7 after 41 rows; supported: rows below S"),
        ({"counts": np.array([5], np.int32)}, "argument 'counts': found dtype int32; supported: int64"),
    ],
)
def test_values_outside_the_contract_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    inputs = inputs_of(Case((5,), ((0, 2, 3, 4, 7),)))
    for run in (commit_rows, commit_rows_in_place):
        with pytest.raises(ContractError, match=re.escape(f"commit_rows: {message}")):
            run(**{**inputs, **change})
