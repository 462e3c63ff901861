"""The kernels that a bundle carries: one a cache layout and architecture, stored by content, read by the runtime."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specbuild.kernels import store_kernels
from specrun.backends.trt import KERNEL_FOLDER
from specrun.bundle import CacheShape, EngineRecord
from specrun.errors import CompileError
from specrun.plugins.store import KernelStore

ENGINE = EngineRecord(
    name="target",
    kind="decoder",
    target="tensorrt-rtx",
    precision="fp16",
    compiler="tensorrt_rtx 1.7.1",
    files=("target.engine",),
    vocab_size=64,
    hidden_size=64,
    architectures=("sm_89", "sm_120"),
    cache=CacheShape(2, 3, 64, "float16", 128),
)


def test_every_layout_and_architecture_gets_its_kernel(tmp_path: Path) -> None:
    draft = replace(ENGINE, name="draft", architectures=("sm_89",), cache=CacheShape(1, 1, 80, "bfloat16", 128))
    twin = replace(ENGINE, name="twin")
    entry = store_kernels(tmp_path, [ENGINE, twin, draft])
    store = KernelStore(tmp_path / KERNEL_FOLDER)
    stored = [store.get(key)[0] for key in entry["keys"]]
    assert [(launch.kernel, launch.architecture) for launch in stored] == [
        ("commit_rows.bfloat16.h1.d80", 89),
        ("commit_rows.float16.h3.d64", 89),
        ("commit_rows.float16.h3.d64", 120),
    ]


def test_an_engine_of_the_cpu_needs_none(tmp_path: Path) -> None:
    assert store_kernels(tmp_path, [replace(ENGINE, architectures=())]) == {}
    assert not (tmp_path / KERNEL_FOLDER).exists()


def test_without_triton_the_refusal_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(CompileError, match=r"triton is not installed.*specbuild\[kernels\]"):
        store_kernels(tmp_path, [ENGINE])
