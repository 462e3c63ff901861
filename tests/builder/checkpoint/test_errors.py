"""Damaged and mismatched checkpoints: each is one clear CheckpointError before any weight is used."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from specbuild.checkpoint import check_finite, open_checkpoint, open_tensors
from specrun.errors import CheckpointError
from tests.builder.tiny import tiny_tokenizer, write_tiny_checkpoint

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def truncate(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def edit_tensor(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensors = load_file(path)
    save_file({**tensors, name: np.ascontiguousarray(change(tensors[name]))}, path)


def index_names_absent_tensor(path: Path) -> None:
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    edit_json(path / INDEX, weight_map={**weight_map, "model.layers.9.ghost.weight": SHARD})


def index_escapes_the_directory(path: Path) -> None:
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    edit_json(path / INDEX, weight_map={name: f"../{file}" for name, file in weight_map.items()})


def drop_tensor_from_index(path: Path) -> None:
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    del weight_map["model.layers.1.mlp.up_proj.weight"]
    edit_json(path / INDEX, weight_map=weight_map)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda p: (p / SHARD).unlink(), rf"{SHARD}: this shard is named by {INDEX} but is missing"),
    "truncated shard": (lambda p: truncate(p / SHARD, 0.7), rf"{SHARD}: not a readable safetensors file"),
    "empty shard": (lambda p: truncate(p / SHARD, 0), rf"{SHARD}: not a readable safetensors file"),
    "truncated header": (lambda p: truncate(p / SHARD, 0.01), rf"{SHARD}: not a readable safetensors file"),
    "garbage header": (lambda p: (p / SHARD).write_bytes(b"\xff" * 4096), rf"{SHARD}: not a readable safetensors file"),
    "index names an absent tensor": (index_names_absent_tensor, r"says this shard holds model.layers.9.ghost.weight"),
    "index leaves the directory": (index_escapes_the_directory, r"is named by .* but is missing"),
    "index without a map": (lambda p: (p / INDEX).write_text("{}"), r"has no weight_map"),
    "index lacks a tensor": (drop_tensor_from_index, r"lacks model.layers.1.mlp.up_proj.weight, which a llama model"),
    "no weights": (lambda p: [f.unlink() for f in p.glob("model*")], r"no weights found; expected model.safetensors"),
    "no config": (lambda p: (p / "config.json").unlink(), r"config.json: this file is missing"),
    "broken config": (lambda p: truncate(p / "config.json", 0.5), r"config.json: not readable as JSON"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), r"expected a JSON object, found list"),
    "unknown architecture": (lambda p: edit_json(p / "config.json", model_type="mamba"), r"'mamba' is not supported"),
    "unknown dtype": (lambda p: edit_json(p / "config.json", torch_dtype="int3"), r"dtype 'int3' is not known"),
    "more layers than stored": (
        lambda p: edit_json(p / "config.json", num_hidden_layers=3),
        r"lacks model.layers.2.input_layernorm.weight.* and \d+ more, which a llama model of 3 layers needs",
    ),
    "other vocabulary": (
        lambda p: edit_json(p / "config.json", vocab_size=600),
        r"tensor model.embed_tokens.weight has the shape \[512, 64\]; config.json implies \[600, 64\]",
    ),
    "other key heads": (
        lambda p: edit_json(p / "config.json", num_key_value_heads=4),
        r"k_proj.weight has the shape \[32, 64\]; config.json implies \[64, 64\]",
    ),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), r"tokenizer.json: the tokenizer is missing"),
    "broken tokenizer": (lambda p: truncate(p / "tokenizer.json", 0.5), r"tokenizer.json: not a readable tokenizer"),
    "larger tokenizer": (
        lambda p: tiny_tokenizer(520).save(str(p / "tokenizer.json")),
        r"the tokenizer knows 520 tokens but the embedding has 512 rows",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_directories(damage: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama", shards=3)
    open_checkpoint(tmp_path)
    apply, message = DAMAGE[damage]
    apply(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_fused_projection_of_wrong_shape(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "phi3")
    edit_tensor(tmp_path / "model.safetensors", "model.layers.0.self_attn.qkv_proj.weight", lambda t: t[:-1])
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight has the shape \[127, 64\]; .* implies \[128, 64\]"):
        open_checkpoint(tmp_path)


def test_integer_weights(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    edit_tensor(tmp_path / "model.safetensors", "model.norm.weight", lambda t: t.astype(np.int8))
    with pytest.raises(CheckpointError, match=r"model.norm.weight has the dtype int8; .* float32, float16, bfloat16"):
        open_checkpoint(tmp_path)


def test_float8_weights(tmp_path: Path) -> None:
    torch_tensors = {"a": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)}
    from safetensors.torch import save_file as save_torch_file

    save_torch_file(torch_tensors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor a has the dtype F8_E4M3, which is not supported"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
def test_weights_that_are_not_finite(value: float, dtype: Any) -> None:
    array = np.zeros((1500, 1000), dtype)
    check_finite("w", array)
    array[1200, 7] = value
    with pytest.raises(CheckpointError, match=rf"tensor w holds .*\({re.escape(str(value))}\) at index \(1200, 7\)"):
        check_finite("w", array)


class Bomb:
    """Unpickling this would create the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("suffix", [".pt", ".bin"])
@pytest.mark.parametrize("save", [partial(pickle.dump, protocol=2), torch.save], ids=["pickle", "torch"])
def test_pickles_never_run_code(suffix: str, save: Any, tmp_path: Path) -> None:
    bomb, file = tmp_path / "exploded", tmp_path / f"head{suffix}"
    with file.open("wb") as sink:
        save({"w": Bomb(bomb)}, sink)
    with pytest.raises(CheckpointError, match=rf"head\{suffix}: cannot be read as plain weights .* never run"):
        open_tensors(file)
    assert not bomb.exists()


def test_pickles_of_something_else(tmp_path: Path) -> None:
    torch.save({"step": 3, "model": {"w": torch.ones(1)}}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a.pt: expected a flat mapping from names to tensors"):
        open_tensors(tmp_path)
    truncate(tmp_path / "a.pt", 0.5)
    with pytest.raises(CheckpointError, match=r"a.pt: cannot be read as plain weights"):
        open_tensors(tmp_path)


def test_torch_files_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"needs torch, which is not installed; run `pip install torch`"):
        open_tensors(tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["nowhere/at/all", "./missing", "model.gguf"])
def test_sources_that_are_not_there(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: no such directory or file, and not a hub id"):
        open_checkpoint(name)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes.txt: expected a model directory or a .gguf file"):
        open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match=r"notes.txt: not a tensor file"):
        open_tensors(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match=r"absent: no such file or directory"):
        open_tensors(tmp_path / "absent")


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    write_tiny_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **kwargs: str(tmp_path))
    checkpoint = open_checkpoint("owner/name")
    assert checkpoint.source == "owner/name"

    def refuse(repo: str, **kwargs: Any) -> str:
        raise OSError("401 Client Error:\n  repository not found")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=r"owner/name: neither a local .* \(401 Client Error: repository not"):
        open_checkpoint("owner/name")
