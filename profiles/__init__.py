"""Profiles: data that compile and decode read, each kind with its schema.

``shapes/``: what engines are compiled for. ``hardware/``: what machines can do. ``trees/``: draft trees of fixed shape.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

ROOM = Path(__file__).parent


class ProfileError(ValueError):
    """A profile that is not there or does not follow its schema. The message says what and where."""


@dataclass(frozen=True)
class ShapeProfile:
    """Shapes of passes. ``static_length``: tokens of a context, where the cache is fixed and the user names none.

    ``batch_buckets`` and ``node_buckets``: the shapes decode steps are captured for on a GPU.
    """

    name: str
    max_nodes: int
    prefill_chunk: int
    static_length: int
    batch_buckets: tuple[int, ...]
    node_buckets: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def load_shapes(name: str) -> ShapeProfile:
    """The shape profile ``name``. Raises ProfileError."""
    return _load(ShapeProfile, "shapes", name)


@dataclass(frozen=True)
class HardwareProfile:
    """A GPU by its vendor's data sheet. Rates without sparsity; ``half_tflops`` with float32 sums."""

    name: str
    architecture: str  # "sm_89"
    memory_gb: float
    bandwidth_gb_s: float
    half_tflops: float
    int8_tops: float
    multiprocessors: int


def load_hardware(name: str) -> HardwareProfile:
    """The hardware profile ``name``. Raises ProfileError."""
    return _load(HardwareProfile, "hardware", name)


@dataclass(frozen=True)
class TreeProfile:
    """A draft tree as choice paths: ``[0, 2]`` is the third best child of the root's best child.

    ``nodes`` counts the paths; ``expected_accepted_tokens`` a pass, by the accuracies in ``measured_from``.
    """

    name: str
    nodes: int
    expected_accepted_tokens: float
    measured_from: str
    paths: tuple[tuple[int, ...], ...]


def load_tree(name: str) -> TreeProfile:
    """The tree profile ``name``. Raises ProfileError, also where a path's prefix or a better sibling is missing."""
    data = _read(name, "trees", TreeProfile)
    paths = data["paths"]
    if not isinstance(paths, list) or not all(_is_path(path) for path in paths):
        raise ProfileError(f"Tree profile {name!r}: paths must be non-empty lists of integers of at least 0.")
    known = {tuple(path) for path in paths}
    for path in known:
        before = [path[:-1]] if len(path) > 1 else []
        before += [(*path[:-1], path[-1] - 1)] if path[-1] else []
        if missing := [list(p) for p in before if p not in known]:
            raise ProfileError(f"Tree profile {name!r}: path {list(path)} needs {missing[0]}, which is not there.")
    return TreeProfile(**data | {"paths": tuple(sorted(known, key=lambda path: (len(path), path)))})


def _is_path(path: object) -> bool:
    return isinstance(path, list) and bool(path) and all(type(rank) is int and rank >= 0 for rank in path)


def names(kind: str) -> list[str]:
    """Names of the profiles of a kind ("shapes", "hardware", "trees")."""
    return sorted(path.stem for path in (ROOM / kind).glob("*.json"))


T = TypeVar("T")


def _load(cls: type[T], kind: str, name: str) -> T:
    data = _read(name, kind, cls)
    hints = get_type_hints(cls)
    return cls(**{key: _checked(hints[key], value, f"Profile {name!r}: {key}") for key, value in data.items()})


def _read(name: str, kind: str, cls: type) -> dict[str, Any]:
    if name not in names(kind):
        raise ProfileError(f"Profile {name!r}: not among the {kind} profiles. Choose one of {', '.join(names(kind))}.")
    path = ROOM / kind / f"{name}.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    expected = {f.name for f in fields(cls)}
    if set(data) != expected:
        raise ProfileError(f"{path}: fields {sorted(set(data) ^ expected)} are missing or unknown.")
    return data


def _checked(hint: Any, value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(_checked(int, item, where) for item in value)
    if hint is str and isinstance(value, str):
        return value
    accepted = (int, float) if hint is float else int
    if hint is str or isinstance(value, bool) or not isinstance(value, accepted) or value <= 0:
        raise ProfileError(f"{where}: found {value!r}, expected {'text' if hint is str else 'a positive number'}.")
    return value
