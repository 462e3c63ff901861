"""A static n-gram table: which token mostly follows the last one, two or three in the target's own text.

Counted when drafters are trained (``specbuild.drafters.ngram``) and stored in the bundle as arrays, for each context
length n: ``keys.n`` uint32 [K], hashes of contexts in ascending order, ``tokens.n`` int32 [K], the token that follows,
and ``chances.n`` float16 [K], how likely. Rows of one context stand together, the likeliest first.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext
from specrun.drafters.sources import Guess, Reader, SourceDrafter, bucket, options_for
from specrun.errors import BundleError

ORDERS = (3, 2, 1)  # context lengths, the longest first
CANDIDATES = 2  # rows of a context that are read
MULTIPLIER = 0x9E3779B97F4A7C15  # Fibonacci hashing, 64 bits


def hash_context(context: Seq[int]) -> int:
    """uint32 hash of a context's tokens. The table's file depends on it."""
    state = 0
    for token in context:
        state = ((state ^ (token + 1)) * MULTIPLIER) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state >> 32


class NgramTable:
    """Lookups in a table's arrays through a dictionary of where each context's rows start."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._orders: list[tuple[int, dict[int, int], list[int], list[int], list[float]]] = []
        for order in ORDERS:
            if f"keys.{order}" in arrays:
                keys, tokens, chances = (arrays[f"{name}.{order}"].tolist() for name in ("keys", "tokens", "chances"))
                rows = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
                self._orders.append((order, rows, keys, tokens, chances))

    @staticmethod
    def load(path: Path, vocabulary: int) -> NgramTable:
        """Reads ``path``. Raises BundleError for arrays that do not fit each other or the vocabulary."""
        arrays = load_file(path)
        for order in ORDERS:
            names = [f"{name}.{order}" for name in ("keys", "tokens", "chances")]
            present = [name for name in names if name in arrays]
            if present and len(present) < 3:
                raise BundleError(
                    f"{path}: found {present}, expected all of {names} or none. Compile the bundle again."
                )
            if present and len({arrays[name].shape for name in names}) > 1:
                raise BundleError(f"{path}: {names} differ in length. Compile the bundle again.")
            if present and arrays[names[1]].size and int(arrays[names[1]].max()) >= vocabulary:
                raise BundleError(
                    f"{path}: {names[1]} holds token {int(arrays[names[1]].max())}, the model's last one is "
                    f"{vocabulary - 1}. The table was counted for another tokenizer."
                )
        if not any(name.startswith("keys.") for name in arrays):
            raise BundleError(
                f"{path}: holds {sorted(arrays)}, expected keys.n, tokens.n and chances.n for n in {ORDERS}."
            )
        return NgramTable(arrays)

    def lookup(self, context: tuple[int, ...]) -> tuple[int, list[tuple[int, float]]]:
        """(n, [(token, chance)]) for the longest known end of ``context``; (0, []) when none is known."""
        for order, first, keys, tokens, chances in self._orders:
            if order > len(context):
                continue
            key = hash_context(context[-order:])
            at = first.get(key)
            if at is not None:
                end = at + 1
                while end < min(len(keys), at + CANDIDATES) and keys[end] == key:
                    end += 1
                return order, list(zip(tokens[at:end], chances[at:end], strict=True))
        return 0, []


@dataclass
class NgramReader:
    """The cursor is the last tokens of the path, as many as the longest context."""

    source: NgramSource
    last: tuple[int, ...]

    def append(self, token: int) -> None:
        self.last = (*self.last, token)[-ORDERS[0] :]

    def root(self) -> tuple[int, ...]:
        return self.last

    def guesses(self, cursor: tuple[int, ...]) -> list[Guess]:
        return self.source.guesses(cursor)

    def advance(self, cursor: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*cursor, token)[-ORDERS[0] :]


@dataclass
class NgramSource:
    name: str
    table: NgramTable

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, ...], list[Guess]] = {}

    def read(self, tokens: Seq[int]) -> Reader:
        return NgramReader(self, tuple(tokens[-ORDERS[0] :]))

    def guesses(self, context: tuple[int, ...]) -> list[Guess]:
        """The table's guesses, remembered: passes ask again for contexts that were on the last pass's draft."""
        if context not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            order, rows = self.table.lookup(context)
            self._known[context] = [
                Guess(token, chance, (self.name, order, rank, bucket(chance)))
                for rank, (token, chance) in enumerate(rows)
            ]
        return self._known[context]

    def close(self, tokens: Seq[int]) -> None:
        pass


class Ngram(SourceDrafter):
    @staticmethod
    def open(record: DrafterRecord, context: DraftContext) -> Ngram:
        source, options = open_source(record, context), options_for(record, context.target)
        return Ngram(record.name, context.economics, context.eos_token_ids, [source], **options)


def open_source(record: DrafterRecord, context: DraftContext) -> NgramSource:
    """The table of a bundle's drafter as a source, for itself or for a hybrid. Raises BundleError."""
    if record.arrays is None:
        raise BundleError(f"Drafter {record.name!r}: it has no table. Compile the bundle again.")
    return NgramSource(record.name, NgramTable.load(context.bundle.file(record.arrays), context.tokenizer_size))
