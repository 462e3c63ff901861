"""What readings are scored on: prompts, the target's greedy continuations, and the streams it computed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from specbuild.checkpoint import Checkpoint
from specrun.cache import Lane
from specrun.decoder import Decoder, Row
from specrun.prompts import BUILTIN, Task, load_tasks
from specrun.proposal import FloatArray
from specrun.text import Text
from specrun.tree import IntArray

LONGEST_PROMPT = 256  # tokens; longer ones are cut: what is scored lies behind them


@dataclass(frozen=True)
class Transcript:
    """``tokens`` int64 [L], the target's own from ``start`` on; ``streams`` [tap] float32 [L - 1, H], the residual
    streams at every position but the last."""

    tokens: IntArray
    start: int
    streams: dict[int, FloatArray]

    def features(self, taps: Sequence[int]) -> FloatArray:
        """float32 [L - 1, k * H]: the taps side by side."""
        return np.concatenate([self.streams[tap] for tap in taps], axis=1)


@dataclass
class _Line:
    """A sequence that is being written. ``fresh``: tokens the target has not seen."""

    lane: Lane
    tokens: list[int]
    start: int
    fresh: int
    hidden: list[FloatArray] = field(default_factory=list)

    def transcript(self, taps: Sequence[int]) -> Transcript:
        streams: dict[int, FloatArray] = {}
        if self.hidden:
            parts = np.split(np.concatenate(self.hidden), len(taps), axis=1)
            streams = dict(zip(taps, parts, strict=True))
        return Transcript(np.array(self.tokens, dtype=np.int64), self.start, streams)


def record(
    target: Decoder, prompts: Sequence[list[int]], length: int, vocabulary: int, eos: frozenset[int]
) -> list[Transcript]:
    """Greedy continuations of ``length`` tokens, or to the first of ``eos``; ids from ``vocabulary`` on are padding."""
    lines = [_Line(target.cache.acquire(), list(prompt), len(prompt), len(prompt)) for prompt in prompts]
    for line in lines:
        _advance(target, [line], vocabulary)
    while open_lines := [x for x in lines if len(x.tokens) < x.start + length and x.tokens[-1] not in eos]:
        _advance(target, open_lines, vocabulary)
    for line in lines:
        target.cache.release(line.lane)
    return [line.transcript(target.record.taps) for line in lines]


def _advance(target: Decoder, lines: Sequence[_Line], vocabulary: int) -> None:
    """One pass over what the target has not seen of each line, and a token more on each."""
    rows = [Row.of_chunk(x.lane, np.array(x.tokens[-x.fresh :], dtype=np.int64), logits=True) for x in lines]
    output = target.run(rows)
    for i, line in enumerate(lines):
        if output.hidden is not None:
            line.hidden.append(output.hidden[i].copy())
        target.cache.commit(line.lane, range(line.fresh))
        line.tokens.append(int(output.logits[i][0, :vocabulary].argmax()))
        line.fresh = 1


def prompts_of(checkpoint: Checkpoint, text: Text, count: int, longest: int = LONGEST_PROMPT) -> list[list[int]]:
    """The first ``count`` built-in prompts, of as many groups as there are, as at most ``longest`` token ids."""
    groups: dict[str, list[Task]] = {}
    for task in load_tasks(BUILTIN):
        groups.setdefault(task.group, []).append(task)
    tasks = [task for turn in zip_longest(*groups.values()) for task in turn if task is not None]
    prompts = [_encode(text, task)[: min(longest, LONGEST_PROMPT)] for task in tasks[:count]]
    return [prompt for prompt in prompts if prompt and max(prompt) < checkpoint.config.vocab_size]


def _encode(text: Text, task: Task) -> list[int]:
    if task.chat and text.has_chat_template:
        return text.encode(text.chat([{"role": "user", "content": task.turns[0]}]), special=False)
    return text.encode(task.turns[0])
