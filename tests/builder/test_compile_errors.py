"""Bad input on the command line: exit code 2, one paragraph that names the thing, nothing left on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from specbuild.cli import main
from tests.builder.tiny import write_tiny_checkpoint


def _config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _weights(model: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def truncated(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def nan(model: Path) -> None:
    _weights(model, lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 5), np.nan))


def infinite_norm(model: Path) -> None:
    _weights(model, lambda t: t["model.norm.weight"].__setitem__(0, np.inf))


def missing_tensor(model: Path) -> None:
    _weights(model, lambda t: t.__delitem__("model.layers.0.self_attn.k_proj.weight"))


def wrong_shape(model: Path) -> None:
    _config(model, intermediate_size=96)


def unknown_architecture(model: Path) -> None:
    _config(model, model_type="mamba")


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def small_vocabulary(model: Path) -> None:
    _config(model, vocab_size=256)
    _weights(model, lambda t: t.update({n: t[n][:256] for n in ("model.embed_tokens.weight", "lm_head.weight")}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, "model.safetensors"),
        (nan, "model.layers.1.mlp.up_proj.weight"),
        (infinite_norm, "model.norm.weight"),
        (missing_tensor, "model.layers.0.self_attn.k_proj.weight"),
        (wrong_shape, "gate_proj.weight"),
        (unknown_architecture, "mamba"),
        (no_tokenizer, "tokenizer.json"),
        (small_vocabulary, "512"),
    ],
)
def test_damaged_checkpoints(damage: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "llama")
    damage(model)
    refused(tmp_path, [str(model)], says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "gameboy"], "gameboy"),
        (["--target", "cpu:sm80"], "sm80"),
        (["--target", "tensorrt-rtx:sm12"], "sm12"),
        (["--target", "tensorrt-rtx:fp16,bf16"], "one precision"),
        (["--target", "tensorrt-rtx", "--quantize", "int4"], "int4"),
        (["--max-length", "0"], "max_length"),
        (["--max-length", "513"], "512"),
        (["--max-batch", "-1"], "max_batch"),
        (["--profile", "nothing"], "nothing"),
        (["--drafter", "crystal-ball"], "crystal-ball"),
        (["--drafter", "prompt-lookup=x"], "no source"),
        (["--drafter", "prompt-lookup,min_ngram=9"], "min_ngram"),
        (["--drafter", "prompt-lookup,max_ngram=0"], "max_ngram"),
        (["--drafter", "prompt-lookup,colour=red"], "colour"),
        (["--drafter", "prompt-lookup", "--drafter", "prompt-lookup"], "more than once"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "llama")
    refused(tmp_path, [str(model), *arguments], says)


def test_tensorrt_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to get the package."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    model = write_tiny_checkpoint(tmp_path / "model", "llama")
    refused(tmp_path, [str(model), "--target", "tensorrt"], "pip install 'specbuild[tensorrt]'")


def test_absent_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    refused(tmp_path, [str(tmp_path / "nowhere.gguf")], "nowhere.gguf")


def test_float16_that_overflows(tmp_path: Path) -> None:
    """D09: refused for fp16 with the way out; bf16 compiles."""
    pytest.importorskip("tensorrt_rtx")
    model = write_tiny_checkpoint(tmp_path / "model", "llama")

    def grow(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] *= 5e4

    _weights(model, grow)
    refused(tmp_path, [str(model), "--target", "tensorrt-rtx:sm89", "--max-length", "64"], "layers.0.mlp")
    arguments = [str(model), "--target", "tensorrt-rtx:sm89,bf16", "--max-length", "64"]
    result = CliRunner().invoke(main, ["compile", *arguments, "-o", str(tmp_path / "out.bundle")])
    assert result.exit_code == 0, result.output


def refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["compile", *arguments, "-o", str(tmp_path / "out.bundle")])
    assert result.exit_code == 2, result.output
    assert says in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
