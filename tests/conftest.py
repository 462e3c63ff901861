"""Fixtures shared by all rooms' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import demo_model


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file, fetched once into the user's cache."""
    return demo_model.fetch()
