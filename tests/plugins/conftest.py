from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    worker = Interpreter()
    yield worker
    worker.close()
