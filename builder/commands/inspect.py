"""``specbuild inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def inspect_command(bundle: Path, as_json: bool) -> None:
    """Print what is inside BUNDLE, after checking every file's hash."""
    from rich.console import Console

    from specbuild.inspect import summary, tables
    from specrun.bundle import Bundle

    opened = Bundle.open(bundle)
    if as_json:
        click.echo(json.dumps(summary(opened), indent=1))
    else:
        Console().print(tables(opened))
