"""Engines of all drafters' roles for tensorrt-rtx, built ahead of time on any machine."""

from __future__ import annotations

import json

import pytest

from specbuild.compile import compile_bundle
from tests.runtime.drafters import bundles, fixtures

pytest.importorskip("tensorrt_rtx")


def test_every_role_builds(tmp_path):
    target = bundles.write_target(tmp_path / "target", extra_tensors=fixtures.mimo_tensors())
    shared = fixtures.medusa_tensors(own=False)
    drafters = [
        f"eagle={fixtures.write_eagle(tmp_path / 'eagle')}",
        f"eagle3={fixtures.write_eagle3(tmp_path / 'eagle3')}",
        f"medusa={fixtures.write(tmp_path / 'medusa', shared, {'borrow_lm_head': True})}",
        f"draft-model={target}",
        "mtp",
    ]
    settings = {"target": "tensorrt-rtx", "max_length": 128, "max_batch": 2}
    bundle = compile_bundle(target, tmp_path / "bundle", drafters=drafters, **settings)
    decoders = {"target": False, "eagle": True, "eagle3": True, "draft-model": True, "mtp.0": True}
    records = {record.name: record for record in bundle.manifest.engines}
    assert set(records) == {*decoders, "medusa"} and records["medusa"].kind == "heads"
    for name, drafts in decoders.items():
        assert records[name].scratch is drafts
        layers = json.loads((bundle.path / records[name].files[1]).read_text())["counts"]
        assert layers["KV_CACHE_UPDATE"] >= 2
    assert all(bundle.manifest.drafter(text.partition("=")[0]).bytes > 10_000 for text in drafters)
