"""``specrun chat``: several turns on one cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from specrun.commands import options
from specrun.commands.opening import open_bundle, utf8_output
from specrun.engine import Choice, Delta, Engine
from specrun.errors import RequestError
from specrun.report import stats_lines
from specrun.sampling import SamplingParams

HELP = "/reset forgets the conversation, /stats shows the last turn's counters, /quit ends."


class Chat:
    """The messages so far and the cache that holds them."""

    def __init__(self, engine: Engine, params: SamplingParams, drafter: str | None, system: str | None) -> None:
        if not engine.text.has_chat_template:
            raise RequestError("chat: the bundle has no chat template. Use `specrun generate --raw`.")
        self.engine, self.params, self.drafter = engine, params, engine.drafter(drafter)
        self._conversation = engine.conversation()
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)
        self.last: Choice | None = None

    def reset(self) -> None:
        """Forgets all turns; the cache's rows are free at once."""
        self._conversation.close()
        self.messages, self.last = list(self._opening), None

    def turn(self, text: str) -> Iterator[str]:
        """Yields the answer as it comes and remembers it as far as it came. After a RequestError nothing is kept."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.engine.text.encode(self.engine.text.chat(messages), special=False)
        deltas = self._conversation.stream(prompt, self.params, drafter=self.drafter)
        said = ""
        try:
            for delta in deltas:
                said += delta.text
                self._note(delta)
                yield delta.text
        finally:
            deltas.close()
            if said:
                self.messages = [*messages, {"role": "assistant", "content": said}]

    def _note(self, delta: Delta) -> None:
        if delta.choice is not None:
            self.last = delta.choice

    def stats(self) -> str:
        """The last turn's counters, for people."""
        if self.last is None:
            return "No turn is complete yet."
        return "\n".join(stats_lines(self.last.stats, self.drafter.name, self.drafter.rule))


@click.command()
@options.BUNDLE
@click.option("--system", metavar="TEXT", help="A system message that opens the conversation.")
@options.DRAFTER
@options.sampling_options
@click.option("--stats", is_flag=True, help="Print counters and speed to stderr after each turn.")
@options.THREADS
def chat(
    bundle: Path, system: str | None, drafter: str | None, stats: bool, threads: int | None, **sampling: Any
) -> None:
    """Talk with BUNDLE, a line a turn. The cache is kept: a turn computes only what is new."""
    utf8_output()
    params = options.sampling_params(**sampling)
    session = Chat(open_bundle(bundle, threads), params, drafter, system)
    interactive = sys.stdin.isatty()
    if interactive:
        click.echo(HELP, err=True)
    for line in _lines(interactive):
        if line == "/quit":
            break
        if line == "/reset":
            session.reset()
        elif line == "/stats":
            click.echo(session.stats(), err=True)
        elif line:
            _answer(session, line, interactive)
            if stats:
                click.echo(session.stats(), err=True)


def _lines(interactive: bool) -> Iterator[str]:
    """What the user says, until the end of input. A terminal gets a prompt and line editing."""
    if not interactive:
        for number, line in enumerate(sys.stdin.buffer, start=1):
            yield options.utf8_text(line, f"stdin, line {number}").strip()
        return
    try:
        import readline  # noqa: F401  (gives input() line editing and history where the platform has it)
    except ImportError:
        click.echo("This Python has no readline: lines cannot be edited.", err=True)
    while True:
        try:
            yield input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo(err=True)
            return


def _answer(session: Chat, line: str, interactive: bool) -> None:
    """Prints one answer. At a terminal Ctrl-C ends the answer, not the chat, and a refusal can be talked about."""
    try:
        for piece in session.turn(line):
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        if not interactive:
            raise
    except RequestError as error:
        if not interactive:
            raise
        click.echo(f"{error} /reset makes room.", err=True)
    click.echo()
