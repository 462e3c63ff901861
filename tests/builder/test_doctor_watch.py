"""What compile says of a drafter that it was told to misread."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import specrun
from specbuild.cli import main
from specbuild.compile import compile_bundle
from tests.builder import heads
from tests.builder.tiny import write_tiny_checkpoint
from tests.runtime.drafters import fixtures


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama", layers=8, seed=1)


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("head")
    return fixtures.write_eagle3(path, heads.fit_eagle3(target, path))


def compile_command(target, output, drafter, *more):
    result = CliRunner().invoke(
        main, ["compile", str(target), "-o", str(output), "--drafter", drafter, "--max-length", "384", "--json", *more]
    )
    assert result.exit_code == 0, result.stderr
    return result


def test_a_reading_far_below_another_is_warned_of(target, head, tmp_path):
    result = compile_command(target, tmp_path / "bundle", f"eagle3={head},taps=3:5:6")
    assert "Warning: " in result.stderr and f"eagle3={head},taps=2:4:5" in result.stderr
    (entry,) = json.loads(result.stdout)["readings"]
    assert entry["best"] == {"taps": "2:4:5"} and entry["best_first"] > entry["first"] + 0.3
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "bundle")])
    assert "warning:" in shown.stdout and "taps=2:4:5" in shown.stdout.replace("\n", "")


def test_the_right_reading_is_not_warned_of(target, head, tmp_path):
    result = compile_command(target, tmp_path / "bundle", f"eagle3={head}")
    assert "Warning" not in result.stderr
    (entry,) = json.loads(result.stdout)["readings"]
    assert entry["warning"] is None and entry["first"] > 0.9


def test_the_bundle_is_the_one_that_an_unwatched_compile_writes(target, head, tmp_path):
    settings = {"drafters": [f"eagle3={head},taps=3:5:6"], "max_length": 384}
    watched = compile_bundle(target, tmp_path / "watched", doctor=True, **settings)
    plain = compile_bundle(target, tmp_path / "plain", **settings)
    assert watched.manifest.files == plain.manifest.files
    assert watched.manifest.engines == plain.manifest.engines
    assert watched.manifest.drafters == plain.manifest.drafters
    assert plain.manifest.calibration == {} and watched.manifest.calibration["readings"][0]["warning"]
    specrun.load(tmp_path / "watched", threads=1).generate([1, 2, 3], specrun.SamplingParams(max_tokens=4))


def test_contexts_too_short_for_the_prompts(target, head, tmp_path):
    bundle = compile_bundle(target, tmp_path / "bundle", drafters=[f"eagle3={head}"], max_length=40, doctor=True)
    assert bundle.manifest.calibration["readings"][0]["first"] is not None


def test_not_on_request(target, head, tmp_path):
    result = compile_command(target, tmp_path / "bundle", f"eagle3={head},taps=3:5:6", "--no-doctor")
    assert "Warning" not in result.stderr and json.loads(result.stdout)["readings"] == []
