"""``specbuild prove``: the exact certificate that verification is lossless."""

from __future__ import annotations

import json
from pathlib import Path

import click
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
    """Print the three tables and the conclusion."""
    proved, caught = certificate.proved, certificate.controls
    console.print(_table(f"Lossless rules: total variation must be at most {TOLERANCE:g}", proved, "lossless"))
    console.print(_table("Lossy by design: opt-in, and named so in every report", certificate.lossy, None))
    console.print(_table("Controls: broken on purpose, and must be detected", caught, "detected"))
    worst = max(finding.total_variation for finding in proved)
    held, seen = sum(f.lossless for f in proved), sum(f.detected for f in caught)
    console.print(
        f"{held} of {len(proved)} lossless (largest total variation {worst:.1e}, "
        f"{sum(f.outcomes for f in proved)} branches); {seen} of {len(caught)} broken variants detected.",
        soft_wrap=True,
    )


def _table(title: str, findings: list[Finding], verdict: str | None) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("rule", "case"):
        table.add_column(heading)
    for heading in ("total variation", "mean accepted", "branches"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for f in findings:
        distance = f"{f.total_variation:.1e}" if f.reused is None else f"draw reused: {f.reused}"
        mark = "" if verdict is None else verdict if getattr(f, verdict) else f"[red]NOT {verdict}[/red]"
        accepted = f"{f.accepted:.3f}" if f.reused is None else ""
        table.add_row(f.scheme, f.case, distance, accepted, str(f.outcomes), mark)
    return table
