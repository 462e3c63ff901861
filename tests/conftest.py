"""Fixtures shared by all rooms' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.interpreter import Interpreter
from tools import demo_model


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file, fetched once into the user's cache."""
    return demo_model.fetch()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Triton's interpreter, in one worker process for the whole session."""
    worker = Interpreter()
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory) -> Path:
    """A compiled cpu bundle of a tiny random Llama. Tests copy it before they change it."""
    from specbuild.compile import compile_bundle
    from tests.builder.tiny import write_tiny_checkpoint

    root = tmp_path_factory.mktemp("tiny")
    checkpoint = write_tiny_checkpoint(root / "checkpoint", "llama")
    compile_bundle(checkpoint, root / "bundle", max_length=512)
    return root / "bundle"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch, request) -> None:
    """Measured pass costs go to a directory of the test run, not to the user's cache (the demo model stays there)."""
    if "demo_gguf" not in request.fixturenames:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def demo_bundle(demo_gguf, tmp_path_factory) -> Path:
    """The demo model compiled for the CPU in fp32."""
    from specbuild.compile import compile_bundle

    path = tmp_path_factory.mktemp("demo") / "fp32.bundle"
    compile_bundle(demo_gguf, path)
    return path
