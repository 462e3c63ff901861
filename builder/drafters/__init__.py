"""Drafter compilers: what each kind of drafter needs of the target, and what it adds to a bundle.

A new kind is one file with a class that has ``kind`` and ``plan``, and one line in ``KINDS``. Nothing else in the
builder asks which kind a drafter is.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specbuild.checkpoint import Checkpoint
from specbuild.model.blocks import EngineDescription
from specbuild.progress import Progress
from specbuild.targets import Target
from specrun.bundle import DrafterRecord, EngineRecord, Limits
from specrun.errors import CompileError

KINDS = {
    "eagle": "specbuild.drafters.eagle:EagleCompiler",
    "medusa": "specbuild.drafters.medusa:MedusaCompiler",
    "mtp": "specbuild.drafters.mtp:MtpCompiler",
    "eagle3": "specbuild.drafters.eagle3:Eagle3Compiler",
    "hybrid": "specbuild.drafters.hybrid:HybridCompiler",
    "suffix": "specbuild.drafters.suffix:SuffixCompiler",
    "draft-model": "specbuild.drafters.draft_model:DraftModelCompiler",
    "prompt-lookup": "specbuild.drafters.prompt_lookup:PromptLookupCompiler",
    "lookahead": "specbuild.drafters.lookahead:LookaheadCompiler",
    "ngram": "specbuild.drafters.ngram:NgramCompiler",
}
FIRST = "hybrid"  # always there, and what a bundle drafts with unless told otherwise: it combines the others
ALWAYS = ("suffix", "prompt-lookup", "lookahead")  # cost nothing in the bundle


@dataclass(frozen=True)
class DrafterRequest:
    """``KIND[=SOURCE][,option=value...]`` as the user wrote it. ``options`` are strings; ``plan`` checks them."""

    kind: str
    source: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> DrafterRequest:
        head, *rest = text.split(",")
        kind, _, source = head.partition("=")
        if kind not in KINDS:
            raise CompileError(f"Drafter {kind!r}: unknown kind. Choose one of {', '.join(KINDS)}.")
        options = {}
        for item in rest:
            key, equals, value = item.partition("=")
            if not equals:
                raise CompileError(f"Drafter {text!r}: found {item!r}, expected option=value.")
            options[key] = value
        return DrafterRequest(kind, source or None, options)


@dataclass
class CompileContext:
    """What a plan works with. ``taps`` is what the target engine exposes: the union of what all plans asked for."""

    checkpoint: Checkpoint
    target: Target
    limits: Limits
    max_length: int
    taps: tuple[int, ...]
    directory: Path
    progress: Progress
    engines: list[EngineRecord] = field(default_factory=list)

    @property
    def max_positions(self) -> int:
        """How far rotary tables must reach: drafted nodes may lie beyond the longest context (never accepted)."""
        return self.max_length + self.limits.max_nodes

    def compile(self, engine: EngineDescription) -> EngineRecord:
        """Compiles a drafter's engine and adds it to the bundle."""
        return self._compile(engine, self.target.drafting)

    def compile_target(self, engine: EngineDescription) -> EngineRecord:
        """The same for the engine whose word counts."""
        return self._compile(engine, self.target)

    def _compile(self, engine: EngineDescription, target: Target) -> EngineRecord:
        record = target.compile(engine, self.directory, self.limits, self.progress)
        self.engines.append(record)
        return record

    def save_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> str:
        """Writes ``name.safetensors`` and returns its path in the bundle, for ``DrafterRecord.arrays``."""
        from safetensors.numpy import save

        file = f"{name}.safetensors"  # written by hand: save_file makes files that only their owner may read
        data = save({key: np.ascontiguousarray(array) for key, array in arrays.items()})
        (self.directory / file).write_bytes(data)
        return file


class DrafterPlan(Protocol):
    """A drafter whose source has been opened and checked. ``taps``: what it reads of the target's residual streams."""

    taps: tuple[int, ...]

    def compile(self, context: CompileContext) -> DrafterRecord:
        """Compiles its engines through ``context`` and describes it. ``bytes`` is filled in afterwards."""


class DrafterCompiler(Protocol):
    kind: str

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> DrafterPlan:
        """Opens the source and checks it against the target, before any compute. Raises UserError."""


def open_compiler(kind: str) -> DrafterCompiler:
    """The compiler of a kind in ``KINDS``."""
    module, _, name = KINDS[kind].partition(":")
    compiler: DrafterCompiler = getattr(importlib.import_module(module), name)()
    return compiler


def plan_drafters(texts: list[str], checkpoint: Checkpoint) -> list[DrafterPlan]:
    """Plans of the drafters asked for, and of those that are always there. A kind may be named once."""
    requests = [DrafterRequest.parse(text) for text in texts if text != "none"]
    kinds = [request.kind for request in requests]
    if repeated := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise CompileError(f"Drafters {repeated}: named more than once. Compile one bundle for each variant.")
    requests += [DrafterRequest(kind) for kind in (FIRST, *ALWAYS) if kind not in kinds]
    requests.sort(key=lambda request: request.kind != FIRST)
    return [open_compiler(request.kind).plan(request, checkpoint) for request in requests]


def refuse_source(request: DrafterRequest) -> None:
    """For drafters without weights. Raises CompileError."""
    if request.source is not None:
        raise CompileError(
            f"Drafter {request.kind}: takes no source, found {request.source!r}. Say just `{request.kind}`."
        )


def integer_options(request: DrafterRequest, defaults: Mapping[str, int]) -> dict[str, Any]:
    """The request's options over ``defaults``, each an integer of at least 1. Raises CompileError by name."""
    values: dict[str, Any] = dict(defaults)
    for key, text in request.options.items():
        if key not in defaults:
            raise CompileError(f"Drafter {request.kind}: option {key!r} is unknown; it takes {', '.join(defaults)}.")
        if not text.isdecimal() or int(text) < 1:
            raise CompileError(f"Drafter {request.kind}: {key} is {text!r}, expected an integer of at least 1.")
        values[key] = int(text)
    return values
