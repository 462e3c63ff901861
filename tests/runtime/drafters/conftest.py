"""A tiny target for all drafters."""

from __future__ import annotations

import pytest

from tests.runtime.drafters import bundles


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return bundles.write_target(tmp_path_factory.mktemp("target"))
