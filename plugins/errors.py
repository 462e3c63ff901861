"""The one error of this room: arguments outside an op's contract."""

from __future__ import annotations


class ContractError(ValueError):
    """An argument of an op is outside the op's contract; raised on the host, before any launch.

    Attributes: ``op`` (name), ``argument`` (tensor, attribute or dimension), ``found``, ``supported`` (both text).
    """

    def __init__(self, op: str, argument: str, found: str, supported: str) -> None:
        super().__init__(f"{op}: argument '{argument}': found {found}; supported: {supported}")
        self.op = op
        self.argument = argument
        self.found = found
        self.supported = supported
