"""The TensorRT backend without a GPU: names against the real package, and refusals before any native load."""

from __future__ import annotations

import ast
import dataclasses
import inspect

import pytest

from specrun.backends import trt as backend
from specrun.bundle import EngineRecord
from specrun.errors import BundleError

RECORD = EngineRecord(
    "target", "decoder", "tensorrt-rtx", "fp16", "tensorrt-rtx 1.7.1.116", ("target.engine",), 10, 4,
    architectures=("sm_89", "sm_120"),
)  # fmt: skip


def test_every_name_exists_in_the_real_package():
    """What was not executed here: deserializing and running need a driver. The names and methods are the package's."""
    trt = pytest.importorskip("tensorrt_rtx")
    owners = {"trt": trt, "runtime": trt.Runtime, "_engine": trt.ICudaEngine, "engine": trt.ICudaEngine}
    owners |= {"context": trt.IExecutionContext, "_context": trt.IExecutionContext, "_trt": trt}
    checked = set()
    for node in ast.walk(ast.parse(inspect.getsource(backend))):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", None)
            if owner in owners:
                assert hasattr(owners[owner], node.attr), f"{owner}.{node.attr}"
                checked.add(node.attr)
    assert {"deserialize_cuda_engine", "set_tensor_address", "execute_async_v3", "set_device_memory"} <= checked


def test_another_version_is_refused_by_both_names():
    """F08."""
    backend.check_compiler(RECORD, "1.7.1.116")
    with pytest.raises(BundleError, match=r"1\.7\.1\.116, installed is tensorrt-rtx 1\.8\.0"):
        backend.check_compiler(RECORD, "1.8.0")


def test_another_architecture_is_refused():
    backend.check_architecture(RECORD, "sm_89")
    backend.check_architecture(dataclasses.replace(RECORD, architectures=()), "sm_75")
    with pytest.raises(BundleError, match=r"compiled for sm_89, sm_120, this GPU is sm_90.*tensorrt-rtx:sm90"):
        backend.check_architecture(RECORD, "sm_90")


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(backend.PACKAGES, "tensorrt-rtx", "no_such_package")
    with pytest.raises(BundleError, match=r"pip install 'specbuild\[tensorrt-rtx,cuda\]'"):
        backend._package(RECORD)
