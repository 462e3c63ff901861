"""From a target and a request to a folder with trained weights: generate, cache, train, measure, write."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.numpy import save_file

import specrun
from specbuild.drafters.ngram import count_ngrams
from specrun.drafters.ngram_table import ORDERS
from specrun.errors import UserError
from tools.train.card import Card, acceptance_section, training_section, write_accuracy, write_card
from tools.train.corpus import Corpus
from tools.train.drafters import KINDS
from tools.train.export import write
from tools.train.generate import CompiledWriter, Generator, MakeWriter
from tools.train.loop import Plan, Trainer
from tools.train.loop import Progress as TrainingProgress
from tools.train.measure import measure_by_group, measuring_cache
from tools.train.prompts import Chat, read_prompts
from tools.train.selfgen import Recipe, generate_corpora
from tools.train.shards import HiddenCache
from tools.train.target import Target, load_target

MEASURED_DEPTH = 6
NGRAM_CONTEXT = max(ORDERS)


@dataclass(frozen=True)
class Request:
    """What the user asked for on the command line."""

    target: str
    kind: str
    output: Path
    work: Path
    data: Path | None
    prompts: Path | None
    bundle: Path | None
    measure: Path | None
    start_from: Path | None
    plan: Plan
    recipe: Recipe


def run(request: Request, console: Console) -> None:
    """Train and write; whatever an interrupted run left in ``request.work`` is used."""
    torch.manual_seed(request.plan.seed)
    target, checkpoint = load_target(request.target)
    chat = Chat(checkpoint)
    corpora = _corpora(request, target, chat, console)
    request.output.mkdir(parents=True, exist_ok=True)
    if request.kind == "ngram":
        _write_table(request, corpora)
        return
    cache = HiddenCache(request.work / "hidden", corpora)
    with bar(console, "hidden states") as step:
        cache.fill(target, step)
    trainer = _train(request, target, cache, console)
    write(trainer.drafter, trainer.draft_ids, _name_of(checkpoint.source), request.output)
    _write_trained_card(request, trainer, corpora, chat)


def _name_of(source: str) -> str:
    """A hub id as it is; of a path only its last part, for a path means nothing elsewhere."""
    return Path(source).name if Path(source).exists() else source


def _corpora(request: Request, target: Target, chat: Chat, console: Console) -> list[Corpus]:
    given = []
    if request.data is not None:
        files = sorted(request.data.glob("*.npz")) if request.data.is_dir() else [request.data]
        given = [Corpus.read(file) for file in files]
    if request.prompts is not None or request.recipe.self_written:
        prompts = read_prompts(request.prompts) if request.prompts is not None else []
        make = _writers(request, target, chat)
        with bar(console, "generating") as step:
            given += generate_corpora(make, chat, prompts, request.recipe, request.work / "data", step)
    if not given:
        raise UserError(
            "there is nothing to train on: give --data (conversations as .npz), --prompts (a file of prompts that the "
            "target answers) or --self-written N (instructions that the target writes itself)"
        )
    return given


def _writers(request: Request, target: Target, chat: Chat) -> MakeWriter:
    if request.bundle is None:
        return lambda warp, seed: Generator(target, chat.stops, warp, seed)
    engine = specrun.load(request.bundle)
    return lambda warp, seed: CompiledWriter(engine, warp, seed)


def _train(request: Request, target: Target, cache: HiddenCache, console: Console) -> Trainer:
    kind = KINDS[request.kind]
    drafter = kind.make(target)
    if request.start_from is not None:
        drafter.load_state_dict(torch.load(request.start_from, weights_only=True)["model"])
    trainer = Trainer(drafter, kind, cache, request.plan, request.work / request.kind)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(request.kind, total=request.plan.tokens, state="")
        trainer.run(lambda now: progress.update(task, completed=now.tokens, state=_state(now)))
    return trainer


def _state(now: TrainingProgress) -> str:
    held_out = " ".join(f"{share:.3f}" for share in now.acceptance) or "not yet measured"
    return f"{now.tokens / 1e6:.2f}M tokens, loss {now.loss:.3f}, held-out acceptance by depth: {held_out}"


@contextmanager
def bar(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar as a function of (done, total)."""
    with Progress(
        TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _card(request: Request, corpora: list[Corpus]) -> Card:
    tokens = sum(len(corpus.tokens) for corpus in corpora)
    conversations = sum(len(corpus) for corpus in corpora)
    answered = tokens - sum(int(corpus.prompt_lengths.sum()) for corpus in corpora)
    data = (
        f"{conversations} conversations whose answers the target wrote itself: {tokens} tokens, {answered} of them "
        "in answers."
    )
    command = "python -m tools.train_drafter " + shlex.join(sys.argv[1:])
    return Card(request.kind, Path(request.target).name, data, command)


def _write_trained_card(request: Request, trainer: Trainer, corpora: list[Corpus], chat: Chat) -> None:
    measured = {"held-out": trainer.measure(trainer.cache, trainer.held_out, MEASURED_DEPTH)}
    if request.measure is not None:
        cache = measuring_cache(request.target, chat, request.measure, request.work / "measure")
        measured |= measure_by_group(trainer, cache, request.measure, MEASURED_DEPTH)
    write_accuracy(request.output / "accuracy.json", list(measured.values())[-1])
    trained = training_section(request.plan, trainer.progress)
    write_card(request.output / "card.md", _card(request, corpora), trained, acceptance_section(measured))


def _write_table(request: Request, corpora: list[Corpus]) -> None:
    arrays = count_ngrams(answer for corpus in corpora for answer in corpus.answers(NGRAM_CONTEXT))
    save_file(arrays, request.output / "ngram.safetensors")
    counted = ", ".join(
        f"{len(arrays[name])} rows for {name.removeprefix('keys.')}" for name in arrays if "keys" in name
    )
    training = f"Counted over the answers, once each: {counted} tokens of context."
    write_card(request.output / "card.md", _card(request, corpora), training, "Chances are stored with the rows.")
