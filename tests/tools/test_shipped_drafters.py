"""What ships under profiles/drafters: complete, small, finite, and each with its card."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from specrun.drafters.ngram_table import NgramTable
from specrun.profiles import ROOM

DRAFTERS = ROOM / "drafters"
FOLDERS = sorted(path for path in DRAFTERS.iterdir() if path.is_dir())
WEIGHTS = sorted(DRAFTERS.glob("*/*.safetensors"))


def test_together_they_are_small() -> None:
    assert sum(path.stat().st_size for path in DRAFTERS.rglob("*") if path.is_file()) <= 45_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_each_has_a_card(folder: Path) -> None:
    card = (folder / "card.md").read_text(encoding="utf-8")
    if list(folder.glob("*.safetensors")):
        assert all(f"## {section}" in card for section in ("Data", "Training", "Acceptance", "Repeat"))


@pytest.mark.parametrize("file", WEIGHTS, ids=lambda path: path.parent.name)
def test_weights_are_finite_halves(file: Path) -> None:
    for name, tensor in load_file(file).items():
        if tensor.dtype.kind == "f":
            assert tensor.dtype == np.float16, name
            assert np.isfinite(tensor).all(), name


@pytest.mark.parametrize("file", sorted(DRAFTERS.glob("*/accuracy.json")), ids=lambda path: path.parent.name)
def test_accuracies_are_shares_of_positions(file: Path) -> None:
    for ranks in json.loads(file.read_text(encoding="utf-8"))["by_rank"]:
        assert all(share >= 0 for share in ranks) and sum(ranks) <= 1
        assert ranks[0] == max(ranks)


def test_the_eagle3_head_maps_into_the_vocabulary() -> None:
    folder = DRAFTERS / "smollm2-eagle3"
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    ids = np.arange(config["draft_vocab_size"]) + weights["d2t"]
    assert weights["t2d"].shape == (config["vocab_size"],)
    assert np.array_equal(np.flatnonzero(weights["t2d"]), ids)
    assert weights["lm_head.weight"].shape == (len(ids), config["hidden_size"])


def test_the_ngram_table_knows_common_text() -> None:
    table = NgramTable.load(DRAFTERS / "smollm2-ngram" / "ngram.safetensors", 49152)
    with np.load(DRAFTERS / "smollm2-corpus" / "tasks.npz", allow_pickle=False) as corpus:
        tokens, end = corpus["tokens"].astype(int).tolist(), int(corpus["offsets"][1])
    looked_up = [(table.lookup(tuple(tokens[at - 3 : at])), tokens[at]) for at in range(end - 40, end)]
    assert sum(order > 0 for (order, _), _ in looked_up) > 20
    assert sum(bool(guesses) and guesses[0][0] == token for (_, guesses), token in looked_up) >= 8
