"""Measures what a target pass of N nodes costs on this machine, once, and remembers it in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specrun.bundle import Bundle
from specrun.decoder import Decoder, Row
from specrun.economics import PassCosts
from specrun.tree import DraftTree

POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 64  # committed rows while measuring
LONGER = 2048  # the same when attention's share is measured
LONGER_POINTS = (1, 2, 4, 8, 16, 32)
SECONDS = 2.0  # stop after this, finished or not
ROUNDS = 12
LEAST_ROUNDS = 2  # that always finish
OFTEN = 16  # nodes up to which every round measures; wider passes take part in every fourth


def pass_costs(bundle: Bundle, target: Decoder, threads: int | None) -> PassCosts:
    """The cost curve of ``target``, in plain passes, from the cache directory or measured now."""
    path = _cache_file(bundle, threads)
    try:
        return _costs(_curves(json.loads(path.read_text())))
    except (OSError, ValueError, AttributeError):
        curves = measure(target, bundle.manifest.limits.max_nodes)
        _remember(path, curves)
        return _costs(curves)


Curves = dict[int, dict[int, float]]  # rows of the cache -> nodes of a pass -> cost


def _curves(data: Any) -> Curves:
    """Raises ValueError or AttributeError for anything but what ``_remember`` wrote."""
    curves = {int(rows): {int(n): float(c) for n, c in curve.items()} for rows, curve in data.items()}
    if not curves or curves[min(curves)].get(1) != 1.0:
        raise ValueError("no cost curves")
    return curves


def _costs(curves: Curves) -> PassCosts:
    rows, *longer = sorted(curves)
    return PassCosts(curves[rows], rows=rows, longer=(longer[0], curves[longer[0]]) if longer else None)


def measure(target: Decoder, max_nodes: int) -> Curves:
    """Costs in plain passes over a small cache; where the cache grows, also over one of LONGER rows."""
    seconds = dict([_measure(target, POINTS, max_nodes, CONTEXT)])
    if target.record.cache is not None and target.record.cache.capacity is None and target.cache.max_length >= LONGER:
        seconds |= [_measure(target, LONGER_POINTS, max_nodes, LONGER)]
    plain = seconds[min(seconds)][1]
    return {rows: {n: cost / plain for n, cost in curve.items()} for rows, curve in seconds.items()}


def _measure(target: Decoder, sizes: Sequence[int], max_nodes: int, context: int) -> tuple[int, dict[int, float]]:
    """The cache's rows, and seconds of passes of N nodes behind ``context`` others, from rounds that alternate N."""
    points = [n for n in sizes if n <= max(2, max_nodes)]
    lane = target.cache.acquire(context)
    try:
        context = min(context, target.cache.max_length)
        target.cache.reserve([lane], context + max(points), [0])
        target.cache.commit(lane, range(context))  # whatever lies there: no time depends on it
        chains = {n: Row.of_tree(lane, np.zeros(n, dtype=np.int64), DraftTree.chain(n - 1)) for n in points}
        rows = {n: replace(row, keep=0) for n, row in chains.items()}  # nothing is committed: the context may be full
        for row in rows.values():
            target.run([row])  # captures, and lets the engine pick its kernels
        samples: dict[int, list[float]] = {n: [] for n in points}
        begin = time.perf_counter()
        for round_ in range(ROUNDS):
            for n, row in rows.items():
                if n <= OFTEN or round_ % 4 == 0:
                    samples[n].append(target.run([row]).seconds)
            if round_ + 1 >= LEAST_ROUNDS and time.perf_counter() - begin > SECONDS:
                break
    finally:
        target.cache.release(lane)
    return target.cache.capacity, typical(samples)


def typical(samples: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The time of each node count from repeated ones.

    Whatever else the machine does only makes a pass slower: the fast quarter of the samples counts, and a pass is
    taken to cost no more than any wider one did.
    """
    points = sorted(samples)
    seconds = np.array([np.quantile(samples[n], 0.25) for n in points])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    return {n: float(cost) for n, cost in zip(points, seconds, strict=True)}


def _cache_file(bundle: Bundle, threads: int | None) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    machine = f"{platform.machine()} {platform.processor()} {_cpu_name()} {os.cpu_count()} {threads}"
    digest = hashlib.sha256((f"{POINTS} {LONGER} {bundle.manifest.to_json()}" + machine).encode()).hexdigest()[:24]
    return root / "specbuild" / "costs" / f"{digest}.json"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _remember(path: Path, curves: Curves) -> None:
    """Best effort: a read-only home only means measuring again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".tmp") as stream:
            json.dump(curves, stream)
        os.replace(stream.name, path)
    except OSError:
        return
