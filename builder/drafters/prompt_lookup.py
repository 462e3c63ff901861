"""prompt-lookup: copies what followed an earlier occurrence of the last few tokens. No weights, no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbuild.checkpoint import Checkpoint
from specbuild.drafters import CompileContext, DrafterRequest, integer_options, refuse_source
from specrun.bundle import DrafterRecord
from specrun.errors import CompileError

DEFAULTS = {"min_ngram": 2, "max_ngram": 4, "max_length": 16}


class PromptLookupCompiler:
    kind = "prompt-lookup"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> PromptLookupPlan:
        refuse_source(request)
        options = integer_options(request, DEFAULTS)
        if options["min_ngram"] > options["max_ngram"]:
            raise CompileError(
                f"Drafter {self.kind}: min_ngram is {options['min_ngram']}, above max_ngram ({options['max_ngram']})."
            )
        return PromptLookupPlan(options)


@dataclass(frozen=True)
class PromptLookupPlan:
    options: dict[str, Any]
    taps: tuple[int, ...] = ()

    def compile(self, context: CompileContext) -> DrafterRecord:
        return DrafterRecord(name="prompt-lookup", kind="prompt-lookup", options=self.options)
