"""eagle3: one layer over fused taps of the target (Li et al. 2025), in the layouts of SafeAILab, SpecForge and SGLang,
and of `speculators`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.checkpoint import Checkpoint
from specbuild.config import ModelConfig
from specbuild.drafters import CompileContext, DrafterRequest
from specbuild.drafters.heads import (
    MAPS,
    draft_vocabulary,
    embedding_of,
    layer_config,
    layer_shapes,
    save_vocabulary,
    target_head,
)
from specbuild.drafters.options import choice, drafting_options, feature_first, flag
from specbuild.drafters.sources import Head
from specbuild.model.blocks import Blocks, EngineDescription
from specbuild.model.weights import Weight, Weights
from specrun.bundle import DrafterRecord

DEFAULTS = {"depth": 6, "topk": 8, "total_nodes": 48, "adaptive": 1}
OTHERS = ("taps", "norm_before_residual", "norm_output", "tap_norms", "order", "map", "rope")
TAP_NAMES = ("low", "mid", "high")


class Eagle3Compiler:
    kind = "eagle3"

    def plan(self, request: DrafterRequest, checkpoint: Checkpoint) -> Eagle3Plan:
        """Options: depth, topk, total_nodes, adaptive, tree; and readings of the checkpoint to force: ``taps=2:15:27``,
        ``norm_before_residual``, ``norm_output``, ``tap_norms`` (false: leave the norms of the taps out), ``order`` (of
        what attention reads), ``map`` (see ``heads.MAPS``), ``rope=own|target``."""
        options = drafting_options(request, DEFAULTS, OTHERS)
        head = Head.open(request)
        speculators = "speculators_model_type" in head.config or "speculators_config" in head.config
        head = head.renamed(
            {"model.midlayer.": "midlayer.", "model.layers.0.": "midlayer.", "layers.0.": "midlayer.", "model.": ""}
        )
        raw = head.config.get("transformer_layer_config") or head.config
        hidden = _check(head, checkpoint.config.hidden_size)
        config = layer_config(
            head, "midlayer.", raw, hidden, checkpoint.config, choice(request, "rope", ("own", "target"))
        )
        width = head.tensors["fc.weight"].shape[1]
        taps = _taps(request, head, checkpoint.config, width // checkpoint.config.hidden_size)
        lm_head, ids = _lm_head(request, head, checkpoint, hidden)
        # The authors' layer keeps the feature as it is for its residual; `speculators` normalizes it first.
        before = _reading(request, head, "norm_before_residual", speculators)
        spec = Eagle3Spec(
            config, head.tensors, embedding_of(head, checkpoint, hidden), lm_head, width, before,
            _reading(request, head, "norm_output", False),
            flag(request, "tap_norms") is not False and has_tap_norms(head.tensors),
            feature_first(request, False),
        )  # fmt: skip
        return Eagle3Plan(spec, taps, ids, options)


@dataclass(frozen=True)
class Eagle3Plan:
    spec: Eagle3Spec
    taps: tuple[int, ...]
    ids: np.ndarray | None
    options: dict[str, Any]

    def compile(self, context: CompileContext) -> DrafterRecord:
        context.compile(self.spec.describe(context.max_positions))
        arrays = save_vocabulary(context, "eagle3", self.ids)
        options = {**self.options, "taps": list(self.taps)}
        return DrafterRecord(name="eagle3", kind="eagle3", engine="eagle3", options=options, arrays=arrays)


@dataclass(frozen=True)
class Eagle3Spec:
    """``width``: columns of the target's taps. HIDDEN_IN is [taps | own feature], see ``specrun.contract``."""

    config: ModelConfig
    tensors: Mapping[str, Weight]
    embedding: Weight
    lm_head: Weight
    width: int
    norm_before_residual: bool
    norm_output: bool
    tap_norms: bool = False
    feature_first: bool = False

    def describe(self, max_positions: int) -> EngineDescription:
        hidden = self.config.hidden_size
        return EngineDescription(
            name="eagle3",
            kind="decoder",
            vocab_size=self.lm_head.shape[0],
            hidden_size=hidden,
            emit=lambda b: self.emit(b, max_positions),
            config=self.config,
            cache_layers=1,
            taps=(1,),
            hidden_in=self.width + hidden,
            scratch=True,
        )

    def emit(self, b: Blocks, max_positions: int) -> None:
        config, weights, epsilon = self.config, Weights(self.tensors), self.config.rms_norm_eps
        layer = weights.below("midlayer")
        step = b.decoder_inputs(config, 1, max_positions, scratch=True)
        feature = self._feature(b, weights)
        embedded = b.rms_norm(b.embedding(step.tokens, self.embedding), layer["input_layernorm.weight"], epsilon)
        normed = b.rms_norm(feature, layer["hidden_norm.weight"], epsilon)
        residual = normed if self.norm_before_residual else feature
        both = b.concat([normed, embedded] if self.feature_first else [embedded, normed])
        x = b.add(residual, b.attention(step, 0, both, layer.below("self_attn"), config))
        normed = b.rms_norm(x, layer["post_attention_layernorm.weight"], epsilon)
        x = b.add(x, b.mlp(normed, layer.below("mlp")))
        output = b.rms_norm(x, weights["norm.weight"], epsilon)
        b.hidden([self._fed_back(b, output if self.norm_output else x)], config.hidden_size)
        b.logits(b.lm_head(b.gather_rows(output, step.logit_rows), self.lm_head), self.lm_head.shape[0])

    def _feature(self, b: Blocks, weights: Weights) -> ir.Value:
        """fc of the taps plus the head's own feature; one of the two is zero in every row."""
        hidden, epsilon = self.config.hidden_size, self.config.rms_norm_eps
        taps, own = b.split(b.hidden_in(self.width + hidden), [self.width, hidden])
        norms = tap_norms(self.tensors) if self.tap_norms else []
        if norms:
            parts = b.split(taps, [self.width // len(norms)] * len(norms))
            taps = b.concat([b.rms_norm(x, weights[n], epsilon) for x, n in zip(parts, norms, strict=True)])
        if self.tap_norms and weights.get("input_norm.weight") is not None:
            taps = b.rms_norm(taps, weights["input_norm.weight"], epsilon)
        return b.add(b.linear(taps, weights["fc.weight"], weights.get("fc.bias")), own)

    def _fed_back(self, b: Blocks, feature: ir.Value) -> ir.Value:
        """The bias of fc is added to every row, to drafted ones too: what they are fed goes without it."""
        bias = self.tensors.get("fc.bias")
        return feature if bias is None else b.subtract(feature, b.vector(bias))


def tap_norms(tensors: Mapping[str, Weight]) -> list[str]:
    """Names of the norms of single taps, in tap order."""
    older = [f"aux_norm_{name}.weight" for name in TAP_NAMES]
    numbered = sorted(name for name in tensors if name.startswith("fc_norm."))
    return older if older[0] in tensors else numbered


def has_tap_norms(tensors: Mapping[str, Weight]) -> bool:
    """Whether the taps are normalized before fc, one by one or together."""
    return bool(tap_norms(tensors)) or "input_norm.weight" in tensors


def _check(head: Head, target_hidden: int) -> int:
    """Checks every tensor and returns the head's width."""
    if "mask_hidden" in head.tensors:
        raise head.error("tensor mask_hidden: parallel drafting (P-EAGLE) is not supported; use a head without it.")
    fc = head.tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2:
        raise head.error("the head lacks fc.weight, a matrix. It is not an EAGLE-3 head.")
    hidden, width = fc.shape
    if width % target_hidden or width < target_hidden:
        raise head.error(
            f"tensor fc.weight has the shape {[hidden, width]}, expected [{hidden}, k * {target_hidden}] for k taps of "
            f"the target's width {target_hidden}. The head was made for another target."
        )
    needed, optional = layer_shapes(head, "midlayer.", hidden, 2 * hidden)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    needed |= {f"midlayer.{name}.weight": (hidden,) for name in norms}
    needed |= {"fc.weight": (hidden, width), "norm.weight": (hidden,)}
    optional |= {"fc.bias": (hidden,), "input_norm.weight": (width,), "embed_tokens.weight": ()}
    optional |= {"lm_head.weight": (), "d2t": (), "t2d": ()}
    if found := tap_norms(head.tensors):
        count = width // target_hidden
        names = [f"aux_norm_{n}.weight" for n in TAP_NAMES] if found[0].startswith("aux") else None
        needed |= dict.fromkeys(names or [f"fc_norm.{i}.weight" for i in range(count)], (target_hidden,))
    head.take(needed, optional)
    return hidden


def _reading(request: DrafterRequest, head: Head, key: str, default: bool) -> bool:
    """The option, else the head's config, else ``default``."""
    asked = flag(request, key)
    return bool(head.config.get(key, default)) if asked is None else asked


def _taps(request: DrafterRequest, head: Head, target: ModelConfig, count: int) -> tuple[int, ...]:
    """Residual streams, by the layer they enter. A head that lists the layers 1, n/2 - 1 and n - 4 means their outputs,
    which enter the next ones."""
    layers = target.num_layers
    eagle = head.config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise head.error("config.json: use_aux_hidden_state is false; a head without taps is not supported.")
    key = "eagle_aux_hidden_state_layer_ids"
    listed = head.config.get(key) or eagle.get(key) or (2, layers // 2, layers - 3)
    if tuple(listed) == (1, layers // 2 - 1, layers - 4):
        listed = [i + 1 for i in listed]
    if "taps" in request.options:
        listed = [int(i) if i.isdecimal() else -1 for i in request.options["taps"].split(":")]
    taps = tuple(int(i) for i in listed)
    if len(taps) != count:
        raise head.error(
            f"tensor fc.weight has the shape {list(head.tensors['fc.weight'].shape)}, expected {len(taps)} * "
            f"{target.hidden_size} columns for the taps {list(taps)} of the target. The head was made for "
            "another target, or reads other taps: say which with the option taps=LOW:MID:HIGH."
        )
    if any(not 0 <= tap <= layers for tap in taps):
        raise head.error(f"taps {list(taps)}: expected layers from 0 to {layers}. Say which with taps=LOW:MID:HIGH.")
    return taps


def _lm_head(
    request: DrafterRequest, head: Head, checkpoint: Checkpoint, hidden: int
) -> tuple[Weight, np.ndarray | None]:
    """The head's LM head and its vocabulary, or the target's whole one."""
    reading = choice(request, "map", MAPS) or "offset"
    own, vocabulary = head.tensors.get("lm_head.weight"), checkpoint.config.vocab_size
    if own is None:
        pruned = head.config.get("draft_vocab_size") or vocabulary
        if "d2t" in head.tensors or pruned != vocabulary:
            raise head.error(
                "the head lacks lm_head.weight, and its vocabulary is pruned (d2t or draft_vocab_size): the target's "
                "LM head cannot take its place. The file is incomplete."
            )
        return target_head(head, checkpoint, hidden), None
    if len(own.shape) != 2 or own.shape[1] != hidden or own.shape[0] > vocabulary:
        raise head.error(
            f"tensor lm_head.weight has the shape {list(own.shape)}, expected [{vocabulary} or fewer, {hidden}]. The "
            "head was made for another target."
        )
    return own, draft_vocabulary(head, own.shape[0], checkpoint, reading)
