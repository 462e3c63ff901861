"""Options that drafters with weights share: how far, how wide and how much they draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.drafters import DrafterRequest
from specrun.contract import FINAL_NORM
from specrun.errors import CompileError
from specrun.profiles import ProfileError, load_tree

# The least value each may have. ``adaptive``: 1 makes the others upper bounds that experience and costs lower.
LEAST = {"depth": 1, "topk": 1, "total_nodes": 1, "adaptive": 0}


def drafting_options(
    request: DrafterRequest, defaults: Mapping[str, int], others: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The integers of ``LEAST`` and ``tree`` (a tree profile's name) from the request, over ``defaults``.

    ``others`` names options that the caller reads itself. Raises CompileError by name.
    """
    values: dict[str, Any] = dict(defaults)
    for key, text in request.options.items():
        if key in others:
            continue
        if key == "tree":
            values["tree"] = tree_paths(request, text)
        elif key in LEAST:
            values[key] = _integer(request, key, text)
        else:
            known = ", ".join([*LEAST, "tree", *others])
            raise CompileError(f"Drafter {request.kind}: option {key!r} is unknown; it takes {known}.")
    return values


def tree_paths(request: DrafterRequest, name: str) -> list[list[int]]:
    """The choice paths of a tree profile."""
    try:
        return [list(path) for path in load_tree(name).paths]
    except ProfileError as error:
        raise CompileError(f"Drafter {request.kind}: tree: {error}") from error


def flag(request: DrafterRequest, key: str) -> bool | None:
    """An option that is ``true`` or ``false``; None where it is not given."""
    text = request.options.get(key)
    if text not in (None, "true", "false"):
        raise CompileError(f"Drafter {request.kind}: {key} is {text!r}, expected true or false.")
    return None if text is None else text == "true"


def choice(request: DrafterRequest, key: str, values: tuple[str, ...]) -> str | None:
    """An option that is one of ``values``; None where it is not given. Raises CompileError."""
    text = request.options.get(key)
    if text is not None and text not in values:
        raise CompileError(f"Drafter {request.kind}: {key} is {text!r}, expected one of {', '.join(values)}.")
    return text


def feature_first(request: DrafterRequest, default: bool) -> bool:
    """The option ``order``: of the token's embedding and the feature, which comes first where they are joined."""
    order = choice(request, "order", ("embedding-feature", "feature-embedding"))
    return default if order is None else order == "feature-embedding"


def single_tap(request: DrafterRequest, default: int, layers: int) -> int:
    """The option ``taps`` of a head that reads one stream: the layer it enters, or ``final`` (after the last norm)."""
    names = {str(i): i for i in range(layers + 1)} | {"final": FINAL_NORM}
    text = choice(request, "taps", tuple(names))
    return default if text is None else names[text]


def _integer(request: DrafterRequest, key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST[key]:
        raise CompileError(f"Drafter {request.kind}: {key} is {text!r}, expected an integer of at least {LEAST[key]}.")
    return int(text)
