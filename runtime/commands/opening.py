"""Opening a bundle on the command line: progress for what takes long, UTF-8 out whatever the locale."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specrun.engine import Engine, load

PATIENCE = 2.0  # seconds without a word before a progress bar appears


def open_bundle(path: Path, threads: int | None) -> Engine:
    """The bundle's engine, with a progress bar on stderr once it takes longer than PATIENCE. Raises BundleError."""
    with _progress(path) as advance:
        return load(path, threads=threads, progress=advance)


@contextmanager
def _progress(path: Path) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0
    task = bar.add_task(f"Loading {path.name}", total=total or None)
    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done: bar.advance(task, done)
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()


def utf8_output() -> None:
    """Text leaves as UTF-8 under any locale, and a piece at a time."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
