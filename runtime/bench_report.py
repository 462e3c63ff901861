"""A measurement as a table, as JSON and as a picture."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specrun.backends.ort import usable_cores
from specrun.bench import ALL, Bench, Request, Row
from specrun.errors import UserError
from specrun.report import stats_to_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENOUGH = 20  # drafted tokens behind a point of the plot
COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("task", "left"),
    ("drafter", "left"),
    ("tokens\n/s", "right"),
    ("x\nplain", "right"),
    ("first\nms", "right"),
    ("ms a\ntoken", "right"),
    ("passes", "right"),
    ("tokens\na pass", "right"),
    ("accepted", "right"),
    ("identical", "right"),
)


def bench_table(rows: Sequence[Row]) -> Table:
    """One line a row; a group's first line names it. The caption says what is lossy."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=_caption(rows), caption_justify="left")
    for name, justify in COLUMNS:
        table.add_column(name, justify=justify, no_wrap=True)
    shown = ""
    for row in rows:
        if row.group != shown and shown:
            table.add_section()
        table.add_row(row.group if row.group != shown else "", *_cells(row))
        shown = row.group
    return table


def mismatch_lines(requests: Sequence[Request]) -> list[str]:
    """Where outputs leave plain decoding's, and how close the target's choice was there."""
    return [
        f"{request.task.name} turn {request.turn + 1}, {drafter}: token {found.index} is {found.drafted}, plain "
        f"decoding has {found.plain}" + ("" if found.gap is None else f"; its top-2 gap there is {found.gap:.2e} nats")
        for request in requests
        for drafter, found in request.mismatches.items()
    ]


def bench_to_json(bench: Bench, requests: Sequence[Request], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything measured: ``rows`` as in the table, and each request's runs. Times in seconds."""
    manifest = bench.engine.manifest
    target = manifest.engine("target")
    return {
        "bundle": str(bench.engine.bundle.path),
        "model": {"family": manifest.model.family, "target": target.target, "precision": target.precision},
        "compiler": target.compiler,
        "machine": {"platform": platform.platform(), "processor": platform.machine(), "cores": usable_cores()},
        "settings": {"rounds": bench.rounds, **asdict(bench.params)},
        "rows": [asdict(row) for row in rows],
        "requests": [_request_to_json(request) for request in requests],
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Acceptance by depth, and speed over plain decoding by task, as a PNG. Needs matplotlib (``require_plot``)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    depth, speed = figure.subplots(1, 2)
    _draw_depths(depth, rows)
    _draw_ratios(speed, rows)
    figure.legend(loc="outside right upper")
    figure.savefig(path, format="png", dpi=120)


def require_plot() -> None:
    """Raises UserError, before anything is measured, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "--plot: needs matplotlib, which is not installed. Run: pip install 'specbuild[plot]'"
        ) from None


def _cells(row: Row) -> tuple[str, ...]:
    drafted = bool(row.drafted)
    return (
        row.drafter if row.lossless else f"{row.drafter} (lossy)",
        f"{row.tokens_per_second:.1f}",
        f"{row.ratio:.2f}",
        f"{1e3 * row.first_token_seconds:.0f}",
        f"{1e3 * row.token_seconds:.1f}",
        str(row.passes),
        f"{row.tokens_per_pass:.2f}",
        f"{row.acceptance:.0%}" if drafted else "-",
        f"{row.identical}/{row.requests}",
    )


def _caption(rows: Sequence[Row]) -> str:
    text = "identical: requests whose tokens are plain decoding's in every round"
    lossy = sorted({row.rule for row in rows if not row.lossless})
    return f"{text}\nLOSSY: {', '.join(lossy)} does not follow the target's distribution" if lossy else text


def _request_to_json(request: Request) -> dict[str, Any]:
    return {
        "task": request.task.name,
        "group": request.task.group,
        "turn": request.turn,
        "prompt_tokens": len(request.prompt),
        "runs": {
            drafter: [
                {"token_ids": run.token_ids, "finish_reason": run.finish_reason, "stats": stats_to_json(run.stats)}
                for run in runs
            ]
            for drafter, runs in request.runs.items()
        },
        "mismatches": {drafter: asdict(found) for drafter, found in request.mismatches.items()},
    }


def _overall(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.group == ALL] or list(rows)


def _draw_depths(axes: Axes, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    for row in _overall(rows):
        by_depth = enumerate(zip(row.acceptance_by_depth, row.judged_by_depth, strict=True), start=1)
        points = [(i, rate) for i, (rate, judged) in by_depth if rate is not None and judged >= ENOUGH]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=_color(row, rows))
    axes.set(
        title="Acceptance by depth", xlabel="depth of the draft", ylabel="accepted, given all above", ylim=(0, 1.05)
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_ratios(axes: Axes, rows: Sequence[Row]) -> None:
    groups = list(dict.fromkeys(row.group for row in rows))
    labels = list(dict.fromkeys(_label(row) for row in rows))
    width = 0.8 / len(labels)
    for place, label in enumerate(labels):
        mine = {row.group: row.ratio for row in rows if _label(row) == label}
        spots = [i + place * width for i, group in enumerate(groups) if group in mine]
        heights = [mine[group] for group in groups if group in mine]
        axes.bar(spots, heights, width, label=label, color=f"C{place}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(groups))], groups, rotation=30, ha="right")
    axes.set(title="Speed over plain decoding", ylabel="x plain")


def _color(row: Row, rows: Sequence[Row]) -> str:
    """The same in both plots."""
    labels = list(dict.fromkeys(map(_label, rows)))
    return f"C{labels.index(_label(row))}"


def _label(row: Row) -> str:
    return row.drafter if row.lossless else f"{row.drafter} ({row.rule}, lossy)"
