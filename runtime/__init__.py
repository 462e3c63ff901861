"""specrun: decodes with compiled bundles: draft, verify, commit, emit, losslessly.

    engine = specrun.load("smollm2.bundle")
    print(engine.generate("The capital of France is", specrun.SamplingParams(max_tokens=32)).text)

Names are imported on first use, so that parts of the package (plugins, profiles) load without the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrun.engine import Choice, Delta, Engine, Generation, load
    from specrun.errors import UserError
    from specrun.sampling import SamplingParams

_HOMES = {
    "load": "specrun.engine",
    "Engine": "specrun.engine",
    "Generation": "specrun.engine",
    "Choice": "specrun.engine",
    "Delta": "specrun.engine",
    "SamplingParams": "specrun.sampling",
    "UserError": "specrun.errors",
}
__all__ = ["Choice", "Delta", "Engine", "Generation", "SamplingParams", "UserError", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specrun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
