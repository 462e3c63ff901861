"""Rotary position embeddings: the frequency tables of every `rope_scaling` kind the supported configs use.

The arithmetic is transformers' (``modeling_rope_utils``, v5), so that a compiled table gives the logits the original
model gives. Two kinds have no single table: `dynamic` and `longrope` switch tables by the length of the call, and keys
already in the cache keep the table they were rotated with. Such a table is compiled only up to the length at which
the first switch would happen (``RopeConfig.exact_length``); beyond it the model is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrun.errors import CheckpointError

Frequencies = tuple[np.ndarray, float]


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding. ``parameters`` holds what ``kind`` needs, under transformers' names, all resolved."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    rotary_dim: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CheckpointError(
                f"rope type {self.kind!r} is not supported; supported: {', '.join(KINDS)}. "
                "Use a checkpoint whose config.json names one of these."
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise CheckpointError(f"the rotary dimension must be even and positive, found {self.rotary_dim}")
        missing = [name for name in _REQUIRED[self.kind] if self.parameters.get(name) is None]
        if missing and "frequency_factors" not in self.parameters:
            raise CheckpointError(
                f"rope type {self.kind!r} needs {', '.join(missing)} in rope_parameters (rope_scaling) of config.json"
            )
        for name in ("short_factor", "long_factor", "frequency_factors"):
            factors = self.parameters.get(name)
            if factors is not None and len(factors) != self.rotary_dim // 2:
                raise CheckpointError(
                    f"rope {name} has {len(factors)} values; a rotary dimension of {self.rotary_dim} needs "
                    f"{self.rotary_dim // 2}"
                )

    @property
    def exact_length(self) -> int | None:
        """Longest context, in tokens, that one constant table serves exactly; None where any length is."""
        if self.kind == "dynamic":
            return int(self.parameters["max_position_embeddings"])
        if self.kind == "longrope" and self.parameters["short_factor"] != self.parameters["long_factor"]:
            return int(self.parameters["original_max_position_embeddings"])
        return None

    def inverse_frequencies(self, length: int | None = None) -> Frequencies:
        """Inverse frequencies float32 ``[rotary_dim / 2]`` and the factor on cos and sin, for a call of ``length``.

        ``length`` (tokens) matters to `dynamic` and `longrope` only; None means the table of a short call.
        """
        return KINDS[self.kind](self, length)

    def check_length(self, length: int) -> None:
        """Raises CheckpointError where a context of ``length`` tokens would need more than one table."""
        limit = self.exact_length
        if limit is not None and length > limit:
            raise CheckpointError(
                f"rope type {self.kind!r} changes its frequencies when a context grows beyond {limit} tokens, which a "
                f"compiled table cannot follow; asked for {length}. Compile with --max-length {limit} or less."
            )

    def cos_sin(self, max_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """Float32 tables ``[max_positions, rotary_dim / 2]`` of the cosines and sines.

        Raises CheckpointError where positions up to ``max_positions`` would need more than one table.
        """
        self.check_length(max_positions)
        frequencies, scaling = self.inverse_frequencies(max_positions)
        # The product is rounded to float32 as the original does; its cosine is then exact for that angle.
        angles = (np.arange(max_positions, dtype=np.float32)[:, None] * frequencies[None, :]).astype(np.float64)
        cos = np.cos(angles).astype(np.float32) * np.float32(scaling)
        sin = np.sin(angles).astype(np.float32) * np.float32(scaling)
        return cos, sin

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        parameters = {k: list(v) if isinstance(v, (tuple, list)) else v for k, v in self.parameters.items()}
        return {"theta": self.theta, "kind": self.kind, "parameters": parameters, "rotary_dim": self.rotary_dim}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RopeConfig:
        """Inverse of ``to_json``."""
        return cls(float(data["theta"]), data["kind"], dict(data["parameters"]), int(data["rotary_dim"]))


def _exponents(dim: int) -> np.ndarray:
    return np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)


def _powers(theta: float, dim: int) -> np.ndarray:
    """theta ** (2i / dim), rounded once: within one unit in the last place of any float32 power function."""
    return np.power(np.float64(theta), _exponents(dim).astype(np.float64)).astype(np.float32)


def _plain(rope: RopeConfig) -> np.ndarray:
    return np.float32(1.0) / _powers(rope.theta, rope.rotary_dim)


def _default(rope: RopeConfig, length: int | None) -> Frequencies:
    return _plain(rope), 1.0


def _linear(rope: RopeConfig, length: int | None) -> Frequencies:
    """Position interpolation (Chen et al. 2023)."""
    return _plain(rope) / np.float32(rope.parameters["factor"]), 1.0


def _dynamic(rope: RopeConfig, length: int | None) -> Frequencies:
    """NTK-aware scaling whose base grows with the length of the call, once that exceeds the trained length."""
    trained, factor = rope.parameters["max_position_embeddings"], rope.parameters["factor"]
    dim = rope.rotary_dim
    stretch = factor * max(length or trained, trained) / trained - (factor - 1)
    base = rope.theta * stretch ** (dim / (dim - 2))
    return np.float32(1.0) / _powers(base, dim), 1.0


def _llama3(rope: RopeConfig, length: int | None) -> Frequencies:
    """Llama 3.1: long wavelengths are divided by the factor, middle ones blended, short ones kept."""
    plain, p = _plain(rope), rope.parameters
    if "frequency_factors" in p:  # GGUF files carry the finished divisors instead of the four parameters
        return plain / np.asarray(p["frequency_factors"], np.float32), 1.0
    trained = np.float32(p["original_max_position_embeddings"])
    low, high, factor = (np.float32(p[k]) for k in ("low_freq_factor", "high_freq_factor", "factor"))
    wavelength = np.float32(2 * math.pi) / plain
    scaled = np.where(wavelength > trained / low, plain / factor, plain)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    middle = (wavelength >= trained / high) & (wavelength <= trained / low)
    return np.where(middle, blended, scaled).astype(np.float32), 1.0


def _mscale(scale: float, multiplier: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * multiplier * math.log(scale) + 1.0


def _yarn_attention(p: Mapping[str, Any]) -> float:
    """YaRN's temperature on the attention logits, applied to cos and sin (Peng et al. 2023, section 3.4)."""
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return _mscale(p["factor"], p["mscale"]) / _mscale(p["factor"], p["mscale_all_dim"])
    return _mscale(p["factor"])


