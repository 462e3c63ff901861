"""The demo: fetch a model, compile a bundle, decode a prompt, compare plain decoding with speculation.

Run as `make demo`, or `python -m tools.demo` where the package is installed. Needs no GPU and no torch.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from rich.console import Console

import specrun
from specbuild.cli import main as specbuild_command
from specbuild.compile import compile_bundle
from specrun import profiles
from specrun.cli import main as specrun_command
from specrun.errors import UserError
from tools import demo_model

PROMPT = "Explain in two sentences why the sky is blue."
console = Console(highlight=False)


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), default=Path("demo.bundle"), show_default=True)
@click.option("--quantize", type=click.Choice(["int4", "int8"]), help="Compile with blocked integer weights.")
@click.option("--limit", type=int, default=1, show_default=True, help="Prompts of each group in the comparison.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds of the comparison.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens a prompt in the comparison.")
def demo(bundle: Path, quantize: str | None, limit: int, rounds: int, max_tokens: int) -> None:
    """Fetch, compile, decode, compare."""
    try:
        model = demo_model.fetch()
        _say("1. Compile", f"specbuild compile {model.name} -o {bundle}")
        drafters = shipped_drafters()
        compile_arguments = [str(model), "-o", str(bundle), *_repeated("--drafter", drafters)]
        if quantize:
            compile_arguments += ["--quantize", quantize]
        _run(specbuild_command, ["compile", *compile_arguments])
    except UserError as error:
        raise SystemExit(f"demo: {error}") from None
