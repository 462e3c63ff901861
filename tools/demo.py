"""The demo: fetch a model, compile a bundle, decode a prompt, compare plain decoding with speculation.

Run as `make demo`, or `python -m tools.demo` where the package is installed. Needs no GPU and no torch.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import click

from specbuild.drafters import KINDS
from specrun import profiles
from specrun.errors import UserError
from tools import demo_model

GROUPS = ("mt-bench", "summarization", "qa", "no-copy", "copy")  # of the built-in prompts, for the comparison
PROMPT = "Explain in two sentences why the sky is blue."


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), default=Path("demo.bundle"), show_default=True)
@click.option("--quantize", type=click.Choice(["int4", "int8"]), help="Compile with blocked integer weights.")
@click.option("--limit", type=int, default=1, show_default=True, help="Prompts of each group in the comparison.")
@click.option("--rounds", type=int, default=2, show_default=True, help="Rounds of the comparison.")
@click.option("--max-tokens", type=int, default=64, show_default=True, help="Tokens a turn in the comparison.")
def demo(bundle: Path, quantize: str | None, limit: int, rounds: int, max_tokens: int) -> None:
    """Fetch, compile, decode, compare. Every step but the first is a command that you could type."""
    begin = time.perf_counter()
    try:
        model = demo_model.fetch()
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from None
    drafters = [word for drafter in shipped_drafters() for word in ("--drafter", drafter)]
    numerics = ["--quantize", quantize] if quantize else []
    _run("specbuild", "compile", str(model), *drafters, *numerics, "-o", str(bundle))
    _run("specrun", "generate", str(bundle), "-p", PROMPT, "--max-tokens", "96", "--stats")
    sizes = ("--limit", str(limit), "--rounds", str(rounds), "--max-tokens", str(max_tokens))
    groups = [word for group in GROUPS for word in ("--group", group)]
    _run("specrun", "bench", str(bundle), *groups, *sizes)
    click.echo(f"Done in {time.perf_counter() - begin:.0f} s. Next: specrun chat {bundle}")


def shipped_drafters() -> list[str]:
    """``KIND=FOLDER`` of the demo model's drafters in profiles/drafters; hybrids take the first head, EAGLE-3's."""
    folders = (profiles.ROOM / "drafters").glob("smollm2-*/")
    folders = sorted(folders, key=lambda folder: (folder.name != "smollm2-eagle3", folder.name))
    kinds = {folder.name.removeprefix("smollm2-"): folder for folder in folders}
    return [f"{kind}={folder}" for kind, folder in kinds.items() if kind in KINDS]


def _run(command: str, *arguments: str) -> None:
    """Shows a command and runs it; its failure ends the demo with its exit code."""
    click.secho(f"\n$ {shlex.join([command, *arguments])}", bold=True)
    result = subprocess.run([Path(sys.executable).parent / command, *arguments], check=False)
    if result.returncode:
        raise SystemExit(result.returncode)


if __name__ == "__main__":
    demo()
