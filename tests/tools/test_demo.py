"""The demo's commands: every shipped drafter is compiled in, and a step that fails ends it with that step's code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from specbuild.drafters import KINDS
from specrun import profiles
from tools import demo


def test_every_shipped_drafter_is_compiled_in():
    """EAGLE-3 first, because a hybrid takes the first head; what is no drafter (the corpus) is left out."""
    shipped = [text.partition("=")[0] for text in demo.shipped_drafters()]
    folders = {path.name.removeprefix("smollm2-") for path in (profiles.ROOM / "drafters").glob("smollm2-*/")}
    assert shipped[0] == "eagle3" and set(shipped) == folders & set(KINDS) == folders - {"corpus"}


@pytest.mark.parametrize("broken", [None, "compile", "generate", "bench"])
def test_steps(monkeypatch, tmp_path, broken):
    ran = []

    def run(command, check):
        ran.append([str(word) for word in command])
        return SimpleNamespace(returncode=7 if command[1] == broken else 0)

    monkeypatch.setattr(demo.demo_model, "fetch", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(demo.subprocess, "run", run)
    result = CliRunner().invoke(demo.demo, ["--bundle", str(tmp_path / "x.bundle"), "--quantize", "int4"])
    steps = ["compile", "generate", "bench"]
    assert [words[1] for words in ran] == (steps if broken is None else steps[: steps.index(broken) + 1])
    assert result.exit_code == (0 if broken is None else 7)
    assert ran[0][2] == str(tmp_path / "model.gguf") and ran[0][-4:-2] == ["--quantize", "int4"]
    assert ("Done in" in result.output) == (broken is None)
