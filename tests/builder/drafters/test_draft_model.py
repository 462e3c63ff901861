"""draft-model at compile time: vocabularies, borrowed embeddings, options."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from specbuild.checkpoint import open_checkpoint
from specbuild.drafters import DrafterRequest, open_compiler
from specrun.errors import CheckpointError, CompileError
from tests.builder.tiny import tiny_tokenizer, write_tiny_checkpoint
from tests.runtime.drafters import bundles


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


def plan(target, text):
    request = DrafterRequest.parse(text)
    return open_compiler(request.kind).plan(request, open_checkpoint(target))


def test_another_tokenizer_is_refused_with_the_first_ids(target, tmp_path):
    other = write_tiny_checkpoint(tmp_path, "llama")
    data = json.loads((other / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    names = {i: name for name, i in vocabulary.items()}
    vocabulary[names[40]], vocabulary[names[41]] = 41, 40
    (other / "tokenizer.json").write_text(json.dumps(data))
    Tokenizer.from_file(str(other / "tokenizer.json"))
    with pytest.raises(CompileError, match=r"2 ids differ, the first: id 40: .*; id 41"):
        plan(target, f"draft-model={other}")


def test_a_smaller_vocabulary_of_the_same_tokens_is_taken(target, tmp_path):
    """D04."""
    other = write_tiny_checkpoint(tmp_path, "llama", vocab=400)
    tiny_tokenizer(400).save(str(other / "tokenizer.json"))
    assert plan(target, f"draft-model={other}").config.vocab_size == 400


def test_source_and_options_are_checked(target, tmp_path):
    with pytest.raises(CompileError, match="needs a source"):
        plan(target, "draft-model")
    with pytest.raises(CheckpointError, match="no such directory"):
        plan(target, f"draft-model={tmp_path}/nothing")
    with pytest.raises(CompileError, match="'width' is unknown"):
        plan(target, f"draft-model={target},width=3")
    with pytest.raises(CompileError, match="depth is '0', expected an integer of at least 1"):
        plan(target, f"draft-model={target},depth=0")


def write_borrowing(path, target):
    """Layers and a final norm alone."""
    path.mkdir()
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    kept = {n: w for n, w in weights.items() if n not in ("model.embed_tokens.weight", "lm_head.weight")}
    (path / "config.json").write_text(json.dumps(config | {"borrow_embeddings": True}))
    save_file(kept, path / "model.safetensors")
    return path


@pytest.mark.parametrize("tie", [False, True])
def test_borrowed_embeddings(tmp_path, tie):
    """The target's own layers between the target's embedding and head: everything is accepted."""
    target = write_tiny_checkpoint(tmp_path / "target", "llama", tie=tie)
    head = write_borrowing(tmp_path / "head", target)
    opened = bundles.engine(target, tmp_path / "bundle", f"draft-model={head},depth=3,adaptive=0")
    stats = bundles.assert_same_as_plain(opened, "draft-model")
    assert all(s.acceptance == 1.0 for s in stats)
    record = opened.manifest.drafter("draft-model")
    assert record.bytes > sum(w.nbytes for w in load_file(head / "model.safetensors").values())


def test_borrowing_from_another_target_is_refused(target, tmp_path):
    head = write_borrowing(tmp_path / "head", target)
    wide = write_tiny_checkpoint(tmp_path / "wide", "llama", hidden=96)
    with pytest.raises(CompileError, match=r"width 96, but its hidden_size is 64"):
        plan(wide, f"draft-model={head}")
    weights = load_file(head / "model.safetensors")
    save_file({**weights, "layers.7.odd": np.zeros(3, np.float32)}, head / "model.safetensors")
    with pytest.raises(CompileError, match=r"no known use: \['model.layers.7.odd'\]"):
        plan(target, f"draft-model={head}")
