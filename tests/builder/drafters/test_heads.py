"""Heads at compile time: bad ones are refused before any compute, naming tensor, found and expected."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

from specbuild.checkpoint import open_checkpoint
from specbuild.drafters import DrafterRequest, open_compiler
from specrun.errors import CheckpointError, CompileError, UserError
from tests.builder.tiny import write_tiny_checkpoint
from tests.runtime.drafters import fixtures

HIDDEN, VOCAB = fixtures.HIDDEN, fixtures.VOCAB


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama", layers=6)


def plan(target, text):
    request = DrafterRequest.parse(text)
    return open_compiler(request.kind).plan(request, open_checkpoint(target))


def without(tensors, *names):
    return {name: value for name, value in tensors.items() if name not in names}


def refused(target, path, kind, match, options=""):
    with pytest.raises(UserError, match=match):
        plan(target, f"{kind}={path}{options}")


@pytest.mark.parametrize("name", sorted(without(fixtures.eagle3_tensors(), "lm_head.weight", "d2t", "t2d")))
def test_eagle3_needs_every_tensor(target, tmp_path, name):
    path = fixtures.write_eagle3(tmp_path, {**without(fixtures.eagle3_tensors(), name)}, draft_vocab_size=128)
    refused(target, path, "eagle3", name.replace(".", r"\."))


def test_eagle3_of_another_width(tmp_path):
    path = fixtures.write_eagle3(tmp_path / "head")
    wide = write_tiny_checkpoint(tmp_path / "wide", "llama", layers=6, hidden=128)
    refused(wide, path, "eagle3", r"fc.weight has the shape \[64, 192\], expected \[64, k \* 128\]")
    wide = write_tiny_checkpoint(tmp_path / "wider", "llama", layers=6, hidden=96)
    refused(wide, path, "eagle3", r"fc.weight has the shape \[64, 192\], expected 3 \* 96 columns")


def test_eagle3_wrong_shape_and_unknown_tensor(target, tmp_path):
    tensors = fixtures.eagle3_tensors()
    wrong = tensors | {"midlayer.mlp.up_proj.weight": np.zeros((100, HIDDEN), np.float32)}
    path = fixtures.write_eagle3(tmp_path / "a", wrong)
    refused(target, path, "eagle3", r"midlayer.mlp.up_proj.weight has the shape \[100, 64\], expected \[128, 64\]")
    path = fixtures.write_eagle3(tmp_path / "b", tensors | {"layers.1.norm.weight": np.zeros(HIDDEN, np.float32)})
    refused(target, path, "eagle3", "no known use: layers.1.norm.weight")
    path = fixtures.write_eagle3(tmp_path / "c", tensors | {"mask_hidden": np.zeros((1, HIDDEN), np.float32)})
    refused(target, path, "eagle3", "mask_hidden")


def test_eagle3_without_lm_head(target, tmp_path):
    """D05: a full vocabulary borrows the target's head; a pruned one cannot."""
    whole = without(fixtures.eagle3_tensors(pruned=False), "lm_head.weight", "d2t", "t2d")
    path = fixtures.write(tmp_path / "whole", whole, fixtures.LLAMA)
    made = plan(target, f"eagle3={path}")
    assert (
        made.spec.lm_head.name == "lm_head.weight" and made.spec.lm_head.shape == (VOCAB, HIDDEN) and made.ids is None
    )
    pruned = without(fixtures.eagle3_tensors(), "lm_head.weight")
    path = fixtures.write(tmp_path / "pruned", pruned, fixtures.LLAMA)
    refused(target, path, "eagle3", "lacks lm_head.weight, and its vocabulary is pruned")
    path = fixtures.write(tmp_path / "config", whole, fixtures.LLAMA | {"draft_vocab_size": 100})
    refused(target, path, "eagle3", "lacks lm_head.weight, and its vocabulary is pruned")


