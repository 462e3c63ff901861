"""Measures what a target pass of N nodes costs on this machine, once, and remembers it in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from specrun.bundle import Bundle
from specrun.decoder import Decoder, Row
from specrun.economics import PassCosts
from specrun.tree import DraftTree

POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXT = 64  # committed rows while measuring
SECONDS = 1.5  # stop after this, finished or not (one round always finishes)
ROUNDS = 7


def pass_costs(bundle: Bundle, target: Decoder, threads: int | None) -> PassCosts:
    """The cost curve of ``target``, in plain passes, from the cache directory or measured now."""
    path = _cache_file(bundle, threads)
    try:
        return PassCosts({int(n): float(c) for n, c in json.loads(path.read_text()).items()})
    except (OSError, ValueError, AttributeError):
        curve = measure(target, bundle.manifest.limits.max_nodes)
        _remember(path, curve)
        return PassCosts(curve)


def measure(target: Decoder, max_nodes: int) -> dict[int, float]:
    """{N: seconds of a pass of N nodes / seconds of a plain pass}: medians of rounds that alternate the sizes."""
    points = [n for n in POINTS if n <= max(2, max_nodes)]
    lane = target.cache.acquire()
    try:
        context = min(CONTEXT, target.cache.max_length)
        target.run([Row.of_chunk(lane, np.zeros(context, dtype=np.int64), logits=False)])
        target.cache.commit(lane, range(context))
        chains = [Row.of_tree(lane, np.zeros(n, dtype=np.int64), DraftTree.chain(n - 1)) for n in points]
        rows = [replace(row, keep=0) for row in chains]  # nothing is committed: the context may be full
        for row in rows:
            target.run([row])  # captures, and lets the engine pick its kernels
        samples: list[list[float]] = [[] for _ in points]
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            for row, times in zip(rows, samples, strict=True):
                times.append(target.run([row]).seconds)
            if time.perf_counter() - begin > SECONDS:
                break
    finally:
        target.cache.release(lane)
    medians = [statistics.median(times) for times in samples]
    return {n: seconds / medians[0] for n, seconds in zip(points, medians, strict=True)}


def _cache_file(bundle: Bundle, threads: int | None) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    machine = f"{platform.machine()} {platform.processor()} {_cpu_name()} {os.cpu_count()} {threads}"
    digest = hashlib.sha256((bundle.manifest.to_json() + machine).encode()).hexdigest()[:24]
    return root / "specbuild" / "costs" / f"{digest}.json"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _remember(path: Path, curve: dict[int, float]) -> None:
    """Best effort: a read-only home only means measuring again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".tmp") as stream:
            json.dump(curve, stream)
        os.replace(stream.name, path)
    except OSError:
        return
