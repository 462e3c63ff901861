"""Errors a user can act on.

Every message is one paragraph that names the thing, what was found, what was expected and what to do. The commands
print it without a traceback and exit with code 2.
"""

from __future__ import annotations


class UserError(Exception):
    """Base of every refusal. Raised before any compute starts and with nothing half-written."""

    exit_code = 2


class CheckpointError(UserError):
    """A model or drafter checkpoint that cannot be read as what it claims to be."""


class CompileError(UserError):
    """A compilation that cannot be done as asked (target, profile, quantization, mismatched drafter)."""


class BundleError(UserError):
    """A bundle that is absent, truncated, altered, or written for another version or machine."""


class RequestError(UserError):
    """A request that cannot be served: bad prompt, sampling value out of range, context too small."""


class CapacityError(RequestError):
    """A cache that has no room for the rows a pass would write."""


class CaptureError(RuntimeError):
    """A step did something while captured that a CUDA graph would refuse. A fault of the code, not of the user."""
