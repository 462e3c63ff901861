"""The doctor names the reading that a head was made for, and says when it was made for another target."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from specbuild.cli import main
from specbuild.doctor.examine import examine
from specrun.errors import CompileError
from tests.builder import heads
from tests.builder.tiny import write_tiny_checkpoint
from tests.runtime.drafters import fixtures

LAYERS = 8  # taps 2, 4, 5


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama", layers=LAYERS, seed=1)


@pytest.fixture(scope="module")
def tensors(target, tmp_path_factory):
    """An EAGLE-3 head that is right when its file is read as it is written."""
    return heads.fit_eagle3(target, tmp_path_factory.mktemp("fit"))


def doctor(target, drafter):
    return examine(target, drafter, effort=heads.EFFORT, threads=1)


def listing(*taps):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}}


def swapped(tensors):
    """Attention that reads [feature, embedding]."""
    names = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
    return tensors | {name: np.roll(tensors[name], fixtures.HIDDEN, axis=1) for name in names}


def absolute(tensors):
    return tensors | {"d2t": tensors["d2t"] + np.arange(tensors["d2t"].size)}


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def test_a_head_that_is_read_rightly(target, tensors, tmp_path):
    found = doctor(target, f"eagle3={fixtures.write_eagle3(tmp_path, tensors)}")
    assert found.best is found.told and found.exit_code == 0
    assert found.best.score.first > 0.95 and found.control.first < 0.5


def test_outputs_of_the_layers_before_are_the_same_taps(target, tensors, tmp_path):
    found = doctor(target, f"eagle3={fixtures.write_eagle3(tmp_path, tensors, **listing(1, 3, 4))}")
    assert found.best is found.told and found.exit_code == 0


@pytest.mark.parametrize(
    ("damage", "config", "right"),
    [
        (dict, listing(3, 5, 6), {"taps": "2:4:5"}),
        (dict, listing(5, 4, 2), {"taps": "2:4:5"}),
        (dict, {"norm_before_residual": True}, {"norm_before_residual": "false"}),
        (dict, {"norm_before_residual": True, **listing(3, 5, 6)}, {"norm_before_residual": "false", "taps": "2:4:5"}),
        (dict, {"rope_theta": 50.0}, {"rope": "target"}),
        (dict, {"norm_output": True}, {"norm_output": "false"}),
        (swapped, {}, {"order": "feature-embedding"}),
        (absolute, {}, {"map": "absolute"}),
        (lambda t: without(t, "d2t"), {}, {"map": "t2d"}),
        (lambda t: without(t, "d2t"), listing(3, 5, 6), {"map": "t2d", "taps": "2:4:5"}),
    ],
)
def test_the_right_reading_is_named(target, tensors, tmp_path, damage, config, right):
    """Cases of heads that fail silently: taps off by one, flags, orders, maps."""
    head = fixtures.write_eagle3(tmp_path, damage(tensors), **config)
    found = doctor(target, f"eagle3={head}")
    assert found.misread and found.exit_code == 1
    assert found.best.options == right
    assert found.best.score.first > 0.95
    for key, value in right.items():
        assert f"{key}={value}" in found.drafter and f"{key}={value}" in found.verdict


def test_an_option_that_the_user_forces_is_judged(target, tensors, tmp_path):
    head = fixtures.write_eagle3(tmp_path, tensors)
    found = doctor(target, f"eagle3={head},taps=3:5:6")
    assert found.misread and found.best.options == {"taps": "2:4:5"}
    assert found.drafter == f"eagle3={head},taps=2:4:5"


def test_a_head_of_another_base_model(tensors, tmp_path):
    other = write_tiny_checkpoint(tmp_path / "other", "llama", layers=LAYERS, seed=2)
    found = doctor(other, f"eagle3={fixtures.write_eagle3(tmp_path / 'head', tensors)}")
    assert found.unrelated and not found.misread and found.exit_code == 1
    assert "not made for this target" in found.verdict


def test_a_pruned_head_without_any_map_is_refused(target, tensors, tmp_path):
    head = fixtures.write_eagle3(tmp_path, without(tensors, "d2t", "t2d"))
    found = doctor(target, f"eagle3={head}")
    assert found.told.refusal is not None and "d2t" in found.told.refusal
    assert found.exit_code == 1


@pytest.mark.parametrize("options", ["", ",taps=8", ",order=feature-embedding"])
def test_eagle_heads(target, tmp_path, options):
    """A head that was trained on other streams, or in the other order, than compile takes them."""
    head = fixtures.write_eagle(tmp_path / "head", heads.fit_eagle(target, tmp_path / "fit", options))
    found = doctor(target, f"eagle={head}")
    assert found.drafter == f"eagle={head}{options}"
    assert found.misread == bool(options) and found.best.score.first > 0.9


@pytest.mark.parametrize("options", ["", ",order=feature-embedding"])
def test_mtp_layers(tmp_path, options):
    def write(tensors):
        return write_tiny_checkpoint(tmp_path, "llama", layers=4, seed=1, extra_tensors=tensors)

    found = doctor(write(heads.fit_deepseek(write, 4, options)), "mtp")
    assert found.drafter == f"mtp{options}"
    assert found.misread == bool(options) and found.best.score.first > 0.9


@pytest.mark.parametrize(("offset", "right"), [(2, {}), (1, {"first": "1"})])
def test_medusa_heads_that_predict_the_next_token(target, tmp_path, offset, right):
    config = {"medusa_num_heads": 5}
    head = fixtures.write(tmp_path, heads.fit_medusa(target, offset), config, "medusa_lm_head.safetensors")
    found = doctor(target, f"medusa={head}")
    assert found.best.options == right
    assert found.misread == bool(right) and found.best.score.first > 0.9
    counted, *places = found.notes
    assert "names 5 heads, the file holds 2" in counted
    for head, note in enumerate(places):
        assert f"head {head} predicts the token {offset + head} on" in note
        assert ("not the one" in note) == bool(right)


def test_draft_models(target, tmp_path):
    found = doctor(target, f"draft-model={target}")
    assert found.exit_code == 0 and found.best.score.first > 0.99 and found.best.score.second > 0.99
    other = write_tiny_checkpoint(tmp_path / "other", "llama", seed=7)
    assert doctor(target, f"draft-model={other}").unrelated


def test_padded_vocabularies(tmp_path):
    """Rows beyond the tokenizer are masked, and the doctor says how often that mattered."""
    target = write_tiny_checkpoint(tmp_path, "llama", seed=1, vocab_size=640)
    found = doctor(target, f"draft-model={target}")
    assert found.exit_code == 0 and found.best.score.first > 0.99
    assert any("128 of its 640 rows lie beyond the tokenizer" in note for note in found.notes)
    assert any("padding row" in note for note in found.notes)


def test_positions_that_a_head_does_not_name(target, tensors, tmp_path):
    head = fixtures.write_eagle3(tmp_path, tensors, max_position_embeddings=128)
    (note,) = doctor(target, f"eagle3={head}").notes
    assert "128 positions, the target 512" in note


def test_the_command(target, tensors, tmp_path):
    head = fixtures.write_eagle3(tmp_path, tensors, norm_before_residual=True)
    few = ["--prompts", str(heads.EFFORT.prompts), "--tokens", str(heads.EFFORT.tokens), "--threads", "1"]
    result = CliRunner().invoke(main, ["doctor", str(target), "--drafter", f"eagle3={head}", "--json", *few])
    data = json.loads(result.stdout)
    assert result.exit_code == data["exit_code"] == 1
    assert data["best"]["options"] == {"norm_before_residual": "false"} and data["positions"] > 100
    result = CliRunner().invoke(main, ["doctor", str(target), "--drafter", f"eagle3={head}", *few])
    assert "norm_before_residual=false" in result.stdout and "Compile with --drafter" in result.stdout


@pytest.mark.parametrize("drafter", ["eagle3=nowhere", "suffix", "unheard-of=x"])
def test_what_cannot_be_examined_is_refused(target, drafter):
    result = CliRunner().invoke(main, ["doctor", str(target), "--drafter", drafter])
    assert result.exit_code == 2 and result.stdout == ""


def test_a_truncated_head_is_refused(target, tensors, tmp_path):
    head = fixtures.write_eagle3(tmp_path, without(tensors, "norm.weight"))
    with pytest.raises(CompileError, match=r"norm\.weight"):
        doctor(target, f"eagle3={head}")
