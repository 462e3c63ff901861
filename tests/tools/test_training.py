"""Drafter training on tiny targets: hidden states, unrolling, resuming, and the files it writes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file
from torch.nn import functional as F

from specbuild.checkpoint import open_checkpoint
from specrun.drafters.ngram_table import NgramTable
from tests.builder.tiny import write_tiny_checkpoint
from tools.train import shards
from tools.train.corpus import Corpus
from tools.train.drafters import KINDS, Eagle, Eagle3
from tools.train.export import write
from tools.train.generate import Generator, Warp
from tools.train.loop import Plan, Progress, Trainer
from tools.train.objective import Acceptance, Vocabulary, depth_losses, total_loss
from tools.train.shards import HiddenCache
from tools.train.target import Target, default_taps, load_target
from tools.train_drafter import main

VOCABULARY = 512


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", layers=6, tie=True)


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    return load_target(tiny, torch.float32)[0]


def conversations(count: int, seed: int = 0) -> Corpus:
    random = np.random.default_rng(seed)
    lengths = random.integers(8, 24, count)
    return Corpus.of((random.integers(3, VOCABULARY, length).tolist(), 4) for length in lengths)


def trainer_for(target: Target, kind: str, folder: Path, **plan: float) -> Trainer:
    torch.manual_seed(1)
    cache = HiddenCache(folder / "hidden", [conversations(48)])
    cache.fill(target, lambda done, total: None)
    settings = {"tokens": 2400, "batch_tokens": 200, "vocabulary": 64, "report_seconds": 1e9, **plan}
    return Trainer(KINDS[kind].make(target), KINDS[kind], cache, Plan(**settings), folder / kind)


# ---- the target


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "smollm3"])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = write_tiny_checkpoint(tmp_path, family, layers=6)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    target, _ = load_target(tiny, torch.float32)
    tokens = torch.randint(3, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        reference = model(tokens, output_hidden_states=True)
    taps = default_taps(target.config)
    assert taps == (2, 3, 3)
    states = target.hidden_states(tokens, taps)
    for layer, state in zip(taps, states, strict=False):
        torch.testing.assert_close(state, reference.hidden_states[layer], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(F.linear(states[-1], target.lm_head), reference.logits, rtol=1e-3, atol=1e-3)


def test_batched_greedy_text_is_that_of_one_row_at_a_time(target: Target) -> None:
    prompts = [[5, 9, 11, 40], [7], [301, 22, 8, 8, 90, 14, 33]]
    stop = 2
    batched = dict(Generator(target, [stop], Warp()).run(prompts, limit=12))
    for index, prompt in enumerate(prompts):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 12 and tokens[-1] != stop:
            final = target.hidden_states(torch.tensor([tokens]), ())[-1]
            tokens.append(int(F.linear(final[0, -1], target.lm_head).argmax()))
        assert batched[index] == tokens[len(prompt) :]


def test_sampling_stays_in_the_nucleus() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.08, 0.02]])).expand(500, 4)
    picked = Warp(1.0, 0.8).pick(logits, torch.Generator().manual_seed(0))
    assert set(picked.tolist()) == {0, 1}
    assert 0.58 < float((picked == 0).float().mean()) < 0.75


# ---- the cache of hidden states


def test_cached_states_are_the_targets_and_are_computed_once(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CONVERSATIONS", 8)
    first, second = conversations(20, seed=1), conversations(5, seed=2)
    HiddenCache(tmp_path, [first]).fill(target, lambda done, total: None)
    files = set(tmp_path.iterdir())
    both = HiddenCache(tmp_path, [first, second])
    both.fill(target, lambda done, total: None)
    assert files < set(tmp_path.iterdir())
    monkeypatch.setattr(both, "_write", lambda *args: pytest.fail("computed again"))
    both.fill(target, lambda done, total: None)
    rows = both.batch([3, 21])
    for row, index in enumerate((3, 21)):
        tokens = torch.from_numpy(both.corpus[index].astype(np.int64))
        direct = torch.stack(target.hidden_states(tokens[None], default_taps(target.config)), 2)[0]
        assert int(rows.real[row].sum()) == len(tokens)
        torch.testing.assert_close(rows.hidden[row, : len(tokens)].float(), direct, rtol=2e-2, atol=2e-2)


# ---- unrolling


def rows_of(target: Target, count: int) -> shards.Rows:
    tokens = torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(3))
    hidden = torch.stack(target.hidden_states(tokens, default_taps(target.config)), 2)
    return shards.Rows(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([1]), hidden)


@pytest.mark.parametrize("kind", [Eagle3, Eagle])
def test_unrolled_features_are_those_of_drafting_step_by_step(target: Target, kind: type) -> None:
    """Each draft of the unrolled pass equals one made alone: context rows from the target, then own outputs."""
    torch.manual_seed(0)
    drafter, rows = kind(target), rows_of(target, 9)
    with torch.no_grad():
        unrolled = drafter.features(rows, 3)
        for at in (0, 4, 6):
            drafted = stepwise(drafter, rows, at, depth=3)
            for step in range(min(3, 8 - at)):
                torch.testing.assert_close(unrolled[step][0, at], drafted[step], rtol=1e-4, atol=1e-4)


def stepwise(drafter: Eagle3 | Eagle, rows: shards.Rows, at: int, depth: int) -> list[torch.Tensor]:
    """An inference loop written for this test: explicit attention over a growing list of cached rows."""
    layer = drafter.midlayer if isinstance(drafter, Eagle3) else drafter.layers[0]
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs, own = [], torch.empty(0)
    for position in range(min(at + depth, rows.tokens.shape[1] - 1)):
        embedding = drafter.embed(rows.tokens[0, position + 1])
        if isinstance(drafter, Eagle3):
            taps = rows.hidden[0, position, :3].flatten()
            feature = own if position > at else drafter.fc(taps)
            x = torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(feature)))
        else:
            feature = drafter.fc(torch.cat((embedding, own if position > at else rows.hidden[0, position, -1])))
            x = feature
        own = feature + attend(layer.self_attn, x, position, drafter, cache)
        own = own + layer.mlp(layer.post_attention_layernorm(own))
        if position >= at:
            outputs.append(drafter.norm(own) if isinstance(drafter, Eagle3) else own)
    return outputs


def attend(attention, x, position, drafter, cache) -> torch.Tensor:  # type: ignore[no-untyped-def]
    heads, kv_heads, size = drafter.config.num_heads, drafter.config.num_kv_heads, drafter.config.head_dim
    angle = position * 10000.0 ** (-torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(projected: torch.Tensor, count: int) -> torch.Tensor:
        low, high = projected.view(count, size).chunk(2, -1)
        turned = torch.complex(low, high) * turn
        return torch.cat((turned.real, turned.imag), -1)

    q = rotated(attention.q_proj(x), heads)
    cache.append((rotated(attention.k_proj(x), kv_heads), attention.v_proj(x).view(kv_heads, size)))
    mixed = []
    for head in range(heads):
        group = head * kv_heads // heads
        keys, values = (torch.stack([row[part][group] for row in cache]) for part in (0, 1))
        mixed.append((keys @ q[head] / size**0.5).softmax(0) @ values)
    return attention.o_proj(torch.cat(mixed))


def test_a_drafter_that_is_the_target_is_always_accepted(target: Target) -> None:
    """Acceptance counts positions as decoding does: the oracle hits all of a greedy text, little of another."""
    prompt = [5, 9, 11, 40, 77]
    answer = dict(Generator(target, [], Warp()).run([prompt], limit=20))[0]
    tokens = torch.tensor([prompt + answer])
    final = target.hidden_states(tokens, ())[-1]
    rows = shards.Rows(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([5]), final[:, :, None])
    vocabulary = Vocabulary(torch.arange(VOCABULARY), target.lm_head)

    class Oracle:
        def features(self, rows: shards.Rows, depth: int) -> list[torch.Tensor]:
            return [torch.roll(final, -(step + 1), 1) for step in range(depth)]

    acceptance = Acceptance.none(3)
    acceptance.add(Oracle(), rows, vocabulary)  # type: ignore[arg-type]
    assert acceptance.positions.tolist() == [19, 18, 17]
    assert acceptance.by_depth() == [1.0, 1.0, 1.0]
    assert acceptance.accepted() == pytest.approx([1.0, 2.0, 3.0])
    other = torch.randint(3, VOCABULARY, tokens.shape, generator=torch.Generator().manual_seed(0))
    acceptance.add(Oracle(), dataclasses.replace(rows, tokens=other), vocabulary)  # type: ignore[arg-type]
    assert acceptance.by_depth()[0] < 0.7


# ---- the loop


def mean_loss(trainer: Trainer) -> float:
    rows = trainer.cache.batch(trainer.training[:24])
    vocabulary = Vocabulary(torch.arange(VOCABULARY), trainer.drafter.frozen[1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return float(total_loss(depth_losses(trainer.drafter, rows, vocabulary, 2)))


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_learns(target: Target, tmp_path: Path, kind: str) -> None:
    trainer = trainer_for(target, kind, tmp_path)
    before = mean_loss(trainer)
    trainer.run(lambda progress: None)
    assert mean_loss(trainer) < 0.99 * before
    log = [json.loads(line) for line in trainer.log.read_text().splitlines()]
    assert log[-1]["tokens"] >= trainer.plan.tokens and len(log[-1]["acceptance"]) == 4


class Killed(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_weights(target: Target, tmp_path: Path) -> None:
    whole = trainer_for(target, "draft-model", tmp_path / "whole")
    whole.run(lambda progress: None)

    def kill(progress: Progress) -> None:
        if progress.step == 6:
            raise Killed

    broken = trainer_for(target, "draft-model", tmp_path / "broken", checkpoint_seconds=0.0)
    with pytest.raises(Killed):
        broken.run(kill)
    resumed = trainer_for(target, "draft-model", tmp_path / "broken")
    steps: list[int] = []
    resumed.run(lambda progress: steps.append(progress.step))
    assert steps[0] == 7
    for name, weight in whole.drafter.state_dict().items():
        assert torch.equal(weight, resumed.drafter.state_dict()[name]), name


# ---- the files


def test_eagle3_files_have_the_public_layout(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, "eagle3", tmp_path)
    write(trainer.drafter, trainer.draft_ids, "tiny", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = np.arange(64) + weights["d2t"]
    assert np.array_equal(np.flatnonzero(weights["t2d"]), ids)
    assert weights["fc.weight"].shape == (64, 192) and weights["fc.weight"].dtype == np.float16
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    np.testing.assert_allclose(weights["lm_head.weight"], target.lm_head[ids].numpy(), rtol=1e-3, atol=1e-3)
    assert config["draft_vocab_size"] == 64 and config["norm_before_residual"] is False
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    assert not any("embed" in name for name in weights)


def test_the_other_files_have_the_public_layouts(target: Target, tmp_path: Path) -> None:
    names = {}
    for kind, file in (("medusa", "medusa_lm_head"), ("draft-model", "model"), ("eagle", "model")):
        write(KINDS[kind].make(target), torch.arange(4), "tiny", tmp_path / kind)
        names[kind] = set(load_file(tmp_path / kind / f"{file}.safetensors"))
    assert names["medusa"] == {f"{head}.0.linear.{part}" for head in range(4) for part in ("weight", "bias")}
    assert {"model.norm.weight", "model.layers.1.self_attn.q_proj.weight"} < names["draft-model"]
    assert not any("embed" in name or "lm_head" in name for name in names["draft-model"])
    assert {"fc.weight", "layers.0.post_attention_layernorm.weight"} < names["eagle"]
    assert "layers.0.input_layernorm.weight" not in names["eagle"] and "norm.weight" not in names["eagle"]
    assert json.loads((tmp_path / "draft-model" / "config.json").read_text())["borrow_embeddings"] is True


def test_a_written_draft_model_is_a_llama(tiny: Path, target: Target, tmp_path: Path) -> None:
    """With the target's embedding put in, the folder opens as an ordinary checkpoint and computes the same."""
    from safetensors.numpy import save_file

    torch.manual_seed(0)
    drafter = KINDS["draft-model"].make(target)
    write(drafter, torch.arange(4), "tiny", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = open_checkpoint(tiny).tensors["model.embed_tokens.weight"].read_float32().astype(np.float16)
    save_file(weights | {"model.embed_tokens.weight": embedding}, tmp_path / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tiny / name).exists():
            (tmp_path / name).write_bytes((tiny / name).read_bytes())
    loaded, _ = load_target(tmp_path, torch.float32)
    rows = rows_of(target, 9)
    with torch.no_grad():
        expected = drafter.features(rows, 1)[0][0, :-1]
    torch.testing.assert_close(loaded.hidden_states(rows.tokens, ())[-1][0, 1:], expected, rtol=2e-2, atol=2e-2)


# ---- the command


def test_the_command_generates_trains_and_writes(tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"question number {i}"}) for i in range(12)))
    out = tmp_path / "out"
    command = [str(tiny), "--kind", "eagle3", "-o", str(out), "--prompts", str(prompts), "--self-written", "6"]
    settings = ["--tokens", "600", "--answer-tokens", "12", "--draft-vocabulary", "64", "--measure", str(prompts)]
    result = CliRunner().invoke(main, [*command, *settings])
    assert result.exit_code == 0, result.output
    assert load_file(out / "model.safetensors")["d2t"].shape == (64,)
    accuracy = json.loads((out / "accuracy.json").read_text())
    assert len(accuracy["by_rank"][0]) == 8
    card = (out / "card.md").read_text()
    assert "## Acceptance" in card and "| prompts | " in card and "python -m tools.train_drafter" in card
    again = CliRunner().invoke(
        main, [str(tiny), "--kind", "ngram", "-o", str(tmp_path / "table"), "--data", str(out / "work" / "data")]
    )
    assert again.exit_code == 0, again.output
    table = NgramTable.load(tmp_path / "table" / "ngram.safetensors", VOCABULARY)
    text = Corpus.read(out / "work" / "data" / "answers_00000.npz")[0].tolist()
    assert any(table.lookup(tuple(text[at - 3 : at]))[0] for at in range(len(text) - 8, len(text)))


def test_nothing_to_train_on_is_an_error_that_says_what_to_give(tiny: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tiny), "--kind", "medusa", "-o", str(tmp_path / "out")])
    assert result.exit_code == 2 and "--prompts" in result.output


def test_a_bad_prompt_line_is_named(tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "bad.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"question": "not a prompt"}\n')
    arguments = [str(tiny), "--kind", "medusa", "-o", str(tmp_path / "out"), "--prompts", str(prompts)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "line 2" in result.output


def test_without_torch_the_extra_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, [str(tiny), "--kind", "medusa", "-o", str(tmp_path / "out")])
    assert result.exit_code == 2 and "specbuild[train]" in result.output
