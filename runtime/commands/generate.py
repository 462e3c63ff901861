"""``specrun generate``: one prompt in, its continuation out, as it comes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from specrun.commands import options
from specrun.commands.opening import open_bundle, utf8_output
from specrun.engine import Choice, Engine, Prompt
from specrun.errors import RequestError
from specrun.report import choice_to_json, stats_lines
from specrun.rules import Rule
from specrun.sampling import SamplingParams


@click.command()
@options.BUNDLE
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A file that holds it; - is stdin.")
@click.option(
    "--chat/--raw", "chat", default=None, help="With or without the chat template. [default: where there is one]"
)
@options.DRAFTER
@options.ACCEPT
@options.sampling_options
@click.option("--n", type=int, default=1, help="Independent continuations. [default: 1]")
@click.option("--logprobs", type=int, metavar="K", help="Log-probabilities of each token and of the K best.")
@click.option("--stats", is_flag=True, help="Print counters and speed to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming text.")
@options.THREADS
def generate(
    bundle: Path,
    prompt: str | None,
    file: Path | None,
    chat: bool | None,
    drafter: str | None,
    accept: str | None,
    stats: bool,
    as_json: bool,
    threads: int | None,
    **sampling: Any,
) -> None:
    """Continue a prompt (-p, -f or stdin) with BUNDLE. Text streams to stdout, everything else goes to stderr."""
    utf8_output()
    params = options.sampling_params(**sampling)
    rule = options.accept_rule(accept)
    text = _prompt(prompt, file)
    engine = open_bundle(bundle, threads)
    request = prompt_ids(engine, text, engine.text.has_chat_template if chat is None else chat)
    if as_json:
        _print_json(engine, request, params, drafter, rule)
    else:
        choices = _stream(engine, request, params, drafter, rule)
        used = rule or engine.drafter(drafter).rule
        if params.logprobs is not None:
            _print_logprobs(engine, choices)
        if stats or not used.lossless:
            for choice in choices:
                click.echo("\n".join(stats_lines(choice.stats, engine.drafter(drafter).name, used)), err=True)


def prompt_ids(engine: Engine, text: str, chat: bool) -> Prompt:
    """The prompt as the engine takes it: rendered by the chat template into token ids, or the text itself."""
    if not chat:
        return text
    return engine.text.encode(engine.text.chat([{"role": "user", "content": text}]), special=False)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise RequestError("prompt: found both -p and -f. Give one of them.")
    if prompt is None and file is None and sys.stdin.isatty():
        raise RequestError("prompt: none given. Use -p TEXT, -f FILE, or pipe it to stdin.")
    text = options.read_text(file, sys.stdin.buffer.read) if prompt is None else options.valid_text(prompt, "--prompt")
    if not text:
        raise RequestError("prompt: it is empty. Give at least a character.")
    return text


def _stream(
    engine: Engine, prompt: Prompt, params: SamplingParams, drafter: str | None, rule: Rule | None
) -> list[Choice]:
    """Prints text as it comes; several choices are printed one after the other once each is complete."""
    done: dict[int, Choice] = {}
    deltas = engine.stream(prompt, params, drafter=drafter, rule=rule)
    try:
        for delta in deltas:
            if params.n == 1:
                click.echo(delta.text, nl=False)
            if delta.choice is not None:
                done[delta.index] = delta.choice
    finally:
        if params.n == 1:
            click.echo()
    choices = [done[index] for index in sorted(done)]
    if params.n > 1:
        for choice in choices:
            click.echo(f"--- choice {choice.index}\n{choice.text}")
    return choices


def _print_json(engine: Engine, prompt: Prompt, params: SamplingParams, drafter: str | None, rule: Rule | None) -> None:
    generation = engine.generate(prompt, params, drafter=drafter, rule=rule)
    answer = {
        "prompt_token_ids": generation.prompt_token_ids,
        "drafter": generation.drafter,
        "rule": (rule or engine.drafter(drafter).rule).name,
        "lossless": generation.lossless,
        "choices": [choice_to_json(choice, engine.text) for choice in generation.choices],
    }
    click.echo(json.dumps(answer, ensure_ascii=False, indent=1))


def _print_logprobs(engine: Engine, choices: list[Choice]) -> None:
    for choice in choices:
        for entry in choice.logprobs or []:
            named = ((engine.text.decode([token], skip_special=False), value) for token, value in entry.top)
            best = "".join(f"  {text!r} {value:.4f}" for text, value in named)
            token = engine.text.decode([entry.token], skip_special=False)
            click.echo(f"{choice.index} {entry.token:>7} {token!r} {entry.logprob:.4f} |{best}", err=True)
