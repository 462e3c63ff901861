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


def test_a_prompt_of_several_prefill_chunks(head, tmp_path):
    target = bundles.write_target(tmp_path / "target", max_position_embeddings=1024)
    opened = bundles.engine(target, tmp_path / "bundle", f"eagle3={head},{CHAIN}", max_length=1024)
    length = 2 * opened.manifest.limits.prefill_chunk + 90
    bundles.assert_same_as_plain(opened, "eagle3", [[3 + 7 * i % 500 for i in range(length)]], max_tokens=8)
