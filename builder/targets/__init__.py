"""Targets: each turns an ``EngineDescription`` into files and an ``EngineRecord``; ``open_target`` finds one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol

from specbuild.model.blocks import EngineDescription
from specbuild.progress import Progress
from specrun.bundle import EngineRecord, Limits
from specrun.errors import CompileError


class Target(Protocol):
    """``name`` goes into the manifest. ``drafting``: the target for engines that only draft, often itself: theirs need
    not be as exact."""

    @property
    def name(self) -> str: ...

    @property
    def drafting(self) -> Target: ...

    def compile(self, engine: EngineDescription, directory: Path, limits: Limits, progress: Progress) -> EngineRecord:
        """Writes the engine's files into ``directory``. Raises CompileError."""


_MODULES = {
    "cpu": "specbuild.targets.cpu",
    "tensorrt-rtx": "specbuild.targets.tensorrt_rtx",
    "tensorrt": "specbuild.targets.tensorrt",
}

_SHAPES = {"tensorrt": "tensorrt"}  # its attention kernels take at most 128 nodes a pass


def default_shapes(name: str) -> str:
    """The shape profile that the target ``name`` is compiled for when the user names none."""
    return _SHAPES.get(name.partition(":")[0], "default")


def open_target(
    name: str, quantize: str | None, dtype: str, max_length: int, quantize_drafters: str | None = None
) -> Target:
    """The target ``name`` ("cpu", "tensorrt-rtx:sm89,sm120", ...).

    ``quantize``: None, "int4" or "int8". ``quantize_drafters``: those or "none"; None is the target's default.
    ``dtype``: the checkpoint's ("float32", "float16", "bfloat16"). ``max_length``: tokens a sequence may use.
    Raises CompileError.
    """
    kind, _, variants = name.partition(":")
    if kind not in _MODULES:
        raise CompileError(f"Target {name!r}: unknown. Choose one of {', '.join(_MODULES)}.")
    module = importlib.import_module(_MODULES[kind])
    parts = tuple(v for v in variants.split(",") if v)
    target: Target = module.open_target(parts, quantize, dtype, max_length, quantize_drafters)
    return target
