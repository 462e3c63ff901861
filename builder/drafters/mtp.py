"""mtp: multi-token-prediction layers inside the target's checkpoint, in the layouts of MiMo and DeepSeek-V3 (GLM)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specbuild.checkpoint import Checkpoint
from specbuild.checkpoint.layout import layer_shapes as decoder_shapes
from specbuild.drafters import CompileContext, DrafterRequest, refuse_source
from specbuild.drafters.conditioned import ConditionedLayer
from specbuild.drafters.heads import embedding_of, layer_config, target_head
from specbuild.drafters.options import choice, drafting_options, feature_first, flag, single_tap
from specbuild.drafters.sources import Head
from specrun.bundle import DrafterRecord
from specrun.contract import FINAL_NORM
from specrun.errors import CompileError

OTHERS = ("taps", "order", "feeds_normed", "rope")
DEFAULTS = {"depth": 4, "topk": 8, "total_nodes": 32, "adaptive": 1}


@dataclass(frozen=True)
class Layout:
    """``prefix`` of layer i of a target of n layers, what it holds beside the decoder layer, and how they connect.

    ``tap``: the features that the first layer reads, of n layers.
    """

    prefix: Callable[[int, int], str]
    marker: str
    connections: Mapping[str, Any]
    norms: tuple[str, ...]
    fused: str
    tap: Callable[[int], int]


MIMO = Layout(
    prefix=lambda i, n: f"model.mtp_layers.{i}.",
    marker="input_proj.weight",
    connections={
        "feature_first": True,
        "embedding_norm": "token_layernorm.weight",
        "feature_norm": "hidden_layernorm.weight",
        "output_norm": "final_layernorm.weight",
        "feeds_normed": True,
    },
    norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
    fused="input_proj",
    tap=lambda n: n,
)
DEEPSEEK = Layout(
    prefix=lambda i, n: f"model.layers.{n + i}.",
    marker="eh_proj.weight",
    connections={
        "embedding_norm": "enorm.weight",
        "feature_norm": "hnorm.weight",
        "output_norm": "shared_head.norm.weight",
    },
    norms=("enorm", "hnorm", "shared_head.norm"),
    fused="eh_proj",
    tap=lambda n: FINAL_NORM,
)


class MtpCompiler:
    kind = "mtp"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> MtpPlan:
        """Options: depth, topk, total_nodes, adaptive, tree. Drafts deeper than there are layers reuse the last.

        Readings of the checkpoint to force: ``taps`` (``final``, or a layer), ``order``, ``feeds_normed`` (whether a
        layer passes on its normalized output), ``rope=own|target``.
        """
        refuse_source(request)
        options = drafting_options(request, DEFAULTS, OTHERS)
        layout, heads = _layers(checkpoint)
        specs = [_layer(i, layout, head, checkpoint, request) for i, head in enumerate(heads)]
        layers = checkpoint.config.num_layers
        return MtpPlan(specs, (single_tap(request, layout.tap(layers), layers),), options)


@dataclass(frozen=True)
class MtpPlan:
    specs: list[ConditionedLayer]
    taps: tuple[int, ...]
    options: dict[str, Any]

    def compile(self, context: CompileContext) -> DrafterRecord:
        for spec in self.specs:
            context.compile(spec.describe(context.max_positions))
        options = {**self.options, "taps": list(self.taps), "engines": [spec.name for spec in self.specs]}
        return DrafterRecord(name="mtp", kind="mtp", engine=self.specs[0].name, options=options)


def _layers(checkpoint: Checkpoint) -> tuple[Layout, list[Head]]:
    """The layout that the checkpoint follows, and each layer's tensors without their prefix."""
    for layout in (MIMO, DEEPSEEK):
        heads = list(_stored(layout, checkpoint))
        if heads:
            return layout, heads
    found = sorted({name.split(".")[0] for name in checkpoint.extra})
    raise CompileError(
        f"Drafter mtp: {checkpoint.source} holds no multi-token-prediction layer that is known: expected "
        f"model.mtp_layers.0.{MIMO.marker} or model.layers.{checkpoint.config.num_layers}.{DEEPSEEK.marker}. Beside "
        f"the decoder it has {found or 'nothing'}."
    )


def _stored(layout: Layout, checkpoint: Checkpoint) -> Iterator[Head]:
    index, n = 0, checkpoint.config.num_layers
    while layout.prefix(index, n) + layout.marker in checkpoint.extra:
        prefix = layout.prefix(index, n)
        tensors = {name[len(prefix) :]: s for name, s in checkpoint.extra.items() if name.startswith(prefix)}
        yield Head("mtp", f"{checkpoint.source}: {prefix}*", checkpoint.raw_config, tensors)
        index += 1


def _layer(index: int, layout: Layout, head: Head, checkpoint: Checkpoint, request: DrafterRequest) -> ConditionedLayer:
    """Layer ``index``; its decoder layer is like the target's own."""
    config, hidden = checkpoint.config, checkpoint.config.hidden_size
    needed: dict[str, Any] = dict(decoder_shapes(config))
    needed |= {f"{name}.weight": (hidden,) for name in layout.norms}
    needed[f"{layout.fused}.weight"] = (hidden, 2 * hidden)
    whole = (config.vocab_size, hidden)
    head.take(
        needed, {"embed_tokens.weight": whole, "shared_head.head.weight": whole, f"{layout.fused}.bias": (hidden,)}
    )
    connections = dict(layout.connections)
    connections["feature_first"] = feature_first(request, connections.get("feature_first", False))
    if (normed := flag(request, "feeds_normed")) is not None:
        connections["feeds_normed"] = normed
    return ConditionedLayer(
        name=f"mtp.{index}",
        config=layer_config(head, "", head.config, hidden, config, choice(request, "rope", ("own", "target"))),
        tensors=head.tensors,
        embedding=embedding_of(head, checkpoint, hidden),
        lm_head=head.tensors.get("shared_head.head.weight") or target_head(head, checkpoint, hidden),
        layer="",
        fused=layout.fused,
        **connections,
    )
