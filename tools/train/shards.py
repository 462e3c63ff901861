"""The target's hidden states for a corpus, cached on disk so that every drafter and every epoch reads them again."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tools.train.corpus import Corpus
from tools.train.generate import batches_by_length
from tools.train.target import Target, default_taps

CONVERSATIONS = 256


@dataclass(frozen=True)
class Rows:
    """A padded batch: ``tokens`` and ``real`` [B, N], ``hidden`` [B, N, taps + 1, H] (the last is the final state)."""

    tokens: Tensor
    real: Tensor
    prompt_lengths: Tensor
    hidden: Tensor


class HiddenCache:
    """One safetensors file for every 256 conversations of a corpus; a file that is there is complete and stays."""

    def __init__(self, folder: Path, corpora: Sequence[Corpus], longest: int = 1024) -> None:
        self.folder, self.corpus, self.longest = folder, Corpus.joined(list(corpora)), longest
        ends = np.cumsum([len(corpus) for corpus in corpora]).tolist()
        starts = [0, *ends[:-1]]
        # Groups never straddle two corpora, so a corpus added later leaves the files of the others valid.
        self.groups = [
            range(first, min(end, first + CONVERSATIONS))
            for start, end in zip(starts, ends, strict=True)
            for first in range(start, end, CONVERSATIONS)
        ]
        self.first = [group.start for group in self.groups]
        self.opened: dict[int, tuple[safe_open, list[int]]] = {}

    def fill(self, target: Target, report: Callable[[int, int], None]) -> None:
        """Compute the files that are missing; ``report(done, all)`` after each."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for done, group in enumerate(self.groups, 1):
            if not self._path(group).exists():
                self._write(group, target)
            report(done, len(self.groups))

    def missing(self) -> list[range]:
        """Conversations whose file is not there yet."""
        return [group for group in self.groups if not self._path(group).exists()]

    def lengths(self) -> list[int]:
        """Tokens of each conversation, after truncation."""
        return np.minimum(np.diff(self.corpus.offsets), self.longest).tolist()

    def _path(self, group: range) -> Path:
        content = hashlib.sha256(b"".join(self.corpus[index].tobytes() for index in group))
        return self.folder / f"{content.hexdigest()[:16]}.safetensors"

    def _write(self, group: range, target: Target) -> None:
        texts = [self.corpus[index][: self.longest].astype(np.int64) for index in group]
        states: list[Tensor] = [torch.empty(0)] * len(texts)
        for members in batches_by_length([len(text) for text in texts], most_rows=64, most_tokens=2048):
            hidden = torch.stack(
                target.hidden_states(padded([texts[i] for i in members]), default_taps(target.config)), 2
            )
            for row, index in enumerate(members):
                states[index] = hidden[row, : len(texts[index])].bfloat16()
        temporary = self._path(group).with_suffix(".partial")
        save_file({"hidden": torch.cat(states)}, temporary)
        temporary.replace(self._path(group))

    def batch(self, indices: Sequence[int]) -> Rows:
        """The padded batch of some conversations."""
        tokens = padded([self.corpus[index][: self.longest].astype(np.int64) for index in indices])
        states = [self._state(index) for index in indices]
        lengths = torch.tensor([len(state) for state in states])
        hidden = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        prompts = torch.from_numpy(self.corpus.prompt_lengths[list(indices)].astype(np.int64))
        return Rows(tokens, torch.arange(tokens.shape[1])[None] < lengths[:, None], prompts, hidden)

    def _state(self, index: int) -> Tensor:
        number = bisect.bisect_right(self.first, index) - 1
        group = self.groups[number]
        if number not in self.opened:
            lengths = [min(len(self.corpus[member]), self.longest) for member in group]
            opened = safe_open(self._path(group), "pt")
            self.opened[number] = opened, [0, *np.cumsum(lengths).tolist()]
        opened, starts = self.opened[number]
        place = index - group.start
        return opened.get_slice("hidden")[starts[place] : starts[place + 1]]


def padded(texts: Sequence[np.ndarray]) -> Tensor:
    """Token arrays of unequal lengths as one int64 matrix, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(text) for text in texts], batch_first=True)


def epochs(lengths: Sequence[int], tokens: int, seed: int, longest: int) -> Iterator[list[int]]:
    """Endless batches of about ``tokens`` padded tokens, of like lengths each, in random order."""
    epoch = 0
    while True:
        random = np.random.default_rng([seed, epoch])
        jittered = [min(length, longest) * random.uniform(0.9, 1.1) for length in lengths]
        groups = list(batches_by_length([max(1, int(length)) for length in jittered], 1 << 30, tokens))
        for place in random.permutation(len(groups)):
            yield groups[place]
        epoch += 1
