"""Opening what a drafter's SOURCE names: a directory or file of tensors, with or without a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.checkpoint import WeightSource, open_tensors
from specbuild.checkpoint.files import read_json, shorten
from specbuild.checkpoint.weights import WEIGHT_DTYPES
from specbuild.drafters import DrafterRequest
from specrun.errors import CompileError


def named_source(request: DrafterRequest, what: str) -> str:
    """The request's source. Raises CompileError where there is none."""
    if request.source is None:
        raise CompileError(f"Drafter {request.kind}: needs a source, {what}. Say {request.kind}=PATH.")
    return request.source


@dataclass(frozen=True)
class Head:
    """A head's files: tensors under the names its kind gives them, and its config.json ({} without one)."""

    kind: str
    source: str
    config: Mapping[str, Any]
    tensors: dict[str, WeightSource]

    @staticmethod
    def open(request: DrafterRequest) -> Head:
        """Reads a directory, or a file with a config.json beside it or none. Nothing pickled is run."""
        path = Path(named_source(request, "a directory or a .safetensors, .bin or .pt file"))
        config = (path if path.is_dir() else path.parent) / "config.json"
        return Head(request.kind, str(path), read_json(config) if config.exists() else {}, open_tensors(path))

    def renamed(self, rename: Mapping[str, str]) -> Head:
        """The same with prefixes of tensor names replaced: the first of ``rename`` that fits, once a name."""
        tensors = {}
        for name, source in self.tensors.items():
            prefix = next((p for p in rename if name.startswith(p)), "")
            tensors[rename.get(prefix, "") + name[len(prefix) :]] = source
        return Head(self.kind, self.source, self.config, tensors)

    def error(self, text: str) -> CompileError:
        return CompileError(f"Drafter {self.kind}: {self.source}: {text}")

    def take(self, shapes: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that every tensor of ``shapes`` is there, that no tensor is unknown, and every shape and dtype.

        Raises CompileError naming tensor, found and expected.
        """
        missing = [name for name in shapes if name not in self.tensors]
        if missing:
            raise self.error(f"the head lacks {shorten(missing)}. The file is incomplete, or of another kind of head.")
        unknown = sorted(name for name in self.tensors if name not in shapes and name not in optional)
        if unknown:
            raise self.error(
                f"tensors of no known use: {shorten(unknown)}. They would be left out silently, so the head is "
                f"refused; it is not of the layout that {self.kind} reads."
            )
        for name, source in self.tensors.items():
            expected = shapes.get(name) or optional[name]
            if expected and source.shape != expected:
                raise self.error(
                    f"tensor {source.name} has the shape {list(source.shape)}, expected {list(expected)}. The head was "
                    "made for another target, or its config.json is of another head."
                )
            if expected and source.dtype not in WEIGHT_DTYPES.values() and source.dtype.kind == "f":
                raise self.error(
                    f"tensor {source.name} has the dtype {source.dtype}, expected float32, float16 or bfloat16."
                )

    def integers(self, name: str) -> np.ndarray:
        """A stored table of integers, int64."""
        return self.tensors[name].read().astype(np.int64)
