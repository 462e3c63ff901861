"""Training data: the target answers prompts, and writes instructions of its own and answers those."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.train.corpus import Corpus
from tools.train.generate import MakeWriter, Warp, Writer
from tools.train.prompts import Chat, chunks

CHUNK = 256
GREEDY, SAMPLED = Warp(), Warp(0.8, 0.95)
INSTRUCTION = Warp(1.0, 0.98)

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Recipe:
    """How much to generate. Half of the answers are greedy, half sampled: the drafter must serve both."""

    self_written: int = 0
    answer_tokens: int = 192
    longest_prompt: int = 1024
    seed: int = 0


def generate_corpora(
    make: MakeWriter, chat: Chat, prompts: Sequence[str], recipe: Recipe, folder: Path, report: Report
) -> list[Corpus]:
    """One file for every 256 prompts in ``folder``; files that are there already are kept, so a run can be resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    instructions = own_instructions(make, chat, recipe, folder)
    everything = [*prompts, *instructions]
    random.Random(recipe.seed).shuffle(everything)
    corpora, total = [], -(-len(everything) // CHUNK)
    for number, chunk in chunks(everything, CHUNK):
        path = folder / f"answers_{number:05d}.npz"
        if not path.exists():
            warp = SAMPLED if number % 2 else GREEDY
            answers(chat, chunk, make(warp, number), recipe).write(path)
        corpora.append(Corpus.read(path))
        report(number + 1, total)
    return corpora


def answers(chat: Chat, prompts: Sequence[str], writer: Writer, recipe: Recipe) -> Corpus:
    """The target's answers to ``prompts``, in their order; prompts beyond the recipe's longest are left out."""
    rendered = [ids for ids in map(chat.render, prompts) if len(ids) <= recipe.longest_prompt]
    written = dict(writer.run(rendered, recipe.answer_tokens))
    return Corpus.of((rendered[i] + written[i], len(rendered[i])) for i in sorted(written))


def own_instructions(make: MakeWriter, chat: Chat, recipe: Recipe, folder: Path) -> list[str]:
    """Instructions that the model writes when the template's user turn is opened and sampled, kept in a text file."""
    path = folder / "instructions.txt"
    if not path.exists():
        written = make(INSTRUCTION, recipe.seed).run([chat.opening()] * recipe.self_written, limit=160)
        texts = {chat.decode(tokens).replace("\n", " ") for _, tokens in written}
        path.write_text("\n".join(sorted(text for text in texts if len(text) > 10)), encoding="utf-8")
    return path.read_text(encoding="utf-8").splitlines()
