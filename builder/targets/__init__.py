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
    """``name`` goes into the manifest. ``default_length``: longest context compiled for when the user names none."""

    name: str
    default_length: int | None

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


def open_target(name: str, quantize: str | None, dtype: str, max_length: int) -> Target:
    """The target ``name`` ("cpu", "tensorrt-rtx:sm89,sm120", ...).

    ``quantize``: None, "int4" or "int8". ``dtype``: the checkpoint's ("float32", "float16", "bfloat16").
    ``max_length``: tokens a sequence may use. Raises CompileError.
    """
    kind, _, variants = name.partition(":")
    if kind not in _MODULES:
        raise CompileError(f"Target {name!r}: unknown. Choose one of {', '.join(_MODULES)}.")
    module = importlib.import_module(_MODULES[kind])
    target: Target = module.open_target(tuple(v for v in variants.split(",") if v), quantize, dtype, max_length)
    return target
