"""tree_attention: the kernels against the oracle over a table of cases, and the guarantees one by one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from specrun.plugins.errors import ContractError
from specrun.plugins.registry import OPS
from specrun.plugins.tree_attention.contract import MERGE, SPLIT, split_count, tile_rows
from specrun.plugins.tree_attention.reference import merge
from tests.compare import TOLERANCE, assert_close, assert_equal
from tests.plugins.attention_cases import CACHES, Case, attributes_of, inputs_of, mask_of, oracle, run_kernels
from tests.plugins.interpreter import Interpreter

CASES = [
    Case((0,), 1),
    Case((0, 3, 70), 7, heads=6, kv_heads=2, splits=3),
    Case((64, 65, 63, 128), 5, heads=4, kv_heads=4, splits=2),
    Case((100,), 9, heads=5, kv_heads=1, size=80, dtype="float16", splits=2),
    Case((33, 1), 4, heads=3, kv_heads=1, size=96, dtype="bfloat16"),
    Case((130,), 17, heads=4, kv_heads=2, size=128, dtype="bfloat16", splits=4),
    Case((40,), 3, heads=2, kv_heads=1, size=256, dtype="float16", splits=2),
    Case((20,), 128, heads=1, kv_heads=1, dtype="float16"),
    Case((20,), 40, heads=2, kv_heads=1, tile=16, splits=3),
    Case((200, 10), 8, softcap=3.0, splits=2),
    Case((200, 150), 8, window=50, splits=3),
    Case((300,), 70, heads=1, window=3),
    Case((-1, 20), 4, splits=2),
    Case((5,), 2, splits=16),
    Case((131_000,), 4, heads=1, splits=8, dtype="float16", window=300),
    Case((9_000,), 1, heads=1, splits=8),
]


def expected_of(case: Case, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return oracle(inputs, scale=case.size**-0.5, softcap=case.softcap, window=case.window)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_match_oracle_and_read_no_poison(interpreter: Interpreter, case: Case) -> None:
    inputs = inputs_of(case)
    found = run_kernels(interpreter, inputs, **attributes_of(case))
    assert found.dtype == inputs["query"].dtype
    assert_close(found, expected_of(case, inputs), TOLERANCE[case.dtype])


def test_changing_a_sibling_changes_only_its_subtree(interpreter: Interpreter) -> None:
    """Bit for bit: nodes that do not descend from the changed one stay as they were."""
    parents = [-1, 0, 0, 1, 1, 2, 3]
    case = Case((70,), len(parents), heads=4, kv_heads=2, splits=2)
    inputs = inputs_of(case, parents)
    before = run_kernels(interpreter, inputs, **attributes_of(case))
    for name in CACHES:
        inputs[name][:, :, 70 + 1] += 1
    after = run_kernels(interpreter, inputs, **attributes_of(case))
    descends = [node in (1, 3, 4, 6) for node in range(len(parents))]
    same = (before == after).all(axis=(0, 2, 3))
    assert same.tolist() == [not below for below in descends]


def test_a_draft_in_several_passes_sees_the_rows_of_earlier_ones(interpreter: Interpreter) -> None:
    """T above N: the second pass of a draft, whose mask reaches back over the first; room for later passes is zeros."""
    parents = [-1, 0, 0, 1, 1, 2, 3]
    case = Case((70,), len(parents), heads=4, kv_heads=2, splits=2)
    whole = inputs_of(case, parents)
    expected = run_kernels(interpreter, whole, **attributes_of(case))
    later = {**whole, "query": whole["query"][:, 3:6], "positions": whole["positions"][:, 3:6]}
    later["tree_mask"] = np.concatenate([whole["tree_mask"][:, 3:6], np.zeros((1, 3, 5), bool)], axis=2)
    for name in CACHES:
        rest = np.full((1, 2, 20, 64), np.nan, np.float32)
        rest[:, :, :6] = 0
        later[name] = np.concatenate([whole[name][:, :, :76], rest], axis=2)
    assert_close(run_kernels(interpreter, later, **attributes_of(case)), expected[:, 3:6], 1e-6)


def test_idle_lane_gives_zeros_and_reads_nothing(interpreter: Interpreter) -> None:
    """Case G02 at the op: a padded lane is not one row long, it has no rows; its cache and its mask are never read."""
    case = Case((-1, 12), 3)
    inputs = inputs_of(case)
    inputs["tree_mask"][0] = True
    found = run_kernels(interpreter, inputs, **attributes_of(case))
    assert_equal(found[0], np.zeros_like(found[0]))
    alone = {name: value[1:] for name, value in inputs.items()}
    assert_equal(found[1:], run_kernels(interpreter, alone, **attributes_of(case)))


def test_node_that_sees_nothing_gives_zeros(interpreter: Interpreter) -> None:
    case = Case((0,), 2)
    inputs = inputs_of(case)
    inputs["tree_mask"][0, 1] = False
    found = run_kernels(interpreter, inputs, **attributes_of(case))
    assert_equal(found[0, 1], np.zeros_like(found[0, 1]))
    assert_close(found[0, 0], expected_of(case, inputs)[0, 0], 1e-5)


@pytest.mark.parametrize("splits", [1, 2, 5, 17])
def test_result_does_not_depend_on_the_split_count(interpreter: Interpreter, splits: int) -> None:
    case = Case((150, 3), 6, heads=4, kv_heads=2, splits=splits)
    inputs = inputs_of(case)
    assert_close(run_kernels(interpreter, inputs, **attributes_of(case)), expected_of(case, inputs), 1e-5)


def test_merge_kernel_alone(interpreter: Interpreter) -> None:
    """Uneven log-sum-exps, empty parts whose partial result was never written, and a row that is empty altogether."""
    rng = np.random.default_rng(1)
    partial = rng.standard_normal((2, 3, 2, 20, 64), dtype=np.float32)
    lse = rng.uniform(-80, 80, (2, 3, 2, 20)).astype(np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    lse[1, 2, 1] = -np.inf
    partial[np.isneginf(lse)] = np.nan
    merged = interpreter.run(
        OPS["tree_attention_merge"], {"partial": partial, "partial_lse": lse}, output_type="float32"
    )
    assert_close(merged["attention"], merge(partial, lse), 1e-5)


def test_tree_equals_plain_prefill_of_every_root_path(interpreter: Interpreter) -> None:
    """Case A08: in a 1-2-4 tree siblings share a depth, hence a position; each node equals its path run as a chain."""

    def attend(**inputs: np.ndarray) -> np.ndarray:
        return run_kernels(interpreter, inputs, scale=64**-0.5, splits=2, tile_rows=16)

    model = TinyDecoder(np.random.default_rng(5), attend)
    tokens, mask = np.array([40, 41, 42, 43, 44, 45, 46]), mask_of([-1, 0, 0, 1, 1, 2, 2])
    context = model.run(np.arange(9) + 3, np.arange(9), np.tri(9, dtype=bool), NO_CONTEXT)
    tree = model.run(tokens, 9 + mask.sum(1) - 1, mask, context.caches)
    for leaf in (3, 4, 5, 6):
        path = np.flatnonzero(mask[leaf])
        chain = model.run(tokens[path], 9 + np.arange(3), np.tri(3, dtype=bool), context.caches)
        assert np.abs(tree.hidden[path] - chain.hidden).max() < 1e-4
        assert np.abs(tree.hidden[path] - tree.hidden[0]).max() > 1  # the nodes do differ


@dataclass(frozen=True)
class Pass:
    """``hidden`` [N, 128]; ``caches`` one (keys, values) a layer, each [rows, 64]."""

    hidden: np.ndarray
    caches: list[tuple[np.ndarray, np.ndarray]]


NO_CONTEXT = [(np.zeros((0, 64), np.float32),) * 2] * 2


class TinyDecoder:
    """Two attention layers with rotary positions over a cache of one sequence; 2 heads, 1 KV head, head size 64."""

    def __init__(self, rng: np.random.Generator, attend: Callable[..., np.ndarray]) -> None:
        self.table = rng.standard_normal((64, 128), dtype=np.float32)
        self.weights = [rng.standard_normal((128, 256), dtype=np.float32) / 8 for _ in range(2)]
        self.attend = attend

    def run(self, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray, caches: list[Any]) -> Pass:
        """New ``tokens`` [N] at ``positions`` [N] that see each other by ``mask`` [N, N], after ``caches``."""
        hidden, grown = self.table[tokens], []
        for weight, (keys, values) in zip(self.weights, caches, strict=True):
            normed = hidden / np.sqrt((hidden**2).mean(1, keepdims=True))
            query, key, value = np.split(normed @ weight, [128, 192], axis=1)
            grown.append((np.concatenate([keys, rotate(key, positions)]), np.concatenate([values, value])))
            attention = self.attend(
                query=rotate(query, positions).reshape(1, -1, 2, 64),
                key_cache=grown[-1][0][None, None],
                value_cache=grown[-1][1][None, None],
                context_lengths=np.array([len(keys)]),
                positions=positions[None],
                tree_mask=mask[None],
            )
            hidden = hidden + attention.reshape(hidden.shape)
        return Pass(hidden, grown)


def rotate(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary positions over heads of size 64, packed in ``rows`` [N, heads * 64]."""
    angles = positions[:, None, None] * 10_000.0 ** -(np.arange(32) / 32)
    left, right = np.split(rows.reshape(len(rows), -1, 64), 2, axis=2)
    turned = [left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)]
    return np.concatenate(turned, axis=2).astype(np.float32).reshape(rows.shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "argument 'query': found H = 3 with H_kv = 2; supported: H a multiple of H_kv"),
        ({"size": 72}, "argument 'D': found D = 72; supported: 64 or 80 or 96 or 128 or 256"),
        ({"nodes": 129}, "argument 'N': found N = 129; supported: 1 to 128"),
        ({"splits": 65}, "argument 'splits': found splits = 65; supported: 1 to 64"),
        ({"softcap": -1.0}, "argument 'softcap': found -1.0; supported: 0 or more"),
        ({"window": -1}, "argument 'window': found window = -1; supported: 0 or more"),
        ({"rows": 1}, "argument 'tree_mask': found T = 1 with N = 2 and window = 0; supported: T = N, or T above N"),
        ({"rows": 3, "window": 5}, "argument 'tree_mask': found T = 3 with N = 2 and window = 5; supported: T = N"),
    ],
)
def test_values_outside_the_contract_are_refused(change: dict[str, Any], message: str) -> None:
    case = Case((4,), **({"nodes": 2} | {name: value for name, value in change.items() if name != "rows"}))
    inputs = inputs_of(case)
    inputs["tree_mask"] = np.ones((1, case.nodes, change.get("rows", case.nodes)), bool)
    with pytest.raises(ContractError, match=re.escape(f"tree_attention_split: {message}")):
        SPLIT.check(inputs, attributes_of(case))


