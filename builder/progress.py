"""Progress: what a long task reports, without knowing who draws it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    def start(self, task: str, total: int) -> Callable[[int], None]:
        """Begins a task of ``total`` steps (bytes, where weights are written); the result takes those done since its
        last call."""


class Silent:
    """Draws nothing."""

    def start(self, task: str, total: int) -> Callable[[int], None]:
        return lambda done: None
