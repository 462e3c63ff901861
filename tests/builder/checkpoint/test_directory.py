"""Hugging Face directories: every family's tensors against transformers', tied heads, dtypes, extras, tokenizers."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbuild.checkpoint import open_checkpoint, open_tensors
from specrun.errors import CheckpointError
from tests.builder.tiny import CHAT_TEMPLATE, FAMILIES, write_tiny_checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def transformers_tensors(path: Path) -> dict[str, np.ndarray]:
    """The loaded model's parameters, Phi-3's fused ones split by its own sizes."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    for name in [name for name in tensors if "qkv_proj" in name or "gate_up_proj" in name]:
        fused = tensors.pop(name)
        parts, sizes = (("q", "k", "v"), [64, 96]) if "qkv" in name else (("gate", "up"), [len(fused) // 2])
        stem = name.replace("qkv_proj", "{}_proj").replace("gate_up_proj", "{}_proj")
        tensors.update({stem.format(part): rows for part, rows in zip(parts, np.split(fused, sizes), strict=True)})
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_equal_transformers(family: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, family, shards=3)
    checkpoint, theirs = open_checkpoint(tmp_path), transformers_tensors(tmp_path)
    assert set(checkpoint.tensors) == set(theirs)
    assert checkpoint.extra == {}
    for name, source in checkpoint.tensors.items():
        assert source.shape == theirs[name].shape
        np.testing.assert_array_equal(source.read_float32(), theirs[name], err_msg=name)


def test_e05_own_head_dim(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3", head_dim=32)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)
    assert checkpoint.tensors["model.layers.1.self_attn.q_norm.weight"].shape == (32,)


def set_tie(path: Path, tie: bool) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tie}))


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", ["embed", "head", "equal", "different"])
def test_e03_tied_heads_as_transformers_or_an_error(tie: bool, stored: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    if stored == "embed":
        del tensors[HEAD]
    elif stored == "head":
        del tensors[EMBEDDING]
    elif stored == "equal":
        tensors[HEAD] = tensors[EMBEDDING]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    set_tie(tmp_path, tie)
    if not tie and stored in ("embed", "head"):  # transformers would fill the gap with random values
        with pytest.raises(CheckpointError, match=f"lacks {HEAD if stored == 'embed' else EMBEDDING}"):
            open_checkpoint(tmp_path)
        return
    checkpoint, theirs = open_checkpoint(tmp_path), transformers_tensors(tmp_path)
    np.testing.assert_array_equal(checkpoint.tensors[EMBEDDING].read(), theirs[EMBEDDING])
    head = checkpoint.tensors[EMBEDDING if checkpoint.config.tie_embeddings else HEAD]
    np.testing.assert_array_equal(head.read(), theirs[HEAD])
    assert (HEAD in checkpoint.tensors) == (not checkpoint.config.tie_embeddings)
    assert checkpoint.config.tie_embeddings == (tie and stored != "different")
    assert bool(checkpoint.config.notes) == (tie and stored == "different")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stated", ["auto", None])
def test_e04_weights_are_read_in_their_dtype_which_stands_in_for_an_unnamed_one(
    dtype: str, stated: str | None, tmp_path: Path
) -> None:
    write_tiny_checkpoint(tmp_path, "llama", dtype=dtype, torch_dtype=stated)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.dtype == dtype
    source = checkpoint.tensors["model.norm.weight"]
    assert source.dtype == source.read().dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert source.read_float32().dtype == np.float32


def test_tensors_beyond_the_decoder_are_extra(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    extra = {
        name: rng.standard_normal((3, 4)).astype(np.float32)
        for name in ("model.mtp_layers.0.input_proj.weight", "model.layers.2.eh_proj.weight", "mtp.fc.weight")
    }
    write_tiny_checkpoint(tmp_path, "phi3", extra_tensors=extra)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.extra) == set(extra)
    for name, value in extra.items():
        np.testing.assert_array_equal(checkpoint.extra[name].read(), value)


def save_torch(path: Path, file: str) -> dict[str, np.ndarray]:
    """Replaces the safetensors file of ``path`` by a PyTorch one."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save({name: torch.from_numpy(value.copy()) for name, value in tensors.items()}, path / file)
    return tensors


def test_pytorch_bin(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen2")
    stored = save_torch(tmp_path, "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    for name, source in checkpoint.tensors.items():
        np.testing.assert_array_equal(source.read(), stored[name])


def test_loose_tensor_files(tmp_path: Path) -> None:
    values = {"0.0.linear.weight": torch.ones(2, 3, dtype=torch.bfloat16), "d2t": torch.arange(4)}
    torch.save(values, tmp_path / "medusa_lm_head.pt")
    torch.save(values, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for source in (tmp_path / "medusa_lm_head.pt", tmp_path / "old.pth", tmp_path):
        tensors = open_tensors(source)
        assert tensors["0.0.linear.weight"].read().dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(tensors["0.0.linear.weight"].read_float32(), np.ones((2, 3)))
        np.testing.assert_array_equal(tensors["d2t"].read(), np.arange(4))


def test_row_views_of_views(tmp_path: Path) -> None:
    stored = np.arange(40, dtype=np.float32).reshape(10, 4)
    save_file({"a": stored, "scalar": np.array(3, np.float32)}, tmp_path / "a.safetensors")
    tensors = open_tensors(tmp_path / "a.safetensors")
    view = tensors["a"].rows("b", 2, 8).rows("c", 1, 4)
    assert (view.name, view.shape) == ("c", (3, 4))
    np.testing.assert_array_equal(view.read(), stored[3:6])
    np.testing.assert_array_equal(view.load(slice(1, 99)), stored[4:6])
    assert tensors["scalar"].read() == 3


def test_tokenizer_assets_and_what_the_runtime_gets(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.6, "max_length": 4096})
    )
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.config.eos_token_ids == checkpoint.tokenizer.eos_token_ids == (2, 0)
    assert checkpoint.tokenizer.vocab_size == 512
    checkpoint.tokenizer.write(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "model" / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "text.json").read_text()) == {
        "chat_template": CHAT_TEMPLATE,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "bos_token_id": 0,
        "eos_token_ids": [2, 0],
        "add_bos": False,
        "generation": {"do_sample": True, "temperature": 0.6},
    }
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "def add(a, b): return 'naïve 😀'<|im_end|>\n"
    assert checkpoint.tokenizer.tokenizer.encode(text).ids == theirs(text).input_ids


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"chat_template": "one"}, "one"),
        ({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}, "d"),
        ({}, None),
    ],
)
@pytest.mark.parametrize("jinja", [None, "from the file"])
def test_chat_template_places(stored: dict[str, Any], expected: str | None, jinja: str | None, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stored))
    if jinja:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    assert open_checkpoint(tmp_path).tokenizer.chat_template == (jinja or expected)


@pytest.mark.parametrize("in_file", [False, True], ids=["plain file", "file adds BOS"])
@pytest.mark.parametrize(
    "keys", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}], ids=str
)
def test_tokenizer_json_alone_decides_about_bos_as_in_transformers(
    in_file: bool, keys: dict[str, Any], tmp_path: Path
) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    if in_file:
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        bos = "<|endoftext|>"
        tokenizer.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, 0)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, **keys}))
    ours, theirs = open_checkpoint(tmp_path).tokenizer, AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "a quick fox"):
        assert ours.tokenizer.encode(text).ids == theirs(text).input_ids
    assert ours.add_bos == in_file


def peak_of(action: Callable[[], object]) -> int:
    """Bytes allocated at the highest point while ``action`` runs."""
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_no_more_than_one_tensor_is_held(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama", vocab=512, hidden=1024, tie=True)
    checkpoint = open_checkpoint(tmp_path)
    largest = max(source.read().nbytes for source in checkpoint.tensors.values())
    assert largest > 8e6

    def read_all() -> None:
        for source in checkpoint.tensors.values():
            source.read_float32()

    assert peak_of(lambda: open_checkpoint(tmp_path)) < largest / 4
    assert peak_of(read_all) < 2.1 * largest  # one being read while the last one is let go