def test_wrong_tensors_are_refused() -> None:
    case = Case((4, 5), 2)
    inputs, attributes = inputs_of(case), attributes_of(case)
    wrong = {
        "key_cache": (inputs["key_cache"].astype(np.float16), "found dtype float16; supported: float32"),
        "tree_mask": (inputs["tree_mask"].astype(np.int64), "found dtype int64; supported: bool"),
        "positions": (inputs["positions"][:1], "found shape [1, 2]; supported: [B, N] with B = 2"),
        "value_cache": (inputs["value_cache"][0], "found shape [1, 16, 64]; supported: 4 dimensions, [B, H_kv, S, D]"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(ContractError, match=re.escape(f"argument '{name}': {message}")):
            SPLIT.check({**inputs, name: value}, attributes)
    with pytest.raises(ContractError, match="argument 'scale': found nothing"):
        SPLIT.check(inputs, {})
    with pytest.raises(ContractError, match="argument 'output_type': found 'int8'"):
        partials = {name: np.zeros((1,) * rank, np.float32) for name, rank in (("partial", 5), ("partial_lse", 4))}
        MERGE.check(partials, {"output_type": "int8"})


def test_one_long_sequence_fills_the_processors() -> None:
    assert split_count(batch=1, kv_heads=8, row_tiles=1, capacity=131_072, processors=132) == 33
    assert split_count(batch=64, kv_heads=8, row_tiles=1, capacity=131_072, processors=132) == 1
    assert split_count(batch=1, kv_heads=8, row_tiles=1, capacity=1024, processors=132) == 4
    assert [tile_rows(nodes, 32, 8) for nodes in (1, 5, 16, 64)] == [16, 32, 64, 64]
