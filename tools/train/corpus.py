"""Conversations as flat token arrays, the form in which all of training reads and writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Corpus:
    """``tokens`` [T] of all conversations in a row; conversation i is ``tokens[offsets[i]:offsets[i + 1]]``."""

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def answers(self, context: int) -> Iterator[np.ndarray]:
        """Every answer with the ``context`` tokens before it."""
        for index, length in enumerate(self.prompt_lengths.tolist()):
            yield self[index][max(0, length - context) :]

    @classmethod
    def of(cls, conversations: Iterable[tuple[list[int], int]]) -> Corpus:
        """From pairs of (tokens, prompt length)."""
        pairs = list(conversations)
        offsets = np.cumsum([0, *(len(tokens) for tokens, _ in pairs)])
        tokens = (
            np.concatenate([np.asarray(tokens, np.uint32) for tokens, _ in pairs]) if pairs else np.zeros(0, np.uint32)
        )
        return cls(tokens, offsets, np.array([length for _, length in pairs], np.int32))

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """One ``.npz`` file, or a folder of them taken in the order of their names."""
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not files:
            raise FileNotFoundError(f"{path} holds no .npz file of conversations")
        return cls.joined([cls._one(file) for file in files])

    @classmethod
    def _one(cls, path: Path) -> Corpus:
        with np.load(path) as data:
            return cls(data["tokens"].astype(np.uint32), data["offsets"], data["prompt_lengths"])

    @classmethod
    def joined(cls, parts: list[Corpus]) -> Corpus:
        """All conversations of ``parts``, in order."""
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([*offsets, starts[-1:]]),
            np.concatenate([part.prompt_lengths for part in parts]),
        )

    def write(self, path: Path) -> None:
        """Save as ``.npz``, whole or not at all."""
        temporary = path.with_suffix(".partial.npz")
        np.savez_compressed(temporary, tokens=self.tokens, offsets=self.offsets, prompt_lengths=self.prompt_lengths)
        temporary.replace(path)
