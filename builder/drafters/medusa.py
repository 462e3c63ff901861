"""medusa: heads of residual blocks on the target's last features (Cai et al. 2024); head i predicts the token i + 2
places on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from specbuild.checkpoint import Checkpoint
from specbuild.drafters import CompileContext, DrafterRequest
from specbuild.drafters.heads import target_head
from specbuild.drafters.options import choice, drafting_options, single_tap
from specbuild.drafters.sources import Head
from specbuild.model.blocks import Blocks, EngineDescription
from specbuild.model.weights import Weight
from specrun.bundle import DrafterRecord
from specrun.contract import FINAL_NORM
from specrun.errors import CompileError

OTHERS = ("taps", "first")
DEFAULTS = {"depth": 0, "topk": 8, "total_nodes": 48, "adaptive": 1}
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


class MedusaCompiler:
    kind = "medusa"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> MedusaPlan:
        """Options: depth (the heads by default), topk, total_nodes, adaptive, or ``tree``, a static tree profile; and
        readings of the checkpoint to force: ``taps`` (``final``, or a layer), ``first`` (1: the first head predicts the
        next token, as the target's own LM head does, and is left out; 2: the one after that)."""
        options = drafting_options(request, DEFAULTS, OTHERS)
        head = Head.open(request).renamed({"medusa_head.": ""})
        spec = _spec(head, checkpoint, skipped=choice(request, "first", ("1", "2")) == "1")
        options["depth"] = options["depth"] or len(spec.lm_heads)
        deepest = max((len(path) for path in options.get("tree", ())), default=options["depth"])
        if deepest > len(spec.lm_heads):
            raise CompileError(
                f"Drafter medusa: the tree is {deepest} deep, but {head.source} holds {len(spec.lm_heads)} heads, "
                f"which draft {len(spec.lm_heads)} tokens at most. Choose a tree or a depth that is no deeper."
            )
        return MedusaPlan(spec, options, (single_tap(request, FINAL_NORM, checkpoint.config.num_layers),))


@dataclass(frozen=True)
class MedusaSpec:
    """``lm_heads``: one a head, all the same weight where they are shared. ``blocks``: residual blocks of a head.

    ``skipped``: stored heads before the first that is used.
    """

    hidden: int
    blocks: int
    tensors: Mapping[str, Weight]
    lm_heads: list[Weight]
    skipped: int = 0

    def describe(self) -> EngineDescription:
        return EngineDescription(
            name="medusa",
            kind="heads",
            vocab_size=self.lm_heads[0].shape[0],
            hidden_size=self.hidden,
            emit=self.emit,
            hidden_in=self.hidden,
            heads=len(self.lm_heads),
        )

    def emit(self, b: Blocks) -> None:
        hidden = b.hidden_in(self.hidden, rows="M")
        rows = [self._blocks(b, hidden, head + self.skipped) for head in range(len(self.lm_heads))]
        vocabulary = self.lm_heads[0].shape[0]
        if len({weight.name for weight in self.lm_heads}) == 1:
            b.shared_head_logits(rows, self.lm_heads[0])
        else:
            b.head_logits([b.lm_head(x, weight) for x, weight in zip(rows, self.lm_heads, strict=True)], vocabulary)

    def _blocks(self, b: Blocks, x: ir.Value, head: int) -> ir.Value:
        """x + SiLU(W x + b), block after block."""
        for block in range(self.blocks):
            linear = f"{head}.{block}.linear"
            x = b.add(x, b.silu(b.linear(x, self.tensors[f"{linear}.weight"], self.tensors[f"{linear}.bias"])))
        return x


@dataclass(frozen=True)
class MedusaPlan:
    spec: MedusaSpec
    options: dict[str, Any]
    taps: tuple[int, ...]

    def compile(self, context: CompileContext) -> DrafterRecord:
        context.compile(self.spec.describe())
        return DrafterRecord(
            name="medusa", kind="medusa", engine="medusa", options={**self.options, "taps": list(self.taps)}
        )


def _spec(head: Head, checkpoint: Checkpoint, skipped: bool) -> MedusaSpec:
    """Counts heads and blocks from the tensors: published configs name other numbers than their files hold."""
    hidden, vocabulary = checkpoint.config.hidden_size, checkpoint.config.vocab_size
    blocks = [match for name in head.tensors if (match := _BLOCK.fullmatch(name))]
    count = max((int(match[1]) for match in blocks), default=-1) + 1
    depth = max((int(match[2]) for match in blocks), default=-1) + 1
    if not count:
        raise head.error("the head lacks 0.0.linear.weight. It holds no Medusa head.")
    needed: dict[str, Any] = {}
    for i in range(count):
        for j in range(depth):
            needed[f"{i}.{j}.linear.weight"], needed[f"{i}.{j}.linear.bias"] = (hidden, hidden), (hidden,)
    owned = any(_LM_HEAD.fullmatch(name) for name in head.tensors)
    if owned or (head.config and not head.config.get("borrow_lm_head")):
        needed |= {f"{i}.{depth}.weight": (vocabulary, hidden) for i in range(count)}
        owned = True
    head.take(needed, {})
    shared = target_head(head, checkpoint, hidden)
    lm_heads = [head.tensors[f"{i}.{depth}.weight"] if owned else shared for i in range(count)]
    if skipped and count == 1:
        raise head.error("first=1 leaves out the first head, and there is no other.")
    return MedusaSpec(hidden, depth, head.tensors, lm_heads[skipped:], int(skipped))
