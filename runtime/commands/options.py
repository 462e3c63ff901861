"""Options that several commands share, and how they become a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from specrun.errors import RequestError
from specrun.rules import Rule, rule_named
from specrun.sampling import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
DRAFTER = click.option("--drafter", metavar="NAME", help="A drafter of the bundle, or none. [default: its first]")
ACCEPT = click.option(
    "--accept",
    metavar="RULE",
    help="Verification rule in place of the drafter's lossless one; 'typical' is lossy and reported as such.",
)
THREADS = click.option("--threads", type=click.IntRange(1), help="CPU threads a pass uses. [default: usable cores]")

_SAMPLING = (
    click.option("--max-tokens", type=int, default=256, show_default=True, help="Tokens to generate at most."),
    click.option("--temperature", type=float, default=0.0, help="0 is greedy. [default: 0]"),
    click.option("--top-k", type=int, default=0, help="Keep the K likeliest tokens; 0 keeps all. [default: 0]"),
    click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens up to this mass. [default: 1]"),
    click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the best. [default: 0]"),
    click.option("--repetition-penalty", type=float, default=1.0, help="Over prompt and output. [default: 1]"),
    click.option("--frequency-penalty", type=float, default=0.0, help="Per occurrence in the output. [default: 0]"),
    click.option("--presence-penalty", type=float, default=0.0, help="Once seen in the output. [default: 0]"),
    click.option("--logit-bias", metavar="ID=VALUE", multiple=True, help="Added to a token's logit. Repeatable."),
    click.option("--seed", type=int, default=0, help="Same seed, same tokens. [default: 0]"),
    click.option("--stop", metavar="TEXT", multiple=True, help="End right before this text. Repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token."),
)


def sampling_options(command: Command) -> Command:
    """Adds the options of one request's sampling; ``sampling_params`` reads them."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def sampling_params(logit_bias: tuple[str, ...], stop: tuple[str, ...], **settings: Any) -> SamplingParams:
    """The request as the options state it. Raises RequestError."""
    biases = dict(_bias(text) for text in logit_bias)
    return SamplingParams(logit_bias=biases, stop=tuple(valid_text(text, "--stop") for text in stop), **settings)


def accept_rule(name: str | None) -> Rule | None:
    """The rule that ``--accept`` names; None keeps the drafter's own."""
    if name is None:
        return None
    return rule_named("typical-acceptance" if name == "typical" else name)


def valid_text(text: str, name: str) -> str:
    """``text`` if it is valid Unicode (an argument's undecodable bytes arrive as lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}: not valid UTF-8 at character {error.start}. Give UTF-8 text.") from None
    return text


def read_text(source: Path | None, stdin: Callable[[], bytes]) -> str:
    """Text of a file, or of stdin when ``source`` is None or ``-``; one newline at its end is dropped."""
    name = "stdin" if source is None or str(source) == "-" else str(source)
    try:
        data = stdin() if name == "stdin" else Path(name).read_bytes()
    except OSError as error:
        raise RequestError(f"{name}: cannot be read ({error.strerror}). Check the path.") from None
    return utf8_text(data, name).removesuffix("\n").removesuffix("\r")


def utf8_text(data: bytes, name: str) -> str:
    """``data`` decoded; RequestError names where it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not valid UTF-8 at byte {error.start}. Convert it to UTF-8 text.") from None


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return int(token), float(value)
    except ValueError:
        raise RequestError(f"--logit-bias: found {text!r}, expected ID=VALUE, for example 42=-5.") from None
