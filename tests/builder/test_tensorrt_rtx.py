"""TensorRT for RTX engines, built for real on machines without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbuild.compile import compile_bundle
from specbuild.inspect import summary
from specrun.bundle import Bundle
from tests.builder.tiny import FAMILIES, write_tiny_checkpoint

pytest.importorskip("tensorrt_rtx")


def counts(bundle: Bundle) -> dict[str, int]:
    file = next(name for name in bundle.manifest.engine("target").files if name.endswith("layers.json"))
    return json.loads((bundle.path / file).read_text())["counts"]  # type: ignore[no-any-return]


@pytest.mark.demo
@pytest.mark.parametrize("capability", ["sm80", "sm89", "sm120"])
def test_demo_model(capability: str, demo_gguf: Path, tmp_path: Path) -> None:
    """Attention, cache and rotation are layers of their own kind, not decompositions; weights are stored once."""
    bundle = compile_bundle(demo_gguf, tmp_path / "out.bundle", target=f"tensorrt-rtx:{capability}", max_length=1024)
    record = bundle.manifest.engine("target")
    assert record.architectures == (capability.replace("sm", "sm_"),) and record.precision == "fp16"
    assert record.cache is not None and record.cache.capacity == 1024 + 256 and record.cache.dtype == "float16"
    found = counts(bundle)
    assert (found["ATTENTION_INPUT"], found["ATTENTION_OUTPUT"]) == (30, 30)
    assert (found["KV_CACHE_UPDATE"], found["ROTARY_EMBEDDING"]) == (60, 30)
    assert "SOFTMAX" not in found
    assert found["MATRIX_MULTIPLY"] == 30 * 4 + 1  # fused: qkv, output, gate and up, down; and the head
    parameters = 134_515_008
    size = next(f.bytes for f in bundle.manifest.files if f.path.endswith(".engine"))
    assert 2 * parameters < size < 1.1 * 2 * parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    """bf16 where the checkpoint is; several capabilities in one engine."""
    model = write_tiny_checkpoint(tmp_path / "model", family, dtype="bfloat16")
    bundle = compile_bundle(model, tmp_path / "out.bundle", target="tensorrt-rtx:sm89,sm120", max_length=64)
    record = bundle.manifest.engine("target")
    assert record.precision == "bf16" and record.architectures == ("sm_89", "sm_120")
    found = counts(bundle)
    assert found["ATTENTION_INPUT"] == 2 and found["KV_CACHE_UPDATE"] == 4
    assert found["ROTARY_EMBEDDING"] == {"smollm3": 1, "qwen3": 4}.get(family, 2)
    machines = {floor["gpu"]: floor for floor in summary(bundle)["floors"]}
    assert "rtx-4090" in machines and "h200-sxm" not in machines and 100 < machines["rtx-5090"]["nodes"] < 200
