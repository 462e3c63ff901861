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

import numpy as np

from specrun.bundle import Bundle
from specrun.decoder import Decoder, Row
from specrun.economics import PassCosts
from specrun.tree import DraftTree

POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 64  # committed rows while measuring
SECONDS = 2.0  # stop after this, finished or not
ROUNDS = 12
LEAST_ROUNDS = 2  # that always finish
OFTEN = 16  # nodes up to which every round measures; wider passes take part in every fourth


def pass_costs(bundle: Bundle, target: Decoder, threads: int | None) -> PassCosts:
    """The cost curve of ``target``, in plain passes, from the cache directory or measured now."""
    path = _cache_file(bundle, threads)
    try:
        known = {int(n): float(c) for n, c in json.loads(path.read_text()).items()}
        if known.get(1) != 1.0:
            raise ValueError("not a cost curve")
        return PassCosts(known)
    except (OSError, ValueError, AttributeError):
        curve = measure(target, bundle.manifest.limits.max_nodes)
        _remember(path, curve)
        return PassCosts(curve)


def measure(target: Decoder, max_nodes: int) -> dict[int, float]:
    """{N: seconds of a pass of N nodes / seconds of a plain pass}, from rounds that alternate the sizes."""
    points = [n for n in POINTS if n <= max(2, max_nodes)]
    lane = target.cache.acquire()
    try:
        context = min(CONTEXT, target.cache.max_length)
        target.run([Row.of_chunk(lane, np.zeros(context, dtype=np.int64), logits=False)])
        target.cache.commit(lane, range(context))
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
    return ratios(samples)


def ratios(samples: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Relative costs from repeated times of each node count.

    Whatever else the machine does only makes a pass slower: the fast quarter of the samples counts, and a pass is
    taken to cost no more than any wider one did.
    """
    points = sorted(samples)
    seconds = np.array([np.quantile(samples[n], 0.25) for n in points])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    return {n: float(cost) for n, cost in zip(points, seconds / seconds[0], strict=True)}


def _cache_file(bundle: Bundle, threads: int | None) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    machine = f"{platform.machine()} {platform.processor()} {_cpu_name()} {os.cpu_count()} {threads}"
    digest = hashlib.sha256((f"{POINTS} {bundle.manifest.to_json()}" + machine).encode()).hexdigest()[:24]
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
