"""The lowering for older ONNX Runtimes: the same logits and cache, bit for bit, and no operator of opset 24."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import specrun
from specbuild.compile import compile_bundle
from specbuild.model.lowering_opset23 import Opset23Lowering
from specbuild.model.lowering_portable import PortableLowering
from specbuild.targets import cpu
from specrun.decoder import Row
from specrun.tree import DraftTree
from tests.builder.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("opsets")
    checkpoint = write_tiny_checkpoint(root / "checkpoint", "llama")
    compile_bundle(checkpoint, root / "new")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu.ort, "__version__", "1.23.2")
        compile_bundle(checkpoint, root / "old")
    return root / "new", root / "old"


def test_chosen_by_version():
    assert type(cpu._lowering("1.23.2")) is Opset23Lowering
    assert type(cpu._lowering("1.24.0")) is type(cpu._lowering("2.0.0rc1")) is PortableLowering


def test_opset_and_operators(bundles):
    for path, opset, scatter in zip(bundles, (24, 23), ("TensorScatter", "ScatterND"), strict=True):
        model = onnx.load(path / "target.onnx", load_external_data=False)
        assert [entry.version for entry in model.opset_import if entry.domain == ""] == [opset]
        assert {node.op_type for node in model.graph.node} & {"TensorScatter", "ScatterND"} == {scatter}


def test_same_bits(bundles):
    """A tree over two lanes of different lengths, and the rows that a commit leaves behind."""
    logits = []
    for path in bundles:
        target = specrun.load(path)._target
        lanes = [target.cache.acquire(), target.cache.acquire()]
        for lane, length in zip(lanes, (3, 9), strict=True):
            target.run([Row.of_chunk(lane, np.arange(5, 5 + length), logits=False)])
            target.cache.commit(lane, range(length))
        tree = DraftTree(np.array([-1, 0, 0, 1, 3]))
        rows = [Row.of_tree(lane, np.array([7, 8, 9, 10, 11]) + i, tree) for i, lane in enumerate(lanes)]
        logits.append(np.array(target.run(rows).logits))
        for lane in lanes:
            target.cache.commit(lane, [0, 1, 3, 4])
        chain = [Row.of_tree(lane, np.array([12, 13]), DraftTree.chain(1)) for lane in lanes]
        logits.append(np.array(target.run(chain).logits))
    assert np.array_equal(logits[0], logits[2]) and np.array_equal(logits[1], logits[3])
