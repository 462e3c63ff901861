"""``specrun bench``: what speculation brings, task by task, measured against plain decoding in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specrun.bench import Bench, Request, rows
from specrun.bench_report import bench_table, bench_to_json, draw, mismatch_lines, require_plot
from specrun.commands import options
from specrun.commands.opening import open_bundle, utf8_output
from specrun.engine import Engine
from specrun.errors import RequestError
from specrun.prompts import BUILTIN, Task, load_tasks
from specrun.sampling import SamplingParams

WIDTH = 110  # of the table at least: figures are never cut


@click.command()
@options.BUNDLE
@click.option("--prompts", metavar="FILE", default=BUILTIN, show_default=True, help="JSON lines, or Spec-Bench's file.")
@click.option(
    "--drafter", "drafters", metavar="NAME", multiple=True, help="Repeatable; all is every one. [default: all]"
)
@options.ACCEPT
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens to generate at most a turn.")
@click.option("--limit", type=click.IntRange(1), help="At most so many prompts of each group.")
@click.option("--group", "groups", metavar="NAME", multiple=True, help="Only this group of prompts. Repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Medians are taken over them.")
@click.option("--temperature", type=float, default=0.0, help="0 is greedy. [default: 0]")
@click.option("--seed", type=int, default=0, help="Of drawn tokens. [default: 0]")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures there.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw acceptance and speed into a PNG.")
@options.THREADS
def bench(
    bundle: Path,
    prompts: str,
    drafters: tuple[str, ...],
    accept: str | None,
    limit: int | None,
    groups: tuple[str, ...],
    rounds: int,
    json_file: Path | None,
    plot: Path | None,
    threads: int | None,
    **sampling: Any,
) -> None:
    """Measure BUNDLE's drafters on PROMPTS: speed, passes, acceptance, and whether the tokens are plain decoding's."""
    utf8_output()
    params = SamplingParams(**sampling)
    rule = options.accept_rule(accept)
    _check_outputs(json_file, plot)
    tasks = _chosen(load_tasks(prompts, limit), groups)
    engine = open_bundle(bundle, threads)
    measurement = Bench(engine, _drafters(engine, drafters), params, rounds, rule)
    _report(measurement, _run(measurement, tasks), json_file, plot)


def _run(measurement: Bench, tasks: list[Task]) -> list[Request]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    total = sum(len(task.turns) for task in tasks) * len(measurement.contenders) * measurement.rounds
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("Measuring", total=total)
        return measurement.run(tasks, lambda: progress.advance(bar))


def _report(measurement: Bench, requests: list[Request], json_file: Path | None, plot: Path | None) -> None:
    table = rows(measurement, requests)
    Console(width=max(Console().width, WIDTH)).print(bench_table(table))
    for line in mismatch_lines(requests):
        click.echo(line)
    if json_file is not None:
        report = bench_to_json(measurement, requests, table)
        json_file.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        draw(table, plot)


def _drafters(engine: Engine, names: tuple[str, ...]) -> list[str]:
    """The drafters to measure, opened so that an unknown or broken one is refused before anything runs."""
    chosen = engine.drafters if not names or "all" in names else list(names)
    for name in chosen:
        engine.drafter(name)
    return chosen


def _chosen(tasks: list[Task], groups: tuple[str, ...]) -> list[Task]:
    known = list(dict.fromkeys(task.group for task in tasks))
    if unknown := [group for group in groups if group not in known]:
        raise RequestError(f"--group: found {unknown}; the prompts have {known}.")
    return [task for task in tasks if not groups or task.group in groups]


def _check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Refuses, before a long measurement, what could not be written after it."""
    for path in (json_file, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"{path}: its directory does not exist. Create {path.absolute().parent} first.")
    if plot is not None:
        require_plot()
