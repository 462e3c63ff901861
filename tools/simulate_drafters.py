"""Replays recorded texts through drafters and prints what they would bring: no engine, no clock, no noise.

    python -m tools.simulate_drafters record demo.bundle prompts.jsonl -o streams.npz
    python -m tools.simulate_drafters replay demo.bundle streams.npz --drafter suffix --drafter hybrid \
        --costs 1:1,2:1.15,4:1.35,8:1.65,16:2.15,32:3.15

``streams.npz`` holds ``tokens`` (all texts in a row), ``offsets`` [texts + 1], ``prompt_lengths`` [texts] and
``groups`` [texts] (names to report by). Every text is decoded as greedy verification would: a drafted token is
accepted where the recorded text has it. The drafters and their economics are the real ones, only the passes are not
run: a pass of N nodes takes what the cost curve says, so predicted speed-ups leave out the drafters' own time on the
host (shown apart, measured). Drafters that run an engine cannot be replayed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from specrun.bundle import Bundle
from specrun.drafters import DraftContext, Drafter, open_drafter
from specrun.economics import Economics, PassCosts
from specrun.engine import Engine, load
from specrun.errors import UserError
from specrun.prompts import Task, load_tasks
from specrun.proposal import Commit, Proposal, Verdict
from specrun.sampling import SamplingParams
from specrun.sequence import Sequence
from specrun.text import TextStream


@dataclass(frozen=True)
class Stream:
    """A recorded text: its prompt and what the target continued it with."""

    prompt: list[int]
    output: list[int]
    group: str


@dataclass
class Outcome:
    """Totals of some texts. ``cost`` in plain passes; processor ``seconds`` of propose and observe."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    speedups: list[float] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        for name in ("tokens", "passes", "drafted", "accepted", "cost", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def speedup(self) -> float:
        return self.tokens / self.cost if self.cost else 1.0


class Silent:
    """A codec for sequences whose text nobody reads."""

    def decode(self, ids: Seq[int], skip_special: bool = True) -> str:
        return ""


def read_streams(path: Path) -> list[Stream]:
    with np.load(path) as data:
        tokens, offsets, prompts = data["tokens"].tolist(), data["offsets"], data["prompt_lengths"]
        groups = data["groups"] if "groups" in data else ["all"] * len(prompts)
        return [
            Stream(tokens[a : a + n], tokens[a + n : b], str(group))
            for a, b, n, group in zip(offsets[:-1], offsets[1:], prompts, groups, strict=True)
        ]


def walk(proposal: Proposal, coming: Seq[int]) -> Verdict:
    """The verdict of greedy verification when the target is known to write ``coming``."""
    path = proposal.follow(coming[:-1])
    emitted = list(coming[: len(path)])
    return Verdict(path, emitted[-1], emitted)


def replay(drafter: Drafter, economics: Economics, stream: Stream, max_nodes: int = 32) -> Outcome:
    """Decodes one recorded text with ``drafter``."""
    params = SamplingParams(max_tokens=len(stream.output), ignore_eos=True)
    length = len(stream.prompt) + len(stream.output)
    text = TextStream(Silent(), ())  # type: ignore[arg-type]
    sequence = Sequence(stream.prompt, params, drafter, drafter.rule, text, frozenset(), length + 1)
    total, own = Outcome(), economics.of(drafter.name)
    drafter.begin(sequence)
    first = stream.output[0]
    sequence.accept(Verdict([0], first, [first]))
    drafter.observe(sequence, Commit(0, np.array(stream.prompt), first))
    while sequence.room > 0:
        economics.start_pass(1)
        budget = min(max_nodes - 1, sequence.room - 1)
        begin = time.thread_time()
        proposal = drafter.propose([sequence], [budget])[0].prefix(budget + 1)
        total.seconds += time.thread_time() - begin
        verdict = walk(proposal, stream.output[len(sequence.output) :])
        start = len(sequence.tokens) - 1
        sequence.accept(verdict)
        own.observe_pass(proposal.tree.size, len(verdict.tokens), proposal.draft_cost)
        begin = time.thread_time()
        drafter.observe(
            sequence, Commit(start, proposal.tokens[verdict.path], verdict.next_token, None, proposal, verdict)
        )
        total.seconds += time.thread_time() - begin
        total.tokens += len(verdict.tokens)
        total.passes += 1
        total.drafted += proposal.drafted
        total.accepted += verdict.accepted
        total.cost += own.cost(proposal.tree.size) + proposal.draft_cost
    drafter.end(sequence)
    return total


