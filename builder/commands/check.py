"""``specbuild check``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


@click.command("check")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--model", help="The checkpoint it was compiled from; needed for engines that are no graph (TensorRT).")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def check_command(bundle: Path, model: str | None, as_json: bool) -> None:
    """Compare every engine of BUNDLE that can run here with the portable reference graph.

    Exit code 1 when one differs by more than its precision explains.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from specbuild.check import as_json as to_json
    from specbuild.check import check_bundle
    from specbuild.checkpoint import open_checkpoint
    from specrun.bundle import Bundle

    console = Console(stderr=as_json)
    opened = Bundle.open(bundle)
    length = opened.manifest.model.max_length
    checkpoint = None if model is None else open_checkpoint(model, max_length=length)
    with console.status("") as status:
        findings = check_bundle(opened, checkpoint, lambda name: status.update(f"checking {name}"))
    if as_json:
        click.echo(json.dumps(to_json(findings), indent=1))
    else:
        table = Table("engine", "precision", "rows", "largest difference", "relative", "other argmax", "result")
        for f in findings:
            result = Text(f"skipped: {f.skipped}", "yellow") if f.skipped else Text(f.mismatch or "ok")
            numbers = (str(f.rows), f"{f.difference:.3g}", f"{f.distance:.3g}", str(f.other_argmax))
            table.add_row(f.engine, f"{f.target} {f.precision}", *numbers, result)
        console.print(table)
    if any(finding.mismatch for finding in findings):
        sys.exit(1)
