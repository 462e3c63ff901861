"""``specbuild compile``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class Bars:
    """``specbuild.progress.Progress`` as one bar for each engine."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, task: str, total: int) -> Callable[[int], None]:
        bar = self._progress.add_task(task, total=total)
        return lambda done: self._progress.update(bar, advance=done)


@click.command("compile")
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Bundle directory to write.")
@click.option("--drafter", "drafters", multiple=True, metavar="KIND[=SOURCE]", help="A drafter to include; repeatable.")
@click.option("--target", default="cpu", show_default=True, help="cpu, tensorrt-rtx[:sm89,sm120] or tensorrt.")
@click.option("--quantize", type=click.Choice(["int4", "int8"]), help="Weights in blocks of 32, 4 or 8 bits each.")
@click.option(
    "--quantize-drafters",
    type=click.Choice(["int4", "int8", "none"]),
    help="The same for what only drafts: cheaper, and never changes a token. [int8 for cpu, none elsewhere]",
)
@click.option("--max-length", type=int, help="Tokens a sequence may use, prompt included. [model's own]")
@click.option("--max-batch", type=int, default=8, show_default=True, help="Sequences a pass may carry.")
@click.option("--profile", help="Shape profile by name. [default]")
@click.option(
    "--doctor/--no-doctor", default=True, show_default=True, help="Score the drafters on a little text (cpu target)."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def compile_command(model: str, output: Path, as_json: bool, **options: Any) -> None:
    """Compile MODEL, a Hugging Face directory, a hub id or a .gguf file, into a bundle."""
    from specbuild.compile import compile_bundle
    from specbuild.inspect import reading_warnings, summary, tables

    console = Console(stderr=as_json)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    begin = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        bundle = compile_bundle(model, output, progress=Bars(progress), **options)
    for warning in (*bundle.manifest.model.details.get("notes", ()), *reading_warnings(bundle)):
        click.echo(click.style("Warning: ", fg="yellow", bold=True) + warning, err=True)
    if as_json:
        click.echo(json.dumps(summary(bundle), indent=1))
        return
    console.print(tables(bundle))
    console.print(f"Compiled in {time.perf_counter() - begin:.1f} s.")
