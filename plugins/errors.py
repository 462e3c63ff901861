"""The refusal of an op's host edge."""

from __future__ import annotations


class ContractError(ValueError):
    """A shape, type or value outside an op's contract: names the op, the argument, what was found and supported."""
