"""Acceptance on questions that were never trained on: the target's greedy answers in float32, and what drafts match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from tools.train.corpus import Corpus
from tools.train.generate import Generator
from tools.train.loop import Trainer
from tools.train.objective import Acceptance
from tools.train.prompts import Chat, read_prompts
from tools.train.selfgen import GREEDY, Recipe, answers
from tools.train.shards import HiddenCache
from tools.train.target import load_target

ANSWER_TOKENS = 128
LONGEST = 4096


def measuring_cache(source: str, chat: Chat, file: Path, folder: Path) -> HiddenCache:
    """Greedy answers to the questions of ``file``, computed once and kept in ``folder`` beside their states."""
    path = folder / f"{file.stem}.npz"
    cache = None if not path.exists() else HiddenCache(folder / "states", [Corpus.read(path)], LONGEST)
    if cache is not None and not cache.missing():
        return cache
    folder.mkdir(parents=True, exist_ok=True)
    target, _ = load_target(source, torch.float32)
    if cache is None:
        recipe = Recipe(answer_tokens=ANSWER_TOKENS, longest_prompt=LONGEST - ANSWER_TOKENS)
        answers(chat, read_prompts(file), Generator(target, chat.stops, GREEDY), recipe).write(path)
    cache = HiddenCache(folder / "states", [Corpus.read(path)], LONGEST)
    cache.fill(target, lambda done, total: None)
    return cache


def groups(file: Path, count: int) -> Mapping[str, list[int]]:
    """Questions by their ``category``, where the file has one."""
    if file.suffix != ".jsonl":
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    names = [str(row.get("category", "")) for row in rows][:count]
    return {name: np.flatnonzero([other == name for other in names]).tolist() for name in dict.fromkeys(names) if name}


def measure_by_group(trainer: Trainer, cache: HiddenCache, file: Path, depth: int) -> dict[str, Acceptance]:
    """Acceptance for every category and, last, for all questions."""
    count = len(cache.corpus)
    parts = {name: trainer.measure(cache, members, depth) for name, members in groups(file, count).items()}
    return parts | {file.stem: trainer.measure(cache, range(count), depth)}
