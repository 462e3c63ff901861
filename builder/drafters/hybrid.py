"""hybrid: the bundle's other drafters in one tree: suffix matches, the n-gram table, and one model drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbuild.checkpoint import Checkpoint
from specbuild.drafters import KINDS, CompileContext, DrafterRequest, integer_options, refuse_source
from specrun.bundle import DrafterRecord
from specrun.errors import CompileError

DEFAULTS = {"shared": 0, "max_nodes": 16, "width": 2}


class HybridCompiler:
    """Options of the suffix drafter, and ``model``: which of the bundle's model drafters takes part (the first one)."""

    kind = "hybrid"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> HybridPlan:
        refuse_source(request)
        options = dict(request.options)
        model = options.pop("model", None)
        if model is not None and model not in KINDS:
            raise CompileError(f"Drafter {self.kind}: model is {model!r}, expected one of {', '.join(KINDS)}.")
        values = integer_options(DrafterRequest(self.kind, None, options), DEFAULTS)
        return HybridPlan(values if model is None else {**values, "model": model})


@dataclass(frozen=True)
class HybridPlan:
    options: dict[str, Any]
    taps: tuple[int, ...] = ()

    def compile(self, context: CompileContext) -> DrafterRecord:
        return DrafterRecord(name="hybrid", kind="hybrid", options=self.options)
