"""eagle: EAGLE-1 and EAGLE-2 heads (Li et al. 2024), which share their weights and differ in the tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbuild.checkpoint import Checkpoint
from specbuild.drafters import CompileContext, DrafterRequest
from specbuild.drafters.conditioned import ConditionedLayer
from specbuild.drafters.heads import embedding_of, layer_config, layer_shapes, target_head
from specbuild.drafters.options import choice, drafting_options, feature_first, single_tap
from specbuild.drafters.sources import Head
from specrun.bundle import DrafterRecord
from specrun.contract import FINAL_NORM

OTHERS = ("taps", "order", "rope")
DEFAULTS = {"depth": 6, "topk": 8, "total_nodes": 48, "adaptive": 1}


class EagleCompiler:
    kind = "eagle"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> EaglePlan:
        """Options: depth, topk, total_nodes, adaptive (EAGLE-2's tree; a chain where topk is 1), or ``tree``, the name
        of a static tree profile (EAGLE-1); and readings of the checkpoint to force: ``taps`` (``final``, or a layer),
        ``order``, ``rope=own|target``."""
        options = drafting_options(request, DEFAULTS, OTHERS)
        head = Head.open(request).renamed({"model.": ""})
        hidden = checkpoint.config.hidden_size
        _check(head, hidden)
        spec = ConditionedLayer(
            name="eagle",
            config=layer_config(
                head, "layers.0.", head.config, hidden, checkpoint.config, choice(request, "rope", ("own", "target"))
            ),
            tensors=head.tensors,
            embedding=embedding_of(head, checkpoint, hidden),
            lm_head=head.tensors.get("lm_head.weight") or target_head(head, checkpoint, hidden),
            layer="layers.0",
            fused="fc",
            feature_first=feature_first(request, False),
        )
        return EaglePlan(spec, (single_tap(request, FINAL_NORM, checkpoint.config.num_layers),), options)


@dataclass(frozen=True)
class EaglePlan:
    spec: ConditionedLayer
    taps: tuple[int, ...]
    options: dict[str, Any]

    def compile(self, context: CompileContext) -> DrafterRecord:
        context.compile(self.spec.describe(context.max_positions))
        options = {**self.options, "taps": list(self.taps)}
        return DrafterRecord(name=self.spec.name, kind=self.spec.name, engine=self.spec.name, options=options)


def _check(head: Head, hidden: int) -> None:
    """Checks every tensor. A config.json without the key ``bias`` means that fc has one."""
    needed, optional = layer_shapes(head, "layers.0.", hidden, hidden)
    needed |= {"fc.weight": (hidden, 2 * hidden), "layers.0.post_attention_layernorm.weight": (hidden,)}
    if head.config and head.config.get("bias", True):
        needed["fc.bias"] = (hidden,)
    vocabulary = head.tensors["embed_tokens.weight"].shape[:1] if "embed_tokens.weight" in head.tensors else ()
    optional |= {"fc.bias": (hidden,), "layers.0.input_layernorm.weight": (hidden,), "embed_tokens.weight": ()}
    optional |= {"lm_head.weight": (*vocabulary, hidden) if vocabulary else ()}
    head.take(needed, optional)
