from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader

from specbuild.checkpoint.gguf_file import open_reader


@pytest.fixture(scope="session")
def demo_reader(demo_gguf: Path) -> GGUFReader:
    """The demo model's file, its metadata parsed once."""
    return open_reader(demo_gguf)
