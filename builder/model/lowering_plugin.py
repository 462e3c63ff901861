"""The plugin lowering: attention as the project's own TensorRT plugins, which read the tree mask as it is.

Rotation and cache update stay standard operators; ``tree_attention_split`` and ``tree_attention_merge`` take the place
of ``Attention`` and its additive mask. A node carries its op's name, the plugin registry's namespace and version, and
the contract's attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from specbuild.config import ModelConfig
from specbuild.model.graph import GraphBuilder
from specbuild.model.lowering import DecoderStep
from specbuild.model.lowering_portable import PortableLowering
from specrun.plugins.contract import OpContract
from specrun.plugins.registration import ARCHITECTURE
from specrun.plugins.tree_attention.contract import HEAD_SIZES, MERGE, SPLIT, split_count, tile_rows

TYPES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
TUNED_NODES = 8  # nodes of the pass that tile and split count are chosen for: a verify pass of one sequence
REGISTRY_VERSION = "1"  # TensorRT's decorators register every plugin under it; later contracts rename the op


class PluginLowering(PortableLowering):
    """For one GPU: ``architecture`` as in "sm_90", ``processors`` its multiprocessors.

    Engines that draft in several passes (their masks are not square) and head sizes that the kernels do not have keep
    the portable attention.
    """

    def __init__(self, capacity: int, architecture: str, processors: int) -> None:
        super().__init__(capacity)
        self._cache_rows = capacity
        self._architecture, self._processors = int(architecture.removeprefix("sm_")), processors

    def mask(
        self, g: GraphBuilder, config: ModelConfig, context: ir.Value, tree_mask: ir.Value, cache: ir.Value
    ) -> ir.Value | None:
        assert tree_mask.shape is not None
        square = tree_mask.shape[1] == tree_mask.shape[2]
        return None if square and config.head_dim in HEAD_SIZES else super().mask(g, config, context, tree_mask, cache)

    def attend(self, g: GraphBuilder, step: DecoderStep, q: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
        if step.shared.mask is not None:
            return super().attend(g, step, q, keys, values)
        config = step.config
        tile = tile_rows(TUNED_NODES, config.num_heads, config.num_kv_heads)
        tiles = -(-TUNED_NODES * (config.num_heads // config.num_kv_heads) // tile)
        splits = split_count(1, config.num_kv_heads, tiles, self._cache_rows, self._processors)
        query = g.op("Transpose", q, perm=[0, 2, 1, 3])
        inputs = (query, keys, values, step.context_lengths, step.positions, step.tree_mask)
        settings = {"scale": config.head_dim**-0.5, "splits": splits, "tile_rows": tile}
        partial = self._plugin(g, SPLIT, inputs, settings)
        return self._plugin(g, MERGE, partial, {"output_type": TYPES[g.dtype]})[0]

    def _plugin(
        self, g: GraphBuilder, contract: OpContract, inputs: tuple[ir.Value, ...], settings: Mapping[str, Any]
    ) -> tuple[ir.Value, ...]:
        name = contract.plugin_id.removeprefix(f"{contract.namespace}::")
        attributes = {a.name: a.default for a in contract.attributes} | dict(settings)
        registry = {"plugin_namespace": contract.namespace, "plugin_version": REGISTRY_VERSION}
        return g.multi(
            name,
            *inputs,
            outputs=len(contract.outputs),
            domain=contract.namespace,
            **attributes,
            **{ARCHITECTURE: self._architecture},
            **registry,
        )