def _yarn(rope: RopeConfig, length: int | None) -> Frequencies:
    """YaRN: interpolate the slow dimensions, keep the fast ones, ramp in between (Peng et al. 2023, section 3.2)."""
    p, dim = rope.parameters, rope.rotary_dim

    def dimension_of(rotations: float) -> float:
        trained = p["original_max_position_embeddings"]
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(p.get("beta_fast") or 32), dimension_of(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    powers, keep = _powers(rope.theta, dim), 1 - ramp
    interpolated = np.float32(1.0) / (np.float32(p["factor"]) * powers)
    return (interpolated * (1 - keep) + keep / powers).astype(np.float32), _yarn_attention(p)


def _longrope(rope: RopeConfig, length: int | None) -> Frequencies:
    """LongRoPE: searched divisors per dimension, one set up to the trained length and one beyond (Ding et al. 2024)."""
    p = rope.parameters
    trained, factor, scaling = p["original_max_position_embeddings"], p["factor"], p.get("attention_factor")
    divisors = p["long_factor"] if length and length > trained else p["short_factor"]
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return np.float32(1.0) / (np.asarray(divisors, np.float32) * _powers(rope.theta, rope.rotary_dim)), float(scaling)


KINDS: dict[str, Callable[[RopeConfig, int | None], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings"),
}
