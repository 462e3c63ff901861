"""The plugin lowering: its nodes carry the contracts, and with the oracle in their place compute what the portable
lowering does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from specbuild.checkpoint import open_checkpoint
from specbuild.model.blocks import Blocks
from specbuild.model.decoder import DecoderSpec
from specbuild.model.graph import GraphBuilder
from specbuild.model.lowering import Lowering
from specbuild.model.lowering_plugin import PluginLowering
from specbuild.model.lowering_portable import PortableLowering
from specbuild.model.numerics import Dense
from specrun import contract
from specrun.plugins.tree_attention.contract import MERGE, SPLIT
from specrun.plugins.tree_attention.reference import merge, tree_attention
from specrun.tree import DraftTree
from tests.builder.engines import largest
from tests.builder.tiny import write_tiny_checkpoint

CAPACITY = 32


class Split(OpRun):
    """The oracle as one split."""

    op_domain = SPLIT.namespace

    def _run(self, query, keys, values, lengths, positions, mask, **attributes):  # type: ignore[no-untyped-def]
        settings = {name: float(attributes[name]) for name in ("scale", "softcap")} | {"window": attributes["window"]}
        attention = tree_attention(query, keys, values, lengths, positions, mask, **settings)
        partial = attention.astype(np.float32)[:, :, :, None]
        return partial, np.zeros(partial.shape[:-1], np.float32)


class Merge(OpRun):
    op_domain = MERGE.namespace

    def _run(self, partial, lse, **attributes):  # type: ignore[no-untyped-def]
        return (merge(partial, lse).astype(attributes["output_type"]),)


Split.__name__, Merge.__name__ = SPLIT.name, MERGE.name


def graph(model: Path, lowering: Lowering) -> onnx.ModelProto:
    checkpoint = open_checkpoint(model)
    builder = GraphBuilder("target", ir.DataType.FLOAT)
    spec = DecoderSpec("target", checkpoint.config, checkpoint.tensors, CAPACITY)
    spec.emit(Blocks(builder, Dense("fp32", ir.DataType.FLOAT), lowering))
    return ir.to_proto(builder.build())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model", "qwen3", heads=4, kv_heads=2, head_dim=64)


def test_nodes_carry_the_contract(model: Path) -> None:
    proto = graph(model, PluginLowering(CAPACITY, "sm_90", 132))
    kinds = [node.op_type for node in proto.graph.node]
    assert kinds.count(SPLIT.name) == kinds.count(MERGE.name) == 2
    assert "Attention" not in kinds and "GatherElements" not in kinds
    node = next(node for node in proto.graph.node if node.op_type == SPLIT.name)
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert node.domain == "specbuild" and len(node.input) == len(SPLIT.inputs)
    assert set(found) == {a.name for a in SPLIT.attributes} | {"architecture", "plugin_namespace", "plugin_version"}
    assert found["scale"] == pytest.approx(64**-0.5) and found["architecture"] == 90
    SPLIT.check_attributes({a.name: found[a.name] for a in SPLIT.attributes})


def test_same_numbers_as_the_portable_lowering(model: Path) -> None:
    rng = np.random.default_rng(0)
    tree = DraftTree(np.array([-1, 0, 0, 1, 2]))
    lengths = np.array([7, 3])
    feed = {
        contract.TOKENS: rng.integers(0, 500, (2, tree.size)),
        contract.POSITIONS: lengths[:, None] + tree.depths,
        contract.CONTEXT_LENGTHS: lengths,
        contract.TREE_MASK: np.stack([tree.mask, tree.mask]),
        contract.LOGIT_ROWS: np.tile(np.arange(tree.size), (2, 1)),
    }
    for layer in range(2):
        for name in (contract.key_cache(layer), contract.value_cache(layer)):
            feed[name] = rng.standard_normal((2, 2, CAPACITY, 64)).astype(np.float32)
    wanted = [contract.LOGITS, contract.updated(contract.key_cache(1))]
    plugin = ReferenceEvaluator(graph(model, PluginLowering(CAPACITY, "sm_90", 132)), new_ops=[Split, Merge])
    portable = ReferenceEvaluator(graph(model, PortableLowering(CAPACITY)))
    for found, expected in zip(plugin.run(wanted, feed), portable.run(wanted, feed), strict=True):
        assert largest(found, expected) < 1e-4


def test_head_sizes_without_a_kernel_keep_the_portable_attention(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "llama", head_dim=16)
    kinds = [node.op_type for node in graph(model, PluginLowering(CAPACITY, "sm_90", 132)).graph.node]
    assert kinds.count("Attention") == 2 and SPLIT.name not in kinds
