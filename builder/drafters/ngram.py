"""ngram: a static table counted from the target's own text, and the counting.

``--drafter ngram=FILE``, or a folder that holds ``ngram.safetensors``.

The file is safetensors with the arrays that ``specrun.drafters.ngram_table`` describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from specbuild.checkpoint import Checkpoint
from specbuild.drafters import CompileContext, DrafterRequest, integer_options
from specrun.bundle import DrafterRecord
from specrun.drafters.ngram_table import CANDIDATES, MULTIPLIER, ORDERS, NgramTable
from specrun.errors import BundleError, CompileError

DEFAULTS = {"max_nodes": 16, "width": 2}


class NgramCompiler:
    kind = "ngram"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> NgramPlan:
        if request.source is None:
            raise CompileError(f"Drafter {self.kind}: needs a table. Say `{self.kind}=FILE.safetensors`.")
        options = integer_options(request, DEFAULTS)
        file = Path(request.source)
        file = file / "ngram.safetensors" if file.is_dir() else file
        try:
            arrays = load_file(file)
            NgramTable.load(file, checkpoint.tokenizer.vocab_size)
        except (OSError, SafetensorError) as error:
            raise CompileError(f"Drafter {self.kind}: {file}: cannot be read ({error}).") from error
        except BundleError as error:
            raise CompileError(f"Drafter {self.kind}: {error}") from error
        return NgramPlan(options, arrays)


@dataclass(frozen=True)
class NgramPlan:
    options: dict[str, Any]
    arrays: dict[str, np.ndarray]
    taps: tuple[int, ...] = ()

    def compile(self, context: CompileContext) -> DrafterRecord:
        return DrafterRecord("ngram", "ngram", None, self.options, context.save_arrays("ngram", self.arrays))


def count_ngrams(
    texts: Iterable[Sequence[int]],
    starts: Iterable[int] | None = None,
    *,
    max_bytes: int = 6 << 20,
    least_chance: float = 0.1,
) -> dict[str, np.ndarray]:
    """The table's arrays, counted over token sequences, each from its token ``starts[i]`` on (what the target wrote).

    A continuation counts once a text: what one text repeats is found there by suffix matches. Its chance is
    (texts - 1) / (texts of the context + 1): one text proves nothing. The likeliest rows that fit ``max_bytes`` are
    kept, weighed by how often their context comes.
    """
    sequences = [np.asarray(text, dtype=np.int64) for text in texts]
    begins = [0] * len(sequences) if starts is None else list(starts)
    counted = {order: _count(sequences, begins, order) for order in ORDERS}
    worth = np.concatenate([np.where(c.chances >= least_chance, c.chances * c.totals, 0) for c in counted.values()])
    keep = min(int(np.count_nonzero(worth)), max_bytes // 10)
    least = np.sort(worth)[-keep] if keep else np.inf
    arrays: dict[str, np.ndarray] = {}
    for order, c in counted.items():
        chosen = (c.chances >= least_chance) & (c.chances * c.totals >= least)
        arrays[f"keys.{order}"] = c.keys[chosen]
        arrays[f"tokens.{order}"] = c.tokens[chosen].astype(np.int32)
        arrays[f"chances.{order}"] = c.chances[chosen].astype(np.float16)
    return arrays


@dataclass(frozen=True)
class _Counts:
    """Rows in file order: by key, then by falling chance; at most CANDIDATES a key."""

    keys: np.ndarray
    tokens: np.ndarray
    chances: np.ndarray
    totals: np.ndarray  # texts that hold the context


def _count(sequences: list[np.ndarray], starts: list[int], order: int) -> _Counts:
    written = [s[max(0, start - order) :] for s, start in zip(sequences, starts, strict=True)]
    parts = [_distinct(sequence, order) for sequence in written if sequence.size > order]
    pairs = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)
    pairs, texts = np.unique(pairs, return_counts=True)
    keys, tokens = (pairs >> np.uint64(32)).astype(np.uint32), (pairs & np.uint64(0xFFFFFFFF)).astype(np.int64)
    heads = np.flatnonzero(np.diff(keys, prepend=keys[:1] + np.uint32(1))) if keys.size else np.zeros(0, dtype=np.int64)
    sizes = np.diff(np.append(heads, keys.size))
    totals = np.repeat(np.add.reduceat(texts, heads), sizes) if keys.size else texts
    ordered = np.lexsort((tokens, -texts, keys))
    rank = np.arange(keys.size) - np.repeat(heads, sizes)
    chosen = ordered[rank < CANDIDATES]
    chances = (texts[chosen] - 1) / (totals[chosen] + 1)
    return _Counts(keys[chosen], tokens[chosen], chances, totals[chosen])


def _distinct(sequence: np.ndarray, order: int) -> np.ndarray:
    """uint64 of context hash and next token, each pair once."""
    state = np.zeros(sequence.size - order, dtype=np.uint64)
    for j in range(order):
        state = (state ^ (sequence[j : sequence.size - order + j] + 1).astype(np.uint64)) * np.uint64(MULTIPLIER)
        state ^= state >> np.uint64(29)
    return np.unique((state >> np.uint64(32)) << np.uint64(32) | sequence[order:].astype(np.uint64))
