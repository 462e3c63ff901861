"""eagle3 through the real loop."""

from __future__ import annotations

import pytest

from tests.runtime.drafters import bundles, fixtures

CHAIN = "depth=3,topk=1,adaptive=0"
TREE = "depth=3,topk=3,total_nodes=8,adaptive=0"


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return fixtures.write_eagle3(tmp_path_factory.mktemp("eagle3") / "head")


@pytest.mark.parametrize("options", [CHAIN, TREE, "depth=4,topk=3"])
def test_greedy_tokens_are_plain_ones(target, head, tmp_path, options):
    opened = bundles.engine(target, tmp_path / "bundle", f"eagle3={head},{options}")
    bundles.assert_same_as_plain(opened, "eagle3")
