"""The tree tuner: the trees it writes are the best ones, and the runtime takes them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.profiles import TreeProfile, load_tree, names
from specrun.tree import DraftTree
from tools.tune_tree import main, tune

ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.15, 0.05], [0.3, 0.1, 0.02]]


def every_tree(depth: int, width: int, nodes: int) -> list[tuple[tuple[int, ...], ...]]:
    paths = [path for d in range(1, depth + 1) for path in itertools.product(range(width), repeat=d)]
    chosen = itertools.combinations(paths, nodes)
    return [tree for tree in chosen if all(path[:-1] in tree or len(path) == 1 for path in tree)]


def expected(tree: tuple[tuple[int, ...], ...], accuracies: list[list[float]]) -> float:
    total = 0.0
    for path in tree:
        chance = 1.0
        for depth, rank in enumerate(path):
            chance *= accuracies[depth][rank]
        total += chance
    return total


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.floats(0.01, 0.5), min_size=2, max_size=2), min_size=2, max_size=2), st.integers(1, 4))
def test_no_other_tree_of_that_size_accepts_more(rows: list[list[float]], nodes: int) -> None:
    rows = [sorted(row, reverse=True) for row in rows]
    best = max(expected(tree, rows) for tree in every_tree(2, 2, nodes))
    assert sum(tune(rows, nodes).accepted) == pytest.approx(best)


def test_expected_tokens_are_the_sum_over_the_nodes() -> None:
    tree = tune(ACCURACIES, 9)
    assert len(tree.paths) == 9
    assert sum(tree.accepted) == pytest.approx(expected(tree.paths, ACCURACIES))


def test_a_costly_node_is_left_out() -> None:
    assert tune(ACCURACIES, 16, node_cost=10.0).paths == ()
    few, many = tune(ACCURACIES, 16, node_cost=0.2), tune(ACCURACIES, 16, node_cost=0.02)
    assert 0 < len(few.paths) < len(many.paths)


def test_the_profile_is_a_draft_tree(tmp_path: Path) -> None:
    accuracy, profile = tmp_path / "accuracy.json", tmp_path / "trees" / "tiny-6.json"
    accuracy.write_text(json.dumps({"by_rank": ACCURACIES}))
    result = CliRunner().invoke(main, [str(accuracy), "--nodes", "6", "-o", str(profile)])
    assert result.exit_code == 0, result.output
    written = json.loads(profile.read_text())
    assert written["name"] == "tiny-6" and written["nodes"] == len(written["paths"]) == 6
    assert set(written) == {field.name for field in dataclasses.fields(TreeProfile)}
    assert DraftTree.from_paths(written["paths"]).size == 7


@pytest.mark.parametrize(
    "content", ["{}", "not json", '{"by_rank": []}', '{"by_rank": [[1.5]]}', '{"by_rank": [["a"]]}']
)
def test_a_bad_accuracy_file_is_named(tmp_path: Path, content: str) -> None:
    accuracy = tmp_path / "accuracy.json"
    accuracy.write_text(content)
    result = CliRunner().invoke(main, [str(accuracy), "--nodes", "4", "-o", str(tmp_path / "tree.json")])
    assert result.exit_code == 2
    assert "accuracy.json" in result.output and "by_rank" in result.output
    assert not (tmp_path / "tree.json").exists()


@pytest.mark.parametrize("name", names("trees"))
def test_shipped_trees_load(name: str) -> None:
    tree = load_tree(name)
    assert tree.nodes == len(tree.paths) and DraftTree.from_paths(tree.paths).size == tree.nodes + 1
