"""``specbuild prove``: the exact certificate that verification is lossless."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from specbuild.prove import TOLERANCE, Certificate, Finding, prove


@click.command("prove")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Also write it to this file.")
@click.option("--quick", is_flag=True, help="Smaller vocabularies: seconds instead of a minute.")
def prove_command(path: Path | None, quick: bool) -> None:
    """Prove by exact enumeration that every lossless rule emits the target's own law.

    Runs the runtime's verification code under every outcome of its random decisions, over small vocabularies, and
    compares the law of the next tokens with the target's. Deliberately broken variants must be caught by the same
    check. Exit code 1 when a rule fails or a broken variant passes.
    """
    certificate = prove(quick, progress=Console(stderr=True))
    if path is not None:
        path.write_text(json.dumps(certificate.to_json(), indent=1) + "\n")
    report(certificate, Console())
    if not certificate.holds:
        raise SystemExit(1)


def report(certificate: Certificate, console: Console) -> None:
    """Print a table a rule, the lossy rule, the controls, and the conclusion."""
    proved, caught = certificate.proved, certificate.controls
    for scheme in dict.fromkeys(finding.scheme for finding in proved):
        console.print(_table(scheme, "case", [(f.case, f) for f in proved if f.scheme == scheme], "lossless"))
    for finding in certificate.lossy:
        console.print(_table(finding.scheme, "case", [(finding.case, finding)], None))
    console.print(_table("controls, broken on purpose", "variant", [(f.scheme, f) for f in caught], "detected"))
    worst = max(finding.total_variation for finding in proved)
    held, seen = sum(f.lossless for f in proved), sum(f.detected for f in caught)
    console.print(
        f"{held} of {len(proved)} lossless: total variation at most {worst:.1e} (limit {TOLERANCE:g}) over "
        f"{sum(f.outcomes for f in proved)} branches; {seen} of {len(caught)} broken variants detected.",
        soft_wrap=True,
    )


def _table(title: str, heading: str, rows: list[tuple[str, Finding]], verdict: str | None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(heading, min_width=30)
    for name in ("TV", "accepted", "branches", verdict or "lossless"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, f in rows:
        reused = f.reused is not None
        mark = "no" if verdict is None else "yes" if getattr(f, verdict) else "[red]NO[/red]"
        distance, accepted = ("reuse", "") if reused else (f"{f.total_variation:.1e}", f"{f.accepted:.3f}")
        table.add_row(name, distance, accepted, str(f.outcomes), mark)
    return table
