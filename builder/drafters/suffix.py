"""suffix: follows earlier occurrences of the text's own end, by length and count. No weights, no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbuild.checkpoint import Checkpoint
from specbuild.drafters import CompileContext, DrafterRequest, integer_options, refuse_source
from specrun.bundle import DrafterRecord

# ``shared``: tokens of earlier requests' texts to search as well, 0 for none. ``width``: branches a node may have.
DEFAULTS = {"min_match": 1, "shared": 0, "max_nodes": 16, "width": 2}


class SuffixCompiler:
    kind = "suffix"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> SuffixPlan:
        refuse_source(request)
        return SuffixPlan(integer_options(request, DEFAULTS))


@dataclass(frozen=True)
class SuffixPlan:
    options: dict[str, Any]
    taps: tuple[int, ...] = ()

    def compile(self, context: CompileContext) -> DrafterRecord:
        return DrafterRecord(name="suffix", kind="suffix", options=self.options)
