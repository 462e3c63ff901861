"""What a checkpoint says of itself that compile does not follow, or that limits it: worth knowing, and no reading."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specbuild.checkpoint import Checkpoint
from specbuild.checkpoint.files import read_json
from specbuild.drafters import DrafterRequest


def notes_of(request: DrafterRequest, plan: Any, checkpoint: Checkpoint) -> list[str]:
    """Sentences about the drafter of ``plan``: its context, its vocabulary, its number of heads."""
    raw = _config(request)
    raw = raw.get("transformer_layer_config") or raw
    return [*_positions(raw, checkpoint), *_vocabulary(plan, checkpoint), *_heads(raw, plan)]


def _config(request: DrafterRequest) -> Mapping[str, Any]:
    if request.source is None:
        return {}
    path = Path(request.source)
    file = (path if path.is_dir() else path.parent) / "config.json"
    return read_json(file) if file.is_file() else {}


def _positions(raw: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[str]:
    own, longest = raw.get("max_position_embeddings"), checkpoint.config.max_position
    if isinstance(own, int) and own < longest:
        yield (
            f"config.json names {own} positions, the target {longest}: it is compiled for the target's, and nothing "
            f"errors beyond {own}, but it may have seen no text that long. Measure acceptance there."
        )


def _vocabulary(plan: Any, checkpoint: Checkpoint) -> Iterator[str]:
    config, size = getattr(plan, "config", None), checkpoint.tokenizer.vocab_size
    if config is None:
        return
    if config.vocab_size > size:
        yield f"{config.vocab_size - size} of its {config.vocab_size} rows lie beyond the tokenizer: padding, masked."
    elif config.vocab_size < size:
        yield f"it knows {config.vocab_size} of the tokenizer's {size} ids: others are never drafted, and read as id 0."


def _heads(raw: Mapping[str, Any], plan: Any) -> Iterator[str]:
    named = [value for key, value in raw.items() if re.fullmatch(r"(medusa_)?num_heads", key)]
    held = getattr(getattr(plan, "spec", None), "lm_heads", None)
    if held is not None and named and named[0] != len(held):
        yield f"config.json names {named[0]} heads, the file holds {len(held)}: the file's are compiled."
