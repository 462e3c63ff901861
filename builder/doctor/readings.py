"""Readings: what a checkpoint of each kind leaves open, as options that its compiler takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from specbuild.checkpoint import Checkpoint
from specbuild.config import ModelConfig
from specbuild.drafters import DrafterRequest
from specrun.contract import FINAL_NORM

Options = Mapping[str, str]


@dataclass(frozen=True)
class Axis:
    """One option: ``values`` are its plausible ones, the one that compile takes first.

    ``engine``: False where it changes what an engine is fed or how its output is read, and not the engine.
    """

    option: str
    values: tuple[str, ...]
    engine: bool = True


@dataclass(frozen=True)
class Readings:
    """All of a checkpoint's. ``rescues``: readings to fall back on where compile refuses its own."""

    axes: tuple[Axis, ...] = ()

    def singles(self, base: Options) -> Iterator[dict[str, str]]:
        """``base`` with one option changed."""
        for axis in self.axes:
            for value in axis.values:
                if value != base.get(axis.option, axis.values[0]):
                    yield self._normal({**base, axis.option: value})

    def combinations(self) -> Iterator[dict[str, str]]:
        """Every combination."""
        for values in product(*(axis.values for axis in self.axes)):
            yield self._normal(dict(zip((axis.option for axis in self.axes), values, strict=True)))

    def engine_key(self, options: Options) -> Hashable:
        """Equal for readings whose engines are the same."""
        return tuple(options.get(axis.option, axis.values[0]) for axis in self.axes if axis.engine)

    def full(self, options: Options) -> dict[str, str]:
        """Every option with its value."""
        return {axis.option: options.get(axis.option, axis.values[0]) for axis in self.axes}

    def _normal(self, options: dict[str, str]) -> dict[str, str]:
        """Without the values that compile takes by itself."""
        default = {axis.option: axis.values[0] for axis in self.axes}
        return {key: value for key, value in options.items() if value != default.get(key)}


def readings_of(request: DrafterRequest, plan: Any, checkpoint: Checkpoint) -> Readings:
    """What ``plan`` (of ``request``) leaves open. An option that the request names is one value among others."""
    axes = AXES[request.kind](plan, checkpoint) if request.kind in AXES else []
    return Readings(tuple(_beginning_with(axis, request.options.get(axis.option)) for axis in axes))


def _beginning_with(axis: Axis, value: str | None) -> Axis:
    values = axis.values if value is None else (value, *axis.values)
    return Axis(axis.option, tuple(dict.fromkeys(values)), axis.engine)


def _eagle3(plan: Any, checkpoint: Checkpoint) -> list[Axis]:
    spec, stored = plan.spec, plan.spec.tensors
    axes = [
        Axis("taps", _tap_choices(plan.taps, checkpoint.config.num_layers), engine=False),
        _flag("norm_before_residual", spec.norm_before_residual),
        _flag("norm_output", spec.norm_output),
        Axis("order", _orders(spec.feature_first)),
        *_rope(spec.config, checkpoint.config),
    ]
    if spec.tap_norms:
        axes.append(_flag("tap_norms", True))
    if "d2t" in stored:
        axes.append(Axis("map", ("offset", "absolute"), engine=False))
    elif spec.lm_head.shape[0] < checkpoint.tokenizer.vocab_size:
        axes.append(Axis("map", ("offset", "t2d", "identity"), engine=False))
    return axes


def _eagle(plan: Any, checkpoint: Checkpoint) -> list[Axis]:
    return _conditioned(plan.spec, plan.taps, checkpoint)


def _mtp(plan: Any, checkpoint: Checkpoint) -> list[Axis]:
    spec = plan.specs[0]
    return [*_conditioned(spec, plan.taps, checkpoint), _flag("feeds_normed", spec.feeds_normed)]


def _medusa(plan: Any, checkpoint: Checkpoint) -> list[Axis]:
    first = [Axis("first", ("2", "1"))] if len(plan.spec.lm_heads) + plan.spec.skipped > 1 else []
    return [_last_streams(plan.taps[0], checkpoint), *first]


def _conditioned(spec: Any, taps: tuple[int, ...], checkpoint: Checkpoint) -> list[Axis]:
    order = Axis("order", _orders(spec.feature_first))
    return [_last_streams(taps[0], checkpoint), order, *_rope(spec.config, checkpoint.config)]


def _last_streams(tap: int, checkpoint: Checkpoint) -> Axis:
    """What a head that reads one stream may read: the last one, after the final norm or before it, or one layer up."""
    layers = checkpoint.config.num_layers
    taken = "final" if tap == FINAL_NORM else str(tap)
    return Axis("taps", (taken, "final", str(layers), str(layers - 1)), engine=False)


def _tap_choices(taps: tuple[int, ...], layers: int) -> tuple[str, ...]:
    """The taps, all of them one off or two, in reverse, and the customary ones."""
    moved = [tuple(tap + by for tap in taps) for by in (0, -1, 1)]
    customary = (2, layers // 2, layers - 3)
    choices = [*moved, taps[::-1], customary, tuple(tap - 1 for tap in customary)]
    valid = [c for c in choices if len(c) == len(taps) and all(0 <= tap <= layers for tap in c)]
    return tuple(":".join(map(str, choice)) for choice in valid)


def _flag(option: str, value: bool) -> Axis:
    return Axis(option, ("true", "false") if value else ("false", "true"))


def _rope(own: ModelConfig, target: ModelConfig) -> list[Axis]:
    """The head's rotary positions or the target's, where they may differ."""
    if own.rope != target.rope:
        return [Axis("rope", ("own", "target"))] if own.head_dim == target.head_dim else []
    return [Axis("rope", ("target", "own"))] if target.rope.kind != "default" else []


def _orders(feature_first: bool) -> tuple[str, ...]:
    orders = ("embedding-feature", "feature-embedding")
    return orders[::-1] if feature_first else orders


AXES: dict[str, Callable[[Any, Checkpoint], list[Axis]]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "mtp": _mtp,
}

# Options to try where compile refuses its own reading of a checkpoint: each may make it sound.
RESCUES: Mapping[str, tuple[Options, ...]] = {
    "eagle3": ({"map": "absolute"}, {"map": "t2d"}, {"map": "identity"}),
}