def test_draft_vocabulary_maps(target, tmp_path):
    """d2t holds offsets; a map that is not sound as such is refused, with the reading that is."""
    tensors, ids = fixtures.eagle3_tensors(), fixtures.draft_ids()
    path = fixtures.write_eagle3(tmp_path / "offset", tensors)
    assert np.array_equal(plan(target, f"eagle3={path}").ids, ids)
    absolute = fixtures.write_eagle3(tmp_path / "absolute", tensors | {"d2t": ids})
    refused(target, absolute, "eagle3", "d2t .* add the option map=absolute")
    assert np.array_equal(plan(target, f"eagle3={absolute},map=absolute").ids, ids)
    path = fixtures.write_eagle3(tmp_path / "none", without(tensors, "d2t", "t2d"))
    refused(target, path, "eagle3", "no d2t")
    path = fixtures.write_eagle3(tmp_path / "other", tensors | {"t2d": np.roll(tensors["t2d"], 1)})
    refused(target, path, "eagle3", "t2d name different ids")
    path = fixtures.write_eagle3(tmp_path / "short", tensors | {"d2t": tensors["d2t"][:-1]})
    refused(target, path, "eagle3", r"d2t has the shape \[127\], expected \[128\]")


def test_taps(target, tmp_path):
    """Default, listed as outputs, listed as inputs, forced."""
    tensors = fixtures.eagle3_tensors()

    def taps(options="", **config):
        path = fixtures.write_eagle3(tmp_path / "head", tensors, **config)
        return plan(target, f"eagle3={path}{options}").taps

    assert taps() == (2, 3, 3)
    assert taps(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}) == (2, 3, 3)
    assert taps(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}) == (1, 3, 5)
    assert taps(",taps=0:4:6") == (0, 4, 6)
    with pytest.raises(CompileError, match="expected 2"):
        taps(",taps=1:2")
    with pytest.raises(CompileError, match="use_aux_hidden_state"):
        taps(eagle_config={"use_aux_hidden_state": False})


