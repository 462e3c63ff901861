"""specbuild check and inspect."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from specbuild.check import check_bundle
from specbuild.checkpoint import open_checkpoint
from specbuild.cli import main
from specbuild.compile import compile_bundle
from specrun.bundle import Bundle
from tests.builder.tiny import write_tiny_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model", "qwen3", hidden=64)


@pytest.mark.parametrize("quantize", [None, "int4", "int8"])
def test_a_good_bundle_passes(quantize: str | None, model: Path, tmp_path: Path) -> None:
    bundle = compile_bundle(model, tmp_path / "out.bundle", quantize=quantize)
    (finding,) = check_bundle(bundle)
    assert finding.mismatch is None and finding.skipped is None
    assert finding.rows > 100 and finding.difference > 0
    assert finding.distance < (1e-5 if quantize is None else 0.2)


def rewire(bundle: Bundle, change: object) -> None:
    path = bundle.path / "target.onnx"
    graph = ir.load(path)
    change(graph.graph)  # type: ignore[operator]
    ir.save(graph, path)


def see_siblings(graph: ir.Graph) -> None:
    """A fault of the mask: a fused kernel that takes the tree for a chain, and so lets siblings see each other."""
    mask = next(value for value in graph.inputs if value.name == "tree_mask")
    shape = ir.node("Shape", [mask])
    one = ir.Value(name="one", const_value=ir.tensor(np.array([True]), name="one"))
    graph.register_initializer(one)
    ones = ir.node("Expand", [one, shape.outputs[0]])
    causal = ir.node("Trilu", [ones.outputs[0]], {"upper": 0})
    for use in list(mask.uses()):
        use.node.replace_input_with(use.idx, causal.outputs[0])
    shape.replace_input_with(0, mask)
    graph.insert_before(next(iter(graph)), [shape, ones, causal])


def test_a_wrong_mask_is_found(model: Path, tmp_path: Path) -> None:
    """Prompts still agree; the first node with a sibling does not. Against the engine's own graph and the model's."""
    bundle = compile_bundle(model, tmp_path / "out.bundle")
    rewire(bundle, see_siblings)
    for checkpoint in (None, open_checkpoint(model)):
        (finding,) = check_bundle(bundle, checkpoint)
        assert finding.mismatch is not None and "first tree" in finding.mismatch


def test_command(model: Path, tmp_path: Path) -> None:
    """Exit code 1 on a mismatch, here with another model's weights; 2 for a bundle that cannot be opened."""
    path = tmp_path / "out.bundle"
    compile_bundle(model, path)
    run = CliRunner().invoke(main, ["check", str(path), "--json"])
    assert run.exit_code == 0 and json.loads(run.stdout)[0]["engine"] == "target"
    other = write_tiny_checkpoint(tmp_path / "other", "qwen3", hidden=64, seed=1)
    run = CliRunner().invoke(main, ["check", str(path), "--model", str(other)])
    assert run.exit_code == 1 and "prompt 0, token 0" in " ".join(run.stdout.replace("│", " ").split())
    (path / "target.weights").write_bytes(b"")
    for command in ("check", "inspect"):
        run = CliRunner().invoke(main, [command, str(path)])
        assert run.exit_code == 2 and "target.weights" in run.stderr


def test_inspect(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.bundle"
    compile_bundle(model, path, max_length=256, quantize="int8")
    run = CliRunner().invoke(main, ["inspect", str(path), "--json"])
    data = json.loads(run.stdout)
    assert run.exit_code == 0
    assert data["model"]["max_length"] == 256 and data["engines"][0]["precision"] == "int8"
    assert data["bytes"] == sum(p.stat().st_size for p in path.iterdir() if p.name != "bundle.json")
    assert "prompt-lookup" in CliRunner().invoke(main, ["inspect", str(path)]).stdout
