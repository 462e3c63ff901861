"""lookahead: Jacobi iteration in the target's own pass feeds a pool of n-grams. No weights, no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbuild.checkpoint import Checkpoint
from specbuild.drafters import CompileContext, DrafterRequest, integer_options, refuse_source
from specrun.bundle import DrafterRecord
from specrun.errors import CompileError

DEFAULTS = {"window": 7, "level": 5, "guesses": 7}  # W, N and G of the paper


class LookaheadCompiler:
    kind = "lookahead"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> LookaheadPlan:
        refuse_source(request)
        options = integer_options(request, DEFAULTS)
        if options["level"] < 2:
            raise CompileError(
                f"Drafter {self.kind}: level is {options['level']}, expected at least 2 (an n-gram's tokens)."
            )
        return LookaheadPlan(options, bool(request.options))


@dataclass(frozen=True)
class LookaheadPlan:
    """``chosen``: by the user, so that a window no pass can carry is an error; a default one just stays unused."""

    options: dict[str, Any]
    chosen: bool
    taps: tuple[int, ...] = ()

    def compile(self, context: CompileContext) -> DrafterRecord:
        riders = self.options["window"] * (self.options["level"] - 1)
        if self.chosen and riders > context.limits.max_nodes - 2:
            raise CompileError(
                f"Drafter lookahead: a window of {self.options['window']} columns and {self.options['level'] - 1} "
                f"levels has {riders} nodes, but a pass carries {context.limits.max_nodes}, the pending token and a "
                "guess included. Choose a smaller window or level, or a profile with more nodes."
            )
        return DrafterRecord(name="lookahead", kind="lookahead", options=self.options)