def test_norm_before_residual_by_layout(target, tmp_path):
    tensors = fixtures.eagle3_tensors()
    path = fixtures.write_eagle3(tmp_path / "a", tensors)
    assert plan(target, f"eagle3={path}").spec.norm_before_residual is False
    assert plan(target, f"eagle3={path},norm_before_residual=true").spec.norm_before_residual is True
    path = fixtures.write_eagle3(tmp_path / "b", tensors, speculators_model_type="eagle3")
    assert plan(target, f"eagle3={path}").spec.norm_before_residual is True
    with pytest.raises(CompileError, match="expected true or false"):
        plan(target, f"eagle3={path},norm_before_residual=yes")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 2.0},
    ],
)  # fmt: skip
def test_rope_of_heads(tmp_path, rope):
    """D03, D08: a head that names no scaling of its own takes the target's, and its reach; its own comes first."""
    target = write_tiny_checkpoint(tmp_path / "target", "llama", layers=6, rope_scaling=rope)
    path = fixtures.write_eagle3(tmp_path / "head")
    config, theirs = plan(target, f"eagle3={path}").spec.config, open_checkpoint(target).config
    assert config.rope == theirs.rope and config.rope.kind == rope["rope_type"]
    assert config.max_position == theirs.max_position == 512
    path = fixtures.write_eagle3(tmp_path / "own", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert plan(target, f"eagle3={path}").spec.config.rope.parameters["factor"] == 8.0


def test_biases_are_never_dropped(target, tmp_path):
    """D06: a config without `bias` means that fc has one; q, k and v have all or none."""
    tensors = fixtures.eagle_tensors()
    path = fixtures.write(tmp_path / "a", without(tensors, "fc.bias"), fixtures.LLAMA)
    refused(target, path, "eagle", "lacks fc.bias")
    path = fixtures.write_eagle(tmp_path / "b", without(tensors, "layers.0.self_attn.k_proj.bias"))
    refused(target, path, "eagle", "lacks layers.0.self_attn.k_proj.bias")
    path = fixtures.write_eagle(tmp_path / "c", without(tensors, "fc.bias"))
    assert plan(target, f"eagle={path}").spec.tensors.get("fc.bias") is None


@pytest.mark.parametrize("name", sorted(without(fixtures.eagle_tensors(bias=False))))
def test_eagle_needs_every_tensor(target, tmp_path, name):
    path = fixtures.write(tmp_path, without(fixtures.eagle_tensors(), name), fixtures.LLAMA)
    refused(target, path, "eagle", name.replace(".", r"\."))


def test_eagle_of_another_vocabulary(target, tmp_path):
    tensors = fixtures.eagle_tensors() | {"embed_tokens.weight": np.zeros((300, HIDDEN), np.float32)}
    path = fixtures.write_eagle(tmp_path, tensors)
    refused(target, path, "eagle", r"embed_tokens.weight has the shape \[300, 64\], expected \[512, 64\]")


def test_medusa(target, tmp_path):
    """D07: heads are counted in the file; a tree deeper than they are is refused."""
    tensors = fixtures.medusa_tensors()
    prefixed = {f"medusa_head.{name}": value for name, value in tensors.items()}
    path = fixtures.write(tmp_path / "v1", prefixed, {"medusa_num_heads": 7}, "medusa_lm_head.safetensors")
    made = plan(target, f"medusa={path}")
    assert len(made.spec.lm_heads) == 3 and made.spec.blocks == 2 and made.options["depth"] == 3
    refused(target, path, "medusa", "5 deep, but .* holds 3 heads", ",depth=5")
    two = fixtures.write(tmp_path / "two", fixtures.medusa_tensors(heads=2), {}, "medusa_lm_head.safetensors")
    refused(target, two, "medusa", "3 deep, but .* holds 2 heads", ",tree=chain-and-siblings")
    refused(target, path, "medusa", "Profile 'none-such'", ",tree=none-such")
    path = fixtures.write(tmp_path / "torn", without(tensors, "1.1.linear.bias"), {})
    refused(target, path, "medusa", r"lacks 1\.1\.linear\.bias")
    path = fixtures.write(tmp_path / "small", tensors | {"0.2.weight": np.zeros((300, HIDDEN), np.float32)}, {})
    refused(target, path, "medusa", r"0.2.weight has the shape \[300, 64\], expected \[512, 64\]")
    path = fixtures.write(tmp_path / "shared", fixtures.medusa_tensors(own=False), {"medusa_num_heads": 3})
    refused(target, path, "medusa", r"lacks 0\.2\.weight")


def test_medusa_from_torch(target, tmp_path):
    """.pt files as the authors publish them; pickles that hold code are refused."""
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(value) for name, value in fixtures.medusa_tensors().items()}
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    assert len(plan(target, f"medusa={tmp_path}/medusa_lm_head.pt").spec.lm_heads) == 3

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "gone-off"), "w"))

    (tmp_path / "bomb.pt").write_bytes(pickle.dumps({"0.0.linear.weight": Bomb()}))
    with pytest.raises(CheckpointError, match="never run"):
        plan(target, f"medusa={tmp_path}/bomb.pt")
    assert not (tmp_path / "gone-off").exists()


def test_mtp(target, tmp_path):
    refused(target, "somewhere", "mtp", "takes no source")
    with pytest.raises(CompileError, match=r"expected model.mtp_layers.0.input_proj.weight or model.layers.6.eh_proj"):
        plan(target, "mtp")
    tensors = without(fixtures.mimo_tensors(), "model.mtp_layers.0.final_layernorm.weight")
    torn = write_tiny_checkpoint(tmp_path / "torn", "llama", extra_tensors=tensors)
    with pytest.raises(CompileError, match=r"lacks final_layernorm\.weight"):
        plan(torn, "mtp")
    whole = write_tiny_checkpoint(tmp_path / "whole", "llama", extra_tensors=fixtures.mimo_tensors(layers=2))
    assert len(plan(whole, "mtp").specs) == 2


def test_a_head_of_a_damaged_file(target, tmp_path):
    fixtures.write_eagle3(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(target, tmp_path, "eagle3", "truncated or damaged")
    (tmp_path / "model.safetensors").unlink()
    refused(target, tmp_path, "eagle3", "no weights found")
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    refused(target, tmp_path, "eagle3", "lacks fc.weight")
