"""``specbuild doctor``: which reading of a drafter's checkpoint is right."""

from __future__ import annotations

import json

import click


@click.command("doctor")
@click.argument("model")
@click.option(
    "--drafter", required=True, metavar="KIND[=PATH]", help="The drafter, with options as compile takes them."
)
@click.option("--quantize", type=click.Choice(["int4", "int8"]), help="Weights in blocks, to fit a large model.")
@click.option("--prompts", type=click.IntRange(1), default=8, show_default=True, help="Built-in prompts to continue.")
@click.option("--tokens", type=click.IntRange(8), default=64, show_default=True, help="Tokens of each continuation.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads. [the cores this process may use]")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor_command(
    model: str, drafter: str, quantize: str | None, prompts: int, tokens: int, threads: int | None, as_json: bool
) -> None:
    """Find what fails silently in a drafter's checkpoint.

    MODEL continues built-in prompts greedily; every plausible reading of the drafter (taps, norms, orders, vocabulary
    map, rotary positions) is compiled and scored on that text. Exit code 0: compile's own reading is right. 1: another
    is clearly better, or none fits this target. 2: the files cannot be read.
    """
    from rich.console import Console

    from specbuild.doctor.examine import Effort, examine
    from specbuild.doctor.report import report

    errors = Console(stderr=True)
    with errors.status("opening") as status:
        diagnosis = examine(
            model,
            drafter,
            quantize=quantize,
            effort=Effort(prompts, tokens),
            threads=threads,
            note=lambda line: status.update(line),
        )
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), indent=1))
    else:
        Console().print(report(diagnosis))
    raise SystemExit(diagnosis.exit_code)
