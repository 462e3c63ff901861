"""Profiles: every file follows its schema; what does not is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrun import profiles


def test_every_profile_loads() -> None:
    for name in profiles.names("shapes"):
        shapes = profiles.load_shapes(name)
        assert shapes.name == name and max(shapes.node_buckets) == shapes.max_nodes
    for name in profiles.names("hardware"):
        machine = profiles.load_hardware(name)
        assert machine.name == name and machine.architecture.startswith("sm_")


def test_attention_plugins_bound_the_tensorrt_shapes() -> None:
    from specrun.plugins.tree_attention.contract import MAX_NODES

    shapes = profiles.load_shapes("tensorrt")
    assert max(shapes.max_nodes, shapes.prefill_chunk) <= MAX_NODES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_nodes": 0}, "max_nodes"),
        ({"max_nodes": "many"}, "max_nodes"),
        ({"extra": 1}, "extra"),
        ({"name": 3}, "name"),
    ],
)
def test_bad_profiles(change: dict[str, object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads((profiles.ROOM / "shapes" / "default.json").read_text()) | change
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "mine.json").write_text(json.dumps(data))
    monkeypatch.setattr(profiles, "ROOM", tmp_path)
    with pytest.raises(profiles.ProfileError, match=says):
        profiles.load_shapes("mine")
    with pytest.raises(profiles.ProfileError, match="mine"):
        profiles.load_shapes("default")
