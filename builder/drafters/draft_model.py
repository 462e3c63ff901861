"""draft-model: another causal language model with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbuild.checkpoint import Checkpoint, TokenizerAssets, WeightSource, open_checkpoint, open_tensors
from specbuild.checkpoint.files import read_json
from specbuild.checkpoint.layout import EMBEDDING, HEAD, arrange
from specbuild.checkpoint.reader import commonest_dtype
from specbuild.config import ModelConfig
from specbuild.drafters import CompileContext, DrafterRequest
from specbuild.drafters.options import drafting_options
from specbuild.drafters.sources import named_source
from specbuild.model.decoder import DecoderSpec
from specrun.bundle import DrafterRecord
from specrun.errors import CompileError

DEFAULTS = {"depth": 5, "topk": 1, "total_nodes": 16, "adaptive": 1}


class DraftModelCompiler:
    kind = "draft-model"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> DraftModelPlan:
        source = named_source(request, "a model directory, hub id or .gguf file")
        options = drafting_options(request, DEFAULTS)
        directory = Path(source)
        raw = read_json(directory / "config.json") if directory.is_dir() else {}
        if raw.get("borrow_embeddings"):
            config, tensors = _borrowing(directory, raw, checkpoint)
            return DraftModelPlan(config, tensors, options)
        draft = open_checkpoint(source, max_length=checkpoint.config.max_position)
        check_vocabulary(request.kind, source, draft.tokenizer, checkpoint.tokenizer)
        return DraftModelPlan(draft.config, draft.tensors, options)


@dataclass(frozen=True)
class DraftModelPlan:
    config: ModelConfig
    tensors: Mapping[str, WeightSource]
    options: dict[str, Any]
    taps: tuple[int, ...] = ()

    def compile(self, context: CompileContext) -> DrafterRecord:
        spec = DecoderSpec("draft-model", self.config, self.tensors, context.max_positions, drafts=True)
        context.compile(spec.describe())
        return DrafterRecord(name="draft-model", kind="draft-model", engine="draft-model", options=self.options)


def _borrowing(
    directory: Path, raw: Mapping[str, Any], checkpoint: Checkpoint
) -> tuple[ModelConfig, dict[str, WeightSource]]:
    """A model of layers and a final norm between the target's embedding and the target's LM head."""
    stored = {_canonical(name): source.renamed(_canonical(name)) for name, source in open_tensors(directory).items()}
    if raw.get("hidden_size") != checkpoint.config.hidden_size:
        raise CompileError(
            f"Drafter draft-model: {directory} borrows the target's embedding of width "
            f"{checkpoint.config.hidden_size}, but its hidden_size is {raw.get('hidden_size')}. It was made for "
            "another target."
        )
    for name in (EMBEDDING, HEAD):
        if name in checkpoint.tensors:
            stored.setdefault(name, checkpoint.tensors[name])
    raw = dict(raw) | {
        "vocab_size": checkpoint.config.vocab_size,
        "tie_word_embeddings": HEAD not in stored,
    }
    longest = checkpoint.config.max_position
    config = ModelConfig.from_hf(raw, weights_dtype=commonest_dtype(stored), max_length=longest)
    config, tensors, extra = arrange(stored, config)
    if extra:
        raise CompileError(f"Drafter draft-model: {directory} holds tensors of no known use: {sorted(extra)[:5]}.")
    return config, tensors


def _canonical(name: str) -> str:
    """Layers and norms are stored with or without the prefix ``model.``."""
    return f"model.{name}" if name.startswith(("layers.", "norm.", "embed_tokens.")) else name


def check_vocabulary(kind: str, source: str, draft: TokenizerAssets, target: TokenizerAssets) -> None:
    """Raises CompileError when an id below both sizes stands for different tokens in the two tokenizers."""
    theirs = {token: text for text, token in draft.tokenizer.get_vocab(with_added_tokens=True).items()}
    ours = {token: text for text, token in target.tokenizer.get_vocab(with_added_tokens=True).items()}
    differing = sorted(token for token in theirs.keys() & ours.keys() if theirs[token] != ours[token])
    if not differing:
        return
    first = "; ".join(f"id {token}: {theirs[token]!r}, the target's {ours[token]!r}" for token in differing[:3])
    raise CompileError(
        f"Drafter {kind}: the tokenizer of {source} ({draft.vocab_size} ids) is not the target's "
        f"({target.vocab_size} ids): {len(differing)} ids differ, the first: {first}. "
        "Choose a model with the target's tokenizer."
    )