def simulate(drafter: Drafter, economics: Economics, streams: Seq[Stream]) -> dict[str, Outcome]:
    """Outcomes by group, and of all texts under ``overall``."""
    outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)
    for stream in streams:
        if not stream.output:
            continue
        outcome = replay(drafter, economics, stream)
        for name in (stream.group, "overall"):
            outcomes[name].add(outcome)
    return dict(outcomes)


def parse_costs(text: str) -> PassCosts:
    """``1:1,2:1.15,...`` -> the curve."""
    try:
        return PassCosts({int(n): float(c) for n, c in (item.split(":") for item in text.split(","))})
    except ValueError:
        raise click.BadParameter(f"found {text!r}, expected pairs like 1:1,2:1.15,8:1.65") from None


def refuse(name: str) -> Any:
    raise click.UsageError(f"drafter engine {name!r}: drafters that run an engine cannot be replayed")


def open_from(bundle: Bundle, name: str, economics: Economics) -> Drafter:
    model = bundle.manifest.model
    context = DraftContext(
        bundle,
        bundle.manifest.engine("target"),
        economics,
        model.tokenizer_size,
        frozenset(model.eos_token_ids),
        refuse,
        refuse,
        lambda other: open_drafter(bundle.manifest.drafter(other), context),
    )
    return open_drafter(bundle.manifest.drafter(name), context)


def report(name: str, outcomes: dict[str, Outcome]) -> str:
    lines = [f"{name}: group, predicted speed-up, tokens a pass, drafted a pass, accepted/drafted, host ms a pass"]
    for group, o in outcomes.items():
        rate = o.accepted / o.drafted if o.drafted else 0.0
        lines.append(
            f"  {group:20s} {o.speedup:5.2f} {o.tokens / o.passes:6.2f} {o.drafted / o.passes:6.2f} "
            f"{rate:6.2f} {1000 * o.seconds / o.passes:6.3f}"
        )
    return "\n".join(lines)


def record(engine: Engine, tasks: Seq[Task], max_tokens: int) -> list[Stream]:
    """The first turn of every task, decoded greedily without drafts."""
    prompts = []
    for task in tasks:
        text = engine.text
        chat = task.chat and text.has_chat_template
        words = text.chat([{"role": "user", "content": task.turns[0]}]) if chat else task.turns[0]
        prompts.append(engine.encode(text.encode(words, special=False) if chat else words))
    answers = engine.generate_batch(prompts, SamplingParams(max_tokens=max_tokens), drafter="none")
    return [
        Stream(prompt, answer.token_ids, task.group)
        for prompt, answer, task in zip(prompts, answers, tasks, strict=True)
    ]


def write_streams(path: Path, streams: Seq[Stream]) -> None:
    texts = [[*stream.prompt, *stream.output] for stream in streams]
    np.savez_compressed(
        path,
        tokens=np.array([token for text in texts for token in text], dtype=np.uint32),
        offsets=np.cumsum([0, *map(len, texts)]),
        prompt_lengths=np.array([len(stream.prompt) for stream in streams]),
        groups=np.array([stream.group for stream in streams]),
    )


BUNDLE = click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Predict what a bundle's drafters would bring, from texts that were recorded once."""


@main.command("record")
@BUNDLE
@click.argument("prompts")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--limit", type=click.IntRange(1), help="At most so many prompts of each group.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True)
def record_command(bundle: Path, prompts: str, output: Path, limit: int | None, max_tokens: int) -> None:
    """Decode the first turns of PROMPTS (a JSON-lines file, or builtin) with BUNDLE and keep the tokens."""
    try:
        write_streams(output, record(load(bundle), load_tasks(prompts, limit), max_tokens))
    except UserError as error:
        raise click.ClickException(str(error)) from None


@main.command("replay")
@BUNDLE
@click.argument("streams", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--drafter", "names", multiple=True, required=True, help="A drafter of the bundle; may be repeated.")
@click.option("--costs", default="1:1,2:1.15,4:1.35,8:1.65,16:2.15,32:3.15", show_default=True)
def replay_command(bundle: Path, streams: Path, names: tuple[str, ...], costs: str) -> None:
    """Predict the speed-up of BUNDLE's drafters over the recorded texts of STREAMS."""
    try:
        opened = Bundle.open(bundle, verify=False)
        for name in names:
            economics = Economics(parse_costs(costs))
            click.echo(report(name, simulate(open_from(opened, name, economics), economics, read_streams(streams))))
    except UserError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
