"""A diagnosis for people."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specbuild.doctor.findings import Diagnosis, Outcome, words

SHOWN = 12  # readings in the table


def report(diagnosis: Diagnosis) -> RenderableType:
    """The table of readings, best first, and the verdict."""
    took = ", ".join(f"{key}={value}" for key, value in diagnosis.readings.full({}).items()) or "no option is open"
    return Group(
        Text(f"compile takes: {took}"),
        _table(diagnosis),
        *(Text(f"note: {note}", style="yellow") for note in diagnosis.notes),
        Text(diagnosis.verdict, style="red" if diagnosis.exit_code else "green"),
    )


def _table(diagnosis: Diagnosis) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("reading")
    for name in ("first token", "second", "accepted of 2"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = list(diagnosis.outcomes[:SHOWN])
    if diagnosis.told not in shown:
        shown.append(diagnosis.told)
    for outcome in shown:
        table.add_row(*_row(diagnosis, outcome), style="bold" if outcome is diagnosis.best else None)
    left = len(diagnosis.outcomes) - len(shown)
    if left > 0:
        table.add_row(f"({left} more, none better)", "", "", "")
    if diagnosis.control is not None:
        control = diagnosis.control
        values = (f"{control.first:.1%}", f"{control.second:.1%}", f"{control.mean:.3f}")
        table.add_row("the best, with features of other positions", *values, style="dim")
    return table


def _row(diagnosis: Diagnosis, outcome: Outcome) -> tuple[str, str, str, str]:
    name = words(outcome.options) + (" (best)" if outcome is diagnosis.best else "")
    if outcome.score is None:
        return name, "refused", "", ""
    return name, f"{outcome.score.first:.1%}", f"{outcome.score.second:.1%}", f"{outcome.score.mean:.3f}"
