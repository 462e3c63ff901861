"""open_checkpoint: a model directory, a hub id or a GGUF file becomes one Checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbuild.checkpoint.files import open_tensors, read_json
from specbuild.checkpoint.layout import arrange
from specbuild.checkpoint.tokenizer import TokenizerAssets, read_tokenizer
from specbuild.checkpoint.weights import WEIGHT_DTYPES, WeightSource
from specbuild.config import ModelConfig
from specrun.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]


@dataclass(frozen=True)
class Checkpoint:
    """A model as it lies on disk; nothing is read until a WeightSource is.

    ``tensors`` has exactly the decoder's tensors under canonical names (Hugging Face Llama's, projections split;
    lm_head.weight absent where the embedding is the head). ``extra`` has all others under their stored names: MTP
    layers, drafter heads.
    """

    source: str
    config: ModelConfig
    tensors: Mapping[str, WeightSource]
    tokenizer: TokenizerAssets
    extra: Mapping[str, WeightSource]
    raw_config: dict[str, Any]


def open_checkpoint(source: str | Path, *, max_length: int | None = None) -> Checkpoint:
    """Opens a Hugging Face directory, a hub id or a .gguf file, and checks every shape before any weight is read.

    ``max_length``: longest context in tokens that will be used, where shorter than the model's own.
    Raises CheckpointError; the message names the file or tensor, what was found and what to do.
    """
    path = Path(source)
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(f"{path}: expected a model directory or a .gguf file")
    if path.is_file():
        from specbuild.checkpoint.gguf_file import read_gguf

        parts = read_gguf(path, max_length)
    else:
        parts = _read_directory(path if path.is_dir() else _download(str(source)), max_length)
    config, stored, tokenizer, raw_config = parts
    config, tensors, extra = arrange(stored, config)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{source}: the tokenizer knows {tokenizer.vocab_size} tokens but the embedding has {config.vocab_size} "
            "rows; the tokenizer is of another model, or tokens were added without resizing the embedding"
        )
    tokenizer = replace(tokenizer, eos_token_ids=tokenizer.eos_token_ids or config.eos_token_ids)
    config = replace(config, eos_token_ids=tokenizer.eos_token_ids, bos_token_id=tokenizer.bos_token_id)
    return Checkpoint(str(source), config, tensors, tokenizer, extra, raw_config)


Parts = tuple[ModelConfig, dict[str, WeightSource], TokenizerAssets, dict[str, Any]]


def _read_directory(directory: Path, max_length: int | None) -> Parts:
    raw_config = read_json(directory / "config.json")
    # The configuration is refused before the weights are looked at: its errors say more.
    ModelConfig.from_hf(raw_config, weights_dtype="float32", max_length=max_length)
    stored = open_tensors(directory)
    config = ModelConfig.from_hf(raw_config, weights_dtype=commonest_dtype(stored), max_length=max_length)
    return config, stored, read_tokenizer(directory, raw_config), raw_config


def commonest_dtype(stored: Mapping[str, WeightSource]) -> str | None:
    """The weight dtype most tensors have, as a config would name it; None where there is none."""
    names = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}
    counts = Counter(names[source.dtype] for source in stored.values() if source.dtype in names)
    return counts.most_common(1)[0][0] if counts else None


def _download(source: str) -> Path:
    """The local copy of a hub repository: configuration, tokenizer and safetensors (.bin only where there are none)."""
    if not _HUB_ID.fullmatch(source) or source.endswith(".gguf"):
        raise CheckpointError(f"{source}: no such directory or file, and not a hub id of the form OWNER/NAME")
    import huggingface_hub

    try:
        path = Path(huggingface_hub.snapshot_download(source, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
        if not any(path.glob("*.safetensors")):
            huggingface_hub.snapshot_download(source, allow_patterns=["*.bin"], ignore_patterns=["*/*"])
    except Exception as error:  # HTTP, offline, authorisation and cache errors share no base class
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{source}: neither a local directory nor a hub repository that could be downloaded ({reason})"
        ) from error
    return path
